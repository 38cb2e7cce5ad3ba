"""
The short way through the router: ordinary requests look the same as on the general way, and
whatever is not ordinary goes on there, from wherever the short way had got to.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from modelpool_router.core.commands import BreakReason
from modelpool_router.core.spec import MemberName, PoolName
from modelpool_router.web.short import ShortExchange, ShortWay
from rawclient import RawAnswer, RawClient
from rawupstream import LAST_CHUNK, STREAM_HEAD, Link, SeenRequest, answer, chunk
from scripted import Life, ServedScripted, scripted, scripted_pool, settled
from served import LIMIT_S, Json

ALPHA = MemberName("alpha")
Script = Callable[[Life, Link, SeenRequest], Awaitable[bool]]


class Engine:
    """Answers each request by the next of *scripts*; beyond them plainly, with the number."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.seen: list[SeenRequest] = []
        self.links: list[int] = []

    async def __call__(self, life: Life, link: Link, request: SeenRequest) -> bool:
        self.seen.append(request)
        self.links.append(link.number)
        if len(self.seen) > 1 and self.scripts:
            # (the first request only makes a connection that then rests)
            return await self.scripts.pop(0)(life, link, request)
        await link.send(answer(b'{"n": %d}' % len(self.seen), b"Content-Type: application/json"))
        return True


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[ShortExchange]:
    """Every exchange that went the short way, at least at first."""
    begun: list[ShortExchange] = []
    begin = ShortWay.begin

    def watched(*args: Any) -> ShortExchange | None:
        exchange = begin(*args)
        if exchange is not None:
            begun.append(exchange)
        return exchange

    monkeypatch.setattr(ShortWay, "begin", watched)
    return begun


@asynccontextmanager
async def ready(
    folder: Path, *scripts: Script, pool: Json | None = None, **keys: Any
) -> AsyncIterator[tuple[ServedScripted, Engine, RawClient]]:
    """Run a router with a connection to its member that rests, and a client that is connected."""
    engine = Engine(*scripts)
    async with scripted(folder, pool or scripted_pool("alpha"), answerer=engine, **keys) as router:
        async with router.raw() as client:
            await client.send(post())
            assert (await client.answer()).status == 200
            yield router, engine, client
        await nothing_left(router)


async def nothing_left(router: ServedScripted) -> None:
    """Wait until every part has forgotten all requests."""
    inside = router.router
    pool, short = router.runtime(), inside._front.short
    assert short is not None
    await settled(router, lambda: not short.running, "exchanges on the short way")
    await settled(router, lambda: not inside._data_port.active, "requests")
    await settled(router, lambda: not inside._ledger.held_bytes, "bytes")
    await settled(router, lambda: not (pool.waiters or pool.lent), "waiters")
    await settled(router, lambda: not pool.view().in_flight, "leases")
    client = inside._client
    await settled(
        router, lambda: client.open_connections == client.idle_connections, "connections at work"
    )


def post(model: str = "alpha", pad: int = 0, *fields: bytes, **more: Any) -> bytes:
    """Return an ordinary request; *pad* makes its length another one."""
    body = json.dumps({"model": model, "pad": "x" * pad, **more}, separators=(",", ":")).encode()
    lines = b"".join(field + b"\r\n" for field in fields)
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        b"%bContent-Length: %d\r\n\r\n%b" % (lines, len(body), body)
    )


def seen_of(got: RawAnswer) -> tuple[int, dict[str, str], bytes]:
    """Return what must be the same on both ways."""
    ours = ("x-request-id", "request-id", "x-modelpool-held-ms")
    headers = {name.lower(): value for name, value in got.headers if name.lower() not in ours}
    return got.status, headers, got.body


