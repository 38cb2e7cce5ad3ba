"""
One Pod on the test kubelet, from its admission to its removal from the API server.

A worker owns every process, probe and device of its Pod. It goes on without the API server; what it
could not report is reported when the server is back. ``kubelet`` feeds it with what the watch saw.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

import kubelet_rules as rules
from kubelet_api import STRATEGIC, ApiError, Unreachable
from kubelet_node import Node, wall_time
from kubelet_rules import ContainerState
from kubelet_run import Container, PodContext, cancelled
from kubelet_volumes import NotThere, Volumes

Object = dict[str, Any]

OOM = "kubelet.modelpool.test/oom"
"""Annotation: every new value kills the containers as if memory had run out."""
EVICT = "kubelet.modelpool.test/evict"
"""Annotation: fail the Pod as evicted, with the value as the message."""

_RETRY_S = 0.5
_SYNC_S = 2.0
_SHUTDOWN_GRACE_S = 0.5
_FORCED_GRACE_S = 1.0  # the least that a kubelet grants


class PodWorker:
    """Runs one Pod. ``node`` lends the API, devices, addresses and folders."""

    def __init__(self, node: Node, pod: Object) -> None:
        meta, spec = pod["metadata"], pod["spec"]
        self.uid: str = meta["uid"]
        self._node = node
        self._path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
        self._dirty = asyncio.Event()
        self._stop = asyncio.Event()
        folder = node.folder / "pods" / self.uid
        self._context = PodContext(node, pod, folder, changed=self._dirty.set)
        self._policy: str = spec.get("restartPolicy") or "Always"

        def containers(key: str, is_init: bool) -> list[Container]:
            return [
                Container(self._context, one, is_init=is_init, policy=self._policy)
                for one in spec.get(key) or []
            ]

        self._inits = containers("initContainers", True)
        self._mains = containers("containers", False)
        self._failure: tuple[str, str] | None = None
        self._oom_seen = (meta.get("annotations") or {}).get(OOM)
        self._started_at = wall_time()
        self._gone_from_api = False
        self._is_over = False
        self._sent: Object | None = None
        phase = (pod.get("status") or {}).get("phase")
        # Over before this kubelet started: nothing is run again, nothing new is said of it.
        self._frozen: Object | None = pod["status"] if phase in ("Succeeded", "Failed") else None

    # -- what the watch says ----------------------------------------------------------------------

    def update(self, pod: Object) -> None:
        """Take a newer version of the object; notices deletion, eviction and OOM annotations."""
        self._context.pod = pod
        notes = pod["metadata"].get("annotations") or {}
        if self._is_deleted:
            self._ask_to_stop(float(pod["metadata"].get("deletionGracePeriodSeconds") or 0))
        elif notes.get(EVICT) and self._failure is None and not self._is_over:
            self._failure = ("Evicted", notes[EVICT])
            self._ask_to_stop(float(pod["spec"].get("terminationGracePeriodSeconds") or 0))
        if notes.get(OOM) not in (None, self._oom_seen):
            self._oom_seen = notes[OOM]
            for container in self._mains:
                container.kill_for_memory()
        self._dirty.set()

    def forget(self) -> None:
        """The object is gone from the API server (force-deleted): end what is left of it."""
        self._gone_from_api = True
        self._ask_to_stop(_FORCED_GRACE_S)

    def shut_down(self) -> None:
        """The kubelet ends: end the containers quickly, leave the object as it is."""
        self._gone_from_api = True
        self._ask_to_stop(_SHUTDOWN_GRACE_S)

    @property
    def _is_deleted(self) -> bool:
        return bool(self._context.pod["metadata"].get("deletionTimestamp"))

    def _ask_to_stop(self, grace_s: float) -> None:
        # A second deletion can only shorten the grace.
        until = asyncio.get_running_loop().time() + grace_s
        self._context.stop_at = min(self._context.stop_at, until)
        self._stop.set()
        self._dirty.set()

    # -- life -------------------------------------------------------------------------------------

    async def life(self) -> None:
        """Run the Pod to its end. Returns when it is gone from the node and the API server."""
        reporter = self._own(self._report())
        try:
            self.update(self._context.pod)
            if self._frozen is None:
                await self._run_unless_stopped()
                await self._end_containers()
                self._settle()
            self._is_over = True
            self._dirty.set()
            self._node.devices.release(self.uid)
            await self._until_deleted()
            await cancelled(reporter)
            await self._remove()
        finally:
            await cancelled(reporter)
            self._node.devices.release(self.uid)

    def _own(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work, name=self._path)

    async def _run_unless_stopped(self) -> None:
        """Run the containers until they all ended for good or somebody asks to stop."""
        asked = rules.extended_requests(self._context.pod["spec"])
        taken = self._node.devices.take(self.uid, asked)
        if isinstance(taken, str):
            self._failure = ("UnexpectedAdmissionError", taken)
            self._inits, self._mains = [], []  # a rejected Pod has no container statuses
            return
        running = self._own(self._run(taken))
        stopping = self._own(self._asked_to_stop())
        try:
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancelled(stopping)
            await cancelled(running)

    async def _asked_to_stop(self) -> None:
        await self._stop.wait()

    async def _run(self, devices: dict[str, list[int]]) -> None:
        context, node = self._context, self._node
        host_network = bool(context.pod["spec"].get("hostNetwork"))
        context.ip = node.host_ip if host_network else node.next_address()
        context.environ = node.pod_environ(self.uid, devices)
        context.volumes = volumes = Volumes(
            node.api, context.pod, context.folder / "volumes", context.addresses, self._token
        )
        self._dirty.set()
        await self._mount(volumes)
        for init in self._inits:
            await init.run()
            if init.state.exit_code != 0:
                return  # Failed: the policy does not try again
        syncing = self._own(self._keep_volumes(volumes))
        try:
            async with asyncio.TaskGroup() as together:
                for container in self._mains:
                    together.create_task(container.run())
        finally:
            await cancelled(syncing)

    async def _token(self, audience: str, seconds: int) -> str:
        return await self._node.token(self._context.pod, audience, seconds)

    async def _mount(self, volumes: Volumes) -> None:
        while True:
            try:
                await volumes.sync()
            except (NotThere, ApiError, Unreachable) as missing:
                self._context.event("Warning", "FailedMount", str(missing))
                await asyncio.sleep(_RETRY_S)
                continue
            account = self._node.account_kubeconfig(self._context.pod, self._context.folder)
            if account is not None:
                self._context.environ["KUBECONFIG"] = str(account)
            return

    async def _keep_volumes(self, volumes: Volumes) -> None:
        while volumes.can_change:
            await asyncio.sleep(_SYNC_S)
            with contextlib.suppress(NotThere, ApiError, Unreachable):
                await volumes.sync()

    # -- the end ----------------------------------------------------------------------------------

    async def _end_containers(self) -> None:
        async with asyncio.TaskGroup() as together:
            for container in self._inits + self._mains:
                together.create_task(container.end())

    def _settle(self) -> None:
        """Containers that never ran are reported as a kubelet reports them once all is over."""
        if not self._stop.is_set():
            return
        for state in self._states(self._inits) + self._states(self._mains):
            if "terminated" not in state.state:
                unknown = {
                    "exitCode": 137,
                    "reason": "ContainerStatusUnknown",
                    "message": "The container could not be located when the pod was terminated",
                }
                state.state = {"terminated": state.last.get("terminated") or unknown}
                state.ready = state.started = False

    async def _until_deleted(self) -> None:
        """An ended Pod stays until somebody deletes it."""
        while not (self._gone_from_api or self._is_deleted):
            self._stop.clear()
            await self._stop.wait()

    async def _remove(self) -> None:
        """Report the end, then take the object away; a finalizer of others may keep it."""
        while not self._gone_from_api:
            try:
                await self._patch(self._status())
                await self._node.api.delete(self._path, uid=self.uid, grace_s=0)
                return
            except ApiError as refused:
                if refused.status in (404, 409):
                    return  # gone, or a successor of the same name stands there
            except Unreachable:
                pass  # asked again: deleting it twice does no harm, the UID is given
            await asyncio.sleep(_RETRY_S)

    # -- status -----------------------------------------------------------------------------------

    @staticmethod
    def _states(containers: list[Container]) -> list[ContainerState]:
        return [one.state for one in containers]

    def _phase(self) -> str:
        inits, mains = self._states(self._inits), self._states(self._mains)
        if self._is_over and self._failure is not None:
            return "Failed"
        if self._is_over and self._is_deleted:
            codes = [one.exit_code for one in inits + mains]
            return "Failed" if any(code != 0 for code in codes) else "Succeeded"
        return rules.phase(self._policy, inits, mains)

    def _status(self) -> Object:
        if self._frozen is not None:
            return self._frozen
        pod, ip = self._context.pod, self._context.ip
        standing = pod.get("status") or {}
        inits, mains = self._states(self._inits), self._states(self._mains)
        phase = self._phase()
        old = standing.get("conditions") or []
        fresh = rules.conditions(
            phase=phase,
            inits=inits,
            containers=mains,
            gates_open=rules.gates_open(pod["spec"], old),
            has_sandbox=bool(ip) and not self._is_over,
        )
        reason, message = self._failure if self._failure and self._is_over else (None, None)
        return {
            "phase": phase,
            "reason": reason,
            "message": message,
            "hostIP": self._node.host_ip,
            "hostIPs": [{"ip": self._node.host_ip}],
            "podIP": ip or None,
            "podIPs": [{"ip": ip}] if ip else None,
            "startTime": standing.get("startTime") or self._started_at,
            "initContainerStatuses": [one.rendered() for one in inits] or None,
            "containerStatuses": [one.rendered() for one in mains] or None,
            "conditions": rules.with_times(fresh, old, wall_time()),
        }

    async def _report(self) -> None:
        """Send the status whenever it changed; what could not be sent is tried again."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            if self._gone_from_api or self._frozen is not None:
                continue
            status = self._status()
            same = _without_times(status) == _without_times(self._sent)
            if same and rules.stands(status, self._context.pod.get("status") or {}):
                continue
            try:
                await self._patch(status)
            except (ApiError, Unreachable) as failed:
                print(f"status of {self._path}: {failed}", flush=True)
                await asyncio.sleep(_RETRY_S)
                self._dirty.set()

    async def _patch(self, status: Object) -> None:
        # The UID makes the server refuse a status that is meant for an earlier Pod of this name.
        body = {"metadata": {"uid": self.uid}, "status": status}
        await self._node.api.patch(self._path + "/status", body, STRATEGIC)
        self._sent = status


def _without_times(status: Object | None) -> Object:
    if status is None:
        return {}
    conditions = [
        {key: value for key, value in one.items() if key != "lastTransitionTime"}
        for one in status.get("conditions") or []
    ]
    return {**status, "conditions": conditions}
