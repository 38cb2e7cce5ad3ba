"""Asking a member over the network: one short GET, and whether its port answers at all."""

from __future__ import annotations

import asyncio
import errno
import random
import socket
from pathlib import Path

import aiohttp

_MOST = 4 << 20
"""Bytes read of an answer; a metrics page of a large engine has a few hundred KiB."""


class Prober:
    """GETs short answers from members. No pool, no proxy, no redirects; `close` it."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def get(
        self, host: str, port: int, path: str, *, timeout_s: float
    ) -> tuple[int, bytes] | None:
        """Return status and body, or None when there was no complete answer in time."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    force_close=True, limit=0, resolver=aiohttp.ThreadedResolver()
                ),
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        where = f"[{host}]" if ":" in host else host
        try:
            async with self._session.get(
                f"http://{where}:{port}{path}",
                timeout=aiohttp.ClientTimeout(total=timeout_s),
                allow_redirects=False,
            ) as answer:
                body = bytearray()
                async for piece in answer.content.iter_chunked(1 << 16):
                    body += piece
                    if len(body) > _MOST:
                        return None
                return answer.status, bytes(body)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None

    async def close(self) -> None:
        """Close what is open. Idempotent; a later `get` opens it again."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


_NO_MEANS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""What says something about this process, and nothing about a port."""


async def port_refuses(host: str, port: int, *, timeout_s: float = 1.0) -> bool:
    """
    Return True when nobody listens there.

    No answer at all counts as somebody, and so does that this process has no means to ask.
    """
    loop = asyncio.get_running_loop()
    try:
        sock = socket.socket(_family(host), socket.SOCK_STREAM)
    except OSError:
        return False
    with sock:
        sock.setblocking(False)
        try:
            async with asyncio.timeout(timeout_s):
                await loop.sock_connect(sock, (host, port))
        except TimeoutError:
            return False
        except OSError as error:
            return error.errno not in _NO_MEANS
        # A socket may get the very port it dials as its own and so connect to itself.
        return bool(sock.getsockname() == sock.getpeername())


def port_is_taken(host: str, port: int) -> bool:
    """Return True when a listener of somebody else would keep a member from using this port."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as sock:
        # as servers do: connections of the last life that wait for their end are no obstacle
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def free_port(host: str) -> int:
    """
    Choose a port on *host* that nobody uses.

    Outside the range from which the kernel takes ports of outgoing connections: one of those
    could take the port between this choice and the member's bind, our own probes included.
    """
    low, high = _ephemeral()
    for _ in range(64):
        port = random.randrange(10_000, 65_536)
        if not low <= port <= high and not port_is_taken(host, port):
            return port
    with socket.socket(_family(host), socket.SOCK_STREAM) as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


def _ephemeral() -> tuple[int, int]:
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
        low, high = text.split()
        return int(low), int(high)
    except (OSError, ValueError):
        return 32_768, 65_535


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
