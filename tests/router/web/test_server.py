"""The hardened server: who leaves is noticed, who is refused can read why, bugs stay quiet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import http_parser, web

from bothloops import on_both_loops
from fronts import is_own
from modelpool_router.web.errors import ApiError
from modelpool_router.web.front import OwnConnection
from modelpool_router.web.intake import IntakeLimits
from modelpool_router.web.request import Request
from modelpool_router.web.server import (
    ParserMissing,
    ServerOptions,
    make_server,
    require_c_parser,
)
from rawclient import BadAnswer, RawClient
from stubfront import KEY, stub_front

pytestmark = pytest.mark.usefixtures("either_front")

AUTH = f"Authorization: Bearer {KEY}\r\n".encode()
P = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n" + AUTH
J = b'{"model":"m"}'
POST = P + b"Content-Length: 13\r\n\r\n" + J
GET = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n" + AUTH + b"\r\n"


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until *condition* holds."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def requests_behind(connection: Any) -> int:
    """Return how many requests of a connection were seen and wait for their turn."""
    if isinstance(connection, OwnConnection):
        return connection._backlog.count(b"\r\n\r\n")
    return len(connection._messages)


class Served:
    """A server around one handler, for what the stub does not do."""

    def __init__(
        self,
        handler: Callable[[Request], Awaitable[web.StreamResponse]],
        options: ServerOptions | None = None,
    ) -> None:
        self._handler = handler
        self._options = options

    async def __aenter__(self) -> RawClient:
        options = replace(self._options or ServerOptions(), own_front=is_own())
        self.server = make_server(self._handler, options)
        self._listener = await asyncio.get_running_loop().create_server(self.server, "127.0.0.1", 0)
        self.address = self._listener.sockets[0].getsockname()[:2]
        self.client = RawClient(*self.address)
        return await self.client.__aenter__()

    async def __aexit__(self, *error: object) -> None:
        self.client.close()
        self._listener.close()
        await self.server.shutdown(0.2)
        await self._listener.wait_closed()


# --- clients that leave ---------------------------------------------------------------------------


@pytest.mark.parametrize("leave", [RawClient.close, RawClient.reset])
@pytest.mark.parametrize("behind", [0, 1, 31, 32, 33, 200, 3000])
async def test_a_client_that_leaves_is_noticed_however_much_it_pipelined(
    behind: int, leave: Callable[[RawClient], None]
) -> None:
    """Stock aiohttp stops reading at 32 waiting requests and then sees nothing any more."""
    async with stub_front() as (front, stub, server):
        stub.hold = asyncio.Event()
        async with RawClient(front.host, front.port) as client:
            await client.send(POST)
            await stub.arrived.wait()
            await client.send(GET * behind)
            assert stub.held == 1
            leave(client)
            await asyncio.wait_for(stub.left.wait(), 20)
        await until(lambda: not server.connections)
        assert stub.held == 0
        assert stub.ledger.held_bytes == 0
        assert stub.demands == ["m"]


async def test_a_client_with_a_big_body_behind_a_held_request_is_noticed() -> None:
    """A second body that nobody reads yet may not stop the reading of the socket."""
    async with stub_front() as (front, stub, _):
        stub.hold = asyncio.Event()
        async with RawClient(front.host, front.port) as client:
            await client.send(POST)
            await stub.arrived.wait()
            await client.send(P + b"Content-Length: 5000000\r\n\r\n" + b" " * 5_000_000)
            client.close()
            await asyncio.wait_for(stub.left.wait(), 20)


async def test_a_big_body_behind_a_held_request_costs_the_connection_only() -> None:
    """The held one and those read whole are answered, and the last answer says that it ends."""
    async with stub_front() as (front, stub, _):
        stub.hold = asyncio.Event()
        async with RawClient(front.host, front.port) as client:
            await client.send(POST)
            await stub.arrived.wait()
            big = P + b"Content-Length: 5000000\r\n\r\n" + b" " * 5_000_000
            await client.send(GET + big)
            stub.hold.set()
            answers = [await client.answer(), await client.answer()]
            assert [(each.status, each.closing) for each in answers] == [(200, False), (200, True)]
            assert await client.ended() == b""


async def test_one_request_of_a_connection_is_held_at_a_time() -> None:
    """Pipelined ones wait unseen until the one before them is answered, and come in order."""
    async with stub_front() as (front, stub, _):
        stub.hold = asyncio.Event()
        async with RawClient(front.host, front.port) as client:
            await client.send(POST * 10)
            await stub.arrived.wait()
            assert (stub.held, len(stub.demands)) == (1, 1)
            stub.hold.set()
            for _ in range(10):
                assert (await client.answer()).status == 200
        assert len(stub.demands) == 10


@pytest.mark.parametrize("count", [33, 200, 500])
async def test_pipelined_requests_are_answered_in_order_or_the_end_is_announced(count: int) -> None:
    """Up to the backlog all are answered; beyond it the connection says that it ends."""
    async with stub_front() as (front, _, _):
        async with RawClient(front.host, front.port) as client:
            await client.send(GET * count)
            answered = 0
            closing = False
            while answered < count and not closing:
                answer = await client.answer()
                assert answer.status == 200
                answered += 1
                closing = answer.closing
            if closing:
                assert await client.ended() == b""
            else:
                assert answered == count


async def test_overflowing_pipelines_end_with_the_answer_under_way() -> None:
    """What lies behind is dropped, and the client is told."""
    async with stub_front() as (front, stub, _):
        stub.hold = asyncio.Event()
        async with RawClient(front.host, front.port) as client:
            await client.send(POST)
            await stub.arrived.wait()
            sending = asyncio.get_running_loop().create_task(client.send(GET * 5000))
            await until(lambda: sending.done())
            stub.hold.set()
            answer = await client.answer()
            while not answer.closing:
                answer = await client.answer()
            assert await client.ended() == b""


async def test_a_broken_request_behind_a_held_one_does_not_disturb_it() -> None:
    """The held one is answered; then the broken one gets its 400, and the connection ends."""
    async with stub_front() as (front, stub, server):
        stub.hold = asyncio.Event()
        async with RawClient(front.host, front.port) as client:
            await client.send(POST)
            await stub.arrived.wait()
            (connection,) = server.connections
            await client.send(GET)
            await until(lambda: requests_behind(connection) == 1)
            await client.send(b"GET / HTTP/1.1\r\nBad Field: x\r\n\r\n" + GET)
            await until(lambda: requests_behind(connection) >= 2)
            stub.hold.set()
            assert (await client.answer()).status == 200
            assert (await client.answer()).status == 200
            answer = await client.answer()
            assert (answer.status, answer.closing) == (400, True)
            assert await client.ended() == b""


# --- answers --------------------------------------------------------------------------------------


async def test_old_clients_and_head_are_answered_right() -> None:
    """HTTP/1.0 closes unless asked to stay; HEAD has a length and no body."""
    async with stub_front() as (front, _, _):
        async with RawClient(front.host, front.port) as client:
            await client.send(GET.replace(b"GET", b"HEAD"))
            answer = await client.answer(head=True)
            assert answer.status == 200
            assert int(answer.header("content-length") or 0) > 0
            await client.send(GET.replace(b"1.1", b"1.0"))
            assert (await client.answer()).status == 200
            assert await client.ended() == b""
        async with RawClient(front.host, front.port) as client:
            stay = GET.replace(b"1.1", b"1.0").replace(b"Host", b"Connection: keep-alive\r\nHost")
            for _ in range(2):
                await client.send(stay)
                assert (await client.answer()).header("connection") == "keep-alive"


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("abc-123_x.Y", True),
        ("a" * 128, True),
        ("a" * 129, False),
        ("", False),
        ("a b", False),
        ("-a", False),
        ("é", False),
        ('"><script>', False),
    ],
)
async def test_request_ids_of_clients_are_kept_when_plain(sent: str, kept: bool) -> None:
    """They end up in logs and headers: short and harmless ones only."""
    raw = GET.replace(b"\r\n\r\n", f"\r\nx-request-id: {sent}\r\n\r\n".encode())
    async with stub_front() as (front, _, _):
        async with RawClient(front.host, front.port) as client:
            await client.send(raw)
            answer = await client.answer()
            assert (answer.header("x-request-id") == sent) is kept
            assert answer.header("request-id") == answer.header("x-request-id")


async def test_too_many_connections_are_turned_away_with_an_answer() -> None:
    """Those that are there go on; a place that gets free can be had."""
    options = ServerOptions(max_connections=2)
    async with stub_front(options=options) as (front, stub, server):
        async with RawClient(front.host, front.port) as one:
            async with RawClient(front.host, front.port) as two:
                for client in (one, two):
                    await client.send(GET)
                    assert (await client.answer()).status == 200
                async with RawClient(front.host, front.port) as three:
                    answer = await three.answer()
                    assert (answer.status, answer.closing) == (503, True)
                    assert answer.header("retry-after")
                    assert answer.json()["error"]["code"] == "queue_full"
                await one.send(GET)
                assert (await one.answer()).status == 200
            await until(lambda: len(server.connections) == 1)
            async with RawClient(front.host, front.port) as four:
                await four.send(GET)
                assert (await four.answer()).status == 200
        assert stub.refused == ["queue_full"]


async def test_a_bug_in_a_handler_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """500 in our shape; the log says where, and quotes nothing."""

    async def handler(request: Request) -> web.StreamResponse:
        raise KeyError(request.headers["X-Secret"])

    with caplog.at_level(logging.DEBUG):
        async with Served(handler) as client:
            for _ in range(2):
                await client.send(GET.replace(AUTH, b"X-Secret: hunter2\r\n"))
                answer = await client.answer()
                assert (answer.status, answer.closing) == (500, False)
                assert answer.json()["error"]["code"] == "internal_error"
                assert answer.json()["error"]["type"] == "server_error"
                assert b"hunter2" not in answer.body

    told = "".join(repr(record.__dict__) for record in caplog.records)
    assert "KeyError" in told
    assert "test_server.py" in told
    assert "hunter2" not in told


async def test_no_error_follows_an_answer_that_has_begun(caplog: pytest.LogCaptureFixture) -> None:
    """Whether aiohttp or somebody past it began: the client must see that it broke off."""

    async def past(request: Request) -> web.StreamResponse:
        assert request.transport is not None
        request.answer_begun = True
        request.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nbeg")
        raise RuntimeError

    async def through(request: Any) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"beg")
        raise RuntimeError

    # (behind the own front nobody writes through aiohttp)
    for handler in (past,) if is_own() else (past, through):
        async with Served(handler) as client:
            await client.send(GET)
            with pytest.raises(BadAnswer):
                await client.answer()
    assert "request handler failed" in caplog.text


async def test_errors_of_handlers_carry_what_they_say() -> None:
    """Status, code, retry advice and headers of an ApiError come out as they are."""

    async def handler(request: Request) -> web.StreamResponse:
        raise ApiError.of(
            "member_failed", "It broke.", retry_after_s=400, retryable=False, headers={"X-A": "b"}
        )

    async with Served(handler) as client:
        await client.send(GET)
        answer = await client.answer()

    assert answer.status == 503
    assert answer.header("retry-after") == "60"
    assert answer.header("retry-after-ms") == "60000"
    assert answer.header("x-should-retry") == "false"
    assert answer.header("x-a") == "b"


# --- kept connections -----------------------------------------------------------------------------


async def test_one_connection_for_all_kinds_of_requests() -> None:
    """Whatever is asked, or refused, in between: answers come in order and leave nothing behind."""
    around = (
        (GET, 200),
        (GET.replace(b"GET", b"HEAD", 1), 200),
        (GET.replace(b"/v1/models", b"/nothing/here"), 404),
        (GET.replace(b"/v1/models", b"/v1/models?a=b"), 200),
        (P + b"Content-Length: 5\r\n\r\n[1,2]", 400),
        (P.replace(b"chat", b"chatter") + b"Content-Length: 13\r\n\r\n" + J, 404),
        (P.replace(AUTH, b"") + b"Content-Length: 13\r\n\r\n" + J, 401),
        (P + b"Transfer-Encoding: chunked\r\n\r\nd\r\n" + J + b"\r\n0\r\n\r\n", 200),
        (POST.replace(b"POST", b"PUT", 1), 405),
    )
    async with stub_front() as (front, stub, server):
        async with RawClient(front.host, front.port) as client:
            for request, status in around:
                for sent, expected in ((POST, 200), (request, status), (POST, 200)):
                    await client.send(sent)
                    got = await client.answer(head=sent.startswith(b"HEAD"))
                    assert (got.status, got.closing) == (expected, False), request
            expects = P + b"Content-Length: 13\r\nExpect: 100-continue\r\n\r\n"
            for _ in range(2):
                await client.send(expects)
                assert (await client.answer()).status == 100
                await client.send(J)
                assert (await client.answer()).status == 200
                await client.send(POST)
                assert (await client.answer()).status == 200
            assert len(server.connections) == 1
        assert set(stub.bodies) == {J}


@pytest.mark.parametrize("head", [P, P.replace(AUTH, b"")], ids=["413", "401"])
async def test_nothing_is_read_behind_a_body_that_was_not(head: bytes) -> None:
    """What comes behind a refused head may be its body, whatever it looks like."""
    async with stub_front(limits=IntakeLimits(max_body_bytes=100)) as (front, stub, server):
        async with RawClient(front.host, front.port) as client:
            await client.send(POST)
            assert (await client.answer()).status == 200
            await client.send(head + b"Content-Length: 5000\r\n\r\n" + POST + POST)
            got = await client.answer()
            assert (got.status, got.closing) == (401 if head != P else 413, True)
            assert await client.ended() == b""
        await until(lambda: not server.connections)
        assert stub.bodies == [J]


@pytest.mark.parametrize("cut", [1, 30, -3, 0])
async def test_what_comes_together_with_an_answer_is_behind_what_was_kept(cut: int) -> None:
    """The rest of a request arrives when the one before is answered, and its beginning waits."""
    second, third = (
        P + b"X-Request-Id: mine-%d\r\nContent-Length: 13\r\n\r\n" % number + J for number in (2, 3)
    )
    behind = second + third
    at = cut if cut > 0 else len(second) + cut
    async with stub_front() as (front, stub, server):
        stub.hold = asyncio.Event()
        async with RawClient(front.host, front.port) as client:
            await client.send(POST)
            await stub.arrived.wait()
            [connection] = server.connections
            connection.data_received(behind[:at])

            stub.hold.set()
            asyncio.get_running_loop().call_soon(connection.data_received, behind[at:])

            got = [await client.answer() for _ in range(3)]
            assert [each.status for each in got] == [200, 200, 200]
            assert [each.header("x-request-id") for each in got[1:]] == ["mine-2", "mine-3"]


# --- the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [True, False])
@on_both_loops
async def test_what_has_arrived_when_draining_begins_is_answered(kept: bool) -> None:
    """A connection with an unread request is not idle; closing it would be a reset."""
    async with stub_front() as (front, _, server):
        async with RawClient(front.host, front.port) as client:
            await until(lambda: len(server.connections) == 1)
            if kept:
                await client.send(POST)
                assert (await client.answer()).closing is False
            await client.send(POST)  # (the server has had no turn yet to read it)

            server.begin_drain()

            got = await client.answer()
            assert (got.status, got.closing) == (200, True)
            assert await client.ended() == b""


async def test_draining_closes_idle_connections_and_announces_the_rest() -> None:
    """Running requests finish; every answer from then on ends its connection."""
    async with stub_front() as (front, stub, server):
        stub.hold = asyncio.Event()
        async with (
            RawClient(front.host, front.port) as idle,
            RawClient(front.host, front.port) as fresh,
            RawClient(front.host, front.port) as busy,
        ):
            await idle.send(GET)
            assert (await idle.answer()).status == 200
            await busy.send(POST)
            await stub.arrived.wait()
            await until(lambda: len(server.connections) == 3)

            server.begin_drain()

            assert await idle.ended() == b""
            assert await fresh.ended() == b""
            stub.hold.set()
            answer = await busy.answer()
            assert (answer.status, answer.closing) == (200, True)
            assert await busy.ended() == b""
            async with RawClient(front.host, front.port) as late:
                await late.send(GET)
                answer = await late.answer()
                assert (answer.status, answer.closing) == (200, True)


async def test_shutdown_cancels_what_does_not_end_in_time() -> None:
    """Nobody can keep the router from stopping."""
    async with stub_front() as (front, stub, server):
        stub.hold = asyncio.Event()
        async with RawClient(front.host, front.port) as client:
            await client.send(POST)
            await stub.arrived.wait()
            await server.shutdown(0.05)
            await asyncio.wait_for(stub.left.wait(), 20)
            assert await client.ended() == b""


def test_the_lenient_parser_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python parser reads several inputs differently from what was tested."""
    require_c_parser()
    monkeypatch.setattr(
        "modelpool_router.web.server.HttpRequestParser", http_parser.HttpRequestParserPy
    )
    with pytest.raises(ParserMissing, match="AIOHTTP_NO_EXTENSIONS"):
        require_c_parser()
