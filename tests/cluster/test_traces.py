"""Traces that could end with two residents or a killed stream, one by one, on a real cluster."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from cluster_clients import Client
from cluster_commands import Commands
from cluster_faults import Fate, Write
from cluster_kubectl import until
from cluster_router import Answer, RouterProcess
from cluster_slot import LARGE, SMALL, Slot, is_unbroken
from harness import OwnCluster

pytestmark = pytest.mark.cluster


def scaling(name: str, replicas: int) -> Callable[[Write], bool]:
    """Return whether a write scales the member *name* to *replicas*."""
    return lambda write: write.name == name and write.replicas == replicas


def only(wanted: Callable[[Write], bool], fate: Fate, *, most: int = 1) -> Callable[[Write], Fate]:
    """Return the rule that gives *fate* to the first writes that are *wanted*."""
    left = [most]

    def rule(write: Write) -> Fate:
        if not left[0] or not wanted(write):
            return Fate.PASS
        left[0] -= 1
        return fate

    return rule


def one_of(*rules: Callable[[Write], Fate]) -> Callable[[Write], Fate]:
    """Return the rule that gives what the first of *rules* gives that lets a write not pass."""

    def rule(write: Write) -> Fate:
        fates = (each(write) for each in rules)
        return next((each for each in fates if each is not Fate.PASS), Fate.PASS)

    return rule


def stands_by(router: RouterProcess, model: str) -> bool:
    """Whether *router* says that somebody else has the slot."""
    answer = router.chat(model)
    return answer.status == 503 and answer.code == "slot_unavailable"


@pytest.mark.parametrize(
    ("asleep_at", "replicas"), [(SMALL, 0), (LARGE, 1)], ids=["its unload", "its load"]
)
def test_second_router_wakes_up(slot: Slot, asleep_at: str, replicas: int) -> None:
    """It slept over a scaling that was on its way; somebody else has moved the slot since."""
    way = slot.way("first")
    first = slot.router("host_first", way=way)
    second = slot.router("host_second")
    first.start()
    assert first.chat(SMALL).member == SMALL

    with slot.never_two():
        second.start()
        until(lambda: stands_by(second, SMALL), "the second stands by")
        way.rule = only(scaling(asleep_at, replicas), Fate.HOLD)
        waiting = Client(partial(first.chat, LARGE))
        until(lambda: way.held, "its write is on its way")
        first.send(signal.SIGSTOP)
        until(lambda: slot.holder() == "host_second", "the second takes over", 40)
        # At its unload the resident is still up and stays; at its load nothing is.
        until(lambda: second.chat(SMALL).member == SMALL, "the second serves", 40)
        pods = slot.pods(SMALL)
        stream = slot.streams(second, SMALL, 80)

        landed = way.release()
        first.send(signal.SIGCONT)

        assert [each.status for each in landed] == [409]
        assert not stream.is_done
        until(lambda: first.request("GET", "/readyz").status == 503, "the first stands by", 30)
        assert stands_by(first, SMALL)
        assert (slot.up(), slot.pods(SMALL)) == ([SMALL], pods)
        assert is_unbroken(stream)
        [told] = waiting.end()
        assert (told.status, told.code) == (503, "slot_unavailable")
        # It runs in no Pod that could be asked: the second gives it time before it stops anything.
        until(lambda: second.chat(LARGE).member == LARGE, "the second swaps", 40)
    assert slot.holder() == "host_second"


def test_a_patch_lands_after_its_time_out(slot: Slot) -> None:
    way = slot.way("router")
    router = slot.router("host_router", way=way)
    router.start()
    assert router.chat(SMALL).member == SMALL

    with slot.never_two():
        # More than the router repeats: it gives the epoch up and begins another one.
        for wanted in (scaling(SMALL, 0), scaling(LARGE, 1)):
            way.rule = only(wanted, Fate.CUT_AND_HOLD, most=9)
            waiting = Client(partial(router.chat, LARGE))
            until(lambda: len(way.held) == 9, "it tries again and again", 40)
            [told] = waiting.end()
            assert (told.status, told.member) == (200, LARGE)
            assert slot.epoch(SMALL) == slot.epoch(LARGE) == slot.record()["epoch"]
            assert router.chat(SMALL).member == SMALL

            late = way.release()

            assert [each.status for each in late] == [409] * 9
            assert slot.up() == [SMALL]
        # And one that lands between the time-out and the next look.
        way.rule = only(scaling(LARGE, 1), Fate.HOLD)
        waiting = Client(partial(router.chat, LARGE))
        until(lambda: len(way.held) == 1, "its write is on its way")
        time.sleep(5.5)  # the time limit of its calls is five seconds
        [last] = way.release()
        [told] = waiting.end()
        assert (told.status, told.member) == (200, LARGE)
        assert last.status in (200, 409)


def test_kubectl_rollout_undo_on_a_member(slot: Slot) -> None:
    kubectl = slot.cluster.kubectl
    for name in (SMALL, LARGE):
        note = {"metadata": {"annotations": {"example.dev/revision": "two"}}}
        patch = json.dumps({"spec": {"template": note}})
        kubectl("patch", "deployment", name, "-n", slot.namespace, "-p", patch)
    way = slot.way("router")
    router = slot.router("host_router", way=way)
    router.start()
    assert router.chat(SMALL).member == SMALL

    def undo(name: str) -> None:
        kubectl("rollout", "undo", f"deployment/{name}", "-n", slot.namespace)

    with slot.never_two():
        # A member at 0: old annotations come back with the old template, and count for nothing.
        undo(LARGE)
        assert slot.epoch(LARGE) < slot.epoch(SMALL)
        assert router.chat(LARGE).member == LARGE
        assert slot.epoch(SMALL) == slot.epoch(LARGE)
        # The resident: its Pod is replaced under us.
        pods = slot.pods(LARGE)
        undo(LARGE)
        until(lambda: slot.pods(LARGE) not in ([], pods), "its Pod is replaced")
        until(lambda: router.chat(LARGE).status == 200, "it is served again")
        # In the middle of its unload, between the mark and the scaling.
        way.rule = only(scaling(LARGE, 0), Fate.HOLD)
        waiting = Client(partial(router.chat, SMALL))
        until(lambda: way.held, "its unload is on its way")
        undo(LARGE)
        [late] = way.release()
        assert late.status == 409
        [told] = waiting.end()
        assert (told.status, told.member) == (200, SMALL)
        slot.wait_settled()
    assert slot.up() == [SMALL]


def test_the_lease_is_deleted_under_traffic(slot: Slot) -> None:
    kubectl = slot.cluster.kubectl
    way = slot.way("router")
    router = slot.router("host_router", way=way)
    router.start()
    assert router.chat(SMALL).member == SMALL
    before, epoch, pods = slot.lease(), slot.epoch(SMALL), slot.pods()
    # Nobody says that the new one was made; later one patch lands late, and one unseen.
    way.rule = one_of(
        only(lambda write: (write.method, write.kind) == ("POST", "leases"), Fate.LOSE_ANSWER),
        only(scaling(SMALL, 0), Fate.CUT_AND_HOLD),
        only(scaling(LARGE, 1), Fate.LOSE_ANSWER),
    )
    stream = slot.streams(router, SMALL, 50)
    traffic = Client(partial(router.chat, SMALL), again=True)

    with slot.never_two():
        kubectl("delete", "lease", "modelpool-gpu0", "-n", slot.namespace)
        until(lambda: slot.holder() == "host_router", "it is made anew")
        assert slot.lease()["metadata"]["uid"] != before["metadata"]["uid"]
        answers = traffic.end()
        assert {each.status for each in answers} == {200}
        assert traffic.broken == []
        assert is_unbroken(stream)
        assert slot.pods() == pods
        # Until it has read that the new one is its own it moves nothing.
        until(lambda: router.chat(LARGE).member == LARGE, "it swaps", 30)
        assert [each.status for each in way.release()] == [409]
        assert slot.wait_settled()["epoch"] > epoch
    assert slot.up() == [LARGE]


def test_the_lease_is_deleted_before_the_fence_is_up(slot: Slot) -> None:
    """Then two holders count from the same number, and one must not trust the other's marks."""
    way = slot.way("first")
    first, second = slot.router("host_first", way=way), slot.router("host_second")
    way.rule = only(lambda write: write.is_mark, Fate.HOLD)

    with slot.never_two():
        first.start()
        until(lambda: way.held, "its first mark is on its way")
        second.start()
        until(lambda: stands_by(second, SMALL), "the second stands by")
        first.send(signal.SIGSTOP)
        slot.cluster.kubectl("delete", "lease", "modelpool-gpu0", "-n", slot.namespace)
        until(lambda: slot.holder() == "host_second", "the second makes it anew")
        until(lambda: second.chat(SMALL).member == SMALL, "the second loads", 60)

        [late] = way.release()
        first.send(signal.SIGCONT)

        assert late.status == 409
        # It never takes what the other has brought up for its own.
        over = time.monotonic() + 8
        while time.monotonic() < over:
            answer = first.chat(SMALL)
            assert (answer.status, answer.code) == (503, "slot_unavailable")
            time.sleep(0.1)
        assert second.chat(LARGE).member == LARGE


