"""
What the fake member says: bodies and stream events per path. Pure; no sockets, no clock.

`answer` builds a whole body, `events` the pieces of a stream: first those before the first token,
then one per token, then those after the last.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

LOADING = b'{"error":{"message":"Loading model","code":503,"type":"unavailable_error"}}'
"""Byte for byte what llama-server answers while it loads."""

_WORDS = "I hold the slot now and the others wait for their turn .".split()


@dataclass(frozen=True, slots=True)
class Script:
    """How one request is to be answered: the member's knobs with the request's overrides."""

    chunks: int
    gap_s: float
    delay_s: float
    chunk_bytes: int
    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    die_after: int = -1
    drop_after: int = -1
    crash: bool = False
    hang: bool = False
    text: str | None = None
    stream: bool = False
    usage: bool = False

    def tokens(self, name: str) -> list[str]:
        """The answer, token by token."""
        if self.text is not None:
            words = self.text.split(" ")
            tokens = [word if at == 0 else " " + word for at, word in enumerate(words)]
        else:
            tokens = [
                f"{name}:" if at == 0 else " " + _WORDS[(at - 1) % len(_WORDS)]
                for at in range(self.chunks)
            ]
        return [token.ljust(self.chunk_bytes, ".") for token in tokens]


@dataclass(frozen=True, slots=True)
class Events:
    """One event stream in three parts; every item is a complete SSE event."""

    before: Sequence[bytes]
    tokens: Sequence[bytes]
    after: Sequence[bytes]


def sse(data: object, event: str = "") -> bytes:
    """One SSE event; *data* is sent as JSON unless it is a string."""
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {text}\n\n".encode()


def family(path: str) -> str:
    """Which shape of answer *path* has: ``chat``, ``completions``, ``messages`` ..."""
    return _FAMILIES.get(path, "audio" if path.startswith("/v1/audio/") else "echo")


_FAMILIES = {
    "/v1/chat/completions": "chat",
    "/chat/completions": "chat",
    "/v1/completions": "completions",
    "/completions": "completions",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "count_tokens",
    "/v1/responses": "responses",
    "/v1/embeddings": "embeddings",
    "/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/rerank": "rerank",
    "/v1/reranking": "rerank",
    "/reranking": "rerank",
    "/completion": "native",
    "/infill": "native",
    "/tokenize": "tokenize",
    "/v1/audio/speech": "speech",
    "/v1/images/generations": "images",
    "/v1/images/edits": "images",
}

STREAMED = frozenset({"chat", "completions", "messages", "responses", "native"})


def answer(kind: str, *, name: str, body: Json, serial: int, tokens: Sequence[str]) -> Json:
    """The whole answer of a path of *kind* to *body*, as a JSON object."""
    text = "".join(tokens)
    model = body.get("model", name)
    used = {"prompt_tokens": 7, "completion_tokens": len(tokens), "total_tokens": 7 + len(tokens)}
    match kind:
        case "chat":
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return _openai(serial, "chat.completion", model, [choice], used)
        case "completions":
            choice = {"index": 0, "text": text, "finish_reason": "stop", "logprobs": None}
            return _openai(serial, "text_completion", model, [choice], used)
        case "messages":
            return _message(
                serial, model, [{"type": "text", "text": text}], "end_turn", len(tokens)
            )
        case "count_tokens":
            return {"input_tokens": 7}
        case "responses":
            return _response(serial, model, "completed", [_output(serial, text)], len(tokens))
        case "embeddings":
            return _embeddings(body, model)
        case "rerank":
            documents = body.get("documents", [])
            results = [
                {"index": at, "relevance_score": round(1.0 / (at + 1), 4)}
                for at in range(len(documents))
            ]
            return {"model": model, "object": "list", "results": results, "usage": used}
        case "native":
            return {"content": text, "stop": True, "model": name, "tokens_predicted": len(tokens)}
        case "tokenize":
            return {"tokens": list(range(len(str(body.get("content", "")).split())))}
        case "images":
            return {"created": 1, "data": [{"b64_json": base64.b64encode(text.encode()).decode()}]}
        case "audio":
            return {"text": text, "model": model}
        case _:
            return {"echo": True, "model": model}


def events(kind: str, *, name: str, body: Json, serial: int, script: Script) -> Events:
    """The stream of a path of *kind* (one of `STREAMED`)."""
    tokens = script.tokens(name)
    model = body.get("model", name)
    match kind:
        case "chat":
            return _chat_events(serial, model, tokens, usage=script.usage)
        case "completions":
            pieces = [
                sse(_openai(serial, "text_completion", model, [{"index": 0, "text": token}], None))
                for token in tokens
            ]
            return Events([], pieces, [sse("[DONE]")])
        case "messages":
            return _message_events(serial, model, tokens)
        case "responses":
            return _response_events(serial, model, tokens)
        case _:
            pieces = [sse({"content": token, "stop": False}) for token in tokens]
            return Events([], pieces, [sse({"content": "", "stop": True, "model": name})])


def _openai(serial: int, kind: str, model: object, choices: list[Json], usage: Json | None) -> Json:
    built = {"id": f"fake-{serial}", "object": kind, "created": 1, "model": model}
    built["choices"] = choices
    if usage is not None:
        built["usage"] = usage
    return built


def _chat_events(serial: int, model: object, tokens: Sequence[str], *, usage: bool) -> Events:
    def chunk(delta: Json, finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return sse(_openai(serial, "chat.completion.chunk", model, [choice], None))

    after = [chunk({}, "stop")]
    if usage:
        used = {
            "prompt_tokens": 7,
            "completion_tokens": len(tokens),
            "total_tokens": 7 + len(tokens),
        }
        after.append(sse(_openai(serial, "chat.completion.chunk", model, [], used)))
    return Events(
        [chunk({"role": "assistant", "content": None})],
        [chunk({"content": token}) for token in tokens],
        [*after, sse("[DONE]")],
    )


def _message(serial: int, model: object, content: list[Json], stop: str | None, used: int) -> Json:
    return {
        "id": f"msg_fake{serial}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": stop,
        "stop_sequence": None,
        "usage": {"input_tokens": 7, "output_tokens": used},
    }


def _message_events(serial: int, model: object, tokens: Sequence[str]) -> Events:
    def event(kind: str, **rest: object) -> bytes:
        return sse({"type": kind, **rest}, kind)

    return Events(
        [
            event("message_start", message=_message(serial, model, [], None, 0)),
            event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
            event("ping"),
        ],
        [
            event("content_block_delta", index=0, delta={"type": "text_delta", "text": token})
            for token in tokens
        ],
        [
            event("content_block_stop", index=0),
            event(
                "message_delta",
                delta={"stop_reason": "end_turn", "stop_sequence": None},
                usage={"output_tokens": len(tokens)},
            ),
            event("message_stop"),
        ],
    )


def _output(serial: int, text: str, status: str = "completed") -> Json:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {
        "type": "message",
        "id": f"out_fake{serial}",
        "status": status,
        "role": "assistant",
        "content": [part] if status == "completed" else [],
    }


def _response(serial: int, model: object, status: str, output: list[Json], used: int) -> Json:
    usage = {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": used,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 7 + used,
    }
    return {
        "id": f"resp_fake{serial}",
        "object": "response",
        "created_at": 1,
        "model": model,
        "status": status,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": usage if status == "completed" else None,
    }


def _response_events(serial: int, model: object, tokens: Sequence[str]) -> Events:
    number = 0

    def event(kind: str, **rest: object) -> bytes:
        nonlocal number
        number += 1
        return sse({"type": kind, "sequence_number": number - 1, **rest}, kind)

    text = "".join(tokens)
    where: Json = {"item_id": f"out_fake{serial}", "output_index": 0, "content_index": 0}
    part = {"type": "output_text", "text": text, "annotations": []}
    running = _response(serial, model, "in_progress", [], 0)
    before = [
        event("response.created", response=running),
        event("response.in_progress", response=running),
        event(
            "response.output_item.added", output_index=0, item=_output(serial, "", "in_progress")
        ),
        event("response.content_part.added", **where, part={**part, "text": ""}),
    ]
    pieces = [
        event("response.output_text.delta", **where, delta=token, logprobs=[]) for token in tokens
    ]
    done = _response(serial, model, "completed", [_output(serial, text)], len(tokens))
    after = [
        event("response.output_text.done", **where, text=text, logprobs=[]),
        event("response.content_part.done", **where, part=part),
        event("response.output_item.done", output_index=0, item=_output(serial, text)),
        event("response.completed", response=done),
    ]
    return Events(before, pieces, after)


def _embeddings(body: Json, model: object) -> Json:
    wanted = body.get("input", "")
    inputs = wanted if isinstance(wanted, list) else [wanted]
    vector = [0.25, 0.5, -0.5, 1.0]
    packed: str | list[float] = vector
    if body.get("encoding_format") == "base64":
        packed = base64.b64encode(struct.pack("<4f", *vector)).decode()
    data = [{"object": "embedding", "index": at, "embedding": packed} for at in range(len(inputs))]
    usage = {"prompt_tokens": 7, "total_tokens": 7}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def metrics(running: int, waiting: int) -> bytes:
    """Prometheus text as the engines print it, all of them at once."""
    lines = [
        "# HELP vllm:num_requests_running Number of requests in model execution batches.",
        "# TYPE vllm:num_requests_running gauge",
        f'vllm:num_requests_running{{engine="0",model_name="fake"}} {float(running)}',
        f'vllm:num_requests_waiting{{engine="0",model_name="fake"}} {float(waiting)}',
        f'sglang:num_running_reqs{{model_name="fake"}} {float(running)}',
        f'sglang:num_queue_reqs{{model_name="fake"}} {float(waiting)}',
        f"tgi_batch_current_size {running}",
        f"tgi_queue_size {waiting}",
        f"llamacpp:requests_processing {running}",
        f"llamacpp:requests_deferred {waiting}",
    ]
    return ("\n".join(lines) + "\n").encode()
