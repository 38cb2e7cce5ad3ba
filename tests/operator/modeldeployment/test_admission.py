"""Admission paces a rollout: what is queued, admitted, evicted, or never was admitted at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mdep_lab import NAMESPACE, Lab, role
from memkueue import condition, going
from modelpool_api.v1alpha1.instancetype import InstanceType
from modelpool_api.v1alpha1.modeldeployment import ModelDeployment
from modelpool_kube.kinds import INSTANCE_TYPES, PODS, WORKLOADS, Json, uid
from modelpool_operator.plan.modeldeployment.admission import why_not_admitted
from modelpool_operator.plan.modeldeployment.render import render
from modelpool_operator.plan.modeldeployment.sight import Member, read_member, read_workload


async def waiting(lab: Lab, **edit: Any) -> None:
    """Bring *lab* to where a complete replacement is queued."""
    lab.kueue.may_admit = False
    lab.edit(**edit or {"image": "engine:2"})
    await lab.until("WaitingForAdmission")
    await lab.look()
    lab.move()
    await lab.look()


async def test_t15_reserved_quota_is_no_admission() -> None:
    lab = Lab(role(replicas=2))
    await lab.settle()
    sibling = lab.uids(0)
    await waiting(lab)
    assert condition(lab.workload(1) or {}, "QuotaReserved") == "True"

    await lab.look(3)
    assert lab.slot()["ordinal"] == 1 and lab.uids(0) == sibling
    assert "not admitted yet (its quota is reserved)" in lab.status()["replacement"]["reason"]

    lab.kueue.admit()
    await lab.look()
    assert lab.record is None or lab.slot()["ordinal"] == 0


async def test_t17_admission_paces_and_not_readiness() -> None:
    lab = Lab(role(replicas=2))
    await lab.settle()
    old = lab.uids()
    lab.node.makes_ready = lambda pod: False
    lab.edit(image="engine:2")

    await lab.settle()

    assert not set(old) & set(lab.uids())
    assert lab.status()["ready"] == 0 and lab.deployment["status"]["phase"] == "Starting"


async def test_t18_an_evicted_sibling_stops_the_rollout_and_returns_with_the_newest() -> None:
    lab = Lab(role(replicas=2))
    await lab.settle()
    healthy = lab.uids(1)
    lab.kueue.may_reserve = False
    lab.kueue.evict(NAMESPACE, lab.group(0))
    lab.move()
    lab.edit(image="engine:2")

    for _ in range(5):
        await lab.look()
        lab.move()
    assert lab.uids(1) == healthy and lab.record is None
    returned = lab.pods(0)[0]
    assert returned["spec"]["containers"][0]["image"] == "engine:2"
    status, reason, message = lab.condition("ReplicasUpToDate")
    assert (status, reason) == ("False", "RolloutInProgress")
    assert "server 1; the next one of server is given up when every replica" in message

    lab.kueue.may_reserve = True
    await lab.settle()
    assert uid(returned) in lab.uids(0)
    assert lab.uids(1) != healthy


async def test_t19_one_edit_of_a_type_that_two_roles_name_is_a_slot_in_each() -> None:
    lab = Lab(role("one", replicas=2), role("two", replicas=2))
    await lab.settle()
    lab.kueue.may_admit = False
    lab.edit_type("a", perCard={"cpu": "8"})
    await lab.until("WaitingForAdmission")
    for _ in range(3):
        await lab.look()
        lab.move()

    assert {name: slot["ordinal"] for name, slot in lab.checks.slots().items()} == {
        "one": 1,
        "two": 1,
    }
    assert lab.is_admitted(0, "one") and lab.is_admitted(0, "two")

    lab.kueue.may_admit = True
    await lab.settle()
    cpus = {
        pod["spec"]["containers"][0]["resources"]["requests"]["cpu"]
        for pod in lab.cluster.all(PODS)
    }
    assert cpus == {"8"}


async def test_t20_waiting_writes_nothing() -> None:
    lab = Lab(role(replicas=2))
    await lab.settle()
    await waiting(lab)

    await lab.quiet()


async def test_resting_writes_nothing() -> None:
    lab = Lab(role("one", replicas=2, size=2), role("two"))
    await lab.settle()

    await lab.quiet()


# The proof of fresh admission: each difference keeps the slot open and is said


def first_set(workload: Json) -> Json:
    """Return the only PodSet of *workload*."""
    found: Json = workload["spec"]["podSets"][0]
    return found


def _container(key: str, value: Any) -> Callable[[Json], None]:
    def change(workload: Json) -> None:
        first_set(workload)["template"]["spec"]["containers"][0][key] = value

    return change


def _set(key: str, value: Any) -> Callable[[Json], None]:
    def change(workload: Json) -> None:
        first_set(workload)[key] = value

    return change


def _requests(workload: Json) -> None:
    container = first_set(workload)["template"]["spec"]["containers"][0]
    container["resources"]["requests"]["cpu"] = "3"


def _queue(name: str) -> Callable[[Json], None]:
    def change(workload: Json) -> None:
        workload["spec"]["queueName"] = name

    return change


def _second_set(workload: Json) -> None:
    workload["spec"]["podSets"].append({**first_set(workload), "name": "more"})


def _disowned(workload: Json) -> None:
    del workload["metadata"]["ownerReferences"][0]


def _evicted(workload: Json) -> None:
    workload["status"]["conditions"].append({"type": "Evicted", "status": "True"})


def _going(workload: Json) -> None:
    workload["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"


def _without_admission(workload: Json) -> None:
    workload["status"]["admission"] = None


def _not_admitted(workload: Json) -> None:
    for each in workload["status"]["conditions"]:
        if each["type"] == "Admitted":
            each["status"] = "False"


DIFFERENCES: list[tuple[str, Callable[[Json], None]]] = [
    ("image of container main", _container("image", "engine:1")),
    ("command of container main", _container("command", ["sh"])),
    ("args of container main", _container("args", ["x"])),
    ("env of container main", _container("env", [{"name": "A", "value": "b"}])),
    ("containers", _container("name", "other")),
    ("requests", _requests),
    ("not in", _queue("queue-b")),
    ('in queue ""', _queue("")),
    ("counts 3 members, not 2", _set("count", 3)),
    ("has a PodSet other of no member", _set("name", "other")),
    ("has 2 PodSets, not 1", _second_set),
    ("was not made of", _disowned),
    ("is evicted", _evicted),
    ("is being deleted", _going),
    ("is admitted to nothing", _without_admission),
    ("not admitted yet", _not_admitted),
]


@pytest.mark.parametrize(("says", "change"), DIFFERENCES, ids=[each[0] for each in DIFFERENCES])
async def test_a_workload_that_differs_admits_nobody_afresh(
    says: str, change: Callable[[Json], None]
) -> None:
    lab = Lab(role(replicas=2, size=2))
    await lab.settle()
    sibling = lab.uids(0)
    await waiting(lab)
    while lab.kueue.admit():
        pass
    name = lab.group(1)
    workload = lab.cluster.must(WORKLOADS, NAMESPACE, name)
    change(workload)
    patch = {key: workload[key] for key in ("metadata", "spec", "status")}
    lab.cluster.set_unchecked(WORKLOADS, NAMESPACE, name, patch)

    await lab.look(3)

    assert lab.slot()["ordinal"] == 1 and lab.uids(0) == sibling
    assert says in lab.status()["replacement"]["reason"]


async def test_what_admission_changes_in_a_pod_is_no_difference() -> None:
    lab = Lab(role(replicas=1))
    await lab.settle()
    await waiting(lab)
    name = lab.group(0)
    pinned = {"affinity": {"nodeAffinity": {"pinned": [1]}}, "tolerations": [{"key": "x"}]}
    workload = lab.cluster.must(WORKLOADS, NAMESPACE, name)
    first_set(workload)["template"]["spec"] |= pinned
    lab.cluster.set_unchecked(WORKLOADS, NAMESPACE, name, {"spec": workload["spec"]})
    lab.kueue.may_admit = True

    await lab.settle()

    assert lab.record is None


async def test_a_member_with_affinity_that_its_workload_lacks_is_a_difference() -> None:
    lab = Lab(role(replicas=1))
    await lab.settle()
    await waiting(lab)
    pod = lab.pods(0)[0]
    spec = {"spec": {"affinity": {"podAffinity": {"near": [1]}}}}
    lab.cluster.set_unchecked(PODS, NAMESPACE, pod["metadata"]["name"], spec)
    lab.kueue.may_admit = True
    lab.move()

    await lab.look(2)

    assert "affinity" in lab.status()["replacement"]["reason"]


def _hash(lab: Lab) -> None:
    note: Json = {"metadata": {"annotations": {"modelpool.dev/spec-hash": "other"}}}
    lab.cluster.edit(PODS, NAMESPACE, lab.pods(0)[0]["metadata"]["name"], note, actor="stranger")


def _third(lab: Lab) -> None:
    pod = lab.pods(0)[0]
    meta = {key: pod["metadata"][key] for key in ("labels", "annotations", "ownerReferences")}
    double = {
        "metadata": {"name": "third", **meta},
        "spec": {"containers": pod["spec"]["containers"]},
    }
    lab.cluster.put(PODS, NAMESPACE, double, actor="stranger")


@pytest.mark.parametrize(
    ("change", "says"), [(_hash, "of another configuration"), (_third, "3 of 2 members stand")]
)
async def test_members_that_differ_are_not_admitted_afresh(
    change: Callable[[Lab], None], says: str
) -> None:
    lab = Lab(role(size=2))
    await lab.settle()
    await waiting(lab)
    while lab.kueue.admit():
        pass
    change(lab)

    await lab.look(2)

    assert lab.slot()["phase"] == "WaitingForAdmission"
    assert says in lab.status()["replacement"]["reason"]


async def test_the_proof_stands_alone_against_members_that_leave_or_share_a_seat() -> None:
    lab = Lab(role(size=2))
    await lab.settle()
    deployment = ModelDeployment.model_validate(lab.deployment)
    kind = InstanceType.model_validate(lab.cluster.must(INSTANCE_TYPES, None, "a"))
    wanted = render(deployment, {"a": kind})["server"]
    workloads = [read_workload(each) for each in lab.cluster.all(WORKLOADS, NAMESPACE)]
    first, second = (read_member(pod) for pod in lab.pods(0))

    def why(*members: Member) -> str | None:
        return why_not_admitted(members, workloads, wanted, 0)

    assert why(first, second) is None
    assert why(first, replace(second, is_going=True)) == f"{second.name} is going"
    double = replace(second, index=first.index, hash=first.hash)
    assert why(first, double) == f"{second.name} sits on no seat of its own"


async def test_a_newcomer_on_the_old_reservation_is_not_admitted_afresh() -> None:
    """Kueue would adopt it; the old Workload must be gone before anything is made."""
    lab = Lab(role(replicas=1))
    await lab.settle()
    old = uid(lab.workload() or {})
    lab.edit(image="engine:2")
    await lab.look()
    held = lab.cluster.must(WORKLOADS, NAMESPACE, lab.group())
    assert going(held)
    lab.vanish(lab.pods())

    await lab.look(3)

    assert lab.pods() == [] and lab.slot()["phase"] == "Cleanup"
    await lab.settle()
    assert uid(lab.workload() or {}) != old and lab.record is None


# Initially queued groups


async def obsolete_queue(lab: Lab) -> None:
    """Bring *lab* to where the first replicas are queued, with quota or without."""
    lab.kueue.may_admit = False
    await lab.look()
    lab.move()
    await lab.look()


@pytest.mark.parametrize(
    ("first", "edit"),
    [
        ({"resources": {"accelerator": 2}}, {"resources": {"accelerator": 1}}),
        ({"resources": {"accelerator": 2}}, {"instanceType": "b"}),
        ({"size": 2}, {"size": 1}),
    ],
)
async def test_t51_an_obsolete_group_that_never_ran_is_replaced_at_once(
    first: Json, edit: Json
) -> None:
    lab = Lab(role(**first), cards=1)
    lab.set_quota("b", 2)
    lab.kueue.may_admit = True
    await lab.settle()
    old, workload = lab.uids(), uid(lab.workload() or {})
    assert not lab.is_admitted()

    lab.edit(**edit)
    await lab.look()
    assert lab.slot()["cause"] == "queued"
    await lab.settle()

    assert not set(old) & set(lab.uids()) and uid(lab.workload() or {}) != workload
    assert lab.is_admitted() and lab.record is None


async def test_t51_quota_without_admission_is_still_a_queue() -> None:
    lab = Lab()
    await obsolete_queue(lab)
    assert condition(lab.workload() or {}, "QuotaReserved") == "True"

    lab.edit(image="engine:2")
    await lab.look()

    assert lab.slot()["cause"] == "queued"


async def test_t52_the_queued_one_goes_before_an_admitted_sibling() -> None:
    lab = Lab(role(replicas=2), cards=2)
    await lab.settle()
    lab.set_quota("a", 1)
    lab.vanish(lab.pods(0))
    lab.kueue.run()
    lab.garbage.step()
    lab.move()
    await lab.look(2)
    lab.move()
    assert not lab.is_admitted(0) and lab.is_admitted(1)
    sibling, workload = lab.uids(1), uid(lab.workload(1) or {})

    lab.edit(image="engine:2")
    await lab.look()
    assert lab.slot()["ordinal"] == 0 and lab.slot()["cause"] == "queued"
    for _ in range(4):
        lab.move()
        await lab.look()
    assert lab.uids(1) == sibling and uid(lab.workload(1) or {}) == workload

    lab.set_quota("a", 2)
    await lab.settle()
    assert lab.uids(1) != sibling


async def test_t53_of_two_queued_ones_the_higher_ordinal_has_the_only_slot() -> None:
    lab = Lab(role(replicas=2), cards=0)
    await obsolete_queue(lab)

    lab.edit(image="engine:2")
    await lab.look()

    assert lab.slot()["ordinal"] == 1
    assert [going(pod) for pod in lab.pods()] == [False, True]


async def test_t53_a_group_without_a_workload_yet_is_waited_for() -> None:
    lab = Lab()
    await lab.look()
    kept = lab.uids()
    lab.edit(image="engine:2")

    await lab.look(3)

    assert lab.uids() == kept and lab.record is None


def _status(**more: Any) -> Json:
    return {"status": more}


def _with(kind: str, status: str, reason: str = "r") -> Json:
    return _status(conditions=[{"type": kind, "status": status, "reason": reason}])


HISTORIES: list[tuple[str, str, Json]] = [
    ("evicted once", "workload", _with("Evicted", "False")),
    ("preempted", "workload", _with("Preempted", "False")),
    ("requeued", "workload", _with("Requeued", "True")),
    ("finished", "workload", _with("Finished", "False")),
    ("past execution", "workload", _status(accumulatedPastExexcutionTimeSeconds=0)),
    ("requeue state", "workload", _status(requeueState={"count": 1})),
    ("reclaimable", "workload", _status(reclaimablePods=[{"name": "server", "count": 1}])),
    ("statistics", "workload", _status(schedulingStats={"evictions": [{"reason": "x"}]})),
    ("ready", "workload", _with("PodsReady", "True")),
    ("recovering", "workload", _with("PodsReady", "False", "WaitForRecovery")),
    ("admitted", "workload", _with("Admitted", "True")),
    ("node", "pod", {"spec": {"nodeName": "n9"}}),
    ("statuses", "pod", _status(containerStatuses=[{"name": "main"}])),
    ("init statuses", "pod", _status(initContainerStatuses=[{"name": "init"}])),
    ("gate", "pod", {"spec": {"schedulingGates": None}}),
    ("phase", "pod", _status(phase="Running")),
]


@pytest.mark.parametrize(
    ("which", "patch"), [each[1:] for each in HISTORIES], ids=[each[0] for each in HISTORIES]
)
async def test_t54_any_sign_of_a_past_keeps_an_obsolete_group(which: str, patch: Json) -> None:
    lab = Lab(role(replicas=2), cards=0)
    await obsolete_queue(lab)
    for ordinal in (0, 1):
        pod, name = lab.pods(ordinal)[0], lab.group(ordinal)
        if which == "pod":
            lab.cluster.set_unchecked(PODS, NAMESPACE, pod["metadata"]["name"], patch)
        else:
            lab.cluster.set_unchecked(WORKLOADS, NAMESPACE, name, patch)
    if patch == _with("Admitted", "True"):
        lab.cluster.set_unchecked(WORKLOADS, NAMESPACE, lab.group(0), _with("Admitted", "False"))
    kept, workloads = lab.uids(), [uid(each) for each in lab.cluster.all(WORKLOADS)]
    lab.edit(image="engine:2")

    await lab.look(6)

    if patch == _with("Admitted", "True"):
        assert lab.slot()["ordinal"] == 0  # the other one never ran
        return
    assert lab.uids() == kept and lab.record is None
    assert [uid(each) for each in lab.cluster.all(WORKLOADS)] == workloads


async def test_r53_pods_ready_that_waits_for_the_start_is_no_past() -> None:
    lab = Lab(cards=0)
    await obsolete_queue(lab)
    patch = _with("PodsReady", "False", "WaitForStart")
    lab.cluster.set_unchecked(WORKLOADS, NAMESPACE, lab.group(), patch)
    lab.edit(image="engine:2")

    await lab.look()

    assert lab.slot()["cause"] == "queued"
