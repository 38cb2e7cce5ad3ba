"""
From a checked request to its answer: hold it for a lease, forward it, hold it again if need be.

The hold has one deadline, fixed when the body was complete. What can fail before a byte of an
answer is turned into an error of ours here; what fails after it, `forward` tells in the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from ..core.catalog import Route, printable
from ..core.commands import BreakReason, RefusalCode, Refuse
from ..core.headers import ExchangeIds
from ..core.paths import Dialect
from ..core.patience import hold_deadline
from ..core.spec import PoolName
from ..runtime.leases import HoldRefused, Lease
from ..runtime.pools import Pools
from .account import RequestRecord
from .auth import Caller
from .begun import Begun
from .errors import STATUS, ApiError
from .exchange import Forwarded, ForwardLimits
from .faults import ConnectRefused, ExchangeBroken, ExchangeError, MemberLoading
from .forward import forward
from .held import HeldStream
from .intake import Body
from .request import Request, extra_fields
from .surface import Surface
from .upstream import UpstreamClient

_LOADING_AGAIN_S: Final = 0.1
"""Pause before asking a member again that says it is loading although its probe said ready."""

_SENTENCES: Final = {
    RefusalCode.SWAP_BUDGET_EXCEEDED: "The model `{name}` did not get the slot in time: {reason}.",
    RefusalCode.QUEUE_FULL: "The model `{name}` has to wait, and {reason}.",
    RefusalCode.RATE_LIMIT_EXCEEDED: "The model `{name}` has to wait, and {reason}.",
    RefusalCode.MEMBER_FAILED: "The model `{name}` could not be loaded: {reason}.",
    RefusalCode.MEMBER_BACKOFF: "The model `{name}` is not being loaded now: {reason}.",
    RefusalCode.POOL_DRAINING: "The model `{name}` cannot be served now: {reason}.",
    RefusalCode.SLOT_UNAVAILABLE: "The model `{name}` cannot be served now: {reason}.",
    RefusalCode.MODEL_NOT_FOUND: "The model `{name}` does not exist any more: {reason}.",
}


@dataclass(frozen=True, slots=True)
class Job:
    """One checked request, and all that is needed to answer it."""

    request: Request
    record: RequestRecord
    surface: Surface
    route: Route
    caller: Caller
    body: Body
    path_qs: str
    """For the member: a constant of ours, or what the passthrough was given."""
    dialect: Dialect
    stream: bool
    """The client asked for a stream."""
    name: str
    """The model name that the client used."""

    @property
    def ids(self) -> ExchangeIds:
        """What the answer carries of ours."""
        return ExchangeIds(self.request.request_id, extra_fields(self.request.cors_headers))


class Standing:
    """The lease of an upstream: there is nothing to lend, only something to break off."""

    __slots__ = ("moved_at", "on_break")

    def __init__(self, now: float) -> None:
        self.moved_at = now
        self.on_break: Callable[[BreakReason], None] | None = None


class Dispatcher:
    """Serves what is routed; one per router."""

    def __init__(self, pools: Pools, client: UpstreamClient) -> None:
        self._pools = pools
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._standing: set[Standing] = set()

    @property
    def busy_upstreams(self) -> int:
        """Exchanges with upstreams that run now."""
        return len(self._standing)

    def end_all(self, reason: BreakReason) -> None:
        """Break every exchange off with an explicit error to its client."""
        for pool in self._pools.all():
            pool.end_leases(reason)
        for standing in list(self._standing):
            if standing.on_break is not None:
                standing.on_break(reason)

    async def serve(self, job: Job, begun: Begun | None = None) -> web.StreamResponse:
        """
        Answer the request of *job* from the member or upstream of its route.

        Args:
            begun: How far the short way got with it.

        Raises:
            ApiError: refused, or failed before a byte of an answer.
            asyncio.CancelledError: the client left.
        """
        job.record.route = job.route
        if job.route.pool is None:
            return await self._from_upstream(job)
        held = self._held_stream(job)
        try:
            result = await self._from_member(job, job.route.pool, held, begun)
        except ApiError as error:
            if held is None or not held.started:
                raise
            (job.record.refused if job.record.granted_at is None else job.record.failed)(error)
            return held.fail(
                status=error.status,
                code=error.code,
                message=error.message,
                write_stall_s=job.surface.pools[job.route.pool].limits.write_stall_s,
            )
        finally:
            if held is not None:
                held.close()
        job.record.forwarded(result)
        return result.response

    def _held_stream(self, job: Job) -> HeldStream | None:
        keepalive = job.surface.keepalive
        if keepalive is None or not job.stream:
            return None
        return HeldStream(
            job.request,
            self._client.sweep,
            family=job.dialect,
            mode=keepalive.mode,
            ids=job.ids,
            member=job.route.member,
            model=job.name,
            after_s=keepalive.after_s,
            every_s=keepalive.every_s,
            close=job.request.must_close,
        )

    async def _from_member(
        self, job: Job, pool_name: PoolName, held: HeldStream | None, begun: Begun | None
    ) -> Forwarded:
        target = job.surface.pools[pool_name]
        pool, record = self._pools.get(pool_name), job.record
        if pool is None:
            raise ApiError.of("model_not_found", "The model was removed meanwhile.", "model")
        record.held_from = self._loop.time() if begun is None else begun.arrived_at
        deadline = hold_deadline(
            record.held_from,
            target.swap_budget_s,
            job.request.headers,
            ignore_patience=held is not None,
        ).deadline
        if begun is None:
            scope = pool.lease(job.route.member, deadline=deadline, key=job.caller.key_id)
        else:
            scope = begun.scope
        scope.on_held = job.body.put_away
        renewed = False
        try:
            async with scope as lease:
                while True:
                    record.held_until = record.granted_at = (
                        self._loop.time() if begun is None else begun.arrived_at
                    )
                    first, begun = begun, None
                    try:
                        return await self._to_member(job, target.limits, lease, held, first)
                    except ConnectRefused:
                        if renewed:
                            raise
                        renewed = True
                        record.granted_at = None
                        job.body.put_away()
                        await lease.renew(deadline)
                    except MemberLoading:
                        if self._loop.time() + _LOADING_AGAIN_S >= deadline:
                            raise
                        job.body.put_away()
                        await asyncio.sleep(_LOADING_AGAIN_S)
        except HoldRefused as refused:
            record.held_until = self._loop.time()
            raise refusal_error(refused.refusal, job.route.member) from None
        except ExchangeError as error:
            raise failure(error) from error

    async def _to_member(
        self,
        job: Job,
        limits: ForwardLimits,
        lease: Lease,
        held: HeldStream | None,
        begun: Begun | None,
    ) -> Forwarded:
        if lease.broken is not None:
            raise ExchangeBroken(lease.broken)
        record = job.record
        assert record.held_from is not None and record.granted_at is not None
        return await forward(
            job.request,
            client=self._client,
            endpoint=lease.endpoint,
            method=job.request.method,
            path_qs=job.path_qs,
            body=job.body,
            lease=lease,
            ids=job.ids,
            limits=limits,
            held_ms=round((record.granted_at - record.held_from) * 1000),
            member=lease.member,
            family=job.dialect,
            keepalive_stream=held,
            close=job.request.must_close,
            on_cancelled=record.forwarded,
            begun=begun,
        )

    async def _from_upstream(self, job: Job) -> web.StreamResponse:
        target = job.surface.upstreams[job.route.member]
        now = self._loop.time()
        standing = Standing(now)
        self._standing.add(standing)
        job.record.granted_at = now
        try:
            result = await forward(
                job.request,
                client=self._client,
                endpoint=target.endpoint,
                method=job.request.method,
                path_qs=job.path_qs,
                body=job.body,
                lease=standing,
                ids=job.ids,
                limits=target.limits,
                held_ms=0,
                member=job.route.member,
                family=job.dialect,
                credential=target.credential,
                may_be_loading=False,
                close=job.request.must_close,
                on_cancelled=job.record.forwarded,
            )
        except ExchangeError as error:
            raise failure(error) from error
        finally:
            self._standing.discard(standing)
        job.record.forwarded(result)
        return result.response


class DispatchFailed(ApiError):
    """An error of ours that stands for a failed exchange, not for a refusal."""


def failure(error: ExchangeError) -> DispatchFailed:
    """Return what the client of a failed exchange is told."""
    retry_after_s = 1.0 if error.status == 503 else None
    return DispatchFailed(error.status, error.code, str(error), retry_after_s=retry_after_s)


def refusal_error(refusal: Refuse, member: str) -> ApiError:
    """Return what the client of a refused hold is told."""
    message = _SENTENCES[refusal.code].format(name=printable(member), reason=refusal.reason)
    # A back-off says so itself, and may well be longer than the longest Retry-After.
    tells_when = refusal.code is RefusalCode.MEMBER_BACKOFF
    if refusal.retry_after_s is not None and refusal.retryable and not tells_when:
        message += f" Try again in {refusal.retry_after_s:.0f} s."
    return ApiError(
        STATUS[refusal.code],
        refusal.code,
        message,
        "model" if refusal.code is RefusalCode.MODEL_NOT_FOUND else None,
        refusal.retry_after_s,
        retryable=refusal.retryable,
    )
