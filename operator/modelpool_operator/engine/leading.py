"""
Leader election: one operator acts, others wait for its Lease.

Losing it stops everything that acts within the Lease's own time limit, before another one may
have it. What was in flight then is conditional on versions and UIDs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from modelpool_kube.lease import LeaseKeeper
from modelpool_kube.port import ClusterPort
from modelpool_kube.record import SlotId

log = logging.getLogger(__name__)

LEASE = "operator.modelpool.dev"
"""No pool can have a Lease of this name."""
LOOK_S = 0.5
"""Pause between two looks at our own deadline."""


async def lead(
    port: ClusterPort,
    namespace: str,
    holder: str,
    work: Callable[[], Awaitable[None]],
    *,
    leads: Callable[[bool], None] = lambda answer: None,
) -> None:
    """
    Run *work* whenever, and only while, we are the leader; until cancelled.

    Args:
        port: The cluster.
        namespace: Where the Lease is.
        holder: Our name, the Pod's.
        work: Runs until cancelled. What it raises ends everything.
        leads: Told whether we lead.
    """
    changed = asyncio.Event()
    keeper = LeaseKeeper(
        port, SlotId(namespace, LEASE), holder, may_create=True, on_change=changed.set
    )
    async with asyncio.TaskGroup() as group:
        keeping = group.create_task(keeper.run(), name="leader-lease")
        try:
            while True:
                while not keeper.is_held:
                    changed.clear()
                    await changed.wait()
                log.info("this operator leads")
                leads(True)
                await _while_held(keeper, changed, work)
                leads(False)
                log.warning("this operator does not lead any more: %s", keeper.trouble)
        finally:
            leads(False)
            keeping.cancel()


async def _while_held(
    keeper: LeaseKeeper, changed: asyncio.Event, work: Callable[[], Awaitable[None]]
) -> None:
    tenure = keeper.tenure
    task = asyncio.get_running_loop().create_task(_awaited(work), name="leading")
    try:
        while keeper.is_held and keeper.tenure == tenure and not task.done():
            changed.clear()
            # Also by the clock: a keeper that hangs reports nothing.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await changed.wait()
        if task.done():
            task.result()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _awaited(work: Callable[[], Awaitable[None]]) -> None:
    await work()
