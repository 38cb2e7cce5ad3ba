"""InferenceService: an ordinary service of one model, as a Deployment and a Service."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from ..meta import (
    ApiModel,
    Conditions,
    Message,
    ObjectMeta,
    OpenObject,
    Port,
    Quantity,
    Rule,
    listing,
    node,
    text,
)
from ..names import API_VERSION
from .container import (
    Command,
    Env,
    Image,
    NodeSelector,
    Profile,
    PullPolicy,
    PullSecrets,
    ResourceAmounts,
    Tolerations,
)

SERVICE_NAME_FITS = Rule(
    rule="self.metadata.name.matches('^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$')",
    message="metadata.name must be a DNS label of at most 63 characters that begins with a "
    "letter, because the Service is named so; choose another one",
    shown="'metadata.name \"' + self.metadata.name + '\" must be a DNS label of at most 63 "
    "characters that begins with a letter, because the Service is named so; choose another one'",
)


class Accelerator(StrEnum):
    """What the model runs on."""

    GPU = "gpu"
    CPU = "cpu"
    METAL = "metal"


class InferenceServiceSpec(ApiModel):
    """One model server, and how it is started."""

    image: Image
    """Container image of the engine."""
    image_pull_policy: PullPolicy | None = None
    """When the image is fetched; unset: as Kubernetes decides by the tag."""
    image_pull_secrets: PullSecrets = ()
    """Secrets with the credentials of the registry."""
    command: Command = ()
    """Program and arguments in place of the image's entry point."""
    args: Command = ()
    """Arguments of the program."""
    env: Env = ()
    """Environment variables."""
    port: Port = 8080
    """Port that the engine listens on; the Service has the same."""
    resources: ResourceAmounts = ResourceAmounts()
    """What the container needs, accelerators included: `limits: {nvidia.com/gpu: 1}`."""
    node_selector: NodeSelector = Field(default_factory=dict)
    """Labels that the node must have."""
    tolerations: Tolerations = ()
    """Taints of nodes that do not keep it away."""
    volumes: Annotated[tuple[OpenObject, ...], listing(most=32)] = ()
    """Volumes of the Pod, as Kubernetes has them; most often the one with the weights."""
    volume_mounts: Annotated[tuple[OpenObject, ...], listing(most=32)] = ()
    """Where they are mounted, as Kubernetes has it."""
    shm_size: Quantity | None = None
    """Size of /dev/shm; unset: the container runtime's small default."""
    run_as_user: Annotated[int, Field(ge=1, le=2_147_483_647), node(format="int64")] | None = None
    """User ID of the engine's process, which must be able to read the weights. Its Pods are then
    fit for namespaces with restricted Pod security: no root, no capabilities. Unset: the image's
    user, most often root, which needs a baseline namespace."""
    profile: Profile = Profile.GENERIC
    """Engine, which decides the probes."""
    accelerator: Accelerator = Accelerator.GPU
    """What it runs on. metal cannot be run in a cluster: it is reported and nothing is made."""
    replicas: Annotated[int, Field(ge=0, le=64)] | None = None
    """Copies. Unset: 1, or 0 when a pool lists it; a pool scales it between 0 and 1, so leave it
    out of Git."""
    termination_grace_period_seconds: Annotated[int, Field(ge=0, le=86_400)] = 30
    """Seconds from TERM to KILL."""


class ServicePhase(StrEnum):
    """State of the service in one word."""

    PENDING = "Pending"
    CREATING = "Creating"
    PROGRESSING = "Progressing"
    WAITING_FOR_GPU = "WaitingForGPU"
    READY = "Ready"
    STOPPED = "Stopped"
    FAILED = "Failed"


class InferenceServiceStatus(ApiModel):
    """What the operator observes."""

    observed_generation: Annotated[int, node(format="int64")] = 0
    """Generation of the spec that this status is about."""
    phase: ServicePhase | None = None
    """State in one word."""
    replicas: Annotated[int, Field(ge=0)] = 0
    """Pods that exist."""
    ready_replicas: Annotated[int, Field(ge=0)] = 0
    """Pods that are ready."""
    selector: Annotated[str, text(1024)] | None = None
    """Label selector of its Pods, for the scale subresource."""
    endpoint: Annotated[str, text(512)] | None = None
    """Address inside the cluster."""
    pool: Annotated[str, text(253)] | None = None
    """Pool that scales it, if one lists it."""
    message: Message | None = None
    """Why, where the phase does not say it."""
    conditions: Conditions = ()
    """Ready, Stalled, Available."""


class InferenceService(ApiModel):
    """
    One model server: a Deployment and a Service.

    A pool may scale it between 0 and 1.
    """

    api_version: str = API_VERSION
    kind: str = "InferenceService"
    metadata: ObjectMeta = ObjectMeta()
    spec: InferenceServiceSpec
    """How the model server is started."""
    status: InferenceServiceStatus | None = None
    """What is observed."""
