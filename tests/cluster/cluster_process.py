"""
One program of the test cluster: started in its own session, logged to a file, ended for certain.

Nothing here knows what the programs are; ``harness`` does. Whoever runs in a cluster carries
``MODELPOOL_TEST_CLUSTER=<its folder>`` in the environment, so that what an earlier owner left
behind is found by looking, not by remembering process ids.
"""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

MARK = "MODELPOOL_TEST_CLUSTER"


class StartFailed(RuntimeError):
    """A program did not come up; the message carries the end of its log."""


class Program:
    """A program that can be started, stopped and started again with the same command line."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        log: Path,
        environ: Mapping[str, str],
        is_ready: Callable[[], bool],
        ready_timeout_s: float = 90.0,
    ) -> None:
        self.name = name
        self.argv = list(argv)
        self.log = log
        self._environ = dict(environ)
        self._is_ready = is_ready
        self._ready_timeout_s = ready_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""
        if self._process is not None and self._process.poll() is None:
            return self._process.pid
        return None

    def launch(self) -> None:
        """Start it without waiting; nothing happens when it runs already."""
        if self.pid is not None:
            return
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environ,
                cwd=self.log.parent,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """
        Wait until it says that it is ready.

        Raises:
            StartFailed: It ended, or was not ready in time.
        """
        deadline = time.monotonic() + self._ready_timeout_s
        while not self._is_ready():
            process = self._process
            if process is None or process.poll() is not None:
                code = None if process is None else process.returncode
                raise StartFailed(f"{self.name} ended with code {code}; {self._end_of_log()}")
            if time.monotonic() > deadline:
                raise StartFailed(
                    f"{self.name} is not ready after {self._ready_timeout_s:.0f} s; "
                    + self._end_of_log()
                )
            time.sleep(0.05)

    def start(self) -> None:
        """Launch it and wait until it is ready."""
        self.launch()
        self.wait_ready()

    def signal(self, number: signal.Signals) -> None:
        """Send *number* to the program alone, not to its group."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def stop(self, grace_s: float = 10.0) -> None:
        """TERM, then KILL after the grace; returns when it is gone. Safe to call twice."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            # A stopped program would sleep through its TERM.
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(grace_s)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait(10)

    def kill(self) -> None:
        """KILL it at once and wait until it is gone."""
        self.stop(grace_s=0)

    def _end_of_log(self) -> str:
        text = self.log.read_text("utf-8", "replace") if self.log.exists() else ""
        return f"the end of {self.log}:\n" + "\n".join(text.splitlines()[-15:])


def free_ports(count: int) -> list[int]:
    """Ports on loopback that nobody listened on a moment ago, all different."""
    holders = [socket.socket() for _ in range(count)]
    try:
        for holder in holders:
            holder.bind(("127.0.0.1", 0))
        return [int(holder.getsockname()[1]) for holder in holders]
    finally:
        for holder in holders:
            holder.close()


def answers(url: str, context: ssl.SSLContext | None = None) -> bool:
    """Whether *url* answers 200 within two seconds."""
    try:
        # A proxy of the environment must not be asked for a server on this machine.
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if context is not None:
            handlers.append(urllib.request.HTTPSHandler(context=context))
        with urllib.request.build_opener(*handlers).open(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def marked(value: str, mark: str = MARK) -> list[int]:
    """Process ids, ours excepted, that carry ``mark=value`` in their environment (Linux)."""
    wanted = f"{mark}={value}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        if int(entry.name) == os.getpid():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # ended meanwhile, or somebody else's
    return found


def end_marked(value: str, mark: str = MARK) -> None:
    """KILL every process that carries the mark; returns when none is left, at most 10 s later."""
    deadline = time.monotonic() + 10
    while pids := marked(value, mark):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {pids} survive SIGKILL")
        time.sleep(0.02)
