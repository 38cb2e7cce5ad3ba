"""Thousands of simulated schedules with seeded faults; see `simulate.py` for long runs."""

from __future__ import annotations

import ast
import os
import pathlib
import subprocess
import sys

import pytest

import modelpool_router.core
import simulate
from modelpool_router.core.scheduler import Scheduler
from modelpool_router.core.spec import MemberName, MemberSpec, PoolName, PoolSpec
from sim_checks import RULES
from sim_run import Failure, Tally, digest, run_seed, shrink
from sim_script import Come, PoolScript, Script, Timing
from sim_trace import Violation
from sim_world import play

SCHEDULES = 5000
SHARES = 4
"""The schedules are split over so many tests, so that a slow machine shows progress."""
ROOT = pathlib.Path(simulate.__file__).resolve().parents[2]

totals: list[Tally] = []


@pytest.mark.parametrize("share", range(SHARES))
def test_no_schedule_breaks_a_rule(share: int) -> None:
    tally = Tally()

    for seed in range(1 + share, SCHEDULES + 1, SHARES):
        failure = run_seed(seed, tally)
        if failure is not None:
            pytest.fail(failure.report())

    assert tally.schedules == SCHEDULES // SHARES
    totals.append(tally)


def test_every_fault_was_injected_and_every_rule_put_to_the_test() -> None:
    if len(totals) < SHARES:
        pytest.skip("counts what the whole of this file has run")
    total = Tally()
    for tally in totals:
        total.merge(tally)

    assert total.missing(RULES) == []
    assert total.events > 30 * SCHEDULES


def test_a_schedule_is_the_same_every_time() -> None:
    assert [digest(seed) for seed in range(100)] == [digest(seed) for seed in range(100)]


def test_a_schedule_is_the_same_under_another_hash_seed() -> None:
    def run(hash_seed: str) -> str:
        done = subprocess.run(
            [sys.executable, simulate.__file__, "--digest", "--seed", "0", "--schedules", "40"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return done.stdout

    here = "".join(f"{digest(seed)}\n" for seed in range(40))

    assert run("1") == here
    assert run("2") == here


def test_the_command_line_prints_what_was_injected_and_checked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert simulate.main(["--schedules", "30", "--seed", "7"]) == 0

    text = capsys.readouterr().out
    assert text.startswith("30 schedules, ")
    for title in ("faults injected", "checks made", "outcomes", "profiles"):
        assert f"\n{title}\n" in text


class ForgetsTheDeadline(Scheduler):
    """Breaks S5 on purpose."""

    def _refuse_late(self, now: float, *, due_too: bool) -> bool:
        return False


def test_a_failure_is_shrunk_and_told_with_its_seed_and_a_time_line() -> None:
    failure: Failure | None = None
    seed = 0
    while failure is None:
        seed += 1
        failure = run_seed(seed, Tally(), ForgetsTheDeadline)

    small = shrink(failure.script, failure.rule, ForgetsTheDeadline)
    report = failure.report(ForgetsTheDeadline)

    assert failure.rule == "S5"
    assert len(small.items) <= 3
    assert report.startswith(f"seed {seed}: S5 at ")
    assert f"--seed {seed}" in report
    assert "> Arrived(" in report
    assert report.splitlines()[-1].startswith("S5 at ")


def test_a_command_line_run_that_fails_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(seed: int, tally: Tally, profile: str | None = None) -> Failure | None:
        return run_seed(seed, tally, ForgetsTheDeadline, profile)

    monkeypatch.setattr(simulate, "run_seed", broken)
    monkeypatch.setattr(Failure, "report", lambda self: f"seed {self.seed}: {self.text}")

    assert simulate.main(["--schedules", "50"]) == 1
    assert "S5" in capsys.readouterr().out


def test_a_check_that_was_never_made_fails_a_long_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate, "LONG_ENOUGH", 1)

    assert simulate.main(["--schedules", "1", "--seed", "1"]) == 1
    assert "never happened: " in capsys.readouterr().out


def test_the_checkers_refuse_a_pool_that_serves_nobody() -> None:
    member = MemberName("a")
    pool = PoolScript(
        PoolSpec(PoolName("gpu0"), {member: MemberSpec(member)}, swap_budget_s=5.0),
        {member: Timing(load=1e9, unload=1.0)},
    )
    script = Script(0, "swarm", (pool,), (Come(0, 1.0, member, None, 1.0),), end=10.0)

    with pytest.raises(Violation, match="L2"):
        play(script)


FORBIDDEN = {
    "aiohttp", "asyncio", "datetime", "logging", "os", "random", "select", "selectors", "signal",
    "socket", "structlog", "subprocess", "threading", "time", "uvloop",
}  # fmt: skip
DECIDES = (
    "commands", "estimates", "events", "policy", "retry_after", "scheduler", "spec", "view",
)  # fmt: skip


@pytest.mark.parametrize("module", DECIDES)
def test_s18_nothing_that_decides_knows_a_clock_a_loop_or_the_outside(module: str) -> None:
    folder = pathlib.Path(modelpool_router.core.__file__).parent
    tree = ast.parse((folder / f"{module}.py").read_text())
    imported: set[str] = set()

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            imported.add((node.module or "").split(".")[0])
        assert not isinstance(node, ast.Await | ast.AsyncFunctionDef | ast.Yield)

    assert imported & FORBIDDEN == set()
