"""
An operator that is killed around every one of its writes, and one that never hears of them.

Each scenario is run once undisturbed; then once for every write, with the process killed there;
the next process must bring the world to the same end. Every write is checked for S1, S2, S8, S9
and S10 as it happens.

A process that dies just before a write, just after the one before it, or at any read in between
leaves the same world. So every write is three crash points: before it is sent, applied without an
answer, and answered; reads are sampled. MODELPOOL_EXHAUSTIVE=1 takes every read too, in all modes.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from memcluster import Killed, Mode, Request, Write
from modelpool_api.names import SLOT_ANNOTATION
from modelpool_kube import errors
from modelpool_kube.kinds import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    LEASES,
    MODEL_POOLS,
    MODEL_ROUTERS,
    PODS,
    annotation,
)
from operatorworld import NS, OperatorWorld, Process, is_operator

pytestmark = pytest.mark.looptime(idle_timeout=100_000)

EXHAUSTIVE = bool(os.environ.get("MODELPOOL_EXHAUSTIVE"))
READS_SAMPLED = 29
"""Every so many reads one is a crash point too."""
LIMIT_S = 900.0
RESYNC_ROUNDS = 150
"""Every so many rounds of two seconds everything is looked at again, as the program does it."""
BUSY_S = 240.0
"""How long an incumbent works on; longer than it takes two operators after each other to notice
that nobody holds the Lease, and to ask."""


@dataclass(frozen=True)
class Scenario:
    """What is there, what happens, and how it must end."""

    name: str
    build: Callable[[OperatorWorld], object]
    ends: Callable[[OperatorWorld], object]
    then: Callable[[OperatorWorld], object] = lambda world: None
    """Happens once the pool has come to rest for the first time."""
    rests: Callable[[OperatorWorld], object] | None = None
    """When that is; None: `then` happens at once."""
    defers: str = ""
    """Member that has to go, and works on something for `BUSY_S`; empty: none."""


def _pair(world: OperatorWorld, up: tuple[str, ...] = (), **spec: Any) -> None:
    for name in ("coder", "judge"):
        world.member(name, replicas=int(name in up))
    world.pool("gpu0", "coder", "judge", **spec)


def _scale(name: str, replicas: int) -> Callable[[OperatorWorld], object]:
    return lambda world: world.cluster.edit(DEPLOYMENTS, NS, name, {"spec": {"replicas": replicas}})


def _works(name: str) -> Callable[[OperatorWorld], object]:
    """Let *name* work on something, and turn idle a while later."""

    def begin(world: OperatorWorld) -> None:
        world.members.busy.add(name)
        asyncio.get_running_loop().call_later(BUSY_S, world.members.busy.discard, name)

    return begin


def _both(*acts: Callable[[OperatorWorld], object]) -> Callable[[OperatorWorld], object]:
    return lambda world: [act(world) for act in acts]


def _left(phase: str) -> Callable[[OperatorWorld], object]:
    """Let a router die in the middle of a swap."""

    def build(world: OperatorWorld) -> None:
        _pair(world)
        world.cluster.put(LEASES, NS, {"metadata": {"name": "modelpool-gpu0"}, "spec": {}})
        record = {"format": 1, "epoch": 4, "phase": phase, "owner": "judge", "target": "coder"}
        world.hold("gpu0", "", record)

    return build


def _is(name: str, **replicas: int) -> Callable[[OperatorWorld], object]:
    def ends(world: OperatorWorld) -> bool:
        status = world.cluster.must(MODEL_POOLS, NS, "gpu0").get("status", {})
        asked = {**world.replicas(), **world.replicas(INFERENCE_SERVICES)}
        return bool(
            status.get("residentMember") == name
            and not status.get("pendingMember")
            and world.record().get("phase", "resident") == "resident"
            and all(asked.get(each) == number for each, number in replicas.items())
        )

    return ends


def _services(world: OperatorWorld) -> None:
    for name in ("coder", "judge"):
        world.service(name)
    refs = [{"inferenceServiceRef": {"name": each}} for each in ("coder", "judge")]
    world.pool("gpu0", *refs, default="judge")


def _router(world: OperatorWorld) -> None:
    _pair(world)
    body = {
        "metadata": {"name": "front"},
        "spec": {"pools": [{"name": "gpu0"}], "allowAnonymous": True, "replicas": 3},
    }
    world.cluster.put(MODEL_ROUTERS, NS, body)


def _router_is(image: str) -> Callable[[OperatorWorld], object]:
    def ends(world: OperatorWorld) -> bool:
        found = world.cluster.must(MODEL_ROUTERS, NS, "front").get("status", {})
        made = world.cluster.read(DEPLOYMENTS, NS, "front")
        return bool(
            found.get("phase") == "Ready"
            and made is not None
            and made["spec"]["replicas"] == 1
            and made["spec"]["template"]["spec"]["containers"][0]["image"] == image
        )

    return ends


def _is_gone(world: OperatorWorld) -> bool:
    marks = [annotation(each, SLOT_ANNOTATION) for each in world.cluster.all(DEPLOYMENTS)]
    gone = not world.cluster.names(MODEL_POOLS) and not world.cluster.names(LEASES, NS)
    return gone and not any(marks) and world.replicas() == {"coder": 0, "judge": 1}


def _rename(world: OperatorWorld) -> None:
    listed = [{"inferenceServiceRef": {"name": "coder"}}]
    world.cluster.edit(MODEL_POOLS, NS, "gpu0", {"spec": {"members": listed, "default": "coder"}})


def _is_renamed(world: OperatorWorld) -> bool:
    former = world.cluster.must(INFERENCE_SERVICES, NS, "judge")
    return bool(
        _is("coder", coder=1, judge=0)(world) and annotation(former, SLOT_ANNOTATION) is None
    )


SCENARIOS = [
    Scenario(
        "a cold default is warmed",
        lambda world: _pair(world, default="judge"),
        _is("judge", coder=0, judge=1),
    ),
    Scenario(
        "two members are up",
        lambda world: _pair(world, up=("coder", "judge"), default="judge"),
        _is("judge", coder=0, judge=1),
    ),
    Scenario(
        "another one is scaled up by hand",
        lambda world: _pair(world, default="judge"),
        _is("coder", coder=1, judge=0),
        then=_scale("coder", 1),
        rests=_is("judge", coder=0, judge=1),
    ),
    Scenario("a swap was left while unloading", _left("unloading"), _is("coder", coder=1, judge=0)),
    Scenario("a swap was left while loading", _left("loading"), _is("coder", coder=1, judge=0)),
    Scenario(
        "a service is made",
        lambda world: world.service("solo"),
        lambda world: (
            world.cluster.must(INFERENCE_SERVICES, NS, "solo").get("status", {}).get("phase")
            == "Ready"
        ),
    ),
    Scenario(
        "a service is edited",
        lambda world: world.service("solo"),
        lambda world: (
            [pod["spec"]["containers"][0]["image"] for pod in world.cluster.all(PODS)]
            == ["engine:2"]
        ),
        then=lambda world: world.cluster.edit(
            INFERENCE_SERVICES, NS, "solo", {"spec": {"image": "engine:2"}}
        ),
        rests=lambda world: world.cluster.names(PODS),
    ),
    Scenario("services in a pool", _services, _is("judge", coder=0, judge=1)),
    Scenario("a router is made", _router, _router_is("modelpool:test")),
    Scenario(
        "a router gets another image",
        _router,
        _router_is("modelpool:new"),
        then=lambda world: world.cluster.edit(
            MODEL_ROUTERS, NS, "front", {"spec": {"image": "modelpool:new"}}
        ),
        rests=_router_is("modelpool:test"),
    ),
    Scenario(
        "a pool is deleted",
        lambda world: _pair(world, default="judge"),
        _is_gone,
        then=lambda world: world.cluster.remove(MODEL_POOLS, NS, "gpu0"),
        rests=_is("judge", coder=0, judge=1),
    ),
    Scenario(
        "the resident is removed from its pool",
        _services,
        _is_renamed,
        then=_rename,
        rests=_is("judge", coder=0, judge=1),
    ),
    Scenario(
        "two members are up and the one to go works",
        _both(lambda world: _pair(world, up=("coder", "judge"), default="judge"), _works("coder")),
        _is("judge", coder=0, judge=1),
        defers="coder",
    ),
    Scenario(
        "another one is scaled up by hand while the resident works",
        lambda world: _pair(world, default="judge"),
        _is("coder", coder=1, judge=0),
        then=_both(_works("judge"), _scale("coder", 1)),
        rests=_is("judge", coder=0, judge=1),
        defers="judge",
    ),
    Scenario(
        "the resident is removed from its pool while it works",
        _services,
        _is_renamed,
        then=_both(_works("judge"), _rename),
        rests=_is("judge", coder=0, judge=1),
        defers="judge",
    ),
]


async def _play(scenario: Scenario, world: OperatorWorld) -> None:
    """Play *scenario* with whatever operators are there."""
    if scenario.rests is not None:
        await world.run(LIMIT_S, until=lambda: scenario.rests and scenario.rests(world))
    scenario.then(world)
    await world.run(LIMIT_S, until=lambda: scenario.ends(world))


async def _end_quietly(scenario: Scenario, world: OperatorWorld, resyncs: int = 10) -> None:
    """Check L3: the end is reached, and then nothing is written any more."""
    await world.run(120)
    assert scenario.ends(world), f"{scenario.name}: it did not stay"
    before = world.cluster.version
    for _ in range(resyncs):
        for process in world.processes:
            process.wake_all()
        await world.run(30)
    assert world.writes(before) == []
    assert not world.violations


async def _killed(
    scenario: Scenario, number: int, mode: Mode, *, another_waits: bool
) -> OperatorWorld:
    """Play *scenario*; the first process dies around its request *number*."""
    world = OperatorWorld()
    scenario.build(world)
    port = world.cluster.port("first")
    port.kill_at(number, mode)
    first = world.start("first", port)
    began = False

    def rests() -> bool:
        return scenario.rests is None or bool(scenario.rests(world))

    def turns() -> bool:
        return (port.dead and first in world.processes) or bool(
            scenario.ends(world) if began else rests()
        )

    while True:
        try:
            await world.run(LIMIT_S, until=turns)
        except Killed:
            pass
        if port.dead and first in world.processes:
            await world.kill(first)
            # A container that is restarted has the name of its Pod; another replica has not.
            world.start("second" if another_waits else "first", world.cluster.port("second"))
        elif not began and rests():
            began = True
            scenario.then(world)
        elif began and scenario.ends(world):
            return world


async def _requests(scenario: Scenario) -> list[Request]:
    """Return the requests of an undisturbed run."""
    world = OperatorWorld()
    scenario.build(world)
    process = world.start("first", world.cluster.port("first"))
    await _play(scenario, world)
    until = len(process.port.requests)
    await _end_quietly(scenario, world)
    await world.close()
    return process.port.requests[:until]


def _points(requests: list[Request]) -> list[tuple[Request, Mode]]:
    writes = [each for each in requests if each.is_write]
    reads = [each for each in requests if not each.is_write]
    every = [(each, mode) for each in writes for mode in Mode]
    if EXHAUSTIVE:
        return [*every, *((each, mode) for each in reads for mode in Mode)]
    return [*every, *((each, Mode.BEFORE) for each in reads[READS_SAMPLED // 2 :: READS_SAMPLED])]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.name)
async def test_given_a_kill_around_any_write_then_the_next_process_ends_it_all_the_same(
    scenario: Scenario,
) -> None:
    points = _points(await _requests(scenario))
    assert len(points) >= 3
    for count, (request, mode) in enumerate(points):
        try:
            world = await _killed(scenario, request.number, mode, another_waits=bool(count % 2))
            await _end_quietly(scenario, world)
        except AssertionError as error:
            raise AssertionError(f"{mode.value}: {request}: {error}") from error
        await world.close()


@pytest.mark.parametrize(
    "scenario", [each for each in SCENARIOS if each.defers], ids=lambda each: each.name
)
async def test_given_an_incumbent_that_works_then_it_is_asked_and_stays_until_it_is_idle(
    scenario: Scenario,
) -> None:
    world = OperatorWorld()
    scenario.build(world)
    went: list[bool] = []

    def see(write: Write) -> None:
        if write.kind not in (DEPLOYMENTS, INFERENCE_SERVICES) or write.name != scenario.defers:
            return
        before, after = (
            0 if each is None or each["spec"].get("replicas") == 0 else 1
            for each in (write.before, write.after)
        )
        if before > after and is_operator(write.actor):
            went.append(scenario.defers in world.members.busy)

    world.cluster.after_write.append(see)
    world.start("first")
    deferred = False

    def is_done() -> bool:
        nonlocal deferred
        deferred |= bool(world.members.busy) and world.says("SwapDeferred") == "True/PodsBusy"
        return bool(scenario.ends(world))

    if scenario.rests is not None:
        await world.run(LIMIT_S, until=lambda: scenario.rests and scenario.rests(world))
        went.clear()  # a service is made at 0
    world.members.asked.clear()
    scenario.then(world)
    await world.run(LIMIT_S, until=is_done)

    assert deferred
    assert went and not any(went)
    assert world.members.asked.count(scenario.defers) >= 3
    await world.close()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.name)
async def test_given_any_answer_is_lost_then_it_ends_all_the_same(scenario: Scenario) -> None:
    writes = [each for each in await _requests(scenario) if each.is_write]
    numbers = {each.number: count for count, each in enumerate(writes, 1)}
    for number in numbers.values():
        for applied in (True, False):
            world = OperatorWorld()
            scenario.build(world)
            port = world.cluster.port("first")
            port.lose(applied=applied, writes=True, nth=number)
            world.start("first", port)
            try:
                await _play(scenario, world)
                await _end_quietly(scenario, world)
            except AssertionError as error:
                word = "applied" if applied else "not applied"
                raise AssertionError(f"write {number} lost, {word}: {error}") from error
            await world.close()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.name)
async def test_given_a_write_lands_late_then_it_ends_all_the_same(scenario: Scenario) -> None:
    writes = [each for each in await _requests(scenario) if each.is_write]
    for number in range(1, len(writes) + 1, 1 if EXHAUSTIVE else 2):
        world = OperatorWorld()
        scenario.build(world)
        port = world.cluster.port("first")
        port.delay(writes=True, nth=number)
        world.start("first", port)
        try:
            await _play_with(scenario, world, port.land, after_s=7.0)
            await _end_quietly(scenario, world)
        except AssertionError as error:
            raise AssertionError(f"write {number} late: {error}") from error
        await world.close()


async def _play_with(
    scenario: Scenario,
    world: OperatorWorld,
    act: Callable[[], object],
    *,
    after_s: float,
    limit_s: float = LIMIT_S,
) -> None:
    """Play *scenario* and do *act* every *after_s* seconds."""
    began = False
    deadline = asyncio.get_running_loop().time() + limit_s
    while not (began and scenario.ends(world)):
        assert asyncio.get_running_loop().time() < deadline, "it did not end"
        if not began and (scenario.rests is None or scenario.rests(world)):
            began = True
            scenario.then(world)
        await world.run(after_s)
        act()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.name)
async def test_given_a_storm_of_conflicts_then_it_ends_all_the_same(scenario: Scenario) -> None:
    world = OperatorWorld()
    scenario.build(world)
    port = world.cluster.port("first")
    for nth in range(1, 60, 2):
        port.fail(errors.Conflict("modified", code=409), writes=True, nth=nth)
    process = world.start("first", port)

    await _play(scenario, world)
    await _end_quietly(scenario, world)

    assert process.failures
    await world.close()


@pytest.mark.parametrize("age", [1, 3, 10], ids=["2 s old", "6 s old", "20 s old"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.name)
async def test_given_reads_from_the_past_then_it_ends_all_the_same(
    scenario: Scenario, age: int
) -> None:
    world = OperatorWorld()
    scenario.build(world)
    process = world.start("first", world.cluster.port("first"))
    rng = random.Random(f"{scenario.name} {age}")
    versions = [world.cluster.version]

    def lag() -> None:
        versions.append(world.cluster.version)
        late = rng.random() < 0.3
        process.port.read_version = versions[max(0, len(versions) - 1 - age)] if late else None
        if len(versions) % RESYNC_ROUNDS == 0:
            process.wake_all()  # nothing was reported after the last look, and that was old

    # What is read to and fro looks like somebody who keeps scaling: ten minutes of silence.
    await _play_with(scenario, world, lag, after_s=2.0, limit_s=4 * LIMIT_S)
    process.port.read_version = None

    await _end_quietly(scenario, world)
    await world.close()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.name)
async def test_given_the_server_is_away_for_a_while_then_it_goes_on(scenario: Scenario) -> None:
    world = OperatorWorld()
    scenario.build(world)
    world.start("first", world.cluster.port("first"))
    rounds = 0

    def away() -> None:
        nonlocal rounds
        rounds += 1
        world.cluster.down = rounds % 4 in (1, 2)

    await _play_with(scenario, world, away, after_s=20.0)
    world.cluster.down = False

    await _end_quietly(scenario, world)
    await world.close()


async def test_given_a_deposed_operator_that_wakes_up_then_it_does_no_harm() -> None:
    world = OperatorWorld()
    _pair(world, default="judge")
    first = world.start("first", world.cluster.port("first"))
    await world.run(LIMIT_S, until=lambda: first.sessions.seen(_slot()).epoch is not None)
    first.port.paused = asyncio.Event()  # it sleeps in the middle of what it was about to write
    world.processes.remove(first)
    sleeping = asyncio.get_running_loop().create_task(_step(first))
    world.start("second", world.cluster.port("second"))
    await world.run(LIMIT_S, until=lambda: _is("judge", coder=0, judge=1)(world))
    _scale("coder", 1)(world)
    await world.run(LIMIT_S, until=lambda: _is("coder", coder=1, judge=0)(world))

    first.port.paused.set()
    first.port.paused = None
    await sleeping
    for _ in range(20):
        await _step(first)
        await world.run(5)

    assert _is("coder", coder=1, judge=0)(world)
    assert not world.violations
    await first.stop()
    await world.close()


async def _step(process: Process) -> None:
    await process.step()


def _slot() -> Any:
    from modelpool_operator.plan.modelpool import slot_id

    return slot_id(NS, "gpu0")
