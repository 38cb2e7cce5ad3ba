"""`mdep_mutants` takes away guards that are there; running all of them takes a while."""

from __future__ import annotations

import pytest

import mdep_mutants


@pytest.mark.parametrize(
    "mutant", mdep_mutants.MUTANTS, ids=[f"{m.rule} {m.guard}" for m in mdep_mutants.MUTANTS]
)
def test_each_guard_is_where_it_is_taken_away(mutant: mdep_mutants.Mutant) -> None:
    text = (mdep_mutants.ROOT / "operator" / mutant.path).read_text("utf-8")

    assert text.count(mutant.old) == 1
    assert mutant.new != mutant.old


def test_every_rule_from_26_to_49_is_in_the_table() -> None:
    rules = {mutant.rule for mutant in mdep_mutants.MUTANTS}

    # R33 forbids what no code does; R42 is what R41 and R43 leave over.
    wanted = {f"R{number}" for number in range(26, 49)} - {"R33", "R42"}
    assert wanted <= rules
    assert {f"R49.{number}" for number in range(1, 9)} <= rules
