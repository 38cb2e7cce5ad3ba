"""
Run the Spin model of `slot.pml` and judge it: the model must hold, every mutant must be caught.

Needs the programs `spin` (Debian package of that name) and `gcc`, nothing else. README.md explains
the model; sentences.toml lists what is run. Exit code 0: all as it should be, or skipped with one
line because a program is absent (1 with `--required`); 1: something is not.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MODEL = HERE / "slot.pml"
SENTENCES = HERE / "sentences.toml"

TIERS = ("quick", "full", "night")
# Two verifiers at a time stay below 4 GB together; the night's larger runs go one by one.
MEMORY_MB = {"quick": 1800, "full": 1800, "night": 8000}
DEPTH = 20_000  # steps of one run; the longest seen is below 1,000. Reaching it is an error.

PROPERTY = re.compile(r"#define (\w+) (1\d\d) /\*")
BROKEN = re.compile(r"assertion violated.*?\(+(1\d\d)==0\)")
STATES = re.compile(r"^\s*(\d+) states, stored", re.M)
ERRORS = re.compile(r"errors: (\d+)")
UNREACHED = re.compile(r"slot\.pml:(\d+), (state \d+), \"")
STATE_LINES = re.compile(r"short src_ln\d+ \[\] = \{(.*?)\};", re.S)


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One search: *flags* are -D switches without the -D; `breaks` empty = the model must hold."""

    name: str
    scenario: str
    flags: tuple[str, ...]
    kind: str  # model, cycles, mutant or gap
    breaks: tuple[str, ...] = ()
    large: bool = False  # millions of states
    memory_mb: int = 1800
    limit_s: int = 600


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    run: Run
    verdict: str  # "holds", a property, "cycle", "hangs", or what went wrong
    states: int
    seconds: float
    compiled: frozenset[int] = frozenset()  # lines of the model that the verifier has states for
    reached: frozenset[int] = frozenset()  # ... and of these at least one was entered
    detail: str = ""

    @property
    def good(self) -> bool:
        if self.run.kind in ("model", "cycles"):
            return self.verdict == "holds"
        return self.verdict in self.run.breaks


class Broken(Exception):
    """The list or the model cannot be used as they are; the message says where."""


def read(path: Path) -> dict[str, list[dict[str, Any]]]:
    with path.open("rb") as file:
        return tomllib.load(file)


def switches(model: str) -> set[str]:
    """Every M_ and W_ switch that the model knows."""
    return set(re.findall(r"\b[MW]_[A-Z0-9_]+\b", model))


def plan(listed: dict[str, list[dict[str, Any]]], model: str, tier: str) -> Iterator[Run]:
    """The runs of *tier* and those below it. A list that disagrees with the model raises Broken."""
    scenarios = {entry["id"]: entry for entry in listed["scenario"]}
    wanted = TIERS[: TIERS.index(tier) + 1]
    known = switches(model)
    used: set[str] = set()
    properties = {name for name, _ in PROPERTY.findall(model)} | {"cycle", "hangs"}
    for entry in scenarios.values():
        if entry["tier"] not in wanted:
            continue
        flags = tuple(entry["flags"].split())
        whole = Run(
            entry["id"],
            entry["id"],
            flags,
            "model",
            large=entry.get("large", False),
            memory_mb=MEMORY_MB[entry["tier"]],
            limit_s=3600 if entry["tier"] == "night" else 600,
        )
        yield whole
        if entry.get("cycles") and tier != "quick":
            yield dataclasses.replace(whole, kind="cycles")
    for sentence in listed["sentence"]:
        mutants = sentence.get("mutants", [])
        if bool(mutants) == bool(sentence.get("none")):
            raise Broken(f"sentence {sentence['id']} needs mutants or a reason for none, not both")
        used |= {mutant["switch"] for mutant in mutants}
        for mutant in mutants[: 1 if tier == "quick" else None]:
            yield broken(mutant["switch"], mutant, "mutant", scenarios, properties)
    for gap in listed["gap"]:
        used.add(gap["switch"])
        yield broken(gap["id"], gap, "gap", scenarios, properties)
    if known != {name for name in used if name[:2] in ("M_", "W_")}:
        odd = sorted(known.symmetric_difference(name for name in used if name[:2] in ("M_", "W_")))
        raise Broken(f"switches that only the model or only sentences.toml has: {', '.join(odd)}")


def broken(
    name: str,
    entry: dict[str, Any],
    kind: str,
    scenarios: dict[str, dict[str, Any]],
    properties: set[str],
) -> Run:
    """The run of one mutant or gap: the flags of its scenario with its own switch added."""
    breaks = tuple(entry["breaks"])
    if entry["scenario"] not in scenarios or not set(breaks) <= properties:
        raise Broken(f"{name}: unknown scenario or property")
    switch = entry["switch"]
    own = switch.split("=")[0]
    flags = [f for f in scenarios[entry["scenario"]]["flags"].split() if f.split("=")[0] != own]
    opened = entry.get("without", [])
    return Run(name, entry["scenario"], (*flags, switch, *opened), kind, breaks)


