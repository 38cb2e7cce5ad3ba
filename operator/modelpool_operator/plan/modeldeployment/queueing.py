"""
Whether a replica has waited for its first admission ever since it was made.

Such a replica serves nobody and holds nothing, so an obsolete one may be replaced at once. It must
be certain that it never ran: a False condition of eviction is history, not absence.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import kueue
from .shape import Verdict, read_shape
from .sight import Member, Workload, condition_status

_HISTORY = (kueue.EVICTED, kueue.PREEMPTED, kueue.REQUEUED, kueue.FINISHED)
_STATUSES = ("containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses")


def is_initially_queued(members: Sequence[Member], workloads: Sequence[Workload]) -> bool:
    """Return whether the replica of *members*, going ones included, was never admitted."""
    if read_shape(members).verdict is not Verdict.COMPLETE:
        return False
    if not all(_never_ran(member) for member in members):
        return False
    uids = {member.uid for member in members}
    owning = [each for each in workloads if each.owns(uids)]
    return len(owning) == 1 and uids <= owning[0].owners and _has_no_history(owning[0])


def _never_ran(member: Member) -> bool:
    spec, status = member.pod.get("spec") or {}, member.pod.get("status") or {}
    gates = [each.get("name") for each in spec.get("schedulingGates") or []]
    return (
        member.stands
        and status.get("phase", "Pending") == "Pending"
        and not spec.get("nodeName")
        and kueue.ADMISSION_GATE in gates
        and not any(status.get(key) for key in _STATUSES)
    )


def _has_no_history(workload: Workload) -> bool:
    status = workload.status
    conditions = {each.get("type"): each for each in status.get("conditions") or []}
    ready = conditions.get(kueue.PODS_READY)
    waits_well = ready is None or (
        ready.get("status") == "False" and ready.get("reason") != kueue.WAIT_FOR_RECOVERY
    )
    return (
        bool(workload.uid)
        and not workload.is_going
        and condition_status(status, kueue.ADMITTED) in (None, "False")
        and not any(kind in conditions for kind in _HISTORY)
        and waits_well
        # Kueue spells the first of them with a slip of the pen in some versions.
        and "accumulatedPastExexcutionTimeSeconds" not in status
        and "accumulatedPastExecutionTimeSeconds" not in status
        and not status.get("requeueState")
        and not status.get("reclaimablePods")
        and not (status.get("schedulingStats") or {}).get("evictions")
    )
