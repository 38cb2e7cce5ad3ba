"""The shipped manifests, and what the operator makes of objects, as a real API server sees them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster_kubectl import KubectlFailed, Object, until
from cluster_operator import Start
from cluster_roles import router_account
from harness import ROOT, OwnCluster

pytestmark = pytest.mark.cluster
MANIFESTS = ROOT / "manifests"
VERSION = "modelpool.dev/v1alpha1"
DIGEST = "modelpool.dev/spec-hash"
CHILDREN = ("serviceaccount", "role", "rolebinding", "configmap", "deployment", "service")


def pool(namespace: str) -> Object:
    """A pool of one Deployment."""
    meta = {"name": "gpu0", "namespace": namespace}
    members = [{"deploymentRef": {"name": "judge"}, "profile": "llama-server"}]
    return {
        "apiVersion": VERSION,
        "kind": "ModelPool",
        "metadata": meta,
        "spec": {"members": members},
    }


def router(namespace: str) -> Object:
    """A router with all that can be mounted into it."""
    upstream = {"name": "u", "url": "http://127.0.0.1:9", "apiKey": {"name": "s"}}
    return {
        "apiVersion": VERSION,
        "kind": "ModelRouter",
        "metadata": {"name": "front", "namespace": namespace},
        "spec": {
            "pools": [{"name": "gpu0"}],
            "keys": {"name": "k"},
            "upstreams": [upstream],
            "image": "modelpool.test/any",
        },
    }


def tried(kubectl: Any, namespace: str, name: str, template: Object) -> str:
    """Let the server judge the Pod of *template* without making it; return why it is refused."""
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": template["spec"],
    }
    try:
        kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(body))
    except KubectlFailed as failed:
        return failed.stderr
    return ""


def test_our_pods_are_let_in_where_pods_are_restricted(
    shipped: OwnCluster, start: Start, namespace: str
) -> None:
    kubectl = shipped.kubectl
    label = "pod-security.kubernetes.io/enforce=restricted"
    kubectl("label", "namespace", namespace, label)
    start("operator-0")
    kubectl.apply(pool(namespace), router(namespace))
    until(lambda: kubectl.get("deployment", "front", "-n", namespace), "the router is made")
    made = kubectl.get("deployment", "front", "-n", namespace)
    file = MANIFESTS / "operator" / "deployment.yaml"
    own = yaml.safe_load(file.read_text("utf-8"))
    system = str(own["metadata"]["namespace"])

    # It is enforced: a Pod that says nothing of its rights is refused.
    bare = {"spec": {"containers": [{"name": "main", "image": "modelpool.test/any"}]}}
    for where in (namespace, system):
        assert "violates PodSecurity" in tried(kubectl, where, "bare", bare)
    assert tried(kubectl, namespace, "front", made["spec"]["template"]) == ""
    assert tried(kubectl, system, "operator", own["spec"]["template"]) == ""


@pytest.mark.parametrize(
    "folder", ["base", "samples", "samples/modeldeployment", "samples/own-file", "network"]
)
def test_what_kustomize_builds_is_taken_by_the_server(shipped: OwnCluster, folder: str) -> None:
    kubectl = shipped.kubectl
    # Nothing can be tried in a namespace that is not there.
    kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "lab"}})
    where = ("-n", "lab") if folder == "network" else ()

    said = kubectl(
        *("apply", "--server-side", "--force-conflicts", "--dry-run=server"),
        *("-k", str(MANIFESTS / folder), *where),
    )

    assert said.count("serverside-applied") == len(said.splitlines()) > 1


def test_children_of_another_version_are_brought_up_to_date(
    shipped: OwnCluster, start: Start, namespace: str, tmp_path: Path
) -> None:
    kubectl = shipped.kubectl
    kubectl.apply(pool(namespace), router(namespace))
    operator = start("operator-0")

    def digests() -> dict[str, str]:
        found = {each: kubectl.get(each, "front", "-n", namespace) for each in CHILDREN}
        return {each: obj["metadata"]["annotations"][DIGEST] for each, obj in found.items() if obj}

    until(lambda: len(digests()) == len(CHILDREN), "all children are made")
    wanted = digests()
    uids = {
        each: kubectl.get(each, "front", "-n", namespace)["metadata"]["uid"] for each in CHILDREN
    }
    for each in CHILDREN:
        # As if they had been rendered by a version before or after this one.
        notes = {"annotations": {DIGEST: "of-another-version"}, "labels": {"left": "alone"}}
        patch = json.dumps({"metadata": notes})
        kubectl("patch", each, "front", "-n", namespace, "--type=merge", "-p", patch)

    until(lambda: digests() == wanted, "they are as this version wants them")
    for each in CHILDREN:
        now = kubectl.get(each, "front", "-n", namespace)["metadata"]
        assert now["uid"] == uids[each], "nothing was made anew"
        assert now["labels"]["left"] == "alone"
    assert operator.stop() == 0
    assert not re.search("orbidden|Traceback", operator.log.read_text("utf-8"))


def test_without_the_right_to_finalizers_nobody_names_an_owner(
    shipped: OwnCluster, namespace: str
) -> None:
    """What the rules on ``/finalizers`` are for, which no request shows."""
    kubectl = shipped.kubectl
    kubectl.apply(pool(namespace))
    owner = kubectl.get("modelpool", "gpu0", "-n", namespace)
    reference = {
        "apiVersion": VERSION,
        "kind": "ModelPool",
        "name": "gpu0",
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    meta = {"name": "made", "namespace": namespace, "ownerReferences": [reference]}
    lease = json.dumps({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": meta})
    try_it = ("create", "--dry-run=server", "-f", "-")
    operator = shipped.as_user(shipped.service_account("modelpool-system", "modelpool-operator"))
    operator(*try_it, stdin=lease)

    # One who may make Leases and nothing else.
    other = router_account(shipped, "other", pool(namespace), makes_leases=True)
    with pytest.raises(KubectlFailed, match="cannot set blockOwnerDeletion"):
        shipped.as_user(other)(*try_it, stdin=lease)
