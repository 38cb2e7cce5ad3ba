"""
The rights that are shipped, held against what our programs did in a run.

    python tests/cluster/cluster_roles.py AUDIT_LOG...     print the table of the runs

The API server of the harness writes down every request of people and service accounts. A program
of ours is known by its user agent: with whose credentials it came, what it was refused, and which
of its rights it never used can all be read from there.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster_kubectl import Kubectl, KubectlFailed, Object, until
from cluster_operator import base
from harness import Cluster
from modelpool_api.names import OPERATOR_MANAGER, ROUTER_MANAGER
from modelpool_api.v1alpha1.modelpool import ModelPool
from modelpool_api.v1alpha1.modelrouter import ModelRouter
from modelpool_operator.plan.modelrouter import rules

NAMESPACE_IS_GOING = "because it is being terminated"
"""A 403 that is about no right: nothing can be made any more where a test has ended."""
PROGRAMS = (OPERATOR_MANAGER, ROUTER_MANAGER)
OPERATOR = ("modelpool-system", "modelpool-operator")
"""Namespace and name of the operator's account."""


@dataclass(frozen=True, order=True)
class Right:
    """One verb on one resource; of a subresource it is ``pods/status``."""

    group: str
    resource: str
    verb: str

    def __str__(self) -> str:
        """Say it as people do."""
        return f"{self.verb} {self.resource}" + (f".{self.group}" if self.group else "")


def rights_of(listed: Iterable[Any]) -> set[Right]:
    """Return the rights in the rules of a Role."""
    return {
        Right(group, resource, verb)
        for rule in listed
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def operator_rights() -> set[Right]:
    """Return what the shipped ClusterRole lets the operator do."""
    found: set[Right] = set()
    for each in base():
        if each["kind"] in ("Role", "ClusterRole") and each["metadata"]["name"] == OPERATOR[1]:
            found |= rights_of(each["rules"])
    return found


def router_rights() -> set[Right]:
    """Return all that the operator can put into the Role of a router."""
    refs = ("inferenceServiceRef", "modelDeploymentRef", "deploymentRef", "statefulSetRef")
    members = [{each: {"name": f"m{index}"}} for index, each in enumerate(refs)]
    pool = {"metadata": {"name": "p", "namespace": "n"}, "spec": {"members": members}}
    return rights_of(_rules(pool))


def _rules(*pools: Object) -> list[Any]:
    front = ModelRouter.model_validate(
        {
            "metadata": {"name": "front", "namespace": pools[0]["metadata"]["namespace"]},
            "spec": {
                "pools": [{"name": each["metadata"]["name"]} for each in pools],
                "allowAnonymous": True,
            },
        }
    )
    return list(rules(front, [ModelPool.model_validate(each) for each in pools]))


def router_account(cluster: Cluster, name: str, *pools: Object, makes_leases: bool = False) -> Path:
    """
    Make a service account with the Role that the operator would compile for a router of *pools*.

    Args:
        cluster: Where.
        name: Of the account.
        pools: ModelPools, whether they are in the cluster or not; all in one namespace.
        makes_leases: For a router that has its pools from a file: nobody else makes their Leases.

    Returns:
        A kubeconfig of that account.
    """
    namespace = pools[0]["metadata"]["namespace"]
    meta = {"name": name, "namespace": namespace}
    rbac = "rbac.authorization.k8s.io"
    granted = _rules(*pools)
    if makes_leases:
        group = "coordination.k8s.io"
        granted.append({"apiGroups": [group], "resources": ["leases"], "verbs": ["create"]})
    account = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    cluster.kubectl.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": meta, "rules": granted},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": meta,
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": name},
            "subjects": [account],
        },
    )
    made = cluster.service_account(namespace, name)
    # The API server takes a moment to know of a binding.
    as_router = cluster.as_user(made)
    until(lambda: _may(as_router, "list", "replicasets", namespace), "the Role is in force", 20)
    return made


def _may(kubectl: Kubectl, verb: str, resource: str, namespace: str) -> bool:
    try:
        return kubectl("auth", "can-i", verb, resource, "-n", namespace).strip() == "yes"
    except KubectlFailed:
        return False  # that is how it says no


@dataclass
class Record:
    """
    What programs of ours did, as audit logs tell it.

    Attributes:
        used: How often each right was used, by program.
        refused: Requests that were forbidden.
        masters: Requests that came with the rights of a person.
    """

    used: dict[str, Counter[Right]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    masters: list[str] = field(default_factory=list)

    def read(self, log: Path) -> None:
        """Take in a log."""
        for event in _events(log):
            self._take(event)

    def _take(self, event: Any) -> None:
        program = event.get("userAgent", "")
        where = event.get("objectRef")
        if program not in PROGRAMS or where is None:
            return
        user = event["user"]["username"]
        resource = where["resource"]
        if where.get("subresource"):
            resource += "/" + where["subresource"]
        right = Right(where.get("apiGroup", ""), resource, event["verb"])
        said = f"{program} as {user}: {right} {where.get('namespace', '')}/{where.get('name', '')}"
        answer = event.get("responseStatus") or {}
        message = str(answer.get("message") or "")
        if answer.get("code") == 403 and NAMESPACE_IS_GOING not in message:
            self.refused.append(f"{said}: {message}")
            return
        # It came to know of a member before the operator had renewed its Role, and asked again.
        self.refused = [each for each in self.refused if not each.startswith(f"{said}: ")]
        if answer.get("code") == 403:
            return
        if not user.startswith("system:serviceaccount:"):
            self.masters.append(said)
        else:
            self.used.setdefault(program, Counter())[right] += 1

    def unused(self) -> list[str]:
        """Return the rights that were not used, as ``program: verb resource``."""
        found = []
        for program, shipped in shipped_rights().items():
            idle = shipped - set(self.used.get(program, ()))
            if program == OPERATOR_MANAGER:
                # Nobody can grant what it does not have itself, and some rights are
                # asked for by admission alone, before an owner is named that blocks deletion.
                idle -= router_rights()
                idle = {each for each in idle if not _is_for_owners(each)}
            found += [f"{program}: {each}" for each in sorted(idle)]
        return found

    def table(self) -> Iterator[str]:
        """Yield the lines of a table of all rights that are shipped."""
        granted = router_rights()
        for program, shipped in shipped_rights().items():
            yield f"{program}:"
            for right in sorted(shipped):
                times = self.used.get(program, Counter())[right]
                why = str(times) if times else "never"
                if not times and program == OPERATOR_MANAGER and right in granted:
                    why = "granted to routers"
                elif _is_for_owners(right):
                    why = "asked for by admission"
                yield f"  {why:>22}  {right}"


def _is_for_owners(right: Right) -> bool:
    return right.resource.endswith("/finalizers") and right.verb == "update"


def shipped_rights() -> dict[str, set[Right]]:
    """Return the shipped rights by program."""
    return {OPERATOR_MANAGER: operator_rights(), ROUTER_MANAGER: router_rights()}


def _events(log: Path) -> Iterator[Any]:
    # One line may be half written while the server runs.
    for line in log.read_text("utf-8").splitlines():
        if line.endswith("}"):
            yield json.loads(line)


def main() -> int:
    record = Record()
    for name in sys.argv[1:]:
        record.read(Path(name))
    print(*record.table(), sep="\n")
    wrong = [*dict.fromkeys(record.refused), *dict.fromkeys(record.masters)]
    print(*(f"WRONG: {each}" for each in wrong), sep="\n")
    print(*(f"never used: {each}" for each in record.unused()), sep="\n")
    return 1 if wrong or record.unused() else 0


if __name__ == "__main__":
    sys.exit(main())
