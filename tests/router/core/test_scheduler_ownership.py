"""Who holds the slot: rules O1 to O5, commands of people, and the right to act."""

from __future__ import annotations

from dataclasses import replace

from modelpool_router.core import commands as c
from modelpool_router.core import events as e
from modelpool_router.core.view import SlotState
from sim_slot import A, B, C, Slot, pool


def test_nothing_happens_before_the_pool_was_looked_at() -> None:
    slot = Slot(pool(default=A), observe=False)

    early = slot.come(B)
    slot.at(5.0)

    assert slot.loads() == []
    assert slot.granted(early) is None
    slot.tell(e.Observed())
    assert slot.loads() == [(5.0, B)]


def test_what_a_start_waits_for_is_told_until_it_has_come_true() -> None:
    slot = Slot(pool(), observe=False)
    refused = slot.come(B, patience=8.0)
    slot.at(4.0).tell(e.ObserveFailed("it still runs", "stop it"))
    slot.at(5.0).tell(e.ObserveFailed("it still runs", "stop it"))

    obstacle = slot.view().obstacle
    assert obstacle is not None
    assert (obstacle.since_s, obstacle.tries) == (5.0, 2)
    assert (obstacle.error, obstacle.way_out) == ("it still runs", "stop it")
    told = slot.notes(c.NoteKind.OBSERVE_FAILED)
    assert [(t, note.fields["detail"]) for t, note in told] == [(4.0, "it still runs")], "once"

    slot.at(6.0).tell(e.ObserveFailed("it runs as root"))
    obstacle = slot.view().obstacle
    assert obstacle is not None and obstacle.way_out
    assert len(slot.notes(c.NoteKind.OBSERVE_FAILED)) == 2, "these words are new"

    slot.at(8.0)
    refusal = slot.refused(refused)
    assert refusal is not None and obstacle.waits_for in refusal[1].reason

    slot.tell(e.Observed())
    assert slot.view().obstacle is None
    slot.tell(e.ObserveFailed("late"))
    assert slot.view().obstacle is None


def test_what_an_unload_waits_for_is_told_until_it_is_proven() -> None:
    slot = Slot(pool(), up=(A,))
    slot.at(10.0).come(B)
    slot.answer()
    assert slot.view().obstacle is None

    slot.at(15.0).unload_failed()
    slot.at(16.0).unload_failed()

    obstacle = slot.view().obstacle
    assert obstacle is not None
    assert obstacle.waits_for == "proof that a is gone"
    assert (obstacle.since_s, obstacle.tries, obstacle.error) == (6.0, 2, "still there")
    slot.at(17.0).unloaded()
    assert slot.view().obstacle is None


def test_what_an_eviction_waits_for_is_told_until_it_is_proven() -> None:
    slot = Slot(pool(), up=(A, B))
    slot.answer()
    slot.at(3.0).unload_failed()

    obstacle = slot.view().obstacle
    assert obstacle is not None and obstacle.waits_for == "proof that b is gone"
    slot.at(10.0).unloaded()
    assert slot.view().obstacle is None


def test_o1_the_target_starts_only_when_the_incumbent_is_proven_gone() -> None:
    slot = Slot(pool(), up=(A,))
    slot.at(10.0).come(B)
    slot.answer()
    assert slot.unloads() == [(10.0, A)]

    slot.at(15.0)
    assert slot.loads() == []
    slot.unload_failed()
    slot.at(16.0)
    assert slot.unloads() == [(10.0, A), (16.0, A)]
    assert slot.loads() == []
    slot.at(17.0).unloaded()

    assert slot.loads() == [(17.0, B)]


def test_o1_an_unload_that_cannot_be_proven_is_tried_again_with_growing_pauses() -> None:
    slot = Slot(pool(), up=(A,))
    slot.come(B, patience=1000.0)
    slot.answer()

    for _ in range(6):
        slot.unload_failed()
        due = slot.scheduler.next_deadline()
        assert due is not None
        slot.at(due)

    assert [t for t, _ in slot.unloads()] == [0.0, 1.0, 3.0, 7.0, 15.0, 30.0, 45.0]


