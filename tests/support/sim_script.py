"""
Scripts of the simulator: everything that will happen to a pool, as plain data.

A `Script` holds all that is random about one schedule: pools, clients, faults, and what the fake
driver answers to its n-th command. So a run is a pure function of its script, a failure is shrunk
by leaving entries out, and what is left can be read. `draw` makes a script from a seed (swarm:
each seed first draws which kinds of fault exist at all and how often); `sim_world` plays it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from modelpool_router.core.spec import Bounds, MemberName, MemberSpec, PoolName, PoolSpec

FAULTS = (
    "adopt_several",
    "adopt_one",
    "bounds_small",
    "cancel_crossing",
    "client_leaves",
    "client_leaves_at_grant",
    "client_retries",
    "death_after_landing",
    "death_busy_or_idle",
    "dispatch_refused",
    "hung",
    "idle_busy",
    "idle_slow",
    "idle_unreachable",
    "load_asked",
    "load_fails",
    "load_hangs",
    "load_slow",
    "loop_stall",
    "patience_short",
    "paused",
    "reconfigured",
    "stale_report",
    "stop_abrupt",
    "unload_asked",
    "unload_fails",
    "withheld",
)


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that a script makes happen in one pool; leaving it out is always legal."""

    pool: int


@dataclass(frozen=True, slots=True)
class Come(Item):
    """A client asks for *member*; it retries *retries* times, as Retry-After says."""

    t: float
    member: MemberName
    patience: float | None
    """Seconds it is ready to wait; None = the pool's swapBudget."""
    service: float
    """How long the answer takes once granted."""
    leave: float | None = None
    """Seconds after the arrival when it goes away, whatever it got by then."""
    leave_at_grant: bool = False
    retries: int = 0
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Answer(Item):
    """What the driver does on its *nth* command of kind *op* for *member*, if not the usual."""

    member: MemberName
    op: str
    """``load``, ``unload``."""
    nth: int
    kind: str
    """``ok``, ``fail``, ``hang``, ``fatal`` (load); ``ok``, ``fail`` (unload)."""
    seconds: float
    leaves: bool = False
    """Something of the member is left after a failed load."""
    crossing: bool = False
    """A hung load that lands in the very moment in which it is cancelled."""
    dies_after: float | None = None
    """Seconds from landing to the end of this life."""
    parallel: int | None = None


@dataclass(frozen=True, slots=True)
class IdleSpell(Item):
    """From *t* for *seconds* idle probes of the pool get *kind*: busy, unreachable, slow."""

    t: float
    seconds: float
    kind: str
    delay: float = 0.0


@dataclass(frozen=True, slots=True)
class Death(Item):
    """Whatever is up dies; the router hears of it *notice* later."""

    t: float
    notice: float
    leaves: bool


@dataclass(frozen=True, slots=True)
class RefuseDispatch(Item):
    """The next *count* grants from *t* on meet a refused connection although the member is up."""

    t: float
    count: int


@dataclass(frozen=True, slots=True)
class Hang(Item):
    """From *t* for *seconds* the resident moves no byte and answers no probe."""

    t: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Say(Item):
    """A person or the platform: load (member), unload, pause, resume, withhold, regain."""

    t: float
    what: str
    member: MemberName | None = None


@dataclass(frozen=True, slots=True)
class Change(Item):
    """The configuration changes: add, remove, remove_resident, default, knobs."""

    t: float
    what: str
    member: MemberName | None = None
    values: tuple[tuple[str, float | int | None], ...] = ()


@dataclass(frozen=True, slots=True)
class Stale(Item):
    """A late report of an epoch, or an answer to a probe, that is long over."""

    t: float
    what: str
    """loaded, load_failed, unloaded, lost, checked, idle, health."""
    age: int


@dataclass(frozen=True, slots=True)
class Stall(Item):
    """The event loop stands still: all that is due meanwhile is handled at the end."""

    t: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Timing:
    """How long the fake platform usually takes."""

    load: float
    unload: float
    probe: float = 0.01


