"""
A seeded trace of requests for several models, driven against any router, and what came of it.

For `modelpool bench` and `benchmarks/swap.py`: black box, OpenAI-style streams over HTTP. People
and agents use models in sessions: a few requests for one model, one after the other, with pauses.
Sessions come at random, so that models are wanted at the same time and have to take turns.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp

from .slotwatch import Phase, SlotWatch, phases_of_views

MAX_SECONDS = 900.0
MAX_REQUESTS = 2000
MAX_SESSIONS_AT_ONCE = 64
LIMIT_S = 660.0
"""Longest time for one answer, and for all that goes on after the last session began: budgets of
routers end before."""


@dataclass(frozen=True, slots=True)
class Session:
    """Some requests for one model, one after the other."""

    at_s: float
    """When it begins, from the start of the trace."""
    model: str
    pauses_s: tuple[float, ...]
    """Before each request; the first one is 0."""
    tokens: int
    """Of each answer."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace; the same seed gives the same one on every machine."""

    seed: int
    models: tuple[str, ...]
    sessions: tuple[Session, ...]

    @property
    def requests(self) -> int:
        """How many requests it has."""
        return sum(len(session.pauses_s) for session in self.sessions)


@dataclass(slots=True)
class Outcome:
    """One request as its client saw it. Times are seconds from the start of the trace."""

    model: str
    sent_s: float
    first_s: float | None = None
    """First token."""
    ended_s: float = 0.0
    status: int = 0
    code: str = ""
    member: str = ""
    """Who answered, if the router says so."""

    @property
    def served(self) -> bool:
        """Whether a whole answer came."""
        return self.status == 200 and not self.code


@dataclass(slots=True)
class Result:
    """All outcomes of a trace, in the order of sending."""

    workload: Workload
    outcomes: list[Outcome] = field(default_factory=list)
    took_s: float = 0.0
    phases: list[Phase] = field(default_factory=list)
    """Who had the slot, if the router told."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What is worth a line of a table."""

    requests: int
    served: int
    failed: dict[str, int]
    """By code."""
    swaps: int
    """How often an answer began that was of another model than the one that began before."""
    thrash: float
    """Share of the turns in which a model served a single request while others of it waited."""
    first_p50_s: float
    first_p95_s: float
    first_max_s: float
    per_minute: float


def plan(
    models: Sequence[str],
    *,
    seed: int = 1,
    seconds: float = 60.0,
    sessions_per_minute: float = 12.0,
    tokens: int = 16,
) -> Workload:
    """
    Return a trace of about *seconds*: sessions at random times, of 1 to 5 requests each.

    Raises:
        ValueError: no model, or more than the bounds of this module allow.
    """
    if not models:
        raise ValueError("a workload needs at least one model")
    if not 0 < seconds <= MAX_SECONDS:
        raise ValueError(f"a workload lasts {MAX_SECONDS:.0f} s at most")
    chance = random.Random(seed)
    sessions: list[Session] = []
    at_s = 0.0
    while True:
        at_s += chance.expovariate(sessions_per_minute / 60)
        if at_s >= seconds and sessions:
            break
        count = chance.randint(1, 5)
        pauses = (0.0, *(round(chance.uniform(0.1, 1.5), 3) for _ in range(count - 1)))
        # some models are wanted more than others
        model = models[min(int(chance.expovariate(0.7)), len(models) - 1)]
        sessions.append(Session(round(at_s, 3), model, pauses, tokens))
    found = Workload(seed, tuple(models), tuple(sessions))
    if found.requests > MAX_REQUESTS:
        raise ValueError(f"a workload has {MAX_REQUESTS} requests at most, not {found.requests}")
    return found


async def drive(
    url: str, workload: Workload, *, key: str = "", admin_url: str | None = None
) -> Result:
    """
    Send the trace to the router at *url* and wait for every answer.

    Ends by itself: the trace is bounded, and so is the wait for each answer; what still runs
    `LIMIT_S` after the beginning of the last session is cut off, as ``unfinished``.

    Args:
        admin_url: Where the router tells who has the slot; nothing is told if nobody is there.
    """
    if admin_url is not None:
        async with SlotWatch(admin_url) as watch:
            start, result = time.monotonic(), await drive(url, workload, key=key)
        told = [(at - start, view) for at, view in watch.views]
        result.phases = phases_of_views(told, result.took_s)
        return result
    result, base = Result(workload), url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    connector = aiohttp.TCPConnector(limit=MAX_SESSIONS_AT_ONCE)
    async with aiohttp.ClientSession(
        headers=headers, timeout=timeout, connector=connector
    ) as client:
        start = time.monotonic()
        limit_s = LIMIT_S + max((each.at_s for each in workload.sessions), default=0.0)
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await asyncio.gather(
                    *(_session(client, base, each, start, result) for each in workload.sessions)
                )
        result.took_s = time.monotonic() - start
    result.outcomes.sort(key=lambda outcome: outcome.sent_s)
    return result


