"""Exit codes of every command, and how errors reach a person."""

from __future__ import annotations

from enum import IntEnum
from typing import NoReturn

import typer


class ExitCode(IntEnum):
    """Stable: scripts may rely on them."""

    OK = 0
    FAILED = 1
    """The command was understood and tried, and it did not work."""
    USAGE = 2
    """Wrong flags, or a configuration that cannot be used."""
    UNREACHABLE = 3
    """No router answers on the admin address."""
    REFUSED = 4
    """The router said no: no such member, a token is needed, it goes down."""
    INTERRUPTED = 130


EXIT_CODES_HELP = (
    "Exit codes: 0 done, 1 it failed, 2 wrong usage or configuration, "
    "3 router not reachable, 4 refused by the router, 130 interrupted."
)


def fail(message: str, code: ExitCode, way_out: str = "") -> NoReturn:
    """Print *message* and the way out to stderr and end with *code*."""
    typer.secho(f"error: {message}", fg=typer.colors.RED, err=True)
    if way_out:
        typer.echo(f"    way out: {way_out}", err=True)
    raise typer.Exit(code)
