"""Holding and turns: rules H1 to H6 and the bounds of H11, in exact times."""

from __future__ import annotations

import pytest

from modelpool_router.core import commands as c
from modelpool_router.core import events as e
from modelpool_router.core.spec import Bounds
from sim_slot import A, B, C, Slot, pool


def test_eight_clients_on_a_cold_pool_cause_one_load_and_are_granted_together() -> None:
    slot = Slot(pool())

    tickets = [slot.at(0.1 * n).come(A) for n in range(8)]
    slot.at(12.0).loaded()

    assert slot.loads() == [(0.0, A)]
    assert [slot.granted(ticket) for ticket in tickets] == [12.0] * 8


def test_h1_a_hold_ends_exactly_at_its_deadline() -> None:
    slot = Slot(pool())
    ticket = slot.at(3.0).come(A, patience=7.5)

    slot.at(10.499)
    assert slot.refused(ticket) is None
    slot.at(100.0)

    refusal = slot.refused(ticket)
    assert refusal is not None
    assert refusal[0] == 10.5
    assert refusal[1].code is c.RefusalCode.SWAP_BUDGET_EXCEEDED


def test_h1_a_landing_at_the_deadline_still_serves_one_after_it_does_not() -> None:
    in_time, late = Slot(pool()), Slot(pool())
    first, second = in_time.come(A, patience=10.0), late.come(A, patience=10.0)

    in_time.now = 10.0
    in_time.loaded()
    late.now = 10.001  # the event loop stood still: the tick comes after the landing
    late.loaded()

    assert in_time.granted(first) == 10.0
    assert late.granted(second) is None
    assert late.refused(second) is not None


def test_h1_a_request_that_arrives_past_its_deadline_is_refused_even_by_an_open_resident() -> None:
    slot = Slot(pool(), up=(A,))

    ticket = slot.at(5.0).come(A, patience=-0.1)

    assert slot.granted(ticket) is None
    assert slot.refused(ticket) is not None


def test_h2_the_resident_is_granted_at_once() -> None:
    slot = Slot(pool(), up=(A,))

    tickets = [slot.at(float(n)).come(A) for n in range(5)]

    assert [slot.granted(ticket) for ticket in tickets] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_h2_beyond_parallel_requests_wait_in_line() -> None:
    slot = Slot(pool(parallel=2), up=(A,))
    tickets = [slot.come(A) for _ in range(4)]

    slot.at(5.0).finish(tickets[1])
    slot.at(6.0).finish(tickets[0])

    assert [slot.granted(ticket) for ticket in tickets] == [0.0, 0.0, 5.0, 6.0]


def test_h2_what_the_engine_says_about_parallel_counts_until_its_next_life() -> None:
    slot = Slot(pool(parallel=16))
    tickets = [slot.come(A) for _ in range(5)]

    slot.at(10.0).loaded(parallel=3)

    assert [slot.granted(ticket) for ticket in tickets] == [10.0, 10.0, 10.0, None, None]
    assert slot.view().members[0].parallel == 3


def test_h3_at_landing_as_many_as_fit_are_granted_before_anything_else() -> None:
    slot = Slot(pool(parallel=2, max_turn_s=0.0))
    first = [slot.come(A) for _ in range(5)]
    slot.at(1.0).come(B)

    commands = slot.at(10.0).loaded()

    assert [k.ticket for k in commands if isinstance(k, c.Grant)] == first[:2]
    assert all(isinstance(k, c.Grant) for k in commands[:2])


def test_h4_the_oldest_demand_is_next() -> None:
    slot = Slot(pool("a", "b", "c"), up=(A,))
    busy = slot.come(A)
    slot.at(1.0).come(C)
    slot.at(2.0).come(B)
    slot.at(3.0).come(B)

    slot.at(9.0).finish(busy)
    slot.answer()
    slot.unloaded()

    assert slot.loads() == [(9.0, C)]


def test_h4_of_equals_the_order_of_configuration_decides() -> None:
    slot = Slot(pool("a", "b", "c"), observe=False)
    slot.come(C)
    slot.come(B)

    slot.tell(e.Observed())

    assert slot.loads() == [(0.0, B)]


