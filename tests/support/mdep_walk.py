"""
Random lives of a ModelDeployment: edits, counts, losses, admissions, evictions, faults, deaths.

    python tests/support/mdep_walk.py --seeds 2000 [--seed N] [--steps 300] [--jobs 2]

After every write `mdep_checks` has its say; at the end of a life, with capacity for everything,
what stands must equal a fresh install of the last specification, and then nothing may be written.
Exit status 1 when a life broke a rule, or when a rule or a kind of step never came up.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import pathlib
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(HERE.parents[1] / "operator")]

from mdep_checks import ordinal_of, role_of  # noqa: E402 - the path is made above
from mdep_lab import NAMESPACE, Lab, role  # noqa: E402
from memcluster import Killed, MemPort, Mode  # noqa: E402
from memkueue import condition, going  # noqa: E402
from modelpool_api.names import REPLACEMENTS_ANNOTATION  # noqa: E402
from modelpool_kube import errors  # noqa: E402
from modelpool_kube.kinds import (  # noqa: E402
    INSTANCE_TYPES,
    MODEL_DEPLOYMENTS,
    PODS,
    WORKLOADS,
    Json,
)
from modelpool_operator.plan.modeldeployment.slot import UnreadableRecord, decode  # noqa: E402

NAMES = ("prefill", "decode")
KINDS = {"prefill": "Prefill", "decode": "Decode"}
EXTERNAL = ["--data-parallel-external-lb"]


class Busy:
    """A port in a world that goes on moving between two requests."""

    def __init__(self, port: MemPort, move: Callable[[], None]) -> None:
        self._port = port
        self._move = move

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._port, name)
        if name in ("get", "list", "create", "patch_merge", "patch_status", "delete"):
            self._move()
        return found


class Life:
    """One random life."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.lab = Lab(
            *(role(name, kind=KINDS[name], replicas=self.rng.randint(1, 2)) for name in NAMES),
            cards=self.rng.choice((2, 3, 5, 20)),
            admits=self.rng.random() < 0.7,
        )
        self.did: Counter[str] = Counter()
        self.trail: list[str] = []
        self._wrap()

    def _wrap(self) -> None:
        self.lab.operator._port = Busy(self.lab.port, self._meanwhile)

    def _meanwhile(self) -> None:
        if self.rng.random() < 0.15:
            self._world(1)

    def _world(self, steps: int) -> None:
        for _ in range(steps):
            part = self.rng.choice((self.lab.kueue, self.lab.node, self.lab.garbage))
            part.step()

    async def step(self) -> None:
        """Do one thing at random."""
        names = list(_WEIGHTS)
        name = self.rng.choices(names, list(_WEIGHTS.values()))[0]
        self.did[name] += 1
        self.trail.append(name)
        if name == "look":
            await self._look()
        else:
            getattr(self, f"_{name}")()

    async def _look(self) -> None:
        try:
            await self.lab.look()
        except Killed:
            self.lab.restart()
            self._wrap()

    def _move(self) -> None:
        self._world(self.rng.randint(1, 12))

    def _settle_world(self) -> None:
        self.lab.move()

    def _edit(self) -> None:
        choices: list[Json] = [
            {"size": self.rng.randint(1, 3)},
            {"image": f"engine:{self.rng.randint(1, 3)}"},
            {"command": self.rng.choice((None, ["run", "a"], ["run", "b"]))},
            {"instanceType": self.rng.choice(("a", "b"))},
            {"resources": {"accelerator": self.rng.randint(1, 2)}},
            {"extraArgs": self.rng.choice((None, EXTERNAL))},
        ]
        change: Json = {}
        for each in self.rng.sample(choices, self.rng.choice((1, 1, 2, 4))):
            change |= each
        self.lab.edit(self.rng.choice(NAMES), **change)

    def _edit_both(self) -> None:
        self.lab.edit_type("a", perCard={"cpu": str(self.rng.randint(2, 4))})

    def _count(self) -> None:
        self.lab.edit(self.rng.choice(NAMES), replicas=self.rng.choice((0, 1, 1, 2, 2, 3)))

    def _suspend(self) -> None:
        self.lab.patch(suspend=self.rng.random() < 0.5)

    def _unbuildable(self) -> None:
        self.lab.edit_type("b", queueName=self.rng.choice(("", "queue-b", "queue-b")))

    def _pod(self) -> Json | None:
        pods = [pod for pod in self.lab.cluster.all(PODS, NAMESPACE) if role_of(pod) in NAMES]
        return self.rng.choice(pods) if pods else None

    def _remove(self) -> None:
        pod = self._pod()
        if pod is not None:
            self.lab.remove(pod)

    def _vanish(self) -> None:
        pod = self._pod()
        if pod is not None:
            self.lab.vanish([pod])

    def _vanish_all(self) -> None:
        pod = self._pod()
        if pod is not None:
            self.lab.vanish(self.lab.pods(ordinal_of(pod), role_of(pod)))

    def _fail(self) -> None:
        pod = self._pod()
        if pod is not None and not going(pod) and pod["spec"].get("nodeName"):
            self.lab.node.fail(NAMESPACE, pod["metadata"]["name"])

    def _evict(self) -> None:
        admitted = [
            each["metadata"]["name"]
            for each in self.lab.cluster.all(WORKLOADS, NAMESPACE)
            if condition(each, "Admitted") == "True" and not going(each)
        ]
        if admitted:
            self.lab.kueue.evict(NAMESPACE, self.rng.choice(admitted))

    def _quota(self) -> None:
        self.lab.set_quota(self.rng.choice("ab"), self.rng.choice((0, 1, 2, 4, 20)))
        self.lab.kueue.may_admit = self.rng.random() < 0.7

    def _foreign(self) -> None:
        name = self.lab.group(self.rng.randint(0, 2), self.rng.choice(NAMES))
        if self.lab.cluster.read(WORKLOADS, NAMESPACE, name) is None:
            body = {"metadata": {"name": name}, "spec": {"podSets": []}}
            self.lab.cluster.put(WORKLOADS, NAMESPACE, body, actor="stranger")

    def _tamper(self) -> None:
        """Somebody writes rubbish into the record, or takes it away as its message advises."""
        self._write_record(self.rng.choice((None, None, "rubbish", "[]", '{"/format":9}')))

    def _write_record(self, text: str | None) -> None:
        note: Json = {"metadata": {"annotations": {REPLACEMENTS_ANNOTATION: text}}}
        self.lab.cluster.edit(MODEL_DEPLOYMENTS, NAMESPACE, "chat", note, actor="user")

    def _reorder(self) -> None:
        self.lab.patch(roles=self.lab.deployment["spec"]["roles"][::-1])

    def _native(self) -> None:
        for each in self.lab.cluster.all(WORKLOADS, NAMESPACE):
            meta = each["metadata"]
            if not meta.get("ownerReferences") and not meta.get("annotations"):
                self.lab.cluster.vanish(WORKLOADS, NAMESPACE, meta["name"], actor="stranger")

    def _lose(self) -> None:
        applied = self.rng.random() < 0.6
        self.lab.port.lose(applied=applied, writes=True, nth=self.rng.randint(1, 4))

    def _refuse(self) -> None:
        error = self.rng.choice(
            (errors.Unavailable("busy", code=429), errors.Conflict("modified", code=409))
        )
        self.lab.port.fail(error, writes=True, nth=self.rng.randint(1, 4))

    def _misread(self) -> None:
        kind = self.rng.choice((PODS, WORKLOADS))
        self.lab.port.fail(errors.Unavailable("boom", code=500), verb="list", kind=kind)

    def _die(self) -> None:
        number = len(self.lab.port.requests) + self.rng.randint(1, 12)
        self.lab.port.kill_at(number, self.rng.choice(list(Mode)))

    async def end(self) -> None:
        """Give it capacity and peace; what stands then must be a fresh install."""
        lab = self.lab
        lab.port._kill = None
        lab.port._faults.clear()
        lab.restart()
        self._native()
        try:
            decode(lab.record, NAMES)
        except UnreadableRecord:
            self._write_record(None)
        lab.edit_type("b", queueName="queue-b")
        lab.patch(suspend=False)
        lab.kueue.may_admit = True
        for name in ("a", "b"):
            lab.set_quota(name, 1000)
        await lab.settle()
        await lab.quiet(2)
        fresh = Lab(*lab.deployment["spec"]["roles"])
        types = lab.cluster.must(INSTANCE_TYPES, None, "a")
        fresh.edit_type("a", perCard=types["spec"]["perCard"])
        for name in ("a", "b"):
            fresh.set_quota(name, 1000)
        await fresh.settle()
        assert lab.final() == fresh.final(), "what stands differs from a fresh install"


