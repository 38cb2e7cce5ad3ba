"""H1: a hold ends at the budget, or a little before the client would give up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict

from modelpool_router.core.patience import Patience, announced_patience_s, hold_deadline


def test_without_headers_the_budget_counts_from_the_arrival() -> None:
    assert hold_deadline(1000.0, 300.0, {}) == Patience(1300.0, "swapBudget")


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        # min(2 s, 10 %) earlier than announced: 2 s for long patience, a tenth for short.
        ({"x-stainless-read-timeout": "60"}, Patience(1058.0, "client")),
        ({"x-stainless-timeout": "60"}, Patience(1058.0, "client")),
        ({"x-stainless-timeout": "10"}, Patience(1009.0, "client")),
        ({"x-stainless-timeout": "1"}, Patience(1000.9, "client")),
        ({"x-stainless-timeout": "20.0"}, Patience(1018.0, "client")),
        ({"x-stainless-timeout": " 12.5 "}, Patience(1011.25, "client")),
        # The read time-out is the one that counts, even when it is the longer one.
        (
            {"x-stainless-read-timeout": "100", "x-stainless-timeout": "50"},
            Patience(1098.0, "client"),
        ),
        # An unusable read time-out does not hide the other one.
        (
            {"x-stainless-read-timeout": "NOT_GIVEN", "x-stainless-timeout": "50"},
            Patience(1048.0, "client"),
        ),
        # Node gives up after 300 s; a shorter announcement is still shorter.
        ({"x-stainless-runtime": "node"}, Patience(1298.0, "client")),
        ({"x-stainless-runtime": "Node"}, Patience(1298.0, "client")),
        ({"x-stainless-runtime": "node", "x-stainless-timeout": "600"}, Patience(1298.0, "client")),
        ({"x-stainless-runtime": "node", "x-stainless-timeout": "30"}, Patience(1028.0, "client")),
        ({"x-stainless-runtime": "CPython"}, Patience(1300.0, "swapBudget")),
        # More patience than the budget changes nothing.
        ({"x-stainless-timeout": "600"}, Patience(1300.0, "swapBudget")),
        ({"x-stainless-timeout": "86400"}, Patience(1300.0, "swapBudget")),
        ({"x-stainless-timeout": "302"}, Patience(1300.0, "swapBudget")),
        ({"x-stainless-timeout": "301"}, Patience(1299.0, "client")),
    ],
)
def test_announced_patience_shortens_the_hold(headers: dict[str, str], expected: Patience) -> None:
    result = hold_deadline(1000.0, 300.0, headers)

    assert result.limited_by == expected.limited_by
    assert result.deadline == pytest.approx(expected.deadline, abs=1e-9)


@pytest.mark.parametrize(
    "value",
    [
        *("", " ", "0", "0.99", "-5", "+5", "86400.1", "86401", "999999999", "1e3", "nan", "inf"),
        *("Infinity", "1_000", "0x10", "5s", "5,0", ".5", "٦٠", "60\x00", "6" * 400, "1.2.3"),
    ],
)
def test_nonsense_is_ignored(value: str) -> None:
    headers = {"x-stainless-timeout": value, "x-stainless-read-timeout": value}

    assert hold_deadline(0.0, 300.0, headers) == Patience(300.0, "swapBudget")


def test_a_client_that_is_kept_awake_has_no_limit_of_its_own() -> None:
    headers = {"x-stainless-timeout": "10", "x-stainless-runtime": "node"}

    result = hold_deadline(5.0, 400.0, headers, ignore_patience=True)

    assert result == Patience(405.0, "swapBudget")


def test_budget_of_zero_refuses_at_once() -> None:
    assert hold_deadline(7.0, 0.0, {"x-stainless-timeout": "60"}) == Patience(7.0, "swapBudget")


def test_header_names_may_be_written_in_any_case() -> None:
    headers = CIMultiDict({"X-Stainless-Read-Timeout": "60"})

    assert hold_deadline(0.0, 300.0, headers) == Patience(58.0, "client")


@settings(derandomize=True)
@given(
    arrival=st.floats(0, 1e6),
    budget=st.floats(0, 86_400),
    value=st.text() | st.floats().map(str) | st.integers(-5, 100_000).map(str),
    runtime=st.sampled_from(["", "node", "deno"]),
)
def test_a_hold_never_outlasts_budget_or_patience(
    arrival: float, budget: float, value: str, runtime: str
) -> None:
    headers = {"x-stainless-timeout": value, "x-stainless-runtime": runtime}

    result = hold_deadline(arrival, budget, headers)

    assert arrival <= result.deadline <= arrival + budget
    patience = announced_patience_s(headers)
    if patience is not None:
        assert 1.0 <= patience <= 86_400.0
        assert result.deadline < arrival + patience
