"""Clients keep their connections: what they send between, and while the router goes down."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest

from fronts import give_routers
from rawclient import BadAnswer, RawClient
from rawupstream import LAST_CHUNK, STREAM_HEAD, Link, SeenRequest, answer, chunk
from scripted import Life, ServedScripted, scripted, scripted_pool, settled
from served import ClientKind, clients_that


@pytest.fixture(params=["own", "aiohttp"], autouse=True)
def front(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run each test behind either front."""
    give_routers(request.param, monkeypatch)
    return str(request.param)


class Engine:
    """Answers at once; streams one event and then waits for *turn*."""

    def __init__(self) -> None:
        self.turn = asyncio.Event()
        self.streams = 0
        self.seen: list[SeenRequest] = []

    async def __call__(self, life: Life, link: Link, request: SeenRequest) -> bool:
        self.seen.append(request)
        if json.loads(request.body).get("stream"):
            await link.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
            self.streams += 1
            await self.turn.wait()
            await link.send(chunk(b"data: [DONE]\n\n") + LAST_CHUNK)
            return True
        await link.send(answer(b"{}", b"Content-Type: application/json"))
        return True


def post(**fields: Any) -> bytes:
    body = json.dumps({"model": "alpha", **fields}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


async def served_once(client: RawClient) -> None:
    """Make *client* one that keeps its connection."""
    await client.send(post())
    got = await client.answer()
    assert (got.status, got.closing) == (200, False)


async def test_a_stop_costs_no_request_that_a_member_has_seen(tmp_path: Path) -> None:
    """Each is answered, or its connection closed with no byte of an answer, and nobody worked."""
    engine, answers, ends = Engine(), 0, 0

    async def ask_on(client: RawClient) -> None:
        nonlocal answers, ends
        closing = False
        while not closing:
            try:
                await client.send(post())
                got = await client.answer()
            except ConnectionError:
                ends += 1
                return
            except BadAnswer as error:
                assert str(error) == "connection ended after b''"
                ends += 1
                return
            assert got.status == 200
            answers, closing = answers + 1, got.closing
        assert await client.ended() == b""

    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(
            scripted(tmp_path, scripted_pool("alpha"), answerer=engine)
        )
        clients = [await stack.enter_async_context(router.raw()) for _ in range(12)]
        asking = [router.begin(ask_on(client)) for client in clients]
        await settled(router, lambda: answers > 200, "requests")
        await router.stop()
        await asyncio.gather(*asking)
        assert len(engine.seen) == answers


async def test_what_is_behind_a_stream_when_a_stop_begins_is_not_begun(tmp_path: Path) -> None:
    """The stream ends as it should, and with it the connection."""
    engine = Engine()
    async with scripted(tmp_path, scripted_pool("alpha"), answerer=engine) as router:
        async with router.raw() as client:
            await served_once(client)
            await client.send(post(stream=True) + post())
            await settled(router, lambda: engine.streams == 1, "a stream")
            stop = router.begin(router.stop())
            await settled(router, lambda: router.router._front.draining, "the drain")
            engine.turn.set()
            assert (await client.answer()).body.endswith(b"[DONE]\n\n")
            assert await client.ended() == b""
            await stop
        assert len(engine.seen) == 2


async def test_what_is_behind_a_stream_comes_after_it(tmp_path: Path) -> None:
    engine = Engine()
    async with scripted(tmp_path, scripted_pool("alpha"), answerer=engine) as router:
        async with router.raw() as client:
            await served_once(client)
            await client.send(post(stream=True) + post() + post(stream=True) + post())
            await settled(router, lambda: engine.streams == 1, "a stream")
            engine.turn.set()
            for streams in (True, False, True, False):
                got = await client.answer()
                assert (got.closing, got.body.endswith(b"[DONE]\n\n")) == (False, streams)
            await served_once(client)
        assert len(engine.seen) == 6


@pytest.mark.parametrize("kept", [True, False])
async def test_a_body_on_its_way_when_a_stop_begins_is_waited_for(
    tmp_path: Path, kept: bool
) -> None:
    async with scripted(tmp_path, scripted_pool("alpha"), answerer=Engine()) as router:
        async with router.raw() as first, router.raw() as client:
            await served_once(client if kept else first)
            await settled(router, lambda: not router.router._data_port.active, "its end")
            await client.send(post()[:-4])
            await settled(router, lambda: is_in_body(router), "the beginning of a request")
            stop = router.begin(router.stop())
            await settled(router, lambda: not router.router._server.is_serving(), "no listener")
            for _ in range(100):  # (time enough to go wrong)
                await asyncio.sleep(0)
            await client.send(post()[-4:])
            got = await client.answer()
            assert (got.status, got.closing) == (200, True)
            await stop


def is_in_body(router: ServedScripted) -> bool:
    """Whether the router has a head and waits for its body."""
    own = router.router._front.own
    return bool(router.router._data_port.active) or any(each._missing for each in own)


async def test_what_arrives_with_the_end_of_the_delay_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that came during the delay and sends in the moment in which it is over."""
    keys = {"shutdownDelay": "100ms"}
    async with scripted(tmp_path, scripted_pool("alpha"), answerer=Engine(), **keys) as router:
        async with router.raw() as first:
            await served_once(first)
        server = router.router._server
        close: Callable[[], None] = server.close
        async with router.raw() as idle:

            def send_and_close() -> None:
                client.socket.send(post())
                close()

            monkeypatch.setattr(server, "close", send_and_close)
            stop = router.begin(router.stop())
            await settled(router, lambda: router.router._front.draining, "the drain")
            assert await idle.ended() == b""
            async with router.raw() as client:
                await settled(router, lambda: bool(router.router._front.connections), "a new one")
                got = await client.answer()
                assert (got.status, got.closing) == (200, True)
            await stop


@pytest.mark.parametrize("kind", ["keep", "close"])
async def test_clients_of_these_tests_are_what_they_say(tmp_path: Path, kind: ClientKind) -> None:
    """All of them keep connections where nothing else is said, and so see the own front."""
    with clients_that(kind) if kind == "close" else nullcontext():
        async with scripted(tmp_path, scripted_pool("alpha"), answerer=Engine()) as router:
            connections = set()
            for _ in range(3):
                got = await router.chat("alpha")
                assert (got.status, got.headers.get("Connection") == "close") == (
                    200,
                    kind == "close",
                )
                connections.update(router.router._front.connections)
            if kind == "keep":
                assert len(connections) == 1
            else:
                await settled(router, lambda: not router.router._front.connections, "closed ones")
