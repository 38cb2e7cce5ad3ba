"""
Which member or upstream a model name means. Names are opaque: matched exactly, never normalised.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .spec import MemberName, PoolName

_MAX_ECHO = 200
_MAX_LISTED = 100


@dataclass(frozen=True, slots=True)
class Route:
    """Where requests for a name go: a member of a pool, or an upstream that is never swapped."""

    member: MemberName
    pool: PoolName | None
    """None for an upstream; *member* is then the upstream's name."""
    served_model: str | None = None
    """What to put in place of the body's ``model``, if anything."""

    @property
    def upstream(self) -> bool:
        """True when there is nothing to swap."""
        return self.pool is None


@dataclass(frozen=True, slots=True)
class Entry:
    """One member or upstream with everything it answers to."""

    route: Route
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Own name first, then the aliases in order of configuration."""
        return (self.route.member, *self.aliases)


class DuplicateName(ValueError):
    """Two members or upstreams want the same name; nobody could tell whom a client means."""

    def __init__(self, name: str, first: str, second: str) -> None:
        super().__init__(f"{name!r} is a name of both {first!r} and {second!r}")
        self.name = name
        self.first = first
        self.second = second


class UnknownModel(LookupError):
    """No such name for this caller. *message* is complete and safe to send."""

    code = "model_not_found"
    param = "model"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


Allowed = frozenset[str] | None
"""Names that a key may use, members or aliases; each opens all names of its member. None = all."""


class Catalog:
    """Immutable; a reload builds a new one and replaces it whole."""

    __slots__ = ("_by_name", "_entries")

    def __init__(self, entries: Iterable[Entry]) -> None:
        """
        Raises:
            DuplicateName: a name or alias is not unique over members and upstreams.
        """
        self._entries = tuple(entries)
        by_name: dict[str, Entry] = {}
        for entry in self._entries:
            for name in entry.names:
                other = by_name.setdefault(name, entry)
                if other is not entry:
                    raise DuplicateName(name, other.route.member, entry.route.member)
        self._by_name: Mapping[str, Entry] = by_name

    def find(self, name: str, allowed: Allowed = None) -> Route:
        """
        Return where requests for *name* go.

        Raises:
            UnknownModel: there is no such name, or the key may not use it; the two cannot be told
                apart, so that names of others stay theirs.
        """
        entry = self._by_name.get(name)
        if entry is None or not _may_use(entry, allowed):
            raise UnknownModel(self._refusal(name, allowed))
        return entry.route

    def visible(self, allowed: Allowed = None) -> tuple[Entry, ...]:
        """Return what a key may use, in order of configuration."""
        if allowed is None:
            return self._entries
        return tuple(entry for entry in self._entries if _may_use(entry, allowed))

    def describe(self, name: str, allowed: Allowed = None) -> Entry:
        """Return the entry behind *name*; raises like `find`."""
        self.find(name, allowed)
        return self._by_name[name]

    def only(self, allowed: Allowed = None) -> Route | None:
        """Return the single route a key may use, or None when there are several or none."""
        visible = self.visible(allowed)
        return visible[0].route if len(visible) == 1 else None

    def _refusal(self, name: str, allowed: Allowed) -> str:
        names = [each for entry in self.visible(allowed) for each in entry.names]
        if not names:
            listing = "This key may not use any model."
        else:
            listing = "Models you can use: " + ", ".join(map(printable, names[:_MAX_LISTED]))
            listing += f" and {len(names) - _MAX_LISTED} more." if len(names) > _MAX_LISTED else "."
        return (
            f"The model `{printable(name)}` does not exist or you do not have access to it. "
            + listing
        )


def printable(name: str) -> str:
    """
    Return *name* fit for a message or a log line: control characters escaped, length bounded.

    ASCII quotes, backquotes and backslashes are escaped too, so that a name cannot pretend to end.
    """
    shown = "".join(
        each if each.isprintable() and each not in "`\"'\\" else _escape(each)
        for each in name[:_MAX_ECHO]
    )
    return shown + "..." if len(name) > _MAX_ECHO else shown


def _escape(character: str) -> str:
    point = ord(character)
    if point < 0x100:
        return f"\\x{point:02x}"
    return f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"


def _may_use(entry: Entry, allowed: Allowed) -> bool:
    return allowed is None or any(name in allowed for name in entry.names)
