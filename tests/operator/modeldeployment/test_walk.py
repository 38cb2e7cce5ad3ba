"""Random lives; `make simulate-deployments` lives two thousand of them."""

from __future__ import annotations

from collections import Counter

import pytest

import mdep_walk


@pytest.mark.parametrize("first", range(1, 51, 10))
def test_t68_whatever_happens_the_end_is_a_fresh_install(first: int) -> None:
    checked: Counter[str] = Counter()
    for seed in range(first, first + 10):
        checked += mdep_walk.live(seed)[1]

    assert all(checked[rule] for rule in mdep_walk.RULES)
