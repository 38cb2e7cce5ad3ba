"""
Counting, and showing the counts to Prometheus.

Counters and histograms are plain numbers in dictionaries, because a request must not pay for
being counted; they become samples when somebody scrapes. Gauges are not kept at all: they are
read from the views of the pools at the scrape, so they cannot drift from what the pools do.

Everything here belongs to the event loop's thread, the scrape included.
"""

from __future__ import annotations

import platform
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder

from ..core.commands import Note, NoteKind
from ..core.spec import HoldLedger, MemberName, PoolName
from ..core.view import PoolView, SlotState
from . import families as f

Labels = tuple[str, ...]

MAX_CODES = 64
MAX_REASONS = 64
"""Codes and reasons are words of our own code; the bounds hold even if one day one were not."""
_WORD = re.compile(r"[A-Za-z][A-Za-z_]{0,39}")


class Histogram:
    """Counts of one series: *counts* per bucket (the last one is +Inf), and the sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one *value*; a bucket holds what is at most its bound."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Return (upper bound, values up to it) as the exposition format wants them."""
        running = 0
        buckets: list[tuple[str, float]] = []
        bounds = (*(str(float(bound)) for bound in self.bounds), "+Inf")
        for bound, count in zip(bounds, self.counts, strict=True):
            running += count
            buckets.append((bound, running))
        return buckets


class Served:
    """Where the usual requests of one member are counted; see `Metrics.served`."""

    __slots__ = ("first_bytes", "holds", "key")

    def __init__(self, key: Labels, holds: Histogram, first_bytes: Histogram) -> None:
        self.key = key
        self.holds = holds
        self.first_bytes = first_bytes


