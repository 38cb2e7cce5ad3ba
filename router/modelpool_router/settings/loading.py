"""
From a file, the environment and flags to settings, or to every problem with them at once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from . import rules
from .environment import lay_environment, lay_flags
from .model import Settings
from .problems import ConfigError, Problem, suggestion
from .shape import Kind, key_at, type_text
from .source import Path_, Place, Source, plain_copy, read_yaml, show_path
from .units import shown

_FILE_LIMIT = 4 * 1024 * 1024
"""More than any configuration; a model file given by mistake is refused at once."""


def load(
    path: str | os.PathLike[str] | None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Settings:
    """
    Return the settings of the file at *path*, the environment and flags.

    Args:
        path: YAML file; None = no file.
        environ: Environment; only ``MODELPOOL_*`` counts. None = none, not the process's.
        overrides: Values of flags by their path in the file: ``{"listen": "127.0.0.1:0"}``.

    Flags win over the environment, that over the file, that over the defaults.

    Raises:
        ConfigError: The file cannot be read, or something in it, the environment or the flags
            cannot be used. Holds every problem.
    """
    if path is None:
        return parse("", file="no file", environ=environ, overrides=overrides)
    file = os.fspath(path)
    try:
        with open(file, "rb") as stream:
            data = stream.read(_FILE_LIMIT + 1)
    except OSError as error:
        reason = error.strerror or "cannot be read"
        way_out = "give the path of a YAML file; `modelpool init` writes one"
        raise ConfigError([Problem(file, None, None, "", reason, way_out)]) from error
    if len(data) > _FILE_LIMIT:
        problem = Problem(file, None, None, "", "is larger than 4 MiB", "give a configuration file")
        raise ConfigError([problem])
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problem = Problem(file, line, None, "", "is not UTF-8", "save the file as UTF-8")
        raise ConfigError([problem]) from error
    full = Path(file).absolute()
    settings = parse(text, file=file, folder=full.parent, environ=environ, overrides=overrides)
    assert settings.source is not None  # parsed just now
    settings.source.path = full
    return settings


def reload(settings: Settings) -> Settings:
    """
    Read what *settings* were made of once more: the same file, environment and flags.

    Raises:
        ConfigError: As `load`; also when *settings* did not come from a file.
    """
    source = settings.source
    if source is None or source.path is None:
        place = "<settings>" if source is None else source.file
        way_out = "start the router with a file"
        raise ConfigError(
            [Problem(place, None, None, "", "there is no file to read again", way_out)]
        )
    return load(source.path, source.environ, source.overrides)


def parse(
    text: str,
    *,
    file: str = "<text>",
    folder: Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Settings:
    """Like `load`, from the *text* of a file; relative paths count from *folder*."""
    source = Source(file, Path.cwd() if folder is None else folder)
    source.places[()] = Place(file)
    source.environ, source.overrides = dict(environ or {}), dict(overrides or {})
    tree, problems = read_yaml(text, source)
    syntax_is_broken = bool(problems) and not tree
    problems += rules.take_nulls(tree, source)
    problems += lay_environment(tree, environ or {}, source)
    lay_flags(tree, overrides or {}, source)
    if syntax_is_broken:
        # Nothing was read: complaints about what is missing would only hide the cause.
        raise ConfigError(problems)
    return _build(tree, source, problems)


def from_mapping(tree: Mapping[str, Any], *, folder: Path | None = None) -> Settings:
    """Like `load`, from plain values with the keys of the file. For programs and tests."""
    source = Source("<settings>", Path.cwd() if folder is None else folder)
    return _build(plain_copy(tree), source, [])


def _build(tree: dict[str, Any], source: Source, problems: list[Problem]) -> Settings:
    problems += rules.check_tree(tree, source)
    reported = {problem.field for problem in problems}
    given = set(tree)
    settings, wrong = _validate(tree, source)
    for path, problem in wrong:
        if problem.reason != "is missing" or show_path(path) not in reported:
            problems.append(problem)
    if wrong:
        # Without the wrong values the rest can still be checked against each other.
        for path, _ in wrong:
            _drop(tree, path)
        settings, _ = _validate(tree, source)
        if settings is None:
            top = {key: tree[key] for key in tree if key not in ("pools", "upstreams")}
            settings, _ = _validate(top, source)
    if settings is not None:
        own = rules.check_settings(settings, source, given)
        problems += [each for each in own if each.field not in {p.field for p in problems}]
    if problems or settings is None:
        raise ConfigError(_in_order(problems, source))
    settings._source = source
    return settings


def _in_order(problems: list[Problem], source: Source) -> list[Problem]:
    def rank(problem: Problem) -> tuple[bool, str, int, int]:
        mine = problem.file != source.file
        return (mine, problem.file if mine else "", problem.line or 0, problem.column or 0)

    return sorted(dict.fromkeys(problems), key=rank)


def _validate(
    tree: dict[str, Any], source: Source
) -> tuple[Settings | None, list[tuple[Path_, Problem]]]:
    try:
        settings = Settings.model_validate(
            tree, by_alias=True, by_name=False, context={"folder": source.folder}
        )
    except ValidationError as error:
        # pydantic counts only the items that are right: a list of wrong ones is not empty.
        details = [
            each
            for each in error.errors(include_url=False)
            if not (each["type"] == "too_short" and each["input"])
        ]
        return None, [(tuple(each["loc"]), _problem(each, source)) for each in details]
    return settings, []


def _drop(tree: Any, path: Path_) -> None:
    here = tree
    for step in path[:-1]:
        try:
            here = here[step]
        except (KeyError, IndexError, TypeError):
            return
    if isinstance(here, dict):
        here.pop(path[-1], None)


def _problem(error: ErrorDetails, source: Source) -> Problem:
    """Return what pydantic found, in the words of this product."""
    path: Path_ = tuple(error["loc"])
    kind, value = error["type"], error["input"]
    key = key_at(path)
    if kind == "extra_forbidden":
        return rules.unknown_key(path, source)
    if kind == "missing":
        form = type_text(key) if key else "value"
        return source.problem(path, "is missing", f"add {path[-1]}: ({form})")
    if kind == "refused":
        context = error["ctx"]
        return source.problem(path, str(context["reason"]), str(context["way_out"]))
    if kind == "enum":
        expected = str(error["ctx"]["expected"]).replace("'", "")
        known = [word.strip() for part in expected.split(" or ") for word in part.split(",")]
        meant = suggestion(value, known) if isinstance(value, str) else None
        way_out = f"did you mean {meant}? " if meant else ""
        return source.problem(path, f"{shown(value)} is not known", f"{way_out}use {expected}")
    if kind == "too_short" and key is not None:
        return source.problem(path, "is empty", "list at least one")
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return source.problem(
            path, f"{shown(value)} is not a mapping", "write `key: value` lines, indented below it"
        )
    if kind in ("tuple_type", "list_type"):
        return source.problem(
            path, f"{shown(value)} is not a list", "write its items as lines that begin with -"
        )
    form = type_text(key).replace("\\|", "or") if key and key.kind is Kind.SCALAR else "text"
    if kind in ("greater_than_equal", "less_than_equal"):
        return source.problem(path, f"{shown(value)} is out of range", f"use a {form}")
    return source.problem(path, f"{shown(value)} does not fit", f"use {form}")
