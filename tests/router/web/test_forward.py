"""Requests to a scripted upstream and its answers to raw clients, over real sockets."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import os
import select
import socket
import ssl
import sys
from typing import Any, cast

import pytest

from bothloops import on_both_loops
from modelpool_router.core.headers import ExchangeIds
from modelpool_router.drivers.base import Endpoint
from modelpool_router.web.faults import (
    ConnectRefused,
    ExchangeBroken,
    MemberLoading,
    UpstreamReset,
)
from modelpool_router.web.forward import ForwardLimits
from modelpool_router.web.sink import _Remainder
from modelpool_router.web.sweep import Sweep
from modelpool_router.web.upstream import UpstreamConnection, UpstreamLimits
from rawupstream import (
    LAST_CHUNK,
    LIMIT_S,
    STREAM_HEAD,
    Link,
    RawUpstream,
    Script,
    answer,
    chunk,
)
from relay import RawClient, Relay, post
from tlspair import client_context, server_context

CHUNKED_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def replies(*parts: bytes, keep: bool = True) -> Script:
    """Answer every request with the same bytes; close afterwards unless *keep*."""

    async def script(link: Link) -> None:
        while await link.read_request() is not None:
            await link.send(b"".join(parts))
            if not keep:
                return

    return script


# -- ordinary answers ------------------------------------------------------------------------


@on_both_loops
async def test_given_an_ordinary_answer_then_it_passes_with_our_lines() -> None:
    script = replies(answer(b'{"a":1}', b"Content-Type: application/json", b"Server: x"))
    async with RawUpstream(script) as up, Relay(up.port) as relay:
        async with await RawClient.connect(relay.port) as client:
            for _ in range(3):
                client.post(b'{"model":"m"}', b"Authorization: Bearer secret")
                got = await client.answer()

                assert (got.status, got.body, got.complete) == (200, b'{"a":1}', True)
                assert got.fields == [
                    ("content-type", "application/json"),
                    ("x-request-id", "req-1"),
                    ("request-id", "req-1"),
                    ("x-modelpool-member", "alpha"),
                    ("x-modelpool-held-ms", "7"),
                    ("content-length", "7"),
                ]
                ended = await relay.end()
                assert ended.result is not None and ended.body is not None
                assert (ended.outcome, ended.result.status) == ("served", 200)
                assert ended.result.code is None and ended.result.first_byte_at is not None
                assert ended.result.bytes_sent > len(got.body)
                assert ended.body.closed == 1

        assert [r.body for r in up.requests] == [b'{"model":"m"}'] * 3
        seen = up.requests[0]
        assert seen.line == b"POST /v1/chat/completions HTTP/1.1"
        assert seen.values("content-length") == ["13"]
        assert seen.values("host") == [f"127.0.0.1:{up.port}"]
        assert b"secret" not in seen.head
        assert all(lease.on_break is None and lease.moved_at > 0 for lease in relay.leases)


@on_both_loops
async def test_given_whole_chunks_then_they_pass_byte_for_byte() -> None:
    body = chunk(b'{"a":') + b"2;x=1\r\n1}\r\n" + LAST_CHUNK
    async with RawUpstream(replies(CHUNKED_HEAD + body)) as up, Relay(up.port) as relay:
        async with await RawClient.connect(relay.port) as client:
            client.post()
            head = await client.read_until(b"\r\n\r\n")
            raw = await client.read_until(LAST_CHUNK)

            assert b"Transfer-Encoding: chunked\r\n" in head and raw == body


@on_both_loops
async def test_given_an_event_stream_then_each_event_passes_before_the_next_is_sent() -> None:
    go = asyncio.Queue[bytes]()

    async def script(link: Link) -> None:
        await link.read_request()
        await link.send(STREAM_HEAD)
        while event := await go.get():
            await link.send(chunk(event))
        await link.send(LAST_CHUNK)

    async with RawUpstream(script) as up, Relay(up.port) as relay:
        async with await RawClient.connect(relay.port) as client:
            client.post()
            head = await client.read_until(b"\r\n\r\n")
            assert b"X-Accel-Buffering: no\r\n" in head and b"Cache-Control: no-cache\r\n" in head
            for number in range(20):
                event = b"data: %d\n\n" % number
                go.put_nowait(event)
                assert await client.read_until(b"\n\n\r\n") == chunk(event)
            go.put_nowait(b"")
            assert await client.read_until(LAST_CHUNK) == LAST_CHUNK
            assert (await relay.end()).outcome == "served"

            client.post()
            assert await client.read_until(b"\r\n\r\n") == head, "the connection stays usable"


@pytest.mark.parametrize("size", [1, 7])
@on_both_loops
async def test_given_a_stream_in_tiny_segments_then_the_body_is_the_same(size: int) -> None:
    events = b"".join(b"data: %d\n\n" % n for n in range(10))
    raw = STREAM_HEAD + chunk(events[:40]) + chunk(events[40:]) + b"0\r\nX-Trailer: 1\r\n\r\n"

    async def script(link: Link) -> None:
        await link.read_request()
        for start in range(0, len(raw), size):
            await link.send(raw[start : start + size])
            await asyncio.sleep(0)

    async with RawUpstream(script) as up, Relay(up.port) as relay:
        async with await RawClient.connect(relay.port) as client:
            client.post()
            got = await client.answer()

            assert got.complete and got.body == events
            assert "x-trailer" not in got.headers


@on_both_loops
async def test_given_an_answer_that_ends_with_the_connection_then_it_is_framed_for_the_client() -> (
    None
):
    script = replies(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nuntil the end", keep=False
    )
    async with RawUpstream(script) as up, Relay(up.port) as relay:
        async with await RawClient.connect(relay.port) as client:
            for _ in range(2):
                client.post()
                got = await client.answer()

                assert got.complete and got.body == b"until the end"
                assert got.headers["transfer-encoding"] == "chunked"
        assert len(up.links) == 2


@pytest.mark.parametrize(
    ("raw", "body"),
    [
        (answer(b"abc"), b"abc"),
        (CHUNKED_HEAD + chunk(b"ab") + chunk(b"c") + LAST_CHUNK, b"abc"),
        (b"HTTP/1.1 200 OK\r\n\r\nabc", b"abc"),
    ],
)
@pytest.mark.parametrize("connection", [b"X-None: 1", b"Connection: keep-alive"])
@on_both_loops
async def test_given_an_http10_client_then_it_gets_plain_bytes_and_the_end(
    raw: bytes, body: bytes, connection: bytes
) -> None:
    async with RawUpstream(replies(raw, keep=False)) as up, Relay(up.port) as relay:
        async with await RawClient.connect(relay.port) as client:
            client.post(b"{}", connection, version=b"1.0")
            got = await client.answer()

            assert got.complete and got.body == body
            assert "transfer-encoding" not in got.headers
            assert got.headers["connection"] == "close"
            assert await client.closed()


@pytest.mark.parametrize(
    ("method", "raw"),
    [
        ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n"),
        ("HEAD", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"),
        ("POST", b"HTTP/1.1 204 No Content\r\n\r\n"),
        ("GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 500\r\n\r\n"),
        ("POST", answer(b"")),
        ("POST", answer(b"x" * 300, status=b"500 Oops")),
        ("POST", answer(b"x", b"Location: http://elsewhere/", status=b"307 Moved")),
    ],
)
@on_both_loops
async def test_given_an_answer_with_or_without_a_body_then_the_connection_stays_in_step(
    method: str, raw: bytes
) -> None:
    async with RawUpstream(replies(raw)) as up, Relay(up.port) as relay:
        async with await RawClient.connect(relay.port) as client:
            for _ in range(3):
                client.send(post().replace(b"POST", method.encode(), 1))
                got = await client.answer(method)

                assert got.complete and str(got.status).encode() in raw.split(b"\r\n")[0]
                assert got.body == raw.partition(b"\r\n\r\n")[2]
                assert (await relay.end()).outcome == "served"
        assert len(up.requests) == 3, "no redirect is followed"


@on_both_loops
async def test_given_interim_answers_then_only_the_real_one_passes() -> None:
    raw = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + answer(
        b"ok"
    )
    async with RawUpstream(replies(raw)) as up, Relay(up.port) as relay:
        async with await RawClient.connect(relay.port) as client:
            for _ in range(2):
                client.post()
                got = await client.answer()

                assert (got.status, got.body) == (200, b"ok") and "link" not in got.headers


@pytest.mark.parametrize("kind", ["length", "chunked", "stream", "until_close"])
@on_both_loops
async def test_given_a_compressed_answer_then_its_bytes_and_coding_pass_untouched(
    kind: str,
) -> None:
    packed = gzip.compress(b'{"a":1}' * 50, mtime=0)
    coding = b"Content-Encoding: gzip"
    raw = {
        "length": answer(packed, coding),
        "chunked": CHUNKED_HEAD[:-2] + coding + b"\r\n\r\n" + chunk(packed) + LAST_CHUNK,
        "stream": STREAM_HEAD[:-2] + coding + b"\r\n\r\n" + chunk(packed) + LAST_CHUNK,
        "until_close": b"HTTP/1.1 200 OK\r\n" + coding + b"\r\n\r\n" + packed,
    }[kind]
    async with RawUpstream(replies(raw, keep=False)) as up, Relay(up.port) as relay:
        async with await RawClient.connect(relay.port) as client:
            client.post(b"{}", b"Accept-Encoding: gzip, br")
            got = await client.answer()

            assert got.complete and got.body == packed
            assert got.values("content-encoding") == ["gzip"]
        assert up.requests[0].values("accept-encoding") == ["gzip, br"]


@on_both_loops
async def test_given_cors_lines_and_draining_then_the_answer_carries_both() -> None:
    ids = ExchangeIds("req-1", ((b"Access-Control-Allow-Origin", b"https://me"),))
    async with RawUpstream(replies(answer(b"ok"))) as up:
        async with Relay(up.port, ids=ids, options={"close": True}) as relay:
            async with await RawClient.connect(relay.port) as client:
                client.post()
                got = await client.answer()

                assert got.headers["access-control-allow-origin"] == "https://me"
                assert got.headers["connection"] == "close"
                assert await client.closed()


# -- malformed answers -----------------------------------------------------------------------

ODD = [
    b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n" * 17 + answer(b"ok"),
    b"NONSENSE\r\n\r\n",
    b"HTTP/2 200\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok",
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nA: b\x00\r\nContent-Length: 2\r\n\r\nok",
    b"HTTP/1.1 200 OK\r\nA: b\r\n c\r\nContent-Length: 2\r\n\r\nok",
    b"HTTP/1.1 204 No Content\r\nContent-Length: 2\r\n\r\nok",
    b"HTTP/1.1 204 No Content\r\n\r\nok",
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" + answer(b"poison"),
    CHUNKED_HEAD + b"zz\r\n",
    CHUNKED_HEAD + chunk(b"a") + LAST_CHUNK + answer(b"poison"),
    CHUNKED_HEAD + chunk(b"a") + LAST_CHUNK + b"\r\n",
    b"HTTP/1.1 200 OK\r\nA: " + b"x" * 66_000 + b"\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 201 + b"\r\n",
    b"x" * 70_000,
]


@pytest.mark.parametrize("raw", ODD)
@on_both_loops
async def test_given_an_odd_answer_then_502_and_the_next_request_is_unharmed(raw: bytes) -> None:
    async def script(link: Link) -> None:
        while await link.read_request() is not None:
            await link.send(raw if link.number == 0 else answer(b"fine"))

    async with RawUpstream(script) as up, Relay(up.port) as relay:
        async with await RawClient.connect(relay.port) as client:
            client.post()
            got = await client.answer()
            assert (got.status, got.body) == (502, b'{"error":{"code":"upstream_protocol_error"}}')
            ended = await relay.end()
            assert ended.body is not None and ended.body.closed == 0, "left to the handler"
            await up.links[0].ended()

            client.post()
            got = await client.answer()
            assert (got.status, got.body) == (200, b"fine")
        assert len(up.links) == 2


@on_both_loops
async def test_given_bytes_after_the_end_of_a_begun_answer_then_it_is_cut() -> None:
    sent = asyncio.Event()

    async def script(link: Link) -> None:
        await link.read_request()
        await link.send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nab")
        await sent.wait()
        await link.send(b"cd" + answer(b"poison"))
        await link.gone()

    async with RawUpstream(script) as up, Relay(up.port) as relay:
        async with await RawClient.connect(relay.port) as client:
            client.post()
            await client.read_until(b"ab")
            sent.set()

            assert await client.read() == b""
            ended = await relay.end()
            assert ended.result is not None
            assert (ended.outcome, ended.result.code) == (
                "upstream_error",
                "upstream_protocol_error",
            )


# -- reuse and loss of connections -----------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "links"),
    [
        (answer(b"ok"), 1),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 1),
        (answer(b"ok", b"Connection: close"), 2),
        (answer(b"ok").replace(b"HTTP/1.1", b"HTTP/1.0"), 2),
        (answer(b"data: 1\n\n", b"Content-Type: text/event-stream"), 2),
        (STREAM_HEAD + chunk(b"data: 1\n\n") + LAST_CHUNK, 2),
        (CHUNKED_HEAD + chunk(b"{}") + LAST_CHUNK, 2),
    ],
)
@on_both_loops
async def test_given_an_answer_then_its_connection_is_used_again_only_when_that_is_safe(
    raw: bytes, links: int
) -> None:
    async with RawUpstream(replies(raw)) as up, Relay(up.port) as relay:
        async with await RawClient.connect(relay.port) as client:
            for _ in range(2):
                client.post()
                assert (await client.answer()).complete
                assert (await relay.end()).outcome == "served"
        assert len(up.links) == links
        assert relay.client.open_connections == relay.client.idle_connections == 2 - links


@on_both_loops
async def test_given_a_rest_that_was_too_long_then_the_connection_is_not_lent() -> None:
    limits = UpstreamLimits(reuse_s=0.0, sweep_s=3600)
    async with RawUpstream(replies(answer(b"ok"))) as up:
        async with Relay(up.port, upstream_limits=limits) as relay:
            async with await RawClient.connect(relay.port) as client:
                for _ in range(2):
                    client.post()
                    assert (await client.answer()).status == 200
        assert len(up.links) == 2


@on_both_loops
async def test_given_a_rest_that_was_too_long_then_the_connection_is_closed() -> None:
    limits = UpstreamLimits(reuse_s=0.01, sweep_s=0.005)
    async with RawUpstream(replies(answer(b"ok"))) as up:
        async with Relay(up.port, upstream_limits=limits) as relay:
            async with await RawClient.connect(relay.port) as client:
                client.post()
                await client.answer()
                await up.links[0].ended()

                client.post()
                assert (await client.answer()).status == 200
                assert len(up.links) == 2
                await up.links[1].ended()
                await relay.until(lambda: len(relay.client.sweep) == 0)


@on_both_loops
async def test_given_another_life_of_a_member_then_its_connections_are_not_used() -> None:
    async with RawUpstream(replies(answer(b"ok"))) as up, Relay(up.port) as relay:
        async with await RawClient.connect(relay.port) as client:
            client.post()
            await client.answer()
            assert relay.client.idle_connections == 1
            relay.client.drop("another")
            assert relay.client.idle_connections == 1
            relay.identity = "life-2"
            client.post()
            await client.answer()
            assert len(up.links) == 2

            relay.client.drop("life-1")
            await up.links[0].ended()
            assert relay.client.idle_connections == 1


@on_both_loops
async def test_given_late_bytes_on_a_resting_connection_then_they_are_nobodys_answer() -> None:
    async def script(link: Link) -> None:
        while await link.read_request() is not None:
            await link.send(answer(b"%d" % link.number))
            await relay.until(lambda: relay.client.idle_connections == 1)
            await link.send(answer(b"poison"))

    limits = UpstreamLimits(reuse_s=3600)
    async with RawUpstream(script) as up, Relay(up.port, upstream_limits=limits) as relay:
        async with await RawClient.connect(relay.port) as client:
            for number in range(3):
                client.post()
                assert (await client.answer()).body == b"%d" % number
                await up.links[number].ended()
                assert relay.client.open_connections == 0


@pytest.mark.parametrize("what", ["bytes", "end"])
@on_both_loops
async def test_given_something_the_loop_has_not_seen_yet_then_a_resting_connection_is_not_lent(
    what: str,
) -> None:
    async with RawUpstream(replies(answer(b"ok"))) as up, Relay(up.port) as relay:
        async with await RawClient.connect(relay.port) as client:
            client.post()
            await client.answer()
            assert relay.client.idle_connections == 1
            (resting,) = relay.client._open
            assert resting._transport is not None
            ours = resting._transport.get_extra_info("socket").fileno()
            number = up.links[0].writer.get_extra_info("socket").fileno()
            with socket.socket(fileno=os.dup(number)) as theirs:
                if what == "bytes":
                    theirs.send(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison")
                else:
                    theirs.shutdown(socket.SHUT_WR)
                # no await from here on: the loop cannot have looked
                assert select.select([ours], [], [], LIMIT_S)[0]

                assert relay.client.take(relay.endpoint()) is None
        await relay.until(lambda: relay.client.open_connections == 0)


@on_both_loops
async def test_given_a_reused_connection_that_dies_unanswered_then_a_fresh_one_is_tried() -> None:
    async def script(link: Link) -> None:
        assert await link.read_request() is not None
        await link.send(answer(b"%d" % link.number))
        if link.number % 2 == 0:
            await link.read_request()  # the second one: swallowed
            link.reset()
        else:
            await link.gone()

    async with RawUpstream(script) as up, Relay(up.port) as relay:
        async with await RawClient.connect(relay.port) as client:
            client.post(b"first")
            assert (await client.answer()).body == b"0"
            client.post(b"second" * 20_000)
            got = await client.answer()

            assert (got.status, got.body) == (200, b"1")
            assert [r.body[:6] for r in up.requests] == [b"first", b"second", b"second"]
            ended = [await relay.end(), await relay.end()]
            assert ended[1].body is not None
            assert (ended[1].body.iterations, ended[1].body.closed) == (2, 1)


@on_both_loops
async def test_given_a_member_that_ends_with_a_request_in_its_hands_then_no_second_try() -> None:
    async def script(link: Link) -> None:
        await link.read_request()
        await link.send(answer(b"ok"))
        await link.read_request()
        await up.stop_listening()
        link.reset()

    async with RawUpstream(script) as up, Relay(up.port) as relay:
        async with await RawClient.connect(relay.port) as client:
            client.post()
            assert (await client.answer()).status == 200
            client.post(b"poison")
            got = await client.answer()

            assert (got.status, got.body) == (502, b'{"error":{"code":"upstream_reset"}}')
            # `ConnectRefused` would be held again and sent to the next life of the member
            assert [type((await relay.end()).error) for _ in range(2)] == [
                type(None),
                UpstreamReset,
            ]
        assert len(up.requests) == 2


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 O", b"HTTP/1.1 100 Continue\r\n\r\n"])
@on_both_loops
async def test_given_a_fresh_connection_that_dies_before_an_answer_then_502_and_no_second_try(
    how: str, said: bytes
) -> None:
    async def script(link: Link) -> None:
        await link.read_request()
        if said:
            await link.send(said)
        getattr(link, how)()

    async with RawUpstream(script) as up, Relay(up.port) as relay:
        async with await RawClient.connect(relay.port) as client:
            client.post()
            got = await client.answer()

            assert (got.status, got.body) == (502, b'{"error":{"code":"upstream_reset"}}')
        assert len(up.requests) == 1


@on_both_loops
async def test_given_a_reused_connection_that_dies_mid_head_then_502_and_no_second_try() -> None:
    async def script(link: Link) -> None:
        await link.read_request()
        await link.send(answer(b"ok"))
        await link.read_request()
        await link.send(b"HTTP/1.1 200")

    async with RawUpstream(script) as up, Relay(up.port) as relay:
        async with await RawClient.connect(relay.port) as client:
            client.post()
            await client.answer()
            client.post()

            assert (await client.answer()).status == 502
        assert len(up.requests) == 2


@on_both_loops
async def test_given_an_upstream_that_closes_after_each_answer_then_no_client_notices() -> None:
    async with RawUpstream(replies(answer(b"ok"), keep=False)) as up, Relay(up.port) as relay:
        async with await RawClient.connect(relay.port) as client:
            for _ in range(200):
                client.post()
                assert (await client.answer()).status == 200
        assert len(up.requests) == 200


@on_both_loops
async def test_given_nobody_listens_then_the_request_can_be_held_again() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        for host in ("127.0.0.1", "localhost"):
            async with Relay(nobody.getsockname()[1], host_of_upstream=host) as relay:
                async with await RawClient.connect(relay.port) as client:
                    client.post()
                    assert (await client.answer()).status == 502
                ended = await relay.end()
                assert isinstance(ended.error, ConnectRefused) and ended.error.reason == "refused"
                assert ended.body is not None and ended.body.closed == 0


@on_both_loops
async def test_given_a_name_with_an_address_that_refuses_then_the_next_one_is_tried() -> None:
    # 127.0.0.1 alone is listened on; localhost is ::1 too on most machines
    async with RawUpstream(replies(answer(b"ok"))) as up:
        async with Relay(up.port, host_of_upstream="localhost") as relay:
            async with await RawClient.connect(relay.port) as client:
                client.post()
                assert (await client.answer()).status == 200
        assert up.requests[0].values("host") == [f"localhost:{up.port}"]


@on_both_loops
async def test_given_an_upstream_with_tls_then_its_name_is_checked_and_all_else_is_the_same() -> (
    None
):
    big = b"x" * (4 << 20)

    async def script(link: Link) -> None:
        while (seen := await link.read_request()) is not None:
            await link.send(answer(seen.body))

    async with RawUpstream(script, tls=server_context()) as up:
        for host in ("localhost", "127.0.0.1"):
            async with Relay(up.port, host_of_upstream=host, tls=client_context()) as relay:
                async with await RawClient.connect(relay.port) as client:
                    for body in (b"{}", big, b"{}"):
                        client.post(body)
                        got = await client.answer()
                        assert (got.status, got.complete, got.body == body) == (200, True, True)

        async with Relay(up.port, tls=ssl.create_default_context()) as relay:
            async with await RawClient.connect(relay.port) as client:
                client.post()
                assert (await client.answer()).status == 502
            error = (await relay.end()).error
            assert isinstance(error, ConnectRefused) and error.reason == "tls"
    assert len(up.requests) == 6


@pytest.mark.skipif(sys.platform != "linux", reason="has no 127.0.0.2 without being told")
@on_both_loops
async def test_given_an_upstream_with_another_name_than_its_certificate_then_it_gets_nothing() -> (
    None
):
    async with RawUpstream(replies(answer(b"ok")), tls=server_context(), host="127.0.0.2") as up:
        tls = client_context()
        async with Relay(up.port, host_of_upstream="127.0.0.2", tls=tls) as relay:
            async with await RawClient.connect(relay.port) as client:
                client.post()
                assert (await client.answer()).status == 502
        assert not up.requests


@on_both_loops
async def test_given_a_member_that_is_still_loading_then_the_request_can_be_held_again() -> None:
    raw = answer(
        b'{"error":{"message":"Loading model","type":"unavailable_error","code":503}}',
        status=b"503 Service Unavailable",
    )
    async with RawUpstream(replies(raw)) as up, Relay(up.port) as relay:
        async with await RawClient.connect(relay.port) as client:
            client.post()
            await client.answer()
            ended = await relay.end()
            assert isinstance(ended.error, MemberLoading)
            assert ended.body is not None and ended.body.closed == 0

            relay.options["may_be_loading"] = False
            client.post()
            got = await client.answer()
            assert (got.status, got.body) == (503, raw.partition(b"\r\n\r\n")[2])


@on_both_loops
async def test_given_a_503_that_is_long_then_it_is_not_kept_back() -> None:
    async def script(link: Link) -> None:
        await link.read_request()
        await link.send(b"HTTP/1.1 503 Busy\r\nContent-Length: 20001\r\n\r\n" + b"x" * 20_000)
        await seen.wait()
        await link.send(b"y")

    seen = asyncio.Event()
    async with RawUpstream(script) as up, Relay(up.port) as relay:
        async with await RawClient.connect(relay.port) as client:
            client.post()
            assert (await client.read_until(b"\r\n\r\n")).startswith(b"HTTP/1.1 503")
            seen.set()
            assert (await client.read_until(b"y")) == b"x" * 20_000 + b"y"


@pytest.mark.parametrize("size", [10, 15_000, 100_000])
@on_both_loops
async def test_given_a_503_for_another_reason_then_it_passes_unchanged(size: int) -> None:
    body = b"x" * size
    async with RawUpstream(replies(answer(body, status=b"503 Busy"))) as up:
        async with Relay(up.port) as relay:
            async with await RawClient.connect(relay.port) as client:
                for _ in range(2):
                    client.post()
                    got = await client.answer()
                    assert (got.status, got.body, got.complete) == (503, body, True)


# -- deadlines -------------------------------------------------------------------------------


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
            assert await client.closed()
            ended = await relay.end()
            assert (ended.outcome, ended.result and ended.result.code) == (
                "upstream_error",
                "upstream_timeout",
            )
            await up.links[0].ended()


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


# -- flow control ----------------------------------------------------------------------------


def flood(total: int, *, stream: bool = False) -> Script:
    """Send *total* bytes as fast as they are taken; close in the end."""

    async def script(link: Link) -> None:
        if await link.read_request() is None:
            return
        piece = b"data: %b\n\n" % (b"x" * 65528)
        if stream:
            await link.send(STREAM_HEAD)
        else:
            await link.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
        for _ in range(total // len(piece)):
            if link.writer.is_closing():
                return
            await link.send(chunk(piece) if stream else piece)
        if stream:
            await link.send(LAST_CHUNK)

    return script


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
    assert "on purpose" in caplog.text


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


# -- clients that leave ----------------------------------------------------------------------


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


# -- streams that break ----------------------------------------------------------------------

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
            raw = b""
            while data := await client.read():
                raw += data

            body = raw
            if version == b"1.1":
                assert raw.endswith(LAST_CHUNK), "framed as a whole answer"
                body = _unchunk(raw)
            events = body.replace(b"\r\n", b"\n").split(b"\n\n")
            assert events[-1] == b"" and events[-2].startswith(LAST_EVENT[family])
            assert b"upstream_reset" in events[-2] and b"[DONE]" not in body
            assert body.startswith(sent)
            assert ended.result is not None
            assert (ended.outcome, ended.result.code) == ("upstream_error", "upstream_reset")


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
        ("drain_timeout", "pool_draining", 503),
        ("max_generation", "upstream_timeout", 504),
        ("resident_hung", "upstream_timeout", 504),
        ("resident_lost", "upstream_reset", 502),
    ],
)
@pytest.mark.parametrize("begun", [False, True])
@on_both_loops
async def test_given_the_runtime_ends_an_exchange_then_the_client_is_told_and_the_upstream_let_go(
    reason: str, code: str, status: int, begun: bool
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
        break_off("drain_timeout")
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


# -- many ------------------------------------------------------------------------------------


@on_both_loops
async def test_given_pipelined_requests_then_they_are_answered_in_order() -> None:
    async def script(link: Link) -> None:
        while (seen := await link.read_request()) is not None:
            if int(seen.body) % 3:
                await link.send(answer(seen.body))
            else:
                await link.send(CHUNKED_HEAD + chunk(seen.body) + LAST_CHUNK)

    async with RawUpstream(script) as up, Relay(up.port) as relay:
        async with await RawClient.connect(relay.port) as client:
            client.send(b"".join(post(b"%d" % n) for n in range(50)))
            got = [int((await client.answer()).body) for _ in range(50)]

            assert got == list(range(50))


@on_both_loops
async def test_given_ten_thousand_mixed_requests_then_each_gets_its_own_answer() -> None:
    async def script(link: Link) -> None:
        while (seen := await link.read_request()) is not None:
            kind = int(seen.body) % 7
            if kind == 0:
                await link.send(CHUNKED_HEAD + chunk(seen.body) + LAST_CHUNK)
            elif kind == 1:
                await link.send(STREAM_HEAD + chunk(seen.body) + LAST_CHUNK)
            elif kind == 2:
                await link.send(answer(seen.body, b"Connection: close"))
                return
            elif kind == 3:
                await link.send(answer(seen.body))
                return  # as if it went on, but it does not
            elif kind == 4:
                await link.send(b"HTTP/1.1 200 OK\r\n\r\n" + seen.body)
                return
            else:
                await link.send(answer(seen.body))

    async def one(number: int, count: int) -> None:
        async with await RawClient.connect(relay.port) as client:
            for base in range(number * count, (number + 1) * count, 5):
                client.send(b"".join(post(b"%d" % n) for n in range(base, base + 5)))
                for expected in range(base, base + 5):
                    got = await client.answer()
                    assert (got.status, got.complete) == (200, True)
                    assert got.body == b"%d" % expected

    async with RawUpstream(script) as up, Relay(up.port) as relay:
        await asyncio.gather(*(one(number, 1250) for number in range(8)))

        outcomes = [relay.ended.get_nowait().outcome for _ in range(10_000)]
        assert set(outcomes) == {"served"} and relay.ended.empty()
        await relay.until(lambda: relay.client.open_connections == relay.client.idle_connections)
        await relay.until(lambda: relay.client.open_connections == 0)
        await relay.until(lambda: len(relay.client.sweep) == 0)
