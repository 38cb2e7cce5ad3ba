"""A pool that cannot begin because something is left over says so wherever people look."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelpool_router.drivers.process import Limits, ProcessDriver
from served import member, pool, served_here


async def test_what_an_earlier_router_left_is_told_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = ProcessDriver.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "limits", Limits(gone_s=0.1))
    left = tmp_path / "container"
    left.write_text("")
    keys = {"goneCommand": ["sh", "-c", f"test ! -e '{left}' || {{ echo still up; exit 3; }}"]}
    async with served_here(tmp_path, pool(member("alpha", keys=keys), member("beta"))) as router:
        view = await router.wait_for(lambda v: v["obstacle"] is not None, "it is told")
        held = router.begin(router.chat("beta"))
        await router.until_held("beta")

        obstacle = view["obstacle"]
        assert view["state"] == "starting" and obstacle["tries"] >= 1
        assert "goneCommand of member 'alpha'" in obstacle["error"]
        assert "exit code 3: still up" in obstacle["error"]
        assert "correct goneCommand" in obstacle["way_out"]
        ready = await router.get("/readyz")
        assert ready.status == 503
        assert obstacle["waits_for"] in ready.json()["checks"]["pool gpu0"]
        assert "still up" not in str(ready.json()), "the data port tells strangers no output"
        async with router.session.get(router.admin + "/readyz") as answer:
            assert (await answer.json())["obstacles"]["gpu0"]["error"] == obstacle["error"]
        async with router.session.get(router.admin + "/api/v1/why?model=beta") as answer:
            sentences = (await answer.json())["sentences"]
        assert any(obstacle["error"] in sentence for sentence in sentences)
        assert f"way out: {obstacle['way_out']}" in sentences
        assert await router.metric("modelpool_slot_obstructed_seconds", pool="gpu0") > 0
        assert len(router.log_lines("observe_failed")) == 1

        left.unlink()

        assert (await held).status == 200
        assert (await router.pool())["obstacle"] is None
        assert await router.metric("modelpool_slot_obstructed_seconds", pool="gpu0") == 0
        assert (await router.get("/readyz")).status == 200
