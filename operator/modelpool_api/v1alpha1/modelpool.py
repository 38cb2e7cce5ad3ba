"""ModelPool: several models that take turns on one accelerator slot."""

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
    Timestamp,
    duration,
    first_culprit,
    list_map,
    listing,
    node,
    text,
)
from ..names import API_VERSION
from .container import NodeSelector, Profile

REFS = {
    "InferenceService": "inferenceServiceRef",
    "ModelDeployment": "modelDeploymentRef",
    "Deployment": "deploymentRef",
    "StatefulSet": "statefulSetRef",
}
"""The field of a pool member that refers to an object, by the kind of the object."""


def _name_of(item: str) -> str:
    """Return CEL for the name of the pool member *item*: its own, else its reference's."""
    refs = "".join(f"has({item}.{ref}) ? {item}.{ref}.name : " for ref in REFS.values())
    return f"(has({item}.name) ? {item}.name : {refs}'')"


_COUNT = " + ".join(f"(has(self.{ref}) ? 1 : 0)" for ref in REFS.values())

ONE_REF = Rule(
    rule=f"{_COUNT} == 1",
    message="needs exactly one of inferenceServiceRef, modelDeploymentRef, deploymentRef and "
    "statefulSetRef; keep the one that runs this model, as in deploymentRef: {name: coder}",
    # Constants, because the server cannot tell how long a number becomes as text.
    shown="'member \"' + " + _name_of("self") + " + '\" has ' + "
    f"({_COUNT} == 0 ? 'no reference' : 'more than one reference') + '; keep exactly one of "
    "inferenceServiceRef, modelDeploymentRef, deploymentRef and statefulSetRef'",
)
_NAMED_ONCE = f"self.exists_one(b, {_name_of('a')} == {_name_of('b')})"
_OWN_NAMES = (
    "a member's name is its `name`, or its reference's: remove one, or give one of them another "
    "`name`"
)
UNIQUE_MEMBERS = Rule(
    rule=f"self.all(a, {_NAMED_ONCE})",
    message=f"two members have the same name; {_OWN_NAMES}",
    shown=first_culprit(
        "self",
        "a",
        f"!{_NAMED_ONCE}",
        f"'two members have the same name \"' + {_name_of('a')} + "
        f"'\"; {_OWN_NAMES.replace(chr(39), chr(92) + chr(39))}'",
    ),
)
DEFAULT_IS_MEMBER = Rule(
    rule=f"!has(self.default) || self.members.exists(m, {_name_of('m')} == self.default)",
    message="default is no member; write the name of one of spec.members, or leave it out",
    shown="'default \"' + self.default + '\" is no member; write the name of one of spec.members, "
    "add it there, or leave default out'",
    at=".default",
)


class Reference(ApiModel):
    """Name of an object in the namespace of the pool."""

    name: ObjectName
    """Its name."""


class PoolMember(ApiModel):
    """One model of the pool: the object that runs it, and how it is reached."""

    rules: ClassVar[tuple[Rule, ...]] = (ONE_REF,)

    name: ModelName | None = None
    """Name that clients use in `model`; unset: the name of the reference. Unique in the pool."""
    inference_service_ref: Reference | None = None
    """The InferenceService that runs it."""
    model_deployment_ref: Reference | None = None
    """The ModelDeployment that runs it; the pool suspends and resumes it."""
    deployment_ref: Reference | None = None
    """The Deployment that runs it; its strategy must be Recreate."""
    stateful_set_ref: Reference | None = None
    """The StatefulSet that runs it."""
    service_ref: Reference | None = None
    """Service to send requests to; unset: straight to the Pod, which needs no Service and never
    reaches an old one."""
    models: Annotated[tuple[ModelName, ...], listing(most=32, unique=True)] = ()
    """Further names that clients may use in `model`."""
    served_model: ModelName | None = None
    """Name that the engine itself wants to read in `model`; unset: the body passes untouched."""
    profile: Profile | None = None
    """Engine, which decides the probes and `parallel`; unset: the InferenceService's, else
    generic."""
    port: Port | None = None
    """Port of the container; unset: the only or first one that it declares."""
    parallel: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Most requests inside the engine at once, the rest is held; unset: what the engine reports,
    else 256 for vllm and 16 for others."""
    expected_load: Annotated[str, duration("10ms")] | None = None
    """Load time to assume until one has been measured; unset: 60s."""
    readiness_path: Annotated[str, text(1024, 1, "^/[^ ]*$")] | None = None
    """Path that answers 200 when the engine can serve; unset: the profile's."""
    idle_path: Annotated[str, text(1024, 1, "^/[^ ]*$")] | None = None
    """Path that answers 200 when the engine works on nothing; unset: the profile's."""

    @property
    def kind(self) -> str:
        """Kind of the object that runs it; empty when there is no reference."""
        for value, kind in (
            (self.inference_service_ref, "InferenceService"),
            (self.model_deployment_ref, "ModelDeployment"),
            (self.deployment_ref, "Deployment"),
            (self.stateful_set_ref, "StatefulSet"),
        ):
            if value is not None:
                return kind
        return ""

    @property
    def target(self) -> str:
        """Name of the object that runs it; empty when there is no reference."""
        for ref in (
            self.inference_service_ref,
            self.model_deployment_ref,
            self.deployment_ref,
            self.stateful_set_ref,
        ):
            if ref is not None:
                return ref.name
        return ""

    @property
    def member_name(self) -> str:
        """Name in the pool: its own, else the reference's."""
        return self.name or self.target


class SwapPolicy(StrEnum):
    """When the slot changes hands."""

    STICKY = "sticky"


