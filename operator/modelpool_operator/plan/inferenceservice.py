"""
InferenceService: one Deployment and one Service, and what is said about them. Pure.

Where a pool scales it, the mark of the slot travels down: replicas and mark of the Deployment are
written in one conditional patch, and the epoch of a slot never goes down. An observation in which
the Deployment is ahead of its InferenceService is old, or somebody removed the mark above; either
way nothing is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from modelpool_api.meta import set_condition
from modelpool_api.names import SLOT_ANNOTATION, SPEC_HASH_ANNOTATION, ConditionType, Reason
from modelpool_api.v1alpha1.container import Profile, ResourceAmounts
from modelpool_api.v1alpha1.inferenceservice import (
    Accelerator,
    InferenceService,
    InferenceServiceStatus,
    ServicePhase,
)
from modelpool_kube.kinds import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    SERVICES,
    Json,
    annotation,
    is_going,
    name_of,
)
from modelpool_kube.record import SlotId, read_mark

from . import render
from .members import FAILING
from .model import Action, Happened, Owner, Plan, patch_of

COMPONENT = "inference-service"
ENGINE = "engine"
"""Name of the container, and of its port."""
SHM_VOLUME = "modelpool-shm"
STARTUP_FAILURES = 8640
"""Startup probes may fail for a day: how long a load may take is the pool's or the user's to say,
and a kubelet that restarts a loading engine makes it begin anew."""
HEALTH = "/health"


@dataclass(frozen=True, slots=True)
class ObservedService:
    """One InferenceService and what belongs to it."""

    service: InferenceService
    obj: Json
    """The same, as it was read."""
    now: datetime
    deployment: Json | None
    front: Json | None
    """The Service."""
    pods: tuple[Json, ...] = ()
    pool: str | None = None
    """Pool of the namespace that lists it; the first by name."""
    live_slots: frozenset[SlotId] = frozenset()
    """Slots whose Lease exists, of those that marks name."""


def plan(seen: ObservedService) -> Plan:
    """Return what is to be done about an InferenceService."""
    meta = seen.service.metadata
    if meta.is_going:
        return Plan()  # what belongs to it is collected
    owner = Owner(INFERENCE_SERVICES, meta.name, meta.namespace, meta.uid)
    trouble = _trouble(seen, owner)
    action = None if trouble is not None else _action(seen, owner)
    status = _status(seen, trouble)
    before = seen.service.status or InferenceServiceStatus()
    return Plan(
        actions=() if action is None else (action,),
        status=status.wire(),
        events=_events(before, status),
        says_first=status.phase is ServicePhase.PENDING,
    )


def _trouble(seen: ObservedService, owner: Owner) -> tuple[Reason, str] | None:
    if seen.service.spec.accelerator is Accelerator.METAL:
        return (
            Reason.METAL_MEMBERS_UNSUPPORTED,
            "spec.accelerator is metal, which no Pod can use, so nothing is made; run it with a "
            "router on that machine, or set accelerator to gpu or cpu",
        )
    for kind, found in ((DEPLOYMENTS, seen.deployment), (SERVICES, seen.front)):
        if render.is_foreign(found, owner):
            return (
                Reason.NAME_TAKEN,
                f"{kind.kind} {owner.name} exists and belongs to somebody else, so it is left "
                "alone; delete or rename it, or rename this InferenceService",
            )
    return None


def _action(seen: ObservedService, owner: Owner) -> Action | None:
    spec = seen.service.spec
    if seen.pool is not None and spec.replicas is None:
        # Said out loud, so that everybody who reads it sees the same number. What runs already
        # goes on: it is the pool's to unload.
        runs = 0 if seen.deployment is None else _replicas(seen.deployment)
        return patch_of(INFERENCE_SERVICES, seen.obj, {"spec": {"replicas": min(runs, 1)}})
    wanted = deployment(seen.service, owner)
    if seen.deployment is None:
        wanted["spec"]["replicas"] = asked(seen)
        mark = annotation(seen.obj, SLOT_ANNOTATION)
        if mark is not None:
            wanted["metadata"]["annotations"][SLOT_ANNOTATION] = mark
        return render.settle(DEPLOYMENTS, wanted, None)
    if is_going(seen.deployment):
        return None  # made anew once it has left
    change = _scaling(seen)
    if change is not None or annotation(seen.deployment, SPEC_HASH_ANNOTATION) != annotation(
        wanted, SPEC_HASH_ANNOTATION
    ):
        rendered = render.settle(DEPLOYMENTS, wanted, seen.deployment)
        patch = {} if rendered is None else render.changes(wanted, seen.deployment)
        return patch_of(DEPLOYMENTS, seen.deployment, _both(patch, change or {}))
    return render.settle(SERVICES, service(seen.service, owner), seen.front)


def asked(seen: ObservedService) -> int:
    """Return how many replicas are asked for."""
    replicas = seen.service.spec.replicas
    return replicas if replicas is not None else 0 if seen.pool is not None else 1


def _scaling(seen: ObservedService) -> Json | None:
    """Return the patch of mark and replicas, always together; None when they are right."""
    assert seen.deployment is not None
    above = annotation(seen.obj, SLOT_ANNOTATION)
    below = annotation(seen.deployment, SLOT_ANNOTATION)
    ours, theirs = read_mark(above), read_mark(below)
    if theirs is not None:
        if ours is None and theirs.slot in seen.live_slots:
            return None  # whoever holds that slot writes the mark above again
        if ours is not None and ours.slot == theirs.slot and ours.epoch < theirs.epoch:
            return None
    replicas = asked(seen)
    if above == below and _replicas(seen.deployment) == replicas:
        return None
    return {
        "metadata": {"annotations": {SLOT_ANNOTATION: above}},
        "spec": {"replicas": replicas},
    }


def _both(first: Json, second: Json) -> Json:
    patch = dict(first)
    for key, value in second.items():
        patch[key] = _both(patch[key], value) if isinstance(patch.get(key), dict) else value
    return patch


def _replicas(deployment: Json) -> int:
    asked = (deployment.get("spec") or {}).get("replicas")
    return 1 if asked is None else int(asked)


# What is made


def deployment(service: InferenceService, owner: Owner) -> Json:
    """Return the Deployment, without replicas and mark: those are scaling's."""
    selector = render.selector_labels(COMPONENT, owner.name)
    content = {
        "spec": {
            # Two Pods of one model on one accelerator would be one too many.
            "strategy": {"type": "Recreate"},
            "revisionHistoryLimit": 3,
            "selector": {"matchLabels": selector},
            "template": {
                "metadata": {"labels": render.labels(COMPONENT, owner.name)},
                "spec": _pod(service),
            },
        }
    }
    return render.child(DEPLOYMENTS, owner, COMPONENT, content)


