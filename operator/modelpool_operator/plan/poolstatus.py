"""
What the status of a pool says: from the record, from what is observed, and from the step taken.

While a router holds the slot its record is believed, because it alone knows what it is doing.
Otherwise the pool is what its members are.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from modelpool_api.meta import Condition, condition, set_condition, timestamp
from modelpool_api.names import ConditionType, EventReason, Reason
from modelpool_api.v1alpha1.modelpool import (
    ModelPool,
    ModelPoolStatus,
    PoolMemberPhase,
    PoolMemberStatus,
    PoolPhase,
)
from modelpool_kube.record import Phase, SlotRecord

from .members import Activity, ObservedMember
from .model import Happened
from .observedpool import HALF_DONE, ObservedPool
from .slotsteps import Deferral, Step
from .verdict import Verdict, contest

SAID_BY_ROUTER = (Reason.PODS_BUSY, Reason.IDLE_CHECK_FAILED, Reason.REPLICAS_CONTESTED)
"""A router that defers a swap begins the reason of its record with one of these words."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """What is said of the slot."""

    resident: str | None
    pending: str | None
    released: bool = False


def pool_status(seen: ObservedPool, verdict: Verdict, step: Step) -> ModelPoolStatus:
    """Return the whole status."""
    before = seen.pool.status or ModelPoolStatus()
    record = SlotRecord() if seen.frozen is not None else seen.record or SlotRecord()
    slot = _slot(seen, record, step)
    stalled = _stalled(seen, verdict, slot)
    deferral = _deferral(seen, record, step)
    router = seen.router
    phase = _phase(seen, verdict, slot)
    swapped = slot.resident is not None and slot.resident != before.resident_member
    return ModelPoolStatus(
        observed_generation=seen.pool.metadata.generation,
        phase=phase,
        resident_member=slot.resident,
        pending_member=slot.pending,
        held=record.held if router is not None else None,
        epoch=record.epoch or None,
        router=router,
        last_swap_time=timestamp(seen.now) if swapped else before.last_swap_time,
        members=tuple(_member(seen, verdict, each, slot) for each in seen.members),
        conditions=_conditions(seen, before.conditions, verdict, slot, deferral, stalled, phase),
    )


def _slot(seen: ObservedPool, record: SlotRecord, step: Step) -> _Slot:
    released = record.released or record.phase is Phase.RELEASED
    ready = [each for each in seen.members if each.activity is Activity.READY]
    if seen.router is not None:
        owner = seen.named(record.owner) if _serves(record) else None
        is_ready = owner is not None and owner.activity is Activity.READY
        resident = owner if is_ready else None
        pending = None
        if record.phase in HALF_DONE:
            wanted = seen.named(record.target)
            if wanted is not None and wanted is not resident:
                pending = wanted.name
        elif owner is not None and owner.activity is Activity.LOADING:
            # Its router, who asks the engine itself, may see it ready before we do.
            status = seen.pool.status
            if status is not None and status.pending_member == owner.name:
                pending = owner.name
        return _Slot(None if resident is None else resident.name, pending, released)
    others_are_down = all(
        each.activity is Activity.STOPPED
        for each in (*seen.members, *seen.removed)
        if each not in ready
    )
    before = seen.pool.status.resident_member if seen.pool.status else None
    serving: str | None = None
    if len(ready) == 1 and others_are_down:
        serving = ready[0].name
    elif before in {each.name for each in ready}:
        serving = before  # another one is coming, and this one has not left yet
    pending = step.pending if step.pending != serving else None
    return _Slot(serving, pending, released and serving is None)


def _serves(record: SlotRecord) -> bool:
    return record.phase in (Phase.RESIDENT, Phase.DRAINING)


def _phase(seen: ObservedPool, verdict: Verdict, slot: _Slot) -> PoolPhase:
    if not verdict.may_move or seen.frozen is not None:
        return PoolPhase.DEGRADED
    if slot.pending is not None:
        return PoolPhase.SWAPPING
    return PoolPhase.READY if slot.resident is not None else PoolPhase.PENDING


def _member(
    seen: ObservedPool, verdict: Verdict, each: ObservedMember, slot: _Slot
) -> PoolMemberStatus:
    phase = {
        Activity.STOPPED: PoolMemberPhase.STOPPED,
        Activity.UNLOADING: PoolMemberPhase.UNLOADING,
        Activity.LOADING: PoolMemberPhase.LOADING,
        Activity.READY: PoolMemberPhase.READY,
    }[each.activity]
    message = each.cannot_land(seen.pool.spec.node_selector)
    trouble = each.trouble
    if each.name in verdict.missing:
        phase, message = PoolMemberPhase.MISSING, f"{each.member} does not exist"
    elif each.name in verdict.unsafe or each.name in verdict.metal:
        phase = PoolMemberPhase.UNSAFE
    elif phase is PoolMemberPhase.LOADING and trouble is not None:
        reason, said = trouble
        message = f"{reason}: {said}"
        if reason != "Unschedulable":
            phase = PoolMemberPhase.FAILED
    return PoolMemberStatus(
        name=each.name,
        kind=each.member.kind.kind,
        phase=phase,
        resident=each.name == slot.resident,
        message=message,
    )


def _deferral(seen: ObservedPool, record: SlotRecord, step: Step) -> Deferral | None:
    trouble = contest(seen)
    if trouble is not None:
        return Deferral(Reason.REPLICAS_CONTESTED, trouble)
    if step.deferral is not None:
        return step.deferral
    if seen.router is not None:
        word, _, rest = record.reason.partition(":")
        for reason in SAID_BY_ROUTER:
            if word.strip() == reason:
                said = rest.strip() or f"the router waits for {record.owner or 'the resident'}"
                return Deferral(reason, said)
    return None


def _stalled(seen: ObservedPool, verdict: Verdict, slot: _Slot) -> tuple[Reason, str] | None:
    if seen.frozen is not None:
        return Reason.RECORD_UNREADABLE, seen.frozen
    if not verdict.is_valid:
        return verdict.reason, verdict.message
    if verdict.metal:
        return Reason.METAL_MEMBERS_UNSUPPORTED, _metal_message(verdict)
    for each in (*seen.members, *seen.removed):
        nodes = each.stuck_nodes(seen.now)
        if nodes:
            return (
                Reason.NODE_LOST,
                f"Pods of {each.name} on {', '.join(nodes)} do not end, so nothing else may start. "
                "Bring the node back, delete it, taint it node.kubernetes.io/out-of-service, or, "
                "if it is really off, run: modelpool forget POD",
            )
    loading = seen.named(slot.pending)
    if loading is not None and loading.activity is Activity.LOADING and loading.trouble:
        reason, said = loading.trouble
        return Reason.LOAD_FAILED, f"{loading.name} does not come up: {reason}: {said}"
    return None


def _metal_message(verdict: Verdict) -> str:
    return (
        "members on metal (spec.accelerator of the InferenceService) cannot be run in a cluster: "
        f"{', '.join(verdict.metal)}; run them with a router on that machine, and take them out of "
        "spec.members. Until then no replica of any member is touched"
    )


def _conditions(
    seen: ObservedPool,
    before: tuple[Condition, ...],
    verdict: Verdict,
    slot: _Slot,
    deferral: Deferral | None,
    stalled: tuple[Reason, str] | None,
    phase: PoolPhase,
) -> tuple[Condition, ...]:
    found = before

    def put(kind: ConditionType, answer: bool, reason: str, message: str) -> None:
        nonlocal found
        found = set_condition(
            found,
            kind,
            answer,
            reason,
            message,
            now=seen.now,
            generation=seen.pool.metadata.generation,
        )

    put(ConditionType.MEMBERS_VALID, verdict.is_valid, verdict.reason, verdict.message)
    put(ConditionType.SLOT_ALLOCATED, *_allocated(seen, verdict, slot))
    if deferral is not None:
        put(ConditionType.SWAP_DEFERRED, True, deferral.reason, deferral.message)
    else:
        put(ConditionType.SWAP_DEFERRED, False, Reason.NOT_DEFERRED, "no swap waits for anything")
    if verdict.metal:
        put(
            ConditionType.METAL_SUPPORTED,
            False,
            Reason.METAL_MEMBERS_UNSUPPORTED,
            _metal_message(verdict),
        )
    else:
        put(
            ConditionType.METAL_SUPPORTED,
            True,
            Reason.KUBERNETES_GPU,
            "all members run on accelerators of the cluster",
        )
    put(ConditionType.READY, *_ready(seen, verdict, slot, stalled, phase))
    if stalled is None:
        put(ConditionType.STALLED, False, Reason.NOT_STALLED, "nothing waits for a person")
    else:
        put(ConditionType.STALLED, True, *stalled)
    return found


def _allocated(seen: ObservedPool, verdict: Verdict, slot: _Slot) -> tuple[bool, Reason, str]:
    if slot.resident is not None:
        return True, Reason.RESIDENT, f"{slot.resident} holds the slot"
    if verdict.reason is Reason.MISSING_MEMBERS:
        return False, Reason.MISSING_MEMBERS, verdict.message
    if slot.pending is not None:
        return False, Reason.SWAPPING, f"{slot.pending} is to hold the slot and is not ready yet"
    if slot.released:
        return (
            False,
            Reason.RELEASED,
            "the slot was emptied on purpose and stays empty until a request",
        )
    return False, Reason.COLD, "nobody holds the slot"


def _ready(
    seen: ObservedPool,
    verdict: Verdict,
    slot: _Slot,
    stalled: tuple[Reason, str] | None,
    phase: PoolPhase,
) -> tuple[bool, Reason, str]:
    if phase is PoolPhase.DEGRADED:
        assert stalled is not None
        return False, stalled[0], stalled[1]
    if slot.resident is not None and slot.pending is None:
        return True, Reason.SLOT_SERVED, f"{slot.resident} serves"
    if slot.pending is not None:
        was = condition(seen.pool.status.conditions if seen.pool.status else (), "Ready")
        # An ordinary swap is what a pool is for; it is not ready while a load fails.
        goes_on = was is not None and was.status == "True" and stalled is None
        if stalled is not None:
            return False, stalled[0], stalled[1]
        return goes_on, Reason.PROGRESSING, f"{slot.pending} is to hold the slot"
    if stalled is not None:
        return False, stalled[0], stalled[1]
    return True, Reason.WAITING_FOR_DEMAND, "nothing is up; the first request loads its member"


def forbidden_status(pool: ModelPool, message: str, now: datetime) -> ModelPoolStatus:
    """Return the status as it was, and that a person has to change a Role."""
    before = pool.status or ModelPoolStatus()
    found = before.conditions
    said = f"{message}; give the account of the operator this right"
    for kind, answer in ((ConditionType.READY, False), (ConditionType.STALLED, True)):
        found = set_condition(
            found,
            kind,
            answer,
            Reason.FORBIDDEN,
            said,
            now=now,
            generation=pool.metadata.generation,
        )
    return before.model_copy(update={"conditions": found})


# Events


def happened(
    before: ModelPoolStatus,
    after: ModelPoolStatus,
    default: str | None,
    *,
    is_emptied: bool = False,
) -> list[Happened]:
    """
    Return what is to be told when *before* becomes *after*.

    Args:
        before: Status that was written last.
        after: Status that is written now.
        default: Name of the default.
        is_emptied: Whether whoever moves the slot empties it on purpose.
    """
    told = []
    old, new = before.resident_member, after.resident_member
    pending = after.pending_member
    # What was seen to be up already and is announced again only now is no swap.
    is_news = pending not in (None, old, before.pending_member)
    if is_news and before.phase is not None:
        giving = f" in place of {old}" if old else ""
        told.append(Happened(EventReason.SWAP_STARTED, f"{pending} is to hold the slot{giving}"))
    if new is not None and new != old:
        was = before.pending_member
        reason = EventReason.SWAP_COMPLETED if was == new else EventReason.MEMBER_WARMED
        if new != default and was != new:
            reason = EventReason.SWAP_COMPLETED
        told.append(Happened(reason, f"{new} holds the slot"))
    if old is not None and new is None and pending is None and not is_emptied:
        told.append(Happened(EventReason.RESIDENT_LOST, f"{old} does not serve any more", True))
    for kind, good, warns in (
        (ConditionType.MEMBERS_VALID, "True", True),
        (ConditionType.METAL_SUPPORTED, "True", True),
        (ConditionType.SWAP_DEFERRED, "False", False),
        (ConditionType.STALLED, "False", True),
    ):
        event = _turned(before, after, kind, good, warns)
        if event is not None and all(event.reason != each.reason for each in told):
            told.append(event)
    return told


def _turned(
    before: ModelPoolStatus, after: ModelPoolStatus, kind: ConditionType, good: str, warns: bool
) -> Happened | None:
    """Return the Event of a condition that turned bad, or is bad for another reason now."""
    old, new = condition(before.conditions, kind), condition(after.conditions, kind)
    if new is None or new.status == good:
        return None
    if old is not None and (old.status, old.reason) == (new.status, new.reason):
        return None
    if kind is ConditionType.SWAP_DEFERRED:
        return Happened(EventReason.SWAP_DEFERRED, f"{new.reason}: {new.message}")
    reason = EventReason.SWAP_FAILED if new.reason == Reason.LOAD_FAILED else new.reason
    return Happened(reason, new.message, warns)
