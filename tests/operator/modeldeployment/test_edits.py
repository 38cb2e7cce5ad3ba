"""Edits: whole replicas, one at a time, each through a fresh admission."""

from __future__ import annotations

from typing import Any

import pytest

from mdep_lab import CARD, CORES, NAMESPACE, SLICE, Lab, role
from memkueue import QUEUE, going
from modelpool_kube.kinds import MODEL_DEPLOYMENTS, PODS, SERVICES, WORKLOADS, Json, uid


def container(pod: Json) -> Json:
    """Return the main container of *pod*."""
    found: Json = pod["spec"]["containers"][0]
    return found


async def test_t01_size_1_to_2_takes_exactly_one_replica_first() -> None:
    lab = Lab(role(replicas=2))
    await lab.settle()
    old = {ordinal: lab.uids(ordinal) for ordinal in (0, 1)}
    workloads = {uid(each) for each in lab.cluster.all(WORKLOADS)}
    lab.edit(size=2)

    await lab.look()

    assert lab.slot()["ordinal"] == 1
    assert lab.slot()["memberUIDs"] == old[1]
    assert not going(lab.pods(0)[0])
    assert going(lab.pods(1)[0])

    await lab.settle()

    assert [pod["metadata"]["name"] for pod in lab.pods()] == [
        "chat-server-r0-m0",
        "chat-server-r0-m1",
        "chat-server-r1-m0",
        "chat-server-r1-m1",
    ]
    assert not {*old[0], *old[1]} & set(lab.uids())
    new = lab.cluster.all(WORKLOADS)
    assert len(new) == 2 and not workloads & {uid(each) for each in new}
    assert [each["spec"]["podSets"][0]["count"] for each in new] == [2, 2]
    assert lab.record is None
    assert uid(lab.deployment) == lab.made


async def test_t02_a_ladder_of_sizes_and_the_peer_service_follows() -> None:
    lab = Lab()
    await lab.settle()
    before: set[str] = {*lab.uids(), uid(lab.workload() or {})}
    for size in (2, 3, 2, 1):
        lab.edit(size=size)
        await lab.settle()

        now = {*lab.uids(), uid(lab.workload() or {})}
        assert len(now) == size + 1
        assert not now & before
        assert ("chat-server-r0" in lab.services()) == (size > 1)
        before |= now


async def test_t03_a_whole_replica_of_four_is_not_trimmed_while_its_sibling_waits() -> None:
    lab = Lab(role(replicas=2, size=4), cards=8)
    await lab.settle()
    sibling, workload = lab.uids(0), uid(lab.workload(0) or {})
    lab.kueue.may_admit = False
    lab.edit(size=2)
    await lab.until("WaitingForAdmission")

    for _ in range(3):
        await lab.look()
        lab.move()
        assert lab.uids(0) == sibling and len(sibling) == 4
        assert uid(lab.workload(0) or {}) == workload
        assert not lab.is_admitted(1)

    lab.kueue.may_admit = True
    await lab.settle()
    assert len(lab.uids(0)) == len(lab.uids(1)) == 2


async def test_t04_fewer_cards_take_cpu_and_memory_along() -> None:
    lab = Lab(role(replicas=2, resources={"accelerator": 2}))
    await lab.settle()
    assert container(lab.pods()[0])["resources"]["requests"][CARD] == "2"

    lab.edit(resources={"accelerator": 1})
    await lab.settle()

    for workload in lab.cluster.all(WORKLOADS):
        spec = workload["spec"]["podSets"][0]["template"]["spec"]
        requests = spec["containers"][0]["resources"]["requests"]
        assert requests == {CARD: "1", "cpu": "4", "memory": "16Gi"}
    assert uid(lab.deployment) == lab.made


