"""Numbers of the operator, in a registry of its own."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from modelpool_kube.errors import Conflict, KubeError
from modelpool_kube.kinds import Kind

from .acting import Key

Reconcile = Callable[[Key], Awaitable[float | None]]

SECONDS = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)


class OperatorMetrics:
    """What is counted."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._passes = Counter(
            "modelpool_operator_passes",
            "Passes over objects, by kind and how they ended",
            ["kind", "outcome"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "modelpool_operator_pass_seconds",
            "Seconds that a pass over one object took",
            ["kind"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.leads = Gauge(
            "modelpool_operator_leads",
            "1 while this operator is the one that acts",
            registry=self.registry,
        )

    def counted(self, kind: Kind, reconcile: Reconcile) -> Reconcile:
        """Return *reconcile* with its passes counted."""
        for outcome in ("done", "conflict", "refused", "failed"):
            self._passes.labels(kind.kind, outcome)

        async def passed(key: Key) -> float | None:
            began = time.monotonic()
            outcome = "failed"
            try:
                again = await reconcile(key)
                outcome = "done"
                return again
            except Conflict:
                outcome = "conflict"
                raise
            except KubeError:
                outcome = "refused"
                raise
            finally:
                self._passes.labels(kind.kind, outcome).inc()
                self._seconds.labels(kind.kind).observe(time.monotonic() - began)

        return passed
