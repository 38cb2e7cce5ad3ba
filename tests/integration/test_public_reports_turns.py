"""Swaps, turns and idle unloads, as users of such routers have reported them going wrong."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path

from rawupstream import LAST_CHUNK, STREAM_HEAD, Link, SeenRequest, chunk
from scripted import Life, Recorder, ServedScripted, scripted, scripted_member, scripted_pool
from served import LIMIT_S, Json, all_of, learned


def times(router: ServedScripted, *, load_s: float, unload_s: float = 0.002) -> None:
    """Let every member load and unload in these times."""
    for driver in router.router.fakes.values():
        for behaviour in driver.behaviours.values():
            behaviour.load_s, behaviour.unload_s = load_s, unload_s


async def empty(router: ServedScripted) -> None:
    """Empty the slot by command."""
    assert await router.act("unload") == 202
    await router.wait_for(lambda v: v["state"] == "cold", "emptied")


async def test_who_caused_a_load_is_served_by_it(tmp_path: Path) -> None:
    """Two members asked for at the same instant: each load serves somebody before it goes."""
    engine = Recorder()
    async with scripted(
        tmp_path, scripted_pool("alpha", "beta", maxTurn="0s"), answerer=engine
    ) as router:
        times(router, load_s=0.003)
        for _ in range(30):
            await all_of(router.answered("beta"), router.answered("alpha"))
            await empty(router)
        loads = router.driver().count("landed")
        served = Counter(id(life) for life, _ in engine.seen)
        assert len(served) == loads == 60
        assert min(served.values()) >= 1


async def test_a_pool_of_one_member_is_a_plain_proxy(tmp_path: Path) -> None:
    """A target is not its own rival: one load, and everybody is served."""
    engine = Recorder()
    async with scripted(tmp_path, scripted_pool("alpha"), answerer=engine) as router:
        times(router, load_s=0.05)
        await all_of(*(router.answered("alpha") for _ in range(20)))
        assert router.driver().count("activate") == 1
        assert router.driver().count("deactivate") == 0


async def test_queued_requests_of_the_resident_are_not_idleness(tmp_path: Path) -> None:
    """Between two queued requests the resident looks idle, and must not be taken away."""
    engine = Recorder()
    pool = scripted_pool("pictures", "chat")
    pool["members"][0]["parallel"] = 1
    async with scripted(tmp_path, pool, answerer=engine) as router:
        times(router, load_s=0.01)
        await router.answered("pictures")
        queued = [router.begin(router.answered("pictures", ms=150)) for _ in range(8)]
        await router.until_held("pictures", 7)
        later = await router.answered("chat")
        await all_of(*queued)
        assert engine.members == ["pictures"] * 9 + ["chat"]
        assert later.took_s >= 6 * 0.15
        assert router.driver().count("landed") == 2


async def test_fields_of_a_request_never_change_how_a_member_runs(tmp_path: Path) -> None:
    """Runtime options of one client or another cause no reload, and reach the engine."""
    engine = Recorder()
    odd = {"options": {"num_ctx": 8192, "mlock": True}, "keep_alive": -1, "n_ctx": 1 << 20}
    async with scripted(tmp_path, scripted_pool("alpha", "beta"), answerer=engine) as router:
        for number in range(10):
            await router.answered("alpha", **(odd if number % 2 else {}))
        assert router.driver().count("activate") == 1
        for number, request in enumerate(engine.requests):
            expected = router.body("alpha", **(odd if number % 2 else {}))
            assert request.body == json.dumps(expected).encode()


async def test_aliases_share_their_member(tmp_path: Path) -> None:
    """Two names of one member are one resident; each name reaches the engine as it was sent."""
    engine = Recorder()
    pool = scripted_pool("weights", "beta")
    pool["members"][0]["models"] = ["a1", "a2"]
    async with scripted(tmp_path, pool, answerer=engine) as router:
        for number in range(20):
            answer = await router.chat(f"a{1 + number % 2}")
            assert (answer.status, answer.member) == (200, "weights")
        assert router.driver().count("activate") == 1
        named = [json.loads(request.body)["model"] for request in engine.requests]
        assert named == ["a1", "a2"] * 10


async def test_requests_in_every_phase_of_an_idle_unload_are_served(tmp_path: Path) -> None:
    """One that arrives as the slot is being emptied is served or loads afresh, never parked."""
    dice = random.Random(946)
    pool = scripted_pool("alpha", "beta", idleUnloadAfter="100ms")
    async with scripted(tmp_path, pool) as router:
        times(router, load_s=0.005, unload_s=0.02)
        for _ in range(25):
            await router.answered("alpha")  # one that was parked would be refused in the end
            await asyncio.sleep(dice.uniform(0.09, 0.14))
        loads = router.driver().count("landed")
        assert 2 <= loads <= 25, "some came in time and some did not"
        assert await router.metric("modelpool_held_requests") == 0


async def test_a_long_answer_is_not_idleness(tmp_path: Path) -> None:
    """Silence inside an answer does not start the idle time; its end does."""
    go_on = asyncio.Event()

    async def engine(life: Life, link: Link, request: SeenRequest) -> bool:
        await link.send(STREAM_HEAD + chunk(b'data: {"n":1}\n\n'))
        await go_on.wait()
        await link.send(chunk(b"data: [DONE]\n\n") + LAST_CHUNK)
        return False

    pool = scripted_pool("alpha", idleUnloadAfter="150ms")
    async with scripted(tmp_path, pool, answerer=engine) as router:
        clock = asyncio.get_running_loop().time
        async with router.stream("alpha") as stream:
            await stream.next()
            silent_until = clock() + 0.5
            await router.wait_for(lambda _: clock() > silent_until, "silence")
            assert (await router.pool())["resident"] == "alpha"
            go_on.set()
            await stream.rest()
        ended = clock()
        assert stream.is_complete
        await router.wait_for(lambda v: v["state"] == "cold", "emptied")
        assert clock() - ended >= 0.14


async def test_every_timer_names_itself(tmp_path: Path) -> None:
    """Four limits with four endings: the answer and the log tell which of them it was."""
    rules = {
        "swapBudget": "250ms",
        "loadTimeout": "150ms",
        "drainTimeout": "100ms",
        "responseTimeout": "400ms",
        "maxTurn": "0s",
    }
    pool = scripted_pool("alpha", "beta", "gamma", **rules)
    for each in pool["members"]:
        each["expectedLoad"] = "50ms"
    async with scripted(tmp_path, pool, answerer=Recorder()) as router:
        alpha, beta, gamma = router.driver().behaviours.values()
        gamma.load_hangs = True
        too_slow = await router.chat("gamma")
        assert (too_slow.status, too_slow.code) == (503, "member_failed")
        assert "load_timeout" in too_slow.message and "0.15 s" in too_slow.message

        silent = await router.chat("alpha", hang=True)
        assert (silent.status, silent.code) == (504, "upstream_timeout")
        assert "sent no answer for 0.4 s" in silent.message

        drained = router.begin(router.chat("alpha", hang=True))
        await router.wait_for(lambda v: v["in_flight"] == 1, "alpha at work")
        await router.answered("beta")
        assert ((await drained).status, (await drained).code) == (503, "pool_draining")
        assert "drainTimeout" in (await drained).message

        beta.unload_s = 0.5
        waited = await router.chat("alpha")
        assert (waited.status, waited.code) == (503, "swap_budget_exceeded")
        await router.until_resident("alpha")
        await router.wait_for_log("request", count=5)
        outcomes = [line["outcome"] for line in router.log_lines("request")]
        assert Counter(outcomes) == {
            "refused:member_failed": 1,
            "upstream_error": 2,
            "served": 1,
            "refused:swap_budget_exceeded": 1,
        }


async def test_a_mixed_queue_is_collated(tmp_path: Path) -> None:
    """A B A A C A B C asked for at once takes one load each, not one per change."""
    engine = Recorder()
    async with scripted(
        tmp_path, scripted_pool("alpha", "beta", "gamma"), answerer=engine
    ) as router:
        times(router, load_s=0.03)
        assert await router.act("pause") == 202
        asked = []
        counts: Counter[str] = Counter()
        for name in ("alpha", "beta", "alpha", "alpha", "gamma", "alpha", "beta", "gamma"):
            asked.append(router.begin(router.answered(name, ms=10)))
            counts[name] += 1
            await router.until_held(name, counts[name])
        assert await router.act("resume") == 202
        await all_of(*asked)
        assert router.driver().count("landed") == 3
        assert engine.members == ["alpha"] * 4 + ["beta"] * 2 + ["gamma"] * 2


async def test_endless_demand_for_the_resident_starves_nobody(tmp_path: Path) -> None:
    """Who waits is served while it goes on, because a turn ends and not because a hold does."""
    async with scripted(
        tmp_path,
        scripted_pool("alpha", "gamma", maxTurn="300ms", linger="100ms", swapBudget="10m"),
        answerer=Recorder(),
    ) as router:
        times(router, load_s=0.02)
        is_over = False

        async def again_and_again() -> None:
            while not is_over:
                await router.answered("alpha", ms=10)

        await router.answered("alpha")
        crowd = [router.begin(again_and_again()) for _ in range(3)]
        await router.wait_for(lambda v: v["in_flight"] > 0, "traffic")
        async with asyncio.timeout(LIMIT_S):
            waited = await router.answered("gamma")
        is_over = True
        await all_of(*crowd)
        assert waited.held_ms >= 250


async def test_five_hundred_at_once_and_four_at_a_time(tmp_path: Path) -> None:
    """More than the engine takes is held, not refused and not pushed into the engine."""
    engine = Recorder()
    pool = scripted_pool("alpha", "beta")
    pool["members"][0]["parallel"] = 4
    async with scripted(tmp_path, pool, answerer=engine, maxHeldPerKey=1000) as router:
        times(router, load_s=0.05)
        answers = await all_of(*(router.chat("alpha", ms=1) for _ in range(500)))
        assert [answer.status for answer in answers] == [200] * 500
        assert engine.peak == 4


async def test_an_engine_that_never_answers_keeps_nobody(tmp_path: Path) -> None:
    """Hundreds of requests to an engine that accepts and is silent end, and the slot is free."""
    pool = scripted_pool("alpha", "beta", responseTimeout="400ms")
    pool["members"][0]["parallel"] = 300
    async with scripted(tmp_path, pool, answerer=Recorder(), maxHeldPerKey=1000) as router:
        answers = await all_of(*(router.chat("alpha", hang=True) for _ in range(300)))
        assert {(answer.status, answer.code) for answer in answers} == {(504, "upstream_timeout")}
        view = await router.pool()
        assert (view["in_flight"], view["held"]) == (0, 0)
        assert (await router.answered("beta")).member == "beta"


async def test_every_way_in_goes_through_the_same_gate(tmp_path: Path) -> None:
    """Chat, passthrough, a load by command and the default's warming, all at the same time."""
    engine = Recorder()
    pool = scripted_pool("alpha", "beta", "gamma", "delta", default="delta", maxTurn="50ms")
    async with scripted(tmp_path, pool, answerer=engine, passthrough=True) as router:
        times(router, load_s=0.01)

        async def passed_through() -> None:
            answer = await router.get("/upstream/beta/some/page?x=1")
            assert (answer.status, answer.json()) == (200, {"by": "beta"})

        for _ in range(5):
            assert await router.act("load", "gamma") == 202
            await all_of(
                router.answered("alpha"),
                passed_through(),
                router.answered("gamma", path="/v1/embeddings"),
            )
        assert engine.members.count("beta") == 5
        passed = next(request for life, request in engine.seen if life.member == "beta")
        assert passed.line == b"GET /some/page?x=1 HTTP/1.1"
        assert not router.driver().violations
        assert await router.metric("modelpool_residency_violations_total") == 0


