"""``modelpool bench`` and the trace it drives."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from modelpool_router.cli.main import app
from modelpool_router.testing import workload
from modelpool_router.testing.slotwatch import Phase, phases_of_members, phases_of_views
from modelpool_router.testing.swapreport import oldest_wait, page
from modelpool_router.testing.workload import (
    MAX_SECONDS,
    Outcome,
    Result,
    Session,
    Workload,
    drive,
    plan,
    summarise,
    turns,
)
from served import member, pool, served_here

run = CliRunner().invoke


def test_the_same_seed_is_the_same_trace() -> None:
    first, again, other = (plan(["a", "b"], seed=seed) for seed in (1, 1, 2))

    assert first == again != other
    assert {session.model for session in first.sessions} == {"a", "b"}
    assert all(0 <= session.at_s < 60 for session in first.sessions)
    assert all(session.pauses_s[0] == 0 for session in first.sessions)


@pytest.mark.parametrize(
    ("models", "wrong"),
    [
        ([], {}),
        (["a"], {"seconds": MAX_SECONDS + 1}),
        (["a"], {"seconds": 0.0}),
        (["a"], {"seconds": 900.0, "sessions_per_minute": 120.0}),
    ],
)
def test_a_trace_is_bounded(models: list[str], wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="workload"):
        plan(models, **wrong)  # type: ignore[arg-type]


def outcome(model: str, sent: float, first: float, ended: float, code: str = "") -> Outcome:
    return Outcome(model, sent, None if code else first, ended, 200 if not code else 503, code)


def result(*outcomes: Outcome) -> Result:
    models = tuple(dict.fromkeys(each.model for each in outcomes))
    return Result(Workload(1, models, (Session(0.0, models[0], (0.0,), 1),)), list(outcomes), 10.0)


def test_turns_and_thrash_are_told_from_the_answers() -> None:
    made = result(
        outcome("a", 0, 1, 2),
        outcome("b", 0, 3, 4),  # one answer, then away although another waits
        outcome("b", 1, 7, 8),
        outcome("a", 2, 5, 6),
        outcome("a", 2, 5.5, 6),
        outcome("a", 3, 0, 4, code="swap_budget_exceeded"),
    )

    assert [(turn.model, turn.answers) for turn in turns(made)] == [
        *(("a", 1), ("b", 1), ("a", 2), ("b", 1)),
    ]
    summary = summarise(made)
    assert (summary.requests, summary.served, summary.swaps) == (6, 5, 3)
    assert summary.failed == {"swap_budget_exceeded": 1}
    assert summary.thrash == pytest.approx(2 / 3), "the first a and the first b"
    assert (summary.first_p50_s, summary.first_max_s) == (3, 6)


def test_phases_are_told_from_the_log_of_members() -> None:
    log = [
        {"t": 100.0, "event": "start", "name": "a"},
        {"t": 100.5, "event": "listening", "name": "a"},
        {"t": 101.0, "event": "ready", "name": "a"},
        {"t": 104.0, "event": "term", "name": "a"},
        {"t": 104.5, "event": "stopped", "name": "a"},
        {"t": 104.5, "event": "start", "name": "b"},
    ]

    assert phases_of_members(log, 100.0, 6.0) == [
        Phase("a", "load", 0.0, 1.0),
        Phase("a", "resident", 1.0, 4.0),
        Phase("a", "unload", 4.0, 4.5),
        Phase("b", "load", 4.5, 6.0),
    ]


def view(state: str, **fields: str | None) -> dict[str, str | None]:
    names = ("resident", "incumbent", "target")
    return {"name": "gpu0", "state": state, "admission": "open"} | dict.fromkeys(names) | fields


def test_phases_are_told_from_the_views_of_a_router() -> None:
    views = [
        (-1.0, view("resident", resident="a")),
        (0.5, view("resident", resident="a")),  # something else happened
        (1.0, view("resident", resident="a", admission="closed")),
        (2.0, view("unloading", incumbent="a", target="b")),
        (3.0, view("cold", target="b")),
        (3.0, view("loading", target="b")),
        (5.0, view("resident", resident="b")),
        (8.0, view("cold")),
        (9.0, view("loading", target="c")),
    ]

    assert phases_of_views(views, 10.0) == [
        Phase("a", "resident", -1.0, 1.0),
        Phase("a", "drain", 1.0, 2.0),
        Phase("a", "unload", 2.0, 3.0),
        Phase("b", "load", 3.0, 5.0),
        Phase("b", "resident", 5.0, 8.0),
        Phase("c", "load", 9.0, 10.0),
    ]


def test_the_curve_is_the_age_of_who_waits_longest() -> None:
    made = [
        outcome("a", 0.0, 4.0, 5.0),
        outcome("a", 1.0, 2.0, 3.0),  # in the shadow of the first
        outcome("b", 3.0, 6.0, 7.0),  # the oldest from 4.0 on
        outcome("b", 8.0, 9.0, 9.5),
    ]

    assert oldest_wait(made) == [
        *((0.0, 0.0), (0.0, 0.0), (4.0, 4.0), (4.0, 0.0)),
        *((4.0, 1.0), (6.0, 3.0), (6.0, 0.0)),
        *((8.0, 0.0), (8.0, 0.0), (9.0, 1.0), (9.0, 0.0)),
    ]


def test_the_page_draws_every_request_and_quotes_names() -> None:
    made = result(outcome("<a>", 0, 1, 2), outcome("b", 0, 3, 4), outcome("b", 1, 0, 2, code="x"))

    text = page("Turns & <more>", made, known=[Phase("<a>", "load", 0, 1)], budget_s=3.0)

    assert "<a>" not in text and "&lt;a&gt;" in text and "Turns &amp; &lt;more&gt;" in text
    assert text.count("<circle") == 3
    assert "budget 3 s" in text
    assert text.count("<svg") == text.count("</svg>") == 3


async def test_a_trace_is_driven_through_a_router(tmp_path: Path) -> None:
    members = [member(name, load=0.05, chunks=2) for name in ("alpha", "beta")]
    async with served_here(tmp_path, pool(*members, maxTurn="300ms")) as router:
        trace = plan(
            ["alpha", "beta", "nobody"], seconds=2, sessions_per_minute=120, tokens=2, seed=16
        )
        made = await drive(f"{router.url}/v1", trace)

        assert len(made.outcomes) == trace.requests
        assert {each.code for each in made.outcomes if not each.served} == {"model_not_found"}
        assert all(each.member == each.model for each in made.outcomes if each.served)
        summary = summarise(made)
        assert summary.swaps >= 1 and summary.served == trace.requests - sum(
            len(session.pauses_s) for session in trace.sessions if session.model == "nobody"
        )


async def test_a_trace_ends_although_nobody_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload, "LIMIT_S", 0.3)
    never = pool(member("alpha", load=60))
    async with served_here(tmp_path, never) as router:
        made = await drive(
            router.url, Workload(1, ("alpha",), (Session(0.0, "alpha", (0.15,), 1),))
        )

    assert [each.code for each in made.outcomes] == ["unfinished"]
    assert 0.3 <= made.took_s < 30
    assert summarise(made).failed == {"unfinished": 1}


async def test_the_command_asks_prints_and_draws(tmp_path: Path) -> None:
    async with served_here(tmp_path, pool(member("alpha"), member("beta"))) as router:
        report = tmp_path / "report.html"
        flags = ["bench", "--url", router.url, "--seconds", "1", "--sessions", "60"]
        draw = ["--report", str(report), "--admin", router.admin]

        told = await asyncio.to_thread(run, app, [*flags, *draw])
        assert told.exit_code == 0, told.output
        assert "served" in told.output and "first token" in told.output
        drawn = report.read_text(encoding="utf-8")
        assert drawn.startswith("<!doctype html>")
        for phase in ("alpha load", "alpha resident"):
            assert f"<title>{phase} " in drawn, "the router told"

        told = await asyncio.to_thread(run, app, [*flags, "alpha", "--json"])
        found = json.loads(told.output)
        assert found["requests"] == found["served"] == len(found["outcomes"]) > 0


@pytest.mark.parametrize("url", ["http://10.0.0.7:8080", "http://example.org", "http://[::2]:1"])
def test_other_machines_are_left_alone_unless_allowed(url: str) -> None:
    told = run(app, ["bench", "m", "--url", url, "--seconds", "1"])

    assert told.exit_code == 2
    assert "--allow-remote" in told.output


def test_nobody_there_is_said_in_words() -> None:
    told = run(app, ["bench", "--url", "http://127.0.0.1:1", "--seconds", "1"])

    assert told.exit_code == 3
    assert "no router answers" in told.output


async def test_a_port_that_lists_no_models_is_said_in_words(tmp_path: Path) -> None:
    async with served_here(tmp_path, pool(member("alpha"))) as router:
        told = await asyncio.to_thread(run, app, ["bench", "--url", router.admin])

    assert told.exit_code == 4
    assert "status 404" in told.output and "--url that clients use" in told.output


def test_a_page_that_cannot_be_written_is_said_before_the_trace(tmp_path: Path) -> None:
    told = run(app, ["bench", "m", "--report", str(tmp_path / "missing" / "page.html")])

    assert told.exit_code == 2 and "there is no folder" in told.output