def test_o1_a_stale_report_of_an_older_epoch_proves_nothing() -> None:
    slot = Slot(pool(), up=(A,))
    first = slot.come(B)
    slot.answer()
    old = slot.last(c.Unload).epoch
    slot.unloaded()
    slot.at(5.0).loaded()
    slot.finish(first)
    slot.come(A)
    slot.answer()

    assert slot.tell(e.Unloaded(B, old)) == []
    assert slot.tell(e.Loaded(A, old)) == []
    assert slot.loads() == [(0.0, B)]
    slot.unloaded()
    assert slot.loads() == [(0.0, B), (5.0, A)]


def test_o1_of_several_found_up_one_stays_and_the_rest_goes_before_anything_is_loaded() -> None:
    slot = Slot(pool("a", "b", "c"), up=(A, B))

    slot.come(A)
    waiting = slot.come(C)
    assert slot.granted(waiting) is None
    assert slot.loads() == []
    slot.answer()

    assert slot.unloads() == [(0.0, B)]
    assert [g.member for _, g in slot.said(c.Grant)] == [A]


def test_o1_an_intruder_that_died_or_is_half_down_is_not_asked_whether_it_is_idle() -> None:
    slot = Slot(pool("a", "b", "c"), up=(A, B))
    slot.answer(e.Idleness.UNREACHABLE)
    slot.at(0.5).tell(e.ResidentLost(B, slot.view().epoch))
    assert slot.unloads() == [(0.5, B)]

    slot.unload_failed()
    slot.at(1.5)

    assert slot.unloads() == [(0.5, B), (1.5, B)]
    assert len(slot.said(c.ProbeIdle)) == 1


def test_o1_a_late_proof_of_an_older_epoch_does_not_clear_an_intruder_away() -> None:
    slot = Slot(pool("a", "b", "c"), up=(A, B))
    slot.answer()

    slot.tell(e.Unloaded(B, type(slot.view().epoch)(0)))
    slot.come(C)

    assert [probe.member for _, probe in slot.said(c.ProbeIdle)] == [B]
    assert slot.loads() == []


def test_o1_who_is_preferred_or_default_or_first_stays() -> None:
    preferred = Slot(pool(default=B), observe=False)
    preferred.tell(e.Observed((A, B), prefer=A))
    default = Slot(pool(default=B), up=(A, B))
    first = Slot(pool(), up=(B, A))

    assert preferred.view().resident == A
    assert default.view().resident == B
    assert first.view().resident == A


def test_o2_no_timer_moves_the_resident() -> None:
    slot = Slot(pool(default=B), up=(A,))

    slot.at(1_000_000.0)

    assert slot.view().resident == A
    assert slot.scheduler.next_deadline() is None


def test_o3_the_default_is_warmed_once_when_the_pool_is_found_cold() -> None:
    slot = Slot(pool(default=B))
    assert slot.loads() == [(0.0, B)]

    slot.at(3.0).load_failed()
    slot.unloaded()
    slot.at(10_000.0)

    assert slot.loads() == [(0.0, B)]


def test_o3_demand_outranks_warming() -> None:
    slot = Slot(pool(default=B), observe=False)
    slot.come(A)

    slot.tell(e.Observed())

    assert slot.loads() == [(0.0, A)]


def test_o3_a_default_that_fails_blocks_nobody() -> None:
    slot = Slot(pool(default=B))
    waiting = slot.come(A)

    slot.at(3.0).load_failed()
    slot.unloaded()

    assert slot.loads() == [(0.0, B), (3.0, A)]
    slot.at(5.0).loaded()
    assert slot.granted(waiting) == 5.0


def test_o3_a_lost_resident_leaves_a_cold_pool_and_the_default_is_warmed() -> None:
    slot = Slot(pool(default=B), up=(A,))

    slot.at(100.0).lose(A)
    slot.at(101.0).unloaded()

    assert slot.loads() == [(101.0, B)]


def test_o3_a_default_that_dies_at_once_is_not_warmed_again_and_again() -> None:
    slot = Slot(pool(default=B))
    slot.at(5.0).loaded()

    slot.at(6.0).lose(B)
    slot.unloaded()
    slot.at(100_000.0)

    assert slot.loads() == [(0.0, B)]


