"""Watches for ModelDeployments, the queue behind them, and the workers that reconcile."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from modelpool_api.names import APP_NAME_LABEL
from modelpool_kube.kinds import (
    INSTANCE_TYPES,
    MODEL_DEPLOYMENTS,
    PODS,
    SERVICES,
    WORKLOADS,
    Json,
    Kind,
)
from modelpool_kube.port import ClusterPort
from modelpool_kube.watch import Key, Notice, Reflector
from modelpool_kube.workqueue import WorkQueue, work

from ..plan.modeldeployment.render import APP
from .modeldeployment import (
    key_of_child,
    key_of_deployment,
    keys_of_type,
    keys_of_workload,
)

OURS = f"{APP_NAME_LABEL}={APP}"

Reconcile = Callable[[Key], Awaitable[float | None]]


class DeploymentWatching:
    """
    The watches, in some namespaces or in all.

    A report only wakes: what is done about it is decided from reads of its own.
    """

    def __init__(
        self,
        port: ClusterPort,
        namespaces: Sequence[str],
        queue: WorkQueue[Key],
        *,
        rng: random.Random,
    ) -> None:
        self._queue = queue
        self._deployments: list[Reflector] = []
        self._pods: list[Reflector] = []
        self.reflectors: list[Reflector] = []
        """Each is to be run by a task of the owner's."""

        def reflect(
            kind: Kind, namespace: str | None, notify: Callable[[Notice], list[Key]], labels: str
        ) -> Reflector:
            made = Reflector(
                port, kind, namespace, notify=partial(self._wake, notify), labels=labels, rng=rng
            )
            self.reflectors.append(made)
            return made

        for namespace in namespaces or (None,):
            self._deployments.append(reflect(MODEL_DEPLOYMENTS, namespace, key_of_deployment, ""))
            self._pods.append(reflect(PODS, namespace, key_of_child, OURS))
            reflect(SERVICES, namespace, key_of_child, OURS)
            reflect(WORKLOADS, namespace, self._of_workload, "")
        reflect(INSTANCE_TYPES, None, self._of_type, "")

    def resync(self) -> None:
        """Look at everything again."""
        for key in self._known():
            self._queue.add(key)

    def _wake(self, keys: Callable[[Notice], list[Key]], notice: Notice) -> None:
        for key in keys(notice):
            self._queue.add(key)

    def _of_workload(self, notice: Notice) -> list[Key]:
        pods = [pod for each in self._pods for pod in each.items.values()]
        return keys_of_workload(notice, pods)

    def _of_type(self, notice: Notice) -> list[Key]:
        return keys_of_type(notice, self._known())

    def _known(self) -> dict[Key, Json]:
        return {key: obj for each in self._deployments for key, obj in each.items.items()}


async def run_deployments(
    port: ClusterPort,
    namespaces: Sequence[str],
    reconcile: Reconcile,
    *,
    rng: random.Random | None = None,
    workers: int = 2,
    resync_s: float = 600.0,
) -> None:
    """
    Watch and reconcile ModelDeployments until cancelled.

    Args:
        port: The API server.
        namespaces: Where; empty means everywhere.
        reconcile: `modeldeployment.ModelDeployments.reconcile`, perhaps counted.
        rng: For jitter.
        workers: How many deployments are worked on at once.
        resync_s: How often each is looked at although nothing was reported.
    """
    rng = rng or random.Random()
    queue: WorkQueue[Key] = WorkQueue(rng=rng)
    watching = DeploymentWatching(port, namespaces, queue, rng=rng)
    async with asyncio.TaskGroup() as group:
        for each in watching.reflectors:
            group.create_task(each.run(), name=f"watch-{each.kind.plural}")
        group.create_task(work(queue, reconcile, workers=workers), name="work-modeldeployments")
        while True:
            await asyncio.sleep(resync_s)
            watching.resync()
