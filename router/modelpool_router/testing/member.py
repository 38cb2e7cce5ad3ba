"""
A scriptable fake llama-server, as a program: ``python -m modelpool_router.testing.member --help``.

Standard library only, so that it starts in well under 100 ms; used by ``modelpool demo``, the tests
and the benchmarks. This module is its life: lock, log, load, signals, crash, end. What it says over
HTTP is in ``member_server`` and ``member_answers``.

The lock file stands for the accelerator's memory: a kernel lock, held by the member and everything
it forked, so it is free exactly when the last of them has ended, however they ended.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from .member_knobs import Knobs, parse

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Server

    from .member_server import Engine

LOCK_HELD_CODE = 3
"""Exit code when the lock is held: two residents at once, which must never happen."""


class Log:
    """Appends one JSON line per event; several members may share one file."""

    def __init__(self, knobs: Knobs) -> None:
        self._name = knobs.name
        self._path = knobs.log
        self._fd = -1
        if knobs.log:
            self._fd = os.open(knobs.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, event: str, **more: object) -> None:
        """Record *event* with the monotonic time, in one write so that lines never mix."""
        if self._fd >= 0:
            line = {"t": time.monotonic(), "event": event, "name": self._name, "pid": os.getpid()}
            os.write(self._fd, json.dumps({**line, **more}).encode() + b"\n")

    def starts(self) -> int:
        """How often a member of this name has started, this time included."""
        if self._fd < 0:
            return 1
        with open(self._path, encoding="utf-8") as lines:
            events = [json.loads(line) for line in lines]
        return sum(e["event"] == "start" and e["name"] == self._name for e in events)


def say(text: str) -> None:
    """Print a line as an engine does, at once."""
    print(text, flush=True)


def take_lock(knobs: Knobs, log: Log) -> None:
    """Lock ``--lock`` or end with exit code 3."""
    if not knobs.lock:
        return
    fd = os.open(knobs.lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.write("lock_refused")
        print(f"error: out of memory: {knobs.lock} is held by another", file=sys.stderr, flush=True)
        os._exit(LOCK_HELD_CODE)
    log.write("lock_taken")
    if knobs.lock_release_after > 0:
        # The helper must outlive us, however we end, and must not look like a part of the member
        # (no environment): it waits for the end of our side of the pipe, then sleeps on.
        ours, theirs = os.pipe()
        subprocess.Popen(
            ["/bin/sh", "-c", f"read x; exec sleep {knobs.lock_release_after}"],
            stdin=ours,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(fd,),
            start_new_session=True,
            env={"PATH": os.environ.get("PATH", os.defpath)},
        )
        os.close(ours)
        os.set_inheritable(theirs, False)


def fork_grandchild(knobs: Knobs, log: Log) -> None:
    """Leave a process behind that is nobody's child and in nobody's group."""
    middle = os.fork()
    if middle:
        os.waitpid(middle, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.signal(
        signal.SIGTERM, signal.SIG_IGN if knobs.grandchild_ignores_term else signal.SIG_DFL
    )
    log.write("grandchild")
    while True:
        signal.pause()


class Member:
    """One life of the fake member."""

    _loop: AbstractEventLoop
    _server: Server | None

    def __init__(self, knobs: Knobs, log: Log) -> None:
        self._knobs = knobs
        self._log = log
        self._terms = 0
        self._first_term = 0.0
        self._engine: Engine | None = None

    def crash(self, why: str) -> None:
        """End now, without any manners."""
        self._log.write("crash", why=why)
        print(f"error: crashed: {why}", file=sys.stderr, flush=True)
        if self._knobs.crash_signal:
            signal.signal(self._knobs.crash_signal, signal.SIG_DFL)
            os.kill(os.getpid(), self._knobs.crash_signal)
        os._exit(self._knobs.crash_code)

    async def run(self) -> None:
        """Load and serve; a TERM ends the process from within."""
        import asyncio

        from .member_server import Connection, Engine

        knobs, log = self._knobs, self._log
        loop = asyncio.get_running_loop()
        engine = self._engine = Engine(knobs, self.crash)
        self._loop, self._server = loop, None
        loop.add_signal_handler(signal.SIGTERM, self._on_term)
        loop.add_signal_handler(signal.SIGINT, self._on_term)
        load = knobs.load
        if knobs.load_first >= 0 and log.starts() == 1:
            load = knobs.load_first

        async def listen() -> None:
            self._server = await loop.create_server(
                lambda: Connection(engine), knobs.host, knobs.port, backlog=4096
            )
            log.write("listening")

        try:
            if not knobs.late_port:
                await listen()
            await self._load(load)
            if knobs.late_port:
                await listen()
        except OSError as error:
            print(f"error: couldn't bind HTTP server socket: {error}", file=sys.stderr, flush=True)
            self._end(1)
        engine.loaded = True
        log.write("ready")
        say(f"main: {knobs.name} is listening on http://{knobs.host}:{knobs.port}")
        if knobs.crash_after >= 0:
            loop.call_later(knobs.crash_after, self.crash, "as configured")
        await asyncio.Event().wait()

    async def _load(self, seconds: float) -> None:
        import asyncio

        if self._knobs.exit_while_loading >= 0:
            await asyncio.sleep(self._knobs.exit_while_loading)
            print(self._knobs.exit_message, file=sys.stderr, flush=True)
            self._log.write("exit_while_loading")
            os._exit(self._knobs.crash_code)
        steps = max(1, min(10, int(seconds / 0.1)))
        for step in range(steps):
            say(f"load_tensors: {100 * step // steps} %")
            await asyncio.sleep(seconds / steps)
        if self._knobs.never_ready:
            await asyncio.Event().wait()

    def _on_term(self) -> None:
        knobs, engine = self._knobs, self._engine
        now = time.monotonic()
        self._terms += 1
        self._log.write("term", count=self._terms)
        if self._terms == 1:
            self._first_term = now
        if now < self._first_term + knobs.ignore_term:
            return
        assert engine is not None
        if not engine.loaded and knobs.busy_term:
            # llama-server has no handler yet while it loads: the signal itself ends it.
            self._loop.remove_signal_handler(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if knobs.busy_term and self._terms > 1:
            self._end(1)
            return
        if knobs.busy_term and any(connection.busy for connection in engine.open):
            self._linger(engine)
            return
        self._loop.call_later(knobs.unload, self._end, 0)

    def _linger(self, engine: Engine) -> None:
        """Cut streams, take no more connections, wait for what is not streamed, as llama-server."""
        if self._server is not None:
            self._server.close()
        streams = [connection for connection in engine.open if connection.streaming]
        for connection in streams:
            connection.abort()
        deadline = self._loop.time() + self._knobs.term_linger

        def look() -> None:
            working = any(connection.busy for connection in engine.open)
            if self._loop.time() >= deadline or (not working and not streams):
                self._end(0)
            else:
                self._loop.call_later(0.02, look)

        look()

    def _end(self, code: int) -> None:
        """Let go of everything at once: the kernel closes the sockets and frees the lock."""
        self._log.write("stopped", code=code)
        sys.stdout.flush()
        os._exit(code)


def main() -> None:
    """Run one life; never returns."""
    knobs = parse(sys.argv[1:], os.environ)
    log = Log(knobs)
    if knobs.ignore_term > 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until the loop's own handler is there
    log.write("start", slot=os.environ.get("MODELPOOL_SLOT", ""), port=knobs.port)
    say(f"main: loading model {knobs.name}")
    if knobs.exit_at_start >= 0:
        print(knobs.exit_message, file=sys.stderr, flush=True)
        log.write("exit_at_start")
        os._exit(knobs.exit_at_start)
    take_lock(knobs, log)
    if knobs.grandchild:
        fork_grandchild(knobs, log)
    import asyncio

    asyncio.run(Member(knobs, log).run())


if __name__ == "__main__":
    main()