def test_a_failed_pod_is_left_behind(slot: Slot) -> None:
    kubectl = slot.cluster.kubectl
    way = slot.way("router")
    way.rule = one_of(
        only(scaling(SMALL, 0), Fate.LOSE_ANSWER), only(scaling(LARGE, 1), Fate.CUT_AND_HOLD)
    )
    router = slot.router("host_router", way=way)
    router.start()
    assert router.chat(SMALL).member == SMALL
    [pod] = slot.pod_objects(SMALL)
    name = pod["metadata"]["name"]

    def phase() -> Any:
        found = kubectl.get("pod", name, "-n", slot.namespace)
        return (found.get("status") or {}).get("phase")

    with slot.never_two():
        evict = "kubelet.modelpool.test/evict=the node ran out of memory"
        kubectl("annotate", "pod", name, "-n", slot.namespace, evict)
        until(lambda: phase() == "Failed", "it is evicted")
        until(lambda: router.chat(SMALL).status == 200, "another Pod serves")
        assert phase() == "Failed"
        # What is left of it holds nothing, and nobody waits for it.
        assert router.chat(LARGE).member == LARGE
        assert phase() == "Failed"
        assert router.chat(SMALL).member == SMALL
        assert [each.status for each in way.release()] == [409]
        slot.wait_settled()
    assert slot.up() == [SMALL]


