"""Memory of big bodies goes back to the system, but not while more of them come."""

from __future__ import annotations

import asyncio

import pytest

from modelpool_router.app.heap import Trimmer, give_back


class Trims:
    def __init__(self) -> None:
        self.at: list[float] = []
        self.loop = asyncio.get_running_loop()

    def __call__(self) -> None:
        self.at.append(self.loop.time())


@pytest.mark.looptime
async def test_trims_once_after_the_last_of_several() -> None:
    trims = Trims()
    trimmer = Trimmer(trims.loop, quiet_s=1.0, trim=trims)

    for _ in range(5):
        trimmer.note()
        await asyncio.sleep(0.75)
    assert not trims.at
    await asyncio.sleep(60.0)
    await trimmer.close()

    assert len(trims.at) == 1
    assert 1.0 <= trims.at[0] - 3.0 <= 2.5


@pytest.mark.looptime
async def test_trims_again_after_the_next_one() -> None:
    trims = Trims()
    trimmer = Trimmer(trims.loop, quiet_s=1.0, trim=trims)

    for _ in range(3):
        trimmer.note()
        await asyncio.sleep(10.0)
    await trimmer.close()

    assert len(trims.at) == 3


@pytest.mark.looptime
async def test_a_closed_one_does_nothing_more() -> None:
    trims = Trims()
    trimmer = Trimmer(trims.loop, quiet_s=1.0, trim=trims)
    trimmer.note()
    await trimmer.close()
    await trimmer.close()
    await asyncio.sleep(10.0)

    assert not trims.at


async def test_closing_waits_for_the_thread() -> None:
    ended = False

    def trim() -> None:
        nonlocal ended
        give_back()
        ended = True

    trimmer = Trimmer(asyncio.get_running_loop(), quiet_s=0.0, trim=trim)
    trimmer.note()
    while trimmer._running is None:
        await asyncio.sleep(0)
    await trimmer.close()

    assert ended
