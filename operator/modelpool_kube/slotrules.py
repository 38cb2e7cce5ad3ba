"""
What may be done with a slot, decided from what was read. Pure.

Two questions carry everything: is a member *proven gone* (`prove_gone`), and is there *evidence*
that it is ready in this epoch (`ready_evidence`). Both look at objects as the API server has them,
never at what somebody remembers, and both say in words what is missing.

The order of looks in `prove_gone` is part of the proof: Pods are listed only after every
controller that could still make one has said, for a generation that wants none, that it acted on
it. The function asks for one look after the other, so nobody can read in another order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from modelpool_api.names import (
    REPLACEMENTS_ANNOTATION,
    ROUTING_LABEL,
    SLOT_ANNOTATION,
    SLOT_APPLIED_ANNOTATION,
    group_prefix,
)

from .kinds import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    MODEL_DEPLOYMENTS,
    STATEFULSETS,
    Json,
    Kind,
    annotation,
    controller_of,
    is_controlled_by,
    is_going,
    meta,
    name_of,
    uid,
    version_of,
)
from .record import SlotId, read_mark

CONTEST_WINDOW_S = 600.0
CONTEST_CHANGES = 2


@dataclass(frozen=True, slots=True)
class Member:
    """One member of a pool, and the object that is scaled for it."""

    name: str
    """Name in the pool."""
    kind: Kind
    """One of `kinds.MEMBER_KINDS`."""
    namespace: str
    target: str
    """Name of the object."""

    def __str__(self) -> str:
        return f"{self.kind.kind} {self.namespace}/{self.target}"


# The mark


class Standing(StrEnum):
    """What the mark of a member says about an epoch of ours."""

    OURS = "ours"
    """Exactly this slot and epoch."""
    BEHIND = "behind"
    """Missing, meaningless, or of a smaller epoch: to be rewritten, never trusted."""
    AHEAD = "ahead"
    """Of a larger epoch: somebody has decided after us."""
    FOREIGN = "foreign"
    """Of another slot: the member is shared, and nobody may write."""


def standing(obj: Json, slot: SlotId, epoch: int) -> Standing:
    """Return how *obj* stands to *epoch* of *slot*."""
    mark = read_mark(annotation(obj, SLOT_ANNOTATION))
    if mark is None:
        return Standing.BEHIND
    if mark.slot != slot:
        return Standing.FOREIGN
    if mark.epoch == epoch:
        return Standing.OURS
    return Standing.AHEAD if mark.epoch > epoch else Standing.BEHIND


def wants(kind: Kind, obj: Json) -> int:
    """Return how many replicas *obj* asks for; a ModelDeployment counts as one or none."""
    spec = obj.get("spec") or {}
    if kind == MODEL_DEPLOYMENTS:
        return 0 if spec.get("suspend") else 1
    # The API server fills in 1; an InferenceService without a number is its controller's to say.
    asked = spec.get("replicas")
    return int(asked) if asked is not None else 1


def mark_patch(slot: SlotId, epoch: int) -> Json:
    """Return the patch that writes the mark."""
    return {"metadata": {"annotations": {SLOT_ANNOTATION: slot.value(epoch)}}}


def scale_patch(kind: Kind, slot: SlotId, epoch: int, *, up: bool) -> Json:
    """Return the patch that scales a member and writes the mark, in one."""
    spec: Json = {"suspend": not up} if kind == MODEL_DEPLOYMENTS else {"replicas": int(up)}
    return {**mark_patch(slot, epoch), "spec": spec}


def unmark_patch() -> Json:
    """Return the patch that removes the mark, when a pool ends."""
    return {"metadata": {"annotations": {SLOT_ANNOTATION: None}}}


def unsafe(kind: Kind, obj: Json) -> str | None:
    """Return why *obj* cannot be a member, with the way out; None when it can."""
    spec = obj.get("spec") or {}
    if kind == DEPLOYMENTS:
        strategy = (spec.get("strategy") or {}).get("type", "RollingUpdate")
        if strategy != "Recreate":
            return (
                f"its strategy is {strategy}, which runs two Pods at every rollout; "
                "set spec.strategy: {type: Recreate}"
            )
    if kind == STATEFULSETS:
        policy = spec.get("persistentVolumeClaimRetentionPolicy") or {}
        if policy.get("whenScaled") == "Delete":
            return (
                "it deletes its volumes when it is scaled to 0; "
                "set spec.persistentVolumeClaimRetentionPolicy.whenScaled: Retain"
            )
    asked = wants(kind, obj)
    if asked > 1:
        return f"it asks for {asked} replicas and a slot holds one; set spec.replicas to 0"
    return None


# Looking


class Look(StrEnum):
    """Something to be read, most-recent."""

    MEMBER = "member"
    """The object that the pool names."""
    OWNER = "owner"
    """The object that owns its Pods, where that is another one (InferenceService)."""
    REPLICA_SETS = "replica sets"
    """All ReplicaSets of the namespace."""
    PODS = "pods"
    """All Pods of the namespace."""
    WORKLOADS = "workloads"
    """All Workloads of the namespace."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """What is still known of a member whose object was deleted."""

    owner_uid: str
    """UID of the object that owned its Pods."""
    selector: Mapping[str, str]
    """Labels of its Pods."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What was read about one member, in the order of `looked`."""

    looked: tuple[Look, ...] = ()
    member: Json | None = None
    owner: Json | None = None
    replica_sets: tuple[Json, ...] = ()
    pods: tuple[Json, ...] = ()
    workloads: tuple[Json, ...] = ()
    forgotten: frozenset[str] = frozenset()
    """UIDs of Pods that a person declared gone."""

    def seen(self, look: Look, value: Any) -> Facts:
        """Return the facts with one more look."""
        names = {
            Look.MEMBER: "member",
            Look.OWNER: "owner",
            Look.REPLICA_SETS: "replica_sets",
            Look.PODS: "pods",
            Look.WORKLOADS: "workloads",
        }
        return replace(self, looked=(*self.looked, look), **{names[look]: value})


