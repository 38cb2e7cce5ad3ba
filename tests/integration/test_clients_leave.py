"""A client that leaves costs nothing more from that moment on (H14)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Literal

import pytest

from fakemembers import until
from modelpool_router.core.headers import AnswerHead
from modelpool_router.web.short import ShortExchange
from rawclient import RawClient
from rawupstream import STREAM_HEAD, Link, SeenRequest, answer, chunk
from scripted import Life, scripted, scripted_pool
from served import LIMIT_S, Json, Served, ServedProcess, all_of, member, pool, served, served_here

How = Literal["closes", "resets", "half-closes"]
HOW: tuple[How, ...] = ("closes", "resets", "half-closes")


async def ask(router: Served, client: RawClient, model: str, **fields: Any) -> None:
    """Send a request and read nothing."""
    body = json.dumps(router.body(model, **fields)).encode()
    last = "Connection: close\r\n" if router.clients_close else ""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n{last}Content-Length: {len(body)}\r\n"
    await client.send(head.encode() + b"\r\n" + body)


def leave(client: RawClient, how: How) -> None:
    """Go."""
    match how:
        case "closes":
            client.close()
        case "resets":
            client.reset()
        case "half-closes":
            client.socket.shutdown(1)


async def seen_by(router: Served, name: str) -> list[Json]:
    """Return the requests that reached the life of a member that runs now."""
    port = router.members.events("start", name)[-1]["port"]
    async with router.session.get(f"http://127.0.0.1:{port}/debug/requests") as response:
        return list(await response.json())


async def until_at_work(router: Served, name: str, *, tokens: int = 0, count: int = 1) -> None:
    """Wait until *count* requests are being worked on, each with some *tokens* sent."""
    await router.until_resident(name)

    async def is_at_work() -> bool:
        running = [each for each in await seen_by(router, name) if each["finished_at"] is None]
        return len([each for each in running if each["tokens_sent"] >= tokens]) >= count

    await until(is_at_work, f"{name} at work")


async def until_let_go(router: Served, name: str, *, count: int = 1) -> None:
    """
    Wait until the member saw its clients go.

    All that is asked of it in these tests takes longer than this waits.
    """

    async def is_let_go() -> bool:
        return all(
            each["disconnected_at"] is not None or each["finished_at"] is not None
            for each in await seen_by(router, name)
        )

    await until(is_let_go, f"{name} let go")
    gone = [each["disconnected_at"] for each in await seen_by(router, name)]
    assert len([each for each in gone if each is not None]) == count


@pytest.mark.parametrize("how", HOW)
async def test_while_held_no_useless_swap_begins(tmp_path: Path, how: How) -> None:
    """Nobody is left who wants the other member, so the resident stays when it is free."""
    async with served_here(tmp_path, pool(member("alpha"), member("beta"))) as router:
        async with router.stream("alpha", x_chunks=12, x_gap_ms=25) as stream:
            await stream.tokens(1)
            async with router.raw() as client:
                await ask(router, client, "beta")
                await router.until_held("beta")
                leave(client, how)
                view = await router.until_held("beta", 0)
            assert view["in_flight"] == 1
            await stream.rest()
        assert stream.is_complete
        line = await router.wait_for_log("request")
        assert line["outcome"] == "client_gone"
        await router.answered("alpha")
        assert (router.starts("alpha"), router.starts("beta")) == (1, 0)
        assert await router.metric("modelpool_requests_total", outcome="client_gone") == 1


@pytest.mark.usefixtures("either_client")
async def test_while_admission_is_closed_for_it_admission_reopens(tmp_path: Path) -> None:
    """The turn had ended already; whoever came for the resident meanwhile is served by it."""
    async with served_here(tmp_path, pool(member("alpha"), member("beta"), maxTurn="0s")) as router:
        async with router.stream("alpha", x_chunks=30, x_gap_ms=25) as stream:
            await stream.tokens(1)
            async with router.raw() as client:
                await ask(router, client, "beta")
                await router.wait_for(lambda v: v["admission"] == "closed", "the turn ended")
                late = router.begin(router.answered("alpha"))
                await router.until_held("alpha")
                leave(client, "closes")
                await late
                assert not stream.is_complete
            await stream.rest()
        assert (router.starts("alpha"), router.starts("beta")) == (1, 0)


@pytest.mark.parametrize("how", HOW)
async def test_while_it_loads_the_load_goes_on(tmp_path: Path, how: How) -> None:
    """The load is paid for by then; a second try finds the member warm."""
    async with served_here(tmp_path, pool(member("alpha", load=0.4), member("beta"))) as router:
        async with router.raw() as client:
            await ask(router, client, "alpha")
            await router.wait_for(lambda v: v["state"] == "loading", "alpha loads")
            leave(client, how)
            await router.until_held("alpha", 0)
        view = await router.until_resident("alpha")
        assert view["in_flight"] == 0
        await router.answered("alpha")
        assert router.starts("alpha") == 1
        assert len(await router.swaps()) == 1


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
async def test_before_the_first_byte_the_member_is_let_go(
    tmp_path: Path, how: How, streamed: bool
) -> None:
    """Nothing is written to such a client, so that its absence has to be noticed by looking."""
    async with served_here(tmp_path, pool(member("alpha"), member("beta"))) as router:
        await router.answered("alpha")
        async with router.raw() as client:
            await ask(router, client, "alpha", stream=streamed, x_delay_ms=60_000)
            await until_at_work(router, "alpha")
            leave(client, how)
            await until_let_go(router, "alpha")
        assert (await router.answered("beta")).member == "beta"


@pytest.mark.parametrize("how", HOW)
async def test_in_the_middle_of_a_stream_the_member_is_let_go(tmp_path: Path, how: How) -> None:
    async with served_here(tmp_path, pool(member("alpha"), member("beta"))) as router:
        async with router.raw() as client:
            await ask(router, client, "alpha", stream=True, x_chunks=10_000, x_gap_ms=10)
            await until_at_work(router, "alpha", tokens=3)
            leave(client, how)
            await until_let_go(router, "alpha")
        line = await router.wait_for_log("request")
        assert (line["outcome"], line["status"]) == ("client_gone", 200)
        assert line["bytes"] > 300
        assert (await router.answered("beta")).member == "beta"


async def test_a_client_that_stopped_reading_is_noticed_when_it_leaves(tmp_path: Path) -> None:
    """Its answer is stuck on the way, and the reset is seen although nothing can be written."""
    async with served_here(tmp_path, pool(member("alpha"), member("beta"))) as router:
        async with router.raw() as client:
            flood = {"x_chunks": 10_000, "x_chunk_bytes": 10_000}
            await ask(router, client, "alpha", stream=True, **flood)
            await until_at_work(router, "alpha", tokens=100)
            sent = -1
            while sent != (sent := (await seen_by(router, "alpha"))[0]["tokens_sent"]):
                await asyncio.sleep(0.1)
            assert sent < 2_000, "held back by the client, not read to its end"
            leave(client, "resets")
            await until_let_go(router, "alpha")


@pytest.mark.usefixtures("either_client")
async def test_ten_that_give_up_do_not_keep_the_slot(tmp_path: Path) -> None:
    """Non-streamed answers nobody waits for would run to their end and keep the other waiting."""
    members = (member("alpha", parallel=10), member("beta"))
    async with served_here(tmp_path, pool(*members)) as router:
        clients = [router.raw() for _ in range(10)]
        for client in clients:
            await client.__aenter__()
            await ask(router, client, "alpha", x_delay_ms=60_000)
        await until_at_work(router, "alpha", count=10)
        waiting = router.begin(router.answered("beta"))
        await router.until_held("beta")
        for number, client in enumerate(clients):
            leave(client, HOW[number % 2])
        await waiting  # held for less than those answers would have taken
        assert await router.metric("modelpool_requests_total", outcome="client_gone") == 10


async def two_hundred_leave(router: ServedProcess) -> None:
    """Let 200 clients ask for alpha, which loads, and go; half with a reset."""
    clients = [router.raw() for _ in range(200)]
    for client in clients:
        await client.__aenter__()
        await ask(router, client, "alpha")
    await router.until_held("alpha", 200)
    for number, client in enumerate(clients):
        leave(client, HOW[number % 2])
    await router.until_held("alpha", 0)


async def test_after_two_hundred_that_left_the_next_is_served_at_once(tmp_path: Path) -> None:
    members = (member("alpha", load=2.0), member("beta"))
    settings = {"maxHeldPerKey": 1000, "maxHeld": 200, "maxConnections": 201}
    async with served(tmp_path, pool(*members), **settings) as router:
        await two_hundred_leave(router)
        await router.answered("alpha")
        assert len(await seen_by(router, "alpha")) == 1
        assert router.starts("alpha") == 1
        gone = router.metric("modelpool_requests_total", outcome="client_gone")
        sums = await all_of(gone, router.metric("modelpool_requests_total"))
        assert sums == [200, 201]
        assert await router.metric("modelpool_held_requests") == 0


async def test_as_its_answer_begins_nobody_is_left_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection to the client is lost already, and the handler has not been told yet."""
    let_go = asyncio.Event()

    async def engine(life: Life, link: Link, request: SeenRequest) -> bool:
        if b'"last"' not in request.body:
            await link.send(answer(b"{}"))
            return True
        await link.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
        await link.gone()
        let_go.set()
        return False

    see_head = ShortExchange.on_head

    def lose_the_client(exchange: ShortExchange, head: AnswerHead) -> None:
        if head.event_stream:
            for connection in router.router._front.connections:
                connection.transport.abort()
        see_head(exchange, head)

    monkeypatch.setattr(ShortExchange, "on_head", lose_the_client)
    async with scripted(tmp_path, scripted_pool("alpha"), answerer=engine) as router:
        async with router.raw() as client:
            await ask(router, client, "alpha")
            assert (await client.answer()).status == 200
            await ask(router, client, "alpha", which="last")
            async with asyncio.timeout(LIMIT_S):
                await let_go.wait()
        await router.wait_for_log("request", count=2)
        assert [line["outcome"] for line in router.log_lines("request")] == [
            "served",
            "client_gone",
        ]
