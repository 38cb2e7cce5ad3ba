"""The operator as a process of its own, under its shipped Role, on a real API server."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from typing import Any

import pytest

from cluster_kubectl import KubectlFailed, Object, until
from cluster_objects import GPU, deployment, member_container
from cluster_operator import Start
from harness import OwnCluster

pytestmark = pytest.mark.cluster
SLOT = "modelpool.dev/slot"


def service(namespace: str, name: str) -> Object:
    """An InferenceService of the fake member."""
    return {
        "apiVersion": "modelpool.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "image": "modelpool.test/member",
            "args": ["--host", "$(POD_IP)", "--port", "8080"],
            "profile": "llama-server",
            "resources": {"limits": {GPU: "1"}},
            "terminationGracePeriodSeconds": 5,
        },
    }


def group(namespace: str) -> Object:
    """A ModelDeployment that is suspended."""
    role = {
        "name": "server",
        "instanceType": f"{namespace}-card",
        "image": "modelpool.test/any",
        "command": ["sleep", "1000"],
        "ports": [{"name": "http", "containerPort": 8080}],
    }
    return {
        "apiVersion": "modelpool.dev/v1alpha1",
        "kind": "ModelDeployment",
        "metadata": {"name": "group", "namespace": namespace},
        "spec": {
            "model": {"name": "tiny"},
            "engine": {"name": "Custom"},
            "suspend": True,
            "roles": [role],
        },
    }


def objects(namespace: str) -> list[Object]:
    """A member of each kind, two of them with an engine, and a pool and a router for them."""
    judge = deployment(namespace, "judge", member_container(), terminationGracePeriodSeconds=5)
    judge["kind"] = "StatefulSet"
    judge["spec"] |= {"replicas": 0, "serviceName": "judge"}
    del judge["spec"]["strategy"]
    version = "modelpool.dev/v1alpha1"
    members = [
        {"inferenceServiceRef": {"name": "coder"}},
        {"statefulSetRef": {"name": "judge"}, "profile": "llama-server"},
        {"deploymentRef": {"name": "spare"}, "profile": "llama-server"},
        {"modelDeploymentRef": {"name": "group"}, "profile": "llama-server"},
    ]
    spare = deployment(namespace, "spare", member_container())
    spare["spec"]["replicas"] = 0
    return [
        service(namespace, "coder"),
        judge,
        spare,
        {
            "apiVersion": version,
            "kind": "InstanceType",
            "metadata": {"name": f"{namespace}-card"},
            "spec": {"queueName": "any", "accelerator": {"card": GPU}},
        },
        group(namespace),
        {
            "apiVersion": version,
            "kind": "ModelPool",
            "metadata": {"name": "gpu0", "namespace": namespace},
            "spec": {"members": members, "default": "coder"},
        },
        {
            "apiVersion": version,
            "kind": "ModelRouter",
            "metadata": {"name": "front", "namespace": namespace},
            "spec": {
                "pools": [{"name": "gpu0"}],
                "allowAnonymous": True,
                "replicas": 3,
                "image": "modelpool.test/any",
            },
        },
    ]


def test_given_a_pool_then_the_shipped_operator_keeps_it(
    shipped: OwnCluster, start: Start, namespace: str
) -> None:
    kubectl = shipped.kubectl
    operator = start("operator-0")
    kubectl.apply(*objects(namespace))

    def pool() -> Object:
        found: Object = kubectl.get("modelpool", "gpu0", "-n", namespace).get("status", {})
        return found

    def condition(kind: str) -> str:
        found = [each for each in pool().get("conditions", []) if each["type"] == kind]
        return f"{found[0]['status']}/{found[0]['reason']}" if found else ""

    # a cold default is warmed, and real kubectl shows it
    until(lambda: pool().get("residentMember") == "coder", "the default is warmed", 240)
    shown = kubectl("get", "mpool", "-n", namespace).splitlines()
    assert shown[0].split() == ["NAME", "POLICY", "RESIDENT", "PHASE", "AGE"]
    assert shown[1].split()[:4] == ["gpu0", "sticky", "coder", "Ready"]
    assert condition("SlotAllocated") == "True/Resident"
    members = {each["name"]: each["phase"] for each in pool()["members"]}
    assert members == {"coder": "Ready"} | dict.fromkeys(("judge", "spare", "group"), "Stopped")
    kubectl("wait", "--for=condition=Ready", "isvc/coder", "-n", namespace, "--timeout=30s")

    # the router is pinned, and may do to a member what it must and nothing else
    until(
        lambda: kubectl.get("deployment", "front", "-n", namespace).get("spec", {}).get("replicas"),
        "the router is made",
        60,
    )
    assert kubectl.get("deployment", "front", "-n", namespace)["spec"]["replicas"] == 1
    router = shipped.as_user(shipped.service_account(namespace, "front"))
    mark = {"metadata": {"annotations": {"other.dev/x": "1"}}}
    until(
        lambda: _refuses(router, namespace, "deployment/spare", mark), "the policy is in force", 60
    )
    template = {"template": {"spec": {"nodeSelector": {"a": "b"}}}}
    [role] = kubectl.get("mdep", "group", "-n", namespace)["spec"]["roles"]
    for what, spec in (
        ("deployment/spare", template),
        ("statefulset/judge", template),
        ("isvc/coder", {"nodeSelector": {"a": "b"}}),
        ("mdep/group", {"roles": [{**role, "image": "modelpool.test/other"}]}),
    ):
        patches = (mark, {"spec": spec}, {"metadata": {"labels": {"a": "b"}}})
        assert [_refuses(router, namespace, what, each) for each in patches] == [True] * 3, what
        # What it may change: here to what it is already, so that nothing comes of it.
        obj = kubectl.get(what, "-n", namespace)
        kept = {"annotations": {SLOT: obj["metadata"]["annotations"][SLOT]}}
        field = "suspend" if what.startswith("mdep") else "replicas"
        scale = {"metadata": kept, "spec": {field: obj["spec"][field]}}
        assert not _refuses(router, namespace, what, scale), what
    with pytest.raises(KubectlFailed, match="forbidden"):
        router("get", "secrets", "-n", namespace)

    # demand by hand where no router takes requests
    kubectl("scale", "statefulset/judge", "--replicas=1", "-n", namespace)
    until(lambda: pool().get("residentMember") == "judge", "judge takes over", 240)
    assert kubectl.get("isvc", "coder", "-n", namespace)["spec"]["replicas"] == 0
    below = kubectl.get("deployment", "coder", "-n", namespace)
    above = kubectl.get("isvc", "coder", "-n", namespace)
    assert below["spec"]["replicas"] == 0
    assert below["metadata"]["annotations"][SLOT] == above["metadata"]["annotations"][SLOT]

    # a killed operator is made up for
    operator.stop(signal.SIGKILL)
    operator = start("operator-0")

    # the end of a pool moves nothing
    kubectl("delete", "modelpool", "gpu0", "-n", namespace, "--timeout=90s")
    judge = kubectl.get("statefulset", "judge", "-n", namespace)
    assert judge["spec"]["replicas"] == 1
    assert SLOT not in judge["metadata"].get("annotations", {})
    assert kubectl.get("lease", "modelpool-gpu0", "-n", namespace) == {}

    reasons = {each["reason"] for each in kubectl.items("events.events.k8s.io", "-n", namespace)}
    assert {"SwapStarted", "SwapCompleted"} <= reasons
    assert operator.stop() == 0
    for log in sorted(operator.log.parent.glob("*.log")):
        assert _trouble(log.read_text("utf-8")) == []


def test_given_a_model_router_then_a_real_router_serves_its_pool_under_its_own_role(
    shipped: OwnCluster, start: Start, namespace: str
) -> None:
    kubectl = shipped.kubectl
    operator = start("operator-0")
    made = objects(namespace)
    made[-1]["spec"] |= {"image": "modelpool.test/router", "port": 18180, "replicas": 1}
    kubectl.apply(*made)

    def router() -> Object:
        found: Object = kubectl.get("mrouter", "front", "-n", namespace).get("status", {})
        return found

    until(lambda: router().get("phase") == "Ready", "the router is ready", 120)
    pods = kubectl.items("pods", "-n", namespace, "-l", "app.kubernetes.io/component=router")
    where = f"http://{pods[0]['status']['podIP']}:18180"
    for model in ("coder", "judge", "coder"):
        body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
        request = urllib.request.Request(
            f"{where}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=150) as answer:
            assert answer.status == 200
            assert answer.headers["x-modelpool-member"] == model

    def pool() -> Object:
        found: Object = kubectl.get("mpool", "gpu0", "-n", namespace).get("status", {})
        return found

    until(lambda: pool().get("residentMember") == "coder", "the status follows", 30)
    assert pool()["router"] == pods[0]["metadata"]["name"]
    assert pool()["phase"] == "Ready"
    said = kubectl("logs", pods[0]["metadata"]["name"], "-n", namespace)
    refused = [each for each in said.splitlines() if "orbidden" in each and "nodes" not in each]
    assert refused == []
    assert operator.stop() == 0
    assert _trouble(operator.log.read_text("utf-8")) == []


def _trouble(log: str) -> list[str]:
    """Return lines that tell of rights that are missing, or of faults."""
    found = [each for each in log.splitlines() if re.search("[Ff]orbidden|Traceback", each)]
    # namespaces of earlier tests may be on their way out
    return [each for each in found if "it is being terminated" not in each]


def _refuses(router: Any, namespace: str, what: str, patch: Object) -> bool:
    try:
        router("patch", what, "-n", namespace, "--type=merge", "-p", json.dumps(patch))
    except KubectlFailed as failed:
        assert "ValidatingAdmissionPolicy" in failed.stderr, failed.stderr
        return True
    return False
