"""
What cannot be read but only noticed: for how long a Lease has not been renewed, and who else
scales. Lost with the process; then it is noticed anew, later.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from modelpool_kube.kinds import Json
from modelpool_kube.lease import view
from modelpool_kube.slotrules import ForeignChanges

from ..plan.members import ObservedMember


@dataclass(slots=True)
class LeaseMemory:
    """For how long nobody but us has held one Lease, by our own clock."""

    _uid: str | None = None
    _version: str = ""
    _changed_at: float = 0.0
    _free_since: float | None = None

    def renewed(self, obj: Json, now: float) -> None:
        """Take in that the Lease was seen as *obj*."""
        seen = view(obj)
        if (seen.uid, seen.version) != (self._uid, self._version):
            self._uid, self._version = seen.uid, seen.version
            self._changed_at = now

    def free_for(self, obj: Json | None, holder: str, now: float) -> float | None:
        """
        Return for how many seconds nobody but *holder* has held it; None while somebody does.

        A renewal time is never looked at: it is by another clock. A Lease counts as run out when
        it stood still for its duration while we looked.
        """
        if obj is None:
            self._uid = None
            return self._since(now, now)
        self.renewed(obj, now)
        seen = view(obj)
        if not seen.holder or seen.holder == holder:
            return self._since(now, now)
        runs_out = self._changed_at + seen.duration_s
        if now < runs_out:
            self._free_since = None
            return None
        return self._since(runs_out, now)

    def _since(self, at: float, now: float) -> float:
        if self._free_since is None:
            self._free_since = at
        return now - self._free_since


@dataclass(slots=True)
class _Seen:
    mark: object
    wants: int
    changes: ForeignChanges = field(default_factory=ForeignChanges)


@dataclass(slots=True)
class ScaleMemory:
    """Changes of replicas that were nobody's who may."""

    _seen: dict[str, _Seen] = field(default_factory=dict)

    def look(
        self, members: Iterable[ObservedMember], now: float, *, is_quiet: bool
    ) -> frozenset[str]:
        """
        Take in how *members* are; return the names of those that somebody else keeps changing.

        *is_quiet* means that nobody who may scale is at work, so that a change is a stranger's.
        """
        found = {}
        for each in members:
            if each.obj is None:
                continue
            before = self._seen.get(each.name)
            after = _Seen(each.mark, each.wants)
            if before is not None:
                after.changes = before.changes
                # Before there is a mark nobody has said that replicas are a pool's.
                is_kept = after.mark is not None and before.mark == after.mark
                if is_quiet and is_kept and before.wants != after.wants:
                    after.changes = before.changes.another(now)
            found[each.name] = after
        self._seen = found
        return frozenset(n for n, each in found.items() if each.changes.are_a_contest(now))
