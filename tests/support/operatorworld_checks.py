"""
What no write of an operator may break, checked as it happens; see `OperatorChecks`.

Others (tests, routers, controllers) may write what they like: a person scales by hand, and what
follows from it is no fault of ours. So a Deployment below an InferenceService is judged by who
asked for its replicas above.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from memcluster import MemCluster, Write
from memcontrollers import is_finished, runs
from modelpool_api.names import (
    APP_INSTANCE_LABEL,
    APP_MANAGED_BY_LABEL,
    OPERATOR_MANAGER,
    RECORD_ANNOTATION,
    SLOT_ANNOTATION,
)
from modelpool_kube.kinds import (
    CONFIGMAPS,
    DEPLOYMENTS,
    EVENTS,
    INFERENCE_SERVICES,
    LEASES,
    MEMBER_KINDS,
    MODEL_POOLS,
    MODEL_ROUTERS,
    PODS,
    REPLICASETS,
    ROLE_BINDINGS,
    ROLES,
    SERVICE_ACCOUNTS,
    SERVICES,
    Json,
    annotation,
    controller_of,
    uid,
)
from modelpool_kube.record import SlotMark, read_mark
from modelpool_operator.engine.leading import LEASE as ELECTION

OWN_STATUS = (MODEL_POOLS, INFERENCE_SERVICES, MODEL_ROUTERS)
"""Kinds whose status is the operator's."""
CHILDREN = {
    INFERENCE_SERVICES: (DEPLOYMENTS, SERVICES),
    MODEL_ROUTERS: (SERVICE_ACCOUNTS, ROLES, ROLE_BINDINGS, CONFIGMAPS, DEPLOYMENTS, SERVICES),
    MODEL_POOLS: (LEASES,),
}
"""What the operator makes, by whom it is made for."""
OWNERS = {kind.kind: kind for kind in CHILDREN}


@dataclass(slots=True)
class _Author:
    """Who wrote the record of a Lease last, and in which holding of it."""

    actor: str
    tenure: int


