"""
The client's side of an answer: bytes straight to the transport below aiohttp.

All use of aiohttp's private surface on this path is here (`_drain_waiter`, `_paused`,
`output_size`). The front goes on owning the connection: it gets a `PipedResponse`, which has been
written already, and decides with its ``keep_alive`` whether the next request is read.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Sequence

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from ..core.headers import Framing
from .request import ClientSide
from .sweep import Sweep

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class PipedResponse(web.StreamResponse):
    """What the handler returns to aiohttp for an answer that was written around it."""

    def __init__(
        self, *, status: int, keep_alive: bool, abort: Callable[[], None] | None = None
    ) -> None:
        super().__init__(status=status)
        self._stays_open = keep_alive
        self._abort = abort

    @property
    def keep_alive(self) -> bool:
        """Whether another request may come on this connection."""
        return self._stays_open

    def force_close(self) -> None:
        """Let it be the last answer of its connection."""
        self._stays_open = False

    async def prepare(self, request: ClientSide) -> AbstractStreamWriter | None:
        """Do nothing that is not said in `finish`."""
        self.finish()
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Do nothing: it was written."""

    def finish(self) -> None:
        """
        Cut the connection off, if that is how this answer ends.

        Only now: losing the connection cancels the handler, which first has accounts to close.
        """
        if self._abort is not None:
            self._abort()


