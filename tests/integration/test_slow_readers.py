"""Clients that read slowly from members that flood: little is kept for each, nothing is lost."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from fronts import give_routers
from rawclient import RawClient
from rawupstream import CHUNKED_HEAD, LAST_CHUNK, STREAM_HEAD, Link, SeenRequest, chunk
from scripted import Life, scripted, scripted_pool, settled

CLIENTS, EVENTS, EVENT = 12, 500, 16 * 1024
MOST = 64 * 1024 + 256 * 1024
"""Bytes kept for one client: the mark at which we stop reading, and what was read by then."""


async def flood(life: Life, link: Link, request: SeenRequest) -> bool:
    """Send as fast as the router takes it."""
    asked = json.loads(request.body)
    await link.send(STREAM_HEAD if asked.get("stream") else CHUNKED_HEAD)
    for number in range(EVENTS):
        await link.send(chunk(b"data: %d " % number + b"x" * EVENT + b"\n\n"))
    await link.send(LAST_CHUNK)
    return True


class Slow(RawClient):
    """A client whose kernel takes next to nothing on its behalf."""

    async def __aenter__(self) -> Slow:
        await super().__aenter__()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        return self


def post(**fields: Any) -> bytes:
    body = json.dumps({"model": "alpha", **fields}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("front", ["own", "aiohttp"])
async def test_little_is_kept_for_each_and_nothing_is_lost(
    front: str, stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_routers(front, monkeypatch)
    async with scripted(tmp_path, scripted_pool("alpha"), answerer=flood) as router:
        clients = [await Slow(*router.address).__aenter__() for _ in range(CLIENTS)]
        for client in clients:
            await client.send(post(stream=stream))

        def kept() -> list[int]:
            transports = [each.transport for each in router.router._front.connections]
            return [each.get_write_buffer_size() for each in transports if each is not None]

        def is_jammed() -> bool:
            return len(kept()) == CLIENTS and min(kept()) > 0

        await settled(router, is_jammed, "everybody's answer waits for its reader")
        peak = max(kept())

        async def read(client: RawClient) -> None:
            nonlocal peak
            loop, data = asyncio.get_running_loop(), b""
            while not data.endswith(LAST_CHUNK):
                data = data[-16:] + await loop.sock_recv(client.socket, 65536)
                peak = max([peak, *kept()])
            client.close()

        async with asyncio.timeout(120):
            await asyncio.gather(*(read(client) for client in clients))
        assert peak <= MOST
        await router.wait_for_log("request", count=CLIENTS)
        lines = router.log_lines("request")
        least = EVENTS * EVENT
        assert all(line["outcome"] == "served" and line["bytes"] > least for line in lines)
