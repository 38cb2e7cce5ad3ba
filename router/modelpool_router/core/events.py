"""
What can happen to a slot. Facts in the past tense; the scheduler eats them one at a time.

Reports of the driver carry the epoch of the command they answer, so that a late one is told
from a fresh one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from .spec import Epoch, MemberName, PoolSpec, Ticket


class Idleness(StrEnum):
    """Answer of an engine that was asked whether it works on something."""

    IDLE = "idle"
    BUSY = "busy"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class Observed:
    """First report after start: which members were found up (usually none or one)."""

    up: tuple[MemberName, ...] = ()
    released: bool = False
    """The slot record says the pool was emptied on purpose: do not warm it."""
    prefer: MemberName | None = None
    """Who stays when several are up."""


@dataclass(frozen=True, slots=True)
class ObserveFailed:
    """What is up could not be seen, or what was left running not be taken down; tried again."""

    detail: str
    way_out: str = ""
    """What a person can do about it, if the driver knows."""


class Arrived(msgspec.Struct, frozen=True, gc=False):
    """A request with a complete, checked body wants *member*."""

    ticket: Ticket
    member: MemberName
    deadline: float
    """Latest moment for its answer to begin to be worked on; monotonic seconds."""
    key: str | None = None


class Departed(msgspec.Struct, frozen=True, gc=False):
    """A client left while its request was held."""

    ticket: Ticket


class Finished(msgspec.Struct, frozen=True, gc=False):
    """A lease ended: the response body is finished, or broke off on either side."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class DispatchRefused:
    """The member refused the connection before any byte of this request was sent (H10)."""

    ticket: Ticket
    deadline: float | None = None
    """End of the hold that follows; None = what its arrival said, which a request that was lent
    the resident at once never did."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The target answers its readiness probe."""

    member: MemberName
    epoch: Epoch
    parallel: int | None = None
    """What the engine says it can work on at once, if it says so."""


DRIVER_UNAVAILABLE: Final = "driver_unavailable"
"""Reason of a failed load that says nothing about the member: the platform did not do its part."""


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The target did not come up. Whether anything is left of it is for the unload to prove."""

    member: MemberName
    epoch: Epoch
    reason: str
    """Stable word: ``exited``, ``load_timeout``, ``command_not_found``, ``ImagePullBackOff`` ..."""
    detail: str = ""
    """For people: exit code, last log lines."""
    retryable: bool = True


@dataclass(frozen=True, slots=True)
class Unloaded:
    """The member is proven gone."""

    member: MemberName
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class UnloadFailed:
    """It could not be proven that the member is gone; it has to be tried again."""

    member: MemberName
    epoch: Epoch
    detail: str = ""
    way_out: str = ""
    """What a person can do about it, if the driver knows."""


@dataclass(frozen=True, slots=True)
class IdleAnswered:
    """Answer to `ProbeIdle` number *probe*."""

    probe: int
    verdict: Idleness


@dataclass(frozen=True, slots=True)
class Checked:
    """Answer to `Check`: is the resident of that epoch still up?"""

    member: MemberName
    epoch: Epoch
    up: bool


@dataclass(frozen=True, slots=True)
class HealthSeen:
    """Result of the routine look at a resident: readiness and idle probe, and its traffic."""

    member: MemberName
    epoch: Epoch
    healthy: bool
    """True when the readiness probe or the idle probe answered."""
    progress_at: float
    """When a lease of it last moved a byte; monotonic seconds."""


@dataclass(frozen=True, slots=True)
class ResidentLost:
    """The resident's process ended or its Pod is gone, without our doing."""

    member: MemberName
    epoch: Epoch
    reason: str = "exited"
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LoadAsked:
    """A person wants *member* up: demand without a client, obeys turns."""

    member: MemberName


@dataclass(frozen=True, slots=True)
class UnloadAsked:
    """A person wants the slot empty: drain, unload, then stay empty until demand."""


@dataclass(frozen=True, slots=True)
class Paused:
    """A person wants the slot left as it is: no swap begins, the resident goes on serving."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """End of `Paused`."""


@dataclass(frozen=True, slots=True)
class SlotWithheld:
    """
    The slot may not be moved, and requests for others than the resident get 503 with *reason*.

    For drivers that can lose the right to act (another router holds it, members are invalid).
    """

    reason: str


@dataclass(frozen=True, slots=True)
class SlotRegained:
    """End of `SlotWithheld`."""


@dataclass(frozen=True, slots=True)
class SteppedAside:
    """
    Another router was seen to hold the slot: nothing that is believed of it counts any more.

    As before `Observed`, which has to follow once the slot is ours again; withheld until
    `SlotRegained`. Answers under way go on.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Reconfigured:
    """The pool's rules or members changed."""

    spec: PoolSpec


@dataclass(frozen=True, slots=True)
class Stopping:
    """The router goes down: what is held is refused, nothing is moved any more."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing happened but time."""


Event = (
    Observed
    | ObserveFailed
    | Arrived
    | Departed
    | Finished
    | DispatchRefused
    | Loaded
    | LoadFailed
    | Unloaded
    | UnloadFailed
    | IdleAnswered
    | Checked
    | HealthSeen
    | ResidentLost
    | LoadAsked
    | UnloadAsked
    | Paused
    | Resumed
    | SlotWithheld
    | SlotRegained
    | SteppedAside
    | Reconfigured
    | Stopping
    | Tick
)