@dataclass(frozen=True, slots=True)
class NeedLook:
    """The next thing to read."""

    look: Look


@dataclass(frozen=True, slots=True)
class Gone:
    """Nothing of the member runs, and nothing of it will start without a write of ours."""


@dataclass(frozen=True, slots=True)
class NotYet:
    """Not proven gone."""

    reason: str
    """Stable word."""
    detail: str
    """For people: what is waited for."""


def prove_gone(
    member: Member,
    facts: Facts,
    *,
    slot: SlotId,
    epoch: int,
    remembered: Remembered | None = None,
) -> Gone | NotYet | NeedLook:
    """Return whether *member* is proven gone by *facts*, or what to read next."""
    if Look.MEMBER not in facts.looked:
        return NeedLook(Look.MEMBER)
    obj = facts.member
    if obj is None:
        if remembered is None:
            return NotYet(
                "MemberMissing", f"{member} does not exist, and nothing is known of its Pods"
            )
        return _no_pods(member, facts, remembered.owner_uid, remembered.selector, whoever=True)
    match standing(obj, slot, epoch):
        case Standing.OURS:
            pass
        case Standing.FOREIGN:
            mark = annotation(obj, SLOT_ANNOTATION)
            return NotYet("MemberShared", f"{member} belongs to another slot ({mark})")
        case Standing.AHEAD | Standing.BEHIND:
            return NotYet("NotFenced", f"{member} does not carry epoch {epoch}")
    if wants(member.kind, obj) != 0:
        return NotYet("NotScaledDown", f"{member} asks for {wants(member.kind, obj)} replicas")
    if member.kind == MODEL_DEPLOYMENTS:
        applied = annotation(obj, SLOT_APPLIED_ANNOTATION)
        if applied != f"{slot.value(epoch)}=0" or not _is_observed(obj):
            return NotYet(
                "NotApplied", f"the controller of {member} has not suspended it for epoch {epoch}"
            )
        return _no_pods(member, facts, uid(obj), {})
    owner = obj
    if member.kind == INFERENCE_SERVICES:
        if Look.OWNER not in facts.looked:
            return NeedLook(Look.OWNER)
        if facts.owner is None:
            return NotYet("OwnerMissing", f"the Deployment of {member} does not exist yet")
        owner = facts.owner
        if not is_controlled_by(owner, uid(obj)):
            return NotYet("OwnerForeign", f"Deployment {member.target} does not belong to {member}")
        if standing(owner, slot, epoch) is not Standing.OURS or wants(DEPLOYMENTS, owner) != 0:
            return NotYet(
                "EpochNotDown", f"the Deployment of {member} does not carry epoch {epoch} at 0"
            )
    if not _is_observed(owner):
        return NotYet("NotObserved", f"the controller of {member} has not acted on it yet")
    return _no_pods(member, facts, uid(owner), _selector(owner))


