"""
How long from the start of a router's process to its first served request.

    python benchmarks/cold.py [--contenders nginx vllm-router modelpool] [--rounds 5] [--out FILE]

A client asks every 5 ms until it is answered with 200. For modelpool that includes the start of a
member (the fake upstream) and its readiness probe; for the others the upstream is up before. A
first start of each is not counted: files come from the page cache, and Python's from bytecode, as
on every machine that has started it once. Beside the time stands the CPU time until then, on which
others who use the machine have less influence.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import machine
from contenders import CONTENDERS, NotInstalled, Plan, Running, free_port
from native import build
from run import upstream

POLL_S = 0.005


def main() -> None:
    """Start those whom the command line names, in turn, several times."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().split("\n\n")[0])
    parser.add_argument("--contenders", nargs="+", default=["nginx", "vllm-router", "modelpool"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    natives, lines = build(), []
    names = list(options.contenders)
    with tempfile.TemporaryDirectory(prefix="modelpool-bench-") as text, upstream(natives) as port:
        for number in range(-1, options.rounds):
            for name in tuple(names):
                folder = Path(text) / f"{name}-{number}"
                plan = Plan(folder, free_port(), port, natives)
                try:
                    running = Running(CONTENDERS[name], plan, core=machine.cores().contender)
                except NotInstalled as error:
                    print(f"skipped {name}: {error}", file=sys.stderr)
                    names.remove(name)
                    continue
                try:
                    running.wait_ready(poll_s=POLL_S)
                    took = time.monotonic() - running.started_at
                    cpu_s = running.cpu_s()
                finally:
                    running.stop()
                if number < 0:
                    continue
                print(f"round {number + 1}  {name:16} {took:6.3f} s, CPU {cpu_s:6.3f} s")
                who = {"round": number, "contender": name, "errors": 0}
                lines.append(json.dumps({**who, "shape": "cold start", "figure": took}))
                lines.append(json.dumps({**who, "shape": "cold start, CPU", "figure": cpu_s}))
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
