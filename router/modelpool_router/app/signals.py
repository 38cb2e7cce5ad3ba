"""Signals of a program that ends when it is told to, and in no other way."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Mapping


@contextlib.contextmanager
def heeded(handlers: Mapping[signal.Signals, Callable[[], None]]) -> Iterator[None]:
    """
    Let the running loop call *handlers*; afterwards ignore these signals for good.

    For the last thing that a program does: it ends by itself then, and one signal more must not
    turn that into an abort.
    """
    loop = asyncio.get_running_loop()
    # Not by way of the loop: to take its handlers away is to have the default ones for a moment.
    for number, handler in handlers.items():
        signal.signal(number, lambda *_, handler=handler: loop.call_soon_threadsafe(handler))
    try:
        yield
    finally:
        _hush()
        for number in handlers:
            signal.signal(number, signal.SIG_IGN)


def _hush() -> None:
    """Say nothing of a signal that came between our handler and none; Python would."""
    report = sys.unraisablehook

    def unless_ignored(problem: sys.UnraisableHookArgs) -> None:
        if isinstance(problem.exc_value, OSError) and "race condition" in str(problem.exc_value):
            return
        report(problem)

    sys.unraisablehook = unless_ignored
