"""Objects that cluster tests create: members, plain Pods, Kueue queues."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]

PORT = 8080
GPU = "nvidia.com/gpu"


def member_container(*args: str, gpus: int = 1) -> Object:
    """A container that is the fake member, ready when it answers ``/health``."""
    probe = {"httpGet": {"path": "/health", "port": PORT}}
    limits = {"limits": {GPU: str(gpus)}} if gpus else {}
    return {
        "name": "member",
        "image": "modelpool.test/member",
        "args": ["--host", "$(POD_IP)", "--port", str(PORT), *args],
        "ports": [{"containerPort": PORT, "name": "http"}],
        "readinessProbe": probe,
        "resources": limits,
    }


def container(*command: str, image: str = "modelpool.test/any", **more: Any) -> Object:
    """A container that runs *command*."""
    return {"name": "main", "image": image, "command": list(command), **more}


def pod(namespace: str, name: str, *containers: Object, **spec: Any) -> Object:
    """A Pod that is not restarted unless *spec* says so."""
    body = {"restartPolicy": "Never", "containers": list(containers), **spec}
    meta = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": body}


def deployment(namespace: str, name: str, *containers: Object, **spec: Any) -> Object:
    """A Deployment of one replica, replaced by ending the old Pod first."""
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": list(containers), **spec},
            },
        },
    }


def member_of(pod: Object) -> str:
    """Return the name of the member that *pod* belongs to; empty when it is none of ours."""
    labels = pod["metadata"].get("labels") or {}
    if labels.get("app.kubernetes.io/component") == "inference-service":
        return str(labels["app.kubernetes.io/instance"])
    return str(labels.get("app", ""))


def grouped(one: Object, *, group: str, queue: str, total: int) -> Object:
    """The Pod *one* as a member of a Kueue Pod group of *total* Pods."""
    meta = one["metadata"]
    labels = {"kueue.x-k8s.io/queue-name": queue, "kueue.x-k8s.io/pod-group-name": group}
    notes = {"kueue.x-k8s.io/pod-group-total-count": str(total)}
    return {**one, "metadata": {**meta, "labels": labels, "annotations": notes}}


def queues(namespace: str, name: str, *, gpus: int) -> list[Object]:
    """A ResourceFlavor, a ClusterQueue with a quota of *gpus*, and a LocalQueue, all *name*."""
    group = {
        "coveredResources": [GPU],
        "flavors": [{"name": name, "resources": [{"name": GPU, "nominalQuota": gpus}]}],
    }
    own = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    version = "kueue.x-k8s.io/v1beta2"
    return [
        {"apiVersion": version, "kind": "ResourceFlavor", "metadata": {"name": name}},
        {
            "apiVersion": version,
            "kind": "ClusterQueue",
            "metadata": {"name": name},
            "spec": {"namespaceSelector": own, "resourceGroups": [group]},
        },
        {
            "apiVersion": version,
            "kind": "LocalQueue",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"clusterQueue": name},
        },
    ]
