"""
Lending the resident to one request: wait for a grant, use it, give it back whatever happens.

A lease is always scoped (``async with pool.lease(...)``), and the exit looks at what really
happened: a grant can land in the very tick that cancels its waiter.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from ..core.commands import BreakReason, Grant, Refuse
from ..core.events import Arrived, Departed, DispatchRefused, Finished
from ..core.spec import Epoch, MemberName, Ticket
from ..drivers.base import Endpoint

if TYPE_CHECKING:
    from .pool import PoolRuntime


class HoldRefused(Exception):
    """The scheduler refused this request; `refusal` says with what."""

    def __init__(self, refusal: Refuse) -> None:
        super().__init__(refusal.code)
        self.refusal = refusal


class Lease(msgspec.Struct, eq=False):
    """
    The right to use the resident for one request.

    Attributes:
        moved_at: When a byte of this exchange last moved (loop time); whoever forwards sets it.
            A grant moves nothing: an engine that hangs is lent again and again.
        on_break: Called with a reason when the scheduler ends the lease; whoever forwards sets it.
        broken: Why the lease was ended by the router, if it was.
    """

    pool: PoolRuntime
    ticket: Ticket
    member: MemberName
    endpoint: Endpoint
    granted_at: float
    epoch: Epoch = Epoch(0)
    moved_at: float = -math.inf
    on_break: Callable[[BreakReason], None] | None = None
    broken: BreakReason | None = None

    def end(self, reason: BreakReason) -> None:
        """End the exchange from the router's side, with an explicit error to the client."""
        if self.broken is None:
            self.broken = reason
            if self.on_break is not None:
                self.on_break(reason)

    async def renew(self, deadline: float) -> None:
        """
        Go back to the hold because the member refused the connection; return when granted again.

        Only before any byte of the request was sent.

        Args:
            deadline: End of the hold, in loop time: that of the request's arrival.

        Raises:
            HoldRefused: the deadline passed, or it was renewed before.
        """
        await self.pool.requeue(self, deadline)


class Waiter(msgspec.Struct, eq=False):
    """One request as the pool knows it: waiting, granted or refused."""

    ended: BreakReason | None = None
    grant: Grant | None = None
    refusal: Refuse | None = None
    future: asyncio.Future[None] | None = None
    lease: Lease | None = None

    def wake(self) -> None:
        """Let the request see what was decided."""
        if self.future is not None and not self.future.done():
            self.future.set_result(None)

    def end(self, reason: BreakReason) -> None:
        """End the lease, or the one that is about to be made of a grant."""
        if self.lease is not None:
            self.lease.end(reason)
        elif self.ended is None:
            self.ended = reason


class LeaseScope:
    """
    ``async with`` over one lease; made by `PoolRuntime.lease`.

    Args:
        waiter: With a lease that was granted already (`PoolRuntime.lend`).
    """

    __slots__ = ("_arrival", "_pool", "_waiter", "on_held")

    def __init__(self, pool: PoolRuntime, arrival: Arrived, waiter: Waiter | None = None) -> None:
        self.on_held: Callable[[], None] = lambda: None
        """Called once it turns out that the request has to wait."""
        self._pool = pool
        self._arrival = arrival
        self._waiter = waiter if waiter is not None else Waiter()

    async def __aenter__(self) -> Lease:
        pool, waiter, arrival = self._pool, self._waiter, self._arrival
        if waiter.lease is not None:
            return waiter.lease
        pool.waiters[arrival.ticket] = waiter
        pool.tell(arrival)
        if waiter.grant is None and waiter.refusal is None:
            self.on_held()
        try:
            await settled(waiter, pool.loop)
        except BaseException:
            self._leave()
            raise
        if waiter.refusal is not None:
            del pool.waiters[arrival.ticket]
            raise HoldRefused(waiter.refusal)
        assert waiter.grant is not None
        member = waiter.grant.member
        lease = Lease(pool, arrival.ticket, member, pool.endpoints[member], pool.loop.time())
        lease.epoch = waiter.grant.epoch
        lease.broken = waiter.ended
        waiter.lease = lease
        return lease

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        """Give back what there is to give back: a lease, a hold, or nothing."""
        pool, waiter, ticket = self._pool, self._waiter, self._arrival.ticket
        if pool.waiters.pop(ticket, None) is None or waiter.refusal is not None:
            return
        if waiter.lease is not None and waiter.lease.moved_at > pool.moved_at:
            pool.moved_at = waiter.lease.moved_at
        pool.tell(Finished(ticket) if waiter.grant is not None else Departed(ticket))


async def settled(waiter: Waiter, loop: asyncio.AbstractEventLoop) -> None:
    """Return once *waiter* is granted or refused; makes a future only if it has to wait."""
    if waiter.grant is None and waiter.refusal is None:
        waiter.future = loop.create_future()
        try:
            await waiter.future
        finally:
            waiter.future = None


async def requeued(pool: PoolRuntime, lease: Lease, deadline: float) -> None:
    """Carry out `Lease.renew`."""
    waiter = pool.waiters[lease.ticket]
    waiter.grant = None
    lease.on_break = None
    pool.tell(DispatchRefused(lease.ticket, deadline))
    await settled(waiter, pool.loop)
    if waiter.refusal is not None:
        raise HoldRefused(waiter.refusal)
    # `settled` narrows nothing for the type checker: the grant was set by a command.
    grant: Grant | None = waiter.grant
    assert grant is not None
    lease.endpoint = pool.endpoints[grant.member]
    lease.epoch = grant.epoch
    lease.granted_at = pool.loop.time()
