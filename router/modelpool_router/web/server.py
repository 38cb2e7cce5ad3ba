"""
The hardened HTTP server: aiohttp's, with what a public proxy needs and it does not do.

The only place that touches aiohttp's private surface on the server side (the minor version is
pinned in pyproject.toml). Added here: failures of the parser answered as HTTP/1.1 JSON that quotes
nothing; time limits for silence and for the head; pipelining that never stops us from noticing a
client that left; upgrade offers answered and the connection closed; lingering close, so that a
client that still writes can read why it was refused; the checks of `head`; CORS; draining.

Routes, keys and bodies are the handler's.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import logging
import os
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

import yarl
from aiohttp import web, web_protocol
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import HttpVersion11, RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import HttpRequestParser
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from multidict import CIMultiDict, CIMultiDictProxy

from . import head
from .cors import Cors
from .errors import ApiError, envelope, family_of, render, response_headers
from .front import OwnConnection, PlainRequest
from .request import Request, wished_id

if TYPE_CHECKING:
    from .short import ShortWay

log = logging.getLogger("modelpool.web")

Handler = Callable[[Any], Awaitable[web.StreamResponse]]
"""Gets a `Request`."""

_MAX_HEAD = 64 * 1024
"""Bytes of a head that comes in pieces."""
_MAX_BACKLOG = 64 * 1024
"""Bytes of pipelined requests kept unparsed behind those that wait for their turn."""
_DISTRUST = frozenset(
    {"invalid_framing", "invalid_host", "http_version_not_supported", "expectation_failed"}
)
"""After these the two ends may disagree on where the next request begins."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Limits of connections and heads; what concerns bodies is in `intake.IntakeLimits`."""

    silent_s: float = 15.0
    """How long a new connection may say nothing."""
    head_s: float = 10.0
    """Time for a whole head, from its first byte."""
    keep_alive_s: float = 75.0
    """How long a connection may idle between requests; longer than proxies in front keep theirs."""
    linger_s: float = 10.0
    """How long we read and drop what a refused client still sends, so that it can read why."""
    max_connections: int = 4096
    cors: Cors = field(default_factory=Cors)
    own_front: bool = True
    """Whether plain requests are answered without aiohttp, see `front`."""
    on_refused: Callable[[str], None] = lambda code: None
    """Told the code of everything that is refused here, before the handler saw it."""


class ParserMissing(RuntimeError):
    """aiohttp runs on its lenient pure-Python parser."""


def require_c_parser() -> None:
    """
    Make sure that aiohttp uses its C parser.

    Raises:
        ParserMissing: the Python one reads versions, methods and trailers differently; it is not
            what our strictness was tested with.
    """
    if HttpRequestParser.__module__ != "aiohttp._http_parser":
        raise ParserMissing(
            "aiohttp runs without its C parser, which modelpool needs: unset "
            "AIOHTTP_NO_EXTENSIONS, or install a binary wheel of aiohttp for this Python"
        )


class FrontRequest(web.BaseRequest):
    """A request that passed the checks of `head`."""

    ATTRS = web.BaseRequest.ATTRS | frozenset(
        {"answer_begun", "cors_headers", "is_last", "request_id", "route_path", "route_query"}
    )

    request_id: str
    """The client's own if it is short and plain, else ours."""
    route_path: str = ""
    """Percent-encoded as sent, inner double slashes collapsed; see `core.target`."""
    route_query: str = ""
    """With its question mark, or empty."""
    cors_headers: Mapping[str, str]
    """To be part of every answer; aiohttp responses get them by themselves."""
    answer_begun: bool = False
    """To be set by whoever writes an answer past aiohttp: no error can follow it then."""
    is_last: bool = False
    """Nothing that comes behind this request on its connection is to be read."""

    @property
    def must_close(self) -> bool:
        """
        True when the answer has to say ``Connection: close``; aiohttp responses do by themselves.

        May turn true while the request is held: draining, a pipeline that overflowed.
        """
        connection = self._protocol
        assert isinstance(connection, FrontConnection)
        return self.is_last or connection.ends

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        response.headers.pop("Server", None)
        _complete(response.headers, self)


