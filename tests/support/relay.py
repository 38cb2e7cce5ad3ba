"""The data path between a raw client and a scripted upstream, with aiohttp's real server."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import h11
from aiohttp import web

from fronts import is_own
from modelpool_router.core.commands import BreakReason
from modelpool_router.core.headers import ExchangeIds
from modelpool_router.drivers.base import Endpoint
from modelpool_router.web.faults import ConnectRefused, ExchangeError, Family, MemberLoading
from modelpool_router.web.forward import Forwarded, ForwardLimits, forward
from modelpool_router.web.held import HeldStream
from modelpool_router.web.server import make_server
from modelpool_router.web.upstream import UpstreamClient, UpstreamLimits
from rawupstream import LIMIT_S

PIECE = 256 * 1024


@dataclass
class Body:
    """A body in memory that counts what happens to it."""

    data: bytes
    closed: int = 0
    iterations: int = 0
    pieces: int = 0

    @property
    def size(self) -> int:
        """Length in bytes."""
        return len(self.data)

    def chunks(self) -> Iterator[bytes | memoryview]:
        """Iterate over it."""
        self.iterations += 1
        view = memoryview(self.data)
        for start in range(0, len(view), PIECE):
            self.pieces += 1
            yield view[start : start + PIECE]

    def put_away(self) -> None:
        """Nothing to do for one in memory."""

    def close(self) -> None:
        """Count it."""
        self.closed += 1


@dataclass
class Lease:
    """What the data path sees of a lease."""

    moved_at: float = 0.0
    on_break: Callable[[BreakReason], None] | None = None


@dataclass
class Ended:
    """How the handler saw an exchange end."""

    outcome: str
    """That of `Forwarded`; ``raised`` or ``cancelled``."""
    result: Forwarded | None = None
    error: ExchangeError | None = None
    body: Body | None = None


def _patient_limits() -> UpstreamLimits:
    # On a machine that stalls, two seconds to connect can be over before the loop looks.
    return UpstreamLimits(connect_timeout_s=30.0, sweep_s=0.02)


@dataclass
class Relay:
    """
    A front with aiohttp's own server whose every request goes to one upstream.

    `before` runs in the handler before dispatch (to hold), `after` when the answer is written;
    `held` makes a `HeldStream`.
    """

    port_of_upstream: int
    host_of_upstream: str = "127.0.0.1"
    identity: str = "life-1"
    tls: ssl.SSLContext | None = None
    limits: ForwardLimits = field(default_factory=ForwardLimits)
    upstream_limits: UpstreamLimits = field(default_factory=_patient_limits)
    family: Family = "openai-chat"
    path: str = "/v1/chat/completions"
    ids: ExchangeIds = field(default_factory=lambda: ExchangeIds("req-1"))
    held: Callable[[Any, Relay], HeldStream] | None = None
    before: Callable[[HeldStream | None], Any] | None = None
    after: Callable[[], None] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    port: int = 0
    leases: list[Lease] = field(default_factory=list)
    ended: asyncio.Queue[Ended] = field(default_factory=asyncio.Queue)
    request: Any = None
    held_stream: HeldStream | None = None
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> Relay:
        loop = asyncio.get_running_loop()
        self.client = UpstreamClient(loop, self.upstream_limits, tls=self.tls)
        server = (
            make_server(self._handle)
            if is_own()
            else web.Server(
                self._handle, handler_cancellation=True, access_log=None, auto_decompress=False
            )
        )
        self.runner = web.ServerRunner(server, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.port = self.runner.addresses[0][1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.runner.cleanup()
        self.client.close()

    async def end(self) -> Ended:
        """Wait for the next exchange to end."""
        async with asyncio.timeout(LIMIT_S):
            return await self.ended.get()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let the loop run until *condition* holds; for things that send no signal."""
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                await asyncio.sleep(0.001)

    def endpoint(self) -> Endpoint:
        """Where requests go."""
        return Endpoint(
            self.host_of_upstream,
            self.port_of_upstream,
            tls=self.tls is not None,
            identity=self.identity,
        )

    async def _handle(self, request: Any) -> web.StreamResponse:
        data = bytearray()
        while piece := await request.content.readany():
            data += piece
        self.request = request
        lease, body = Lease(), Body(bytes(data))
        self.leases.append(lease)
        held = self.held_stream = self.held(request, self) if self.held is not None else None
        self.arrived.set()
        try:
            while True:
                if self.before is not None:
                    await self.before(held)
                try:
                    result = await forward(
                        request,
                        client=self.client,
                        endpoint=self.endpoint(),
                        method=request.method,
                        path_qs=self.path,
                        body=body,
                        lease=lease,
                        ids=self.ids,
                        limits=self.limits,
                        held_ms=7,
                        member="alpha",
                        family=self.family,
                        keepalive_stream=held,
                        **self.options,
                    )
                    break
                except ExchangeError as error:
                    self.ended.put_nowait(Ended("raised", error=error, body=body))
                    if isinstance(error, ConnectRefused | MemberLoading) and held is not None:
                        continue  # hold it again
                    text = f'{{"error":{{"code":"{error.code}"}}}}'
                    return web.Response(
                        status=error.status, text=text, content_type="application/json"
                    )
        except asyncio.CancelledError:
            self.ended.put_nowait(Ended("cancelled", body=body))
            raise
        finally:
            if held is not None:
                held.close()
        self.ended.put_nowait(Ended(result.outcome, result=result, body=body))
        if self.after is not None:
            self.after()
        return result.response