async def test_both_ways_look_the_same(tmp_path: Path, taken: list[ShortExchange]) -> None:
    """To the client, to the member, in the log and in the metrics."""

    async def same(life: Life, link: Link, request: SeenRequest) -> bool:
        await link.send(answer(b"{}", b"Content-Type: application/json", b"X-Engine: a"))
        return True

    fields = (b"User-Agent: u", b"Traceparent: 00-1", b"Cookie: no", b"X-Request-Id: mine-%d")
    async with ready(tmp_path, same, same) as (router, engine, client):
        await client.send(post("alpha", 5, *fields) % 1)
        short = await client.answer()
        assert len(taken) == 1
        router.router._front.short, kept = None, router.router._front.short
        await client.send(post("alpha", 5, *fields) % 2)
        general = await client.answer()
        router.router._front.short = kept

        assert len(taken) == 1
        assert seen_of(short) == seen_of(general)
        ids = [got.header("x-request-id") for got in (short, general)]
        assert ids == ["mine-1", "mine-2"]
        assert short.header("x-modelpool-held-ms") == "0"
        first, second = engine.seen[1:]
        assert first.head == second.head.replace(b"mine-2", b"mine-1")
        assert first.body == second.body
        assert engine.links[1] == engine.links[2], "on the connection that rested"
        lines = [await router.wait_for_log("request", count=number) for number in (2, 3)]
        times = {"timestamp", "request_id", "held_ms", "ttfb_ms", "duration_ms"}
        assert lines[0].keys() == lines[1].keys()
        kept_lines = [{k: v for k, v in line.items() if k not in times} for line in lines]
        assert kept_lines[0] == kept_lines[1]


async def test_heads_that_differ_in_their_length_alone(
    tmp_path: Path, taken: list[ShortExchange]
) -> None:
    async with ready(tmp_path) as (_, engine, client):
        for pad in (0, 1, 9, 90, 900, 9000, 3, 0):
            await client.send(post("alpha", pad))
            got = await client.answer()

            assert got.json() == {"n": len(engine.seen)}
            assert json.loads(engine.seen[-1].body)["pad"] == "x" * pad
        assert len(taken) == 8


async def test_pipelined_requests_are_answered_in_order(
    tmp_path: Path, taken: list[ShortExchange]
) -> None:
    async with ready(tmp_path) as (_, engine, client):
        await client.send(b"".join(post("alpha", number % 3) for number in range(60)))
        for number in range(60):
            assert (await client.answer()).json() == {"n": number + 2}
        assert len(taken) == 60
        assert len(set(engine.links)) == 1


async def test_a_stream_is_passed_on_as_it_comes(
    tmp_path: Path, taken: list[ShortExchange]
) -> None:
    turn = asyncio.Semaphore(0)
    events = [chunk(b"data: %d\n\n" % n) for n in range(4)]

    async def stream(life: Life, link: Link, request: SeenRequest) -> bool:
        await link.send(STREAM_HEAD)
        for event in (*events, chunk(b"data: [DONE]\n\n") + LAST_CHUNK):
            await turn.acquire()
            await link.send(event)
        return False

    async with ready(tmp_path, stream, stream) as (router, engine, client):
        for number in range(2):
            await client.send(post(stream=True))
            head = await client._until(b"\r\n\r\n")
            assert head.endswith(b"\r\nTransfer-Encoding: chunked")
            for event in events:
                turn.release()
                assert not await client._until(event)  # before the rest is there
            turn.release()
            end = chunk(b"data: [DONE]\n\n") + LAST_CHUNK
            assert not await client._until(end)
            size = len(head) + 4 + len(b"".join(events) + end)
            line = await router.wait_for_log("request", count=2 + number)
            assert (line["outcome"], line["status"], line["bytes"]) == ("served", 200, size)
        assert len(taken) == 2
        assert len(set(engine.links)) == 2, "a connection that carried a stream is not used again"


async def test_a_client_that_leaves_a_stream(tmp_path: Path, taken: list[ShortExchange]) -> None:
    gone = asyncio.Event()

    async def stream(life: Life, link: Link, request: SeenRequest) -> bool:
        await link.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
        await link.gone()
        gone.set()
        return False

    async with ready(tmp_path, stream) as (router, _, client):
        await client.send(post(stream=True))
        event = chunk(b"data: 1\n\n")
        size = len(await client._until(event)) + len(event)
        client.close()
        async with asyncio.timeout(LIMIT_S):
            await gone.wait()
        line = await router.wait_for_log("request", count=2)
        assert (line["outcome"], line["status"], line["bytes"]) == ("client_gone", 200, size)
        assert len(taken) == 1


