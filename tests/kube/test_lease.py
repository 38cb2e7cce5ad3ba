"""The Lease: never two who believe in it, whatever the server, the clock or the other one does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from memcluster import Killed, MemCluster, MemPort, Mode
from modelpool_api.names import RECORD_ANNOTATION
from modelpool_kube import errors
from modelpool_kube.kinds import LEASES
from modelpool_kube.lease import LeaseKeeper, LeaseLost, micro_time
from modelpool_kube.record import Frozen, SlotId, SlotRecord

pytestmark = pytest.mark.looptime(idle_timeout=100_000)
SLOT = SlotId("lab", "modelpool-gpu0")


@pytest.fixture
async def cluster() -> MemCluster:
    """A cluster on the clock of the loop."""
    return MemCluster(clock=asyncio.get_running_loop().time)


def keeper(port: MemPort, **options: Any) -> LeaseKeeper:
    """Return a keeper called like its port."""
    return LeaseKeeper(
        port,
        SLOT,
        port.name,
        may_create=options.pop("may_create", True),
        rng=random.Random(port.name),
        **options,
    )


@contextlib.asynccontextmanager
async def running(*keepers: LeaseKeeper, release: bool = True) -> AsyncIterator[None]:
    """Run keepers."""
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(each.run(release=release)) for each in keepers]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError, Killed):
                await task


async def until(condition: Any, limit_s: float = 120.0) -> float:
    """Wait for *condition* and return how long it took."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while not condition():
        assert loop.time() - began < limit_s, "it did not happen"
        await asyncio.sleep(0.05)
    return loop.time() - began


def spec(cluster: MemCluster) -> Any:
    """Return the spec of the Lease."""
    return cluster.must(LEASES, "lab", SLOT.lease)["spec"]


def stored(cluster: MemCluster) -> Any:
    """Return the record as it stands."""
    return json.loads(
        cluster.must(LEASES, "lab", SLOT.lease)["metadata"]["annotations"][RECORD_ANNOTATION]
    )


def at_epoch(epoch: int) -> Any:
    """Return what makes a record of *epoch*."""
    return lambda before: replace(before or SlotRecord(), epoch=epoch)


async def test_it_is_made_and_kept_and_given_back(cluster: MemCluster) -> None:
    port = cluster.port("one")
    mine = keeper(port)
    async with running(mine):
        await until(lambda: mine.is_held)
        assert spec(cluster)["holderIdentity"] == "one"
        assert spec(cluster)["leaseDurationSeconds"] == 15
        await asyncio.sleep(300)
        assert mine.is_held
        renewals = sum(request.verb == "patch" for request in port.requests)
        assert 300 / 5.5 < renewals < 300 / 3.5

    assert spec(cluster)["holderIdentity"] == ""
    assert not mine.is_held


async def test_without_the_right_to_make_one_it_waits_for_the_operator(
    cluster: MemCluster,
) -> None:
    mine = keeper(cluster.port("one"), may_create=False)
    async with running(mine):
        await asyncio.sleep(10)
        assert not mine.is_held
        assert "the operator makes it" in (mine.trouble or "")
        cluster.put(LEASES, "lab", LEASES.body(SLOT.lease, "lab", spec={}))
        await until(lambda: mine.is_held)


async def test_times_are_utc_with_six_digits(cluster: MemCluster) -> None:
    mine = keeper(cluster.port("one"))
    async with running(mine):
        await until(lambda: mine.is_held)

    assert re.fullmatch(r"2026-01-01T00:00:\d\d\.\d{6}Z", spec(cluster)["renewTime"])
    east = datetime(2026, 5, 1, 14, 0, 0, 5, tzinfo=timezone(timedelta(hours=2)))
    assert micro_time(east) == "2026-05-01T12:00:00.000005Z"
    assert micro_time(datetime(2026, 5, 1, tzinfo=UTC)) == "2026-05-01T00:00:00.000000Z"
    with pytest.raises(ValueError, match="zone"):
        micro_time(datetime(2026, 5, 1))


