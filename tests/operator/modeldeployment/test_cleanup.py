"""What may be deleted, and when a place is vacant."""

from __future__ import annotations

from typing import Any

import pytest

from mdep_lab import KEY, NAMESPACE, Lab, role
from memcluster import Write, copied
from memkueue import MANAGED, going
from modelpool_kube import errors
from modelpool_kube.kinds import MODEL_DEPLOYMENTS, PODS, WORKLOADS, Json, uid


def creates(lab: Lab) -> list[Write]:
    """Return the creates of Pods so far."""
    return [each for each in lab.cluster.writes if each.kind == PODS and each.verb == "create"]


def refuse(reason: str, code: int) -> errors.KubeError:
    """Return an error of the API server."""
    return errors.Unavailable(reason, code=code)


async def test_t27_nothing_is_made_while_an_old_member_is_held() -> None:
    lab = Lab(role(replicas=1, size=2))
    await lab.settle()
    held = lab.pods()[0]
    name = held["metadata"]["name"]
    hold = {"metadata": {"finalizers": [MANAGED, "example.com/hold"]}}
    lab.cluster.edit(PODS, NAMESPACE, name, hold, actor="stranger")
    lab.edit(image="engine:2")
    before = len(creates(lab))

    for _ in range(5):
        await lab.look()
        lab.move()
        assert len(creates(lab)) == before
    assert f"waits until {name} has ended" in lab.status()["replacement"]["reason"]

    lab.cluster.edit(PODS, NAMESPACE, name, {"metadata": {"finalizers": None}}, actor="stranger")
    await lab.settle()
    assert len(creates(lab)) == before + 2


async def test_t28_nothing_is_made_while_the_old_workload_is_going() -> None:
    lab = Lab()
    await lab.settle()
    lab.edit(image="engine:2")
    await lab.look()
    lab.vanish(lab.pods())
    before = len(creates(lab))

    await lab.look(3)

    assert going(lab.workload() or {}) and len(creates(lab)) == before
    assert "has released Workload" in lab.status()["replacement"]["reason"]
    await lab.settle()
    assert len(creates(lab)) == before + 1


@pytest.mark.parametrize("owned", [True, False])
async def test_t30_a_stranger_under_a_captured_name_lives_and_holds_the_place(owned: bool) -> None:
    lab = Lab(role(replicas=1, size=2))
    await lab.settle()
    lab.edit(image="engine:2")
    await lab.look()
    lab.move()
    body = copied(creates(lab)[0].after or {})
    meta = body["metadata"]
    lab.cluster.compact()
    stranger = {
        "metadata": {
            key: meta[key]
            for key in ("name", "labels", "annotations", "ownerReferences")
            if owned or key != "ownerReferences"
        },
        "spec": {key: body["spec"][key] for key in ("containers",)},
    }
    kept = uid(lab.cluster.put(PODS, NAMESPACE, stranger, actor="stranger"))
    before = len(creates(lab))

    for _ in range(4):
        await lab.look()
        lab.move()

    assert [uid(pod) for pod in lab.pods()] == [kept] and not going(lab.pods()[0])
    assert len(creates(lab)) == before
    status, reason, message = lab.condition("ReplicasUpToDate")
    assert (status, reason) == ("False", "ReplacementBlocked")
    assert meta["name"] in message and "delete it" in message
    assert [note.reason for note in lab.told if note.is_warning] == ["ReplacementBlocked"]

    lab.vanish(lab.pods())
    await lab.settle()
    assert lab.record is None and len(lab.pods()) == 2


async def test_i8_nobody_answers_from_a_place_that_is_being_cleaned_up() -> None:
    lab = Lab(role())
    await lab.settle()
    old = lab.pods()[0]
    lab.edit(image="engine:2")
    await lab.look()
    meta = {key: old["metadata"][key] for key in ("labels", "annotations", "ownerReferences")}
    newcomer = {"metadata": {"name": "newcomer", **meta}, "spec": old["spec"]}
    kept = uid(lab.cluster.put(PODS, NAMESPACE, newcomer, actor="stranger"))

    await lab.look(2)

    assert lab.slot()["phase"] == "Cleanup"
    assert kept in lab.uids() and lab.matched("chat") == set()


async def test_t32_three_old_members_and_a_workload_leave_before_one_is_made() -> None:
    lab = Lab(role(size=3))
    await lab.settle()
    old = set(lab.uids())
    workload = uid(lab.workload() or {})
    lab.edit(size=1)
    await lab.settle()

    new = creates(lab)[-1]
    gone = {
        uid(write.before or {}): write.version
        for write in lab.cluster.writes
        if write.verb == "remove" and write.before is not None
    }
    assert all(gone[each] < new.version for each in {*old, workload})
    assert len(lab.pods()) == 1


