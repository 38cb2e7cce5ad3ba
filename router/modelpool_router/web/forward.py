"""
Sends one request to a member and its answer to the client: what the handler calls.

Who waits is the handler's own task. No other task, no timer, and nothing is parsed but heads and
the framing of chunks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..core.headers import ExchangeIds, Field, authority, request_head
from ..drivers.base import Endpoint
from .begun import Begun
from .exchange import Exchange, Forwarded, ForwardLimits, LeaseLike, OutgoingBody
from .faults import ConnectRefused, ExchangeError, Family, MemberLoading, UpstreamReset
from .held import HeldStream
from .request import ClientSide
from .sink import ClientSink
from .upstream import UpstreamClient

__all__ = ["ExchangeIds", "ForwardLimits", "Forwarded", "LeaseLike", "OutgoingBody", "forward"]


async def forward(
    request: ClientSide,
    *,
    client: UpstreamClient,
    endpoint: Endpoint,
    method: str,
    path_qs: str,
    body: OutgoingBody,
    lease: LeaseLike,
    ids: ExchangeIds,
    limits: ForwardLimits,
    held_ms: int,
    member: str,
    family: Family,
    keepalive_stream: HeldStream | None = None,
    credential: Field | None = None,
    may_be_loading: bool = True,
    close: bool = False,
    on_cancelled: Callable[[Forwarded], None] | None = None,
    begun: Begun | None = None,
) -> Forwarded:
    """
    Dispatch *request* to *endpoint* and relay the answer.

    Args:
        path_qs: Upstream path and query, percent-encoded; a constant of ours.
        body: Closed when it was sent and cannot be needed again; otherwise left to the caller.
        lease: Its `on_break` is set until this returns.
        member: For the ``x-modelpool-member`` line.
        keepalive_stream: Continued if it has started; else paused meanwhile, and resumed when
            this raises something that can be held again.
        credential: Header line for an upstream that wants a key of ours.
        may_be_loading: Whether a 503 "Loading model" means "hold it again" (members) or is an
            answer like any other (static upstreams).
        close: Tell the client that this is the last answer on its connection (draining).
        begun: An attempt that was made already, with what became of it.
        on_cancelled: Told what the client had seen when the caller is cancelled.

    Returns:
        How it ended. An answer was written, whole or cut off, or the client is gone. Losing the
        client may cancel the caller at its next await.

    Raises:
        ConnectRefused: nothing was sent; hold it again.
        MemberLoading: it is not ready after all; hold it again.
        ExchangeError: any other failure before a byte of an answer went to the client.
        ValueError: *path_qs* or *credential* does not fit into a head.

    Cancellation closes the upstream connection at once.
    """
    loop = asyncio.get_running_loop()
    held = keepalive_stream
    held_started = held is not None and held.started
    sink = held.sink if held is not None and held.started else ClientSink(request, loop)
    if held is not None and not held_started:
        held.pause()
    if sink.gone:
        return _client_gone()
    head = request_head(
        method,
        endpoint.base_path + path_qs,
        authority=authority(endpoint.host, endpoint.port),
        client_fields=request.raw_headers,
        request_id=ids.request_id,
        body_size=body.size,
        credential=credential,
        plain_answer=held is not None,
    )
    exchange = Exchange(
        sink,
        method=method,
        family=family,
        ids=ids,
        member=member,
        held_ms=held_ms,
        lease=lease,
        limits=limits,
        held=held,
        may_be_loading=may_be_loading,
        close=close or (held is not None and held_started and not held.keep_alive),
    )
    lease.on_break = exchange.break_off
    client.sweep.add(exchange)
    try:
        result = await _run(exchange, client, endpoint, head, body, begun)
    except (ConnectRefused, MemberLoading):
        if held is not None:
            held.resume()
        raise
    except ExchangeError as error:
        if held is None or not held.started:
            raise
        result = exchange.tell(error)
    except asyncio.CancelledError:
        if on_cancelled is not None:
            on_cancelled(exchange.so_far())
        raise
    finally:
        lease.on_break = None
        client.sweep.discard(exchange)
        exchange.close()
        sink.release(client.sweep, limits.write_stall_s)
    if held is not None:
        held.close()
    return result


async def _run(
    exchange: Exchange,
    client: UpstreamClient,
    endpoint: Endpoint,
    head: bytes,
    body: OutgoingBody,
    begun: Begun | None,
) -> Forwarded:
    connection = client.take(endpoint) if begun is None else begun.connection
    sent: UpstreamReset | None = None
    if connection is not None:
        try:
            if begun is None:
                return await exchange.run(connection, head, body)
            if begun.error is None:
                return await exchange.go_on(connection, body)
            raise begun.error
        except UpstreamReset as error:
            # A connection that had rested may have been closed at the very moment of use. Only
            # then is it certain enough that nobody works on the request: send it once more.
            if connection.answered or not connection.reused:
                raise
            sent = error
    try:
        connection = await client.connect(endpoint)
    except ConnectRefused:
        # The member ended with the request in its hands, maybe because of it: held again, such a
        # request would end one life of the member after the other.
        if sent is not None:
            raise sent from None
        raise
    return await exchange.run(connection, head, body)


def _client_gone() -> Forwarded:
    return Forwarded(
        keep_alive=False,
        cut_off=None,
        outcome="client_gone",
        status=0,
        bytes_sent=0,
        code="client_gone",
        first_byte_at=None,
    )
