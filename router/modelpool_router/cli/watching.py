"""``modelpool status`` and ``why``: what a running router is doing."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .admin_client import DEFAULT_ADMIN, AdminClient, Unreachable
from .connect import AdminOption, JsonOption, TokenOption, complete_member, router
from .words import (
    MEMBER_HEADER,
    bar,
    count_text,
    event_line,
    load_share,
    member_row,
    obstacle_lines,
    plain_state,
    pool_headline,
    seconds_text,
)

if TYPE_CHECKING:
    from rich.console import Group

NamespaceOption = Annotated[
    str | None,
    typer.Option(
        "--namespace", "-n", help="Ask the cluster instead of a router: namespace of the pools."
    ),
]
ContextOption = Annotated[str | None, typer.Option(help="Context of the kubeconfig, with -n.")]
KubeconfigOption = Annotated[str | None, typer.Option(help="Kubeconfig file, with -n.")]

_COLOURS = {
    "loaded": "green",
    "loading": "yellow",
    "unloading": "yellow",
    "failed": "red",
    "unloaded": "dim",
}


def status(
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Stay and show changes as they happen.")
    ] = False,
    as_json: JsonOption = False,
    interval: Annotated[
        float, typer.Option(min=0.05, help="Seconds between two looks of --watch.")
    ] = 0.5,
    admin: AdminOption = DEFAULT_ADMIN,
    token_file: TokenOption = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """
    Show who holds each slot, who waits, and for how long.

    On a terminal a table, in a pipe plain text. --watch shows loads as bars; in a pipe it writes
    a line per event instead, with --json a line of JSON.

    Examples:

        modelpool status

        modelpool status --watch

        modelpool status --json | jq '.pools[].resident'

        modelpool status -n lab
    """
    if namespace is not None:
        from .cluster import print_slots

        print_slots(namespace, kubeconfig, context, as_json=as_json)
        return
    with router(admin, token_file) as client:
        if watch and not as_json and sys.stdout.isatty():
            _watch_live(client, interval)
        elif watch:
            _follow(client, as_json=as_json)
        elif as_json:
            typer.echo(json.dumps(client.state(), indent=2, ensure_ascii=False))
        elif sys.stdout.isatty():
            from rich.console import Console

            Console().print(render_state(client.state(), str(client.address)))
        else:
            typer.echo(plain_state(client.state()), nl=False)


def why(
    model: Annotated[
        str,
        typer.Argument(
            help="Name or alias of a member.", autocompletion=complete_member, metavar="MODEL"
        ),
    ],
    as_json: JsonOption = False,
    admin: AdminOption = DEFAULT_ADMIN,
    token_file: TokenOption = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """
    Say in sentences why a request for MODEL waits, or what it would wait for.

    Examples:

        modelpool why coder-large

        modelpool why coder-large -n lab
    """
    if namespace is not None:
        from .cluster import print_why

        print_why(model, namespace, kubeconfig, context, as_json=as_json)
        return
    with router(admin, token_file) as client:
        answer = client.why(model)
    if as_json:
        typer.echo(json.dumps(answer, indent=2, ensure_ascii=False))
        return
    for sentence in answer["sentences"]:
        # The last lines of a member's log may be part of one.
        typer.echo("\n    ".join(sentence.splitlines()))


def render_state(state: dict[str, Any], address: str, stale: str = "") -> Group:
    """Return the state as rich shows it, with *stale*, if anything, on top."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    router_state = state.get("router", {})
    top = Text(f"modelpool {state.get('version', '')}  {address}", style="dim")
    if "held" in router_state:
        top.append(f"  {count_text(router_state['held'], 'request')} held")
    if router_state.get("draining"):
        top.append("  goes down", style="bold red")
    parts: list[Any] = [top]
    if stale:
        parts.append(Text(stale, style="bold red"))
    for view in state["pools"]:
        headline = Text()
        headline.append(str(view["name"]), style="bold")
        headline.append(f"  {pool_headline(view)}")
        for line in obstacle_lines(view):
            headline.append(f"\n  {line}", style="yellow")
        share = load_share(view)
        if share is not None:
            left = (view["load_expected_s"] or 0.0) - view["load_elapsed_s"]
            about = f"about {seconds_text(left)} left" if left > 0 else "longer than usual"
            headline.append(f"\n  [{bar(share, 30)}] {share:4.0%}  {about}", style="yellow")
        parts += [Text(), headline]
        table = Table(box=None, pad_edge=False, header_style="dim")
        for title in MEMBER_HEADER:
            is_number = title in ("IN FLIGHT", "HELD", "OLDEST HOLD", "LOAD TIME")
            table.add_column(title, justify="right" if is_number else "left")
        for member in view["members"]:
            cells = [escape(cell) for cell in member_row(member)]
            colour = _COLOURS.get(member["status"], "")
            cells[1] = f"[{colour}]{cells[1]}[/]" if colour else cells[1]
            table.add_row(*cells)
        parts.append(table)
    return Group(*parts)


def _watch_live(client: AdminClient, interval: float) -> None:
    from rich.live import Live

    state, seen_at = client.state(), time.monotonic()
    address = str(client.address)
    with Live(render_state(state, address), auto_refresh=False, screen=False) as live:
        while True:
            time.sleep(interval)
            stale = ""
            try:
                state, seen_at = client.state(), time.monotonic()
            except Unreachable as error:
                # A router that restarts comes back: stay, and say how old this is.
                age = seconds_text(time.monotonic() - seen_at)
                stale = f"no answer for {age}: {error.reason}"
            live.update(render_state(state, address, stale), refresh=True)


def _follow(client: AdminClient, *, as_json: bool) -> None:
    for kind, event in client.events():
        if as_json:
            typer.echo(json.dumps({"kind": kind, **event}, ensure_ascii=False))
        elif kind == "snapshot":
            typer.echo(plain_state(event), nl=False)
        else:
            line = event_line(kind, event)
            if line is not None:
                clock = time.strftime("%H:%M:%S", time.localtime(event["at"]))
                typer.echo(f"{clock}  {event['pool']}  {line[0]:<12} {line[1]}")
        sys.stdout.flush()