class FrontServer(web.Server):
    """Makes one `FrontConnection` per client; to be given to ``loop.create_server``."""

    def __init__(self, handler: Handler, options: ServerOptions) -> None:
        super().__init__(
            self._serve,  # type: ignore[arg-type]  # our request class is what we make
            request_factory=self._make_front_request,
            handler_cancellation=True,
        )
        self.options = options
        self.draining = False
        self.short: ShortWay | None = None
        """Tried first for plain requests; whoever knows what is behind the handler sets it."""
        self.own: set[OwnConnection] = set()
        """Connections that are still plain; the rest are aiohttp's."""
        self._front_handler = handler
        prefix = os.urandom(6).hex()
        self.ids = (f"req_{prefix}{n:08x}" for n in itertools.count(1))
        self._deadlines: dict[FrontConnection | OwnConnection, float] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        shortest = min(options.silent_s, options.head_s, options.linger_s)
        self._sweep_s = min(max(shortest / 8, 0.005), 0.5)

    def __call__(self) -> Any:
        if self.options.own_front:
            return OwnConnection(self, self._loop)
        return self.aiohttp_connection()

    def aiohttp_connection(self) -> FrontConnection:
        """Return a connection for everything that is not plain."""
        return FrontConnection(self, self._loop)

    @property
    def connections(self) -> list[Any]:
        """All of them, of either kind."""
        return [*self.own, *self._connections]

    @property
    def is_full(self) -> bool:
        """Whether one more connection is to be turned away."""
        return len(self.own) + len(self._connections) >= self.options.max_connections

    def begin_drain(self) -> None:
        """
        Close idle connections, and let every answer from now on be the last of its connection.

        Stop accepting first, or go on accepting: what comes in still is served, and then closed.
        """
        self.draining = True
        for connection in self.connections:
            connection.close_if_idle()

    async def shutdown(self, timeout: float | None = None) -> None:
        """Wait for running handlers up to *timeout* seconds, cancel the rest, close everything."""
        self.begin_drain()
        await asyncio.gather(
            super().shutdown(timeout), *(each.shutdown(timeout) for each in tuple(self.own))
        )
        self.own.clear()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        self._deadlines.clear()

    def watch(self, connection: FrontConnection | OwnConnection, seconds: float) -> None:
        """Call the connection's `overdue` after *seconds*, unless it is watched anew or let go."""
        self._deadlines[connection] = self._loop.time() + seconds
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(self._sweep_s, self._sweep)

    def unwatch(self, connection: FrontConnection | OwnConnection) -> None:
        """End `watch`."""
        self._deadlines.pop(connection, None)

    def _sweep(self) -> None:
        self._sweeper = None
        now = self._loop.time()
        for connection in [each for each, at in self._deadlines.items() if at <= now]:
            del self._deadlines[connection]
            connection.overdue()
        if self._deadlines:
            self._sweeper = self._loop.call_later(self._sweep_s, self._sweep)

    def turn_away(self, transport: asyncio.Transport) -> None:
        """Refuse a connection that is one too many."""
        error = ApiError.of(
            "queue_full", "The router has as many connections as it may.", retry_after_s=5.0
        )
        self.options.on_refused(error.code)
        transport.write(_raw_answer(error, next(self.ids)))
        transport.close()

    async def answer(self, request: PlainRequest) -> web.StreamResponse:
        """
        Answer a plain request, whatever happens.

        Raises:
            asyncio.CancelledError, ConnectionError: there is nobody to answer, or it has begun.
        """
        try:
            return await self._front_handler(request)
        except ApiError as refusal:
            error = refusal
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception as bug:  # noqa: BLE001 # a handler's boundary: it is logged, without its text
            error = _bug(bug, request.request_id)
        if request.answer_begun or request.output_size:
            raise ConnectionError("an answer has begun already")
        return render(error, family_of(request.route_path), request.request_id)

    def written(self, request: PlainRequest, response: web.StreamResponse, *, close: bool) -> bytes:
        """Return *response*, whose body is in memory, as it goes to a client."""
        assert isinstance(response, web.Response)
        body = response.body or b""
        assert isinstance(body, bytes)
        headers = response.headers
        _complete(headers, request)
        headers["Content-Length"] = str(len(body))
        headers["Date"] = rfc822_formatted_time()
        if close:
            headers["Connection"] = "close"
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        reason = HTTPStatus(response.status).phrase
        return f"HTTP/1.1 {response.status} {reason}\r\n{lines}\r\n".encode("latin-1") + body

    def _make_front_request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: web_protocol.RequestHandler,
        writer: Any,
        task: asyncio.Task[None],
    ) -> FrontRequest:
        if message is web_protocol.ERROR:
            message = _UNREADABLE
        request = FrontRequest(message, payload, protocol, writer, task, self._loop)
        request.request_id = wished_id(message.headers.get("x-request-id")) or next(self.ids)
        request.cors_headers = self.options.cors.headers(message.headers)
        request.is_last = head.offers_upgrade(request)
        return request

    async def _serve(self, request: FrontRequest) -> web.StreamResponse:
        try:
            target = head.check(request)
        except ApiError as error:
            self.options.on_refused(error.code)
            if error.code in _DISTRUST:
                request.is_last = True
            raise
        request.route_path = target.path
        request.route_query = target.query
        preflight = self.options.cors.preflight(request.method, request.headers)
        if preflight is not None:
            return web.Response(status=204, headers=preflight)
        return await self._front_handler(request)


