"""Clients that leave, and streams that break."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bothloops import on_both_loops
from modelpool_router.core.commands import BreakReason
from modelpool_router.drivers.base import Endpoint
from modelpool_router.web.faults import (
    ConnectRefused,
    ExchangeBroken,
)
from modelpool_router.web.upstream import UpstreamConnection, UpstreamLimits
from rawupstream import (
    CHUNKED_HEAD,
    LAST_CHUNK,
    LIMIT_S,
    STREAM_HEAD,
    Link,
    RawUpstream,
    answer,
    chunk,
    flood,
    replies,
)
from relay import RawClient, Relay
from tlspair import client_context

pytestmark = pytest.mark.usefixtures("either_front")

# -- clients that leave ------------------------------------------------------------------------


def leave(client: RawClient, how: str) -> None:
    """Close the client's connection."""
    if how == "reset":
        client.reset()
    else:
        client.writer.close()


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("phase", ["upload", "no_answer", "stream", "paused", "looking"])
@on_both_loops
async def test_given_a_client_that_leaves_then_the_upstream_is_let_go_at_once(
    how: str, phase: str
) -> None:
    reached = asyncio.Event()
    gone = asyncio.Event()

    async def script(link: Link) -> None:
        if phase == "upload":
            await link.read_head()
            reached.set()
            # reading on would let the upload end
            await asyncio.wait_for(gone.wait(), LIMIT_S)
        else:
            await link.read_request()
            if phase == "stream":
                await link.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
            elif phase == "looking":
                await link.send(b"HTTP/1.1 503 X\r\nContent-Length: 100\r\n\r\nLoad")
            elif phase == "paused":
                task = asyncio.get_running_loop().create_task(flooding(link))
                await relay.until(
                    lambda: bool(relay.request and relay.request.protocol.writing_paused)
                )
                reached.set()
                await asyncio.wait_for(task, LIMIT_S)
                return
            reached.set()
        await link.gone()

    async def flooding(link: Link) -> None:
        await link.send(STREAM_HEAD)
        try:
            while True:
                link.writer.write(chunk(b"data: %b\n\n" % (b"x" * 65000)))
                await link.writer.drain()
        except ConnectionError:
            return

    async with RawUpstream(script) as up, Relay(up.port) as relay:
        client = await RawClient.connect(relay.port, receive_buffer=4096)
        client.post(b"x" * (32 << 20) if phase == "upload" else b"{}")
        if phase == "stream":
            await client.read_until(b"\n\n\r\n")
        await reached.wait()
        leave(client, how)

        ended = await relay.end()
        assert ended.outcome in ("cancelled", "client_gone")
        gone.set()
        await relay.until(lambda: relay.client.open_connections == 0)
        await up.links[0].ended()
        assert relay.leases[0].on_break is None
        await relay.until(lambda: len(relay.client.sweep) == 0)


@on_both_loops
async def test_given_a_client_that_leaves_while_connecting_then_nothing_is_left() -> None:
    silent = asyncio.Event()

    async def script(link: Link) -> None:
        silent.set()
        await link.gone()  # never takes part in the TLS handshake

    async with RawUpstream(script) as up, Relay(up.port, tls=client_context()) as relay:
        client = await RawClient.connect(relay.port)
        client.post()
        await silent.wait()
        leave(client, "close")

        assert (await relay.end()).outcome == "cancelled"
        await up.links[0].ended()
        assert relay.client.open_connections == 0 and len(relay.client.sweep) == 0


@on_both_loops
async def test_given_a_connection_that_is_not_made_in_time_then_the_request_can_be_held_again() -> (
    None
):
    async def script(link: Link) -> None:
        await link.gone()

    limits = UpstreamLimits(connect_timeout_s=0.05)
    async with RawUpstream(script) as up:
        async with Relay(up.port, upstream_limits=limits, tls=client_context()) as relay:
            async with await RawClient.connect(relay.port) as client:
                client.post()
                assert (await client.answer()).status == 504
                error = (await relay.end()).error
                assert isinstance(error, ConnectRefused) and error.reason == "timeout"


