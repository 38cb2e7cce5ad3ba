"""
Carrying out: one action, one status, the Events that go with it. No decisions.

A status is written only where it differs, and on condition that nobody has changed the object
since it was read; so a controller that was deposed cannot write an old one over a new one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from modelpool_kube.kinds import Json, Kind, meta, name_of, version_of
from modelpool_kube.port import ClusterPort

from ..plan.model import Create, Delete, Happened, Patch
from ..plan.render import replacing
from .events import EventRecorder

log = logging.getLogger(__name__)

Key = tuple[str, str]
"""Namespace and name."""


class Actor:
    """Writes to the cluster what plans say."""

    def __init__(self, port: ClusterPort, events: EventRecorder) -> None:
        self.port = port
        self._events = events

    async def write(self, action: Create | Patch | Delete) -> None:
        """Carry out an action on one object: one request."""
        match action:
            case Create(kind=kind, namespace=namespace, body=body):
                await self.port.create(kind, namespace, body)
                log.info("created %s %s/%s", kind.kind, namespace, body["metadata"]["name"])
            case Patch(kind=kind, namespace=namespace, name=name, patch=patch, version=version):
                await self.port.patch_merge(kind, namespace, name, patch, version=version)
                log.info("changed %s %s/%s", kind.kind, namespace, name)
            case Delete(kind=kind, namespace=namespace, name=name, uid=uid):
                await self.port.delete(kind, namespace, name, uid=uid)
                log.info("deleted %s %s/%s", kind.kind, namespace, name)

    async def report(
        self, kind: Kind, obj: Json, status: Json | None, events: Iterable[Happened]
    ) -> bool:
        """Write *status* if it differs from that of *obj*, then tell *events*; whether it did."""
        if status is None:
            return False
        old: Any = obj.get("status") or {}
        if old == status:
            return False
        await self.port.patch_status(
            kind,
            str(meta(obj).get("namespace", "")),
            name_of(obj),
            {"status": replacing(old, status)},
            version=version_of(obj),
        )
        for event in events:
            await self._events.tell(kind, obj, event)
        return True

    async def tell(self, kind: Kind, obj: Json, event: Happened | None) -> None:
        """Tell one Event, if there is one."""
        if event is not None:
            await self._events.tell(kind, obj, event)
