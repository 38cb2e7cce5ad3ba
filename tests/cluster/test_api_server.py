"""
What we believe about API servers, asked of a real one: our CRDs, our rules, our in-memory cluster.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from apiexamples import BASES, DURATIONS, EXAMPLES, Bad, Change, put
from cluster_kubectl import KubectlFailed, until
from crdcheck import Admission
from harness import Cluster
from modelpool_api import schema
from modelpool_kube import errors
from modelpool_kube.client import KubeClient, connect
from modelpool_kube.kinds import (
    CRDS,
    INFERENCE_SERVICES,
    INSTANCE_TYPES,
    MODEL_DEPLOYMENTS,
    MODEL_POOLS,
    MODEL_ROUTERS,
    Json,
)
from portcases import CASES, Case

pytestmark = pytest.mark.cluster
KINDS = {
    each.kind: each
    for each in (
        MODEL_POOLS,
        INFERENCE_SERVICES,
        MODEL_ROUTERS,
        MODEL_DEPLOYMENTS,
        INSTANCE_TYPES,
    )
}


@pytest.fixture(scope="module")
def served(cluster: Cluster) -> Cluster:
    """A cluster that serves our kinds."""
    names = []
    for path in sorted(schema.folder().glob("modelpool.dev_*.yaml")):
        cluster.kubectl("apply", "--server-side", "-f", str(path))
    for resource in schema.RESOURCES:
        names.append(f"crd/{resource.plural}.modelpool.dev")
    cluster.kubectl("wait", "--for=condition=Established", *names, "--timeout=60s")
    for resource in schema.RESOURCES:
        until(partial(_lists, cluster, resource.plural), f"{resource.plural} are served")
    return cluster


def _lists(cluster: Cluster, plural: str) -> bool:
    try:
        cluster.kubectl("get", plural, "-A")
    except KubectlFailed:
        return False
    return True


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[KubeClient]:
    """Our own client of it."""
    async with await connect(manager="tests", kubeconfig=str(cluster.kubeconfig)) as client:
        yield client


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_the_in_memory_cluster_promises_what_is_true(
    case: Case, client: KubeClient, namespace: str
) -> None:
    async with asyncio.timeout(60):
        await case(client, namespace)


async def test_the_server_takes_our_schemas_as_structural(
    served: Cluster, client: KubeClient
) -> None:
    for resource in schema.RESOURCES:
        crd = await client.get(CRDS, None, f"{resource.plural}.modelpool.dev")
        conditions = {c["type"]: c for c in crd["status"]["conditions"]}
        assert conditions["Established"]["status"] == "True"
        assert "NonStructuralSchema" not in conditions


def edited(kind: str, *changes: Change) -> Json:
    """Return the base of *kind* with changes."""
    spec: Json = json.loads(json.dumps(BASES[kind]))
    for change in changes:
        change(spec)
    return spec


async def create(client: KubeClient, namespace: str, kind: str, name: str, spec: Json) -> Json:
    """Create an object; those of the cluster go again."""
    of = KINDS[kind]
    where = namespace if of.namespaced else None
    body = of.body(name, where, spec=spec)
    made = await client.create(of, where, body)
    if not of.namespaced:
        await client.delete(of, None, name)
    return made


@pytest.mark.parametrize("kind", BASES)
async def test_right_objects_are_taken(
    served: Cluster, client: KubeClient, namespace: str, kind: str
) -> None:
    made = await create(client, namespace, kind, "thing", edited(kind))

    assert made["metadata"]["generation"] == 1


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: f"{e.kind}{e.where}-{e.rule[:24]}")
async def test_broken_rules_are_refused_with_field_value_and_way_out(
    served: Cluster, client: KubeClient, namespace: str, example: Bad
) -> None:
    of, spec = KINDS[example.kind], edited(example.kind, *example.changes)
    with pytest.raises(errors.Invalid) as caught:
        if example.update:
            await create(client, namespace, example.kind, example.name, edited(example.kind))
            await client.patch_merge(of, namespace, example.name, {"spec": spec})
        else:
            await create(client, namespace, example.kind, example.name, spec)

    message = caught.value.message
    assert example.at.strip(".") in message
    for part in example.says:
        assert part in message.replace('\\"', '"')


@pytest.mark.parametrize(
    ("kind", "path"), [(kind, path) for kind, paths in DURATIONS.items() for path in paths]
)
async def test_durations(
    served: Cluster, client: KubeClient, namespace: str, kind: str, path: str
) -> None:
    for number, value in enumerate(("-5s", "99999h", "soon")):
        with pytest.raises(errors.Invalid) as caught:
            spec = edited(kind, put(path, value))
            await create(client, namespace, kind, f"thing-{number}", spec)
        message = caught.value.message
        assert f"spec{path}" in message
        assert value in message
        assert "write it like" in message or "use " in message


async def test_defaults_are_those_of_the_stand_in(
    served: Cluster, client: KubeClient, namespace: str
) -> None:
    for resource in schema.RESOURCES:
        kind = resource.kind
        made = await create(client, namespace, kind, "thing", edited(kind))
        stored, _ = Admission(schema.crd(resource)).admit(
            {"metadata": {"name": "thing"}, "spec": edited(kind)}
        )
        assert made["spec"] == stored["spec"]


async def test_columns_and_short_names(served: Cluster, client: KubeClient, namespace: str) -> None:
    await create(client, namespace, "ModelPool", "gpu0", edited("ModelPool"))
    status: dict[str, Any] = {"residentMember": "coder", "phase": "Ready", "held": 3}
    await client.patch_status(MODEL_POOLS, namespace, "gpu0", {"status": status})

    usual = served.kubectl("get", "mpool", "-n", namespace).splitlines()
    wide = served.kubectl("get", "mpool", "-n", namespace, "-o", "wide").splitlines()

    assert usual[0].split() == ["NAME", "POLICY", "RESIDENT", "PHASE", "AGE"]
    assert usual[1].split()[:4] == ["gpu0", "sticky", "coder", "Ready"]
    assert wide[0].split() == [
        "NAME", "POLICY", "RESIDENT", "PHASE", "PENDING", "HELD", "LASTSWAP", "AGE",
    ]  # fmt: skip
    for short in ("isvc", "mrouter", "mdep", "itype"):
        served.kubectl("get", short, "-A")
    explained = served.kubectl("explain", "modelpool.spec.swapBudget")
    assert "Longest hold of a request" in explained


async def test_the_scale_of_an_inference_service(
    served: Cluster, client: KubeClient, namespace: str
) -> None:
    spec = {**edited("InferenceService"), "replicas": 1}
    await create(client, namespace, "InferenceService", "coder", spec)

    served.kubectl("scale", "isvc/coder", "--replicas=0", "-n", namespace)

    found = await client.get(INFERENCE_SERVICES, namespace, "coder")
    assert found["spec"]["replicas"] == 0