# -- streams that break ------------------------------------------------------------------------

LAST_EVENT = {
    "openai-chat": b'data: {"error":{',
    "other": b'data: {"error":{',
    "responses": b'event: response.failed\ndata: {"type":"response.failed"',
    "anthropic": b'event: error\ndata: {"type":"error","error":{',
}


@pytest.mark.parametrize("family", list(LAST_EVENT))
@pytest.mark.parametrize(
    "sent", [b"", b"data: 1\n\n", b'data: {"half', b"data: 1\n", b"data: 1\r\n\r\n"]
)
@pytest.mark.parametrize("mid_chunk", [False, True])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@on_both_loops
async def test_given_a_stream_that_dies_then_the_client_gets_an_error_event_of_its_family(
    family: Any, sent: bytes, mid_chunk: bool, version: bytes
) -> None:
    async def script(link: Link) -> None:
        await link.read_request()
        await link.send(STREAM_HEAD)
        await client.read_until(b"\r\n\r\n")
        if sent:
            await link.send(b"%x\r\n" % (len(sent) + 50) + sent if mid_chunk else chunk(sent))
        link.close()

    async with RawUpstream(script) as up, Relay(up.port, family=family) as relay:
        async with await RawClient.connect(relay.port) as client:
            client.post(version=version)
            ended = await relay.end()
            if version == b"1.1":
                body = _unchunk(await client.read_until(LAST_CHUNK))
            else:
                body = b""
                while data := await client.read():
                    body += data
            events = body.replace(b"\r\n", b"\n").split(b"\n\n")
            assert events[-1] == b"" and events[-2].startswith(LAST_EVENT[family])
            assert b"upstream_reset" in events[-2] and b"[DONE]" not in body
            assert body.startswith(sent)
            assert ended.result is not None
            assert (ended.outcome, ended.result.code) == ("upstream_error", "upstream_reset")


@pytest.mark.parametrize("keeps", [True, False])
@on_both_loops
async def test_given_a_stream_that_died_then_its_connection_is_as_usable_as_it_was_told(
    keeps: bool,
) -> None:
    """
    A message with all its chunks leaves the connection open unless its head said otherwise.

    Closed without a word, it would be taken for the next POST by a client that pools, which would
    then fail for a reason that has nothing to do with it.
    """

    async def script(link: Link) -> None:
        await link.read_request()
        if link.number == 0:
            await link.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
            link.close()
        else:
            await link.send(answer(b"ok"))

    async with RawUpstream(script) as up, Relay(up.port) as relay:
        async with await RawClient.connect(relay.port) as client:
            client.post(b"{}", *([] if keeps else [b"Connection: close"]))
            broken = await client.answer()
            assert broken.complete and b"upstream_reset" in broken.body
            assert ("connection" in broken.headers) is not keeps
            if keeps:
                client.post()
                assert (await client.answer()).body == b"ok"
            else:
                assert await client.closed()


def test_given_any_reason_to_break_an_exchange_off_then_the_client_gets_a_text_of_its_own() -> None:
    texts = {str(ExchangeBroken(reason)) for reason in BreakReason}
    assert len(texts) == len(BreakReason)


def _unchunk(raw: bytes) -> bytes:
    body = b""
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        body += raw[: int(size, 16)]
        assert raw[int(size, 16) :].startswith(b"\r\n")
        raw = raw[int(size, 16) + 2 :]
    return body


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc",
        CHUNKED_HEAD + chunk(b"abc"),
        CHUNKED_HEAD + b"64\r\nabc",
        STREAM_HEAD[:-2] + b"Content-Encoding: gzip\r\n\r\n" + chunk(b"abc"),
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 99\r\n\r\nabc",
    ],
)
@on_both_loops
async def test_given_another_answer_that_dies_then_the_client_sees_it_cut(
    raw: bytes, how: str
) -> None:
    async def script(link: Link) -> None:
        await link.read_request()
        await link.send(raw)
        await begun.wait()
        getattr(link, how)()

    begun = asyncio.Event()
    async with RawUpstream(script) as up, Relay(up.port) as relay:
        async with await RawClient.connect(relay.port) as client:
            client.post()
            await client.read_until(b"abc")
            begun.set()
            rest = b""
            while data := await client.read():
                rest += data

            assert rest in (b"", b"\r\n"), "nothing but the end of what had come"
            assert (await relay.end()).outcome == "upstream_error"


