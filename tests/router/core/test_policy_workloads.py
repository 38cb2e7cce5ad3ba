"""The orderings by which the policy and its defaults were chosen, with the real scheduler."""

from __future__ import annotations

import pytest

from modelpool_router.core.spec import MemberName
from sim_workloads import Result, Workload, mean

HOUR = 3600.0
A, B, C = MemberName("a"), MemberName("b"), MemberName("c")


def workload(members: str, load_s: float, seed: int, *, order: bool, parallel: int = 8) -> Workload:
    """By *order* the first foreign hold closes admission and an idle resident goes at once."""
    if order:
        return Workload(
            members, load_s=load_s, seed=seed, parallel=parallel, max_turn_s=0.0, linger_s=0.0
        )
    return Workload(members, load_s=load_s, seed=seed, parallel=parallel)


def two_agents(load_s: float, seed: int, *, order: bool) -> Result:
    work = workload("ab", load_s, seed, order=order)
    work.agent("a")
    work.agent("b", start=1.0)
    return work.run(HOUR)


@pytest.mark.parametrize("load_s", [20.0, 60.0])
def test_two_agents_get_half_as_much_again_by_turn_and_linger(load_s: float) -> None:
    order = mean([two_agents(load_s, seed, order=True).served for seed in range(3)])
    turns = mean([two_agents(load_s, seed, order=False).served for seed in range(3)])

    assert order > 40
    assert turns >= 1.5 * order


@pytest.mark.parametrize("load_s", [5.0, 20.0])
def test_a_rare_member_beside_a_busy_one_is_never_refused(load_s: float) -> None:
    work = Workload("ab", load_s=load_s, parallel=8)
    work.stream("a", every_s=1.0, answer_s=5.0, until=1800.0)
    for n in range(10):
        work.once("b", at=30.0 + n * 150.0, answer_s=5.0)

    result = work.run(HOUR)

    assert result.by_member[B] == [10, 0]
    assert result.by_member[A][0] >= 1000


def test_four_busy_members_are_not_refused_more_than_in_order_of_arrival() -> None:
    def refused(order: bool) -> float:
        results = []
        for seed in range(3):
            work = workload("abcd", 20.0, seed, order=order)
            for n, name in enumerate("abcd" * 3):
                work.agent(name, start=0.5 * n)
            results.append(work.run(HOUR))
        assert min(r.served for r in results) > 300
        return mean([r.refused for r in results])

    assert refused(order=False) <= refused(order=True)


def test_four_members_with_more_than_they_can_do_are_not_refused_more_either() -> None:
    def play(order: bool) -> Result:
        work = workload("abcd", 20.0, 0, order=order, parallel=16)
        for name in "abcd":
            work.stream(name, every_s=2.0, answer_s=6.0, until=1800.0)
        return work.run(HOUR)

    order, turns = play(order=True), play(order=False)

    assert order.refused > 1000
    assert turns.refused <= order.refused


def test_two_sequential_clients_do_not_cause_a_swap_for_every_request() -> None:
    work = Workload("ab", load_s=0.3, linger_s=1.0, max_turn_s=10.0)
    for name in "ab":
        work.agent(name, think_s=0.3, answer_s=0.2, exact=True)

    result = work.run(60.0)

    assert result.refused == 0
    assert result.served >= 60
    assert result.loads <= result.served / 5 + 2


def test_overlapping_traffic_for_ever_does_not_keep_another_member_out() -> None:
    load_s, answer_s = 3.0, 1.5
    work = Workload("ab", load_s=load_s, max_turn_s=2.0)
    work.stream("a", every_s=0.5, answer_s=answer_s, until=120.0)
    work.once("b", at=30.0, answer_s=0.1)

    work.run(120.0)

    request = next(r for r in work.world.model.requests.values() if r.member == B)
    assert request.grants == 1
    probe_s = 0.01
    assert request.granted_at <= 30.0 + 2.0 + answer_s + probe_s + 1.0 + load_s + 1e-6


def test_clients_less_patient_than_their_wait_are_served_when_they_come_back() -> None:
    # With a budget of 10 s, overlapping answers of 15 s for a, and retries after 5 s, b was
    # never served in 61 tries when refused holds left nothing behind.
    work = Workload("ab", load_s=8.0, swap_budget_s=10.0, max_turn_s=30.0)
    work.stream("a", every_s=7.0, answer_s=15.0, until=600.0)
    work.agent("b", think_s=20.0, answer_s=1.0, start=3.0, exact=True, retry_s=5.0)

    result = work.run(600.0)

    assert result.by_member[B][0] >= 5


def test_l4_a_member_that_always_fails_leaves_the_others_most_of_their_goodput() -> None:
    def goodput(failing: bool) -> float:
        served = 0
        for seed in range(3):
            work = Workload("abc", load_s=10.0, seed=seed, failing="c")
            work.agent("a")
            work.agent("b", start=1.0)
            if failing:
                for n in range(3):
                    work.agent("c", start=2.0 + n)
            result = work.run(HOUR)
            served += result.by_member[A][0] + result.by_member[B][0]
        return served

    without, with_failures = goodput(failing=False), goodput(failing=True)

    assert without > 600
    assert with_failures >= 0.8 * without
