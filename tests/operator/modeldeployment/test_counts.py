"""Replica counts, alone and together with a configuration; suspending."""

from __future__ import annotations

import pytest

from mdep_lab import NAMESPACE, Lab, role
from memkueue import going
from modelpool_api.names import SLOT_ANNOTATION, SLOT_APPLIED_ANNOTATION
from modelpool_kube.kinds import MODEL_DEPLOYMENTS, PODS, SERVICES, WORKLOADS, Json, annotation, uid
from modelpool_kube.record import SlotId
from modelpool_kube.slotrules import Facts, Gone, Look, Member, NotYet, prove_gone, ready_evidence

SLOT = SlotId("team-a", "modelpool-gpu0")


def image(pod: Json) -> str:
    """Return the image of *pod*."""
    return str(pod["spec"]["containers"][0]["image"])


async def test_q1_a_smaller_count_sheds_the_highest_and_spares_the_rest() -> None:
    lab = Lab(role(replicas=4, size=2))
    await lab.settle()
    kept = lab.uids(0) + lab.uids(1)
    workloads = [uid(lab.workload(each) or {}) for each in (0, 1)]
    mark = len(lab.port.requests)

    lab.edit(replicas=2)
    await lab.settle()

    assert lab.uids() == kept
    assert [uid(each) for each in map(lab.workload, (0, 1)) if each] == workloads
    assert len(lab.cluster.all(WORKLOADS)) == 2
    deleted = [r.name for r in lab.port.requests[mark:] if r.verb == "delete" and r.kind == PODS]
    assert deleted[0].startswith("chat-server-r3")
    assert "chat-server-r3" not in lab.services()


async def test_q1_a_pass_that_sheds_selects_nobody() -> None:
    lab = Lab(role(replicas=3))
    await lab.settle()

    lab.edit(replicas=2, image="engine:2")
    await lab.look()

    assert lab.record is None and [going(pod) for pod in lab.pods()] == [False, False, True]
    await lab.settle()
    assert [image(pod) for pod in lab.pods()] == ["engine:2"] * 2


@pytest.mark.parametrize(
    "phase", ["begun", "vacant", "made", "queued", "admitted", "only its Workload left"]
)
async def test_t56_a_count_that_passes_the_slot_cancels_it(phase: str) -> None:
    lab = Lab(role(replicas=3))
    await lab.settle()
    kept = lab.uids(0) + lab.uids(1)
    lab.kueue.may_admit = False
    lab.edit(image="engine:2")
    await lab.look()
    if phase != "begun":
        lab.move()
    if phase not in ("begun", "vacant"):
        await lab.look()
    if phase in ("queued", "admitted", "only its Workload left"):
        lab.move()
        await lab.look()
    if phase == "admitted":
        lab.kueue.admit()
    if phase == "only its Workload left":
        lab.vanish(lab.pods(2))

    lab.edit(replicas=2)
    await lab.look()
    assert lab.uids(0) + lab.uids(1) == kept
    for _ in range(3):
        lab.move()
        await lab.look()
    assert lab.pods(2) == [] and lab.workload(2) is None
    lab.kueue.may_admit = True
    await lab.settle()
    assert not set(kept) & set(lab.uids()) and len(lab.pods()) == 2

    lab.edit(image="engine:3", replicas=3)
    await lab.settle()
    assert [image(pod) for pod in lab.pods()] == ["engine:3"] * 3


async def test_t57_growth_comes_before_the_configuration() -> None:
    lab = Lab(role(replicas=2))
    await lab.settle()
    kept = lab.uids()
    lab.kueue.may_admit = False
    lab.edit(replicas=4, image="engine:2")
    for _ in range(3):
        await lab.look()
        lab.move()
    assert [image(pod) for pod in lab.pods()] == ["engine:1"] * 2 + ["engine:2"] * 2
    lab.kueue.admit()
    for _ in range(3):
        await lab.look()
    assert lab.uids(0) + lab.uids(1) == kept and lab.record is None

    lab.kueue.may_admit = True
    await lab.settle()
    assert [image(pod) for pod in lab.pods()] == ["engine:2"] * 4


async def test_q5_no_replicas_is_idle_and_keeps_the_services() -> None:
    lab = Lab(role(size=2))
    await lab.settle()
    lab.edit(replicas=0)
    await lab.settle()

    assert lab.pods() == [] and lab.services() == ["chat", "chat-server"]
    assert lab.deployment["status"]["phase"] == "Idle"
    assert lab.condition("QuotaReserved")[:2] == ("Unknown", "NoReplicas")
    assert lab.condition("Ready")[:2] == ("Unknown", "NoReplicas")
    await lab.quiet()


