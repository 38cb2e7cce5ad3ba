"""InferenceServices: what is made of them, how they scale, what they say."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest

from memcluster import Write
from memcontrollers import deployment
from modelpool_api.names import SLOT_ANNOTATION
from modelpool_kube import errors
from modelpool_kube.kinds import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    LEASES,
    PODS,
    SERVICES,
    Json,
    annotation,
)
from operatorworld import NS, OperatorWorld

pytestmark = pytest.mark.looptime(idle_timeout=100_000)


@pytest.fixture
async def world() -> AsyncIterator[OperatorWorld]:
    """An empty world; its operators are ended afterwards."""
    found = OperatorWorld()
    yield found
    await found.close()
    assert not found.violations


def status(world: OperatorWorld, name: str = "coder") -> Json:
    """Return the status of an InferenceService."""
    found: Json = world.cluster.must(INFERENCE_SERVICES, NS, name).get("status", {})
    return found


def phase(world: OperatorWorld, wanted: str) -> Any:
    """Return a condition for `run`."""
    return lambda: status(world).get("phase") == wanted


async def test_given_a_service_then_a_deployment_and_a_service_are_made_and_get_ready(
    world: OperatorWorld,
) -> None:
    world.service("coder", port=8001)
    world.start()

    await world.run(until=phase(world, "Ready"))

    made = world.cluster.must(DEPLOYMENTS, NS, "coder")
    assert made["spec"]["strategy"] == {"type": "Recreate"}
    assert made["spec"]["replicas"] == 1
    container = made["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "1"}}
    assert container["ports"][0]["containerPort"] == 8001
    assert container["readinessProbe"]["httpGet"]["path"] == "/health"
    front = world.cluster.must(SERVICES, NS, "coder")
    assert front["spec"]["ports"][0]["port"] == 8001
    assert front["spec"]["selector"] == made["spec"]["selector"]["matchLabels"]
    found = status(world)
    assert (found["replicas"], found["readyReplicas"]) == (1, 1)
    assert found["endpoint"] == "http://coder.lab.svc:8001"
    assert "pool" not in found
    for term in found["selector"].split(","):
        key, _, value = term.partition("=")
        assert made["spec"]["template"]["metadata"]["labels"][key] == value


async def test_given_a_service_at_rest_then_ten_resyncs_write_nothing(
    world: OperatorWorld,
) -> None:
    world.service("coder")
    process = world.start()
    await world.run(until=phase(world, "Ready"))
    await world.run(60)
    before = world.cluster.version

    for _ in range(10):
        process.wake_all()
        await world.run(60)

    assert world.cluster.version == before


async def test_given_a_pool_lists_it_then_it_starts_at_zero_and_says_stopped(
    world: OperatorWorld,
) -> None:
    world.pool("gpu0", {"inferenceServiceRef": {"name": "coder"}})
    world.service("coder")
    world.start()

    await world.run(until=phase(world, "Stopped"))

    assert world.replicas() == {"coder": 0}
    assert world.replicas(INFERENCE_SERVICES) == {"coder": 0}
    assert status(world)["pool"] == "gpu0"
    assert world.cluster.all(PODS) == []
    ready = {each["type"]: each["status"] for each in status(world)["conditions"]}
    assert ready == {"Available": "False", "Ready": "True", "Stalled": "False"}


async def test_given_it_runs_when_a_pool_comes_to_list_it_then_it_goes_on(
    world: OperatorWorld,
) -> None:
    world.service("coder")
    world.start()
    await world.run(until=phase(world, "Ready"))

    world.pool("gpu0", {"inferenceServiceRef": {"name": "coder"}})
    await world.run(until=lambda: world.status().get("residentMember") == "coder")

    assert world.replicas(INFERENCE_SERVICES) == {"coder": 1}
    assert len(world.cluster.all(PODS)) == 1


async def test_given_it_is_scaled_then_replicas_and_mark_go_down_in_one_write(
    world: OperatorWorld,
) -> None:
    world.service("coder", replicas=0)
    world.start()
    await world.run(until=phase(world, "Stopped"))
    before = world.cluster.version

    patch = {
        "metadata": {"annotations": {SLOT_ANNOTATION: "lab/modelpool-x:5"}},
        "spec": {"replicas": 1},
    }
    world.cluster.edit(INFERENCE_SERVICES, NS, "coder", patch)
    await world.run(until=phase(world, "Ready"))

    wrote = [each for each in world.writes(before) if each.kind == DEPLOYMENTS]
    assert len(wrote) == 1
    assert wrote[0].after is not None
    assert annotation(wrote[0].after, SLOT_ANNOTATION) == "lab/modelpool-x:5"
    assert wrote[0].after["spec"]["replicas"] == 1


async def test_given_the_deployment_is_ahead_then_the_epoch_is_never_lowered(
    world: OperatorWorld,
) -> None:
    mark = {"metadata": {"annotations": {SLOT_ANNOTATION: "lab/modelpool-x:5"}}}
    world.service("coder", replicas=0)
    world.cluster.edit(INFERENCE_SERVICES, NS, "coder", mark)
    world.start()
    await world.run(until=phase(world, "Stopped"))
    ahead = {"metadata": {"annotations": {SLOT_ANNOTATION: "lab/modelpool-x:6"}}}
    world.cluster.edit(DEPLOYMENTS, NS, "coder", ahead)

    world.cluster.edit(INFERENCE_SERVICES, NS, "coder", {"spec": {"replicas": 1}})
    await world.run(120)

    below = world.cluster.must(DEPLOYMENTS, NS, "coder")
    assert annotation(below, SLOT_ANNOTATION) == "lab/modelpool-x:6"
    assert below["spec"]["replicas"] == 0


async def test_given_the_mark_above_was_removed_while_its_lease_lives_then_nothing_scales(
    world: OperatorWorld,
) -> None:
    world.cluster.put(LEASES, NS, {"metadata": {"name": "modelpool-x"}, "spec": {}})
    mark = {"metadata": {"annotations": {SLOT_ANNOTATION: "lab/modelpool-x:5"}}}
    world.service("coder", replicas=0)
    world.cluster.edit(INFERENCE_SERVICES, NS, "coder", mark)
    world.start()
    await world.run(until=phase(world, "Stopped"))

    gone = {"metadata": {"annotations": {SLOT_ANNOTATION: None}}, "spec": {"replicas": 1}}
    world.cluster.edit(INFERENCE_SERVICES, NS, "coder", gone)
    await world.run(120)

    assert world.replicas() == {"coder": 0}
    world.cluster.vanish(LEASES, NS, "modelpool-x")
    await world.run(until=phase(world, "Ready"))
    assert annotation(world.cluster.must(DEPLOYMENTS, NS, "coder"), SLOT_ANNOTATION) is None


async def test_given_an_old_observation_when_it_is_written_then_the_server_refuses_it(
    world: OperatorWorld,
) -> None:
    world.service("coder", replicas=0)
    process = world.start()
    await world.run(until=phase(world, "Stopped"))
    world.cluster.edit(INFERENCE_SERVICES, NS, "coder", {"spec": {"replicas": 1}})
    old = world.cluster.version
    mark = {"metadata": {"annotations": {SLOT_ANNOTATION: "lab/modelpool-x:9"}}}
    world.cluster.edit(DEPLOYMENTS, NS, "coder", mark)

    process.port.read_version = old
    await process.step()
    process.port.read_version = None

    assert [type(each).__name__ for each in process.failures] == ["Conflict"]
    assert world.replicas() == {"coder": 0}


async def test_given_an_edit_then_only_what_changed_is_written_and_notes_of_others_stay(
    world: OperatorWorld,
) -> None:
    world.service("coder", nodeSelector={"zone": "a", "disk": "ssd"})
    world.start()
    await world.run(60)
    note = {"annotations": {"other.dev/note": "1"}, "labels": {"team": "x"}}
    template = {"metadata": {"annotations": {"kubectl.kubernetes.io/restartedAt": "now"}}}
    world.cluster.edit(DEPLOYMENTS, NS, "coder", {"metadata": note, "spec": {"template": template}})

    spec = {"image": "engine:2", "nodeSelector": {"zone": "a", "disk": None}}
    world.cluster.edit(INFERENCE_SERVICES, NS, "coder", {"spec": spec})
    await world.run(60)

    made = world.cluster.must(DEPLOYMENTS, NS, "coder")
    assert made["metadata"]["annotations"]["other.dev/note"] == "1"
    assert made["metadata"]["labels"]["team"] == "x"
    pod = made["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "engine:2"
    assert pod["nodeSelector"] == {"zone": "a"}
    notes = made["spec"]["template"]["metadata"]["annotations"]
    assert notes == {"kubectl.kubernetes.io/restartedAt": "now"}
    assert made["spec"]["replicas"] == 1


async def test_given_no_accelerator_is_free_then_it_waits_for_one(world: OperatorWorld) -> None:
    world.cluster.put(DEPLOYMENTS, NS, deployment("hog", replicas=1, gpus=2))
    world.start()
    await world.run(30)
    world.service("coder")

    await world.run(until=phase(world, "WaitingForGPU"))
    await world.run(30)

    world.cluster.edit(DEPLOYMENTS, NS, "hog", {"spec": {"replicas": 0}})
    await world.run(until=phase(world, "Ready"))


async def test_given_an_image_that_cannot_be_pulled_then_it_has_failed_and_says_why(
    world: OperatorWorld,
) -> None:
    world.service("coder")
    world.start()
    await world.run(until=lambda: bool(world.cluster.all(PODS)))
    world.world.kubelet.wait_with(NS, world.cluster.names(PODS, NS)[0], "ImagePullBackOff")

    await world.run(until=phase(world, "Failed"))

    assert "ImagePullBackOff" in status(world)["message"]
    assert "LoadFailed" in world.events()


async def test_given_the_accelerator_is_metal_then_nothing_is_made(world: OperatorWorld) -> None:
    world.service("coder", accelerator="metal")
    world.start()

    await world.run(until=phase(world, "Failed"))

    assert world.cluster.all(DEPLOYMENTS) == []
    assert "accelerator" in status(world)["message"]


@pytest.mark.parametrize("kind", [DEPLOYMENTS, SERVICES])
async def test_given_somebody_elses_object_of_that_name_then_it_is_left_alone(
    world: OperatorWorld, kind: Any
) -> None:
    body = deployment("coder") if kind == DEPLOYMENTS else {"metadata": {"name": "coder"}}
    body.setdefault("spec", {})
    theirs = world.cluster.put(kind, NS, body)
    world.service("coder")
    world.start()

    await world.run(until=phase(world, "Failed"))
    await world.run(120)

    assert f"{kind.kind} coder exists" in status(world)["message"]
    assert world.cluster.must(kind, NS, "coder")["metadata"]["uid"] == theirs["metadata"]["uid"]
    assert annotation(world.cluster.must(kind, NS, "coder"), SLOT_ANNOTATION) is None


async def test_given_it_is_deleted_then_what_was_made_is_collected(world: OperatorWorld) -> None:
    world.service("coder")
    world.start()
    await world.run(until=phase(world, "Ready"))

    world.cluster.remove(INFERENCE_SERVICES, NS, "coder")
    await world.run(120)

    assert world.cluster.all(DEPLOYMENTS) == []
    assert world.cluster.all(SERVICES) == []
    assert world.cluster.all(PODS) == []


async def test_given_what_was_made_is_deleted_then_it_is_made_again(world: OperatorWorld) -> None:
    world.service("coder")
    world.start()
    await world.run(until=phase(world, "Ready"))
    first = world.cluster.must(DEPLOYMENTS, NS, "coder")["metadata"]["uid"]

    world.cluster.remove(DEPLOYMENTS, NS, "coder")
    world.cluster.remove(SERVICES, NS, "coder")
    await world.run(120)

    assert world.cluster.must(DEPLOYMENTS, NS, "coder")["metadata"]["uid"] != first
    assert status(world)["phase"] == "Ready"
    assert world.cluster.names(SERVICES) == ["coder"]


def statuses(world: OperatorWorld) -> list[Json]:
    """Return a list that every status of a service is appended to."""
    told: list[Json] = []

    def see(write: Write) -> None:
        if write.kind == INFERENCE_SERVICES and write.verb == "status" and write.after:
            told.append(write.after["status"])

    world.cluster.after_write.append(see)
    return told


async def test_given_a_new_service_then_its_phases_come_in_order(world: OperatorWorld) -> None:
    told = statuses(world)
    world.world.kubelet.answers = lambda pod: False  # its model loads
    world.service("coder")
    world.start()
    await world.run(until=phase(world, "Creating"))
    world.world.kubelet.answers = lambda pod: True
    await world.run(until=phase(world, "Ready"))
    world.cluster.edit(INFERENCE_SERVICES, NS, "coder", {"spec": {"replicas": 0}})
    await world.run(until=phase(world, "Stopped"))

    said = []
    for each in told:
        ready = next(found for found in each["conditions"] if found["type"] == "Ready")
        said.append((each["phase"], f"{ready['status']}/{ready['reason']}"))
    assert [each for each, _ in itertools.groupby(said)] == [
        ("Pending", "False/Progressing"),
        ("Creating", "False/Progressing"),
        ("Ready", "True/Available"),
        ("Progressing", "False/Progressing"),
        ("Stopped", "True/Stopped"),
    ]


async def test_given_some_are_ready_then_it_is_progressing(world: OperatorWorld) -> None:
    told = statuses(world)
    loaded: set[str] = set()
    world.world.kubelet.answers = lambda pod: pod["metadata"]["name"] in loaded
    world.service("coder", replicas=2)
    world.start()

    await world.run(until=phase(world, "Creating"))
    loaded |= set(world.cluster.names(PODS, NS)[:1])
    await world.run(until=phase(world, "Progressing"))
    loaded |= set(world.cluster.names(PODS, NS))
    await world.run(until=phase(world, "Ready"))

    assert {each["phase"]: each["readyReplicas"] for each in told} == {
        "Pending": 0,
        "Creating": 0,
        "Progressing": 1,
        "Ready": 2,
    }


async def test_given_its_deployment_is_refused_then_it_is_pending(world: OperatorWorld) -> None:
    world.service("coder")
    process = world.start()
    process.port.fail(errors.Forbidden("exceeded quota"), verb="create", kind=DEPLOYMENTS, times=9)

    await world.run(5)

    assert status(world)["phase"] == "Pending"
    assert status(world)["conditions"]
    await world.run(until=phase(world, "Ready"))
