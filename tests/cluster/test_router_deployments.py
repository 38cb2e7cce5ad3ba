"""Two Deployments that take turns through the router, from the router's own file, without a CRD."""

from __future__ import annotations

import json
import signal
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest

from cluster_kubectl import until
from cluster_operator import install
from cluster_router import RouterProcess
from cluster_slot import LARGE, SMALL, Slot, is_unbroken
from harness import OwnCluster

pytestmark = pytest.mark.cluster


def test_two_deployments_take_turns(slot: Slot) -> None:
    router = slot.router("router-1")
    router.start()

    with slot.never_two():
        for member, other in ((SMALL, LARGE), (LARGE, SMALL), (SMALL, LARGE)):
            answer = router.chat(member)
            assert (answer.status, answer.member) == (200, member), answer.body
            assert (slot.replicas(member), slot.replicas(other)) == (1, 0)
            record = slot.record()
            assert (record["owner"], record["phase"]) == (member, "resident")

    assert router.request("GET", "/readyz").status == 200
    assert router.stop() == 0
    # Its members stay as they are.
    assert (slot.replicas(SMALL), slot.replicas(LARGE)) == (1, 0)
    lease = slot.cluster.kubectl.get("lease", "modelpool-gpu0", "-n", slot.namespace)
    assert not lease["spec"].get("holderIdentity")


def test_a_router_that_was_killed_comes_back_to_its_resident(slot: Slot) -> None:
    router = slot.router("router-1")
    router.start()
    assert router.chat(SMALL).status == 200
    pods = slot.pods()
    engine = slot.engine(SMALL)
    assert engine is not None
    with slot.never_two():
        # What runs through it ends with it, and nothing else does.
        lost, direct = slot.streams(router, SMALL, 100), slot.streams(engine, SMALL, 100)
        router.stop(signal.SIGKILL)
        assert not is_unbroken(lost)

        router.start()
        answer = router.chat(SMALL)

        assert (answer.status, answer.member) == (200, SMALL)
        assert slot.pods() == pods
        assert not direct.is_done
        assert router.chat(LARGE).member == LARGE
        assert is_unbroken(direct)


def test_a_second_router_stands_by_and_takes_over(slot: Slot) -> None:
    first, second = slot.router("router-1"), slot.router("router-2")
    first.start()
    assert first.chat(SMALL).status == 200
    second.start()
    refused = until(lambda: (answer := second.chat(SMALL)).status == 503 and answer, "it stands by")
    assert refused is not False
    assert refused.code == "slot_unavailable"
    assert "router-1" in refused.message
    assert second.request("GET", "/readyz").status == 503
    pods = slot.pods()
    engine = slot.engine(SMALL)
    assert engine is not None

    with slot.never_two():
        direct = slot.streams(engine, SMALL, 300)
        first.stop(signal.SIGKILL)
        until(lambda: second.request("GET", "/readyz").status == 200, "it takes over", 60)
        assert second.chat(SMALL).member == SMALL
        assert slot.pods() == pods
        assert second.chat(LARGE).member == LARGE
        # It did not send this request itself, and waited for its end.
        assert is_unbroken(direct)


def test_an_image_that_cannot_be_pulled_is_told_in_the_clusters_words(slot: Slot) -> None:
    patch = [
        {
            "op": "replace",
            "path": "/spec/template/spec/containers/0/image",
            "value": "modelpool.test/absent",
        }
    ]
    slot.cluster.kubectl(
        "patch", "deployment", LARGE, "-n", slot.namespace, "--type=json", f"-p={json.dumps(patch)}"
    )
    router = slot.router("router-1")
    router.start()
    began = time.monotonic()

    answer = router.chat(LARGE)

    assert (answer.status, answer.code) == (503, "member_failed")
    assert "ImagePull" in answer.message
    assert time.monotonic() - began < 20
    assert router.chat(SMALL).member == SMALL


def test_while_the_api_server_is_away_for_a_minute_the_resident_is_served(
    slot: Slot, own: OwnCluster
) -> None:
    # Its policy must know accounts of routers as soon as the server is back.
    install(own.kubectl)
    router = slot.router("router-1")
    router.start()
    assert router.chat(SMALL).status == 200
    pods = slot.pods()
    asked = 0
    with slot.never_two(may_be_blind=True):
        own.stop_apiserver()
        try:
            over = time.monotonic() + 60
            while time.monotonic() < over:
                answer = router.chat(SMALL)
                assert (answer.status, answer.member) == (200, SMALL), answer.body
                asked += 1
                time.sleep(0.1)
        finally:
            own.start_apiserver()
        assert asked > 100
        assert slot.pods() == pods
        _swaps_again(slot, router)


def _asked_to_go_at(slot: Slot) -> datetime:
    """When replicas of the small member were written last."""
    found = slot.cluster.kubectl.get(
        "deployment", SMALL, "-n", slot.namespace, "--show-managed-fields"
    )
    return max(
        datetime.fromisoformat(each["time"])
        for each in found["metadata"]["managedFields"]
        if "f:replicas" in each["fieldsV1"].get("f:spec", {})
    )


def _swaps_again(slot: Slot, router: RouterProcess) -> None:
    back, back_at = time.monotonic(), datetime.now(UTC)
    served: list[str] = []

    def want_large() -> None:
        while not served and time.monotonic() < back + 180:
            answer = router.chat(LARGE)
            if answer.status == 200:
                served.append(answer.member)

    wanting = threading.Thread(target=want_large)
    wanting.start()
    try:
        # That swaps go on within 10 s means that the router does all that is its own: the incumbent
        # is asked to go. The controllers of the cluster take their own time to follow, since their
        # watches are dialled again with pauses of up to a minute.
        until(lambda: slot.replicas(SMALL) == 0, "the swap begins", 60)
        # By the server's own clock, which has whole seconds: a command that looks may take as long.
        took = _asked_to_go_at(slot) - back_at
        assert took < timedelta(seconds=10), f"{took} after the API server was back"
        until(lambda: served, "the swap is done", 150)
    finally:
        wanting.join()
    assert served == [LARGE]