_WEIGHTS = {
    "look": 40,
    "move": 30,
    "settle_world": 6,
    "edit": 6,
    "edit_both": 1,
    "count": 3,
    "suspend": 1,
    "unbuildable": 1,
    "remove": 2,
    "vanish": 2,
    "vanish_all": 1,
    "fail": 1,
    "evict": 2,
    "quota": 4,
    "foreign": 0.5,
    "native": 1,
    "tamper": 0.5,
    "reorder": 0.5,
    "lose": 2,
    "refuse": 2,
    "misread": 1,
    "die": 2,
}
RULES = ("I1", "I2", "I3", "I4", "I5", "I6", "I7", "I8", "I9", "I11", "I12")


async def _live(seed: int, steps: int) -> tuple[Counter[str], Counter[str]]:
    life = Life(seed)
    try:
        for _ in range(steps):
            await life.step()
        await life.end()
    except Exception as error:
        where = f"seed {seed}, after {len(life.trail)} steps ({' '.join(life.trail[-12:])})"
        raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
    return life.did, life.lab.checks.checked


def live(seed: int, steps: int = 300) -> tuple[Counter[str], Counter[str]]:
    """
    Live one life; return what was done and what was checked, by name.

    Raises:
        AssertionError: a rule was broken; names the seed.
    """
    return asyncio.run(_live(seed, steps))


