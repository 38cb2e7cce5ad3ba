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

from . import policy
from .commands import (
    BreakReason,
    CancelLoad,
    Check,
    Command,
    EndLease,
    Load,
    NoteKind,
    ProbeIdle,
    RefusalCode,
    Unload,
)
from .events import (
    DRIVER_UNAVAILABLE,
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
    ObserveFailed,
    Paused,
    Reconfigured,
    ResidentLost,
    Resumed,
    SlotRegained,
    SlotWithheld,
    SteppedAside,
    Stopping,
    Tick,
    UnloadAsked,
    Unloaded,
    UnloadFailed,
)
from .lending import Lending
from .slot import FIRST_DEFER_S, UNLOAD_RETRY_S, Closing, Failure, Ghost, Hold, Lease, Swap, Trouble
from .spec import Epoch, MemberName, PoolSpec, Ticket
from .view import SlotState

MAX_DEFER_S = 15.0
FIRST_BACKOFF_S = 5.0
MAX_DOUBLED_BACKOFF_S = 600.0
"""Doubling stops here; five times the cost of the failure may still be longer."""
BACKOFF_PER_COST = 5.0
EARLY_LOSS_S = 30.0
"""A resident lost this soon after landing (or within its load time) counts as a failed load."""
PROMISE_GRACE_S = 2.0
"""How much later than told a refused client may come back and still find its member kept."""
MAX_UNLOAD_RETRY_S = 15.0
DRAINING_RETRY_S = 5.0
"""Retry-After of a router that goes down: about what a restart takes."""


