"""What the benchmarks say of figures: goals, gates, and the part of the front page."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("report")


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("gates")


def window(shape: str, contender: str, number: int, errors: int = 0, **fields: float) -> str:
    who = {"round": number, "shape": shape, "contender": contender, "errors": errors}
    return json.dumps({**who, **fields})


def lines(*, ours: tuple[float, float] = (20.0, 30.0), errors: int = 0) -> list[str]:
    """Return a run of two rounds; the second one was disturbed."""
    return [
        json.dumps({"machine": {"date": "2026-01-02"}, "versions": {"nginx": "1.22.1"}}),
        *(
            window("1 KB x 16", "modelpool", n, errors, us_per_answer=figure)
            for n, figure in enumerate(ours)
        ),
        window("1 KB x 16", "nginx", 0, us_per_answer=10.0),
        window("1 KB x 16", "nginx", 1, us_per_answer=20.0),
        *(
            window("first SSE byte", who, 0, first_p50_us=figure)
            for who, figure in (("upstream alone", 50.0), ("nginx", 100.0), ("modelpool", 250.0))
        ),
    ]


def row(text: str, title: str) -> list[str]:
    (found,) = [line for line in text.splitlines() if line.startswith(f"| {title}")]
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_ratios_are_those_of_the_best_rounds(report: Any) -> None:
    text, passed = report.summary(report.read(lines()))

    assert row(text, "1 KB request")[2:4] == ["2.00", "1.75"], "best to best; median of rounds"
    assert row(text, "1 KB request")[-1] == "must"
    assert row(text, "first SSE byte added")[2] == "4.00", "less what there is without a router"
    assert passed
    assert "`parallel` above their defaults" in text


def test_a_missed_bound_and_an_error_are_no_pass(report: Any) -> None:
    text, passed = report.summary(report.read(lines(ours=(30.0, 30.0))))
    assert row(text, "1 KB request")[-1] == "MISSED" and not passed

    text, passed = report.summary(report.read(lines(errors=3)))
    assert "1 KB x 16, modelpool, round 1: 3 errors" in text and not passed


def test_without_a_peer_no_goal_is_claimed(report: Any) -> None:
    text, _ = report.summary(report.read([each for each in lines() if "nginx" not in each]))

    assert "No goal can be looked at" in text


def test_the_front_page_has_a_place_for_it(report: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}of last year\n{report.END}after\n")

    for _ in range(2):
        report.write_into(page, report.brief(report.read(lines())))
    text = page.read_text()

    assert text.startswith("before\n") and text.endswith("after\n") and "last year" not in text
    assert text.count("2026-01-02") == 1 and "nginx 1.22.1" in text
    page.write_text("nothing")
    with pytest.raises(ValueError, match="has no lines"):
        report.write_into(page, "")
    readme = (FOLDER.parent / "README.md").read_text("utf-8")
    assert report.BEGIN in readme and report.END in readme


def test_gates_compare_with_their_own_interpreter_strictly(gates: Any) -> None:
    known = {gates.INSTRUCTIONS.name: {"figure": 100.0, "python": "3.11"}}

    assert not gates.compared(gates.INSTRUCTIONS, 109.0, known, "3.11")
    assert gates.compared(gates.INSTRUCTIONS, 111.0, known, "3.11")


def test_gates_scale_their_baselines_for_another_interpreter(
    gates: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {
        gates.INSTRUCTIONS.name: {"figure": 100.0, "python": "3.11"},
        gates.CALLS.name: {"figure": 5.0, "python": "3.11"},
        gates.OWN_WORK: {"figure": 1000, "python": "3.11"},
    }
    monkeypatch.setattr(gates.instructions, "own_work", lambda: 1200)

    assert not gates.compared(gates.INSTRUCTIONS, 179.0, known, "3.13")
    assert gates.compared(gates.INSTRUCTIONS, 181.0, known, "3.13")
    assert "scaled from Python 3.11" in capsys.readouterr().out
    assert gates.compared(gates.CALLS, 5.8, known, "3.13"), "calls are the same on every Python"


def test_every_gate_has_a_baseline(gates: Any) -> None:
    known = json.loads(gates.BASELINES.read_text("utf-8"))
    names = {gate.name for gate in (gates.INSTRUCTIONS, gates.CHUNKS, gates.CALLS, gates.MEMORY)}

    assert set(known) == names | {gates.OWN_WORK}
