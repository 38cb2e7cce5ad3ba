"""A ModelDeployment under the operator as a process, and as people see it with kubectl."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from cluster_commands import Commands
from cluster_kubectl import KubectlFailed
from cluster_objects import queues
from cluster_operator import Start
from cluster_replicas import Ground, is_at_rest, replacing, role, waits
from harness import OwnCluster
from modelpool_api.names import MEMBER_INDEX_LABEL
from modelpool_kube.kinds import Json, uid

pytestmark = pytest.mark.cluster
SLOW_END = ["sh", "-c", "trap 'sleep 3; exit 0' TERM; while :; do sleep 0.1; done"]
"""Leaves time to look while an old member is ending."""
FIRST_ALONE = f"object.metadata.labels['{MEMBER_INDEX_LABEL}'] == '0'"


@pytest.fixture
async def ground(own: OwnCluster, namespace: str) -> AsyncIterator[Ground]:
    """A namespace to replace replicas in, where an operator of its own looks."""
    async with replacing(own, namespace) as made:
        made.looks = False
        yield made


class Killed:
    """The operator of a test, killed again and again."""

    def __init__(self, ground: Ground, start: Start) -> None:
        self._ground = ground
        self._start = start
        self._now = start("operator-0")
        self.kills = 0

    async def kill_when(self, ask: Callable[[Json], bool], what: str) -> Json:
        """Kill it as soon as the slot of the role is as *ask* wants it; return the slot."""
        slot = await self._ground.slot()
        try:
            async with asyncio.timeout(60):
                while not ask(slot):
                    slot = await self._ground.slot()
        except TimeoutError:
            raise AssertionError(f"never: {what}: {slot} {self._now.said()[-3:]}") from None
        assert self._now.stop(signal.SIGKILL) == -signal.SIGKILL
        self.kills += 1
        return await self._ground.slot()

    def again(self) -> None:
        """Start it again; as the same Pod, so it needs not wait for the Lease."""
        self._now = self._start("operator-0")


def made(slot: Json) -> int:
    """Return how many new members the slot names."""
    return len(slot.get("currentMemberUIDs", ()))


async def test_an_operator_killed_in_every_phase_of_a_replacement_is_made_up_for(
    ground: Ground, start: Start
) -> None:
    kind = await ground.type("a", gpus=4)
    kept = await ground.strangers()
    operator = Killed(ground, start)
    await ground.deploy(role(instanceType=kind, replicas=2, size=2, command=SLOW_END))
    await ground.rest()
    old = await ground.uids()
    sibling = await ground.uids(0) | {uid(await ground.workload(0))}

    async def is_spared() -> bool:
        return await ground.uids(0) | {uid(await ground.workload(0))} == sibling

    await ground.only_members("false")
    await ground.edit(command=["sleep", "900"], resources={"accelerator": 2})
    slot = await operator.kill_when(lambda slot: slot.get("phase") == "Cleanup", "Cleanup")
    assert set(slot["memberUIDs"]) == await ground.uids(1) or not await ground.uids(1)

    operator.again()
    await operator.kill_when(
        lambda slot: slot.get("phase") == "WaitingForAdmission" and not made(slot),
        "vacant, and nothing made",
    )
    assert await ground.uids(1) == set() and await is_spared()

    await ground.only_members(FIRST_ALONE)
    operator.again()
    slot = await operator.kill_when(lambda slot: made(slot) == 1, "half made")
    first = set(slot["currentMemberUIDs"])
    assert await ground.uids(1) == first and await is_spared()

    await ground.only_members(None)
    operator.again()
    slot = await operator.kill_when(lambda slot: "currentWorkloadUID" in slot, "made and queued")
    replacement = set(slot["currentMemberUIDs"])
    assert first < replacement and len(replacement) == 2 and await is_spared()

    operator.again()
    await asyncio.sleep(5)  # it may look as often as it likes
    assert await ground.slot() == slot and await is_spared()
    await operator.kill_when(lambda slot: True, "still queued")
    ground.own.kubectl.apply(*queues(ground.namespace, kind, gpus=6))
    async with asyncio.timeout(60):
        while not await ground.is_admitted(1):
            await asyncio.sleep(0.1)
    assert await ground.slot() == slot and await is_spared()

    operator.again()
    await operator.kill_when(lambda slot: slot.get("ordinal") == 0, "the next one's turn")
    assert await ground.uids(1) == replacement and await ground.is_admitted(1)
    ground.own.kubectl.apply(*queues(ground.namespace, kind, gpus=8))
    operator.again()
    await ground.rest()

    assert operator.kills == 6
    assert await ground.uids(1) == replacement
    assert len(await ground.uids()) == 4 and not await ground.uids() & old
    assert kept < await ground.standing()
    before = await ground.versions()
    await asyncio.sleep(5)
    assert await ground.versions() == before


def table(text: str) -> list[dict[str, str]]:
    """Return what kubectl prints in columns, by their headings."""
    head, *rows = text.rstrip("\n").split("\n")
    names = head.split()
    starts = [head.index(name) for name in names]
    ends = [*starts[1:], None]
    return [
        {name: row[a:b].strip() for name, a, b in zip(names, starts, ends, strict=True)}
        for row in rows
    ]


async def test_people_see_what_is_replaced_and_why_it_waits(ground: Ground, start: Start) -> None:
    start("operator-0")
    kind = await ground.type("a", gpus=2)
    await ground.deploy(role(instanceType=kind, replicas=2))
    await ground.rest()
    kubectl, where = ground.own.kubectl, ("-n", ground.namespace)
    (row,) = table(kubectl("get", "mdep", *where))
    assert row.pop("AGE")
    assert row == {"NAME": "chat", "ROLES": "server 2/2", "REPLACING": "", "PHASE": "Ready"}

    await ground.edit(resources={"accelerator": 2})
    await ground.until(lambda found: waits(found) and "couldn't assign" in str(found), "it waits")

    (row,) = table(kubectl("get", "mdep", *where))
    assert (row["ROLES"], row["REPLACING"]) == ("server 1/2", "server/1")
    assert row["PHASE"] == "Degraded"
    command = Commands(kubectl, ground.namespace)
    told = await asyncio.to_thread(command, "trace", "md/chat")
    assert "server/1: WaitingForAdmission for" in told
    assert "insufficient unused quota for nvidia.com/gpu" in told
    for step in ("ReplacementStarted", "ReplacementVacant", "ReplacementCreated"):
        assert step in told


EXPLAINED = {
    "mdep": "replaces whole replicas one at a time",
    "mdep.spec.roles": "replaces each of them, whole",
    "mdep.spec.roles.replicas": "The one field whose edit replaces nobody",
    "mdep.spec.roles.size": "Leaving it out of a patch of roles means 1",
    "mdep.spec.roles.command": "nothing is added to it",
    "mdep.spec.roles.resources.acceleratorSlicedMemoryPercentage": "Percent of the memory",
    "mdep.spec.roles.elasticEp": "Not supported",
    "mdep.spec.suspend": "Every role counts as 0",
    "mdep.status.roles.outdated": "Replicas whose configuration differs",
    "mdep.status.roles.replacement.phase": "Cleanup or WaitingForAdmission",
    "instancetype.spec.queueName": "LocalQueue",
}


def test_kubectl_explains_every_field(shipped: OwnCluster) -> None:
    shipped.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    for path, says in EXPLAINED.items():
        text = " ".join(
            shipped.kubectl("explain", path, "--api-version=modelpool.dev/v1alpha1").split()
        )
        assert says in text, (path, text)


def _renamed(roles: list[Json]) -> list[Json]:
    return [{**roles[0], "name": "other"}, *roles[1:]]


def _with(**fields: Any) -> Callable[[list[Json]], list[Json]]:
    return lambda roles: [{**roles[0], **fields}, *roles[1:]]


REFUSED: list[tuple[str, Callable[[list[Json]], list[Json]], tuple[str, ...]]] = [
    (
        "added",
        lambda roles: [*roles, role("third", instanceType="t")],
        ('role "third" was added', "restore the names"),
    ),
    ("removed", lambda roles: roles[:1], ('role "two" was removed',)),
    ("renamed", _renamed, ("or renamed", "create another")),
    (
        "kind",
        _with(kind="Decode"),
        ("roles[0].kind", 'kind "Decode": the kind of role "server"', "restore it"),
    ),
    (
        "kinds",
        _with(kind="Prefill"),
        ("roles of kind Server cannot stand beside", "one Prefill and one Decode"),
    ),
    ("twice", lambda roles: [roles[0], roles[0]], ("Duplicate value", "server")),
    ("none", lambda roles: [], ("spec.roles", "at least 1")),
    ("eleven", lambda roles: [{**roles[0], "name": f"r{n}"} for n in range(11)], ("at most 10",)),
    ("size 0", _with(size=0), ("spec.roles[0].size", "greater than or equal to 1")),
    ("size 65", _with(size=65), ("spec.roles[0].size", "less than or equal to 64")),
    ("replicas", _with(replicas=1025), ("spec.roles[0].replicas", "1024")),
    (
        "rank variable",
        _with(env=[{"name": "MODELPOOL_REPLICA_SIZE", "value": "1"}]),
        ("roles[0].env[0].name", "MODELPOOL_REPLICA_SIZE is set by", "use another name"),
    ),
    (
        "topology",
        _with(topology={"requiredLevel": "kubernetes.io/hostname"}),
        ("requiredLevel", "wider level"),
    ),
    ("elastic", _with(elasticEp={}), ("spec.roles[0].elasticEp", "not supported", "remove")),
    (
        "partition",
        _with(resources={"acceleratorPartitionedProfile": "1g.5gb"}),
        ("resources.acceleratorPartitionedProfile", "whole cards or a slice"),
    ),
    ("fabric", _with(resources={"interface": "1"}), ("resources.interface", "not rendered")),
]
SPECS: list[tuple[str, Json, tuple[str, ...]]] = [
    ("model", {"model": {"name": "big"}}, ('model.name "big"', "cannot be changed")),
    ("engine", {"engine": {"name": "vLLM"}}, ('engine.name "vLLM"', "create another")),
    ("kvCache", {"kvCache": {}}, ("spec.kvCache", "needs another operator")),
    ("kvTransfer", {"kvTransfer": {}}, ("spec.kvTransfer", "extraArgs or command")),
    ("router", {"router": {}}, ("spec.router", "ModelRouter")),
    ("artifact", {"model": {"name": "tiny", "artifactRef": {}}}, ("artifactRef", "mount them")),
]


async def test_the_api_server_refuses_with_field_value_reason_and_way_out(ground: Ground) -> None:
    await ground.deploy(role(instanceType="t"), role("two", instanceType="t"))
    before = await ground.deployment()
    roles = before["spec"]["roles"]
    edits = [(what, {"roles": change(roles)}, says) for what, change, says in REFUSED]

    for what, spec, says in [*edits, *SPECS]:
        patch = json.dumps({"spec": spec})
        words = ("patch", "mdep", "chat", "-n", ground.namespace, "--type=merge", "-p", patch)
        with pytest.raises(KubectlFailed) as refused:
            ground.own.kubectl(*words)
        missing = [each for each in says if each not in refused.value.stderr]
        assert not missing, (what, missing, refused.value.stderr)

    assert await ground.deployment() == before


@pytest.mark.parametrize(
    ("name", "spec", "says"),
    [
        ("a" * 60, {"name": "serve"}, ("spec.roles", "<metadata.name>-<role>", "shorten")),
        (
            "a" * 50,
            {"name": "serve", "size": 10, "replicas": 1000},
            ("spec.roles", "-r<replica>-m<member>", "fewer replicas"),
        ),
        ("a.b", {"name": "serve"}, ('metadata.name "a.b"', "DNS label")),
        ("fine", {"name": "x"}, ("spec.roles", "would collide", "rename one")),
    ],
)
def test_names_that_cannot_be_are_refused_with_the_longest_of_them(
    shipped: OwnCluster, namespace: str, name: str, spec: Json, says: tuple[str, ...]
) -> None:
    roles = [role(**{"instanceType": "t", **spec})]
    if spec["name"] == "x":
        roles.append(role("x-r0", instanceType="t"))
    body = {
        "apiVersion": "modelpool.dev/v1alpha1",
        "kind": "ModelDeployment",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"model": {"name": "tiny"}, "engine": {"name": "Custom"}, "roles": roles},
    }

    with pytest.raises(KubectlFailed) as refused:
        shipped.kubectl.create(body)

    missing = [each for each in says if each not in refused.value.stderr]
    assert not missing, (missing, refused.value.stderr)


async def test_suspended_and_resumed_it_rests_at_nothing_and_at_everything(
    ground: Ground, start: Start
) -> None:
    start("operator-0")
    await ground.deploy(role(instanceType=await ground.type("a", gpus=1)))
    await ground.rest()
    kubectl, where = ground.own.kubectl, ("-n", ground.namespace)

    kubectl("patch", "mdep", "chat", *where, "--type=merge", "-p", '{"spec": {"suspend": true}}')
    found = await ground.until(
        lambda found: found["status"]["phase"] == "Idle" and not is_at_rest(found), "idle"
    )
    async with asyncio.timeout(60):
        while await ground.uids() or await ground.workload():
            await asyncio.sleep(0.1)
    assert found["spec"]["roles"][0]["replicas"] == 1

    kubectl("patch", "mdep", "chat", *where, "--type=merge", "-p", '{"spec": {"suspend": false}}')
    await ground.rest()
    assert len(await ground.uids()) == 1
