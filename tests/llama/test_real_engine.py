"""Two real llama-servers take turns; what the fake member imitates is true of the real one."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from modelpool_router.core.events import Idleness
from modelpool_router.core.spec import MemberName
from realengine import Engine
from served import Stream, all_of, pool, served, served_here

pytestmark = pytest.mark.llama

LONG: dict[str, Any] = {"max_tokens": 16, "temperature": 0, "seed": 1}
PATIENCE_S = 180.0
"""A step of a real engine on a slow machine."""


def check(stream: Stream, name: str) -> None:
    """Insist on a whole stream of the member of that name."""
    assert (stream.status, stream.member) == (200, name)
    assert stream.error is None
    assert stream.is_complete
    assert stream.texts


async def test_swaps_under_streaming_traffic_cut_no_stream(tmp_path: Path, engine: Engine) -> None:
    """Clients of both members at once, each in a loop: every stream ends as it should."""
    members = (engine.member("first"), engine.member("second"))
    rules = {"maxTurn": "2s", "swapBudget": "170s"}
    async with served(tmp_path, pool(*members, **rules)) as router, asyncio.timeout(PATIENCE_S):

        async def client(name: str) -> None:
            for _ in range(3):
                check(await router.whole_stream(name, **LONG), name)

        await all_of(*(client(name) for name in ("first", "second") for _ in range(2)))
        swaps = await router.swaps()
        assert {swap["outcome"] for swap in swaps} == {"completed"}
        assert {swap["target"] for swap in swaps} == {"first", "second"}
        lines = router.log_lines("request")
        assert all(line["outcome"] == "served" for line in lines), "no 503 was relayed"


async def test_back_to_back_streams_of_one_client(tmp_path: Path, engine: Engine) -> None:
    """llama-server drops connections after a stream without a word; no client may notice."""
    async with served_here(tmp_path, pool(engine.member("first"))) as router:
        options: dict[str, Any] = {"base_url": router.url + "/v1", "api_key": "x"}
        async with openai.AsyncOpenAI(**options, max_retries=0) as client, asyncio.timeout(170):
            for number in range(30):
                stream = await client.chat.completions.create(
                    model="first",
                    messages=[{"role": "user", "content": f"Say {number}."}],
                    stream=number % 3 != 2,
                    max_tokens=6,
                    temperature=0,
                )
                if isinstance(stream, openai.AsyncStream):
                    finished = [
                        choice.finish_reason async for chunk in stream for choice in chunk.choices
                    ]
                    assert finished[-1] in ("stop", "length")
                else:
                    assert stream.choices[0].finish_reason in ("stop", "length")
        await router.wait_for_log("request", count=30)
        assert {line["outcome"] for line in router.log_lines("request")} == {"served"}


async def test_its_own_slots_tell_whether_it_is_idle(tmp_path: Path, engine: Engine) -> None:
    """Work that did not come through the router is seen, and not cut off by a swap."""
    members = (engine.member("first"), engine.member("second"))
    async with served_here(tmp_path, pool(*members, swapBudget="170s")) as router:
        check(await router.whole_stream("first", **LONG), "first")
        driver = router.runtime().driver
        assert (await router.pool())["member"]["first"]["parallel"] == 2, "as it reports itself"
        assert await driver.idle(MemberName("first")) is Idleness.IDLE
        endpoint = router.runtime().endpoints[MemberName("first")]
        url = f"http://{endpoint.host}:{endpoint.port}/completion"
        words = {"prompt": "Count:", "n_predict": 100, "ignore_eos": True, "stream": True}
        async with router.session.post(url, json=words) as response:
            await response.content.readline()
            assert await driver.idle(MemberName("first")) is Idleness.BUSY
            waiting = router.begin(router.whole_stream("second", max_tokens=4))
            deferred = await router.wait_for(lambda v: v["deferred_reason"] != "", "deferred")
            assert deferred["deferred_reason"] == "PodsBusy"
            body = await response.read()
            assert b'"stop":true' in body, "it was not cut off"
        check(await asyncio.wait_for(waiting, PATIENCE_S), "second")


async def test_it_stops_and_is_gone(tmp_path: Path, engine: Engine) -> None:
    """Idle, at the first signal; busy with a stranger's work, within the stop sequence."""
    async with aiohttp.ClientSession() as stranger:
        async with served_here(tmp_path, pool(engine.member("first"))) as router:
            check(await router.whole_stream("first", max_tokens=4), "first")
            began = time.monotonic()
            assert await router.act("unload") == 202
            await router.wait_for(lambda v: v["state"] == "cold", "it is gone")
            assert time.monotonic() - began < 10.0
            check(await router.whole_stream("first", max_tokens=4), "first")
            endpoint = router.runtime().endpoints[MemberName("first")]
            url = f"http://{endpoint.host}:{endpoint.port}/completion"
            words = {"prompt": "Count:", "n_predict": 2000, "ignore_eos": True, "stream": True}
            response = await stranger.post(url, json=words)
            await response.content.readline()
            began = time.monotonic()
        # the router went down, and looked whether a process was left
        assert time.monotonic() - began < 30.0
        response.close()


async def test_a_crowd_on_a_cold_pool_never_sees_it_load(tmp_path: Path, engine: Engine) -> None:
    """Its port is open and answers 503 "Loading model" long before it can serve."""
    async with served_here(tmp_path, pool(engine.member("first"), swapBudget="170s")) as router:
        answers = await all_of(*(router.chat("first", max_tokens=3) for _ in range(8)))
        assert [answer.status for answer in answers] == [200] * 8
        assert all(answer.json()["choices"][0]["message"]["content"] for answer in answers)


async def test_a_model_that_is_not_there_is_told_with_its_words(
    tmp_path: Path, engine: Engine
) -> None:
    missing = str(tmp_path / "missing.gguf")
    members = (engine.member("broken", model=missing), engine.member("first"))
    async with served_here(tmp_path, pool(*members, swapBudget="170s")) as router:
        refused = await router.chat("broken")
        assert (refused.status, refused.code) == (503, "member_failed")
        assert "exit code 1" in refused.message
        assert "missing.gguf" in refused.message
        again = await router.chat("broken")
        assert (again.status, again.code) == (503, "member_backoff")
        check(await router.whole_stream("first", max_tokens=4), "first")
