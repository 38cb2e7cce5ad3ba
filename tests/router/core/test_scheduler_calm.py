"""The short way through the scheduler, taken when nothing is going on, leads to the same place."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from modelpool_router.core import events as e
from modelpool_router.core.commands import Command, Grant, Load, ProbeIdle, Unload
from modelpool_router.core.scheduler import Scheduler
from modelpool_router.core.spec import (
    HoldLedger,
    MemberName,
    MemberSpec,
    PoolName,
    PoolSpec,
    Ticket,
)

A, B = MemberName("a"), MemberName("b")


class Thorough(Scheduler):
    """One that never takes the short way."""

    def _is_calm(self) -> bool:
        return False


def spec(chance: random.Random) -> PoolSpec:
    """Return rules with and without everything that goes by time alone."""
    members = {n: MemberSpec(n, parallel=2, has_idle_probe=chance.random() < 0.5) for n in (A, B)}
    return PoolSpec(
        PoolName("p"),
        members,
        default=chance.choice([None, A]),
        max_turn_s=5.0,
        linger_s=0.5,
        drain_timeout_s=chance.choice([None, 3.0]),
        idle_unload_after_s=chance.choice([None, None, 4.0]),
        reclaim_default_after_s=chance.choice([None, None, 2.0]),
        max_generation_s=chance.choice([None, 6.0]),
    )


def story(seed: int) -> Iterator[tuple[e.Event | None, float]]:
    """Yield random facts and times; None = let the driver report what it was asked for."""
    chance = random.Random(seed)
    now = 0.0
    tickets: list[Ticket] = []
    yield e.Observed(), now
    for number in range(1, 150):
        now += chance.choice([0.0, 0.0, 0.01, 0.4, 1.5])
        kind = chance.random()
        if kind < 0.4:
            # mostly for one member, so that there are long calm times
            member = A if chance.random() < 0.85 else B
            tickets.append(Ticket(number))
            yield e.Arrived(Ticket(number), member, now + chance.choice([0.0, 3.0, 60.0])), now
        elif kind < 0.75 and tickets:
            ticket = tickets.pop(chance.randrange(len(tickets)))
            ended: list[e.Event] = [e.Finished(ticket), e.Finished(ticket), e.Departed(ticket)]
            yield chance.choice(ended), now
        elif kind < 0.8:
            calls: list[e.Event] = [
                e.UnloadAsked(),
                e.Paused(),
                e.Resumed(),
                e.Resumed(),
                e.LoadAsked(B),
            ]
            yield chance.choice(calls), now
        else:
            yield None, now


@pytest.mark.parametrize("seed", range(150))
def test_given_any_story_then_both_ways_give_the_same_commands(seed: int) -> None:
    rules = spec(random.Random(seed))
    short = Scheduler(rules, HoldLedger(), now=0.0)
    long = Thorough(rules, HoldLedger(), now=0.0)
    asked: list[Command] = []

    for event, now in story(seed):
        if event is None:
            event = report(asked) if asked else e.Tick()
        told = short.handle(event, now)

        assert told == long.handle(event, now)
        assert short.next_deadline() == long.next_deadline()
        assert not short.is_calm or short.next_deadline() is None
        assert short.view(now) == long.view(now)
        asked += [command for command in told if isinstance(command, Load | Unload | ProbeIdle)]


def test_given_a_busy_resident_and_nobody_else_then_it_is_calm() -> None:
    scheduler = Scheduler(
        PoolSpec(PoolName("p"), {A: MemberSpec(A, parallel=2)}), HoldLedger(), now=0.0
    )
    scheduler.handle(e.Observed(up=(A,)), 0.0)

    granted = scheduler.handle(e.Arrived(Ticket(1), A, 9.0), 1.0)

    assert [type(command) for command in granted] == [Grant]
    assert scheduler.is_calm
    assert scheduler.handle(e.Finished(Ticket(1)), 2.0) == []
    assert scheduler.is_calm


def report(asked: list[Command]) -> e.Event:
    """Answer the oldest command."""
    command = asked.pop(0)
    if isinstance(command, Load):
        return e.Loaded(command.member, command.epoch)
    if isinstance(command, Unload):
        return e.Unloaded(command.member, command.epoch)
    assert isinstance(command, ProbeIdle)
    return e.IdleAnswered(command.probe, e.Idleness.IDLE)