@dataclass(frozen=True, slots=True)
class PoolScript:
    """One pool at the start of a schedule."""

    spec: PoolSpec
    timing: Mapping[MemberName, Timing]
    up: tuple[MemberName, ...] = ()
    prefer: MemberName | None = None
    released: bool = False
    first_ticket: int = 1
    """Tickets are unique over the pools of a router."""


@dataclass(frozen=True, slots=True)
class Script:
    """One whole schedule."""

    seed: int
    profile: str
    pools: tuple[PoolScript, ...]
    items: tuple[Item, ...]
    end: float
    """When the script is over: faults heal, then everything has to settle."""
    stop_abrupt: bool = False
    """Stop at *end* with whatever is held, instead of letting it settle first."""
    bounds: Bounds = field(default_factory=Bounds)
    faults: Mapping[str, int] = field(default_factory=dict)
    """How many of each kind this script contains."""

    def without(self, items: tuple[Item, ...]) -> Script:
        """Return the same schedule with *items* alone."""
        return replace(self, items=items)


def alone(script: Script, pool: int) -> Script:
    """Return the part of *script* that one of its pools plays, as a schedule of its own."""
    return replace(
        script,
        pools=(script.pools[pool],),
        items=tuple(
            replace(item, pool=min(item.pool, 0))
            for item in script.items
            if item.pool in (pool, EVERY_POOL)
        ),
    )


EVERY_POOL = -1
"""`Item.pool` of what hits the whole router (a stalled loop)."""

PROFILES = (("swarm", 77), ("calm", 15), ("pair", 8))


def draw(seed: int, profile: str | None = None) -> Script:
    """
    Draw the script of *seed*.

    Profiles: ``swarm`` (one pool, any faults), ``calm`` (one pool, no faults, patient clients: the
    bound on waiting is checked), ``pair`` (two pools that share a ledger and nothing else).
    """
    rng = random.Random(seed)
    drawn = rng.choices([p for p, _ in PROFILES], [w for _, w in PROFILES])[0]
    profile = profile or drawn
    kinds = set() if profile == "calm" else {f for f in FAULTS if rng.random() < 0.28}
    kinds |= {"client_leaves", "client_retries"} if profile == "calm" else set()
    if profile == "pair":
        kinds -= {"bounds_small"}
    faults = dict.fromkeys(FAULTS, 0)
    pools: list[PoolScript] = []
    items: list[Item] = []
    end = rng.choice((40.0, 90.0, 200.0))
    for index in range(2 if profile == "pair" else 1):
        pool = _draw_pool(rng, index, calm=profile == "calm", kinds=kinds, faults=faults)
        pools.append(pool)
        items += _draw_clients(rng, index, pool, end, profile == "calm", kinds, faults)
        items += _draw_faults(rng, index, pool, end, kinds, faults)
    if "loop_stall" in kinds:
        for _ in range(rng.randint(1, 3)):
            items.append(Stall(EVERY_POOL, rng.uniform(0, end), rng.choice((0.2, 2.0, 10.0))))
            faults["loop_stall"] += 1
    bounds = Bounds()
    if "bounds_small" in kinds:
        bounds = Bounds(max_held=rng.randint(1, 6), max_held_per_key=rng.randint(1, 3))
        faults["bounds_small"] += 1
    abrupt = "stop_abrupt" in kinds
    faults["stop_abrupt"] += abrupt
    return Script(seed, profile, tuple(pools), tuple(items), end, abrupt, bounds, faults)


