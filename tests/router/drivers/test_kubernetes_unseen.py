"""The Kubernetes driver while its watches have listed nothing yet: not seen is not absent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from kubeworld import NAMESPACE, KubeWorld, Watchman
from memcluster import MemPort, Trail
from memcontrollers import runs
from modelpool_api.names import SLOT_ANNOTATION
from modelpool_kube.kinds import AUTOSCALERS, DEPLOYMENTS, LEASES, PODS, Json, Kind, annotation
from modelpool_kube.port import Listing
from modelpool_router.core.spec import MemberName
from modelpool_router.drivers.base import DriverUnavailable
from modelpool_router.drivers.kubernetes import KubeLimits, KubernetesDriver

pytestmark = pytest.mark.looptime(idle_timeout=100_000, noop_cycles=8)

ALPHA, BETA = MemberName("alpha"), MemberName("beta")
LIST_S = 3.0
"""How long a slow list takes."""


@asynccontextmanager
async def places() -> AsyncIterator[KubeWorld]:
    """Make a world whose invariants are looked at."""
    world = KubeWorld(step_s=0.05)
    watchman = Watchman(world)
    yield world
    await world.end()
    assert watchman.verdicts == []


def slow(port: MemPort, kind: Kind, name: str = "", *, times: int = 99) -> None:
    """Let the next lists of *kind*, or of the one called *name*, take long."""
    at_once, left = port.list, times

    async def listed(
        asked: Kind, namespace: str | None, *, labels: str = "", fields: str = ""
    ) -> Listing:
        nonlocal left
        if asked == kind and fields.endswith(name) and left:
            left -= 1
            await asyncio.sleep(LIST_S)
        return await at_once(asked, namespace, labels=labels, fields=fields)

    port.list = listed  # type: ignore[method-assign,assignment]


async def started(world: KubeWorld, port: MemPort) -> KubernetesDriver:
    driver = world.driver("router-1", port=port, limits=KubeLimits())
    await driver.observe()
    return driver


async def until(what: Callable[[], object], limit_s: float = 60.0) -> None:
    """Let virtual time pass until *what* is so."""
    async with asyncio.timeout(limit_s):
        while not what():
            await asyncio.sleep(0.1)


def scaler(name: str) -> Json:
    target = {"kind": "Deployment", "name": name, "apiVersion": "apps/v1"}
    return {"metadata": {"name": f"{name}-scaler"}, "spec": {"scaleTargetRef": target}}


async def test_a_removed_member_that_was_not_listed_yet_loses_its_mark_all_the_same() -> None:
    async with places() as world:
        port = world.cluster.port("router-1")
        driver = await started(world, port)
        await driver.activate(ALPHA)

        def mark() -> str | None:
            return annotation(world.cluster.must(DEPLOYMENTS, NAMESPACE, "beta"), SLOT_ANNOTATION)

        assert mark() is not None
        slow(port, DEPLOYMENTS, "beta")
        driver.update({ALPHA: world.specs()[ALPHA]}, default=None)

        await until(lambda: mark() is None)
        await driver.close(stop_members=False)


async def test_no_member_is_written_before_it_is_known_who_else_scales_it() -> None:
    async with places() as world:
        world.cluster.put(AUTOSCALERS, NAMESPACE, scaler("beta"))
        trail = Trail(world.cluster)
        port = world.cluster.port("router-1")
        slow(port, AUTOSCALERS)
        driver = world.driver("router-1", port=port, limits=KubeLimits())
        looking = asyncio.get_running_loop().create_task(driver.observe())

        await until(lambda: "beta-scaler" in driver.standing.withheld)

        assert {write.kind for write in trail.new("router-1")} == {LEASES}
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await driver.close(stop_members=False)


async def test_an_autoscaler_is_not_forgotten_while_the_members_change() -> None:
    async with places() as world:
        port = world.cluster.port("router-1")
        driver = world.driver("router-1", port=port, limits=KubeLimits())
        driver.update({ALPHA: world.specs()[ALPHA]}, default=None)
        await driver.observe()
        await driver.activate(ALPHA)
        world.cluster.put(AUTOSCALERS, NAMESPACE, scaler("alpha"))
        await until(lambda: "alpha-scaler" in driver.standing.withheld)
        trail = Trail(world.cluster)
        slow(port, AUTOSCALERS)

        driver.update(world.specs(), default=None)
        with pytest.raises(DriverUnavailable, match="alpha-scaler"):
            await driver.deactivate(ALPHA)

        assert "alpha-scaler" in driver.standing.withheld
        assert {write.kind for write in trail.new("router-1")} <= {LEASES}
        await driver.close(stop_members=False)


async def test_without_the_right_to_look_for_autoscalers_the_pool_works() -> None:
    async with places() as world:
        port = world.cluster.port("router-1")
        driver = world.driver("router-1", port=port, limits=KubeLimits())
        allowed = port.rights
        port.rights = lambda asked: asked.kind != AUTOSCALERS and allowed(asked)
        async with asyncio.timeout(60):
            await driver.observe()
            await driver.activate(ALPHA)

        assert world.up() == {"alpha"}
        await driver.close(stop_members=False)


async def test_pods_that_failed_before_a_load_do_not_fail_it() -> None:
    """Three are left behind by evictions, and the members have just been changed."""
    async with places() as world:
        port = world.cluster.port("router-1")
        driver = await started(world, port)
        await driver.activate(ALPHA)
        for _ in range(3):
            await until(lambda: any(map(runs, world.pods("alpha"))))
            name = world.pod("alpha")["metadata"]["name"]
            world.world.kubelet.fail(NAMESPACE, name, "Evicted")
        await driver.deactivate(ALPHA)
        failed = [pod for pod in world.pods("alpha") if pod["status"]["phase"] == "Failed"]
        assert len(failed) == 3
        slow(port, PODS, times=1)  # the first one after the change is the watch's

        world.hanging.add("alpha")  # it loads for longer than the list takes

        driver.update(world.specs(port=8000), default=None)
        load = asyncio.get_running_loop().create_task(driver.activate(ALPHA))
        await asyncio.sleep(LIST_S * 2)
        world.hanging.clear()
        await load

        assert await driver.ready(ALPHA)
        await driver.close(stop_members=False)


async def test_the_resident_of_an_invalid_pool_is_found_although_its_pod_is_listed_last() -> None:
    async with places() as world:
        before = world.driver("router-1", limits=KubeLimits())
        await before.observe()
        endpoint = await before.activate(ALPHA)
        await before.close(stop_members=True)
        world.cluster.remove(DEPLOYMENTS, NAMESPACE, "beta")
        port = world.cluster.port("router-1")
        slow(port, PODS)
        driver = world.driver("router-1", port=port, limits=KubeLimits())

        assert await driver.observe() == {ALPHA: endpoint}

        assert "MissingMembers" in driver.standing.withheld
        await driver.close(stop_members=False)
