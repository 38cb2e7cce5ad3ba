"""The router is killed at any step of a swap and started again: a legal state, without repair."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from fakemembers import carrying, is_alive
from served import ServedProcess, member, pool, serve_and_fail, served, served_here

Step = Callable[[ServedProcess], Awaitable[None]]


async def before_anything(router: ServedProcess) -> None:
    """Cold, and nobody has asked."""
    await router.wait_for(lambda v: v["state"] == "cold", "cold")


async def while_it_loads(router: ServedProcess) -> None:
    before = router.starts("alpha")
    _ = router.begin(router.chat("alpha"))
    await router.members.wait_for("start", "alpha", count=before + 1)


async def while_it_is_resident(router: ServedProcess) -> None:
    await router.answered("alpha")


async def while_it_drains(router: ServedProcess) -> None:
    await router.answered("alpha")
    _ = router.begin(router.chat("alpha", x_delay_ms=60_000))
    await router.wait_for(lambda v: v["in_flight"] == 1, "alpha works")
    _ = router.begin(router.chat("beta"))
    await router.wait_for(lambda v: v["admission"] == "closed" and v["resident"], "alpha drains")


async def while_it_unloads(router: ServedProcess) -> None:
    await router.answered("alpha")
    before = len(router.members.events("term", "alpha"))
    _ = router.begin(router.chat("beta"))
    await router.wait_for(lambda v: v["state"] == "unloading", "alpha unloads")
    await router.members.wait_for("term", "alpha", count=before + 1)


async def while_the_next_one_loads(router: ServedProcess) -> None:
    await router.answered("alpha")
    before = router.starts("beta")
    _ = router.begin(router.chat("beta"))
    await router.members.wait_for("start", "beta", count=before + 1)


STEPS: tuple[Step, ...] = (
    before_anything,
    while_it_loads,
    while_it_is_resident,
    while_it_drains,
    while_it_unloads,
    while_the_next_one_loads,
)


async def test_killed_at_every_step_of_a_swap(tmp_path: Path) -> None:
    members = (member("alpha", load=0.2, unload=0.3), member("beta", load=0.3))
    async with served(tmp_path, pool(*members, maxTurn="0s")) as router:
        value = await router.slot_value()
        for step in STEPS:
            await step(router)
            left = carrying(value)
            assert bool(left) == (step is not before_anything), step.__name__
            await router.kill9()
            await router.cancel_tasks()
            await router.restart()
            # what the killed router left behind is taken down before anything is loaded
            view = await router.wait_for(lambda v: v["state"] == "cold", step.__name__)
            assert (view["held"], view["in_flight"], view["resident"]) == (0, 0, None)
            assert not [pid for pid in left if is_alive(pid)], step.__name__
        await router.answered("beta")
        await router.answered("alpha")
        assert (await router.pool())["resident"] == "alpha"


async def test_what_was_learnt_and_emptied_is_remembered(tmp_path: Path) -> None:
    """Load times and "emptied on purpose" outlive a kill: the default is not warmed again."""
    rules = {"default": "alpha"}
    async with served(tmp_path, pool(member("alpha", load=0.3), **rules)) as router:
        await router.until_resident("alpha")
        await router.act("unload")
        await router.wait_for(lambda v: v["released"], "emptied")
        await router.until_remembered()
        await router.kill9()
        await router.restart()
        view = await router.wait_for(lambda v: v["state"] == "cold", "started")
        assert view["released"]
        assert view["member"]["alpha"]["load_measured"]
        assert 0.25 <= view["member"]["alpha"]["load_estimate_s"] <= 5.0
        assert router.starts("alpha") == 1
        await router.answered("alpha")


async def test_a_second_router_is_kept_off(tmp_path: Path) -> None:
    async with served_here(tmp_path, pool(member("alpha"))) as router:
        await router.answered("alpha")
        code, errors = await serve_and_fail(router.config_path)
        assert code == 1
        assert f"pool 'gpu0' is run by process {os.getpid()} already" in errors
        assert "another stateDir" in errors
        # and the first one, with its member, did not notice
        await router.answered("alpha")
        assert router.starts("alpha") == 1
        assert len(await router.swaps()) == 1
