"""
A trace as a page: who had the slot when, who waited, for how long. HTML and SVG, nothing else.

Everything is drawn from what clients saw (`workload.Result`) and, where somebody told
(`slotwatch`), from the phases of the members; without, from who answered when.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from .slotwatch import Phase
from .workload import Outcome, Result, Summary, summarise, turns

WIDTH, LEFT, ROW = 1100, 130, 26
_COLOURS = ("#2f6db5", "#c8553d", "#4c9f70", "#8e5aa8", "#b8862b", "#3b8ea5")
_FAILED, _HELD = "#d00", "#999"
_SHADES = {"load": 0.35, "resident": 0.9, "drain": 0.6, "unload": 0.2}
"""How strongly each phase of a member is drawn, in the order in which they are explained."""


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
        "<h2>Who had the slot</h2>",
        f"<p>A row per member: {_legend()}. Below, a line per request: grey from its sending to "
        "its first token (held), coloured on to its end; red: it failed.</p>",
        _timeline(result, known),
        "<h2>How long requests were held</h2>",
        "<p>The curve is the age of the oldest request that waits for its first token; each point "
        "is a request, where its wait ended.</p>",
        _curve(result, budget_s),
        "<h2>Waiting times</h2>",
        "<p>Requests by the time to their first token.</p>",
        _histogram(result.outcomes),
        "</html>",
    ]
    return "\n".join(parts)


_STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1140px;padding:0 1rem;"
    "color:#222}table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:.2rem .7rem;"
    "text-align:right}svg{background:#fafafa;border:1px solid #ddd;max-width:100%;height:auto}"
    "text{font:12px sans-serif}.key{display:inline-block;width:1.6em;height:.8em}"
)


def _legend() -> str:
    return ", ".join(
        f"<span class='key' style='background:{_COLOURS[0]};opacity:{shade}'></span> {kind}"
        for kind, shade in _SHADES.items()
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
        return LEFT + (WIDTH - LEFT - 40) * min(max(seconds, 0.0), self.longest_s) / self.longest_s

    def ticks(self) -> list[str]:
        """Return lines and labels at round times."""
        lines = []
        for at in _round_steps(self.longest_s, 14):
            x = self.x(at)
            lines.append(_line(x, 0, x, self.height - 16, "#ddd"))
            lines.append(_text(x, self.height - 4, _seconds(at), "middle"))
        return lines


def _round_steps(longest: float, most: int) -> list[float]:
    """Return 0 and round numbers up to *longest*, at most about *most* of them."""
    steps = [base * 10.0**power for power in range(-3, 4) for base in (1, 2, 5)]
    step = next((step for step in steps if longest / step <= most), steps[-1])
    return [number * step for number in range(int(longest / step) + 1)]


def _seconds(seconds: float) -> str:
    return f"{seconds:g} s"


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> str:
    return (
        f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{colour}' "
        f"stroke-width='{width}'/>"
    )


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = "#222") -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' fill='{colour}'>"
        f"{html.escape(text)}</text>"
    )


def _svg(height: int, parts: Iterable[str]) -> str:
    size = f"width='{WIDTH}' height='{height}' viewBox='0 0 {WIDTH} {height}'"
    return f"<svg xmlns='http://www.w3.org/2000/svg' {size}>" + "".join(parts) + "</svg>"


def _row_of(outcome: Outcome) -> str:
    """Return whose row a request belongs to: who answered it, else whom it asked for."""
    return outcome.member or outcome.model


def _timeline(result: Result, known: Sequence[Phase]) -> str:
    bars = list(known) or [
        Phase(turn.model, "resident", turn.begin_s, turn.end_s) for turn in turns(result)
    ]
    names = {*map(_row_of, result.outcomes), *(bar.member for bar in bars)}
    rows = {name: number for number, name in enumerate(sorted(names))}
    lanes: list[float] = []
    height = ROW * len(rows) + 40
    requests: list[tuple[Outcome, int]] = []
    for outcome in result.outcomes:
        # the first lane that is free again
        lane = next((n for n, end in enumerate(lanes) if end <= outcome.sent_s), len(lanes))
        lanes[lane : lane + 1] = [outcome.ended_s]
        requests.append((outcome, lane))
    height += 5 * len(lanes)
    axis = _Axis(result.took_s, height)
    parts = axis.ticks()
    for name, row in rows.items():
        parts.append(_text(LEFT - 8, row * ROW + 18, _short(name), "end"))
    for bar in bars:
        parts.append(_bar(axis, bar, rows[bar.member]))
    for outcome, lane in requests:
        y = ROW * len(rows) + 12 + 5 * lane
        parts += _request(axis, outcome, y, _colour(rows[_row_of(outcome)]))
    return _svg(height, parts)


def _colour(row: int) -> str:
    return _COLOURS[row % len(_COLOURS)]


def _short(name: str) -> str:
    return name if len(name) <= 18 else f"{name[:17]}\u2026"


def _bar(axis: _Axis, bar: Phase, row: int) -> str:
    begin, end = axis.x(bar.begin_s), axis.x(bar.end_s)
    told = f"{bar.member} {bar.kind} {bar.begin_s:.2f}-{bar.end_s:.2f} s"
    return (
        f"<rect x='{begin:.1f}' y='{row * ROW + 4}' width='{max(end - begin, 0.5):.1f}' "
        f"height='{ROW - 8}' fill='{_colour(row)}' opacity='{_SHADES[bar.kind]}'>"
        f"<title>{html.escape(told)}</title></rect>"
    )


def _request(axis: _Axis, outcome: Outcome, y: float, colour: str) -> list[str]:
    sent, end = axis.x(outcome.sent_s), axis.x(outcome.ended_s)
    if not outcome.served:
        return [_line(sent, y, max(end, sent + 3), y, _FAILED, 3)]
    first = axis.x(outcome.first_s or outcome.ended_s)
    return [_line(sent, y, first, y, _HELD, 1.5), _line(first, y, end, y, colour, 3)]


def _waits(outcomes: Sequence[Outcome]) -> list[tuple[float, float]]:
    """Return when each wait began and ended."""
    return [(each.sent_s, each.first_s or each.ended_s) for each in outcomes]


def oldest_wait(outcomes: Sequence[Outcome]) -> list[tuple[float, float]]:
    """Return the corners of the curve of the oldest wait: (time, its age then)."""
    waits = sorted(_waits(outcomes))
    corners: list[tuple[float, float]] = []
    ended = 0.0
    for begin, end in waits:
        if end <= ended:
            continue  # somebody older waited all the while
        # It is the oldest from its own beginning, or from when those before it were done.
        since = max(begin, ended)
        if begin >= ended:
            corners.append((since, 0.0))
        corners += [(since, since - begin), (end, end - begin), (end, 0.0)]
        ended = end
    return corners


def _curve(result: Result, budget_s: float | None) -> str:
    """Draw the age of the oldest wait, each wait as a point at its end, and the budget."""
    height, outcomes = 240, result.outcomes
    waits = _waits(outcomes)
    longest = max((end - begin for begin, end in waits), default=1.0)
    # A budget far above everything would press the rest flat: it is told instead.
    shown = budget_s if budget_s is not None and budget_s < 4 * longest else None
    top = max(longest, shown or 0.0, 1e-3) * 1.1
    axis = _Axis(result.took_s, height)

    def y(seconds: float) -> float:
        return (height - 20) * (1 - seconds / top)

    parts = axis.ticks()
    for at in _round_steps(top, 6):
        parts.append(_line(LEFT, y(at), WIDTH - 40, y(at), "#ddd"))
        parts.append(_text(LEFT - 8, y(at) + 4, _seconds(at), "end"))
    corners = " ".join(f"{axis.x(at):.1f},{y(age):.1f}" for at, age in oldest_wait(outcomes))
    parts.append(f"<polyline points='{corners}' fill='#2f6db522' stroke='{_HELD}'/>")
    for outcome, (begin, end) in zip(outcomes, waits, strict=True):
        told = f"{outcome.model}: {end - begin:.2f} s {outcome.code}".rstrip()
        parts.append(
            f"<circle cx='{axis.x(end):.1f}' cy='{y(end - begin):.1f}' r='3' "
            f"fill='{_COLOURS[0] if outcome.served else _FAILED}'>"
            f"<title>{html.escape(told)}</title></circle>"
        )
    if shown is not None:
        parts.append(_line(LEFT, y(shown), WIDTH - 40, y(shown), _FAILED, 1.5))
        parts.append(_text(WIDTH - 44, y(shown) - 5, f"budget {shown:g} s", "end", _FAILED))
    elif budget_s is not None:
        parts.append(_text(WIDTH - 44, 14, f"budget {budget_s:g} s: far above", "end", _FAILED))
    return _svg(height, parts)


def _histogram(outcomes: Sequence[Outcome]) -> str:
    bounds = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
    counts, failed = [0] * (len(bounds) + 1), [0] * (len(bounds) + 1)
    for outcome, (begin, end) in zip(outcomes, _waits(outcomes), strict=True):
        place = sum(end - begin > bound for bound in bounds)
        counts[place] += 1
        failed[place] += not outcome.served
    height, most = 200, max(counts, default=1) or 1
    width = (WIDTH - LEFT - 40) / len(counts)
    parts = [_line(LEFT, height - 20, WIDTH - 40, height - 20, "#ddd")]
    for number, count in enumerate(counts):
        x, middle = LEFT + number * width, LEFT + (number + 0.5) * width - 3
        tall, bad = ((height - 44) * each / most for each in (count, failed[number]))
        label = f"to {bounds[number]:g} s" if number < len(bounds) else "more"
        parts += [
            f"<rect x='{x:.1f}' y='{height - 20 - tall:.1f}' width='{width - 6:.1f}' "
            f"height='{tall:.1f}' fill='{_COLOURS[0]}'/>",
            f"<rect x='{x:.1f}' y='{height - 20 - bad:.1f}' width='{width - 6:.1f}' "
            f"height='{bad:.1f}' fill='{_FAILED}'/>",
            _text(middle, height - 4, label, "middle"),
            _text(middle, height - 24 - tall, str(count or ""), "middle"),
        ]
    return _svg(height, parts)
