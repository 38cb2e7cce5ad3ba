"""
The shape of a standing replica, from its members' own declarations.

Never from the specification: a replica of four while the specification says two is whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from .render import RoleRender
from .sight import Member


class Verdict(StrEnum):
    """Whether all members are there."""

    COMPLETE = "Complete"
    INCOMPLETE = "Incomplete"
    """Members are missing: a fault."""
    UNREADABLE = "Unreadable"
    """The members contradict one another, or themselves: authorises nothing, revokes nothing."""


class Answering(StrEnum):
    """Which members of a replica answer requests."""

    SOLE = "sole"
    LEADER = "leader"
    ALL = "all"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Shape:
    """What the members say about their replica."""

    verdict: Verdict
    total: int | None
    """Members it was made with, where they agree."""
    why: str = ""


def read_shape(members: Sequence[Member]) -> Shape:
    """Return the shape of a replica with these standing *members*."""
    if not members:
        return Shape(Verdict.UNREADABLE, None, "it has no members")
    totals = {member.total for member in members}
    if None in totals:
        names = ", ".join(member.name for member in members if member.total is None)
        return Shape(Verdict.UNREADABLE, None, f"the total of {names} is no number")
    if len(totals) > 1:
        said = sorted(total for total in totals if total is not None)
        return Shape(Verdict.UNREADABLE, None, f"its members declare different totals: {said}")
    (total,) = totals
    assert total is not None
    if all(member.index_label is None for member in members) and total == 1 == len(members):
        return Shape(Verdict.COMPLETE, 1)
    if any(member.index is None or member.index >= total for member in members):
        return Shape(Verdict.UNREADABLE, None, "a member sits on no seat of its replica")
    if len({member.index for member in members}) < len(members):
        return Shape(Verdict.UNREADABLE, None, "two members sit on one seat")
    if len(members) < total:
        return Shape(Verdict.INCOMPLETE, total, f"{len(members)} of {total} members stand")
    return Shape(Verdict.COMPLETE, total)


def answering(members: Sequence[Member], shape: Shape) -> Answering:
    """Return which of the standing *members* answer requests."""
    if shape.total is None:
        return Answering.UNKNOWN
    if shape.total == 1:
        return Answering.SOLE
    said = {member.all_answer for member in members}
    if said == {True}:
        return Answering.ALL
    return Answering.LEADER if said == {False} else Answering.UNKNOWN


def is_outdated(members: Sequence[Member], render: RoleRender) -> bool:
    """Return whether a member differs from the render of its own seat, or has no seat in it."""
    return any(not is_current(member, render) for member in members)


def is_current(member: Member, render: RoleRender) -> bool:
    """Return whether *member* is what the render puts on its seat."""
    if member.ordinal is None or member.index is None or member.index >= render.size:
        return False
    return member.hash == render.hash(member.ordinal, member.index)


def doubles(members: Sequence[Member], render: RoleRender) -> list[Member]:
    """Return the members beyond the first on each seat; the first is current, or the last name."""
    seats = Counter(member.index for member in members)
    surplus = []
    for seat, number in seats.items():
        if number > 1 and seat is not None:
            there = [member for member in members if member.index == seat]
            there.sort(key=lambda each: (is_current(each, render), each.name))
            surplus += there[:-1]
    return surplus
