"""Pools without a router: what the operator does at rest, and what it says."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from operatorworld import OperatorWorld

pytestmark = pytest.mark.looptime(idle_timeout=100_000)


@pytest.fixture
async def world() -> AsyncIterator[OperatorWorld]:
    """An empty world; its operators are ended afterwards."""
    found = OperatorWorld()
    yield found
    await found.close()
    assert not found.violations


async def test_given_a_cold_pool_with_a_default_then_it_is_warmed_once(
    world: OperatorWorld,
) -> None:
    world.member("coder")
    world.member("judge")
    world.pool("gpu0", "coder", "judge", default="judge")
    world.start()

    await world.run(until=lambda: world.status().get("residentMember") == "judge")

    assert world.replicas() == {"coder": 0, "judge": 1}
    await world.run(60)
    assert world.status()["phase"] == "Ready"
    assert world.says("SlotAllocated") == "True/Resident"
    assert world.says("MembersValid") == "True/AllResolved"
    assert world.says("SwapDeferred") == "False/NotDeferred"
    assert world.says("MetalSupported") == "True/KubernetesGPU"
    assert world.says("Ready") == "True/SlotServed"
    assert world.says("Stalled") == "False/NotStalled"
    assert world.record()["phase"] == "resident"
    members = {each["name"]: each for each in world.status()["members"]}
    assert members["coder"]["phase"] == "Stopped"
    assert members["judge"]["resident"] is True


async def test_given_a_pool_at_rest_then_ten_resyncs_write_nothing(world: OperatorWorld) -> None:
    world.member("coder")
    world.member("judge")
    world.pool("gpu0", "coder", "judge", default="judge")
    process = world.start()
    await world.run(300)
    before = world.cluster.version

    for _ in range(10):
        process.wake_all()
        await world.run(60)

    assert world.cluster.version == before
