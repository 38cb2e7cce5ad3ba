"""What has to hold (must) and what is aimed at (goal): ratios of ours to a peer in the same run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Goal:
    """One row of the table of figures."""

    title: str
    shapes: tuple[str, ...]
    """The worst of them counts; a figure of `hold.py` or `cold.py` has its own name here."""
    peer: str
    must: float
    goal: float
    kind: Literal["cost", "added"] = "cost"
    """*added*: what there is without any router is taken off both sides first."""
    raised: str = ""
    """Bounds of ours that are higher than by default, since the row would meet them."""


PARALLEL = "`parallel`"
CONNECTIONS = "`parallel`, `maxConnections`, `maxHeld`, `maxHeldPerKey`"
SHORT = ("1 KB x 16", "1 KB x 64", "1 KB x 256")
STREAMS = ("SSE 100 x 50/s", "SSE 1000 x 20/s")
BIG = ("4 MB x 4", "4 MB x 4, model last")
REAL_SWAP = "one swap, llama-server"

GOALS = (
    Goal("1 KB request", SHORT, "nginx", 2.5, 1.3, raised=PARALLEL),
    Goal("1 KB request", SHORT, "vllm-router", 0.65, 0.35, raised=PARALLEL),
    Goal("SSE chunk", STREAMS, "nginx", 1.4, 1.0, raised=PARALLEL),
    Goal("first SSE byte added", ("first SSE byte",), "nginx", 4.0, 1.5, "added"),
    Goal("100 KB body", ("100 KB x 16",), "nginx", 3.0, 1.5),
    Goal("4 MB body", BIG, "nginx", 4.0, 2.5),
    Goal(
        "memory, 5,000 held short requests",
        ("hold 5000 x 1 KB",),
        "nginx",
        1.7,
        0.6,
        raised=CONNECTIONS,
    ),
    Goal("memory, 64 held 4 MB requests", ("hold 64 x 4 MB",), "nginx", 1.1, 0.05, raised=PARALLEL),
    Goal("cold start to first answer", ("cold start",), "vllm-router", 1.0, 0.7),
    Goal("swap: last byte of A to first token of B", (REAL_SWAP,), "by hand", 1.1, 1.02),
)
