"""
The operator dies around every one of its requests, or loses the answer; the next one finishes.

Reads are only died before: dying after one is dying before the next request. With
MODELPOOL_EXHAUSTIVE=1 they are died around as writes are.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from mdep_lab import NAMESPACE, Lab, role
from memcluster import Killed, Mode
from modelpool_kube.kinds import MODEL_DEPLOYMENTS, PODS, WORKLOADS, Json, uid

EXHAUSTIVE = bool(os.environ.get("MODELPOOL_EXHAUSTIVE"))
Act = Callable[[Lab], Awaitable[None]]


@dataclass(frozen=True)
class Story:
    """A start, and what happens from then on while the operator may die."""

    name: str
    roles: tuple[Json, ...]
    act: Act
    begin: Act


async def nothing(lab: Lab) -> None:
    """Begin with nothing done."""


async def rested(lab: Lab) -> None:
    """Begin with everything done."""
    await lab.settle()


async def queued(lab: Lab) -> None:
    """Begin with a replacement that waits for its admission."""
    await lab.settle()
    lab.kueue.may_admit = False
    lab.edit(image="engine:2")
    await lab.until("WaitingForAdmission")
    await lab.look()
    lab.move()
    await lab.look()


def editing(**fields: Any) -> Act:
    """Return an act that edits all roles."""

    async def act(lab: Lab) -> None:
        lab.kueue.may_admit = True
        lab.edit(**fields)

    return act


async def losing(lab: Lab) -> None:
    """Lose a member."""
    lab.remove(lab.pods()[-1])


async def evicting(lab: Lab) -> None:
    """Lose an admission."""
    lab.kueue.evict(NAMESPACE, lab.group(0))


async def suspending(lab: Lab) -> None:
    """Suspend everything."""
    lab.patch(suspend=True)


async def ending(lab: Lab) -> None:
    """Delete the deployment."""
    lab.cluster.remove(MODEL_DEPLOYMENTS, NAMESPACE, "chat", actor="user")


STORIES = (
    Story("a first creation", (role(size=2),), nothing, nothing),
    Story("an image", (role(replicas=2),), editing(image="engine:2"), rested),
    Story("a larger size", (role(),), editing(size=2), rested),
    Story("a smaller size", (role(size=3),), editing(size=1), rested),
    Story("another type", (role(size=2),), editing(instanceType="b"), rested),
    Story(
        "fewer replicas and an image", (role(replicas=3),), editing(replicas=1, image="x"), rested
    ),
    Story("a lost member", (role(size=2),), losing, rested),
    Story("an eviction", (role(size=2),), evicting, rested),
    Story("a superseded replacement", (role(size=2),), editing(image="engine:3"), queued),
    Story("a cancelled replacement", (role(replicas=2),), editing(replicas=1), queued),
    Story("suspending", (role(size=2),), suspending, queued),
    Story("the end", (role(size=2),), ending, queued),
)


async def build(story: Story) -> tuple[Lab, list[str]]:
    """Return a lab at the start of *story*, and the UIDs of what is not ours."""
    lab = Lab(*story.roles)
    foreign = [
        uid(lab.cluster.put(PODS, NAMESPACE, {"metadata": {"name": "x"}, "spec": {}})),
        uid(
            lab.cluster.put(
                WORKLOADS, NAMESPACE, {"metadata": {"name": "y"}, "spec": {"podSets": []}}
            )
        ),
    ]
    await story.begin(lab)
    await story.act(lab)
    return lab, foreign


async def drive(lab: Lab) -> None:
    """Let everything move to the end; an operator that died is followed by another one."""
    for _ in range(300):
        version = lab.cluster.version
        before = len(lab.errors)
        try:
            await lab.look()
        except Killed:
            lab.restart()
            continue
        lab.move()
        if lab.cluster.version == version and len(lab.errors) == before:
            return
    raise AssertionError("it does not come to rest")


def check(lab: Lab, foreign: list[str], final: Json, point: str) -> None:
    """Check that the end is the same, and that nothing of others is gone."""
    uids = [uid(each) for kind in (PODS, WORKLOADS) for each in lab.cluster.all(kind)]
    assert set(foreign) <= set(uids), point
    assert picture(lab) == final, point
    if lab.cluster.all(MODEL_DEPLOYMENTS):
        assert lab.record is None, point


def picture(lab: Lab) -> Json:
    """Return the end of a story, without what is not ours."""
    lab.cluster.vanish(PODS, NAMESPACE, "x")
    lab.cluster.vanish(WORKLOADS, NAMESPACE, "y")
    return lab.final()


@pytest.mark.parametrize("story", STORIES, ids=[each.name for each in STORIES])
async def test_an_operator_that_dies_around_any_request_is_made_up_for(story: Story) -> None:
    lab, foreign = await build(story)
    begun = len(lab.port.requests)
    await drive(lab)
    clean = lab.port.requests[begun:]
    final = picture(lab)
    points = [
        (request, mode)
        for request in clean
        for mode in Mode
        if EXHAUSTIVE or request.is_write or mode is Mode.BEFORE
    ]

    for request, mode in points:
        lab, foreign = await build(story)
        lab.port.kill_at(request.number, mode)
        await drive(lab)
        check(lab, foreign, final, f"{mode}: {request}")
    assert len([each for each in clean if each.is_write]) >= 3


@pytest.mark.parametrize("story", STORIES, ids=[each.name for each in STORIES])
async def test_answers_that_are_lost_are_made_up_for(story: Story) -> None:
    lab, foreign = await build(story)
    begun = len(lab.port.requests)
    await drive(lab)
    clean = lab.port.requests[begun:]
    final = picture(lab)

    for number, request in enumerate(clean, 1):
        for applied in (True, False) if request.is_write else (False,):
            lab, foreign = await build(story)
            lab.port.lose(applied=applied, nth=number)
            await drive(lab)
            assert lab.errors, request
            check(lab, foreign, final, f"answer lost, applied: {applied}: {request}")


async def test_t50_a_sibling_is_untouched_whatever_phase_the_operator_dies_in() -> None:
    lab = Lab(role(replicas=2))
    await lab.settle()
    lab.kueue.may_admit = False
    lab.edit(image="engine:2")
    begun = len(lab.port.requests)
    for _ in range(4):
        await lab.look()
        lab.move()
    number = len(lab.port.requests) - begun

    for at in range(1, number + 1):
        for mode in Mode:
            lab = Lab(role(replicas=2))
            await lab.settle()
            sibling, workload = lab.uids(0), uid(lab.workload(0) or {})
            lab.kueue.may_admit = False
            lab.edit(image="engine:2")
            lab.port.kill_at(len(lab.port.requests) + at, mode)
            for _ in range(6):
                try:
                    await lab.look()
                except Killed:
                    lab.restart()
                lab.move()
                assert (lab.uids(0), uid(lab.workload(0) or {})) == (sibling, workload)
            assert lab.slot()["ordinal"] == 1 and len(lab.pods(1)) == 1
