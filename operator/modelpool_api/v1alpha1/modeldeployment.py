"""ModelDeployment: roles whose replicas are replaced whole, each through a fresh admission."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from ..meta import (
    LABEL_PATTERN,
    ApiModel,
    Conditions,
    Label,
    Message,
    ObjectMeta,
    OpenObject,
    Port,
    Quantity,
    Rule,
    Timestamp,
    first_culprit,
    list_map,
    listing,
    node,
    text,
)
from ..names import API_VERSION, RANK_ENV
from .container import Command, Image, PullPolicy, PullSecrets

_RANK_LIST = ", ".join(f"'{name}'" for name in RANK_ENV)
_LEVEL = (
    "^([a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
    "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
)


def _frozen(what: str, value: str) -> Rule:
    why = (
        "is part of which deployment this is and cannot be changed; keep it, or create another "
        "ModelDeployment"
    )
    return Rule(
        rule="self == oldSelf",
        message=f"{what} {why}",
        shown=f"'{what} \"' + {value} + '\" {why}'",
    )


def _unsupported(field: str, at: str, text_: str) -> Rule:
    return Rule(
        rule=f"!has(self.{field})",
        message=f"{field} is not supported by this operator: {text_}; remove {field}",
        at=at,
    )


NO_KV_CACHE = _unsupported(
    "kvCache",
    ".kvCache",
    "a deployment that shares KV blocks across deployments needs another operator",
)
NO_KV_TRANSFER = _unsupported(
    "kvTransfer",
    ".kvTransfer",
    "it renders no document shared by two roles; put connector flags into extraArgs or command of "
    "each role",
)
NO_ROUTER = _unsupported(
    "router",
    ".router",
    "requests go to the Services of the deployment; use a ModelRouter with a ModelPool or an "
    "upstream in front",
)
NO_ARTIFACT = _unsupported(
    "artifactRef",
    ".artifactRef",
    "it delivers no weights; mount them with additionalVolumes",
)
NO_ELASTIC_EP = _unsupported(
    "elasticEp",
    ".elasticEp",
    "elastic profiles pin size, replicas, command and accelerator shape, which the ordinary "
    "contract of edits does not relax",
)
NO_PARTITION = _unsupported(
    "acceleratorPartitionedProfile",
    ".acceleratorPartitionedProfile",
    "hardware partitions are not rendered; ask for whole cards or a slice",
)
NO_FABRIC = _unsupported(
    "interface",
    ".interface",
    "fabric interfaces and native RDMA are not rendered",
)
_ROLES_FROZEN = (
    "the set of roles is part of which deployment this is; restore the names, or create another "
    "ModelDeployment"
)
ROLE_SET_FROZEN = Rule(
    rule="size(self) == size(oldSelf) && self.all(n, oldSelf.exists(o, o.name == n.name))",
    message=f"a role was added, removed or renamed, but {_ROLES_FROZEN}",
    shown="self.all(n, oldSelf.exists(o, o.name == n.name)) ? "
    + first_culprit(
        "oldSelf",
        "o",
        "!self.exists(n, n.name == o.name)",
        f"'role \"' + o.name + '\" was removed, but {_ROLES_FROZEN}'",
    )
    + " : "
    + first_culprit(
        "self",
        "n",
        "!oldSelf.exists(o, o.name == n.name)",
        f"'role \"' + n.name + '\" was added, or renamed to that, but {_ROLES_FROZEN}'",
    ),
)
_KIND_FROZEN = (
    "cannot be changed, and a patch that leaves kind out means Server; restore it, or create "
    "another ModelDeployment"
)
ROLE_KIND_FROZEN = Rule(
    rule="self.kind == oldSelf.kind",
    message=f"the kind of a role {_KIND_FROZEN}",
    shown=f"'kind \"' + self.kind + '\": the kind of role \"' + self.name + '\" {_KIND_FROZEN}'",
    at=".kind",
)
_KINDS_APART = (
    "cannot stand beside Prefill or Decode; use Server roles alone, or one Prefill and one Decode "
    "role"
)
KINDS_FIT = Rule(
    rule="!(self.exists(a, a.kind == 'Server') && self.exists(b, b.kind != 'Server'))",
    message=f"roles of kind Server {_KINDS_APART}",
    shown=first_culprit(
        "self",
        "r",
        "r.kind == 'Server'",
        f"'role \"' + r.name + '\": roles of kind Server {_KINDS_APART}'",
    ),
)
ONE_OF_A_KIND = Rule(
    rule="size(self.filter(r, r.kind == 'Prefill')) <= 1"
    " && size(self.filter(r, r.kind == 'Decode')) <= 1",
    message="at most one Prefill and one Decode role; give the existing one more replicas",
    shown=first_culprit(
        "self",
        "r",
        "(r.kind == 'Prefill' || r.kind == 'Decode')"
        " && size(self.filter(other, other.kind == r.kind)) > 1",
        "'role \"' + r.name + '\" is not the only one of kind ' + r.kind + "
        "'; at most one Prefill and one Decode role, so give one of them more replicas and remove "
        "the other'",
    ),
)
_LIKE_A_REPLICA = (
    "is named like the Service of a replica of another role (<role>-r<number>), and the two "
    "Services would collide as soon as that role has several members; rename one"
)
NAMES_APART = Rule(
    rule="self.all(a, self.all(b, !b.name.matches('^' + a.name + '-r[0-9]+$')))",
    message=f"a role {_LIKE_A_REPLICA}",
    shown=first_culprit(
        "self",
        "b",
        "self.exists(a, b.name.matches('^' + a.name + '-r[0-9]+$'))",
        f"'role \"' + b.name + '\" {_LIKE_A_REPLICA}'",
    ),
)
NAME_FITS = Rule(
    rule="self.metadata.name.matches('^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$')",
    message="metadata.name must be a DNS label of at most 63 characters that begins with a "
    "letter, because Services are named so; choose another one",
    shown="'metadata.name \"' + self.metadata.name + '\" must be a DNS label of at most 63 "
    "characters that begins with a letter, because Services are named so; choose another one'",
)
_SERVICE_NAME_FITS = "size(self.metadata.name) + size(r.name) + 1 <= 63"
_SERVICE_NAME = (
    "is named <metadata.name>-<role>, which must not exceed 63 characters; shorten the name of the "
    "role, or of the deployment"
)
SERVICE_NAMES_FIT = Rule(
    rule=f"self.spec.roles.all(r, {_SERVICE_NAME_FITS})",
    message=f"the Service of a role {_SERVICE_NAME}",
    shown=first_culprit(
        "self.spec.roles",
        "r",
        f"!({_SERVICE_NAME_FITS})",
        f"'the Service of role \"' + r.name + '\" {_SERVICE_NAME}'",
    ),
    at=".spec.roles",
)
_MEMBER_NAME_FITS = (
    "r.size == 1 || size(self.metadata.name) + size(r.name) + "
    "size(string(r.replicas > 0 ? r.replicas - 1 : 0)) + size(string(r.size - 1)) + 5 <= 63"
)
_MEMBER_NAME = (
    "are named <metadata.name>-<role>-r<replica>-m<member>, which must not exceed 63 characters, "
    "the limit of a host name; shorten the role, shorten the deployment, or ask for fewer replicas"
)
MEMBER_NAMES_FIT = Rule(
    rule=f"self.spec.roles.all(r, {_MEMBER_NAME_FITS})",
    message=f"members {_MEMBER_NAME}",
    shown=first_culprit(
        "self.spec.roles",
        "r",
        f"!({_MEMBER_NAME_FITS})",
        f"'members of role \"' + r.name + '\" {_MEMBER_NAME}'",
    ),
    at=".spec.roles",
)
_OWNED = "set by the operator, also for roles with their own command; use another name"
RANK_ENV_OWNED = Rule(
    rule=f"!(self.name in [{_RANK_LIST}])",
    message=f"{', '.join(RANK_ENV)} are {_OWNED}",
    shown=f"self.name + ' is {_OWNED}'",
    at=".name",
)
NO_HOST_LEVEL = Rule(
    rule="self != 'kubernetes.io/hostname'",
    message="kubernetes.io/hostname would put every member on one node and is refused; name a "
    "wider level, such as a rack label",
)
ONE_SOURCE = Rule(
    rule="(has(self.configMap) ? 1 : 0) + (has(self.secret) ? 1 : 0)"
    " + (has(self.hostPath) ? 1 : 0) + (has(self.persistentVolumeClaim) ? 1 : 0) == 1",
    message="needs exactly one of configMap, secret, hostPath and persistentVolumeClaim",
    shown="'the volume at \"' + self.mountPath + '\" needs exactly one of configMap, secret, "
    "hostPath and persistentVolumeClaim'",
)
SUB_PATH_INSIDE = Rule(
    rule="!self.startsWith('/') && !self.matches('(^|/)[.][.](/|$)')",
    message="subPath must stay inside the volume: relative, and without ..",
    shown="'\"' + self + '\" leaves the volume; write subPath relative and without ..'",
)


class EngineName(StrEnum):
    """Engines whose command line is known; Custom for all others."""

    VLLM = "vLLM"
    SGLANG = "SGLang"
    LLAMA_CPP = "llama.cpp"
    CUSTOM = "Custom"


class RoleKind(StrEnum):
    """What the replicas of a role do."""

    SERVER = "Server"
    PREFILL = "Prefill"
    DECODE = "Decode"


class Model(ApiModel):
    """The served model."""

    rules: ClassVar[tuple[Rule, ...]] = (NO_ARTIFACT,)

    name: Annotated[str, text(253, 1)]
    """Name under which it is served."""
    artifact_ref: OpenObject | None = None
    """Not supported."""


class Engine(ApiModel):
    """The engine that serves it."""

    name: Annotated[EngineName, node(_frozen("engine.name", "self"))]
    """Which engine; decides the managed command line."""
    version: Annotated[str, text(64)] = ""
    """For people; the image decides."""


class RoleResources(ApiModel):
    """What each Pod of a role gets of the instance type."""

    rules: ClassVar[tuple[Rule, ...]] = (NO_PARTITION, NO_FABRIC)

    accelerator: Annotated[int, Field(ge=0, le=1024)] | None = None
    """Whole cards of each Pod; unset: 1 on a type that has cards, unless a slice is asked for."""
    accelerator_sliced_memory_percentage: Annotated[int, Field(ge=0, le=100)] = 0
    """Percent of the memory of a card; 0: no slice."""
    accelerator_sliced_cores_percentage: Annotated[int, Field(ge=0, le=100)] = 0
    """Percent of the cores of a card; 0: no slice."""
    accelerator_partitioned_profile: Annotated[str, text(64)] | None = None
    """Not supported."""
    interface: Quantity | None = None
    """Not supported."""


class RoleEnv(ApiModel):
    """One environment variable, with a literal value."""

    rules: ClassVar[tuple[Rule, ...]] = (RANK_ENV_OWNED,)

    name: Annotated[str, text(253, 1, "^[^=]+$")]
    """Name of the variable."""
    value: Annotated[str, text(32768)] = ""
    """Its value."""


class Protocol(StrEnum):
    """Transport of a port."""

    TCP = "TCP"
    UDP = "UDP"
    SCTP = "SCTP"


class RolePort(ApiModel):
    """A port of the main container. The first one serves."""

    container_port: Port
    """Number."""
    protocol: Protocol = Protocol.TCP
    """Transport."""
    name: Annotated[str, text(15, 1, LABEL_PATTERN)] | None = None
    """Name."""


class RoleVolume(ApiModel):
    """Something mounted into the main container."""

    rules: ClassVar[tuple[Rule, ...]] = (ONE_SOURCE,)

    mount_path: Annotated[str, text(4096, 1, "^/[^:]*$")]
    """Where."""
    read_only: bool = False
    """Whether it may not be written."""
    sub_path: Annotated[str, text(1024, 1), node(SUB_PATH_INSIDE)] | None = None
    """Part of the volume."""
    config_map: OpenObject | None = None
    """A ConfigMap, as Kubernetes has it."""
    secret: OpenObject | None = None
    """A Secret, as Kubernetes has it."""
    host_path: OpenObject | None = None
    """A path of the node, as Kubernetes has it."""
    persistent_volume_claim: OpenObject | None = None
    """A claim, as Kubernetes has it; the usual place of weights."""


class Topology(ApiModel):
    """How close the members of one replica must be."""

    required_level: Annotated[str, text(317, 1, _LEVEL), node(NO_HOST_LEVEL)]
    """Node label whose value all members of a replica share, by Kueue's topology."""


