"""Where and with what a result was made: kind of machine, versions. No names, no paths."""

from __future__ import annotations

import datetime
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple


class Cores(NamedTuple):
    """Which core the contender has for itself, and which one generator and upstream share."""

    contender: int | None
    tools: int | None


def cores() -> Cores:
    """Return two cores to pin to; None where there is only one, or no `taskset`."""
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2 or shutil.which("taskset") is None:
        return Cores(None, None)
    return Cores(usable[0], usable[1])


def pinned(core: int | None, *command: str) -> list[str]:
    """Return *command* as it runs on *core* alone."""
    return list(command) if core is None else ["taskset", "-c", str(core), *command]


def describe() -> dict[str, Any]:
    """Return what a reader of a result has to know of the machine."""
    model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    kernel = re.match(r"\d+\.\d+", platform.release())
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "cpu": model[1] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory[1]) / 2**20) if memory else None,
        "kernel": kernel[0] if kernel else platform.system(),
        "python": platform.python_version(),
        "pinned": cores().contender is not None,
    }


def version_of(*command: str) -> str:
    """Return the first version number that *command* prints, or ''."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"\d+\.\d+(?:\.\d+)*(?:[.+-]?(?:dev|rc|a|b)\d*)?", done.stdout + done.stderr)
    return found[0] if found else ""
