"""The fake member says what the real engines say: everything else here rests on it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai

from fakemembers import PYTHON_ENV, EventLog, is_alive, until
from modelpool_router.testing.member_answers import LOADING


class Running:
    """A fake member that listens."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, log: EventLog) -> None:
        self.process = process
        self.port = port
        self.log = log
        self.base = f"http://127.0.0.1:{port}"

    async def debug(self, what: str) -> Any:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{self.base}/debug/{what}") as answer:
                return await answer.json()

    async def raw(self, data: bytes) -> bytes:
        """Send bytes, return everything until the member closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        try:
            return await asyncio.wait_for(reader.read(), 10)
        finally:
            writer.close()
            await writer.wait_closed()


@asynccontextmanager
async def running(folder: Path, *flags: str, wait: str = "ready") -> AsyncIterator[Running]:
    with socket.create_server(("127.0.0.1", 0)) as chosen:
        port = chosen.getsockname()[1]
    log = EventLog(folder / "events.jsonl")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "modelpool_router.testing.member", "--port", str(port), "--name", "alpha"),
        *("--log", str(log.path), *flags),
        env={**os.environ, **PYTHON_ENV},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await log.wait_for(wait)
        yield Running(process, port, log)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def post(path: str, body: bytes, *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *more, "", ""]
    return "\r\n".join(lines).encode() + body


async def test_the_openai_sdk_understands_every_answer(tmp_path: Path) -> None:
    async with running(tmp_path) as member:
        async with openai.AsyncOpenAI(base_url=f"{member.base}/v1", api_key="x") as client:
            whole = await client.chat.completions.create(
                model="alpha", messages=[{"role": "user", "content": "hi"}]
            )
            pieces = []
            used = None
            stream = await client.chat.completions.create(
                model="alpha",
                messages=[{"role": "user", "content": "hi"}],
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"x_chunks": 20},
            )
            async for chunk in stream:
                pieces += [choice.delta.content for choice in chunk.choices]
                used = chunk.usage or used
            text = await client.completions.create(model="alpha", prompt="hi")
            reply = await client.responses.create(model="alpha", input="hi")
            kinds = [
                event.type
                async for event in await client.responses.create(
                    model="alpha", input="hi", stream=True
                )
            ]
            vectors = await client.embeddings.create(model="alpha", input=["a", "b"])
            heard = await client.audio.transcriptions.create(model="alpha", file=b"RIFF")
            listed = [model.id async for model in client.models.list()]

    assert whole.choices[0].message.content == "alpha: I hold the slot now and the"
    assert sum(piece is not None for piece in pieces) == 20
    assert used is not None
    assert used.completion_tokens == 20
    assert text.choices[0].text.startswith("alpha:")
    assert reply.output_text == whole.choices[0].message.content
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert [len(item.embedding) for item in vectors.data] == [4, 4]
    assert heard.text.startswith("alpha:")
    assert listed == ["alpha"]


async def test_the_anthropic_sdk_understands_every_answer(tmp_path: Path) -> None:
    async with running(tmp_path) as member:
        async with anthropic.AsyncAnthropic(base_url=member.base, api_key="x") as client:
            asked: Any = {
                "model": "alpha",
                "max_tokens": 9,
                "messages": [{"role": "user", "content": "hi"}],
            }
            whole = await client.messages.create(**asked)
            async with client.messages.stream(**asked) as stream:
                text = "".join([piece async for piece in stream.text_stream])
            counted = await client.messages.count_tokens(model="alpha", messages=asked["messages"])

    assert whole.content[0].to_dict()["text"] == text == "alpha: I hold the slot now and the"
    assert counted.input_tokens == 7


async def test_every_path_says_loading_while_it_loads(tmp_path: Path) -> None:
    async with running(tmp_path, "--never-ready", wait="listening") as member:
        got = await member.raw(
            b"GET /health HTTP/1.1\r\n\r\nGET /v1/models HTTP/1.1\r\n\r\n"
            + post("/v1/chat/completions", b"{}", "Connection: close")
        )

    assert got.count(b"HTTP/1.1 503 ") == 3
    assert got.count(LOADING) == 3


async def test_a_connection_is_dropped_after_a_stream_without_a_word(tmp_path: Path) -> None:
    async with running(tmp_path) as member:
        got = await member.raw(post("/v1/chat/completions", b'{"stream":true}'))

    assert b"connection: close" not in got.lower()
    assert got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_every_request_is_recorded_as_it_came(tmp_path: Path) -> None:
    body = b'{"model": "m", "x_chunks": 1}'
    chunked = b"5\r\n" + body[:5] + b"\r\n%x\r\n" % (len(body) - 5) + body[5:] + b"\r\n0\r\n\r\n"
    head = b"POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\nX-A:  b \r\n\r\n"
    async with running(tmp_path) as member:
        await member.raw(head + chunked + post("/echo/me", b"raw", "Connection: close"))
        first, second = await member.debug("requests")

    assert base64.b64decode(first["head_b64"]) == head
    assert first["body_sha256"] == hashlib.sha256(body).hexdigest()
    assert first["model"] == "m"
    assert second["target"] == "/echo/me"
    assert first["connection"] == second["connection"]
    assert first["arrived"] <= first["body_at"] <= first["first_byte_at"] <= first["finished_at"]


async def test_a_client_that_leaves_stops_the_generation(tmp_path: Path) -> None:
    body = json.dumps({"stream": True, "x_chunks": 100_000, "x_gap_ms": 5}).encode()
    async with running(tmp_path) as member:
        reader, writer = await asyncio.open_connection("127.0.0.1", member.port)
        writer.write(post("/v1/chat/completions", body))
        await reader.readuntil(b"alpha:")
        left_at = asyncio.get_running_loop().time()
        writer.close()
        await writer.wait_closed()

        async def stopped() -> bool:
            return not (await member.debug("stats"))["running"]

        await until(stopped, "the generation ends")
        (seen,) = await member.debug("requests")

    assert seen["finished_at"] is None
    assert seen["disconnected_at"] is not None and seen["disconnected_at"] >= left_at


async def test_more_requests_than_slots_wait_their_turn(tmp_path: Path) -> None:
    async with running(tmp_path, "--parallel", "2") as member, aiohttp.ClientSession() as session:

        async def ask() -> int:
            body = {"x_delay_ms": 50}
            async with session.post(f"{member.base}/v1/completions", json=body) as answer:
                return answer.status

        statuses = await asyncio.gather(*[ask() for _ in range(6)])
        stats = await member.debug("stats")

    assert statuses == [200] * 6
    assert stats["peak"] == 2
    assert stats["running"] == stats["waiting"] == 0


async def test_single_requests_can_be_scripted(tmp_path: Path) -> None:
    async with running(tmp_path) as member:
        status = await member.raw(
            post(
                "/v1/chat/completions",
                b'{"x_status":429,"x_headers":{"Retry-After":"3"}}',
                "Connection: close",
            )
        )
        dropped = await member.raw(
            post("/v1/chat/completions", b'{"stream":true,"x_drop_after":2,"x_gap_ms":1}')
        )
        spoken = await member.raw(
            post("/v1/chat/completions", b'{"x_text":"to be or"}', "Connection: close")
        )

    assert status.startswith(b"HTTP/1.1 429 ")
    assert b"\r\nRetry-After: 3\r\n" in status
    assert dropped.count(b'"content":"') == 2
    assert b"[DONE]" not in dropped
    assert b'"content":"to be or"' in spoken


async def test_it_dies_in_the_middle_of_a_stream_when_told(tmp_path: Path) -> None:
    async with running(tmp_path) as member:
        got = await member.raw(
            post("/v1/chat/completions", b'{"stream":true,"x_die_after":3,"x_gap_ms":1}')
        )
        code = await member.process.wait()

    assert got.count(b'"content":"') == 3
    assert code == 1


async def test_an_early_reply_does_not_read_the_body(tmp_path: Path) -> None:
    async with running(tmp_path, "--early-reply", "413") as member:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n"
        got = await member.raw(head)

    assert got.startswith(b"HTTP/1.1 413 ")


async def test_expect_continue_is_answered(tmp_path: Path) -> None:
    async with running(tmp_path) as member:
        got = await member.raw(
            post("/tokenize", b'{"content":"a b"}', "Expect: 100-continue", "Connection: close")
        )

    assert got.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
    assert got.endswith(b'{"tokens":[0,1]}')


async def test_a_busy_term_cuts_streams_and_lingers(tmp_path: Path) -> None:
    async with running(tmp_path, "--busy-term", "--term-linger", "60") as member:
        reader, writer = await asyncio.open_connection("127.0.0.1", member.port)
        writer.write(post("/v1/chat/completions", b'{"stream":true,"x_chunks":9999,"x_gap_ms":5}'))
        await reader.readuntil(b"alpha:")

        member.process.send_signal(signal.SIGTERM)
        rest = await asyncio.wait_for(reader.read(), 10)
        assert b"[DONE]" not in rest
        assert is_alive(member.process.pid)
        member.process.send_signal(signal.SIGTERM)

        assert await asyncio.wait_for(member.process.wait(), 10) == 1
        writer.close()


async def test_the_lock_is_held_by_all_that_is_left_of_a_member(tmp_path: Path) -> None:
    lock = ("--lock", str(tmp_path / "lock"))
    async with running(tmp_path, *lock, "--grandchild") as first:
        grandchild = (await first.log.wait_for("grandchild"))["pid"]
        first.process.kill()
        await first.process.wait()

        async with running(tmp_path, *lock, wait="lock_refused") as second:
            assert await second.process.wait() == 3

        os.kill(grandchild, signal.SIGKILL)
        await until(lambda: not is_alive(grandchild), "the grandchild is dead")
        async with running(tmp_path, *lock, wait="lock_taken"):
            pass


async def test_knobs_can_be_set_by_the_environment(tmp_path: Path) -> None:
    env = {**os.environ, **PYTHON_ENV, "MEMBER_EXIT_AT_START": "42"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "modelpool_router.testing.member"),
        env=env,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )

    assert await process.wait() == 42