class Role(ApiModel):
    """Replicas of one kind. An edit of anything but `replicas` replaces each of them, whole."""

    rules: ClassVar[tuple[Rule, ...]] = (NO_ELASTIC_EP, ROLE_KIND_FROZEN)

    name: Label
    """Name; part of the names of Services and Pods."""
    kind: RoleKind = RoleKind.SERVER
    """What its replicas do. Leaving it out of a patch of roles means Server."""
    replicas: Annotated[int, Field(ge=0, le=1024), node(format="int32")] = 1
    """Replicas, each admitted on its own. The one field whose edit replaces nobody."""
    size: Annotated[int, Field(ge=1, le=64), node(format="int32")] = 1
    """Pods of one replica. Leaving it out of a patch of roles means 1."""
    instance_type: Annotated[str, text(253, 1)]
    """InstanceType that its Pods are put on."""
    resources: RoleResources = RoleResources()
    """What each Pod gets of it."""
    image: Image
    """Container image."""
    image_pull_policy: PullPolicy | None = None
    """When the image is fetched; unset: as Kubernetes decides by the tag."""
    image_pull_secrets: PullSecrets = ()
    """Secrets with the credentials of the registry."""
    command: Command = ()
    """Whole command line of your own (takeover): nothing is added to it, and there are no
    probes. Empty: the operator makes it (managed)."""
    extra_args: Command = ()
    """Arguments after the operator's own; without effect beside command."""
    env: Annotated[tuple[RoleEnv, ...], list_map("name", most=128)] = ()
    """Environment variables, with literal values."""
    ports: Annotated[tuple[RolePort, ...], list_map("containerPort", "protocol", most=16)] = ()
    """Ports; the first one serves. None: 8000, named http."""
    additional_volumes: Annotated[tuple[RoleVolume, ...], listing(most=32)] = ()
    """What is mounted."""
    shm_size: Quantity | None = None
    """Size of /dev/shm; unset: 16Gi."""
    privileged: bool = False
    """Whether the container may do everything on its node."""
    topology: Topology | None = None
    """How close the members of one replica must be."""
    termination_grace_period_seconds: Annotated[int, Field(ge=15, le=3600)] = 30
    """Seconds from TERM to KILL; a departing replica keeps the ones it was made with."""
    elastic_ep: OpenObject | None = None
    """Not supported."""


