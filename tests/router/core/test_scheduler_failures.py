"""Loads that fail, residents that die, and what refused clients are told: H9, H10, H12, H16."""

from __future__ import annotations

import pytest

from modelpool_router.core import commands as c
from modelpool_router.core import events as e
from modelpool_router.core.estimates import Estimates
from modelpool_router.core.view import MemberStatus
from sim_slot import A, B, C, Slot, pool


def test_h9_all_waiters_of_a_failed_load_are_told_the_reason() -> None:
    slot = Slot(pool())
    waiters = [slot.come(A) for _ in range(3)]

    slot.at(2.0).load_failed("exited")

    for ticket in waiters:
        refusal = slot.refused(ticket)
        assert refusal is not None
        assert refusal[0] == 2.0
        assert refusal[1].code is c.RefusalCode.MEMBER_FAILED
        assert refusal[1].reason == "exited: exit code 1"
        assert refusal[1].retryable


def test_h9_what_cannot_help_by_trying_again_says_so() -> None:
    slot = Slot(pool())
    waiter = slot.come(A)
    slot.load_failed("command_not_found", retryable=False)
    slot.unloaded()
    late = slot.at(1.0).come(A)

    for ticket in (waiter, late):
        refusal = slot.refused(ticket)
        assert refusal is not None
        assert not refusal[1].retryable


def test_a_platform_that_does_not_do_its_part_is_no_fault_of_the_member() -> None:
    """What that took is not charged to the member, which can come up as soon as it is over."""
    waits: list[object] = []
    for reason in ("exited", e.DRIVER_UNAVAILABLE):
        slot = Slot(pool())
        held = slot.come(A)
        slot.at(75.0).load_failed(reason)
        refusal = slot.refused(held)
        assert refusal is not None and reason in refusal[1].reason
        (_, told) = slot.notes(c.NoteKind.LOAD_FAILED)[0]
        waits.append(told.fields["backoff_s"])

    assert waits == [375.0, 5.0]


def test_h9_the_back_off_doubles_and_requests_meanwhile_fail_fast() -> None:
    slot = Slot(pool())

    begins: list[float] = []
    for pause in (5.0, 10.0, 20.0, 40.0):
        slot.come(A)
        begins.append(slot.now)
        slot.load_failed()
        slot.unloaded()
        early = slot.at(slot.now + pause - 0.5).come(A)
        refusal = slot.refused(early)
        assert refusal is not None
        assert refusal[1].code is c.RefusalCode.MEMBER_BACKOFF
        assert refusal[1].retry_after_s == 1.0
        slot.at(slot.now + 0.5)

    assert slot.loads() == [(t, A) for t in begins]
    assert begins == [0.0, 5.0, 15.0, 35.0]


def test_h9_the_back_off_is_five_times_what_the_failure_cost_reload_of_others_included() -> None:
    # 1 s unload + 3 s to fail + 10 s to bring the last good one back = 14 s of the slot
    slot = Slot(pool(), up=(A,))
    slot.come(B)
    slot.answer()
    slot.at(1.0).unloaded()

    slot.at(4.0).load_failed()

    note = slot.notes(c.NoteKind.LOAD_FAILED)[-1][1].fields
    assert note["backoff_s"] == 70.0
    assert note["failures"] == 1
    slot.unloaded()
    assert slot.view().members[1].status is MemberStatus.FAILED
    assert slot.view().members[1].backoff_s == 70.0


def test_h9_a_member_in_back_off_evicts_nobody() -> None:
    slot = Slot(pool(), up=(A,))
    slot.come(B)
    slot.answer()
    slot.unloaded()
    slot.at(1.0).load_failed()
    slot.at(2.0).unloaded()
    slot.at(12.0).loaded()
    assert slot.loads() == [(0.0, B), (2.0, A)]

    slot.at(20.0).come(B)
    slot.at(50.0)

    assert slot.view().resident == A
    assert len(slot.said(c.ProbeIdle)) == 1


