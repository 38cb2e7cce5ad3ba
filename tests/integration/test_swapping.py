"""A member leaves when its answers have ended, and another comes when it has gone."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from modelpool_router.core.events import Idleness
from modelpool_router.core.spec import MemberName
from served import all_of, member, pool, served_here


@pytest.mark.parametrize(("max_turn", "profile"), [("0s", "generic"), ("60s", "llama-server")])
async def test_a_stream_ends_by_itself_before_its_member_leaves(
    tmp_path: Path, max_turn: str, profile: str
) -> None:
    """By the router's own count of leases alone (generic), and with an engine that is asked."""
    members = (member("alpha", keys={"profile": profile}), member("beta"))
    async with served_here(tmp_path, pool(*members, maxTurn=max_turn)) as router:
        async with router.stream("alpha", x_chunks=20, x_gap_ms=25) as stream:
            await stream.tokens(3)
            later = router.begin(router.answered("beta"))
            await router.until_held("beta")
            await stream.tokens(19)
            nearly = time.monotonic()
            await stream.rest()
        assert (len(stream.texts), stream.is_complete, stream.error) == (20, True, None)
        assert (await later).held_ms > 100
        assert router.time_of("term", "alpha") > nearly
        assert router.time_of("start", "beta") > router.time_of("stopped", "alpha")
        assert router.starts("alpha") == 1


@pytest.mark.usefixtures("either_client")
async def test_an_answer_in_one_piece_ends_before_its_member_leaves(tmp_path: Path) -> None:
    async with served_here(tmp_path, pool(member("alpha"), member("beta"), maxTurn="0s")) as router:
        began = time.monotonic()
        slow = router.begin(router.answered("alpha", x_delay_ms=3000))
        await router.wait_for(lambda v: v["in_flight"] == 1, "alpha at work")
        later = router.begin(router.answered("beta"))
        await router.until_held("beta")
        assert (await slow).took_s >= 3.0
        await later
        assert router.time_of("term", "alpha") >= began + 3.0
        assert router.time_of("start", "beta") > router.time_of("stopped", "alpha")


@pytest.mark.usefixtures("either_client")
async def test_newcomers_wait_once_the_turn_has_ended(tmp_path: Path) -> None:
    """Who asks for the incumbent while it drains is served by it after the other's turn."""
    async with served_here(tmp_path, pool(member("alpha"), member("beta"), maxTurn="0s")) as router:
        async with router.stream("alpha", x_chunks=10, x_gap_ms=40) as stream:
            await stream.tokens(1)
            other = router.begin(router.answered("beta"))
            await router.wait_for(lambda v: v["admission"] == "closed", "the turn ended")
            late = router.begin(router.answered("alpha"))
            await router.until_held("alpha")
            await stream.rest()
        assert stream.is_complete
        first, second = await all_of(other, late)
        assert first.ended_s < second.ended_s
        assert (router.starts("alpha"), router.starts("beta")) == (2, 1)


async def test_four_hundred_holds_do_not_keep_the_slot(tmp_path: Path) -> None:
    """A is served when the turn of B ends, not after all of B's waiters."""
    members = (member("alpha"), member("beta", keys={"parallel": 2}))
    settings = {"maxHeldPerKey": 1000, "maxHeld": 1000}
    async with served_here(
        tmp_path, pool(*members, maxTurn="600ms", swapBudget="60s"), **settings
    ) as router:
        await router.answered("alpha")
        async with router.stream("alpha", x_chunks=400, x_gap_ms=10) as stream:
            await stream.tokens(1)
            crowd = [router.begin(router.answered("beta", x_delay_ms=20)) for _ in range(400)]
            await router.until_held("beta", 400)
        landed = await router.wait_for(lambda v: v["resident"] == "beta", "beta loaded")
        assert landed["member"]["beta"]["in_flight"] <= 2
        waited = await router.answered("alpha")
        assert waited.held_ms >= 400
        served_before = sum(task.done() for task in crowd)
        assert 0 < served_before < 400
        for task in crowd:
            task.cancel()


