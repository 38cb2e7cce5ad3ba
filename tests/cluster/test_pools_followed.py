"""ModelPools that change while a router serves them, and members that come and go."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cluster_ground import (
    Ground,
    deployment_ref,
    in_work,
    is_ending,
    is_whole,
    one_at_a_time,
    service_ref,
    streamed,
)
from cluster_kubectl import Object, until
from cluster_objects import GPU, queues
from cluster_operator import Start
from cluster_router import RouterProcess

pytestmark = pytest.mark.cluster


def test_pools_are_added_edited_and_removed_while_the_router_runs(
    ground: Ground, start: Start, account_of_router: Callable[..., Path], tmp_path: Path
) -> None:
    start("operator-0")
    ground.apply(ground.deployment("small"), ground.deployment("other", gpus=0))
    gpu0 = ground.pool("gpu0", deployment_ref("small"))
    gpu1 = ground.pool("gpu1", deployment_ref("other"), default="other")
    router = RouterProcess(
        ground.cluster,
        tmp_path / "router",
        "router-1",
        kubernetes={"kubeconfig": str(account_of_router("router", gpu0, gpu1))},
        upstreams=[{"name": "far", "url": "http://127.0.0.1:9"}],
    )

    def follow(*names: str, namespace: str = ground.namespace) -> None:
        router.configure(poolsFrom={"namespace": namespace, "names": list(names)})

    def answers(model: str, status: int, limit_s: float = 40) -> None:
        until(lambda: router.chat(model).status == status, f"{model}: {status}", limit_s)

    try:
        # One that had no pool at all follows the first one without a restart.
        router.start()
        follow("gpu0")
        until(lambda: router.said("configuration reloaded"), "the file was read")
        assert router.chat("small").status == 404

        # Added: it is served.
        ground.apply(gpu0)
        answers("small", 200)
        pods = ground.pods("small")

        # Edited: in force, and the resident does not notice.
        named = [deployment_ref("small", models=["tiny"])]
        ground.patch("mpool/gpu0", {"spec": {"members": named}})
        answers("tiny", 200)
        assert router.chat("tiny").member == "small"

        # Of another name: not ours until the file says so, and then without a restart.
        ground.apply(gpu1)
        until(lambda: ground.get("lease", "modelpool-gpu1"), "the operator has seen it")
        assert router.chat("other").status == 404
        with ThreadPoolExecutor(1) as clients:
            running = streamed(clients, router, "small")
            until(lambda: in_work(ground, "small"), "the stream runs")
            follow("gpu0", "gpu1")
            answers("other", 200)
            assert is_whole(running.result())
        assert ground.mark("deployment/other").startswith(f"{ground.namespace}/modelpool-gpu1:")

        # No longer named: its member stays as it is, and is nobody's.
        follow("gpu0")
        answers("other", 404)
        until(lambda: ground.mark("deployment/other") == "", "the mark is taken away")
        assert ground.replicas("deployment/other") == 1
        until(
            lambda: not ground.get("lease", "modelpool-gpu1")["spec"].get("holderIdentity"),
            "the Lease is given back",
        )

        # Only for another namespace it has to be started again.
        follow("gpu0", namespace="elsewhere")
        until(lambda: router.said("needs a restart, the old value stays"), "it is refused")
        follow("gpu0")
        assert router.chat("small").status == 200

        # Removed: its model is unknown, and no replica moves.
        assert [each["metadata"]["uid"] for each in ground.pods("small")] == [
            each["metadata"]["uid"] for each in pods
        ]
        ground.kubectl("delete", "mpool", "gpu0", "-n", ground.namespace, "--timeout=60s")
        answers("small", 404)
        until(lambda: ground.mark("deployment/small") == "", "the mark is taken away")
        assert ground.replicas("deployment/small") == 1
    finally:
        router.stop()


def model_deployment(ground: Ground, name: str, kind: str) -> Object:
    """A ModelDeployment of the fake member, suspended."""
    command = [sys.executable, "-m", "modelpool_router.testing.member"]
    role: dict[str, Any] = {
        "name": "server",
        "instanceType": kind,
        "image": "modelpool.test/any",
        "command": [*command, "--host", "$(POD_IP)", "--port", "8080"],
        "ports": [{"name": "http", "containerPort": 8080}],
        "terminationGracePeriodSeconds": 15,
    }
    return {
        "apiVersion": "modelpool.dev/v1alpha1",
        "kind": "ModelDeployment",
        "metadata": {"name": name, "namespace": ground.namespace},
        "spec": {
            "model": {"name": "tiny"},
            "engine": {"name": "Custom"},
            "suspend": True,
            "roles": [role],
        },
    }


def test_members_of_every_kind_take_turns_and_can_be_removed(ground: Ground, start: Start) -> None:
    start("operator-0")
    kind = f"{ground.namespace}-card"
    group = model_deployment(ground, "group", kind)
    instance_type = {
        "apiVersion": "modelpool.dev/v1alpha1",
        "kind": "InstanceType",
        "metadata": {"name": kind},
        "spec": {"queueName": kind, "accelerator": {"card": GPU}},
    }
    members = [
        service_ref("coder"),
        deployment_ref("judge"),
        {"statefulSetRef": {"name": "archive"}, "profile": "llama-server"},
        {"modelDeploymentRef": {"name": "group"}, "profile": "llama-server"},
    ]
    ground.apply(*queues(ground.namespace, kind, gpus=1))
    ground.apply(
        instance_type,
        group,
        ground.service("coder"),
        ground.deployment("judge"),
        ground.stateful_set("archive"),
        ground.pool("gpu0", *members, linger="0s", maxTurn="1s", swapBudget="100s"),
        ground.router("gpu0"),
    )
    objects = {
        "coder": "isvc/coder",
        "judge": "deployment/judge",
        "archive": "statefulset/archive",
    }
    with one_at_a_time(ground.kubectl, ground.namespace) as pods:
        front = ground.front()
        for model in ("coder", "judge", "archive", "group", "coder"):
            answer = front.chat(model, timeout_s=110)
            assert (answer.status, answer.member) == (200, model), answer.body
            for name, what in objects.items():
                assert ground.replicas(what) == int(name == model)
            assert ground.get("mdep", "group")["spec"]["suspend"] is (model != "group")
        assert ground.items_of("workloads.kueue.x-k8s.io") == []

        # While a replica is replaced a member is not ready; then its new Pod answers.
        assert front.chat("group").member == "group"
        old = ground.pods("group")[0]["metadata"]["uid"]
        group["spec"]["roles"][0]["env"] = [{"name": "A", "value": "1"}]
        ground.patch("mdep/group", {"spec": {"roles": group["spec"]["roles"]}})
        until(lambda: old not in [p["metadata"]["uid"] for p in ground.pods("group")], "it is gone")
        # Its end soon after it had landed counts as a failed load, so there may be a pause.
        until(lambda: front.chat("group", timeout_s=110).status == 200, "the new one answers", 90)
        assert [each["metadata"]["uid"] for each in ground.pods("group")] != [old]

        # A member that is removed while it is stopped is let go of.
        ground.patch("mpool/gpu0", {"spec": {"members": [m for m in members if m != members[2]]}})
        until(lambda: ground.mark("statefulset/archive") == "", "the mark is taken away")
        assert front.chat("archive").status == 404

        # The resident is drained first: its stream comes to its own end.
        assert front.chat("judge").member == "judge"
        with ThreadPoolExecutor(1) as clients:
            running = streamed(clients, front, "judge")
            until(lambda: in_work(ground, "judge"), "the stream runs")
            ground.patch("mpool/gpu0", {"spec": {"members": [members[0], members[3]]}})
            until(lambda: front.chat("judge").status == 404, "it is no member any more")
            assert not running.done()
            assert not any(is_ending(each) for each in ground.pods("judge"))
            assert is_whole(running.result())
        until(lambda: ground.mark("deployment/judge") == "", "it is let go of")
        assert ground.replicas("deployment/judge") == 0
        assert front.chat("coder").member == "coder"
    assert pods.told[:10] == [
        *("+coder", "-coder", "+judge", "-judge", "+archive", "-archive"),
        *("+group", "-group", "+coder", "-coder"),
    ]


def test_a_pool_that_is_not_in_order_keeps_its_resident_and_moves_nothing(
    ground: Ground, start: Start
) -> None:
    start("operator-0")
    members = [service_ref("coder"), service_ref("judge")]
    ground.apply(
        ground.service("coder"),
        ground.service("judge"),
        ground.service("mac", gpus=0, accelerator="metal"),
        ground.pool("gpu0", *members, default="coder", linger="0s"),
        ground.router("gpu0"),
    )
    moved = ("isvc/coder", "isvc/judge", "deployment/coder", "deployment/judge")
    front = ground.front()
    assert front.chat("coder").member == "coder"
    until(lambda: ground.status().get("residentMember") == "coder", "it is told")
    before = ground.generations(*moved)
    # Another default moves nothing either, as long as the pool is warm: to the end of this test.
    ground.patch("mpool/gpu0", {"spec": {"default": "judge"}})
    until(lambda: ground.router_said("ModelPools in force"), "it is in force", 30)

    def nothing_moves(code: str, *words: str) -> None:
        # Until the router has seen it, too, the pool is as it was.
        withheld = f"the slot of gpu0 is withheld: {code}"
        until(lambda: ground.router_said(withheld), "it is in force", 30)
        refused = until(
            lambda: (answer := front.chat("judge")).status == 503 and answer, "it is refused", 30
        )
        assert refused is not False
        assert refused.code == "slot_unavailable"
        assert all(each in refused.message for each in (code, *words)), refused.message
        assert int(refused.headers["retry-after"]) >= 1
        assert front.chat("coder").status == 200
        assert ground.status()["phase"] == "Degraded"
        assert ground.status()["residentMember"] == "coder"
        assert ground.generations(*moved) == before

    # A member on metal, beside members on GPUs.
    ground.patch("mpool/gpu0", {"spec": {"members": [*members, service_ref("mac")]}})
    until(
        lambda: ground.condition("MetalSupported") == "False/MetalMembersUnsupported", "it is told"
    )
    assert "mac" in ground.message("MetalSupported")
    nothing_moves("MetalMembersUnsupported", "mac")

    # A member that is not there.
    ground.patch("mpool/gpu0", {"spec": {"members": [*members, service_ref("ghost")]}})
    until(lambda: ground.condition("MembersValid") == "False/MissingMembers", "it is told")
    assert ground.condition("MetalSupported") == "True/KubernetesGPU"
    nothing_moves("MissingMembers", "ghost")

    # A second pool that wants one of them gets nothing, and the first goes on.
    ground.patch("mpool/gpu0", {"spec": {"members": members}})
    ground.apply(ground.pool("gpu1", service_ref("judge"), default="judge"))
    until(lambda: ground.condition("MembersValid", "gpu1") == "False/MemberShared", "it is told")
    assert "modelpool-gpu0" in ground.message("MembersValid", "gpu1")
    until(lambda: ground.condition("MembersValid") == "True/AllResolved", "the first is whole")
    assert ground.generations(*moved) == before
    until(lambda: front.chat("judge").status == 200, "the first goes on", 60)
    assert ground.status("gpu1")["phase"] == "Degraded"
    assert ground.mark("isvc/judge").startswith(f"{ground.namespace}/modelpool-gpu0:")
