"""
Plays a script against real schedulers under a virtual clock.

One heap of (time, sequence, action); one `PoolWorld` per pool with a fake platform and fake
clients. Everything a scheduler says or hears is booked in its `PoolModel` and judged at once. The
world keeps the physical truth besides: which member has a process, whatever anybody believes.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import sim_checks
from modelpool_router.core import commands as c
from modelpool_router.core import events as e
from modelpool_router.core.scheduler import Scheduler
from modelpool_router.core.spec import (
    Epoch,
    HoldLedger,
    MemberName,
    MemberSpec,
    PoolSpec,
    Ticket,
)
from modelpool_router.core.view import PoolView
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
    Timing,
)
from sim_trace import PoolModel, Violation

SPIN = 40
"""So many ticks at one instant with nothing else happening mean that time stands still."""
RECOVERY_S = 4000.0
"""After the faults healed every member must have served somebody within this (L2): it has to be
longer than the longest back-off that the faults of one script can build up."""
LOOK_S = 4.0
"""How often the fake runtime looks at a resident's health, in scripts with a hang."""


class SchedulerLike(Protocol):
    """What the simulator needs of a scheduler: mutants have it too."""

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

    def run(self, until: float) -> None:
        """Run everything that is due up to and including *until*."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            t, _, action = heapq.heappop(heap)
            self.now = max(t, self.now, self.stalled_until)
            action()
        self.now = max(self.now, until)


class Client:
    """One try of one client."""

    __slots__ = ("come", "left", "retries", "service", "ticket")

    def __init__(self, come: Come, ticket: Ticket, retries: int) -> None:
        self.come = come
        self.ticket = ticket
        self.retries = retries
        self.service = come.service
        self.left = False


class Process:
    """What physically exists of one member."""

    __slots__ = ("dead", "epoch", "hangs", "state", "work")

    def __init__(self) -> None:
        self.state = "absent"
        """absent, loading, up, dying, remains"""
        self.epoch = Epoch(0)
        self.work = 0
        """Number of the driver's current job for it: callbacks of older jobs are void."""
        self.dead = False
        """It is believed up but its process ended."""
        self.hangs = False
        """Its load will not end by itself."""


