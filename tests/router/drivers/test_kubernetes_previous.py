"""Other routers that may still send requests to what is up: nothing is stopped under them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from kubeworld import LEASE, NAMESPACE, KubeWorld, Watchman
from memcluster import MemPort
from memcontrollers import runs
from modelpool_kube.errors import Forbidden
from modelpool_kube.kinds import DEPLOYMENTS, LEASES, PODS, Kind
from modelpool_kube.port import Listing
from modelpool_router.cli.cluster import forgotten
from modelpool_router.core.spec import MemberName
from modelpool_router.drivers.kubernetes import KubeLimits, KubernetesDriver
from modelpool_router.drivers.profiles import ProfileOverrides, profile

pytestmark = pytest.mark.looptime(idle_timeout=100_000, noop_cycles=8)

ALPHA, BETA = MemberName("alpha"), MemberName("beta")
PROBED = profile("llama-server", ProfileOverrides())
BLIND = profile("generic", ProfileOverrides())
"""Without an idle probe."""


class Place:
    """Routers in Pods, and what they asked for."""

    def __init__(self) -> None:
        self.world = KubeWorld(step_s=0.05)
        self.watchman = Watchman(self.world)
        self.ports: dict[str, MemPort] = {}
        self.known = PROBED

    async def started(self, name: str) -> KubernetesDriver:
        """Return the driver of a router that has looked around, in a Pod of its own."""
        self.world.add_router_pod(name)
        await self.world.rested()
        driver = self.driver(name)
        await driver.observe()
        return driver

    def driver(self, name: str) -> KubernetesDriver:
        """Return the driver of a router."""
        port = self.ports[name] = self.world.cluster.port(name)
        return self.world.driver(name, port=port, limits=KubeLimits(), known=self.known)

    def cut_off(self, name: str) -> None:
        """Let the router *name* reach the API server no more; it serves on."""
        self.ports[name].paused = asyncio.Event()

    def heal(self, name: str) -> None:
        """Let it reach the API server again."""
        paused, self.ports[name].paused = self.ports[name].paused, None
        assert paused is not None
        paused.set()


@asynccontextmanager
async def places() -> AsyncIterator[Place]:
    """Make a place; look in the end whether anybody broke a rule."""
    place = Place()
    yield place
    for port in place.ports.values():
        if port.paused is not None:
            port.paused.set()
            port.paused = None
    for driver in place.world.routers.values():
        await driver.close(stop_members=False)
    await place.world.end()
    assert place.watchman.verdicts == []


async def until(what: Callable[[], object], limit_s: float = 100.0) -> None:
    """Let virtual time pass until *what* is so."""
    async with asyncio.timeout(limit_s):
        while not what():
            await asyncio.sleep(0.1)


async def taken_over(place: Place) -> tuple[KubernetesDriver, KubernetesDriver]:
    """Let router-1 load alpha and be cut off, and router-2 take over."""
    first = await place.started("router-1")
    await first.activate(ALPHA)
    place.cut_off("router-1")
    return first, await place.started("router-2")


async def lease_deleted(place: Place) -> tuple[KubernetesDriver, KubernetesDriver]:
    """Let router-1 load alpha and be cut off, and router-2 start where no Lease is any more."""
    first = await place.started("router-1")
    await first.activate(ALPHA)
    place.cut_off("router-1")
    await asyncio.sleep(1)
    place.world.cluster.vanish(LEASES, NAMESPACE, LEASE)
    return first, await place.started("router-2")


BEFORE = pytest.mark.parametrize("before", [taken_over, lease_deleted])


@BEFORE
async def test_who_stands_by_is_waited_for_no_longer(before: Callable[..., object]) -> None:
    async with places() as place:
        first, second = await before(place)  # type: ignore[misc]
        await asyncio.sleep(60)
        assert await first.ready(ALPHA)
        assert second.standing.withheld.startswith("router router-1 ")
        assert "may still forward requests" in second.standing.withheld

        place.heal("router-1")
        await until(lambda: first.standing.aside)
        await until(lambda: not second.standing.withheld)

        await second.deactivate(ALPHA)
        await second.activate(BETA)


@BEFORE
async def test_without_an_idle_probe_its_pod_has_to_be_gone(before: Callable[..., object]) -> None:
    """It forwards nothing any more, but may still be passing on a long answer."""
    async with places() as place:
        place.known = BLIND
        first, second = await before(place)  # type: ignore[misc]
        place.heal("router-1")
        await until(lambda: first.standing.aside)
        await asyncio.sleep(60)
        assert "router router-1 stands by and may still wait for answers of alpha" in (
            second.standing.withheld
        )
        assert "delete the Pod, or say `modelpool forget router-1`" in second.standing.withheld

        place.world.cluster.remove(PODS, NAMESPACE, "router-1")

        await until(lambda: not second.standing.withheld)
        await second.deactivate(ALPHA)
        await second.activate(BETA)
        # What it has loaded itself was never sent anything by others.
        await second.deactivate(BETA)


@BEFORE
async def test_a_person_can_say_that_it_is_off(before: Callable[..., object]) -> None:
    """Its Pod is still there, because its node is lost."""
    async with places() as place:
        _, second = await before(place)  # type: ignore[misc]
        await asyncio.sleep(30)
        assert second.standing.withheld

        await forgotten(place.world.cluster.port("modelpool-cli"), NAMESPACE, "router-1", "gpu0")

        await until(lambda: not second.standing.withheld)


async def test_a_stray_beside_the_resident_is_left_alone_while_the_last_holder_may_use_it() -> None:
    async with places() as place:
        first = await place.started("router-1")
        await first.activate(ALPHA)
        place.cut_off("router-1")
        place.world.hanging.add("beta")  # which is idle, as far as it says
        place.world.scale("beta", 1)
        await until(lambda: any(map(runs, place.world.pods("beta"))))
        second = await place.started("router-2")
        await asyncio.sleep(60)
        assert place.world.replicas("beta") == 1

        place.heal("router-1")
        await until(lambda: first.standing.aside)

        await until(lambda: place.world.replicas("beta") == 0)
        assert await second.ready(ALPHA)


async def test_a_resident_that_does_not_answer_us_is_not_stopped_under_the_last_holder() -> None:
    async with places() as place:
        first = await place.started("router-1")
        await first.activate(ALPHA)
        place.cut_off("router-1")
        place.world.hanging.add("alpha")
        second = place.driver("router-2")
        looking = asyncio.get_running_loop().create_task(second.observe())
        await asyncio.sleep(200)
        assert place.world.replicas("alpha") == 1

        place.world.cluster.remove(PODS, NAMESPACE, "router-1")

        async with asyncio.timeout(200):
            assert await looking == {}


async def test_that_nobody_was_asked_outlives_the_router_that_found_no_lease() -> None:
    async with places() as place:
        _, second = await lease_deleted(place)
        await asyncio.sleep(10)
        await second.close(stop_members=False)

        third = await place.started("router-3")
        await asyncio.sleep(60)

        assert "router router-1 may have held the slot before" in third.standing.withheld


async def test_other_routers_are_looked_for_where_the_lease_is_new_and_never_again() -> None:
    async with places() as place:
        looks: list[str] = []

        def watched(name: str) -> None:
            at_once = place.ports[name].list

            async def listed(kind: Kind, namespace: str | None, **more: str) -> Listing:
                if more.get("labels"):
                    looks.append(name)
                return await at_once(kind, namespace, **more)

            place.ports[name].list = listed  # type: ignore[method-assign]

        for name in ("router-1", "router-2"):
            driver = place.driver(name)
            watched(name)
            await driver.observe()
            await driver.activate(ALPHA)
            await asyncio.sleep(300)
            await driver.close(stop_members=False)

        assert looks == ["router-1"]


async def test_routers_of_other_pools_and_such_that_do_not_run_are_not_waited_for() -> None:
    async with places() as place:
        first = await place.started("router-1")
        await first.activate(ALPHA)
        await first.close(stop_members=False)
        place.world.cluster.remove(PODS, NAMESPACE, "router-1")
        other = place.driver("router-9")
        other.pool = type(other.pool)("gpu1")
        place.world.add_router_pod("router-9")
        place.world.add_router_pod("router-0")
        await place.world.rested()
        place.world.world.kubelet.wait_with(NAMESPACE, "router-0", "ImagePullBackOff")
        await other.close(stop_members=False)
        place.world.cluster.vanish(LEASES, NAMESPACE, LEASE)

        second = await place.started("router-2")

        await until(lambda: not second.standing.withheld, 5.0)
        await second.deactivate(ALPHA)


async def test_without_the_right_to_list_routers_nothing_that_was_up_is_stopped() -> None:
    async with places() as place:
        first = await place.started("router-1")
        await first.activate(ALPHA)
        await first.close(stop_members=False)
        place.world.cluster.vanish(LEASES, NAMESPACE, LEASE)
        second = place.driver("router-2")
        port = place.ports["router-2"]
        allowed = port.list

        async def listed(kind: Kind, namespace: str | None, **more: str) -> Listing:
            if more.get("labels"):
                raise Forbidden("cannot list pods", code=403)
            return await allowed(kind, namespace, **more)

        port.list = listed  # type: ignore[method-assign]
        await second.observe()

        assert "was made anew" in second.standing.withheld
        assert place.world.cluster.must(DEPLOYMENTS, NAMESPACE, "alpha")["spec"]["replicas"] == 1


@pytest.mark.parametrize("after", ["router-2", "router-3"])
async def test_who_is_still_at_work_outlives_the_router_that_took_over(after: str) -> None:
    """The Lease then tells of the second router alone, or of nobody."""
    async with places() as place:
        first, second = await taken_over(place)
        await asyncio.sleep(10)
        assert second.standing.withheld.startswith("router router-1 ")
        await second.close(stop_members=False)
        if after == "router-2":  # a container that was started again
            third = place.driver(after)
            await third.observe()
        else:
            place.world.cluster.remove(PODS, NAMESPACE, "router-2")
            third = await place.started(after)
        await asyncio.sleep(60)

        assert await first.ready(ALPHA)
        assert "router router-1 " in third.standing.withheld
        place.heal("router-1")
        await until(lambda: not third.standing.withheld)
