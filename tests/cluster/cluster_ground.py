"""What tests of pools stand on: their objects, what is said of them, and an eye on Pods."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from cluster_eye import is_over
from cluster_kubectl import Kubectl, Object, changes, until
from cluster_objects import GPU, deployment, member_container
from cluster_router import Answer, Front
from harness import Cluster
from modelpool_api.names import API_VERSION, RECORD_ANNOTATION, SLOT_ANNOTATION

INSTANCE = "app.kubernetes.io/instance"
ROUTER_PORT = 18180


class Watch:
    """
    A watch by kubectl: *take* is given every change and the object, in the server's order.

    It runs in a thread of its own until `close`.
    """

    def __init__(self, kubectl: Kubectl, *what: str, take: Callable[[str, Object], None]) -> None:
        self._take = take
        self._process = kubectl.watch(*what)
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for change, obj in changes(self._process.stdout):
            self._take(change, obj)

    def close(self) -> None:
        """End the watch, after everything that has happened by now was seen."""
        time.sleep(0.3)  # events are on their way for less than that
        is_whole = self._process.poll() is None
        self._process.terminate()
        self._reading.join()
        self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()
        assert is_whole, "kubectl had ended, and what came after that was not seen"


class Pods:
    """
    What became of the Pods of a namespace, as a watch tells it.

    Attributes:
        told: ``+name`` for a Pod that came into being, ``-name`` for one that is gone; the name
            is that of the workload above it.
        overlaps: Workloads that had Pods at the same time; of one with two Pods its name.
    """

    def __init__(self) -> None:
        self.told: list[str] = []
        self.overlaps: list[set[str]] = []
        self._alive: dict[str, str] = {}

    def take(self, change: str, pod: Object) -> None:
        """Take in a change."""
        uid, name = pod["metadata"]["uid"], workload_of(pod)
        if change == "DELETED" or is_over(pod):
            if self._alive.pop(uid, None) is not None:
                self.told.append(f"-{name}")
        elif uid not in self._alive:
            self._alive[uid] = name
            self.told.append(f"+{name}")
        if len(self._alive) > 1:
            self.overlaps.append(set(self._alive.values()))


def workload_of(pod: Object) -> str:
    """Return the name of what made *pod*, as its labels tell."""
    labels = pod["metadata"].get("labels") or {}
    return str(labels.get("app") or labels.get(INSTANCE) or pod["metadata"]["name"])


MEMBERS = ("-l", "app.kubernetes.io/component!=router")
ROUTERS = ("-l", "app.kubernetes.io/component=router")


@contextmanager
def one_at_a_time(kubectl: Kubectl, namespace: str, *labels: str) -> Iterator[Pods]:
    """Watch Pods all the while; insist that no two of them ever existed at the same time."""
    seen = Pods()
    watch = Watch(kubectl, "pods", "-n", namespace, *(labels or MEMBERS), take=seen.take)
    try:
        yield seen
    finally:
        watch.close()
    assert seen.overlaps == []
    assert seen.told, "nothing was watched"


@contextmanager
def watched(
    kubectl: Kubectl, *what: str, of: Callable[[Object], str | None]
) -> Iterator[list[str]]:
    """Watch objects all the while: what *of* returns of them, without repetitions and Nones."""
    said: list[str] = []

    def take(change: str, obj: Object) -> None:
        word = of(obj)
        if word is not None and said[-1:] != [word]:
            said.append(word)

    watch = Watch(kubectl, *what, take=take)
    try:
        yield said
    finally:
        watch.close()


class Ground:
    """One namespace with pools in it."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster = cluster
        self.kubectl = cluster.kubectl
        self.namespace = namespace

    # -- objects ----------------------------------------------------------------------------------

    def service(self, name: str, *args: str, gpus: int = 1, **spec: Any) -> Object:
        """An InferenceService of the fake member."""
        limits = {"resources": {"limits": {GPU: str(gpus)}}} if gpus else {}
        return {
            "apiVersion": API_VERSION,
            "kind": "InferenceService",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {
                "image": "modelpool.test/member",
                "args": ["--host", "$(POD_IP)", "--port", "8080", *args],
                "profile": "llama-server",
                "terminationGracePeriodSeconds": 5,
                **limits,
                **spec,
            },
        }

    def deployment(self, name: str, *args: str, gpus: int = 1) -> Object:
        """A Deployment of the fake member, at 0."""
        member = member_container("--name", name, *args, gpus=gpus)
        made = deployment(self.namespace, name, member, terminationGracePeriodSeconds=5)
        made["spec"]["replicas"] = 0
        return made

    def stateful_set(self, name: str, *args: str) -> Object:
        """A StatefulSet of the fake member, at 0."""
        made = self.deployment(name, *args)
        del made["spec"]["strategy"]
        made["spec"] |= {"serviceName": name}
        return {**made, "kind": "StatefulSet"}

    def pool(self, name: str, *members: Object, **spec: Any) -> Object:
        """A ModelPool."""
        return {
            "apiVersion": API_VERSION,
            "kind": "ModelPool",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {"members": list(members), **spec},
        }

    def router(self, *pools: str, **spec: Any) -> Object:
        """A ModelRouter called ``front``."""
        return {
            "apiVersion": API_VERSION,
            "kind": "ModelRouter",
            "metadata": {"name": "front", "namespace": self.namespace},
            "spec": {
                "pools": [{"name": each} for each in pools],
                "allowAnonymous": True,
                "image": "modelpool.test/router",
                "port": ROUTER_PORT,
                "shutdownDelay": "0s",
                "shutdownTimeout": "5s",
                **spec,
            },
        }

    def apply(self, *objects: Object) -> None:
        """Apply *objects*."""
        self.kubectl.apply(*objects)

    def patch(self, what: str, patch: Object) -> None:
        """Merge *patch* into an object, as in ``mpool/gpu0``."""
        self.kubectl("patch", what, "-n", self.namespace, "--type=merge", "-p", json.dumps(patch))

    # -- what is so -------------------------------------------------------------------------------

    def get(self, *args: str) -> Object:
        """An object of the namespace; empty when it is not there."""
        return self.kubectl.get(*args, "-n", self.namespace)

    def items_of(self, kind: str) -> list[Object]:
        """All objects of a kind."""
        return self.kubectl.items(kind, "-n", self.namespace)

    def status(self, pool: str = "gpu0") -> Object:
        """The status of a ModelPool."""
        found: Object = self.get("modelpool", pool).get("status", {})
        return found

    def condition(self, kind: str, pool: str = "gpu0") -> str:
        """``True/Resident`` and the like; empty when there is none."""
        return next(iter(self._conditions(kind, pool, "{status}/{reason}")), "")

    def message(self, kind: str, pool: str = "gpu0") -> str:
        """The message of a condition."""
        return next(iter(self._conditions(kind, pool, "{message}")), "")

    def _conditions(self, kind: str, pool: str, form: str) -> list[str]:
        found = self.status(pool).get("conditions", [])
        return [form.format(**each) for each in found if each["type"] == kind]

    def phases(self, pool: str = "gpu0") -> dict[str, str]:
        """The phases of the members."""
        return {each["name"]: each["phase"] for each in self.status(pool).get("members", [])}

    def events(self, about: str = "gpu0") -> list[str]:
        """Reasons of the Events about one object, as they came; repeated ones once."""
        listed = self.kubectl.items("events.events.k8s.io", "-n", self.namespace)
        found = [each for each in listed if each.get("regarding", {}).get("name") == about]
        found.sort(key=lambda each: str(each.get("eventTime") or ""))
        return [str(each["reason"]) for each in found]

    def replicas(self, what: str) -> int:
        """What an object asks for, as in ``deployment/judge``."""
        return int(self.get(what)["spec"].get("replicas", 0))

    def mark(self, what: str) -> str:
        """The slot that an object says it belongs to; empty when it says nothing."""
        return str(self.get(what)["metadata"].get("annotations", {}).get(SLOT_ANNOTATION, ""))

    def generations(self, *what: str) -> list[tuple[int, str]]:
        """What changes when anybody changes the spec of an object, or its mark."""
        return [(self.get(each)["metadata"]["generation"], self.mark(each)) for each in what]

    def router_said(self, event: str) -> int:
        """How often the router of the ModelRouter said something, in this life of it."""
        pods = [each for each in self.pods("front") if not is_ending(each)]
        if len(pods) != 1:
            return 0
        text = self.kubectl("logs", pods[0]["metadata"]["name"], "-n", self.namespace)
        return text.count(f'"event": "{event}') + text.count(f'"event":"{event}')

    def pods(self, workload: str) -> list[Object]:
        """The Pods of a workload."""
        listed = self.kubectl.items("pods", "-n", self.namespace)
        return [each for each in listed if workload_of(each) == workload]

    def record(self, pool: str = "gpu0") -> Any:
        """The slot record."""
        lease = self.get("lease", f"modelpool-{pool}")
        return json.loads(lease["metadata"]["annotations"][RECORD_ANNOTATION])

    def front(self, timeout_s: float = 90) -> Front:
        """The router of the ModelRouter, once it is ready."""

        def ready() -> Object | None:
            if self.get("mrouter", "front").get("status", {}).get("phase") != "Ready":
                return None
            pods = self.pods("front")
            return pods[0] if len(pods) == 1 and is_ready(pods[0]) else None

        found = until(ready, "the router is ready", timeout_s)
        assert found is not None
        return Front(f"{found['status']['podIP']}:{ROUTER_PORT}")


