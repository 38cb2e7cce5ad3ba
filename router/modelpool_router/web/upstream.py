"""
Connections to members and upstreams: one `asyncio.Protocol`, no HTTP client library.

An `UpstreamConnection` finds where the answer's head and body end and passes the bytes on as
they came. It knows nothing of clients: `web.forward` is its `Receiver`. `UpstreamClient` lends
connections and keeps those that may be used once more.

Reuse is for the happy path of short answers alone. A connection is used again only when its last
answer was complete, neither streamed nor framed by chunks, ended less than a second ago, left no
byte behind, and the upstream allows it: engines drop connections after a stream without saying so.
"""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol, cast

from ..core.headers import AnswerHead, BadHead, Framing
from ..drivers.base import Endpoint
from .answer import AnswerReader, KnownHead
from .dial import attach, connected_here, dial, is_here, refusal
from .faults import ConnectRefused, ExchangeError, UpstreamProtocolError, UpstreamReset
from .sweep import Sweep

_LIVES_KEPT: Final = 256
_KEEPALIVE: Final = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))


@dataclass(frozen=True, slots=True)
class UpstreamLimits:
    """Limits of connections as such; those of an exchange are `web.forward.ForwardLimits`."""

    connect_timeout_s: float = 2.0
    """All addresses of a name together; a member is near, so seconds mean it is not there."""
    reuse_s: float = 1.0
    """Longest rest before another request; below the keep-alive time of every known engine."""
    sweep_s: float = 0.25
    """How late a deadline may be noticed."""


class Receiver(Protocol):
    """Who a connection tells. After `on_failed`, or `on_body` with *last*, it says no more."""

    def on_head(self, head: AnswerHead) -> None:
        """The final answer's head is complete; `on_body` follows in the same call stack."""
        ...

    def on_body(self, pieces: Sequence[bytes], framed: bytes | None, *, last: bool) -> None:
        """
        More of the body (maybe nothing of it).

        Args:
            pieces: Bytes of the body, without framing.
            framed: The same as whole HTTP/1.1 chunks, as they came, end included when *last*;
                None when the bytes did not arrive that way.
            last: The body is complete.
        """
        ...

    def on_whole(self, head: AnswerHead, body: bytes) -> None:
        """All of the answer is here, with a length. Instead of `on_head` and `on_body`."""
        ...

    def on_failed(self, error: ExchangeError) -> None:
        """The answer will not be completed; the connection is closed."""
        ...