class _Phase(enum.Enum):
    """What the client is being waited for, as far as a time limit goes with it."""

    SILENT = enum.auto()  # connected, has said nothing
    HEAD = enum.auto()  # inside a head
    SERVED = enum.auto()  # head complete: the handler's limits count; or idle, which aiohttp times
    LINGERING = enum.auto()  # refused; we only drop what still comes


class FrontConnection(web_protocol.RequestHandler):
    """One client connection."""

    __slots__ = (
        "_backlog",
        "_deaf",
        "_dropped",
        "_front",
        "_head_bytes",
        "_latest_payload",
        "_phase",
    )

    def __init__(self, server: FrontServer, loop: asyncio.AbstractEventLoop) -> None:
        options = server.options
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=options.keep_alive_s,
            access_log=None,  # type: ignore[arg-type]  # accepted, and means none
            logger=log,
            max_line_size=head.MAX_LINE,
            max_field_size=head.MAX_FIELD,
            max_headers=head.MAX_FIELDS,
            lingering_time=0.0,  # ours begins with a half-close, theirs does not
            auto_decompress=False,
        )
        self._front = server
        self._phase = _Phase.SILENT
        self._head_bytes = 0
        self._backlog = b""
        self._deaf = False  # nothing is parsed any more
        self._dropped = False  # and something may have been lost by that
        self._latest_payload: StreamReader = EMPTY_PAYLOAD

    # --- connection ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        if self._front.is_full:
            self._force_close = True
            self._front.turn_away(transport)
            return
        super().connection_made(transport)
        self._front.watch(self, self._front.options.silent_s)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._front.unwatch(self)
        self._backlog = b""
        super().connection_lost(exc)

    @property
    def ends(self) -> bool:
        """True when the answer under way is the last one here."""
        return self._front.draining or (self._dropped and not self._messages)

    def close_if_idle(self) -> None:
        """Close now unless a request is under way or its head has begun to arrive."""
        waiting = self._waiter is not None and not self._waiter.done()
        if waiting and self._phase in (_Phase.SILENT, _Phase.SERVED):
            self.force_close()

    def overdue(self) -> None:
        """React to the end of a time limit that `FrontServer.watch` was told."""
        if self._phase is _Phase.HEAD:
            self._refuse(ApiError.of("request_timeout", "The request head did not arrive in time."))
        else:
            self.force_close()

    # --- reading ---------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        # An empty call comes from aiohttp itself: parse on what you have kept.
        if self._deaf or self._force_close or self._close:
            return
        if len(self._messages) >= self._max_msg_queue_size:
            self._backlog += data
            if len(self._backlog) > _MAX_BACKLOG:
                self._go_deaf()
            return
        if self._backlog:
            data, self._backlog = self._backlog + data, b""
        seen = self._request_count
        in_body = not self._latest_payload.is_eof()
        super().data_received(data)
        if self._request_count != seen:
            self._front.unwatch(self)
            self._phase = _Phase.SERVED
            self._head_bytes = 0
            self._note_latest()
        elif data and not in_body:
            self._in_head(len(data))

    def _note_latest(self) -> None:
        message, payload = self._messages[-1]
        if not isinstance(message, web_protocol._ErrInfo):
            self._latest_payload = payload
            return
        # The parser failed and stays so. A body that it was inside of will never end: whoever
        # reads it must hear of it, and answers in its place.
        self._deaf = True
        unfinished = self._latest_payload
        if len(self._messages) > 1:
            unfinished = self._messages[-2][1]
        if not unfinished.is_eof() and unfinished.exception() is None:
            unfinished.set_exception(web_protocol.RequestPayloadError())

    def _in_head(self, size: int) -> None:
        if self._phase is not _Phase.HEAD:
            self._phase = _Phase.HEAD
            self._front.watch(self, self._front.options.head_s)
        self._head_bytes += size
        if self._head_bytes > _MAX_HEAD:
            self._refuse(head.too_many_fields())

    def _refuse(self, error: ApiError) -> None:
        """Answer *error* after what is under way, and read no more."""
        self._deaf = True
        self._front.unwatch(self)
        self._phase = _Phase.SERVED
        info = web_protocol._ErrInfo(status=error.status, exc=error, message="")
        self._messages.append((info, EMPTY_PAYLOAD))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _go_deaf(self) -> None:
        """Drop whatever still comes; the last answer to what was read whole ends the connection."""
        self._deaf = self._dropped = True
        self._backlog = b""
        if self._messages and not self._messages[-1][1].is_eof():
            self._messages.pop()

    def pause_reading(self) -> None:
        # Asked for by a body that fills faster than it is read. When it belongs to a request whose
        # turn has not come, stopping would keep us from noticing that the client left.
        current = self._current_request
        if current is not None and current._payload.is_eof():
            self._go_deaf()
            return
        super().pause_reading()

    def _pause_reading_for_buffer(self) -> None:
        # Same reason: with a full queue the socket is still read, see `data_received`.
        self._buffer_paused = True

    # --- answering -------------------------------------------------------------------------------

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return our answer to a failure of the parser, a refusal, or a bug; quote nothing."""
        assert isinstance(request, FrontRequest)
        if isinstance(exc, ApiError):
            error = exc
            if request._message is _UNREADABLE:
                self._front.options.on_refused(error.code)
        elif isinstance(exc, HttpProcessingError):
            error = head.parse_failure(exc)
            self._front.options.on_refused(error.code)
        else:
            error = _bug(exc, request.request_id)
        if request.answer_begun or request.writer.output_size > 0:
            if self.transport is not None:
                self.transport.abort()
            raise ConnectionError("an answer has begun already")
        response = render(error, family_of(request.route_path), request.request_id)
        if request.version != HttpVersion11:
            # The status line tells our version, not the client's. An old client would have to be
            # told that the connection stays, so it does not.
            request._cache["version"] = HttpVersion11
            response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send what is left of the answer; decide whether the connection outlives it."""
        assert isinstance(request, FrontRequest)
        unread = not request._payload.is_eof() or request._payload.exception() is not None
        unreadable = request._message is _UNREADABLE
        if unread or unreadable or request.must_close:
            resp.force_close()
        done, reset = await super().finish_response(request, resp, start_time)
        if (
            not done.keep_alive
            and not reset
            and (unread or unreadable or self._deaf or head.offers_upgrade(request))
        ):
            self._linger()
        return done, reset

    def _linger(self) -> None:
        """
        Close our side, then read and drop what the client sends until it closes its own.

        Closing with unread bytes makes the kernel send a reset, which can destroy the answer
        before the client has read it.
        """
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        self._force_close = True  # aiohttp: ends its loop, and leaves the transport alone
        self._deaf = True
        self._phase = _Phase.LINGERING
        self._reading_paused = self._buffer_paused = False
        self._resume_transport_reading()
        if transport.can_write_eof():
            transport.write_eof()
        self._front.watch(self, self._front.options.linger_s)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log a failure inside aiohttp without its text, which may quote the request."""
        info = kw.get("exc_info")
        _log_bug("connection failed", info if isinstance(info, BaseException) else None, "")


def make_server(handler: Handler, options: ServerOptions | None = None) -> FrontServer:
    """
    Return the protocol factory for ``loop.create_server``; needs a running loop.

    Args:
        handler: answers one `FrontRequest`. May raise `ApiError`. It is cancelled when its client
            leaves.
        options: limits; None = the defaults.

    Raises:
        ParserMissing: see `require_c_parser`.
    """
    require_c_parser()
    return FrontServer(handler, options or ServerOptions())


_NO_HEADERS: CIMultiDictProxy[str] = CIMultiDictProxy(CIMultiDict())

_UNREADABLE = RawRequestMessage(
    "UNKNOWN", "/", HttpVersion11, _NO_HEADERS, (), True, None, False, False, yarl.URL("/")
)
"""Stands for a request that could not be read; aiohttp's own one would answer as HTTP/1.0."""


