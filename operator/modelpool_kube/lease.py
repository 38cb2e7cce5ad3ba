"""
The Lease of a pool: who may move its slot, and the record of what is being done.

One task renews and writes the record, so there is one resourceVersion and no race with oneself; a
record write is a renewal. All deadlines are monotonic and count from *before* the request was
sent: whoever reads our renewal later than that waits at least as long as we believe.

Held means: renewed in time, same UID, our name in it. A Lease that vanished, was made anew or
names somebody else is lost at once. Losing it stops actuation only; what is done about requests
is for others to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from modelpool_api.names import RECORD_ANNOTATION

from .errors import (
    AlreadyExists,
    Conflict,
    KubeError,
    NotFound,
    Unanswered,
)
from .kinds import LEASES, Json, annotation, uid, version_of
from .port import ClusterPort
from .record import Frozen, SlotId, SlotRecord, decode, encode, follow

log = logging.getLogger(__name__)

DURATION_S = 15.0
RENEW_AT = (0.27, 0.33)
"""Part of the duration after which it is renewed, at random: three tries fit in."""
CALL_PART = 0.2
"""Longest wait for one answer, as a part of the duration."""
RETRY_S = (1.0, 2.0)
"""Pause between attempts to get or to keep it."""
RELEASE_TIMEOUT_S = 3.0


class LeaseLost(Exception):
    """We may not move the slot: the Lease is not ours, or nobody knows."""


@dataclass(frozen=True, slots=True)
class LeaseView:
    """What a Lease says."""

    uid: str
    version: str
    holder: str
    duration_s: float
    transitions: int
    text: str | None
    """The record as it is written."""


def view(obj: Json) -> LeaseView:
    """Return what the Lease *obj* says; what is odd counts as absent."""
    spec = obj.get("spec") or {}
    duration = spec.get("leaseDurationSeconds")
    transitions = spec.get("leaseTransitions")
    return LeaseView(
        uid=uid(obj),
        version=version_of(obj),
        holder=str(spec.get("holderIdentity") or ""),
        duration_s=float(duration) if isinstance(duration, int) and duration > 0 else DURATION_S,
        transitions=transitions if isinstance(transitions, int) else 0,
        text=annotation(obj, RECORD_ANNOTATION),
    )


def micro_time(at: datetime) -> str:
    """Return *at* as Kubernetes' MicroTime: UTC, always six digits."""
    if at.tzinfo is None:
        raise ValueError("a time without a zone cannot be written for others")
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass(slots=True, eq=False)
class _Order:
    """A record to be written by the task."""

    make: Callable[[SlotRecord | None], SlotRecord]
    sent: tuple[str, SlotRecord] | None = None
    """What was sent last, as text and as record."""
    result: asyncio.Future[SlotRecord] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class LeaseKeeper:
    """
    Gets and keeps one Lease while `run` runs.

    Args of the constructor:
        port: The cluster.
        slot: Which Lease.
        holder: Our name, the Pod's: a restarted container takes its Lease back at once.
        may_create: Whether to make the Lease when there is none.
        on_change: Called when `is_held` or `other` may have changed.
    """

    def __init__(
        self,
        port: ClusterPort,
        slot: SlotId,
        holder: str,
        *,
        may_create: bool,
        on_change: Callable[[], None] = lambda: None,
        duration_s: float = DURATION_S,
        rng: random.Random | None = None,
    ) -> None:
        self.slot = slot
        self.holder = holder
        self.other: str | None = None
        """Who was seen to hold it, when it is not us; None when nobody, or nobody knows."""
        self.trouble: str | None = None
        """Why it is not held, or cannot be renewed; for people."""
        self.frozen: str | None = None
        """Why the record may not be touched; for people."""
        self.tenure = 0
        """Grows every time the Lease is got."""
        self.record: SlotRecord | None = None
        """The record as last read or written; only current while the Lease is held."""
        self._port = port
        self._may_create = may_create
        self._on_change = on_change
        self._duration_s = duration_s
        self._rng = rng or random.Random()
        self._held: LeaseView | None = None
        self._deadline = 0.0
        self._unsure = False
        """Whether the last write was not answered, so that the version may be another."""
        self._highest_epoch = 0
        self._watched: tuple[str, str, float] | None = None
        """UID and version of somebody else's Lease, and since when it is unchanged."""
        self._orders: list[_Order] = []
        self._wake = asyncio.Event()
        self._is_running = False

    # For others

    @property
    def is_held(self) -> bool:
        """Whether we may move the slot now. Never true past the deadline, whatever hangs."""
        return self._held is not None and self._port.now() < self._deadline

    @property
    def is_gone(self) -> bool:
        """Whether nobody runs this keeper any more."""
        return not self._is_running

    async def write(self, make: Callable[[SlotRecord | None], SlotRecord]) -> SlotRecord:
        """
        Write a record and return it once it is acknowledged.

        Args:
            make: Returns the record to write from the one that stands now (None: there is none).
                Called again when somebody else wrote in between; must not lower the epoch.

        Raises:
            LeaseLost: we do not hold the Lease; whether the record was written is not known.
            Frozen: the record may not be touched.
        """
        if not self.is_held or not self._is_running:
            raise LeaseLost(self.trouble or "the Lease is not held")
        order = _Order(make)
        self._orders.append(order)
        self._wake.set()
        return await order.result

    async def confirm(self, epoch: int) -> None:
        """
        Read the Lease now and return if it is ours and its record is at *epoch*.

        Raises:
            LeaseLost: it is not.
            Frozen: the record cannot be read.
            KubeError: the server could not be asked.
        """
        if not self.is_held:
            raise LeaseLost(self.trouble or "the Lease is not held")
        try:
            seen = view(await self._port.get(LEASES, self.slot.namespace, self.slot.lease))
        except NotFound:
            self._lose("the Lease vanished")
            raise LeaseLost("the Lease vanished") from None
        held = self._held
        if held is None or seen.uid != held.uid or seen.holder != self.holder:
            self._lose(f"the Lease is held by {seen.holder or 'nobody'} now")
            raise LeaseLost(self.trouble or "")
        record = decode(seen.text)
        if record is None or record.epoch != epoch:
            at = None if record is None else record.epoch
            raise LeaseLost(f"the record is at epoch {at}, not {epoch}")
        if not self.is_held:
            raise LeaseLost("the Lease ran out meanwhile")

    async def run(self, *, release: bool = True) -> None:
        """Get it and keep it until cancelled; then give it back if *release*."""
        self._is_running = True
        try:
            while True:
                self._wake.clear()
                pause = await self._step()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._wake.wait()
        finally:
            self._is_running = False
            self._fail_orders("it is given back")
            if release:
                await self._release()
            self._lose("it is given back")

    # The task

    async def _step(self) -> float:
        """Do what is due and return how long nothing is due."""
        if self._held is not None and not self.is_held:
            self._lose("it could not be renewed in time")
        try:
            if self._held is None:
                await self._acquire()
            elif self._unsure:
                await self._look_again()
            elif self._orders and self.frozen is None:
                await self._write_next()
            elif self._orders:
                self._refuse_orders()
            else:
                await self._put(self._held, {})
        except NotFound:
            self._lose("the Lease vanished" if self._held else "there is no Lease")
        except Conflict:
            self._unsure = True
            return 0.0
        except Unanswered as error:
            self._unsure = True
            self._complain(error)
        except TimeoutError:
            self._unsure = True
            self._complain("no answer in time")
        except KubeError as error:
            self._complain(error)
        else:
            if self._held is not None and self.trouble is not None and not self._unsure:
                self.trouble = None
                self._on_change()
            if self._held is not None and (self._orders or self._unsure):
                return 0.0
            if self._held is not None:
                return self._duration_s * self._rng.uniform(*RENEW_AT)
        return self._rng.uniform(*RETRY_S)

    async def _acquire(self) -> None:
        asked_at = self._port.now()
        try:
            obj = await self._limited(self._port.get(LEASES, self.slot.namespace, self.slot.lease))
        except NotFound:
            self._set_other(None)
            if not self._may_create:
                self.trouble = "there is no Lease; the operator makes it"
                return
            body = LEASES.body(
                self.slot.lease, self.slot.namespace, spec=self._spec(taking=True, transitions=0)
            )
            with contextlib.suppress(AlreadyExists):
                asked_at = self._port.now()
                made = await self._limited(self._port.create(LEASES, self.slot.namespace, body))
                self._gain(made, asked_at)
            return
        seen = view(obj)
        if seen.holder and seen.holder != self.holder and not self._has_expired(seen, asked_at):
            self._set_other(seen.holder)
            self._read_record(seen)
            self.trouble = f"the Lease is held by {seen.holder}"
            return
        spec = self._spec(taking=True, transitions=seen.transitions + 1)
        asked_at = self._port.now()
        try:
            taken = await self._limited(
                self._port.patch_merge(
                    LEASES,
                    self.slot.namespace,
                    self.slot.lease,
                    {"spec": spec},
                    version=seen.version,
                )
            )
        except Conflict:
            self.trouble = "somebody else was faster"
            return
        self._gain(taken, asked_at)

    def _has_expired(self, seen: LeaseView, asked_at: float) -> bool:
        """
        Whether the Lease of another stood still for its duration, on our own clock.

        From when the first look was answered until the last one was asked: never longer than it
        really stood still.
        """
        if self._watched is None or self._watched[:2] != (seen.uid, seen.version):
            self._watched = (seen.uid, seen.version, self._port.now())
        # Its clock is not ours and its renewal time is not looked at.
        return asked_at - self._watched[2] >= max(seen.duration_s, self._duration_s)

    async def _look_again(self) -> None:
        """Find out what became of a write that was not answered, or who changed the Lease."""
        assert self._held is not None
        seen = view(
            await self._limited(self._port.get(LEASES, self.slot.namespace, self.slot.lease))
        )
        if self._held is None:
            return
        if seen.uid != self._held.uid or seen.holder != self.holder:
            if seen.holder and seen.holder != self.holder:
                self._set_other(seen.holder)
            self._lose(f"the Lease is held by {seen.holder or 'nobody'} now")
            return
        # The deadline stays: nobody knows when the unanswered renewal was written.
        self._held = seen
        self._unsure = False
        self._read_record(seen)

    async def _write_next(self) -> None:
        assert self._held is not None
        order = self._orders[0]
        if order.result.done():
            self._orders.pop(0)
            return
        if order.sent is not None and order.sent[0] == self._held.text:
            record = order.sent[1]  # it was not answered, and stands there all the same
        else:
            try:
                record = follow(self.record, order.make(self.record))
            except Frozen as error:
                self._orders.pop(0)
                order.result.set_exception(error)
                return
            text = encode(record)
            order.sent = (text, record)
            if text != self._held.text:
                # Not popped before it is acknowledged: after a conflict or no answer it is
                # looked what stands there, and `make` is asked again.
                await self._put(
                    self._held, {"metadata": {"annotations": {RECORD_ANNOTATION: text}}}
                )
                if self._held is None:
                    return
        self.record = record
        self._highest_epoch = max(self._highest_epoch, record.epoch)
        self._orders.pop(0)
        if not order.result.done():
            order.result.set_result(record)

    async def _put(self, held: LeaseView, patch: Json) -> None:
        """Renew, and write *patch* with it."""
        asked_at = self._port.now()
        spec = {"renewTime": micro_time(self._port.wall())}
        obj = await self._limited(
            self._port.patch_merge(
                LEASES,
                self.slot.namespace,
                self.slot.lease,
                {**patch, "spec": spec},
                version=held.version,
            )
        )
        if self._held is None:
            return  # it was found lost meanwhile, and is to be acquired as if anew
        seen = view(obj)
        if seen.uid != held.uid or seen.holder != self.holder:
            self._lose(f"the Lease is held by {seen.holder or 'nobody'} now")
            return
        self._held = seen
        self._deadline = asked_at + self._duration_s

    async def _limited(self, call: Awaitable[Json]) -> Json:
        """Await *call*, not so long that no second attempt fits in, nor beyond the deadline."""
        limit_s = self._duration_s * CALL_PART
        if self._held is not None:
            limit_s = min(limit_s, max(0.0, self._deadline - self._port.now()))
        async with asyncio.timeout(limit_s):
            return await call

    def _spec(self, *, taking: bool, transitions: int) -> Json:
        now = micro_time(self._port.wall())
        spec: Json = {
            "holderIdentity": self.holder,
            "leaseDurationSeconds": int(self._duration_s),
            "renewTime": now,
        }
        if taking:
            spec |= {"acquireTime": now, "leaseTransitions": transitions}
        return spec

    def _gain(self, obj: Json, asked_at: float) -> None:
        seen = view(obj)
        self.tenure += 1
        self._held = seen
        self._deadline = asked_at + self._duration_s
        self._unsure = False
        self._watched = None
        self.other = None
        self.trouble = None
        self._read_record(seen)
        log.info("the Lease %s is ours", self.slot.lease)
        self._on_change()

    def _lose(self, why: str) -> None:
        self.trouble = why
        if self._held is not None:
            self._held = None
            self._unsure = False
            log.warning("the Lease %s is lost: %s", self.slot.lease, why)
            self._fail_orders(why)
            self._on_change()

    def _set_other(self, holder: str | None) -> None:
        if self.other != holder:
            self.other = holder
            self._on_change()

    def _read_record(self, seen: LeaseView) -> None:
        before = self.frozen
        try:
            record = decode(seen.text)
            if record is not None and record.epoch < self._highest_epoch:
                raise Frozen(
                    f"the slot record went back from epoch {self._highest_epoch} to "
                    f"{record.epoch}; somebody edited or restored it: remove the annotation when "
                    "nothing is up, and restart the router"
                )
        except Frozen as error:
            self.frozen = str(error)
        else:
            self.frozen = None
            self.record = record
            self._highest_epoch = max(self._highest_epoch, 0 if record is None else record.epoch)
        if self.frozen != before:
            if self.frozen:
                log.error("the slot of %s is frozen: %s", self.slot.lease, self.frozen)
            self._on_change()

    def _complain(self, what: object) -> None:
        if self.trouble != str(what):
            self.trouble = str(what)
            log.warning("the Lease %s: %s", self.slot.lease, what)
            self._on_change()

    def _fail_orders(self, why: str) -> None:
        orders, self._orders = self._orders, []
        for order in orders:
            if not order.result.done():
                order.result.set_exception(LeaseLost(why))

    def _refuse_orders(self) -> None:
        orders, self._orders = self._orders, []
        for order in orders:
            if not order.result.done():
                order.result.set_exception(Frozen(self.frozen or ""))

    async def _release(self) -> None:
        """Give it back, so that the next one need not wait; a bonus, so no failure is one."""
        held = self._held
        if held is None or not self.is_held or self._unsure:
            return
        spec = {"holderIdentity": "", "renewTime": micro_time(self._port.wall())}
        with contextlib.suppress(KubeError, TimeoutError):
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                await self._port.patch_merge(
                    LEASES,
                    self.slot.namespace,
                    self.slot.lease,
                    {"spec": spec},
                    version=held.version,
                )
