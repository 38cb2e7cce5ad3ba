"""
The record of the one replacement of each role that has begun and not ended.

JSON in an annotation of the ModelDeployment, by role. It covers the time in which nothing that can
be observed names the replica that is being replaced. Not status: that is made anew at every look.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

FORMAT = 1
FORMAT_KEY = "/format"
"""No role can be called so."""


class UnreadableRecord(Exception):
    """The record cannot be read, or names what does not exist; nothing may be guessed from it."""


class SlotPhase(StrEnum):
    """How far a replacement is."""

    CLEANUP = "Cleanup"
    """The captured members and Workload are being deleted."""
    WAITING = "WaitingForAdmission"
    """The replica is vacant and the new members are made, or wait for their admission."""


class Cause(StrEnum):
    """Why a replica is replaced."""

    OUTDATED = "outdated"
    BROKEN = "broken"
    QUEUED = "queued"
    """It was outdated and had never been admitted."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One replacement."""

    role: str
    ordinal: int
    phase: SlotPhase
    cause: Cause
    since: str
    """When the phase began; RFC 3339."""
    member_uids: tuple[str, ...] = ()
    """Captured: what this replacement may delete. Sorted."""
    workload_uid: str = ""
    """Captured; empty when none was visible."""
    member_hashes: tuple[str, ...] = ()
    """What the new members are made from, by seat."""
    current_member_uids: tuple[str, ...] = ()
    """The new members, as soon as they exist. Sorted."""
    current_workload_uid: str = ""


_KEYS = {
    "ordinal": "ordinal",
    "phase": "phase",
    "cause": "cause",
    "since": "since",
    "member_uids": "memberUIDs",
    "workload_uid": "workloadUID",
    "member_hashes": "memberHashes",
    "current_member_uids": "currentMemberUIDs",
    "current_workload_uid": "currentWorkloadUID",
}
_LISTS = ("member_uids", "member_hashes", "current_member_uids")
_TEXTS = ("since", "workload_uid", "current_workload_uid")
_WAY_OUT = (
    "look what stands, then remove the annotation; replicas that are short are then made anew"
)


def encode(slots: Mapping[str, Slot]) -> str | None:
    """Return the record as text, the same for the same slots; None when there are none."""
    if not slots:
        return None
    record: dict[str, Any] = {FORMAT_KEY: FORMAT}
    for role in sorted(slots):
        slot = slots[role]
        values = {key: getattr(slot, name) for name, key in _KEYS.items()}
        record[role] = {key: value for key, value in values.items() if value not in ((), "")}
    return json.dumps(record, separators=(",", ":"))


def decode(text: str | None, roles: Collection[str]) -> dict[str, Slot]:
    """
    Return the slots in *text*, by role; *roles* are those that exist.

    Raises:
        UnreadableRecord: nothing may be taken from it, not even that there is no slot.
    """
    if text is None:
        return {}
    try:
        record = json.loads(text)
    except ValueError as error:
        raise UnreadableRecord(f"the record is not JSON ({error}); {_WAY_OUT}") from None
    if not isinstance(record, dict) or record.pop(FORMAT_KEY, None) != FORMAT:
        raise UnreadableRecord(f"the record is not of format {FORMAT}; {_WAY_OUT}")
    unknown = sorted(record.keys() - set(roles))
    if unknown:
        raise UnreadableRecord(f"the record names roles that do not exist: {unknown}; {_WAY_OUT}")
    return {role: _slot(role, raw) for role, raw in record.items()}


def _slot(role: str, raw: Any) -> Slot:
    def wrong(what: str) -> UnreadableRecord:
        return UnreadableRecord(f"the record of role {role} has a wrong {what}; {_WAY_OUT}")

    if not isinstance(raw, dict):
        raise wrong("form")
    ordinal = raw.get("ordinal")
    if not isinstance(ordinal, int) or isinstance(ordinal, bool) or ordinal < 0:
        raise wrong("ordinal")
    try:
        phase, cause = SlotPhase(str(raw.get("phase"))), Cause(raw.get("cause", "outdated"))
    except ValueError:
        raise wrong("phase or cause") from None
    lists: dict[str, tuple[str, ...]] = {}
    for name in _LISTS:
        found = raw.get(_KEYS[name], [])
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise wrong(_KEYS[name])
        lists[name] = tuple(found)
    texts: dict[str, str] = {}
    for name in _TEXTS:
        found = raw.get(_KEYS[name], "")
        if not isinstance(found, str):
            raise wrong(_KEYS[name])
        texts[name] = found
    return Slot(
        role,
        ordinal,
        phase,
        cause,
        since=texts["since"],
        member_uids=lists["member_uids"],
        workload_uid=texts["workload_uid"],
        member_hashes=lists["member_hashes"],
        current_member_uids=lists["current_member_uids"],
        current_workload_uid=texts["current_workload_uid"],
    )
