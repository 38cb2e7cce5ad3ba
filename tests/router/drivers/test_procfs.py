"""Which processes belong to a member."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from fakemembers import until
from modelpool_router.drivers.child import Child
from modelpool_router.drivers.procfs import (
    VARIABLE,
    ProcessTable,
    ProcTable,
    PsTable,
    member_of,
    slot_value,
)

SLOT = "0123/gpu0/alpha"


class FakeProc:
    """A /proc in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(
        self,
        pid: int,
        *,
        slot: str = "",
        session: int = 0,
        state: str = "S",
        threads: int = 1,
        started: int = 100,
        name: str = "x",
        hidden: bool = False,
    ) -> None:
        folder = self.root / str(pid)
        folder.mkdir()
        session = session or pid
        middle = " ".join(["0"] * 13)
        stat = f"{pid} ({name}) {state} 1 {session} {session} {middle} {threads} 0 {started} 0\n"
        (folder / "stat").write_text(stat)
        if not hidden:
            variable = f"{VARIABLE}={slot}\0" if slot else ""
            (folder / "environ").write_text(f"PATH=/bin\0{variable}HOME=/\0")

    def find(self, slot: str, sessions: dict[int, int] | None = None) -> list[int]:
        return sorted(proc.pid for proc in ProcTable(self.root).find(slot, sessions or {}))


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text("")
    return FakeProc(tmp_path)


def test_values_are_taken_apart_as_they_were_put_together() -> None:
    assert slot_value("0123", "gpu 0", "a/b c") == "0123/gpu%200/a%2Fb%20c"
    assert member_of(slot_value("0123", "gpu 0", "a/b c")) == "a/b c"
    assert slot_value("0123", "gpu0") == "0123/gpu0/"
    assert slot_value("0123") == "0123/"


def test_a_process_is_found_by_its_environment(proc: FakeProc) -> None:
    proc.add(1000, slot=SLOT)
    proc.add(1001, slot="0123/gpu0/alpha2")
    proc.add(1002, slot="0123/gpu1/alpha")
    proc.add(1003)

    assert proc.find(SLOT) == [1000]
    assert proc.find("0123/gpu0/") == [1000, 1001]
    assert proc.find("0123/") == [1000, 1001, 1002]


def test_a_name_with_brackets_and_spaces_does_not_confuse(proc: FakeProc) -> None:
    proc.add(1000, slot=SLOT, name="a) S 1 (b c")

    assert proc.find(SLOT) == [1000]


def test_a_process_that_hides_its_environment_is_found_by_its_session(proc: FakeProc) -> None:
    proc.add(1000, slot=SLOT, session=1000)
    proc.add(1001, session=1000, hidden=True)
    proc.add(1002, session=2000)

    assert proc.find(SLOT) == [1000, 1001]
    assert proc.find("0123/gpu0/beta", {2000: 0}) == [1002]


def test_a_session_number_that_was_given_away_again_is_not_ours(proc: FakeProc) -> None:
    proc.add(2000, session=2000, started=500)
    proc.add(2001, session=2000, started=501)

    assert proc.find(SLOT, {2000: 100}) == []
    assert proc.find(SLOT, {2000: 500}) == [2000, 2001]


def test_g5_a_zombie_is_gone_but_one_with_living_threads_is_not(proc: FakeProc) -> None:
    proc.add(1000, session=1000, state="Z")
    assert proc.find(SLOT, {1000: 100}) == []

    proc.add(1001, session=1000, state="Z", threads=3)
    proc.add(1002, session=1000, state="D")
    assert proc.find(SLOT, {1000: 100}) == [1001, 1002]


def test_our_own_session_is_never_a_members(proc: FakeProc) -> None:
    proc.add(3000, session=os.getsid(0))

    assert proc.find(SLOT, {os.getsid(0): 0}) == []


TABLES = [pytest.param(ProcTable(), id="proc"), pytest.param(PsTable(), id="ps")]


@pytest.mark.parametrize("table", TABLES)
async def test_real_processes_are_found_and_signalled(table: ProcessTable) -> None:
    slot = slot_value("feed", "gpu0", f"real {os.getpid()} {type(table).__name__}")
    env = {"PATH": os.defpath, VARIABLE: slot}
    script = "sleep 1000 & setsid sleep 1000 & wait"
    with open(os.devnull, "wb") as nowhere:
        child = Child.start(("sh", "-c", script), env=env, cwd=None, output=nowhere.fileno())

    # the shell, its child, and one that left session and group (a moment after it was born)
    def groups() -> list[int]:
        return [found.group for found in table.find(slot, {})]

    await until(lambda: len(seen := groups()) == 3 and len(set(seen)) == 2, "three processes")
    for found in table.find(slot, {}):
        table.send(found, signal.SIGKILL)
    await until(lambda: not table.find(slot, {}), "none is left")

    assert await child.wait(5)


async def test_g4_a_reused_pid_is_not_signalled() -> None:
    with open(os.devnull, "wb") as nowhere:
        child = Child.start(
            ("sleep", "1000"),
            env={"PATH": os.defpath, VARIABLE: "feed/g4/x"},
            cwd=None,
            output=nowhere.fileno(),
        )
    table = ProcTable()
    (found,) = await asyncio.to_thread(table.find, "feed/g4/x", {})
    stale = type(found)(
        pid=found.pid,
        parent=found.parent,
        group=found.group,
        session=found.session,
        started=found.started - 1,
        state="S",
    )

    table.send(stale, signal.SIGKILL)
    assert not await child.wait(0.1)
    table.send(found, signal.SIGKILL)

    assert await child.wait(5)
    assert child.ended.result() == -signal.SIGKILL
    table.send(found, signal.SIGKILL)  # gone: nothing happens
