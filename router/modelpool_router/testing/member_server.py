"""
The HTTP side of the fake member: connections by hand, so that every odd behaviour can be had.

One `Connection` per socket, one task per connection that reads a request, answers it and goes on.
A client that leaves cancels the task: generation stops at once and the time is recorded.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from . import member_answers as answers
from .member_answers import Json, Script
from .member_knobs import Knobs

_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 429: "Too Many Requests"}
_PAUSE_ABOVE = 1 << 20
_MAX_HEAD = 1 << 16


@dataclass(slots=True)
class Seen:
    """One request as it arrived, and what became of it. Times are monotonic seconds."""

    serial: int
    connection: int
    """Number of the connection; equal numbers mean that it was reused."""
    head: bytes
    method: str
    target: str
    arrived: float
    body_bytes: int = 0
    body_sha256: str = ""
    body_at: float | None = None
    model: object = None
    first_byte_at: float | None = None
    finished_at: float | None = None
    disconnected_at: float | None = None
    tokens_sent: int = 0

    def as_json(self) -> Json:
        """For /debug/requests."""
        return {
            "serial": self.serial,
            "connection": self.connection,
            "head": self.head.decode("latin-1"),
            "head_b64": base64.b64encode(self.head).decode(),
            "method": self.method,
            "target": self.target,
            "arrived": self.arrived,
            "body_bytes": self.body_bytes,
            "body_sha256": self.body_sha256,
            "body_at": self.body_at,
            "model": self.model,
            "first_byte_at": self.first_byte_at,
            "finished_at": self.finished_at,
            "disconnected_at": self.disconnected_at,
            "tokens_sent": self.tokens_sent,
        }


@dataclass(slots=True)
class Engine:
    """What all connections of one fake member share."""

    knobs: Knobs
    crash: Callable[[str], None]
    """Ends the process; does not return."""
    loaded: bool = False
    seen: deque[Seen] = field(default_factory=lambda: deque(maxlen=20_000))
    serial: int = 0
    connections: int = 0
    open: set[Connection] = field(default_factory=set)
    free: list[int] = field(default_factory=list)
    waiting: deque[asyncio.Future[int]] = field(default_factory=deque)
    peak: int = 0
    served: int = 0
    aborted: int = 0
    health_probes: int = 0

    def __post_init__(self) -> None:
        self.free = list(range(self.knobs.parallel))

    @property
    def running(self) -> int:
        """Requests being worked on."""
        return self.knobs.parallel - len(self.free)

    async def take_slot(self) -> int:
        """Wait for a slot, first come first served."""
        if self.free and not self.waiting:
            slot = self.free.pop()
        else:
            turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            self.waiting.append(turn)
            try:
                slot = await turn
            except asyncio.CancelledError:
                if turn in self.waiting:
                    self.waiting.remove(turn)
                elif turn.done() and not turn.cancelled():
                    self.give_slot(turn.result())
                raise
        self.peak = max(self.peak, self.running)
        return slot

    def give_slot(self, slot: int) -> None:
        """Hand *slot* to the next in line, or put it back."""
        while self.waiting:
            turn = self.waiting.popleft()
            if not turn.done():
                turn.set_result(slot)
                return
        self.free.append(slot)

    def stats(self) -> Json:
        """For /debug/stats."""
        return {
            "name": self.knobs.name,
            "running": self.running,
            "waiting": len(self.waiting),
            "peak": self.peak,
            "served": self.served,
            "aborted": self.aborted,
            "seen": self.serial,
            "connections": self.connections,
            "open": len(self.open),
            "health_probes": self.health_probes,
        }


class _Gone(Exception):
    """The connection is over; nothing more to do on it."""


class Connection(asyncio.Protocol):
    """One client connection."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.streaming = False
        self.busy = False
        self._number = 0
        self._buffer = bytearray()
        self._eof = False
        self._more = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._paused = False
        self._seen: Seen | None = None
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None

    @property
    def transport(self) -> asyncio.Transport:
        """The open transport."""
        if self._transport is None:
            raise _Gone
        return self._transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start serving this connection."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.engine.connections += 1
        self._number = self.engine.connections
        self.engine.open.add(self)
        self._task = asyncio.get_running_loop().create_task(self._serve())

    def data_received(self, data: bytes) -> None:
        """Keep *data* for the serving task."""
        self._buffer += data
        self._more.set()
        if len(self._buffer) > _PAUSE_ABOVE and not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def eof_received(self) -> bool:
        """Treat a half-closed client as gone, as llama-server does."""
        self._eof = True
        self._more.set()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop whatever is being generated."""
        self._transport = None
        self.engine.open.discard(self)
        seen = self._seen
        if seen is not None and seen.finished_at is None:
            seen.disconnected_at = time.monotonic()
            self.engine.aborted += 1
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        """The client reads too slowly."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """The client caught up."""
        self._writable.set()

    def abort(self) -> None:
        """Cut the connection where it is."""
        if self._transport is not None:
            self._transport.abort()

    async def _serve(self) -> None:
        try:
            while await self._one():
                pass
        except _Gone:
            pass
        finally:
            if self._transport is not None:
                self._transport.close()

    # -- reading ---------------------------------------------------------------------------

    async def _wait_for_more(self) -> None:
        if self._eof:
            raise _Gone
        if self._paused:
            self._paused = False
            self.transport.resume_reading()
        self._more.clear()
        await self._more.wait()

    async def _head(self) -> bytes:
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > _MAX_HEAD:
                raise _Gone
            await self._wait_for_more()
        head = bytes(self._buffer[: end + 4])
        del self._buffer[: end + 4]
        return head

    async def _exactly(self, size: int, into: bytearray) -> None:
        while size:
            if not self._buffer:
                await self._wait_for_more()
                continue
            piece = self._buffer[:size]
            into += piece
            size -= len(piece)
            del self._buffer[: len(piece)]

    async def _line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n")) < 0:
            await self._wait_for_more()
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    async def _body(self, headers: dict[str, str]) -> bytes:
        body = bytearray()
        if headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await self._line()).split(b";")[0], 16):
                await self._exactly(size, body)
                await self._line()
            while await self._line():
                pass
        else:
            await self._exactly(int(headers.get("content-length", "0")), body)
        return bytes(body)

    # -- writing ---------------------------------------------------------------------------

    async def _write(self, data: bytes) -> None:
        self.transport.write(data)
        if not self._writable.is_set():
            await self._writable.wait()

    def _start(
        self, status: int, content_type: str, more: str = "", *, close: bool = False
    ) -> bytes:
        reason = _REASONS.get(status, "Scripted")
        lines = (
            f"HTTP/1.1 {status} {reason}\r\nServer: llama.cpp\r\nContent-Type: {content_type}\r\n"
        )
        if close:
            lines += "Connection: close\r\n"
        return (lines + more + "\r\n").encode("latin-1")

    async def _reply(
        self,
        status: int,
        body: bytes,
        content_type: str = "application/json; charset=utf-8",
        *,
        close: bool = False,
        head_only: bool = False,
        headers: str = "",
    ) -> None:
        length = f"Content-Length: {len(body)}\r\n{headers}"
        start = self._start(status, content_type, length, close=close)
        if self._seen is not None:
            self._seen.first_byte_at = time.monotonic()
        await self._write(start if head_only else start + body)

    # -- one request -----------------------------------------------------------------------

    async def _one(self) -> bool:
        """Serve one request; True when the connection goes on."""
        head = await self._head()
        engine, knobs = self.engine, self.engine.knobs
        lines = head.decode("latin-1").split("\r\n")
        method, target, version = (lines[0].split(" ") + ["", ""])[:3]
        headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines[1:] if line)
        }
        url = urlsplit(target)
        path = url.path
        debug = path.startswith("/debug/")
        probe = method in ("GET", "HEAD")
        if not (debug or probe):
            engine.serial += 1
            self._seen = Seen(engine.serial, self._number, head, method, target, time.monotonic())
            engine.seen.append(self._seen)
        else:
            self._seen = None
        close = (
            knobs.close_after_answer
            or headers.get("connection", "").lower() == "close"
            or version == "HTTP/1.0"
        )
        if knobs.early_reply and not (debug or probe):
            text = {"error": {"message": "early", "type": "scripted", "code": knobs.early_reply}}
            await self._reply(knobs.early_reply, _dump(text), close=True)
            self._finish()
            return False
        if headers.get("expect", "").lower() == "100-continue":
            await self._write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await self._body(headers)
        if self._seen is not None:
            self._seen.body_at = time.monotonic()
            self._seen.body_bytes = len(body)
            self._seen.body_sha256 = hashlib.sha256(body).hexdigest()
        if debug or probe:
            status, text_type, data = self._look(method, path, parse_qs(url.query))
            await self._reply(status, data, text_type, close=close, head_only=method == "HEAD")
            return not close
        if not engine.loaded:
            await self._reply(503, answers.LOADING, close=close)
            self._finish()
            return not close
        slot = await engine.take_slot()
        self.busy = True
        try:
            go_on = await self._infer(
                path, headers, body, chunked=version != "HTTP/1.0", close=close
            )
        finally:
            self.busy = self.streaming = False
            engine.give_slot(slot)
        self._finish()
        return go_on and not close

    def _finish(self) -> None:
        if self._seen is not None:
            self._seen.finished_at = time.monotonic()
            self.engine.served += 1
            self._seen = None

    def _look(self, method: str, path: str, query: dict[str, list[str]]) -> tuple[int, str, bytes]:
        """Answer a GET: probes, lists, what the tests want to know."""
        engine, name = self.engine, self.engine.knobs.name
        kind = "application/json; charset=utf-8"
        if path == "/debug/requests":
            after = int(query.get("after", ["0"])[0])
            return 200, kind, _dump([s.as_json() for s in engine.seen if s.serial > after])
        if path == "/debug/stats":
            return 200, kind, _dump(engine.stats())
        models = path in ("/v1/models", "/models")
        if path in ("/health", "/v1/health"):
            engine.health_probes += 1
        if not engine.loaded and not (models and engine.knobs.models_early):
            return 503, kind, answers.LOADING
        match path:
            case "/health" | "/v1/health":
                return 200, kind, b'{"status":"ok"}'
            case "/slots":
                slots = [
                    {"id": at, "n_ctx": 2048, "is_processing": at not in engine.free}
                    for at in range(engine.knobs.parallel)
                ]
                return 200, kind, _dump(slots)
            case "/props":
                props = {
                    "default_generation_settings": {"n_ctx": 2048},
                    "total_slots": engine.knobs.parallel,
                    "model_alias": name,
                }
                return 200, kind, _dump(props)
            case "/v1/models" | "/models":
                listed = {"id": name, "object": "model", "created": 1, "owned_by": "fake"}
                return 200, kind, _dump({"object": "list", "data": [listed]})
            case "/get_load":
                waiting = len(engine.waiting)
                load = {"dp_rank": 0, "num_reqs": engine.running + waiting}
                return 200, kind, _dump([{**load, "num_waiting_reqs": waiting, "num_tokens": 0}])
            case "/metrics":
                text = answers.metrics(engine.running, len(engine.waiting))
                return 200, "text/plain; version=0.0.4", text
            case _:
                return 200, kind, _dump({"echo": True, "method": method, "path": path})

    async def _infer(
        self, path: str, headers: dict[str, str], body: bytes, *, chunked: bool, close: bool
    ) -> bool:
        """Answer a POST; True when the connection may go on."""
        engine, knobs = self.engine, self.engine.knobs
        kind = answers.family(path)
        fields = _fields(headers.get("content-type", ""), body)
        if self._seen is not None:
            self._seen.model = fields.get("model")
        script = _script(knobs, fields)
        if script.crash or (knobs.crash_prompt and knobs.crash_prompt.encode() in body):
            engine.crash("asked to by a request")
        if script.hang:
            await asyncio.Event().wait()
        extra = "".join(f"{name}: {value}\r\n" for name, value in script.headers.items())
        serial = engine.serial if self._seen is None else self._seen.serial
        if script.stream and kind in answers.STREAMED and script.status == 200:
            await _sleep(script.delay_s)
            self.streaming = True
            stream = answers.events(
                kind, name=knobs.name, body=fields, serial=serial, script=script
            )
            await self._stream(stream, script, extra, chunked=chunked, close=close)
            return knobs.keep_sse and chunked
        tokens = script.tokens(knobs.name)
        await _sleep(script.delay_s + script.gap_s * len(tokens))
        if script.status != 200:
            problem = {"message": "scripted", "type": "scripted_error", "code": script.status}
            answer: Json = {"error": problem}
        else:
            answer = answers.answer(
                kind, name=knobs.name, body=fields, serial=serial, tokens=tokens
            )
        if kind == "speech" and script.status == 200:
            data, content_type = "".join(tokens).encode(), "audio/wav"
        else:
            if kind == "echo":
                answer.update(path=path, body_bytes=len(body), body_sha256=_digest(body))
            data, content_type = _dump(answer), "application/json; charset=utf-8"
        if self._seen is not None:
            self._seen.tokens_sent = len(tokens)
        await self._reply(script.status, data, content_type, close=close, headers=extra)
        return True

    async def _stream(
        self, stream: answers.Events, script: Script, extra: str, *, chunked: bool, close: bool
    ) -> None:
        framing = "Transfer-Encoding: chunked\r\n" if chunked else ""
        if self._seen is not None:
            self._seen.first_byte_at = time.monotonic()
        start = self._start(200, "text/event-stream", framing + extra, close=close)

        def frame(data: bytes) -> bytes:
            return b"%x\r\n%b\r\n" % (len(data), data) if chunked else data

        await self._write(start + b"".join(frame(piece) for piece in stream.before))
        for at, piece in enumerate(stream.tokens):
            if at == script.die_after:
                await self._flushed()
                self.engine.crash(f"after {at} chunks")
            if at == script.drop_after:
                await self._flushed()
                self.abort()
                raise _Gone
            if at:
                await _sleep(script.gap_s)
            await self._write(frame(piece))
            if self._seen is not None:
                self._seen.tokens_sent = at + 1
        await self._write(b"".join(frame(piece) for piece in stream.after))
        await self._write(b"0\r\n\r\n" if chunked else b"")

    async def _flushed(self) -> None:
        """Let what was written reach the socket before the connection is cut."""
        self.transport.set_write_buffer_limits(high=0)
        if self.transport.get_write_buffer_size():
            self._writable.clear()
            await self._writable.wait()


async def _sleep(seconds: float) -> None:
    await asyncio.sleep(max(seconds, 0.0))


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _fields(content_type: str, body: bytes) -> Json:
    """The top-level fields of a body: JSON, or the plain fields of a multipart form."""
    if content_type.lower().startswith("multipart/form-data"):
        boundary = content_type.partition("boundary=")[2].split(";")[0].strip('" ')
        found: Json = {}
        for part in body.split(b"--" + boundary.encode()):
            head, _, value = part.partition(b"\r\n\r\n")
            if b"filename=" not in head and b'name="' in head:
                name = head.split(b'name="')[1].split(b'"')[0].decode()
                found[name] = value.rstrip(b"\r\n").decode("utf-8", "replace")
        return found
    try:
        parsed: Any = json.loads(body)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _script(knobs: Knobs, fields: Json) -> Script:
    gap = 1.0 / knobs.tokens_per_second if knobs.tokens_per_second else knobs.gap
    options = fields.get("stream_options")
    return Script(
        chunks=int(fields.get("x_chunks", knobs.chunks)),
        gap_s=float(fields.get("x_gap_ms", gap * 1000.0)) / 1000.0,
        delay_s=float(fields.get("x_delay_ms", knobs.first_byte_delay * 1000.0)) / 1000.0,
        chunk_bytes=int(fields.get("x_chunk_bytes", knobs.chunk_bytes)),
        status=int(fields.get("x_status", knobs.inference_status)),
        headers=fields.get("x_headers", {}),
        die_after=int(fields.get("x_die_after", knobs.die_after_chunks)),
        drop_after=int(fields.get("x_drop_after", -1)),
        crash=bool(fields.get("x_crash", False)),
        hang=bool(fields.get("x_hang", False)),
        text=fields.get("x_text"),
        stream=fields.get("stream") is True,
        usage=isinstance(options, dict) and options.get("include_usage") is True,
    )
