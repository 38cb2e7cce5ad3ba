"""
What Pods tell: why a load cannot succeed, that a life is over, where it answers. Pure.

The words are Kubernetes' own: reason and message of the container or condition, so that what a
client reads is what ``kubectl describe`` shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from modelpool_kube.kinds import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    Json,
    Kind,
    is_controlled_by,
    is_going,
    name_of,
    uid,
)

MOST_RESTARTS = 3
"""A container that was started again so often in one load will not come up."""
MOST_FAILED_PODS = 3
"""Pods that failed and were replaced by their controller, until the load has failed."""
_BAD_IMAGE = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}
)
_BAD_CONFIG = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why something did not come up or went down."""

    reason: str
    """Kubernetes' word: ``ImagePullBackOff``, ``OOMKilled`` ..."""
    detail: str
    retryable: bool = True


@dataclass(frozen=True, slots=True)
class Lives:
    """Which life of a Pod's containers: changes whenever one of them is started again."""

    pod_uid: str
    restarts: int

    def __str__(self) -> str:
        """Return a text that is different for every life."""
        return self.pod_uid if not self.restarts else f"{self.pod_uid}/{self.restarts}"


def life_of(pod: Json) -> Lives:
    """Return which life *pod* is in."""
    return Lives(uid(pod), sum(int(each.get("restartCount", 0)) for each in _containers(pod)))


def pods_below(
    kind: Kind, owner: Json | None, replica_sets: Iterable[Json], pods: Iterable[Json]
) -> list[Json]:
    """Return the Pods that *owner*, the object that owns Pods for a member, has made."""
    if owner is None:
        return []
    owners = {uid(owner)}
    if kind in (DEPLOYMENTS, INFERENCE_SERVICES):
        owners = {uid(each) for each in replica_sets if is_controlled_by(each, uid(owner))}
    return [pod for pod in pods if any(is_controlled_by(pod, each) for each in owners)]


def load_trouble(pods: Iterable[Json]) -> Trouble | None:
    """Return why a load with these Pods, made for it, cannot succeed; None while it may."""
    failed: list[Json] = []
    for pod in pods:
        if is_going(pod):
            continue
        if _phase(pod) == "Failed":
            failed.append(pod)
            continue
        for container in _containers(pod):
            found = _container_trouble(pod, container)
            if found is not None:
                return found
    if len(failed) >= MOST_FAILED_PODS:
        return _end_of(failed[-1])
    return None


def _container_trouble(pod: Json, container: Json) -> Trouble | None:
    state = container.get("state") or {}
    waiting = state.get("waiting") or {}
    reason = str(waiting.get("reason") or "")
    where = f"container {container.get('name', '?')} of Pod {name_of(pod)}"
    said = str(waiting.get("message") or "")
    if reason in _BAD_IMAGE:
        image = container.get("image") or _image_of(pod, str(container.get("name", "")))
        return Trouble(reason, _joined(f"{where} cannot get its image {image}", said), False)
    if reason in _BAD_CONFIG:
        return Trouble(reason, _joined(f"{where} cannot be started", said), False)
    restarts = int(container.get("restartCount", 0))
    ended = state.get("terminated") or (container.get("lastState") or {}).get("terminated") or {}
    if ended.get("reason") == "OOMKilled":
        text = f"{where} took more memory than its limit allows and was killed"
        return Trouble("OOMKilled", _joined(text, _exit_text(ended)))
    if restarts >= MOST_RESTARTS:
        text = f"{where} was started {restarts + 1} times and ended each time"
        return Trouble("CrashLoopBackOff", _joined(text, _exit_text(ended)))
    return None


def unschedulable(pod: Json) -> str | None:
    """Return why no node takes *pod*; None when one did, or when nobody looked yet."""
    for each in (pod.get("status") or {}).get("conditions") or []:
        if each.get("type") == "PodScheduled" and each.get("status") == "False":
            if each.get("reason") == "Unschedulable":
                return str(each.get("message") or "no node has what it needs")
    return None


