"""
What the settings look like from outside: the keys of each level and what each holds.

Read from the pydantic models, for the environment, the suggestions and the reference page.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from annotated_types import Ge, Le
from pydantic.fields import FieldInfo

from .model import SecretSource, Section, Settings
from .units import Duration, Size, Written


class Kind(Enum):
    """What a key holds."""

    SCALAR = "scalar"
    PATH = "path"
    WORDS = "words"
    MAP = "map"
    SECRET = "secret"
    SECTION = "section"
    SECTIONS = "sections"


@dataclass(frozen=True, slots=True)
class Key:
    """One key of one level."""

    name: str
    """As in the file: ``swapBudget``."""
    attribute: str
    kind: Kind
    section: type[Section] | None
    """What is below, for the kinds that have something below."""
    info: FieldInfo

    @property
    def variable(self) -> str:
        """Return its part of an environment variable: ``SWAP_BUDGET``."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", self.name).upper()

    @property
    def flag(self) -> str:
        """Return its command line flag: ``--swap-budget``."""
        return "--" + self.variable.lower().replace("_", "-")


def keys_of(section: type[Section]) -> dict[str, Key]:
    """Return the keys of *section* by their name in the file, in order."""
    return {key.name: key for key in _keys(section)}


def _keys(section: type[Section]) -> Iterator[Key]:
    for attribute, info in section.model_fields.items():
        kind, below = _kind(info.annotation)
        yield Key(str(info.alias), attribute, kind, below, info)


def prose_of(section: type[Section]) -> dict[str, str]:
    """Return the docstrings of the attributes of *section*, each on one line; needs the source."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: " ".join(below.value.value.split())
        for field, below in pairwise(body.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }


def _kind(annotation: Any) -> tuple[Kind, type[Section] | None]:
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        inner = [each for each in get_args(annotation) if each is not type(None)]
        return _kind(inner[0])
    if origin is tuple and get_args(annotation)[-1] is Ellipsis:
        item = get_args(annotation)[0]
        if isinstance(item, type) and issubclass(item, Section):
            return Kind.SECTIONS, item
        return Kind.WORDS, None
    if origin is dict:
        return Kind.MAP, None
    if isinstance(annotation, type):
        if issubclass(annotation, SecretSource):
            return Kind.SECRET, annotation
        if issubclass(annotation, Section):
            return Kind.SECTION, annotation
        if issubclass(annotation, Path):
            return Kind.PATH, None
    return Kind.SCALAR, None


def section_at(path: tuple[str | int, ...]) -> type[Section] | None:
    """Return the level that *path* leads to, or None if it leads to a value."""
    section: type[Section] | None = Settings
    for part in path:
        if isinstance(part, int):
            continue
        key = keys_of(section).get(part) if section else None
        section = key.section if key else None
    return section


def key_at(path: tuple[str | int, ...]) -> Key | None:
    """Return the key that *path* ends in or under, or None if there is none."""
    found: Key | None = None
    section: type[Section] | None = Settings
    for part in path:
        if isinstance(part, int):
            continue
        if section is None:
            return found
        found = keys_of(section).get(part)
        section = found.section if found else None
    return found


def sections() -> dict[str, type[Section]]:
    """Return every level by its path in the file: ``""``, ``pools[]``, ``pools[].members[]``."""
    found: dict[str, type[Section]] = {}

    def visit(section: type[Section], path: str) -> None:
        found[path] = section
        for key in keys_of(section).values():
            if key.section is not None:
                brackets = "[]" if key.kind is Kind.SECTIONS else ""
                visit(key.section, f"{path}.{key.name}{brackets}".lstrip("."))

    visit(Settings, "")
    return found


def type_text(key: Key) -> str:
    """Return the type of *key* for people, range included."""
    match key.kind:
        case Kind.SECTIONS:
            return "list"
        case Kind.SECTION:
            return "mapping"
        case Kind.SECRET:
            return "`{file: PATH}` or `{env: NAME}`"
        case Kind.MAP:
            return "mapping of names to text"
        case Kind.WORDS:
            return f"list of {_item_text(key.info.annotation)}"
        case Kind.SCALAR | Kind.PATH:
            return _scalar_text(key.info)


def _item_text(annotation: Any) -> str:
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = get_args(annotation)[0]
    item = get_args(annotation)[0]
    for mark in get_args(item)[1:]:
        if isinstance(mark, Written):
            return mark.text + ("s" if mark.text in ("name", "origin") else "")
    return "text"


def _scalar_text(info: FieldInfo) -> str:
    for mark in info.metadata:
        if isinstance(mark, Duration | Size | Written):
            return mark.text
    annotation: Any = info.annotation
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = get_args(annotation)[0]
    for mark in getattr(annotation, "__metadata__", ()):
        if isinstance(mark, Written):
            return mark.text
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return " \\| ".join(f"`{each.value}`" for each in annotation)
    if annotation is bool:
        return "`true` \\| `false`"
    if annotation is int:
        low = next((mark.ge for mark in info.metadata if isinstance(mark, Ge)), None)
        high = next((mark.le for mark in info.metadata if isinstance(mark, Le)), None)
        return f"whole number, {low} to {high}"
    return "text"
