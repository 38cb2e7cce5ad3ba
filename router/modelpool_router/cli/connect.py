"""The flags that all commands for a running router share, and how their errors are told."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from .admin_client import DEFAULT_ADMIN, AdminClient, Refused, Unreachable, parse_admin
from .exits import ExitCode, fail

AdminOption = Annotated[
    str,
    typer.Option(
        "--admin",
        envvar="MODELPOOL_ADMIN",
        metavar="HOST:PORT",
        help="Admin address of the router, or its URL.",
    ),
]
TokenOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="File with the admin token; MODELPOOL_ADMIN_TOKEN may hold the token itself.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


@contextmanager
def router(admin: str, token_file: Path | None = None) -> Iterator[AdminClient]:
    """Lend a client for the admin address; end the command in words when it cannot be used."""
    try:
        address = parse_admin(admin)
    except ValueError:
        fail(
            f"{admin!r} is no address",
            ExitCode.USAGE,
            "write --admin like 127.0.0.1:9090 or https://host/prefix",
        )
    try:
        yield AdminClient(address, _token(token_file))
    except Unreachable as error:
        fail(
            str(error),
            ExitCode.UNREACHABLE,
            "start one with `modelpool serve`, or say where it is with --admin or MODELPOOL_ADMIN",
        )
    except Refused as error:
        way_out = ""
        if error.status == 401:
            way_out = "give the token with --token-file or MODELPOOL_ADMIN_TOKEN"
        fail(f"the router refused: {error.message}", ExitCode.REFUSED, way_out)


def _token(token_file: Path | None) -> str | None:
    if token_file is None:
        return os.environ.get("MODELPOOL_ADMIN_TOKEN", "").strip() or None
    try:
        return token_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        fail(f"the token file {token_file} cannot be read: {reason}", ExitCode.USAGE)


def complete_member(incomplete: str) -> list[str]:
    """Return names of members for the shell; none when no router answers at once."""
    admin = os.environ.get("MODELPOOL_ADMIN", DEFAULT_ADMIN)
    try:
        client = AdminClient(parse_admin(admin), None, timeout_s=0.5)
        pools = client.state()["pools"]
        names = [member["name"] for pool in pools for member in pool["members"]]
    except (Unreachable, Refused, ValueError, KeyError, TypeError):
        return []
    return [name for name in names if name.startswith(incomplete)]


def complete_pool(incomplete: str) -> list[str]:
    """Return names of pools for the shell; none when no router answers at once."""
    admin = os.environ.get("MODELPOOL_ADMIN", DEFAULT_ADMIN)
    try:
        pools = AdminClient(parse_admin(admin), None, timeout_s=0.5).state()["pools"]
        names = [pool["name"] for pool in pools]
    except (Unreachable, Refused, ValueError, KeyError, TypeError):
        return []
    return [name for name in names if name.startswith(incomplete)]
