"""
Moving the slot: epochs, the fence, scaling, and the looks that prove what happened.

Every write is conditional on the version that was read just before, and carries the epoch. Whoever
was deposed therefore fails: its versions are old as soon as the next holder has marked every
member, which is the first thing a next holder does.

A write that is not answered is still in flight: it may land as long as the object has the version
it was conditional on. `SlotActuator` remembers those, and neither calls a member gone nor takes a
state for settled while one may land; a new epoch, whose mark changes the version, ends that.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from modelpool_api.names import SLOT_ANNOTATION

from .errors import Conflict, NotFound, Unanswered
from .kinds import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    PODS,
    REPLICASETS,
    WORKLOADS,
    Json,
    annotation,
    version_of,
)
from .lease import LeaseKeeper
from .port import ClusterPort
from .record import SlotId, SlotMark, SlotRecord, next_epoch, read_mark
from .slotrules import (
    Facts,
    Gone,
    Look,
    Member,
    NeedLook,
    NotReady,
    NotYet,
    Probe,
    Ready,
    Remembered,
    Standing,
    mark_patch,
    moved_on,
    prove_gone,
    ready_evidence,
    remember,
    scale_patch,
    standing,
    unmark_patch,
    wants,
)

ATTEMPTS = 8
"""Reads and conditional writes in a row until somebody else is faster too often."""
PAUSE_S = (0.02, 0.1)
"""Between two of them."""


class SlotError(Exception):
    """The slot cannot be moved as asked; the cluster is as it was, or safe."""


class MemberMissing(SlotError):
    """The object of a member does not exist."""


class MemberShared(SlotError):
    """A member carries the mark of another slot; nothing was written to it."""


class Deposed(SlotError):
    """A member carries a larger epoch: somebody decided after us. Begin a new epoch, or stop."""


class InFlight(SlotError):
    """An earlier write to the member may still land. Begin a new epoch."""


class Contended(SlotError):
    """Somebody else changes the member all the time."""


@dataclass(frozen=True, slots=True)
class EpochBegun:
    """An epoch whose mark is on every member, acknowledged."""

    epoch: int
    fenced_at: float
    """Monotonic seconds: probes begun later are evidence."""


class SlotActuator:
    """Moves one slot while its Lease is held. Decisions are the caller's."""

    def __init__(
        self, port: ClusterPort, keeper: LeaseKeeper, *, rng: random.Random | None = None
    ) -> None:
        self.slot: SlotId = keeper.slot
        self._port = port
        self._keeper = keeper
        self._rng = rng or random.Random()
        self._in_flight: dict[Member, str] = {}
        self._remembered: dict[Member, Remembered] = {}

    async def begin_epoch(
        self,
        members: Sequence[Member],
        make: Callable[[SlotRecord], SlotRecord] = lambda record: record,
    ) -> EpochBegun:
        """
        Begin a new epoch: write it into the record, then mark every member with it.

        Args:
            members: Every member of the pool, those at 0 and the resident included.
            make: What else the record is to say; gets it with the new epoch.

        Raises:
            LeaseLost, Frozen: see `LeaseKeeper.write`.
            MemberShared, MemberMissing: nothing was written to any member.
            Deposed: somebody began a larger epoch meanwhile.
            KubeError: not every mark was acknowledged; the epoch is not begun.
        """
        marks = [self._mark_of(member, await self._get(member)) for member in members]

        def with_epoch(before: SlotRecord | None) -> SlotRecord:
            epoch = next_epoch(before, marks, self.slot)
            return make(replace(before or SlotRecord(), epoch=epoch))

        record = await self._keeper.write(with_epoch)
        for member in members:
            await self._mark(member, record.epoch)
        fenced_at = self._port.now()
        # A mark that was there already may be another holder's: after the Lease was deleted he
        # counts from the same number, unless he has read our marks.
        await self._keeper.confirm(record.epoch)
        return EpochBegun(record.epoch, fenced_at)

    async def scale(self, member: Member, *, up: bool, epoch: int) -> Json:
        """
        Scale *member* to 1 or 0 in *epoch* and return its object, acknowledged.

        Raises:
            LeaseLost, Frozen: we may not.
            MemberShared, MemberMissing, Deposed, InFlight, Contended: see there.
            Unanswered: it may happen yet; begin a new epoch before anything else.
        """

        def decide(obj: Json) -> Json | None:
            self._check_standing(member, obj, epoch)
            is_marked = standing(obj, self.slot, epoch) is Standing.OURS
            if is_marked and wants(member.kind, obj) == int(up):
                return None
            return scale_patch(member.kind, self.slot, epoch, up=up)

        return await self._settle(member, decide, epoch)

    async def unmark(self, member: Member, epoch: int) -> None:
        """Remove the mark, when a pool ends; moves no replica."""

        def decide(obj: Json) -> Json | None:
            self._check_standing(member, obj, epoch)
            return None if annotation(obj, SLOT_ANNOTATION) is None else unmark_patch()

        try:
            await self._settle(member, decide, epoch)
        except MemberMissing:
            return

    def knows(self, member: Member) -> bool:
        """Whether the object of *member* was ever there, as far as this actuator has looked."""
        return member in self._remembered

    async def look_gone(self, member: Member, *, epoch: int) -> Gone | NotYet:
        """Look whether *member* is proven gone in *epoch*."""
        record = self._keeper.record
        facts = Facts(forgotten=frozenset(record.forgotten if record else ()))
        remembered = self._remembered.get(member)
        while True:
            found = prove_gone(member, facts, slot=self.slot, epoch=epoch, remembered=remembered)
            if not isinstance(found, NeedLook):
                break
            facts = await self._look(member, facts, found.look)
        seen = facts.member
        version = self._in_flight.get(member)
        if isinstance(found, Gone) and version is not None:
            if seen is not None and not moved_on(seen, version):
                return NotYet("WriteInFlight", f"an earlier write to {member} may still land")
            del self._in_flight[member]
        return found

    async def look_ready(
        self, member: Member, begun: EpochBegun, probe: Probe | None
    ) -> Ready | NotReady:
        """Look whether there is evidence that *member* is ready in the epoch *begun*."""
        facts = Facts()
        while True:
            found = ready_evidence(
                member,
                facts,
                slot=self.slot,
                epoch=begun.epoch,
                fenced_at=begun.fenced_at,
                probe=probe,
            )
            if not isinstance(found, NeedLook):
                return found
            facts = await self._look(member, facts, found.look)

    # Looking

    async def _look(self, member: Member, facts: Facts, look: Look) -> Facts:
        where = member.namespace
        match look:
            case Look.MEMBER:
                facts = facts.seen(look, await self._get_or_none(member))
            case Look.OWNER:
                try:
                    owner = await self._port.get(DEPLOYMENTS, where, member.target)
                except NotFound:
                    facts = facts.seen(look, None)
                else:
                    facts = facts.seen(look, owner)
            case Look.REPLICA_SETS:
                facts = facts.seen(look, (await self._port.list(REPLICASETS, where)).items)
            case Look.PODS:
                facts = facts.seen(look, (await self._port.list(PODS, where)).items)
            case Look.WORKLOADS:
                facts = facts.seen(look, (await self._port.list(WORKLOADS, where)).items)
        known = remember(member, facts)
        if known is not None:
            self._remembered[member] = known
        return facts

    async def _get(self, member: Member) -> Json:
        found = await self._get_or_none(member)
        if found is None:
            raise MemberMissing(f"{member} does not exist")
        return found

    async def _get_or_none(self, member: Member) -> Json | None:
        try:
            found = await self._port.get(member.kind, member.namespace, member.target)
        except NotFound:
            return None
        known = None
        if member.kind != INFERENCE_SERVICES:
            known = remember(member, Facts(member=found))
        if known is not None:
            self._remembered[member] = known
        return found

    # Writing

    async def _mark(self, member: Member, epoch: int) -> None:
        def decide(obj: Json) -> Json | None:
            self._check_standing(member, obj, epoch)
            if standing(obj, self.slot, epoch) is Standing.OURS:
                return None
            return mark_patch(self.slot, epoch)

        await self._settle(member, decide, epoch)

    async def _settle(
        self, member: Member, decide: Callable[[Json], Json | None], epoch: int
    ) -> Json:
        """
        Read, decide, ask the Lease, write what was decided; again until it is settled.

        A conflict or a missing answer starts again at the read: what stands there then says what
        became of the write.
        """
        unanswered: Unanswered | None = None
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(self._rng.uniform(*PAUSE_S))
            obj = await self._get(member)
            version = version_of(obj)
            patch = decide(obj)
            if patch is None:
                if self._in_flight.get(member) == version:
                    raise InFlight(f"an earlier write to {member} may still land")
                self._in_flight.pop(member, None)
                return obj
            await self._keeper.confirm(epoch)
            try:
                stored = await self._port.patch_merge(
                    member.kind, member.namespace, member.target, patch, version=version
                )
            except Conflict:
                unanswered = None
            except Unanswered as error:
                self._in_flight[member] = version
                unanswered = error
            except asyncio.CancelledError:
                self._in_flight[member] = version
                raise
            else:
                # Whatever was in flight was conditional on an older version.
                self._in_flight.pop(member, None)
                return stored
        if unanswered is not None:
            raise unanswered
        raise Contended(f"{member} changed {ATTEMPTS} times while it was to be written")

    def _check_standing(self, member: Member, obj: Json, epoch: int) -> None:
        mark = read_mark(annotation(obj, SLOT_ANNOTATION))
        match standing(obj, self.slot, epoch):
            case Standing.FOREIGN:
                assert mark is not None
                raise MemberShared(
                    f"{member} is a member of the slot {mark.slot.namespace}/{mark.slot.lease}; "
                    "take it out of one of the two pools"
                )
            case Standing.AHEAD:
                assert mark is not None
                raise Deposed(f"{member} carries epoch {mark.epoch}, and ours is {epoch}")
            case Standing.OURS | Standing.BEHIND:
                return

    def _mark_of(self, member: Member, obj: Json) -> SlotMark | None:
        mark = read_mark(annotation(obj, SLOT_ANNOTATION))
        if mark is not None and mark.slot != self.slot:
            self._check_standing(member, obj, 0)
        return mark
