"""What is refused: by the API server's own rules, or by a condition with everything frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from crdcheck import Admission
from mdep_lab import NAMESPACE, Lab, role
from modelpool_kube import errors
from modelpool_kube.kinds import INSTANCE_TYPES, MODEL_DEPLOYMENTS, Json

CRDS = Path(__file__).parents[3] / "manifests" / "crds"


ADMISSION = Admission(YAML(typ="safe").load(CRDS / "modelpool.dev_modeldeployments.yaml"))


def guard(new: Json, old: Json | None) -> Json:
    """Refuse as the API server does."""
    stored, wrong = ADMISSION.admit(new, old)
    if wrong:
        raise errors.Invalid("; ".join(wrong), code=422, reason="Invalid")
    return stored


def roles(*changes: Json) -> list[Json]:
    """Return two roles, with *changes*."""
    found = [role("one", replicas=2), role("two", replicas=2)]
    for each, change in zip(found, changes, strict=False):
        each.update(change)
    return found


REFUSED: list[tuple[str, list[Json], str]] = [
    ("V1 added", [*roles(), role("three")], '.spec.roles: role "three" was added'),
    ("V1 removed", roles()[:1], '.spec.roles: role "two" was removed'),
    ("V1 renamed", [role("one"), role("other")], 'role "other" was added, or renamed to that'),
    (
        "V1 kind",
        roles({"kind": "Decode"}, {"kind": "Prefill"}),
        '.spec.roles[0].kind: kind "Decode": the kind of role "one" cannot be changed',
    ),
    ("V2", [role("one"), role("one")], "Duplicate"),
    ("V3", [role(f"r{number}") for number in range(11)], "spec.roles"),
    ("V4 size 0", roles({"size": 0}), "spec.roles[0].size"),
    ("V4 size 65", roles({"size": 65}), "spec.roles[0].size"),
    ("V4 replicas", roles({"replicas": 1025}), "spec.roles[0].replicas"),
    ("V5", roles({}, {"kind": "Decode"}), '.spec.roles: role "one": roles of kind Server cannot'),
    ("V7", roles({"name": "x" * 59}), "63 characters; shorten the name of the role"),
    ("V8", roles({"size": 64, "replicas": 1024, "name": "x" * 60}), "fewer replicas"),
    (
        "V10",
        roles({"env": [{"name": "MODELPOOL_REPLICA_SIZE", "value": "1"}]}),
        ".spec.roles[0].env[0].name: MODELPOOL_REPLICA_SIZE is set by the operator",
    ),
    ("V16", roles({"topology": {"requiredLevel": "kubernetes.io/hostname"}}), "wider level"),
    ("V18 elastic", roles({"elasticEp": {}}), "elasticEp is not supported"),
    ("V18 partition", roles({"resources": {"acceleratorPartitionedProfile": "1g"}}), "partitions"),
    ("V18 fabric", roles({"resources": {"interface": "1"}}), "fabric interfaces"),
]


@pytest.mark.parametrize(
    ("wanted", "says"), [each[1:] for each in REFUSED], ids=[each[0] for each in REFUSED]
)
async def test_t65_a_refused_edit_names_its_field_and_changes_no_child(
    wanted: list[Json], says: str
) -> None:
    lab = Lab(*roles(), admit=guard)
    await lab.settle()
    version = lab.cluster.version

    with pytest.raises(errors.Invalid, match=".+") as refused:
        lab.patch(roles=wanted)

    assert says in str(refused.value)
    await lab.look(2)
    assert lab.cluster.version == version


@pytest.mark.parametrize(
    "field", [{"kvCache": {}}, {"kvTransfer": {}}, {"router": {}}, {"engine": {"name": "SGLang"}}]
)
async def test_t65_left_out_features_and_identity_are_refused(field: Json) -> None:
    lab = Lab(*roles(), admit=guard)
    await lab.settle()

    with pytest.raises(errors.Invalid, match="not supported by this operator|cannot be changed"):
        lab.patch(**field)


async def test_v9_a_role_named_like_a_replica_of_another_is_refused() -> None:
    lab = Lab(*roles(), admit=guard)

    with pytest.raises(errors.Invalid, match="would collide"):
        lab.cluster.put(
            MODEL_DEPLOYMENTS,
            NAMESPACE,
            {
                "metadata": {"name": "other"},
                "spec": {**lab.deployment["spec"], "roles": [role("x"), role("x-r0")]},
            },
        )


# What only a look at other objects can tell: Accepted=False, and nothing moves

FROZEN: list[tuple[str, Json, list[str]]] = [
    (
        "V11",
        {"extraArgs": ["--served-model-name=mine"]},
        ['spec.roles[0].extraArgs "--served-model-name=mine"', "spec.model.name", "command"],
    ),
    (
        "V12",
        {"extraArgs": ["--port", "9000"], "ports": [{"containerPort": 8080}]},
        ["spec.roles[0].extraArgs --port 9000", "containerPort 8080", "make them equal"],
    ),
    (
        "V12 takeover",
        {"command": ["run", "--port=9000"], "ports": [{"containerPort": 8080}]},
        ["spec.roles[0].command --port 9000"],
    ),
    (
        "V13 slice",
        {"instanceType": "plain", "resources": {"acceleratorSlicedMemoryPercentage": 50}},
        ["acceleratorSlicedMemoryPercentage 50", 'InstanceType "plain"', "offers no slices"],
    ),
    (
        "V13 cores alone",
        {"resources": {"acceleratorSlicedCoresPercentage": 50}},
        ["acceleratorSlicedCoresPercentage 50", "memory first"],
    ),
    (
        "V13 both",
        {"resources": {"accelerator": 1, "acceleratorSlicedMemoryPercentage": 50}},
        ["exclude one another"],
    ),
    (
        "V13 cards",
        {"instanceType": "plain", "resources": {"accelerator": 1}},
        ["accelerator 1", "has no cards"],
    ),
    (
        "V13 capacity",
        {"instanceType": "small", "resources": {"accelerator": 2}, "size": 2},
        ["wants 4 cards", 'InstanceType "small" has 3 in all'],
    ),
    (
        "V13 capacity by size alone",
        {"size": 4},
        ["spec.roles[0].resources.accelerator 1", "a replica of 4 members wants 4 cards"],
    ),
    (
        "V17 degree",
        {"extraArgs": ["--tensor-parallel-size", "auto"]},
        ['spec.roles[0].extraArgs --tensor-parallel-size "auto"', "role one", "command"],
    ),
    (
        "V17 width",
        {"extraArgs": ["-tp=4"], "resources": {"accelerator": 2}},
        ["role one needs 4 cards and has accelerator 2", "resources.accelerator", "command"],
    ),
    ("V14", {"resources": {"accelerator": 0}}, ["accelerator 0", "role two uses it too"]),
]


def more_types(lab: Lab) -> None:
    """Add a type without cards and a small one."""
    small = {"queueName": "queue-a", "accelerator": {"card": "x/y"}, "capacity": {"cards": 3}}
    for name, spec in (("plain", {"queueName": "queue-a"}), ("small", small)):
        lab.cluster.put(INSTANCE_TYPES, None, {"metadata": {"name": name}, "spec": spec})


@pytest.mark.parametrize(
    ("edit", "says"), [each[1:] for each in FROZEN], ids=[each[0] for each in FROZEN]
)
async def test_an_edit_that_only_we_can_refuse_freezes_everything(
    edit: dict[str, Any], says: list[str]
) -> None:
    lab = Lab(*roles())
    lab.edit_type("a", capacity={"cards": 3})
    more_types(lab)
    await lab.settle()
    kept = [*lab.uids(name="one"), *lab.uids(name="two")]

    lab.edit("one", **edit)
    await lab.look(3)
    lab.move()
    await lab.quiet()

    assert [*lab.uids(name="one"), *lab.uids(name="two")] == kept
    status, reason, message = lab.condition("Accepted")
    assert (status, reason) == ("False", "Invalid")
    assert all(each in message for each in says), message
    assert lab.status("one")["ready"] == 2


@pytest.mark.parametrize(
    ("edit", "is_accepted"),
    [
        ({"extraArgs": ["-tp", "2"]}, False),
        ({"extraArgs": ["--tensor_parallel_size=2"]}, False),
        ({"extraArgs": ["-tp", "2"], "resources": {"accelerator": 2}}, True),
        ({"extraArgs": ["--tp-size", "2", "--pp-size", "2"], "size": 2}, False),
        ({"extraArgs": ["-tp", "1", "-pp", "$(MODELPOOL_REPLICA_SIZE)"], "size": 2}, True),
        ({"extraArgs": ["-pp", "$(MODELPOOL_REPLICA_SIZE)"], "size": 1}, False),
        ({"extraArgs": ["-tp=$(WIDTH)"], "env": [{"name": "WIDTH", "value": "3"}]}, False),
        ({"extraArgs": ["-tp", "2", "--data-parallel-external-lb"], "size": 2}, False),
        ({"extraArgs": ["-tp", "9", "-tp", "1"]}, True),
        ({"extraArgs": ["-tp"]}, False),
        ({"extraArgs": ["-tp", "2"], "command": ["run"]}, True),
        (
            {"extraArgs": ["-tp", "2"], "resources": {"acceleratorSlicedMemoryPercentage": 50}},
            False,
        ),
        ({"extraArgs": ["-tp", "2"], "instanceType": "plain"}, True),
    ],
)
async def test_v17_a_member_is_not_wider_than_its_cards(edit: Json, is_accepted: bool) -> None:
    lab = Lab(role())
    more_types(lab)
    await lab.settle()

    lab.edit(**edit)
    await lab.look()

    assert lab.condition("Accepted")[0] == str(is_accepted)


async def test_v17_a_rank_of_its_own_in_every_member_is_judged_anew() -> None:
    lab = Lab(role(size=2, extraArgs=["-tp", "2"]))
    await lab.settle()
    kept = lab.uids()
    assert lab.condition("Accepted")[0] == "True"

    lab.edit(extraArgs=["-tp", "2", "--data-parallel-external-lb"])
    await lab.look()

    assert "needs 2 cards and has accelerator 1" in lab.condition("Accepted")[2]
    assert lab.uids() == kept and lab.record is None


async def test_an_edit_is_accepted_again_once_it_is_right() -> None:
    lab = Lab()
    await lab.settle()
    lab.edit(extraArgs=["--served-model-name", "x"])
    await lab.look()

    lab.edit(extraArgs=["--seed", "1"])
    await lab.settle()

    assert lab.condition("Accepted")[:2] == ("True", "Valid")
    assert "--seed" in lab.pods()[0]["spec"]["containers"][0]["args"]


async def test_extra_arguments_beside_a_command_have_no_effect_and_no_quarrel() -> None:
    lab = Lab(role(extraArgs=["--seed", "1"]), engine={"name": "Custom"})
    await lab.settle()

    lab.edit(command=["run"])
    await lab.settle()

    assert lab.condition("Accepted")[0] == "True"
    assert "args" not in lab.pods()[0]["spec"]["containers"][0]


async def test_drift_of_a_type_does_not_bar_an_edit_of_something_else() -> None:
    lab = Lab(role(resources={"accelerator": 2}))
    await lab.settle()
    lab.edit_type("a", capacity={"cards": 1})

    lab.edit(image="engine:2")
    await lab.settle()

    assert lab.condition("Accepted")[0] == "True"
    assert lab.pods()[0]["spec"]["containers"][0]["image"] == "engine:2"


async def test_a_stored_object_that_nobody_understands_is_told_and_not_touched() -> None:
    lab = Lab()
    await lab.settle()
    kept = lab.uids()
    lab.cluster.set_unchecked(
        MODEL_DEPLOYMENTS, NAMESPACE, "chat", {"spec": {"engine": {"name": "Other"}}}
    )

    await lab.look(2)

    assert lab.uids() == kept
    assert [note.reason for note in lab.told if note.is_warning] == ["RenderFailed"]


@pytest.mark.parametrize(("replicas", "is_refused"), [(0, False), (10, False), (11, True)])
def test_v8_the_name_of_the_last_member_may_just_fit(replicas: int, is_refused: bool) -> None:
    wide = role("x" * 52, size=2, replicas=replicas)
    spec = {"model": {"name": "m"}, "engine": {"name": "vLLM"}, "roles": [wide]}

    _, wrong = ADMISSION.admit({"metadata": {"name": "chat"}, "spec": spec})

    assert len(f"chat-{'x' * 52}-r9-m1") == 63
    assert bool(wrong) == is_refused
