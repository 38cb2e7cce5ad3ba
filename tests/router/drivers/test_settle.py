"""When a load may start after an unload."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from modelpool_router.drivers.base import ActivationFailed
from modelpool_router.drivers.settle import (
    Settled,
    SettleGate,
    Settler,
    SettleWatch,
    smallest_number,
)

WAIT, ENOUGH, STOPPED = Settled.WAIT, Settled.ENOUGH, Settled.STOPPED_GROWING


def verdicts(watch: SettleWatch, *free: float) -> list[Settled]:
    return [watch.look(value) for value in free]


def test_the_very_first_load_waits_for_nothing() -> None:
    assert verdicts(SettleWatch(needed=None, floor=None), 10.0) == [ENOUGH]


def test_it_waits_until_what_is_needed_is_free() -> None:
    watch = SettleWatch(needed=8000, floor=None)

    assert verdicts(watch, 100, 4000, 7999, 8000) == [WAIT, WAIT, WAIT, ENOUGH]


def test_enough_at_the_first_look_is_no_wait_after_a_crash() -> None:
    assert verdicts(SettleWatch(needed=None, floor=24000), 24000) == [ENOUGH]


def test_growth_that_stops_below_the_floor_ends_the_wait() -> None:
    watch = SettleWatch(needed=None, floor=24000)

    assert verdicts(watch, 100, 20000, 20000, 20010, 20000) == [WAIT, WAIT, WAIT, WAIT, STOPPED]


def test_growth_that_was_over_before_the_first_look_ends_the_wait() -> None:
    watch = SettleWatch(needed=None, floor=24000, loaded=2000)

    assert verdicts(watch, 20000, 20000, 20000, 20000) == [WAIT, WAIT, WAIT, STOPPED]


def test_no_growth_at_all_may_still_be_ahead() -> None:
    assert set(verdicts(SettleWatch(needed=None, floor=24000), *[100] * 50)) == {WAIT}


def test_slow_growth_is_waited_for() -> None:
    watch = SettleWatch(needed=None, floor=24000, loaded=1000)

    assert set(verdicts(watch, *range(2000, 23000, 500))) == {WAIT}


@pytest.mark.parametrize(
    ("output", "number"),
    [
        ("24000\n", 24000.0),
        ("  512 MiB\n", 512.0),
        ("24000\n10.5\n", 10.5),
        ("", None),
        ("N/A\n", None),
        ("free: 3\n", None),
    ],
)
def test_smallest_number(output: str, number: float | None) -> None:
    assert smallest_number(output) == number


def meter(folder: Path, *free: float) -> tuple[str, ...]:
    """A command that prints one value after the other, then the last for ever."""
    values = folder / "values"
    values.write_text("\n".join(str(value) for value in free))
    script = folder / "meter.sh"
    script.write_text(
        "#!/bin/sh\n"
        f"head -n 1 {values}\n"
        f"[ $(grep -c '' {values}) -gt 1 ] && sed -i 1d {values}\n"
        "exit 0\n"
    )
    script.chmod(0o755)
    return (str(script),)


async def test_memory_that_drifts_is_never_waited_for_twice(tmp_path: Path) -> None:
    # one per cent less after every swap: the floor moves along
    free = [round(24000 * 0.99**n) for n in range(6)]
    settler = Settler(SettleGate(meter(tmp_path, *free), timeout_s=5, interval_s=0.01), env={})

    for _ in free:
        await settler.wait(None)

    assert settler.floor == free[-1]
    assert settler.drift == free[0] - free[-1]


async def test_g1_memory_that_is_not_released_fails_the_load_with_the_numbers(
    tmp_path: Path,
) -> None:
    gate = SettleGate(meter(tmp_path, 100), timeout_s=0.1, interval_s=0.01)

    with pytest.raises(ActivationFailed) as failure:
        await Settler(gate, env={}).wait(8000)

    assert failure.value.reason == "memory_not_free"
    assert failure.value.retryable
    assert "100 MiB" in failure.value.detail
    assert "8000 MiB" in failure.value.detail


async def test_without_a_need_the_wait_is_bounded_and_the_load_starts(tmp_path: Path) -> None:
    gate = SettleGate(meter(tmp_path, 24000, 100), timeout_s=0.1, interval_s=0.01)
    settler = Settler(gate, env={})
    await settler.wait(None)

    await settler.wait(None)

    assert settler.floor == 100


@pytest.mark.parametrize(
    "command",
    [("/nonexistent/meter",), ("false",), (sys.executable, "-c", "print('N/A')")],
    ids=["missing", "failing", "no number"],
)
async def test_a_meter_that_does_not_work_stops_nobody(command: tuple[str, ...]) -> None:
    await Settler(SettleGate(command, timeout_s=5), env={"PATH": "/usr/bin:/bin"}).wait(8000)