class UpstreamConnection(asyncio.Protocol):
    """One connection to one life of a member; carries one exchange at a time."""

    def __init__(self, client: UpstreamClient, key: _Key) -> None:
        self.key = key
        self.idle_since = 0.0
        self.reused = False
        """Whether this exchange is not the first one here."""
        self.answered = False
        """Whether a byte came back in this exchange."""
        self.request_sent = False
        """Set by the sender when the whole request was handed over."""
        self.answer_is_whole = False
        """Whether the answer, whose head the receiver is just being shown, is all here."""
        self.straight: Callable[[bytes], bool] | None = None
        """
        Set by the receiver to be given whole chunks as they come, instead of `on_body`.

        It may decline one by returning False. The first byte of the exchange took the usual way.
        """
        self._client = client
        self.life = client.life(key)
        self._method = ""
        self._receiver: Receiver | None = None
        self._reader: AnswerReader | None = None
        self._transport: asyncio.Transport | None = None
        self._poll: select.poll | None = None
        self._write_paused = False
        self._read_paused = False
        self._drain: asyncio.Future[None] | None = None
        self._early: list[bytes | memoryview] | None = []  # until it is made, or will not be
        self._dialling: asyncio.Task[None] | None = None
        self._made: asyncio.Future[None] | None = None

    # -- for the sender ------------------------------------------------------------------

    def begin(self, receiver: Receiver, method: str) -> None:
        """Start an exchange: what arrives from now on is the answer to it."""
        self._receiver = receiver
        self._method = method
        self.straight = None
        self.answered = self.request_sent = False

    def write(self, data: bytes | memoryview) -> None:
        """
        Send a part of the request; a lost connection is reported to the receiver alone.

        On a connection that is still being made it waits, without a limit.
        """
        transport = self._transport
        if transport is not None:
            if not transport.is_closing():
                transport.write(data)
        elif self._early is not None:
            self._early.append(data)

    def pass_to(self, receiver: Receiver) -> None:
        """Let another receiver go on with the exchange; it is shown the head again."""
        self._receiver = receiver
        self.straight = None

    @property
    def write_paused(self) -> bool:
        """Whether the sender should wait for `drained`."""
        return self._write_paused

    async def drained(self) -> None:
        """Wait until more can be written, or there is no reason to: the exchange ended."""
        if self._write_paused and self._receiver is not None:
            self._drain = asyncio.get_running_loop().create_future()
            try:
                await self._drain
            finally:
                self._drain = None

    def pause_reading(self) -> None:
        """Take no more bytes from the upstream until `resume_reading`."""
        if not self._read_paused and self._transport is not None:
            self._read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """End of `pause_reading`."""
        if self._read_paused and self._transport is not None:
            self._read_paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def abort(self) -> None:
        """Close at once and say no more. Idempotent."""
        if self._reader is not None:
            self._reader.close()
        self._receiver = self._reader = self.straight = None
        if self._transport is not None:
            self._transport.abort()
        self._early = None
        if self._dialling is not None:
            self._dialling.cancel()

    def is_fresh(self) -> bool:
        """Whether an idle connection may carry another request, as far as can be seen now."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
        # Readable while idle means closed or, worse, bytes that nobody asked for, which would be
        # taken for the next answer. The loop has not seen them yet; the kernel has.
        return not self._poll.poll(0)

    # -- while it is being made ----------------------------------------------------------

    async def made(self) -> None:
        """
        Wait until it is connected.

        Raises:
            ConnectRefused: it cannot be.
        """
        if self._early is not None:
            self._made = asyncio.get_running_loop().create_future()
            await self._made

    def dialled_by(self, dialling: asyncio.Task[None]) -> None:
        """Let *dialling* connect it."""
        self._dialling = dialling
        dialling.add_done_callback(self._dialled)

    def refused(self, failure: Exception) -> None:
        """It cannot be connected: tell who waits for that, and who waits for an answer."""
        error = refusal(failure)
        self._early = None
        if self._made is not None and not self._made.done():
            self._made.set_exception(error)
        self._fail(error)

    def _dialled(self, dialling: asyncio.Task[None]) -> None:
        self._dialling = None
        if dialling.cancelled():
            self.refused(ConnectRefused("unreachable"))
            return
        error = dialling.exception()
        if error is not None:
            assert isinstance(error, Exception)
            self.refused(error)

    # -- called by the loop --------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        # (event loops set TCP_NODELAY; and inside of a machine nobody dies unheard)
        if not is_here(self.key[1]):
            _keep_alive(transport.get_extra_info("socket"))
        self._client.opened(self)
        early, self._early = self._early, None
        if self._made is not None and not self._made.done():
            self._made.set_result(None)
        if early is None or self._client.closing:
            self._transport.abort()  # nobody wants it any more
        elif early:
            self._transport.write(b"".join(early))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost(exc)
        self._wake_sender()
        self._transport = self._poll = None
        self._client.closed(self)

    def eof_received(self) -> None:
        # Not left to the transport: it would first flush a request that nobody reads.
        self._lost(None)
        self.abort()

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        self._wake_sender()

    def data_received(self, data: bytes) -> None:
        reader, straight = self._reader, self.straight
        if reader is not None and straight is not None and reader.is_plain(data) and straight(data):
            return
        receiver = self._receiver
        if receiver is None:
            self.abort()  # nobody asked
            return
        self.answered = True
        if reader is None:
            known = self.life.known if self._method == "POST" else None
            head = None if known is None else known.whole(data)
            if known is not None and head is not None:
                body = data[known.end :]
                self._end(head)
                receiver.on_whole(head, body)
                return
            # (what a head means depends on the method)
            reader = self._reader = AnswerReader(self._method, known)
        with_head = reader.head is None
        try:
            if not reader.feed(data):
                return
        except BadHead as exc:
            self._fail(UpstreamProtocolError(str(exc)))
            return
        self._deliver(reader, with_head=with_head)

    # -- private -------------------------------------------------------------------------

    def _deliver(self, reader: AnswerReader, *, with_head: bool) -> None:
        receiver = self._receiver
        assert receiver is not None and reader.head is not None
        if with_head:
            self.answer_is_whole = reader.ended
            receiver.on_head(reader.head)
            if self._receiver is not receiver:
                if self._receiver is None:
                    return  # it gave up on seeing the head
                receiver = self._receiver
                receiver.on_head(reader.head)
                if self._receiver is not receiver:
                    return
        if reader.ended:
            reader.close()
            self._end(reader.head)
        receiver.on_body(reader.pieces, reader.framed, last=reader.ended)

    def _end(self, head: AnswerHead) -> None:
        """The answer with this head is complete: rest, or close."""
        self._receiver = self._reader = self.straight = None
        if self._read_paused:
            self.resume_reading()
        may_be_reused = (
            head.keep_alive
            and self.request_sent
            and not head.event_stream
            and head.framing is not Framing.CHUNKED
        )
        if not may_be_reused or not self._client.keep(self):
            self.abort()

    def _lost(self, exc: Exception | None) -> None:
        reader = self._reader
        if exc is None and reader is not None and reader.feed_eof():
            self._deliver(reader, with_head=False)
        elif self._receiver is not None:
            self._fail(UpstreamReset())

    def _fail(self, error: ExchangeError) -> None:
        receiver = self._receiver
        self.abort()
        if receiver is not None:
            receiver.on_failed(error)

    def _wake_sender(self) -> None:
        if self._drain is not None and not self._drain.done():
            self._drain.set_result(None)


def _keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


_Key = tuple[str, str, int, bool]


class Life:
    """What is known of one life of a member, by what its connections are told."""

    __slots__ = ("idle", "is_over", "known")

    def __init__(self) -> None:
        self.is_over = False
        self.idle: list[UpstreamConnection] = []
        """Connections that rest, the youngest last."""
        self.known = KnownHead()
        """How its answers begin."""


class UpstreamClient:
    """
    Lends connections, by the identity of who is behind them.

    Args:
        sweep: Shared with everything else that has deadlines.
        tls: Context for endpoints with TLS; the system's trust store when None.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limits: UpstreamLimits,
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.limits = limits
        self.sweep = Sweep(loop, limits.sweep_s)
        self._loop = loop
        self._tls = tls
        self._open: set[UpstreamConnection] = set()
        self._lives: dict[_Key, Life] = {}
        self._dialling: set[asyncio.Task[None]] = set()
        self._is_watching = False
        self.closing = False
        """Nothing is begun any more."""

    @property
    def open_connections(self) -> int:
        """Connections open now, idle ones included."""
        return len(self._open)

    @property
    def idle_connections(self) -> int:
        """Connections kept for another request."""
        return sum(len(life.idle) for life in self._lives.values())

    def take(self, endpoint: Endpoint) -> UpstreamConnection | None:
        """Return a kept connection to this life of *endpoint*, the youngest, or None."""
        return self.take_from(self.life(_key(endpoint)))

    def take_from(self, life: Life) -> UpstreamConnection | None:
        """Do what `take` does for those who remember the life."""
        idle = life.idle
        if idle:
            oldest_s = self._loop.time() - self.limits.reuse_s
            while idle:
                connection = idle.pop()
                if connection.idle_since > oldest_s and connection.is_fresh():
                    connection.reused = True
                    return connection
                connection.abort()
        return None

    def life_of(self, endpoint: Endpoint) -> Life:
        """Return what is known of this life of *endpoint*."""
        return self.life(_key(endpoint))

    async def connect(self, endpoint: Endpoint) -> UpstreamConnection:
        """
        Open a connection to *endpoint*, trying all addresses of its name.

        Raises:
            ConnectRefused: none answered in time.
        """
        connection = self.open(endpoint)
        try:
            await connection.made()
        except asyncio.CancelledError:
            connection.abort()
            raise
        return connection

    def open(self, endpoint: Endpoint) -> UpstreamConnection:
        """
        Return a connection that is being made.

        What is written to it meanwhile waits. That it cannot be made is told to its receiver, as
        `ConnectRefused`, and not before this call is over.
        """
        connection = UpstreamConnection(self, _key(endpoint))
        try:
            here = connected_here(endpoint)
        except OSError as failure:
            self._loop.call_soon(connection.refused, failure)
            return connection
        if here is not None:
            attach(self._loop, here, lambda: connection, connection.refused)
            return connection
        if endpoint.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        tls = self._tls if endpoint.tls else None
        # A task of its own, since whoever asks may run without one and time limits need one.
        dialling = self._loop.create_task(
            dial(endpoint, lambda: connection, within_s=self.limits.connect_timeout_s, tls=tls)
        )
        self._dialling.add(dialling)
        dialling.add_done_callback(self._dialling.discard)
        connection.dialled_by(dialling)
        return connection

    def drop(self, identity: str) -> None:
        """Close the idle connections to a life of a member that is over, and forget it."""
        for key in [key for key in self._lives if key[0] == identity]:
            self._forget(key)

    def close(self) -> None:
        """Close everything; exchanges that still run fail."""
        self.closing = True
        for life in self._lives.values():
            life.idle.clear()
        for dialling in tuple(self._dialling):
            dialling.cancel()
        for connection in tuple(self._open):
            connection.eof_received()  # as if the other side had closed
        self.sweep.close()

    def check(self, now: float) -> None:
        """Close what has been idle for too long to be used again."""
        oldest_s = now - self.limits.reuse_s
        for life in tuple(self._lives.values()):
            # the oldest come first
            while life.idle and life.idle[0].idle_since <= oldest_s:
                life.idle.pop(0).abort()
        if not self.idle_connections:
            self._is_watching = False
            self.sweep.discard(self)

    def life(self, key: _Key) -> Life:
        """Return what is known of a life."""
        life = self._lives.get(key)
        if life is None:
            if len(self._lives) >= _LIVES_KEPT:
                self._forget(next(iter(self._lives)))
            life = self._lives[key] = Life()
        return life

    def _forget(self, key: _Key) -> None:
        life = self._lives.pop(key)
        life.is_over = True
        for connection in tuple(life.idle):
            connection.abort()

    # -- called by connections -----------------------------------------------------------

    def opened(self, connection: UpstreamConnection) -> None:
        """Count it."""
        self._open.add(connection)

    def keep(self, connection: UpstreamConnection) -> bool:
        """Keep an idle connection for another request; False if it must be closed."""
        if self.closing or connection.life.is_over:
            return False
        connection.idle_since = self._loop.time()
        connection.life.idle.append(connection)
        if not self._is_watching:
            self._is_watching = True
            self.sweep.add(self)
        return True

    def closed(self, connection: UpstreamConnection) -> None:
        """Forget it."""
        self._open.discard(connection)
        with suppress(ValueError):
            connection.life.idle.remove(connection)


def _key(endpoint: Endpoint) -> _Key:
    return (endpoint.identity, endpoint.host, endpoint.port, endpoint.tls)