async def test_t05_another_instance_type_is_another_queue() -> None:
    lab = Lab(role(replicas=2))
    await lab.settle()
    old = uid(lab.workload(0) or {})
    lab.kueue.may_admit = False
    lab.edit(instanceType="b")
    await lab.until("WaitingForAdmission")
    lab.move()

    assert lab.pods(1)[0]["metadata"]["labels"][QUEUE] == "queue-b"
    assert (lab.workload(1) or {})["spec"]["queueName"] == "queue-b"
    kept = lab.workload(0) or {}
    assert (uid(kept), kept["spec"]["queueName"]) == (old, "queue-a")
    assert lab.is_admitted(0)

    lab.kueue.may_admit = True
    await lab.settle()
    assert {each["spec"]["queueName"] for each in lab.cluster.all(WORKLOADS)} == {"queue-b"}


async def test_t06_managed_to_takeover_and_back_and_to_another() -> None:
    lab = Lab(role(replicas=2, extraArgs=["--max-model-len", "4096"]))
    await lab.settle()
    managed = container(lab.pods()[0])
    assert managed["args"][-2:] == ["--port", "8000"] and "readinessProbe" in managed
    assert not lab.status()["unmanaged"]

    lab.edit(command=["run", "a"])
    await lab.until("WaitingForAdmission")
    assert container(lab.pods(0)[0]) == managed
    await lab.settle()

    for pod in lab.pods():
        assert container(pod)["command"] == ["run", "a"]
        assert "args" not in container(pod) and "readinessProbe" not in container(pod)
    assert lab.status()["unmanaged"]

    lab.edit(command=None)
    await lab.settle()
    assert container(lab.pods()[0]) == managed and not lab.status()["unmanaged"]

    lab.edit(command=["run", "a"])
    await lab.settle()
    lab.edit(command=["run", "b"])
    await lab.settle()
    assert {tuple(container(pod)["command"]) for pod in lab.pods()} == {("run", "b")}


async def test_t07_four_fields_in_one_patch_are_one_rollout() -> None:
    lab = Lab(role(replicas=2))
    await lab.settle()
    lab.edit(size=2, resources={"accelerator": 2}, instanceType="b", command=["run"])

    await lab.look()
    assert [going(pod) for pod in lab.pods()] == [False, True]
    await lab.settle()

    assert len(lab.pods()) == 4
    for pod in lab.pods():
        assert container(pod)["command"] == ["run"]
        assert container(pod)["resources"]["requests"][CARD] == "2"
        assert pod["metadata"]["labels"][QUEUE] == "queue-b"
    started = [note for note in lab.told if note.reason == "ReplacementStarted"]
    assert len(started) == 2


async def test_t08_a_queued_replacement_survives_restarts_and_its_siblings_too() -> None:
    lab = Lab(role(replicas=3))
    await lab.settle()
    kept = lab.uids(0) + lab.uids(1)
    lab.kueue.may_admit = False
    lab.edit(image="engine:2")
    await lab.until("WaitingForAdmission")

    for turn in range(5):
        if turn in (1, 3):
            lab.restart()
        await lab.look()
        lab.move()
        assert lab.uids(0) + lab.uids(1) == kept
        assert lab.slot()["ordinal"] == 2


async def test_t09_cards_to_slices_and_back_without_a_mixture() -> None:
    lab = Lab(role(resources={"accelerator": 1}))
    await lab.settle()
    seen = set(lab.uids())
    half = {"acceleratorSlicedMemoryPercentage": 50, "acceleratorSlicedCoresPercentage": 30}
    steps: list[tuple[Json, Json]] = [
        (half, {SLICE: "50", CORES: "30"}),
        ({"acceleratorSlicedMemoryPercentage": 25}, {SLICE: "25"}),
        ({"accelerator": 1}, {CARD: "1"}),
    ]
    for resources, devices in steps:
        lab.edit(resources=resources)
        await lab.settle()

        pod = lab.pods()[0]
        requests = container(pod)["resources"]["requests"]
        assert requests == {**devices, "cpu": "4", "memory": "16Gi"}
        assert uid(pod) not in seen
        seen.add(uid(pod))


