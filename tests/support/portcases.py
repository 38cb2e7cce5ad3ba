"""
What a `ClusterPort` promises, as cases: run against the in-memory cluster by every test run, and
against a real API server by the cluster tier. A difference is a bug of the in-memory cluster.

Each case gets a port and a namespace of its own, and leaves what it likes behind. They use
ConfigMaps, Leases, gated Pods and Deployments of 0 replicas, so that no controller gets in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

import pytest

from modelpool_kube import errors
from modelpool_kube.kinds import CONFIGMAPS, DEPLOYMENTS, LEASES, PODS, STATEFULSETS, Json
from modelpool_kube.port import Change, ClusterPort, WatchEvent

Case = Callable[[ClusterPort, str], Awaitable[None]]
CASES: list[Case] = []


def case(function: Case) -> Case:
    """Register a case."""
    CASES.append(function)
    return function


def config(name: str, **data: str) -> Json:
    """Return a ConfigMap."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": {"app": name}},
        "data": data,
    }


def gated_pod(name: str, **meta: object) -> Json:
    """Return a Pod that nobody schedules."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, **meta},
        "spec": {
            "containers": [{"name": "main", "image": "none.invalid/none:1"}],
            "schedulingGates": [{"name": "modelpool.dev/test"}],
        },
    }


def empty_deployment(name: str) -> Json:
    """Return a Deployment of 0 replicas."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": 0,
            "selector": {"matchLabels": {"app": name}},
            "template": {
                "metadata": {"labels": {"app": name}},
                "spec": {"containers": [{"name": "main", "image": "none.invalid/none:1"}]},
            },
        },
    }


@case
async def created_objects_get_identity(port: ClusterPort, namespace: str) -> None:
    made = await port.create(CONFIGMAPS, namespace, config("a", x="1"))

    assert made["metadata"]["uid"]
    assert made["metadata"]["resourceVersion"]
    assert made["metadata"]["namespace"] == namespace
    assert (await port.get(CONFIGMAPS, namespace, "a"))["data"] == {"x": "1"}


@case
async def a_name_is_taken_once(port: ClusterPort, namespace: str) -> None:
    await port.create(CONFIGMAPS, namespace, config("a"))

    with pytest.raises(errors.AlreadyExists):
        await port.create(CONFIGMAPS, namespace, config("a"))


@case
async def a_second_life_has_another_uid(port: ClusterPort, namespace: str) -> None:
    first = await port.create(CONFIGMAPS, namespace, config("a"))
    await port.delete(CONFIGMAPS, namespace, "a")
    second = await port.create(CONFIGMAPS, namespace, config("a"))

    assert first["metadata"]["uid"] != second["metadata"]["uid"]
    with pytest.raises(errors.Conflict):
        await port.delete(CONFIGMAPS, namespace, "a", uid=first["metadata"]["uid"])
    await port.delete(CONFIGMAPS, namespace, "a", uid=second["metadata"]["uid"])


@case
async def generated_names_differ(port: ClusterPort, namespace: str) -> None:
    body = config("x")
    body["metadata"] = {"generateName": "made-"}
    first = await port.create(CONFIGMAPS, namespace, body)
    second = await port.create(CONFIGMAPS, namespace, body)

    assert first["metadata"]["name"].startswith("made-")
    assert first["metadata"]["name"] != second["metadata"]["name"]


@case
async def what_is_missing_is_not_found(port: ClusterPort, namespace: str) -> None:
    with pytest.raises(errors.NotFound) as caught:
        await port.get(CONFIGMAPS, namespace, "ghost")
    assert not isinstance(caught.value, errors.NotServed)
    with pytest.raises(errors.NotFound):
        await port.patch_merge(CONFIGMAPS, namespace, "ghost", {"data": {"a": "b"}})
    with pytest.raises(errors.NotFound):
        await port.delete(CONFIGMAPS, namespace, "ghost")


@case
async def a_merge_keeps_what_it_does_not_name_and_null_removes(
    port: ClusterPort, namespace: str
) -> None:
    await port.create(CONFIGMAPS, namespace, config("a", x="1", y="2"))

    merged = await port.patch_merge(CONFIGMAPS, namespace, "a", {"data": {"x": None, "z": "3"}})

    assert merged["data"] == {"y": "2", "z": "3"}