@on_both_loops
async def test_given_an_unframed_answer_that_is_reset_then_even_an_old_client_can_tell() -> None:
    async def script(link: Link) -> None:
        await link.read_request()
        await link.send(b"HTTP/1.1 200 OK\r\n\r\nabc")
        await begun.wait()
        link.reset()

    begun = asyncio.Event()
    async with RawUpstream(script) as up, Relay(up.port) as relay:
        async with await RawClient.connect(relay.port) as client:
            client.post(version=b"1.0")
            await client.read_until(b"abc")
            begun.set()
            with pytest.raises(ConnectionResetError):
                await asyncio.wait_for(client.reader.read(1), LIMIT_S)


@pytest.mark.parametrize(
    ("reason", "code", "status"),
    [
        (BreakReason.DRAIN_TIMEOUT, "pool_draining", 503),
        (BreakReason.MAX_GENERATION, "upstream_timeout", 504),
        (BreakReason.RESIDENT_HUNG, "upstream_timeout", 504),
        (BreakReason.SHUTDOWN, "pool_draining", 503),
    ],
)
@pytest.mark.parametrize("begun", [False, True])
@on_both_loops
async def test_given_the_runtime_ends_an_exchange_then_the_client_is_told_and_the_upstream_let_go(
    reason: BreakReason, code: str, status: int, begun: bool
) -> None:
    async def script(link: Link) -> None:
        await link.read_request()
        if begun:
            await link.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
        reached.set()
        await link.gone()

    reached = asyncio.Event()
    async with RawUpstream(script) as up, Relay(up.port) as relay:
        async with await RawClient.connect(relay.port) as client:
            client.post()
            await reached.wait()
            if begun:
                await client.read_until(b"\n\n\r\n")
            break_off = relay.leases[0].on_break
            assert break_off is not None
            break_off(reason)
            break_off(reason)

            ended = await relay.end()
            if begun:
                assert code.encode() in await client.read()
                assert ended.outcome == "upstream_error"
            else:
                assert isinstance(ended.error, ExchangeBroken)
                assert (ended.error.reason, ended.error.status) == (reason, status)
                assert (await client.answer()).status == status
            await up.links[0].ended()


@on_both_loops
async def test_given_the_runtime_ends_an_exchange_that_is_connecting_then_nothing_is_sent() -> None:
    async def slowly(endpoint: Endpoint) -> UpstreamConnection:
        connection = await connect(endpoint)
        break_off = relay.leases[0].on_break
        assert break_off is not None
        break_off(BreakReason.DRAIN_TIMEOUT)
        return connection

    async with RawUpstream(replies(answer(b"ok"))) as up, Relay(up.port) as relay:
        connect = relay.client.connect
        relay.client.connect = slowly  # type: ignore[method-assign]
        async with await RawClient.connect(relay.port) as client:
            client.post()
            assert (await client.answer()).status == 503
            assert isinstance((await relay.end()).error, ExchangeBroken)
            await up.links[0].ended()
        assert not up.requests


@on_both_loops
async def test_given_an_exchange_ended_on_a_slow_client_that_then_leaves_then_all_is_quiet() -> (
    None
):
    async with RawUpstream(flood(65536 * 400, stream=True)) as up, Relay(up.port) as relay:
        client = await RawClient.connect(relay.port, receive_buffer=4096)
        client.post()
        await relay.until(lambda: bool(relay.request and relay.request.protocol.writing_paused))
        break_off = relay.leases[0].on_break
        assert break_off is not None and relay.request is not None
        break_off(BreakReason.DRAIN_TIMEOUT)
        assert (await relay.end()).outcome == "upstream_error"
        request = relay.request
        client.reset()

        await relay.until(lambda: request.transport is None)
        await relay.until(lambda: len(relay.client.sweep) == 0)
