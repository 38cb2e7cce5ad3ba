"""
The own front: plain requests without aiohttp, at a fraction of its cost.

A connection begins here and stays for as long as everything on it is plain: one whole head at a
time, GET or POST, a path of `core.paths` to the letter, HTTP/1.1, ASCII, each field once, a body
with a length. At the first thing that is not, the connection goes to aiohttp's server, together
with the bytes that have not been answered, and never comes back. So nothing is refused or repaired
here, and there is no second opinion on what is malformed: `server` has the only one.

Handlers are the same behind both fronts and see the same `Request`. Here they are run without a
task: a request that does not have to wait is answered in the call that brought it. Only a body
that comes in pieces gets a task (and aiohttp's `StreamReader`), for that is where time limits are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, cast

from aiohttp import web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.streams import StreamReader

from ..core.headers import Field, Stencil
from .plain import PlainHead, PlainRequest, WholeBody, read_head
from .request import extra_fields, wished_id
from .sink import PipedResponse
from .steps import InTask, Steps

if TYPE_CHECKING:
    from .server import FrontServer
    from .short import ShortExchange

MAX_BACKLOG: Final = 64 * 1024
"""Bytes of pipelined requests kept unread behind those that wait for their turn, on any front."""
_BODY_LIMIT: Final = 64 * 1024  # as aiohttp: twice this much may wait to be read
_COLLECTED: Final = 2 * _BODY_LIMIT
_COLLECT_S: Final = 0.25


class OwnConnection(BaseProtocol):
    """
    One client connection, until something on it is not plain.

    A `BaseProtocol` of aiohttp, whose flow control it uses, and to `FrontServer` one of its
    connections like all others.
    """

    __slots__ = (
        "_backlog",
        "_collected",
        "_deaf",
        "_head",
        "_missing",
        "_running",
        "_server",
        "_since",
        "_stream",
        "_idle_limit",
        "ids",
    )

    def __init__(self, server: FrontServer, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._upgraded = True  # for the base: there is no parser that has to be paused
        self._server = server
        self.ids = server.ids
        """Ids for requests that bring none."""
        self._running: Steps | InTask | ShortExchange | None = None
        self._stream: StreamReader | None = None
        self._collected: list[bytes] = []  # of a body that will be here in a moment
        self._missing = 0  # bytes of the body that is being received
        self._backlog = b""
        self._head: PlainHead | None = None
        self._deaf = False
        self._since = 0.0
        self._idle_limit = server.options.silent_s

    # --- connection ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self._server.is_full:
            self._server.turn_away(self.transport)
            return
        self._server.own.add(self)
        self._since = self._loop.time()
        self._server.watch(self, self._idle_limit)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._server.unwatch(self)
        super().connection_lost(exc)
        self._backlog, self._collected = b"", []
        if self._running is None:
            self._server.own.discard(self)
            return
        if self._stream is not None:
            self._stream.set_exception(ConnectionResetError("the client left"))
        self._running.cancel()

    @property
    def ends(self) -> bool:
        """True when the answer under way is the last one here."""
        return self._server.draining or (self._deaf and not self._has_whole_request())

    @property
    def is_engaged(self) -> bool:
        """True while a body that is waited for here comes in, or a part of an answer goes out."""
        transport = self.transport
        if transport is None:
            return False
        return bool(self._collected) or transport.get_write_buffer_size() > 0

    def close_if_idle(self) -> None:
        """Close now unless a request is under way, or its body is on its way."""
        if self._running is None and not self._collected:
            self.force_close()

    def close(self) -> None:
        """Answer nothing but what is under way."""
        self._deaf, self._backlog = True, b""
        self.close_if_idle()

    def force_close(self) -> None:
        """Close without a further word."""
        if self.transport is not None:
            self.transport.close()

    async def shutdown(self, timeout: float | None = None) -> None:
        """Let what is under way end within *timeout* seconds, then cut it off."""
        running = self._running
        if running is not None:
            await asyncio.wait([running.ended], timeout=timeout)
            running.cancel()
            await asyncio.wait([running.ended], timeout=timeout)
        if self.transport is not None:
            self.transport.abort()

    def overdue(self) -> None:
        """React to the end of a time limit; looked at late, so that requests do not pay for it."""
        if self._collected:
            # It takes longer: let who keeps the time limits of bodies wait for it.
            received, self._collected = b"".join(self._collected), []
            assert self._head is not None
            self._answer_stream(self._head, received)
        left = self._since + self._idle_limit - self._loop.time()
        if self._running is None and left <= 0:
            self.force_close()
        else:
            self._server.watch(self, self._idle_limit if self._running is not None else left)

    # --- reading ---------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._running is None and not (self._missing or self._deaf):
            if self._backlog:
                # (it comes between an answer and `_go_on` with what was kept meanwhile)
                data, self._backlog = self._backlog + data, b""
            self._begin(data)
            return
        if self._deaf:
            return
        if self._missing:
            data = self._receive(data)
            if not data:
                return
        if self._running is None:
            self._begin(data)
            return
        self._backlog += data
        if len(self._backlog) > MAX_BACKLOG:
            # Reading on is how we notice that a client left; so what cannot be kept is dropped,
            # and the last answer to what was read whole ends the connection.
            self._deaf = True

    def eof_received(self) -> None:
        """Close: there is nobody to answer any more."""

    def _receive(self, data: bytes) -> bytes:
        """Take more of a body; return what is behind it."""
        stream = self._stream
        mine = data if len(data) <= self._missing else data[: self._missing]
        self._missing -= len(mine)
        if self._collected:
            self._collected.append(mine)
            if not self._missing:
                body, self._collected = b"".join(self._collected), []
                self._backlog = data[len(mine) :]
                assert self._head is not None
                self._answer_whole(self._head, body)
                return b""
        elif stream is not None:
            stream.feed_data(mine)
            if not self._missing:
                self._stream = None
                stream.feed_eof()
        return data[len(mine) :]

    def _has_whole_request(self) -> bool:
        head = read_head(self._backlog)
        return head is not None and head.end + head.length <= len(self._backlog)

    def _begin(self, data: bytes) -> None:
        """Answer the request at the beginning of *data*, or leave the connection to aiohttp."""
        head = self._head
        if head is None or not (data.startswith(head.text) or self._fits(head, data)):
            head = read_head(data)
            if head is None:
                self._hand_over(data)
                return
            if head.method == "POST":
                head.text = data[: head.end]
                head.stencil = Stencil.of(head.text, head.length)
                self._head = head
        begin, whole = head.end, head.end + head.length
        if len(data) >= whole:
            self._backlog = data[whole:]
            self._answer_whole(head, data[begin:whole])
            return
        self._backlog = b""
        short = self._server.short
        if short is not None and head.length <= _COLLECTED and short.expects(head):
            # Most clients send head and body apart: the rest will be here in a moment.
            self._collected = [data[head.end :]]
            self._missing = whole - len(data)
            self._head = head
            self._server.watch(self, _COLLECT_S)
            return
        self._answer_stream(head, data[head.end :])

    def _fits(self, head: PlainHead, data: bytes) -> bool:
        """Say whether *data* begins with *head* but for its length; note that length then."""
        stencil = head.stencil
        if stencil is None or not stencil.fits(data):
            return False
        head.length, head.end = stencil.length, stencil.end
        head.text = data[: stencil.end]
        return True

    def _answer_stream(self, head: PlainHead, received: bytes) -> None:
        """Answer a request whose body is still on its way."""
        self._stream = stream = StreamReader(self, _BODY_LIMIT, loop=self._loop)
        self._missing = head.length
        request = self._request(head, stream, self.request_id_of(head))
        self._running = InTask(self, request, self._server.answer(request), self._loop)
        self._receive(received)

    def _answer_whole(self, head: PlainHead, body: bytes) -> None:
        short = self._server.short
        if short is not None and head.method == "POST" and not self._paused:
            self._running = short.begin(self, head, body)
            if self._running is not None:
                return
        request = self.request_for(head, body, self.request_id_of(head))
        self.go_on(request, self._server.answer(request))

    def request_id_of(self, head: PlainHead) -> str:
        """Return the id that a request with this head asks for, or a new one."""
        return wished_id(dict.get(head.fields, "x-request-id")) or next(self.ids)

    @property
    def is_as_usual(self) -> bool:
        """Whether nothing has to be added to the answer under way: no `extra_fields`, no end."""
        server = self._server
        return not (self._deaf or server.draining or server.options.cors.origins)

    def extra_fields(self, head: PlainHead) -> tuple[Field, ...]:
        """Return what else belongs into every answer to a request with this head."""
        return extra_fields(self._server.options.cors.headers(head.fields))

    def request_for(self, head: PlainHead, body: bytes, request_id: str) -> PlainRequest:
        """Return the request with this head and this body as handlers see it."""
        return self._request(head, WholeBody(body), request_id)

    def _request(
        self, head: PlainHead, content: WholeBody | StreamReader, request_id: str
    ) -> PlainRequest:
        cors = self._server.options.cors.headers(head.fields)
        return PlainRequest(self, head, content, request_id, cors)

    def go_on(self, request: PlainRequest, work: Coroutine[Any, Any, web.StreamResponse]) -> None:
        """Run *work* and send what it returns."""
        self._running = steps = Steps(self, request, self._loop)
        steps.run(work)

    def _hand_over(self, data: bytes) -> None:
        """Let aiohttp go on with this connection, beginning with *data*."""
        transport, server = self.transport, self._server
        assert transport is not None
        server.unwatch(self)
        server.own.discard(self)
        other = server.aiohttp_connection()
        other._paused = self._paused
        self.transport = None
        transport.set_protocol(other)
        other.connection_made(transport)
        other.data_received(data)

    # --- answering -------------------------------------------------------------------------------

    def answered(self, request: PlainRequest, response: web.StreamResponse) -> None:
        """Send what is not sent yet, then go on with the next request or end the connection."""
        self._running = None
        transport = self.transport
        if transport is None:
            self._server.own.discard(self)
            return
        unread = self._missing > 0
        if isinstance(response, PipedResponse):
            stays = response.keep_alive and not unread and not self.ends
            response.finish()
        else:
            stays = not unread and not self.ends
            transport.write(self._server.written(request, response, close=not stays))
        if transport.is_closing():
            return
        self.settled(self._loop.time(), stays=stays, unread=unread)

    def passed_on(self, *, keep_alive: bool, cut_off: Callable[[], None] | None) -> None:
        """Do what `answered` does for an answer that was written past this connection."""
        self._running = None
        transport = self.transport
        if transport is None:
            self._server.own.discard(self)
            return
        if cut_off is not None:
            cut_off()
        if not transport.is_closing():
            self.settled(self._loop.time(), stays=keep_alive and not self.ends)

    def settled(self, now: float, *, stays: bool, unread: bool = False) -> None:
        """Go on with the next request, or end the connection: an answer was sent."""
        self._running = None
        if not stays:
            self._end(linger=unread or self._deaf)
            return
        self._since = now
        self._idle_limit = self._server.options.keep_alive_s
        if self._backlog:
            self._loop.call_soon(self._go_on)

    def lost(self) -> None:
        """The answer cannot be completed."""
        self._running = None
        if self.transport is not None:
            self.transport.abort()
        else:
            self._server.own.discard(self)

    def _go_on(self) -> None:
        if self._running is None and self._backlog and self.transport is not None:
            data, self._backlog = self._backlog, b""
            self._begin(data)

    def _end(self, *, linger: bool) -> None:
        """
        Close. With *linger* our side first; what the client still sends is read and dropped.

        Closing with unread bytes makes the kernel send a reset, which can destroy the answer
        before the client has read it.
        """
        transport = self.transport
        assert transport is not None
        self._deaf = True
        self._backlog = b""
        if not linger or not transport.can_write_eof():
            transport.close()
            return
        if self._reading_paused:
            self._reading_paused = False
            transport.resume_reading()
        transport.write_eof()
        self._since = self._loop.time()
        self._idle_limit = self._server.options.linger_s
        self._server.watch(self, self._idle_limit)
