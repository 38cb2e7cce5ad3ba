"""
The state directory: who we are over restarts, and that we are the only one.

It holds the state id (in every member's environment, so that orphans are found again), one lock
file per pool and the members' log files.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
from pathlib import Path
from urllib.parse import quote

from .base import DriverError

_LONGEST = 80
"""File names end at 255 bytes; two names and their endings must fit."""


class StateDirUnusable(DriverError):
    """The state directory cannot be used; the message says why and what to do."""


class PoolLock:
    """
    Exclusive right of this process to a pool's processes, until `release` or the process ends.

    The kernel frees it however the holder ended; children do not inherit it.
    """

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self.path = path

    def release(self) -> None:
        """Give the pool up. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def file_name(name: str) -> str:
    """Turn a pool's or member's name (any characters, any length) into part of a file name."""
    safe = quote(name, safe="").replace(".", "%2E")
    if len(safe) <= _LONGEST:
        return safe
    return f"{safe[: _LONGEST - 17]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def prepare(state_dir: Path) -> str:
    """
    Create *state_dir* if need be and return its id: 16 hex digits that survive restarts.

    Raises:
        StateDirUnusable: it cannot be created, read or written.
    """
    path = state_dir / "id"
    try:
        # the log files may quote what clients sent: nobody else reads them
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            # complete before it has its name, and the first of two routers wins
            draft = state_dir / f".id-{os.getpid()}-{secrets.token_hex(4)}"
            draft.write_text(secrets.token_hex(8) + "\n", encoding="ascii")
            try:
                os.link(draft, path)
            except FileExistsError:
                pass
            finally:
                draft.unlink()
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeError) as error:
        raise StateDirUnusable(
            f"state directory {state_dir}: {error}; make it writable or set another stateDir"
        ) from error
    if not text.isalnum():
        raise StateDirUnusable(
            f"state directory {state_dir}: {path} is damaged; stop the members that an earlier "
            "router may have left running, then delete that file"
        )
    return text


def lock_pool(state_dir: Path, pool: str) -> PoolLock:
    """
    Take the lock of *pool* or say who has it.

    Raises:
        StateDirUnusable: another process holds it, or the file cannot be opened.
    """
    path = state_dir / f"{file_name(pool)}.lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StateDirUnusable(
            f"state directory {state_dir}: {error}; make it writable or set another stateDir"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        os.close(fd)
        who = f"process {holder}" if holder.isdigit() else "another process"
        raise StateDirUnusable(
            f"pool {pool!r} is run by {who} already (lock {path}); stop that router, or give this "
            "one another stateDir and another accelerator"
        ) from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return PoolLock(fd, path)
