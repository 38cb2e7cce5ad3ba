"""
What a reload changes, as values: which pools, members and settings, and what cannot change now.
"""

from __future__ import annotations

from dataclasses import dataclass

from .model import Pool, Settings
from .problems import Problem
from .shape import keys_of
from .source import Source

NEED_RESTART = {
    "listen": "open connections belong to the old address",
    "admin": "open connections belong to the old address",
    "state_dir": "locks and member logs are in the old folder",
    "max_connections": "the listening socket was opened with the old number",
    "kubernetes": "connections to the API server are made",
    "lease_namespace": "the Leases that are held are in the old one",
    "pools_from": "the ModelPools of another namespace are being followed",
    "log_format": "log lines are already being written in the old form",
}
"""Attributes that a running router cannot change, and why. Of `pools_from` only the namespace."""


@dataclass(frozen=True, slots=True)
class PoolChange:
    """What changes in a pool that stays."""

    name: str
    rules: tuple[str, ...]
    """Attributes of the pool itself that differ, ``default`` included."""
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    """Members that stay but are described differently."""
    reordered: bool
    """The members that stay are listed in another order."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Everything that differs between two configurations."""

    settings: tuple[str, ...]
    """Top-level attributes that differ and can change now."""
    refused: tuple[Problem, ...]
    """Top-level settings that differ and need a restart; the old value stays."""
    pools_added: tuple[str, ...]
    pools_removed: tuple[str, ...]
    pools_changed: tuple[PoolChange, ...]
    upstreams_added: tuple[str, ...]
    upstreams_removed: tuple[str, ...]
    upstreams_changed: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """True when nothing differs."""
        return self == _NOTHING


_NOTHING = Changes((), (), (), (), (), (), (), ())


def kept(old: Settings, new: Settings) -> dict[str, object]:
    """Return what stays as it is in *old*, by attribute, when *new* is put in force."""
    return {name: getattr(old, name) for name in NEED_RESTART if _is_refused(name, old, new)}


def _is_refused(attribute: str, old: Settings, new: Settings) -> bool:
    """Return whether a running router cannot change *attribute* from *old* to *new*."""
    if attribute == "pools_from":
        before, after = old.pools_from, new.pools_from
        return before is not None and after is not None and before.namespace != after.namespace
    return attribute in NEED_RESTART and getattr(old, attribute) != getattr(new, attribute)


def compare(old: Settings, new: Settings) -> Changes:
    """Return what differs from *old* to *new*; names are in the order of *new*."""
    old_pools = {pool.name: pool for pool in old.pools}
    new_pools = {pool.name: pool for pool in new.pools}
    old_upstreams = {each.name: each for each in old.upstreams}
    new_upstreams = {each.name: each for each in new.upstreams}
    differing = [
        attribute
        for attribute in Settings.model_fields
        if attribute not in ("pools", "upstreams")
        and getattr(old, attribute) != getattr(new, attribute)
    ]
    changed = (
        _pool_change(old_pools[name], pool) for name, pool in new_pools.items() if name in old_pools
    )
    return Changes(
        settings=tuple(each for each in differing if not _is_refused(each, old, new)),
        refused=tuple(_refusal(each, new) for each in differing if _is_refused(each, old, new)),
        pools_added=tuple(name for name in new_pools if name not in old_pools),
        pools_removed=tuple(name for name in old_pools if name not in new_pools),
        pools_changed=tuple(change for change in changed if change is not None),
        upstreams_added=tuple(name for name in new_upstreams if name not in old_upstreams),
        upstreams_removed=tuple(name for name in old_upstreams if name not in new_upstreams),
        upstreams_changed=tuple(
            name
            for name, each in new_upstreams.items()
            if name in old_upstreams and old_upstreams[name] != each
        ),
    )


def moved(old: Settings, new: Settings) -> list[Problem]:
    """Return the problem of every pool whose members move into Kubernetes, or out of it."""
    before = {pool.name: pool.is_in_kubernetes for pool in old.pools}
    source = new.source or Source("<settings>", new.folder)
    return [
        source.problem(
            ("pools", number),
            f"the members of {pool.name} cannot move between this machine and Kubernetes "
            "while the router runs",
            "give the new pool another name, or restart the router",
        )
        for number, pool in enumerate(new.pools)
        if before.get(pool.name, pool.is_in_kubernetes) != pool.is_in_kubernetes
    ]


def _pool_change(old: Pool, new: Pool) -> PoolChange | None:
    old_members = {member.name: member for member in old.members}
    new_members = {member.name: member for member in new.members}
    change = PoolChange(
        name=new.name,
        rules=tuple(
            attribute
            for attribute in Pool.model_fields
            if attribute != "members" and getattr(old, attribute) != getattr(new, attribute)
        ),
        added=tuple(name for name in new_members if name not in old_members),
        removed=tuple(name for name in old_members if name not in new_members),
        changed=tuple(
            name
            for name, member in new_members.items()
            if name in old_members and old_members[name] != member
        ),
        reordered=[name for name in old_members if name in new_members]
        != [name for name in new_members if name in old_members],
    )
    return None if change == PoolChange(new.name, (), (), (), (), False) else change


def _refusal(attribute: str, new: Settings) -> Problem:
    key = next(key for key in keys_of(Settings).values() if key.attribute == attribute)
    source = new.source or Source("<settings>", new.folder)
    return source.problem(
        (key.name,),
        f"cannot change while the router runs: {NEED_RESTART[attribute]}",
        "restart the router, or put the old value back",
    )
