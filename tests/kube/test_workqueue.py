"""The work queue: once at a time, never forgotten, patient after failures."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from modelpool_kube import errors
from modelpool_kube.workqueue import WorkQueue, work

pytestmark = pytest.mark.looptime(idle_timeout=100_000)


@pytest.fixture
def queue() -> WorkQueue[str]:
    """An empty queue."""
    return WorkQueue(rng=random.Random(1))


@contextlib.asynccontextmanager
async def working(
    queue: WorkQueue[str], reconcile: Callable[[str], Awaitable[float | None]], workers: int = 2
) -> AsyncIterator[None]:
    """Run workers."""
    task = asyncio.get_running_loop().create_task(work(queue, reconcile, workers=workers))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_what_is_asked_for_twice_is_done_once(queue: WorkQueue[str]) -> None:
    for key in ("a", "b", "a"):
        queue.add(key)

    assert len(queue) == 2
    assert [await queue.take(), await queue.take()] == ["a", "b"]


async def test_what_is_asked_for_during_the_work_is_done_again(queue: WorkQueue[str]) -> None:
    queue.add("a")
    await queue.take()
    queue.add("a")
    queue.add("a")
    assert len(queue) == 0
    queue.done("a")

    assert await queue.take() == "a"
    queue.done("a")
    assert len(queue) == 0


async def test_one_key_is_never_worked_on_twice_at_once(queue: WorkQueue[str]) -> None:
    busy: set[str] = set()
    most = runs = 0

    async def reconcile(key: str) -> float | None:
        nonlocal most, runs
        assert key not in busy
        busy.add(key)
        most, runs = max(most, len(busy)), runs + 1
        await asyncio.sleep(1)
        busy.discard(key)
        return None

    async with working(queue, reconcile, workers=3):
        for _ in range(20):
            for key in ("a", "b"):
                queue.add(key)
            await asyncio.sleep(0.3)
        await asyncio.sleep(3)

    assert most == 2
    assert 8 <= runs <= 14


async def test_later_is_later_and_the_sooner_request_counts(queue: WorkQueue[str]) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    queue.add("a", 60)
    queue.add("a", 10)
    queue.add("a", 30)

    assert await queue.take() == "a"
    assert loop.time() - began == pytest.approx(10)
    queue.done("a")
    queue.add("a", 60)
    queue.add("a")
    await queue.take()
    queue.done("a")
    await asyncio.sleep(120)
    assert len(queue) == 0


async def test_failures_are_tried_again_with_growing_pauses_and_success_ends_them(
    queue: WorkQueue[str], caplog: pytest.LogCaptureFixture
) -> None:
    times: list[float] = []
    loop = asyncio.get_running_loop()

    async def reconcile(key: str) -> float | None:
        times.append(loop.time())
        if len(times) <= 12:
            raise ValueError("poison")
        return None

    with caplog.at_level(logging.CRITICAL):
        async with working(queue, reconcile):
            queue.add("a")
            await asyncio.sleep(1000)
            pauses = [b - a for a, b in zip(times, times[1:], strict=False)]
            assert len(times) == 13
            assert 0.12 <= pauses[0] <= 0.25
            assert pauses[5] > pauses[2] > pauses[0]
            assert all(30 <= pause <= 60 for pause in pauses[9:])
            queue.retry("a")  # after a success it begins anew
            await asyncio.sleep(0.26)

    assert len(times) == 14


async def test_a_poison_key_does_not_slow_down_the_others(
    queue: WorkQueue[str], caplog: pytest.LogCaptureFixture
) -> None:
    done: list[str] = []

    async def reconcile(key: str) -> float | None:
        if key == "poison":
            raise RuntimeError(key)
        done.append(key)
        return None

    with caplog.at_level(logging.CRITICAL):
        async with working(queue, reconcile, workers=1):
            queue.add("poison")
            for number in range(50):
                queue.add(f"k{number}")
            await asyncio.sleep(0.01)

    assert len(done) == 50


async def test_a_server_that_says_when_is_heeded(queue: WorkQueue[str]) -> None:
    times: list[float] = []

    async def reconcile(key: str) -> float | None:
        times.append(asyncio.get_running_loop().time())
        if len(times) == 1:
            raise errors.Unavailable("busy", code=429, retry_after_s=20)
        return None

    async with working(queue, reconcile):
        queue.add("a")
        await asyncio.sleep(60)

    assert times[1] - times[0] == pytest.approx(20)


async def test_work_that_wants_to_look_again_does(queue: WorkQueue[str]) -> None:
    times: list[float] = []

    async def reconcile(key: str) -> float | None:
        times.append(asyncio.get_running_loop().time())
        return 2.0

    async with working(queue, reconcile):
        queue.add("a")
        await asyncio.sleep(9)

    assert [round(each - times[0]) for each in times] == [0, 2, 4, 6, 8]


async def test_conflicts_are_ordinary_and_not_logged(
    queue: WorkQueue[str], caplog: pytest.LogCaptureFixture
) -> None:
    calls = 0

    async def reconcile(key: str) -> float | None:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise errors.Conflict("changed")
        return None

    async with working(queue, reconcile):
        queue.add("a")
        await asyncio.sleep(5)

    assert calls == 3
    assert caplog.records == []


async def test_a_waker_that_is_cancelled_passes_its_turn_on(queue: WorkQueue[str]) -> None:
    loop = asyncio.get_running_loop()
    first, second = loop.create_task(queue.take()), loop.create_task(queue.take())
    await asyncio.sleep(0)
    queue.add("a")
    first.cancel()

    async with asyncio.timeout(1):
        assert await second == "a"
    with contextlib.suppress(asyncio.CancelledError):
        await first
    assert first.cancelled()


async def test_closing_drops_timers(queue: WorkQueue[str]) -> None:
    queue.add("a", 5)
    queue.close()
    await asyncio.sleep(10)

    assert len(queue) == 0
