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
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from cluster_kubectl import Kubectl, KubectlFailed, Object, until
from cluster_operator import base
from harness import API_SERVER_STARTS, ROOT, Cluster
from modelpool_api.names import OPERATOR_MANAGER, ROUTER_MANAGER
from modelpool_api.v1alpha1.modelpool import ModelPool
from modelpool_api.v1alpha1.modelrouter import ModelRouter
from modelpool_operator.plan.modelrouter import rules

NAMESPACE_IS_GOING = "because it is being terminated"
"""A 403 that is about no right: nothing can be made any more where a test has ended."""
PROGRAMS = (OPERATOR_MANAGER, ROUTER_MANAGER)
OPERATOR = ("modelpool-system", "modelpool-operator")
"""Namespace and name of the operator's account."""
LESS_THAN_SHIPPED = "less-than-shipped"
"""Name of an account that lacks a right on purpose: what it is refused shows nothing of Roles."""
OWN_FILE = "-own-file"
"""How the names of accounts end whose routers have their pools from a file."""
OWN_FILE_ROLE = ROOT / "manifests" / "samples" / "own-file" / "role.yaml"
ROLES = ("roles", "rolebindings")
RENEWED_S = 5.0
"""A Role is in force so long after it was written, at the latest."""
STARTED_S = 15.0
"""An API server that has just started knows all Roles after that, at the latest."""


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
    return rights_of(compiled_rules(pool))


def compiled_rules(*pools: Object) -> list[Any]:
    """Return the rules that the operator would compile for a router of *pools*."""
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


def own_file_rules(*pools: Object) -> list[Any]:
    """Return the rules of the shipped sample for a router of its own file, with our names in it."""
    [role] = [
        each
        for each in yaml.safe_load_all(OWN_FILE_ROLE.read_text("utf-8"))
        if each["kind"] == "Role"
    ]
    names = {
        "leases": [f"modelpool-{each['metadata']['name']}" for each in pools],
        "deployments": [
            member["deploymentRef"]["name"] for each in pools for member in each["spec"]["members"]
        ],
    }
    found: list[Any] = role["rules"]
    for rule in found:
        if "resourceNames" in rule:
            [resource] = rule["resources"]
            rule["resourceNames"] = names[resource]
    return found


def router_account(cluster: Cluster, name: str, *pools: Object, makes_leases: bool = False) -> Path:
    """
    Make a service account with the Role that the operator would compile for a router of *pools*.

    Args:
        cluster: Where.
        name: Of the account.
        pools: ModelPools, whether they are in the cluster or not; all in one namespace.
        makes_leases: For a router that has its pools from a file, so that nobody else makes their
            Leases: its Role is the one in the samples, and its name ends with `OWN_FILE`.

    Returns:
        A kubeconfig of that account.
    """
    namespace = pools[0]["metadata"]["namespace"]
    name += OWN_FILE if makes_leases else ""
    meta = {"name": name, "namespace": namespace}
    rbac = "rbac.authorization.k8s.io"
    granted = own_file_rules(*pools) if makes_leases else compiled_rules(*pools)
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


@dataclass(frozen=True)
class Refusal:
    """A request that was forbidden."""

    said: str
    message: str
    namespace: str
    at: float

    def __str__(self) -> str:
        """Say who was refused what, and why."""
        return f"{self.said}: {self.message}"


