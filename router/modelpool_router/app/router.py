"""
A router that runs: its parts, wired; its life, from listening to the last answer.

Start order: sockets first (a port in use must be told before a model is loaded), then pools, then
requests are taken. Stop order: not ready, held requests answered, new ones refused or served
while load balancers turn away, no more connections, running answers to their end or their limit,
members down.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog
from aiohttp import web

from ..core.catalog import UnknownModel
from ..core.commands import BreakReason, Note, NoteKind
from ..core.events import Event
from ..core.spec import HoldLedger, MemberName, PoolName
from ..core.view import PoolView, SlotState
from ..drivers.base import LostCallback, MemberDriver, SlotStanding
from ..drivers.process import ProcessDriver
from ..drivers.statedir import prepare
from ..runtime.pools import Pools
from ..runtime.record import RecordStore
from ..settings import (
    Address,
    Changes,
    ConfigError,
    Pool,
    Settings,
    compare,
    kept,
    moved,
    read_secret,
    verify,
)
from ..telemetry import EventHub, Logs, Metrics
from ..web.account import Accountant
from ..web.admin import build_admin
from ..web.auth import Keys
from ..web.dispatch import Dispatcher
from ..web.handlers import DataPort
from ..web.server import FrontServer, require_c_parser
from ..web.short import ShortWay
from ..web.surface import Surface
from ..web.upstream import UpstreamClient, UpstreamLimits
from . import assembly
from .heap import Trimmer

if TYPE_CHECKING:
    from ..drivers.kubernetes import KubernetesDriver
    from .cluster import Cluster
    from .modelpools import ModelPools

log = structlog.get_logger("modelpool.router")

LAST_WORDS_S = 1.0
"""How long cut-off answers may take to reach their clients before connections are closed."""


class Addresses(NamedTuple):
    """Where a router listens, with the ports that were chosen."""

    listen: Address
    admin: Address | None


class Router:
    """
    The router of one process. `start`, then `stop`; both once.

    Args:
        settings: Loaded and verified.
        logs: Where request lines go.
        environ: Environment that secrets are read from.
    """

    def __init__(
        self, settings: Settings, logs: Logs, *, environ: Mapping[str, str] = os.environ
    ) -> None:
        self.settings = settings
        self.draining = False
        self._logs = logs
        self._environ = environ
        self._ledger = HoldLedger(settings.bounds())
        self._hub = EventHub()
        self._version = importlib.metadata.version("modelpool")
        self._metrics = Metrics(*_names(settings), version=self._version)
        self._keys = Keys()
        self._admin_token: str | None = None
        self._upstream_keys: dict[str, str] = {}
        self._addresses: Addresses | None = None
        self._admin: web.AppRunner | None = None
        self._drivers: dict[PoolName, ProcessDriver] = {}
        self._kube_drivers: dict[PoolName, KubernetesDriver] = {}
        self._cluster: Cluster | None = None
        self._model_pools: ModelPools | None = None
        self._own_settings = settings
        """As the file has them; `settings` has the pools of ModelPools as well."""
        self._reloading = asyncio.Lock()

    @property
    def addresses(self) -> Addresses:
        """Where it listens; after `start`."""
        assert self._addresses is not None
        return self._addresses

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """
        Listen, begin to look after the pools, and take requests.

        Raises:
            OSError: an address cannot be listened on.
            StateDirUnusable, BadKeys, ParserMissing, KeyError: as their parts raise them.
        """
        require_c_parser()
        loop = asyncio.get_running_loop()
        settings = self.settings
        self._read_secrets(settings)
        prepare(settings.state_dir)
        self._metrics.watch(self.views, self._ledger)
        self._metrics.watch_log(self._logs.dropped)
        self._trimmer = Trimmer(loop)
        self._client = UpstreamClient(
            loop, UpstreamLimits(connect_timeout_s=settings.connect_timeout_s)
        )
        self._pools = Pools(
            ledger=self._ledger,
            make_driver=self._make_driver,
            listener=self._noted,
            store=RecordStore(settings.state_dir),
            health_interval_s=lambda pool: self.settings.pool(pool).looks_every_s,
            violation=self._metrics.residency_violation,
        )
        self._dispatcher = Dispatcher(self._pools, self._client)
        accountant = Accountant(self._metrics, self._logs, loop.time)
        self._data_port = DataPort(
            self._surface(settings),
            pools=self._pools,
            dispatcher=self._dispatcher,
            keys=self._keys,
            ledger=self._ledger,
            accountant=accountant,
            ready=self.ready,
        )
        options = replace(
            assembly.server_options(settings), on_refused=lambda code: self._metrics.parse_error()
        )
        self._front = FrontServer(self._data_port, options)
        self._front.short = ShortWay(
            self._data_port,
            pools=self._pools,
            client=self._client,
            keys=self._keys,
            ledger=self._ledger,
            accountant=accountant,
        )
        self._server = await loop.create_server(
            self._front,
            settings.listen.host or None,
            settings.listen.port,
            backlog=1024,
            start_serving=False,
        )
        try:
            admin = await self._listen_for_admin()
            await self._reach_cluster(settings)
            self.settings = settings = self._with_model_pools(settings)
            self._metrics.reconfigure(*_names(settings))
            self._data_port.surface = self._surface(settings)
            await self._pools.apply(settings.pool_specs())
            await self._server.start_serving()
        except BaseException:
            self._server.close()
            with suppress(Exception):  # the first failure is the one to tell
                await self._pools.stop(stop_members=True)
                await self._leave_cluster()
                await self._close_admin()
            raise
        self._addresses = Addresses(
            Address(settings.listen.host, self._server.sockets[0].getsockname()[1]), admin
        )

    async def stop(self, hurry: asyncio.Event | None = None) -> None:
        """
        Go down gracefully: see the head of the module.

        Args:
            hurry: Once set, nothing is waited for any more: running answers end with an error, and
                members are taken down by their short way.
        """
        hurry = hurry if hurry is not None else asyncio.Event()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.settings.shutdown_timeout_s
        self.draining = True
        self._pools.drain()
        self._front.begin_drain()
        await _unless(hurry, asyncio.sleep(self.settings.shutdown_delay_s))
        self._server.close()
        left_s = max(0.0, deadline - loop.time())
        await _unless(hurry, asyncio.wait_for(self._until_answered(), left_s))
        if not self._data_port.is_idle:
            self._dispatcher.end_all(BreakReason.SHUTDOWN)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._until_answered(), LAST_WORDS_S)
        await self._front.shutdown(LAST_WORDS_S)
        self._client.close()
        await self._trimmer.close()
        try:
            if self._model_pools is not None:
                await self._model_pools.close()
            await self._pools.stop(stop_members=True, hurry=hurry)
        finally:
            await self._leave_cluster()
            self._hub.close()
            await self._close_admin()

    async def _until_answered(self) -> None:
        """Return when nothing is under way, and clients have all that they were sent."""
        await self._front.until_free()
        while not self._data_port.is_idle:
            await self._data_port.until_idle()
            await self._front.until_free()

    def _surface(self, settings: Settings) -> Surface:
        return assembly.surface(settings, self._upstream_keys, self._trimmer.note)

    async def _listen_for_admin(self) -> Address | None:
        address = self.settings.admin
        if address is None:
            return None
        application = build_admin(
            self,
            self._hub,
            self._metrics,
            token=lambda: self._admin_token,
            version=self._version,
        )
        self._admin = web.AppRunner(
            application, handler_cancellation=True, access_log=None, shutdown_timeout=LAST_WORDS_S
        )
        await self._admin.setup()
        site = web.TCPSite(self._admin, address.host or None, address.port)
        await site.start()
        return Address(address.host, self._admin.addresses[0][1])

    async def _reach_cluster(self, settings: Settings) -> None:
        """Make ready for members in Kubernetes, if there are any, and read ModelPools."""
        chosen = settings.pools_from
        is_needed = chosen is not None or any(pool.is_in_kubernetes for pool in settings.pools)
        if is_needed and self._cluster is None:
            # Late: who has no members there needs none of it.
            from .cluster import Cluster

            self._cluster = await Cluster.open(settings, self._environ)
        following = self._model_pools
        if chosen is None:
            self._model_pools = None
            if following is not None:
                await following.close()
        elif following is not None:
            await following.choose(chosen)
        else:
            from .modelpools import ModelPools

            assert self._cluster is not None
            made = ModelPools(self._cluster.port, chosen, self._follow_model_pools)
            self._model_pools = made
            await made.start()

    async def _leave_cluster(self) -> None:
        model_pools, self._model_pools = self._model_pools, None
        if model_pools is not None:
            await model_pools.close()
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            await cluster.close()

    def _with_model_pools(self, settings: Settings) -> Settings:
        if self._model_pools is None:
            return settings
        from .modelpools import beside

        return beside(settings, self._model_pools.pools)

    async def _follow_model_pools(self) -> None:
        async with self._reloading:  # and only then is it known which settings those are
            await self._reload(self._own_settings)
        log.info("ModelPools in force", pools=[pool.name for pool in self.settings.pools])

    async def _close_admin(self) -> None:
        if self._admin is not None:
            await self._admin.cleanup()
            self._admin = None

    # ------------------------------------------------------------------ reload

    async def reload(self, new: Settings) -> Changes:
        """
        Put *new* in force as one step; untouched members and their streams do not notice.

        Settings that need a restart keep their old value and are named in the result.

        Raises:
            ConfigError: this machine lacks something that *new* names; nothing was changed.
            BadKeys: the keys cannot be used; nothing was changed.
            StateDirUnusable: a new pool is run by another router; nothing was changed.
        """
        async with self._reloading:
            return await self._reload(new)

    async def _reload(self, new: Settings) -> Changes:
        problems = [*verify(new, self._environ), *moved(self.settings, new)]
        if problems:
            raise ConfigError(problems)
        old = self.settings
        source = new.source
        refused = compare(self._own_settings, new).refused
        new = new.model_copy(update=kept(old, new))
        new._source = source
        own_before, own = self._own_settings, new
        await self._reach_cluster(new)
        new = self._with_model_pools(new)
        changes = replace(compare(old, new), refused=refused)
        # What can fail comes first, and is undone if it does.
        self.settings, self._own_settings = new, own
        started: list[PoolName] = []
        try:
            started = await self._pools.start_new(new.pool_specs())
            self._read_secrets(new)
        except BaseException:
            self.settings, self._own_settings = old, own_before
            await self._pools.drop(started)
            await self._reach_cluster(own_before)
            raise
        self._logs.set_level(new.log_level)
        self._client.limits = replace(self._client.limits, connect_timeout_s=new.connect_timeout_s)
        self._ledger.bounds = new.bounds()
        self._metrics.reconfigure(*_names(new))
        self._update_drivers(new)
        await self._pools.apply(new.pool_specs())
        self._data_port.surface = self._surface(new)
        self._front.options = replace(
            assembly.server_options(new), on_refused=self._front.options.on_refused
        )
        return changes

    def _update_drivers(self, new: Settings) -> None:
        names = {PoolName(pool.name) for pool in new.pools}
        for name in [name for name in self._kube_drivers if name not in names]:
            # It is no pool any more, which says nothing about the Deployments that were in it.
            self._kube_drivers.pop(name).retire()
        for pool in new.pools:
            driver = self._drivers.get(PoolName(pool.name))
            if driver is not None:
                driver.update(
                    assembly.process_members(pool, new), settle=assembly.settle_gate(pool)
                )
            if (there := self._kube_drivers.get(PoolName(pool.name))) is not None:
                from .cluster import default_of, kube_members

                there.update(kube_members(pool), default=default_of(pool))

    def _read_secrets(self, settings: Settings) -> None:
        """Read keys and tokens; all of them, before any is put in force."""
        token = settings.admin_token
        admin_token = None if token is None else read_secret(token, self._environ)
        upstream_keys = {
            upstream.name: read_secret(upstream.api_key, self._environ)
            for upstream in settings.upstreams
            if upstream.api_key is not None
        }
        keys = settings.keys
        self._keys.reload(None if keys is None else read_secret(keys, self._environ))
        self._admin_token = admin_token
        self._upstream_keys = upstream_keys

    def _make_driver(self, name: PoolName, lost: LostCallback) -> MemberDriver:
        pool = self.settings.pool(name)
        if pool.is_in_kubernetes:
            return self._make_kube_driver(pool, lost)
        driver = ProcessDriver(
            name,
            assembly.process_members(pool, self.settings),
            state_dir=self.settings.state_dir,
            lost=lost,
            settle=assembly.settle_gate(pool),
        )
        self._drivers[name] = driver
        return driver

    def _make_kube_driver(self, pool: Pool, lost: LostCallback) -> MemberDriver:
        assert self._cluster is not None  # reached before any pool starts
        name = PoolName(pool.name)
        chosen = self._own_settings.pools_from
        is_model_pool = all(own.name != pool.name for own in self._own_settings.pools)

        def stand(standing: SlotStanding) -> None:
            runtime = self._pools.get(name)
            if runtime is not None:
                runtime.stand(standing)

        def view() -> PoolView | None:
            runtime = self._pools.get(name)
            return None if runtime is None else runtime.view()

        driver = self._cluster.driver(
            pool,
            lost=lost,
            standing=stand,
            view=view,
            of_model_pool=chosen.namespace if chosen is not None and is_model_pool else None,
        )
        self._kube_drivers[name] = driver
        return driver

    def _noted(self, name: PoolName, note: Note) -> None:
        self._metrics.note(name, note)
        self._logs.note(name, note)
        pool = self._pools.get(name)
        if pool is None:
            return
        self._hub.publish(name, note, pool.view())
        if note.kind is NoteKind.STATE_CHANGED and note.fields["state"] == SlotState.UNLOADING:
            endpoint = pool.endpoints.get(MemberName(str(note.fields["member"])))
            if endpoint is not None:
                self._client.drop(endpoint.identity)

    # ------------------------------------------------------------------ what the admin port asks

    def views(self) -> Sequence[PoolView]:
        """Return all pools as they are now."""
        return self._pools.views()

    def tell(self, pool: PoolName, event: Event) -> None:
        """Hand *event* to the scheduler of *pool*."""
        self._pools[pool].tell(event)

    def find(self, model: str) -> tuple[PoolName, MemberName] | None:
        """Return who serves *model*; None for upstreams and unknown names."""
        try:
            route = self._data_port.surface.catalog.find(model)
        except UnknownModel:
            return None
        return None if route.pool is None else (route.pool, route.member)

    def router_state(self) -> Mapping[str, Any]:
        """Return what concerns all pools."""
        bounds = self._ledger.bounds
        return {
            "held": self._ledger.held,
            "held_bytes": self._ledger.held_bytes,
            "bounds": {
                "max_held": bounds.max_held,
                "max_held_per_key": bounds.max_held_per_key,
                "max_held_bytes": bounds.max_held_bytes,
            },
            "active_requests": self._data_port.active,
            "draining": self.draining,
        }

    def ready(self) -> tuple[bool, Mapping[str, str]]:
        """Say whether requests should be sent here: pools observed, and not going down."""
        checks = {"router": "draining" if self.draining else "ok"}
        for view in self._pools.views():
            driver = self._kube_drivers.get(view.name)
            if driver is not None:
                checks[f"pool {view.name}"] = driver.readiness
            else:
                checks[f"pool {view.name}"] = _readiness(view)
        here = [state for check, state in checks.items() if not self._is_shared(check)]
        shared = [state for check, state in checks.items() if self._is_shared(check)]
        # Of pools that another router may hold, one is enough, and so is an upstream: who asks for
        # the others is told.
        serves = not shared or "ok" in shared or bool(self.settings.upstreams)
        return all(state == "ok" for state in here) and serves, checks

    def _is_shared(self, check: str) -> bool:
        return PoolName(check.removeprefix("pool ")) in self._kube_drivers


def _readiness(view: PoolView) -> str:
    """
    Return "ok", or what a pool waits for until it can be used.

    Without what came of the last try: the data port tells this to everybody.
    """
    if view.state is not SlotState.STARTING:
        return "ok"
    return "starting" if view.obstacle is None else f"starting: waits for {view.obstacle.waits_for}"


def _names(settings: Settings) -> tuple[dict[PoolName, list[MemberName]], list[str]]:
    pools = {
        PoolName(pool.name): [MemberName(member.name) for member in pool.members]
        for pool in settings.pools
    }
    return pools, [upstream.name for upstream in settings.upstreams]


async def _unless(hurry: asyncio.Event, waiting: Any) -> None:
    """Await *waiting* (a time-out in it is its end), but only until *hurry* is set."""
    loop = asyncio.get_running_loop()
    tasks = {loop.create_task(waiting), loop.create_task(hurry.wait())}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
