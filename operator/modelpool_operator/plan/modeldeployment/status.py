"""
What is said about a deployment: counted anew at every look, in replicas and not in Pods.

Two figures are never one: *outdated* replicas differ from the specification, and the one that is
*being replaced* has an open slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from modelpool_api.meta import Condition, Status, set_condition
from modelpool_api.names import ConditionType, Reason
from modelpool_api.v1alpha1.modeldeployment import (
    DeploymentPhase,
    ModelDeployment,
    ModelDeploymentStatus,
    ReplacementStatus,
    Role,
    RoleStatus,
)

from . import kueue
from .command import serving_port
from .rollout import RolePlan, Standing, all_admitted
from .shape import Verdict
from .sight import CommandMode, Workload, condition_status

_MOST_NAMED = 5
"""How many of several troubles a message names."""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What was found before anything was planned."""

    problems: tuple[str, ...] = ()
    """Why the specification is not accepted."""
    unrenderable: str | None = None
    """Why it cannot be built."""
    unreadable: str | None = None
    """Why the record of replacements cannot be read."""
    refused: tuple[str, ...] = ()
    """What creates ran into."""


def make_status(
    deployment: ModelDeployment,
    plans: Sequence[RolePlan],
    workloads: Sequence[Workload],
    verdicts: Verdicts,
    *,
    now: datetime,
) -> ModelDeploymentStatus:
    """Return the status of *deployment* as *plans* leave it."""
    roles = tuple(
        _role_status(role, plan) for role, plan in zip(deployment.spec.roles, plans, strict=True)
    )
    phase, message = _phase(deployment, roles, verdicts)
    old = deployment.status.conditions if deployment.status is not None else ()
    conditions: tuple[Condition, ...] = old
    for kind, status, reason, text in _conditions(roles, plans, workloads, verdicts, phase):
        conditions = set_condition(
            conditions,
            kind,
            status,
            reason,
            text,
            now=now,
            generation=deployment.metadata.generation,
        )
    meta, first = deployment.metadata, deployment.spec.roles[0]
    replacing = [f"{each.name}/{each.replacement.ordinal}" for each in roles if each.replacement]
    return ModelDeploymentStatus(
        observed_generation=meta.generation,
        phase=phase,
        phase_message=message or None,
        endpoint=f"http://{meta.name}.{meta.namespace}.svc:{serving_port(first)}",
        roles=roles,
        role_summary=", ".join(f"{each.name} {each.ready}/{each.desired}" for each in roles),
        replacing=", ".join(replacing) or None,
        conditions=conditions,
    )


def _role_status(role: Role, plan: RolePlan) -> RoleStatus:
    slot = plan.slot
    replacement = None
    if slot is not None:
        replacement = ReplacementStatus(
            ordinal=slot.ordinal,
            phase=slot.phase.value,
            reason=plan.reason[:1024],
            since=slot.since or None,
        )
    return RoleStatus(
        name=role.name,
        kind=role.kind,
        desired=plan.count,
        ready=sum(_is_ready(each, plan) for each in plan.replicas),
        quota_reserved=sum(each.is_admitted for each in plan.replicas),
        outdated=sum(each.is_outdated for each in plan.replicas if each.ordinal < plan.count),
        unmanaged=_is_unmanaged(role, plan),
        replacement=replacement,
    )


def _is_ready(replica: Standing, plan: RolePlan) -> bool:
    return (
        replica.ordinal not in plan.condemned
        and replica.shape.verdict is Verdict.COMPLETE
        and all(member.is_ready for member in replica.place.standing)
    )


def _is_unmanaged(role: Role, plan: RolePlan) -> bool:
    modes = {member.mode for each in plan.replicas for member in each.place.standing}
    return CommandMode.TAKEOVER in modes if modes else bool(role.command)


