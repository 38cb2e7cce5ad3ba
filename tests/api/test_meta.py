"""Durations, conditions and metadata of the API."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool_api import meta
from modelpool_api.meta import Condition, Status, condition, set_condition
from modelpool_api.v1alpha1 import ModelPool

NOON = datetime(2026, 5, 1, 12, 0, 0, tzinfo=UTC)
LATER = NOON + timedelta(minutes=1)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("300s", 300),
        ("4m30s", 270),
        ("1h", 3600),
        ("500ms", 0.5),
        ("0s", 0),
        ("1h1m1s1ms", 3661.001),
    ],
)
def test_a_duration_is_read_in_seconds(text: str, value: float) -> None:
    assert meta.seconds(text) == pytest.approx(value)


@pytest.mark.parametrize(
    "text", ["", "5", "-5s", "+5s", "1.5s", "1d", "5 s", "123456s", "1s1s1s1s1s", "5s\n", "٣s"]
)
def test_what_is_no_duration_is_refused_with_the_way_out(text: str) -> None:
    with pytest.raises(ValueError, match="write it like 300s") as caught:
        meta.seconds(text)

    assert repr(text) in str(caught.value)


@given(st.integers(min_value=0, max_value=99_999 * 3_600_000))
def test_a_written_duration_reads_back(whole_ms: int) -> None:
    assert round(meta.seconds(meta.duration_text(whole_ms / 1000)) * 1000) == whole_ms


def test_the_transition_time_moves_with_the_status_alone() -> None:
    first = set_condition((), "Ready", False, "Cold", now=NOON, generation=1)
    reworded = set_condition(first, "Ready", False, "Loading", "still", now=LATER, generation=2)
    turned = set_condition(reworded, "Ready", True, "Served", now=LATER, generation=2)

    assert reworded[0].last_transition_time == "2026-05-01T12:00:00Z"
    assert (reworded[0].reason, reworded[0].observed_generation) == ("Loading", 2)
    assert turned[0].last_transition_time == "2026-05-01T12:01:00Z"


def test_an_unchanged_condition_is_equal_so_that_nothing_is_written() -> None:
    first = set_condition((), "Ready", True, "Served", now=NOON, generation=1)

    assert set_condition(first, "Ready", True, "Served", now=LATER, generation=1) == first


def test_other_conditions_keep_their_place() -> None:
    all_of_them: tuple[Condition, ...] = ()
    for kind in ("A", "B", "C"):
        all_of_them = set_condition(all_of_them, kind, True, "Fine", now=NOON, generation=1)

    changed = set_condition(all_of_them, "B", Status.UNKNOWN, "Lost", now=LATER, generation=1)

    assert [each.type for each in changed] == ["A", "B", "C"]
    assert condition(changed, "B") is not None
    assert condition(changed, "D") is None


def test_times_are_written_in_utc_and_need_a_zone() -> None:
    east = datetime(2026, 5, 1, 14, 0, 0, 999_999, tzinfo=timezone(timedelta(hours=2)))

    assert meta.timestamp(east) == "2026-05-01T12:00:00Z"
    with pytest.raises(ValueError, match="without a zone"):
        meta.timestamp(datetime(2026, 5, 1))  # noqa: DTZ001


def test_an_object_of_a_newer_server_is_read_without_what_is_unknown() -> None:
    pool = ModelPool.model_validate(
        {
            "apiVersion": "modelpool.dev/v1alpha1",
            "kind": "ModelPool",
            "metadata": {
                "name": "gpu0",
                "namespace": "lab",
                "managedFields": [{}],
                "ownerReferences": [
                    {"apiVersion": "v1", "kind": "X", "name": "x", "uid": "1", "controller": True}
                ],
                "deletionTimestamp": "2026-05-01T12:00:00Z",
            },
            "spec": {"members": [{"deploymentRef": {"name": "coder"}}], "future": {"a": 1}},
        }
    )

    assert pool.spec.members[0].member_name == "coder"
    assert pool.spec.members[0].kind == "Deployment"
    assert pool.spec.swap_budget == "300s"
    assert pool.metadata.is_going
    assert pool.metadata.controller is not None
    assert pool.metadata.controller.kind == "X"
    assert pool.spec.wire()["members"] == [{"deploymentRef": {"name": "coder"}, "models": []}]