async def ask(
    client: aiohttp.ClientSession,
    url: str,
    model: str,
    tokens: int,
    start: float,
    noted: list[Outcome] | None = None,
) -> Outcome:
    """Send one streamed request and read its answer to the end; in *noted* from its beginning."""
    outcome = Outcome(model, time.monotonic() - start)
    if noted is not None:
        noted.append(outcome)
    body = {
        "model": model,
        "stream": True,
        "max_tokens": tokens,
        "messages": [{"role": "user", "content": "Say something."}],
    }
    try:
        async with client.post(f"{url}/v1/chat/completions", json=body) as response:
            outcome.status = response.status
            outcome.member = response.headers.get("x-modelpool-member", "")
            if response.status == 200:
                await _read_stream(response, outcome, start)
            else:
                outcome.code = _code(await response.read()) or str(response.status)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        outcome.code = type(error).__name__
    except asyncio.CancelledError:
        outcome.code = "unfinished"
        raise
    finally:
        outcome.ended_s = time.monotonic() - start
    return outcome


async def _session(
    client: aiohttp.ClientSession, url: str, session: Session, start: float, result: Result
) -> None:
    await asyncio.sleep(max(0.0, start + session.at_s - time.monotonic()))
    for pause_s in session.pauses_s:
        await asyncio.sleep(pause_s)
        await ask(client, url, session.model, session.tokens, start, result.outcomes)


async def _read_stream(response: aiohttp.ClientResponse, outcome: Outcome, start: float) -> None:
    """Note when the first token came, and whether the stream ended as it should."""
    outcome.code = "incomplete"
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            outcome.code = ""
        elif data.startswith(b'{"error"'):
            outcome.code = _code(data) or "error"
            return
        elif outcome.first_s is None:
            outcome.first_s = time.monotonic() - start


def _code(body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        return str(error.get("code") or error.get("type") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""


@dataclass(frozen=True, slots=True)
class Turn:
    """A time in which one model's answers began, without any other's in between."""

    model: str
    begin_s: float
    end_s: float
    answers: int
    left_waiting: bool
    """Requests for this model were waiting when the next model's turn began."""


def turns(result: Result) -> list[Turn]:
    """Return who had the slot when, as far as answers tell."""
    begun = sorted(
        (each for each in result.outcomes if each.first_s is not None),
        key=lambda each: each.first_s or 0.0,
    )
    found: list[Turn] = []
    at = 0
    while at < len(begun):
        upto = at
        while upto < len(begun) and begun[upto].model == begun[at].model:
            upto += 1
        mine = begun[at:upto]
        next_s = begun[upto].first_s if upto < len(begun) else None
        waiting = next_s is not None and any(
            each.model == mine[0].model and each.sent_s < next_s < (each.first_s or each.ended_s)
            for each in result.outcomes
        )
        end_s = max(each.ended_s for each in mine)
        found.append(Turn(mine[0].model, mine[0].first_s or 0.0, end_s, len(mine), waiting))
        at = upto
    return found


def summarise(result: Result) -> Summary:
    """Return the figures of a trace."""
    outcomes = result.outcomes
    served = [each for each in outcomes if each.served]
    failed: dict[str, int] = {}
    for each in outcomes:
        if not each.served:
            failed[each.code] = failed.get(each.code, 0) + 1
    had = turns(result)
    waits = sorted(each.first_s - each.sent_s for each in served if each.first_s is not None)
    thrashed = sum(1 for turn in had[:-1] if turn.answers == 1 and turn.left_waiting)
    return Summary(
        requests=len(outcomes),
        served=len(served),
        failed=failed,
        swaps=max(0, len(had) - 1),
        thrash=thrashed / max(1, len(had) - 1),
        first_p50_s=_quantile(waits, 0.5),
        first_p95_s=_quantile(waits, 0.95),
        first_max_s=waits[-1] if waits else 0.0,
        per_minute=len(served) / result.took_s * 60 if result.took_s else 0.0,
    )


def _quantile(ordered: Sequence[float], q: float) -> float:
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)] if ordered else 0.0
