"""
Objects of every kind that are right, and changes that each break exactly one rule.

Evaluated by `crdcheck` in every test run, and by a real API server in the cluster tier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
Change = Callable[[Json], object]

POOL: Json = {
    "members": [
        {
            "name": "coder",
            "deploymentRef": {"name": "coder-large"},
            "expectedLoad": "90s",
            "models": ["gpt-4o"],
        },
        {"inferenceServiceRef": {"name": "judge"}},
        {"modelDeploymentRef": {"name": "twin"}},
        {"statefulSetRef": {"name": "vision"}},
    ],
    "default": "coder",
    "linger": "2s",
    "drainTimeout": "10m",
    "unschedulableAfter": "5m",
    "maxGeneration": "1h",
    "idleUnloadAfter": "30m",
    "reclaimDefaultAfter": "15m",
}
SERVICE: Json = {
    "image": "engine:1",
    "env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"fieldRef": {}}}],
    "resources": {"limits": {"nvidia.com/gpu": 1}},
}
ROUTER: Json = {
    "pools": [{"name": "gpu0"}],
    "upstreams": [
        {"name": "embedder", "url": "http://10.0.0.7:8080/prefix", "responseTimeout": "30s"}
    ],
    "keys": {"name": "router-keys"},
}
ROLE: Json = {
    "name": "server",
    "instanceType": "a100",
    "image": "engine:1",
    "size": 2,
    "env": [{"name": "A", "value": "1"}],
    "resources": {"accelerator": 1},
    "topology": {"requiredLevel": "example.org/rack"},
    "additionalVolumes": [
        {"mountPath": "/models", "subPath": "a/b", "persistentVolumeClaim": {"claimName": "w"}}
    ],
}
DEPLOYMENT: Json = {
    "model": {"name": "qwen"},
    "engine": {"name": "vLLM", "version": "0.11"},
    "roles": [ROLE, {**ROLE, "name": "second"}],
}
TYPE: Json = {
    "queueName": "lab",
    "accelerator": {
        "card": "nvidia.com/gpu",
        "sliceMemory": "example.org/memory",
        "sliceCores": "example.org/cores",
    },
    "capacity": {"cards": 8},
}
BASES = {
    "ModelPool": POOL,
    "InferenceService": SERVICE,
    "ModelRouter": ROUTER,
    "ModelDeployment": DEPLOYMENT,
    "InstanceType": TYPE,
}
DURATIONS = {
    "ModelPool": {
        ".swapBudget": "24h",
        ".maxTurn": "24h",
        ".linger": "10m",
        ".drainTimeout": "24h",
        ".loadTimeout": "24h",
        ".unschedulableAfter": "24h",
        ".maxGeneration": "168h",
        ".idleUnloadAfter": "8760h",
        ".reclaimDefaultAfter": "8760h",
        ".hungAfter": "24h",
        ".members[0].expectedLoad": "24h",
    },
    "ModelRouter": {
        ".responseTimeout": "24h",
        ".shutdownDelay": "10m",
        ".shutdownTimeout": "1h",
        ".upstreams[0].responseTimeout": "24h",
    },
}


def put(path: str, value: Any) -> Change:
    """Return a change of a spec: set *path* (``.a[0].b``), or remove it when *value* is None."""
    steps: list[str | int] = []
    for part in path.strip(".").replace("[", ".[").split("."):
        steps.append(int(part[1:-1]) if part.startswith("[") else part)

    def change(spec: Json) -> None:
        at: Any = spec
        for step in steps[:-1]:
            at = at[step]
        if value is None:
            del at[steps[-1]]
        else:
            at[steps[-1]] = value

    return change


@dataclass(frozen=True)
class Bad:
    """An example that breaks exactly the rule at *where* whose message begins so."""

    kind: str
    where: str
    rule: str
    """Part of the static message of the rule."""
    changes: tuple[Change, ...]
    at: str
    """Field that the error names."""
    says: tuple[str, ...]
    name: str = "thing"
    update: bool = False


def bad(
    kind: str,
    where: str,
    rule: str,
    *changes: Change,
    at: str,
    says: tuple[str, ...],
    name: str = "thing",
    update: bool = False,
) -> Bad:
    return Bad(kind, where, rule, changes, at, says, name, update)


LONG = "a" * 60
EXAMPLES = [
    bad(
        "ModelPool",
        ".spec",
        "default is no member",
        put(".default", "ghost"),
        at=".spec.default",
        says=('"ghost" is no member', "spec.members", "leave default out"),
    ),
    bad(
        "ModelPool",
        ".spec.members",
        "two members have the same name",
        put(".members[1].inferenceServiceRef.name", "coder"),
        at=".spec.members",
        says=('the same name "coder"', "another `name`"),
    ),
    bad(
        "ModelPool",
        ".spec.members[]",
        "needs exactly one of",
        put(".members[0].statefulSetRef", {"name": "x"}),
        at=".spec.members[0]",
        says=('"coder" has more than one reference', "keep exactly one of inferenceServiceRef"),
    ),
    bad(
        "ModelPool",
        ".spec.members[]",
        "needs exactly one of",
        put(".members[0].deploymentRef", None),
        at=".spec.members[0]",
        says=('"coder" has no reference', "keep exactly one of inferenceServiceRef"),
    ),
    bad(
        "ModelPool",
        "",
        "metadata.name must be a DNS label",
        name="p" * 54,
        at="",
        says=("p" * 54, "at most 53", "shorter one"),
    ),
    bad(
        "InferenceService",
        "",
        "metadata.name must be a DNS label",
        name="a.b",
        at="",
        says=('"a.b"', "63 characters", "choose another"),
    ),
    bad(
        "InferenceService",
        ".spec.env[]",
        "has value and valueFrom",
        put(".env[1].value", "2"),
        at=".spec.env[1]",
        says=('"B" has value and valueFrom', "keep one"),
    ),
    bad(
        "ModelRouter",
        "",
        "metadata.name must be a DNS label",
        name="9router",
        at="",
        says=('"9router"', "begins with a letter", "choose another"),
    ),
    bad(
        "ModelRouter",
        ".spec",
        "neither pools nor upstreams",
        put(".pools", None),
        put(".upstreams", None),
        at=".spec",
        says=("nothing to route", "spec.pools"),
    ),
    bad(
        "ModelRouter",
        ".spec",
        "who may use it",
        put(".keys", None),
        at=".spec",
        says=("keys: {name", "allowAnonymous: true"),
    ),
    bad(
        "ModelRouter",
        ".spec",
        "who may use it",
        put(".allowAnonymous", True),
        at=".spec",
        says=("exactly one",),
    ),
    bad(
        "ModelRouter",
        ".spec.upstreams[]",
        "url must be an http",
        put(".upstreams[0].url", None),
        at=".spec.upstreams[0].url",
        says=('"embedder" has no url', "http://10.0.0.7:8080"),
    ),
    bad(
        "ModelRouter",
        ".spec.upstreams[]",
        "url must be an http",
        put(".upstreams[0].url", "ftp://x"),
        at=".spec.upstreams[0].url",
        says=('"ftp://x"', "no http or https address", "https://example.org/prefix"),
    ),
    bad(
        "ModelDeployment",
        "",
        "metadata.name must be a DNS label",
        name="a.b",
        at="",
        says=('"a.b"', "choose another"),
    ),
    bad(
        "ModelDeployment",
        "",
        "the Service of a role",
        put(".roles[0].size", 1),
        put(".roles[1].size", 1),
        name=LONG,
        at=".spec.roles",
        says=('the Service of role "server"', "<metadata.name>-<role>", "63", "shorten"),
    ),
    bad(
        "ModelDeployment",
        "",
        "members are named",
        put(".roles[0].replicas", 1000),
        name="a" * 49,
        at=".spec.roles",
        says=('members of role "server"', "-r<replica>-m<member>", "63", "fewer replicas"),
    ),
    bad(
        "ModelDeployment",
        ".spec",
        "kvCache is not supported",
        put(".kvCache", {"a": 1}),
        at=".spec.kvCache",
        says=("another operator", "remove kvCache"),
    ),
    bad(
        "ModelDeployment",
        ".spec",
        "kvTransfer is not supported",
        put(".kvTransfer", {"protocol": "x"}),
        at=".spec.kvTransfer",
        says=("document shared by two roles", "remove kvTransfer"),
    ),
    bad(
        "ModelDeployment",
        ".spec",
        "router is not supported",
        put(".router", {"name": "x"}),
        at=".spec.router",
        says=("ModelRouter", "remove router"),
    ),
    bad(
        "ModelDeployment",
        ".spec.model",
        "artifactRef is not supported",
        put(".model.artifactRef", {"name": "x"}),
        at=".spec.model.artifactRef",
        says=("additionalVolumes", "remove artifactRef"),
    ),
    bad(
        "ModelDeployment",
        ".spec.model",
        "model.name is part of",
        put(".model.name", "other"),
        update=True,
        at=".spec.model",
        says=('model.name "other"', "cannot be changed", "create another"),
    ),
    bad(
        "ModelDeployment",
        ".spec.engine.name",
        "engine.name is part of",
        put(".engine.name", "SGLang"),
        update=True,
        at=".spec.engine.name",
        says=('engine.name "SGLang"', "cannot be changed", "create another"),
    ),
    bad(
        "ModelDeployment",
        ".spec.roles",
        "a role was added",
        put(".roles[1].name", "third"),
        update=True,
        at=".spec.roles",
        says=('role "third" was added, or renamed', "restore the names", "create another"),
    ),
    bad(
        "ModelDeployment",
        ".spec.roles",
        "a role was added",
        put(".roles[1]", None),
        update=True,
        at=".spec.roles",
        says=('role "second" was removed', "restore the names", "create another"),
    ),
    bad(
        "ModelDeployment",
        ".spec.roles[]",
        "the kind of a role",
        put(".roles[0].kind", "Prefill"),
        put(".roles[1].kind", "Decode"),
        update=True,
        at=".spec.roles[0].kind",
        says=("the kind of role", "cannot be changed", "means Server; restore it"),
    ),
    bad(
        "ModelDeployment",
        ".spec.roles",
        "roles of kind Server",
        put(".roles[1].kind", "Decode"),
        at=".spec.roles",
        says=('role "server": ', "beside Prefill or Decode", "one Prefill and one Decode"),
    ),
    bad(
        "ModelDeployment",
        ".spec.roles",
        "at most one Prefill",
        put(".roles[0].kind", "Decode"),
        put(".roles[1].kind", "Decode"),
        at=".spec.roles",
        says=('role "server" is not the only one of kind Decode', "more replicas"),
    ),
    bad(
        "ModelDeployment",
        ".spec.roles",
        "a role is named like the Service",
        put(".roles[1].name", "server-r0"),
        at=".spec.roles",
        says=('role "server-r0" is named like', "<role>-r<number>", "rename"),
    ),
    bad(
        "ModelDeployment",
        ".spec.roles[]",
        "elasticEp is not supported",
        put(".roles[0].elasticEp", {}),
        at=".spec.roles[0].elasticEp",
        says=("elastic profiles", "remove elasticEp"),
    ),
    bad(
        "ModelDeployment",
        ".spec.roles[].resources",
        "acceleratorPartitionedProfile is not supported",
        put(".roles[0].resources.acceleratorPartitionedProfile", "1g.5gb"),
        at=".spec.roles[0].resources.acceleratorPartitionedProfile",
        says=("whole cards or a slice", "remove acceleratorPartitionedProfile"),
    ),
    bad(
        "ModelDeployment",
        ".spec.roles[].resources",
        "interface is not supported",
        put(".roles[0].resources.interface", 1),
        at=".spec.roles[0].resources.interface",
        says=("RDMA", "remove interface"),
    ),
    bad(
        "ModelDeployment",
        ".spec.roles[].env[]",
        "are set by the operator",
        put(".roles[0].env[0].name", "MODELPOOL_MEMBER_INDEX"),
        at=".spec.roles[0].env[0].name",
        says=("MODELPOOL_MEMBER_INDEX", "use another name"),
    ),
    bad(
        "ModelDeployment",
        ".spec.roles[].topology.requiredLevel",
        "kubernetes.io/hostname would",
        put(".roles[0].topology.requiredLevel", "kubernetes.io/hostname"),
        at=".spec.roles[0].topology.requiredLevel",
        says=("wider level",),
    ),
    bad(
        "ModelDeployment",
        ".spec.roles[].additionalVolumes[]",
        "needs exactly one of configMap",
        put(".roles[0].additionalVolumes[0].secret", {"secretName": "x"}),
        at=".spec.roles[0].additionalVolumes[0]",
        says=('"/models"', "exactly one of configMap, secret"),
    ),
    bad(
        "ModelDeployment",
        ".spec.roles[].additionalVolumes[].subPath",
        "subPath must stay inside",
        put(".roles[0].additionalVolumes[0].subPath", "a/../../b"),
        at=".spec.roles[0].additionalVolumes[0].subPath",
        says=('"a/../../b"', "without .."),
    ),
    bad(
        "InstanceType",
        ".spec",
        "capacity.cards is set",
        put(".accelerator.card", None),
        at=".spec",
        says=("accelerator: {card: nvidia.com/gpu}", "remove capacity.cards"),
    ),
    bad(
        "InstanceType",
        ".spec.accelerator",
        "sliceCores without sliceMemory",
        put(".accelerator.sliceMemory", None),
        at=".spec.accelerator",
        says=('sliceCores "example.org/cores"', "name the resource key", "remove sliceCores"),
    ),
]