def _phase(
    deployment: ModelDeployment, roles: Sequence[RoleStatus], verdicts: Verdicts
) -> tuple[DeploymentPhase, str]:
    if deployment.metadata.is_going:
        return DeploymentPhase.DELETING, "its Pods and Workloads are being deleted"
    trouble = [*verdicts.problems, verdicts.unrenderable or "", verdicts.unreadable or ""]
    message = _named([each for each in trouble if each])
    if not any(role.desired for role in roles):
        why = "suspended" if deployment.spec.suspend else "every role asks for 0 replicas"
        return DeploymentPhase.IDLE, message or why
    if not any(role.ready for role in roles):
        return DeploymentPhase.STARTING, message or "no replica is ready yet"
    short = [role.name for role in roles if role.ready < role.desired]
    if short:
        return DeploymentPhase.DEGRADED, message or f"replicas missing in {', '.join(short)}"
    return DeploymentPhase.READY, message


_Said = tuple[str, Status | bool, str, str]


def _conditions(
    roles: Sequence[RoleStatus],
    plans: Sequence[RolePlan],
    workloads: Sequence[Workload],
    verdicts: Verdicts,
    phase: DeploymentPhase,
) -> Iterable[_Said]:
    blocked = [each for plan in plans for each in plan.blocked] + list(verdicts.refused)
    match phase:
        case DeploymentPhase.READY:
            yield (ConditionType.READY, True, Reason.AVAILABLE, "every replica is ready")
        case DeploymentPhase.IDLE:
            text = "no replica is asked for"
            yield (ConditionType.READY, Status.UNKNOWN, Reason.NO_REPLICAS, text)
        case DeploymentPhase.STARTING | DeploymentPhase.DEGRADED | DeploymentPhase.DELETING:
            yield (ConditionType.READY, False, Reason.PROGRESSING, _summary(roles))
    yield _stalled(verdicts, blocked)
    if verdicts.problems:
        yield (ConditionType.ACCEPTED, False, Reason.INVALID, _named(verdicts.problems))
    else:
        yield (ConditionType.ACCEPTED, True, Reason.VALID, "")
    if verdicts.unrenderable is not None:
        yield (ConditionType.RENDERED, False, Reason.RENDER_FAILED, verdicts.unrenderable)
    else:
        yield (ConditionType.RENDERED, True, Reason.VALID, "")
    yield _up_to_date(roles, plans, verdicts, blocked)
    yield _quota(plans, workloads)
    yield _kinds(roles)


def _stalled(verdicts: Verdicts, blocked: Sequence[str]) -> _Said:
    if verdicts.unreadable is not None:
        return ConditionType.STALLED, True, Reason.RECORD_UNREADABLE, verdicts.unreadable
    if verdicts.problems:
        return ConditionType.STALLED, True, Reason.INVALID, _named(verdicts.problems)
    if verdicts.unrenderable is not None:
        return ConditionType.STALLED, True, Reason.RENDER_FAILED, verdicts.unrenderable
    if blocked:
        return ConditionType.STALLED, True, Reason.REPLACEMENT_BLOCKED, _named(blocked)
    return ConditionType.STALLED, False, Reason.NOT_STALLED, ""


def _up_to_date(
    roles: Sequence[RoleStatus],
    plans: Sequence[RolePlan],
    verdicts: Verdicts,
    blocked: Sequence[str],
) -> _Said:
    kind = ConditionType.REPLICAS_UP_TO_DATE
    if verdicts.problems or verdicts.unrenderable is not None:
        text = "the specification cannot be compared with what stands"
        return kind, Status.UNKNOWN, Reason.ROLLOUT_NOT_OBSERVED, text
    if blocked:
        return kind, False, Reason.REPLACEMENT_BLOCKED, _named(blocked)
    outdated = [f"{role.name} {role.outdated}" for role in roles if role.outdated]
    if outdated:
        text = f"replicas of an older configuration, replaced one by one: {', '.join(outdated)}"
        held = [plan.name for plan in plans if _is_held(plan)]
        if held:
            text += (
                f"; the next one of {', '.join(held)} is given up when every replica of the role "
                "is admitted"
            )
        return kind, False, Reason.ROLLOUT_IN_PROGRESS, text
    short = [
        plan.name
        for plan in plans
        if plan.slot is not None
        or sum(each.shape.verdict is Verdict.COMPLETE for each in plan.replicas) < plan.count
    ]
    if short:
        text = f"replicas are being made in {', '.join(short)}"
        return kind, False, Reason.REPLACEMENT_IN_PROGRESS, text
    if not any(plan.replicas for plan in plans):
        return kind, Status.UNKNOWN, Reason.ROLLOUT_NOT_OBSERVED, "no replica stands"
    return kind, True, Reason.UP_TO_DATE, ""


