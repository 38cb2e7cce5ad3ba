"""
What the scheduler remembers of a slot, and what can be asked of it without changing anything.

The memory of one pool in plain attributes. `lending` and `scheduler` build on it and are the only
ones that write. The questions here are about now and about the next moment at which something is
due; the questions about the future are in `outlook`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop

import msgspec

from . import policy
from .commands import (
    Command,
)
from .estimates import Estimates
from .spec import Epoch, HoldLedger, MemberName, PoolSpec, Ticket
from .view import SlotState

FIRST_DEFER_S = 1.0
UNLOAD_RETRY_S = 1.0


class Hold(msgspec.Struct, gc=False):
    ticket: Ticket
    member: MemberName
    since: float
    deadline: float
    key: str | None
    requeued: bool = False


class Lease(msgspec.Struct, gc=False):
    hold: Hold
    epoch: Epoch
    since: float
    ending: bool = False


@dataclass(slots=True)
class Queue:
    """The holds of one member: FIFO, and by deadline."""

    fifo: OrderedDict[Ticket, Hold] = field(default_factory=OrderedDict)
    deadlines: list[tuple[float, int]] = field(default_factory=list)

    def add(self, hold: Hold) -> None:
        self.fifo[hold.ticket] = hold
        if hold.requeued:
            # Back to its old place: several may come back, in any order.
            self.fifo = OrderedDict(sorted(self.fifo.items()))
        insort(self.deadlines, (hold.deadline, hold.ticket))

    def remove(self, hold: Hold) -> None:
        del self.fifo[hold.ticket]
        del self.deadlines[bisect_left(self.deadlines, (hold.deadline, hold.ticket))]

    def first(self) -> Hold:
        return next(iter(self.fifo.values()))


@dataclass(slots=True)
class Ghost:
    """Demand without a client: left behind by refused holds (H8a), or asked for by a person."""

    since: float
    expires: float
    """Infinity for a person's wish: it lasts until the member lands or fails."""
    returns_at: float
    """When the refused client was told to come back."""


@dataclass(slots=True)
class Closing:
    """Admission is closed: why, since when, and how far it got."""

    reason: str
    since: float
    cause: MemberName | None
    """Whose demand closed it, if anybody's."""
    drained_at: float | None = None
    probe: int | None = None
    idle: bool = False
    """The engine said so, when asked in this closing."""
    forced: bool = False


@dataclass(slots=True)
class Failure:
    """Failed loads of one member in a row."""

    count: int
    until: float
    reason: str
    retryable: bool
    told: str
    """The reason as clients get it."""


@dataclass(slots=True)
class Trouble:
    """Something that was tried in vain and is tried again; `view.Obstacle` in the making."""

    waits_for: str
    since: float
    tries: int = 0
    error: str = ""
    way_out: str = ""


@dataclass(slots=True)
class Swap:
    """What is known of the swap that runs, for notes."""

    number: int
    source: str
    target: str
    cause: str
    drain_s: float = 0.0
    unload_s: float = 0.0


