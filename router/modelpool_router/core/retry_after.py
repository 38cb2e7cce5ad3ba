"""
Seconds to suggest to a client that was refused (H12).

Official clients obey whole seconds up to 60; above 120 some of them stop retrying altogether.
"""

from __future__ import annotations

MIN_S = 1.0
MAX_S = 60.0
JITTER_SHARE = 0.1
OVERDUE_SHARE = 0.2


def remaining_s(expected_s: float, elapsed_s: float) -> float:
    """
    Return how much longer something will take that was expected to take *expected_s*.

    What is overdue is assumed to need another fifth of the time it has taken: honest enough to
    be useful, and never zero.
    """
    left = expected_s - elapsed_s
    return left if left > 0 else OVERDUE_SHARE * elapsed_s


def suggest_s(wait_s: float, jitter: float) -> float:
    """
    Return the seconds to wait before trying again, 1..60, not rounded.

    *jitter* is in [0, 1) and only ever adds: a herd that comes back early is refused once more.
    """
    return min(MAX_S, max(MIN_S, wait_s * (1.0 + JITTER_SHARE * jitter)))