@pytest.mark.parametrize("by_us", [False, True])
async def test_a_stream_that_breaks(
    tmp_path: Path, taken: list[ShortExchange], by_us: bool
) -> None:
    """The client is told in the stream, whose connection stays usable."""

    async def stream(life: Life, link: Link, request: SeenRequest) -> bool:
        await link.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
        if by_us:
            await link.gone()
        else:
            link.reset()
        return False

    async with ready(tmp_path, stream) as (router, _, client):
        await client.send(post(stream=True))
        if by_us:
            await client._until(chunk(b"data: 1\n\n"))
            router.router._dispatcher.end_all(BreakReason.DRAIN_TIMEOUT)
        rest = await client._until(LAST_CHUNK)
        code = "pool_draining" if by_us else "upstream_reset"
        assert b'"code":"%b"' % code.encode() in rest
        await client.send(post())
        assert (await client.answer()).json() == {"n": 3}
        line = await router.wait_for_log("request", count=2)
        assert (line["outcome"], line["code"]) == ("upstream_error", code)
        assert len(taken) == 2


async def test_the_first_request_of_all_takes_the_short_way_too(
    tmp_path: Path, taken: list[ShortExchange]
) -> None:
    async with scripted(
        tmp_path, scripted_pool("alpha", default="alpha"), answerer=Engine()
    ) as router:
        await settled(router, lambda: router.runtime().view().resident == "alpha", "a resident")
        async with router.raw() as client:
            await client.send(post())
            assert (await client.answer()).json() == {"n": 1}
        assert len(taken) == 1
        await nothing_left(router)


async def test_an_answer_in_pieces_goes_on_the_general_way(
    tmp_path: Path, taken: list[ShortExchange]
) -> None:
    async def slowly(life: Life, link: Link, request: SeenRequest) -> bool:
        raw = answer(b"y" * 300_000)
        for at in range(0, len(raw), 50_000):
            await link.send(raw[at : at + 50_000])
            await asyncio.sleep(0.001)
        return True

    async def head_first(life: Life, link: Link, request: SeenRequest) -> bool:
        raw = answer(b"z" * 10)
        await link.send(raw[:-10])
        await asyncio.sleep(0.002)
        await link.send(raw[-10:])
        return True

    async with ready(tmp_path, slowly, head_first) as (_, engine, client):
        await client.send(post())
        assert (await client.answer()).body == b"y" * 300_000
        await client.send(post())
        assert (await client.answer()).body == b"z" * 10
        await client.send(post())
        assert (await client.answer()).json() == {"n": 4}
        assert len(taken) == 3
        assert len(set(engine.links)) == 1


async def test_a_member_that_says_it_is_loading_is_asked_again(
    tmp_path: Path, taken: list[ShortExchange]
) -> None:
    async def loading(life: Life, link: Link, request: SeenRequest) -> bool:
        await link.send(answer(b"Loading model", status=b"503 Service Unavailable"))
        return True

    async with ready(tmp_path, loading) as (_, engine, client):
        await client.send(post())
        assert (await client.answer()).json() == {"n": 3}
        assert len(taken) == 1


async def test_a_member_that_is_gone_before_anybody_knows_is_looked_at_while_its_client_waits(
    tmp_path: Path, taken: list[ShortExchange]
) -> None:
    """Lent at once, then refused a connection: held as by its arrival, until it is clear why."""
    async with ready(tmp_path) as (router, engine, client):
        life = router.driver().lives[ALPHA]
        router.driver().behaviours[ALPHA].ready = False
        life._stop_accepting()
        for link in life.upstream.links:
            link.reset()
        idle = router.router._client
        await settled(router, lambda: not idle.idle_connections, "no connection rests")

        await client.send(post())

        got = await client.answer()
        # (so soon after its load that it counts as a failed one)
        assert (got.status, got.json()["error"]["code"]) == (503, "member_failed")
        assert "gone" in got.json()["error"]["message"]
        assert len(taken) == 1


