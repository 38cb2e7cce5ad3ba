"""What handlers see of a request, whichever front read it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, overload

from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import HttpVersion
from multidict import CIMultiDictProxy

from ..core.headers import Field


class PlainFields(dict[str, str]):
    """
    Fields by lower-case name, each there once: as much of a multidict as handlers use.

    Filled with ``dict.__setitem__`` and names that are lower-case already.
    """

    @overload  # type: ignore[override]
    def get(self, name: str) -> str | None: ...
    @overload
    def get(self, name: str, default: str) -> str: ...
    def get(self, name: str, default: str | None = None) -> str | None:
        return dict.get(self, name.lower(), default)

    def getall(self, name: str, default: Sequence[str] = ()) -> Sequence[str]:
        """Return all values, of which there is one at most."""
        value = dict.get(self, name.lower())
        return default if value is None else (value,)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and dict.__contains__(self, name.lower())

    def __getitem__(self, name: str) -> str:
        return dict.__getitem__(self, name.lower())


Fields = CIMultiDictProxy[str] | PlainFields
"""Header fields by name, in any case."""


_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def wished_id(value: str | None) -> str:
    """Return the id that a client wants for its request if it is short and plain, else ''."""
    return value if value and _REQUEST_ID.fullmatch(value) else ""


def extra_fields(cors_headers: Mapping[str, str]) -> tuple[Field, ...]:
    """Return *cors_headers* as lines of an answer that is written past the front."""
    if not cors_headers:
        return ()
    return tuple((name.encode(), value.encode()) for name, value in cors_headers.items())


class ClientSide(Protocol):
    """As much of a request as forwarding it needs."""

    @property
    def raw_headers(self) -> Iterable[Field]:
        """As they came."""
        ...

    @property
    def version(self) -> HttpVersion: ...

    @property
    def keep_alive(self) -> bool: ...

    @property
    def transport(self) -> asyncio.Transport | None: ...

    @property
    def protocol(self) -> BaseProtocol:
        """Knows whether the client keeps up."""
        ...

    @property
    def writer(self) -> Any:
        """Takes note in *output_size* that an answer has begun."""
        ...


class Request(ClientSide, Protocol):
    """A request whose head passed every check; its body may still be on its way."""

    request_id: str
    """The client's own if it is short and plain, else ours."""
    cors_headers: Mapping[str, str]
    """To be part of every answer; what is written past the front has to see to it."""
    answer_begun: bool
    """To be set by whoever writes an answer past the front: no error can follow it then."""

    @property
    def method(self) -> str: ...

    @property
    def headers(self) -> Fields: ...

    @property
    def content(self) -> Any:
        """The body, as aiohttp's `StreamReader` or as much of one as `intake` uses."""
        ...

    @property
    def route_path(self) -> str:
        """Percent-encoded as sent, inner double slashes collapsed; see `core.target`."""
        ...

    @property
    def route_query(self) -> str:
        """With its question mark, or empty."""
        ...

    @property
    def must_close(self) -> bool:
        """True when the answer has to say ``Connection: close``; may turn so while it is held."""
        ...