async def test_the_second_waits_and_takes_over_when_the_first_died(cluster: MemCluster) -> None:
    first, second = keeper(cluster.port("one")), keeper(cluster.port("two"))
    async with running(first, release=False):
        await until(lambda: first.is_held)
        async with running(second):
            await asyncio.sleep(60)
            assert not second.is_held
            assert second.other == "one"
            first._port.dead = True  # type: ignore[attr-defined]  # killed, nothing released
            took = await until(lambda: second.is_held)
            assert 10 <= took <= 25
            assert second.other is None
            assert not first.is_held
            assert spec(cluster)["leaseTransitions"] == 1


async def test_a_lease_that_was_given_back_is_taken_at_once(cluster: MemCluster) -> None:
    first, second = keeper(cluster.port("one")), keeper(cluster.port("two"))
    async with running(second, release=False):
        async with running(first):
            await until(lambda: first.is_held or second.is_held)
            if second.is_held:
                first, second = second, first
                return
        assert await until(lambda: second.is_held) < 3


async def test_a_restarted_container_takes_its_lease_back_at_once(cluster: MemCluster) -> None:
    port = cluster.port("pod-1")
    before = keeper(port)
    async with running(before, release=False):
        await until(lambda: before.is_held)
        await before.write(at_epoch(7))
    after = keeper(cluster.port("pod-1"))
    async with running(after):
        assert await until(lambda: after.is_held) < 1
        assert after.record is not None
        assert after.record.epoch == 7


async def test_a_wall_clock_that_jumps_changes_nothing(cluster: MemCluster) -> None:
    first, second = keeper(cluster.port("one")), keeper(cluster.port("two"))
    second._port.wall = lambda: datetime(2030, 1, 1, tzinfo=UTC)  # type: ignore[method-assign]
    async with running(first):
        await until(lambda: first.is_held)
        async with running(second):
            await asyncio.sleep(100)
            assert first.is_held
            assert not second.is_held


async def test_a_server_that_is_away_costs_the_lease_at_the_deadline_and_not_later(
    cluster: MemCluster,
) -> None:
    mine = keeper(cluster.port("one"))
    async with running(mine):
        await until(lambda: mine.is_held)
        await asyncio.sleep(60)
        cluster.down = True
        took = await until(lambda: not mine.is_held)
        assert 9 <= took <= 15.1
        await asyncio.sleep(30)
        assert not mine.is_held
        cluster.down = False
        assert await until(lambda: mine.is_held) < 3
        assert mine.tenure == 2


async def test_a_short_absence_costs_nothing(cluster: MemCluster) -> None:
    mine = keeper(cluster.port("one"))
    async with running(mine):
        await until(lambda: mine.is_held)
        for _ in range(10):
            cluster.down = True
            await asyncio.sleep(5)
            assert mine.is_held
            cluster.down = False
            await asyncio.sleep(5)
            assert mine.is_held
        assert mine.tenure == 1


async def test_a_renewal_that_hangs_does_not_prolong_anything(cluster: MemCluster) -> None:
    port = cluster.port("one")
    mine = keeper(port)
    lost_at: list[float] = []
    loop = asyncio.get_running_loop()
    async with running(mine, release=False):
        await until(lambda: mine.is_held)
        held = keeper(cluster.port("two"))
        port.paused = asyncio.Event()
        async with running(held):
            began = loop.time()
            while not held.is_held:
                if not mine.is_held and not lost_at:
                    lost_at.append(loop.time() - began)
                assert not (mine.is_held and held.is_held)
                await asyncio.sleep(0.01)
            assert lost_at[0] <= 15.1
            port.paused.set()
            await asyncio.sleep(5)
            assert held.is_held
            assert not mine.is_held


async def test_a_hanging_call_is_given_up_early_enough_to_try_again(cluster: MemCluster) -> None:
    port = cluster.port("one")
    mine = keeper(port)
    async with running(mine):
        await until(lambda: mine.is_held)
        for _ in range(5):
            port.hang(verb="patch")
            await asyncio.sleep(20)
            assert mine.is_held
        assert mine.tenure == 1


