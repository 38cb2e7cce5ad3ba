"""
Members as local processes: one command each, started, watched and taken down here.

Evidence, not memory: what is up is asked of the kernel (``procfs``), what is gone is proven
(``takedown``). This module holds the order of things; what is kept of the members' lives, and how
they are asked, is in ``lives``.

A life ends for the scheduler when its first process ends, with one exception: a wrapper that
exits with code 0 while what it started lives on (a process of the slot, or a container that
goneCommand knows of) and keeps its port open. Then the life ends when that has gone. The port is
looked at too: a wrapper that outlives its server fools nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from ..core.events import Idleness
from ..core.spec import MemberName
from . import takedown
from .base import ActivationFailed, DriverUnavailable, Endpoint
from .life import Life, ProcessMember, begin
from .lives import LOOK_S, Lives, leftover
from .probe import port_is_taken, port_refuses
from .procfs import member_of, slot_value
from .profiles import Readiness
from .settle import SettleGate
from .statedir import StateDirUnusable, lock_pool
from .takedown import Limits

__all__ = ["Limits", "ProcessDriver", "ProcessMember", "SettleGate", "StateDirUnusable"]

_log = logging.getLogger(__name__)

_POLL_FIRST_S = 0.01
_POLL_LAST_S = 0.05
_LOOK_AGAIN_S = 0.1
"""After a look that found the port closed, before that is believed."""


class ProcessDriver(Lives):
    """`MemberDriver` for local commands. One instance per pool; see `base` for the contract."""

    # -- the contract ----------------------------------------------------------------------

    async def activate(self, member: MemberName) -> Endpoint:
        """See `MemberDriver.activate`."""
        async with self._turn(member):
            life = self._lives.get(member)
            if life is None or life.is_over:
                await self._take_down(member)
                await self._refuse_company(member)
                spec = self._members[member]
                if self._settler is not None:
                    await self._settler.wait(spec.memory_needed_mib)
                # again, in one step with the start: another may have begun meanwhile
                self._refuse_other_lives(member)
                life = self._lives[member] = begin(
                    spec,
                    slot=self._slot(member),
                    log_path=self._log_path(member),
                    table=self._table,
                )
        return life.endpoint or await self._wait_until_ready(life)

    async def deactivate(self, member: MemberName) -> None:
        """See `MemberDriver.deactivate`. A running `activate` of it fails with ``stopped``."""
        if (life := self._lives.get(member)) is not None:
            life.is_stopping = True
        async with self._turn(member):
            await self._take_down(member)

    async def idle(self, member: MemberName) -> Idleness:
        """See `MemberDriver.idle`. A member that is not up is unreachable."""
        life = self._lives.get(member)
        if life is None or life.is_over:
            return Idleness.UNREACHABLE
        known = life.spec.profile
        if known.idle_path is None:
            return Idleness.IDLE
        answer = await self._get(life, known.idle_path)
        return Idleness.UNREACHABLE if answer is None else known.judge_idle(*answer).verdict

    async def ready(self, member: MemberName) -> bool:
        """See `MemberDriver.ready`."""
        life = self._lives.get(member)
        if life is None or life.is_over:
            return False
        return await self._readiness(life) is Readiness.READY

    async def observe(self) -> Mapping[MemberName, Endpoint]:
        """
        See `MemberDriver.observe`. What an earlier router left behind is never adopted.

        A member that was ready and whose probe gets no answer in time is up all the same as long
        as its process lives and its port is open: a hung engine is for the caller to judge.
        """
        if not self._has_swept:
            await self._sweep()
            self._has_swept = True
        up: dict[MemberName, Endpoint] = {}
        for member, life in list(self._lives.items()):
            if life.endpoint is not None and await self._is_up(life):
                up[member] = life.endpoint
        return up

    def progress(self, member: MemberName) -> str:
        """See `MemberDriver.progress`."""
        life = self._lives.get(member)
        lines = life.log.last_lines(1) if life is not None else []
        return lines[-1] if lines else ""

    async def close(self, *, stop_members: bool, hurry: asyncio.Event | None = None) -> None:
        """
        See `MemberDriver.close`. Members left running are taken down by the next router.

        Raises:
            DriverUnavailable: a member could not be proven gone; all the rest is closed.
        """
        if hurry is not None:
            self._hurry = hurry
        problems: list[str] = []
        try:
            for member in list(self._lives) if stop_members else ():
                try:
                    await self.deactivate(member)
                except DriverUnavailable as error:
                    problems.append(str(error))
        finally:
            tasks, self._tasks = self._tasks, set()
            for task in tasks:
                task.cancel()
            for life in self._lives.values():
                life.is_stopping = True
                life.child.forget()
                life.log.close()
            self._lives.clear()
            self._lock.release()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._prober.close()
        if problems:
            raise DriverUnavailable("; ".join(problems))

    # -- becoming ready --------------------------------------------------------------------

    async def _refuse_company(self, member: MemberName) -> None:
        """Start nothing while anything of another member lives: two residents must never be."""
        self._refuse_other_lives(member)
        found = await takedown.find(self._table, slot_value(self._state_id, self._pool), {})
        names = {member_of(proc.slot) for proc in found if proc.slot is not None}
        if names - {member}:
            raise DriverUnavailable(f"cannot start {member}: {min(names - {member})} is not gone")

    def _refuse_other_lives(self, member: MemberName) -> None:
        if others := self._lives.keys() - {member}:
            raise DriverUnavailable(f"cannot start {member}: {min(others)} is not gone")

    async def _wait_until_ready(self, life: Life) -> Endpoint:
        loop = asyncio.get_running_loop()
        pause = _POLL_FIRST_S
        refused_since: float | None = None
        while True:
            answer = await self._readiness_or_end(life)
            await self._fail_if_over(life)
            if answer is Readiness.READY:
                break
            if answer is not Readiness.FAILED:
                refused_since = None
            elif refused_since is None:
                refused_since = loop.time()
            elif loop.time() - refused_since >= self._refused_after_s:
                raise ActivationFailed(
                    "readiness_refused",
                    f"GET {life.spec.profile.readiness_path} is answered, but never with success; "
                    "correct the profile or readinessPath",
                    retryable=False,
                )
            if life.is_detached:
                await asyncio.sleep(pause)
            else:
                await life.child.wait(pause)
            pause = min(pause * 1.5, _POLL_LAST_S)
        parallel = await self._reported_parallel(life)
        await self._fail_if_over(life)
        if life.endpoint is None:  # else a second caller waited as well
            life.endpoint = Endpoint(
                host=life.spec.host, port=life.port, identity=life.identity, parallel=parallel
            )
            self._own(self._watch(life), f"watch {life.spec.name}")
            if self._settler is not None:
                self._own(self._settler.note_loaded(), f"measure {life.spec.name}")
        return life.endpoint

    async def _readiness_or_end(self, life: Life) -> Readiness:
        """Ask once, and hear of an exit even while a stranger on the port lets us wait."""
        ended = life.child.ended
        if ended.done():
            return await self._readiness(life)
        probe = asyncio.get_running_loop().create_task(self._readiness(life))
        try:
            either: set[asyncio.Future[Any]] = {probe, ended}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return probe.result() if probe.done() else Readiness.LOADING
        finally:
            if not probe.done():
                probe.cancel()
                await asyncio.gather(probe, return_exceptions=True)

    async def _fail_if_over(self, life: Life) -> None:
        """Raise when *life* cannot become ready any more; a wrapper may have left with code 0."""
        if life.is_stopping:
            raise ActivationFailed("stopped", "it was taken down while it loaded")
        if life.is_lost:
            raise ActivationFailed("exited", life.last_words())
        if not life.child.ended.done():
            return
        clean = life.child.ended.result() == 0
        carried_on = await self._carries_on(life)
        life.is_detached = clean and carried_on
        if life.is_detached:
            return
        life.is_lost = True
        taken = not carried_on and port_is_taken(life.spec.host, life.port)
        raise ActivationFailed("port_in_use" if taken else "exited", life.last_words())

    # -- watching --------------------------------------------------------------------------

    async def _watch(self, life: Life) -> None:
        """Report the end of a ready life, once, and keep its log bounded; through bad times."""
        while True:
            try:
                return await self._watch_on(life)
            except OSError as error:
                extra = {"pool": self._pool, "member": life.spec.name, "problem": str(error)}
                _log.warning("cannot look after a member now", extra=extra)
                await asyncio.sleep(LOOK_S)

    async def _watch_on(self, life: Life) -> None:
        refusals = 0
        while True:
            look = _LOOK_AGAIN_S if refusals else LOOK_S
            if life.is_detached:
                await asyncio.sleep(look)
            else:
                await life.child.wait(look)
            with suppress(OSError):  # a full disk is not the member's end
                life.log.trim()
            ended = life.child.ended.done()
            refuses = await port_refuses(life.spec.host, life.port)
            refusals = refusals + 1 if refuses else 0
            if ended and not life.is_detached:
                clean = life.child.ended.result() == 0 and not refusals
                life.is_detached = clean and await self._carries_on(life)
            # of a container the port alone tells from here on: no command every second
            goes_on = life.is_detached and (
                life.spec.gone_command is not None or await self._carries_on(life)
            )
            if ended and not goes_on:
                return self._report_lost(life, "exited", life.last_words())
            if refusals > 1:
                detail = f"nobody listens on port {life.port} any more\n{life.last_words()}"
                return self._report_lost(life, "port_closed", detail)

    def _report_lost(self, life: Life, reason: str, detail: str) -> None:
        if not life.is_stopping:
            life.is_lost = True
            self._lost(life.spec.name, reason, detail)

    def _own(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=f"{self._pool}: {name}")
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a watcher ended", extra={"task": task.get_name()}, exc_info=error)

    # -- taking down -----------------------------------------------------------------------

    async def _take_down(self, member: MemberName) -> None:
        """Prove *member* gone, stopping what is left of it. Call with its turn held."""
        life = self._lives.get(member)
        target = self._target(member, life)
        if life is None:
            left = await takedown.find(self._table, target.slot, {})
            if not left and await takedown.has_left(target, self._limits):
                return
            pids = [proc.pid for proc in left]
            _log.warning(
                "stopping what an earlier router left running",
                extra={"pool": self._pool, "member": member, "pids": pids},
            )
        await takedown.take_down(target, self._table, self._limits, self._hurry)
        if life is not None:
            life.log.close()
            del self._lives[member]

    async def _sweep(self) -> None:
        """
        Take down what earlier routers of this state directory left running.

        Processes of pools that nobody runs any more (renamed, removed) hold the accelerator just
        as well: whose lock is free has no router, and goes too.
        """
        found = await takedown.find(self._table, slot_value(self._state_id), self._sessions())
        left = {proc.slot for proc in found if proc.slot is not None}
        mine = slot_value(self._state_id, self._pool)
        members = {MemberName(member_of(slot)) for slot in left if slot.startswith(mine)}
        members |= {name for name, spec in self._members.items() if spec.gone_command is not None}
        for member in sorted(members - self._lives.keys()):
            async with self._turn(member):
                if member not in self._lives:
                    await self._take_down(member)
        for slot in sorted(slot for slot in left if not slot.startswith(mine)):
            pool = unquote(slot.split("/")[1])
            try:
                lock = lock_pool(self._state_dir, pool)
            except StateDirUnusable:
                continue  # it has a router
            try:
                target = leftover(member_of(slot), slot)
                await takedown.take_down(target, self._table, self._limits)
            finally:
                lock.release()
