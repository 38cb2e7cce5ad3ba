"""
A whole router with real members, for tests: ``async with served(tmp_path, pool(...)) as router:``.

`served` runs the real program in a process of its own; `served_here` runs the same router in the
test's loop, which saves its start. Both listen on free ports, run fake members as real processes
(lock file per pool, one event log), and check at the end what must hold after every test: never
two residents, nothing held or lent any more, one log line per request, no process left, no secret
and no traceback in the log.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeVar
from urllib.parse import urlsplit

import aiohttp
import structlog
from prometheus_client.parser import text_string_to_metric_families
from ruamel.yaml import YAML

from fakemembers import PYTHON_ENV, EventLog, carrying, fake_command, is_alive, until
from modelpool_router.app import Router
from modelpool_router.app.serving import reload_once
from modelpool_router.core.estimates import Estimates
from modelpool_router.core.spec import PoolName
from modelpool_router.runtime.pool import PoolRuntime
from modelpool_router.runtime.record import PoolRecord, RecordStore
from modelpool_router.settings import Settings, load, verify
from modelpool_router.telemetry import Logs, configure_logs
from rawclient import RawClient

CANARY = "canary-6f1d2c"
"""Part of every prompt and key that is sent; must be in no log of the router."""
TEST_S = 90.0
"""How long a whole test may take: one that waits for what never comes must fail."""
LIMIT_S = 20.0
"""How long one step may take before the test counts as stuck."""

Json = dict[str, Any]
T = TypeVar("T")
ClientKind = Literal["keep", "close"]
"""Whether clients keep connections, as most do, or say ``Connection: close`` each time."""
_clients: ClientKind = "keep"


def member(
    name: str, *, flags: tuple[str, ...] = (), keys: Json | None = None, **knobs: Any
) -> Json:
    """
    Return the configuration of a fake member; expected to load in 1 s, so that retries are soon.

    Args:
        flags: Further flags of the fake, as they stand.
        keys: Further keys of the member's configuration, such as ``{"parallel": 2}``.
        knobs: Knobs of the fake (``load=0.3`` is ``--load 0.3``; True = the bare flag).
    """
    words = list(flags)
    for knob, value in knobs.items():
        if value is not False:
            words.append("--" + knob.replace("_", "-"))
        if not isinstance(value, bool):
            words.append(str(value))
    command = list(fake_command(name, *words))
    known = {"profile": "llama-server", "expectedLoad": "1s", **(keys or {})}
    return {"name": name, "command": command, **known}


def pool(*members: Json, name: str = "gpu0", **keys: Any) -> Json:
    """Return the configuration of a pool; without lingering unless *keys* say so."""
    return {"name": name, "linger": "0s", "swapBudget": "20s", **keys, "members": list(members)}


def wire(folder: Path, *pools: Json) -> None:
    """Give every member the event log and the lock of its pool."""
    for each in pools:
        for one in each["members"]:
            wired = {
                **PYTHON_ENV,
                "MEMBER_LOG": str(folder / "members.jsonl"),
                "MEMBER_LOCK": str(folder / f"{each['name']}.lock"),
            }
            one["env"] = {**wired, **one.get("env", {})}


def configuration(folder: Path, *pools: Json, **keys: Any) -> Json:
    """Return a whole configuration: free ports, state and event log in *folder*, quick ends."""
    wire(folder, *pools)
    return {
        "listen": "127.0.0.1:0",
        "admin": "127.0.0.1:0",
        "stateDir": str(folder / "state"),
        "shutdownDelay": "0s",
        "shutdownTimeout": "5s",
        "logFormat": "json",
        **keys,
        "pools": list(pools),
    }


def learned(folder: Path, *members: str, name: str = "gpu0", **seconds: float) -> None:
    """Let the router remember times of an earlier run: ``load_s``, ``unload_s``, ``drain_s``."""
    known = {what: dict.fromkeys(members, value) for what, value in seconds.items()}
    record = PoolRecord(Estimates.from_dict(known))
    RecordStore(folder / "state").write(PoolName(name), RecordStore.encode(record))


def write_config(path: Path, config: Json) -> None:
    """Write *config* as YAML, in one step, so that a watcher never sees half of it."""
    yaml = YAML(typ="safe")
    yaml.default_flow_style = False
    yaml.width = 10_000
    draft = path.with_suffix(".draft")
    with draft.open("w", encoding="utf-8") as file:
        yaml.dump(config, file)
    draft.rename(path)


@dataclass(frozen=True, slots=True)
class Answer:
    """One complete answer, with times of the test's own loop."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    began_s: float
    ended_s: float

    @property
    def took_s(self) -> float:
        """Time from sending to the last byte."""
        return self.ended_s - self.began_s

    @property
    def held_ms(self) -> int:
        """How long the router says it was held."""
        return int(self.headers["x-modelpool-held-ms"])

    @property
    def member(self) -> str:
        """Who answered."""
        return self.headers["x-modelpool-member"]

    @property
    def retry_after_s(self) -> int:
        """``Retry-After``, which must be a whole number."""
        text = self.headers["Retry-After"]
        assert text.isdecimal(), text
        return int(text)

    def json(self) -> Any:
        """Return the body as JSON."""
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """Code of an error of ours; '' for other answers."""
        if self.status < 400:
            return ""
        return str(self.json()["error"]["code"])

    @property
    def message(self) -> str:
        """Message of an error of ours."""
        return str(self.json()["error"]["message"])


