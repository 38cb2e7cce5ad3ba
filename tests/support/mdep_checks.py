"""
What must hold after every single write while replicas are replaced (I1 to I12).

Judged from the store and its history alone; of the code under test only the render is used, to
know what a seat should hold. A broken rule raises at once, inside the write that broke it.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from memcluster import MemCluster, Write
from memkueue import GROUP, QUEUE, TOTAL, condition, gated, going, labels_of
from modelpool_api.names import (
    APP_COMPONENT_LABEL,
    APP_INSTANCE_LABEL,
    MEMBER_INDEX_LABEL,
    ORDINAL_LABEL,
    REPLACEMENTS_ANNOTATION,
    ROUTING_LABEL,
    SPEC_HASH_ANNOTATION,
)
from modelpool_api.v1alpha1.instancetype import InstanceType
from modelpool_api.v1alpha1.modeldeployment import ModelDeployment
from modelpool_kube.kinds import (
    INSTANCE_TYPES,
    MODEL_DEPLOYMENTS,
    PODS,
    SERVICES,
    WORKLOADS,
    Json,
)
from modelpool_operator.plan.modeldeployment.render import Unrenderable, render

OPERATOR = "operator"
"""Ports of operators are called so."""


class Broken(AssertionError):
    """An invariant does not hold."""


def ordinal_of(pod: Json) -> int | None:
    """Return the ordinal of *pod*, or None."""
    text = labels_of(pod).get(ORDINAL_LABEL, "")
    return int(text) if text.isdigit() else None


def role_of(pod: Json) -> str:
    """Return the role of *pod*."""
    return str(labels_of(pod).get(APP_COMPONENT_LABEL, ""))


def total_of(pod: Json) -> int:
    """Return the declared total of *pod*; 0 when it is unreadable."""
    text = (pod["metadata"].get("annotations") or {}).get(TOTAL, "1")
    return int(text) if text.isdigit() else 0


def ended(pod: Json) -> bool:
    """Return whether *pod* is in a final phase."""
    return (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded")


def make_of(pod: Json) -> str:
    """Return what a member was made as, apart from its seat; the same for all of one render."""
    spec = pod["spec"]
    containers = [
        {key: value for key, value in each.items() if key != "readinessProbe"}
        for each in spec["containers"]
    ]
    return json.dumps(
        [total_of(pod), labels_of(pod).get(QUEUE), containers, spec.get("volumes")], sort_keys=True
    )


class Checks:
    """Watches every write of a cluster with one ModelDeployment."""

    def __init__(self, cluster: MemCluster, namespace: str, name: str) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.name = name
        self.checked: Counter[str] = Counter()
        """How often each rule was put to the test."""
        self._mine: set[str] = set()
        """UIDs of all Pods of the deployment that ever were."""
        self._made_at: dict[str, int] = {}
        self._reserved_at: dict[str, int] = {}
        self._admitted_at: dict[str, int] = {}
        self._counts_at_pass: dict[str, int] = {}
        self._pass_began = 0
        self._was_going = False
        cluster.after_write.append(self.see)

    # What is there

    def deployment(self) -> Json | None:
        """Return the deployment, or None."""
        return self.cluster._objects[MODEL_DEPLOYMENTS].get((self.namespace, self.name))

    def pods(self) -> list[Json]:
        """Return the Pods of the deployment."""
        return [
            pod
            for pod in self.cluster._objects[PODS].values()
            if pod["metadata"]["uid"] in self._mine
        ]

    def slots(self) -> dict[str, Json]:
        """Return the record."""
        found = self.deployment()
        text = ((found or {"metadata": {}})["metadata"].get("annotations") or {}).get(
            REPLACEMENTS_ANNOTATION
        )
        if text is None:
            return {}
        try:
            record = json.loads(text)
        except ValueError:
            return {}
        if not isinstance(record, dict):
            return {}
        return {key: value for key, value in record.items() if not key.startswith("/")}

    def counts(self) -> dict[str, int]:
        """Return how many replicas each role asks for."""
        found = self.deployment()
        if found is None:
            return {}
        spec = found["spec"]
        return {
            role["name"]: 0 if spec.get("suspend") else role.get("replicas", 1)
            for role in spec["roles"]
        }

    def begin_pass(self) -> None:
        """Remember what was asked for when the operator looked."""
        self._counts_at_pass = self.counts()
        self._pass_began = self.cluster.version

    def at(self, role: str, ordinal: int) -> list[Json]:
        """Return the Pods at an ordinal."""
        return [pod for pod in self.pods() if role_of(pod) == role and ordinal_of(pod) == ordinal]

    # The rules

    def see(self, write: Write) -> None:
        """Check everything that *write* can have broken."""
        after, before = write.after, write.before
        by_operator = write.actor.startswith(OPERATOR)
        if by_operator and write.kind in (PODS, WORKLOADS) and write.verb in ("patch", "status"):
            self._only_routes(write)
        if write.kind == PODS:
            instance = instance_of(after or before or {"metadata": {}})
            if write.namespace != self.namespace or instance not in ("", self.name):
                return
            if after is not None and before is None:
                self._note_pod(after)
                if by_operator:
                    self._on_create(after)
            if by_operator and write.verb in ("delete", "remove") and before is not None:
                self._may_delete_pod(before)
            if write.actor == "kueue" and before is not None and after is not None:
                if gated(before) and not gated(after):
                    self._on_ungate(after)
            if after is not None:
                self._routes_well(after)
            self._peers_are_there()
        elif write.kind == WORKLOADS:
            self._note_workload(write)
            if by_operator and write.verb in ("delete", "remove") and before is not None:
                self._may_delete_workload(before)
        elif write.kind == MODEL_DEPLOYMENTS:
            self._was_going = self._was_going or (before is not None and going(before))
            if after is not None:
                self._record_is_sound(after, before, by_operator)
        elif write.kind == SERVICES and by_operator:
            self._peers_are_there()

    def _fail(self, rule: str, text: str) -> None:
        raise Broken(f"{rule}: {text}")

    def _only_routes(self, write: Write) -> None:
        """A running member is not touched but for its routing label; a Workload not at all."""
        assert write.before is not None and write.after is not None
        seen = []
        for obj in (write.before, write.after):
            found = {**obj["metadata"], "labels": {**labels_of(obj), ROUTING_LABEL: ""}}
            found.pop("resourceVersion")
            seen.append({**obj, "metadata": found})
        self.checked["R33"] += 1
        if write.kind == WORKLOADS or seen[0] != seen[1]:
            self._fail("R33", f"{write.kind.kind} {write.name} is changed in place")

    def _note_pod(self, pod: Json) -> None:
        deployment = self.deployment()
        owners = pod["metadata"].get("ownerReferences") or []
        if deployment is not None and any(
            each.get("controller") and each["uid"] == deployment["metadata"]["uid"]
            for each in owners
        ):
            self._mine.add(pod["metadata"]["uid"])
        self._made_at[pod["metadata"]["uid"]] = int(pod["metadata"]["resourceVersion"])

    def _note_workload(self, write: Write) -> None:
        if write.after is None:
            return
        uid = write.after["metadata"]["uid"]
        if condition(write.after, "Admitted") == "True":
            self._admitted_at.setdefault(uid, write.version)
        else:
            self._admitted_at.pop(uid, None)
        if condition(write.after, "QuotaReserved") == "True":
            self._reserved_at.setdefault(uid, write.version)
        else:
            self._reserved_at.pop(uid, None)

    def _on_create(self, pod: Json) -> None:
        role, ordinal = role_of(pod), ordinal_of(pod)
        if ordinal is None:
            self._fail("I5", "a member without an ordinal")
            return
        me = pod["metadata"]["uid"]
        others = [each for each in self.at(role, ordinal) if each["metadata"]["uid"] != me]
        where = f"replica {ordinal} of {role}"
        for each in others:
            self.checked["I2"] += 1
            if going(each):
                self._fail("I2", f"{where}: a member is made beside one that is going")
            self.checked["I1"] += 1
            if not ended(each) and make_of(each) != make_of(pod):
                self._fail("I1", f"{where}: members of two configurations")
            if labels_of(each).get(MEMBER_INDEX_LABEL) == labels_of(pod)[MEMBER_INDEX_LABEL]:
                self._fail("I1", f"{where}: two members on one seat")
        self.checked["I5"] += 1
        group = labels_of(pod)[GROUP]
        for workload in self.cluster._objects[WORKLOADS].values():
            if workload["metadata"]["name"] == group:
                self._fail("I5", f"{where}: made while Workload {group} stands")
        for each in self.cluster._objects[PODS].values():
            uid = each["metadata"]["uid"]
            if labels_of(each).get(GROUP) == group and uid not in self._mine:
                self._fail("I5", f"{where}: made while a stranger is in the group")
        wanted = max(self.counts().get(role, 0), self._counts_at_pass.get(role, 0))
        if ordinal >= wanted:
            self._fail("R40", f"{where} is not asked for")
        slot = self.slots().get(role)
        if slot is not None and slot["ordinal"] == ordinal:
            self.checked["I9"] += 1
            digest = pod["metadata"]["annotations"][SPEC_HASH_ANNOTATION]
            if slot["phase"] != "WaitingForAdmission" or digest not in slot["memberHashes"]:
                self._fail("I9", f"{where}: made without a record that licenses it")

    def _may_delete_pod(self, pod: Json) -> None:
        self.checked["I4"] += 1
        uid, role, ordinal = pod["metadata"]["uid"], role_of(pod), ordinal_of(pod)
        deployment = self.deployment()
        if uid not in self._mine:
            if any(uid in slot.get("memberUIDs", ()) for slot in self.slots().values()):
                return
            self._fail("I4", f"Pod {pod['metadata']['name']} of somebody else is deleted")
        if deployment is None or going(deployment):
            return
        if any(
            uid in slot.get("memberUIDs", ()) and slot["phase"] == "Cleanup"
            for slot in self.slots().values()
        ):
            self.checked["I9"] += 1
            return
        counts = [self.counts().get(role, 0), self._counts_at_pass.get(role, 0)]
        if ordinal is not None and ordinal >= min(counts):
            return
        if ended(pod):
            return
        seat = labels_of(pod).get(MEMBER_INDEX_LABEL)
        doubles = [
            each
            for each in self.at(role, ordinal or 0)
            if not going(each) and labels_of(each).get(MEMBER_INDEX_LABEL) == seat
        ]
        if len(doubles) >= 1 and all(each["metadata"]["uid"] != uid for each in doubles):
            return
        self._fail("I4", f"Pod {pod['metadata']['name']} is deleted without licence")

    def _may_delete_workload(self, workload: Json) -> None:
        self.checked["I4"] += 1
        uid = workload["metadata"]["uid"]
        owners = {each["uid"] for each in workload["metadata"].get("ownerReferences") or []}
        deployment = self.deployment()
        slots = self.slots().values()
        recorded = {
            slot.get(key) for slot in slots for key in ("workloadUID", "currentWorkloadUID")
        }
        if deployment is None or going(deployment):
            if owners & self._mine or uid in recorded:
                return
            self._fail("I4", "a Workload of somebody else is deleted at the end")
        for slot in slots:
            captured = set(slot.get("memberUIDs", ()))
            if slot["phase"] == "Cleanup" and (uid == slot.get("workloadUID") or owners & captured):
                return
        standing = {
            pod["metadata"]["uid"]
            for pod in self.cluster._objects[PODS].values()
            if not going(pod) and not ended(pod)
        }
        if owners & self._mine and not owners & standing:
            return
        for pod in self.pods():
            if pod["metadata"]["uid"] in owners:
                role, ordinal = role_of(pod), ordinal_of(pod)
                counts = [self.counts().get(role, 0), self._counts_at_pass.get(role, 0)]
                if ordinal is not None and ordinal >= min(counts):
                    return
        self._fail("I4", f"Workload {workload['metadata']['name']} is deleted without licence")

    def _on_ungate(self, pod: Json) -> None:
        uid = pod["metadata"]["uid"]
        if uid not in self._mine:
            return
        for workload in self.cluster._objects[WORKLOADS].values():
            owners = {each["uid"] for each in workload["metadata"].get("ownerReferences") or []}
            if uid in owners:
                self.checked["I12"] += 1
                reserved = self._reserved_at.get(workload["metadata"]["uid"], 0)
                if reserved < self._made_at[uid]:
                    self._fail("I12", f"{pod['metadata']['name']} runs on an older reservation")

    def _routes_well(self, pod: Json) -> None:
        if pod["metadata"]["uid"] not in self._mine or going(pod):
            return
        if labels_of(pod).get(ROUTING_LABEL) != "true":
            return
        self.checked["I8"] += 1
        container = pod["spec"]["containers"][0]
        all_answer = any(
            word.startswith("--data-parallel-") for word in container.get("args", ())
        ) or any(each["name"] == "VLLM_DP_RANK" for each in container.get("env", ()))
        index = labels_of(pod).get(MEMBER_INDEX_LABEL)
        if total_of(pod) > 1 and index != "0" and not all_answer:
            self._fail("I8", f"{pod['metadata']['name']} answers and is no leader")

    def end_pass(self) -> None:
        """Check what holds between passes only: a condemned replica answers nothing."""
        for role, slot in self.slots().items():
            if slot["phase"] != "Cleanup":
                continue
            for pod in self.at(role, slot["ordinal"]):
                captured = pod["metadata"]["uid"] in slot.get("memberUIDs", ())
                answers = not going(pod) and labels_of(pod).get(ROUTING_LABEL)
                if captured and answers and self._is_buildable():
                    self._fail("I8", f"{pod['metadata']['name']} is condemned and still answers")

    def _is_buildable(self) -> bool:
        """Whether anything may be done at all."""
        found = self.deployment()
        return found is not None and bool(expected(self.cluster, found))

    def _peers_are_there(self) -> None:
        if self._was_going or self.deployment() is None:
            return
        for pod in self.pods():
            if total_of(pod) > 1:
                self.checked["I7"] += 1
                name = f"{self.name}-{role_of(pod)}-r{ordinal_of(pod)}"
                if (self.namespace, name) not in self.cluster._objects[SERVICES]:
                    self._fail("I7", f"{name} is missing and {pod['metadata']['name']} needs it")

    def _record_is_sound(self, after: Json, before: Json | None, by_operator: bool) -> None:
        annotations = after["metadata"].get("annotations") or {}
        text = annotations.get(REPLACEMENTS_ANNOTATION)
        if text is None or not by_operator:
            return
        old_text = ((before or {}).get("metadata", {}).get("annotations") or {}).get(
            REPLACEMENTS_ANNOTATION
        )
        if text == old_text:
            return
        self.checked["I11"] += 1
        record = json.loads(text)
        roles = {role["name"] for role in after["spec"]["roles"]}
        names = {key for key in record if not key.startswith("/")}
        if not names or not names <= roles:
            self._fail("I11", f"the record names {names} and there are {roles}")
        old = json.loads(old_text) if old_text else {}
        for role in names:
            if role in old and old[role]["ordinal"] != record[role]["ordinal"]:
                self._fail("R1", f"{role} goes from one replacement to the next in one write")
            if role not in old:
                self._may_begin(after, role, record[role])

    def _may_begin(self, deployment: Json, role: str, slot: Json) -> None:
        self.checked["I3"] += 1
        count, ordinal = self.counts()[role], slot["ordinal"]
        standing = {
            number: [pod for pod in self.at(role, number) if not going(pod) and not ended(pod)]
            for number in range(count)
        }
        admitted = {number: self._admitted(pods) for number, pods in standing.items()}
        mine = standing.get(ordinal, [])
        if slot["cause"] == "outdated":
            if not all(admitted.values()):
                self._fail("I3", f"{role}/{ordinal} begins while {admitted}")
            if not self._differs(deployment, role, ordinal, mine):
                self._fail("I6", f"{role}/{ordinal} is replaced and nothing about it differs")
        elif slot["cause"] == "queued":
            # One that is admitted between the look and the record cannot be told apart.
            if admitted[ordinal] and not self._admitted_since(mine):
                self._fail("I3", f"{role}/{ordinal} is said to wait and is admitted")
            if not self._differs(deployment, role, ordinal, mine):
                self._fail("I6", f"{role}/{ordinal} is replaced and nothing about it differs")
        elif mine and len(mine) >= total_of(mine[0]):
            self._fail("I6", f"{role}/{ordinal} is said to be broken and is not")
        self.checked["I6"] += 1

    def _admitted(self, pods: list[Json]) -> bool:
        uids = {pod["metadata"]["uid"] for pod in pods}
        return any(
            condition(workload, "Admitted") == "True"
            and not going(workload)
            and uids & {each["uid"] for each in workload["metadata"].get("ownerReferences") or []}
            for workload in self.cluster._objects[WORKLOADS].values()
        )

    def _admitted_since(self, pods: list[Json]) -> bool:
        uids = {pod["metadata"]["uid"] for pod in pods}
        return any(
            self._admitted_at.get(workload["metadata"]["uid"], 0) > self._pass_began
            and uids & {each["uid"] for each in workload["metadata"].get("ownerReferences") or []}
            for workload in self.cluster._objects[WORKLOADS].values()
        )

    def _differs(self, deployment: Json, role: str, ordinal: int, pods: list[Json]) -> bool:
        wanted = expected(self.cluster, deployment)[role]
        return any(
            make_of(pod) != make_of(wanted.pod(ordinal, 0))
            or pod["metadata"]["annotations"][SPEC_HASH_ANNOTATION]
            != wanted.hash(ordinal, int(labels_of(pod)[MEMBER_INDEX_LABEL]))
            for pod in pods
        )


def expected(cluster: MemCluster, deployment: Json) -> Any:
    """Return the render of *deployment* as the cluster has it; empty when it cannot be built."""
    types = {
        obj["metadata"]["name"]: InstanceType.model_validate(obj)
        for obj in cluster._objects[INSTANCE_TYPES].values()
    }
    try:
        return render(ModelDeployment.model_validate(deployment), types)
    except Unrenderable:
        return {}


def instance_of(pod: Json) -> str:
    """Return the deployment that *pod* says it belongs to."""
    return str(labels_of(pod).get(APP_INSTANCE_LABEL, ""))
