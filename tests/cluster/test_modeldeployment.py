"""Replacing replicas on a real API server with the real Kueue and running processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from cluster_objects import GPU, queues
from cluster_replicas import (
    CORES,
    SLICE,
    Ground,
    condition,
    foreign_workload,
    is_at_rest,
    replacing,
    role,
    waits,
)
from harness import OwnCluster
from modelpool_api.names import MEMBER_INDEX_LABEL, REPLACEMENTS_ANNOTATION, group_name
from modelpool_kube.kinds import (
    INSTANCE_TYPES,
    SERVICES,
    WORKLOADS,
    Json,
    annotation,
    meta,
    uid,
)

pytestmark = pytest.mark.cluster


@pytest.fixture
async def ground(own: OwnCluster, namespace: str) -> AsyncIterator[Ground]:
    """A namespace to replace replicas in."""
    async with replacing(own, namespace) as made:
        yield made


async def test_a_ladder_of_sizes_is_new_pods_and_a_new_workload_at_each_step(
    ground: Ground,
) -> None:
    await ground.deploy(role(instanceType=await ground.type("a", gpus=4)))
    await ground.rest()
    seen = await ground.uids() | {uid(await ground.workload())}

    for size in (2, 3, 2, 1):
        await ground.edit(size=size)
        await ground.rest()

        now = await ground.uids() | {uid(await ground.workload())}
        assert len(now) == size + 1 and not now & seen
        assert await ground.is_admitted()
        services = (await ground.client.list(SERVICES, ground.namespace)).items
        peers = [each for each in services if meta(each)["name"] == "chat-server-r0"]
        assert len(peers) == (1 if size > 1 else 0)
        seen |= now


async def test_a_healthy_sibling_is_kept_until_the_queued_replacement_is_admitted(
    ground: Ground,
) -> None:
    kind = await ground.type("a", gpus=2)
    await ground.deploy(role(instanceType=kind, replicas=2))
    await ground.rest()
    sibling, workload = await ground.uids(0), uid(await ground.workload(0))
    await ground.edit(size=2)
    await ground.until(waits, "the replacement is queued")

    for number in range(5):
        if number == 2:
            ground.restart()
        await ground.turn()
        assert await ground.uids(0) == sibling and uid(await ground.workload(0)) == workload
        assert not await ground.is_admitted(1)

    ground.own.kubectl.apply(*queues(ground.namespace, kind, gpus=3))
    while not await ground.is_admitted(1):
        assert await ground.uids(0) == sibling and uid(await ground.workload(0)) == workload
        await ground.turn()
    # Now it is its turn, and its own replacement waits for the last card.
    await ground.until(waits, "the next replacement is queued")
    first = await ground.uids(1)
    assert (await ground.slot())["ordinal"] == 0 and not await ground.uids(0) & sibling
    ground.own.kubectl.apply(*queues(ground.namespace, kind, gpus=4))
    await ground.rest()
    assert await ground.uids(1) == first and len(await ground.uids()) == 4
    assert uid(await ground.workload(0)) != workload


async def test_another_type_and_another_command_go_the_same_way(ground: Ground) -> None:
    first, second = await ground.type("a", gpus=2), await ground.type("b", gpus=2)
    await ground.deploy(role(instanceType=first))
    await ground.rest()
    old = await ground.uids() | {uid(await ground.workload())}

    await ground.edit(instanceType=second)
    await ground.rest()
    assert (await ground.workload())["spec"]["queueName"] == second
    assert not (await ground.uids() | {uid(await ground.workload())}) & old

    await ground.edit(command=["sleep", "900"])
    await ground.rest()
    (pod,) = await ground.pods()
    assert pod["spec"]["containers"][0]["command"] == ["sleep", "900"]


async def test_an_obsolete_queued_configuration_is_superseded_without_admission(
    ground: Ground,
) -> None:
    await ground.deploy(
        role(instanceType=await ground.type("a", gpus=1), resources={"accelerator": 2})
    )
    await ground.until(
        lambda found: (
            condition(found, "QuotaReserved") == "False"
            and "waiting for quota" in str(found["status"])
        ),
        "it waits for quota",
    )
    old = await ground.uids()

    await ground.edit(resources={"accelerator": 1})
    await ground.rest()

    assert not await ground.uids() & old
    assert not any("ReplacementStarted" in each and "outdated" in each for each in ground.told)


async def test_a_queued_replacement_is_superseded_in_its_place_without_admission(
    ground: Ground,
) -> None:
    kind = await ground.type("a", gpus=2)
    await ground.deploy(role(instanceType=kind, replicas=2))
    await ground.rest()
    sibling = await ground.uids(0) | {uid(await ground.workload(0))}
    await ground.edit(resources={"accelerator": 2})
    await ground.until(waits, "the replacement is queued")
    queued = await ground.uids(1) | {uid(await ground.workload(1))}
    assert not await ground.is_admitted(1)

    await ground.edit(command=["sleep", "900"], resources={"accelerator": 1})
    async with asyncio.timeout(90):
        while not await ground.is_admitted(1):
            assert await ground.uids(0) | {uid(await ground.workload(0))} == sibling
            await ground.turn()
    await ground.rest()

    for pod in await ground.pods():
        assert pod["spec"]["containers"][0]["command"] == ["sleep", "900"]
    assert not (await ground.uids(1) | {uid(await ground.workload(1))}) & queued
    started = [each for each in ground.told if each.startswith("ReplacementStarted")]
    assert [each.partition("replica ")[2][0] for each in started] == ["1", "0"]
    assert any(each.startswith("ReplacementSuperseded") for each in ground.told)


async def test_an_edit_of_prefill_leaves_decode_as_it_is(ground: Ground) -> None:
    kind = await ground.type("a", gpus=4)
    await ground.deploy(
        role("prefill", kind="Prefill", instanceType=kind),
        role("decode", kind="Decode", instanceType=kind),
    )
    await ground.rest()
    decode = await ground.uids(name="decode")
    workload = uid(await ground.workload(name="decode"))

    await ground.edit("prefill", size=2, command=["sleep", "900"])
    await ground.rest()

    assert await ground.uids(name="decode") == decode
    assert uid(await ground.workload(name="decode")) == workload
    assert len(await ground.uids(name="prefill")) == 2


async def test_a_foreign_workload_on_the_group_blocks_and_is_named(ground: Ground) -> None:
    kind = await ground.type("a", gpus=4)
    group = group_name(ground.namespace, "chat", "server", 0)
    body = foreign_workload(group)
    foreign = uid(await ground.client.create(WORKLOADS, ground.namespace, body))
    await ground.deploy(role(instanceType=kind))

    found = await ground.until(
        lambda found: condition(found, "Stalled") == "True", "it says that it is blocked"
    )

    assert group in str(found["status"]["conditions"]) and await ground.uids() == set()
    (blocked,) = [each for each in found["status"]["conditions"] if each["type"] == "Stalled"]
    assert blocked["reason"] == "ReplacementBlocked" and group in blocked["message"]
    assert uid(await ground.workload()) == foreign
    await ground.client.delete(WORKLOADS, ground.namespace, group)
    await ground.rest()


async def test_at_rest_nothing_is_written(ground: Ground) -> None:
    kind = await ground.type("a", gpus=4)
    await ground.deploy(role(instanceType=kind, size=2))
    await ground.rest()
    before = await ground.versions()

    for _ in range(5):
        await ground.turn()

    assert await ground.versions() == before and ground.trouble == []


async def test_cards_to_slices_and_back_have_fresh_pods_of_the_right_kind(ground: Ground) -> None:
    kind = await ground.type("a", gpus=4)
    flavor, queue, local = queues(ground.namespace, kind, gpus=4)
    group = queue["spec"]["resourceGroups"][0]
    group["coveredResources"] = [GPU, SLICE, CORES]
    amounts = {GPU: 4, SLICE: 200, CORES: 200}
    group["flavors"][0]["resources"] = [
        {"name": name, "nominalQuota": amount} for name, amount in amounts.items()
    ]
    ground.own.kubectl.apply(flavor, queue, local)
    keys = {"card": GPU, "sliceMemory": SLICE, "sliceCores": CORES}
    await ground.client.patch_merge(INSTANCE_TYPES, None, kind, {"spec": {"accelerator": keys}})
    await ground.deploy(role(instanceType=kind, resources={"accelerator": 1}))
    await ground.rest()
    seen = await ground.uids() | {uid(await ground.workload())}

    half = {"acceleratorSlicedMemoryPercentage": 50, "acceleratorSlicedCoresPercentage": 30}
    steps: list[tuple[Json, Json]] = [
        (half, {SLICE: "50", CORES: "30"}),
        ({"acceleratorSlicedMemoryPercentage": 25}, {SLICE: "25"}),
        ({"accelerator": 1}, {GPU: "1"}),
    ]
    for resources, wanted in steps:
        await ground.edit(resources=resources)
        await ground.rest()

        (pod,) = await ground.pods()
        assert pod["spec"]["containers"][0]["resources"]["requests"] == wanted
        fresh = {uid(pod), uid(await ground.workload())}
        assert not fresh & seen
        seen |= fresh


async def test_a_managed_command_becomes_the_users_own_and_managed_again(ground: Ground) -> None:
    kind = await ground.type("a", gpus=4)
    managed = {
        "image": "modelpool.test/member",
        "command": None,
        "extraArgs": ["--host", "127.0.0.1", "--port", "0"],
    }
    first = {key: value for key, value in {**role(instanceType=kind), **managed}.items() if value}
    await ground.deploy(first)
    assert not (await ground.rest())["status"]["roles"][0]["unmanaged"]
    seen = await ground.uids() | {uid(await ground.workload())}

    await ground.edit(command=["sleep", "900"])
    taken = await ground.rest()
    (pod,) = await ground.pods()
    assert not {uid(pod), uid(await ground.workload())} & seen
    seen |= {uid(pod), uid(await ground.workload())}
    assert taken["status"]["roles"][0]["unmanaged"]
    assert "args" not in pod["spec"]["containers"][0]

    await ground.edit(command=None)
    assert not (await ground.rest())["status"]["roles"][0]["unmanaged"]
    assert not (await ground.uids() | {uid(await ground.workload())}) & seen


async def test_an_operator_that_forgets_everything_at_every_turn_finishes(ground: Ground) -> None:
    kind = await ground.type("a", gpus=4)
    await ground.deploy(role(instanceType=kind, replicas=2, size=2))
    await ground.rest()
    old = await ground.uids()
    await ground.edit(command=["sleep", "900"])
    phases: set[str] = set()

    def look(found: Json) -> bool:
        ground.restart()
        text = annotation(found, REPLACEMENTS_ANNOTATION) or ""
        phases.update(phase for phase in ("Cleanup", "WaitingForAdmission") if phase in text)
        return is_at_rest(found)

    await ground.until(look, "at rest")

    assert "Cleanup" in phases
    assert not await ground.uids() & old and len(await ground.uids()) == 4


ENDS: list[tuple[str, str | None, Json]] = [
    # When it is deleted, which members may be made, and the edit before.
    ("at rest", None, {}),
    ("Cleanup", None, {"command": ["sleep", "900"]}),
    ("nothing made", "false", {"command": ["sleep", "900"]}),
    ("half made", f"object.metadata.labels['{MEMBER_INDEX_LABEL}'] == '0'", {"size": 2}),
    ("queued", None, {"resources": {"accelerator": 2}}),
]


def _is_at(when: str, slot: Json, deployment: Json) -> bool:
    made = len(slot.get("currentMemberUIDs", ()))
    match when:
        case "at rest":
            return is_at_rest(deployment)
        case "Cleanup":
            return bool(slot.get("phase") == "Cleanup")
        case "nothing made":
            return slot.get("phase") == "WaitingForAdmission" and not made
        case "half made":
            return made == 1 and len(slot["memberHashes"]) == 2
        case _:
            return "currentWorkloadUID" in slot


@pytest.mark.parametrize(("when", "rule", "edit"), ENDS, ids=[each[0] for each in ENDS])
async def test_deleted_in_any_phase_nothing_of_ours_is_left_and_all_of_others(
    ground: Ground, when: str, rule: str | None, edit: Json
) -> None:
    kept = await ground.strangers()
    await ground.deploy(role(instanceType=await ground.type("a", gpus=1)))
    await ground.rest()
    if rule is not None:
        await ground.only_members(rule)
    if edit:
        await ground.edit(**edit)
    async with asyncio.timeout(90):
        while not _is_at(when, await ground.slot(), await ground.deployment()):
            await ground.turn()

    await ground.delete()

    assert await ground.standing() == kept
