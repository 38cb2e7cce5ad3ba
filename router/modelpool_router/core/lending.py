"""
Requests that wait for a slot and requests that use it: holding, granting, refusing, ending.

How it is done, and what is told to whom; *when* is decided in `scheduler`. Each request is in
exactly one place: held, lent to, or gone; and each hold is counted in the router-wide ledger.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush

from . import retry_after
from .commands import (
    BreakReason,
    EndLease,
    Grant,
    Note,
    NoteKind,
    RefusalCode,
    Refuse,
)
from .outlook import Outlook
from .slot import Ghost, Hold, Lease, Queue
from .spec import Ticket
from .view import SlotState

GHOST_GRACE_S = 30.0


class Lending(Outlook):
    """The books of one pool, with what is done to the requests in them."""

    def _hold(self, hold: Hold) -> None:
        self._ledger.add(hold.key)
        self._holds[hold.ticket] = hold
        queue = self._queues.get(hold.member)
        if queue is None:
            queue = self._queues[hold.member] = Queue()
        queue.add(hold)
        heappush(self._deadlines, (hold.deadline, hold.ticket))

    def _unhold(self, hold: Hold) -> None:
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

    def _grant(self, hold: Hold, now: float) -> None:
        self._leases[hold.ticket] = Lease(hold, self._epoch, now)
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

    def _end_leases(self, reason: BreakReason) -> None:
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
                self._out.append(EndLease(ticket, BreakReason.MAX_GENERATION))

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

    def _refuse_on_budget(self, hold: Hold, now: float) -> None:
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
            self._ghosts[hold.member] = Ghost(hold.since, expires, now + math.ceil(told_s))
        else:
            ghost.since = min(ghost.since, hold.since)
            ghost.expires = max(ghost.expires, expires)
            ghost.returns_at = max(ghost.returns_at, now + math.ceil(told_s))

    def _refuse(
        self,
        hold: Hold,
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
        hold: Hold,
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

    def _note(self, kind: NoteKind, **fields: str | float | int) -> None:
        self._out.append(Note(kind, fields))
