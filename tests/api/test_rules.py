"""
Every CEL rule of every CRD, with an example that passes and one that does not.

The examples go through `crdcheck.Admission`, which defaults and bounds as the API server does, so
an example that fails for another reason than its rule is noticed.
"""

from __future__ import annotations

import json
import re

import pytest

from apiexamples import BASES, DEPLOYMENT, DURATIONS, EXAMPLES, ROLE, Bad, Change, Json, put
from crdcheck import Admission, rules_of
from modelpool_api import schema
from modelpool_api.meta import duration_text, seconds

ADMISSIONS = {r.kind: Admission(schema.crd(r)) for r in schema.RESOURCES}
ROOTS = {
    r.kind: schema.crd(r)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for r in schema.RESOURCES
}


def result(kind: str, *changes: Change, name: str = "thing", old: Json | None = None) -> list[str]:
    """Return the errors for the base of *kind* after *changes*; *old* makes it an update."""
    spec = json.loads(json.dumps(BASES[kind]))  # nothing shared between two roles
    for change in changes:
        change(spec)
    admission = ADMISSIONS[kind]
    before = None
    if old is not None:
        before, errors = admission.admit({"metadata": {"name": name}, "spec": old})
        assert errors == []
    _, errors = admission.admit({"metadata": {"name": name}, "spec": spec}, before)
    return errors


@pytest.mark.parametrize("kind", BASES)
def test_the_passing_example_passes_when_created_and_when_written_again(kind: str) -> None:
    assert result(kind) == []
    assert result(kind, old=BASES[kind]) == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: f"{e.kind}{e.where}-{e.rule[:24]}")
def test_a_broken_rule_names_field_value_and_way_out(example: Bad) -> None:
    old = BASES[example.kind] if example.update else None

    errors = result(example.kind, *example.changes, name=example.name, old=old)

    at, _, message = errors[0].partition(": ")
    assert at == example.at
    for part in example.says:
        assert part in message
    # The same rule may be broken in a second place, another one may not.
    assert all(example.says[0] in each for each in errors)


@pytest.mark.parametrize(
    ("kind", "path", "most"),
    [(kind, path, most) for kind, paths in DURATIONS.items() for path, most in paths.items()],
)
def test_durations_are_neither_negative_nor_absurd(kind: str, path: str, most: str) -> None:
    assert result(kind, put(path, most)) == []
    for value in ("-5s", "1d", "soon", "5", "1.5h", ""):
        (error,) = result(kind, put(path, value))
        assert error.startswith(f".spec{path}: ")
        assert f'"{value}" is not a duration; write it like 300s' in error
    (error,) = result(kind, put(path, "99999h"))
    assert '"99999h" is out of bounds; use' in error
    assert most in error
    assert error.startswith(f".spec{path}: ")


DURATION_BOUNDS = [
    (kind, where.replace("[]", "[0]").removeprefix(".spec"), *match.groups())
    for kind, root in ROOTS.items()
    for where, rule in rules_of(root)
    if (match := re.fullmatch("must be from (.+) to (.+)", rule["message"]))
]


def test_given_the_bounds_of_durations_then_all_are_tried() -> None:
    found = {
        kind: {path: most for k, path, _, most in DURATION_BOUNDS if k == kind}
        for kind in DURATIONS
    }

    assert found == DURATIONS


@pytest.mark.parametrize(("kind", "path", "least", "most"), DURATION_BOUNDS)
def test_given_a_duration_at_a_bound_then_it_is_taken_and_just_beyond_it_is_not(
    kind: str, path: str, least: str, most: str
) -> None:
    for value in (least, most):
        assert result(kind, put(path, value)) == []
    beyond = [f"{most}1ms"]
    if seconds(least) > 0:
        beyond.append(duration_text(seconds(least) - 0.001))
    for value in beyond:
        (error,) = result(kind, put(path, value))
        assert f'"{value}" is out of bounds; use {least} to {most}' in error


@pytest.mark.parametrize(
    ("kind", "most"),
    [("ModelPool", 53), ("InferenceService", 63), ("ModelRouter", 63)],
)
def test_given_a_name_of_the_longest_length_then_it_is_taken_and_one_more_is_not(
    kind: str, most: int
) -> None:
    assert result(kind, name="a" * most) == []
    (error,) = result(kind, name="a" * (most + 1))
    assert str(most) in error


