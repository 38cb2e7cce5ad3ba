"""Which front tests run against; the fixture `either_front` of tests/router/web sets it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_own = True


def is_own() -> bool:
    """Whether plain requests are to be answered by the own front."""
    return _own


@contextmanager
def front_of(kind: str) -> Iterator[None]:
    """Let servers that are made inside be ``own`` or ``aiohttp``."""
    global _own
    before, _own = _own, kind == "own"
    try:
        yield
    finally:
        _own = before