def test_h4_who_had_a_turn_queues_up_behind_those_who_had_none() -> None:
    slot = Slot(pool("a", "b", "c", parallel=1, max_turn_s=0.0))
    first = slot.come(A)
    slot.come(A)
    slot.at(1.0).come(B)
    slot.at(2.0).come(C)

    slot.at(10.0).loaded()
    slot.at(11.0).finish(first)
    slot.answer()
    slot.unloaded()
    slot.at(20.0).loaded()
    slot.finish(slot.last(c.Grant).ticket)
    slot.answer()
    slot.unloaded()

    assert [member for _, member in slot.loads()] == [A, B, C]


def test_h4_requests_that_come_back_from_a_refused_dispatch_keep_their_order() -> None:
    slot = Slot(pool(), up=(A,))
    one, two = slot.come(A), slot.come(A)

    slot.tell(e.DispatchRefused(one))
    slot.tell(e.DispatchRefused(two))
    three = slot.come(A)
    slot.tell(e.Checked(A, slot.view().epoch, up=True))

    assert [g.ticket for _, g in slot.said(c.Grant)] == [one, two, one, two, three]


@pytest.mark.parametrize(("others", "end"), [((B,), 80.0), ((B, C), 50.0)])
def test_h5_a_turn_ends_after_max_turn_divided_by_the_members_waited_for(
    others: tuple[str, ...], end: float
) -> None:
    slot = Slot(pool("a", "b", "c")).resident(A, at=10.0)
    slot.come(A)
    slot.at(20.0).come(B)
    if C in others:
        slot.at(30.0).come(C)

    early = slot.at(end - 0.001).come(A)
    late = slot.at(end).come(A)

    assert slot.granted(early) == end - 0.001
    assert slot.granted(late) is None
    assert slot.notes(c.NoteKind.TURN_ENDED)[-1][1].fields["reason"] == "turn"


def test_h5_a_turn_counts_from_the_landing_when_that_is_later() -> None:
    slot = Slot(pool(max_turn_s=5.0))
    mine = slot.come(A)
    slot.at(1.0).come(B)
    slot.at(30.0).loaded()
    assert slot.granted(mine) == 30.0

    early = slot.at(34.999).come(A)
    late = slot.at(35.0).come(A)

    assert slot.granted(early) == 34.999
    assert slot.granted(late) is None


def test_h5_a_turn_ends_early_for_a_hold_that_can_still_be_met() -> None:
    # needed: 1.5 x (1 s unload + 10 s load) + 5 s drain = 21.5 s before the deadline at 80 s
    slot = Slot(pool(), up=(A,))
    slot.come(A)
    slot.at(20.0).come(B, patience=60.0)

    early = slot.at(58.499).come(A)
    late = slot.at(58.5).come(A)

    assert slot.granted(early) == 58.499
    assert slot.granted(late) is None
    assert slot.notes(c.NoteKind.TURN_ENDED)[-1][1].fields["reason"] == "deadline"


def test_h5_a_turn_is_not_given_up_for_a_hold_that_cannot_be_met() -> None:
    slot = Slot(pool(), up=(A,))
    slot.come(A)
    hopeless = slot.at(20.0).come(B, patience=10.0)

    early = slot.at(79.999).come(A)
    late = slot.at(80.0).come(A)

    refusal = slot.refused(hopeless)
    assert refusal is not None
    assert refusal[0] == 30.0
    assert slot.granted(early) == 79.999
    assert slot.granted(late) is None


def test_h5_the_second_in_line_counts_with_the_swaps_before_it() -> None:
    # c needs (1.5 x 11 + 5) for b before it and as much again for itself: 43 s before 120 s
    slot = Slot(pool("a", "b", "c", max_turn_s=1000.0), up=(A,))
    slot.come(A)
    slot.at(10.0).come(B)
    slot.at(20.0).come(C, patience=100.0)

    early = slot.at(76.999).come(A)
    late = slot.at(77.0).come(A)

    assert slot.granted(early) == 76.999
    assert slot.granted(late) is None


def test_h5_admission_stays_closed_until_the_unload_even_for_the_resident_itself() -> None:
    slot = Slot(pool(max_turn_s=5.0), up=(A,))
    busy = slot.come(A)
    slot.come(B)
    late = slot.at(6.0).come(A)

    slot.at(50.0).finish(busy)
    assert slot.granted(late) is None
    slot.answer()
    slot.unloaded()
    slot.at(60.0).loaded()
    slot.finish(slot.last(c.Grant).ticket)
    slot.answer()
    slot.unloaded()
    slot.at(70.0).loaded()

    assert slot.granted(late) == 70.0


