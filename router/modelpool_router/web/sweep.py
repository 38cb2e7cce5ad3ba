"""One timer for all deadlines of the data path: no timer, and no task, per request."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Watched(Protocol):
    """Something with deadlines of its own."""

    def check(self, now: float) -> None:
        """Look whether a deadline has passed; may add to and remove from the sweep."""
        ...


class Sweep:
    """
    Looks at everything it is given *interval_s* apart; sleeps while it has nothing.

    So a deadline is noticed up to one interval late, which is nothing beside limits of seconds.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: float) -> None:
        self._loop = loop
        self._interval_s = interval_s
        self._watched: set[Watched] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._watched)

    def add(self, watched: Watched) -> None:
        """Begin to look at *watched*."""
        self._watched.add(watched)
        if self._timer is None:
            self._timer = self._loop.call_later(self._interval_s, self._run)

    def discard(self, watched: Watched) -> None:
        """Stop looking at *watched*; no matter whether it was there."""
        self._watched.discard(watched)

    def close(self) -> None:
        """Forget everything."""
        self._watched.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _run(self) -> None:
        self._timer = None
        now = self._loop.time()
        for watched in tuple(self._watched):
            # one that was checked before may have taken this one out
            if watched in self._watched:
                watched.check(now)
        if self._watched and self._timer is None:
            self._timer = self._loop.call_later(self._interval_s, self._run)
