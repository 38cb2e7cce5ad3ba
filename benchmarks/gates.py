"""
What a change may not make worse, measured so that a noisy machine cannot fail it.

    python benchmarks/gates.py           # compare with gates.json; exit 1 when something is worse
    python benchmarks/gates.py --write   # after a change that is meant to move them

Counted, not timed: instructions and system calls do not depend on what else the machine does,
memory hardly. A measure whose tool is missing is skipped with a line.

What depends on the interpreter has its margin with the version and compiler of the baseline. With
another one the baseline is scaled by what that interpreter needs for some work of its own, and the
margin is `OTHER_MARGIN`: wide enough for the rest of the difference, too narrow for a lost fast
path.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hold
import instructions
import syscalls
from bodies import KIB
from native import Natives, build

BASELINES = Path(__file__).with_name("gates.json")
OURS = "modelpool"
HELD = 1000
OTHER_MARGIN = 0.5
OWN_WORK = "instructions of the interpreter's own work"
"""Of `instructions.own_work`; what baselines are scaled by. Not a gate."""


@dataclass(frozen=True, slots=True)
class Gate:
    """One measure."""

    name: str
    margin: float
    """Share by which it may be above its baseline: more than it differs between two runs."""
    of_python: bool = True
    """Whether the figure depends on the interpreter."""
    scaled: bool = False
    """Whether it grows with what the interpreter needs for work of its own."""


INSTRUCTIONS = Gate("instructions per 1 KB request", 0.10, scaled=True)
CHUNKS = Gate("instructions per SSE chunk", 0.60, scaled=True)
"""Long streams meet what goes on by the clock; a lost fast path costs twice as much and more."""
CALLS = Gate("system calls per 1 KB request", 0.15, of_python=False)
MEMORY = Gate("bytes per held 1 KB request", 0.25)


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
            if options.write:
                known[gate.name] = {"figure": round(figure, 2), "python": python}
                print(f"{gate.name:32} {figure:12,.1f}")
            elif gate.name not in known:
                print(f"{gate.name:32} {figure:12,.1f}  no baseline: make one with --write")
            else:
                worse = compared(gate, figure, known, python) or worse
    if options.write:
        if not instructions.missing():
            known[OWN_WORK] = {"figure": instructions.own_work(), "python": python}
        BASELINES.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
    sys.exit(1 if worse else 0)


def compared(gate: Gate, figure: float, known: Mapping[str, Any], python: str) -> bool:
    """Say how *figure* compares with its baseline; return whether it is worse."""
    baseline, margin, of_another = float(known[gate.name]["figure"]), gate.margin, ""
    if gate.of_python and known[gate.name]["python"] != python:
        margin, of_another = OTHER_MARGIN, f" (of Python {known[gate.name]['python']})"
        if gate.scaled and OWN_WORK in known:
            baseline *= instructions.own_work() / float(known[OWN_WORK]["figure"])
            of_another = f" (scaled from Python {known[gate.name]['python']})"
    limit = baseline * (1 + margin)
    word = "WORSE" if figure > limit else "ok"
    print(
        f"{gate.name:32} {figure:12,.1f}  baseline {baseline:,.1f}{of_another}, "
        f"limit {limit:,.1f}: {word}"
    )
    if figure < baseline * (1 - margin):
        print(f"{'':32} much better: make it the baseline with --write")
    return figure > limit


if __name__ == "__main__":
    main()
