"""
What stands: members and Workloads as the API server has them, read without guessing.

Everything here is taken from the objects themselves. A fact that is absent and a fact that cannot
be read are kept apart, because the first means "from before" and the second "ask a person".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from modelpool_api.names import (
    APP_COMPONENT_LABEL,
    COMMAND_MODE_ANNOTATION,
    MEMBER_INDEX_LABEL,
    ORDINAL_LABEL,
    ROUTING_LABEL,
    SPEC_HASH_ANNOTATION,
)
from modelpool_api.v1alpha1.instancetype import InstanceType
from modelpool_api.v1alpha1.modeldeployment import ModelDeployment

from . import kueue
from .argv import all_answer

Json = dict[str, Any]

_NUMBER = re.compile("0|[1-9][0-9]{0,8}")


class CommandMode(StrEnum):
    """Who wrote the command line."""

    MANAGED = "managed"
    TAKEOVER = "takeover"


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One Pod, by what it carries itself."""

    pod: Json
    name: str
    uid: str
    version: str
    role: str
    ordinal: int | None
    """Which replica; None when its label says nothing usable."""
    index: int | None
    """Which seat; None when its label is absent or says nothing usable."""
    index_label: str | None
    total: int | None
    """Members its replica was made with; absent means 1, None means unreadable."""
    hash: str
    group: str
    queue: str
    is_going: bool
    is_terminal: bool
    is_ready: bool
    is_routed: bool
    """Whether Services select it."""
    mode: CommandMode | None

    @property
    def stands(self) -> bool:
        """Whether it is neither going nor ended."""
        return not self.is_going and not self.is_terminal

    @property
    def container(self) -> Json:
        """Its main container."""
        containers = (self.pod.get("spec") or {}).get("containers") or [{}]
        found: Json = containers[0]
        return found

    @property
    def all_answer(self) -> bool | None:
        """Whether every member of its replica answers requests; None when that cannot be told."""
        return all_answer(self.container) if self.mode is CommandMode.MANAGED else False


def read_member(pod: Json) -> Member:
    """Return *pod* as a member."""
    meta = pod.get("metadata") or {}
    labels = meta.get("labels") or {}
    annotations = meta.get("annotations") or {}
    status = pod.get("status") or {}
    mode = annotations.get(COMMAND_MODE_ANNOTATION)
    return Member(
        pod=pod,
        name=str(meta.get("name", "")),
        uid=str(meta.get("uid", "")),
        version=str(meta.get("resourceVersion", "")),
        role=str(labels.get(APP_COMPONENT_LABEL, "")),
        ordinal=_number(labels.get(ORDINAL_LABEL)),
        index=_number(labels.get(MEMBER_INDEX_LABEL)),
        index_label=labels.get(MEMBER_INDEX_LABEL),
        total=_total(annotations.get(kueue.TOTAL_ANNOTATION)),
        hash=str(annotations.get(SPEC_HASH_ANNOTATION, "")),
        group=str(labels.get(kueue.GROUP_LABEL, "")),
        queue=str(labels.get(kueue.QUEUE_LABEL, "")),
        is_going=meta.get("deletionTimestamp") is not None,
        is_terminal=status.get("phase") in ("Failed", "Succeeded"),
        is_ready=condition_status(status, "Ready") == "True",
        is_routed=labels.get(ROUTING_LABEL) == "true",
        mode=CommandMode(mode) if mode in tuple(CommandMode) else None,
    )


def _number(text: object) -> int | None:
    return int(text) if isinstance(text, str) and _NUMBER.fullmatch(text) else None


def _total(text: object) -> int | None:
    if text is None:
        return 1
    found = _number(text)
    return found if found else None


def condition_status(status: Mapping[str, Any], kind: str) -> str | None:
    """Return the status of the condition *kind*, or None when there is none."""
    for each in status.get("conditions") or []:
        if each.get("type") == kind:
            return str(each.get("status", ""))
    return None


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """One Workload of Kueue."""

    raw: Json
    name: str
    uid: str
    owners: frozenset[str]
    """UIDs of everything that it is made of; the proof of whose it is."""
    queue: str
    is_going: bool
    is_admitted: bool
    has_quota: bool

    @property
    def status(self) -> Json:
        """Its status."""
        found: Json = self.raw.get("status") or {}
        return found

    @property
    def holds_admission(self) -> bool:
        """Whether it is admitted, and nobody is about to take that away."""
        is_evicted = condition_status(self.status, kueue.EVICTED) == "True"
        return self.is_admitted and not self.is_going and not is_evicted

    @property
    def why_pending(self) -> str:
        """What Kueue says of the quota that it has not reserved; empty when it says nothing."""
        for each in self.status.get("conditions") or []:
            if each.get("type") == kueue.QUOTA_RESERVED and each.get("status") == "False":
                return str(each.get("message") or "")
        return ""

    @property
    def pod_sets(self) -> tuple[Json, ...]:
        """Its PodSets."""
        return tuple((self.raw.get("spec") or {}).get("podSets") or ())

    def stands_on(self, group: str) -> bool:
        """Return whether it holds the name of *group*. A place, and no proof of anything."""
        return self.name == group or any(each.get("name") == group for each in self.pod_sets)

    def owns(self, uids: Iterable[str]) -> bool:
        """Return whether one of *uids* is among its owners."""
        return not self.owners.isdisjoint(uids)


def read_workload(raw: Json) -> Workload:
    """Return *raw* as a Workload."""
    meta = raw.get("metadata") or {}
    status = raw.get("status") or {}
    owners = (str(each.get("uid", "")) for each in meta.get("ownerReferences") or [])
    return Workload(
        raw=raw,
        name=str(meta.get("name", "")),
        uid=str(meta.get("uid", "")),
        owners=frozenset(uid for uid in owners if uid),
        queue=str((raw.get("spec") or {}).get("queueName") or ""),
        is_going=meta.get("deletionTimestamp") is not None,
        is_admitted=condition_status(status, kueue.ADMITTED) == "True",
        has_quota=condition_status(status, kueue.QUOTA_RESERVED) == "True",
    )


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """Everything that one pass looks at; read from the API server, Pods before Workloads."""

    deployment: ModelDeployment
    types: Mapping[str, InstanceType]
    """The InstanceTypes that its roles name, as far as they exist."""
    members: tuple[Member, ...]
    """Pods whose controller is the deployment, by UID."""
    strangers: tuple[Member, ...]
    """Pods of others in pod groups."""
    workloads: tuple[Workload, ...]
    services: tuple[Json, ...]
    """Services whose controller is the deployment, by UID."""
    now: datetime
    refused: tuple[str, ...] = ()
    """What creates of the last pass ran into."""
