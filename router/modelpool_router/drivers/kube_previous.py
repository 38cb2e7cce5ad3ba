"""
Whether the router that held the slot before us is out of the way.

It may live, cut off from the API server, and go on forwarding to the resident. Nobody may stop a
member that somebody else may still send requests to: an idle probe is true for a moment only.
"""

from __future__ import annotations

import json

from modelpool_kube.errors import KubeError, NotFound
from modelpool_kube.kinds import PODS, Json
from modelpool_kube.port import ClusterPort
from modelpool_kube.slotrules import is_pod_gone

from .kube_pods import address_of
from .probe import Prober

STANDBY = "standby"
"""What the readiness of a router says of a pool that it forwards nothing for."""


async def is_out_of_the_way(
    port: ClusterPort,
    prober: Prober,
    *,
    namespace: str,
    holder: str,
    pool: str,
    held_s: float,
    grace_s: float,
) -> bool:
    """
    Return whether *holder* forwards nothing for *pool* any more.

    Args:
        port: The cluster.
        prober: Asks its readiness.
        namespace: Of its Pod.
        holder: The name it held the Lease under: its Pod's, unless it ran elsewhere.
        pool: Name of the pool.
        held_s: How long we hold the Lease.
        grace_s: Time for one that runs in no Pod to notice that.
    """
    if not _is_pod_name(holder):
        return held_s >= grace_s
    try:
        pod = await port.get(PODS, namespace, holder)
    except NotFound:
        return True
    except KubeError:
        return False
    if is_pod_gone(pod):
        return True
    return await _is_standby(prober, pod, pool)


async def _is_standby(prober: Prober, pod: Json, pool: str) -> bool:
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
                if checks[f"pool {pool}"] == STANDBY:
                    return True
            except (ValueError, KeyError, TypeError):
                continue
    return False


def _is_pod_name(holder: str) -> bool:
    # Names of routers outside of a Pod have an underscore, which no Pod's has.
    return "_" not in holder
