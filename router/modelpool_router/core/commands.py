"""
What the scheduler may ask for. Imperatives; the runtime carries them out in the order given.

Every ticket gets exactly one `Grant` or `Refuse`, or its client departs first. A ticket that was
granted may be granted once more, after `DispatchRefused`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from .spec import Epoch, MemberName, Ticket


class RefusalCode(StrEnum):
    """Codes of section 7 that the scheduler can decide on."""

    SWAP_BUDGET_EXCEEDED = "swap_budget_exceeded"
    QUEUE_FULL = "queue_full"
    RATE_LIMIT_EXCEEDED = "rate_limit_exceeded"
    MEMBER_FAILED = "member_failed"
    MEMBER_BACKOFF = "member_backoff"
    POOL_DRAINING = "pool_draining"
    SLOT_UNAVAILABLE = "slot_unavailable"
    MODEL_NOT_FOUND = "model_not_found"


class Grant(msgspec.Struct, frozen=True, gc=False):
    """Lend the resident to this request; the lease ends with `Finished`."""

    ticket: Ticket
    member: MemberName
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer this request with an error of ours."""

    ticket: Ticket
    code: RefusalCode
    retry_after_s: float | None
    """Seconds to suggest, 1..60, not yet rounded; None where trying again cannot help."""
    reason: str = ""
    """One sentence for people: which timer ended, what was waited for, why a member failed."""
    retryable: bool = True


class BreakReason(StrEnum):
    """Why the router ends an exchange that runs. Each has a text for clients in `web.faults`."""

    DRAIN_TIMEOUT = "drain_timeout"
    MAX_GENERATION = "max_generation"
    RESIDENT_HUNG = "resident_hung"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True)
class EndLease:
    """Break this lease off with an explicit error to its client (H7, H7a)."""

    ticket: Ticket
    reason: BreakReason


@dataclass(frozen=True, slots=True)
class Load:
    """Bring *member* up. Answered by `Loaded` or `LoadFailed` with the same epoch."""

    member: MemberName
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class CancelLoad:
    """`loadTimeout` is over: stop waiting; answered by `LoadFailed`, then `Unload` cleans up."""

    member: MemberName
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Unload:
    """Take *member* down. Answered by `Unloaded` or `UnloadFailed` with the same epoch."""

    member: MemberName
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class ProbeIdle:
    """Ask the engine whether it is idle. Answered by `IdleAnswered` with the same number."""

    member: MemberName
    probe: int


@dataclass(frozen=True, slots=True)
class Check:
    """Look at once whether the resident is still up. Answered by `Checked`."""

    member: MemberName
    epoch: Epoch


class NoteKind(StrEnum):
    """What is worth telling people; the names are stable: logs, events and metrics use them."""

    STATE_CHANGED = "state_changed"
    """fields: state, member, from_state, seconds (spent in from_state)."""
    SWAP_STARTED = "swap_started"
    """fields: source ("" = none), target, cause, swap (number), waiting."""
    SWAP_COMPLETED = "swap_completed"
    """fields: source, target, cause, swap, drain_s, unload_s, load_s, granted."""
    SWAP_DEFERRED = "swap_deferred"
    """fields: reason (PodsBusy | IdleCheckFailed), retry_s."""
    LOAD_FAILED = "load_failed"
    """fields: member, reason, detail, backoff_s, failures."""
    UNLOAD_RETRIED = "unload_retried"
    """fields: member, detail, way_out, retry_s."""
    OBSERVE_FAILED = "observe_failed"
    """fields: detail, way_out. Told again only when the words change."""
    RESIDENT_LOST = "resident_lost"
    """fields: member, reason, detail, leases."""
    TURN_ENDED = "turn_ended"
    """fields: member, reason (turn | deadline | linger | idle | unload | reclaim | removed)."""
    TURN_REOPENED = "turn_reopened"
    """fields: member."""
    LOAD_WASTED = "load_wasted"
    """fields: member: a load landed and left again without having served anybody."""
    RELEASED = "released"
    """fields: member, reason (idle_unload | command)."""


@dataclass(frozen=True, slots=True)
class Note:
    """Something to log, count and publish; never changes what happens."""

    kind: NoteKind
    fields: Mapping[str, str | float | int] = field(default_factory=dict)


Command = Grant | Refuse | EndLease | Load | CancelLoad | Unload | ProbeIdle | Check | Note
