"""
What is wrong with a configuration, in a form that people can act on.

A `Problem` names the place, the reason and the way out. All problems of a file are found before
one `ConfigError` is raised, so that nobody has to mend a file one error at a time.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, and how to put it right."""

    file: str
    """Path of the file as it was given, or ``environment variable X``, or ``flag --x``."""
    line: int | None
    """Counts from 1; None where there is no line, as in an environment variable."""
    column: int | None
    """Counts from 1."""
    field: str
    """Path of the setting in YAML names: ``pools[0].members[1].command``; empty = whole file."""
    reason: str
    """What is wrong, as the end of "<field>: ..."."""
    way_out: str
    """What to do about it; a sentence without its full stop."""

    @property
    def place(self) -> str:
        """Return ``file:line:column``, as editors understand it."""
        parts = [self.file]
        if self.line is not None:
            parts.append(str(self.line))
            if self.column is not None:
                parts.append(str(self.column))
        return ":".join(parts)

    def __str__(self) -> str:
        """Return the problem on two lines: place and reason, then the way out."""
        subject = f"{self.field}: " if self.field else ""
        return f"{self.place}: {subject}{self.reason}\n    way out: {self.way_out}"


class ConfigError(Exception):
    """The configuration cannot be used. Carries every problem that was found."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__(str(self))

    def __str__(self) -> str:
        """Return all problems, in the order of the file, under one line that counts them."""
        count = len(self.problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        return "\n".join([f"{head} in the configuration:", *map(str, self.problems)])


def suggestion(word: str, known: Sequence[str]) -> str | None:
    """Return the known word that *word* was probably meant to be, or None."""
    # snake_case and kebab-case are the usual slips: compare without their separators first.
    plain = {name.casefold(): name for name in known}
    squeezed = word.replace("_", "").replace("-", "").casefold()
    if squeezed in plain:
        return plain[squeezed]
    close = difflib.get_close_matches(squeezed, list(plain), n=1, cutoff=0.6)
    return plain[close[0]] if close else None
