"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from modelpool_router.core import patience
from served import ClientKind, clients_that


@pytest.fixture
def answers_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine tenths of a client's patience are left at the end of its hold, for slow machines."""
    monkeypatch.setattr(patience, "EARLIER_S", 60.0)
    monkeypatch.setattr(patience, "EARLIER_SHARE", 0.9)


@pytest.fixture(params=["keep", "close"])
def either_client(request: pytest.FixtureRequest) -> Iterator[ClientKind]:
    """Run the test with clients that keep connections, and with such as do not."""
    with clients_that(request.param):
        yield request.param


@pytest.fixture
def closing_clients() -> Iterator[None]:
    """For tests that count what a router is left with."""
    with clients_that("close"):
        yield
