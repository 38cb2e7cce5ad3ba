"""
A container of the test kubelet: one local process and everything that it forked.

The first process is the container: when it ends, all others of it are killed, as the end of PID 1
ends a real container. Descendants are found by an environment variable, so that a child which left
the process group does not outlive its container.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster_process import marked

CONTAINER_MARK = "MODELPOOL_TEST_CONTAINER"
_START_ERROR = 128  # what containerd reports when a command cannot be executed


class CannotStart(Exception):
    """The command could not be executed; a container that "ended" with exit code 128."""

    exit_code = _START_ERROR


@dataclass(frozen=True, slots=True)
class Ended:
    """How a container ended. ``code`` is as a shell says it: 137 for KILL."""

    code: int
    signal: int
    oom: bool


class Process:
    """A running container. Made by :func:`start`."""

    def __init__(self, process: subprocess.Popen[bytes], mark: str) -> None:
        self.mark = mark
        self.pid = process.pid
        self._process = process
        self._oom = False
        self._ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._exit = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(self._exit, self._on_exit)
        self._sweep: asyncio.Task[None] | None = None

    def _on_exit(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._exit)
        os.close(self._exit)
        self._sweep = loop.create_task(self._finish(), name=f"end of {self.mark}")

    async def _finish(self) -> None:
        status = self._process.wait()
        await end_descendants(self.mark)
        number = -status if status < 0 else 0
        code = 128 + number if number else status
        self._ended.set_result(Ended(code, number, self._oom and number == signal.SIGKILL))

    async def wait(self) -> Ended:
        """Return when the process and all its descendants are gone. Safe to cancel."""
        return await asyncio.shield(self._ended)

    @property
    def is_gone(self) -> bool:
        return self._ended.done()

    def send(self, number: signal.Signals) -> None:
        """Signal the first process alone, as a container runtime does."""
        if self._process.returncode is None and not self.is_gone:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return

    def kill(self, *, oom: bool = False) -> None:
        """KILL the first process; the rest follows."""
        self._oom = self._oom or oom
        self.send(signal.SIGKILL)

    async def stop(self, deadline: Callable[[], float], number: signal.Signals) -> Ended:
        """
        *number*, then KILL when ``deadline()`` (loop time) has passed; returns when all are gone.

        The deadline is asked again and again, since a second deletion may bring it forward.
        """
        loop = asyncio.get_running_loop()
        self.send(number)
        while not self.is_gone:
            left = deadline() - loop.time()
            if left <= 0:
                self.kill()
            try:
                async with asyncio.timeout(min(max(left, 0.05), 0.25)):
                    await self.wait()
            except TimeoutError:
                continue
        return await self.wait()


def start(
    argv: Sequence[str],
    *,
    environ: Mapping[str, str],
    cwd: Path | None,
    log: Path,
    mark: str,
) -> Process:
    """
    Start a container's command, its output appended to *log*.

    Raises:
        CannotStart: The command does not exist or may not be executed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        try:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environ, CONTAINER_MARK: mark},
                cwd=cwd or log.parent,
                start_new_session=True,
            )
        except OSError as refused:
            raise CannotStart(
                f'failed to create containerd task: exec: "{argv[0]}": {refused.strerror}'
            ) from refused
    return Process(process, mark)


async def end_descendants(mark: str) -> None:
    """KILL everything that carries *mark*; returns when nothing does any more."""
    while pids := await asyncio.to_thread(marked, mark, CONTAINER_MARK):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        await asyncio.sleep(0.02)


async def run_to_end(
    argv: Sequence[str],
    *,
    environ: Mapping[str, str],
    cwd: Path | None,
    log: Path,
    mark: str,
    timeout_s: float,
) -> int:
    """
    Run a hook or an exec probe; its exit code, 137 when it took too long.

    It has a mark of its own: its end must not end the container. Cancel it when the container ends.
    """
    own_mark = f"{mark}/exec-{os.urandom(4).hex()}"
    try:
        process = start(argv, environ=environ, cwd=cwd, log=log, mark=own_mark)
    except CannotStart as refused:
        return refused.exit_code
    try:
        async with asyncio.timeout(timeout_s):
            return (await process.wait()).code
    except TimeoutError:
        return 137
    finally:
        process.kill()
