"""
Pools that are written as ModelPool objects: read, followed, and put beside those of the file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any

import structlog
from pydantic import ValidationError

from modelpool_api.v1alpha1.modelpool import ModelPool, PoolMember
from modelpool_kube.errors import KubeError
from modelpool_kube.kinds import INFERENCE_SERVICES, MODEL_POOLS, Json, Kind, is_going
from modelpool_kube.port import ClusterPort
from modelpool_kube.watch import Notice, Reflector

from ..drivers.base import DriverError
from ..settings import ConfigError, Pool, PoolsFrom, Settings
from ..web.auth import BadKeys

log = structlog.get_logger("modelpool.modelpools")

KEYS = {
    "InferenceService": "inferenceService",
    "ModelDeployment": "modelDeployment",
    "Deployment": "deployment",
    "StatefulSet": "statefulSet",
}
SETTLE_S = 1.0
"""Several objects are often applied at once: put them in force at once, too. The operator writes
new members into our Role meanwhile."""
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

    Those that are named are watched by their names, and so are the InferenceServices whose
    profiles have to be known: a Role may allow no more than that.

    Attributes:
        pools: Those that can be served, by name.
    """

    def __init__(
        self, port: ClusterPort, chosen: PoolsFrom, changed: Callable[[], Awaitable[None]]
    ) -> None:
        self.pools: dict[str, Pool] = {}
        self._in_force: dict[str, Pool] | None = {}
        """What was taken over last; None = nobody knows."""
        self._port = port
        self._chosen = chosen
        self._changed = changed
        self._dirty = asyncio.Event()
        self._watches: dict[tuple[Kind, str], tuple[Reflector, asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begin to follow; return when there was a first look, or after a while without one."""
        await self._look()
        self._in_force = self.pools
        _ = self._own(self._follow(), "follow ModelPools")

    async def choose(self, chosen: PoolsFrom) -> None:
        """
        Follow those that *chosen* names, in the same namespace, from now on.

        The caller puts `pools` in force then.
        """
        if chosen != self._chosen:
            self._chosen = chosen
            await self._look()
            self._in_force = self.pools

    async def close(self) -> None:
        """Follow no more. Idempotent."""
        self._watches.clear()
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _own(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _look(self) -> None:
        """Watch what is needed, and read what the watches show."""
        try:
            async with asyncio.timeout(FIRST_LOOK_S):
                # Which InferenceServices are needed is known when the pools are.
                for kind in (MODEL_POOLS, INFERENCE_SERVICES):
                    self._watch_what_is_needed()
                    for reflector in self._of(kind):
                        await reflector.synced.wait()
        except TimeoutError:
            trouble = next((str(r.trouble) for r, _ in self._watches.values() if r.trouble), "")
            log.warning("ModelPools cannot be read yet", detail=trouble)
        self._read()

    def _watch_what_is_needed(self) -> None:
        names = set(self._chosen.names)
        needed = {(MODEL_POOLS, name) for name in names or {""}}
        services = {name for obj in self._objects() for name in _services_to_ask(obj)}
        if services:
            # Where all pools are followed, so are all InferenceServices: there may be many.
            needed |= {(INFERENCE_SERVICES, name) for name in (services if names else {""})}
        for key in self._watches.keys() - needed:
            _, watching = self._watches.pop(key)
            watching.cancel()
        for kind, name in needed - self._watches.keys():
            reflector = Reflector(
                self._port,
                kind,
                self._chosen.namespace,
                notify=self._noticed,
                fields=f"metadata.name={name}" if name else "",
            )
            task = self._own(reflector.run(), f"watch {kind.plural} {name or '*'}")
            self._watches[kind, name] = reflector, task

    def _of(self, kind: Kind) -> list[Reflector]:
        return [found for (each, _), (found, _) in self._watches.items() if each == kind]

    def _objects(self) -> list[Json]:
        """Return the ModelPools that were seen."""
        return [obj for each in self._of(MODEL_POOLS) for obj in each.items.values()]

    def _noticed(self, notice: Notice) -> None:
        self._dirty.set()

    def _read(self) -> None:
        self._dirty.clear()
        profiles = {
            name: str(obj["spec"]["profile"])
            for each in self._of(INFERENCE_SERVICES)
            for (_, name), obj in each.items.items()
            if (obj.get("spec") or {}).get("profile")
        }
        found: dict[str, Pool] = {}
        for obj in self._objects():
            name = str(obj["metadata"]["name"])
            if is_going(obj):
                continue
            if name in self.pools and self._is_unlisted(INFERENCE_SERVICES, _services_to_ask(obj)):
                found[name] = self.pools[name]  # whose profiles are not known yet
                continue
            try:
                found[name] = pool_of(obj, profiles)
            except BadModelPool as error:
                log.error("ModelPool cannot be served", pool=name, reason=str(error))
                if name in self.pools:
                    found[name] = self.pools[name]  # as it was: a bad edit changes nothing
        for name, pool in self.pools.items():
            if name not in found and self._is_unlisted(MODEL_POOLS, [name]):
                found[name] = pool  # not seen yet is not gone
        self.pools = found

    def _is_unlisted(self, kind: Kind, names: Iterable[str]) -> bool:
        """Whether a watch that would show one of *names* has not listed anything yet."""
        for name in names:
            # (one for each of those that are named, or one for all)
            for key in ((kind, name), (kind, "")):
                if key in self._watches and not self._watches[key][0].synced.is_set():
                    return True
        return False

    async def _follow(self) -> None:
        while True:
            await self._dirty.wait()
            await asyncio.sleep(SETTLE_S)
            self._dirty.clear()
            await self._look()
            if self.pools == self._in_force:
                continue
            self._in_force = None
            try:
                await self._changed()
                self._in_force = self.pools
            except (BadKeys, ConfigError, DriverError, KubeError, OSError, ValueError) as error:
                log.error("ModelPools are not in force", reason=str(error))
                await asyncio.sleep(AGAIN_S)
                self._dirty.set()


def _services_to_ask(obj: Json) -> list[str]:
    """Return the InferenceServices that say which profile a member of *obj* has."""
    members = (obj.get("spec") or {}).get("members") or []
    refs = [m.get("inferenceServiceRef") for m in members if not m.get("profile")]
    return [str(ref["name"]) for ref in refs if ref and "name" in ref]
