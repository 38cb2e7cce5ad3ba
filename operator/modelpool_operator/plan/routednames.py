"""
Names that two things behind one router would have. Pure.

No rule of a CRD sees them: they stand in several objects. A router serves a name only once. Of two
pools that want it, it leaves out the one whose name comes later; of two upstreams it takes neither,
because its file is wrong then.
"""

from __future__ import annotations

from collections.abc import Iterable

from modelpool_api.v1alpha1.modelpool import ModelPool
from modelpool_api.v1alpha1.modelrouter import ModelRouter


def clashes(router: ModelRouter, pools: Iterable[ModelPool]) -> tuple[str, ...]:
    """Return what is not served because of a name that is taken, each with the way out."""
    taken: dict[str, str] = {}
    found: list[str] = []
    for upstream in router.spec.upstreams:
        label = f"upstream {upstream.name}"
        names = (upstream.name, *upstream.models)
        if told := _told(names, taken):
            found.append(
                f"{label} keeps the router from taking this configuration, because clients could "
                f"mean two things by {told}; change spec.upstreams[].name or its models"
            )
        taken |= dict.fromkeys(names, label)
    # One that is going is not served any more, and its names are free.
    staying = (each for each in pools if not each.metadata.is_going)
    for pool in sorted(staying, key=lambda each: each.metadata.name):
        names = tuple(
            name for member in pool.spec.members for name in (member.member_name, *member.models)
        )
        label = f"ModelPool {pool.metadata.name}"
        if told := _told(names, taken):
            found.append(
                f"{label} is left out, because clients could mean two things by {told}; change "
                "spec.members[].name or its models there"
            )
        else:
            taken |= dict.fromkeys(names, label)
    return tuple(found)


def _told(names: tuple[str, ...], taken: dict[str, str]) -> str:
    each = dict.fromkeys(names)
    wrong = [f"{name} (of {taken[name]})" for name in each if name in taken]
    wrong += [f"{name} (twice in it)" for name in each if names.count(name) > 1]
    return ", ".join(wrong)