def test_given_names_of_a_deployment_at_their_limits_then_one_more_is_refused() -> None:
    # "server" is the longest role: <name>-server is the Service, <name>-server-r0-m1 a member.
    single = (put(".roles[0].size", 1), put(".roles[1].size", 1))

    assert result("ModelDeployment", *single, name="a" * (63 - len("-server"))) == []
    (service,) = result("ModelDeployment", *single, name="a" * (63 - len("-server") + 1))
    assert 'the Service of role "server"' in service
    assert result("ModelDeployment", name="a" * (63 - len("-server-r0-m1"))) == []
    (member,) = result("ModelDeployment", name="a" * (63 - len("-server-r0-m1") + 1))
    assert 'members of role "server"' in member


def test_linger_may_be_automatic_and_the_way_out_says_so() -> None:
    assert result("ModelPool", put(".linger", "auto")) == []
    (error,) = result("ModelPool", put(".linger", "automatic"))
    assert "or auto" in error


def test_every_rule_has_an_example_that_passes_and_one_that_does_not() -> None:
    def shape(path: str) -> str:
        return path.replace("[0]", "[]")

    seen = {(e.kind, e.where, e.rule) for e in EXAMPLES}
    durations = {
        (kind, f".spec{shape(path)}") for kind, paths in DURATIONS.items() for path in paths
    }
    missing = []
    for kind, root in ROOTS.items():
        for where, rule in rules_of(root):
            covered = any(
                k == kind and w == where and part in rule["message"] for k, w, part in seen
            )
            if not covered and (kind, where) not in durations:
                missing.append(f"{kind}{where}: {rule['message']}")

    assert missing == []


def test_every_example_is_of_a_rule_that_exists() -> None:
    for example in EXAMPLES:
        rules = [rule for where, rule in rules_of(ROOTS[example.kind]) if where == example.where]
        assert [r for r in rules if example.rule in r["message"]]


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("ModelPool", put(".members", []), ".spec.members: 0 items"),
        ("ModelPool", put(".members", None), ".spec.members: Required value"),
        ("ModelPool", put(".swapPolicy", "priority"), "Unsupported value"),
        ("ModelPool", put(".members[0].port", 70_000), "1..65535"),
        ("InferenceService", put(".image", None), ".spec.image: Required value"),
        ("InferenceService", put(".accelerator", "tpu"), "Unsupported value"),
        ("ModelRouter", put(".pools", [{"name": "a"}, {"name": "a"}]), "Duplicate value"),
        ("ModelDeployment", put(".roles[1].name", "server"), "Duplicate value"),
        ("ModelDeployment", put(".roles", [ROLE] * 11), "11 items"),
        ("ModelDeployment", put(".roles[0].size", 0), "1..64"),
        ("ModelDeployment", put(".roles[0].size", 65), "1..64"),
        ("ModelDeployment", put(".roles[0].replicas", 1025), "0..1024"),
        ("ModelDeployment", put(".roles[0].instanceType", None), "Required value"),
        ("ModelDeployment", put(".roles[0].image", None), "Required value"),
        ("ModelDeployment", put(".roles[0].terminationGracePeriodSeconds", 5), "15..3600"),
        ("InstanceType", put(".queueName", None), "Required value"),
    ],
)
def test_bounds(kind: str, change: Change, says: str) -> None:
    errors = result(kind, change)

    assert any(says in error for error in errors)


def test_reordering_roles_is_no_change_of_identity() -> None:
    def turned(spec: Json) -> None:
        spec["roles"].reverse()

    assert result("ModelDeployment", turned, old=DEPLOYMENT) == []


def test_the_four_fields_and_the_replicas_may_be_edited() -> None:
    changes = (
        put(".roles[0].size", 4),
        put(".roles[0].replicas", 3),
        put(".roles[0].resources.accelerator", 2),
        put(".roles[0].instanceType", "h100"),
        put(".roles[0].command", ["serve"]),
        put(".suspend", True),
    )

    assert result("ModelDeployment", *changes, old=DEPLOYMENT) == []
