"""Draining, and demand that ends or stays: rules H7, H7a, H8 and H8a, in exact times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from modelpool_router.core import commands as c
from modelpool_router.core import events as e
from sim_slot import A, B, C, Slot, pool


def test_h7_leases_end_by_themselves_then_the_engine_is_asked_then_it_is_unloaded() -> None:
    slot = Slot(pool(max_turn_s=0.0), up=(A,))
    streams = [slot.come(A), slot.come(A)]
    slot.at(1.0).come(B)

    slot.at(5.0).finish(streams[0])
    assert slot.said(c.ProbeIdle) == []
    assert [type(k) for k in slot.at(9.0).finish(streams[1])] == [c.ProbeIdle]
    assert [type(k) for k in slot.at(9.3).answer()] == [c.Unload]

    assert slot.unloads() == [(9.3, A)]
    assert slot.said(c.EndLease) == []


def test_h7_a_member_without_an_idle_probe_is_unloaded_when_drained() -> None:
    slot = Slot(pool(max_turn_s=0.0, probes=False), up=(A,))
    stream = slot.come(A)
    slot.come(B)

    slot.at(4.0).finish(stream)

    assert slot.unloads() == [(4.0, A)]
    assert slot.said(c.ProbeIdle) == []


def test_h7_an_answer_that_comes_after_admission_reopened_unloads_nobody() -> None:
    slot = Slot(pool(), up=(A,))
    left = slot.at(20.0).come(B)
    first = slot.last(c.ProbeIdle).probe
    slot.at(21.0).tell(e.Departed(left))
    busy = slot.at(22.0).come(A)
    assert slot.granted(busy) == 22.0
    slot.at(23.0).come(B)
    slot.at(24.0).finish(busy)
    second = slot.last(c.ProbeIdle).probe

    assert slot.tell(e.IdleAnswered(first, e.Idleness.IDLE)) == []
    assert slot.unloads() == []
    slot.at(25.0).tell(e.IdleAnswered(second, e.Idleness.IDLE))

    assert slot.unloads() == [(25.0, A)]


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [(e.Idleness.BUSY, "PodsBusy"), (e.Idleness.UNREACHABLE, "IdleCheckFailed")],
)
def test_h7_busy_or_unreachable_defers_with_growing_pauses_and_never_forces(
    verdict: e.Idleness, reason: str
) -> None:
    slot = Slot(pool(), up=(A,))
    slot.come(B, patience=1000.0)

    for t in (1.0, 3.0, 7.0, 15.0, 30.0, 45.0):
        slot.answer(verdict)
        slot.at(t)

    assert [t for t, _ in slot.said(c.ProbeIdle)] == [0.0, 1.0, 3.0, 7.0, 15.0, 30.0, 45.0]
    notes = [n.fields for _, n in slot.notes(c.NoteKind.SWAP_DEFERRED)]
    assert {n["reason"] for n in notes} == {reason}
    assert [n["retry_s"] for n in notes] == [1.0, 2.0, 4.0, 8.0, 15.0, 15.0]
    assert slot.unloads() == []
    assert slot.view().closing_reason == "idle"


def test_h7_a_deferred_swap_reopens_admission_until_the_next_attempt() -> None:
    slot = Slot(pool(max_turn_s=5.0), up=(A,))
    stream = slot.come(A)
    slot.come(B)
    held = slot.at(6.0).come(A)
    slot.at(10.0).finish(stream)
    slot.answer(e.Idleness.BUSY)

    assert slot.granted(held) == 10.0
    newcomer = slot.at(10.9).come(A)
    late = slot.at(11.0).come(A)

    assert slot.granted(newcomer) == 10.9
    assert slot.granted(late) is None
    slot.at(12.0).finish(held, newcomer)
    slot.answer()
    assert slot.unloads() == [(12.0, A)]


def test_h7_pauses_start_small_again_after_the_reason_to_swap_was_gone() -> None:
    slot = Slot(pool(), up=(A,))
    ticket = slot.come(B)
    slot.answer(e.Idleness.BUSY)
    slot.at(1.0).answer(e.Idleness.BUSY)
    slot.tell(e.Departed(ticket))
    slot.at(100.0).come(B)

    slot.answer(e.Idleness.BUSY)

    assert slot.notes(c.NoteKind.SWAP_DEFERRED)[-1][1].fields["retry_s"] == 1.0


def test_h7_drain_timeout_ends_what_is_left_and_waits_for_its_end() -> None:
    slot = Slot(pool(max_turn_s=0.0, drain_timeout_s=5.0), up=(A,))
    stream = slot.come(A)
    slot.at(20.0).come(B)

    slot.at(24.999)
    assert slot.said(c.EndLease) == []
    slot.at(30.0)
    assert [(t, k.ticket, k.reason) for t, k in slot.said(c.EndLease)] == [
        (25.0, stream, "drain_timeout")
    ]
    assert slot.said(c.ProbeIdle) == []
    slot.finish(stream)
    slot.answer()

    assert slot.unloads() == [(30.0, A)]


def test_h7_without_drain_timeout_a_stream_is_never_ended() -> None:
    slot = Slot(pool(max_turn_s=0.0, swap_budget_s=50.0), up=(A,))
    slot.come(A)

    for t in range(0, 10_000, 60):
        slot.at(float(t)).come(B)

    assert slot.said(c.EndLease) == []
    assert slot.unloads() == []


def test_h7a_max_generation_ends_long_leases_only_while_somebody_else_waits() -> None:
    slot = Slot(pool(max_generation_s=30.0), up=(A,))
    old = slot.come(A)
    slot.at(50.0)
    assert slot.said(c.EndLease) == []

    young = slot.come(A)
    slot.at(60.0).come(B)
    slot.at(79.0)
    assert [(t, k.ticket) for t, k in slot.said(c.EndLease)] == [(60.0, old)]
    slot.at(100.0)

    assert [(t, k.ticket, k.reason) for t, k in slot.said(c.EndLease)] == [
        (60.0, old, "max_generation"),
        (80.0, young, "max_generation"),
    ]


def test_h7a_a_hung_resident_is_lost_and_unloaded_under_its_leases() -> None:
    slot = Slot(pool(), up=(A,))
    epoch = slot.view().epoch
    stream = slot.come(A)
    waiting = slot.come(B)

    for t in range(10, 71, 10):
        slot.at(float(t)).tell(e.HealthSeen(A, epoch, healthy=False, progress_at=5.0))

    assert [(t, k.ticket, k.reason) for t, k in slot.said(c.EndLease)] == [
        (70.0, stream, "resident_hung")
    ]
    assert slot.unloads() == [(70.0, A)]
    slot.finish(stream)
    slot.at(75.0).unloaded()
    slot.at(80.0).loaded()
    assert slot.granted(waiting) == 80.0


def test_h7a_a_lease_that_moves_or_a_probe_that_answers_keeps_the_resident() -> None:
    moving, answering = Slot(pool(), up=(A,)), Slot(pool(), up=(A,))
    for slot in (moving, answering):
        slot.come(A)
    epoch = moving.view().epoch

    for t in range(10, 1000, 10):
        seen = e.HealthSeen(A, epoch, healthy=False, progress_at=t - 9.0)
        moving.at(float(t)).tell(seen)
        healthy = t % 50 == 0
        answering.at(float(t)).tell(e.HealthSeen(A, epoch, healthy=healthy, progress_at=5.0))

    assert moving.unloads() == []
    assert answering.unloads() == []


@pytest.mark.parametrize("phase", ["draining", "probing"])
def test_h8_admission_reopens_when_every_foreign_demand_ends(phase: str) -> None:
    slot = Slot(pool(max_turn_s=0.0), up=(A,))
    stream = slot.come(A)
    foreign = slot.at(1.0).come(B)
    own = slot.at(2.0).come(A)
    if phase == "probing":
        slot.finish(stream)

    slot.at(3.0).tell(e.Departed(foreign))

    assert slot.granted(own) == 3.0
    slot.finish(own)
    assert slot.unloads() == []


def test_h8_an_idle_answer_behind_a_stalled_loop_does_not_displace_for_demand_that_ended() -> None:
    slot = Slot(pool(swap_budget_s=0.0), up=(A,))
    slot.come(B)  # told to come back in 11 s, waited for until 41 s

    slot.now = 41.0  # nobody ticked: the answer is handled first
    slot.answer()

    assert slot.unloads() == []
    assert slot.notes(c.NoteKind.TURN_REOPENED)[-1][0] == 41.0


def test_h8_the_target_is_chosen_again_between_unload_and_load() -> None:
    slot = Slot(pool("a", "b", "c"), up=(A,))
    left = slot.come(B)
    slot.answer()
    slot.at(0.5).come(C)

    slot.at(0.6).tell(e.Departed(left))
    slot.at(1.0).unloaded()

    assert slot.loads() == [(1.0, C)]


def test_h8_if_nobody_waits_any_more_the_member_that_caused_the_unload_is_loaded() -> None:
    slot = Slot(pool(default=A), up=(A,))
    left = slot.come(B)
    slot.answer()

    slot.tell(e.Departed(left))
    slot.at(1.0).unloaded()

    assert slot.loads() == [(1.0, B)]


def test_h8_the_resident_may_be_wanted_back_before_anything_is_loaded() -> None:
    slot = Slot(pool(), up=(A,))
    left = slot.come(B)
    slot.answer()
    slot.tell(e.Departed(left))
    again = slot.at(0.5).come(A)

    slot.at(1.0).unloaded()

    assert slot.loads() == [(1.0, A)]
    slot.at(9.0).loaded()
    assert slot.granted(again) == 9.0


def test_h8_a_started_load_is_finished_although_everybody_left_and_a_retry_finds_it_warm() -> None:
    slot = Slot(pool())
    left = slot.come(A)

    slot.at(1.0).tell(e.Departed(left))
    slot.at(10.0).loaded()
    retry = slot.at(30.0).come(A)

    assert slot.loads() == [(0.0, A)]
    assert slot.said(c.CancelLoad) == []
    assert slot.granted(retry) == 30.0


def test_h8_a_client_that_left_causes_no_later_swap() -> None:
    slot = Slot(pool(), up=(A,))
    stream = slot.come(A)
    left = slot.come(B)

    slot.at(1.0).tell(e.Departed(left))
    slot.finish(stream)
    slot.at(10_000.0)

    assert slot.said(c.ProbeIdle) == []


def test_h8a_a_refused_hold_leaves_its_demand_behind() -> None:
    slot = Slot(pool(max_turn_s=1000.0), up=(A,))
    stream = slot.come(A)
    refused = slot.come(B, patience=10.0)
    slot.at(30.0).finish(stream)
    assert slot.refused(refused) is not None

    slot.answer()
    slot.at(31.0).unloaded()

    assert slot.loads() == [(31.0, B)]


def test_h8a_what_is_left_behind_ends_thirty_seconds_after_the_client_should_be_back() -> None:
    slot = Slot(pool(max_turn_s=1000.0, expected_load_s=10.0), up=(A,))
    stream = slot.come(A)
    refused = slot.come(B, patience=10.0)
    slot.at(10.0)
    refusal = slot.refused(refused)
    assert refusal is not None
    assert refusal[1].retry_after_s == 60.0  # the turn of a goes on for long

    slot.at(99.9)
    assert slot.view().members[1].wanted
    slot.at(100.0)
    assert not slot.view().members[1].wanted
    slot.finish(stream)

    assert slot.said(c.ProbeIdle) == []


def test_h8a_two_impatient_clients_do_not_push_each_other_out_for_ever() -> None:
    # Each waits 5 s and is told to come back when its member, 10 s of loading, is there.
    slot = Slot(pool(max_turn_s=0.0, swap_budget_s=5.0, probes=False))
    a, b = slot.come(A), slot.come(B)

    slot.at(10.0).loaded()
    refusal = slot.refused(a)
    assert refusal is not None
    assert refusal[1].retry_after_s is not None
    back = 5.0 + refusal[1].retry_after_s
    slot.at(back)
    assert slot.unloads() == []
    again = slot.come(A)

    assert slot.granted(again) == back
    assert slot.refused(b) is not None
    slot.finish(again)
    assert slot.unloads() == [(back, A)]


def test_swap_budget_zero_refuses_at_once_and_a_retry_after_the_load_is_served() -> None:
    slot = Slot(pool(swap_budget_s=0.0))
    refused = slot.at(5.0).come(A)

    refusal = slot.refused(refused)
    assert refusal is not None
    assert refusal[0] == 5.0
    assert refusal[1].retry_after_s == 10.0
    assert slot.loads() == [(5.0, A)]
    slot.at(14.0).loaded()
    retry = slot.at(15.0).come(A)

    assert slot.granted(retry) == 15.0
    assert slot.loads() == [(5.0, A)]


def test_swap_budget_zero_displaces_the_resident_after_its_turn() -> None:
    slot = Slot(pool(swap_budget_s=0.0, max_turn_s=20.0), up=(A,))
    stream = slot.come(A)
    slot.at(5.0).come(B)

    slot.at(20.0).finish(stream)
    slot.answer()

    assert slot.unloads() == [(20.0, A)]


def test_a_changed_command_or_rule_leaves_streams_alone() -> None:
    slot = Slot(pool(max_turn_s=60.0), up=(A,))
    stream = slot.come(A)
    slot.at(1.0).come(B)

    slot.tell(e.Reconfigured(replace(slot.spec, max_turn_s=5.0)))
    late = slot.at(6.0).come(A)

    assert slot.said(c.EndLease) == []
    assert slot.granted(late) is None
    slot.finish(stream)
    slot.answer()
    assert slot.unloads() == [(6.0, A)]
