"""
Which processes belong to a member, asked of the kernel, never of memory.

A process belongs to a slot value when its environment carries it (``MODELPOOL_SLOT``), or when it
lives in a session in which such a process lives or which we opened ourselves: an engine that
overwrites its environment area with a process title is found by its session, a child that left
session and group by its environment.

`ProcTable` reads /proc (Linux). `PsTable` is for systems without it (macOS): it asks ``ps`` for the
environment of our own processes and knows groups instead of sessions; a process that hides both
environment and group is found there only by its open port.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import quote, unquote

VARIABLE = "MODELPOOL_SLOT"
"""Environment variable that every process of a member carries."""


def slot_value(state_id: str, pool: str = "", member: str = "") -> str:
    """Build ``<state id>/<pool>/<member>``; with less, the prefix of all that begins so."""
    if not pool:
        return f"{quote(state_id, safe='')}/"
    return "/".join(quote(part, safe="") for part in (state_id, pool, member))


def member_of(slot: str) -> str:
    """Take the member's name out of a slot value."""
    return unquote(slot.rpartition("/")[2])


@dataclass(frozen=True, slots=True)
class Proc:
    """One process at the moment of the look."""

    pid: int
    parent: int
    group: int
    session: int
    started: int
    """Clock ticks since boot; with the pid, an identity. 0 = unknown."""
    state: str
    """Letter of /proc: R, S, D (cannot be killed), Z (ended, not yet waited for) ..."""
    threads: int = 1
    slot: str | None = None

    @property
    def is_alive(self) -> bool:
        """False for a zombie; one whose other threads run on still holds its memory."""
        return self.state not in "ZX" or self.threads > 1


class ProcessTable(Protocol):
    """The kernel's list of processes. Blocking, a few milliseconds: call it in a thread."""

    def find(self, slot: str, sessions: Mapping[int, int]) -> list[Proc]:
        """
        Return the live processes of *slot*; a value that ends with ``/`` means a whole pool.

        Args:
            slot: Value, or prefix that ends with ``/``, of the environment variable.
            sessions: Sessions that we opened ourselves, with the start time of their leader.
        """
        ...

    def started(self, pid: int) -> int:
        """Return the start time of *pid*, 0 when unknown."""
        ...

    def send(self, proc: Proc, number: signal.Signals) -> None:
        """Signal exactly that process; silently nothing when it is gone already."""
        ...


class ProcTable:
    """The process table of Linux."""

    def __init__(self, root: Path = Path("/proc")) -> None:
        self._root = root

    def find(self, slot: str, sessions: Mapping[int, int]) -> list[Proc]:
        """See `ProcessTable.find`."""
        ours = os.getsid(0)
        procs = [proc for proc in self._all(slot) if proc.pid != os.getpid()]
        carrying = {proc.session for proc in procs if proc.slot is not None}
        leaders = {proc.pid: proc.started for proc in procs}
        known = {
            session
            for session, started in sessions.items()
            # a leader with another start time means that the number was given away again
            if not started or leaders.get(session, started) == started
        }
        wanted = (carrying | known) - {ours}
        found = [proc for proc in procs if proc.slot is not None or proc.session in wanted]
        for proc in found:
            self._reap(proc, sessions)
        return [proc for proc in found if proc.is_alive]

    def started(self, pid: int) -> int:
        """See `ProcessTable.started`."""
        proc = self._look(pid, "")
        return proc.started if proc is not None else 0

    def send(self, proc: Proc, number: signal.Signals) -> None:
        """See `ProcessTable.send`; a pid that was reused meanwhile is not hit."""
        try:
            handle = os.pidfd_open(proc.pid)
        except ProcessLookupError:
            return
        except (OSError, AttributeError):
            _kill(proc.pid, number)  # an old kernel: accept the tiny window
            return
        try:
            if self.started(proc.pid) == proc.started:
                # what we may not signal is still there afterwards, and reported then
                with suppress(ProcessLookupError, PermissionError):
                    signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)

    def _all(self, slot: str) -> Iterator[Proc]:
        for name in os.listdir(self._root):
            if name.isdigit() and (proc := self._look(int(name), slot)) is not None:
                yield proc

    def _look(self, pid: int, slot: str) -> Proc | None:
        folder = self._root / str(pid)
        try:
            raw = (folder / "stat").read_bytes()
        except OSError:
            return None
        # the name may hold spaces and brackets: what counts follows the last bracket
        fields = raw.rpartition(b")")[2].split()
        proc = Proc(
            pid=pid,
            parent=int(fields[1]),
            group=int(fields[2]),
            session=int(fields[3]),
            started=int(fields[19]),
            state=fields[0].decode(),
            threads=int(fields[17]),
        )
        if not slot:
            return proc
        return _with_slot(proc, _carried(_environment(folder, proc), slot))

    def _reap(self, proc: Proc, sessions: Mapping[int, int]) -> None:
        """Wait for zombies that became our children because nobody else did (we are pid 1)."""
        if proc.is_alive or proc.parent != os.getpid() or proc.pid in sessions:
            return
        with suppress(ChildProcessError):
            os.waitpid(proc.pid, os.WNOHANG)


