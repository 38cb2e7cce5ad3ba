"""A router that is killed, or left without an answer, at every single write of a swap."""

from __future__ import annotations

import http.client
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from cluster_faults import Fate, Write, passes
from cluster_router import Answer, RouterProcess
from cluster_slot import LARGE, SMALL, Slot, is_unbroken

pytestmark = pytest.mark.cluster


@dataclass(frozen=True)
class Step:
    """One write of a swap: what it is, and how many of that kind come before it."""

    name: str
    is_it: Callable[[Write, str, str], bool]
    """Whether a write is of the kind, in a swap from one member to another."""
    before: int = 0


def _records(phase: str) -> Callable[[Write, str, str], bool]:
    return lambda write, incumbent, target: (write.record or {}).get("phase") == phase


def _marks_incumbent(write: Write, incumbent: str, target: str) -> bool:
    return write.is_mark and write.name == incumbent


def _marks_target(write: Write, incumbent: str, target: str) -> bool:
    return write.is_mark and write.name == target


STEPS = (
    Step("the unload is recorded", _records("unloading")),
    Step("the incumbent is marked", _marks_incumbent),
    Step("the target is marked", _marks_target),
    Step("the incumbent is scaled down", lambda write, old, new: write.replicas == 0),
    Step("the load is recorded", _records("loading")),
    Step("the incumbent is marked again", _marks_incumbent, 1),
    Step("the target is marked again", _marks_target, 1),
    Step("the target is scaled up", lambda write, old, new: write.replicas == 1),
    Step("the landing is recorded", _records("resident")),
)


class At:
    """Gives a fate to the write of one step, once."""

    def __init__(self, step: Step, incumbent: str, target: str, fate: Fate) -> None:
        self._step = step
        self._members = (incumbent, target)
        self._fate = fate
        self._left = step.before
        self.hit: Write | None = None

    def __call__(self, write: Write) -> Fate:
        if self.hit is not None or not self._step.is_it(write, *self._members):
            return Fate.PASS
        if self._left:
            self._left -= 1
            return Fate.PASS
        self.hit = write
        return self._fate


def ask(router: RouterProcess, model: str) -> Answer | None:
    """Ask *model*; None when the router died over it."""
    try:
        return router.chat(model)
    except (http.client.HTTPException, OSError):
        return None


def landed(writes: list[Write]) -> list[Write]:
    """
    Return the *writes* that landed; each other one met a write of a controller.

    The status of a member is written whenever its controller likes, and nobody may overwrite what
    he has not seen: then the next write to that member says the same again.
    """
    print(*(f"{each}: {each.status}" for each in writes), sep="\n")
    refused = [each for each in writes if each.status == 409]
    for each in refused:
        assert each.kind == "deployments", f"nobody else writes this: {each}"
        later = writes[writes.index(each) + 1 :]
        again = next((other for other in later if other.name == each.name), None)
        assert again is not None, f"given up: {each}"
        assert _asked(again) == _asked(each)
    found = [each for each in writes if each not in refused]
    assert {each.status for each in found} == {200}
    return found


def _asked(write: Write) -> object:
    """What a write asks for, of whatever version of the object."""
    meta = {**write.body["metadata"], "resourceVersion": ""}
    return {**write.body, "metadata": meta}


def test_a_swap_is_two_epochs_and_nothing_is_written_twice(slot: Slot) -> None:
    way = slot.way("router")
    router = slot.router("host_router", way=way)
    router.start()
    assert router.chat(SMALL).member == SMALL
    before = len(way.writes)

    with slot.never_two():
        assert router.chat(LARGE).member == LARGE

    written = landed([each for each in way.writes[before:] if not each.is_renewal])
    for step in STEPS:
        found = [each for each in written if step.is_it(each, SMALL, LARGE)]
        assert len(found) > step.before, step.name
    scaled = [(each.name, each.replicas) for each in written if each.replicas is not None]
    assert scaled == [(SMALL, 0), (LARGE, 1)]
    marked = Counter(each.name for each in written if each.is_mark)
    assert marked == {SMALL: 2, LARGE: 2}
    assert len({each.record["epoch"] for each in written if each.record}) == 2


@pytest.mark.parametrize("fate", [Fate.KILL_BEFORE, Fate.KILL_AFTER, Fate.LOSE_ANSWER])
def test_a_swap_that_is_broken_at_any_write_is_made_up_for(slot: Slot, fate: Fate) -> None:
    way = slot.way("router")
    router = slot.router("host_router", way=way)
    router.start()
    assert router.chat(SMALL).member == SMALL
    target, incumbent = LARGE, SMALL
    streamed = 0

    with slot.never_two():
        for step in STEPS:
            way.rule = at = At(step, incumbent, target, fate)
            answer = ask(router, target)
            way.rule = passes
            assert at.hit is not None, step.name
            if fate is Fate.LOSE_ANSWER:
                # It lives, and the client never notices.
                assert answer is not None, step.name
                assert (answer.status, answer.member) == (200, target), (step.name, answer.body)
            else:
                assert answer is None, step.name
                router.stop(signal.SIGKILL)
                # Whoever is up works for somebody else by now.
                serving = [(each, slot.engine(each)) for each in slot.up()]
                streams = [slot.streams(front, each, 40) for each, front in serving if front]
                streamed += len(streams)
                router.start()
                # By itself, without any request: what was left half done is ended or undone.
                slot.wait_settled()
                assert all(is_unbroken(each) for each in streams), step.name
                answer = router.chat(target)
                assert (answer.status, answer.member) == (200, target), (step.name, answer.body)
            assert slot.up() == [target], step.name
            target, incumbent = incumbent, target
    # Before the incumbent is asked to go, and after the target has come.
    assert streamed >= (0 if fate is Fate.LOSE_ANSWER else 4)
    assert router.stop(signal.SIGTERM) == 0
