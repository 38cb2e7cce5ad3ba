"""One life of a member in Kubernetes, and how its engine is asked."""

from __future__ import annotations

from dataclasses import dataclass, field

from .base import Endpoint
from .kube_members import KubeMember
from .kube_pods import Lives
from .probe import Prober, port_refuses


class MemberProber(Prober):
    """Asks members over the network."""

    async def refuses(self, host: str, port: int) -> bool:
        """Return whether nobody listens there."""
        return await port_refuses(host, port)


@dataclass(slots=True, eq=False)
class Life:
    """One time that a member is brought up, from the first write to the proof that it is gone."""

    spec: KubeMember
    is_scaled: bool = False
    """Its scaling up was acknowledged, in an epoch that still counts."""
    is_found: bool = False
    """It was up before we held the slot, so that other routers may know of it."""
    is_stopping: bool = False
    is_lost: bool = False
    before: frozenset[str] | None = None
    """UIDs of Pods that were there before it; None = nobody has looked yet."""
    is_watched: bool = False
    """The watch has shown its Pod, so that it means something when it shows it no more."""
    lives: Lives = field(default_factory=lambda: Lives("", 0))
    pod_name: str = ""
    address: tuple[str, int] = ("", 0)
    """Of its Pod, for probes."""
    endpoint: Endpoint | None = None
    waits_for: str = ""
    """For people, while it loads."""

    @property
    def is_over(self) -> bool:
        """Whether nothing of it may be used any more."""
        return self.is_stopping or self.is_lost
