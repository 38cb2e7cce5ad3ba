"""
What the Kubernetes driver does beyond the contract: crashes, outages, other routers, other hands.

All on a cluster in memory, in virtual time; every write of a router is held against the invariants.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from functools import cached_property

import pytest

from kubeworld import LEASE, NAMESPACE, KubeWorld, Watchman
from memcluster import Trail, WatchFilter, repeating, swapping
from memcontrollers import OUT_OF_SERVICE, deployment, node, pod_spec
from modelpool_api.names import RECORD_ANNOTATION, SLOT_ANNOTATION
from modelpool_kube import errors
from modelpool_kube.kinds import AUTOSCALERS, DEPLOYMENTS, LEASES, NODES, PODS, Json, annotation
from modelpool_kube.port import WatchEvent
from modelpool_kube.record import Phase, decode
from modelpool_router.core.events import Idleness
from modelpool_router.core.spec import MemberName
from modelpool_router.drivers.base import (
    ActivationFailed,
    DriverUnavailable,
    SlotMemory,
    SlotStanding,
)
from modelpool_router.drivers.kubernetes import KubeLimits, KubernetesDriver
from modelpool_router.drivers.profiles import ProfileOverrides, profile

pytestmark = pytest.mark.looptime(idle_timeout=100_000, noop_cycles=8)

ALPHA, BETA = MemberName("alpha"), MemberName("beta")
LIMITS = KubeLimits()


class Bench:
    """A world, and the drivers that a test makes in it."""

    def __init__(self) -> None:
        self.losses: list[tuple[MemberName, str, str]] = []
        self.standings: list[SlotStanding] = []
        self.drivers: list[KubernetesDriver] = []

    @cached_property
    def world(self) -> KubeWorld:
        """The world; made by the test, in whose time it lives, and not by its fixture."""
        return KubeWorld(step_s=0.05)

    @cached_property
    def watchman(self) -> Watchman:
        """Looks at every write."""
        return Watchman(self.world)

    def driver(self, name: str = "router-1", **more: object) -> KubernetesDriver:
        """Return a driver whose news are kept."""
        assert self.watchman.verdicts == []
        made = self.world.driver(
            name,
            limits=LIMITS,
            lost=lambda *news: self.losses.append(news),
            standing=self.standings.append,
            **more,  # type: ignore[arg-type]
        )
        self.drivers.append(made)
        return made

    async def started(self, name: str = "router-1", **more: object) -> KubernetesDriver:
        """Return a driver that has looked around."""
        made = self.driver(name, **more)
        await made.observe()
        return made

    async def end(self) -> None:
        """End everything and look whether the invariants held."""
        for driver in self.drivers:
            await driver.close(stop_members=False)
        await self.world.end()
        assert self.watchman.verdicts == []


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    await made.end()


async def until(what: Callable[[], object], limit_s: float = 300.0) -> None:
    """Let virtual time pass until *what* is so."""
    async with asyncio.timeout(limit_s):
        while not what():
            await asyncio.sleep(0.1)


def owners_told(trail: Trail) -> set[str | None]:
    """Return every owner of the slot that a record named since *trail* began."""
    leases = [write.after for write in trail.new("router-1") if write.kind == LEASES]
    records = [decode(annotation(each, RECORD_ANNOTATION)) for each in leases if each]
    return {each.owner for each in records if each}


# The record and the fence


async def test_a_load_is_recorded_and_marked_on_everybody_before_it_begins(bench: Bench) -> None:
    driver = await bench.started()
    trail = Trail(bench.world.cluster)

    await driver.activate(ALPHA)

    writes = [w for w in trail.new("router-1") if w.verb == "patch"]
    assert [(w.kind.kind, w.name) for w in writes[:4]] == [
        ("Lease", LEASE),
        ("Deployment", "alpha"),
        ("Deployment", "beta"),
        ("Deployment", "alpha"),
    ]
    scaled = writes[3].after
    assert scaled is not None and scaled["spec"]["replicas"] == 1
    record = bench.world.record()
    assert (record.owner, record.target, record.phase) == ("alpha", None, Phase.RESIDENT)


async def test_a_load_is_announced_in_the_record_while_it_runs(bench: Bench) -> None:
    bench.world.hanging.add("alpha")
    driver = await bench.started()
    load = asyncio.get_running_loop().create_task(driver.activate(ALPHA))
    await until(lambda: bench.world.replicas("alpha") == 1)

    record = bench.world.record()

    assert (record.owner, record.target, record.phase) == (None, "alpha", Phase.LOADING)
    bench.world.hanging.clear()
    await load


async def test_the_endpoint_is_the_pods_own_address(bench: Bench) -> None:
    driver = await bench.started()

    endpoint = await driver.activate(ALPHA)

    pod = bench.world.pod("alpha")
    assert (endpoint.host, endpoint.port) == (pod["status"]["podIP"], 8000)
    assert endpoint.identity == pod["metadata"]["uid"]
    assert endpoint.parallel == 2


async def test_requests_can_go_to_a_service_instead(bench: Bench) -> None:
    driver = bench.driver()
    driver.update(bench.world.specs(service="front"), default=None)
    await driver.observe()

    endpoint = await driver.activate(ALPHA)

    assert (endpoint.host, endpoint.port) == ("front.lab.svc", 8000)


async def test_at_rest_nothing_but_the_lease_is_written_and_nothing_is_polled(
    bench: Bench,
) -> None:
    port = bench.world.cluster.port("router-1")
    driver = await bench.started(port=port)
    await driver.activate(ALPHA)
    await asyncio.sleep(30)
    trail = Trail(bench.world.cluster)
    before = len(port.requests)

    await asyncio.sleep(600)

    assert {write.kind for write in trail.new("router-1")} == {LEASES}
    assert bench.losses == []
    asked = Counter(each.verb for each in port.requests[before:])
    # Renewals of the Lease; and watches, which end by themselves now and then.
    assert asked.keys() <= {"patch", "list", "watch"}
    assert asked["patch"] <= 600 / (15 * 0.27) + 1
    assert asked["list"] == asked["watch"] <= 5 * 3


# Adopting


async def test_a_restarted_router_adopts_the_resident(bench: Bench) -> None:
    first = await bench.started("router-1")
    before = await first.activate(ALPHA)
    await first.close(stop_members=True)

    second = bench.driver("router-1")
    found = await second.observe()

    assert found == {ALPHA: before}
    assert second.remembered() == SlotMemory(released=False, prefer=ALPHA)
    assert bench.world.starts("alpha") == 1


async def test_a_member_that_was_loading_is_waited_for(bench: Bench) -> None:
    bench.world.hanging.add("alpha")
    first = await bench.started("router-1")
    load = asyncio.get_running_loop().create_task(first.activate(ALPHA))
    await until(lambda: bench.world.replicas("alpha") == 1)
    load.cancel()
    await asyncio.gather(load, return_exceptions=True)
    await first.close(stop_members=True)

    second = bench.driver("router-1")
    looking = asyncio.get_running_loop().create_task(second.observe())
    await asyncio.sleep(60)
    assert not looking.done()
    bench.world.hanging.clear()

    assert set(await looking) == {ALPHA}
    assert bench.world.starts("alpha") == 1


async def test_a_load_that_cannot_land_is_not_waited_for(bench: Bench) -> None:
    bench.world.hanging.add("alpha")
    first = await bench.started("router-1")
    load = asyncio.get_running_loop().create_task(first.activate(ALPHA))
    await until(lambda: bench.world.up() == {"alpha"} and bench.world.world.running())
    load.cancel()
    await asyncio.gather(load, return_exceptions=True)
    await first.close(stop_members=True)
    bench.world.crash("alpha")

    assert await bench.driver("router-1").observe() == {}

    assert not bench.world.exists("alpha")
    assert bench.world.record().phase is Phase.COLD


async def test_of_two_that_are_up_both_are_told_and_the_owner_is_preferred(bench: Bench) -> None:
    first = await bench.started("router-1")
    await first.activate(BETA)
    await first.close(stop_members=True)
    bench.world.scale("alpha", 1)
    await until(
        lambda: bench.world.up() == {"alpha", "beta"} and len(bench.world.world.running()) == 2
    )
    await asyncio.sleep(5)

    second = bench.driver("router-1")

    assert set(await second.observe()) == {ALPHA, BETA}
    assert second.remembered().prefer == BETA


async def test_that_the_slot_was_emptied_on_purpose_is_remembered(bench: Bench) -> None:
    driver = await bench.started("router-1")
    await driver.activate(ALPHA)
    await driver.deactivate(ALPHA)
    lease = bench.world.cluster.must(LEASES, NAMESPACE, LEASE)
    text = (annotation(lease, RECORD_ANNOTATION) or "").replace(
        '"released":false', '"released":true'
    )
    await driver.close(stop_members=False)
    patch = {"metadata": {"annotations": {RECORD_ANNOTATION: text}}}
    bench.world.cluster.edit(LEASES, NAMESPACE, LEASE, patch)

    second = await bench.started("router-1")

    assert second.remembered().released


# Failing fast, in Kubernetes' words


@pytest.mark.parametrize(
    ("word", "retryable"),
    [("ImagePullBackOff", False), ("ErrImagePull", False), ("InvalidImageName", False)],
)
async def test_an_image_that_cannot_be_had_fails_the_load(
    bench: Bench, word: str, retryable: bool
) -> None:
    bench.world.hanging.add("alpha")
    driver = await bench.started()
    load = asyncio.get_running_loop().create_task(driver.activate(ALPHA))
    await until(lambda: bench.world.world.running())
    name = bench.world.pod("alpha")["metadata"]["name"]
    bench.world.world.kubelet.wait_with(NAMESPACE, name, word)

    with pytest.raises(ActivationFailed, match="simulated") as failure:
        await load

    assert failure.value.reason == word
    assert "engine:1" in failure.value.detail
    assert failure.value.retryable is retryable


async def test_a_few_restarts_are_no_failure_yet(bench: Bench) -> None:
    bench.world.hanging.add("alpha")
    driver = await bench.started()
    load = asyncio.get_running_loop().create_task(driver.activate(ALPHA))
    await until(lambda: bench.world.world.running())
    bench.world.restart_container("alpha", code=1)
    bench.world.restart_container("alpha", code=1)
    bench.world.hanging.clear()

    endpoint = await load

    assert endpoint.identity == f"{bench.world.pod('alpha')['metadata']['uid']}/2"


async def test_out_of_memory_fails_the_load_at_once(bench: Bench) -> None:
    bench.world.hanging.add("alpha")
    driver = await bench.started()
    load = asyncio.get_running_loop().create_task(driver.activate(ALPHA))
    await until(lambda: bench.world.world.running())
    bench.world.restart_container("alpha", reason="OOMKilled")

    with pytest.raises(ActivationFailed) as failure:
        await load

    assert failure.value.reason == "OOMKilled"
    assert "exit code 137" in failure.value.detail


async def test_no_node_is_waited_for_as_long_as_was_said(bench: Bench) -> None:
    bench.world.cluster.edit(NODES, None, "n1", {"spec": {"unschedulable": True}})
    driver = bench.driver()
    driver.update(bench.world.specs(unschedulable_after_s=120.0), default=None)
    await driver.observe()
    began = asyncio.get_running_loop().time()

    with pytest.raises(ActivationFailed) as failure:
        await driver.activate(ALPHA)

    assert failure.value.reason == "Unschedulable"
    assert 119 <= asyncio.get_running_loop().time() - began <= 131
    assert failure.value.retryable


async def test_without_the_right_to_scale_the_load_fails_with_the_servers_words(
    bench: Bench,
) -> None:
    port = bench.world.cluster.port("router-1")
    driver = await bench.started(port=port)
    message = 'cannot patch resource "deployments" in API group "apps"'
    port.fail(errors.Forbidden(message, code=403), verb="patch", kind=DEPLOYMENTS, times=99)

    with pytest.raises(ActivationFailed, match="cannot patch") as failure:
        await driver.activate(ALPHA)

    assert failure.value.reason == "Forbidden"
    assert not failure.value.retryable


# Losses


@pytest.mark.parametrize(
    ("happens", "reason"),
    [
        (lambda world: world.cluster.remove(PODS, NAMESPACE, _pod(world)), "PodDeleted"),
        (lambda world: world.world.kubelet.fail(NAMESPACE, _pod(world), "Evicted"), "Evicted"),
        (lambda world: world.restart_container("alpha"), "exited"),
        (lambda world: world.restart_container("alpha", "OOMKilled"), "OOMKilled"),
        (lambda world: world.cluster.vanish(PODS, NAMESPACE, _pod(world)), "PodGone"),
        (lambda world: world.closed.add("alpha"), "port_closed"),
        (lambda world: world.scale("alpha", 0), "PodDeleted"),
    ],
)
async def test_the_end_of_a_resident_is_reported_once(
    bench: Bench, happens: Callable[[KubeWorld], object], reason: str
) -> None:
    driver = await bench.started()
    await driver.activate(ALPHA)

    happens(bench.world)
    await asyncio.sleep(10)

    assert [(name, why) for name, why, _ in bench.losses] == [(ALPHA, reason)]
    assert not await driver.ready(ALPHA)
    await driver.deactivate(ALPHA)
    assert set(bench.world.up()) == set()


def _pod(world: KubeWorld) -> str:
    return str(world.pod("alpha")["metadata"]["name"])


async def test_a_pod_that_takes_long_to_end_is_waited_for(bench: Bench) -> None:
    driver = await bench.started()
    await driver.activate(ALPHA)
    bench.world.unload_s["alpha"] = 60.0
    began = bench.world.loop.time()

    await driver.deactivate(ALPHA)
    await driver.activate(BETA)

    assert bench.world.loop.time() - began > 60
    assert bench.world.up() == {"beta"}


async def test_a_failed_pod_that_was_left_behind_does_not_stop_a_swap(bench: Bench) -> None:
    driver = await bench.started()
    await driver.activate(ALPHA)
    bench.world.world.kubelet.fail(NAMESPACE, _pod(bench.world), "Evicted")
    await until(lambda: bench.losses)

    await driver.deactivate(ALPHA)
    await driver.activate(BETA)

    assert bench.world.up() == {"beta"}


async def test_a_lost_node_keeps_the_slot_until_somebody_decides(bench: Bench) -> None:
    bench.world.cluster.put(NODES, None, node("n2", 4))
    driver = await bench.started()
    await driver.activate(ALPHA)
    where = bench.world.pod("alpha")["spec"]["nodeName"]
    bench.world.world.kubelet.lose(where)
    bench.world.closed.add("alpha")
    await until(lambda: bench.losses)

    with pytest.raises(DriverUnavailable, match="Pods of Deployment lab/alpha are left"):
        await driver.deactivate(ALPHA)
    assert bench.world.replicas("beta") == 0
    patch = {"spec": {"taints": [{"key": OUT_OF_SERVICE, "effect": "NoExecute"}]}}
    bench.world.cluster.edit(NODES, None, where, patch)
    await driver.deactivate(ALPHA)
    await driver.activate(BETA)

    assert bench.world.replicas("beta") == 1


async def test_a_pod_that_a_person_forgets_counts_as_gone(bench: Bench) -> None:
    bench.world.cluster.put(NODES, None, node("n2", 4))
    driver = await bench.started()
    await driver.activate(ALPHA)
    pod = bench.world.pod("alpha")
    where = pod["spec"]["nodeName"]
    bench.world.cluster.edit(NODES, None, where, {"spec": {"unschedulable": True}})
    bench.world.world.kubelet.lose(where)
    bench.world.closed.add("alpha")
    await until(lambda: bench.losses)
    with pytest.raises(DriverUnavailable):
        await driver.deactivate(ALPHA)

    lease = bench.world.cluster.must(LEASES, NAMESPACE, LEASE)
    text = (annotation(lease, RECORD_ANNOTATION) or "").replace(
        '"forgotten":[]', f'"forgotten":["{pod["metadata"]["uid"]}"]'
    )
    patch = {"metadata": {"annotations": {RECORD_ANNOTATION: text}}}
    bench.world.cluster.edit(LEASES, NAMESPACE, LEASE, patch, actor="modelpool-cli")
    bench.watchman.forgotten.add("alpha")
    await asyncio.sleep(10)
    await driver.deactivate(ALPHA)
    await driver.activate(BETA)

    assert bench.world.replicas("beta") == 1


# Outages


async def test_while_the_api_server_is_away_the_resident_is_believed_and_nothing_moves(
    bench: Bench,
) -> None:
    driver = await bench.started()
    endpoint = await driver.activate(ALPHA)
    bench.world.cluster.down = True
    bench.world.cluster.break_watches()
    for _ in range(60):
        await asyncio.sleep(1)
        assert await driver.observe() == {ALPHA: endpoint}
        assert await driver.idle(ALPHA) is Idleness.IDLE
    assert bench.standings[-1].withheld
    assert not bench.standings[-1].aside
    swap = asyncio.get_running_loop().create_task(driver.deactivate(ALPHA))
    await asyncio.sleep(30)
    assert not swap.done()

    bench.world.cluster.down = False
    await until(lambda: not bench.standings[-1].withheld, 10.0)
    await swap
    await driver.activate(BETA)

    assert bench.losses == []
    assert bench.world.up() == {"beta"}


@pytest.mark.parametrize("seconds", [5.0, 40.0, 400.0])
async def test_a_load_goes_on_after_an_outage(bench: Bench, seconds: float) -> None:
    bench.world.hanging.add("alpha")
    driver = await bench.started()
    load = asyncio.get_running_loop().create_task(driver.activate(ALPHA))
    await until(lambda: bench.world.world.running())
    bench.world.cluster.down = True
    bench.world.cluster.break_watches()
    await asyncio.sleep(seconds)
    assert not load.done()
    bench.world.hanging.clear()
    bench.world.cluster.down = False

    await load

    assert bench.world.starts("alpha") == 1


async def test_a_storm_of_conflicts_delays_a_swap_and_no_more(bench: Bench) -> None:
    port = bench.world.cluster.port("router-1")
    driver = await bench.started(port=port)
    await driver.activate(ALPHA)
    conflict = errors.Conflict("changed", code=409, reason="Conflict")
    port.fail(conflict, verb="patch", kind=DEPLOYMENTS, times=40)

    await driver.deactivate(ALPHA)
    await driver.activate(BETA)

    assert bench.world.up() == {"beta"}


async def test_a_patch_that_lands_long_after_it_was_given_up_changes_nothing(bench: Bench) -> None:
    port = bench.world.cluster.port("router-1")
    driver = await bench.started(port=port)
    for _ in range(3):
        port.delay(verb="patch", kind=DEPLOYMENTS, times=9)
        await driver.activate(ALPHA)
        await driver.deactivate(ALPHA)
        await driver.activate(BETA)
        port.land()
        await asyncio.sleep(5)
        assert bench.world.up() == {"beta"}
        await driver.deactivate(BETA)
        port.land()
        await asyncio.sleep(5)
        assert bench.world.up() == set()


def forgetful() -> WatchFilter:
    """Return a filter that loses every second event and repeats others."""
    rng = random.Random(3)
    return lambda event: [event] * rng.choice([0, 0, 1, 2])


def in_each_watch(make: Callable[[], WatchFilter]) -> WatchFilter:
    """Return *make*'s filter for the objects of each watch by themselves."""
    made: dict[str, WatchFilter] = {}

    def filtered(event: WatchEvent) -> Iterable[WatchEvent]:
        kind, name = event.object["kind"], event.object["metadata"]["name"]
        watch = f"{kind} {name}" if kind == "Deployment" else str(kind)
        return made.setdefault(watch, make())(event)

    return filtered


