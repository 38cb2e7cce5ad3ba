"""Many clients at once on a pool that is cold."""

from __future__ import annotations

from pathlib import Path

from served import all_of, member, pool, served, served_here


async def test_one_load_serves_eight_clients(tmp_path: Path) -> None:
    async with served(tmp_path, pool(member("alpha", load=0.2), member("beta"))) as router:
        answers = await all_of(*(router.chat("alpha") for _ in range(8)))
        assert [answer.status for answer in answers] == [200] * 8
        assert {answer.member for answer in answers} == {"alpha"}
        assert all(answer.held_ms >= 150 for answer in answers)
        assert (router.starts("alpha"), router.starts("beta")) == (1, 0)


async def test_two_crowds_take_at_most_three_loads(tmp_path: Path) -> None:
    members = (member("alpha", load=0.3), member("beta", load=0.3))
    async with served_here(tmp_path, pool(*members)) as router:
        asked = [router.chat(name) for _ in range(10) for name in ("alpha", "beta")]
        answers = await all_of(*asked)
        assert [answer.status for answer in answers] == [200] * 20
        assert sorted(answer.member for answer in answers) == ["alpha"] * 10 + ["beta"] * 10
        assert router.starts("alpha") + router.starts("beta") <= 3