def test_o3_a_released_pool_stays_empty_until_demand_even_if_that_demand_fails() -> None:
    slot = Slot(pool(default=B), released=True)
    slot.at(100.0)
    assert slot.loads() == []

    slot.come(A)
    slot.at(101.0).load_failed()
    slot.unloaded()
    slot.at(10_000.0)

    assert slot.loads() == [(100.0, A)]


def test_o3_default_with_idle_unload_does_not_loop() -> None:
    slot = Slot(pool(default=A, idle_unload_after_s=30.0))
    slot.at(5.0).loaded()

    slot.at(35.0).answer()
    slot.at(36.0).unloaded()
    slot.at(100_000.0)

    assert slot.unloads() == [(35.0, A)]
    assert slot.loads() == [(0.0, A)]
    assert slot.view().released


def test_o4_a_new_default_moves_nothing_until_the_pool_is_cold_again() -> None:
    slot = Slot(pool(default=A), up=(A,))

    slot.tell(e.Reconfigured(replace(slot.spec, default=B)))
    slot.at(10_000.0)
    assert slot.unloads() == []
    slot.lose(A)
    slot.unloaded()

    assert slot.loads() == [(10_000.0, B)]


def test_o5_idle_unload_counts_from_the_last_answer() -> None:
    slot = Slot(pool(idle_unload_after_s=30.0), up=(A,))
    ticket = slot.at(20.0).come(A)
    slot.at(25.0).finish(ticket)

    slot.at(54.999)
    assert slot.said(c.ProbeIdle) == []
    slot.at(55.0).answer()

    assert slot.unloads() == [(55.0, A)]
    assert [n.fields["reason"] for _, n in slot.notes(c.NoteKind.RELEASED)] == []
    slot.unloaded()
    assert [n.fields["reason"] for _, n in slot.notes(c.NoteKind.RELEASED)] == ["idle_unload"]


def test_o5_a_request_during_the_probe_of_an_idle_unload_is_served_at_once() -> None:
    slot = Slot(pool(idle_unload_after_s=30.0), up=(A,))
    slot.at(30.0)

    ticket = slot.at(30.2).come(A)
    slot.at(30.4).answer()

    assert slot.granted(ticket) == 30.2
    assert slot.unloads() == []


def test_o5_a_request_during_the_unload_loads_afresh() -> None:
    slot = Slot(pool(idle_unload_after_s=30.0), up=(A,))
    slot.at(30.0).answer()

    ticket = slot.at(30.5).come(A)
    slot.at(31.0).unloaded()
    assert slot.loads() == [(31.0, A)]
    slot.at(40.0).loaded()

    assert slot.granted(ticket) == 40.0
    assert not slot.view().released


def test_o5_an_idle_resident_gives_way_to_the_default_when_that_is_configured() -> None:
    slot = Slot(pool(default=B, reclaim_default_after_s=60.0), up=(A,))

    slot.at(60.0).answer()
    slot.at(61.0).unloaded()

    assert slot.unloads() == [(60.0, A)]
    assert slot.loads() == [(61.0, B)]


def test_o5_a_timer_that_was_switched_off_during_the_probe_unloads_nobody() -> None:
    unload = Slot(pool(idle_unload_after_s=30.0), up=(A,))
    reclaim = Slot(pool(default=B, reclaim_default_after_s=30.0), up=(A,))

    for slot in (unload, reclaim):
        slot.at(30.0)
        off = replace(slot.spec, idle_unload_after_s=None, reclaim_default_after_s=None)
        slot.tell(e.Reconfigured(off))
        slot.answer()

    assert unload.unloads() == []
    assert reclaim.unloads() == []


def test_o5_a_default_that_changes_during_a_reclaim_is_the_one_that_is_loaded() -> None:
    slot = Slot(pool("a", "b", "c", default=B, reclaim_default_after_s=30.0), up=(A,))
    slot.at(30.0).answer()

    slot.tell(e.Reconfigured(replace(slot.spec, default=C)))
    slot.at(31.0).unloaded()

    assert slot.loads() == [(31.0, C)]


def test_o5_reclaim_waits_for_the_back_off_of_the_default() -> None:
    slot = Slot(pool(default=B, reclaim_default_after_s=1.0, restore=False))
    slot.load_failed()  # back-off: 5 s
    slot.unloaded()
    slot.come(A)
    slot.at(0.5).loaded()
    slot.finish(next(g.ticket for _, g in slot.said(c.Grant)))

    slot.at(100.0)

    assert slot.said(c.ProbeIdle)[0][0] == 5.0


