"""
One role, one pass: its slot, its count, who is replaced next, what is missing.

Roles know nothing of one another. The count comes before the configuration: a role that shed or
lost a replica in this pass selects none, and a healthy replica is only given up while every other
one of the role is admitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from .actions import Action, DeletePod, DeleteWorkload, Note
from .queueing import is_initially_queued
from .render import RoleRender
from .replacement import Place, Step, advance, begin, create_all, vacancy
from .shape import Shape, Verdict, doubles, is_outdated, read_shape
from .sight import Member, Workload
from .slot import Cause, Slot


@dataclass(frozen=True, slots=True, eq=False)
class Standing:
    """One replica as it stands, judged."""

    place: Place
    shape: Shape
    is_outdated: bool
    is_admitted: bool
    """Whether a Workload that is admitted owns one of its standing members."""

    @property
    def ordinal(self) -> int:
        """Which replica."""
        return self.place.ordinal

    @property
    def is_broken(self) -> bool:
        """Whether members are missing, by its own count."""
        return self.shape.verdict is Verdict.INCOMPLETE


@dataclass(slots=True, eq=False)
class RolePlan:
    """What is to be done about one role, and what is to be said about it."""

    name: str
    count: int
    slot: Slot | None = None
    actions: list[Action] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    reason: str = ""
    """What its slot waits for."""
    blocked: list[str] = field(default_factory=list)
    """What waiting alone will not solve."""
    waits: bool = False
    """Whether something is under way that nobody may report."""
    again: bool = False
    replicas: list[Standing] = field(default_factory=list)
    """Those with a standing member, by ordinal."""
    departing: list[int] = field(default_factory=list)
    """Ordinals with members that are all going."""
    placed: list[Place] = field(default_factory=list)
    """Every ordinal at which something of ours is."""
    unseated: list[Member] = field(default_factory=list)
    """Members of ours that say of no replica that they belong to it."""

    @property
    def condemned(self) -> frozenset[int]:
        """Ordinals that answer no requests from now on."""
        surplus = {place.ordinal for place in self.placed if place.ordinal >= self.count}
        if self.slot is not None and self.slot.member_uids:
            surplus.add(self.slot.ordinal)
        return frozenset(surplus)


class _Rank(IntEnum):
    """Classes of candidates; the larger goes first."""

    OUTDATED = 1
    QUEUED = 2
    BROKEN = 3


_CAUSES = {
    _Rank.OUTDATED: Cause.OUTDATED,
    _Rank.QUEUED: Cause.QUEUED,
    _Rank.BROKEN: Cause.BROKEN,
}


def plan_role(
    name: str,
    render: RoleRender | None,
    groups: Mapping[int, str],
    slot: Slot | None,
    *,
    count: int,
    is_frozen: bool,
    members: Sequence[Member],
    strangers: Sequence[Member],
    workloads: tuple[Workload, ...],
    may_select: bool,
    now: str,
) -> RolePlan:
    """
    Return the plan of one role.

    Args:
        name: Its name.
        render: What should stand; None when nothing should, or when that cannot be said.
        groups: Name of the pod group of every ordinal that is asked for or in use.
        slot: Its replacement, as the API server has it.
        count: Replicas that should stand.
        is_frozen: Whether nothing may be done, only said.
        members: Pods of the deployment that say they are of this role.
        strangers: All other Pods in pod groups of the namespace.
        workloads: All Workloads of the namespace.
        may_select: Whether a replacement may begin; not while the record cannot be read.
        now: RFC 3339.
    """
    plan = RolePlan(name, count, slot)
    places = _places(name, groups, members, strangers, workloads)
    plan.placed = [place for place in places.values() if place.members]
    plan.unseated = [member for member in members if member.ordinal is None]
    plan.replicas = [_standing(place, render) for place in plan.placed if place.standing]
    plan.departing = [place.ordinal for place in plan.placed if not place.standing]
    if is_frozen:
        return plan
    if slot is not None:
        step = advance(slot, places[slot.ordinal], render, count, now)
        _take(plan, step)
    shed = _shed(plan, render, slot)
    _drop_ended(plan)
    if render is not None:
        if plan.slot is None and slot is None and may_select and not shed:
            selected = select(plan.replicas, count, workloads)
            if selected is not None:
                candidate, cause = selected
                _take(plan, begin(candidate.place, cause, now))
        _make_missing(plan, places, render, slot)
    return plan


def _take(plan: RolePlan, step: Step) -> None:
    plan.slot = step.slot
    plan.actions += step.actions
    plan.notes += step.notes
    plan.reason = step.reason
    plan.again = plan.again or step.again
    if step.is_blocked:
        plan.blocked.append(step.reason)


def _places(
    name: str,
    groups: Mapping[int, str],
    members: Sequence[Member],
    strangers: Sequence[Member],
    workloads: tuple[Workload, ...],
) -> dict[int, Place]:
    by_ordinal: dict[int, list[Member]] = {ordinal: [] for ordinal in groups}
    by_group: dict[str, list[Member]] = {}
    for member in members:
        if member.ordinal is not None:
            by_ordinal[member.ordinal].append(member)
    for member in (*members, *strangers):
        by_group.setdefault(member.group, []).append(member)
    return {
        ordinal: Place(
            name,
            ordinal,
            group,
            tuple(by_ordinal[ordinal]),
            tuple(each for each in by_group.get(group, ()) if each not in by_ordinal[ordinal]),
            workloads,
        )
        for ordinal, group in sorted(groups.items())
    }


def _standing(place: Place, render: RoleRender | None) -> Standing:
    uids = {member.uid for member in place.standing}
    return Standing(
        place,
        read_shape(place.standing),
        render is not None and is_outdated(place.standing, render),
        any(each.holds_admission and each.owns(uids) for each in place.workloads),
    )


def _shed(plan: RolePlan, render: RoleRender | None, slot: Slot | None) -> bool:
    """Delete what the count does not ask for, highest first; return whether there was any."""
    before = len(plan.actions)
    for place in reversed(plan.placed):
        if place.ordinal >= plan.count:
            why = f"role {plan.name} asks for {plan.count} replicas"
            gone = [member for member in place.members if not member.is_going]
            uids = {member.uid for member in place.members}
            plan.actions += [DeletePod(member.name, member.uid, why) for member in gone]
            plan.actions += [
                DeleteWorkload(each.name, each.uid, why)
                for each in place.workloads
                if not each.is_going and each.owns(uids)
            ]
        elif render is not None and (slot is None or slot.ordinal != place.ordinal):
            why = f"two members sit on one seat of {place.label}"
            plan.actions += [
                DeletePod(member.name, member.uid, why)
                for member in doubles(place.standing, render)
            ]
    return len(plan.actions) > before


def _drop_ended(plan: RolePlan) -> None:
    """Delete Pods that have ended; what is left of their replica is short then."""
    for place in plan.placed:
        plan.actions += [
            DeletePod(member.name, member.uid, f"a member of {place.label} has ended")
            for member in place.members
            if member.is_terminal and not member.is_going
        ]


def all_admitted(replicas: Sequence[Standing], count: int) -> bool:
    """Whether Kueue has every replica that is asked for; else no healthy one is given up."""
    return sum(each.is_admitted for each in replicas if each.ordinal < count) == count


def select(
    replicas: Sequence[Standing], count: int, workloads: Sequence[Workload]
) -> tuple[Standing, Cause] | None:
    """
    Return the replica to be replaced next, and why; None when it is nobody's turn.

    Broken ones first, then those that never were admitted, then healthy ones if every replica of
    the role is admitted; within a class the highest ordinal, the end that a smaller count sheds.
    """
    asked = [each for each in replicas if each.ordinal < count]
    may_trade = all_admitted(replicas, count)
    ranked = []
    for each in asked:
        rank = None
        if each.is_broken:
            rank = _Rank.BROKEN
        elif each.is_outdated and is_initially_queued(each.place.members, workloads):
            rank = _Rank.QUEUED
        elif each.is_outdated and may_trade:
            rank = _Rank.OUTDATED
        if rank is not None:
            ranked.append((rank, each.ordinal, each))
    if not ranked:
        return None
    rank, _, chosen = max(ranked, key=lambda each: each[:2])
    return chosen, _CAUSES[rank]


def _make_missing(
    plan: RolePlan, places: Mapping[int, Place], render: RoleRender, slot: Slot | None
) -> None:
    """Make the replicas that are missing, at places proven vacant, the lowest first."""
    for ordinal in range(plan.count):
        place = places[ordinal]
        has_slot = any(each is not None and each.ordinal == ordinal for each in (slot, plan.slot))
        if has_slot or place.standing:
            continue
        free = vacancy(place)
        if free.is_vacant:
            plan.actions += create_all(place, render)
            plan.again = True
        else:
            plan.waits = True
            if free.is_blocked:
                plan.blocked.append(free.reason)
