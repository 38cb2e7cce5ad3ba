"""What waiting requests cost: their bytes in memory up to 1 MiB each, in the spool beyond."""

from __future__ import annotations

import asyncio
import hashlib
import json
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakemembers import until
from rawclient import RawClient
from served import ServedProcess, member, pool, served, served_here

MIB = 1024 * 1024


@pytest.fixture
def many_files() -> Iterator[None]:
    """Let this process and its children have a few thousand connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def chat_of(size: int) -> bytes:
    """Return a request for alpha whose body has *size* bytes."""
    body = json.dumps({"model": "alpha", "messages": [{"role": "user", "content": ""}]})
    body = body.replace('""', f'"{"x" * (size - len(body))}"')
    assert len(body) == size
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        f"Content-Length: {size}\r\n\r\n"
    )
    return (head + body).encode()


def memory_mib(router: ServedProcess, field: str) -> float:
    """Return a line of the router's memory statistics."""
    for line in Path(f"/proc/{router.pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise AssertionError(field)


async def hold(router: ServedProcess, count: int, size: int) -> list[RawClient]:
    """Let *count* clients wait for alpha, with bodies of *size* bytes."""
    request = chat_of(size)
    clients = [router.raw() for _ in range(count)]
    at_once = asyncio.Semaphore(50)

    async def ask(client: RawClient) -> None:
        async with at_once:
            await client.__aenter__()
            await client.send(request)

    await asyncio.gather(*(ask(client) for client in clients))
    await router.until_held("alpha", count)
    return clients


@pytest.mark.usefixtures("many_files")
async def test_a_thousand_held_requests_of_one_mebibyte(tmp_path: Path) -> None:
    slow = pool(member("alpha", load=300), swapBudget="120s")
    async with served(tmp_path, slow, maxHeldBytes="1200MiB", spoolAboveBytes="1MiB") as router:
        before = memory_mib(router, "VmRSS")
        clients = await hold(router, 1000, MIB)
        assert (await router.state())["router"]["held_bytes"] == 1000 * MIB
        assert memory_mib(router, "VmHWM") <= 1.3 * 1000 + 150
        assert memory_mib(router, "VmRSS") - before >= 900  # they are where they are said to be
        full = await router.chat("alpha")
        assert (full.status, full.code) == (503, "queue_full")
        for client in clients:
            client.close()


@pytest.mark.usefixtures("many_files")
async def test_bodies_of_four_megabytes_wait_in_the_spool(tmp_path: Path) -> None:
    slow = pool(member("alpha", load=300), swapBudget="120s")
    async with served(tmp_path, slow, maxHeldBytes="450MB") as router:
        before = memory_mib(router, "VmRSS")
        clients = await hold(router, 100, 4_000_000)
        assert (await router.state())["router"]["held_bytes"] == 400_000_000
        assert memory_mib(router, "VmRSS") <= 150 + 0.1 * 400
        await until(
            lambda: memory_mib(router, "VmRSS") - before <= 0.02 * 400,
            "what the bodies came through is given back",
        )
        async with router.raw() as one_more:
            await one_more.send(chat_of(60_000_000)[:1000])  # its length alone is too much
            refused = await one_more.answer()
            assert (refused.status, refused.json()["error"]["code"]) == (503, "queue_full")
        for client in clients:
            client.close()


async def test_a_body_of_megabytes_costs_no_memory_while_its_answer_is_made(tmp_path: Path) -> None:
    async with served(tmp_path, pool(member("alpha", keys={"parallel": 40}))) as router:
        await router.answered("alpha")
        before = memory_mib(router, "VmRSS")
        request = chat_of(4_000_000).replace(b'{"model"', b'{"x_delay_ms": 900000, "model"')
        request = request.replace(b"Length: 4000000", b"Length: 4000022")
        clients = [router.raw() for _ in range(30)]
        for client in clients:
            await client.__aenter__()
            await client.send(request)
        port = router.members.events("start", "alpha")[0]["port"]

        async def all_sent() -> bool:
            async with router.session.get(f"http://127.0.0.1:{port}/debug/requests") as response:
                return len(await response.json()) == 31

        await until(all_sent, "the member has all of them")
        await until(
            lambda: memory_mib(router, "VmRSS") - before <= 0.1 * 120,
            "what was sent is not kept in memory",
        )
        for client in clients:
            client.close()


async def test_what_was_spooled_arrives_unchanged(tmp_path: Path) -> None:
    async with served_here(tmp_path, pool(member("alpha", load=0.2))) as router:
        body = chat_of(4_000_000).partition(b"\r\n\r\n")[2]
        async with router.raw() as client:
            await client.send(chat_of(4_000_000))
            assert (await client.answer()).status == 200
        port = router.members.events("start", "alpha")[0]["port"]
        async with router.session.get(f"http://127.0.0.1:{port}/debug/requests") as response:
            seen = (await response.json())[0]
        assert seen["body_bytes"] == 4_000_000
        assert seen["body_sha256"] == hashlib.sha256(body).hexdigest()


async def test_a_body_that_never_completes_registers_no_demand(tmp_path: Path) -> None:
    request = chat_of(100_000)
    async with served_here(tmp_path, pool(member("alpha")), bodyStall="400ms") as router:
        async with router.raw() as stalled, router.raw() as gone:
            await stalled.send(request[:50_000])
            await gone.send(request[:50_000])

            async def both_read() -> bool:
                return bool((await router.state())["router"]["held_bytes"] >= 80_000)

            await until(both_read, "half of both bodies is in")
            gone.reset()
            answer = await stalled.answer()
            assert answer.status == 408
            view = await router.pool()
            assert (view["state"], view["held"], view["member"]["alpha"]["wanted"]) == (
                "cold",
                0,
                False,
            )
        assert router.starts("alpha") == 0
