"""Metrics: every series from the start, truthful gauges, labels from the configuration only."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as plain_families

from modelpool_router.core.commands import Note, NoteKind
from modelpool_router.core.spec import HoldLedger, MemberName, PoolName
from modelpool_router.core.view import MemberStatus, SlotState
from modelpool_router.telemetry import Metrics
from modelpool_router.telemetry.families import FAMILIES
from modelpool_router.telemetry.reference import reference
from modelpool_router.web.errors import STATUS
from poolviews import ALPHA, BETA, GAMMA, GPU0, member_view, pool_view

PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def metrics() -> Metrics:
    return Metrics({GPU0: [ALPHA, BETA]}, ["embedder"], version="0.1.0")


def samples(metrics: Metrics) -> dict[str, float]:
    """Return ``name{label="value",...}`` to value, labels in order of their names."""
    found = {}
    for family in plain_families(metrics.render("")[0].decode()):
        for sample in family.samples:
            labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def changed(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return what *after* has more than *before*, series of our own only."""
    return {
        name: value - before.get(name, 0.0)
        for name, value in after.items()
        if name.startswith("modelpool_") and value != before.get(name, 0.0)
    }


def test_given_no_traffic_when_scraped_then_every_family_has_its_series_at_zero(
    metrics: Metrics,
) -> None:
    found = samples(metrics)

    for family in FAMILIES:
        name = family.name + ("_count" if family.kind == "histogram" else "")
        series = [key for key in found if key == name or key.startswith(name + "{")]
        assert series, family.name
        if family.name != "modelpool_build_info":
            assert {found[key] for key in series} == {0.0}, family.name
    assert (
        'modelpool_requests_total{code="swap_budget_exceeded",member="beta",outcome="refused",'
        'pool="gpu0"}' in found
    )
    assert 'modelpool_swaps_total{cause="demand",from="alpha",pool="gpu0",to="beta"}' in found
    assert 'modelpool_swaps_total{cause="warm",from="",pool="gpu0",to="alpha"}' in found
    assert (
        'modelpool_requests_total{code="2xx",member="embedder",outcome="served",pool=""}' in found
    )
    assert any(name.startswith("process_") for name in found) == os.path.exists("/proc/self/stat")


def test_given_a_served_request_when_counted_then_its_three_series_move(metrics: Metrics) -> None:
    before = samples(metrics)

    metrics.request_done("gpu0", "alpha", "served", 200, 1.5, 0.03)

    after = changed(before, samples(metrics))
    assert (
        after['modelpool_requests_total{code="2xx",member="alpha",outcome="served",pool="gpu0"}']
        == 1
    )
    hold = 'member="alpha",outcome="served",pool="gpu0"}'
    assert after["modelpool_hold_seconds_count{" + hold] == 1
    assert after["modelpool_hold_seconds_sum{" + hold] == 1.5
    assert 'modelpool_hold_seconds_bucket{le="1.0",' + hold not in after
    assert after['modelpool_hold_seconds_bucket{le="2.5",' + hold] == 1
    first = 'member="alpha",pool="gpu0"}'
    assert after["modelpool_time_to_first_byte_seconds_sum{" + first] == 0.03
    assert 'modelpool_time_to_first_byte_seconds_bucket{le="0.025",' + first not in after
    assert after['modelpool_time_to_first_byte_seconds_bucket{le="0.05",' + first] == 1


