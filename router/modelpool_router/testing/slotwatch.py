"""
Who had the slot while a trace ran: told by a router's admin port, or by the log of fake members.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

Kind = Literal["load", "resident", "drain", "unload"]
_ENDS = ("stopped", "crash", "exit_at_start", "exit_while_loading")
_BEGINS: Mapping[str, Kind] = {"start": "load", "ready": "resident", "term": "unload"}


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a member's life; seconds from the start of the trace."""

    member: str
    kind: Kind
    begin_s: float
    end_s: float


def phases_of_members(
    events: Iterable[Mapping[str, object]], start: float, end_s: float
) -> list[Phase]:
    """
    Return what the event log of fake members tells.

    Args:
        events: ``{"t": monotonic, "event": "start" | "ready" | "term" | "stopped", "name": ...}``
            and others, which are passed over.
        start: Monotonic time of the start of the trace.
        end_s: When the trace ended, from its start.
    """
    found: list[Phase] = []
    open_since: dict[str, tuple[Kind, float]] = {}
    for event in events:
        at, name = float(str(event["t"])) - start, str(event["name"])
        kind = _BEGINS.get(str(event["event"]))
        if kind is None and event["event"] not in _ENDS:
            continue
        before = open_since.pop(name, None)
        if before is not None:
            found.append(Phase(name, before[0], before[1], at))
        if kind is not None:
            open_since[name] = (kind, at)
    found += [Phase(name, kind, at, end_s) for name, (kind, at) in open_since.items()]
    return [phase for phase in found if phase.end_s > 0]


def phases_of_views(views: Sequence[tuple[float, Mapping[str, Any]]], end_s: float) -> list[Phase]:
    """
    Return what a router's views of its pools tell.

    Args:
        views: When, in seconds from the start of the trace, and a pool as it was from then on.
        end_s: When the trace ended.
    """
    found: list[Phase] = []
    current: dict[str, tuple[tuple[str, Kind] | None, float]] = {}
    for at, view in views:
        pool, now = str(view["name"]), _holder(view)
        before, since = current.get(pool, (None, at))
        if now == before and pool in current:
            continue
        if before is not None:
            found.append(Phase(*before, since, at))
        current[pool] = (now, at)
    found += [Phase(*now, since, end_s) for now, since in current.values() if now is not None]
    return [phase for phase in found if phase.end_s > max(phase.begin_s, 0.0)]


def _holder(view: Mapping[str, Any]) -> tuple[str, Kind] | None:
    """Return who has the slot, and in which phase; None when it is empty."""
    match view["state"]:
        case "loading":
            return str(view["target"]), "load"
        case "unloading":
            return str(view["incumbent"]), "unload"
        case "resident":
            return str(view["resident"]), "resident" if view["admission"] == "open" else "drain"
        case _:
            return None


class SlotWatch:
    """
    Listens to an admin port while a trace runs; ``async with SlotWatch(url) as watch``.

    Nothing is told when nobody answers there: *views* stays empty, and the trace goes on.
    """

    def __init__(self, admin_url: str) -> None:
        self.views: list[tuple[float, Mapping[str, Any]]] = []
        """When (monotonic), and a pool from then on."""
        self._url = admin_url.rstrip("/")
        self._task: asyncio.Task[None] | None = None
        self._heard = asyncio.Event()

    async def __aenter__(self) -> SlotWatch:
        self._task = asyncio.get_running_loop().create_task(self._listen())
        self._task.add_done_callback(lambda _: self._heard.set())
        await self._heard.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _listen(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=2.0, sock_read=60.0)
        with suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError):
            async with (
                aiohttp.ClientSession(timeout=timeout) as client,
                client.get(f"{self._url}/api/v1/events") as answer,
            ):
                answer.raise_for_status()
                async for line in answer.content:
                    if line.startswith(b"data:"):
                        self._take(json.loads(line[5:]), time.monotonic())

    def _take(self, data: Mapping[str, Any], now: float) -> None:
        if "view" in data:
            self.views.append((now, data["view"]))
        else:
            self.views += [(now, view) for view in data["pools"]]
        self._heard.set()
