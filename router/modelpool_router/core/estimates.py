"""
Moving estimates of how long loads, unloads and drains take; kept over restarts by the runtime.

Pure bookkeeping: seconds in, seconds out. A new measurement counts for 40 %, so that two or three
swaps after a change of hardware or model the estimate has followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .spec import MemberName

NEW_WEIGHT = 0.4
DEFAULT_UNLOAD_S = 1.0
"""A local process that gets TERM is usually gone within a second."""
DEFAULT_DRAIN_S = 5.0
"""A few seconds of generation: what the policy simulation assumed."""


@dataclass(slots=True)
class Estimates:
    """Estimates of one pool, by member."""

    load_s: dict[MemberName, float] = field(default_factory=dict)
    unload_s: dict[MemberName, float] = field(default_factory=dict)
    drain_s: dict[MemberName, float] = field(default_factory=dict)

    def loaded(self, member: MemberName, seconds: float) -> None:
        """Learn that a load of *member* took *seconds*."""
        _learn(self.load_s, member, seconds)

    def unloaded(self, member: MemberName, seconds: float) -> None:
        """Learn that taking *member* down took *seconds*, proof included."""
        _learn(self.unload_s, member, seconds)

    def drained(self, member: MemberName, seconds: float) -> None:
        """Learn that the leases of *member* needed *seconds* to end."""
        _learn(self.drain_s, member, seconds)

    def load(self, member: MemberName, assumed_s: float) -> float:
        """Return the load time to expect, *assumed_s* until one was measured."""
        return self.load_s.get(member, assumed_s)

    def unload(self, member: MemberName | None) -> float:
        """Return the unload time to expect; nothing to take down takes no time."""
        return 0.0 if member is None else self.unload_s.get(member, DEFAULT_UNLOAD_S)

    def drain(self, member: MemberName | None) -> float:
        """Return the drain time to expect."""
        return 0.0 if member is None else self.drain_s.get(member, DEFAULT_DRAIN_S)

    def as_dict(self) -> dict[str, dict[str, float]]:
        """Return plain values for a state file; `from_dict` reads them back."""
        return {
            "load_s": {str(m): s for m, s in self.load_s.items()},
            "unload_s": {str(m): s for m, s in self.unload_s.items()},
            "drain_s": {str(m): s for m, s in self.drain_s.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Estimates:
        """Read what `as_dict` wrote; anything that is not a sane number is left out."""
        return cls(*(_numbers(data.get(key)) for key in ("load_s", "unload_s", "drain_s")))


def _learn(table: dict[MemberName, float], member: MemberName, seconds: float) -> None:
    known = table.get(member)
    table[member] = seconds if known is None else known + NEW_WEIGHT * (seconds - known)


def _numbers(value: object) -> dict[MemberName, float]:
    if not isinstance(value, Mapping):
        return {}
    return {
        MemberName(name): float(seconds)
        for name, seconds in value.items()
        if isinstance(name, str) and isinstance(seconds, int | float) and 0 <= seconds < 86_400
    }