@pytest.mark.parametrize(
    ("pool", "member", "outcome", "code", "labels"),
    [
        ("gpu0", "beta", "refused", "queue_full", ("queue_full", "beta", "refused", "gpu0")),
        ("gpu0", "beta", "refused:queue_full", "", ("queue_full", "beta", "refused", "gpu0")),
        ("gpu0", "beta", "client_gone", "", ("none", "beta", "client_gone", "gpu0")),
        ("gpu0", "beta", "served", 503, ("5xx", "beta", "served", "gpu0")),
        ("gpu0", "beta", "served", "404", ("4xx", "beta", "served", "gpu0")),
        ("gpu0", "beta", "served", 999, ("other", "beta", "served", "gpu0")),
        ("", "embedder", "served", 200, ("2xx", "embedder", "served", "")),
        (None, None, "refused", "invalid_json", ("invalid_json", "unknown", "refused", "unknown")),
        ("gpu0", "stranger", "served", 200, ("2xx", "unknown", "served", "unknown")),
        ("gpu9", "alpha", "served", 200, ("2xx", "unknown", "served", "unknown")),
        ("gpu0", "alpha", "exploded", 200, ("2xx", "alpha", "other", "gpu0")),
    ],
)
def test_given_any_labels_when_counted_then_only_configured_ones_show(
    metrics: Metrics,
    pool: str | None,
    member: str | None,
    outcome: str,
    code: str | int,
    labels: tuple[str, str, str, str],
) -> None:
    before = samples(metrics)

    metrics.request_done(pool, member, outcome, code, None, None)

    name = 'modelpool_requests_total{{code="{}",member="{}",outcome="{}",pool="{}"}}'
    assert changed(before, samples(metrics)) == {name.format(*labels): 1.0}


def test_given_thousands_of_made_up_names_when_counted_then_the_number_of_series_is_bounded(
    metrics: Metrics,
) -> None:
    before = len(samples(metrics))

    for number in range(5000):
        metrics.request_done("gpu0", f"m{number}", "served", 200, 0.1, 0.1)
        word = "".join(chr(ord("a") + int(digit)) for digit in str(number))
        metrics.request_done("gpu0", "alpha", f"o{number}", word, 0.1, 0.1)
        metrics.note(GPU0, Note(NoteKind.LOAD_FAILED, {"member": "beta", "reason": word}))

    assert len(samples(metrics)) < before + 200


def test_given_an_exceeded_budget_when_counted_then_its_own_counter_moves_too(
    metrics: Metrics,
) -> None:
    metrics.request_done("gpu0", "beta", "refused", "swap_budget_exceeded", 300.0, None)
    metrics.request_done("gpu0", "beta", "refused", "queue_full", 0.0, None)

    assert samples(metrics)['modelpool_budget_exceeded_total{member="beta",pool="gpu0"}'] == 1


def test_given_the_views_when_scraped_then_the_gauges_are_what_they_say(metrics: Metrics) -> None:
    ledger = HoldLedger(held_bytes=1234)
    view = pool_view(
        member_view(ALPHA, status=MemberStatus.LOADED, in_flight=3),
        member_view(BETA, held=2, oldest_hold_s=4.5),
        member_view(GAMMA, held=7),  # not configured here (any more)
    )
    metrics.watch(lambda: [view], ledger)

    found = samples(metrics)

    assert found['modelpool_resident{member="alpha",pool="gpu0"}'] == 1
    assert found['modelpool_resident{member="beta",pool="gpu0"}'] == 0
    assert found['modelpool_in_flight{member="alpha",pool="gpu0"}'] == 3
    assert found['modelpool_held_requests{member="beta",pool="gpu0"}'] == 2
    assert found['modelpool_oldest_hold_seconds{member="beta",pool="gpu0"}'] == 4.5
    assert found["modelpool_held_bytes"] == 1234
    assert not [name for name in found if "gamma" in name]


def test_given_a_loading_slot_when_scraped_then_nobody_is_resident(metrics: Metrics) -> None:
    view = pool_view(state=SlotState.LOADING, resident=None, target=BETA)
    metrics.watch(lambda: [view], HoldLedger())

    found = samples(metrics)

    assert found['modelpool_resident{member="alpha",pool="gpu0"}'] == 0
    assert found['modelpool_resident{member="beta",pool="gpu0"}'] == 0


