"""Which front tests run against; the fixture `either_front` of tests/router/web sets it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from modelpool_router.app import assembly
from modelpool_router.settings import Settings
from modelpool_router.web.server import ServerOptions

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


def give_routers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let whole routers that start from now on in this process be ``own`` or ``aiohttp``."""
    options = assembly.server_options

    def with_front(settings: Settings) -> ServerOptions:
        return replace(options(settings), own_front=kind == "own")

    monkeypatch.setattr(assembly, "server_options", with_front)