@pytest.mark.parametrize("filtered", [forgetful, repeating, swapping])
async def test_watches_that_lie_late_or_not_at_all_cost_time_only(
    bench: Bench, filtered: Callable[[], WatchFilter]
) -> None:
    port = bench.world.cluster.port("router-1")
    port.watch_filter = in_each_watch(filtered)
    driver = await bench.started(port=port)
    for _ in range(5):
        await driver.activate(ALPHA)
        await driver.deactivate(ALPHA)
        await driver.activate(BETA)
        assert bench.world.up() == {"beta"}
        await driver.deactivate(BETA)


@pytest.mark.parametrize("nth", [1, 2, 3, 5, 8])
async def test_members_that_are_read_from_the_past_cost_time_only(bench: Bench, nth: int) -> None:
    cluster = bench.world.cluster
    port = cluster.port("router-1")
    driver = await bench.started(port=port)
    for _ in range(3):
        for old, new in ((ALPHA, BETA), (BETA, ALPHA)):
            await driver.activate(old)
            # Some reads of each step show how it was before the step began.
            port.stale(cluster.version, verb="get", kind=DEPLOYMENTS, nth=nth, times=20)
            await driver.deactivate(old)
            port.stale(cluster.version, verb="get", kind=DEPLOYMENTS, nth=nth, times=20)
            await driver.activate(new)
            assert bench.world.up() == {str(new)}
            await driver.deactivate(new)


