"""
All pools of a router: started together, stopped together, added and retired on reload.

A pool that is removed while its member works is retired: nobody new is served, streams finish,
the member is taken down, and then it is forgotten. Added again before that, it simply goes on.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from ..core.commands import Note, NoteKind
from ..core.events import Stopping
from ..core.spec import HoldLedger, PoolName, PoolSpec
from ..core.view import PoolView
from ..drivers.base import LostCallback, MemberDriver
from .pool import NoteListener, PoolRuntime
from .record import PoolRecord, RecordStore
from .tasks import TaskSet

DriverFactory = Callable[[PoolName, LostCallback], MemberDriver]


class Pools:
    """
    The pools of one router, by name.

    Args:
        ledger: Router-wide count of holds.
        make_driver: Returns a driver for a pool; may raise what construction of a driver raises.
        listener: Told every note of every pool.
        store: Where records are kept.
        health_interval_s: Time between two looks at a resident, by pool.
    """

    def __init__(
        self,
        *,
        ledger: HoldLedger,
        make_driver: DriverFactory,
        listener: NoteListener,
        store: RecordStore,
        health_interval_s: Callable[[PoolName], float],
        violation: Callable[[PoolName], None],
    ) -> None:
        self._ledger = ledger
        self._make_driver = make_driver
        self._listener = listener
        self._store = store
        self._health_interval_s = health_interval_s
        self._violation = violation
        self._tickets = itertools.count(1)
        self._pools: dict[PoolName, PoolRuntime] = {}
        self._retiring: set[PoolName] = set()
        self._closing: dict[PoolName, asyncio.Event] = {}
        """Retired pools whose drivers have not let go yet."""
        self._tasks = TaskSet("pools")
        self._unwritten: dict[PoolName, str] = {}

    def __getitem__(self, name: PoolName) -> PoolRuntime:
        return self._pools[name]

    def get(self, name: PoolName) -> PoolRuntime | None:
        """Return the pool of that name, retiring ones included."""
        return self._pools.get(name)

    def all(self) -> list[PoolRuntime]:
        """Return every pool that still runs, in order of configuration."""
        return list(self._pools.values())

    def views(self) -> list[PoolView]:
        """Describe all pools now."""
        return [pool.view() for pool in self._pools.values()]

    @property
    def in_flight(self) -> int:
        """Requests that hold a lease or wait for one."""
        return sum(len(pool.waiters) + len(pool.lent) for pool in self._pools.values())

    async def start_new(self, specs: Mapping[PoolName, PoolSpec]) -> list[PoolName]:
        """
        Start those of *specs* that do not run yet, all or none; return their names.

        Waits until an earlier pool of the same name has let go of what it had. Returns without
        another wait: what still runs then goes on running.

        Raises:
            What the construction of a driver raises; nothing was changed then.
        """
        for closing in [closing for name, closing in self._closing.items() if name in specs]:
            await closing.wait()
        started: list[PoolName] = []
        try:
            for name, spec in specs.items():
                if name not in self._pools:
                    await self._start(spec)
                    started.append(name)
        except BaseException:
            await self.drop(started)
            raise
        return started

    async def drop(self, names: Iterable[PoolName]) -> None:
        """End pools that nobody has used yet."""
        for name in names:
            await self._pools.pop(name).stop(stop_members=True)

    async def apply(self, specs: Mapping[PoolName, PoolSpec]) -> None:
        """Start what is new, change what stays, retire what is gone."""
        self._retiring.difference_update(specs)
        started = await self.start_new(specs)
        for name, spec in specs.items():
            if name not in started:
                self._pools[name].health_interval_s = self._health_interval_s(name)
                self._pools[name].reconfigure(spec)
        for name in [n for n in self._pools if n not in specs and n not in self._retiring]:
            self._retiring.add(name)
            self._tasks.start(self._retire(self._pools[name]), f"retire {name}")

    async def _start(self, spec: PoolSpec) -> None:
        record = self._store.read(spec.name)
        pool = PoolRuntime(
            spec,
            lambda lost: self._make_driver(spec.name, lost),
            ledger=self._ledger,
            tickets=self._tickets,
            listener=self._noted,
            estimates=record.estimates,
            released=record.released,
            health_interval_s=self._health_interval_s(spec.name),
            violation=lambda: self._violation(spec.name),
        )
        self._pools[spec.name] = pool
        await pool.start()

    async def _retire(self, pool: PoolRuntime) -> None:
        pool.reconfigure(replace(pool.spec, members={}, default=None))
        await pool.until_cold()
        if pool.name not in self._retiring:
            return  # it was added again meanwhile
        self._retiring.discard(pool.name)
        del self._pools[pool.name]
        closed = self._closing[pool.name] = asyncio.Event()
        try:
            await pool.stop(stop_members=True)
        finally:
            del self._closing[pool.name]
            closed.set()

    def drain(self) -> None:
        """Refuse what is held; residents go on serving (`Stopping`)."""
        for pool in self._pools.values():
            pool.tell(Stopping())

    async def stop(self, *, stop_members: bool, hurry: asyncio.Event | None = None) -> None:
        """
        End all pools at once; take their members down if *stop_members*.

        Args:
            hurry: See `MemberDriver.close`.
        """
        await self._tasks.cancel()
        for name, text in self._unwritten.items():
            self._store.write(name, text)
        pools = list(self._pools.values())
        results = await asyncio.gather(
            *(pool.stop(stop_members=stop_members, hurry=hurry) for pool in pools),
            return_exceptions=True,
        )
        self._pools.clear()
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def _noted(self, name: PoolName, note: Note) -> None:
        self._listener(name, note)
        if note.kind in (NoteKind.SWAP_COMPLETED, NoteKind.RELEASED, NoteKind.RESIDENT_LOST):
            pool = self._pools.get(name)
            if pool is not None:
                record = PoolRecord(pool.estimates, note.kind is NoteKind.RELEASED)
                text = self._store.encode(record)
                # One writer at a time: records must not overtake each other.
                self._unwritten[name] = text
                if len(self._unwritten) == 1:
                    self._tasks.start(self._write_records(), "write records")

    async def _write_records(self) -> None:
        while self._unwritten:
            name, text = next(iter(self._unwritten.items()))
            await asyncio.to_thread(self._store.write, name, text)
            if self._unwritten.get(name) is text:
                del self._unwritten[name]
