"""
What the run as a whole shows of the shipped Roles: these tests come last.

Every test of the tier lets our programs act under them, and the API server keeps a record.
"""

from __future__ import annotations

import pytest

from cluster_roles import PROGRAMS, Record
from harness import OwnCluster

pytestmark = pytest.mark.cluster
MOST_EARLY = 40
"""Requests of a whole run that came before their right was in force."""


@pytest.fixture
def record(own: OwnCluster) -> Record:
    """What our programs did in this run."""
    found = Record()
    found.read(own.audit_log)
    if not found.used:
        pytest.skip("no program of ours was part of this run")
    return found


def test_nothing_of_ours_was_refused_or_had_the_rights_of_a_person(record: Record) -> None:
    assert list(dict.fromkeys(map(str, record.refused))) == []
    assert list(dict.fromkeys(record.masters)) == []
    early = list(dict.fromkeys(map(str, record.early)))
    print(*early, sep="\n")
    assert len(early) <= MOST_EARLY, early


def test_a_router_with_a_file_of_its_own_asks_for_none_of_our_kinds(record: Record) -> None:
    if not record.own_file:
        pytest.skip("no such router was part of this run")
    assert set(record.own_file) == {"", "apps", "autoscaling", "coordination.k8s.io"}


def test_every_right_that_is_shipped_was_used(
    record: Record, is_whole_tier: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    if not is_whole_tier:
        pytest.skip("only a run of the whole tier uses every right")
    with capsys.disabled():
        print("", *record.table(), sep="\n")
    assert set(record.used) == set(PROGRAMS)
    assert record.unused() == []
