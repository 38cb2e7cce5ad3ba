"""Epochs and scaling: attempts that are repeated from their first look until they succeed."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from modelpool_kube.backoff import Backoff
from modelpool_kube.errors import Forbidden, KubeError, NotFound
from modelpool_kube.kinds import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    PODS,
    REPLICASETS,
    Json,
    Kind,
    is_going,
    name_of,
    version_of,
)
from modelpool_kube.lease import LeaseLost
from modelpool_kube.port import Change
from modelpool_kube.record import Frozen, Phase, SlotRecord
from modelpool_kube.slot import (
    Contended,
    Deposed,
    EpochBegun,
    InFlight,
    MemberMissing,
    MemberShared,
)
from modelpool_kube.slotrules import ForeignChanges, Gone, NotYet, wants
from modelpool_kube.watch import Notice

from ..core.events import Idleness
from .base import DriverUnavailable
from .kube_members import KubeMember
from .kube_pods import address_of, has_run, pods_below, port_of
from .kube_standing import Standing

_log = logging.getLogger(__name__)


class Moving(Standing):
    """Moves members, under the Lease, in an epoch."""

    async def _repeat(
        self,
        attempt: Callable[[], Awaitable[str | None]],
        *,
        check: Callable[[], None],
        limit_s: float | None = None,
        patient: bool = False,
    ) -> None:
        """
        Repeat *attempt* until it returns None, through outages of any length.

        Args:
            attempt: Returns what it waits for, or None.
            check: Raises when there is no point in going on.
            limit_s: Longest wait for the same thing while the cluster answers.
            patient: Wait for people, too, and while somebody else holds the slot.

        Raises:
            DriverUnavailable: *limit_s* is over, or a person has to do something first.
            Forbidden: as the API server says.
        """
        pauses = Backoff(
            self._rng, first_s=self._limits.retry_first_s, most_s=self._limits.retry_most_s
        )
        since: float | None = None
        while True:
            check()
            pulse, pause_s = self._pulse, self._limits.resync_s
            try:
                if not self._keeper.is_held:
                    since = None
                elif not self._has_seen_scalers():
                    since, pause_s = None, self._limits.look_again_s
                else:
                    waits_for = await attempt()
                    if waits_for is None:
                        return
                    pauses.reset()
                    since = self._loop.time() if since is None else since
                    if limit_s is not None and self._loop.time() - since >= limit_s:
                        raise DriverUnavailable(waits_for)
                    pause_s = min(pause_s, limit_s or pause_s)
            except (LeaseLost, Deposed, InFlight, Contended) as error:
                # Somebody wrote in between, or what was sent may still land: a new epoch.
                _log.info("%s: %s; again", self.pool, error)
                self._begun, since = None, None
                pause_s = pauses.next()
            except Forbidden:
                raise
            except (MemberShared, MemberMissing, Frozen) as error:
                self._begun = None
                if not patient:
                    raise DriverUnavailable(str(error)) from error
                pause_s = pauses.next()
            except KubeError as error:
                self._begun, since = None, None
                pause_s = pauses.next(error.retry_after_s)
            if self.standing.aside and not patient:
                raise DriverUnavailable(self.standing.withheld)
            await self._rest(pulse, pause_s)

    def _current(self) -> EpochBegun | None:
        """Return the epoch in force; None when one has to be begun before anything."""
        record = self._keeper.record
        begun = self._begun
        if begun is None or not self._keeper.is_held or self._tenure != self._keeper.tenure:
            return None
        return begun if record is not None and record.epoch == begun.epoch else None

    async def _epoch_for(
        self, purpose: object, make: Callable[[SlotRecord], SlotRecord]
    ) -> EpochBegun:
        """Return the epoch that was begun for *purpose*; begin one if there is none."""
        current = self._current()
        if current is not None and self._begun_for is purpose:
            return current
        self._begun = None
        tenure = self._keeper.tenure
        members = [m.slot_member for m in self._all_members() if not self._has_vanished(m)]
        begun = await self._actuator.begin_epoch(members, lambda record: self._dated(record, make))
        if tenure != self._keeper.tenure:
            raise LeaseLost("the Lease was lost and got again while the epoch was begun")
        self._begun, self._begun_for = begun, purpose
        return begun

    def _has_vanished(self, member: KubeMember) -> bool:
        """Whether *member* was removed from the pool, and its object does not exist any more."""
        was_removed = member not in self._members.values()
        return was_removed and self._watch.has_seen(member) and not self._watch.object_of(member)

    async def _scale(self, member: KubeMember, begun: EpochBegun, *, up: bool) -> None:
        self._refuse_withheld()
        self._scaling.add(member.name)
        try:
            stored = await self._actuator.scale(member.slot_member, up=up, epoch=begun.epoch)
            self._own_versions.append((member.name, version_of(stored)))
        finally:
            self._scaling.discard(member.name)
            put_off, self._put_off = self._put_off, []
            for kind, notice in put_off:
                self._loop.call_soon(self._notice_scaling, kind, notice)

    async def _look_gone(self, member: KubeMember, begun: EpochBegun) -> Gone | NotYet:
        found = await self._actuator.look_gone(member.slot_member, epoch=begun.epoch)
        if isinstance(found, NotYet) and found.reason == "NotFenced":
            self._begun = None
        return found

    async def _stop_stray(self, member: KubeMember, begun: EpochBegun) -> None:
        """Scale a member down that nobody of us brought up, if nobody can be using it."""
        why = await self._in_use(member)
        if why:
            raise DriverUnavailable(f"{member.name} is not gone: {why}")
        await self._scale(member, begun, up=False)

    async def _in_use(self, member: KubeMember) -> str:
        """Return why *member*, which we brought not up, may not be stopped; empty when it may."""
        record = self._keeper.record
        if record is not None and record.phase is Phase.LOADING and record.target == member.name:
            return ""  # its load was announced and not its landing: nobody ever sent it anything
        for pod in await self._pods_now(member):
            if is_going(pod) or not has_run(pod):
                continue
            port = member.port or port_of(pod)
            if port is None:
                return f"it was scaled up by somebody else, and no port of {name_of(pod)} is known"
            verdict = await self._idleness(member, address_of(pod), port)
            if await self._prober.refuses(address_of(pod), port):
                continue
            if verdict is Idleness.IDLE:
                if why := self._used_by_others(member):
                    return why
                continue
            return f"it was scaled up by somebody else, and its engine is {verdict.value}"
        return ""

    async def _pods_now(self, member: KubeMember) -> list[Json]:
        """Return the Pods of *member*, most-recent: the watch may be behind."""
        is_service = member.object_kind == INFERENCE_SERVICES
        kind = DEPLOYMENTS if is_service else member.object_kind
        try:
            owner = await self._port.get(kind, member.namespace, member.target)
        except NotFound:
            return []
        replica_sets: tuple[Json, ...] = ()
        if kind == DEPLOYMENTS:
            replica_sets = (await self._port.list(REPLICASETS, member.namespace)).items
        pods = (await self._port.list(PODS, member.namespace)).items
        return pods_below(kind, owner, replica_sets, pods)

    def _notice_scaling(self, kind: Kind, notice: Notice) -> None:
        """
        Put replicas right that others changed, when nobody uses them; count changes.

        A member that comes into view with replicas was added so, or made anew: no contest.
        """
        if notice.change is Change.DELETED:
            return
        for member in self._members.values():
            obj = notice.object
            if member.object_kind != kind or member.target != obj["metadata"]["name"]:
                continue
            name = member.name
            asked = wants(kind, obj)
            if asked == (0 if notice.before is None else wants(kind, notice.before)):
                continue
            if name in self._scaling:
                self._put_off.append((kind, notice))
                continue
            if (name, version_of(obj)) in self._own_versions or not self._is_adopted:
                continue
            life = self._lives.get(name)
            if notice.before is None and life is not None:
                continue
            expected = life is not None and life.is_scaled and not life.is_stopping
            if asked == int(expected) or not self._keeper.is_held:
                continue
            if notice.before is None:
                _log.warning("%s came into view asking for %s replicas", member, asked)
            else:
                _log.warning("somebody else has scaled %s to %s", member, asked)
                changes = self._changes.get(name, ForeignChanges())
                self._changes[name] = changes.another(self._loop.time())
            self._judge()
            if asked:
                self._correct(member)

    def _correct(self, member: KubeMember) -> None:
        """Take down what somebody else has brought up, as soon as its engine is idle."""
        raise NotImplementedError