def _no_pods(
    member: Member,
    facts: Facts,
    owner_uid: str,
    selector: Mapping[str, str],
    *,
    whoever: bool = False,
) -> Gone | NotYet | NeedLook:
    """
    Look at what is below the owner: ReplicaSets, Pods, Workloads.

    *whoever* counts every Pod that the selector finds: the chain of owners is broken.
    """
    owners = {owner_uid}
    known: set[str] = set()
    if member.kind in (DEPLOYMENTS, INFERENCE_SERVICES):
        if Look.REPLICA_SETS not in facts.looked:
            return NeedLook(Look.REPLICA_SETS)
        known = {uid(each) for each in facts.replica_sets}
        for each in facts.replica_sets:
            # One without a controller will be adopted if its labels match.
            adoptable = controller_of(each) is None and _is_selected(each, selector)
            if not (is_controlled_by(each, owner_uid) or adoptable):
                continue
            owners.add(uid(each))
            asked = (each.get("spec") or {}).get("replicas")
            if asked != 0:
                return NotYet("ReplicaSetNotZero", f"ReplicaSet {name_of(each)} asks for {asked}")
            if not _is_observed(each):
                return NotYet(
                    "ReplicaSetNotObserved", f"ReplicaSet {name_of(each)} was not acted on yet"
                )
    if Look.PODS not in facts.looked:
        return NeedLook(Look.PODS)
    live = []
    for pod in facts.pods:
        is_ours = _is_pod_of(member, pod, owners, known, selector)
        found = whoever and _is_selected(pod, selector)
        if (is_ours or found) and not is_pod_gone(pod, facts.forgotten):
            live.append(pod)
    if live:
        names = ", ".join(f"{name_of(pod)} ({_how(pod)})" for pod in live)
        return NotYet("PodsLeft", f"Pods of {member} are left: {names}")
    if member.kind == MODEL_DEPLOYMENTS:
        if Look.WORKLOADS not in facts.looked:
            return NeedLook(Look.WORKLOADS)
        prefix = group_prefix(member.namespace, member.target)
        left = [name_of(each) for each in facts.workloads if name_of(each).startswith(prefix)]
        if left:
            return NotYet("WorkloadsLeft", f"Workloads of {member} are left: {', '.join(left)}")
    return Gone()


def _is_pod_of(
    member: Member, pod: Json, owners: set[str], known: set[str], selector: Mapping[str, str]
) -> bool:
    owner = controller_of(pod)
    if owner is not None and owner.get("uid") in owners:
        return True
    if not _is_selected(pod, selector):
        return False
    if owner is None:
        return True  # it will be adopted
    # Its controller is gone, or was made anew under the same name: nobody else answers for it.
    if member.kind in (DEPLOYMENTS, INFERENCE_SERVICES):
        return owner.get("kind") == "ReplicaSet" and owner.get("uid") not in known
    return owner.get("kind") == member.kind.kind and owner.get("name") == member.target


