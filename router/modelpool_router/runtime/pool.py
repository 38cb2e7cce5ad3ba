"""
One pool at run time: feeds the scheduler, carries out its commands, owns its tasks.

The scheduler is called without an await in between and never re-entered. Requests wait on their
own future, not on a lock, so that giving up is clean and order is the policy's. Only the tasks
that load and unload take `swap_lock`: the scheduler never asks for two at once, and the lock is
the one readable place where that promise is kept.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import structlog

from ..core.commands import (
    BreakReason,
    CancelLoad,
    Check,
    Command,
    EndLease,
    Grant,
    Load,
    Note,
    NoteKind,
    ProbeIdle,
    Refuse,
    Unload,
)
from ..core.estimates import Estimates
from ..core.events import (
    DRIVER_UNAVAILABLE,
    Arrived,
    Checked,
    Event,
    Finished,
    HealthSeen,
    IdleAnswered,
    Idleness,
    Loaded,
    LoadFailed,
    Observed,
    ObserveFailed,
    Reconfigured,
    ResidentLost,
    SlotRegained,
    SlotWithheld,
    SteppedAside,
    Tick,
    Unloaded,
    UnloadFailed,
)
from ..core.scheduler import Scheduler
from ..core.spec import Epoch, HoldLedger, MemberName, PoolName, PoolSpec, Ticket
from ..core.view import PoolView, SlotState
from ..drivers.base import (
    ActivationFailed,
    DriverUnavailable,
    Endpoint,
    MemberDriver,
    RemembersSlot,
    SlotStanding,
)
from .leases import Lease, LeaseScope, Waiter, requeued
from .tasks import TaskSet

log = structlog.get_logger("modelpool.pool")

PROBE_LIMIT_S = 5.0
"""Longest wait for one idle or readiness answer; a probe that hangs is an unreachable engine."""
OBSERVE_RETRY_S = 1.0
LAST_WORDS_S = 0.25
"""How long a resident that refuses connections may take to be reported as ended."""

NoteListener = Callable[[PoolName, Note], None]


class PoolRuntime:
    """
    A pool that runs.

    Args:
        spec: Members and rules.
        make_driver: Called with the loss callback; returns the driver of this pool.
        ledger: Router-wide count of holds.
        tickets: Router-wide source of ticket numbers.
        listener: Told every note, in order; must not block and must not raise.
        estimates: From the last run, if there was one.
        released: The pool was emptied on purpose in the last run.
        health_interval_s: Time between two looks at the resident.
        violation: Told when another member was found up as a load was about to begin.
    """

    def __init__(
        self,
        spec: PoolSpec,
        make_driver: Callable[[Callable[[MemberName, str, str], None]], MemberDriver],
        *,
        ledger: HoldLedger,
        tickets: Iterator[int],
        listener: NoteListener,
        estimates: Estimates | None = None,
        released: bool = False,
        health_interval_s: float = 2.0,
        violation: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = spec.name
        self.loop = asyncio.get_running_loop()
        self.swap_lock = asyncio.Lock()
        self.waiters: dict[Ticket, Waiter] = {}
        """Requests that wait, or were granted after a wait."""
        self.lent: dict[Ticket, Lease] = {}
        """Leases of requests that never had to wait (`lend`)."""
        self.endpoints: dict[MemberName, Endpoint] = {}
        self.moved_at = -math.inf
        """When a byte of an exchange that is over last moved."""
        self.driver = make_driver(self._member_lost)
        self._tickets = tickets
        self._listener = listener
        self._released = released
        self.health_interval_s = health_interval_s
        self._violation = violation
        self._now = self.loop.time()
        self._scheduler = Scheduler(
            spec, ledger, now=self._now, jitter=random.random, estimates=estimates
        )
        self._epoch = Epoch(0)
        self._resident: MemberName | None = None
        self._inbox: deque[Event] = deque()
        self._handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = TaskSet(f"pool {spec.name}")
        self._cancel_load: Callable[[], bool] | None = None
        self._cancel_unload: Callable[[], bool] | None = None
        self._is_observing = False
        self._cold = asyncio.Event()
        self._cold.set()

    # ------------------------------------------------------------------ for the web layer

    @property
    def spec(self) -> PoolSpec:
        """The rules in force."""
        return self._scheduler.spec

    @property
    def estimates(self) -> Estimates:
        """What was learned of load, unload and drain times."""
        return self._scheduler.estimates

    def lease(self, member: MemberName, *, deadline: float, key: str | None) -> LeaseScope:
        """
        Return a scope that holds the request until it may use *member*.

        Args:
            member: One of the pool's members.
            deadline: End of the hold, in loop time.
            key: Opaque label of the API key, for the per-key bound.

        Entering raises `HoldRefused`; leaving gives the lease back.
        """
        ticket = Ticket(next(self._tickets))
        return LeaseScope(self, Arrived(ticket, member, deadline, key))

    def lend(self, member: MemberName, key: str | None) -> Lease | None:
        """
        Lend the resident if it is free and nothing is going on; None, and nothing was done, if not.

        `take_back` or `scope_of` has to follow.
        """
        now = self.loop.time()
        if now > self._now:
            self._now = now
        ticket = Ticket(next(self._tickets))
        epoch = None if self._handling else self._scheduler.lend(ticket, member, key, self._now)
        if epoch is None:
            return None
        lease = self.lent[ticket] = Lease(self, ticket, member, self.endpoints[member], now, epoch)
        return lease

    def take_back(self, lease: Lease, now: float) -> None:
        """End what `lend` returned."""
        ticket = lease.ticket
        del self.lent[ticket]
        if lease.moved_at > self.moved_at:
            self.moved_at = lease.moved_at
        if now > self._now:
            self._now = now
        if self._handling or not self._scheduler.take_back(ticket, self._now):
            self.tell(Finished(ticket))

    def scope_of(self, lease: Lease) -> LeaseScope:
        """Return the scope that ends what `lend` returned."""
        ticket = lease.ticket
        del self.lent[ticket]
        grant = Grant(ticket, lease.member, lease.epoch)
        waiter = self.waiters[ticket] = Waiter(None, grant, None, None, lease)
        return LeaseScope(self, Arrived(ticket, lease.member, lease.granted_at), waiter)

    async def requeue(self, lease: Lease, deadline: float) -> None:
        """See `Lease.renew`."""
        await requeued(self, lease, deadline)

    def view(self) -> PoolView:
        """Describe the pool now."""
        return self._scheduler.view(max(self._now, self.loop.time()))

    def progress(self, member: MemberName) -> str:
        """Return the last sign of life of a loading member."""
        return self.driver.progress(member)

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Look at what is up, then let the scheduler begin. Returns at once; looking goes on."""
        self._tasks.start(self._observe(), "observe")
        self._tasks.start(self._watch_health(), "health")

    async def stop(self, *, stop_members: bool, hurry: asyncio.Event | None = None) -> None:
        """
        End every task; take members down if *stop_members*. Leases must be over.

        Args:
            hurry: See `MemberDriver.close`.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._tasks.cancel()
        await self.driver.close(stop_members=stop_members, hurry=hurry)

    def stand(self, standing: SlotStanding) -> None:
        """Take in whether the slot may be moved; for drivers that can lose the right to."""
        if not standing.aside:
            self.tell(SlotWithheld(standing.withheld) if standing.withheld else SlotRegained())
            return
        self.tell(SteppedAside(standing.withheld))
        for cancel in (self._cancel_load, self._cancel_unload):
            if cancel is not None:
                cancel()
        if not self._is_observing and not self._tasks.closing:
            self._tasks.start(self._observe(), "observe")

    async def until_cold(self) -> None:
        """Return when nothing is up; for a pool that was removed."""
        await self._cold.wait()

    def reconfigure(self, spec: PoolSpec) -> None:
        """Put new rules in force; untouched members and their streams do not notice."""
        self.tell(Reconfigured(spec))

    def end_leases(self, reason: BreakReason) -> None:
        """End every exchange that still runs, with an explicit error to its client."""
        for lease in list(self.lent.values()):
            lease.end(reason)
        for waiter in list(self.waiters.values()):
            if waiter.grant is not None:
                waiter.end(reason)

    # ------------------------------------------------------------------ the inbox

    def tell(self, event: Event) -> None:
        """Feed one fact to the scheduler and carry out what it commands."""
        now = self.loop.time()
        if now > self._now:
            self._now = now
        if isinstance(event, Arrived) and event.deadline < self._now:
            # It arrives now. What passed since its deadline was computed is not a hold: a budget
            # of 0 s would be over before it began, even for an open resident.
            event = Arrived(event.ticket, event.member, self._now, event.key)
        if self._handling:
            self._inbox.append(event)
            return
        self._handling = True
        try:
            for command in self._scheduler.handle(event, self._now):
                self._carry_out(command)
            while self._inbox:
                for command in self._scheduler.handle(self._inbox.popleft(), self._now):
                    self._carry_out(command)
        finally:
            self._handling = False
        if not self._scheduler.is_calm:
            self._arm()

    def _arm(self) -> None:
        """Make sure that somebody looks at the next deadline; an early look does no harm."""
        due = self._scheduler.next_deadline()
        if due is None or (self._timer is not None and self._timer.when() <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_at(due, self._timed, due)

    def _timed(self, due: float) -> None:
        self._timer = None
        # Event loops with millisecond timers fire a little early: it is *due* now all the same.
        self._now = max(self._now, due)
        self.tell(Tick())

    def _carry_out(self, command: Command) -> None:
        match command:
            case Grant(ticket):
                waiter = self.waiters[ticket]
                waiter.grant = command
                waiter.wake()
            case Refuse(ticket):
                waiter = self.waiters[ticket]
                waiter.refusal = command
                waiter.wake()
            case EndLease(ticket, reason):
                (self.lent.get(ticket) or self.waiters[ticket]).end(reason)
            case Load(member, epoch):
                self._cancel_load = self._tasks.start(self._load(member, epoch), f"load {member}")
            case CancelLoad():
                if self._cancel_load is not None:
                    self._cancel_load()
            case Unload(member, epoch):
                self._cancel_unload = self._tasks.start(
                    self._unload(member, epoch), f"unload {member}"
                )
            case ProbeIdle(member, probe):
                self._tasks.start(self._probe(member, probe), f"probe {member}")
            case Check(member, epoch):
                self._tasks.start(self._check(member, epoch), f"check {member}")
            case Note():
                if command.kind is NoteKind.STATE_CHANGED:
                    self._state_changed(command)
                self._listener(self.name, command)

    def _state_changed(self, note: Note) -> None:
        state = note.fields["state"]
        self._resident = (
            MemberName(str(note.fields["member"])) if state == SlotState.RESIDENT else None
        )
        if state in (SlotState.COLD, SlotState.STARTING):
            self._cold.set()
        else:
            self._cold.clear()

    # ------------------------------------------------------------------ work for the driver

    async def _observe(self) -> None:
        up: Mapping[MemberName, Endpoint] | None = None
        self._is_observing = True
        try:
            while up is None:
                try:
                    up = await self.driver.observe()
                except DriverUnavailable as error:
                    self.tell(ObserveFailed(error.detail, error.way_out))
                    await asyncio.sleep(OBSERVE_RETRY_S)
        finally:
            self._is_observing = False
        self.endpoints.update(up)
        released, prefer = self._released, None
        if isinstance(self.driver, RemembersSlot):
            memory = self.driver.remembered()
            released, prefer = memory.released, memory.prefer
        self.tell(Observed(tuple(up), released=released, prefer=prefer))
        self._epoch = self.view().epoch

    async def _load(self, member: MemberName, epoch: Epoch) -> None:
        event: Event
        async with self.swap_lock:
            try:
                await self._clear_the_way(member)
                endpoint = await self.driver.activate(member)
            except ActivationFailed as error:
                event = LoadFailed(member, epoch, error.reason, error.detail, error.retryable)
            except DriverUnavailable as error:
                event = LoadFailed(member, epoch, DRIVER_UNAVAILABLE, str(error))
            except asyncio.CancelledError:
                if self._tasks.closing:
                    raise
                # Cancelled by `CancelLoad`: what is left of the member, `Unload` takes down.
                detail = f"not ready after {self.spec.load_timeout_s:g} s"
                if progress := self.driver.progress(member):
                    detail += f"; last line of its log: {progress}"
                event = LoadFailed(member, epoch, "load_timeout", detail)
            except Exception as error:
                # A task boundary: a driver that breaks its contract must not hang the pool.
                log.exception("driver broke its contract", pool=self.name, member=member)
                event = LoadFailed(member, epoch, "internal_error", type(error).__name__)
            else:
                self.endpoints[member] = endpoint
                self._epoch = epoch
                event = Loaded(member, epoch, endpoint.parallel)
        self.tell(event)

    async def _clear_the_way(self, member: MemberName) -> None:
        """
        Make sure, by looking, that nobody else is up before a load begins.

        The scheduler has the proof already; this catches what nobody foresaw, such as a member
        that a person started by hand.
        """
        for other in await self.driver.observe():
            if other != member:
                log.error("another member is up", pool=self.name, member=member, other=other)
                self._violation()
                await self.driver.deactivate(other)

    async def _unload(self, member: MemberName, epoch: Epoch) -> None:
        event: Event
        async with self.swap_lock:
            try:
                await self.driver.deactivate(member)
            except DriverUnavailable as error:
                event = UnloadFailed(member, epoch, error.detail, error.way_out)
            except Exception as error:
                # A task boundary: not proven gone, whatever went wrong; it is tried again.
                log.exception("driver broke its contract", pool=self.name, member=member)
                event = UnloadFailed(member, epoch, type(error).__name__)
            else:
                event = Unloaded(member, epoch)
        self.tell(event)

    async def _probe(self, member: MemberName, probe: int) -> None:
        verdict = Idleness.UNREACHABLE
        try:
            async with asyncio.timeout(PROBE_LIMIT_S):
                verdict = await self.driver.idle(member)
        except (TimeoutError, DriverUnavailable):
            pass
        except Exception:
            # A task boundary: an answer that cannot be had is "unreachable", never "idle".
            log.exception("driver broke its contract", pool=self.name, member=member)
        self.tell(IdleAnswered(probe, verdict))

    async def _is_ready(self, member: MemberName) -> bool:
        try:
            async with asyncio.timeout(PROBE_LIMIT_S):
                return await self.driver.ready(member)
        except TimeoutError:
            return False
        except Exception:
            # A task boundary, as above.
            log.exception("driver broke its contract", pool=self.name, member=member)
            return False

    async def _check(self, member: MemberName, epoch: Epoch) -> None:
        is_up = await self._is_ready(member)
        if not is_up:
            # One that ended is heard of a moment after its port is, and tells why.
            await asyncio.sleep(LAST_WORDS_S)
            is_up = await self._is_ready(member)
        self.tell(Checked(member, epoch, is_up))

    async def _watch_health(self) -> None:
        """Look at the resident now and then; traffic that moves is proof enough."""
        looked_at = self.loop.time()
        while True:
            await asyncio.sleep(self.health_interval_s)
            member, epoch = self._resident, self._epoch
            if member is None:
                continue
            leases = [each.lease for each in self.waiters.values() if each.lease is not None]
            leases += self.lent.values()
            moved_at = max([self.moved_at, *(lease.moved_at for lease in leases)])
            # Nothing moves in an idle resident either: it may hang as well as a busy one.
            stands = moved_at <= looked_at
            looked_at = self.loop.time()
            healthy = not stands or await self._is_ready(member)
            spec = self.spec.members.get(member)
            if not healthy and spec is not None and spec.has_idle_probe:
                try:
                    async with asyncio.timeout(PROBE_LIMIT_S):
                        healthy = await self.driver.idle(member) is not Idleness.UNREACHABLE
                except (TimeoutError, DriverUnavailable):
                    healthy = False
            self.tell(HealthSeen(member, epoch, healthy, moved_at))

    def _member_lost(self, member: MemberName, reason: str, detail: str) -> None:
        self.tell(ResidentLost(member, self._epoch, reason, detail))
