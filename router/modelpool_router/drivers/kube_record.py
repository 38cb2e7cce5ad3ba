"""What the driver writes into the slot record when something has happened. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from modelpool_kube.record import Phase, SlotRecord

from ..core.spec import MemberName
from ..core.view import PoolView, SlotState

_EMPTY = (Phase.COLD, Phase.RELEASED, Phase.UNLOADING)
"""Phases that an empty slot may have been left in."""


_ASKED = "routersAsked"
"""Field of a record: no router that nobody knows of can have held the slot before."""


def was_asked(record: SlotRecord | None) -> bool:
    """Return whether everybody who held the slot is told by the Lease: it was not made anew."""
    return record is not None and record.extra.get(_ASKED) is True


def with_asked(record: SlotRecord, *, was_asked: bool) -> SlotRecord:
    """Return *record*, saying whether other routers were asked, and are out of the way."""
    if (record.extra.get(_ASKED) is True) is was_asked:
        return record
    return replace(record, extra={**record.extra, _ASKED: was_asked})


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
        reason = view.deferred_reason or _busy(view)
        if not reason and is_draining:
            reason = view.closing_reason
        made = replace(made, phase=phase, target=target, reason=reason)
    elif record.phase in _EMPTY and view.state is SlotState.COLD:
        phase = Phase.RELEASED if view.released else Phase.COLD
        made = replace(made, owner=None, target=None, phase=phase, released=view.released)
    return made


def _busy(view: PoolView) -> str:
    """Return that somebody waits for the answers of the resident to end, if so."""
    others = (each for each in view.members if each.name != view.resident)
    if not view.in_flight or not any(each.wanted for each in others):
        return ""
    return f"PodsBusy: {view.resident} works on requests, and another member is wanted"
