"""May the slot be moved? The Lease, the members and other hands have a say."""

from __future__ import annotations

import asyncio
import logging

from modelpool_api.names import SLOT_ANNOTATION
from modelpool_kube.errors import KubeError
from modelpool_kube.kinds import annotation
from modelpool_kube.record import read_mark
from modelpool_kube.slotrules import unsafe

from .base import DriverUnavailable, SlotStanding
from .kube_book import NOT_ASKED, SlotBook
from .kube_members import KubeMember
from .kube_previous import Other, look_around, look_at
from .kube_record import was_asked

_log = logging.getLogger(__name__)


class Standing(SlotBook):
    """Knows whether the slot may be moved, and tells."""

    def _lease_changed(self) -> None:
        keeper = self._keeper
        if keeper.other is not None:
            self._previous = keeper.other
        if keeper.is_held and keeper.tenure != self._tenure:
            self._tenure = keeper.tenure
            self._begun = None
            self._held_since = self._loop.time()
            self._was_asked = was_asked(keeper.record)
            self._others = {} if self._previous is None else {self._previous: Other.ACTIVE}
            self._unseen_others = "" if self._was_asked else NOT_ASKED
            if self._others or not self._was_asked:
                self._own(self._until_others_are_out(keeper.tenure), "other routers")
        self._judge()
        self._wake()

    def _judge(self) -> None:
        """Say whether the slot may be moved, if that has changed."""
        found = self._judged()
        if found == self.standing:
            return
        before, self.standing = self.standing, found
        if found.aside and not before.aside:
            self._step_aside()
        if found.withheld:
            _log.warning("the slot of %s is withheld: %s", self.pool, found.withheld)
        else:
            _log.info("the slot of %s is ours to move", self.pool)
        self._on_standing(found)

    def _judged(self) -> SlotStanding:
        keeper = self._keeper
        if not keeper.is_held and keeper.other is not None:
            return SlotStanding(f"the slot is held by {keeper.other}", aside=True)
        if not keeper.is_held and keeper.trouble is None:
            return self.standing  # nobody has answered yet: requests may wait for that
        if not keeper.is_held:
            # Who stood aside goes on doing so: somebody else may have moved the slot since.
            why = f"the Lease {self._slot.lease} is not held: {keeper.trouble}"
            return SlotStanding(why, aside=self.standing.aside)
        if keeper.frozen:
            return SlotStanding(keeper.frozen)
        if self._invalid:
            return SlotStanding(self._invalid)
        contested = self._contested()
        if contested:
            return SlotStanding(f"ReplicasContested: {contested}")
        if not self._is_adopted and self._unseen_others == NOT_ASKED:
            return self.standing  # as above
        return SlotStanding(self._waits_for_others())

    def _waits_for_others(self) -> str:
        """Return why nothing may be moved because of other routers; empty when it may."""
        found = [life.spec for life in self._lives.values() if life.is_found]
        is_open = self._previous is not None or bool(found) or not self._is_adopted
        if not is_open:
            return ""  # what is up was brought up by us, and nobody else knows of it
        if self._unseen_others:
            return (
                f"the Lease {self._slot.lease} was made anew, so a router may have held the slot "
                f"before that still forwards requests, and none can be looked for: "
                f"{self._unseen_others}; this router has to be allowed to list the Pods of "
                f"{self._slot.namespace}"
            )
        for name, other in self._others.items():
            if other is Other.ACTIVE:
                held = "held" if name == self._previous else "may have held"
                return (
                    f"router {name} {held} the slot before and may still forward requests; nothing "
                    "is stopped until its Pod is gone or it answers that it stands by: delete the "
                    f"Pod, or say `modelpool forget {name}` if its machine is off"
                )
        for spec in found:
            if spec.profile.idle_path is None and self._others:
                name = min(self._others)
                return (
                    f"router {name} stands by and may still wait for answers of {spec.name}, which "
                    "has no idle probe; nothing is stopped until its Pod is gone: delete the Pod, "
                    f"or say `modelpool forget {name}` if its machine is off"
                )
        return ""

    def _used_by_others(self, member: KubeMember) -> str:
        """Return why another router may be using *member*, although its engine is idle."""
        if self._unseen_others:
            return "another router may still forward requests to it"
        for name, other in self._others.items():
            if other is Other.ACTIVE:
                return f"router {name} may still forward requests to it"
            if member.profile.idle_path is None:
                return f"router {name} may still wait for its answers, and it has no idle probe"
        return ""

    def _step_aside(self) -> None:
        self._is_adopted = False
        self._begun = None
        for life in self._lives.values():
            life.is_stopping = True
        self._lives.clear()

    def _refuse_aside(self) -> None:
        if not self._is_adopted:
            raise DriverUnavailable(self.standing.withheld or "the slot was not looked at yet")

    def _has_seen_members(self) -> bool:
        """Whether every member was looked for; of former ones our Role may not let us see all."""
        return all(map(self._watch.has_seen, self._members.values()))

    def _has_seen_scalers(self) -> bool:
        """Whether it is known who else scales the members: until then none is written."""
        return all(map(self._watch.has_seen_scalers, self._members.values()))

    def _judge_members(self) -> None:
        """Look for members that are missing or cannot be members, as the watches show them."""
        if not self._has_seen_members():
            return
        found: list[str] = []
        missing: list[str] = []
        for member in self._members.values():
            obj = self._watch.object_of(member)
            if obj is None:
                missing.append(str(member))
            elif (obj.get("spec") or {}).get("accelerator") == "metal":
                found.append(
                    f"MetalMembersUnsupported: {member} runs outside of Kubernetes; "
                    "take it out of the pool and name it in upstreams"
                )
            elif (why := unsafe(member.object_kind, obj)) is not None:
                found.append(f"UnsafeMember: {member}: {why}")
            elif (mark := read_mark(annotation(obj, SLOT_ANNOTATION))) is not None:
                if mark.slot != self._slot.id:
                    found.append(
                        f"MemberShared: {member} is a member of the slot {mark.slot.namespace}/"
                        f"{mark.slot.lease}; take it out of one of the two pools"
                    )
        if missing:
            text = f"MissingMembers: {', '.join(missing)}; create them, or take them out"
            found.insert(0, text)
        invalid = "; ".join(found)
        if invalid != self._invalid:
            self._invalid = invalid
            self._begun = None
        self._judge()

    async def _until_others_are_out(self, tenure: int) -> None:
        """Look at who may have held the slot before us until they all are out of the way."""
        if was_asked(self._keeper.record):
            # Who takes the slot from us, or we ourselves in another life, will not see in the Lease
            # who held it before us.
            await self._note(lambda record: record)
        while self._keeper.tenure == tenure:
            if self._keeper.is_held:
                await self._look_at_others()
                self._judge()
                self._wake()
            if not self._others and not self._unseen_others:
                return
            is_urgent = self._unseen_others or Other.ACTIVE in self._others.values()
            await asyncio.sleep(self._limits.look_s if is_urgent else self._limits.resync_s)

    async def _look_at_others(self) -> None:
        record = self._keeper.record
        forgotten = () if record is None else record.forgotten
        where, pool = self._slot.namespace, str(self.pool)
        found: dict[str, Other] = {}
        unseen = ""
        if not self._was_asked:
            try:
                found = await look_around(
                    self._port,
                    self._prober,
                    namespace=where,
                    me=self._slot.holder,
                    pool=pool,
                    forgotten=forgotten,
                )
            except KubeError as error:
                unseen = str(error)
        if self._previous is not None:
            found[self._previous] = await look_at(
                self._port,
                self._prober,
                namespace=where,
                holder=self._previous,
                pool=pool,
                forgotten=forgotten,
                held_s=self._loop.time() - self._held_since,
                grace_s=15.0,
            )
            if found[self._previous] is Other.GONE:
                self._previous = None
        has_blind = any(each.profile.idle_path is None for each in self._all_members())
        for name, other in list(found.items()):
            if other is Other.GONE or (other is Other.STANDBY and not has_blind):
                del found[name]
        self._others, self._unseen_others = found, unseen
        if not found:
            self._previous = None
            self._was_asked = self._was_asked or not unseen

    def _contested(self) -> str:
        now = self._loop.time()
        for member in self._members.values():
            if self._watch.has_seen_scalers(member):
                self._scalers[member.slot_member] = self._watch.autoscaler_of(member)
            scaler = self._scalers.get(member.slot_member)
            if scaler is not None:
                return (
                    f"HorizontalPodAutoscaler {scaler} scales {member}; delete it, "
                    "a pool moves its members itself"
                )
            changes = self._changes.get(member.name)
            if changes is not None and changes.are_a_contest(now):
                return (
                    f"somebody else keeps scaling {member}; find out who does "
                    "(kubectl get -o yaml --show-managed-fields) and stop it"
                )
        return ""

    def _refuse_withheld(self) -> None:
        """Write to no member of a pool that is not in order, or that others scale."""
        contested = self._contested()
        if self._invalid or contested:
            raise DriverUnavailable(self._invalid or f"ReplicasContested: {contested}")
