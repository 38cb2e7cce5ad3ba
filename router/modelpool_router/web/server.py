"""
The hardened HTTP server: all connections of the data port, their limits, and draining.

Plain requests are answered by `front`, everything else by aiohttp with what `connection` adds to
it. Here is what concerns all of them: who gets in, who is overdue, the checks of `head`, CORS.
Routes, keys and bodies are the handler's.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from aiohttp import web, web_protocol
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import RawRequestMessage
from aiohttp.http_parser import HttpRequestParser
from aiohttp.streams import StreamReader

from . import head
from .connection import UNREADABLE, FrontConnection, FrontRequest, complete, handler_failed
from .cors import Cors
from .errors import ApiError, envelope, family_of, render, response_headers
from .front import OwnConnection
from .plain import PlainRequest
from .request import wished_id

if TYPE_CHECKING:
    from .short import ShortWay

log = logging.getLogger("modelpool.web")

Handler = Callable[[Any], Awaitable[web.StreamResponse]]
"""Gets a `Request`."""

_DISTRUST = frozenset(
    {"invalid_framing", "invalid_host", "http_version_not_supported", "expectation_failed"}
)
"""After these the two ends may disagree on where the next request begins."""
_LOOK_S = 0.02


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
        # (made without a step of Python: each request takes one)
        self.ids = map(f"req_{prefix}".__add__, map(str, itertools.count(10**8)))
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
        So is what has arrived by now, unread: the sockets are looked at once more before any is
        closed, for its client would get a reset in place of an answer.
        """
        self.draining = True
        # (what the second call finds has been read by those that came between the two)
        self._loop.call_soon(self._loop.call_soon, self._close_idle)

    def _close_idle(self) -> None:
        for connection in self.connections:
            connection.close_if_idle()

    @property
    def is_engaged(self) -> bool:
        """Whether some client has yet to take what was written, or is about to be answered."""
        return any(each.is_engaged for each in self.connections)

    async def until_free(self) -> None:
        """Return when no connection is engaged."""
        while self.is_engaged:  # noqa: ASYNC110 # nobody tells when a transport's buffer is empty
            await asyncio.sleep(_LOOK_S)

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
            error = handler_failed(bug, request.request_id)
        if request.answer_begun or request.output_size:
            raise ConnectionError("an answer has begun already")
        return render(error, family_of(request.route_path), request.request_id)

    def written(self, request: PlainRequest, response: web.StreamResponse, *, close: bool) -> bytes:
        """Return *response*, whose body is in memory, as it goes to a client."""
        assert isinstance(response, web.Response)
        body = response.body or b""
        assert isinstance(body, bytes)
        headers = response.headers
        complete(headers, request)
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
            message = UNREADABLE
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


def _raw_answer(error: ApiError, request_id: str) -> bytes:
    body = envelope(error, "openai", request_id)
    headers = response_headers(error, request_id)
    headers["Content-Length"] = str(len(body))
    headers["Connection"] = "close"
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {error.status} Service Unavailable\r\n{lines}\r\n".encode("ascii") + body
