"""
An in-memory driver for tests of the runtime: same contract, no processes, any clock.

All its waiting is `asyncio.sleep` and futures, so virtual time works. Held to the same contract
tests as the real drivers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..core.events import Idleness
from ..core.spec import MemberName
from ..drivers.base import (
    ActivationFailed,
    DriverError,
    DriverUnavailable,
    Endpoint,
    LostCallback,
)


@dataclass(slots=True)
class Behaviour:
    """What one member does; may be changed at any time and counts from the next call."""

    load_s: float = 0.0
    unload_s: float = 0.0
    load_hangs: bool = False
    load_failures: list[DriverError] = field(default_factory=list)
    """Taken from the front, one a load, raised after `load_s`; when empty, loads succeed."""
    unload_failures: list[DriverUnavailable] = field(default_factory=list)
    """Taken from the front, one an unload, raised after `unload_s`; the member stays."""
    idle: Idleness = Idleness.IDLE
    idle_s: float = 0.0
    ready: bool = True
    """Answer of the readiness probe of a member that is up."""
    ready_s: float = 0.0
    parallel: int | None = None
    address: tuple[str, int] = ("127.0.0.1", 9)
    progress: str = "loading"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the driver, or what came of it: ``activate``, ``landed``, ``gone`` ..."""

    at: float
    what: str
    member: MemberName


@dataclass(slots=True)
class _Life:
    serial: int
    ended: asyncio.Future[DriverError]
    """Set when it dies or is taken down while it loads."""
    endpoint: Endpoint | None = None
    is_stopping: bool = False


class FakeDriver:
    """`MemberDriver` in memory."""

    def __init__(self, members: Iterable[MemberName], *, lost: LostCallback | None = None) -> None:
        self.behaviours: dict[MemberName, Behaviour] = {name: Behaviour() for name in members}
        self.calls: list[Call] = []
        self.violations: list[str] = []
        """What a caller did that must never happen; a test asserts that it stays empty."""
        self.lost = lost
        self.is_closed = False
        self._lives: dict[MemberName, _Life] = {}
        self._turns: dict[MemberName, asyncio.Lock] = {}
        self._serial = 0

    # -- for tests -------------------------------------------------------------------------

    @property
    def existing(self) -> frozenset[MemberName]:
        """Members of which anything is there: loading, up, stopping or dead but not cleaned up."""
        return frozenset(self._lives)

    @property
    def up(self) -> frozenset[MemberName]:
        """Members that are ready now."""
        return frozenset(name for name, life in self._lives.items() if self._is_up(life))

    def count(self, what: str, member: MemberName | None = None) -> int:
        """How often *what* was recorded, for one member or for all."""
        return sum(
            call.what == what and (member is None or call.member == member) for call in self.calls
        )

    def die(self, member: MemberName, reason: str = "exited", detail: str = "exit code 1") -> None:
        """Let *member* end without anybody's doing."""
        life = self._lives[member]
        was_up = self._is_up(life)
        self._record("died", member)
        if not life.ended.done():
            life.ended.set_result(ActivationFailed(reason, detail))
        if was_up and self.lost is not None:
            self.lost(member, reason, detail)

    def adopt(self, member: MemberName) -> Endpoint:
        """Put *member* up as if an earlier router had left it running."""
        life = self._begin(member)
        return self._land(member, life)

    # -- the contract ----------------------------------------------------------------------

    async def activate(self, member: MemberName) -> Endpoint:
        """See `MemberDriver.activate`."""
        self._record("activate", member)
        behaviour = self.behaviours[member]
        async with self._turn(member):
            life = self._lives.get(member)
            if life is None or life.is_stopping or life.ended.done():
                await self._take_down(member)
                if others := sorted(self._lives.keys() - {member}):
                    self.violations.append(f"activate({member}) while {others} exist")
                    raise DriverUnavailable(f"cannot start {member}: {others[0]} is not gone")
                life = self._begin(member)
        if life.endpoint is not None:
            return life.endpoint
        seconds = None if behaviour.load_hangs else behaviour.load_s
        await asyncio.wait({life.ended}, timeout=seconds)
        if not life.ended.done() and life.endpoint is None and behaviour.load_failures:
            life.ended.set_result(behaviour.load_failures.pop(0))
        if life.ended.done():
            raise life.ended.result()
        return life.endpoint or self._land(member, life)

    async def deactivate(self, member: MemberName) -> None:
        """See `MemberDriver.deactivate`."""
        self._record("deactivate", member)
        if (life := self._lives.get(member)) is not None:
            self._stop(life)
        async with self._turn(member):
            await self._take_down(member)

    async def idle(self, member: MemberName) -> Idleness:
        """See `MemberDriver.idle`."""
        behaviour = self.behaviours[member]
        await asyncio.sleep(behaviour.idle_s)
        life = self._lives.get(member)
        return behaviour.idle if life is not None and self._is_up(life) else Idleness.UNREACHABLE

    async def ready(self, member: MemberName) -> bool:
        """See `MemberDriver.ready`."""
        behaviour = self.behaviours[member]
        await asyncio.sleep(behaviour.ready_s)
        life = self._lives.get(member)
        return life is not None and self._is_up(life) and behaviour.ready

    async def observe(self) -> Mapping[MemberName, Endpoint]:
        """See `MemberDriver.observe`."""
        await asyncio.sleep(0)
        return {
            name: life.endpoint
            for name, life in self._lives.items()
            if life.endpoint is not None and self._is_up(life) and self.behaviours[name].ready
        }

    def progress(self, member: MemberName) -> str:
        """See `MemberDriver.progress`."""
        return self.behaviours[member].progress if member in self._lives else ""

    async def close(self, *, stop_members: bool, hurry: asyncio.Event | None = None) -> None:
        """See `MemberDriver.close`."""
        self.is_closed = True
        for member in sorted(self._lives) if stop_members else ():
            await self.deactivate(member)

    # -- inside ----------------------------------------------------------------------------

    def _begin(self, member: MemberName) -> _Life:
        self._serial += 1
        life = _Life(self._serial, asyncio.get_running_loop().create_future())
        self._lives[member] = life
        self._record("started", member)
        return life

    def _land(self, member: MemberName, life: _Life) -> Endpoint:
        host, port = self.behaviours[member].address
        life.endpoint = Endpoint(
            host=host,
            port=port,
            identity=f"{member}:{life.serial}",
            parallel=self.behaviours[member].parallel,
        )
        self._record("landed", member)
        return life.endpoint

    def _stop(self, life: _Life) -> None:
        life.is_stopping = True
        if not life.ended.done():
            life.ended.set_result(ActivationFailed("stopped", "it was taken down while it loaded"))

    async def _take_down(self, member: MemberName) -> None:
        life = self._lives.get(member)
        if life is None:
            return
        self._stop(life)
        behaviour = self.behaviours[member]
        await asyncio.sleep(behaviour.unload_s)
        if behaviour.unload_failures:
            raise behaviour.unload_failures.pop(0)
        self._lives.pop(member, None)
        self._record("gone", member)

    def _is_up(self, life: _Life) -> bool:
        return life.endpoint is not None and not life.is_stopping and not life.ended.done()

    def _turn(self, member: MemberName) -> asyncio.Lock:
        return self._turns.setdefault(member, asyncio.Lock())

    def _record(self, what: str, member: MemberName) -> None:
        self.calls.append(Call(asyncio.get_running_loop().time(), what, member))
