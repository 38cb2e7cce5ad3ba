"""
Which members answer requests: a label on the Pod, and Services that always select by it.

Answered from what each replica was built as, so an edit changes no selector and moves no request
before its replica is replaced. Readiness is the business of the endpoints.
"""

from __future__ import annotations

from collections.abc import Collection

from .actions import Route
from .rollout import RolePlan
from .shape import Answering, Verdict, answering
from .sight import Member


def should_answer(plan: RolePlan) -> dict[str, bool]:
    """Return for the standing members of a role, by UID, whether they answer; unknown: absent."""
    found: dict[str, bool] = {}
    condemned = plan.condemned
    for replica in plan.replicas:
        standing = replica.place.standing
        how = answering(standing, replica.shape)
        for member in standing:
            if replica.ordinal in condemned:
                found[member.uid] = False
            elif replica.shape.verdict is Verdict.UNREADABLE or how is Answering.UNKNOWN:
                continue  # what is carried stays, nothing is granted
            elif how is Answering.LEADER:
                # A leader without all of its followers cannot serve.
                is_whole = replica.shape.verdict is Verdict.COMPLETE
                found[member.uid] = is_whole and member.index_label == "0"
            else:
                found[member.uid] = True
    return found


def routes(plan: RolePlan, deleted: Collection[str]) -> tuple[list[Route], list[Route]]:
    """Return the labels to take off before anything is deleted, and those to put on at the end."""
    wanted = should_answer(plan)
    off: list[Route] = []
    on: list[Route] = []
    for replica in plan.replicas:
        for member in replica.place.standing:
            answers = wanted.get(member.uid)
            if member.uid in deleted:
                answers = False
            if answers is False and member.is_routed:
                off.append(_route(member, on=False))
            elif answers is True and not member.is_routed:
                on.append(_route(member, on=True))
    return off, on


def _route(member: Member, *, on: bool) -> Route:
    return Route(member.name, member.version, on)