def _draw_pool(
    rng: random.Random, index: int, *, calm: bool, kinds: set[str], faults: dict[str, int]
) -> PoolScript:
    names = [
        MemberName(f"{chr(ord('a') + n)}{index or ''}") for n in range(rng.choice((2, 2, 3, 4)))
    ]
    scale = rng.choice((0.3, 3.0, 3.0, 10.0))
    timing = {
        name: Timing(scale * rng.uniform(0.5, 1.5), scale * rng.uniform(0.02, 0.3))
        for name in names
    }
    members = {
        name: MemberSpec(
            name,
            parallel=rng.choice((1, 2, 4, 16)),
            expected_load_s=rng.choice((60.0, scale, scale)),
            has_idle_probe=rng.random() < 0.8,
        )
        for name in names
    }
    spec = PoolSpec(
        PoolName(f"pool{index}"),
        members,
        default=rng.choice((None, *names)),
        swap_budget_s=1000.0 if calm else rng.choice((0.0, 5.0, 20.0, 60.0, 60.0, 300.0)),
        max_turn_s=rng.choice((0.0, 2.0, 10.0, 60.0)),
        linger_s=rng.choice((None, None, 0.0, 1.0)),
        load_timeout_s=rng.choice((15.0 + 2 * scale, 60.0 + 2 * scale)),
        idle_unload_after_s=rng.choice((None, None, None, 5.0, 20.0)),
        reclaim_default_after_s=rng.choice((None, None, None, 5.0, 20.0)),
        drain_timeout_s=None if calm else rng.choice((None, None, 1.0, 5.0)),
        max_generation_s=None if calm else rng.choice((None, None, None, 5.0)),
        hung_after_s=15.0,
        restore=rng.random() < 0.8,
    )
    up: tuple[MemberName, ...] = ()
    if "adopt_one" in kinds and rng.random() < 0.7:
        up = (rng.choice(names),)
        faults["adopt_one"] += 1
    if "adopt_several" in kinds and rng.random() < 0.7:
        up = tuple(rng.sample(names, 2))
        faults["adopt_several"] += 1
    return PoolScript(
        spec,
        timing,
        up,
        rng.choice((None, *names)),
        released=not up and rng.random() < 0.3,
        first_ticket=1 + index * 1_000_000,
    )


def _draw_clients(
    rng: random.Random,
    index: int,
    pool: PoolScript,
    end: float,
    calm: bool,
    kinds: set[str],
    faults: dict[str, int],
) -> list[Item]:
    names = list(pool.spec.members)
    weights = [rng.choice((0.2, 1.0, 1.0, 5.0)) for _ in names]
    service = rng.choice((0.1, 1.0, 5.0))
    count = rng.randint(4, 16)
    starts = [rng.uniform(0, end) for _ in range(count)]
    pattern = rng.choice(("spread", "spread", "herd", "bursts"))
    if pattern == "herd":
        starts = [0.1] * count
    elif pattern == "bursts":
        beats = [rng.uniform(0, end) for _ in range(3)]
        starts = [rng.choice(beats) for _ in range(count)]
    leave = rng.uniform(0.1, 0.5) if "client_leaves" in kinds else 0.0
    at_grant = rng.uniform(0.1, 0.4) if "client_leaves_at_grant" in kinds else 0.0
    short = rng.uniform(0.1, 0.7) if "patience_short" in kinds else 0.0
    retries = rng.choice((1, 2)) if "client_retries" in kinds else 0
    items: list[Item] = []
    for t in starts:
        come = Come(
            index,
            t,
            rng.choices(names, weights)[0],
            patience=rng.choice((0.5, 3.0, 8.0)) if rng.random() < short else None,
            service=rng.expovariate(1 / service),
            leave=rng.choice((0.0, rng.expovariate(1 / 3.0))) if rng.random() < leave else None,
            leave_at_grant=rng.random() < at_grant,
            retries=retries if rng.random() < 0.5 else 0,
            key=rng.choice((None, None, "k1", "k2")),
        )
        faults["patience_short"] += come.patience is not None
        faults["client_leaves"] += come.leave is not None
        faults["client_leaves_at_grant"] += come.leave_at_grant
        faults["client_retries"] += come.retries > 0
        items.append(come)
    return items


