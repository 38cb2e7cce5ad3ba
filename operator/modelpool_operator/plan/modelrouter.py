"""
ModelRouter: the router's Deployment and all it needs, and what is said about them. Pure.

The swap lock is inside the router, so exactly one runs as long as a pool is routed, and the
Deployment is of the Recreate kind. Its configuration is a mounted file that the router reads
again by itself; the Pod is replaced only for what a running process cannot take in: its image,
its port, its resources, where it runs, and which Secrets are mounted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from modelpool_api.meta import seconds, set_condition
from modelpool_api.names import ConditionType, Reason, lease_name
from modelpool_api.v1alpha1.modelpool import ModelPool
from modelpool_api.v1alpha1.modelrouter import (
    ModelRouter,
    ModelRouterStatus,
    RouterPhase,
    RouterUpstream,
    SecretKey,
)
from modelpool_kube.kinds import (
    CONFIGMAPS,
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    MEMBER_KINDS,
    MODEL_DEPLOYMENTS,
    MODEL_ROUTERS,
    ROLE_BINDINGS,
    ROLES,
    SERVICE_ACCOUNTS,
    SERVICES,
    Json,
    Kind,
    is_going,
)
from modelpool_kube.slotrules import Member

from . import render, routednames
from .inferenceservice import resources
from .model import Action, Happened, Owner, Plan, patch_of

COMPONENT = "router"
CONFIG_KEY = "router.yaml"
CONFIG_DIR = "/etc/modelpool"
KEYS_DIR = "/etc/modelpool-keys"
UPSTREAM_KEYS_DIR = "/etc/modelpool-upstreams"
STATE_DIR = "/var/lib/modelpool"
ADMIN_PORT = 9090
USER = 65532
GRACE_MARGIN_S = 15
"""From the end of the router's own shutdown to KILL."""

CHILDREN = (SERVICE_ACCOUNTS, ROLES, ROLE_BINDINGS, CONFIGMAPS, DEPLOYMENTS, SERVICES)
"""In the order in which they are made: no Pod starts before it may do its work."""


@dataclass(frozen=True, slots=True)
class ObservedRouter:
    """One ModelRouter and what belongs to it."""

    router: ModelRouter
    obj: Json
    """The same, as it was read."""
    now: datetime
    default_image: str
    """Image of routers that name none."""
    pools: tuple[ModelPool, ...]
    """Those of its pools that exist."""
    children: tuple[tuple[Kind, Json | None], ...]
    """What exists under its name, for each of `CHILDREN`."""
    former: tuple[Member, ...] = ()
    """Objects that still carry the mark of one of its pools and that the pool does not list."""

    def child(self, kind: Kind) -> Json | None:
        """Return what exists of *kind*."""
        return next(found for each, found in self.children if each == kind)


def plan(seen: ObservedRouter) -> Plan:
    """Return what is to be done about a ModelRouter."""
    meta = seen.router.metadata
    if meta.is_going:
        return Plan()  # what belongs to it is collected
    owner = Owner(MODEL_ROUTERS, meta.name, meta.namespace, meta.uid)
    taken = [kind.kind for kind in CHILDREN if render.is_foreign(seen.child(kind), owner)]
    action = None if taken else _action(seen, owner)
    status = _status(seen, taken)
    before = seen.router.status or ModelRouterStatus()
    return Plan(
        actions=() if action is None else (action,),
        status=status.wire(),
        events=_events(before, status),
        says_first=status.phase is RouterPhase.PENDING,
    )


def _action(seen: ObservedRouter, owner: Owner) -> Action | None:
    for kind in CHILDREN:
        found = seen.child(kind)
        if found is not None and is_going(found):
            return None  # made anew once it has left
        wanted = _RENDERED[kind](seen, owner)
        if kind == DEPLOYMENTS:
            action = _deployment_action(seen, wanted, found)
        else:
            action = render.settle(kind, wanted, found)
        if action is not None:
            return action
    return None


def _deployment_action(seen: ObservedRouter, wanted: Json, found: Json | None) -> Action | None:
    replicas = copies(seen.router)
    if found is None:
        wanted["spec"]["replicas"] = replicas
        return render.settle(DEPLOYMENTS, wanted, None)
    action = render.settle(DEPLOYMENTS, wanted, found)
    if action is not None:
        patch = render.changes(wanted, found)
        patch["spec"]["replicas"] = replicas
        return patch_of(DEPLOYMENTS, found, patch)
    if (found.get("spec") or {}).get("replicas", 1) != replicas:
        return patch_of(DEPLOYMENTS, found, {"spec": {"replicas": replicas}})
    return None