def is_pod_gone(pod: Json, forgotten: frozenset[str] = frozenset()) -> bool:
    """
    Return whether nothing of *pod* runs any more.

    A final phase counts only with every container ended, because others than the kubelet write
    phases. Pending is live: it may start at any moment. So is a Pod on a lost node, until the
    control plane removes it, which it does once the node is deleted or tainted out-of-service;
    nodes are not looked at, because that would take a right on the whole cluster.
    """
    if uid(pod) and uid(pod) in forgotten:
        return True
    status = pod.get("status") or {}
    if status.get("phase") not in ("Succeeded", "Failed"):
        return False
    statuses = [
        each
        for key in ("initContainerStatuses", "containerStatuses", "ephemeralContainerStatuses")
        for each in status.get(key) or []
    ]
    return all("terminated" in (each.get("state") or {}) for each in statuses)


def _how(pod: Json) -> str:
    phase = (pod.get("status") or {}).get("phase", "Pending")
    return f"{phase}, terminating" if is_going(pod) else str(phase)


def _is_observed(obj: Json) -> bool:
    seen = (obj.get("status") or {}).get("observedGeneration")
    return isinstance(seen, int) and seen >= int(meta(obj).get("generation", 0))


def _selector(owner: Json) -> Mapping[str, str]:
    selector = (owner.get("spec") or {}).get("selector") or {}
    found: Mapping[str, str] = selector.get("matchLabels") or {}
    return found


def _is_selected(obj: Json, selector: Mapping[str, str]) -> bool:
    return bool(selector) and selector.items() <= (meta(obj).get("labels") or {}).items()


def remember(member: Member, facts: Facts) -> Remembered | None:
    """Return what to remember of *member* in case its object is deleted; None when unknown."""
    owner = facts.owner if member.kind == INFERENCE_SERVICES else facts.member
    return None if owner is None else Remembered(uid(owner), _selector(owner))


# Ready


@dataclass(frozen=True, slots=True)
class Probe:
    """One successful readiness probe of ours."""

    pod_uid: str
    begun_at: float
    """Monotonic seconds."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The member can serve in this epoch, from this Pod."""

    pod: Json


@dataclass(frozen=True, slots=True)
class NotReady:
    """It cannot, or there is no evidence that it can."""

    reason: str
    """Stable word."""
    detail: str
    candidate: Json | None = None
    """Pod that is worth a probe: everything but the probe is there."""


