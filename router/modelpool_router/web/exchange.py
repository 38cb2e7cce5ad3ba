"""
One exchange: a request on its way to a member and the answer on its way to the client.

An `Exchange` is where `web.upstream` (bytes come) meets `web.sink` (bytes go). It decides what an
answer is worth, applies back-pressure and deadlines, and ends exactly once. `web.forward` drives
it from the handler.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, Protocol

from ..core.commands import BreakReason
from ..core.headers import AnswerHead, ExchangeIds, Framing, answer_head
from .faults import (
    AnswerRefused,
    ExchangeBroken,
    ExchangeError,
    Family,
    MemberLoading,
    UpstreamTimeout,
    error_frame,
)
from .held import HeldStream
from .sink import ClientSink, PipedResponse
from .upstream import UpstreamConnection

Outcome = Literal["served", "client_gone", "upstream_error"]

_SMALL_BODY: Final = 64 * 1024
"""Bodies up to here go out with their head in one write."""
_LOOKED_AT: Final = 16 * 1024
"""How much of an answer is kept back to understand it; engines' errors are a few hundred bytes."""
_LOADING_MARKER: Final = b"Loading model"
"""What llama-server says with a 503 while its port is open but its model is not there yet."""


@dataclass(frozen=True, slots=True)
class ForwardLimits:
    """Time limits of one exchange, in seconds."""

    response_timeout_s: float = 600.0
    """From dispatch to the head of the answer; never counts the hold."""
    read_stall_s: float = 300.0
    """Longest gap in an answer that has begun."""
    write_stall_s: float = 60.0
    """Longest time that a client takes none of what is there for it."""


class OutgoingBody(Protocol):
    """A request body, complete and checked; can be sent more than once."""

    @property
    def size(self) -> int:
        """Length in bytes."""
        ...

    def chunks(self) -> Iterator[bytes | memoryview]:
        """Iterate over it from the start, in pieces of at most 256 KiB."""
        ...

    def put_away(self) -> None:
        """Keep no copy in memory of what is in a file. Idempotent; it can still be sent."""
        ...

    def close(self) -> None:
        """Give its memory back. Idempotent; called when it will not be sent again."""
        ...


class LeaseLike(Protocol):
    """The lease of the resident for this exchange, as far as the data path touches it."""

    moved_at: float
    """Set whenever a byte moves; monotonic seconds."""
    on_break: Callable[[BreakReason], None] | None
    """Set while the exchange runs; ends it with an explicit error, for the reason given."""


@dataclass(frozen=True, slots=True)
class Forwarded:
    """How an exchange ended of which the client saw something (or the client was gone)."""

    keep_alive: bool
    """Whether another request may come on the client's connection."""
    cut_off: Callable[[], None] | None
    """How the answer still has to be ended, where it was not completed."""
    outcome: Outcome
    status: int
    """Of the upstream's answer, which the client saw; 0 when none came."""
    bytes_sent: int
    """To the client, head included."""
    code: str | None
    """Why it is not ``served``."""
    first_byte_at: float | None
    """When the head of the answer came; monotonic seconds."""

    @property
    def response(self) -> PipedResponse:
        """What a handler returns; everything but the cut is written already."""
        return PipedResponse(
            status=self.status or 200, keep_alive=self.keep_alive, abort=self.cut_off
        )


