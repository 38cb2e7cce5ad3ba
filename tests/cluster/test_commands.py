"""The commands for people, against a real API server: adopt, doctor, status, why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster_commands import Commands
from cluster_ground import Ground, is_ending
from cluster_kubectl import until
from cluster_operator import Start

pytestmark = pytest.mark.cluster


def test_workloads_that_run_are_adopted_and_looked_after(
    ground: Ground,
    start: Start,
    account_of_router: Callable[..., Path],
) -> None:
    command = Commands(ground.kubectl, ground.namespace)
    large, small = ground.deployment("large"), ground.deployment("small")
    large["spec"]["strategy"] = {"type": "RollingUpdate"}
    small["spec"]["replicas"] = 1
    ground.apply(large, small)
    until(lambda: ground.get("deployment", "small")["status"].get("readyReplicas"), "small runs")
    pods = ground.pods("small")

    # A pool is written of them; what is wrong with them is told, and nothing is changed.
    adopt = ("adopt", "deploy/small", "deploy/large", "--pool", "gpu0")
    before = ground.generations("deployment/small", "deployment/large")
    text = command(*adopt, "-o", "yaml")
    assert ground.generations("deployment/small", "deployment/large") == before
    assert json.loads(command(*adopt, "-o", "json"))["spec"]["default"] == "small"
    ground.kubectl("apply", "-f", "-", stdin=text)
    assert "does not exist" in command("adopt", "deploy/ghost", "--pool", "x", code=1)

    # The doctor finds what stands in the way, and says the way out.
    said = command("doctor", code=1)
    assert "CRDs are installed" in said
    assert "bad" in said and "Deployment" in said and "large" in said and "Recreate" in said
    assert "small can be a member; it asks for 1" in said
    changed = {"spec": {"strategy": {"type": "Recreate", "rollingUpdate": None}}}
    ground.patch("deployment/large", changed)
    said = command("doctor")
    assert "bad" not in said
    assert "rights that gpu0 needs" in said

    # With an autoscaler on a member, and with an account that may not do it all.
    ground.kubectl("autoscale", "deployment", "large", "--max=2", "--min=1", "-n", ground.namespace)
    said = command("doctor", code=1)
    assert "HorizontalPodAutoscaler large scales" in said
    assert f"kubectl delete hpa large -n {ground.namespace}" in said
    ground.kubectl("delete", "hpa", "large", "-n", ground.namespace)
    pool = ground.get("mpool", "gpu0")
    without = {**pool, "spec": {**pool["spec"], "members": pool["spec"]["members"][:1]}}
    account = account_of_router("half", without)
    reads = {"apiGroups": ["modelpool.dev"], "resources": ["modelpools"], "verbs": ["list"]}
    role = ground.get("role", "half")
    ground.patch("role/half", {"rules": [*role["rules"], reads]})
    said = Commands(ground.kubectl, ground.namespace, account)("doctor", code=1)
    assert f"these credentials may not patch deployments/large in {ground.namespace}" in said

    # Used: the running one is the resident, and its Pod does not notice.
    assert "No router has moved the slot" in command("why", "large")
    start("operator-0")
    ground.apply(ground.router("gpu0"))
    front = ground.front()
    assert front.chat("small").member == "small"
    assert [each["metadata"]["uid"] for each in ground.pods("small")] == [
        each["metadata"]["uid"] for each in pods
    ]
    router = next(each for each in ground.pods("front") if not is_ending(each))
    name = router["metadata"]["name"]
    assert "gpu0: small is resident" in command("status")
    assert f"moved by {name}" in command("status")
    slots = json.loads(command("status", "--json"))["slots"]
    assert [(each["pool"], each["owner"], each["phase"]) for each in slots] == [
        ("gpu0", "small", "resident")
    ]
    assert "served at once" in command("why", "small")
    assert "served at once" not in command("why", "large")
    assert "small is resident" in command("why", "large")
    assert front.chat("large").member == "large"
    until(lambda: "gpu0: large is resident" in command("status"), "the status follows", 15)
    said = command("doctor")
    assert f"is held by {name}" in said
    assert "large holds the slot" in said
