"""
Plays a script against real schedulers under a virtual clock.

One heap of (time, sequence, action); one `PoolWorld` per pool with a fake platform and fake
clients. Everything a scheduler says or hears is booked in its `PoolModel` and judged at once. The
world keeps the physical truth besides: which member has a process, whatever anybody believes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import sim_checks
from modelpool_router.core import commands as c
from modelpool_router.core import events as e
from modelpool_router.core.scheduler import Scheduler
from modelpool_router.core.spec import Epoch, HoldLedger, MemberName, MemberSpec, Ticket
from sim_platform import Platform
from sim_script import (
    EVERY_POOL,
    Answer,
    Change,
    Come,
    Death,
    Hang,
    IdleSpell,
    Item,
    PoolScript,
    RefuseDispatch,
    Say,
    Script,
    Stale,
    Stall,
)
from sim_watch import Clock, Factory, Watched

RECOVERY_S = 4000.0
"""After the faults healed every member must have served somebody within this (L2): it has to be
longer than the longest back-off that the faults of one script can build up."""
RECOVERY_KEY = "recovery"


class Client:
    """One try of one client."""

    __slots__ = ("come", "left", "retries", "service", "ticket")

    def __init__(self, come: Come, ticket: Ticket, retries: int) -> None:
        self.come = come
        self.ticket = ticket
        self.retries = retries
        self.service = come.service
        self.left = False


class PoolWorld:
    """One pool: scheduler, fake platform, fake clients, and the books."""

    def __init__(
        self, index: int, script: Script, pool: PoolScript, clock: Clock, factory: Factory,
        ledger: HoldLedger, log: Callable[[str], None] | None, record: bool,
    ) -> None:  # fmt: skip
        self.index = index
        self.pool = pool
        self.clock = clock
        self.watched = Watched(pool.spec, factory, ledger, log=log, record=record)
        self.model = self.watched.model
        self.platform = Platform(pool, clock, self.model, self.feed, self._finish)
        self.injected = self.platform.injected
        self.after: Callable[[], None] = lambda: None
        self.ended: Callable[[Client, str], None] = lambda client, outcome: None
        """Called when a client was served or refused; workloads go on from there."""
        self._later = clock.later
        self._tickets = pool.first_ticket - 1
        self._clients: dict[Ticket, Client] = {}
        self._refuse_dispatches = 0
        self._armed: float | None = None
        self._arm_version = 0
        self._recovering: set[MemberName] = set()
        for item in script.items:
            if item.pool in (index, EVERY_POOL):
                self._plan(item)
        self.clock.at(
            0.0,
            lambda: self.feed(e.Observed(pool.up, released=pool.released, prefer=pool.prefer)),
        )

    # -- scheduler in and out ------------------------------------------------------------------

    def feed(self, event: e.Event) -> None:
        """Hand one event to the scheduler, judge and carry out what it answers."""
        commands = self.watched.handle(event, self.clock.now)
        if isinstance(event, e.Observed) and event.up:
            self.platform.adopt(event.up, self.watched.scheduler.view(self.clock.now).epoch)
        self.after()
        for command in commands:
            self._carry_out(command)
        self._arm(self.watched.wake)

    def _arm(self, wake: float | None) -> None:
        if wake == self._armed and wake is not None and wake > self.clock.now:
            return
        self._armed = wake
        self._arm_version += 1
        if wake is not None:
            version = self._arm_version
            self.clock.at(max(wake, self.clock.now), lambda: self._tick(version))

    def _tick(self, version: int) -> None:
        if version == self._arm_version:
            self._armed = None
            self.feed(e.Tick())

    def _carry_out(self, command: c.Command) -> None:
        match command:
            case c.Grant(ticket, member, _):
                self._dispatch(ticket, member)
            case c.Refuse(ticket, code, retry_after_s):
                self._refused(ticket, code, retry_after_s)
            case c.EndLease(ticket):
                self._later(0.02, lambda: self._finish(ticket))
            case c.Load(member, epoch):
                self.platform.load(member, epoch)
            case c.CancelLoad(member, epoch):
                self.platform.cancel(member, epoch)
            case c.Unload(member, epoch):
                self.platform.unload(member, epoch)
            case c.ProbeIdle(member, number):
                self.platform.probe(member, number)
            case c.Check(member, epoch):
                self.platform.check(member, epoch)
            case c.Note():
                pass

    # -- the fake clients ------------------------------------------------------------------------

    def come(self, come: Come, retries: int = 0, since: float | None = None) -> None:
        """One client asks; its patience counts from *since*, if a stall delayed it."""
        spec = self.model.spec
        if come.member not in spec.members:
            return
        self._tickets += 1
        ticket = Ticket(self._tickets)
        client = self._clients[ticket] = Client(come, ticket, retries)
        patience = spec.swap_budget_s
        if come.patience is not None and come.patience < patience:
            patience = come.patience
            self.injected["patience_short"] += 1
        if come.leave is not None:
            self._later(come.leave, lambda: self._leave(client))
        since = self.clock.now if since is None else since
        if come.key == RECOVERY_KEY and spec.max_turn_s == 0:
            # Turns of no length promise nothing to clients that wait for less than a load takes:
            # they are told to come back just after the landing, and that is too late.
            patience = RECOVERY_S
        self.feed(e.Arrived(ticket, come.member, since + patience, come.key))

    def _leave(self, client: Client) -> None:
        request = self.model.requests.get(client.ticket)
        client.left = True
        if request is None or request.state == "ended":
            return
        self.injected["client_leaves"] += 1
        if request.state == "held":
            self.feed(e.Departed(client.ticket))
        else:
            self._finish(client.ticket)

    def _dispatch(self, ticket: Ticket, member: MemberName) -> None:
        client = self._clients[ticket]
        process = self.platform.process(member)
        if process.state != "up" or process.dead:
            self._later(0.001, lambda: self._dispatch_refused(ticket))
            return
        if self._refuse_dispatches > 0 and not self.platform.healed:
            self._refuse_dispatches -= 1
            self.injected["dispatch_refused"] += 1
            self._later(0.001, lambda: self._dispatch_refused(ticket))
            return
        seconds = client.service
        if client.come.leave_at_grant:
            self.injected["client_leaves_at_grant"] += 1
            seconds = 0.0
        self._later(seconds, lambda: self._served(ticket))

    def _dispatch_refused(self, ticket: Ticket) -> None:
        if self.model.requests[ticket].state == "leased":
            self.feed(e.DispatchRefused(ticket))

    def _served(self, ticket: Ticket) -> None:
        request = self.model.requests[ticket]
        if request.state != "leased":
            return
        if self.clock.now < self.platform.hung_until:
            self.clock.at(self.platform.hung_until, lambda: self._served(ticket))
            return
        if self._clients[ticket].come.key == RECOVERY_KEY:
            self._recovering.discard(request.member)
        self._finish(ticket)
        self.ended(self._clients[ticket], "served")

    def _finish(self, ticket: Ticket) -> None:
        if self.model.requests[ticket].state == "leased":
            self.feed(e.Finished(ticket))

    def _refused(self, ticket: Ticket, code: c.RefusalCode, retry_after_s: float | None) -> None:
        client = self._clients[ticket]
        self.ended(client, code)
        if client.retries <= 0 or client.left or retry_after_s is None:
            return
        if client.come.key != RECOVERY_KEY:
            self.injected["client_retries"] += 1
        self._later(math.ceil(retry_after_s), lambda: self.come(client.come, client.retries - 1))

    # -- the script ------------------------------------------------------------------------------

    def _plan(self, item: Item) -> None:
        at = self.clock.at
        match item:
            case Come():
                at(item.t, lambda: self.come(item, item.retries, item.t))
            case Answer():
                self.platform.answers[item.member, item.op, item.nth] = item
            case IdleSpell():
                at(item.t, lambda: self.platform.begin_spell(item))
            case Death():
                at(item.t, lambda: self.platform.kill(item))
            case RefuseDispatch():
                at(item.t, lambda: self._begin_refusing(item.count))
            case Hang():
                self.platform.looks = True
                at(item.t, lambda: self.platform.hang(item))
            case Say():
                at(item.t, lambda: self._say(item))
            case Change():
                at(item.t, lambda: self._change(item))
            case Stale():
                at(item.t, lambda: self._stale(item))
            case Stall():
                if self.index == 0:
                    at(item.t, lambda: self._stall(item))
            case _:
                raise AssertionError(item)

    def _begin_refusing(self, count: int) -> None:
        self._refuse_dispatches = count

    def _stall(self, item: Stall) -> None:
        self.injected["loop_stall"] += 1
        self.clock.stalled_until = max(self.clock.stalled_until, item.t + item.seconds)

    def _say(self, item: Say) -> None:
        member = item.member
        match item.what:
            case "load":
                if member is None or member not in self.model.spec.members:
                    return
                self.injected["load_asked"] += 1
                self.feed(e.LoadAsked(member))
            case "unload":
                self.injected["unload_asked"] += 1
                self.feed(e.UnloadAsked())
            case "pause":
                self.injected["paused"] += 1
                self.feed(e.Paused())
            case "resume":
                self.feed(e.Resumed())
            case "withhold":
                self.injected["withheld"] += 1
                self.feed(e.SlotWithheld("another router holds the slot"))
            case "regain":
                self.feed(e.SlotRegained())
            case other:
                raise AssertionError(other)

    def _change(self, item: Change) -> None:
        spec = self.model.spec
        members = dict(spec.members)
        name = item.member
        assert name is not None
        match item.what:
            case "add":
                if name in members:
                    return
                members[name] = MemberSpec(name, parallel=2, expected_load_s=3.0)
            case "remove" | "remove_resident":
                if item.what == "remove_resident":
                    name = self.model.landed() or name
                if name not in members or len(members) == 1:
                    return
                del members[name]
            case "default":
                spec = replace(spec, default=name if name in members else None)
            case _:
                spec = replace(spec, **dict(item.values))  # type: ignore[arg-type]
        if spec.default not in members:
            spec = replace(spec, default=None)
        self.injected["reconfigured"] += 1
        self.feed(e.Reconfigured(replace(spec, members=members)))

    def _stale(self, item: Stale) -> None:
        name = next(iter(self.platform.processes), None)
        if name is None:
            return
        epoch = Epoch(max(self.platform.processes[name].epoch - item.age, -1))
        if item.what in ("loaded", "lost", "checked", "health") and any(
            p.epoch == epoch for p in self.platform.processes.values()
        ):
            epoch = Epoch(-1)
        self.injected["stale_report"] += 1
        report: e.Event
        match item.what:
            case "loaded":
                report = e.Loaded(name, epoch)
            case "load_failed":
                report = e.LoadFailed(name, epoch, "exited")
            case "unloaded":
                report = e.Unloaded(name, epoch)
            case "lost":
                report = e.ResidentLost(name, epoch)
            case "checked":
                report = e.Checked(name, epoch, up=False)
            case "idle":
                report = e.IdleAnswered(-item.age, e.Idleness.IDLE)
            case _:
                report = e.HealthSeen(name, epoch, healthy=False, progress_at=0.0)
        self.feed(report)

    # -- the end ---------------------------------------------------------------------------------

    def heal(self) -> None:
        """End all faults; then one patient client per member must be served (L2, L8)."""
        self.platform.heal()
        self._refuse_dispatches = 0
        self.feed(e.Resumed())
        self.feed(e.SlotRegained())
        for name in self.model.spec.members:
            self._recovering.add(name)
            probe = Come(self.index, self.clock.now, name, None, 0.1, retries=500, key=RECOVERY_KEY)
            self.come(probe, probe.retries)

    def stop(self) -> None:
        """The router goes down."""
        self.platform.healed = True
        self.injected["stop_abrupt"] += self.model.held_total > 0 or self.model.lease_total > 0
        self.feed(e.Stopping())

    def is_well(self) -> bool:
        """Tell whether every member served somebody since the faults, and nobody waits."""
        waiting = self._recovering & set(self.model.spec.members)
        return not waiting and not self.model.held_total and not self.model.lease_total

    def recovered(self) -> None:
        """L2, L8: the pool serves every member again, and nobody is left waiting."""
        waiting = sorted(self._recovering & set(self.model.spec.members))
        sim_checks.check(
            self.model,
            "L2",
            self.is_well(),
            f"{waiting} not served {RECOVERY_S} s after the faults, "
            f"{self.model.held_total} held, {self.model.lease_total} in flight",
        )


class World:
    """All pools of one schedule, under one clock and one ledger."""

    def __init__(
        self,
        script: Script,
        factory: Factory = Scheduler,
        log: Callable[[str], None] | None = None,
        *,
        record: bool = False,
    ) -> None:
        self.script = script
        self.clock = Clock()
        self.ledger = HoldLedger(script.bounds)
        self.pools = [
            PoolWorld(index, script, pool, self.clock, factory, self.ledger, log, record)
            for index, pool in enumerate(script.pools)
        ]
        self.models = [pool.model for pool in self.pools]
        for pool in self.pools:
            pool.after = self._after

    def _after(self) -> None:
        sim_checks.ledger_agrees(self.ledger, self.models)

    def run(self) -> None:
        """
        Play the whole script, heal, let it settle, stop, and judge the rest.

        Raises:
            Violation: A rule was broken.
        """
        clock, script = self.clock, self.script
        for share in (0.35, 0.7):
            clock.run(script.end * share)
            for pool in self.pools:
                pool.watched.look(clock.now)
        stalls = [item.t + item.seconds for item in script.items if isinstance(item, Stall)]
        clock.run(max([script.end, *stalls]))
        for pool in self.pools:
            pool.stop() if script.stop_abrupt else pool.heal()
        if not script.stop_abrupt:
            self._recover()
        clock.run(clock.now + 2000.0)
        if script.profile == "calm":
            for pool in self.pools:
                sim_checks.waited(pool.model, calm_bound(script, pool.pool))
        for pool in self.pools:
            sim_checks.at_rest(pool.model)
            pool.watched.look(clock.now)
        model = self.models[0]
        sim_checks.check(model, "S14", self.ledger.held == 0, "the ledger counts holds for ever")
        sim_checks.check(model, "S14", not self.ledger.by_key, "the ledger counts keys for ever")

    def _recover(self) -> None:
        """Stop each pool when it is well again, at a time that is its own affair (S17)."""
        end = self.clock.now + RECOVERY_S
        while self.clock.now < end and not all(pool.model.stopping for pool in self.pools):
            self.clock.run(self.clock.now + 50.0)
            for pool in self.pools:
                if pool.is_well() and not pool.model.stopping:
                    pool.recovered()
                    pool.stop()
        for pool in self.pools:
            if not pool.model.stopping:
                pool.recovered()


def calm_bound(script: Script, pool: PoolScript) -> float:
    """L1: (k + 1) (Q + G + U + L), with the longest of each in the script."""
    longest = max((item.service for item in script.items if isinstance(item, Come)), default=0.0)
    load = max(t.load for t in pool.timing.values())
    unload = max(t.unload for t in pool.timing.values())
    probe = max(t.probe for t in pool.timing.values())
    return len(pool.spec.members) * (
        pool.spec.max_turn_s + max(longest, 0.1) + probe + unload + load
    )


def play(
    script: Script,
    factory: Factory = Scheduler,
    log: Callable[[str], None] | None = None,
    *,
    record: bool = False,
) -> World:
    """Play *script* to its end and return the world as it is then."""
    world = World(script, factory, log, record=record)
    world.run()
    return world
