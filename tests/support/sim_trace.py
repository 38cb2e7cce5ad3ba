"""
What a pool must be in, judged from its trace alone.

`PoolModel` replays the events that went into a scheduler and the commands that came out, and keeps
its own books: who is up by which evidence, who is held, who holds a lease, who is wanted and why.
It never looks into the scheduler. The rules that are checked against these books are in
`sim_checks`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from modelpool_router.core import commands as c
from modelpool_router.core import events as e
from modelpool_router.core.spec import Epoch, MemberName, PoolSpec, Ticket

GHOST_SLACK_S = 31.0
"""Demand left behind by a refused hold lives for Retry-After (rounded up) + 30 s (H8a)."""


class Violation(AssertionError):
    """A rule was broken: *rule* is its name in the design."""

    def __init__(self, rule: str, t: float, text: str) -> None:
        super().__init__(f"{rule} at {t:.3f}: {text}")
        self.rule = rule
        self.t = t
        self.text = text


@dataclass(slots=True)
class Request:
    """One ticket, from `Arrived` to its end."""

    ticket: Ticket
    member: MemberName
    arrived: float
    deadline: float
    key: str | None
    state: str = "held"
    """held, leased, granted once and refused by the member (``back``), ended."""
    grants: int = 0
    granted_at: float = 0.0
    dispatch_refusals: int = 0


@dataclass(slots=True)
class Probe:
    """One idle probe and whether its answer may still count (H7)."""

    number: int
    sent_at: float
    valid: bool = True
    idle: bool = False


@dataclass(slots=True)
class Life:
    """What is known of one member."""

    state: str = "gone"
    """gone, loading, cancelling, up, failed, lost, unloading, stuck."""
    epoch: Epoch | None = None
    """Of the command or landing that the state stems from; None for an adopted resident."""
    landed_at: float = 0.0
    load_began: float = 0.0
    reported_parallel: int | None = None
    extra: bool = False
    """One of several that were found up at the start."""
    suspect: bool = False
    """A connection was refused and nobody has looked since."""
    probe: Probe | None = None
    idle_since: float = 0.0
    lost_at: float = -1.0
    left_at: float = -1.0
    """When it was last displaced: who had a turn queues up behind those who had none."""
    unhealthy_since: float | None = None
    hung_at: float = -1.0
    """When a look at it showed that it hangs (H7a)."""
    progress_at: float = 0.0
    deferred: bool = False
    """The last idle probe was answered busy or unreachable and none was sent since."""


@dataclass(slots=True)
class PoolModel:
    """Independent books of one pool."""

    spec: PoolSpec
    t: float = 0.0
    started: bool = False
    stopping: bool = False
    paused: bool = False
    withheld: bool = False
    released: bool = False
    unload_asked: bool = False
    reconfigured_at: float = -1.0
    requests: dict[Ticket, Request] = field(default_factory=dict)
    held: dict[MemberName, dict[Ticket, Request]] = field(default_factory=dict)
    leases: dict[MemberName, dict[Ticket, Request]] = field(default_factory=dict)
    """Of the life that is up; `lease_total` counts those of former lives too."""
    lives: dict[MemberName, Life] = field(default_factory=dict)
    ghosts: dict[MemberName, float] = field(default_factory=dict)
    asked: set[MemberName] = field(default_factory=set)
    warm_tokens: int = 0
    """How often the default may still be loaded although nobody wants it (O3, O4)."""
    restorable: MemberName | None = None
    """Who may be restored, because its displacer failed (H9)."""
    last_good: MemberName | None = None
    displaced_for: set[MemberName] = field(default_factory=set)
    """Who was wanted when the resident was unloaded: one of them is loaded even if all left."""
    failed_at: dict[MemberName, float] = field(default_factory=dict)
    head_since: dict[MemberName, float] = field(default_factory=dict)
    held_total: int = 0
    returned: int = 0
    """Held after a refused dispatch: the bounds on holds do not apply to them (H10)."""
    keys: dict[str, int] = field(default_factory=dict)
    """Held, by API key."""
    lease_total: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    checks: Counter[str] = field(default_factory=Counter)
    waits: list[tuple[MemberName, float]] = field(default_factory=list)
    """How long each head of a member's line waited as head."""

    def __post_init__(self) -> None:
        for name in self.spec.members:
            self.meet(name)

    # -- questions ---------------------------------------------------------------------------

    def meet(self, name: MemberName) -> Life:
        """Return the books of *name*, opened if new."""
        life = self.lives.get(name)
        if life is None:
            life = self.lives[name] = Life()
            self.held[name] = {}
            self.leases[name] = {}
        return life

    def landed(self) -> MemberName | None:
        """Return the member that is up by the evidence, if there is exactly one."""
        up = [n for n, life in self.lives.items() if life.state == "up"]
        return up[0] if len(up) == 1 else None

    def most_parallel(self, name: MemberName) -> int:
        """Return the most leases that *name* may have out, by any number it ever gave."""
        member = self.spec.members.get(name)
        configured = member.parallel if member else 1
        return max(configured, self.lives[name].reported_parallel or 0)

    def least_parallel(self, name: MemberName) -> int:
        """Return how many leases *name* can work on, by its most careful number."""
        member = self.spec.members.get(name)
        configured = member.parallel if member else 0
        return min(configured, self.lives[name].reported_parallel or configured)

    def wanted(self, name: MemberName) -> bool:
        """Tell whether a client, a ghost or a person wants *name*."""
        return bool(self.held[name]) or name in self.asked or self.ghost(name)

    def ghost(self, name: MemberName) -> bool:
        """Tell whether demand of a refused hold for *name* may still be alive."""
        return self.ghosts.get(name, -1.0) >= self.t

    def foreign_held(self, name: MemberName) -> bool:
        """Tell whether clients are held for other members than *name*."""
        return self.held_total > len(self.held[name])

    def may_move(self, name: MemberName) -> bool:
        """Tell whether anything at all could be a reason to close admission to *name*."""
        spec = self.spec
        return (
            self.foreign_held(name)
            or self.unload_asked
            or name not in spec.members
            or spec.idle_unload_after_s is not None
            or (
                spec.reclaim_default_after_s is not None
                and spec.default is not None
                and spec.default != name
            )
            or any(n != name for n in self.asked)
            or any(n != name and self.ghost(n) for n in self.ghosts)
        )

    def reasons_to_move(self, name: MemberName) -> list[str]:
        """Return every reason that justifies unloading the resident *name* now (O2, O5, H8)."""
        spec, reasons = self.spec, []
        if self.foreign_held(name):
            reasons.append("held")
        if any(n != name for n in self.asked):
            reasons.append("asked")
        if any(n != name and self.ghost(n) for n in self.ghosts):
            reasons.append("ghost")
        if self.unload_asked:
            reasons.append("unload")
        if name not in spec.members:
            reasons.append("removed")
        idle = self.t - self.lives[name].idle_since
        if not self.held[name] and not self.leases[name]:
            if spec.idle_unload_after_s is not None and idle >= spec.idle_unload_after_s - 1e-9:
                reasons.append("idle")
            if (
                spec.reclaim_default_after_s is not None
                and spec.default is not None
                and spec.default != name
                and idle >= spec.reclaim_default_after_s - 1e-9
            ):
                reasons.append("reclaim")
        return reasons

    def is_hung(self, name: MemberName) -> bool:
        """Tell whether *name* may be taken for hung (H7a), by the looks that were reported."""
        return self.lives[name].hung_at == self.t

    # -- what goes in ------------------------------------------------------------------------

    def adopted(self, names: tuple[MemberName, ...], epoch: Epoch) -> None:
        """Book the epoch that a scheduler gave to what it found up."""
        for name in names:
            self.lives[name].epoch = epoch

    def event(self, t: float, event: e.Event) -> None:
        """Book one event, before the scheduler's answer to it is judged."""
        self.t = t
        match event:
            case e.Arrived(ticket, member, deadline, key):
                request = Request(ticket, member, t, deadline, key)
                self.requests[ticket] = request
                self._hold(request)
            case e.Departed(ticket):
                self._unhold(self.requests[ticket], "departed")
            case e.Finished(ticket):
                self._unlease(self.requests[ticket])
                if not self.leases[self.requests[ticket].member]:
                    self.lives[self.requests[ticket].member].idle_since = t
                self.requests[ticket].state = "ended"
                self.outcomes["finished"] += 1
            case e.DispatchRefused(ticket):
                request = self.requests[ticket]
                life = self.lives[request.member]
                self._unlease(request)
                request.dispatch_refusals += 1
                if life.state == "up":
                    life.suspect = True
                self._hold(request)
            case e.Observed(up, released, _):
                self.started = True
                self.released = released
                for name in up:
                    life = self.meet(name)
                    life.state, life.landed_at, life.idle_since = "up", t, t
                    life.extra = len(up) > 1  # until one of them is left
                    life.progress_at = t
                self.warm_tokens += not up and not released
            case e.Loaded(member, epoch, parallel):
                self._loaded(member, epoch, parallel)
            case e.LoadFailed(member, epoch):
                self._load_failed(member, epoch)
            case e.Unloaded(member, epoch):
                life = self.lives[member]
                if life.state == "unloading" and life.epoch == epoch:
                    life.state = "gone"
                    left = [other for other in self.lives.values() if other.state != "gone"]
                    if len(left) == 1:
                        left[0].extra = False
            case e.UnloadFailed(member, epoch):
                life = self.lives[member]
                if life.state == "unloading" and life.epoch == epoch:
                    life.state = "stuck"
            case e.IdleAnswered(number, verdict):
                self._idle_answered(number, verdict)
            case e.Checked(member, epoch, up):
                life = self.lives[member]
                if life.state == "up" and life.epoch == epoch:
                    life.suspect = False
                    if not up:
                        self._lose(member, life)
            case e.HealthSeen(member, epoch, healthy, progress_at):
                life = self.lives[member]
                if life.state == "up" and life.epoch == epoch:
                    life.progress_at = max(life.progress_at, progress_at)
                    if healthy:
                        life.unhealthy_since = None
                    elif life.unhealthy_since is None:
                        life.unhealthy_since = t
                    elif (
                        t - max(life.unhealthy_since, life.progress_at)
                        >= self.spec.hung_after_s - 1e-6
                    ):
                        life.hung_at = t
            case e.ResidentLost(member, epoch):
                life = self.lives[member]
                if life.state == "up" and life.epoch == epoch:
                    self._lose(member, life)
            case e.LoadAsked(member):
                self.asked.add(member)
                self.failed_at.pop(member, None)
            case e.UnloadAsked():
                self.unload_asked = True
            case e.Paused():
                self.paused = True
            case e.Resumed():
                self.paused = False
            case e.SlotWithheld():
                self.withheld = True
            case e.SlotRegained():
                self.withheld = False
            case e.ObserveFailed():
                raise AssertionError("the simulated platform can always be looked at")
            case e.SteppedAside():
                raise AssertionError("the simulated world has one router")
            case e.Reconfigured(spec):
                self._reconfigured(spec)
            case e.Stopping():
                self.stopping = True
            case e.Tick():
                pass

    def _hold(self, request: Request) -> None:
        line = self.held[request.member]
        request.state = "held"
        if not line or next(iter(line)) > request.ticket:
            self.head_since[request.member] = self.t
        line[request.ticket] = request
        if request.dispatch_refusals:
            self.held[request.member] = dict(sorted(line.items()))
            self.returned += 1
        self.held_total += 1
        if request.key is not None:
            self.keys[request.key] = self.keys.get(request.key, 0) + 1

    def _unhold(self, request: Request, end: str) -> None:
        line = self.held[request.member]
        if next(iter(line)) == request.ticket:
            self.waits.append((request.member, self.t - self.head_since[request.member]))
            self.head_since[request.member] = self.t
        del line[request.ticket]
        self.held_total -= 1
        self.returned -= request.dispatch_refusals > 0
        if request.key is not None:
            self.keys[request.key] -= 1
            if not self.keys[request.key]:
                del self.keys[request.key]
        request.state = "ended"
        if end:
            self.outcomes[end] += 1

    def _unlease(self, request: Request) -> None:
        self.leases[request.member].pop(request.ticket, None)
        self.lease_total -= 1

    def _loaded(self, member: MemberName, epoch: Epoch, parallel: int | None) -> None:
        life = self.lives[member]
        if life.epoch != epoch or life.state not in ("loading", "cancelling"):
            return
        life.state = "up"
        life.landed_at = life.idle_since = life.progress_at = self.t
        life.reported_parallel = parallel
        life.suspect = life.extra = life.deferred = False
        life.unhealthy_since = life.probe = None
        self.ghosts.pop(member, None)
        self.asked.discard(member)
        self.failed_at.pop(member, None)
        self.restorable = None
        self.displaced_for = set()
        self.warm_tokens = 0
        self.released = False

    def _load_failed(self, member: MemberName, epoch: Epoch) -> None:
        life = self.lives[member]
        if life.epoch != epoch or life.state not in ("loading", "cancelling"):
            return
        life.state = "failed"
        self.failed_at[member] = self.t
        self.asked.discard(member)
        self.displaced_for.discard(member)
        self._blame(member)

    def _blame(self, member: MemberName) -> None:
        """The displacer is no good: who was displaced may come back, once (H9)."""
        self.restorable = None if member in (self.restorable, self.last_good) else self.last_good
        self.last_good = None

    def _lose(self, member: MemberName, life: Life) -> None:
        life.state = "lost"
        self.leases[member].clear()  # they end in their own time, but they are of no life any more
        life.lost_at = self.t
        life.suspect = False
        self.warm_tokens += 1
        self._blame(member)

    def _idle_answered(self, number: int, verdict: e.Idleness) -> None:
        for life in self.lives.values():
            probe = life.probe
            if probe is not None and probe.number == number:
                if verdict is e.Idleness.IDLE:
                    probe.idle = True
                else:
                    probe.valid = False
                    life.deferred = True

    def _reconfigured(self, spec: PoolSpec) -> None:
        if spec.default != self.spec.default and self.landed() is None and not self.released:
            self.warm_tokens = max(self.warm_tokens, 1)  # a new default for a cold pool
        self.spec = spec
        self.reconfigured_at = self.t
        for name in spec.members:
            self.meet(name)

    # -- what comes out ----------------------------------------------------------------------

    def command(self, command: c.Command) -> None:
        """Book one command, after it was judged."""
        match command:
            case c.Grant(ticket, member, epoch):
                request = self.requests[ticket]
                life = self.lives[member]
                self._unhold(request, "")
                request.state, request.granted_at = "leased", self.t
                request.grants += 1
                self.leases[member][ticket] = request
                self.lease_total += 1
                life.epoch = epoch
                if life.probe is not None:
                    life.probe.valid = False
            case c.Refuse(ticket, code, retry_after_s):
                request = self.requests[ticket]
                self._unhold(request, f"refused:{code}")
                if code is c.RefusalCode.SWAP_BUDGET_EXCEEDED:
                    life = self.lives[request.member]
                    until = self.t + (retry_after_s or 60.0) + GHOST_SLACK_S
                    self.ghosts[request.member] = max(self.ghosts.get(request.member, 0.0), until)
            case c.Load(member, epoch):
                life = self.lives[member]
                self._spend(member)
                life.state, life.epoch, life.load_began = "loading", epoch, self.t
                life.probe = None
                self.released = False
            case c.CancelLoad(member):
                self.lives[member].state = "cancelling"
            case c.Unload(member, epoch):
                life = self.lives[member]
                if life.state == "up" and self.is_hung(member):
                    self._lose(member, life)
                elif life.state == "up" and not life.extra:
                    life.left_at = self.t
                    self._displaced(member)
                life.state, life.epoch = "unloading", epoch
            case c.ProbeIdle(member, number):
                self.lives[member].probe = Probe(number, self.t)
                self.lives[member].deferred = False
            case c.Note(c.NoteKind.TURN_REOPENED, fields):
                life = self.lives[MemberName(str(fields["member"]))]
                if life.probe is not None:
                    life.probe.valid = False
            case c.Note() | c.EndLease() | c.Check():
                pass

    def _displaced(self, member: MemberName) -> None:
        kept = {"reclaim", "removed"} & set(self.reasons_to_move(member))
        self.displaced_for = {n for n in self.lives if n != member and self.wanted(n)}
        self.released = not self.displaced_for and not kept
        self.warm_tokens += bool(kept)
        self.unload_asked = False
        self.last_good = None if self.released or "removed" in kept else member

    def _spend(self, member: MemberName) -> None:
        """Use up the permission under which *member* is loaded without anybody wanting it."""
        if self.wanted(member) or member in self.displaced_for:
            return
        if member == self.restorable:
            self.restorable = None
        elif member == self.spec.default:
            self.warm_tokens -= 1

    def settle(self) -> None:
        """Book the end of one `handle`: an admission that nothing closes is open (H7, H8)."""
        for name, life in self.lives.items():
            if life.extra or life.probe is None or life.state != "up":
                continue
            if not self.may_move(name):
                life.probe.valid = False
