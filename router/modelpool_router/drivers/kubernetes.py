"""
Members as objects of Kubernetes: scaled between 0 and 1 while the Lease of the pool is ours.

Three things are kept apart. Whether we *may* move the slot is the Lease's to say (`_standing`).
What *is* up or gone is read from the API server, most-recent, in the order that
`modelpool_kube.slotrules` asks for. Watches only wake us, fail a load early, and end a belief.

Every load and unload begins an epoch of its own, which is recorded and then marked on every
member before anything moves: what an earlier attempt left in flight can land no more.
Whatever fails on the way, the whole attempt is repeated from its first look.

Losing the Lease stops that and nothing else. When another holder is seen, everything believed is
dropped (`SlotStanding.aside`).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from modelpool_api.names import SLOT_ANNOTATION
from modelpool_kube.backoff import Backoff
from modelpool_kube.errors import Forbidden, KubeError, NotFound
from modelpool_kube.kinds import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    MEMBER_KINDS,
    PODS,
    REPLICASETS,
    Json,
    Kind,
    annotation,
    name_of,
    uid,
    version_of,
)
from modelpool_kube.lease import LeaseKeeper, LeaseLost, micro_time
from modelpool_kube.port import Change, ClusterPort
from modelpool_kube.record import Frozen, Phase, SlotRecord, read_mark
from modelpool_kube.slot import (
    Contended,
    Deposed,
    EpochBegun,
    InFlight,
    MemberMissing,
    MemberShared,
    SlotActuator,
)
from modelpool_kube.slotrules import (
    ForeignChanges,
    Gone,
    NotReady,
    NotYet,
    Probe,
    Ready,
    unsafe,
    wants,
)
from modelpool_kube.watch import Notice

from ..core.events import Idleness
from ..core.spec import MemberName, PoolName
from ..core.view import PoolView, SlotState
from .base import (
    ActivationFailed,
    DriverUnavailable,
    Endpoint,
    LostCallback,
    SlotMemory,
    SlotStanding,
    StandingCallback,
)
from .kube_members import KubeLimits, KubeMember, KubeSlot
from .kube_pods import (
    Lives,
    Trouble,
    address_of,
    has_run,
    headline,
    life_of,
    load_trouble,
    loss_of,
    pods_below,
    port_of,
    unschedulable,
)
from .kube_previous import STANDBY, is_out_of_the_way
from .kube_watch import PoolWatch
from .probe import Prober, port_refuses
from .profiles import Readiness

__all__ = ["KubeLimits", "KubeMember", "KubeSlot", "KubernetesDriver"]

_log = logging.getLogger(__name__)

_LIMITS = KubeLimits()


class MemberProber(Prober):
    """Asks members over the network."""

    async def refuses(self, host: str, port: int) -> bool:
        """Return whether nobody listens there."""
        return await port_refuses(host, port)


@dataclass(slots=True, eq=False)
class _Life:
    """One time that a member is brought up, from the first write to the proof that it is gone."""

    spec: KubeMember
    is_scaled: bool = False
    """Its scaling up was acknowledged, in an epoch that still counts."""
    is_stopping: bool = False
    is_lost: bool = False
    before: frozenset[str] = frozenset()
    """UIDs of Pods that were there before it."""
    is_watched: bool = False
    """The watch has shown its Pod, so that it means something when it shows it no more."""
    lives: Lives = field(default_factory=lambda: Lives("", 0))
    pod_name: str = ""
    address: tuple[str, int] = ("", 0)
    """Of its Pod, for probes."""
    endpoint: Endpoint | None = None
    waits_for: str = ""
    """For people, while it loads."""

    @property
    def is_over(self) -> bool:
        """Whether nothing of it may be used any more."""
        return self.is_stopping or self.is_lost


class KubernetesDriver:
    """`MemberDriver` for objects of Kubernetes. One instance per pool; see `base`."""

    def __init__(
        self,
        pool: PoolName,
        members: Mapping[MemberName, KubeMember],
        *,
        port: ClusterPort,
        slot: KubeSlot,
        lost: LostCallback,
        standing: StandingCallback = lambda standing: None,
        view: Callable[[], PoolView | None] = lambda: None,
        default: MemberName | None = None,
        limits: KubeLimits = _LIMITS,
        prober: MemberProber | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """
        Begin to get the Lease; inside a running loop.

        Args:
            pool: Name of the pool.
            members: By name.
            port: The cluster; shared by the pools of a router.
            slot: The Lease, and our name.
            lost: See `LostCallback`.
            standing: See `StandingCallback`.
            view: Returns what the scheduler thinks, for the record; None while it is not there.
            default: Who stays when nothing else decides between two that are half up.
            limits: Times.
            prober: Asks members.
            rng: For jitter.
        """
        self.pool = pool
        self.standing = SlotStanding("the Lease is not held yet")
        self._port = port
        self._slot = slot
        self._lost = lost
        self._on_standing = standing
        self._view = view
        self._limits = limits
        self._rng = rng or random.Random()
        self._prober = prober or MemberProber()
        self._loop = asyncio.get_running_loop()
        self._members: dict[MemberName, KubeMember] = dict(members)
        self._leaving: dict[MemberName, KubeMember] = {}
        """Removed from the configuration and not proven gone yet."""
        self._default = default
        self._keeper = LeaseKeeper(
            port,
            slot.id,
            slot.holder,
            may_create=slot.may_create,
            on_change=self._lease_changed,
            rng=self._rng,
        )
        self._actuator = SlotActuator(port, self._keeper, rng=self._rng)
        self._begun: EpochBegun | None = None
        self._begun_for: object = None
        self._tenure = 0
        self._act = asyncio.Lock()
        """Held from the beginning of an epoch to the scaling that it is for."""
        self._lives: dict[MemberName, _Life] = {}
        self._turns: dict[MemberName, asyncio.Lock] = {}
        self._is_adopted = False
        self._adopting = asyncio.Lock()
        self._memory = SlotMemory()
        self._pulse = asyncio.Event()
        self._previous: str | None = None
        """Who held the slot before us and may still forward requests."""
        self._held_since = 0.0
        self._invalid = ""
        self._changes: dict[MemberName, ForeignChanges] = {}
        self._scaling: set[MemberName] = set()
        self._put_off: list[tuple[Kind, Notice]] = []
        """Changes that came while we were scaling: whose they are is known afterwards."""
        self._own_versions: deque[tuple[MemberName, str]] = deque(maxlen=64)
        """Versions that members got by our scaling: these changes are ours."""
        self._correcting: set[MemberName] = set()
        self._unschedulable_since: dict[str, float] = {}
        self._is_retired = False
        self._is_closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._own(self._keeper.run(), "lease")
        self._watch = self._new_watch()
        self._own(self._tend(), "tend")

    # -- for the application -----------------------------------------------------------------

    def update(
        self, members: Mapping[MemberName, KubeMember], *, default: MemberName | None
    ) -> None:
        """Replace the configuration. A life that goes on keeps its own until its end."""
        self._is_retired = False
        self._default = default
        if dict(members) == self._members:
            return
        for name, old in self._members.items():
            if members.get(name) is None or members[name].slot_member != old.slot_member:
                self._leaving[name] = old
        self._members = dict(members)
        for name in [name for name in self._leaving if name in self._members]:
            if self._leaving[name].slot_member == self._members[name].slot_member:
                del self._leaving[name]
        self._begun = None  # an epoch is begun when its mark is on *every* member
        old_watch, self._watch = self._watch, self._new_watch()
        self._own(old_watch.close(), "end of a watch")
        self._judge_members()

    def retire(self) -> None:
        """
        The pool itself was removed: its members stay as they are.

        `deactivate` then only forgets, and `close` takes our marks away.
        """
        self._is_retired = True

    @property
    def readiness(self) -> str:
        """
        What the router's readiness says of this pool: ``ok``, ``starting`` or ``standby``.

        Ready is who holds the slot, or goes on serving what it brought up.
        """
        if self.standing.aside:
            return STANDBY
        return "ok" if self._keeper.is_held or self._is_adopted else "starting"

    def remembered(self) -> SlotMemory:
        """See `RemembersSlot`."""
        return self._memory

    # -- the contract ------------------------------------------------------------------------

    async def activate(self, member: MemberName) -> Endpoint:
        """See `MemberDriver.activate`."""
        self._refuse_aside()
        async with self._turn(member):
            life = self._lives.get(member)
            if life is not None and life.is_over:
                await self._take_down(member)
                life = None
            if life is None:
                self._refuse_company(member)
                spec = self._members[member]
                before = frozenset(uid(pod) for pod in self._watch.pods_of(spec))
                life = self._lives[member] = _Life(spec, before=before)
            if not life.is_scaled:
                await self._scale_up(life)
        return life.endpoint or await self._wait_until_ready(life)

    async def deactivate(self, member: MemberName) -> None:
        """See `MemberDriver.deactivate`. A running `activate` of it fails with ``stopped``."""
        if (life := self._lives.get(member)) is not None:
            life.is_stopping = True
            self._wake()
        async with self._turn(member):
            await self._take_down(member)

    async def idle(self, member: MemberName) -> Idleness:
        """See `MemberDriver.idle`. A member that is not up is unreachable."""
        life = self._lives.get(member)
        if life is None or life.is_over or life.endpoint is None:
            return Idleness.UNREACHABLE
        return await self._idleness(life.spec, *life.address)

    async def ready(self, member: MemberName) -> bool:
        """See `MemberDriver.ready`."""
        life = self._lives.get(member)
        if life is None or life.is_over or life.endpoint is None:
            return False
        return await self._readiness(life.spec, *life.address) is Readiness.READY

    async def observe(self) -> Mapping[MemberName, Endpoint]:
        """
        See `MemberDriver.observe`. What an earlier router left up is adopted.

        The first time, and whenever another router held the slot meanwhile, this waits for the
        Lease, and for whatever is half up to land or to end.
        """
        if not self._is_adopted:
            async with self._adopting:
                if not self._is_adopted:
                    await self._adopt()
        up: dict[MemberName, Endpoint] = {}
        for name, life in list(self._lives.items()):
            if life.endpoint is not None and not life.is_over and await self._is_up(life):
                up[name] = life.endpoint
        return up

    def progress(self, member: MemberName) -> str:
        """See `MemberDriver.progress`."""
        life = self._lives.get(member)
        if life is None or life.is_over or life.endpoint is not None:
            return ""
        pods = headline(self._watch.pods_of(life.spec)) if life.is_scaled else ""
        return f"loading: {pods or life.waits_for or 'the cluster was asked for it'}"

    async def close(self, *, stop_members: bool) -> None:
        """Give the Lease back and end all watching; members stay. See `MemberDriver.close`."""
        if not self._is_closed and self._is_retired:
            with suppress(KubeError, LeaseLost, Frozen, DriverUnavailable):
                async with asyncio.timeout(self._limits.resync_s):
                    await self._unmark_all()
        self._is_closed = True
        for life in self._lives.values():
            life.is_stopping = True
        self._lives.clear()
        self._wake()
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._watch.close()
        await self._prober.close()

    # -- may we? -----------------------------------------------------------------------------

    def _lease_changed(self) -> None:
        keeper = self._keeper
        if keeper.other is not None:
            self._previous = keeper.other
        if keeper.is_held and keeper.tenure != self._tenure:
            self._tenure = keeper.tenure
            self._begun = None
            self._held_since = self._loop.time()
            if self._previous is not None:
                self._own(self._until_previous_is_out(keeper.tenure), "previous holder")
        self._judge()
        self._wake()

    def _judge(self) -> None:
        """Say whether the slot may be moved, if that has changed."""
        found = self._judged()
        if found == self.standing:
            return
        before, self.standing = self.standing, found
        if found.aside and not before.aside:
            self._step_aside()
        if found.withheld:
            _log.warning("the slot of %s is withheld: %s", self.pool, found.withheld)
        else:
            _log.info("the slot of %s is ours to move", self.pool)
        self._on_standing(found)

    def _judged(self) -> SlotStanding:
        keeper = self._keeper
        if not keeper.is_held and keeper.other is not None:
            return SlotStanding(f"the slot is held by {keeper.other}", aside=True)
        if not keeper.is_held:
            # Who stood aside goes on doing so: somebody else may have moved the slot since.
            why = f"the Lease {self._slot.lease} is not held: {keeper.trouble or 'not yet'}"
            return SlotStanding(why, aside=self.standing.aside)
        if keeper.frozen:
            return SlotStanding(keeper.frozen)
        if self._invalid:
            return SlotStanding(self._invalid)
        contested = self._contested()
        if contested:
            return SlotStanding(f"ReplicasContested: {contested}")
        if self._previous is not None:
            return SlotStanding(
                f"router {self._previous} held the slot before and may still forward requests; "
                "nothing is stopped until its Pod is gone or it answers that it stands by, or "
                f"somebody says `modelpool forget {self._previous}`"
            )
        return SlotStanding()

    def _step_aside(self) -> None:
        self._is_adopted = False
        self._begun = None
        for life in self._lives.values():
            life.is_stopping = True
        self._lives.clear()

    def _refuse_aside(self) -> None:
        if not self._is_adopted:
            raise DriverUnavailable(self.standing.withheld or "the slot was not looked at yet")

    def _judge_members(self) -> None:
        """Look for members that are missing or cannot be members, as the watches show them."""
        if not self._watch.has_seen_members:
            return
        found: list[str] = []
        missing: list[str] = []
        for member in self._members.values():
            obj = self._watch.object_of(member)
            if obj is None:
                missing.append(str(member))
            elif (why := unsafe(member.object_kind, obj)) is not None:
                found.append(f"UnsafeMember: {member}: {why}")
            elif (mark := read_mark(annotation(obj, SLOT_ANNOTATION))) is not None:
                if mark.slot != self._slot.id:
                    found.append(
                        f"MemberShared: {member} is a member of the slot {mark.slot.namespace}/"
                        f"{mark.slot.lease}; take it out of one of the two pools"
                    )
        if missing:
            text = f"MissingMembers: {', '.join(missing)}; create them, or take them out"
            found.insert(0, text)
        invalid = "; ".join(found)
        if invalid != self._invalid:
            self._invalid = invalid
            self._begun = None
        self._judge()

    async def _until_previous_is_out(self, tenure: int) -> None:
        while self._previous is not None and self._keeper.tenure == tenure:
            record = self._keeper.record
            forgotten = record is not None and self._previous in record.forgotten
            if forgotten or await is_out_of_the_way(
                self._port,
                self._prober,
                namespace=self._slot.namespace,
                holder=self._previous,
                pool=str(self.pool),
                held_s=self._loop.time() - self._held_since,
                grace_s=15.0,
            ):
                self._previous = None
                self._judge()
                self._wake()
                return
            await asyncio.sleep(self._limits.look_s)

    # -- waiting -----------------------------------------------------------------------------

    def _wake(self) -> None:
        pulse, self._pulse = self._pulse, asyncio.Event()
        pulse.set()

    async def _rest(self, pulse: asyncio.Event, seconds: float) -> None:
        """Wait until something happened since *pulse* was taken, at most *seconds*."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await pulse.wait()
                await asyncio.sleep(self._limits.settle_s)

    async def _repeat(
        self,
        attempt: Callable[[bool], Awaitable[str | None]],
        *,
        check: Callable[[], None],
        limit_s: float | None = None,
        patient: bool = False,
    ) -> None:
        """
        Repeat *attempt* until it returns None, through outages of any length.

        Args:
            attempt: Given whether it takes unusually long; returns what it waits for, or None.
            check: Raises when there is no point in going on.
            limit_s: Longest wait for the same thing while the cluster answers.
            patient: Wait for people, too, and while somebody else holds the slot.

        Raises:
            DriverUnavailable: *limit_s* is over, or a person has to do something first.
            Forbidden: as the API server says.
        """
        pauses = Backoff(
            self._rng, first_s=self._limits.retry_first_s, most_s=self._limits.retry_most_s
        )
        since: float | None = None
        while True:
            check()
            pulse, pause_s = self._pulse, self._limits.resync_s
            try:
                if not self._keeper.is_held:
                    since = None
                else:
                    late = since is not None and self._loop.time() - since > 35.0
                    waits_for = await attempt(late)
                    if waits_for is None:
                        return
                    pauses.reset()
                    since = self._loop.time() if since is None else since
                    if limit_s is not None and self._loop.time() - since >= limit_s:
                        raise DriverUnavailable(waits_for)
                    pause_s = min(pause_s, limit_s or pause_s)
            except (LeaseLost, Deposed, InFlight, Contended) as error:
                # Somebody wrote in between, or what was sent may still land: a new epoch.
                _log.info("%s: %s; again", self.pool, error)
                self._begun, since = None, None
                pause_s = pauses.next()
            except Forbidden:
                raise
            except (MemberShared, MemberMissing, Frozen) as error:
                self._begun = None
                if not patient:
                    raise DriverUnavailable(str(error)) from error
                pause_s = pauses.next()
            except KubeError as error:
                self._begun, since = None, None
                pause_s = pauses.next(error.retry_after_s)
            if self.standing.aside and not patient:
                raise DriverUnavailable(self.standing.withheld)
            await self._rest(pulse, pause_s)

    # -- epochs and scaling --------------------------------------------------------------------

    def _all_members(self) -> list[KubeMember]:
        members = {m.slot_member: m for m in self._members.values()}
        members |= {m.slot_member: m for m in self._leaving.values()}
        return list(members.values())

    def _current(self) -> EpochBegun | None:
        """Return the epoch in force; None when one has to be begun before anything."""
        record = self._keeper.record
        begun = self._begun
        if begun is None or not self._keeper.is_held or self._tenure != self._keeper.tenure:
            return None
        return begun if record is not None and record.epoch == begun.epoch else None

    async def _epoch_for(
        self, purpose: object, make: Callable[[SlotRecord], SlotRecord]
    ) -> EpochBegun:
        """Return the epoch that was begun for *purpose*; begin one if there is none."""
        current = self._current()
        if current is not None and self._begun_for is purpose:
            return current
        self._begun = None
        tenure = self._keeper.tenure
        members = [member.slot_member for member in self._all_members()]
        begun = await self._actuator.begin_epoch(members, lambda record: self._dated(record, make))
        if tenure != self._keeper.tenure:
            raise LeaseLost("the Lease was lost and got again while the epoch was begun")
        self._begun, self._begun_for = begun, purpose
        return begun

    def _dated(self, record: SlotRecord, make: Callable[[SlotRecord], SlotRecord]) -> SlotRecord:
        made = make(record)
        if made.phase != record.phase or made.owner != record.owner:
            made = replace(made, since=micro_time(self._port.wall()))
        return made

    async def _note(self, make: Callable[[SlotRecord], SlotRecord]) -> None:
        """Write into the record what happened; it announces nothing, so it may be lost."""
        with suppress(LeaseLost, Frozen, KubeError):
            await self._keeper.write(lambda record: self._dated(record or SlotRecord(), make))

    async def _scale(self, member: KubeMember, begun: EpochBegun, *, up: bool) -> None:
        self._refuse_withheld()
        self._scaling.add(member.name)
        try:
            stored = await self._actuator.scale(member.slot_member, up=up, epoch=begun.epoch)
            self._own_versions.append((member.name, version_of(stored)))
        finally:
            self._scaling.discard(member.name)
            put_off, self._put_off = self._put_off, []
            for kind, notice in put_off:
                self._loop.call_soon(self._notice_scaling, kind, notice)

    # -- up ------------------------------------------------------------------------------------

    def _refuse_company(self, member: MemberName) -> None:
        if others := self._lives.keys() - {member}:
            raise DriverUnavailable(f"cannot start {member}: {min(others)} is not gone")

    def _fail_if_over(self, life: _Life) -> None:
        if life.is_lost:
            raise ActivationFailed("exited", life.waits_for)
        if life.is_stopping:
            if not self._is_adopted:
                raise DriverUnavailable(self.standing.withheld or "the driver is closed")
            raise ActivationFailed("stopped", "it was taken down while it loaded")

    async def _scale_up(self, life: _Life) -> None:
        """Prove everybody else gone and ask for one replica, in one epoch."""
        member = life.spec.name

        def announce(record: SlotRecord) -> SlotRecord:
            owner = record.owner if record.owner == member else None
            return replace(
                record,
                owner=owner,
                target=str(member),
                phase=Phase.LOADING,
                released=False,
                reason="",
            )

        async def attempt(late: bool) -> str | None:
            async with self._act:
                self._refuse_withheld()
                begun = await self._epoch_for(life, announce)
                for other in self._all_members():
                    if other.slot_member == life.spec.slot_member:
                        continue
                    found = await self._look_gone(other, begun, late)
                    if isinstance(found, NotYet):
                        if found.reason == "NotScaledDown":
                            await self._stop_stray(other, begun)
                        life.waits_for = f"{other.name} is not gone: {found.detail}"
                        return f"cannot start {member}: {life.waits_for}"
                self._fail_if_over(life)
                await self._scale(life.spec, begun, up=True)
            life.is_scaled = True
            return None

        await self._act_on(
            life,
            self._repeat(
                attempt, check=lambda: self._fail_if_over(life), limit_s=self._limits.gone_s
            ),
        )

    async def _act_on(self, life: _Life, work: Awaitable[None]) -> None:
        try:
            await work
        except Forbidden as error:
            raise ActivationFailed("Forbidden", str(error), retryable=False) from error

    async def _look_gone(self, member: KubeMember, begun: EpochBegun, late: bool) -> Gone | NotYet:
        found = await self._actuator.look_gone(member.slot_member, epoch=begun.epoch, nodes=late)
        if isinstance(found, NotYet) and found.reason == "NotFenced":
            self._begun = None
        return found

    async def _stop_stray(self, member: KubeMember, begun: EpochBegun) -> None:
        """Scale a member down that nobody of us brought up, if nobody can be using it."""
        why = await self._in_use(member)
        if why:
            raise DriverUnavailable(f"{member.name} is not gone: {why}")
        await self._scale(member, begun, up=False)

    async def _in_use(self, member: KubeMember) -> str:
        """Return why *member*, which we brought not up, may not be stopped; empty when it may."""
        record = self._keeper.record
        if record is not None and record.phase is Phase.LOADING and record.target == member.name:
            return ""  # its load was announced and not its landing: nobody ever sent it anything
        for pod in await self._pods_now(member):
            if not has_run(pod):
                continue
            port = member.port or port_of(pod)
            if port is None:
                return f"it was scaled up by somebody else, and no port of {name_of(pod)} is known"
            verdict = await self._idleness(member, address_of(pod), port)
            if verdict is Idleness.IDLE or await self._prober.refuses(address_of(pod), port):
                continue
            return f"it was scaled up by somebody else, and its engine is {verdict.value}"
        return ""

    async def _pods_now(self, member: KubeMember) -> list[Json]:
        """Return the Pods of *member*, most-recent: the watch may be behind."""
        is_service = member.object_kind == INFERENCE_SERVICES
        kind = DEPLOYMENTS if is_service else member.object_kind
        try:
            owner = await self._port.get(kind, member.namespace, member.target)
        except NotFound:
            return []
        replica_sets: tuple[Json, ...] = ()
        if kind == DEPLOYMENTS:
            replica_sets = (await self._port.list(REPLICASETS, member.namespace)).items
        pods = (await self._port.list(PODS, member.namespace)).items
        return pods_below(kind, owner, replica_sets, pods)

    async def _wait_until_ready(self, life: _Life) -> Endpoint:
        """Wait for evidence: a running Pod in our epoch, and an answer of its own to us."""
        refused_since: float | None = None
        poll_s = self._limits.poll_s
        while True:
            self._fail_if_over(life)
            pulse = self._pulse
            self._fail_on_trouble(life)
            if life.endpoint is not None:
                return life.endpoint  # a second caller waited as well
            pod = await self._candidate(life)
            if pod is None:
                await self._rest(pulse, self._limits.resync_s)
                continue
            port = life.spec.port or port_of(pod)
            if port is None:
                raise ActivationFailed(
                    "NoPort",
                    f"no container of {life.spec} declares a port; write `port` to the member",
                    retryable=False,
                )
            while not pulse.is_set():
                probed_at = self._port.now()
                answer = await self._readiness(life.spec, address_of(pod), port)
                self._fail_if_over(life)
                if answer is Readiness.READY:
                    await self._land(life, pod, port, Probe(uid(pod), probed_at))
                    break
                if answer is not Readiness.FAILED:
                    refused_since = None
                elif refused_since is None:
                    refused_since = self._loop.time()
                elif self._loop.time() - refused_since >= self._limits.refused_after_s:
                    raise ActivationFailed(
                        "readiness_refused",
                        f"GET {life.spec.profile.readiness_path} is answered, but never with "
                        "success; correct the profile or readinessPath",
                        retryable=False,
                    )
                with suppress(TimeoutError):
                    async with asyncio.timeout(poll_s):
                        await pulse.wait()
                poll_s = min(poll_s * 1.5, self._limits.most_poll_s)
            if pulse.is_set():
                await asyncio.sleep(self._limits.settle_s)

    def _fail_on_trouble(self, life: _Life) -> None:
        pods = [pod for pod in self._watch.pods_of(life.spec) if uid(pod) not in life.before]
        trouble = load_trouble(pods) or self._unschedulable(life.spec, pods)
        if trouble is not None:
            life.is_lost = True
            life.waits_for = trouble.detail
            raise ActivationFailed(trouble.reason, trouble.detail, retryable=trouble.retryable)

    def _unschedulable(self, spec: KubeMember, pods: Iterable[Json]) -> Trouble | None:
        since: dict[str, float] = {}
        found: Trouble | None = None
        for pod in pods:
            why = unschedulable(pod)
            if why is None:
                continue
            at = since[uid(pod)] = self._unschedulable_since.get(uid(pod), self._loop.time())
            limit_s = spec.unschedulable_after_s
            if limit_s is not None and self._loop.time() - at >= limit_s:
                found = Trouble("Unschedulable", f"no node takes it after {limit_s:g} s: {why}")
        self._unschedulable_since = since
        return found

    async def _candidate(self, life: _Life) -> Json | None:
        """Return the Pod that is worth a probe; scale up again if our scaling was undone."""
        found: list[Ready | NotReady] = []

        async def attempt(late: bool) -> str | None:
            begun = self._current()
            if begun is None:
                life.is_scaled = False
                return None
            found.append(await self._actuator.look_ready(life.spec.slot_member, begun, None))
            return None

        await self._act_on(life, self._repeat(attempt, check=lambda: self._fail_if_over(life)))
        if found and isinstance(found[0], NotReady):
            reason = found[0].reason
            life.waits_for = found[0].detail
            if reason == "MemberMissing":
                raise ActivationFailed(reason, found[0].detail)
            if reason in ("NotFenced", "NotScaledUp"):
                self._begun = None
                life.is_scaled = False
        if not life.is_scaled:
            async with self._turn(life.spec.name):
                if not life.is_scaled:
                    await self._scale_up(life)
            return None
        result = found[0]
        pod = result.pod if isinstance(result, Ready) else result.candidate
        return pod

    async def _land(self, life: _Life, pod: Json, port: int, probe: Probe) -> None:
        """Complete the evidence with *probe*; if it holds, record the landing and let it serve."""
        landed: list[Json] = []

        async def attempt(late: bool) -> str | None:
            begun = self._current()
            if begun is None:
                return None
            found = await self._actuator.look_ready(life.spec.slot_member, begun, probe)
            if isinstance(found, NotReady):
                return None
            await self._keeper.write(
                lambda record: self._dated(record or SlotRecord(), _resident(life.spec.name))
            )
            if self._current() is begun:
                landed.append(found.pod)
            return None

        await self._act_on(life, self._repeat(attempt, check=lambda: self._fail_if_over(life)))
        if landed and life.endpoint is None:
            parallel = await self._reported_parallel(life.spec, address_of(pod), port)
            self._fail_if_over(life)
            self._begin_life(life, landed[0], port, parallel)

    def _begin_life(self, life: _Life, pod: Json, port: int, parallel: int | None) -> None:
        spec = life.spec
        life.is_scaled = True
        life.lives = life_of(pod)
        life.pod_name = str(pod["metadata"]["name"])
        life.address = (address_of(pod), port)
        host = address_of(pod)
        if spec.service is not None:
            host = f"{spec.service}.{spec.namespace}.svc"
        life.endpoint = Endpoint(host=host, port=port, identity=str(life.lives), parallel=parallel)
        self._own(self._watch_life(life), f"watch {spec.name}")

    # -- down ----------------------------------------------------------------------------------

    async def _take_down(self, member: MemberName) -> None:
        """Scale *member* to 0 and prove it gone. Call with its turn held."""
        life = self._lives.get(member)
        if self._is_retired:
            self._lives.pop(member, None)
            return
        self._refuse_aside()
        spec = (
            life.spec
            if life is not None
            else self._leaving.get(member) or self._members.get(member)
        )
        if spec is None:
            return
        purpose = object()
        is_asked = False

        def announce(record: SlotRecord) -> SlotRecord:
            return replace(record, owner=str(member), target=None, phase=Phase.UNLOADING)

        def check() -> None:
            if not self._is_adopted:
                raise DriverUnavailable(self.standing.withheld or "the driver is closed")

        async def attempt(late: bool) -> str | None:
            nonlocal is_asked
            current = self._current()
            if life is None and current is not None and not is_asked:
                # Nothing may be left of it; then there is nothing to write either.
                found = await self._actuator.look_gone(spec.slot_member, epoch=current.epoch)
                if isinstance(found, Gone):
                    return None
                if found.reason == "NotScaledDown" and (why := await self._in_use(spec)):
                    raise DriverUnavailable(why)
            async with self._act:
                self._refuse_withheld()
                begun = await self._epoch_for(purpose, announce)
                await self._scale(spec, begun, up=False)
                is_asked = True
                found = await self._look_gone(spec, begun, late)
            return None if isinstance(found, Gone) else f"{member} is not gone: {found.detail}"

        try:
            await self._repeat(attempt, check=check, limit_s=self._limits.gone_s)
        except Forbidden as error:
            raise DriverUnavailable(str(error)) from error
        if life is None or self._lives.get(member) is life:
            self._lives.pop(member, None)
        if is_asked:
            await self._note(lambda record: _cold(record, member))
        await self._let_go(member)

    async def _let_go(self, member: MemberName) -> None:
        """Take our mark from a member that was removed, now that it is gone."""
        spec = self._leaving.get(member)
        begun = self._current()
        if spec is None or begun is None:
            return
        with suppress(KubeError, LeaseLost, Frozen, MemberShared, Deposed, InFlight, Contended):
            await self._actuator.unmark(spec.slot_member, begun.epoch)
            self._leaving.pop(member, None)

    async def _unmark_all(self) -> None:
        async with self._act:
            begun = await self._epoch_for(self, lambda record: record)
            for member in self._all_members():
                await self._actuator.unmark(member.slot_member, begun.epoch)

    # -- adopting ------------------------------------------------------------------------------

    async def _adopt(self) -> None:
        """Find out what is up, once the Lease is ours; take down what cannot be adopted."""
        self._begun = None
        self._lives.clear()
        found: dict[MemberName, tuple[Json, int]] = {}
        halves: list[KubeMember] = []
        record: SlotRecord | None = None
        purpose = object()
        deadline: float | None = None
        keep: KubeMember | None = None
        taking_down = False

        def check() -> None:
            if self._is_closed:
                raise DriverUnavailable("the driver is closed")

        async def attempt(late: bool) -> str | None:
            nonlocal record, deadline, keep, taking_down
            if self._keeper.frozen:
                return self._keeper.frozen
            if not self._watch.has_seen_members:
                return "the members were not seen yet"
            self._judge_members()
            async with self._act:
                if not self._invalid and record is None:
                    record = self._keeper.record or SlotRecord()
                if self._invalid:
                    return await self._adopt_untouched(found)
                begun = await self._epoch_for(purpose, lambda before: before)
                found.clear()
                halves.clear()
                for member in self._members.values():
                    state = await self._state_of(member, begun)
                    if isinstance(state, str):
                        return state
                    if isinstance(state, tuple):
                        found[member.name] = state
                    elif state:
                        halves.append(member)
                if found:
                    return None
                assert record is not None
                if halves and not taking_down:
                    keep = keep if keep in halves else self._to_keep(halves, record)
                    now = self._loop.time()
                    if deadline is None:
                        was_up = record.phase is not Phase.LOADING
                        deadline = now + (self._limits.hung_s if was_up else self._limits.adopt_s)
                    trouble = load_trouble(self._watch.pods_of(keep))
                    if now < deadline and trouble is None:
                        for other in halves:
                            if other is not keep and not await self._in_use(other):
                                await self._scale(other, begun, up=False)
                        return f"{keep.name} is loading since before this router"
                    taking_down = True
                for member in halves:
                    await self._scale(member, begun, up=False)
                for member in self._all_members():
                    gone = await self._look_gone(member, begun, late)
                    if isinstance(gone, NotYet):
                        return f"{member.name} is not gone: {gone.detail}"
            return None

        async def attempt_often(late: bool) -> str | None:
            waits_for = await attempt(late)
            if waits_for is not None and keep is not None and not taking_down:
                self._loop.call_later(self._limits.most_poll_s * 5, self._wake)
            return waits_for

        try:
            await self._repeat(attempt_often, check=check, patient=True)
        except Forbidden as error:
            raise DriverUnavailable(str(error)) from error
        parallels = {
            name: await self._reported_parallel(self._members[name], address_of(pod), port)
            for name, (pod, port) in found.items()
        }
        record = record or self._keeper.record or SlotRecord()
        prefer = record.owner
        if record.phase is Phase.LOADING and record.target in found:
            prefer = record.target
        self._memory = SlotMemory(
            released=record.released,
            prefer=MemberName(prefer) if prefer is not None else None,
        )
        for name, (pod, port) in found.items():
            life = self._lives[name] = _Life(self._members[name])
            self._begin_life(life, pod, port, parallels[name])
        self._is_adopted = True
        if not self._invalid:
            names = list(found)
            kept = prefer if prefer in names else (str(names[0]) if names else None)
            if kept is not None:
                await self._note(_resident(MemberName(kept)))
            else:
                await self._note(lambda before: _cold(before, None))
        self._judge()
        for member in halves:
            if found and member.name not in found:
                self._correct(member)

    async def _adopt_untouched(self, found: dict[MemberName, tuple[Json, int]]) -> str | None:
        """Find the resident of a pool whose members are not all in order: nothing is written."""
        found.clear()
        owner = self._keeper.record.owner if self._keeper.record else None
        for member in self._members.values():
            for pod in self._watch.pods_of(member):
                port = member.port or port_of(pod)
                if port is None or not address_of(pod) or loss_of(pod, life_of(pod)) is not None:
                    continue
                if await self._readiness(member, address_of(pod), port) is Readiness.READY:
                    found[member.name] = (pod, port)
        if len(found) > 1:
            keep = owner if owner in found else min(found)
            for name in [name for name in found if name != keep]:
                del found[name]
        return None

    async def _state_of(
        self, member: KubeMember, begun: EpochBegun
    ) -> tuple[Json, int] | bool | str:
        """
        Return Pod and port of a member that is ready, else whether it is meant to be up.

        A text says what has to happen first for anybody to know.
        """
        seen = await self._actuator.look_ready(member.slot_member, begun, None)
        if isinstance(seen, Ready):
            return False  # cannot be without a probe
        if seen.reason in ("NotScaledUp", "MemberMissing", "MemberGoing"):
            return False
        if seen.reason in ("NotObserved", "EpochNotDown", "OwnerMissing"):
            return seen.detail
        pod = seen.candidate
        port = None if pod is None else member.port or port_of(pod)
        if pod is None or port is None:
            return True
        probed_at = self._port.now()
        if await self._readiness(member, address_of(pod), port) is not Readiness.READY:
            return True
        probe = Probe(uid(pod), probed_at)
        proven = await self._actuator.look_ready(member.slot_member, begun, probe)
        return (proven.pod, port) if isinstance(proven, Ready) else True

    def _to_keep(self, halves: list[KubeMember], record: SlotRecord) -> KubeMember:
        wanted = [record.target if record.phase is Phase.LOADING else None, record.owner]
        for name in [*wanted, self._default]:
            for member in halves:
                if member.name == name:
                    return member
        return halves[0]

    # -- watching ------------------------------------------------------------------------------

    def _new_watch(self) -> PoolWatch:
        watch = PoolWatch(self._port, self._all_members(), self._noticed, rng=self._rng)
        watch.start()
        return watch

    def _noticed(self, kind: Kind, notice: Notice) -> None:
        if kind == PODS:
            for life in list(self._lives.values()):
                self._check_life(life)
        elif kind in MEMBER_KINDS.values():
            self._notice_scaling(kind, notice)
            self._judge_members()
        self._wake()

    def _check_life(self, life: _Life) -> None:
        if life.endpoint is None or life.is_over:
            return
        pod = self._watch.pod(life.spec.namespace, life.pod_name)
        if pod is not None and uid(pod) != life.lives.pod_uid:
            pod = None
        life.is_watched = life.is_watched or pod is not None
        if not life.is_watched:
            return  # the watch is behind what was read
        trouble = loss_of(pod, life.lives)
        if trouble is not None:
            self._report_lost(life, trouble.reason, trouble.detail)

    def _report_lost(self, life: _Life, reason: str, detail: str) -> None:
        if not life.is_over and self._lives.get(life.spec.name) is life:
            life.is_lost = True
            life.waits_for = detail
            self._lost(life.spec.name, reason, detail)

    async def _watch_life(self, life: _Life) -> None:
        """Look at the port of a resident: the API server may be away, or not know it yet."""
        self._check_life(life)
        refusals = 0
        while not life.is_over and self._lives.get(life.spec.name) is life:
            await asyncio.sleep(self._limits.look_again_s if refusals else self._limits.look_s)
            refused = await self._prober.refuses(*life.address)
            refusals = refusals + 1 if refused else 0
            if refusals > 1:
                host, port = life.address
                self._report_lost(life, "port_closed", f"nobody listens on {host}:{port} any more")

    def _notice_scaling(self, kind: Kind, notice: Notice) -> None:
        """Count a change of replicas that was not ours, and put it right when nobody uses it."""
        if notice.change is not Change.MODIFIED or notice.before is None:
            return
        for member in self._members.values():
            obj = notice.object
            if member.object_kind != kind or member.target != obj["metadata"]["name"]:
                continue
            name = member.name
            asked = wants(kind, obj)
            if asked == wants(kind, notice.before):
                continue
            if name in self._scaling:
                self._put_off.append((kind, notice))
                continue
            if (name, version_of(obj)) in self._own_versions or not self._is_adopted:
                continue
            life = self._lives.get(name)
            expected = life is not None and life.is_scaled and not life.is_stopping
            if asked == int(expected) or not self._keeper.is_held:
                continue
            _log.warning("somebody else has scaled %s to %s", member, asked)
            changes = self._changes.get(name, ForeignChanges())
            self._changes[name] = changes.another(self._loop.time())
            self._judge()
            if asked:
                self._correct(member)

    def _contested(self) -> str:
        now = self._loop.time()
        for member in self._members.values():
            scaler = self._watch.autoscaler_of(member)
            if scaler is not None:
                return (
                    f"HorizontalPodAutoscaler {scaler} scales {member}; delete it, "
                    "a pool moves its members itself"
                )
            changes = self._changes.get(member.name)
            if changes is not None and changes.are_a_contest(now):
                return (
                    f"somebody else keeps scaling {member}; find out who does "
                    "(kubectl get -o yaml --show-managed-fields) and stop it"
                )
        return ""

    def _refuse_withheld(self) -> None:
        """Write to no member of a pool that is not in order, or that others scale."""
        contested = self._contested()
        if self._invalid or contested:
            raise DriverUnavailable(self._invalid or f"ReplicasContested: {contested}")

    def _correct(self, member: KubeMember) -> None:
        if member.name not in self._correcting:
            self._correcting.add(member.name)
            self._own(self._corrected(member), f"correct {member.name}")

    async def _corrected(self, member: KubeMember) -> None:
        """Take down what somebody else has brought up, as soon as its engine is idle."""
        try:
            while self._is_adopted and not self._is_closed and not self._is_retired:
                async with self._turn(member.name):
                    life = self._lives.get(member.name)
                    if life is not None:
                        return  # it is wanted meanwhile
                    with suppress(DriverUnavailable):
                        await self._take_down(member.name)
                        _log.info("%s was scaled down again", member)
                        return
                await asyncio.sleep(self._limits.resync_s)
        finally:
            self._correcting.discard(member.name)

    # -- tending the record --------------------------------------------------------------------

    async def _tend(self) -> None:
        """Now and then: is our standing still what it was, and does the record say what is?"""
        while True:
            await asyncio.sleep(self._limits.look_s)
            self._judge_members()
            self._judge()
            view = self._view() if self._is_adopted and self._keeper.is_held else None
            if view is not None and view.state is not SlotState.STARTING:
                await self._publish(view)

    async def _publish(self, view: PoolView) -> None:
        before = self._keeper.record
        if before is None or self._keeper.frozen or self._current() is None:
            return
        if _followed(before, view) == before:
            return
        await self._note(lambda record: _followed(record, view))

    # -- asking members ------------------------------------------------------------------------

    async def _readiness(self, spec: KubeMember, host: str, port: int) -> Readiness:
        known = spec.profile
        answer = await self._prober.get(
            host, port, known.readiness_path, timeout_s=self._limits.probe_s
        )
        return Readiness.LOADING if answer is None else known.judge_readiness(*answer)

    async def _idleness(self, spec: KubeMember, host: str, port: int) -> Idleness:
        known = spec.profile
        if known.idle_path is None:
            return Idleness.IDLE
        answer = await self._prober.get(host, port, known.idle_path, timeout_s=self._limits.probe_s)
        return Idleness.UNREACHABLE if answer is None else known.judge_idle(*answer).verdict

    async def _reported_parallel(self, spec: KubeMember, host: str, port: int) -> int | None:
        known = spec.profile
        if not known.reports_parallel or known.idle_path is None:
            return None
        answer = await self._prober.get(host, port, known.idle_path, timeout_s=self._limits.probe_s)
        return None if answer is None else known.judge_idle(*answer).parallel

    async def _is_up(self, life: _Life) -> bool:
        """A hung engine is up: whether it is lost is for the caller to judge."""
        host, port = life.address
        path = life.spec.profile.readiness_path
        answer = await self._prober.get(host, port, path, timeout_s=self._limits.probe_s)
        if answer is None:
            return not await self._prober.refuses(host, port) and not life.is_over
        return life.spec.profile.judge_readiness(*answer) is Readiness.READY and not life.is_over

    # -- small things ----------------------------------------------------------------------------

    def _turn(self, member: MemberName) -> asyncio.Lock:
        return self._turns.setdefault(member, asyncio.Lock())

    def _own(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self._loop.create_task(work, name=f"{self.pool}: {name}")
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a task ended: %s", task.get_name(), exc_info=error)


def _resident(member: MemberName) -> Callable[[SlotRecord], SlotRecord]:
    def make(record: SlotRecord) -> SlotRecord:
        return replace(
            record, owner=str(member), target=None, phase=Phase.RESIDENT, released=False, reason=""
        )

    return make


def _cold(record: SlotRecord, member: MemberName | None) -> SlotRecord:
    """Return *record* of a slot in which nothing is up, unless another load was announced since."""
    if member is not None and record.owner != member:
        return record
    phase = Phase.RELEASED if record.released else Phase.COLD
    return replace(record, owner=None, target=None, phase=phase)


def _followed(record: SlotRecord, view: PoolView) -> SlotRecord:
    """Return *record* with what the scheduler says of it: nothing here announces an act."""
    made = replace(record, held=view.held)
    if record.phase in (Phase.RESIDENT, Phase.DRAINING) and view.resident is not None:
        if str(view.resident) != record.owner:
            return made
        is_draining = view.admission == "closed" or bool(view.deferred_reason)
        phase = Phase.DRAINING if is_draining else Phase.RESIDENT
        target = str(view.target) if is_draining and view.target is not None else None
        reason = view.deferred_reason or (view.closing_reason if is_draining else "")
        made = replace(made, phase=phase, target=target, reason=reason)
    elif record.phase in (Phase.COLD, Phase.RELEASED) and view.state is SlotState.COLD:
        phase = Phase.RELEASED if view.released else Phase.COLD
        made = replace(made, phase=phase, released=view.released)
    return made
