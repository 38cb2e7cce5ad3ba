"""Many deaths in one story: of each pool another number of writes is the last."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from cluster_eye import PodEye
from cluster_faults import Fate, Write
from cluster_kubectl import until
from cluster_operator import install
from harness import Cluster, OwnCluster

POOL = re.compile(r"\b([a-z][0-9]{2})\b")
"""Names of pools in such stories; what belongs to one has its name in its own."""


def pool_of(member: str) -> str:
    """Return the pool of a member."""
    return member.rpartition("-")[0]


def members_of(pool: str) -> list[str]:
    """Return the members of a pool."""
    return [f"{pool}-a", f"{pool}-b"]


def about(write: Write) -> str:
    """Return the pool that *write* is about; empty when it is about none."""
    regarding = ((write.body or {}).get("regarding") or {}).get("name", "")
    found = POOL.search(f"{write.name} {regarding}")
    return found[1] if found else ""


def is_take(write: Write) -> bool:
    """Whether somebody takes a Lease."""
    return write.kind == "leases" and "acquireTime" in ((write.body or {}).get("spec") or {})


class Deaths:
    """
    The rule by which the n-th pool is written no more before its n-th write.

    That is all that a cluster ever sees of a death. What was on its way may land later.

    Attributes:
        last: By pool, the write before which its actuator died.
    """

    def __init__(self, pools: list[str]) -> None:
        self.last: dict[str, Write] = {}
        self._left = {pool: number for number, pool in enumerate(pools)}

    def __call__(self, write: Write) -> Fate:
        pool = about(write)
        if pool not in self._left:
            return Fate.PASS
        if pool in self.last:
            return Fate.LOSE
        if write.is_renewal:
            return Fate.PASS
        if self._left[pool]:
            self._left[pool] -= 1
            return Fate.PASS
        self.last[pool] = write
        return Fate.CUT_AND_HOLD


@contextmanager
def stage(cluster: Cluster, name: str) -> Iterator[tuple[str, PodEye, ExitStack]]:
    """
    Give a story a namespace, an eye on its Pods, and what ends with it; then leave nothing.

    Ours are installed. Skips where the cluster is somebody else's.
    """
    if not isinstance(cluster, OwnCluster):
        pytest.skip("needs test nodes: unset KUBECONFIG and build the cluster's binaries")
    install(cluster.kubectl)
    namespace = cluster.new_namespace(name)
    with ExitStack() as stack:
        eye = PodEye(cluster.kubectl, namespace, pool_of)
        stack.callback(eye.close)
        yield namespace, eye, stack
    # A router ends before its Role does.
    cluster.kubectl("delete", "deployments,pods", "--all", "-n", namespace, "--wait=false")
    until(lambda: not cluster.kubectl.items("pods", "-n", namespace), "no Pod is left", 90)
    cluster.kubectl("delete", "namespace", namespace, "--wait=false")
