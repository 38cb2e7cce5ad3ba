"""
The test kubelet's decisions, pure: environment and ``$(VAR)``, devices, phases, conditions.

Nothing here talks to the API server, starts a process or reads a clock.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]

ABSENT_IMAGE = "modelpool.test/absent"
"""An image whose name starts like this can never be pulled."""
_SLOW_IMAGE = re.compile(r"modelpool\.test/slow-(\d+)s")
_IMAGE = re.compile(r"[a-z0-9]+([._:/@-]+[a-zA-Z0-9_]+)*")
_REFERENCE = re.compile(r"\$(\$|\(([-._A-Za-z][-._A-Za-z0-9]*)\))")


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace ``$(NAME)``; an unknown name stays as it is written and ``$$`` is one dollar."""

    def found(match: re.Match[str]) -> str:
        if match[1] == "$":
            return "$"
        return variables.get(match[2], match[0])

    return _REFERENCE.sub(found, text)


def image_problem(image: str, pull_policy: str) -> tuple[str, str] | None:
    """Why *image* cannot be used, as (reason, message), or None."""
    if not _IMAGE.fullmatch(image):
        return "InvalidImageName", f'Failed to apply default image tag "{image}": invalid reference'
    if image.startswith(ABSENT_IMAGE):
        if pull_policy == "Never":
            return (
                "ErrImageNeverPull",
                f'Container image "{image}" is not present with pull policy of Never',
            )
        return "ErrImagePull", f'failed to pull and unpack image "{image}": not found'
    return None


def pull_seconds(image: str) -> float:
    """How long the pull of *image* takes: ``modelpool.test/slow-5s`` takes five seconds."""
    match = _SLOW_IMAGE.match(image)
    return float(match[1]) if match else 0.0


def extended_requests(spec: Object) -> dict[str, int]:
    """What a Pod asks of countable devices: names with a domain other than kubernetes.io."""

    def of(container: Object) -> dict[str, int]:
        resources = container.get("resources") or {}
        asked = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
        return {
            name: int(str(amount))
            for name, amount in asked.items()
            if "/" in name and "kubernetes.io/" not in name
        }

    total: dict[str, int] = {}
    for container in spec.get("containers") or []:
        for name, amount in of(container).items():
            total[name] = total.get(name, 0) + amount
    for container in spec.get("initContainers") or []:
        for name, amount in of(container).items():
            total[name] = max(total.get(name, 0), amount)
    return {name: amount for name, amount in total.items() if amount > 0}


class Devices:
    """Which Pod holds which device. A Pod holds its devices until its last container is gone."""

    def __init__(self, capacity: Mapping[str, int]) -> None:
        self.capacity = dict(capacity)
        self._held: dict[str, dict[str, list[int]]] = {}

    def take(self, uid: str, wanted: Mapping[str, int]) -> dict[str, list[int]] | str:
        """Device numbers by resource, or the message of an UnexpectedAdmissionError."""
        taken: dict[str, list[int]] = {}
        for name, amount in wanted.items():
            busy = {number for held in self._held.values() for number in held.get(name, ())}
            free = [n for n in range(self.capacity.get(name, 0)) if n not in busy]
            if len(free) < amount:
                return (
                    "Allocate failed due to requested number of devices unavailable for "
                    f"{name}. Requested: {amount}, Available: {len(free)}, which is unexpected"
                )
            taken[name] = free[:amount]
        self._held[uid] = taken
        return taken

    def release(self, uid: str) -> None:
        """Give back what *uid* holds; nothing happens when it holds nothing."""
        self._held.pop(uid, None)

    def held(self) -> dict[str, dict[str, list[int]]]:
        """Device numbers by Pod UID and resource."""
        return {uid: dict(taken) for uid, taken in self._held.items()}


@dataclass(slots=True)
class ContainerState:
    """What the kubelet knows of one container; rendered into a ContainerStatus."""

    name: str
    image: str
    state: Object = field(default_factory=lambda: {"waiting": {"reason": "ContainerCreating"}})
    last: Object = field(default_factory=dict)
    restarts: int = 0
    ready: bool = False
    started: bool = False
    container_id: str = ""

    @property
    def exit_code(self) -> int | None:
        """The exit code of a container that has ended and was not started again."""
        terminated = self.state.get("terminated")
        return None if terminated is None else int(terminated["exitCode"])

    def rendered(self) -> Object:
        return {
            "name": self.name,
            "image": self.image,
            "imageID": f"modelpool.test/image@{self.image}" if self.container_id else "",
            "state": self.state,
            "lastState": self.last,
            "restartCount": self.restarts,
            "ready": self.ready,
            "started": self.started,
            "containerID": self.container_id,
        }


