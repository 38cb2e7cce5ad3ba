"""
Running one container of a Pod on the test kubelet: image, environment, attempts, probes, the end.

``kubelet_pod`` decides when; ``kubelet_container`` is the process underneath.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kubelet_rules as rules
from kubelet_api import ApiError, Unreachable
from kubelet_container import CannotStart, Ended, Process, run_to_end, start
from kubelet_node import Node, wall_time
from kubelet_probe import Exec, Prober, run_probe
from kubelet_rules import ContainerState
from kubelet_volumes import NotThere, Volumes, contents, relocated

Object = dict[str, Any]

_RETRY_S = 0.5
_STABLE_S = 600.0
"""A container that ran this long starts its back-off anew, as with a real kubelet."""


@dataclass(slots=True)
class PodContext:
    """What the containers of one Pod share. ``changed`` asks for a status report."""

    node: Node
    pod: Object
    folder: Path
    changed: Callable[[], None]
    volumes: Volumes | None = None
    ip: str = ""
    environ: dict[str, str] = field(default_factory=dict)
    stop_at: float = float("inf")
    """Loop time at which whatever still runs is killed."""

    @property
    def addresses(self) -> dict[str, str]:
        return {"podIP": self.ip, "hostIP": self.node.host_ip}

    def event(self, kind: str, reason: str, message: str) -> None:
        self.node.event(self.pod, kind, reason, message)


@dataclass(frozen=True, slots=True)
class _Launch:
    argv: list[str]
    environ: dict[str, str]
    cwd: Path | None


class Container:
    """One container of a Pod, over all its restarts."""

    def __init__(self, context: PodContext, spec: Object, *, is_init: bool, policy: str) -> None:
        self.spec = spec
        self.state = _known_state(spec, context.pod, is_init)
        self._context = context
        self._is_init = is_init
        # An init container that succeeded is done, whatever the policy.
        self._policy = "OnFailure" if is_init and policy == "Always" else policy
        self._process: Process | None = None
        self._started_at = ""

    @property
    def is_running(self) -> bool:
        """Whether a process of it is left."""
        return self._process is not None

    def kill_for_memory(self) -> None:
        """End it as the kernel does when memory has run out."""
        if self._process is not None:
            self._process.kill(oom=True)

    async def run(self) -> None:
        """
        Run it again and again, as the restart policy has it; returns when it does not any more.

        On cancellation the process goes on; :meth:`end` ends it.
        """
        context, state = self._context, self.state
        pause = context.node.backoff_s
        if state.last:
            state.restarts += 1
        while True:
            await self._until_image()
            launch = await self._until_configured()
            begun = asyncio.get_running_loop().time()
            await self._attempt(launch)
            code = state.exit_code
            assert code is not None
            if not rules.restarts_again(self._policy, code):
                return
            if asyncio.get_running_loop().time() - begun > _STABLE_S:
                pause = context.node.backoff_s
            state.last, state.restarts = state.state, state.restarts + 1
            context.changed()
            if state.restarts == 1:
                continue  # the first restart comes at once, as with a real kubelet
            message = f"back-off {pause:g}s restarting failed container={state.name}"
            self._wait("CrashLoopBackOff", message)
            context.event("Warning", "BackOff", message)
            await asyncio.sleep(pause)
            pause = min(pause * 2, context.node.backoff_cap_s)

    async def end(self) -> None:
        """preStop, TERM, and KILL at the Pod's deadline; returns when nothing of it is left."""
        process = self._process
        if process is None:
            return
        context = self._context
        context.event("Normal", "Killing", f"Stopping container {self.state.name}")
        hook = (self.spec.get("lifecycle") or {}).get("preStop")
        if hook and not process.is_gone and context.stop_at > asyncio.get_running_loop().time():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(context.stop_at):
                    await self._pre_stop(hook, process)
        self._note_end(await process.stop(lambda: context.stop_at, _stop_signal(self.spec)))

    # -- before it starts -------------------------------------------------------------------------

    def _wait(self, reason: str, message: str) -> None:
        self.state.state = {"waiting": {"reason": reason, "message": message}}
        self._context.changed()

    async def _until_image(self) -> None:
        image = self.spec["image"]
        policy = self.spec.get("imagePullPolicy") or "IfNotPresent"
        pause = self._context.node.backoff_s
        while (problem := rules.image_problem(image, policy)) is not None:
            reason, message = problem
            self._wait(reason, message)
            self._context.event("Warning", "Failed", f"Failed to pull image: {message}")
            await asyncio.sleep(self._context.node.backoff_s)
            if reason == "ErrImagePull":
                self._wait("ImagePullBackOff", f'Back-off pulling image "{image}": {message}')
            await asyncio.sleep(pause)
            pause = min(pause * 2, self._context.node.backoff_cap_s)
        if self.state.restarts == 0:
            await asyncio.sleep(rules.pull_seconds(image))

    async def _until_configured(self) -> _Launch:
        while True:
            try:
                return await self._configured()
            except (ValueError, NotThere) as wrong:
                no_command = "no command specified" in str(wrong)
                self._wait(
                    "CreateContainerError" if no_command else "CreateContainerConfigError",
                    str(wrong),
                )
                self._context.event("Warning", "Failed", f"Error: {wrong}")
            except (ApiError, Unreachable):
                pass  # a ConfigMap could not be read: asked again
            await asyncio.sleep(_RETRY_S)

    async def _configured(self) -> _Launch:
        """
        Command line, environment and working directory.

        Raises:
            NotThere: A ConfigMap, a Secret or a key of one is missing.
            ValueError: The Pod asks for what cannot be given.
        """
        context, spec = self._context, self.spec
        assert context.volumes is not None
        mounts = context.volumes.mounts(spec)
        known = {"POD_IP": context.ip}
        variables: dict[str, str] = {}
        for source in spec.get("envFrom") or []:
            kind = "configMapRef" if "configMapRef" in source else "secretRef"
            for key, content in (await self._data(kind, source[kind])).items():
                variables[(source.get("prefix") or "") + key] = content.decode()
        for entry in spec.get("env") or []:
            if "valueFrom" in entry:
                value = await self._value_from(entry["valueFrom"])
            else:
                value = rules.expand(entry.get("value") or "", known | variables)
            if value is not None:
                variables[entry["name"]] = relocated(value, mounts)
        command, given = spec.get("command") or [], spec.get("args") or []
        # What an image runs is a path of this machine, wherever the Pod mounts something.
        entry = [] if command else list(context.node.entrypoint(spec["image"]))
        words = [
            relocated(rules.expand(word, known | variables), mounts) for word in [*command, *given]
        ]
        if not entry and not words:
            raise ValueError(f"no command specified and none known for image {spec['image']!r}")
        return _Launch(
            argv=[*entry, *words],
            environ=context.environ | known | variables,
            cwd=mounts.get((spec.get("workingDir") or "").rstrip("/")),
        )

    async def _value_from(self, origin: Object) -> str | None:
        if "fieldRef" in origin:
            path = origin["fieldRef"]["fieldPath"]
            return rules.field_value(path, self._context.pod, self._context.addresses)
        if "resourceFieldRef" in origin:
            group, name = origin["resourceFieldRef"]["resource"].split(".", 1)
            return str(((self.spec.get("resources") or {}).get(group) or {}).get(name, "0"))
        kind = next(iter(origin))
        reference = origin[kind]
        found = (await self._data(kind, reference)).get(reference["key"])
        if found is not None:
            return found.decode()
        if reference.get("optional"):
            return None
        raise NotThere(f"couldn't find key {reference['key']} in {reference['name']}")

    async def _data(self, kind: str, reference: Object) -> dict[str, bytes]:
        plural = "configmaps" if kind.startswith("configMap") else "secrets"
        namespace, name = self._context.pod["metadata"]["namespace"], reference["name"]
        try:
            path = f"/api/v1/namespaces/{namespace}/{plural}/{name}"
            return contents(await self._context.node.api.get(path))
        except ApiError as refused:
            if refused.status != 404:
                raise
            if reference.get("optional"):
                return {}
            raise NotThere(f'{plural[:-1]} "{name}" not found') from refused

    # -- one attempt ------------------------------------------------------------------------------

    async def _attempt(self, launch: _Launch) -> None:
        """Start it once and follow it to its end; the state says how it ended."""
        context, state = self._context, self.state
        mark = f"{context.pod['metadata']['uid']}/{state.name}/{state.restarts}"
        state.container_id = f"process://{mark}"
        self._started_at = wall_time()
        try:
            process = start(
                launch.argv,
                environ=launch.environ,
                cwd=launch.cwd,
                log=self._log(),
                mark=mark,
            )
        except CannotStart as refused:
            context.event("Warning", "Failed", str(refused))
            state.state = self._terminated(refused.exit_code, "StartError", str(refused))
            context.changed()
            return
        self._process = process
        state.state = {"running": {"startedAt": self._started_at}}
        state.started = self._is_init or "startupProbe" not in self.spec
        state.ready = not self._is_init and state.started and "readinessProbe" not in self.spec
        context.event("Normal", "Started", f"Started container {state.name}")
        context.changed()
        probes = asyncio.get_running_loop().create_task(self._probe(process, launch.environ))
        try:
            ended = await process.wait()
        finally:
            await cancelled(probes)
        self._note_end(ended)

    def _note_end(self, ended: Ended) -> None:
        reason = "OOMKilled" if ended.oom else "Completed" if ended.code == 0 else "Error"
        message = ""
        if ended.code and self.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            message = self._log().read_text("utf-8", "replace")[-2048:]
        self.state.state = self._terminated(ended.code, reason, message)
        if ended.signal and not ended.oom:
            self.state.state["terminated"]["signal"] = ended.signal
        self.state.ready = self.state.started = False
        self._process = None
        self._context.changed()

    def _terminated(self, code: int, reason: str, message: str) -> Object:
        return {
            "terminated": {
                "exitCode": code,
                "reason": reason,
                "message": message,
                "startedAt": self._started_at,
                "finishedAt": wall_time(),
                "containerID": self.state.container_id,
            }
        }

    def _log(self, suffix: str = "") -> Path:
        name = f"{self.state.name}{suffix}.{self.state.restarts}.log"
        return self._context.folder / "logs" / name

    # -- probes and hooks -------------------------------------------------------------------------

    async def _probe(self, process: Process, environ: dict[str, str]) -> None:
        """Run the probes of one attempt until it is cancelled."""
        if self._is_init:
            return
        spec, state, context = self.spec, self.state, self._context
        prober = self._prober(process, environ)

        def unhealthy(kind: str, reason: str) -> None:
            context.event("Warning", "Unhealthy", f"{kind} probe failed: {reason}")

        def on_startup(good: bool, reason: str) -> None:
            if not good:
                unhealthy("Startup", reason)
                self._replace(process)
                return
            state.started = True
            state.ready = "readinessProbe" not in spec
            started.set()
            context.changed()

        def on_readiness(good: bool, reason: str) -> None:
            state.ready = good
            if not good:
                unhealthy("Readiness", reason)
            context.changed()

        def on_liveness(good: bool, reason: str) -> None:
            if not good:
                unhealthy("Liveness", reason)
                self._replace(process)

        started = asyncio.Event()
        async with asyncio.TaskGroup() as together:
            if "startupProbe" in spec:
                startup = together.create_task(
                    run_probe(prober, spec["startupProbe"], eager=True, on_change=on_startup)
                )
                await started.wait()
                startup.cancel()
            if "readinessProbe" in spec:
                together.create_task(
                    run_probe(prober, spec["readinessProbe"], eager=True, on_change=on_readiness)
                )
            if "livenessProbe" in spec:
                together.create_task(
                    run_probe(prober, spec["livenessProbe"], eager=False, on_change=on_liveness)
                )

    def _prober(self, process: Process, environ: dict[str, str]) -> Prober:
        context = self._context

        async def run_exec(argv: list[str], limit: float) -> int:
            return await run_to_end(
                argv,
                environ=environ,
                cwd=None,
                log=self._log("-exec"),
                mark=process.mark,
                timeout_s=limit,
            )

        exec_: Exec = run_exec
        return Prober(self.spec, context.ip, context.node.probes, exec_)

    def _replace(self, process: Process) -> None:
        """End an unhealthy attempt; :meth:`run` starts the next one."""
        grace = self._context.pod["spec"].get("terminationGracePeriodSeconds")
        until = asyncio.get_running_loop().time() + float(30 if grace is None else grace)
        text = f"Container {self.state.name} failed its probe, will be restarted"
        self._context.event("Normal", "Killing", text)
        self._context.node.own(_discard(process.stop(lambda: until, _stop_signal(self.spec))))

    async def _pre_stop(self, hook: Object, process: Process) -> None:
        if "sleep" in hook:
            await asyncio.sleep(float(hook["sleep"]["seconds"]))
            return
        launch = await self._configured()
        left = self._context.stop_at - asyncio.get_running_loop().time()
        prober = self._prober(process, launch.environ)
        problem = await prober.once({**hook, "timeoutSeconds": max(left, 0.001)})
        if problem is not None:
            self._context.event("Warning", "FailedPreStopHook", problem)