def test_given_a_state_that_lasts_when_scraped_then_its_time_counts_already(
    metrics: Metrics,
) -> None:
    fields: dict[str, str | float | int] = {
        "state": "resident",
        "member": "alpha",
        "from_state": "loading",
        "seconds": 20.5,
    }
    metrics.watch(lambda: [pool_view(since_s=7.0)], HoldLedger())

    metrics.note(GPU0, Note(NoteKind.STATE_CHANGED, fields))

    found = samples(metrics)
    assert found['modelpool_slot_state_seconds_total{pool="gpu0",state="loading"}'] == 20.5
    assert found['modelpool_slot_state_seconds_total{pool="gpu0",state="resident"}'] == 7.0


@pytest.mark.parametrize(
    ("kind", "fields", "series"),
    [
        (
            NoteKind.SWAP_DEFERRED,
            {"reason": "PodsBusy", "retry_s": 1.0},
            'modelpool_swap_deferred_total{pool="gpu0",reason="PodsBusy"}',
        ),
        (
            NoteKind.LOAD_FAILED,
            {"member": "beta", "reason": "exited", "detail": "x", "backoff_s": 5.0, "failures": 1},
            'modelpool_load_failures_total{member="beta",pool="gpu0",reason="exited"}',
        ),
        (
            NoteKind.LOAD_FAILED,
            {"member": "beta", "reason": "ImagePullBackOff"},
            'modelpool_load_failures_total{member="beta",pool="gpu0",reason="ImagePullBackOff"}',
        ),
        (
            NoteKind.LOAD_FAILED,
            {"member": "stranger", "reason": "exited"},
            'modelpool_load_failures_total{member="unknown",pool="gpu0",reason="exited"}',
        ),
        (
            NoteKind.LOAD_FAILED,
            {"member": "beta", "reason": "exit code 1: cannot open /x.gguf"},
            'modelpool_load_failures_total{member="beta",pool="gpu0",reason="other"}',
        ),
        (
            NoteKind.RESIDENT_LOST,
            {"member": "alpha", "reason": "exited", "detail": "", "leases": 2},
            'modelpool_resident_lost_total{member="alpha",pool="gpu0"}',
        ),
        (
            NoteKind.LOAD_WASTED,
            {"member": "alpha"},
            'modelpool_wasted_loads_total{member="alpha",pool="gpu0"}',
        ),
        (
            NoteKind.UNLOAD_RETRIED,
            {"member": "alpha", "detail": "", "retry_s": 1.0},
            'modelpool_unload_retries_total{member="alpha",pool="gpu0"}',
        ),
        (
            NoteKind.RELEASED,
            {"member": "alpha", "reason": "idle_unload"},
            'modelpool_released_total{pool="gpu0",reason="idle_unload"}',
        ),
    ],
)
def test_given_a_note_when_counted_then_exactly_its_counter_moves(
    metrics: Metrics, kind: NoteKind, fields: dict[str, str | float], series: str
) -> None:
    before = samples(metrics)

    metrics.note(GPU0, Note(kind, fields))

    assert changed(before, samples(metrics)) == {series: 1.0}


@pytest.mark.parametrize("kind", list(NoteKind))
def test_given_a_pool_that_was_removed_when_it_tells_then_nothing_moves(
    metrics: Metrics, kind: NoteKind
) -> None:
    before = samples(metrics)

    metrics.note(PoolName("gone"), Note(kind, {}))

    assert changed(before, samples(metrics)) == {}


def test_given_a_displacing_swap_when_counted_then_all_three_phases_are(metrics: Metrics) -> None:
    fields: dict[str, str | float | int] = {
        "source": "alpha",
        "target": "beta",
        "cause": "demand",
        "swap": 2,
        "drain_s": 12.0,
        "unload_s": 0.3,
        "load_s": 21.0,
        "granted": 4,
    }

    metrics.note(GPU0, Note(NoteKind.SWAP_COMPLETED, fields))

    found = samples(metrics)
    assert found['modelpool_swaps_total{cause="demand",from="alpha",pool="gpu0",to="beta"}'] == 1
    assert found['modelpool_swap_phase_seconds_sum{phase="drain",pool="gpu0"}'] == 12.0
    assert found['modelpool_swap_phase_seconds_sum{phase="unload",pool="gpu0"}'] == 0.3
    assert found['modelpool_swap_phase_seconds_sum{phase="load",pool="gpu0"}'] == 21.0


