"""
Events: told once per change, counted when the same thing happens again.

They are for people, so one that cannot be written is logged and otherwise no trouble.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass

from modelpool_api.names import OPERATOR_MANAGER
from modelpool_kube.errors import KubeError, NotFound
from modelpool_kube.kinds import EVENTS, Json, Kind, meta, name_of, uid
from modelpool_kube.lease import micro_time
from modelpool_kube.port import ClusterPort

from ..plan.model import Happened

log = logging.getLogger(__name__)

WINDOW_S = 600.0
"""The same Event within this time is counted instead of told anew."""
MOST_KEPT = 4096
NOTE_LIMIT = 1024
"""Bytes that the API server takes."""


@dataclass(slots=True)
class _Told:
    name: str
    count: int
    at: float


class EventRecorder:
    """Writes Events in the name of *instance*."""

    def __init__(self, port: ClusterPort, instance: str) -> None:
        self._port = port
        self._instance = instance
        self._told: dict[tuple[str, str, str], _Told] = {}

    async def tell(self, kind: Kind, obj: Json, event: Happened) -> None:
        """Tell *event* about *obj*."""
        log.info("%s %s/%s: %s: %s", kind.kind, _where(obj), name_of(obj), event.reason, event.note)
        key = (uid(obj), event.reason, event.note)
        told = self._told.get(key)
        now = self._port.now()
        try:
            if told is not None and now - told.at < WINDOW_S:
                told.count += 1
                told.at = now
                try:
                    await self._count(obj, told)
                    return
                except NotFound:
                    pass  # it was thrown away after its hour
            await self._create(kind, obj, event, key, now)
        except KubeError as error:
            log.warning("could not write an Event: %s", error)

    async def _count(self, obj: Json, told: _Told) -> None:
        series = {"count": told.count, "lastObservedTime": micro_time(self._port.wall())}
        await self._port.patch_merge(EVENTS, _where(obj), told.name, {"series": series})

    async def _create(
        self, kind: Kind, obj: Json, event: Happened, key: tuple[str, str, str], now: float
    ) -> None:
        at = micro_time(self._port.wall())
        digest = hashlib.sha256("/".join((*key, at)).encode()).hexdigest()[:16]
        # 253 characters at most, and names have as many already.
        name = f"{name_of(obj)[:236]}.{digest}"
        body = EVENTS.body(
            name,
            _where(obj),
            eventTime=at,
            reportingController=OPERATOR_MANAGER,
            reportingInstance=self._instance[:128],
            action="Reconcile",
            reason=event.reason[:128],
            note=_cut(event.note),
            type="Warning" if event.is_warning else "Normal",
            regarding={
                "apiVersion": kind.api_version,
                "kind": kind.kind,
                "namespace": _where(obj),
                "name": name_of(obj),
                "uid": uid(obj),
            },
        )
        await self._port.create(EVENTS, _where(obj), body)
        while len(self._told) >= MOST_KEPT:
            self._told.pop(next(iter(self._told)))
        self._told[key] = _Told(name, 1, now)


def _where(obj: Json) -> str:
    # Events of what has no namespace go to the default one.
    return str(meta(obj).get("namespace") or "default")


def _cut(note: str) -> str:
    raw = note.encode()
    if len(raw) <= NOTE_LIMIT:
        return note
    return raw[: NOTE_LIMIT - 3].decode("utf-8", "ignore") + "..."
