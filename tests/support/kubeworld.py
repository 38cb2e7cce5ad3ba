"""
A cluster in memory with engines in it, for the router's Kubernetes driver.

`KubeWorld` lets the parts of `memcontrollers` move, answers probes as the engine in a Pod would,
and brings about what the driver's contract asks for. `Watchman` looks at every write and holds it
against the invariants: S1, S2, S8, S9, S10.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Callable
from typing import Any

import memroles
from memcluster import MemCluster, MemPort, Request, Write, copied
from memcontrollers import (
    Part,
    World,
    deployment,
    is_finished,
    is_ready,
    owner,
    pod_spec,
    runs,
    statefulset,
)
from modelpool_api.names import (
    APP_COMPONENT_LABEL,
    RECORD_ANNOTATION,
    ROUTING_LABEL,
    SLOT_ANNOTATION,
    SLOT_APPLIED_ANNOTATION,
    group_prefix,
)
from modelpool_api.v1alpha1.modelpool import REFS
from modelpool_kube.kinds import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    LEASES,
    MODEL_DEPLOYMENTS,
    PODS,
    STATEFULSETS,
    WORKLOADS,
    Json,
    Kind,
    annotation,
    is_controlled_by,
    is_going,
)
from modelpool_kube.record import Frozen, decode, read_mark
from modelpool_kube.slotrules import wants
from modelpool_router.core.spec import MemberName, PoolName
from modelpool_router.drivers.base import SlotStanding
from modelpool_router.drivers.kubernetes import (
    KubeLimits,
    KubeMember,
    KubernetesDriver,
    KubeSlot,
    MemberProber,
)
from modelpool_router.drivers.profiles import Profile, ProfileOverrides, profile

NAMESPACE = "lab"
LEASE = "modelpool-gpu0"
QUICK = KubeLimits(
    poll_s=0.002,
    most_poll_s=0.005,
    settle_s=0.001,
    resync_s=0.2,
    look_s=0.02,
    look_again_s=0.005,
    gone_s=0.6,
    retry_first_s=0.005,
    retry_most_s=0.05,
)
"""For tests on a real clock."""
KINDS: dict[str, Kind] = {
    each.kind: each for each in (DEPLOYMENTS, STATEFULSETS, INFERENCE_SERVICES, MODEL_DEPLOYMENTS)
}


class InferenceServices(Part):
    """Passes replicas and mark of an InferenceService on to its Deployment, in one write."""

    sees = (INFERENCE_SERVICES, DEPLOYMENTS)

    def _act(self) -> bool:
        have = {each["metadata"]["name"]: each for each in self.seen(DEPLOYMENTS)}
        return any(self._sync(each, have) for each in self.seen(INFERENCE_SERVICES))

    def _sync(self, obj: Json, have: dict[str, Json]) -> bool:
        name = obj["metadata"]["name"]
        mark = annotation(obj, SLOT_ANNOTATION)
        replicas = obj["spec"].get("replicas", 0)
        below = have.get(name)
        if below is None:
            body = deployment(name, replicas=replicas)
            body["metadata"]["ownerReferences"] = [owner(INFERENCE_SERVICES, obj)]
            self.cluster.put(DEPLOYMENTS, NAMESPACE, body, actor=self.name)
            return True
        if annotation(below, SLOT_ANNOTATION) == mark and below["spec"]["replicas"] == replicas:
            return self._set_status(
                INFERENCE_SERVICES, obj, {"observedGeneration": obj["metadata"]["generation"]}
            )
        patch = {
            "metadata": {"annotations": {SLOT_ANNOTATION: mark}},
            "spec": {"replicas": replicas},
        }
        version = below["metadata"]["resourceVersion"]
        self.cluster._patch(DEPLOYMENTS, NAMESPACE, name, patch, version, self.name)
        return True


class ModelDeployments(Part):
    """Makes and ends the one Pod, and its Workload, of a ModelDeployment with one role of one."""

    sees = (MODEL_DEPLOYMENTS, PODS, WORKLOADS)

    def _act(self) -> bool:
        return any(self._sync(each) for each in self.seen(MODEL_DEPLOYMENTS) if not is_going(each))

    def _sync(self, obj: Json) -> bool:
        name, up = obj["metadata"]["name"], wants(MODEL_DEPLOYMENTS, obj)
        mark = annotation(obj, SLOT_ANNOTATION)
        applied = None if mark is None else f"{mark}={up}"
        if annotation(obj, SLOT_APPLIED_ANNOTATION) != applied:
            patch = {"metadata": {"annotations": {SLOT_APPLIED_ANNOTATION: applied}}}
            version = obj["metadata"]["resourceVersion"]
            self.cluster._patch(MODEL_DEPLOYMENTS, NAMESPACE, name, patch, version, self.name)
            return True
        pods = [pod for pod in self.seen(PODS) if is_controlled_by(pod, obj["metadata"]["uid"])]
        for pod in pods:
            if not is_going(pod) and (not up or is_finished(pod)):
                self.cluster.remove(PODS, NAMESPACE, pod["metadata"]["name"], actor=self.name)
                return True
        group = f"{group_prefix(NAMESPACE, name)}engine-0"
        has_workload = any(each["metadata"]["name"] == group for each in self.seen(WORKLOADS))
        if not up and not pods and has_workload:
            self.cluster.remove(WORKLOADS, NAMESPACE, group, actor=self.name)
            return True
        if up and not has_workload:
            body: Json = {"metadata": {"name": group}, "spec": {}}
            self.cluster.put(WORKLOADS, NAMESPACE, body, actor=self.name)
            return True
        if up and not pods:
            meta = {
                "name": f"{name}-engine-0",
                "labels": {"app": name, ROUTING_LABEL: "true"},
                "ownerReferences": [owner(MODEL_DEPLOYMENTS, obj)],
            }
            body = {"metadata": meta, "spec": pod_spec()}
            self.cluster.put(PODS, NAMESPACE, body, actor=self.name)
            return True
        role = {"name": "engine", "desired": up, "ready": sum(map(is_ready, pods))}
        seen = {"observedGeneration": obj["metadata"]["generation"], "roles": [role]}
        return self._set_status(MODEL_DEPLOYMENTS, obj, seen)


class Engines(MemberProber):
    """Answers for the engines in the Pods of a world."""

    def __init__(self, world: KubeWorld) -> None:
        super().__init__()
        self._world = world
        self.asked: list[tuple[str, str]] = []

    def _pod(self, host: str) -> Json | None:
        for pod in self._world.cluster.all(PODS):
            if pod.get("status", {}).get("podIP") == host and runs(pod):
                return pod
        return None

    async def get(
        self, host: str, port: int, path: str, *, timeout_s: float
    ) -> tuple[int, bytes] | None:
        """Answer as a llama-server would."""
        await asyncio.sleep(0)
        pod = self._pod(host)
        if pod is None:
            return None
        router = self._world.routers.get(pod["metadata"]["name"])
        if router is not None:
            if path != "/readyz" or pod["metadata"]["name"] in self._world.deaf:
                return None
            checks = {"router": "ok", f"pool {router.pool}": router.readiness}
            return 503, json.dumps({"checks": checks}).encode()
        name = self._world.member_of(pod)
        self.asked.append((name, path))
        if name in self._world.deaf:
            return None
        if path == "/slots":
            return 200, json.dumps([{"is_processing": name in self._world.busy}] * 2).encode()
        if path == "/readyz":
            return None
        return (503, b"Loading model") if name in self._world.hanging else (200, b"ok")

    async def refuses(self, host: str, port: int) -> bool:
        """Return whether no engine is there."""
        await asyncio.sleep(0)
        pod = self._pod(host)
        return pod is None or self._world.member_of(pod) in self._world.closed


class KubeWorld:
    """A pool of two members, alpha and beta, and whatever a test wants to happen to it."""

    def __init__(
        self,
        kind: str = "Deployment",
        *,
        members: tuple[str, ...] = ("alpha", "beta"),
        gpus: int = 4,
        step_s: float = 0.001,
        rng: random.Random | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.cluster = MemCluster(clock=self.loop.time)
        self.world = World(self.cluster, gpus=gpus)
        self.kind = KINDS[kind]
        self.names = members
        self.step_s = step_s
        self.rng = rng
        self.busy: set[str] = set()
        self.hanging: set[str] = set()
        self.deaf: set[str] = set()
        self.closed: set[str] = set()
        """Members whose port refuses although their Pod runs."""
        self.failing: set[str] = set()
        """Members whose containers end at once, again and again."""
        self.immortal: set[str] = set()
        self.routers: dict[str, KubernetesDriver] = {}
        """By name; those that have a Pod answer how ready they are."""
        self.refused: list[Request] = []
        """What routers asked for and their Role does not allow."""
        self.unload_s: dict[str, float] = {}
        self._going_since: dict[str, float] = {}
        self.world.kubelet.answers = lambda pod: self.member_of(pod) not in self.hanging
        if self.kind == INFERENCE_SERVICES:
            self.world.parts.insert(0, InferenceServices(self.cluster))
        if self.kind == MODEL_DEPLOYMENTS:
            self.world.parts.insert(0, ModelDeployments(self.cluster))
        for name in members:
            self.add(name)
        self.world.settle()
        self._mover = self.loop.create_task(self._move())

    def add(self, name: str, **more: Any) -> None:
        """Make the object of a member, at 0."""
        if self.kind == STATEFULSETS:
            self.cluster.put(STATEFULSETS, NAMESPACE, statefulset(name, **more))
        elif self.kind == INFERENCE_SERVICES:
            body: Json = {"metadata": {"name": name}, "spec": {"replicas": 0}}
            self.cluster.put(INFERENCE_SERVICES, NAMESPACE, body)
        elif self.kind == MODEL_DEPLOYMENTS:
            body = {"metadata": {"name": name}, "spec": {"suspend": True}}
            self.cluster.put(MODEL_DEPLOYMENTS, NAMESPACE, body)
        else:
            self.cluster.put(DEPLOYMENTS, NAMESPACE, deployment(name, **more))

    def driver(
        self,
        name: str = "router-1",
        *,
        port: MemPort | None = None,
        limits: KubeLimits = QUICK,
        lost: Callable[[MemberName, str, str], None] = lambda *_: None,
        standing: Callable[[SlotStanding], None] = lambda _: None,
        known: Profile | None = None,
        **more: Any,
    ) -> KubernetesDriver:
        """Return the driver of a router called *name*, which has the rights of a real one."""
        port = port or self.cluster.port(name)
        ref = REFS[self.kind.kind]
        rights = memroles.of_router(
            NAMESPACE, "gpu0", [{ref: {"name": each}} for each in self.names], memroles.MAKES_LEASES
        )

        def may(request: Request) -> bool:
            allowed = rights(request)
            if not allowed:
                self.refused.append(request)
            return allowed

        port.rights = may
        made = self.routers[name] = KubernetesDriver(
            PoolName("gpu0"),
            self.specs(known),
            port=port,
            slot=KubeSlot(NAMESPACE, LEASE, name),
            lost=lost,
            standing=standing,
            limits=limits,
            prober=Engines(self),
            rng=random.Random(name),
            **more,
        )
        return made

    def add_router_pod(self, name: str) -> None:
        """Make the Pod that the router called *name* runs in."""
        labels = {"app": "router", APP_COMPONENT_LABEL: "router"}
        body = {"metadata": {"name": name, "labels": labels}, "spec": pod_spec(0)}
        self.cluster.put(PODS, NAMESPACE, body)

    def specs(self, known: Profile | None = None, **more: Any) -> dict[MemberName, KubeMember]:
        """Return the members as the driver knows them."""
        known = known or profile("llama-server", ProfileOverrides())
        return {
            MemberName(name): KubeMember(
                MemberName(name), self.kind.kind, NAMESPACE, name, known, **more
            )
            for name in self.names
        }

    # What is

    def member_of(self, pod: Json) -> str:
        """Return whose Pod it is."""
        return str(pod["metadata"].get("labels", {}).get("app", ""))

    def pods(self, name: str) -> list[Json]:
        """Return the Pods of a member."""
        return self.cluster.all(PODS, NAMESPACE, f"app={name}")

    def pod(self, name: str) -> Json:
        """Return the one Pod of a member that is not on its way out."""
        found = [pod for pod in self.pods(name) if not is_going(pod) and not is_finished(pod)]
        assert len(found) == 1, found
        return found[0]

    def replicas(self, name: str) -> int:
        """Return what the object of a member asks for."""
        return wants(self.kind, self.cluster.must(self.kind, NAMESPACE, name))

    def exists(self, name: str) -> bool:
        """Whether anything of a member is there or will be."""
        live = [pod for pod in self.pods(name) if not is_finished(pod)]
        return bool(live) or self.replicas(name) > 0

    def starts(self, name: str) -> int:
        """Return how many Pods of a member there ever were."""
        return sum(
            write.kind == PODS
            and write.verb == "create"
            and write.after is not None
            and self.member_of(write.after) == name
            for write in self.cluster.writes
        )

    def up(self) -> set[str]:
        """Return the members of which something runs or may start at any moment."""
        return {
            self.member_of(pod)
            for pod in self.cluster.all(PODS)
            if self.member_of(pod) in self.names
            and (runs(pod) or pod["status"]["phase"] == "Pending")
        }

    def record(self) -> Any:
        """Return the slot record."""
        lease = self.cluster.read(LEASES, NAMESPACE, LEASE)
        return None if lease is None else decode(annotation(lease, RECORD_ANNOTATION))

    # What happens

    def scale(self, name: str, replicas: int, actor: str = "kubectl") -> None:
        """Scale a member as a person would."""
        patch: Json = {"spec": {"replicas": replicas}}
        if self.kind == MODEL_DEPLOYMENTS:
            patch = {"spec": {"suspend": not replicas}}
        self.cluster.edit(self.kind, NAMESPACE, name, patch, actor=actor)

    def restart_container(self, name: str, reason: str = "Error", code: int = 137) -> None:
        """Let the container of a running Pod end and be started again, in the same Pod."""
        pod = self.pod(name)
        ended = {"exitCode": code, "reason": reason}
        statuses = [
            {
                **each,
                "restartCount": each["restartCount"] + 1,
                "lastState": {"terminated": ended},
            }
            for each in pod["status"]["containerStatuses"]
        ]
        self.cluster.edit_status(
            PODS, NAMESPACE, pod["metadata"]["name"], {"containerStatuses": statuses}
        )

    def crash(self, name: str) -> None:
        """Let the container of a Pod end again and again."""
        pod = self.pod(name)
        self.world.kubelet.wait_with(
            NAMESPACE, pod["metadata"]["name"], "CrashLoopBackOff", restarts=3
        )

    async def _move(self) -> None:
        seen, quiet = 0, 0
        while True:
            # Nothing has moved for a while: look less often, so that hours pass quickly.
            await asyncio.sleep(self.step_s * (1 if quiet < 20 else 20))
            quiet = quiet + 1 if self._last_move() == seen else 0
            seen = self._last_move()
            self._misbehave()
            if self.rng is None:
                self.world.step()
                continue
            for part in self.world.parts:
                if self.rng.random() < 0.3:
                    part.look()
                elif self.rng.random() < 0.6:
                    part.step(look=self.rng.random() < 0.6)

    def _last_move(self) -> int:
        """Return the version of the last write that was none of a Lease."""
        for write in reversed(self.cluster.writes):
            if write.kind != LEASES:
                return write.version
        return 0

    def _misbehave(self) -> None:
        kubelet = self.world.kubelet
        for pod in self.cluster.all(PODS):
            name, member = pod["metadata"]["name"], self.member_of(pod)
            if member in self.failing and runs(pod) and not is_going(pod):
                self.crash(member)
            now = self.loop.time()
            since = now
            if is_going(pod):
                since = self._going_since.setdefault(pod["metadata"]["uid"], now)
            stays = now < since + self.unload_s.get(member, 0.0)
            if stays or member in self.immortal:
                kubelet.stubborn.add(name)
            else:
                kubelet.stubborn.discard(name)

    async def rested(self) -> None:
        """Wait until nothing but Leases has moved for a while."""
        seen = -1
        while seen != self._last_move():
            seen = self._last_move()
            await asyncio.sleep(self.step_s * 4)

    def stop(self) -> None:
        """Let nothing move any more, soon."""
        self._mover.cancel()

    async def end(self) -> None:
        """Let nothing move any more."""
        self.stop()
        with contextlib.suppress(asyncio.CancelledError):
            await self._mover
        assert self.refused == []


class Watchman:
    """
    Checks every write of routers against the invariants; `verdicts` must stay empty.

    - S1: a router scales a member up only while nothing of another member is live.
    - S2: a router scales a member down only while its engine is idle or gone.
    - S8: epochs of record and marks only grow, and every record can be read.
    - S9: no write of an older epoch takes effect once a newer one is recorded.
    - S10: a router writes nothing but members and its Lease, and never the Pod of anybody.
    """

    def __init__(self, world: KubeWorld, routers: str = "router") -> None:
        self.world = world
        self.verdicts: list[str] = []
        self.most_up = 0
        self.forgotten: set[str] = set()
        """Members whose Pods a person has declared gone."""
        self._routers = routers
        world.cluster.after_write.append(self._see)

    def _see(self, write: Write) -> None:
        self.most_up = max(self.most_up, len(self.world.up()))
        if write.kind == LEASES:
            self._see_lease(write)
        if not write.actor.startswith(self._routers):
            return
        if write.kind not in (LEASES, self.world.kind):
            self._say("S10", write, "neither a member nor the Lease")
        if write.kind == self.world.kind:
            self._see_member(write)

    def _see_lease(self, write: Write) -> None:
        before = self._record(write.before)
        after = self._record(write.after)
        if before is not None and after is not None and after.epoch < before.epoch:
            self._say("S8", write, f"epoch {before.epoch} -> {after.epoch}")

    def _record(self, obj: Json | None) -> Any:
        with contextlib.suppress(Frozen):
            return None if obj is None else decode(annotation(obj, RECORD_ANNOTATION))

    def _see_member(self, write: Write) -> None:
        assert write.before is not None and write.after is not None
        record = self.world.record()
        mark = read_mark(annotation(write.after, SLOT_ANNOTATION))
        old = read_mark(annotation(write.before, SLOT_ANNOTATION))
        if mark is not None and old is not None and mark.epoch < old.epoch:
            self._say("S8", write, f"mark {old.epoch} -> {mark.epoch}")
        if mark is not None and record is not None and mark.epoch < record.epoch:
            self._say("S9", write, f"epoch {mark.epoch} while {record.epoch} is recorded")
        was = wants(write.kind, write.before)
        now = wants(write.kind, write.after)
        if now > was:
            others = self.world.up() - {write.name} - self.forgotten
            asked = [n for n in self.world.names if n != write.name and self.world.replicas(n)]
            if others or asked:
                self._say("S1", write, f"{sorted(others)} live, {asked} asked for")
        if now < was and write.name in self.world.busy and self._runs(write.name):
            self._say("S2", write, "its engine is busy")

    def _runs(self, name: str) -> bool:
        return any(runs(pod) for pod in self.world.pods(name))

    def _say(self, which: str, write: Write, why: str) -> None:
        self.verdicts.append(
            f"{which}: {write.actor} {write.verb} {write.kind.kind} {write.name}: {why}"
        )


__all__ = ["LEASE", "NAMESPACE", "QUICK", "Engines", "KubeWorld", "Watchman", "copied"]
