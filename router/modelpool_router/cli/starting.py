"""
What `modelpool serve` does, and the way to it that skips the rest of the command line.

The time from the start of the process to its first answer is spent on imports. A command line that
is plainly a `serve` is read here; whatever else it is (help, a mistake, a file with an error or a
warning) is left to `main`, which reads it again from the beginning.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..settings import Settings

DEFAULT_FILE = "modelpool.yaml"
FILE_VARIABLE = "MODELPOOL_CONFIG"
VALUES: Mapping[str, str] = {
    "--listen": "listen",
    "--admin": "admin",
    "--state-dir": "stateDir",
    "--keys-file": "keys.file",
    "--admin-token-file": "adminToken.file",
    "--log-level": "logLevel",
    "--log-format": "logFormat",
}
"""Flags of `serve` that take a value, and the setting it is for."""
SWITCHES: Mapping[str, str] = {"--allow-anonymous": "allowAnonymous"}


def serve_at_once(words: Sequence[str]) -> int | None:
    """
    Be the router that the command line *words* ask for, and return the exit code.

    Returns None, with nothing done, when they ask for something else or it cannot be had.
    """
    command = read_command(words, os.environ)
    if command is None:
        return None
    prepare_imports()
    from ..settings import ConfigError

    try:
        settings = read_settings(*command)
    except ConfigError:
        return None
    if settings.source is not None and settings.source.warnings:
        return None
    return run(settings)


def read_command(
    words: Sequence[str], environ: Mapping[str, str]
) -> tuple[Path, dict[str, object]] | None:
    """Return the file and the flags of a plain ``serve``; None for everything else."""
    if words[:1] != ["serve"] or "_MODELPOOL_COMPLETE" in environ:
        return None
    files: list[str] = []
    flags: dict[str, object] = {}
    rest = iter(words[1:])
    for word in rest:
        if not word.startswith("-"):
            files.append(word)
            continue
        name, equals, value = word.partition("=")
        if name in SWITCHES and not equals:
            flags[SWITCHES[name]] = True
            continue
        if not equals:
            value = next(rest, "")
        if name not in VALUES or not value or value.startswith("-"):
            return None
        flags[VALUES[name]] = value
    file = Path((files or [environ.get(FILE_VARIABLE) or DEFAULT_FILE])[0])
    return (file, flags) if len(files) < 2 and file.is_file() else None


def read_settings(file: Path, flags: Mapping[str, object]) -> Settings:
    """
    Return the settings of *file*, the environment and *flags*, checked against this machine.

    Raises:
        ConfigError: with every problem.
    """
    from ..settings import ConfigError, load, verify

    settings = load(file, os.environ, flags)
    problems = verify(settings, os.environ, ports=True)
    if problems:
        raise ConfigError(problems)
    return settings


def run(settings: Settings) -> int:
    """Serve until a signal says stop; return the exit code."""
    with _hidden("aiodns"):
        from ..app import run as run_router

    return run_router(settings)


def prepare_imports() -> None:
    """
    Leave out of the start what a router never uses.

    - Imports make thousands of objects that stay: the garbage collector need not look at them
      again and again (`app.serving` turns it on).
    - structlog loads rich, if there is one, to print exceptions in colours; a router's log has
      places in place of exceptions.
    - pydantic looks through all installed distributions for plugins.
    - aiohttp loads aiodns, if there is one (see `run`), for name look-ups that members and
      API servers do not need.
    """
    gc.disable()
    if "structlog" not in sys.modules and "rich" not in sys.modules:
        with _hidden("rich"):
            import structlog.dev  # noqa: F401
    if "modelpool_router.settings" not in sys.modules:
        with _without_plugins():
            from .. import settings  # noqa: F401


@contextmanager
def _hidden(name: str) -> Iterator[None]:
    """Let imports of the optional package *name* fail for a while, unless it is loaded already."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # means: not to be found
    try:
        yield
    finally:
        del sys.modules[name]


@contextmanager
def _without_plugins() -> Iterator[None]:
    name = "PYDANTIC_DISABLE_PLUGINS"
    if name in os.environ:
        yield
        return
    os.environ[name] = "__all__"
    try:
        yield
    finally:
        del os.environ[name]  # members inherit the environment
