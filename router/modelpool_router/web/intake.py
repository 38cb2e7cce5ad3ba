"""
Takes a request body in: counted while it is read, timed, decoded, and kept off the heap when big.

What the bytes mean is for `core.body`; nothing here looks inside. A body holds its share of
`HoldLedger` from the first byte read until `Body.close`.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import FileIO
from types import TracebackType
from typing import Self

from aiohttp.http import HttpVersion11
from aiohttp.web_protocol import RequestPayloadError

from ..core.spec import HoldLedger
from .coding import CODINGS, BadCoding, Decoder, decoder_for
from .errors import ApiError
from .request import Request

PIECE = 256 * 1024
"""Most bytes that `Body.chunks` yields at once."""

_COPIED = 8 * 1024 * 1024
"""Longer bodies are mapped to be looked at; a copy is searched and sent faster."""
_WRITE = 1024 * 1024  # bytes for one trip to a writing thread
_YIELD_EVERY = 4  # pieces decoded without letting anybody else run


@dataclass(frozen=True, slots=True)
class IntakeLimits:
    """How much, and how long. Sizes count after decoding."""

    max_body_bytes: int = 64 * 1024 * 1024
    spool_above_bytes: int = 1024 * 1024
    """Longer bodies wait in an unlinked temporary file."""
    idle_s: float = 30.0
    """Longest wait for one more byte."""
    total_s: float = 120.0
    """Longest time for the whole body."""
    spool_dir: str | None = None
    """Where temporary files go; None = the system's choice."""
    full_retry_after_s: float = 5.0
    """What to suggest when the router holds as many bytes as it may."""
    on_spooled: Callable[[], None] = lambda: None
    """Called when a body went into a file, and again when that one is closed."""