# Other routers


async def test_a_second_router_stands_by_and_takes_over_with_the_resident(bench: Bench) -> None:
    first = await bench.started("router-1")
    endpoint = await first.activate(ALPHA)
    second = bench.driver("router-2")
    looking = asyncio.get_running_loop().create_task(second.observe())
    await asyncio.sleep(100)
    assert not looking.done()
    assert second.standing == SlotStanding("the slot is held by router-1", aside=True)
    with pytest.raises(DriverUnavailable, match="held by router-1"):
        await second.activate(BETA)

    await first.close(stop_members=True)

    assert await looking == {ALPHA: endpoint}
    assert bench.world.starts("alpha") == 1


async def test_a_router_that_wakes_up_steps_aside_and_writes_nothing(bench: Bench) -> None:
    port = bench.world.cluster.port("router-1")
    first = await bench.started("router-1", port=port)
    await first.activate(ALPHA)
    port.paused = asyncio.Event()
    await asyncio.sleep(20)
    assert not first.standing.aside
    assert await first.ready(ALPHA)
    second = await bench.started("router-2")
    # The first is no Pod of this cluster, so it counts as gone.
    await until(lambda: not second.standing.withheld)
    await second.deactivate(ALPHA)
    await second.activate(BETA)
    trail = Trail(bench.world.cluster)

    port.paused.set()
    await until(lambda: first.standing.aside)
    await asyncio.sleep(30)

    assert trail.new("router-1") == []
    assert not await first.ready(ALPHA)
    with pytest.raises(DriverUnavailable):
        await first.activate(ALPHA)
    assert bench.world.up() == {"beta"}


