"""
What should stand: the Pods of a role, seat by seat, as a pure function of the specification.

The hash of a seat is taken from this render and never from a live Pod, which the API server and
Kueue have changed since. What is patched at run time, the routing label, is no part of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from modelpool_api.names import (
    API_VERSION,
    APP_COMPONENT_LABEL,
    APP_INSTANCE_LABEL,
    APP_MANAGED_BY_LABEL,
    APP_NAME_LABEL,
    APP_PART_OF_LABEL,
    COMMAND_MODE_ANNOTATION,
    LEADER_ADDRESS_ENV,
    MEMBER_INDEX_ENV,
    MEMBER_INDEX_LABEL,
    ORDINAL_LABEL,
    PART_OF,
    REPLICA_SIZE_ENV,
    ROLE_KIND_LABEL,
    SPEC_HASH_ANNOTATION,
    group_name,
)
from modelpool_api.v1alpha1.instancetype import InstanceType
from modelpool_api.v1alpha1.modeldeployment import ModelDeployment, Role

from . import kueue
from .argv import all_answer
from .command import CommandLine, command_line, serving_port
from .quantity import times
from .sight import CommandMode

Json = dict[str, Any]

APP = "model-deployment"
DEFAULT_SHM = "16Gi"
SERVING_PORT_NAME = "http"
HASH_LENGTH = 16


class Unrenderable(Exception):
    """The configuration cannot be built; the message says of which field, why, and the way out."""


class RoleRender:
    """The render of one role. Made for one pass; seats are rendered when they are asked for."""

    def __init__(self, deployment: ModelDeployment, role: Role, kind: InstanceType) -> None:
        self.role = role
        self.name = role.name
        self.size = role.size
        self.count = 0 if deployment.spec.suspend else role.replicas
        """Replicas that should stand."""
        self.queue = kind.spec.queue_name
        self.deployment = deployment
        self.placement = placement(role, kind)
        self._line = command_line(deployment.spec, role)
        self._resources = _resources(role, kind)
        self._kind = kind
        self._seats: dict[tuple[int, int], Json] = {}

    def group(self, ordinal: int) -> str:
        """Return the pod group of a replica."""
        meta = self.deployment.metadata
        return group_name(meta.namespace, meta.name, self.name, ordinal)

    def pod(self, ordinal: int, index: int) -> Json:
        """Return the Pod of one seat, as it is created. Not to be changed."""
        found = self._seats.get((ordinal, index))
        if found is None:
            found = self._pod(ordinal, index)
            self._seats[ordinal, index] = found
        return found

    def hash(self, ordinal: int, index: int) -> str:
        """Return the hash of one seat."""
        return str(self.pod(ordinal, index)["metadata"]["annotations"][SPEC_HASH_ANNOTATION])

    def hashes(self, ordinal: int) -> tuple[str, ...]:
        """Return the hashes of all seats of a replica, in order."""
        return tuple(self.hash(ordinal, index) for index in range(self.size))

    def _pod(self, ordinal: int, index: int) -> Json:
        meta = self.deployment.metadata
        subdomain = peer_name(meta.name, self.name, ordinal)
        labels = {
            **identity(meta.name, self.name),
            APP_PART_OF_LABEL: PART_OF,
            APP_MANAGED_BY_LABEL: PART_OF,
            ROLE_KIND_LABEL: self.role.kind.value.lower(),
            ORDINAL_LABEL: str(ordinal),
            MEMBER_INDEX_LABEL: str(index),
            kueue.GROUP_LABEL: self.group(ordinal),
            kueue.QUEUE_LABEL: self.queue,
        }
        mode = CommandMode.TAKEOVER if self.role.command else CommandMode.MANAGED
        annotations = {
            kueue.TOTAL_ANNOTATION: str(self.size),
            kueue.ROLE_HASH_ANNOTATION: self.name,
            kueue.SERVING_ANNOTATION: "true",
            COMMAND_MODE_ANNOTATION: mode.value,
        }
        if self.role.topology is not None:
            annotations[kueue.TOPOLOGY_ANNOTATION] = self.role.topology.required_level
        spec = self._pod_spec(subdomain, index)
        named: Json = {"generateName": f"{meta.name}-{self.name}-"}
        if self.size > 1:
            name = f"{subdomain}-m{index}"
            named = {"name": name}
            spec |= {"hostname": name, "subdomain": subdomain}
        body = {"labels": labels, "annotations": annotations, "spec": spec}
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        annotations[SPEC_HASH_ANNOTATION] = hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]
        owner = {
            "apiVersion": API_VERSION,
            "kind": "ModelDeployment",
            "name": meta.name,
            "uid": meta.uid,
            "controller": True,
        }
        return {
            "metadata": {
                **named,
                "labels": labels,
                "annotations": annotations,
                "ownerReferences": [owner],
            },
            "spec": spec,
        }

    def _pod_spec(self, subdomain: str, index: int) -> Json:
        role, kind = self.role, self._kind.spec
        shm = {"medium": "Memory", "sizeLimit": role.shm_size or DEFAULT_SHM}
        volumes: list[Json] = [{"name": "shm", "emptyDir": shm}]
        mounts: list[Json] = [{"name": "shm", "mountPath": "/dev/shm"}]
        for number, each in enumerate(role.additional_volumes):
            name = f"volume-{number}"
            source = each.wire()
            volumes.append({"name": name, **{k: source[k] for k in _SOURCES if k in source}})
            mount: Json = {"name": name, "mountPath": each.mount_path}
            if each.read_only:
                mount["readOnly"] = True
            if each.sub_path:
                mount["subPath"] = each.sub_path
            mounts.append(mount)
        container = _container(role, self._line, self._resources, mounts)
        if self.size > 1:
            container["env"] = [*container.get("env", []), *_rank_env(subdomain, self.size)]
        answers = index == 0 or (not role.command and all_answer(container) is True)
        if self._line.health and answers:
            port = _ports(role)[0]["name"]
            container["readinessProbe"] = {
                "httpGet": {"path": self._line.health, "port": port},
                "periodSeconds": 2,
                "timeoutSeconds": 2,
            }
        spec: Json = {
            "restartPolicy": "Always",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": role.termination_grace_period_seconds,
            "containers": [container],
            "volumes": volumes,
        }
        if kind.node_selector:
            spec["nodeSelector"] = dict(kind.node_selector)
        if kind.tolerations:
            spec["tolerations"] = [each.wire() for each in kind.tolerations]
        if role.image_pull_secrets:
            spec["imagePullSecrets"] = [each.wire() for each in role.image_pull_secrets]
        return spec


_SOURCES = ("configMap", "secret", "hostPath", "persistentVolumeClaim")


def render(deployment: ModelDeployment, types: Mapping[str, InstanceType]) -> dict[str, RoleRender]:
    """
    Return the render of every role, by name.

    Raises:
        Unrenderable: nothing may be deleted for what cannot be built.
    """
    found: dict[str, RoleRender] = {}
    for number, role in enumerate(deployment.spec.roles):
        field = f"spec.roles[{number}]"
        kind = types.get(role.instance_type)
        if kind is None:
            raise Unrenderable(
                f'{field}.instanceType "{role.instance_type}": there is no InstanceType of that '
                "name; create it, or name another"
            )
        if not kind.spec.queue_name:
            raise Unrenderable(
                f'{field}.instanceType "{role.instance_type}": the InstanceType names no queue, '
                "and its Pods would run without being admitted; set its spec.queueName"
            )
        try:
            found[role.name] = RoleRender(deployment, role, kind)
        except ValueError as error:
            raise Unrenderable(
                f'{field}.instanceType "{role.instance_type}": {error}; correct the InstanceType'
            ) from None
    return found


def identity(deployment: str, role: str) -> dict[str, str]:
    """Return the three labels that say whose Pod it is; what Services select by."""
    return {
        APP_NAME_LABEL: APP,
        APP_INSTANCE_LABEL: deployment,
        APP_COMPONENT_LABEL: role,
    }


def role_service_name(deployment: str, role: str) -> str:
    """Return the name of the Service of a role."""
    return f"{deployment}-{role}"


def peer_name(deployment: str, role: str, ordinal: int) -> str:
    """Return the name of the peer Service of a replica."""
    return f"{deployment}-{role}-r{ordinal}"


def cards(role: Role, kind: InstanceType) -> int:
    """Return the whole cards of each Pod."""
    asked = role.resources.accelerator
    if asked is not None:
        return asked
    keys = kind.spec.accelerator
    has_cards = keys is not None and keys.card is not None
    return 1 if has_cards and not asks_for_slice(role) else 0


def asks_for_slice(role: Role) -> bool:
    """Return whether *role* asks for a share of a card."""
    wanted = role.resources
    return bool(
        wanted.accelerator_sliced_memory_percentage or wanted.accelerator_sliced_cores_percentage
    )


def placement(role: Role, kind: InstanceType) -> str:
    """Return what of *role* its InstanceType is asked for: type, share, who wrote the command."""
    wanted = role.resources
    return "/".join(
        (
            role.instance_type,
            str(cards(role, kind)),
            str(wanted.accelerator_sliced_memory_percentage),
            str(wanted.accelerator_sliced_cores_percentage),
            (CommandMode.TAKEOVER if role.command else CommandMode.MANAGED).value,
        )
    )


def _resources(role: Role, kind: InstanceType) -> Json:
    keys, wanted = kind.spec.accelerator, role.resources
    number = cards(role, kind)
    devices: dict[str, str] = {}
    if keys is not None:
        if keys.card is not None and number:
            devices[keys.card] = str(number)
        if keys.slice_memory is not None and wanted.accelerator_sliced_memory_percentage:
            devices[keys.slice_memory] = str(wanted.accelerator_sliced_memory_percentage)
        if keys.slice_cores is not None and wanted.accelerator_sliced_cores_percentage:
            devices[keys.slice_cores] = str(wanted.accelerator_sliced_cores_percentage)
    share, units = kind.spec.per_card, max(1, number)
    requests, limits = dict(devices), dict(devices)
    for name, amount in share.extra.items():
        requests[name] = limits[name] = times(amount, units)
    if share.memory is not None:
        requests["memory"] = limits["memory"] = times(share.memory, units)
    if share.cpu is not None:
        # No limit: a throttled server loses more than its neighbours win.
        requests["cpu"] = times(share.cpu, units)
    return {name: each for name, each in (("requests", requests), ("limits", limits)) if each}


def _container(role: Role, line: CommandLine, resources: Json, mounts: list[Json]) -> Json:
    container: Json = {"name": "main", "image": role.image, "ports": _ports(role)}
    if role.image_pull_policy is not None:
        container["imagePullPolicy"] = role.image_pull_policy.value
    if line.command:
        container["command"] = list(line.command)
    if line.args:
        container["args"] = list(line.args)
    if role.env:
        container["env"] = [{"name": each.name, "value": each.value} for each in role.env]
    if resources:
        container["resources"] = resources
    container["volumeMounts"] = mounts
    if role.privileged:
        container["securityContext"] = {"privileged": True}
    return container


def _ports(role: Role) -> list[Json]:
    if not role.ports:
        port = serving_port(role)
        return [{"containerPort": port, "protocol": "TCP", "name": SERVING_PORT_NAME}]
    found = []
    taken = {each.name for each in role.ports[1:]}
    first = "serving" if SERVING_PORT_NAME in taken else SERVING_PORT_NAME
    for number, each in enumerate(role.ports):
        port_: Json = {"containerPort": each.container_port, "protocol": each.protocol.value}
        name = each.name or (first if number == 0 else None)
        if name is not None:
            port_["name"] = name
        found.append(port_)
    return found


def serving_port_name(role: Role) -> str:
    """Return the name of the port that requests go to."""
    return str(_ports(role)[0]["name"])


def _rank_env(subdomain: str, size: int) -> list[Json]:
    index = f"metadata.labels['{MEMBER_INDEX_LABEL}']"
    return [
        {"name": LEADER_ADDRESS_ENV, "value": f"{subdomain}-m0.{subdomain}"},
        {"name": REPLICA_SIZE_ENV, "value": str(size)},
        {"name": MEMBER_INDEX_ENV, "valueFrom": {"fieldRef": {"fieldPath": index}}},
    ]