class Stream:
    """A streamed answer, event by event."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self.status = response.status
        self.headers = response.headers
        self.events: list[str] = []
        """The data of every event so far."""

    @property
    def member(self) -> str:
        """Who answers."""
        return self.headers["x-modelpool-member"]

    async def next(self) -> str | None:
        """Return the data of the next event; None when the stream has ended properly."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                lines: list[str] = []
                while line := (await self.response.content.readline()).decode():
                    if line == "\n":
                        break
                    lines.append(line.rstrip("\n"))
                else:
                    if not lines:
                        return None
                data = [text[5:].strip() for text in lines if text.startswith("data:")]
                if data:
                    self.events.append("\n".join(data))
                    return self.events[-1]

    async def tokens(self, count: int) -> None:
        """Read until *count* events with text have come."""
        while len(self.texts) < count:
            assert await self.next() is not None, self.events

    async def rest(self) -> Self:
        """Read to the end of the stream."""
        while await self.next() is not None:
            pass
        return self

    @property
    def texts(self) -> list[str]:
        """The text of every chunk of a chat that had one."""
        found = []
        for event in self.events:
            if event == "[DONE]":
                continue
            for choice in json.loads(event).get("choices", []):
                if text := choice["delta"].get("content"):
                    found.append(text)
        return found

    @property
    def is_complete(self) -> bool:
        """The terminator came, and came last."""
        return bool(self.events) and self.events[-1] == "[DONE]"

    @property
    def error(self) -> Json | None:
        """The error inside the stream, if there was one."""
        for event in self.events:
            if event != "[DONE]" and "error" in (data := json.loads(event)):
                return dict(data["error"])
        return None


