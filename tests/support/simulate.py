"""
Runs simulated schedules of the scheduler core and says what was injected and what was checked.

    python tests/support/simulate.py --schedules 5000 [--seed N] [--jobs 2] [--profile swarm]

Exit status 1 when a rule was broken, when a kind of fault was never injected, or when a rule was
never put to the test (the last two only in runs that are long enough to expect them).
"""

from __future__ import annotations

import argparse
import multiprocessing
import pathlib
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "router")]

from sim_checks import RULES  # noqa: E402 - the path is made above
from sim_run import Failure, Tally, digest, run_seed  # noqa: E402

LONG_ENOUGH = 2000
"""Schedules after which every fault and every check must have occurred."""
BATCH = 250


def batch(task: tuple[int, int, str | None]) -> tuple[Tally, Failure | None]:
    """Run the seeds of one batch; stop at the first failure."""
    first, count, profile = task
    tally = Tally()
    for seed in range(first, first + count):
        failure = run_seed(seed, tally, profile=profile)
        if failure is not None:
            return tally, failure
    return tally, None


def main(argv: list[str] | None = None) -> int:
    """Run what the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--schedules", type=int, default=5000, help="how many (default 5000)")
    parser.add_argument("--seed", type=int, default=1, help="first seed (default 1)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--profile", choices=("swarm", "calm", "pair"), help="only this kind")
    parser.add_argument("--digest", action="store_true", help="print a digest of every schedule")
    args = parser.parse_args(argv)
    if args.digest:
        for seed in range(args.seed, args.seed + args.schedules):
            print(digest(seed))
        return 0
    started = time.monotonic()
    tally = Tally()
    ends = args.seed + args.schedules
    tasks = [
        (first, min(BATCH, ends - first), args.profile) for first in range(args.seed, ends, BATCH)
    ]
    failure = None
    if args.jobs > 1:
        with multiprocessing.Pool(args.jobs) as pool:
            for part, failure in pool.imap(batch, tasks):
                tally.merge(part)
                if failure is not None:
                    break
    else:
        for task in tasks:
            part, failure = batch(task)
            tally.merge(part)
            if failure is not None:
                break
    if failure is not None:
        print(failure.report())
        return 1
    print(histogram(tally, time.monotonic() - started))
    missing = tally.missing(RULES)
    if missing and args.schedules >= LONG_ENOUGH and args.profile is None:
        print("never happened: " + ", ".join(missing))
        return 1
    return 0


def histogram(tally: Tally, seconds: float) -> str:
    """Return the counts of *tally* as a text for people."""
    lines = [
        f"{tally.schedules} schedules, {tally.events} events, {tally.loads} loads, "
        f"{tally.virtual_s / 3600:.1f} virtual hours in {seconds:.1f} s; "
        f"failure probability per schedule below {3 / max(tally.schedules, 1):.1e} (95 %)"
    ]
    for title, counts in (
        ("profiles", tally.profiles),
        ("faults injected", tally.faults),
        ("outcomes", tally.outcomes),
        ("checks made", tally.checks),
    ):
        lines.append(f"\n{title}")
        lines += [f"  {name:28} {count:>12}" for name, count in sorted(counts.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
