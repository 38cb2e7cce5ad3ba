"""The configuration changes under traffic: what is untouched does not notice."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from modelpool_router.app.router import Router
from modelpool_router.app.serving import _stamp, reload_once
from modelpool_router.drivers.statedir import lock_pool
from modelpool_router.settings import Changes, Settings, load
from modelpool_router.telemetry import configure_logs
from served import Served, all_of, member, pool, served, served_here, write_config


def set_knob(router: Served, name: str, knob: str, value: object) -> None:
    """Change the command of a member."""
    router.member_config(name)["command"] += [f"--{knob}", str(value)]


@pytest.mark.usefixtures("either_client")
async def test_reload_by_signal_under_traffic(tmp_path: Path) -> None:
    members = (member("alpha"), member("beta", chunks=8), member("gamma"))
    async with served(tmp_path, pool(*members), reloadPoll="off") as router:
        async with router.stream("alpha", x_chunks=80, x_gap_ms=20) as stream:
            await stream.tokens(2)
            beta, gamma = router.begin(router.answered("beta")), router.begin(router.chat("gamma"))
            await router.wait_for(lambda v: v["held"] == 2, "both held")
            set_knob(router, "beta", "chunks", 3)
            del router.config["pools"][0]["members"][2]
            write_config(router.config_path, router.config)
            router.signal(signal.SIGHUP)
            refused = await gamma
            assert (refused.status, refused.code) == (404, "model_not_found")
            assert (await router.wait_for_log("configuration reloaded"))["changed"] is True
            assert not stream.is_complete
            await stream.rest()
        assert (len(stream.texts), stream.is_complete) == (80, True)
        text = (await beta).json()["choices"][0]["message"]["content"]
        assert len(text.split()) == 3
        assert (router.starts("alpha"), router.starts("beta")) == (1, 1)
        assert (await router.chat("gamma")).code == "model_not_found"


async def test_a_bad_file_is_refused_and_the_old_one_stays(tmp_path: Path) -> None:
    async with served(tmp_path, pool(member("alpha"), member("beta")), reloadPoll="50ms") as router:
        router.allowed_levels.add("error")
        async with router.stream("alpha", x_chunks=60, x_gap_ms=20) as stream:
            await stream.tokens(1)
            good = router.config_path.read_text(encoding="utf-8")
            bad = good.replace("swapBudget:", "swapBugdet:")
            router.config_path.write_text(bad, encoding="utf-8")
            refusal = await router.wait_for_log("configuration refused, the old one stays")
            line = 1 + bad.split("\n").index("  swapBugdet: 20s")
            assert f"pool.yaml:{line}:" in refusal["problem"]
            assert "swapBugdet" in refusal["problem"]
            assert "swapBudget" in refusal["problem"].replace("swapBugdet", "")
            await stream.rest()
        assert stream.is_complete
        assert (await router.pool())["swap_budget_s"] == 20
        # put right, it is taken without a signal
        router.config_path.write_text(good.replace("20s", "25s"), encoding="utf-8")
        await router.wait_for(lambda v: v["swap_budget_s"] == 25, "the good file is in force")
        assert router.starts("alpha") == 1


async def test_five_quick_edits_start_nothing_twice(tmp_path: Path) -> None:
    rules = {"default": "alpha"}
    members = (member("alpha", load=0.3), member("beta"))
    async with served(tmp_path, pool(*members, **rules), reloadPoll="20ms") as router:
        for edit in range(1, 6):
            router.config["pools"][0]["swapBudget"] = f"{20 + edit}s"
            write_config(router.config_path, router.config)
            router.signal(signal.SIGHUP)
        await router.wait_for(lambda v: v["swap_budget_s"] == 25, "the last edit is in force")
        await router.until_resident("alpha")
        await router.answered("alpha")
        assert router.starts("alpha") == 1


async def test_a_changed_command_counts_from_the_next_load(tmp_path: Path) -> None:
    async with served_here(tmp_path, pool(member("alpha", chunks=8), member("beta"))) as router:
        await router.answered("alpha")
        set_knob(router, "alpha", "chunks", 2)
        assert await router.reload()
        old = (await router.answered("alpha")).json()
        assert len(old["choices"][0]["message"]["content"].split()) == 8
        assert router.starts("alpha") == 1
        await router.answered("beta")
        new = (await router.answered("alpha")).json()
        assert len(new["choices"][0]["message"]["content"].split()) == 2


async def test_a_removed_resident_ends_its_stream_and_goes(tmp_path: Path) -> None:
    async with served_here(tmp_path, pool(member("alpha"), member("beta"))) as router:
        async with router.stream("alpha", x_chunks=30, x_gap_ms=20) as stream:
            await stream.tokens(1)
            del router.config["pools"][0]["members"][0]
            assert await router.reload()
            assert (await router.chat("alpha")).status == 404
            await stream.rest()
        assert (len(stream.texts), stream.is_complete) == (30, True)
        await router.wait_for(lambda v: v["state"] == "cold", "alpha is unloaded")
        await router.answered("beta")


async def test_members_and_pools_come_and_go(tmp_path: Path) -> None:
    async with served_here(tmp_path, pool(member("alpha"))) as router:
        async with router.stream("alpha", x_chunks=60, x_gap_ms=20) as stream:
            await stream.tokens(1)
            router.config["pools"][0]["members"].append(member("beta"))
            router.config["pools"].append(pool(member("gamma"), name="gpu1"))
            router.rewire()
            assert await router.reload()
            gamma = await router.answered("gamma")  # another slot: no need to wait for alpha
            assert gamma.status == 200
            assert not stream.is_complete
            held = router.begin(router.answered("beta"))
            await router.until_held("beta")
            del router.config["pools"][1]
            assert await router.reload()
            assert (await router.chat("gamma")).status == 404
            await stream.rest()
        assert stream.is_complete
        await held
        await router.members.wait_for("stopped", "gamma")


async def test_what_needs_a_restart_is_said(tmp_path: Path) -> None:
    async with served_here(tmp_path, pool(member("alpha"))) as router:
        before = router.url
        router.config["listen"] = "127.0.0.1:1"
        router.config["pools"][0]["swapBudget"] = "21s"
        assert await router.reload()
        assert (await router.pool())["swap_budget_s"] == 21
        told = await router.wait_for_log("needs a restart, the old value stays")
        assert "listen" in told["problem"]
        assert router.url == before
        answers = await all_of(router.chat("alpha"), router.chat("alpha"))
        assert [answer.status for answer in answers] == [200, 200]


async def test_model_pools_that_change_during_a_reload_bring_no_old_settings_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, may_go_on = asyncio.Event(), asyncio.Event()

    async def reach_slowly(self: Router, settings: Settings) -> None:
        reached.set()
        await may_go_on.wait()

    async with served_here(tmp_path, pool(member("alpha"))) as router:
        monkeypatch.setattr(Router, "_reach_cluster", reach_slowly)
        router.config["connectTimeout"] = "7s"
        reload = router.begin(router.reload())
        await reached.wait()
        followed = router.begin(router.router._follow_model_pools())
        await asyncio.sleep(0)
        may_go_on.set()

        assert await reload
        await followed
        assert router.router.settings.connect_timeout_s == 7


async def test_every_setting_that_may_change_does(tmp_path: Path) -> None:
    """Those that are kept in long-lived parts: log level, connect time-out, health interval."""
    rules = {"healthInterval": "10m", "hungAfter": "1h"}
    async with served_here(tmp_path, pool(member("alpha"), **rules)) as router:
        await router.answered("alpha")
        router.config["connectTimeout"] = "7s"
        router.config["logLevel"] = "debug"
        router.config["pools"][0]["healthInterval"] = "50ms"
        assert await router.reload()
        assert router.router._client.limits.connect_timeout_s == 7
        assert router.runtime().health_interval_s == 0.05
        await router.act("unload")
        line = await router.wait_for_log("state_changed")  # told at debug only
        assert line["level"] == "debug"


@pytest.mark.parametrize("holder", ["keys", "adminToken", "upstreams"])
async def test_a_secret_that_changes_is_read_again(tmp_path: Path, holder: str) -> None:
    """Keys are changed by writing their file; nobody should have to think of a signal."""
    secret = tmp_path / "secret"
    secret.write_text("sk-first-key\n", encoding="utf-8")
    config: dict[str, Any] = {"pools": [pool(member("alpha"))]}
    place: dict[str, Any] = {"file": "secret"}
    if holder == "upstreams":
        config["upstreams"] = [{"name": "far", "url": "http://127.0.0.1:9", "apiKey": place}]
    else:
        config[holder] = place
    write_config(tmp_path / "pool.yaml", config)
    settings = load(tmp_path / "pool.yaml")
    before = _stamp(settings)
    secret.write_text("sk-the-second-key\n", encoding="utf-8")
    assert _stamp(settings) != before


async def test_a_reload_that_goes_wrong_is_not_the_last_one(tmp_path: Path) -> None:
    """It says so and returns, for the task that calls it has other files to read."""

    class Broken(Router):
        async def reload(self, new: Settings) -> Changes:
            raise ZeroDivisionError

    file = tmp_path / "pool.yaml"
    write_config(file, {"pools": [pool(member("alpha"))]})

    with (tmp_path / "log").open("w", encoding="utf-8") as stream:
        logs = configure_logs("info", "json", stream=stream)
        try:
            assert not await reload_once(Broken(load(file), logs))
        finally:
            logs.close()
    assert "internal error" in (tmp_path / "log").read_text("utf-8")


async def test_a_pool_that_another_router_runs_refuses_the_whole_reload(tmp_path: Path) -> None:
    async with served_here(tmp_path, pool(member("alpha"))) as router:
        await router.answered("alpha")
        lock = lock_pool(router.state_dir, "gpu2")
        try:
            router.allowed_levels.add("error")
            router.config["pools"][0]["swapBudget"] = "21s"
            router.config["pools"] += [
                pool(member("beta"), name="gpu1"),
                pool(member("gamma"), name="gpu2"),
            ]
            router.rewire()
            assert not await router.reload()
            refusal = await router.wait_for_log("configuration refused, the old one stays")
            assert "gpu2" in refusal["problem"]
            state = await router.state()
            assert [view["name"] for view in state["pools"]] == ["gpu0"]
            assert (await router.pool())["swap_budget_s"] == 20
            assert router.router.settings.pool("gpu0").swap_budget_s == 20
            assert (await router.chat("beta")).status == 404
        finally:
            lock.release()
        assert await router.reload()
        assert (await router.wait_for_log("configuration reloaded"))["changed"] is True
        await all_of(router.answered("beta"), router.answered("gamma"), router.answered("alpha"))