def search(run: Run, keep: Path | None) -> Result:
    """Build the verifier of *run* in a folder of its own and let it search. No verdict raises."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="slot-model-") as folder:
        shutil.copy(MODEL, folder)
        cycles = run.kind == "cycles"
        defines = [f"-D{flag}" for flag in run.flags]
        # -DSAFETY searches ends and assertions; -DNP with -l searches for cycles without progress,
        # and as nothing in the model is labelled progress, for any cycle at all.
        options = ["-DNP", "-DNOFAIR"] if cycles else ["-DSAFETY"]
        # Most of the time goes into compiling, so only what searches for long is optimised.
        options.append("-O2" if run.large else "-O0")
        steps: list[list[str]] = [
            ["spin", "-a", *defines, MODEL.name],
            [
                "gcc",
                "-w",
                "-DCOLLAPSE",
                f"-DMEMLIM={run.memory_mb}",
                *options,
                "-o",
                "pan",
                "pan.c",
            ],
            ["./pan", f"-m{DEPTH}", *(["-l"] if cycles else [])],
        ]
        output = ""
        for step in steps:
            try:
                done = subprocess.run(
                    step,
                    cwd=folder,
                    capture_output=True,
                    text=True,
                    timeout=run.limit_s,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return Result(run, "over its time limit", 0, time.monotonic() - began)
            output = done.stdout + done.stderr
            if step is not steps[-1] and (done.returncode or "Error" in output):
                return Result(run, "not built", 0, time.monotonic() - began, detail=output[-2000:])
        places = Counter(
            int(line)
            for table in STATE_LINES.findall(Path(folder, "pan.c").read_text("utf-8"))
            for line in re.findall(r"\d+", table)
        )
        if keep is not None and Path(folder, f"{MODEL.name}.trail").exists():
            keep.mkdir(parents=True, exist_ok=True)
            (keep / f"{run.name}.txt").write_text(story(Path(folder), defines) + "\n", "utf-8")
    names = {number: name for name, number in PROPERTY.findall(MODEL.read_text("utf-8"))}
    verdict, detail = judge(output, names)
    # A choice is listed once for each of its branches; it is one state all the same.
    missed = Counter(
        int(line)
        for process in output.split("unreached in ")[1:]
        for line, _ in set(UNREACHED.findall(process))
    )
    states = STATES.search(output)
    return Result(
        run,
        verdict,
        int(states[1]) if states else 0,
        time.monotonic() - began,
        compiled=frozenset(places),
        reached=frozenset(line for line in places if missed[line] < places[line]),
        detail=detail,
    )


def judge(output: str, names: dict[str, str]) -> tuple[str, str]:
    """What the verifier's *output* says: a verdict and, when it is odd, the words behind it."""
    found = BROKEN.search(output)
    if found:
        return names.get(found[1], f"property {found[1]}"), ""
    if "non-progress cycle" in output and "wrote" in output:
        return "cycle", ""
    if "invalid end state" in output and "wrote" in output:
        return "hangs", ""
    errors = ERRORS.search(output)
    if "max search depth too small" in output:
        return "deeper than its limit", output[-2000:]
    if "Search not completed" in output or "out of memory" in output or errors is None:
        return "not completed", output[-2000:]
    return ("holds" if errors[1] == "0" else "error"), output[-2000:] if errors[1] != "0" else ""


STEP = re.compile(r"\s*\d+:\s*proc\s+(\d+) \((\w+):\d+\) \S+:(\d+) \(state -?\d+\)\s*\[(.*)\]")
CHANGE = re.compile(r"\s*([a-z0-9_]+(?:\[\d+\])?) = (\d+)$")
GUARD = re.compile(r"\(*(pc|pst|ton|dstep|rstep|istep)\b")


def story(folder: Path, defines: Sequence[str]) -> str:
    """
    The counterexample in *folder*, one line an atomic step: who acts, and what changes by it.

    Actors are numbered as in the model: routers from 0, then the operator. `pc` is shown by name.
    """
    places = re.findall(r"^#define ([A-Z0-9]+) (\d+)(?: /\*.*)?$", MODEL.read_text("utf-8"), re.M)
    start = next(i for i, (name, _) in enumerate(places) if name == "DOWN")
    names = {number: name for name, number in places[start : start + 25]}
    output = subprocess.run(
        ["spin", "-t", "-p", "-g", *defines, MODEL.name],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    ).stdout
    lines: list[str] = []
    known: dict[str, str] = {}
    acting = ("", "")
    for line in output.splitlines():
        if step := STEP.match(line):
            process, kind, where, text = step.groups()
            if GUARD.match(text) or acting != (kind, process):
                if lines and lines[-1].endswith(":"):
                    lines.pop()
                who = f"Actor {int(process) - 1}" if kind == "Actor" else f"{kind} {process}"
                lines.append(f"{who}, line {where}:")
                acting = (kind, process)
        elif (change := CHANGE.match(line)) and lines:
            what, value = change.groups()
            if what not in ("x", "y", "z") and known.get(what) != value:
                known[what] = value
                shown = names.get(value, value) if what.startswith("pc[") else value
                lines[-1] += f" {what}={shown}"
        elif "assert" in line:
            lines.append(line.strip())
    return "\n".join(lines)


