"""
The written contract between the runtime and a platform that runs members.

A driver decides from live state inside its own loop: the caller never checks first. One contract
test (``tests/router/drivers/test_contract.py``) runs against every driver, the fake one included.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..core.events import Idleness
from ..core.spec import MemberName


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a member (or an upstream) answers, and which life of it this is."""

    host: str
    """IP address or host name, without brackets."""
    port: int
    base_path: str = ""
    """Prefix for every path, no trailing slash; empty for ordinary members."""
    tls: bool = False
    identity: str = ""
    """Changes with every life of the member (``pid:start time``, Pod UID); connections are
    never reused across identities."""
    parallel: int | None = None
    """What the engine says it can work on at once, if it says so."""


class DriverError(Exception):
    """Base of what a driver may raise."""


class ActivationFailed(DriverError):
    """The member started and died, or never became ready."""

    def __init__(self, reason: str, detail: str = "", *, retryable: bool = True) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        """Stable word: ``exited``, ``command_not_found``, ``load_timeout``, ``port_in_use`` ..."""
        self.detail = detail
        """For people: exit code, last log lines, the way out."""
        self.retryable = retryable


class DriverUnavailable(DriverError):
    """
    The platform could not be asked, or the proof could not be had; try again later.

    Args:
        detail: What went wrong, for people.
        way_out: What a person can do, where something has to be done.
    """

    def __init__(self, detail: str, *, way_out: str = "") -> None:
        super().__init__(f"{detail}; {way_out}" if way_out else detail)
        self.detail = detail
        self.way_out = way_out


@dataclass(frozen=True, slots=True)
class SlotStanding:
    """Whether a driver may move the slot now."""

    withheld: str = ""
    """Why not, for people, with the way out; empty when it may."""
    aside: bool = False
    """Somebody else was seen to hold the slot: forward nothing, believe nothing."""


@dataclass(frozen=True, slots=True)
class SlotMemory:
    """What the platform remembers of the slot from before this router."""

    released: bool = False
    """It was emptied on purpose: warm nothing."""
    prefer: MemberName | None = None
    """Who stays when several are up."""


StandingCallback = Callable[[SlotStanding], None]
"""Called when the right to move the slot comes or goes."""
LostCallback = Callable[[MemberName, str, str], None]
"""Called with (member, reason, detail) when a ready member ended without `deactivate`."""


class MemberDriver(Protocol):
    """Brings members of one pool up and down. One instance per pool."""

    async def activate(self, member: MemberName) -> Endpoint:
        """
        Bring *member* up and return where it answers.

        Returns only when the member's readiness probe succeeded in this life of it. Idempotent:
        a member that is up already is returned as it is. Has no time limit of its own; on
        cancellation the member may be half up, and `deactivate` takes it down.

        Raises:
            ActivationFailed: it died, or can never become ready. Parts of it may be left.
            DriverUnavailable: the platform could not be asked.
        """
        ...

    async def deactivate(self, member: MemberName) -> None:
        """
        Take *member* down and return when it is proven gone, never merely "asked to stop".

        Idempotent; returns at once when nothing of the member exists. Also cleans up after a
        failed or cancelled `activate`.

        Raises:
            DriverUnavailable: it could not be proven gone; call again.
        """
        ...

    async def idle(self, member: MemberName) -> Idleness:
        """Ask the engine whether it works on something; IDLE when it has no probe for that."""
        ...

    async def ready(self, member: MemberName) -> bool:
        """Ask the readiness probe once, now; False on any failure. Never raises."""
        ...

    async def observe(self) -> Mapping[MemberName, Endpoint]:
        """
        Report the members that are up and ready now, from live state.

        Called at start, before anything else, and to re-check a belief. What is found at start
        and cannot be adopted is taken down before this returns.

        Raises:
            DriverUnavailable: the platform could not be asked.
        """
        ...

    def progress(self, member: MemberName) -> str:
        """Last sign of life of a loading member for people (a log line), or an empty string."""
        ...

    async def close(self, *, stop_members: bool, hurry: asyncio.Event | None = None) -> None:
        """
        End all watching; take members down first if *stop_members*. Idempotent.

        Once *hurry* is set, before or meanwhile, members get seconds for an end of their own, not
        what their profile allows; they are proven gone all the same.

        Where members are objects of a platform and outlive routers, they are left as they are.
        """
        ...


@runtime_checkable
class RemembersSlot(Protocol):
    """A driver whose platform keeps a record of the slot."""

    def remembered(self) -> SlotMemory:
        """Return what the record said when `observe` returned last."""
        ...