def copies(router: ModelRouter) -> int:
    """Return how many routers are to run: one, whatever is asked for, where a pool is routed."""
    return 1 if router.spec.pools else router.spec.replicas


# What is made


def _service_account(seen: ObservedRouter, owner: Owner) -> Json:
    # The digest needs something to be made of.
    return render.child(SERVICE_ACCOUNTS, owner, COMPONENT, {"automountServiceAccountToken": True})


def _role(seen: ObservedRouter, owner: Owner) -> Json:
    return render.child(
        ROLES, owner, COMPONENT, {"rules": list(rules(seen.router, seen.pools, seen.former))}
    )


def rules(
    router: ModelRouter, pools: Iterable[ModelPool], former: Iterable[Member] = ()
) -> Iterable[Json]:
    """
    Yield what the router may do: scale its members, named one by one, and read around them.

    A *former* member is one until the router has drained it and let go of it.
    Lists and watches of named objects are granted for requests that select one by
    ``metadata.name``.
    """
    if not router.spec.pools:
        return
    names = [each.name for each in router.spec.pools]
    yield _rule("modelpool.dev", ["modelpools"], FOLLOW, names)
    leases = [lease_name(name) for name in names]
    yield _rule("coordination.k8s.io", ["leases"], ["get", "patch"], leases)
    targets: dict[Kind, set[str]] = {}
    for pool in pools:
        for member in pool.spec.members:
            if member.kind:
                targets.setdefault(MEMBER_KINDS[member.kind], set()).add(member.target)
    for each in former:
        targets.setdefault(each.kind, set()).add(each.target)
    for kind in MEMBER_KINDS.values():
        if kind in targets:
            names = sorted(targets[kind])
            yield _rule(kind.group, [kind.plural], [*READ, "patch"], names)
    below = sorted(targets.get(INFERENCE_SERVICES, set()) - targets.get(DEPLOYMENTS, set()))
    if below:
        yield _rule(DEPLOYMENTS.group, [DEPLOYMENTS.plural], READ, below)
    # Made by controllers, under names nobody knows beforehand.
    yield _rule("", ["pods"], READ)
    yield _rule("apps", ["replicasets"], FOLLOW)
    yield _rule("autoscaling", ["horizontalpodautoscalers"], FOLLOW)
    if MODEL_DEPLOYMENTS in targets:
        yield _rule("kueue.x-k8s.io", ["workloads"], ["list"])


FOLLOW = ["list", "watch"]
READ = ["get", *FOLLOW]


def _rule(group: str, plurals: list[str], verbs: list[str], names: list[str] | None = None) -> Json:
    rule: Json = {"apiGroups": [group], "resources": plurals, "verbs": list(verbs)}
    if names is not None:
        rule["resourceNames"] = names
    return rule


def _role_binding(seen: ObservedRouter, owner: Owner) -> Json:
    content = {
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": owner.name},
        "subjects": [{"kind": "ServiceAccount", "name": owner.name, "namespace": owner.namespace}],
    }
    return render.child(ROLE_BINDINGS, owner, COMPONENT, content)


def _config_map(seen: ObservedRouter, owner: Owner) -> Json:
    text = json.dumps(config(seen.router), indent=2) + "\n"  # JSON is YAML
    return render.child(CONFIGMAPS, owner, COMPONENT, {"data": {CONFIG_KEY: text}})


def config(router: ModelRouter) -> Json:
    """Return the configuration of the router. The members of its pools are not in it."""
    spec = router.spec
    found: Json = {
        "listen": f"0.0.0.0:{spec.port}",
        "admin": f"0.0.0.0:{ADMIN_PORT}",
        "stateDir": STATE_DIR,
        "logFormat": "json",
        "maxHeld": max(1, spec.max_held),
        "maxHeldBytes": spec.max_held_bytes,
        "maxBodyBytes": spec.max_body_bytes,
        "holdKeepalive": str(spec.hold_keepalive),
        "responseTimeout": spec.response_timeout,
        "shutdownDelay": spec.shutdown_delay,
        "shutdownTimeout": spec.shutdown_timeout,
    }
    if spec.keys is not None:
        found["keys"] = {"file": f"{KEYS_DIR}/{spec.keys.key}"}
    else:
        found["allowAnonymous"] = True
    if spec.pools:
        found["poolsFrom"] = {
            "namespace": router.metadata.namespace,
            "names": [each.name for each in spec.pools],
        }
    if spec.upstreams:
        found["upstreams"] = [_upstream(each) for each in spec.upstreams]
    return found


