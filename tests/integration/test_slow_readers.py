"""Clients that read slowly from members that flood: little is kept for each, nothing is lost."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from fronts import give_routers
from modelpool_router.app import Router
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


def unsent(router: Router) -> int:
    """Return how much clients have yet to take."""
    transports = [each.transport for each in router._front.connections]
    return sum(each.get_write_buffer_size() for each in transports if each is not None)


@pytest.mark.parametrize("is_over", [True, False], ids=["written", "under way"])
@pytest.mark.parametrize("front", ["own", "aiohttp"])
async def test_a_stop_waits_for_who_has_yet_to_take_the_end(
    front: str, is_over: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of an answer is still with the router, whether its request is over or not."""
    give_routers(front, monkeypatch)
    stopping = asyncio.Event()
    routers: list[Router] = []

    async def until_jammed(life: Life, link: Link, request: SeenRequest) -> bool:
        await link.send(STREAM_HEAD)
        while not unsent(routers[0]):
            await link.send(chunk(b"data: " + b"x" * EVENT + b"\n\n"))
            await asyncio.sleep(0.001)
        if not is_over:
            await stopping.wait()
        await link.send(LAST_CHUNK)
        return True

    async with scripted(tmp_path, scripted_pool("alpha"), answerer=until_jammed) as router:
        routers.append(router.router)
        data_port = router.router._data_port
        async with Slow(*router.address) as client:
            await client.send(post(stream=True))
            await settled(
                router, lambda: unsent(router.router) > 0, "an answer that waits for its reader"
            )
            if is_over:
                await settled(router, lambda: not data_port.active, "the end of the request")
            stop = router.begin(router.stop())
            await settled(router, lambda: not router.router._server.is_serving(), "no listener")
            stopping.set()
            await settled(router, lambda: not data_port.active, "the end of the request")
            for _ in range(100):  # (time enough to go wrong)
                await asyncio.sleep(0)
            assert not stop.done()
            got = await client.answer()
            assert got.body.endswith(b"x\n\n") and not await client.ended()
            await stop


async def test_who_takes_nothing_does_not_keep_a_stop_from_its_end(tmp_path: Path) -> None:
    async with scripted(
        tmp_path, scripted_pool("alpha"), answerer=flood, shutdownTimeout="300ms"
    ) as router:
        async with Slow(*router.address) as client:
            await client.send(post(stream=True))
            await settled(router, lambda: unsent(router.router) > 0, "an answer that waits")
            async with asyncio.timeout(10):
                await router.stop()
