"""
ModelPool: what is done about a pool and what its status says. Pure.

A pool owns no member and no replica. It has a Lease, which says who may move the slot; a router
moves it, and the operator only where `slotsteps` says so.
"""

from __future__ import annotations

from collections.abc import Iterable

from modelpool_api.names import FINALIZER, POOL_LABEL, lease_name
from modelpool_api.v1alpha1.modelpool import ModelPoolStatus
from modelpool_kube.kinds import LEASES, MODEL_POOLS, Json, is_controlled_by
from modelpool_kube.record import Phase, SlotId
from modelpool_kube.slotrules import unmark_patch

from . import render
from .members import Activity
from .model import Action, Create, LeaveSlot, Owner, Patch, Plan, delete_of, patch_of
from .observedpool import ObservedPool
from .poolstatus import happened, pool_status
from .slotsteps import WAIT_S, next_step
from .verdict import judge_members

COMPONENT = "slot"
RECHECK_S = 75.0
"""How often it is looked whether a router still renews: its Lease, and a minute more."""


def plan(seen: ObservedPool) -> Plan:
    """Return what is to be done about a pool."""
    if seen.pool.metadata.is_going:
        return Plan(_teardown(seen))
    if FINALIZER not in seen.pool.metadata.finalizers:
        return Plan((_with_finalizers(seen, (*seen.pool.metadata.finalizers, FINALIZER)),))
    if seen.lease is None:
        return Plan((Create(LEASES, seen.slot.namespace, lease(seen)),))
    verdict = judge_members(seen)
    step = next_step(seen, verdict)
    status = pool_status(seen, verdict, step)
    before = seen.pool.status or ModelPoolStatus()
    requeue = step.requeue_after
    if requeue is None and (seen.router is not None or seen.lease.holder):
        requeue = RECHECK_S
    moving = (Activity.LOADING, Activity.UNLOADING)
    if any(each.activity in moving for each in (*seen.members, *seen.removed)):
        # The last Pod of a member leaves without a report that reaches us.
        requeue = min(requeue or WAIT_S, WAIT_S)
    return Plan(
        actions=() if step.action is None else (step.action,),
        status=status.wire(),
        events=tuple(happened(before, status, seen.default, is_emptied=_is_emptied(seen))),
        requeue_after=requeue,
    )


def _is_emptied(seen: ObservedPool) -> bool:
    record = None if seen.frozen is not None else seen.record
    if record is None:
        return False
    return record.released or record.phase in (Phase.UNLOADING, Phase.RELEASED)


def lease(seen: ObservedPool) -> Json:
    """Return the Lease of a pool: held by nobody, to be collected with the pool."""
    owner = owner_of(seen)
    return {
        "apiVersion": LEASES.api_version,
        "kind": LEASES.kind,
        "metadata": {
            "name": lease_name(owner.name),
            "namespace": owner.namespace,
            "labels": {**render.labels(COMPONENT, owner.name), POOL_LABEL: owner.name},
            "ownerReferences": [owner.reference()],
        },
        "spec": {},
    }


def slot_id(namespace: str, pool: str) -> SlotId:
    """Return the slot of the pool of that name."""
    return SlotId(namespace, lease_name(pool))


def owner_of(seen: ObservedPool) -> Owner:
    """Return the pool as an owner."""
    meta = seen.pool.metadata
    return Owner(MODEL_POOLS, meta.name, meta.namespace, meta.uid)


def _teardown(seen: ObservedPool) -> tuple[Action, ...]:
    """
    Return the steps of a pool that is deleted; no replica is moved.

    The Lease goes first: whoever held it is deposed at once, and what it still has in flight is
    conditional on versions that removing the marks makes old.
    """
    if FINALIZER not in seen.pool.metadata.finalizers:
        return ()
    if seen.session.is_open:
        return (LeaveSlot(),)
    if seen.lease is not None and is_controlled_by(seen.lease.obj, seen.pool.metadata.uid):
        # One that a router made for itself, in file mode, is not ours to delete.
        return (delete_of(LEASES, seen.lease.obj),)
    for each in (*seen.members, *seen.removed):
        mark = each.mark
        if each.obj is not None and mark is not None and mark.slot == seen.slot:
            return (patch_of(each.member.kind, each.obj, unmark_patch()),)
    left = tuple(each for each in seen.pool.metadata.finalizers if each != FINALIZER)
    return (_with_finalizers(seen, left),)


def _with_finalizers(seen: ObservedPool, finalizers: Iterable[str]) -> Patch:
    return patch_of(MODEL_POOLS, seen.obj, {"metadata": {"finalizers": list(finalizers) or None}})