def test_h6_an_idle_resident_is_kept_a_moment_after_its_last_answer() -> None:
    slot = Slot(pool(linger_s=2.0), up=(A,))
    one = slot.come(A)
    slot.at(20.0).come(B)
    slot.at(30.0).finish(one)

    two = slot.at(31.0).come(A)
    slot.at(31.5).finish(two)
    slot.at(33.499)
    assert slot.said(c.ProbeIdle) == []
    slot.at(33.5)

    assert [t for t, _ in slot.said(c.ProbeIdle)] == [33.5]
    assert slot.notes(c.NoteKind.TURN_ENDED)[-1][1].fields["reason"] == "linger"


@pytest.mark.parametrize(("load_s", "linger_s"), [(3.0, 1.0), (10.0, 2.0)])
def test_h6_linger_is_a_quarter_of_the_swap_and_at_most_two_seconds(
    load_s: float, linger_s: float
) -> None:
    slot = Slot(pool(linger_s=None, expected_load_s=load_s), up=(A,))
    ticket = slot.come(A)
    slot.at(5.0).come(B)
    slot.at(10.0).finish(ticket)

    slot.at(60.0)

    assert [t for t, _ in slot.said(c.ProbeIdle)] == [10.0 + linger_s]


def test_h6_linger_ends_with_the_turn() -> None:
    slot = Slot(pool(linger_s=10.0, max_turn_s=15.0), up=(A,))
    ticket = slot.come(A)
    slot.at(5.0).come(B)
    slot.at(18.0).finish(ticket)

    slot.at(60.0)

    assert [t for t, _ in slot.said(c.ProbeIdle)] == [20.0]


def test_h6_who_answered_nobody_is_not_kept() -> None:
    slot = Slot(pool(linger_s=10.0), up=(A,))

    slot.at(5.0).come(B)

    assert [t for t, _ in slot.said(c.ProbeIdle)] == [5.0]


def test_four_hundred_holds_with_parallel_two_do_not_keep_another_member_waiting() -> None:
    slot = Slot(pool(parallel=2, max_turn_s=60.0))
    for _ in range(400):
        slot.come(B, patience=3000.0)
    slot.at(10.0).loaded()
    other = slot.at(20.0).come(A, patience=3000.0)

    out = [g.ticket for _, g in slot.said(c.Grant)]
    for second in range(21, 200):
        slot.at(float(second))
        if slot.said(c.ProbeIdle):
            break
        known = len(slot.said(c.Grant))
        for ticket in out:
            slot.finish(ticket)
        out = [g.ticket for _, g in slot.said(c.Grant)[known:]]
        assert len(out) <= 2
    slot.answer()
    slot.unloaded()
    slot.at(slot.now + 10.0).loaded()

    assert slot.unloads() == [(81.0, B)]
    assert slot.granted(other) == 91.0
    assert slot.view().members[1].held == 400 - 2 * 60


def test_h11_a_full_router_refuses_and_the_resident_is_served_all_the_same() -> None:
    slot = Slot(pool(), up=(A,), bounds=Bounds(max_held=2))
    slot.come(A)
    held = [slot.come(B) for _ in range(3)]
    own = slot.come(A)

    refusal = slot.refused(held[2])
    assert refusal is not None
    assert refusal[1].code is c.RefusalCode.QUEUE_FULL
    assert refusal[1].retry_after_s is not None
    assert slot.refused(held[1]) is None
    assert slot.granted(own) == 0.0


def test_h11_a_key_has_its_own_bound() -> None:
    slot = Slot(pool(), up=(A,), bounds=Bounds(max_held_per_key=1))
    one = slot.come(B, key="k")
    two = slot.come(B, key="k")
    other = slot.come(B, key="l")
    anonymous = [slot.come(B) for _ in range(3)]

    refusal = slot.refused(two)
    assert refusal is not None
    assert refusal[1].code is c.RefusalCode.RATE_LIMIT_EXCEEDED
    assert all(slot.refused(t) is None for t in (one, other, *anonymous))
    slot.tell(e.Departed(one))
    assert slot.refused(slot.come(B, key="k")) is None
