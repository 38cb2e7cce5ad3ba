"""The in-memory cluster is itself tested, or nothing tested on it means anything."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from crashpoints import Scenario, kill_everywhere, lose_everywhere
from crdcheck import serve
from memcluster import (
    Killed,
    MemCluster,
    MemPort,
    Mode,
    Trail,
    dropping,
    merged,
    repeating,
    swapping,
)
from memcontrollers import OUT_OF_SERVICE, World, deployment, is_ready, statefulset
from modelpool_api import schema
from modelpool_kube import errors
from modelpool_kube.kinds import (
    CONFIGMAPS,
    DEPLOYMENTS,
    LEASES,
    MODEL_POOLS,
    NODES,
    PODS,
    REPLICASETS,
    STATEFULSETS,
    Json,
)
from modelpool_kube.port import Change, ClusterPort, WatchEvent
from portcases import CASES, Case, config


def as_port(port: MemPort) -> ClusterPort:
    """Return *port* as what reconcilers see; mypy checks that it fits."""
    return port


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_it_keeps_the_promises_of_a_port(case: Case) -> None:
    await case(as_port(MemCluster().port("test")), "lab")


@pytest.fixture
def cluster() -> MemCluster:
    """An empty cluster."""
    return MemCluster()


@pytest.fixture
def world() -> World:
    """A cluster of one node with one accelerator."""
    return World()


# Faults


async def test_answers_from_the_past(cluster: MemCluster) -> None:
    port = cluster.port("p")
    cluster.put(CONFIGMAPS, "lab", config("a", x="1"))
    before = cluster.version
    cluster.edit(CONFIGMAPS, "lab", "a", {"data": {"x": "2"}})
    cluster.put(CONFIGMAPS, "lab", config("b"))

    port.stale(before, verb="get")
    port.stale(before, verb="list")

    assert (await port.get(CONFIGMAPS, "lab", "a"))["data"] == {"x": "1"}
    assert [i["metadata"]["name"] for i in (await port.list(CONFIGMAPS, "lab")).items] == ["a"]
    assert (await port.get(CONFIGMAPS, "lab", "a"))["data"] == {"x": "2"}
    port.read_version = before
    with pytest.raises(errors.NotFound):
        await port.get(CONFIGMAPS, "lab", "b")
    made = await port.create(CONFIGMAPS, "lab", config("c"))  # writes are never stale
    assert made["metadata"]["uid"]


@pytest.mark.parametrize("applied", [True, False])
async def test_an_answer_is_lost(cluster: MemCluster, applied: bool) -> None:
    port = cluster.port("p")
    port.lose(applied=applied, verb="create", nth=2)

    await port.create(CONFIGMAPS, "lab", config("a"))
    with pytest.raises(errors.Unanswered):
        await port.create(CONFIGMAPS, "lab", config("b"))
    await port.create(CONFIGMAPS, "lab", config("c"))

    assert cluster.names(CONFIGMAPS) == (["a", "b", "c"] if applied else ["a", "c"])


async def test_a_lost_read_is_merely_not_answered(cluster: MemCluster) -> None:
    port = cluster.port("p")
    port.lose(applied=True, verb="list")

    with pytest.raises(errors.Timeout):
        await port.list(CONFIGMAPS, "lab")


async def test_a_write_lands_after_its_time_out_if_nothing_came_between(
    cluster: MemCluster,
) -> None:
    port = cluster.port("p")
    made = cluster.put(CONFIGMAPS, "lab", config("a"))
    version = made["metadata"]["resourceVersion"]
    for value in ("1", "2"):
        port.delay(verb="patch", nth=int(value))
    for value in ("1", "2"):
        with pytest.raises(errors.Unanswered):
            await port.patch_merge(CONFIGMAPS, "lab", "a", {"data": {"x": value}}, version=version)
    assert "data" not in cluster.must(CONFIGMAPS, "lab", "a") or not cluster.must(
        CONFIGMAPS, "lab", "a"
    ).get("data")

    landed = port.land()

    assert [request.number for request in landed] == [1]
    assert cluster.must(CONFIGMAPS, "lab", "a")["data"] == {"x": "1"}
    assert port.land() == []


async def test_an_error_is_injected_into_the_nth_request_that_matches(
    cluster: MemCluster,
) -> None:
    port = cluster.port("p")
    port.fail(errors.Conflict("storm"), verb="patch", name="a", nth=2, times=2)
    cluster.put(CONFIGMAPS, "lab", config("a"))
    cluster.put(CONFIGMAPS, "lab", config("b"))
    results = []
    for name in ("a", "b", "a", "a", "a"):
        try:
            await port.patch_merge(CONFIGMAPS, "lab", name, {"data": {}})
            results.append("ok")
        except errors.Conflict:
            results.append("conflict")

    assert results == ["ok", "ok", "conflict", "conflict", "ok"]


async def test_a_write_arrives_twice(cluster: MemCluster) -> None:
    port = cluster.port("p")
    port.repeat(verb="create")
    await port.create(CONFIGMAPS, "lab", {"metadata": {"generateName": "a-"}})

    assert len(cluster.names(CONFIGMAPS)) == 2


async def test_an_outage_refuses_everything(cluster: MemCluster) -> None:
    port = cluster.port("p")
    cluster.down = True
    with pytest.raises(errors.Unavailable):
        await port.create(CONFIGMAPS, "lab", config("a"))
    cluster.down = False

    assert cluster.names(CONFIGMAPS) == []


async def test_a_namespace_that_is_going_takes_nothing_new(cluster: MemCluster) -> None:
    cluster.closed_namespaces.add("lab")
    with pytest.raises(errors.Forbidden):
        await cluster.port("p").create(CONFIGMAPS, "lab", config("a"))


async def test_a_paused_process_acts_on_what_it_read_long_ago(cluster: MemCluster) -> None:
    port = cluster.port("p")
    made = cluster.put(CONFIGMAPS, "lab", config("a"))
    port.paused = asyncio.Event()
    version = made["metadata"]["resourceVersion"]
    writing = asyncio.get_running_loop().create_task(
        port.patch_merge(CONFIGMAPS, "lab", "a", {"data": {"x": "1"}}, version=version)
    )
    await asyncio.sleep(0)
    cluster.edit(CONFIGMAPS, "lab", "a", {"data": {"x": "2"}})
    port.paused.set()

    with pytest.raises(errors.Conflict):
        await writing


@pytest.mark.parametrize(
    ("mode", "exists", "answered"),
    [(Mode.BEFORE, False, False), (Mode.UNANSWERED, True, False), (Mode.AFTER, True, True)],
)
async def test_a_process_is_killed(
    cluster: MemCluster, mode: Mode, exists: bool, answered: bool
) -> None:
    port = cluster.port("p")
    port.kill_at(2, mode)
    await port.create(CONFIGMAPS, "lab", config("a"))
    got = False
    with pytest.raises(Killed):
        await port.create(CONFIGMAPS, "lab", config("b"))
        got = True
        await port.create(CONFIGMAPS, "lab", config("c"))

    assert got is answered
    assert cluster.names(CONFIGMAPS) == (["a", "b"] if exists else ["a"])
    with pytest.raises(Killed):
        await port.get(CONFIGMAPS, "lab", "a")


# Watches


async def seen(port: MemPort, cluster: MemCluster, since: str = "0") -> list[str]:
    """Return what a watch reports until the server ends it."""
    cluster.compacted = 0
    found = []
    async with asyncio.TaskGroup() as group:

        async def watch() -> None:
            async for event in port.watch(CONFIGMAPS, "lab", since=since):
                found.append(_word(event))

        group.create_task(watch())
        while not cluster.watching:
            await asyncio.sleep(0)
        cluster.bookmark()
        cluster.end_watches()
    return found


def _word(event: WatchEvent) -> str:
    name = event.object["metadata"].get("name", "")
    return f"{event.change.value.lower()} {name}".strip()


@pytest.fixture
def story(cluster: MemCluster) -> MemCluster:
    """A cluster in which something happened."""
    cluster.put(CONFIGMAPS, "lab", config("a"))
    cluster.put(CONFIGMAPS, "lab", config("b"))
    cluster.edit(CONFIGMAPS, "lab", "a", {"data": {"x": "1"}})
    cluster.remove(CONFIGMAPS, "lab", "b")
    cluster.put(CONFIGMAPS, "other", config("c"))
    return cluster


async def test_a_watch_tells_the_story_since_a_version(story: MemCluster) -> None:
    port = story.port("p")
    told = await seen(port, story)

    assert told == ["added a", "added b", "modified a", "deleted b", "bookmark"]
    assert await seen(port, story, since="102") == ["modified a", "deleted b", "bookmark"]


async def test_events_are_dropped_repeated_and_reordered(story: MemCluster) -> None:
    port = story.port("p")
    port.watch_filter = dropping(lambda event: event.change is Change.DELETED)
    assert await seen(port, story) == ["added a", "added b", "modified a", "bookmark"]
    port.watch_filter = repeating()
    assert (await seen(port, story))[:4] == ["added a", "added b", "added a", "modified a"]
    port.watch_filter = swapping()
    assert (await seen(port, story))[:4] == ["added b", "added a", "deleted b", "modified a"]


async def test_a_version_before_the_compaction_is_gone(story: MemCluster) -> None:
    port = story.port("p")
    listed = await port.list(CONFIGMAPS, "lab")
    story.put(CONFIGMAPS, "lab", config("d"))
    story.compact()

    with pytest.raises(errors.Gone):
        async for _ in port.watch(CONFIGMAPS, "lab", since=listed.version):
            pass


async def test_a_watch_breaks_and_is_forgotten(story: MemCluster) -> None:
    port = story.port("p")

    async def watch() -> None:
        async for _ in port.watch(CONFIGMAPS, "lab", since="100"):
            pass

    task = asyncio.get_running_loop().create_task(watch())
    while not story.watching:
        await asyncio.sleep(0)
    story.break_watches()
    with pytest.raises(errors.Unavailable):
        await task
    assert story.watching == 0


async def test_a_watch_ends_by_itself(story: MemCluster) -> None:
    port = story.port("p")
    watching = port.watch(CONFIGMAPS, "lab", since=str(story.version), timeout_s=0.01)
    async with contextlib.aclosing(watching):
        assert [event async for event in watching] == []


def test_invariants_are_asked_after_every_write(cluster: MemCluster) -> None:
    seen_writes: list[str] = []
    cluster.after_write.append(lambda write: seen_writes.append(f"{write.actor} {write.verb}"))
    trail = Trail(cluster)
    cluster.put(CONFIGMAPS, "lab", config("a"))
    cluster.edit(CONFIGMAPS, "lab", "a", {"data": {"x": "1"}}, actor="them")
    cluster.remove(CONFIGMAPS, "lab", "a")

    assert seen_writes == ["test create", "them patch", "test remove"]
    assert [write.verb for write in trail.new("them")] == ["patch"]
    assert trail.new() == []


def test_merge_patches_are_those_of_the_standard() -> None:
    # The examples in appendix A of RFC 7386.
    assert merged({"a": "b"}, {"a": "c"}) == {"a": "c"}
    assert merged({"a": "b"}, {"b": "c"}) == {"a": "b", "b": "c"}
    assert merged({"a": "b", "b": "c"}, {"a": None}) == {"b": "c"}
    assert merged({"a": ["b"]}, {"a": "c"}) == {"a": "c"}
    assert merged({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}) == {"a": {"b": "d"}}
    assert merged({"a": [{"b": "c"}]}, {"a": [1]}) == {"a": [1]}
    assert merged(["a"], ["c"]) == ["c"]
    assert merged({"e": None}, {"a": 1}) == {"e": None, "a": 1}
    assert merged({}, {"a": {"bb": {"ccc": None}}}) == {"a": {"bb": {}}}


def test_nothing_handed_out_is_the_store_itself(cluster: MemCluster) -> None:
    handed = cluster.put(CONFIGMAPS, "lab", config("a", x="1"))
    handed["data"]["x"] = "2"
    cluster.must(CONFIGMAPS, "lab", "a")["data"]["x"] = "3"

    assert cluster.must(CONFIGMAPS, "lab", "a")["data"] == {"x": "1"}


def test_time_passes_when_it_is_told_to(cluster: MemCluster) -> None:
    cluster.advance(90)

    assert cluster.now() == 90
    assert cluster.wall().isoformat() == "2026-01-01T00:01:30+00:00"


# What moves


def scale(world: World, name: str, replicas: int) -> None:
    """Scale a Deployment by hand."""
    world.cluster.edit(DEPLOYMENTS, "lab", name, {"spec": {"replicas": replicas}})


def test_a_deployment_comes_up_and_goes_down(world: World) -> None:
    world.cluster.put(DEPLOYMENTS, "lab", deployment("coder", replicas=1))
    world.settle()

    (pod,) = world.cluster.all(PODS)
    assert is_ready(pod)
    assert pod["status"]["podIP"] == "10.0.0.1"
    status = world.cluster.must(DEPLOYMENTS, "lab", "coder")["status"]
    assert (status["observedGeneration"], status["readyReplicas"]) == (1, 1)

    scale(world, "coder", 0)
    world.settle()
    assert world.cluster.all(PODS) == []
    assert world.cluster.must(DEPLOYMENTS, "lab", "coder")["status"]["observedGeneration"] == 2
    assert world.settle() == 0


def test_two_members_want_one_accelerator_and_the_second_waits(world: World) -> None:
    world.cluster.put(DEPLOYMENTS, "lab", deployment("a", replicas=1))
    world.settle()
    world.cluster.put(DEPLOYMENTS, "lab", deployment("b", replicas=1))
    world.settle()

    (second,) = world.cluster.all(PODS, labels="app=b")
    assert "nodeName" not in second["spec"]
    assert second["status"]["conditions"][0]["reason"] == "Unschedulable"
    scale(world, "a", 0)
    world.settle()
    (second,) = world.cluster.all(PODS, labels="app=b")
    assert is_ready(second)
    assert len(world.running()) == 1


def test_a_replicaset_does_not_count_a_terminating_pod(world: World) -> None:
    world.cluster.put(DEPLOYMENTS, "lab", deployment("a", replicas=1))
    world.settle()
    (pod,) = world.cluster.all(PODS)
    world.kubelet.stubborn.add(pod["metadata"]["name"])
    scale(world, "a", 0)
    world.settle()

    (replicaset,) = world.cluster.all(REPLICASETS)
    assert replicaset["status"]["replicas"] == 0
    assert world.running() == [pod["metadata"]["name"]]
    world.kubelet.stubborn.clear()
    world.settle()
    assert world.running() == []


def test_a_lagging_replicaset_makes_a_pod_nobody_wants_any_more(world: World) -> None:
    world.cluster.put(DEPLOYMENTS, "lab", deployment("a", replicas=1))
    world.deployments.step()
    world.replicasets.look()
    scale(world, "a", 0)
    world.deployments.step()
    assert world.cluster.all(REPLICASETS)[0]["spec"]["replicas"] == 0

    world.replicasets.step(look=False)

    assert len(world.cluster.all(PODS)) == 1
    world.settle()
    assert world.cluster.all(PODS) == []


def test_a_recreated_deployment_waits_for_the_old_pod(world: World) -> None:
    world.cluster.put(DEPLOYMENTS, "lab", deployment("a", replicas=1))
    world.settle()
    (old,) = world.cluster.all(PODS)
    template = {"spec": {"template": {"metadata": {"labels": {"version": "2"}}}}}
    world.cluster.edit(DEPLOYMENTS, "lab", "a", template)
    most = 0
    while world.step():
        most = max(most, len(world.cluster.all(PODS)))

    (new,) = world.cluster.all(PODS)
    assert most == 1
    assert new["metadata"]["uid"] != old["metadata"]["uid"]
    assert sorted(rs["spec"]["replicas"] for rs in world.cluster.all(REPLICASETS)) == [0, 1]


def test_a_rolling_deployment_has_two_pods_for_a_while() -> None:
    world = World(gpus=2)
    world.cluster.put(DEPLOYMENTS, "lab", deployment("a", replicas=1, strategy="RollingUpdate"))
    world.settle()
    template = {"spec": {"template": {"metadata": {"labels": {"version": "2"}}}}}
    world.cluster.edit(DEPLOYMENTS, "lab", "a", template)
    most = 0
    while world.step():
        most = max(most, len(world.running()))

    assert most == 2
    assert len(world.running()) == 1


def test_a_statefulset_names_its_pods_and_makes_failed_ones_anew(world: World) -> None:
    world.cluster.put(STATEFULSETS, "lab", statefulset("s", replicas=1))
    world.settle()
    (pod,) = world.cluster.all(PODS)
    assert pod["metadata"]["name"] == "s-0"
    world.kubelet.fail("lab", "s-0")
    world.settle()

    (second,) = world.cluster.all(PODS)
    assert second["metadata"]["uid"] != pod["metadata"]["uid"]
    world.cluster.edit(STATEFULSETS, "lab", "s", {"spec": {"replicas": 0}})
    world.settle()
    assert world.cluster.all(PODS) == []
    assert world.cluster.must(STATEFULSETS, "lab", "s")["status"]["observedGeneration"] == 2


def test_a_failed_pod_is_left_behind_and_replaced(world: World) -> None:
    world.cluster.put(DEPLOYMENTS, "lab", deployment("a", replicas=1))
    world.settle()
    world.kubelet.fail("lab", world.running()[0])
    world.settle()

    phases = sorted(pod["status"]["phase"] for pod in world.cluster.all(PODS))
    assert phases == ["Failed", "Running"]


def test_the_device_plugin_knows_better_than_the_scheduler(world: World) -> None:
    world.cluster.put(DEPLOYMENTS, "lab", deployment("a", replicas=1))
    world.settle()
    (pod,) = world.cluster.all(PODS)
    # Marked finished while its container still runs, as an evicted Pod may be.
    world.cluster.edit_status(PODS, "lab", pod["metadata"]["name"], {"phase": "Failed"})
    world.replicasets.step()
    world.scheduler.step()
    world.kubelet.step()

    assert "UnexpectedAdmissionError" in {
        each["status"].get("reason") for each in world.cluster.all(PODS)
    }


def test_a_pod_on_a_lost_node_stays_until_the_node_is_out_of_service(world: World) -> None:
    world.cluster.put(DEPLOYMENTS, "lab", deployment("a", replicas=1))
    world.settle()
    world.kubelet.lose("n1")
    world.settle()
    lost = [pod for pod in world.cluster.all(PODS) if pod["spec"].get("nodeName")]
    assert [pod["metadata"].get("deletionTimestamp") is not None for pod in lost] == [True]
    taints = [{"key": OUT_OF_SERVICE, "effect": "NoExecute"}]

    world.cluster.edit(NODES, None, "n1", {"spec": {"taints": taints}})
    world.settle()

    assert [pod for pod in world.cluster.all(PODS) if pod["spec"].get("nodeName")] == []


def test_the_pods_of_a_deleted_node_go(world: World) -> None:
    world.cluster.put(DEPLOYMENTS, "lab", deployment("a", replicas=1))
    world.settle()
    world.kubelet.lose("n1")
    world.cluster.remove(NODES, None, "n1")
    world.settle()

    assert [pod for pod in world.cluster.all(PODS) if pod["spec"].get("nodeName")] == []


def test_what_has_no_owner_left_is_collected(world: World) -> None:
    world.cluster.put(DEPLOYMENTS, "lab", deployment("a", replicas=1))
    world.settle()
    world.cluster.remove(DEPLOYMENTS, "lab", "a")
    assert len(world.cluster.all(PODS)) == 1
    world.settle()

    assert world.cluster.all(REPLICASETS) == []
    assert world.cluster.all(PODS) == []


def test_an_orphan_is_adopted(world: World) -> None:
    world.cluster.put(DEPLOYMENTS, "lab", deployment("a", replicas=1))
    world.settle()
    (pod,) = world.cluster.all(PODS)
    name = pod["metadata"]["name"]
    world.cluster.edit(PODS, "lab", name, {"metadata": {"ownerReferences": None}})
    world.settle()

    (again,) = world.cluster.all(PODS)
    assert again["metadata"]["name"] == name
    assert again["metadata"]["ownerReferences"]


def test_a_container_that_waits_says_why(world: World) -> None:
    world.cluster.put(DEPLOYMENTS, "lab", deployment("a", replicas=1))
    world.settle()
    name = world.running()[0]
    world.kubelet.wait_with("lab", name, "CrashLoopBackOff", restarts=3)
    world.settle()

    status = world.cluster.must(PODS, "lab", name)["status"]["containerStatuses"][0]
    assert status["state"]["waiting"]["reason"] == "CrashLoopBackOff"
    assert status["restartCount"] == 3
    scale(world, "a", 0)
    world.settle()
    assert world.cluster.all(PODS) == []


def test_a_finalizer_keeps_a_pod_after_its_container(world: World) -> None:
    body = deployment("a", replicas=1)
    body["spec"]["template"]["metadata"]["finalizers"] = ["example.org/hold"]
    world.cluster.put(DEPLOYMENTS, "lab", body)
    world.settle()
    scale(world, "a", 0)
    world.settle()

    (pod,) = world.cluster.all(PODS)
    assert world.running() == []
    world.cluster.edit(PODS, "lab", pod["metadata"]["name"], {"metadata": {"finalizers": None}})
    assert world.cluster.all(PODS) == []


# Crash points


async def make_two(cluster: MemCluster, port: MemPort) -> None:
    """Make a pair of objects that belong together, whatever is there already."""
    for name in ("a", "b"):
        try:
            await port.get(CONFIGMAPS, "lab", name)
        except errors.NotFound:
            with contextlib.suppress(errors.AlreadyExists):
                await port.create(CONFIGMAPS, "lab", config(name))


def both(cluster: MemCluster) -> None:
    """Both are there."""
    assert cluster.names(CONFIGMAPS) == ["a", "b"]


async def test_every_crash_point_of_a_scenario_is_visited() -> None:
    scenario = Scenario(MemCluster, lambda cluster: cluster, make_two, make_two, both)

    points = await kill_everywhere(scenario)
    lost = await lose_everywhere(scenario)

    assert len(points) == 4 * 3
    assert [str(point.request) for point in points[::3]] == [
        "1 get configmaps lab/a",
        "2 create configmaps lab/a",
        "3 get configmaps lab/b",
        "4 create configmaps lab/b",
    ]
    assert len(lost) == 2 * 2


async def test_a_scenario_that_does_not_recover_is_named_with_its_crash_point() -> None:
    async def make_once(cluster: MemCluster, port: MemPort) -> None:
        await port.create(CONFIGMAPS, "lab", config("a"))
        await port.create(CONFIGMAPS, "lab", config("b"))

    scenario = Scenario(MemCluster, lambda cluster: cluster, make_once, make_once, both)

    with pytest.raises(AssertionError, match=r"answer lost, killed: request 1 .*AlreadyExists"):
        await kill_everywhere(scenario)


async def test_a_lease_has_no_generation(cluster: MemCluster) -> None:
    body: Json = LEASES.body("l", "lab", spec={"holderIdentity": "me"})
    made = await cluster.port("p").create(LEASES, "lab", body)

    assert "generation" not in made["metadata"]


async def test_it_serves_our_kinds_as_an_api_server_does(cluster: MemCluster) -> None:
    serve(cluster, map(schema.crd, schema.RESOURCES))
    port = cluster.port("p")
    spec = {"members": [{"deploymentRef": {"name": "coder"}}]}
    made = await port.create(MODEL_POOLS, "lab", MODEL_POOLS.body("gpu0", "lab", spec=spec))

    assert made["spec"]["swapBudget"] == "300s"
    with pytest.raises(errors.Invalid, match="is no member"):
        await port.patch_merge(MODEL_POOLS, "lab", "gpu0", {"spec": {"default": "ghost"}})
    status = {"status": {"phase": "Ready"}}
    shown = await port.patch_status(MODEL_POOLS, "lab", "gpu0", status)
    assert shown["status"] == {"phase": "Ready"}
    assert shown["metadata"]["generation"] == 1


async def test_without_rules_it_only_fills_in(cluster: MemCluster) -> None:
    serve(cluster, map(schema.crd, schema.RESOURCES), rules=False)
    spec = {"members": [{"deploymentRef": {"name": "a"}}], "default": "ghost", "odd": 1}
    body = MODEL_POOLS.body("gpu0", "lab", spec=spec)
    made = await cluster.port("p").create(MODEL_POOLS, "lab", body)

    assert made["spec"]["maxTurn"] == "60s"
    assert "odd" not in made["spec"]
