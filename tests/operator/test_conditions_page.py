"""docs/conditions.md and the code say the same; what worlds of operators write is held to it."""

from __future__ import annotations

import ast
from enum import StrEnum
from functools import cache
from pathlib import Path

import pytest
import yaml

import conditionspage
from memcluster import Write
from modelpool_api.names import ConditionType, EventReason, Reason
from modelpool_api.v1alpha1.inferenceservice import ServicePhase
from modelpool_api.v1alpha1.modeldeployment import DeploymentPhase
from modelpool_api.v1alpha1.modelpool import PoolMemberPhase, PoolPhase
from modelpool_api.v1alpha1.modelrouter import RouterPhase
from modelpool_kube.kinds import EVENTS, INFERENCE_SERVICES, MODEL_POOLS, Json
from modelpool_operator.plan.modeldeployment.slot import SlotPhase

ROOT = Path(__file__).parents[2]
PLAN = ROOT / "operator" / "modelpool_operator" / "plan"
SPOKEN_IN: dict[str, tuple[Path, ...]] = {
    "ModelPool": (
        *(PLAN / f"{name}.py" for name in ("poolstatus", "slotsteps", "verdict")),
        ROOT / "router" / "modelpool_router" / "cli" / "cluster.py",
    ),
    "InferenceService": (PLAN / "inferenceservice.py",),
    "ModelRouter": (PLAN / "modelrouter.py",),
    "ModelDeployment": (
        *sorted((PLAN / "modeldeployment").glob("*.py")),
        PLAN.parent / "engine" / "modeldeployment.py",
    ),
}
"""Where what is said of a kind is decided."""
PHASES: dict[str, dict[str, type[StrEnum]]] = {
    "ModelPool": {"Phases": PoolPhase, "Phases of a member": PoolMemberPhase},
    "InferenceService": {"Phases": ServicePhase},
    "ModelRouter": {"Phases": RouterPhase},
    "ModelDeployment": {"Phases": DeploymentPhase, "Phases of a replacement": SlotPhase},
}
RENAMED = {"LoadFailed"}
"""Of a pool told as SwapFailed."""
UNTOLD = {"Forbidden"}
"""Whoever may not write a status may not be able to write an Event either."""
every_kind = pytest.mark.parametrize("kind", SPOKEN_IN)


@cache
def said(kind: str) -> dict[str, set[str]]:
    """Return the members of each enumeration of words that the code of *kind* uses."""
    found: dict[str, set[str]] = {}
    for path in SPOKEN_IN[kind]:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                found.setdefault(node.value.id, set()).add(node.attr)
    return found


def words(kind: str, of: type[StrEnum]) -> set[str]:
    """Return the words of *of* that the code of *kind* uses."""
    return {of[name].value for name in said(kind).get(of.__name__, set()) & set(of.__members__)}


@every_kind
def test_the_page_has_the_conditions_and_reasons_of_the_code(kind: str) -> None:
    on_page = conditionspage.kinds()[kind]

    assert set(on_page.conditions) == words(kind, ConditionType)
    assert on_page.reasons == words(kind, Reason)


@every_kind
def test_the_page_has_the_events_of_the_code(kind: str) -> None:
    on_page = conditionspage.kinds()[kind]
    bad = {reason for status, reason in on_page.conditions["Stalled"] if status == "True"}
    good = {"InferenceService": {"Ready", "Stopped"}, "ModelRouter": {"Ready"}}
    told = {
        "ModelPool": bad - RENAMED - UNTOLD,
        "ModelDeployment": set[str](),
    }.get(kind, bad | good.get(kind, set()))

    assert set(on_page.events) == words(kind, EventReason) | told
    assert {each for each in told if on_page.events[each] == "Normal"} == good.get(kind, set())


@pytest.mark.parametrize("of", [ConditionType, Reason, EventReason])
def test_every_word_is_said_by_somebody(of: type[StrEnum]) -> None:
    spoken = {word for kind in SPOKEN_IN for word in words(kind, of)}

    assert {each.value for each in of} == spoken


@every_kind
def test_the_page_has_the_phases_of_the_code(kind: str) -> None:
    for heading, phases in PHASES[kind].items():
        on_page = conditionspage.kinds()[kind].phases[heading]

        assert sorted(on_page) == sorted(each.value for each in phases)
    assert set(conditionspage.kinds()[kind].phases) == set(PHASES[kind])


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "manifests" / "crds").glob("modelpool.dev_*.yaml")),
    ids=lambda path: path.stem,
)
def test_the_page_has_the_columns_of_the_crd(path: Path) -> None:
    crd: Json = yaml.safe_load(path.read_text("utf-8"))
    columns = [
        (
            each["name"],
            "" if each["name"] == "Age" else each["jsonPath"].removeprefix("."),
            bool(each.get("priority")),
        )
        for each in crd["spec"]["versions"][0]["additionalPrinterColumns"]
    ]

    assert conditionspage.kinds()[crd["spec"]["names"]["kind"]].columns == columns


def status_of(kind: str, status: str, reason: str) -> Json:
    return {"status": {"conditions": [{"type": kind, "status": status, "reason": reason}]}}


def test_given_a_condition_that_is_not_on_the_page_then_writing_it_is_noticed() -> None:
    def write(after: Json) -> Write:
        return Write(1, "operator", "status", MODEL_POOLS, "lab", "gpu0", None, after)

    conditionspage.check_write(write(status_of("Ready", "True", "SlotServed")))
    conditionspage.check_write(write(status_of("Ready", "False", "NodeLost")))
    for kind, status, reason in (
        ("Ready", "False", "SlotServed"),
        ("SlotAllocated", "True", "Cold"),
        ("Available", "True", "Available"),
    ):
        with pytest.raises(AssertionError, match=f"{kind}={status} with {reason}"):
            conditionspage.check_write(write(status_of(kind, status, reason)))


def test_given_an_event_that_is_not_on_the_page_then_writing_it_is_noticed() -> None:
    def write(reason: str, how: str) -> Write:
        regarding = {"kind": INFERENCE_SERVICES.kind}
        after = {"reason": reason, "type": how, "regarding": regarding}
        return Write(1, "operator", "create", EVENTS, "lab", "e", None, after)

    conditionspage.check_write(write("LoadFailed", "Warning"))
    for reason, how in (("LoadFailed", "Normal"), ("SwapStarted", "Normal")):
        with pytest.raises(AssertionError, match=f"Event {reason}"):
            conditionspage.check_write(write(reason, how))
