"""
What is known of the engines: where they say "ready", where they say "busy", how they stop.

Pure: a profile names paths and reads answers (status and body); asking and signalling is done by
the drivers. Every judge takes whatever an engine may send and never raises.
"""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from ..core.events import Idleness


class Readiness(StrEnum):
    """What one answer on the readiness path means."""

    READY = "ready"
    LOADING = "loading"
    FAILED = "failed"
    """The path is wrong or needs a key: no amount of waiting makes this answer good."""


@dataclass(frozen=True, slots=True)
class IdleReading:
    """What one answer on the idle path means."""

    verdict: Idleness
    parallel: int | None = None
    """How many requests the engine can work on at once, if it says so."""


@dataclass(frozen=True, slots=True)
class StopStep:
    """Send *signal* to everything of the member and give it *grace_s* seconds to be gone."""

    signal: signal.Signals
    grace_s: float


ReadinessJudge = Callable[[int, bytes], Readiness]
IdleJudge = Callable[[int, bytes], IdleReading]


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of engine."""

    name: str
    readiness_path: str
    judge_readiness: ReadinessJudge
    idle_path: str | None
    """None = the engine cannot be asked; the router's own count decides."""
    judge_idle: IdleJudge
    stop: tuple[StopStep, ...]
    """In order; what is left after the last one is killed."""
    default_parallel: int = 16
    reports_parallel: bool = False
    """Whether the idle answer tells how many requests fit; asked once when the member lands."""


@dataclass(frozen=True, slots=True)
class ProfileOverrides:
    """What a configuration may change of a profile; None = the profile's own."""

    readiness_path: str | None = None
    idle_path: str | None = None
    stop_grace_s: float | None = None
    """From the first TERM to the second."""
    kill_grace_s: float | None = None
    """From the second TERM to KILL."""


def profile(name: str, overrides: ProfileOverrides = ProfileOverrides()) -> Profile:
    """
    Return the profile called *name* with *overrides* in place.

    Raises:
        KeyError: there is none; `NAMES` lists them.
    """
    found = _PROFILES[name]
    graces = (overrides.stop_grace_s, overrides.kill_grace_s)
    steps = tuple(
        step if grace is None else replace(step, grace_s=grace)
        for step, grace in zip(found.stop, graces, strict=True)
    )
    return replace(
        found,
        readiness_path=overrides.readiness_path or found.readiness_path,
        idle_path=overrides.idle_path or found.idle_path,
        stop=steps,
    )


# -- readiness -----------------------------------------------------------------------------

_NEVER = frozenset({400, 401, 403, 404, 405, 406, 410, 421, 426, 501, 505})
"""Answers that tell of a wrong path or a missing key rather than of a load in progress."""


def ready_on_success(status: int, body: bytes) -> Readiness:
    """Judge a health path: 2xx is ready, redirects and most 4xx never will be, the rest loads."""
    if 200 <= status < 300:
        return Readiness.READY
    if 300 <= status < 400 or status in _NEVER:
        return Readiness.FAILED
    return Readiness.LOADING


# -- idleness ------------------------------------------------------------------------------

_UNREACHABLE = IdleReading(Idleness.UNREACHABLE)
_NO_PROBE = frozenset({404, 501})
"""The engine was built or started without this probe: then the router's own count decides."""


def idle_from_slots(status: int, body: bytes) -> IdleReading:
    """Judge llama-server's ``GET /slots``: a list with ``is_processing`` (older: ``state``)."""
    if status in _NO_PROBE:
        return IdleReading(Idleness.IDLE)
    slots = _json(body) if status == 200 else None
    if not isinstance(slots, list) or not slots:
        return _UNREACHABLE
    busy = False
    for slot in slots:
        working = _slot_works(slot)
        if working is None:
            return _UNREACHABLE
        busy = busy or working
    return IdleReading(Idleness.BUSY if busy else Idleness.IDLE, len(slots))


def _slot_works(slot: Any) -> bool | None:
    if not isinstance(slot, dict):
        return None
    if isinstance(flag := slot.get("is_processing"), bool):
        return flag
    if isinstance(state := slot.get("state"), int):
        return state != 0
    return None