class Served:
    """A router that runs, and its clients. Made by `served` and `served_here`."""

    def __init__(self, folder: Path, config: Json, session: aiohttp.ClientSession) -> None:
        self.folder = folder
        self.config = config
        self.session = session
        self.config_path = folder / "pool.yaml"
        self.state_dir = Path(config["stateDir"])
        self.members = EventLog(folder / "members.jsonl")
        """What the fake members wrote down, with monotonic times."""
        self.url = ""
        self.admin = ""
        self.key = f"key-{CANARY}"
        self.allowed_levels = {"debug", "info", "warning"}
        self.may_clash = False
        """Set by tests in which a member is expected to find the lock taken."""
        self.is_up = False
        self.clients_close = _clients == "close"
        """Whether `session` says that each request is the last of its connection."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._sent: set[str] = set()
        self._count = 0

    def member_config(self, name: str) -> Json:
        """Return the configuration of a member, to be changed before a reload."""
        return next(
            found
            for each in self.config["pools"]
            for found in each["members"]
            if found["name"] == name
        )

    def rewire(self) -> None:
        """Point members that were added to `config` to the event log and the lock."""
        wire(self.folder, *self.config["pools"])

    # ------------------------------------------------------------------ clients

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the data port."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None and parts.port is not None
        return parts.hostname, parts.port

    def raw(self) -> RawClient:
        """Return a client that sends bytes as they are."""
        return RawClient(*self.address)

    def body(self, model: str, **fields: Any) -> Json:
        """Return the body of a chat; ``x_...`` fields script the fake member."""
        words = [{"role": "user", "content": f"prompt {CANARY}"}]
        return {"model": model, "messages": words, **fields}

    def _headers(self, more: Mapping[str, str] | None) -> dict[str, str]:
        self._count += 1
        request_id = f"test-{os.getpid()}-{self._count}"
        self._sent.add(request_id)
        return {"X-Request-Id": request_id, "Authorization": f"Bearer {self.key}", **(more or {})}

    async def chat(
        self,
        model: str,
        *,
        headers: Mapping[str, str] | None = None,
        path: str = "/v1/chat/completions",
        data: bytes | None = None,
        **fields: Any,
    ) -> Answer:
        """Ask for one answer and read all of it."""
        content = data if data is not None else json.dumps(self.body(model, **fields)).encode()
        sent = {"Content-Type": "application/json", **self._headers(headers)}
        clock = asyncio.get_running_loop().time
        began = clock()
        async with self.session.post(self.url + path, data=content, headers=sent) as response:
            body = await response.read()
            return Answer(response.status, response.headers, body, began, clock())

    async def answered(self, model: str, **more: Any) -> Answer:
        """Ask, and insist on an answer by the member of that name."""
        answer = await self.chat(model, **more)
        assert answer.status == 200, answer.body
        assert answer.member == model
        return answer

    async def chat_until_served(self, model: str, *, tries: int = 20, **more: Any) -> Answer:
        """Ask as the SDKs do: again after every 503, when it says so."""
        for _ in range(tries):
            answer = await self.chat(model, **more)
            if answer.status != 503:
                return answer
            await asyncio.sleep(float(answer.headers["retry-after-ms"]) / 1000)
        raise AssertionError(f"{model} not served after {tries} tries")

    @asynccontextmanager
    async def stream(
        self, model: str, *, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> AsyncIterator[Stream]:
        """Ask for a streamed chat; ``x_chunks``, ``x_gap_ms`` and others script it."""
        async with self.session.post(
            self.url + "/v1/chat/completions",
            json=self.body(model, stream=True, **fields),
            headers=self._headers(headers),
        ) as response:
            yield Stream(response)

    async def whole_stream(self, model: str, **fields: Any) -> Stream:
        """Ask for a streamed chat and read all of it."""
        async with self.stream(model, **fields) as stream:
            return await stream.rest()

    async def get(self, path: str) -> Answer:
        """GET a path of the data port."""
        clock = asyncio.get_running_loop().time
        began = clock()
        async with self.session.get(self.url + path) as response:
            return Answer(response.status, response.headers, await response.read(), began, clock())

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start *work* in the background; it is cancelled at the end if nobody awaited it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        return task

    # ------------------------------------------------------------------ the admin port

    async def state(self) -> Json:
        """Return ``/api/v1/state``."""
        async with self.session.get(self.admin + "/api/v1/state") as response:
            assert response.status == 200
            return dict(await response.json())

    async def pool(self, name: str = "gpu0") -> Json:
        """Return the view of one pool, with its members by name under ``member``."""
        view = next(each for each in (await self.state())["pools"] if each["name"] == name)
        return {**view, "member": {each["name"]: each for each in view["members"]}}

    async def wait_for(
        self,
        is_true: Callable[[Json], bool],
        what: str,
        *,
        name: str = "gpu0",
        within_s: float = LIMIT_S,
    ) -> Json:
        """Return the first view of the pool for which *is_true*."""
        found: Json = {}

        async def look() -> bool:
            nonlocal found
            found = await self.pool(name)
            return is_true(found)

        await until(look, what, within_s=within_s)
        return found

    async def until_resident(self, member: str, *, name: str = "gpu0") -> Json:
        """Wait until *member* holds the slot."""
        return await self.wait_for(lambda v: v["resident"] == member, f"{member} loaded", name=name)

    async def until_held(self, member: str, count: int = 1, *, name: str = "gpu0") -> Json:
        """Wait until *count* requests are held for *member*."""
        return await self.wait_for(
            lambda v: v["member"][member]["held"] == count, f"{count} held for {member}", name=name
        )

    async def act(self, verb: str, member: str = "", *, name: str = "gpu0") -> int:
        """POST ``load`` (of *member*), ``unload``, ``pause`` or ``resume``; return the status."""
        query = {"member": member} if member else {}
        url = f"{self.admin}/api/v1/pools/{name}/{verb}"
        async with self.session.post(url, params=query) as response:
            return response.status

    async def swaps(self) -> list[Json]:
        """Return the swaps so far, newest first."""
        async with self.session.get(self.admin + "/api/v1/swaps") as response:
            return list((await response.json())["swaps"])

    async def metric(self, name: str, **labels: str) -> float:
        """Return the sum of all samples called *name* whose labels include *labels*."""
        async with self.session.get(
            self.admin + "/metrics", headers={"Accept-Encoding": "identity"}
        ) as response:
            text = await response.text()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    # ------------------------------------------------------------------ what was written down

    @property
    def log_path(self) -> Path:
        """Where the router writes its log."""
        return self.folder / "router.log"

    def log_lines(self, event: str = "") -> list[Json]:
        """Return the log so far, of one event if given."""
        lines = []
        if self.log_path.exists():
            for text in self.log_path.read_text(encoding="utf-8").split("\n")[:-1]:
                with suppress(ValueError):
                    lines.append(json.loads(text))
        return [line for line in lines if event in ("", line.get("event"))]

    async def wait_for_log(self, event: str, *, count: int = 1) -> Json:
        """Return the *count*-th line of *event* as soon as it is written."""
        await until(lambda: len(self.log_lines(event)) >= count, f"log line {event!r}")
        return self.log_lines(event)[count - 1]

    async def wait_for_request(self, request_id: str) -> Json:
        """Return the log line of one request as soon as it is written."""

        def found() -> list[Json]:
            return [x for x in self.log_lines("request") if x["request_id"] == request_id]

        await until(lambda: bool(found()), f"log line of {request_id}")
        return found()[0]

    def starts(self, member: str) -> int:
        """How often *member* was started so far."""
        return len(self.members.events("start", member))

    def time_of(self, event: str, member: str, at: int = -1) -> float:
        """Return the monotonic time of one event of a member."""
        return float(self.members.events(event, member)[at]["t"])

    async def until_remembered(self) -> None:
        """Wait until what is known of the pools is on disk."""
        await until(
            lambda: any(
                json.loads(path.read_text(encoding="utf-8"))["released"]
                for path in self.state_dir.glob("*.record.json")
            ),
            "the record is written",
        )

    async def until_lock_is_free(self, name: str = "gpu0") -> None:
        """Wait until nobody, a helper included, holds the lock that stands for the memory."""

        def is_free() -> bool:
            with (self.folder / f"{name}.lock").open("a") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
                return True

        await until(is_free, f"the lock of {name} is free")

    async def slot_value(self) -> str:
        """Return what every process of this state directory carries in its environment."""
        return (self.state_dir / "id").read_text(encoding="ascii").strip()

    # ------------------------------------------------------------------ the end

    async def until_quiet(self) -> None:
        """Wait until nothing is held, lent or under way."""

        async def is_quiet() -> bool:
            state = await self.state()
            router = state["router"]
            return not (
                router["held"]
                or router["held_bytes"]
                or router["active_requests"]
                or any(view["held"] or view["in_flight"] for view in state["pools"])
            )

        await until(is_quiet, "nothing held, lent or under way", within_s=5.0)
        for gauge in ("held_requests", "held_bytes", "in_flight"):
            assert await self.metric(f"modelpool_{gauge}") == 0, gauge
        assert await self.metric("modelpool_residency_violations_total") == 0

    async def cancel_tasks(self) -> None:
        """End what `begin` started."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def check_end(self) -> None:
        """Check what must hold after every test, once the router is down."""
        value = await self.slot_value()
        await until(lambda: not carrying(value), "no process left", within_s=5.0)
        if not self.may_clash:
            assert not self.members.events("lock_refused"), "two residents at once"
        self.check_log()

    def check_log(self) -> None:
        """One line per request, no secret, no traceback, no unexpected error."""
        text = self.log_path.read_text(encoding="utf-8")
        assert CANARY not in text
        assert "Traceback" not in text
        lines = self.log_lines()
        assert len(lines) == text.count("\n"), "a line that is not JSON"
        raised = [line for line in lines if "raised" in line]
        assert not raised, raised
        assert not [line for line in lines if line.get("level") not in self.allowed_levels]
        counts = Counter(line["request_id"] for line in lines if line["event"] == "request")
        assert not {each: count for each, count in counts.items() if count != 1}
        assert self._sent <= counts.keys(), self._sent - counts.keys()

    def forget_sent(self) -> None:
        """What was asked so far needs no line: the router was killed under it."""
        self._sent.clear()


