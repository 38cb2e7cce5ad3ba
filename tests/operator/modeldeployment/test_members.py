"""Members that are lost, left out, doubled, or not what they say."""

from __future__ import annotations

import pytest

from mdep_lab import KEY, NAMESPACE, Lab, role
from memkueue import TOTAL, going
from modelpool_api.names import MEMBER_INDEX_LABEL, ORDINAL_LABEL
from modelpool_kube import errors
from modelpool_kube.kinds import PODS, WORKLOADS, Json, uid


def image(pod: Json) -> str:
    """Return the image of *pod*."""
    return str(pod["spec"]["containers"][0]["image"])


def standing(lab: Lab, ordinal: int) -> list[Json]:
    """Return the members of a replica that are not going."""
    return [pod for pod in lab.pods(ordinal) if not going(pod)]


async def queued(lab: Lab) -> None:
    """Bring *lab* to where a replacement is complete, recorded and queued."""
    lab.kueue.may_admit = False
    lab.edit(image="engine:2")
    await lab.until("WaitingForAdmission")
    await lab.look()
    lab.move()
    await lab.look()


# Outside the slot


async def test_t36_a_loss_elsewhere_waits_until_the_slot_is_free() -> None:
    lab = Lab(role(replicas=3, size=2))
    await lab.settle()
    await queued(lab)
    survivor = lab.uids(1)[0]
    lab.remove(lab.pods(1)[1])

    for _ in range(3):
        await lab.look()
        lab.move()
        assert [uid(pod) for pod in standing(lab, 1)] == [survivor]
        assert lab.slot()["ordinal"] == 2

    lab.kueue.may_admit = True
    lab.move()
    await lab.look()
    assert lab.slot()["ordinal"] == 1 and lab.slot()["cause"] == "broken"
    await lab.settle()
    assert {image(pod) for pod in lab.pods()} == {"engine:2"} and len(lab.pods()) == 6


@pytest.mark.parametrize("how", ["deleted", "vanished"])
async def test_t40_a_replica_that_lost_a_member_is_rebuilt_whole_at_once(how: str) -> None:
    lab = Lab(role(replicas=2, size=2))
    await lab.settle()
    lab.kueue.may_reserve = False
    sibling, old = lab.uids(0), lab.uids(1)
    if how == "deleted":
        lab.remove(lab.pods(1)[1])
    else:
        lab.vanish([lab.pods(1)[1]])

    await lab.look()
    assert lab.slot()["ordinal"] == 1 and lab.slot()["cause"] == "broken"
    for _ in range(4):
        lab.move()
        await lab.look()

    assert lab.uids(0) == sibling
    assert len(standing(lab, 1)) == 2 and not set(old) & set(lab.uids(1))


async def test_r22_a_broken_replica_goes_before_a_healthy_one_of_a_higher_ordinal() -> None:
    lab = Lab(role(replicas=3, size=2))
    await lab.settle()
    lab.vanish([lab.pods(0)[1]])
    lab.edit(image="engine:2")

    await lab.look()

    assert lab.slot()["ordinal"] == 0


async def test_t41_members_that_contradict_one_another_are_left_alone() -> None:
    lab = Lab(role(size=2))
    await lab.settle()
    kept, answered = lab.uids(), lab.matched("chat")
    note: Json = {"metadata": {"annotations": {TOTAL: "3"}}}
    name = lab.pods()[1]["metadata"]["name"]
    lab.cluster.edit(PODS, NAMESPACE, name, note, actor="stranger")

    await lab.look(3)

    assert lab.uids() == kept and lab.record is None
    assert lab.matched("chat") == answered and len(answered) == 1
    off: Json = {"metadata": {"labels": {"modelpool.dev/answers": None}}}
    lab.cluster.edit(PODS, NAMESPACE, lab.pods()[0]["metadata"]["name"], off, actor="stranger")
    await lab.look(2)
    assert lab.matched("chat") == set()


async def test_t41_an_unreadable_replica_is_still_replaced_in_its_turn() -> None:
    lab = Lab(role(size=2))
    await lab.settle()
    note: Json = {"metadata": {"annotations": {TOTAL: "many"}}}
    lab.cluster.edit(PODS, NAMESPACE, lab.pods()[1]["metadata"]["name"], note, actor="stranger")
    old = lab.uids()

    lab.edit(image="engine:2")
    await lab.settle()

    assert not set(old) & set(lab.uids()) and len(lab.pods()) == 2


