"""A pool at run time over the Kubernetes driver: standing by, outages, and what the record says."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from kubeworld import NAMESPACE, KubeWorld, Watchman
from memcluster import MemPort, Write
from modelpool_kube.kinds import PODS
from modelpool_kube.record import Phase
from modelpool_router.core.commands import RefusalCode
from modelpool_router.core.spec import HoldLedger, MemberName, MemberSpec, PoolName, PoolSpec
from modelpool_router.core.view import PoolView, SlotState
from modelpool_router.drivers.base import SlotStanding
from modelpool_router.drivers.kubernetes import KubeLimits
from modelpool_router.runtime.leases import HoldRefused
from modelpool_router.runtime.pool import PoolRuntime

pytestmark = pytest.mark.looptime(idle_timeout=100_000, noop_cycles=8)

ALPHA, BETA = MemberName("alpha"), MemberName("beta")


class Router:
    """One router's pool."""

    def __init__(
        self,
        world: KubeWorld,
        name: str,
        *,
        default: MemberName | None = None,
        ledger: HoldLedger | None = None,
    ) -> None:
        self.port: MemPort = world.cluster.port(name)
        self.found: PoolRuntime | None = None
        self.ledger = ledger or HoldLedger()
        spec = PoolSpec(
            PoolName("gpu0"),
            {member: MemberSpec(member) for member in (ALPHA, BETA)},
            default=default,
            linger_s=0.0,
        )
        self.pool = self.found = PoolRuntime(
            spec,
            lambda lost: world.driver(
                name,
                port=self.port,
                limits=KubeLimits(),
                lost=lost,
                standing=self._stand,
                view=self._view,
            ),
            ledger=self.ledger,
            tickets=itertools.count(1),
            listener=lambda name, note: None,
        )

    def _stand(self, standing: SlotStanding) -> None:
        if self.found is not None:
            self.found.stand(standing)

    def _view(self) -> PoolView | None:
        return None if self.found is None else self.found.view()

    async def use(self, member: MemberName, seconds: float = 0.0, budget_s: float = 300.0) -> str:
        """Use *member* for a while; return ``ok`` or the code of the refusal."""
        deadline = self.pool.loop.time() + budget_s
        try:
            async with self.pool.lease(member, deadline=deadline, key=None):
                await asyncio.sleep(seconds)
        except HoldRefused as error:
            return str(error.refusal.code)
        return "ok"


@asynccontextmanager
async def routers(
    *names: str, default: MemberName | None = None
) -> AsyncIterator[tuple[KubeWorld, list[Router]]]:
    """Run pools of routers in one world."""
    world = KubeWorld(step_s=0.05)
    watchman = Watchman(world)
    made = [Router(world, name, default=default) for name in names]
    for each in made:
        await each.pool.start()
    yield world, made
    for each in made:
        each.port.paused = None
        await each.pool.stop(stop_members=True)
    await world.end()
    assert watchman.verdicts == []


async def until(what: Callable[[], object], limit_s: float = 120.0) -> None:
    """Let virtual time pass until *what* is so."""
    async with asyncio.timeout(limit_s):
        while not what():
            await asyncio.sleep(0.1)


async def test_the_record_says_what_is_going_on() -> None:
    async with routers("router-1") as (world, (router,)):
        assert await router.use(ALPHA) == "ok"
        loop = asyncio.get_running_loop()
        using = loop.create_task(router.use(ALPHA, 200.0))
        await asyncio.sleep(1)
        said: list[tuple[str, str | None]] = []

        def look(write: Write) -> None:
            found = (str(world.record().phase), world.record().target)
            if said[-1:] != [found]:
                said.append(found)

        world.cluster.after_write.append(look)
        waiting = loop.create_task(router.use(BETA))
        await until(lambda: world.record().phase is Phase.DRAINING)

        record = world.record()
        assert (record.owner, record.target, record.held) == ("alpha", "beta", 1)
        assert record.reason.startswith("PodsBusy: alpha works on requests")
        assert await using == "ok"
        assert await waiting == "ok"
        await until(lambda: world.record().held == 0)
        assert (world.record().owner, world.record().phase) == ("beta", Phase.RESIDENT)
        # Who comes is named without a gap, so that nobody takes the swap for a loss.
        assert said == [
            ("resident", None),
            *((phase, "beta") for phase in ("draining", "unloading", "loading")),
            ("resident", None),
        ]


async def test_who_comes_while_the_lease_is_not_ours_yet_is_held() -> None:
    async with routers("router-1") as (world, (router,)):
        assert router.pool.view().state is SlotState.STARTING

        assert await router.use(ALPHA) == "ok"


async def test_the_default_is_warmed_and_the_next_router_finds_it() -> None:
    async with routers("router-1", default=BETA) as (world, (router,)):
        await until(lambda: router.pool.view().resident == BETA)

        again = Router(world, "router-1", default=ALPHA)
        await router.pool.stop(stop_members=True)
        await again.pool.start()
        await until(lambda: again.pool.view().resident == BETA)
        await asyncio.sleep(60)

        assert again.pool.view().resident == BETA
        assert world.starts("alpha") == 0
        await again.pool.stop(stop_members=True)


async def test_a_standby_refuses_and_takes_over_with_the_resident_up() -> None:
    async with routers("router-1", "router-2") as (world, (first, second)):
        assert await first.use(ALPHA) == "ok"
        await until(lambda: second.pool.view().withheld == "the slot is held by router-1")
        assert await second.use(ALPHA) == RefusalCode.SLOT_UNAVAILABLE

        await first.pool.stop(stop_members=True)
        await until(lambda: second.pool.view().resident == ALPHA)

        assert await second.use(ALPHA) == "ok"
        assert await second.use(BETA) == "ok"
        assert (world.starts("alpha"), world.starts("beta")) == (1, 1)