# As a member of a pool


def mark(epoch: int) -> Json:
    """Return the patch of the slot annotation."""
    return {"metadata": {"annotations": {SLOT_ANNOTATION: SLOT.value(epoch)}}}


def facts(lab: Lab) -> Facts:
    """Return what a pool reads of the deployment, in its order."""
    found = Facts().seen(Look.MEMBER, lab.deployment)
    found = found.seen(Look.PODS, tuple(lab.cluster.all(PODS, NAMESPACE)))
    return found.seen(Look.WORKLOADS, tuple(lab.cluster.all(WORKLOADS, NAMESPACE)))


MEMBER = Member("chat", MODEL_DEPLOYMENTS, NAMESPACE, "chat")


@pytest.mark.parametrize("phase", ["at rest", "Cleanup", "WaitingForAdmission"])
async def test_a_suspended_deployment_is_proven_gone_when_pods_and_workloads_are(
    phase: str,
) -> None:
    lab = Lab(role(replicas=2, size=2))
    await lab.settle()
    if phase != "at rest":
        lab.kueue.may_admit = False
        lab.edit(image="engine:2")
        await lab.until(phase)
    down = {**mark(3), "spec": {"suspend": True}}
    lab.cluster.edit(MODEL_DEPLOYMENTS, NAMESPACE, "chat", down, actor="pool")
    assert isinstance(prove_gone(MEMBER, facts(lab), slot=SLOT, epoch=3), NotYet)

    await lab.look()
    assert annotation(lab.deployment, SLOT_APPLIED_ANNOTATION) == f"{SLOT.value(3)}=0"
    assert isinstance(prove_gone(MEMBER, facts(lab), slot=SLOT, epoch=3), NotYet)
    lab.move()
    await lab.settle()

    assert isinstance(prove_gone(MEMBER, facts(lab), slot=SLOT, epoch=3), Gone)
    assert lab.record is None and lab.deployment["status"]["phase"] == "Idle"
    assert lab.deployment["spec"]["roles"][0]["replicas"] == 2
    assert lab.cluster.names(SERVICES, NAMESPACE) == ["chat", "chat-server"]
    await lab.quiet()


async def test_a_resumed_deployment_is_built_from_the_newest_and_ready_without_a_slot() -> None:
    lab = Lab(role(), suspend=True)
    lab.cluster.edit(MODEL_DEPLOYMENTS, NAMESPACE, "chat", mark(3), actor="pool")
    await lab.settle()
    assert lab.pods() == []
    lab.edit(image="engine:2")
    up = {**mark(4), "spec": {"suspend": False}}
    lab.cluster.edit(MODEL_DEPLOYMENTS, NAMESPACE, "chat", up, actor="pool")
    await lab.settle()

    assert image(lab.pods()[0]) == "engine:2"
    assert annotation(lab.deployment, SLOT_APPLIED_ANNOTATION) == f"{SLOT.value(4)}=1"
    lab.kueue.may_admit = False
    lab.edit(image="engine:3")
    await lab.until("WaitingForAdmission")
    answer = ready_evidence(MEMBER, facts(lab), slot=SLOT, epoch=4, fenced_at=0.0, probe=None)
    assert getattr(answer, "reason", "") == "ReplacementOpen"


async def test_a_deployment_that_cannot_be_built_still_gives_its_slot_back() -> None:
    lab = Lab(role())
    await lab.settle()
    lab.edit(instanceType="nowhere")
    await lab.look()
    assert len(lab.pods()) == 1

    down = {**mark(3), "spec": {"suspend": True}}
    lab.cluster.edit(MODEL_DEPLOYMENTS, NAMESPACE, "chat", down, actor="pool")
    await lab.settle()

    assert isinstance(prove_gone(MEMBER, facts(lab), slot=SLOT, epoch=3), Gone)


async def test_a_mark_that_is_taken_off_takes_the_answer_along() -> None:
    lab = Lab()
    lab.cluster.edit(MODEL_DEPLOYMENTS, NAMESPACE, "chat", mark(3), actor="pool")
    await lab.settle()
    off: Json = {"metadata": {"annotations": {SLOT_ANNOTATION: None}}}

    lab.cluster.edit(MODEL_DEPLOYMENTS, NAMESPACE, "chat", off, actor="pool")
    await lab.settle()

    assert annotation(lab.deployment, SLOT_APPLIED_ANNOTATION) is None
    assert len(lab.pods()) == 1