def test_a_person_empties_the_slot_and_it_stays_empty_until_demand() -> None:
    slot = Slot(pool(default=A), up=(A,))
    ticket = slot.come(A)

    slot.at(1.0).tell(e.UnloadAsked())
    late = slot.at(2.0).come(A)
    assert slot.granted(late) is None
    slot.at(3.0).finish(ticket)
    slot.answer()
    slot.tell(e.Departed(late))
    slot.at(4.0).unloaded()
    slot.at(1000.0)

    assert slot.loads() == []
    assert slot.view().released
    slot.come(A)
    assert slot.loads() == [(1000.0, A)]


def test_a_person_who_asks_for_a_member_obeys_turns() -> None:
    slot = Slot(pool(max_turn_s=10.0), up=(A,))
    slot.at(5.0).come(A)

    slot.at(6.0).tell(e.LoadAsked(B))
    newcomer = slot.at(15.9).come(A)
    late = slot.at(16.0).come(A)

    assert slot.granted(newcomer) == 15.9
    assert slot.granted(late) is None


def test_a_person_who_asks_for_a_member_that_is_being_emptied_gets_it_loaded_again() -> None:
    """Unload, then load: what a person does so that a changed command counts."""
    slot = Slot(pool(), up=(A,))
    ticket = slot.come(A)
    slot.at(1.0).tell(e.UnloadAsked())

    slot.at(2.0).tell(e.LoadAsked(A))
    slot.at(3.0).finish(ticket)
    slot.answer()
    slot.at(4.0).unloaded()

    assert slot.unloads() == [(3.0, A)]
    assert slot.loads() == [(4.0, A)]
    assert not slot.view().released


def test_a_person_who_asks_while_an_unload_is_put_off_gets_it_loaded_again() -> None:
    slot = Slot(pool(), up=(A,))
    slot.tell(e.UnloadAsked())
    slot.answer(e.Idleness.BUSY)

    slot.at(0.5).tell(e.LoadAsked(A))
    slot.at(1.0).answer()
    slot.at(2.0).unloaded()

    assert slot.loads() == [(2.0, A)]


def test_a_person_who_asks_for_a_member_whose_turn_is_over_gets_it_back_in_its_turn() -> None:
    slot = Slot(pool(max_turn_s=0.0), up=(A,))
    ticket = slot.come(A)
    slot.at(1.0).come(B)

    slot.at(2.0).tell(e.LoadAsked(A))
    slot.at(3.0).finish(ticket)
    slot.answer()
    slot.at(4.0).unloaded()
    slot.at(5.0).loaded()
    slot.finish(*(g.ticket for _, g in slot.said(c.Grant) if g.member == B))
    slot.answer()
    slot.at(6.0).unloaded()

    assert slot.loads() == [(4.0, B), (6.0, A)]


def test_a_wish_for_a_member_that_stays_after_all_is_fulfilled() -> None:
    slot = Slot(pool(max_turn_s=0.0), up=(A,))
    slot.come(A)
    waiting = slot.at(1.0).come(B)
    slot.at(2.0).tell(e.LoadAsked(A))

    slot.at(3.0).tell(e.Departed(waiting))

    member = slot.view().member(A)
    assert member is not None and not member.wanted


def test_a_person_who_asks_for_a_resident_that_is_about_to_leave_for_idleness_keeps_it() -> None:
    slot = Slot(pool(idle_unload_after_s=30.0), up=(A,))
    slot.at(30.0)
    assert slot.said(c.ProbeIdle)

    slot.at(30.5).tell(e.LoadAsked(A))
    slot.answer()
    slot.at(60.0)
    assert slot.unloads() == []
    slot.at(61.0).answer()

    assert slot.unloads() == [(61.0, A)]


def test_a_person_who_asks_for_a_resident_in_doubt_gets_it_loaded_again_if_it_was_gone() -> None:
    slot = Slot(pool(), up=(A,))
    ticket = slot.at(100.0).come(A)
    slot.tell(e.DispatchRefused(ticket))
    slot.tell(e.Departed(ticket))

    slot.tell(e.LoadAsked(A))
    check = slot.last(c.Check)
    slot.tell(e.Checked(check.member, check.epoch, up=False))
    slot.unloaded()

    assert slot.loads() == [(100.0, A)]