def test_h9_after_the_back_off_the_member_is_tried_again() -> None:
    slot = Slot(pool())
    slot.come(A)
    slot.load_failed()
    slot.unloaded()

    ticket = slot.at(5.0).come(A)
    slot.at(9.0).loaded()

    assert slot.granted(ticket) == 9.0


def test_h9_a_failed_load_gives_the_slot_to_the_next_who_waits() -> None:
    slot = Slot(pool("a", "b", "c"), up=(A,))
    slot.come(B)
    slot.answer()
    waiting = slot.come(C)
    slot.at(1.0).unloaded()

    slot.at(2.0).load_failed()
    slot.at(3.0).unloaded()
    slot.at(5.0).loaded()

    assert slot.loads() == [(1.0, B), (3.0, C)]
    assert slot.granted(waiting) == 5.0


def test_h9_the_last_good_resident_is_restored_once() -> None:
    slot = Slot(pool(), up=(A,))
    slot.come(B)
    slot.answer()
    slot.at(1.0).unloaded()
    slot.at(2.0).load_failed()
    slot.at(3.0).unloaded()

    slot.at(8.0).load_failed()
    slot.at(9.0).unloaded()
    slot.at(10_000.0)

    assert slot.loads() == [(1.0, B), (3.0, A)]


def test_h9_restoring_can_be_switched_off() -> None:
    slot = Slot(pool(restore=False), up=(A,))
    slot.come(B)
    slot.answer()
    slot.at(1.0).unloaded()

    slot.at(2.0).load_failed()
    slot.at(3.0).unloaded()
    slot.at(10_000.0)

    assert slot.loads() == [(1.0, B)]


def test_h9_nothing_is_loaded_before_the_failed_member_is_proven_gone() -> None:
    slot = Slot(pool())
    slot.come(A)
    waiting = slot.come(B)

    slot.at(2.0).load_failed()
    slot.at(10.0)
    assert slot.unloads() == [(2.0, A)]
    assert slot.loads() == [(0.0, A)]
    slot.unloaded()

    assert slot.loads() == [(0.0, A), (10.0, B)]
    assert slot.refused(waiting) is None


def test_h9_a_load_that_hangs_is_given_up_after_its_own_time_limit() -> None:
    slot = Slot(pool(load_timeout_s=40.0, swap_budget_s=300.0))
    waiter = slot.at(1.0).come(A)

    slot.at(40.999)
    assert slot.said(c.CancelLoad) == []
    slot.at(50.0)
    assert [(t, k.member) for t, k in slot.said(c.CancelLoad)] == [(41.0, A)]
    assert slot.refused(waiter) is None
    slot.load_failed("load_timeout")

    assert slot.refused(waiter) is not None
    assert slot.unloads() == [(50.0, A)]


@pytest.mark.parametrize(("lived_s", "counts"), [(29.9, True), (30.1, False)])
def test_h9_a_resident_lost_soon_after_landing_counts_as_a_failed_load(
    lived_s: float, counts: bool
) -> None:
    slot = Slot(pool())
    slot.come(A)
    slot.at(10.0).loaded()
    slot.finish(slot.last(c.Grant).ticket)

    slot.at(10.0 + lived_s).lose(A)

    assert bool(slot.notes(c.NoteKind.LOAD_FAILED)) is counts


def test_h9_the_last_words_of_a_member_that_has_served_are_not_for_clients() -> None:
    """They may quote what another client said. A load that failed has heard nobody."""
    slot = Slot(pool(parallel=1), up=(A,))
    slot.come(A)
    waiting = slot.come(A)

    words = "killed by SIGSEGV\nslot 0: prompt = 'my secret'"
    slot.at(1.0).tell(e.ResidentLost(A, slot.view().epoch, "exited", words))
    late = slot.at(2.0).come(A)

    for ticket in (waiting, late):
        refusal = slot.refused(ticket)
        assert refusal is not None
        assert "exited: killed by SIGSEGV" in refusal[1].reason
        assert "secret" not in refusal[1].reason
    member = slot.view().member(A)
    assert member is not None and "secret" in member.last_error, "for who looks after the pool"


