"""
A client that sends bytes as they are and reads answers strictly.

For requests that no library would send.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

LIMIT_S = 20.0
"""Longest wait for one step; a test that reaches it has failed."""


class BadAnswer(AssertionError):
    """The server's bytes are not a well-formed HTTP/1.1 answer."""


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """One answer, headers in order."""

    version: str
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def header(self, name: str) -> str | None:
        """Return the only value of *name*, None when absent."""
        values = [value for each, value in self.headers if each.lower() == name.lower()]
        if len(values) > 1:
            raise BadAnswer(f"{name} appears {len(values)} times")
        return values[0] if values else None

    @property
    def closing(self) -> bool:
        """True when the answer announces that the connection ends with it."""
        return (self.header("connection") or "").lower() == "close"

    def json(self) -> Any:
        """Return the body as JSON."""
        return json.loads(self.body)


class RawClient:
    """One connection. Use as an async context manager."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._socket: socket.socket | None = None
        self._buffer = b""
        self._ended = False

    async def __aenter__(self) -> Self:
        host, port = self._address
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await asyncio.get_running_loop().sock_connect(self._socket, (host, port))
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def socket(self) -> socket.socket:
        """The connected socket."""
        assert self._socket is not None
        return self._socket

    @property
    def is_open(self) -> bool:
        """Whether it is connected, as far as our side is concerned."""
        return self._socket is not None

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def reset(self) -> None:
        """Close with a reset in place of the ordinary end."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.close()

    async def send(self, data: bytes) -> None:
        """Send *data*; raises ConnectionError when the server has reset the connection."""
        async with asyncio.timeout(LIMIT_S):
            await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def send_pieces(self, pieces: Iterable[bytes]) -> None:
        """
        Send piece by piece, letting the server read in between.

        Stops when the server ends the connection: what it answered can still be read.
        """
        for piece in pieces:
            try:
                await self.send(piece)
            except ConnectionError:
                return
            await asyncio.sleep(0)

    async def answer(self, *, head: bool = False) -> RawAnswer:
        """
        Read one answer, interim ones (1xx) included.

        Args:
            head: the request was a HEAD: no body follows whatever the headers say.

        Raises:
            BadAnswer: malformed, or the connection ended inside.
        """
        lines = (await self._until(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        version, _, rest = lines[0].partition(" ")
        code, _, reason = rest.partition(" ")
        if version not in ("HTTP/1.1", "HTTP/1.0") or not code.isdigit() or "\n" in reason:
            raise BadAnswer(f"status line {lines[0]!r}")
        headers = []
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if not colon or not name or name != name.strip():
                raise BadAnswer(f"header line {line!r}")
            headers.append((name, value.strip()))
        answer = RawAnswer(version, int(code), tuple(headers), b"")
        if head or answer.status < 200 or answer.status in (204, 304):
            return answer
        body = await self._body(answer)
        return RawAnswer(version, int(code), tuple(headers), body)

    async def ended(self) -> bytes:
        """Wait until the server ends the connection; return what still came before."""
        while await self._more():
            pass
        rest, self._buffer = self._buffer, b""
        return rest

    async def silent_for(self, seconds: float) -> bool:
        """Tell whether the server says nothing and keeps the connection for *seconds*."""
        if self._buffer:
            return False
        try:
            async with asyncio.timeout(seconds):
                await self._more()
        except TimeoutError:
            return True
        return False

    async def _body(self, answer: RawAnswer) -> bytes:
        length = answer.header("content-length")
        coding = answer.header("transfer-encoding")
        if length is not None and coding is not None:
            raise BadAnswer("both lengths")
        if length is not None:
            return await self._exactly(int(length))
        if coding is None:
            return await self.ended()
        if coding.lower() != "chunked":
            raise BadAnswer(f"transfer coding {coding!r}")
        body = b""
        while True:
            size = int((await self._until(b"\r\n")), 16)
            chunk = await self._exactly(size)
            if await self._exactly(2) != b"\r\n":
                raise BadAnswer("chunk without its end")
            if size == 0:
                return body
            body += chunk

    async def _until(self, mark: bytes) -> bytes:
        while mark not in self._buffer:
            if not await self._more():
                raise BadAnswer(f"connection ended after {self._buffer!r}")
        found, _, self._buffer = self._buffer.partition(mark)
        return found

    async def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            if not await self._more():
                raise BadAnswer(f"connection ended {size - len(self._buffer)} bytes early")
        found, self._buffer = self._buffer[:size], self._buffer[size:]
        return found

    async def _more(self) -> bool:
        if self._ended:
            return False
        async with asyncio.timeout(LIMIT_S):
            try:
                data = await asyncio.get_running_loop().sock_recv(self.socket, 65536)
            except ConnectionResetError:
                data = b""
        self._buffer += data
        self._ended = not data
        return bool(data)
