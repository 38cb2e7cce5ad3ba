"""
The lives of one pool's members: what is kept of them, and what can be asked of them.

Everything here asks: the kernel for processes, a member for its answers. What is done about the
answers is in `process`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from ..core.spec import MemberName, PoolName
from . import takedown
from .base import DriverUnavailable, LostCallback
from .life import Life, ProcessMember, filled, inherited
from .probe import Prober, port_refuses
from .procfs import Proc, ProcessTable, slot_value, table
from .profiles import Readiness
from .settle import SettleGate, Settler
from .statedir import file_name, lock_pool, prepare
from .takedown import Limits, Target

_PROBE_S = 2.0
"""A probe that takes longer counts as no answer."""
_REFUSED_AFTER_S = 30.0
"""A readiness path that is wrong stays wrong; but some servers answer 404 while they start."""
LOOK_S = 1.0
"""Between two looks at port and processes: the exit of a child does not tell all."""
_LIMITS = Limits()


class Lives:
    """The members of one pool as processes of this machine. `ProcessDriver` acts on them."""

    def __init__(
        self,
        pool: PoolName,
        members: Mapping[MemberName, ProcessMember],
        *,
        state_dir: Path,
        lost: LostCallback,
        settle: SettleGate | None = None,
        limits: Limits = _LIMITS,
        refused_after_s: float = _REFUSED_AFTER_S,
        processes: ProcessTable | None = None,
    ) -> None:
        """
        Take the pool's lock in *state_dir*; held until `close`.

        Construct the drivers of all pools before the first `observe` of any.

        Args:
            pool: Name of the pool; part of every member's environment.
            members: By name.
            state_dir: Created if need be.
            lost: See `LostCallback`; called in the loop.
            settle: Gate before every load, if any.
            limits: Time limits of a take-down.
            refused_after_s: How long a readiness path may answer 404 and the like.
            processes: The process table of this system, unless told otherwise.

        Raises:
            StateDirUnusable: another router runs this pool, or the directory cannot be used.
        """
        self._pool = pool
        self._lost = lost
        self._limits = limits
        self._refused_after_s = refused_after_s
        self._table = processes if processes is not None else table()
        self._state_dir = state_dir
        self._state_id = prepare(state_dir)
        self._lock = lock_pool(state_dir, pool)
        self._lives: dict[MemberName, Life] = {}
        self._turns: dict[MemberName, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._prober = Prober()
        self._settler: Settler | None = None
        self._has_swept = False
        self._hurry = asyncio.Event()
        self.update(members, settle=settle)

    def update(
        self, members: Mapping[MemberName, ProcessMember], *, settle: SettleGate | None
    ) -> None:
        """Replace the configuration. A life that goes on keeps its own until its end."""
        self._members = dict(members)
        if settle is None:
            self._settler = None
        elif self._settler is None:
            self._settler = Settler(settle, env=inherited())
        else:
            self._settler.gate = settle  # the floor it has learnt stays true

    async def _carries_on(self, life: Life) -> bool:
        """True while anything of *life* is left but its first process. Unknown counts as true."""
        try:
            if await self._processes(life):
                return True
        except DriverUnavailable:
            return True
        if life.spec.gone_command is None:
            return False
        now = asyncio.get_running_loop().time()
        if now >= life.asked_gone_at + LOOK_S:
            life.asked_gone_at = now
            target = self._target(life.spec.name, life)
            return not await takedown.has_left(target, self._limits)
        return True

    async def _reported_parallel(self, life: Life) -> int | None:
        known = life.spec.profile
        if not known.reports_parallel or known.idle_path is None:
            return None
        answer = await self._get(life, known.idle_path)
        return None if answer is None else known.judge_idle(*answer).parallel

    def _target(self, member: MemberName, life: Life | None) -> Target:
        spec = life.spec if life is not None else self._members.get(member)
        if spec is None:  # left over by a configuration that we do not have any more
            return leftover(member, self._slot(member))
        port = life.port if life is not None else spec.port
        stop, gone = spec.stop_command, spec.gone_command
        return Target(
            member=member,
            slot=self._slot(member),
            child=life.child if life is not None else None,
            sessions=life.sessions if life is not None else {},
            host=spec.host,
            # without a life of ours a port proves nothing: anybody may listen there
            port=port if life is not None else None,
            steps=spec.profile.stop if life is not None else takedown.ORPHAN_STEPS,
            stop_command=filled(stop, member, port) if stop is not None else None,
            gone_command=filled(gone, member, port) if gone is not None else None,
            env=spec.environment(),
            cwd=spec.working_directory,
        )

    def _turn(self, member: MemberName) -> asyncio.Lock:
        return self._turns.setdefault(member, asyncio.Lock())

    def _slot(self, member: MemberName) -> str:
        return slot_value(self._state_id, self._pool, member)

    def _log_path(self, member: MemberName) -> Path:
        return self._state_dir / "logs" / f"{file_name(self._pool)}.{file_name(member)}.log"

    def _sessions(self) -> dict[int, int]:
        return {p: s for life in self._lives.values() for p, s in life.sessions.items()}

    async def _processes(self, life: Life) -> list[Proc]:
        return await takedown.find(self._table, self._slot(life.spec.name), life.sessions)

    async def _is_up(self, life: Life) -> bool:
        if life.is_over:
            return False
        answer = await self._get(life, life.spec.profile.readiness_path)
        if answer is None:
            return not await port_refuses(life.spec.host, life.port) and not life.is_over
        return life.spec.profile.judge_readiness(*answer) is Readiness.READY

    async def _get(self, life: Life, path: str) -> tuple[int, bytes] | None:
        return await self._prober.get(life.spec.host, life.port, path, timeout_s=_PROBE_S)

    async def _readiness(self, life: Life) -> Readiness:
        known = life.spec.profile
        answer = await self._get(life, known.readiness_path)
        return Readiness.LOADING if answer is None else known.judge_readiness(*answer)


def leftover(member: str, slot: str) -> Target:
    """What an earlier router left of a member that the configuration does not have any more."""
    return Target(member=member, slot=slot, steps=takedown.ORPHAN_STEPS, env=inherited())
