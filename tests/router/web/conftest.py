"""Fixtures of the web tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fronts import front_of


@pytest.fixture(params=["own", "aiohttp"])
def either_front(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once behind each front; they must not differ in anything it sees."""
    with front_of(request.param):
        yield request.param
