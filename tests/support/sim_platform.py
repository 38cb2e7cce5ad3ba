"""
The fake platform of the simulator: members with processes, loads, unloads, probes and deaths.

It keeps the physical truth (which member has a process, whatever anybody believes) and answers the
scheduler's commands as the script says, once each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import sim_checks
from modelpool_router.core import events as e
from modelpool_router.core.spec import Epoch, MemberName, Ticket
from sim_script import Answer, Death, Hang, IdleSpell, PoolScript, Timing
from sim_trace import PoolModel
from sim_watch import Clock

LOOK_S = 4.0
"""How often the fake runtime looks at a resident's health, in scripts with a hang."""


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


class Platform:
    """The members of one pool, physically."""

    def __init__(
        self,
        pool: PoolScript,
        clock: Clock,
        model: PoolModel,
        tell: Callable[[e.Event], None],
        broken_off: Callable[[Ticket], None],
    ) -> None:
        self.loads = 0
        self.injected: Counter[str] = Counter()
        self.healed = False
        self.fails: frozenset[MemberName] = frozenset()
        """Members whose every load fails (L4)."""
        self.answers: dict[tuple[MemberName, str, int], Answer] = {}
        self.looks = False
        """Whether the fake runtime looks at the resident's health now and then."""
        self.processes: dict[MemberName, Process] = {}
        self.hung_until = -1.0
        self._clock = clock
        self._later = clock.later
        self._model = model
        self._tell = tell
        self._broken_off = broken_off
        self._timing = pool.timing
        self._nth: Counter[tuple[MemberName, str]] = Counter()
        self._spell: IdleSpell | None = None
        self._spell_until = -1.0
        for name in pool.up:
            self.process(name).state = "up"

    def process(self, name: MemberName) -> Process:
        """Return what exists of *name*."""
        if name not in self.processes:
            self.processes[name] = Process()
        return self.processes[name]

    def adopt(self, names: tuple[MemberName, ...], epoch: Epoch) -> None:
        """Learn the epoch of what was found up."""
        for name in names:
            process = self.process(name)
            process.epoch = epoch
            self._start_looking(name, process, epoch)

    def check(self, member: MemberName, epoch: Epoch) -> None:
        """Look whether *member* is up, and report."""
        process = self.process(member)
        self._later(
            0.01,
            lambda: self._tell(
                e.Checked(member, epoch, process.state == "up" and not process.dead)
            ),
        )

    def begin_spell(self, spell: IdleSpell) -> None:
        """Idle probes go wrong for a while."""
        self._spell, self._spell_until = spell, self._clock.now + spell.seconds

    def hang(self, hang: Hang) -> None:
        """Whatever is up stands still for a while."""
        self.hung_until = self._clock.now + hang.seconds

    def kill(self, death: Death) -> None:
        """Whatever is up dies."""
        for name, process in self.processes.items():
            if process.state == "up" and not process.dead:
                self.injected["death_busy_or_idle"] += 1
                self._die(name, process, process.epoch, death.notice, leaves=death.leaves)

    def heal(self) -> None:
        """End all faults; a load that hangs comes up after all."""
        self.healed = True
        self._spell, self.hung_until = None, -1.0
        for name, process in self.processes.items():
            if process.state == "loading" and process.hangs:
                self._rescue(name, process, process.work)

    def _rescue(self, name: MemberName, process: Process, work: int) -> None:
        self._later(self._usual(name).load, lambda: self._landed(name, process, work, None))

    def _usual(self, name: MemberName) -> Timing:
        return self._timing.get(name) or next(iter(self._timing.values()))

    def _scripted(self, name: MemberName, op: str) -> Answer | None:
        nth = self._nth[name, op]
        self._nth[name, op] += 1
        return None if self.healed else self.answers.get((name, op, nth))

    def load(self, member: MemberName, epoch: Epoch) -> None:
        self.loads += 1
        for name, other in self.processes.items():
            sim_checks.check(
                self._model, "S1", other.state == "absent",
                f"{member} started while {name} is {other.state} in truth",
            )  # fmt: skip
        process = self.process(member)
        process.state, process.epoch, process.dead = "loading", epoch, False
        process.work += 1
        work = process.work
        plan = self._scripted(member, "load")
        kind = plan.kind if plan else "fail" if member in self.fails else "ok"
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
        self._tell(e.Loaded(member, epoch, plan.parallel if plan else None))

    def _load_fails(
        self, member: MemberName, process: Process, work: int, plan: Answer | None
    ) -> None:
        if process.work != work:
            return
        process.work += 1
        process.state = "remains" if plan is not None and plan.leaves else "absent"
        fatal = plan is not None and plan.kind == "fatal"
        reason = "command_not_found" if fatal else "exited"
        self._tell(e.LoadFailed(member, process.epoch, reason, "exit code 1", retryable=not fatal))

    def cancel(self, member: MemberName, epoch: Epoch) -> None:
        process = self.process(member)
        if process.epoch != epoch or process.state != "loading":
            return
        nth = self._nth[member, "load"] - 1
        plan = self.answers.get((member, "load", nth))
        work = process.work
        if plan is not None and plan.crossing:
            self.injected["cancel_crossing"] += 1
            self._later(0.0, lambda: self._landed(member, process, work, None))
            return
        process.work += 1

        def answer() -> None:
            process.state = "remains" if plan is None or plan.leaves else "absent"
            self._tell(e.LoadFailed(member, epoch, "load_timeout", "no answer in time"))

        self._later(0.0 if epoch % 2 else 0.3, answer)

    def unload(self, member: MemberName, epoch: Epoch) -> None:
        process = self.process(member)
        if process.state != "absent":
            process.state = "dying"
        process.work += 1
        plan = self._scripted(member, "unload")
        fails = plan is not None and plan.kind == "fail"
        seconds = plan.seconds if plan else self._usual(member).unload
        self.injected["unload_fails"] += fails

        def done() -> None:
            if fails:
                self._tell(e.UnloadFailed(member, epoch, "still there"))
                return
            process.state = "absent"
            self._tell(e.Unloaded(member, epoch))

        self._later(seconds, done)

    def probe(self, member: MemberName, number: int) -> None:
        verdict, delay = e.Idleness.IDLE, self._usual(member).probe
        now, process = self._clock.now, self.process(member)
        if now < self.hung_until or process.state != "up" or process.dead:
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
        self._later(delay, lambda: self._tell(e.IdleAnswered(number, verdict)))

    def _die(
        self, member: MemberName, process: Process, epoch: Epoch, notice: float, *, leaves: bool
    ) -> None:
        if process.state != "up" or process.epoch != epoch or process.dead or self.healed:
            return
        process.dead = True
        if not leaves:
            process.state = "absent"
        for ticket, request in list(self._model.leases[member].items()):
            if request.member == member:
                self._later(notice / 2, lambda ticket=ticket: self._broken_off(ticket))  # type: ignore[misc]
        self._later(notice, lambda: self._tell(e.ResidentLost(member, epoch, "exited", "signal 9")))

    def _start_looking(self, member: MemberName, process: Process, epoch: Epoch) -> None:
        if self.looks:
            landed = self._clock.now
            self._later(LOOK_S, lambda: self._look(member, process, epoch, landed))

    def _look(self, member: MemberName, process: Process, epoch: Epoch, progress_at: float) -> None:
        now = self._clock.now
        if process.epoch != epoch or process.state != "up" or self.healed:
            return
        healthy = now >= self.hung_until and not process.dead
        progress_at = now if healthy else progress_at
        self.injected["hung"] += not healthy
        self._tell(e.HealthSeen(member, epoch, healthy, progress_at))
        self._later(LOOK_S, lambda: self._look(member, process, epoch, progress_at))