async def test_the_time_an_answer_took_is_not_ours(cluster: MemCluster) -> None:
    """The other one may have seen our renewal long before we heard that it was taken."""
    port = cluster.port("one")
    mine = keeper(port)
    loop = asyncio.get_running_loop()
    async with running(mine):
        await until(lambda: mine.is_held)
        port.answers_paused = asyncio.Event()
        before = len(cluster.writes)
        await until(lambda: len(cluster.writes) > before)
        renewed_at = loop.time()
        await asyncio.sleep(2)
        port.answers_paused.set()
        port.answers_paused = None
        cluster.down = True
        await until(lambda: not mine.is_held)

        assert loop.time() - renewed_at <= 15.1


async def test_a_late_answer_does_not_bring_a_lost_lease_back(cluster: MemCluster) -> None:
    port = cluster.port("one")
    mine = keeper(port)
    async with running(mine, release=False):
        await until(lambda: mine.is_held)
        await mine.write(at_epoch(1))
        port.answers_paused = held_up = asyncio.Event()
        before = len(cluster.writes)
        await until(lambda: len(cluster.writes) > before)
        port.answers_paused = None
        cluster.edit(LEASES, "lab", SLOT.lease, {"spec": {"holderIdentity": "two"}})
        with pytest.raises(LeaseLost):
            await mine.confirm(1)
        held_up.set()
        for _ in range(100):
            assert not mine.is_held
            await asyncio.sleep(0.01)


async def test_a_lease_that_vanished_is_lost(cluster: MemCluster) -> None:
    mine = keeper(cluster.port("one"), may_create=False)
    async with running(mine):
        cluster.put(LEASES, "lab", LEASES.body(SLOT.lease, "lab", spec={}))
        await until(lambda: mine.is_held)
        cluster.vanish(LEASES, "lab", SLOT.lease)
        assert await until(lambda: not mine.is_held) < 6


async def test_a_lease_that_was_made_anew_is_got_anew(cluster: MemCluster) -> None:
    mine = keeper(cluster.port("one"))
    async with running(mine):
        await until(lambda: mine.is_held)
        cluster.vanish(LEASES, "lab", SLOT.lease)
        body = LEASES.body(SLOT.lease, "lab", spec={"holderIdentity": "one"})
        cluster.put(LEASES, "lab", body)
        await until(lambda: mine.tenure == 2)


async def test_a_lease_that_was_made_anew_is_lost_even_with_our_name(cluster: MemCluster) -> None:
    mine = keeper(cluster.port("one"))
    async with running(mine):
        await until(lambda: mine.is_held)
        await mine.write(at_epoch(3))
        cluster.vanish(LEASES, "lab", SLOT.lease)
        body = LEASES.body(SLOT.lease, "lab", spec={"holderIdentity": "one"})
        cluster.put(LEASES, "lab", body)
        with pytest.raises(LeaseLost):
            await mine.confirm(3)
        assert not mine.is_held


async def test_a_record_is_written_with_the_version_it_was_read_at(cluster: MemCluster) -> None:
    port = cluster.port("one")
    mine = keeper(port)
    async with running(mine):
        await until(lambda: mine.is_held)
        await mine.write(lambda before: SlotRecord(epoch=1, owner="coder"))
        assert stored(cluster)["owner"] == "coder"
        # Somebody else adds a field of theirs, and a person declares a Pod gone.
        text = json.dumps({**stored(cluster), "theirs": [1], "forgotten": ["uid-9"]})
        cluster.edit(
            LEASES, "lab", SLOT.lease, {"metadata": {"annotations": {RECORD_ANNOTATION: text}}}
        )
        asked: list[SlotRecord | None] = []

        def make(before: SlotRecord | None) -> SlotRecord:
            asked.append(before)
            assert before is not None
            return replace(before, epoch=2, target="judge")

        await mine.write(make)

        assert len(asked) == 2
        assert stored(cluster)["theirs"] == [1]
        assert stored(cluster)["forgotten"] == ["uid-9"]
        assert stored(cluster)["epoch"] == 2
        versions = [
            request.body["metadata"]["annotations"]
            for request in port.requests
            if request.verb == "patch" and "metadata" in (request.body or {})
        ]
        assert len(versions) == 3