def test_h9_soon_means_its_load_time_when_that_is_longer() -> None:
    slot = Slot(pool())
    slot.come(A)
    slot.at(100.0).loaded()

    slot.at(199.0).lose(A)

    assert len(slot.notes(c.NoteKind.LOAD_FAILED)) == 1


def test_h10_a_lost_resident_is_proven_gone_and_loaded_again_for_those_who_wait() -> None:
    slot = Slot(pool(parallel=1), up=(A,))
    stream = slot.come(A)
    waiting = slot.come(A)

    slot.at(100.0).lose(A)
    slot.finish(stream)
    assert slot.unloads() == [(100.0, A)]
    assert slot.granted(waiting) is None
    slot.at(101.0).unloaded()
    slot.at(110.0).loaded()

    assert slot.loads() == [(101.0, A)]
    assert slot.granted(waiting) == 110.0


def test_h10_a_refused_dispatch_goes_back_to_the_hold_and_nobody_is_granted_until_checked() -> None:
    slot = Slot(pool(), up=(A,))
    ticket = slot.at(1.0).come(A)

    commands = slot.at(1.1).tell(e.DispatchRefused(ticket))
    assert [type(k) for k in commands] == [c.Check]
    other = slot.at(1.2).come(A)
    assert slot.granted(other) is None
    assert slot.ledger.held == 2
    slot.at(1.5).tell(e.Checked(A, slot.view().epoch, up=True))

    assert slot.granted(ticket) == 1.5
    assert slot.granted(other) == 1.5


def test_h10_nobody_is_granted_before_the_check_although_nobody_is_held() -> None:
    slot = Slot(pool(), up=(A,))
    ticket = slot.come(A)
    slot.tell(e.DispatchRefused(ticket))
    slot.tell(e.Departed(ticket))

    newcomer = slot.at(0.5).come(A)
    assert slot.granted(newcomer) is None
    slot.at(1.0).tell(e.Checked(A, slot.view().epoch, up=True))

    assert slot.granted(newcomer) == 1.0


def test_h10_only_once() -> None:
    slot = Slot(pool(), up=(A,))
    ticket = slot.come(A)
    slot.tell(e.DispatchRefused(ticket))
    slot.tell(e.Checked(A, slot.view().epoch, up=True))

    slot.at(1.0).tell(e.DispatchRefused(ticket))

    refusal = slot.refused(ticket)
    assert refusal is not None
    assert refusal[1].code is c.RefusalCode.MEMBER_FAILED
    assert slot.ledger.held == 0


def test_h10_the_deadline_stays_its_own() -> None:
    slot = Slot(pool(), up=(A,))
    ticket = slot.come(A, patience=5.0)
    slot.at(4.0).tell(e.DispatchRefused(ticket))

    slot.at(10.0)

    refusal = slot.refused(ticket)
    assert refusal is not None
    assert refusal[0] == 5.0


def test_h10_a_check_that_finds_nothing_makes_the_resident_lost() -> None:
    slot = Slot(pool(), up=(A,))
    slot.at(100.0)
    ticket = slot.come(A)
    slot.tell(e.DispatchRefused(ticket))

    slot.at(100.5).tell(e.Checked(A, slot.view().epoch, up=False))
    slot.at(101.0).unloaded()
    slot.at(110.0).loaded()

    assert slot.unloads() == [(100.5, A)]
    assert slot.loads() == [(101.0, A)]
    assert slot.granted(ticket) == 110.0


def test_h10_a_refused_dispatch_of_a_member_that_just_failed_is_not_held() -> None:
    slot = Slot(pool())
    ticket = slot.come(A)
    slot.at(10.0).loaded()
    slot.at(10.1).lose(A)  # early: a failed load, so the member backs off

    slot.at(10.2).tell(e.DispatchRefused(ticket))

    refusal = slot.refused(ticket)
    assert refusal is not None
    assert refusal[1].code is c.RefusalCode.MEMBER_BACKOFF


