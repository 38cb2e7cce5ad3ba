"""
Breakages of the scheduler on purpose: the harness is worth what it kills.

Each mutant is a change of a line or two, made in memory. It has to be caught by the checkers
within a bounded number of simulated schedules or, failing that, by a scenario test.

    python tests/support/sim_mutants.py [NAME ...]    # all, or those named; exit 1 if one survives
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import pathlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import cast
from unittest import mock

HERE = pathlib.Path(__file__).resolve().parent
SCENARIOS = HERE.parent / "router" / "core"
if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(HERE.parents[1] / "router")]

import sim_slot  # noqa: E402 - the path is made above when this is run as a program
from modelpool_router.core import (  # noqa: E402
    lending,
    outlook,
    policy,
    retry_after,
    scheduler,
    slot,
)
from sim_run import Tally, run_seed  # noqa: E402
from sim_watch import Factory  # noqa: E402

CHAIN = (slot, outlook, lending, scheduler)
"""The parts of the scheduler, each built on the one before it."""
SCHEDULES = 150
"""How many simulated schedules a mutant may survive before the scenario tests have a go."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One breakage: *old* occurs once in *module* and becomes *new*."""

    name: str
    old: str
    new: str
    module: ModuleType | None = None
    """None = whichever part of the scheduler has the line."""


MUTANTS = (
    Mutant(
        "an unload that could not be proven counts as done",
        "self._unload_retry_at = now + retry_s",
        "self._enter(SlotState.COLD, None, now)",
    ),
    Mutant(
        "what is left of a failed load is not taken down",
        "self._begin_unload(event.member, now)",
        "self._enter(SlotState.COLD, None, now)",
    ),
    Mutant(
        "the last lease is not waited for",
        "        if self._lent:\n            limit",
        "        if self._lent > 1:\n            limit",
    ),
    Mutant(
        "a late idle answer counts",
        "if closing is None or closing.probe != event.probe:",
        "if closing is None:",
    ),
    Mutant(
        "a busy engine counts as idle",
        "if event.verdict is Idleness.IDLE:\n            closing.idle",
        "if event.verdict is not Idleness.UNREACHABLE:\n            closing.idle",
    ),
    Mutant(
        "reports of old epochs count",
        "self._state is state and self._up == member and self._epoch == epoch",
        "self._state is state and self._up == member",
    ),
    Mutant(
        "nobody is woken at a deadline",
        "                due = at\n                break",
        "                break",
    ),
    Mutant(
        "a request past its deadline is granted by an open resident",
        "            and now <= event.deadline\n",
        "",
    ),
    Mutant(
        "one lease more than parallel",
        "self._lent < self._parallel_of(member)",
        "self._lent <= self._parallel_of(member)",
    ),
    Mutant(
        "the last of the line goes first",
        "hold = self._queues[self._up].first()",
        "hold = next(reversed(self._queues[self._up].fifo.values()))",
    ),
    Mutant(
        "the youngest demand is next",
        "found.sort(key=lambda item: item[0])",
        "found.sort(key=lambda item: -item[0])",
    ),
    Mutant(
        "a turn is multiplied by those who wait",
        "max_turn_s / len(waiting)",
        "max_turn_s * len(waiting)",
        policy,
    ),
    Mutant(
        "a turn counts from the foreign hold alone",
        "max(waiting[0].since, landed_at)",
        "waiting[0].since",
        policy,
    ),
    Mutant(
        "a turn is given up for hopeless holds",
        "first = bisect_left(demand.deadlines, (now + needed, -1))",
        "first = 0",
        policy,
    ),
    Mutant(
        "the swap goes on although its demand is gone",
        "                return bool(foreign)",
        "                return True",
    ),
    Mutant(
        "refused holds leave no demand",
        "self._ghosts[hold.member] = Ghost(hold.since, expires",
        "Ghost(hold.since, expires",
    ),
    Mutant(
        "what refused holds leave never ends",
        "for member in [m for m, g in self._ghosts.items() if now >= g.expires]:",
        "for member in [m for m, g in self._ghosts.items() if now > g.expires + 600.0]:",
    ),
    Mutant(
        "no back-off after a failed load",
        "Failure(count, now + backoff_s,",
        "Failure(count, now,",
    ),
    Mutant(
        "the last good resident is not restored",
        "            self._restore = last_good\n",
        "",
    ),
    Mutant(
        "the default is warmed again after a landing",
        "        self._warm = False\n        self._owed = None\n        ghost",
        "        self._owed = None\n        ghost",
    ),
    Mutant(
        "a pool emptied on purpose is warmed",
        "        self._released = True\n        self._warm = False",
        "        self._released = False\n        self._warm = True",
    ),
    Mutant(
        "the ledger is not told that a hold ended",
        "        self._ledger.remove(hold.key)\n",
        "",
    ),
    Mutant(
        "a client that left is still held",
        "                if hold is not None:\n                    self._unhold(hold)\n",
        "                if hold is not None:\n                    pass\n",
    ),
    Mutant(
        "a member that refused a connection is lent on",
        "            and not self._suspect\n            and self._lent <",
        "            and self._lent <",
    ),
    Mutant(
        "a withheld slot is moved",
        "return not (self._withheld or self._stopping)",
        "return not self._stopping",
    ),
    Mutant(
        "a stopping router moves the slot",
        "return not (self._withheld or self._stopping)",
        "return not self._withheld",
    ),
    Mutant(
        "a deferred swap keeps admission closed",
        "        self._defer_s = min(2 * self._defer_s, MAX_DEFER_S)\n        self._closing = None",
        "        self._defer_s = min(2 * self._defer_s, MAX_DEFER_S)",
    ),
    Mutant(
        "a resident whose streams move is taken for hung",
        "if self._unhealthy_since is None or event.progress_at > self._unhealthy_since:",
        "if self._unhealthy_since is None:",
    ),
    Mutant(
        "a refused dispatch goes back for ever",
        "        if hold.requeued:\n            self._answer(",
        "        if False:\n            self._answer(",
    ),
    Mutant(
        "one pool looks at the other's holds",
        "            waiting=len(self._holds),",
        "            waiting=self._ledger.held,",
    ),
    Mutant(
        "the view counts one hold too many",
        "            held=len(self._holds),",
        "            held=len(self._holds) + 1,",
    ),
    Mutant(
        "Retry-After is not bounded",
        "return min(MAX_S, max(MIN_S, ",
        "return (max(MIN_S, ",
        retry_after,
    ),
)  # fmt: skip


