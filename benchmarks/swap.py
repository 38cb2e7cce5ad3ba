"""
The same seeded trace of requests for several models against any router that swaps them.

    python benchmarks/swap.py                                     # ours, with fake members
    python benchmarks/swap.py --llama-server PATH --gguf A.gguf B.gguf --llama-swap PATH

Routers: modelpool; `llama-server --models-max 1` (with --llama-server and real models); llama-swap
(when its program is given). Members: the fake one (start 0.3 s plus --load, stop at once) or real
`llama-server` processes. Two parts:

1. *one swap*: the last byte of an answer of A to the first token of B, nobody else there; the same
   by hand (stop, start, ask for readiness every 5 ms, ask). The ratio is what a router adds. (Ours
   without `linger`, the time for which it keeps a model on purpose after an answer.)
2. *the trace*: sessions of people and agents for all models at once; held times, swaps, thrash,
   failures. One HTML page per router.

Bounded: loopback only, a trace of --seconds, every answer has a limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import aiohttp

import machine
from contenders import end, free_port, ours_command
from modelpool_router.testing.slotwatch import phases_of_members
from modelpool_router.testing.swapreport import page
from modelpool_router.testing.workload import Outcome, ask, drive, plan, summarise

ROUTERS = ("modelpool", "llama-server --models-max 1", "llama-swap")
READY_S = 60.0
BUDGET_S = 300.0


@dataclass(frozen=True, slots=True)
class Model:
    """One model and the command of its server; ``{port}`` stands for the port."""

    name: str
    command: tuple[str, ...]
    gguf: str = ""
    """Empty for a fake one."""


@dataclass(slots=True)
class Target:
    """A router that runs."""

    name: str
    url: str
    process: subprocess.Popen[bytes]
    admin_url: str | None = None
    """Where ours tells who has the slot."""


class Skipped(Exception):
    """This router cannot run here; says what is missing."""


def fake_models(count: int, load_s: float, log: Path) -> list[Model]:
    """Return *count* fake members that load for *load_s* and write down what happens to them."""
    models = []
    for number in range(count):
        name = f"model-{chr(ord('a') + number)}"
        command = (sys.executable, "-m", "modelpool_router.testing.member", "--port", "{port}")
        knobs = ("--name", name, "--load", str(load_s), "--gap", "0.02", "--log", str(log))
        models.append(Model(name, (*command, *knobs)))
    return models


def real_models(program: str, files: Sequence[str]) -> list[Model]:
    """Return one real llama-server per model file."""
    models = []
    for number, file in enumerate(files):
        command = (program, "--model", file, "--port", "{port}", "--host", "127.0.0.1")
        models.append(Model(f"model-{chr(ord('a') + number)}", command, file))
    return models


# --- routers --------------------------------------------------------------------------------------


@contextmanager
def modelpool(models: Sequence[Model], folder: Path, *, lingers: bool) -> Iterator[Target]:
    """Run ours; without *lingers* a model that nobody uses leaves at once, as by hand."""
    port, admin_port = free_port(), free_port()
    members = [
        {"name": model.name, "profile": "llama-server", "command": list(model.command)}
        for model in models
    ]
    config = {
        "listen": f"127.0.0.1:{port}",
        "admin": f"127.0.0.1:{admin_port}",
        "stateDir": str(folder / "state"),
        "shutdownDelay": "0s",
        "pools": [{"name": "gpu0", "linger": "auto" if lingers else "0s", "members": members}],
    }
    path = folder / "modelpool.yaml"
    path.write_text(json.dumps(config))
    with _running("modelpool", [*ours_command(), "serve", str(path)], port, folder) as target:
        target.admin_url = f"http://127.0.0.1:{admin_port}"
        yield target


@contextmanager
def llama_swap(program: str | None, models: Sequence[Model], folder: Path) -> Iterator[Target]:
    """Run llama-swap."""
    if program is None:
        raise Skipped("llama-swap: give its program with --llama-swap")
    port = free_port()
    entries = {
        model.name: {"cmd": shlex.join(model.command).replace("'{port}'", "${PORT}")}
        for model in models
    }
    path = folder / "llama-swap.yaml"
    path.write_text(json.dumps({"healthCheckTimeout": 120, "models": entries}))
    command = [program, "--config", str(path), "--listen", f"127.0.0.1:{port}"]
    with _running("llama-swap", command, port, folder) as target:
        yield target


@contextmanager
def llama_server(program: str | None, models: Sequence[Model], folder: Path) -> Iterator[Target]:
    """Run llama-server's own router, which keeps one model at a time."""
    if program is None or not all(model.gguf for model in models):
        raise Skipped("llama-server --models-max 1: give --llama-server and --gguf")
    shelf = folder / "models"
    shelf.mkdir()
    for model in models:
        (shelf / f"{model.name}.gguf").symlink_to(Path(model.gguf).resolve())
    port = free_port()
    command = [program, "--models-dir", str(shelf), "--models-max", "1"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    with _running("llama-server --models-max 1", command, port, folder) as target:
        yield target


@contextmanager
def _running(name: str, command: Sequence[str], port: int, folder: Path) -> Iterator[Target]:
    with (folder / "router.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        url = f"http://127.0.0.1:{port}"
        try:
            deadline = time.monotonic() + READY_S
            while not _lists_models(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise Skipped(f"{name}: does not come up (exit {process.poll()})")
                time.sleep(0.02)
            yield Target(name, url, process)
        finally:
            end(process, patience_s=20)


def _lists_models(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
            return int(answer.status) == 200
    except (OSError, urllib.error.HTTPError):
        return False


# --- one swap -------------------------------------------------------------------------------------


async def swaps_of(target: Target, models: Sequence[Model], rounds: int) -> list[float]:
    """Return seconds from the last byte of one model to the first token of the next."""
    found: list[float] = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=READY_S)) as client:
        start = time.monotonic()
        before = await _asked(client, target.url, models[0], start)
        for number in range(rounds):
            after = await _asked(client, target.url, models[(number + 1) % 2], start)
            found.append((after.first_s or after.ended_s) - before.ended_s)
            before = after
    return found


async def by_hand(models: Sequence[Model], rounds: int, folder: Path) -> list[float]:
    """Return the same without any router: stop, start, ask every 5 ms, ask."""
    found: list[float] = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=READY_S)) as client:
        start = time.monotonic()
        with (folder / "by-hand.log").open("ab") as log:
            process, url = await _started(client, models[0], log)
            try:
                before = await _asked(client, url, models[0], start)
                for number in range(rounds):
                    model = models[(number + 1) % 2]
                    process.terminate()
                    await asyncio.to_thread(process.wait)
                    process, url = await _started(client, model, log)
                    after = await _asked(client, url, model, start)
                    found.append((after.first_s or after.ended_s) - before.ended_s)
                    before = after
            finally:
                process.kill()
                process.wait()
    return found