async def test_nothing_is_stopped_while_the_last_holder_may_still_forward(bench: Bench) -> None:
    body = {"metadata": {"name": "router-1", "labels": {"app": "router"}}, "spec": pod_spec(0)}
    bench.world.cluster.put(PODS, NAMESPACE, body)
    port = bench.world.cluster.port("router-1")
    first = await bench.started("router-1", port=port)
    await first.activate(ALPHA)
    port.paused = asyncio.Event()  # cut off, and serving on
    second = await bench.started("router-2")
    await asyncio.sleep(120)
    assert "router-1 held the slot before" in second.standing.withheld
    assert not second.standing.aside

    bench.world.cluster.remove(PODS, NAMESPACE, "router-1")

    await until(lambda: not second.standing.withheld)


async def test_a_lease_that_is_deleted_is_got_again_with_a_larger_epoch(bench: Bench) -> None:
    driver = await bench.started()
    await driver.activate(ALPHA)
    epoch = bench.world.record().epoch
    bench.world.cluster.vanish(LEASES, NAMESPACE, LEASE)
    await until(lambda: bench.standings[-1].withheld)
    assert await driver.ready(ALPHA)

    await until(lambda: not bench.standings[-1].withheld, 10.0)
    await driver.deactivate(ALPHA)
    await driver.activate(BETA)

    assert bench.world.record().epoch > epoch
    assert bench.world.up() == {"beta"}