def build(mutant: Mutant) -> type[scheduler.Scheduler]:
    """Return the scheduler class with *mutant* in it."""
    target = mutant.module or _home(mutant)
    built: dict[ModuleType, ModuleType] = {}
    with mock.patch.dict(sys.modules):
        for original in dict.fromkeys((target, *CHAIN)):
            module = _execute(original, mutant if original is target else None)
            built[original] = sys.modules[original.__name__] = module
        for module in built.values():
            # `from . import policy` asks the package, which still has the original
            if target not in CHAIN and hasattr(module, target.__name__.rpartition(".")[2]):
                setattr(module, target.__name__.rpartition(".")[2], built[target])
    return cast("type[scheduler.Scheduler]", built[scheduler].Scheduler)


def _home(mutant: Mutant) -> ModuleType:
    """Return the part of the scheduler that has the line of *mutant*, once."""
    counts = {module: inspect.getsource(module).count(mutant.old) for module in CHAIN}
    if sum(counts.values()) != 1:
        raise LookupError(f"{mutant.name}: its line is there {sum(counts.values())} times")
    return next(module for module, count in counts.items() if count)


def _execute(original: ModuleType, mutant: Mutant | None) -> ModuleType:
    source = inspect.getsource(original)
    if mutant is not None:
        if source.count(mutant.old) != 1:
            raise LookupError(f"{mutant.name}: its line is there {source.count(mutant.old)} times")
        source = source.replace(mutant.old, mutant.new)
    name = f"{original.__name__}_mutant"
    module = ModuleType(name)
    module.__package__ = original.__package__
    sys.modules[name] = module  # dataclasses look their module up
    exec(compile(source, name, "exec"), module.__dict__)
    return module


def killed_by(mutant: Mutant, *, schedules: int = SCHEDULES) -> str | None:
    """Return what catches *mutant*: a rule of the checkers or a scenario test; None if nothing."""
    mutated = build(mutant)
    tally = Tally()
    for seed in range(1, schedules + 1):
        failure = run_seed(seed, tally, cast("Factory", mutated))
        if failure is not None:
            return f"{failure.rule} in schedule {seed}"
    return _scenario(mutated)


def _scenario(mutated: type[scheduler.Scheduler]) -> str | None:
    with mock.patch.object(sim_slot, "Scheduler", mutated):
        for name, test in _scenarios():
            try:
                test()
            except Exception:  # noqa: BLE001 - whatever a test raises, it failed
                return name
    return None


def _scenarios() -> Iterator[tuple[str, Callable[[], None]]]:
    for path in sorted(SCENARIOS.glob("test_scheduler_*.py")):
        spec = importlib.util.spec_from_file_location(f"mutants_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for name, test in vars(module).items():
            if name.startswith("test_"):
                for arguments in _arguments(test):
                    yield name, lambda test=test, arguments=arguments: test(**arguments)  # type: ignore[misc]


def _arguments(test: object) -> Iterator[dict[str, object]]:
    """Every combination of what `pytest.mark.parametrize` gives to *test*."""
    choices: list[list[dict[str, object]]] = []
    for mark in getattr(test, "pytestmark", ()):
        names, values = mark.args
        names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
        rows = [v if len(names) > 1 else (v,) for v in values]
        choices.append([dict(zip(names, row, strict=True)) for row in rows])
    for combination in itertools.product(*choices):
        yield {name: value for part in combination for name, value in part.items()}


def main(names: list[str]) -> int:
    """Try the mutants named, or all; print who was caught by what."""
    survived = 0
    for mutant in MUTANTS:
        if names and not any(name in mutant.name for name in names):
            continue
        by = killed_by(mutant)
        survived += by is None
        print(f"{mutant.name:64} {by or 'SURVIVED'}", flush=True)
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
