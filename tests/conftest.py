"""Settings of the whole test run."""

from __future__ import annotations

import asyncio


def pytest_configure() -> None:
    # looptime looks for a current event loop when it is loaded, which makes one that nobody
    # closes; with warnings as errors a later test would be blamed for it.
    asyncio.set_event_loop(None)
