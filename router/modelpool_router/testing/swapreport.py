"""
A trace as a page: who had the slot when, who waited, for how long. HTML and SVG, nothing else.

Everything is drawn from what clients saw (`workload.Result`) and, where the members' own log of
events is at hand (the fake member writes one), from when each was started, ready and gone.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .workload import Outcome, Result, Summary, summarise, turns

WIDTH, LEFT, ROW = 1100, 130, 26
_COLOURS = ("#2f6db5", "#c8553d", "#4c9f70", "#8e5aa8", "#b8862b", "#3b8ea5")


_ENDS = ("stopped", "crash", "exit_at_start", "exit_while_loading")


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a member's life; seconds from the start of the trace."""

    member: str
    kind: str
    """load | resident | unload"""
    begin_s: float
    end_s: float


def phases(events: Iterable[Mapping[str, object]], start: float, end_s: float) -> list[Phase]:
    """
    Return what the event log of fake members tells.

    Args:
        events: ``{"t": monotonic, "event": "start" | "ready" | "term" | "stopped", "name": ...}``
            and others, which are passed over.
        start: Monotonic time of the start of the trace.
    """
    found: list[Phase] = []
    open_since: dict[str, tuple[str, float]] = {}
    following = {"start": "load", "ready": "resident", "term": "unload"}
    for event in events:
        at, name = float(str(event["t"])) - start, str(event["name"])
        kind = following.get(str(event["event"]))
        if kind is None and event["event"] not in _ENDS:
            continue
        before = open_since.pop(name, None)
        if before is not None:
            found.append(Phase(name, before[0], before[1], at))
        if kind is not None:
            open_since[name] = (kind, at)
    found += [Phase(name, kind, at, end_s) for name, (kind, at) in open_since.items()]
    return [phase for phase in found if phase.end_s > 0]


def page(
    title: str,
    result: Result,
    *,
    known: Sequence[Phase] = (),
    budget_s: float | None = None,
    notes: Sequence[str] = (),
) -> str:
    """
    Return a whole HTML page.

    Args:
        known: Phases of members; without, turns are drawn from the answers.
        budget_s: Line in the curve of waiting times: the longest hold that the router allows.
    """
    summary = summarise(result)
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>",
        f"<h1>{html.escape(title)}</h1>",
        *(f"<p>{html.escape(note)}</p>" for note in notes),
        _table(summary, result),
        "<h2>Who had the slot</h2><p>Bars: a member's life. Thin lines: a request from its sending "
        "to its first token (grey, held) and on to its end (coloured); red: it failed.</p>",
        _timeline(result, known),
        "<h2>How long requests waited for their first token</h2>",
        _curve(result.outcomes, budget_s),
        "<h2>Waiting times</h2>",
        _histogram(result.outcomes),
        "</html>",
    ]
    return "\n".join(parts)


_STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1140px;padding:0 1rem;"
    "color:#222}table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:.2rem .7rem;"
    "text-align:right}svg{background:#fafafa;border:1px solid #ddd}text{font:12px sans-serif}"
)


def _table(summary: Summary, result: Result) -> str:
    failed = ", ".join(f"{count} {code}" for code, count in sorted(summary.failed.items())) or "0"
    cells = (
        ("requests", summary.requests),
        ("served", summary.served),
        ("failed", failed),
        ("swaps", summary.swaps),
        ("thrash", f"{summary.thrash:.0%}"),
        ("first token p50", f"{summary.first_p50_s:.2f} s"),
        ("p95", f"{summary.first_p95_s:.2f} s"),
        ("longest", f"{summary.first_max_s:.2f} s"),
        ("served per minute", f"{summary.per_minute:.1f}"),
        ("took", f"{result.took_s:.1f} s"),
        ("seed", result.workload.seed),
    )
    head = "".join(f"<th>{html.escape(name)}</th>" for name, _ in cells)
    row = "".join(f"<td>{html.escape(str(value))}</td>" for _, value in cells)
    return f"<table><tr>{head}</tr><tr>{row}</tr></table>"


class _Axis:
    """Seconds to pixels, with ticks."""

    def __init__(self, longest_s: float, height: int) -> None:
        self.longest_s = max(longest_s, 1e-3)
        self.height = height

    def x(self, seconds: float) -> float:
        """Return the place of a time."""
        return LEFT + (WIDTH - LEFT - 10) * min(max(seconds, 0.0), self.longest_s) / self.longest_s

    def ticks(self) -> list[str]:
        """Return lines and labels at round times."""
        step = 1.0
        for step in (0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300):
            if self.longest_s / step <= 14:
                break
        lines = []
        for number in range(int(self.longest_s / step) + 1):
            x = self.x(number * step)
            lines.append(_line(x, 0, x, self.height - 16, "#ddd"))
            lines.append(f"<text x='{x:.1f}' y='{self.height - 4}'>{number * step:g} s</text>")
        return lines


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> str:
    return (
        f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{colour}' "
        f"stroke-width='{width}'/>"
    )


