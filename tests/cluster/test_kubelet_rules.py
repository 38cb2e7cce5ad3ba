"""The test kubelet's pure decisions; needs no cluster, so `make test` runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

import kubelet_rules as rules
from kubelet_rules import ContainerState, Devices
from kubelet_volumes import relocated


def ended(code: int, *, last: bool = False) -> ContainerState:
    before = {"terminated": {"exitCode": code}} if last else {}
    return ContainerState("c", "i", state={"terminated": {"exitCode": code}}, last=before)


def running(*, ready: bool = True) -> ContainerState:
    return ContainerState("c", "i", state={"running": {}}, ready=ready)


def test_known_names_are_expanded_and_others_stay_as_written() -> None:
    variables = {"POD_IP": "127.65.0.1", "A.b-c": "x"}

    assert rules.expand("--host=$(POD_IP)", variables) == "--host=127.65.0.1"
    assert rules.expand("$(A.b-c)$(NOBODY)", variables) == "x$(NOBODY)"
    assert rules.expand("$$(POD_IP) $HOME $", variables) == "$(POD_IP) $HOME $"


def test_a_value_is_not_expanded_twice() -> None:
    assert rules.expand("$(A)", {"A": "$(B)", "B": "no"}) == "$(B)"


@pytest.mark.parametrize(
    ("image", "policy", "reason"),
    [
        ("modelpool.test/absent:1", "IfNotPresent", "ErrImagePull"),
        ("modelpool.test/absent:1", "Never", "ErrImageNeverPull"),
        ("Not An Image", "Always", "InvalidImageName"),
    ],
)
def test_an_image_that_cannot_be_used_says_why(image: str, policy: str, reason: str) -> None:
    problem = rules.image_problem(image, policy)

    assert problem is not None
    assert problem[0] == reason


@pytest.mark.parametrize(
    "image", ["a", "ghcr.io/ggml-org/llama.cpp:server", "h:5000/a/b_c@sha256:" + "0" * 64]
)
def test_an_ordinary_image_is_good(image: str) -> None:
    assert rules.image_problem(image, "IfNotPresent") is None


def test_a_pod_asks_for_the_sum_of_its_containers_or_its_largest_init_container() -> None:
    def asks(count: int) -> dict[str, object]:
        return {"resources": {"limits": {"nvidia.com/gpu": count, "cpu": "500m"}}}

    spec = {"containers": [asks(1), asks(2), {}], "initContainers": [asks(4)]}

    assert rules.extended_requests(spec) == {"nvidia.com/gpu": 4}
    assert rules.extended_requests({"containers": [asks(1), asks(2)]}) == {"nvidia.com/gpu": 3}
    assert rules.extended_requests({"containers": [asks(0)]}) == {}


def test_a_device_is_busy_until_it_is_released() -> None:
    devices = Devices({"nvidia.com/gpu": 2})

    assert devices.take("a", {"nvidia.com/gpu": 1}) == {"nvidia.com/gpu": [0]}
    assert "Requested: 2, Available: 1" in devices.take("b", {"nvidia.com/gpu": 2})
    assert devices.take("c", {"nvidia.com/gpu": 1}) == {"nvidia.com/gpu": [1]}
    devices.release("a")
    devices.release("a")
    assert devices.take("d", {"nvidia.com/gpu": 1}) == {"nvidia.com/gpu": [0]}


def test_a_refused_pod_holds_nothing() -> None:
    devices = Devices({"a/x": 1, "a/y": 0})

    devices.take("p", {"a/x": 1, "a/y": 1})

    assert devices.held() == {}


@pytest.mark.parametrize(
    ("policy", "inits", "mains", "phase"),
    [
        ("Always", [], [ContainerState("c", "i")], "Pending"),
        ("Always", [], [running()], "Running"),
        ("Always", [], [ended(1)], "Running"),
        ("Always", [], [ended(0)], "Running"),
        ("Never", [], [ended(0)], "Succeeded"),
        ("Never", [], [ended(0), ended(1)], "Failed"),
        ("Never", [], [ended(1), running()], "Running"),
        ("OnFailure", [], [ended(0)], "Succeeded"),
        ("OnFailure", [], [ended(2)], "Running"),
        ("Never", [ContainerState("c", "i")], [ContainerState("c", "i")], "Pending"),
        ("Never", [ended(1)], [ContainerState("c", "i")], "Failed"),
        ("Always", [ended(1)], [ContainerState("c", "i")], "Pending"),
    ],
)
def test_the_phase_follows_from_the_containers(
    policy: str, inits: list[ContainerState], mains: list[ContainerState], phase: str
) -> None:
    assert rules.phase(policy, inits, mains) == phase


def test_between_two_attempts_a_pod_is_running() -> None:
    waiting = ContainerState("c", "i", last={"terminated": {"exitCode": 1}})

    assert rules.phase("Always", [], [waiting]) == "Running"


@pytest.mark.parametrize(
    ("gates_open", "ready", "status", "reason"),
    [
        (True, True, "True", None),
        (False, True, "False", "ReadinessGatesNotReady"),
        (True, False, "False", "ContainersNotReady"),
    ],
)
def test_a_pod_is_ready_when_its_containers_are_and_its_gates_are_open(
    gates_open: bool, ready: bool, status: str, reason: str | None
) -> None:
    made = rules.conditions(
        phase="Running",
        inits=[],
        containers=[running(ready=ready)],
        gates_open=gates_open,
        has_sandbox=True,
    )

    condition = next(one for one in made if one["type"] == "Ready")
    assert (condition["status"], condition["reason"]) == (status, reason)


def test_a_transition_time_moves_only_with_the_status() -> None:
    old = [{"type": "Ready", "status": "True", "lastTransitionTime": "then"}]

    same = rules.with_times([{"type": "Ready", "status": "True"}], old, "now")
    other = rules.with_times([{"type": "Ready", "status": "False"}], old, "now")

    assert same[0]["lastTransitionTime"] == "then"
    assert other[0]["lastTransitionTime"] == "now"


def test_a_status_stands_until_somebody_else_changes_its_phase_or_a_condition() -> None:
    said = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    others = [{"type": "PodScheduled", "status": "True"}]

    assert rules.stands(said, {"phase": "Running", "conditions": said["conditions"] + others})  # type: ignore[operator]
    assert not rules.stands(said, {"phase": "Failed", "conditions": said["conditions"]})
    silent = [{"type": "Ready", "status": "False"}]
    assert not rules.stands(said, {"phase": "Running", "conditions": silent})
    assert not rules.stands(said, {})


def test_mount_paths_are_replaced_at_the_start_of_a_word_only() -> None:
    mounts = {"/etc/app": Path("/x/v"), "/etc/app/deep": Path("/x/w")}

    assert relocated("/etc/app/c.yaml", mounts) == "/x/v/c.yaml"
    assert relocated("--config=/etc/app/deep/c", mounts) == "--config=/x/w/c"
    assert relocated("cat /etc/app;", mounts) == "cat /x/v;"
    assert relocated("/opt/etc/app /etc/apple", mounts) == "/opt/etc/app /etc/apple"
