"""
The written contract of `MemberDriver`, run against every driver.

A new driver joins by a `World` of its own: it builds the driver over two members, alpha and beta,
and brings about what the tests ask for.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Protocol

import aiohttp
import pytest

from fakemembers import PYTHON_ENV, EventLog, carrying, fake_command, is_alive, until
from kubeworld import KubeWorld, Watchman
from memcontrollers import runs
from modelpool_router.core.events import Idleness
from modelpool_router.core.spec import MemberName, PoolName
from modelpool_router.drivers.base import (
    ActivationFailed,
    DriverUnavailable,
    Endpoint,
    MemberDriver,
)
from modelpool_router.drivers.process import Limits, ProcessDriver, ProcessMember
from modelpool_router.drivers.procfs import Proc, ProcTable
from modelpool_router.drivers.profiles import ProfileOverrides, profile
from modelpool_router.testing.driver import FakeDriver

ALPHA, BETA = MemberName("alpha"), MemberName("beta")


class World(Protocol):
    """What the tests need to be able to bring about."""

    driver: MemberDriver
    losses: list[tuple[MemberName, str, str]]
    crash_reason: str
    """Word for an engine that ends while it loads."""
    members_outlive_routers: bool

    def fail_next_load(self, member: MemberName) -> None: ...
    def hang_loads(self, member: MemberName) -> None: ...
    def load_normally(self, member: MemberName) -> None: ...
    def slow_unloads(self, member: MemberName) -> None: ...
    def make_immortal(self, member: MemberName, *, on: bool) -> None: ...
    async def loading(self, member: MemberName) -> None: ...
    async def kill(self, member: MemberName) -> None: ...
    async def occupy(self, member: MemberName) -> None: ...
    def exists(self, member: MemberName) -> bool: ...
    def starts(self, member: MemberName) -> int: ...
    async def end(self) -> None: ...


class FakeWorld:
    """The in-memory driver."""

    crash_reason = "exited"
    members_outlive_routers = False

    def __init__(self) -> None:
        self.losses: list[tuple[MemberName, str, str]] = []
        self.fake = FakeDriver(
            [ALPHA, BETA],
            lost=lambda name, reason, detail: self.losses.append((name, reason, detail)),
        )
        self.driver: MemberDriver = self.fake

    def fail_next_load(self, member: MemberName) -> None:
        self.fake.behaviours[member].load_failures.append(ActivationFailed("exited", "exit code 1"))

    def hang_loads(self, member: MemberName) -> None:
        self.fake.behaviours[member].load_hangs = True

    def load_normally(self, member: MemberName) -> None:
        self.fake.behaviours[member].load_hangs = False

    def slow_unloads(self, member: MemberName) -> None:
        self.fake.behaviours[member].unload_s = 0.05

    def make_immortal(self, member: MemberName, *, on: bool) -> None:
        failures = [DriverUnavailable("outlived KILL")] if on else []
        self.fake.behaviours[member].unload_failures = failures

    async def loading(self, member: MemberName) -> None:
        await until(lambda: member in self.fake.existing, "it loads")

    async def kill(self, member: MemberName) -> None:
        self.fake.die(member)

    async def occupy(self, member: MemberName) -> None:
        self.fake.behaviours[member].idle = Idleness.BUSY

    def exists(self, member: MemberName) -> bool:
        return member in self.fake.existing

    def starts(self, member: MemberName) -> int:
        return self.fake.count("started", member)

    async def end(self) -> None:
        self.make_immortal(ALPHA, on=False)
        await self.driver.close(stop_members=True)


class HauntedTable(ProcTable):
    """The real process table, with processes in it that no signal reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.haunted: set[str] = set()

    def find(self, slot: str, sessions: Mapping[int, int]) -> list[Proc]:
        pool, _, asked = slot.rpartition("/")
        ghosts = [
            Proc(2**30, 1, 2**30, 2**30, 1, "D", slot=f"{pool}/{name}")
            for name in self.haunted
            if asked in ("", name) and "/" in pool
        ]
        return super().find(slot, sessions) + ghosts