class PoolWorld:
    """One pool: scheduler, fake platform, fake clients, and the books."""

    def __init__(
        self, index: int, script: Script, pool: PoolScript, clock: Clock, factory: Factory,
        ledger: HoldLedger, log: Callable[[str], None] | None, record: bool,
    ) -> None:  # fmt: skip
        self.index = index
        self.pool = pool
        self.clock = clock
        self.log = log
        self.model = PoolModel(pool.spec)
        self.injected: Counter[str] = Counter()
        self.digest = hashlib.sha256() if record else None
        self.scheduler = factory(pool.spec, ledger, now=0.0, jitter=self._jitter)
        self.loads = 0
        self.served: Counter[MemberName] = Counter()
        self.events = 0
        self.after: Callable[[], None] = lambda: None
        self.ended: Callable[[Client, str], None] = lambda client, outcome: None
        """Called when a client was served or refused; workloads go on from there."""
        self.healed = False
        self._jitter_at = 0
        self._tickets = pool.first_ticket - 1
        self._processes: dict[MemberName, Process] = {}
        self._clients: dict[Ticket, Client] = {}
        self._answers: dict[tuple[MemberName, str, int], Answer] = {}
        self._nth: Counter[tuple[MemberName, str]] = Counter()
        self._spell: IdleSpell | None = None
        self._spell_until = -1.0
        self._refuse_dispatches = 0
        self._hung_until = -1.0
        self._looks = False
        self._armed: float | None = None
        self._arm_version = 0
        self._ticks_here = 0
        self._tick_time = -1.0
        self._recovering: set[MemberName] = set()
        for item in script.items:
            if item.pool in (index, EVERY_POOL):
                self._plan(item)
        for name in pool.up:
            process = self._process(name)
            process.state = "up"
        self.clock.at(
            0.0,
            lambda: self.feed(e.Observed(pool.up, released=pool.released, prefer=pool.prefer)),
        )

    # -- scheduler in and out ------------------------------------------------------------------

    def feed(self, event: e.Event) -> None:
        """Hand one event to the scheduler, judge and carry out what it answers."""
        now, model = self.clock.now, self.model
        self.events += 1
        self._note_spin(event, now)
        waiting = 0
        if isinstance(event, e.Loaded):
            waiting = sum(r.deadline >= now for r in model.held[event.member].values())
        model.event(now, event)
        if self.digest is not None:
            self.digest.update(f"{now!r} {event!r}".encode())
        if self.log is not None:
            self.log(f"{now:10.3f} {self.pool.spec.name} > {event}")
        commands = self.scheduler.handle(event, now)
        if isinstance(event, e.Observed):
            self._adopt(now)
        for command in commands:
            if self.digest is not None:
                self.digest.update(repr(command).encode())
            if self.log is not None:
                self.log(f"{now:10.3f} {self.pool.spec.name}     < {command}")
            sim_checks.judge(model, event, command)
            model.command(command)
        if isinstance(event, e.Loaded):
            sim_checks.landing(model, event, waiting, commands)
        wake = self.scheduler.next_deadline()
        model.settle()
        sim_checks.settled(model, event, wake)
        self.after()
        for command in commands:
            self._carry_out(command)
        self._arm(wake)

    def _note_spin(self, event: e.Event, now: float) -> None:
        if now != self._tick_time or not isinstance(event, e.Tick):
            self._tick_time, self._ticks_here = now, 0
        if isinstance(event, e.Tick):
            self._ticks_here += 1
            sim_checks.check(
                self.model, "spin", self._ticks_here < SPIN, "ticks again and again at one instant"
            )

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

    def _jitter(self) -> float:
        self._jitter_at = (self._jitter_at * 5 + 3) % 8
        return self._jitter_at / 8

    def _adopt(self, now: float) -> None:
        view = self.scheduler.view(now)
        self.model.adopted(self.pool.up, view.epoch)
        for name in self.pool.up:
            process = self._process(name)
            process.epoch = view.epoch
            self._start_looking(name, process, view.epoch)

    # -- commands ------------------------------------------------------------------------------

    def _carry_out(self, command: c.Command) -> None:
        match command:
            case c.Grant(ticket, member, _):
                self._dispatch(ticket, member)
            case c.Refuse(ticket, code, retry_after_s):
                self._refused(ticket, code, retry_after_s)
            case c.EndLease(ticket):
                self._later(0.02, lambda: self._finish(ticket))
            case c.Load(member, epoch):
                self._load(member, epoch)
            case c.CancelLoad(member, epoch):
                self._cancel(member, epoch)
            case c.Unload(member, epoch):
                self._unload(member, epoch)
            case c.ProbeIdle(member, number):
                self._probe(member, number)
            case c.Check(member, epoch):
                process = self._process(member)
                self._later(
                    0.01,
                    lambda: self.feed(
                        e.Checked(member, epoch, process.state == "up" and not process.dead)
                    ),
                )
            case c.Note():
                pass

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self.clock.at(self.clock.now + seconds, action)

    def _process(self, name: MemberName) -> Process:
        if name not in self._processes:
            self._processes[name] = Process()
        return self._processes[name]

    def _usual(self, name: MemberName) -> Timing:
        return self.pool.timing.get(name) or next(iter(self.pool.timing.values()))

    def _scripted(self, name: MemberName, op: str) -> Answer | None:
        nth = self._nth[name, op]
        self._nth[name, op] += 1
        return None if self.healed else self._answers.get((name, op, nth))

    # -- the fake platform -----------------------------------------------------------------------

    def _load(self, member: MemberName, epoch: Epoch) -> None:
        self.loads += 1
        for name, other in self._processes.items():
            sim_checks.check(
                self.model, "S1", other.state == "absent",
                f"{member} started while {name} is {other.state} in truth",
            )  # fmt: skip
        process = self._process(member)
        process.state, process.epoch, process.dead = "loading", epoch, False
        process.work += 1
        work = process.work
        plan = self._scripted(member, "load")
        kind = plan.kind if plan else "ok"
        process.hangs = kind == "hang"
        if process.hangs:
            self.injected["load_hangs"] += 1
            return
        seconds = plan.seconds if plan else self._usual(member).load
        if kind == "ok":
            if plan is not None and plan.dies_after is None:
                self.injected["load_slow"] += 1
            self._later(seconds, lambda: self._landed(member, process, work, plan))
            return
        self.injected["load_fails"] += 1
        self._later(seconds, lambda: self._load_fails(member, process, work, plan))

    def _landed(self, member: MemberName, process: Process, work: int, plan: Answer | None) -> None:
        if process.work != work:
            return
        process.work += 1
        process.state = "up"
        epoch = process.epoch
        if plan is not None and plan.dies_after is not None:
            self.injected["death_after_landing"] += 1
            self._later(
                plan.dies_after, lambda: self._die(member, process, epoch, 0.0, leaves=False)
            )
        self._start_looking(member, process, epoch)
        self.feed(e.Loaded(member, epoch, plan.parallel if plan else None))

    def _load_fails(
        self, member: MemberName, process: Process, work: int, plan: Answer | None
    ) -> None:
        if process.work != work:
            return
        process.work += 1
        process.state = "remains" if plan is not None and plan.leaves else "absent"
        fatal = plan is not None and plan.kind == "fatal"
        reason = "command_not_found" if fatal else "exited"
        self.feed(e.LoadFailed(member, process.epoch, reason, "exit code 1", retryable=not fatal))

    def _cancel(self, member: MemberName, epoch: Epoch) -> None:
        process = self._process(member)
        if process.epoch != epoch or process.state != "loading":
            return
        nth = self._nth[member, "load"] - 1
        plan = self._answers.get((member, "load", nth))
        work = process.work
        if plan is not None and plan.crossing:
            self.injected["cancel_crossing"] += 1
            self._later(0.0, lambda: self._landed(member, process, work, None))
            return
        process.work += 1

        def answer() -> None:
            process.state = "remains" if plan is None or plan.leaves else "absent"
            self.feed(e.LoadFailed(member, epoch, "load_timeout", "no answer in time"))

        self._later(0.0 if epoch % 2 else 0.3, answer)

    def _unload(self, member: MemberName, epoch: Epoch) -> None:
        process = self._process(member)
        if process.state != "absent":
            process.state = "dying"
        process.work += 1
        plan = self._scripted(member, "unload")
        fails = plan is not None and plan.kind == "fail"
        seconds = plan.seconds if plan else self._usual(member).unload
        self.injected["unload_fails"] += fails

        def done() -> None:
            if fails:
                self.feed(e.UnloadFailed(member, epoch, "still there"))
                return
            process.state = "absent"
            self.feed(e.Unloaded(member, epoch))

        self._later(seconds, done)

    def _probe(self, member: MemberName, number: int) -> None:
        verdict, delay = e.Idleness.IDLE, self._usual(member).probe
        now, process = self.clock.now, self._process(member)
        if now < self._hung_until or process.state != "up" or process.dead:
            verdict = e.Idleness.UNREACHABLE
        elif self._spell is not None and now < self._spell_until:
            self.injected[f"idle_{self._spell.kind}"] += 1
            match self._spell.kind:
                case "busy":
                    verdict = e.Idleness.BUSY
                case "unreachable":
                    verdict = e.Idleness.UNREACHABLE
                case _:
                    delay = self._spell.delay
        self._later(delay, lambda: self.feed(e.IdleAnswered(number, verdict)))

    def _die(
        self, member: MemberName, process: Process, epoch: Epoch, notice: float, *, leaves: bool
    ) -> None:
        if process.state != "up" or process.epoch != epoch or process.dead or self.healed:
            return
        process.dead = True
        if not leaves:
            process.state = "absent"
        for ticket, request in list(self.model.leases[member].items()):
            if request.member == member:
                self._later(notice / 2, lambda ticket=ticket: self._finish(ticket))  # type: ignore[misc]
        self._later(notice, lambda: self.feed(e.ResidentLost(member, epoch, "exited", "signal 9")))

    def _start_looking(self, member: MemberName, process: Process, epoch: Epoch) -> None:
        if self._looks:
            landed = self.clock.now
            self._later(LOOK_S, lambda: self._look(member, process, epoch, landed))

    def _look(self, member: MemberName, process: Process, epoch: Epoch, progress_at: float) -> None:
        now = self.clock.now
        if process.epoch != epoch or process.state != "up" or self.healed:
            return
        healthy = now >= self._hung_until and not process.dead
        progress_at = now if healthy else progress_at
        self.injected["hung"] += not healthy
        self.feed(e.HealthSeen(member, epoch, healthy, progress_at))
        self._later(LOOK_S, lambda: self._look(member, process, epoch, progress_at))

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
        process = self._process(member)
        if process.state != "up" or process.dead:
            self._later(0.001, lambda: self._dispatch_refused(ticket))
            return
        if self._refuse_dispatches > 0 and not self.healed:
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
        if self.clock.now < self._hung_until:
            self.clock.at(self._hung_until, lambda: self._served(ticket))
            return
        self.served[request.member] += 1
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
                self._answers[item.member, item.op, item.nth] = item
            case IdleSpell():
                at(item.t, lambda: self._begin_spell(item))
            case Death():
                at(item.t, lambda: self._death(item))
            case RefuseDispatch():
                at(item.t, lambda: self._begin_refusing(item.count))
            case Hang():
                self._looks = True
                at(item.t, lambda: self._begin_hang(item.seconds))
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

    def _begin_spell(self, item: IdleSpell) -> None:
        self._spell, self._spell_until = item, self.clock.now + item.seconds

    def _begin_refusing(self, count: int) -> None:
        self._refuse_dispatches = count

    def _begin_hang(self, seconds: float) -> None:
        self._hung_until = self.clock.now + seconds

    def _stall(self, item: Stall) -> None:
        self.injected["loop_stall"] += 1
        self.clock.stalled_until = max(self.clock.stalled_until, item.t + item.seconds)

    def _death(self, item: Death) -> None:
        for name, process in self._processes.items():
            if process.state == "up" and not process.dead:
                self.injected["death_busy_or_idle"] += 1
                self._die(name, process, process.epoch, item.notice, leaves=item.leaves)

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
        name = next(iter(self._processes), None)
        if name is None:
            return
        epoch = Epoch(max(self._processes[name].epoch - item.age, -1))
        if item.what in ("loaded", "lost", "checked", "health") and any(
            p.epoch == epoch for p in self._processes.values()
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
        self.healed = True
        self._spell, self._refuse_dispatches, self._hung_until = None, 0, -1.0
        self.feed(e.Resumed())
        self.feed(e.SlotRegained())
        for name, process in self._processes.items():
            if process.state == "loading" and process.hangs:
                self._rescue(name, process, process.work)
        for name in self.model.spec.members:
            self._recovering.add(name)
            probe = Come(self.index, self.clock.now, name, None, 0.1, retries=500, key=RECOVERY_KEY)
            self.come(probe, probe.retries)

    def _rescue(self, name: MemberName, process: Process, work: int) -> None:
        """A load that hangs when the faults end comes up after all."""
        self._later(self._usual(name).load, lambda: self._landed(name, process, work, None))

    def stop(self) -> None:
        """The router goes down."""
        self.healed = True
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

    def looked_at(self) -> None:
        """H16: what people see agrees with the books."""
        view, model = self.scheduler.view(self.clock.now), self.model
        sim_checks.check(model, "view", view.held == model.held_total, "held differs")
        sim_checks.check(model, "view", view.in_flight == model.lease_total, "in_flight differs")
        up = model.landed()
        sim_checks.check(model, "view", view.resident in (up, None), f"{view.resident}, {up} is up")
        for member in view.members:
            held = len(model.held.get(member.name, ()))
            sim_checks.check(model, "view", member.held == held, f"held of {member.name} differs")


RECOVERY_KEY = "recovery"


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
                pool.looked_at()
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
            pool.looked_at()
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


__all__ = ["Factory", "PoolWorld", "SchedulerLike", "Violation", "World", "play"]