@pytest.mark.parametrize("applied", [True, False])
async def test_a_record_whose_answer_was_lost_is_settled_by_looking(
    cluster: MemCluster, applied: bool
) -> None:
    port = cluster.port("one")
    mine = keeper(port)
    async with running(mine):
        await until(lambda: mine.is_held)
        await mine.write(at_epoch(1))
        port.lose(applied=applied, verb="patch")

        written = await mine.write(
            lambda before: replace(before or SlotRecord(), epoch=(before or SlotRecord()).epoch + 1)
        )

        assert written.epoch == 2
        assert stored(cluster)["epoch"] == 2
        assert mine.is_held


async def test_a_record_write_is_a_renewal(cluster: MemCluster) -> None:
    port = cluster.port("one")
    mine = keeper(port)
    async with running(mine):
        await until(lambda: mine.is_held)
        began = len(port.requests)
        for epoch in range(1, 31):
            await mine.write(at_epoch(epoch))
            await asyncio.sleep(2)
        patches = [request for request in port.requests[began:] if request.verb == "patch"]

        assert mine.is_held
        assert len(patches) == 30
        assert all(request.body["spec"]["renewTime"] for request in patches)


async def test_an_epoch_never_goes_down(cluster: MemCluster) -> None:
    mine = keeper(cluster.port("one"))
    async with running(mine):
        await until(lambda: mine.is_held)
        await mine.write(at_epoch(5))
        with pytest.raises(Frozen):
            await mine.write(at_epoch(4))
        assert stored(cluster)["epoch"] == 5
        await mine.write(at_epoch(6))


@pytest.mark.parametrize(
    "text", ["{", '{"epoch":1,"format":2}', '{"epoch":4}'], ids=["broken", "newer", "went back"]
)
async def test_a_record_that_must_not_be_touched_freezes_the_slot_but_not_the_lease(
    cluster: MemCluster, text: str
) -> None:
    mine = keeper(cluster.port("one"))
    async with running(mine):
        await until(lambda: mine.is_held)
        await mine.write(at_epoch(5))
        patch = {"metadata": {"annotations": {RECORD_ANNOTATION: text}}}
        cluster.edit(LEASES, "lab", SLOT.lease, patch)
        await until(lambda: mine.frozen is not None)
        with pytest.raises((Frozen, LeaseLost)):
            await mine.confirm(5)
        with pytest.raises(Frozen):
            await mine.write(at_epoch(6))
        await asyncio.sleep(100)

        assert mine.is_held
        annotations = cluster.must(LEASES, "lab", SLOT.lease)["metadata"]["annotations"]
        assert annotations[RECORD_ANNOTATION] == text


async def test_confirming_reads_the_lease_itself(cluster: MemCluster) -> None:
    port = cluster.port("one")
    mine = keeper(port)
    async with running(mine):
        await until(lambda: mine.is_held)
        with pytest.raises(LeaseLost, match="epoch None"):
            await mine.confirm(1)
        await mine.write(at_epoch(1))
        await mine.confirm(1)
        with pytest.raises(LeaseLost, match="epoch 1, not 2"):
            await mine.confirm(2)
        cluster.edit(LEASES, "lab", SLOT.lease, {"spec": {"holderIdentity": "two"}})
        with pytest.raises(LeaseLost, match="two"):
            await mine.confirm(1)
        assert not mine.is_held
        await asyncio.sleep(1)
        assert not mine.is_held


async def test_orders_fail_when_the_lease_is_lost(cluster: MemCluster) -> None:
    port = cluster.port("one")
    mine = keeper(port)
    async with running(mine):
        await until(lambda: mine.is_held)
        cluster.down = True
        with pytest.raises(LeaseLost):
            await mine.write(at_epoch(1))
        assert not mine.is_held
        with pytest.raises(LeaseLost):
            await mine.write(at_epoch(1))


