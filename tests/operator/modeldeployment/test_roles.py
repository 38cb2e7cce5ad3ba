"""Roles do not touch one another; who answers requests; peers; status."""

from __future__ import annotations

import pytest

from mdep_lab import NAMESPACE, Lab, role
from memcluster import Write
from memkueue import going
from modelpool_api.names import ROUTING_LABEL, SPEC_HASH_ANNOTATION
from modelpool_kube import errors
from modelpool_kube.kinds import MODEL_DEPLOYMENTS, PODS, SERVICES, Json, uid

PREFILL = role("prefill", kind="Prefill")
DECODE = role("decode", kind="Decode")
EXTERNAL = ["--data-parallel-external-lb", "--data-parallel-size", "2"]


def picture(lab: Lab, name: str) -> Json:
    """Return everything of one role that an edit of another must leave as it is."""
    return {
        "pods": [(uid(pod), pod["metadata"]["annotations"]) for pod in lab.pods(name=name)],
        "workload": uid(lab.workload(0, name) or {}),
        "services": {
            each["metadata"]["name"]: (uid(each), each["spec"])
            for each in lab.cluster.all(SERVICES)
            if each["metadata"]["name"].startswith(f"chat-{name}")
        },
        "answers": lab.matched(f"chat-{name}"),
    }


async def test_t59_edits_of_prefill_leave_decode_as_it_is() -> None:
    lab = Lab(PREFILL, DECODE)
    await lab.settle()
    kept = picture(lab, "decode")
    seen: list[str] = []
    lab.cluster.after_write.append(
        lambda write: seen.extend(lab.checks.slots()) if write.kind == MODEL_DEPLOYMENTS else None
    )

    for edit in ({"size": 2}, {"size": 1}, {"command": ["run"]}):
        lab.edit("prefill", **edit)
        await lab.settle()
        assert picture(lab, "decode") == kept
    assert set(seen) == {"prefill"}


async def test_h1_an_edit_of_one_role_leaves_the_objects_of_the_other_unwritten() -> None:
    lab = Lab(PREFILL, DECODE)
    await lab.settle()
    versions = {uid(pod): pod["metadata"]["resourceVersion"] for pod in lab.pods(name="decode")}
    trail = len(lab.cluster.writes)

    lab.edit("prefill", image="engine:2", size=3)
    await lab.settle()

    assert versions == {
        uid(pod): pod["metadata"]["resourceVersion"] for pod in lab.pods(name="decode")
    }
    touched = {each.name for each in lab.cluster.writes[trail:] if each.kind == SERVICES}
    assert not any(name.startswith("chat-decode") for name in touched)


async def test_t61_every_rank_of_a_deployed_external_balance_answers() -> None:
    lab = Lab(role(size=2, extraArgs=EXTERNAL))
    await lab.settle()
    assert lab.matched("chat") == set(lab.uids()) and len(lab.uids()) == 2
    old = set(lab.uids())
    lab.kueue.may_admit = False
    lab.edit(extraArgs=["--tensor-parallel-size", "2"], replicas=2)
    await lab.look(2)
    assert lab.matched("chat") >= old

    lab.kueue.may_admit = True
    await lab.settle()
    leaders = {uid(lab.pods(ordinal)[0]) for ordinal in (0, 1)}
    assert lab.matched("chat") == leaders


async def test_t61_a_rank_given_by_a_variable_counts_and_an_unknown_command_grants_nothing() -> (
    None
):
    lab = Lab(
        role("one", size=2, env=[{"name": "VLLM_DP_RANK", "value": "0"}]),
        role("two", size=2, extraArgs=["--config", "/etc/x.yaml"]),
    )
    await lab.settle()

    assert lab.matched("chat-one") == set(lab.uids(name="one"))
    assert lab.matched("chat-two") == set()


async def test_t62_managed_and_takeover_replicas_keep_their_own_rule() -> None:
    lab = Lab(role(replicas=2, size=2, extraArgs=EXTERNAL))
    await lab.settle()
    lab.kueue.may_admit = False
    lab.edit(command=["run", *EXTERNAL])
    await lab.until("WaitingForAdmission")
    for _ in range(3):
        await lab.look()
        lab.move()

    managed, takeover = lab.pods(0), lab.pods(1)
    assert lab.matched("chat-server") == {*map(uid, managed), uid(takeover[0])}


async def test_s10_labels_are_there_before_the_selector_asks_for_them() -> None:
    """The selector asks for the label from its first day on, so there is no other moment."""
    lab = Lab(role(size=2))
    await lab.settle()
    selectors = [
        (write.after or {})["spec"]["selector"]
        for write in lab.cluster.writes
        if write.kind == SERVICES and write.name in ("chat", "chat-server") and write.after
    ]

    assert all(selector[ROUTING_LABEL] == "true" for selector in selectors)
    for edit in ({"size": 1}, {"command": ["run"]}, {"size": 3, "command": None}):
        lab.edit(**edit)
        await lab.settle()
    after = [each for each in lab.cluster.writes if each.kind == SERVICES]
    assert {each.verb for each in after if each.name in ("chat", "chat-server")} == {"create"}


