"""
How pools, members and what happens to them are put into words on a terminal.

Pure: JSON of the admin port in, text out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

View = Mapping[str, Any]
"""A pool as ``/api/v1/state`` shows it."""


def seconds_text(seconds: float | None) -> str:
    """Return e.g. ``0.4 s``, ``41 s``, ``3m05s``, ``2h10m``; ``-`` for None."""
    if seconds is None:
        return "-"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def count_text(number: int, noun: str) -> str:
    """Return e.g. ``1 stream``, ``3 streams``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def pool_headline(view: View) -> str:
    """Return one line that says who holds the slot and what comes next."""
    since = seconds_text(view["since_s"])
    match view["state"]:
        case "resident":
            told = f"{view['resident']} resident for {since}"
            if view["target"] and view["target"] != view["resident"]:
                told += f", next {view['target']}"
            if view["deferred_reason"]:
                told += f", swap put off ({view['deferred_reason']})"
            elif view["admission"] != "open":
                work = count_text(view["in_flight"], "stream")
                told += f", drains {work}" if view["in_flight"] else ", about to leave"
        case "loading":
            told = f"loading {view['target']} for {seconds_text(view['load_elapsed_s'])}"
            if view["load_expected_s"] is not None:
                told += f" of about {seconds_text(view['load_expected_s'])}"
        case "unloading":
            told = f"unloading {view['incumbent']} for {since}"
            if view["target"]:
                told += f", next {view['target']}"
        case "cold":
            told = f"empty for {since}" + (", on purpose" if view["released"] else "")
        case other:
            told = f"{other} for {since}"
    notes = [
        note for note, on in (("paused", view["paused"]), ("stopping", view["stopping"])) if on
    ]
    if view["withheld"]:
        notes.append(f"slot withheld: {view['withheld']}")
    return told + "".join(f"; {note}" for note in notes)


def obstacle_lines(view: View) -> list[str]:
    """Return what stands in the way of a pool and the way out; no lines when nothing does."""
    obstacle = view.get("obstacle")  # an older router does not tell
    if obstacle is None:
        return []
    tries = f"{obstacle['tries']} {'try' if obstacle['tries'] == 1 else 'tries'}"
    return [
        f"waits for {obstacle['waits_for']}, for {seconds_text(obstacle['since_s'])} and {tries}",
        f"last error: {short_error(obstacle['error'])}",
        f"way out: {obstacle['way_out']}",
    ]


def load_share(view: View) -> float | None:
    """Return how far the running load is, 0..0.99; None when none runs."""
    if view["state"] != "loading" or view["load_elapsed_s"] is None:
        return None
    expected = view["load_expected_s"] or 0.0
    if expected <= 0:
        return 0.0
    # Never full before it has landed: an estimate is not a promise.
    return float(min(view["load_elapsed_s"] / expected, 0.99))


def bar(share: float, width: int = 20) -> str:
    """Return a bar of *width* characters."""
    full = int(share * width)
    return "#" * full + "-" * (width - full)


def member_row(member: View) -> tuple[str, ...]:
    """Return the cells of one member, as `MEMBER_HEADER` names them."""
    load = seconds_text(member["load_estimate_s"]) if member["load_measured"] else "not measured"
    error = short_error(str(member["last_error"]))
    if member["backoff_s"] is not None:
        error = f"backed off for {seconds_text(member['backoff_s'])}: {error}"
    return (
        str(member["name"]),
        str(member["status"]),
        f"{member['in_flight']}/{member['parallel']}",
        str(member["held"]),
        seconds_text(member["oldest_hold_s"]),
        load,
        error,
    )


def short_error(error: str) -> str:
    """Return an error on one line: how a member ended and the last that it said."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return ": ".join([lines[0], lines[-1]]) if len(lines) > 1 else "".join(lines)


MEMBER_HEADER = ("MEMBER", "STATUS", "IN FLIGHT", "HELD", "OLDEST HOLD", "LOAD TIME", "LAST ERROR")


def plain_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table for pipes and files: columns by spaces, no colour, nothing cut off."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, *rows]
    ]
    return "\n".join(lines)


def plain_state(state: Mapping[str, Any]) -> str:
    """Return the whole state for pipes and files."""
    blocks = []
    for view in state["pools"]:
        rows = [member_row(member) for member in view["members"]]
        lines = [f"{view['name']}: {pool_headline(view)}"]
        lines += [f"  {line}" for line in obstacle_lines(view)]
        blocks.append("\n".join((*lines, plain_table(MEMBER_HEADER, rows), "")))
    return "\n".join(blocks) if blocks else "no pools\n"


def event_line(kind: str, event: Mapping[str, Any]) -> tuple[str, str] | None:
    """
    Return (member, what happened) for one event of ``/api/v1/events``.

    None for events that are only of use to machines.
    """
    fields = event.get("fields", {})
    member = str(fields.get("member") or fields.get("target") or "")
    match kind:
        case "state_changed":
            return _state_line(event, fields)
        case "swap_started":
            source = fields.get("source")
            behind = f"{source} -> {member}" if source else f"into the empty slot: {member}"
            waiting = count_text(int(fields.get("waiting", 0)), "request")
            return member, f"swap       {behind} ({fields.get('cause')}), {waiting} waiting"
        case "swap_completed":
            parts = [
                f"{name} {seconds_text(float(fields[key]))}"
                for name, key in (("drain", "drain_s"), ("unload", "unload_s"), ("load", "load_s"))
                if fields.get(key)
            ]
            granted = count_text(int(fields.get("granted", 0)), "request")
            return member, f"resident   {', '.join(parts)}; {granted} granted"
        case "swap_deferred":
            retry = seconds_text(float(fields.get("retry_s", 0)))
            return member, f"put off    {fields.get('reason')}, next try in {retry}"
        case "load_failed":
            return member, f"failed     {_why_text(fields)}"
        case "unload_retried":
            return member, f"unload     not proven gone, tried again: {_why_text(fields)}"
        case "observe_failed":
            return member, f"start      cannot see what is up, tried again: {_why_text(fields)}"
        case "resident_lost":
            return member, f"lost       {_why_text(fields)}"
        case "turn_ended":
            return member, f"drain      admits nobody any more ({fields.get('reason')})"
        case "turn_reopened":
            return member, "open       nobody waits for another member any more"
        case "load_wasted":
            return member, "wasted     left again without having served anybody"
        case "released":
            return member, f"released   {fields.get('reason')}"
        case _:
            return None


def _state_line(event: Mapping[str, Any], fields: Mapping[str, Any]) -> tuple[str, str] | None:
    member = str(fields.get("member", ""))
    match fields.get("state"):
        case "loading":
            view = event.get("view") or {}
            expected = view.get("load_expected_s")
            about = "" if expected is None else f"takes about {seconds_text(expected)}"
            return member, f"loading    {about}".rstrip()
        case "unloading":
            return member, "unloading"
        case "cold":
            return member, "slot empty"
        case _:
            return None


def _why_text(fields: Mapping[str, Any]) -> str:
    reason, detail = str(fields.get("reason", "")), short_error(str(fields.get("detail", "")))
    return f"{reason}: {detail}" if reason and detail else reason or detail