Roles = Annotated[
    tuple[Role, ...],
    list_map(
        "name",
        most=10,
        least=1,
        rules=(ROLE_SET_FROZEN, KINDS_FIT, ONE_OF_A_KIND, NAMES_APART),
    ),
]


class ModelDeploymentSpec(ApiModel):
    """The model, its engine and its roles."""

    rules: ClassVar[tuple[Rule, ...]] = (NO_KV_CACHE, NO_KV_TRANSFER, NO_ROUTER)

    model: Annotated[Model, node(_frozen("model.name", "self.name"))]
    """The served model."""
    engine: Engine
    """The engine that serves it."""
    roles: Roles
    """The roles, told apart by name; the first one is behind the front Service."""
    suspend: bool = False
    """Every role counts as 0 replicas, whatever it says. A pool writes this and nothing else."""
    kv_cache: OpenObject | None = None
    """Not supported."""
    kv_transfer: OpenObject | None = None
    """Not supported."""
    router: OpenObject | None = None
    """Not supported."""


class DeploymentPhase(StrEnum):
    """State of the deployment in one word."""

    STARTING = "Starting"
    READY = "Ready"
    DEGRADED = "Degraded"
    IDLE = "Idle"
    DELETING = "Deleting"


class ReplacementStatus(ApiModel):
    """The one replica of a role that is being replaced."""

    ordinal: Annotated[int, Field(ge=0)]
    """Which replica."""
    phase: Annotated[str, text(63)]
    """Cleanup or WaitingForAdmission."""
    reason: Annotated[str, text(1024)] = ""
    """What it waits for."""
    since: Timestamp | None = None
    """When that began."""


