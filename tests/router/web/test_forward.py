"""Ordinary and malformed answers on their way to raw clients, and many of them."""

from __future__ import annotations

import asyncio
import gzip

import pytest

from bothloops import on_both_loops
from modelpool_router.core.headers import ExchangeIds
from rawupstream import (
    CHUNKED_HEAD,
    LAST_CHUNK,
    STREAM_HEAD,
    Link,
    RawUpstream,
    answer,
    chunk,
    replies,
)
from relay import RawClient, Relay, post

pytestmark = pytest.mark.usefixtures("either_front")

# -- ordinary answers --------------------------------------------------------------------------


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


# -- malformed answers -------------------------------------------------------------------------

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


# -- many --------------------------------------------------------------------------------------


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
