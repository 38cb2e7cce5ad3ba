"""Members in Kubernetes, as the file has them; and what this machine must have for them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from modelpool_router.app.cluster import kube_members, own_name, own_namespace
from modelpool_router.core.spec import MemberName
from modelpool_router.settings import compare, from_mapping, verify

Json = dict[str, Any]


def pool(**keys: Any) -> Json:
    """Return a pool of every kind of object."""
    kinds = ("deployment", "statefulSet", "inferenceService", "modelDeployment")
    members = [
        {"name": kind.lower(), kind: {"namespace": "lab", "name": f"m{number}"}}
        for number, kind in enumerate(kinds)
    ]
    return {"name": "gpu0", "members": members, **keys}


def test_every_kind_of_object_can_be_a_member() -> None:
    settings = from_mapping({"leaseNamespace": "lab", "pools": [pool(loadTimeout="90s")]})

    members = kube_members(settings.pools[0])

    assert [member.kind for member in members.values()] == [
        "Deployment",
        "StatefulSet",
        "InferenceService",
        "ModelDeployment",
    ]
    assert settings.pools[0].is_in_kubernetes
    assert members[MemberName("deployment")].unschedulable_after_s == 90
    assert members[MemberName("statefulset")].namespace == "lab"


def test_paths_port_and_service_reach_the_driver() -> None:
    place = {"namespace": "lab", "name": "a", "port": 9000, "service": "front"}
    member = {
        "name": "a",
        "deployment": place,
        "profile": "vllm",
        "readinessPath": "/up",
        "idlePath": "/idle",
    }
    rules = {"name": "gpu0", "unschedulableAfter": "20s", "members": [member]}
    made = kube_members(from_mapping({"pools": [rules]}).pools[0])[MemberName("a")]

    assert (made.port, made.service, made.unschedulable_after_s) == (9000, "front", 20)
    assert (made.profile.readiness_path, made.profile.idle_path) == ("/up", "/idle")


def test_model_pools_alone_are_something_to_serve() -> None:
    settings = from_mapping({"poolsFrom": {"namespace": "lab", "names": ["gpu0"]}})

    assert settings.pools_from is not None
    assert settings.pools_from.names == ("gpu0",)


def test_this_machine_needs_no_program_but_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {"stateDir": str(tmp_path), "pools": [pool()]}
    assert verify(from_mapping(tree), {}) == []

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    [problem] = verify(from_mapping(tree), {})

    assert problem.reason.endswith("the Kubernetes client, which is not installed")
    assert problem.way_out == "pip install 'modelpool[kubernetes]'"


def test_a_kubeconfig_that_is_not_there_is_told(tmp_path: Path) -> None:
    access = {"kubeconfig": str(tmp_path / "none")}
    tree = {"stateDir": str(tmp_path), "pools": [pool()], "kubernetes": access}

    [problem] = verify(from_mapping(tree), {})

    assert problem.field == "kubernetes.kubeconfig"
    assert problem.reason.endswith("none does not exist")


def test_where_leases_are_can_only_change_with_a_restart() -> None:
    before = from_mapping({"leaseNamespace": "lab", "pools": [pool()]})
    after = from_mapping({"leaseNamespace": "other", "pools": [pool()]})

    [refused] = compare(before, after).refused

    assert "restart the router" in refused.way_out


def test_in_a_pod_the_router_is_called_like_the_pod(tmp_path: Path) -> None:
    settings = from_mapping({"stateDir": str(tmp_path), "pools": [pool()]})

    assert own_name(settings, {"POD_NAME": "router-7d9c"}) == "router-7d9c"
    assert own_namespace({"POD_NAMESPACE": "lab"}) == "lab"
    # Elsewhere with an underscore: so nobody takes it for a Pod that is gone.
    assert "_" in own_name(settings, {})
    assert own_name(settings, {}) == own_name(settings, {})