def _upstream(upstream: RouterUpstream) -> Json:
    found: Json = {"name": upstream.name, "url": upstream.url or ""}
    if upstream.models:
        found["models"] = list(upstream.models)
    if upstream.api_key is not None:
        key = upstream.api_key
        found["apiKey"] = {"file": f"{UPSTREAM_KEYS_DIR}/{key.name}/{key.key}"}
    if upstream.response_timeout is not None:
        found["responseTimeout"] = upstream.response_timeout
    return found


def _deployment(seen: ObservedRouter, owner: Owner) -> Json:
    selector = render.selector_labels(COMPONENT, owner.name)
    pod = _pod(seen, owner)
    content = {
        "spec": {
            "strategy": {"type": "Recreate"},  # two routers at once would be two swap locks
            "revisionHistoryLimit": 3,
            "selector": {"matchLabels": selector},
            "template": {
                "metadata": {"labels": render.labels(COMPONENT, owner.name)},
                "spec": pod,
            },
        }
    }
    # What only a new process takes in. How long it may take to stop is in the Pod, but is no
    # reason to stop it.
    rolls = {key: value for key, value in pod.items() if key != "terminationGracePeriodSeconds"}
    return render.child(DEPLOYMENTS, owner, COMPONENT, content, digested={"pod": rolls})


