"""The admin port, over real sockets, in front of a stub of the router."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from modelpool_router.core.commands import Note, NoteKind
from modelpool_router.core.events import Event, LoadAsked, Paused, Resumed, UnloadAsked
from modelpool_router.core.spec import MemberName, PoolName
from modelpool_router.core.view import PoolView
from modelpool_router.telemetry import EventHub, Metrics
from modelpool_router.telemetry.events import MAX_SUBSCRIBERS, QUEUED_EVENTS
from modelpool_router.web.admin import build_admin
from poolviews import ALPHA, BETA, GPU0, member_view, pool_view

GPU1 = PoolName("gpu1")
DELTA = MemberName("delta")
TOKEN = "t0k\u00e9n"


@dataclass
class StubRouter:
    """Two pools whose state is what the test says; remembers what it was told."""

    pools: dict[PoolName, PoolView] = field(
        default_factory=lambda: {
            GPU0: pool_view(),
            GPU1: pool_view(member_view(DELTA), name=GPU1, resident=None),
        }
    )
    told: list[tuple[PoolName, Event]] = field(default_factory=list)
    draining: bool = False
    checks: dict[str, str] = field(default_factory=lambda: {"configuration": "ok"})

    def views(self) -> Sequence[PoolView]:
        return tuple(self.pools.values())

    def tell(self, pool: PoolName, event: Event) -> None:
        self.told.append((pool, event))
        if isinstance(event, Paused | Resumed):
            paused = isinstance(event, Paused)
            self.pools[pool] = replace(self.pools[pool], paused=paused)

    def find(self, model: str) -> tuple[PoolName, MemberName] | None:
        names = {"alpha": (GPU0, ALPHA), "beta": (GPU0, BETA), "gpt-4o": (GPU0, BETA)}
        return {**names, "delta": (GPU1, DELTA)}.get(model)

    def router_state(self) -> Mapping[str, Any]:
        return {"held": 2, "held_bytes": 99, "bounds": {"max_held": 10}, "draining": self.draining}

    def ready(self) -> tuple[bool, Mapping[str, str]]:
        return all(state == "ok" for state in self.checks.values()), self.checks


class Admin:
    """A running admin listener and a client for it."""

    def __init__(self, *, token: str | None = None, keepalive_s: float = 15.0) -> None:
        self.router = StubRouter()
        self.hub = EventHub()
        self.metrics = Metrics({GPU0: [ALPHA, BETA]}, [], version="0.1.0")
        self.token = token
        app = build_admin(
            self.router,
            self.hub,
            self.metrics,
            token=lambda: self.token,
            version="0.1.0",
            keepalive_s=keepalive_s,
        )
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=600)
        self.port = 0

    async def __aenter__(self) -> Admin:
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.port = self.runner.addresses[0][1]
        self.session = aiohttp.ClientSession(f"http://127.0.0.1:{self.port}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()
        await self.runner.cleanup()

    async def call(
        self, path: str, method: str = "GET", **headers: str
    ) -> tuple[int, dict[str, Any]]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.request(method, path, headers=named) as response:
            assert response.content_type == "application/json"
            told = await response.json()
            assert isinstance(told, dict)
            return response.status, told

    async def post(self, path: str, **headers: str) -> tuple[int, dict[str, Any]]:
        return await self.call(path, "POST", **headers)

    def publish(self, kind: NoteKind, **fields: Any) -> None:
        self.hub.publish(GPU0, Note(kind, fields), self.router.pools[GPU0])

    @asynccontextmanager
    async def events(self, last_id: str | None = None) -> AsyncIterator[Frames]:
        headers = {} if last_id is None else {"Last-Event-ID": last_id}
        async with self.session.get("/api/v1/events", headers=headers) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            yield Frames(response)


class Frames:
    """Reads an event stream one frame at a time."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def raw(self) -> bytes:
        return await asyncio.wait_for(self._response.content.readuntil(b"\n\n"), 10)

    async def next(self) -> tuple[str, str, dict[str, Any]]:
        """Return the next frame's event, id and data."""
        lines = (await self.raw()).decode().splitlines()
        fields = dict(line.split(": ", 1) for line in lines if line)
        return fields["event"], fields["id"], json.loads(fields["data"])

    async def ended(self) -> bool:
        return await asyncio.wait_for(self._response.content.read(), 10) == b""


@pytest.fixture
async def admin() -> AsyncIterator[Admin]:
    async with Admin() as admin:
        yield admin


# Looking