class RoleStatus(ApiModel):
    """What is observed of one role; counts are replicas, not Pods."""

    name: Label
    """Name of the role."""
    kind: RoleKind
    """What its replicas do."""
    desired: Annotated[int, Field(ge=0)] = 0
    """Replicas asked for."""
    ready: Annotated[int, Field(ge=0)] = 0
    """Replicas with all their own members ready, old configuration included."""
    quota_reserved: Annotated[int, Field(ge=0)] = 0
    """Replicas whose Workload is admitted."""
    outdated: Annotated[int, Field(ge=0)] = 0
    """Replicas whose configuration differs from the spec."""
    unmanaged: bool = False
    """Whether its deployed command is the user's own."""
    replacement: ReplacementStatus | None = None
    """The replica that is being replaced, if any."""


class ModelDeploymentStatus(ApiModel):
    """What the operator observes; made anew at every look."""

    observed_generation: Annotated[int, node(format="int64")] = 0
    """Generation of the spec that this status is about."""
    phase: DeploymentPhase | None = None
    """State in one word."""
    phase_message: Message | None = None
    """Why."""
    endpoint: Annotated[str, text(512)] | None = None
    """Address inside the cluster."""
    roles: Annotated[tuple[RoleStatus, ...], list_map("name", most=10)] = ()
    """The roles, in the order of the spec."""
    role_summary: Annotated[str, text(1024)] | None = None
    """Ready/desired of each role in one line, for the column."""
    replacing: Annotated[str, text(1024)] | None = None
    """Replicas that are being replaced in one line, for the column."""
    conditions: Conditions = ()
    """Ready, Stalled, Accepted, Rendered, ReplicasUpToDate, QuotaReserved, RoleKindsReady."""


class ModelDeployment(ApiModel):
    """
    Roles of one model, whose replicas are admitted one by one by Kueue.

    An edit of size, resources, instanceType or command replaces whole replicas one at a time,
    each through a fresh admission.
    """

    api_version: str = API_VERSION
    kind: str = "ModelDeployment"
    metadata: ObjectMeta = ObjectMeta()
    spec: ModelDeploymentSpec
    """The model, its engine and its roles."""
    status: ModelDeploymentStatus | None = None
    """What is observed."""
