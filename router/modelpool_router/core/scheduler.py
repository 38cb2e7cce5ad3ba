"""
Who holds the slot, who waits, and when it changes hands: the heart of the router.

One `Scheduler` per pool. It is a sans-I/O object: facts go in as events, wishes come out as
commands, ``now`` is an argument. It never learns how a member is started, what a request says or
what time of day it is; the runtime does all of that and reports back.

What may live here: every decision about the slot. What must not: anything that waits.

The slot is in one of five states::

    STARTING --Observed--> COLD or RESIDENT
    COLD     --a member is wanted: Load-->              LOADING
    LOADING  --Loaded-->                                RESIDENT
    LOADING  --LoadFailed: Unload-->                    UNLOADING
    RESIDENT --drained and proven idle: Unload-->       UNLOADING
    RESIDENT --lost: Unload (to prove it gone)-->       UNLOADING
    UNLOADING --Unloaded-->                             COLD

COLD is passed through at every swap, and it is the only state a load begins in. That is the whole
proof that two members are never up through our doing: nothing is loaded unless the last member
was proven gone, whatever became of it (displaced, failed, lost, hung).

Inside RESIDENT admission is open or closed. It closes when the resident's turn is over (H5), when
it is idle and somebody else waits (H6), or when a person or a timer wants it gone; `_closing` says
which. While closed, leases run out by themselves (H7). When none is left the engine is asked
whether it is idle; only an answer to a question that was asked *in this closing* counts. Then, and
only then, `Unload` is emitted. Until that moment the decision is open: if the wish that closed
admission ends, admission reopens (H8). The one exception is a resident that hangs (H7a).

Time enters in one way: `next_deadline` names the next moment at which something is due, and any
event at or after it, `Tick` included, carries it out. After every event one path runs: refuse
what is late, take steps until nothing changes, refuse what is due now.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

import msgspec

from . import policy, retry_after
from .commands import (
    CancelLoad,
    Check,
    Command,
    EndLease,
    Grant,
    Load,
    Note,
    NoteKind,
    ProbeIdle,
    RefusalCode,
    Refuse,
    Unload,
)
from .estimates import Estimates
from .events import (
    Arrived,
    Checked,
    Departed,
    DispatchRefused,
    Event,
    Finished,
    HealthSeen,
    IdleAnswered,
    Idleness,
    LoadAsked,
    Loaded,
    LoadFailed,
    Observed,
    Paused,
    Reconfigured,
    ResidentLost,
    Resumed,
    SlotRegained,
    SlotWithheld,
    Stopping,
    Tick,
    UnloadAsked,
    Unloaded,
    UnloadFailed,
)
from .spec import Epoch, HoldLedger, MemberName, PoolSpec, Ticket
from .view import MemberStatus, MemberView, PoolView, SlotState

FIRST_DEFER_S = 1.0
MAX_DEFER_S = 15.0
FIRST_BACKOFF_S = 5.0
MAX_DOUBLED_BACKOFF_S = 600.0
"""Doubling stops here; five times the cost of the failure may still be longer."""
BACKOFF_PER_COST = 5.0
EARLY_LOSS_S = 30.0
"""A resident lost this soon after landing (or within its load time) counts as a failed load."""
GHOST_GRACE_S = 30.0
PROMISE_GRACE_S = 2.0
"""How much later than told a refused client may come back and still find its member kept."""
UNLOAD_RETRY_S = 1.0
MAX_UNLOAD_RETRY_S = 15.0
DRAINING_RETRY_S = 5.0
"""Retry-After of a router that goes down: about what a restart takes."""


class _Hold(msgspec.Struct):
    ticket: Ticket
    member: MemberName
    since: float
    deadline: float
    key: str | None
    requeued: bool = False


class _Lease(msgspec.Struct):
    hold: _Hold
    epoch: Epoch
    since: float
    ending: bool = False


@dataclass(slots=True)
class _Queue:
    """The holds of one member: FIFO, and by deadline."""

    fifo: OrderedDict[Ticket, _Hold] = field(default_factory=OrderedDict)
    deadlines: list[tuple[float, int]] = field(default_factory=list)

    def add(self, hold: _Hold) -> None:
        self.fifo[hold.ticket] = hold
        if hold.requeued:
            # Back to its old place: several may come back, in any order.
            self.fifo = OrderedDict(sorted(self.fifo.items()))
        insort(self.deadlines, (hold.deadline, hold.ticket))

    def remove(self, hold: _Hold) -> None:
        del self.fifo[hold.ticket]
        del self.deadlines[bisect_left(self.deadlines, (hold.deadline, hold.ticket))]

    def first(self) -> _Hold:
        return next(iter(self.fifo.values()))


@dataclass(slots=True)
class _Ghost:
    """Demand without a client: left behind by refused holds (H8a), or asked for by a person."""

    since: float
    expires: float
    """Infinity for a person's wish: it lasts until the member lands or fails."""
    returns_at: float
    """When the refused client was told to come back."""


@dataclass(slots=True)
class _Closing:
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
class _Failure:
    """Failed loads of one member in a row."""

    count: int
    until: float
    reason: str
    retryable: bool


@dataclass(slots=True)
class _Swap:
    """What is known of the swap that runs, for notes."""

    number: int
    source: str
    target: str
    cause: str
    drain_s: float = 0.0
    unload_s: float = 0.0