@case
async def a_write_with_an_old_version_is_a_conflict(port: ClusterPort, namespace: str) -> None:
    made = await port.create(CONFIGMAPS, namespace, config("a"))
    old = made["metadata"]["resourceVersion"]
    await port.patch_merge(CONFIGMAPS, namespace, "a", {"data": {"x": "1"}}, version=old)

    with pytest.raises(errors.Conflict):
        await port.patch_merge(CONFIGMAPS, namespace, "a", {"data": {"x": "2"}}, version=old)
    with pytest.raises(errors.Conflict):
        await port.delete(CONFIGMAPS, namespace, "a", version=old)
    assert (await port.get(CONFIGMAPS, namespace, "a"))["data"] == {"x": "1"}


@case
async def a_write_of_the_same_changes_no_version(port: ClusterPort, namespace: str) -> None:
    await port.create(CONFIGMAPS, namespace, config("a", x="1"))
    first = await port.get(CONFIGMAPS, namespace, "a")
    again = await port.patch_merge(CONFIGMAPS, namespace, "a", {"data": {"x": "1"}})

    assert again["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]


@case
async def the_generation_counts_changes_of_the_spec_alone(
    port: ClusterPort, namespace: str
) -> None:
    made = await port.create(DEPLOYMENTS, namespace, empty_deployment("a"))
    assert made["metadata"]["generation"] == 1

    noted = await port.patch_merge(
        DEPLOYMENTS, namespace, "a", {"metadata": {"labels": {"x": "1"}}}
    )
    assert noted["metadata"]["generation"] == 1
    changed = await port.patch_merge(
        DEPLOYMENTS, namespace, "a", {"spec": {"template": {"metadata": {"labels": {"b": "c"}}}}}
    )
    assert changed["metadata"]["generation"] == 2


@case
async def for_a_deployment_an_annotation_is_a_change_too(port: ClusterPort, namespace: str) -> None:
    """So a fence mark has to be observed by its controller; for a StatefulSet it has not."""
    note = {"metadata": {"annotations": {"x": "1"}}}
    await port.create(DEPLOYMENTS, namespace, empty_deployment("a"))
    assert (await port.patch_merge(DEPLOYMENTS, namespace, "a", note))["metadata"][
        "generation"
    ] == 2
    body = empty_deployment("b") | {"apiVersion": "apps/v1", "kind": "StatefulSet"}
    body["spec"]["serviceName"] = "b"
    await port.create(STATEFULSETS, namespace, body)
    assert (await port.patch_merge(STATEFULSETS, namespace, "b", note))["metadata"][
        "generation"
    ] == 1


@case
async def status_and_spec_are_written_apart(port: ClusterPort, namespace: str) -> None:
    await port.create(PODS, namespace, gated_pod("a"))

    await port.patch_merge(PODS, namespace, "a", {"status": {"message": "no"}})
    assert "message" not in (await port.get(PODS, namespace, "a"))["status"]
    patch = {"status": {"message": "yes"}, "metadata": {"labels": {"by": "status"}}}
    await port.patch_status(PODS, namespace, "a", patch)
    found = await port.get(PODS, namespace, "a")
    assert found["status"]["message"] == "yes"
    assert found["status"]["phase"] == "Pending"


@case
async def a_kind_without_status_has_no_place_for_one(port: ClusterPort, namespace: str) -> None:
    await port.create(LEASES, namespace, LEASES.body("a", spec={"holderIdentity": "me"}))

    with pytest.raises(errors.NotFound):
        await port.patch_status(LEASES, namespace, "a", {"status": {"x": 1}})


@case
async def a_finalizer_keeps_a_deleted_object_readable(port: ClusterPort, namespace: str) -> None:
    body = config("a")
    body["metadata"]["finalizers"] = ["modelpool.dev/test"]
    await port.create(CONFIGMAPS, namespace, body)
    await port.delete(CONFIGMAPS, namespace, "a")

    going = await port.get(CONFIGMAPS, namespace, "a")
    assert going["metadata"]["deletionTimestamp"]
    await port.delete(CONFIGMAPS, namespace, "a")  # asking again is no error
    with pytest.raises(errors.AlreadyExists):
        await port.create(CONFIGMAPS, namespace, config("a"))
    with pytest.raises(errors.Refused):
        more = {"metadata": {"finalizers": ["modelpool.dev/test", "modelpool.dev/more"]}}
        await port.patch_merge(CONFIGMAPS, namespace, "a", more)
    await port.patch_merge(CONFIGMAPS, namespace, "a", {"metadata": {"finalizers": None}})
    with pytest.raises(errors.NotFound):
        await port.get(CONFIGMAPS, namespace, "a")


@case
async def a_pod_without_a_node_goes_at_once(port: ClusterPort, namespace: str) -> None:
    await port.create(PODS, namespace, gated_pod("a"))
    await port.delete(PODS, namespace, "a")

    with pytest.raises(errors.NotFound):
        await port.get(PODS, namespace, "a")


@case
async def gates_are_removed_and_never_added(port: ClusterPort, namespace: str) -> None:
    await port.create(PODS, namespace, gated_pod("a"))

    with pytest.raises(errors.Invalid):
        gates = [{"name": "modelpool.dev/test"}, {"name": "modelpool.dev/new"}]
        await port.patch_merge(PODS, namespace, "a", {"spec": {"schedulingGates": gates}})


@case
async def identity_cannot_be_patched(port: ClusterPort, namespace: str) -> None:
    await port.create(CONFIGMAPS, namespace, config("a"))

    with pytest.raises(errors.Refused):
        await port.patch_merge(CONFIGMAPS, namespace, "a", {"metadata": {"uid": "mine"}})


@case
async def what_the_server_owns_cannot_be_sent(port: ClusterPort, namespace: str) -> None:
    body = config("a")
    body["metadata"]["resourceVersion"] = "5"

    with pytest.raises(errors.KubeError):
        await port.create(CONFIGMAPS, namespace, body)


@case
async def selectors_choose(port: ClusterPort, namespace: str) -> None:
    for name in ("a", "b", "c"):
        await port.create(CONFIGMAPS, namespace, config(name))

    async def chosen(**selectors: str) -> list[str]:
        found = await port.list(CONFIGMAPS, namespace, **selectors)
        names = [each["metadata"]["name"] for each in found.items]
        return sorted(name for name in names if name in ("a", "b", "c"))

    assert await chosen(labels="app=a") == ["a"]
    assert await chosen(labels="app in (a, b)") == ["a", "b"]
    assert await chosen(labels="app notin (a,b),app") == ["c"]
    assert await chosen(labels="app,app!=a") == ["b", "c"]
    assert "a" not in await chosen(labels="!app")
    assert await chosen(fields="metadata.name=b") == ["b"]
    with pytest.raises(errors.Invalid):
        await port.list(CONFIGMAPS, namespace, fields="data.x=1")


@case
async def a_list_knows_the_kind_of_its_items(port: ClusterPort, namespace: str) -> None:
    await port.create(DEPLOYMENTS, namespace, empty_deployment("a"))
    (found,) = (await port.list(DEPLOYMENTS, namespace)).items

    assert (found["apiVersion"], found["kind"]) == ("apps/v1", "Deployment")


async def events_of(
    port: ClusterPort, namespace: str, since: str, count: int, **selectors: str
) -> list[WatchEvent]:
    """Return the first *count* events after *since*, bookmarks aside."""
    found: list[WatchEvent] = []
    watching = port.watch(CONFIGMAPS, namespace, since=since, timeout_s=20, **selectors)
    async with contextlib.aclosing(watching):
        async for event in watching:
            if event.change is not Change.BOOKMARK:
                found.append(event)
            if len(found) == count:
                break
    return found


@case
async def a_watch_continues_a_list(port: ClusterPort, namespace: str) -> None:
    await port.create(CONFIGMAPS, namespace, config("old"))
    listed = await port.list(CONFIGMAPS, namespace)
    await port.create(CONFIGMAPS, namespace, config("a"))
    await port.patch_merge(CONFIGMAPS, namespace, "a", {"data": {"x": "1"}})
    await port.delete(CONFIGMAPS, namespace, "a")

    events = await events_of(port, namespace, listed.version, 3)

    assert [each.change for each in events] == [Change.ADDED, Change.MODIFIED, Change.DELETED]
    assert {each.object["metadata"]["name"] for each in events} == {"a"}
    versions = [int(each.object["metadata"]["resourceVersion"]) for each in events]
    assert versions == sorted(set(versions))
    assert versions[0] > int(listed.version)


@case
async def a_watch_sees_what_leaves_its_selection_as_deleted(
    port: ClusterPort, namespace: str
) -> None:
    await port.create(CONFIGMAPS, namespace, config("a"))
    listed = await port.list(CONFIGMAPS, namespace)
    await port.patch_merge(CONFIGMAPS, namespace, "a", {"metadata": {"labels": {"app": "z"}}})
    await port.patch_merge(CONFIGMAPS, namespace, "a", {"metadata": {"labels": {"app": "a"}}})

    events = await events_of(port, namespace, listed.version, 2, labels="app=a")

    assert [each.change for each in events] == [Change.DELETED, Change.ADDED]
