"""May the slot be moved? The Lease, the members and other hands have a say."""

from __future__ import annotations

import asyncio
import logging

from modelpool_api.names import SLOT_ANNOTATION
from modelpool_kube.kinds import annotation
from modelpool_kube.record import read_mark
from modelpool_kube.slotrules import unsafe

from .base import DriverUnavailable, SlotStanding
from .kube_book import SlotBook
from .kube_previous import is_out_of_the_way

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
            if self._previous is not None:
                self._own(self._until_previous_is_out(keeper.tenure), "previous holder")
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
        if self._previous is not None:
            return SlotStanding(
                f"router {self._previous} held the slot before and may still forward requests; "
                "nothing is stopped until its Pod is gone or it answers that it stands by, or "
                f"somebody says `modelpool forget {self._previous}`"
            )
        return SlotStanding()

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

    async def _until_previous_is_out(self, tenure: int) -> None:
        while self._previous is not None and self._keeper.tenure == tenure:
            record = self._keeper.record
            forgotten = record is not None and self._previous in record.forgotten
            if forgotten or await is_out_of_the_way(
                self._port,
                self._prober,
                namespace=self._slot.namespace,
                holder=self._previous,
                pool=str(self.pool),
                held_s=self._loop.time() - self._held_since,
                grace_s=15.0,
            ):
                self._previous = None
                self._judge()
                self._wake()
                return
            await asyncio.sleep(self._limits.look_s)

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
