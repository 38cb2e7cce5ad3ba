"""A configuration that changes again while its replacement is under way."""

from __future__ import annotations

from mdep_lab import Lab, role
from memcluster import Killed, Mode
from memkueue import going
from modelpool_kube.kinds import MODEL_DEPLOYMENTS, PODS, WORKLOADS, Json, uid


def image(pod: Json) -> str:
    """Return the image of *pod*."""
    return str(pod["spec"]["containers"][0]["image"])


async def queued(lab: Lab, which: str = "engine:2") -> None:
    """Bring *lab* to where a replacement is complete and queued."""
    lab.kueue.may_admit = False
    lab.edit(image=which)
    await lab.until("WaitingForAdmission")
    await lab.look()
    lab.move()
    await lab.look()
    assert lab.slot()["currentWorkloadUID"]


async def test_t21_a_queued_replacement_is_rebuilt_in_the_same_place() -> None:
    lab = Lab(role(replicas=2, size=2))
    await lab.settle()
    sibling = lab.uids(0)
    await queued(lab)
    second, workload = lab.uids(1), uid(lab.workload(1) or {})

    lab.edit(image="engine:3")
    await lab.look()
    slot = lab.slot()
    assert (slot["ordinal"], slot["phase"]) == (1, "Cleanup")
    assert slot["memberUIDs"] == sorted(second) and slot["workloadUID"] == workload

    for _ in range(6):
        lab.move()
        await lab.look()
        assert lab.uids(0) == sibling
    assert {image(pod) for pod in lab.pods(1)} == {"engine:3"}
    assert not set(second) & set(lab.uids(1))
    assert uid(lab.workload(1) or {}) != workload

    lab.kueue.may_admit = True
    await lab.settle()
    assert {image(pod) for pod in lab.pods()} == {"engine:3"}


async def test_t22_an_edit_during_cleanup_is_built_from_the_newest_alone() -> None:
    lab = Lab(role(replicas=1))
    await lab.settle()
    lab.edit(image="engine:2")
    await lab.look()
    assert lab.slot()["phase"] == "Cleanup"

    lab.edit(image="engine:3")
    await lab.settle()

    made = [
        image(write.after)
        for write in lab.cluster.writes
        if write.kind == PODS and write.verb == "create" and write.after is not None
    ]
    assert made == ["engine:1", "engine:3"]


async def test_t23_an_edit_after_the_record_and_before_the_first_member() -> None:
    lab = Lab(role(replicas=1, size=2))
    await lab.settle()
    lab.edit(image="engine:2")
    await lab.look()
    lab.move()
    writes = [each for each in lab.port.requests if each.verb == "create" and each.kind == PODS]
    lab.port.kill_at(len(lab.port.requests) + 6, Mode.AFTER)
    try:
        await lab.operator.reconcile(("team-a", "chat"))
        raise AssertionError("it lived")
    except Killed:
        pass
    assert lab.slot()["phase"] == "WaitingForAdmission" and lab.pods() == []
    first = lab.slot()["memberHashes"]
    lab.restart()

    lab.edit(image="engine:3")
    await lab.look()

    assert lab.slot()["memberHashes"] != first
    assert {image(pod) for pod in lab.pods()} == {"engine:3"}
    assert len(writes) == 2
    await lab.settle()


async def test_t25_back_to_the_first_configuration_spares_the_sibling() -> None:
    lab = Lab(role(replicas=2))
    await lab.settle()
    sibling = lab.uids(0)
    await queued(lab)

    lab.edit(image="engine:1")
    lab.kueue.may_admit = True
    await lab.settle()

    assert lab.uids(0) == sibling
    assert {image(pod) for pod in lab.pods()} == {"engine:1"}
    started = [note for note in lab.told if note.reason == "ReplacementStarted"]
    assert len(started) == 1


async def test_t26_a_larger_count_supersedes_nothing() -> None:
    lab = Lab(role(replicas=2))
    await lab.settle()
    await queued(lab)
    replacement = lab.uids(1)

    lab.edit(replicas=3)
    await lab.look(2)

    assert lab.uids(1) == replacement and lab.slot()["phase"] == "WaitingForAdmission"
    assert image(lab.pods(2)[0]) == "engine:2"


async def test_many_edits_in_a_row_need_one_slot_and_no_admission() -> None:
    lab = Lab(role(replicas=2))
    await lab.settle()
    sibling = lab.uids(0)
    lab.kueue.may_admit = False
    for number in range(2, 8):
        lab.edit(image=f"engine:{number}")
        await lab.look(number % 3 + 1)
        if number % 2:
            lab.move()
        assert lab.uids(0) == sibling and not going(lab.pods(0)[0])

    lab.kueue.may_admit = True
    await lab.settle()
    assert {image(pod) for pod in lab.pods()} == {"engine:7"}
    assert len(lab.cluster.all(WORKLOADS)) == 2
    assert lab.cluster.names(MODEL_DEPLOYMENTS) == ["chat"]