async def test_a_record_that_cannot_be_read_freezes_the_slot(bench: Bench) -> None:
    driver = await bench.started()
    await driver.activate(ALPHA)
    patch = {"metadata": {"annotations": {RECORD_ANNOTATION: "{"}}}
    bench.world.cluster.edit(LEASES, NAMESPACE, LEASE, patch)
    await until(lambda: "not JSON" in driver.standing.withheld)

    with pytest.raises(DriverUnavailable, match="not JSON"):
        await driver.deactivate(ALPHA)

    assert bench.world.replicas("alpha") == 1


# Other hands


async def test_a_rollout_undone_takes_our_mark_away_and_starts_nothing(bench: Bench) -> None:
    driver = await bench.started()
    await driver.activate(ALPHA)
    undo = {
        "metadata": {"annotations": {SLOT_ANNOTATION: f"{NAMESPACE}/{LEASE}:1"}},
        "spec": {"template": {"metadata": {"labels": {"v": "1"}}}},
    }
    bench.world.cluster.edit(DEPLOYMENTS, NAMESPACE, "beta", undo)
    await asyncio.sleep(10)
    assert bench.world.up() == {"alpha"}

    await driver.deactivate(ALPHA)
    await driver.activate(BETA)

    assert bench.world.up() == {"beta"}


