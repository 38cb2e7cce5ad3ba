"""
Workloads for the policy: clients that ask, wait for the answer, think, and ask again.

Closed loops on top of `sim_world`, with all its checkers at work. What the policy is measured by:
requests served and refused, loads, and how long was waited. The workloads are those by which the
knobs and their defaults were chosen (docs/policy.md).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from modelpool_router.core.scheduler import Scheduler
from modelpool_router.core.spec import HoldLedger, MemberName, MemberSpec, PoolName, PoolSpec
from sim_script import Come, PoolScript, Script, Timing
from sim_watch import Clock
from sim_world import Client, PoolWorld

UNLOAD_S = 1.0
BUDGET_S = 300.0


@dataclass(slots=True)
class Result:
    """What became of one workload."""

    served: int = 0
    refused: int = 0
    loads: int = 0
    holds: list[float] = field(default_factory=list)
    by_member: dict[MemberName, list[int]] = field(default_factory=dict)
    """Served and refused, by member."""

    def count(self, member: MemberName, outcome: str) -> None:
        """Count one end."""
        ends = self.by_member.setdefault(member, [0, 0])
        ends[outcome != "served"] += 1
        self.served += outcome == "served"
        self.refused += outcome != "served"


class Workload:
    """One pool of like members with scripted users, for a while."""

    def __init__(
        self,
        members: str,
        *,
        load_s: float,
        seed: int = 0,
        parallel: int = 8,
        swap_budget_s: float = BUDGET_S,
        max_turn_s: float = 60.0,
        linger_s: float | None = None,
        failing: str = "",
        measured: bool = True,
    ) -> None:
        self.rng = random.Random(seed)
        names = [MemberName(name) for name in members]
        spec = PoolSpec(
            PoolName("gpu0"),
            {
                name: MemberSpec(
                    name, parallel=parallel, expected_load_s=load_s if measured else 60.0
                )
                for name in names
            },
            swap_budget_s=swap_budget_s,
            max_turn_s=max_turn_s,
            linger_s=linger_s,
        )
        pool = PoolScript(spec, {name: Timing(load_s, UNLOAD_S) for name in names})
        script = Script(seed, "workload", (pool,), (), end=0.0)
        self.clock = Clock()
        self.world = PoolWorld(
            0, script, pool, self.clock, Scheduler, HoldLedger(), log=None, record=False
        )
        self.world.platform.fails = frozenset(MemberName(name) for name in failing)
        self.world.ended = self._ended
        self.result = Result()
        self._users: list[_User] = []

    def agent(
        self,
        pattern: str,
        *,
        think_s: float = 2.0,
        answer_s: float = 6.0,
        start: float = 0.0,
        exact: bool = False,
        retry_s: float | None = None,
    ) -> None:
        """A user that asks for the members of *pattern* in turn, thinking in between."""
        user = _User(self, pattern, think_s, answer_s, exact, retry_s)
        user.number = len(self._users)
        self._users.append(user)
        self.clock.at(start, user.ask)

    def stream(self, member: str, *, every_s: float, answer_s: float, until: float) -> None:
        """Requests for *member* at a fixed pace, whether or not the earlier ones ended."""
        t = 0.0
        while t < until:
            self.once(member, at=t, answer_s=answer_s)
            t += every_s

    def once(self, member: str, *, at: float, answer_s: float) -> None:
        """One request for *member*."""
        come = Come(0, at, MemberName(member), None, answer_s)
        self.clock.at(at, lambda: self.world.come(come))

    def ask(self, user: _User, member: MemberName, answer_s: float) -> None:
        """One request of *user*, now."""
        come = Come(0, self.clock.now, member, None, answer_s, key=f"user{user.number}")
        self.world.come(come)

    def run(self, until: float) -> Result:
        """Play until *until* and return what became of it."""
        self.clock.run(until)
        self.result.loads = self.world.platform.loads
        self.result.holds = [
            request.granted_at - request.arrived
            for request in self.world.model.requests.values()
            if request.grants
        ]
        return self.result

    def _ended(self, client: Client, outcome: str) -> None:
        self.result.count(client.come.member, outcome)
        key = client.come.key
        if key is not None:
            self._users[int(key.removeprefix("user"))].go_on(outcome)


class _User:
    def __init__(
        self, workload: Workload, pattern: str, think_s: float, answer_s: float,
        exact: bool, retry_s: float | None,
    ) -> None:  # fmt: skip
        self.workload = workload
        self.pattern = pattern
        self.think_s = think_s
        self.answer_s = answer_s
        self.exact = exact
        self.retry_s = retry_s
        self.turn = 0
        self.number = 0

    def ask(self) -> None:
        member = MemberName(self.pattern[self.turn % len(self.pattern)])
        self.workload.ask(self, member, self._about(self.answer_s))

    def go_on(self, outcome: str) -> None:
        pause = self._about(self.think_s)
        if outcome == "served" or self.retry_s is None:
            self.turn += 1
        else:
            pause = self.retry_s
        self.workload.clock.at(self.workload.clock.now + pause, self.ask)

    def _about(self, mean_s: float) -> float:
        return mean_s if self.exact else self.workload.rng.expovariate(1 / mean_s)


def mean(values: Sequence[float]) -> float:
    """Return the mean of *values*, 0 for none."""
    return sum(values) / len(values) if values else 0.0
