"""``modelpool demo``: a router with two simulated members, and a short exchange to watch."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .exits import ExitCode


def demo(
    once: Annotated[
        bool,
        typer.Option(
            "--once", help="End after the exchange; exit code 0 only if everything was right."
        ),
    ] = False,
    speed: Annotated[
        float, typer.Option(min=0.1, max=100, help="Load and answer so many times faster.")
    ] = 1.0,
) -> None:
    """
    Watch two simulated members take turns: real processes, load times and streamed tokens.

    Needs no model and no accelerator. Listens on 8080 and 9090 of this machine, or on free ports
    if those are taken. Plays a request that is held while its member loads, and one that waits
    for the other member's stream to end; then stays up for requests of yours.

    Examples:

        modelpool demo

        modelpool demo --once
    """
    import asyncio

    from .demo_play import play

    run = asyncio.run
    if sys.platform != "win32":
        import uvloop

        run = uvloop.run
    raise typer.Exit(ExitCode.OK if run(play(once=once, speed=speed)) else ExitCode.FAILED)