@dataclass
class Answer:
    """An answer as a strict parser (h11) read it."""

    status: int
    fields: list[tuple[str, str]]
    body: bytes
    complete: bool
    """False when the connection ended before the message did."""
    http_version: str = "1.1"

    def values(self, name: str) -> list[str]:
        """All values of one header."""
        return [value for key, value in self.fields if key == name]

    @property
    def headers(self) -> Mapping[str, str]:
        """Header by name, last one wins."""
        return dict(self.fields)


class RawClient:
    """A client that sends bytes as told and reads answers with h11."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._left = b""

    @classmethod
    async def connect(cls, port: int, *, receive_buffer: int | None = None) -> RawClient:
        """Connect to 127.0.0.1; a small receive buffer makes a slow reader felt soon."""
        sock = socket.socket()
        sock.setblocking(False)
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        return cls(*await asyncio.open_connection(sock=sock, limit=4096))

    async def __aenter__(self) -> RawClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()

    def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        self.writer.write(data)

    def post(self, body: bytes = b"{}", *fields: bytes, version: bytes = b"1.1") -> None:
        """Send an ordinary POST."""
        self.send(post(body, *fields, version=version))

    async def read(self, size: int = 65536) -> bytes:
        """Read some bytes; empty at the end, reset or not."""
        async with asyncio.timeout(LIMIT_S):
            try:
                return await self.reader.read(size)
            except ConnectionError:
                return b""

    async def read_until(self, end: bytes) -> bytes:
        """Read raw bytes up to and including *end*."""
        async with asyncio.timeout(LIMIT_S):
            seen = b""
            while not seen.endswith(end):
                piece = await self.reader.read(1)
                assert piece, seen
                seen += piece
            return seen

    async def answer(self, method: str = "POST") -> Answer:
        """Read one answer strictly."""
        parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=2**20)
        parser.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
        parser.send(h11.EndOfMessage())
        head: h11.Response | None = None
        body = bytearray()
        if self._left:
            parser.receive_data(self._left)
            self._left = b""
        while True:
            try:
                event = parser.next_event()
            except h11.RemoteProtocolError as exc:
                # the only fault allowed here: it ended early
                assert "closed connection" in str(exc) and head is not None, exc
                return self._made(head, bytes(body), complete=False)
            if event is h11.NEED_DATA:
                data = await self.read()
                if not data and head is None:
                    return Answer(0, [], b"", complete=False)
                if not data and not self.reader.at_eof():
                    return self._made(head, bytes(body), complete=False)  # reset
                parser.receive_data(data)
            elif isinstance(event, h11.Response):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                self._left = parser.trailing_data[0]
                return self._made(head, bytes(body), complete=True)
            else:
                raise AssertionError(event)

    async def closed(self) -> bool:
        """Whether the other side closes now, with nothing more to say."""
        return not self._left and not await self.read()

    def reset(self) -> None:
        """Leave with RST."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def _made(self, head: h11.Response | None, body: bytes, *, complete: bool) -> Answer:
        assert head is not None
        fields = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in head.headers]
        return Answer(head.status_code, fields, body, complete, head.http_version.decode())


def post(body: bytes = b"{}", *fields: bytes, version: bytes = b"1.1") -> bytes:
    """Write an ordinary POST."""
    lines = [
        b"POST /v1/chat/completions HTTP/" + version,
        b"Host: front",
        b"Content-Type: application/json",
        *fields,
        b"Content-Length: %d" % len(body),
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body