class Scheduler:
    """
    The state machine of one pool. See the head of the module.

    Args:
        spec: Members and rules; `Reconfigured` replaces it.
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

        self._holds: dict[Ticket, _Hold] = {}
        self._queues: dict[MemberName, _Queue] = {}
        self._deadlines: list[tuple[float, Ticket]] = []
        self._ghosts: dict[MemberName, _Ghost] = {}
        self._leases: dict[Ticket, _Lease] = {}
        self._lent = 0
        self._parallel: dict[MemberName, int] = {}
        self._turn_mark: dict[MemberName, float] = {}
        self._failures: dict[MemberName, _Failure] = {}

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
        self._closing: _Closing | None = None
        self._probes = 0
        self._deferred_reason = ""
        self._deferred_until = -math.inf
        self._defer_s = FIRST_DEFER_S

        self._load_cancelled = False
        self._unload_release = ""
        self._unload_retry_at: float | None = None
        self._unload_retry_s = UNLOAD_RETRY_S
        self._unload_asked_at: float | None = None
        self._owed: tuple[MemberName, str] | None = None
        self._last_good: MemberName | None = None
        self._restore: MemberName | None = None
        self._warm = True
        self._released = False
        self._paused = False
        self._withheld = ""
        self._stopping = False

        self._swap: _Swap | None = None
        self._swaps = 0
        self._loads = 0
        self._cause = ""
        self._calm = False
        self._out: list[Command] = []

    # ------------------------------------------------------------------ the two entry points

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one fact in; return what to do about it, in order."""
        out: list[Command] = []
        self._out = out
        if self._calm and self._handle_calmly(event, now):
            return out
        self._apply(event, now)
        self._refuse_late(now, due_too=False)
        while True:
            while self._step(now):
                pass
            if not self._refuse_late(now, due_too=True):
                self._calm = self._is_calm()
                return out

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

    def _handle_calmly(self, event: Event, now: float) -> bool:
        """Lend or take back without further thought; False if this event needs one."""
        if isinstance(event, Arrived):
            member = event.member
            if (
                member != self._up
                or now > event.deadline
                or self._lent >= self._parallel_of(member)
            ):
                return False
            self._grant(_Hold(event.ticket, member, now, event.deadline, event.key), now)
            return True
        if isinstance(event, Finished):
            self._end_lease(event.ticket, now)
            return True
        return False

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

    # ------------------------------------------------------------------ events

    def _apply(self, event: Event, now: float) -> None:
        match event:
            case Arrived():
                self._arrived(event, now)
            case Finished(ticket):
                self._end_lease(ticket, now)
            case Departed(ticket):
                hold = self._holds.get(ticket)
                if hold is not None:
                    self._unhold(hold)
                else:
                    self._end_lease(ticket, now)
            case DispatchRefused(ticket):
                self._dispatch_refused(ticket, now)
            case Tick():
                pass
            case Observed():
                self._observed(event, now)
            case Loaded():
                self._loaded(event, now)
            case LoadFailed():
                if self._awaits(SlotState.LOADING, event.member, event.epoch):
                    self._load_failed(event, now)
            case Unloaded():
                self._unloaded(event, now)
            case UnloadFailed():
                self._unload_failed(event, now)
            case IdleAnswered():
                self._idle_answered(event, now)
            case Checked():
                if self._awaits(SlotState.RESIDENT, event.member, event.epoch) and self._suspect:
                    self._suspect = False
                    if not event.up:
                        self._lost("gone", "the member refused a connection", now)
            case HealthSeen():
                self._health_seen(event, now)
            case ResidentLost():
                if self._awaits(SlotState.RESIDENT, event.member, event.epoch):
                    self._lost(event.reason, event.detail, now)
                elif event.member in self._intruders and event.epoch == self._epoch:
                    self._evict_unasked.add(event.member)
                    self._evict_at = now
            case LoadAsked(member):
                self._load_asked(member, now)
            case UnloadAsked():
                self._unload_asked_at = now
                if self._state is SlotState.COLD:
                    self._unload_asked_at = None
                    self._release("", "command")
            case Paused():
                self._paused = True
            case Resumed():
                self._paused = False
            case SlotWithheld(reason):
                self._withheld = reason
                resident = self._up if self._state is SlotState.RESIDENT else None
                for hold in [h for h in self._holds.values() if h.member != resident]:
                    self._refuse(hold, RefusalCode.SLOT_UNAVAILABLE, now, reason=reason)
            case SlotRegained():
                self._withheld = ""
            case Reconfigured(spec):
                self._reconfigured(spec, now)
            case Stopping():
                self._stopping = True
                for hold in list(self._holds.values()):
                    self._refuse(
                        hold,
                        RefusalCode.POOL_DRAINING,
                        now,
                        wait_s=DRAINING_RETRY_S,
                        reason="the router is shutting down",
                    )

    def _arrived(self, event: Arrived, now: float) -> None:
        hold = _Hold(event.ticket, event.member, now, event.deadline, event.key)
        if event.member not in self.spec.members:
            self._answer(hold, RefusalCode.MODEL_NOT_FOUND, None, "no such member", False)
            return
        if (
            self._is_open_for(event.member)
            and event.member not in self._queues
            and now <= event.deadline
            and (self._turn_ends_at is None or now < self._turn_ends_at)
        ):
            self._grant(hold, now)
            return
        if self._turned_away(hold, now):
            return
        refusal = self._ledger.refusal(event.key)
        if refusal is not None:
            reason = (
                "too many requests of this key are held"
                if refusal == RefusalCode.RATE_LIMIT_EXCEEDED
                else "too many requests are held"
            )
            wait_s = self.wait_s(event.member, now)
            self._answer(hold, RefusalCode(refusal), wait_s, reason, True)
            return
        self._hold(hold)

    def _turned_away(self, hold: _Hold, now: float) -> bool:
        """Refuse *hold* if holding it is pointless now, whatever its deadline; say whether."""
        failure = self._failures.get(hold.member)
        if failure is not None and now < failure.until and not self._is_resident(hold.member):
            self._answer(
                hold,
                RefusalCode.MEMBER_BACKOFF,
                failure.until - now,
                f"its last load failed ({failure.reason}); "
                f"it may be tried again in {failure.until - now:.0f} s",
                failure.retryable,
            )
        elif self._withheld and not self._is_resident(hold.member):
            wait_s = self.wait_s(hold.member, now)
            self._answer(hold, RefusalCode.SLOT_UNAVAILABLE, wait_s, self._withheld, True)
        elif self._stopping:
            self._answer(
                hold,
                RefusalCode.POOL_DRAINING,
                DRAINING_RETRY_S,
                "the router is shutting down",
                True,
            )
        else:
            return False
        return True

    def _dispatch_refused(self, ticket: Ticket, now: float) -> None:
        lease = self._leases.get(ticket)
        if lease is None:
            return
        self._end_lease(ticket, now, answered=False)
        hold = lease.hold
        if (
            self._state is SlotState.RESIDENT
            and lease.epoch == self._epoch
            and not self._suspect
            and self._up is not None
        ):
            # Believed ready and was not: lend it to nobody until somebody has looked.
            self._suspect = True
            self._out.append(Check(self._up, self._epoch))
        if hold.member not in self.spec.members:
            self._answer(hold, RefusalCode.MODEL_NOT_FOUND, None, "the member was removed", False)
            return
        if hold.requeued:
            self._answer(
                hold,
                RefusalCode.MEMBER_FAILED,
                self.wait_s(hold.member, now),
                "the member refused the connection twice",
                True,
            )
            return
        if self._turned_away(hold, now):
            return
        hold.requeued = True
        self._hold(hold)

    def _observed(self, event: Observed, now: float) -> None:
        if self._state is not SlotState.STARTING:
            return
        up = [m for m in self.spec.members if m in event.up]
        up += [m for m in event.up if m not in self.spec.members]
        self._released = event.released and not up
        if self._released:
            self._warm = False
        if not up:
            self._enter(SlotState.COLD, None, now)
            if self._unload_asked_at is not None:
                self._unload_asked_at = None
                self._release("", "command")
            return
        keep = up[0]
        for candidate in (event.prefer, self.spec.default):
            if candidate in up:
                keep = candidate
                break
        self._intruders = [m for m in up if m != keep]
        self._epoch = Epoch(self._epoch + 1)
        self._land(keep, now)

    def _loaded(self, event: Loaded, now: float) -> None:
        if not self._awaits(SlotState.LOADING, event.member, event.epoch):
            return
        load_s = now - self._since
        self.estimates.loaded(event.member, load_s)
        spec = self.spec.members.get(event.member)
        if event.parallel is not None and spec is not None and not spec.parallel_is_fixed:
            self._parallel[event.member] = event.parallel
        else:
            self._parallel.pop(event.member, None)
        self._restore = None
        self._land(event.member, now)
        granted = self._lend(now)
        swap, self._swap = self._swap, None
        if swap is not None:
            self._note(
                NoteKind.SWAP_COMPLETED,
                source=swap.source,
                target=swap.target,
                cause=swap.cause,
                swap=swap.number,
                drain_s=swap.drain_s,
                unload_s=swap.unload_s,
                load_s=load_s,
                granted=granted,
            )

    def _land(self, member: MemberName, now: float) -> None:
        """Make *member* the resident."""
        self._enter(SlotState.RESIDENT, member, now)
        self._landed_at = now
        self._last_answer_at = None
        self._lent = 0
        self._served = 0
        self._suspect = False
        self._unhealthy_since = None
        self._turn_over = ""
        self._turn_ends_at = None
        self._closing = None
        self._deferred_reason = ""
        self._deferred_until = -math.inf
        self._defer_s = FIRST_DEFER_S
        self._warm = False
        self._owed = None
        ghost = self._ghosts.pop(member, None)
        # A client that was told when to come back must find its member still there (H8a).
        self._promised_until = (
            ghost.returns_at + PROMISE_GRACE_S
            if ghost is not None and member not in self._queues
            else -math.inf
        )

    def _load_failed(self, event: LoadFailed, now: float) -> None:
        cost_s = now - self._since
        if self._swap is not None:
            cost_s += self._swap.unload_s
        self._failed(event.member, event.reason, event.detail, cost_s, now, event.retryable)
        if event.member == self.spec.default:
            self._warm = False
        self._begin_unload(event.member, now)

    def _failed(
        self,
        member: MemberName,
        reason: str,
        detail: str,
        cost_s: float,
        now: float,
        retryable: bool = True,
    ) -> None:
        """Count a failed load: back off, tell those who wait, remember whom to restore."""
        restored = self._restore == member
        self._restore = None
        last_good = self._last_good
        if last_good is not None and last_good != member and not restored and self.spec.restore:
            self._restore = last_good
            cost_s += self._load_estimate(last_good)
        self._last_good = None
        before = self._failures.get(member)
        count = 1 if before is None else before.count + 1
        doubled = min(FIRST_BACKOFF_S * 2.0 ** min(count - 1, 30), MAX_DOUBLED_BACKOFF_S)
        backoff_s = max(doubled, BACKOFF_PER_COST * cost_s)
        text = f"{reason}: {detail}" if detail else reason
        self._failures[member] = _Failure(count, now + backoff_s, text, retryable)
        self._ghosts.pop(member, None)
        self._swap = None
        self._note(
            NoteKind.LOAD_FAILED,
            member=member,
            reason=reason,
            detail=detail,
            backoff_s=backoff_s,
            failures=count,
        )
        queue = self._queues.get(member)
        for hold in list(queue.fifo.values()) if queue is not None else ():
            self._refuse(
                hold,
                RefusalCode.MEMBER_FAILED,
                now,
                wait_s=backoff_s,
                reason=text,
                retryable=retryable,
            )

    def _lost(self, reason: str, detail: str, now: float) -> None:
        """The resident is no more: believe nothing of it, prove it gone, then decide anew."""
        member = self._up
        assert member is not None
        self._note(
            NoteKind.RESIDENT_LOST, member=member, reason=reason, detail=detail, leases=self._lent
        )
        lived_s = now - self._landed_at
        early = lived_s < max(EARLY_LOSS_S, self._load_estimate(member))
        if self._served == 0:
            self._note(NoteKind.LOAD_WASTED, member=member)
        if early:
            cost_s = self._load_estimate(member) + lived_s
            self._failed(member, reason, detail, cost_s, now)
        else:
            self._failures.pop(member, None)
            self._last_good = None
        # Warmed once for each time the slot is found cold; not again and again when the default
        # itself is what dies.
        self._warm = not (early and member == self.spec.default)
        self._begin_unload(member, now)

    def _unloaded(self, event: Unloaded, now: float) -> None:
        if event.member == self._evicting and event.epoch == self._epoch:
            self._intruders.remove(event.member)
            self._evicting = None
            return
        if not self._awaits(SlotState.UNLOADING, event.member, event.epoch):
            return
        unload_s = now - self._since
        self.estimates.unloaded(event.member, unload_s)
        if self._swap is not None:
            self._swap.unload_s = unload_s
        reason = self._unload_release
        self._enter(SlotState.COLD, None, now)
        if self._unload_asked_at is not None:
            self._unload_asked_at = None
            reason = "command"
        if reason and not self._queues and not self._ghosts:
            self._release(event.member, reason)

    def _unload_failed(self, event: UnloadFailed, now: float) -> None:
        retry_s = self._unload_retry_s
        if event.member == self._evicting and event.epoch == self._epoch:
            self._evicting = None
            self._evict_at = now + UNLOAD_RETRY_S
            self._evict_unasked.add(event.member)  # half down already: it may never answer again
        elif self._awaits(SlotState.UNLOADING, event.member, event.epoch):
            self._unload_retry_at = now + retry_s
            self._unload_retry_s = min(2 * retry_s, MAX_UNLOAD_RETRY_S)
        else:
            return
        self._note(
            NoteKind.UNLOAD_RETRIED, member=event.member, detail=event.detail, retry_s=retry_s
        )

    def _idle_answered(self, event: IdleAnswered, now: float) -> None:
        if event.probe == self._evict_probe:
            self._evict_probe = None
            if event.verdict is Idleness.IDLE:
                self._evict_unasked.add(self._intruders[0])
            else:
                self._evict_at = now + FIRST_DEFER_S
            return
        closing = self._closing
        if closing is None or closing.probe != event.probe:
            return  # asked before admission was opened again: says nothing about now
        if event.verdict is Idleness.IDLE:
            closing.idle = True  # acted on by `_drain`, if the wish to swap still stands by then
            return
        reason = "PodsBusy" if event.verdict is Idleness.BUSY else "IdleCheckFailed"
        self._deferred_reason = reason
        self._deferred_until = now + self._defer_s
        self._note(NoteKind.SWAP_DEFERRED, reason=reason, retry_s=self._defer_s)
        self._defer_s = min(2 * self._defer_s, MAX_DEFER_S)
        self._closing = None

    def _health_seen(self, event: HealthSeen, now: float) -> None:
        if not self._awaits(SlotState.RESIDENT, event.member, event.epoch):
            return
        if event.healthy:
            self._unhealthy_since = None
            return
        if self._unhealthy_since is None or event.progress_at > self._unhealthy_since:
            self._unhealthy_since = now
            return
        if now - self._unhealthy_since >= self.spec.hung_after_s and self._may_touch():
            for ticket, lease in self._leases.items():
                if lease.epoch == self._epoch and not lease.ending:
                    lease.ending = True
                    self._out.append(EndLease(ticket, "resident_hung"))
            self._lost("hung", f"no answer for {now - self._unhealthy_since:.0f} s", now)

    def _load_asked(self, member: MemberName, now: float) -> None:
        if member not in self.spec.members or self._is_resident(member):
            return
        failure = self._failures.get(member)
        if failure is not None:
            failure.until = now  # a person asked: try again now, but keep counting
        self._ghosts[member] = _Ghost(now, math.inf, -math.inf)

    def _reconfigured(self, spec: PoolSpec, now: float) -> None:
        self.spec = spec
        for hold in [h for h in self._holds.values() if h.member not in spec.members]:
            self._unhold(hold)
            self._answer(hold, RefusalCode.MODEL_NOT_FOUND, None, "the member was removed", False)
        for table in (self._ghosts, self._failures, self._turn_mark):
            for member in [m for m in table if m not in spec.members]:
                del table[member]
        if self._restore not in spec.members:
            self._restore = None
        if self._last_good not in spec.members:
            self._last_good = None
        if self._owed is not None and self._owed[1] == "reclaim":
            self._owed = (spec.default, "reclaim") if spec.default is not None else None
        if self._owed is not None and self._owed[0] not in spec.members:
            self._owed = None

    # ------------------------------------------------------------------ one step at a time

    def _step(self, now: float) -> bool:
        """Do one thing that is due; return whether another look is needed."""
        self._drop_ghosts(now)
        if self._intruders and self._evict(now):
            return True
        match self._state:
            case SlotState.COLD:
                return self._step_cold(now)
            case SlotState.RESIDENT:
                return self._step_resident(now)
            case SlotState.LOADING:
                overdue = now >= self._since + self.spec.load_timeout_s
                if overdue and not self._load_cancelled and self._may_touch():
                    self._load_cancelled = True
                    assert self._up is not None
                    self._out.append(CancelLoad(self._up, self._epoch))
            case SlotState.UNLOADING:
                at = self._unload_retry_at
                if at is not None and now >= at and self._may_touch():
                    self._unload_retry_at = None
                    assert self._up is not None
                    self._out.append(Unload(self._up, self._epoch))
            case SlotState.STARTING:
                pass
        return False

    def _step_cold(self, now: float) -> bool:
        if self._intruders or not self._may_move():
            return False
        chosen = self._next_target(now)
        if chosen is None:
            return False
        target, cause = chosen
        self._epoch = Epoch(self._epoch + 1)
        self._loads += 1
        self._owed = None
        if cause != "restore":
            self._restore = None
        self._released = False
        self._load_cancelled = False
        self._cause = cause
        if self._swap is None:
            self._swap = self._start_swap("", target, cause)
        self._swap.target = target
        self._swap.cause = cause
        self._enter(SlotState.LOADING, target, now)
        self._out.append(Load(target, self._epoch))
        return True

    def _next_target(self, now: float) -> tuple[MemberName, str] | None:
        """H4: the oldest demand; else whoever is owed a load; else what a cold slot is given."""
        for demand in self._waiting(now, but=None):
            return demand.member, "demand"
        owed, self._owed = self._owed, None
        if owed is not None and self._may_load(owed[0], now):
            return owed
        restore = self._restore
        if restore is not None and self._may_load(restore, now):
            return restore, "restore"
        self._restore = None
        default = self.spec.default
        if self._warm and not self._released and default is not None:
            if self._may_load(default, now):
                return default, "warm"
            self._warm = False
        return None

    def _step_resident(self, now: float) -> bool:
        if self._suspect:
            return False
        assert self._up is not None
        foreign = self._waiting(now, but=self._up) if self._may_move() else []
        self._end_long_leases(bool(foreign), now)
        closing = self._closing
        if closing is not None:
            if not self._still_wanted(closing, foreign, now):
                self._closing = None
                self._turn_over = ""
                self._note(NoteKind.TURN_REOPENED, member=self._up)
                return True
            return self._drain(closing, now)
        if not foreign:
            self._turn_over = ""
            self._turn_ends_at = None
        reason = self._closing_reason(foreign, now)
        if not foreign and not reason:
            self._defer_s = FIRST_DEFER_S
        if now >= self._deferred_until:
            self._deferred_reason = ""
        if reason and now >= self._deferred_until:
            cause = foreign[0].member if foreign else None
            if reason == "reclaim":
                cause = self.spec.default
            self._closing = _Closing(reason, now, cause)
            self._note(NoteKind.TURN_ENDED, member=self._up, reason=reason)
            return True
        self._lend(now)
        return False

    def _closing_reason(self, foreign: list[policy.Demand], now: float) -> str:
        """Say why admission to the resident must close now, or '' if it stays open."""
        up = self._up
        assert up is not None
        if not self._may_move():
            return ""
        if up not in self.spec.members:
            return "removed"
        if self._unload_asked_at is not None:
            return "unload"
        idle = self._lent == 0 and up not in self._queues
        if foreign:
            if not self._turn_over and self._turn_ends_at is not None:
                # The end that was announced counts, even if nobody looked until after it.
                if now >= self._turn_ends_at:
                    self._turn_over = self._turn_reason
            if not self._turn_over:
                end = policy.turn_end(
                    foreign,
                    landed_at=self._landed_at,
                    max_turn_s=self.spec.max_turn_s,
                    now=now,
                )
                if end.at < self._promised_until and not any(d.deadlines for d in foreign):
                    # Nobody is there to be served instead. Without this two members whose clients
                    # are patient for less than a load would displace each other for ever (H8a).
                    end = policy.TurnEnd(self._promised_until, end.reason)
                self._turn_ends_at, self._turn_reason = end.at, end.reason
                if now >= end.at:
                    self._turn_over = end.reason
            if self._turn_over:
                return self._turn_over
            self._kept_until = self._keep_until(foreign)
            if idle and now >= self._kept_until:
                return "idle" if self._last_answer_at is None else "linger"
            return ""
        if idle:
            after = self._idle_since()
            unload_s, reclaim_s = self.spec.idle_unload_after_s, self.spec.reclaim_default_after_s
            if self._reclaimable(now) and reclaim_s is not None and now >= after + reclaim_s:
                return "reclaim"
            if unload_s is not None and now >= after + unload_s:
                return "idle_unload"
        return ""

    def _still_wanted(self, closing: _Closing, foreign: list[policy.Demand], now: float) -> bool:
        """Say whether the wish that closed admission still stands (H8)."""
        if not self._may_move():
            return False
        assert self._up is not None
        match closing.reason:
            case "removed":
                return self._up not in self.spec.members
            case "unload":
                return True
            case "idle_unload" | "reclaim":
                wanted = (
                    self.spec.idle_unload_after_s is not None
                    if closing.reason == "idle_unload"
                    else self.spec.reclaim_default_after_s is not None and self._reclaimable(now)
                )
                return wanted and not foreign and self._up not in self._queues
            case _:
                return bool(foreign)

    def _drain(self, closing: _Closing, now: float) -> bool:
        """Let leases run out; then ask the engine; when it is idle, displace the resident."""
        if self._lent:
            limit = self.spec.drain_timeout_s
            if limit is not None and not closing.forced and now >= closing.since + limit:
                closing.forced = True
                self._end_leases("drain_timeout")
            return False
        if closing.drained_at is None:
            closing.drained_at = now
        if closing.idle:
            self._displace(closing, now)
            return True
        if self._intruders or closing.probe is not None:
            return False
        assert self._up is not None
        member = self.spec.members.get(self._up)
        if member is not None and not member.has_idle_probe:
            self._displace(closing, now)
            return True
        self._probes += 1
        closing.probe = self._probes
        self._out.append(ProbeIdle(self._up, self._probes))
        return False

    def _displace(self, closing: _Closing, now: float) -> None:
        """The point of no return: the resident is drained and idle, take it down."""
        member = self._up
        assert member is not None and closing.drained_at is not None
        drain_s = closing.drained_at - closing.since
        self.estimates.drained(member, drain_s)
        self._turn_mark[member] = now
        self._failures.pop(member, None)
        release = {"unload": "command", "idle_unload": "idle_unload"}.get(closing.reason, "")
        if self._served == 0:
            self._note(NoteKind.LOAD_WASTED, member=member)
        if release or closing.reason == "removed":
            self._last_good = None
            self._warm = closing.reason == "removed"
            if closing.reason == "unload":
                self._unload_asked_at = None
            self._swap = None
        else:
            self._last_good = member
            cause = "reclaim" if closing.reason == "reclaim" else "demand"
            if closing.cause is not None:
                self._owed = (closing.cause, cause)
            self._swap = self._start_swap(member, closing.cause or "", cause)
            self._swap.drain_s = drain_s
        self._begin_unload(member, now, release=release)

    def _begin_unload(self, member: MemberName, now: float, *, release: str = "") -> None:
        self._enter(SlotState.UNLOADING, member, now)
        self._unload_release = release
        self._closing = None
        self._lent = 0
        self._suspect = False
        self._unload_retry_at = now
        self._unload_retry_s = UNLOAD_RETRY_S

    def _evict(self, now: float) -> bool:
        """Take down who was found up beside the resident, one at a time, only when idle."""
        if self._evicting is not None or self._evict_probe is not None or now < self._evict_at:
            return False
        if not self._may_move():
            return False
        for member in self._intruders:
            if member in self._evict_unasked:
                self._evicting = member
                self._out.append(Unload(member, self._epoch))
                return True
        self._probes += 1
        self._evict_probe = self._probes
        self._out.append(ProbeIdle(self._intruders[0], self._probes))
        return True

    # ------------------------------------------------------------------ holds and leases

    def _hold(self, hold: _Hold) -> None:
        self._ledger.add(hold.key)
        self._holds[hold.ticket] = hold
        queue = self._queues.get(hold.member)
        if queue is None:
            queue = self._queues[hold.member] = _Queue()
        queue.add(hold)
        heappush(self._deadlines, (hold.deadline, hold.ticket))

    def _unhold(self, hold: _Hold) -> None:
        del self._holds[hold.ticket]
        queue = self._queues[hold.member]
        queue.remove(hold)
        if not queue.fifo:
            del self._queues[hold.member]
        self._ledger.remove(hold.key)

    def _lend(self, now: float) -> int:
        """Grant the resident to its own waiters, up to `parallel`; return how many."""
        granted = 0
        while self._up is not None and self._up in self._queues and self._is_open_for(self._up):
            hold = self._queues[self._up].first()
            if hold.deadline < now:
                self._refuse_on_budget(hold, now)
                continue
            self._unhold(hold)
            self._grant(hold, now)
            granted += 1
        return granted

    def _grant(self, hold: _Hold, now: float) -> None:
        self._leases[hold.ticket] = _Lease(hold, self._epoch, now)
        self._lent += 1
        self._served += 1
        self._promised_until = -math.inf
        self._out.append(Grant(hold.ticket, hold.member, self._epoch))

    def _end_lease(self, ticket: Ticket, now: float, *, answered: bool = True) -> None:
        lease = self._leases.pop(ticket, None)
        if lease is None or lease.epoch != self._epoch or self._state is not SlotState.RESIDENT:
            return
        self._lent -= 1
        if answered:
            self._last_answer_at = now
        else:
            self._served -= 1

    def _end_leases(self, reason: str) -> None:
        for ticket, lease in self._leases.items():
            if lease.epoch == self._epoch and not lease.ending:
                lease.ending = True
                self._out.append(EndLease(ticket, reason))

    def _end_long_leases(self, foreign_waits: bool, now: float) -> None:
        limit = self.spec.max_generation_s
        if limit is None or not foreign_waits:
            return
        for ticket, lease in self._leases.items():
            if lease.epoch == self._epoch and not lease.ending and now >= lease.since + limit:
                lease.ending = True
                self._out.append(EndLease(ticket, "max_generation"))

    def _refuse_late(self, now: float, *, due_too: bool) -> bool:
        """Refuse holds past their deadline (*due_too*: also those due now); return if any was."""
        refused = False
        while self._deadlines:
            deadline, ticket = self._deadlines[0]
            if deadline > now or (deadline == now and not due_too):
                break
            heappop(self._deadlines)
            hold = self._holds.get(ticket)
            if hold is not None and hold.deadline == deadline:
                self._refuse_on_budget(hold, now)
                refused = True
        return refused

    def _refuse_on_budget(self, hold: _Hold, now: float) -> None:
        wait_s = self.wait_s(hold.member, now)
        told_s = retry_after.suggest_s(wait_s, self._jitter())
        held_s = now - hold.since
        self._unhold(hold)
        self._answer(
            hold,
            RefusalCode.SWAP_BUDGET_EXCEEDED,
            told_s,
            f"held for {held_s:.1f} s without getting a turn; {self._waits_for(hold.member)}",
            True,
            jittered=True,
        )
        if self._is_resident(hold.member) and self._closing is None:
            return  # it is up and only busy: no swap is needed, so none is asked for
        ghost = self._ghosts.get(hold.member)
        expires = now + math.ceil(told_s) + GHOST_GRACE_S
        if ghost is None:
            self._ghosts[hold.member] = _Ghost(hold.since, expires, now + math.ceil(told_s))
        else:
            ghost.since = min(ghost.since, hold.since)
            ghost.expires = max(ghost.expires, expires)
            ghost.returns_at = max(ghost.returns_at, now + math.ceil(told_s))

    def _refuse(
        self,
        hold: _Hold,
        code: RefusalCode,
        now: float,
        *,
        reason: str,
        wait_s: float | None = None,
        retryable: bool = True,
    ) -> None:
        if wait_s is None:
            wait_s = self.wait_s(hold.member, now)
        self._unhold(hold)
        self._answer(hold, code, wait_s, reason, retryable)

    def _answer(
        self,
        hold: _Hold,
        code: RefusalCode,
        wait_s: float | None,
        reason: str,
        retryable: bool,
        *,
        jittered: bool = False,
    ) -> None:
        if wait_s is not None and not jittered:
            wait_s = retry_after.suggest_s(wait_s, self._jitter())
        self._out.append(Refuse(hold.ticket, code, wait_s, reason, retryable))

    def _drop_ghosts(self, now: float) -> None:
        if self._ghosts:
            for member in [m for m, g in self._ghosts.items() if now >= g.expires]:
                del self._ghosts[member]

    # ------------------------------------------------------------------ small questions

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

    def wait_s(self, member: MemberName, now: float) -> float:
        """Estimate the time until a request for *member* that comes now would be granted."""
        if self._is_open_for(member) and member not in self._queues:
            return 0.0
        failure = self._failures.get(member)
        if failure is not None and now < failure.until:
            return failure.until - now
        elapsed = now - self._since
        wait, source = 0.0, self._up
        match self._state:
            case SlotState.RESIDENT:
                if self._up == member:
                    return self.estimates.drain(member)
                if self._closing is None:
                    wait += self._turn_left(now)
                wait += self.estimates.drain(source) if self._lent else 0.0
            case SlotState.LOADING:
                assert self._up is not None
                wait += retry_after.remaining_s(self._load_estimate(self._up), elapsed)
                if self._up == member:
                    return wait
                wait += self.estimates.drain(source)
            case SlotState.UNLOADING:
                wait += retry_after.remaining_s(self.estimates.unload(self._up), elapsed)
                source = None
            case SlotState.STARTING | SlotState.COLD:
                source = None
        for demand in self._waiting(now, but=source):
            if demand.member == member:
                break
            wait += self._swap_estimate(source, demand.member)
            wait += self.estimates.drain(demand.member)
            source = demand.member
        return wait + self._swap_estimate(source, member)

    def _turn_left(self, now: float) -> float:
        if self._lent == 0 or self._turn_ends_at is None or self._turn_over:
            return max(0.0, self._deferred_until - now) if self._deferred_reason else 0.0
        return max(0.0, self._turn_ends_at - now)

    def _waits_for(self, member: MemberName) -> str:
        """One clause for people: what a hold of *member* is waiting for."""
        if self._paused:
            return "the pool is paused"
        match self._state:
            case SlotState.STARTING:
                return "the pool is starting"
            case SlotState.COLD:
                return "the slot is empty"
            case SlotState.LOADING if self._up == member:
                return f"{member} is loading"
            case SlotState.LOADING:
                return f"{self._up} is loading"
            case SlotState.UNLOADING:
                return f"{self._up} is unloading"
            case SlotState.RESIDENT if self._up == member:
                return f"{member} is busy with {self._lent} requests"
            case SlotState.RESIDENT:
                deferred = f" ({self._deferred_reason})" if self._deferred_reason else ""
                return f"{self._up} holds the slot with {self._lent} requests{deferred}"

    # ------------------------------------------------------------------ telling people

    def _enter(self, state: SlotState, member: MemberName | None, now: float) -> None:
        before, seconds = self._state, now - self._since
        self._state, self._up, self._since = state, member, now
        self._note(
            NoteKind.STATE_CHANGED,
            state=state,
            member=member or "",
            from_state=before,
            seconds=seconds,
        )

    def _release(self, member: str, reason: str) -> None:
        self._released = True
        self._warm = False
        self._owed = None
        self._restore = None
        self._swap = None
        self._note(NoteKind.RELEASED, member=member, reason=reason)

    def _start_swap(self, source: str, target: str, cause: str) -> _Swap:
        self._swaps += 1
        self._note(
            NoteKind.SWAP_STARTED,
            source=source,
            target=target,
            cause=cause,
            swap=self._swaps,
            waiting=len(self._holds),
        )
        return _Swap(self._swaps, source, target, cause)

    def _note(self, kind: NoteKind, **fields: str | float | int) -> None:
        self._out.append(Note(kind, fields))

    def view(self, now: float) -> PoolView:
        """Describe the pool at this moment; changes nothing."""
        resident = self._up if self._state is SlotState.RESIDENT else None
        loading = self._up if self._state is SlotState.LOADING else None
        waiting = self._waiting(now, but=self._up)
        target = loading
        if target is None and waiting and (self._closing or self._state is SlotState.UNLOADING):
            target = waiting[0].member
        elif target is None and self._owed is not None:
            target = self._owed[0]
        leaving = self._closing is not None or self._state is SlotState.UNLOADING
        lease_since = min((lease.since for lease in self._leases.values()), default=None)
        return PoolView(
            name=self.spec.name,
            state=self._state,
            epoch=self._epoch,
            since_s=now - self._since,
            resident=resident,
            incumbent=self._up if leaving else None,
            target=target,
            cause=self._cause,
            admission="open" if resident is not None and self._closing is None else "closed",
            closing_reason=self._closing.reason if self._closing is not None else "",
            turn_left_s=(
                max(0.0, self._turn_ends_at - now)
                if resident is not None and self._turn_ends_at is not None
                else None
            ),
            deferred_reason=self._deferred_reason,
            deferred_retry_s=(
                max(0.0, self._deferred_until - now) if self._deferred_reason else None
            ),
            load_elapsed_s=now - self._since if loading is not None else None,
            load_expected_s=self._load_estimate(loading) if loading is not None else None,
            held=len(self._holds),
            in_flight=len(self._leases),
            oldest_lease_s=None if lease_since is None else now - lease_since,
            released=self._released,
            paused=self._paused,
            withheld=self._withheld,
            stopping=self._stopping,
            default=self.spec.default,
            swap_budget_s=self.spec.swap_budget_s,
            loads_total=self._loads,
            swaps_total=self._swaps,
            members=tuple(self._member_view(name, now) for name in self.spec.members),
        )

    def _member_view(self, name: MemberName, now: float) -> MemberView:
        queue = self._queues.get(name)
        failure = self._failures.get(name)
        status = MemberStatus.UNLOADED
        if self._up == name:
            status = {
                SlotState.LOADING: MemberStatus.LOADING,
                SlotState.RESIDENT: MemberStatus.LOADED,
                SlotState.UNLOADING: MemberStatus.UNLOADING,
            }.get(self._state, MemberStatus.UNLOADED)
        elif failure is not None and now < failure.until:
            status = MemberStatus.FAILED
        return MemberView(
            name=name,
            status=status,
            held=len(queue.fifo) if queue is not None else 0,
            in_flight=sum(1 for lease in self._leases.values() if lease.hold.member == name),
            parallel=self._parallel_of(name),
            oldest_hold_s=now - queue.first().since if queue is not None else None,
            wanted=queue is not None or name in self._ghosts,
            wait_s=self.wait_s(name, now),
            load_estimate_s=self._load_estimate(name),
            load_measured=name in self.estimates.load_s,
            unload_estimate_s=self.estimates.unload(name),
            backoff_s=(
                failure.until - now if failure is not None and now < failure.until else None
            ),
            failures=failure.count if failure is not None else 0,
            last_error=failure.reason if failure is not None else "",
        )
