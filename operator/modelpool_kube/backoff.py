"""How long to wait before trying again: doubling, bounded, and never in step with others."""

from __future__ import annotations

import random


class Backoff:
    """Pauses between attempts: each about double the one before, up to *most_s*, with jitter."""

    def __init__(self, rng: random.Random, *, first_s: float, most_s: float) -> None:
        self._rng = rng
        self._first_s = first_s
        self._most_s = most_s
        self.failures = 0

    def next(self, at_least_s: float | None = None) -> float:
        """Count one more failure and return how long to wait; *at_least_s* if that is longer."""
        pause = min(self._most_s, self._first_s * 2.0 ** min(self.failures, 32))
        self.failures += 1
        # Half of it is fixed, so that it never gets near zero.
        return max(at_least_s or 0.0, pause * self._rng.uniform(0.5, 1.0))

    def reset(self) -> None:
        """Begin anew, after a success."""
        self.failures = 0
