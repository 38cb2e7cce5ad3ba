"""What the process does about its memory: what stays for ever, what is kept, what is given back."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable
from typing import Final

QUIET_S: Final = 1.0
"""Big bodies that follow each other sooner find the memory of the last ones still there."""
_MIB: Final = 1024 * 1024
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of glibc's malloc.h


def settle() -> None:
    """What is there now stays for ever: the collector need not look at it again."""
    gc.collect()
    gc.freeze()
    gc.enable()  # it was off for the start, see `cli.starting`


def keep_blocks() -> None:
    """
    Let glibc keep the blocks that big bodies are read into.

    By default every block over 128 KiB is mapped anew, and each of its pages is a page fault: most
    of what a body of some megabytes costs. `Trimmer` gives back what is kept for nobody.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return
    mallopt(_MMAP_THRESHOLD, 8 * _MIB)
    mallopt(_TRIM_THRESHOLD, 16 * _MIB)
    mallopt(_TOP_PAD, _MIB)


def give_back() -> None:
    """Return free pages to the system: some milliseconds, without the interpreter's lock."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return
    trim(0)


class Trimmer:
    """
    Gives memory back once no big body has come or gone for `QUIET_S`.

    Bodies that wait in files leave the pages behind through which they came. They may wait for
    minutes, beside a model that could use the memory.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        quiet_s: float = QUIET_S,
        trim: Callable[[], None] = give_back,
    ) -> None:
        self._loop = loop
        self._quiet_s = quiet_s
        self._trim = trim
        self._noted = False
        self._timer: asyncio.TimerHandle | None = None
        self._running: asyncio.Future[None] | None = None

    def note(self) -> None:
        """A big body was put into a file, or one of those is done with."""
        self._noted = True
        if self._timer is None:
            self._look()

    async def close(self) -> None:
        """Trim no more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running is not None:
            await asyncio.wait([self._running])

    def _look(self) -> None:
        if self._noted:
            self._noted = False
            self._timer = self._loop.call_later(self._quiet_s, self._look)
            return
        self._timer = None
        # in a thread: others who want memory meanwhile wait for it, the loop need not
        self._running = self._loop.run_in_executor(None, self._trim)
