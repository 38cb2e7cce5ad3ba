"""
One replacement, one step: (slot, what stands, what should stand) -> (slot, what to do).

The slot that comes back is written before anything that comes with it is done. Only two things
license a delete: a UID that the slot names, and an owner reference to such a UID. Names, labels
and groups say where to look and prove nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from modelpool_api.names import EventReason

from .actions import Action, CreatePod, DeletePod, DeleteWorkload, Note
from .admission import why_not_admitted
from .render import RoleRender
from .shape import Verdict, read_shape
from .sight import Member, Workload
from .slot import Cause, Slot, SlotPhase


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """What is at one ordinal of one role."""

    role: str
    ordinal: int
    group: str
    members: tuple[Member, ...]
    """Ours, those that are going included."""
    intruders: tuple[Member, ...]
    """Pods in the group that are not ours, or that say they belong elsewhere."""
    workloads: tuple[Workload, ...]
    """All Workloads of the namespace."""

    @property
    def standing(self) -> tuple[Member, ...]:
        """Our members that are neither going nor ended."""
        return tuple(member for member in self.members if member.stands)

    @property
    def label(self) -> str:
        """How people call it."""
        return f"replica {self.ordinal} of role {self.role}"

    def owning(self, uids: Iterable[str]) -> Workload | None:
        """Return the Workload that owns one of *uids*, the one of the group before others."""
        wanted = set(uids)
        found = [each for each in self.workloads if each.owns(wanted)]
        found.sort(key=lambda each: (each.name != self.group, each.name))
        return found[0] if found else None


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What becomes of a slot in one pass."""

    slot: Slot | None
    """None: ended."""
    actions: tuple[Action, ...] = ()
    reason: str = ""
    """What is waited for."""
    is_blocked: bool = False
    """Whether waiting alone will not help."""
    notes: tuple[Note, ...] = ()
    again: bool = False
    """Whether to look again at once."""


@dataclass(frozen=True, slots=True)
class Vacancy:
    """Whether nothing of a group is left on the API server."""

    is_vacant: bool
    reason: str = ""
    is_blocked: bool = False


def vacancy(place: Place, captured: Collection[str] = (), workload_uid: str = "") -> Vacancy:
    """
    Return whether *place* is vacant: no Pod, and no Workload whoever owns it.

    Absence counts only as far as *place* was read from the API server.
    """
    for member in (*place.members, *place.intruders):
        if member.is_going or member.uid in captured:
            return Vacancy(False, f"waits until {member.name} has ended")
    for member in (*place.members, *place.intruders):
        return Vacancy(
            False,
            f"{member.name} stands in the place of {place.label} and is no part of this "
            "replacement; delete it if nobody needs it",
            is_blocked=True,
        )
    for workload in place.workloads:
        if not workload.stands_on(place.group):
            continue
        if workload.is_going or workload.uid == workload_uid or workload.owns(captured):
            return Vacancy(False, f"waits until Kueue has released Workload {workload.name}")
        return Vacancy(
            False,
            f"Workload {workload.name} holds the group of {place.label} and is not known to be "
            "ours; delete it if nobody needs it",
            is_blocked=True,
        )
    return Vacancy(True)


def begin(place: Place, cause: Cause, now: str) -> Step:
    """Open the slot for *place*: capture all that is there, then clean up."""
    slot = _captured(Slot(place.role, place.ordinal, SlotPhase.CLEANUP, cause, now), place, ())
    started = Note(
        EventReason.REPLACEMENT_STARTED, f"{place.label} is replaced: it is {cause.value}"
    )
    step = _clean(slot, place)
    return replace(step, notes=(started, *step.notes))


def advance(slot: Slot, place: Place, render: RoleRender | None, count: int, now: str) -> Step:
    """
    Return the next step of *slot*.

    Args:
        slot: As the API server has it.
        place: What is at its ordinal.
        render: What should stand; None only when *count* is 0.
        count: Replicas that should stand; an ordinal beyond it cancels the slot.
        now: RFC 3339.
    """
    cancelled = render is None or slot.ordinal >= count
    if slot.phase is SlotPhase.CLEANUP:
        step = _clean(slot, place)
        if step.actions:
            return step
        free = vacancy(place, slot.member_uids, slot.workload_uid)
        if not free.is_vacant:
            return _wait(slot, free)
        vacant = Note(EventReason.REPLACEMENT_VACANT, f"nothing is left of {place.label}")
        if render is None or cancelled:
            return Step(None, notes=(vacant, _cancelled(place)), again=True)
        return _create(slot, place, render, now, (vacant,))
    if render is None or cancelled:
        note = Note(EventReason.REPLACEMENT_CANCELLED, f"{place.label} is no longer asked for")
        return _back(slot, place, now, note)
    return _await(slot, place, render, now)


def _cancelled(place: Place) -> Note:
    return Note(EventReason.REPLACEMENT_CANCELLED, f"the replacement of {place.label} has ended")


def _wait(slot: Slot, free: Vacancy) -> Step:
    notes: tuple[Note, ...] = ()
    if free.is_blocked:
        notes = (Note(EventReason.REPLACEMENT_BLOCKED, free.reason, is_warning=True),)
    return Step(slot, (), free.reason, free.is_blocked, notes)


def _captured(slot: Slot, place: Place, more: Iterable[str]) -> Slot:
    """Return *slot* in Cleanup, with everything of ours at *place* captured."""
    uids = {member.uid for member in place.members} | set(more)
    workload = place.owning(uids)
    return replace(
        slot,
        phase=SlotPhase.CLEANUP,
        member_uids=tuple(sorted(uids)),
        workload_uid=workload.uid if workload is not None else slot.current_workload_uid,
        member_hashes=(),
        current_member_uids=(),
        current_workload_uid="",
    )


