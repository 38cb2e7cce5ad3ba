"""Any pool in any state: what the plan must never want, and what it says must be sound."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from hypothesis import event, given, settings
from hypothesis import strategies as st

from crdcheck import Admission
from memcontrollers import deployment
from modelpool_api.names import FINALIZER, RECORD_ANNOTATION, SLOT_ANNOTATION
from modelpool_api.v1alpha1.modelpool import ModelPool, ModelPoolStatus
from modelpool_kube.kinds import DEPLOYMENTS, Json
from modelpool_kube.slotrules import Gone, prove_gone
from modelpool_operator.plan.model import (
    Action,
    Idle,
    Load,
    Patch,
    ProbeIdle,
    Settle,
    TakeSlot,
    Unload,
    Unmark,
)
from modelpool_operator.plan.modelpool import plan
from modelpool_operator.plan.observedpool import LeaseSeen, Namespace, ObservedPool, SessionSeen
from modelpool_operator.plan.slotsteps import FREE_S
from modelpool_operator.plan.verdict import judge_members

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
NAMES = ("a", "b", "c")
CRD = yaml.safe_load(
    (Path(__file__).parents[3] / "manifests/crds/modelpool.dev_modelpools.yaml").read_text("utf-8")
)
MOVES = (TakeSlot, Unload, Load, Settle, Unmark)


def member(
    name: str, *, wants: int, pod: str, mark: str | None, observed: bool
) -> tuple[Json, list[Json], list[Json]]:
    """Return a Deployment, its ReplicaSets and its Pods."""
    obj = deployment(name, replicas=wants)
    meta = {
        "name": name,
        "namespace": "lab",
        "uid": f"d-{name}",
        "generation": 2,
        "resourceVersion": "5",
    }
    notes = {} if mark is None else {SLOT_ANNOTATION: mark}
    obj["metadata"] = {**meta, "annotations": notes}
    obj["status"] = {"observedGeneration": 2 if observed else 1}
    if pod == "none" and wants == 0 and observed:
        return obj, [], []
    owned = [{"kind": "Deployment", "name": name, "uid": f"d-{name}", "controller": True}]
    replica_set: Json = {
        "metadata": {
            "name": f"{name}-1",
            "namespace": "lab",
            "uid": f"r-{name}",
            "generation": 1,
            "ownerReferences": owned,
        },
        "spec": {"replicas": wants},
        "status": {"observedGeneration": 1},
    }
    if pod == "none":
        return obj, [replica_set], []
    body: Json = {
        "metadata": {
            "name": f"{name}-1-x",
            "namespace": "lab",
            "uid": f"p-{name}",
            "labels": {"app": name},
            "ownerReferences": [
                {"kind": "ReplicaSet", "name": f"{name}-1", "uid": f"r-{name}", "controller": True}
            ],
        },
        "spec": {"nodeName": "n", "containers": [{"name": "c", "ports": [{"containerPort": 1}]}]},
        "status": {"phase": "Pending"},
    }
    if pod in ("running", "ready", "going"):
        body["status"] = {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "containerStatuses": [{"state": {"running": {}}}],
            "conditions": [{"type": "Ready", "status": "True" if pod == "ready" else "False"}],
        }
    if pod == "failing":
        waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
        body["status"]["containerStatuses"] = [{"state": waiting}]
    if pod == "going":
        body["metadata"]["deletionTimestamp"] = "2026-01-01T11:00:00Z"
    return obj, [replica_set], [body]


marks = st.sampled_from(
    [None, *(f"lab/modelpool-gpu0:{epoch}" for epoch in (1, 2, 3)), "lab/modelpool-other:9"]
)
members = st.fixed_dictionaries(
    {
        "wants": st.sampled_from([0, 0, 1]),
        "pod": st.sampled_from(["none", "none", "pending", "running", "ready", "going", "failing"]),
        "mark": st.one_of(marks, st.just("lab/modelpool-gpu0:2"), st.just("lab/modelpool-gpu0:2")),
        "observed": st.sampled_from([True, True, False]),
    }
)
records = st.one_of(
    st.none(),
    st.just("{"),
    st.fixed_dictionaries(
        {
            "format": st.just(1),
            "epoch": st.just(2),
            "phase": st.sampled_from(
                ["cold", "draining", "unloading", "loading", "resident", "released"]
            ),
            "owner": st.sampled_from([None, *NAMES, "former"]),
            "target": st.sampled_from([None, *NAMES, "former"]),
            "reason": st.sampled_from(["", "PodsBusy: x", "something"]),
            "operatorEpoch": st.sampled_from([1, 2]),
        }
    ).map(json.dumps),
)
statuses = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {
            "phase": st.sampled_from(["Ready", "Swapping", "Pending"]),
            "residentMember": st.sampled_from(NAMES),
        }
    ),
)


@st.composite
def pools(draw: st.DrawFn) -> ObservedPool:
    """Return any pool in any state."""
    listed = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True))
    there = draw(st.lists(st.sampled_from(NAMES), min_size=2, max_size=3, unique=True))
    has_probe = draw(st.booleans())
    profile = {"profile": "llama-server"} if has_probe else {}
    spec: Json = {"members": [{"deploymentRef": {"name": n}, **profile} for n in listed]}
    default = draw(st.sampled_from([None, *listed]))
    if default is not None:
        spec["default"] = default
    obj: Json = {
        "apiVersion": "modelpool.dev/v1alpha1",
        "kind": "ModelPool",
        "metadata": {
            "name": "gpu0",
            "namespace": "lab",
            "uid": "pool-1",
            "resourceVersion": "9",
            "generation": 3,
            "finalizers": [FINALIZER],
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": spec,
    }
    status = draw(statuses)
    if status is not None:
        obj["status"] = status
    made = {}
    for name in there:
        how: dict[str, Any] = draw(members)
        made[name] = member(name, **how)
    around = Namespace(
        {DEPLOYMENTS: tuple(found[0] for found in made.values())},
        tuple(each for found in made.values() for each in found[1]),
        tuple(each for found in made.values() for each in found[2]),
    )
    pool = ModelPool.model_validate(obj)
    held, removed = around.observed(pool)
    text = draw(records)
    holder = draw(st.sampled_from(["", "", "router-0", "operator-0"]))
    free_for = draw(st.sampled_from([None, 10.0, 100.0])) if holder == "router-0" else 100.0
    if holder == "":
        free_for = draw(st.sampled_from([10.0, 100.0, 100.0]))
    lease: Json = {
        "metadata": {
            "name": "modelpool-gpu0",
            "namespace": "lab",
            "uid": "lease-1",
            "annotations": {} if text is None else {RECORD_ANNOTATION: text},
        }
    }
    is_ours = holder == "operator-0"
    session = SessionSeen()
    if is_ours:
        session = SessionSeen(
            is_open=True,
            is_held=True,
            epoch=draw(st.sampled_from([None, 2, 2])),
            age_s=draw(st.sampled_from([1.0, 100.0])),
        )
    seen = ObservedPool(
        pool=pool,
        obj=obj,
        now=NOW,
        lease=LeaseSeen(lease, holder, is_ours, free_for, text),
        members=held,
        removed=removed,
        contested=frozenset(draw(st.sampled_from([(), (), (), (listed[0],)]))),
        session=session,
    )
    answers = draw(st.fixed_dictionaries({name: st.sampled_from(list(Idle)) for name in NAMES}))
    asked = draw(st.lists(st.sampled_from(NAMES), unique=True))
    return replace(seen, idle={name: answers[name] for name in asked})


@settings(max_examples=400, deadline=None)
@given(pools())
def test_given_any_pool_then_the_plan_wants_nothing_dangerous(seen: ObservedPool) -> None:
    wanted = plan(seen)
    action = wanted.actions[0] if wanted.actions else None
    event(type(action).__name__)
    verdict = judge_members(seen)
    is_fenced = seen.session.is_held and seen.session.epoch is not None

    assert plan(seen) == wanted
    if (
        seen.router is not None
        or not verdict.may_move
        or seen.frozen
        or seen.contested & {each.name for each in seen.members}
    ):
        assert not isinstance(action, MOVES)
    assert seen.lease is not None
    if isinstance(action, TakeSlot):
        assert (seen.lease.free_for_s or 0) >= FREE_S
        assert not is_fenced
        assert set(action.members) == set(seen.everybody)
    if isinstance(action, Unload | Load | Settle | Unmark):
        assert is_fenced
    if isinstance(action, Unload):
        each = next(m for m in (*seen.members, *seen.removed) if m.member == action.member)
        if each.running:
            assert action.probe is not None
            assert seen.idle[each.name] is Idle.IDLE
        assert each.wants == 1
        assert action.target is None or seen.named(action.target) is not None
    if isinstance(action, Load):
        assert seen.session.epoch is not None
        for each in seen.members:
            assert each.wants == 0
            if each.member != action.member:
                gone = prove_gone(each.member, each.facts, slot=seen.slot, epoch=seen.session.epoch)
                assert isinstance(gone, Gone)
        assert set(action.others) == set(seen.everybody) - {action.member}
        assert not seen.removed
    if isinstance(action, Unmark):
        assert action.member not in [each.member for each in seen.members]
    if isinstance(action, ProbeIdle):
        assert action.member not in seen.idle


@settings(max_examples=300, deadline=None)
@given(pools())
def test_given_any_pool_then_what_is_said_is_sound_and_said_once(seen: ObservedPool) -> None:
    said = plan(seen)
    assert said.status is not None
    stored = {**seen.obj, "status": said.status}
    again = plan(replace(seen, obj=stored, pool=ModelPool.model_validate(stored)))
    status = ModelPoolStatus.model_validate(said.status)
    conditions = {each.type: each for each in status.conditions}

    assert Admission(CRD).admit(stored)[1] == []
    assert again.events == () or again.status != said.status
    assert set(conditions) == {
        "MembersValid",
        "SlotAllocated",
        "SwapDeferred",
        "MetalSupported",
        "Ready",
        "Stalled",
    }
    assert all(each.observed_generation == 3 for each in conditions.values())
    assert all(each.message for each in conditions.values())
    listed = [each.member_name for each in seen.pool.spec.members]
    assert [each.name for each in status.members][: len(listed)] == listed
    resident = [each.name for each in status.members if each.resident]
    assert resident == ([status.resident_member] if status.resident_member else [])
    assert status.resident_member is None or status.resident_member != status.pending_member
    allocated = conditions["SlotAllocated"]
    assert (allocated.status == "True") == (status.resident_member is not None)
    if status.resident_member is not None:
        found = next(each for each in status.members if each.resident)
        assert found.phase in ("Ready", "Unsafe")
    if status.phase == "Degraded":
        assert conditions["Ready"].status == "False"
        assert conditions["Stalled"].status == "True"


@settings(max_examples=200, deadline=None)
@given(pools())
def test_given_a_settled_status_then_it_is_not_written_again(seen: ObservedPool) -> None:
    first = plan(seen).status
    stored = {**seen.obj, "status": first}
    second = plan(replace(seen, obj=stored, pool=ModelPool.model_validate(stored))).status
    stored = {**seen.obj, "status": second}

    third = plan(replace(seen, obj=stored, pool=ModelPool.model_validate(stored))).status

    assert third == second


def test_given_nothing_of_the_pool_but_the_object_then_first_things_come_first() -> None:
    meta: dict[str, Any] = {"name": "gpu0", "namespace": "lab", "uid": "u", "resourceVersion": "1"}
    spec = {"members": [{"deploymentRef": {"name": "a"}}]}
    obj = {"metadata": meta, "spec": spec}
    seen = ObservedPool(ModelPool.model_validate(obj), obj, NOW, None, ())

    first = plan(seen)

    assert first.status is None
    (action,) = first.actions
    assert isinstance(action, Patch)
    assert action.patch == {"metadata": {"finalizers": [FINALIZER]}}


def test_given_an_epoch_that_is_not_on_every_member_yet_then_nothing_is_loaded() -> None:
    """Both are at 0 with no Pod; but a deposed holder may still scale the one without our mark."""
    meta: dict[str, Any] = {"name": "gpu0", "namespace": "lab", "uid": "u", "resourceVersion": "1"}
    spec = {"members": [{"deploymentRef": {"name": n}} for n in ("a", "b")], "default": "a"}
    obj = {"metadata": {**meta, "finalizers": [FINALIZER]}, "spec": spec}
    pool = ModelPool.model_validate(obj)

    def wanted(mark: str) -> tuple[Action, ...]:
        made = {
            name: member(name, wants=0, pod="none", mark=f"lab/modelpool-gpu0:{at}", observed=True)
            for name, at in (("a", "2"), ("b", mark))
        }
        around = Namespace({DEPLOYMENTS: tuple(found[0] for found in made.values())}, (), ())
        held, removed = around.observed(pool)
        record = json.dumps({"format": 1, "epoch": 2, "phase": "cold"})
        lease = LeaseSeen({"metadata": {}}, "operator-0", True, 100.0, record)
        session = SessionSeen(is_open=True, is_held=True, epoch=2)
        seen = ObservedPool(pool, obj, NOW, lease, held, removed, session=session)
        return plan(seen).actions

    assert wanted("1") == ()
    (action,) = wanted("2")
    assert isinstance(action, Load)


def test_given_a_load_that_landed_when_its_pod_is_seen_ready_later_then_the_swap_goes_on() -> None:
    """Who is to hold the slot is named until that member holds it; one that was lost is not."""
    meta: dict[str, Any] = {"name": "gpu0", "namespace": "lab", "uid": "u", "resourceVersion": "1"}
    spec = {"members": [{"deploymentRef": {"name": n}} for n in ("a", "b")]}

    def said(status: Json, pod: str) -> tuple[str | None, str | None, str]:
        obj = {"metadata": {**meta, "finalizers": [FINALIZER]}, "spec": spec, "status": status}
        pool = ModelPool.model_validate(obj)
        mark = "lab/modelpool-gpu0:2"
        a = member("a", wants=0, pod="none", mark=mark, observed=True)
        b = member("b", wants=1, pod=pod, mark=mark, observed=True)
        around = Namespace({DEPLOYMENTS: (a[0], b[0])}, tuple(b[1]), tuple(b[2]))
        held, removed = around.observed(pool)
        record = json.dumps({"format": 1, "epoch": 2, "phase": "resident", "owner": "b"})
        lease = LeaseSeen({"metadata": {}}, "router-1", False, None, record)
        made = ModelPoolStatus.model_validate(
            plan(ObservedPool(pool, obj, NOW, lease, held, removed)).status
        )
        (allocated,) = (each for each in made.conditions if each.type == "SlotAllocated")
        return made.resident_member, made.pending_member, allocated.reason

    swapping = {"phase": "Swapping", "pendingMember": "b"}
    assert said(swapping, "running") == (None, "b", "Swapping")
    assert said(swapping, "ready") == ("b", None, "Resident")
    assert said({"phase": "Ready", "residentMember": "b"}, "running") == (None, None, "Cold")
