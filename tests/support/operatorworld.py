"""
A cluster with pools in it and operators at work, on the virtual clock of the loop.

`OperatorWorld.run` lets everything move until nothing does: controllers and kubelet of
`memcontrollers`, and every operator process that lives. Time jumps to whatever is due next.
After every single write the invariants of slots are checked; see `operatorworld_checks`.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import conditionspage
import memroles
from memcluster import MemCluster, MemPort, Request, Write
from memcontrollers import World, deployment, runs
from modelpool_api.names import (
    OPERATOR_MANAGER,
    RECORD_ANNOTATION,
    lease_name,
)
from modelpool_kube.errors import KubeError
from modelpool_kube.kinds import (
    DEPLOYMENTS,
    EVENTS,
    INFERENCE_SERVICES,
    LEASES,
    MODEL_POOLS,
    MODEL_ROUTERS,
    PODS,
    Json,
    Kind,
    annotation,
)
from modelpool_operator.engine.acting import Actor, Key
from modelpool_operator.engine.events import EventRecorder
from modelpool_operator.engine.observe import Observer
from modelpool_operator.engine.reconcilers import (
    PoolReconciler,
    RouterReconciler,
    ServiceReconciler,
)
from modelpool_operator.engine.sessions import SlotSessions
from operatorworld_checks import OperatorChecks, is_renewal, member_of_pod, up

Pass = Callable[[Key], Awaitable[float | None]]
"""One pass over an object; says when to come back."""
NS = "lab"
IMAGE = "modelpool:test"
RIGHTS = memroles.of_operator()
STEP_S = 1.0
"""How long one round of everything takes."""
TICK_S = 0.001
"""Below what the clock of the loop tells apart for certain."""


class Members:
    """What members answer on their idle paths; a Pod is found by its address."""

    def __init__(self, cluster: MemCluster) -> None:
        self._cluster = cluster
        self.busy: set[str] = set()
        """Members (by name of their object) that work on something."""
        self.silent: set[str] = set()
        """Members that do not answer."""
        self.asked: list[str] = []

    async def get(self, host: str, port: int, path: str) -> tuple[int, bytes] | None:
        """Answer as llama-server does."""
        await asyncio.sleep(0)
        for pod in self._cluster.all(PODS):
            if pod.get("status", {}).get("podIP") == host and runs(pod):
                name = member_of_pod(self._cluster, pod)
                self.asked.append(name)
                if name in self.silent:
                    return None
                slots = [{"id": 0, "is_processing": name in self.busy}]
                return 200, json.dumps(slots).encode()
        return None


class Process:
    """One operator process: a port, reconcilers, and when each object is due."""

    def __init__(self, world: OperatorWorld, port: MemPort, identity: str) -> None:
        self._world = world
        self.port = port
        port.rights = world.may
        rng = random.Random(identity)
        observer = Observer(port)
        actor = Actor(port, EventRecorder(port, identity))
        self.sessions = SlotSessions(port, identity, world.members, rng)
        self.pools = PoolReconciler(
            observer, actor, self.sessions, world.members, again=self._wake_pool
        )
        self.passes: dict[Kind, Pass] = {
            MODEL_POOLS: self.pools.reconcile,
            INFERENCE_SERVICES: ServiceReconciler(observer, actor).reconcile,
            MODEL_ROUTERS: RouterReconciler(observer, actor, default_image=IMAGE).reconcile,
        }
        self._due: dict[tuple[Kind, Key], float] = {}
        self._seen = -1
        self.failures: list[KubeError] = []

    def _wake_pool(self, key: Key) -> None:
        self._due[MODEL_POOLS, key] = self.port.now()

    @property
    def next_due(self) -> float | None:
        """When something is due next; None when nothing is."""
        return min(self._due.values(), default=None)

    def wake_all(self) -> None:
        """Everything is to be looked at again."""
        for kind in self.passes:
            for obj in self._world.cluster.all(kind):
                key = (obj["metadata"]["namespace"], obj["metadata"]["name"])
                self._due[kind, key] = self.port.now()

    async def step(self) -> bool:
        """Make the passes that are due; return whether there was one."""
        version = self._world.cluster.version
        if version != self._seen:
            self.wake_all()
            self._seen = version
        now = self.port.now()
        due = [item for item, when in self._due.items() if when <= now + TICK_S]
        for kind, key in due:
            self._due.pop((kind, key), None)
            try:
                again = await self.passes[kind](key)
            except KubeError as error:
                self.failures.append(error)
                again = 1.0
            if again is not None:
                when = self.port.now() + max(again, 0.01)
                self._due[kind, key] = min(when, self._due.get((kind, key), when))
        return bool(due)

    async def stop(self) -> None:
        """End it in peace."""
        await self.sessions.close()

    def tasks(self) -> list[asyncio.Task[None]]:
        """Return the tasks that it left running."""
        return [session.task for session in self.sessions._open.values()]


@dataclass
class OperatorWorld:
    """A namespace with members, pools and operators."""

    gpus: int = 2
    """More than one, so that nothing but the rules keeps two members apart."""
    cluster: MemCluster = field(init=False)
    world: World = field(init=False)
    members: Members = field(init=False)
    checks: OperatorChecks = field(init=False)
    processes: list[Process] = field(default_factory=list)
    outsiders: set[str] = field(default_factory=lambda: {"test", "router"})
    violations: list[str] = field(default_factory=list)
    _still: int = -1

    def __post_init__(self) -> None:
        self.cluster = MemCluster(clock=asyncio.get_running_loop().time)
        self.world = World(self.cluster, gpus=self.gpus)
        self.members = Members(self.cluster)
        self.checks = OperatorChecks(self.cluster, self.members.busy, is_operator)
        self.cluster.after_write.append(self.check_write)
        self.cluster.after_write.append(conditionspage.check_write)

    # Making things

    def member(self, name: str, replicas: int = 0, **pod: Any) -> Json:
        """Make a Deployment that can be a member."""
        return self.cluster.put(DEPLOYMENTS, NS, deployment(name, replicas=replicas, **pod))

    def service(self, name: str, **spec: Any) -> Json:
        """Make an InferenceService."""
        body = {
            "metadata": {"name": name},
            "spec": {
                "image": "engine:1",
                "profile": "llama-server",
                "resources": {"limits": {"nvidia.com/gpu": 1}},
                **spec,
            },
        }
        return self.cluster.put(INFERENCE_SERVICES, NS, body)

    def pool(self, name: str, *members: str | Json, **spec: Any) -> Json:
        """Make a pool; a member that is only a name is a Deployment with llama-server in it."""
        listed = [
            {"deploymentRef": {"name": each}, "profile": "llama-server"}
            if isinstance(each, str)
            else each
            for each in members
        ]
        body = {"metadata": {"name": name}, "spec": {"members": listed, **spec}}
        return self.cluster.put(MODEL_POOLS, NS, body)

    def start(self, identity: str = "operator-0", port: MemPort | None = None) -> Process:
        """Start an operator process."""
        process = Process(self, port or self.cluster.port(identity), identity)
        self.processes.append(process)
        return process

    # Running

    async def round(self) -> bool:
        """Let everything make one step; return whether anything moved."""
        moved = False
        if self.cluster.version != self._still:
            # What stood still at this version stands still until somebody writes.
            before = self.cluster.version
            moved = self.world.step()
            self._still = -1 if moved else before
        for process in self.processes:
            moved |= await process.step()
        return moved

    async def run(self, seconds: float = 300.0, until: Callable[[], object] | None = None) -> None:
        """
        Let *seconds* pass, or less if *until* becomes true.

        Raises:
            AssertionError: *until* did not become true in time.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while True:
            if until is not None and until():
                return
            if loop.time() >= end - TICK_S:
                break
            moved = await self.round()
            due = [each.next_due for each in self.processes if each.next_due is not None]
            soon = loop.time() + STEP_S
            wake = soon if moved else min([end, *(max(when, soon) for when in due)])
            await asyncio.sleep(max(TICK_S, min(wake, end) - loop.time()))
        assert until is None, f"it did not happen within {seconds} s"

    async def kill(self, process: Process) -> None:
        """Kill a process: none of its requests gets through any more, and nothing is given back."""
        process.port.dead = True
        if process in self.processes:
            self.processes.remove(process)
        tasks = process.tasks()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """End all processes."""
        for process in self.processes:
            await process.stop()

    # Looking

    def status(self, pool: str = "gpu0") -> Json:
        """Return the status of a pool."""
        found: Json = self.cluster.must(MODEL_POOLS, NS, pool).get("status", {})
        return found

    def condition(self, kind: str, pool: str = "gpu0", of: Kind = MODEL_POOLS) -> Json:
        """Return a condition."""
        conditions = self.cluster.must(of, NS, pool).get("status", {}).get("conditions", [])
        return next((each for each in conditions if each["type"] == kind), {})

    def says(self, kind: str, pool: str = "gpu0") -> str:
        """Return ``status/reason`` of a condition."""
        found = self.condition(kind, pool)
        return f"{found.get('status')}/{found.get('reason')}"

    def record(self, pool: str = "gpu0") -> Json:
        """Return the record of a pool; empty when there is none."""
        lease = self.cluster.read(LEASES, NS, lease_name(pool))
        text = None if lease is None else annotation(lease, RECORD_ANNOTATION)
        found: Json = {} if text is None else json.loads(text)
        return found

    def replicas(self, kind: Kind = DEPLOYMENTS) -> dict[str, int]:
        """Return what all members of *kind* ask for."""
        return {
            each["metadata"]["name"]: each["spec"].get("replicas", 1)
            for each in self.cluster.all(kind, NS)
        }

    def up(self) -> set[str]:
        """Return the members of which a Pod holds a device."""
        return up(self.cluster)

    def events(self) -> list[str]:
        """Return the reasons of all Events, in order."""
        return [
            write.after["reason"]
            for write in self.cluster.writes
            if write.kind == EVENTS and write.verb == "create" and write.after
        ]

    def writes(self, since: int = 0) -> list[Write]:
        """Return what operators wrote, renewals of Leases left out."""
        return [
            each
            for each in self.cluster.writes
            if each.version > since and is_operator(each.actor) and not is_renewal(each)
        ]

    # A router that only holds its Lease

    def hold(self, pool: str, holder: str, record: Json | None = None) -> None:
        """Let a router hold the Lease of a pool; call again to renew."""
        count = sum(write.actor == "router" for write in self.cluster.writes)
        patch: Json = {
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": 15,
                "renewTime": f"2026-01-01T00:00:00.{count:06d}Z",
            }
        }
        if record is not None:
            patch["metadata"] = {"annotations": {RECORD_ANNOTATION: json.dumps(record)}}
        self.cluster.edit(LEASES, NS, lease_name(pool), patch, actor="router")

    # Invariants

    def may(self, request: Request) -> bool:
        """Return whether the shipped Role allows *request*; that it does not is a violation."""
        allowed = RIGHTS(request)
        if not allowed:
            self.violations.append(f"the Role does not allow {request}")
        return allowed

    def check_write(self, write: Write) -> None:
        """Check one write; see `OperatorChecks`."""
        found = self.checks.problems(write)  # looks at what others write, too
        if found and write.actor not in self.outsiders:
            self.violations += found
            raise AssertionError("; ".join(found))


def is_operator(actor: str) -> bool:
    """Return whether *actor* is an operator."""
    return actor.startswith(("operator", "first", "second"))


__all__ = ["IMAGE", "NS", "OPERATOR_MANAGER", "Members", "OperatorWorld", "Pass", "Process"]