class Metrics:
    """All series of one router, in a registry of its own."""

    def __init__(
        self,
        pools: Mapping[PoolName, Sequence[MemberName]],
        upstreams: Sequence[str],
        *,
        version: str = "",
    ) -> None:
        self._version = version
        self._views: Callable[[], Sequence[PoolView]] = tuple
        self._ledger = HoldLedger()
        self._lines_dropped: Callable[[], int] = int
        self._counters: dict[f.Family, dict[Labels, float]] = {
            family: {} for family in f.FAMILIES if family.kind == "counter"
        }
        self._histograms: dict[f.Family, dict[Labels, Histogram]] = {
            family: {} for family in f.FAMILIES if family.kind == "histogram"
        }
        # The three that every request touches, without a look-up of the family.
        self._requests = self._counters[f.REQUESTS]
        self._holds = self._histograms[f.HOLD_SECONDS]
        self._first_bytes = self._histograms[f.FIRST_BYTE_SECONDS]
        self._codes: dict[str | int, str] = {"": "none"}
        for codes in (*f.CODES_WITH_MEMBER.values(), f.CODES_WITHOUT_MEMBER):
            self._codes.update((code, code) for code in codes)
        self._reasons = set(f.LOAD_FAILURES)
        self._pools: dict[str, tuple[str, ...]] = {}
        self._targets: set[tuple[str, str]] = set()
        self.reconfigure(pools, upstreams)
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    # What the router calls

    def watch(self, views: Callable[[], Sequence[PoolView]], ledger: HoldLedger) -> None:
        """Read the gauges from here at every scrape."""
        self._views = views
        self._ledger = ledger

    def watch_log(self, lines_dropped: Callable[[], int]) -> None:
        """Read the number of dropped log lines from here at every scrape."""
        self._lines_dropped = lines_dropped

    def request_done(
        self,
        pool: str | None,
        member: str | None,
        outcome: str,
        code: str | int,
        held_s: float | None,
        ttfb_s: float | None,
    ) -> None:
        """
        Count one finished request. Called once for each, takes a few microseconds.

        Args:
            pool: Its pool; empty for an upstream, None when no model was found for it.
            member: Its member or upstream; None likewise.
            outcome: ``served``, ``refused`` (or ``refused:<code>``), ``client_gone``,
                ``upstream_error``.
            code: The stable code of our answer, or the HTTP status that was passed on.
            held_s: From arrival to grant, refusal or departure; None if it never was to be held.
            ttfb_s: From grant to first byte of the answer; None without one.
        """
        if pool is None or member is None:
            pool = member = f.UNKNOWN
        label = self._codes.get(code, "")
        key = (pool, member, outcome, label)
        count = self._requests.get(key)
        if count is None:
            pool, member, outcome, label = key = self._known(pool, member, outcome, code)
            count = self._requests.get(key, 0.0)
        self._requests[key] = count + 1
        if held_s is not None:
            hold = self._holds.get((pool, member, outcome))
            if hold is not None:  # (`observe`, without the call)
                hold.counts[bisect_left(hold.bounds, held_s) if held_s else 0] += 1
                hold.total += held_s
        if ttfb_s is not None:
            first_byte = self._first_bytes.get((pool, member))
            if first_byte is not None:
                first_byte.counts[bisect_left(first_byte.bounds, ttfb_s)] += 1
                first_byte.total += ttfb_s
        if label == "swap_budget_exceeded":
            self._add(f.BUDGET_EXCEEDED, pool, member)

    def served(self, pool: str, member: str, status: int) -> Served | None:
        """Return where to count requests that were answered with *status* without being held."""
        key = (pool, member, "served", self._code(status))
        holds = self._holds.get((pool, member, "served"))
        first_bytes = self._first_bytes.get((pool, member))
        if holds is None or first_bytes is None or key not in self._requests:
            return None
        return Served(key, holds, first_bytes)

    def count(self, served: Served, ttfb_s: float) -> bool:
        """Count one more such request; False, and nothing is done, if the member was removed."""
        counts, key = self._requests, served.key
        count = counts.get(key)
        if count is None:
            return False
        counts[key] = count + 1
        served.holds.counts[0] += 1
        first_bytes = served.first_bytes
        first_bytes.counts[bisect_left(first_bytes.bounds, ttfb_s)] += 1
        first_bytes.total += ttfb_s
        return True

    def note(self, pool: PoolName, note: Note) -> None:
        """Count what a scheduler tells. Pools that are not configured (any more) are ignored."""
        if pool not in self._pools:
            return
        fields = note.fields
        member = self._member(pool, fields.get("member"))
        match note.kind:
            case NoteKind.STATE_CHANGED:
                state = str(fields.get("from_state", ""))
                if (pool, state) in self._counters[f.SLOT_STATE_SECONDS]:
                    self._add(f.SLOT_STATE_SECONDS, pool, state, by=float(fields["seconds"]))
            case NoteKind.SWAP_COMPLETED:
                self._swap_completed(pool, fields)
            case NoteKind.SWAP_DEFERRED:
                self._add(f.SWAP_DEFERRED, pool, _one_of(f.DEFER_REASONS, fields.get("reason")))
            case NoteKind.LOAD_FAILED:
                reason = self._reason(str(fields.get("reason", "")))
                self._add(f.LOAD_FAILURES_TOTAL, pool, member, reason)
            case NoteKind.UNLOAD_RETRIED:
                self._add(f.UNLOADS_RETRIED, pool, member)
            case NoteKind.RESIDENT_LOST:
                self._add(f.RESIDENT_LOST, pool, member)
            case NoteKind.LOAD_WASTED:
                self._add(f.WASTED_LOADS, pool, member)
            case NoteKind.RELEASED:
                self._add(f.RELEASED, pool, _one_of(f.RELEASE_REASONS, fields.get("reason")))
            case NoteKind.SWAP_STARTED | NoteKind.TURN_ENDED | NoteKind.TURN_REOPENED:
                pass  # told by their completion, and by the events
            case NoteKind.OBSERVE_FAILED:
                pass  # told by how long the slot has been obstructed

    def residency_violation(self, pool: PoolName) -> None:
        """Count that two members of *pool* were seen up at once."""
        if pool in self._pools:
            self._add(f.RESIDENCY_VIOLATIONS, pool)

    def parse_error(self) -> None:
        """Count a connection that did not speak proper HTTP."""
        self._add(f.PARSE_ERRORS)

    def reconfigure(
        self, pools: Mapping[PoolName, Sequence[MemberName]], upstreams: Sequence[str]
    ) -> None:
        """
        Take over other pools, members and upstreams.

        What stays keeps its counts, what is gone loses its series, what is new starts at 0.
        """
        self._pools = {str(pool): tuple(map(str, members)) for pool, members in pools.items()}
        self._targets = {(pool, member) for pool, names in self._pools.items() for member in names}
        self._targets |= {("", upstream) for upstream in upstreams}
        for family, counts in self._counters.items():
            wanted = dict.fromkeys(self._initial(family), 0.0)
            for labels, value in counts.items():
                if labels in wanted or self._still_configured(family, labels):
                    wanted[labels] = value
            # In place: request_done keeps references to some of these.
            counts.clear()
            counts.update(wanted)
        for family, cells in self._histograms.items():
            kept = {
                labels: cells.get(labels) or Histogram(family.buckets)
                for labels in self._initial(family)
            }
            cells.clear()
            cells.update(kept)

    # What a scrape calls

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics as text and their content type, as the Accept header asks."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def describe(self) -> Iterator[Metric]:
        """Yield the families without samples, for the registry's table of names."""
        for family in f.FAMILIES:
            yield _empty(family)

    def collect(self) -> Iterator[Metric]:
        """Yield all families with their samples."""
        views = {view.name: view for view in self._views()}
        yield from self._gauges(views)
        for counter, counts in self._counters.items():
            metric = CounterMetricFamily(counter.name, counter.help, labels=counter.labels)
            if counter is f.SLOT_STATE_SECONDS:
                counts = self._state_seconds(views)
            elif counter is f.LOG_LINES_DROPPED:
                counts = {(): float(self._lines_dropped())}
            for labels, value in counts.items():
                metric.add_metric(labels, value)
            yield metric
        for histogram, cells in self._histograms.items():
            times = HistogramMetricFamily(histogram.name, histogram.help, labels=histogram.labels)
            for labels, cell in cells.items():
                times.add_metric(labels, cell.cumulative(), cell.total)
            yield times

    # Private

    def _gauges(self, views: Mapping[PoolName, PoolView]) -> Iterator[Metric]:
        resident, held, oldest, in_flight = (
            GaugeMetricFamily(family.name, family.help, labels=family.labels)
            for family in (f.RESIDENT, f.HELD_REQUESTS, f.OLDEST_HOLD, f.IN_FLIGHT)
        )
        for pool, names in self._pools.items():
            view = views.get(PoolName(pool))
            for name in names:
                member = view.member(MemberName(name)) if view else None
                labels = (pool, name)
                resident.add_metric(labels, int(view is not None and view.resident == name))
                held.add_metric(labels, member.held if member else 0)
                oldest.add_metric(labels, (member.oldest_hold_s or 0.0) if member else 0.0)
                in_flight.add_metric(labels, member.in_flight if member else 0)
        yield from (resident, held, oldest, in_flight)
        yield self._obstructed(views)
        held_bytes = GaugeMetricFamily(f.HELD_BYTES.name, f.HELD_BYTES.help)
        held_bytes.add_metric((), self._ledger.held_bytes)
        yield held_bytes
        build = GaugeMetricFamily(f.BUILD_INFO.name, f.BUILD_INFO.help, labels=f.BUILD_INFO.labels)
        build.add_metric((self._version, platform.python_version()), 1)
        yield build

    def _obstructed(self, views: Mapping[PoolName, PoolView]) -> Metric:
        family = f.OBSTRUCTED
        metric = GaugeMetricFamily(family.name, family.help, labels=family.labels)
        for pool in self._pools:
            view = views.get(PoolName(pool))
            obstacle = view.obstacle if view is not None else None
            metric.add_metric((pool,), 0.0 if obstacle is None else obstacle.since_s)
        return metric

    def _state_seconds(self, views: Mapping[PoolName, PoolView]) -> dict[Labels, float]:
        """Add the state that still lasts to the finished ones."""
        seconds = dict(self._counters[f.SLOT_STATE_SECONDS])
        for view in views.values():
            labels = (str(view.name), str(view.state))
            if labels in seconds:
                seconds[labels] += view.since_s
        return seconds

    def _swap_completed(self, pool: str, fields: Mapping[str, str | float | int]) -> None:
        source = str(fields.get("source", ""))
        if source:
            source = self._member(pool, source)
        target = self._member(pool, fields.get("target"))
        cause = _one_of((*f.CAUSES_FROM_EMPTY, *f.CAUSES_OF_DISPLACING), fields.get("cause"))
        self._add(f.SWAPS, pool, source, target, cause)
        phases = self._histograms[f.PHASE_SECONDS]
        for phase in f.PHASES if source else ("load",):
            phases[pool, phase].observe(float(fields[f"{phase}_s"]))

    def _add(self, family: f.Family, *labels: str, by: float = 1.0) -> None:
        counts = self._counters[family]
        counts[labels] = counts.get(labels, 0.0) + by

    def _member(self, pool: str, name: object) -> str:
        return str(name) if name in self._pools[pool] else f.UNKNOWN

    def _known(
        self, pool: str, member: str, outcome: str, code: str | int
    ) -> tuple[str, str, str, str]:
        """Map a request's labels to allowed ones: the slow path of a combination's first time."""
        outcome, _, told = outcome.partition(":")
        if (pool, member) not in self._targets:
            pool = member = f.UNKNOWN
        return pool, member, _one_of(f.OUTCOMES, outcome), self._code(code or told)

    def _code(self, code: str | int) -> str:
        label = self._codes.get(code)
        if label is not None:
            return label
        if isinstance(code, int) or code.isdecimal():
            status = int(code)
            if not 100 <= status <= 599:
                return f.OTHER
            label = f"{status // 100}xx"
        elif len(set(self._codes.values())) >= MAX_CODES or not _WORD.fullmatch(code):
            return f.OTHER
        else:
            label = code
        self._codes[code] = label
        return label

    def _reason(self, reason: str) -> str:
        if reason not in self._reasons:
            if len(self._reasons) >= MAX_REASONS or not _WORD.fullmatch(reason):
                return f.OTHER
            self._reasons.add(reason)
        return reason

    def _still_configured(self, family: f.Family, labels: Labels) -> bool:
        """Tell whether every pool and member in *labels* exists; the rest comes from lists."""
        named = dict(zip(family.labels, labels, strict=True))
        if "pool" not in named or named["pool"] == f.UNKNOWN:
            return True
        pool = named["pool"]
        if "member" in named:
            return (pool, named["member"]) in self._targets or (
                named["member"] == f.UNKNOWN and pool in self._pools
            )
        if pool not in self._pools:
            return False
        ends = (named.get("from", ""), named.get("to", ""))
        return all(end in ("", f.UNKNOWN, *self._pools[pool]) for end in ends)

    def _initial(self, family: f.Family) -> Iterator[Labels]:
        """Yield the series that exist from the start, so that rate() has a 0 to begin with."""
        pools = self._pools
        members = [(pool, member) for pool, names in pools.items() for member in names]
        match family:
            case f.REQUESTS:
                for named in sorted(self._targets):
                    for outcome, codes in f.CODES_WITH_MEMBER.items():
                        yield from ((*named, outcome, code) for code in codes)
                unknown = (f.UNKNOWN, f.UNKNOWN)
                yield from ((*unknown, "refused", code) for code in f.CODES_WITHOUT_MEMBER)
            case f.HOLD_SECONDS:
                yield from ((*member, outcome) for member in members for outcome in f.OUTCOMES)
            case f.FIRST_BYTE_SECONDS:
                yield from sorted(self._targets)
            case f.SWAPS:
                for pool, target in members:
                    yield from ((pool, "", target, cause) for cause in f.CAUSES_FROM_EMPTY)
                    for source in pools[pool]:
                        if source != target:
                            for cause in f.CAUSES_OF_DISPLACING:
                                yield (pool, source, target, cause)
            case f.PHASE_SECONDS:
                yield from ((pool, phase) for pool in pools for phase in f.PHASES)
            case f.SLOT_STATE_SECONDS:
                yield from ((pool, str(state)) for pool in pools for state in SlotState)
            case f.SWAP_DEFERRED:
                yield from ((pool, reason) for pool in pools for reason in f.DEFER_REASONS)
            case f.RELEASED:
                yield from ((pool, reason) for pool in pools for reason in f.RELEASE_REASONS)
            case f.LOAD_FAILURES_TOTAL:
                yield from ((*member, why) for member in members for why in f.LOAD_FAILURES)
            case f.RESIDENCY_VIOLATIONS:
                yield from ((pool,) for pool in pools)
            case _:
                yield from members if family.labels else [()]


def _one_of(known: Sequence[str], value: object) -> str:
    return str(value) if value in known else f.OTHER


def _empty(family: f.Family) -> Metric:
    match family.kind:
        case "counter":
            return CounterMetricFamily(family.name, family.help, labels=family.labels)
        case "histogram":
            return HistogramMetricFamily(family.name, family.help, labels=family.labels)
        case _:
            return GaugeMetricFamily(family.name, family.help, labels=family.labels)