async def test_a_single_foreign_change_is_put_right_when_idle(bench: Bench) -> None:
    driver = await bench.started()
    endpoint = await driver.activate(ALPHA)
    bench.world.busy.add("beta")
    bench.world.cluster.down = True
    bench.world.cluster.break_watches()
    bench.world.scale("beta", 1)
    await until(lambda: len(bench.world.world.running()) == 2)

    bench.world.cluster.down = False
    await asyncio.sleep(60)
    assert bench.world.replicas("beta") == 1
    bench.world.busy.clear()
    await until(lambda: bench.world.up() == {"alpha"})

    assert await driver.observe() == {ALPHA: endpoint}
    assert bench.standings[-1].withheld == ""


async def test_nothing_starts_beside_what_somebody_else_has_put_up(bench: Bench) -> None:
    driver = await bench.started()
    bench.world.busy.add("alpha")
    bench.world.cluster.down = True
    bench.world.cluster.break_watches()
    bench.world.scale("alpha", 1)
    await until(lambda: bench.world.world.running())
    bench.world.cluster.down = False

    with pytest.raises(DriverUnavailable, match="alpha is not gone: .* its engine is busy"):
        await driver.activate(BETA)
    assert bench.world.replicas("beta") == 0
    assert bench.world.replicas("alpha") == 1
    bench.world.busy.clear()
    await driver.deactivate(BETA)
    await driver.activate(BETA)

    assert bench.world.up() == {"beta"}


async def test_two_that_are_taken_down_at_once_do_not_keep_each_other_from_it(
    bench: Bench,
) -> None:
    """Each mark is a change that a controller, which is slow here, has to look at first."""
    driver = await bench.started()
    bench.world.step_s = 2.0
    bench.world.scale("alpha", 1)
    bench.world.scale("beta", 1)
    await until(lambda: bench.world.replicas("alpha") == bench.world.replicas("beta") == 0)
    epoch = bench.world.record().epoch

    await until(lambda: bench.world.up() == set() and not driver._correcting, 100.0)

    assert bench.world.record().epoch <= epoch + 2


async def test_a_member_that_is_added_while_it_is_up_is_taken_down_when_idle(bench: Bench) -> None:
    driver = bench.driver()
    both = bench.world.specs()
    driver.update({ALPHA: both[ALPHA]}, default=None)
    await driver.observe()
    endpoint = await driver.activate(ALPHA)
    bench.world.busy.add("beta")
    bench.world.scale("beta", 1)
    await until(lambda: bench.world.up() == {"alpha", "beta"})

    trail = Trail(bench.world.cluster)
    driver.update(both, default=None)
    await asyncio.sleep(60)
    assert bench.world.replicas("beta") == 1
    bench.world.busy.clear()

    await until(lambda: bench.world.up() == {"alpha"})
    assert await driver.observe() == {ALPHA: endpoint}
    assert driver.standing.withheld == ""
    assert owners_told(trail) == {"alpha"}


async def test_a_member_that_cannot_be_one_is_not_touched_when_it_comes_into_view(
    bench: Bench,
) -> None:
    driver = bench.driver()
    both = bench.world.specs()
    driver.update({ALPHA: both[ALPHA]}, default=None)
    await driver.observe()
    endpoint = await driver.activate(ALPHA)
    rolling = {"spec": {"strategy": {"type": "RollingUpdate"}, "replicas": 1}}
    bench.world.cluster.edit(DEPLOYMENTS, NAMESPACE, "beta", rolling)
    epoch = bench.world.record().epoch

    driver.update(both, default=None)
    await until(lambda: "UnsafeMember" in driver.standing.withheld)
    await asyncio.sleep(60)

    record = bench.world.record()
    assert (record.owner, record.phase, record.epoch) == ("alpha", Phase.RESIDENT, epoch)
    assert bench.world.replicas("beta") == 1
    assert await driver.observe() == {ALPHA: endpoint}


async def test_a_member_that_is_made_anew_with_replicas_is_taken_down(bench: Bench) -> None:
    driver = await bench.started()
    endpoint = await driver.activate(ALPHA)
    trail = Trail(bench.world.cluster)
    for _ in range(3):  # no contest: nobody scales what is there
        bench.world.cluster.remove(DEPLOYMENTS, NAMESPACE, "beta")
        await until(lambda: "MissingMembers" in driver.standing.withheld)
        bench.world.cluster.put(DEPLOYMENTS, NAMESPACE, deployment("beta", replicas=1))

        await until(lambda: bench.world.replicas("beta") == 0)
        await until(lambda: bench.world.up() == {"alpha"})
        assert driver.standing.withheld == ""

    assert await driver.observe() == {ALPHA: endpoint}
    assert owners_told(trail) == {"alpha"}


