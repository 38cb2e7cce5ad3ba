"""ModelRouter: the reverse proxy that clients talk to."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from ..meta import (
    ApiModel,
    Conditions,
    Message,
    ModelName,
    ObjectMeta,
    ObjectName,
    Port,
    Rule,
    duration,
    list_map,
    listing,
    node,
    text,
)
from ..names import API_VERSION
from .container import Image, NodeSelector, PullPolicy, PullSecrets, ResourceAmounts, Tolerations
from .inferenceservice import SERVICE_NAME_FITS

_URL = "^https?://[^/?#@ ]+(/[^?# ]*)?$"

UPSTREAM_URL = Rule(
    rule=f"has(self.url) && self.url.matches('{_URL}')",
    message="url must be an http or https address without user, query and fragment; write it like "
    "http://10.0.0.7:8080 or https://example.org/prefix",
    shown="'upstream \"' + self.name + '\" ' + (has(self.url) ? 'has the url \"' + self.url + "
    "'\", which is no http or https address without user, query and fragment' : 'has no url') + "
    "'; write one like http://10.0.0.7:8080 or https://example.org/prefix'",
    at=".url",
)
SOMETHING_TO_ROUTE = Rule(
    rule="(has(self.pools) && size(self.pools) > 0)"
    " || (has(self.upstreams) && size(self.upstreams) > 0)",
    message="has neither pools nor upstreams, so there is nothing to route; name at least one pool "
    "in spec.pools or one upstream in spec.upstreams",
)
KEYS_OR_ANONYMOUS = Rule(
    rule="has(self.keys) != self.allowAnonymous",
    message="who may use it? Name a Secret with API keys in keys: {name: ...}, or write "
    "allowAnonymous: true; exactly one of the two",
)


class RoutedPool(ApiModel):
    """A ModelPool of the same namespace."""

    name: ObjectName
    """Its name."""


class SecretKey(ApiModel):
    """One entry of a Secret of the same namespace."""

    name: ObjectName
    """Name of the Secret."""
    key: Annotated[str, text(253, 1, "^[-._a-zA-Z0-9]+$")] = "keys"
    """Entry in the Secret."""


class RouterUpstream(ApiModel):
    """A service that is always there: never swapped, only routed to by name."""

    rules: ClassVar[tuple[Rule, ...]] = (UPSTREAM_URL,)

    name: ModelName
    """Name that clients use in `model`."""
    # Not required in the schema: the rule has the better message.
    url: Annotated[str, text(2048)] | None = None
    """Where it answers; a path becomes the prefix of every path. Needed."""
    models: Annotated[tuple[ModelName, ...], listing(most=32, unique=True)] = ()
    """Further names that clients may use in `model`."""
    api_key: SecretKey | None = None
    """Key that the router shows to it; the client's own is never passed on."""
    response_timeout: Annotated[str, duration("10ms")] | None = None
    """Longest wait for the head of its answer; unset: the router's."""


class ServiceType(StrEnum):
    """How the Service is reached."""

    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class RouterService(ApiModel):
    """The Service in front of the router."""

    type: ServiceType = ServiceType.CLUSTER_IP
    """How it is reached."""
    port: Port = 8080
    """Port of the Service."""
    annotations: Annotated[dict[str, Annotated[str, text(4096)]], node(maxProperties=32)] = Field(
        default_factory=dict
    )
    """Annotations for the load balancer of your cloud."""


class HoldKeepalive(StrEnum):
    """What a held client of a streamed request gets to hear."""

    NONE = "none"
    COMMENT = "comment"
    CHUNK = "chunk"


class ModelRouterSpec(ApiModel):
    """What is routed, and how the router runs."""

    rules: ClassVar[tuple[Rule, ...]] = (SOMETHING_TO_ROUTE, KEYS_OR_ANONYMOUS)

    pools: Annotated[tuple[RoutedPool, ...], list_map("name", most=32)] = ()
    """Pools whose slots this router moves."""
    upstreams: Annotated[tuple[RouterUpstream, ...], list_map("name", most=64)] = ()
    """Services that are never swapped."""
    replicas: Annotated[int, Field(ge=0, le=16)] = 1
    """Copies of the router. Pinned to 1 whenever a pool is routed: the swap lock is inside it."""
    image: Image | None = None
    """Image of the router; unset: the operator's own."""
    image_pull_policy: PullPolicy | None = None
    """When the image is fetched; unset: as Kubernetes decides by the tag."""
    image_pull_secrets: PullSecrets = ()
    """Secrets with the credentials of the registry."""
    port: Port = 8080
    """Port that the container listens on."""
    service: RouterService = RouterService()
    """The Service in front of it."""
    keys: SecretKey | None = None
    """Secret with the API keys of clients; see the configuration reference for its form."""
    allow_anonymous: bool = False
    """Everybody who reaches it may use it. Say so on purpose, or name keys."""
    resources: ResourceAmounts = ResourceAmounts()
    """What the router itself needs; held requests wait in its memory."""
    node_selector: NodeSelector = Field(default_factory=dict)
    """Labels that its node must have."""
    tolerations: Tolerations = ()
    """Taints of nodes that do not keep it away."""
    max_held: Annotated[int, Field(ge=0, le=100_000)] = 1000
    """Most requests held at once."""
    max_held_bytes: Annotated[int, Field(ge=0), node(format="int64")] = 536_870_912
    """Most bytes of bodies held at once, in memory and on disk."""
    max_body_bytes: Annotated[int, Field(ge=1), node(format="int64")] = 67_108_864
    """Largest body of a request."""
    hold_keepalive: HoldKeepalive = HoldKeepalive.NONE
    """What streamed requests hear while they are held."""
    response_timeout: Annotated[str, duration("10ms")] = "10m"
    """Longest wait for the head of a member's answer, from the moment it was passed on."""
    shutdown_delay: Annotated[str, duration("0s", "10m")] = "5s"
    """How long it still accepts after it was asked to stop, until nobody is sent to it any more."""
    shutdown_timeout: Annotated[str, duration("0s", "1h")] = "30s"
    """How long running answers may take after that."""


class RouterPhase(StrEnum):
    """State of the router in one word."""

    PENDING = "Pending"
    PROVISIONING = "Provisioning"
    READY = "Ready"
    DEGRADED = "Degraded"
    FAILED = "Failed"


class ModelRouterStatus(ApiModel):
    """What the operator observes."""

    observed_generation: Annotated[int, node(format="int64")] = 0
    """Generation of the spec that this status is about."""
    phase: RouterPhase | None = None
    """State in one word."""
    replicas: Annotated[int, Field(ge=0)] = 0
    """Copies that run."""
    endpoint: Annotated[str, text(512)] | None = None
    """Address inside the cluster."""
    message: Message | None = None
    """Why, where the phase does not say it."""
    conditions: Conditions = ()
    """Ready, Stalled, Available, ReplicasPinned, PoolsResolved."""


class ModelRouter(ApiModel):
    """
    The proxy that clients talk to: one address for the models of its pools and upstreams.

    Exactly one copy runs as long as a pool is routed.
    """

    api_version: str = API_VERSION
    kind: str = "ModelRouter"
    metadata: ObjectMeta = ObjectMeta()
    spec: ModelRouterSpec
    """What is routed, and how the router runs."""
    status: ModelRouterStatus | None = None
    """What is observed."""


ROUTER_NAME_FITS = SERVICE_NAME_FITS
"""On the object as a whole."""
