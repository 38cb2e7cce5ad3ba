"""
Whom to serve next, and until when: the rules of taking turns as functions of plain values.

H4: the member with the oldest demand is next. H5: the resident may be overtaken by nobody until
its turn ends. H6: a resident that has just answered is kept a moment, since whoever got the
answer often asks again. Why these rules and these defaults: docs/policy.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from .spec import MemberName

SWAP_MARGIN = 1.5
"""How much longer than estimated a swap may take before a hold that was promised is missed."""
LINGER_MAX_S = 2.0
LINGER_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Demand:
    """One member that somebody wants, and what a turn must leave time for."""

    member: MemberName
    since: float
    """When its oldest demand arose, or when its last turn ended if that is later."""
    deadlines: Sequence[tuple[float, int]]
    """(deadline, ticket) of its holds, ascending; empty for demand that has no client now."""
    swap_s: float
    """Estimated unload of whoever is before it plus its own load."""
    drain_s: float
    """Estimated drain of whoever is before it."""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """When the resident's turn is over, and why."""

    at: float
    reason: str
    """turn | deadline"""


def turn_end(
    waiting: Sequence[Demand], *, landed_at: float, max_turn_s: float, now: float
) -> TurnEnd:
    """
    Return when the resident's turn ends for those in *waiting* (H4 order, at least one).

    The turn is `max_turn_s` shared by the members waited for, from the later of the oldest foreign
    demand and the resident's landing. It ends earlier only for a hold that can still be met: giving
    up a turn for a hold that will be refused anyway costs the resident and helps nobody.
    """
    end = TurnEnd(max(waiting[0].since, landed_at) + max_turn_s / len(waiting), "turn")
    needed = 0.0
    for demand in waiting:
        needed += SWAP_MARGIN * demand.swap_s + demand.drain_s
        first = bisect_left(demand.deadlines, (now + needed, -1))
        if first < len(demand.deadlines):
            latest = demand.deadlines[first][0] - needed
            if latest < end.at:
                end = TurnEnd(latest, "deadline")
    return end


def linger_s(configured: float | None, *, swap_s: float) -> float:
    """Return how long an idle resident is kept after its last answer (H6); None = automatic."""
    if configured is not None:
        return configured
    return min(LINGER_MAX_S, LINGER_SHARE * swap_s)