async def test_orders_fail_when_the_keeper_ends(cluster: MemCluster) -> None:
    mine = keeper(cluster.port("one"))
    async with running(mine):
        await until(lambda: mine.is_held)
        cluster.down = True
        loop = asyncio.get_running_loop()
        writing = loop.create_task(mine.write(at_epoch(1)))
        await asyncio.sleep(0)
    with pytest.raises(LeaseLost):
        await writing
    with pytest.raises(LeaseLost):
        await mine.confirm(1)


async def test_who_loses_a_race_for_a_free_lease_waits(cluster: MemCluster) -> None:
    keepers = [keeper(cluster.port(name)) for name in ("one", "two", "three")]
    async with running(*keepers):
        await asyncio.sleep(30)

        assert sum(each.is_held for each in keepers) == 1


async def test_changes_are_told(cluster: MemCluster) -> None:
    told: list[bool] = []
    mine: LeaseKeeper = keeper(cluster.port("one"), on_change=lambda: told.append(mine.is_held))
    async with running(mine):
        await until(lambda: mine.is_held)
        assert told[-1] is True
        cluster.vanish(LEASES, "lab", SLOT.lease)
        await until(lambda: False in told)


@pytest.mark.parametrize("seed", range(6))
async def test_never_do_two_believe_in_it(cluster: MemCluster, seed: int) -> None:
    """Random outages, lost answers, pauses, kills and restarts; looked at every 100 ms."""
    rng = random.Random(seed)
    keepers = [keeper(cluster.port(name)) for name in ("one", "two", "three")]
    ports: list[MemPort] = [each._port for each in keepers]  # type: ignore[misc]
    held = 0
    async with running(*keepers, release=rng.random() < 0.5):
        for _ in range(2000):
            await asyncio.sleep(0.1)
            believers = [each for each in keepers if each.is_held]
            assert len(believers) <= 1
            held += len(believers)
            if believers and rng.random() < 0.02:
                with contextlib.suppress(LeaseLost):
                    async with asyncio.timeout(30):
                        await believers[0].write(
                            lambda before: replace(
                                before or SlotRecord(), epoch=1 + (before.epoch if before else 0)
                            )
                        )
            port = rng.choice(ports)
            match rng.randrange(40):
                case 0:
                    cluster.down = not cluster.down
                case 1:
                    port.lose(applied=rng.random() < 0.5, verb=rng.choice(["get", "patch"]))
                case 2 if port.paused is None:
                    port.paused = asyncio.Event()
                case 3 | 4 if port.paused is not None:
                    port.paused.set()
                    port.paused = None
                case 5:
                    port.delay(verb="patch")
                case 6:
                    port.land()
                case 7:
                    port.fail(errors.Conflict("storm"), verb="patch")
                case 8:
                    cluster.down = False
                case _:
                    pass
    epochs = [
        json.loads(write.after["metadata"]["annotations"][RECORD_ANNOTATION])["epoch"]
        for write in cluster.writes
        if write.kind == LEASES
        and write.after is not None
        and RECORD_ANNOTATION in write.after["metadata"].get("annotations", {})
    ]
    assert epochs == sorted(epochs)
    assert held > 100


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("number", range(1, 7))
async def test_killed_anywhere_the_next_one_takes_over(
    cluster: MemCluster, mode: Mode, number: int
) -> None:
    port = cluster.port("one")
    port.kill_at(number, mode)
    first = keeper(port)
    loop = asyncio.get_running_loop()
    task = loop.create_task(first.run(release=False))
    epoch = 0
    with contextlib.suppress(LeaseLost, Killed):
        while not task.done():
            await asyncio.sleep(1)
            if first.is_held:
                epoch += 1
                await first.write(at_epoch(epoch))
    with contextlib.suppress(Killed):
        await task
    second = keeper(cluster.port("two"))
    async with running(second):
        took = await until(lambda: second.is_held)
        assert took <= 20
        await second.write(
            lambda before: replace(
                before or SlotRecord(), epoch=1 + (before.epoch if before else 0)
            )
        )
        assert stored(cluster)["epoch"] >= epoch
