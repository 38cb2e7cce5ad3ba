"""
Reconciles ModelDeployments: reads everything from the API server, asks the plan, carries it out.

A watch only says that there is something to look at; whatever deletes, creates, admits or proves
a place vacant is decided from reads of the same pass. A read that fails ends the pass: absence is
an answer and silence is none. The record is the first write of every pass, in one place, and when
it is refused nothing else is written.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from modelpool_api.names import (
    APP_INSTANCE_LABEL,
    APP_NAME_LABEL,
    ROUTING_LABEL,
    SLOT_ANNOTATION,
    EventReason,
)
from modelpool_api.v1alpha1.instancetype import InstanceType
from modelpool_api.v1alpha1.modeldeployment import ModelDeployment
from modelpool_kube.errors import AlreadyExists, Conflict, KubeError, NotFound, NotServed
from modelpool_kube.kinds import (
    INSTANCE_TYPES,
    MODEL_DEPLOYMENTS,
    PODS,
    SERVICES,
    WORKLOADS,
    Json,
    Kind,
    annotation,
    controller_of,
    is_controlled_by,
    meta,
    uid,
    version_of,
)
from modelpool_kube.port import ClusterPort
from modelpool_kube.watch import Key, Notice

from ..plan.modeldeployment import kueue
from ..plan.modeldeployment.actions import (
    Action,
    CreatePod,
    CreateService,
    DeletePod,
    DeleteService,
    DeleteWorkload,
    Note,
    PatchService,
    Route,
)
from ..plan.modeldeployment.one_pass import POLL_S, Plan, plan
from ..plan.modeldeployment.render import APP
from ..plan.modeldeployment.sight import Observed, read_member, read_workload
from ..plan.modeldeployment.status import status_patch

log = logging.getLogger(__name__)

LOOKS = 4
"""Passes in a row without a pause; what is left then waits for the next turn."""

Tell = Callable[[Json, Note], Awaitable[None]]
"""Writes an Event about an object; may fold what repeats, and does not raise."""


class ModelDeployments:
    """The reconciler. One `reconcile` at a time for each key, as `workqueue.work` has it."""

    def __init__(self, port: ClusterPort, tell: Tell) -> None:
        self._port = port
        self._tell = tell
        self._told: dict[Key, frozenset[Note]] = {}
        """Warnings that stand; each is told once, until it has gone and come back."""
        self._refused: dict[Key, dict[str, str]] = {}
        """What the creates of the last pass found in their way."""

    async def reconcile(self, key: Key) -> float | None:
        """
        Do what is to be done about one ModelDeployment.

        Returns:
            Seconds after which to look again, or None.

        Raises:
            KubeError: the pass ended early; the next one begins at the reads.
        """
        for _ in range(LOOKS):
            raw = await self._read(key)
            if raw is None:
                self._told.pop(key, None)
                self._refused.pop(key, None)
                return None
            try:
                deployment = ModelDeployment.model_validate(raw)
            except ValidationError as error:
                await self._cannot_read(key, raw, error)
                return None
            before = self._refused.get(key, {})
            seen = await self._observe(raw, deployment, tuple(before.values()))
            decided = plan(seen)
            refused: dict[str, str] = {}
            failed = await self._act(key, raw, decided, refused)
            self._refused[key] = refused
            if failed is not None:
                raise failed
            if refused or before:
                return POLL_S
            if not decided.again:
                return decided.requeue_s
        return 0.0

    async def _read(self, key: Key) -> Json | None:
        try:
            return await self._port.get(MODEL_DEPLOYMENTS, *key)
        except NotFound:
            return None

    async def _observe(
        self, raw: Json, deployment: ModelDeployment, refused: tuple[str, ...]
    ) -> Observed:
        """Read what a plan needs. Pods before Workloads: only Pods can make a Workload appear."""
        namespace, name = deployment.metadata.namespace, deployment.metadata.name
        types: dict[str, InstanceType] = {}
        for each in sorted({role.instance_type for role in deployment.spec.roles}):
            found = await self._type(each)
            if found is not None:
                types[each] = found
        pods = (await self._port.list(PODS, namespace, labels=kueue.GROUP_LABEL)).items
        workloads = await self._workloads(namespace)
        labels = f"{APP_NAME_LABEL}={APP},{APP_INSTANCE_LABEL}={name}"
        services = (await self._port.list(SERVICES, namespace, labels=labels)).items
        mine = uid(raw)
        return Observed(
            deployment=deployment,
            types=types,
            members=tuple(read_member(pod) for pod in pods if is_controlled_by(pod, mine)),
            strangers=tuple(read_member(pod) for pod in pods if not is_controlled_by(pod, mine)),
            workloads=tuple(read_workload(each) for each in workloads),
            services=tuple(each for each in services if is_controlled_by(each, mine)),
            now=self._port.wall(),
            refused=refused,
        )

    async def _type(self, name: str) -> InstanceType | None:
        try:
            return InstanceType.model_validate(await self._port.get(INSTANCE_TYPES, None, name))
        except (NotFound, ValidationError):
            return None

    async def _workloads(self, namespace: str) -> tuple[Json, ...]:
        try:
            return (await self._port.list(WORKLOADS, namespace)).items
        except NotServed:
            raise KubeError(
                "Kueue's Workloads are not served; install Kueue, which admits the replicas of "
                "ModelDeployments",
                call="list workloads",
            ) from None

    async def _cannot_read(self, key: Key, raw: Json, error: ValidationError) -> None:
        """Say that a stored object is not one of ours to understand; touch nothing."""
        first = error.errors()[0]
        at = ".".join(str(part) for part in first["loc"])
        text = f"{at}: {first['msg']}; the CRD that is installed does not fit this operator"
        await self._tell_once(key, raw, (Note(EventReason.RENDER_FAILED, text, is_warning=True),))

    # Carrying out

    async def _act(
        self, key: Key, raw: Json, decided: Plan, refused: dict[str, str]
    ) -> KubeError | None:
        """Carry out one plan; return the error that ends the pass although it was carried out."""
        namespace = key[0]
        if decided.record is not None:
            raw = await self._port.patch_merge(
                MODEL_DEPLOYMENTS, *key, decided.record, version=version_of(raw)
            )
        failed: KubeError | None = None
        for action in decided.actions:
            match action:
                case CreateService(body=body):
                    await self._create_service(namespace, uid(raw), body, refused)
                case CreatePod(body=body):
                    failed = await self._create_pod(namespace, uid(raw), body, refused) or failed
                case _:
                    await self._change(namespace, action)
        await self._tell_once(key, raw, decided.notes)
        if decided.status is not None:
            patch = status_patch(raw.get("status"), decided.status)
            if patch:
                await self._port.patch_status(
                    MODEL_DEPLOYMENTS, *key, {"status": patch}, version=version_of(raw)
                )
        return failed

    async def _change(self, namespace: str, action: Action) -> None:
        port = self._port
        match action:
            case DeletePod(name=name, uid=its):
                await self._delete(PODS, namespace, name, its)
            case DeleteWorkload(name=name, uid=its):
                await self._delete(WORKLOADS, namespace, name, its)
            case DeleteService(name=name, uid=its):
                await self._delete(SERVICES, namespace, name, its)
            case Route(name=name, version=version, on=on):
                label = {ROUTING_LABEL: "true" if on else None}
                patch: Json = {"metadata": {"labels": label}}
                try:
                    await port.patch_merge(PODS, namespace, name, patch, version=version)
                except (Conflict, NotFound):
                    pass  # it changed, and its change wakes us
            case PatchService(name=name, version=version, patch=patch):
                await port.patch_merge(SERVICES, namespace, name, patch, version=version)
            case CreatePod() | CreateService():
                raise AssertionError("creates are carried out elsewhere")

    async def _delete(self, kind: Kind, namespace: str, name: str, its: str) -> None:
        """Delete the object with that UID; done as well when it is gone already."""
        try:
            await self._port.delete(kind, namespace, name, uid=its)
        except NotFound:
            pass
        except Conflict:
            # Listed and not read: a right to read single Workloads is needed for nothing else.
            found = await self._port.list(kind, namespace, fields=f"metadata.name={name}")
            if any(uid(each) == its for each in found.items):
                raise

    async def _create_service(
        self, namespace: str, owner: str, body: Json, refused: dict[str, str]
    ) -> None:
        """Create a Service. A failure ends the pass: members need their peers' names before."""
        try:
            await self._port.create(SERVICES, namespace, body)
        except AlreadyExists:
            await self._look_who(SERVICES, namespace, str(meta(body)["name"]), owner, refused)

    async def _create_pod(
        self, namespace: str, owner: str, body: Json, refused: dict[str, str]
    ) -> KubeError | None:
        """Create a member; return what went wrong, so that the others are created as well."""
        peers = (body.get("spec") or {}).get("subdomain")
        if f"{SERVICES.plural}/{peers}" in refused:
            return None  # the name by which its peers would find it is somebody else's
        try:
            try:
                await self._port.create(PODS, namespace, body)
            except AlreadyExists:
                await self._look_who(PODS, namespace, str(meta(body)["name"]), owner, refused)
        except KubeError as error:
            # Perhaps it was made all the same; only the next look can tell.
            return error
        return None

    async def _look_who(
        self, kind: Kind, namespace: str, name: str, owner: str, refused: dict[str, str]
    ) -> None:
        """Find out whose the object is that has a name of ours."""
        try:
            there = await self._port.get(kind, namespace, name)
        except NotFound:
            return  # it has gone since; the next look decides
        if not is_controlled_by(there, owner):
            refused[f"{kind.plural}/{name}"] = (
                f"{kind.kind} {name} is not of this deployment and has the name that it needs; "
                "delete or rename it"
            )

    async def _tell_once(self, key: Key, raw: Json, notes: Iterable[Note]) -> None:
        before = self._told.get(key, frozenset())
        standing = frozenset(note for note in notes if note.is_warning)
        self._told[key] = standing
        for note in notes:
            if note not in before:
                await self._tell(raw, note)


