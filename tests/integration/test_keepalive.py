"""Ten thousand requests of every kind, pipelined on kept connections: no answer is another's."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fronts import give_routers
from rawclient import RawAnswer, RawClient
from rawupstream import CHUNKED_HEAD, LAST_CHUNK, STREAM_HEAD, Link, SeenRequest, answer, chunk
from scripted import Life, scripted, scripted_pool

CLIENTS, ON_EACH = 8, 125
SEED = 20_260_202
ALONE = ("big", "spooled", "apart")
"""Not behind another one: more than a pipeline may hold, or sent in pieces."""
SHORT = ("plain", "padded", "stream", "chunks", "closing", "unframed", "broken", "unknown", "list")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    number: int
    kind: str

    @property
    def id(self) -> str:
        """As both ends know it."""
        return f"mix-{self.number}"

    def raw(self) -> bytes:
        """Return its bytes."""
        line = f"X-Request-Id: {self.id}\r\n"
        if self.kind == "list":
            return f"GET /v1/models HTTP/1.1\r\nHost: a\r\n{line}\r\n".encode()
        pad = {"padded": 3_000, "big": 90_000, "spooled": 400_000}.get(self.kind, self.number % 7)
        model = "nobody" if self.kind == "unknown" else "alpha"
        body = json.dumps(
            {"model": model, "n": self.number, "kind": self.kind, "pad": "x" * pad}
        ).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n{line}"
        if self.kind == "broken":
            body = body[:-1]
        if self.kind == "apart":  # a body in chunks: never plain
            return (head + "Transfer-Encoding: chunked\r\n\r\n").encode() + chunk(body) + LAST_CHUNK
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def check(self, got: RawAnswer) -> None:
        """See that *got* is the answer to this and to nothing else."""
        assert got.header("x-request-id") == self.id
        match self.kind:
            case "list":
                assert [each["id"] for each in got.json()["data"]] == ["alpha"]
            case "unknown":
                assert (got.status, got.json()["error"]["code"]) == (404, "model_not_found")
            case "broken":
                assert (got.status, got.json()["error"]["code"]) == (400, "invalid_json")
            case "stream":
                events = [json.loads(line[6:]) for line in got.body.split(b"\n\n") if line]
                assert events == [{"n": self.number, "of": part} for part in range(3)]
            case _:
                assert (got.status, got.json()) == (200, {"n": self.number})


async def engine(life: Life, link: Link, request: SeenRequest) -> bool:
    """Answer with the number that was asked with, in the way that was asked for."""
    asked = json.loads(request.body)
    body = json.dumps({"n": asked["n"]}).encode()
    match asked["kind"]:
        case "stream":
            await link.send(STREAM_HEAD)
            for part in range(3):
                event = json.dumps({"n": asked["n"], "of": part}).encode()
                await link.send(chunk(b"data: " + event + b"\n\n"))
            await link.send(LAST_CHUNK)
        case "chunks":
            await link.send(CHUNKED_HEAD + chunk(body[:3]) + chunk(body[3:]) + LAST_CHUNK)
        case "closing":
            await link.send(answer(body, b"Connection: close"))
            return False
        case "unframed":
            await link.send(b"HTTP/1.1 200 OK\r\n\r\n" + body)
            return False
        case _:
            await link.send(answer(body))
    return True


def batches(asks: list[Ask], dice: random.Random) -> Iterator[list[Ask]]:
    """Yield what is sent together: up to six, and the big ones by themselves."""
    batch: list[Ask] = []
    limit = dice.randint(1, 6)
    for ask in asks:
        if batch and (ask.kind in ALONE or batch[-1].kind in ALONE or len(batch) >= limit):
            yield batch
            batch = []
            limit = dice.randint(1, 6)
        batch.append(ask)
    yield batch


def asks_of(first: int, dice: random.Random) -> list[Ask]:
    """Draw the requests of one connection; late in its life one that is not plain."""
    kinds = dice.choices(
        (*SHORT, "big", "spooled"), (20, 4, 6, 4, 2, 2, 2, 2, 3, 1, 0.3), k=ON_EACH
    )
    if dice.random() < 0.5:
        kinds[dice.randrange(ON_EACH // 2, ON_EACH)] = "apart"
    return [Ask(first + offset, kind) for offset, kind in enumerate(kinds)]


@pytest.mark.parametrize(("front", "connections"), [("own", 10), ("aiohttp", 3)])
async def test_ten_thousand_mixed_requests_get_their_own_answers(
    front: str, connections: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_routers(front, monkeypatch)
    sent: dict[str, str] = {}

    async def work(number: int) -> None:
        dice = random.Random(SEED + number)
        for turn in range(connections):
            async with RawClient(*router.address) as client:
                first = (number * connections + turn) * ON_EACH
                for batch in batches(asks_of(first, dice), dice):
                    await client.send(b"".join(ask.raw() for ask in batch))
                    for ask in batch:
                        ask.check(await client.answer())
                        sent[ask.id] = ask.kind

    pool = scripted_pool("alpha")
    async with scripted(tmp_path, pool, answerer=engine, spoolAboveBytes="256KiB") as router:
        async with asyncio.timeout(300):
            await asyncio.gather(*(work(number) for number in range(CLIENTS)))
        await router.until_quiet()

        assert len(sent) == CLIENTS * connections * ON_EACH
        asked = {each for each, kind in sent.items() if kind != "list"}
        await router.wait_for_log("request", count=len(asked))
        lines = router.log_lines("request")
        assert len(lines) == len(asked) and {line["request_id"] for line in lines} == asked
        expected = {"unknown": "refused:model_not_found", "broken": "refused:invalid_json"}
        for line in lines:
            assert line["outcome"] == expected.get(sent[line["request_id"]], "served")