def test_a_person_who_asks_ends_a_back_off() -> None:
    slot = Slot(pool())
    slot.come(B)
    slot.load_failed()
    slot.unloaded()

    slot.at(1.0).tell(e.LoadAsked(B))

    assert slot.loads() == [(0.0, B), (1.0, B)]


def test_a_paused_pool_begins_no_swap_and_goes_on_serving() -> None:
    slot = Slot(pool(max_turn_s=0.0), up=(A,))
    slot.tell(e.Paused())

    waiting = slot.come(B)
    served = slot.at(50.0).come(A)
    assert slot.granted(served) == 50.0
    slot.finish(served)
    assert slot.said(c.ProbeIdle) == []
    slot.at(60.0).tell(e.Resumed())
    slot.answer()

    assert slot.unloads() == [(60.0, A)]
    assert slot.refused(waiting) is None


def test_an_idle_answer_that_comes_while_paused_unloads_nobody() -> None:
    slot = Slot(pool(), up=(A,))
    slot.come(B)
    slot.tell(e.Paused())

    slot.answer()
    slot.tell(e.Resumed())

    assert slot.unloads() == []
    assert len(slot.said(c.ProbeIdle)) == 2


def test_a_withheld_slot_serves_its_resident_and_refuses_the_rest() -> None:
    slot = Slot(pool(), up=(A,))
    early = slot.come(B)
    slot.at(1.0).tell(e.SlotWithheld("another router holds it"))
    late = slot.at(2.0).come(B)
    own = slot.come(A)

    for ticket in (early, late):
        refusal = slot.refused(ticket)
        assert refusal is not None
        assert refusal[1].code is c.RefusalCode.SLOT_UNAVAILABLE
        assert refusal[1].reason == "another router holds it"
    assert slot.granted(own) == 2.0


def test_a_withheld_slot_is_not_touched_not_even_to_clean_up() -> None:
    slot = Slot(pool(), up=(A,))
    slot.at(10.0).tell(e.SlotWithheld("another router holds it"))

    assert slot.lose(A) == []
    slot.at(500.0)
    assert slot.unloads() == []
    slot.tell(e.SlotRegained())

    assert slot.unloads() == [(500.0, A)]


def test_a_load_that_is_overdue_is_not_cancelled_while_the_slot_is_withheld() -> None:
    slot = Slot(pool(load_timeout_s=20.0))
    slot.come(A)
    slot.tell(e.SlotWithheld("another router holds it"))
    slot.at(100.0)
    assert slot.said(c.CancelLoad) == []

    slot.tell(e.SlotRegained())

    assert [t for t, _ in slot.said(c.CancelLoad)] == [100.0]


def test_a_hung_resident_is_left_alone_while_the_slot_is_withheld() -> None:
    slot = Slot(pool(), up=(A,))
    slot.tell(e.SlotWithheld("another router holds it"))

    for t in (0.0, 30.0, 60.0, 90.0):
        slot.at(t).tell(e.HealthSeen(A, slot.view().epoch, healthy=False, progress_at=0.0))

    assert slot.view().resident == A
    assert slot.unloads() == []


def test_stopping_refuses_what_is_held_and_moves_nothing_any_more() -> None:
    slot = Slot(pool(load_timeout_s=20.0))
    held = slot.come(A)
    slot.at(1.0).tell(e.Stopping())
    late = slot.at(2.0).come(A)

    for ticket, t in ((held, 1.0), (late, 2.0)):
        refusal = slot.refused(ticket)
        assert refusal is not None
        assert refusal[0] == t
        assert refusal[1].code is c.RefusalCode.POOL_DRAINING
    slot.at(30.0).load_failed()
    slot.at(100.0)
    assert slot.said(c.CancelLoad) == []
    assert slot.unloads() == []


def test_a_refused_dispatch_after_stopping_is_refused_and_not_held() -> None:
    slot = Slot(pool(), up=(A,))
    ticket = slot.come(A)
    slot.tell(e.Stopping())

    slot.tell(e.DispatchRefused(ticket))

    refusal = slot.refused(ticket)
    assert refusal is not None
    assert refusal[1].code is c.RefusalCode.POOL_DRAINING
    assert slot.ledger.held == 0


