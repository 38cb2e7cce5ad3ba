"""
Judges whole schedules: runs a seed, checks what needs two runs, shrinks and tells a failure.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field

from modelpool_router.core.scheduler import Scheduler
from sim_script import FAULTS, Item, Script, alone, draw
from sim_trace import Violation
from sim_watch import Factory
from sim_world import World, play

NOT_FAULTS = {"adopt_one", "adopt_several", "bounds_small"}
"""Drawn as a property of the whole schedule, counted from the script and not while it runs."""
SHRINK_RUNS = 1500
"""Most runs that shrinking may cost."""


@dataclass(slots=True)
class Tally:
    """What many schedules injected and checked."""

    schedules: int = 0
    events: int = 0
    virtual_s: float = 0.0
    loads: int = 0
    profiles: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    checks: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)

    def add(self, world: World) -> None:
        """Count one world that came to its end."""
        script = world.script
        self.schedules += 1
        self.profiles[script.profile] += 1
        self.virtual_s += world.clock.now
        for pool in world.pools:
            self.events += pool.watched.events
            self.loads += pool.platform.loads
            self.faults.update(pool.injected)
            self.checks.update(pool.model.checks)
            self.outcomes.update(pool.model.outcomes)
        for kind in NOT_FAULTS:
            self.faults[kind] += script.faults[kind]

    def merge(self, other: Tally) -> None:
        """Add the counts of *other*."""
        self.schedules += other.schedules
        self.events += other.events
        self.virtual_s += other.virtual_s
        self.loads += other.loads
        for name in ("profiles", "faults", "checks", "outcomes"):
            getattr(self, name).update(getattr(other, name))

    def missing(self, rules: tuple[str, ...]) -> list[str]:
        """Return the faults never injected and the rules never put to the test."""
        return [f"fault {f}" for f in FAULTS if not self.faults[f]] + [
            f"check {r}" for r in rules if not self.checks[r]
        ]


@dataclass(frozen=True, slots=True)
class Failure:
    """A broken rule, with all that is needed to see it again."""

    seed: int
    rule: str
    text: str
    script: Script

    def report(self, factory: Factory = Scheduler) -> str:
        """Shrink the schedule and return seed, what is left of it, and its time line."""
        small = shrink(self.script, self.rule, factory)
        lines: list[str] = []
        verdict = judge(small, factory, lines)
        kept = "\n".join(f"  {item}" for item in small.items)
        pools = "\n".join(f"  {pool}" for pool in small.pools)
        return (
            f"seed {self.seed}: {self.text}\n"
            f"replay: python tests/support/simulate.py --seed {self.seed} --schedules 1\n"
            f"pools:\n{pools}\n"
            f"{len(small.items)} of {len(self.script.items)} entries are enough:\n{kept}\n"
            "time line:\n" + "\n".join(lines) + f"\n{verdict[1] if verdict else 'no failure'}"
        )


def run_seed(
    seed: int, tally: Tally, factory: Factory = Scheduler, profile: str | None = None
) -> Failure | None:
    """Play the schedule of *seed*; count it, or return how it failed."""
    script = draw(seed, profile)
    try:
        world = play(script, factory, record=script.profile == "pair")
        if script.profile == "pair":
            independent(script, world, factory)
    except Violation as violation:
        return Failure(seed, violation.rule, str(violation), script)
    except Exception as error:  # noqa: BLE001 - whatever a scheduler raises is a failed schedule
        rule = type(error).__name__
        return Failure(seed, rule, f"{rule}: {error}", script)
    tally.add(world)
    return None


def independent(script: Script, world: World, factory: Factory) -> None:
    """S17: each pool did exactly what it does when the other is not there."""
    for index, pool in enumerate(world.pools):
        single = play(alone(script, index), factory, record=True).pools[0]
        pool.model.checks["S17"] += 1
        assert pool.watched.digest is not None and single.watched.digest is not None
        if pool.watched.digest.digest() != single.watched.digest.digest():
            name = pool.pool.spec.name
            raise Violation("S17", world.clock.now, f"{name} behaves otherwise alone")


def judge(
    script: Script, factory: Factory = Scheduler, lines: list[str] | None = None
) -> tuple[str, str] | None:
    """Play *script*; return the rule it breaks and the sentence about it, if it breaks one."""
    try:
        world = play(
            script,
            factory,
            log=None if lines is None else lines.append,
            record=script.profile == "pair",
        )
        if script.profile == "pair":
            independent(script, world, factory)
    except Violation as violation:
        return violation.rule, str(violation)
    except Exception as error:  # noqa: BLE001 - as in `run_seed`
        return type(error).__name__, f"{type(error).__name__}: {error}"
    return None


def shrink(script: Script, rule: str, factory: Factory = Scheduler) -> Script:
    """Leave out entries of *script* as long as it still breaks *rule* (delta debugging)."""
    runs = 0

    def fails(items: tuple[Item, ...]) -> bool:
        nonlocal runs
        runs += 1
        verdict = judge(script.without(items), factory)
        return verdict is not None and verdict[0] == rule

    items, chunk = script.items, max(1, len(script.items) // 2)
    while runs < SHRINK_RUNS:
        at, shorter = 0, False
        while at < len(items) and runs < SHRINK_RUNS:
            rest = items[:at] + items[at + chunk :]
            if fails(rest):
                items, shorter = rest, True
            else:
                at += chunk
        if chunk == 1 and not shorter:
            break
        chunk = max(1, chunk // 2)
    return script.without(_simplified(items, fails))


def _simplified(items: tuple[Item, ...], fails: object) -> tuple[Item, ...]:
    """Try plainer clients: without keys, retries and departures."""
    assert callable(fails)
    for at, item in enumerate(items):
        for name, value in (("key", None), ("retries", 0), ("leave", None), ("patience", None)):
            if getattr(item, name, value) != value:
                plainer = dataclasses.replace(item, **{name: value})  # type: ignore[arg-type]
                trial = (*items[:at], plainer, *items[at + 1 :])
                if fails(trial):
                    items, item = trial, plainer
    return items


def digest(seed: int, factory: Factory = Scheduler) -> str:
    """Return a digest of everything that went in and out in the schedule of *seed*."""
    world = World(draw(seed), factory, record=True)
    verdict = ""
    try:
        world.run()
    except Violation as violation:
        verdict = str(violation)
    parts = [
        pool.watched.digest.hexdigest() for pool in world.pools if pool.watched.digest is not None
    ]
    return " ".join([str(seed), *parts, verdict])