class SlotBook:
    """
    The books of one pool. `scheduler` names the states and says who may change them.

    Args:
        spec: Members and rules.
        ledger: Router-wide count of holds, shared by all pools.
        now: Monotonic seconds; never decreases from call to call.
        jitter: Returns a number in [0, 1); spreads Retry-After.
        estimates: Kept over restarts by the runtime; fresh ones if not given.
    """

    def __init__(
        self,
        spec: PoolSpec,
        ledger: HoldLedger,
        *,
        now: float,
        jitter: Callable[[], float] = lambda: 0.0,
        estimates: Estimates | None = None,
    ) -> None:
        self.spec = spec
        self.estimates = estimates if estimates is not None else Estimates()
        self._ledger = ledger
        self._jitter = jitter

        self._state = SlotState.STARTING
        self._since = now
        self._up: MemberName | None = None
        self._epoch = Epoch(0)
        self._intruders: list[MemberName] = []
        self._evicting: MemberName | None = None
        self._evict_probe: int | None = None
        self._evict_at = now
        self._evict_unasked: set[MemberName] = set()
        """Intruders that need no idle answer any more: idle, dead, or half down already."""

        self._holds: dict[Ticket, Hold] = {}
        self._queues: dict[MemberName, Queue] = {}
        self._deadlines: list[tuple[float, Ticket]] = []
        self._ghosts: dict[MemberName, Ghost] = {}
        self._leases: dict[Ticket, Lease] = {}
        self._lent = 0
        self._parallel: dict[MemberName, int] = {}
        self._turn_mark: dict[MemberName, float] = {}
        self._failures: dict[MemberName, Failure] = {}

        self._landed_at = now
        self._last_answer_at: float | None = None
        self._promised_until = -math.inf
        self._served = 0
        self._suspect = False
        self._unhealthy_since: float | None = None
        self._turn_over = ""
        self._turn_ends_at: float | None = None
        self._turn_reason = ""
        self._kept_until = -math.inf
        self._closing: Closing | None = None
        self._probes = 0
        self._deferred_reason = ""
        self._deferred_until = -math.inf
        self._defer_s = FIRST_DEFER_S

        self._load_cancelled = False
        self._unload_release = ""
        self._unload_retry_at: float | None = None
        self._unload_retry_s = UNLOAD_RETRY_S
        self._unload_asked_at: float | None = None
        self._trouble: Trouble | None = None
        self._owed: tuple[MemberName, str] | None = None
        self._last_good: MemberName | None = None
        self._restore: MemberName | None = None
        self._warm = True
        self._released = False
        self._paused = False
        self._withheld = ""
        self._stopping = False

        self._swap: Swap | None = None
        self._swaps = 0
        self._loads = 0
        self._cause = ""
        self._calm = False
        self._calm_parallel = 0  # of the resident, while it is calm
        self._out: list[Command] = []

    @property
    def is_calm(self) -> bool:
        """Whether nothing can become due by time alone: `next_deadline` would be None."""
        return self._calm

    def _is_calm(self) -> bool:
        """
        Say whether lending and giving back cannot lead to anything else.

        That is nearly always so, and then both are done without a look at everything.
        """
        return (
            self._state is SlotState.RESIDENT
            and self._up in self.spec.members
            and not (self._queues or self._ghosts or self._intruders)
            and self._closing is None
            and not self._suspect
            and self._may_move()
            and self._unload_asked_at is None
            and not self._deferred_reason
            and self.spec.idle_unload_after_s is None
            and self.spec.reclaim_default_after_s is None
            and self._turn_ends_at is None
        )

    def next_deadline(self) -> float | None:
        """Return the next moment at which something is due, or None if only events matter."""
        due = math.inf
        while self._deadlines:
            at, ticket = self._deadlines[0]
            hold = self._holds.get(ticket)
            if hold is not None and hold.deadline == at:
                due = at
                break
            heappop(self._deadlines)
        for ghost in self._ghosts.values():
            due = min(due, ghost.expires)
        match self._state:
            case SlotState.LOADING:
                if not self._load_cancelled and self._may_touch():
                    due = min(due, self._since + self.spec.load_timeout_s)
            case SlotState.UNLOADING:
                if self._unload_retry_at is not None and self._may_touch():
                    due = min(due, self._unload_retry_at)
            case SlotState.RESIDENT:
                due = min(due, self._resident_due())
            case SlotState.STARTING | SlotState.COLD:
                pass
        evict = self._intruders and self._evict_probe is None and self._evicting is None
        if evict and self._may_move():
            due = min(due, self._evict_at)
        return None if due == math.inf else due

    def _resident_due(self) -> float:
        """When the resident's situation changes by time alone."""
        if self._suspect or not self._may_move():
            return math.inf
        due = math.inf
        spec = self.spec
        foreign_waits = self._turn_ends_at is not None or (
            self._closing is not None and self._closing.cause is not None
        )
        if spec.max_generation_s is not None and foreign_waits:
            for lease in self._leases.values():
                if lease.epoch == self._epoch and not lease.ending:
                    due = min(due, lease.since + spec.max_generation_s)
        closing = self._closing
        if closing is not None:
            if self._lent and spec.drain_timeout_s is not None and not closing.forced:
                due = min(due, closing.since + spec.drain_timeout_s)
            return due
        idle = self._lent == 0 and self._up not in self._queues
        change = math.inf
        if self._turn_over or self._unload_asked_at is not None:
            change = self._deferred_until
        elif self._up not in spec.members:
            change = self._deferred_until
        elif self._turn_ends_at is not None:
            change = min(self._turn_ends_at, self._kept_until) if idle else self._turn_ends_at
        elif idle:
            if spec.idle_unload_after_s is not None:
                change = self._idle_since() + spec.idle_unload_after_s
            if spec.reclaim_default_after_s is not None and spec.default not in (None, self._up):
                reclaim_at = self._idle_since() + spec.reclaim_default_after_s
                failure = self._failures.get(spec.default) if spec.default else None
                if failure is not None:
                    reclaim_at = max(reclaim_at, failure.until)
                change = min(change, reclaim_at)
        change = max(change, self._deferred_until)
        return due if change == -math.inf else min(due, change)

    def _awaits(self, state: SlotState, member: MemberName, epoch: Epoch) -> bool:
        """Say whether a report is about the life of the member that the slot is in now."""
        return self._state is state and self._up == member and self._epoch == epoch

    def _is_resident(self, member: MemberName) -> bool:
        return self._state is SlotState.RESIDENT and self._up == member

    def _is_open_for(self, member: MemberName) -> bool:
        return (
            self._up == member
            and self._state is SlotState.RESIDENT
            and self._closing is None
            and not self._suspect
            and self._lent < self._parallel_of(member)
            and member in self.spec.members
        )

    def _parallel_of(self, member: MemberName) -> int:
        known = self._parallel.get(member)
        if known is not None:
            return known
        spec = self.spec.members.get(member)
        return 0 if spec is None else spec.parallel

    def _may_touch(self) -> bool:
        """Say whether the slot is ours to act on; cleaning up needs no more than this."""
        return not (self._withheld or self._stopping)

    def _may_move(self) -> bool:
        return self._may_touch() and not self._paused

    def _may_load(self, member: MemberName, now: float) -> bool:
        failure = self._failures.get(member)
        return member in self.spec.members and (failure is None or now >= failure.until)

    def _reclaimable(self, now: float) -> bool:
        default = self.spec.default
        return default is not None and default != self._up and self._may_load(default, now)

    def _load_estimate(self, member: MemberName) -> float:
        spec = self.spec.members.get(member)
        return self.estimates.load(member, 0.0 if spec is None else spec.expected_load_s)

    def _swap_estimate(self, source: MemberName | None, target: MemberName) -> float:
        return self.estimates.unload(source) + self._load_estimate(target)

    def _waiting(self, now: float, *, but: MemberName | None) -> list[policy.Demand]:
        """Demand of all members but one, oldest first (H4); ties in order of configuration."""
        if not self._queues and not self._ghosts:
            return []
        found: list[tuple[float, MemberName]] = []
        for member in self.spec.members:
            if member == but or not self._may_load(member, now):
                continue
            since = math.inf
            queue = self._queues.get(member)
            if queue is not None:
                since = queue.first().since
            ghost = self._ghosts.get(member)
            if ghost is not None:
                since = min(since, ghost.since)
            if since < math.inf:
                # Who has just had a turn queues up behind those who have not.
                found.append((max(since, self._turn_mark.get(member, -math.inf)), member))
        found.sort(key=lambda item: item[0])
        waiting: list[policy.Demand] = []
        source = self._up
        for since, member in found:
            queue = self._queues.get(member)
            waiting.append(
                policy.Demand(
                    member=member,
                    since=since,
                    deadlines=queue.deadlines if queue is not None else (),
                    swap_s=self._swap_estimate(source, member),
                    drain_s=self.estimates.drain(source),
                )
            )
            source = member
        return waiting

    def _keep_until(self, foreign: list[policy.Demand]) -> float:
        """Until when an idle resident is kept although somebody else waits (H6, H8a)."""
        kept = self._promised_until
        if self._last_answer_at is not None:
            linger = policy.linger_s(self.spec.linger_s, swap_s=foreign[0].swap_s)
            kept = max(kept, self._last_answer_at + linger)
        return kept

    def _idle_since(self) -> float:
        return self._landed_at if self._last_answer_at is None else self._last_answer_at
