"""
Counts user-space instructions per short request and per SSE chunk, under valgrind's callgrind.

    python benchmarks/instructions.py [--contenders nginx modelpool] [--out result.jsonl]

The count does not depend on what else the machine does and repeats within a percent or so: the
figure that a noisy machine can be trusted with. It leaves the kernel's part out, see `syscalls.py`.

For modelpool the growth from one load to a larger one counts, so that sweeps, probes and the log
that go on by the clock do not; the chunk figure is the growth from short streams to longer ones.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import bodies
import machine
from bodies import KIB
from contenders import CONTENDERS, Contender, Launch, NotInstalled, Plan, Running, free_port
from native import Natives, build
from run import send, upstream

REQUESTS, MORE_REQUESTS = 200, 1000
STREAMS, EVENTS, MORE_EVENTS = 20, 20, 220
CONNECTIONS = 4
SETTLED_S = 4.0
"""What a start leaves to do for later is done by then."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Instructions per unit of work."""

    request: float
    chunk: float


def missing() -> str:
    """Return why this cannot run here, or ''."""
    for tool in ("valgrind", "callgrind_control"):
        if shutil.which(tool) is None:
            return f"no `{tool}` on this machine"
    return ""


def under_valgrind(contender: Contender, folder: Path) -> Contender:
    """Return *contender* run by callgrind, with counting off at first."""

    def launch(plan: Plan) -> Launch:
        plain = contender.launch(plan)
        if plain.argv[0].endswith("nginx"):
            # one process, or the counters would be those of the master
            plain = replace(plain, argv=[*plain.argv, "-g", "master_process off;"])
        valgrind = ["valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no"]
        valgrind += [f"--callgrind-out-file={folder}/out.%p", "--trace-children=no"]
        return replace(plain, argv=[*valgrind, *plain.argv])

    return replace(contender, launch=launch)


def count(name: str, natives: Natives) -> Counts:
    """
    Count for one contender; takes about a minute.

    Raises:
        NotInstalled: it cannot be started here.
    """
    with tempfile.TemporaryDirectory(prefix="modelpool-bench-") as text, upstream(natives) as port:
        folder = Path(text)
        contender = under_valgrind(CONTENDERS[name], folder)
        plan = Plan(folder / "contender", free_port(), port, natives)
        with Running(contender, plan, core=machine.cores().contender) as running:

            def drive(count: int, body: bytes, *flags: str) -> None:
                path = bodies.write(folder, "body", body)
                send(natives, running, path, count, CONNECTIONS, *flags)

            return _counted(lambda work: _instructions(running, folder, work), drive)


Drive = Callable[..., None]


def _counted(measure: Callable[[Callable[[], None]], int], drive: Drive) -> Counts:
    short = bodies.chat(KIB)

    def stream(events: int) -> bytes:
        return bodies.chat(KIB, stream=True, events=events, every_us=2_000)

    drive(2 * CONNECTIONS, short)
    drive(2 * CONNECTIONS, stream(EVENTS), "-s")
    time.sleep(SETTLED_S)
    few = measure(lambda: drive(REQUESTS, short))
    many = measure(lambda: drive(MORE_REQUESTS, short))
    brief = measure(lambda: drive(STREAMS, stream(EVENTS), "-s"))
    longer = measure(lambda: drive(STREAMS, stream(MORE_EVENTS), "-s"))
    return Counts(
        request=(many - few) / (MORE_REQUESTS - REQUESTS),
        chunk=(longer - brief) / (STREAMS * (MORE_EVENTS - EVENTS)),
    )


_OWN_WORK = """
import sys
class Part:
    __slots__ = ("name", "seen")
    def __init__(self, name):
        self.name, self.seen = name, {}
    def take(self, line):
        name, _, value = line.partition(b": ")
        self.seen[name.lower()] = value
        return len(value) if name in self.seen else 0
lines = b"Host: here\\r\\nContent-Type: application/json\\r\\nX-Request-Id: 1".split(b"\\r\\n")
total = 0
for number in range(int(sys.argv[1])):
    part = Part(number)
    for line in lines:
        total += part.take(line)
    total += len(b"".join([*part.seen, str(number).encode()]))
"""


@functools.cache
def own_work() -> int:
    """Return what this interpreter needs for 4,000 rounds of a loop with calls, dicts, bytes."""
    few, many = (_of_loop(rounds) for rounds in (1_000, 5_000))
    return many - few


def _of_loop(rounds: int) -> int:
    with tempfile.TemporaryDirectory(prefix="modelpool-bench-") as text:
        out = Path(text) / "out"
        valgrind = ["valgrind", "--quiet", "--tool=callgrind", f"--callgrind-out-file={out}"]
        program = [sys.executable, "-s", "-S", "-c", _OWN_WORK, str(rounds)]
        env = {**os.environ, "PYTHONHASHSEED": "1"}
        subprocess.run([*valgrind, *program], check=True, timeout=180, capture_output=True, env=env)
        found = re.search(r"^(?:summary|totals): (\d+)", out.read_text("utf-8"), re.MULTILINE)
    if found is None:
        raise RuntimeError("callgrind counted nothing")
    return int(found[1])


def _instructions(running: Running, folder: Path, work: Callable[[], None]) -> int:
    _control(running, "--instr=on")
    work()
    time.sleep(0.3)  # what the last answer leaves behind: the log's thread, closed connections
    _control(running, "--instr=off")
    _control(running, "--dump")
    dumps = sorted(folder.glob(f"out.{running.pid}.*"), key=lambda path: path.stat().st_mtime)
    total = 0
    for path in dumps:
        found = re.search(r"^totals: (\d+)", path.read_text("utf-8"), re.MULTILINE)
        total += int(found[1]) if found else 0
        path.unlink()
    if not total:
        raise RuntimeError("callgrind counted nothing")
    return total


def _control(running: Running, verb: str) -> None:
    subprocess.run(
        ["callgrind_control", verb, str(running.pid)], check=True, capture_output=True, timeout=60
    )


def rows(name: str, counts: Counts) -> list[dict[str, Any]]:
    """Return *counts* as lines of a result file."""
    return [
        {"round": 0, "shape": shape, "contender": name, "figure": figure, "errors": 0}
        for shape, figure in (
            ("instructions per 1 KB request", counts.request),
            ("instructions per SSE chunk", counts.chunk),
        )
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Count for those whom the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().split("\n\n")[0])
    parser.add_argument("--contenders", nargs="+", default=["nginx", "modelpool"])
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    why = missing()
    if why:
        print(f"skipped: {why}", file=sys.stderr)
        return
    natives, lines = build(), []
    for name in options.contenders:
        try:
            counts = count(name, natives)
        except NotInstalled as error:
            print(f"skipped {name}: {error}", file=sys.stderr)
            continue
        print(f"{name:16} {counts.request:12,.0f} per request {counts.chunk:10,.0f} per chunk")
        lines += [json.dumps(row) for row in rows(name, counts)]
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
