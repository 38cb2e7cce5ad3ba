"""Real processes for tests: commands of the fake member, and what it wrote into its event log."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

ROUTER = Path(__file__).resolve().parents[2] / "router"

PYTHON_ENV = {"PYTHONPATH": str(ROUTER), "PYTHONDONTWRITEBYTECODE": "1"}
"""Lets a child find the package in a checkout that is not installed."""


def fake_command(name: str, *flags: str, log: Path | None = None) -> tuple[str, ...]:
    """Command line of a fake member; *flags* as in its ``--help``."""
    logged = ("--log", str(log)) if log is not None else ()
    module = ("-m", "modelpool_router.testing.member")
    return (sys.executable, *module, "--port", "{port}", "--name", name, *logged, *flags)


class EventLog:
    """Reads the JSON lines that fake members append to one file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def events(self, event: str = "", name: str = "") -> list[dict[str, Any]]:
        """Return the events so far, oldest first, of one kind and one member if given."""
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8").splitlines()
        found = [json.loads(line) for line in lines]
        return [
            entry
            for entry in found
            if event in ("", entry["event"]) and name in ("", entry["name"])
        ]

    async def wait_for(self, event: str, name: str = "", *, count: int = 1) -> dict[str, Any]:
        """Return the *count*-th such event as soon as it is there."""
        await until(lambda: len(self.events(event, name)) >= count, f"{event} of {name or 'any'}")
        return self.events(event, name)[count - 1]


async def until(
    is_true: Callable[[], bool | Awaitable[bool]], what: str, *, within_s: float = 20.0
) -> None:
    """Wait for something outside this process to become true; fail loudly if it does not."""
    deadline = asyncio.get_running_loop().time() + within_s
    while True:
        answer = is_true()
        if answer if isinstance(answer, bool) else await answer:
            return
        assert asyncio.get_running_loop().time() < deadline, f"not within {within_s} s: {what}"
        await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether a process of this number lives; a zombie does not."""
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
        return state not in (b"Z", b"X")
    return False


def carrying(text: str) -> list[int]:
    """Every live process whose ``MODELPOOL_SLOT`` contains *text*."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or not is_alive(int(name)):
            continue
        with suppress(OSError):
            for entry in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                if entry.startswith(b"MODELPOOL_SLOT=") and text.encode() in entry:
                    found.append(int(name))
    return found
