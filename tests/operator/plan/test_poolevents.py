"""Which Events go with a change of a pool's status."""

from __future__ import annotations

from modelpool_api.v1alpha1.modelpool import ModelPoolStatus, PoolPhase
from modelpool_operator.plan.poolstatus import happened


def status(resident: str | None, pending: str | None) -> ModelPoolStatus:
    """Return a status that says who holds the slot, and whose turn it is."""
    phase = PoolPhase.READY if pending is None else PoolPhase.SWAPPING
    return ModelPoolStatus(phase=phase, resident_member=resident, pending_member=pending)


def told(before: ModelPoolStatus, after: ModelPoolStatus) -> list[tuple[str, str]]:
    """Return reason and note of every Event."""
    return [(str(each.reason), each.note) for each in happened(before, after, "a")]


def test_a_swap_is_told_when_it_begins_and_when_it_ends() -> None:
    a, to_b, b = status("a", None), status("a", "b"), status("b", None)
    assert told(a, to_b) == [("SwapStarted", "b is to hold the slot in place of a")]
    assert told(to_b, to_b) == []
    assert told(to_b, b) == [("SwapCompleted", "b holds the slot")]


def test_who_is_up_already_is_not_swapped_to() -> None:
    # Its router died between its landing and the record of it.
    assert told(status("b", None), status(None, "b")) == []
