"""Rules of Roles, for processes at a `memcluster.MemPort`: the shipped ones, and the compiled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from memcluster import Request
from modelpool_api.v1alpha1.modelpool import ModelPool
from modelpool_api.v1alpha1.modelrouter import ModelRouter
from modelpool_kube.kinds import Json
from modelpool_operator.plan import modelrouter

ROLES = Path(__file__).parents[2] / "manifests" / "operator" / "roles.yaml"
MAKES_LEASES: Json = {
    "apiGroups": ["coordination.k8s.io"],
    "resources": ["leases"],
    "verbs": ["create"],
}
"""What a router needs beside that has its pools from a file."""


class Rights:
    """
    Says of a request whether it is allowed, as RBAC does.

    Args of the constructor:
        rules: Of the Roles that count.
    """

    def __init__(self, rules: Iterable[Mapping[str, Any]]) -> None:
        self._rules = tuple(rules)

    def __call__(self, request: Request) -> bool:
        """Return whether one of the rules allows *request*."""
        verb, resource = request.verb, request.kind.plural
        if verb == "status":
            verb, resource = "patch", f"{resource}/status"
        # The name of what is created is not looked at.
        name = "" if verb == "create" else request.name
        return any(
            request.kind.group in rule["apiGroups"]
            and resource in rule["resources"]
            and verb in rule["verbs"]
            and ("resourceNames" not in rule or name in rule["resourceNames"])
            for rule in self._rules
        )

    def pairs(self) -> set[tuple[str, str]]:
        """Return all verbs with the resources they are allowed on."""
        return {
            (verb, resource)
            for rule in self._rules
            for verb in rule["verbs"]
            for resource in rule["resources"]
        }


def of_operator() -> Rights:
    """Return what the shipped ClusterRole allows."""
    for each in yaml.safe_load_all(ROLES.read_text("utf-8")):
        if each["kind"] == "ClusterRole":
            return Rights(each["rules"])
    raise AssertionError(f"no ClusterRole in {ROLES}")


def of_router(namespace: str, pool: str, members: Iterable[Json], *also: Json) -> Rights:
    """
    Return what the Role allows that the operator compiles for a router of one pool.

    Args:
        namespace: Of the pool.
        pool: Its name.
        members: References to them, as a ModelPool lists them.
        also: Further rules.
    """
    meta = {"name": pool, "namespace": namespace}
    spec = {"pools": [{"name": pool}], "allowAnonymous": True}
    router = ModelRouter.model_validate({"metadata": {**meta, "name": "front"}, "spec": spec})
    listed = ModelPool.model_validate({"metadata": meta, "spec": {"members": list(members)}})
    return Rights((*modelrouter.rules(router, [listed]), *also))