async def test_a_late_idle_answer_unloads_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine says idle, but somebody was let in since it was asked."""
    members = (member("alpha"), member("beta"))
    async with served_here(tmp_path, pool(*members, maxTurn="0s")) as router:
        await router.answered("alpha")
        driver = router.runtime().driver
        asked, answer = asyncio.Event(), asyncio.Event()
        ask, asked_for = driver.idle, []

        async def slow_idle(name: MemberName) -> Idleness:
            asked_for.append(name)
            verdict = await ask(name)
            if not asked.is_set():
                asked.set()
                await answer.wait()
            return verdict

        monkeypatch.setattr(driver, "idle", slow_idle)
        gone = router.begin(router.chat("beta"))
        await asked.wait()
        gone.cancel()  # nobody wants beta any more: admission opens again
        await router.wait_for(lambda v: v["admission"] == "open", "admission open again")
        async with router.stream("alpha", x_chunks=20, x_gap_ms=20) as stream:
            await stream.tokens(1)
            again = router.begin(router.answered("beta"))
            await router.wait_for(lambda v: v["admission"] == "closed", "closed once more")
            answer.set()
            await stream.rest()
        assert (len(stream.texts), stream.is_complete) == (20, True)
        await again
        assert router.starts("alpha") == 1
        assert asked_for == ["alpha", "alpha"]  # what was said before says nothing about now


async def test_an_emptied_pool_stays_empty_until_somebody_asks(tmp_path: Path) -> None:
    """`default` and `idleUnloadAfter` together make no loop."""
    rules = {"default": "alpha", "idleUnloadAfter": "200ms"}
    async with served_here(tmp_path, pool(member("alpha"), member("beta"), **rules)) as router:
        await router.until_resident("alpha")
        await router.answered("alpha")
        view = await router.wait_for(lambda v: v["released"], "released")
        assert view["state"] == "cold"
        await asyncio.sleep(0.5)  # the time in which a loop would show
        assert router.starts("alpha") == 1
        assert (await router.pool())["state"] == "cold"
        await router.answered("beta")
        assert (router.starts("alpha"), router.starts("beta")) == (1, 1)


async def test_a_default_is_warmed_and_yields_to_demand(tmp_path: Path) -> None:
    members = (member("alpha", load=0.2), member("beta"))
    async with served_here(tmp_path, pool(*members, default="alpha")) as router:
        await router.until_resident("alpha")
        await router.answered("beta")
        await asyncio.sleep(0.2)  # sticky: nothing brings the default back by itself
        assert (await router.pool())["resident"] == "beta"
        assert router.starts("alpha") == 1


async def test_an_idle_stranger_gives_way_to_the_default(tmp_path: Path) -> None:
    rules = {"default": "alpha", "reclaimDefaultAfter": "300ms"}
    async with served_here(tmp_path, pool(member("alpha"), member("beta"), **rules)) as router:
        await router.until_resident("alpha")
        answer = await router.answered("beta")
        await router.until_resident("alpha")
        assert router.time_of("term", "beta") - answer.ended_s >= 0.25
        swap = (await router.swaps())[0]
        assert (swap["source"], swap["target"], swap["cause"]) == ("beta", "alpha", "reclaim")


async def test_a_person_loads_empties_and_pauses(tmp_path: Path) -> None:
    async with served_here(tmp_path, pool(member("alpha"), member("beta"))) as router:
        assert await router.act("load", "beta") == 202
        await router.until_resident("beta")
        assert await router.act("pause") == 202
        held = router.begin(router.answered("alpha"))
        await router.until_held("alpha")
        await router.answered("beta")
        assert router.starts("alpha") == 0
        assert await router.act("resume") == 202
        await held
        assert await router.act("unload") == 202
        await router.wait_for(lambda v: v["state"] == "cold" and v["released"], "emptied")
