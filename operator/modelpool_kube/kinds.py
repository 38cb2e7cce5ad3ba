"""The kinds of objects that we read and write, and where the API server keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelpool_api.names import GROUP, VERSION

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of object."""

    group: str
    """API group; empty for the core group."""
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    has_status: bool = True
    """Whether status is written through a path of its own."""

    @property
    def api_version(self) -> str:
        """Value of ``apiVersion``."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str | None = None, sub: str = "") -> str:
        """Return the path on the API server; *namespace* None for all, or for cluster scope."""
        parts = ["/apis", self.group, self.version] if self.group else ["/api", self.version]
        if namespace is not None and self.namespaced:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        if name is not None:
            parts.append(name)
        if sub:
            parts.append(sub)
        return "/".join(parts)

    def body(self, name: str, namespace: str | None = None, **rest: Any) -> Json:
        """Return the beginning of an object: apiVersion, kind, metadata, then *rest*."""
        meta: Json = {"name": name}
        if namespace is not None:
            meta["namespace"] = namespace
        return {"apiVersion": self.api_version, "kind": self.kind, "metadata": meta, **rest}


PODS = Kind("", "v1", "pods", "Pod")
NODES = Kind("", "v1", "nodes", "Node", namespaced=False)
SERVICES = Kind("", "v1", "services", "Service")
CONFIGMAPS = Kind("", "v1", "configmaps", "ConfigMap", has_status=False)
SERVICE_ACCOUNTS = Kind("", "v1", "serviceaccounts", "ServiceAccount", has_status=False)
EVENTS = Kind("events.k8s.io", "v1", "events", "Event", has_status=False)
DEPLOYMENTS = Kind("apps", "v1", "deployments", "Deployment")
REPLICASETS = Kind("apps", "v1", "replicasets", "ReplicaSet")
STATEFULSETS = Kind("apps", "v1", "statefulsets", "StatefulSet")
LEASES = Kind("coordination.k8s.io", "v1", "leases", "Lease", has_status=False)
AUTOSCALERS = Kind("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler")
ROLES = Kind("rbac.authorization.k8s.io", "v1", "roles", "Role", has_status=False)
ROLE_BINDINGS = Kind(
    "rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding", has_status=False
)
ACCESS_REVIEWS = Kind(
    "authorization.k8s.io",
    "v1",
    "selfsubjectaccessreviews",
    "SelfSubjectAccessReview",
    namespaced=False,
    has_status=False,
)
CRDS = Kind(
    "apiextensions.k8s.io",
    "v1",
    "customresourcedefinitions",
    "CustomResourceDefinition",
    namespaced=False,
)
WORKLOADS = Kind("kueue.x-k8s.io", "v1beta2", "workloads", "Workload")

MODEL_POOLS = Kind(GROUP, VERSION, "modelpools", "ModelPool")
INFERENCE_SERVICES = Kind(GROUP, VERSION, "inferenceservices", "InferenceService")
MODEL_ROUTERS = Kind(GROUP, VERSION, "modelrouters", "ModelRouter")
MODEL_DEPLOYMENTS = Kind(GROUP, VERSION, "modeldeployments", "ModelDeployment")
INSTANCE_TYPES = Kind(GROUP, VERSION, "instancetypes", "InstanceType", namespaced=False)

MEMBER_KINDS: Mapping[str, Kind] = {
    each.kind: each for each in (INFERENCE_SERVICES, MODEL_DEPLOYMENTS, DEPLOYMENTS, STATEFULSETS)
}
"""Kinds that a pool can have as members."""


def meta(obj: Json) -> Json:
    """Return the metadata of *obj*."""
    found: Json = obj.get("metadata") or {}
    return found


def uid(obj: Json) -> str:
    """Return the UID of *obj*."""
    return str(meta(obj).get("uid", ""))


def version_of(obj: Json) -> str:
    """Return the resourceVersion of *obj*."""
    return str(meta(obj).get("resourceVersion", ""))


def name_of(obj: Json) -> str:
    """Return the name of *obj*."""
    return str(meta(obj).get("name", ""))


def annotation(obj: Json, key: str) -> str | None:
    """Return the annotation *key* of *obj*, or None."""
    found = (meta(obj).get("annotations") or {}).get(key)
    return None if found is None else str(found)


def is_going(obj: Json) -> bool:
    """Return whether somebody asked to delete *obj*."""
    return meta(obj).get("deletionTimestamp") is not None


def controller_of(obj: Json) -> Json | None:
    """Return the owner reference of the controller of *obj*, or None."""
    for owner in meta(obj).get("ownerReferences") or []:
        if owner.get("controller"):
            found: Json = owner
            return found
    return None


def is_controlled_by(obj: Json, owner_uid: str) -> bool:
    """Return whether the controller of *obj* is the object with that UID; an empty UID never is."""
    owner = controller_of(obj)
    return owner is not None and owner_uid != "" and owner.get("uid") == owner_uid
