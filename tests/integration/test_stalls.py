"""Nobody keeps the slot by standing still: clients that do not read, engines that do not answer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from pathlib import Path

import pytest

from fakemembers import until
from modelpool_router.drivers import lives
from rawclient import RawClient
from served import Served, member, pool, served_here


def streaming_request(router: Served, **fields: object) -> bytes:
    """Return the bytes of a streamed chat with alpha."""
    body = json.dumps(router.body("alpha", stream=True, **fields)).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class DeafClient(RawClient):
    """A client whose window is shut: it asks, and reads nothing."""

    async def __aenter__(self) -> DeafClient:
        await super().__aenter__()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        return self


async def test_a_client_that_reads_nothing_is_cut_off(tmp_path: Path) -> None:
    async with served_here(
        tmp_path, pool(member("alpha"), member("beta"), maxTurn="0s"), writeStall="400ms"
    ) as router:
        await router.answered("alpha")
        async with DeafClient(*router.address) as deaf:
            await deaf.send(streaming_request(router, x_chunks=2000, x_chunk_bytes=65536))
            await router.wait_for(lambda v: v["in_flight"] == 1, "the stream runs")
            answer = await router.answered("beta")
            assert answer.held_ms >= 200
        line = [x for x in router.log_lines("request") if x["outcome"] != "served"]
        assert [(x["outcome"], x["member"]) for x in line] == [("client_gone", "alpha")]
        assert router.starts("alpha") == 1


async def test_a_slow_reader_is_not_a_dead_one(tmp_path: Path) -> None:
    """Every byte taken starts the time-out anew."""
    async with served_here(
        tmp_path, pool(member("alpha"), member("beta")), writeStall="400ms"
    ) as router:
        async with RawClient(*router.address) as slow:
            await slow.send(streaming_request(router, x_chunks=150, x_chunk_bytes=65536))
            clock = asyncio.get_running_loop()
            began = clock.time()
            got = bytearray()
            while b"[DONE]" not in got[-200:]:
                await asyncio.sleep(0.04)  # what makes it slow
                piece = await clock.sock_recv(slow.socket, 256 * 1024)
                assert piece, "cut off"
                got += piece
            assert clock.time() - began > 0.8
        assert got.count(b"data: ") == 150 + 3


async def test_a_stopped_engine_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It neither answers nor dies: after `hungAfter` its clients are told and the slot is freed."""
    monkeypatch.setattr(lives, "_PROBE_S", 0.3)  # 2 s are no part of what is shown here
    keys = {"stopGrace": "200ms", "killGrace": "200ms"}
    rules = {"hungAfter": "600ms", "healthInterval": "100ms"}
    async with served_here(
        tmp_path, pool(member("alpha", keys=keys), member("beta"), **rules)
    ) as router:
        await router.answered("alpha")
        async with router.stream("alpha", x_chunks=1000, x_gap_ms=10) as stream:
            await stream.tokens(3)
            os.kill(router.members.events("start", "alpha")[0]["pid"], signal.SIGSTOP)
            other = router.begin(router.answered("beta"))
            await stream.rest()
        assert not stream.is_complete
        assert stream.error is not None and stream.error["code"] == "upstream_timeout"
        await other
        assert await router.metric("modelpool_resident_lost_total", member="alpha") == 1


async def test_a_stopped_engine_that_nobody_uses_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one who waits for another member is what finds out."""
    monkeypatch.setattr(lives, "_PROBE_S", 0.3)
    keys = {"stopGrace": "200ms", "killGrace": "200ms"}
    rules = {"hungAfter": "600ms", "healthInterval": "100ms"}
    async with served_here(
        tmp_path, pool(member("alpha", keys=keys), member("beta"), **rules)
    ) as router:
        await router.answered("alpha")
        os.kill(router.members.events("start", "alpha")[0]["pid"], signal.SIGSTOP)
        await router.answered("beta")
        assert await router.metric("modelpool_resident_lost_total", member="alpha") == 1


@pytest.mark.usefixtures("either_client")
async def test_a_stream_that_stops_is_ended(tmp_path: Path) -> None:
    async with served_here(
        tmp_path, pool(member("alpha"), member("beta")), readStall="300ms"
    ) as router:
        stream = await router.whole_stream("alpha", x_chunks=3, x_gap_ms=5000)
        assert len(stream.texts) == 1
        assert stream.error is not None and stream.error["code"] == "upstream_timeout"
        assert (await router.answered("beta")).status == 200


async def test_an_endless_answer_ends_when_others_wait(tmp_path: Path) -> None:
    rules = {"maxGeneration": "1s", "maxTurn": "0s"}
    async with served_here(tmp_path, pool(member("alpha"), member("beta"), **rules)) as router:
        async with router.stream("alpha", x_chunks=100_000, x_gap_ms=10) as stream:
            await stream.tokens(120)  # more than 1 s of it: nobody waits, nothing happens
            other = router.begin(router.answered("beta"))
            await stream.rest()
        assert stream.error is not None
        assert stream.error["code"] == "upstream_timeout"
        assert "maxGeneration" in stream.error["message"]
        assert not stream.is_complete
        await other


async def test_a_drain_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    rules = {"drainTimeout": "300ms", "maxTurn": "0s"}
    async with served_here(tmp_path, pool(member("alpha"), member("beta"), **rules)) as router:
        whole = router.begin(router.chat("alpha", x_delay_ms=30_000))
        async with router.stream("alpha", x_chunks=100_000, x_gap_ms=10) as stream:
            await stream.tokens(1)
            answer = await router.answered("beta")
            await stream.rest()
        assert stream.error is not None and stream.error["code"] == "pool_draining"
        assert "drainTimeout" in stream.error["message"]
        refused = await whole
        assert (refused.status, refused.code) == (503, "pool_draining")
        assert "Retry-After" in refused.headers
        assert answer.held_ms >= 250


async def test_a_busy_engine_is_not_unloaded_under_a_stranger(tmp_path: Path) -> None:
    """Somebody talks to the member past the router: the swap is put off, then done."""
    async with served_here(tmp_path, pool(member("alpha"), member("beta"))) as router:
        await router.answered("alpha")
        port = router.members.events("start", "alpha")[0]["port"]

        async def talk() -> int:
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            async with router.session.post(url, json={"x_delay_ms": 1200}) as response:
                await response.read()
                return response.status

        stranger = router.begin(talk())
        await until_busy(router, port)
        other = router.begin(router.answered("beta"))
        view = await router.wait_for(lambda v: v["deferred_reason"] != "", "put off")
        assert view["deferred_reason"] == "PodsBusy"
        assert view["admission"] == "open"
        assert await stranger == 200
        await other


async def until_busy(router: Served, port: int) -> None:
    """Wait until the engine itself says that it works."""

    async def is_busy() -> bool:
        async with router.session.get(f"http://127.0.0.1:{port}/debug/stats") as response:
            return bool((await response.json())["running"])

    await until(is_busy, "the engine works")
