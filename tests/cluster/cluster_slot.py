"""A pool of two Deployments from a router's own file, without a CRD, and routers in front of it."""

from __future__ import annotations

import contextlib
import json
import signal
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from cluster_clients import Client
from cluster_eye import PodEye, never_two
from cluster_faults import FaultyWay
from cluster_ground import is_ready, is_whole
from cluster_kubectl import Object, until
from cluster_objects import PORT, deployment, member_container
from cluster_roles import router_account
from cluster_router import Front, RouterProcess
from harness import Cluster
from modelpool_api.names import RECORD_ANNOTATION, SLOT_ANNOTATION

LARGE, SMALL = "large", "small"
SETTLED = ("resident", "cold", "released")


def epoch_of(member: Object) -> int:
    """Return the epoch that *member* is marked with; 0 without a mark."""
    mark = member["metadata"].get("annotations", {}).get(SLOT_ANNOTATION, ":0")
    return int(mark.rpartition(":")[2])


def is_settled(record: Any, up: list[str], epochs: set[int]) -> bool:
    """Whether record, members that are up and marks tell the same story of nobody moving."""
    owner = [record["owner"]] if record["owner"] else []
    return record["phase"] in SETTLED and up == owner and epochs == {record["epoch"]}


class Slot:
    """
    Two members at 0 that want the same GPU.

    Each takes a lock for as long as its process runs, and ends when it finds it taken.
    """

    def __init__(
        self, cluster: Cluster, namespace: str, folder: Path, *, args: tuple[str, ...] = ()
    ) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self._folder = folder
        self._routers: list[RouterProcess] = []
        self._ways: list[FaultyWay] = []
        for name in (SMALL, LARGE):
            lock = ("--lock", str(folder / "lock"))
            body = deployment(namespace, name, member_container("--name", name, *lock, *args))
            body["spec"]["replicas"] = 0
            body["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 5
            cluster.kubectl.create(body)
        pool = {
            "metadata": {"name": "gpu0", "namespace": namespace},
            "spec": {"members": [{"deploymentRef": {"name": name}} for name in (SMALL, LARGE)]},
        }
        self._account = router_account(cluster, "router", pool, makes_leases=True)

    def way(self, name: str) -> FaultyWay:
        """Return a way to the API server that can be broken."""
        made = FaultyWay(self._account, self._folder / f"way-{name}")
        self._ways.append(made)
        return made

    def router(self, name: str, *, way: FaultyWay | None = None, **rules: Any) -> RouterProcess:
        """
        Return a router that is not started yet.

        Args:
            name: Its name as a holder. One with an underscore is known to run in no Pod.
            way: How it reaches the API server; None means straight.
            rules: Of the pool.
        """
        members = [
            {
                "name": each,
                "profile": "llama-server",
                "deployment": {"namespace": self.namespace, "name": each},
            }
            for each in (SMALL, LARGE)
        ]
        pool = {"name": "gpu0", "linger": "0s", "swapBudget": "60s", "members": members, **rules}
        account = self._account if way is None else way.kubeconfig
        made = RouterProcess(
            self.cluster,
            self._folder / name,
            name,
            leaseNamespace=self.namespace,
            kubernetes={"kubeconfig": str(account), "callTimeout": "5s"},
            pools=[pool],
        )
        self._routers.append(made)
        if way is not None:
            way.kill = lambda: made.send(signal.SIGKILL)
        return made

    def end(self) -> None:
        """Leave nothing running."""
        for each in self._routers:
            with contextlib.suppress(Exception):
                each.stop(signal.SIGKILL)
        for way in self._ways:
            way.close()

    def member(self, name: str) -> Object:
        """Return the Deployment of a member."""
        return self.cluster.kubectl.get("deployment", name, "-n", self.namespace)

    def replicas(self, name: str) -> int:
        """Return what a Deployment asks for."""
        return int(self.member(name)["spec"]["replicas"])

    def up(self) -> list[str]:
        """Return the members that are asked to be up."""
        return [name for name in (SMALL, LARGE) if self.replicas(name)]

    def epoch(self, name: str) -> int:
        """Return the epoch that a member is marked with; 0 without a mark."""
        return epoch_of(self.member(name))

    def pods(self, name: str = "") -> list[str]:
        """Return the UIDs of Pods, of one member or of both."""
        return [each["metadata"]["uid"] for each in self.pod_objects(name)]

    def pod_objects(self, name: str = "") -> list[Object]:
        """Return Pods, of one member or of both."""
        only = ("-l", f"app={name}") if name else ()
        return self.cluster.kubectl.items("pods", "-n", self.namespace, *only)

    def lease(self) -> Object:
        """Return the Lease; empty when there is none."""
        return self.cluster.kubectl.get("lease", "modelpool-gpu0", "-n", self.namespace)

    def holder(self) -> str:
        """Return who holds the Lease."""
        return str((self.lease().get("spec") or {}).get("holderIdentity") or "")

    def record(self) -> Any:
        """Return the slot record."""
        return json.loads(self.lease()["metadata"]["annotations"][RECORD_ANNOTATION])

    def wait_settled(self, timeout_s: float = 60) -> Any:
        """Wait until record, replicas and marks tell the same story of nobody moving anything."""

        def settled() -> Any:
            record = self.record()
            epochs = {self.epoch(name) for name in (SMALL, LARGE)}
            return record if is_settled(record, self.up(), epochs) else None

        return until(settled, "the slot is at rest", timeout_s)

    def engine(self, name: str) -> Front | None:
        """Return the engine of a member itself, without a router; None when it does not serve."""
        ready = [each for each in self.pod_objects(name) if is_ready(each)]
        return Front(f"{ready[0]['status']['podIP']}:{PORT}") if ready else None

    def streams(self, front: Front, name: str, chunks: int) -> Client:
        """Begin a stream of *chunks* tenths of a second, and wait until the engine works on it."""
        engine = self.engine(name)
        assert engine is not None, f"{name} does not serve"
        before = _busy(engine)
        client = Client(lambda: front.chat(name, stream=True, x_chunks=chunks, x_gap_ms=100))
        until(lambda: _busy(engine) > before, "the stream runs")
        return client

    def never_two(self, *, may_be_blind: bool = False) -> AbstractContextManager[PodEye]:
        """Insist that the two never live at the same time; see `cluster_eye.never_two`."""
        return never_two(self.cluster.kubectl, self.namespace, may_be_blind=may_be_blind)


def _busy(engine: Front) -> int:
    slots = json.loads(engine.request("GET", "/slots").body)
    return sum(each["is_processing"] for each in slots)


def is_unbroken(stream: Client) -> bool:
    """Whether a stream came, or comes, to its own end; waits for it."""
    answers = stream.end()
    return not stream.broken and all(is_whole(each) for each in answers)
