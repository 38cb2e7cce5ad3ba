"""Pauses are not in step: two processes that lost the server together do not come back together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import asyncio, contextlib, json, sys
import looptime
from modelpool_kube.errors import Unavailable
from modelpool_kube.kinds import LEASES
from modelpool_kube.lease import LeaseKeeper
from modelpool_kube.record import SlotId
from modelpool_kube.watch import Reflector
from modelpool_kube.workqueue import WorkQueue

class Away:
    "A server that is not there, and when it was asked."
    def __init__(self):
        self.asked = []
        self.loop = asyncio.get_running_loop()
    def now(self):
        return self.loop.time()
    async def _refuse(self, *_, **__):
        self.asked.append(self.loop.time())
        raise Unavailable("away", call="GET")
    get = list = create = _refuse

async def main(part):
    port = Away()
    if part == "queue":
        queue = WorkQueue()
        print(json.dumps([queue.retry("pool") for _ in range(8)]))
        return
    if part == "watch":
        work = Reflector(port, LEASES, "lab", notify=lambda notice: None).run()
    else:
        work = LeaseKeeper(port, SlotId("lab", "modelpool-gpu0"), "me", may_create=True).run()
    task = asyncio.get_running_loop().create_task(work)
    while len(port.asked) < 8:
        await asyncio.sleep(0.5)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    print(json.dumps([after - before for before, after in zip(port.asked, port.asked[1:])]))

loop = looptime.new_event_loop()
loop.setup_looptime()
loop.run_until_complete(main(sys.argv[1]))
"""


def pauses(part: str) -> list[float]:
    """Return the pauses of *part* in a process of its own, which finds no server; virtual time."""
    path = os.pathsep.join(str(ROOT / each) for each in ("router", "operator"))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, part],
        # Nothing that a process could be told to be random by differs between the two.
        env={"PYTHONPATH": path, "PYTHONHASHSEED": "0", "PATH": os.environ.get("PATH", "")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[float] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("part", ["watch", "lease", "queue"])
def test_given_two_processes_that_lost_the_server_together_then_their_pauses_differ(
    part: str,
) -> None:
    one, other = pauses(part), pauses(part)

    assert len(one) == len(other) >= 7
    assert all(each > 0.01 for each in (*one, *other))
    apart = [abs(a - b) for a, b in zip(one, other, strict=True)]
    # A step of one would do no harm; that they stay together would.
    assert sum(each > 0.001 for each in apart) >= len(apart) - 1
