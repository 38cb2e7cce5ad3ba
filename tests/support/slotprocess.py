"""
A small process that moves a slot by the rules, for tests of the rules: no scheduler, no traffic.

It does what a router's driver does: gets the Lease, begins an epoch, takes everybody else down,
waits for the proof, brings its target up, probes it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

from memcluster import Killed, MemCluster, MemPort
from memcontrollers import World, deployment, is_ready, runs
from modelpool_kube.kinds import DEPLOYMENTS, LEASES, PODS, Json, annotation, uid
from modelpool_kube.lease import LeaseKeeper
from modelpool_kube.record import Phase, SlotId, SlotRecord
from modelpool_kube.slot import EpochBegun, SlotActuator
from modelpool_kube.slotrules import Gone, Member, Probe, Ready

SLOT = SlotId("lab", "modelpool-gpu0")
A, B, C = (Member(name, DEPLOYMENTS, "lab", name) for name in "abc")
MEMBERS = (A, B, C)


def pool(members: Sequence[Member] = MEMBERS, *, gpus: int = 4) -> World:
    """
    Return a world with a pool of Deployments at 0, on the clock of the running loop.

    There are accelerators for all: nothing but the rules keeps two members apart.
    """
    world = World(MemCluster(clock=asyncio.get_running_loop().time), gpus=gpus)
    for member in members:
        world.cluster.put(DEPLOYMENTS, "lab", deployment(member.target))
    world.cluster.put(LEASES, "lab", LEASES.body(SLOT.lease, "lab", spec={}))
    world.settle()
    return world


def residents(cluster: MemCluster) -> set[str]:
    """Return the members of which something runs or may start at any moment."""
    return {
        pod["metadata"]["labels"]["app"]
        for pod in cluster.all(PODS)
        if runs(pod) or pod["status"]["phase"] == "Pending"
    }


class Process:
    """One process behind one port."""

    def __init__(self, world: World, port: MemPort, *, seed: int = 0) -> None:
        self.world = world
        self.port = port
        rng = random.Random(f"{port.name}-{seed}")
        self.keeper = LeaseKeeper(port, SLOT, port.name, may_create=True, rng=rng)
        self.actuator = SlotActuator(port, self.keeper, rng=rng)

    async def until_held(self) -> None:
        """Wait for the Lease."""
        while not self.keeper.is_held:
            if self.port.dead:
                raise Killed(self.port.name)
            await asyncio.sleep(0.1)

    async def begin(self, owner: Member | None = None, target: Member | None = None) -> EpochBegun:
        """Begin an epoch."""

        def announce(record: SlotRecord) -> SlotRecord:
            return replace(
                record,
                owner=owner.name if owner else record.owner,
                target=target.name if target else None,
                phase=Phase.UNLOADING,
            )

        return await self.actuator.begin_epoch(MEMBERS, announce)

    async def swap_to(self, target: Member) -> Json:
        """Bring *target* up alone and return its Pod."""
        begun = await self.begin(target=target)
        for other in MEMBERS:
            if other != target:
                await self.actuator.scale(other, up=False, epoch=begun.epoch)
        for other in MEMBERS:
            if other != target:
                while not isinstance(await self.actuator.look_gone(other, epoch=begun.epoch), Gone):
                    await asyncio.sleep(0.2)
        loading = lambda record: replace(  # noqa: E731
            record or SlotRecord(), target=target.name, phase=Phase.LOADING
        )
        await self.keeper.write(loading)
        await self.actuator.scale(target, up=True, epoch=begun.epoch)
        probe: Probe | None = None
        while True:
            found = await self.actuator.look_ready(target, begun, probe)
            if isinstance(found, Ready):
                break
            probe = None
            if found.candidate is not None and is_ready(found.candidate):
                probe = Probe(uid(found.candidate), self.port.now())
            else:
                await asyncio.sleep(0.2)
        landed = lambda record: replace(  # noqa: E731
            record or SlotRecord(), owner=target.name, target=None, phase=Phase.RESIDENT
        )
        await self.keeper.write(landed)
        return found.pod


async def moving(world: World, rng: random.Random | None = None) -> None:
    """Let the world move until cancelled: steadily, or with every part lagging at random."""
    quiet_at, rounds = -1, 0
    while True:
        await asyncio.sleep(0.1)
        rounds += 1
        if rng is None:
            # Nothing new, nothing to do; now and then all the same, because a test may have let
            # go of something that is no object.
            if quiet_at != world.cluster.version or rounds % 20 == 0:
                quiet_at = -1 if world.step() else world.cluster.version
            continue
        for part in world.parts:
            if rng.random() < 0.3:
                part.look()
            elif rng.random() < 0.6:
                part.step(look=rng.random() < 0.6)


def marks(cluster: MemCluster) -> dict[str, str | None]:
    """Return the marks of all members."""
    return {
        obj["metadata"]["name"]: annotation(obj, "modelpool.dev/slot")
        for obj in cluster.all(DEPLOYMENTS)
    }
