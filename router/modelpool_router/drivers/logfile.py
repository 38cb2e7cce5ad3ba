"""
What a member prints: straight into a file, so that it goes on printing when the router has ended.

The last life's file is kept beside it (``.1``); a file that grows too large is cut.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_MOST = 32 << 20
_TAIL = 16 << 10
_LINE = 300

_NOISE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


class LogFile:
    """The log of one life. Created by `begin` only."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd

    @classmethod
    def begin(cls, path: Path) -> LogFile:
        """
        Start a new file at *path*, readable by its owner only, keeping the old one as ``.1``.

        Raises:
            OSError: the file cannot be had.
        """
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.is_file() and path.stat().st_size:
            path.replace(_old(path))
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return cls(path, os.open(path, flags, 0o600))

    @property
    def fileno(self) -> int:
        """Descriptor to hand to the child."""
        return self._fd

    def last_lines(self, count: int = 20) -> list[str]:
        """Return the last lines with something in them, without colours; a bar's last state."""
        if self._fd < 0:
            return []
        size = os.fstat(self._fd).st_size
        text = os.pread(self._fd, _TAIL, max(0, size - _TAIL)).decode("utf-8", "replace")
        lines = (_NOISE.sub("", line).strip()[:_LINE] for line in re.split(r"[\r\n]+", text))
        return [line for line in lines if line][-count:]

    def trim(self) -> None:
        """Cut a file that has grown too large, keeping its end as ``.1``."""
        size = os.fstat(self._fd).st_size
        if size <= _MOST:
            return
        end = os.pread(self._fd, _MOST // 32, size - _MOST // 32)
        old = os.open(_old(self._path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(old, "wb") as kept:
            kept.write(end)
        os.ftruncate(self._fd, 0)  # the child appends, so it goes on at the new end

    def close(self) -> None:
        """Close our descriptor; the child has its own. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _old(path: Path) -> Path:
    return path.with_name(path.name + ".1")