class ModelPoolSpec(ApiModel):
    """Which models take turns on the slot, and by which rules."""

    rules: ClassVar[tuple[Rule, ...]] = (DEFAULT_IS_MEMBER,)

    members: Annotated[
        tuple[PoolMember, ...],
        listing(most=32, least=1),
        node(UNIQUE_MEMBERS),
    ]
    """The models; at most one of them is up at any time. Their order breaks ties."""
    default: ModelName | None = None
    """Member that is warmed when the pool is cold and nobody waits. An edit moves nothing while
    the pool is warm."""
    swap_policy: SwapPolicy = SwapPolicy.STICKY
    """sticky: the resident stays until another member is wanted."""
    swap_budget: Annotated[str, duration()] = "300s"
    """Longest hold of a request, from its arrival; then 503 with Retry-After. 0s refuses at once
    and lets the load go on."""
    max_turn: Annotated[str, duration()] = "60s"
    """How long newcomers for the resident may overtake those who wait for another member."""
    linger: Annotated[str, duration("0s", "10m", word="auto")] = "auto"
    """How long an idle resident is kept after its last answer; auto: a quarter of the measured
    swap time, at most 2s."""
    drain_timeout: Annotated[str, duration("0s")] | None = None
    """Longest drain; then what still runs ends with an error to its clients. Unset: never."""
    load_timeout: Annotated[str, duration("100ms")] = "10m"
    """Longest load of a member; then it has failed."""
    unschedulable_after: Annotated[str, duration("1s")] | None = None
    """How long a Pod may be unschedulable until its load has failed; unset: loadTimeout, because
    node pools need time to grow."""
    max_generation: Annotated[str, duration("1s", "168h")] | None = None
    """Longest answer while somebody waits for another member. Unset: no bound."""
    idle_unload_after: Annotated[str, duration("1s", "8760h")] | None = None
    """Idle time after which the slot is emptied. Unset: never."""
    reclaim_default_after: Annotated[str, duration("1s", "8760h")] | None = None
    """Idle time after which a resident that is not the default gives way to it. Unset: never."""
    hung_after: Annotated[str, duration("1s")] = "60s"
    """How long readiness and idle probes must fail, with no answer progressing, until a resident
    counts as lost and is stopped."""
    gpu: Annotated[int, Field(ge=0, le=1024)] = 1
    """Accelerators of the slot; for people, nothing is scheduled by it."""
    node_selector: NodeSelector = Field(default_factory=dict)
    """Where the slot is; for people. A member that cannot land there is reported."""


class PoolPhase(StrEnum):
    """State of the pool in one word."""

    PENDING = "Pending"
    READY = "Ready"
    SWAPPING = "Swapping"
    DEGRADED = "Degraded"


class PoolMemberPhase(StrEnum):
    """State of a member in one word. Stopped, at 0 replicas, is the normal held state."""

    READY = "Ready"
    LOADING = "Loading"
    UNLOADING = "Unloading"
    STOPPED = "Stopped"
    FAILED = "Failed"
    MISSING = "Missing"
    UNSAFE = "Unsafe"


class PoolMemberStatus(ApiModel):
    """What is known of one member."""

    name: ModelName
    """Name in the pool."""
    kind: Annotated[str, text(63)] = ""
    """Kind of the object that runs it."""
    phase: PoolMemberPhase
    """State in one word."""
    resident: bool = False
    """Whether it holds the slot and can serve."""
    message: Message | None = None
    """Why, where the phase does not say it."""


class ModelPoolStatus(ApiModel):
    """What the operator observes, and what the router recorded."""

    observed_generation: Annotated[int, node(format="int64")] = 0
    """Generation of the spec that this status is about."""
    phase: PoolPhase | None = None
    """State in one word: Pending, Ready, Swapping or Degraded."""
    resident_member: Annotated[str, text(200)] | None = None
    """Member that holds the slot and can serve."""
    pending_member: Annotated[str, text(200)] | None = None
    """Member that is to hold the slot next."""
    held: Annotated[int, Field(ge=0)] | None = None
    """Requests that wait, as the router last recorded."""
    epoch: Annotated[int, node(format="int64")] | None = None
    """Number of the last decision on who owns the slot."""
    router: Annotated[str, text(253)] | None = None
    """Pod that may move the slot."""
    last_swap_time: Timestamp | None = None
    """When the last swap was completed."""
    members: Annotated[tuple[PoolMemberStatus, ...], list_map("name", most=32)] = ()
    """The members, in the order of the spec."""
    conditions: Conditions = ()
    """Ready, Stalled, MembersValid, SlotAllocated, SwapDeferred, MetalSupported."""


class ModelPool(ApiModel):
    """
    Several models that take turns on one accelerator slot.

    At most one member is up at any time. A request for another one is held while the resident
    drains, stops, and the wanted one loads.
    """

    api_version: str = API_VERSION
    kind: str = "ModelPool"
    metadata: ObjectMeta = ObjectMeta()
    spec: ModelPoolSpec
    """Which models take turns, and by which rules."""
    status: ModelPoolStatus | None = None
    """What is observed. Written by the operator alone."""


POOL_NAME_FITS = Rule(
    rule="self.metadata.name.matches('^[a-z0-9]([-a-z0-9]{0,51}[a-z0-9])?$')",
    message="metadata.name must be a DNS label of at most 53 characters, because the Lease "
    "modelpool-<name> and labels are made of it; choose a shorter one without dots",
    shown="'metadata.name \"' + self.metadata.name + '\" must be a DNS label of at most 53 "
    "characters, because a Lease and labels are named after it; choose a shorter one without dots'",
)
"""On the object as a whole."""
