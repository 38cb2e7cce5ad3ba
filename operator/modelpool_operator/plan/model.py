"""
What a plan is made of: actions, Events, status. Data only; `engine` carries it out.

Every write is conditional: on the version that was read, on the UID, or (creating) on nobody
having been there. A plan made of an old observation therefore fails instead of doing harm.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from modelpool_kube.kinds import Json, Kind, meta, name_of, uid, version_of
from modelpool_kube.slotrules import Member


@dataclass(frozen=True, slots=True)
class Happened:
    """One Event to tell people about."""

    reason: str
    """Stable word, CamelCase."""
    note: str
    """Sentence for people."""
    is_warning: bool = False


@dataclass(frozen=True, slots=True)
class Create:
    """Create an object; that it exists already means that the observation was old."""

    kind: Kind
    namespace: str
    body: Json


@dataclass(frozen=True, slots=True)
class Patch:
    """Merge into an object if it still is as it was read."""

    kind: Kind
    namespace: str
    name: str
    patch: Json
    version: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete the object that was read, and no other of the same name."""

    kind: Kind
    namespace: str
    name: str
    uid: str


# Of a slot: `modelpool_kube.slot` carries them out, behind the fence


@dataclass(frozen=True, slots=True)
class TakeSlot:
    """Get the Lease of the pool and begin an epoch on every member."""

    members: tuple[Member, ...]
    was_routed: bool
    """Whether a router held this slot before; kept in the record."""


@dataclass(frozen=True, slots=True)
class Unload:
    """Record what is meant, then scale a member to 0 after one more positive idle probe."""

    member: Member
    owner: str | None
    target: str | None
    """What the record is to say: who holds the slot, and whose turn it is."""
    probe: ProbeIdle | None
    """What to ask once more just before; None: nothing of it ever ran."""
    reason: str
    event: Happened | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """Look once more that all others are gone, record the load, then scale a member to 1."""

    member: Member
    others: tuple[Member, ...]
    reason: str
    event: Happened | None = None


@dataclass(frozen=True, slots=True)
class Settle:
    """Record what is the case: nothing is being done any more."""

    owner: str | None
    """Resident; None for a cold pool."""
    reason: str


@dataclass(frozen=True, slots=True)
class Unmark:
    """Take our mark off a former member that is gone."""

    member: Member


@dataclass(frozen=True, slots=True)
class LeaveSlot:
    """Give the Lease back."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where one Pod of a member is asked."""

    pod_uid: str
    host: str
    port: int


class Idle(StrEnum):
    """What a member said about its work."""

    IDLE = "idle"
    BUSY = "busy"
    UNREACHABLE = "unreachable"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True)
class ProbeIdle:
    """Ask all running Pods of a member whether they work on anything, and plan again."""

    member: str
    profile: str
    path: str
    targets: tuple[Target, ...]


Action = (
    Create | Patch | Delete | TakeSlot | Unload | Load | Settle | Unmark | LeaveSlot | ProbeIdle
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done next, and what is to be said."""

    actions: tuple[Action, ...] = ()
    """In order. Only the first is carried out; then everything is observed anew."""
    status: Json | None = None
    """The whole status as it is to be; None: not to be written."""
    events: tuple[Happened, ...] = ()
    """To be told once the status that shows them is written."""
    says_first: bool = False
    """Whether the status is written before the actions: they may be refused, and nothing is there
    that would say so."""
    requeue_after: float | None = None
    """Seconds after which to look again although nothing was reported."""


def patch_of(kind: Kind, obj: Json, patch: Json) -> Patch:
    """Return *patch* for *obj* as it was read."""
    return Patch(kind, str(meta(obj).get("namespace", "")), name_of(obj), patch, version_of(obj))


def delete_of(kind: Kind, obj: Json) -> Delete:
    """Return the deletion of *obj*."""
    return Delete(kind, str(meta(obj).get("namespace", "")), name_of(obj), uid(obj))


@dataclass(frozen=True, slots=True)
class Owner:
    """Who the children belong to."""

    kind: Kind
    name: str
    namespace: str
    uid: str

    def reference(self) -> Json:
        """Return the reference that makes the garbage collector follow, and us the controller."""
        return {
            "apiVersion": self.kind.api_version,
            "kind": self.kind.kind,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }
