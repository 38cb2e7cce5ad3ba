"""
Counts system calls per short request, with strace.

    python benchmarks/syscalls.py [--contenders nginx modelpool] [--out result.jsonl]

Half of what a proxy costs is the kernel's work, which `instructions.py` does not see. The growth
from one load to a larger one counts, so that what goes on by the clock does not. Requests come on
as many connections as the busy shapes have, since what is read together is waited for once.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import bodies
import machine
from bodies import KIB
from contenders import CONTENDERS, NotInstalled, Plan, Running, free_port
from native import Natives, build
from run import send, upstream

REQUESTS, MORE_REQUESTS = 500, 2500
CONNECTIONS = 16
_ROW = re.compile(r"^\s*[\d.]+\s+[\d.]+\s+\d+\s+(\d+)\s+(?:\d+\s+)?(\w+)$", re.MULTILINE)


def missing() -> str:
    """Return why this cannot run here, or ''."""
    if shutil.which("strace") is None:
        return "no `strace` on this machine"
    done = subprocess.run(["strace", "-qq", "true"], capture_output=True, text=True, timeout=30)
    return "" if done.returncode == 0 else "strace may not trace here"


def count(name: str, natives: Natives) -> dict[str, float]:
    """
    Return calls per request of one contender, by name of the call.

    Raises:
        NotInstalled: it cannot be started here.
    """
    with tempfile.TemporaryDirectory(prefix="modelpool-bench-") as text, upstream(natives) as port:
        folder = Path(text)
        plan = Plan(folder / "contender", free_port(), port, natives)
        core = machine.cores().contender
        with Running(CONTENDERS[name], plan, core=core) as running:
            body = bodies.write(folder, "body", bodies.chat(KIB))

            def drive(requests: int) -> None:
                send(natives, running, body, requests, CONNECTIONS)

            drive(2 * CONNECTIONS)
            few = _traced(running, folder, lambda: drive(REQUESTS))
            many = _traced(running, folder, lambda: drive(MORE_REQUESTS))
    calls = {call: (many[call] - few[call]) / (MORE_REQUESTS - REQUESTS) for call in many}
    return {call: each for call, each in sorted(calls.items(), key=_most) if each > 0.005}


def _most(item: tuple[str, float]) -> float:
    return -item[1]


def _traced(running: Running, folder: Path, work: Any) -> Counter[str]:
    out = folder / "calls"
    pids = [flag for pid in running.pids() for flag in ("-p", str(pid))]
    command = ["strace", "-qq", "-f", "-c", "-o", str(out), *pids]
    strace = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 10
        while not _is_traced(running.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        work()
    finally:
        strace.send_signal(signal.SIGINT)
        strace.wait(30)
    found: Counter[str] = Counter()
    for calls, name in _ROW.findall(out.read_text("utf-8")):
        if name != "total":
            found[name] += int(calls)
    out.unlink()
    return found


def _is_traced(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text("utf-8")
    return re.search(r"^TracerPid:\s*0$", status, re.MULTILINE) is None


def main() -> None:
    """Count for those whom the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().split("\n\n")[0])
    parser.add_argument("--contenders", nargs="+", default=["nginx", "modelpool"])
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    why = missing()
    if why:
        print(f"skipped: {why}", file=sys.stderr)
        return
    natives, lines = build(), []
    for name in options.contenders:
        try:
            calls = count(name, natives)
        except NotInstalled as error:
            print(f"skipped {name}: {error}", file=sys.stderr)
            continue
        total = sum(calls.values())
        parts = ", ".join(f"{each:.2f} {call}" for call, each in calls.items())
        print(f"{name:16} {total:6.2f} per request: {parts}")
        fields = {"round": 0, "shape": "system calls per 1 KB request", "contender": name}
        lines.append(json.dumps({**fields, "figure": total, "errors": 0}))
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
