"""Names, lists, browsers and keys, as users of such routers have reported them going wrong."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from scripted import Recorder, ServedScripted, scripted, scripted_pool
from served import CANARY, Answer, Json, all_of, learned

ORIGIN = "https://ui.example"


async def test_probing_clients_wake_nobody(tmp_path: Path) -> None:
    """Agents guess the kind of server by asking for all sorts of paths; none of them is demand."""
    probes = {
        "/": 404,
        "/ui/": 404,
        "/lmstudio-greeting": 404,
        "/running": 404,
        "/api/tags": 404,
        "/props": 404,
        "/slots": 404,
        "/metrics": 404,
        "/favicon.ico": 404,
        "/upstream/alpha/props": 404,
        "/v1/chat/completions": 405,
        "/v1/models": 200,
        "/v1/models/beta": 200,
        "/health": 200,
    }
    async with scripted(tmp_path, scripted_pool("alpha", "beta"), answerer=Recorder()) as router:
        for path, status in probes.items():
            got = await router.get(path)
            assert got.status == status, path
            assert got.headers["Content-Type"].startswith("application/json")
            assert isinstance(got.json(), dict)
            if status >= 400:
                assert got.code in ("unknown_url", "method_not_allowed")
        assert (await router.pool())["state"] == "cold"
        assert router.driver().count("activate") == 0


async def test_slashes_of_naive_clients(tmp_path: Path) -> None:
    """A base address with a slash at its end leads to two of them; the engine sees one."""
    engine = Recorder()
    async with scripted(tmp_path, scripted_pool("alpha", "beta"), answerer=engine) as router:
        listed = await router.get("/v1//models")
        assert [each["id"] for each in listed.json()["data"]] == ["alpha", "beta"]
        answer = await router.chat("alpha", path="/v1//chat///completions")
        assert answer.status == 200
        assert engine.requests[0].line == b"POST /v1/chat/completions HTTP/1.1"
        assert (await router.get("//v1/models")).status == 404


async def statuses(router: ServedScripted) -> dict[str, str]:
    """Return the status of every model, from the list that clients read."""
    listed = (await router.get("/v1/models")).json()["data"]
    return {each["id"]: each["status"] for each in listed}


async def test_the_list_tells_what_is_loaded(tmp_path: Path) -> None:
    """True at that moment: before, during and after a load, an unload and a crash."""
    async with scripted(tmp_path, scripted_pool("alpha", "beta"), answerer=Recorder()) as router:
        driver = router.driver()
        alpha, beta = driver.behaviours.values()
        assert await statuses(router) == {"alpha": "unloaded", "beta": "unloaded"}
        alpha.load_s = 0.15
        loading = router.begin(router.answered("alpha"))
        await router.wait_for(lambda v: v["state"] == "loading", "alpha loads")
        assert await statuses(router) == {"alpha": "loading", "beta": "unloaded"}
        await loading
        assert await statuses(router) == {"alpha": "loaded", "beta": "unloaded"}
        alpha.unload_s = 0.15
        swapping = router.begin(router.answered("beta"))
        await router.wait_for(lambda v: v["state"] == "unloading", "alpha leaves")
        assert await statuses(router) == {"alpha": "unloading", "beta": "unloaded"}
        await swapping
        assert await statuses(router) == {"alpha": "unloaded", "beta": "loaded"}
        beta.load_s = 10.0  # it is not back at once
        await router.chat("beta", crash=True)
        await router.wait_for(lambda v: v["resident"] != "beta", "beta is lost")
        assert (await statuses(router))["beta"] == "failed"


async def test_every_change_of_a_member_is_seen_in_order(tmp_path: Path) -> None:
    """One source for state and events: a watcher sees each swap go through the same steps."""
    steps: list[tuple[str, str]] = []
    async with scripted(tmp_path, scripted_pool("alpha", "beta"), answerer=Recorder()) as router:
        for behaviour in router.driver().behaviours.values():
            behaviour.load_s = behaviour.unload_s = 0.002

        async def watch() -> None:
            async with router.session.get(router.admin + "/api/v1/events") as response:
                watching.set()
                async for raw in response.content:
                    if raw.startswith(b"data:"):
                        fields = json.loads(raw[5:]).get("fields", {})
                        if "from_state" in fields:
                            steps.append((fields["state"], fields["member"]))

        watching = asyncio.Event()
        watcher = router.begin(watch())
        await watching.wait()
        for _ in range(10):
            await router.answered("alpha")
            await router.answered("beta")
        expected = 20
        await router.wait_for(
            lambda _: sum(state == "resident" for state, _ in steps) >= expected, "all steps"
        )
        watcher.cancel()
        order = [state for state, _ in steps]
        first = order.index("loading")
        cycle = ["loading", "resident", "unloading", "cold"]
        assert order[first : first + 78] == (cycle * 20)[:78]
        loaded = [member for state, member in steps if state == "resident"]
        assert loaded == ["alpha", "beta"] * 10


async def test_a_wrong_name_is_never_served_by_whoever_is_there(tmp_path: Path) -> None:
    engine = Recorder()
    async with scripted(tmp_path, scripted_pool("alpha", "beta"), answerer=engine) as router:
        await router.answered("alpha")
        for wrong in ("nope", "Alpha", " alpha", "alpha ", "alpha\0", "alph"):
            got = await router.chat(wrong)
            assert (got.status, got.code) == (404, "model_not_found")
            assert "alpha" in got.message and "beta" in got.message
        view = await router.pool()
        assert (view["resident"], view["held"], view["swaps_total"]) == ("alpha", 0, 1)
        assert engine.members == ["alpha"]


async def test_names_are_taken_as_they_are(tmp_path: Path) -> None:
    """Case, slashes, colons and letters of all languages count, and arrive unchanged."""
    names = ["Qwen/Qwen3-8B", "qwen/qwen3-8b", "müller-7b", "a:b@c", "x/y/z"]
    engine = Recorder()
    async with scripted(tmp_path, scripted_pool(*names), answerer=engine) as router:
        for name in names:
            raw = json.dumps({"model": name}, ensure_ascii=False).encode()
            assert (await router.chat("", data=raw)).json() == {"by": name}
            assert engine.requests[-1].body == raw
            escaped = json.dumps({"model": name}).encode()
            assert (await router.chat("", data=escaped)).json() == {"by": name}
            assert engine.requests[-1].body == escaped
        assert engine.members == [name for name in names for _ in range(2)]
        listed = (await router.get("/v1/models")).json()["data"]
        assert [each["id"] for each in listed] == names
        assert (await router.get("/v1/models/x/y/z")).json()["id"] == "x/y/z"
        assert (await router.get("/v1/models/Qwen%2FQwen3-8B")).json()["id"] == "Qwen/Qwen3-8B"


async def options(router: ServedScripted, path: str, asked: str) -> Answer:
    """Ask as a browser does before the real request."""
    headers = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": asked,
    }
    async with router.session.options(router.url + path, headers=headers) as response:
        return Answer(response.status, response.headers, await response.read(), 0.0, 0.0)


async def test_browsers_are_let_in_before_keys_are_asked_for(tmp_path: Path) -> None:
    """A preflight carries no key and loads nothing; a refusal can be read by the page."""
    (tmp_path / "keys").write_text(f"me: key-{CANARY}\n", encoding="utf-8")
    settings: Json = {"keys": {"file": str(tmp_path / "keys")}, "corsOrigins": [ORIGIN]}
    asked = "authorization, content-type, x-stainless-os, x-stainless-lang, x-stainless-async"
    async with scripted(
        tmp_path, scripted_pool("alpha", "beta"), answerer=Recorder(), **settings
    ) as router:
        for path in ("/v1/chat/completions", "/v1/models", "/v1/embeddings", "/v1/messages"):
            got = await options(router, path, asked)
            assert got.status == 204
            assert got.headers["Access-Control-Allow-Origin"] == ORIGIN
            assert got.headers["Access-Control-Allow-Headers"] == asked
        assert router.driver().count("activate") == 0
        refused = await router.chat(
            "alpha", headers={"Authorization": "Bearer wrong", "Origin": ORIGIN}
        )
        assert (refused.status, refused.code) == (401, "invalid_api_key")
        assert refused.headers["Access-Control-Allow-Origin"] == ORIGIN
        served = await router.chat("alpha", headers={"Origin": ORIGIN})
        assert (served.status, served.headers["Access-Control-Allow-Origin"]) == (200, ORIGIN)
        assert "retry-after" in served.headers["Access-Control-Expose-Headers"]


@pytest.mark.parametrize("load_s", [20.0, 50.0])
async def test_when_to_come_back_is_a_number_and_a_good_one(tmp_path: Path, load_s: float) -> None:
    """`Retry-After` comes from what is known of the load, not from a constant."""
    learned(tmp_path, "alpha", "beta", load_s=load_s, unload_s=0.1, drain_s=0.1)
    pool = scripted_pool("alpha", "beta", swapBudget="100ms")
    async with scripted(tmp_path, pool, answerer=Recorder(), maxHeldPerKey=1) as router:
        for behaviour in router.driver().behaviours.values():
            behaviour.load_hangs = True
        first = router.begin(router.chat("alpha"))
        await router.until_held("alpha")
        second, waited = await router.chat("alpha"), await first
        assert (waited.status, waited.code) == (503, "swap_budget_exceeded")
        assert 0.7 * load_s <= waited.retry_after_s <= min(60, 1.3 * load_s)
        assert (second.status, second.code) in ((429, "rate_limit_exceeded"), (503, waited.code))
        assert 1 <= second.retry_after_s <= 60
        many = await all_of(*(router.chat("beta") for _ in range(1)))
        assert many[0].retry_after_s >= 0.7 * load_s