def ready_evidence(
    member: Member,
    facts: Facts,
    *,
    slot: SlotId,
    epoch: int,
    fenced_at: float,
    probe: Probe | None,
) -> Ready | NotReady | NeedLook:
    """
    Return whether *member* is ready in *epoch*, or what to read next.

    Args:
        member: Which.
        facts: What was read.
        slot: Whose epoch.
        epoch: Which.
        fenced_at: When the last mark of the epoch was acknowledged; an older probe may have been
            answered by what somebody else was just taking down.
        probe: Our last successful probe of it.
    """
    if Look.MEMBER not in facts.looked:
        return NeedLook(Look.MEMBER)
    obj = facts.member
    if obj is None:
        return NotReady("MemberMissing", f"{member} does not exist")
    if standing(obj, slot, epoch) is not Standing.OURS:
        return NotReady("NotFenced", f"{member} does not carry epoch {epoch}")
    if wants(member.kind, obj) == 0:
        return NotReady("NotScaledUp", f"{member} is scaled to 0")
    if is_going(obj):
        return NotReady("MemberGoing", f"{member} is being deleted")
    owner = obj
    if member.kind == INFERENCE_SERVICES:
        if Look.OWNER not in facts.looked:
            return NeedLook(Look.OWNER)
        if facts.owner is None or not is_controlled_by(facts.owner, uid(obj)):
            return NotReady("OwnerMissing", f"the Deployment of {member} does not exist yet")
        owner = facts.owner
        if standing(owner, slot, epoch) is not Standing.OURS or wants(DEPLOYMENTS, owner) == 0:
            return NotReady(
                "EpochNotDown", f"the Deployment of {member} does not carry epoch {epoch} at 1"
            )
    if not _is_observed(owner):
        return NotReady("NotObserved", f"the controller of {member} has not acted on it yet")
    if member.kind == MODEL_DEPLOYMENTS:
        trouble = _open_replacement(member, obj)
        if trouble is not None:
            return trouble
    owners = {uid(owner)}
    if member.kind in (DEPLOYMENTS, INFERENCE_SERVICES):
        if Look.REPLICA_SETS not in facts.looked:
            return NeedLook(Look.REPLICA_SETS)
        # A ReplicaSet at 0 is an older template's: its Pod is on its way out.
        owners = {
            uid(each)
            for each in facts.replica_sets
            if is_controlled_by(each, uid(owner)) and (each.get("spec") or {}).get("replicas")
        }
    if Look.PODS not in facts.looked:
        return NeedLook(Look.PODS)
    mine = [
        pod for pod in facts.pods if (controller_of(pod) or {}).get("uid") in owners and uid(pod)
    ]
    running = [
        pod
        for pod in mine
        if not is_going(pod)
        and (pod.get("status") or {}).get("phase") == "Running"
        and (pod.get("status") or {}).get("podIP")
        # Of the Pods of a ModelDeployment only some answer requests.
        and (member.kind != MODEL_DEPLOYMENTS or _answers(pod))
    ]
    if not running:
        how = ", ".join(f"{name_of(pod)} ({_how(pod)})" for pod in mine) or "there is none"
        return NotReady("NoRunningPod", f"no Pod of {member} runs: {how}")
    if probe is not None:
        for pod in running:
            if uid(pod) == probe.pod_uid:
                if probe.begun_at >= fenced_at:
                    return Ready(pod)
                return NotReady("ProbeTooOld", "the last probe is older than the epoch", pod)
    return NotReady("NotProbed", f"{name_of(running[0])} was not probed yet", running[0])


def _answers(pod: Json) -> bool:
    return (meta(pod).get("labels") or {}).get(ROUTING_LABEL) == "true"


def _open_replacement(member: Member, obj: Json) -> NotReady | None:
    if annotation(obj, REPLACEMENTS_ANNOTATION) is not None:
        return NotReady("ReplacementOpen", f"a replica of {member} is being replaced")
    roles = (obj.get("status") or {}).get("roles") or []
    short = [role["name"] for role in roles if role.get("ready", 0) < role.get("desired", 0)]
    if short or not roles:
        return NotReady("RolesNotReady", f"roles of {member} are not ready: {', '.join(short)}")
    return None


# Others who scale


@dataclass(frozen=True, slots=True)
class ForeignChanges:
    """Changes of the replicas of a member that were not ours."""

    at: tuple[float, ...] = ()
    """Monotonic seconds."""

    def another(self, now: float) -> ForeignChanges:
        """Return them with one more."""
        return ForeignChanges((*self._recent(now), now))

    def are_a_contest(self, now: float) -> bool:
        """Return whether somebody else keeps scaling it; one change is a slip and corrected."""
        return len(self._recent(now)) >= CONTEST_CHANGES

    def _recent(self, now: float) -> tuple[float, ...]:
        return tuple(each for each in self.at if now - each < CONTEST_WINDOW_S)


def is_autoscaled(member: Member, autoscalers: tuple[Json, ...]) -> str | None:
    """Return the name of the HorizontalPodAutoscaler on *member*, or None."""
    for each in autoscalers:
        target = (each.get("spec") or {}).get("scaleTargetRef") or {}
        if target.get("kind") == member.kind.kind and target.get("name") == member.target:
            return name_of(each)
    return None


def moved_on(obj: Json, version: str) -> bool:
    """Return whether *obj* is past *version*, so that a write conditional on it cannot land."""
    return version_of(obj) != version