def _clean(slot: Slot, place: Place) -> Step:
    """Delete what *slot* has captured and what is owned by it, and nothing else."""
    captured = set(slot.member_uids)
    why = f"{place.label} is replaced"
    actions: list[Action] = [
        DeletePod(member.name, member.uid, why)
        for member in (*place.members, *place.intruders)
        if member.uid in captured and not member.is_going
    ]
    actions += [
        DeleteWorkload(workload.name, workload.uid, why)
        for workload in place.workloads
        if not workload.is_going and (workload.uid == slot.workload_uid or workload.owns(captured))
    ]
    return Step(slot, tuple(actions), "its old members and Workload are being deleted")


def _create(
    slot: Slot, place: Place, render: RoleRender, now: str, notes: tuple[Note, ...] = ()
) -> Step:
    """Record what the replica is built from, then make all of its members."""
    hashes = render.hashes(place.ordinal)
    if slot.phase is not SlotPhase.WAITING:
        slot = replace(slot, phase=SlotPhase.WAITING, since=now)
    slot = replace(slot, member_uids=(), workload_uid="", member_hashes=hashes)
    creates = tuple(_member(place, render, index) for index in range(render.size))
    made = Note(EventReason.REPLACEMENT_CREATED, f"{place.label} is made anew")
    return Step(slot, creates, "its new members are being made", notes=(*notes, made), again=True)


def _member(place: Place, render: RoleRender, index: int) -> CreatePod:
    return CreatePod(place.role, place.ordinal, index, render.pod(place.ordinal, index))


def create_all(place: Place, render: RoleRender) -> tuple[CreatePod, ...]:
    """Return the creates of a whole replica at a vacant place."""
    return tuple(_member(place, render, index) for index in range(render.size))


def _back(slot: Slot, place: Place, now: str, note: Note) -> Step:
    """Take the replacement itself away: the same slot, now with the new members captured."""
    slot = replace(_captured(slot, place, slot.current_member_uids), since=now)
    step = _clean(slot, place)
    # With nothing to delete, the next pass proves vacancy.
    return replace(step, notes=(note,), again=not step.actions)


def _await(slot: Slot, place: Place, render: RoleRender, now: str) -> Step:
    members, standing = place.members, place.standing
    there = {member.uid for member in standing}
    recorded = set(slot.current_member_uids)
    owning = place.owning(there | recorded)
    lost = _loss(slot, place, render, owning)
    if lost is not None:
        message = f"the replacement of {place.label} is rebuilt: {lost}"
        return _back(
            slot,
            place,
            now,
            Note(EventReason.REPLACEMENT_MEMBER_LOST, message, is_warning=True),
        )
    if slot.member_hashes != render.hashes(slot.ordinal):
        message = f"the configuration of {place.label} changed again; it is rebuilt from the newest"
        return _back(slot, place, now, Note(EventReason.REPLACEMENT_SUPERSEDED, message))
    if not members:
        free = vacancy(place)
        return _create(slot, place, render, now) if free.is_vacant else _wait(slot, free)
    slot = replace(
        slot,
        current_member_uids=tuple(sorted(there)),
        current_workload_uid=owning.uid if owning is not None else slot.current_workload_uid,
    )
    if len(standing) < render.size:
        return _fill(slot, place, render)
    waits = why_not_admitted(members, place.workloads, render, slot.ordinal)
    if waits is not None:
        return Step(slot, (), waits)
    admitted = Note(EventReason.REPLACEMENT_ADMITTED, f"{place.label} is admitted afresh")
    return Step(None, notes=(admitted,), again=True)


def _loss(slot: Slot, place: Place, render: RoleRender, owning: Workload | None) -> str | None:
    """Return what the replacement has lost, or None."""
    gone = [member.name for member in place.members if not member.stands]
    if gone:
        return f"{', '.join(gone)} has ended or is ending"
    there = {member.uid for member in place.members}
    missing = set(slot.current_member_uids) - there
    if missing:
        return f"{len(missing)} of its members are gone"
    if owning is not None and len(place.members) < render.size:
        return f"Workload {owning.name} was made of fewer members than it has seats"
    return None


def _fill(slot: Slot, place: Place, render: RoleRender) -> Step:
    """Make the members that an interrupted create left out, if nothing else can have happened."""
    held = next((each for each in place.workloads if each.stands_on(place.group)), None)
    if held is not None:
        return _wait(
            slot,
            Vacancy(
                False,
                f"Workload {held.name} holds the group of {place.label} and is not known to be "
                "ours; delete it if nobody needs it",
                is_blocked=True,
            ),
        )
    odd = _odd(place.standing, render)
    if odd is not None or place.intruders:
        who = odd if odd is not None else place.intruders[0].name
        return _wait(
            slot,
            Vacancy(
                False,
                f"{who} stands in the place of {place.label} and is not of its configuration; "
                "delete it if nobody needs it",
                is_blocked=True,
            ),
        )
    taken = {member.index for member in place.standing}
    creates = tuple(
        _member(place, render, index) for index in range(render.size) if index not in taken
    )
    return Step(slot, creates, "its missing members are being made", again=True)


def _odd(standing: Sequence[Member], render: RoleRender) -> str | None:
    """Return the name of a member that bars the missing ones from being made, or None."""
    shape = read_shape(standing)
    for member in standing:
        if (
            member.ordinal is None
            or member.index is None
            or member.index >= render.size
            or member.total != render.size
            or member.hash != render.hash(member.ordinal, member.index)
            or shape.verdict is Verdict.UNREADABLE
        ):
            return member.name
    return None
