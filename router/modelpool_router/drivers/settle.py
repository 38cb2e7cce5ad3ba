"""
When the accelerator's memory is back: the end of a process and the release by its driver differ.

`SettleWatch` decides, fed with measurements; `SettleGate.wait` measures and waits. The target is
what the next member needs, if that is configured, else the *floor*: what was free the last time
the slot was empty. The floor moves with every load, so that memory which some driver never gives
back (it adds up over hundreds of swaps) is waited for once at most.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from .base import ActivationFailed
from .child import run_command

_log = logging.getLogger(__name__)

_TOLERANCE = 0.02
"""Part of the floor that may be missing without anybody waiting for it."""
_STABLE_LOOKS = 3
"""Looks without growth, after there was some, that count as the end of the growth."""


@dataclass(frozen=True, slots=True)
class SettleGate:
    """How to measure free memory, and how long to wait for it."""

    command: tuple[str, ...]
    """Prints free MiB, a number a line; of several lines (accelerators) the smallest counts."""
    timeout_s: float = 30.0
    interval_s: float = 0.5


class Settled(StrEnum):
    """What one more measurement means."""

    WAIT = "wait"
    ENOUGH = "enough"
    STOPPED_GROWING = "stopped_growing"


class SettleWatch:
    """Judges a row of measurements taken in one slot while it is empty. All in MiB."""

    def __init__(
        self, *, needed: float | None, floor: float | None, loaded: float | None = None
    ) -> None:
        self._target = needed if needed is not None else floor
        if self._target is not None and needed is None:
            self._target *= 1.0 - _TOLERANCE
        self._first = loaded  # growth may be over before the first look
        self._best = 0.0
        self._still = 0

    def look(self, free: float) -> Settled:
        """Take one more measurement."""
        if self._target is None or free >= self._target:
            return Settled.ENOUGH
        if self._first is None:
            self._first = free
        if free > self._best * (1.0 + _TOLERANCE / 4):
            self._best, self._still = free, 0
            return Settled.WAIT
        self._still += 1
        grew = self._best > self._first
        # Without any growth yet the release may still be ahead: only time tells.
        return Settled.STOPPED_GROWING if grew and self._still >= _STABLE_LOOKS else Settled.WAIT


class Settler:
    """The gate of one pool, with its moving floor."""

    def __init__(self, gate: SettleGate, *, env: Mapping[str, str]) -> None:
        self.gate = gate
        self._env = dict(env)
        self._highest: float | None = None
        self.floor: float | None = None
        """MiB free when the slot was last empty; None before the first load."""

        self._loaded: float | None = None

    @property
    def drift(self) -> float:
        """MiB that were free once in the empty slot and are not any more."""
        if self.floor is None or self._highest is None:
            return 0.0
        return self._highest - self.floor

    async def note_loaded(self) -> None:
        """Measure what is free while a member is up, so that growth is told from none."""
        self._loaded = await self._measure(self.gate.timeout_s)

    async def wait(self, needed: float | None) -> None:
        """
        Return when a load may start.

        Args:
            needed: MiB the member needs; None = whatever was free before.

        Raises:
            ActivationFailed: *needed* is given and was not reached in time (retryable).
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.gate.timeout_s
        watch = SettleWatch(needed=needed, floor=self.floor, loaded=self._loaded)
        while True:
            free = await self._measure(max(deadline - loop.time(), 1.0))
            if free is None:
                return
            verdict = watch.look(free)
            left = deadline - loop.time()
            if verdict is not Settled.WAIT or left <= 0:
                break
            await asyncio.sleep(min(self.gate.interval_s, left))
        if verdict is Settled.WAIT and needed is not None:
            raise ActivationFailed(
                "memory_not_free",
                f"{free:.0f} MiB are free after {self.gate.timeout_s:g} s, {needed:.0f} MiB are "
                "needed; end what else uses the accelerator, or lower memoryNeededBytes",
            )
        if verdict is not Settled.ENOUGH:
            _log.warning(
                "memory did not come back",
                extra={"free_mib": free, "floor_mib": self.floor, "needed_mib": needed},
            )
        self.floor, self._loaded = free, None
        self._highest = max(self._highest or 0.0, free)

    async def _measure(self, timeout_s: float) -> float | None:
        """Run the command; None when it tells nothing, which must not stop the pool."""
        result = await run_command(
            self.gate.command, env=self._env, cwd=Path("/"), timeout_s=timeout_s
        )
        free = smallest_number(result.output) if result.succeeded else None
        if free is None:
            _log.warning("free memory cannot be measured", extra={"result": str(result)})
        return free


def smallest_number(output: str) -> float | None:
    """Return the smallest of the first numbers of each line, None if no line begins with one."""
    found = [
        float(match[1])
        for line in output.splitlines()
        if (match := _NUMBER.match(line)) is not None
    ]
    return min(found, default=None)


_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\b")
