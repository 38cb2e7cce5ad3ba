"""What is looked at for one ModelPool: a snapshot, `now` included. Nothing here asks anybody."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType

from modelpool_api.names import SLOT_ANNOTATION, lease_name
from modelpool_api.v1alpha1.modelpool import ModelPool, PoolMember
from modelpool_kube.kinds import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    MEMBER_KINDS,
    MODEL_DEPLOYMENTS,
    Json,
    Kind,
    annotation,
    controller_of,
    is_controlled_by,
    name_of,
    uid,
)
from modelpool_kube.record import Frozen, Phase, SlotId, SlotRecord, decode, read_mark
from modelpool_kube.slotrules import Facts, Look, Member

from .members import ObservedMember
from .model import Idle

OPERATOR_EPOCH = "operatorEpoch"
ROUTED = "routed"
"""Fields of ours in the record: the epoch that the operator began, and whether a router held the
slot before. A router begins an epoch of its own whenever it gets the Lease."""


@dataclass(frozen=True, slots=True)
class LeaseSeen:
    """The Lease of the pool, and for how long nobody else has held it."""

    obj: Json
    holder: str
    """As it is written; empty when it was given back."""
    is_ours: bool
    """Whether the holder is this operator."""
    free_for_s: float | None
    """Seconds for which no other has held it, on our own clock; None while one does."""
    text: str | None
    """The record as it is written."""


@dataclass(frozen=True, slots=True)
class SessionSeen:
    """Our own hold on the slot."""

    is_open: bool = False
    """Whether there is anything to give back."""
    is_held: bool = False
    epoch: int | None = None
    """Epoch that we began and marked every member with; None before that."""
    age_s: float = 0.0
    pause_s: float = 0.0
    """Seconds for which we should not try to get it again."""


@dataclass(frozen=True, slots=True)
class ObservedPool:
    """One pool and everything that a decision about it needs."""

    pool: ModelPool
    obj: Json
    """The same, as it was read."""
    now: datetime
    lease: LeaseSeen | None
    members: tuple[ObservedMember, ...]
    removed: tuple[ObservedMember, ...] = ()
    """Objects with our mark that the pool does not list any more."""
    other_pools: tuple[ModelPool, ...] = ()
    """Of the same namespace."""
    autoscalers: tuple[Json, ...] = ()
    contested: frozenset[str] = frozenset()
    """Members whose replicas somebody else keeps changing."""
    idle: Mapping[str, Idle] = field(default_factory=lambda: MappingProxyType({}))
    """What members said about their work in this very observation, by name."""
    session: SessionSeen = SessionSeen()

    @property
    def slot(self) -> SlotId:
        """The slot."""
        return slot_of(self.pool)

    @property
    def record(self) -> SlotRecord | None:
        """
        What the record says; None when there is none.

        Raises:
            Frozen: it cannot be read.
        """
        return None if self.lease is None else decode(self.lease.text)

    @property
    def frozen(self) -> str | None:
        """Why the record must not be touched; None when it may."""
        try:
            _ = self.record
        except Frozen as error:
            return str(error)
        return None

    @property
    def router(self) -> str | None:
        """The Pod that may move the slot; None when no router may."""
        lease = self.lease
        if lease is None or lease.is_ours or lease.free_for_s is not None or not lease.holder:
            return None
        return lease.holder

    @property
    def was_routed(self) -> bool:
        """Whether a router ever held the slot, as far as the record goes."""
        try:
            record = self.record
        except Frozen:
            return True
        if record is None:
            return False
        mine = record.extra.get(OPERATOR_EPOCH)
        return mine != record.epoch or bool(record.extra.get(ROUTED))

    @property
    def default(self) -> str | None:
        """The default, if it is a member."""
        names = {each.name for each in self.members}
        return self.pool.spec.default if self.pool.spec.default in names else None

    def named(self, name: str | None) -> ObservedMember | None:
        """Return the member called *name*."""
        return next((each for each in self.members if each.name == name), None)

    @property
    def everybody(self) -> tuple[Member, ...]:
        """All members, former ones that still carry our mark included."""
        return tuple(each.member for each in (*self.members, *self.removed))


def slot_of(pool: ModelPool) -> SlotId:
    """Return the slot of *pool*."""
    return SlotId(pool.metadata.namespace, lease_name(pool.metadata.name))


def member_of(pool: ModelPool, spec: PoolMember) -> Member:
    """Return the member that *spec* names."""
    return Member(spec.member_name, MEMBER_KINDS[spec.kind], pool.metadata.namespace, spec.target)


def lists(pool: ModelPool, kind: Kind, target: str) -> bool:
    """Return whether *pool* lists the object *target* of *kind*."""
    return any(each.kind == kind.kind and each.target == target for each in pool.spec.members)


@dataclass(frozen=True, slots=True)
class Namespace:
    """All objects of one namespace that members are made of, read in the order of the proof."""

    objects: Mapping[Kind, tuple[Json, ...]]
    replica_sets: tuple[Json, ...]
    pods: tuple[Json, ...]
    workloads: tuple[Json, ...] = ()

    def facts(self, member: Member, forgotten: frozenset[str] = frozenset()) -> Facts:
        """Return what was read about *member*."""
        owner = None
        if member.kind == INFERENCE_SERVICES:
            owner = self._named(DEPLOYMENTS, member.target)
        return Facts(
            looked=tuple(Look),
            member=self._named(member.kind, member.target),
            owner=owner,
            replica_sets=self.replica_sets,
            pods=self.pods,
            workloads=self.workloads,
            forgotten=forgotten,
        )

    def _named(self, kind: Kind, name: str) -> Json | None:
        return next((each for each in self.objects.get(kind, ()) if name_of(each) == name), None)

    def observed(
        self, pool: ModelPool, forgotten: frozenset[str] = frozenset()
    ) -> tuple[tuple[ObservedMember, ...], tuple[ObservedMember, ...]]:
        """Return the members of *pool*, and its former members that still carry its mark."""
        members = []
        for spec in pool.spec.members:
            if spec.kind:
                member = member_of(pool, spec)
                members.append(ObservedMember(member, spec, self.facts(member, forgotten)))
        slot = slot_of(pool)
        removed: list[ObservedMember] = []
        for kind in (INFERENCE_SERVICES, MODEL_DEPLOYMENTS, *MEMBER_KINDS.values()):
            for obj in self.objects.get(kind, ()):
                mark = read_mark(annotation(obj, SLOT_ANNOTATION))
                if mark is None or mark.slot != slot or lists(pool, kind, name_of(obj)):
                    continue
                if self._is_below(kind, obj):
                    continue
                target = name_of(obj)
                former = Member(target, kind, pool.metadata.namespace, target)
                if all(each.member != former for each in removed):
                    removed.append(ObservedMember(former, None, self.facts(former, forgotten)))
        return tuple(members), tuple(removed)

    def _is_below(self, kind: Kind, obj: Json) -> bool:
        """Whether it is the Deployment of an InferenceService, whose mark is only passed on."""
        if kind != DEPLOYMENTS or controller_of(obj) is None:
            return False
        return any(
            is_controlled_by(obj, uid(each)) for each in self.objects.get(INFERENCE_SERVICES, ())
        )


HALF_DONE = (Phase.DRAINING, Phase.UNLOADING, Phase.LOADING)
"""Phases in which a router that died left something undone."""
