"""A scripted upstream: tests say byte by byte what it sends, and see what it was sent."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

LIMIT_S = 20.0
"""How long anything in a test may take before it counts as stuck."""


@dataclass(frozen=True)
class SeenRequest:
    """One request as it came over the wire."""

    head: bytes
    body: bytes

    @property
    def line(self) -> bytes:
        """The request line."""
        return self.head.split(b"\r\n", 1)[0]

    @property
    def fields(self) -> list[tuple[str, str]]:
        """Header lines in order, names in lower case."""
        pairs = (line.partition(b":") for line in self.head.split(b"\r\n")[1:] if line)
        return [(n.decode("latin-1").lower(), v.strip().decode("latin-1")) for n, _, v in pairs]

    def values(self, name: str) -> list[str]:
        """All values of one header."""
        return [value for key, value in self.fields if key == name]


class Link:
    """One connection that the upstream accepted."""

    def __init__(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.number = number
        """Counts connections from 0."""
        self.reader = reader
        self.writer = writer
        self.requests: list[SeenRequest] = []
        self.over = asyncio.Event()
        """Set when the script is done with this connection."""

    async def read_head(self) -> bytes | None:
        """Read a request's head; None when the other side is done."""
        try:
            return await self.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def read_request(self) -> SeenRequest | None:
        """Read a whole request; None when the other side is done."""
        head = await self.read_head()
        if head is None:
            return None
        seen = SeenRequest(head, b"")
        lengths = seen.values("content-length")
        try:
            body = await self.reader.readexactly(int(lengths[0])) if lengths else b""
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        seen = SeenRequest(head, body)
        self.requests.append(seen)
        return seen

    async def send(self, data: bytes) -> None:
        """Send bytes as they are; in vain once the other side is gone."""
        if not self.writer.is_closing():
            self.writer.write(data)
            with suppress(ConnectionError):
                await self.writer.drain()

    def close(self) -> None:
        """Close in order (FIN)."""
        self.writer.close()

    def reset(self) -> None:
        """Close with RST; the other side may have been quicker."""
        if self.writer.is_closing():
            return
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def ended(self) -> None:
        """For tests: wait until the script is done, mostly because the other side closed."""
        async with asyncio.timeout(LIMIT_S):
            await self.over.wait()

    async def gone(self) -> None:
        """For scripts: wait until the other side has closed the connection."""
        async with asyncio.timeout(LIMIT_S):
            with suppress(ConnectionError):
                while await self.reader.read(65536):
                    pass


Script = Callable[[Link], Awaitable[None]]


class RawUpstream:
    """Listens on loopback and runs a script for every connection; closes it afterwards."""

    def __init__(
        self, script: Script, *, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1"
    ) -> None:
        self.script = script
        self.host = host
        self.tls = tls
        self.links: list[Link] = []
        self.failures: list[BaseException] = []
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> RawUpstream:
        self._server = await asyncio.start_server(
            self._accept, self.host, 0, limit=2**20, ssl=self.tls
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()
        assert not self.failures, self.failures

    def close(self) -> None:
        """Refuse further connections; those that exist go on."""
        if self._server is not None:
            self._server.close()

    async def stop_listening(self) -> None:
        """Do `close`, and wait until it has happened."""
        self.close()
        await asyncio.sleep(0)  # some loops close the socket in their next turn

    async def stop(self) -> None:
        """Stop listening and drop every connection."""
        await self.stop_listening()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self.links:
            link.writer.close()

    @property
    def requests(self) -> list[SeenRequest]:
        """All requests read so far."""
        return [request for link in self.links for request in link.requests]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        link = Link(len(self.links), reader, writer)
        self.links.append(link)
        try:
            await self.script(link)
        except asyncio.CancelledError:
            pass  # the end of the test; the stream server would log it
        except BaseException as exc:  # noqa: BLE001 - told to the test
            self.failures.append(exc)
        finally:
            self._tasks.discard(task)
            link.over.set()
            writer.close()


def answer(body: bytes, *fields: bytes, status: bytes = b"200 OK") -> bytes:
    """Write an ordinary answer with a length."""
    lines = [b"HTTP/1.1 " + status, *fields, b"Content-Length: %d" % len(body)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def chunk(data: bytes) -> bytes:
    """Write one chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)

CHUNKED_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def replies(*parts: bytes, keep: bool = True) -> Script:
    """Answer every request with the same bytes; close afterwards unless *keep*."""

    async def script(link: Link) -> None:
        while await link.read_request() is not None:
            await link.send(b"".join(parts))
            if not keep:
                return

    return script


def flood(total: int, *, stream: bool = False) -> Script:
    """Send *total* bytes as fast as they are taken; close in the end."""

    async def script(link: Link) -> None:
        if await link.read_request() is None:
            return
        piece = b"data: %b\n\n" % (b"x" * 65528)
        if stream:
            await link.send(STREAM_HEAD)
        else:
            await link.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
        for _ in range(total // len(piece)):
            if link.writer.is_closing():
                return
            await link.send(chunk(piece) if stream else piece)
        if stream:
            await link.send(LAST_CHUNK)

    return script