def test_a_node_is_lost_and_its_pod_forgotten(slot: Slot, own: OwnCluster) -> None:
    kubectl = own.kubectl
    command = Commands(kubectl, slot.namespace)
    node = own.node("gpu-lost")
    try:
        pin = {
            "spec": {"template": {"spec": {"nodeSelector": {"kubernetes.io/hostname": node.name}}}}
        }
        kubectl("patch", "deployment", SMALL, "-n", slot.namespace, "-p", json.dumps(pin))
        way = slot.way("router")
        way.rule = one_of(
            only(scaling(SMALL, 0), Fate.CUT_AND_HOLD), only(scaling(LARGE, 1), Fate.LOSE_ANSWER)
        )
        router = slot.router("host_router", way=way, swapBudget="6s")
        router.start()
        until(lambda: router.chat(SMALL).status == 200, "it is up on that node")
        [pod] = slot.pod_objects(SMALL)
        with slot.never_two() as eye:
            node.power_off()
            # Nobody can tell a machine that is off from one that is cut off.
            refused = until(lambda: _is_late(router.chat(LARGE)), "it waits for the Pod", 60)
            assert refused is not None
            assert "retry-after" in refused.headers
            until(lambda: slot.replicas(SMALL) == 0, "the member is asked to go")
            assert slot.replicas(LARGE) == 0

            eye.forgotten.add(pod["metadata"]["uid"])
            said = command("forget", pod["metadata"]["name"], "--yes")

            assert "counts as gone" in said
            until(lambda: router.chat(LARGE).status == 200, "the other one is loaded", 60)
            assert slot.pods(SMALL) == [pod["metadata"]["uid"]], "it is still there to be seen"
            assert [each.status for each in way.release()] == [409]
            slot.wait_settled()
            assert slot.up() == [LARGE]
        events = kubectl.items("events.events.k8s.io", "-n", slot.namespace)
        assert "PodForgotten" in {each["reason"] for each in events}
    finally:
        own.remove_node(node.name)


def _is_late(answer: Answer) -> Answer | None:
    is_late = answer.status == 503 and answer.code == "swap_budget_exceeded"
    return answer if is_late else None
