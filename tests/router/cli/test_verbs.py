"""``load``, ``unload``, ``pause``, ``resume`` against an admin port on a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from modelpool_router.cli import verbs
from modelpool_router.cli.main import app
from modelpool_router.core.spec import Epoch
from modelpool_router.core.view import MemberStatus
from stubadmin import (
    StubAdmin,
    loading,
    member_view,
    pool_view,
    resident,
    stub_admin,
    unloading,
)

run = CliRunner().invoke


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubAdmin]:
    monkeypatch.setattr(verbs, "_LOOK_S", 0.001)
    monkeypatch.delenv("MODELPOOL_ADMIN_TOKEN", raising=False)
    with stub_admin() as stub:
        monkeypatch.setenv("MODELPOOL_ADMIN", stub.address)
        yield stub


def test_load_waits_until_the_member_is_resident_and_says_what_goes_on(stub: StubAdmin) -> None:
    leaving = unloading("alpha", target="beta")
    stub.states = [
        [resident("alpha")],
        [leaving],
        [loading("beta", 1.0)],
        [loading("beta", 2.0)],
        [resident("beta")],
    ]

    result = run(app, ["load", "beta"])

    assert result.exit_code == 0, result.output
    assert stub.acts == [("gpu0", "load", "beta")]
    assert result.stdout.startswith("beta is resident after ")
    assert result.stderr.splitlines() == [
        "gpu0: alpha resident for 12 s",
        "gpu0: unloading alpha for 12 s, next beta",
        "gpu0: loading beta for 1.0 s of about 20 s",
    ]


def test_load_of_the_resident_is_done_at_once(stub: StubAdmin) -> None:
    stub.states = [[resident("alpha")]]

    assert run(app, ["load", "alpha"]).exit_code == 0
    assert stub.looks == 1


def test_load_of_a_resident_that_is_leaving_is_done_when_it_has_come_back(stub: StubAdmin) -> None:
    leaving = replace(resident("alpha"), admission="closed", closing_reason="unload")
    back = replace(resident("alpha"), epoch=Epoch(2))
    stub.states = [[leaving], [unloading("alpha")], [loading("alpha", 1.0)], [back]]

    result = run(app, ["load", "alpha"])

    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("alpha is resident after ")
    assert len(result.stderr.splitlines()) == 3


def test_load_without_waiting_only_asks(stub: StubAdmin) -> None:
    stub.states = [[resident("alpha")]]

    result = run(app, ["load", "beta", "--no-wait"])

    assert result.exit_code == 0
    assert stub.acts == [("gpu0", "load", "beta")]
    assert result.stdout == "beta is wanted; gpu0: alpha resident for 12 s\n"
    assert stub.looks == 0


def test_load_that_fails_is_a_failure_with_its_reason(stub: StubAdmin) -> None:
    failed = member_view(
        "beta",
        status=MemberStatus.FAILED,
        failures=1,
        backoff_s=5.0,
        last_error="exited: code 1: cannot load model",
    )
    stub.states = [[loading("beta", 1.0)], [pool_view(member_view("alpha"), failed)]]

    result = run(app, ["load", "beta"])

    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].endswith(": exited: code 1: cannot load model")


def test_load_of_a_member_that_failed_before_is_not_taken_for_failed(stub: StubAdmin) -> None:
    before = replace(
        loading("beta", 1.0), members=(member_view("beta", failures=3, last_error="exited"),)
    )
    stub.states = [[before], [before], [resident("beta")]]

    assert run(app, ["load", "beta"]).exit_code == 0


def test_load_gives_up_after_its_timeout_and_says_so(stub: StubAdmin) -> None:
    stub.states = [[loading("beta", 1.0)]]

    result = run(app, ["load", "beta", "--timeout", "0"])

    assert result.exit_code == 1
    assert "the load of beta is not done after 0.0 s; gpu0: loading beta" in result.stderr
    assert "way out: it goes on; look with `modelpool status`" in result.stderr


def test_load_into_a_paused_pool_tells_how_it_can_begin(stub: StubAdmin) -> None:
    stub.states = [[pool_view(member_view("alpha"), paused=True)]]

    result = run(app, ["load", "alpha", "--timeout", "0"])

    assert result.exit_code == 1
    assert "way out: `modelpool resume gpu0` lets it begin" in result.stderr


def test_unload_waits_until_the_slot_is_empty(stub: StubAdmin) -> None:
    draining = resident("alpha", admission="closed", in_flight=2)
    empty = pool_view(member_view("alpha"), released=True)
    # The first look finds the name of the only pool.
    stub.states = [[draining], [draining], [unloading("alpha")], [empty]]

    result = run(app, ["unload"])

    assert result.exit_code == 0, result.output
    assert stub.acts == [("gpu0", "unload", None)]
    assert result.stdout.startswith("gpu0 is empty after ")
    assert result.stderr.splitlines() == [
        "gpu0: alpha resident for 12 s, drains 2 streams",
        "gpu0: unloading alpha for 12 s",
    ]


def test_unload_lets_a_load_finish_and_is_not_done_before(stub: StubAdmin) -> None:
    going = loading("beta", 1.0)
    stub.states = [[going], [going], [resident("beta")], [pool_view(member_view("beta"))]]

    result = run(app, ["unload"])

    assert result.exit_code == 0
    assert result.stderr.splitlines() == [
        "gpu0: loading beta for 1.0 s of about 20 s",
        "gpu0: beta resident for 12 s",
    ]


def test_unload_is_done_when_demand_has_taken_the_slot_since(stub: StubAdmin) -> None:
    again = replace(loading("alpha", 0.1), epoch=Epoch(2))
    stub.states = [[resident("alpha")], [resident("alpha")], [again]]

    result = run(app, ["unload"])

    assert result.exit_code == 0
    assert result.stderr.splitlines() == ["gpu0: alpha resident for 12 s"]


def test_unload_needs_a_name_when_there_are_several_pools(stub: StubAdmin) -> None:
    stub.states = [[resident("alpha"), pool_view(member_view("x"), name="gpu1")]]

    without = run(app, ["unload"])
    with_name = run(app, ["unload", "gpu1"])

    assert without.exit_code == 2
    assert without.stderr == (
        "error: which pool? There are: gpu0, gpu1\n    way out: name one of them\n"
    )
    assert with_name.exit_code == 0
    assert stub.acts == [("gpu1", "unload", None)]


def test_unload_of_an_unknown_pool_is_refused(stub: StubAdmin) -> None:
    result = run(app, ["unload", "gpu9"])

    assert result.exit_code == 4
    assert result.stderr == "error: the router refused: No such pool. There are: gpu0.\n"
    assert stub.acts == []


def test_pause_and_resume(stub: StubAdmin) -> None:
    stub.states = [[resident("alpha", paused=True)]]

    result = run(app, ["pause"])
    run(app, ["resume", "gpu0"])

    assert result.stdout == "gpu0: alpha resident for 12 s; paused\n"
    assert stub.acts == [("gpu0", "pause", None), ("gpu0", "resume", None)]


def test_a_missing_token_is_told_with_the_way_out(stub: StubAdmin) -> None:
    stub.token = "hunter2"
    stub.states = [[resident("alpha")]]

    result = run(app, ["pause"])

    assert result.exit_code == 4
    assert result.stderr == (
        "error: the router refused: Send the admin token.\n"
        "    way out: give the token with --token-file or MODELPOOL_ADMIN_TOKEN\n"
    )
    assert stub.acts == []


def test_token_from_the_environment_or_a_file(stub: StubAdmin, tmp_path: Path) -> None:
    stub.token = "hunter2"
    stub.states = [[resident("alpha")]]
    file = tmp_path / "token"
    file.write_text("hunter2\n")

    by_variable = run(app, ["pause"], env={"MODELPOOL_ADMIN_TOKEN": "hunter2"})
    by_file = run(app, ["pause", "--token-file", str(file)])
    missing = run(app, ["pause", "--token-file", str(tmp_path / "nowhere")])

    assert (by_variable.exit_code, by_file.exit_code, missing.exit_code) == (0, 0, 2)
    assert missing.stderr.endswith("cannot be read: No such file or directory\n")
