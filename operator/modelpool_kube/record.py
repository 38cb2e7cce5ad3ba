"""
The slot record: who owns the slot of a pool, and what is being done about it.

JSON in an annotation of the pool's Lease. Pure: encoding, decoding, and what may follow what. A
record that cannot be read, or that a newer version wrote, freezes the pool: nobody moves the slot
until a person has looked (nothing is guessed from half a record).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeGuard

FORMAT = 1
"""Version of the record; a larger one is not touched."""

_SLOT_VALUE = re.compile("([a-z0-9.-]+)/([a-z0-9.-]+):([0-9]{1,18})")


class Frozen(Exception):
    """The record must not be overwritten: it is unreadable, newer than us, or went back in time."""


class Phase(StrEnum):
    """What is being done with the slot."""

    COLD = "cold"
    DRAINING = "draining"
    UNLOADING = "unloading"
    LOADING = "loading"
    RESIDENT = "resident"
    RELEASED = "released"


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """One state of the slot. Every epoch is an ownership decision and only ever grows."""

    epoch: int = 0
    owner: str | None = None
    """Member that holds the slot, or held it last while it is being unloaded."""
    target: str | None = None
    """Member whose load was announced."""
    phase: Phase = Phase.COLD
    since: str = ""
    """When the phase began; RFC 3339, UTC."""
    reason: str = ""
    """Why, in a few words for people."""
    released: bool = False
    """The pool was emptied on purpose and stays empty until demand."""
    held: int = 0
    """Requests that wait; at most two seconds old while a router is busy."""
    forgotten: tuple[str, ...] = ()
    """UIDs of Pods on lost nodes that a person declared gone."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields of others, kept as they are."""


_OURS = ("format", *(name for name in SlotRecord.__dataclass_fields__ if name != "extra"))


def decode(text: str | None) -> SlotRecord | None:
    """
    Return the record in *text*; None when there is none.

    Raises:
        Frozen: it cannot be read, or a newer version wrote it.
    """
    if text is None:
        return None
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise Frozen(f"the slot record is not JSON ({error}); {_WAY_OUT}") from None
    if not isinstance(raw, dict):
        raise Frozen(f"the slot record is not an object; {_WAY_OUT}")
    version = raw.get("format", FORMAT)
    if not _is_count(version):
        raise Frozen(f"the slot record has format {version!r}; {_WAY_OUT}")
    if version > FORMAT:
        raise Frozen(
            f"the slot record has format {version}, and this program knows {FORMAT}; "
            "run the newer version again, or remove the annotation when nothing is up"
        )
    epoch = raw.get("epoch")
    if not _is_count(epoch):
        raise Frozen(f"the slot record has epoch {epoch!r}; {_WAY_OUT}")
    try:
        phase = Phase(raw.get("phase", Phase.COLD))
    except ValueError:
        raise Frozen(f"the slot record has phase {raw.get('phase')!r}; {_WAY_OUT}") from None
    held = raw.get("held", 0)
    forgotten = raw.get("forgotten", [])
    texts = {key: raw.get(key) for key in ("owner", "target", "since", "reason")}
    released = raw.get("released", False)
    if (
        not _is_count(held)
        or not isinstance(released, bool)
        or not isinstance(forgotten, list)
        or not all(isinstance(uid, str) for uid in forgotten)
        or not all(value is None or isinstance(value, str) for value in texts.values())
    ):
        raise Frozen(f"a field of the slot record has the wrong type; {_WAY_OUT}")
    return SlotRecord(
        epoch=epoch,
        owner=texts["owner"] or None,
        target=texts["target"] or None,
        phase=phase,
        since=texts["since"] or "",
        reason=texts["reason"] or "",
        released=released,
        held=held,
        forgotten=tuple(forgotten),
        extra={key: value for key, value in raw.items() if key not in _OURS},
    )


_WAY_OUT = "remove the annotation when nothing is up, and the pool starts anew"


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def encode(record: SlotRecord) -> str:
    """Return *record* as text; the same record gives the same text."""
    fields = {
        "epoch": record.epoch,
        "owner": record.owner,
        "target": record.target,
        "phase": record.phase.value,
        "since": record.since,
        "reason": record.reason,
        "released": record.released,
        "held": record.held,
        "forgotten": list(record.forgotten),
    }
    return json.dumps({**record.extra, "format": FORMAT, **fields}, separators=(",", ":"))


def follow(before: SlotRecord | None, after: SlotRecord) -> SlotRecord:
    """
    Return *after* as it may be written over *before*: with the fields of others kept.

    Raises:
        Frozen: the epoch would go down.
    """
    if before is None:
        return after
    if after.epoch < before.epoch:
        raise Frozen(
            f"epoch {after.epoch} must not be written over epoch {before.epoch}: "
            "somebody else has decided since; read again"
        )
    return replace(after, extra={**before.extra, **after.extra})


@dataclass(frozen=True, slots=True)
class SlotId:
    """Which slot: the Lease that stands for it."""

    namespace: str
    lease: str

    def value(self, epoch: int) -> str:
        """Return the annotation of a member at *epoch*."""
        return f"{self.namespace}/{self.lease}:{epoch}"


@dataclass(frozen=True, slots=True)
class SlotMark:
    """What the annotation of a member says."""

    slot: SlotId
    epoch: int


def read_mark(text: str | None) -> SlotMark | None:
    """Return what the annotation *text* says; None when it is missing or means nothing."""
    match = _SLOT_VALUE.fullmatch(text or "")
    if match is None:
        return None
    return SlotMark(SlotId(match[1], match[2]), int(match[3]))


def next_epoch(record: SlotRecord | None, marks: list[SlotMark | None], slot: SlotId) -> int:
    """Return 1 + the largest epoch in the record and on any member of this slot."""
    known = [mark.epoch for mark in marks if mark is not None and mark.slot == slot]
    return 1 + max([0 if record is None else record.epoch, *known])
