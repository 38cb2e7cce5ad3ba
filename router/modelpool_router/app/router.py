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
from typing import Any, NamedTuple

import structlog
from aiohttp import web

from ..core.catalog import UnknownModel
from ..core.commands import Note, NoteKind
from ..core.events import Event
from ..core.spec import HoldLedger, MemberName, PoolName
from ..core.view import PoolView, SlotState
from ..drivers.base import LostCallback, MemberDriver
from ..drivers.process import ProcessDriver
from ..drivers.statedir import prepare
from ..runtime.pools import Pools
from ..runtime.record import RecordStore
from ..settings import (
    NEED_RESTART,
    Address,
    Changes,
    ConfigError,
    Settings,
    compare,
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
from ..web.upstream import UpstreamClient, UpstreamLimits
from . import assembly

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
        self._client = UpstreamClient(
            loop, UpstreamLimits(connect_timeout_s=settings.connect_timeout_s)
        )
        self._pools = Pools(
            ledger=self._ledger,
            make_driver=self._make_driver,
            listener=self._noted,
            store=RecordStore(settings.state_dir),
            health_interval_s=lambda pool: self.settings.pool(pool).health_interval_s,
            violation=self._metrics.residency_violation,
        )
        self._dispatcher = Dispatcher(self._pools, self._client)
        self._data_port = DataPort(
            assembly.surface(settings, self._upstream_keys),
            pools=self._pools,
            dispatcher=self._dispatcher,
            keys=self._keys,
            ledger=self._ledger,
            accountant=Accountant(self._metrics, self._logs, loop.time),
            ready=self.ready,
        )
        options = replace(
            assembly.server_options(settings), on_refused=lambda code: self._metrics.parse_error()
        )
        self._front = FrontServer(self._data_port, options)
        self._server = await loop.create_server(
            self._front,
            settings.listen.host or None,
            settings.listen.port,
            backlog=1024,
            start_serving=False,
        )
        try:
            admin = await self._listen_for_admin()
            await self._pools.apply(settings.pool_specs())
            await self._server.start_serving()
        except BaseException:
            self._server.close()
            with suppress(Exception):  # the first failure is the one to tell
                await self._pools.stop(stop_members=True)
                await self._close_admin()
            raise
        self._addresses = Addresses(
            Address(settings.listen.host, self._server.sockets[0].getsockname()[1]), admin
        )

    async def stop(self, hurry: asyncio.Event | None = None) -> None:
        """
        Go down gracefully: see the head of the module. Setting *hurry* skips what is waited for.
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
        await _unless(hurry, asyncio.wait_for(self._data_port.until_idle(), left_s))
        if not self._data_port.is_idle:
            self._dispatcher.end_all("shutdown")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._data_port.until_idle(), LAST_WORDS_S)
        await self._front.shutdown(LAST_WORDS_S)
        self._client.close()
        try:
            await self._pools.stop(stop_members=True)
        finally:
            self._hub.close()
            await self._close_admin()

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
        problems = verify(new, self._environ)
        if problems:
            raise ConfigError(problems)
        old = self.settings
        changes = compare(old, new)
        kept = {name: getattr(old, name) for name in NEED_RESTART}
        source = new.source
        new = new.model_copy(update=kept)
        new._source = source
        # What can fail comes first, and is undone if it does.
        self.settings = new
        started: list[PoolName] = []
        try:
            started = await self._pools.start_new(new.pool_specs())
            self._read_secrets(new)
        except BaseException:
            self.settings = old
            await self._pools.drop(started)
            raise
        self._logs.set_level(new.log_level)
        self._client.limits = replace(self._client.limits, connect_timeout_s=new.connect_timeout_s)
        self._ledger.bounds = new.bounds()
        self._metrics.reconfigure(*_names(new))
        for pool in new.pools:
            driver = self._drivers.get(PoolName(pool.name))
            if driver is not None:
                driver.update(
                    assembly.process_members(pool, new), settle=assembly.settle_gate(pool)
                )
        await self._pools.apply(new.pool_specs())
        self._data_port.surface = assembly.surface(new, self._upstream_keys)
        self._front.options = replace(
            assembly.server_options(new), on_refused=self._front.options.on_refused
        )
        return changes

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
        driver = ProcessDriver(
            name,
            assembly.process_members(pool, self.settings),
            state_dir=self.settings.state_dir,
            lost=lost,
            settle=assembly.settle_gate(pool),
        )
        self._drivers[name] = driver
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
            started = view.state is not SlotState.STARTING
            checks[f"pool {view.name}"] = "ok" if started else "starting"
        return all(state == "ok" for state in checks.values()), checks


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
