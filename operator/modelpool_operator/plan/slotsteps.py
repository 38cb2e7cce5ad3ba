"""
What the operator does with a slot that no router holds. Pure.

Only what cannot wait for a router: a cold pool's default, two members up, a former member that is
still up, a swap left half done. It never dispatched a request itself, so it unloads only what
says that it is idle. While a router holds the Lease, or did so less than a minute ago, it does
nothing at all.

One step at a time, each decided from an observation made after the one before. The first step of
a series takes the Lease and marks every member (the fence); what is decided after that can be
undone by nobody who was deposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modelpool_api.names import EventReason, Reason
from modelpool_kube.record import Phase, SlotRecord
from modelpool_kube.slotrules import Gone, prove_gone

from .members import Activity, ObservedMember
from .model import (
    Action,
    Happened,
    Idle,
    LeaveSlot,
    Load,
    ProbeIdle,
    Settle,
    TakeSlot,
    Unload,
    Unmark,
)
from .observedpool import HALF_DONE, ObservedPool
from .verdict import Verdict, contest

FREE_S = 60.0
"""How long the Lease must have been free; a router that restarts is back sooner."""
PATIENCE_S = 60.0
"""How long the Lease is kept while a member is waited for; then a router may have it."""
BUSY_RETRY_S = 15.0
"""Pause until a busy member is asked again."""
WAIT_S = 5.0
"""Pause until it is looked again, should a report be missed."""


@dataclass(frozen=True, slots=True)
class Deferral:
    """Why nothing is done although something should be."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Step:
    """What is done about the slot now, and what is meant to come of it."""

    action: Action | None = None
    deferral: Deferral | None = None
    pending: str | None = None
    """Member that is to hold the slot, if it does not yet."""
    requeue_after: float | None = None


def next_step(seen: ObservedPool, verdict: Verdict) -> Step:
    """Return what the operator does about the slot of a pool."""
    step = _bounded(seen, verdict)
    if step.action is None and seen.session.is_open:
        is_waiting = step.requeue_after is not None and step.deferral is None
        if not is_waiting or seen.session.age_s > PATIENCE_S:
            return Step(LeaveSlot(), step.deferral, step.pending, step.requeue_after)
    return step


def _bounded(seen: ObservedPool, verdict: Verdict) -> Step:
    lease = seen.lease
    if not verdict.may_move or lease is None or seen.frozen is not None:
        return Step()
    trouble = contest(seen)
    if seen.router is not None:
        return Step()
    step = _wanted(seen)
    if step.action is None:
        return step
    if trouble is not None:
        return Step(None, Deferral(Reason.REPLICAS_CONTESTED, trouble), step.pending, BUSY_RETRY_S)
    if seen.session.is_held and seen.session.epoch is not None:
        return step
    free_for = lease.free_for_s or 0.0
    wait = max(FREE_S - free_for, seen.session.pause_s)
    if wait > 0:
        return Step(None, step.deferral, step.pending, wait)
    if isinstance(step.action, ProbeIdle):
        return step  # asking needs no Lease; often the answer is that nothing can be done
    return Step(TakeSlot(seen.everybody, seen.was_routed), step.deferral, step.pending)


def _wanted(seen: ObservedPool) -> Step:
    """Return the step that is due, as if we held the Lease."""
    record = seen.record or SlotRecord()
    for former in seen.removed:
        step = _dismiss(seen, former, record)
        if step is not None:
            return step
    up = [each for each in seen.members if each.wants > 0]
    if len(up) > 1:
        return _thin_out(seen, up, record)
    if up:
        return _one_up(seen, up[0], record)
    return _none_up(seen, record)


def _dismiss(seen: ObservedPool, former: ObservedMember, record: SlotRecord) -> Step | None:
    """A former member: drain it, see it gone, take our mark off it."""
    if former.wants > 0:
        is_owner = seen.named(record.owner) is None and record.owner is not None
        owner = record.owner if is_owner else former.name
        drained = Happened(
            EventReason.MEMBER_DRAINED,
            f"{former.name} is no member any more and idle; it is being unloaded",
        )
        reason = f"{former.name} was removed from the pool"
        return _unload(seen, former, owner, None, reason, drained, pending=None)
    if former.activity is not Activity.STOPPED:
        return Step(requeue_after=WAIT_S)
    if seen.session.epoch is not None and not _is_gone(seen, former):
        return Step(requeue_after=WAIT_S)
    return Step(Unmark(former.member))


def _thin_out(seen: ObservedPool, up: Sequence[ObservedMember], record: SlotRecord) -> Step:
    """Two or more ask to be up: one stays, the others go when they are idle."""
    stays = _who_stays(seen, up, record)
    deferred: Step | None = None
    for each in up:
        if each is stays:
            continue
        reason = f"{each.name} gives way to {stays.name}: two members were up"
        step = _unload(seen, each, each.name, stays.name, reason, None, pending=stays.name)
        if step.action is not None:
            return step
        deferred = deferred or step
    assert deferred is not None
    return deferred