class ServedProcess(Served):
    """The real program in a process group of its own."""

    process: asyncio.subprocess.Process
    starts_of_router = 0

    @property
    def pid(self) -> int:
        """Process id of the router."""
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self.process.returncode

    @property
    def log_path(self) -> Path:
        """One file per start."""
        return self.folder / f"router-{self.starts_of_router}.log"

    @property
    def errors(self) -> str:
        """What the last start wrote to its standard error."""
        return self.log_path.with_suffix(".err").read_text(encoding="utf-8")

    async def launch(self, *, write: bool = True) -> None:
        """Start the program without waiting for anything."""
        if write:
            write_config(self.config_path, self.config)
        self.starts_of_router += 1
        environ = {k: v for k, v in os.environ.items() if not k.startswith("MODELPOOL_")}
        with self.log_path.open("wb") as out, self.log_path.with_suffix(".err").open("wb") as err:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "modelpool_router", "serve", str(self.config_path)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**environ, **PYTHON_ENV, "PYTHONWARNINGS": "default"},
                cwd=self.folder,
                start_new_session=True,
            )

    async def start(self) -> None:
        """Start the program and wait until it listens."""
        await self.launch()
        await until(
            lambda: bool(self.log_lines("listening")) or not is_alive(self.pid), "listening"
        )
        told = self.log_lines("listening")
        assert told, f"did not start: {self.errors}{self.log_path.read_text()}"
        self.url, self.admin = told[0]["url"], told[0]["admin"]
        self.is_up = True

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the router alone."""
        os.kill(self.pid, number)

    async def ended(self, within_s: float = LIMIT_S) -> int:
        """Wait for the end of the program; return its exit code."""
        async with asyncio.timeout(within_s):
            code = await self.process.wait()
        self.is_up = False
        return code

    async def kill9(self) -> None:
        """Kill the router, and it alone, without a warning."""
        self.signal(signal.SIGKILL)
        await self.ended()
        self.forget_sent()

    async def terminate(self) -> int:
        """Stop the router gracefully; return its exit code."""
        self.signal(signal.SIGTERM)
        return await self.ended()

    async def restart(self) -> None:
        """Start it again, on the same configuration and state."""
        await self.start()

    async def finish(self) -> None:
        """The end of a good test: quiet, then down, with everything checked."""
        if self.is_up:
            await self.until_quiet()
            assert await self.terminate() == 0, self.errors
            self.log_tail_is_stopped()
        assert not self.errors.strip(), self.errors
        await self.check_end()

    def log_tail_is_stopped(self) -> None:
        """A graceful end says so as its last word."""
        assert self.log_lines()[-1]["event"] == "stopped"

    async def clean_up(self) -> None:
        """Leave nothing running, whatever happened."""
        with suppress(AttributeError, ProcessLookupError):
            if self.process.returncode is None:
                os.kill(self.process.pid, signal.SIGKILL)
                await self.process.wait()
        kill_left(self.state_dir)


class ServedHere(Served):
    """The router in the test's own loop."""

    router: Router
    _logs: Logs

    async def start(self) -> None:
        """Start the router."""
        write_config(self.config_path, self.config)
        settings = load(self.config_path, {}, {})
        problems = verify(settings, os.environ, ports=True)
        assert not problems, problems
        self._stream = self.log_path.open("w", encoding="utf-8")
        self._log_before = logging.getLogger().level, structlog.get_config()
        self._logs = configure_logs("info", "json", self._stream)
        self.router = self.make_router(settings, self._logs)
        try:
            await self.router.start()
        except BaseException:
            self._close_log()
            raise
        listen, admin = self.router.addresses
        self.url, self.admin = f"http://{listen}", f"http://{admin}"
        self.is_up = True

    def make_router(self, settings: Settings, logs: Logs) -> Router:
        """Return the router to start."""
        return Router(settings, logs)

    async def reload(self) -> bool:
        """Put `config` as it is now into force, as a signal does; return whether it is."""
        write_config(self.config_path, self.config)
        return await reload_once(self.router)

    def runtime(self, name: str = "gpu0") -> PoolRuntime:
        """Return a pool itself, for the few tests that must hold up an answer of its driver."""
        return self.router._pools[PoolName(name)]

    async def finish(self) -> None:
        """The end of a good test, as in `ServedProcess`."""
        if self.is_up:
            await self.until_quiet()
            await self.stop()
        await self.check_end()

    async def stop(self) -> None:
        """Stop the router gracefully."""
        self.is_up = False
        try:
            async with asyncio.timeout(LIMIT_S):
                await self.router.stop()
        finally:
            self._close_log()

    def _close_log(self) -> None:
        """Leave logging to the next test as this one found it."""
        self._logs.close()
        self._stream.close()
        level, config = self._log_before
        logging.getLogger().setLevel(level)
        structlog.configure(**config)

    async def clean_up(self) -> None:
        """Leave nothing running, whatever happened."""
        try:
            if self.is_up:
                hurry = asyncio.Event()
                hurry.set()
                async with asyncio.timeout(LIMIT_S):
                    await self.router.stop(hurry)
                self._close_log()
        finally:
            kill_left(self.state_dir)


