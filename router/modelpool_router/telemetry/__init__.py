"""
What the router tells about itself: metrics, log lines, events.

Nothing here changes what happens. Counters are plain numbers that are rendered when somebody
scrapes, log lines are written by a thread of their own, events wait in bounded queues: whoever
listens badly never slows a request down.
"""

from __future__ import annotations

from .events import Event, EventHub, Subscription, SubscriptionsFull
from .logs import FinishedRequest, Logs, LogWriter, configure_logs
from .metrics import Metrics, Served

__all__ = [
    "Event",
    "EventHub",
    "FinishedRequest",
    "LogWriter",
    "Logs",
    "Metrics",
    "Served",
    "Subscription",
    "SubscriptionsFull",
    "configure_logs",
]
