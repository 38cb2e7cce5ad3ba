"""Tasks with an owner: kept alive, named, and ended together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

log = structlog.get_logger("modelpool.tasks")


class TaskSet:
    """The tasks of one object. `cancel` ends them all; a task that fails says so in the log."""

    def __init__(self, owner: str) -> None:
        self.closing = False
        self._owner = owner
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, coroutine: Coroutine[Any, Any, None], name: str) -> Callable[[], bool]:
        """Run *coroutine* as a task of this set; return what cancels it."""
        task = asyncio.get_running_loop().create_task(coroutine, name=f"{self._owner}: {name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task.cancel

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("task failed", task=task.get_name(), exc_info=error)

    async def cancel(self) -> None:
        """Cancel every task and wait until all have ended."""
        self.closing = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