async def serve_and_fail(config: Path) -> tuple[int, str]:
    """Run ``modelpool serve`` on a file that it must refuse; return exit code and errors."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("MODELPOOL_")}
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "modelpool_router", "serve", str(config)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**environ, **PYTHON_ENV},
        cwd=config.parent,
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            _, errors = await program.communicate()
    finally:
        if program.returncode is None:
            program.kill()
            await program.wait()
    assert program.returncode is not None
    return program.returncode, errors.decode()


def kill_left(state_dir: Path) -> None:
    """Kill every process that carries the id of *state_dir*."""
    with suppress(OSError):
        value = (state_dir / "id").read_text(encoding="ascii").strip()
        for pid in carrying(value):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@asynccontextmanager
async def served(folder: Path, *pools: Json, **keys: Any) -> AsyncIterator[ServedProcess]:
    """
    Run the real program on *pools*; *keys* are further settings of the router.

    Checks at the end what must hold after every test; not when the test has failed already.
    """
    async with _session() as session:
        router = ServedProcess(folder, configuration(folder, *pools, **keys), session)
        async with _ending(router):
            await router.start()
            yield router


@asynccontextmanager
async def served_here(folder: Path, *pools: Json, **keys: Any) -> AsyncIterator[ServedHere]:
    """Run the router in this loop; otherwise as `served`."""
    async with _session() as session:
        router = ServedHere(folder, configuration(folder, *pools, **keys), session)
        async with _ending(router):
            await router.start()
            yield router


@asynccontextmanager
async def _ending(router: ServedProcess | ServedHere) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        stack.push_async_callback(router.clean_up)
        stack.push_async_callback(router.cancel_tasks)
        async with asyncio.timeout(TEST_S):
            yield
            await router.cancel_tasks()
            await router.finish()


@contextmanager
def clients_that(kind: ClientKind) -> Iterator[None]:
    """Let the clients of routers that are started inside be of that *kind*, see `ClientKind`."""
    global _clients
    before, _clients = _clients, kind
    try:
        yield
    finally:
        _clients = before


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=_clients == "close"),
        timeout=aiohttp.ClientTimeout(total=None, sock_read=60.0),
        auto_decompress=False,
        read_bufsize=2**16,
    )


async def all_of(*work: Awaitable[T]) -> list[T]:
    """Wait for everything at once; the first failure is raised."""
    async with asyncio.timeout(60.0):
        return list(await asyncio.gather(*work))
