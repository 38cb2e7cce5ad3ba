"""
Why a member does not come up, as it is told to the client: quickly, and in the cluster's own words.

All of them fail at the same time, each in a pool of its own, in one namespace.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster_ground import Ground, deployment_ref
from cluster_kubectl import Kubectl, KubectlFailed, Object, until
from cluster_roles import LESS_THAN_SHIPPED, OWN_FILE, router_account
from cluster_router import Answer, RouterProcess
from harness import Cluster

pytestmark = pytest.mark.cluster
GRANTED = ("pull", "oom", "crash", "unschedulable", "fine")
"""Members of the router that has all of its rights."""
REFUSED = "refused"
LESS = LESS_THAN_SHIPPED + OWN_FILE
LIMIT_S = 30.0
"""Far less than `loadTimeout`, which is ten minutes, and than the budget of the swap."""


@dataclass(frozen=True)
class Told:
    """What a client was told, and how long it took."""

    answer: Answer
    seconds: float


def members(ground: Ground) -> list[Object]:
    """One Deployment for each way to fail, and one that does not."""
    pull = ground.deployment("pull", gpus=0)
    _container(pull)["image"] = "modelpool.test/absent"
    unschedulable = ground.deployment("unschedulable", gpus=0)
    unschedulable["spec"]["template"]["spec"]["nodeSelector"] = {"modelpool.test/no": "such-node"}
    return [
        pull,
        unschedulable,
        ground.deployment("oom", "--never-ready", gpus=0),
        ground.deployment(
            "crash", "--exit-at-start", "7", "--exit-message", "no such model", gpus=0
        ),
        ground.deployment("fine", gpus=0),
        ground.deployment(REFUSED, gpus=0),
    ]


def _container(deployment: Object) -> Object:
    found: Object = deployment["spec"]["template"]["spec"]["containers"][0]
    return found


def take_the_right_to_patch(ground: Ground) -> None:
    """Take a right from a router that has used it once."""
    what = f"deployment/{REFUSED}"
    until(lambda: ground.mark(what), "the router has looked at its member, and marked it")
    rules = ground.get("role", LESS)["rules"]
    for rule in rules:
        if rule["resources"] == ["deployments"]:
            rule["verbs"].remove("patch")
    ground.patch(f"role/{LESS}", {"rules": rules})
    account = ground.cluster.service_account(ground.namespace, LESS)
    as_router = ground.cluster.as_user(account)
    until(lambda: not _may_patch(as_router, ground.namespace), "the right is gone", 20)


def _may_patch(kubectl: Kubectl, namespace: str) -> bool:
    try:
        kubectl("auth", "can-i", "patch", f"deployments/{REFUSED}", "-n", namespace)
    except KubectlFailed:
        return False  # that is how it says no
    return True


@pytest.fixture(scope="module")
def told(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Told]]:
    namespace = cluster.new_namespace("reasons")
    ground = Ground(cluster, namespace)
    ground.apply(*members(ground))
    folder = tmp_path_factory.mktemp("reasons")
    with ExitStack() as stack:

        def router(name: str, account: Path, *models: str) -> RouterProcess:
            made = RouterProcess(
                cluster,
                folder / name,
                name,
                leaseNamespace=namespace,
                kubernetes={"kubeconfig": str(account)},
                pools=[
                    {
                        "name": each,
                        "unschedulableAfter": "2s",
                        "members": [
                            {
                                "name": each,
                                "profile": "llama-server",
                                "deployment": {"namespace": namespace, "name": each},
                            }
                        ],
                    }
                    for each in models
                ],
            )
            made.start()
            stack.callback(made.stop, signal.SIGKILL)
            return made

        pools = {each: ground.pool(each, deployment_ref(each)) for each in (*GRANTED, REFUSED)}
        account = router_account(
            cluster, "router", *(pools[each] for each in GRANTED), makes_leases=True
        )
        routers = dict.fromkeys(GRANTED, router("router-1", account, *GRANTED))
        less = router_account(cluster, LESS_THAN_SHIPPED, pools[REFUSED], makes_leases=True)
        routers[REFUSED] = router("router-2", less, REFUSED)
        take_the_right_to_patch(ground)

        def ask(model: str) -> Told:
            began = time.monotonic()
            answer = routers[model].chat(model)
            return Told(answer, time.monotonic() - began)

        clients = stack.enter_context(ThreadPoolExecutor(len(routers)))
        asked = {each: clients.submit(ask, each) for each in routers}
        until(lambda: _is_up(ground, "oom"), "the member runs, and loads")
        note = "kubelet.modelpool.test/oom=now"
        ground.kubectl("annotate", "pods", "-l", "app=oom", note, "-n", namespace)
        yield {each: one.result() for each, one in asked.items()}
    cluster.kubectl("delete", "deployments,pods", "--all", "-n", namespace, "--wait=false")
    cluster.kubectl("delete", "namespace", namespace, "--wait=false")


def _is_up(ground: Ground, name: str) -> bool:
    return any(
        "running" in each["state"]
        for pod in ground.pods(name)
        for each in pod.get("status", {}).get("containerStatuses", [])
    )


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("pull", ("ImagePull", "modelpool.test/absent")),
        ("oom", ("OOMKilled", "container member of Pod oom-", "exit code 137")),
        ("crash", ("CrashLoopBackOff", "container member of Pod crash-", "exit code 7")),
        ("unschedulable", ("Unschedulable", "node affinity/selector")),
        (REFUSED, ("Forbidden", 'cannot patch resource "deployments"', LESS)),
    ],
)
def test_a_load_that_cannot_succeed_fails_soon_in_the_clusters_words(
    told: dict[str, Told], model: str, words: tuple[str, ...]
) -> None:
    answer, seconds = told[model].answer, told[model].seconds
    print(f"{seconds:.1f} s: {answer.status} {answer.body.decode()}")

    assert (answer.status, answer.code) == (503, "member_failed")
    for each in (model, *words):
        assert each in answer.message
    assert json.loads(answer.body)["error"]["message"]
    assert int(answer.headers["retry-after"]) >= 1
    assert seconds < LIMIT_S


def test_what_fails_in_one_pool_is_nothing_to_another(told: dict[str, Told]) -> None:
    fine = told["fine"]

    assert (fine.answer.status, fine.answer.member) == (200, "fine")
    assert fine.seconds < LIMIT_S
