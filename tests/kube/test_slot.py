"""Moving the slot: the fence, late writes, lost answers, deposed holders, and never two members."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from crashpoints import Scenario, kill_everywhere, lose_everywhere
from memcluster import Killed, MemCluster, MemPort, Trail, Write
from memcontrollers import World
from modelpool_api.names import RECORD_ANNOTATION, SLOT_ANNOTATION
from modelpool_kube import errors
from modelpool_kube.kinds import DEPLOYMENTS, LEASES, NODES, PODS
from modelpool_kube.lease import LeaseLost
from modelpool_kube.record import Frozen, SlotRecord
from modelpool_kube.slot import Contended, Deposed, InFlight, MemberMissing, MemberShared, SlotError
from modelpool_kube.slotrules import Gone, NotReady, NotYet, Probe, Ready
from slotprocess import MEMBERS, SLOT, A, B, Process, marks, moving, pool, residents

pytestmark = pytest.mark.looptime(idle_timeout=100_000)


@pytest.fixture
async def world() -> World:
    """A pool of three Deployments at 0."""
    return pool()


@contextlib.asynccontextmanager
async def running(
    world: World, *processes: Process, rng: random.Random | None = None, moves: bool = True
) -> AsyncIterator[None]:
    """Run the keepers of *processes*, and let the world move."""
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(each.keeper.run(release=False)) for each in processes]
    if moves:
        tasks.append(loop.create_task(moving(world, rng)))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError, Killed):
                await task


def one(world: World, name: str = "one") -> Process:
    """Return a process."""
    return Process(world, world.cluster.port(name))


def replicas(world: World, name: str) -> int:
    """Return what a member asks for."""
    return int(world.cluster.must(DEPLOYMENTS, "lab", name)["spec"]["replicas"])


async def test_an_epoch_is_recorded_then_marked_on_every_member(world: World) -> None:
    process = one(world)
    async with running(world, process):
        await process.until_held()
        trail = Trail(world.cluster)

        begun = await process.begin()

        writes = trail.new("one")
        assert begun.epoch == 1
        assert marks(world.cluster) == dict.fromkeys("abc", SLOT.value(1))
        assert [write.kind.kind for write in writes] == ["Lease"] + ["Deployment"] * 3
        assert (await process.begin()).epoch == 2


async def test_the_epoch_is_above_every_mark_and_the_record(world: World) -> None:
    annotations = {"metadata": {"annotations": {SLOT_ANNOTATION: SLOT.value(40)}}}
    world.cluster.edit(DEPLOYMENTS, "lab", "b", annotations)
    process = one(world)
    async with running(world, process):
        await process.until_held()

        assert (await process.begin()).epoch == 41


async def test_every_write_reads_member_then_lease_and_is_conditional(world: World) -> None:
    process = one(world)
    async with running(world, process):
        await process.until_held()
        begun = await process.begin()
        before = len(process.port.requests)
        stored = await process.actuator.scale(A, up=True, epoch=begun.epoch)

        asked = [r for r in process.port.requests[before:] if r.kind != LEASES or r.verb == "get"]
        assert [f"{r.verb} {r.kind.plural}" for r in asked] == [
            "get deployments",
            "get leases",
            "patch deployments",
        ]
        assert stored["spec"]["replicas"] == 1
        assert stored["metadata"]["annotations"][SLOT_ANNOTATION] == SLOT.value(1)
        again = len(process.port.requests)
        await process.actuator.scale(A, up=True, epoch=begun.epoch)
        assert [r.verb for r in process.port.requests[again:]] == ["get"]


async def test_a_member_of_another_slot_is_never_written(world: World) -> None:
    mark = "lab/modelpool-other:3"
    world.cluster.edit(
        DEPLOYMENTS, "lab", "b", {"metadata": {"annotations": {SLOT_ANNOTATION: mark}}}
    )
    process = one(world)
    async with running(world, process):
        await process.until_held()
        trail = Trail(world.cluster)
        with pytest.raises(MemberShared, match="modelpool-other; take it out"):
            await process.begin()

        assert [write.kind.kind for write in trail.new("one") if write.kind != LEASES] == []
        assert marks(world.cluster) == {"a": None, "b": mark, "c": None}


async def test_a_missing_member_stops_everything(world: World) -> None:
    world.cluster.remove(DEPLOYMENTS, "lab", "b")
    process = one(world)
    async with running(world, process):
        await process.until_held()
        with pytest.raises(MemberMissing, match="lab/b does not exist"):
            await process.begin()

        assert marks(world.cluster) == {"a": None, "c": None}


async def test_a_mark_that_was_removed_by_hand_is_rewritten(world: World) -> None:
    process = one(world)
    async with running(world, process):
        await process.until_held()
        begun = await process.begin()
        world.cluster.edit(DEPLOYMENTS, "lab", "a", {"metadata": {"annotations": None}})
        found = await process.actuator.look_gone(A, epoch=begun.epoch)
        assert isinstance(found, NotYet)
        assert found.reason == "NotFenced"

        await process.actuator.scale(A, up=False, epoch=begun.epoch)

        assert marks(world.cluster)["a"] == SLOT.value(1)


async def test_a_conflict_starts_again_at_the_read(world: World) -> None:
    process = one(world)
    async with running(world, process):
        await process.until_held()
        begun = await process.begin()
        process.port.fail(
            errors.Conflict("changed", code=409), verb="patch", kind=DEPLOYMENTS, times=3
        )
        before = len(process.port.requests)
        await process.actuator.scale(A, up=True, epoch=begun.epoch)

        reads = [
            r for r in process.port.requests[before:] if r.verb == "get" and r.kind == DEPLOYMENTS
        ]
        assert len(reads) == 4
        assert replicas(world, "a") == 1


async def test_a_storm_of_conflicts_is_given_up(world: World) -> None:
    process = one(world)
    async with running(world, process):
        await process.until_held()
        begun = await process.begin()
        process.port.fail(
            errors.Conflict("changed", code=409), verb="patch", kind=DEPLOYMENTS, times=99
        )
        with pytest.raises(Contended):
            await process.actuator.scale(A, up=True, epoch=begun.epoch)


@pytest.mark.parametrize("applied", [True, False])
async def test_a_lost_answer_is_settled_by_reading(world: World, applied: bool) -> None:
    process = one(world)
    async with running(world, process):
        await process.until_held()
        begun = await process.begin()
        process.port.lose(applied=applied, verb="patch", kind=DEPLOYMENTS)
        await process.actuator.scale(A, up=True, epoch=begun.epoch)
        await process.actuator.scale(A, up=False, epoch=begun.epoch)

        assert replicas(world, "a") == 0


async def test_a_patch_that_lands_after_its_time_out_changes_nothing(world: World) -> None:
    process = one(world)
    async with running(world, process):
        await process.until_held()
        begun = await process.begin()
        process.port.delay(verb="patch", kind=DEPLOYMENTS)
        await process.actuator.scale(A, up=True, epoch=begun.epoch)
        await process.actuator.scale(A, up=False, epoch=begun.epoch)

        assert process.port.land() == []
        assert replicas(world, "a") == 0


async def in_flight(process: Process) -> int:
    """Leave a scale-up of A in flight and return the epoch."""
    begun = await process.begin()
    await asyncio.sleep(2)  # any write, a controller's of a status too, would end it
    process.port.delay(verb="patch", kind=DEPLOYMENTS, name="a", times=99)
    with pytest.raises(errors.Unanswered):
        await process.actuator.scale(A, up=True, epoch=begun.epoch)
    process.port._faults.clear()
    return begun.epoch


async def test_while_a_write_may_land_the_member_is_not_gone(world: World) -> None:
    process = one(world)
    async with running(world, process):
        await process.until_held()
        epoch = await in_flight(process)
        await asyncio.sleep(5)
        assert replicas(world, "a") == 0

        found = await process.actuator.look_gone(A, epoch=epoch)
        assert isinstance(found, NotYet)
        assert found.reason == "WriteInFlight"
        with pytest.raises(InFlight, match="may still land"):
            await process.actuator.scale(A, up=False, epoch=epoch)
        assert process.port.land()  # and it does land
        assert replicas(world, "a") == 1


async def test_a_new_epoch_ends_what_was_in_flight(world: World) -> None:
    process = one(world)
    async with running(world, process):
        await process.until_held()
        await in_flight(process)
        begun = await process.begin()
        assert process.port.land() == []
        await process.actuator.scale(A, up=False, epoch=begun.epoch)
        await asyncio.sleep(2)

        assert await process.actuator.look_gone(A, epoch=begun.epoch) == Gone()
        assert replicas(world, "a") == 0


async def test_a_scaling_that_was_cancelled_counts_as_in_flight(world: World) -> None:
    process = one(world)
    async with running(world, process):
        await process.until_held()
        begun = await process.begin()
        await asyncio.sleep(2)  # any write, a controller's of a status too, would end it
        process.port.hang(verb="patch", kind=DEPLOYMENTS)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await process.actuator.scale(A, up=True, epoch=begun.epoch)

        found = await process.actuator.look_gone(A, epoch=begun.epoch)
        assert isinstance(found, NotYet)
        assert found.reason == "WriteInFlight"


async def test_an_epoch_whose_marks_were_not_all_acknowledged_is_not_begun(world: World) -> None:
    process = one(world)
    async with running(world, process):
        await process.until_held()
        process.port.lose(applied=True, verb="patch", kind=DEPLOYMENTS, name="c", times=99)
        process.port.fail(errors.Unavailable("no"), verb="get", kind=DEPLOYMENTS, name="c", nth=3)
        with pytest.raises(errors.KubeError):
            await process.begin()


async def test_who_was_deposed_cannot_write_any_more(world: World) -> None:
    first, second = one(world, "one"), one(world, "two")
    async with running(world, first):
        await first.until_held()
        begun = await first.begin()
        first.port.paused = asyncio.Event()
        scaling = asyncio.get_running_loop().create_task(
            first.actuator.scale(A, up=True, epoch=begun.epoch)
        )
        async with running(world, second, moves=False):
            await second.until_held()
            await second.swap_to(B)
            first.port.paused.set()  # the second router was there first, the first wakes up
            with pytest.raises((Deposed, LeaseLost)):
                await scaling
            with pytest.raises((Deposed, LeaseLost)):
                await first.begin()
            await asyncio.sleep(5)

            assert residents(world.cluster) == {"b"}


async def test_marks_of_another_holder_are_not_taken_for_our_own_fence(world: World) -> None:
    """The Lease is deleted between record and marks: then both count from the same number."""
    first, second = one(world, "one"), one(world, "two")
    recorded = asyncio.Event()

    def fall_asleep(write: Write) -> None:
        if write.kind == LEASES and "record" in str(write.after) and write.actor == "one":
            first.port.paused = first.port.paused or asyncio.Event()
            recorded.set()

    world.cluster.after_write.append(fall_asleep)
    async with running(world, first):
        await first.until_held()
        beginning = asyncio.get_running_loop().create_task(first.begin())
        await recorded.wait()
        world.cluster.remove(LEASES, "lab", SLOT.lease)
        async with running(world, second, moves=False):
            await second.until_held()
            assert (await second.begin()).epoch == 1
            assert first.port.paused is not None
            first.port.paused.set()

            with pytest.raises(LeaseLost):
                await beginning


async def test_a_larger_epoch_is_never_lowered(world: World) -> None:
    process = one(world)
    async with running(world, process):
        await process.until_held()
        begun = await process.begin()
        ahead = SLOT.value(begun.epoch + 5)
        patch = {"metadata": {"annotations": {SLOT_ANNOTATION: ahead}}}
        world.cluster.edit(DEPLOYMENTS, "lab", "a", patch)
        with pytest.raises(Deposed, match="carries epoch 6, and ours is 1"):
            await process.actuator.scale(A, up=True, epoch=begun.epoch)
        assert marks(world.cluster)["a"] == ahead
        assert (await process.begin()).epoch == begun.epoch + 6


async def test_a_late_patch_of_a_deposed_holder_fails(world: World) -> None:
    first, second = one(world, "one"), one(world, "two")
    async with running(world, first):
        await first.until_held()
        await in_flight(first)
        first.port.dead = True
        async with running(world, second, moves=False):
            await second.until_held()
            await second.swap_to(B)

            assert first.port.land() == []
            await asyncio.sleep(5)
            assert residents(world.cluster) == {"b"}


async def test_a_lease_that_changes_between_read_and_write_stops_the_write(world: World) -> None:
    process = one(world)
    async with running(world, process):
        await process.until_held()
        begun = await process.begin()
        other = {"spec": {"holderIdentity": "two"}}
        world.cluster.edit(LEASES, "lab", SLOT.lease, other)
        with pytest.raises(LeaseLost):
            await process.actuator.scale(A, up=True, epoch=begun.epoch)

        assert replicas(world, "a") == 0


async def test_a_record_at_another_epoch_stops_the_write(world: World) -> None:
    process = one(world)
    async with running(world, process):
        await process.until_held()
        begun = await process.begin()
        await process.keeper.write(
            lambda before: replace(before or SlotRecord(), epoch=begun.epoch + 1)
        )
        with pytest.raises(LeaseLost, match="epoch 2, not 1"):
            await process.actuator.scale(A, up=True, epoch=begun.epoch)


async def test_a_broken_record_freezes_the_slot(world: World) -> None:
    process = one(world)
    async with running(world, process):
        await process.until_held()
        begun = await process.begin()
        patch = {"metadata": {"annotations": {RECORD_ANNOTATION: "{"}}}
        world.cluster.edit(LEASES, "lab", SLOT.lease, patch)
        with pytest.raises((Frozen, LeaseLost)):
            await process.actuator.scale(A, up=True, epoch=begun.epoch)
        await asyncio.sleep(6)
        with pytest.raises(Frozen):
            await process.begin()

        assert replicas(world, "a") == 0


async def test_a_swap_brings_up_one_and_only_one(world: World) -> None:
    process = one(world)
    most = 0

    def count(_: object) -> None:
        nonlocal most
        most = max(most, len(residents(world.cluster)))

    world.cluster.after_write.append(count)
    async with running(world, process):
        await process.until_held()
        for target in (A, B, A):
            pod = await process.swap_to(target)
            assert pod["metadata"]["labels"]["app"] == target.name
            assert residents(world.cluster) == {target.name}

    assert most == 1


async def test_a_rollout_undone_on_a_member_at_zero_starts_nothing(world: World) -> None:
    """`kubectl rollout undo` restores a template, not the replicas, and moves the version."""
    process = one(world)
    async with running(world, process):
        await process.until_held()
        await process.swap_to(A)
        template = {"spec": {"template": {"metadata": {"labels": {"v": "1"}}}}}
        world.cluster.edit(DEPLOYMENTS, "lab", "b", template)
        await process.swap_to(B)
        await asyncio.sleep(5)

        assert residents(world.cluster) == {"b"}


async def test_a_failed_pod_that_was_left_behind_does_not_stop_a_swap(world: World) -> None:
    process = one(world)
    async with running(world, process):
        await process.until_held()
        await process.swap_to(A)
        world.kubelet.fail("lab", world.running()[0])
        await process.swap_to(B)

        assert residents(world.cluster) == {"b"}
        assert len(world.cluster.all(PODS)) == 2


async def test_a_pod_on_a_lost_node_stops_the_swap_until_a_person_decides(world: World) -> None:
    process = one(world)
    async with running(world, process):
        await process.until_held()
        await process.swap_to(A)
        world.kubelet.lose("n1")
        begun = await process.begin(target=B)
        await process.actuator.scale(A, up=False, epoch=begun.epoch)
        await asyncio.sleep(60)
        found = await process.actuator.look_gone(A, epoch=begun.epoch)
        assert isinstance(found, NotYet)
        assert found.reason == "PodsLeft"
        (pod,) = world.cluster.all(PODS, labels="app=a")

        await process.keeper.write(
            lambda before: replace(before or SlotRecord(), forgotten=(str(pod["metadata"]["uid"]),))
        )

        assert await process.actuator.look_gone(A, epoch=begun.epoch) == Gone()


async def test_a_pod_on_a_deleted_node_is_gone_once_the_control_plane_removed_it(
    world: World,
) -> None:
    process = one(world)
    world.pods.held = True  # nobody collects the Pod
    async with running(world, process):
        await process.until_held()
        await process.swap_to(A)
        world.kubelet.lose("n1")
        begun = await process.begin(target=B)
        await process.actuator.scale(A, up=False, epoch=begun.epoch)
        await asyncio.sleep(5)
        world.cluster.vanish(NODES, None, "n1")

        found = await process.actuator.look_gone(A, epoch=begun.epoch)
        assert isinstance(found, NotYet)
        world.pods.held = False
        await asyncio.sleep(5)
        assert await process.actuator.look_gone(A, epoch=begun.epoch) == Gone()


async def test_a_member_that_was_deleted_is_gone_with_its_last_pod(world: World) -> None:
    process = one(world)
    world.collector.held = True
    async with running(world, process):
        await process.until_held()
        await process.swap_to(A)
        begun = await process.begin(target=B)
        world.cluster.remove(DEPLOYMENTS, "lab", "a")
        found = await process.actuator.look_gone(A, epoch=begun.epoch)
        assert isinstance(found, NotYet)
        world.collector.held = False
        await asyncio.sleep(10)

        assert await process.actuator.look_gone(A, epoch=begun.epoch) == Gone()


async def test_evidence_needs_a_probe_begun_in_this_epoch(world: World) -> None:
    process = one(world)
    async with running(world, process):
        await process.until_held()
        pod = await process.swap_to(A)
        uid = pod["metadata"]["uid"]
        probe = Probe(uid, process.port.now())
        await asyncio.sleep(1)
        begun = await process.begin()  # adopted by a new epoch, as after a restart
        await asyncio.sleep(2)

        old = await process.actuator.look_ready(A, begun, probe)
        assert isinstance(old, NotReady)
        assert old.reason == "ProbeTooOld"
        fresh = await process.actuator.look_ready(A, begun, Probe(uid, process.port.now()))
        assert isinstance(fresh, Ready)


async def test_a_pool_that_ends_takes_its_marks_along_and_moves_nothing(world: World) -> None:
    process = one(world)
    async with running(world, process):
        await process.until_held()
        await process.swap_to(A)
        begun = await process.begin()
        trail = Trail(world.cluster)
        for member in MEMBERS:
            await process.actuator.unmark(member, begun.epoch)
            await process.actuator.unmark(member, begun.epoch)

        assert marks(world.cluster) == dict.fromkeys("abc", None)
        assert residents(world.cluster) == {"a"}
        assert [w for w in trail.new("one") if w.kind == DEPLOYMENTS][0].verb == "patch"


# Never two


def watch_over(world: World) -> list[str]:
    """Check after every write that at most one member runs or may start; return the history."""
    history: list[str] = []

    def check(write: object) -> None:
        found = residents(world.cluster)
        assert len(found) <= 1, f"two members: {sorted(found)}"
        if found and (not history or history[-1] != min(found)):
            history.append(min(found))

    world.cluster.after_write.append(check)
    return history


def epochs_only_grow(cluster: MemCluster) -> None:
    """No mark and no record ever went down."""
    last: dict[str, int] = {}
    for write in cluster.writes:
        if write.after is None or write.kind not in (DEPLOYMENTS, LEASES):
            continue
        annotations = write.after["metadata"].get("annotations") or {}
        if SLOT_ANNOTATION in annotations:
            epoch = int(annotations[SLOT_ANNOTATION].rpartition(":")[2])
        elif RECORD_ANNOTATION in annotations:
            epoch = json.loads(annotations[RECORD_ANNOTATION])["epoch"]
        else:
            continue
        assert epoch >= last.get(write.name, 0)
        last[write.name] = epoch


@pytest.mark.parametrize("seed", range(10))
async def test_two_processes_and_everything_that_can_go_wrong(seed: int) -> None:
    """
    Two routers want different members while answers are lost, writes land late, processes sleep
    and wake up, the server is away and controllers lag. There is room for all members at once;
    only the rules keep them apart.
    """
    rng = random.Random(seed)
    world = pool()
    history = watch_over(world)
    processes = [Process(world, world.cluster.port(name), seed=seed) for name in ("one", "two")]
    loop = asyncio.get_running_loop()

    async def want(process: Process) -> None:
        chooser = random.Random(f"{seed}-{process.port.name}")
        while True:
            try:
                async with asyncio.timeout(40):
                    await process.until_held()
                    await process.swap_to(chooser.choice(MEMBERS))
            except (errors.KubeError, SlotError, LeaseLost, Frozen, TimeoutError):
                await asyncio.sleep(chooser.uniform(0, 2))
            await asyncio.sleep(chooser.uniform(0, 3))

    async with running(world, *processes, rng=rng):
        wanting = [loop.create_task(want(process)) for process in processes]
        for _ in range(160):
            await asyncio.sleep(rng.uniform(0, 1))
            for task in wanting:
                if task.done():
                    task.result()
            port: MemPort = rng.choice(processes).port
            match rng.randrange(14):
                case 0:
                    port.lose(applied=rng.random() < 0.5, writes=True, times=rng.randrange(1, 12))
                case 1:
                    port.delay(writes=True, kind=DEPLOYMENTS, times=rng.randrange(1, 12))
                case 2 | 3:
                    port.land()
                case 4 if port.paused is None:
                    port.paused = asyncio.Event()
                case 5 | 6 if port.paused is not None:
                    port.paused.set()
                    port.paused = None
                case 7:
                    world.cluster.down = not world.cluster.down
                case 8:
                    world.cluster.down = False
                case 9:
                    port.fail(errors.Conflict("storm"), verb="patch", times=2)
                case _:
                    port._faults = [f for f in port._faults if f.seen < f.nth + f.times][-3:]
        world.cluster.down = False
        for process in processes:
            process.port._faults.clear()
            if process.port.paused is not None:
                process.port.paused.set()
                process.port.paused = None
        for task in wanting:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for process in processes:
            process.port.land()
        holder = processes[0]
        async with asyncio.timeout(300):
            while True:
                found = [each for each in processes if each.keeper.is_held]
                with contextlib.suppress(errors.KubeError, SlotError, LeaseLost, TimeoutError):
                    if found:
                        holder = found[0]
                        async with asyncio.timeout(60):
                            await holder.swap_to(B)
                        break
                await asyncio.sleep(1)
        await asyncio.sleep(30)
        assert residents(world.cluster) == {"b"}
    assert len(history) >= 2
    epochs_only_grow(world.cluster)


# Crash points


async def one_swap(world: World, port: MemPort) -> None:
    """Swap to B, as one process."""
    process = Process(world, port)
    loop = asyncio.get_running_loop()
    tasks = [
        loop.create_task(process.keeper.run(release=False)),
        loop.create_task(moving(world)),
    ]
    try:
        async with asyncio.timeout(120):
            await process.until_held()
            await process.swap_to(B)
    except LeaseLost:
        if port.dead:
            raise Killed(port.name) from None
        raise
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError, Killed):
                await task


def b_alone(world: World) -> None:
    """B is up and nothing else."""
    assert residents(world.cluster) == {"b"}
    epochs_only_grow(world.cluster)


def guarded() -> World:
    """Return a pool that is watched over, with A up."""
    world = pool()
    world.cluster.edit(DEPLOYMENTS, "lab", "a", {"spec": {"replicas": 1}})
    world.settle()
    watch_over(world)
    return world


async def test_killed_around_every_request_of_a_swap_the_next_one_repairs_it() -> None:
    scenario = Scenario(guarded, lambda world: world.cluster, one_swap, one_swap, b_alone)

    points = await kill_everywhere(scenario)

    assert len(points) > 100


async def test_every_lost_answer_of_a_swap_is_survived() -> None:
    scenario = Scenario(guarded, lambda world: world.cluster, one_swap, one_swap, b_alone)

    assert len(await lose_everywhere(scenario)) >= 16