async def test_who_keeps_scaling_a_member_stops_the_pool(bench: Bench) -> None:
    driver = await bench.started()
    await driver.activate(ALPHA)
    for _ in range(2):
        bench.world.scale("beta", 1)
        await until(lambda: bench.world.replicas("beta") == 0 or driver.standing.withheld)
    await until(lambda: driver.standing.withheld)

    assert driver.standing.withheld.startswith("ReplicasContested: somebody else keeps scaling")
    assert await driver.ready(ALPHA)
    with pytest.raises(DriverUnavailable, match="ReplicasContested"):
        await driver.deactivate(ALPHA)
    bench.world.scale("beta", 0)
    await asyncio.sleep(700)
    assert driver.standing.withheld == ""


async def test_an_autoscaler_on_a_member_stops_the_pool(bench: Bench) -> None:
    driver = await bench.started()
    await driver.activate(ALPHA)
    target = {"kind": "Deployment", "name": "beta", "apiVersion": "apps/v1"}
    body = {"metadata": {"name": "beta-scaler"}, "spec": {"scaleTargetRef": target}}
    bench.world.cluster.put(AUTOSCALERS, NAMESPACE, body)

    await until(lambda: driver.standing.withheld)

    assert "HorizontalPodAutoscaler beta-scaler scales" in driver.standing.withheld
    bench.world.cluster.remove(AUTOSCALERS, NAMESPACE, "beta-scaler")
    await until(lambda: not driver.standing.withheld)


async def test_a_missing_member_stops_every_write_and_the_resident_is_served(bench: Bench) -> None:
    first = await bench.started("router-1")
    endpoint = await first.activate(ALPHA)
    await first.close(stop_members=True)
    bench.world.cluster.remove(DEPLOYMENTS, NAMESPACE, "beta")
    trail = Trail(bench.world.cluster)

    second = bench.driver("router-1")
    found = await second.observe()

    assert found == {ALPHA: endpoint}
    assert "MissingMembers: Deployment lab/beta" in second.standing.withheld
    with pytest.raises(DriverUnavailable):
        await second.activate(BETA)
    assert {write.kind for write in trail.new("router-1")} == {LEASES}
    bench.world.add("beta")
    await until(lambda: not second.standing.withheld)
    await second.deactivate(ALPHA)
    await second.activate(BETA)


@pytest.mark.parametrize(
    ("patch", "says"),
    [
        ({"spec": {"strategy": {"type": "RollingUpdate"}}}, "strategy is RollingUpdate"),
        ({"spec": {"replicas": 2}}, "asks for 2 replicas"),
    ],
)
async def test_an_unsafe_member_is_refused_untouched(
    bench: Bench, patch: dict[str, object], says: str
) -> None:
    bench.world.cluster.edit(DEPLOYMENTS, NAMESPACE, "beta", patch)
    trail = Trail(bench.world.cluster)
    driver = await bench.started()

    assert "UnsafeMember: Deployment lab/beta" in driver.standing.withheld
    assert says in driver.standing.withheld
    with pytest.raises(DriverUnavailable, match="UnsafeMember"):
        await driver.activate(ALPHA)
    assert {write.kind for write in trail.new("router-1")} == {LEASES}


async def test_a_member_on_metal_stops_the_pool_untouched() -> None:
    world = KubeWorld("InferenceService", step_s=0.05)
    metal = {"spec": {"accelerator": "metal"}}
    world.cluster.edit(world.kind, NAMESPACE, "beta", metal)
    trail = Trail(world.cluster)
    driver = world.driver("router-1", limits=LIMITS)
    await driver.observe()

    assert driver.standing.withheld.startswith("MetalMembersUnsupported: InferenceService lab/beta")
    with pytest.raises(DriverUnavailable, match="MetalMembersUnsupported"):
        await driver.activate(ALPHA)
    assert {write.kind for write in trail.new("router-1")} == {LEASES}
    await driver.close(stop_members=False)
    await world.end()


async def test_a_member_of_another_slot_is_never_written(bench: Bench) -> None:
    mark = {"metadata": {"annotations": {SLOT_ANNOTATION: "lab/modelpool-other:3"}}}
    bench.world.cluster.edit(DEPLOYMENTS, NAMESPACE, "beta", mark)
    trail = Trail(bench.world.cluster)
    driver = bench.driver()
    await driver.observe()

    assert "MemberShared" in driver.standing.withheld
    assert "modelpool-other" in driver.standing.withheld
    assert {write.kind for write in trail.new("router-1")} == {LEASES}


async def test_a_member_without_an_idle_probe_is_stopped_on_our_own_count(bench: Bench) -> None:
    driver = await bench.started(known=profile("generic", ProfileOverrides()))
    await driver.activate(ALPHA)

    assert await driver.idle(ALPHA) is Idleness.IDLE
    await driver.deactivate(ALPHA)
    await driver.activate(BETA)

    assert bench.world.up() == {"beta"}