def _batch(task: tuple[int, int, int]) -> tuple[Counter[str], Counter[str], str]:
    first, count, steps = task
    did: Counter[str] = Counter()
    checked: Counter[str] = Counter()
    for seed in range(first, first + count):
        try:
            found = live(seed, steps)
        except AssertionError as error:
            return did, checked, str(error)
        did += found[0]
        checked += found[1]
    return did, checked, ""


def main(argv: list[str] | None = None) -> int:
    """Run what the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser(description="Random lives of a ModelDeployment.")
    parser.add_argument("--seeds", type=int, default=2000, help="how many lives")
    parser.add_argument("--seed", type=int, default=1, help="the first")
    parser.add_argument("--steps", type=int, default=300, help="steps of each")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    args = parser.parse_args(argv)
    began, size = time.monotonic(), 10
    ends = args.seed + args.seeds
    tasks = [(first, min(size, ends - first), args.steps) for first in range(args.seed, ends, size)]
    did: Counter[str] = Counter()
    checked: Counter[str] = Counter()
    failures = []
    with multiprocessing.Pool(args.jobs) as pool:
        for more, rules, failure in pool.imap_unordered(_batch, tasks):
            did += more
            checked += rules
            if failure:
                failures.append(failure)
                print(failure, flush=True)
                if len(failures) >= 5:
                    pool.terminate()
                    break
    print(f"{args.seeds} lives of {args.steps} steps in {time.monotonic() - began:.0f} s")
    print("done:    " + ", ".join(f"{name} {did[name]}" for name in _WEIGHTS))
    print("checked: " + ", ".join(f"{rule} {checked[rule]}" for rule in RULES))
    missing = [name for name in _WEIGHTS if not did[name]]
    missing += [rule for rule in RULES if not checked[rule]]
    if args.seeds >= 50 and missing and not failures:
        print(f"never came up: {', '.join(missing)}")
        return 1
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
