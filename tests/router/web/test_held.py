"""Streams that are opened while their request is held (`holdKeepalive`)."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import pytest
from aiohttp import web

from bothloops import on_both_loops
from modelpool_router.web.faults import ConnectRefused, MemberLoading
from modelpool_router.web.held import HeldStream
from modelpool_router.web.upstream import UpstreamLimits
from rawupstream import LAST_CHUNK, STREAM_HEAD, Link, RawUpstream, Script, answer, chunk
from relay import RawClient, Relay

pytestmark = pytest.mark.usefixtures("either_front")

Mode = Literal["comment", "chunk"]


def holding(mode: Mode = "comment", *, after_s: float = 0.0, every_s: float = 0.005) -> Any:
    """Make what `Relay.held` wants."""

    def make(request: Any, relay: Relay) -> HeldStream:
        return HeldStream(
            request,
            relay.client.sweep,
            family=relay.family,
            mode=mode,
            ids=relay.ids,
            member="alpha",
            model='my "model"',
            after_s=after_s,
            every_s=every_s,
        )

    return make


def stream(*events: bytes) -> Script:
    """Answer each request with an event stream."""

    async def script(link: Link) -> None:
        while await link.read_request() is not None:
            await link.send(STREAM_HEAD + b"".join(map(chunk, events)) + LAST_CHUNK)

    return script


class Hold:
    """Holds each request until let go; `Relay.before`."""

    def __init__(self) -> None:
        self.go = asyncio.Semaphore(0)

    async def __call__(self, held: HeldStream | None) -> None:
        await self.go.acquire()


SIGN = {
    ("openai-chat", "comment"): b": keepalive\n\n",
    ("responses", "chunk"): b": keepalive\n\n",
    ("other", "chunk"): b": keepalive\n\n",
    ("anthropic", "comment"): b'event: ping\ndata: {"type":"ping"}\n\n',
    ("anthropic", "chunk"): b'event: ping\ndata: {"type":"ping"}\n\n',
}


@pytest.mark.parametrize(("family", "mode"), list(SIGN))
@on_both_loops
async def test_given_a_long_hold_then_signs_of_life_come_and_then_the_answer(
    family: Any, mode: Mode
) -> None:
    hold = Hold()
    async with RawUpstream(stream(b"data: 1\n\n", b"data: [DONE]\n\n")) as up:
        async with Relay(up.port, family=family, held=holding(mode), before=hold) as relay:
            async with await RawClient.connect(relay.port) as client:
                for _ in range(2):
                    client.post(b"{}", b"Accept-Encoding: gzip")
                    head = await client.read_until(b"\r\n\r\n")
                    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
                    assert b"content-type: text/event-stream" in head.lower()
                    assert b"x-request-id: req-1\r\n" in head and b"held-ms" not in head
                    sign = chunk(SIGN[family, mode])
                    for _ in range(3):
                        assert await client.read_until(b"\n\n\r\n") == sign
                    hold.go.release()
                    rest = await client.read_until(LAST_CHUNK)

                    answered = chunk(b"data: 1\n\n") + chunk(b"data: [DONE]\n\n") + LAST_CHUNK
                    assert rest.endswith(answered)
                    assert rest[: -len(answered)].replace(sign, b"") == b""
                    assert (await relay.end()).outcome == "served"
            await relay.until(lambda: len(relay.client.sweep) == 0)
        assert up.requests[0].values("accept-encoding") == ["identity"]


@on_both_loops
async def test_given_chunk_mode_on_chat_then_signs_of_life_are_empty_deltas() -> None:
    hold = Hold()
    async with RawUpstream(stream(b"data: 1\n\n")) as up:
        async with Relay(up.port, held=holding("chunk"), before=hold) as relay:
            async with await RawClient.connect(relay.port) as client:
                client.post()
                await client.read_until(b"\r\n\r\n")
                raw = await client.read_until(b"\n\n\r\n")
                hold.go.release()

                sign = json.loads(raw.partition(b"data: ")[2].partition(b"\n\n")[0])
                assert sign["object"] == "chat.completion.chunk"
                assert sign["model"] == 'my "model"'
                assert sign["choices"] == [{"index": 0, "delta": {}, "finish_reason": None}]


@on_both_loops
async def test_given_a_short_hold_then_the_answer_is_an_ordinary_one() -> None:
    raw = answer(b"{}", b"Content-Type: application/json", status=b"418 Teapot")
    async with RawUpstream(lambda link: _once(link, raw)) as up:
        limits = UpstreamLimits(reuse_s=0.01, sweep_s=0.005)
        async with Relay(up.port, held=holding(after_s=60), upstream_limits=limits) as relay:
            async with await RawClient.connect(relay.port) as client:
                client.post()
                got = await client.answer()

                assert (got.status, got.body) == (418, b"{}")
                assert "x-modelpool-held-ms" in got.headers
                await relay.end()
                await relay.until(lambda: relay.client.idle_connections == 0)
                await relay.until(lambda: len(relay.client.sweep) == 0)


async def _once(link: Link, raw: bytes) -> None:
    while await link.read_request() is not None:
        await link.send(raw)


REFUSALS = [
    (
        answer(b'{"error":{"message":"bad \\n thing","code":"bad_thing"}}', status=b"400 Bad"),
        400,
        "bad_thing",
        "bad \n thing",
    ),
    (answer(b'{"error":"flat"}', status=b"422 X"), 422, "upstream_error", "flat"),
    (answer(b"<html>", status=b"500 X"), 500, "upstream_error", "status 500"),
    (answer(b"x" * 100_000, status=b"500 X"), 500, "upstream_error", "status 500"),
    (b"HTTP/1.1 404 X\r\n\r\nuntil", 404, "upstream_error", "status 404"),
    (answer(b'{"choices":[]}'), 502, "upstream_protocol_error", "event stream"),
    (b"HTTP/1.1 204 X\r\n\r\n", 502, "upstream_protocol_error", "event stream"),
    (b"NONSENSE\r\n\r\n", 502, "upstream_protocol_error", "malformed"),
    (b"", 502, "upstream_reset", "ended"),
    (
        STREAM_HEAD[:-2] + b"Content-Encoding: gzip\r\n\r\n" + LAST_CHUNK,
        502,
        "upstream_protocol_error",
        "event stream",
    ),
]


@pytest.mark.parametrize(("raw", "status", "code", "message"), REFUSALS)
@pytest.mark.parametrize("family", ["openai-chat", "responses", "anthropic"])
@on_both_loops
async def test_given_another_answer_than_a_stream_then_it_is_an_error_in_the_open_one(
    raw: bytes, status: int, code: str, message: str, family: Any
) -> None:
    async def script(link: Link) -> None:
        await link.read_request()
        await link.send(raw)

    hold = Hold()
    async with RawUpstream(script) as up:
        async with Relay(up.port, family=family, held=holding(), before=hold) as relay:
            async with await RawClient.connect(relay.port) as client:
                client.post()
                await client.read_until(b"\r\n\r\n")
                await client.read_until(b"\n\n\r\n")
                hold.go.release()
                rest = await client.read_until(LAST_CHUNK)

                last = json.loads(rest.rpartition(b"data: ")[2].partition(b"\n\n")[0])
                error = (last["response"] if family == "responses" else last)["error"]
                assert (error["status"], error["code"]) == (status, code)
                assert message in error["message"] and b"[DONE]" not in rest
                ended = await relay.end()
                assert ended.result is not None
                assert (ended.outcome, ended.result.code) == ("upstream_error", code)
            await relay.until(lambda: len(relay.client.sweep) == 0)


@pytest.mark.parametrize("kind", ["loading", "refused"])
@on_both_loops
async def test_given_a_member_that_is_not_there_yet_then_the_open_stream_is_held_again(
    kind: str,
) -> None:
    async def script(link: Link) -> None:
        await link.read_request()
        if link.number == 0 and kind == "loading":
            await link.send(answer(b'{"error":{"message":"Loading model"}}', status=b"503 X"))
        else:
            await link.send(STREAM_HEAD + chunk(b"data: 1\n\n") + LAST_CHUNK)

    hold = Hold()
    async with RawUpstream(script) as up:
        port = 1 if kind == "refused" else up.port
        async with Relay(port, held=holding(), before=hold) as relay:
            async with await RawClient.connect(relay.port) as client:
                client.post()
                await client.read_until(b"\n\n\r\n")
                hold.go.release()
                error = (await relay.end()).error
                assert isinstance(error, MemberLoading if kind == "loading" else ConnectRefused)
                relay.port_of_upstream = up.port
                for _ in range(3):
                    assert await client.read_until(b"\n\n\r\n") == chunk(b": keepalive\n\n")
                hold.go.release()

                assert (await client.read_until(LAST_CHUNK)).endswith(
                    chunk(b"data: 1\n\n") + LAST_CHUNK
                )
                assert (await relay.end()).outcome == "served"


@on_both_loops
async def test_given_a_refusal_at_the_end_of_the_hold_then_it_is_an_error_in_the_open_stream() -> (
    None
):
    refused: list[web.StreamResponse] = []

    async def handle(request: Any) -> web.StreamResponse:
        held = holding()(request, relay)
        while not held.started:  # (no time limit here: a handler may run without a task)
            await asyncio.sleep(0.001)
        refused.append(
            held.fail(status=503, code="swap_budget_exceeded", message="Waited.", write_stall_s=60)
        )
        return refused[0]

    async with RawUpstream(stream()) as up:
        relay = Relay(up.port)
        relay._handle = handle  # type: ignore[method-assign]
        async with relay:
            async with await RawClient.connect(relay.port) as client:
                for _ in range(2):  # a whole answer: the connection is there for the next one
                    client.post()
                    got = await client.answer()

                    assert got.complete and got.status == 200
                    assert b'"code":"swap_budget_exceeded","status":503' in got.body
                    assert b"[DONE]" not in got.body
            assert len(relay.client.sweep) == 0


@on_both_loops
async def test_given_an_http10_client_then_its_held_stream_ends_with_the_connection() -> None:
    hold = Hold()
    async with RawUpstream(stream(b"data: 1\n\n")) as up:
        async with Relay(up.port, held=holding(), before=hold) as relay:
            async with await RawClient.connect(relay.port) as client:
                client.post(version=b"1.0")
                head = await client.read_until(b"\r\n\r\n")
                assert b"Connection: close\r\n" in head and b"chunked" not in head
                hold.go.release()
                raw = b""
                while data := await client.read():
                    raw += data

                assert raw.replace(b": keepalive\n\n", b"") == b"data: 1\n\n"


@on_both_loops
async def test_given_a_client_that_leaves_an_open_held_stream_then_nothing_is_left() -> None:
    hold = Hold()
    async with RawUpstream(stream(b"data: 1\n\n")) as up:
        async with Relay(up.port, held=holding(), before=hold) as relay:
            client = await RawClient.connect(relay.port)
            client.post()
            await client.read_until(b"\n\n\r\n")
            client.reset()

            assert (await relay.end()).outcome == "cancelled"
            await relay.until(lambda: len(relay.client.sweep) == 0)
        assert not up.links


@on_both_loops
async def test_given_signs_of_life_while_the_member_thinks_then_they_go_on_until_it_answers() -> (
    None
):
    async def script(link: Link) -> None:
        await link.read_request()
        await seen.wait()
        await link.send(STREAM_HEAD + chunk(b"data: 1\n\n") + LAST_CHUNK)

    seen = asyncio.Event()
    hold = Hold()
    async with RawUpstream(script) as up:
        async with Relay(up.port, held=holding(), before=hold) as relay:
            async with await RawClient.connect(relay.port) as client:
                client.post()
                await client.read_until(b"\n\n\r\n")
                hold.go.release()
                await relay.until(lambda: bool(up.requests))
                for _ in range(5):
                    await client.read_until(b"\n\n\r\n")
                seen.set()

                assert (await client.read_until(LAST_CHUNK)).endswith(LAST_CHUNK)


@on_both_loops
async def test_given_an_answer_that_has_begun_then_no_sign_of_life_can_come_between() -> None:
    async def script(link: Link) -> None:
        await link.read_request()
        await link.send(STREAM_HEAD + chunk(b"data: {"))
        await seen.wait()
        await link.send(chunk(b"}\n\n") + LAST_CHUNK)

    seen = asyncio.Event()
    hold = Hold()
    async with RawUpstream(script) as up:
        async with Relay(up.port, held=holding(), before=hold) as relay:
            async with await RawClient.connect(relay.port) as client:
                client.post()
                await client.read_until(b"\n\n\r\n")
                hold.go.release()
                await client.read_until(chunk(b"data: {"))
                assert relay.held_stream not in relay.client.sweep._watched
                seen.set()

                assert await client.read_until(LAST_CHUNK) == chunk(b"}\n\n") + LAST_CHUNK


@on_both_loops
async def test_given_a_short_hold_that_goes_on_then_signs_of_life_come_after_all() -> None:
    hold = Hold()
    async with RawUpstream(stream(b"data: 1\n\n")) as up:
        async with Relay(1, held=holding(after_s=3600), before=hold) as relay:
            async with await RawClient.connect(relay.port) as client:
                client.post()
                await relay.arrived.wait()
                held = relay.held_stream
                assert held is not None and held in relay.client.sweep._watched
                hold.go.release()
                assert isinstance((await relay.end()).error, ConnectRefused)
                assert held in relay.client.sweep._watched and not held.started
                held.check(asyncio.get_running_loop().time() + 3601)
                await client.read_until(b"\n\n\r\n")
                relay.port_of_upstream = up.port
                hold.go.release()

                assert (await client.read_until(LAST_CHUNK)).endswith(LAST_CHUNK)


@on_both_loops
async def test_given_time_passes_then_signs_of_life_keep_their_distance_and_spare_the_slow() -> (
    None
):
    hold = Hold()
    async with RawUpstream(stream(b"data: 1\n\n")) as up:
        making = holding(after_s=1000, every_s=100)
        async with Relay(up.port, held=making, before=hold) as relay:
            async with await RawClient.connect(relay.port) as client:
                client.post()
                await relay.arrived.wait()
                held = relay.held_stream
                assert held is not None and relay.request is not None
                start = held._due
                lengths = []
                for now in (-0.1, 0.0, 0.1, 99.9, 100.0, 199.0, 200.0):
                    held.check(start + now)
                    lengths.append(held.sink.sent)
                first, sign = lengths[1], len(chunk(b": keepalive\n\n"))
                assert lengths == [
                    0,
                    first,
                    first,
                    first,
                    first + sign,
                    first + sign,
                    first + 2 * sign,
                ]
                relay.request.protocol.pause_writing()
                held.check(start + 300)
                assert held.sink.sent == lengths[-1]
                relay.request.protocol.resume_writing()
                held.check(start + 400)
                assert held.sink.sent == lengths[-1] + sign
