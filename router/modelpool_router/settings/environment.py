"""
Settings from environment variables and flags, laid over what the file says.

``MODELPOOL_`` and the key in capitals: ``MODELPOOL_MAX_HELD``. Two underscores go one level
down, and an item of a list is called by its name: ``MODELPOOL_POOLS__GPU0__SWAP_BUDGET``.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .model import Section, Settings
from .problems import Problem, suggestion
from .shape import Key, Kind, keys_of
from .source import Path_, Place, Source, show_path

PREFIX = "MODELPOOL_"
NOT_SETTINGS = ("CONFIG", "SLOT", "CLUSTER_ASSETS")
"""Variables of ours with another purpose: the file to read, the mark on members, the test tier."""
_SERVICE_LINK = re.compile(r"^(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_\w+)?)$")
"""Kubernetes gives every Pod such variables for a Service that is called ``modelpool``."""


def lay_environment(
    tree: dict[str, Any], environ: Mapping[str, str], source: Source
) -> list[Problem]:
    """Put the values of *environ* into *tree*; return what cannot be used."""
    problems: list[Problem] = []
    for variable in sorted(environ):
        name, value = variable.removeprefix(PREFIX), environ[variable]
        if name == variable or name in NOT_SETTINGS or not value:
            continue
        place = Place(f"environment variable {variable}")
        path = _locate(tree, name.split("__"))
        if isinstance(path, str):
            # MODELPOOL_PORT=8080 is a person's mistake, MODELPOOL_PORT=tcp://... is not.
            by_kubernetes = name != "PORT" or value.startswith("tcp://")
            if not (by_kubernetes and _SERVICE_LINK.match(name)):
                problem = Problem(*place, "", "this variable sets nothing", path)
                source.warnings.append(problem)
            continue
        key, steps = path
        read = _read(key, value, variable)
        if isinstance(read, str):
            problems.append(Problem(*place, show_path(steps), "cannot be read", read))
            continue
        _put(tree, steps, read[0])
        source.places[steps] = place
    return problems


def lay_flags(tree: dict[str, Any], flags: Mapping[str, object], source: Source) -> None:
    """Put *flags*, values by YAML path such as ``adminToken.file``, into *tree*."""
    for dotted, value in flags.items():
        steps: Path_ = tuple(dotted.split("."))
        key = keys_of(Settings)[str(steps[0])]
        # The shell's user means the folder that he is in, not that of the file.
        is_path = key.kind is Kind.PATH or (key.kind is Kind.SECRET and steps[-1] == "file")
        _put(tree, steps, Path.cwd() / Path(str(value)).expanduser() if is_path else value)
        source.places[steps] = Place(f"flag {key.flag}")


def _locate(tree: dict[str, Any], parts: list[str]) -> tuple[Key, Path_] | str:
    """Return the key that *parts* name and its path, or a sentence about why there is none."""
    section: type[Section] = Settings
    name = "__".join(parts)
    here: Any = tree
    steps: Path_ = ()
    while parts:
        keys = {key.variable: key for key in keys_of(section).values()}
        before = name[: len(name) - len("__".join(parts))]
        part, *parts = parts
        key = keys.get(part)
        if key is None:
            meant = suggestion(part, list(keys))
            return (
                f"did you mean {PREFIX}{before}{meant}?"
                if meant
                else "remove it, or see the reference"
            )
        steps = (*steps, key.name)
        here = here.get(key.name) if isinstance(here, dict) else None
        if key.kind is Kind.MAP and len(parts) == 1:
            return key, (*steps, parts[0])
        if not parts:
            if key.kind in (Kind.SECTIONS, Kind.SECTION, Kind.MAP):
                return "this can only be set in the file; its parts can be set with __"
            return key, steps
        if key.section is None:
            return f"{key.name} has no parts: remove what follows {part}"
        section = key.section
        if key.kind is Kind.SECTIONS:
            wanted, *parts = parts
            index = _index(here, wanted)
            if index is None:
                return f"the file has no item called {wanted} in {key.name}"
            steps = (*steps, index)
            here = here[index]
    return "name a setting"


def _index(items: Any, wanted: str) -> int | None:
    for index, item in enumerate(items if isinstance(items, list) else ()):
        name = item.get("name") if isinstance(item, dict) else None
        if isinstance(name, str) and re.sub(r"[^A-Za-z0-9]", "_", name).upper() == wanted:
            return index
    return None


def _read(key: Key, value: str, variable: str) -> tuple[object] | str:
    """Return *value* as the tree would hold it, or the way out if it cannot be read."""
    if key.kind is Kind.SECRET:
        return ({"env": variable},)
    if key.kind is Kind.PATH:
        return (Path.cwd() / Path(value).expanduser(),)
    if key.kind is not Kind.WORDS:
        return (value,)
    if value.lstrip().startswith("["):
        try:
            items = json.loads(value)
        except ValueError:
            return 'write a JSON list, as in ["a", "b"]'
        return (items,)
    if key.name.lower().endswith("command"):
        try:
            return (shlex.split(value),)
        except ValueError:
            return "close the quotes"
    return ([item.strip() for item in value.split(",")],)


def _put(tree: dict[str, Any], steps: Path_, value: object) -> None:
    here: Any = tree
    for step in steps[:-1]:
        if isinstance(step, str):
            below = here.get(step)
            if not isinstance(below, dict | list):
                below = here[step] = {}
            here = below
        else:
            here = here[step]
    last = steps[-1]
    if last in ("file", "env") and len(steps) > 1 and steps[-2] in ("keys", "adminToken", "apiKey"):
        # A secret has one place: whoever says another one says it instead.
        here.clear()
    here[last] = value