def loss_of(pod: Json | None, life: Lives) -> Trouble | None:
    """Return why *life* is over, as far as its Pod tells; None while it goes on."""
    if pod is None:
        return Trouble("PodGone", "its Pod does not exist any more")
    if is_going(pod):
        return Trouble("PodDeleted", f"somebody deletes its Pod {name_of(pod)}")
    if _phase(pod) in ("Failed", "Succeeded"):
        return _end_of(pod)
    for container in (pod.get("status") or {}).get("containerStatuses") or []:
        ended = (container.get("state") or {}).get("terminated")
        if ended is not None:
            return _ended(pod, container, ended)
    if life_of(pod).restarts > life.restarts:
        for container in _containers(pod):
            ended = (container.get("lastState") or {}).get("terminated")
            if ended is not None:
                return _ended(pod, container, ended)
        return Trouble("exited", f"a container of Pod {name_of(pod)} was started again")
    return None


def _ended(pod: Json, container: Json, ended: Json) -> Trouble:
    reason = str(ended.get("reason") or "")
    word = reason if reason in ("OOMKilled", "ContainerStatusUnknown") else "exited"
    text = f"container {container.get('name', '?')} of Pod {name_of(pod)} ended"
    return Trouble(word, _joined(text, _exit_text(ended)))


def _end_of(pod: Json) -> Trouble:
    status = pod.get("status") or {}
    said = str(status.get("message") or "")
    text = f"Pod {name_of(pod)} is {_phase(pod)}"
    exits = [
        _exit_text(ended)
        for each in _containers(pod)
        if (ended := (each.get("state") or {}).get("terminated"))
    ]
    return Trouble(str(status.get("reason") or "exited"), _joined(text, said, *exits))


def _exit_text(ended: Json) -> str:
    code = ended.get("exitCode")
    parts = [] if code is None else [f"exit code {code}"]
    parts += [str(ended[key]) for key in ("reason", "message") if ended.get(key)]
    return ", ".join(parts)


def headline(pods: Iterable[Json]) -> str:
    """Return in one line how far the Pods of a loading member are."""
    parts = []
    for pod in pods:
        text = f"Pod {name_of(pod)} is {_phase(pod)}"
        if is_going(pod):
            text += " and ending"
        why = unschedulable(pod)
        waiting = [
            str(reason)
            for each in _containers(pod)
            if (reason := ((each.get("state") or {}).get("waiting") or {}).get("reason"))
        ]
        parts.append(_joined(text, f"unschedulable: {why}" if why else "", *waiting))
    return "; ".join(parts)


def address_of(pod: Json) -> str:
    """Return the address of *pod*; empty when it has none."""
    return str((pod.get("status") or {}).get("podIP") or "")


def port_of(pod: Json) -> int | None:
    """Return the first port that a container of *pod* declares."""
    for container in (pod.get("spec") or {}).get("containers") or []:
        for each in container.get("ports") or []:
            if each.get("protocol", "TCP") == "TCP" and each.get("containerPort"):
                return int(each["containerPort"])
    return None


def has_run(pod: Json) -> bool:
    """Return whether a container of *pod* runs, so that it may work on something."""
    return any("running" in (each.get("state") or {}) for each in _containers(pod))


def _containers(pod: Json) -> Iterator[Json]:
    status = pod.get("status") or {}
    yield from status.get("initContainerStatuses") or []
    yield from status.get("containerStatuses") or []


def _phase(pod: Json) -> str:
    return str((pod.get("status") or {}).get("phase") or "Pending")


def _image_of(pod: Json, container: str) -> str:
    spec = pod.get("spec") or {}
    for each in [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]:
        if each.get("name") == container:
            return str(each.get("image") or "?")
    return "?"


def _joined(*parts: str) -> str:
    return ": ".join(part for part in parts if part)
