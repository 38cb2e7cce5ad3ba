"""Holds on slots: what is looked at once more just before the write, whatever the plan saw."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from memcluster import MemCluster, MemPort
from modelpool_api.names import lease_name
from modelpool_kube import errors
from modelpool_kube.kinds import DEPLOYMENTS, LEASES, PODS
from modelpool_kube.lease import LeaseLost
from modelpool_kube.record import SlotId
from modelpool_kube.slotrules import Member
from modelpool_operator.engine.sessions import PAUSE_S, SlotSessions
from modelpool_operator.plan.model import Load, ProbeIdle, TakeSlot, Target, Unload
from operatorworld import NS, OperatorWorld

pytestmark = pytest.mark.looptime(idle_timeout=100_000)
SLOT = SlotId(NS, lease_name("gpu0"))
CODER = Member("coder", DEPLOYMENTS, NS, "coder")
JUDGE = Member("judge", DEPLOYMENTS, NS, "judge")


@pytest.fixture
async def world() -> OperatorWorld:
    """Two members at 0 and a Lease, without pools and operators."""
    found = OperatorWorld()
    found.outsiders.add("operator-0")  # what is written is looked at here, not by the invariants
    found.member("coder")
    found.member("judge")
    found.cluster.put(LEASES, NS, {"metadata": {"name": SLOT.lease}, "spec": {}})
    found.world.settle()
    return found


@pytest.fixture
async def sessions(world: OperatorWorld) -> AsyncIterator[SlotSessions]:
    """Sessions, of which one is open and fenced."""
    found = SlotSessions(world.cluster.port("operator-0"), "operator-0", world.members)
    take = TakeSlot((CODER, JUDGE), was_routed=False)
    while not await found.act(SLOT, take, lambda: None):
        await asyncio.sleep(0.1)
    world.world.settle()
    yield found
    await found.close()


def holder(cluster: MemCluster) -> str:
    """Return who holds the Lease."""
    return str(cluster.must(LEASES, NS, SLOT.lease)["spec"].get("holderIdentity"))


async def test_given_all_others_are_gone_then_a_load_is_recorded_and_done(
    world: OperatorWorld, sessions: SlotSessions
) -> None:
    assert await sessions.act(SLOT, Load(JUDGE, (CODER,), "cold"), lambda: None)

    assert world.replicas() == {"coder": 0, "judge": 1}
    assert world.record()["phase"] == "loading"
    assert world.record()["target"] == "judge"


async def test_given_another_one_is_back_since_the_plan_then_nothing_is_loaded(
    world: OperatorWorld, sessions: SlotSessions
) -> None:
    world.cluster.edit(DEPLOYMENTS, NS, "coder", {"spec": {"replicas": 1}})
    world.world.settle()
    before = world.cluster.version

    assert not await sessions.act(SLOT, Load(JUDGE, (CODER,), "cold"), lambda: None)

    assert world.replicas() == {"coder": 1, "judge": 0}
    assert world.writes(before) == []


async def test_given_a_member_turns_busy_after_the_plan_then_it_is_not_unloaded(
    world: OperatorWorld, sessions: SlotSessions
) -> None:
    await sessions.act(SLOT, Load(JUDGE, (CODER,), "cold"), lambda: None)
    world.world.settle()
    pod = world.cluster.all(PODS)[0]
    target = Target(pod["metadata"]["uid"], pod["status"]["podIP"], 8000)
    unload = Unload(
        JUDGE,
        "judge",
        "coder",
        ProbeIdle("judge", "llama-server", "/slots", (target,)),
        "it was idle a moment ago",
    )
    world.members.busy.add("judge")
    before = world.cluster.version

    assert not await sessions.act(SLOT, unload, lambda: None)

    assert world.replicas()["judge"] == 1
    assert world.writes(before) == []
    world.members.busy.clear()
    assert await sessions.act(SLOT, unload, lambda: None)
    assert world.replicas()["judge"] == 0
    assert world.record()["target"] == "coder"


async def test_given_the_lease_is_somebody_elses_then_nothing_is_written(
    world: OperatorWorld, sessions: SlotSessions
) -> None:
    stolen = {"spec": {"holderIdentity": "router-0", "renewTime": "2026-01-01T00:00:00.000001Z"}}
    world.cluster.edit(LEASES, NS, SLOT.lease, stolen)

    with pytest.raises(LeaseLost):
        await sessions.act(SLOT, Load(JUDGE, (CODER,), "cold"), lambda: None)

    assert world.replicas() == {"coder": 0, "judge": 0}
    assert not sessions.seen(SLOT).is_open
    assert holder(world.cluster) == "router-0"


async def test_given_an_answer_that_never_came_then_the_session_is_over_and_pauses(
    world: OperatorWorld, sessions: SlotSessions
) -> None:
    assert isinstance(sessions.port, MemPort)
    sessions.port.lose(applied=False, kind=DEPLOYMENTS, writes=True, times=20)

    with pytest.raises(errors.Unanswered):
        await sessions.act(SLOT, Load(JUDGE, (CODER,), "cold"), lambda: None)

    seen = sessions.seen(SLOT)
    assert not seen.is_open
    assert 0 < seen.pause_s <= PAUSE_S
    assert holder(world.cluster) == ""


async def test_given_it_is_left_then_the_lease_is_given_back(
    world: OperatorWorld, sessions: SlotSessions
) -> None:
    assert holder(world.cluster) == "operator-0"

    await sessions.leave(SLOT)
    await sessions.leave(SLOT)

    assert holder(world.cluster) == ""
