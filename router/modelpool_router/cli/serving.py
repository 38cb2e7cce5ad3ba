"""``modelpool serve``: the router itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import starting
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
    starting.prepare_imports()
    from ..settings import ConfigError

    flags: dict[str, object] = {
        "--listen": listen,
        "--admin": admin,
        "--state-dir": state_dir,
        "--keys-file": keys_file,
        "--admin-token-file": admin_token_file,
        "--allow-anonymous": allow_anonymous or None,
        "--log-level": log_level,
        "--log-format": log_format,
    }
    settings_of = {**starting.VALUES, **starting.SWITCHES}
    given = {settings_of[name]: value for name, value in flags.items() if value is not None}
    path = chosen_file(file)
    try:
        settings = starting.read_settings(path, given)
    except ConfigError as error:
        refuse_config(error)
        return
    warn(settings)
    raise typer.Exit(starting.run(settings))
