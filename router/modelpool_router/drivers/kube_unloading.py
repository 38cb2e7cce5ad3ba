"""Down: scaled to 0 and proven gone; also what somebody else has brought up."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace

from modelpool_kube.errors import Forbidden, KubeError
from modelpool_kube.lease import LeaseLost
from modelpool_kube.record import Frozen, Phase, SlotRecord
from modelpool_kube.slot import Contended, Deposed, InFlight, MemberShared
from modelpool_kube.slotrules import Gone

from ..core.spec import MemberName
from .base import DriverUnavailable
from .kube_loading import Loading
from .kube_members import KubeMember
from .kube_record import emptied_record

_log = logging.getLogger(__name__)
_ANEW = ("NotFenced", "NotScaledDown", "WriteInFlight")
"""What only a write of ours in a new epoch mends."""
_OCCUPIED = (Phase.RESIDENT, Phase.DRAINING)


class Unloading(Loading):
    """Takes members down."""

    async def _take_down(self, member: MemberName) -> None:
        """Scale *member* to 0 and prove it gone. Call with its turn held."""
        life = self._lives.get(member)
        if self._is_retired:
            self._lives.pop(member, None)
            return
        self._refuse_aside()
        spec = (
            life.spec
            if life is not None
            else self._leaving.get(member) or self._members.get(member)
        )
        if spec is None:
            return
        purpose = object()
        is_asked = False

        def announce(record: SlotRecord) -> SlotRecord:
            if life is None and record.phase in _OCCUPIED and record.owner != member:
                return record  # a stray beside the resident: the slot goes on being its
            target = self._wanted_after(member)
            return replace(record, owner=str(member), target=target, phase=Phase.UNLOADING)

        def check() -> None:
            if not self._is_adopted:
                raise DriverUnavailable(self.standing.withheld or "the driver is closed")

        async def attempt() -> str | None:
            nonlocal is_asked
            if life is None and not is_asked:
                current = self._current()
                if current is not None:
                    # Nothing may be left of it; then there is nothing to write either.
                    found = await self._actuator.look_gone(spec.slot_member, epoch=current.epoch)
                    if isinstance(found, Gone):
                        return None
                if why := await self._in_use(spec):
                    raise DriverUnavailable(why)
            async with self._act:
                self._refuse_withheld()
                if self._has_vanished(spec):
                    is_gone = await self._is_nothing_of_ours(spec)
                    return None if is_gone else f"Pods of {member} are left"
                current = self._current()
                if is_asked and current is not None:
                    # To look, anybody's epoch will do. Two that began one after the other for each
                    # look would keep the controllers busy with marks, and neither would end.
                    found = await self._look_gone(spec, current)
                    if isinstance(found, Gone):
                        return None
                    if found.reason not in _ANEW:
                        return f"{member} is not gone: {found.detail}"
                begun = await self._epoch_for(purpose, announce)
                await self._scale(spec, begun, up=False)
                is_asked = True
                found = await self._look_gone(spec, begun)
            return None if isinstance(found, Gone) else f"{member} is not gone: {found.detail}"

        try:
            await self._repeat(attempt, check=check, limit_s=self._limits.gone_s)
        except Forbidden as error:
            raise DriverUnavailable(str(error)) from error
        if life is None or self._lives.get(member) is life:
            self._lives.pop(member, None)
        if is_asked and self._wanted_after(member) is None:
            await self._note(lambda record: emptied_record(record, member))
        await self._let_go(member)

    def _wanted_after(self, member: MemberName) -> str | None:
        """
        Return who is to come after *member*, as it looks now.

        It may be somebody else in the end; the record names it for who finds the swap half done.
        """
        seen = self._view()
        wanted = None if seen is None else seen.target
        return None if wanted is None or wanted == member else str(wanted)

    async def _let_go(self, member: MemberName) -> None:
        """Take our mark from a member that was removed, now that it is gone."""
        spec = self._leaving.get(member)
        begun = self._current()
        if spec is None or begun is None:
            return
        with suppress(KubeError, LeaseLost, Frozen, MemberShared, Deposed, InFlight, Contended):
            await self._actuator.unmark(spec.slot_member, begun.epoch)
            self._forget(member)

    def _forget(self, name: MemberName) -> None:
        if (spec := self._leaving.pop(name, None)) is not None:
            self._watch.leave(spec)

    def _dismiss(self) -> None:
        """Let go of members that were removed and are not up: nobody asks for their end."""
        if not self._is_adopted or not self._keeper.is_held or self._is_retired:
            return
        for name, spec in self._leaving.items():
            life = self._lives.get(name)
            is_up = life is not None and life.spec.slot_member == spec.slot_member
            if not is_up and name not in self._dismissing:
                self._dismissing.add(name)
                self._own(self._dismissed(name, spec), f"let go of {name}")

    async def _dismissed(self, name: MemberName, spec: KubeMember) -> None:
        async def attempt() -> str | None:
            async with self._act:
                if await self._is_nothing_of_ours(spec):
                    self._forget(name)
                    return None
                self._refuse_withheld()
                begun = self._current() or await self._epoch_for(spec, lambda record: record)
                found = await self._look_gone(spec, begun)
                if isinstance(found, Gone):
                    return None
                if found.reason == "NotScaledDown":
                    await self._stop_stray(spec, begun)
            return f"{name} is not gone: {found.detail}"

        def check() -> None:
            if not self._is_adopted or self._is_retired or self._leaving.get(name) is not spec:
                raise DriverUnavailable(f"{name} is nothing of ours to let go of")

        try:
            # Whatever is in the way now is looked at again in a moment.
            with suppress(DriverUnavailable, KubeError):
                await self._repeat(attempt, check=check, limit_s=self._limits.gone_s)
                await self._let_go(name)
        finally:
            self._dismissing.discard(name)
            self._wake()

    async def _is_nothing_of_ours(self, spec: KubeMember) -> bool:
        """Whether *spec* left nothing behind that we could end, or take a mark from."""
        record = self._keeper.record
        epoch = 0 if record is None else record.epoch
        found = await self._actuator.look_gone(spec.slot_member, epoch=epoch)
        if isinstance(found, Gone):
            return self._watch.has_seen(spec) and self._watch.object_of(spec) is None
        return found.reason in ("MemberMissing", "MemberShared")

    async def _unmark_all(self) -> None:
        async with self._act:
            begun = await self._epoch_for(self, lambda record: record)
            for member in self._all_members():
                await self._actuator.unmark(member.slot_member, begun.epoch)

    def _correct(self, member: KubeMember) -> None:
        if member.name not in self._correcting:
            self._correcting.add(member.name)
            self._own(self._corrected(member), f"correct {member.name}")

    async def _corrected(self, member: KubeMember) -> None:
        """Take down what somebody else has brought up, as soon as its engine is idle."""
        try:
            while self._is_adopted and not self._is_closed and not self._is_retired:
                async with self._turn(member.name):
                    life = self._lives.get(member.name)
                    if life is not None:
                        return  # it is wanted meanwhile
                    # Whether the pool is in order is known once all members were looked at.
                    self._judge_members()
                    if self._has_seen_members():
                        with suppress(DriverUnavailable):
                            await self._take_down(member.name)
                            _log.info("%s was scaled down again", member)
                            return
                await asyncio.sleep(self._limits.resync_s)
        finally:
            self._correcting.discard(member.name)
