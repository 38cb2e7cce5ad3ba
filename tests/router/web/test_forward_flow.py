"""Deadlines and back-pressure, both ways."""

from __future__ import annotations

import asyncio
import hashlib
from functools import partial
from typing import Any, cast

import pytest

from bothloops import on_both_loops
from fronts import is_own
from modelpool_router.web.forward import ForwardLimits
from modelpool_router.web.sink import _Remainder
from modelpool_router.web.sweep import Sweep
from rawupstream import (
    LAST_CHUNK,
    STREAM_HEAD,
    Link,
    RawUpstream,
    answer,
    chunk,
    flood,
    replies,
)
from relay import RawClient, Relay

pytestmark = pytest.mark.usefixtures("either_front")

# -- deadlines ---------------------------------------------------------------------------------


@on_both_loops
async def test_given_no_answer_in_time_then_504_and_the_upstream_is_let_go() -> None:
    async def script(link: Link) -> None:
        await link.read_request()
        await link.gone()

    limits = ForwardLimits(response_timeout_s=0.05)
    async with RawUpstream(script) as up, Relay(up.port, limits=limits) as relay:
        async with await RawClient.connect(relay.port) as client:
            client.post()
            got = await client.answer()
            assert (got.status, got.body) == (504, b'{"error":{"code":"upstream_timeout"}}')
            await up.links[0].ended()
            await relay.until(lambda: len(relay.client.sweep) == 0)


@on_both_loops
async def test_given_a_stream_that_goes_silent_then_it_ends_with_an_error_in_it() -> None:
    async def script(link: Link) -> None:
        await link.read_request()
        await link.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
        await link.gone()

    limits = ForwardLimits(read_stall_s=0.05)
    async with RawUpstream(script) as up, Relay(up.port, limits=limits) as relay:
        async with await RawClient.connect(relay.port) as client:
            client.post()
            got = await client.answer()

            assert got.complete and b'"code":"upstream_timeout"' in got.body
            assert b"[DONE]" not in got.body
            ended = await relay.end()
            assert (ended.outcome, ended.result and ended.result.code) == (
                "upstream_error",
                "upstream_timeout",
            )
            await up.links[0].ended()


@on_both_loops
async def test_given_events_that_pass_by_the_exchange_then_deadlines_and_errors_know_of_them() -> (
    None
):
    """As events of lengths seen before do."""
    turn = asyncio.Semaphore(0)
    events = [chunk(b"data: %d\n\n" % n) for n in range(3)]
    unfinished = chunk(b"data: {")

    async def script(link: Link) -> None:
        await link.read_request()
        await link.send(STREAM_HEAD)
        for piece in (*events, unfinished):
            await turn.acquire()
            await link.send(piece)
        await link.gone()

    limits = ForwardLimits(read_stall_s=1.0)
    async with RawUpstream(script) as up, Relay(up.port, limits=limits) as relay:
        async with await RawClient.connect(relay.port) as client:
            client.post()
            size = len(await client.read_until(b"\r\n\r\n"))
            for event in events:
                before = asyncio.get_running_loop().time()
                turn.release()
                size += len(await client.read_until(event))
                await relay.until(partial(_has_moved, relay, before))
            turn.release()
            told = await client.read_until(LAST_CHUNK)

            assert told.startswith(unfinished)
            assert b"\r\n\n\ndata: " in told and b'"code":"upstream_timeout"' in told
            ended = await relay.end()
            assert ended.result is not None
            assert ended.result.bytes_sent == size + len(told)


def _has_moved(relay: Relay, since: float) -> bool:
    return relay.leases[0].moved_at >= since


@on_both_loops
async def test_given_a_body_that_goes_silent_then_it_is_cut_visibly() -> None:
    async def script(link: Link) -> None:
        await link.read_request()
        await link.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc")
        await link.gone()

    limits = ForwardLimits(read_stall_s=0.05)
    async with RawUpstream(script) as up, Relay(up.port, limits=limits) as relay:
        async with await RawClient.connect(relay.port) as client:
            client.post()
            got = await client.answer()

            assert not got.complete and got.body == b"abc"


