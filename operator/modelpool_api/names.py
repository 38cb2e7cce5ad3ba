"""
Words that are spelled alike in objects, events, roles and code: change one here or nowhere.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum

GROUP = "modelpool.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

# Annotations
SLOT_ANNOTATION = f"{GROUP}/slot"
"""On every member: ``<namespace>/<lease>:<epoch>``. Who may scale it, and since which decision."""
RECORD_ANNOTATION = f"{GROUP}/record"
"""On the Lease of a pool: the slot record, JSON."""
SLOT_APPLIED_ANNOTATION = f"{GROUP}/slot-applied"
"""On a ModelDeployment, written by its controller: the slot value it acts on, then ``=0`` when it
suspended itself for it, or ``=1``. The epoch has travelled down when this says so."""
REPLACEMENTS_ANNOTATION = f"{GROUP}/replacements"
"""On a ModelDeployment: the replacements its controller has begun and not ended, JSON by role."""
SPEC_HASH_ANNOTATION = f"{GROUP}/spec-hash"
"""On what we render: digest of the render, so that drift is seen without comparing defaults."""
COMMAND_MODE_ANNOTATION = f"{GROUP}/command-mode"
"""On Pods of a ModelDeployment: ``managed`` or ``takeover``."""
ACCEPTED_ANNOTATION = f"{GROUP}/accepted"
"""On a ModelDeployment, JSON by role: what of its InstanceType was last accepted. A later change of
the type does not bar other edits of the role."""

# Labels of ours
POOL_LABEL = f"{GROUP}/pool"
ROLE_KIND_LABEL = f"{GROUP}/role-kind"
ORDINAL_LABEL = f"{GROUP}/ordinal"
MEMBER_INDEX_LABEL = f"{GROUP}/member-index"
ROUTING_LABEL = f"{GROUP}/answers"
"""``true`` on Pods that may get requests through a Service; absent otherwise."""

# Labels everybody knows
APP_NAME_LABEL = "app.kubernetes.io/name"
APP_INSTANCE_LABEL = "app.kubernetes.io/instance"
APP_COMPONENT_LABEL = "app.kubernetes.io/component"
APP_PART_OF_LABEL = "app.kubernetes.io/part-of"
APP_MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
PART_OF = "modelpool"

# Field managers: who wrote a field, in `kubectl get --show-managed-fields`
ROUTER_MANAGER = "modelpool-router"
OPERATOR_MANAGER = "modelpool-operator"
CLI_MANAGER = "modelpool-cli"

FINALIZER = f"{GROUP}/teardown"
"""On a ModelDeployment until its last Pod has left."""

# Environment of the containers of a replica with several members
LEADER_ADDRESS_ENV = "MODELPOOL_REPLICA_LEADER_ADDRESS"
REPLICA_SIZE_ENV = "MODELPOOL_REPLICA_SIZE"
MEMBER_INDEX_ENV = "MODELPOOL_MEMBER_INDEX"
RANK_ENV = (LEADER_ADDRESS_ENV, REPLICA_SIZE_ENV, MEMBER_INDEX_ENV)


def lease_name(pool: str) -> str:
    """Return the name of the Lease that says who may move the slot of *pool*."""
    return f"modelpool-{pool}"


def group_prefix(namespace: str, deployment: str) -> str:
    """
    Return how the names of all pod groups of a ModelDeployment begin, and of nobody else's.

    Kueue names a Workload like its group and copies no label of ours, so a Workload without
    Pods can be found by this alone.
    """
    return f"mdep-{_digest(namespace, deployment)}-"


def group_name(namespace: str, deployment: str, role: str, ordinal: int) -> str:
    """Return the name of the pod group of one replica; also that of its Workload."""
    return f"{group_prefix(namespace, deployment)}{_digest(role, str(ordinal))}"


def _digest(*parts: str) -> str:
    # A slash is in no name of Kubernetes, so no two lists of parts are joined to the same text.
    return hashlib.sha256("/".join(parts).encode()).hexdigest()[:16]


class ConditionType(StrEnum):
    """Types of conditions; adjectives, as the API conventions want them."""

    # Every kind; the two that kstatus tools read
    READY = "Ready"
    STALLED = "Stalled"
    # ModelPool
    MEMBERS_VALID = "MembersValid"
    SLOT_ALLOCATED = "SlotAllocated"
    SWAP_DEFERRED = "SwapDeferred"
    METAL_SUPPORTED = "MetalSupported"
    # InferenceService, ModelRouter
    AVAILABLE = "Available"
    REPLICAS_PINNED = "ReplicasPinned"
    POOLS_RESOLVED = "PoolsResolved"
    # ModelDeployment
    ACCEPTED = "Accepted"
    RENDERED = "Rendered"
    REPLICAS_UP_TO_DATE = "ReplicasUpToDate"
    QUOTA_RESERVED = "QuotaReserved"
    ROLE_KINDS_READY = "RoleKindsReady"


class Reason(StrEnum):
    """Reasons of conditions and Events. A condition uses the ones its type lists."""

    # MembersValid
    ALL_RESOLVED = "AllResolved"
    MISSING_MEMBERS = "MissingMembers"
    MEMBER_SHARED = "MemberShared"
    UNSAFE_MEMBER = "UnsafeMember"
    # SlotAllocated (and MissingMembers)
    RESIDENT = "Resident"
    SWAPPING = "Swapping"
    COLD = "Cold"
    RELEASED = "Released"
    # SwapDeferred
    PODS_BUSY = "PodsBusy"
    IDLE_CHECK_FAILED = "IdleCheckFailed"
    REPLICAS_CONTESTED = "ReplicasContested"
    NOT_DEFERRED = "NotDeferred"
    # MetalSupported
    KUBERNETES_GPU = "KubernetesGPU"
    METAL_MEMBERS_UNSUPPORTED = "MetalMembersUnsupported"
    # Ready, Stalled
    SLOT_SERVED = "SlotServed"
    WAITING_FOR_DEMAND = "WaitingForDemand"
    PROGRESSING = "Progressing"
    NOT_STALLED = "NotStalled"
    RECORD_UNREADABLE = "RecordUnreadable"
    NODE_LOST = "NodeLost"
    FORBIDDEN = "Forbidden"
    LOAD_FAILED = "LoadFailed"
    # InferenceService
    AVAILABLE = "Available"
    STOPPED = "Stopped"
    WAITING_FOR_GPU = "WaitingForGPU"
    NAME_TAKEN = "NameTaken"
    # ModelRouter
    PINNED = "Pinned"
    AS_SPECIFIED = "AsSpecified"
    MISSING_POOLS = "MissingPools"
    DUPLICATE_NAMES = "DuplicateNames"
    # ModelDeployment
    VALID = "Valid"
    INVALID = "Invalid"
    RENDER_FAILED = "RenderFailed"
    UP_TO_DATE = "UpToDate"
    ROLLOUT_IN_PROGRESS = "RolloutInProgress"
    REPLACEMENT_IN_PROGRESS = "ReplacementInProgress"
    REPLACEMENT_BLOCKED = "ReplacementBlocked"
    ROLLOUT_NOT_OBSERVED = "RolloutNotObserved"
    RESERVED = "Reserved"
    PENDING = "Pending"
    POD_GROUP_INCOMPLETE = "PodGroupIncomplete"
    PREEMPTED_IN_PART = "PreemptedInPart"
    ADMISSION_IN_FLIGHT = "AdmissionInFlight"
    NO_REPLICAS = "NoReplicas"
    ALL_REPLICAS_TERMINATING = "AllReplicasTerminating"
    ALL_KINDS_READY = "AllKindsReady"
    KINDS_NOT_READY = "KindsNotReady"
    NO_ROLE_STATUSES = "NoRoleStatuses"


class EventReason(StrEnum):
    """Reasons of Events, one per change of state."""

    SWAP_STARTED = "SwapStarted"
    SWAP_COMPLETED = "SwapCompleted"
    SWAP_DEFERRED = "SwapDeferred"
    SWAP_FAILED = "SwapFailed"
    MEMBER_WARMED = "MemberWarmed"
    MEMBER_DRAINED = "MemberDrained"
    RESIDENT_LOST = "ResidentLost"
    POD_FORGOTTEN = "PodForgotten"
    RENDER_FAILED = "RenderFailed"
    REPLACEMENT_STARTED = "ReplacementStarted"
    REPLACEMENT_VACANT = "ReplacementVacant"
    REPLACEMENT_CREATED = "ReplacementCreated"
    REPLACEMENT_SUPERSEDED = "ReplacementSuperseded"
    REPLACEMENT_ADMITTED = "ReplacementAdmitted"
    REPLACEMENT_CANCELLED = "ReplacementCancelled"
    REPLACEMENT_BLOCKED = "ReplacementBlocked"
    REPLACEMENT_MEMBER_LOST = "ReplacementMemberLost"