def idle_from_gauges(needed: str, *others: str) -> IdleJudge:
    """
    Judge a Prometheus page: idle when the sum of the gauges over all label sets is zero.

    *needed* must be there; a page without it is no answer (statistics are turned off).
    """

    def judge(status: int, body: bytes) -> IdleReading:
        if status in _NO_PROBE:
            return IdleReading(Idleness.IDLE)
        if status != 200:
            return _UNREACHABLE
        names = {needed, *others}
        total, seen = 0.0, False
        for name, value in samples(body):
            if name in names:
                total += value
                seen = seen or name == needed
        if not seen or not math.isfinite(total):
            return _UNREACHABLE
        return IdleReading(Idleness.BUSY if total > 0 else Idleness.IDLE)

    return judge


def idle_from_loads(status: int, body: bytes) -> IdleReading:
    """
    Judge SGLang's ``GET /get_load``: one object per data-parallel rank, or one object for all.

    Its ``/metrics`` and ``/v1/loads``, if configured instead, are understood as well.
    """
    if status in _NO_PROBE:
        return IdleReading(Idleness.IDLE)
    if status != 200:
        return _UNREACHABLE
    loads = _json(body)
    if loads is None:
        return _SGLANG_GAUGES(status, body)
    if isinstance(loads, dict) and isinstance(loads.get("loads"), list):
        loads = loads["loads"]
    ranks = loads if isinstance(loads, list) else [loads]
    counts = [
        rank[key]
        for rank in ranks
        if isinstance(rank, dict)
        for key in ("num_reqs", "num_running_reqs", "num_waiting_reqs", "load")
        if isinstance(rank.get(key), int)
    ]
    if not counts:
        return _UNREACHABLE
    return IdleReading(Idleness.BUSY if any(counts) else Idleness.IDLE)


def idle_from_status(status: int, body: bytes) -> IdleReading:
    """Judge a configured path: 2xx is idle, a wrong path is no answer, anything else is busy."""
    if 200 <= status < 300:
        return IdleReading(Idleness.IDLE)
    if status in _NEVER or 300 <= status < 400:
        return _UNREACHABLE
    return IdleReading(Idleness.BUSY)


def samples(body: bytes) -> Iterator[tuple[str, float]]:
    """Yield (name without labels, value) of every sample of a Prometheus text page."""
    for line in body.decode("utf-8", "replace").splitlines():
        if not line or line.startswith("#"):
            continue
        # a label value may hold spaces and braces, so what follows the last brace is the value
        name, _, labelled = line.partition("{")
        rest = labelled.rpartition("}")[2] if labelled else line.partition(" ")[2]
        fields = rest.split()
        if not fields:
            continue
        try:
            yield name.split(" ")[0], float(fields[0])
        except ValueError:
            continue


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


# -- the profiles --------------------------------------------------------------------------

_SGLANG_GAUGES = idle_from_gauges("sglang:num_running_reqs", "sglang:num_queue_reqs")


def _terms(first_s: float, second_s: float) -> tuple[StopStep, ...]:
    """TERM twice: a busy llama-server only leaves at the second, others ignore it."""
    return (StopStep(signal.SIGTERM, first_s), StopStep(signal.SIGTERM, second_s))


_PROFILES: Mapping[str, Profile] = {
    known.name: known
    for known in (
        Profile(
            name="llama-server",
            readiness_path="/health",
            judge_readiness=ready_on_success,
            idle_path="/slots",
            judge_idle=idle_from_slots,
            stop=_terms(2.0, 5.0),  # idle it is gone after 0.1 s, a second TERM ends it at once
            reports_parallel=True,
        ),
        Profile(
            name="vllm",
            readiness_path="/health",
            judge_readiness=ready_on_success,
            idle_path="/metrics",
            judge_idle=idle_from_gauges("vllm:num_requests_running", "vllm:num_requests_waiting"),
            stop=_terms(15.0, 10.0),  # engine processes end one after the other
            default_parallel=256,
        ),
        Profile(
            name="sglang",
            readiness_path="/health",
            judge_readiness=ready_on_success,
            idle_path="/get_load",
            judge_idle=idle_from_loads,
            stop=_terms(15.0, 10.0),
        ),
        Profile(
            name="tgi",
            readiness_path="/health",
            judge_readiness=ready_on_success,
            idle_path="/metrics",
            judge_idle=idle_from_gauges("tgi_batch_current_size", "tgi_queue_size"),
            stop=_terms(15.0, 10.0),
        ),
        Profile(
            name="generic",
            readiness_path="/health",
            judge_readiness=ready_on_success,
            idle_path=None,
            judge_idle=idle_from_status,
            stop=_terms(10.0, 5.0),
        ),
    )
}

NAMES: tuple[str, ...] = tuple(_PROFILES)
"""Every profile, for configuration errors."""
