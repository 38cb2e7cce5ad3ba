"""
A request may end at any moment of its life, and leaves nothing behind.

The handler is cancelled at its first suspension, at its second, and so on until a request comes
through: once while it waits, and once in the very tick in which what it waits for comes. As a task
does it: by cancelling what it waits for, or by an exception in place of what it waited for.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from aiohttp import web

from modelpool_router.core.spec import PoolName
from modelpool_router.web.faults import ConnectRefused
from rawupstream import LAST_CHUNK, STREAM_HEAD, Link, SeenRequest, answer, chunk
from scripted import Life, ServedScripted, scripted, scripted_pool, settled

When = Literal["while it waits", "as it wakes"]


class Cancelled:
    """Runs a handler, and cancels it at its suspension number *at*."""

    def __init__(self, at: int, when: When) -> None:
        self.at = at
        self.when = when
        self.suspensions = 0
        self.struck = False
        """Whether it was cancelled at all."""
        self.late = False

    async def run(self, handler: Any, request: Any) -> web.StreamResponse:
        """Stand in for the handler."""
        response = await _Driven(self, handler(request))
        assert isinstance(response, web.StreamResponse)
        return response

    def suspended(self, on: asyncio.Future[Any] | None) -> bool:
        """Strike if this is the suspension; True = by an exception when it wakes."""
        self.suspensions += 1
        if self.suspensions != self.at:
            return False
        self.struck = True
        if on is None or self.when == "as it wakes":
            return True
        asyncio.get_running_loop().call_soon(self._cancel, on)
        return False

    def _cancel(self, on: asyncio.Future[Any]) -> None:
        self.late = not on.cancel()  # it came in this very tick: then as it wakes, as a task does


class _Driven:
    def __init__(self, cancelled: Cancelled, work: Any) -> None:
        self._cancelled = cancelled
        self._work = work

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._work.__await__()
        error: BaseException | None = None
        while True:
            try:
                on = steps.send(None) if error is None else steps.throw(error)
            except StopIteration as done:
                return done.value
            error = asyncio.CancelledError() if self._cancelled.suspended(on) else None
            try:
                yield on
            except BaseException as thrown:  # noqa: BLE001 - passed on to the handler
                error = thrown
            if self._cancelled.late:
                self._cancelled.late = False
                error = asyncio.CancelledError()


@dataclass(frozen=True)
class Way:
    """One way through the handler."""

    name: str
    body: dict[str, Any] = field(default_factory=dict)
    cold: bool = False
    """Another member is resident when it comes, so that it is held through a swap."""
    settings: dict[str, Any] = field(default_factory=dict)
    least: int = 1
    """Suspensions that it must have; fewer, and this test does not test what it says."""
    reused: bool = False
    """A connection to the member waits to be used again."""


BIG = {"pad": "x" * 3_000_000}
WAYS = [
    Way("reused connection", reused=True),
    Way("warm", least=2),
    Way("cold", cold=True, least=3),
    Way("stream", {"stream": True}, least=2),
    Way("cold stream", {"stream": True}, cold=True, least=3),
    Way(
        "kept alive",
        {"stream": True},
        cold=True,
        settings={"holdKeepalive": "comment", "holdKeepaliveAfter": "10ms"},
        least=3,
    ),
    Way("spooled", BIG, cold=True, least=6),
    Way("refused connection", {"refuse": 1}, least=3),
    Way("loading after all", {"loading": 1}, least=4),
]


class Engine:
    """Members that answer as the request says; the odd things once per request."""

    def __init__(self) -> None:
        self.refused = 0
        self.loading = 0
        self.strikes: list[Cancelled] = []

    async def __call__(self, life: Life, link: Link, request: SeenRequest) -> bool:
        wanted = json.loads(request.body)
        await asyncio.sleep(0.002)
        strike = self.strikes[wanted["x_strike"]] if "x_strike" in wanted else None
        if strike is not None and strike.struck and strike.when == "while it waits":
            await link.gone()  # it must be let go: it would work on for ever
            return False
        if self.loading:
            self.loading -= 1
            await link.send(answer(b"Loading model", status=b"503 Service Unavailable"))
            return True
        if wanted.get("stream"):
            await link.send(STREAM_HEAD + chunk(b'data: {"n":1}\n\n'))
            await asyncio.sleep(0.002)
            await link.send(chunk(b"data: [DONE]\n\n") + LAST_CHUNK)
            return False
        await link.send(answer(b'{"by":"%b"}' % life.member.encode()))
        return True


@pytest.mark.usefixtures("closing_clients")
@pytest.mark.parametrize("front", ["plain", "other"])
@pytest.mark.parametrize("when", ["while it waits", "as it wakes"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
async def test_nothing_is_left_wherever_a_request_is_cancelled(
    tmp_path: Path, way: Way, when: When, front: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a head that is not the plainest may be read by other code than one that is
    line = b"" if front == "plain" else b"TE: trailers\r\n"
    engine = Engine()
    pool = scripted_pool("alpha", "beta")
    async with scripted(tmp_path, pool, answerer=engine, **way.settings) as router:
        driver = router.driver()
        for behaviour in driver.behaviours.values():
            behaviour.load_s = behaviour.unload_s = 0.004
        server, client = router.router._front, router.router._client
        # handlers only: what needs none has nowhere to be suspended
        monkeypatch.setattr(server, "short", None)
        handler, connect = server._front_handler, client.connect

        async def refuse_first(endpoint: Any) -> Any:
            if engine.refused:
                engine.refused -= 1
                raise ConnectRefused("refused")
            return await connect(endpoint)

        monkeypatch.setattr(client, "connect", refuse_first)
        await make_ready(router, way)
        quiet = tasks()
        strike = Cancelled(0, when)
        for at in range(1, 200):
            if at > 1:
                await make_ready(router, way)
            if not way.reused:
                drop_idle(router)
            engine.refused = way.body.get("refuse", 0)
            engine.loading = way.body.get("loading", 0)
            strike = Cancelled(at, when)
            engine.strikes.append(strike)

            async def struck(request: Any, strike: Cancelled = strike) -> web.StreamResponse:
                return await strike.run(handler, request)

            monkeypatch.setattr(server, "_front_handler", struck)
            got = await ask(router, way, at - 1, line)
            monkeypatch.setattr(server, "_front_handler", handler)
            assert got or strike.struck
            engine.refused = engine.loading = 0
            await nothing_left(router, quiet)
            if not strike.struck:
                break
        assert strike.suspensions < at, "a request comes through in the end"
        assert strike.suspensions >= way.least


async def make_ready(router: ServedScripted, way: Way) -> None:
    """Let the right member be resident, by asking for it."""
    answer = await router.chat("beta" if way.cold else "alpha")
    assert answer.status == 200, answer.body


async def ask(router: ServedScripted, way: Way, strike: int, line: bytes) -> bool:
    """Send the request on a connection of its own; return whether a whole answer came."""
    body = json.dumps(router.body("alpha", x_strike=strike, **way.body)).encode()
    async with router.raw() as client:
        await client.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n%bContent-Length: %d\r\n\r\n%b"
            % (line, len(body), body)
        )
        try:
            answer = await client.answer()
        except AssertionError:
            return False
        return answer.status == 200 and b"error" not in answer.body


def drop_idle(router: ServedScripted) -> None:
    """Close the connections to members that wait to be used again."""
    for endpoint in router.runtime().endpoints.values():
        router.router._client.drop(endpoint.identity)


def tasks() -> set[str]:
    """Return the names of what runs, without what every loop of tests has."""
    return {task.get_name() for task in asyncio.all_tasks() if not task.done()}


async def nothing_left(router: ServedScripted, quiet: set[str]) -> None:
    """Wait until every part of the router has forgotten the request."""
    inside = router.router
    pool = router.runtime()
    port = inside._data_port
    ledger = inside._ledger
    client = inside._client
    checks: dict[str, Callable[[], object]] = {
        "requests under way": lambda: port.active,
        "holds": lambda: ledger.held,
        "bytes of bodies": lambda: ledger.held_bytes,
        "waiters": lambda: len(pool.waiters) + len(pool.lent),
        "leases": lambda: pool.view().in_flight,
        "connections at work": lambda: client.open_connections - client.idle_connections,
        "client connections": lambda: len(inside._front.connections),
        "loads and unloads": lambda: pool.view().state != "resident",
        "tasks": lambda: len(tasks() - quiet),
    }
    drop_idle(router)  # the engine's side of them has tasks
    for what, left in checks.items():
        await settled(router, lambda left=left: not left(), what)  # type: ignore[misc]
    watched = [each for each in client.sweep._watched if each is not client]
    assert not watched, watched
    assert pool.name == PoolName("gpu0") and pool.view().held == 0
