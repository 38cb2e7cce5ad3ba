"""An exchange that somebody began and somebody else goes on with."""

from __future__ import annotations

from dataclasses import dataclass

from ..runtime.leases import LeaseScope
from .faults import ExchangeError
from .upstream import UpstreamConnection


@dataclass(frozen=True, slots=True)
class Begun:
    """How far the short way got (`short`); `dispatch` and `forward` go on from there."""

    arrived_at: float
    scope: LeaseScope
    """Granted."""
    connection: UpstreamConnection
    """The request was sent on it; the head of its answer is there unless there was an error."""
    error: ExchangeError | None
    """What ended the exchange before a byte of an answer went to the client."""
