"""
How much memory a held request costs: 5,000 short ones, and 64 of 4 MB.

    python benchmarks/hold.py [--contenders nginx vllm-router modelpool] [--out result.jsonl]

Held = the request was sent and the upstream is silent, so that every proxy can be measured the
same way. Memory is resident memory from ready (after a warm-up, without connections) to the last
look at which all are held and at rest; the highest on the way there stands beside it. Buffers of
the kernel are left out. All must be answered in the end. One row more is ours alone: requests held
inside of the router, for a member that is still loading.

Each contender is started anew for each row, since a heap seldom shrinks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bodies
import machine
from bodies import KIB
from contenders import CONTENDERS, NotInstalled, Plan, Running, free_port
from native import Natives, build
from run import upstream
from shapes import MIB

OURS = "modelpool"


@dataclass(frozen=True, slots=True)
class Row:
    """One amount to hold."""

    name: str
    connections: int
    size: int
    silent_s: int
    """How long the upstream says nothing; sending must be over before."""
    inside: bool = False
    """Held by the router itself, for a member that loads this long."""


ROWS = (
    Row("hold 5000 x 1 KB", 5000, KIB, 20),
    Row("hold 64 x 4 MB", 64, 4 * MIB, 20),
    Row("hold inside 5000 x 1 KB", 5000, KIB, 20, inside=True),
)


def measure(name: str, row: Row, natives: Natives, rows: int | None = None) -> dict[str, Any]:
    """
    Return what `native/load` says of one contender and row.

    Args:
        rows: Hold this many instead.

    Raises:
        NotInstalled: it cannot be started here.
    """
    with tempfile.TemporaryDirectory(prefix="modelpool-bench-") as text, upstream(natives) as port:
        folder = Path(text)
        extra = _loads_slowly(natives, row.silent_s) if row.inside else {}
        plan = Plan(folder / "contender", free_port(), port, natives, extra)
        running = Running(CONTENDERS[name], plan, core=machine.cores().contender)
        try:
            if row.inside:
                running.wait_listening()
            else:
                running.wait_ready()
            silent_us = 0 if row.inside else row.silent_s * 1_000_000
            body = bodies.write(folder, "body", bodies.chat(row.size, every_us=silent_us))
            command = [str(natives.load), "-p", str(running.port), "-b", str(body), "-H"]
            command += ["-c", str(rows or row.connections), "-d", str(row.silent_s + 40)]
            command += ["-k", ",".join(map(str, running.pids()))]
            done = subprocess.run(
                machine.pinned(machine.cores().tools, *command),
                capture_output=True,
                text=True,
                timeout=180,
            )
        finally:
            running.stop()
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    if found["sent_s"] < 0:
        raise RuntimeError(f"{name}: answered some before all were sent, so they were never held")
    return found


def _loads_slowly(natives: Natives, seconds: int) -> Mapping[str, Any]:
    tools = machine.cores().tools
    start = " ".join(machine.pinned(tools, str(natives.upstream), "{port}"))
    return {"member": {"command": ["sh", "-c", f"sleep {seconds}; exec {start}"]}}


def main() -> None:
    """Measure those whom the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().split("\n\n")[0])
    parser.add_argument("--contenders", nargs="+", default=["nginx", "vllm-router", OURS])
    parser.add_argument("--rows", nargs="+", default=[row.name for row in ROWS])
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    natives, lines = build(), []
    for row in ROWS:
        for name in options.contenders:
            if row.name not in options.rows or (row.inside and name != OURS):
                continue
            try:
                found = measure(name, row, natives)
            except (NotInstalled, RuntimeError) as error:
                print(f"skipped {name}: {error}", file=sys.stderr)
                continue
            growth, peak = (found[key] - found["rss_before"] for key in ("rss_held", "rss_peak"))
            print(
                f"{row.name:24} {name:16} {growth / MIB:8.1f} MiB"
                f" {growth / KIB / row.connections:8.1f} KiB each, peak {peak / MIB:.1f} MiB,"
                f" {found['errors']} errors"
            )
            fields = {"round": 0, "contender": name, "errors": found["errors"]}
            lines.append(json.dumps({**fields, "shape": row.name, "figure": growth}))
            lines.append(json.dumps({**fields, "shape": f"{row.name}, peak", "figure": peak}))
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