def test_h12_retry_after_is_the_rest_of_the_load_that_runs() -> None:
    slot = Slot(pool(swap_budget_s=1.0), estimates=Estimates(load_s={A: 20.0}))
    ticket = slot.come(A)

    slot.at(1.0)

    refusal = slot.refused(ticket)
    assert refusal is not None
    assert refusal[0] == 1.0
    assert refusal[1].retry_after_s == 19.0


@pytest.mark.parametrize("jitter", [0.0, 0.5, 0.999])
def test_h12_retry_after_with_jitter_is_within_thirty_per_cent_of_the_rest(jitter: float) -> None:
    slot = Slot(
        pool(swap_budget_s=1.0), estimates=Estimates(load_s={A: 20.0}), jitter=lambda: jitter
    )
    ticket = slot.come(A)

    slot.at(1.0)

    refusal = slot.refused(ticket)
    assert refusal is not None
    assert refusal[1].retry_after_s is not None
    assert 19.0 <= refusal[1].retry_after_s <= 1.3 * 19.0


def test_h12_the_queue_ahead_counts() -> None:
    estimates = Estimates(load_s={A: 10.0, B: 20.0}, unload_s={A: 2.0}, drain_s={A: 3.0})
    slot = Slot(pool(swap_budget_s=1.0), estimates=estimates)
    slot.come(A, patience=100.0)
    ticket = slot.come(B)

    slot.at(1.0)

    refusal = slot.refused(ticket)
    assert refusal is not None
    assert refusal[1].retry_after_s == 9.0 + 3.0 + 2.0 + 20.0


def test_h12_retry_after_stays_between_one_and_sixty_seconds() -> None:
    slow, quick = Slot(pool(swap_budget_s=1.0)), Slot(pool(swap_budget_s=1.0))
    slow.scheduler.estimates.load_s[A] = 500.0
    quick.scheduler.estimates.load_s[A] = 1.01

    waits = []
    for slot in (slow, quick):
        ticket = slot.come(A)
        slot.at(1.0)
        refusal = slot.refused(ticket)
        assert refusal is not None
        waits.append(refusal[1].retry_after_s)

    assert waits == [60.0, 1.0]


def test_h12_the_load_time_is_learnt() -> None:
    slot = Slot(pool(swap_budget_s=1000.0, expected_load_s=60.0))
    slot.come(A)
    assert slot.view().member(A).load_estimate_s == 60.0  # type: ignore[union-attr]
    slot.at(20.0).loaded()

    member = slot.view().member(A)

    assert member is not None
    assert member.load_estimate_s == 20.0
    assert member.load_measured


def test_h16_the_view_tells_positions_reasons_and_estimates() -> None:
    slot = Slot(pool("a", "b", "c", max_turn_s=30.0)).resident(A, at=10.0)
    slot.come(A)
    slot.at(20.0).come(B)
    slot.at(25.0).come(B)

    view = slot.view()
    b = view.member(B)

    assert (view.resident, view.admission, view.held, view.in_flight) == (A, "open", 2, 1)
    assert view.turn_left_s == 25.0
    assert view.oldest_lease_s == 15.0
    assert b is not None
    assert (b.held, b.oldest_hold_s, b.status) == (2, 5.0, MemberStatus.UNLOADED)
    slot.at(50.0)
    view = slot.view()
    assert (view.admission, view.closing_reason, view.incumbent) == ("closed", "turn", A)
    assert view.target == B


def test_h16_looking_changes_nothing() -> None:
    def play(look: bool) -> list[tuple[float, c.Command]]:
        slot = Slot(pool(max_turn_s=5.0, linger_s=None), up=(A,))
        for t in range(40):
            slot.at(float(t)).come(B if t % 3 else A, patience=6.0)
            if look:
                slot.view()
                slot.scheduler.next_deadline()
        return slot.log

    assert play(look=False) == play(look=True)
