"""The official openai SDK is served as by its own service: answers, streams, errors, retries."""

from __future__ import annotations

import asyncio
import io
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from served import CANARY, Json, Served, all_of, member, pool, served, served_here

WORDS: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": f"prompt {CANARY}"}]
KEY = f"sk-{CANARY}"
LIMIT_S = 20.0


@asynccontextmanager
async def sdk(router: Served, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    """Return a client of *router*; without retries unless *options* say so."""
    settled = {"base_url": router.url + "/v1", "api_key": KEY, "max_retries": 0, **options}
    async with openai.AsyncOpenAI(**settled) as client:
        yield client


async def text_of(stream: openai.AsyncStream[Any]) -> str:
    """Read a chat stream to its end; return what it said."""
    text = ""
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
    return text


def keyed(folder: Path, lines: str) -> Json:
    """Write a file of keys; return the setting that names it."""
    (folder / "keys").write_text(lines, encoding="utf-8")
    return {"file": str(folder / "keys")}


async def attempts(router: Served, count: int) -> list[Json]:
    """Return the log lines of the requests so far, of which there must be *count*."""
    assert await router.metric("modelpool_requests_total") == count
    await router.wait_for_log("request", count=count)
    return router.log_lines("request")


def used_synchronously(url: str) -> dict[str, Any]:
    """Do with the blocking client what a script does; return what it got."""
    with openai.OpenAI(base_url=url + "/v1", api_key=KEY, max_retries=0) as client:
        whole = client.chat.completions.create(model="alpha", messages=WORDS)
        stream = client.chat.completions.create(model="beta", messages=WORDS, stream=True)
        pieces = [choice.delta.content for chunk in stream for choice in chunk.choices]
        legacy = client.completions.create(model="beta", prompt="x", stream=True)
        return {
            "id": whole._request_id,
            "whole": whole.choices[0].message.content,
            "streamed": "".join(piece or "" for piece in pieces),
            "legacy": "".join(choice.text for chunk in legacy for choice in chunk.choices),
        }


async def test_answers_and_streams_of_the_program(tmp_path: Path) -> None:
    """Everything a program asks for in a day, with a swap in between."""
    members = (
        member("alpha", load=0.1, chunks=3, keys={"models": ["gpt-4o-mini", "lab/alpha:q4"]}),
        member("beta", load=0.1, chunks=3),
    )
    async with served(tmp_path, pool(*members)) as router, sdk(router) as client:
        got = await asyncio.to_thread(used_synchronously, router.url)
        assert got["whole"] == "alpha: I hold"
        assert got["streamed"] == got["legacy"] == "beta: I hold"
        assert (await router.wait_for_request(got["id"]))["member"] == "alpha"

        chat = await client.chat.completions.create(model="gpt-4o-mini", messages=WORDS)
        assert (chat.model, chat.choices[0].message.content) == ("gpt-4o-mini", "alpha: I hold")
        assert chat.usage is not None and chat.usage.total_tokens == 10
        stream = await client.chat.completions.create(
            model="alpha", messages=WORDS, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 3
        said = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
        assert "".join(said) == "alpha: I hold"

        answer = await client.responses.create(model="alpha", input="x")
        assert answer.output_text == "alpha: I hold"
        async with client.responses.stream(model="alpha", input="x") as events:
            kinds = [event.type async for event in events]
            final = await events.get_final_response()
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
        assert final.output_text == "alpha: I hold"

        vectors = await client.embeddings.create(model="alpha", input=["a", "b"])
        assert [each.embedding for each in vectors.data] == [[0.25, 0.5, -0.5, 1.0]] * 2
        assert router.starts("alpha") + router.starts("beta") == 3

        listed = {each.id: each async for each in client.models.list()}
        assert listed.keys() == {"alpha", "gpt-4o-mini", "lab/alpha:q4", "beta"}
        assert listed["alpha"].model_extra is not None
        assert listed["alpha"].model_extra["status"] == "loaded"
        one = await client.models.retrieve("lab/alpha:q4")
        assert (one.id, one.object) == ("lab/alpha:q4", "model")


async def test_uploads_are_routed_by_the_model_in_the_form(tmp_path: Path) -> None:
    members = (member("ears", chunks=2), member("eyes", chunks=2))
    async with served_here(tmp_path, pool(*members)) as router, sdk(router) as client:
        sound = ("a.wav", io.BytesIO(b"RIFF" + bytes(50_000)), "audio/wav")
        heard = await client.audio.transcriptions.create(model="ears", file=sound)
        assert heard.text == "ears: I"
        picture = ("a.png", io.BytesIO(b"\x89PNG" + bytes(2_000_000)), "image/png")
        edited = await client.images.edit(model="eyes", image=picture, prompt="x")
        assert edited.data is not None and edited.data[0].b64_json
        speech = await client.audio.speech.create(model="ears", voice="alloy", input="x")
        assert await speech.aread() == b"ears: I"
        drawn = await client.images.generate(model="eyes", prompt="x")
        assert drawn.data is not None and len(drawn.data) == 1
        assert (router.starts("ears"), router.starts("eyes")) == (2, 2)


async def test_errors_have_the_classes_that_programs_catch(tmp_path: Path) -> None:
    keys = keyed(tmp_path, f"- {{name: me, key: {KEY}, models: [alpha]}}\n")
    slow = member("alpha", load=0.5)
    settings: Json = {"keys": keys, "maxHeldPerKey": 1}
    # The SDK would try some of these again by itself: `max_retries` shows that it is told not to.
    async with served_here(tmp_path, pool(slow, member("beta")), **settings) as router:
        async with sdk(router, max_retries=3) as client:
            chat = client.chat.completions
            for number, unknown in enumerate(("nope", "beta"), 1):
                with pytest.raises(openai.NotFoundError) as missing:
                    await chat.create(model=unknown, messages=WORDS)
                assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
                assert "alpha" in missing.value.message and "beta, " not in missing.value.message
                line = (await attempts(router, number))[-1]
                assert missing.value.request_id == line["request_id"]
            with pytest.raises(openai.BadRequestError) as bad:
                await chat.create(model="alpha", messages=WORDS, extra_body={"stream": "yes"})
            assert (bad.value.code, bad.value.param) == ("invalid_type", "stream")
            with pytest.raises(openai.NotFoundError) as no_url:
                await client.fine_tuning.jobs.create(model="alpha", training_file="x")
            assert no_url.value.code == "unknown_url"
            async with sdk(router, api_key="sk-wrong", max_retries=3) as stranger:
                with pytest.raises(openai.AuthenticationError) as refused:
                    await stranger.chat.completions.create(model="alpha", messages=WORDS)
            assert refused.value.code == "invalid_api_key"
            await attempts(router, 5)
        async with sdk(router) as client:
            first = router.begin(
                client.chat.completions.create(model="alpha", messages=WORDS, timeout=LIMIT_S)
            )
            await router.until_held("alpha")
            with pytest.raises(openai.RateLimitError) as busy:
                await client.chat.completions.create(model="alpha", messages=WORDS)
            assert busy.value.code == "rate_limit_exceeded"
            assert int(busy.value.response.headers["retry-after"]) >= 1
            assert (await first).choices[0].finish_reason == "stop"


async def test_errors_of_the_member_pass_unchanged(tmp_path: Path) -> None:
    async with served_here(tmp_path, pool(member("alpha"))) as router, sdk(router) as client:
        with pytest.raises(openai.UnprocessableEntityError) as odd:
            await client.chat.completions.create(
                model="alpha", messages=WORDS, extra_body={"x_status": 422}
            )
        assert odd.value.body == {"message": "scripted", "type": "scripted_error", "code": 422}
        with pytest.raises(openai.InternalServerError) as crashed:
            await client.chat.completions.create(
                model="alpha", messages=WORDS, extra_body={"x_crash": True}
            )
        assert (crashed.value.status_code, crashed.value.code) == (502, "upstream_reset")


async def test_a_refused_hold_is_a_503_with_a_time_to_come_back(tmp_path: Path) -> None:
    slow = member("alpha", load=1.0, keys={"expectedLoad": "1s"})
    async with served_here(tmp_path, pool(slow, swapBudget="200ms")) as router:
        async with sdk(router) as client:
            with pytest.raises(openai.APIStatusError) as refused:
                await client.chat.completions.create(model="alpha", messages=WORDS)
            error = refused.value
            assert (error.status_code, error.code) == (503, "swap_budget_exceeded")
            assert 1 <= int(error.response.headers["retry-after"]) <= 60
            assert int(error.response.headers["retry-after-ms"]) >= 1000
            assert "x-should-retry" not in error.response.headers
            assert error.request_id == (await attempts(router, 1))[0]["request_id"]
        # The SDK comes back when it was told to, and finds the load that went on.
        async with sdk(router, max_retries=4) as client:
            raw = await client.chat.completions.with_raw_response.create(
                model="alpha", messages=WORDS
            )
            assert raw.parse().choices[0].message.content is not None
            assert raw.retries_taken >= 1
            assert raw.headers["x-modelpool-member"] == "alpha"
        assert router.starts("alpha") == 1
        lines = await attempts(router, raw.retries_taken + 2)
        assert lines[-1]["outcome"] == "served"


@pytest.mark.usefixtures("answers_early")
async def test_a_hold_ends_before_the_client_gives_up(tmp_path: Path) -> None:
    """The SDK announces its read time-out, and is answered before it; the load takes longer."""
    slow = member("alpha", load=4.0, keys={"expectedLoad": "2s"})
    async with served_here(tmp_path, pool(slow)) as router, sdk(router, timeout=18.0) as client:
        with pytest.raises(openai.APIStatusError) as refused:
            await client.chat.completions.create(model="alpha", messages=WORDS)
        assert (refused.value.status_code, refused.value.code) == (503, "swap_budget_exceeded")
        assert (await attempts(router, 1))[0]["held_ms"] >= 1750
        await router.until_resident("alpha")
        answer = await client.chat.completions.create(model="alpha", messages=WORDS)
        assert answer.choices[0].finish_reason == "stop"
        assert router.starts("alpha") == 1


async def test_what_cannot_get_better_is_not_tried_again(tmp_path: Path) -> None:
    """A 503 is tried again by the SDK unless the answer says that it is no use."""
    home = tmp_path / "home"
    home.mkdir()
    broken = member("alpha", keys={"workingDirectory": str(home)})
    async with served_here(tmp_path, pool(broken, member("beta"))) as router:
        shutil.rmtree(home)
        async with sdk(router, max_retries=3) as client:
            with pytest.raises(openai.InternalServerError) as failed:
                await client.chat.completions.create(model="alpha", messages=WORDS)
            assert (failed.value.status_code, failed.value.code) == (503, "member_failed")
            assert failed.value.response.headers["x-should-retry"] == "false"
            assert "workingDirectory" in failed.value.message
            await attempts(router, 1)
            answer = await client.chat.completions.create(model="beta", messages=WORDS)
            assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("how", "kinds"),
    [("x_drop_after", ["chat", "completions", "responses"]), ("x_die_after", ["chat"])],
)
async def test_a_broken_stream_is_an_error_and_never_a_short_answer(
    tmp_path: Path, how: str, kinds: list[str]
) -> None:
    script = {"extra_body": {how: 2}}
    async with served_here(tmp_path, pool(member("alpha"))) as router, sdk(router) as client:
        for number, kind in enumerate(kinds, 1):
            got: list[Any] = []
            with pytest.raises(openai.APIError) as broken:
                async for each in await opened(client, kind, script):
                    got.append(each)
                    # no SDK raises for this event by itself; programs look for it
                    if getattr(each, "type", "") == "response.failed":
                        error = each.response.error
                        raise openai.APIError(error.message, None, body=error.model_dump())  # type: ignore[arg-type]
            assert broken.value.code == "upstream_reset", kind
            assert len(got) >= 2, kind
            line = (await attempts(router, number))[-1]
            assert (line["outcome"], line["code"]) == ("upstream_error", "upstream_reset")


async def opened(client: openai.AsyncOpenAI, kind: str, more: dict[str, Any]) -> Any:
    """Open a stream of one of three APIs."""
    match kind:
        case "chat":
            return await client.chat.completions.create(
                model="alpha", messages=WORDS, stream=True, **more
            )
        case "completions":
            return await client.completions.create(model="alpha", prompt="x", stream=True, **more)
        case _:
            return await client.responses.create(model="alpha", input="x", stream=True, **more)


@pytest.mark.parametrize("mode", ["comment", "chunk"])
async def test_signs_of_life_keep_the_client_and_do_not_show(tmp_path: Path, mode: str) -> None:
    """A client whose read time-out is shorter than the load waits on, and reads no word more."""
    settings = {
        "holdKeepalive": mode,
        "holdKeepaliveAfter": "200ms",
        "holdKeepaliveInterval": "200ms",
    }
    slow = member("alpha", load=3.2, chunks=3)
    async with served_here(tmp_path, pool(slow), **settings) as router:
        async with sdk(router, timeout=2.5) as client:
            chat = client.chat.completions.create(model="alpha", messages=WORDS, stream=True)
            answer = client.responses.create(model="alpha", input="x", stream=True)
            streams: list[Any] = await all_of(chat, answer)
            text = await text_of(streams[0])
            events = [event async for event in streams[1]]
        assert text == "alpha: I hold"
        assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
        assert all(line["held_ms"] > 2500 for line in await attempts(router, 2))


async def test_a_refusal_inside_a_kept_alive_stream_is_an_error(tmp_path: Path) -> None:
    settings = {"holdKeepalive": "comment", "holdKeepaliveAfter": "100ms"}
    slow = member("alpha", load=1.5, keys={"expectedLoad": "1s"})
    async with served_here(tmp_path, pool(slow, swapBudget="400ms"), **settings) as router:
        async with sdk(router) as client:
            stream = await client.chat.completions.create(
                model="alpha", messages=WORDS, stream=True
            )
            with pytest.raises(openai.APIError) as refused:
                await text_of(stream)
        assert refused.value.code == "swap_budget_exceeded"
        line = (await attempts(router, 1))[0]
        assert line["outcome"] == "refused:swap_budget_exceeded"


async def test_a_body_over_the_limit_is_refused_readably(tmp_path: Path) -> None:
    """The SDK learns of the 413, although it was refused while it was still sending."""
    async with served_here(tmp_path, pool(member("alpha")), maxBodyBytes="1MiB") as router:
        async with sdk(router) as client:
            with pytest.raises(openai.APIStatusError) as refused:
                await client.chat.completions.create(
                    model="alpha", messages=[{"role": "user", "content": "x" * (8 << 20)}]
                )
            assert (refused.value.status_code, refused.value.code) == (413, "request_too_large")
            await client.chat.completions.create(
                model="alpha", messages=[{"role": "user", "content": "x" * 900_000}]
            )
        assert router.starts("alpha") == 1
