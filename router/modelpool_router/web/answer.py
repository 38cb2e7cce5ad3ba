"""
Reads one HTTP/1.1 answer from a stream of bytes, strictly, without touching the bytes.

Sans-I/O: `web.upstream` feeds it what a socket brought. httptools finds its way through chunked
bodies; bodies with a length are counted; the rest end with the connection.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import httptools

from ..core.headers import (
    MAX_HEAD_BYTES,
    AnswerHead,
    BadHead,
    Framing,
    Stencil,
    parse_answer_head,
)

_SIZES_KEPT: Final = 4096
SHORTEST_KEPT: Final = 4
"""Bytes of content, enough to tell how a body ends."""
_sizes: dict[bytes, int] = {}
"""Size of a whole chunk by its first line: events of a stream are nearly as long as each other."""
_is_hex: Final = re.compile(rb"[0-9A-Fa-f]{1,8}").fullmatch
MAX_INTERIM_ANSWERS: Final = 16
"""100, 102 and 103 answers ignored before the real one; more is a fault."""


class KnownHead:
    """What the answers of a member begin with, as far as its last one tells."""

    __slots__ = ("end", "head", "raw", "size", "stencil")

    def __init__(self) -> None:
        self.raw = b""
        self.end = 0
        """Where its body began."""
        self.size = -1
        """Of the whole answer; -1 when there is none that may come again."""
        self.stencil: Stencil | None = None
        """For heads that differ in their Content-Length alone."""
        self.head: AnswerHead | None = None

    def note(self, raw: bytes, head: AnswerHead) -> None:
        """Remember a head whose body has a length."""
        assert head.length is not None
        self.raw, self.head = raw, head
        self.end = len(raw)
        # (a 503 is looked at in the usual way: the member may be loading)
        self.size = -1 if head.status == 503 else self.end + head.length

    def whole(self, data: bytes) -> AnswerHead | None:
        """Return the head that *data* begins with if it is that of the last answer, and no more."""
        return self.head if len(data) == self.size and data.startswith(self.raw) else None


class AnswerReader:
    """
    One answer. After each `feed` that returned True the attributes tell what it brought.

    Attributes:
        head: The final answer's head; None until it is complete.
        pieces: Bytes of the body that the last `feed` brought, without framing.
        framed: The same as whole chunks, exactly as they came, last chunk included; None when
            the body is not chunked, or what came does not begin and end between two chunks.
        ended: The answer is complete.
    """

    # Made for every answer: what most of them never touch is not set each time.
    head: AnswerHead | None = None
    pieces: Sequence[bytes] = ()
    framed: bytes | None = None
    ended = False
    _buffer = b""
    _interim = 0
    _left = 0
    _parser: httptools.HttpResponseParser | None = None
    _between_chunks = True
    _in_plain_chunks = False
    _in_chunk = False
    _last_byte = b""
    _first_line = 5
    _collected: list[bytes]

    def __init__(self, method: str, known: KnownHead | None = None) -> None:
        self._method = method
        self._known = known

    def feed(self, data: bytes) -> bool:
        """
        Take what the upstream sent.

        Returns:
            Whether the head is complete, so that the attributes are worth looking at.

        Raises:
            BadHead: the answer is malformed, or bytes follow its end. Nothing that came with
                this call may be passed on, and the connection is of no more use.
        """
        if self._in_plain_chunks and self._feed_whole_chunks(data):
            return True
        try:
            if self.head is None:
                rest = self._feed_known(data)
                if rest is None:
                    rest = self._feed_head(data)
                if rest is None:
                    return False
                data = rest
            self._feed_body(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            # not the parser's words: they could repeat bytes of the answer
            raise BadHead("a line of its framing is malformed") from None
        return True

    def is_plain(self, data: bytes) -> bool:
        """
        Say whether *data*, which comes next, is nothing but whole chunks of lengths seen before.

        It need not be fed then. Its last `SHORTEST_KEPT` bytes of content are in one piece. False
        when in doubt.
        """
        if not self._in_plain_chunks:
            return False
        at, size, first_line = 0, len(data), self._first_line
        while at < size:
            at += _sizes.get(data[at : at + first_line], size + 1)
            if at > size or data[at - 1] != 0x0A or data[at - 2] != 0x0D:
                return False
        return True

    def feed_eof(self) -> bool:
        """Take the orderly end of the connection; False when it cuts the answer off."""
        if self.head is None or self.head.framing is not Framing.UNTIL_CLOSE:
            return False
        self.pieces, self.framed, self.ended = (), None, True
        return True

    def close(self) -> None:
        """Break the cycle with the parser, so that no garbage collection is needed."""
        self._parser = None

    # -- called by the parser ------------------------------------------------------------

    def on_chunk_header(self) -> None:
        self._in_chunk = True

    def on_body(self, piece: bytes) -> None:
        self._collected.append(piece)

    def on_chunk_complete(self) -> None:
        self._in_chunk = False

    def on_message_complete(self) -> None:
        self.ended = True

    # -- private -------------------------------------------------------------------------

    def _feed_head(self, data: bytes) -> bytes | None:
        """Return what follows the final answer's head, or None while that is incomplete."""
        # the last three bytes of what was there before may begin the blank line
        search_from = max(0, len(self._buffer) - 3)
        data = self._buffer + data if self._buffer else data
        while True:
            found = data.find(b"\r\n\r\n", search_from)
            if found > MAX_HEAD_BYTES - 4 or (found < 0 and len(data) > MAX_HEAD_BYTES):
                raise BadHead(f"its head is over {MAX_HEAD_BYTES} bytes")
            if found < 0:
                self._buffer = data
                return None
            raw, data, search_from = data[: found + 4], data[found + 4 :], 0
            head = parse_answer_head(raw, method=self._method)
            if head.status == 101:
                raise BadHead("it switches protocols, which nobody asked for")
            if head.status >= 200:
                break
            self._interim += 1
            if self._interim > MAX_INTERIM_ANSWERS:
                raise BadHead(f"over {MAX_INTERIM_ANSWERS} interim answers precede it")
        if head.framing is Framing.CHUNKED:
            self._parser = httptools.HttpResponseParser(self)
            self._parser.feed_data(raw)
            self._in_plain_chunks = True
        self.head = head
        known = self._known
        if known is not None and head.framing is Framing.LENGTH:
            assert head.length is not None
            known.stencil = Stencil.of(raw, head.length)
            known.note(raw, head)
        self._left = head.length or 0
        self._buffer = b""
        return data

    def _feed_known(self, data: bytes) -> bytes | None:
        """Return what follows a head that differs from the last one in its length alone."""
        known = self._known
        if known is None or known.stencil is None or self._buffer or not known.stencil.fits(data):
            return None
        stencil, last = known.stencil, known.head
        assert last is not None
        self._left = length = stencil.length
        self.head = AnswerHead(
            last.status,
            last.reason,
            last.fields,
            last.lines,
            last.framing,
            length,
            last.keep_alive,
            last.event_stream,
            last.encoded,
        )
        known.note(data[: stencil.end], self.head)
        return data[stencil.end :]

    def _feed_body(self, data: bytes) -> None:
        assert self.head is not None
        framing = self.head.framing
        if framing is Framing.CHUNKED:
            self._feed_chunks(data)
            return
        self.pieces = (data,) if data else ()
        if framing is Framing.LENGTH:
            self._left -= len(data)
            if self._left < 0:
                raise BadHead("bytes follow its end")
            self.ended = not self._left
        elif framing is Framing.NONE:
            if data:
                raise BadHead("bytes follow its end")
            self.ended = True

    def _feed_chunks(self, data: bytes) -> None:
        self.pieces, self.framed = (), None
        if not data:
            return
        parser = self._parser
        assert parser is not None
        began_between = self._between_chunks
        self.pieces = self._collected = []
        # The parser does not say where in its input a message ended. A message can only end with
        # a blank line; so where one is last, the last byte is fed alone, and an end anywhere else
        # means that bytes follow it.
        may_end = len(data) < 4 or data.endswith(b"\r\n\r\n")
        if may_end:
            view = memoryview(data)
            if len(data) > 1:
                parser.feed_data(view[:-1])
        else:
            parser.feed_data(data)
        if self.ended:
            raise BadHead("bytes follow its end")
        if may_end:
            parser.feed_data(data[-1:])
        tail = data[-2:] if len(data) > 1 else self._last_byte + data
        self._last_byte = data[-1:]
        self._between_chunks = not self._in_chunk and tail == b"\r\n"
        self._in_plain_chunks = self._between_chunks and not self.ended
        if began_between and self._between_chunks:
            # a last chunk with trailers is framed anew, so that they are not passed on
            plain = not self.ended or data == b"0\r\n\r\n" or data.endswith(b"\r\n0\r\n\r\n")
            self.framed = data if plain else None

    def _feed_whole_chunks(self, data: bytes) -> bool:
        """
        Take *data* if it is nothing but whole chunks, written in the plainest way.

        Engines write an event as a chunk, so it nearly always is. The parser does not see them:
        where it is, a chunk begins, as before. False when nothing was taken.
        """
        size = len(data)
        pieces: list[bytes] = []
        at = 0
        while at < size:
            begin = data.find(b"\r\n", at, at + 10) + 2
            digits = data[at : begin - 2]
            if begin < 2 or not _is_hex(digits):
                return False
            length = int(digits, 16)
            end = begin + length
            if data[end : end + 2] != b"\r\n":
                return False
            if length >= SHORTEST_KEPT:
                self._first_line = begin - at
                _keep_size(data[at:begin], end + 2 - at)
            at = end + 2
            if not length:
                if at != size:
                    return False
                self.ended = True
                break
            pieces.append(data[begin:end])
        self.pieces, self.framed = pieces, data
        self._last_byte = b"\n"
        return True


def _keep_size(first_line: bytes, size: int) -> None:
    if len(_sizes) >= _SIZES_KEPT:
        _sizes.clear()
    _sizes[first_line] = size