async def test_a_stream_that_cannot_be_one_is_none_after_a_change_either(
    tmp_path: Path, taken: list[ShortExchange]
) -> None:
    """Begun before `holdKeepalive` was configured, held after it."""
    configured = asyncio.Event()

    async def loading(life: Life, link: Link, request: SeenRequest) -> bool:
        await configured.wait()
        await link.send(answer(b"Loading model", status=b"503 Service Unavailable"))
        return True

    async with ready(tmp_path, *(5 * [loading])) as (router, engine, client):
        raw = post(stream=True).replace(b"/v1/chat/completions", b"/v1/embeddings")
        await client.send(raw)
        await settled(router, lambda: len(engine.seen) == 2, "the request at its member")
        router.config |= {"holdKeepalive": "comment", "holdKeepaliveAfter": "10ms"}
        assert await router.reload()
        configured.set()
        assert (await client.answer()).json() == {"n": 7}
        assert len(taken) == 1


@pytest.mark.parametrize("status", [b"503 Service Unavailable", b"400 Bad Request"])
async def test_errors_of_the_member_pass(
    tmp_path: Path, taken: list[ShortExchange], status: bytes
) -> None:
    async def fails(life: Life, link: Link, request: SeenRequest) -> bool:
        await link.send(answer(b'{"error": "its own"}', status=status))
        return True

    async with ready(tmp_path, fails) as (_, _, client):
        await client.send(post())
        got = await client.answer()
        assert (got.status, got.body) == (int(status[:3]), b'{"error": "its own"}')
        assert len(taken) == 1


async def test_a_connection_that_was_closed_meanwhile_is_no_failure(
    tmp_path: Path, taken: list[ShortExchange]
) -> None:
    """Nobody can have worked on the request, so it is sent once more, on a fresh connection."""

    async def closes(life: Life, link: Link, request: SeenRequest) -> bool:
        link.reset()
        return False

    async with ready(tmp_path, closes) as (_, engine, client):
        await client.send(post())
        assert (await client.answer()).json() == {"n": 3}
        assert len(taken) == 1 and engine.links[2] != engine.links[1]


