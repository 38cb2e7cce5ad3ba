"""Asking members whether they are idle: one short GET a Pod, at its own address."""

from __future__ import annotations

from typing import Protocol

import aiohttp

from ..plan.idleness import judge, together
from ..plan.model import Idle, ProbeIdle

TIMEOUT_S = 5.0
MOST_BYTES = 4 << 20
"""A metrics page of a large engine has a few hundred KiB."""


class Asking(Protocol):
    """How members are reached."""

    async def get(self, host: str, port: int, path: str) -> tuple[int, bytes] | None:
        """Return status and body, or None when there was no complete answer in time."""
        ...


async def ask(asking: Asking, probe: ProbeIdle) -> Idle:
    """Return what all Pods of a member say together."""
    if not probe.path:
        return Idle.UNSUPPORTED
    said = []
    for target in probe.targets:
        answer = await asking.get(target.host, target.port, probe.path)
        if answer is None:
            said.append(Idle.UNREACHABLE)
        else:
            said.append(judge(probe.profile, *answer))
    return together(said)


class HttpAsking:
    """Over the network. No pool, no proxy, no redirects. `close` it."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def get(self, host: str, port: int, path: str) -> tuple[int, bytes] | None:
        """GET *path*."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(force_close=True, limit=0),
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        where = f"[{host}]" if ":" in host else host
        try:
            async with self._session.get(
                f"http://{where}:{port}{path}", allow_redirects=False
            ) as answer:
                body = bytearray()
                async for piece in answer.content.iter_chunked(1 << 16):
                    body += piece
                    if len(body) > MOST_BYTES:
                        return None
                return answer.status, bytes(body)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None

    async def close(self) -> None:
        """Close what is open. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
