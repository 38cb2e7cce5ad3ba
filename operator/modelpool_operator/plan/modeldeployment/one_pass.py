"""
One pass over one ModelDeployment: everything that was observed in, one plan out.

The plan is carried out in a fixed order, and its first write is the record: what is not written
down is not done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from modelpool_api.meta import timestamp
from modelpool_api.names import (
    ACCEPTED_ANNOTATION,
    FINALIZER,
    REPLACEMENTS_ANNOTATION,
    SLOT_ANNOTATION,
    SLOT_APPLIED_ANNOTATION,
    EventReason,
    group_name,
)
from modelpool_api.v1alpha1.modeldeployment import ModelDeploymentStatus, Role

from .actions import Action, CreatePod, DeletePod, DeleteWorkload, Json, Note
from .checks import accept, problems
from .render import RoleRender, Unrenderable, render
from .rollout import RolePlan, plan_role
from .routing import routes
from .services import align, wanted_services
from .sight import Member, Observed, Workload
from .slot import Slot, UnreadableRecord, decode, encode
from .status import Verdicts, make_status

POLL_S = 2.0
"""While something is under way: a Workload that goes after its Pods wakes nobody."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What one pass does, in this order."""

    record: Json | None = None
    """Merge patch of the deployment's metadata, conditional on the version that was read."""
    actions: tuple[Action, ...] = ()
    status: ModelDeploymentStatus | None = None
    notes: tuple[Note, ...] = ()
    again: bool = False
    """Whether to look again at once."""
    requeue_s: float | None = None
    """When to look again if nobody wakes us."""


def plan(seen: Observed) -> Plan:
    """Return the plan of one pass. The same observation gives the same plan."""
    meta = seen.deployment.metadata
    if meta.is_going:
        return _teardown(seen)
    if FINALIZER not in meta.finalizers:
        return Plan({"metadata": {"finalizers": [*meta.finalizers, FINALIZER]}}, again=True)
    return _Pass(seen).plan()


@dataclass(slots=True, eq=False)
class _Pass:
    """The parts of one pass, put together."""

    seen: Observed
    slots: dict[str, Slot] = field(default_factory=dict)
    unreadable: str | None = None
    wrong: tuple[str, ...] = ()
    unrenderable: str | None = None

    def plan(self) -> Plan:
        seen, deployment = self.seen, self.seen.deployment
        text = deployment.metadata.annotations.get(REPLACEMENTS_ANNOTATION)
        try:
            self.slots = decode(text, {role.name for role in deployment.spec.roles})
        except UnreadableRecord as error:
            self.unreadable = str(error)
        self.wrong = tuple(problems(deployment, seen.types))
        renders: Mapping[str, RoleRender] = {}
        try:
            renders = render(deployment, seen.types)
        except Unrenderable as error:
            self.unrenderable = str(error)
        wrong, unrenderable = self.wrong, self.unrenderable
        verdicts = Verdicts(wrong, unrenderable, self.unreadable, seen.refused)
        # Emptying needs no configuration: a pool gets its slot back from a broken one as well.
        frozen = (bool(wrong) or unrenderable is not None) and not deployment.spec.suspend
        plans = [
            self._role(role, renders.get(role.name), is_frozen=frozen)
            for role in deployment.spec.roles
        ]
        after = {plan.name: plan.slot for plan in plans if plan.slot is not None}
        status = make_status(deployment, plans, seen.workloads, verdicts, now=seen.now)
        notes = self._trouble(verdicts)
        if frozen:
            return Plan(self._record(self.slots), status=status, notes=notes)
        return Plan(
            self._record(after),
            self._actions(plans),
            status,
            (*notes, *(note for plan in plans for note in plan.notes)),
            again=any(plan.again for plan in plans),
            requeue_s=POLL_S if self._is_busy(plans) else None,
        )

    def _role(self, role: Role, render: RoleRender | None, *, is_frozen: bool) -> RolePlan:
        name, seen, slot = role.name, self.seen, self.slots.get(role.name)
        meta = seen.deployment.metadata
        count = 0 if seen.deployment.spec.suspend else role.replicas
        members = tuple(member for member in seen.members if member.role == name)
        ordinals = set(range(count))
        ordinals |= {member.ordinal for member in members if member.ordinal is not None}
        if slot is not None:
            ordinals.add(slot.ordinal)
        return plan_role(
            name,
            render,
            {each: group_name(meta.namespace, meta.name, name, each) for each in ordinals},
            slot,
            count=count,
            is_frozen=is_frozen,
            members=members,
            strangers=(*seen.strangers, *(each for each in seen.members if each.role != name)),
            workloads=seen.workloads,
            may_select=self.unreadable is None,
            now=timestamp(seen.now),
        )

    def _record(self, slots: Mapping[str, Slot]) -> Json | None:
        """Return the patch of what is written down; None when it stands there already."""
        deployment = self.seen.deployment
        there = deployment.metadata.annotations
        wanted: dict[str, str | None] = {}
        if self.unreadable is None:
            wanted[REPLACEMENTS_ANNOTATION] = encode(slots)
        mark = there.get(SLOT_ANNOTATION)
        state = "0" if deployment.spec.suspend else "1"
        wanted[SLOT_APPLIED_ANNOTATION] = None if mark is None else f"{mark}={state}"
        if not self.wrong and self.unrenderable is None:
            wanted[ACCEPTED_ANNOTATION] = accept(deployment, self.seen.types)
        changes = {key: text for key, text in wanted.items() if there.get(key) != text}
        return {"metadata": {"annotations": changes}} if changes else None

    def _actions(self, plans: list[RolePlan]) -> tuple[Action, ...]:
        seen = self.seen
        deletes, creates = _split(plans)
        deletes += stranded(seen.members, seen.strangers, seen.workloads, deletes)
        deleted = {each.uid for each in deletes if isinstance(each, DeletePod)}
        off: list[Action] = []
        on: list[Action] = []
        for plan in plans:
            mine = routes(plan, deleted)
            off += mine[0]
            on += mine[1]
        counts = {plan.name: plan.count for plan in plans}
        wanted = wanted_services(seen.deployment, counts, seen.members)
        before, after = align(wanted, seen.services)
        return (*before, *off, *deletes, *creates, *on, *after)

    def _is_busy(self, plans: list[RolePlan]) -> bool:
        return any(
            plan.slot is not None or plan.waits or plan.departing or plan.blocked or plan.actions
            for plan in plans
        ) or any(member.is_going for member in self.seen.members)

    def _trouble(self, verdicts: Verdicts) -> tuple[Note, ...]:
        found = [
            Note(EventReason.RENDER_FAILED, text, is_warning=True)
            for text in (*verdicts.problems, verdicts.unrenderable)
            if text
        ]
        blocked = [text for text in (verdicts.unreadable, *verdicts.refused) if text]
        found += [Note(EventReason.REPLACEMENT_BLOCKED, text, is_warning=True) for text in blocked]
        return tuple(found)


