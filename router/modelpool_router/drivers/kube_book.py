"""State of one pool in Kubernetes, and the small things that every part of its driver needs."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from modelpool_kube.errors import KubeError
from modelpool_kube.kinds import Kind
from modelpool_kube.lease import LeaseKeeper, LeaseLost, micro_time
from modelpool_kube.port import ClusterPort
from modelpool_kube.record import Frozen, SlotRecord
from modelpool_kube.slot import EpochBegun, SlotActuator
from modelpool_kube.slotrules import ForeignChanges, Member
from modelpool_kube.watch import Notice

from ..core.events import Idleness
from ..core.spec import MemberName, PoolName
from ..core.view import PoolView
from .base import LostCallback, SlotMemory, SlotStanding, StandingCallback
from .kube_life import Life, MemberProber
from .kube_members import KubeLimits, KubeMember, KubeSlot
from .kube_previous import Other
from .kube_record import with_asked
from .kube_watch import PoolWatch
from .profiles import Readiness

_log = logging.getLogger(__name__)
_LIMITS = KubeLimits()
NOT_ASKED = "nobody has looked yet"
"""Of other routers."""


class SlotBook:
    """What is known of a pool. Parts of the driver build on it, one on the other."""

    _watch: PoolWatch

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
        self._dismissing: set[MemberName] = set()
        """Those of them that are being let go of."""
        self._default = default
        self._keeper = LeaseKeeper(
            port,
            slot.id,
            slot.holder,
            may_create=slot.may_create,
            on_change=lambda: self._lease_changed(),
            rng=self._rng,
        )
        self._actuator = SlotActuator(port, self._keeper, rng=self._rng)
        self._begun: EpochBegun | None = None
        self._begun_for: object = None
        self._tenure = 0
        self._act = asyncio.Lock()
        """Held from the beginning of an epoch to the scaling that it is for."""
        self._lives: dict[MemberName, Life] = {}
        self._turns: dict[MemberName, asyncio.Lock] = {}
        self._is_adopted = False
        self._adopting = asyncio.Lock()
        self._memory = SlotMemory()
        self._pulse = asyncio.Event()
        self._previous: str | None = None
        """Who held the slot before us, until that router is out of the way."""
        self._others: dict[str, Other] = {}
        """Other routers that may know of members which are up, as they were seen last."""
        self._was_asked = True
        """Whether all who may have held the slot before us are known and were looked for."""
        self._unseen_others = ""
        """Why it is not known which other routers there are; empty when it is."""
        self._held_since = 0.0
        self._invalid = ""
        self._changes: dict[MemberName, ForeignChanges] = {}
        self._scalers: dict[Member, str | None] = {}
        """HorizontalPodAutoscalers on members, as they were seen last."""
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

    def _wake(self) -> None:
        pulse, self._pulse = self._pulse, asyncio.Event()
        pulse.set()

    async def _rest(self, pulse: asyncio.Event, seconds: float) -> None:
        """Wait until something happened since *pulse* was taken, at most *seconds*."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await pulse.wait()
                await asyncio.sleep(self._limits.settle_s)

    def _all_members(self) -> list[KubeMember]:
        members = {m.slot_member: m for m in self._members.values()}
        members |= {m.slot_member: m for m in self._leaving.values()}
        return list(members.values())

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

    async def _is_up(self, life: Life) -> bool:
        """A hung engine is up: whether it is lost is for the caller to judge."""
        host, port = life.address
        path = life.spec.profile.readiness_path
        answer = await self._prober.get(host, port, path, timeout_s=self._limits.probe_s)
        if answer is None:
            return not await self._prober.refuses(host, port) and not life.is_over
        return life.spec.profile.judge_readiness(*answer) is Readiness.READY and not life.is_over

    async def _note(self, make: Callable[[SlotRecord], SlotRecord]) -> None:
        """Write into the record what happened; it announces nothing, so it may be lost."""
        with suppress(LeaseLost, Frozen, KubeError):
            await self._keeper.write(lambda record: self._dated(record or SlotRecord(), make))

    def _dated(self, record: SlotRecord, make: Callable[[SlotRecord], SlotRecord]) -> SlotRecord:
        made = with_asked(make(record), was_asked=self._was_asked and not self._others)
        if made.phase != record.phase or made.owner != record.owner:
            made = replace(made, since=micro_time(self._port.wall()))
        return made

    def _lease_changed(self) -> None:
        """Take in that our right to the slot may have changed."""
        raise NotImplementedError
