"""The shapes of load: what is sent, by how many, and what one unit of work is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import bodies
from bodies import KIB

MIB = 1024 * KIB


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of load."""

    name: str
    body: Callable[[], bytes]
    flags: tuple[str, ...]
    """For `native/load`, besides port, body and duration."""
    seconds: float = 2.0
    unit: Literal["answer", "chunk", "first byte"] = "answer"
    """What the figure is per: CPU time per answer or chunk, or the time to the first byte."""
    saturates: bool = True
    """The contender's core is meant to be busy all the time; else the pace is given."""
    not_for: frozenset[str] = field(default_factory=frozenset)
    """Contenders that would take minutes or fall over."""

    def write(self, folder: Path) -> Path:
        """Write the request body below *folder*."""
        return bodies.write(folder, self.name.replace(" ", "-").replace("/", "-"), self.body())


def _closed(connections: int) -> tuple[str, ...]:
    return ("-c", str(connections))


def _streams(connections: int, per_s: int, seconds: float) -> Shape:
    # Streams outlast the window, so that only chunks are paid for in it.
    events = int(per_s * (seconds + 6))
    return Shape(
        f"SSE {connections} x {per_s}/s",
        lambda: bodies.chat(KIB, stream=True, events=events, every_us=1_000_000 // per_s),
        (*_closed(connections), "-s", "-r", "1", "-w", "1"),
        seconds,
        unit="chunk",
        saturates=False,
        not_for=frozenset({"litellm"}) if connections > 100 else frozenset(),
    )


SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("1 KB x 1", lambda: bodies.chat(KIB), _closed(1), saturates=False),
        Shape("1 KB x 16", lambda: bodies.chat(KIB), _closed(16)),
        Shape("1 KB x 64", lambda: bodies.chat(KIB), _closed(64)),
        Shape("1 KB x 256", lambda: bodies.chat(KIB), _closed(256)),
        Shape(
            "1 KB at 300/s",
            lambda: bodies.chat(KIB),
            (*_closed(64), "-R", "300"),
            saturates=False,
            not_for=frozenset({"litellm"}),
        ),
        Shape("100 KB x 16", lambda: bodies.chat(100 * KIB), _closed(16)),
        Shape("4 MB x 4", lambda: bodies.chat(4 * MIB), _closed(4), 3.0),
        Shape(
            "4 MB x 4, model last", lambda: bodies.chat(4 * MIB, model_last=True), _closed(4), 3.0
        ),
        _streams(100, 50, 3.0),
        _streams(1000, 20, 3.0),
        Shape(
            "first SSE byte",
            lambda: bodies.chat(KIB, stream=True, events=10, every_us=5_000),
            (*_closed(16), "-s", "-e", "10"),
            unit="first byte",
            saturates=False,
        ),
    )
}

SHORT = ("1 KB x 16", "1 KB x 64", "100 KB x 16", "SSE 100 x 50/s", "first SSE byte")
"""What `make bench` runs."""