class OperatorChecks:
    """
    Checks writes of operators.

    - S1: a member is scaled up only while nothing of another is live or asked for.
    - S2: a member that works on something is not unloaded.
    - S8: epochs only grow: of a record, by one who did not write it last at least by one and above
      every mark; of a mark.
    - S9: a member is scaled only with a mark, of the recorded epoch; what is below a service
      carries a pair of mark and replicas that stood in the service.
    - S10: nothing is written but scale and mark of members, status, finalizers, Leases of pools,
      and children, which are owned and labelled; nothing of others in them is lost. Every change
      is conditional.

    Args of the constructor:
        cluster: Where it is written.
        busy: Names of the objects that work on something.
        is_operator: Says of an actor whether it is to be judged.
    """

    def __init__(
        self, cluster: MemCluster, busy: set[str], is_operator: Callable[[str], bool]
    ) -> None:
        self._cluster = cluster
        self._busy = busy
        self._is_operator = is_operator
        self._authors: dict[tuple[str, str], _Author] = {}
        self._tenures: dict[tuple[str, str], int] = {}
        self._scaled_by: dict[tuple[str, str], str] = {}
        """Who said last how many replicas a service is to have."""

    def problems(self, write: Write) -> list[str]:
        """Return what is wrong with *write*, one sentence each."""
        found = list(self._follow(write))
        if self._is_operator(write.actor):
            found += self._shape(write)
            if write.kind in (*MEMBER_KINDS.values(),) and write.verb != "status":
                found += self._scaling(write)
        return found

    # Leases and records

    def _follow(self, write: Write) -> Iterable[str]:
        where = (write.namespace, write.name)
        if write.kind == INFERENCE_SERVICES and write.after is not None:
            if write.before is None or _asked(write.before) != _asked(write.after):
                self._scaled_by[where] = write.actor
        if write.kind != LEASES:
            return
        if write.after is None:
            self._authors.pop(where, None)
            return
        before = write.before or {"metadata": {}, "spec": {}}
        if _holder(before) != _holder(write.after):
            self._tenures[where] = self._tenures.get(where, 0) + 1
        texts = [annotation(each, RECORD_ANNOTATION) for each in (before, write.after)]
        if texts[0] == texts[1]:
            return
        author = _Author(write.actor, self._tenures.get(where, 0))
        last, self._authors[where] = self._authors.get(where), author
        if self._is_operator(write.actor):
            yield from self._record(write, texts[0], texts[1], is_new=last != author)

    def _record(
        self, write: Write, before: str | None, after: str | None, *, is_new: bool
    ) -> Iterable[str]:
        if after is None:
            yield "S8: the record was removed"
            return
        old, new = json.loads(before or "{}"), json.loads(after)
        was, now = old.get("epoch", 0), new["epoch"]
        if now < was:
            yield f"S8: the epoch went from {was} to {now}"
        if is_new and now <= was:
            yield f"S8: {write.actor} took over the record of {write.name} and left epoch {was}"
        if now > was:
            marks = self._marks(write.namespace, write.name)
            if marks and now <= max(marks.values()):
                yield f"S8: epoch {now} was begun and members carry {marks}"
        if _holder(write.after or {}) == "":
            yield f"S8: {write.actor} wrote a record and nobody holds the Lease"
        lost = set(old) - set(new)
        if lost:
            yield f"S8: fields of others were lost: {sorted(lost)}"

    def _marks(self, namespace: str, lease: str) -> dict[str, int]:
        found = {}
        for kind in MEMBER_KINDS.values():
            for obj in self._cluster.all(kind, namespace):
                mark = read_mark(annotation(obj, SLOT_ANNOTATION))
                if mark is not None and (mark.slot.namespace, mark.slot.lease) == (
                    namespace,
                    lease,
                ):
                    found[f"{kind.kind} {obj['metadata']['name']}"] = mark.epoch
        return found

    def _recorded(self, mark: SlotMark) -> int | None:
        lease = self._cluster.read(LEASES, mark.slot.namespace, mark.slot.lease)
        text = None if lease is None else annotation(lease, RECORD_ANNOTATION)
        return None if text is None else int(json.loads(text)["epoch"])

    # What is ours at all

    def _shape(self, write: Write) -> Iterable[str]:
        what = f"{write.actor} {write.verb} {write.kind.kind} {write.name}"
        if write.kind == EVENTS:
            if write.verb not in ("create", "patch"):
                yield f"S10: {what}: an Event is only told and counted"
            return
        if write.before is not None and not write.given:
            yield f"S10: {what}: it was conditional on nothing"
        if write.verb == "status":
            if write.kind not in OWN_STATUS:
                yield f"S10: {what}: the status of somebody else"
        elif write.before is None:
            yield from self._made(write, what)
        elif write.kind == MODEL_POOLS:
            if write.after is not None and _but_finalizers(write.before) != _but_finalizers(
                write.after
            ):
                yield f"S10: {what}: more than its finalizers"
        elif write.after is None or write.verb == "delete":
            yield from self._deleted(write, what)
        else:
            yield from self._changed(write, what)

    def _made(self, write: Write, what: str) -> Iterable[str]:
        assert write.after is not None
        by = controller_of(write.after)
        owner = self._owner(write, by)
        if write.kind == LEASES and write.name == ELECTION and by is None:
            return
        if owner is None:
            yield f"S10: {what}: made for nobody: {by}"
            return
        if annotation(write.after, RECORD_ANNOTATION) is not None or _holder(write.after):
            yield f"S10: {what}: made as if somebody held it"
        labels = write.after["metadata"].get("labels") or {}
        if labels.get(APP_MANAGED_BY_LABEL) != OPERATOR_MANAGER:
            yield f"S10: {what}: it does not say who manages it"
        if labels.get(APP_INSTANCE_LABEL) != owner["metadata"]["name"]:
            yield f"S10: {what}: it does not say whose it is"

    def _owner(self, write: Write, by: Json | None) -> Json | None:
        """Return who *write* is made for; None when that is nobody who may have such a child."""
        kind = OWNERS.get((by or {}).get("kind", ""))
        if by is None or kind is None or write.kind not in CHILDREN[kind]:
            return None
        name = write.name if kind != MODEL_POOLS else write.name.removeprefix("modelpool-")
        owner = self._cluster.read(kind, write.namespace, name)
        is_same = owner is not None and uid(owner) == by["uid"] and by["name"] == name
        return owner if is_same else None

    def _deleted(self, write: Write, what: str) -> Iterable[str]:
        assert write.before is not None
        owner = self._owner(write, controller_of(write.before))
        if owner is None:
            yield f"S10: {what}: deleted, and it is nobody's who is here"
        elif write.given != uid(write.before):
            yield f"S10: {what}: deleted without its UID"
        elif write.kind == LEASES and not owner["metadata"].get("deletionTimestamp"):
            yield f"S10: {what}: deleted, and its pool stays"

    def _changed(self, write: Write, what: str) -> Iterable[str]:
        assert write.before is not None and write.after is not None
        old, new = write.before, write.after
        by = controller_of(old)
        if write.kind == LEASES:
            if _but_held(old) != _but_held(new):
                yield f"S10: {what}: more than holder and record"
        elif by is not None and self._owner(write, by) is not None:
            if controller_of(new) != by:
                yield f"S10: {what}: it has another owner now"
            for key in ("annotations", "labels"):
                theirs = {
                    name: value
                    for name, value in (old["metadata"].get(key) or {}).items()
                    if not name.startswith("modelpool.dev/")
                }
                kept = new["metadata"].get(key) or {}
                lost = {name for name, value in theirs.items() if kept.get(name) != value}
                if lost:
                    yield f"S10: {what}: {key} of others were changed: {sorted(lost)}"
        elif write.kind not in MEMBER_KINDS.values():
            yield f"S10: {what}: neither a child nor a member"
        elif by is not None:
            yield f"S10: {what}: it belongs to {by['kind']} {by['name']}"
        elif _without_ours(old) != _without_ours(new):
            yield f"S10: {what}: more than its scale and mark"

    # Scaling

    def _scaling(self, write: Write) -> Iterable[str]:
        if write.after is None:
            return
        mark = read_mark(annotation(write.after, SLOT_ANNOTATION))
        old = None
        if write.before is not None:
            old = read_mark(annotation(write.before, SLOT_ANNOTATION))
        if mark is not None and old is not None:
            if mark.slot != old.slot:
                yield f"S10: {write.name} belongs to {old.slot} and was taken"
            elif mark.epoch < old.epoch:
                yield f"S8: the mark of {write.name} went from {old.epoch} to {mark.epoch}"
        if controller_of(write.after) is not None:
            yield from self._below(write, mark)
            return
        if old is not None and mark is None:
            yield from self._unmarked(write, old)
        if write.before is None or write.kind == INFERENCE_SERVICES and _said_out_loud(write):
            return
        before, after = _wants(write.before), _wants(write.after)
        if mark is not None and mark != old and self._recorded(mark) != mark.epoch:
            yield f"S9: {write.name} got mark {mark.epoch} and the record has another"
        if before == after:
            return
        if mark is None:
            yield f"S9: {write.name} was scaled without a mark"
            return
        if self._recorded(mark) != mark.epoch:
            yield f"S9: {write.name} was scaled in epoch {mark.epoch} and the record has another"
        if after < before and write.name in self._busy:
            yield f"S2: {write.name} was unloaded while it worked"
        if after > before:
            yield from self._others_up(write, mark)

    def _unmarked(self, write: Write, old: SlotMark) -> Iterable[str]:
        pool = self._cluster.read(
            MODEL_POOLS, old.slot.namespace, old.slot.lease.removeprefix("modelpool-")
        )
        if pool is None or pool["metadata"].get("deletionTimestamp"):
            return
        if (write.kind.kind, write.name) in _listed(pool):
            yield f"S9: {write.name} lost its mark and is a member"
        if _wants(write.after or {}) > 0:
            yield f"S9: {write.name} lost its mark and asks to be up"

    def _below(self, write: Write, mark: SlotMark | None) -> Iterable[str]:
        """Check what is below an InferenceService."""
        assert write.after is not None
        by = controller_of(write.after)
        if by is None or by["kind"] != INFERENCE_SERVICES.kind:
            return  # no member: a router
        history = self._cluster._history[INFERENCE_SERVICES, write.namespace, by["name"]]
        pair = (annotation(write.after, SLOT_ANNOTATION), _wants(write.after))
        was = None
        if write.before is not None:
            was = (annotation(write.before, SLOT_ANNOTATION), _wants(write.before))
        stood = {
            (annotation(each, SLOT_ANNOTATION), count)
            for _, each in history
            if each is not None
            for count in ((0, 1) if _asked(each) is None else (_asked(each),))
        }
        if pair != was and pair not in stood:
            yield f"S9: {pair} below {write.name} never stood above"
        before = 0 if was is None else was[1]
        if pair[1] > before and mark is not None:
            by_hand = not self._is_operator(self._scaled_by.get((write.namespace, by["name"]), ""))
            if not by_hand:
                yield from self._others_up(write, mark)
        above = self._cluster.read(INFERENCE_SERVICES, write.namespace, by["name"])
        is_meant = above is None or _asked(above) == pair[1]
        if pair[1] < before and write.name in self._busy and not is_meant:
            yield f"S2: {write.name} was unloaded below while it worked"

    def _others_up(self, write: Write, mark: SlotMark) -> Iterable[str]:
        pool = self._cluster.read(
            MODEL_POOLS, mark.slot.namespace, mark.slot.lease.removeprefix("modelpool-")
        )
        if pool is None:
            yield f"S1: {write.name} was started for a pool that is no more"
            return
        others = {(kind, name) for kind, name in _listed(pool) if name != write.name}
        for kind, name in others:
            other = self._cluster.read(MEMBER_KINDS[kind], write.namespace, name)
            if other is not None and _asked(other) is not None and _wants(other) > 0:
                yield f"S1: {write.name} was started and {name} is asked to be up"
        names = {name for _, name in others}
        for pod in self._cluster.all(PODS):
            name = member_of_pod(self._cluster, pod)
            if name in names and not is_finished(pod):
                yield f"S1: {write.name} was started and {name} has {pod['metadata']['name']}"