def test_given_a_swap_into_an_empty_slot_when_counted_then_only_its_load_is(
    metrics: Metrics,
) -> None:
    fields: dict[str, str | float | int] = {
        "source": "",
        "target": "beta",
        "cause": "warm",
        "swap": 1,
        "drain_s": 0.0,
        "unload_s": 0.0,
        "load_s": 21.0,
        "granted": 0,
    }

    metrics.note(GPU0, Note(NoteKind.SWAP_COMPLETED, fields))

    found = samples(metrics)
    assert found['modelpool_swaps_total{cause="warm",from="",pool="gpu0",to="beta"}'] == 1
    assert found['modelpool_swap_phase_seconds_count{phase="drain",pool="gpu0"}'] == 0
    assert found['modelpool_swap_phase_seconds_count{phase="unload",pool="gpu0"}'] == 0
    assert found['modelpool_swap_phase_seconds_count{phase="load",pool="gpu0"}'] == 1


def test_given_violations_parse_errors_and_dropped_lines_when_counted_then_they_show(
    metrics: Metrics,
) -> None:
    metrics.watch_log(lambda: 17)
    metrics.residency_violation(GPU0)
    metrics.parse_error()
    metrics.parse_error()

    found = samples(metrics)

    assert found['modelpool_residency_violations_total{pool="gpu0"}'] == 1
    assert found["modelpool_http_parse_errors_total"] == 2
    assert found["modelpool_log_lines_dropped_total"] == 17


def test_given_a_reload_when_members_change_then_what_stays_keeps_its_counts(
    metrics: Metrics,
) -> None:
    metrics.request_done("gpu0", "alpha", "served", 200, 1.0, 0.1)
    metrics.request_done("gpu0", "alpha", "served", 302, 1.0, 0.1)
    metrics.request_done("gpu0", "beta", "served", 200, 1.0, 0.1)
    metrics.request_done("", "embedder", "served", 200, None, 0.1)
    metrics.parse_error()

    metrics.reconfigure({GPU0: [ALPHA, GAMMA]}, [])

    found = samples(metrics)
    served = 'modelpool_requests_total{{code="{}",member="{}",outcome="served",pool="gpu0"}}'
    assert found[served.format("2xx", "alpha")] == 1
    assert found[served.format("3xx", "alpha")] == 1
    assert found[served.format("2xx", "gamma")] == 0
    assert found['modelpool_hold_seconds_count{member="alpha",outcome="served",pool="gpu0"}'] == 2
    assert found["modelpool_http_parse_errors_total"] == 1
    assert not [name for name in found if "beta" in name or "embedder" in name]

    before = samples(metrics)
    metrics.request_done("gpu0", "gamma", "served", 200, 1.0, 0.1)
    metrics.request_done("gpu0", "beta", "served", 200, 1.0, 0.1)
    after = changed(before, samples(metrics))
    assert after[served.format("2xx", "gamma")] == 1
    assert not [name for name in after if "beta" in name]


def test_given_usual_requests_when_counted_then_the_same_series_move(metrics: Metrics) -> None:
    before = samples(metrics)
    metrics.request_done("gpu0", "alpha", "served", 200, 0.0, 0.03)
    middle = samples(metrics)

    served = metrics.served("gpu0", "alpha", 200)
    assert served is not None
    assert metrics.count(served, 0.03)

    assert changed(middle, samples(metrics)) == changed(before, middle)
    assert metrics.served("", "embedder", 200) is None, "never held"


def test_given_a_removed_member_when_its_last_requests_end_then_it_gets_no_series(
    metrics: Metrics,
) -> None:
    stays, goes = (metrics.served("gpu0", name, 200) for name in ("alpha", "beta"))
    assert stays is not None and goes is not None

    metrics.reconfigure({GPU0: [ALPHA, GAMMA]}, [])

    assert metrics.count(stays, 0.1)
    assert not metrics.count(goes, 0.1)
    found = samples(metrics)
    assert found['modelpool_hold_seconds_count{member="alpha",outcome="served",pool="gpu0"}'] == 1
    assert not [name for name in found if "beta" in name]