async def test_t63_the_front_looks_at_its_own_role_alone() -> None:
    lab = Lab(role("prefill", kind="Prefill"), role("decode", kind="Decode", size=2))
    await lab.settle()

    selector = lab.cluster.must(SERVICES, NAMESPACE, "chat")["spec"]["selector"]
    assert selector == {
        "app.kubernetes.io/name": "model-deployment",
        "app.kubernetes.io/instance": "chat",
        "app.kubernetes.io/component": "prefill",
        ROUTING_LABEL: "true",
    }
    assert lab.matched("chat") == set(lab.uids(name="prefill"))
    assert lab.matched("chat-decode") == {lab.uids(name="decode")[0]}


async def test_s11_the_first_edit_moves_no_request_before_a_pod_is_replaced() -> None:
    lab = Lab(role(replicas=2, size=4))
    await lab.settle()
    answered = lab.matched("chat")
    assert len(answered) == 2
    moments: list[set[str]] = []

    def see(write: Write) -> None:
        if write.kind in (PODS, SERVICES) and not going(lab.pods(1)[0]):
            moments.append(lab.matched("chat"))

    lab.edit(size=1, command=["run"])
    lab.cluster.after_write.append(see)
    await lab.look()
    assert all(uid(lab.pods(0)[0]) in each for each in moments)
    assert lab.matched("chat") == {uid(lab.pods(0)[0])}
    lab.cluster.after_write.remove(see)
    await lab.settle()
    assert lab.matched("chat") == set(lab.uids())


async def test_i8_a_condemned_replica_stops_answering_before_its_pods_are_deleted() -> None:
    lab = Lab(role(replicas=2))
    await lab.settle()
    condemned = lab.pods(1)[0]["metadata"]["name"]
    mark = len(lab.port.requests)

    lab.edit(image="engine:2")
    await lab.look()

    verbs = [r.verb for r in lab.port.requests[mark:] if r.is_write and r.name == condemned]
    assert verbs == ["patch", "delete"]
    assert lab.matched("chat") == {uid(lab.pods(0)[0])}


async def test_s8_peers_find_each_other_before_they_are_ready_or_answer() -> None:
    lab = Lab(role(size=2, command=["run"]))
    lab.node.makes_ready = lambda pod: False
    await lab.settle()

    spec = lab.cluster.must(SERVICES, NAMESPACE, "chat-server-r0")["spec"]
    assert spec["clusterIP"] == "None" and spec["publishNotReadyAddresses"] is True
    assert ROUTING_LABEL not in spec["selector"]
    assert lab.matched("chat-server-r0") == set(lab.uids())
    pod = lab.pods()[0]["spec"]
    assert (pod["hostname"], pod["subdomain"]) == ("chat-server-r0-m0", "chat-server-r0")
    env = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    assert env == {
        "MODELPOOL_REPLICA_LEADER_ADDRESS": "chat-server-r0-m0.chat-server-r0",
        "MODELPOOL_REPLICA_SIZE": "2",
        "MODELPOOL_MEMBER_INDEX": None,
    }


async def test_s5_peers_of_a_surplus_replica_stay_until_its_last_member_left() -> None:
    lab = Lab(role(replicas=2, size=2))
    await lab.settle()
    lab.edit(replicas=1, size=1)
    await lab.look()
    assert "chat-server-r1" in lab.services()

    lab.move()
    assert lab.pods(1) == [] and "chat-server-r1" in lab.services()
    await lab.look()
    assert "chat-server-r1" not in lab.services()
    assert "chat-server-r0" in lab.services()


async def test_services_are_aligned_in_place_and_never_adopted() -> None:
    lab = Lab()
    await lab.settle()
    front = uid(lab.cluster.must(SERVICES, NAMESPACE, "chat"))
    wrong: Json = {"spec": {"selector": {"odd": "x"}, "ports": [{"port": 1}]}}
    lab.cluster.edit(SERVICES, NAMESPACE, "chat", wrong, actor="stranger")

    await lab.settle()

    spec = lab.cluster.must(SERVICES, NAMESPACE, "chat")["spec"]
    assert "odd" not in spec["selector"] and spec["ports"][0]["port"] == 8000
    assert uid(lab.cluster.must(SERVICES, NAMESPACE, "chat")) == front
    lab.edit(ports=[{"containerPort": 9000}])
    await lab.settle()
    port = lab.cluster.must(SERVICES, NAMESPACE, "chat")["spec"]["ports"][0]
    assert (port["port"], port["targetPort"]) == (9000, "http")
    assert uid(lab.cluster.must(SERVICES, NAMESPACE, "chat")) == front


