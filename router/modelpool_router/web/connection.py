"""
One client connection of the hardened server: aiohttp's, with what a public proxy needs.

This and `server` alone touch aiohttp's private surface on the server side (the minor version is
pinned in pyproject.toml). Added here: failures of the parser answered as HTTP/1.1 JSON that quotes
nothing; time limits for silence and for the head; pipelining that never stops us from noticing a
client that left; upgrade offers answered and the connection closed; lingering close, so that a
client that still writes can read why it was refused.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import traceback
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import yarl
from aiohttp import web, web_protocol
from aiohttp.http import HttpVersion11, RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from multidict import CIMultiDict, CIMultiDictProxy

from . import head
from .errors import ApiError, family_of, render
from .front import MAX_BACKLOG
from .request import Request

if TYPE_CHECKING:
    from .server import FrontServer

log = logging.getLogger("modelpool.web")

_MAX_HEAD = 64 * 1024
"""Bytes of a head that comes in pieces."""

_NO_HEADERS: CIMultiDictProxy[str] = CIMultiDictProxy(CIMultiDict())

UNREADABLE = RawRequestMessage(
    "UNKNOWN", "/", HttpVersion11, _NO_HEADERS, (), True, None, False, False, yarl.URL("/")
)
"""Stands for a request that could not be read; aiohttp's own one would answer as HTTP/1.0."""


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
        complete(response.headers, self)


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
        "_socket",
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
        self._socket: asyncio.Transport | None = None  # until it is lost, closed or not

    # --- connection ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        if self._front.is_full:
            self._force_close = True
            self._front.turn_away(transport)
            return
        super().connection_made(transport)
        self._socket = transport
        self._front.watch(self, self._front.options.silent_s)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._front.unwatch(self)
        self._backlog, self._socket = b"", None
        super().connection_lost(exc)

    @property
    def ends(self) -> bool:
        """True when the answer under way is the last one here."""
        return self._front.draining or (self._dropped and not self._messages)

    @property
    def is_engaged(self) -> bool:
        """True while the client has yet to take a part of what was written."""
        return self._socket is not None and self._socket.get_write_buffer_size() > 0

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
            if len(self._backlog) > MAX_BACKLOG:
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
            if request._message is UNREADABLE:
                self._front.options.on_refused(error.code)
        elif isinstance(exc, HttpProcessingError):
            error = head.parse_failure(exc)
            self._front.options.on_refused(error.code)
        else:
            error = handler_failed(exc, request.request_id)
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
        unreadable = request._message is UNREADABLE
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


def complete(headers: CIMultiDict[str], request: Request) -> None:
    """Add what every answer carries."""
    headers.setdefault("x-request-id", request.request_id)
    headers.setdefault("request-id", request.request_id)
    for name, value in request.cors_headers.items():
        headers.setdefault(name, value)


def handler_failed(error: BaseException | None, request_id: str) -> ApiError:
    """Log a fault of ours and return what the client is told: no word of it."""
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