async def test_t42_a_failed_pod_takes_its_workload_and_its_fellows_along() -> None:
    lab = Lab(role(size=2))
    await lab.settle()
    old, workload = lab.uids(), uid(lab.workload() or {})
    lab.node.fail(NAMESPACE, lab.pods()[1]["metadata"]["name"])

    await lab.settle()

    assert len(lab.pods()) == 2 and not set(old) & set(lab.uids())
    assert uid(lab.workload() or {}) != workload and lab.record is None


@pytest.mark.parametrize("size", [1, 2])
async def test_t43_members_deleted_by_hand_release_their_workload_and_come_back(size: int) -> None:
    lab = Lab(role(replicas=2, size=size))
    await lab.settle()
    sibling, old, workload = lab.uids(0), lab.uids(1), uid(lab.workload(1) or {})
    for pod in lab.pods(1):
        lab.remove(pod)
    lab.move()
    assert all(going(pod) for pod in lab.pods(1))

    await lab.look()
    assert going(lab.workload(1) or {})
    await lab.settle()

    assert lab.uids(0) == sibling and not set(old) & set(lab.uids(1))
    assert uid(lab.workload(1) or {}) != workload


async def test_r11_a_workload_with_one_standing_member_is_left_alone() -> None:
    lab = Lab(role(replicas=2, size=2))
    await lab.settle()
    await queued(lab)
    lab.remove(lab.pods(0)[1])
    lab.move()

    await lab.look(3)

    assert not going(lab.workload(0) or {})


async def test_r19_of_two_members_on_one_seat_one_stays() -> None:
    lab = Lab()
    await lab.settle()
    kept = lab.pods()[0]
    double = {
        "metadata": {
            "name": "aaa",
            **{k: kept["metadata"][k] for k in ("labels", "annotations", "ownerReferences")},
        },
        "spec": {"containers": kept["spec"]["containers"]},
    }
    labels = double["metadata"]["labels"]
    double["metadata"]["labels"] = {k: v for k, v in labels.items() if "answers" not in k}
    lab.cluster.admit.clear()  # Kueue is away
    lab.cluster.put(PODS, NAMESPACE, double, actor="stranger")

    await lab.look()

    assert not going(kept)
    assert [pod["metadata"]["name"] for pod in standing(lab, 0)] == [kept["metadata"]["name"]]


async def test_a_pod_of_ours_that_lost_its_ordinal_holds_its_place() -> None:
    lab = Lab()
    await lab.settle()
    pod = lab.pods()[0]
    off: Json = {"metadata": {"labels": {ORDINAL_LABEL: None}}}
    lab.cluster.edit(PODS, NAMESPACE, pod["metadata"]["name"], off, actor="stranger")

    await lab.look(3)

    assert len(lab.cluster.all(PODS)) == 1
    assert pod["metadata"]["name"] in lab.condition("Stalled")[2]


# Inside the slot


@pytest.mark.parametrize("how", ["going", "vanished", "all vanished", "all vanished, admitted"])
async def test_t38_a_replacement_that_lost_members_is_rebuilt_in_its_slot(how: str) -> None:
    lab = Lab(role(replicas=2, size=2))
    await lab.settle()
    sibling = lab.uids(0)
    await queued(lab)
    members, workload = lab.uids(1), uid(lab.workload(1) or {})
    if how == "going":
        lab.remove(lab.pods(1)[0])
    elif how == "vanished":
        lab.vanish([lab.pods(1)[0]])
    else:
        lab.vanish(lab.pods(1))
    if how.endswith("admitted"):
        lab.kueue.admit(lab.group(1))

    await lab.look()
    slot = lab.slot()
    assert (slot["ordinal"], slot["phase"]) == (1, "Cleanup")
    assert set(members) == set(slot["memberUIDs"]) and slot["workloadUID"] == workload
    assert lab.uids(0) == sibling

    lab.kueue.may_admit = True
    await lab.until("")
    assert not set(members) & set(lab.uids(1)) and uid(lab.workload(1) or {}) != workload
    assert "ReplacementMemberLost" in {note.reason for note in lab.told}


async def test_l7_a_replacement_evicted_before_it_was_noticed_is_rebuilt() -> None:
    lab = Lab()
    await lab.settle()
    await queued(lab)
    lab.kueue.admit()
    lab.kueue.run()
    lab.kueue.evict(NAMESPACE, lab.group())
    lab.move()

    await lab.look()

    assert lab.slot()["phase"] == "Cleanup"
    lab.kueue.may_admit = True
    await lab.settle()
    assert lab.record is None


# Creates that were left out or lost


