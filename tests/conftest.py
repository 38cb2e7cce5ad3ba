"""Settings of the whole test run."""

from __future__ import annotations

import asyncio
import re
import signal

import pytest


def pytest_configure() -> None:
    # looptime looks for a current event loop when it is loaded, which makes one that nobody
    # closes; with warnings as errors a later test would be blamed for it.
    asyncio.set_event_loop(None)
    # A job in the background of a script ignores Ctrl-C, and so would every program of these tests.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Two workers that name one test differently run none at all, and an address is never the same.
    unstable = [item.nodeid for item in items if re.search(r" at 0x[0-9a-f]+", item.nodeid)]
    if unstable:
        raise pytest.UsageError("give these tests ids of their own: " + ", ".join(unstable))
