"""
Looking: everything that one plan needs, read once and most-recent.

Reports of watches only say when to look. What is decided on is always read from the server, in
the order in which the proof that a member is gone wants it: objects, ReplicaSets, then Pods.
"""

from __future__ import annotations

from collections.abc import Iterable

from modelpool_api.names import SLOT_ANNOTATION, lease_name
from modelpool_api.v1alpha1.inferenceservice import InferenceService
from modelpool_api.v1alpha1.modelpool import ModelPool
from modelpool_api.v1alpha1.modelrouter import ModelRouter
from modelpool_kube.errors import NotFound, NotServed
from modelpool_kube.kinds import (
    AUTOSCALERS,
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    LEASES,
    MODEL_DEPLOYMENTS,
    MODEL_POOLS,
    MODEL_ROUTERS,
    PODS,
    REPLICASETS,
    SERVICES,
    STATEFULSETS,
    WORKLOADS,
    Json,
    Kind,
    annotation,
)
from modelpool_kube.lease import view
from modelpool_kube.port import ClusterPort
from modelpool_kube.record import Frozen, SlotId, decode, read_mark
from modelpool_kube.slotrules import Member

from ..plan import inferenceservice, render
from ..plan.inferenceservice import ObservedService
from ..plan.modelrouter import CHILDREN, ObservedRouter
from ..plan.observedpool import LeaseSeen, Namespace, ObservedPool, SessionSeen, lists
from .acting import Key
from .memory import LeaseMemory, ScaleMemory

MEMBER_ORDER = (INFERENCE_SERVICES, MODEL_DEPLOYMENTS, STATEFULSETS, DEPLOYMENTS)
"""Deployments last: they are below InferenceServices."""


class Observer:
    """Reads what plans need from *port*."""

    def __init__(self, port: ClusterPort) -> None:
        self._port = port

    async def get(self, kind: Kind, namespace: str, name: str) -> Json | None:
        """Return an object, or None."""
        try:
            return await self._port.get(kind, namespace, name)
        except NotFound:
            return None

    async def all(self, kind: Kind, namespace: str, *, labels: str = "") -> tuple[Json, ...]:
        """Return all objects of *kind*; none when the server does not know the kind."""
        try:
            return (await self._port.list(kind, namespace, labels=labels)).items
        except NotServed:
            return ()

    async def namespace(self, namespace: str, *, with_workloads: bool) -> Namespace:
        """Return what members are made of, in the order of the proof."""
        objects = {}
        for kind in MEMBER_ORDER:
            objects[kind] = await self.all(kind, namespace)
        replica_sets = await self.all(REPLICASETS, namespace)
        pods = await self.all(PODS, namespace)
        workloads = await self.all(WORKLOADS, namespace) if with_workloads else ()
        return Namespace(objects, replica_sets, pods, workloads)

    async def pools(self, namespace: str) -> tuple[ModelPool, ...]:
        """Return all pools of a namespace that can be read."""
        found = []
        for obj in await self.all(MODEL_POOLS, namespace):
            try:
                found.append(ModelPool.model_validate(obj))
            except ValueError:
                continue  # its own controller says so
        return tuple(found)

    async def pool(
        self,
        key: Key,
        *,
        holder: str,
        leases: LeaseMemory,
        scales: ScaleMemory,
        session: SessionSeen,
    ) -> ObservedPool | None:
        """Return everything about one pool; None when there is none."""
        namespace, name = key
        obj = await self.get(MODEL_POOLS, namespace, name)
        if obj is None:
            return None
        pool = ModelPool.model_validate(obj)
        others = tuple(each for each in await self.pools(namespace) if each.metadata.name != name)
        lease = await self.get(LEASES, namespace, lease_name(name))
        now = self._port.now()
        free_for = leases.free_for(lease, holder, now)
        seen = None if lease is None else _lease(lease, holder, free_for)
        has_workloads = any(each.kind == MODEL_DEPLOYMENTS.kind for each in pool.spec.members)
        around = await self.namespace(namespace, with_workloads=has_workloads)
        members, removed = around.observed(pool, _forgotten(seen))
        is_quiet = free_for is not None and not session.is_open
        return ObservedPool(
            pool=pool,
            obj=obj,
            now=self._port.wall(),
            lease=seen,
            members=members,
            removed=removed,
            other_pools=others,
            autoscalers=await self.all(AUTOSCALERS, namespace),
            contested=scales.look(members, now, is_quiet=is_quiet),
            session=session,
        )

    async def service(self, key: Key) -> ObservedService | None:
        """Return everything about one InferenceService; None when there is none."""
        namespace, name = key
        # Below before above: what was written above after our look below is on its way, and the
        # condition on the version below keeps an old decision from landing over a newer one.
        deployment = await self.get(DEPLOYMENTS, namespace, name)
        obj = await self.get(INFERENCE_SERVICES, namespace, name)
        if obj is None:
            return None
        labels = render.selector_labels(inferenceservice.COMPONENT, name)
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        pools = sorted(
            each.metadata.name
            for each in await self.pools(namespace)
            if lists(each, INFERENCE_SERVICES, name) and not each.metadata.is_going
        )
        return ObservedService(
            service=InferenceService.model_validate(obj),
            obj=obj,
            now=self._port.wall(),
            deployment=deployment,
            front=await self.get(SERVICES, namespace, name),
            pods=await self.all(PODS, namespace, labels=selector),
            pool=pools[0] if pools else None,
            live_slots=await self._live_slots(obj, deployment),
        )

    async def _live_slots(self, obj: Json, deployment: Json | None) -> frozenset[SlotId]:
        """Return the slot of the mark below if the one above is missing and its Lease exists."""
        if deployment is None or read_mark(annotation(obj, SLOT_ANNOTATION)) is not None:
            return frozenset()
        mark = read_mark(annotation(deployment, SLOT_ANNOTATION))
        if mark is None or await self.get(LEASES, mark.slot.namespace, mark.slot.lease) is None:
            return frozenset()
        return frozenset({mark.slot})

    async def router(self, key: Key, *, default_image: str) -> ObservedRouter | None:
        """Return everything about one ModelRouter; None when there is none."""
        namespace, name = key
        obj = await self.get(MODEL_ROUTERS, namespace, name)
        if obj is None:
            return None
        router = ModelRouter.model_validate(obj)
        pools = []
        for each in router.spec.pools:
            found = await self.get(MODEL_POOLS, namespace, each.name)
            if found is not None:
                pools.append(ModelPool.model_validate(found))
        children = []
        for kind in CHILDREN:
            children.append((kind, await self.get(kind, namespace, name)))
        return ObservedRouter(
            router=router,
            obj=obj,
            now=self._port.wall(),
            default_image=default_image,
            pools=tuple(pools),
            former=await self._former(namespace, pools),
            children=tuple(children),
        )

    async def _former(self, namespace: str, pools: Iterable[ModelPool]) -> tuple[Member, ...]:
        objects = {kind: await self.all(kind, namespace) for kind in MEMBER_ORDER}
        around = Namespace(objects, (), ())
        return tuple(each.member for pool in pools for each in around.observed(pool)[1])


def _lease(obj: Json, holder: str, free_for_s: float | None) -> LeaseSeen:
    seen = view(obj)
    return LeaseSeen(
        obj=obj,
        holder=seen.holder,
        is_ours=seen.holder == holder,
        free_for_s=free_for_s,
        text=seen.text,
    )


def _forgotten(lease: LeaseSeen | None) -> frozenset[str]:
    try:
        record = None if lease is None else decode(lease.text)
    except Frozen:
        return frozenset()
    return frozenset() if record is None else frozenset(record.forgotten)
