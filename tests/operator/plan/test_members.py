"""Where the engine of a member is asked, whoever asks."""

from __future__ import annotations

import pytest

from modelpool_api.v1alpha1.modelpool import PoolMember
from modelpool_kube.kinds import DEPLOYMENTS, Json
from modelpool_kube.slotrules import Facts, Member
from modelpool_operator.plan.members import DEFAULT_PORT, ObservedMember
from modelpool_router.drivers.kube_pods import port_of


def running(*containers: list[Json]) -> ObservedMember:
    """Return a member whose Pod has *containers*, each told by its ports."""
    owned = [{"kind": "Deployment", "name": "coder", "uid": "d", "controller": True}]
    pod: Json = {
        "metadata": {"name": "p", "namespace": "lab", "uid": "p", "ownerReferences": owned},
        "spec": {"containers": [{"name": "c", "ports": ports} for ports in containers]},
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "containerStatuses": [{"state": {"running": {}}}],
        },
    }
    obj: Json = {
        "metadata": {"name": "coder", "namespace": "lab", "uid": "d", "generation": 1},
        "spec": {"replicas": 1},
    }
    spec = PoolMember.model_validate(
        {"deploymentRef": {"name": "coder"}, "profile": "llama-server"}
    )
    member = Member("coder", DEPLOYMENTS, "lab", "coder")
    return ObservedMember(member, spec, Facts(member=obj, pods=(pod,)))


@pytest.mark.parametrize(
    ("containers", "port"),
    [
        ([[{"containerPort": 8000}, {"containerPort": 9000}]], 8000),
        ([[], [{"containerPort": 9000}]], 9000),
        ([[{"containerPort": 5353, "protocol": "UDP"}, {"containerPort": 8000}]], 8000),
        ([[]], DEFAULT_PORT),
    ],
)
def test_given_a_pod_then_operator_and_router_ask_the_same_port(
    containers: list[list[Json]], port: int
) -> None:
    member = running(*containers)

    asked = member.probe()

    assert asked is not None
    assert [each.port for each in asked.targets] == [port]
    assert (port_of(member.pods[0]) or DEFAULT_PORT) == port


def test_given_a_port_in_the_pool_then_it_is_asked() -> None:
    member = running([{"containerPort": 8000}])
    assert member.spec is not None
    named = ObservedMember(
        member.member, member.spec.model_copy(update={"port": 8123}), member.facts
    )

    asked = named.probe()

    assert asked is not None
    assert [each.port for each in asked.targets] == [8123]
