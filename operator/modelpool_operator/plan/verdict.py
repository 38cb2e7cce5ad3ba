"""
Whether the members of a pool can take turns at all, and if not, what a person has to change.

What the rules of the CRD cannot see because it stands in other objects. As long as something is
wrong nobody touches a replica, not even of healthy members: half a pool has no safe order.
"""

from __future__ import annotations

from dataclasses import dataclass

from modelpool_api.names import SLOT_ANNOTATION, Reason
from modelpool_api.v1alpha1.modelpool import ModelPool
from modelpool_kube.slotrules import is_autoscaled

from .members import ObservedMember
from .observedpool import ObservedPool, lists


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong with the members."""

    reason: Reason = Reason.ALL_RESOLVED
    message: str = ""
    missing: frozenset[str] = frozenset()
    unsafe: frozenset[str] = frozenset()
    metal: tuple[str, ...] = ()

    @property
    def is_valid(self) -> bool:
        """Whether the condition MembersValid is true."""
        return self.reason is Reason.ALL_RESOLVED

    @property
    def may_move(self) -> bool:
        """Whether replicas may be touched."""
        return self.is_valid and not self.metal


def judge_members(seen: ObservedPool) -> Verdict:
    """Return what is wrong; the worst first, all names at once."""
    metal = tuple(each.name for each in seen.members if each.is_metal)
    missing = [each for each in seen.members if each.obj is None]
    if missing:
        what = ", ".join(f"{each.name} ({each.member})" for each in missing)
        return Verdict(
            Reason.MISSING_MEMBERS,
            f"spec.members names what does not exist: {what}; create it, or take it out of "
            "spec.members. Until then no replica of any member is touched",
            missing=frozenset(each.name for each in missing),
            metal=metal,
        )
    shared = {each.name: why for each in seen.members if (why := _shared(seen, each))}
    if shared:
        return Verdict(
            Reason.MEMBER_SHARED,
            "; ".join(shared.values()) + ". Until then no replica of any member is touched",
            unsafe=frozenset(shared),
            metal=metal,
        )
    unsafe = {each.name: why for each in seen.members if (why := _unsafe(seen, each))}
    if unsafe:
        said = "; ".join(f"member {name}: {why}" for name, why in unsafe.items())
        return Verdict(
            Reason.UNSAFE_MEMBER,
            f"{said}. Until then no replica of any member is touched",
            unsafe=frozenset(unsafe),
            metal=metal,
        )
    return Verdict(message=f"all {len(seen.members)} members exist and can take turns", metal=metal)


def contest(seen: ObservedPool) -> str | None:
    """Return who else scales a member, with the way out; None when nobody does."""
    for each in seen.members:
        scaler = is_autoscaled(each.member, seen.autoscalers)
        if scaler is not None:
            return (
                f"HorizontalPodAutoscaler {scaler} scales {each.member}, and so does this pool; "
                "delete it, or take the member out of spec.members"
            )
    for each in seen.members:
        if each.name in seen.contested:
            return (
                f"somebody else keeps changing the replicas of {each.member}; leave "
                "spec.replicas out of what Git or a script applies. Scaling goes on 10 minutes "
                "after the last such change"
            )
    return None


def _shared(seen: ObservedPool, each: ObservedMember) -> str | None:
    mark = each.mark
    if mark is not None and mark.slot != seen.slot:
        return (
            f"member {each.name}: {each.member} belongs to the slot "
            f"{mark.slot.namespace}/{mark.slot.lease} (annotation {SLOT_ANNOTATION}); take it out "
            "of one of the two pools, or remove the annotation if that pool is no more"
        )
    if mark is not None:
        return None
    for other in seen.other_pools:
        if lists(other, each.member.kind, each.member.target) and _is_older(other, seen.pool):
            return (
                f"member {each.name}: {each.member} is listed by ModelPool "
                f"{other.metadata.name} too, which was there first; take it out of one of them"
            )
    return None


def _is_older(other: ModelPool, pool: ModelPool) -> bool:
    """Whether *other* has the better claim to a member that nobody has marked yet."""

    def age(each: ModelPool) -> tuple[str, str]:
        return each.metadata.creation_timestamp or "", each.metadata.name

    return not other.metadata.is_going and age(other) < age(pool)


def _unsafe(seen: ObservedPool, each: ObservedMember) -> str | None:
    for other in seen.members:
        if other is each:
            break
        if other.member.kind == each.member.kind and other.member.target == each.member.target:
            return (
                f"it is {each.member}, and so is member {other.name}; one object cannot be two "
                "members: remove one of them, and use `models` for further names"
            )
        # the Deployment of an InferenceService carries its name
        kinds = {other.member.kind.kind, each.member.kind.kind}
        if other.member.target == each.member.target and kinds == {
            "Deployment",
            "InferenceService",
        }:
            return (
                f"Deployment {each.member.target} is made by the InferenceService of the same "
                f"name, which is member {other.name if other is not each else each.name} already; "
                "keep the inferenceServiceRef"
            )
    return each.unsafe
