"""
A whole router whose members live in this process: real sockets, no processes.

For tests that need thousands of loads and crashes, or a look at every step: a start costs
microseconds, and each life of a member listens on a port of its own, as a process would.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from modelpool_router.app import Router
from modelpool_router.core.spec import MemberName, PoolName
from modelpool_router.drivers.base import Endpoint, LostCallback, MemberDriver
from modelpool_router.settings import Settings
from modelpool_router.telemetry import Logs
from modelpool_router.testing.driver import FakeDriver
from rawupstream import Link, RawUpstream, SeenRequest, answer
from served import (
    LIMIT_S,
    Json,
    Served,
    ServedHere,
    _ending,
    _session,
    configuration,
)

Answerer = Callable[["Life", Link, SeenRequest], Awaitable[bool]]
"""Answers one request; False when the connection is over."""


class Life:
    """One life of a member: from the opening of its port to its end."""

    def __init__(self, driver: SocketDriver, member: MemberName) -> None:
        self.member = member
        self.upstream = RawUpstream(self._serve)
        self.is_over = False
        self._driver = driver

    async def _serve(self, link: Link) -> None:
        while not self.is_over and (request := await link.read_request()) is not None:
            self._driver.seen[self.member] += 1
            if self.is_over or not await self._driver.answerer(self, link, request):
                return

    def crash(self) -> None:
        """End now, as a process that is killed: the port refuses, connections are reset."""
        if not self.is_over:
            self.is_over = True
            self._stop_accepting()
            for link in self.upstream.links:
                if not link.over.is_set():
                    link.reset()
            self._driver.die(self.member)

    async def end(self) -> None:
        """Close the port and every connection."""
        self.is_over = True
        self._stop_accepting()
        for _ in range(3):
            await asyncio.sleep(0)
        await self.upstream.stop()
        assert not self.upstream.failures, self.upstream.failures

    def _stop_accepting(self) -> None:
        # asyncio loses a connection that is being accepted while its server is closed: its socket
        # stays open until the garbage collector complains. So stop first, close two turns later.
        loop = asyncio.get_running_loop()
        server = self.upstream._server
        for listening in server.sockets if server is not None else ():
            loop.remove_reader(listening.fileno())
        loop.call_soon(loop.call_soon, self.upstream.close)


class SocketDriver(FakeDriver):
    """`FakeDriver` whose members answer on real sockets."""

    def __init__(
        self, members: Iterable[MemberName], *, lost: LostCallback, answerer: Answerer
    ) -> None:
        super().__init__(members, lost=lost)
        self.answerer = answerer
        self.lives: dict[MemberName, Life] = {}
        self.seen: Counter[MemberName] = Counter()
        """Requests that reached each member."""

    async def activate(self, member: MemberName) -> Endpoint:
        """Open a port and load."""
        await self._end(member)
        life = self.lives[member] = Life(self, member)
        await life.upstream.__aenter__()
        self.behaviours[member].address = ("127.0.0.1", life.upstream.port)
        return await super().activate(member)

    async def deactivate(self, member: MemberName) -> None:
        """Unload and close the port."""
        await super().deactivate(member)
        await self._end(member)

    async def close(self, *, stop_members: bool, hurry: asyncio.Event | None = None) -> None:
        """Close everything."""
        await super().close(stop_members=stop_members, hurry=hurry)
        for member in list(self.lives):
            await self._end(member)

    async def _end(self, member: MemberName) -> None:
        life = self.lives.pop(member, None)
        if life is not None:
            await life.end()


class ScriptedRouter(Router):
    """`Router` with `SocketDriver` for every pool."""

    def __init__(self, settings: Settings, logs: Logs, answerer: Answerer) -> None:
        super().__init__(settings, logs)
        self.answerer = answerer
        self.fakes: dict[PoolName, SocketDriver] = {}

    def _make_driver(self, name: PoolName, lost: LostCallback) -> MemberDriver:
        members = [MemberName(member.name) for member in self.settings.pool(name).members]
        driver = SocketDriver(members, lost=lost, answerer=self.answerer)
        self.fakes[name] = driver
        return driver


class ServedScripted(ServedHere):
    """A scripted router in the test's own loop; `Served` has the clients."""

    router: ScriptedRouter
    answerer: Answerer

    def driver(self, name: str = "gpu0") -> SocketDriver:
        """Return the driver of a pool."""
        return self.router.fakes[PoolName(name)]

    def make_router(self, settings: Settings, logs: Logs) -> Router:
        """Return a router with members in memory."""
        return ScriptedRouter(settings, logs, self.answerer)

    async def check_end(self) -> None:
        """Check the log, and that no driver was told to do what must never happen."""
        for driver in self.router.fakes.values():
            assert not driver.violations, driver.violations
            assert not driver.existing, driver.existing
        self.check_log()


def scripted_member(name: str, **keys: Any) -> Json:
    """Return the configuration of a member in memory."""
    return {"name": name, "command": ["true", "{port}"], **keys}


def scripted_pool(*members: str, name: str = "gpu0", **keys: Any) -> Json:
    """Return the configuration of a pool of members in memory."""
    rules = {"name": name, "linger": "0s", "swapBudget": "20s", **keys}
    return {**rules, "members": [scripted_member(each) for each in members]}


async def plain(life: Life, link: Link, request: SeenRequest) -> bool:
    """Answer at once, with the name of the member."""
    body = json.dumps({"by": life.member}).encode()
    await link.send(answer(body, b"Content-Type: application/json"))
    return True


@asynccontextmanager
async def scripted(
    folder: Path, *pools: Json, answerer: Answerer = plain, **keys: Any
) -> AsyncIterator[ServedScripted]:
    """Run a router on members in memory; checks at the end what must hold after every test."""
    async with _session() as client:
        router = ServedScripted(folder, configuration(folder, *pools, **keys), client)
        router.answerer = answerer
        async with _ending(router):
            await router.start()
            yield router


async def settled(router: Served, is_true: Callable[[], bool], what: str) -> None:
    """Let the loop run until *is_true*; for what must come about in a moment."""
    deadline = asyncio.get_running_loop().time() + LIMIT_S
    while not is_true():
        assert asyncio.get_running_loop().time() < deadline, f"not settled: {what}"
        await asyncio.sleep(0.001)


class Recorder:
    """Answers as a request's fields say, and keeps what reached whom."""

    def __init__(self) -> None:
        self.seen: list[tuple[Life, SeenRequest]] = []
        """Every request, with the life of the member that it reached."""
        self.running = 0
        self.peak = 0
        """Most requests worked on at once."""

    async def __call__(self, life: Life, link: Link, request: SeenRequest) -> bool:
        """Answer after ``ms`` milliseconds, never with ``hang``, by a crash with ``crash``."""
        self.seen.append((life, request))
        fields = _fields(request)
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            if fields.get("hang"):
                await link.gone()
                return False
            await asyncio.sleep(fields.get("ms", 0.0) / 1000)
            if fields.get("crash"):
                life.crash()
                return False
        finally:
            self.running -= 1
        return await plain(life, link, request)

    @property
    def members(self) -> list[str]:
        """Who was reached, in order."""
        return [str(life.member) for life, _ in self.seen]

    @property
    def requests(self) -> list[SeenRequest]:
        """What reached anybody, in order."""
        return [request for _, request in self.seen]


def _fields(request: SeenRequest) -> Json:
    try:
        parsed = json.loads(request.body)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