async def test_a_foreign_service_of_the_name_is_left_alone_and_named() -> None:
    lab = Lab()
    body: Json = {"metadata": {"name": "chat"}, "spec": {"ports": [{"port": 1}]}}
    lab.cluster.put(SERVICES, NAMESPACE, body, actor="stranger")

    await lab.look(3)
    lab.move()
    await lab.look()

    assert lab.cluster.must(SERVICES, NAMESPACE, "chat")["spec"] == body["spec"]
    assert "Service chat is not of this deployment" in lab.condition("Stalled")[2]


async def test_a_foreign_peer_service_keeps_members_from_being_made_in_vain() -> None:
    lab = Lab(role(size=2))
    body: Json = {"metadata": {"name": "chat-server-r0"}, "spec": {"ports": [{"port": 1}]}}
    lab.cluster.put(SERVICES, NAMESPACE, body, actor="stranger")

    await lab.look(3)

    assert lab.pods() == []
    assert "Service chat-server-r0 is not of this deployment" in lab.condition("Stalled")[2]
    lab.cluster.remove(SERVICES, NAMESPACE, "chat-server-r0", actor="stranger")
    await lab.settle()
    assert len(lab.pods()) == 2


# Status


async def test_t64_status_counts_whole_replicas_of_either_configuration() -> None:
    lab = Lab(role(replicas=2, size=4))
    await lab.settle()
    lab.kueue.may_admit = False
    lab.edit(size=2)
    await lab.until("WaitingForAdmission")
    await lab.look()

    status = lab.status()
    assert (status["desired"], status["ready"], status["outdated"]) == (2, 1, 1)
    assert lab.condition("ReplicasUpToDate")[:2] == ("False", "RolloutInProgress")
    assert lab.deployment["status"]["roleSummary"] == "server 1/2"
    assert lab.deployment["status"]["replacing"] == "server/1"
    assert lab.deployment["status"]["phase"] == "Degraded"


async def test_t64_three_ready_pods_of_two_times_two_are_one_ready_replica() -> None:
    lab = Lab(role(replicas=2, size=2))
    lab.node.makes_ready = lambda pod: pod["metadata"]["name"] != "chat-server-r1-m1"
    await lab.settle()

    assert lab.status()["ready"] == 1


async def test_t64_a_list_that_failed_writes_no_status() -> None:
    lab = Lab()
    await lab.settle()
    before = lab.deployment["status"]
    lab.vanish(lab.pods())
    lab.port.fail(errors.Unavailable("boom", code=500), verb="list", kind=PODS)

    await lab.look()

    assert lab.deployment["status"] == before


@pytest.mark.parametrize(
    ("cards", "admits", "moves", "expected"),
    [
        (9, False, False, ("Unknown", "AdmissionInFlight")),
        (9, False, True, ("True", "Reserved")),
        (0, True, True, ("False", "Pending")),
        (9, True, True, ("True", "Reserved")),
    ],
)
async def test_quota_is_told_apart_from_admission_in_flight(
    cards: int, admits: bool, moves: bool, expected: tuple[str, str]
) -> None:
    lab = Lab(role(size=2), cards=cards, admits=admits)
    await lab.look()
    if moves:
        lab.move()
    await lab.look()

    assert lab.condition("QuotaReserved")[:2] == expected


async def test_a_short_group_is_reported_as_short() -> None:
    lab = Lab(role(size=2))
    busy = errors.Unavailable("too busy", code=429)
    lab.port.fail(busy, verb="create", kind=PODS, name="chat-server-r0-m1", times=3)
    await lab.look(1)
    await lab.look(1)

    assert lab.condition("ReplicasUpToDate")[:2] == ("False", "ReplacementInProgress")


async def test_kinds_are_ready_when_each_has_a_ready_replica() -> None:
    lab = Lab(PREFILL, DECODE)
    lab.node.makes_ready = lambda pod: "decode" not in pod["metadata"]["name"]
    await lab.settle()
    assert lab.condition("RoleKindsReady")[:2] == ("False", "KindsNotReady")
    assert "Decode" in lab.condition("RoleKindsReady")[2]

    lab.node.makes_ready = lambda pod: True
    await lab.settle()
    assert lab.condition("RoleKindsReady")[:2] == ("True", "AllKindsReady")
    assert lab.condition("Ready")[:2] == ("True", "Available")
    assert lab.deployment["status"]["endpoint"] == "http://chat.team-a.svc:8000"


async def test_the_hash_of_a_seat_is_the_same_for_every_incarnation() -> None:
    lab = Lab()
    await lab.settle()
    first = lab.pods()[0]["metadata"]["annotations"][SPEC_HASH_ANNOTATION]
    lab.vanish(lab.pods())
    await lab.settle()

    assert lab.pods()[0]["metadata"]["annotations"][SPEC_HASH_ANNOTATION] == first