async def test_given_two_pools_when_the_state_is_read_then_all_of_it_is_there(
    admin: Admin,
) -> None:
    status, state = await admin.call("/api/v1/state")

    assert status == 200
    assert state["version"] == "0.1.0"
    assert 0 <= state["uptime_s"] < 60
    assert state["router"] == {
        "held": 2,
        "held_bytes": 99,
        "bounds": {"max_held": 10},
        "draining": False,
    }
    assert [pool["name"] for pool in state["pools"]] == ["gpu0", "gpu1"]
    assert set(state["pools"][0]) == set(PoolView.__dataclass_fields__)
    assert state["pools"][0]["state"] == "resident"
    assert state["pools"][0]["members"][0]["status"] == "loaded"


@pytest.mark.parametrize("path", ["/livez", "/api/v1/state", "/nowhere"])
async def test_given_any_answer_then_it_names_no_software(admin: Admin, path: str) -> None:
    async with admin.session.get(path) as response:
        assert "Server" not in response.headers


async def test_given_a_scrape_when_the_format_is_negotiated_then_the_content_type_says_which(
    admin: Admin,
) -> None:
    admin.metrics.request_done("gpu0", "alpha", "served", 200, 0.1, 0.1)
    openmetrics = "application/openmetrics-text; version=1.0.0"
    texts = {}
    for accept in ("text/plain", openmetrics):
        async with admin.session.get("/metrics", headers={"Accept": accept}) as response:
            assert response.status == 200
            texts[response.content_type] = await response.text()

    assert set(texts) == {"text/plain", "application/openmetrics-text"}
    for text in texts.values():
        assert 'code="2xx",member="alpha",outcome="served",pool="gpu0"} 1.0\n' in text
    assert texts["application/openmetrics-text"].endswith("# EOF\n")


async def test_given_a_router_that_is_not_ready_when_asked_then_the_failing_check_is_told(
    admin: Admin,
) -> None:
    assert await admin.call("/livez") == (200, {"status": "ok"})
    assert await admin.call("/readyz") == (
        200,
        {"status": "ok", "checks": {"configuration": "ok"}, "obstacles": {}},
    )

    admin.router.checks["gpu0"] = "starting"

    assert await admin.call("/readyz") == (
        503,
        {
            "status": "unavailable",
            "checks": {"configuration": "ok", "gpu0": "starting"},
            "obstacles": {},
        },
    )
    assert (await admin.call("/livez"))[0] == 200


async def test_given_an_alias_when_asked_why_then_its_member_is_explained(admin: Admin) -> None:
    status, told = await admin.call("/api/v1/why?model=gpt-4o")

    assert status == 200
    assert (told["model"], told["pool"], told["member"]) == ("gpt-4o", "gpu0", "beta")
    assert told["sentences"] == ["beta would wait for alpha, which is idle, to leave"]
    assert told["view"]["resident"] == "alpha"


async def test_given_swaps_when_listed_then_the_newest_come_first_up_to_the_limit(
    admin: Admin,
) -> None:
    for number in (1, 2, 3):
        admin.publish(NoteKind.SWAP_STARTED, source="", target="alpha", cause="demand", swap=number)
    admin.publish(
        NoteKind.SWAP_COMPLETED,
        source="",
        target="alpha",
        cause="demand",
        swap=3,
        drain_s=0.0,
        unload_s=0.0,
        load_s=2.5,
        granted=1,
    )

    status, told = await admin.call("/api/v1/swaps?limit=2")

    assert status == 200
    assert [(swap["number"], swap["outcome"]) for swap in told["swaps"]] == [
        (3, "completed"),
        (2, "abandoned"),
    ]
    assert told["swaps"][0]["load_s"] == 2.5
    assert len((await admin.call("/api/v1/swaps"))[1]["swaps"]) == 3


@pytest.mark.parametrize(
    ("path", "method", "status", "code"),
    [
        ("/", "GET", 404, "unknown_url"),
        ("/api/v1/pools/gpu0/explode", "POST", 404, "unknown_url"),
        ("/api/v1/pools/gpu0/unload", "GET", 405, "method_not_allowed"),
        ("/api/v1/state", "POST", 405, "method_not_allowed"),
        ("/api/v1/why", "GET", 400, "missing_required_parameter"),
        ("/api/v1/why?model=nobody", "GET", 404, "model_not_found"),
        ("/api/v1/swaps?limit=many", "GET", 400, "invalid_type"),
        ("/api/v1/pools/gpu9/pause", "POST", 404, "pool_not_found"),
        ("/api/v1/pools/gpu0/load", "POST", 400, "missing_required_parameter"),
        ("/api/v1/pools/gpu0/load?member=nobody", "POST", 404, "member_not_found"),
        ("/api/v1/pools/gpu0/load?member=delta", "POST", 404, "member_not_found"),
    ],
)
async def test_given_a_call_that_is_wrong_when_answered_then_in_the_envelope_and_nothing_is_told(
    admin: Admin, path: str, method: str, status: int, code: str
) -> None:
    got, told = await admin.call(path, method)

    assert (got, told["error"]["code"]) == (status, code)
    assert set(told["error"]) == {"message", "type", "param", "code"}
    assert "nobody" not in told["error"]["message"]
    assert admin.router.told == []


