"""
What a change may not make worse, measured so that a noisy machine cannot fail it.

    python benchmarks/gates.py           # compare with gates.json; exit 1 when something is worse
    python benchmarks/gates.py --write   # after a change that is meant to move them

Counted, not timed: instructions and system calls do not depend on what else the machine does,
memory hardly. A measure whose tool is missing is skipped with a line. What depends on the Python is
compared only with a baseline of the same version and compiler.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import hold
import instructions
import syscalls
from bodies import KIB
from native import Natives, build

BASELINES = Path(__file__).with_name("gates.json")
OURS = "modelpool"
HELD = 1000


@dataclass(frozen=True, slots=True)
class Gate:
    """One measure."""

    name: str
    margin: float
    """Share by which it may be above its baseline: more than it differs between two runs."""
    of_python: bool
    """Whether the figure depends on the interpreter."""


INSTRUCTIONS = Gate("instructions per 1 KB request", 0.10, True)
CHUNKS = Gate("instructions per SSE chunk", 0.30, True)
CALLS = Gate("system calls per 1 KB request", 0.15, False)
MEMORY = Gate("bytes per held 1 KB request", 0.25, True)


def measures(natives: Natives) -> Iterator[tuple[tuple[Gate, ...], str, Callable[[], list[float]]]]:
    """Yield gates, why they cannot be measured here ('' if they can), and how they are."""
    yield (INSTRUCTIONS, CHUNKS), instructions.missing(), lambda: _instructions(natives)
    yield (CALLS,), syscalls.missing(), lambda: [sum(syscalls.count(OURS, natives).values())]
    yield (MEMORY,), "", lambda: [_memory(natives)]


def _instructions(natives: Natives) -> list[float]:
    counts = instructions.count(OURS, natives)
    return [counts.request, counts.chunk]


def _memory(natives: Natives) -> float:
    row = hold.Row("gate", HELD, KIB, 8)
    found = hold.measure(OURS, row, natives)
    if found["errors"]:
        raise RuntimeError(f"{found['errors']} held requests were not answered")
    return float(found["rss_held"] - found["rss_before"]) / HELD


def main() -> None:
    """Compare with the baselines, or write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().split("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="make what is measured the baseline")
    options = parser.parse_args()
    python = f"{platform.python_version()}, {platform.python_compiler()}"
    known = json.loads(BASELINES.read_text("utf-8")) if BASELINES.exists() else {}
    worse = False
    for gates, missing, measure in measures(build()):
        if missing:
            print(f"skipped {', '.join(gate.name for gate in gates)}: {missing}")
            continue
        for gate, figure in zip(gates, measure(), strict=True):
            baseline = known.get(gate.name)
            if options.write:
                known[gate.name] = {"figure": round(figure, 2), "python": python}
                print(f"{gate.name:32} {figure:12,.1f}")
            elif baseline is None or (gate.of_python and baseline["python"] != python):
                print(f"{gate.name:32} {figure:12,.1f}  no baseline for Python {python}")
            else:
                worse = _compared(gate, figure, baseline["figure"]) or worse
    if options.write:
        BASELINES.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
    sys.exit(1 if worse else 0)


def _compared(gate: Gate, figure: float, baseline: float) -> bool:
    limit = baseline * (1 + gate.margin)
    word = "WORSE" if figure > limit else "ok"
    print(f"{gate.name:32} {figure:12,.1f}  baseline {baseline:,.1f}, limit {limit:,.1f}: {word}")
    if figure < baseline * (1 - gate.margin):
        print(f"{'':32} much better: make it the baseline with --write")
    return figure > limit


if __name__ == "__main__":
    main()
