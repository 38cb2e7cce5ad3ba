"""
One child process: start it, hear of its end at once, keep its output in a file.

Not asyncio's subprocess: that one kills its process when the loop ends (members may be left
running) and can be cancelled half way through a start. Here the start is one synchronous step. The
end is a pidfd in the loop, which works alike under asyncio and uvloop, or a thread where there is
none.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


class Child:
    """A process in its own session and group. Created by `start` only."""

    def __init__(self, popen: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop) -> None:
        self._popen = popen
        self._loop = loop
        self._handle = -1
        self.pid = popen.pid
        self.ended: asyncio.Future[int] = loop.create_future()
        """Exit code, negative for a signal. Wait with `asyncio.wait`, which never cancels it."""
        try:
            self._handle = os.pidfd_open(popen.pid)
        except (OSError, AttributeError):
            name = f"wait for {popen.pid}"
            threading.Thread(target=self._wait_in_thread, name=name, daemon=True).start()
        else:
            loop.add_reader(self._handle, self._on_end)

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None,
        output: int,
    ) -> Child:
        """
        Start *command*; both its output streams go to the file descriptor *output*.

        Raises:
            OSError: it could not be started; nothing is left of it.
        """
        popen = subprocess.Popen(
            command,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        return cls(popen, asyncio.get_running_loop())

    async def wait(self, seconds: float) -> bool:
        """Wait for the end, at most *seconds*; True when it has ended."""
        await asyncio.wait({self.ended}, timeout=seconds)
        return self.ended.done()

    def kill_group(self) -> None:
        """Kill the whole group, as long as its number is certainly ours."""
        if not self.ended.done():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def forget(self) -> None:
        """Stop watching. A process that still runs is left to itself."""
        self._close_handle()
        if self._popen.returncode is None:
            # silences the warning of Popen about a process that is deliberately left running
            self._popen.returncode = 0

    def _on_end(self) -> None:
        self._close_handle()
        self._set(self._popen.wait())

    def _wait_in_thread(self) -> None:
        code = self._popen.wait()
        with suppress(RuntimeError):  # the loop is closed: nobody wants to know any more
            self._loop.call_soon_threadsafe(self._set, code)

    def _set(self, code: int) -> None:
        if not self.ended.done():
            self.ended.set_result(code)

    def _close_handle(self) -> None:
        if self._handle >= 0:
            self._loop.remove_reader(self._handle)
            os.close(self._handle)
            self._handle = -1


def describe_exit(code: int) -> str:
    """Say for people how a process ended."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a helper command ended."""

    code: int | None
    """None = it took too long and was killed, or could not be started."""
    output: str
    """The end of what it printed, or why it did not start."""

    @property
    def succeeded(self) -> bool:
        """Exit code 0."""
        return self.code == 0

    def __str__(self) -> str:
        how = "did not end in time" if self.code is None else describe_exit(self.code)
        return f"{how}: {self.output}" if self.output else how


async def run_command(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path | None,
    timeout_s: float,
) -> CommandResult:
    """Run a short helper command and return how it ended; killed with its group on cancellation."""
    # A file and not a pipe: a grandchild that keeps a pipe open would hold us up.
    with tempfile.TemporaryFile() as output:
        try:
            child = Child.start(command, env=env, cwd=cwd, output=output.fileno())
        except OSError as error:
            return CommandResult(None, f"cannot start {command[0]}: {error.strerror or error}")
        try:
            in_time = await child.wait(timeout_s)
        except asyncio.CancelledError:
            child.kill_group()
            await child.wait(1.0)  # so that it is reaped, though the loop may end after this
            raise
        if not in_time:
            child.kill_group()
            await child.wait(1.0)
        code = child.ended.result() if child.ended.done() else None
        size = output.seek(0, os.SEEK_END)
        output.seek(max(0, size - 4096))
        text = output.read().decode("utf-8", "replace").strip()
    return CommandResult(code if in_time else None, text)
