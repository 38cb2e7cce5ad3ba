"""``modelpool bench``: a seeded trace of requests against a running router, and what came of it."""

from __future__ import annotations

import ipaddress
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from .admin_client import DEFAULT_ADMIN, parse_admin
from .exits import ExitCode, fail

if TYPE_CHECKING:
    from ..testing.workload import Result, Summary

DEFAULT_URL = "http://127.0.0.1:8080"
_MODELS_LIMIT_S = 10.0


def bench(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Models to ask for, the most wanted first; default: all it lists."),
    ] = None,
    url: Annotated[str, typer.Option(help="Where the router serves clients.")] = DEFAULT_URL,
    seconds: Annotated[
        float, typer.Option(min=1, max=900, help="How long sessions go on beginning.")
    ] = 60.0,
    sessions: Annotated[
        float, typer.Option(min=1, max=120, help="Sessions per minute, of 1 to 5 requests each.")
    ] = 12.0,
    tokens: Annotated[int, typer.Option(min=1, max=4096, help="Tokens of each answer.")] = 16,
    seed: Annotated[int, typer.Option(help="The same seed is the same trace.")] = 1,
    key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the API key; or MODELPOOL_API_KEY."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with the time line (HTML).")
    ] = None,
    admin: Annotated[
        str,
        typer.Option(
            envvar="MODELPOOL_ADMIN",
            metavar="HOST:PORT",
            help="Where modelpool tells who has the slot, for the page; others are not asked.",
        ),
    ] = DEFAULT_ADMIN,
    budget: Annotated[
        float | None, typer.Option(min=0, help="swapBudget in seconds, for its line in the page.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
    allow_remote: Annotated[
        bool,
        typer.Option("--allow-remote", help="Send load to another machine, which agreed to it."),
    ] = False,
) -> None:
    """
    Measure how well models take turns: held times, swaps, thrash, failures.

    Sends real requests, so models are loaded and displaced. Stops by itself.

    Examples:

        modelpool bench --seconds 120 --report turns.html

        modelpool bench coder-small coder-large --seed 7 --json
    """
    import asyncio

    _check_url(url, allow_remote=allow_remote)
    watched = None
    if report is not None:
        try:
            watched = str(parse_admin(admin))
        except ValueError:
            fail(f"--admin {admin!r} is no address", ExitCode.USAGE, f"write {DEFAULT_ADMIN}")
        _check_url(watched, allow_remote=allow_remote)
        _check_folder(report)
    key = _key(key_file)
    from ..testing.workload import drive, plan, summarise

    try:
        workload = plan(
            models or _listed(url, key),
            seed=seed,
            seconds=seconds,
            sessions_per_minute=sessions,
            tokens=tokens,
        )
    except ValueError as error:
        fail(str(error), ExitCode.USAGE, "give fewer --seconds or --sessions")
    if not as_json:
        typer.echo(
            f"{workload.requests} requests for {', '.join(workload.models)} "
            f"over about {seconds:.0f} s; a swap takes as long as it takes"
        )
    result = asyncio.run(drive(url, workload, key=key, admin_url=watched))
    summary = summarise(result)
    if report is not None:
        _write_page(report, result, budget)
    if as_json:
        typer.echo(json.dumps(_as_json(summary, result)))
    else:
        _tell(summary, result, report)
    if not summary.served:
        raise typer.Exit(ExitCode.FAILED)


def _check_url(url: str, *, allow_remote: bool) -> None:
    """End the command unless *url* is of this machine, or somebody said that another is meant."""
    parts = urlsplit(url)
    host = parts.hostname
    if parts.scheme not in ("http", "https") or host is None:
        fail(f"{url!r} is no URL", ExitCode.USAGE, f"write --url like {DEFAULT_URL}")
    try:
        here = ipaddress.ip_address(host).is_loopback
    except ValueError:
        here = host == "localhost"
    if not here and not allow_remote:
        fail(
            f"{host} is another machine",
            ExitCode.USAGE,
            "add --allow-remote if its owner agrees to be sent load",
        )


def _check_folder(report: Path) -> None:
    """End the command now rather than after the trace."""
    if not report.absolute().parent.is_dir():
        fail(f"there is no folder {report.absolute().parent}", ExitCode.USAGE, "make it first")


def _write_page(report: Path, result: Result, budget_s: float | None) -> None:
    from ..testing.swapreport import page

    text = page("Taking turns", result, known=result.phases, budget_s=budget_s)
    try:
        report.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"{report} cannot be written: {error.strerror}", ExitCode.FAILED)


def _key(file: Path | None) -> str:
    if file is None:
        return os.environ.get("MODELPOOL_API_KEY", "").strip()
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        fail(f"the key file {file} cannot be read: {reason}", ExitCode.USAGE)


def _listed(url: str, key: str) -> list[str]:
    """Return the models that the router lists."""
    import urllib.error
    import urllib.request

    request = urllib.request.Request(f"{url.rstrip('/').removesuffix('/v1')}/v1/models")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=_MODELS_LIMIT_S) as answer:
            return [str(model["id"]) for model in json.load(answer)["data"]]
    except urllib.error.HTTPError as error:
        way_out = (
            "give a --key-file"
            if error.code in (401, 403)
            else "give the --url that clients use, or name the models"
        )
        fail(f"{url} lists no models: status {error.code}", ExitCode.REFUSED, way_out)
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(
            f"no router answers on {url}: {type(error).__name__}",
            ExitCode.UNREACHABLE,
            "start one with `modelpool serve`, or say where it is with --url",
        )


def _as_json(summary: Summary, result: Result) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        **asdict(summary),
        "took_s": round(result.took_s, 3),
        "outcomes": [asdict(each) for each in result.outcomes],
    }


def _tell(summary: Summary, result: Result, report: Path | None) -> None:
    typer.echo(f"served            {summary.served} of {summary.requests} in {result.took_s:.1f} s")
    for code, count in sorted(summary.failed.items()):
        typer.echo(f"failed            {count} {code}")
    typer.echo(f"swaps             {summary.swaps}, of them in vain {summary.thrash:.0%}")
    if summary.served:
        typer.echo(
            f"first token       p50 {summary.first_p50_s:.2f} s, p95 {summary.first_p95_s:.2f} s, "
            f"longest {summary.first_max_s:.2f} s"
        )
    if report is not None:
        typer.echo(f"report            {report}")
