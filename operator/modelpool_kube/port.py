"""
What reconcilers and drivers ask of a cluster. `client.KubeClient` is the real one.

Objects are plain JSON. Every call has a time limit of its own. Reads are most-recent: never
resourceVersion 0, so that what they say is true at some moment after the call began.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Protocol

from .kinds import Json, Kind


@dataclass(frozen=True, slots=True)
class Listing:
    """A list of objects, and the version of the world it was taken at."""

    items: tuple[Json, ...]
    version: str


class Change(StrEnum):
    """What a watch reports."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    BOOKMARK = "BOOKMARK"
    """Nothing but that everything up to this version has been reported."""


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One report of a watch; for BOOKMARK only the resourceVersion of *object* means something."""

    change: Change
    object: Json


class ClusterPort(Protocol):
    """
    An API server.

    Raises, everywhere: `errors.Refused` and below when the server refuses; `errors.Unavailable`
    when it cannot be asked; for writes `errors.Unanswered` when it may have happened.
    """

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Json:
        """Return one object. Raises NotFound."""
        ...

    async def list(
        self, kind: Kind, namespace: str | None, *, labels: str = "", fields: str = ""
    ) -> Listing:
        """Return all objects that match; *namespace* None means all of them."""
        ...

    def watch(
        self,
        kind: Kind,
        namespace: str | None,
        *,
        since: str,
        labels: str = "",
        fields: str = "",
        timeout_s: float = 270.0,
    ) -> AsyncGenerator[WatchEvent, None]:
        """
        Report changes after version *since*, bookmarks included, until the server ends it.

        Ends by itself after about *timeout_s*. Raises Gone when *since* is too old.
        """
        ...

    async def create(self, kind: Kind, namespace: str | None, body: Json) -> Json:
        """Create an object and return it as stored. Raises AlreadyExists."""
        ...

    async def patch_merge(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        patch: Json,
        *,
        version: str | None = None,
    ) -> Json:
        """
        Merge *patch* into an object and return it as stored; null removes a key.

        With *version* only if the object still has that resourceVersion, else Conflict. Status
        is not touched.
        """
        ...

    async def patch_status(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        patch: Json,
        *,
        version: str | None = None,
    ) -> Json:
        """Merge *patch* (``{"status": ...}``) into the status alone; otherwise like patch_merge."""
        ...

    async def delete(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        *,
        uid: str | None = None,
        version: str | None = None,
        grace_s: int | None = None,
    ) -> None:
        """
        Ask for an object to be deleted; dependants are collected in the background.

        Raises NotFound, and Conflict when it has another *uid* or *version*.
        """
        ...

    def now(self) -> float:
        """Return monotonic seconds, for deadlines."""
        ...

    def wall(self) -> datetime:
        """Return the aware UTC time, for people and other machines; never for deadlines."""
        ...
