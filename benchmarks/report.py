"""
Reads results (JSON lines of run.py, hold.py, cold.py) and prints tables; tells which goals hold.

    python benchmarks/report.py benchmarks/results/*.jsonl [--must] [--into README.md]

The figure of a shape is the smallest over the rounds: whatever else ran on the machine can only
have added to it. The ratio is that of two such minima; beside it stands the median of the ratios
within each round. With --must the exit code is 1 when a `must` does not hold, or a window had
errors. With --into the part of a page between two marks is written anew.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from goals import GOALS, Goal
from shapes import SHAPES

OURS = "modelpool"
DIRECT = "upstream alone"
_FIELD = {"answer": "us_per_answer", "chunk": "us_per_chunk", "first byte": "first_p50_us"}

BEGIN, END = "<!-- figures -->\n", "<!-- end of figures -->\n"
"""What is between these in a page is ours; see `write_into`."""
BRIEF = ("1 KB x 64", "SSE 100 x 50/s", "first SSE byte", "hold 5000 x 1 KB", "cold start")
"""Columns of the short table."""

Cells = dict[tuple[str, str], dict[int, float]]
"""(shape, contender) to figure by round."""


class Results(NamedTuple):
    """What was read."""

    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    cells: Cells
    windows: Sequence[Mapping[str, Any]]

    @property
    def errors(self) -> list[str]:
        """Windows that cannot be trusted, in words."""
        return [
            f"{each['shape']}, {each['contender']}, round {each['round'] + 1}: "
            f"{each.get('failed') or str(each['errors']) + ' errors'}"
            for each in self.windows
            if each.get("errors")
        ]


class Ratio(NamedTuple):
    """Ours to a peer's."""

    of_minima: float
    median: float


def read(lines: Iterable[str]) -> Results:
    """Return what *lines* say; several files may follow each other."""
    machine: dict[str, Any] = {}
    versions: dict[str, str] = {}
    cells: Cells = defaultdict(dict)
    windows: list[dict[str, Any]] = []
    for line in lines:
        if not line.strip():
            continue
        fields = json.loads(line)
        if "machine" in fields:
            machine = machine or fields["machine"]
            versions |= fields["versions"]
            continue
        windows.append(fields)
        figure = figure_of(fields)
        if figure is not None:
            cells[fields["shape"], fields["contender"]][fields["round"]] = figure
    return Results(machine, versions, cells, windows)


def figure_of(fields: Mapping[str, Any]) -> float | None:
    """Return the figure of one window; None when it failed."""
    shape = SHAPES.get(fields["shape"])
    name = "figure" if shape is None else _FIELD[shape.unit]
    value = fields.get(name, -1.0)
    return float(value) if value > 0 else None


def ratio(cells: Cells, goal: Goal, shape: str) -> Ratio | None:
    """Return how ours compares with the goal's peer under *shape*; None if one is missing."""
    ours, peer = cells.get((shape, OURS)), cells.get((shape, goal.peer))
    if not ours or not peer:
        return None
    base: Mapping[int, float] = {}
    if goal.kind == "added":
        base = cells.get((shape, DIRECT)) or {}
        if not base:
            return None
    floor = min(base.values(), default=0.0)
    rounds = [number for number in ours if number in peer]
    within = [
        (ours[number] - base.get(number, floor)) / max(peer[number] - base.get(number, floor), 1.0)
        if base
        else ours[number] / peer[number]
        for number in rounds
    ]
    below = max(min(peer.values()) - floor, 1e-9)
    return Ratio(
        (min(ours.values()) - floor) / below, statistics.median(within) if within else float("nan")
    )


def verdict(value: float, goal: Goal) -> str:
    """Return what *value* means for *goal*."""
    if value <= goal.goal:
        return "goal"
    return "must" if value <= goal.must else "MISSED"


def goal_table(cells: Cells) -> tuple[list[str], bool]:
    """Return the table of goals as Markdown, and whether every `must` that was measured holds."""
    lines = [
        "| measure | ratio to | best / best | median | must | goal | holds |",
        "|---|---|---|---|---|---|---|",
    ]
    holds, marks = True, dict[str, str]()
    for goal in GOALS:
        found = {shape: ratio(cells, goal, shape) for shape in goal.shapes}
        known = {shape: each for shape, each in found.items() if each is not None}
        if not known:
            continue
        shape, worst = max(known.items(), key=lambda item: item[1].of_minima)
        title = goal.title if len(goal.shapes) == 1 else f"{goal.title} ({shape})"
        if goal.raised:
            title += " " + marks.setdefault(goal.raised, "*" * (len(marks) + 1)).replace("*", r"\*")
        word = verdict(worst.of_minima, goal)
        holds = holds and word != "MISSED"
        lines.append(
            f"| {title} | {goal.peer} | {worst.of_minima:.2f} | {worst.median:.2f} "
            f"| {goal.must:g} | {goal.goal:g} | {word} |"
        )
    if len(lines) == 2:
        return ["No goal can be looked at: none of the peers they name was measured with us."], True
    for raised, mark in marks.items():
        stars = mark.replace("*", r"\*")
        lines += ["", f"{stars} {raised} above their defaults, which this many would meet."]
    return lines, holds


