"""
A reflector: list, then watch, then again, and a cache of what was seen.

Rules, each of which somebody learned the hard way:

- Every watch is followed by a fresh list, at the latest after five minutes, so a lost event is
  made up for. On 410 there is nothing else to do anyway.
- No loop is ever hot: a watch that ends early is followed by a growing, jittered pause, whether
  it ended in peace or not.
- Versions of an object only grow. What comes late, twice or out of order is dropped.
- The same name with another UID is another object: the old one is reported as deleted first.
- A list from a server that lags behind what was seen already is not believed, unless it goes on
  saying so: then its history was really set back (restored from a backup).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .backoff import Backoff
from .errors import Gone, KubeError, Unavailable
from .kinds import Json, Kind, meta, uid, version_of
from .port import Change, ClusterPort, Listing, WatchEvent

log = logging.getLogger(__name__)

WATCH_S = (240.0, 300.0)
"""Between these the server is asked to end a watch; at random, so that they do not end at once."""
STEADY_S = 30.0
"""A watch that lasted so long was a success."""
FIRST_PAUSE_S = 0.5
MOST_PAUSE_S = 30.0
"""Also while the kind or the permission is missing: a person may have to do something first, but
most often the operator writes it into a Role within the same second."""
BELIEVED_AFTER = 5
"""Lists in a row that are behind until they are believed."""

Key = tuple[str, str]
"""Namespace (empty for cluster scope) and name."""


@dataclass(frozen=True, slots=True)
class Notice:
    """One change of the cache."""

    change: Change
    """ADDED, MODIFIED or DELETED."""
    object: Json
    """As it is now; for DELETED as it was last."""
    before: Json | None = None
    """As it was before a MODIFIED."""


def key_of(obj: Json) -> Key:
    """Return the key of *obj* in a cache."""
    found = meta(obj)
    return str(found.get("namespace", "")), str(found.get("name", ""))


class Reflector:
    """
    Keeps a cache of one kind and tells *notify* about every change of it.

    `run` is to be run by a task of the owner's, until it is cancelled. *notify* is called from
    that task; what it raises is logged and otherwise ignored.
    """

    def __init__(
        self,
        port: ClusterPort,
        kind: Kind,
        namespace: str | None,
        *,
        notify: Callable[[Notice], None],
        labels: str = "",
        fields: str = "",
        rng: random.Random | None = None,
    ) -> None:
        self.kind = kind
        self.synced = asyncio.Event()
        """Set when the cache has been filled for the first time."""
        self.trouble: KubeError | None = None
        """Why the cache may be out of date; None while it is kept up."""
        self._port = port
        self._namespace = namespace
        self._notify = notify
        self._labels = labels
        self._fields = fields
        self._rng = rng or random.Random()
        self._backoff = Backoff(self._rng, first_s=FIRST_PAUSE_S, most_s=MOST_PAUSE_S)
        self._items: dict[Key, Json] = {}
        self._gone: dict[str, str] = {}
        """Versions at which objects went, by UID, since the last list."""
        self._highest = 0
        self._behind = 0

    @property
    def items(self) -> Mapping[Key, Json]:
        """What was seen last, by namespace and name. Not to be changed."""
        return MappingProxyType(self._items)

    def get(self, namespace: str, name: str) -> Json | None:
        """Return an object of the cache, or None."""
        return self._items.get((namespace, name))

    async def run(self) -> None:
        """List and watch until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            wait_s: float | None = None
            try:
                await self._once()
                self.trouble = None
            except Gone:
                pass  # the next list is the cure
            except KubeError as error:
                if self.trouble is None:
                    log.warning("watch of %s interrupted: %s", self.kind.plural, error)
                self.trouble = error
                wait_s = error.retry_after_s
            if loop.time() - began >= STEADY_S:
                self._backoff.reset()
            await asyncio.sleep(self._backoff.next(wait_s))

    async def _once(self) -> None:
        listing = await self._port.list(
            self.kind, self._namespace, labels=self._labels, fields=self._fields
        )
        self._replace(listing)
        self.trouble = None
        self.synced.set()
        watching = self._port.watch(
            self.kind,
            self._namespace,
            since=listing.version,
            labels=self._labels,
            fields=self._fields,
            timeout_s=self._rng.uniform(*WATCH_S),
        )
        async with contextlib.aclosing(watching) as events:
            async for event in events:
                self._take(event)

    def _replace(self, listing: Listing) -> None:
        version = _number(listing.version)
        if version < self._highest:
            self._behind += 1
            if self._behind < BELIEVED_AFTER:
                raise Unavailable(
                    f"the list of {self.kind.plural} is at version {version}, "
                    f"and {self._highest} was seen already"
                )
            log.warning("the history of %s was set back; starting anew", self.kind.plural)
        self._behind = 0
        self._highest = version
        self._gone.clear()
        fresh = {key_of(obj): obj for obj in listing.items}
        for key in [key for key in self._items if key not in fresh]:
            self._tell(Notice(Change.DELETED, self._items.pop(key)))
        for key, obj in fresh.items():
            old = self._items.get(key)
            if old is None or uid(old) != uid(obj) or version_of(old) != version_of(obj):
                self._put(key, obj)

    def _take(self, event: WatchEvent) -> None:
        obj = event.object
        version = version_of(obj)
        self._highest = max(self._highest, _number(version))
        if event.change is Change.BOOKMARK:
            return
        key = key_of(obj)
        old = self._items.get(key)
        if not _is_newer(version, self._gone.get(uid(obj), "")):
            return
        if event.change is not Change.DELETED:
            if old is None or _is_newer(version, version_of(old)):
                self._put(key, obj)
            return
        self._gone[uid(obj)] = version
        if (
            old is not None
            and uid(old) == uid(obj)
            and _number(version_of(old)) <= _number(version)
        ):
            del self._items[key]
            self._tell(Notice(Change.DELETED, obj))

    def _put(self, key: Key, obj: Json) -> None:
        old = self._items.get(key)
        if old is not None and uid(old) != uid(obj):
            del self._items[key]
            self._tell(Notice(Change.DELETED, old))
            old = None
        self._items[key] = obj
        self._tell(Notice(Change.ADDED if old is None else Change.MODIFIED, obj, old))

    def _tell(self, notice: Notice) -> None:
        try:
            self._notify(notice)
        except Exception:  # one bad object must not stop the watch for all others
            log.exception("could not take in a change of %s", self.kind.plural)


def _number(version: str) -> int:
    """Return *version* for comparing; the API promises order since versions are numbers."""
    return int(version) if version.isascii() and version.isdigit() else 0


def _is_newer(version: str, than: str) -> bool:
    """Return whether *version* is newer; also true when that cannot be told."""
    first, second = _number(version), _number(than)
    return first > second or not first or not second