async def test_t33_a_lost_answer_to_a_delete_is_made_up_for_from_the_record() -> None:
    lab = Lab()
    await lab.settle()
    workload = uid(lab.workload() or {})
    lab.edit(image="engine:2")
    lab.port.lose(applied=True, verb="delete", kind=PODS)

    await lab.look()
    assert isinstance(lab.errors[-1], errors.Unanswered)
    assert lab.slot()["workloadUID"] == workload
    lab.vanish(lab.pods())
    assert not going(lab.workload() or {})
    await lab.look()

    assert going(lab.workload() or {})
    await lab.settle()
    assert lab.record is None


@pytest.mark.parametrize("kind", [PODS, WORKLOADS])
async def test_t34_a_read_that_fails_is_neither_vacant_nor_occupied(kind: Any) -> None:
    lab = Lab()
    await lab.settle()
    lab.edit(image="engine:2")
    await lab.look()
    lab.move()
    record, before = lab.record, len(creates(lab))
    lab.port.fail(refuse("boom", 500), verb="list", kind=kind)

    await lab.look()

    assert lab.errors[-1].code == 500
    assert lab.record == record and len(creates(lab)) == before
    await lab.look()
    assert len(creates(lab)) == before + 1


async def test_t35_a_record_that_is_refused_deletes_nothing() -> None:
    lab = Lab()
    await lab.settle()
    lab.edit(image="engine:2")
    lab.port.fail(errors.Conflict("modified", code=409), verb="patch", kind=MODEL_DEPLOYMENTS)
    trail = len(lab.cluster.writes)

    await lab.look()

    assert isinstance(lab.errors[-1], errors.Conflict)
    assert len(lab.cluster.writes) == trail and lab.record is None


async def test_r35_a_foreign_workload_on_the_group_blocks_and_is_named() -> None:
    lab = Lab()
    await lab.settle()
    lab.edit(image="engine:2")
    await lab.look()
    lab.move()
    body = {"metadata": {"name": lab.group()}, "spec": {"queueName": "q", "podSets": []}}
    foreign = uid(lab.cluster.put(WORKLOADS, NAMESPACE, body, actor="stranger"))
    before = len(creates(lab))

    for _ in range(4):
        await lab.look()
        lab.move()

    assert uid(lab.workload() or {}) == foreign and len(creates(lab)) == before
    assert lab.group() in lab.condition("Stalled")[2]
    lab.cluster.remove(WORKLOADS, NAMESPACE, lab.group(), actor="stranger")
    await lab.settle()
    assert lab.record is None


async def test_r35_a_workload_with_a_pod_set_named_like_the_group_blocks_too() -> None:
    lab = Lab()
    body = {"metadata": {"name": "x"}, "spec": {"podSets": [{"name": lab.group(), "count": 1}]}}
    lab.cluster.put(WORKLOADS, NAMESPACE, body, actor="stranger")

    await lab.look(3)

    assert lab.pods() == [] and "Workload x" in lab.condition("Stalled")[2]


async def test_r29_a_workload_of_the_right_name_and_the_wrong_owners_is_not_deleted() -> None:
    lab = Lab()
    await lab.settle()
    lab.edit(image="engine:2")
    lab.port.fail(refuse("later", 429), verb="delete", kind=WORKLOADS)
    await lab.look()
    lab.cluster.vanish(WORKLOADS, NAMESPACE, lab.group(), actor="stranger")
    body = {
        "metadata": {
            "name": lab.group(),
            "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": "other"}],
        },
        "spec": {"queueName": "queue-a", "podSets": [{"name": "server", "count": 1}]},
    }
    foreign = uid(lab.cluster.put(WORKLOADS, NAMESPACE, body, actor="stranger"))
    lab.vanish(lab.pods())

    await lab.look(4)

    assert uid(lab.workload() or {}) == foreign and not going(lab.workload() or {})


async def test_r29_a_workload_made_after_the_record_is_deleted_by_its_owners() -> None:
    lab = Lab(role(size=2))
    await lab.look()
    lab.remove(lab.pods()[0])
    lab.kueue.run()
    await lab.look()
    assert lab.slot()["cause"] == "broken" and not lab.slot().get("workloadUID")
    member = lab.slot()["memberUIDs"][0]
    body = {
        "metadata": {
            "name": lab.group(),
            "finalizers": ["kueue.x-k8s.io/resource-in-use"],
            "annotations": {"kueue.x-k8s.io/is-group-workload": "true"},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": member}],
        },
        "spec": {"queueName": "queue-a", "podSets": [{"name": "server", "count": 2}]},
    }
    lab.cluster.put(WORKLOADS, NAMESPACE, body, actor="kueue")
    lab.vanish(lab.pods())

    await lab.look()

    assert going(lab.workload() or {})
    await lab.settle()
    assert len(lab.pods()) == 2 and lab.record is None


