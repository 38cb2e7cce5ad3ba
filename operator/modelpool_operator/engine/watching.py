"""
Watches, and which object to look at again after a report.

A report only wakes: nothing is decided from it. Reports that say nothing new to a plan (our own
status writes, renewals of Leases) wake nobody. Pods of other people's Deployments are not
watched, because a cluster has many; a pool that is on the move looks again by itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from modelpool_api.names import (
    APP_INSTANCE_LABEL,
    APP_MANAGED_BY_LABEL,
    OPERATOR_MANAGER,
    PART_OF,
    RECORD_ANNOTATION,
    SLOT_ANNOTATION,
)
from modelpool_kube.kinds import (
    AUTOSCALERS,
    CONFIGMAPS,
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    INSTANCE_TYPES,
    LEASES,
    MODEL_DEPLOYMENTS,
    MODEL_POOLS,
    MODEL_ROUTERS,
    PODS,
    ROLE_BINDINGS,
    ROLES,
    SERVICE_ACCOUNTS,
    SERVICES,
    STATEFULSETS,
    WORKLOADS,
    Json,
    Kind,
    annotation,
    controller_of,
    meta,
    uid,
)
from modelpool_kube.lease import view
from modelpool_kube.port import ClusterPort
from modelpool_kube.record import read_mark
from modelpool_kube.watch import Notice, Reflector, key_of

from . import modeldeployment
from .acting import Key

OURS = f"{APP_MANAGED_BY_LABEL} in ({OPERATOR_MANAGER},{PART_OF})"
ALL = (
    MODEL_POOLS,
    INFERENCE_SERVICES,
    MODEL_ROUTERS,
    MODEL_DEPLOYMENTS,
    DEPLOYMENTS,
    STATEFULSETS,
    AUTOSCALERS,
    INSTANCE_TYPES,
    WORKLOADS,
)
"""Kinds of which every object is watched."""
LABELLED = (PODS, SERVICES, CONFIGMAPS, SERVICE_ACCOUNTS, ROLES, ROLE_BINDINGS, LEASES)
"""Kinds of which only what we made is watched."""
PREFIX = "modelpool-"


class Wakes(Protocol):
    """Who is told what to look at again."""

    def wake(self, kind: Kind, key: Key) -> None:
        """Look at the object *key* of *kind* again."""
        ...


class Watching:
    """All watches of the operator in one namespace, or in all of them."""

    def __init__(
        self,
        port: ClusterPort,
        namespace: str | None,
        wakes: Wakes,
        *,
        lease_seen: Callable[[Json], None] = lambda obj: None,
        rng: random.Random | None = None,
    ) -> None:
        self._wakes = wakes
        self._lease_seen = lease_seen
        rng = rng or random.Random()
        self.reflectors: dict[Kind, Reflector] = {
            kind: Reflector(
                port,
                kind,
                namespace,
                notify=self._notify(kind),
                labels=OURS if kind in LABELLED else "",
                rng=rng,
            )
            for kind in (*ALL, *LABELLED)
        }

    def resync(self) -> None:
        """Look at everything again."""
        for kind in (MODEL_POOLS, INFERENCE_SERVICES, MODEL_ROUTERS, MODEL_DEPLOYMENTS):
            for key in self.reflectors[kind].items:
                self._wakes.wake(kind, key)

    def _notify(self, kind: Kind) -> Callable[[Notice], None]:
        def notified(notice: Notice) -> None:
            if kind == LEASES:
                self._lease_seen(notice.object)
            for each, key in woken(kind, notice, self._items):
                self._wakes.wake(each, key)

        return notified

    def _items(self, kind: Kind) -> Mapping[Key, Json]:
        return self.reflectors[kind].items


Items = Callable[[Kind], Mapping[Key, Json]]


def woken(kind: Kind, notice: Notice, items: Items) -> Iterator[tuple[Kind, Key]]:
    """Yield what is to be looked at again after *notice* of an object of *kind*."""
    obj = notice.object
    key = key_of(obj)
    namespace = key[0]
    if kind == LEASES:
        if key[1].startswith(PREFIX) and _lease_changed(notice):
            yield MODEL_POOLS, (namespace, key[1].removeprefix(PREFIX))
        return
    if kind == AUTOSCALERS:
        if _is_about_spec(notice):
            yield from ((MODEL_POOLS, each) for each in _of(namespace, items(MODEL_POOLS)))
        return
    if kind in (MODEL_POOLS, MODEL_ROUTERS) and not _is_about_spec(notice):
        return
    if kind == MODEL_POOLS:
        # The others of the namespace may share a member with it.
        yield from ((MODEL_POOLS, each) for each in {key, *_of(namespace, items(MODEL_POOLS))})
        for each in (obj, notice.before or {}):
            for name in _listed(each, "inferenceServiceRef"):
                yield INFERENCE_SERVICES, (namespace, name)
        yield from _routers_of(key, items(MODEL_ROUTERS))
        return
    if kind == MODEL_ROUTERS:
        yield kind, key
        return
    if kind == INSTANCE_TYPES:
        for found in modeldeployment.keys_of_type(notice, items(MODEL_DEPLOYMENTS)):
            yield MODEL_DEPLOYMENTS, found
        return
    if kind == WORKLOADS:
        for found in modeldeployment.keys_of_workload(notice, items(PODS).values()):
            yield MODEL_DEPLOYMENTS, found
        return
    if kind in (PODS, SERVICES):
        for found in modeldeployment.key_of_child(notice):
            yield MODEL_DEPLOYMENTS, found
    if kind == MODEL_DEPLOYMENTS:
        for found in modeldeployment.key_of_deployment(notice):
            yield kind, found
    if kind == PODS:
        component = (meta(obj).get("labels") or {}).get(APP_INSTANCE_LABEL)
        if component:
            yield INFERENCE_SERVICES, (namespace, str(component))
        return
    if kind == INFERENCE_SERVICES and _is_about_spec(notice):
        yield kind, key
    owner = controller_of(obj)
    if owner is not None and owner.get("kind") in _OWNERS:
        yield _OWNERS[owner["kind"]], (namespace, str(owner.get("name")))
    yield from ((MODEL_POOLS, each) for each in _pools_of(kind, obj, items(MODEL_POOLS)))
    # A router may scale whatever carries the mark of its pool.
    before, after = _marked(notice.before), _marked(obj)
    if before != after:
        for pool in (before, after):
            if pool is not None:
                yield from _routers_of(pool, items(MODEL_ROUTERS))


_OWNERS = {each.kind: each for each in (INFERENCE_SERVICES, MODEL_ROUTERS)}
_REFS = {
    INFERENCE_SERVICES: ("inferenceServiceRef",),
    MODEL_DEPLOYMENTS: ("modelDeploymentRef",),
    STATEFULSETS: ("statefulSetRef",),
    DEPLOYMENTS: ("deploymentRef", "inferenceServiceRef"),
}


def _pools_of(kind: Kind, obj: Json, pools: Mapping[Key, Json]) -> Iterable[Key]:
    """Return the pools that list *obj*, and the one whose mark it carries."""
    refs = _REFS.get(kind)
    if refs is None:
        return ()
    namespace, name = key_of(obj)
    found = {
        where
        for where, pool in pools.items()
        if where[0] == namespace and any(name in _listed(pool, ref) for ref in refs)
    }
    if (marked := _marked(obj)) is not None:
        found.add(marked)
    return sorted(found)


def _marked(obj: Json | None) -> Key | None:
    """Return the pool whose mark *obj* carries."""
    mark = None if obj is None else read_mark(annotation(obj, SLOT_ANNOTATION))
    if mark is None or not mark.slot.lease.startswith(PREFIX):
        return None
    return mark.slot.namespace, mark.slot.lease.removeprefix(PREFIX)


def _routers_of(pool: Key, routers: Mapping[Key, Json]) -> Iterator[tuple[Kind, Key]]:
    for where, router in routers.items():
        names = {each.get("name") for each in (router.get("spec") or {}).get("pools") or []}
        if where[0] == pool[0] and pool[1] in names:
            yield MODEL_ROUTERS, where


def _listed(pool: Json, ref: str) -> set[str]:
    members = (pool.get("spec") or {}).get("members") or []
    return {str((each.get(ref) or {}).get("name")) for each in members if each.get(ref)}


def _of(namespace: str, items: Mapping[Key, Json]) -> list[Key]:
    return [key for key in items if key[0] == namespace]


def _is_about_spec(notice: Notice) -> bool:
    """Whether more than the status changed."""
    if notice.before is None:
        return True
    old, new = meta(notice.before), meta(notice.object)
    return any(
        old.get(key) != new.get(key)
        for key in ("generation", "deletionTimestamp", "finalizers", "annotations", "labels")
    )


def _lease_changed(notice: Notice) -> bool:
    """Whether holder or record changed; a renewal alone says nothing new."""
    if notice.before is None or uid(notice.before) != uid(notice.object):
        return True
    old, new = view(notice.before), view(notice.object)
    return (old.holder, annotation(notice.before, RECORD_ANNOTATION)) != (
        new.holder,
        annotation(notice.object, RECORD_ANNOTATION),
    )
