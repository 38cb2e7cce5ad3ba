"""``modelpool load``, ``unload``, ``pause``, ``resume``: demand and wishes without a client."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from .admin_client import DEFAULT_ADMIN, AdminClient
from .connect import AdminOption, TokenOption, complete_member, complete_pool, router
from .exits import ExitCode, fail
from .words import View, load_share, pool_headline, seconds_text

WaitOption = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Stay until it is done, and show how far it is.")
]
TimeoutOption = Annotated[
    float, typer.Option(min=0, metavar="SECONDS", help="Longest --wait; the router goes on.")
]
PoolArgument = Annotated[
    str | None,
    typer.Argument(
        help="Name of the pool; may be left out when there is one.", autocompletion=complete_pool
    ),
]

_LOOK_S = 0.2
"""Pause between two looks while waiting: smooth enough for a bar."""


def load(
    member: Annotated[
        str, typer.Argument(help="Name or alias of the member.", autocompletion=complete_member)
    ],
    wait: WaitOption = True,
    timeout: TimeoutOption = 900.0,
    admin: AdminOption = DEFAULT_ADMIN,
    token_file: TokenOption = None,
) -> None:
    """
    Want MEMBER loaded, as a request for it would: it obeys turns and interrupts nobody.

    Examples:

        modelpool load coder-large

        modelpool load coder-large --no-wait
    """
    with router(admin, token_file) as client:
        found = client.why(member)
        pool, name = str(found["pool"]), str(found["member"])
        failures = _member(found["view"], name)["failures"]
        view = client.act(pool, "load", member=name)["view"]
        if not wait:
            typer.echo(f"{name} is wanted; {pool}: {pool_headline(view)}")
            return

        def verdict(now: View) -> str | None:
            mine = _member(now, name)
            # A resident that admits nobody any more leaves, and is loaded again in its turn.
            if now["resident"] == name and now["admission"] == "open":
                return ""
            if mine["failures"] > failures or mine["backoff_s"] is not None:
                return str(mine["last_error"]) or "the load failed"
            return None

        _wait(client, pool, verdict, timeout, done=f"{name} is resident", what=f"load of {name}")


def unload(
    pool: PoolArgument = None,
    wait: WaitOption = True,
    timeout: TimeoutOption = 900.0,
    admin: AdminOption = DEFAULT_ADMIN,
    token_file: TokenOption = None,
) -> None:
    """
    Empty the slot of POOL when its running answers are finished; it stays empty until demand.

    Example:

        modelpool unload gpu0
    """
    with router(admin, token_file) as client:
        name = _pool_name(client, pool)
        view = client.act(name, "unload")["view"]
        if not wait:
            typer.echo(f"{name}: {pool_headline(view)}")
            return

        def verdict(now: View) -> str | None:
            # Demand may take the slot at once (a new epoch): then what was asked for has happened
            # all the same, between two looks.
            return "" if now["state"] == "cold" or now["epoch"] != view["epoch"] else None

        _wait(client, name, verdict, timeout, done=f"{name} is empty", what=f"unload of {name}")


def pause(
    pool: PoolArgument = None,
    admin: AdminOption = DEFAULT_ADMIN,
    token_file: TokenOption = None,
) -> None:
    """Keep POOL as it is: its resident goes on serving, and no swap begins until `resume`."""
    _simple("pause", pool, admin, token_file)


def resume(
    pool: PoolArgument = None,
    admin: AdminOption = DEFAULT_ADMIN,
    token_file: TokenOption = None,
) -> None:
    """Let POOL swap again after `pause`."""
    _simple("resume", pool, admin, token_file)


def _simple(verb: str, pool: str | None, admin: str, token_file: Path | None) -> None:
    with router(admin, token_file) as client:
        name = _pool_name(client, pool)
        view = client.act(name, verb)["view"]
        typer.echo(f"{name}: {pool_headline(view)}")


def _pool_name(client: AdminClient, pool: str | None) -> str:
    if pool is not None:
        return pool
    names = [str(view["name"]) for view in client.state()["pools"]]
    if len(names) != 1:
        listed = ", ".join(names) or "none"
        fail(f"which pool? There are: {listed}", ExitCode.USAGE, "name one of them")
    return names[0]


def _view(client: AdminClient, pool: str) -> View:
    for view in client.state()["pools"]:
        if view["name"] == pool:
            found: View = view
            return found
    fail(f"there is no pool {pool!r}", ExitCode.REFUSED, "`modelpool status` lists them")


def _member(view: View, name: str) -> dict[str, Any]:
    for member in view["members"]:
        if member["name"] == name:
            found: dict[str, Any] = member
            return found
    fail(f"{name} was removed from the configuration", ExitCode.FAILED)


def _wait(
    client: AdminClient,
    pool: str,
    verdict: Callable[[View], str | None],
    timeout: float,
    *,
    done: str,
    what: str,
) -> None:
    """Look until *verdict* says "" (done) or why not; show what goes on meanwhile."""
    started = time.monotonic()
    with _progress() as show:
        while True:
            view = _view(client, pool)
            result = verdict(view)
            if result is not None:
                break
            if time.monotonic() - started >= timeout:
                result = None
                break
            show(view)
            time.sleep(_LOOK_S)
    took = seconds_text(time.monotonic() - started)
    if result is None:
        fail(
            f"the {what} is not done after {took}; {pool}: {pool_headline(view)}",
            ExitCode.FAILED,
            f"`modelpool resume {pool}` lets it begin"
            if view["paused"]
            else "it goes on; look with `modelpool status`, or give --timeout",
        )
    if result:
        fail(f"the {what} failed after {took}: {result}", ExitCode.FAILED)
    typer.echo(f"{done} after {took}")


@contextmanager
def _progress() -> Iterator[Callable[[View], None]]:
    """Lend what shows views: a bar on a terminal, elsewhere a line when the words change."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (BarColumn(bar_width=30), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=1.0)

        def show(view: View) -> None:
            share = load_share(view)
            progress.update(
                task,
                description=pool_headline(view),
                completed=share or 0.0,
                total=None if share is None else 1.0,
            )

        yield show


class _Lines:
    def __init__(self) -> None:
        self._last = ""

    def __call__(self, view: View) -> None:
        # Without the times, which change at every look.
        words = f"{view['state']} {view['target'] or view['resident'] or ''}"
        if words != self._last:
            self._last = words
            typer.echo(f"{view['name']}: {pool_headline(view)}", err=True)
