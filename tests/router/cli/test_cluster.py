"""`doctor`, `adopt` and `forget`, on a cluster in memory."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

import memroles
from kubeworld import LEASE, NAMESPACE, KubeWorld
from memcluster import MemCluster, Request
from memcontrollers import deployment, pod_spec
from modelpool_api.names import RECORD_ANNOTATION, SLOT_ANNOTATION
from modelpool_api.v1alpha1.modelpool import ModelPool
from modelpool_kube import errors
from modelpool_kube.kinds import (
    ACCESS_REVIEWS,
    AUTOSCALERS,
    DEPLOYMENTS,
    EVENTS,
    LEASES,
    MEMBER_KINDS,
    PODS,
    Json,
    annotation,
)
from modelpool_kube.record import decode
from modelpool_kube.slotrules import Member
from modelpool_router.cli.cluster import adopted, forgotten, without_pools
from modelpool_router.cli.cluster_look import (
    Finding,
    PoolPlace,
    examine,
    guess_profile,
    needed_rights,
    slot_line,
    slots,
    why_not,
)
from modelpool_router.settings import from_mapping

A, B = (Member(name, DEPLOYMENTS, "lab", name) for name in ("a", "b"))
POOL = PoolPlace("gpu0", "lab", (A, B))


def cluster(denied: tuple[str, str] = ("", "")) -> MemCluster:
    """Return a cluster with two Deployments, in which *denied* (verb, resource) may not be."""
    made = MemCluster()

    def review(obj: Json, before: Json | None) -> Json:
        asked = obj["spec"]["resourceAttributes"]
        return {**obj, "status": {"allowed": (asked["verb"], asked["resource"]) != denied}}

    made.admit[ACCESS_REVIEWS] = review
    for name in ("a", "b"):
        made.put(DEPLOYMENTS, "lab", deployment(name))
    return made


async def bad(made: MemCluster) -> list[Finding]:
    """Return what is wrong."""
    return [each for each in await examine(made.port("cli"), [POOL]) if not each.is_good]


async def test_a_cluster_in_order_has_nothing_wrong() -> None:
    made = cluster()
    found = await examine(made.port("cli"), [POOL])

    assert all(each.is_good for each in found)
    said = "\n".join(each.what for each in found)
    assert "Lease lab/modelpool-gpu0 does not exist yet; the operator makes it" in said
    assert "Deployment lab/a can be a member; it asks for 0" in said
    assert "all 17 rights" in said
    assert {write.kind for write in made.writes} == {DEPLOYMENTS, ACCESS_REVIEWS}


@pytest.mark.parametrize(
    ("file", "are_served", "says", "way_out"),
    [
        (None, False, "CRDs of modelpool.dev are not installed", "kubectl apply"),
        (None, True, "no ModelPool in namespace lab", "-n"),
        (Path("pool.yaml"), True, "no pool of pool.yaml has its members", "deployment"),
    ],
)
def test_where_there_is_nothing_to_look_at_it_says_why(
    file: Path | None, are_served: bool, says: str, way_out: str
) -> None:
    told = without_pools(file, "lab", are_served=are_served)

    assert says in told[0]
    assert way_out in told[1]


@pytest.mark.parametrize("kind", sorted(MEMBER_KINDS))
def test_what_a_router_needs_is_what_its_role_allows(kind: str) -> None:
    members = (Member("a", MEMBER_KINDS[kind], "lab", "a"),)
    ref = {kind[0].lower() + kind[1:] + "Ref": {"name": "a"}}
    role = memroles.of_router("lab", "gpu0", [ref])
    needed = needed_rights(PoolPlace("gpu0", "lab", members))

    for verb, asked, namespace, name in needed:
        assert role(Request(1, verb, asked, namespace, name)), f"{verb} {asked.plural} {name}"
    # And the other way round, but for the ModelPools, which doctor cannot do without itself.
    verbs = {(verb, asked.plural) for verb, asked, _, _ in needed}
    assert {pair for pair in role.pairs() if pair[1] != "modelpools"} == verbs


async def test_a_pool_from_a_file_needs_the_right_to_make_its_lease() -> None:
    made = cluster(denied=("create", "leases"))
    of_file = replace(POOL, makes_lease=True)

    found = await examine(made.port("cli"), [of_file])

    assert [each.what for each in found if not each.is_good] == [
        "these credentials may not create leases in lab"
    ]
    assert any("the first router makes it" in each.what for each in found)


async def test_what_is_wrong_with_members_is_told_with_the_way_out() -> None:
    made = cluster()
    made.edit(DEPLOYMENTS, "lab", "a", {"spec": {"strategy": {"type": "RollingUpdate"}}})
    made.remove(DEPLOYMENTS, "lab", "b")

    found = await bad(made)

    assert [each.what for each in found] == [
        "Deployment lab/a: its strategy is RollingUpdate, which runs two Pods at every rollout",
        "Deployment lab/b does not exist",
    ]
    assert found[0].way_out == "set spec.strategy: {type: Recreate}"


async def test_a_shared_member_an_autoscaler_and_a_missing_right_are_told() -> None:
    made = cluster(denied=("patch", "deployments"))
    mark = {"metadata": {"annotations": {SLOT_ANNOTATION: "lab/modelpool-other:3"}}}
    made.edit(DEPLOYMENTS, "lab", "a", mark)
    target = {"kind": "Deployment", "name": "b"}
    body = {"metadata": {"name": "scaler"}, "spec": {"scaleTargetRef": target}}
    made.put(AUTOSCALERS, "lab", body)

    found = await bad(made)

    assert [each.what for each in found] == [
        "Deployment lab/a is a member of the slot lab/modelpool-other",
        "HorizontalPodAutoscaler scaler scales Deployment lab/b",
        "these credentials may not patch deployments/a in lab",
        "these credentials may not patch deployments/b in lab",
    ]
    assert found[1].way_out == "kubectl delete hpa scaler -n lab"


async def test_who_else_holds_an_accelerator_is_told() -> None:
    made = cluster()
    made.put(PODS, "lab", {"metadata": {"name": "notebook"}, "spec": pod_spec(1)})
    made.put(PODS, "lab", {"metadata": {"name": "a-12345"}, "spec": pod_spec(1)})

    said = [each.what for each in await examine(made.port("cli"), [POOL])]

    assert any("Pod lab/notebook, no member, holds 1 nvidia.com/gpu" in line for line in said)
    assert not any("a-12345" in line for line in said)


async def test_adopting_writes_a_model_pool_that_is_valid_and_changes_nothing() -> None:
    made = cluster()
    made.edit(DEPLOYMENTS, "lab", "a", {"spec": {"replicas": 1}})
    before = len(made.writes)

    pool, notes = await adopted(
        made.port("cli"), "gpu0", [("Deployment", "a"), ("Deployment", "b")], "lab", for_file=False
    )

    read = ModelPool.model_validate(pool)
    assert [member.member_name for member in read.spec.members] == ["a", "b"]
    assert read.spec.default == "a"
    assert pool["metadata"] == {"name": "gpu0", "namespace": "lab"}
    assert notes == []
    assert len(made.writes) == before


async def test_adopting_writes_a_pool_of_a_file_that_can_be_loaded() -> None:
    made = cluster()
    tree, _ = await adopted(
        made.port("cli"), "gpu0", [("Deployment", "a"), ("Deployment", "b")], "lab", for_file=True
    )

    settings = from_mapping(tree)

    assert settings.pools[0].is_in_kubernetes
    assert settings.pools[0].members[1].kubernetes is not None


async def test_what_has_to_be_done_before_adopting_is_told() -> None:
    made = cluster()
    rolling = {"replicas": 1, "strategy": {"type": "RollingUpdate"}}
    made.edit(DEPLOYMENTS, "lab", "a", {"spec": rolling})
    made.edit(DEPLOYMENTS, "lab", "b", {"spec": {"replicas": 1}})

    pool, notes = await adopted(
        made.port("cli"), "gpu0", [("Deployment", "a"), ("Deployment", "b")], "lab", for_file=False
    )

    assert len(notes) == 2
    assert "set spec.strategy: {type: Recreate}" in notes[0]
    assert notes[1].startswith("a, b are all up")
    assert "default" not in pool["spec"]


@pytest.mark.parametrize(
    ("container", "known"),
    [
        ({"image": "ghcr.io/ggml-org/llama.cpp:server"}, "llama-server"),
        ({"image": "vllm/vllm-openai:v0.9"}, "vllm"),
        ({"image": "x", "command": ["python", "-m", "sglang.launch_server"]}, "sglang"),
        ({"image": "ghcr.io/huggingface/text-generation-inference:3"}, "tgi"),
        ({"image": "mine:1"}, "generic"),
    ],
)
def test_the_engine_is_guessed_from_image_and_command(
    container: dict[str, Any], known: str
) -> None:
    assert guess_profile({"spec": {"containers": [container]}}) == known


async def test_forgetting_is_recorded_beside_a_router_that_renews(tmp_path: Path) -> None:
    world = KubeWorld()
    driver = world.driver()
    await driver.observe()
    await driver.activate(next(iter(world.specs())))
    pod = world.pod("alpha")
    port = world.cluster.port("cli")
    port.fail(errors.Conflict("changed", code=409), verb="patch", kind=LEASES)

    said = await forgotten(port, NAMESPACE, pod["metadata"]["name"], None)

    assert "counts as gone" in said
    record = decode(annotation(world.cluster.must(LEASES, NAMESPACE, LEASE), RECORD_ANNOTATION))
    assert record is not None and record.forgotten == (pod["metadata"]["uid"],)
    assert record.owner == "alpha"
    [event] = world.cluster.all(EVENTS, NAMESPACE)
    assert event["reason"] == "PodForgotten"
    assert "already" in await forgotten(port, NAMESPACE, pod["metadata"]["name"], "gpu0")
    await driver.close(stop_members=False)
    await world.end()


async def test_forgetting_without_a_pool_to_mean_says_which_there_are() -> None:
    with pytest.raises(typer.Exit):
        await forgotten(cluster().port("cli"), "lab", "x", None)
    await asyncio.sleep(0)


async def test_the_slots_are_told_by_their_leases_alone() -> None:
    world = KubeWorld()
    driver = world.driver()
    await driver.observe()
    await driver.activate(next(iter(world.specs())))
    world.cluster.put(LEASES, NAMESPACE, LEASES.body("somebody-else", NAMESPACE, spec={}))

    [slot] = await slots(world.cluster.port("cli"), NAMESPACE)

    line = slot_line(slot)
    assert line.startswith("gpu0: alpha is resident; since 20")
    assert line.endswith("; moved by router-1")
    pool = PoolPlace("gpu0", NAMESPACE, tuple(m.slot_member for m in world.specs().values()))
    said = await why_not(world.cluster.port("cli"), [pool], "alpha")
    assert said[1] == "A request for alpha is served at once."
    world.cluster.edit(DEPLOYMENTS, NAMESPACE, "beta", {"spec": {"replicas": 3}})
    said = await why_not(world.cluster.port("cli"), [pool], "beta")
    assert "asks for 3 replicas and a slot holds one: set spec.replicas to 0." in said[1]
    assert await why_not(world.cluster.port("cli"), [pool], "gamma") == []
    await driver.close(stop_members=False)
    await world.end()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"epoch":3,"phase":"loading","target":"b"}', "p: b is loading; no router holds it"),
        (
            '{"epoch":3,"phase":"draining","owner":"a","target":"b","reason":"PodsBusy","held":2}',
            "p: a finishes its answers before b; PodsBusy; 2 held; no router holds it",
        ),
        ("{", "p: frozen: the slot record is not JSON"),
    ],
)
async def test_a_slot_in_every_phase_is_told_in_a_line(text: str, line: str) -> None:
    made = cluster()
    body = LEASES.body("modelpool-p", "lab", spec={})
    body["metadata"]["annotations"] = {RECORD_ANNOTATION: text}
    made.put(LEASES, "lab", body)

    [slot] = await slots(made.port("cli"), "lab")

    assert slot_line(slot).startswith(line)
