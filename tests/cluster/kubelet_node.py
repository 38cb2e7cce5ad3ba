"""
What all Pods of one test node share: the Node object and its heartbeat, addresses, devices, events.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

from cluster_certs import kubeconfig_content
from kubelet_api import STRATEGIC, Api, ApiError, Unreachable
from kubelet_rules import Devices

Object = dict[str, Any]

ACCOUNT_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"
NODE_MARK = "MODELPOOL_TEST_NODE"
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
_CLAIM_PORT = 10250
_HEARTBEAT_S = 2.0
_STATUS_EVERY = 5  # heartbeats


def wall_time() -> str:
    """Now, as the API wants it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def claim_network() -> tuple[str, socket.socket]:
    """
    The first two numbers of addresses that no other test node on this machine uses.

    They are ours for as long as the returned socket is open, whichever way we end.
    """
    for second in range(65, 128):
        claim = socket.socket()
        try:
            claim.bind((f"127.{second}.255.254", _CLAIM_PORT))
        except OSError:
            claim.close()
            continue
        return f"127.{second}", claim
    raise RuntimeError("every network of 127.65 to 127.127 is in use by another test node")


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """How a test node is set up; the command line of ``kubelet.py``."""

    name: str
    folder: Path
    kubeconfig: Path
    resources: Mapping[str, int] = field(default_factory=lambda: {"nvidia.com/gpu": 1})
    labels: Mapping[str, str] = field(default_factory=dict)
    images: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Entry points by image name (without tag); for Pods that give no command."""
    backoff_s: float = 1.0
    """First wait of a crash loop or a failed pull; a real kubelet has 10 s."""
    backoff_cap_s: float = 30.0
    certificate: tuple[Path, Path] | None = None
    """Certificate and key of its log server; without them ``kubectl logs`` does not work."""
    client_ca: Path | None = None


class Node:
    """The shared half of the kubelet. ``run`` keeps the Node object alive."""

    host_ip = "127.0.0.1"

    def __init__(self, options: NodeOptions, api: Api, probes: aiohttp.ClientSession) -> None:
        self.options = options
        self.name = options.name
        self.folder = options.folder
        self.api = api
        self.probes = probes
        self.devices = Devices(options.resources)
        self.backoff_s = options.backoff_s
        self.backoff_cap_s = options.backoff_cap_s
        self.logs_port = 0
        self._network, self._claim = claim_network()
        self._tasks: set[asyncio.Task[Any]] = set()

    # -- services to Pods -----------------------------------------------------------------------

    def own(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run *work* in the background, kept until it ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def next_address(self) -> str:
        """An address on loopback that no Pod of this node ever had, kubelet restarts included."""
        path = self.folder / "addresses"
        number = int(path.read_text("utf-8")) + 1 if path.exists() else 1
        path.write_text(str(number), "utf-8")
        return f"{self._network}.{number // 250 % 250}.{number % 250 + 1}"

    def pod_environ(self, uid: str, devices: Mapping[str, Sequence[int]]) -> dict[str, str]:
        """The environment that every container of a Pod starts from."""
        home = self.folder / "pods" / uid / "home"
        home.mkdir(parents=True, exist_ok=True)
        inherited = (
            "PATH",
            "PYTHONPATH",
            "LANG",
            "TZ",
            "LD_LIBRARY_PATH",
            "MODELPOOL_TEST_CLUSTER",
        )
        environ = {key: os.environ[key] for key in inherited if key in os.environ}
        environ |= {"HOME": str(home), "HOSTNAME": self.name, NODE_MARK: str(self.folder)}
        for name, numbers in devices.items():
            if name == "nvidia.com/gpu":
                environ["NVIDIA_VISIBLE_DEVICES"] = ",".join(map(str, numbers))
        return environ

    def entrypoint(self, image: str) -> Sequence[str]:
        """The command of an image that the node knows; empty for others."""
        bare = image.split("@")[0]
        name = bare.rsplit(":", 1)[0] if ":" in bare.rsplit("/", 1)[-1] else bare
        return self.options.images.get(name, ())

    async def token(self, pod: Object, audience: str, seconds: int) -> str:
        """A service account token bound to *pod*."""
        meta = pod["metadata"]
        account = pod["spec"].get("serviceAccountName") or "default"
        bound = {"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "uid": meta["uid"]}
        spec: Object = {"expirationSeconds": max(seconds, 3600), "boundObjectRef": bound}
        if audience:
            spec["audiences"] = [audience]
        answer = await self.api.create(
            f"/api/v1/namespaces/{meta['namespace']}/serviceaccounts/{account}/token",
            {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec},
        )
        return str(answer["status"]["token"])

    def account_kubeconfig(self, pod: Object, folder: Path) -> Path | None:
        """
        A kubeconfig for the Pod's service account, made from its mounted token; None without one.

        It stands in for the in-cluster files, which have a fixed path that a local process lacks.
        """
        mounts = pod["spec"]["containers"][0].get("volumeMounts") or []
        volume = next((one["name"] for one in mounts if one["mountPath"] == ACCOUNT_PATH), None)
        if volume is None:
            return None
        token = (folder / "volumes" / volume / "token").read_text("utf-8")
        ca = base64.b64encode(self.api.ca.encode()).decode()
        namespace = pod["metadata"]["namespace"]
        content = kubeconfig_content(self.api.server, ca, {"token": token}, namespace)
        path = folder / "kubeconfig"
        path.write_text(json.dumps(content), "utf-8")
        return path

    def event(self, pod: Object, kind: str, reason: str, message: str) -> None:
        """Record an Event on *pod*; one that cannot be written is dropped, as Events are."""
        self.own(self._event(pod, kind, reason, message))

    async def _event(self, pod: Object, kind: str, reason: str, message: str) -> None:
        meta, now = pod["metadata"], wall_time()
        about = {"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "uid": meta["uid"]}
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": meta["name"][:200] + ".", "namespace": meta["namespace"]},
            "involvedObject": {**about, "namespace": meta["namespace"]},
            "type": kind,
            "reason": reason,
            "message": message[:1000],
            "source": {"component": "kubelet", "host": self.name},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            await self.api.create(f"/api/v1/namespaces/{meta['namespace']}/events", body)
        except (ApiError, Unreachable):
            return

    # -- the Node object ------------------------------------------------------------------------

    async def run(self) -> None:
        """Register the Node, then renew its Lease and status for ever."""
        while not await self._tried(self._register()):
            await asyncio.sleep(0.5)
        beat = 0
        while True:
            if beat % _STATUS_EVERY == 0 and not await self._tried(self._send_status()):
                beat = -1  # at once when the server is back
            await self._tried(self._renew())
            beat += 1
            await asyncio.sleep(_HEARTBEAT_S if beat else 0.5)

    async def close(self) -> None:
        """Cancel background work and give up the addresses."""
        self._claim.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _tried(self, work: Coroutine[Any, Any, None]) -> bool:
        try:
            await work
        except (ApiError, Unreachable) as failed:
            print(f"heartbeat: {failed}", flush=True)
            return False
        return True

    async def _register(self) -> None:
        labels = {
            "kubernetes.io/hostname": self.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": "amd64",
            **self.options.labels,
        }
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self.name, "labels": labels},
        }
        try:
            await self.api.create("/api/v1/nodes", node)
        except ApiError as refused:
            if refused.status != 409:
                raise
        await self._send_status()

    async def _send_status(self) -> None:
        now = wall_time()
        amounts = {
            "cpu": "64",
            "memory": "256Gi",
            "ephemeral-storage": "100Gi",
            "pods": "250",
            **{name: str(count) for name, count in self.options.resources.items()},
        }

        def condition(kind: str, status: str, reason: str) -> Object:
            return {"type": kind, "status": status, "reason": reason, "lastHeartbeatTime": now}

        status = {
            "capacity": amounts,
            "allocatable": amounts,
            "addresses": [
                {"type": "InternalIP", "address": self.host_ip},
                {"type": "Hostname", "address": self.name},
            ],
            "conditions": [
                condition("MemoryPressure", "False", "KubeletHasSufficientMemory"),
                condition("DiskPressure", "False", "KubeletHasNoDiskPressure"),
                condition("PIDPressure", "False", "KubeletHasSufficientPID"),
                condition("Ready", "True", "KubeletReady"),
            ],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self.logs_port}},
            "nodeInfo": {
                "architecture": "amd64",
                "bootID": "test",
                "containerRuntimeVersion": "process://1",
                "kernelVersion": os.uname().release,
                "kubeProxyVersion": "",
                "kubeletVersion": "v1.0.0-test",
                "machineID": self.name,
                "operatingSystem": "linux",
                "osImage": "local processes",
                "systemUUID": self.name,
            },
        }
        await self.api.patch(f"/api/v1/nodes/{self.name}/status", {"status": status}, STRATEGIC)

    async def _renew(self) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        try:
            await self.api.patch(f"{_LEASES}/{self.name}", {"spec": {"renewTime": now}})
        except ApiError as refused:
            if refused.status != 404:
                raise
            spec = {"holderIdentity": self.name, "leaseDurationSeconds": 40, "renewTime": now}
            await self.api.create(
                _LEASES,
                {
                    "apiVersion": "coordination.k8s.io/v1",
                    "kind": "Lease",
                    "metadata": {"name": self.name, "namespace": "kube-node-lease"},
                    "spec": spec,
                },
            )
