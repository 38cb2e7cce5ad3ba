"""
Kueue for the cluster in memory, pod groups only, moved step by step; and a node that is quick.

Written from Kueue's own documentation and source, apart from the code it is used to test, with its
manners that matter when replicas are replaced: a Workload is matched to Pods by name, PodSet names
and counts alone and adopts newcomers; deleting a Pod frees nothing; deleting a Workload stops all
members first. Every step is at most one write. Nothing is admitted unless `may_admit` says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from memcluster import MemCluster, copied
from modelpool_kube import errors
from modelpool_kube.kinds import MODEL_DEPLOYMENTS, PODS, SERVICES, WORKLOADS, Json

QUEUE = "kueue.x-k8s.io/queue-name"
GROUP = "kueue.x-k8s.io/pod-group-name"
TOTAL = "kueue.x-k8s.io/pod-group-total-count"
ROLE = "kueue.x-k8s.io/role-hash"
MANAGED = "kueue.x-k8s.io/managed"
GATE = "kueue.x-k8s.io/admission"
IN_USE = "kueue.x-k8s.io/resource-in-use"
MARKER = "kueue.x-k8s.io/is-group-workload"

_SUFFIXES = {"": Decimal(1), "m": Decimal("0.001"), "Gi": Decimal(2**30), "Mi": Decimal(2**20)}


def amount(text: str) -> Decimal:
    """Return a quantity as these tests write them."""
    digits = text.rstrip("GiMm")
    return Decimal(digits) * _SUFFIXES[text[len(digits) :]]


def labels_of(obj: Json) -> Json:
    """Return the labels of *obj*."""
    found: Json = obj["metadata"].get("labels") or {}
    return found


def finalizers_of(obj: Json) -> list[str]:
    """Return the finalizers of *obj*."""
    return list(obj["metadata"].get("finalizers") or [])


def going(obj: Json) -> bool:
    """Return whether somebody asked to delete *obj*."""
    return obj["metadata"].get("deletionTimestamp") is not None


def gated(pod: Json) -> bool:
    """Return whether Kueue holds *pod* back."""
    return any(gate["name"] == GATE for gate in pod["spec"].get("schedulingGates") or [])


def condition(workload: Json, kind: str) -> str | None:
    """Return the status of a condition, or None."""
    for each in (workload.get("status") or {}).get("conditions") or []:
        if each["type"] == kind:
            return str(each["status"])
    return None


def is_runnable(pod: Json) -> bool:
    """Return whether a member counts: not failed, and not going without ever having a node."""
    failed = (pod.get("status") or {}).get("phase") == "Failed"
    return not failed and not (going(pod) and not pod["spec"].get("nodeName"))


def pod_sets_of(pods: list[Json]) -> list[Json]:
    """Return the PodSets that *pods* make, the first of each role as the template."""
    by_role: dict[str, list[Json]] = {}
    for pod in pods:
        by_role.setdefault(pod["metadata"]["annotations"][ROLE], []).append(pod)
    return [
        {
            "name": name,
            "count": len(group),
            "template": {"spec": copied(group[0]["spec"])},
        }
        for name, group in sorted(by_role.items())
    ]


def _keeps_what_is_reserved(workload: Json, before: Json | None) -> Json:
    """Refuse other PodSets or another queue while quota is reserved."""
    if before is None or not all(
        condition(each, "QuotaReserved") == "True" for each in (before, workload)
    ):
        return workload
    for field in ("podSets", "queueName"):
        if (workload.get("spec") or {}).get(field) != (before.get("spec") or {}).get(field):
            raise errors.Invalid(f"spec.{field} is immutable while quota is reserved", code=422)
    return workload


class Stepper:
    """Something that moves by itself, at most one write at a step."""

    actor = "stepper"

    def __init__(self, cluster: MemCluster) -> None:
        self.cluster = cluster

    def pods(self) -> list[Json]:
        """Return all Pods, oldest first. Not to be changed."""
        found = list(self.cluster._objects[PODS].values())
        found.sort(key=lambda pod: int(pod["metadata"]["uid"].partition("-")[2]))
        return found

    def workloads(self) -> list[Json]:
        """Return all Workloads, oldest first. Not to be changed."""
        found = list(self.cluster._objects[WORKLOADS].values())
        found.sort(key=lambda each: int(each["metadata"]["uid"].partition("-")[2]))
        return found

    def strip(self, kind: Any, obj: Json, finalizer: str) -> bool:
        """Take *finalizer* off; return whether it was there."""
        have = finalizers_of(obj)
        if finalizer not in have:
            return False
        meta = obj["metadata"]
        left = [each for each in have if each != finalizer]
        patch = {"metadata": {"finalizers": left or None}}
        self.cluster.edit(kind, meta["namespace"], meta["name"], patch, actor=self.actor)
        return True

    def delete(self, kind: Any, obj: Json) -> bool:
        """Ask for *obj* to be deleted; return whether nobody had asked before."""
        if going(obj):
            return False
        meta = obj["metadata"]
        self.cluster.remove(kind, meta["namespace"], meta["name"], actor=self.actor)
        return True


class Kueue(Stepper):
    """The Pod integration of Kueue, its webhook and its quota."""

    actor = "kueue"

    def __init__(self, cluster: MemCluster) -> None:
        super().__init__(cluster)
        self.quota: dict[str, dict[str, Decimal]] = {}
        """What each queue has, by resource; a resource that is not named is free."""
        self.may_admit = False
        """Whether Workloads with quota are admitted by themselves."""
        self.may_reserve = True
        self.events: list[tuple[str, str]] = []
        """Warnings: reason and group."""
        cluster.admit[PODS] = self._webhook
        cluster.admit[WORKLOADS] = _keeps_what_is_reserved

    # The webhook

    def _webhook(self, pod: Json, before: Json | None) -> Json:
        labels = labels_of(pod)
        annotations = pod["metadata"].get("annotations") or {}
        if before is not None:
            if GROUP in labels_of(before) and labels.get(GROUP) != labels_of(before)[GROUP]:
                raise errors.Invalid("the group of a Pod is immutable", code=422)
            return pod
        if QUEUE not in labels:
            return pod
        if (GROUP in labels) != (TOTAL in annotations):
            raise errors.Invalid("group name and total count come together", code=422)
        if TOTAL in annotations and int(annotations[TOTAL]) < 1:
            raise errors.Invalid("the total count must be at least 1", code=422)
        made = copied(pod)
        meta = made["metadata"]
        meta["labels"] = {**labels, MANAGED: "true"}
        meta["finalizers"] = [*finalizers_of(pod), MANAGED]
        meta.setdefault("annotations", {}).setdefault(ROLE, "none")
        gates = made["spec"].get("schedulingGates") or []
        made["spec"]["schedulingGates"] = [*gates, {"name": GATE}]
        return made

    # Steps

    def step(self) -> bool:
        """Make one write of whatever is due; return whether there was one."""
        return (
            self.stop()
            or self.finalise()
            or self.compose()
            or self.reserve()
            or (self.may_admit and self.admit())
            or self.ungate()
        )

    def run(self, limit: int = 500) -> None:
        """Step until nothing is due."""
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError("Kueue does not come to rest")

    def groups(self) -> dict[tuple[str, str], list[Json]]:
        """Return the members of each group, oldest first."""
        found: dict[tuple[str, str], list[Json]] = {}
        for pod in self.pods():
            labels = labels_of(pod)
            if GROUP in labels and MANAGED in labels:
                found.setdefault((pod["metadata"]["namespace"], labels[GROUP]), []).append(pod)
        return found

    def compose(self) -> bool:
        """Make a Workload of a complete group, or fit a standing one to its group."""
        return any(self._compose(where, pods) for where, pods in self.groups().items())

    def _compose(self, where: tuple[str, str], pods: list[Json]) -> bool:
        namespace, group = where
        workload = self.cluster._objects[WORKLOADS].get(where)
        if workload is not None:
            marked = (workload["metadata"].get("annotations") or {}).get(MARKER) == "true"
            if not marked:
                self.events.append(("ErrWorkloadCompose", group))
                return False
            return not going(workload) and self._fit(workload, pods)
        for pod in pods:
            if not is_runnable(pod) and self.strip(PODS, pod, MANAGED):
                return True
        pods = [pod for pod in pods if is_runnable(pod)]
        totals = {pod["metadata"]["annotations"][TOTAL] for pod in pods}
        queues = {labels_of(pod)[QUEUE] for pod in pods}
        if len(totals) != 1 or len(queues) != 1 or not next(iter(totals)).isdigit():
            return False
        total = int(next(iter(totals)))
        if len(pods) < total:
            self.events.append(("ErrWorkloadCompose", group))
            return False
        if len(pods) > total:
            return self._trim(pods, total)
        sets = pod_sets_of(pods)
        if len(sets) > 18:
            return False
        body = {
            "metadata": {
                "name": group,
                "annotations": {MARKER: "true"},
                "finalizers": [IN_USE],
                "ownerReferences": [_owner(pod) for pod in pods],
            },
            "spec": {"queueName": next(iter(queues)), "podSets": sets, "active": True},
        }
        self.cluster.put(WORKLOADS, namespace, body, actor=self.actor)
        return True

    def _trim(self, pods: list[Json], total: int) -> bool:
        """Remove the excess: keep those with our finalizer, then the ungated, then the older."""
        ranked = sorted(pods, key=lambda pod: (MANAGED not in finalizers_of(pod), gated(pod)))
        for pod in ranked[total:]:
            if self.strip(PODS, pod, MANAGED):
                return True
            if self.delete(PODS, pod):
                return True
        return False

    def _fit(self, workload: Json, pods: list[Json]) -> bool:
        pods = [pod for pod in pods if is_runnable(pod)]
        if not pods:
            return False
        meta = workload["metadata"]
        totals = {pod["metadata"]["annotations"][TOTAL] for pod in pods}
        total = next(iter(totals))
        if len(totals) == 1 and total.isdigit() and len(pods) > int(total):
            return self._trim(pods, int(total))
        there = {each["name"]: each.get("count", 1) for each in workload["spec"]["podSets"]}
        counts = Counter(pod["metadata"]["annotations"][ROLE] for pod in pods)
        if all(count <= there.get(name, 0) for name, count in counts.items()):
            # Neither template, request nor queue is looked at: a newcomer is adopted.
            known = {each["uid"] for each in meta.get("ownerReferences") or []}
            missing = [pod for pod in pods if pod["metadata"]["uid"] not in known]
            if not missing:
                return False
            owners = [*(meta.get("ownerReferences") or []), *map(_owner, missing)]
            patch = {"metadata": {"ownerReferences": owners}}
            self.cluster.edit(WORKLOADS, meta["namespace"], meta["name"], patch, actor=self.actor)
            return True
        if condition(workload, "QuotaReserved") != "True" and all(map(gated, pods)):
            patch = {"spec": {"podSets": pod_sets_of(pods)}}
            self.cluster.edit(WORKLOADS, meta["namespace"], meta["name"], patch, actor=self.actor)
            return True
        return self.delete(WORKLOADS, workload)

    def reserve(self) -> bool:
        """Give quota to the oldest Workload that fits, or say that it has to wait."""
        if not self.may_reserve:
            return False
        for workload in self.workloads():
            if (
                going(workload)
                or workload["spec"].get("active") is False
                or condition(workload, "QuotaReserved") == "True"
                or condition(workload, "Evicted") == "True"
            ):
                continue
            queue = workload["spec"].get("queueName")
            free = self.free(queue)
            if free is None or any(
                wanted > free.get(name, wanted) for name, wanted in usage(workload).items()
            ):
                if condition(workload, "QuotaReserved") is None:
                    why = f"couldn't assign flavors: insufficient unused quota in {queue}"
                    self._conditions(workload, QuotaReserved=("False", "Pending", why))
                    return True
                continue
            assignments = [
                {"name": each["name"], "count": each.get("count", 1)}
                for each in workload["spec"]["podSets"]
            ]
            admission = {"clusterQueue": f"cq-{queue}", "podSetAssignments": assignments}
            self._conditions(workload, admission, QuotaReserved=("True", "QuotaReserved"))
            return True
        return False

    def free(self, queue: str) -> dict[str, Decimal] | None:
        """Return what is left of a queue; None when it does not exist."""
        if queue not in self.quota:
            return None
        left = dict(self.quota[queue])
        for workload in self.workloads():
            mine = workload["spec"].get("queueName") == queue
            if mine and condition(workload, "QuotaReserved") == "True":
                for name, used in usage(workload).items():
                    if name in left:
                        left[name] -= used
        return left

    def admit(self, name: str | None = None) -> bool:
        """Admit the oldest Workload with quota, or the one called *name*."""
        for workload in self.workloads():
            if (
                not going(workload)
                and name in (None, workload["metadata"]["name"])
                and condition(workload, "QuotaReserved") == "True"
                and condition(workload, "Admitted") != "True"
            ):
                self._conditions(workload, Admitted=("True", "Admitted"))
                return True
        return False

    def ungate(self) -> bool:
        """Take the gate off one member of an admitted Workload."""
        for workload in self.workloads():
            if going(workload) or condition(workload, "Admitted") != "True":
                continue
            if condition(workload, "Evicted") == "True":
                continue
            owners = {each["uid"] for each in workload["metadata"].get("ownerReferences") or []}
            for pod in self.pods():
                if pod["metadata"]["uid"] in owners and gated(pod) and not going(pod):
                    meta = pod["metadata"]
                    gates = [g for g in pod["spec"]["schedulingGates"] if g["name"] != GATE]
                    patch = {
                        "metadata": {"labels": {"kueue.x-k8s.io/podset": "assigned"}},
                        "spec": {
                            "schedulingGates": gates or None,
                            "nodeSelector": {"flavor": "default"},
                        },
                    }
                    self.cluster.edit(
                        PODS, meta["namespace"], meta["name"], patch, actor=self.actor
                    )
                    return True
        return False

    def stop(self) -> bool:
        """Stop members of Workloads that are being deleted, were evicted, or never admitted."""
        groups = self.groups()
        for workload in self.workloads():
            meta = workload["metadata"]
            pods = groups.get((meta["namespace"], meta["name"]), [])
            if going(workload):
                if any(self.delete(PODS, pod) for pod in pods):
                    return True
                if any(self.strip(PODS, pod, MANAGED) for pod in pods):
                    return True
                if self.strip(WORKLOADS, workload, IN_USE):
                    return True
                continue
            if (meta.get("annotations") or {}).get(MARKER) != "true":
                continue
            inactive = workload["spec"].get("active") is False
            if condition(workload, "Evicted") == "True" or inactive:
                running = [pod for pod in pods if not gated(pod)]
                if any(self.delete(PODS, pod) for pod in running):
                    return True
                alive = [
                    pod for pod in running if pod["metadata"].get("deletionGracePeriodSeconds")
                ]
                if not alive and condition(workload, "QuotaReserved") == "True":
                    self._give_back(workload)
                    return True
            elif condition(workload, "Admitted") != "True" and any(
                self.delete(PODS, pod) for pod in pods if not gated(pod)
            ):
                return True
        return False

    def _give_back(self, workload: Json) -> None:
        meta, inactive = workload["metadata"], workload["spec"].get("active") is False
        conditions: dict[str, tuple[str, ...]] = {
            "QuotaReserved": ("False", "Pending"),
            "Admitted": ("False", "NoReservation"),
        }
        if not inactive:
            conditions |= {"Requeued": ("True", "Preempted"), "Evicted": ("False", "Requeued")}
        self._conditions(workload, None, **conditions)
        if not inactive:
            status = {"requeueState": {"count": 1}}
            self.cluster.edit_status(
                WORKLOADS, meta["namespace"], meta["name"], status, actor=self.actor
            )

    def finalise(self) -> bool:
        """Let go of Workloads whose members are all gone."""
        groups = self.groups()
        return any(
            self.strip(WORKLOADS, workload, IN_USE)
            for workload in self.workloads()
            if (workload["metadata"]["namespace"], workload["metadata"]["name"]) not in groups
            and (workload["metadata"].get("annotations") or {}).get(MARKER) == "true"
        )

    def evict(self, namespace: str, name: str) -> None:
        """Preempt an admitted Workload; `stop` does the rest."""
        workload = self.cluster._existing(WORKLOADS, namespace, name)
        self._conditions(workload, Evicted=("True", "Preempted"), Preempted=("True", "InCohort"))

    def _conditions(
        self,
        workload: Json,
        admission: Json | None | type[Kueue] = None,
        **conditions: tuple[str, ...],
    ) -> None:
        meta = workload["metadata"]
        old = (workload.get("status") or {}).get("conditions") or []
        kept = [each for each in old if each["type"] not in conditions]
        new = [
            {"type": kind, **dict(zip(("status", "reason", "message"), said, strict=False))}
            for kind, said in conditions.items()
        ]
        status: Json = {"conditions": [*kept, *new]}
        if admission is not None or "QuotaReserved" in conditions:
            status["admission"] = admission
        self.cluster.edit_status(
            WORKLOADS, meta["namespace"], meta["name"], status, actor=self.actor
        )


def _owner(pod: Json) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": pod["metadata"]["name"],
        "uid": pod["metadata"]["uid"],
    }


def usage(workload: Json) -> dict[str, Decimal]:
    """Return what a Workload asks for in all."""
    total: dict[str, Decimal] = {}
    for each in workload["spec"]["podSets"]:
        for container in each["template"]["spec"]["containers"]:
            for name, text in ((container.get("resources") or {}).get("requests") or {}).items():
                total[name] = total.get(name, Decimal(0)) + amount(text) * each.get("count", 1)
    return total


class Node(Stepper):
    """Scheduler and kubelet of one node with room for everything."""

    actor = "node"

    def __init__(self, cluster: MemCluster) -> None:
        super().__init__(cluster)
        self.makes_ready: Callable[[Json], bool] = lambda pod: True
        self.stubborn: set[str] = set()
        """UIDs of Pods that do not end."""

    def step(self) -> bool:
        """Make one write; return whether there was one to make."""
        return any(self._sync(pod) for pod in self.pods())

    def _sync(self, pod: Json) -> bool:
        meta, spec, status = pod["metadata"], pod["spec"], pod.get("status") or {}
        where, name = meta["namespace"], meta["name"]
        if status.get("phase") in ("Failed", "Succeeded") and not going(pod):
            return False
        if going(pod):
            if meta.get("deletionGracePeriodSeconds") and meta["uid"] not in self.stubborn:
                self.cluster._delete(PODS, where, name, self.actor, grace_s=0)
                return True
            return False
        if spec.get("schedulingGates"):
            return False
        if not spec.get("nodeName"):
            bound = {"spec": {"nodeName": "n1"}}
            self.cluster.set_unchecked(PODS, where, name, bound, actor=self.actor)
            return True
        ready = self.makes_ready(pod)
        conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
        if status.get("phase") == "Running" and status.get("conditions") == conditions:
            return False
        container = {"name": "main", "ready": ready, "state": {"running": {}}}
        new = {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "conditions": conditions,
            "containerStatuses": [container],
        }
        self.cluster.edit_status(PODS, where, name, new, actor=self.actor)
        return True

    def fail(self, namespace: str, name: str) -> None:
        """End a Pod in phase Failed."""
        self.cluster.edit_status(PODS, namespace, name, {"phase": "Failed"}, actor=self.actor)


class Garbage(Stepper):
    """Deletes what has only owners that are gone."""

    actor = "garbage"

    def step(self) -> bool:
        """Make one write; return whether there was one to make."""
        kinds = (PODS, WORKLOADS, SERVICES)
        uids = {
            obj["metadata"]["uid"]
            for kind in (*kinds, MODEL_DEPLOYMENTS)
            for obj in self.cluster._objects[kind].values()
        }
        for kind in kinds:
            for obj in list(self.cluster._objects[kind].values()):
                owners = obj["metadata"].get("ownerReferences") or []
                if owners and not any(each["uid"] in uids for each in owners):
                    if self.delete(kind, obj):
                        return True
        return False
