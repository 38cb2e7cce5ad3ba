"""Pools on a real API server, with the shipped operator and, where there is one, its router."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path

import pytest

from cluster_clients import Client
from cluster_ground import (
    ROUTERS,
    Ground,
    deployment_ref,
    in_work,
    is_whole,
    one_at_a_time,
    service_ref,
    streamed,
    watched,
)
from cluster_kubectl import Object, until
from cluster_operator import Start
from cluster_router import Front, RouterProcess
from harness import OwnCluster

pytestmark = pytest.mark.cluster


TOLD = ("SlotAllocated", "SwapDeferred", "Ready")


def told_of(pool: Object) -> str | None:
    """What a pool says of its slot, of a swap that is put off, and of itself, one a line."""
    status = pool.get("status", {})
    conditions = {each["type"]: each for each in status.get("conditions", [])}
    if not conditions.keys() >= set(TOLD):
        return None
    slot, deferred, ready = (conditions[each] for each in TOLD)
    return "\n".join(
        (
            f"{slot['status']}/{slot['reason']} {status.get('residentMember', 'nobody')}",
            f"{deferred['status']}/{deferred['reason']}",
            str(ready["status"]),
        )
    )


def in_turn(said: list[str], kind: str) -> list[str]:
    """What was said of one of `TOLD`, without repetitions."""
    lines = [each.splitlines()[TOLD.index(kind)] for each in said]
    return [each for each, _ in groupby(lines)]


HOLD_S = 75.0
"""Longer than a Lease has to be free before the operator acts."""


def test_a_pool_of_two_is_kept_as_people_see_it(ground: Ground, start: Start) -> None:
    kubectl, namespace = ground.kubectl, ground.namespace
    start("operator-0")
    # The second pool has a cold slot and a default, and misses a member, for most of this test.
    spare = deployment_ref("spare")
    ground.apply(
        ground.service("coder"),
        ground.service("judge"),
        ground.pool("gpu0", service_ref("coder"), service_ref("judge"), default="coder"),
        ground.deployment("spare", gpus=0),
        ground.pool("gpu1", spare, deployment_ref("ghost"), default="spare"),
    )
    untouched = ground.generations("deployment/spare")
    members = ("isvc/coder", "isvc/judge", "deployment/coder", "deployment/judge")

    with one_at_a_time(kubectl, namespace, "-l", "app!=spare") as pods:
        # A cold default is warmed, and real kubectl prints the columns.
        until(lambda: ground.status().get("residentMember") == "coder", "it is warmed", 150)
        # Until then the load counts as announced and not as landed.
        until(lambda: ground.record()["phase"] == "resident", "and that is recorded", 40)
        head, row, _ = kubectl("get", "mpool", "-n", namespace).splitlines()
        assert head.split() == ["NAME", "POLICY", "RESIDENT", "PHASE", "AGE"]
        assert row.split()[:4] == ["gpu0", "sticky", "coder", "Ready"]
        wide = kubectl("get", "mpool", "-n", namespace, "-o", "wide").splitlines()[0]
        assert wide.split()[4:] == ["PENDING", "HELD", "LASTSWAP", "AGE"]
        assert ground.phases() == {"coder": "Ready", "judge": "Stopped"}
        assert [ground.replicas(each) for each in members] == [1, 0, 1, 0]
        assert ground.condition("SlotAllocated") == "True/Resident"
        assert "coder" in ground.message("SlotAllocated")
        assert ground.condition("MembersValid") == "True/AllResolved"
        assert ground.condition("MetalSupported") == "True/KubernetesGPU"
        assert ground.condition("SwapDeferred") == "False/NotDeferred"
        kubectl("wait", "--for=condition=Ready", "mpool/gpu0", "-n", namespace, "--timeout=10s")
        assert ground.get("isvc", "judge")["status"]["phase"] == "Stopped"

        def seen() -> bool:
            pool = ground.get("mpool", "gpu0")
            return bool(pool["status"]["observedGeneration"] == pool["metadata"]["generation"])

        # Another default moves nothing as long as the pool is warm.
        before = ground.generations(*members)
        ground.patch("mpool/gpu0", {"spec": {"default": "judge"}})
        until(seen, "the edit was looked at")
        until(lambda: ground.condition("MembersValid", "gpu1") == "False/MissingMembers", "told")
        over = time.monotonic() + HOLD_S
        while time.monotonic() < over:
            assert ground.status()["residentMember"] == "coder"
            assert ground.generations(*members) == before
            assert ground.condition("SlotAllocated", "gpu1") == "False/MissingMembers"
            assert ground.generations("deployment/spare") == untouched
            time.sleep(1)
        # All that kept it cold was the one that is missing.
        ground.patch("mpool/gpu1", {"spec": {"members": [spare]}})

        # A missing member: it is named, and nobody moves a replica, not even into a cold slot.
        listed = [service_ref(each) for each in ("coder", "judge", "ghost")]
        ground.patch("mpool/gpu0", {"spec": {"members": listed}})
        until(lambda: ground.condition("MembersValid") == "False/MissingMembers", "it is told")
        assert "ghost" in ground.message("MembersValid")
        assert "no replica of any member is touched" in ground.message("MembersValid")
        assert ground.status()["phase"] == "Degraded"
        assert ground.condition("Stalled") == "True/MissingMembers"
        assert ground.condition("SlotAllocated") == "True/Resident"
        assert ground.generations(*members) == before
        kubectl("scale", "isvc/coder", "--replicas=0", "-n", namespace)
        until(
            lambda: (
                ground.condition("SlotAllocated") == "False/MissingMembers"
                and set(ground.phases().values()) == {"Stopped", "Missing"}
            ),
            "the slot is empty",
        )
        until(lambda: pods.told == ["+coder", "-coder"], "and nothing else has moved", 5)
        assert ground.replicas("isvc/judge") == 0

        # Whole again and cold, the pool warms what is the default now.
        ground.patch("mpool/gpu0", {"spec": {"members": listed[:2]}})
        until(lambda: ground.status().get("residentMember") == "judge", "judge is warmed", 90)
        assert ground.status()["phase"] == "Ready"
        until(lambda: ground.status("gpu1").get("residentMember") == "spare", "so is spare", 90)
    assert pods.told == ["+coder", "-coder", "+judge"]
    assert "MissingMembers" in ground.events()
    assert "MissingMembers" in ground.events("gpu1")


def test_a_request_for_the_other_member_is_held_until_it_serves(
    ground: Ground, start: Start
) -> None:
    kubectl, namespace = ground.kubectl, ground.namespace
    start("operator-0")
    ground.apply(
        ground.service("coder"),
        ground.service("judge"),
        ground.pool(
            "gpu0",
            service_ref("coder"),
            service_ref("judge"),
            default="coder",
            maxTurn="1s",
            linger="0s",
        ),
        ground.router("gpu0", replicas=3),
    )

    with (
        one_at_a_time(kubectl, namespace) as pods,
        watched(kubectl, "mpool", "gpu0", "-n", namespace, of=told_of) as said,
        ThreadPoolExecutor(4) as clients,
    ):
        front = ground.front()
        until(lambda: ground.status().get("residentMember") == "coder", "it is warmed", 60)
        pinned = [
            each
            for each in ground.get("mrouter", "front")["status"]["conditions"]
            if each["type"] == "ReplicasPinned"
        ]
        assert (pinned[0]["status"], pinned[0]["reason"]) == ("True", "Pinned")
        assert "spec.replicas is 3" in pinned[0]["message"]
        assert ground.replicas("deployment/front") == 1
        # Whoever of operator and router was first, it is told how the first load ended.
        until(lambda: {"MemberWarmed", "SwapCompleted"} & set(ground.events()), "that is told", 15)
        before = len(ground.events())
        until(lambda: said and said[-1].startswith("True/Resident coder"), "that is seen", 15)
        del said[:-1]

        # While a stream runs the swap is put off, and says so.
        running = streamed(clients, front, "coder")
        until(lambda: in_work(ground, "coder"), "the stream runs")
        wanted = clients.submit(front.chat, "judge")
        until(lambda: ground.condition("SwapDeferred") == "True/PodsBusy", "it is put off", 9)
        assert "coder" in ground.message("SwapDeferred")
        assert not running.done()
        assert not wanted.done()
        assert is_whole(running.result())
        answer = wanted.result()
        assert (answer.status, answer.member) == (200, "judge")
        assert int(answer.headers["x-modelpool-held-ms"]) > 0
        until(lambda: ground.status().get("residentMember") == "judge", "the status follows", 15)
        assert ground.condition("SwapDeferred") == "False/NotDeferred"
        assert ground.condition("Ready") == "True/SlotServed"
        assert ground.phases() == {"coder": "Stopped", "judge": "Ready"}
    assert pods.told == ["+coder", "-coder", "+judge"]
    assert in_turn(said, "SlotAllocated") == [
        "True/Resident coder",
        "False/Swapping nobody",
        "True/Resident judge",
    ]
    assert in_turn(said, "SwapDeferred") == [
        "False/NotDeferred",
        "True/PodsBusy",
        "False/NotDeferred",
    ]
    assert in_turn(said, "Ready") == ["True"]
    # What is told again is counted and not told anew.
    until(lambda: len(ground.events()) >= before + 3, "the Events are told", 15)
    *begun, ended = ground.events()[before:]
    # Whether it is told first that it is wanted or that it waits is for the first look to say.
    assert (sorted(begun), ended) == (["SwapDeferred", "SwapStarted"], "SwapCompleted")


def processes(own: OwnCluster, variable: str) -> list[int]:
    """
    Process ids of the containers, on whatever node, that have *variable* in their environment.

    There is at least one. Other tests may have left nodes behind that offer GPUs, too.
    """
    wanted = variable.encode()
    found = []
    for node in own.nodes.values():
        for pid in node.container_pids():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(pid)
    assert found, f"nothing runs with {variable}"
    return found


def test_a_swap_is_put_off_by_what_the_engine_says(
    own: OwnCluster, ground: Ground, start: Start
) -> None:
    start("operator-0")
    ground.apply(
        ground.deployment("small"),
        ground.deployment("large"),
        ground.pool("gpu0", deployment_ref("small"), deployment_ref("large"), maxTurn="1s"),
        ground.router("gpu0"),
    )
    with (
        one_at_a_time(ground.kubectl, ground.namespace) as pods,
        ThreadPoolExecutor(4) as clients,
    ):
        front = ground.front()
        assert front.chat("small").member == "small"

        # Work that did not come through the router is seen.
        direct = Front(f"{ground.pods('small')[0]['status']['podIP']}:8080")
        running = streamed(clients, direct, "small")
        until(lambda: in_work(ground, "small"), "the stream runs")
        wanted = clients.submit(front.chat, "large")
        until(lambda: ground.condition("SwapDeferred") == "True/PodsBusy", "it is put off", 9)
        assert pods.told == ["+small"]
        assert is_whole(running.result())
        assert wanted.result().member == "large"

        # An engine that does not answer may be working, too.
        address = ground.pods("large")[0]["status"]["podIP"]
        engine = processes(own, f"POD_IP={address}")
        for pid in engine:
            os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(TimeoutError):
                Front(f"{address}:8080").request("GET", "/slots", timeout_s=1)
            wanted = clients.submit(front.chat, "small")
            until(
                lambda: ground.condition("SwapDeferred") == "True/IdleCheckFailed", "it is told", 20
            )
            assert not wanted.done()
        finally:
            for pid in engine:
                os.kill(pid, signal.SIGCONT)
        assert wanted.result().member == "small"
    assert pods.told == ["+small", "-small", "+large", "-large", "+small"]


def test_a_budget_shorter_than_the_load_refuses_and_the_load_goes_on(
    ground: Ground, start: Start
) -> None:
    start("operator-0")
    ground.apply(
        ground.deployment("small"),
        ground.deployment("large", "--load", "6"),
        ground.pool("gpu0", deployment_ref("small"), deployment_ref("large"), default="small"),
        ground.router("gpu0"),
    )
    with one_at_a_time(ground.kubectl, ground.namespace) as pods:
        front = ground.front()
        assert front.chat("small").member == "small"
        ground.patch("mpool/gpu0", {"spec": {"swapBudget": "2s", "maxTurn": "0s"}})
        until(lambda: ground.router_said("ModelPools in force") >= 1, "the edit is in force")

        refused = front.chat("large")

        assert (refused.status, refused.code) == (503, "swap_budget_exceeded")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        # Nobody asks any more, and it is loaded all the same.
        until(lambda: ground.status().get("residentMember") == "large", "the load went on", 60)
        retried = front.chat("large")
        assert (retried.status, retried.member) == (200, "large")
    assert pods.told == ["+small", "-small", "+large"]


def test_two_routers_never_move_one_slot(
    own: OwnCluster,
    ground: Ground,
    start: Start,
    account_of_router: Callable[..., Path],
    tmp_path: Path,
) -> None:
    kubectl, namespace = ground.kubectl, ground.namespace
    start("operator-0")
    pool = ground.pool("gpu0", deployment_ref("small"), deployment_ref("large"), default="small")
    ground.apply(
        ground.deployment("small"),
        ground.deployment("large"),
        pool,
        ground.router("gpu0", shutdownTimeout="20s"),
    )
    second = RouterProcess(
        ground.cluster,
        tmp_path / "second",
        "by-hand",
        kubernetes={"kubeconfig": str(account_of_router("by-hand", pool))},
        poolsFrom={"namespace": namespace, "names": ["gpu0"]},
    )
    try:
        with one_at_a_time(kubectl, namespace) as members:
            with (
                one_at_a_time(kubectl, namespace, *ROUTERS) as routers,
                ThreadPoolExecutor(2) as clients,
            ):
                front = ground.front()
                assert front.chat("small").member == "small"

                # What a running router takes in rolls nothing.
                ground.patch("mrouter/front", {"spec": {"maxHeld": 7}})
                until(lambda: ground.router_said("configuration reloaded"), "it is in force", 90)
                # What it cannot take in ends it before the next one begins.
                first = ground.pods("front")[0]["metadata"]["uid"]
                running = streamed(clients, front, "small")
                until(lambda: in_work(ground, "small"), "the stream runs")
                held = clients.submit(front.chat, "large")
                until(lambda: ground.status().get("held") == 1, "a request is held")
                more = {"resources": {"requests": {"cpu": "10m"}}}
                ground.patch("mrouter/front", {"spec": more})
                until(
                    lambda: [each["metadata"]["uid"] for each in ground.pods("front")] != [first],
                    "it is replaced",
                )
                # What it has begun it ends; who has waited in vain is told when to come again.
                assert is_whole(running.result())
                put_off = held.result()
                assert (put_off.status, put_off.code) == (503, "pool_draining")
                assert 1 <= int(put_off.headers["retry-after"]) <= 60
                front = ground.front()
                assert front.chat("small").member == "small"
                assert members.told == ["+small"], "the resident is adopted"
            assert routers.told == ["+front", "-front", "+front"]

            # One that is started by hand stands by.
            second.start()
            name = ground.pods("front")[0]["metadata"]["name"]
            refused = until(
                lambda: (answer := second.chat("small")).status == 503 and answer, "it stands by"
            )
            assert refused is not False
            assert (refused.code, name in refused.message) == ("slot_unavailable", True)
            asked = [
                Client(partial(second.request, "GET", "/readyz"), again=True),
                *(Client(partial(second.chat, each), again=True) for each in ("small", "large")),
            ]
            try:
                assert front.chat("large").member == "large"
                # The first is killed and cannot come back: it does not run any more by the time
                # when the cluster wants to end it in order.
                first_router = processes(own, f"POD_NAME={name}")
                for pid in first_router:
                    os.kill(pid, signal.SIGSTOP)
                ground.patch("mrouter/front", {"spec": {"image": "modelpool.test/absent"}})
            finally:
                answers = [each.end() for each in asked]
            # The second stood by all the while.
            assert all(len(each) > 5 for each in answers)
            assert {each.status for told in answers for each in told} == {503}
            assert {each.code for told in answers[1:] for each in told} == {"slot_unavailable"}
            assert [each.broken for each in asked] == [[], [], []]
            for pid in first_router:
                os.kill(pid, signal.SIGKILL)
            until(lambda: second.request("GET", "/readyz").status == 200, "it takes over", 60)
            assert second.chat("large").member == "large"
            assert second.chat("small").member == "small"
        assert members.told == ["+small", "-small", "+large", "-large", "+small"]
        until(lambda: ground.status().get("router") == "by-hand", "the status follows", 15)
    finally:
        second.stop(signal.SIGKILL)
