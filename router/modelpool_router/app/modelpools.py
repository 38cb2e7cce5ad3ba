"""
Pools that are written as ModelPool objects: read, followed, and put beside those of the file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import structlog
from pydantic import ValidationError

from modelpool_api.v1alpha1.modelpool import ModelPool, PoolMember
from modelpool_kube.errors import KubeError
from modelpool_kube.kinds import INFERENCE_SERVICES, MODEL_POOLS, Json, is_going
from modelpool_kube.port import ClusterPort
from modelpool_kube.watch import Notice, Reflector

from ..settings import Pool, PoolsFrom, Settings

log = structlog.get_logger("modelpool.modelpools")

KEYS = {
    "InferenceService": "inferenceService",
    "ModelDeployment": "modelDeployment",
    "Deployment": "deployment",
    "StatefulSet": "statefulSet",
}
SETTLE_S = 0.2
"""Several objects are often applied at once: put them in force at once, too."""
FIRST_LOOK_S = 10.0
AGAIN_S = 5.0


class BadModelPool(Exception):
    """A ModelPool cannot be served; says why."""


def pool_of(obj: Json, profiles: Mapping[str, str]) -> Pool:
    """
    Return the pool that the ModelPool *obj* describes.

    Args:
        obj: As the API server has it.
        profiles: Profiles of InferenceServices by their names.

    Raises:
        BadModelPool: something in it cannot be used.
    """
    try:
        read = ModelPool.model_validate({k: v for k, v in obj.items() if k != "status"})
        spec = read.spec
        where = str(obj["metadata"].get("namespace", "default"))
        tree: dict[str, Any] = {
            "name": obj["metadata"]["name"],
            "members": [_member(each, where, profiles) for each in spec.members],
            "default": spec.default,
            "swapBudget": spec.swap_budget,
            "maxTurn": spec.max_turn,
            "linger": spec.linger,
            "drainTimeout": spec.drain_timeout,
            "loadTimeout": spec.load_timeout,
            "unschedulableAfter": spec.unschedulable_after,
            "maxGeneration": spec.max_generation,
            "idleUnloadAfter": spec.idle_unload_after,
            "reclaimDefaultAfter": spec.reclaim_default_after,
            "hungAfter": spec.hung_after,
        }
        given = {key: value for key, value in tree.items() if value is not None}
        return Pool.model_validate(given, by_alias=True, by_name=False)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(step) for step in first["loc"])
        raise BadModelPool(f"{place}: {first['msg']}") from error


def _member(member: PoolMember, namespace: str, profiles: Mapping[str, str]) -> dict[str, Any]:
    place: dict[str, Any] = {"namespace": namespace, "name": member.target}
    if member.port is not None:
        place["port"] = member.port
    if member.service_ref is not None:
        place["service"] = member.service_ref.name
    known = None if member.profile is None else str(member.profile)
    if known is None and member.inference_service_ref is not None:
        known = profiles.get(member.target)
    tree: dict[str, Any] = {
        "name": member.member_name,
        "models": list(member.models),
        "servedModel": member.served_model,
        "profile": known,
        "parallel": member.parallel,
        "expectedLoad": member.expected_load,
        "readinessPath": member.readiness_path,
        "idlePath": member.idle_path,
        KEYS[member.kind]: place,
    }
    return {key: value for key, value in tree.items() if value is not None}


def beside(settings: Settings, pools: Mapping[str, Pool]) -> Settings:
    """Return *settings* with *pools* added, but for those that would take a name twice."""
    taken = {name for each in settings.upstreams for name in (each.name, *each.models)}
    names: set[str] = set()
    for pool in settings.pools:
        names.add(pool.name)
        taken |= {name for member in pool.members for name in (member.name, *member.models)}
    added: list[Pool] = []
    for name, pool in sorted(pools.items()):
        wanted = [n for member in pool.members for n in (member.name, *member.models)]
        twice = sorted({n for n in wanted if n in taken or wanted.count(n) > 1})
        if name in names or twice:
            why = f"its name is that of a pool of the file; name={name}"
            if twice:
                why = f"names that somebody else has already: {', '.join(twice)}"
            log.error("ModelPool is left out", pool=name, reason=why)
            continue
        taken |= set(wanted)
        added.append(pool)
    made = settings.model_copy(update={"pools": (*settings.pools, *added)})
    made._source = settings.source
    return made


class ModelPools:
    """
    Follows the ModelPools that *chosen* names.

    Attributes:
        pools: Those that can be served, by name.
    """

    def __init__(
        self, port: ClusterPort, chosen: PoolsFrom, changed: Callable[[], Awaitable[None]]
    ) -> None:
        self.pools: dict[str, Pool] = {}
        self._port = port
        self._chosen = chosen
        self._changed = changed
        self._dirty = asyncio.Event()
        self._pools = self._reflector(MODEL_POOLS)
        self._services = self._reflector(INFERENCE_SERVICES)
        self._tasks: set[asyncio.Task[None]] = set()

    def _reflector(self, kind: Any) -> Reflector:
        return Reflector(self._port, kind, self._chosen.namespace, notify=self._noticed)

    async def start(self) -> None:
        """Begin to follow; return when there was a first look, or after a while without one."""
        loop = asyncio.get_running_loop()
        for reflector in (self._pools, self._services):
            self._tasks.add(loop.create_task(reflector.run(), name="watch of ModelPools"))
        try:
            async with asyncio.timeout(FIRST_LOOK_S):
                await self._pools.synced.wait()
                if any(self._needs_services(obj) for obj in self._pools.items.values()):
                    await self._services.synced.wait()
        except TimeoutError:
            log.warning("ModelPools cannot be read yet", detail=str(self._pools.trouble or ""))
        self._read()
        self._dirty.clear()
        self._tasks.add(loop.create_task(self._follow(), name="follow ModelPools"))

    async def close(self) -> None:
        """Follow no more. Idempotent."""
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _needs_services(self, obj: Json) -> bool:
        members = (obj.get("spec") or {}).get("members") or []
        return any("inferenceServiceRef" in m and "profile" not in m for m in members)

    def _noticed(self, notice: Notice) -> None:
        self._dirty.set()

    def _read(self) -> bool:
        """Read what the watches show; return whether the pools are others now."""
        profiles = {
            name: str(obj["spec"]["profile"])
            for (_, name), obj in self._services.items.items()
            if (obj.get("spec") or {}).get("profile")
        }
        found: dict[str, Pool] = {}
        for (_, name), obj in self._pools.items.items():
            wanted = not self._chosen.names or name in self._chosen.names
            if not wanted or is_going(obj):
                continue
            try:
                found[name] = pool_of(obj, profiles)
            except BadModelPool as error:
                log.error("ModelPool cannot be served", pool=name, reason=str(error))
                if name in self.pools:
                    found[name] = self.pools[name]  # as it was: a bad edit changes nothing
        changed = found != self.pools
        self.pools = found
        return changed

    async def _follow(self) -> None:
        while True:
            await self._dirty.wait()
            await asyncio.sleep(SETTLE_S)
            self._dirty.clear()
            if not self._read():
                continue
            try:
                await self._changed()
            except (KubeError, OSError, ValueError) as error:
                log.error("ModelPools are not in force", reason=str(error))
                await asyncio.sleep(AGAIN_S)
                self._dirty.set()
