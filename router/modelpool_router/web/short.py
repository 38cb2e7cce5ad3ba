"""
The short way: an ordinary request for a resident that is free.

It is taken as far as everything is as usual: a plain head, a JSON body that came with it, a lease
that can be had at once. An answer in one piece with a length is written by itself; any other one is
passed on by an `Exchange`, as on the general way.
Nothing is decided here that is not decided the same way by `handlers`, `dispatch` and `exchange`.
Before anything was done, `ShortWay.begin` returns None and the general way begins; after that,
whatever is not as usual (a member that is loading, a failure before the answer, a deadline, a lease
that is ended) lets the general way go on from the point that was reached.

No coroutine, no future, no timer; what a head means is found out once a connection, and what can be
said in advance of requests and answers is kept ready.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

import msgspec
from aiohttp import web

from ..core.body import BadBody, inspect_closely, plain_facts
from ..core.catalog import Route, UnknownModel
from ..core.commands import BreakReason
from ..core.headers import (
    REQUEST_ID,
    AnswerHead,
    ExchangeIds,
    Framing,
    allowed_lines,
    answer_head,
    authority,
    head_end,
    header_text,
    request_line,
    whole_answer_frame,
)
from ..core.paths import Kind, PathRule, find_path
from ..core.spec import HoldLedger
from ..drivers.base import Endpoint
from ..runtime.leases import Lease
from ..runtime.pool import PoolRuntime
from ..runtime.pools import Pools
from ..telemetry import Served
from .account import Accountant
from .auth import Caller, Keys
from .begun import Begun
from .errors import ApiError
from .exchange import Exchange, Forwarded, ForwardLimits
from .faults import ExchangeBroken, ExchangeError, UpstreamTimeout
from .front import OwnConnection
from .intake import Body
from .plain import PlainHead, PlainRequest
from .request import wished_id
from .sink import ClientSink, watch_rest
from .surface import Surface
from .sweep import Sweep
from .upstream import Life, UpstreamClient, UpstreamConnection


class General(Protocol):
    """The general way, as `handlers.DataPort` knows it."""

    surface: Surface
    active: int

    def ended(self) -> None:
        """One request less is under way."""
        ...

    def go_on(
        self,
        request: PlainRequest,
        rule: PathRule,
        caller: Caller,
        route: Route,
        body: Body,
        begun: Begun,
        *,
        name: str,
        stream: bool,
    ) -> Coroutine[Any, Any, web.StreamResponse]:
        """Answer a request that was begun already."""
        ...


class Facts:
    """What a head means under a certain configuration, and under certain keys."""

    __slots__ = (
        "answer", "caller", "endpoint", "frame", "life", "limits", "lines", "max_size", "member",
        "name", "pool", "request_end", "request_id", "ring", "route", "rule", "served", "size",
        "start", "surface",
    )  # fmt: skip

    # there if bodies of some size are usable
    rule: PathRule
    caller: Caller
    lines: bytes
    request_id: str
    # there if *name* is: of the model that was asked for last
    route: Route
    pool: PoolRuntime
    limits: ForwardLimits
    member: bytes
    served: Served | None
    # there if *endpoint* is: of the life of the member that was asked last
    start: bytes
    life: Life
    # there if *size* is, or *answer*: of what was sent and answered last
    request_end: bytes
    frame: tuple[bytes, bytes, bytes]

    def __init__(self, surface: Surface, ring: object) -> None:
        self.surface = surface
        self.ring = ring
        self.max_size = -1
        """Longest body that may go the short way; -1 if none may."""
        self.size = -1
        self.answer: AnswerHead | None = None
        self.name: str | None = None
        self.endpoint: Endpoint | None = None


class ShortWay:
    """Begins requests that are as usual, and watches over them. One per router."""

    def __init__(
        self,
        general: General,
        *,
        pools: Pools,
        client: UpstreamClient,
        keys: Keys,
        ledger: HoldLedger,
        accountant: Accountant,
    ) -> None:
        self.general = general
        self.client = client
        self.ledger = ledger
        self.accountant = accountant
        self.loop = asyncio.get_running_loop()
        self.running: set[ShortExchange] = set()
        self._pools = pools
        self._keys = keys
        self._is_watching = False

    def expects(self, head: PlainHead) -> bool:
        """Say whether a request with this head may go the short way once its body is here."""
        return head.length <= self._facts_of(head).max_size

    def _facts_of(self, head: PlainHead) -> Facts:
        surface, facts = self.general.surface, head.facts
        if facts is None or facts.surface is not surface or facts.ring is not self._keys.ring:
            facts = head.facts = self._understand(head, surface)
        return facts

    def begin(
        self, connection: OwnConnection, head: PlainHead, body: bytes
    ) -> ShortExchange | None:
        """Send the request to its member; None when anything is unusual, and nothing was done."""
        facts = self._facts_of(head)
        size = len(body)
        if size > facts.max_size:
            return None
        wanted = plain_facts(body)
        if wanted is None:
            try:
                found = inspect_closely(body)
            except BadBody:
                return None
            wanted = found.model or "", found.stream
        name, stream = wanted
        if name != facts.name and not self._find(facts, name):
            return None
        if stream and facts.surface.keepalive is not None:
            return None
        pool, member = facts.pool, facts.route.member
        if not self.ledger.reserve_bytes(size):
            return None
        lease = pool.lend(member, facts.caller.key_id)
        if lease is None:
            self.ledger.release_bytes(size)
            return None
        endpoint = lease.endpoint
        if endpoint is not facts.endpoint:
            facts.endpoint, facts.life = endpoint, self.client.life_of(endpoint)
            target = endpoint.base_path + facts.rule.upstream
            line = request_line("POST", target, authority(endpoint.host, endpoint.port))
            facts.start = line + facts.lines + REQUEST_ID
        upstream = self.client.take_from(facts.life) or self.client.open(endpoint)
        if size != facts.size:
            facts.size, facts.request_end = size, head_end(size)
        now = lease.granted_at
        request_id = facts.request_id or next(connection.ids)
        raw_id = request_id.encode("ascii")
        exchange = ShortExchange(
            self,
            connection,
            head,
            facts,
            body,
            stream,
            name,
            upstream,
            lease,
            now,
            now + facts.limits.response_timeout_s,
            request_id,
            raw_id,
        )
        lease.on_break = exchange.break_off
        self.running.add(exchange)
        if not self._is_watching:
            self._is_watching = True
            self.client.sweep.add(self)
        self.general.active += 1
        upstream.begin(exchange, "POST")
        upstream.write(b"".join((facts.start, raw_id, facts.request_end, body)))
        upstream.request_sent = True
        return exchange

    def check(self, now: float) -> None:
        """Look at the deadlines (`sweep.Watched`)."""
        for exchange in [each for each in self.running if now >= each.deadline]:
            exchange.overdue()
        if not self.running:
            self._is_watching = False
            self.client.sweep.discard(self)

    def _understand(self, head: PlainHead, surface: Surface) -> Facts:
        facts = Facts(surface, self._keys.ring)
        rule = find_path(head.path)
        kind = head.fields.get("content-type", "")[:19].lower()
        if rule is None or rule.kind is not Kind.INFERENCE or not rule.model_required:
            return facts
        if kind == "multipart/form-data" or head.method not in rule.methods:
            return facts
        try:
            facts.caller = self._keys.identify(head.fields)
        except ApiError:
            return facts
        facts.rule = rule
        facts.request_id = wished_id(head.fields.get("x-request-id"))
        facts.lines = b"".join(allowed_lines(head.raw))
        facts.max_size = surface.intake.max_body_bytes
        return facts

    def _find(self, facts: Facts, name: str) -> bool:
        """Note where requests for *name* go; False if it takes more than the short way."""
        facts.name = None
        try:
            route = facts.surface.catalog.find(name, facts.caller.allowed)
        except UnknownModel:
            return False
        if route.pool is None or route.served_model is not None:
            return False
        pool = self._pools.get(route.pool)
        if pool is None:
            return False
        facts.name, facts.route, facts.pool = name, route, pool
        facts.limits = facts.surface.pools[route.pool].limits
        facts.member = header_text(route.member)
        facts.served = self.accountant.served(route)
        facts.endpoint = facts.answer = None
        return True


class ShortExchange(msgspec.Struct, eq=False):
    """One request on the short way: `Receiver` of its answer; what its connection is running."""

    way: ShortWay
    client: OwnConnection
    head: PlainHead
    facts: Facts
    body: bytes
    stream: bool
    name: str
    upstream: UpstreamConnection
    lease: Lease
    since: float
    deadline: float
    request_id: str
    raw_id: bytes
    answer: AnswerHead | None = None
    relay: _Relay | None = None
    first_byte_at: float = 0.0
    over: asyncio.Future[None] | None = None

    # -- what the connection to the client runs --------------------------------------------------

    @property
    def ended(self) -> asyncio.Future[None]:
        """Done when this is over, or the general way goes on with it."""
        if self.over is None:
            self.over = self.way.loop.create_future()
        return self.over

    def cancel(self) -> None:
        """The client left."""
        if self not in self.way.running:
            return
        if self.relay is None:
            self.upstream.abort()
            self._close("client_gone", "client_gone", None, 0, self.way.loop.time())
        else:
            so_far = self.relay.exchange.so_far()
            self._account(so_far)
        self.client.lost()

    # -- Receiver --------------------------------------------------------------------------------

    def on_head(self, head: AnswerHead) -> None:
        """See whether this is an answer for the short way."""
        if head.status == 503:
            self._go_on(None)  # it may be loading
        elif head.framing is Framing.LENGTH and self.upstream.answer_is_whole:
            self.answer = head
        else:
            self._relay()

    def on_body(self, pieces: Sequence[bytes], framed: bytes | None, *, last: bool) -> None:
        """Send the answer, which is whole."""
        if self.answer is None:
            self.upstream.abort()  # the general way had nobody to pass it on to
        else:
            assert last
            self.on_whole(self.answer, pieces[0] if pieces else b"")

    def on_whole(self, head: AnswerHead, body: bytes) -> None:
        """Send the answer."""
        facts, client = self.facts, self.client
        now = self.first_byte_at = self.lease.moved_at = self.way.loop.time()
        transport = client.transport
        if transport is None or transport.is_closing():
            self._close("client_gone", "client_gone", head.status, 0, now)
            client.lost()
            return
        stays = True
        if client.is_as_usual:
            if head is not facts.answer:
                facts.answer = head
                facts.frame = whole_answer_frame(head, member=facts.member)
            before, between, after = facts.frame
            data = b"".join((before, self.raw_id, between, self.raw_id, after, body))
        else:
            ids = ExchangeIds(self.request_id, client.extra_fields(self.head))
            member, stays = self.lease.member, not client.ends
            data = (
                answer_head(
                    head, Framing.LENGTH, ids=ids, member=member, held_ms=0, close=not stays
                )
                + body
            )
        transport.write(data)
        if transport.get_write_buffer_size():
            watch_rest(transport, self.way.client.sweep, facts.limits.write_stall_s, now)
        self._close("served", "", head.status, len(data), now)
        client.settled(now, stays=stays)

    def on_failed(self, error: ExchangeError) -> None:
        """Let the general way see whether it can be tried again."""
        self._go_on(error)

    # -- deadlines and other ends ----------------------------------------------------------------

    def overdue(self) -> None:
        """No answer came in time."""
        self.upstream.abort()
        self._go_on(UpstreamTimeout("sent no answer", self.facts.limits.response_timeout_s))

    def break_off(self, reason: BreakReason) -> None:
        """The runtime ends the lease."""
        self.upstream.abort()
        self._go_on(ExchangeBroken(reason))

    # -- private ---------------------------------------------------------------------------------

    def _leave(self) -> None:
        self.way.running.discard(self)
        self.lease.on_break = None
        if self.relay is not None:
            self.relay.release(self.way.client.sweep, self.facts.limits)
            self.relay = None
        if self.over is not None and not self.over.done():
            self.over.set_result(None)

    def _account(self, result: Forwarded) -> None:
        """Close with what became of an answer that was passed on."""
        self.first_byte_at = result.first_byte_at or 0.0
        self._close(
            result.outcome,
            result.code or "",
            result.status or None,
            result.bytes_sent,
            self.way.loop.time(),
        )

    def _close(
        self, outcome: str, code: str, status: int | None, sent_bytes: int, now: float
    ) -> None:
        """Give back what was lent, and account for the request."""
        way, facts = self.way, self.facts
        self._leave()
        self.lease.pool.take_back(self.lease, now)
        way.ledger.release_bytes(len(self.body))  # (of which a relay leaves nothing)
        way.general.ended()
        way.accountant.close_short(
            self.request_id,
            facts.route,
            self.name,
            facts.caller.key_id,
            outcome,
            code,
            status,
            sent_bytes,
            self.since,
            self.first_byte_at,
            now,
            facts.served if status == 200 and outcome == "served" else None,
        )

    def _relay(self) -> None:
        """Pass the answer on as it comes."""
        way, facts, client = self.way, self.facts, self.client
        request = client.request_for(self.head, b"", self.request_id)
        sink = ClientSink(request, way.loop)
        exchange = Exchange(
            sink,
            method="POST",
            family=facts.rule.dialect,
            ids=ExchangeIds(self.request_id, client.extra_fields(self.head)),
            member=self.lease.member,
            held_ms=0,
            lease=self.lease,
            limits=facts.limits,
            held=None,
            may_be_loading=True,
            close=client.ends,
        )
        body = Body(way.ledger, len(self.body), data=self.body)
        self.body = b""
        self.deadline = math.inf  # the exchange has its own
        self.relay = _Relay(sink, exchange)
        self.lease.on_break = exchange.break_off
        way.client.sweep.add(exchange)
        exchange.take_over(self.upstream, body, self._relayed)

    def _relayed(self, result: Forwarded | ExchangeError) -> None:
        """The answer that was passed on is over."""
        assert isinstance(result, Forwarded)
        self._account(result)
        self.client.passed_on(keep_alive=result.keep_alive, cut_off=result.cut_off)

    def _go_on(self, error: ExchangeError | None) -> None:
        """Let the general way do the rest."""
        way, facts, client = self.way, self.facts, self.client
        self._leave()
        way.general.ended()
        request = client.request_for(self.head, self.body, self.request_id)
        client.go_on(
            request,
            way.general.go_on(
                request,
                facts.rule,
                facts.caller,
                facts.route,
                Body(way.ledger, len(self.body), data=self.body),
                Begun(
                    self.since,
                    self.lease.pool.scope_of(self.lease),
                    self.upstream,
                    error,
                ),
                name=self.name,
                stream=self.stream,
            ),
        )


class _Relay(msgspec.Struct, eq=False):
    """What it takes to pass an answer on as it comes."""

    sink: ClientSink
    exchange: Exchange

    def release(self, sweep: Sweep, limits: ForwardLimits) -> None:
        """Let go of both sides."""
        sweep.discard(self.exchange)
        self.exchange.close()
        self.sink.release(sweep, limits.write_stall_s)