class ProcessWorld:
    """Real processes of the fake member."""

    crash_reason = "exited"
    members_outlive_routers = False

    def __init__(self, folder: Path) -> None:
        self.losses: list[tuple[MemberName, str, str]] = []
        self.log = EventLog(folder / "events.jsonl")
        self._flags: dict[MemberName, tuple[str, ...]] = {ALPHA: (), BETA: ()}
        self._table = HauntedTable()
        self._busy: list[aiohttp.ClientSession] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._endpoint: Endpoint | None = None
        self.process = ProcessDriver(
            PoolName("gpu0"),
            self._members(),
            state_dir=folder / "state",
            lost=lambda name, reason, detail: self.losses.append((name, reason, detail)),
            limits=Limits(kill_s=0.2, gone_s=0.5),
            processes=self._table,
        )
        self.driver: MemberDriver = self.process
        self.state_id = (folder / "state" / "id").read_text().strip()

    def _members(self) -> dict[MemberName, ProcessMember]:
        known = profile("llama-server", ProfileOverrides(stop_grace_s=1.0, kill_grace_s=0.1))
        return {
            name: ProcessMember(
                name=name,
                command=fake_command(name, *flags, log=self.log.path),
                profile=known,
                env=PYTHON_ENV,
            )
            for name, flags in self._flags.items()
        }

    def _set(self, member: MemberName, *flags: str) -> None:
        self._flags[member] = flags
        self.process.update(self._members(), settle=None)

    def fail_next_load(self, member: MemberName) -> None:
        self._set(member, "--exit-at-start", "1")

    def hang_loads(self, member: MemberName) -> None:
        self._set(member, "--never-ready")

    def load_normally(self, member: MemberName) -> None:
        self._set(member)

    def slow_unloads(self, member: MemberName) -> None:
        self._set(member, "--unload", "0.3")

    def make_immortal(self, member: MemberName, *, on: bool) -> None:
        self._table.haunted = {member} if on else set()

    async def loading(self, member: MemberName) -> None:
        await self.log.wait_for("listening", member, count=self.starts(member) or 1)

    async def kill(self, member: MemberName) -> None:
        os.kill(self.log.events("start", member)[-1]["pid"], signal.SIGKILL)

    async def occupy(self, member: MemberName) -> None:
        endpoint = (await self.driver.observe())[member]
        session = aiohttp.ClientSession()
        self._busy.append(session)

        async def hang() -> None:
            url = f"http://{endpoint.host}:{endpoint.port}/v1/chat/completions"
            async with session.post(url, json={"x_hang": True}):
                pass

        self._tasks.append(asyncio.get_running_loop().create_task(hang()))

    def exists(self, member: MemberName) -> bool:
        return bool(carrying(f"{self.state_id}/gpu0/{member}"))

    def starts(self, member: MemberName) -> int:
        return len(self.log.events("start", member))

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for session in self._busy:
            await session.close()
        self.make_immortal(ALPHA, on=False)
        await self.driver.close(stop_members=True)
        assert not carrying(self.state_id)


class ClusterWorld:
    """Members in a cluster in memory."""

    crash_reason = "CrashLoopBackOff"
    members_outlive_routers = True

    def __init__(self, kind: str) -> None:
        self.losses: list[tuple[MemberName, str, str]] = []
        self.cluster = KubeWorld(kind)
        self.watchman = Watchman(self.cluster)
        self.driver: MemberDriver = self.cluster.driver(
            lost=lambda name, reason, detail: self.losses.append((name, reason, detail))
        )

    def fail_next_load(self, member: MemberName) -> None:
        self.cluster.failing.add(member)

    def hang_loads(self, member: MemberName) -> None:
        self.cluster.hanging.add(member)

    def load_normally(self, member: MemberName) -> None:
        self.cluster.failing.discard(member)
        self.cluster.hanging.discard(member)

    def slow_unloads(self, member: MemberName) -> None:
        self.cluster.unload_s[member] = 0.3

    def make_immortal(self, member: MemberName, *, on: bool) -> None:
        self.cluster.immortal = {member} if on else set()

    async def loading(self, member: MemberName) -> None:
        def runs_now() -> bool:
            return any(map(runs, self.cluster.pods(member)))

        await until(runs_now, "its container runs")

    async def kill(self, member: MemberName) -> None:
        if member in self.cluster.hanging:
            self.cluster.crash(member)
        else:
            self.cluster.restart_container(member)

    async def occupy(self, member: MemberName) -> None:
        self.cluster.busy.add(member)

    def exists(self, member: MemberName) -> bool:
        return self.cluster.exists(member)

    def starts(self, member: MemberName) -> int:
        return self.cluster.starts(member)

    async def end(self) -> None:
        await self.driver.close(stop_members=True)
        await self.cluster.end()
        assert self.watchman.verdicts == []


KINDS = ["Deployment", "StatefulSet", "InferenceService", "ModelDeployment"]


