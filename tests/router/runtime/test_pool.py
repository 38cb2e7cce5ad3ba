"""The shell of a pool: commands carried out, leases given back, tasks ended; on virtual time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from modelpool_router.core.commands import BreakReason, Note, NoteKind, RefusalCode
from modelpool_router.core.events import (
    Idleness,
    LoadAsked,
    Stopping,
    UnloadAsked,
)
from modelpool_router.core.spec import (
    HoldLedger,
    MemberName,
    MemberSpec,
    PoolName,
    PoolSpec,
)
from modelpool_router.core.view import SlotState
from modelpool_router.drivers.base import ActivationFailed, DriverUnavailable
from modelpool_router.runtime.leases import HoldRefused
from modelpool_router.runtime.pool import PoolRuntime
from modelpool_router.testing.driver import FakeDriver

pytestmark = pytest.mark.looptime(idle_timeout=10_000)

A, B = MemberName("a"), MemberName("b")


class Bench:
    """A pool on a fake driver, with everything it told."""

    def __init__(self, spec: PoolSpec) -> None:
        self.driver = FakeDriver([A, B])
        self.notes: list[Note] = []
        self.violations = 0
        self.ledger = HoldLedger()

        def make(lost: object) -> FakeDriver:
            self.driver.lost = lost  # type: ignore[assignment]  # the callback of the contract
            return self.driver

        def violated() -> None:
            self.violations += 1

        self.pool = PoolRuntime(
            spec,
            make,
            ledger=self.ledger,
            tickets=itertools.count(1),
            listener=lambda _, note: self.notes.append(note),
            violation=violated,
        )

    def kinds(self) -> list[NoteKind]:
        return [note.kind for note in self.notes]

    def deadline(self, seconds: float = 300.0) -> float:
        return self.pool.loop.time() + seconds

    async def use(self, member: MemberName, seconds: float, budget_s: float = 300.0) -> float:
        """Hold, use for *seconds*, give back; return when it was granted."""
        async with self.pool.lease(member, deadline=self.deadline(budget_s), key=None):
            granted_at = self.pool.loop.time()
            await asyncio.sleep(seconds)
        return granted_at

    def assert_quiet(self) -> None:
        view = self.pool.view()
        assert (view.held, view.in_flight, self.ledger.held) == (0, 0, 0)
        assert not self.pool.waiters and not self.pool.lent
        assert self.driver.violations == []


@asynccontextmanager
async def bench(**rules: object) -> AsyncIterator[Bench]:
    members = {A: MemberSpec(A, expected_load_s=2.0), B: MemberSpec(B, expected_load_s=2.0)}
    told = {"members": members, "linger_s": 0.0, **rules}
    spec = PoolSpec(PoolName("p"), **told)  # type: ignore[arg-type]  # rules are PoolSpec's own
    made = Bench(spec)
    await made.pool.start()
    try:
        yield made
        made.assert_quiet()
    finally:
        await made.pool.stop(stop_members=True)


async def test_eight_clients_of_a_cold_member_share_one_load() -> None:
    async with bench() as b:
        b.driver.behaviours[A].load_s = 2.0

        granted = await asyncio.gather(*(b.use(A, 1.0) for _ in range(8)))

        assert {round(at - granted[0], 6) for at in granted} == {0.0}
        assert b.driver.count("activate") == 1


async def test_the_incumbent_is_gone_before_the_target_starts() -> None:
    async with bench() as b:
        for behaviour in b.driver.behaviours.values():
            behaviour.load_s, behaviour.unload_s = 1.0, 0.5

        await asyncio.gather(b.use(A, 3.0), b.use(B, 1.0))

        order = [(call.what, call.member) for call in b.driver.calls if call.what != "activate"]
        assert order.index(("gone", A)) < order.index(("started", B))
        assert b.violations == 0


async def test_a_hold_ends_exactly_at_its_deadline_and_the_load_goes_on() -> None:
    async with bench() as b:
        b.driver.behaviours[A].load_s = 5.0
        began = b.pool.loop.time()

        with pytest.raises(HoldRefused) as refused:
            await b.use(A, 0.0, budget_s=1.0)
        held_s = b.pool.loop.time() - began
        granted_at = await b.use(A, 0.0)

        assert held_s == pytest.approx(1.0, abs=0.01)
        assert refused.value.refusal.code is RefusalCode.SWAP_BUDGET_EXCEEDED
        assert granted_at - began == pytest.approx(5.0, abs=0.01)
        assert b.driver.count("activate") == 1


async def test_a_client_that_leaves_while_held_leaves_nothing_behind() -> None:
    async with bench() as b:
        b.driver.behaviours[A].load_s = 5.0
        leaving = asyncio.get_running_loop().create_task(b.use(A, 1.0))
        await asyncio.sleep(1.0)

        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving

        b.assert_quiet()
        assert await b.use(A, 0.0) > 0


async def test_a_grant_in_the_tick_of_the_cancellation_is_given_back() -> None:
    async with bench() as b:
        b.driver.behaviours[A].load_s = 1.0
        loop = asyncio.get_running_loop()
        leaving = [loop.create_task(b.use(A, 60.0)) for _ in range(50)]
        await asyncio.sleep(0.5)
        b.pool.loop.call_at(loop.time() + 0.5, lambda: [task.cancel() for task in leaving])

        results = await asyncio.gather(*leaving, return_exceptions=True)

        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        b.assert_quiet()


async def test_cancellation_at_every_suspension_of_the_lease_leaves_nothing() -> None:
    """Walk the path hold, grant, use, renew, use and cancel it at the n-th step, for every n."""

    async def path(b: Bench) -> None:
        async with b.pool.lease(A, deadline=b.deadline(), key="k") as lease:
            await asyncio.sleep(0.25)
            await lease.renew(b.deadline())
            await asyncio.sleep(0.25)

    reached = 0
    for steps in range(200):
        async with bench() as b:
            b.driver.behaviours[A].load_s = 0.5
            task = asyncio.get_running_loop().create_task(path(b))
            for _ in range(steps):
                await asyncio.sleep(0.01)
            if task.done():
                await task
                break
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            b.assert_quiet()
            reached += 1

    assert 90 <= reached < 200


async def test_a_failed_load_tells_its_waiters_why_and_frees_the_slot() -> None:
    async with bench() as b:
        b.driver.behaviours[A].load_failures.append(ActivationFailed("exited", "exit code 3"))

        with pytest.raises(HoldRefused) as refused:
            await b.use(A, 1.0)
        await b.use(B, 1.0)

        assert refused.value.refusal.code is RefusalCode.MEMBER_FAILED
        assert "exit code 3" in refused.value.refusal.reason
        assert b.driver.existing == {B}


async def test_a_load_past_its_limit_is_cancelled_and_taken_down() -> None:
    async with bench(load_timeout_s=3.0) as b:
        b.driver.behaviours[A].load_hangs = True
        began = b.pool.loop.time()

        with pytest.raises(HoldRefused) as refused:
            await b.use(A, 1.0)

        assert b.pool.loop.time() - began == pytest.approx(3.0, abs=0.05)
        assert "load_timeout" in refused.value.refusal.reason
        await asyncio.sleep(0.1)
        assert b.driver.existing == frozenset()


async def test_an_unload_that_cannot_be_proven_is_tried_again_before_anything_starts() -> None:
    async with bench() as b:
        await b.use(A, 0.1)
        b.driver.behaviours[A].unload_failures.append(DriverUnavailable("cannot tell"))

        await b.use(B, 0.1)

        assert b.driver.count("deactivate", A) == 2
        assert NoteKind.UNLOAD_RETRIED in b.kinds()


async def test_a_busy_engine_defers_the_swap_and_admission_reopens() -> None:
    async with bench() as b:
        await b.use(A, 0.1)
        b.driver.behaviours[A].idle = Idleness.BUSY
        other = asyncio.get_running_loop().create_task(b.use(B, 0.1))
        await asyncio.sleep(0.5)

        view = b.pool.view()
        await b.use(A, 0.1)
        b.driver.behaviours[A].idle = Idleness.IDLE
        await other

        assert (view.deferred_reason, view.admission) == ("PodsBusy", "open")


async def test_a_probe_that_hangs_counts_as_unreachable() -> None:
    async with bench() as b:
        await b.use(A, 0.1)
        b.driver.behaviours[A].idle_s = 100.0
        other = asyncio.get_running_loop().create_task(b.use(B, 0.1))
        await asyncio.sleep(5.5)

        reason = b.pool.view().deferred_reason
        b.driver.behaviours[A].idle_s = 0.0
        await other

        assert reason == "IdleCheckFailed"


async def test_a_refused_dispatch_goes_back_to_the_hold_and_is_served_after_a_reload() -> None:
    async with bench() as b:
        async with b.pool.lease(A, deadline=b.deadline(), key=None) as lease:
            first = lease.endpoint
            await asyncio.sleep(100.0)  # long enough to count as a good load
            b.driver.die(A)

            await lease.renew(b.deadline())

            assert lease.endpoint.identity != first.identity
        assert b.driver.count("activate", A) == 2


async def test_a_refused_dispatch_of_what_was_lent_at_once_is_held_for_its_whole_budget() -> None:
    """The short way asks for no deadline as long as nobody has to wait."""
    async with bench() as b:
        await b.use(A, 100.0)
        lent = b.pool.lend(A, None)
        assert lent is not None
        async with b.pool.scope_of(lent) as lease:
            b.driver.behaviours[A].load_s = 50.0
            b.driver.die(A)

            await lease.renew(b.deadline(60.0))

        await asyncio.sleep(100.0)
        lent = b.pool.lend(A, None)
        assert lent is not None
        async with b.pool.scope_of(lent) as lease:
            b.driver.die(A)
            began = b.pool.loop.time()
            with pytest.raises(HoldRefused) as refused:
                await lease.renew(b.deadline(20.0))
            assert b.pool.loop.time() - began == pytest.approx(20.0)
            assert refused.value.refusal.code == RefusalCode.SWAP_BUDGET_EXCEEDED


async def test_a_refused_dispatch_of_a_member_that_is_well_is_lent_again_at_once() -> None:
    async with bench() as b:
        async with b.pool.lease(A, deadline=b.deadline(), key=None) as lease:
            await lease.renew(b.deadline())

            with pytest.raises(HoldRefused):
                await lease.renew(b.deadline())
        assert b.driver.count("activate", A) == 1


async def test_a_resident_that_hangs_is_ended_and_loaded_afresh() -> None:
    async with bench(hung_after_s=20.0) as b:
        broken: list[BreakReason] = []
        async with b.pool.lease(A, deadline=b.deadline(), key=None) as lease:
            lease.on_break = broken.append
            await asyncio.sleep(100.0)  # long enough to count as a good load
            b.driver.behaviours[A].ready = False
            b.driver.behaviours[A].idle = Idleness.UNREACHABLE
            await asyncio.sleep(30.0)
        b.driver.behaviours[A].ready = True
        b.driver.behaviours[A].idle = Idleness.IDLE
        await asyncio.sleep(60.0)
        await b.use(A, 0.1)

        assert broken == [BreakReason.RESIDENT_HUNG]
        assert b.driver.count("activate", A) == 2


async def test_an_idle_resident_that_hangs_gives_way_to_who_waits() -> None:
    async with bench(hung_after_s=20.0) as b:
        await b.use(A, 0.1)
        await asyncio.sleep(100.0)
        b.driver.behaviours[A].ready = False
        b.driver.behaviours[A].idle = Idleness.UNREACHABLE
        await b.use(B, 0.1)

        assert NoteKind.RESIDENT_LOST in b.kinds()
        assert b.driver.count("activate", B) == 1


async def test_of_an_engine_without_an_idle_probe_readiness_alone_tells_that_it_hangs() -> None:
    """There is no second probe to fail; its driver would call it idle whatever happens."""
    member = MemberSpec(A, has_idle_probe=False)
    async with bench(hung_after_s=20.0, members={A: member, B: MemberSpec(B)}) as b:
        await b.use(A, 0.1)
        await asyncio.sleep(100.0)
        b.driver.behaviours[A].ready = False
        b.driver.behaviours[A].idle = Idleness.IDLE
        await asyncio.sleep(30.0)

        assert NoteKind.RESIDENT_LOST in b.kinds()


async def test_a_resident_that_hangs_is_ended_although_clients_keep_coming() -> None:
    """Each is lent the resident, hears nothing and gives up: none of that is progress."""
    async with bench(hung_after_s=20.0) as b:
        await b.use(A, 0.1)
        await asyncio.sleep(100.0)
        b.driver.behaviours[A].ready = False
        b.driver.behaviours[A].idle = Idleness.UNREACHABLE
        for _ in range(30):
            await b.use(A, 1.0)

        assert NoteKind.RESIDENT_LOST in b.kinds()


async def test_short_answers_between_two_looks_are_progress() -> None:
    """An engine with one thread is too busy for probes, and works."""
    async with bench(hung_after_s=20.0) as b:
        b.driver.behaviours[A].ready = False
        b.driver.behaviours[A].idle = Idleness.UNREACHABLE
        for _ in range(50):
            async with b.pool.lease(A, deadline=b.deadline(), key=None) as lease:
                lease.moved_at = b.pool.loop.time()
            await asyncio.sleep(1.0)
        b.driver.behaviours[A].ready = True
        b.driver.behaviours[A].idle = Idleness.IDLE

        assert NoteKind.RESIDENT_LOST not in b.kinds()


async def test_traffic_that_moves_is_proof_enough_of_health() -> None:
    async with bench(hung_after_s=20.0) as b:
        async with b.pool.lease(A, deadline=b.deadline(), key=None) as lease:
            b.driver.behaviours[A].ready = False
            b.driver.behaviours[A].idle = Idleness.UNREACHABLE
            for _ in range(50):
                await asyncio.sleep(1.0)
                lease.moved_at = b.pool.loop.time()
        b.driver.behaviours[A].ready = True
        b.driver.behaviours[A].idle = Idleness.IDLE

        assert NoteKind.RESIDENT_LOST not in b.kinds()


async def test_verbs_of_a_person_load_and_empty_the_slot() -> None:
    async with bench() as b:
        b.pool.tell(LoadAsked(A))
        await asyncio.sleep(1.0)
        loaded = b.pool.view().resident
        b.pool.tell(UnloadAsked())
        await asyncio.sleep(1.0)

        assert loaded == A
        assert b.pool.view().state is SlotState.COLD
        assert b.pool.view().released


async def test_stopping_refuses_what_is_held_and_serves_the_resident() -> None:
    async with bench() as b:
        await b.use(A, 0.1)
        busy = asyncio.get_running_loop().create_task(b.use(A, 5.0))
        await asyncio.sleep(0.1)
        other = asyncio.get_running_loop().create_task(b.use(B, 0.1))
        await asyncio.sleep(0.1)

        b.pool.tell(Stopping())
        with pytest.raises(HoldRefused) as refused:
            await other
        await b.use(A, 0.1)
        await busy

        assert refused.value.refusal.code is RefusalCode.POOL_DRAINING


async def test_a_driver_that_breaks_its_contract_does_not_hang_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with bench() as b:

        async def broken(member: MemberName) -> None:
            raise ZeroDivisionError

        with monkeypatch.context() as patched:
            patched.setattr(b.driver, "activate", broken)
            with pytest.raises(HoldRefused) as refused:
                await b.use(A, 0.1)
        await b.use(B, 0.1)

        assert "internal_error" in refused.value.refusal.reason


async def test_an_outsider_found_up_is_counted_and_taken_down_before_a_load() -> None:
    async with bench() as b:
        await b.use(A, 0.1)
        b.pool.tell(UnloadAsked())
        await asyncio.sleep(0.5)
        b.driver.adopt(A)

        await b.use(B, 0.1)

        assert b.violations == 1
        assert b.driver.existing == {B}


async def test_a_member_that_is_up_at_start_is_adopted() -> None:
    made = Bench(PoolSpec(PoolName("p"), {A: MemberSpec(A), B: MemberSpec(B)}, linger_s=0.0))
    made.driver.adopt(A)
    await made.pool.start()

    await made.use(A, 0.1)

    assert made.driver.count("activate") == 0
    await made.pool.stop(stop_members=False)
    assert made.driver.existing == {A}
