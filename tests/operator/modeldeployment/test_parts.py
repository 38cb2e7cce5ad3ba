"""The pure parts on their own: amounts, command lines, the render, the record, the reader."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdep_lab import CARD, instance_type, role
from modelpool_api.meta import ObjectMeta
from modelpool_api.v1alpha1.instancetype import InstanceType
from modelpool_api.v1alpha1.modeldeployment import ModelDeployment
from modelpool_kube.kinds import Json
from modelpool_operator.plan.modeldeployment.admission import requests
from modelpool_operator.plan.modeldeployment.argv import all_answer
from modelpool_operator.plan.modeldeployment.quantity import times, value
from modelpool_operator.plan.modeldeployment.render import RoleRender, render
from modelpool_operator.plan.modeldeployment.shape import Verdict, read_shape
from modelpool_operator.plan.modeldeployment.sight import read_member
from modelpool_operator.plan.modeldeployment.slot import (
    Cause,
    Slot,
    SlotPhase,
    UnreadableRecord,
    decode,
    encode,
)


def rendered(
    *, engine: str = "vLLM", name: str = "chat", uid: str = "u", spec: Json | None = None, **of: Any
) -> RoleRender:
    """Return the render of one role called server."""
    deployment = ModelDeployment.model_validate(
        {
            "metadata": {"name": name, "namespace": "team-a", "uid": uid},
            "spec": {
                "model": {"name": "tiny"},
                "engine": {"name": engine},
                "roles": [role(**of)],
            },
        }
    )
    kind = InstanceType(
        metadata=ObjectMeta(name="a"),
        spec=InstanceType.model_validate({"spec": spec or instance_type("q")}).spec,
    )
    return render(deployment, {"a": kind})["server"]


def container(found: RoleRender, index: int = 0) -> Json:
    """Return the main container of a seat of replica 0."""
    main: Json = found.pod(0, index)["spec"]["containers"][0]
    return main


# Amounts


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1", "1"),
        ("500m", "0.5"),
        ("1.5Gi", "1610612736"),
        ("2e3", "2000"),
        ("1k", "1000"),
        (3, "3"),
    ],
)
def test_amounts_are_read_by_value(text: object, number: str) -> None:
    assert value(text) == Decimal(number)


@given(st.integers(1, 64), st.integers(1, 9999), st.sampled_from(["", "m", "Mi", "Gi", "k", "e2"]))
def test_an_amount_multiplied_keeps_its_unit_and_its_value(n: int, digits: int, unit: str) -> None:
    product = times(f"{digits}{unit}", n)

    assert product.endswith(unit)
    assert value(product) == value(f"{digits}{unit}") * n


def test_what_is_no_amount_is_refused() -> None:
    for text in ("", "1 Gi", "Gi", "1GiB"):
        with pytest.raises(ValueError, match="not a quantity"):
            value(text)


def test_effective_requests_come_before_limits_and_init_containers_count_once() -> None:
    spec = {
        "containers": [
            {"resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "4", CARD: "1"}}},
            {"resources": {"limits": {"cpu": "500m"}}},
        ],
        "initContainers": [{"resources": {"requests": {"cpu": "3"}}}],
    }

    assert requests(spec) == {"cpu": Decimal(3), CARD: Decimal(1)}


# Command lines


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"args": ["--tensor-parallel-size", "2"]}, False),
        ({"args": ["--data-parallel-external-lb"]}, True),
        ({"args": ["-dpn", "1"]}, True),
        ({"args": ["--data-parallel-rank=0"]}, True),
        ({"args": ["--data-parallel-hybrid-lb"]}, True),
        ({"args": [], "env": [{"name": "VLLM_DP_RANK", "value": "3"}]}, True),
        ({"args": [], "env": [{"name": "VLLM_DP_RANK", "valueFrom": {}}]}, False),
        ({"command": ["bash", "-c", "x"]}, None),
        ({"args": ["--config=x.yaml"]}, None),
        ({"args": ["$(FLAGS)"]}, None),
        ({}, False),
    ],
)
def test_who_answers_is_read_from_the_command_line(found: Json, expected: bool | None) -> None:
    assert all_answer(found) is expected


@pytest.mark.parametrize(
    ("engine", "fields", "args"),
    [
        (
            "vLLM",
            {},
            "--served-model-name tiny --model tiny --host 0.0.0.0 --port 8000",
        ),
        (
            "vLLM",
            {"extraArgs": ["--model", "/m", "--port", "9000"]},
            "--served-model-name tiny --model /m --port 9000 --host 0.0.0.0",
        ),
        (
            "SGLang",
            {"extraArgs": ["--model-path=/m"], "ports": [{"containerPort": 30000}]},
            "--served-model-name tiny --model-path=/m --host 0.0.0.0 --port 30000",
        ),
        (
            "llama.cpp",
            {"extraArgs": ["-hf", "x/y"]},
            "--alias tiny -hf x/y --host 0.0.0.0 --port 8000",
        ),
        ("Custom", {"extraArgs": ["--seed", "1"]}, "--seed 1"),
    ],
)
def test_the_managed_command_line_of_each_engine(engine: str, fields: Json, args: str) -> None:
    main = container(rendered(engine=engine, **fields))

    assert " ".join(main["args"]) == args
    assert ("readinessProbe" in main) == (engine != "Custom")


def test_only_members_that_answer_are_probed() -> None:
    leader = rendered(size=2)
    ranks = rendered(size=2, extraArgs=["--data-parallel-external-lb"])

    assert ["readinessProbe" in container(leader, index) for index in (0, 1)] == [True, False]
    assert ["readinessProbe" in container(ranks, index) for index in (0, 1)] == [True, True]


# The render


def test_the_hash_is_of_the_seat_and_of_nothing_that_happens_later() -> None:
    few, many = rendered(replicas=1), rendered(replicas=9)
    pair = rendered(size=2)

    assert few.hash(0, 0) == many.hash(0, 0) != many.hash(1, 0)
    assert len(set(pair.hashes(0))) == 2
    assert rendered(uid="other").hash(0, 0) == few.hash(0, 0)
    assert rendered(name="other").hash(0, 0) != few.hash(0, 0)
    assert "modelpool.dev/answers" not in few.pod(0, 0)["metadata"]["labels"]


@pytest.mark.parametrize(
    "fields",
    [
        {"size": 2},
        {"image": "x"},
        {"command": ["x"]},
        {"extraArgs": ["x"]},
        {"env": [{"name": "A", "value": "1"}]},
        {"ports": [{"containerPort": 1}]},
        {"resources": {"accelerator": 2}},
        {"shmSize": "1Gi"},
        {"privileged": True},
        {"imagePullPolicy": "Always"},
        {"imagePullSecrets": [{"name": "x"}]},
        {"terminationGracePeriodSeconds": 60},
        {"topology": {"requiredLevel": "rack"}},
    ],
)
def test_every_editable_field_moves_the_hash(fields: Json) -> None:
    assert rendered(**fields).hash(0, 0) != rendered().hash(0, 0)


def test_the_type_gives_queue_devices_machine_share_and_place() -> None:
    spec = instance_type(
        "q",
        nodeSelector={"pool": "big"},
        tolerations=[{"key": "gpu", "operator": "Exists"}],
        perCard={"cpu": "500m", "memory": "16Gi", "extra": {"example.com/nic": "1"}},
    )
    pod = rendered(spec=spec, resources={"accelerator": 3}).pod(0, 0)

    assert pod["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    assert pod["spec"]["nodeSelector"] == {"pool": "big"}
    assert pod["spec"]["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    resources = pod["spec"]["containers"][0]["resources"]
    assert resources["limits"] == {CARD: "3", "memory": "48Gi", "example.com/nic": "3"}
    assert resources["requests"] == {**resources["limits"], "cpu": "1500m"}


def test_a_type_without_cards_gives_its_share_once() -> None:
    found = container(rendered(spec=instance_type("q", cards=False)))

    assert found["resources"]["requests"] == {"cpu": "4", "memory": "16Gi"}


def test_nothing_of_kueue_is_rendered_but_labels_and_annotations() -> None:
    pod = rendered().pod(0, 0)

    assert "schedulingGates" not in pod["spec"] and "finalizers" not in pod["metadata"]
    assert "kueue.x-k8s.io/pod-group-fast-admission" not in pod["metadata"]["annotations"]


# The reader


def members(*made: tuple[str | None, str | None]) -> list[Any]:
    """Return members with these totals and index labels."""
    found = []
    for number, (total, index) in enumerate(made):
        labels = {} if index is None else {"modelpool.dev/member-index": index}
        notes = {} if total is None else {"kueue.x-k8s.io/pod-group-total-count": total}
        meta = {"name": f"m{number}", "uid": f"u{number}", "labels": labels, "annotations": notes}
        found.append(read_member({"metadata": meta}))
    return found


@pytest.mark.parametrize(
    ("made", "verdict"),
    [
        ([(None, None)], Verdict.COMPLETE),
        ([("1", "0")], Verdict.COMPLETE),
        ([("2", "0"), ("2", "1")], Verdict.COMPLETE),
        ([("2", "1")], Verdict.INCOMPLETE),
        ([("4", "0"), ("4", "3")], Verdict.INCOMPLETE),
        ([], Verdict.UNREADABLE),
        ([("2", "0"), ("3", "1")], Verdict.UNREADABLE),
        ([("0", "0")], Verdict.UNREADABLE),
        ([("-1", "0")], Verdict.UNREADABLE),
        ([("many", "0")], Verdict.UNREADABLE),
        ([("2", "0"), ("2", "0")], Verdict.UNREADABLE),
        ([("2", "2"), ("2", "0")], Verdict.UNREADABLE),
        ([("2", None), ("2", "0")], Verdict.UNREADABLE),
        ([("2", "01"), ("2", "0")], Verdict.UNREADABLE),
        ([(None, None), (None, None)], Verdict.UNREADABLE),
    ],
)
def test_the_shape_is_what_the_members_declare(made: Any, verdict: Verdict) -> None:
    assert read_shape(members(*made)).verdict is verdict


# The record

uids = st.lists(st.text("abc0-", min_size=1, max_size=4), max_size=3).map(tuple)


@given(
    st.builds(
        Slot,
        role=st.just("format"),
        ordinal=st.integers(0, 1023),
        phase=st.sampled_from(SlotPhase),
        cause=st.sampled_from(Cause),
        since=st.just("2026-01-01T00:00:00Z"),
        member_uids=uids,
        workload_uid=st.text("abc", max_size=3),
        member_hashes=uids,
        current_member_uids=uids,
        current_workload_uid=st.text("abc", max_size=3),
    )
)
def test_a_record_that_was_written_is_read_back(slot: Slot) -> None:
    assert decode(encode({"format": slot}), {"format"}) == {"format": slot}


def test_no_slot_is_no_record() -> None:
    assert encode({}) is None and decode(None, {"server"}) == {}


GOOD: Json = {"ordinal": 0, "phase": "Cleanup", "cause": "outdated"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        json.dumps({"/format": 2, "server": GOOD}),
        json.dumps({"/format": 1, "other": GOOD}),
        json.dumps({"/format": 1, "server": 1}),
        *(
            json.dumps({"/format": 1, "server": {**GOOD, key: wrong}})
            for key, wrong in (
                ("ordinal", -1),
                ("ordinal", True),
                ("phase", "Other"),
                ("cause", "x"),
                ("memberUIDs", "u"),
                ("memberUIDs", [1]),
                ("workloadUID", 3),
            )
        ),
    ],
)
def test_a_record_that_cannot_be_read_says_the_way_out(text: str) -> None:
    with pytest.raises(UnreadableRecord, match="remove the annotation"):
        decode(text, {"server"})
