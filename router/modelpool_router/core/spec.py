"""
What the scheduler must know of a pool: plain values, already validated.

`settings` reads them from a file and converts; nothing here checks or parses. All durations are
seconds. ``None`` means "off" unless a field says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NewType

MemberName = NewType("MemberName", str)
PoolName = NewType("PoolName", str)
Ticket = NewType("Ticket", int)
"""Number of one accepted request; unique in a router process, grows."""
Epoch = NewType("Epoch", int)
"""Grows by one with every ownership decision of a slot; tells a stale report from a fresh one."""


@dataclass(frozen=True, slots=True)
class MemberSpec:
    """One model service of a pool, as far as decisions need it."""

    name: MemberName
    parallel: int = 16
    """Most leases out at once; a driver may report a better number when the member lands."""
    parallel_is_fixed: bool = False
    """Somebody chose `parallel` on purpose: what the driver reports does not count."""
    expected_load_s: float = 60.0
    """Load time to assume until one has been measured."""
    has_idle_probe: bool = True
    """Whether the engine can be asked; without, the router's own count decides."""


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """One exclusive slot and the rules of taking turns on it (design section 4)."""

    name: PoolName
    members: Mapping[MemberName, MemberSpec]
    """In order of configuration: the order breaks ties."""
    default: MemberName | None = None
    swap_budget_s: float = 300.0
    """Longest hold, from arrival. 0 = refuse at once and leave demand."""
    max_turn_s: float = 60.0
    linger_s: float | None = None
    """None = automatic: a quarter of the measured swap time, at most 2 s."""
    drain_timeout_s: float | None = None
    load_timeout_s: float = 600.0
    max_generation_s: float | None = None
    idle_unload_after_s: float | None = None
    reclaim_default_after_s: float | None = None
    hung_after_s: float = 60.0
    restore: bool = True
    """Whether the last good resident is loaded again when its displacer failed and nobody waits."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Router-wide limits on what may be held at once (H11)."""

    max_held: int = 1000
    max_held_per_key: int = 64
    max_held_bytes: int = 512 * 1024 * 1024


@dataclass(slots=True)
class HoldLedger:
    """
    Counts held requests and bytes over all pools of a router, against `Bounds`.

    Shared by the schedulers of one router, the only thing they share. Counts holds per API key
    when there is one (*key* is an opaque label, never the secret itself).
    """

    bounds: Bounds = field(default_factory=Bounds)
    held: int = 0
    held_bytes: int = 0
    by_key: dict[str, int] = field(default_factory=dict)

    def refusal(self, key: str | None) -> str | None:
        """Return the error code that one more hold for *key* must get, or None if it fits."""
        if key is not None and self.by_key.get(key, 0) >= self.bounds.max_held_per_key:
            return "rate_limit_exceeded"
        if self.held >= self.bounds.max_held:
            return "queue_full"
        return None

    def add(self, key: str | None) -> None:
        """Count one more hold."""
        self.held += 1
        if key is not None:
            self.by_key[key] = self.by_key.get(key, 0) + 1

    def remove(self, key: str | None) -> None:
        """Count one hold less."""
        self.held -= 1
        if key is not None:
            left = self.by_key[key] - 1
            if left:
                self.by_key[key] = left
            else:
                del self.by_key[key]

    def reserve_bytes(self, size: int) -> bool:
        """Take *size* bytes of body (memory and spool alike); False if they do not fit."""
        if self.held_bytes + size > self.bounds.max_held_bytes:
            return False
        self.held_bytes += size
        return True

    def release_bytes(self, size: int) -> None:
        """Give back what `reserve_bytes` took."""
        self.held_bytes -= size
