"""The demo as a process, and that it notices when something is not as it should be."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from modelpool_router.cli import demo_play
from modelpool_router.cli.demo_play import (
    LOADS_S,
    TOKENS,
    Answer,
    Timeline,
    demo_settings,
    findings,
    free_address,
)
from modelpool_router.settings import Address, verify


def start(*flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "modelpool_router", "demo", "--speed", "10", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


def members_of(demo: int) -> list[int]:
    """Return the children of process *demo*."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended while we looked
        if int(fields[1]) == demo:
            found.append(int(path.parent.name))
    return found


def test_once_shows_a_hold_and_a_swap_and_ends_with_0() -> None:
    demo = start("--once")
    out, err = demo.communicate(timeout=60)

    assert (demo.returncode, err) == (0, "")
    assert "curl -sN http://127.0.0.1:" in out
    happened = re.findall(
        r"^\d\d:\d\d:\d\d  (\w+) +(requested|granted|swap|unloading|answered)", out, re.M
    )
    assert happened == [
        ("alpha", "requested"),
        ("alpha", "swap"),
        ("alpha", "granted"),
        ("beta", "requested"),
        ("alpha", "answered"),
        ("beta", "swap"),
        ("alpha", "unloading"),
        ("beta", "granted"),
        ("beta", "answered"),
    ]
    assert "both were answered" in out


@pytest.mark.parametrize(("in_path", "told"), [(True, "modelpool"), (False, "bin/modelpool")])
def test_the_command_to_look_with_is_one_that_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_path: bool, told: str
) -> None:
    """``make run`` installs into a folder of its own that is not in PATH."""
    program = tmp_path / "bin" / "modelpool"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(program), "demo"])
    monkeypatch.setenv("PATH", str(program.parent) if in_path else str(tmp_path))

    assert demo_play._program() == told


def test_without_once_it_stays_up_until_ctrl_c_and_leaves_nothing_behind() -> None:
    with socket.socket() as taken:
        # Whoever has it, we or somebody else: the demo must do without.
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", 8080))
            taken.listen()
        except OSError:
            pass
        demo = start()
        try:
            assert demo.stdout is not None and demo.stderr is not None
            out = ""
            for line in demo.stdout:
                out += line
                if "stays up" in line:
                    break
            members = members_of(demo.pid)
            deadline = time.monotonic() + 30
            while demo.poll() is None and time.monotonic() < deadline:
                demo.send_signal(signal.SIGINT)  # an impatient one: more than one change nothing
                os.sched_yield()
            _, err = demo.communicate(timeout=30)
        finally:
            demo.kill()
            demo.wait()

    assert (demo.returncode, err) == (0, "")
    port = re.search(r"listening on http://127\.0\.0\.1:(\d+)", out)
    assert port is not None and port[1] != "8080"
    assert members
    assert not [pid for pid in members if Path(f"/proc/{pid}").exists()]


def test_settings_of_the_demo_suit_this_machine(tmp_path: Path) -> None:
    settings = demo_settings(Address("127.0.0.1", 0), Address("127.0.0.1", 0), tmp_path, 1.0)

    assert verify(settings, os.environ, ports=True) == []
    assert [member.expected_load_s for member in settings.pools[0].members] == [3.0, 5.0]


def test_a_taken_port_is_replaced_by_a_free_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert free_address(port) == Address("127.0.0.1", 0)
    assert free_address(port) == Address("127.0.0.1", port)


def good(model: str) -> Answer:
    return Answer(
        model,
        status=200,
        member=model,
        held_ms=int(LOADS_S[model] * 1000),
        tokens=["x"] * TOKENS,
        is_complete=True,
        ended_at=1000.0,
    )


def good_timeline() -> Timeline:
    timeline = Timeline()
    timeline.unloaded_at["alpha"] = 1000.5
    timeline.swaps = 2
    return timeline


def test_what_went_right_is_not_complained_about() -> None:
    assert findings(good("alpha"), good("beta"), good_timeline(), 1.0) == []


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda a, b, t: setattr(a, "status", 503), "alpha: status 503, no answer"),
        (lambda a, b, t: setattr(b, "error", "reset"), "beta: status 200, reset"),
        (lambda a, b, t: setattr(b, "member", "alpha"), "beta was answered by alpha"),
        (lambda a, b, t: a.tokens.pop(), f"alpha streamed {TOKENS - 1} of {TOKENS} tokens"),
        (
            lambda a, b, t: setattr(a, "is_complete", False),
            "alpha streamed 40 of 40 tokens, and its stream has no end",
        ),
        (lambda a, b, t: setattr(b, "held_ms", 100), "beta was held for 100 ms"),
        (lambda a, b, t: t.unloaded_at.clear(), "alpha never gave the slot to beta"),
        (
            lambda a, b, t: t.unloaded_at.update(alpha=999.0),
            "alpha was unloaded before its stream had ended",
        ),
    ],
)
def test_what_went_wrong_is_found(
    spoil: Callable[[Answer, Answer, Timeline], object], told: str
) -> None:
    alpha, beta, timeline = good("alpha"), good("beta"), good_timeline()
    spoil(alpha, beta, timeline)

    (found,) = findings(alpha, beta, timeline, 1.0)

    assert found.startswith(told)
