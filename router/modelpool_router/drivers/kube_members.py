"""What the Kubernetes driver must know of a member, and of the slot."""

from __future__ import annotations

from dataclasses import dataclass

from modelpool_kube.kinds import MEMBER_KINDS, Kind
from modelpool_kube.record import SlotId
from modelpool_kube.slotrules import Member

from ..core.spec import MemberName
from .profiles import Profile


@dataclass(frozen=True, slots=True)
class KubeMember:
    """One member: the object that is scaled for it, and how its Pod is asked."""

    name: MemberName
    kind: str
    """``Deployment``, ``StatefulSet``, ``InferenceService`` or ``ModelDeployment``."""
    namespace: str
    target: str
    """Name of the object."""
    profile: Profile
    port: int | None = None
    """Port of the container; None = the first one that the Pod declares."""
    service: str | None = None
    """Service that requests go to; None = straight to the Pod."""
    unschedulable_after_s: float | None = None
    """How long a Pod may find no node until the load has failed; None = never by that."""

    @property
    def object_kind(self) -> Kind:
        """Kind of the object."""
        return MEMBER_KINDS[self.kind]

    @property
    def slot_member(self) -> Member:
        """The member as the slot's rules know it."""
        return Member(str(self.name), self.object_kind, self.namespace, self.target)

    def __str__(self) -> str:
        """Return kind, namespace and name of the object."""
        return f"{self.kind} {self.namespace}/{self.target}"


@dataclass(frozen=True, slots=True)
class KubeSlot:
    """The slot of a pool, and who we are to it."""

    namespace: str
    """Of the Lease."""
    lease: str
    holder: str
    """Our name: the Pod's, where the router runs in one."""
    may_create: bool = True
    """Whether to make the Lease when there is none; the operator makes those of ModelPools."""

    @property
    def id(self) -> SlotId:
        """The slot as its rules know it."""
        return SlotId(self.namespace, self.lease)


@dataclass(frozen=True, slots=True)
class KubeLimits:
    """Times of the driver; the defaults are meant for real clusters."""

    poll_s: float = 0.02
    """Between two readiness probes of a loading member."""
    most_poll_s: float = 0.05
    probe_s: float = 2.0
    """A probe that takes longer counts as no answer."""
    settle_s: float = 0.03
    """What happens at once in a cluster comes as many events: look once."""
    resync_s: float = 5.0
    """Look again without any event after so long."""
    look_s: float = 2.0
    """Between two looks at the port of the resident, at our standing and at the record."""
    look_again_s: float = 0.1
    """After a look that found the port closed, before that is believed."""
    gone_s: float = 75.0
    """How long Pods may take to end until it is said that they do not; a grace is 30 s usually."""
    adopt_s: float = 600.0
    """How long a member that was loading when the last router ended may go on with it."""
    hung_s: float = 60.0
    """How long one that was resident then may fail its probes."""
    refused_after_s: float = 30.0
    """How long a readiness path may answer 404 and the like."""
    retry_first_s: float = 0.1
    retry_most_s: float = 5.0
    """Pauses between attempts while the API server does not answer."""
