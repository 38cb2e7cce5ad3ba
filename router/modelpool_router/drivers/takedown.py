"""
Taking a member down until nobody is left, and the proof of that.

Gone = no process of the slot value lives, the child is reaped, the port refuses, and the
configured command agrees. Everything here may be cancelled at any await and called again.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .base import DriverUnavailable
from .child import Child, CommandResult, run_command
from .probe import port_refuses
from .procfs import Proc, ProcessTable
from .profiles import StopStep

_FIRST_LOOK_S = 0.01
_LAST_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a take-down may take, apart from the profile's own graces."""

    command_s: float = 30.0
    """For one run of stopCommand or goneCommand."""
    kill_s: float = 10.0
    """From KILL to the proof; a process that hangs in a device driver outlives it."""
    gone_s: float = 30.0
    """For goneCommand to succeed and the port to refuse, once all processes are gone."""
    hurried_grace_s: float = 1.0
    """Before the KILL when there is a hurry, whatever the profile allows."""
    hurried_command_s: float = 5.0
    """For stopCommand, and for goneCommand to succeed, when there is a hurry: nothing else can stop
    a container."""


ORPHAN_STEPS = (StopStep(signal.SIGTERM, 2.0), StopStep(signal.SIGTERM, 2.0))
"""For what a killed router left behind: it serves nobody, and the start waits for its end."""


@dataclass(frozen=True, slots=True)
class Target:
    """What is to be taken down."""

    member: str
    slot: str
    steps: tuple[StopStep, ...]
    """Before the KILL."""
    child: Child | None = None
    """None for what an earlier router left behind."""
    sessions: Mapping[int, int] = field(default_factory=dict)
    """The session we opened ourselves, if any, with the start time of its leader."""
    host: str = "127.0.0.1"
    port: int | None = None
    """None = not to be looked at."""
    stop_command: tuple[str, ...] | None = None
    gone_command: tuple[str, ...] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None


async def find(table: ProcessTable, slot: str, sessions: Mapping[int, int]) -> list[Proc]:
    """
    Return the live processes of *slot*, without blocking the loop.

    Raises:
        DriverUnavailable: the process table cannot be read.
    """
    try:
        return await asyncio.to_thread(table.find, slot, sessions)
    except Exception as error:  # noqa: BLE001 - whatever broke: nothing is proven, so say exactly that
        raise DriverUnavailable(f"the process table cannot be read: {error!r}") from error


async def take_down(
    target: Target, table: ProcessTable, limits: Limits, hurry: asyncio.Event | None = None
) -> None:
    """
    Stop everything of *target* and return when it is proven gone.

    Args:
        hurry: Shortens every wait once it is set, those that have begun as well.

    Raises:
        DriverUnavailable: something is left; its message says what. Call again.
    """
    await _Takedown(target, table, limits, hurry or asyncio.Event()).run()


async def has_left(target: Target, limits: Limits) -> bool:
    """Ask goneCommand once, now; True when there is none."""
    if target.gone_command is None:
        return True
    result = await run_command(
        target.gone_command, env=target.env, cwd=target.cwd, timeout_s=limits.command_s
    )
    return result.succeeded


