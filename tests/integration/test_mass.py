"""
Thousands of requests, loads and crashes: each request has one outcome, and nothing gets stuck.

The members live in this process (`scripted`): two hundred crashes cost two hundred starts, and an
interpreter's start alone takes longer than a whole load here. Sockets, router and driver contract
are the real ones. Pauses after failures are scaled down with the loads (20 ms for a minute).
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from modelpool_router.core import scheduler
from modelpool_router.core.spec import MemberName
from rawclient import BadAnswer, RawClient
from rawupstream import LAST_CHUNK, STREAM_HEAD, Link, SeenRequest, answer, chunk
from scripted import Life, ServedScripted, scripted, scripted_pool
from served import LIMIT_S, Json, all_of

MEMBERS = ("alpha", "beta", "gamma")
CLIENTS, EACH = 8, 1250
LOAD_S = 0.02
LONGEST_S = 10.0
"""No request may take longer, whatever happens around it."""
SEED = 20_260_101


@dataclass(frozen=True, slots=True)
class Told:
    """What a client saw of one request."""

    status: int
    """0 when it left, or saw the connection end."""
    code: str
    member: str


@dataclass
class Plan:
    """What one request is, drawn from a seed."""

    number: int
    model: str
    stream: bool
    work_ms: float
    crashes: bool
    leaves_after_s: float | None
    resets: bool

    @property
    def request_id(self) -> str:
        """Known to the client and to the log."""
        return f"mass-{self.number}"

    def raw(self) -> bytes:
        """Return the request as bytes."""
        body = json.dumps(
            {"model": self.model, "stream": self.stream, "ms": self.work_ms, "crash": self.crashes}
        ).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n"
            f"X-Request-Id: {self.request_id}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


def plans(client: int) -> Iterator[Plan]:
    """Draw what one client does: runs of a model, as people and agents use them."""
    dice = random.Random(SEED + client)
    model = MEMBERS[client % 3]
    for number in range(client * EACH, (client + 1) * EACH):
        if dice.random() < 0.02:
            model = dice.choice(MEMBERS)
        leaves = dice.random() < 0.10
        yield Plan(
            number,
            model,
            stream=dice.random() < 0.3,
            work_ms=dice.choice((0.0, 0.0, 1.0, 3.0)),
            crashes=dice.random() < 0.02,
            leaves_after_s=dice.choice((0.0, 0.001, 0.005, 0.02)) if leaves else None,
            resets=dice.random() < 0.5,
        )


async def engine(life: Life, link: Link, request: SeenRequest) -> bool:
    """Answer, or crash, as the request says."""
    wanted = json.loads(request.body)
    if wanted["ms"]:
        await asyncio.sleep(wanted["ms"] / 1000)
    if wanted["crash"]:
        life.crash()
        return False
    if wanted["stream"]:
        await link.send(STREAM_HEAD + chunk(b'data: {"n":1}\n\n'))
        await asyncio.sleep(0)
        await link.send(chunk(b"data: [DONE]\n\n") + LAST_CHUNK)
        return False
    await link.send(answer(json.dumps({"by": life.member}).encode()))
    return True


async def one(client: RawClient, plan: Plan) -> Told:
    """Send one request; read its answer or leave."""
    try:
        await client.send(plan.raw())
        if plan.leaves_after_s is not None:
            await asyncio.sleep(plan.leaves_after_s)
            (client.reset if plan.resets else client.close)()
            return Told(0, "left", "")
        async with asyncio.timeout(LONGEST_S):
            got = await client.answer()
    except (BadAnswer, ConnectionError):
        client.close()
        return Told(0, "broken", "")
    member = got.header("x-modelpool-member") or ""
    assert got.header("x-request-id") == plan.request_id, "somebody else's answer"
    if got.closing:
        client.close()
    if got.status != 200:
        return Told(got.status, got.json()["error"]["code"], member)
    if not plan.stream:
        assert got.json() == {"by": plan.model}
    elif b"[DONE]" not in got.body:
        client.close()
        return Told(200, json.loads(got.body.split(b"data: ")[-1])["error"]["code"], member)
    return Told(200, "", member)


async def work(router: ServedScripted, number: int, told: dict[str, Told]) -> None:
    """Be one client: its requests one after the other, on a kept connection while it lasts."""
    client = router.raw()
    try:
        for plan in plans(number):
            if not client.is_open:
                client = await router.raw().__aenter__()
            told[plan.request_id] = await one(client, plan)
    finally:
        client.close()


@pytest.fixture
def scaled_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scale the pauses after failures down as the loads are."""
    monkeypatch.setattr(scheduler, "FIRST_BACKOFF_S", 0.002)
    monkeypatch.setattr(scheduler, "MAX_DOUBLED_BACKOFF_S", 0.01)
    monkeypatch.setattr(scheduler, "BACKOFF_PER_COST", 0.1)
    monkeypatch.setattr(scheduler, "EARLY_LOSS_S", 0.02)
    monkeypatch.setattr(scheduler, "FIRST_DEFER_S", 0.01)


