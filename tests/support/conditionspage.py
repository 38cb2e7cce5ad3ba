"""
The page of conditions as data, and a check that what the operator writes stands on it.

The tables are read by their headings: a kind, below it its conditions, phases, columns and Events.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from memcluster import Write
from modelpool_kube.kinds import EVENTS, Json

PAGE = Path(__file__).parents[2] / "docs" / "conditions.md"
_WORDS = re.compile("`([^`]+)`")


@dataclass(frozen=True, slots=True)
class KindOnPage:
    """What the page says of one kind."""

    conditions: dict[str, set[tuple[str, str]]] = field(default_factory=dict)
    """Status and reason, by type."""
    phases: dict[str, list[str]] = field(default_factory=dict)
    """By heading."""
    columns: list[tuple[str, str, bool]] = field(default_factory=list)
    """Name, what it shows, and whether only wide output has it."""
    events: dict[str, str] = field(default_factory=dict)
    """Type of each Event, by reason."""

    @property
    def reasons(self) -> set[str]:
        """Reasons of all conditions."""
        return {reason for pairs in self.conditions.values() for _, reason in pairs}


@cache
def kinds() -> dict[str, KindOnPage]:
    """Return what the page says, by kind."""
    found: dict[str, KindOnPage] = {}
    kind, section = "", ""
    condition = ""
    for line in PAGE.read_text("utf-8").splitlines():
        if line.startswith("## "):
            kind, section = line.removeprefix("## "), ""
            found[kind] = KindOnPage()
        elif line.startswith("### "):
            section = line.removeprefix("### ")
        elif section and line.startswith("| ") and "|---" not in line:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            words = [_WORDS.findall(cell) for cell in cells]
            on_page = found[kind]
            if section == "Conditions" and cells[1] != "status":
                condition = words[0][0] if words[0] else condition
                pairs = on_page.conditions.setdefault(condition, set())
                for status in cells[1].split(", "):
                    pairs |= {(status, reason) for reason in words[2] if reason != "Stalled"}
                if "any reason of `Stalled`" in cells[2]:
                    pairs.add(("False", "*"))
            elif section.startswith("Phases") and words[0]:
                on_page.phases.setdefault(section, []).append(words[0][0])
            elif section == "Columns" and words[0]:
                shows = words[1][0] if words[1] else ""
                on_page.columns.append((words[0][0], shows, cells[2] == "yes"))
            elif section == "Events" and words[0]:
                on_page.events.update(dict.fromkeys(words[0], cells[1]))
    for each in found.values():
        for pairs in each.conditions.values():
            if ("False", "*") in pairs:
                pairs.remove(("False", "*"))
                bad = {reason for status, reason in each.conditions["Stalled"] if status == "True"}
                pairs |= {("False", reason) for reason in bad}
    return found


def check_write(write: Write) -> None:
    """
    See that *write* tells nothing that is not on the page; for `MemCluster.after_write`.

    Raises:
        AssertionError: a condition or an Event of it is not there.
    """
    if write.after is None:
        return
    if write.kind == EVENTS:
        unknown = [*_unknown_event(write.after)]
    elif write.verb == "status" and write.kind.kind in kinds():
        unknown = [*_unknown_conditions(write.kind.kind, write.after)]
    else:
        return
    assert not unknown, f"{PAGE.name} lacks {', '.join(unknown)}"


def _unknown_event(obj: Json) -> Iterator[str]:
    kind = str((obj.get("regarding") or {}).get("kind"))
    on_page = kinds().get(kind)
    if on_page is not None and on_page.events.get(obj["reason"]) != obj["type"]:
        yield f"the Event {obj['reason']} ({obj['type']}) of {kind}"


def _unknown_conditions(kind: str, obj: Json) -> Iterator[str]:
    on_page = kinds()[kind]
    for each in (obj.get("status") or {}).get("conditions") or []:
        pair = (each["status"], each["reason"])
        if pair not in on_page.conditions.get(each["type"], set()):
            yield f"{each['type']}={pair[0]} with {pair[1]} of {kind}"
