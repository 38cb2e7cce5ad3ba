"""
The Services of a deployment: one in front, one for each role, one for the peers of each replica.

Peers must find each other before they can become ready, and as long as one of them runs: a
collective that cannot resolve its peers hangs instead of failing. So peer Services are there
before the members, never depend on readiness or routing, and go after the last member.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from modelpool_api.names import (
    API_VERSION,
    APP_MANAGED_BY_LABEL,
    APP_PART_OF_LABEL,
    ORDINAL_LABEL,
    PART_OF,
    ROUTING_LABEL,
)
from modelpool_api.v1alpha1.modeldeployment import ModelDeployment, Role

from .actions import Action, CreateService, DeleteService, PatchService
from .command import serving_port
from .render import identity, peer_name, role_service_name, serving_port_name
from .sight import Member

Json = dict[str, Any]


def wanted_services(
    deployment: ModelDeployment, counts: Mapping[str, int], members: Sequence[Member]
) -> list[Json]:
    """
    Return the Services that should be, in the order in which they are made.

    Args:
        deployment: Whose.
        counts: Replicas that are asked for, by role.
        members: All its members, those that are going included: as long as one with peers is
            there, so is the name by which they find it.
    """
    name = deployment.metadata.name
    first = deployment.spec.roles[0]
    answers = {ROUTING_LABEL: "true"}
    found = [_service(deployment, first, name, {**identity(name, first.name), **answers})]
    for role in deployment.spec.roles:
        labels = identity(name, role.name)
        own = role_service_name(name, role.name)
        found.append(_service(deployment, role, own, {**labels, **answers}))
        desired = set(range(counts[role.name])) if role.size > 1 else set()
        still = {
            member.ordinal
            for member in members
            if member.role == role.name and member.ordinal is not None and (member.total or 2) > 1
        }
        for ordinal in sorted(desired | still):
            found.append(_peer(deployment, role, ordinal))
    return found


def _service(deployment: ModelDeployment, role: Role, name: str, selector: Json) -> Json:
    meta = deployment.metadata
    owner = {
        "apiVersion": API_VERSION,
        "kind": "ModelDeployment",
        "name": meta.name,
        "uid": meta.uid,
        "controller": True,
    }
    port = {
        "name": serving_port_name(role),
        "port": serving_port(role),
        # By name: while a port is being edited each Pod has its own.
        "targetPort": serving_port_name(role),
        "protocol": role.ports[0].protocol.value if role.ports else "TCP",
    }
    return {
        "metadata": {
            "name": name,
            "labels": {
                **identity(meta.name, role.name),
                APP_PART_OF_LABEL: PART_OF,
                APP_MANAGED_BY_LABEL: PART_OF,
            },
            "ownerReferences": [owner],
        },
        "spec": {
            "type": "ClusterIP",
            "selector": selector,
            "ports": [port],
            "publishNotReadyAddresses": False,
        },
    }


def _peer(deployment: ModelDeployment, role: Role, ordinal: int) -> Json:
    name = deployment.metadata.name
    selector = {**identity(name, role.name), ORDINAL_LABEL: str(ordinal)}
    service = _service(deployment, role, peer_name(name, role.name, ordinal), selector)
    service["spec"] |= {"clusterIP": "None", "publishNotReadyAddresses": True}
    return service


def align(wanted: Iterable[Json], standing: Iterable[Json]) -> tuple[list[Action], list[Action]]:
    """Return what makes *standing* into *wanted*: what comes before the Pods, and what after."""
    there = {str(each["metadata"]["name"]): each for each in standing}
    first: list[Action] = []
    for service in wanted:
        old = there.pop(service["metadata"]["name"], None)
        if old is None:
            first.append(CreateService(service))
            continue
        patch = _difference(old.get("spec") or {}, service["spec"])
        if patch and old["metadata"].get("deletionTimestamp") is None:
            meta = old["metadata"]
            first.append(PatchService(meta["name"], str(meta["resourceVersion"]), {"spec": patch}))
    last: list[Action] = [
        DeleteService(name, str(old["metadata"]["uid"]))
        for name, old in sorted(there.items())
        if old["metadata"].get("deletionTimestamp") is None
    ]
    return first, last


def _difference(old: Json, new: Json) -> Json:
    patch: Json = {}
    selector = old.get("selector") or {}
    if selector != new["selector"]:
        gone: dict[str, str | None] = {key: None for key in selector if key not in new["selector"]}
        patch["selector"] = {**gone, **new["selector"]}
    ports = [
        {key: port.get(key) for key in ("name", "port", "targetPort", "protocol")}
        for port in old.get("ports") or []
    ]
    if ports != new["ports"]:
        patch["ports"] = new["ports"]
    if old.get("type", "ClusterIP") != new["type"]:
        patch["type"] = new["type"]
    if bool(old.get("publishNotReadyAddresses")) != new["publishNotReadyAddresses"]:
        patch["publishNotReadyAddresses"] = new["publishNotReadyAddresses"]
    return patch
