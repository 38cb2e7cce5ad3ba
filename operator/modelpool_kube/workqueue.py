"""
A queue of keys to work on: each once at a time, later if asked, with patience after failures.

What has been asked for twice is done once. A key that is asked for while somebody works on it is
done again afterwards, because the work may have begun before the reason to ask.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from .backoff import Backoff
from .errors import Conflict, KubeError

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)

FIRST_PAUSE_S = 0.25
MOST_PAUSE_S = 60.0


class WorkQueue(Generic[K]):
    """Keys that wait for somebody. Made and used inside one event loop."""

    def __init__(
        self,
        *,
        rng: random.Random | None = None,
        first_s: float = FIRST_PAUSE_S,
        most_s: float = MOST_PAUSE_S,
    ) -> None:
        self._rng = rng or random.Random()
        self._first_s = first_s
        self._most_s = most_s
        self._ready: deque[K] = deque()
        self._waiting: set[K] = set()
        """Keys in `_ready`."""
        self._working: set[K] = set()
        self._again: set[K] = set()
        """Keys that were asked for while somebody works on them."""
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._backoffs: dict[K, Backoff] = {}
        self._wakers: dict[asyncio.Future[None], None] = {}
        """Those who wait, in order of arrival."""

    def __len__(self) -> int:
        return len(self._ready)

    def add(self, key: K, after_s: float = 0.0) -> None:
        """Ask for *key*, now or after *after_s*; the sooner of two requests counts."""
        if after_s > 0:
            loop = asyncio.get_running_loop()
            when = loop.time() + after_s
            timer = self._timers.get(key)
            if key in self._waiting or (timer is not None and timer.when() <= when):
                return
            if timer is not None:
                timer.cancel()
            self._timers[key] = loop.call_at(when, self.add, key)
            return
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        if key in self._working:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._ready.append(key)
            self._wake()

    def retry(self, key: K, at_least_s: float | None = None) -> float:
        """Ask for *key* again after a failure; return the pause, which grows per key."""
        backoff = self._backoffs.get(key)
        if backoff is None:
            backoff = Backoff(self._rng, first_s=self._first_s, most_s=self._most_s)
            self._backoffs[key] = backoff
        pause = backoff.next(at_least_s)
        self.add(key, pause)
        return pause

    def forget(self, key: K) -> None:
        """Forget the failures of *key*, after a success."""
        self._backoffs.pop(key, None)

    async def take(self) -> K:
        """Wait for a key and return it; `done` must follow."""
        while not self._ready:
            waker = asyncio.get_running_loop().create_future()
            self._wakers[waker] = None
            try:
                await waker
            except asyncio.CancelledError:
                if waker.done() and not waker.cancelled():
                    self._wake()  # it was meant for somebody who goes on
                raise
            finally:
                self._wakers.pop(waker, None)
        key = self._ready.popleft()
        self._waiting.discard(key)
        self._working.add(key)
        return key

    def done(self, key: K) -> None:
        """End the work on *key*."""
        self._working.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def close(self) -> None:
        """Drop all timers. What waits is forgotten with the queue."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _wake(self) -> None:
        for waker in self._wakers:
            if not waker.done():
                waker.set_result(None)
                return


async def work(
    queue: WorkQueue[K],
    reconcile: Callable[[K], Awaitable[float | None]],
    *,
    workers: int = 2,
) -> None:
    """
    Work on *queue* with *workers* tasks until cancelled.

    Args:
        queue: Keys.
        reconcile: Does what is to be done about a key; returns after how many seconds to look
            again, or None. What it raises is logged, and the key is tried again with growing
            pauses. It is never called twice at once for one key.
        workers: How many keys are worked on at once.
    """
    try:
        async with asyncio.TaskGroup() as group:
            for number in range(workers):
                group.create_task(_worker(queue, reconcile), name=f"worker-{number}")
    finally:
        queue.close()


async def _worker(queue: WorkQueue[K], reconcile: Callable[[K], Awaitable[float | None]]) -> None:
    while True:
        key = await queue.take()
        try:
            again_s = await reconcile(key)
        except Conflict:
            # Somebody else was faster; that is how it is meant to go.
            queue.retry(key)
        except KubeError as error:
            pause = queue.retry(key, error.retry_after_s)
            log.warning("%s: %s; again in %.1f s", key, error, pause)
        except Exception:  # one bad object must not stop the worker for all others
            pause = queue.retry(key)
            log.exception("%s failed; again in %.1f s", key, pause)
        else:
            queue.forget(key)
            if again_s is not None:
                queue.add(key, max(again_s, 0.001))
        finally:
            queue.done(key)
