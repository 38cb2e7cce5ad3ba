"""
What is checked between the values of a configuration, beyond the type and range of each.

The first half looks at the tree as it was read, so that a wrong value elsewhere hides none of
these; the second half needs the numbers and runs on finished settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from .model import OBJECT_KINDS, Settings, yaml_name
from .problems import Problem, suggestion
from .shape import keys_of, section_at, sections
from .source import Path_, Source, show_path
from .units import Number, format_duration, format_size

OBJECT_KEYS = {yaml_name(attribute): kind for attribute, kind in OBJECT_KINDS.items()}
"""Keys by which a member names its object of Kubernetes, and the kind of it."""
PROCESS_KEYS = (
    "port",
    "env",
    "workingDirectory",
    "stopCommand",
    "goneCommand",
    "stopGrace",
    "killGrace",
    "logFile",
    "memoryNeededBytes",
)
"""Keys that say how a local process is run."""
_LEASED_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,51}[a-z0-9])?")


def _dicts(value: object) -> Iterator[tuple[int, dict[str, Any]]]:
    for index, item in enumerate(value if isinstance(value, list) else ()):
        if isinstance(item, dict):
            yield index, item


def _text(value: object) -> str | None:
    return value.text if isinstance(value, Number) else value if isinstance(value, str) else None


def _members(tree: dict[str, Any]) -> Iterator[tuple[Path_, dict[str, Any]]]:
    for number, pool in _dicts(tree.get("pools")):
        for index, member in _dicts(pool.get("members")):
            yield ("pools", number, "members", index), member


def take_nulls(tree: dict[str, Any], source: Source) -> list[Problem]:
    """Report every key without a value, and remove it from *tree* so that it is reported once."""
    problems: list[Problem] = []

    def visit(value: Any, path: Path_) -> None:
        if isinstance(value, dict):
            for key in [key for key, item in value.items() if item is None]:
                problems.append(
                    source.problem((*path, key), "has no value", "give it one or remove the line")
                )
                del value[key]
        items: Iterable[tuple[str | int, Any]] = ()
        if isinstance(value, dict):
            items = value.items()
        elif isinstance(value, list):
            items = enumerate(value)
        for key_or_index, item in items:
            visit(item, (*path, key_or_index))

    visit(tree, ())
    return problems


def unknown_key(path: Path_, source: Source) -> Problem:
    """Return the problem with a key that its level does not have."""
    key = str(path[-1])
    section = section_at(path[:-1])
    known = list(keys_of(section)) if section else []
    meant = suggestion(key, known)
    if meant:
        return source.problem(path, "this key is not known here", f"did you mean {meant}?")
    elsewhere = [where or "the top level" for where, at in sections().items() if key in keys_of(at)]
    if elsewhere:
        return source.problem(
            path, "this key does not belong here", f"move it to {' or '.join(elsewhere)}"
        )
    return source.problem(
        path, "this key is not known", f"remove it; known here are {', '.join(known)}"
    )


def check_tree(tree: dict[str, Any], source: Source) -> list[Problem]:
    """Return what is wrong between the values of *tree*, whatever else is wrong with it."""
    return [
        *_something_to_serve(tree, source),
        *_ways_to_run(tree, source),
        *_kubernetes_pools(tree, source),
        *_pool_names(tree, source),
        *_model_names(tree, source),
        *_defaults(tree, source),
        *_ports(tree, source),
        *_settle_gates(tree, source),
    ]


def _something_to_serve(tree: dict[str, Any], source: Source) -> Iterator[Problem]:
    if not any(tree.get(key) for key in ("pools", "upstreams", "poolsFrom")):
        yield source.problem(
            (),
            "there is neither a pool nor an upstream, so there is nothing to serve",
            "add pools: [...]; `modelpool init` writes a file to begin with",
        )


def _ways_to_run(tree: dict[str, Any], source: Source) -> Iterator[Problem]:
    for path, member in _members(tree):
        ways = [key for key in ("command", *OBJECT_KEYS) if key in member]
        if not ways:
            yield source.problem(
                (*path, "command"),
                "is missing",
                "add command: (list of text), or deployment: {namespace: ..., name: ...} "
                "for a member in Kubernetes",
            )
        for key in ways[1:]:
            yield source.problem(
                (*path, key),
                f"a member is run in one way, and this one has {ways[0]} as well",
                "keep one of the two",
            )
        if ways and ways[0] != "command":
            for key in [key for key in PROCESS_KEYS if key in member]:
                yield source.problem(
                    (*path, key),
                    "this is for members that the router starts itself",
                    f"remove it; what {ways[0]} names says how the member is run"
                    + (f", and {ways[0]}.port where it answers" if key == "port" else ""),
                )


def _kubernetes_pools(tree: dict[str, Any], source: Source) -> Iterator[Problem]:
    owners: dict[tuple[str, str, str], Path_] = {}
    for number, pool in _dicts(tree.get("pools")):
        members = [member for _, member in _dicts(pool.get("members"))]
        objects = [any(key in member for key in OBJECT_KEYS) for member in members]
        if not any(objects):
            continue
        here: Path_ = ("pools", number)
        if not all(objects):
            index = objects.index(not objects[0])
            first, this = ("in Kubernetes", "a local process")
            if not objects[0]:
                first, this = this, first
            yield source.problem(
                (*here, "members", index),
                f"the first member of this pool is {first}, and this one is {this}",
                "give it a pool of its own: one slot is looked after in one way",
            )
        name = _text(pool.get("name"))
        if name is not None and not _LEASED_NAME.fullmatch(name):
            yield source.problem(
                (*here, "name"),
                f"{name!r} cannot be part of the name of the Lease modelpool-<pool>",
                "use at most 53 small letters, digits and dashes",
            )
        if "memorySettle" in pool:
            yield source.problem(
                (*here, "memorySettle"),
                "this is for members that the router starts itself",
                "remove it; Kubernetes gives an accelerator away when its last Pod is gone",
            )
        for index, member in enumerate(members):
            for key in [key for key in OBJECT_KEYS if isinstance(member.get(key), dict)]:
                place = (*here, "members", index, key)
                named = member[key]
                which = (key, str(named.get("namespace")), str(named.get("name")))
                if which in owners:
                    yield source.problem(
                        place,
                        f"{OBJECT_KEYS[key]} {which[1]}/{which[2]} already runs "
                        f"{_where(owners[which], source)}",
                        "list each object once; further names of it go into models",
                    )
                owners.setdefault(which, place[:-1])


def _pool_names(tree: dict[str, Any], source: Source) -> Iterator[Problem]:
    seen: dict[str, Path_] = {}
    for number, pool in _dicts(tree.get("pools")):
        path: Path_ = ("pools", number, "name")
        # Names become file names, and some file systems are blind to case.
        name = _text(pool.get("name"))
        if name is None:
            continue
        if name.casefold() in seen:
            first = _where(seen[name.casefold()], source)
            yield source.problem(
                path, f"{name!r} is already the name of {first}", "give each pool its own name"
            )
        seen.setdefault(name.casefold(), path)


def _where(path: Path_, source: Source) -> str:
    place = source.place(path)
    owner = show_path(path[:-1] if path[-1] == "name" else path)
    return owner if place.line is None else f"{owner} (line {place.line})"


def _model_names(tree: dict[str, Any], source: Source) -> Iterator[Problem]:
    owners: list[tuple[Path_, dict[str, Any]]] = list(_members(tree))
    owners += [(("upstreams", i), item) for i, item in _dicts(tree.get("upstreams"))]
    seen: dict[str, Path_] = {}
    # All names before all aliases: the name is the one that keeps its meaning.
    claims: list[tuple[str, Path_]] = []
    for path, owner in owners:
        name = _text(owner.get("name"))
        if name:
            claims.append((name, (*path, "name")))
    for path, owner in owners:
        aliases = owner.get("models")
        for index, item in enumerate(aliases if isinstance(aliases, list) else ()):
            alias = _text(item)
            if alias:
                claims.append((alias, (*path, "models", index)))
    for name, path in claims:
        if name in seen:
            yield source.problem(
                path,
                f"{name!r} is already taken by {_where(seen[name], source)}",
                "names and aliases are unique over all members and upstreams: rename or remove one",
            )
        seen.setdefault(name, path)


def _defaults(tree: dict[str, Any], source: Source) -> Iterator[Problem]:
    for number, pool in _dicts(tree.get("pools")):
        default = _text(pool.get("default"))
        members = [member for _, member in _dicts(pool.get("members"))]
        names = [name for name in (_text(member.get("name")) for member in members) if name]
        path: Path_ = ("pools", number, "default")
        if default is not None and default not in names:
            listed = f"use one of {', '.join(names)}" if names else "add a member of that name"
            meant = suggestion(default, names)
            for member in members:
                aliases = member.get("models")
                if isinstance(aliases, list) and default in aliases:
                    meant = str(member.get("name"))
            yield source.problem(
                path,
                f"{default!r} is no member of this pool",
                f"did you mean {meant}?" if meant else listed,
            )
        if default is None and pool.get("reclaimDefaultAfter", "off") != "off":
            yield source.problem(
                (*path[:-1], "reclaimDefaultAfter"),
                "there is no default to give way to",
                "set default to a member, or remove this",
            )


def _ports(tree: dict[str, Any], source: Source) -> Iterator[Problem]:
    taken: dict[int, tuple[int | None, str]] = {}
    for key, fallback in (("listen", "8080"), ("admin", "9090")):
        text = str(tree.get(key, fallback)).rpartition(":")[2]
        if not text.isdigit() or int(text) == 0:
            continue
        if int(text) in taken:
            yield source.problem(
                (key,), f"port {text} is also that of listen", "choose another port for one of them"
            )
        taken.setdefault(int(text), (None, key))
    for path, member in _members(tree):
        port, command = member.get("port"), member.get("command")
        if isinstance(command, list) and port is None:
            if not any(isinstance(word, str) and "{port}" in word for word in command):
                yield source.problem(
                    (*path, "command"),
                    "the router cannot know where this member will listen",
                    'put {port} where the command takes its port, as in [--port, "{port}"], '
                    "or set port to the number it always uses",
                )
        if not isinstance(port, int) or isinstance(port, bool):
            continue
        number = path[1]
        assert isinstance(number, int)
        pool, owner = taken.setdefault(port, (number, _where(path, source)))
        # Members of one pool never run together, so they may share a port.
        if pool != number:
            yield source.problem(
                (*path, "port"),
                f"port {port} is already used by {owner}",
                "choose another port, or remove it and write {port} in the command",
            )


def _settle_gates(tree: dict[str, Any], source: Source) -> Iterator[Problem]:
    for path, member in _members(tree):
        pool = tree["pools"][path[1]]
        if "memoryNeededBytes" in member and "memorySettle" not in pool:
            yield source.problem(
                (*path, "memoryNeededBytes"),
                "nothing measures the free memory",
                "add memorySettle: {command: [...]} to the pool, or remove this",
            )


def check_settings(settings: Settings, source: Source, given: set[str]) -> list[Problem]:
    """
    Return what is wrong between the numbers of *settings*.

    *given* are the YAML names of the top-level keys that were set by anybody.
    """
    return [
        *_exposure(settings, source, given),
        *_limits(settings, source),
        *_timers(settings, source),
    ]


def _exposure(settings: Settings, source: Source, given: set[str]) -> Iterator[Problem]:
    # Keys that are given but wrong are reported themselves; they are not missing.
    no_keys = settings.keys is None and "keys" not in given
    if not settings.listen.is_loopback and no_keys and not settings.allow_anonymous:
        yield source.problem(
            ("listen",),
            f"{settings.listen} can be reached from other machines, and no keys are configured",
            "set keys: {file: PATH}, listen on 127.0.0.1, "
            "or say --allow-anonymous (allowAnonymous: true) if everybody may use it",
        )
    if settings.admin is not None and not settings.admin.is_loopback:
        if settings.admin_token is None and "adminToken" not in given:
            source.warnings.append(
                source.problem(
                    ("admin",),
                    f"{settings.admin} can be reached from other machines, "
                    "and whoever reaches it may load and unload members",
                    "set adminToken: {file: PATH}",
                )
            )


def _limits(settings: Settings, source: Source) -> Iterator[Problem]:
    if settings.max_body_bytes > settings.max_held_bytes:
        key = "maxBodyBytes" if ("maxBodyBytes",) in source.places else "maxHeldBytes"
        yield source.problem(
            (key,),
            f"a body of maxBodyBytes ({format_size(settings.max_body_bytes)}) "
            f"would never fit into maxHeldBytes ({format_size(settings.max_held_bytes)})",
            "raise maxHeldBytes or lower maxBodyBytes",
        )
    if settings.max_held > settings.max_connections:
        key = "maxHeld" if ("maxHeld",) in source.places else "maxConnections"
        yield source.problem(
            (key,),
            f"maxHeld ({settings.max_held}) is never reached with maxConnections "
            f"({settings.max_connections})",
            "raise maxConnections above maxHeld or lower maxHeld",
        )


def _timers(settings: Settings, source: Source) -> Iterator[Problem]:
    for number, pool in enumerate(settings.pools):
        here: Path_ = ("pools", number)
        for index, member in enumerate(pool.members):
            # Unset it yields to a short loadTimeout: nobody wrote what would have to be corrected.
            written = "expected_load_s" in member.model_fields_set
            if written and member.expected_load_s > pool.load_timeout_s:
                yield source.problem(
                    (*here, "members", index, "expectedLoad"),
                    f"{format_duration(member.expected_load_s)} is longer than the loadTimeout "
                    f"of the pool ({format_duration(pool.load_timeout_s)})",
                    "raise loadTimeout of the pool or lower expectedLoad",
                )
        if pool.looks_every_s > pool.is_hung_after_s:  # both are written, then
            yield source.problem(
                (*here, "hungAfter"),
                f"{format_duration(pool.hung_after_s)} is shorter than healthInterval "
                f"({format_duration(pool.looks_every_s)}), so that no look falls into it",
                "raise hungAfter or lower healthInterval",
            )
