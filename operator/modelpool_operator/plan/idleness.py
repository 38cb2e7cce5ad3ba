"""
Whether an engine works on nothing: paths to ask, and what the answers mean. Pure.

Stricter than a router, which dispatched the requests itself and may fall back on its own count:
here only a positive answer counts. An engine that has no such path, or has it turned off, cannot
be asked, and is never unloaded by the operator.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .model import Idle

Judge = Callable[[int, bytes], Idle]

_NOT_THERE = frozenset({404, 405, 501})


def idle_path(profile: str, configured: str | None) -> str | None:
    """Return the path that tells whether the engine is idle; None when it has none."""
    return configured or _PATHS.get(profile)


def judge(profile: str, status: int, body: bytes, *, is_configured: bool = False) -> Idle:
    """
    Return what one answer means. Never raises.

    Args:
        profile: The engine.
        status: HTTP status.
        body: Whatever came.
        is_configured: Whether the path is the user's own; then a 2xx of an unknown form is idle.
    """
    if status in _NOT_THERE:
        return Idle.UNSUPPORTED
    if profile == "generic" or (is_configured and profile not in _JUDGES):
        return _by_status(status, body)
    return _JUDGES.get(profile, _by_status)(status, body)


def together(answers: Iterable[Idle]) -> Idle:
    """Return what several Pods say together: idle only when all of them are."""
    said = set(answers)
    for worst in (Idle.BUSY, Idle.UNREACHABLE, Idle.UNSUPPORTED):
        if worst in said:
            return worst
    return Idle.IDLE if said else Idle.UNREACHABLE


def _by_status(status: int, body: bytes) -> Idle:
    if 200 <= status < 300:
        return Idle.IDLE
    return Idle.BUSY if status in (409, 423, 429, 503) else Idle.UNREACHABLE


def _by_slots(status: int, body: bytes) -> Idle:
    slots = _json(body) if status == 200 else None
    if not isinstance(slots, list) or not slots:
        return Idle.UNREACHABLE
    flags = []
    for slot in slots:
        flag = slot.get("is_processing") if isinstance(slot, dict) else None
        if not isinstance(flag, bool):
            state = slot.get("state") if isinstance(slot, dict) else None
            if not isinstance(state, int) or isinstance(state, bool):
                return Idle.UNREACHABLE
            flag = state != 0
        flags.append(flag)
    return Idle.BUSY if any(flags) else Idle.IDLE


def _by_gauges(*names: str) -> Judge:
    """Judge a Prometheus page by the sum of *names*; the first one must be there."""

    def judged(status: int, body: bytes) -> Idle:
        if status != 200:
            return Idle.UNREACHABLE
        total, seen = 0.0, False
        for name, value in _samples(body):
            if name in names:
                total += value
                seen = seen or name == names[0]
        if not seen or not math.isfinite(total):
            return Idle.UNREACHABLE
        return Idle.BUSY if total > 0 else Idle.IDLE

    return judged


def _by_loads(status: int, body: bytes) -> Idle:
    if status != 200:
        return Idle.UNREACHABLE
    loads = _json(body)
    if loads is None:
        return _by_gauges("sglang:num_running_reqs", "sglang:num_queue_reqs")(status, body)
    if isinstance(loads, dict) and isinstance(loads.get("loads"), list):
        loads = loads["loads"]
    ranks = loads if isinstance(loads, list) else [loads]
    total, seen = 0, 0
    for rank in ranks:
        counts = [
            rank[key]
            for key in ("num_reqs", "num_running_reqs", "num_waiting_reqs", "load")
            if isinstance(rank, dict) and isinstance(rank.get(key), int)
        ]
        seen += bool(counts)
        total += sum(map(abs, counts))
    if not ranks or seen != len(ranks):
        return Idle.UNREACHABLE
    return Idle.BUSY if total else Idle.IDLE


def _samples(body: bytes) -> Iterator[tuple[str, float]]:
    for line in body.decode("utf-8", "replace").splitlines():
        if not line or line.startswith("#"):
            continue
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


_PATHS = {
    "llama-server": "/slots",
    "vllm": "/metrics",
    "sglang": "/get_load",
    "tgi": "/metrics",
}
_JUDGES: dict[str, Judge] = {
    "llama-server": _by_slots,
    "vllm": _by_gauges("vllm:num_requests_running", "vllm:num_requests_waiting"),
    "sglang": _by_loads,
    "tgi": _by_gauges("tgi_batch_current_size", "tgi_queue_size"),
}
