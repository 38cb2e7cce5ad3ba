"""The official anthropic SDK is served as by its own service: messages, streams, errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import MessageParam, TextBlock

from served import CANARY, Served, member, pool, served, served_here

KEY = f"sk-ant-{CANARY}"
WORDS: list[MessageParam] = [{"role": "user", "content": f"prompt {CANARY}"}]
TO_ALPHA: dict[str, Any] = {"model": "alpha", "max_tokens": 16, "messages": WORDS}


@asynccontextmanager
async def sdk(router: Served, **options: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Return a client of *router*; without retries unless *options* say so."""
    settled = {"base_url": router.url, "api_key": KEY, "max_retries": 0, **options}
    async with anthropic.AsyncAnthropic(**settled) as client:
        yield client


def text_of(message: anthropic.types.Message) -> str:
    """Return what a message says."""
    return "".join(block.text for block in message.content if isinstance(block, TextBlock))


def used_synchronously(url: str) -> dict[str, Any]:
    """Do with the blocking client what a script does; return what it got."""
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as client:
        whole = client.messages.create(**TO_ALPHA)
        with client.messages.stream(**{**TO_ALPHA, "model": "beta"}) as stream:
            streamed = "".join(stream.text_stream)
        return {"id": whole._request_id, "whole": text_of(whole), "streamed": streamed}


async def test_messages_and_streams_of_the_program(tmp_path: Path) -> None:
    members = (
        member("alpha", load=0.1, chunks=3, keys={"models": ["claude-local"]}),
        member("beta", load=0.1, chunks=3),
    )
    async with served(tmp_path, pool(*members)) as router, sdk(router) as client:
        got = await asyncio.to_thread(used_synchronously, router.url)
        assert (got["whole"], got["streamed"]) == ("alpha: I hold", "beta: I hold")
        assert (await router.wait_for_request(got["id"]))["member"] == "alpha"

        message = await client.messages.create(**{**TO_ALPHA, "model": "claude-local"})
        assert (message.stop_reason, text_of(message)) == ("end_turn", "alpha: I hold")
        events = []
        async for event in await client.messages.create(**TO_ALPHA, stream=True):
            events.append(event.type)
        assert (events[0], events[-1]) == ("message_start", "message_stop")
        async with client.messages.stream(**TO_ALPHA) as stream:
            final = await stream.get_final_message()
        assert (text_of(final), final.usage.output_tokens) == ("alpha: I hold", 3)
        count = await client.messages.count_tokens(model="alpha", messages=WORDS)
        assert count.input_tokens == 7


async def test_errors_have_the_classes_that_programs_catch(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"me: {KEY}\n", encoding="utf-8")
    keys = {"file": str(tmp_path / "keys")}
    slow = member("alpha", load=0.8, keys={"expectedLoad": "1s"})
    async with served_here(tmp_path, pool(slow, swapBudget="200ms"), keys=keys) as router:
        async with sdk(router, max_retries=3) as client:
            with pytest.raises(anthropic.NotFoundError) as missing:
                await client.messages.create(**{**TO_ALPHA, "model": "nope"})
            assert missing.value.type == "not_found_error"
            body = missing.value.body
            assert isinstance(body, dict) and body["type"] == "error"
            assert body["request_id"] == missing.value.request_id
            assert body["error"]["code"] == "model_not_found"
            with pytest.raises(anthropic.BadRequestError) as bad:
                await client.messages.create(**TO_ALPHA, extra_body={"stream": "yes"})
            assert bad.value.type == "invalid_request_error"
            async with sdk(router, api_key="sk-wrong", max_retries=3) as stranger:
                with pytest.raises(anthropic.AuthenticationError) as refused:
                    await stranger.messages.create(**TO_ALPHA)
            assert refused.value.type == "authentication_error"
            assert await router.metric("modelpool_requests_total") == 3
            async with sdk(router) as hasty:
                with pytest.raises(anthropic.APIStatusError) as early:
                    await hasty.messages.create(**TO_ALPHA)
            assert (early.value.status_code, early.value.type) == (503, "overloaded_error")
            assert 1 <= int(early.value.response.headers["retry-after"]) <= 60
            raw = await client.messages.with_raw_response.create(**TO_ALPHA)
            assert text_of(await raw.parse()).startswith("alpha:")
        assert router.starts("alpha") == 1


@pytest.mark.usefixtures("answers_early")
async def test_a_hold_ends_before_the_client_gives_up(tmp_path: Path) -> None:
    slow = member("alpha", load=4.0, keys={"expectedLoad": "2s"})
    async with served_here(tmp_path, pool(slow)) as router, sdk(router, timeout=18.0) as client:
        with pytest.raises(anthropic.APIStatusError) as refused:
            await client.messages.create(**TO_ALPHA)
        assert refused.value.status_code == 503
        line = await router.wait_for_log("request")
        assert line["held_ms"] >= 1750


async def test_a_broken_stream_raises_what_was_wrong(tmp_path: Path) -> None:
    async with served_here(tmp_path, pool(member("alpha"))) as router, sdk(router) as client:
        seen = []
        with pytest.raises(anthropic.APIStatusError) as broken:
            stream = await client.messages.create(
                **TO_ALPHA, stream=True, extra_body={"x_drop_after": 2}
            )
            async for event in stream:
                seen.append(event.type)
        assert seen.count("content_block_delta") == 2
        body = broken.value.body
        assert isinstance(body, dict)
        assert body["error"]["type"] == "api_error"
        assert body["error"]["code"] == "upstream_reset"
        assert body["request_id"] == broken.value.request_id
        line = await router.wait_for_log("request")
        assert (line["outcome"], line["code"]) == ("upstream_error", "upstream_reset")


@pytest.mark.parametrize("ending", ["served", "refused"])
async def test_pings_keep_the_client_until_its_turn(tmp_path: Path, ending: str) -> None:
    """Held longer than its read time-out, it sees pings, and then the answer or the refusal."""
    settings = {
        "holdKeepalive": "comment",
        "holdKeepaliveAfter": "200ms",
        "holdKeepaliveInterval": "200ms",
    }
    slow = member("alpha", load=3.2, chunks=3)
    budget = "20s" if ending == "served" else "2800ms"
    async with served_here(tmp_path, pool(slow, swapBudget=budget), **settings) as router:
        async with sdk(router, timeout=2.5) as client:
            stream = await client.messages.create(**TO_ALPHA, stream=True)
            if ending == "served":
                events = [event async for event in stream]
                assert (events[0].type, events[-1].type) == ("message_start", "message_stop")
            else:
                with pytest.raises(anthropic.APIStatusError) as refused:
                    async for event in stream:
                        raise AssertionError(event)
                body = refused.value.body
                assert isinstance(body, dict)
                assert body["error"]["code"] == "swap_budget_exceeded"
        line = await router.wait_for_log("request")
        assert line["held_ms"] > 2500