def never_executed(results: Sequence[Result]) -> list[str]:
    """
    Lines of the model that no scenario reached, each with its text.

    A check that is never reached cannot fail, so what the model claims would be empty there. A line
    counts as reached when one of its statements was executed in one of the scenarios.
    """
    runs = [r for r in results if r.run.kind == "model" and r.verdict == "holds"]
    dead = frozenset[int]().union(*(r.compiled for r in runs))
    dead -= frozenset[int]().union(*(r.reached for r in runs))
    lines = MODEL.read_text("utf-8").splitlines()
    return [
        f"{number}: {lines[number - 1].strip()}"
        for number in sorted(dead)
        if 0 < number <= len(lines) and lines[number - 1].strip() not in ("}", "od")
    ]


def never_broken(results: Sequence[Result], model: str) -> list[str]:
    """Properties that no mutant and no gap breaks: nothing shows that they can fail at all."""
    broken_ones = {r.verdict for r in results if r.run.kind in ("mutant", "gap")}
    return [name for name, _ in PROPERTY.findall(model) if name not in broken_ones]


def row(result: Result) -> str:
    """One line of the table: kind, name, scenario, states, seconds, verdict."""
    run = result.run
    if not result.good:
        verdict = f"WRONG: {result.verdict} (wanted {' or '.join(run.breaks) or 'holds'})"
    elif run.kind in ("model", "cycles"):
        verdict = "holds" if run.kind == "model" else "no cycle"
    else:
        verdict = f"caught: {result.verdict}"
    return (
        f"{run.kind:<7} {run.name:<34} {run.scenario:<17} {result.states:>11,} "
        f"{result.seconds:>7.1f}  {verdict}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="the small scenarios and one mutant a sentence"
    )
    parser.add_argument(
        "--night", action="store_true", help="three members and faults together as well"
    )
    parser.add_argument("--only", default="", help="a regular expression on the names of runs")
    parser.add_argument("--jobs", type=int, default=2, help="searches at a time (2)")
    parser.add_argument(
        "--keep", type=Path, help="write each counterexample, step by step, into this folder"
    )
    parser.add_argument(
        "--required", action="store_true", help="fail, not skip, without spin and gcc"
    )
    options = parser.parse_args(arguments)

    absent = [program for program in ("spin", "gcc") if shutil.which(program) is None]
    if absent:
        print(f"skipped: {' and '.join(absent)} not found (Debian: apt-get install spin gcc)")
        return 1 if options.required else 0

    tier = "night" if options.night else "quick" if options.quick else "full"
    model = MODEL.read_text("utf-8")
    try:
        runs = list(plan(read(SENTENCES), model, tier))
    except Broken as error:
        print(f"sentences.toml: {error}")
        return 1
    runs = [run for run in runs if re.search(options.only, run.name)]
    if not runs:
        print(f"no run is named like {options.only}")
        return 1

    began = time.monotonic()
    jobs = 1 if tier == "night" else options.jobs
    results: list[Result] = []
    print(f"{'kind':<7} {'name':<34} {'scenario':<17} {'states':>11} {'s':>7}  verdict")
    with ThreadPoolExecutor(jobs) as pool:
        searches = [pool.submit(search, run, options.keep) for run in runs]
        for done in as_completed(searches):
            results.append(done.result())
            print(row(done.result()), flush=True)
    wrong = [result for result in results if not result.good]
    for result in wrong:
        print(f"\n{result.run.kind} {result.run.name}: {result.verdict}\n{result.detail}")
    empty: list[str] = []
    if not options.only:
        empty = [f"never executed: {line}" for line in never_executed(results)]
        empty += [f"never broken: {name}" for name in never_broken(results, model)]
        print("\n".join(["", *empty] if empty else []))
    held = sum(r.good for r in results if r.run.kind in ("model", "cycles"))
    caught = sum(r.good for r in results if r.run.kind in ("mutant", "gap"))
    print(
        f"\n{held} searches hold, {caught} mutants and gaps caught, {len(wrong)} wrong, "
        f"{sum(r.states for r in results):,} states, {time.monotonic() - began:.0f} s"
    )
    return 1 if wrong or empty else 0


if __name__ == "__main__":
    sys.exit(main())
