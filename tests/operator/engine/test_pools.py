"""Pools without a router: what the operator does at rest, and what it says."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from memcluster import Write
from memcontrollers import GPU, Part, statefulset
from modelpool_api.names import FINALIZER, SLOT_ANNOTATION, SLOT_APPLIED_ANNOTATION
from modelpool_kube import errors
from modelpool_kube.kinds import (
    AUTOSCALERS,
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    LEASES,
    MEMBER_KINDS,
    MODEL_DEPLOYMENTS,
    MODEL_POOLS,
    PODS,
    STATEFULSETS,
    Json,
    annotation,
)
from operatorworld import NS, OperatorWorld

pytestmark = pytest.mark.looptime(idle_timeout=100_000)


@pytest.fixture
async def world() -> AsyncIterator[OperatorWorld]:
    """An empty world; its operators are ended afterwards."""
    found = OperatorWorld()
    yield found
    await found.close()
    assert not found.violations


def resident(world: OperatorWorld, name: str) -> Any:
    """Return a condition for `run`: *name* is resident."""
    return lambda: (
        world.status().get("residentMember") == name and not world.status().get("pendingMember")
    )


async def pair(world: OperatorWorld, up: str = "", **spec: Any) -> None:
    """Make a pool of coder and judge, of which *up* was up before, and settle."""
    for name in ("coder", "judge"):
        world.member(name, replicas=int(name == up))
    world.pool("gpu0", "coder", "judge", **spec)
    world.start()
    if up:
        await world.run(until=resident(world, up))
        await world.run(120)


def scale(world: OperatorWorld, name: str, replicas: int) -> None:
    """Scale a member by hand."""
    world.cluster.edit(DEPLOYMENTS, NS, name, {"spec": {"replicas": replicas}})


# Cold and warm


async def test_given_a_cold_pool_with_a_default_then_it_is_warmed_once(
    world: OperatorWorld,
) -> None:
    await pair(world, default="judge")

    await world.run(until=resident(world, "judge"))

    assert world.replicas() == {"coder": 0, "judge": 1}
    await world.run(60)
    assert world.status()["phase"] == "Ready"
    assert world.says("SlotAllocated") == "True/Resident"
    assert world.says("MembersValid") == "True/AllResolved"
    assert world.says("SwapDeferred") == "False/NotDeferred"
    assert world.says("MetalSupported") == "True/KubernetesGPU"
    assert world.says("Ready") == "True/SlotServed"
    assert world.says("Stalled") == "False/NotStalled"
    assert world.record()["phase"] == "resident"
    members = {each["name"]: each for each in world.status()["members"]}
    assert members["coder"]["phase"] == "Stopped"
    assert members["judge"]["resident"] is True


async def test_given_a_cold_pool_then_nothing_moves_in_the_first_minute(
    world: OperatorWorld,
) -> None:
    await pair(world, default="judge")

    await world.run(55)

    assert world.replicas() == {"coder": 0, "judge": 0}
    assert world.status()["phase"] == "Swapping"


async def test_given_a_cold_pool_without_default_then_it_waits_for_demand(
    world: OperatorWorld,
) -> None:
    await pair(world)

    await world.run(300)

    assert world.replicas() == {"coder": 0, "judge": 0}
    assert world.status()["phase"] == "Pending"
    assert world.says("SlotAllocated") == "False/Cold"
    assert world.says("Ready") == "True/WaitingForDemand"


async def test_given_a_pool_at_rest_then_ten_resyncs_write_nothing(world: OperatorWorld) -> None:
    await pair(world, default="judge")
    await world.run(300)
    before = world.cluster.version

    for _ in range(10):
        world.processes[0].wake_all()
        await world.run(60)

    assert world.cluster.version == before


async def test_given_a_warm_pool_when_default_is_edited_then_nothing_moves(
    world: OperatorWorld,
) -> None:
    await pair(world, default="judge")
    await world.run(until=resident(world, "judge"))
    await world.run(120)
    before = world.cluster.version

    world.cluster.edit(MODEL_POOLS, NS, "gpu0", {"spec": {"default": "coder"}})
    await world.run(600)

    assert world.replicas() == {"coder": 0, "judge": 1}
    touched = {each.kind for each in world.writes(before)}
    assert touched == {MODEL_POOLS}  # observedGeneration


async def test_given_a_released_pool_then_the_default_is_not_warmed(world: OperatorWorld) -> None:
    await pair(world, default="judge")
    await world.run(5)
    world.hold("gpu0", "router-0", {"format": 1, "epoch": 7, "phase": "released", "released": True})
    world.hold("gpu0", "", None)

    await world.run(600)

    assert world.replicas() == {"coder": 0, "judge": 0}
    assert world.says("SlotAllocated") == "False/Released"


# Two up


async def test_given_two_members_up_in_a_cold_pool_then_the_default_stays(
    world: OperatorWorld,
) -> None:
    world.member("coder", replicas=1)
    world.member("judge", replicas=1)
    world.pool("gpu0", "coder", "judge", default="judge")
    world.start()

    await world.run(until=resident(world, "judge"))

    assert world.replicas() == {"coder": 0, "judge": 1}


async def test_given_no_default_and_one_up_then_it_stays(world: OperatorWorld) -> None:
    await pair(world, up="coder")

    await world.run(600)

    assert world.replicas() == {"coder": 1, "judge": 0}
    assert world.status()["residentMember"] == "coder"


async def test_given_an_idle_resident_when_another_is_scaled_up_by_hand_then_it_takes_over(
    world: OperatorWorld,
) -> None:
    await pair(world, up="judge")
    reported: list[tuple[str | None, str | None]] = []
    early: list[Json] = []

    def see(write: Write) -> None:
        if write.kind == MODEL_POOLS and write.verb == "status" and write.after:
            found = write.after["status"]
            reported.append((found.get("residentMember"), found.get("pendingMember")))
            phases = {each["name"]: each["phase"] for each in found["members"]}
            is_left = world.replicas()["judge"] == 0 and world.up() == {"coder"}
            is_told = phases == {"coder": "Ready", "judge": "Stopped"}
            if found.get("residentMember") == "coder" and not (is_left and is_told):
                early.append(found)

    world.cluster.after_write.append(see)
    scale(world, "coder", 1)
    await world.run(until=resident(world, "coder"))

    assert not early
    steps = [each for each, _ in itertools.groupby(reported)]
    assert steps[0] == ("judge", "coder")
    assert steps[-1] == ("coder", None)
    assert {name for name, _ in steps[:-1]} <= {"judge", None}  # not reported before it is so
    assert world.up() == {"coder"}
    assert world.replicas() == {"coder": 1, "judge": 0}


async def test_given_a_busy_resident_then_the_swap_is_deferred_until_it_is_idle(
    world: OperatorWorld,
) -> None:
    await pair(world, up="judge")
    world.members.busy.add("judge")

    scale(world, "coder", 1)
    await world.run(until=lambda: world.says("SwapDeferred") == "True/PodsBusy")
    await world.run(600)

    assert world.replicas() == {"coder": 1, "judge": 1}
    assert world.status()["residentMember"] == "judge"
    assert world.status()["pendingMember"] == "coder"
    world.members.busy.clear()
    await world.run(until=resident(world, "coder"))
    assert world.says("SwapDeferred") == "False/NotDeferred"
    assert world.replicas() == {"coder": 1, "judge": 0}


async def test_given_a_silent_resident_then_it_is_left_alone(world: OperatorWorld) -> None:
    await pair(world, up="judge")
    world.members.silent.add("judge")

    scale(world, "coder", 1)
    await world.run(600)

    assert world.replicas()["judge"] == 1
    assert world.says("SwapDeferred") == "True/IdleCheckFailed"
    assert "/slots" in world.condition("SwapDeferred")["message"]


async def test_given_a_resident_without_idle_probe_then_the_operator_never_unloads_it(
    world: OperatorWorld,
) -> None:
    world.member("coder", replicas=1)
    world.member("judge", replicas=1)
    refs = [{"deploymentRef": {"name": each}} for each in ("coder", "judge")]
    world.pool("gpu0", *refs, default="judge")
    world.start()

    await world.run(600)

    assert world.replicas() == {"coder": 1, "judge": 1}
    assert world.says("SwapDeferred") == "True/IdleCheckFailed"
    assert "idlePath" in world.condition("SwapDeferred")["message"]
    assert world.members.asked == []


async def test_given_one_accelerator_when_scaled_there_and_back_then_two_never_hold_it() -> None:
    world = OperatorWorld(gpus=1)
    at_once: list[set[str]] = []
    asked: list[int] = []

    def count(write: Write) -> None:
        at_once.append(world.up())
        asked.append(sum(world.replicas().values()))

    world.cluster.after_write.append(count)
    await pair(world, up="judge")

    scale(world, "coder", 1)
    await world.run(until=resident(world, "coder"))
    scale(world, "judge", 1)
    await world.run(until=resident(world, "judge"))

    assert world.replicas() == {"coder": 0, "judge": 1}
    assert {frozenset(each) for each in at_once} == {
        frozenset(),
        frozenset({"coder"}),
        frozenset({"judge"}),
    }
    assert max(asked) == 2  # the second one waited for the first to end
    await world.close()
    assert not world.violations


# Members that cannot take turns


async def test_given_a_missing_member_then_no_replica_moves(world: OperatorWorld) -> None:
    world.member("coder", replicas=1)
    world.member("judge", replicas=1)
    world.pool("gpu0", "coder", "judge", "absent", default="judge")
    world.start()

    await world.run(600)

    assert world.replicas() == {"coder": 1, "judge": 1}
    assert world.status()["phase"] == "Degraded"
    assert world.says("MembersValid") == "False/MissingMembers"
    assert world.says("SlotAllocated") == "False/MissingMembers"
    assert world.says("Ready") == "False/MissingMembers"
    assert world.says("Stalled") == "True/MissingMembers"
    assert "absent (Deployment lab/absent)" in world.condition("MembersValid")["message"]
    assert world.status()["members"][2]["phase"] == "Missing"
    world.member("absent")
    await world.run(until=resident(world, "judge"))
    assert world.says("MembersValid") == "True/AllResolved"


async def test_given_a_missing_member_then_the_resident_goes_on_being_named(
    world: OperatorWorld,
) -> None:
    await pair(world, up="judge")

    world.cluster.remove(DEPLOYMENTS, NS, "coder")
    await world.run(60)

    assert world.replicas() == {"judge": 1}
    assert world.says("MembersValid") == "False/MissingMembers"
    assert world.says("SlotAllocated") == "True/Resident"


@pytest.mark.parametrize("mixed", [True, False])
async def test_given_metal_members_then_no_replica_moves(world: OperatorWorld, mixed: bool) -> None:
    world.service("mac", accelerator="metal", replicas=0)
    if mixed:
        world.member("judge")
    listed: list[Any] = [{"inferenceServiceRef": {"name": "mac"}}, *(["judge"] if mixed else [])]
    world.pool("gpu0", *listed, default="judge" if mixed else "mac")
    world.start()

    await world.run(600)

    assert world.says("MetalSupported") == "False/MetalMembersUnsupported"
    assert world.status()["phase"] == "Degraded"
    assert "mac" in world.condition("MetalSupported")["message"]
    assert world.replicas(INFERENCE_SERVICES) == {"mac": 0}
    assert world.replicas() == ({"judge": 0} if mixed else {})


async def test_given_two_pools_with_one_member_then_the_second_is_degraded_and_nothing_flips(
    world: OperatorWorld,
) -> None:
    await pair(world, up="judge")
    world.member("third")
    world.pool("late", "judge", "third", default="third")

    await world.run(900)

    assert world.says("MembersValid", "late") == "False/MemberShared"
    assert "lab/modelpool-gpu0" in world.condition("MembersValid", "late")["message"] or (
        "ModelPool gpu0" in world.condition("MembersValid", "late")["message"]
    )
    assert world.status("late")["phase"] == "Degraded"
    assert world.says("MembersValid") == "True/AllResolved"
    assert world.replicas() == {"coder": 0, "judge": 1, "third": 0}


async def test_given_a_member_with_the_mark_of_another_slot_then_it_is_not_touched(
    world: OperatorWorld,
) -> None:
    world.member("coder")
    world.member("judge")
    mark = {"metadata": {"annotations": {SLOT_ANNOTATION: "other/modelpool-x:4"}}}
    world.cluster.edit(DEPLOYMENTS, NS, "judge", mark)
    world.pool("gpu0", "coder", "judge", default="coder")
    world.start()

    await world.run(600)

    assert world.says("MembersValid") == "False/MemberShared"
    assert "other/modelpool-x" in world.condition("MembersValid")["message"]
    assert world.replicas() == {"coder": 0, "judge": 0}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"strategy": {"type": "RollingUpdate"}}, "type: Recreate"),
        ({"replicas": 2}, "asks for 2 replicas"),
    ],
)
async def test_given_an_unsafe_member_then_it_is_refused_untouched(
    world: OperatorWorld, change: Any, said: str
) -> None:
    world.member("coder")
    world.member("judge")
    world.cluster.edit(DEPLOYMENTS, NS, "judge", {"spec": change})
    world.pool("gpu0", "coder", "judge", default="coder")
    world.start()

    await world.run(600)

    assert world.says("MembersValid") == "False/UnsafeMember"
    assert said in world.condition("MembersValid")["message"]
    assert world.replicas()["coder"] == 0


async def test_given_one_object_under_two_names_then_it_is_refused(world: OperatorWorld) -> None:
    world.member("coder")
    refs = [{"name": name, "deploymentRef": {"name": "coder"}} for name in ("a", "b")]
    world.pool("gpu0", *refs, default="a")
    world.start()

    await world.run(600)

    assert world.says("MembersValid") == "False/UnsafeMember"
    assert world.replicas() == {"coder": 0}


async def test_given_a_member_that_cannot_land_on_the_slots_nodes_then_it_is_reported(
    world: OperatorWorld,
) -> None:
    world.member("coder", nodeSelector={"zone": "a"})
    world.pool("gpu0", "coder", nodeSelector={"zone": "b"})
    world.start()

    await world.run(60)

    assert "zone=a" in world.status()["members"][0]["message"]
    assert world.status()["phase"] == "Pending"


# What is wrong with members: nothing of any of them is written until it is mended


@dataclass(frozen=True)
class Broken:
    """Members that cannot take turns, what must be said about it, and how it is mended."""

    name: str
    build: Callable[[OperatorWorld], object]
    reason: str
    says: tuple[str, ...]
    """Field, value and way out."""
    mend: Callable[[OperatorWorld], object]
    condition: str = "MembersValid"
    pool: str = "gpu0"


def _two_up(world: OperatorWorld, *more: Any, **spec: Any) -> None:
    # left alone these two would not stay up together
    world.member("coder", replicas=1)
    world.member("judge", replicas=1)
    world.pool("gpu0", "coder", "judge", *more, default="judge", **spec)


def _edited(name: str, before: Json, after: Json) -> tuple[Any, Any]:
    """Return what breaks and what mends the spec of a member."""

    def build(world: OperatorWorld) -> None:
        _two_up(world)
        world.cluster.edit(DEPLOYMENTS, NS, name, before)

    return build, lambda world: world.cluster.edit(DEPLOYMENTS, NS, name, after)


def _listing(*members: str) -> Callable[[OperatorWorld], object]:
    listed = [{"deploymentRef": {"name": each}, "profile": "llama-server"} for each in members]
    patch = {"spec": {"members": listed, "default": members[-1]}}
    return lambda world: world.cluster.edit(MODEL_POOLS, NS, "gpu0", patch)


def _metal(world: OperatorWorld) -> None:
    world.service("mac", accelerator="metal", replicas=0)
    _two_up(world, {"inferenceServiceRef": {"name": "mac"}})


def _volumes(policy: str) -> Json:
    return {"spec": {"persistentVolumeClaimRetentionPolicy": {"whenScaled": policy}}}


def _with_set(world: OperatorWorld) -> None:
    world.cluster.put(STATEFULSETS, NS, statefulset("big"))
    world.cluster.edit(STATEFULSETS, NS, "big", _volumes("Delete"))
    _two_up(world, {"statefulSetRef": {"name": "big"}})


def _twice(world: OperatorWorld) -> None:
    _two_up(world, {"name": "again", "deploymentRef": {"name": "coder"}})


def _below(world: OperatorWorld) -> None:
    world.service("svc", replicas=0)
    refs = [{"name": "above", "inferenceServiceRef": {"name": "svc"}}]
    _two_up(world, *refs, {"deploymentRef": {"name": "svc"}})


def _older(world: OperatorWorld) -> None:
    world.pool("a-first", "judge")
    _two_up(world)


def _noted(world: OperatorWorld) -> None:
    _two_up(world)
    note = {"annotations": {SLOT_ANNOTATION: "other/modelpool-x:4"}}
    world.cluster.edit(DEPLOYMENTS, NS, "coder", {"metadata": note})


UNSAFE, SHARED = "UnsafeMember", "MemberShared"
ROLLING = {"spec": {"strategy": {"type": "RollingUpdate"}}}
RECREATE = {"spec": {"strategy": {"type": "Recreate"}}}
BROKEN = [
    Broken(
        "missing",
        lambda world: _two_up(world, "absent"),
        "MissingMembers",
        ("spec.members", "absent (Deployment lab/absent)", "create it, or take it out"),
        lambda world: world.member("absent"),
    ),
    Broken(
        "metal",
        _metal,
        "MetalMembersUnsupported",
        ("spec.accelerator", "mac", "take them out of spec.members"),
        _listing("coder", "judge"),
        condition="MetalSupported",
    ),
    Broken(
        "rolling",
        _edited("coder", ROLLING, RECREATE)[0],
        UNSAFE,
        ("member coder", "RollingUpdate", "set spec.strategy: {type: Recreate}"),
        _edited("coder", ROLLING, RECREATE)[1],
    ),
    Broken(
        "two replicas",
        _edited("coder", {"spec": {"replicas": 2}}, {})[0],
        UNSAFE,
        ("member coder", "asks for 2 replicas", "set spec.replicas to 0"),
        _edited("coder", {}, {"spec": {"replicas": 1}})[1],
    ),
    Broken(
        "volumes",
        _with_set,
        UNSAFE,
        ("member big", "deletes its volumes", "whenScaled: Retain"),
        lambda world: world.cluster.edit(STATEFULSETS, NS, "big", _volumes("Retain")),
    ),
    Broken(
        "two names",
        _twice,
        UNSAFE,
        (
            "member again: it is Deployment lab/coder, and so is member coder",
            "remove one of them",
            "`models`",
        ),
        _listing("coder", "judge"),
    ),
    Broken(
        "above and below",
        _below,
        UNSAFE,
        ("member svc: Deployment svc", "which is member above", "keep the inferenceServiceRef"),
        _listing("coder", "judge"),
    ),
    Broken(
        "listed by another",
        _older,
        SHARED,
        ("member judge: Deployment lab/judge", "ModelPool a-first", "take it out of one of them"),
        lambda world: world.cluster.remove(MODEL_POOLS, NS, "a-first"),
    ),
    Broken(
        "marked by another",
        _noted,
        SHARED,
        (
            f"annotation {SLOT_ANNOTATION}",
            "member coder: Deployment lab/coder belongs to the slot other/modelpool-x",
            "remove the annotation if that pool is no more",
        ),
        lambda world: world.cluster.edit(
            DEPLOYMENTS, NS, "coder", {"metadata": {"annotations": {SLOT_ANNOTATION: None}}}
        ),
    ),
]


def touched(world: OperatorWorld) -> list[str]:
    """Return what was written to members, or to what is below them."""
    return [
        f"{each.verb} {each.kind.kind} {each.name}"
        for each in world.writes()
        if each.kind in MEMBER_KINDS.values()
        and each.verb != "status"
        and not (each.verb == "create" and each.before is None)  # below a service that is at 0
    ]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda each: each.name)
async def test_given_members_that_cannot_take_turns_then_none_is_written_until_it_is_mended(
    world: OperatorWorld, broken: Broken
) -> None:
    broken.build(world)
    world.start()

    await world.run(1200)

    assert touched(world) == []
    assert world.says(broken.condition) == f"False/{broken.reason}"
    message = world.condition(broken.condition)["message"]
    for piece in broken.says:
        assert piece in message
    assert message.count(". Until then no replica of any member is touched") == 1
    assert world.says("Stalled") == f"True/{broken.reason}"
    assert world.condition("Stalled")["message"] == message
    assert world.status()["phase"] == "Degraded"
    broken.mend(world)
    await world.run(600, until=lambda: world.status()["phase"] == "Ready")
    assert touched(world)
    assert sum(world.replicas().values()) == 1


# Others who scale


async def test_given_an_autoscaler_on_a_member_then_nothing_is_written(
    world: OperatorWorld,
) -> None:
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "judge"}
    body = {"metadata": {"name": "hpa"}, "spec": {"scaleTargetRef": target}}
    world.cluster.put(AUTOSCALERS, NS, body)
    await pair(world, default="judge")

    await world.run(600)

    assert world.says("SwapDeferred") == "True/ReplicasContested"
    assert "HorizontalPodAutoscaler hpa" in world.condition("SwapDeferred")["message"]
    assert world.replicas() == {"coder": 0, "judge": 0}


async def test_given_somebody_who_keeps_scaling_then_the_operator_stops_and_says_so(
    world: OperatorWorld,
) -> None:
    await pair(world, default="judge")
    await world.run(until=resident(world, "judge"))
    await world.run(120)

    scale(world, "judge", 0)  # once is a slip
    await world.run(until=lambda: world.replicas()["judge"] == 1)
    await world.run(60)
    scale(world, "judge", 0)  # twice is a will
    await world.run(until=lambda: world.says("SwapDeferred") == "True/ReplicasContested")
    await world.run(300)

    assert world.replicas()["judge"] == 0
    await world.run(600)
    assert world.replicas()["judge"] == 1  # ten minutes of peace later


# Former members


async def test_given_a_removed_resident_then_it_is_drained_before_the_default_is_warmed(
    world: OperatorWorld,
) -> None:
    await pair(world, up="judge")
    world.hold("gpu0", "router-0", {"format": 1, "epoch": 3, "phase": "resident", "owner": "judge"})
    mark = {"metadata": {"annotations": {SLOT_ANNOTATION: f"{NS}/modelpool-gpu0:3"}}}
    for name in ("coder", "judge"):
        world.cluster.edit(DEPLOYMENTS, NS, name, mark)
    world.hold("gpu0", "")
    world.members.busy.add("judge")
    listed = [{"deploymentRef": {"name": "coder"}, "profile": "llama-server"}]
    profile = {"metadata": {"annotations": {}}, "spec": {"members": listed, "default": "coder"}}
    world.cluster.edit(MODEL_POOLS, NS, "gpu0", profile)

    await world.run(300)

    assert world.replicas() == {"coder": 0, "judge": 1}
    assert world.says("SwapDeferred") == "True/IdleCheckFailed"  # its profile went with its entry
    scale(world, "judge", 0)
    await world.run(until=resident(world, "coder"))
    judge = world.cluster.must(DEPLOYMENTS, NS, "judge")
    assert annotation(judge, SLOT_ANNOTATION) is None


async def test_given_a_removed_resident_that_can_be_asked_then_it_is_unloaded_when_idle(
    world: OperatorWorld,
) -> None:
    world.service("judge", replicas=1)
    world.member("coder")
    refs: list[Any] = [{"inferenceServiceRef": {"name": "judge"}}, "coder"]
    world.pool("gpu0", *refs, default="judge")
    world.start()
    await world.run(until=resident(world, "judge"))
    scale(world, "coder", 1)  # makes the operator mark both
    await world.run(until=resident(world, "coder"))
    world.cluster.edit(INFERENCE_SERVICES, NS, "judge", {"spec": {"replicas": 1}})
    await world.run(until=resident(world, "judge"))
    world.members.busy.add("judge")

    listed = [{"deploymentRef": {"name": "coder"}, "profile": "llama-server"}]
    world.cluster.edit(MODEL_POOLS, NS, "gpu0", {"spec": {"members": listed, "default": "coder"}})
    await world.run(until=lambda: world.says("SwapDeferred") == "True/PodsBusy")
    await world.run(300)
    assert world.replicas() == {"coder": 0, "judge": 1}
    world.members.busy.clear()
    await world.run(until=resident(world, "coder"))

    assert world.replicas() == {"coder": 1, "judge": 0}
    service = world.cluster.must(INFERENCE_SERVICES, NS, "judge")
    assert annotation(service, SLOT_ANNOTATION) is None
    assert "MemberDrained" in world.events()


# Swaps that a dead router left


@pytest.mark.parametrize("phase", ["unloading", "loading"])
async def test_given_a_swap_left_half_done_then_its_target_is_loaded(
    world: OperatorWorld, phase: str
) -> None:
    await pair(world, default="judge")
    await world.run(5)
    record = {"format": 1, "epoch": 4, "phase": phase, "owner": "judge", "target": "coder"}
    world.hold("gpu0", "router-0", record)

    await world.run(until=resident(world, "coder"))

    assert world.replicas() == {"coder": 1, "judge": 0}
    await world.run(until=lambda: world.record()["phase"] == "resident")
    assert world.record()["owner"] == "coder"


async def test_given_a_drain_left_half_done_then_the_owner_stays(world: OperatorWorld) -> None:
    await pair(world, up="judge")
    record = {"format": 1, "epoch": 4, "phase": "draining", "owner": "judge", "target": "coder"}
    world.hold("gpu0", "router-0", record)

    await world.run(until=lambda: world.record()["phase"] == "resident")

    assert world.record()["owner"] == "judge"
    assert world.replicas() == {"coder": 0, "judge": 1}


async def test_given_two_up_after_a_router_died_then_the_announced_target_stays(
    world: OperatorWorld,
) -> None:
    await pair(world, up="judge")
    record = {"format": 1, "epoch": 4, "phase": "loading", "owner": "judge", "target": "coder"}
    world.hold("gpu0", "router-0", record)
    scale(world, "coder", 1)

    await world.run(until=resident(world, "coder"))

    assert world.replicas() == {"coder": 1, "judge": 0}


async def test_given_two_up_of_a_routed_pool_then_the_owner_stays(world: OperatorWorld) -> None:
    await pair(world, up="judge")
    record = {"format": 1, "epoch": 4, "phase": "resident", "owner": "judge"}
    world.hold("gpu0", "router-0", record)
    world.hold("gpu0", "")
    scale(world, "coder", 1)  # no demand where a router takes the requests

    await world.run(until=lambda: world.replicas()["coder"] == 0)
    await world.run(until=resident(world, "judge"))

    assert world.replicas() == {"coder": 0, "judge": 1}


async def test_given_an_unreadable_record_then_the_pool_is_frozen(world: OperatorWorld) -> None:
    await pair(world, default="judge")
    await world.run(5)
    text = {"modelpool.dev/record": "{"}
    world.cluster.edit(LEASES, NS, "modelpool-gpu0", {"metadata": {"annotations": text}})

    await world.run(600)

    assert world.says("Stalled") == "True/RecordUnreadable"
    assert world.status()["phase"] == "Degraded"
    assert world.replicas() == {"coder": 0, "judge": 0}


# While a router holds the Lease


async def test_given_a_router_then_the_operator_moves_nothing_and_says_what_it_records(
    world: OperatorWorld,
) -> None:
    await pair(world, up="judge")
    world.cluster.edit(MODEL_POOLS, NS, "gpu0", {"spec": {"default": "coder"}})
    record = {"format": 1, "epoch": 9, "phase": "resident", "owner": "judge", "held": 3}
    scale(world, "coder", 1)
    for _ in range(40):
        world.hold("gpu0", "router-0", record)
        await world.run(5)

    assert world.replicas() == {"coder": 1, "judge": 1}
    assert world.status()["residentMember"] == "judge"
    assert world.status()["held"] == 3
    assert world.status()["router"] == "router-0"
    assert world.status()["epoch"] == 9
    record |= {"phase": "draining", "target": "coder", "reason": "PodsBusy: 2 streams run"}
    for _ in range(4):
        world.hold("gpu0", "router-0", record)
        await world.run(5)
    assert world.status()["phase"] == "Swapping"
    assert world.status()["residentMember"] == "judge"
    assert world.status()["pendingMember"] == "coder"
    assert world.says("SwapDeferred") == "True/PodsBusy"
    assert world.condition("SwapDeferred")["message"] == "2 streams run"
    assert world.says("Ready") == "True/Progressing"


async def test_given_a_router_that_is_back_within_the_minute_then_nothing_moves(
    world: OperatorWorld,
) -> None:
    await pair(world, default="judge")
    await world.run(5)
    for _ in range(6):
        world.hold("gpu0", "router-0")
        await world.run(70)  # runs out after 15, and 55 more are less than a minute

    assert world.replicas() == {"coder": 0, "judge": 0}


async def test_given_a_router_that_died_then_the_default_is_warmed_after_a_minute(
    world: OperatorWorld,
) -> None:
    await pair(world, default="judge")
    await world.run(5)
    world.hold("gpu0", "router-0")

    await world.run(70)
    assert world.replicas()["judge"] == 0
    await world.run(until=resident(world, "judge"))


async def test_given_a_renewal_when_nothing_else_changes_then_nothing_is_written(
    world: OperatorWorld,
) -> None:
    await pair(world, up="judge")
    record = {"format": 1, "epoch": 9, "phase": "resident", "owner": "judge"}
    world.hold("gpu0", "router-0", record)
    await world.run(10)
    before = world.cluster.version

    for _ in range(20):
        world.hold("gpu0", "router-0", record)
        await world.run(5)

    assert world.writes(before) == []


# The Lease, and the end


async def test_given_a_deleted_lease_then_it_is_made_again_and_epochs_go_on(
    world: OperatorWorld,
) -> None:
    await pair(world, default="judge")
    await world.run(until=resident(world, "judge"))
    await world.run(120)
    epoch = world.record()["epoch"]

    world.cluster.vanish(LEASES, NS, "modelpool-gpu0")
    await world.run(120)
    scale(world, "coder", 1)
    await world.run(until=lambda: world.record().get("epoch") is not None)

    assert world.record()["epoch"] > epoch


async def test_given_a_deleted_pool_then_no_replica_moves_and_marks_and_lease_go(
    world: OperatorWorld,
) -> None:
    await pair(world, default="judge")
    await world.run(until=resident(world, "judge"))
    await world.run(120)

    before = world.cluster.version
    world.cluster.remove(MODEL_POOLS, NS, "gpu0")
    await world.run(300)

    assert world.cluster.names(MODEL_POOLS) == []
    assert world.cluster.names(LEASES, NS) == []
    assert world.replicas() == {"coder": 0, "judge": 1}
    for name in ("coder", "judge"):
        found = world.cluster.must(DEPLOYMENTS, NS, name)
        assert annotation(found, SLOT_ANNOTATION) is None
    # whoever held the Lease is deposed before a mark goes
    gone = [each.kind for each in world.writes(before) if each.verb in ("patch", "remove")]
    assert gone == [LEASES, DEPLOYMENTS, DEPLOYMENTS, MODEL_POOLS]


async def test_given_a_deleted_pool_then_a_lease_that_a_router_made_stays(
    world: OperatorWorld,
) -> None:
    world.cluster.put(LEASES, NS, {"metadata": {"name": "modelpool-gpu0"}, "spec": {}})
    await pair(world, default="judge")
    await world.run(120)

    world.cluster.remove(MODEL_POOLS, NS, "gpu0")
    await world.run(300)

    assert world.cluster.names(LEASES, NS) == ["modelpool-gpu0"]
    assert world.cluster.names(MODEL_POOLS) == []


async def test_given_a_pool_then_its_end_is_guarded_before_anything_else_is_made(
    world: OperatorWorld,
) -> None:
    await pair(world, default="judge")

    await world.run(5)

    wrote = [(each.kind, each.verb) for each in world.writes()]
    assert wrote[:2] == [(MODEL_POOLS, "patch"), (LEASES, "create")]
    assert world.cluster.must(MODEL_POOLS, NS, "gpu0")["metadata"]["finalizers"] == [FINALIZER]


async def test_given_an_unknown_pool_then_a_pass_is_no_error(world: OperatorWorld) -> None:
    process = world.start()

    assert await process.pools.reconcile((NS, "nobody")) is None


# Trouble


async def test_given_a_lost_node_then_the_pool_says_so_and_starts_nothing(
    world: OperatorWorld,
) -> None:
    await pair(world, up="judge", default="judge")
    world.world.kubelet.lose("n1")
    scale(world, "judge", 0)
    await world.run(900)

    assert world.says("Stalled") == "True/NodeLost"
    assert "out-of-service" in world.condition("Stalled")["message"]
    assert world.replicas() == {"coder": 0, "judge": 0}


async def test_given_a_default_that_cannot_start_then_the_reason_is_named(
    world: OperatorWorld,
) -> None:
    await pair(world, default="judge")
    await world.run(until=lambda: bool(world.cluster.all(PODS)))
    name = world.cluster.names(PODS, NS)[0]
    world.world.kubelet.wait_with(NS, name, "ImagePullBackOff")

    await world.run(60)

    assert world.says("Stalled") == "True/LoadFailed"
    assert "ImagePullBackOff" in world.condition("Stalled")["message"]
    assert world.status()["members"][1]["phase"] == "Failed"
    assert "SwapFailed" in world.events()


async def test_given_a_stateful_set_as_member_then_it_takes_turns_too(
    world: OperatorWorld,
) -> None:
    world.member("coder")
    body = {
        "metadata": {"name": "big"},
        "spec": {
            "replicas": 0,
            "serviceName": "big",
            "selector": {"matchLabels": {"app": "big"}},
            "template": {
                "metadata": {"labels": {"app": "big"}},
                "spec": {"containers": [{"name": "c", "resources": {"limits": {GPU: 1}}}]},
            },
        },
    }
    world.cluster.put(STATEFULSETS, NS, body)
    world.pool("gpu0", "coder", {"statefulSetRef": {"name": "big"}}, default="big")
    world.start()

    await world.run(until=resident(world, "big"))

    assert world.replicas(STATEFULSETS) == {"big": 1}


async def test_given_inference_services_then_the_epoch_travels_down(world: OperatorWorld) -> None:
    world.service("coder")
    world.service("judge")
    refs = [{"inferenceServiceRef": {"name": each}} for each in ("coder", "judge")]
    world.pool("gpu0", *refs, default="judge")
    world.start()

    await world.run(until=resident(world, "judge"))
    await world.run(120)

    assert world.replicas(INFERENCE_SERVICES) == {"coder": 0, "judge": 1}
    assert world.replicas() == {"coder": 0, "judge": 1}
    for name in ("coder", "judge"):
        above = world.cluster.must(INFERENCE_SERVICES, NS, name)
        below = world.cluster.must(DEPLOYMENTS, NS, name)
        assert annotation(below, SLOT_ANNOTATION) == annotation(above, SLOT_ANNOTATION)
    world.cluster.edit(INFERENCE_SERVICES, NS, "coder", {"spec": {"replicas": 1}})
    await world.run(until=resident(world, "coder"))
    assert world.replicas() == {"coder": 1, "judge": 0}


async def test_given_a_right_that_is_missing_then_the_pool_says_which(
    world: OperatorWorld,
) -> None:
    await pair(world, default="judge")
    port = world.processes[0].port
    refused = errors.Forbidden("may not list horizontalpodautoscalers", call="GET /apis/x")
    port.fail(refused, kind=AUTOSCALERS, times=30)

    await world.run(5)

    assert world.says("Stalled") == "True/Forbidden"
    assert "may not list" in world.condition("Stalled")["message"]
    await world.run(until=lambda: world.says("Stalled") == "False/NotStalled")
    await world.run(until=resident(world, "judge"))


class Suspending(Part):
    """What the controller of ModelDeployments does for a pool: it says for which epoch it acted."""

    sees = (MODEL_DEPLOYMENTS,)

    def _act(self) -> bool:
        return any(self._sync(each) for each in self.seen(MODEL_DEPLOYMENTS))

    def _sync(self, obj: Json) -> bool:
        meta = obj["metadata"]
        mark = annotation(obj, SLOT_ANNOTATION)
        count = 0 if obj["spec"]["suspend"] else 1
        if mark is not None and annotation(obj, SLOT_APPLIED_ANNOTATION) != f"{mark}={count}":
            notes = {"annotations": {SLOT_APPLIED_ANNOTATION: f"{mark}={count}"}}
            where = (MODEL_DEPLOYMENTS, NS, meta["name"])
            self.cluster.edit(*where, {"metadata": notes}, actor=self.name)
            return True
        roles = [{"name": "server", "desired": count, "ready": count}]
        status = {"observedGeneration": meta["generation"], "roles": roles}
        return self._set_status(MODEL_DEPLOYMENTS, obj, status)


async def test_given_a_model_deployment_as_member_then_it_is_suspended_instead_of_scaled(
    world: OperatorWorld,
) -> None:
    world.world.parts.append(Suspending(world.cluster))
    body: Json = {"metadata": {"name": "big"}, "spec": {"suspend": True, "roles": []}}
    world.cluster.put(MODEL_DEPLOYMENTS, NS, body)
    world.member("coder")
    refs: list[Any] = [{"modelDeploymentRef": {"name": "big"}}, "coder"]
    world.pool("gpu0", *refs, default="big")
    world.start()

    await world.run(until=resident(world, "big"))
    await world.run(120)

    big = world.cluster.must(MODEL_DEPLOYMENTS, NS, "big")
    assert big["spec"] == {"suspend": False, "roles": []}
    scale(world, "coder", 1)
    await world.run(until=resident(world, "coder"))
    assert world.cluster.must(MODEL_DEPLOYMENTS, NS, "big")["spec"]["suspend"] is True
    assert world.replicas() == {"coder": 1}


async def test_given_a_drain_for_the_resident_itself_then_nothing_is_pending(
    world: OperatorWorld,
) -> None:
    await pair(world, up="judge")
    record = {"format": 1, "epoch": 9, "phase": "draining", "owner": "judge", "target": "judge"}
    world.hold("gpu0", "router-0", record)

    await world.run(10)

    assert world.status()["residentMember"] == "judge"
    assert "pendingMember" not in world.status()
    assert world.status()["phase"] == "Ready"


@pytest.mark.parametrize(("phase", "told"), [("unloading", False), ("resident", True)])
async def test_given_a_resident_that_goes_then_it_is_lost_unless_its_router_empties_the_slot(
    world: OperatorWorld, phase: str, told: bool
) -> None:
    await pair(world, up="judge")
    record = {"format": 1, "epoch": 9, "phase": "resident", "owner": "judge"}
    world.hold("gpu0", "router-0", record)
    await world.run(10)
    assert world.status()["residentMember"] == "judge"

    world.hold("gpu0", "router-0", {**record, "phase": phase})
    scale(world, "judge", 0)
    await world.run(10)

    assert "residentMember" not in world.status()
    assert ("ResidentLost" in world.events()) is told


async def test_given_an_operator_that_died_after_its_announcement_then_the_target_stays(
    world: OperatorWorld,
) -> None:
    await pair(world, up="judge")
    scale(world, "coder", 1)
    # what it had recorded when it died, one write before judge was to be unloaded
    ours = {"operatorEpoch": 4, "routed": False}
    record = {"format": 1, "epoch": 4, "phase": "loading", "owner": "judge", "target": "coder"}
    world.hold("gpu0", "", record | ours)

    await world.run(until=resident(world, "coder"))

    assert world.replicas() == {"coder": 1, "judge": 0}
