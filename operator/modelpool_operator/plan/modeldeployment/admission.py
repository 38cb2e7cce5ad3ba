"""
The proof that a replacement was admitted afresh, and not on the reservation of the old replica.

Kueue matches a standing Workload to Pods by name, PodSet names and counts alone; so every word of
the proof compares the Workload with the members that stand now. The first difference is the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from . import kueue
from .quantity import value
from .render import RoleRender
from .sight import Member, Workload, condition_status

Json = dict[str, Any]

_COMPARED = ("image", "command", "args", "env")


def why_not_admitted(
    members: Sequence[Member],
    workloads: Sequence[Workload],
    render: RoleRender,
    ordinal: int,
) -> str | None:
    """
    Return why the replica of *members* is not proven freshly admitted; None when it is.

    Args:
        members: All members at the ordinal, those that are going included.
        workloads: All Workloads of the namespace.
        render: What should stand.
        ordinal: Which replica.
    """
    trouble = _members_differ(members, render)
    if trouble is not None:
        return trouble
    workload = next((each for each in workloads if each.stands_on(render.group(ordinal))), None)
    if workload is None:
        return "Kueue has made no Workload of it yet"
    if workload.is_going:
        return f"Workload {workload.name} is being deleted"
    if condition_status(workload.status, kueue.EVICTED) == "True":
        return f"Workload {workload.name} is evicted"
    if not workload.is_admitted:
        if workload.has_quota:
            return f"Workload {workload.name} is not admitted yet (its quota is reserved)"
        why = workload.why_pending
        return f"Workload {workload.name} is not admitted yet" + (f": {why}" if why else "")
    if not workload.status.get("admission"):
        return f"Workload {workload.name} is admitted to nothing"
    missing = [member.name for member in members if member.uid not in workload.owners]
    if missing:
        return f"Workload {workload.name} was not made of {', '.join(missing)}"
    if workload.queue != render.queue or not workload.queue:
        return (
            f'Workload {workload.name} is in queue "{workload.queue}" and not in "{render.queue}"'
        )
    return _pod_sets_differ(members, workload)


def _members_differ(members: Sequence[Member], render: RoleRender) -> str | None:
    if len(members) != render.size:
        return f"{len(members)} of {render.size} members stand"
    seats = set()
    for member in members:
        if not member.stands:
            return f"{member.name} is going"
        if member.index is None or member.index >= render.size or member.index in seats:
            return f"{member.name} sits on no seat of its own"
        seats.add(member.index)
        if member.ordinal is None or member.hash != render.hash(member.ordinal, member.index):
            return f"{member.name} is of another configuration"
    return None


def _pod_sets_differ(members: Sequence[Member], workload: Workload) -> str | None:
    groups: dict[str, list[Member]] = {}
    for member in members:
        annotations = (member.pod.get("metadata") or {}).get("annotations") or {}
        groups.setdefault(str(annotations.get(kueue.ROLE_HASH_ANNOTATION, "")), []).append(member)
    if len(workload.pod_sets) != len(groups):
        return f"Workload {workload.name} has {len(workload.pod_sets)} PodSets, not {len(groups)}"
    for pod_set in workload.pod_sets:
        name = str(pod_set.get("name", ""))
        group = groups.get(name)
        if group is None:
            return f"Workload {workload.name} has a PodSet {name} of no member"
        if pod_set.get("count", 1) != len(group):
            return f"PodSet {name} counts {pod_set.get('count', 1)} members, not {len(group)}"
        spec = (pod_set.get("template") or {}).get("spec") or {}
        # Kueue takes the first Pod that it lists, and ranks may differ.
        answers = [_template_differs(spec, member.pod.get("spec") or {}) for member in group]
        if all(answer is not None for answer in answers):
            return f"PodSet {name} was made of another configuration: {answers[0]}"
    return None


def _template_differs(template: Json, live: Json) -> str | None:
    """Return how a PodSet differs from a member, apart from what admission changes; None if not."""
    theirs = {each.get("name"): each for each in template.get("containers") or []}
    ours = {each.get("name"): each for each in live.get("containers") or []}
    if theirs.keys() != ours.keys():
        return "containers"
    for name, container in ours.items():
        for key in _COMPARED:
            if (theirs[name].get(key) or None) != (container.get(key) or None):
                return f"{key} of container {name}"
    if not _within(live.get("affinity") or {}, template.get("affinity") or {}):
        return "affinity"
    try:
        if requests(template) != requests(live):
            return "requests"
    except ValueError as error:
        return str(error)
    return None


def _within(part: Any, whole: Any) -> bool:
    """Return whether *whole* has all of *part*; admission hooks may have pinned it further."""
    if isinstance(part, Mapping):
        return isinstance(whole, Mapping) and all(
            key in whole and _within(item, whole[key]) for key, item in part.items()
        )
    if isinstance(part, list):
        return isinstance(whole, list) and all(
            any(_within(item, other) for other in whole) for item in part
        )
    return bool(part == whole)


def requests(spec: Mapping[str, Any]) -> dict[str, Decimal]:
    """
    Return what a Pod effectively asks for: requests before limits, sums, the init maximum.

    Raises:
        ValueError: an amount is no quantity.
    """
    total: dict[str, Decimal] = {}
    for container in spec.get("containers") or []:
        for name, amount in _asked(container).items():
            total[name] = total.get(name, Decimal(0)) + amount
    for container in spec.get("initContainers") or []:
        for name, amount in _asked(container).items():
            total[name] = max(total.get(name, Decimal(0)), amount)
    return {name: amount for name, amount in total.items() if amount}


def _asked(container: Mapping[str, Any]) -> dict[str, Decimal]:
    resources = container.get("resources") or {}
    both = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: value(amount) for name, amount in both.items()}