async def test_t10_what_cannot_be_built_deletes_nothing_until_it_can() -> None:
    lab = Lab(role(replicas=2))
    await lab.settle()
    kept = lab.uids()
    lab.edit_type("b", queueName="")
    lab.edit(instanceType="b", size=2)
    trail = len(lab.cluster.writes)

    await lab.look(3)
    lab.move()

    assert lab.uids() == kept
    assert {write.verb for write in lab.cluster.writes[trail:]} <= {"status"}
    status, reason, message = lab.condition("Rendered")
    assert (status, reason) == ("False", "RenderFailed")
    assert 'spec.roles[0].instanceType "b"' in message and "spec.queueName" in message
    assert lab.condition("Stalled")[0] == "True"
    assert [note.reason for note in lab.told if note.is_warning] == ["RenderFailed"]
    await lab.quiet()

    lab.edit_type("b", queueName="queue-b")
    await lab.settle()
    assert lab.condition("Rendered")[0] == "True"
    assert len(lab.pods()) == 4 and not set(kept) & set(lab.uids())


async def test_t10_an_instance_type_that_is_gone_deletes_nothing() -> None:
    lab = Lab(role(replicas=1))
    await lab.settle()
    kept = lab.uids()
    lab.edit(instanceType="nowhere")

    await lab.look(2)

    assert lab.uids() == kept
    assert 'instanceType "nowhere"' in lab.condition("Rendered")[2]
    assert lab.status()["ready"] == 1 and lab.status()["desired"] == 1


async def test_t11_reordering_roles_touches_no_pod() -> None:
    lab = Lab(role("one"), role("two"))
    await lab.settle()
    lab.patch(roles=[role("two"), role("one")])
    trail = len(lab.cluster.writes)

    await lab.settle()

    kinds = {(write.kind, write.name) for write in lab.cluster.writes[trail:]}
    assert not any(kind in (PODS, WORKLOADS) for kind, _ in kinds)
    selector = lab.cluster.must(SERVICES, NAMESPACE, "chat")["spec"]["selector"]
    assert selector["app.kubernetes.io/component"] == "two"


@pytest.mark.parametrize("edit", [{"size": 1}, {"replicas": 1}, {"kind": "Server"}])
async def test_t12_what_says_the_same_changes_nothing(edit: Json) -> None:
    lab = Lab()
    await lab.settle()
    lab.edit(**edit)
    lab.cluster.edit(
        MODEL_DEPLOYMENTS, NAMESPACE, "chat", {"metadata": {"labels": {"team": "x"}}}, actor="user"
    )
    trail = len(lab.cluster.writes)

    await lab.settle()

    assert {write.kind for write in lab.cluster.writes[trail:]} <= {MODEL_DEPLOYMENTS}


async def test_t13_a_patch_that_leaves_the_size_out_means_one() -> None:
    lab = Lab(role(size=2))
    await lab.settle()
    assert len(lab.pods()) == 2

    lab.patch(roles=[role()])
    await lab.settle()

    assert len(lab.pods()) == 1 and lab.record is None


@pytest.mark.parametrize(
    "edit",
    [
        {"image": "engine:2"},
        {"env": [{"name": "A", "value": "1"}]},
        {"terminationGracePeriodSeconds": 60},
        {"topology": {"requiredLevel": "example.com/rack"}},
        {"additionalVolumes": [{"mountPath": "/models", "hostPath": {"path": "/srv"}}]},
    ],
)
async def test_t14_other_fields_go_the_same_way(edit: dict[str, Any]) -> None:
    lab = Lab(role(replicas=2))
    await lab.settle()
    old = lab.uids()
    lab.kueue.may_admit = False
    lab.edit(**edit)
    await lab.until("WaitingForAdmission")
    lab.move()
    await lab.look(3)
    assert lab.uids(0) == old[:1]

    lab.kueue.may_admit = True
    await lab.settle()

    assert not set(old) & set(lab.uids())
