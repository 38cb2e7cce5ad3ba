"""
What became of each request: exactly one outcome, counted once, logged once (H13).

Outcomes: ``served``, ``refused:<code>``, ``client_gone``, ``upstream_error``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..core.catalog import Route
from ..telemetry import FinishedRequest, Logs, Metrics, Served
from .errors import ApiError
from .exchange import Forwarded
from .request import Request


class RequestRecord:
    """One request, from its arrival to its outcome."""

    __slots__ = (
        "arrived_at",
        "bytes_sent",
        "code",
        "first_byte_at",
        "granted_at",
        "held_from",
        "held_until",
        "key_id",
        "model",
        "outcome",
        "request_id",
        "route",
        "status",
    )

    def __init__(self, request: Request, now: float) -> None:
        self.request_id = request.request_id
        self.arrived_at = now
        self.route: Route | None = None
        self.model: str | None = None
        self.key_id: str | None = None
        self.held_from: float | None = None
        self.held_until: float | None = None
        self.granted_at: float | None = None
        self.first_byte_at: float | None = None
        self.outcome = "client_gone"
        self.status: int | None = None
        self.code = ""
        self.bytes_sent = 0

    def refused(self, error: ApiError) -> None:
        """The router answered with an error of its own before it dispatched anything."""
        self.outcome = f"refused:{error.code}"
        self.status = error.status
        self.code = error.code

    def failed(self, error: ApiError) -> None:
        """Dispatched, and no byte of an answer came: the router told the client so."""
        self.outcome = "upstream_error"
        self.status = error.status
        self.code = error.code

    def forwarded(self, result: Forwarded) -> None:
        """An answer was relayed, whole or in part."""
        self.outcome = result.outcome
        self.status = result.status or None
        self.code = result.code or ""
        self.bytes_sent = result.bytes_sent
        self.first_byte_at = result.first_byte_at


class Accountant:
    """Counts and logs finished requests."""

    def __init__(self, metrics: Metrics, logs: Logs, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._logs = logs
        self._clock = clock

    def served(self, route: Route) -> Served | None:
        """Return where usual requests for *route* are counted, for `close_short`."""
        return self._metrics.served(route.pool or "", route.member, 200)

    def close_short(
        self,
        request_id: str,
        route: Route,
        model: str,
        key_id: str | None,
        outcome: str,
        code: str,
        status: int | None,
        sent_bytes: int,
        arrived_at: float,
        first_byte_at: float,
        ended_at: float,
        served: Served | None,
    ) -> None:
        """
        Count and log a request that was not held.

        Args:
            first_byte_at: 0.0 if none came.
            served: If it was answered with 200.
        """
        ttfb_s = first_byte_at - arrived_at if first_byte_at else None
        metrics, logs = self._metrics, self._logs
        if served is None or ttfb_s is None or not metrics.count(served, ttfb_s):
            metrics.request_done(
                route.pool or "", route.member, outcome, code or status or "", 0.0, ttfb_s
            )
        # (made here, and by position: names and calls cost as much as all the rest)
        logs.finished(
            FinishedRequest(
                time.time(),
                request_id,
                route.pool or "",
                route.member,
                model,
                0.0,
                outcome,
                status,
                code,
                sent_bytes,
                None if ttfb_s is None else ttfb_s * 1000,
                (ended_at - arrived_at) * 1000,
                key_id,
                logs.render,
            )
        )

    def close(self, record: RequestRecord) -> None:
        """Count and log *record*; called once for each request that was accepted or refused."""
        now = self._clock()
        route = record.route
        pool = None if route is None else (route.pool or "")
        member = None if route is None else route.member
        held_s = None
        if record.held_from is not None:
            held_s = (record.held_until or now) - record.held_from
        ttfb_s = None
        if record.first_byte_at is not None and record.granted_at is not None:
            ttfb_s = record.first_byte_at - record.granted_at
        outcome = record.outcome
        self._metrics.request_done(
            pool, member, outcome, record.code or record.status or "", held_s, ttfb_s
        )
        self._logs.request_line(
            request_id=record.request_id,
            pool=pool,
            member=member,
            model=record.model,
            held_ms=None if held_s is None else held_s * 1000,
            outcome=outcome,
            status=record.status,
            code=record.code,
            sent_bytes=record.bytes_sent,
            ttfb_ms=None if ttfb_s is None else ttfb_s * 1000,
            duration_ms=(now - record.arrived_at) * 1000,
            key_id=record.key_id,
        )
