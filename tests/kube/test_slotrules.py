"""Proven gone and ready evidence: each thing that can be missing, and the order of looking."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from memcluster import MemCluster
from memcontrollers import World, deployment, runs, statefulset
from modelpool_api.names import (
    REPLACEMENTS_ANNOTATION,
    ROUTING_LABEL,
    SLOT_ANNOTATION,
    SLOT_APPLIED_ANNOTATION,
    group_name,
    group_prefix,
)
from modelpool_kube.kinds import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    MODEL_DEPLOYMENTS,
    PODS,
    REPLICASETS,
    STATEFULSETS,
    WORKLOADS,
    Json,
    Kind,
)
from modelpool_kube.record import SlotId
from modelpool_kube.slotrules import (
    Facts,
    ForeignChanges,
    Gone,
    Look,
    Member,
    NeedLook,
    NotReady,
    NotYet,
    Probe,
    Ready,
    Remembered,
    Standing,
    is_autoscaled,
    is_pod_gone,
    prove_gone,
    ready_evidence,
    remember,
    scale_patch,
    standing,
    unsafe,
    wants,
)

SLOT = SlotId("lab", "modelpool-gpu0")
EPOCH = 7
DEPLOYED = Member("coder", DEPLOYMENTS, "lab", "coder")
STATEFUL = Member("coder", STATEFULSETS, "lab", "coder")
SERVED = Member("coder", INFERENCE_SERVICES, "lab", "coder")
ROLES = Member("coder", MODEL_DEPLOYMENTS, "lab", "coder")
MARKED = {SLOT_ANNOTATION: SLOT.value(EPOCH)}
Change = Callable[[Facts], None]


def obj(kind: Kind, name: str, uid: str, **rest: Any) -> Json:
    """Return an object at generation 3, observed."""
    meta = {"name": name, "namespace": "lab", "uid": uid, "generation": 3, **rest.pop("meta", {})}
    body: Json = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": meta}
    return {**body, "status": {"observedGeneration": 3}, **rest}


def controlled(by: Json) -> list[Json]:
    """Return owner references to *by*."""
    meta = by["metadata"]
    return [{"kind": by["kind"], "name": meta["name"], "uid": meta["uid"], "controller": True}]


def pod(name: str, owner: Json | None, phase: str = "Running", **rest: Any) -> Json:
    """Return a Pod with one running container."""
    return obj(
        PODS,
        name,
        f"uid-{name}",
        meta={
            "labels": {"app": "coder"},
            "ownerReferences": controlled(owner) if owner else [],
            **rest.pop("meta", {}),
        },
        spec={"nodeName": "n1"},
        status={
            "phase": phase,
            "podIP": "10.0.0.1",
            "containerStatuses": [{"name": "main", "state": {"running": {}}}],
            **rest.pop("status", {}),
        },
        **rest,
    )


def below(owner: Json, replicas: int) -> Json:
    """Return a ReplicaSet of *owner*."""
    return obj(
        REPLICASETS,
        "coder-1",
        "uid-rs",
        meta={"labels": {"app": "coder"}, "ownerReferences": controlled(owner)},
        spec={"replicas": replicas},
    )


SELECTOR = {"matchLabels": {"app": "coder"}}


def deployed(replicas: int) -> Json:
    """Return a marked Deployment."""
    return obj(
        DEPLOYMENTS,
        "coder",
        "uid-d",
        meta={"annotations": dict(MARKED)},
        spec={"replicas": replicas, "selector": SELECTOR},
    )


def everything(member: Member, replicas: int = 0) -> Facts:
    """Return facts of *member* in which nothing is missing, with no Pods."""
    looked = (Look.MEMBER, Look.OWNER, Look.REPLICA_SETS, Look.PODS, Look.WORKLOADS)
    main = deployed(replicas)
    if member.kind == DEPLOYMENTS:
        return Facts(looked, member=main, replica_sets=(below(main, replicas),))
    if member.kind == STATEFULSETS:
        return Facts(looked, member={**main, "kind": "StatefulSet"})
    if member.kind == INFERENCE_SERVICES:
        service = obj(
            INFERENCE_SERVICES,
            "coder",
            "uid-s",
            meta={"annotations": dict(MARKED)},
            spec={"replicas": replicas},
        )
        main["metadata"]["ownerReferences"] = controlled(service)
        return Facts(looked, member=service, owner=main, replica_sets=(below(main, replicas),))
    annotations = {**MARKED, SLOT_APPLIED_ANNOTATION: f"{SLOT.value(EPOCH)}={replicas}"}
    roles = [{"name": "server", "desired": 1, "ready": replicas}]
    return Facts(
        looked,
        member=obj(
            MODEL_DEPLOYMENTS,
            "coder",
            "uid-m",
            meta={"annotations": annotations},
            spec={"suspend": replicas == 0},
            status={"observedGeneration": 3, "roles": roles},
        ),
    )


def judged(member: Member, facts: Facts, remembered: Remembered | None = None) -> str:
    """Return the verdict in one word."""
    found = prove_gone(member, facts, slot=SLOT, epoch=EPOCH, remembered=remembered)
    match found:
        case Gone():
            return "Gone"
        case NotYet(reason=reason, detail=detail):
            assert detail
            return reason
        case NeedLook(look=look):
            return f"look at {look.value}"


def put(path: str, value: Any) -> Change:
    """Return a change: set ``owner.spec.replicas`` and the like; numbers are places in lists."""

    def change(facts: Facts) -> None:
        first, *steps = path.split(".")
        at: Any = getattr(facts, first)
        for step in steps[:-1]:
            at = at[int(step) if step.isdigit() else step]
        if value is None:
            del at[steps[-1]]
        else:
            at[steps[-1]] = value

    return change


@pytest.mark.parametrize("member", [DEPLOYED, STATEFUL, SERVED, ROLES], ids=str)
def test_with_everything_there_it_is_gone(member: Member) -> None:
    assert judged(member, everything(member)) == "Gone"


OTHER = {SLOT_ANNOTATION: SlotId("lab", "modelpool-b").value(EPOCH)}
AHEAD, BEHIND = {SLOT_ANNOTATION: SLOT.value(8)}, {SLOT_ANNOTATION: SLOT.value(6)}


@pytest.mark.parametrize(
    ("member", "change", "reason"),
    [
        (DEPLOYED, put("member.metadata.annotations", {}), "NotFenced"),
        (DEPLOYED, put("member.metadata.annotations", AHEAD), "NotFenced"),
        (DEPLOYED, put("member.metadata.annotations", BEHIND), "NotFenced"),
        (DEPLOYED, put("member.metadata.annotations", OTHER), "MemberShared"),
        (DEPLOYED, put("member.spec.replicas", 1), "NotScaledDown"),
        (DEPLOYED, put("member.spec.replicas", None), "NotScaledDown"),
        (DEPLOYED, put("member.status.observedGeneration", 2), "NotObserved"),
        (DEPLOYED, put("member.status", {}), "NotObserved"),
        (DEPLOYED, put("replica_sets.0.spec.replicas", 1), "ReplicaSetNotZero"),
        (DEPLOYED, put("replica_sets.0.spec", {}), "ReplicaSetNotZero"),
        (DEPLOYED, put("replica_sets.0.status.observedGeneration", 2), "ReplicaSetNotObserved"),
        (STATEFUL, put("member.metadata.annotations", {}), "NotFenced"),
        (STATEFUL, put("member.spec.replicas", 1), "NotScaledDown"),
        (STATEFUL, put("member.status.observedGeneration", 2), "NotObserved"),
        (SERVED, put("member.metadata.annotations", {}), "NotFenced"),
        (SERVED, put("member.spec.replicas", 1), "NotScaledDown"),
        (SERVED, put("owner.metadata.annotations", BEHIND), "EpochNotDown"),
        (SERVED, put("owner.spec.replicas", 1), "EpochNotDown"),
        (SERVED, put("owner.metadata.ownerReferences", []), "OwnerForeign"),
        (SERVED, put("owner.status.observedGeneration", 2), "NotObserved"),
        (SERVED, put("replica_sets.0.spec.replicas", 1), "ReplicaSetNotZero"),
        (SERVED, put("replica_sets.0.status.observedGeneration", 2), "ReplicaSetNotObserved"),
        (ROLES, put("member.metadata.annotations", dict(MARKED)), "NotApplied"),
        (
            ROLES,
            put(
                "member.metadata.annotations",
                {**MARKED, SLOT_APPLIED_ANNOTATION: f"{SLOT.value(6)}=0"},
            ),
            "NotApplied",
        ),
        (ROLES, put("member.spec.suspend", False), "NotScaledDown"),
        (ROLES, put("member.status.observedGeneration", 2), "NotApplied"),
    ],
)
def test_each_thing_that_is_missing_is_missed(member: Member, change: Change, reason: str) -> None:
    facts = copy.deepcopy(everything(member))
    change(facts)

    assert judged(member, facts) == reason


def with_pods(member: Member, *pods: Json) -> Facts:
    """Return everything, with Pods."""
    facts = everything(member)
    return Facts(
        facts.looked,
        member=facts.member,
        owner=facts.owner,
        replica_sets=facts.replica_sets,
        pods=pods,
    )


def pod_owner(member: Member) -> Json:
    """Return what the Pods of *member* belong to."""
    facts = everything(member)
    found = facts.replica_sets[0] if facts.replica_sets else facts.member
    assert found is not None
    return found


ENDED = {"terminated": {"exitCode": 0}}
FINISHED = {"phase": "Failed", "containerStatuses": [{"name": "main", "state": ENDED}]}


@pytest.mark.parametrize("member", [DEPLOYED, STATEFUL, SERVED, ROLES], ids=str)
@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        ({"phase": "Running"}, "PodsLeft"),
        ({"phase": "Pending", "containerStatuses": []}, "PodsLeft"),
        ({"phase": "Unknown"}, "PodsLeft"),
        ({"phase": "Failed"}, "PodsLeft"),  # its container still runs
        ({"phase": "Running", "containerStatuses": FINISHED["containerStatuses"]}, "PodsLeft"),
        (FINISHED, "Gone"),
        ({**FINISHED, "phase": "Succeeded"}, "Gone"),
        ({**FINISHED, "initContainerStatuses": [{"state": {"running": {}}}]}, "PodsLeft"),
        ({**FINISHED, "ephemeralContainerStatuses": [{"state": {"running": {}}}]}, "PodsLeft"),
        ({**FINISHED, "initContainerStatuses": [{"state": ENDED}]}, "Gone"),
        ({**FINISHED, "containerStatuses": [{"state": {"waiting": {}}}]}, "PodsLeft"),
        ({"phase": "Failed", "containerStatuses": []}, "Gone"),  # refused before it started
    ],
)
def test_which_pods_are_left(member: Member, status: Json, verdict: str) -> None:
    facts = with_pods(member, pod("p", pod_owner(member), status=status))

    assert judged(member, facts) == verdict


def test_whose_pods_are_counted() -> None:
    stranger = obj(REPLICASETS, "other", "uid-other", spec={"replicas": 1})
    vanished = obj(REPLICASETS, "coder-0", "uid-gone", spec={"replicas": 1})
    mine = pod_owner(DEPLOYED)

    def left(*pods: Json, sets: tuple[Json, ...] = ()) -> str:
        facts = with_pods(DEPLOYED, *pods)
        return judged(
            DEPLOYED,
            Facts(
                facts.looked,
                member=facts.member,
                replica_sets=(*facts.replica_sets, *sets),
                pods=facts.pods,
            ),
        )

    unlabelled = pod("a", mine, meta={"labels": {}})
    assert left(unlabelled) == "PodsLeft"  # owned, though its labels were edited
    assert left(pod("b", None)) == "PodsLeft"  # selected and without owner: will be adopted
    assert left(pod("c", vanished)) == "PodsLeft"  # its ReplicaSet is gone
    assert left(pod("d", stranger), sets=(stranger,)) == "Gone"  # somebody else answers for it
    assert left(pod("e", None, meta={"labels": {"app": "other"}})) == "Gone"
    orphan = obj(
        REPLICASETS, "coder-2", "uid-o", meta={"labels": {"app": "coder"}}, spec={"replicas": 1}
    )
    assert left(sets=(orphan,)) == "ReplicaSetNotZero"  # will be adopted


def test_a_statefulset_made_anew_answers_for_the_pods_of_its_predecessor() -> None:
    old = obj(STATEFULSETS, "coder", "uid-old")
    other = obj(STATEFULSETS, "another", "uid-another")

    assert judged(STATEFUL, with_pods(STATEFUL, pod("coder-0", old))) == "PodsLeft"
    assert judged(STATEFUL, with_pods(STATEFUL, pod("x-0", other))) == "Gone"


def test_a_workload_is_left() -> None:
    def facts(name: str) -> Facts:
        workload = obj(WORKLOADS, name, "uid-w")
        found = everything(ROLES)
        return Facts(found.looked, member=found.member, workloads=(workload,))

    assert judged(ROLES, facts(group_name("lab", "coder", "server", 0))) == "WorkloadsLeft"
    assert judged(ROLES, facts(group_name("lab", "coder2", "server", 0))) == "Gone"
    assert judged(ROLES, facts(group_name("lab2", "coder", "server", 0))) == "Gone"


def test_names_of_groups_are_legal_and_apart() -> None:
    names = {
        group_name(namespace, deployment, role, ordinal)
        for namespace, deployment, role, ordinal in itertools.product(
            ("a", "ab"), ("b", "bb"), ("c", "d"), range(12)
        )
    }

    assert len(names) == 2 * 2 * 2 * 12
    assert all(len(name) <= 63 and name.startswith("mdep-") for name in names)
    assert group_prefix("a", "bb") != group_prefix("ab", "b")


@pytest.mark.parametrize("going", [True, False])
def test_a_pod_is_live_until_it_ended_or_was_removed(going: bool) -> None:
    meta = {"deletionTimestamp": "2026-01-01T00:00:00Z"} if going else {}
    left = with_pods(DEPLOYED, pod("p", pod_owner(DEPLOYED), meta=meta))

    found = prove_gone(DEPLOYED, left, slot=SLOT, epoch=EPOCH)

    assert isinstance(found, NotYet)
    assert ("terminating" in found.detail) is going
    assert judged(DEPLOYED, with_pods(DEPLOYED)) == "Gone"


def test_a_pod_that_a_person_declared_gone() -> None:
    one = pod("p", None)

    assert is_pod_gone(one, frozenset(["uid-p"]))
    assert not is_pod_gone(one, frozenset(["uid-q"]))
    one["metadata"]["uid"] = ""
    assert not is_pod_gone(one, frozenset([""]))


def test_a_member_whose_object_was_deleted() -> None:
    gone = Facts((Look.MEMBER, Look.REPLICA_SETS, Look.PODS))
    before = remember(DEPLOYED, everything(DEPLOYED))
    assert before == Remembered("uid-d", {"app": "coder"})
    assert remember(SERVED, Facts((Look.MEMBER,), member=everything(SERVED).member)) is None

    assert judged(DEPLOYED, gone) == "MemberMissing"
    assert judged(DEPLOYED, gone, before) == "Gone"
    stranger = obj(REPLICASETS, "other", "uid-other", spec={"replicas": 1})
    for one in (pod("p", None), pod("q", stranger)):
        left = Facts(gone.looked, pods=(one,))
        assert judged(DEPLOYED, left, before) == "PodsLeft"
    sets = (below(deployed(0), 1),)
    assert judged(DEPLOYED, Facts(gone.looked, replica_sets=sets), before) == "ReplicaSetNotZero"


@pytest.mark.parametrize(
    ("member", "order"),
    [
        (DEPLOYED, ["member", "replica sets", "pods"]),
        (STATEFUL, ["member", "pods"]),
        (SERVED, ["member", "owner", "replica sets", "pods"]),
        (ROLES, ["member", "pods", "workloads"]),
    ],
    ids=str,
)
def test_pods_are_looked_at_last(member: Member, order: list[str]) -> None:
    whole, facts, asked = everything(member), Facts(), []
    names = {Look.REPLICA_SETS: "replica_sets"}
    while True:
        found = prove_gone(member, facts, slot=SLOT, epoch=EPOCH)
        if not isinstance(found, NeedLook):
            break
        asked.append(found.look.value)
        value = getattr(whole, names.get(found.look, found.look.value))
        facts = facts.seen(found.look, value)

    assert found == Gone()
    assert asked == order


# The proof against a world that moves


def look(cluster: MemCluster, member: Member, facts: Facts, what: Look) -> Facts:
    """Read one thing from the cluster as it is now."""
    match what:
        case Look.MEMBER:
            return facts.seen(what, cluster.read(member.kind, "lab", member.target))
        case Look.REPLICA_SETS:
            return facts.seen(what, tuple(cluster.all(REPLICASETS, "lab")))
        case Look.PODS:
            return facts.seen(what, tuple(cluster.all(PODS, "lab")))
        case Look.OWNER | Look.WORKLOADS:
            raise AssertionError(what)


@pytest.mark.parametrize("kind", [DEPLOYMENTS, STATEFULSETS], ids=lambda kind: kind.kind)
@pytest.mark.parametrize("seed", range(40))
def test_what_is_proven_gone_stays_gone(kind: Kind, seed: int) -> None:
    """
    A member is scaled up and down while every part lags at random, and the looks of one proof are
    spread over the steps. Once it is proven gone, nothing of it runs or starts, whatever moves.
    """
    rng = random.Random(seed)
    world = World(gpus=4)
    cluster = world.cluster
    member = Member("coder", kind, "lab", "coder")
    body = (deployment if kind == DEPLOYMENTS else statefulset)("coder")
    body["metadata"]["annotations"] = dict(MARKED)
    cluster.put(kind, "lab", body)

    def move() -> None:
        part = rng.choice(world.parts)
        if rng.random() < 0.3:
            part.look()
        elif rng.random() < 0.1 and part is world.kubelet and world.running():
            world.kubelet.fail("lab", rng.choice(world.running()))
        else:
            part.step(look=rng.random() < 0.5)

    proofs = 0
    for _ in range(6):
        cluster.edit(kind, "lab", "coder", scale_patch(kind, SLOT, EPOCH, up=True))
        for _ in range(rng.randrange(40)):
            move()
        if rng.random() < 0.3:
            label = {"metadata": {"labels": {"version": str(rng.random())}}}
            cluster.edit(kind, "lab", "coder", {"spec": {"template": label}})
            for _ in range(rng.randrange(20)):
                move()
        cluster.edit(kind, "lab", "coder", scale_patch(kind, SLOT, EPOCH, up=False))
        facts = Facts()
        found: Gone | NotYet | NeedLook = NeedLook(Look.MEMBER)
        for _ in range(2000):
            found = prove_gone(member, facts, slot=SLOT, epoch=EPOCH)
            match found:
                case Gone():
                    break
                case NotYet():
                    facts = Facts()
                case NeedLook(look=what):
                    facts = look(cluster, member, facts, what)
            for _ in range(rng.randrange(4)):
                move()
        assert isinstance(found, Gone), found
        proofs += 1
        for _ in range(rng.randrange(80)):
            assert not any(runs(pod) for pod in cluster.all(PODS))
            move()
        assert not any(pod["status"]["phase"] == "Pending" for pod in cluster.all(PODS))
    assert proofs == 6


# Ready


def ready(
    member: Member, facts: Facts, probe: Probe | None = None, fenced_at: float = 100.0
) -> str:
    """Return the verdict in one word."""
    found = ready_evidence(member, facts, slot=SLOT, epoch=EPOCH, fenced_at=fenced_at, probe=probe)
    match found:
        case Ready(pod=found_pod):
            return f"Ready {found_pod['metadata']['name']}"
        case NotReady(reason=reason):
            return reason
        case NeedLook(look=what):
            return f"look at {what.value}"


def serving(member: Member) -> Facts:
    """Return facts of a member that serves."""
    facts = everything(member, replicas=1)
    owner = facts.replica_sets[0] if facts.replica_sets else facts.member
    return Facts(
        facts.looked,
        member=facts.member,
        owner=facts.owner,
        replica_sets=facts.replica_sets,
        pods=(pod("p", owner, meta={"labels": {"app": "coder", ROUTING_LABEL: "true"}}),),
    )


FRESH = Probe("uid-p", 100.0)


@pytest.mark.parametrize("member", [DEPLOYED, STATEFUL, SERVED, ROLES], ids=str)
def test_evidence_is_a_pod_of_the_epoch_and_a_probe_of_ours(member: Member) -> None:
    facts = serving(member)

    assert ready(member, facts, FRESH) == "Ready p"
    assert ready(member, facts) == "NotProbed"
    assert ready(member, facts, Probe("uid-other", 200.0)) == "NotProbed"
    assert ready(member, facts, Probe("uid-p", 99.9)) == "ProbeTooOld"


GOING = "2026-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("member", "change", "reason"),
    [
        (DEPLOYED, put("member.metadata.annotations", BEHIND), "NotFenced"),
        (DEPLOYED, put("member.metadata.annotations", AHEAD), "NotFenced"),
        (DEPLOYED, put("member.metadata.annotations", OTHER), "NotFenced"),
        (DEPLOYED, put("member.spec.replicas", 0), "NotScaledUp"),
        (DEPLOYED, put("member.metadata.deletionTimestamp", GOING), "MemberGoing"),
        (DEPLOYED, put("member.status.observedGeneration", 2), "NotObserved"),
        (DEPLOYED, put("replica_sets.0.spec.replicas", 0), "NoRunningPod"),  # an older template
        (DEPLOYED, put("pods.0.metadata.deletionTimestamp", GOING), "NoRunningPod"),
        (DEPLOYED, put("pods.0.metadata.ownerReferences", []), "NoRunningPod"),
        (DEPLOYED, put("pods.0.status.phase", "Pending"), "NoRunningPod"),
        (DEPLOYED, put("pods.0.status.phase", "Failed"), "NoRunningPod"),
        (DEPLOYED, put("pods.0.status.podIP", None), "NoRunningPod"),
        (SERVED, put("owner.metadata.annotations", BEHIND), "EpochNotDown"),
        (SERVED, put("owner.spec.replicas", 0), "EpochNotDown"),
        (SERVED, put("owner.metadata.ownerReferences", []), "OwnerMissing"),
        (ROLES, put("member.spec.suspend", True), "NotScaledUp"),
        (
            ROLES,
            put("member.metadata.annotations", {**MARKED, REPLACEMENTS_ANNOTATION: "{}"}),
            "ReplacementOpen",
        ),
        (ROLES, put("member.status.roles.0.ready", 0), "RolesNotReady"),
        (ROLES, put("member.status.roles", []), "RolesNotReady"),
    ],
)
def test_each_piece_of_evidence_is_needed(member: Member, change: Change, reason: str) -> None:
    facts = copy.deepcopy(serving(member))
    change(facts)

    assert ready(member, facts, FRESH) == reason


def test_only_a_pod_that_answers_requests_stands_for_a_model_deployment() -> None:
    facts = serving(ROLES)
    facts.pods[0]["metadata"]["labels"][ROUTING_LABEL] = "false"
    assert ready(ROLES, facts, FRESH) == "NoRunningPod"

    plain = serving(DEPLOYED)
    del plain.pods[0]["metadata"]["labels"][ROUTING_LABEL]
    assert ready(DEPLOYED, plain, FRESH) == "Ready p"


def test_a_missing_member_is_not_ready() -> None:
    assert ready(DEPLOYED, Facts((Look.MEMBER,)), FRESH) == "MemberMissing"


def test_the_candidate_for_a_probe_is_named() -> None:
    found = ready_evidence(
        DEPLOYED, serving(DEPLOYED), slot=SLOT, epoch=EPOCH, fenced_at=100.0, probe=None
    )

    assert isinstance(found, NotReady)
    assert found.candidate is not None
    assert found.candidate["metadata"]["name"] == "p"


# Marks, members, others


@pytest.mark.parametrize(
    ("mark", "expected"),
    [
        (None, Standing.BEHIND),
        ("", Standing.BEHIND),
        ("nonsense", Standing.BEHIND),
        (SLOT.value(6), Standing.BEHIND),
        (SLOT.value(7), Standing.OURS),
        (SLOT.value(8), Standing.AHEAD),
        ("lab/modelpool-other:7", Standing.FOREIGN),
        ("other/modelpool-gpu0:7", Standing.FOREIGN),
    ],
)
def test_how_a_member_stands_to_an_epoch(mark: str | None, expected: Standing) -> None:
    annotations = {} if mark is None else {SLOT_ANNOTATION: mark}
    assert standing({"metadata": {"annotations": annotations}}, SLOT, EPOCH) is expected


def test_scaling_and_mark_are_one_patch() -> None:
    assert scale_patch(DEPLOYMENTS, SLOT, 7, up=True) == {
        "metadata": {"annotations": {SLOT_ANNOTATION: "lab/modelpool-gpu0:7"}},
        "spec": {"replicas": 1},
    }
    assert scale_patch(MODEL_DEPLOYMENTS, SLOT, 7, up=False)["spec"] == {"suspend": True}


@pytest.mark.parametrize(
    ("kind", "spec", "wanted"),
    [
        (DEPLOYMENTS, {"replicas": 0}, 0),
        (DEPLOYMENTS, {}, 1),
        (INFERENCE_SERVICES, {"replicas": 0}, 0),
        (INFERENCE_SERVICES, {}, 1),
        (MODEL_DEPLOYMENTS, {}, 1),
        (MODEL_DEPLOYMENTS, {"suspend": True}, 0),
    ],
)
def test_how_many_are_wanted(kind: Kind, spec: Json, wanted: int) -> None:
    assert wants(kind, {"spec": spec}) == wanted


@pytest.mark.parametrize(
    ("kind", "spec", "says"),
    [
        (DEPLOYMENTS, {"strategy": {"type": "RollingUpdate"}}, "type: Recreate"),
        (DEPLOYMENTS, {}, "type: Recreate"),
        (DEPLOYMENTS, {"strategy": {"type": "Recreate"}, "replicas": 2}, "2 replicas"),
        (
            STATEFULSETS,
            {"persistentVolumeClaimRetentionPolicy": {"whenScaled": "Delete"}},
            "whenScaled: Retain",
        ),
        (STATEFULSETS, {"replicas": 3}, "3 replicas"),
        (INFERENCE_SERVICES, {"replicas": 2}, "2 replicas"),
    ],
)
def test_members_that_are_unsafe_are_refused_with_the_way_out(
    kind: Kind, spec: Json, says: str
) -> None:
    assert says in (unsafe(kind, {"spec": spec}) or "")


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        (DEPLOYMENTS, {"strategy": {"type": "Recreate"}, "replicas": 1}),
        (STATEFULSETS, {"replicas": 0}),
        (INFERENCE_SERVICES, {}),
        (MODEL_DEPLOYMENTS, {"roles": [{"replicas": 3}]}),
    ],
)
def test_ordinary_members_are_safe(kind: Kind, spec: Json) -> None:
    assert unsafe(kind, {"spec": spec}) is None


def test_two_foreign_changes_within_ten_minutes_are_a_contest() -> None:
    once = ForeignChanges().another(100)
    assert not once.are_a_contest(100)
    twice = once.another(650)
    assert twice.are_a_contest(650)
    assert not twice.are_a_contest(701)
    assert not once.another(701).are_a_contest(701)


def test_an_autoscaler_on_a_member_is_named() -> None:
    def scaler(kind: str, name: str) -> Json:
        return {
            "metadata": {"name": "hpa"},
            "spec": {"scaleTargetRef": {"kind": kind, "name": name}},
        }

    assert is_autoscaled(DEPLOYED, (scaler("Deployment", "coder"),)) == "hpa"
    assert is_autoscaled(DEPLOYED, (scaler("StatefulSet", "coder"),)) is None
    assert is_autoscaled(DEPLOYED, (scaler("Deployment", "other"),)) is None
