"""Events, memories, settings and health: the small parts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from memcluster import MemCluster
from memcontrollers import deployment
from modelpool_api.names import SLOT_ANNOTATION
from modelpool_kube import errors
from modelpool_kube.kinds import (
    DEPLOYMENTS,
    EVENTS,
    INFERENCE_SERVICES,
    LEASES,
    MODEL_POOLS,
    MODEL_ROUTERS,
    Json,
    Kind,
)
from modelpool_kube.slotrules import Facts, Look, Member
from modelpool_operator.app import health
from modelpool_operator.engine.acting import Actor, Key
from modelpool_operator.engine.events import NOTE_LIMIT, WINDOW_S, EventRecorder
from modelpool_operator.engine.memory import LeaseMemory, ScaleMemory
from modelpool_operator.engine.metrics import OperatorMetrics
from modelpool_operator.plan.members import ObservedMember
from modelpool_operator.plan.model import Create, Delete, Happened, Patch, delete_of, patch_of
from modelpool_operator.settings import read
from operatorworld import OperatorWorld, Pass

POOL: Json = {"metadata": {"name": "gpu0", "namespace": "lab", "uid": "u-1"}}
COLD = Happened("MemberWarmed", "judge is being loaded")


# Events


async def test_given_the_same_event_again_then_it_is_counted_instead_of_told_anew() -> None:
    cluster = MemCluster()
    recorder = EventRecorder(cluster.port("operator"), "operator-0")

    for _ in range(3):
        await recorder.tell(MODEL_POOLS, POOL, COLD)
        cluster.advance(10)
    await recorder.tell(MODEL_POOLS, POOL, Happened("MemberWarmed", "coder is being loaded"))

    found = {each["note"]: each for each in cluster.all(EVENTS)}
    assert len(found) == 2
    first = found[COLD.note]
    assert first["series"]["count"] == 3
    assert first["regarding"]["uid"] == "u-1"
    assert first["type"] == "Normal"
    assert first["reportingController"] == "modelpool-operator"
    assert first["reportingInstance"] == "operator-0"
    assert first["action"] and first["eventTime"]
    cluster.advance(WINDOW_S)
    await recorder.tell(MODEL_POOLS, POOL, COLD)
    assert len(cluster.all(EVENTS)) == 3


async def test_given_an_event_that_was_thrown_away_then_it_is_told_anew() -> None:
    cluster = MemCluster()
    recorder = EventRecorder(cluster.port("operator"), "operator-0")
    await recorder.tell(MODEL_POOLS, POOL, COLD)
    cluster.remove(EVENTS, "lab", cluster.names(EVENTS)[0])

    await recorder.tell(MODEL_POOLS, POOL, COLD)

    assert len(cluster.all(EVENTS)) == 1


async def test_given_events_that_cannot_be_written_then_nobody_fails() -> None:
    cluster = MemCluster()
    port = cluster.port("operator")
    port.fail(errors.Forbidden("no"), kind=EVENTS, times=2)
    recorder = EventRecorder(port, "operator-0")

    await recorder.tell(MODEL_POOLS, POOL, COLD)

    assert cluster.all(EVENTS) == []


async def test_given_a_long_note_then_it_is_cut_between_characters() -> None:
    cluster = MemCluster()
    recorder = EventRecorder(cluster.port("operator"), "o" * 300)

    await recorder.tell(MODEL_POOLS, POOL, Happened("X", "ä" * 3000, True))

    (made,) = cluster.all(EVENTS)
    assert len(made["note"].encode()) <= NOTE_LIMIT
    assert made["note"].endswith("...")
    assert len(made["reportingInstance"]) == 128
    assert made["type"] == "Warning"


# Memories


def lease(holder: str, version: int, duration: int = 15) -> Json:
    """Return a Lease."""
    meta = {"name": "modelpool-gpu0", "uid": "l-1", "resourceVersion": str(version)}
    return {
        "metadata": meta,
        "spec": {"holderIdentity": holder, "leaseDurationSeconds": duration},
    }


def test_given_a_lease_that_is_renewed_then_it_is_never_free() -> None:
    memory = LeaseMemory()

    for second in range(0, 300, 5):
        assert memory.free_for(lease("router", second), "me", float(second)) is None


def test_given_a_lease_that_stands_still_then_it_is_free_from_when_it_ran_out() -> None:
    memory = LeaseMemory()

    assert memory.free_for(lease("router", 1), "me", 100.0) is None
    assert memory.free_for(lease("router", 1), "me", 114.0) is None
    assert memory.free_for(lease("router", 1), "me", 120.0) == 5.0
    assert memory.free_for(lease("router", 2), "me", 130.0) is None


def test_given_a_lease_of_nobody_or_ours_then_it_is_free_since_it_was_seen_so() -> None:
    memory = LeaseMemory()

    assert memory.free_for(None, "me", 10.0) == 0.0
    assert memory.free_for(lease("", 1), "me", 20.0) == 10.0
    assert memory.free_for(lease("me", 2), "me", 50.0) == 40.0
    assert memory.free_for(lease("router", 3), "me", 60.0) is None
    assert memory.free_for(lease("", 4), "me", 70.0) == 0.0


def test_given_reports_of_renewals_then_they_count_without_a_pass() -> None:
    memory = LeaseMemory()
    memory.free_for(lease("router", 1), "me", 0.0)

    for second in range(5, 100, 5):
        memory.renewed(lease("router", second), float(second))

    assert memory.free_for(lease("router", 95), "me", 100.0) is None


def observed(wants: int, mark: str | None = "lab/modelpool-gpu0:1") -> ObservedMember:
    """Return a member that asks for *wants*."""
    obj = deployment("coder", replicas=wants)
    obj["metadata"]["annotations"] = {} if mark is None else {SLOT_ANNOTATION: mark}
    facts = Facts(looked=tuple(Look), member=obj)
    return ObservedMember(Member("coder", DEPLOYMENTS, "lab", "coder"), None, facts)


def test_given_two_changes_of_a_stranger_within_ten_minutes_then_it_is_a_contest() -> None:
    memory = ScaleMemory()
    memory.look([observed(1)], 0.0, is_quiet=True)

    assert not memory.look([observed(0)], 10.0, is_quiet=True)
    assert memory.look([observed(1)], 20.0, is_quiet=True) == {"coder"}
    assert memory.look([observed(1)], 609.0, is_quiet=True) == {"coder"}
    assert not memory.look([observed(1)], 620.0, is_quiet=True)


@pytest.mark.parametrize(("mark", "is_quiet"), [("lab/modelpool-gpu0:1", False), (None, True)])
def test_given_changes_of_those_who_may_then_they_are_no_contest(mark: Any, is_quiet: bool) -> None:
    memory = ScaleMemory()

    for second in range(10):
        found = memory.look([observed(second % 2, mark)], float(second), is_quiet=is_quiet)
        assert not found


# Settings and the program


def test_given_nothing_then_the_defaults_are_these() -> None:
    found = read([], {"POD_NAME": "operator-x", "POD_NAMESPACE": "tools"})

    assert found.namespaces == ()
    assert found.identity == "operator-x"
    assert found.lease_namespace == "tools"
    assert (found.listen_host, found.listen_port) == ("0.0.0.0", 8081)
    assert found.workers == 4
    assert found.router_image.startswith("ghcr.io/modelpool/modelpool:")


def test_given_flags_and_variables_then_flags_win() -> None:
    environ = {"MODELPOOL_OPERATOR_NAMESPACES": "a, b", "MODELPOOL_OPERATOR_WORKERS": "2"}

    found = read(["--workers", "7", "--listen", "[::1]:0"], environ)

    assert found.namespaces == ("a", "b")
    assert found.workers == 7
    assert (found.listen_host, found.listen_port) == ("::1", 0)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--listen", "8081"],
        ["--listen", "x:99999"],
        ["--workers", "0"],
        ["--workers", "many"],
        ["--resync", "1"],
        ["--log-level", "loud"],
        ["--unknown"],
    ],
)
def test_given_a_wrong_flag_then_it_is_refused_in_words(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        read(arguments, {})

    assert refused.value.code == 2
    assert arguments[0] in capsys.readouterr().err


async def test_given_the_health_port_then_it_answers() -> None:
    metrics = OperatorMetrics()
    metrics.leads.set(1)
    reconcile = metrics.counted(MODEL_POOLS, _failing)
    with pytest.raises(errors.Conflict):
        await reconcile(("lab", "gpu0"))

    async with TestClient(TestServer(health(metrics))) as client:
        for path in ("/livez", "/readyz"):
            async with client.get(path) as answer:
                assert answer.status == 200
        async with client.get("/metrics") as answer:
            text = await answer.text()

    assert "modelpool_operator_leads 1.0" in text
    assert 'modelpool_operator_passes_total{kind="ModelPool",outcome="conflict"} 1.0' in text
    assert 'modelpool_operator_passes_total{kind="ModelPool",outcome="done"} 0.0' in text


async def _failing(key: object) -> float | None:
    raise errors.Conflict("modified")


def test_given_no_cluster_then_the_program_says_so_and_ends(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-m", "modelpool_operator", "--kubeconfig", str(tmp_path / "none")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PYTHONPATH": str(root / "operator"), "PATH": "", "HOME": str(tmp_path)},
    )

    assert done.returncode == 1
    assert "cannot reach a cluster" in done.stderr
    assert "Traceback" not in done.stderr


# One step, one request


@pytest.mark.parametrize("what", ["create", "patch", "delete"])
async def test_given_an_action_then_it_is_one_request(what: str) -> None:
    cluster = MemCluster()
    made = cluster.put(DEPLOYMENTS, "lab", deployment("judge"))
    port = cluster.port("operator")
    actions: dict[str, Create | Patch | Delete] = {
        "create": Create(DEPLOYMENTS, "lab", deployment("coder")),
        "patch": patch_of(DEPLOYMENTS, made, {"spec": {"paused": True}}),
        "delete": delete_of(DEPLOYMENTS, made),
    }

    await Actor(port, EventRecorder(port, "operator-0")).write(actions[what])

    assert [(each.verb, each.kind) for each in port.requests] == [(what, DEPLOYMENTS)]


@pytest.mark.looptime(idle_timeout=100_000)
async def test_given_any_pass_then_it_writes_one_thing_at_most() -> None:
    world = OperatorWorld()
    process = world.start()
    counts: dict[Kind, list[int]] = {kind: [] for kind in process.passes}

    def counted(kind: Kind, reconcile: Pass) -> Pass:
        async def one(key: Key) -> float | None:
            before = len(process.port.requests)
            try:
                return await reconcile(key)
            finally:
                # Events tell of it; what a Lease guards is written as the fence demands.
                asked = process.port.requests[before:]
                guarded = (LEASES, DEPLOYMENTS) if kind == MODEL_POOLS else (LEASES,)
                wrote = [each for each in asked if each.is_write and each.kind != EVENTS]
                counts[kind].append(sum(each.kind not in guarded for each in wrote))

        return one

    for kind, reconcile in process.passes.items():
        process.passes[kind] = counted(kind, reconcile)
    world.member("coder")
    world.member("judge")
    world.pool("gpu0", "coder", "judge", default="judge")
    world.service("svc")
    spec = {"pools": [{"name": "gpu0"}], "allowAnonymous": True}
    world.cluster.put(MODEL_ROUTERS, "lab", {"metadata": {"name": "front"}, "spec": spec})
    await world.run(300)
    world.cluster.edit(INFERENCE_SERVICES, "lab", "svc", {"spec": {"image": "engine:2"}})
    world.cluster.edit(MODEL_ROUTERS, "lab", "front", {"spec": {"image": "modelpool:new"}})
    world.cluster.remove(MODEL_POOLS, "lab", "gpu0")
    await world.run(300)
    await world.close()

    assert {kind: max(each) for kind, each in counts.items()} == dict.fromkeys(counts, 1)
    assert all(sum(each) >= 4 for each in counts.values())
