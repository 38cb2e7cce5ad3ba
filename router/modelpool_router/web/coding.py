"""Undoes one Content-Encoding of a request body, a bounded piece at a time."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from typing import Protocol

import brotli

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PIECE = 256 * 1024
"""Most bytes of output at once (brotli: twice that); a bomb is noticed after one of these."""

__all__ = ["CODINGS", "PIECE", "BadCoding", "Decoder", "decoder_for", "zstd"]

CODINGS = frozenset({"gzip", "deflate", "br", "zstd"})

_ZSTD_WINDOW_LOG = 23  # 8 MiB, the most that the content coding allows (RFC 9659)


class BadCoding(ValueError):
    """The bytes are not what their label says, or they stop short."""


class Decoder(Protocol):
    """Turns compressed bytes into plain ones."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """
        Yield what *data* decodes to, in pieces of about `PIECE` bytes.

        Raises:
            BadCoding: it does not decode, or something follows the end.
        """
        ...

    def finish(self) -> None:
        """
        Say that no more data comes.

        Raises:
            BadCoding: the end has not been reached.
        """
        ...


def decoder_for(coding: str) -> Decoder:
    """Return a fresh decoder for one of `CODINGS`."""
    match coding:
        case "gzip":
            return _Deflated(zlib.MAX_WBITS | 16)
        case "deflate":
            return _Deflated(None)
        case "br":
            return _Brotli()
        case "zstd":
            return _Zstd()
        case _:
            raise ValueError(coding)


class _Deflated:
    def __init__(self, window_bits: int | None) -> None:
        self._stream = None if window_bits is None else zlib.decompressobj(window_bits)

    def feed(self, data: bytes) -> Iterator[bytes]:
        if not data:
            return
        if self._stream is None:
            # "deflate" means the zlib format; some clients send the bare one
            zlib_format = data[0] & 0x0F == 8 and data[0] >> 4 <= 7
            self._stream = zlib.decompressobj(zlib.MAX_WBITS if zlib_format else -zlib.MAX_WBITS)
        stream = self._stream
        while data:
            if stream.eof:
                raise BadCoding
            try:
                piece = stream.decompress(data, PIECE)
            except zlib.error:
                raise BadCoding from None
            if stream.unused_data:
                raise BadCoding
            data = stream.unconsumed_tail
            if piece:
                yield piece

    def finish(self) -> None:
        if self._stream is None or not self._stream.eof:
            raise BadCoding


class _Brotli:
    def __init__(self) -> None:
        self._stream = brotli.Decompressor()

    def feed(self, data: bytes) -> Iterator[bytes]:
        while True:
            if data and self._stream.is_finished():
                raise BadCoding
            try:
                piece = self._stream.process(data, output_buffer_limit=PIECE)
            except brotli.error:
                raise BadCoding from None
            data = b""
            if piece:
                yield piece
            # `can_accept_more_data` is already true while output is still waiting
            if not piece or self._stream.is_finished():
                return

    def finish(self) -> None:
        if not self._stream.is_finished():
            raise BadCoding


class _Zstd:
    def __init__(self) -> None:
        limit: dict[int, int] = {zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG}
        self._stream = zstd.ZstdDecompressor(options=limit)

    def feed(self, data: bytes) -> Iterator[bytes]:
        stream = self._stream
        while True:
            if stream.eof:
                if data or stream.unused_data:
                    raise BadCoding
                return
            try:
                piece = stream.decompress(data, PIECE)
            except zstd.ZstdError:
                raise BadCoding from None
            data = b""
            if piece:
                yield piece
            if stream.needs_input:
                return

    def finish(self) -> None:
        if not self._stream.eof or self._stream.unused_data:
            raise BadCoding
