"""Who we are over restarts, and that we are the only one."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from fakemembers import PYTHON_ENV
from modelpool_router.drivers.statedir import StateDirUnusable, file_name, lock_pool, prepare


def test_the_id_survives_restarts(tmp_path: Path) -> None:
    first = prepare(tmp_path / "deep" / "state")

    assert prepare(tmp_path / "deep" / "state") == first
    assert len(first) == 16
    assert prepare(tmp_path / "other") != first


def test_nobody_else_may_look_inside(tmp_path: Path) -> None:
    prepare(tmp_path / "state")

    assert (tmp_path / "state").stat().st_mode & 0o077 == 0


def test_a_state_directory_that_cannot_be_made_is_said_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(StateDirUnusable, match="set another stateDir"):
        prepare(tmp_path / "file" / "state")


def test_a_damaged_id_is_not_replaced_in_silence(tmp_path: Path) -> None:
    (tmp_path / "id").write_text("")

    with pytest.raises(StateDirUnusable, match="damaged"):
        prepare(tmp_path)


def test_a_second_holder_is_refused_and_told_who_and_what_to_do(tmp_path: Path) -> None:
    lock = lock_pool(tmp_path, "gpu 0/x")

    with pytest.raises(StateDirUnusable) as refusal:
        lock_pool(tmp_path, "gpu 0/x")

    assert f"process {os.getpid()}" in str(refusal.value)
    assert "another stateDir" in str(refusal.value)
    lock_pool(tmp_path, "gpu1").release()
    lock.release()
    lock.release()
    lock_pool(tmp_path, "gpu 0/x").release()


async def test_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from modelpool_router.drivers.statedir import lock_pool\n"
        "lock = lock_pool(pathlib.Path(sys.argv[1]), 'gpu0'); print('held', flush=True)\n"
        "sys.stdin.read()"
    )
    holder = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        code,
        str(tmp_path),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **PYTHON_ENV},
    )
    assert holder.stdout is not None
    assert await holder.stdout.readline() == b"held\n"
    with pytest.raises(StateDirUnusable, match=f"process {holder.pid}"):
        lock_pool(tmp_path, "gpu0")

    holder.kill()
    await holder.wait()

    lock_pool(tmp_path, "gpu0").release()


@pytest.mark.parametrize("name", ["..", "a/b", "x" * 200, "\u00e9" * 200, ".", "a b"])
def test_file_names_are_short_and_stay_in_their_folder(name: str) -> None:
    made = file_name(name)

    assert "/" not in made
    assert not made.startswith(".")
    assert len(made) <= 80


def test_different_long_names_have_different_files() -> None:
    assert file_name("x" * 200) != file_name("x" * 199)