def member_of_pod(cluster: MemCluster, pod: Json) -> str:
    """Return the name of the Deployment or StatefulSet that *pod* belongs to."""
    owner = controller_of(pod)
    if owner is None:
        return ""
    if owner["kind"] == "ReplicaSet":
        found = cluster.read(REPLICASETS, pod["metadata"]["namespace"], owner["name"])
        above = None if found is None else controller_of(found)
        return "" if above is None else str(above["name"])
    return str(owner["name"])


def up(cluster: MemCluster) -> set[str]:
    """Return the members of which a Pod holds a device."""
    return {member_of_pod(cluster, pod) for pod in cluster.all(PODS) if runs(pod)}


def is_renewal(write: Write) -> bool:
    """Return whether *write* says nothing but that somebody still holds a Lease."""
    if write.kind != LEASES or write.before is None or write.after is None:
        return False
    old, new = write.before, write.after
    notes = old["metadata"].get("annotations") == new["metadata"].get("annotations")
    return bool(notes and _holder(old) == _holder(new))


def _listed(pool: Json) -> set[tuple[str, str]]:
    """Return kind and name of the objects that *pool* lists."""
    kinds = {f"{kind[0].lower()}{kind[1:]}Ref": kind for kind in MEMBER_KINDS}
    return {
        (kinds[key], ref["name"])
        for each in pool["spec"]["members"]
        for key, ref in each.items()
        if key in kinds
    }


