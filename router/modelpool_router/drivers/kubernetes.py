"""
Members as objects of Kubernetes: scaled between 0 and 1 while the Lease of the pool is ours.

Three things are kept apart. Whether we *may* move the slot is the Lease's to say (`kube_standing`).
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
import random
from collections.abc import Callable, Mapping
from contextlib import suppress

from modelpool_api.names import SLOT_ANNOTATION
from modelpool_kube.errors import KubeError
from modelpool_kube.kinds import MEMBER_KINDS, PODS, Kind, annotation
from modelpool_kube.lease import LeaseLost
from modelpool_kube.port import ClusterPort
from modelpool_kube.record import Frozen, read_mark
from modelpool_kube.watch import Notice

from ..core.events import Idleness
from ..core.spec import MemberName, PoolName
from ..core.view import PoolView, SlotState
from .base import DriverUnavailable, Endpoint, LostCallback, SlotMemory, StandingCallback
from .kube_adopting import Adopting
from .kube_life import Life, MemberProber
from .kube_members import KubeLimits, KubeMember, KubeSlot
from .kube_pods import headline
from .kube_previous import STANDBY
from .kube_record import followed_record
from .kube_watch import PoolWatch
from .profiles import Readiness

__all__ = ["KubeLimits", "KubeMember", "KubeSlot", "KubernetesDriver", "MemberProber"]

_LIMITS = KubeLimits()


class KubernetesDriver(Adopting):
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
        super().__init__(
            pool,
            members,
            port=port,
            slot=slot,
            lost=lost,
            standing=standing,
            view=view,
            default=default,
            limits=limits,
            prober=prober,
            rng=rng,
        )
        self._own(self._keeper.run(), "lease")
        self._watch = self._new_watch()
        self._own(self._tend(), "tend")

    def update(
        self, members: Mapping[MemberName, KubeMember], *, default: MemberName | None
    ) -> None:
        """Replace the configuration. A life that goes on keeps its own until its end."""
        self._is_retired = False
        self._default = default
        if dict(members) == self._members:
            return
        for name, old in self._members.items():
            is_removed = members.get(name) is None or members[name].slot_member != old.slot_member
            if is_removed and not self._was_never_ours(old):
                self._leaving[name] = old
        self._members = dict(members)
        for name in [name for name in self._leaving if name in self._members]:
            if self._leaving[name].slot_member == self._members[name].slot_member:
                del self._leaving[name]
        self._begun = None  # an epoch is begun when its mark is on *every* member
        old_watch, self._watch = self._watch, self._new_watch()
        for life in self._lives.values():
            life.is_watched = False  # the new watch has seen nothing yet
        self._own(old_watch.close(), "end of a watch")
        self._judge_members()
        self._dismiss()

    def _was_never_ours(self, member: KubeMember) -> bool:
        """Whether nobody of us has marked or moved *member* yet: then it is nothing to us."""
        is_moving = member.name in self._lives or self._begun is not None or self._act.locked()
        if is_moving or not self._watch.has_seen(member):
            return False
        obj = self._watch.object_of(member)
        if obj is None:
            return not self._actuator.knows(member.slot_member)
        mark = read_mark(annotation(obj, SLOT_ANNOTATION))
        return mark is None or mark.slot != self._slot.id

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
                life = self._lives[member] = Life(self._members[member])
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

    async def close(self, *, stop_members: bool, hurry: asyncio.Event | None = None) -> None:
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

    async def _tend(self) -> None:
        """Now and then: is our standing still what it was, and does the record say what is?"""
        while True:
            await asyncio.sleep(self._limits.look_s)
            self._judge_members()
            self._judge()
            self._dismiss()
            view = self._view() if self._is_adopted and self._keeper.is_held else None
            if view is not None and view.state is not SlotState.STARTING:
                await self._publish(view)

    async def _publish(self, view: PoolView) -> None:
        before = self._keeper.record
        if before is None or self._keeper.frozen or self._current() is None:
            return
        if followed_record(before, view) == before:
            return
        await self._note(lambda record: followed_record(record, view))