async def test_a_connection_that_breaks_in_an_answer_is_a_failure(
    tmp_path: Path, taken: list[ShortExchange]
) -> None:
    async def breaks(life: Life, link: Link, request: SeenRequest) -> bool:
        await link.send(b"HTTP/1.1 200 OK\r\nContent-")
        await asyncio.sleep(0.002)
        link.reset()
        return False

    async def nonsense(life: Life, link: Link, request: SeenRequest) -> bool:
        await link.send(b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n")
        return False

    async with ready(tmp_path, breaks, nonsense) as (router, engine, client):
        await client.send(post())
        got = await client.answer()
        assert (got.status, got.json()["error"]["code"]) == (502, "upstream_reset")
        await client.send(post())
        got = await client.answer()
        assert (got.status, got.json()["error"]["code"]) == (502, "upstream_protocol_error")
        assert len(engine.seen) == 3
        outcomes = [(await router.wait_for_log("request", count=n))["outcome"] for n in (2, 3)]
        assert outcomes == ["upstream_error", "upstream_error"]


async def test_a_request_on_a_new_connection_is_not_sent_again(
    tmp_path: Path, taken: list[ShortExchange]
) -> None:
    """Only one that had rested may have been closed before anybody read from it."""
    seen: list[SeenRequest] = []

    async def breaks(life: Life, link: Link, request: SeenRequest) -> bool:
        seen.append(request)
        link.reset()
        return False

    async with scripted(
        tmp_path, scripted_pool("alpha", default="alpha"), answerer=breaks
    ) as router:
        await settled(router, lambda: router.runtime().view().resident == "alpha", "a resident")
        async with router.raw() as client:
            await client.send(post())
            got = await client.answer()
            assert (got.status, got.json()["error"]["code"]) == (502, "upstream_reset")
        assert (len(seen), len(taken)) == (1, 1)
        await nothing_left(router)


async def test_an_answer_that_does_not_come(tmp_path: Path, taken: list[ShortExchange]) -> None:
    async def never(life: Life, link: Link, request: SeenRequest) -> bool:
        await link.gone()
        return False

    async with ready(tmp_path, never, responseTimeout="200ms") as (_, _, client):
        await client.send(post())
        got = await client.answer()
        assert (got.status, got.json()["error"]["code"]) == (504, "upstream_timeout")
        assert len(taken) == 1


async def test_a_client_that_leaves(tmp_path: Path, taken: list[ShortExchange]) -> None:
    """The member is told at once, and the request has its outcome."""
    gone = asyncio.Event()

    async def hangs(life: Life, link: Link, request: SeenRequest) -> bool:
        await link.gone()
        gone.set()
        return False

    async with ready(tmp_path, hangs) as (router, engine, client):
        await client.send(post())
        await settled(router, lambda: len(engine.seen) == 2, "the request at its member")
        client.close()
        async with asyncio.timeout(LIMIT_S):
            await gone.wait()
        line = await router.wait_for_log("request", count=2)
        assert (line["outcome"], line["code"]) == ("client_gone", "client_gone")
        assert len(taken) == 1


async def test_a_lease_that_is_ended(tmp_path: Path, taken: list[ShortExchange]) -> None:
    async def hangs(life: Life, link: Link, request: SeenRequest) -> bool:
        await link.gone()
        return False

    async with ready(tmp_path, hangs) as (router, engine, client):
        await client.send(post())
        await settled(router, lambda: len(engine.seen) == 2, "the request at its member")
        router.router._dispatcher.end_all(BreakReason.DRAIN_TIMEOUT)
        got = await client.answer()
        assert (got.status, got.json()["error"]["code"]) == (503, "pool_draining")
        assert len(taken) == 1


async def test_a_member_that_dies(tmp_path: Path, taken: list[ShortExchange]) -> None:
    async def dies(life: Life, link: Link, request: SeenRequest) -> bool:
        life.crash()
        return False

    async with ready(tmp_path, dies) as (_, _, client):
        await client.send(post())
        got = await client.answer()
        assert got.status in (502, 503) and got.json()["error"]["code"]
        assert len(taken) == 1


async def test_a_router_that_goes_down_closes_behind_the_answer(
    tmp_path: Path, taken: list[ShortExchange]
) -> None:
    go = asyncio.Event()

    async def waits(life: Life, link: Link, request: SeenRequest) -> bool:
        await go.wait()
        await link.send(answer(b"{}"))
        return True

    async with ready(tmp_path, waits) as (router, engine, client):
        await client.send(post())
        await settled(router, lambda: len(engine.seen) == 2, "the request at its member")
        router.router._front.begin_drain()
        go.set()
        got = await client.answer()
        assert (got.status, got.closing) == (200, True)
        assert await client.ended() == b""


async def test_only_as_many_as_the_member_takes(tmp_path: Path, taken: list[ShortExchange]) -> None:
    """Beyond `parallel` a request is held, in its turn."""
    go = asyncio.Event()

    async def waits(life: Life, link: Link, request: SeenRequest) -> bool:
        await go.wait()
        await link.send(answer(b"{}"))
        return True

    pool = scripted_pool("alpha")
    pool["members"][0]["parallel"] = 1
    async with ready(tmp_path, waits, pool=pool) as (router, engine, client):
        await client.send(post())
        await settled(router, lambda: len(engine.seen) == 2, "the request at its member")
        async with router.raw() as other:
            await other.send(post())
            await settled(router, lambda: router.runtime().view().held == 1, "one held")
            assert len(engine.seen) == 2
            go.set()
            assert (await client.answer()).status == 200
            assert (await other.answer()).status == 200
        assert len(taken) == 1


async def test_what_a_head_means_is_looked_up_again_after_a_change(
    tmp_path: Path, taken: list[ShortExchange]
) -> None:
    """Names and keys of a kept connection are those in force, not those of its first request."""
    keys = tmp_path / "client-keys.txt"
    keys.write_text("one: sk-one\n")
    key = b"Authorization: Bearer sk-one"
    engine = Engine()
    pool = scripted_pool("alpha")
    pool["members"][0]["models"] = ["nickname"]
    async with scripted(tmp_path, pool, answerer=engine, keys={"file": str(keys)}) as router:
        async with router.raw() as client:

            async def ask(model: str) -> int:
                await client.send(post(model, 0, key))
                return (await client.answer()).status

            assert [await ask(model) for model in ("alpha", "alpha", "nickname")] == [200] * 3
            assert len(taken) == 2
            pool["members"][0]["models"] = []
            assert await router.reload()
            assert [await ask(model) for model in ("nickname", "alpha")] == [404, 200]
            keys.write_text("two: sk-two\n")
            assert await router.reload()
            assert await ask("alpha") == 401
        assert router.runtime().name == PoolName("gpu0")


# --- bodies that come later than their heads ------------------------------------------------------


@pytest.mark.parametrize("cuts", [1, 2, 5])
async def test_a_body_behind_its_head_takes_the_short_way(
    tmp_path: Path, taken: list[ShortExchange], cuts: int
) -> None:
    """As most clients send it: the head alone, the body in one packet or a few."""
    async with ready(tmp_path) as (_, engine, client):
        for pad in (0, 300, 100_000):
            raw = post("alpha", pad)
            at = raw.index(b"\r\n\r\n") + 4
            step = max(1, -(-(len(raw) - at) // cuts))
            for begin, end in [(0, at), *((b, b + step) for b in range(at, len(raw), step))]:
                await client.send(raw[begin:end])
                await asyncio.sleep(0.002)
            assert (await client.answer()).json() == {"n": len(engine.seen)}
            assert json.loads(engine.seen[-1].body)["pad"] == "x" * pad
        await client.send(post()[:-3])
        await asyncio.sleep(0.002)
        await client.send(post()[-3:] + post("alpha", 7) + post("alpha", 8))
        assert [(await client.answer()).json()["n"] for _ in range(3)] == [5, 6, 7]
        assert len(taken) == 6


async def test_a_slow_body_is_waited_for_within_its_limits(
    tmp_path: Path, taken: list[ShortExchange]
) -> None:
    async with ready(tmp_path, bodyStall="2s") as (router, engine, client):
        raw = post()
        await client.send(raw[:-4])
        await settled(router, lambda: bool(router.router._data_port.active), "a waiting handler")
        await client.send(raw[-4:])
        assert (await client.answer()).status == 200
        await client.send(raw[:-4])
        got = await client.answer()
        assert (got.status, got.closing) == (408, True)
        assert got.json()["error"]["code"] == "request_timeout"
        assert (len(taken), len(engine.seen)) == (0, 2)


async def test_who_is_refused_by_the_head_is_refused_at_once(
    tmp_path: Path, taken: list[ShortExchange]
) -> None:
    """No byte of the body is waited for."""
    keys = tmp_path / "client-keys.txt"
    keys.write_text("one: sk-one\n")
    pool = scripted_pool("alpha")
    limits = {"keys": {"file": str(keys)}, "maxBodyBytes": 100}
    async with scripted(tmp_path, pool, answerer=Engine(), **limits) as router:
        for fields, body, status in (
            ((b"Authorization: Bearer sk-two",), 0, 401),
            ((b"Authorization: Bearer sk-one",), 100, 413),
        ):
            raw = post("alpha", body, *fields)
            async with router.raw() as client:
                await client.send(raw[: raw.index(b"\r\n\r\n") + 4])
                got = await client.answer()
                assert (got.status, got.closing) == (status, True)
            async with router.raw() as client:
                await client.send(raw)
                assert (await client.answer()).status == status
        assert not taken


async def test_a_client_that_leaves_in_its_body(tmp_path: Path, taken: list[ShortExchange]) -> None:
    async with ready(tmp_path) as (router, engine, client):
        await client.send(post()[:-3])
        front = router.router._front
        await settled(router, lambda: any(each._missing for each in front.own), "a part of it")
        client.close()
        await settled(router, lambda: not router.router._front.connections, "no connection")
        assert (len(taken), len(engine.seen)) == (0, 1)
