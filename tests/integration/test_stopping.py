"""Going down in peace: not ready at once, held ones told, streams to their end, members gone."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest

from modelpool_router.app import serving
from modelpool_router.app.router import Addresses, Router
from modelpool_router.drivers.base import DriverUnavailable
from modelpool_router.settings import Address, load
from modelpool_router.telemetry import configure_logs
from served import LIMIT_S, member, pool, served, write_config


@pytest.mark.usefixtures("either_client")
async def test_a_graceful_stop(tmp_path: Path) -> None:
    settings = {"shutdownDelay": "3s", "shutdownTimeout": "30s"}
    async with served(tmp_path, pool(member("alpha"), member("beta")), **settings) as router:
        await router.answered("alpha")
        assert (await router.get("/readyz")).status == 200
        async with router.stream("alpha", x_chunks=160, x_gap_ms=25) as stream:
            await stream.tokens(2)
            held = router.begin(router.chat("beta"))
            await router.until_held("beta")
            router.signal(signal.SIGTERM)
            refused = await held
            assert (refused.status, refused.code) == (503, "pool_draining")
            assert 1 <= refused.retry_after_s <= 60
            # load balancers look, and clients that have not heard of it yet are served
            ready, alive = await router.get("/readyz"), await router.get("/livez")
            assert (ready.status, alive.status) == (503, 200)
            assert (await router.answered("alpha")).status == 200
            assert (await router.chat("beta")).code == "pool_draining"
            await stream.rest()
        assert (len(stream.texts), stream.is_complete) == (160, True)
        assert await router.ended() == 0
        assert [event["event"] for event in router.members.events()][-1] == "stopped"
        assert router.starts("beta") == 0


async def test_a_second_signal_hurries(tmp_path: Path) -> None:
    settings = {"shutdownDelay": "10m", "shutdownTimeout": "10m"}
    async with served(tmp_path, pool(member("alpha"), member("beta")), **settings) as router:
        async with router.stream("alpha", x_chunks=100_000, x_gap_ms=20) as stream:
            await stream.tokens(2)
            router.signal(signal.SIGTERM)
            await router.wait_for_log("stopping")
            router.signal(signal.SIGTERM)
            async with asyncio.timeout(LIMIT_S):
                await stream.rest()
        assert stream.error is not None and not stream.is_complete
        assert await router.ended() == 0


@pytest.mark.parametrize("stage", ["answering", "taking down"])
async def test_a_second_signal_hurries_members_as_well(tmp_path: Path, stage: str) -> None:
    """One that takes minutes to leave is killed; nothing is left, and a third signal is nothing."""
    keys = {"stopGrace": "10m", "killGrace": "10m"}
    stubborn = member("alpha", ignore_term="inf", keys=keys)
    settings = {"shutdownDelay": "10m" if stage == "answering" else "0s"}
    async with served(tmp_path, pool(stubborn), **settings) as router:
        await router.answered("alpha")
        router.signal(signal.SIGTERM)
        if stage == "answering":
            await router.wait_for_log("stopping")
        else:
            await router.members.wait_for("term", "alpha")
        for _ in range(2):
            router.signal(signal.SIGTERM)
        assert await router.ended() == 0
        assert len(router.members.events("term", "alpha")) == 1
        assert router.log_lines("stopped")
        await router.until_lock_is_free()


async def test_signals_without_end_change_nothing_about_the_end(tmp_path: Path) -> None:
    async with served(tmp_path, pool(member("alpha"))) as router:
        await router.answered("alpha")
        with suppress(ProcessLookupError):
            while router.exit_code is None:
                router.signal(signal.SIGTERM)
                router.signal(signal.SIGINT)
                await asyncio.sleep(0)
        assert await router.ended() == 0
        assert router.errors == ""
        assert router.log_lines("stopped")


@pytest.fixture
def own_signals() -> Iterator[None]:
    """Leave signals to the next test as this one found them."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


async def test_a_stop_waits_for_what_never_had_to_wait(tmp_path: Path) -> None:
    """Requests that got the resident at once, and nothing else that would keep the router up."""

    def post(**fields: object) -> bytes:
        body = json.dumps({"model": "alpha", "messages": [], **fields}).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: "
        return f"{head}{len(body)}\r\n\r\n".encode() + body

    async with served(tmp_path, pool(member("alpha")), shutdownTimeout="15s") as router:
        await router.answered("alpha")
        async with router.raw() as whole, router.raw() as stream:
            await whole.send(post(x_delay_ms=500))
            await stream.send(post(stream=True, x_chunks=30, x_gap_ms=25))
            await router.wait_for(lambda v: v["in_flight"] == 2, "both at work")
            router.signal(signal.SIGTERM)
            assert (await whole.answer()).status == 200
            assert b"[DONE]" in (await stream.answer()).body
        assert await router.ended() == 0


@pytest.mark.usefixtures("either_client")
async def test_what_outlasts_the_limit_is_told_so(tmp_path: Path) -> None:
    settings = {"shutdownTimeout": "600ms"}
    async with served(tmp_path, pool(member("alpha"), member("beta")), **settings) as router:
        whole = router.begin(router.chat("alpha", x_delay_ms=60_000))
        async with router.stream("alpha", x_chunks=100_000, x_gap_ms=20) as stream:
            await stream.tokens(2)
            await router.wait_for(lambda v: v["in_flight"] == 2, "both at work")
            router.signal(signal.SIGINT)
            await stream.rest()
        assert stream.error is not None and not stream.is_complete
        told = await whole
        assert (told.status, told.code) == (503, "pool_draining")
        assert await router.ended() == 0


async def test_a_stop_while_a_member_loads(tmp_path: Path) -> None:
    members = (member("alpha", load=600), member("beta"))
    async with served(tmp_path, pool(*members), shutdownTimeout="10m") as router:
        held = router.begin(router.chat("alpha"))
        await router.wait_for(lambda v: v["state"] == "loading", "alpha loads")
        assert await router.terminate() == 0
        assert (await held).code == "pool_draining"


async def test_kept_connections_do_not_delay_the_end(tmp_path: Path) -> None:
    async with served(tmp_path, pool(member("alpha")), shutdownTimeout="10m") as router:
        async with aiohttp.ClientSession() as kept, router.raw() as silent:
            async with kept.get(router.url + "/v1/models") as response:
                assert response.status == 200
            await silent.send(b"GET /v1/mod")
            async with kept.get(router.admin + "/api/v1/events") as events:
                assert await events.content.readline()
                assert await router.terminate() == 0


@pytest.mark.usefixtures("own_signals")
async def test_a_member_that_cannot_be_proven_gone_is_told_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof takes its 30 s, so the last step of the stop is played here."""

    class Stuck(Router):
        async def start(self) -> None:
            self._addresses = Addresses(Address("127.0.0.1", 1), None)
            signal.raise_signal(signal.SIGTERM)

        async def stop(self, hurry: asyncio.Event | None = None) -> None:
            raise DriverUnavailable("goneCommand of member 'alpha' does not succeed")

    monkeypatch.setattr(serving, "Router", Stuck)
    file = tmp_path / "pool.yaml"
    write_config(file, {"pools": [pool(member("alpha"))]})
    with (tmp_path / "log").open("w", encoding="utf-8") as stream:
        logs = configure_logs("info", "json", stream=stream)
        try:
            code = await serving._serve(load(file), logs)
        finally:
            logs.close()
            gc.unfreeze()
    assert code == 1
    assert "goneCommand of member 'alpha' does not succeed" in (tmp_path / "log").read_text("utf-8")
