"""A member that does not come up: its waiters are told why, the others go on being served."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fakemembers import is_alive, until
from served import all_of, member, pool, served_here


async def test_an_exit_at_the_start_is_told_with_the_last_words(tmp_path: Path) -> None:
    broken = member("alpha", exit_at_start=7, exit_message="error: no such file: big.gguf")
    async with served_here(tmp_path, pool(broken, member("beta"))) as router:
        await router.answered("beta")
        refused = await all_of(*(router.chat("alpha") for _ in range(3)))
        assert [(each.status, each.code) for each in refused] == [(503, "member_failed")] * 3
        assert "exit code 7" in refused[0].message
        assert "no such file: big.gguf" in refused[0].message
        assert 1 <= refused[0].retry_after_s <= 60
        # the last good resident is brought back, and serves
        assert (await router.answered("beta")).status == 200
        again = await router.chat("alpha")
        assert (again.status, again.code) == (503, "member_backoff")
        assert again.retry_after_s >= 3
        assert again.message.count("again in") == 1
        assert router.starts("alpha") == 1
        assert (await router.pool())["resident"] == "beta"
        assert "big.gguf" in (await router.pool())["member"]["alpha"]["last_error"]
        assert await router.metric("modelpool_load_failures_total", member="alpha") == 1


async def test_a_failed_load_hands_the_slot_to_who_waits(tmp_path: Path) -> None:
    broken = member("alpha", exit_while_loading=0.3)
    async with served_here(tmp_path, pool(broken, member("beta"))) as router:
        refused = router.begin(router.chat("alpha"))
        await router.until_held("alpha")
        served = await router.answered("beta")
        assert (await refused).code == "member_failed"
        assert served.held_ms >= 200
        assert (router.starts("alpha"), router.starts("beta")) == (1, 1)


async def test_a_load_that_takes_too_long_is_ended_and_may_be_tried_again(tmp_path: Path) -> None:
    members = (member("alpha", load=0.05, load_first=60), member("beta"))
    async with served_here(tmp_path, pool(*members, loadTimeout="3s")) as router:
        refused = await router.chat("alpha")
        assert (refused.status, refused.code) == (503, "member_failed")
        assert "not ready after 3 s" in refused.message
        assert "load_tensors" in refused.message  # the last line of its log
        assert refused.took_s >= 3.0
        pid = router.members.events("start", "alpha")[0]["pid"]
        await until(lambda: not is_alive(pid), "the slow process is gone")
        await router.answered("beta")
        # back-off ends by time or by a person; never a state that only a restart leaves
        assert (await router.chat("alpha")).code == "member_backoff"
        await router.act("load", "alpha")
        assert (await router.answered("alpha")).status == 200
        assert router.starts("alpha") == 2


async def test_a_member_that_never_becomes_ready(tmp_path: Path) -> None:
    members = (member("alpha", never_ready=True), member("beta"))
    async with served_here(tmp_path, pool(*members, loadTimeout="3s")) as router:
        await router.answered("beta")
        refused, served = await all_of(router.chat("alpha"), router.chat("beta"))
        assert (refused.code, served.status) == ("member_failed", 200)
        await router.answered("beta")


async def test_a_command_that_vanished_is_told_and_not_tried_again(tmp_path: Path) -> None:
    program = tmp_path / "engine"
    program.symlink_to(sys.executable)
    lost = member("alpha")
    lost["command"][0] = str(program)
    async with served_here(tmp_path, pool(lost, member("beta"))) as router:
        program.unlink()
        refused = await router.chat("alpha")
        assert (refused.status, refused.code) == (503, "member_failed")
        assert refused.headers["x-should-retry"] == "false"
        assert str(program) in refused.message
        await router.answered("beta")


@pytest.mark.parametrize(
    "knobs", [{"late_port": True}, {"models_early": True}], ids=["late", "lying"]
)
async def test_an_open_port_is_not_readiness(tmp_path: Path, knobs: dict[str, Any]) -> None:
    """While it loads the fake answers 503 "Loading model" to everything; no client may see it."""
    slow = member("alpha", load=0.5, **knobs)
    async with served_here(tmp_path, pool(slow, member("beta"))) as router:
        answer = await router.answered("alpha")
        assert answer.held_ms >= 450
        assert router.time_of("ready", "alpha") <= answer.ended_s


async def test_a_readiness_path_that_lies_does_not_reach_the_client(tmp_path: Path) -> None:
    """Ready by its path, and still "Loading model" to the request itself: held again."""
    keys = {"profile": "generic", "readinessPath": "/v1/models"}
    slow = member("alpha", load=0.6, models_early=True, keys=keys)
    async with served_here(tmp_path, pool(slow, member("beta"))) as router:
        answers = await all_of(*(router.chat("alpha") for _ in range(3)))
        assert [answer.status for answer in answers] == [200] * 3
        assert router.time_of("ready", "alpha") <= min(answer.ended_s for answer in answers)
        assert router.starts("alpha") == 1
