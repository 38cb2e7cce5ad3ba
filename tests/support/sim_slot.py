"""
One scheduler, driven by hand: for tests that tell one rule in exact times.

Nothing answers by itself. A test says what happens and when; `Slot` keeps virtual time, passes the
ticks that fall due on the way, and writes down every command with its moment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from modelpool_router.core import commands as c
from modelpool_router.core import events as e
from modelpool_router.core.estimates import Estimates
from modelpool_router.core.scheduler import Scheduler
from modelpool_router.core.spec import (
    Bounds,
    HoldLedger,
    MemberName,
    MemberSpec,
    PoolName,
    PoolSpec,
    Ticket,
)
from modelpool_router.core.view import PoolView

A, B, C = MemberName("a"), MemberName("b"), MemberName("c")

Kind = TypeVar("Kind", bound=c.Command)


def pool(
    *names: str,
    parallel: int = 16,
    expected_load_s: float = 10.0,
    probes: bool = True,
    default: MemberName | None = None,
    swap_budget_s: float = 300.0,
    max_turn_s: float = 60.0,
    linger_s: float | None = 0.0,
    drain_timeout_s: float | None = None,
    load_timeout_s: float = 600.0,
    max_generation_s: float | None = None,
    idle_unload_after_s: float | None = None,
    reclaim_default_after_s: float | None = None,
    restore: bool = True,
) -> PoolSpec:
    """Return a pool of like members; no linger unless a test is about it."""
    members = {
        MemberName(name): MemberSpec(
            MemberName(name),
            parallel=parallel,
            expected_load_s=expected_load_s,
            has_idle_probe=probes,
        )
        for name in names or ("a", "b")
    }
    return PoolSpec(
        PoolName("gpu0"),
        members,
        default=default,
        swap_budget_s=swap_budget_s,
        max_turn_s=max_turn_s,
        linger_s=linger_s,
        drain_timeout_s=drain_timeout_s,
        load_timeout_s=load_timeout_s,
        max_generation_s=max_generation_s,
        idle_unload_after_s=idle_unload_after_s,
        reclaim_default_after_s=reclaim_default_after_s,
        restore=restore,
    )


class Slot:
    """A scheduler at a moment in virtual time, and everything it ever said."""

    def __init__(
        self,
        spec: PoolSpec,
        *,
        up: tuple[MemberName, ...] = (),
        released: bool = False,
        bounds: Bounds | None = None,
        estimates: Estimates | None = None,
        jitter: Callable[[], float] = lambda: 0.0,
        observe: bool = True,
    ) -> None:
        self.now = 0.0
        self.spec = spec
        self.ledger = HoldLedger(bounds or Bounds())
        self.scheduler = Scheduler(spec, self.ledger, now=0.0, jitter=jitter, estimates=estimates)
        self.log: list[tuple[float, c.Command]] = []
        self._ticket = 0
        if observe:
            self.tell(e.Observed(up, released=released))

    # -- what happens ----------------------------------------------------------------------------

    def tell(self, event: e.Event) -> list[c.Command]:
        """Hand *event* over now; return what came out, notes left out."""
        commands = self.scheduler.handle(event, self.now)
        self.log += [(self.now, command) for command in commands]
        return [command for command in commands if not isinstance(command, c.Note)]

    def at(self, t: float) -> Slot:
        """Go to *t*, ticking whenever the scheduler asked for it."""
        for _ in range(10_000):
            due = self.scheduler.next_deadline()
            if due is None or due > t:
                self.now = max(self.now, t)
                return self
            self.now = max(self.now, due)
            self.tell(e.Tick())
        raise AssertionError(f"ticks without end at {self.now}")

    def come(self, member: MemberName, *, patience: float | None = None, key: str | None = None,
             ) -> Ticket:  # fmt: skip
        """A client asks for *member* now; return its ticket."""
        self._ticket += 1
        ticket = Ticket(self._ticket)
        budget = self.spec.swap_budget_s if patience is None else patience
        self.tell(e.Arrived(ticket, member, self.now + budget, key))
        return ticket

    def finish(self, *tickets: Ticket) -> list[c.Command]:
        """The answers of *tickets* are complete."""
        return [command for ticket in tickets for command in self.tell(e.Finished(ticket))]

    def loaded(self, parallel: int | None = None) -> list[c.Command]:
        """The load that was asked for last lands now."""
        load = self.last(c.Load)
        return self.tell(e.Loaded(load.member, load.epoch, parallel))

    def load_failed(self, reason: str = "exited", *, retryable: bool = True) -> list[c.Command]:
        """The load that was asked for last fails now."""
        load = self.last(c.Load)
        return self.tell(
            e.LoadFailed(load.member, load.epoch, reason, "exit code 1", retryable=retryable)
        )

    def unloaded(self) -> list[c.Command]:
        """The unload that was asked for last is proven now."""
        unload = self.last(c.Unload)
        return self.tell(e.Unloaded(unload.member, unload.epoch))

    def unload_failed(self) -> list[c.Command]:
        """The unload that was asked for last could not be proven."""
        unload = self.last(c.Unload)
        return self.tell(e.UnloadFailed(unload.member, unload.epoch, "still there"))

    def answer(self, verdict: e.Idleness = e.Idleness.IDLE) -> list[c.Command]:
        """The engine answers the last idle probe now."""
        return self.tell(e.IdleAnswered(self.last(c.ProbeIdle).probe, verdict))

    def lose(self, member: MemberName, reason: str = "exited") -> list[c.Command]:
        """The resident's process ends."""
        return self.tell(e.ResidentLost(member, self.view().epoch, reason, "signal 9"))

    def resident(self, member: MemberName, *, at: float) -> Slot:
        """Make *member* resident: asked for by a person now, landed at *at*."""
        self.tell(e.LoadAsked(member))
        self.at(at)
        self.loaded()
        return self

    # -- what came of it -------------------------------------------------------------------------

    def said(self, kind: type[Kind]) -> list[tuple[float, Kind]]:
        """Return every command of *kind* with its moment."""
        return [(t, command) for t, command in self.log if isinstance(command, kind)]

    def last(self, kind: type[Kind]) -> Kind:
        """Return the last command of *kind*."""
        return self.said(kind)[-1][1]

    def loads(self) -> list[tuple[float, MemberName]]:
        """Return when who was loaded."""
        return [(t, load.member) for t, load in self.said(c.Load)]

    def unloads(self) -> list[tuple[float, MemberName]]:
        """Return when who was unloaded."""
        return [(t, unload.member) for t, unload in self.said(c.Unload)]

    def granted(self, ticket: Ticket) -> float | None:
        """Return when *ticket* was granted last, or None."""
        times = [t for t, grant in self.said(c.Grant) if grant.ticket == ticket]
        return times[-1] if times else None

    def refused(self, ticket: Ticket) -> tuple[float, c.Refuse] | None:
        """Return when and how *ticket* was refused, or None."""
        return next(((t, r) for t, r in self.said(c.Refuse) if r.ticket == ticket), None)

    def notes(self, kind: c.NoteKind) -> list[tuple[float, c.Note]]:
        """Return the notes of *kind* with their moments."""
        return [(t, note) for t, note in self.said(c.Note) if note.kind is kind]

    def view(self) -> PoolView:
        """Return the pool as people see it now."""
        return self.scheduler.view(self.now)