def cost_table(
    cells: Cells, versions: Mapping[str, str], only: Sequence[str] | None = None
) -> list[str]:
    """Return the smallest figures as Markdown: a row per contender, a column per shape."""
    shapes = [name for name in SHAPES if any(shape == name for shape, _ in cells)]
    shapes += sorted({shape for shape, _ in cells} - set(SHAPES))
    if only is not None:
        shapes = [shape for shape in only if shape in shapes]
    contenders = list(dict.fromkeys(who for shape, who in cells if shape in shapes))
    contenders.sort(key=lambda name: (name != DIRECT, name == OURS))
    lines = [
        "| | " + " | ".join(shapes) + " |",
        "|---" * (len(shapes) + 1) + "|",
    ]
    for contender in contenders:
        version = versions.get(contender, "")
        row = [f"{contender} {version}".strip()]
        for shape in shapes:
            rounds = cells.get((shape, contender))
            row.append("" if not rounds else _written(min(rounds.values())))
        lines.append("| " + " | ".join(row) + " |")
    return lines


def machine_line(machine: Mapping[str, Any]) -> str:
    """Return when and where it was measured."""
    return (
        f"{machine.get('date', '')}, {machine.get('cpu', '')}, {machine.get('cores', '')} cores, "
        f"Linux {machine.get('kernel', '')}, Python {machine.get('python', '')}"
        + ("" if machine.get("pinned", True) else ", **not pinned: take it with caution**")
    )


def brief(results: Results) -> str:
    """Return what belongs on the front page: where, with what, and the two short tables."""
    goals, _ = goal_table(results.cells)
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    return "\n".join(
        [
            f"{machine_line(results.machine)}; {versions}.",
            "",
            *goals,
            "",
            "The same in absolute figures of this machine: microseconds of CPU time per request "
            "and per chunk, microseconds to the first byte, bytes of memory, seconds.",
            "",
            *cost_table(results.cells, results.versions, BRIEF),
            "",
        ]
    )


def write_into(page: Path, text: str) -> None:
    """
    Put *text* between the marks of *page*.

    Raises:
        ValueError: it has none.
    """
    before, begin, rest = page.read_text("utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no lines {BEGIN.strip()} and {END.strip()}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def summary(results: Results) -> tuple[str, bool]:
    """Return the whole report as Markdown, and whether it can be called a pass."""
    goals, holds = goal_table(results.cells)
    lines = [
        machine_line(results.machine),
        "",
        *goals,
        "",
        "Smallest figure of all rounds: microseconds of CPU time per request or chunk; for the "
        "first byte microseconds as the client sees it; bytes for memory; seconds for the start.",
        "",
        *cost_table(results.cells, results.versions),
    ]
    steal = max((each.get("steal", 0.0) for each in results.windows), default=0.0)
    idle = [
        each
        for each in results.windows
        if each["contender"] == OURS
        and each["shape"] in SHAPES
        and SHAPES[each["shape"]].saturates
        and each.get("busy", 1.0) < 0.9
    ]
    if steal > 0.02:
        lines += ["", f"The host took up to {steal:.0%} of this machine's time away meanwhile."]
    if idle:
        lines += ["", f"In {len(idle)} windows of ours a neighbour took part of the core."]
    if results.errors:
        lines += ["", "Windows with errors, which make this run void:", ""]
        lines += [f"- {each}" for each in results.errors]
    return "\n".join(lines), holds and not results.errors


def _written(value: float) -> str:
    if value >= 10_000_000:
        return f"{value / 2**20:.0f} MiB"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def main() -> None:
    """Print the report of the files that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().split("\n\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--must", action="store_true", help="exit 1 unless every must holds")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="put the short form there")
    options = parser.parse_args()
    lines = [line for path in options.files for line in path.read_text("utf-8").splitlines()]
    results = read(lines)
    text, passed = summary(results)
    print(text)
    if options.into is not None:
        write_into(options.into, brief(results))
    sys.exit(1 if options.must and not passed else 0)


if __name__ == "__main__":
    main()
