"""
What moves by itself in a cluster, moved step by step: controllers, scheduler, kubelet, collector.

Each part makes at most one write per `step`. It acts on what it saw at its last `look`, so a test
can let it lag: ``replicasets.look()``, change the world, ``replicasets.step(look=False)``. A part
that is not stepped stands still. `World.settle` runs everything until nothing moves.

Imitated where it matters for handing over an accelerator: a ReplicaSet stops counting Pods that
are terminating, a Deployment says which generation it has acted on, a Pod on a lost node stays
for ever, a device is busy until its container has ended.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any

from memcluster import MemCluster, copied
from modelpool_kube import errors
from modelpool_kube.kinds import (
    DEPLOYMENTS,
    NODES,
    PODS,
    REPLICASETS,
    STATEFULSETS,
    Json,
    Kind,
    controller_of,
    is_controlled_by,
    is_going,
)

GPU = "nvidia.com/gpu"
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"


def pod_spec(gpus: int = 1, port: int = 8000, **more: Any) -> Json:
    """Return the spec of a Pod with one container that wants *gpus*."""
    container: Json = {"name": "main", "image": "engine:1", "ports": [{"containerPort": port}]}
    if gpus:
        container["resources"] = {"limits": {GPU: gpus}}
    return {"containers": [container], **more}


def deployment(name: str, *, replicas: int = 0, strategy: str = "Recreate", **pod: Any) -> Json:
    """Return a Deployment of a member as people write it."""
    return {
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "strategy": {"type": strategy},
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": pod_spec(**pod)},
        },
    }


def statefulset(name: str, *, replicas: int = 0, **pod: Any) -> Json:
    """Return a StatefulSet of a member as people write it."""
    return {
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "serviceName": name,
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": pod_spec(**pod)},
        },
    }


def node(name: str, gpus: int = 1) -> Json:
    """Return a Node."""
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "spec": {},
        "status": {
            "allocatable": {GPU: str(gpus)},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def owner(kind: Kind, obj: Json) -> Json:
    """Return the reference of a controller."""
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "name": obj["metadata"]["name"],
        "uid": obj["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def gpus_of(pod: Json) -> int:
    """Return how many accelerators *pod* wants."""
    return sum(
        int(container.get("resources", {}).get("limits", {}).get(GPU, 0))
        for container in pod["spec"]["containers"]
    )


def phase_of(pod: Json) -> str:
    """Return the phase of *pod*."""
    return str(pod.get("status", {}).get("phase", "Pending"))


def is_finished(pod: Json) -> bool:
    """Return whether *pod* is in a final phase."""
    return phase_of(pod) in ("Succeeded", "Failed")


def is_ready(pod: Json) -> bool:
    """Return whether *pod* says that it is ready."""
    return any(
        each["type"] == "Ready" and each["status"] == "True"
        for each in pod.get("status", {}).get("conditions", [])
    )


def runs(pod: Json) -> bool:
    """Return whether a container of *pod* holds its device: started and not ended."""
    return any(
        "running" in status.get("state", {})
        for status in pod.get("status", {}).get("containerStatuses", [])
    )


def with_condition(pod: Json, kind: str, status: str, reason: str = "") -> list[Json]:
    """Return the conditions of *pod* with one set."""
    others = [c for c in pod.get("status", {}).get("conditions", []) if c["type"] != kind]
    return [*others, {"type": kind, "status": status, **({"reason": reason} if reason else {})}]


class Part:
    """Something that moves by itself, and lags as much as the test wants."""

    sees: tuple[Kind, ...] = ()

    def __init__(self, cluster: MemCluster) -> None:
        self.cluster = cluster
        self.name = type(self).__name__
        self.held = False
        """While true, `step` does nothing."""
        self._seen: dict[Kind, list[Json]] = {}

    def look(self) -> None:
        """Take in the world as it is now."""
        self._seen = {kind: self.cluster.all(kind) for kind in self.sees}

    def seen(self, kind: Kind) -> list[Json]:
        """Return what it knows of *kind*."""
        return [copied(obj) for obj in self._seen.get(kind, [])]

    def step(self, *, look: bool = True) -> bool:
        """Make at most one write; return whether there was one to make."""
        if self.held:
            return False
        if look:
            self.look()
        try:
            return self._act()
        except (errors.Conflict, errors.NotFound, errors.AlreadyExists, errors.Forbidden):
            return True  # it acted on something old, and will look again

    def _act(self) -> bool:
        raise NotImplementedError

    def _set_status(self, kind: Kind, obj: Json, status: Json) -> bool:
        old = obj.get("status", {})
        if {**old, **status} == old:
            return False
        meta = obj["metadata"]
        self.cluster.edit_status(kind, meta.get("namespace"), meta["name"], status, actor=self.name)
        return True

    def _scale(self, kind: Kind, obj: Json, replicas: int) -> bool:
        meta = obj["metadata"]
        self.cluster._patch(
            kind,
            meta["namespace"],
            meta["name"],
            {"spec": {"replicas": replicas}},
            meta["resourceVersion"],
            self.name,
        )
        return True


class Deployments(Part):
    """The Deployment controller."""

    sees = (DEPLOYMENTS, REPLICASETS, PODS)

    def _act(self) -> bool:
        return any(self._sync(each) for each in self.seen(DEPLOYMENTS) if not is_going(each))

    def _sync(self, obj: Json) -> bool:
        meta, spec = obj["metadata"], obj["spec"]
        mine = [rs for rs in self.seen(REPLICASETS) if is_controlled_by(rs, meta["uid"])]
        digest = hashlib.sha256(json.dumps(spec["template"], sort_keys=True).encode()).hexdigest()
        digest = digest[:10]
        new = next(
            (rs for rs in mine if rs["metadata"]["labels"]["pod-template-hash"] == digest), None
        )
        old = [rs for rs in mine if rs is not new]
        recreate = spec["strategy"]["type"] == "Recreate"
        if recreate and any(
            self._scale(REPLICASETS, rs, 0) for rs in old if rs["spec"]["replicas"]
        ):
            return True
        old_uids = {rs["metadata"]["uid"] for rs in old}
        old_runs = any(
            (controller_of(pod) or {}).get("uid") in old_uids and not is_finished(pod)
            for pod in self.seen(PODS)
        )
        if not (recreate and old_runs):
            if new is None:
                self._create(obj, digest, len(mine) + 1)
                return True
            if new["spec"]["replicas"] != spec["replicas"]:
                return self._scale(REPLICASETS, new, spec["replicas"])
            if any(self._scale(REPLICASETS, rs, 0) for rs in old if rs["spec"]["replicas"]):
                return True

        def total(field: str, sets: Iterable[Json] = mine) -> int:
            return sum(rs.get("status", {}).get(field, 0) for rs in sets)

        return self._set_status(
            DEPLOYMENTS,
            obj,
            {
                "observedGeneration": meta["generation"],
                "replicas": total("replicas"),
                "readyReplicas": total("readyReplicas"),
                "availableReplicas": total("readyReplicas"),
                "updatedReplicas": total("replicas", [new] if new else []),
            },
        )

    def _create(self, obj: Json, digest: str, revision: int) -> None:
        meta, template = obj["metadata"], copied(obj["spec"]["template"])
        labels = {**template["metadata"]["labels"], "pod-template-hash": digest}
        template["metadata"]["labels"] = labels
        body = {
            "metadata": {
                "name": f"{meta['name']}-{digest}",
                "labels": labels,
                "annotations": {"deployment.kubernetes.io/revision": str(revision)},
                "ownerReferences": [owner(DEPLOYMENTS, obj)],
            },
            "spec": {
                "replicas": obj["spec"]["replicas"],
                "selector": {
                    "matchLabels": {
                        **obj["spec"]["selector"]["matchLabels"],
                        "pod-template-hash": digest,
                    }
                },
                "template": template,
            },
        }
        self.cluster.put(REPLICASETS, meta["namespace"], body, actor=self.name)


class ReplicaSets(Part):
    """The ReplicaSet controller. It counts no Pod that is terminating or finished."""

    sees = (REPLICASETS, PODS)

    def _act(self) -> bool:
        return any(self._sync(each) for each in self.seen(REPLICASETS) if not is_going(each))

    def _sync(self, obj: Json) -> bool:
        meta, spec = obj["metadata"], obj["spec"]
        for pod in self.seen(PODS):
            labels = pod["metadata"].get("labels", {})
            wanted = spec["selector"]["matchLabels"]
            if (
                controller_of(pod) is None
                and pod["metadata"]["namespace"] == meta["namespace"]
                and wanted.items() <= labels.items()
                and not is_going(pod)
                and not is_finished(pod)
            ):
                references = {"metadata": {"ownerReferences": [owner(REPLICASETS, obj)]}}
                name = pod["metadata"]["name"]
                self.cluster.edit(PODS, meta["namespace"], name, references, actor=self.name)
                return True
        active = [
            pod
            for pod in self.seen(PODS)
            if is_controlled_by(pod, meta["uid"]) and not is_going(pod) and not is_finished(pod)
        ]
        missing = spec["replicas"] - len(active)
        if missing > 0:
            self.cluster.put(
                PODS,
                meta["namespace"],
                {
                    "metadata": {
                        "generateName": f"{meta['name']}-",
                        **copied(spec["template"]["metadata"]),
                        "ownerReferences": [owner(REPLICASETS, obj)],
                    },
                    "spec": copied(spec["template"]["spec"]),
                },
                actor=self.name,
            )
            return True
        if missing < 0:
            active.sort(key=lambda pod: ("nodeName" in pod["spec"], is_ready(pod)))
            name = active[0]["metadata"]["name"]
            self.cluster.remove(PODS, meta["namespace"], name, actor=self.name)
            return True
        return self._set_status(
            REPLICASETS,
            obj,
            {
                "observedGeneration": meta["generation"],
                "replicas": len(active),
                "readyReplicas": sum(map(is_ready, active)),
            },
        )


class StatefulSets(Part):
    """The StatefulSet controller: one Pod per identity, in order, finished ones made anew."""

    sees = (STATEFULSETS, PODS)

    def _act(self) -> bool:
        return any(self._sync(each) for each in self.seen(STATEFULSETS) if not is_going(each))

    def _sync(self, obj: Json) -> bool:
        meta, spec = obj["metadata"], obj["spec"]
        digest = hashlib.sha256(json.dumps(spec["template"], sort_keys=True).encode()).hexdigest()
        mine = {
            int(pod["metadata"]["name"].rpartition("-")[2]): pod
            for pod in self.seen(PODS)
            if is_controlled_by(pod, meta["uid"])
        }
        for number in sorted(mine, reverse=True):
            pod = mine[number]
            old = pod["metadata"]["labels"]["controller-revision-hash"] != digest[:10]
            unwanted = number >= spec["replicas"]
            if not is_going(pod) and (unwanted or is_finished(pod) or old):
                self.cluster.remove(
                    PODS, meta["namespace"], pod["metadata"]["name"], actor=self.name
                )
                return True
        for number in range(spec["replicas"]):
            if number not in mine:
                labels = {
                    **spec["template"]["metadata"]["labels"],
                    "controller-revision-hash": digest[:10],
                }
                body = {
                    "metadata": {
                        "name": f"{meta['name']}-{number}",
                        "labels": labels,
                        "ownerReferences": [owner(STATEFULSETS, obj)],
                    },
                    "spec": copied(spec["template"]["spec"]),
                }
                self.cluster.put(PODS, meta["namespace"], body, actor=self.name)
                return True
            if is_going(mine[number]) or not is_ready(mine[number]):
                break
        return self._set_status(
            STATEFULSETS,
            obj,
            {
                "observedGeneration": meta["generation"],
                "replicas": len(mine),
                "readyReplicas": sum(map(is_ready, mine.values())),
            },
        )


class Scheduler(Part):
    """Binds Pods to Nodes with free accelerators; a terminating Pod still holds its own."""

    sees = (PODS, NODES)

    def _act(self) -> bool:
        return any(self._place(pod) for pod in self.seen(PODS))

    def _place(self, pod: Json) -> bool:
        meta, spec = pod["metadata"], pod["spec"]
        if spec.get("nodeName") or is_going(pod) or is_finished(pod) or spec.get("schedulingGates"):
            return False
        for each in self.seen(NODES):
            name = each["metadata"]["name"]
            used = sum(
                gpus_of(other)
                for other in self.seen(PODS)
                if other["spec"].get("nodeName") == name and not is_finished(other)
            )
            free = int(each["status"]["allocatable"][GPU]) - used
            selector = spec.get("nodeSelector", {})
            fits = selector.items() <= each["metadata"].get("labels", {}).items()
            usable = (
                fits and not each["spec"].get("taints") and not each["spec"].get("unschedulable")
            )
            if usable and gpus_of(pod) <= free:
                self.cluster.set_unchecked(
                    PODS,
                    meta["namespace"],
                    meta["name"],
                    {
                        "spec": {"nodeName": name},
                        "status": {"conditions": with_condition(pod, "PodScheduled", "True")},
                    },
                    actor=self.name,
                )
                return True
        conditions = with_condition(pod, "PodScheduled", "False", "Unschedulable")
        return self._set_status(PODS, pod, {"conditions": conditions})


class Kubelet(Part):
    """
    Runs Pods on their nodes.

    A Pod goes Pending, Running, Ready, one step each; terminating, its containers end in one step
    and the Pod is taken out in the next.
    """

    sees = (PODS, NODES)

    def __init__(self, cluster: MemCluster) -> None:
        super().__init__(cluster)
        self.lost: set[str] = set()
        """Nodes whose kubelet is gone."""
        self.stubborn: set[str] = set()
        """Pods whose containers do not end yet."""
        self.answers: Callable[[Json], bool] = lambda pod: True
        """Whether a running Pod passes its readiness probe."""
        self._broken: set[str] = set()
        self._count = 0

    def step(self, *, look: bool = True) -> bool:
        """Make a step; it knows its own containers, so it lags only by standing still."""
        return super().step(look=True)

    def _act(self) -> bool:
        return any(self._sync(pod) for pod in self.seen(PODS))

    def _sync(self, pod: Json) -> bool:
        name, where = pod["metadata"]["name"], pod["spec"].get("nodeName")
        is_broken = pod["metadata"]["uid"] in self._broken
        if where is None or where in self.lost or is_broken and not is_going(pod):
            return False
        if is_going(pod):
            if name in self.stubborn and runs(pod):
                return False
            if runs(pod):
                return self._end(pod, 143)
            if pod["metadata"].get("deletionGracePeriodSeconds", 0) == 0:
                return False  # a finalizer holds it
            self.cluster._delete(PODS, pod["metadata"]["namespace"], name, self.name, grace_s=0)
            return True
        if is_finished(pod):
            return False
        if phase_of(pod) == "Pending":
            return self._start(pod, where)
        ready = runs(pod) and self.answers(pod)
        if ready == is_ready(pod):
            return False
        statuses = [{**each, "ready": ready} for each in pod["status"].get("containerStatuses", [])]
        conditions = with_condition(pod, "Ready", "True" if ready else "False")
        return self._set_status(
            PODS, pod, {"conditions": conditions, "containerStatuses": statuses}
        )

    def _start(self, pod: Json, where: str) -> bool:
        busy = sum(
            gpus_of(other)
            for other in self.seen(PODS)
            if other["spec"].get("nodeName") == where and runs(other)
        )
        host = self.cluster.must(NODES, None, where)
        if busy + gpus_of(pod) > int(host["status"]["allocatable"][GPU]):
            # The scheduler believed in it; the device plugin knows better.
            return self._set_status(
                PODS, pod, {"phase": "Failed", "reason": "UnexpectedAdmissionError"}
            )
        self._count += 1
        container = {
            "name": "main",
            "ready": False,
            "restartCount": 0,
            "state": {"running": {"startedAt": self.cluster._stamp()}},
        }
        return self._set_status(
            PODS,
            pod,
            {
                "phase": "Running",
                "podIP": f"10.0.0.{self._count}",
                "startTime": self.cluster._stamp(),
                "containerStatuses": [container],
                "conditions": with_condition(pod, "Ready", "False"),
            },
        )

    def _end(self, pod: Json, code: int, *, phase: str | None = None, reason: str = "") -> bool:
        statuses = [
            {
                **each,
                "ready": False,
                "state": {"terminated": {"exitCode": code, "reason": reason or "Error"}},
            }
            for each in pod["status"].get("containerStatuses", [])
        ]
        status: Json = {
            "containerStatuses": statuses,
            "conditions": with_condition(pod, "Ready", "False"),
        }
        if phase is not None:
            status |= {"phase": phase, "reason": reason}
        return self._set_status(PODS, pod, status)

    # Mishaps

    def wait_with(self, namespace: str, name: str, reason: str, restarts: int = 0) -> None:
        """Let the container of a Pod wait: ImagePullBackOff, CrashLoopBackOff ..."""
        pod = self.cluster.must(PODS, namespace, name)
        self._broken.add(pod["metadata"]["uid"])
        state: Json = {"waiting": {"reason": reason, "message": "simulated"}}
        container = {"name": "main", "ready": False, "restartCount": restarts, "state": state}
        if restarts:
            container["lastState"] = {"terminated": {"exitCode": 1, "reason": "Error"}}
        conditions = with_condition(pod, "Ready", "False")
        self._set_status(PODS, pod, {"containerStatuses": [container], "conditions": conditions})

    def fail(self, namespace: str, name: str, reason: str = "Evicted", code: int = 137) -> None:
        """End a Pod in phase Failed and leave it behind, containers ended."""
        pod = self.cluster.must(PODS, namespace, name)
        self._end(pod, code, phase="Failed", reason=reason)

    def lose(self, name: str) -> None:
        """Lose a node: nothing on it moves any more, and nobody knows what it does."""
        self.lost.add(name)
        conditions = [{"type": "Ready", "status": "Unknown"}]
        self.cluster.edit_status(NODES, None, name, {"conditions": conditions}, actor=self.name)

    def find(self, name: str) -> None:
        """Find a lost node again."""
        self.lost.discard(name)
        conditions = [{"type": "Ready", "status": "True"}]
        self.cluster.edit_status(NODES, None, name, {"conditions": conditions}, actor=self.name)


class PodCollector(Part):
    """
    Evicts from lost nodes, and takes Pods out whose node is deleted or out of service.

    Only what is terminating is taken out by force, as in a real cluster.
    """

    sees = (PODS, NODES)

    def _act(self) -> bool:
        nodes = {each["metadata"]["name"]: each for each in self.seen(NODES)}
        for pod in self.seen(PODS):
            where = pod["spec"].get("nodeName")
            if where is None:
                continue
            meta = pod["metadata"]
            host = nodes.get(where)
            taints = [] if host is None else host["spec"].get("taints", [])
            gone = host is None or any(taint["key"] == OUT_OF_SERVICE for taint in taints)
            lost = host is not None and any(
                each["type"] == "Ready" and each["status"] != "True"
                for each in host["status"]["conditions"]
            )
            if gone and is_going(pod):
                if meta.get("deletionGracePeriodSeconds", 0) > 0:
                    self.cluster._delete(
                        PODS, meta["namespace"], meta["name"], self.name, grace_s=0
                    )
                    return True
            elif (gone or lost) and not is_going(pod) and not is_finished(pod):
                self.cluster.remove(PODS, meta["namespace"], meta["name"], actor=self.name)
                return True
        return False


class Collector(Part):
    """Deletes what has only owners that are gone, in the background."""

    def _act(self) -> bool:
        uids = {
            obj["metadata"]["uid"]
            for objects in self.cluster._objects.values()
            for obj in objects.values()
        }
        for kind, objects in self.cluster._objects.items():
            for (namespace, name), obj in sorted(objects.items()):
                owners = obj["metadata"].get("ownerReferences") or []
                if owners and not is_going(obj) and not {o["uid"] for o in owners} & uids:
                    self.cluster.remove(kind, namespace, name, actor=self.name)
                    return True
        return False


class World:
    """A cluster with everything that moves in it."""

    def __init__(self, cluster: MemCluster | None = None, *, gpus: int = 1) -> None:
        self.cluster = MemCluster() if cluster is None else cluster
        self.deployments = Deployments(self.cluster)
        self.replicasets = ReplicaSets(self.cluster)
        self.statefulsets = StatefulSets(self.cluster)
        self.scheduler = Scheduler(self.cluster)
        self.kubelet = Kubelet(self.cluster)
        self.pods = PodCollector(self.cluster)
        self.collector = Collector(self.cluster)
        self.parts: list[Part] = [
            self.deployments,
            self.replicasets,
            self.statefulsets,
            self.scheduler,
            self.kubelet,
            self.pods,
            self.collector,
        ]
        if gpus:
            self.cluster.put(NODES, None, node("n1", gpus))

    def step(self) -> bool:
        """Let every part make one step; return whether any moved."""
        return any([part.step() for part in self.parts])

    def settle(self, limit: int = 500) -> int:
        """Run until nothing moves; return the number of rounds."""
        for rounds in range(limit):
            if not self.step():
                return rounds
        raise AssertionError(f"the world still moves after {limit} rounds")

    def running(self) -> list[str]:
        """Return the names of Pods that hold a device."""
        return [pod["metadata"]["name"] for pod in self.cluster.all(PODS) if runs(pod)]
