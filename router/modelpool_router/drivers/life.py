"""One start of one member: how it is configured, how it is started, what it printed last."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..core.spec import MemberName
from .base import ActivationFailed, Endpoint
from .child import Child, describe_exit
from .logfile import LogFile
from .probe import free_port, port_is_taken
from .procfs import VARIABLE, ProcessTable
from .profiles import Profile, profile

_GENERIC = profile("generic")
_NOT_A_PROGRAM = frozenset({errno.ENOENT, errno.EACCES, errno.ENOTDIR, errno.ENOEXEC, errno.EISDIR})


@dataclass(frozen=True, slots=True)
class ProcessMember:
    """
    How to run one member.

    In the three commands ``{port}`` and ``{member}`` are replaced, wherever they stand.
    """

    name: MemberName
    command: tuple[str, ...]
    profile: Profile = _GENERIC
    """With the configuration's overrides in place."""
    port: int | None = None
    """None = a free one is chosen at each load."""
    host: str = "127.0.0.1"
    env: Mapping[str, str] = field(default_factory=dict)
    """On top of the router's own, without its ``MODELPOOL_`` variables."""
    working_directory: Path | None = None
    stop_command: tuple[str, ...] | None = None
    gone_command: tuple[str, ...] | None = None
    memory_needed_mib: float | None = None
    log_file: Path | None = None
    """None = one in the state directory."""

    def environment(self) -> dict[str, str]:
        """Environment of every command of this member, before the slot value."""
        return {**inherited(), **self.env}


@dataclass(slots=True, eq=False)
class Life:
    """One start. `begin` makes it; the driver keeps it until its take-down is proven."""

    spec: ProcessMember
    port: int
    child: Child
    child_started: int
    """Start time of the first process in clock ticks, 0 where it is not known."""
    identity: str
    log: LogFile
    endpoint: Endpoint | None = None
    """Set when it became ready."""
    is_stopping: bool = False
    is_lost: bool = False
    is_detached: bool = False
    """Its first process has left with code 0, something else carries on."""
    asked_gone_at: float = 0.0
    """When goneCommand was last asked about a detached life; loop time."""

    @property
    def is_over(self) -> bool:
        """True when nothing is to be expected of it any more but its take-down."""
        ended = self.child.ended.done() and not self.is_detached
        return self.is_lost or self.is_stopping or ended

    @property
    def sessions(self) -> Mapping[int, int]:
        """The session that was opened for it, with the start time of its leader."""
        return {self.child.pid: self.child_started}

    def last_words(self) -> str:
        """Say how it ended and what it printed last."""
        ended = self.child.ended
        how = describe_exit(ended.result()) if ended.done() else "its first process still runs"
        return "\n".join([how, *self.log.last_lines()])


def begin(spec: ProcessMember, *, slot: str, log_path: Path, table: ProcessTable) -> Life:
    """
    Start the command of *spec*. One step without an await, so that nothing can be half done.

    Raises:
        ActivationFailed: nothing was started; the reason says why.
    """
    port = spec.port if spec.port is not None else free_port(spec.host)
    if port_is_taken(spec.host, port):
        raise ActivationFailed(
            "port_in_use",
            f"port {port} of {spec.host} is used by another program; end it, choose another port, "
            "or leave `port` out and write {port} in the command",
        )
    folder = spec.working_directory
    if folder is not None and not folder.is_dir():
        raise ActivationFailed(
            "working_directory_not_found",
            f"{folder} is not a folder; create it or correct workingDirectory",
            retryable=False,
        )
    command = filled(spec.command, spec.name, port)
    try:
        log = LogFile.begin(spec.log_file or log_path)
    except OSError as error:
        raise ActivationFailed("log_file", f"{error}; make it writable or set logFile") from error
    try:
        child = Child.start(
            (os.path.expanduser(command[0]), *command[1:]),
            env={**spec.environment(), VARIABLE: slot},
            cwd=folder,
            output=log.fileno,
        )
    except (OSError, ValueError) as error:
        log.close()
        if isinstance(error, OSError) and error.errno in _NOT_A_PROGRAM:
            raise ActivationFailed(
                "command_not_found",
                f"{command[0]}: {error.strerror}; install it, make it executable, or write its "
                "full path",
                retryable=False,
            ) from error
        raise ActivationFailed("start_failed", f"{command[0]}: {error}") from error
    started = table.started(child.pid)
    identity = f"{child.pid}:{started or time.monotonic_ns()}"
    return Life(spec, port, child, started, identity, log)


def inherited() -> dict[str, str]:
    """Return our environment without what is ours alone: keys, tokens, another slot's value."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MODELPOOL_")}
    # Python engines that rename their processes would overwrite the environment we look for.
    kept.setdefault("SPT_NOENV", "1")
    return kept


def filled(command: tuple[str, ...], member: str, port: int | None) -> tuple[str, ...]:
    """Put port and name in their places; an unknown port becomes an empty text."""
    number = "" if port is None else str(port)
    return tuple(part.replace("{port}", number).replace("{member}", member) for part in command)
