"""
The router's side of Kubernetes: one client for all pools, one driver for each, and our name.

Imported only by routers that have members there: nobody else pays for the client.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from modelpool_api.names import ROUTER_MANAGER, lease_name
from modelpool_kube.client import KubeClient, connect
from modelpool_kube.errors import KubeError

from ..core.spec import MemberName, PoolName
from ..core.view import PoolView
from ..drivers.base import DriverUnavailable, LostCallback, StandingCallback
from ..drivers.kubernetes import KubeLimits, KubeMember, KubernetesDriver, KubeSlot
from ..drivers.profiles import ProfileOverrides, profile
from ..drivers.statedir import prepare
from ..settings import KubernetesAccess, Pool, Settings

log = structlog.get_logger("modelpool.cluster")

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class Cluster:
    """
    The API server as the drivers of a router share it. `open`, then `close`.

    Attributes:
        port: The cluster.
        namespace: Where Leases of pools are that name no other place.
    """

    def __init__(self, client: KubeClient, *, namespace: str, holder: str) -> None:
        self.port = client
        self.namespace = namespace
        self.holder = holder

    @classmethod
    async def open(cls, settings: Settings, environ: Mapping[str, str]) -> Cluster:
        """
        Find credentials; whether the API server answers is for later.

        Raises:
            DriverUnavailable: There are none that can be used, or the client is not installed.
        """
        access = settings.kubernetes or KubernetesAccess()
        file = access.kubeconfig
        try:
            client = await connect(
                manager=ROUTER_MANAGER,
                kubeconfig=None if file is None else str(file),
                context=access.context,
                call_timeout_s=access.call_timeout_s,
            )
        except KubeError as error:
            raise DriverUnavailable(str(error)) from error
        return cls(
            client,
            namespace=settings.lease_namespace or own_namespace(environ),
            holder=own_name(settings, environ),
        )

    async def close(self) -> None:
        """Close all connections."""
        await self.port.close()

    def driver(
        self,
        pool: Pool,
        *,
        lost: LostCallback,
        standing: StandingCallback,
        view: Callable[[], PoolView | None],
        of_model_pool: str | None,
    ) -> KubernetesDriver:
        """
        Return the driver of *pool*.

        Args:
            of_model_pool: Namespace of the ModelPool that it is made of; None for one of the file.
        """
        return KubernetesDriver(
            PoolName(pool.name),
            kube_members(pool),
            port=self.port,
            slot=KubeSlot(
                of_model_pool or self.namespace,
                lease_name(pool.name),
                self.holder,
                may_create=of_model_pool is None,
            ),
            lost=lost,
            standing=standing,
            view=view,
            default=default_of(pool),
            limits=KubeLimits(adopt_s=pool.load_timeout_s, hung_s=pool.is_hung_after_s),
        )


def default_of(pool: Pool) -> MemberName | None:
    """Return the default of *pool*."""
    return None if pool.default is None else MemberName(pool.default)


def kube_members(pool: Pool) -> dict[MemberName, KubeMember]:
    """Return how the members of *pool* are known to its driver."""
    found: dict[MemberName, KubeMember] = {}
    for member in pool.members:
        assert member.kubernetes is not None  # the settings saw to that
        kind, place = member.kubernetes
        overrides = ProfileOverrides(
            readiness_path=member.readiness_path, idle_path=member.idle_path
        )
        after_s = pool.unschedulable_after_s
        name = MemberName(member.name)
        found[name] = KubeMember(
            name=name,
            kind=kind,
            namespace=place.namespace,
            target=place.name,
            profile=profile(member.profile, overrides),
            port=place.port,
            service=place.service,
            unschedulable_after_s=pool.load_timeout_s if after_s is None else after_s,
        )
    return found


def own_namespace(environ: Mapping[str, str]) -> str:
    """Return the namespace that this router runs in."""
    if found := environ.get("POD_NAMESPACE"):
        return found
    try:
        return NAMESPACE_FILE.read_text(encoding="ascii").strip() or "default"
    except OSError:
        return "default"


def own_name(settings: Settings, environ: Mapping[str, str]) -> str:
    """
    Return the name that this router holds Leases under.

    That of its Pod, so that a restarted container has its Leases back at once. Elsewhere that of
    the machine and the state directory, with an underscore, which the name of a Pod cannot have.
    """
    if found := environ.get("POD_NAME"):
        return found
    if "KUBERNETES_SERVICE_HOST" in environ or NAMESPACE_FILE.exists():
        return os.uname().nodename
    return f"{socket.gethostname()}_{prepare(settings.state_dir)}"