async def test_three_kinds_of_work_on_three_members(tmp_path: Path) -> None:
    """Speech, chat and vectors at once on a cold pool: nobody waits for a lock of his own."""
    engine = Recorder()
    pools = scripted_pool("ears", "mouth", "maps")
    async with scripted(tmp_path, pools, answerer=engine) as router:
        times(router, load_s=0.01)
        form = b"--x\r\nContent-Disposition: form-data; name=model\r\n\r\nears\r\n--x--\r\n"
        answers = await all_of(
            router.chat(
                "ears",
                path="/v1/audio/transcriptions",
                data=form,
                headers={"Content-Type": "multipart/form-data; boundary=x"},
            ),
            router.chat("mouth"),
            router.chat("maps", path="/v1/embeddings"),
        )
        assert [answer.status for answer in answers] == [200] * 3
        assert sorted(engine.members) == ["ears", "maps", "mouth"]


async def test_every_refusal_during_swaps_can_be_read(tmp_path: Path) -> None:
    """Two members asked for in turn with little patience: each answer is whole, none is empty."""
    learned(tmp_path, "alpha", "beta", load_s=0.03, unload_s=0.01, drain_s=0.01)
    pool = scripted_pool("alpha", "beta", swapBudget="40ms", maxTurn="0s")
    dice = random.Random(635)
    async with scripted(tmp_path, pool, answerer=Recorder()) as router:
        times(router, load_s=0.03)

        async def one_client(name: str) -> list[str]:
            seen = []
            for _ in range(60):
                answer = await router.chat(name, ms=dice.randrange(3))
                assert answer.body and answer.headers["x-request-id"]
                if answer.status != 200:
                    assert (answer.status, answer.code) == (503, "swap_budget_exceeded")
                    assert answer.retry_after_s >= 1 and answer.message
                    await asyncio.sleep(0.01)
                seen.append(answer.headers["x-request-id"])
            return seen

        told = await all_of(*(one_client(name) for name in ("alpha", "beta", "alpha")))
        await router.wait_for_log("request", count=180)
        logged = Counter(line["request_id"] for line in router.log_lines("request"))
        assert logged == Counter(each for ids in told for each in ids)
        outcomes = Counter(line["outcome"] for line in router.log_lines("request"))
        assert outcomes.keys() == {"served", "refused:swap_budget_exceeded"}


async def test_after_a_crash_nothing_is_waited_for_that_is_there(tmp_path: Path) -> None:
    """
    The memory of a crashed member is free already: its successor loads at once.

    Whatever a living one is granted lasts minutes here.
    """
    engine = Recorder()
    minutes = dict.fromkeys(("linger", "maxTurn", "drainTimeout", "swapBudget"), "10m")
    pool: Json = {
        **scripted_pool(name="gpu0", **minutes),
        "members": [scripted_member("alpha"), scripted_member("beta")],
    }
    async with scripted(tmp_path, pool, answerer=engine) as router:
        times(router, load_s=0.05)
        await router.answered("alpha")
        crashed = await router.chat("alpha", crash=True)
        assert (crashed.status, crashed.code) == (502, "upstream_reset")
        async with asyncio.timeout(LIMIT_S):
            await router.answered("beta")