def _draw_faults(
    rng: random.Random,
    index: int,
    pool: PoolScript,
    end: float,
    kinds: set[str],
    faults: dict[str, int],
) -> list[Item]:
    names = list(pool.spec.members)
    items: list[Item] = []

    def some(kind: str, most: int) -> range:
        count = rng.randint(1, most) if kind in kinds else 0
        faults[kind] += count
        return range(count)

    def when() -> float:
        return rng.uniform(0, end)

    taken: set[tuple[MemberName, str, int]] = set()

    def answer(member: MemberName, op: str, nth: int, kind: str, **more: float | bool) -> None:
        if (member, op, nth) in taken:
            return
        taken.add((member, op, nth))
        timing = pool.timing[member]
        usual = timing.load if op == "load" else timing.unload
        seconds = float(more.pop("seconds", usual * rng.uniform(0.1, 1.5)))
        items.append(Answer(index, member, op, nth, kind, seconds, **more))  # type: ignore[arg-type]

    for _ in some("load_fails", 4):
        kind = rng.choice(("fail", "fail", "fail", "fatal"))
        answer(rng.choice(names), "load", rng.randint(0, 3), kind, leaves=rng.random() < 0.5)
    for _ in some("load_hangs", 2):
        answer(rng.choice(names), "load", rng.randint(0, 2), "hang", leaves=rng.random() < 0.5)
    for _ in some("cancel_crossing", 1):
        answer(rng.choice(names), "load", rng.randint(0, 1), "hang", crossing=True)
    for _ in some("load_slow", 2):
        name = rng.choice(names)
        slow = pool.timing[name].load * rng.choice((2, 5))
        answer(name, "load", rng.randint(0, 3), "ok", seconds=slow, parallel=rng.randint(1, 4))
    for _ in some("death_after_landing", 2):
        after = rng.choice((0.0, 0.0, 0.5, 10.0))
        answer(rng.choice(names), "load", rng.randint(0, 3), "ok", dies_after=after)
    for _ in some("unload_fails", 3):
        answer(rng.choice(names), "unload", rng.randint(0, 4), "fail")
    for kind in ("idle_busy", "idle_unreachable", "idle_slow"):
        for _ in some(kind, 3):
            delay = rng.choice((0.5, 3.0, 20.0))
            items.append(
                IdleSpell(
                    index, when(), rng.choice((2.0, 20.0, 60.0)), kind.removeprefix("idle_"), delay
                )
            )
    for _ in some("death_busy_or_idle", 3):
        items.append(Death(index, when(), rng.choice((0.0, 0.0, 0.05, 2.0)), rng.random() < 0.3))
    for _ in some("dispatch_refused", 3):
        items.append(RefuseDispatch(index, when(), rng.randint(1, 3)))
    for _ in some("hung", 1):
        items.append(Hang(index, when(), rng.choice((5.0, 40.0))))
    for _ in some("load_asked", 3):
        items.append(Say(index, when(), "load", rng.choice(names)))
    for _ in some("unload_asked", 3):
        items.append(Say(index, when(), "unload"))
    for kind, on, off in (("paused", "pause", "resume"), ("withheld", "withhold", "regain")):
        for _ in some(kind, 2):
            t = when()
            items.append(Say(index, t, on))
            items.append(Say(index, t + rng.choice((0.5, 5.0, 30.0)), off))
    for _ in some("reconfigured", 4):
        what = rng.choice(("add", "remove", "remove_resident", "default", "knobs"))
        member = rng.choice((*names, MemberName("z")))
        values = (
            ("max_turn_s", rng.choice((0.0, 3.0, 30.0))),
            ("swap_budget_s", rng.choice((2.0, 50.0))),
            ("linger_s", rng.choice((None, 0.0, 2.0))),
            ("idle_unload_after_s", rng.choice((None, 4.0))),
            ("reclaim_default_after_s", rng.choice((None, 4.0))),
        )
        items.append(Change(index, when(), what, member, values if what == "knobs" else ()))
    for _ in some("stale_report", 4):
        what = rng.choice(
            ("loaded", "load_failed", "unloaded", "lost", "checked", "idle", "health")
        )
        items.append(Stale(index, when(), what, rng.randint(1, 3)))
    return items