async def test_a_removed_member_is_taken_down_and_loses_its_mark(bench: Bench) -> None:
    driver = await bench.started()
    await driver.activate(BETA)
    specs = bench.world.specs()
    driver.update({ALPHA: specs[ALPHA]}, default=None)
    await asyncio.sleep(5)

    await driver.deactivate(BETA)
    await driver.activate(ALPHA)

    assert bench.world.up() == {"alpha"}
    assert (
        annotation(bench.world.cluster.must(DEPLOYMENTS, NAMESPACE, "beta"), SLOT_ANNOTATION)
        is None
    )


async def test_a_stopped_member_that_is_removed_loses_its_mark_and_the_resident_stays(
    bench: Bench,
) -> None:
    cluster = bench.world.cluster
    port = cluster.port("router-1")
    driver = await bench.started(port=port)
    endpoint = await driver.activate(ALPHA)
    assert annotation(cluster.must(DEPLOYMENTS, NAMESPACE, "beta"), SLOT_ANNOTATION) is not None

    driver.update({ALPHA: bench.world.specs()[ALPHA]}, default=None)
    await until(
        lambda: annotation(cluster.must(DEPLOYMENTS, NAMESPACE, "beta"), SLOT_ANNOTATION) is None
    )
    trail = Trail(cluster)
    before = len(port.requests)
    cluster.end_watches()
    await asyncio.sleep(60)

    assert (await driver.observe())[ALPHA] == endpoint
    assert bench.losses == []
    # Its Role does not name the other one any more.
    listed = {each.name for each in port.requests[before:] if each.kind == DEPLOYMENTS}
    assert listed == {"alpha"}
    record = bench.world.record()
    assert (record.owner, record.target, record.phase) == ("alpha", None, Phase.RESIDENT)
    assert [w for w in trail.new("router-1") if w.kind == DEPLOYMENTS] == []


async def test_a_member_that_never_existed_is_forgotten_once_it_is_removed(bench: Bench) -> None:
    """As when a name was misspelt and is corrected: the pool goes on without a restart."""
    port = bench.world.cluster.port("router-1")
    driver = await bench.started(port=port)
    port.rights = lambda _: True  # a Role that names the ghost, too
    specs = bench.world.specs()
    endpoint = await driver.activate(ALPHA)
    ghost = replace(specs[BETA], name=MemberName("ghost"), target="ghost")
    driver.update({**specs, ghost.name: ghost}, default=None)
    await until(lambda: "lab/ghost;" in bench.standings[-1].withheld)

    # It carries no mark of ours, so the Role names it no longer than the pool does.
    port.rights = lambda asked: asked.name != "ghost"
    spirit = replace(ghost, name=MemberName("spirit"), target="spirit")
    driver.update({**specs, spirit.name: spirit}, default=None)
    await until(lambda: "lab/spirit;" in bench.standings[-1].withheld)
    port.rights = lambda asked: asked.name not in ("ghost", "spirit")
    driver.update(specs, default=None)
    await until(lambda: not bench.standings[-1].withheld)

    assert (await driver.observe())[ALPHA] == endpoint
    await driver.deactivate(ALPHA)
    await driver.activate(BETA)
    assert bench.world.up() == {"beta"}


async def test_a_member_that_was_deleted_is_waited_for_and_then_forgotten(bench: Bench) -> None:
    driver = await bench.started()
    await driver.activate(ALPHA)
    specs = bench.world.specs()
    bench.world.cluster.remove(DEPLOYMENTS, NAMESPACE, "alpha")
    driver.update({BETA: specs[BETA]}, default=None)
    await asyncio.sleep(5)

    await driver.deactivate(ALPHA)

    assert bench.world.pods("alpha") == []


async def test_a_change_of_the_members_is_no_loss_of_the_resident(bench: Bench) -> None:
    """Its Pod may be the last one that the new watch gets to see."""
    world = bench.world
    other: Json = {
        "metadata": {"name": "a-first", "namespace": NAMESPACE},
        "spec": {"containers": [{"name": "main", "image": "other"}]},
    }
    world.cluster.put(PODS, NAMESPACE, other)
    driver = bench.driver()
    driver.update({ALPHA: world.specs()[ALPHA]}, default=None)
    await driver.observe()
    endpoint = await driver.activate(ALPHA)
    await asyncio.sleep(30)

    driver.update(world.specs(), default=None)
    await asyncio.sleep(30)

    assert bench.losses == []
    assert (await driver.observe())[ALPHA] == endpoint


async def test_a_pool_that_is_removed_moves_no_replica_and_leaves_no_mark(bench: Bench) -> None:
    driver = await bench.started()
    await driver.activate(ALPHA)
    driver.retire()

    await driver.deactivate(ALPHA)
    await driver.close(stop_members=True)

    assert bench.world.replicas("alpha") == 1
    for name in ("alpha", "beta"):
        obj = bench.world.cluster.must(DEPLOYMENTS, NAMESPACE, name)
        assert annotation(obj, SLOT_ANNOTATION) is None
