"""
One ModelDeployment in a cluster in memory, with Kueue, a node and the operator, moved by hand.

`Lab.look` is one turn of the operator; everything else moves when the test says so. After every
write `mdep_checks.Checks` has its say.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import conditionspage
import memroles
from mdep_checks import OPERATOR, Checks, ordinal_of, role_of
from memcluster import Admit, MemCluster, MemPort, Request, copied
from memkueue import GROUP, Garbage, Kueue, Node, condition, going
from modelpool_api.names import REPLACEMENTS_ANNOTATION, ROUTING_LABEL, group_name
from modelpool_kube.errors import KubeError
from modelpool_kube.kinds import (
    INSTANCE_TYPES,
    MODEL_DEPLOYMENTS,
    PODS,
    SERVICES,
    WORKLOADS,
    Json,
    uid,
)
from modelpool_operator.engine.modeldeployment import ModelDeployments
from modelpool_operator.plan.modeldeployment.actions import Note

NAMESPACE = "team-a"
NAME = "chat"
KEY = (NAMESPACE, NAME)
CARD = "nvidia.com/gpu"
SLICE = "nvidia.com/gpumem-percentage"
CORES = "nvidia.com/gpucores"
RIGHTS = memroles.of_operator()


def role(name: str = "server", **fields: Any) -> Json:
    """Return a role as people write it."""
    return {"name": name, "instanceType": "a", "image": "engine:1", **fields}


def instance_type(queue: str | None, *, cards: bool = True, **spec: Any) -> Json:
    """Return the spec of an InstanceType."""
    found: Json = {"queueName": queue, "perCard": {"cpu": "4", "memory": "16Gi"}, **spec}
    if cards:
        found["accelerator"] = {"card": CARD, "sliceMemory": SLICE, "sliceCores": CORES}
    return found


def may(request: Request) -> bool:
    """Insist that the shipped Role allows *request*."""
    assert RIGHTS(request), f"the Role does not allow {request}"
    return True


class Lab:
    """A cluster, what moves in it, and an operator."""

    def __init__(
        self,
        *roles: Json,
        cards: int = 100,
        admits: bool = True,
        admit: Admit | None = None,
        **spec: Any,
    ) -> None:
        self.cluster = MemCluster()
        if admit is not None:
            self.cluster.admit[MODEL_DEPLOYMENTS] = admit
        self.kueue = Kueue(self.cluster)
        self.kueue.may_admit = admits
        self.node = Node(self.cluster)
        self.garbage = Garbage(self.cluster)
        self.checks = Checks(self.cluster, NAMESPACE, NAME)
        self.cluster.after_write.append(conditionspage.check_write)
        self.told: list[Note] = []
        self.errors: list[KubeError] = []
        self._starts = 0
        self.port: MemPort
        self.operator: ModelDeployments
        self.restart()
        self.set_quota("a", cards)
        self.set_quota("b", cards)
        for name in ("a", "b"):
            self.cluster.put(
                INSTANCE_TYPES,
                None,
                {"metadata": {"name": name}, "spec": instance_type(f"queue-{name}")},
            )
        self.cluster.put(
            MODEL_DEPLOYMENTS,
            NAMESPACE,
            {
                "metadata": {"name": NAME},
                "spec": {
                    "model": {"name": "tiny"},
                    "engine": {"name": "vLLM"},
                    "roles": [copied(each) for each in roles or (role(),)],
                    **spec,
                },
            },
        )
        self.made = uid(self.deployment)

    def restart(self) -> MemPort:
        """Kill the operator and start another one."""
        self._starts += 1
        self.port = self.cluster.port(f"{OPERATOR}-{self._starts}")
        self.port.rights = may
        self.operator = ModelDeployments(self.port, self._tell)
        return self.port

    async def _tell(self, obj: Json, note: Note) -> None:
        self.told.append(note)

    def set_quota(self, name: str, cards: int) -> None:
        """Give the queue of an instance type so many cards."""
        self.kueue.quota[f"queue-{name}"] = {CARD: Decimal(cards)}

    # The operator and the world

    async def look(self, times: int = 1) -> float | None:
        """Let the operator have so many turns; what it raises is kept in `errors`."""
        after: float | None = None
        for _ in range(times):
            self.checks.begin_pass()
            try:
                after = await self.operator.reconcile(KEY)
                self.checks.end_pass()
            except KubeError as error:
                self.errors.append(error)
                after = 0.0
            self.cluster.advance(2.0)
        return after

    def move(self, limit: int = 1000) -> bool:
        """Let everything but the operator move until it stands still; return whether it did."""
        moved = False
        for _ in range(limit):
            if not (self.kueue.step() or self.node.step() or self.garbage.step()):
                return moved
            moved = True
        raise AssertionError("the world does not come to rest")

    async def settle(self, limit: int = 200) -> None:
        """Let everything move until nothing does."""
        for _ in range(limit):
            version = self.cluster.version
            await self.look()
            self.move()
            if self.cluster.version == version:
                return
        raise AssertionError(f"it does not come to rest: {self.record}")

    async def until(self, what: str, limit: int = 100) -> None:
        """Move until the only slot is in phase *what* (empty: there is none)."""
        for _ in range(limit):
            phases = {each["phase"] for each in self.checks.slots().values()}
            if phases == ({what} if what else set()):
                return
            await self.look()
            self.move()
        raise AssertionError(f"never in {what!r}: {self.record}")

    async def quiet(self, passes: int = 10) -> None:
        """Check that a pass writes nothing when nothing happens."""
        version = self.cluster.version
        writes = len([each for each in self.port.requests if each.is_write])
        await self.look(passes)
        assert self.cluster.version == version, self.cluster.writes[-1]
        assert len([each for each in self.port.requests if each.is_write]) == writes

    # Reading

    @property
    def deployment(self) -> Json:
        """Return the deployment."""
        return self.cluster.must(MODEL_DEPLOYMENTS, NAMESPACE, NAME)

    @property
    def record(self) -> str | None:
        """Return the record of replacements."""
        annotations = self.deployment["metadata"].get("annotations") or {}
        found = annotations.get(REPLACEMENTS_ANNOTATION)
        return None if found is None else str(found)

    def slot(self, name: str = "server") -> Json:
        """Return the open slot of a role."""
        return self.checks.slots()[name]

    def condition(self, kind: str) -> tuple[str, str, str]:
        """Return status, reason and message of a condition."""
        for each in self.deployment["status"]["conditions"]:
            if each["type"] == kind:
                return each["status"], each["reason"], each.get("message", "")
        raise AssertionError(f"no condition {kind}")

    def status(self, name: str = "server") -> Json:
        """Return the status of a role."""
        for each in self.deployment["status"]["roles"]:
            if each["name"] == name:
                found: Json = each
                return found
        raise AssertionError(f"no status of role {name}")

    def pods(self, ordinal: int | None = None, name: str = "server") -> list[Json]:
        """Return the members of a role, or of one replica, by seat."""
        found = [
            pod
            for pod in self.cluster.all(PODS, NAMESPACE)
            if role_of(pod) == name and ordinal in (None, ordinal_of(pod))
        ]
        found.sort(key=lambda pod: (ordinal_of(pod) or 0, pod["metadata"]["name"]))
        return found

    def uids(self, ordinal: int | None = None, name: str = "server") -> list[str]:
        """Return the UIDs of the members of a role, or of one replica."""
        return [uid(pod) for pod in self.pods(ordinal, name)]

    def group(self, ordinal: int = 0, name: str = "server") -> str:
        """Return the name of the group of a replica."""
        return group_name(NAMESPACE, NAME, name, ordinal)

    def workload(self, ordinal: int = 0, name: str = "server") -> Json | None:
        """Return the Workload of a replica, or None."""
        return self.cluster.read(WORKLOADS, NAMESPACE, self.group(ordinal, name))

    def is_admitted(self, ordinal: int = 0, name: str = "server") -> bool:
        """Return whether a replica is admitted."""
        found = self.workload(ordinal, name)
        return found is not None and condition(found, "Admitted") == "True" and not going(found)

    def matched(self, service: str) -> set[str]:
        """Return the UIDs of the Pods that a Service selects and that are not going."""
        selector = self.cluster.must(SERVICES, NAMESPACE, service)["spec"]["selector"]
        return {
            uid(pod)
            for pod in self.cluster.all(PODS, NAMESPACE)
            if not going(pod) and selector.items() <= (pod["metadata"].get("labels") or {}).items()
        }

    def services(self) -> list[str]:
        """Return the names of all Services."""
        return self.cluster.names(SERVICES, NAMESPACE)

    def final(self) -> Json:
        """Return what stands, without UIDs, for comparing two ways to the same end."""
        pods = []
        for pod in self.cluster.all(PODS, NAMESPACE):
            found, spec = pod["metadata"], pod["spec"]
            labels = {
                k: v
                for k, v in found["labels"].items()
                if k not in ("kueue.x-k8s.io/podset", "kueue.x-k8s.io/managed")
            }
            pods.append((found["labels"][GROUP], labels, found["annotations"], spec))
        pods.sort(key=lambda each: (each[0], each[1]["modelpool.dev/member-index"]))
        services = [
            (each["metadata"]["name"], each["spec"])
            for each in self.cluster.all(SERVICES, NAMESPACE)
        ]
        workloads = [
            (each["metadata"]["name"], each["spec"]["queueName"], len(each["spec"]["podSets"]))
            for each in self.cluster.all(WORKLOADS, NAMESPACE)
        ]
        return {"pods": pods, "services": services, "workloads": workloads}

    # Editing

    def edit(self, name: str | None = None, **fields: Any) -> None:
        """Change fields of one role, or of all; None removes a field."""
        roles = self.deployment["spec"]["roles"]
        for each in roles:
            if name in (None, each["name"]):
                for key, value in fields.items():
                    each.pop(key, None) if value is None else each.update({key: value})
        self.patch(roles=roles)

    def patch(self, **spec: Any) -> None:
        """Merge into the spec of the deployment."""
        self.cluster.edit(MODEL_DEPLOYMENTS, NAMESPACE, NAME, {"spec": spec}, actor="user")

    def edit_type(self, name: str, **spec: Any) -> None:
        """Merge into the spec of an InstanceType."""
        self.cluster.edit(INSTANCE_TYPES, None, name, {"spec": spec}, actor="user")

    def remove(self, pod: Json, *, actor: str = "user") -> None:
        """Delete a Pod from outside."""
        self.cluster.remove(PODS, NAMESPACE, pod["metadata"]["name"], actor=actor)

    def vanish(self, pods: Iterable[Json]) -> None:
        """Take Pods out of the store at once."""
        for pod in pods:
            self.cluster.vanish(PODS, NAMESPACE, pod["metadata"]["name"], actor="user")

    def answers(self, pod: Json) -> bool:
        """Return whether Services select *pod*."""
        return (pod["metadata"].get("labels") or {}).get(ROUTING_LABEL) == "true"
