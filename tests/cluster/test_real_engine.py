"""Two Deployments of the real llama-server take turns on the one GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster_ground import Ground, one_at_a_time
from cluster_kubectl import Object
from cluster_objects import GPU, PORT, deployment
from cluster_router import RouterProcess
from realengine import Engine, NoEngine, find_engine

pytestmark = pytest.mark.cluster
LONG = {"max_tokens": 8, "temperature": 0, "seed": 1}


@pytest.fixture
def engine() -> Engine:
    """The engine, or the test is skipped with what is missing."""
    try:
        return find_engine()
    except NoEngine as why:
        pytest.skip(str(why))


def member(ground: Ground, engine: Engine, name: str) -> Object:
    """A Deployment of it, at 0."""
    container = {
        "name": "engine",
        "image": "modelpool.test/any",
        "command": engine.command("--host", "$(POD_IP)", "--port", str(PORT)),
        "ports": [{"containerPort": PORT, "name": "http"}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": PORT}},
        "resources": {"limits": {GPU: "1"}},
    }
    made = deployment(ground.namespace, name, container)
    made["spec"]["replicas"] = 0
    return made


@pytest.fixture
def router(
    ground: Ground, account_of_router: Callable[..., Path], tmp_path: Path
) -> Iterator[RouterProcess]:
    """A router with a pool of two of its own file."""
    names = ("first", "second")
    pool = ground.pool("gpu0", *({"deploymentRef": {"name": name}} for name in names))
    account = account_of_router("router", pool, makes_leases=True)
    members = [
        {
            "name": name,
            "profile": "llama-server",
            "deployment": {"namespace": ground.namespace, "name": name},
        }
        for name in names
    ]
    made = RouterProcess(
        ground.cluster,
        tmp_path / "router",
        "router-1",
        leaseNamespace=ground.namespace,
        kubernetes={"kubeconfig": str(account)},
        pools=[{"name": "gpu0", "members": members, "linger": "0s"}],
    )
    yield made
    made.stop()


def test_two_real_engines_take_turns(ground: Ground, engine: Engine, router: RouterProcess) -> None:
    ground.apply(member(ground, engine, "first"), member(ground, engine, "second"))
    router.start()

    with one_at_a_time(ground.kubectl, ground.namespace) as pods:
        for model in ("first", "second", "first"):
            answer = router.chat(model, timeout_s=120, **LONG)
            assert (answer.status, answer.member) == (200, model), answer.body
            assert json.loads(answer.body)["choices"][0]["message"]["content"]
        stream = router.chat("second", timeout_s=120, stream=True, **LONG)
        assert (stream.status, stream.member) == (200, "second")
        assert stream.body.rstrip().endswith(b"data: [DONE]")
    assert pods.told == [
        *("+first", "-first", "+second", "-second"),
        *("+first", "-first", "+second"),
    ]
