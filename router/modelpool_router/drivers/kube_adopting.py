"""The first look, and the first after another router held the slot: what is up is adopted."""

from __future__ import annotations

from modelpool_kube.errors import Forbidden
from modelpool_kube.kinds import Json, uid
from modelpool_kube.record import Phase, SlotRecord
from modelpool_kube.slot import EpochBegun
from modelpool_kube.slotrules import NotYet, Probe, Ready

from ..core.spec import MemberName
from .base import DriverUnavailable, SlotMemory
from .kube_book import NOT_ASKED
from .kube_life import Life
from .kube_members import KubeMember
from .kube_pods import address_of, life_of, load_trouble, loss_of, port_of
from .kube_record import emptied_record, landed_record
from .kube_unloading import Unloading
from .profiles import Readiness

_LOST = "the Lease was lost while we looked"


class Adopting(Unloading):
    """Finds out what is up."""

    async def _adopt(self) -> None:
        """Find out what is up, once the Lease is ours; take down what cannot be adopted."""
        self._begun = None
        self._lives.clear()
        found: dict[MemberName, tuple[Json, int]] = {}
        parallels: dict[MemberName, int | None] = {}
        halves: list[KubeMember] = []
        record: SlotRecord | None = None
        purpose = object()
        deadline: float | None = None
        keep: KubeMember | None = None
        taking_down = False
        untouched = False

        def check() -> None:
            if self._is_closed:
                raise DriverUnavailable("the driver is closed")

        async def ask_parallels() -> None:
            parallels.clear()
            for name, (pod, port) in found.items():
                member = self._members[name]
                parallels[name] = await self._reported_parallel(member, address_of(pod), port)

        async def attempt() -> str | None:
            nonlocal record, deadline, keep, taking_down, untouched
            if self._keeper.frozen:
                return self._keeper.frozen
            if not self._has_seen_members():
                return "the members were not seen yet"
            self._judge_members()
            if self._unseen_others == NOT_ASKED:
                return "other routers were not looked for yet"
            async with self._act:
                untouched = bool(self._invalid or self._contested())
                if not untouched and record is None:
                    record = self._keeper.record or SlotRecord()
                if untouched:
                    await self._adopt_untouched(found)
                    await ask_parallels()
                    return None if self._keeper.is_held else _LOST
                begun = await self._epoch_for(purpose, lambda before: before)
                found.clear()
                halves.clear()
                for member in self._members.values():
                    state = await self._state_of(member, begun)
                    if isinstance(state, str):
                        return state
                    if isinstance(state, tuple):
                        found[member.name] = state
                    elif state:
                        halves.append(member)
                if found:
                    await ask_parallels()
                    # From here to the end nothing is awaited: whoever is told to step aside while
                    # we look must not come back with what he saw before.
                    return None if self._current() is begun else _LOST
                assert record is not None
                if halves and not taking_down:
                    keep = keep if keep in halves else self._to_keep(halves, record)
                    now = self._loop.time()
                    if deadline is None:
                        was_up = record.phase is not Phase.LOADING
                        deadline = now + (self._limits.hung_s if was_up else self._limits.adopt_s)
                    trouble = load_trouble(self._watch.pods_of(keep))
                    if now < deadline and trouble is None:
                        for other in halves:
                            if other is not keep and not await self._in_use(other):
                                await self._scale(other, begun, up=False)
                        return f"{keep.name} is loading since before this router"
                    was_announced = record.phase is Phase.LOADING and record.target == keep.name
                    if not was_announced and (why := self._used_by_others(keep)):
                        return f"{keep.name} does not answer, and {why}"
                    taking_down = True
                for member in halves:
                    await self._scale(member, begun, up=False)
                for member in self._all_members():
                    gone = await self._look_gone(member, begun)
                    if isinstance(gone, NotYet):
                        return f"{member.name} is not gone: {gone.detail}"
            return None

        async def attempt_often() -> str | None:
            waits_for = await attempt()
            if waits_for is not None and keep is not None and not taking_down:
                self._loop.call_later(self._limits.most_poll_s * 5, self._wake)
            return waits_for

        try:
            await self._repeat(attempt_often, check=check, patient=True)
        except Forbidden as error:
            raise DriverUnavailable(str(error)) from error
        record = record or self._keeper.record or SlotRecord()
        prefer = record.owner
        if record.phase is Phase.LOADING and record.target in found:
            prefer = record.target
        self._memory = SlotMemory(
            released=record.released,
            prefer=MemberName(prefer) if prefer is not None else None,
        )
        for name, (pod, port) in found.items():
            life = self._lives[name] = Life(self._members[name], is_found=True)
            self._begin_life(life, pod, port, parallels[name])
        self._is_adopted = True
        if not untouched:
            names = list(found)
            kept = prefer if prefer in names else (str(names[0]) if names else None)
            if kept is not None:
                await self._note(landed_record(MemberName(kept)))
            else:
                await self._note(lambda before: emptied_record(before, None))
        self._judge()
        for member in halves:
            if found and member.name not in found:
                self._correct(member)

    async def _adopt_untouched(self, found: dict[MemberName, tuple[Json, int]]) -> None:
        """Find the resident of a pool that is not in order, or contested: nothing is written."""
        found.clear()
        owner = self._keeper.record.owner if self._keeper.record else None
        for member in self._members.values():
            for pod in await self._pods_now(member):
                port = member.port or port_of(pod)
                if port is None or not address_of(pod) or loss_of(pod, life_of(pod)) is not None:
                    continue
                if await self._readiness(member, address_of(pod), port) is Readiness.READY:
                    found[member.name] = (pod, port)
        if len(found) > 1:
            keep = owner if owner in found else min(found)
            for name in [name for name in found if name != keep]:
                del found[name]

    async def _state_of(
        self, member: KubeMember, begun: EpochBegun
    ) -> tuple[Json, int] | bool | str:
        """
        Return Pod and port of a member that is ready, else whether it is meant to be up.

        A text says what has to happen first for anybody to know.
        """
        seen = await self._actuator.look_ready(member.slot_member, begun, None)
        if isinstance(seen, Ready):
            return False  # cannot be without a probe
        if seen.reason in ("NotScaledUp", "MemberMissing", "MemberGoing"):
            return False
        if seen.reason in ("NotObserved", "EpochNotDown", "OwnerMissing"):
            return seen.detail
        pod = seen.candidate
        port = None if pod is None else member.port or port_of(pod)
        if pod is None or port is None:
            return True
        probed_at = self._port.now()
        if await self._readiness(member, address_of(pod), port) is not Readiness.READY:
            return True
        probe = Probe(uid(pod), probed_at)
        proven = await self._actuator.look_ready(member.slot_member, begun, probe)
        return (proven.pod, port) if isinstance(proven, Ready) else True

    def _to_keep(self, halves: list[KubeMember], record: SlotRecord) -> KubeMember:
        wanted = [record.target if record.phase is Phase.LOADING else None, record.owner]
        for name in [*wanted, self._default]:
            for member in halves:
                if member.name == name:
                    return member
        return halves[0]
