"""What is read from audit logs; needs no cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cluster_roles import (
    LESS_THAN_SHIPPED,
    ONLY_GRANTED,
    OWN_FILE,
    Record,
    Right,
    compiled_rules,
    operator_rights,
    own_file_rules,
    router_rights,
)
from harness import API_SERVER_STARTS
from modelpool_api.names import OPERATOR_MANAGER, ROUTER_MANAGER

ACCOUNT = "system:serviceaccount:lab:front"


def event(
    program: str,
    verb: str,
    resource: str,
    group: str = "",
    *,
    user: str = ACCOUNT,
    code: int = 200,
    at_s: int = 30,
) -> dict[str, Any]:
    """Return a line of an audit log."""
    name, _, below = resource.partition("/")
    where = {"resource": name, "namespace": "lab", "apiGroup": group, "subresource": below}
    return {
        "requestReceivedTimestamp": f"2026-01-02T03:04:{at_s:02}.000001Z",
        "userAgent": program,
        "verb": verb,
        "user": {"username": user},
        "objectRef": where,
        "responseStatus": {"code": code, "message": "said no" if code == 403 else ""},
    }


def read(folder: Path, *events: dict[str, Any]) -> Record:
    """Return the record of *events*, with the last line half written."""
    log = folder / "audit.jsonl"
    log.write_text("".join(json.dumps(each) + "\n" for each in events) + '{"userAg')
    record = Record()
    record.read(log)
    return record


def test_what_programs_of_ours_did_is_counted_and_nothing_else(tmp_path: Path) -> None:
    record = read(
        tmp_path,
        event(ROUTER_MANAGER, "list", "pods"),
        event(ROUTER_MANAGER, "list", "pods"),
        event("kubectl/v1", "get", "secrets", code=403),
        event(OPERATOR_MANAGER, "patch", "modelpools/status", "modelpool.dev"),
    )

    assert record.used[ROUTER_MANAGER] == {Right("", "pods", "list"): 2}
    status = Right("modelpool.dev", "modelpools/status", "patch")
    assert record.used[OPERATOR_MANAGER] == {status: 1}
    assert (record.refused, record.masters) == ([], [])


def test_a_refusal_and_the_rights_of_a_person_are_told(tmp_path: Path) -> None:
    record = read(
        tmp_path,
        event(ROUTER_MANAGER, "get", "nodes", code=403),
        event(OPERATOR_MANAGER, "list", "pods", user="admin"),
    )

    gone = event(OPERATOR_MANAGER, "create", "pods", code=403)
    gone["responseStatus"]["message"] = "unable, because it is being terminated"
    assert read(tmp_path, gone).refused == []
    told = [f"modelpool-router as {ACCOUNT}: get nodes lab/: said no"]
    assert list(map(str, record.refused)) == told
    assert record.masters == ["modelpool-operator as admin: list pods lab/"]
    assert record.used == {}


def renewal(at_s: int, *, namespace: str = "lab") -> dict[str, Any]:
    """Return that a Role is written."""
    made = event("kubectl/v1", "patch", "roles", "rbac.authorization.k8s.io", at_s=at_s)
    made["objectRef"]["namespace"] = namespace
    return made


def test_a_refusal_is_early_only_when_a_role_was_renewed_just_then(tmp_path: Path) -> None:
    refused, granted = (
        event(ROUTER_MANAGER, "get", "pods", code=code, at_s=at_s)
        for code, at_s in ((403, 30), (200, 40))
    )

    def counted(*before: dict[str, Any], last: dict[str, Any] = granted) -> tuple[int, int]:
        record = read(tmp_path, *before, refused, last)
        return len(record.refused), len(record.early)

    # That it was granted later says nothing by itself.
    assert counted() == (1, 0)
    assert counted(renewal(20)) == (1, 0)
    assert counted(renewal(28)) == (0, 1)
    assert counted(renewal(28, namespace="other")) == (1, 0)
    assert counted(renewal(35)) == (0, 1)
    assert counted(renewal(41)) == (1, 0)
    # One that was never granted is none of that.
    assert counted(renewal(28), last=event(ROUTER_MANAGER, "list", "pods", at_s=40)) == (1, 0)

    started = {"verb": API_SERVER_STARTS, "requestReceivedTimestamp": "2026-01-02T03:04:20+00:00"}
    assert counted(started) == (0, 1)
    started["requestReceivedTimestamp"] = "2026-01-02T03:04:10+00:00"
    assert counted(started) == (1, 0)


def test_what_routers_with_a_file_of_their_own_ask_for_is_told(tmp_path: Path) -> None:
    own = ACCOUNT + OWN_FILE
    asked = event(ROUTER_MANAGER, "list", "pods", user=own)
    other = event(ROUTER_MANAGER, "list", "modelpools", "modelpool.dev")
    found = {**event(ROUTER_MANAGER, "get", "", user=own), "requestURI": "/apis/modelpool.dev/v1"}
    del found["objectRef"]

    assert read(tmp_path, asked, other).own_file == {"": 1}
    assert read(tmp_path, asked, found).own_file == {"": 1, "modelpool.dev": 1}


def test_what_an_account_is_refused_that_lacks_a_right_on_purpose_is_nothing(
    tmp_path: Path,
) -> None:
    less = f"{ACCOUNT}-{LESS_THAN_SHIPPED}{OWN_FILE}"
    tried = [event(ROUTER_MANAGER, "get", "pods", user=less, code=code) for code in (403, 200)]

    record = read(tmp_path, *tried)

    assert (record.refused, record.used) == ([], {})


def test_what_was_never_used_is_named_but_for_what_is_passed_on(tmp_path: Path) -> None:
    used = [
        *(event(ROUTER_MANAGER, r.verb, r.resource, r.group) for r in sorted(router_rights())),
        *(event(OPERATOR_MANAGER, r.verb, r.resource, r.group) for r in sorted(operator_rights())),
    ]
    create = Right("", "services", "create")

    assert read(tmp_path, *used).unused() == []
    without = [
        each
        for each in used
        if (each["verb"], each["objectRef"]["resource"])
        != (
            create.verb,
            create.resource,
        )
    ]
    assert read(tmp_path, *without).unused() == ["modelpool-operator: create services"]
    # It lists ReplicaSets itself, and watches none; routers do.
    idle = [
        each
        for each in used
        if each["userAgent"] == ROUTER_MANAGER or each["objectRef"]["resource"] != "replicasets"
    ]
    assert read(tmp_path, *idle).unused() == ["modelpool-operator: list replicasets.apps"]
    assert ONLY_GRANTED < router_rights() & operator_rights()


def test_a_role_asks_for_nothing_by_a_star() -> None:
    for right in operator_rights() | router_rights():
        assert "*" not in (right.group, right.resource, right.verb)


def test_the_role_for_a_router_of_its_own_file_is_what_the_operator_would_compile() -> None:
    members = [{"deploymentRef": {"name": name}} for name in ("large", "small")]
    pool = {"metadata": {"name": "p", "namespace": "n"}, "spec": {"members": members}}
    making = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create"]}

    def sorted_of(rules: list[Any]) -> list[str]:
        return sorted(
            json.dumps({key: sorted(value) for key, value in rule.items()}, sort_keys=True)
            for rule in rules
        )

    compiled = [each for each in compiled_rules(pool) if each["resources"] != ["modelpools"]]
    assert sorted_of(own_file_rules(pool)) == sorted_of([*compiled, making])
