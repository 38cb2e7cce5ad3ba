"""What is read from audit logs; needs no cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cluster_roles import Record, Right, operator_rights, router_rights
from modelpool_api.names import OPERATOR_MANAGER, ROUTER_MANAGER

ACCOUNT = "system:serviceaccount:lab:front"


def event(
    program: str, verb: str, resource: str, group: str = "", *, user: str = ACCOUNT, code: int = 200
) -> dict[str, Any]:
    """Return a line of an audit log."""
    name, _, below = resource.partition("/")
    where = {"resource": name, "namespace": "lab", "apiGroup": group, "subresource": below}
    return {
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
    later = (event(ROUTER_MANAGER, "get", "pods", code=code) for code in (403, 200))
    assert read(tmp_path, *later).refused == []
    assert record.refused == [f"modelpool-router as {ACCOUNT}: get nodes lab/: said no"]
    assert record.masters == ["modelpool-operator as admin: list pods lab/"]
    assert record.used == {}


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
    watch = [
        each
        for each in used
        if each["userAgent"] == ROUTER_MANAGER or each["objectRef"]["resource"] != "replicasets"
    ]
    assert read(tmp_path, *watch).unused() == []


def test_a_role_asks_for_nothing_by_a_star() -> None:
    for right in operator_rights() | router_rights():
        assert "*" not in (right.group, right.resource, right.verb)
