"""What wakes the operator, and that nothing but what it needs does."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest

from mdep_lab import KEY, NAMESPACE, Lab, role
from modelpool_api.names import SLOT_ANNOTATION
from modelpool_kube.kinds import MODEL_DEPLOYMENTS, PODS, SERVICES, Json, Kind
from modelpool_kube.workqueue import WorkQueue, work
from modelpool_operator.engine.watching import Watching

pytestmark = pytest.mark.looptime(idle_timeout=100_000)


class Wakes:
    """Puts ModelDeployments into a queue, and nothing else."""

    def __init__(self) -> None:
        self.queue: WorkQueue[tuple[str, str]] = WorkQueue(rng=random.Random(1))

    def wake(self, kind: Kind, key: tuple[str, str]) -> None:
        """Look at *key* again."""
        if kind == MODEL_DEPLOYMENTS:
            self.queue.add(key)


@contextlib.asynccontextmanager
async def running(lab: Lab) -> AsyncIterator[list[int]]:
    """Run the operator of *lab* behind its watches; yields the number of its turns."""
    turns = [0]

    async def reconcile(key: tuple[str, str]) -> float | None:
        assert key == KEY
        turns[0] += 1
        return await lab.operator.reconcile(key)

    wakes = Wakes()
    watching = Watching(lab.cluster.port("watches"), None, wakes, rng=random.Random(2))
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(each.run()) for each in watching.reflectors.values()]
    tasks.append(loop.create_task(work(wakes.queue, reconcile)))
    try:
        yield turns
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def rest(lab: Lab, seconds: float = 30.0) -> None:
    """Let the operator and the world move for a while."""
    for _ in range(int(seconds)):
        await asyncio.sleep(1.0)
        lab.move()


async def test_everything_up_to_a_replacement_is_woken_by_reports() -> None:
    lab = Lab(role(replicas=2, size=2))
    async with running(lab):
        await rest(lab)
        old = set(lab.uids())
        assert len(old) == 4 and lab.status()["ready"] == 2

        lab.edit(image="engine:2")
        await rest(lab, 60)

        assert not old & set(lab.uids()) and lab.record is None
        assert lab.status()["ready"] == 2


async def test_at_rest_nobody_is_woken_by_what_the_operator_wrote_itself() -> None:
    lab = Lab()
    async with running(lab) as turns:
        await rest(lab)
        before = turns[0]
        await rest(lab, 120)

        assert turns[0] == before


@pytest.mark.parametrize("what", ["type", "pod", "service", "mark", "workload"])
async def test_what_it_needs_to_know_wakes_it(what: str) -> None:
    lab = Lab()
    async with running(lab) as turns:
        await rest(lab)
        before = turns[0]
        match what:
            case "type":
                lab.edit_type("a", perCard={"cpu": "9"})
            case "pod":
                lab.vanish(lab.pods())
            case "service":
                lab.cluster.remove(SERVICES, NAMESPACE, "chat", actor="user")
            case "mark":
                mark: Json = {"metadata": {"annotations": {SLOT_ANNOTATION: "team-a/x:1"}}}
                lab.cluster.edit(MODEL_DEPLOYMENTS, NAMESPACE, "chat", mark, actor="pool")
            case _:
                lab.kueue.evict(NAMESPACE, lab.group())
        await asyncio.sleep(1.0)

        assert turns[0] > before
        await rest(lab)
        assert lab.status()["ready"] == 1 and "chat" in lab.services()
        assert len(lab.cluster.all(PODS)) == 1


async def test_a_type_of_nobody_wakes_nobody() -> None:
    lab = Lab()
    async with running(lab) as turns:
        await rest(lab)
        before = turns[0]
        lab.edit_type("b", perCard={"cpu": "9"})
        await asyncio.sleep(5.0)

        assert turns[0] == before
