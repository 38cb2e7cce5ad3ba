"""Replacing replicas on a real API server with the real Kueue and running processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from cluster_objects import GPU, queues
from harness import OwnCluster
from modelpool_api import schema
from modelpool_api.names import REPLACEMENTS_ANNOTATION, group_name
from modelpool_kube.client import KubeClient, connect
from modelpool_kube.errors import AlreadyExists, KubeError, NotFound
from modelpool_kube.kinds import (
    CRDS,
    INSTANCE_TYPES,
    MODEL_DEPLOYMENTS,
    PODS,
    SERVICES,
    WORKLOADS,
    Json,
    annotation,
    meta,
    uid,
)
from modelpool_operator.engine.modeldeployment import ModelDeployments
from modelpool_operator.plan.modeldeployment.actions import Note

pytestmark = pytest.mark.cluster
NODE = "md-node"
SLICE = "nvidia.com/gpumem-percentage"
CORES = "nvidia.com/gpucores"


def role(name: str = "server", **fields: Any) -> Json:
    """Return a role that runs until it is ended."""
    return {
        "name": name,
        "image": "modelpool.test/any",
        "command": ["sleep", "1000"],
        "terminationGracePeriodSeconds": 15,
        **fields,
    }


class Ground:
    """One namespace with queues and types, and an operator that looks again and again."""

    def __init__(self, own: OwnCluster, client: KubeClient, namespace: str) -> None:
        self.own = own
        self.client = client
        self.namespace = namespace
        self.told: list[str] = []
        self.trouble: list[str] = []
        self.operator = ModelDeployments(client, self._tell)

    async def _tell(self, obj: Json, note: Note) -> None:
        self.told.append(f"{note.reason.value}: {note.message}")

    def restart(self) -> None:
        """Go on with an operator that remembers nothing."""
        self.operator = ModelDeployments(self.client, self._tell)

    async def type(self, name: str, *, gpus: int) -> str:
        """Make a queue and an InstanceType on it; return its name."""
        made = f"{self.namespace}-{name}"
        self.own.kubectl.apply(*queues(self.namespace, made, gpus=gpus))
        spec = {"queueName": made, "accelerator": {"card": GPU}}
        await self.client.create(INSTANCE_TYPES, None, INSTANCE_TYPES.body(made, spec=spec))
        return made

    async def deploy(self, *roles: Json) -> None:
        """Make the deployment."""
        spec = {
            "model": {"name": "tiny"},
            "engine": {"name": "Custom"},
            "roles": list(roles),
        }
        body = MODEL_DEPLOYMENTS.body("chat", self.namespace, spec=spec)
        await self.client.create(MODEL_DEPLOYMENTS, self.namespace, body)

    async def edit(self, name: str = "server", **fields: Any) -> None:
        """Change fields of one role; None removes one."""
        roles = (await self.deployment())["spec"]["roles"]
        for each in roles:
            if each["name"] == name:
                for key, value in fields.items():
                    each.pop(key, None)
                    if value is not None:
                        each[key] = value
        patch = {"spec": {"roles": roles}}
        await self.client.patch_merge(MODEL_DEPLOYMENTS, self.namespace, "chat", patch)

    async def deployment(self) -> Json:
        """Return the deployment."""
        return await self.client.get(MODEL_DEPLOYMENTS, self.namespace, "chat")

    async def pods(self, ordinal: int | None = None, name: str = "server") -> list[Json]:
        """Return members by name."""
        labels = f"app.kubernetes.io/component={name}"
        if ordinal is not None:
            labels += f",modelpool.dev/ordinal={ordinal}"
        items = (await self.client.list(PODS, self.namespace, labels=labels)).items
        return sorted(items, key=lambda pod: str(meta(pod)["name"]))

    async def uids(self, ordinal: int | None = None, name: str = "server") -> set[str]:
        """Return the UIDs of members."""
        return {uid(pod) for pod in await self.pods(ordinal, name)}

    async def workload(self, ordinal: int = 0, name: str = "server") -> Json:
        """Return the Workload of a replica; empty when there is none."""
        try:
            group = group_name(self.namespace, "chat", name, ordinal)
            return await self.client.get(WORKLOADS, self.namespace, group)
        except NotFound:
            return {}

    async def is_admitted(self, ordinal: int = 0, name: str = "server") -> bool:
        """Return whether a replica is admitted."""
        return _condition(await self.workload(ordinal, name), "Admitted") == "True"

    async def turn(self) -> None:
        """Let the operator look once."""
        try:
            await self.operator.reconcile((self.namespace, "chat"))
        except KubeError as error:
            self.trouble.append(str(error))
        await asyncio.sleep(0.2)

    async def until(self, ask: Callable[[Json], bool], what: str, timeout_s: float = 90.0) -> Json:
        """Let the operator look until the deployment is as *ask* wants it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    await self.turn()
                    found = await self.deployment()
                    if ask(found):
                        return found
        found = await self.deployment()
        raise AssertionError(f"not in {timeout_s} s: {what}: {found} {self.told} {self.trouble}")

    async def rest(self) -> Json:
        """Let the operator look until everything is as specified and ready."""
        return await self.until(is_at_rest, "at rest")


def _condition(obj: Json, kind: str) -> str | None:
    for each in (obj.get("status") or {}).get("conditions") or []:
        if each["type"] == kind:
            return str(each["status"])
    return None


def is_at_rest(deployment: Json) -> bool:
    """Return whether everything is as specified and ready."""
    status = deployment.get("status") or {}
    return (
        status.get("observedGeneration") == meta(deployment)["generation"]
        and status.get("phase") == "Ready"
        and _condition(deployment, "ReplicasUpToDate") == "True"
        and annotation(deployment, REPLACEMENTS_ANNOTATION) is None
    )


