"""
What answers of the API server mean, byte by byte: one object, or a stream of watch events.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import aiohttp

from .errors import Unanswered, Unavailable, from_status
from .kinds import Json
from .port import Change, WatchEvent

LINE_LIMIT = 16 * 1024 * 1024
"""Longest watch event; etcd takes 1.5 MiB by default."""


def answer(response: aiohttp.ClientResponse, raw: bytes, *, call: str, is_write: bool) -> Json:
    if not 200 <= response.status <= 299:
        raise from_status(
            response.status,
            raw,
            call=call,
            is_write=is_write,
            retry_after_s=_retry_after(response.headers.get("Retry-After")),
        )
    try:
        found = json.loads(raw)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        # Some proxy's page.
        kind = Unanswered if is_write else Unavailable
        raise kind("the answer is not a JSON object", code=response.status, call=call)
    if found.get("kind") == "Status" and found.get("status") == "Failure":
        code = found.get("code")
        raise from_status(code if isinstance(code, int) else 500, raw, call=call, is_write=is_write)
    return found


def _retry_after(text: str | None) -> float | None:
    return float(text) if text is not None and text.isascii() and text.isdigit() else None


class Lines:
    """Cuts a stream into lines; the reader's own `readline` gives up on long ones."""

    def __init__(self, call: str) -> None:
        self._call = call
        self._rest = bytearray()

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the lines that *chunk* completes. A line cut off at the end is in the next list."""
        self._rest += chunk
        *whole, rest = self._rest.split(b"\n") if b"\n" in chunk else (self._rest,)
        self._rest = rest
        if len(rest) > LINE_LIMIT:
            raise Unavailable("a watch event is longer than 16 MiB", call=self._call)
        for line in whole:
            if line.strip():
                yield bytes(line)


def event(line: bytes, call: str) -> WatchEvent:
    try:
        raw = json.loads(line)
        kind, obj = raw["type"], raw["object"]
    except (ValueError, TypeError, KeyError):
        raise Unavailable("the watch sent something that is no event", call=call) from None
    if kind == "ERROR":
        code = obj.get("code") if isinstance(obj, dict) else None
        status = json.dumps(obj).encode()
        raise from_status(code if isinstance(code, int) else 500, status, call=call, is_write=False)
    if kind not in Change.__members__ or not isinstance(obj, dict):
        raise Unavailable(f"the watch sent an event of type {kind!r}", call=call)
    return WatchEvent(Change(kind), obj)
