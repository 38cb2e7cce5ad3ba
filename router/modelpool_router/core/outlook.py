"""
What is likely to happen to a slot, and how it looks from outside: estimates, sentences, the view.

Everything here reads the books and changes nothing.
"""

from __future__ import annotations

from . import retry_after
from .slot import SlotBook
from .spec import MemberName
from .view import MemberStatus, MemberView, Obstacle, PoolView, SlotState


class Outlook(SlotBook):
    """The books of one pool, with what can be foreseen of it."""

    def wait_s(self, member: MemberName, now: float) -> float:
        """Estimate the time until a request for *member* that comes now would be granted."""
        if self._is_open_for(member) and member not in self._queues:
            return 0.0
        failure = self._failures.get(member)
        if failure is not None and now < failure.until:
            return failure.until - now
        elapsed = now - self._since
        wait, source = 0.0, self._up
        match self._state:
            case SlotState.RESIDENT:
                if self._up == member:
                    return self.estimates.drain(member)
                if self._closing is None:
                    wait += self._turn_left(now)
                wait += self.estimates.drain(source) if self._lent else 0.0
            case SlotState.LOADING:
                assert self._up is not None
                wait += retry_after.remaining_s(self._load_estimate(self._up), elapsed)
                if self._up == member:
                    return wait
                wait += self.estimates.drain(source)
            case SlotState.UNLOADING:
                wait += retry_after.remaining_s(self.estimates.unload(self._up), elapsed)
                source = None
            case SlotState.STARTING | SlotState.COLD:
                source = None
        for demand in self._waiting(now, but=source):
            if demand.member == member:
                break
            wait += self._swap_estimate(source, demand.member)
            wait += self.estimates.drain(demand.member)
            source = demand.member
        return wait + self._swap_estimate(source, member)

    def _turn_left(self, now: float) -> float:
        if self._lent == 0 or self._turn_ends_at is None or self._turn_over:
            return max(0.0, self._deferred_until - now) if self._deferred_reason else 0.0
        return max(0.0, self._turn_ends_at - now)

    def _waits_for(self, member: MemberName) -> str:
        """One clause for people: what a hold of *member* is waiting for."""
        if self._paused:
            return "the pool is paused"
        if self._trouble is not None and self._state is not SlotState.RESIDENT:
            return f"the slot waits for {self._trouble.waits_for}"
        match self._state:
            case SlotState.STARTING:
                return "the pool is starting"
            case SlotState.COLD:
                return "the slot is empty"
            case SlotState.LOADING if self._up == member:
                return f"{member} is loading"
            case SlotState.LOADING:
                return f"{self._up} is loading"
            case SlotState.UNLOADING:
                return f"{self._up} is unloading"
            case SlotState.RESIDENT if self._up == member:
                return f"{member} is busy with {self._lent} requests"
            case SlotState.RESIDENT:
                deferred = f" ({self._deferred_reason})" if self._deferred_reason else ""
                return f"{self._up} holds the slot with {self._lent} requests{deferred}"

    def view(self, now: float) -> PoolView:
        """Describe the pool at this moment; changes nothing."""
        resident = self._up if self._state is SlotState.RESIDENT else None
        loading = self._up if self._state is SlotState.LOADING else None
        waiting = self._waiting(now, but=self._up)
        target = loading
        if target is None and waiting and (self._closing or self._state is SlotState.UNLOADING):
            target = waiting[0].member
        elif target is None and self._owed is not None:
            target = self._owed[0]
        leaving = self._closing is not None or self._state is SlotState.UNLOADING
        lease_since = min((lease.since for lease in self._leases.values()), default=None)
        return PoolView(
            name=self.spec.name,
            state=self._state,
            epoch=self._epoch,
            since_s=now - self._since,
            resident=resident,
            incumbent=self._up if leaving else None,
            target=target,
            cause=self._cause,
            admission="open" if resident is not None and self._closing is None else "closed",
            closing_reason=self._closing.reason if self._closing is not None else "",
            turn_left_s=(
                max(0.0, self._turn_ends_at - now)
                if resident is not None and self._turn_ends_at is not None
                else None
            ),
            deferred_reason=self._deferred_reason,
            deferred_retry_s=(
                max(0.0, self._deferred_until - now) if self._deferred_reason else None
            ),
            load_elapsed_s=now - self._since if loading is not None else None,
            load_expected_s=self._load_estimate(loading) if loading is not None else None,
            held=len(self._holds),
            in_flight=len(self._leases),
            oldest_lease_s=None if lease_since is None else now - lease_since,
            released=self._released,
            paused=self._paused,
            withheld=self._withheld,
            stopping=self._stopping,
            default=self.spec.default,
            swap_budget_s=self.spec.swap_budget_s,
            loads_total=self._loads,
            swaps_total=self._swaps,
            obstacle=self._obstacle(now),
            members=tuple(self._member_view(name, now) for name in self.spec.members),
        )

    def _obstacle(self, now: float) -> Obstacle | None:
        trouble = self._trouble
        if trouble is None:
            return None
        return Obstacle(
            waits_for=trouble.waits_for,
            since_s=now - trouble.since,
            tries=trouble.tries,
            error=trouble.error,
            way_out=trouble.way_out or "it is tried again by itself",
        )

    def _member_view(self, name: MemberName, now: float) -> MemberView:
        queue = self._queues.get(name)
        failure = self._failures.get(name)
        status = MemberStatus.UNLOADED
        if self._up == name:
            status = {
                SlotState.LOADING: MemberStatus.LOADING,
                SlotState.RESIDENT: MemberStatus.LOADED,
                SlotState.UNLOADING: MemberStatus.UNLOADING,
            }.get(self._state, MemberStatus.UNLOADED)
        elif failure is not None and now < failure.until:
            status = MemberStatus.FAILED
        return MemberView(
            name=name,
            status=status,
            held=len(queue.fifo) if queue is not None else 0,
            in_flight=sum(1 for lease in self._leases.values() if lease.hold.member == name),
            parallel=self._parallel_of(name),
            oldest_hold_s=now - queue.first().since if queue is not None else None,
            wanted=queue is not None or name in self._ghosts,
            wait_s=self.wait_s(name, now),
            load_estimate_s=self._load_estimate(name),
            load_measured=name in self.estimates.load_s,
            unload_estimate_s=self.estimates.unload(name),
            backoff_s=(
                failure.until - now if failure is not None and now < failure.until else None
            ),
            failures=failure.count if failure is not None else 0,
            last_error=failure.reason if failure is not None else "",
        )
