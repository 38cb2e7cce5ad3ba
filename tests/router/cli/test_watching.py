"""``status`` and ``why`` against an admin port on a real socket."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from modelpool_router.cli.admin_client import SILENCE_S, AdminAddress, AdminClient, parse_admin
from modelpool_router.cli.connect import complete_member, complete_pool
from modelpool_router.cli.main import app
from modelpool_router.cli.watching import render_state
from modelpool_router.core.view import MemberStatus, Obstacle, SlotState
from modelpool_router.web.admin import KEEPALIVE_S
from stubadmin import StubAdmin, loading, member_view, pool_view, resident, stub_admin

run = CliRunner().invoke


@pytest.fixture
def stub() -> Iterator[StubAdmin]:
    with stub_admin() as stub:
        yield stub


def test_status_in_a_pipe_is_a_plain_table(stub: StubAdmin) -> None:
    stub.states = [
        [
            pool_view(
                member_view("alpha", status=MemberStatus.LOADED, in_flight=2),
                member_view("beta", held=3, oldest_hold_s=41.6, load_measured=False, wanted=True),
                member_view(
                    "gamma",
                    status=MemberStatus.FAILED,
                    backoff_s=130.0,
                    failures=2,
                    last_error="exited: code 1\nlast line",
                ),
                state=SlotState.RESIDENT,
                resident="alpha",
                target="beta",
                admission="closed",
                in_flight=2,
                since_s=842.0,
            )
        ]
    ]

    result = run(app, ["status", "--admin", stub.address])

    assert result.exit_code == 0, result.output
    assert result.stdout == (
        "gpu0: alpha resident for 14m02s, next beta, drains 2 streams\n"
        "MEMBER  STATUS    IN FLIGHT  HELD  OLDEST HOLD  LOAD TIME     LAST ERROR\n"
        "alpha   loaded    2/4        0     -            20 s\n"
        "beta    unloaded  0/4        3     42 s         not measured\n"
        "gamma   failed    0/4        0     -            20 s          "
        "backed off for 2m10s: exited: code 1: last line\n"
    )


def test_status_says_what_a_pool_waits_for_and_the_way_out(stub: StubAdmin) -> None:
    obstacle = Obstacle("proof that alpha is gone", 75.0, 1, "exit code 1\nmore", "stop it by hand")
    view = pool_view(member_view("alpha"), state=SlotState.STARTING, resident=None)
    stub.states = [[replace(view, obstacle=obstacle)]]

    result = run(app, ["status", "--admin", stub.address])

    assert result.stdout.splitlines()[1:4] == [
        "  waits for proof that alpha is gone, for 75 s and 1 try",
        "  last error: exit code 1: more",
        "  way out: stop it by hand",
    ]
    state = AdminClient(parse_admin(stub.address), None).state()
    screen = StringIO()
    Console(file=screen, width=100).print(render_state(state, stub.url))
    assert "way out: stop it by hand" in screen.getvalue()


def test_status_as_json_is_what_the_router_says(stub: StubAdmin) -> None:
    stub.states = [[resident("alpha"), pool_view(member_view("x"), name="gpu1")]]

    result = run(app, ["status", "--json", "--admin", stub.url])

    assert [pool["name"] for pool in json.loads(result.stdout)["pools"]] == ["gpu0", "gpu1"]
    assert json.loads(result.stdout)["pools"][0]["resident"] == "alpha"


def test_admin_address_comes_from_the_environment(stub: StubAdmin) -> None:
    result = run(app, ["status"], env={"MODELPOOL_ADMIN": stub.address})

    assert result.exit_code == 0
    assert "gpu0: empty" in result.stdout


def test_watch_in_a_pipe_writes_a_line_per_event(stub: StubAdmin) -> None:
    view = {"load_expected_s": 5.0}
    stub.events = [
        ("turn_ended", {"pool": "gpu0", "fields": {"member": "alpha", "reason": "linger"}}),
        (
            "swap_started",
            {
                "pool": "gpu0",
                "fields": {"source": "alpha", "target": "beta", "cause": "demand", "waiting": 1},
            },
        ),
        (
            "state_changed",
            {"pool": "gpu0", "fields": {"member": "beta", "state": "loading"}, "view": view},
        ),
        (
            "swap_completed",
            {
                "pool": "gpu0",
                "fields": {
                    "source": "alpha",
                    "target": "beta",
                    "drain_s": 0.0,
                    "unload_s": 0.11,
                    "load_s": 5.0,
                    "granted": 1,
                },
            },
        ),
        ("unheard_of", {"pool": "gpu0", "fields": {}}),
    ]
    stub.events = [(kind, {"at": 1_700_000_000.0, **data}) for kind, data in stub.events]

    result = run(app, ["status", "--watch", "--admin", stub.address])

    lines = [re.sub(r"^\d\d:\d\d:\d\d  ", "", line) for line in result.stdout.splitlines()]
    assert lines[0].startswith("gpu0: empty")
    assert lines[-4:] == [
        "gpu0  alpha        drain      admits nobody any more (linger)",
        "gpu0  beta         swap       alpha -> beta (demand), 1 request waiting",
        "gpu0  beta         loading    takes about 5.0 s",
        "gpu0  beta         resident   unload 0.1 s, load 5.0 s; 1 request granted",
    ]


def test_a_quiet_router_is_not_taken_for_a_dead_one(stub: StubAdmin) -> None:
    """An answer has seconds to come; between two events there is nothing to tell for hours."""
    stub.events = [("released", {"pool": "gpu0"})]
    stub.silence_s = 0.3
    client = AdminClient(parse_admin(stub.address), None, timeout_s=0.1)

    assert [kind for kind, _ in client.events()] == ["snapshot", "released"]
    assert SILENCE_S >= 3 * KEEPALIVE_S


def test_watch_as_json_passes_on_every_event(stub: StubAdmin) -> None:
    stub.events = [("unheard_of", {"pool": "gpu0", "at": 1.0, "fields": {"a": 1}})]

    result = run(app, ["status", "--watch", "--json", "--admin", stub.address])

    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert [event["kind"] for event in events] == ["snapshot", "unheard_of"]
    assert events[1]["fields"] == {"a": 1}


def test_why_prints_a_sentence_a_line(stub: StubAdmin) -> None:
    stub.sentences = ["alpha waits behind 1 stream of beta", "its last load failed: a\nb"]

    result = run(app, ["why", "alpha", "--admin", stub.address])
    as_json = run(app, ["why", "alpha", "--json", "--admin", stub.address])

    assert result.stdout == "alpha waits behind 1 stream of beta\nits last load failed: a\n    b\n"
    assert json.loads(as_json.stdout)["sentences"] == stub.sentences


def test_why_of_an_unknown_model_is_refused(stub: StubAdmin) -> None:
    result = run(app, ["why", "nobody", "--admin", stub.address])

    assert result.exit_code == 4
    assert result.stderr == (
        "error: the router refused: No member is called so. There are: alpha.\n"
    )


@pytest.mark.parametrize(
    "command", [["status"], ["status", "--watch"], ["why", "a"], ["load", "a"], ["unload"]]
)
def test_no_router_is_told_with_address_and_way_out(command: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]

    result = run(app, [*command, "--admin", f"127.0.0.1:{port}"])

    assert result.exit_code == 3
    assert result.stderr == (
        f"error: no router answers on http://127.0.0.1:{port}: connection refused\n"
        "    way out: start one with `modelpool serve`, "
        "or say where it is with --admin or MODELPOOL_ADMIN\n"
    )


def test_something_else_on_the_port_is_no_router(tmp_path: Path) -> None:
    server = subprocess.Popen(
        [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdout is not None
    try:
        port = re.search(r"port (\d+)", server.stdout.readline())
        assert port is not None
        result = run(app, ["status", "--admin", f"127.0.0.1:{port[1]}"])
    finally:
        server.kill()
        server.wait()
        server.stdout.close()

    assert result.exit_code == 3
    assert "what answers there is no modelpool router (status 404)" in result.stderr


@pytest.mark.parametrize("address", ["http://a:b:c", "ftp://a", "127.0.0.1:99999"])
def test_what_is_no_address(address: str) -> None:
    result = run(app, ["status", "--admin", address])

    assert result.exit_code == 2
    assert result.stderr == (
        f"error: '{address}' is no address\n"
        "    way out: write --admin like 127.0.0.1:9090 or https://host/prefix\n"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:9191", AdminAddress("127.0.0.1", 9191)),
        (":9191", AdminAddress("127.0.0.1", 9191)),
        ("0.0.0.0:9191", AdminAddress("127.0.0.1", 9191)),
        ("[::]:9191", AdminAddress("::1", 9191)),
        ("[::1]:9191", AdminAddress("::1", 9191)),
        ("gpubox", AdminAddress("gpubox", 9090)),
        ("http://gpubox/pool/", AdminAddress("gpubox", 80, "/pool")),
        ("https://gpubox:444", AdminAddress("gpubox", 444, "", tls=True)),
        ("https://gpubox", AdminAddress("gpubox", 443, "", tls=True)),
    ],
)
def test_admin_addresses(text: str, expected: AdminAddress) -> None:
    assert parse_admin(text) == expected


def test_names_are_completed_from_the_running_router(
    stub: StubAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.states = [[resident("alpha")]]
    monkeypatch.setenv("MODELPOOL_ADMIN", stub.address)

    assert complete_member("al") == ["alpha"]
    assert complete_member("") == ["alpha", "beta"]
    assert complete_pool("") == ["gpu0"]
    monkeypatch.setenv("MODELPOOL_ADMIN", "127.0.0.1:1")
    assert complete_member("") == complete_pool("") == []


def test_table_of_a_terminal_shows_the_load_as_a_bar(stub: StubAdmin) -> None:
    stub.states = [[loading("beta", 5.0, 20.0)]]
    state = AdminClient(parse_admin(stub.address), None).state()
    screen = StringIO()

    Console(file=screen, width=100, force_terminal=True, color_system=None).print(
        render_state(state, stub.url, "no answer for 3.0 s")
    )

    text = screen.getvalue()
    assert "no answer for 3.0 s" in text
    assert "gpu0  loading beta for 5.0 s of about 20 s" in text
    assert "[#######-----------------------]  25%  about 15 s left" in text
    assert re.search(r"beta +loading +0/4 +0 +- +20 s", text)


def test_errors_in_brackets_are_not_taken_for_markup(stub: StubAdmin) -> None:
    stub.states = [[pool_view(member_view("a[/b]", last_error="[red]exited[/red] [/x]"))]]
    state = AdminClient(parse_admin(stub.address), None).state()
    screen = StringIO()

    Console(file=screen, width=140).print(render_state(state, stub.url))

    assert "a[/b]" in screen.getvalue()
    assert "[red]exited[/red] [/x]" in screen.getvalue()


def read_until(descriptor: int, wanted: str, seen: str = "") -> str:
    """Read from a terminal until *wanted* has come; fail after 20 s."""
    deadline = time.monotonic() + 20.0
    while wanted not in seen:
        left = deadline - time.monotonic()
        assert left > 0 and select.select([descriptor], [], [], left)[0], f"only saw: {seen!r}"
        seen += os.read(descriptor, 65536).decode()
    return seen


def read_to_the_end(descriptor: int) -> None:
    """
    Read from a terminal until nobody writes to it any more; fail after 20 s.

    Whoever writes to one that is full waits, and cannot end.
    """
    deadline = time.monotonic() + 20.0
    with suppress(OSError):  # its end, on Linux
        while select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not os.read(descriptor, 65536):
                return
        pytest.fail("it goes on for ever")


def test_watch_on_a_terminal_follows_the_load_until_ctrl_c(stub: StubAdmin) -> None:
    stub.states = [[loading("beta", 5.0)], [loading("beta", 10.0)], [resident("beta")]]
    ours, theirs = pty.openpty()
    environ = {**os.environ, "COLUMNS": "100", "TERM": "xterm"}
    command = [sys.executable, "-m", "modelpool_router", "status", "--watch", "--interval", "0.05"]
    process = subprocess.Popen(
        [*command, "--admin", stub.address], stdin=theirs, stdout=theirs, stderr=theirs, env=environ
    )
    os.close(theirs)
    try:
        seen = read_until(ours, "beta resident")
        process.send_signal(signal.SIGINT)
        read_to_the_end(ours)
        code = process.wait(20)
    finally:
        process.kill()
        process.wait()
        os.close(ours)

    assert " 25% " in seen
    assert " 50% " in seen
    assert code == 130


def test_watch_on_a_terminal_outlives_a_restart_of_the_router() -> None:
    ours, theirs = pty.openpty()
    environ = {**os.environ, "COLUMNS": "100", "TERM": "xterm"}
    command = [sys.executable, "-m", "modelpool_router", "status", "--watch", "--interval", "0.05"]
    with stub_admin() as stub:
        process = subprocess.Popen(
            [*command, "--admin", stub.address],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environ,
        )
        os.close(theirs)
        try:
            seen = read_until(ours, "gpu0")
        except BaseException:
            process.kill()
            process.wait()
            raise
    try:
        read_until(ours, "no answer for", seen)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
