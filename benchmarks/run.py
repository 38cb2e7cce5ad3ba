"""
Drives every contender with every shape of load, in interleaved rounds; one line of JSON a window.

    python benchmarks/run.py --contenders nginx vllm-router modelpool --out result.jsonl

All contenders are up all the time, on one core; generator and upstream share another. Each round
goes through all shapes, and through the contenders in a new order for each, so that a neighbour
who takes the machine for a minute takes it from all of them. `report.py` compares within a round.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

import machine
from contenders import CONTENDERS, NotInstalled, Plan, Running, answers, free_port
from native import Natives, build
from shapes import SHAPES, SHORT, Shape

DIRECT = "upstream alone"
"""Always measured too where latency counts: what is there without any router."""
WARM_UP_S = 0.5
MIN_BUSY = 0.9
"""Below, a contender that should be saturated lost its core to somebody."""
MAX_REPEATS = 2


@contextmanager
def upstream(natives: Natives) -> Iterator[int]:
    """Run the fake upstream that the peers share; yield its port."""
    port = free_port()
    process = subprocess.Popen(
        machine.pinned(machine.cores().tools, str(natives.upstream), str(port)),
        stdin=subprocess.DEVNULL,
    )
    try:
        for _ in range(500):
            if answers(port):
                break
        yield port
    finally:
        process.kill()
        process.wait()


@contextmanager
def all_running(
    names: Sequence[str], natives: Natives, folder: Path
) -> Iterator[dict[str, Running]]:
    """Start those of *names* that are installed; say in one line why others are skipped."""
    with ExitStack() as stack:
        port = stack.enter_context(upstream(natives))
        running: dict[str, Running] = {}
        for name in names:
            contender = CONTENDERS[name]
            plan = Plan(folder / name.replace(" ", "-"), free_port(), port, natives)
            core = machine.cores().contender
            try:
                running[name] = stack.enter_context(Running(contender, plan, core=core))
            except NotInstalled as missing:
                print(f"skipped {name}: {missing}", file=sys.stderr)
            except (RuntimeError, TimeoutError) as failure:
                print(f"skipped {name}: {failure}", file=sys.stderr)
        yield running


def window(natives: Natives, contender: Running, shape: Shape, body: Path) -> dict[str, Any]:
    """Measure one contender under one shape once; what `native/load` prints, with names added."""
    pids = ",".join(map(str, contender.pids()))
    command = [str(natives.load), "-p", str(contender.port), "-b", str(body), "-k", pids]
    command += ["-d", str(shape.seconds), "-w", str(WARM_UP_S), *shape.flags]
    done = subprocess.run(
        machine.pinned(machine.cores().tools, *command), capture_output=True, text=True, timeout=180
    )
    if done.returncode:
        return {"failed": done.stderr.strip() or f"exit {done.returncode}", "errors": 1}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def send(
    natives: Natives, contender: Running, body: Path, requests: int, connections: int, *flags: str
) -> None:
    """
    Send that many requests, where not the time but the work of the contender counts.

    Raises:
        RuntimeError: they were not all answered as they should be.
    """
    command = [str(natives.load), "-p", str(contender.port), "-b", str(body)]
    command += ["-c", str(connections), "-d", "100", "-n", str(requests), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = json.loads(done.stdout)
    if found["errors"] or found["answers"] != requests:
        raise RuntimeError(f"{contender.name}: wrong answers: {done.stdout}")


def measured(natives: Natives, contender: Running, shape: Shape, body: Path) -> dict[str, Any]:
    """Measure; once more, up to `MAX_REPEATS` times, when a neighbour took the core meanwhile."""
    found = window(natives, contender, shape, body)
    for _ in range(MAX_REPEATS):
        disturbed = shape.saturates and found.get("busy", 1.0) < MIN_BUSY
        if not disturbed or contender.name == DIRECT:
            break
        again = window(natives, contender, shape, body)
        if again.get("busy", 0.0) > found["busy"]:
            found = again
    return found


def run(
    names: Sequence[str], shapes: Sequence[Shape], rounds: int, natives: Natives, out: TextIO
) -> None:
    """Write one line about the machine, then one per round, shape and contender."""
    chance = random.Random(1)
    with tempfile.TemporaryDirectory(prefix="modelpool-bench-") as text:
        folder = Path(text)
        files = {shape.name: shape.write(folder) for shape in shapes}
        with all_running([DIRECT, *names], natives, folder) as running:
            versions = {name: CONTENDERS[name].version() for name in running if name != DIRECT}
            _line(out, {"machine": machine.describe(), "versions": versions, "rounds": rounds})
            for number in range(rounds):
                for shape in shapes:
                    order = [each for each in running.values() if each.name not in shape.not_for]
                    chance.shuffle(order)
                    for contender in order:
                        if contender.name == DIRECT and shape.unit == "chunk":
                            continue
                        found = measured(natives, contender, shape, files[shape.name])
                        who = {"round": number, "shape": shape.name, "contender": contender.name}
                        _line(out, {**who, **found})
                        _progress(number, shape, contender.name, found)


def _line(out: TextIO, fields: dict[str, Any]) -> None:
    out.write(json.dumps(fields) + "\n")
    out.flush()


def _progress(number: int, shape: Shape, name: str, found: dict[str, Any]) -> None:
    figures = {"answer": "us_per_answer", "chunk": "us_per_chunk", "first byte": "first_p50_us"}
    figure = found.get(figures[shape.unit], -1.0)
    print(
        f"round {number + 1}  {shape.name:22} {name:16} {figure:10.1f} us"
        f"  busy {found.get('busy', 0):.2f}  errors {found.get('errors')}",
        file=sys.stderr,
    )


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().split("\n\n")[0])
    peers = [name for name in CONTENDERS if name != DIRECT]
    parser.add_argument("--contenders", nargs="+", choices=peers, default=peers)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--short", action="store_true", help="the shapes of `make bench`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help="default: standard output")
    options = parser.parse_args()
    names = list(SHORT) if options.short else options.shapes
    shapes = [SHAPES[name] for name in names]
    natives = build()
    if options.out is None:
        run(options.contenders, shapes, options.rounds, natives, sys.stdout)
        return
    with options.out.open("w", encoding="utf-8") as out:
        run(options.contenders, shapes, options.rounds, natives, out)


if __name__ == "__main__":
    main()
