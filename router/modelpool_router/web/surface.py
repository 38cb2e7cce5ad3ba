"""
What the data port serves, as one immutable value: a reload builds a new one and replaces it whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..core.catalog import Catalog
from ..core.headers import Field
from ..core.spec import MemberName, PoolName
from ..drivers.base import Endpoint
from .exchange import ForwardLimits
from .intake import IntakeLimits


@dataclass(frozen=True, slots=True)
class UpstreamTarget:
    """An upstream that is never swapped."""

    endpoint: Endpoint
    limits: ForwardLimits
    credential: Field | None = None


@dataclass(frozen=True, slots=True)
class PoolTarget:
    """What forwarding to members of a pool needs besides the lease."""

    swap_budget_s: float
    limits: ForwardLimits


@dataclass(frozen=True, slots=True)
class Keepalive:
    """`holdKeepalive` and its times."""

    mode: Literal["comment", "chunk"]
    after_s: float
    every_s: float


@dataclass(frozen=True, slots=True)
class Surface:
    """Names, limits and targets in force."""

    catalog: Catalog
    pools: Mapping[PoolName, PoolTarget]
    upstreams: Mapping[MemberName, UpstreamTarget]
    intake: IntakeLimits = field(default_factory=IntakeLimits)
    keepalive: Keepalive | None = None
    passthrough: bool = False