def is_ready(pod: Object) -> bool:
    """Whether a Pod is ready, and stays."""
    conditions = pod.get("status", {}).get("conditions", [])
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    return ready and not is_ending(pod)


def is_ending(obj: Object) -> bool:
    """Whether *obj* was asked to go."""
    return "deletionTimestamp" in obj["metadata"]


def service_ref(name: str, **more: Any) -> Object:
    """A member that is an InferenceService."""
    return {"inferenceServiceRef": {"name": name}, **more}


def deployment_ref(name: str, **more: Any) -> Object:
    """A member that is a Deployment of the fake llama-server."""
    return {"deploymentRef": {"name": name}, "profile": "llama-server", **more}


STREAM = {"stream": True, "x_chunks": 100, "x_gap_ms": 100}
"""Ten seconds, which is longer than what happens meanwhile takes to be told."""


def streamed(clients: ThreadPoolExecutor, front: Front, model: str) -> Future[Answer]:
    """Begin a long stream."""
    return clients.submit(lambda: front.chat(model, **STREAM))


def is_whole(answer: Answer) -> bool:
    """Whether a stream came to its own end."""
    return answer.status == 200 and b"data: [DONE]" in answer.body and b'"error"' not in answer.body


def in_work(ground: Ground, name: str) -> bool:
    """Whether the engine of a member works on something."""
    pods = ground.pods(name)
    slots = Front(f"{pods[0]['status']['podIP']}:8080").request("GET", "/slots")
    return b'"is_processing":true' in slots.body.replace(b" ", b"")