class _Patience:
    """A time limit that shrinks when a hurry begins, also while it is waited for."""

    def __init__(self, seconds: float, hurry: asyncio.Event, hurried_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._ends_at = self._loop.time() + seconds
        self._hurry = hurry
        self._hurried_s = hurried_s
        self._is_short = False

    def left(self) -> float:
        """Seconds that are left, not above 0 when it is over. To be asked often."""
        now = self._loop.time()
        if not self._is_short and self._hurry.is_set():
            self._is_short = True
            self._ends_at = min(self._ends_at, now + self._hurried_s)
        return self._ends_at - now


class _Takedown:
    def __init__(
        self, target: Target, table: ProcessTable, limits: Limits, hurry: asyncio.Event
    ) -> None:
        self._target = target
        self._table = table
        self._limits = limits
        self._hurry = hurry
        self._remarks: list[str] = []

    async def run(self) -> None:
        target = self._target
        if target.stop_command is not None:
            result = await self._command(target.stop_command)
            if not result.succeeded:
                self._remarks.append(f"stopCommand: {result}")
            # The command stops what our child merely watches; let the child see the end itself.
            if target.steps and await self._none_left_within(target.steps[0].grace_s):
                return await self._prove()
        for step in target.steps:
            self._signal(await self._left(), step.signal)
            if await self._none_left_within(step.grace_s):
                return await self._prove()
            if self._hurry.is_set():
                break
        await self._kill()
        return await self._prove()

    async def _left(self) -> list[Proc]:
        return await find(self._table, self._target.slot, self._target.sessions)

    def _signal(self, left: Sequence[Proc], number: signal.Signals) -> None:
        """Signal each process once: to a busy llama-server a second TERM means something else."""
        child = self._target.child
        group = -1
        if child is not None and any(proc.group == child.pid for proc in left):
            # the group in one go: members of it that are just being born get it too
            group = child.pid
            try:
                os.killpg(group, number)
            except (ProcessLookupError, PermissionError):
                group = -1
        for proc in left:
            if proc.group != group:
                self._table.send(proc, number)

    async def _none_left_within(self, seconds: float) -> bool:
        """Wait until no process is left, at most *seconds*; looks at least once."""
        patience = _Patience(seconds, self._hurry, self._limits.hurried_grace_s)
        pause = _FIRST_LOOK_S
        child = self._target.child
        while True:
            # While the child lives there is no need to ask the table.
            if (child is None or child.ended.done()) and not await self._left():
                # A process that is replacing its program image shows no environment for an
                # instant, and a list is not taken in one instant either: so look twice.
                await asyncio.sleep(_FIRST_LOOK_S)
                if not await self._left():
                    return True
            left = patience.left()
            if left <= 0:
                return False
            wait = min(pause, left)
            if child is not None and not child.ended.done():
                await child.wait(wait)
            else:
                await asyncio.sleep(wait)
            pause = min(pause * 1.5, _LAST_LOOK_S)

    async def _kill(self) -> None:
        """KILL until none is left: a process may fork while it is being killed."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.kill_s
        while True:
            left = await self._left()
            self._signal(left, signal.SIGKILL)
            if await self._none_left_within(_LAST_LOOK_S):
                return
            if loop.time() >= deadline:
                raise self._unproven(*self._complaint(left))

    def _complaint(self, left: Sequence[Proc]) -> tuple[str, str]:
        """Return what is left, and the way out."""
        named = ", ".join(f"{proc.pid} (state {proc.state})" for proc in left) or "its child"
        way_out = (
            "a process in state D hangs in a device driver and ends when that lets it go; a reboot "
            "may be needed"
            if any(proc.state == "D" for proc in left)
            else "it may run under another user: stop it by hand"
        )
        return f"member {self._target.member!r} outlived KILL: process {named}", way_out

    def _unproven(self, what: str, way_out: str) -> DriverUnavailable:
        return DriverUnavailable("; ".join((what, *self._remarks)), way_out=way_out)

    async def _prove(self) -> None:
        """Wait for the port to refuse and for goneCommand to agree."""
        limits = self._limits
        patience = _Patience(limits.gone_s, self._hurry, limits.hurried_command_s)
        pause = _FIRST_LOOK_S
        while True:
            doubt = await self._doubt()
            if doubt is None:
                return
            left = patience.left()
            if left <= 0:
                raise self._unproven(*doubt)
            await asyncio.sleep(min(pause, left))
            pause = min(pause * 2, 1.0)

    async def _doubt(self) -> tuple[str, str] | None:
        """Return what speaks against the end of the member, and the way out; None = nothing."""
        target = self._target
        if target.port is not None and not await port_refuses(target.host, target.port):
            return (
                f"port {target.port} of member {target.member!r} is still open although none of "
                "its processes is left",
                "find out who listens there, and stop that",
            )
        if target.gone_command is not None:
            result = await self._command(target.gone_command)
            if not result.succeeded:
                return (
                    f"goneCommand of member {target.member!r} does not succeed ({result})",
                    "stop by hand what it still finds, or correct goneCommand",
                )
        return None

    async def _command(self, command: tuple[str, ...]) -> CommandResult:
        """Run a command of the member's."""
        limits, target = self._limits, self._target
        patience = _Patience(limits.command_s, self._hurry, limits.hurried_command_s)
        running = asyncio.get_running_loop().create_task(
            run_command(command, env=target.env, cwd=target.cwd, timeout_s=limits.command_s)
        )
        try:
            while not running.done() and (left := patience.left()) > 0:
                await asyncio.wait({running}, timeout=min(left, _LAST_LOOK_S))
            return running.result() if running.done() else CommandResult(None, "")
        finally:
            if not running.done():
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
