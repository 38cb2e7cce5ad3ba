"""
A router over Kubernetes that is killed around every one of its requests.

Each story is told once undisturbed; then once for every crash point, and the next router must
bring the world to the same end. Every write is held against the invariants as it happens.

By default every write is a crash point in all modes, and one read in five is one in one mode;
MODELPOOL_EXHAUSTIVE=1 takes every request and every mode.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from crashpoints import Scenario, kill_everywhere, lose_everywhere
from kubeworld import LEASE, NAMESPACE, KubeWorld, Watchman
from memcluster import Killed, MemPort, Mode, Request, Trail
from modelpool_api.names import SLOT_ANNOTATION
from modelpool_kube.kinds import LEASES, annotation
from modelpool_router.core.events import Idleness
from modelpool_router.core.spec import MemberName
from modelpool_router.drivers.base import ActivationFailed, DriverUnavailable
from modelpool_router.drivers.kubernetes import KubeLimits, KubernetesDriver

pytestmark = pytest.mark.looptime(idle_timeout=100_000, noop_cycles=8)

ALPHA, BETA = MemberName("alpha"), MemberName("beta")
LIMITS = KubeLimits()
EXHAUSTIVE = bool(os.environ.get("MODELPOOL_EXHAUSTIVE"))
Work = Callable[[KubernetesDriver], Awaitable[object]]


class Place:
    """A world that is watched."""

    def __init__(self, kind: str) -> None:
        self.world = KubeWorld(kind, step_s=0.05)
        # An end takes a while, so that who does not wait for it is caught.
        self.world.unload_s = dict.fromkeys(self.world.names, 2.0)
        self.watchman = Watchman(self.world)
        self.strangers = False
        """Whether somebody else has brought members up."""

    async def with_router(self, name: str, port: MemPort, work: Work) -> None:
        """Let a router over *port* do *work*, or be killed over it."""
        port.name = name
        driver = self.world.driver(name, port=port, limits=LIMITS)
        task = asyncio.get_running_loop().create_task(_all_of(work, driver))
        try:
            async with asyncio.timeout(1200):
                while not task.done() and not port.dead:
                    await asyncio.wait({task}, timeout=0.5)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await driver.close(stop_members=False)
            await self.world.rested()
        if port.dead:
            raise Killed(port.name)
        task.result()

    async def before(self, work: Work) -> None:
        """Let a router do *work* undisturbed, and end in peace."""
        await self.with_router("router-0", self.world.cluster.port("router-0"), work)


async def _all_of(work: Work, driver: KubernetesDriver) -> None:
    await work(driver)


def quietly(place: Place, work: Work) -> Work:
    """
    Let the world come to rest before *work* and after it, and see that nothing is written then.

    Before it, nobody asks for anything: what was left half done is put right all the same.
    """

    async def rest(driver: KubernetesDriver, resyncs: int) -> None:
        world = place.world
        async with asyncio.timeout(1200):
            while not (up := set(await driver.observe())) and world.up():
                await asyncio.sleep(1)
        await world.rested()
        await asyncio.sleep(LIMITS.resync_s)
        assert world.up() == up, "what is up is what the router takes for up"
        trail, before = Trail(world.cluster), world.record()
        await asyncio.sleep(resyncs * LIMITS.resync_s)
        assert {each.kind for each in trail.new()} <= {LEASES}, "it is not quiet"
        assert world.record() == before

    async def whole(driver: KubernetesDriver) -> None:
        await driver.observe()
        if not place.strangers:  # who of two that are up is to stay is the scheduler's to say
            await rest(driver, 2)
        await work(driver)
        await rest(driver, 10)

    return whole


def swapped(*targets: MemberName) -> Work:
    """Bring one of *targets* after the other up, as a scheduler does: others only when idle."""

    async def work(driver: KubernetesDriver) -> None:
        for target in targets:
            while True:
                with contextlib.suppress(DriverUnavailable):
                    for other in await driver.observe():
                        if other != target:
                            await _emptied(driver, other)
                    try:
                        await driver.activate(target)
                    except ActivationFailed:
                        await driver.deactivate(target)
                    break
                await asyncio.sleep(1)

    return work


def emptied(*targets: MemberName) -> Work:
    """Bring *targets* up one after the other, and take the last one down."""

    async def work(driver: KubernetesDriver) -> None:
        await swapped(*targets)(driver)
        while True:
            with contextlib.suppress(DriverUnavailable):
                for each in await driver.observe():
                    await _emptied(driver, each)
                return
            await asyncio.sleep(1)

    return work


async def _emptied(driver: KubernetesDriver, member: MemberName) -> None:
    while await driver.idle(member) is not Idleness.IDLE:
        await asyncio.sleep(1)
    await driver.deactivate(member)


async def abandoned(driver: KubernetesDriver) -> None:
    """Begin to load alpha and end in the middle of it."""
    await driver.observe()
    load = asyncio.get_running_loop().create_task(driver.activate(ALPHA))
    await asyncio.sleep(5)
    load.cancel()
    await asyncio.gather(load, return_exceptions=True)


@dataclass(frozen=True)
class Story:
    """What a router does that is killed, what the next one does, and what must be so then."""

    name: str
    work: Work
    kind: str = "Deployment"
    prepare: Callable[[Place], Awaitable[object]] | None = None
    again: Work = swapped(BETA)
    up: str = "beta"
    """Who is up in the end; empty: nobody."""

    def scenario(self) -> Scenario[Place]:
        """Return it as crash points want it."""

        async def run(place: Place, port: MemPort) -> None:
            if self.prepare is not None:
                await self.prepare(place)
            await place.with_router("router-first", port, self.work)

        async def recover(place: Place, port: MemPort) -> None:
            await place.with_router("router-second", port, quietly(place, self.again))

        return Scenario(
            lambda: Place(self.kind), lambda place: place.world.cluster, run, recover, self.check
        )

    def check(self, place: Place) -> None:
        """Look whether it ended well and nobody broke a rule on the way."""
        world = place.world
        world.stop()
        assert world.refused == []
        assert place.watchman.verdicts == []
        assert world.up() == ({self.up} if self.up else set())
        assert place.strangers or place.watchman.most_up <= 1
        marks = {
            annotation(world.cluster.must(world.kind, NAMESPACE, name), SLOT_ANNOTATION)
            for name in world.names
        }
        assert marks == {f"{NAMESPACE}/{LEASE}:{world.record().epoch}"}


async def _resident(place: Place) -> None:
    await place.before(swapped(ALPHA))


async def _half_loaded(place: Place) -> None:
    place.world.hanging.add("alpha")
    await place.before(abandoned)
    place.world.hanging.clear()


async def _both_up(place: Place) -> None:
    place.strangers = True
    for name in place.world.names:
        place.world.scale(name, 1)
    await place.world.rested()


async def _lease_deleted(place: Place) -> None:
    await _resident(place)
    place.world.cluster.remove(LEASES, NAMESPACE, LEASE)


async def _undone(place: Place) -> None:
    await _resident(place)
    undo = {
        "metadata": {"annotations": {SLOT_ANNOTATION: f"{NAMESPACE}/{LEASE}:1"}},
        "spec": {"template": {"metadata": {"labels": {"v": "1"}}}},
    }
    place.world.cluster.edit(place.world.kind, NAMESPACE, "beta", undo)


async def _failed_pod(place: Place) -> None:
    await _resident(place)
    pod = str(place.world.pod("alpha")["metadata"]["name"])
    place.world.world.kubelet.fail(NAMESPACE, pod, "Evicted")
    await place.world.rested()


async def _busy_for_a_while(place: Place) -> None:
    await _resident(place)
    place.world.busy.add("alpha")
    place.world.loop.call_later(20.0, place.world.busy.clear)


async def _busy_stray(place: Place) -> None:
    place.strangers = True
    await _resident(place)
    place.world.busy.add("beta")
    place.world.hanging.add("beta")
    place.world.scale("beta", 1)
    await place.world.rested()
    place.world.loop.call_later(20.0, place.world.busy.clear)
    place.world.loop.call_later(20.0, place.world.hanging.clear)


async def _cannot_load(place: Place) -> None:
    place.world.failing.add("alpha")


STORIES = [
    Story("a swap of Deployments", swapped(ALPHA, BETA)),
    Story("a swap of StatefulSets", swapped(ALPHA, BETA), "StatefulSet"),
    Story("a swap of InferenceServices", swapped(ALPHA, BETA), "InferenceService"),
    Story("a swap of ModelDeployments", swapped(ALPHA, BETA), "ModelDeployment"),
    Story("a swap away from the resident of a router before", swapped(BETA), prepare=_resident),
    Story("a swap that has to wait for answers", swapped(BETA), prepare=_busy_for_a_while),
    Story("a member at work that somebody else brought up", swapped(BETA), prepare=_busy_stray),
    Story("a load that a router before left half done", swapped(BETA), prepare=_half_loaded),
    Story("two members that somebody else brought up", swapped(BETA), prepare=_both_up),
    Story("the Lease was deleted", swapped(BETA), prepare=_lease_deleted),
    Story("a rollout was undone", swapped(BETA), prepare=_undone),
    Story("a failed Pod was left behind", swapped(BETA), prepare=_failed_pod),
    Story("a member that crashes again and again", swapped(ALPHA, BETA), prepare=_cannot_load),
    Story("the slot is emptied", emptied(ALPHA), again=emptied(), up=""),
]


def telling(request: Request, mode: Mode) -> bool:
    """Pick every write, and reads here and there: to be killed before or after one is the same."""
    return EXHAUSTIVE or request.is_write or (mode is Mode.AFTER and request.number % 5 == 0)


@pytest.mark.parametrize("story", STORIES, ids=lambda each: each.name)
async def test_killed_around_any_request_the_next_router_repairs_it(story: Story) -> None:
    visited = await kill_everywhere(story.scenario(), only=telling)

    print(f"{story.name}: {len(visited)} crash points")
    assert sum(each.request.is_write for each in visited) >= 12


@pytest.mark.parametrize("story", STORIES, ids=lambda each: each.name)
async def test_any_answer_may_be_lost(story: Story) -> None:
    assert len(await lose_everywhere(story.scenario())) >= 8
