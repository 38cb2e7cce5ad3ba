"""Deleting a deployment: everything of ours goes, nothing of others', whatever was under way."""

from __future__ import annotations

import pytest

from mdep_lab import NAMESPACE, Lab, role
from memkueue import going
from modelpool_api.names import FINALIZER
from modelpool_kube.kinds import MODEL_DEPLOYMENTS, PODS, SERVICES, WORKLOADS, Json, uid


async def gone(lab: Lab) -> None:
    """Delete the deployment and let everything move."""
    lab.cluster.remove(MODEL_DEPLOYMENTS, NAMESPACE, "chat", actor="user")
    for _ in range(12):
        await lab.look()
        lab.move()


@pytest.mark.parametrize(
    "phase", ["at rest", "begun", "vacant", "made", "queued", "admitted", "only its Workload left"]
)
async def test_t66_in_every_phase_all_of_ours_goes_and_nothing_comes_back(phase: str) -> None:
    lab = Lab(role(replicas=2, size=2))
    foreign_pod = lab.cluster.put(
        PODS, NAMESPACE, {"metadata": {"name": "x"}, "spec": {"containers": [{"name": "x"}]}}
    )
    body = {"metadata": {"name": "y"}, "spec": {"podSets": []}}
    foreign_workload = lab.cluster.put(WORKLOADS, NAMESPACE, body)
    await lab.settle()
    if phase != "at rest":
        lab.kueue.may_admit = False
        lab.edit(image="engine:2")
        await lab.look()
    if phase not in ("at rest", "begun"):
        lab.move()
    if phase in ("made", "queued", "admitted", "only its Workload left"):
        await lab.look()
    if phase in ("queued", "admitted", "only its Workload left"):
        lab.move()
        await lab.look()
    if phase == "admitted":
        lab.kueue.admit()
    if phase == "only its Workload left":
        lab.vanish(lab.pods(1))
    mark = len(lab.port.requests)

    await gone(lab)

    assert [uid(pod) for pod in lab.cluster.all(PODS)] == [uid(foreign_pod)]
    assert [uid(each) for each in lab.cluster.all(WORKLOADS)] == [uid(foreign_workload)]
    assert lab.cluster.all(SERVICES) == [] and lab.cluster.all(MODEL_DEPLOYMENTS) == []
    assert not any(each.verb == "create" for each in lab.port.requests[mark:])


async def test_t66_a_foreign_workload_on_a_group_stays_and_does_not_hold_the_deployment() -> None:
    lab = Lab()
    body = {"metadata": {"name": lab.group()}, "spec": {"podSets": []}}
    foreign = lab.cluster.put(WORKLOADS, NAMESPACE, body)
    await lab.look(2)

    await gone(lab)

    assert [uid(each) for each in lab.cluster.all(WORKLOADS)] == [uid(foreign)]
    assert lab.cluster.all(MODEL_DEPLOYMENTS) == []


async def test_the_finalizer_stays_until_the_last_pod_has_left() -> None:
    lab = Lab()
    await lab.settle()
    assert lab.deployment["metadata"]["finalizers"] == [FINALIZER]
    lab.node.stubborn.add(lab.uids()[0])
    lab.cluster.remove(MODEL_DEPLOYMENTS, NAMESPACE, "chat", actor="user")

    for _ in range(4):
        await lab.look()
        lab.move()

    assert going(lab.deployment) and lab.deployment["metadata"]["finalizers"] == [FINALIZER]
    assert lab.deployment["status"]["phase"] == "Deleting"
    lab.node.stubborn.clear()
    lab.move()
    await lab.look()
    assert lab.cluster.all(MODEL_DEPLOYMENTS) == []


async def test_a_vanished_type_or_an_unreadable_record_does_not_hold_the_deployment() -> None:
    lab = Lab()
    await lab.settle()
    lab.edit(instanceType="nowhere")
    bad: Json = {"metadata": {"annotations": {"modelpool.dev/replacements": "?"}}}
    lab.cluster.edit(MODEL_DEPLOYMENTS, NAMESPACE, "chat", bad, actor="user")

    await gone(lab)

    assert lab.cluster.all(MODEL_DEPLOYMENTS) == [] and lab.pods() == []


async def test_a_deployment_of_the_same_name_takes_nothing_of_its_forerunner() -> None:
    lab = Lab()
    await lab.settle()
    old = lab.pods()[0]
    lab.cluster.vanish(MODEL_DEPLOYMENTS, NAMESPACE, "chat", actor="user")
    lab.cluster.put(
        MODEL_DEPLOYMENTS,
        NAMESPACE,
        {
            "metadata": {"name": "chat"},
            "spec": {
                "model": {"name": "tiny"},
                "engine": {"name": "vLLM"},
                "roles": [role()],
            },
        },
    )

    await lab.look(2)
    assert lab.uids() == [uid(old)] and not going(old)
    lab.move()
    await lab.look()
    lab.cluster.remove(WORKLOADS, NAMESPACE, lab.group(), actor="user")
    await lab.settle()

    assert len(lab.pods()) == 1 and uid(old) not in lab.uids()
