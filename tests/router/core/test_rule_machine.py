"""
The scheduler under hypothesis: any order of facts, judged by the checkers of the simulator.

Where the simulator draws whole worlds, this draws single steps; what it finds shrinks to few of
them. The machine answers each command once, at any time, with any answer; it never looks inside.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

import sim_checks
from modelpool_router.core import commands as c
from modelpool_router.core import events as e
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
from sim_watch import Watched

A, B, C = MemberName("a"), MemberName("b"), MemberName("c")
MEMBERS = {
    A: MemberSpec(A, parallel=1, expected_load_s=4.0),
    B: MemberSpec(B, parallel=3, expected_load_s=4.0, has_idle_probe=False),
    C: MemberSpec(C, parallel=2, expected_load_s=40.0),
}
names = st.sampled_from([A, B, C])
seconds = st.sampled_from([0.0, 0.1, 1.0, 5.0, 30.0])
verdicts = st.sampled_from([e.Idleness.IDLE, e.Idleness.IDLE, *e.Idleness])


class OneSlot(RuleBasedStateMachine):
    """One pool of three members, its platform and its clients, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.broken = True
        """A rule is broken, or nothing was begun: there is nothing to settle."""
        self.ticket = 0
        self.ledger = HoldLedger(Bounds(max_held=6, max_held_per_key=2))
        self.loading: c.Load | None = None
        self.cancelled = False
        self.unloading: list[c.Unload] = []
        self.probes: list[c.ProbeIdle] = []
        self.looks: list[c.Check] = []

    @initialize(
        default=st.sampled_from([None, A, B]),
        budget=st.sampled_from([0.0, 3.0, 20.0, 300.0]),
        turn=st.sampled_from([0.0, 2.0, 60.0]),
        linger=st.sampled_from([None, 0.0, 1.0]),
        idle=st.sampled_from([None, None, 4.0]),
        reclaim=st.sampled_from([None, None, 4.0]),
        drain=st.sampled_from([None, 2.0]),
        generation=st.sampled_from([None, 3.0]),
        up=st.lists(names, max_size=2, unique=True),
        released=st.booleans(),
    )
    def begin(
        self, default: MemberName | None, budget: float, turn: float, linger: float | None,
        idle: float | None, reclaim: float | None, drain: float | None, generation: float | None,
        up: list[MemberName], released: bool,
    ) -> None:  # fmt: skip
        spec = PoolSpec(
            PoolName("gpu0"),
            MEMBERS,
            default=default,
            swap_budget_s=budget,
            max_turn_s=turn,
            linger_s=linger,
            drain_timeout_s=drain,
            max_generation_s=generation,
            load_timeout_s=20.0,
            idle_unload_after_s=idle,
            reclaim_default_after_s=reclaim,
            hung_after_s=10.0,
        )
        self.watched = Watched(spec, Scheduler, self.ledger)
        self.model = self.watched.model
        self.tell(e.Observed(tuple(up), released=released and not up))

    def tell(self, event: e.Event) -> None:
        self.broken = True
        commands = self.watched.handle(event, self.now)
        self.broken = False
        for command in commands:
            match command:
                case c.Load():
                    assert self.loading is None
                    self.loading, self.cancelled = command, False
                case c.CancelLoad():
                    self.cancelled = True
                case c.Unload():
                    self.unloading.append(command)
                case c.ProbeIdle():
                    self.probes.append(command)
                case c.Check():
                    self.looks.append(command)
                case c.Grant() | c.Refuse() | c.EndLease() | c.Note():
                    pass

    def up(self) -> MemberName | None:
        return self.model.landed()

    # -- clients ---------------------------------------------------------------------------------

    @rule(
        member=names, patience=st.sampled_from([None, 0.0, 2.0]), key=st.sampled_from([None, "k"])
    )
    def arrive(self, member: MemberName, patience: float | None, key: str | None) -> None:
        if member not in self.model.spec.members:
            return
        self.ticket += 1
        budget = self.model.spec.swap_budget_s if patience is None else patience
        self.tell(e.Arrived(Ticket(self.ticket), member, self.now + budget, key))

    @precondition(lambda self: self.model.held_total)
    @rule(which=st.integers(0, 5))
    def depart(self, which: int) -> None:
        held = [ticket for line in self.model.held.values() for ticket in line]
        self.tell(e.Departed(held[which % len(held)]))

    @precondition(lambda self: self.model.lease_total)
    @rule(which=st.integers(0, 5), refused=st.sampled_from([False, False, False, True]))
    def end_lease(self, which: int, refused: bool) -> None:
        out = [r.ticket for r in self.model.requests.values() if r.state == "leased"]
        ticket = out[which % len(out)]
        self.tell(e.DispatchRefused(ticket) if refused else e.Finished(ticket))

    # -- the platform ----------------------------------------------------------------------------

    @precondition(lambda self: self.loading is not None)
    @rule(parallel=st.sampled_from([None, None, 2]))
    def land(self, parallel: int | None) -> None:
        load, self.loading = self.loading, None
        assert load is not None
        self.tell(e.Loaded(load.member, load.epoch, parallel))

    @precondition(lambda self: self.loading is not None)
    @rule(retryable=st.booleans())
    def load_fails(self, retryable: bool) -> None:
        load, self.loading = self.loading, None
        assert load is not None
        self.tell(e.LoadFailed(load.member, load.epoch, "exited", "", retryable=retryable))

    @precondition(lambda self: self.unloading)
    @rule(proven=st.sampled_from([True, True, True, False]))
    def unload_ends(self, proven: bool) -> None:
        unload = self.unloading.pop(0)
        report = e.Unloaded if proven else e.UnloadFailed
        self.tell(report(unload.member, unload.epoch))

    @precondition(lambda self: self.probes)
    @rule(verdict=verdicts, newest=st.booleans())
    def engine_answers(self, verdict: e.Idleness, newest: bool) -> None:
        probe = self.probes.pop(-1 if newest else 0)
        self.tell(e.IdleAnswered(probe.probe, verdict))

    @precondition(lambda self: self.looks)
    @rule(up=st.booleans())
    def look_ends(self, up: bool) -> None:
        look = self.looks.pop(0)
        self.tell(e.Checked(look.member, look.epoch, up))

    @precondition(lambda self: self.up() is not None)
    @rule(stale=st.booleans())
    def resident_dies(self, stale: bool) -> None:
        member = self.up()
        assert member is not None
        epoch = self.model.lives[member].epoch
        assert epoch is not None
        self.tell(e.ResidentLost(member, type(epoch)(epoch - 1) if stale else epoch))

    @precondition(lambda self: self.up() is not None)
    @rule(healthy=st.booleans(), moves=st.booleans())
    def resident_is_looked_at(self, healthy: bool, moves: bool) -> None:
        member = self.up()
        assert member is not None
        life = self.model.lives[member]
        assert life.epoch is not None
        progress_at = self.now if moves else life.landed_at
        self.tell(e.HealthSeen(member, life.epoch, healthy, progress_at))

    # -- people, platform, configuration ---------------------------------------------------------

    @rule(member=names)
    def somebody_asks_for(self, member: MemberName) -> None:
        if member in self.model.spec.members:
            self.tell(e.LoadAsked(member))

    @rule(
        event=st.sampled_from(
            [e.UnloadAsked(), e.Paused(), e.Resumed(), e.SlotWithheld("other"), e.SlotRegained()]
        )
    )
    def somebody_says(self, event: e.Event) -> None:
        self.tell(event)

    @rule(member=names, default=st.sampled_from([None, A, B, C]), turn=st.sampled_from([0.0, 9.0]))
    def configuration_changes(
        self, member: MemberName, default: MemberName | None, turn: float
    ) -> None:
        members = dict(self.model.spec.members)
        if member not in members:
            members[member] = MEMBERS[member]
        elif len(members) > 1:
            del members[member]
        if default not in members:
            default = None
        spec = replace(self.model.spec, members=members, default=default, max_turn_s=turn)
        self.tell(e.Reconfigured(spec))

    # -- time ------------------------------------------------------------------------------------

    @rule(dt=seconds)
    def time_passes(self, dt: float) -> None:
        """Ticks come when they were asked for."""
        until = self.now + dt
        while (due := self.watched.wake) is not None and due <= until:
            self.now = max(self.now, due)
            self.tell(e.Tick())
        self.now = until

    @rule(dt=seconds)
    def loop_stalls(self, dt: float) -> None:
        """Time passes and nobody ticks."""
        self.now += dt

    @invariant()
    def books_agree(self) -> None:
        if self.ticket or self.model.started:
            sim_checks.ledger_agrees(self.ledger, [self.model])
            self.watched.look(self.now)

    def teardown(self) -> None:
        """Everything heals and is answered: then everybody was served or told, and all is zero."""
        if self.broken:
            return
        self.tell(e.Resumed())
        self.tell(e.SlotRegained())
        for member in self.model.spec.members:
            self.arrive(member, 2000.0, None)
        for _ in range(400):
            if not self.settle_one():
                break
        self.tell(e.Stopping())
        while self.model.lease_total:
            self.end_lease(0, False)
        sim_checks.at_rest(self.model)
        assert self.ledger.held == 0

    def settle_one(self) -> bool:
        """Answer one thing well, or let time pass to the next; say whether anybody still waits."""
        if self.loading is not None:
            self.land(None)
        elif self.unloading:
            self.unload_ends(True)
        elif self.probes:
            self.engine_answers(e.Idleness.IDLE, False)
        elif self.looks:
            self.look_ends(True)
        elif self.model.lease_total:
            self.end_lease(0, False)
        elif self.model.held_total:
            due = self.watched.wake
            assert due is not None, "requests are held and nothing will ever happen"
            self.now = max(self.now, due)
            self.tell(e.Tick())
        return self.model.held_total > 0 or self.model.lease_total > 0


OneSlot.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    derandomize=True,  # `make test` does the same every time; the simulator goes further
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestOneSlot = OneSlot.TestCase