def restarts_again(policy: str, exit_code: int) -> bool:
    """Whether a container that ended with *exit_code* is started again."""
    return policy == "Always" or (policy == "OnFailure" and exit_code != 0)


def phase(
    policy: str, inits: Sequence[ContainerState], containers: Sequence[ContainerState]
) -> str:
    """The phase of a Pod, as the kubelet's getPhase decides it."""
    for init in inits:
        if init.exit_code is None:
            return "Pending"
        if init.exit_code != 0:
            return "Failed" if policy == "Never" else "Pending"
    codes = [one.exit_code for one in containers]
    if any("running" in one.state for one in containers):
        return "Running"
    if all(code is not None and not restarts_again(policy, code) for code in codes):
        return "Failed" if any(codes) else "Succeeded"
    if any(one.last for one in containers) or any(code is not None for code in codes):
        return "Running"  # between two attempts
    return "Pending"


def conditions(
    *,
    phase: str,
    inits: Sequence[ContainerState],
    containers: Sequence[ContainerState],
    gates_open: bool,
    has_sandbox: bool,
) -> list[Object]:
    """The Pod conditions that a kubelet owns, without their times."""
    initialised = all(one.exit_code == 0 for one in inits)
    unready = [one.name for one in containers if not one.ready]
    over = phase in ("Succeeded", "Failed")

    def condition(kind: str, good: bool, reason: str = "", message: str = "") -> Object:
        return {
            "type": kind,
            "status": "True" if good else "False",
            "reason": None if good else reason or None,
            "message": None if good else message or None,
        }

    if over:
        reason, message = ("PodCompleted" if phase == "Succeeded" else "PodFailed"), ""
    else:
        reason = "ContainersNotReady"
        message = f"containers with unready status: [{' '.join(unready)}]"
    ready_reason, ready_message = reason, message
    if not unready and not gates_open:
        ready_reason, ready_message = "ReadinessGatesNotReady", "a readiness gate is not True"
    return [
        condition("PodReadyToStartContainers", has_sandbox and not over),
        condition("Initialized", initialised, "ContainersNotInitialized"),
        condition("ContainersReady", not unready and not over, reason, message),
        condition("Ready", not unready and gates_open and not over, ready_reason, ready_message),
    ]


def with_times(fresh: list[Object], old: list[Object], now: str) -> list[Object]:
    """*fresh* conditions with the transition time kept where the status did not change."""
    before = {one["type"]: one for one in old}
    timed = []
    for one in fresh:
        was = before.get(one["type"])
        same = was is not None and was["status"] == one["status"]
        since = was.get("lastTransitionTime", now) if same and was is not None else now
        timed.append({**one, "lastTransitionTime": since})
    return timed


def stands(said: Object, standing: Object) -> bool:
    """
    Whether the *standing* status still has the phase and conditions that the kubelet *said*.

    The control plane sets a Pod's Ready to False when its node is silent; a kubelet that is back
    says its own again.
    """
    there = {one["type"]: one["status"] for one in standing.get("conditions") or []}
    return bool(said["phase"] == standing.get("phase")) and all(
        there.get(one["type"]) == one["status"] for one in said["conditions"]
    )


def gates_open(spec: Object, standing: Sequence[Object]) -> bool:
    """Whether every readiness gate of the Pod is True in its *standing* conditions."""
    true = {one["type"] for one in standing if one.get("status") == "True"}
    return all(gate["conditionType"] in true for gate in spec.get("readinessGates") or [])


def field_value(path: str, pod: Object, addresses: Mapping[str, str]) -> str:
    """The value of a downward API field; *addresses* has podIP and hostIP."""
    meta, spec = pod["metadata"], pod["spec"]
    keyed = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
    if keyed:
        return str((meta.get(keyed[1]) or {}).get(keyed[2], ""))
    known = {
        "metadata.name": meta["name"],
        "metadata.namespace": meta["namespace"],
        "metadata.uid": meta["uid"],
        "spec.nodeName": spec.get("nodeName", ""),
        "spec.serviceAccountName": spec.get("serviceAccountName", ""),
        "status.podIP": addresses["podIP"],
        "status.podIPs": addresses["podIP"],
        "status.hostIP": addresses["hostIP"],
        "status.hostIPs": addresses["hostIP"],
    }
    if path not in known:
        raise ValueError(f"field {path} is not supported by the test kubelet")
    return str(known[path])
