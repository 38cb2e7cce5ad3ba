"""Events and the history of swaps: bounded, in order, honest about gaps."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from modelpool_router.core.commands import Note, NoteKind
from modelpool_router.core.spec import PoolName
from modelpool_router.telemetry import EventHub, SubscriptionsFull
from modelpool_router.telemetry.events import (
    KEPT_EVENTS,
    KEPT_SWAPS,
    MAX_SUBSCRIBERS,
    QUEUED_EVENTS,
)
from poolviews import GPU0, pool_view


class Clock:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def hub(clock: Clock) -> EventHub:
    return EventHub(clock=clock)


def tell(hub: EventHub, kind: NoteKind, pool: PoolName = GPU0, **fields: Any) -> None:
    hub.publish(pool, Note(kind, fields), pool_view())


def start(hub: EventHub, number: int, pool: PoolName = GPU0, **fields: Any) -> None:
    told = {"source": "alpha", "target": "beta", "cause": "demand", "waiting": 3, **fields}
    tell(hub, NoteKind.SWAP_STARTED, pool, swap=number, **told)


def complete(hub: EventHub, number: int, pool: PoolName = GPU0, **fields: Any) -> None:
    told = {"source": "alpha", "target": "beta", "cause": "demand", "granted": 2}
    phases = {"drain_s": 1.0, "unload_s": 0.5, "load_s": 20.0}
    tell(hub, NoteKind.SWAP_COMPLETED, pool, swap=number, **{**told, **phases, **fields})


async def test_given_a_listener_when_notes_come_then_it_gets_them_in_order(hub: EventHub) -> None:
    with hub.subscribe() as subscription:
        tell(hub, NoteKind.TURN_ENDED, member="alpha", reason="turn")
        start(hub, 1)

        first, second = await subscription.next(), await subscription.next()

    assert first is not None and second is not None
    assert (first.kind, second.kind) == ("turn_ended", "swap_started")
    assert [event.id.partition("-")[2] for event in (first, second)] == ["1", "2"]
    told = json.loads(first.encoded())
    assert told["pool"] == "gpu0"
    assert told["at"] == 1_700_000_000.0
    assert told["fields"] == {"member": "alpha", "reason": "turn"}
    assert told["view"]["resident"] == "alpha"


async def test_given_a_listener_that_waits_when_a_note_comes_then_it_wakes(hub: EventHub) -> None:
    with hub.subscribe() as subscription:
        waiting = asyncio.get_running_loop().create_task(subscription.next())
        await asyncio.sleep(0)
        start(hub, 1)

        event = await asyncio.wait_for(waiting, 20)

    assert event is not None and event.kind == "swap_started"


async def test_given_an_id_that_is_known_when_resumed_then_only_what_was_missed_comes(
    hub: EventHub,
) -> None:
    start(hub, 1)
    seen = hub.last_id
    complete(hub, 1)
    tell(hub, NoteKind.TURN_ENDED)

    with hub.subscribe(seen) as subscription:
        assert subscription.resumed
        assert [event.kind for event in subscription.take()] == ["swap_completed", "turn_ended"]
    with hub.subscribe(hub.last_id) as subscription:
        assert subscription.resumed
        assert list(subscription.take()) == []


@pytest.mark.parametrize(
    "last_id", [None, "", "1", "abc-1", "{boot}-", "{boot}-x", "{boot}--1", "{boot}-99", "{boot}-²"]
)
async def test_given_an_id_that_is_not_ours_when_resumed_then_it_is_said(
    hub: EventHub, last_id: str | None
) -> None:
    start(hub, 1)
    boot = hub.last_id.partition("-")[0]

    with hub.subscribe(last_id and last_id.format(boot=boot)) as subscription:
        assert not subscription.resumed
        assert list(subscription.take()) == []


async def test_given_an_id_that_is_too_old_when_resumed_then_it_is_said(hub: EventHub) -> None:
    oldest_kept = ""
    for number in range(KEPT_EVENTS + 1):
        oldest_kept = oldest_kept or hub.last_id
        start(hub, number)
    beyond = hub.last_id.partition("-")[0] + "-1"

    with hub.subscribe(oldest_kept) as subscription:
        assert not subscription.resumed
    with hub.subscribe(beyond) as subscription:
        assert subscription.resumed
        assert len(list(subscription.take())) == KEPT_EVENTS


async def test_given_a_listener_that_is_slow_when_its_queue_is_full_then_it_learns_of_the_gap(
    hub: EventHub,
) -> None:
    with hub.subscribe() as subscription:
        for number in range(QUEUED_EVENTS + 1):
            start(hub, number)

        assert await subscription.next() is None
        event = await subscription.next()

    assert event is not None and event.fields["swap"] == QUEUED_EVENTS


async def test_given_a_wait_that_is_cancelled_when_an_event_comes_then_it_is_not_lost(
    hub: EventHub,
) -> None:
    with hub.subscribe() as subscription:
        waiting = asyncio.get_running_loop().create_task(subscription.next())
        await asyncio.sleep(0)
        start(hub, 1)
        waiting.cancel()
        await asyncio.wait([waiting])

        assert waiting.cancelled()
        event = await asyncio.wait_for(subscription.next(), 20)
        assert event is not None and event.fields["swap"] == 1


async def test_given_too_many_listeners_when_one_more_comes_then_it_is_refused(
    hub: EventHub,
) -> None:
    taken = [hub.subscribe() for _ in range(MAX_SUBSCRIBERS)]
    for each in taken:
        each.__enter__()

    with pytest.raises(SubscriptionsFull), hub.subscribe():
        pass

    taken[0].__exit__(None, None, None)
    with hub.subscribe():
        pass


async def test_given_the_end_when_listeners_wait_then_they_are_let_go(hub: EventHub) -> None:
    with hub.subscribe() as subscription:
        waiting = asyncio.get_running_loop().create_task(subscription.next())
        await asyncio.sleep(0)

        hub.close()

        assert await asyncio.wait_for(waiting, 20) is None
        assert subscription.closed
    with hub.subscribe() as late:
        assert await asyncio.wait_for(late.next(), 20) is None


def test_given_a_swap_when_it_runs_and_ends_then_its_history_says_so(
    hub: EventHub, clock: Clock
) -> None:
    start(hub, 7)
    [running] = hub.swaps()
    assert (running.outcome, running.ended_at, running.waiting) == ("running", None, 3)

    clock.now += 20.5
    complete(hub, 7)

    [swap] = hub.swaps()
    assert (swap.pool, swap.number, swap.source, swap.target) == ("gpu0", 7, "alpha", "beta")
    assert (swap.outcome, swap.cause, swap.granted) == ("completed", "demand", 2)
    assert (swap.drain_s, swap.unload_s, swap.load_s) == (1.0, 0.5, 20.0)
    assert (swap.started_at, swap.ended_at) == (1_700_000_000.0, 1_700_000_020.5)


def test_given_a_target_chosen_again_when_the_swap_ends_then_the_history_names_who_came(
    hub: EventHub,
) -> None:
    start(hub, 1)
    complete(hub, 1, target="gamma")

    assert [swap.target for swap in hub.swaps()] == ["gamma"]


@pytest.mark.parametrize(
    ("kind", "fields", "outcome", "reason"),
    [
        (NoteKind.LOAD_FAILED, {"member": "beta", "reason": "exited"}, "failed", "exited"),
        (NoteKind.RELEASED, {"member": "alpha", "reason": "command"}, "abandoned", ""),
        (NoteKind.SWAP_STARTED, {"swap": 2}, "abandoned", ""),
    ],
)
def test_given_a_swap_that_does_not_land_when_it_ends_then_the_history_says_how(
    hub: EventHub, kind: NoteKind, fields: dict[str, Any], outcome: str, reason: str
) -> None:
    start(hub, 1)
    tell(hub, kind, **fields)

    [swap] = [swap for swap in hub.swaps() if swap.number == 1]
    assert (swap.outcome, swap.reason) == (outcome, reason)
    assert swap.ended_at is not None


def test_given_a_failed_warm_up_when_nothing_ran_then_the_history_stays_empty(
    hub: EventHub,
) -> None:
    tell(hub, NoteKind.LOAD_FAILED, member="beta", reason="exited")

    assert hub.swaps() == []


def test_given_many_swaps_when_listed_then_the_newest_come_first_and_the_oldest_are_gone(
    hub: EventHub,
) -> None:
    other = PoolName("gpu1")
    for number in range(1, KEPT_SWAPS + 3):
        start(hub, number)
        complete(hub, number)
    start(hub, 1, other)

    swaps = hub.swaps()

    assert [(swap.pool, swap.number) for swap in swaps[:3]] == [
        ("gpu1", 1),
        ("gpu0", KEPT_SWAPS + 2),
        ("gpu0", KEPT_SWAPS + 1),
    ]
    assert len(swaps) == KEPT_SWAPS + 1
    assert swaps[-1].number == 3