def _svg(height: int, parts: Iterable[str]) -> str:
    return f"<svg width='{WIDTH}' height='{height}'>" + "".join(parts) + "</svg>"


def _timeline(result: Result, known: Sequence[Phase]) -> str:
    models = list(result.workload.models)
    lanes: dict[str, list[tuple[Outcome, int]]] = {model: [] for model in models}
    tops: list[float] = []
    for outcome in result.outcomes:
        # the first lane that is free again
        lane = next((n for n, end in enumerate(tops) if end <= outcome.sent_s), len(tops))
        tops[lane : lane + 1] = [outcome.ended_s]
        lanes.setdefault(outcome.model, []).append((outcome, lane))
    height = ROW * len(models) + 5 * len(tops) + 40
    axis = _Axis(result.took_s, height)
    parts = axis.ticks()
    bars = list(known) or [
        Phase(turn.model, "resident", turn.begin_s, turn.end_s) for turn in turns(result)
    ]
    shade = {"load": 0.35, "resident": 0.85, "unload": 0.2}
    for row, model in enumerate(models):
        colour = _COLOURS[row % len(_COLOURS)]
        y = row * ROW + 4
        parts.append(f"<text x='4' y='{y + 14}'>{html.escape(model)}</text>")
        for phase in bars:
            if phase.member == model:
                begin, end = axis.x(phase.begin_s), axis.x(phase.end_s)
                parts.append(
                    f"<rect x='{begin:.1f}' y='{y}' width='{max(end - begin, 0.5):.1f}' "
                    f"height='{ROW - 8}' fill='{colour}' opacity='{shade.get(phase.kind, 0.5)}'>"
                    f"<title>{html.escape(model)} {phase.kind} {phase.begin_s:.2f}-"
                    f"{phase.end_s:.2f} s</title></rect>"
                )
        for outcome, lane in lanes.get(model, []):
            parts += _request(axis, outcome, ROW * len(models) + 12 + 5 * lane, colour)
    return _svg(height, parts)


def _request(axis: _Axis, outcome: Outcome, y: float, colour: str) -> list[str]:
    sent, end = axis.x(outcome.sent_s), axis.x(outcome.ended_s)
    if not outcome.served:
        return [_line(sent, y, end, y, "#d00", 3)]
    first = axis.x(outcome.first_s or outcome.ended_s)
    return [_line(sent, y, first, y, "#999", 1.5), _line(first, y, end, y, colour, 3)]


def _waits(outcomes: Sequence[Outcome]) -> list[tuple[float, float]]:
    return [(each.sent_s, (each.first_s or each.ended_s) - each.sent_s) for each in outcomes]


def _curve(outcomes: Sequence[Outcome], budget_s: float | None) -> str:
    """Draw each request as a point: when it was sent, how long it waited."""
    height = 220
    waits = _waits(outcomes)
    longest = max((wait for _, wait in waits), default=1.0)
    shown = budget_s if budget_s is not None and budget_s < 4 * longest else None
    top = max(longest, shown or 0.0, 1e-3) * 1.1
    axis = _Axis(max((at for at, _ in waits), default=1.0), height)

    def y(seconds: float) -> float:
        return (height - 20) * (1 - seconds / top)

    parts = axis.ticks()
    parts.append(f"<text x='4' y='14'>{top:.1f} s</text>")
    for outcome, (at, wait) in zip(outcomes, waits, strict=True):
        colour = "#2f6db5" if outcome.served else "#d00"
        parts.append(
            f"<circle cx='{axis.x(at):.1f}' cy='{y(wait):.1f}' r='3' fill='{colour}'>"
            f"<title>{html.escape(outcome.model)}: {wait:.2f} s {html.escape(outcome.code)}"
            "</title></circle>"
        )
    if shown is not None:
        parts.append(_line(LEFT, y(shown), WIDTH, y(shown), "#d00", 1.5))
        parts.append(f"<text x='4' y='{y(shown) + 4:.1f}'>budget {shown:g} s</text>")
    elif budget_s is not None:
        parts.append(f"<text x='4' y='32'>budget {budget_s:g} s: far above</text>")
    return _svg(height, parts)


def _histogram(outcomes: Sequence[Outcome]) -> str:
    bounds = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
    counts = [0] * (len(bounds) + 1)
    for _, wait in _waits(outcomes):
        counts[sum(wait > bound for bound in bounds)] += 1
    height, most = 200, max(counts, default=1) or 1
    width = (WIDTH - LEFT) / len(counts)
    parts = []
    for number, count in enumerate(counts):
        tall = (height - 40) * count / most
        x = LEFT + number * width
        label = f"to {bounds[number]:g} s" if number < len(bounds) else "more"
        parts.append(
            f"<rect x='{x:.1f}' y='{height - 20 - tall:.1f}' width='{width - 6:.1f}' "
            f"height='{tall:.1f}' fill='#2f6db5'/>"
            f"<text x='{x:.1f}' y='{height - 4}'>{label}</text>"
            f"<text x='{x:.1f}' y='{height - 24 - tall:.1f}'>{count or ''}</text>"
        )
    return _svg(height, parts)
