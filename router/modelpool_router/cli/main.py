"""The command line as a whole: names, help, version, completion."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from . import bench, cluster, configuring, demo, serving, trace, verbs, watching
from .exits import EXIT_CODES_HELP, ExitCode

app = typer.Typer(
    name="modelpool",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES_HELP,
)


def version() -> str:
    """Return the version of the installed distribution."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("modelpool")
    except PackageNotFoundError:
        return "0+checkout"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"modelpool {version()}")
        raise typer.Exit


@app.callback()
def modelpool(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    """
    Several models take turns on one accelerator slot behind one OpenAI-style endpoint.

    Begin with `modelpool demo`, which needs no model; then `modelpool init` and
    `modelpool serve`.
    """


_PANEL = "Running router"
app.command(rich_help_panel="Router")(serving.serve)
app.command(rich_help_panel="Router")(demo.demo)
app.command(rich_help_panel="Router")(bench.bench)
app.command(rich_help_panel="Configuration")(configuring.init)
app.command(rich_help_panel="Configuration")(configuring.check)
app.add_typer(configuring.config_app, name="config", rich_help_panel="Configuration")
app.command(rich_help_panel=_PANEL)(watching.status)
app.command(rich_help_panel=_PANEL)(watching.why)
app.command(rich_help_panel=_PANEL)(verbs.load)
app.command(rich_help_panel=_PANEL)(verbs.unload)
app.command(rich_help_panel=_PANEL)(verbs.pause)
app.command(rich_help_panel=_PANEL)(verbs.resume)
app.command(rich_help_panel="Cluster")(cluster.doctor)
app.command(rich_help_panel="Cluster")(cluster.adopt)
app.command(rich_help_panel="Cluster")(cluster.forget)
app.command(rich_help_panel="Cluster")(trace.trace)


def main() -> None:
    """Run the command that ``sys.argv`` names and end the process with its exit code."""
    try:
        app(prog_name="modelpool")
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
