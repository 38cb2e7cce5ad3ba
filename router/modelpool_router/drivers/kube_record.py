"""What the driver writes into the slot record when something has happened. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from modelpool_kube.record import Phase, SlotRecord

from ..core.spec import MemberName
from ..core.view import PoolView, SlotState


def landed_record(member: MemberName) -> Callable[[SlotRecord], SlotRecord]:
    def make(record: SlotRecord) -> SlotRecord:
        return replace(
            record, owner=str(member), target=None, phase=Phase.RESIDENT, released=False, reason=""
        )

    return make


def emptied_record(record: SlotRecord, member: MemberName | None) -> SlotRecord:
    """Return *record* of a slot in which nothing is up, unless another load was announced since."""
    if member is not None and record.owner != member:
        return record
    phase = Phase.RELEASED if record.released else Phase.COLD
    return replace(record, owner=None, target=None, phase=phase)


def followed_record(record: SlotRecord, view: PoolView) -> SlotRecord:
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