class ClientSink:
    """
    Writes one answer to one client and watches how it is taken.

    The transport's own high-water mark (64 KiB) says when to stop; with one read of the upstream
    (at most 256 KiB) on top that is all that is ever buffered for a client.
    """

    def __init__(self, request: ClientSide, loop: asyncio.AbstractEventLoop) -> None:
        self.started = False
        """Whether a byte of this answer was written."""
        self.sent = 0
        """Bytes written for this answer, head included."""
        self.moved = False
        """Whether `pass_chunks` passed anything on since somebody set this to False."""
        self.framing = Framing.NONE
        self.event_stream = False
        self._request = request
        self._protocol = request.protocol
        self._transport = request.transport
        self._loop = loop
        self._http11 = request.version >= (1, 1)
        self._head = b""
        self._tail = b"\n\n"
        self._last_chunk = b""  # that was passed on since *_tail* was set
        self._in_chunks = False  # the head is out, and chunks follow
        self._taken = -self._buffered()
        self._taken_at = loop.time()
        self._waiter: asyncio.Future[None] | None = None
        self._on_writable: Callable[[], None] | None = None
        self._on_congested: Callable[[], None] = _nothing

    @property
    def gone(self) -> bool:
        """Whether the client left."""
        return self._transport is None or self._transport.is_closing()

    @property
    def keeps_alive(self) -> bool:
        """Whether the client would send another request after a framed answer."""
        return self._http11 and self._request.keep_alive

    @property
    def congested(self) -> bool:
        """Whether the client is behind: write no more before `when_writable`."""
        return self._protocol._paused  # (`writing_paused`, without another call for each chunk)

    def framing_for(self, framing: Framing) -> Framing:
        """How this client learns the end of a body that the upstream framed as *framing*."""
        if framing in (Framing.CHUNKED, Framing.UNTIL_CLOSE):
            # with chunks of ours a cut-off answer can be told from a complete one
            return Framing.CHUNKED if self._http11 else Framing.UNTIL_CLOSE
        return framing

    def begin(self, head: bytes, framing: Framing, *, event_stream: bool) -> None:
        """Take the head; it goes out together with what follows it."""
        self._head, self.framing, self.event_stream = head, framing, event_stream

    def write_body(self, pieces: Sequence[bytes], framed: bytes | None, *, last: bool) -> bool:
        """
        Write a part of the body.

        Args:
            pieces: Bytes of the body.
            framed: The same as whole chunks, to be used as they are by a client that gets chunks.
            last: Nothing follows.

        After each call a client that gets chunks stands between two of them.

        Returns:
            False if the client is gone.
        """
        transport = self._transport
        if self.event_stream and pieces:
            self._note_tail()
            end = pieces[-1]
            self._tail = end if len(end) >= 4 else (self._tail + b"".join(pieces))[-4:]
        if framed is not None and self._in_chunks and transport is not None:
            if transport.is_closing():
                return False
            self.sent += len(framed)
            transport.write(framed)
            return True
        if self.framing is Framing.CHUNKED:
            data = framed if framed is not None else _chunk(pieces, last=last)
        elif self.framing is Framing.NONE:
            data = b""
        else:
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if self._head:
            data, self._head = self._head + data, b""
        if transport is None or transport.is_closing():
            return False
        if not data:
            return True
        if not self.started:
            self.started = True
            # so that an error after this point does not make aiohttp write a second head
            self._request.writer.output_size = len(data)
            self._in_chunks = self.framing is Framing.CHUNKED
        self.sent += len(data)
        transport.write(data)
        return not transport.is_closing()

    def straight(self, on_congested: Callable[[], None]) -> Callable[[bytes], bool] | None:
        """
        Return `pass_chunks` if the client gets chunks and the first of them went out; else None.

        Args:
            on_congested: Called after a chunk that made the client fall behind.
        """
        if not self._in_chunks:
            return None
        self._on_congested = on_congested
        return self.pass_chunks

    def pass_chunks(self, data: bytes) -> bool:
        """Write whole chunks (`AnswerReader.is_plain`); False, and nothing is done, if in doubt."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        transport.write(data)
        self.sent += len(data)
        self._last_chunk = data
        self.moved = True
        if self._protocol._paused:
            self._on_congested()
        return True

    def can_take_frame(self) -> bool:
        """Whether an event of ours can still be added to the answer."""
        return self.event_stream and self.framing in (Framing.CHUNKED, Framing.UNTIL_CLOSE)

    def end_with(self, frame: bytes) -> None:
        """End an event stream with *frame*, after the end of an unfinished one."""
        self._note_tail()
        if not self._tail.endswith((b"\n\n", b"\r\r", b"\n\r\n")):
            frame = (b"\n" if self._tail.endswith(b"\n") else b"\n\n") + frame
        self.write_body((frame,), None, last=True)

    def _note_tail(self) -> None:
        if self._last_chunk:
            self._tail, self._last_chunk = self._last_chunk[-6:-2], b""

    def when_writable(self, callback: Callable[[], None]) -> None:
        """Call *callback* once when the client has caught up, or is gone."""
        self._on_writable = callback
        if self._waiter is None:
            self._waiter = self._drain_waiter()
            self._waiter.add_done_callback(self._woken)

    def took(self, now: float) -> float:
        """Return when the client last took something, or had nothing to take."""
        buffered = self._buffered()
        if not buffered or self.sent - buffered > self._taken:
            self._taken = self.sent - buffered
            self._taken_at = now
        return self._taken_at

    def reset(self) -> None:
        """Cut the client off so that it sees the answer as broken, however it was framed."""
        if self._transport is not None:
            _reset(self._transport)

    def release(self, sweep: Sweep, write_stall_s: float) -> None:
        """Let go of the client; what it has not taken yet stays under watch."""
        self._on_writable = None
        if self._waiter is not None:
            self._waiter.remove_done_callback(self._woken)
            if self._protocol._drain_waiter is self._waiter:
                # it may be given an exception, which nobody would look at
                self._protocol._drain_waiter = None
            self._waiter = None
        if self._transport is not None and self._buffered():
            watch_rest(self._transport, sweep, write_stall_s, self._loop.time())

    def _buffered(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def _drain_waiter(self) -> asyncio.Future[None]:
        # What StreamWriter.drain() awaits; a callback on it costs no task. aiohttp sets it on
        # resume_writing() and connection_lost(), the latter maybe with an exception.
        waiter = self._protocol._drain_waiter
        if waiter is None or waiter.done():
            waiter = self._protocol._drain_waiter = self._loop.create_future()
        return waiter

    def _woken(self, waiter: asyncio.Future[None]) -> None:
        self._waiter = None
        if not waiter.cancelled():
            waiter.exception()  # nobody else looks at it
        callback, self._on_writable = self._on_writable, None
        if callback is not None:
            callback()


def watch_rest(
    transport: asyncio.Transport, sweep: Sweep, write_stall_s: float, now: float
) -> None:
    """Cut a client off that does not take the end of its answer."""
    sweep.add(_Remainder(transport, sweep, write_stall_s, now))


class _Remainder:
    """The end of an answer that its client has yet to take, while nobody waits for it."""

    def __init__(
        self, transport: asyncio.Transport, sweep: Sweep, write_stall_s: float, now: float
    ) -> None:
        self._transport = transport
        self._sweep = sweep
        self._write_stall_s = write_stall_s
        self._left = transport.get_write_buffer_size()
        self._taken_at = now

    def check(self, now: float) -> None:
        left = self._transport.get_write_buffer_size()
        if not left or left > self._left:
            # taken, or the connection has a new answer, which is watched by itself
            self._sweep.discard(self)
        elif left < self._left:
            self._left, self._taken_at = left, now
        elif now - self._taken_at >= self._write_stall_s:
            self._sweep.discard(self)
            _reset(self._transport)


def _nothing() -> None:
    pass


def _chunk(pieces: Sequence[bytes], *, last: bool) -> bytes:
    size = sum(map(len, pieces))
    end = b"0\r\n\r\n" if last else b""
    return b"".join((b"%x\r\n" % size, *pieces, b"\r\n", end)) if size else end


def _reset(transport: asyncio.Transport) -> None:
    if not transport.is_closing() or transport.get_write_buffer_size():
        # (of a closed transport the descriptor may be somebody else's by now)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    transport.abort()
