"""
Watches on everything that concerns one pool: its members, their ReplicaSets and Pods.

What is seen here wakes somebody up, fails a load early or ends a belief. What starts or stops a
member is decided on most-recent reads, never on this cache.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator

from modelpool_kube.errors import Forbidden
from modelpool_kube.kinds import (
    AUTOSCALERS,
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    PODS,
    REPLICASETS,
    Json,
    Kind,
)
from modelpool_kube.port import ClusterPort
from modelpool_kube.slotrules import is_autoscaled
from modelpool_kube.watch import Notice, Reflector

from .kube_members import KubeMember
from .kube_pods import pods_below

_Key = tuple[Kind, str, str]
"""Kind, namespace and name of what is watched; no name = all of them."""


def _keys(member: KubeMember) -> Iterator[_Key]:
    where, name = member.namespace, member.target
    yield member.object_kind, where, name
    if member.object_kind == INFERENCE_SERVICES:
        yield DEPLOYMENTS, where, name
    if member.object_kind in (DEPLOYMENTS, INFERENCE_SERVICES):
        yield REPLICASETS, where, ""
    yield PODS, where, ""
    yield AUTOSCALERS, where, ""


class PoolWatch:
    """
    Caches of one pool, kept up by tasks of its own between `start` and `close`.

    Args:
        port: The cluster.
        members: Whom to watch.
        notify: Called after every change, with the kind of the object.
    """

    def __init__(
        self,
        port: ClusterPort,
        members: Iterable[KubeMember],
        notify: Callable[[Kind, Notice], None],
        *,
        rng: random.Random | None = None,
    ) -> None:
        self.members = tuple(members)
        self._port = port
        self._notify = notify
        self._rng = rng
        self._reflectors: dict[_Key, Reflector] = {}
        self._tasks: dict[_Key, asyncio.Task[None]] = {}
        for member in self.members:
            for key in _keys(member):
                if key not in self._reflectors:
                    self._reflectors[key] = self._reflector(*key)

    def _reflector(self, kind: Kind, namespace: str, name: str) -> Reflector:
        return Reflector(
            self._port,
            kind,
            namespace,
            notify=lambda notice: self._notify(kind, notice),
            fields=f"metadata.name={name}" if name else "",
            rng=self._rng,
        )

    def start(self) -> None:
        """Begin to watch."""
        loop = asyncio.get_running_loop()
        for key, reflector in self._reflectors.items():
            kind, namespace, name = key
            self._tasks[key] = loop.create_task(
                reflector.run(), name=f"watch {kind.plural} {namespace}/{name or '*'}"
            )

    def leave(self, member: KubeMember) -> None:
        """End what is watched for *member* alone: our Role does not name it any more."""
        self.members = tuple(m for m in self.members if m.slot_member != member.slot_member)
        needed = {key for each in self.members for key in _keys(each)}
        for key in self._reflectors.keys() - needed:
            del self._reflectors[key]
            if (task := self._tasks.get(key)) is not None:
                task.cancel()

    async def close(self) -> None:
        """End all watches. Idempotent."""
        tasks, self._tasks = self._tasks, {}
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)

    def has_seen(self, member: KubeMember) -> bool:
        """Whether *member* was looked for at least once."""
        reflector = self._reflectors.get((member.object_kind, member.namespace, member.target))
        return reflector is not None and reflector.synced.is_set()

    def has_seen_pods(self, member: KubeMember) -> bool:
        """Whether the Pods of *member*, and what owns them, were looked for at least once."""
        return all(self._is_known(key) for key in _keys(member) if key[0] != AUTOSCALERS)

    def has_seen_scalers(self, member: KubeMember) -> bool:
        """Whether it is known who scales *member* beside us, or may not be known to us."""
        return self._is_known((AUTOSCALERS, member.namespace, ""))

    def _is_known(self, key: _Key) -> bool:
        reflector = self._reflectors.get(key)
        if reflector is None:
            return False
        return reflector.synced.is_set() or isinstance(reflector.trouble, Forbidden)

    def object_of(self, member: KubeMember) -> Json | None:
        """Return the object that the pool names."""
        return self._get(member.object_kind, member)

    def owner_of(self, member: KubeMember) -> Json | None:
        """Return the object that owns the Pods."""
        is_service = member.object_kind == INFERENCE_SERVICES
        return self._get(DEPLOYMENTS if is_service else member.object_kind, member)

    def _get(self, kind: Kind, member: KubeMember) -> Json | None:
        reflector = self._reflectors.get((kind, member.namespace, member.target))
        return None if reflector is None else reflector.get(member.namespace, member.target)

    def pods_of(self, member: KubeMember) -> list[Json]:
        """Return the Pods of *member*, the ones that end included."""
        return pods_below(
            member.object_kind,
            self.owner_of(member),
            self._all(REPLICASETS, member.namespace),
            self._all(PODS, member.namespace),
        )

    def pod(self, namespace: str, name: str) -> Json | None:
        """Return a Pod by its name."""
        reflector = self._reflectors.get((PODS, namespace, ""))
        return None if reflector is None else reflector.get(namespace, name)

    def autoscaler_of(self, member: KubeMember) -> str | None:
        """Return the name of the HorizontalPodAutoscaler on *member*, if there is one."""
        found = tuple(self._all(AUTOSCALERS, member.namespace))
        return is_autoscaled(member.slot_member, found)

    def _all(self, kind: Kind, namespace: str) -> list[Json]:
        reflector = self._reflectors.get((kind, namespace, ""))
        return [] if reflector is None else list(reflector.items.values())