@pytest.mark.parametrize("made_anew", [True, False])
async def test_r27_a_captured_pod_that_is_gone_before_its_delete_is_done(made_anew: bool) -> None:
    """Between the look and the delete the captured Pod has made room, perhaps for another one."""
    lab = Lab(role(size=2))
    await lab.settle()
    lab.edit(image="engine:2")
    first = lab.pods()[0]
    name = first["metadata"]["name"]
    total = {"kueue.x-k8s.io/pod-group-total-count": "2"}
    body = {
        "metadata": {"name": name, "labels": first["metadata"]["labels"], "annotations": total},
        "spec": {"containers": first["spec"]["containers"]},
    }
    others: list[str] = []

    def swap(write: Write) -> None:
        if write.kind == MODEL_DEPLOYMENTS and "Cleanup" in (lab.record or "") and not others:
            others.append("")
            lab.cluster.vanish(PODS, NAMESPACE, name, actor="stranger")
            if made_anew:
                others[0] = uid(lab.cluster.put(PODS, NAMESPACE, body, actor="stranger"))

    lab.cluster.after_write.append(swap)

    await lab.look()

    assert lab.errors == []
    assert going(lab.pods()[-1])
    if made_anew:
        there = lab.cluster.must(PODS, NAMESPACE, name)
        assert uid(there) == others[0] and not going(there)


async def test_r29_the_captured_workload_is_deleted_though_it_lost_its_owners() -> None:
    lab = Lab()
    await lab.settle()
    lab.edit(image="engine:2")
    busy = errors.Unavailable("later", code=429)
    lab.port.fail(busy, verb="delete", kind=WORKLOADS)
    await lab.look()
    bare: Json = {"metadata": {"ownerReferences": None}}
    lab.cluster.edit(WORKLOADS, NAMESPACE, lab.group(), bare, actor="stranger")

    await lab.look()

    assert going(lab.workload() or {})
    await lab.settle()
    assert lab.record is None


async def test_r46_the_recorded_workload_is_deleted_though_it_lost_its_owners() -> None:
    lab = Lab()
    await lab.settle()
    lab.kueue.may_admit = False
    lab.edit(image="engine:2")
    await lab.until("WaitingForAdmission")
    lab.move()
    await lab.look()
    lab.vanish(lab.pods())
    bare: Json = {"metadata": {"ownerReferences": None}}
    lab.cluster.edit(WORKLOADS, NAMESPACE, lab.group(), bare, actor="stranger")

    await lab.look()

    assert lab.slot()["phase"] == "Cleanup" and going(lab.workload() or {})


async def test_r26_a_member_that_is_going_already_is_captured_with_the_others() -> None:
    lab = Lab(role(size=2))
    await lab.settle()
    old = lab.uids()
    lab.remove(lab.pods()[1])
    assert going(lab.pods()[1])

    await lab.look()

    assert lab.slot()["cause"] == "broken" and lab.slot()["memberUIDs"] == sorted(old)


async def test_r28_what_is_going_is_not_deleted_again() -> None:
    lab = Lab()
    await lab.settle()
    lab.edit(image="engine:2")
    await lab.look()
    before = [each for each in lab.port.requests if each.verb == "delete"]

    await lab.look(3)

    assert [each for each in lab.port.requests if each.verb == "delete"] == before


async def test_r7_a_record_that_cannot_be_read_selects_nothing_and_says_so() -> None:
    lab = Lab(role(replicas=2))
    await lab.settle()
    kept = lab.uids()
    bad: Json = {"metadata": {"annotations": {"modelpool.dev/replacements": "{oops"}}}
    lab.cluster.edit(MODEL_DEPLOYMENTS, NAMESPACE, "chat", bad, actor="stranger")
    lab.edit(image="engine:2")

    await lab.look(3)

    assert lab.uids() == kept and lab.record == "{oops"
    assert lab.condition("Stalled")[:2] == ("True", "RecordUnreadable")
    lab.edit(replicas=3)
    await lab.look()
    assert len(lab.pods()) == 3  # the create gate asks the API server, not the record

    bad["metadata"]["annotations"]["modelpool.dev/replacements"] = None
    lab.cluster.edit(MODEL_DEPLOYMENTS, NAMESPACE, "chat", bad, actor="stranger")
    await lab.settle()
    assert not set(kept) & set(lab.uids())


async def test_the_key_of_a_deployment_that_is_gone_needs_nothing() -> None:
    lab = Lab()

    assert await lab.operator.reconcile(("team-a", "nobody")) is None
    assert KEY == (NAMESPACE, "chat")