@on_both_loops
async def test_given_a_slow_reader_then_the_upstream_is_not_blamed_for_the_silence() -> None:
    limits = ForwardLimits(read_stall_s=300, write_stall_s=1e9)
    async with RawUpstream(flood(65536 * 400)) as up, Relay(up.port, limits=limits) as relay:
        async with await RawClient.connect(relay.port, receive_buffer=4096) as client:
            client.post()
            await relay.until(lambda: bool(relay.request and relay.request.protocol.writing_paused))
            (exchange,) = relay.client.sweep._watched
            exchange.check(asyncio.get_running_loop().time() + 1000)

            got = await client.answer()
            assert got.complete and len(got.body) == 65536 * 400
            assert (await relay.end()).outcome == "served"


# -- flow control ------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@on_both_loops
async def test_given_a_slow_reader_and_a_flood_then_little_is_buffered_and_nothing_is_lost(
    stream: bool,
) -> None:
    total = 65536 * 400
    async with RawUpstream(flood(total, stream=stream)) as up, Relay(up.port) as relay:
        async with await RawClient.connect(relay.port, receive_buffer=4096) as client:
            client.post()
            head = await client.read_until(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert relay.request is not None
            transport, peak, got = relay.request.transport, 0, 0
            assert transport is not None
            await relay.until(lambda: bool(relay.request and relay.request.protocol.writing_paused))
            while got < total:
                peak = max(peak, transport.get_write_buffer_size())
                data = await client.read(1 << 20)
                assert data
                got += len(data)

            assert peak <= 64 * 1024 + 256 * 1024
            assert (await relay.end()).outcome == "served"


@on_both_loops
async def test_given_a_client_that_takes_nothing_then_it_is_dropped_and_the_upstream_let_go() -> (
    None
):
    limits = ForwardLimits(write_stall_s=0.05)
    async with RawUpstream(flood(1 << 30)) as up, Relay(up.port, limits=limits) as relay:
        async with await RawClient.connect(relay.port, receive_buffer=4096) as client:
            client.post()
            ended = await relay.end()

            assert ended.result is not None
            assert (ended.outcome, ended.result.code) == ("client_gone", "write_stall")
            await up.links[0].ended()
            await relay.until(lambda: len(relay.client.sweep) == 0)


@on_both_loops
async def test_given_a_client_that_never_takes_the_end_then_its_connection_is_dropped() -> None:
    limits = ForwardLimits(write_stall_s=0.05)
    # enough to fill the kernel's buffers, then end while a rest is ours
    async with RawUpstream(replies()) as up, Relay(up.port, limits=limits) as relay:
        async with await RawClient.connect(relay.port, receive_buffer=4096) as client:
            paused = asyncio.Event()

            async def script(link: Link) -> None:
                await link.read_request()
                await link.send(STREAM_HEAD)
                while relay.request is None or not (
                    (transport := relay.request.transport) and transport.get_write_buffer_size()
                ):
                    await link.send(chunk(b"data: %b\n\n" % (b"x" * 1000)))
                    await asyncio.sleep(0)
                await link.send(LAST_CHUNK)
                paused.set()

            up.script = script
            client.post()
            await paused.wait()
            assert (await relay.end()).outcome == "served"
            assert relay.request is not None
            request = relay.request
            await relay.until(lambda: request.transport is None)
            await relay.until(lambda: len(relay.client.sweep) == 0)


@on_both_loops
async def test_given_a_big_body_and_a_slow_upstream_then_little_is_buffered() -> None:
    body = hashlib.sha256(b"seed").digest() * 32 * 1024 * 8  # 8 MiB
    peak = 0

    async def script(link: Link) -> None:
        nonlocal peak
        await link.read_head()
        digest, left = hashlib.sha256(), len(body)
        while left:
            data = await link.reader.read(65536)
            digest.update(data)
            left -= len(data)
            for connection in relay.client._open:
                assert connection._transport is not None
                peak = max(peak, connection._transport.get_write_buffer_size())
        await link.send(answer(digest.hexdigest().encode()))

    async with RawUpstream(script) as up, Relay(up.port) as relay:
        async with await RawClient.connect(relay.port) as client:
            client.post(body)
            got = await client.answer()

            assert got.body == hashlib.sha256(body).hexdigest().encode()
            assert 0 < peak <= 64 * 1024 + 256 * 1024
            ended = await relay.end()
            assert ended.body is not None and (ended.body.iterations, ended.body.closed) == (1, 1)


def test_given_the_rest_of_an_answer_then_only_a_client_that_takes_nothing_is_dropped() -> None:
    class Transport:
        left = 100
        aborted = False

        def get_write_buffer_size(self) -> int:
            return self.left

        def is_closing(self) -> bool:
            return self.aborted

        def get_extra_info(self, name: str) -> Any:
            return self

        def setsockopt(self, *option: object) -> None:
            assert not self.aborted

        def abort(self) -> None:
            self.aborted = True

    loop = asyncio.new_event_loop()
    for steps, aborted, watched in [
        ([(100, 59.0)], False, True),
        ([(100, 60.0)], True, False),
        ([(90, 59.0), (90, 100.0)], False, True),
        ([(90, 59.0), (90, 119.0)], True, False),
        ([(90, 59.0), (0, 500.0)], False, False),
        ([(90, 59.0), (200, 500.0)], False, False),
    ]:
        transport, sweep = Transport(), Sweep(loop, 1.0)
        rest = _Remainder(cast(asyncio.Transport, transport), sweep, 60.0, 0.0)
        sweep.add(rest)
        for transport.left, now in steps:
            rest.check(now)
        assert (transport.aborted, len(sweep) == 1) == (aborted, watched), steps
        sweep.close()
    loop.close()


@on_both_loops
async def test_given_a_handler_that_fails_afterwards_then_the_client_gets_no_second_head(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise RuntimeError("on purpose")

    async with RawUpstream(replies(answer(b"ok"))) as up, Relay(up.port, after=fail) as relay:
        async with await RawClient.connect(relay.port) as client:
            client.post()
            got = await client.answer()

            assert (got.status, got.body) == (200, b"ok") and await client.closed()
    assert ("request handler failed" if is_own() else "on purpose") in caplog.text


@on_both_loops
async def test_given_an_early_head_while_uploading_then_the_body_is_given_back_in_the_end() -> None:
    body = b"x" * (8 << 20)

    async def script(link: Link) -> None:
        head = await link.read_head()
        assert head is not None
        await link.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
        await begun.wait()
        await link.reader.readexactly(len(body))
        await link.send(chunk(b"data: 2\n\n") + LAST_CHUNK)

    begun = asyncio.Event()
    async with RawUpstream(script) as up, Relay(up.port) as relay:
        async with await RawClient.connect(relay.port) as client:
            client.post(body)
            await client.read_until(chunk(b"data: 1\n\n"))
            begun.set()
            await client.read_until(LAST_CHUNK)

            ended = await relay.end()
            assert ended.body is not None and (ended.outcome, ended.body.closed) == ("served", 1)


@pytest.mark.parametrize("after", ["keep", "close", "drain"])
@on_both_loops
async def test_given_an_answer_before_the_body_was_taken_then_it_passes_and_uploading_stops(
    after: str,
) -> None:
    async def script(link: Link) -> None:
        await link.read_head()
        await link.send(answer(b"too much", status=b"413 Too Large"))
        if after == "drain":
            await link.gone()
        elif after == "keep" and link.number == 0:
            await other.wait()

    other = asyncio.Event()
    async with RawUpstream(script) as up, Relay(up.port) as relay:
        async with await RawClient.connect(relay.port) as client:
            client.post(b"x" * (16 << 20))
            got = await client.answer()

            assert got.status in ((413,) if after != "close" else (413, 502))
            ended = await relay.end()
            assert ended.body is not None and ended.body.pieces < 64
            if after != "close":
                client.post(b"small")
                assert (await client.answer()).status == 413
                assert len(up.links) == 2, "a half-fed connection is not used again"
            other.set()
