"""The router's own machine: a stopped process, no more files, a port that somebody took."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import sys
from pathlib import Path

import pytest

from served import member, pool, served, served_here, write_config


async def test_a_router_that_was_stopped_for_a_while_keeps_its_promises(tmp_path: Path) -> None:
    """The load lands while it sleeps, and the budget ends: refused, not granted late."""
    slow = pool(member("alpha", load=0.4), member("beta"), swapBudget="1s")
    async with served(tmp_path, slow) as router:
        held = router.begin(router.chat("alpha"))
        await router.members.wait_for("start", "alpha")
        router.signal(signal.SIGSTOP)
        await router.members.wait_for("ready", "alpha")
        await asyncio.sleep(1.0)  # the budget ends meanwhile
        router.signal(signal.SIGCONT)
        refused = await held
        assert (refused.status, refused.code) == (503, "swap_budget_exceeded")
        assert (await router.answered("alpha")).status == 200
        assert router.starts("alpha") == 1


async def test_without_free_files_what_runs_goes_on(tmp_path: Path) -> None:
    async with served(tmp_path, pool(member("alpha"), member("beta"))) as router:
        router.allowed_levels.add("error")
        async with router.stream("alpha", x_chunks=60, x_gap_ms=20) as stream:
            await stream.tokens(1)
            before = resource.prlimit(router.pid, resource.RLIMIT_NOFILE)
            files = len(os.listdir(f"/proc/{router.pid}/fd"))
            resource.prlimit(router.pid, resource.RLIMIT_NOFILE, (files + 5, before[1]))
            crowd = [socket.create_connection(router.address) for _ in range(30)]
            await stream.rest()
            assert (len(stream.texts), stream.is_complete) == (60, True)
            resource.prlimit(router.pid, resource.RLIMIT_NOFILE, before)
            for each in crowd:
                each.close()
        await router.answered("alpha")
        await router.answered("beta")
        assert len(router.log_lines()) < 100  # no flood of complaints


async def test_a_port_that_is_taken_fails_the_load_and_not_the_pool(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        fixed = member("alpha", keys={"port": taken.getsockname()[1]})
        async with served_here(tmp_path, pool(fixed, member("beta"))) as router:
            await router.answered("beta")
            refused = await router.chat("alpha")
            assert (refused.status, refused.code) == (503, "member_failed")
            assert "port_in_use" in refused.message
            await router.answered("beta")
            assert router.starts("alpha") == 0


async def test_the_usual_limit_on_files_is_no_limit_on_holds(tmp_path: Path) -> None:
    """A soft limit of 256 files, and 400 requests held at once."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    slow = pool(member("alpha", load=2.0), swapBudget="60s")
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        async with served(tmp_path, slow) as router:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            crowd = [router.begin(router.chat("alpha")) for _ in range(400)]
            await router.until_held("alpha", 400)
            answers = await asyncio.gather(*crowd)
            assert {answer.status for answer in answers} == {200}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("connections", "told"), [(4096, True), (10, False)])
async def test_a_hard_limit_below_the_bounds_is_told(
    tmp_path: Path, connections: int, told: bool
) -> None:
    """What is missing shows only under load, and then in other programs first."""
    file = tmp_path / "pool.yaml"
    settings = {"listen": "127.0.0.1:0", "admin": "off", "stateDir": str(tmp_path / "state")}
    bounds = {"maxConnections": connections, "maxHeld": 10}
    write_config(file, {**settings, **bounds, "pools": [pool(member("alpha"))]})
    program = await asyncio.create_subprocess_exec(
        "sh", "-c", 'ulimit -n 512; exec "$@"', "sh",
        sys.executable, "-m", "modelpool_router", "serve", str(file), "--log-format", "json",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert program.stdout is not None
    try:
        lines: list[str] = []
        while not lines or "listening" not in lines[-1]:
            lines.append((await program.stdout.readline()).decode())
            assert lines[-1], lines
    finally:
        program.terminate()
        await program.communicate()
    assert any("few open files allowed" in line for line in lines) is told