def waits(deployment: Json) -> bool:
    """Return whether a replacement waits for its admission, with a Workload."""
    return "currentWorkloadUID" in (annotation(deployment, REPLACEMENTS_ANNOTATION) or "")


@pytest.fixture
async def ground(own: OwnCluster, namespace: str) -> AsyncIterator[Ground]:
    """A namespace to replace replicas in; everything of it is gone afterwards."""
    own.node(NODE, {GPU: 4, SLICE: 200, CORES: 200})
    async with await connect(manager="test", kubeconfig=str(own.kubeconfig)) as client:
        for resource in schema.RESOURCES:
            with contextlib.suppress(AlreadyExists):
                await client.create(CRDS, None, schema.crd(resource))
        own.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
        made = Ground(own, client, namespace)
        yield made
        with contextlib.suppress(NotFound):
            await client.delete(MODEL_DEPLOYMENTS, namespace, "chat")
        async with asyncio.timeout(90):
            while own.kubectl.items("modeldeployments", "-n", namespace):
                await made.turn()
        own.kubectl("delete", "instancetypes", "--all")
        own.kubectl("delete", "localqueues", "--all", "-n", namespace)
        for kind in ("clusterqueue", "resourceflavor"):
            for name in ("a", "b"):
                own.kubectl("delete", kind, f"{namespace}-{name}", "--ignore-not-found")


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

    ground.own.kubectl.apply(*queues(ground.namespace, kind, gpus=4))
    await ground.rest()
    assert not await ground.uids() & sibling
    assert len(await ground.uids()) == 4


async def test_another_type_and_another_command_go_the_same_way(ground: Ground) -> None:
    first, second = await ground.type("a", gpus=2), await ground.type("b", gpus=2)
    await ground.deploy(role(instanceType=first))
    await ground.rest()
    old = await ground.uids()

    await ground.edit(instanceType=second)
    await ground.rest()
    assert (await ground.workload())["spec"]["queueName"] == second
    assert not await ground.uids() & old

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
            _condition(found, "QuotaReserved") == "False"
            and "waiting for quota" in str(found["status"])
        ),
        "it waits for quota",
    )
    old = await ground.uids()

    await ground.edit(resources={"accelerator": 1})
    await ground.rest()

    assert not await ground.uids() & old
    assert not any("ReplacementStarted" in each and "outdated" in each for each in ground.told)


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
    container = {"name": "c", "image": "i"}
    pod_set = {"name": "main", "count": 1, "template": {"spec": {"containers": [container]}}}
    pod_set["template"]["spec"]["restartPolicy"] = "Never"  # type: ignore[index]
    body = WORKLOADS.body(group, ground.namespace, spec={"queueName": "none", "podSets": [pod_set]})
    foreign = uid(await ground.client.create(WORKLOADS, ground.namespace, body))
    await ground.deploy(role(instanceType=kind))

    found = await ground.until(
        lambda found: _condition(found, "Stalled") == "True", "it says that it is blocked"
    )

    assert group in str(found["status"]["conditions"]) and await ground.uids() == set()
    assert uid(await ground.workload()) == foreign
    await ground.client.delete(WORKLOADS, ground.namespace, group)
    await ground.rest()


async def test_at_rest_nothing_is_written(ground: Ground) -> None:
    kind = await ground.type("a", gpus=4)
    await ground.deploy(role(instanceType=kind, size=2))
    before = await ground.rest()
    pods = [meta(pod)["resourceVersion"] for pod in await ground.pods()]

    for _ in range(5):
        await ground.turn()

    assert meta(await ground.deployment())["resourceVersion"] == meta(before)["resourceVersion"]
    assert [meta(pod)["resourceVersion"] for pod in await ground.pods()] == pods


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
    seen = await ground.uids()

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
        assert uid(pod) not in seen
        seen.add(uid(pod))


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

    await ground.edit(command=["sleep", "900"])
    taken = await ground.rest()
    (pod,) = await ground.pods()
    assert taken["status"]["roles"][0]["unmanaged"]
    assert "args" not in pod["spec"]["containers"][0]

    await ground.edit(command=None)
    assert not (await ground.rest())["status"]["roles"][0]["unmanaged"]


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


@pytest.mark.parametrize("phase", ["Cleanup", "WaitingForAdmission"])
async def test_deleted_in_the_middle_nothing_of_ours_is_left_and_all_of_others(
    ground: Ground, phase: str
) -> None:
    kind = await ground.type("a", gpus=1)
    container = {"name": "c", "image": "modelpool.test/any", "command": ["sleep", "1000"]}
    spec = {"containers": [container], "terminationGracePeriodSeconds": 1}
    foreign = PODS.body("other", ground.namespace, spec=spec)
    kept = uid(await ground.client.create(PODS, ground.namespace, foreign))
    await ground.deploy(role(instanceType=kind))
    await ground.rest()
    await ground.edit(resources={"accelerator": 2})
    await ground.until(
        lambda found: phase in (annotation(found, REPLACEMENTS_ANNOTATION) or ""), phase
    )

    await ground.client.delete(MODEL_DEPLOYMENTS, ground.namespace, "chat")
    async with asyncio.timeout(90):
        while ground.own.kubectl.items("modeldeployments", "-n", ground.namespace):
            await ground.turn()

    left = (await ground.client.list(PODS, ground.namespace)).items
    assert [uid(pod) for pod in left] == [kept]
    assert (await ground.client.list(WORKLOADS, ground.namespace)).items == ()
