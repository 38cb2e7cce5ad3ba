"""Pools that come and go while the router runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from modelpool_router.core.spec import HoldLedger, MemberName, MemberSpec, PoolName, PoolSpec
from modelpool_router.drivers.base import LostCallback, MemberDriver
from modelpool_router.drivers.statedir import StateDirUnusable
from modelpool_router.runtime.pools import Pools
from modelpool_router.runtime.record import RecordStore
from modelpool_router.testing.driver import FakeDriver

pytestmark = pytest.mark.looptime(idle_timeout=10_000)

P, Q = PoolName("p"), PoolName("q")
A = MemberName("a")


class LockedDriver(FakeDriver):
    """One that takes the pool's lock and takes its time to let go of it."""

    def __init__(self, locks: set[PoolName], pool: PoolName, lost: LostCallback) -> None:
        super().__init__([A], lost=lost)
        if pool in locks:
            raise StateDirUnusable(f"pool {pool} is run already")
        self._pool, self._locks = pool, locks
        locks.add(pool)

    async def close(self, *, stop_members: bool, hurry: asyncio.Event | None = None) -> None:
        await asyncio.sleep(5.0)
        await super().close(stop_members=stop_members, hurry=hurry)
        self._locks.discard(self._pool)


def spec(name: PoolName) -> PoolSpec:
    return PoolSpec(name, {A: MemberSpec(A)})


def pools_with(locks: set[PoolName], folder: Path) -> Pools:
    def make(name: PoolName, lost: LostCallback) -> MemberDriver:
        return LockedDriver(locks, name, lost)

    return Pools(
        ledger=HoldLedger(),
        make_driver=make,
        listener=lambda name, note: None,
        store=RecordStore(folder),
        health_interval_s=lambda name: 2.0,
        violation=lambda name: None,
    )


async def test_a_pool_that_is_added_again_while_it_closes_waits_for_its_end(tmp_path: Path) -> None:
    pools = pools_with(set(), tmp_path)
    await pools.apply({P: spec(P), Q: spec(Q)})
    first = pools[P]
    await pools.apply({Q: spec(Q)})
    await asyncio.sleep(1.0)
    assert pools.get(P) is None, "it is closing, and takes five seconds for that"

    started = await pools.start_new({P: spec(P), Q: spec(Q)})
    await pools.apply({P: spec(P), Q: spec(Q)})

    assert started == [P]
    assert pools[P] is not first
    async with pools[P].lease(A, deadline=asyncio.get_running_loop().time() + 60, key=None):
        pass
    await pools.stop(stop_members=True)


async def test_a_pool_that_is_added_again_does_not_end_while_another_is_waited_for(
    tmp_path: Path,
) -> None:
    """One has closed half way, the other would retire at that very moment."""
    pools = pools_with(set(), tmp_path)
    await pools.apply({P: spec(P), Q: spec(Q)})
    deadline = asyncio.get_running_loop().time() + 60
    async with pools[Q].lease(A, deadline=deadline, key=None):
        await pools.apply({})
        await asyncio.sleep(1.0)
        kept = pools[Q]
        again = asyncio.get_running_loop().create_task(pools.apply({P: spec(P), Q: spec(Q)}))
        await asyncio.sleep(1.0)
        assert not again.done()
    await again

    assert pools[Q] is kept
    async with pools[Q].lease(A, deadline=deadline, key=None):
        pass
    await pools.stop(stop_members=True)
