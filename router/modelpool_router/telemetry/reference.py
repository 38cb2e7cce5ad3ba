"""
The manual page of the metrics, written from their declarations.

``python -m modelpool_router.telemetry.reference > docs/metrics.md``; a test compares the two.
"""

from __future__ import annotations

from ..core.view import SlotState
from . import families as f

_HEAD = """\
# Metrics

<!-- Written by `python -m modelpool_router.telemetry.reference`; do not edit. -->

`GET /metrics` on the admin port (`127.0.0.1:9090` unless configured otherwise), in the Prometheus
or the OpenMetrics text format. Every series exists from the start, at 0. Labels are names from
the configuration or words from the lists below, never anything that a client sent. Gauges are
read from the pools at the moment of the scrape. A reload keeps the counts of what stays and
removes the series of what is gone. `process_*` (memory, CPU time, file descriptors) are there too.
"""

_QUESTIONS = (
    ("Who holds the slot?", "modelpool_resident == 1"),
    ("How often does it change hands, an hour?", "3600 * rate(modelpool_swaps_total[15m])"),
    ("What do swaps cost, by phase?", "rate(modelpool_swap_phase_seconds_sum[1h])"),
    (
        "What share of the time is it serving?",
        'rate(modelpool_slot_state_seconds_total{state="resident"}[15m])',
    ),
    (
        "How long do requests wait?",
        "histogram_quantile(0.95, sum by (member, le) (rate(modelpool_hold_seconds_bucket[15m])))",
    ),
    (
        "Are clients turned away?",
        'sum by (member, code) (rate(modelpool_requests_total{outcome="refused"}[5m])) > 0',
    ),
    ("Is the swap budget too small?", "rate(modelpool_budget_exceeded_total[15m]) > 0"),
    ("Do we load for nobody?", "rate(modelpool_wasted_loads_total[1h]) > 0"),
    ("Must somebody be woken?", "increase(modelpool_residency_violations_total[5m]) > 0"),
)


def reference() -> str:
    """Return the page as Markdown."""
    parts = {"Series": _series(), "Labels": _labels(), "Questions and their queries": _questions()}
    lines = [_HEAD]
    for title, rows in parts.items():
        lines += [f"## {title}", "", *rows, ""]
    return "\n".join(lines)


def _questions() -> list[str]:
    rows = [f"| {question} | `{query}` |" for question, query in _QUESTIONS]
    return ["| question | query |", "|---|---|", *rows]


def _series() -> list[str]:
    rows = ["| name | type | labels | meaning |", "|---|---|---|---|"]
    for family in f.FAMILIES:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        meaning = family.help
        if family.buckets:
            bounds = ", ".join(f"{bound:g}" for bound in family.buckets)
            meaning += f" Buckets: {bounds}."
        rows.append(f"| `{family.name}` | {family.kind} | {labels} | {meaning} |")
    return rows


def _labels() -> list[str]:
    causes = dict.fromkeys((*f.CAUSES_FROM_EMPTY, *f.CAUSES_OF_DISPLACING))
    codes = dict.fromkeys(code for codes in f.CODES_WITH_MEMBER.values() for code in codes)
    rows = [
        ("pool", f"a configured pool; empty for upstreams; `{f.UNKNOWN}` before one is known"),
        ("member", f"a configured member or upstream; `{f.UNKNOWN}` before one is known"),
        ("from, to", "members; empty = nobody"),
        ("outcome", _words(f.OUTCOMES)),
        ("code", f"{_words(tuple(codes))}, and the other error codes of the data port"),
        ("cause", _words(tuple(causes))),
        ("phase", _words(f.PHASES)),
        ("state", _words(tuple(map(str, SlotState)))),
        (
            "reason",
            f"of a deferred swap {_words(f.DEFER_REASONS)}; of a failed load "
            f"{_words(f.LOAD_FAILURES)} and rarer ones; of a release {_words(f.RELEASE_REASONS)}; "
            f"else `{f.OTHER}`",
        ),
    ]
    return ["| label | values |", "|---|---|", *(f"| {name} | {values} |" for name, values in rows)]


def _words(words: tuple[str, ...]) -> str:
    return ", ".join(f"`{word}`" for word in words)


if __name__ == "__main__":
    print(reference(), end="")