def test_a_removed_resident_finishes_its_streams_and_goes() -> None:
    slot = Slot(pool(), up=(A,))
    stream = slot.come(A)
    waiting = slot.at(1.0).come(A)
    slot.finish(waiting)
    only_b = replace(slot.spec, members={B: slot.spec.members[B]})

    slot.at(2.0).tell(e.Reconfigured(only_b))
    assert slot.said(c.ProbeIdle) == []
    slot.at(9.0).finish(stream)
    slot.answer()

    assert slot.unloads() == [(9.0, A)]


def test_holds_of_a_removed_member_are_told_that_it_is_gone() -> None:
    slot = Slot(pool("a", "b", "c"), up=(A,))
    slot.come(A)
    waiting = slot.come(B)
    members = {name: slot.spec.members[name] for name in (A, C)}

    slot.tell(e.Reconfigured(replace(slot.spec, members=members)))

    refusal = slot.refused(waiting)
    assert refusal is not None
    assert refusal[1].code is c.RefusalCode.MODEL_NOT_FOUND
    assert not refusal[1].retryable
    assert slot.ledger.held == 0


def test_a_refused_dispatch_of_a_removed_member_is_told_that_it_is_gone() -> None:
    slot = Slot(pool(), up=(A,))
    ticket = slot.come(A)
    slot.tell(e.Reconfigured(replace(slot.spec, members={B: slot.spec.members[B]})))

    slot.tell(e.DispatchRefused(ticket))

    refusal = slot.refused(ticket)
    assert refusal is not None
    assert refusal[1].code is c.RefusalCode.MODEL_NOT_FOUND


def test_a_member_removed_while_it_loads_is_taken_down_after_its_landing() -> None:
    slot = Slot(pool())
    slot.come(A)
    only_b = replace(slot.spec, members={B: slot.spec.members[B]})
    slot.at(1.0).tell(e.Reconfigured(only_b))

    slot.at(5.0).loaded()
    slot.answer()

    assert slot.unloads() == [(5.0, A)]
    assert slot.view().state is SlotState.UNLOADING


def test_a_landing_that_crosses_its_own_cancellation_counts() -> None:
    slot = Slot(pool(load_timeout_s=20.0))
    ticket = slot.come(A)
    slot.at(20.0)
    assert [t for t, _ in slot.said(c.CancelLoad)] == [20.0]

    slot.loaded()

    assert slot.granted(ticket) == 20.0


def test_who_steps_aside_forwards_nothing_and_looks_afresh_when_the_slot_is_its_own_again() -> None:
    slot = Slot(pool(), up=(A,))
    running = slot.come(A)
    slot.at(1.0).tell(e.SteppedAside("router-2 holds the slot"))
    late = slot.at(2.0).come(A)
    slot.finish(running)

    refusal = slot.refused(late)
    assert refusal is not None
    assert refusal[1].code is c.RefusalCode.SLOT_UNAVAILABLE
    assert refusal[1].reason == "router-2 holds the slot"
    assert slot.view().state is SlotState.STARTING
    slot.at(3.0).tell(e.SlotRegained())
    early = slot.come(B)
    slot.tell(e.Observed((B,)))

    assert slot.granted(early) == 3.0
    assert slot.view().in_flight == 1


def test_a_report_from_before_it_stepped_aside_is_of_no_life_any_more() -> None:
    slot = Slot(pool())
    slot.come(A)
    load = slot.last(c.Load)
    slot.tell(e.SteppedAside("router-2 holds the slot"))

    slot.tell(e.Loaded(A, load.epoch))
    slot.tell(e.LoadFailed(A, load.epoch, "driver_unavailable"))

    assert slot.view().state is SlotState.STARTING
    assert slot.view().resident is None
    assert slot.unloads() == []


def test_a_swap_under_way_is_forgotten_when_it_steps_aside() -> None:
    slot = Slot(pool(), up=(A, B))
    slot.come(C)
    slot.tell(e.SteppedAside("router-2 holds the slot"))

    slot.answer()
    slot.at(900.0)

    assert slot.unloads() == []
    assert slot.scheduler.next_deadline() is None
