"""
Kill a process around every one of its requests, and see whether the next one repairs it.

A scenario is a coroutine function that is given a fresh world and a port, and does what a process
does. It is run once to count its requests; then once for every request and every `Mode`, with the
process killed there; then *recover* runs, as a new process does, and *check* says whether the
world is as it should be.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from memcluster import Killed, MemCluster, MemPort, Mode, Request

W = TypeVar("W")


@dataclass(frozen=True)
class CrashPoint:
    """One place where a process was killed."""

    request: Request
    mode: Mode

    def __str__(self) -> str:
        return f"{self.mode.value}: request {self.request}"


@dataclass(frozen=True)
class Scenario(Generic[W]):
    """What a process does, how the next one recovers, and what must hold then."""

    build: Callable[[], W]
    """Makes a fresh world; must be the same every time."""
    cluster: Callable[[W], MemCluster]
    run: Callable[[W, MemPort], Awaitable[object]]
    recover: Callable[[W, MemPort], Awaitable[object]]
    check: Callable[[W], object]
    """Raises when something does not hold."""


async def kill_everywhere(
    scenario: Scenario[W],
    modes: tuple[Mode, ...] = tuple(Mode),
    *,
    only: Callable[[Request, Mode], bool] = lambda request, mode: True,
) -> list[CrashPoint]:
    """
    Run *scenario* with every crash point that *only* lets pass; return those that were visited.

    Raises:
        AssertionError: something did not hold; names the crash point.
    """
    world = scenario.build()
    port = scenario.cluster(world).port("first")
    await scenario.run(world, port)
    scenario.check(world)
    clean = port.requests
    visited = []
    for number in range(1, len(clean) + 1):
        for mode in modes:
            if not only(clean[number - 1], mode):
                continue
            world = scenario.build()
            port = scenario.cluster(world).port("first")
            port.kill_at(number, mode)
            try:
                await scenario.run(world, port)
            except Killed:
                pass
            else:
                # Killed after its last answer: there was nothing left to notice it by.
                assert mode is Mode.AFTER and number == len(clean), "it outlived its death"
            point = CrashPoint(port.requests[number - 1], mode)
            try:
                await scenario.recover(world, scenario.cluster(world).port("second"))
                scenario.check(world)
            except Exception as error:
                raise AssertionError(f"{point}: {type(error).__name__}: {error}") from error
            visited.append(point)
    return visited


async def lose_everywhere(scenario: Scenario[W]) -> list[CrashPoint]:
    """
    Run *scenario* with the answer to every write lost once, applied and not, and nobody killed.

    The process sees `Unanswered`; what it does then is up to it. If it gives up, *recover* runs.
    """
    world = scenario.build()
    port = scenario.cluster(world).port("first")
    await scenario.run(world, port)
    writes = sum(request.is_write for request in port.requests)
    visited = []
    for number in range(1, writes + 1):
        for applied in (True, False):
            world = scenario.build()
            port = scenario.cluster(world).port("first")
            port.lose(applied=applied, writes=True, nth=number)
            point = f"write {number} lost, {'' if applied else 'not '}applied"
            try:
                try:
                    await scenario.run(world, port)
                except Exception:  # noqa: BLE001 - whatever it died of, the next one recovers
                    await scenario.recover(world, scenario.cluster(world).port("second"))
                scenario.check(world)
            except Exception as error:
                raise AssertionError(f"{point}: {type(error).__name__}: {error}") from error
            lost = [request for request in port.requests if request.is_write][number - 1]
            visited.append(CrashPoint(lost, Mode.UNANSWERED if applied else Mode.BEFORE))
    return visited