@pytest.mark.usefixtures("scaled_pauses")
async def test_ten_thousand_requests_have_one_outcome_each(tmp_path: Path) -> None:
    pool = scripted_pool(*MEMBERS, maxTurn="200ms", linger="5ms")
    async with scripted(tmp_path, pool, answerer=engine) as router:
        driver = router.driver()
        for behaviour in driver.behaviours.values():
            behaviour.load_s, behaviour.unload_s = LOAD_S, 0.002
        told: dict[str, Told] = {}
        async with asyncio.timeout(120):
            await asyncio.gather(*(work(router, number, told) for number in range(CLIENTS)))
        await router.until_quiet()

        count = CLIENTS * EACH
        assert len(told) == count
        # a client that leaves before its request was read has asked for nothing
        counted = int(await router.metric("modelpool_requests_total"))
        unread = count - counted
        left = sum(each.code == "left" for each in told.values())
        assert 0 <= unread <= left
        await router.wait_for_log("request", count=counted)
        lines = {line["request_id"]: line for line in router.log_lines("request")}
        assert len(lines) == len(router.log_lines("request")) == counted
        for request_id, each in told.items():
            if request_id not in lines:
                assert each.code == "left"
                continue
            check(each, lines[request_id])

        outcomes = Counter(line["outcome"] for line in lines.values())
        assert outcomes["served"] > 0.75 * count
        assert 0.03 * count < left < 0.2 * count
        assert driver.count("died") > 100
        assert driver.count("landed") > 200
        assert len(driver.existing) <= 1


def check(told: Told, line: dict[str, object]) -> None:
    """Compare what a client saw with what the router says became of its request."""
    outcome = line["outcome"]
    if told.code == "left":
        return  # its answer may have been on its way, whatever it was
    if told.code == "broken":
        assert outcome == "upstream_error", line
    elif told.status == 200 and not told.code:
        assert (outcome, line["member"]) == ("served", told.member)
    elif told.status == 200:
        assert (outcome, line["code"]) == ("upstream_error", told.code)
    elif told.code in ("upstream_reset", "upstream_timeout", "upstream_protocol_error"):
        assert (outcome, line["code"], line["status"]) == ("upstream_error", told.code, told.status)
    else:
        assert (outcome, line["status"]) == (f"refused:{told.code}", told.status)


async def test_pools_do_not_influence_each_other(tmp_path: Path) -> None:
    """
    One swaps without end, crashes, and then hangs; the other one's clients notice nothing.

    If they had to wait for the one that hangs, it would be for minutes.
    """
    calm = scripted_pool("calm", name="calm")
    wild = scripted_pool("wild", "wilder", name="wild", maxTurn="0s", loadTimeout="10m")
    async with scripted(tmp_path, calm, wild, answerer=engine, maxHeldPerKey=500) as router:
        storm = router.driver("wild")
        for behaviour in storm.behaviours.values():
            behaviour.load_s = 0.002
        ask: Json = {"ms": 1.0, "crash": False, "stream": False}
        await router.answered("calm", **ask)

        calmed = False

        async def rage() -> None:
            number = 0
            while not calmed:
                number += 1
                await router.chat(("wild", "wilder")[number % 2], **{**ask, "crash": number == 30})

        async def many(count: int) -> None:
            for _ in range(count):
                await router.answered("calm", **ask)

        async def while_it_storms() -> None:
            while storm.count("landed") - loads <= 20:
                await many(1)

        raging = [router.begin(rage()) for _ in range(4)]
        loads = storm.count("landed")
        await all_of(*(many(50) for _ in range(4)), while_it_storms())
        calmed = True
        await all_of(*raging)
        await router.until_quiet()

        resident = (await router.pool("wild"))["resident"]
        other = "wild" if resident == "wilder" else "wilder"
        storm.behaviours[MemberName(other)].load_hangs = True
        stuck = [router.begin(router.chat(other, **ask)) for _ in range(100)]
        await router.until_held(other, 100, name="wild")
        async with asyncio.timeout(LIMIT_S):
            await many(50)
        assert (await router.pool("calm"))["swaps_total"] <= 1
        for stuck_one in stuck:
            stuck_one.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
