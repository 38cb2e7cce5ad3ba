"""
One pass over one object: observe, plan, say, do the first thing, and come back.

Nothing is kept from one pass to the next but what cannot be read (`memory`) and our holds on
slots (`sessions`). A pass that is interrupted anywhere is made up for by the next one.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

from modelpool_api.v1alpha1.modelpool import ModelPool
from modelpool_kube.errors import Forbidden
from modelpool_kube.kinds import (
    INFERENCE_SERVICES,
    LEASES,
    MODEL_POOLS,
    MODEL_ROUTERS,
    Json,
    Kind,
    meta,
    name_of,
)
from modelpool_kube.lease import LeaseLost
from modelpool_kube.record import Frozen
from modelpool_kube.slot import SlotError

from ..plan import inferenceservice, modelpool, modelrouter
from ..plan.model import (
    Action,
    Create,
    Delete,
    Idle,
    LeaveSlot,
    Load,
    Patch,
    Plan,
    ProbeIdle,
    Settle,
    TakeSlot,
    Unload,
    Unmark,
)
from ..plan.observedpool import ObservedPool
from ..plan.poolstatus import forbidden_status
from .acting import Actor, Key
from .memory import LeaseMemory, ScaleMemory
from .observe import Observer
from .probing import Asking, ask
from .sessions import PAUSE_S, SlotSessions

log = logging.getLogger(__name__)

AT_ONCE = 0.0
OPENING_S = 1.0
"""Pause until it is looked again whether the Lease was got; the keeper reports it sooner."""


class PoolReconciler:
    """Passes over ModelPools."""

    kind = MODEL_POOLS

    def __init__(
        self,
        observer: Observer,
        actor: Actor,
        sessions: SlotSessions,
        asking: Asking,
        *,
        again: Callable[[Key], None] = lambda key: None,
    ) -> None:
        self._observer = observer
        self._actor = actor
        self._sessions = sessions
        self._asking = asking
        self._again = again
        self._leases: dict[Key, LeaseMemory] = defaultdict(LeaseMemory)
        self._scales: dict[Key, ScaleMemory] = defaultdict(ScaleMemory)

    def lease_seen(self, obj: Json) -> None:
        """Take in a report of a Lease: that it was renewed needs no pass."""
        prefix = "modelpool-"
        name = name_of(obj)
        if name.startswith(prefix):
            key = (str(meta(obj).get("namespace", "")), name.removeprefix(prefix))
            if key in self._leases:
                self._leases[key].renewed(obj, self._actor.port.now())

    async def reconcile(self, key: Key) -> float | None:
        """Make one pass over the pool *key*; return when to come back."""
        try:
            return await self._pass(key)
        except Forbidden as error:
            await self._complain(key, error)
            raise

    async def _complain(self, key: Key, error: Forbidden) -> None:
        """Say in the status what a person has to allow; if even that is refused, the log has it."""
        obj = await self._observer.get(MODEL_POOLS, *key)
        if obj is not None:
            pool = ModelPool.model_validate(obj)
            status = forbidden_status(pool, str(error), self._actor.port.wall())
            await self._actor.report(MODEL_POOLS, obj, status.wire(), ())

    async def _pass(self, key: Key) -> float | None:
        slot = modelpool.slot_id(*key)
        seen = await self._observer.pool(
            key,
            holder=self._sessions.holder,
            leases=self._leases[key],
            scales=self._scales[key],
            session=self._sessions.seen(slot),
        )
        if seen is None:
            await self._sessions.leave(slot)
            self._sessions.forget(slot)
            self._leases.pop(key, None)
            self._scales.pop(key, None)
            return None
        plan = await self._plan(seen)
        wrote = await self._actor.report(MODEL_POOLS, seen.obj, plan.status, plan.events)
        if not plan.actions:
            return plan.requeue_after
        if wrote:
            return AT_ONCE  # the version that was read is old now
        return await self._act(key, seen, plan.actions[0])

    async def _plan(self, seen: ObservedPool) -> Plan:
        """Plan, and ask members whether they are idle as long as that is what the plan wants."""
        for _ in range(len(seen.everybody) + 1):
            plan = modelpool.plan(seen)
            match plan.actions:
                case (ProbeIdle(member=member) as probe, *_):
                    idle: dict[str, Idle] = {
                        **seen.idle,
                        member: await ask(self._asking, probe),
                    }
                    seen = replace(seen, idle=idle)
                case _:
                    return plan
        raise AssertionError("a plan asks for what it was told")

    async def _act(self, key: Key, seen: ObservedPool, action: Action) -> float:
        match action:
            case Create() | Patch() | Delete():
                await self._actor.write(action)
                if isinstance(action, Delete) and action.kind == LEASES:
                    self._sessions.forget(seen.slot)
                return AT_ONCE
            case LeaveSlot():
                await self._sessions.leave(seen.slot, pause_s=PAUSE_S)
                return AT_ONCE
            case TakeSlot() | Unload() | Load() | Settle() | Unmark():
                try:
                    done = await self._sessions.act(seen.slot, action, lambda: self._again(key))
                except (SlotError, LeaseLost, Frozen) as error:
                    # Somebody else has the say, or a person has to look: the next pass sees who.
                    log.warning("slot %s/%s: %s", seen.slot.namespace, seen.slot.lease, error)
                    return PAUSE_S
                if done and isinstance(action, Unload | Load):
                    await self._actor.tell(MODEL_POOLS, seen.obj, action.event)
                return AT_ONCE if done else OPENING_S
            case ProbeIdle():
                raise AssertionError("asked already")


class ServiceReconciler:
    """Passes over InferenceServices."""

    kind = INFERENCE_SERVICES

    def __init__(self, observer: Observer, actor: Actor) -> None:
        self._observer = observer
        self._actor = actor

    async def reconcile(self, key: Key) -> float | None:
        """Make one pass over the InferenceService *key*."""
        seen = await self._observer.service(key)
        if seen is None:
            return None
        plan = inferenceservice.plan(seen)
        return await _one_pass(self._actor, self.kind, seen.obj, plan)


class RouterReconciler:
    """Passes over ModelRouters."""

    kind = MODEL_ROUTERS

    def __init__(self, observer: Observer, actor: Actor, *, default_image: str) -> None:
        self._observer = observer
        self._actor = actor
        self._default_image = default_image

    async def reconcile(self, key: Key) -> float | None:
        """Make one pass over the ModelRouter *key*."""
        seen = await self._observer.router(key, default_image=self._default_image)
        if seen is None:
            return None
        return await _one_pass(self._actor, self.kind, seen.obj, modelrouter.plan(seen))


async def _one_pass(actor: Actor, kind: Kind, obj: Json, plan: Plan) -> float | None:
    """
    Do the first thing of a plan that is about children, else say how it stands.

    Not before: what was observed of children that are about to change is no answer to the new spec.
    """
    if plan.actions:
        if plan.says_first and await actor.report(kind, obj, plan.status, plan.events):
            return AT_ONCE  # the version that was read is old now
        action = plan.actions[0]
        assert isinstance(action, Create | Patch | Delete)
        await actor.write(action)
        return AT_ONCE
    await actor.report(kind, obj, plan.status, plan.events)
    return plan.requeue_after