def test_given_openmetrics_wanted_when_scraped_then_its_strict_parser_takes_it(
    metrics: Metrics,
) -> None:
    metrics.request_done("gpu0", "alpha", "served", 200, 1.0, 0.1)

    text, content_type = metrics.render("application/openmetrics-text; version=1.0.0")

    assert content_type.startswith("application/openmetrics-text")
    families = open_families(text.decode())  # type: ignore[no-untyped-call] # not annotated
    names = {family.name for family in families}
    assert {family.name.removesuffix("_total") for family in FAMILIES} <= names


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_given_a_family_when_named_then_it_keeps_the_rules_of_prometheus(family: object) -> None:
    from modelpool_router.telemetry.families import Family

    assert isinstance(family, Family)
    assert re.fullmatch(r"modelpool_[a-z]+(_[a-z]+)*", family.name)
    assert (family.kind == "counter") == family.name.endswith("_total")
    assert not family.name.endswith(("_count", "_sum", "_bucket", "_info_total"))
    assert not re.search(
        r"_(ms|milliseconds|minutes|kb|mb|kilobytes|gauge|counter)(_|$)", family.name
    )
    assert (family.kind == "histogram") == bool(family.buckets)
    if family.kind == "histogram":
        assert family.name.endswith("_seconds")
        assert list(family.buckets) == sorted(set(family.buckets))
    assert family.help.endswith(".")
    for label in family.labels:
        assert re.fullmatch(r"[a-z]+", label)
        assert label not in ("le", "quantile", "job", "instance")


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")
def test_given_promtool_when_it_checks_the_page_then_it_finds_nothing(metrics: Metrics) -> None:
    assert PROMTOOL is not None
    metrics.request_done("gpu0", "alpha", "served", 200, 1.0, 0.1)

    done = subprocess.run(
        [PROMTOOL, "check", "metrics"],
        input=metrics.render("")[0],
        capture_output=True,
        timeout=30,
        check=False,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def steps_of(work: Callable[[], None]) -> Counter[str]:
    """Count what the interpreter does for *work*: lines of Python, and calls out of it."""
    done: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        done[event] += 1
        return trace

    def profile(frame: FrameType, event: str, arg: object) -> None:
        done[event] += 1

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(trace)
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    return done


def test_given_the_hot_path_when_counted_then_a_request_takes_few_steps_in_any_company() -> None:
    alone = Metrics({GPU0: [ALPHA]}, [], version="0.1.0")
    crowd = [MemberName(f"m{number}") for number in range(300)]
    crowded = Metrics({GPU0: [ALPHA, *crowd]}, ["embedder"], version="0.1.0")
    for name in crowd:
        crowded.request_done("gpu0", name, "served", 200, 0.5, 0.1)

    def done(metrics: Metrics) -> Counter[str]:
        def request() -> None:
            metrics.request_done("gpu0", "alpha", "served", 200, 0.5, 0.1)

        request()  # the first of its kind makes the series
        return steps_of(request)

    steps = done(crowded)
    assert steps == done(alone)
    assert steps["line"] < 40
    assert steps["c_call"] < 15


def test_given_the_declarations_when_the_manual_is_compared_then_it_is_up_to_date() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()

    assert page == reference(), "python -m modelpool_router.telemetry.reference > docs/metrics.md"
    for family in FAMILIES:
        assert f"| `{family.name}` | {family.kind} |" in page


@pytest.mark.parametrize("code", sorted(STATUS))
def test_given_a_code_of_the_data_port_when_counted_then_it_has_a_label_of_its_own(
    metrics: Metrics, code: str
) -> None:
    metrics.request_done("gpu0", "alpha", "refused", code, 0.0, None)

    name = f'modelpool_requests_total{{code="{code}",member="alpha",outcome="refused",pool="gpu0"}}'
    assert samples(metrics)[name] == 1
