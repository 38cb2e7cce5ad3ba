"""
One member of a pool as it was observed: what it asks for, what runs of it, and what is wrong.

Everything here is a reading of `Facts`; nothing is remembered from one time to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from modelpool_api.meta import timestamp
from modelpool_api.names import ROUTING_LABEL, SLOT_ANNOTATION
from modelpool_api.v1alpha1.modelpool import PoolMember
from modelpool_kube.kinds import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    MODEL_DEPLOYMENTS,
    Json,
    annotation,
    controller_of,
    is_controlled_by,
    is_going,
    meta,
    name_of,
    uid,
)
from modelpool_kube.record import SlotMark, read_mark
from modelpool_kube.slotrules import Facts, Member, is_pod_gone, unsafe, wants

from .idleness import idle_path
from .model import ProbeIdle, Target

DEFAULT_PORT = 8080
STUCK_AFTER = timedelta(seconds=60)
"""How long after its grace a Pod may still be there before its node is suspected."""
FAILING = frozenset(
    {
        "ImagePullBackOff",
        "ErrImagePull",
        "InvalidImageName",
        "CrashLoopBackOff",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
    }
)
"""Why a container waits, where waiting alone does not help."""


class Activity(StrEnum):
    """What a member does."""

    STOPPED = "stopped"
    """Wants nothing, and nothing of it is left."""
    LOADING = "loading"
    READY = "ready"
    UNLOADING = "unloading"
    """Wants nothing, and something of it is left."""


@dataclass(frozen=True, slots=True)
class ObservedMember:
    """One member: what the pool says of it, and what was read."""

    member: Member
    spec: PoolMember | None
    """None: it is no member any more, and still carries our mark."""
    facts: Facts

    @property
    def name(self) -> str:
        """Name in the pool."""
        return self.member.name

    @property
    def obj(self) -> Json | None:
        """The object that the pool names; None when there is none."""
        return self.facts.member

    @property
    def mark(self) -> SlotMark | None:
        """What its annotation says."""
        return None if self.obj is None else read_mark(annotation(self.obj, SLOT_ANNOTATION))

    @property
    def wants(self) -> int:
        """How many replicas it asks for; a missing one asks for none."""
        return 0 if self.obj is None else wants(self.member.kind, self.obj)

    @property
    def owner(self) -> Json | None:
        """The object that owns its Pods or ReplicaSets."""
        if self.member.kind != INFERENCE_SERVICES:
            return self.obj
        found = self.facts.owner
        if found is None or self.obj is None or not is_controlled_by(found, uid(self.obj)):
            return None
        return found

    @property
    def pods(self) -> tuple[Json, ...]:
        """Its Pods that are not gone, those that end included."""
        return tuple(
            pod
            for pod in self.facts.pods
            if self._owns(pod) and not is_pod_gone(pod, self.facts.forgotten)
        )

    def _owns(self, pod: Json) -> bool:
        owner = self.owner
        if owner is None:
            return False
        by = (controller_of(pod) or {}).get("uid")
        if by is None:
            return False
        if by == uid(owner):
            return True
        return any(
            uid(each) == by and is_controlled_by(each, uid(owner))
            for each in self.facts.replica_sets
        )

    @property
    def activity(self) -> Activity:
        """What it does."""
        if self.wants == 0:
            owner = self.owner
            is_down = owner is None or owner is self.obj or wants(DEPLOYMENTS, owner) == 0
            left = bool(self.pods) or not is_down
            return Activity.UNLOADING if left else Activity.STOPPED
        return Activity.READY if self._is_ready() else Activity.LOADING

    def _is_ready(self) -> bool:
        if self.member.kind == MODEL_DEPLOYMENTS:
            roles = ((self.obj or {}).get("status") or {}).get("roles") or []
            return bool(roles) and all(
                role.get("ready", 0) >= role.get("desired", 0) for role in roles
            )
        return any(_is_ready_pod(pod) for pod in self.pods)

    @property
    def running(self) -> tuple[Json, ...]:
        """Its Pods with a container that runs."""
        return tuple(pod for pod in self.pods if any("running" in each for each in _states(pod)))

    @property
    def trouble(self) -> tuple[str, str] | None:
        """Why it does not come up, as reason and message; None when nothing is known."""
        for pod in self.pods:
            for state in _states(pod):
                waiting = state.get("waiting") or {}
                if waiting.get("reason") in FAILING:
                    said = waiting.get("message") or ""
                    return str(waiting["reason"]), f"Pod {name_of(pod)}: {said}".rstrip(": ")
            for each in (pod.get("status") or {}).get("conditions") or []:
                if each.get("type") == "PodScheduled" and each.get("status") == "False":
                    said = each.get("message") or "no node takes it"
                    reason = str(each.get("reason") or "Unschedulable")
                    return reason, f"Pod {name_of(pod)}: {said}"
        return None

    def stuck_nodes(self, now: datetime) -> tuple[str, ...]:
        """Return the nodes with Pods of it that should have ended a good while ago."""
        latest = timestamp(now - STUCK_AFTER)
        found = {
            str((pod.get("spec") or {}).get("nodeName") or "")
            for pod in self.pods
            if is_going(pod) and str(meta(pod)["deletionTimestamp"]) < latest
        }
        return tuple(sorted(found - {""}))

    @property
    def is_metal(self) -> bool:
        """Whether it is to run on what no cluster has."""
        spec = (self.obj or {}).get("spec") or {}
        return self.member.kind == INFERENCE_SERVICES and spec.get("accelerator") == "metal"

    @property
    def unsafe(self) -> str | None:
        """Why it cannot be a member, with the way out; None when it can."""
        return None if self.obj is None else unsafe(self.member.kind, self.obj)

    def cannot_land(self, where: Mapping[str, str]) -> str | None:
        """Return why its Pods cannot be scheduled to nodes with labels *where*; None: they can."""
        asked = dict(self._pod_spec().get("nodeSelector") or {})
        if self.member.kind == INFERENCE_SERVICES:
            asked = dict(((self.obj or {}).get("spec") or {}).get("nodeSelector") or {})
        for key, value in sorted(where.items()):
            if asked.get(key, value) != value:
                return (
                    f"it is bound to nodes with {key}={asked[key]}, and the slot of this pool is "
                    f"on nodes with {key}={value}; correct one of the two nodeSelectors"
                )
        return None

    # How it is asked

    def probe(self) -> ProbeIdle | None:
        """Return how to ask it whether it is idle; None when nothing of it runs."""
        if not self.running:
            return None
        profile = self._profile()
        configured = None if self.spec is None else self.spec.idle_path
        path = idle_path(profile, configured)
        targets = []
        for pod in self.running:
            labelled = (meta(pod).get("labels") or {}).get(ROUTING_LABEL)
            if self.member.kind == MODEL_DEPLOYMENTS and labelled != "true":
                continue
            host = (pod.get("status") or {}).get("podIP")
            if host:
                targets.append(Target(uid(pod), str(host), self._port(pod)))
        return ProbeIdle(self.name, profile, path or "", tuple(targets))

    def _profile(self) -> str:
        if self.spec is not None and self.spec.profile is not None:
            return str(self.spec.profile)
        found = ((self.obj or {}).get("spec") or {}).get("profile")
        return str(found) if isinstance(found, str) else "generic"

    def _port(self, pod: Json) -> int:
        if self.spec is not None and self.spec.port is not None:
            return self.spec.port
        for container in (pod.get("spec") or {}).get("containers") or []:
            for port in container.get("ports") or []:
                is_tcp = port.get("protocol", "TCP") == "TCP"
                if is_tcp and isinstance(port.get("containerPort"), int):
                    return int(port["containerPort"])
        return DEFAULT_PORT

    def _pod_spec(self) -> Json:
        template: Any = ((self.obj or {}).get("spec") or {}).get("template") or {}
        found: Json = template.get("spec") or {}
        return found


def _states(pod: Json) -> Iterator[Json]:
    status = pod.get("status") or {}
    for key in ("initContainerStatuses", "containerStatuses"):
        for each in status.get(key) or []:
            yield each.get("state") or {}


def _is_ready_pod(pod: Json) -> bool:
    if is_going(pod):
        return False
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions)
