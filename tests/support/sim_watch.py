"""
A scheduler under watch: everything that goes in and comes out is booked and judged at once.

Shared by the simulator, the rule machine and the policy workloads. The clock of the simulator is
here too, since nothing else may be.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable
from typing import Protocol

import sim_checks
from modelpool_router.core import commands as c
from modelpool_router.core import events as e
from modelpool_router.core.spec import HoldLedger, PoolSpec
from modelpool_router.core.view import PoolView
from sim_trace import PoolModel

SPIN = 40
"""So many ticks at one instant with nothing else happening mean that time stands still."""


class SchedulerLike(Protocol):
    """What a test needs of a scheduler: mutants have it too."""

    def handle(self, event: e.Event, now: float) -> list[c.Command]:
        """Take one event, return what to do."""
        ...

    def next_deadline(self) -> float | None:
        """Return when a `Tick` is needed."""
        ...

    def view(self, now: float) -> PoolView:
        """Return what people see."""
        ...


class Factory(Protocol):
    """Makes a scheduler; the class itself is one."""

    def __call__(
        self, spec: PoolSpec, ledger: HoldLedger, *, now: float, jitter: Callable[[], float]
    ) -> SchedulerLike:
        """Return a scheduler that has seen nothing yet."""
        ...


class Clock:
    """The heap: calls back in order of time, ties in order of scheduling."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stalled_until = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0

    def at(self, t: float, action: Callable[[], None]) -> None:
        """Run *action* at *t*, or at the end of a stall that covers it."""
        self._sequence += 1
        heapq.heappush(self._heap, (t, self._sequence, action))

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Run *action* in *seconds* from now."""
        self.at(self.now + seconds, action)

    def run(self, until: float) -> None:
        """Run everything that is due up to and including *until*."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            t, _, action = heapq.heappop(heap)
            self.now = max(t, self.now, self.stalled_until)
            action()
        self.now = max(self.now, until)


class Watched:
    """One scheduler with its books."""

    def __init__(
        self,
        spec: PoolSpec,
        factory: Factory,
        ledger: HoldLedger,
        *,
        log: Callable[[str], None] | None = None,
        record: bool = False,
    ) -> None:
        self.model = PoolModel(spec)
        self.scheduler = factory(spec, ledger, now=0.0, jitter=self._jitter)
        self.events = 0
        self.wake: float | None = None
        self.digest = hashlib.sha256() if record else None
        self._name = spec.name
        self._log = log
        self._jitter_at = 0
        self._ticks_here = 0
        self._tick_time = -1.0

    def handle(self, event: e.Event, now: float) -> list[c.Command]:
        """
        Hand *event* over and return what is to be carried out.

        Raises:
            Violation: A rule was broken.
        """
        model = self.model
        self.events += 1
        self._note_spin(event, now)
        waiting = 0
        if isinstance(event, e.Loaded):
            waiting = sum(r.deadline >= now for r in model.held[event.member].values())
        model.event(now, event)
        if self.digest is not None:
            self.digest.update(f"{now!r} {event!r}".encode())
        if self._log is not None:
            self._log(f"{now:10.3f} {self._name} > {event}")
        commands = self.scheduler.handle(event, now)
        if isinstance(event, e.Observed):
            model.adopted(event.up, self.scheduler.view(now).epoch)
        for command in commands:
            if self.digest is not None:
                self.digest.update(repr(command).encode())
            if self._log is not None:
                self._log(f"{now:10.3f} {self._name}     < {command}")
            sim_checks.judge(model, event, command)
            model.command(command)
        if isinstance(event, e.Loaded):
            sim_checks.landing(model, event, waiting, commands)
        self.wake = self.scheduler.next_deadline()
        model.settle()
        sim_checks.settled(model, event, self.wake)
        return commands

    def look(self, now: float) -> None:
        """H16: what people see agrees with the books."""
        view, model = self.scheduler.view(now), self.model
        sim_checks.check(model, "view", view.held == model.held_total, "held differs")
        sim_checks.check(model, "view", view.in_flight == model.lease_total, "in_flight differs")
        resident = view.resident
        true = resident is None or model.lives[resident].state == "up"
        sim_checks.check(model, "view", true, f"{resident} is said to be resident")
        for member in view.members:
            held = len(model.held.get(member.name, ()))
            sim_checks.check(model, "view", member.held == held, f"held of {member.name} differs")

    def _note_spin(self, event: e.Event, now: float) -> None:
        if now != self._tick_time or not isinstance(event, e.Tick):
            self._tick_time, self._ticks_here = now, 0
        if isinstance(event, e.Tick):
            self._ticks_here += 1
            awake = self._ticks_here < SPIN
            sim_checks.check(self.model, "spin", awake, "ticks again and again at one instant")

    def _jitter(self) -> float:
        self._jitter_at = (self._jitter_at * 5 + 3) % 8
        return self._jitter_at / 8