async def failing(lab: Lab, error: errors.KubeError | None = None) -> str:
    """Let the create of the second member of a replacement fail; return the first one's UID."""
    lab.edit(image="engine:2")
    await lab.look()
    lab.move()
    why = error or errors.Unavailable("too busy", code=429)
    lab.port.fail(why, verb="create", kind=PODS, name="chat-server-r0-m1")
    await lab.look()
    (first,) = lab.pods()
    return uid(first)


async def test_t44_a_member_that_could_not_be_made_is_made_later() -> None:
    lab = Lab(role(size=2))
    await lab.settle()
    first = await failing(lab)
    assert lab.errors[-1].code == 429

    await lab.look()

    assert lab.uids()[0] == first and len(lab.uids()) == 2
    await lab.settle()
    assert lab.uids()[0] == first


async def test_r39_what_was_made_beside_a_failure_is_recorded_at_the_next_look() -> None:
    lab = Lab(role(size=3))
    await lab.settle()
    lab.edit(image="engine:2")
    await lab.look()
    lab.move()
    busy = errors.Unavailable("too busy", code=429)
    lab.port.fail(busy, verb="create", kind=PODS, name="chat-server-r0-m0")

    await lab.look()

    assert [pod["metadata"]["labels"][MEMBER_INDEX_LABEL] for pod in lab.pods()] == ["1", "2"]
    await lab.look()
    assert len(lab.slot()["currentMemberUIDs"]) == 3


async def test_r39_new_members_are_recorded_in_the_turn_that_made_them() -> None:
    lab = Lab(role(size=2))
    await lab.settle()
    lab.edit(image="engine:2")
    await lab.look()
    lab.move()

    await lab.look()

    assert lab.slot()["currentMemberUIDs"] == sorted(lab.uids()) and len(lab.uids()) == 2


async def test_t45_an_edit_after_a_half_made_replacement_fills_nothing_up() -> None:
    lab = Lab(role(size=2))
    await lab.settle()
    first = await failing(lab)

    lab.edit(image="engine:3")
    await lab.settle()

    assert first not in lab.uids()
    assert [image(pod) for pod in lab.pods()] == ["engine:3", "engine:3"]
    made = [
        image(each.after or {})
        for each in lab.cluster.writes
        if each.kind == PODS and each.verb == "create"
    ]
    assert made.count("engine:2") == 1


async def test_t46_a_half_made_replacement_with_a_workload_is_rebuilt_whole() -> None:
    lab = Lab(role(size=2))
    await lab.settle()
    first = await failing(lab)
    body = {
        "metadata": {
            "name": lab.group(),
            "annotations": {"kueue.x-k8s.io/is-group-workload": "true"},
            "finalizers": ["kueue.x-k8s.io/resource-in-use"],
            "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": first}],
        },
        "spec": {"queueName": "queue-a", "podSets": [{"name": "server", "count": 2}]},
    }
    lab.cluster.put(WORKLOADS, NAMESPACE, body, actor="kueue")

    await lab.look()

    assert lab.slot()["phase"] == "Cleanup" and lab.slot()["memberUIDs"] == [first]
    await lab.settle()
    assert len(lab.pods()) == 2 and first not in lab.uids()


@pytest.mark.parametrize(
    "odd",
    [
        {"metadata": {"annotations": {TOTAL: "3"}}},
        {"metadata": {"annotations": {"modelpool.dev/spec-hash": "other"}}},
        {"metadata": {"labels": {MEMBER_INDEX_LABEL: "7"}}},
        {"metadata": {"labels": {MEMBER_INDEX_LABEL: None}}},
    ],
)
async def test_r41_nothing_is_filled_up_beside_a_member_that_differs(odd: Json) -> None:
    lab = Lab(role(size=2))
    await lab.settle()
    first = await failing(lab)
    name = lab.pods()[0]["metadata"]["name"]
    lab.cluster.edit(PODS, NAMESPACE, name, odd, actor="stranger")

    await lab.look(3)

    assert lab.uids() == [first]
    assert name in lab.condition("Stalled")[2]


async def test_r41_nothing_is_filled_up_beside_a_foreign_workload() -> None:
    lab = Lab(role(size=2))
    await lab.settle()
    first = await failing(lab)
    body = {"metadata": {"name": lab.group()}, "spec": {"podSets": []}}
    lab.cluster.put(WORKLOADS, NAMESPACE, body, actor="stranger")

    await lab.look(3)

    assert lab.uids() == [first] and lab.group() in lab.condition("Stalled")[2]


