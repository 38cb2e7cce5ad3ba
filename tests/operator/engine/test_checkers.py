"""The checks of what operators write: one bad write for each, and it is seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from memcluster import MemCluster, MemPort
from memcontrollers import deployment
from modelpool_api.names import (
    APP_INSTANCE_LABEL,
    APP_MANAGED_BY_LABEL,
    RECORD_ANNOTATION,
    SLOT_ANNOTATION,
)
from modelpool_kube.kinds import (
    AUTOSCALERS,
    CONFIGMAPS,
    DEPLOYMENTS,
    EVENTS,
    INFERENCE_SERVICES,
    LEASES,
    MODEL_POOLS,
    PODS,
    SERVICES,
    Json,
    Kind,
)
from operatorworld import NS, OperatorWorld

pytestmark = pytest.mark.looptime(idle_timeout=100_000)
LEASE = "modelpool-gpu0"
ME = "operator-0"


@pytest.fixture
async def world() -> OperatorWorld:
    """Two Deployments and a service in a pool, coder up in epoch 3; no operator works on it."""
    found = OperatorWorld()
    found.service("svc", replicas=0)
    found.member("coder", replicas=1)
    found.member("judge")
    found.pool("gpu0", "coder", "judge", {"inferenceServiceRef": {"name": "svc"}})
    notes = {RECORD_ANNOTATION: json.dumps({"epoch": 3, "phase": "resident", "theirs": 1})}
    lease = {"metadata": {"name": LEASE, "annotations": notes}, "spec": {"holderIdentity": ME}}
    found.cluster.put(LEASES, NS, lease)
    for name in ("coder", "judge"):
        found.cluster.edit(DEPLOYMENTS, NS, name, mark(3))
    found.cluster.edit(INFERENCE_SERVICES, NS, "svc", mark(3))
    below = deployment("svc")
    below["metadata"] |= mark(3)["metadata"] | {
        "ownerReferences": [owner(found.cluster, INFERENCE_SERVICES, "svc")]
    }
    found.cluster.put(DEPLOYMENTS, NS, below)
    found.world.settle()
    return found


def mark(epoch: int, slot: str = f"{NS}/{LEASE}", **spec: Any) -> Json:
    """Return the patch of a mark, and of *spec* with it."""
    patch: Json = {"metadata": {"annotations": {SLOT_ANNOTATION: f"{slot}:{epoch}"}}}
    return {**patch, "spec": spec} if spec else patch


def record(epoch: int, **more: Any) -> Json:
    """Return the patch of a record."""
    text = json.dumps({"epoch": epoch, "phase": "resident", "theirs": 1, **more})
    return {"metadata": {"annotations": {RECORD_ANNOTATION: text}}}


def owner(cluster: MemCluster, kind: Kind, name: str, uid: str = "") -> Json:
    """Return a reference to a controller."""
    found = cluster.must(kind, NS, name)["metadata"]["uid"]
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "name": name,
        "uid": uid or found,
        "controller": True,
    }


class Hand:
    """Writes what an operator should not."""

    def __init__(self, world: OperatorWorld, name: str = ME) -> None:
        self.cluster = world.cluster
        self.port: MemPort = world.cluster.port(name)

    async def patch(self, kind: Kind, name: str, patch: Json, *, blind: bool = False) -> None:
        """Merge, on condition of what stands there unless *blind*."""
        version = self.cluster.must(kind, NS, name)["metadata"]["resourceVersion"]
        await self.port.patch_merge(kind, NS, name, patch, version=None if blind else version)

    async def make(self, kind: Kind, by: Json | None, *, name: str = "svc", **meta: Any) -> None:
        """Create a child of *by*."""
        labels = {APP_MANAGED_BY_LABEL: "modelpool-operator", APP_INSTANCE_LABEL: "svc"}
        body: Json = {"metadata": {"name": name, "labels": labels, **meta}, "spec": {}}
        if by is not None:
            body["metadata"]["ownerReferences"] = [by]
        await self.port.create(kind, NS, body)


def service(hand: Hand) -> Json:
    """Return a reference to the service."""
    return owner(hand.cluster, INFERENCE_SERVICES, "svc")


async def _second_record(hand: Hand) -> None:
    await hand.patch(LEASES, LEASE, record(4))
    await hand.patch(LEASES, LEASE, {"spec": {"holderIdentity": "operator-1"}})
    await hand.patch(LEASES, LEASE, record(4, target="judge"))


async def _unmark_resident(hand: Hand) -> None:
    listed = [{"deploymentRef": {"name": "judge"}}]
    hand.cluster.edit(MODEL_POOLS, NS, "gpu0", {"spec": {"members": listed}})
    await hand.patch(DEPLOYMENTS, "coder", {"metadata": {"annotations": {SLOT_ANNOTATION: None}}})


async def _busy_below(hand: Hand) -> None:
    hand.cluster.edit(INFERENCE_SERVICES, NS, "svc", mark(3, replicas=1))
    hand.cluster.edit(DEPLOYMENTS, NS, "svc", mark(3, replicas=1))
    await hand.patch(DEPLOYMENTS, "svc", mark(3, replicas=0))


async def _services_up(hand: Hand) -> None:
    # an operator raised it above while coder was down, and passes it on too late
    hand.cluster.edit(DEPLOYMENTS, NS, "coder", {"spec": {"replicas": 0}})
    for pod in hand.cluster.names(PODS, NS):
        hand.cluster.vanish(PODS, NS, pod)
    await hand.patch(INFERENCE_SERVICES, "svc", mark(3, replicas=1))
    hand.cluster.edit(DEPLOYMENTS, NS, "coder", {"spec": {"replicas": 1}})
    await hand.patch(DEPLOYMENTS, "svc", mark(3, replicas=1))


NOTE = {"metadata": {"annotations": {"modelpool.dev/slot": None}}}
BAD: dict[str, tuple[str, Callable[[Hand], Any]]] = {
    "two up": ("S1: judge", lambda hand: hand.patch(DEPLOYMENTS, "judge", mark(3, replicas=1))),
    "two services up": (
        "S1: svc",
        lambda hand: hand.patch(INFERENCE_SERVICES, "svc", mark(3, replicas=1)),
    ),
    "two up, below": ("S1: svc", _services_up),
    "busy": ("S2: coder", lambda hand: hand.patch(DEPLOYMENTS, "coder", mark(3, replicas=0))),
    "busy, below": ("S2: svc", _busy_below),
    "epoch back": ("S8: the epoch", lambda hand: hand.patch(LEASES, LEASE, record(2))),
    "record gone": (
        "S8: the record",
        lambda hand: hand.patch(LEASES, LEASE, {"metadata": {"annotations": None}}),
    ),
    "same epoch in another's record": (
        "S8: operator-0 took over",
        lambda hand: hand.patch(LEASES, LEASE, record(3, target="judge")),
    ),
    "same epoch for another holder": ("S8: operator-0 took over", _second_record),
    "fields lost": (
        "S8: fields",
        lambda hand: hand.patch(
            LEASES,
            LEASE,
            {"metadata": {"annotations": {RECORD_ANNOTATION: '{"epoch": 4, "phase": "cold"}'}}},
        ),
    ),
    "mark back": ("S8: the mark", lambda hand: hand.patch(DEPLOYMENTS, "judge", mark(2))),
    "mark ahead": ("S9: judge got", lambda hand: hand.patch(DEPLOYMENTS, "judge", mark(4))),
    "scaled in an old epoch": (
        "S9: judge was",
        lambda hand: hand.patch(DEPLOYMENTS, "judge", mark(5, replicas=1)),
    ),
    "scaled without a mark": (
        "S9: coder",
        lambda hand: hand.patch(DEPLOYMENTS, "coder", {**NOTE, "spec": {"replicas": 0}}),
    ),
    "service scaled without a mark": (
        "S9: svc",
        lambda hand: hand.patch(INFERENCE_SERVICES, "svc", {**NOTE, "spec": {"replicas": 1}}),
    ),
    "a member loses its mark": (
        "S9: judge lost",
        lambda hand: hand.patch(DEPLOYMENTS, "judge", NOTE),
    ),
    "what is up loses its mark": ("asks to be up", _unmark_resident),
    "never asked for above": (
        "S9: ('lab/modelpool-gpu0:4', 0) below",
        lambda hand: hand.patch(DEPLOYMENTS, "svc", mark(4)),
    ),
    "mark back, below": ("S8: the mark", lambda hand: hand.patch(DEPLOYMENTS, "svc", mark(2))),
    "another slot": (
        "S10: judge belongs",
        lambda hand: hand.patch(DEPLOYMENTS, "judge", mark(9, "lab/modelpool-x")),
    ),
    "more of a member": (
        "S10: operator-0 patch Deployment judge: more",
        lambda hand: hand.patch(DEPLOYMENTS, "judge", {"spec": {"paused": True}}),
    ),
    "a label of a member": (
        "S10: operator-0 patch Deployment judge: more",
        lambda hand: hand.patch(DEPLOYMENTS, "judge", {"metadata": {"labels": {"a": "b"}}}),
    ),
    "blind": (
        "conditional on nothing",
        lambda hand: hand.patch(DEPLOYMENTS, "judge", mark(3, paused=True), blind=True),
    ),
    "a pool's spec": (
        "more than its finalizers",
        lambda hand: hand.patch(MODEL_POOLS, "gpu0", {"spec": {"default": "coder"}}),
    ),
    "a Pod": (
        "neither a child nor a member",
        lambda hand: hand.patch(
            PODS, hand.cluster.names(PODS, NS)[0], {"metadata": {"labels": {"a": "b"}}}
        ),
    ),
    "a Pod's end": (
        "nobody's who is here",
        lambda hand: hand.port.delete(
            PODS,
            NS,
            hand.cluster.names(PODS, NS)[0],
            uid=hand.cluster.all(PODS, NS)[0]["metadata"]["uid"],
        ),
    ),
    "a Lease, the pool stays": (
        "nobody's who is here",
        lambda hand: hand.port.delete(
            LEASES, NS, LEASE, uid=hand.cluster.must(LEASES, NS, LEASE)["metadata"]["uid"]
        ),
    ),
    "a blind deletion": (
        "conditional on nothing",
        lambda hand: hand.port.delete(DEPLOYMENTS, NS, "svc"),
    ),
    "the status of somebody else": (
        "the status of somebody else",
        lambda hand: hand.port.patch_status(
            DEPLOYMENTS, NS, "svc", {"status": {"replicas": 7}}, version=None
        ),
    ),
    "a child of nobody": ("made for nobody", lambda hand: hand.make(SERVICES, None)),
    "a child of one who is gone": (
        "made for nobody",
        lambda hand: hand.make(
            SERVICES, owner(hand.cluster, INFERENCE_SERVICES, "svc", "uid-gone")
        ),
    ),
    "a child of a kind that is not made": (
        "made for nobody",
        lambda hand: hand.make(CONFIGMAPS, service(hand)),
    ),
    "a child of another name": (
        "made for nobody",
        lambda hand: hand.make(SERVICES, service(hand), name="other"),
    ),
    "a child without labels": (
        "who manages it",
        lambda hand: hand.make(SERVICES, service(hand), labels={}),
    ),
    "a child given away": (
        "another owner",
        lambda hand: hand.patch(DEPLOYMENTS, "svc", {"metadata": {"ownerReferences": []}}),
    ),
    "an Event taken back": (
        "only told",
        lambda hand: hand.port.delete(EVENTS, NS, "e"),
    ),
}


@pytest.mark.parametrize("name", BAD)
async def test_given_a_bad_write_then_it_is_seen(world: OperatorWorld, name: str) -> None:
    said, act = BAD[name]
    world.members.busy |= {"coder", "svc"}
    world.cluster.put(EVENTS, NS, {"metadata": {"name": "e"}})

    with pytest.raises(AssertionError, match="S[0-9]+: "):
        await act(Hand(world))

    assert any(said in each for each in world.violations), world.violations


async def test_given_a_child_with_notes_of_others_when_they_are_lost_then_it_is_seen(
    world: OperatorWorld,
) -> None:
    world.cluster.edit(DEPLOYMENTS, NS, "svc", {"metadata": {"annotations": {"x.dev/a": "1"}}})
    hand = Hand(world)
    await hand.patch(DEPLOYMENTS, "svc", {"metadata": {"annotations": {"modelpool.dev/x": "2"}}})

    with pytest.raises(AssertionError, match="of others were changed"):
        await hand.patch(DEPLOYMENTS, "svc", {"metadata": {"annotations": {"x.dev/a": None}}})


async def test_given_what_the_role_does_not_allow_then_it_is_seen(world: OperatorWorld) -> None:
    process = world.start()

    with pytest.raises(Exception, match="cannot"):
        await process.port.delete(AUTOSCALERS, NS, "any")

    assert world.violations == ["the Role does not allow 1 delete horizontalpodautoscalers lab/any"]


async def test_given_what_an_operator_does_then_it_is_let_through(world: OperatorWorld) -> None:
    hand = Hand(world)

    await hand.patch(LEASES, LEASE, record(4))
    await hand.patch(LEASES, LEASE, record(4, target="judge"))
    for name in ("coder", "judge"):
        await hand.patch(DEPLOYMENTS, name, mark(4))
    await hand.patch(INFERENCE_SERVICES, "svc", mark(4))
    await hand.patch(DEPLOYMENTS, "svc", mark(4))
    await hand.patch(DEPLOYMENTS, "coder", mark(4, replicas=0))
    world.world.settle()
    await hand.patch(DEPLOYMENTS, "judge", mark(4, replicas=1))

    assert world.violations == []
    assert world.replicas() == {"coder": 0, "judge": 1, "svc": 0}
