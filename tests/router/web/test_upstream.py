"""Connections to upstreams: when they are used again, lost, or cannot be made."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import ssl
import sys

import pytest

from bothloops import on_both_loops
from modelpool_router.web.faults import (
    ConnectRefused,
    MemberLoading,
    UpstreamReset,
)
from modelpool_router.web.upstream import UpstreamLimits
from rawupstream import (
    CHUNKED_HEAD,
    LAST_CHUNK,
    LIMIT_S,
    STREAM_HEAD,
    Link,
    RawUpstream,
    answer,
    chunk,
    replies,
)
from relay import RawClient, Relay
from tlspair import client_context, server_context


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
async def test_given_a_connection_then_small_writes_are_not_held_back() -> None:
    async with RawUpstream(replies(answer(b"ok"))) as up, Relay(up.port) as relay:
        connection = await relay.client.connect(relay.endpoint())
        assert connection._transport is not None
        sock = connection._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        connection.abort()
        await relay.until(lambda: relay.client.open_connections == 0)


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
