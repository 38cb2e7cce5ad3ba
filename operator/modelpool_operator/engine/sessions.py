"""
Our own holds on slots: a Lease that is kept while something is done, and the epoch begun with it.

A session is short. It ends when nothing is left to do, when it is lost, and after any error: what
was not acknowledged may still land, and only a new epoch makes sure that it does no harm.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from modelpool_api.meta import timestamp
from modelpool_kube.lease import LeaseKeeper
from modelpool_kube.port import ClusterPort
from modelpool_kube.record import Phase, SlotId, SlotRecord
from modelpool_kube.slot import EpochBegun, SlotActuator
from modelpool_kube.slotrules import Gone

from ..plan.model import Idle, Load, Settle, TakeSlot, Unload, Unmark
from ..plan.observedpool import OPERATOR_EPOCH, ROUTED, SessionSeen
from .probing import Asking, ask

log = logging.getLogger(__name__)

OPENING_S = 30.0
"""How long it may take to get the Lease: one that ran out is watched for its whole duration."""
PAUSE_S = 15.0
"""Least time between two sessions of one slot after one that came to nothing."""

SlotAction = TakeSlot | Unload | Load | Settle | Unmark


@dataclass(slots=True)
class _Session:
    keeper: LeaseKeeper
    actuator: SlotActuator
    task: asyncio.Task[None]
    opened_at: float
    tenure: int = 0
    begun: EpochBegun | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the Lease is still the one that the epoch was begun with."""
        return self.keeper.is_held and self.keeper.tenure == self.tenure


@dataclass(slots=True)
class SlotSessions:
    """All our holds on slots. `close` it."""

    port: ClusterPort
    holder: str
    """Name of this Pod."""
    asking: Asking
    rng: random.Random = field(default_factory=random.Random)
    _open: dict[SlotId, _Session] = field(default_factory=dict)
    _pauses: dict[SlotId, float] = field(default_factory=dict)

    def seen(self, slot: SlotId) -> SessionSeen:
        """Return how our hold on *slot* stands."""
        now = self.port.now()
        pause = max(0.0, self._pauses.get(slot, 0.0) - now)
        session = self._open.get(slot)
        if session is None:
            return SessionSeen(pause_s=pause)
        is_whole = session.begun is not None and session.is_whole
        return SessionSeen(
            is_open=True,
            is_held=session.keeper.is_held and (session.begun is None or is_whole),
            epoch=session.begun.epoch if session.begun is not None and is_whole else None,
            age_s=now - session.opened_at,
            pause_s=pause,
        )

    async def act(self, slot: SlotId, action: SlotAction, changed: Callable[[], None]) -> bool:
        """
        Carry out *action*; return whether it was done.

        Args:
            slot: Which slot.
            action: What to do.
            changed: Called when it is worth looking again.

        Raises:
            SlotError, LeaseLost, Frozen, KubeError: it was not, or nobody knows. The session is
            over.
        """
        try:
            if isinstance(action, TakeSlot):
                return await self._take(slot, action, changed)
            session = self._open.get(slot)
            if session is None or session.begun is None or not session.is_whole:
                await self.leave(slot, pause_s=PAUSE_S)
                return False
            return await self._act(session, action)
        except BaseException:
            # Also when we are stopped: the Lease must not be kept by nobody.
            await self.leave(slot, pause_s=PAUSE_S)
            raise

    async def leave(self, slot: SlotId, *, pause_s: float = 0.0) -> None:
        """Give the Lease back, if it is ours. Idempotent."""
        session = self._open.pop(slot, None)
        if pause_s:
            self._pauses[slot] = self.port.now() + pause_s
        if session is not None:
            session.task.cancel()
            # Shielded, because it gives the Lease back on its way out.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(_ended(session.task))

    async def close(self) -> None:
        """Give everything back."""
        for slot in list(self._open):
            await self.leave(slot)

    def forget(self, slot: SlotId) -> None:
        """Forget a slot whose pool is no more."""
        self._pauses.pop(slot, None)

    async def _take(self, slot: SlotId, action: TakeSlot, changed: Callable[[], None]) -> bool:
        session = self._open.get(slot)
        now = self.port.now()
        if session is None:
            keeper = LeaseKeeper(
                self.port, slot, self.holder, may_create=False, on_change=changed, rng=self.rng
            )
            task = asyncio.get_running_loop().create_task(
                keeper.run(), name=f"lease-{slot.namespace}-{slot.lease}"
            )
            session = _Session(keeper, SlotActuator(self.port, keeper, rng=self.rng), task, now)
            self._open[slot] = session
            return False
        if not session.keeper.is_held:
            if (
                now - session.opened_at > OPENING_S
                or session.begun is not None
                or session.task.done()
            ):
                await self.leave(slot, pause_s=PAUSE_S)
            return False
        session.tenure = session.keeper.tenure

        def make(record: SlotRecord) -> SlotRecord:
            extra = {OPERATOR_EPOCH: record.epoch, ROUTED: action.was_routed}
            return replace(record, extra={**record.extra, **extra})

        session.begun = await session.actuator.begin_epoch(action.members, make)
        log.info("slot %s/%s: epoch %s", slot.namespace, slot.lease, session.begun.epoch)
        return True

    async def _act(self, session: _Session, action: Unload | Load | Settle | Unmark) -> bool:
        assert session.begun is not None
        epoch = session.begun.epoch
        match action:
            case Unmark(member=member):
                await session.actuator.unmark(member, epoch)
                return True
            case Settle(owner=owner, reason=reason):
                phase = Phase.COLD if owner is None else Phase.RESIDENT
                await self._record(session, phase, owner, None, reason)
                return True
            case Unload(member=member, owner=owner, target=target, probe=probe, reason=reason):
                if probe is not None and await ask(self.asking, probe) is not Idle.IDLE:
                    return False
                phase = Phase.UNLOADING if target is None else Phase.LOADING
                await self._record(session, phase, owner, target, reason)
                await session.actuator.scale(member, up=False, epoch=epoch)
                return True
            case Load(member=member, others=others, reason=reason):
                for other in others:
                    gone = await session.actuator.look_gone(other, epoch=epoch)
                    if not isinstance(gone, Gone):
                        log.info("%s is not loaded yet: %s", member, gone.detail)
                        return False
                await self._record(session, Phase.LOADING, None, member.name, reason)
                await session.actuator.scale(member, up=True, epoch=epoch)
                return True

    async def _record(
        self,
        session: _Session,
        phase: Phase,
        owner: str | None,
        target: str | None,
        reason: str,
    ) -> None:
        since = timestamp(self.port.wall())

        def make(before: SlotRecord | None) -> SlotRecord:
            return replace(
                before or SlotRecord(),
                phase=phase,
                owner=owner,
                target=target,
                since=since,
                reason=reason,
                released=False,
                held=0,
            )

        await session.keeper.write(make)


async def _ended(task: asyncio.Task[None]) -> None:
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task
