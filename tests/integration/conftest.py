"""Fixtures of the integration tests."""

from __future__ import annotations

import pytest

from modelpool_router.core import patience


@pytest.fixture
def answers_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine tenths of a client's patience are left at the end of its hold, for slow machines."""
    monkeypatch.setattr(patience, "EARLIER_S", 60.0)
    monkeypatch.setattr(patience, "EARLIER_SHARE", 0.9)
