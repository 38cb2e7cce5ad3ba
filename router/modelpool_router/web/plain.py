"""
Plain heads, and the requests that have them.

Plain is what needs no second look: a whole head in one piece, GET or POST, a path of `core.paths`
to the letter, HTTP/1.1, ASCII, each field once, a body with a length. Nothing is refused or
repaired here: what is not plain is left to `server`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from aiohttp.http import HttpVersion11
from aiohttp.streams import StreamReader

from ..core.headers import Field, Stencil
from ..core.paths import is_exact
from ..core.target import is_valid_host
from .request import PlainFields

if TYPE_CHECKING:
    from .front import OwnConnection
    from .short import Facts

_MAX_HEAD: Final = 8 * 1024
_MAX_FIELDS: Final = 100
_LINES_KEPT: Final = 1024
_LINE_KEPT: Final = 128

_line = re.compile(
    rb"([!#$%&'*+.^_`|~0-9A-Za-z-]++):[ \t]*+([\x21-\x7e](?:[\t\x20-\x7e]*[\x21-\x7e])?)[ \t]*"
)
_NOT_PLAIN: Final = frozenset(
    (
        "content-encoding",
        "expect",
        "http2-settings",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
_SECRET: Final = frozenset(("authorization", "cookie", "proxy-authorization", "x-api-key"))

_Line = tuple[str, str, Field]
"""Lower-case name, value, and both as they came."""
_lines: dict[bytes, _Line] = {}
"""Clients say the same lines again and again. Bounded, and without secrets."""


class PlainHead:
    """A head that was found to be plain."""

    __slots__ = ("end", "facts", "fields", "length", "method", "path", "raw", "stencil", "text")

    def __init__(
        self, method: str, path: str, fields: PlainFields, raw: list[Field], end: int, length: int
    ) -> None:
        self.method = method
        self.path = path
        self.fields = fields
        self.raw = raw
        self.end = end
        """Where its body begins."""
        self.length = length
        """Of the body."""
        self.text = b""
        """As it came."""
        self.stencil: Stencil | None = None
        """What the client's next head mostly fits into; *length* and *end* are then set anew."""
        self.facts: Facts | None = None
        """What the short way knows of it."""


def read_head(data: bytes) -> PlainHead | None:
    """Return the head at the beginning of *data* if it is whole and plain, else None."""
    end = data.find(b"\r\n\r\n", 0, _MAX_HEAD)
    if end < 0:
        return None
    lines = data[:end].split(b"\r\n")
    words = lines[0].split(b" ")
    if len(words) != 3 or words[2] != b"HTTP/1.1" or len(lines) > _MAX_FIELDS:
        return None
    fields, raw = PlainFields(), []
    for line in lines[1:]:
        known = _lines.get(line) or _read_line(line)
        if known is None or dict.__contains__(fields, known[0]):
            return None
        dict.__setitem__(fields, known[0], known[1])
        raw.append(known[2])
    return _checked(words[0], words[1], fields, raw, end + 4)


def _checked(
    method: bytes, target: bytes, fields: PlainFields, raw: list[Field], end: int
) -> PlainHead | None:
    # as it came, so that nothing has to be undone: no escapes, no query, no doubled slashes
    path = target.decode("latin-1")
    host = dict.get(fields, "host")
    length = dict.get(fields, "content-length")
    if host is None or not is_valid_host(host) or not is_exact(path):
        return None
    if dict.get(fields, "connection", "keep-alive").lower() != "keep-alive":
        return None
    if method == b"POST" and length is not None and length.isdecimal() and len(length) < 16:
        return PlainHead("POST", path, fields, raw, end, int(length))
    if method == b"GET" and length is None:
        return PlainHead("GET", path, fields, raw, end, 0)
    return None


def _read_line(line: bytes) -> _Line | None:
    found = _line.fullmatch(line)
    if found is None:
        return None
    name = found[1].decode("ascii").lower()
    if name in _NOT_PLAIN:
        return None
    read = (name, found[2].decode("ascii"), (found[1], found[2]))
    if len(line) <= _LINE_KEPT and name not in _SECRET:
        if len(_lines) >= _LINES_KEPT:
            _lines.clear()
        _lines[line] = read
    return read


class WholeBody:
    """A body that came with its head; as much of a `StreamReader` as `intake` uses."""

    __slots__ = ("_data", "total_bytes")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.total_bytes = len(data)

    def is_eof(self) -> bool:
        """Say that all of it is here."""
        return True

    def read_nowait(self) -> bytes:
        """Return it; nothing the second time."""
        data, self._data = self._data, b""
        return data

    async def readany(self) -> bytes:
        """Return it at once, as `read_nowait`."""
        return self.read_nowait()


class PlainRequest:
    """See `request.Request`."""

    __slots__ = (
        "_connection",
        "answer_begun",
        "content",
        "cors_headers",
        "headers",
        "method",
        "output_size",
        "raw_headers",
        "request_id",
        "route_path",
    )

    version = HttpVersion11
    keep_alive = True
    route_query = ""

    def __init__(
        self,
        connection: OwnConnection,
        head: PlainHead,
        content: WholeBody | StreamReader,
        request_id: str,
        cors_headers: Mapping[str, str],
    ) -> None:
        self._connection = connection
        self.method = head.method
        self.route_path = head.path
        self.headers = head.fields
        self.raw_headers = head.raw
        self.content = content
        self.request_id = request_id
        self.cors_headers = cors_headers
        self.answer_begun = False
        self.output_size = 0

    @property
    def transport(self) -> asyncio.Transport | None:
        """None when the client left."""
        return self._connection.transport

    @property
    def protocol(self) -> OwnConnection:
        """Who knows whether the client keeps up."""
        return self._connection

    @property
    def writer(self) -> PlainRequest:
        """Where a sink notes that an answer has begun (*output_size*)."""
        return self

    @property
    def must_close(self) -> bool:
        """True when the answer has to say ``Connection: close``."""
        return self._connection.ends