class Scheduler(Lending):
    """
    The state machine of one pool. See the head of the module, and `SlotBook` for the arguments.
    """

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
                if self._calm and self._up is not None:
                    self._calm_parallel = self._parallel_of(self._up)
                return out

    def lend(self, ticket: Ticket, member: MemberName, key: str | None, now: float) -> Epoch | None:
        """
        Do what `Arrived` would lead to where that is no more than a grant.

        Returns:
            The epoch of the lease; None, and nothing was done, if more would have to be thought of.
        """
        if not self._calm or member != self._up or self._lent >= self._calm_parallel:
            return None
        self._leases[ticket] = Lease(Hold(ticket, member, now, now, key), self._epoch, now)
        self._lent += 1
        self._served += 1
        self._promised_until = -math.inf
        return self._epoch

    def take_back(self, ticket: Ticket, now: float) -> bool:
        """Do what `Finished` would lead to while nothing is going on; False if something is."""
        if not self._calm:
            return False
        lease = self._leases.pop(ticket, None)
        if lease is not None and lease.epoch == self._epoch:
            self._lent -= 1
            self._last_answer_at = now
        return True

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
            self._grant(Hold(event.ticket, member, now, event.deadline, event.key), now)
            return True
        if isinstance(event, Finished):
            self._end_lease(event.ticket, now)
            return True
        return False

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
            case DispatchRefused(ticket, deadline):
                self._dispatch_refused(ticket, deadline, now)
            case Tick():
                pass
            case Observed():
                self._observed(event, now)
            case ObserveFailed(detail, way_out):
                if self._state is SlotState.STARTING:
                    waits_for = "a look at what is up, and the end of what was left running"
                    if self._obstructed(waits_for, detail, way_out, now):
                        self._note(NoteKind.OBSERVE_FAILED, detail=detail, way_out=way_out)
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
            case SteppedAside(reason):
                self._step_aside(reason, now)
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
        hold = Hold(event.ticket, event.member, now, event.deadline, event.key)
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

    def _turned_away(self, hold: Hold, now: float) -> bool:
        """Refuse *hold* if holding it is pointless now, whatever its deadline; say whether."""
        failure = self._failures.get(hold.member)
        if failure is not None and now < failure.until and not self._is_resident(hold.member):
            self._answer(
                hold,
                RefusalCode.MEMBER_BACKOFF,
                failure.until - now,
                f"its last load failed ({failure.told}); "
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

    def _dispatch_refused(self, ticket: Ticket, deadline: float | None, now: float) -> None:
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
        if deadline is not None:
            hold.deadline = deadline
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

    def _step_aside(self, reason: str, now: float) -> None:
        """Believe nothing of the slot any more; leases that are out end by themselves."""
        self._withheld = reason
        for hold in list(self._holds.values()):
            self._refuse(hold, RefusalCode.SLOT_UNAVAILABLE, now, reason=reason)
        self._ghosts.clear()
        self._intruders.clear()
        self._evicting = self._evict_probe = None
        self._evict_unasked.clear()
        self._closing = None
        self._unload_retry_at = None
        self._unload_asked_at = None
        self._turn_ends_at = None
        self._turn_over = ""
        self._deferred_reason = ""
        self._deferred_until = -math.inf
        self._suspect = False
        self._lent = 0
        self._swap = None
        self._owed = self._restore = self._last_good = None
        self._warm = True
        self._enter(SlotState.STARTING, None, now)

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
        if event.reason == DRIVER_UNAVAILABLE:
            # The time that the platform took is no reason to keep a healthy member waiting.
            cost_s = 0.0
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
        *,
        has_served: bool = False,
    ) -> None:
        """
        Count a failed load: back off, tell those who wait, remember whom to restore.

        Args:
            has_served: Its last words may quote what other clients said: not for clients.
        """
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
        told = text.partition("\n")[0] if has_served else text
        self._failures[member] = Failure(count, now + backoff_s, text, retryable, told)
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
                reason=told,
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
            self._failed(member, reason, detail, cost_s, now, has_served=True)
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
            self._trouble = None
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
        self._obstructed(f"proof that {event.member} is gone", event.detail, event.way_out, now)
        self._note(
            NoteKind.UNLOAD_RETRIED,
            member=event.member,
            detail=event.detail,
            way_out=event.way_out,
            retry_s=retry_s,
        )

    def _obstructed(self, waits_for: str, error: str, way_out: str, now: float) -> bool:
        """Remember what stands in the way; return whether that is news."""
        trouble = self._trouble
        if trouble is None or trouble.waits_for != waits_for:
            is_state = self._state in (SlotState.STARTING, SlotState.UNLOADING)
            trouble = self._trouble = Trouble(waits_for, self._since if is_state else now)
        is_news = (trouble.error, trouble.way_out) != (error, way_out)
        trouble.tries += 1
        trouble.error, trouble.way_out = error, way_out
        return is_news

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
                    self._out.append(EndLease(ticket, BreakReason.RESIDENT_HUNG))
            self._lost("hung", f"no answer for {now - self._unhealthy_since:.0f} s", now)

    def _load_asked(self, member: MemberName, now: float) -> None:
        if member not in self.spec.members:
            return
        if self._is_resident(member):
            closing = self._closing
            if closing is not None and closing.reason in ("idle_unload", "reclaim"):
                # As good as a use: without that it would be idle for too long again at once.
                self._last_answer_at = now
                self._closing = None
                self._note(NoteKind.TURN_REOPENED, member=member)
                return
            if closing is None and self._unload_asked_at is None and not self._suspect:
                return
        # Of a resident that is about to leave the wish outlives the unload.
        failure = self._failures.get(member)
        if failure is not None:
            failure.until = now  # a person asked: try again now, but keep counting
        self._ghosts[member] = Ghost(now, math.inf, -math.inf)

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
        if self._closing is None and self._unload_asked_at is None:
            self._ghosts.pop(self._up, None)  # it stays after all, which is all that was wished
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
            self._closing = Closing(reason, now, cause)
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

    def _still_wanted(self, closing: Closing, foreign: list[policy.Demand], now: float) -> bool:
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

    def _drain(self, closing: Closing, now: float) -> bool:
        """Let leases run out; then ask the engine; when it is idle, displace the resident."""
        if self._lent:
            limit = self.spec.drain_timeout_s
            if limit is not None and not closing.forced and now >= closing.since + limit:
                closing.forced = True
                self._end_leases(BreakReason.DRAIN_TIMEOUT)
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

    def _displace(self, closing: Closing, now: float) -> None:
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

    def _enter(self, state: SlotState, member: MemberName | None, now: float) -> None:
        before, seconds = self._state, now - self._since
        self._state, self._up, self._since = state, member, now
        self._trouble = None
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

    def _start_swap(self, source: str, target: str, cause: str) -> Swap:
        self._swaps += 1
        self._note(
            NoteKind.SWAP_STARTED,
            source=source,
            target=target,
            cause=cause,
            swap=self._swaps,
            waiting=len(self._holds),
        )
        return Swap(self._swaps, source, target, cause)
