"""
How long a client will wait, as far as it says so, and when its hold must end (H1).

The SDKs that OpenAI and Anthropic generate announce their read time-out in a header; Node's own
``fetch`` gives up after 300 s whatever the SDK says. An answer that comes after a client has
gone helps nobody, so a hold ends a little before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

TIMEOUT_HEADERS = ("x-stainless-read-timeout", "x-stainless-timeout")
"""In this order: the read time-out is the one that a silent hold meets."""
RUNTIME_HEADER = "x-stainless-runtime"
NODE_PATIENCE_S = 300.0
"""Head and body time-out of undici, the client behind Node's ``fetch``."""
SHORTEST_S, LONGEST_S = 1.0, 86_400.0
"""Announcements outside are taken for nonsense: milliseconds, or "for ever"."""
EARLIER_S, EARLIER_SHARE = 2.0, 0.1
"""How much earlier we answer: enough for the answer to travel, little of a short patience."""

# Bounded on purpose: header values are foreign, and ``float`` would take "nan", "1_0" and "1e9".
_DECIMAL = re.compile(r"[0-9]{1,8}(\.[0-9]{0,12})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Patience:
    """When a hold must end, and who set that limit."""

    deadline: float
    """Monotonic seconds, the clock of the arrival."""
    limited_by: Literal["swapBudget", "client"]


def hold_deadline(
    arrival: float,
    swap_budget_s: float,
    headers: Mapping[str, str],
    *,
    ignore_patience: bool = False,
) -> Patience:
    """
    Return the end of the hold of a request that came at *arrival*.

    Args:
        arrival: Monotonic seconds.
        swap_budget_s: Longest hold of the pool.
        headers: Of the request, by lower-case name or case-insensitive.
        ignore_patience: The client is kept awake otherwise (``holdKeepalive`` of a stream).
    """
    budget = Patience(arrival + swap_budget_s, "swapBudget")
    patience_s = None if ignore_patience else announced_patience_s(headers)
    if patience_s is None:
        return budget
    hold_s = patience_s - min(EARLIER_S, EARLIER_SHARE * patience_s)
    return Patience(arrival + hold_s, "client") if hold_s < swap_budget_s else budget


def announced_patience_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds after which the client gives up, or None if it does not say."""
    limits = [
        seconds
        for seconds in (_seconds(headers.get(name)) for name in TIMEOUT_HEADERS)
        if seconds is not None
    ][:1]
    if headers.get(RUNTIME_HEADER, "").strip().casefold() == "node":
        limits.append(NODE_PATIENCE_S)
    return min(limits, default=None)


def _seconds(text: str | None) -> float | None:
    if text is None or _DECIMAL.fullmatch(text.strip()) is None:
        return None
    seconds = float(text)
    return seconds if SHORTEST_S <= seconds <= LONGEST_S else None