def _split(plans: list[RolePlan]) -> tuple[list[DeletePod | DeleteWorkload], list[CreatePod]]:
    """Return the deletes, each object once and Pods first, and the creates."""
    deletes: dict[str, DeletePod | DeleteWorkload] = {}
    creates: list[CreatePod] = []
    for plan in plans:
        for action in plan.actions:
            if isinstance(action, CreatePod):
                creates.append(action)
            elif isinstance(action, DeletePod | DeleteWorkload):
                deletes.setdefault(action.uid, action)
    ordered = sorted(deletes.values(), key=lambda each: isinstance(each, DeleteWorkload))
    return ordered, creates


def stranded(
    members: tuple[Member, ...],
    strangers: tuple[Member, ...],
    workloads: tuple[Workload, ...],
    deletes: list[DeletePod | DeleteWorkload],
) -> list[DeletePod | DeleteWorkload]:
    """
    Return the deletes of Workloads that own members of ours on their way out, and nobody else.

    Nothing else releases the finalizer of a member of a serving group.
    """
    planned = {each.uid for each in deletes}
    departing = {each.uid for each in members if not each.stands or each.uid in planned}
    standing = {
        each.uid for each in (*members, *strangers) if each.stands and each.uid not in planned
    }
    return [
        DeleteWorkload(each.name, each.uid, "all of its members have left")
        for each in workloads
        if each.uid not in planned
        and not each.is_going
        and each.owns(departing)
        and not each.owns(standing)
    ]


def _teardown(seen: Observed) -> Plan:
    """Delete everything of ours, then let the deployment go. No slot or count delays it."""
    deployment = seen.deployment
    meta = deployment.metadata
    if FINALIZER not in meta.finalizers:
        return Plan()
    why = "the deployment is being deleted"
    uids = {member.uid for member in seen.members}
    text = meta.annotations.get(REPLACEMENTS_ANNOTATION)
    recorded: set[str] = set()
    try:
        for slot in decode(text, {role.name for role in deployment.spec.roles}).values():
            recorded |= {slot.workload_uid, slot.current_workload_uid}
            uids |= {*slot.member_uids, *slot.current_member_uids}
    except UnreadableRecord:
        pass  # what owns the Pods that are there is deleted all the same
    actions: list[Action] = [
        DeletePod(member.name, member.uid, why) for member in seen.members if not member.is_going
    ]
    left = [each for each in seen.workloads if each.uid in recorded or each.owns(uids)]
    actions += [DeleteWorkload(each.name, each.uid, why) for each in left if not each.is_going]
    if seen.members or left:
        nothing = [RolePlan(role.name, 0) for role in deployment.spec.roles]
        status = make_status(deployment, nothing, (), Verdicts(), now=seen.now)
        return Plan(None, tuple(actions), status, requeue_s=POLL_S)
    kept = [each for each in meta.finalizers if each != FINALIZER]
    return Plan({"metadata": {"finalizers": kept}})