class Exchange:
    """`Receiver` of a connection and `Watched` by the sweep. Ends with `close`, once."""

    def __init__(
        self,
        sink: ClientSink,
        *,
        method: str,
        family: Family,
        ids: ExchangeIds,
        member: str,
        held_ms: int,
        lease: LeaseLike,
        limits: ForwardLimits,
        held: HeldStream | None,
        may_be_loading: bool,
        close: bool,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sink = sink
        self._method = method
        self._family: Family = family
        self._ids = ids
        self._member = member
        self._held_ms = held_ms
        self._lease = lease
        self._limits = limits
        self._held = held
        self._may_be_loading = may_be_loading
        self._close_after = close or not sink.keeps_alive
        self._connection: UpstreamConnection | None = None
        self._body: OutgoingBody | None = None
        self._broken: ExchangeBroken | None = None
        self._over: Callable[[Forwarded | ExchangeError], None] | None = None
        self._done: asyncio.Future[Forwarded] | None = None
        self._head: AnswerHead | None = None
        self._first_byte_at: float | None = None
        self._looking: list[bytes] | None = None
        self._relaying = False
        self._paused = False
        self._deadline = self._loop.time() + limits.response_timeout_s
        self._read_at = 0.0

    async def run(
        self, connection: UpstreamConnection, head: bytes, body: OutgoingBody
    ) -> Forwarded:
        """
        Send the request on *connection* and relay its answer.

        Raises:
            ExchangeError: it failed and nothing of an answer went to the client.
        """
        if self._broken is not None:
            connection.abort()
            raise self._broken
        self._connection, self._body = connection, body
        done = self._future()
        connection.begin(self, self._method)
        if body.size <= _SMALL_BODY:
            connection.write(b"".join((head, *body.chunks())))
            connection.request_sent = True
        else:
            await self._send(connection, head, body)
        return await done

    async def go_on(self, connection: UpstreamConnection, body: OutgoingBody) -> Forwarded:
        """Relay the answer to a request that somebody else sent; raises as `run` does."""
        done = self._future()
        self.take_over(connection, body, self._over)
        return await done

    def take_over(
        self,
        connection: UpstreamConnection,
        body: OutgoingBody,
        over: Callable[[Forwarded | ExchangeError], None] | None,
    ) -> None:
        """Do what `go_on` does, and tell *over* how it ended."""
        self._connection, self._body, self._over = connection, body, over
        connection.pass_to(self)

    def close(self) -> None:
        """Let go of both sides, whatever happened; an unfinished answer is not waited for."""
        self._note_moved(self._loop.time())
        if self._connection is not None:
            self._connection.abort()
            self._connection = None
        if self._done is not None and self._done.done() and not self._done.cancelled():
            self._done.exception()  # may have been set after the handler was cancelled

    def tell(self, error: ExchangeError) -> Forwarded:
        """Put what `run` raised into the stream that was open before it (`HeldStream`)."""
        return self._broken_off(error)

    def so_far(self) -> Forwarded:
        """Describe what the client has seen, for the account of one that left meanwhile."""
        status = self._head.status if self._head is not None and self._relaying else 0
        result = self._result("client_gone", "client_gone", keep_alive=False, reset=False)
        return replace(result, status=status)

    def break_off(self, reason: BreakReason) -> None:
        """End it with an explicit error to the client (`LeaseLike.on_break`)."""
        self._broken = ExchangeBroken(reason)
        self._fail(self._broken)

    # -- Watched -------------------------------------------------------------------------

    def check(self, now: float) -> None:
        """Look at the deadlines."""
        if self._over is None:
            return
        self._note_moved(now)
        taken_at = self._sink.took(now)
        if self._sink.congested and taken_at == now:
            self._lease.moved_at = now
        if now - taken_at >= self._limits.write_stall_s:
            self._end("client_gone", "write_stall", reset=True)
        elif self._head is None:
            if now >= self._deadline:
                self._fail(UpstreamTimeout("sent no answer", self._limits.response_timeout_s))
        elif not self._paused and now - self._read_at >= self._limits.read_stall_s:
            self._fail(UpstreamTimeout("sent nothing more", self._limits.read_stall_s))

    # -- Receiver ------------------------------------------------------------------------

    def on_head(self, head: AnswerHead) -> None:
        """Decide whether the answer can be passed on or has to be looked at first."""
        self._head = head
        self._first_byte_at = self._loop.time()
        if self._held is not None and self._held.started:
            plain_stream = head.status == 200 and head.event_stream and not head.encoded
            if plain_stream and head.framing is not Framing.NONE:
                self._held.close()
                self._relaying = True
            else:
                self._looking = []
        elif head.status == 503 and self._may_be_loading and head.framing is not Framing.NONE:
            self._looking = []
        else:
            self._relay()

    def on_body(self, pieces: Sequence[bytes], framed: bytes | None, *, last: bool) -> None:
        """Pass on what came; hold the upstream back while the client is behind."""
        if last:
            self._connection = None
        self._read_at = self._lease.moved_at = self._loop.time()
        if self._looking is not None:
            self._looking.extend(pieces)
            if not last and sum(map(len, self._looking)) <= _LOOKED_AT:
                return
            seen, self._looking = self._looking, None
            if not self._accept(b"".join(seen), complete=last):
                return
            pieces, framed = seen, None
        if not self._sink.write_body(pieces, framed, last=last):
            self._end("client_gone", "client_gone")
        elif last:
            self._end("served", None)
        elif self._sink.congested:
            self._hold_back()
        elif framed is not None and self._connection is not None:
            self._connection.straight = self._sink.straight(self._hold_back)

    def on_whole(self, head: AnswerHead, body: bytes) -> None:
        """Take an answer in one piece."""
        self.on_head(head)
        self.on_body((body,) if body else (), None, last=True)

    def on_failed(self, error: ExchangeError) -> None:
        """The upstream will not complete its answer."""
        self._connection = None
        self._fail(error)

    # -- private -------------------------------------------------------------------------

    async def _send(self, connection: UpstreamConnection, head: bytes, body: OutgoingBody) -> None:
        connection.write(head)
        for piece in body.chunks():
            # An answer may come early (413, 401): it is relayed meanwhile, and the rest of the
            # body is not sent once it is complete.
            if self._over is None:
                return
            connection.write(piece)
            if connection.write_paused:
                await connection.drained()
                # What the kernel still holds back, no member has taken.
                self._lease.moved_at = self._loop.time()
        connection.request_sent = True
        if self._relaying:
            body.close()
        else:
            body.put_away()  # it is kept for another try, and the answer may take long

    def _relay(self) -> None:
        assert self._head is not None
        head = self._head
        framing = self._sink.framing_for(head.framing)
        self._relaying = True
        raw = answer_head(
            head,
            framing,
            ids=self._ids,
            member=self._member,
            held_ms=self._held_ms,
            close=self._close_after,
        )
        self._sink.begin(raw, framing, event_stream=head.event_stream and not head.encoded)
        if self._connection is None or self._connection.request_sent:
            assert self._body is not None
            self._body.close()

    def _accept(self, seen: bytes, *, complete: bool) -> bool:
        """Decide about an answer that was looked at; False if it is not passed on."""
        assert self._head is not None
        status = self._head.status
        if status == 503 and self._may_be_loading and _LOADING_MARKER in seen:
            self._fail(MemberLoading())
        elif self._held is not None and self._held.started:
            self._fail(_refusal(status, seen if complete and not self._head.encoded else b""))
        else:
            self._relay()
            return True
        return False

    def _note_moved(self, now: float) -> None:
        """Take note of what went straight from the connection to the sink."""
        if self._sink.moved:
            self._sink.moved = False
            self._read_at = self._lease.moved_at = now

    def _hold_back(self) -> None:
        """Let the upstream wait for the client."""
        self._paused = True
        if self._connection is not None:
            self._connection.pause_reading()
        self._sink.when_writable(self._resume)

    def _resume(self) -> None:
        self._paused = False
        self._read_at = self._lease.moved_at = self._loop.time()
        if self._sink.gone:
            self._end("client_gone", "client_gone")
        elif self._connection is not None:
            self._connection.resume_reading()

    def _fail(self, error: ExchangeError) -> None:
        """End it: as an exception while that is possible, else in the stream or by a cut."""
        if self._over is None:
            return
        self._drop_connection()
        self._tell_over(self._broken_off(error) if self._relaying else error)

    def _end(self, outcome: Outcome, code: str | None, *, reset: bool = False) -> None:
        self._drop_connection()
        if self._over is not None:
            keep_alive = outcome == "served" and not self._close_after
            self._tell_over(self._result(outcome, code, keep_alive=keep_alive, reset=reset))

    def _tell_over(self, result: Forwarded | ExchangeError) -> None:
        over, self._over = self._over, None
        assert over is not None
        over(result)

    def _future(self) -> asyncio.Future[Forwarded]:
        """Return what is done when this is over, for those who can wait."""
        done: asyncio.Future[Forwarded] = self._loop.create_future()
        self._done = done

        def over(result: Forwarded | ExchangeError) -> None:
            if done.done():
                return  # who waited was cancelled
            if isinstance(result, ExchangeError):
                done.set_exception(result)
            else:
                done.set_result(result)

        self._over = over
        return done

    def _broken_off(self, error: ExchangeError) -> Forwarded:
        tellable = self._sink.can_take_frame()
        if tellable:
            frame = error_frame(
                self._family,
                status=error.status,
                code=error.code,
                message=str(error),
                request_id=self._ids.request_id,
            )
            self._sink.end_with(frame)
        # Told and framed to its end it is an answer like any other: the client may use the
        # connection again, and nobody has told it not to.
        keep_alive = tellable and self._sink.framing is Framing.CHUNKED and not self._close_after
        return self._result("upstream_error", error.code, keep_alive=keep_alive, reset=not tellable)

    def _result(
        self, outcome: Outcome, code: str | None, *, keep_alive: bool, reset: bool
    ) -> Forwarded:
        status = self._head.status if self._head is not None else 0
        return Forwarded(
            keep_alive=keep_alive,
            cut_off=self._sink.reset if reset else None,
            outcome=outcome,
            status=status,
            bytes_sent=self._sink.sent,
            code=code,
            first_byte_at=self._first_byte_at,
        )

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()


def _refusal(status: int, body: bytes) -> AnswerRefused:
    """Say in an open stream what the upstream answered instead of one."""
    if 200 <= status < 400:
        return AnswerRefused(
            502, "upstream_protocol_error", "The model server did not answer with an event stream."
        )
    message, code = f"The model server answered with status {status}.", "upstream_error"
    try:
        error = json.loads(body)["error"]
        if isinstance(error, str):
            message = error
        else:
            message = str(error["message"])
            if isinstance(error.get("code"), str):
                code = error["code"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass  # not one of the usual shapes: the status has to do
    return AnswerRefused(status, code, message[:1000])
