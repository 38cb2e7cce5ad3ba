"""``modelpool serve``: the router itself."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from .configuring import FileArgument, chosen_file, refuse_config, warn


def serve(
    file: FileArgument = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Where clients connect.", show_default="127.0.0.1:8080"
        ),
    ] = None,
    admin: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT|off",
            help="Where status and metrics answer.",
            show_default="127.0.0.1:9090",
        ),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Estimates, locks and member logs.",
            show_default="~/.local/state/modelpool",
        ),
    ] = None,
    keys_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Client keys.", show_default="none are asked for"),
    ] = None,
    admin_token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Token for changes on the admin port.", show_default="none"
        ),
    ] = None,
    allow_anonymous: Annotated[
        bool,
        typer.Option("--allow-anonymous", help="Let other machines in without a key."),
    ] = False,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error.", show_default="info")
    ] = None,
    log_format: Annotated[
        str | None, typer.Option(help="auto, console or json.", show_default="auto")
    ] = None,
) -> None:
    """
    Start the router on a configuration file.

    Flags win over MODELPOOL_* variables, those over the file. SIGHUP or a change of the file
    reloads it; SIGTERM or Ctrl-C stops: running answers may finish, a second one hurries.

    Examples:

        modelpool serve pool.yaml

        modelpool serve pool.yaml --listen 0.0.0.0:8080 --keys-file keys.txt
    """
    _start_quickly()
    from ..settings import ConfigError, load, verify

    flags: dict[str, object] = {
        "listen": listen,
        "admin": admin,
        "stateDir": state_dir,
        "keys.file": keys_file,
        "adminToken.file": admin_token_file,
        "allowAnonymous": allow_anonymous or None,
        "logLevel": log_level,
        "logFormat": log_format,
    }
    given = {path: value for path, value in flags.items() if value is not None}
    path = chosen_file(file)
    try:
        settings = load(path, os.environ, given)
        problems = verify(settings, os.environ, ports=True)
        if problems:
            raise ConfigError(problems)
    except ConfigError as error:
        refuse_config(error)
        return
    warn(settings)
    from ..app import run

    raise typer.Exit(run(settings))


def _start_quickly() -> None:
    """
    Leave out of the start what a router never uses; a third of it otherwise.

    Imports make thousands of objects that stay: the garbage collector need not look at them again
    and again (`app.serving` turns it on). structlog loads rich, if there is one, to print
    exceptions in colours; a router's log has places in place of exceptions.
    """
    gc.disable()
    if "rich" in sys.modules or "structlog" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment]  # means: not to be found
    try:
        import structlog.dev  # noqa: F401
    finally:
        del sys.modules["rich"]
