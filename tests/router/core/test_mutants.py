"""The checkers and scenarios catch every breakage of `sim_mutants`; see there for a table."""

from __future__ import annotations

import pytest

from sim_mutants import MUTANTS, Mutant, build, killed_by


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "_"))
def test_a_broken_scheduler_is_caught(mutant: Mutant) -> None:
    assert killed_by(mutant) is not None


def test_the_scheduler_as_it_is_survives() -> None:
    unchanged = Mutant("unchanged", "class Scheduler(", "class Scheduler(")

    assert killed_by(unchanged, schedules=25) is None


def test_a_mutant_whose_line_is_gone_says_so() -> None:
    with pytest.raises(LookupError, match="0 times"):
        build(Mutant("lost", "this line is nowhere", ""))