async def _started(
    client: aiohttp.ClientSession, model: Model, log: BinaryIO
) -> tuple[subprocess.Popen[bytes], str]:
    port = free_port()
    process = _spawned(model, port, log)
    url = f"http://127.0.0.1:{port}"
    while process.poll() is None:
        try:
            async with client.get(f"{url}/health") as answer:
                if answer.status == 200:
                    return process, url
        except (aiohttp.ClientError, OSError):
            pass
        await asyncio.sleep(0.005)
    raise RuntimeError(f"{model.name} ended with {process.returncode}")


def _spawned(model: Model, port: int, log: BinaryIO) -> subprocess.Popen[bytes]:
    command = [word.replace("{port}", str(port)) for word in model.command]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


async def _asked(client: aiohttp.ClientSession, url: str, model: Model, start: float) -> Outcome:
    outcome = await ask(client, url, model.name, 4, start)
    if not outcome.served:
        raise RuntimeError(f"{model.name}: {outcome.status} {outcome.code}")
    return outcome


# --- all of it ------------------------------------------------------------------------------------


def main() -> None:
    """Measure the routers that are there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sessions", type=float, default=20.0, help="per minute")
    parser.add_argument("--rounds", type=int, default=6, help="single swaps")
    parser.add_argument("--models", type=int, default=3, help="fake ones")
    parser.add_argument("--load", type=float, default=1.0, help="seconds, of fake ones")
    parser.add_argument("--llama-server", metavar="PROGRAM")
    parser.add_argument("--gguf", nargs="+", default=[], metavar="FILE", help="two or more")
    parser.add_argument("--llama-swap", metavar="PROGRAM")
    parser.add_argument("--pages", type=Path, default=None, help="folder for the HTML pages")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    if options.llama_server and len(options.gguf) < 2:
        parser.error("--llama-server needs two model files or more (--gguf)")
    lines = [json.dumps({"machine": machine.describe(), "versions": {}, "rounds": options.rounds})]
    with tempfile.TemporaryDirectory(prefix="modelpool-swap-") as text:
        for line in _measured(options, Path(text)):
            lines.append(json.dumps(line))
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _measured(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, object]]:
    log = folder / "members.jsonl"
    models = (
        real_models(options.llama_server, options.gguf)
        if options.llama_server
        else fake_models(options.models, options.load, log)
    )
    kind = "llama-server" if options.llama_server else "simulated"
    shape, blocks = f"one swap, {kind}", 2
    hand: list[float] = []
    singles: dict[str, list[float]] = {name: [] for name in ROUTERS}
    for _ in range(blocks):  # in turn, so that a neighbour disturbs all of them
        hand += asyncio.run(by_hand(models, options.rounds // blocks, folder))
        for name in tuple(singles):
            at = Path(tempfile.mkdtemp(dir=folder))
            try:
                with _router(name, options, models, at, lingers=False) as target:
                    singles[name] += asyncio.run(swaps_of(target, models, options.rounds // blocks))
            except (Skipped, RuntimeError) as why:
                print(f"skipped {why}", file=sys.stderr)
                del singles[name]
    yield from _rows(shape, "by hand", hand)
    print(f"{'by hand':28} one swap {min(hand):6.3f} s, median {statistics.median(hand):6.3f} s")
    for name, single in singles.items():
        ratio = min(single) / min(hand)
        print(
            f"{name:28} one swap {min(single):6.3f} s, median {statistics.median(single):6.3f} s;"
            f" {ratio:.3f} times by hand"
        )
        yield from _rows(shape, name, single)
    for name in singles:
        at = Path(tempfile.mkdtemp(dir=folder))
        with _router(name, options, models, at, lingers=True) as target:
            yield _traced(target, models, options, log)


def _router(
    name: str, options: argparse.Namespace, models: Sequence[Model], at: Path, *, lingers: bool
) -> AbstractContextManager[Target]:
    if name == "modelpool":
        return modelpool(models, at, lingers=lingers)
    if name == "llama-swap":
        return llama_swap(options.llama_swap, models, at)
    return llama_server(options.llama_server, models, at)


def _traced(
    target: Target, models: Sequence[Model], options: argparse.Namespace, log: Path
) -> dict[str, object]:
    names = [model.name for model in models]
    workload = plan(
        names, seed=options.seed, seconds=options.seconds, sessions_per_minute=options.sessions
    )
    begun = time.monotonic()
    result = asyncio.run(drive(target.url, workload, admin_url=target.admin_url))
    summary = summarise(result)
    print(
        f"{target.name:28} trace: {summary.served}/{summary.requests} served, "
        f"{summary.swaps} swaps, thrash {summary.thrash:.0%}, first token p50 "
        f"{summary.first_p50_s:.2f} p95 {summary.first_p95_s:.2f} longest "
        f"{summary.first_max_s:.2f} s, failed {summary.failed or 0}"
    )
    if options.pages is not None:
        options.pages.mkdir(parents=True, exist_ok=True)
        known = result.phases
        if not known and log.exists():
            events = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
            known = phases_of_members(events, begun, result.took_s)
        path = options.pages / f"swap-{target.name.replace(' ', '-')}.html"
        note = (
            f"Seed {options.seed}, {options.seconds:g} s, {options.sessions:g} sessions a minute."
        )
        title = f"Taking turns: {target.name}"
        path.write_text(page(title, result, known=known, budget_s=BUDGET_S, notes=[note]), "utf-8")
        print(f"{'':28} {path}")
    return {
        "round": 0,
        "shape": "trace, first token p95 (s)",
        "contender": target.name,
        "figure": summary.first_p95_s,
        "errors": summary.requests - summary.served,
        "swaps": summary.swaps,
        "thrash": summary.thrash,
    }


def _rows(shape: str, name: str, seconds: Sequence[float]) -> Iterator[dict[str, object]]:
    for number, figure in enumerate(seconds):
        fields = {"round": number, "shape": shape, "contender": name, "figure": figure}
        yield {**fields, "errors": 0}


if __name__ == "__main__":
    main()
