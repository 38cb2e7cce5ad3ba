"""How long a request is held at most, and what a client that is told to come back finds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from served import LIMIT_S, Served, all_of, learned, member, pool, served_here


async def held_ms(router: Served, request_id: str) -> float:
    """Return the hold of one request by the router's own clock."""
    line = await router.wait_for_request(request_id)
    return float(line["held_ms"])


@pytest.mark.usefixtures("either_client")
async def test_the_budget_ends_the_hold_and_the_load_goes_on(tmp_path: Path) -> None:
    slow = member("alpha", load=3.0, keys={"expectedLoad": "20s"})
    async with served_here(tmp_path, pool(slow, member("beta"), swapBudget="1s")) as router:
        refused = await router.chat("alpha")
        assert (refused.status, refused.code) == (503, "swap_budget_exceeded")
        assert await held_ms(router, refused.headers["x-request-id"]) >= 1000
        remaining_s = 20 - 1
        assert 1 <= refused.retry_after_s <= 60
        assert 0.7 * remaining_s <= refused.retry_after_s <= 1.3 * remaining_s
        exact_s = float(refused.headers["retry-after-ms"]) / 1000
        assert refused.retry_after_s - 1 <= exact_s <= refused.retry_after_s
        assert "x-should-retry" not in refused.headers
        assert "alpha is loading" in refused.message
        await router.until_resident("alpha")
        await router.answered("alpha")
        assert router.starts("alpha") == 1
        assert await router.metric("modelpool_budget_exceeded_total", member="alpha") == 1


async def test_the_dispatch_time_out_does_not_bound_the_hold(tmp_path: Path) -> None:
    members = (member("alpha", load=0.8), member("beta"))
    async with served_here(tmp_path, pool(*members, responseTimeout="300ms")) as router:
        answer = await router.answered("alpha")
        assert answer.held_ms >= 700
        async with asyncio.timeout(LIMIT_S):
            late = await router.chat("alpha", x_delay_ms=600_000)
        assert (late.status, late.code) == (504, "upstream_timeout")
        assert late.took_s >= 0.3


async def test_no_budget_refuses_at_once_and_leaves_demand(tmp_path: Path) -> None:
    members = (member("alpha", load=0.3), member("beta"))
    async with served_here(tmp_path, pool(*members, swapBudget="0s")) as router:
        refused = await router.chat("alpha")
        assert (refused.status, refused.code) == (503, "swap_budget_exceeded")
        await router.until_resident("alpha")
        await router.wait_for_log("swap_completed")
        events = [line["event"] for line in router.log_lines()]
        assert events.index("request") < events.index("swap_completed")
        await router.answered("alpha")
        swapped = await router.chat_until_served("beta")
        assert swapped.status == 200
        assert (router.starts("alpha"), router.starts("beta")) == (1, 1)


@pytest.mark.usefixtures("answers_early")
async def test_short_patience_is_answered_in_time(tmp_path: Path) -> None:
    """Two seconds before the load is over, and eighteen before the client leaves."""
    members = (member("alpha", load=4.0, keys={"expectedLoad": "3s"}), member("beta"))
    async with served_here(tmp_path, pool(*members)) as router:
        headers = {"x-stainless-read-timeout": "20"}
        refused = await router.chat("alpha", headers=headers)
        assert (refused.status, refused.code) == (503, "swap_budget_exceeded")
        assert await held_ms(router, refused.headers["x-request-id"]) >= 2000
        # odd announcements do not count
        odd = {"x-stainless-read-timeout": "0.1", "x-stainless-timeout": "nan"}
        await router.answered("alpha", headers=odd)


async def test_patience_shorter_than_a_load_is_served_in_the_end(tmp_path: Path) -> None:
    """Two members whose clients wait for less than a load do not displace each other for ever."""
    members = (
        member("alpha", load=1.3, keys={"expectedLoad": "1300ms"}),
        member("beta", load=1.3, keys={"expectedLoad": "1300ms"}),
    )
    learned(tmp_path, "alpha", "beta", unload_s=0.2, drain_s=0.2)
    async with served_here(tmp_path, pool(*members, maxTurn="0s")) as router:
        headers = {"x-stainless-read-timeout": "1"}
        answers = await all_of(
            *(router.chat_until_served(name, headers=headers) for name in ("alpha", "beta"))
        )
        assert [answer.status for answer in answers] == [200, 200]
        # each was kept, once it was up, until its client came back
        assert (router.starts("alpha"), router.starts("beta")) == (1, 1)


async def test_queue_bounds(tmp_path: Path) -> None:
    members = (member("alpha", load=0.6), member("beta"))
    async with served_here(tmp_path, pool(*members), maxHeld=2) as router:
        held = [router.begin(router.answered("alpha")) for _ in range(2)]
        await router.until_held("alpha", 2)
        refused = await router.chat("alpha")
        assert (refused.status, refused.code) == (503, "queue_full")
        assert 1 <= refused.retry_after_s <= 60
        await all_of(*held)
        await router.answered("alpha")
