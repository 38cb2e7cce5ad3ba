"""A real llama-server and a small model, where the environment names a Python that has both."""

from __future__ import annotations

from pathlib import Path

import pytest

import served
from realengine import Engine, NoEngine, find_engine

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep these tests out of the ordinary run, whatever the environment names."""
    if "llama" in (config.option.markexpr or ""):
        return
    mine = [item for item in items if HERE in item.path.parents]
    if mine:
        config.hook.pytest_deselected(items=mine)
        items[:] = [item for item in items if item not in mine]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a test the time that a real engine needs on a slow machine."""
    monkeypatch.setattr(served, "TEST_S", 300.0)


@pytest.fixture(scope="session")
def engine() -> Engine:
    """Return the engine, or skip with what is missing."""
    try:
        return find_engine()
    except NoEngine as why:
        pytest.skip(str(why))