@pytest.mark.parametrize("size", [1, 2])
async def test_t48_creates_whose_answers_were_lost_are_not_repeated(size: int) -> None:
    lab = Lab(role(replicas=2, size=size))
    await lab.settle()
    lab.edit(image="engine:2")
    await lab.look()
    lab.move()
    for _ in range(size):
        lab.port.lose(applied=True, verb="create", kind=PODS)

    await lab.look()
    assert isinstance(lab.errors[-1], errors.Unanswered)
    await lab.look(3)

    assert len(lab.pods(1)) == size
    await lab.settle()
    assert len(lab.pods()) == 2 * size


async def test_t49_a_foreign_pod_under_the_name_of_a_member_is_spared_and_named() -> None:
    lab = Lab(role(size=2))
    foreign = lab.cluster.put(
        PODS,
        NAMESPACE,
        {"metadata": {"name": "chat-server-r0-m0"}, "spec": {"containers": [{"name": "x"}]}},
        actor="stranger",
    )

    for _ in range(8):
        await lab.look()
        lab.move()

    assert uid(lab.cluster.must(PODS, NAMESPACE, "chat-server-r0-m0")) == uid(foreign)
    assert lab.workload() is None
    assert "Pod chat-server-r0-m0 is not of this deployment" in lab.condition("Stalled")[2]
    assert lab.status()["ready"] == 0

    lab.cluster.vanish(PODS, NAMESPACE, "chat-server-r0-m0", actor="stranger")
    await lab.settle()
    assert len(lab.pods()) == 2 and lab.is_admitted()
    assert lab.condition("Stalled")[0] == "False"


async def test_r43_a_first_creation_that_ended_short_is_rebuilt_whole() -> None:
    lab = Lab(role(size=2))
    busy = errors.Unavailable("too busy", code=429)
    lab.port.fail(busy, verb="create", kind=PODS, name="chat-server-r0-m1")
    await lab.look()
    (first,) = lab.uids()

    await lab.look()
    assert lab.slot()["cause"] == "broken" and lab.slot()["memberUIDs"] == [first]
    await lab.settle()

    assert first not in lab.uids() and len(lab.uids()) == 2


async def test_r48_a_replacement_is_not_made_into_a_place_that_is_not_vacant() -> None:
    lab = Lab()
    await lab.settle()
    lab.edit(image="engine:2")
    await lab.look()
    lab.move()
    busy = errors.Unavailable("too busy", code=429)
    lab.port.fail(busy, verb="create", kind=PODS)
    await lab.look()
    assert lab.slot()["phase"] == "WaitingForAdmission" and lab.pods() == []
    body = {"metadata": {"name": lab.group()}, "spec": {"podSets": []}}
    lab.cluster.put(WORKLOADS, NAMESPACE, body, actor="stranger")

    await lab.look(3)

    assert lab.pods() == [] and KEY == ("team-a", "chat")


async def test_l6_a_replacement_that_vanished_unrecorded_frees_its_place_by_itself() -> None:
    lab = Lab()
    await lab.settle()
    lab.edit(image="engine:2")
    await lab.look()
    lab.move()
    lab.port.lose(applied=True, verb="create", kind=PODS)
    await lab.look()
    lab.kueue.run()
    workload = uid(lab.workload() or {})
    lab.vanish(lab.pods())

    await lab.look(2)
    assert uid(lab.workload() or {}) == workload and not going(lab.workload() or {})

    await lab.settle()
    assert lab.record is None and len(lab.pods()) == 1
    assert uid(lab.workload() or {}) != workload


@pytest.mark.parametrize("when", ["before Kueue looks", "queued", "admitted"])
async def test_d1_a_member_that_an_operator_of_before_made_too_is_got_rid_of(when: str) -> None:
    """Its create was on its way while the next operator made the same member."""
    lab = Lab(role(replicas=2))
    await lab.settle()
    sibling = lab.uids(0)
    lab.kueue.may_admit = False
    lab.edit(image="engine:2")
    await lab.until("WaitingForAdmission")
    if when != "before Kueue looks":
        lab.move()
        await lab.look()
    if when == "admitted":
        lab.kueue.admit()
    made = lab.pods(1)[0]
    meta = {key: made["metadata"][key] for key in ("labels", "annotations", "ownerReferences")}
    spec = {"containers": made["spec"]["containers"]}
    lab.cluster.put(
        PODS,
        NAMESPACE,
        {"metadata": {"generateName": "chat-server-", **meta}, "spec": spec},
        actor="stranger",
    )

    for _ in range(6):
        await lab.look()
        assert when == "admitted" or lab.uids(0) == sibling
        lab.move()
    lab.kueue.may_admit = True
    await lab.settle()

    assert lab.record is None and len(lab.pods()) == 2
    assert {image(pod) for pod in lab.pods()} == {"engine:2"}
