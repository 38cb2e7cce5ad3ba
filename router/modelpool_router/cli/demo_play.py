"""
What the demo does once it runs: starts a router, plays an exchange as two clients, checks it.

The clients and the time line use the ports as anybody would; nothing here looks inside the
router.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import typer

from .. import testing
from ..app import Router
from ..app.signals import heeded
from ..settings import Address, Settings, bind_error, from_mapping
from ..telemetry import configure_logs
from .words import event_line, seconds_text

if TYPE_CHECKING:
    from asyncio import Task

LOADS_S = {"alpha": 3.0, "beta": 5.0}
POOL = "slot0"
TOKENS = 40
TOKENS_PER_SECOND = 16.0
SHOWN_TOKENS = 10
"""A line of the time line for so many tokens."""
ANSWER_LIMIT_S = 120.0


@dataclass(slots=True)
class Answer:
    """What a client of the demo got."""

    model: str
    status: int = 0
    member: str = ""
    held_ms: int = 0
    tokens: list[str] = field(default_factory=list)
    is_complete: bool = False
    """The stream ended with its terminator."""
    error: str = ""
    ended_at: float = 0.0
    """Unix time."""


class Timeline:
    """Prints what happens, a line each, and remembers when members were unloaded."""

    def __init__(self) -> None:
        self.unloaded_at: dict[str, float] = {}
        self.swaps = 0

    def say(self, member: str, text: str, at: float | None = None) -> None:
        """Print one line; *at* is Unix time, now if left out."""
        clock = time.strftime("%H:%M:%S", time.localtime(at))
        typer.echo(f"{clock}  {member:<7} {text}")
        sys.stdout.flush()

    async def follow(
        self, session: aiohttp.ClientSession, admin: str, ready: asyncio.Event
    ) -> None:
        """Print what the router publishes until it ends; set *ready* when it listens."""
        timeout = aiohttp.ClientTimeout(total=None)
        async with session.get(f"{admin}/api/v1/events", timeout=timeout) as response:
            response.raise_for_status()
            kind = ""
            async for raw in response.content:
                line = raw.decode().rstrip("\r\n")
                if line.startswith("event: "):
                    kind = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    if kind == "snapshot":
                        ready.set()
                    else:
                        self._event(kind, json.loads(line.removeprefix("data: ")))

    def _event(self, kind: str, event: dict[str, object]) -> None:
        told = event_line(kind, event)
        at = event["at"]
        assert isinstance(at, float)  # Unix time, by contract of the event stream
        if told is None:
            return
        member, text = told
        if kind == "state_changed" and text.startswith("unloading"):
            self.unloaded_at[member] = at
        if kind == "swap_completed":
            self.swaps += 1
        self.say(member, text, at)


def demo_settings(listen: Address, admin: Address, state_dir: Path, speed: float) -> Settings:
    """Return a router with one pool of two simulated members."""
    # Members must find this very package, also when it runs from a checkout.
    package = str(Path(testing.__file__).parents[2])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))

    def member(name: str, load_s: float) -> dict[str, object]:
        flags = {
            "--port": "{port}",
            "--name": name,
            "--load": f"{load_s / speed:.3f}",
            "--chunks": str(TOKENS),
            "--tokens-per-second": f"{TOKENS_PER_SECOND * speed:.3f}",
            # Stands for the accelerator's memory: a member that starts while another one has it
            # fails, so that an exchange which worked proves that never two were up.
            "--lock": str(state_dir / "accelerator"),
        }
        words = [word for flag in flags.items() for word in flag]
        return {
            "name": name,
            "profile": "llama-server",
            "command": [sys.executable, "-m", "modelpool_router.testing.member", *words],
            "env": {"PYTHONPATH": path},
            "expectedLoad": f"{max(round(load_s * 1000 / speed), 10)}ms",
        }

    return from_mapping(
        {
            "listen": str(listen),
            "admin": str(admin),
            "stateDir": str(state_dir),
            "shutdownDelay": "0s",
            "logLevel": "error",
            "pools": [
                {
                    "name": POOL,
                    "linger": f"{max(round(300 / speed), 1)}ms",
                    "members": [member(name, load_s) for name, load_s in LOADS_S.items()],
                }
            ],
        }
    )


def free_address(port: int) -> Address:
    """Return *port* of this machine if it is free, else any free one."""
    wanted = Address("127.0.0.1", port)
    return wanted if bind_error(wanted) is None else Address("127.0.0.1", 0)


async def play(*, once: bool, speed: float) -> bool:
    """Run the demo; return whether the exchange went as it should."""
    logs = configure_logs("error", "console", sys.stderr)
    try:
        with tempfile.TemporaryDirectory(prefix="modelpool-demo-") as folder:
            settings = demo_settings(free_address(8080), free_address(9090), Path(folder), speed)
            return await _run(Router(settings, logs), once=once, speed=speed)
    finally:
        logs.close()


async def _run(router: Router, *, once: bool, speed: float) -> bool:
    stop = asyncio.Event()
    with heeded({signal.SIGINT: stop.set, signal.SIGTERM: stop.set}):
        await router.start()
        try:
            return await _session(router, stop, once=once, speed=speed)
        finally:
            # A signal that comes again while members are taken down hurries.
            stop.clear()
            await router.stop(stop)


async def _session(router: Router, stop: asyncio.Event, *, once: bool, speed: float) -> bool:
    from .main import version

    listen, own = router.addresses
    url, admin = f"http://{listen}", f"http://{own}"
    loads = ", ".join(f"{name} (loads {load_s / speed:g} s)" for name, load_s in LOADS_S.items())
    typer.echo(f'modelpool {version()} demo: pool "{POOL}", 2 simulated members: {loads}')
    typer.echo(f"listening on {url}    admin {admin}")
    typer.echo(f"try:  {curl_line(url)}")
    typer.echo(f"and:  {_program()} status --watch --admin {own}\n")
    timeline = Timeline()
    async with aiohttp.ClientSession() as session, _following(timeline, session, admin):
        stopped = asyncio.get_running_loop().create_task(stop.wait(), name="demo stop")
        exchange = asyncio.get_running_loop().create_task(
            _exchange(session, url, timeline), name="demo exchange"
        )
        try:
            await asyncio.wait({stopped, exchange}, return_when=asyncio.FIRST_COMPLETED)
            if not exchange.done():
                return not once  # somebody stopped it: nothing was shown
            wrong = findings(*exchange.result(), timeline, speed)
            for line in wrong:
                typer.secho(f"error: {line}", fg=typer.colors.RED, err=True)
            if not wrong:
                _summary(*exchange.result())
            if not once:
                typer.echo("\nstays up for requests of yours; Ctrl-C ends it")
                await stopped
            return not wrong
        finally:
            for task in (stopped, exchange):
                task.cancel()
            await asyncio.gather(stopped, exchange, return_exceptions=True)


@contextlib.asynccontextmanager
async def _following(
    timeline: Timeline, session: aiohttp.ClientSession, admin: str
) -> AsyncIterator[None]:
    """Print the time line meanwhile; begin when it is known to hear everything."""
    ready = asyncio.Event()
    loop = asyncio.get_running_loop()
    follower: Task[None] = loop.create_task(
        timeline.follow(session, admin, ready), name="demo time line"
    )
    heard = loop.create_task(ready.wait(), name="demo first event")
    try:
        await asyncio.wait({follower, heard}, return_when=asyncio.FIRST_COMPLETED)
        if follower.done():
            follower.result()  # tells why there is no time line
        yield
    finally:
        for task in (follower, heard):
            task.cancel()
        await asyncio.gather(follower, heard, return_exceptions=True)


async def _exchange(
    session: aiohttp.ClientSession, url: str, timeline: Timeline
) -> tuple[Answer, Answer]:
    """Ask for alpha in the empty slot, and for beta while alpha streams."""
    loop = asyncio.get_running_loop()
    streaming = asyncio.Event()
    timeline.say("alpha", "requested  the slot is empty: held while alpha loads")
    first = loop.create_task(ask(session, url, "alpha", timeline, streaming), name="demo alpha")
    second: Task[Answer] | None = None
    try:
        await asyncio.wait(
            {first, begun := loop.create_task(streaming.wait(), name="demo begun")},
            return_when=asyncio.FIRST_COMPLETED,
        )
        begun.cancel()
        timeline.say("beta", "requested  alpha streams: held until alpha's stream has ended")
        second = loop.create_task(
            ask(session, url, "beta", timeline, asyncio.Event()), name="demo beta"
        )
        return await first, await second
    finally:
        tasks = [task for task in (first, second) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    timeline: Timeline,
    streaming: asyncio.Event,
) -> Answer:
    """Send one streamed chat request; set *streaming* when a few tokens have come."""
    answer = Answer(model)
    body = {
        "model": model,
        "stream": True,
        "messages": [{"role": "user", "content": "Whose turn?"}],
    }
    timeout = aiohttp.ClientTimeout(total=ANSWER_LIMIT_S)
    try:
        async with session.post(
            f"{url}/v1/chat/completions", json=body, timeout=timeout
        ) as response:
            answer.status = response.status
            answer.member = response.headers.get("x-modelpool-member", "")
            answer.held_ms = int(response.headers.get("x-modelpool-held-ms", "0"))
            if response.status != 200:
                answer.error = (await response.text())[:300]
                return answer
            timeline.say(model, f"granted    held for {seconds_text(answer.held_ms / 1000)}")
            async for raw in response.content:
                before = len(answer.tokens)
                _read_line(raw.decode().strip(), answer)
                shown = len(answer.tokens)
                if shown == before:
                    continue
                if shown == SHOWN_TOKENS // 2:
                    streaming.set()
                if shown % SHOWN_TOKENS == 0:
                    timeline.say(model, f"streams    {''.join(answer.tokens[-SHOWN_TOKENS:])!r}")
    except (aiohttp.ClientError, TimeoutError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    finally:
        answer.ended_at = time.time()
    if answer.is_complete:
        timeline.say(model, f"answered   {len(answer.tokens)} tokens, stream complete")
    return answer


def _read_line(line: str, answer: Answer) -> None:
    if line == "data: [DONE]":
        answer.is_complete = True
    elif line.startswith("data: "):
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            answer.error = str(chunk["error"])[:300]
        for choice in chunk.get("choices", ()):
            token = choice.get("delta", {}).get("content")
            if token:
                answer.tokens.append(token)


def findings(alpha: Answer, beta: Answer, timeline: Timeline, speed: float) -> list[str]:
    """Return what was not as it should be; empty when hold, stream and swap were right."""
    wrong = []
    for answer in (alpha, beta):
        name = answer.model
        load_ms = LOADS_S[name] * 1000 / speed
        if answer.error or answer.status != 200:
            wrong.append(f"{name}: status {answer.status}, {answer.error or 'no answer'}")
            continue
        if answer.member != name:
            wrong.append(f"{name} was answered by {answer.member or 'nobody knows whom'}")
        if len(answer.tokens) != TOKENS or not answer.is_complete:
            end = "" if answer.is_complete else ", and its stream has no end"
            wrong.append(f"{name} streamed {len(answer.tokens)} of {TOKENS} tokens{end}")
        if answer.held_ms < 0.9 * load_ms:
            wrong.append(f"{name} was held for {answer.held_ms} ms, its load takes {load_ms:.0f}")
    unloaded = timeline.unloaded_at.get("alpha")
    if unloaded is None or timeline.swaps < 1:
        wrong.append("alpha never gave the slot to beta")
    # Two clocks of one machine, read by two tasks: allow for a slow one.
    elif unloaded < alpha.ended_at - 0.1:
        wrong.append("alpha was unloaded before its stream had ended")
    return wrong


def _summary(alpha: Answer, beta: Answer) -> None:
    held = {answer.model: seconds_text(answer.held_ms / 1000) for answer in (alpha, beta)}
    typer.echo(
        f"\nboth were answered: alpha after a hold of {held['alpha']}, beta after {held['beta']}; "
        "no stream was cut and never were two members up"
    )


def _program() -> str:
    """Return how this program is called from where it was started; it may not be in PATH."""
    if shutil.which("modelpool") is not None or not os.access(sys.argv[0], os.X_OK):
        return "modelpool"
    return shlex.quote(os.path.relpath(sys.argv[0]))


def curl_line(url: str) -> str:
    """Return a command that asks for the member that is not resident."""
    body = {"model": "alpha", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    return (
        f"curl -sN {url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d '{json.dumps(body, separators=(',', ':'))}'"
    )