class Body:
    """
    One complete request body, in memory or in a file without a name.

    Close it exactly when nothing will be sent from it any more; closing twice is harmless.
    """

    __slots__ = (
        "_copy", "_data", "_file", "_ledger", "_map", "_on_closed", "_reserved", "_splice", "size",
    )  # fmt: skip

    def __init__(
        self,
        ledger: HoldLedger,
        reserved: int,
        *,
        data: bytes = b"",
        file: FileIO | None = None,
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        self._ledger = ledger
        self._reserved = reserved
        self._data = data
        self._file = file
        self._on_closed = on_closed
        """For one in a file."""
        self._map: mmap.mmap | None = None
        self._copy: bytes | None = None
        """What is in the file, between `view` and `put_away`, unless it is very long."""
        self._splice: tuple[int, int, bytes] | None = None
        self.size = reserved
        """Bytes that `chunks` yields in sum."""

    @property
    def spooled(self) -> bool:
        """True when the bytes wait in a file."""
        return self._file is not None

    def view(self) -> bytes | mmap.mmap:
        """Return the bytes as they arrived (decoded), in one piece, valid until `put_away`."""
        if self._file is None:
            return self._data
        if self._reserved <= _COPIED:
            if self._copy is None:
                self._copy = _whole(self._file.fileno(), self._reserved)
            return self._copy
        if self._map is None:
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._map

    def replace(self, span: tuple[int, int], value: bytes) -> None:
        """Let `chunks` yield *value* in place of the bytes at *span* (begin, end), once."""
        begin, end = span
        assert self._splice is None
        self._splice = (begin, end, value)
        self.size += len(value) - (end - begin)

    def chunks(self) -> Iterator[bytes | memoryview]:
        """Yield the body to send, from its start, in pieces of at most `PIECE` bytes."""
        if self._splice is None:
            yield from self._range(0, self._reserved)
            return
        begin, end, value = self._splice
        yield from self._range(0, begin)
        yield value
        yield from self._range(end, self._reserved)

    def put_away(self) -> None:
        """End what `view` returned: a body in a file costs no memory while it waits. Idempotent."""
        self._copy = None
        if self._map is not None:
            try:
                self._map.close()
            except BufferError:
                pass  # a traceback still refers to a part of it; it goes with that
            self._map = None

    def close(self) -> None:
        """Give memory, file and the share of the ledger back. Idempotent."""
        self.put_away()
        if self._file is not None:
            self._file.close()
            self._file = None
            self._on_closed()
        self._data = b""
        self._ledger.release_bytes(self._reserved)
        self._reserved = 0
        self._splice = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _range(self, begin: int, end: int) -> Iterator[bytes | memoryview]:
        if self._file is None:
            view = memoryview(self._data)
            for at in range(begin, end, PIECE):
                yield view[at : min(at + PIECE, end)]
            return
        # Read, not mapped: a transport may keep what it was given after `close`.
        number = self._file.fileno()
        for at in range(begin, end, PIECE):
            if self._copy is not None:  # `view` has read it already
                yield memoryview(self._copy)[at : min(at + PIECE, end)]
            else:
                yield os.pread(number, min(PIECE, end - at), at)


def _whole(number: int, size: int) -> bytes:
    """Read a file whole; an ordinary file gives all that it has at once."""
    data = os.pread(number, size, 0)
    while len(data) < size:
        more = os.pread(number, size - len(data), len(data))
        if not more:
            raise OSError("the spooled body is shorter than it was")
        data += more
    return data


async def read_body(request: Request, limits: IntakeLimits, ledger: HoldLedger) -> Body:
    """
    Read the whole body of an admitted request (authenticated, route known).

    A waiting client is told ``100 Continue`` here, after its length has been found acceptable.

    Returns:
        A `Body` that the caller must close.

    Raises:
        ApiError: 400 (framing, label), 408, 413, 415, 503 ``queue_full``.
        ConnectionError: the client left.
    """
    coding = _coding(request)
    declared = _declared_length(request)
    if declared is not None:
        if declared > limits.max_body_bytes:
            raise _too_large(limits)
        if coding is None and ledger.held_bytes + declared > ledger.bounds.max_held_bytes:
            raise _full(limits)
    _continue(request)
    intake = _Intake(limits, ledger)
    try:
        decoder = None if coding is None else decoder_for(coding)
        await _receive(request, limits, intake, decoder)
        return await intake.complete()
    except BaseException:
        intake.abandon()
        raise


async def _receive(
    request: Request, limits: IntakeLimits, intake: _Intake, decoder: Decoder | None
) -> None:
    content = request.content
    if decoder is None and content.is_eof():  # nearly always: it came with the head
        await intake.add(content.read_nowait())
        return
    loop = asyncio.get_running_loop()
    latest = loop.time() + limits.total_s
    pieces = 0
    try:
        async with asyncio.timeout_at(None) as patience:
            while True:
                if content.is_eof():
                    data = content.read_nowait()  # all of it is here: no timer needed
                else:
                    patience.reschedule(min(loop.time() + limits.idle_s, latest))
                    data = await content.readany()
                    patience.reschedule(None)
                if not data:
                    break
                if decoder is None:
                    await intake.add(data)
                    continue
                for piece in decoder.feed(data):
                    await intake.add(piece)
                    pieces += 1
                    if pieces % _YIELD_EVERY == 0:
                        await asyncio.sleep(0)
        if decoder is not None:
            decoder.finish()
    except TimeoutError:
        raise ApiError.of(
            "request_timeout", "The request body did not arrive in time; send it again."
        ) from None
    except BadCoding:
        raise ApiError.of(
            "invalid_framing", "The body is not what its Content-Encoding says."
        ) from None
    except RequestPayloadError:
        raise ApiError.of("invalid_framing", "The framing of the body is broken.") from None


class _Intake:
    """Collects pieces: on the heap up to the limit, in a file beyond it."""

    def __init__(self, limits: IntakeLimits, ledger: HoldLedger) -> None:
        self._limits = limits
        self._ledger = ledger
        self._size = 0
        self._pieces: list[bytes] = []
        self._pending = 0
        self._file: FileIO | None = None

    async def add(self, data: bytes) -> None:
        size = len(data)
        if self._size + size > self._limits.max_body_bytes:
            raise _too_large(self._limits)
        if not self._ledger.reserve_bytes(size):
            raise _full(self._limits)
        self._size += size
        self._pieces.append(data)
        self._pending += size
        if self._file is None:
            if self._size <= self._limits.spool_above_bytes:
                return
            await self._write()
        elif self._pending >= _WRITE:
            await self._write()

    async def complete(self) -> Body:
        if self._file is None:
            data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            return Body(self._ledger, self._size, data=data)
        if self._pending:
            await self._write()
        on_spooled = self._limits.on_spooled
        on_spooled()
        return Body(self._ledger, self._size, file=self._file, on_closed=on_spooled)

    def abandon(self) -> None:
        self._ledger.release_bytes(self._size)
        self._size = 0
        self._pieces.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

    async def _write(self) -> None:
        """
        Move what is pending to the file, in a thread: a slow disk must not stop the loop.

        When cancelled meanwhile, the file is closed only after the thread is done with it: a
        descriptor that is closed early may be somebody else's by then.
        """
        pieces, self._pieces, self._pending = self._pieces, [], 0
        file, self._file = self._file, None
        job = asyncio.get_running_loop().run_in_executor(
            None, _write_all, file, pieces, self._limits.spool_dir
        )
        try:
            self._file = await asyncio.shield(job)
        except asyncio.CancelledError:
            job.add_done_callback(_close_result)
            raise
        except OSError:
            raise ApiError.of(
                "queue_full",
                "The router cannot store the body now: its temporary space is full.",
                retry_after_s=self._limits.full_retry_after_s,
            ) from None


def _write_all(file: FileIO | None, pieces: list[bytes], spool_dir: str | None) -> FileIO:
    if file is None:
        file = tempfile.TemporaryFile(buffering=0, dir=spool_dir)
    try:
        for piece in pieces:
            rest = memoryview(piece)
            while rest:
                rest = rest[file.write(rest) or 0 :]
    except OSError:
        file.close()
        raise
    return file


def _close_result(job: asyncio.Future[FileIO]) -> None:
    if not job.cancelled() and job.exception() is None:
        job.result().close()


def _coding(request: Request) -> str | None:
    labels = request.headers.getall("Content-Encoding", ())
    names = [name.strip().lower() for label in labels for name in label.split(",")]
    names = [name for name in names if name != "identity"]
    if not names:
        return None
    if len(names) == 1 and names[0] in CODINGS:
        return names[0]
    raise ApiError.of(
        "unsupported_media_type",
        "Content-Encoding must be one of gzip, deflate, br or zstd, applied once.",
        headers={"Accept-Encoding": "gzip, deflate, br, zstd"},
    )


def _declared_length(request: Request) -> int | None:
    length = request.headers.get("Content-Length")
    return None if length is None else int(length)  # digits only: the parser saw to that


def _continue(request: Request) -> None:
    """Tell a client that waits for it to go on; other expectations were refused before."""
    if "Expect" not in request.headers or request.version < HttpVersion11:
        return
    content = request.content
    transport = request.transport
    if transport is not None and not content.is_eof() and not content.total_bytes:
        transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def _too_large(limits: IntakeLimits) -> ApiError:
    return ApiError.of(
        "request_too_large",
        f"The request body is larger than {limits.max_body_bytes} bytes, the limit of this router "
        "(maxBodyBytes).",
    )


def _full(limits: IntakeLimits) -> ApiError:
    return ApiError.of(
        "queue_full",
        "The router holds as many bytes of waiting requests as it may (maxHeldBytes); try again.",
        retry_after_s=limits.full_retry_after_s,
    )