def _environment(folder: Path, proc: Proc) -> bytes:
    """Raw environment, empty when it is not ours to read."""
    paths = [folder / "environ"]
    if proc.state == "Z" and proc.threads > 1:
        # the first thread ended, the others run on and still answer for the memory
        with suppress(OSError):
            paths += [task / "environ" for task in (folder / "task").iterdir()]
    for path in paths:
        with suppress(OSError):
            if raw := path.read_bytes():
                return raw
    return b""


def _carried(environment: bytes, slot: str) -> str | None:
    marker = f"{VARIABLE}={slot}".encode()
    for entry in environment.split(b"\0"):
        if entry == marker or (slot.endswith("/") and entry.startswith(marker)):
            return entry.partition(b"=")[2].decode("ascii", "replace")
    return None


def _with_slot(proc: Proc, slot: str | None) -> Proc:
    if slot is None:
        return proc
    return Proc(
        pid=proc.pid,
        parent=proc.parent,
        group=proc.group,
        session=proc.session,
        started=proc.started,
        state=proc.state,
        threads=proc.threads,
        slot=slot,
    )


class PsTable:
    """The process table of systems without /proc, through ``ps``."""

    _COLUMNS = "pid=,ppid=,pgid=,state=,command="

    def __init__(self) -> None:
        show = ["-A", "-E", "-ww"] if sys.platform == "darwin" else ["e", "-A", "-ww"]
        self._command = ["ps", *show, "-o", self._COLUMNS]

    def find(self, slot: str, sessions: Mapping[int, int]) -> list[Proc]:
        """See `ProcessTable.find`; groups stand in for sessions."""
        listing = subprocess.run(
            self._command, capture_output=True, check=True, timeout=10, stdin=subprocess.DEVNULL
        ).stdout
        procs = [proc for line in listing.splitlines() if (proc := _from_ps(line, slot))]
        wanted = {proc.group for proc in procs if proc.slot is not None} | set(sessions)
        wanted.discard(os.getpgrp())
        return [
            proc
            for proc in procs
            if proc.is_alive
            and proc.pid != os.getpid()
            and (proc.slot is not None or proc.group in wanted)
        ]

    def started(self, pid: int) -> int:
        """See `ProcessTable.started`: not known here."""
        return 0

    def send(self, proc: Proc, number: signal.Signals) -> None:
        """See `ProcessTable.send`."""
        _kill(proc.pid, number)


def _kill(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _from_ps(line: bytes, slot: str) -> Proc | None:
    fields = line.split(None, 4)
    if len(fields) < 4 or not fields[0].isdigit():
        return None
    words = fields[4].replace(b" ", b"\0") if len(fields) > 4 else b""
    return Proc(
        pid=int(fields[0]),
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[2]),
        started=0,
        state=fields[3].decode()[:1],
        slot=_carried(words, slot),
    )


def table() -> ProcessTable:
    """Return the table of this system."""
    return ProcTable() if Path("/proc/self/environ").exists() else PsTable()