def _pod(service: InferenceService) -> Json:
    spec = service.spec
    volumes = [*spec.volumes]
    mounts = [*spec.volume_mounts]
    if spec.shm_size is not None:
        memory = {"medium": "Memory", "sizeLimit": spec.shm_size}
        volumes.append({"name": SHM_VOLUME, "emptyDir": memory})
        mounts.append({"name": SHM_VOLUME, "mountPath": "/dev/shm"})
    confined: Json = {"allowPrivilegeEscalation": False}
    user: Json = {"seccompProfile": {"type": "RuntimeDefault"}}
    if spec.run_as_user is not None:
        # Capabilities are taken only where a user is named: an engine that starts as root may need
        # some, such as to read weights that belong to another user.
        confined["capabilities"] = {"drop": ["ALL"]}
        user |= {"runAsNonRoot": True, "runAsUser": spec.run_as_user}
    probe = {"httpGet": {"path": HEALTH, "port": ENGINE}}
    container = _filled(
        name=ENGINE,
        image=spec.image,
        imagePullPolicy=spec.image_pull_policy and str(spec.image_pull_policy),
        command=list(spec.command),
        args=list(spec.args),
        env=[each.wire() for each in spec.env],
        ports=[{"name": ENGINE, "containerPort": spec.port, "protocol": "TCP"}],
        resources=resources(spec.resources),
        volumeMounts=mounts,
        securityContext=confined,
    )
    if spec.profile is not Profile.GENERIC:
        # An engine of an unknown make may have no such path; it is ready when it runs.
        container["startupProbe"] = {
            **probe,
            "periodSeconds": 1,
            "timeoutSeconds": 2,
            "failureThreshold": STARTUP_FAILURES,
        }
        container["readinessProbe"] = {**probe, "periodSeconds": 2, "timeoutSeconds": 2}
    else:
        container["readinessProbe"] = {
            "tcpSocket": {"port": ENGINE},
            "periodSeconds": 2,
            "timeoutSeconds": 2,
        }
    return _filled(
        containers=[container],
        imagePullSecrets=[each.wire() for each in spec.image_pull_secrets],
        nodeSelector=dict(spec.node_selector),
        tolerations=[each.wire() for each in spec.tolerations],
        volumes=volumes,
        terminationGracePeriodSeconds=spec.termination_grace_period_seconds,
        enableServiceLinks=False,
        automountServiceAccountToken=False,
        securityContext=user,
    )


def service(found: InferenceService, owner: Owner) -> Json:
    """Return the Service."""
    content = {
        "spec": {
            "type": "ClusterIP",
            "selector": render.selector_labels(COMPONENT, owner.name),
            "ports": [
                {"name": "http", "port": found.spec.port, "targetPort": ENGINE, "protocol": "TCP"}
            ],
        }
    }
    return render.child(SERVICES, owner, COMPONENT, content)


def resources(amounts: ResourceAmounts) -> Json:
    """Return resources as a container has them."""
    return _filled(limits=dict(amounts.limits), requests=dict(amounts.requests))