def _raw_answer(error: ApiError, request_id: str) -> bytes:
    body = envelope(error, "openai", request_id)
    headers = response_headers(error, request_id)
    headers["Content-Length"] = str(len(body))
    headers["Connection"] = "close"
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {error.status} Service Unavailable\r\n{lines}\r\n".encode("ascii") + body


def _complete(headers: CIMultiDict[str], request: Request) -> None:
    """Add what every answer carries."""
    headers.setdefault("x-request-id", request.request_id)
    headers.setdefault("request-id", request.request_id)
    for name, value in request.cors_headers.items():
        headers.setdefault(name, value)


def _bug(error: BaseException | None, request_id: str) -> ApiError:
    _log_bug("request handler failed", error, request_id)
    return ApiError.of("internal_error", "The router failed; its log has the details.")


def _log_bug(event: str, error: BaseException | None, request_id: str) -> None:
    """Log where it happened, by file and line; an exception's text may quote the request."""
    where: Iterable[traceback.FrameSummary] = ()
    if error is not None and error.__traceback__ is not None:
        where = traceback.extract_tb(error.__traceback__)
    log.error(
        event,
        extra={
            "error": type(error).__name__ if error is not None else None,
            "request_id": request_id,
            "where": " < ".join(f"{each.filename}:{each.lineno}" for each in reversed([*where])),
        },
    )
