"""
Names, labels and meaning of every series; `metrics` counts, `reference` writes the manual page.

A label value comes from the configuration or from a short list of ours, never from a request:
whatever else arrives is counted as ``unknown`` or ``other``.
"""

from __future__ import annotations

from dataclasses import dataclass

UNKNOWN = "unknown"
"""Pool and member of requests that were refused before a model was found for them."""
OTHER = "other"
"""Reasons and codes outside the known ones."""

# One set per quantity; the default buckets of the client library end at 10 s, where our
# interesting part begins.
PHASE_BUCKETS = (0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
HOLD_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 180, 300, 600)
FIRST_BYTE_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

PHASES = ("drain", "unload", "load")
OUTCOMES = ("served", "refused", "client_gone", "upstream_error")
CAUSES_FROM_EMPTY = ("demand", "warm", "restore", "command")
CAUSES_OF_DISPLACING = ("demand", "reclaim", "command")
DEFER_REASONS = ("PodsBusy", "IdleCheckFailed")
RELEASE_REASONS = ("idle_unload", "command")
LOAD_FAILURES = (
    "exited",
    "load_timeout",
    "command_not_found",
    "port_in_use",
    "start_failed",
    "readiness_refused",
    "memory_not_free",
    "driver_unavailable",
)
"""Reasons whose series exist from the start; drivers have rarer ones."""

CODES_WITH_MEMBER = {
    "served": ("2xx", "4xx", "5xx"),
    "refused": (
        "swap_budget_exceeded",
        "queue_full",
        "rate_limit_exceeded",
        "member_failed",
        "member_backoff",
        "pool_draining",
        "slot_unavailable",
    ),
    "client_gone": ("none",),
    "upstream_error": ("upstream_protocol_error", "upstream_reset", "upstream_timeout"),
}
"""Outcome and code of requests whose member is known, pre-created for every member."""

CODES_WITHOUT_MEMBER = (
    "invalid_json",
    "missing_required_parameter",
    "invalid_api_key",
    "model_not_found",
    "unknown_url",
    "request_too_large",
    "queue_full",
)
"""Codes of refusals before a member is known, pre-created."""


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. Counters end in ``_total``, times are seconds, sizes bytes."""

    name: str
    kind: str
    """counter | gauge | histogram."""
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


RESIDENT = Family(
    "modelpool_resident",
    "gauge",
    "1 for the member that holds the slot of its pool and can serve, else 0.",
    ("pool", "member"),
)
HELD_REQUESTS = Family(
    "modelpool_held_requests",
    "gauge",
    "Requests that wait for their member now.",
    ("pool", "member"),
)
OLDEST_HOLD = Family(
    "modelpool_oldest_hold_seconds",
    "gauge",
    "Age of the longest waiting request, 0 when none waits.",
    ("pool", "member"),
)
HELD_BYTES = Family(
    "modelpool_held_bytes",
    "gauge",
    "Bytes of request bodies kept in memory and spool now.",
)
IN_FLIGHT = Family(
    "modelpool_in_flight",
    "gauge",
    "Requests the member works on now; each is a lease that keeps it resident.",
    ("pool", "member"),
)
REQUESTS = Family(
    "modelpool_requests_total",
    "counter",
    "Finished requests. code is ours where we answered, the status class where the member did. "
    "pool is empty for upstreams.",
    ("pool", "member", "outcome", "code"),
)
HOLD_SECONDS = Family(
    "modelpool_hold_seconds",
    "histogram",
    "Time from arrival until a request was granted, refused or left by its client; a request "
    "that was granted at once counts too.",
    ("pool", "member", "outcome"),
    HOLD_BUCKETS,
)
FIRST_BYTE_SECONDS = Family(
    "modelpool_time_to_first_byte_seconds",
    "histogram",
    "Time from the grant to the first byte of the answer; time held is not in it.",
    ("pool", "member"),
    FIRST_BYTE_BUCKETS,
)
BUDGET_EXCEEDED = Family(
    "modelpool_budget_exceeded_total",
    "counter",
    "Requests refused because their member did not come within swapBudget or the patience of "
    "the client.",
    ("pool", "member"),
)
SWAPS = Family(
    "modelpool_swaps_total",
    "counter",
    "Completed swaps. from is empty when the slot was.",
    ("pool", "from", "to", "cause"),
)
PHASE_SECONDS = Family(
    "modelpool_swap_phase_seconds",
    "histogram",
    "Duration of the phases of completed swaps: drain, unload, load. A swap into an empty slot "
    "has a load only.",
    ("pool", "phase"),
    PHASE_BUCKETS,
)
SLOT_STATE_SECONDS = Family(
    "modelpool_slot_state_seconds_total",
    "counter",
    "Time the slot spent in each state.",
    ("pool", "state"),
)
OBSTRUCTED = Family(
    "modelpool_slot_obstructed_seconds",
    "gauge",
    "How long the slot has waited for something that was tried in vain, such as the proof that a "
    "member is gone; 0 when nothing is in the way.",
    ("pool",),
)
SWAP_DEFERRED = Family(
    "modelpool_swap_deferred_total",
    "counter",
    "Swaps put off because the engine was busy (PodsBusy) or did not say (IdleCheckFailed).",
    ("pool", "reason"),
)
LOAD_FAILURES_TOTAL = Family(
    "modelpool_load_failures_total",
    "counter",
    "Loads that failed, by reason.",
    ("pool", "member", "reason"),
)
WASTED_LOADS = Family(
    "modelpool_wasted_loads_total",
    "counter",
    "Loads that landed and left again without having served anybody.",
    ("pool", "member"),
)
RESIDENT_LOST = Family(
    "modelpool_resident_lost_total",
    "counter",
    "Residents that ended without our doing.",
    ("pool", "member"),
)
UNLOADS_RETRIED = Family(
    "modelpool_unload_retries_total",
    "counter",
    "Unloads tried again because it could not be proven that the member is gone.",
    ("pool", "member"),
)
RELEASED = Family(
    "modelpool_released_total",
    "counter",
    "Times a pool was emptied on purpose: after idleUnloadAfter or by command.",
    ("pool", "reason"),
)
RESIDENCY_VIOLATIONS = Family(
    "modelpool_residency_violations_total",
    "counter",
    "Times two members of a pool were seen up at once; stays 0.",
    ("pool",),
)
PARSE_ERRORS = Family(
    "modelpool_http_parse_errors_total",
    "counter",
    "Connections on the data port that did not speak proper HTTP.",
)
LOG_LINES_DROPPED = Family(
    "modelpool_log_lines_dropped_total",
    "counter",
    "Log lines given up because whoever reads the log did not keep up.",
)
BUILD_INFO = Family(
    "modelpool_build_info",
    "gauge",
    "Always 1; the labels tell what runs.",
    ("version", "python"),
)

FAMILIES = (
    RESIDENT,
    HELD_REQUESTS,
    OLDEST_HOLD,
    HELD_BYTES,
    IN_FLIGHT,
    REQUESTS,
    HOLD_SECONDS,
    FIRST_BYTE_SECONDS,
    BUDGET_EXCEEDED,
    SWAPS,
    PHASE_SECONDS,
    SLOT_STATE_SECONDS,
    OBSTRUCTED,
    SWAP_DEFERRED,
    LOAD_FAILURES_TOTAL,
    WASTED_LOADS,
    RESIDENT_LOST,
    UNLOADS_RETRIED,
    RELEASED,
    RESIDENCY_VIOLATIONS,
    PARSE_ERRORS,
    LOG_LINES_DROPPED,
    BUILD_INFO,
)