# Who is to be looked at when something changes


def key_of_deployment(notice: Notice) -> list[Key]:
    """Return the key of a ModelDeployment whose change is not of our own making."""
    found = meta(notice.object)
    key = (str(found.get("namespace", "")), str(found.get("name", "")))
    return [key] if notice.before is None or _wish(notice.before) != _wish(notice.object) else []


def _wish(obj: Json) -> tuple[Any, ...]:
    found = meta(obj)
    return (
        found.get("generation"),
        found.get("deletionTimestamp"),
        tuple(found.get("finalizers") or ()),
        annotation(obj, SLOT_ANNOTATION),
    )


def key_of_child(notice: Notice) -> list[Key]:
    """Return the key of the ModelDeployment that a Pod or Service belongs to."""
    owner = controller_of(notice.object)
    if owner is None or owner.get("kind") != MODEL_DEPLOYMENTS.kind:
        return []
    return [(str(meta(notice.object).get("namespace", "")), str(owner.get("name", "")))]


def keys_of_workload(notice: Notice, pods: Iterable[Json]) -> list[Key]:
    """
    Return the keys of the ModelDeployments that own a Pod that a Workload was made of.

    Args:
        notice: The change.
        pods: Pods as they were seen last; a Workload that outlives them wakes nobody, which is
            why a pass with something under way comes back by itself.
    """
    if notice.before is not None and _judgement(notice.before) == _judgement(notice.object):
        return []
    owners = {str(each.get("uid", "")) for each in meta(notice.object).get("ownerReferences") or []}
    found = []
    for pod in pods:
        controller = controller_of(pod)
        if uid(pod) in owners and controller is not None:
            if controller.get("kind") == MODEL_DEPLOYMENTS.kind:
                found.append((str(meta(pod).get("namespace", "")), str(controller.get("name", ""))))
    return sorted(set(found))


def _judgement(obj: Json) -> tuple[Any, ...]:
    status = obj.get("status") or {}
    conditions = [
        (each.get("type"), each.get("status"), each.get("reason"))
        for each in status.get("conditions") or []
    ]
    return (
        conditions,
        status.get("admission"),
        status.get("admissionChecks"),
        meta(obj).get("ownerReferences"),
        meta(obj).get("deletionTimestamp"),
        (obj.get("spec") or {}).get("active"),
    )


def keys_of_type(notice: Notice, deployments: Mapping[Key, Json]) -> list[Key]:
    """Return the keys of the ModelDeployments with a role on an InstanceType that changed."""
    name = meta(notice.object).get("name")
    return sorted(
        key
        for key, obj in deployments.items()
        if any(
            role.get("instanceType") == name for role in (obj.get("spec") or {}).get("roles") or []
        )
    )