@dataclass
class Record:
    """
    What programs of ours did, as audit logs tell it.

    A refusal is early when the same was granted later, and a Role of that namespace was renewed
    just then or the API server had just started: rights take a moment to be in force, and programs
    come to know of a member before the operator has renewed their Role. They have to ask again.

    Attributes:
        used: How often each right was used, by program.
        refused: Requests that were forbidden.
        early: Requests that were forbidden early.
        masters: Requests that came with the rights of a person.
        own_file: Groups that routers with a file of their own asked for something.
    """

    used: dict[str, Counter[Right]] = field(default_factory=dict)
    refused: list[Refusal] = field(default_factory=list)
    early: list[Refusal] = field(default_factory=list)
    masters: list[str] = field(default_factory=list)
    own_file: Counter[str] = field(default_factory=Counter)
    _renewed: dict[str, list[float]] = field(default_factory=dict)
    _started: list[float] = field(default_factory=list)

    def read(self, log: Path) -> None:
        """Take in a log."""
        for event in _events(log):
            self._take(event)

    def _take(self, event: Any) -> None:
        at = datetime.fromisoformat(event["requestReceivedTimestamp"]).timestamp()
        if event["verb"] == API_SERVER_STARTS:
            self._started.append(at)
            return
        where = event.get("objectRef") or {}
        resource = where.get("resource", "")
        answer = event.get("responseStatus") or {}
        if resource in ROLES and event["verb"] in ("create", "patch", "update"):
            self._renewed.setdefault(where.get("namespace", ""), []).append(at)
        program = event.get("userAgent", "")
        if program not in PROGRAMS:
            return
        user = event["user"]["username"]
        if user.endswith(OWN_FILE):
            is_ours = "modelpool.dev" in event.get("requestURI", "")
            self.own_file["modelpool.dev" if is_ours else where.get("apiGroup", "")] += 1
        if not resource or LESS_THAN_SHIPPED in user:
            return
        if where.get("subresource"):
            resource += "/" + where["subresource"]
        right = Right(where.get("apiGroup", ""), resource, event["verb"])
        said = f"{program} as {user}: {right} {where.get('namespace', '')}/{where.get('name', '')}"
        message = str(answer.get("message") or "")
        if answer.get("code") == 403:
            if NAMESPACE_IS_GOING not in message:
                self.refused.append(Refusal(said, message, where.get("namespace", ""), at))
            return
        for each in [each for each in self.refused if each.said == said]:
            if self._is_early(each, at):
                self.refused.remove(each)
                self.early.append(each)
        if not user.startswith("system:serviceaccount:"):
            self.masters.append(said)
        else:
            self.used.setdefault(program, Counter())[right] += 1

    def _is_early(self, refusal: Refusal, granted_at: float) -> bool:
        renewed = self._renewed.get(refusal.namespace, [])
        return any(refusal.at - RENEWED_S <= each <= granted_at for each in renewed) or any(
            0 <= refusal.at - each <= STARTED_S for each in self._started
        )

    def unused(self) -> list[str]:
        """Return the rights that were not used, as ``program: verb resource``."""
        found = []
        for program, shipped in shipped_rights().items():
            idle = shipped - set(self.used.get(program, ()))
            if program == OPERATOR_MANAGER:
                idle = {each for each in idle if not _is_for_others(each)}
            found += [f"{program}: {each}" for each in sorted(idle)]
        return found

    def table(self) -> Iterator[str]:
        """Yield the lines of a table of all rights that are shipped."""
        for program, shipped in shipped_rights().items():
            yield f"{program}:"
            for right in sorted(shipped):
                times = self.used.get(program, Counter())[right]
                why = str(times) if times else "never"
                if program == OPERATOR_MANAGER and right in ONLY_GRANTED:
                    why = "granted to routers"
                elif _is_for_owners(right):
                    why = "asked for by admission"
                yield f"  {why:>22}  {right}"


ONLY_GRANTED = frozenset({Right("", "pods", "get"), Right("apps", "replicasets", "watch")})
"""What the operator has for routers alone: nobody can grant what it does not have itself."""


def _is_for_others(right: Right) -> bool:
    return right in ONLY_GRANTED or _is_for_owners(right)


def _is_for_owners(right: Right) -> bool:
    """Whether admission alone asks for it, before an owner is named that blocks deletion."""
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
    wrong = [*dict.fromkeys(map(str, record.refused)), *dict.fromkeys(record.masters)]
    print(*(f"early: {each}" for each in record.early), sep="\n")
    print(*(f"WRONG: {each}" for each in wrong), sep="\n")
    print(*(f"never used: {each}" for each in record.unused()), sep="\n")
    return 1 if wrong or record.unused() else 0


if __name__ == "__main__":
    sys.exit(main())
