"""The Kueue of these tests has the manners that make replacing replicas hard."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from memcluster import MemCluster
from memkueue import (
    GATE,
    GROUP,
    IN_USE,
    MANAGED,
    MARKER,
    QUEUE,
    ROLE,
    TOTAL,
    Garbage,
    Kueue,
    Node,
    condition,
    gated,
    going,
)
from modelpool_kube import errors
from modelpool_kube.kinds import PODS, WORKLOADS, Json, uid

NS = "team-a"


class Ground:
    """A cluster with Kueue and a node."""

    def __init__(self, cards: int = 10) -> None:
        self.cluster = MemCluster()
        self.kueue = Kueue(self.cluster)
        self.kueue.quota["q"] = {"gpu": Decimal(cards)}
        self.node = Node(self.cluster)
        self.garbage = Garbage(self.cluster)

    def pod(self, name: str, *, total: int = 1, group: str = "g", **spec: Any) -> Json:
        """Make a member."""
        container = {"name": "main", "image": "i", "resources": {"requests": {"gpu": "1"}}}
        body = {
            "metadata": {
                "name": name,
                "labels": {QUEUE: spec.pop("queue", "q"), GROUP: group},
                "annotations": {TOTAL: str(total), ROLE: spec.pop("role", "server")},
            },
            "spec": {"containers": [container], **spec},
        }
        return self.cluster.put(PODS, NS, body)

    def read(self, name: str) -> Json:
        """Return a Pod."""
        return self.cluster.must(PODS, NS, name)

    def workload(self, group: str = "g") -> Json | None:
        """Return the Workload of a group."""
        return self.cluster.read(WORKLOADS, NS, group)

    def must(self, group: str = "g") -> Json:
        """Return the Workload of a group, which is there."""
        return self.cluster.must(WORKLOADS, NS, group)

    def run(self) -> None:
        """Let everything move."""
        while self.kueue.step() or self.node.step() or self.garbage.step():
            pass


def test_pods_with_a_queue_get_label_finalizer_gate_and_keep_their_role() -> None:
    ground = Ground()

    pod = ground.pod("p")

    assert pod["metadata"]["labels"][MANAGED] == "true"
    assert pod["metadata"]["finalizers"] == [MANAGED]
    assert pod["spec"]["schedulingGates"] == [{"name": GATE}]
    assert pod["metadata"]["annotations"][ROLE] == "server"


def test_a_group_needs_a_total_and_keeps_its_name() -> None:
    ground = Ground()
    ground.pod("p")

    with pytest.raises(errors.Invalid):
        ground.cluster.put(
            PODS, NS, {"metadata": {"name": "x", "labels": {QUEUE: "q", GROUP: "g"}}}
        )
    with pytest.raises(errors.Invalid):
        ground.cluster.edit(PODS, NS, "p", {"metadata": {"labels": {GROUP: "other"}}})


def test_a_gate_may_be_taken_off_and_not_put_on() -> None:
    ground = Ground()
    ground.pod("p")
    ground.cluster.edit(PODS, NS, "p", {"spec": {"schedulingGates": None}})

    with pytest.raises(errors.Invalid):
        ground.cluster.edit(PODS, NS, "p", {"spec": {"schedulingGates": [{"name": GATE}]}})


def test_an_incomplete_group_composes_nothing_and_completing_it_composes() -> None:
    ground = Ground()
    ground.pod("p0", total=2)
    ground.kueue.run()
    assert ground.workload() is None
    assert ("ErrWorkloadCompose", "g") in ground.kueue.events

    ground.pod("p1", total=2)
    ground.kueue.run()

    workload = ground.must()
    assert workload["metadata"]["annotations"][MARKER] == "true"
    assert workload["metadata"]["finalizers"] == [IN_USE]
    assert workload["spec"]["queueName"] == "q"
    assert [(each["name"], each["count"]) for each in workload["spec"]["podSets"]] == [
        ("server", 2)
    ]
    owners = [each["uid"] for each in workload["metadata"]["ownerReferences"]]
    assert owners == [uid(ground.read("p0")), uid(ground.read("p1"))]


@pytest.mark.parametrize("odd", [{"total": 3}, {"total": 2, "queue": "other"}])
def test_members_that_disagree_compose_nothing(odd: dict[str, Any]) -> None:
    ground = Ground()
    ground.pod("p0", total=2)
    ground.pod("p1", **odd)

    ground.kueue.run()

    assert ground.workload() is None


def test_the_excess_pod_that_is_removed_is_the_newest() -> None:
    ground = Ground()
    for name in ("p0", "p1", "p2"):
        ground.pod(name, total=2)

    ground.kueue.run()

    assert ground.cluster.names(PODS, NS) == ["p0", "p1"]
    assert ground.workload() is not None


def test_quota_is_reserved_then_admitted_then_members_are_let_go() -> None:
    ground = Ground()
    ground.pod("p0")
    ground.kueue.run()
    assert condition(ground.must(), "QuotaReserved") == "True"
    assert condition(ground.must(), "Admitted") is None
    assert gated(ground.read("p0"))

    ground.kueue.admit()
    ground.run()

    assert not gated(ground.read("p0"))
    assert ground.read("p0")["spec"]["nodeSelector"] == {"flavor": "default"}
    assert ground.read("p0")["status"]["phase"] == "Running"


def test_what_does_not_fit_waits_until_a_workload_is_gone() -> None:
    ground = Ground(cards=1)
    ground.kueue.may_admit = True
    ground.pod("p0", group="g")
    ground.run()
    ground.pod("p1", group="h")
    ground.run()
    assert condition(ground.must("h"), "QuotaReserved") == "False"

    ground.cluster.remove(WORKLOADS, NS, "g")
    ground.run()

    assert ground.workload("g") is None
    assert condition(ground.must("h"), "Admitted") == "True"


def test_a_departing_member_stays_readable_and_holds_the_quota() -> None:
    ground = Ground()
    ground.kueue.may_admit = True
    ground.pod("p0")
    ground.run()

    ground.cluster.remove(PODS, NS, "p0")
    ground.run()

    assert going(ground.read("p0"))
    assert condition(ground.must(), "Admitted") == "True"


def test_deleting_the_workload_stops_all_members_newcomers_included() -> None:
    ground = Ground()
    ground.kueue.may_admit = True
    ground.pod("p0")
    ground.run()
    ground.cluster.remove(WORKLOADS, NS, "g")
    ground.pod("late")
    assert going(ground.must())

    ground.run()

    assert ground.cluster.names(PODS, NS) == []
    assert ground.workload() is None


def test_two_incarnations_never_share_a_uid() -> None:
    ground = Ground()
    first = uid(ground.pod("p0"))
    ground.kueue.run()
    workload = uid(ground.must())
    ground.cluster.remove(WORKLOADS, NS, "g")
    ground.run()

    second = uid(ground.pod("p0"))
    ground.kueue.run()

    assert first != second
    assert workload != uid(ground.must())


def test_a_newcomer_is_adopted_and_let_go_on_the_old_reservation() -> None:
    """The hazard that a proof of fresh admission is for."""
    ground = Ground()
    ground.kueue.may_admit = True
    ground.pod("old")
    ground.run()
    workload = uid(ground.must())
    ground.cluster.vanish(PODS, NS, "old")

    ground.pod("new", terminationGracePeriodSeconds=99)
    ground.kueue.run()

    assert uid(ground.must()) == workload
    assert uid(ground.read("new")) in {
        each["uid"] for each in ground.must()["metadata"]["ownerReferences"]
    }
    assert not gated(ground.read("new"))


def test_a_waiting_workload_is_changed_in_place_when_its_group_grew() -> None:
    ground = Ground(cards=0)
    ground.pod("p0", total=1)
    ground.kueue.run()
    workload = uid(ground.must())
    for name in ("p0",):
        note = {"metadata": {"annotations": {TOTAL: "2"}}}
        ground.cluster.edit(PODS, NS, name, note)

    ground.pod("p1", total=2)
    ground.kueue.run()

    assert uid(ground.must()) == workload
    assert ground.must()["spec"]["podSets"][0]["count"] == 2


def test_a_member_of_an_unknown_role_ends_an_admitted_workload() -> None:
    ground = Ground()
    ground.kueue.may_admit = True
    ground.pod("p0", total=2)
    ground.pod("p1", total=2)
    ground.run()
    ground.cluster.vanish(PODS, NS, "p1")

    ground.pod("odd", total=2, role="other")
    ground.run()

    assert ground.workload() is None
    assert ground.cluster.names(PODS, NS) == []


def test_a_foreign_workload_of_the_name_of_a_group_is_not_adopted() -> None:
    ground = Ground()
    body = {"metadata": {"name": "g"}, "spec": {"queueName": "q", "podSets": []}}
    foreign = uid(ground.cluster.put(WORKLOADS, NS, body))

    ground.pod("p0")
    ground.kueue.run()

    assert uid(ground.must()) == foreign
    assert "ownerReferences" not in ground.must()["metadata"]
    assert ("ErrWorkloadCompose", "g") in ground.kueue.events


def test_eviction_takes_the_members_and_leaves_the_workload_with_its_history() -> None:
    ground = Ground()
    ground.kueue.may_admit = True
    ground.pod("p0")
    ground.run()
    ground.kueue.may_reserve = False

    ground.kueue.evict(NS, "g")
    ground.run()

    assert going(ground.read("p0"))
    workload = ground.must()
    assert condition(workload, "Evicted") is not None
    assert condition(workload, "Admitted") == "False"
    assert workload["status"]["requeueState"] == {"count": 1}
    assert "admission" not in workload["status"]


def test_members_that_are_let_go_without_admission_are_stopped() -> None:
    ground = Ground(cards=0)
    ground.pod("p0")
    ground.kueue.run()
    ground.cluster.edit(PODS, NS, "p0", {"spec": {"schedulingGates": None}})

    ground.kueue.run()

    assert going(ground.read("p0"))


def test_when_all_members_are_gone_the_workload_is_let_go_and_collected() -> None:
    ground = Ground()
    ground.kueue.may_admit = True
    ground.pod("p0")
    ground.run()
    ground.cluster.vanish(PODS, NS, "p0")

    assert ground.kueue.step()
    assert ground.workload() is not None
    ground.run()

    assert ground.workload() is None


def test_a_gated_member_without_a_workload_goes_at_the_next_attempt_to_compose() -> None:
    ground = Ground()
    ground.pod("p0", total=2)
    ground.cluster.remove(PODS, NS, "p0")
    assert going(ground.read("p0"))

    ground.kueue.run()

    assert ground.cluster.names(PODS, NS) == []


@pytest.mark.parametrize("has_node", [True, False])
def test_a_member_that_is_going_counts_as_long_as_it_has_a_node(has_node: bool) -> None:
    ground = Ground()
    ground.pod("p0", total=2)
    if has_node:
        ground.cluster.set_unchecked(PODS, NS, "p0", {"spec": {"nodeName": "n"}})
    ground.cluster.remove(PODS, NS, "p0")
    assert going(ground.read("p0"))

    ground.pod("p1", total=2)
    ground.kueue.run()

    assert (ground.workload() is not None) == has_node


def test_pod_sets_are_sorted_and_made_from_the_first_member_of_each_role() -> None:
    ground = Ground()
    ground.pod("p0", total=3, role="z", terminationGracePeriodSeconds=1)
    ground.pod("p1", total=3, role="a", terminationGracePeriodSeconds=2)
    ground.pod("p2", total=3, role="z", terminationGracePeriodSeconds=3)

    ground.kueue.run()

    sets = ground.must()["spec"]["podSets"]
    assert [(each["name"], each["count"]) for each in sets] == [("a", 1), ("z", 2)]
    graces = [each["template"]["spec"]["terminationGracePeriodSeconds"] for each in sets]
    assert graces == [2, 1]


def test_a_group_of_too_many_roles_composes_nothing() -> None:
    ground = Ground(cards=99)
    for number in range(19):
        ground.pod(f"p{number}", total=19, role=f"r{number}")

    ground.kueue.run()

    assert ground.workload() is None


@pytest.mark.parametrize("spec", [{"podSets": []}, {"queueName": "other"}])
def test_what_is_reserved_is_not_changed(spec: Json) -> None:
    ground = Ground()
    ground.pod("p0")
    ground.kueue.run()
    assert condition(ground.must(), "QuotaReserved") == "True"

    with pytest.raises(errors.Invalid, match="immutable while quota is reserved"):
        ground.cluster.edit(WORKLOADS, NS, "g", {"spec": spec})


def test_a_group_that_serves_does_not_finish_and_keeps_its_queue() -> None:
    ground = Ground()
    ground.kueue.may_admit = True
    ground.pod("p0")
    ground.run()

    ground.cluster.edit_status(PODS, NS, "p0", {"phase": "Succeeded"})
    ground.cluster.edit(PODS, NS, "p0", {"metadata": {"labels": {QUEUE: "other"}}})
    ground.run()

    assert condition(ground.must(), "Finished") is None
    assert condition(ground.must(), "Admitted") == "True"
    assert ground.must()["spec"]["queueName"] == "q"
    assert ground.read("p0")["metadata"]["finalizers"] == [MANAGED]


def test_deactivation_takes_the_members_and_is_not_queued_again() -> None:
    ground = Ground()
    ground.kueue.may_admit = True
    ground.pod("p0")
    ground.run()

    ground.cluster.edit(WORKLOADS, NS, "g", {"spec": {"active": False}})
    ground.run()

    assert going(ground.read("p0"))
    assert condition(ground.must(), "Admitted") == "False"
    assert condition(ground.must(), "Requeued") is None
    assert "requeueState" not in ground.must()["status"]