def _holder(lease: Json) -> str:
    return str((lease.get("spec") or {}).get("holderIdentity") or "")


def _said_out_loud(write: Write) -> bool:
    """Whether a service that said nothing about replicas now says what it has, and no more."""
    assert write.before is not None and write.after is not None
    old, new = write.before, write.after
    return (
        _asked(old) is None
        and _asked(new) in (0, 1)
        and annotation(old, SLOT_ANNOTATION) == annotation(new, SLOT_ANNOTATION)
    )


def _asked(obj: Json) -> int | None:
    """Return the number that stands there; None: it is the controller's to say."""
    spec = obj.get("spec") or {}
    if "suspend" in spec:
        return 0 if spec["suspend"] else 1
    found = spec.get("replicas")
    return None if found is None else int(found)


def _wants(obj: Json) -> int:
    found = _asked(obj)
    return 1 if found is None else found


def _without_ours(obj: Json) -> Json:
    meta = _but(obj["metadata"], "annotations", "resourceVersion", "generation")
    notes = _but(obj["metadata"].get("annotations") or {}, SLOT_ANNOTATION)
    spec = _but(obj.get("spec") or {}, "replicas", "suspend")
    return {"meta": meta, "notes": notes, "spec": spec}


def _but_finalizers(obj: Json) -> Json:
    meta = _but(obj["metadata"], "finalizers", "resourceVersion", "generation")
    return {"meta": meta, "spec": obj.get("spec")}


def _but_held(obj: Json) -> Json:
    meta = _but(obj["metadata"], "annotations", "resourceVersion")
    notes = _but(obj["metadata"].get("annotations") or {}, RECORD_ANNOTATION)
    keys = (
        "holderIdentity",
        "renewTime",
        "acquireTime",
        "leaseTransitions",
        "leaseDurationSeconds",
    )
    return {"meta": meta, "notes": notes, "spec": _but(obj.get("spec") or {}, *keys)}


def _but(values: Json, *keys: str) -> Json:
    return {key: value for key, value in values.items() if key not in keys}


__all__ = ["OperatorChecks", "is_renewal", "member_of_pod", "up"]
