"""The first look of a Kubernetes driver, when somebody else takes the slot in the middle of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kubeworld import KubeWorld, Watchman
from modelpool_router.core.spec import MemberName
from modelpool_router.drivers.kubernetes import KubeLimits

pytestmark = pytest.mark.looptime(idle_timeout=100_000, noop_cycles=8)

ALPHA, BETA = MemberName("alpha"), MemberName("beta")


async def until(what: Callable[[], object]) -> None:
    """Let virtual time pass until *what* is so."""
    async with asyncio.timeout(300):
        while not what():
            await asyncio.sleep(0.1)


async def test_who_loses_the_lease_while_it_looks_takes_nothing_for_its_own() -> None:
    world = KubeWorld(step_s=0.05)
    watchman = Watchman(world)
    limits = KubeLimits()
    before = world.driver("router-0", limits=limits)
    await before.observe()
    await before.activate(ALPHA)
    await before.close(stop_members=False)

    port = world.cluster.port("router-1")
    first = world.driver("router-1", port=port, limits=limits)
    answer = first._prober.get
    asleep = asyncio.Event()

    async def fall_asleep(host: str, to: int, path: str, *, timeout_s: float) -> object:
        # The last question of all: how many requests it works on at once.
        if path == "/slots" and port.paused is None:
            port.paused = asyncio.Event()
            asleep.set()
            await port.paused.wait()
        return await answer(host, to, path, timeout_s=timeout_s)

    first._prober.get = fall_asleep  # type: ignore[method-assign,assignment]  # one slow answer
    looking = asyncio.get_running_loop().create_task(first.observe())
    await asleep.wait()
    second = world.driver("router-2", limits=limits)
    await second.observe()
    await until(lambda: not second.standing.withheld)
    assert port.paused is not None
    port.paused.set()
    await until(lambda: first.standing.aside)
    await asyncio.sleep(30)

    assert not looking.done()
    assert not await first.ready(ALPHA)
    await second.deactivate(ALPHA)
    await second.activate(BETA)
    assert watchman.verdicts == []

    # Once it is its turn again, it finds what is there by then.
    await second.close(stop_members=False)
    assert set(await looking) == {BETA}
    await first.close(stop_members=False)
    await world.end()