def _who_stays(
    seen: ObservedPool, up: Sequence[ObservedMember], record: SlotRecord
) -> ObservedMember:
    names = {each.name: each for each in up}
    status = seen.pool.status
    before = record.owner or (status.resident_member if status else None)
    announced = names.get(record.target or "") if record.phase is Phase.LOADING else None
    if announced is not None:
        has_landed = status is not None and status.resident_member == announced.name
        if seen.was_routed or not has_landed:
            return announced
        before = announced.name
    if not seen.was_routed and before in names:
        # Scaled up by hand where no router takes requests: that is how it is asked for.
        fresh = [each for each in up if each.name != before]
        pending = status.pending_member if status else None
        return next((each for each in fresh if each.name == pending), fresh[0])
    for name in (before, seen.default):
        if name in names:
            return names[name]
    return up[0]


def _one_up(seen: ObservedPool, one: ObservedMember, record: SlotRecord) -> Step:
    pending = None if one.activity is Activity.READY else one.name
    if record.phase not in HALF_DONE:
        return Step(pending=pending)
    others = [each for each in (*seen.members, *seen.removed) if each is not one]
    if one.activity is not Activity.READY:
        # It loads, or fails to; whoever comes finds it as it is.
        return Step(pending=pending, requeue_after=None)
    if any(each.activity is not Activity.STOPPED for each in others):
        return Step(pending=one.name, requeue_after=WAIT_S)
    return Step(Settle(one.name, f"{one.name} is up, and nothing else is"))


def _none_up(seen: ObservedPool, record: SlotRecord) -> Step:
    if record.released or record.phase is Phase.RELEASED:
        return Step()
    wanted = seen.default
    why = f"the pool was cold, and {wanted} is its default"
    event = EventReason.MEMBER_WARMED
    if record.phase in HALF_DONE and seen.named(record.target) is not None:
        wanted = record.target
        why = f"the swap to {wanted} was left half done"
        event = EventReason.SWAP_STARTED
    if wanted is None:
        if record.phase in HALF_DONE and all(
            each.activity is Activity.STOPPED for each in seen.members
        ):
            return Step(Settle(None, "nothing is up"))
        return Step()
    left = [each for each in seen.members if each.activity is not Activity.STOPPED]
    if left:
        return Step(pending=wanted, requeue_after=WAIT_S)
    target = seen.named(wanted)
    assert target is not None
    others = tuple(each for each in seen.members if each is not target)
    load = Load(
        target.member,
        tuple(each.member for each in (*others, *seen.removed)),
        why,
        Happened(event, f"{wanted} is being loaded: {why}"),
    )
    if seen.session.epoch is not None and not all(_is_gone(seen, each) for each in others):
        return Step(pending=wanted, requeue_after=WAIT_S)
    return Step(load, pending=wanted)


def _unload(
    seen: ObservedPool,
    each: ObservedMember,
    owner: str | None,
    target: str | None,
    reason: str,
    event: Happened | None,
    *,
    pending: str | None,
) -> Step:
    """Unload *each* if it says that it is idle; if it was not asked yet, ask."""
    probe = each.probe()
    if probe is None:
        return Step(Unload(each.member, owner, target, None, reason, event), pending=pending)
    if not probe.path:
        return _deferred(
            Reason.IDLE_CHECK_FAILED,
            f"{each.name} cannot be asked whether it is idle (profile {probe.profile}), so only a "
            "router may unload it; set idlePath of the member, or scale it to 0 yourself",
            pending,
        )
    said = seen.idle.get(each.name)
    if said is None:
        return Step(probe, pending=pending)
    if said is Idle.IDLE:
        return Step(Unload(each.member, owner, target, probe, reason, event), pending=pending)
    if said is Idle.BUSY:
        return _deferred(
            Reason.PODS_BUSY, f"{each.name} still works on requests; it is left alone", pending
        )
    said_no = "has no such path" if said is Idle.UNSUPPORTED else "gave no usable answer"
    return _deferred(
        Reason.IDLE_CHECK_FAILED,
        f"{each.name} {said_no} at {probe.path}, so it may be working and is left alone; see "
        "whether the path is right and reachable from the operator (idlePath, port, NetworkPolicy)",
        pending,
    )


def _deferred(reason: Reason, message: str, pending: str | None) -> Step:
    return Step(None, Deferral(reason, message), pending, BUSY_RETRY_S)


def _is_gone(seen: ObservedPool, each: ObservedMember) -> bool:
    """Whether *each* is proven gone in the epoch that we began."""
    epoch = seen.session.epoch
    if epoch is None:
        return False
    found = prove_gone(each.member, each.facts, slot=seen.slot, epoch=epoch)
    return isinstance(found, Gone)