async def test_given_a_fault_of_ours_when_it_happens_then_the_answer_tells_nothing_of_it(
    admin: Admin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> Sequence[PoolView]:
        raise RuntimeError("inner matters")

    monkeypatch.setattr(admin.router, "views", broken)

    status, told = await admin.call("/api/v1/state")

    assert (status, told["error"]["code"], told["error"]["type"]) == (
        500,
        "internal_error",
        "server_error",
    )
    assert "inner" not in json.dumps(told)
    ours = [record.message for record in caplog.records if "modelpool" in record.name]
    assert ours == ["admin call failed"]


# Acting


@pytest.mark.parametrize(
    ("call", "event"),
    [
        ("load?member=beta", LoadAsked(BETA)),
        ("load?member=gpt-4o", LoadAsked(BETA)),
        ("unload", UnloadAsked()),
        ("pause", Paused()),
        ("resume", Resumed()),
    ],
)
async def test_given_a_verb_when_posted_then_the_pool_is_told_and_its_new_view_comes_back(
    admin: Admin, call: str, event: Event
) -> None:
    status, told = await admin.post(f"/api/v1/pools/gpu0/{call}")

    assert (status, told["pool"]) == (202, "gpu0")
    assert admin.router.told == [(GPU0, event)]
    assert told["view"]["paused"] is (event == Paused())


async def test_given_a_router_that_goes_down_when_told_something_then_it_refuses(
    admin: Admin,
) -> None:
    admin.router.draining = True

    status, told = await admin.post("/api/v1/pools/gpu0/unload")

    assert (status, told["error"]["code"]) == (503, "pool_draining")
    assert admin.router.told == []


@pytest.mark.parametrize(
    "authorization",
    [None, "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", TOKEN, "Bearer \u00ff"],
)
async def test_given_a_token_when_a_verb_comes_without_it_then_it_is_refused(
    authorization: str | None,
) -> None:
    async with Admin(token=TOKEN) as admin:
        headers = {} if authorization is None else {"Authorization": authorization}

        status, told = await admin.post("/api/v1/pools/gpu0/unload", **headers)

        assert (status, told["error"]["type"]) == (401, "authentication_error")
        assert TOKEN not in json.dumps(told, ensure_ascii=False)
        assert admin.router.told == []
        assert (await admin.call("/api/v1/state"))[0] == 200  # looking needs none


async def test_given_a_token_when_it_is_replaced_then_only_the_new_one_counts() -> None:
    async with Admin(token=TOKEN) as admin:
        old = {"Authorization": f"Bearer {TOKEN}"}
        assert (await admin.post("/api/v1/pools/gpu0/unload", **old))[0] == 202

        admin.token = "another"

        assert (await admin.post("/api/v1/pools/gpu0/unload", **old))[0] == 401
        new = {"Authorization": "bearer another"}
        assert (await admin.post("/api/v1/pools/gpu0/unload", **new))[0] == 202


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://evil.example", "Content-Type": "application/json"}, 403),
        ({"Origin": "null", "X-Requested-With": "x"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "http://{host}"}, 403),
        ({"Origin": "http://{host}", "Content-Type": "text/plain"}, 403),
        # A name that was made to point here looks like our own page to the browser.
        ({"Host": "evil.example", "Origin": "http://evil.example", "X-Requested-With": "x"}, 403),
        ({"Origin": "http://{host}", "Content-Type": "application/json"}, 202),
        ({"Origin": "http://{host}", "X-Requested-With": "x"}, 202),
        (
            {"Host": "localhost:9090", "Origin": "http://localhost:9090", "X-Requested-With": "x"},
            202,
        ),
        ({"Host": "[::1]:9090", "Origin": "http://[::1]:9090", "X-Requested-With": "x"}, 202),
        ({"Sec-Fetch-Site": "none"}, 202),
        ({}, 202),
    ],
)
async def test_given_a_web_page_when_it_posts_then_only_our_own_may(
    admin: Admin, headers: dict[str, str], status: int
) -> None:
    host = f"127.0.0.1:{admin.port}"
    sent = {name: value.format(host=host) for name, value in headers.items()}

    got, _ = await admin.post("/api/v1/pools/gpu0/unload", **sent)

    assert got == status
    assert len(admin.router.told) == (1 if status == 202 else 0)