def _filled(**fields: Any) -> Json:
    """Return *fields* without those that are empty, which the API server would drop."""
    return {key: value for key, value in fields.items() if value or value is False or value == 0}


# What is said


def _status(seen: ObservedService, trouble: tuple[Reason, str] | None) -> InferenceServiceStatus:
    meta = seen.service.metadata
    before = seen.service.status or InferenceServiceStatus()
    pods = [pod for pod in seen.pods if not _is_finished(pod)]
    ready = sum(map(_is_ready, pods))
    wanted = asked(seen)
    phase, message = _phase(seen, trouble, wanted, pods, ready)
    conditions = before.conditions

    def put(kind: ConditionType, answer: bool, reason: str, said: str) -> None:
        nonlocal conditions
        conditions = set_condition(
            conditions, kind, answer, reason, said, now=seen.now, generation=meta.generation
        )

    is_up = phase is ServicePhase.READY
    word = {
        ServicePhase.READY: Reason.AVAILABLE,
        ServicePhase.STOPPED: Reason.STOPPED,
        ServicePhase.WAITING_FOR_GPU: Reason.WAITING_FOR_GPU,
        ServicePhase.FAILED: trouble[0] if trouble else Reason.LOAD_FAILED,
    }.get(phase, Reason.PROGRESSING)
    said = message or (f"{ready} of {wanted} are ready" if wanted else "scaled to 0")
    put(ConditionType.AVAILABLE, is_up, word, said)
    # At 0 there is nothing to wait for: that is how it is meant to be.
    put(ConditionType.READY, is_up or phase is ServicePhase.STOPPED, word, said)
    if phase is ServicePhase.FAILED:
        put(ConditionType.STALLED, True, word, said)
    else:
        put(ConditionType.STALLED, False, Reason.NOT_STALLED, "nothing waits for a person")
    labels = render.selector_labels(COMPONENT, meta.name)
    return InferenceServiceStatus(
        observed_generation=meta.generation,
        phase=phase,
        replicas=len(pods),
        ready_replicas=ready,
        selector=",".join(f"{key}={value}" for key, value in sorted(labels.items())),
        endpoint=f"http://{meta.name}.{meta.namespace}.svc:{seen.service.spec.port}",
        pool=seen.pool,
        message=message,
        conditions=conditions,
    )


def _phase(
    seen: ObservedService,
    trouble: tuple[Reason, str] | None,
    wanted: int,
    pods: list[Json],
    ready: int,
) -> tuple[ServicePhase, str | None]:
    if trouble is not None:
        return ServicePhase.FAILED, trouble[1]
    if seen.deployment is None:
        return ServicePhase.PENDING, None
    if wanted == 0:
        return (
            (ServicePhase.PROGRESSING, "its Pod is ending")
            if pods
            else (
                ServicePhase.STOPPED,
                None,
            )
        )
    if ready >= wanted:
        return ServicePhase.READY, None
    for pod in pods:
        failing = _failing(pod)
        if failing is not None:
            return ServicePhase.FAILED, failing
    for pod in pods:
        waiting = _unschedulable(pod)
        if waiting is not None:
            return ServicePhase.WAITING_FOR_GPU, waiting
    if ready:
        return ServicePhase.PROGRESSING, None
    return ServicePhase.CREATING, None


def _failing(pod: Json) -> str | None:
    status = pod.get("status") or {}
    for key in ("initContainerStatuses", "containerStatuses"):
        for each in status.get(key) or []:
            waiting = (each.get("state") or {}).get("waiting") or {}
            if waiting.get("reason") in FAILING:
                said = waiting.get("message") or "see kubectl describe pod"
                return f"Pod {name_of(pod)}: {waiting['reason']}: {said}"
    return None


def _unschedulable(pod: Json) -> str | None:
    for each in (pod.get("status") or {}).get("conditions") or []:
        if each.get("type") == "PodScheduled" and each.get("status") == "False":
            return f"Pod {name_of(pod)}: {each.get('message') or 'no node has room for it'}"
    return None


def _is_ready(pod: Json) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return not is_going(pod) and any(
        each.get("type") == "Ready" and each.get("status") == "True" for each in conditions
    )


def _is_finished(pod: Json) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def _events(before: InferenceServiceStatus, after: InferenceServiceStatus) -> tuple[Happened, ...]:
    if after.phase == before.phase or after.phase is None:
        return ()
    if after.phase is ServicePhase.FAILED:
        failed = next(each for each in after.conditions if each.type == ConditionType.STALLED)
        return (Happened(failed.reason, after.message or "", True),)
    is_new = before.phase in (None, ServicePhase.PENDING)
    if after.phase in (ServicePhase.READY, ServicePhase.STOPPED) and not is_new:
        return (Happened(str(after.phase), f"it is {after.phase}"),)
    return ()
