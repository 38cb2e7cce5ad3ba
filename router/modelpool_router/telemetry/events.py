"""
Events for whoever watches, and the swaps of the recent past.

`EventHub.publish` is called for every note of a scheduler, in the event loop's thread. It never
waits: each subscriber has a bounded queue, and one that falls behind is told that it missed
something instead of being fed everything late.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from ..core.commands import Note, NoteKind
from ..core.spec import PoolName
from ..core.view import PoolView

KEPT_EVENTS = 512
KEPT_SWAPS = 200
QUEUED_EVENTS = 256
"""Per subscriber."""
MAX_SUBSCRIBERS = 64

Fields = Mapping[str, str | float | int]


@dataclass(frozen=True, slots=True)
class Event:
    """One note of a scheduler, with the pool as it was right after."""

    id: str
    """``<start of this router>-<number>``: an id of an earlier process is told from ours."""
    at: float
    """Unix time."""
    kind: str
    pool: str
    fields: Fields
    view: PoolView

    def encoded(self) -> bytes:
        """Return the event as JSON."""
        return msgspec.json.encode(self)


@dataclass(slots=True, kw_only=True)
class Swap:
    """One swap for the history; times are Unix times, durations seconds."""

    pool: str
    number: int
    source: str
    """Empty when the slot was."""
    target: str
    cause: str
    started_at: float
    """When the unload, or the load into an empty slot, began; a drain came before."""
    waiting: int = 0
    """Requests of the pool that waited when it began."""
    ended_at: float | None = None
    outcome: str = "running"
    """running | completed | failed | abandoned."""
    drain_s: float | None = None
    unload_s: float | None = None
    load_s: float | None = None
    granted: int = 0
    """Requests granted as it landed."""
    reason: str = ""
    """Of a failure."""


class SubscriptionsFull(Exception):
    """`MAX_SUBSCRIBERS` are listening already."""


@dataclass(slots=True, eq=False)
class Subscription:
    """One listener. Take with `next`; *resumed* tells whether nothing was missed so far."""

    resumed: bool
    closed: bool = False
    """Nothing comes any more: the router goes down."""
    _queue: deque[Event] = field(default_factory=deque)
    _some: asyncio.Event = field(default_factory=asyncio.Event)
    _missed: bool = False

    async def next(self) -> Event | None:
        """
        Wait for the next event; None = a fresh look is needed.

        That is: some were missed because they were not taken in time, or *closed* is set. Safe
        to cancel: no event is lost.
        """
        while not (self._queue or self._missed or self.closed):
            self._some.clear()
            await self._some.wait()
        if self._missed or not self._queue:
            self._missed = False
            return None
        return self._queue.popleft()

    def take(self) -> Iterator[Event]:
        """Yield what is queued already."""
        while self._queue:
            yield self._queue.popleft()

    def offer(self, event: Event) -> None:
        """Queue *event*; when the queue is full all that waits in it is given up."""
        if len(self._queue) >= QUEUED_EVENTS:
            self._queue.clear()
            self._missed = True
        self._queue.append(event)
        self._some.set()

    def close(self) -> None:
        """Let the listener end."""
        self.closed = True
        self._some.set()


class EventHub:
    """Hands events to subscribers, keeps the last ones, and the last swaps."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._boot = f"{int(clock() * 1000):x}"
        self._last = 0
        self._kept: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self._subscriptions: set[Subscription] = set()
        self._closed = False
        self._running: dict[str, Swap] = {}
        self._finished: deque[Swap] = deque(maxlen=KEPT_SWAPS)

    @property
    def last_id(self) -> str:
        """Id of the newest event; number 0 before the first."""
        return f"{self._boot}-{self._last}"

    def publish(self, pool: PoolName, note: Note, view: PoolView) -> None:
        """Tell everybody; *view* is the pool right after *note*."""
        self._last += 1
        event = Event(self.last_id, self._clock(), str(note.kind), str(pool), note.fields, view)
        self._kept.append(event)
        for subscription in self._subscriptions:
            subscription.offer(event)
        self._record(str(pool), note)

    @contextmanager
    def subscribe(self, last_id: str | None = None) -> Iterator[Subscription]:
        """
        Listen until the end of the block.

        With the *last_id* that somebody saw, the events since then are queued first;
        ``resumed`` is False when they are not all known any more.

        Raises:
            SubscriptionsFull: too many listen.
        """
        if len(self._subscriptions) >= MAX_SUBSCRIBERS:
            raise SubscriptionsFull
        missed = self._since(last_id)
        subscription = Subscription(missed is not None, self._closed, deque(missed or ()))
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)

    def close(self) -> None:
        """Let all listeners end, and those who come later. Idempotent."""
        self._closed = True
        for subscription in self._subscriptions:
            subscription.close()

    def swaps(self) -> list[Swap]:
        """Return the running swaps, then the finished ones, newest first."""
        return [*self._running.values(), *reversed(self._finished)]

    def _since(self, last_id: str | None) -> list[Event] | None:
        if last_id is None:
            return None
        boot, _, number = last_id.partition("-")
        if boot != self._boot or not number.isdecimal() or len(number) > 18:
            return None
        seen = int(number)
        missing = self._last - seen
        if not 0 <= missing <= len(self._kept):
            return None
        return list(self._kept)[len(self._kept) - missing :]

    def _record(self, pool: str, note: Note) -> None:
        fields = note.fields
        match note.kind:
            case NoteKind.SWAP_STARTED:
                self._end(pool, "abandoned")
                self._running[pool] = self._swap(pool, fields)
            case NoteKind.SWAP_COMPLETED:
                swap = self._running.get(pool) or self._swap(pool, fields)
                self._running[pool] = swap
                # Between unload and load the target is chosen again.
                swap.target = str(fields["target"])
                swap.drain_s = float(fields["drain_s"])
                swap.unload_s = float(fields["unload_s"])
                swap.load_s = float(fields["load_s"])
                swap.granted = int(fields.get("granted", 0))
                self._end(pool, "completed")
            case NoteKind.LOAD_FAILED:
                self._end(pool, "failed", str(fields.get("reason", "")))
            case NoteKind.TURN_REOPENED | NoteKind.RELEASED:
                self._end(pool, "abandoned")
            case _:
                pass

    def _swap(self, pool: str, fields: Fields) -> Swap:
        return Swap(
            pool=pool,
            number=int(fields.get("swap", 0)),
            source=str(fields.get("source", "")),
            target=str(fields.get("target", "")),
            cause=str(fields.get("cause", "")),
            started_at=self._clock(),
            waiting=int(fields.get("waiting", 0)),
        )

    def _end(self, pool: str, outcome: str, reason: str = "") -> None:
        swap = self._running.pop(pool, None)
        if swap is not None:
            swap.ended_at = self._clock()
            swap.outcome = outcome
            swap.reason = reason
            self._finished.append(swap)
