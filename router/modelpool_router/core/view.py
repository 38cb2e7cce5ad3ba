"""
What a pool looks like from outside, at one moment: values for people, the admin API and metrics.

Filled by `Scheduler.view`; reading it changes nothing. Everything in seconds is relative to the
moment of the view, so that it can be sent to another machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .spec import Epoch, MemberName, PoolName


class SlotState(StrEnum):
    """Where the slot is; see the head of `scheduler`."""

    STARTING = "starting"
    COLD = "cold"
    LOADING = "loading"
    RESIDENT = "resident"
    UNLOADING = "unloading"


class MemberStatus(StrEnum):
    """Status of a member as `/v1/models` shows it."""

    LOADED = "loaded"
    LOADING = "loading"
    UNLOADING = "unloading"
    UNLOADED = "unloaded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class MemberView:
    """One member at the moment of the view."""

    name: MemberName
    status: MemberStatus
    held: int
    in_flight: int
    parallel: int
    oldest_hold_s: float | None
    """Age of its oldest held request."""
    wanted: bool
    """Somebody wants it: a hold, or demand left behind by a refused one or by a command."""
    wait_s: float | None
    """Estimated time until a request that comes now is granted; 0 for an open resident."""
    load_estimate_s: float
    load_measured: bool
    unload_estimate_s: float
    backoff_s: float | None
    """Time left in which requests for it fail fast after a failed load."""
    failures: int
    """Failed loads in a row."""
    last_error: str


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What keeps a slot where it is although it was tried to move on."""

    waits_for: str
    """What has to come true, as the end of a sentence."""
    since_s: float
    """How long it has been waited for."""
    tries: int
    """How often it was tried."""
    error: str
    """What came of the last try."""
    way_out: str
    """What a person can do."""


@dataclass(frozen=True, slots=True)
class PoolView:
    """One pool at the moment of the view."""

    name: PoolName
    state: SlotState
    epoch: Epoch
    since_s: float
    """Time spent in this state."""
    resident: MemberName | None
    incumbent: MemberName | None
    """Who is leaving, while a swap runs."""
    target: MemberName | None
    """Who comes next, as far as it is decided."""
    cause: str
    """Why the current or last swap began: demand | warm | restore | reclaim | command."""
    admission: str
    """open | closed."""
    closing_reason: str
    """Why admission is closed: turn, deadline, linger, idle, unload, reclaim, removed; or ''."""
    turn_left_s: float | None
    """Time until the resident's turn ends; None when nobody else waits."""
    deferred_reason: str
    """PodsBusy | IdleCheckFailed, or '' when the swap is not put off."""
    deferred_retry_s: float | None
    load_elapsed_s: float | None
    load_expected_s: float | None
    held: int
    in_flight: int
    oldest_lease_s: float | None
    released: bool
    paused: bool
    withheld: str
    stopping: bool
    default: MemberName | None
    swap_budget_s: float
    loads_total: int
    swaps_total: int
    obstacle: Obstacle | None
    """Set from the first try that failed until one succeeds."""
    members: tuple[MemberView, ...]

    def member(self, name: MemberName) -> MemberView | None:
        """Return the view of *name*, or None if the pool has no such member."""
        for member in self.members:
            if member.name == name:
                return member
        return None
