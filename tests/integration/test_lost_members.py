"""A member that ends by itself: noticed at once, told to its clients, and replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

from fakemembers import is_alive
from served import LIMIT_S, all_of, member, pool, served_here


async def test_an_idle_resident_that_dies_is_not_believed_in(tmp_path: Path) -> None:
    patient = member("alpha", keys={"stopGrace": "10m", "killGrace": "10m"})
    async with served_here(tmp_path, pool(patient, member("beta"))) as router:
        await router.answered("alpha")
        os.kill(router.members.events("start", "alpha")[0]["pid"], signal.SIGSEGV)
        await router.wait_for(lambda v: v["resident"] != "alpha", "the loss is noticed")
        await router.answered("beta")  # no wait for what is gone already
        # so soon after landing it counts as a failed load: it may not evict the others again
        refused = await router.chat("alpha")
        assert (refused.status, refused.code) == (503, "member_backoff")
        assert "SIGSEGV" in refused.message
        await router.act("load", "alpha")
        await router.answered("alpha")
        assert await router.metric("modelpool_resident_lost_total", member="alpha") == 1


async def test_a_resident_that_dies_with_others_waiting(tmp_path: Path) -> None:
    """Its running stream ends with an error, its waiters are told, the next member serves."""
    members = (member("alpha", keys={"parallel": 1}), member("beta"))
    async with served_here(tmp_path, pool(*members)) as router:
        async with router.stream("alpha", x_chunks=50, x_gap_ms=20, x_die_after=15) as stream:
            await stream.tokens(1)
            held = router.begin(router.chat("alpha"))
            await router.until_held("alpha")
            other = router.begin(router.answered("beta"))
            await router.until_held("beta")
            await stream.rest()
        assert len(stream.texts) == 15
        assert not stream.is_complete
        assert stream.error is not None and stream.error["code"] == "upstream_reset"
        refused = await held
        # Told by the loss itself, or after a grant that found nobody listening, or one that the
        # kernel still took a connection for while the process ended.
        assert refused.code in {"member_failed", "member_backoff", "upstream_reset"}
        if refused.code != "upstream_reset":
            # its last words are for who looks after it: they may quote somebody else's request
            assert "exit code 1" in refused.message and "crashed" not in refused.message
            last_error = (await router.pool())["members"][0]["last_error"]
            assert "crashed: after 15 chunks" in last_error
        await other


@pytest.mark.usefixtures("either_client")
async def test_a_crash_before_any_byte_of_an_answer(tmp_path: Path) -> None:
    async with served_here(tmp_path, pool(member("alpha"), member("beta"))) as router:
        await router.answered("alpha")
        broken = await router.chat("alpha", x_crash=True)
        assert (broken.status, broken.code) == (502, "upstream_reset")
        await router.answered("beta")


async def test_a_dropped_connection_is_not_a_lost_member(tmp_path: Path) -> None:
    async with served_here(tmp_path, pool(member("alpha"), member("beta"))) as router:
        stream = await router.whole_stream("alpha", x_chunks=9, x_drop_after=4)
        assert len(stream.texts) == 4
        assert stream.error is not None and not stream.is_complete
        await router.answered("alpha")
        assert router.starts("alpha") == 1
        assert len(await router.swaps()) == 1


async def test_a_member_that_ignores_term_is_killed(tmp_path: Path) -> None:
    keys = {"stopGrace": "200ms", "killGrace": "200ms"}
    stubborn = member("alpha", ignore_term="inf", keys=keys)
    async with served_here(tmp_path, pool(stubborn, member("beta"))) as router:
        await router.answered("alpha")
        await router.answered("beta")
        assert len(router.members.events("term", "alpha")) == 2
        assert router.time_of("start", "beta") >= router.time_of("term", "alpha") + 0.15


async def test_a_child_that_survives_its_parent_is_found(tmp_path: Path) -> None:
    """It holds the lock, that is the memory, until it is gone: beta must not start before."""
    keys = {"stopGrace": "300ms", "killGrace": "300ms"}
    forking = member("alpha", grandchild=True, grandchild_ignores_term=True, keys=keys)
    async with served_here(tmp_path, pool(forking, member("beta"))) as router:
        await router.answered("alpha")
        child = (await router.members.wait_for("grandchild"))["pid"]
        await router.answered("beta")
        assert not is_alive(child)


@pytest.mark.parametrize("shell", ["{server} & wait", "trap '' TERM; {server} & wait $!"])
async def test_a_shell_around_a_server_fools_nobody(tmp_path: Path, shell: str) -> None:
    wrapped = member("alpha", keys={"stopGrace": "300ms", "killGrace": "300ms"})
    server = " ".join(wrapped["command"])
    wrapped["command"] = ["/bin/sh", "-c", shell.format(server=server)]
    async with served_here(tmp_path, pool(wrapped, member("beta"))) as router:
        await router.answered("alpha")
        os.kill(router.members.events("start", "alpha")[0]["pid"], signal.SIGKILL)
        await router.wait_for(lambda v: v["resident"] != "alpha", "the loss is noticed")
        lost = await router.wait_for_log("resident_lost")
        assert lost["reason"] in ("exited", "port_closed")  # not by its silence
        await router.answered("beta")
        await router.act("load", "alpha")
        await router.answered("alpha")
        assert router.starts("alpha") == 2


async def test_an_engine_that_cannot_compute_can_be_replaced(tmp_path: Path) -> None:
    """Healthy by its probe, every answer an error, deaf to TERM: `unload` gets rid of it."""
    keys = {"stopGrace": "200ms", "killGrace": "200ms"}
    sick = member("alpha", ignore_term="inf", inference_status=500, keys=keys)
    async with served_here(tmp_path, pool(sick, member("beta"))) as router:
        answer = await router.chat("alpha")
        assert (answer.status, answer.json()["error"]["type"]) == (500, "scripted_error")
        first = router.members.events("start", "alpha")[0]["pid"]
        await router.act("unload")
        await router.wait_for(lambda v: v["state"] == "cold", "unloaded")
        assert not is_alive(first)
        assert (await router.chat("alpha")).status == 500
        assert router.starts("alpha") == 2


async def test_a_refused_connection_goes_back_to_the_hold(tmp_path: Path) -> None:
    """Believed ready, and gone when the request arrives: served by the next life, or told so."""
    async with served_here(tmp_path, pool(member("alpha"), member("beta"))) as router:
        await router.answered("alpha")
        pid = router.members.events("start", "alpha")[0]["pid"]
        os.kill(pid, signal.SIGKILL)
        answers = await all_of(*(router.chat("alpha") for _ in range(4)))
        allowed = {"member_failed", "member_backoff", "upstream_reset", ""}
        assert {answer.code for answer in answers} <= allowed
        assert all(answer.status in (200, 502, 503) for answer in answers)
        await router.answered("beta")


async def test_memory_that_comes_back_late_is_waited_for(tmp_path: Path) -> None:
    """With the gate the next load begins when the helper has let go, and succeeds."""
    late = member("alpha", lock_release_after=0.7)
    gate = {"command": free_memory(tmp_path / "gpu0.lock"), "interval": "50ms", "timeout": "10s"}
    async with served_here(tmp_path, pool(late, member("beta"), memorySettle=gate)) as router:
        await router.answered("alpha")
        answer = await router.answered("beta")
        assert answer.held_ms >= 600
        assert router.time_of("start", "beta") >= router.time_of("stopped", "alpha") + 0.6
        assert router.starts("beta") == 1


async def test_without_the_gate_it_is_one_failure_and_no_more(tmp_path: Path) -> None:
    late = member("alpha", lock_release_after=0.7)
    async with served_here(tmp_path, pool(late, member("beta"), restore=False)) as router:
        router.may_clash = True
        await router.answered("alpha")
        refused = await router.chat("beta")
        assert (refused.status, refused.code) == (503, "member_failed")
        assert "out of memory" in refused.message
        await router.until_lock_is_free()
        await router.act("load", "beta")
        await router.answered("beta")
        await router.answered("alpha")


def free_memory(lock: Path) -> list[str]:
    """Return a command that prints the free memory of an accelerator that *lock* stands for."""
    look = (
        "import fcntl, sys\n"
        "file = open(sys.argv[1], 'a')\n"
        "try:\n"
        "    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except BlockingIOError:\n"
        "    print(1000)\n"
        "else:\n"
        "    print(24000)\n"
    )
    return [sys.executable, "-S", "-E", "-c", look, str(lock)]


@pytest.mark.usefixtures("either_client")
async def test_a_client_of_a_dead_stream_is_not_left_hanging(tmp_path: Path) -> None:
    async with served_here(tmp_path, pool(member("alpha"), member("beta"))) as router:
        async with router.stream("alpha", x_chunks=100, x_gap_ms=20) as stream:
            await stream.tokens(2)
            os.kill(router.members.events("start", "alpha")[0]["pid"], signal.SIGKILL)
            try:
                async with asyncio.timeout(LIMIT_S):
                    await stream.rest()
            except aiohttp.ClientPayloadError:
                pytest.fail("a stream must end with an error event, not in the middle of nothing")
        assert stream.error is not None
        await router.answered("beta")