@pytest.fixture(params=["fake", "process", *KINDS])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    made: World
    match request.param:
        case "fake":
            made = FakeWorld()
        case "process":
            made = ProcessWorld(tmp_path)
        case kind:
            made = ClusterWorld(kind)
    await made.driver.observe()  # the contract: before anything else
    yield made
    await made.end()


async def cancelled(task: asyncio.Task[object]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_nothing_is_up_at_first(world: World) -> None:
    assert await world.driver.observe() == {}
    assert not await world.driver.ready(ALPHA)
    assert await world.driver.idle(ALPHA) is Idleness.UNREACHABLE


async def test_activate_returns_a_member_that_is_ready(world: World) -> None:
    endpoint = await world.driver.activate(ALPHA)

    assert await world.driver.ready(ALPHA)
    assert await world.driver.observe() == {ALPHA: endpoint}
    assert await world.driver.idle(ALPHA) is Idleness.IDLE


async def test_activate_twice_is_one_start(world: World) -> None:
    first = await world.driver.activate(ALPHA)
    second = await world.driver.activate(ALPHA)

    assert first == second
    assert world.starts(ALPHA) == 1


async def test_two_callers_at_once_share_one_start(world: World) -> None:
    first, second = await asyncio.gather(world.driver.activate(ALPHA), world.driver.activate(ALPHA))

    assert first == second
    assert world.starts(ALPHA) == 1


async def test_deactivate_returns_when_nothing_is_left(world: World) -> None:
    await world.driver.activate(ALPHA)

    await world.driver.deactivate(ALPHA)

    assert not world.exists(ALPHA)
    assert await world.driver.observe() == {}
    assert not await world.driver.ready(ALPHA)
    assert world.losses == []


async def test_deactivate_of_what_never_was_or_is_gone_does_nothing(world: World) -> None:
    await world.driver.deactivate(ALPHA)
    await world.driver.activate(ALPHA)
    await world.driver.deactivate(ALPHA)

    await world.driver.deactivate(ALPHA)

    assert not world.exists(ALPHA)


async def test_every_life_has_its_own_identity(world: World) -> None:
    first = await world.driver.activate(ALPHA)
    await world.driver.deactivate(ALPHA)
    second = await world.driver.activate(ALPHA)

    assert first.identity != second.identity
    assert "" not in (first.identity, second.identity)


async def test_a_load_that_dies_fails_with_its_reason_and_the_next_one_succeeds(
    world: World,
) -> None:
    world.fail_next_load(ALPHA)
    with pytest.raises(ActivationFailed) as failure:
        await world.driver.activate(ALPHA)
    await world.driver.deactivate(ALPHA)
    world.load_normally(ALPHA)

    await world.driver.activate(ALPHA)

    assert failure.value.reason == world.crash_reason
    assert "exit code 1" in failure.value.detail
    assert failure.value.retryable
    assert world.losses == []


async def test_a_load_that_died_can_be_tried_again_without_a_deactivate(world: World) -> None:
    world.fail_next_load(ALPHA)
    with pytest.raises(ActivationFailed):
        await world.driver.activate(ALPHA)
    world.load_normally(ALPHA)

    await world.driver.activate(ALPHA)

    assert await world.driver.ready(ALPHA)


async def test_a_cancelled_load_is_cleaned_up_by_deactivate(world: World) -> None:
    world.hang_loads(ALPHA)
    load = asyncio.get_running_loop().create_task(world.driver.activate(ALPHA))
    await world.loading(ALPHA)

    await cancelled(load)
    assert world.exists(ALPHA)
    assert await world.driver.observe() == {}
    await world.driver.deactivate(ALPHA)

    assert not world.exists(ALPHA)
    await world.driver.activate(BETA)


async def test_deactivate_ends_a_load_that_still_runs(world: World) -> None:
    world.hang_loads(ALPHA)
    load = asyncio.get_running_loop().create_task(world.driver.activate(ALPHA))
    await world.loading(ALPHA)

    await world.driver.deactivate(ALPHA)

    with pytest.raises(ActivationFailed) as failure:
        await load
    assert failure.value.reason == "stopped"
    assert not world.exists(ALPHA)


async def test_a_cancelled_deactivate_can_be_called_again(world: World) -> None:
    world.slow_unloads(ALPHA)
    await world.driver.activate(ALPHA)
    unload = asyncio.get_running_loop().create_task(world.driver.deactivate(ALPHA))
    await until(lambda: not_ready(world, ALPHA), "the unload has begun")

    await cancelled(unload)
    assert await world.driver.observe() == {}
    await world.driver.deactivate(ALPHA)

    assert not world.exists(ALPHA)


async def not_ready(world: World, member: MemberName) -> bool:
    return not await world.driver.ready(member)


async def test_activate_after_a_cancelled_deactivate_starts_afresh(world: World) -> None:
    world.slow_unloads(ALPHA)
    first = await world.driver.activate(ALPHA)
    unload = asyncio.get_running_loop().create_task(world.driver.deactivate(ALPHA))
    await until(lambda: not_ready(world, ALPHA), "the unload has begun")
    await cancelled(unload)

    second = await world.driver.activate(ALPHA)

    assert second.identity != first.identity
    assert world.starts(ALPHA) == 2


async def test_nothing_starts_beside_another_member(world: World) -> None:
    endpoint = await world.driver.activate(ALPHA)

    with pytest.raises(DriverUnavailable, match="alpha is not gone"):
        await world.driver.activate(BETA)

    assert world.starts(BETA) == 0
    assert await world.driver.observe() == {ALPHA: endpoint}


async def test_of_two_members_asked_for_at_once_one_starts(world: World) -> None:
    loads = await asyncio.gather(
        world.driver.activate(ALPHA), world.driver.activate(BETA), return_exceptions=True
    )

    assert sum(isinstance(load, Endpoint) for load in loads) == 1
    assert sum(isinstance(load, DriverUnavailable) for load in loads) == 1
    assert world.starts(ALPHA) + world.starts(BETA) == 1


async def test_the_end_of_a_ready_member_is_reported_once(world: World) -> None:
    await world.driver.activate(ALPHA)

    await world.kill(ALPHA)
    await until(lambda: bool(world.losses), "the loss is reported")
    assert await world.driver.observe() == {}
    await world.driver.deactivate(ALPHA)
    await world.driver.activate(ALPHA)

    assert [(member, reason) for member, reason, _ in world.losses] == [(ALPHA, "exited")]
    assert await world.driver.ready(ALPHA)


async def test_a_death_while_loading_is_a_failed_load_and_no_loss(world: World) -> None:
    world.hang_loads(ALPHA)
    load = asyncio.get_running_loop().create_task(world.driver.activate(ALPHA))
    await world.loading(ALPHA)

    await world.kill(ALPHA)

    with pytest.raises(ActivationFailed) as failure:
        await load
    assert failure.value.reason == world.crash_reason
    assert world.losses == []


async def test_a_working_engine_is_busy(world: World) -> None:
    await world.driver.activate(ALPHA)

    await world.occupy(ALPHA)

    async def busy() -> bool:
        return await world.driver.idle(ALPHA) is Idleness.BUSY

    await until(busy, "the probe says busy")


async def test_what_cannot_be_proven_gone_is_said_and_can_be_tried_again(world: World) -> None:
    await world.driver.activate(ALPHA)
    world.make_immortal(ALPHA, on=True)

    with pytest.raises(DriverUnavailable):
        await world.driver.deactivate(ALPHA)
    assert await world.driver.observe() == {}
    with pytest.raises(DriverUnavailable):
        await world.driver.activate(BETA)
    world.make_immortal(ALPHA, on=False)
    await world.driver.deactivate(ALPHA)

    assert not world.exists(ALPHA)
    await world.driver.activate(BETA)


async def test_progress_is_told_while_a_member_loads(world: World) -> None:
    assert world.driver.progress(ALPHA) == ""
    world.hang_loads(ALPHA)
    load = asyncio.get_running_loop().create_task(world.driver.activate(ALPHA))
    await world.loading(ALPHA)

    told = world.driver.progress(ALPHA)

    assert "load" in told
    await cancelled(load)


async def test_close_takes_everything_down_and_may_be_called_twice(world: World) -> None:
    await world.driver.activate(ALPHA)

    await world.driver.close(stop_members=True)
    await world.driver.close(stop_members=True)

    assert world.exists(ALPHA) == world.members_outlive_routers
    assert world.losses == []


async def test_a_load_can_be_cancelled_at_every_moment(world: World) -> None:
    # Each round lets the load get a little further before it is cancelled.
    for steps in range(0, 60, 3):
        load = asyncio.get_running_loop().create_task(world.driver.activate(ALPHA))
        for _ in range(steps):
            await asyncio.sleep(0)
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
        await world.driver.deactivate(ALPHA)
        assert not world.exists(ALPHA)

    await world.driver.activate(BETA)


def test_is_alive_tells_the_dead() -> None:
    # guards the tests above: a check that never says "dead" would prove nothing
    assert is_alive(os.getpid())
    assert not is_alive(2**30)
