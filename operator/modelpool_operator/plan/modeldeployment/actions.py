"""What a pass may do to the cluster: each action is one request, and says why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from modelpool_api.names import EventReason

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete the Pod *name* if it still is the one with *uid*."""

    name: str
    uid: str
    why: str


@dataclass(frozen=True, slots=True)
class DeleteWorkload:
    """Delete the Workload *name* if it still is the one with *uid*."""

    name: str
    uid: str
    why: str


@dataclass(frozen=True, slots=True, eq=False)
class CreatePod:
    """Create one member."""

    role: str
    ordinal: int
    index: int
    body: Json

    def __str__(self) -> str:
        return f"member {self.index} of replica {self.ordinal} of role {self.role}"


@dataclass(frozen=True, slots=True)
class Route:
    """Let Services select the Pod *name*, or no longer, if it is unchanged since *version*."""

    name: str
    version: str
    on: bool


@dataclass(frozen=True, slots=True, eq=False)
class CreateService:
    """Create a Service."""

    body: Json


@dataclass(frozen=True, slots=True, eq=False)
class PatchService:
    """Align a Service in place, so that it keeps its address."""

    name: str
    version: str
    patch: Json


@dataclass(frozen=True, slots=True)
class DeleteService:
    """Delete the Service *name* if it still is the one with *uid*."""

    name: str
    uid: str


Action = (
    DeletePod | DeleteWorkload | CreatePod | Route | CreateService | PatchService | DeleteService
)


@dataclass(frozen=True, slots=True)
class Note:
    """Something that people should read; becomes an Event."""

    reason: EventReason
    message: str
    is_warning: bool = False
