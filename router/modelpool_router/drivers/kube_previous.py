"""
Whether routers that may have held the slot before us are out of the way.

One may live, cut off from the API server, and go on forwarding to the resident. Nobody may stop a
member that somebody else may still send requests to: an idle probe is true for a moment only.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from enum import Enum, auto

from modelpool_api.names import APP_COMPONENT_LABEL
from modelpool_kube.errors import KubeError, NotFound
from modelpool_kube.kinds import PODS, Json, is_going, name_of
from modelpool_kube.port import ClusterPort
from modelpool_kube.slotrules import is_pod_gone

from .kube_pods import address_of, has_run
from .probe import Prober

STANDBY = "standby"
"""What the readiness of a router says of a pool that it forwards nothing for."""
STARTING = "starting"
"""The same while it has not held the slot yet, in this life."""
ROUTERS = f"{APP_COMPONENT_LABEL}=router"
"""Finds the Pods of routers."""


class Other(Enum):
    """What is known of another router."""

    ACTIVE = auto()
    """It may send requests to members."""
    STANDBY = auto()
    """It sends none, and may wait for answers of earlier ones."""
    GONE = auto()
    """It runs no more, or has nothing to do with the pool."""


async def look_at(
    port: ClusterPort,
    prober: Prober,
    *,
    namespace: str,
    holder: str,
    pool: str,
    forgotten: Iterable[str],
    held_s: float,
    grace_s: float,
) -> Other:
    """
    Return what is known of the router *holder*.

    Args:
        port: The cluster.
        prober: Asks its readiness.
        namespace: Of its Pod.
        holder: The name it held the Lease under: its Pod's, unless it ran elsewhere.
        pool: Name of the pool.
        forgotten: Names and UIDs of Pods that a person declared gone.
        held_s: How long we hold the Lease.
        grace_s: Time for one that runs in no Pod to notice that.
    """
    if holder in forgotten:
        return Other.GONE
    if not _is_pod_name(holder):
        return Other.GONE if held_s >= grace_s else Other.ACTIVE
    try:
        pod = await port.get(PODS, namespace, holder)
    except NotFound:
        return Other.GONE
    except KubeError:
        return Other.ACTIVE
    if is_pod_gone(pod, frozenset(forgotten)):
        return Other.GONE
    return await _asked(prober, pod, pool)


async def look_around(
    port: ClusterPort,
    prober: Prober,
    *,
    namespace: str,
    me: str,
    pool: str,
    forgotten: Iterable[str],
) -> dict[str, Other]:
    """
    Return what is known of every router but *me* that may have to do with *pool*.

    One whose containers do not run sends nothing, and a life that begins later finds the Lease
    taken.

    Raises:
        KubeError: nobody knows which there are.
    """
    listed = (await port.list(PODS, namespace, labels=ROUTERS)).items
    known = frozenset(forgotten)
    pods = [
        pod
        for pod in listed
        if name_of(pod) != me and name_of(pod) not in known and not is_pod_gone(pod, known)
    ]
    pods = [pod for pod in pods if is_going(pod) or has_run(pod)]
    found = await asyncio.gather(*(_asked(prober, pod, pool) for pod in pods))
    return {name_of(pod): each for pod, each in zip(pods, found, strict=True)}


async def _asked(prober: Prober, pod: Json, pool: str) -> Other:
    host = address_of(pod)
    for container in (pod.get("spec") or {}).get("containers") or []:
        for each in container.get("ports") or []:
            number = each.get("containerPort")
            if not host or not number:
                continue
            answer = await prober.get(host, int(number), "/readyz", timeout_s=2.0)
            if answer is None:
                continue
            try:
                checks = json.loads(answer[1])["checks"]
                said = checks.get(f"pool {pool}")
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
            if said in (STANDBY, STARTING):
                return Other.STANDBY
            if said is None and "router" in checks:
                return Other.GONE  # it routes other pools
    return Other.ACTIVE


def _is_pod_name(holder: str) -> bool:
    # Names of routers outside of a Pod have an underscore, which no Pod's has.
    return "_" not in holder