async def test_given_a_token_when_our_page_comes_by_a_name_then_it_may_act() -> None:
    async with Admin(token=TOKEN) as admin:
        headers = {
            "Host": "pool.lab",
            "Origin": "http://pool.lab",
            "X-Requested-With": "x",
            "Authorization": f"Bearer {TOKEN}",
        }

        assert (await admin.post("/api/v1/pools/gpu0/unload", **headers))[0] == 202


# Watching


async def test_given_a_watcher_when_things_happen_then_a_snapshot_and_then_events_come(
    admin: Admin,
) -> None:
    async with admin.events() as frames:
        kind, snapshot_id, snapshot = await frames.next()
        assert kind == "snapshot"
        assert snapshot["pools"][0]["name"] == "gpu0"
        assert snapshot["gap"] is False

        admin.publish(NoteKind.TURN_ENDED, member="alpha", reason="turn")

        kind, id_, event = await frames.next()
        assert kind == "turn_ended"
        assert event["fields"] == {"member": "alpha", "reason": "turn"}
        assert event["view"]["resident"] == "alpha"
        assert (event["id"], snapshot_id) == (id_, id_.replace("-1", "-0"))


async def test_given_a_watcher_that_returns_when_it_names_its_last_event_then_none_is_missing(
    admin: Admin,
) -> None:
    async with admin.events() as frames:
        _, last_id, _ = await frames.next()
    admin.publish(NoteKind.TURN_ENDED, member="alpha", reason="turn")
    admin.publish(NoteKind.TURN_REOPENED, member="alpha")

    async with admin.events(last_id) as frames:
        kinds = [(await frames.next())[0] for _ in range(2)]
        kind, _, snapshot = await frames.next()

    assert kinds == ["turn_ended", "turn_reopened"]
    assert (kind, snapshot["gap"]) == ("snapshot", False)


async def test_given_a_watcher_of_an_earlier_router_when_it_returns_then_it_learns_of_the_gap(
    admin: Admin,
) -> None:
    admin.publish(NoteKind.TURN_ENDED, member="alpha", reason="turn")

    async with admin.events("18c0ffee-7") as frames:
        kind, _, snapshot = await frames.next()

    assert (kind, snapshot["gap"]) == ("snapshot", True)


async def test_given_a_burst_when_a_watcher_cannot_follow_then_it_gets_a_fresh_snapshot(
    admin: Admin,
) -> None:
    async with admin.events() as frames:
        await frames.next()

        for number in range(QUEUED_EVENTS + 5):  # without a pause: nothing is sent meanwhile
            admin.publish(NoteKind.SWAP_DEFERRED, reason="PodsBusy", retry_s=number)

        kind, _, snapshot = await frames.next()
        assert (kind, snapshot["gap"]) == ("snapshot", True)
        kind, _, event = await frames.next()
        assert (kind, event["fields"]["retry_s"]) == ("swap_deferred", QUEUED_EVENTS)


async def test_given_a_quiet_pool_when_nothing_happens_then_comments_keep_the_stream_open() -> None:
    async with Admin(keepalive_s=0.01) as admin, admin.events() as frames:
        await frames.next()

        assert [await frames.raw() for _ in range(3)] == [b": keepalive\n\n"] * 3


async def test_given_watchers_when_the_router_stops_then_their_streams_end_at_once() -> None:
    async with Admin() as admin, admin.events() as frames:
        await frames.next()

        stopping = asyncio.get_running_loop().create_task(admin.runner.cleanup())

        assert await frames.ended()
        await asyncio.wait_for(stopping, 20)


async def test_given_watchers_that_leave_when_others_come_then_there_is_room_again() -> None:
    # Short pauses: a watcher that left is noticed at the next comment at the latest.
    async with Admin(keepalive_s=0.01) as admin:
        async with AsyncExitStack() as watchers:
            for _ in range(MAX_SUBSCRIBERS):
                await watchers.enter_async_context(admin.events())

            status, told = await admin.call("/api/v1/events")
            assert (status, told["error"]["code"]) == (503, "too_many_watchers")

        async def room() -> bool:
            async with admin.session.get("/api/v1/events") as response:
                return response.status == 200

        async with asyncio.timeout(10):
            while not await room():
                pass