async def test_a_router_that_was_cut_off_serves_until_it_sees_its_successor() -> None:
    async with routers("router-1", "router-2") as (world, (first, second)):
        assert await first.use(ALPHA) == "ok"
        first.port.paused = asyncio.Event()
        await until(lambda: second.pool.view().resident == ALPHA)
        assert await first.use(ALPHA) == "ok"
        assert await first.use(BETA) == RefusalCode.SLOT_UNAVAILABLE
        running = asyncio.get_running_loop().create_task(first.use(ALPHA, 60.0))
        await asyncio.sleep(1)

        first.port.paused.set()
        await until(lambda: first.pool.view().state is SlotState.STARTING)

        assert await first.use(ALPHA) == RefusalCode.SLOT_UNAVAILABLE
        assert await running == "ok"
        assert await second.use(ALPHA) == "ok"
        await second.pool.stop(stop_members=True)
        await until(lambda: first.pool.view().resident == ALPHA)
        assert await first.use(ALPHA) == "ok"


async def test_while_the_api_server_is_away_every_request_of_the_resident_is_served() -> None:
    async with routers("router-1") as (world, (router,)):
        assert await router.use(ALPHA) == "ok"
        world.cluster.down = True
        world.cluster.break_watches()
        answers = []
        for _ in range(60):
            answers.append(await router.use(ALPHA, 1.0))
        assert answers == ["ok"] * 60
        assert await router.use(BETA) == RefusalCode.SLOT_UNAVAILABLE

        world.cluster.down = False
        back = asyncio.get_running_loop().time()
        while await router.use(BETA) != "ok":
            await asyncio.sleep(0.5)

        assert asyncio.get_running_loop().time() - back < 10
        assert world.up() == {"beta"}


async def test_a_short_outage_interrupts_no_hold() -> None:
    async with routers("router-1") as (world, (router,)):
        assert await router.use(ALPHA) == "ok"
        world.cluster.down = True
        world.cluster.break_watches()
        waiting = asyncio.get_running_loop().create_task(router.use(BETA))
        await asyncio.sleep(6)

        world.cluster.down = False

        assert await waiting == "ok"


async def test_no_warm_request_awaits_the_api_server() -> None:
    async with routers("router-1") as (world, (router,)):
        assert await router.use(ALPHA) == "ok"
        loop = asyncio.get_running_loop()
        # From now on it takes in every request and answers none.
        router.port.paused = asyncio.Event()
        began = loop.time()

        answers = [await router.use(ALPHA) for _ in range(500)]

        assert set(answers) == {"ok"}
        assert loop.time() - began < 0.1
        router.port.paused.set()


async def test_a_swap_that_hangs_in_one_pool_costs_the_other_pool_nothing() -> None:
    """Two pools of one router, on two clusters; what one asks for is taken in and not answered."""
    async with routers("router-1") as (_, (router,)):
        elsewhere = KubeWorld(step_s=0.05)
        stuck = Router(elsewhere, "router-1", ledger=router.ledger)
        await stuck.pool.start()
        assert (await stuck.use(ALPHA), await router.use(ALPHA)) == ("ok", "ok")
        loop = asyncio.get_running_loop()
        swap = loop.create_task(stuck.use(BETA))
        await until(lambda: elsewhere.record().phase is Phase.UNLOADING)
        stuck.port.paused = asyncio.Event()
        await asyncio.sleep(1)
        began = loop.time()

        answers = [await router.use(ALPHA) for _ in range(500)]

        assert set(answers) == {"ok"}
        assert loop.time() - began < 0.1
        assert await router.use(BETA) == "ok"
        assert elsewhere.replicas("beta") == 0
        assert not swap.done()
        stuck.port.paused.set()
        stuck.port.paused = None
        assert await swap == "ok"
        await stuck.pool.stop(stop_members=True)
        await elsewhere.end()


async def test_a_default_that_cannot_start_keeps_nobody_from_the_slot() -> None:
    async with routers("router-1", default=ALPHA) as (world, (router,)):
        world.failing.add("alpha")
        loop = asyncio.get_running_loop()
        began = loop.time()

        assert await router.use(BETA) == "ok"

        assert loop.time() - began < 60
        refused = loop.time()
        assert await router.use(ALPHA) in (RefusalCode.MEMBER_FAILED, RefusalCode.MEMBER_BACKOFF)
        assert loop.time() - refused < 10
        assert await router.use(BETA) == "ok"


async def test_a_resident_whose_pod_is_deleted_is_loaded_again_for_the_next_request() -> None:
    async with routers("router-1") as (world, (router,)):
        assert await router.use(ALPHA) == "ok"
        await asyncio.sleep(120)  # sooner, its end would count as a failed load
        first = world.pod("alpha")["metadata"]
        world.cluster.remove(PODS, NAMESPACE, first["name"])

        assert await router.use(ALPHA, budget_s=60.0) == "ok"

        # It may have been served by the Pod that is going; the next one is not.
        await until(
            lambda: not any(p["metadata"]["uid"] == first["uid"] for p in world.pods("alpha"))
        )
        assert await router.use(ALPHA, budget_s=60.0) == "ok"
        assert world.pod("alpha")["metadata"]["uid"] != first["uid"]