def _pod(seen: ObservedRouter, owner: Owner) -> Json:
    spec = seen.router.spec
    mounts: list[Json] = [
        {"name": "config", "mountPath": CONFIG_DIR, "readOnly": True},
        {"name": "state", "mountPath": STATE_DIR},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    volumes: list[Json] = [
        {"name": "config", "configMap": {"name": owner.name}},
        {"name": "state", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
    ]
    if spec.keys is not None:
        volumes.append({"name": "keys", "secret": {"secretName": spec.keys.name}})
        mounts.append({"name": "keys", "mountPath": KEYS_DIR, "readOnly": True})
    sources = [
        {
            "secret": {
                "name": key.name,
                "items": [{"key": key.key, "path": f"{key.name}/{key.key}"}],
            }
        }
        for key in _upstream_keys(seen.router)
    ]
    if sources:
        volumes.append({"name": "upstream-keys", "projected": {"sources": sources}})
        mounts.append({"name": "upstream-keys", "mountPath": UPSTREAM_KEYS_DIR, "readOnly": True})
    container: Json = {
        "name": COMPONENT,
        "image": spec.image or seen.default_image,
        "args": ["serve", f"{CONFIG_DIR}/{CONFIG_KEY}"],
        "env": [
            _field("POD_NAME", "metadata.name"),
            _field("POD_NAMESPACE", "metadata.namespace"),
            # Who may read the Pod may operate its router; nobody else can guess it.
            _field("MODELPOOL_ADMIN_TOKEN", "metadata.uid"),
        ],
        "ports": [
            {"name": "http", "containerPort": spec.port, "protocol": "TCP"},
            {"name": "admin", "containerPort": ADMIN_PORT, "protocol": "TCP"},
        ],
        "livenessProbe": {
            "httpGet": {"path": "/livez", "port": "http"},
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
        "readinessProbe": {
            "httpGet": {"path": "/readyz", "port": "http"},
            "periodSeconds": 2,
            "timeoutSeconds": 2,
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }
    if spec.image_pull_policy is not None:
        container["imagePullPolicy"] = str(spec.image_pull_policy)
    if amounts := resources(spec.resources):
        container["resources"] = amounts
    grace = seconds(spec.shutdown_delay) + seconds(spec.shutdown_timeout) + GRACE_MARGIN_S
    pod: Json = {
        "serviceAccountName": owner.name,
        "terminationGracePeriodSeconds": int(grace),
        "enableServiceLinks": False,  # MODELPOOL_* variables of Services would look like settings
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }
    if spec.image_pull_secrets:
        pod["imagePullSecrets"] = [each.wire() for each in spec.image_pull_secrets]
    if spec.node_selector:
        pod["nodeSelector"] = dict(spec.node_selector)
    if spec.tolerations:
        pod["tolerations"] = [each.wire() for each in spec.tolerations]
    return pod


def _upstream_keys(router: ModelRouter) -> list[SecretKey]:
    found: dict[tuple[str, str], SecretKey] = {}
    for each in router.spec.upstreams:
        if each.api_key is not None:
            found.setdefault((each.api_key.name, each.api_key.key), each.api_key)
    return [found[key] for key in sorted(found)]


def _field(name: str, path: str) -> Json:
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def _service(seen: ObservedRouter, owner: Owner) -> Json:
    service = seen.router.spec.service
    content = {
        "spec": {
            "type": str(service.type),
            "selector": render.selector_labels(COMPONENT, owner.name),
            "ports": [
                {"name": "http", "port": service.port, "targetPort": "http", "protocol": "TCP"}
            ],
        }
    }
    return render.child(SERVICES, owner, COMPONENT, content, annotations=dict(service.annotations))


_RENDERED: dict[Kind, Any] = {
    SERVICE_ACCOUNTS: _service_account,
    ROLES: _role,
    ROLE_BINDINGS: _role_binding,
    CONFIGMAPS: _config_map,
    DEPLOYMENTS: _deployment,
    SERVICES: _service,
}


# What is said


def _status(seen: ObservedRouter, taken: list[str]) -> ModelRouterStatus:
    meta, spec = seen.router.metadata, seen.router.spec
    before = seen.router.status or ModelRouterStatus()
    conditions = before.conditions

    def put(kind: ConditionType, answer: bool, reason: str, message: str) -> None:
        nonlocal conditions
        conditions = set_condition(
            conditions, kind, answer, reason, message, now=seen.now, generation=meta.generation
        )

    known = {each.metadata.name for each in seen.pools}
    missing = [each.name for each in spec.pools if each.name not in known]
    if missing:
        lost = (
            f"spec.pools names ModelPools that do not exist: {', '.join(missing)}; create them in "
            f"namespace {meta.namespace}, or take them out. Their models are unknown until then"
        )
        put(ConditionType.POOLS_RESOLVED, False, Reason.MISSING_POOLS, lost)
    elif clashes := routednames.clashes(seen.router, seen.pools):
        lost = "; ".join(clashes)
        put(ConditionType.POOLS_RESOLVED, False, Reason.DUPLICATE_NAMES, lost)
    else:
        lost = ""
        put(
            ConditionType.POOLS_RESOLVED,
            True,
            Reason.ALL_RESOLVED,
            f"all {len(spec.pools)} pools exist" if spec.pools else "no pool is routed",
        )
    if spec.pools:
        asked = "" if spec.replicas == 1 else f" although spec.replicas is {spec.replicas}"
        put(
            ConditionType.REPLICAS_PINNED,
            True,
            Reason.PINNED,
            f"exactly one router runs{asked}, because the swap lock of a pool is inside it",
        )
    else:
        put(
            ConditionType.REPLICAS_PINNED,
            False,
            Reason.AS_SPECIFIED,
            "no pool is routed, so spec.replicas counts",
        )
    found = (seen.child(DEPLOYMENTS) or {}).get("status") or {}
    running, ready = int(found.get("replicas") or 0), int(found.get("readyReplicas") or 0)
    wanted = copies(seen.router)
    message: str | None
    if taken:
        phase = RouterPhase.FAILED
        message = (
            f"{', '.join(taken)} {meta.name} exists and belongs to somebody else, so nothing is "
            "touched; delete or rename it, or rename this ModelRouter"
        )
        word = Reason.NAME_TAKEN
    elif seen.child(DEPLOYMENTS) is None:
        phase, message, word = RouterPhase.PENDING, None, Reason.PROGRESSING
    elif ready < wanted:
        phase, word = RouterPhase.PROVISIONING, Reason.PROGRESSING
        message = f"{ready} of {wanted} are ready"
    elif lost:
        word = Reason.MISSING_POOLS if missing else Reason.DUPLICATE_NAMES
        phase, message = RouterPhase.DEGRADED, lost
    else:
        phase, message, word = RouterPhase.READY, None, Reason.AVAILABLE
    is_available = not taken and ready >= wanted and seen.child(DEPLOYMENTS) is not None
    said = message or f"{ready} of {wanted} are ready"
    put(
        ConditionType.AVAILABLE,
        is_available,
        Reason.AVAILABLE if is_available else word,
        f"{ready} of {wanted} are ready" if is_available else said,
    )
    put(ConditionType.READY, phase is RouterPhase.READY, word, said)
    if phase in (RouterPhase.FAILED, RouterPhase.DEGRADED):
        put(ConditionType.STALLED, True, word, said)
    else:
        put(ConditionType.STALLED, False, Reason.NOT_STALLED, "nothing waits for a person")
    return ModelRouterStatus(
        observed_generation=meta.generation,
        phase=phase,
        replicas=running,
        endpoint=f"http://{meta.name}.{meta.namespace}.svc:{spec.service.port}",
        message=message,
        conditions=conditions,
    )


def _events(before: ModelRouterStatus, after: ModelRouterStatus) -> tuple[Happened, ...]:
    if after.phase == before.phase or after.phase is None:
        return ()
    if after.phase in (RouterPhase.FAILED, RouterPhase.DEGRADED):
        stalled = next(each for each in after.conditions if each.type == ConditionType.STALLED)
        return (Happened(stalled.reason, after.message or "", True),)
    if after.phase is RouterPhase.READY:
        return (Happened(str(after.phase), "the router serves"),)
    return ()