def _is_held(plan: RolePlan) -> bool:
    """Whether healthy replicas would be replaced and have to wait for others to be admitted."""
    return (
        plan.slot is None
        and any(each.is_outdated for each in plan.replicas if each.ordinal < plan.count)
        and not all_admitted(plan.replicas, plan.count)
    )


def _quota(plans: Sequence[RolePlan], workloads: Sequence[Workload]) -> _Said:
    kind = ConditionType.QUOTA_RESERVED
    if not any(plan.count for plan in plans):
        return kind, Status.UNKNOWN, Reason.NO_REPLICAS, "no replica is asked for"
    asked = [(plan, each) for plan in plans for each in plan.replicas if each.ordinal < plan.count]
    if not asked:
        if any(plan.departing for plan in plans):
            text = "the old replicas are ending"
            return kind, Status.UNKNOWN, Reason.ALL_REPLICAS_TERMINATING, text
        return kind, Status.UNKNOWN, Reason.NO_REPLICAS, "no replica stands"
    incomplete = [
        f"{each.place.label}: {each.shape.why}"
        for _, each in asked
        if each.shape.verdict is Verdict.INCOMPLETE
    ]
    if incomplete:
        return kind, False, Reason.POD_GROUP_INCOMPLETE, _named(incomplete)
    pending, preempted, in_flight = [], [], []
    for _, each in asked:
        found = each.place.owning(member.uid for member in each.place.standing)
        if found is None:
            in_flight.append(each.place.label)
        elif condition_status(found.status, kueue.PREEMPTED) == "True" and not found.is_admitted:
            preempted.append(each.place.label)
        elif not found.has_quota:
            why = found.why_pending
            pending.append(f"{each.place.label} ({why})" if why else each.place.label)
    if preempted:
        return kind, False, Reason.PREEMPTED_IN_PART, _named(preempted)
    if pending:
        return kind, False, Reason.PENDING, f"waiting for quota: {_named(pending)}"
    if in_flight:
        text = f"Kueue has made no Workload yet of {_named(in_flight)}"
        return kind, Status.UNKNOWN, Reason.ADMISSION_IN_FLIGHT, text
    return kind, True, Reason.RESERVED, ""


def _kinds(roles: Sequence[RoleStatus]) -> _Said:
    kind = ConditionType.ROLE_KINDS_READY
    if not any(role.desired for role in roles):
        return kind, Status.UNKNOWN, Reason.NO_ROLE_STATUSES, "no replica is asked for"
    ready: dict[str, bool] = {}
    for role in roles:
        name = role.kind.value
        ready[name] = ready.get(name, False) or role.ready > 0
    missing = [name for name, is_ready in ready.items() if not is_ready]
    if missing:
        return kind, False, Reason.KINDS_NOT_READY, f"no replica is ready of {', '.join(missing)}"
    return kind, True, Reason.ALL_KINDS_READY, ""


def _summary(roles: Sequence[RoleStatus]) -> str:
    return ", ".join(f"{role.name} {role.ready}/{role.desired} ready" for role in roles)


def _named(texts: Sequence[str]) -> str:
    named = "; ".join(texts[:_MOST_NAMED])
    more = len(texts) - _MOST_NAMED
    return f"{named}; and {more} more" if more > 0 else named


def status_patch(old: Mapping[str, object] | None, new: ModelDeploymentStatus) -> dict[str, object]:
    """Return the merge patch that makes status *old* into *new*; empty when nothing differs."""
    wanted: dict[str, object] = dict(new.wire())
    before = dict(old or {})
    patch: dict[str, object] = {key: None for key in before if key not in wanted}
    patch.update({key: value for key, value in wanted.items() if before.get(key) != value})
    return patch