async def cancelled(task: asyncio.Task[None]) -> None:
    """Cancel *task* unless it is done, and take its result: a mistake must not stay silent."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _known_state(spec: Object, pod: Object, is_init: bool) -> ContainerState:
    """A state that goes on counting where an earlier kubelet of this node stopped."""
    waits_for_init = not is_init and pod["spec"].get("initContainers")
    state = ContainerState(spec["name"], spec["image"])
    reason = "PodInitializing" if waits_for_init else "ContainerCreating"
    state.state = {"waiting": {"reason": reason}}
    key = "initContainerStatuses" if is_init else "containerStatuses"
    for known in (pod.get("status") or {}).get(key) or []:
        if known["name"] == spec["name"]:
            state.restarts = int(known.get("restartCount") or 0)
            state.last = known.get("lastState") or {}
            if "running" in (known.get("state") or {}):
                # It was killed when this kubelet started.
                lost = {"exitCode": 137, "reason": "ContainerStatusUnknown"}
                state.last = {"terminated": lost}
    return state


def _stop_signal(spec: Object) -> signal.Signals:
    name = (spec.get("lifecycle") or {}).get("stopSignal") or "SIGTERM"
    return signal.Signals[name]


async def _discard(work: Coroutine[Any, Any, Ended]) -> None:
    await work
