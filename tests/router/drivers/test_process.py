"""Members that misbehave, as real processes, against the process driver."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shlex
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop

from fakemembers import PYTHON_ENV, EventLog, carrying, fake_command, is_alive, until
from modelpool_router.core.events import Idleness
from modelpool_router.core.spec import MemberName, PoolName
from modelpool_router.drivers import probe, process
from modelpool_router.drivers.base import ActivationFailed, DriverUnavailable, Endpoint
from modelpool_router.drivers.child import run_command
from modelpool_router.drivers.process import (
    Limits,
    ProcessDriver,
    ProcessMember,
    SettleGate,
    StateDirUnusable,
)
from modelpool_router.drivers.procfs import Proc, ProcessTable, PsTable
from modelpool_router.drivers.profiles import Profile, ProfileOverrides, StopStep, profile
from modelpool_router.drivers.statedir import lock_pool

ALPHA, BETA = MemberName("alpha"), MemberName("beta")
QUICK = profile("llama-server", ProfileOverrides(stop_grace_s=1.0, kill_grace_s=0.2))


class Bench:
    """One driver over fake members that share an event log and a lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = EventLog(folder / "events.jsonl")
        self.lock = folder / "accelerator"
        self.losses: list[tuple[MemberName, str, str]] = []
        self.members: dict[MemberName, ProcessMember] = {}
        self.settle: SettleGate | None = None
        self.driver = self.make_driver()

    def make_driver(
        self, pool: str = "gpu0", processes: ProcessTable | None = None
    ) -> ProcessDriver:
        return ProcessDriver(
            PoolName(pool),
            self.members,
            state_dir=self.folder / "state",
            lost=lambda name, reason, detail: self.losses.append((name, reason, detail)),
            limits=Limits(command_s=5.0, kill_s=5.0, gone_s=0.5),
            refused_after_s=0.2,
            processes=processes,
        )

    def fake(self, name: str, *flags: str) -> tuple[str, ...]:
        return fake_command(name, *flags, "--lock", str(self.lock), log=self.log.path)

    def add(
        self,
        name: MemberName,
        *flags: str,
        command: tuple[str, ...] | None = None,
        known: Profile = QUICK,
        env: dict[str, str] | None = None,
        **more: Any,
    ) -> None:
        self.members[name] = ProcessMember(
            name=name,
            command=command or self.fake(name, *flags),
            profile=known,
            env={**PYTHON_ENV, **(env or {})},
            **more,
        )
        self.driver.update(self.members, settle=self.settle)

    def shell(self, name: str, script: str, *flags: str) -> tuple[str, ...]:
        """A wrapper: *script* with SERVER in place of the fake member's command."""
        server = shlex.join(self.fake(name, *flags))
        return ("sh", "-c", script.replace("SERVER", server))

    def pid(self, name: str) -> int:
        return int(self.log.events("start", name)[-1]["pid"])

    @property
    def state_id(self) -> str:
        return (self.folder / "state" / "id").read_text().strip()

    def assert_never_two(self) -> None:
        assert self.log.events("lock_refused") == []


@asynccontextmanager
async def benched(folder: Path) -> AsyncIterator[Bench]:
    bench = Bench(folder)
    try:
        yield bench
    finally:
        await bench.driver.close(stop_members=True)
        assert not carrying(bench.state_id), "a process of a member is left"


@pytest.fixture(autouse=True)
def no_test_leaves_a_process(tmp_path: Path) -> Iterator[None]:
    """A test that failed half way must not leave its orphans on the machine."""
    yield
    path = tmp_path / "state" / "id"
    for pid in carrying(path.read_text().strip()) if path.exists() else ():
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with benched(tmp_path) as made:
        yield made


async def failure_of(bench: Bench, member: MemberName = ALPHA) -> ActivationFailed:
    with pytest.raises(ActivationFailed) as failure:
        await bench.driver.activate(member)
    return failure.value


async def ask(endpoint: Endpoint, path: str, body: object = None) -> Any:
    url = f"http://{endpoint.host}:{endpoint.port}{path}"
    async with aiohttp.ClientSession() as session:
        if body is None:
            async with session.get(url) as answer:
                return await answer.json()
        async with session.post(url, json=body) as answer:
            return await answer.json()


@asynccontextmanager
async def request_under_way(bench: Bench, endpoint: Endpoint, body: object) -> AsyncIterator[None]:
    """Keep one request running in the member."""

    async def post() -> None:
        url = f"http://{endpoint.host}:{endpoint.port}/v1/chat/completions"
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
            await answer.read()

    task = asyncio.get_running_loop().create_task(post())

    async def busy() -> bool:
        return bool((await ask(endpoint, "/debug/stats"))["running"])

    await until(busy, "the request has begun")
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


# -- loading -------------------------------------------------------------------------------


async def test_a_member_that_exits_fails_with_its_code_and_last_lines(bench: Bench) -> None:
    script = "for n in $(seq 1 50); do echo line $n; done; echo out of memory >&2; exit 7"
    bench.add(ALPHA, command=("sh", "-c", script))

    failure = await failure_of(bench)

    assert failure.reason == "exited"
    lines = failure.detail.splitlines()
    assert lines[0] == "exit code 7"
    assert lines[1] == "line 32"
    assert lines[-1] == "out of memory"
    assert len(lines) == 21


async def test_a_member_killed_by_a_signal_says_which(bench: Bench) -> None:
    bench.add(ALPHA, command=("sh", "-c", "kill -SEGV $$"))

    assert "SIGSEGV" in (await failure_of(bench)).detail


@pytest.mark.parametrize("kind", ["missing", "not in PATH", "not executable", "folder", "script"])
async def test_a_command_that_cannot_be_run_fails_for_good(bench: Bench, kind: str) -> None:
    plain = bench.folder / "plain"
    plain.write_text("no program")
    if kind == "script":
        plain.write_text("#!/nonexistent/interpreter\n")
        plain.chmod(0o755)
    program = {
        "missing": str(bench.folder / "nothing"),
        "not in PATH": "no-such-program-anywhere",
        "folder": str(bench.folder),
    }.get(kind, str(plain))
    bench.add(ALPHA, command=(program,))

    failure = await failure_of(bench)

    assert failure.reason == "command_not_found"
    assert not failure.retryable
    assert program in failure.detail


async def test_a_missing_working_directory_is_not_taken_for_a_missing_command(
    bench: Bench,
) -> None:
    bench.add(ALPHA, working_directory=bench.folder / "nowhere")

    failure = await failure_of(bench)

    assert failure.reason == "working_directory_not_found"
    assert not failure.retryable


async def test_a_port_in_use_is_said_before_anything_starts(bench: Bench) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        bench.add(ALPHA, port=port)

        failure = await failure_of(bench)

    assert failure.reason == "port_in_use"
    assert failure.retryable
    assert str(port) in failure.detail
    assert bench.log.events("start") == []
    assert (await bench.driver.activate(ALPHA)).port == port


async def test_g4_a_port_lost_while_loading_fails_the_load_and_not_the_pool(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the new owner of the port never answers: the exit has to end the probe
    monkeypatch.setattr("modelpool_router.drivers.lives._PROBE_S", 60.0)
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
    bench.add(ALPHA, "--late-port", "--load", "0.3", port=port)
    bench.add(BETA)
    load = asyncio.get_running_loop().create_task(bench.driver.activate(ALPHA))
    await bench.log.wait_for("start", "alpha")

    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(ActivationFailed) as failure:
            await asyncio.wait_for(load, 20)
    await bench.driver.deactivate(ALPHA)

    assert failure.value.reason == "port_in_use"
    assert "couldn't bind" in failure.value.detail
    await bench.driver.activate(BETA)


async def test_an_open_port_is_not_yet_a_ready_member(bench: Bench) -> None:
    # the port is open and /v1/models answers 200 all the time, /health says 503
    bench.add(ALPHA, "--load", "0.3", "--models-early")

    endpoint = await bench.driver.activate(ALPHA)

    listening, ready = bench.log.events("listening")[0], bench.log.events("ready")[0]
    assert ready["t"] - listening["t"] >= 0.3
    assert (await ask(endpoint, "/debug/stats"))["health_probes"] >= 2


async def test_a_late_port_is_waited_for(bench: Bench) -> None:
    bench.add(ALPHA, "--load", "0.2", "--late-port")

    endpoint = await bench.driver.activate(ALPHA)

    assert await ask(endpoint, "/health") == {"status": "ok"}


async def test_an_exit_in_the_middle_of_a_load_is_noticed_at_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the next look at the member, which is minutes away here."""
    monkeypatch.setattr(process, "_POLL_FIRST_S", 600.0)
    monkeypatch.setattr(process, "_POLL_LAST_S", 600.0)
    bench.add(ALPHA, "--exit-while-loading", "0.1", "--exit-message", "error: bad tensor")

    async with asyncio.timeout(20.0):
        failure = await failure_of(bench)

    assert failure.detail.splitlines()[-1] == "error: bad tensor"


async def test_a_wrong_readiness_path_ends_the_load_with_the_way_out(bench: Bench) -> None:
    wrong = profile("generic", ProfileOverrides(readiness_path="/nothing-here"))
    command = (sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "{port}")
    bench.add(ALPHA, command=command, known=wrong, working_directory=bench.folder)

    failure = await failure_of(bench)

    assert failure.reason == "readiness_refused"
    assert "readinessPath" in failure.detail
    assert not failure.retryable


async def test_slots_of_llama_server_become_parallel_and_others_say_nothing(bench: Bench) -> None:
    bench.add(ALPHA, "--parallel", "3")
    bench.add(BETA, "--parallel", "3", known=profile("vllm"))

    assert (await bench.driver.activate(ALPHA)).parallel == 3
    await bench.driver.deactivate(ALPHA)
    assert (await bench.driver.activate(BETA)).parallel is None


@pytest.mark.parametrize("name", ["llama-server", "vllm", "sglang", "tgi"])
async def test_idle_and_busy_of_every_engine(bench: Bench, name: str) -> None:
    bench.add(ALPHA, known=profile(name))
    endpoint = await bench.driver.activate(ALPHA)

    before = await bench.driver.idle(ALPHA)
    async with request_under_way(bench, endpoint, {"x_hang": True}):
        during = await bench.driver.idle(ALPHA)

    assert (before, during) == (Idleness.IDLE, Idleness.BUSY)


async def test_without_an_idle_probe_a_busy_member_counts_as_idle(bench: Bench) -> None:
    bench.add(ALPHA, known=profile("generic"))
    endpoint = await bench.driver.activate(ALPHA)

    async with request_under_way(bench, endpoint, {"x_hang": True}):
        assert await bench.driver.idle(ALPHA) is Idleness.IDLE


async def test_a_hung_engine_is_up_but_neither_ready_nor_reachable(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelpool_router.drivers.lives._PROBE_S", 0.2)
    bench.add(ALPHA)
    endpoint = await bench.driver.activate(ALPHA)

    os.kill(bench.pid("alpha"), signal.SIGSTOP)

    assert not await bench.driver.ready(ALPHA)
    assert await bench.driver.idle(ALPHA) is Idleness.UNREACHABLE
    assert await bench.driver.observe() == {ALPHA: endpoint}
    await bench.driver.deactivate(ALPHA)  # a stopped process takes no TERM, but it dies of KILL
    assert not is_alive(bench.pid("alpha"))


async def test_what_a_child_is_given(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELPOOL_ADMIN_TOKEN", "secret")
    monkeypatch.setenv("ORDINARY", "1")
    (bench.folder / "tool").write_text(
        f'#!/bin/sh\npwd > where\nenv > given\nexec {sys.executable} "$@"\n'
    )
    (bench.folder / "tool").chmod(0o755)
    command = ("./tool", *bench.fake("{member}")[1:])
    bench.add(ALPHA, command=command, working_directory=bench.folder, env={"MINE": "2"})

    endpoint = await bench.driver.activate(ALPHA)

    given = (bench.folder / "given").read_text().splitlines()
    assert (bench.folder / "where").read_text().strip() == str(bench.folder)
    assert f"MODELPOOL_SLOT={bench.state_id}/gpu0/alpha" in given
    assert {"ORDINARY=1", "MINE=2"} <= set(given)
    assert not any("secret" in line for line in given)
    assert bench.log.events("start", "alpha")[0]["port"] == endpoint.port


async def test_a_chosen_port_is_outside_the_range_of_outgoing_connections(bench: Bench) -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    bench.add(ALPHA)

    endpoint = await bench.driver.activate(ALPHA)

    assert not low <= endpoint.port <= high


async def test_progress_is_the_last_line_without_colours(bench: Bench) -> None:
    script = "printf 'first\\n\\033[32m10 %%\\r50 %%\\r\\033[0m90 %%'; sleep 1000"
    bench.add(ALPHA, command=("sh", "-c", script))
    load = asyncio.get_running_loop().create_task(bench.driver.activate(ALPHA))

    await until(lambda: bench.driver.progress(ALPHA) == "90 %", "the bar is read")

    await bench.driver.deactivate(ALPHA)
    await asyncio.gather(load, return_exceptions=True)


async def test_a_changed_command_counts_from_the_next_load(bench: Bench) -> None:
    bench.add(ALPHA)
    first = await bench.driver.activate(ALPHA)

    bench.add(ALPHA, "--parallel", "9")
    same = await bench.driver.activate(ALPHA)
    await bench.driver.deactivate(ALPHA)
    second = await bench.driver.activate(ALPHA)

    assert same == first
    assert second.parallel == 9


async def test_a_member_that_was_removed_from_the_configuration_can_be_taken_down(
    bench: Bench,
) -> None:
    bench.add(ALPHA)
    await bench.driver.activate(ALPHA)

    bench.driver.update({}, settle=None)
    await bench.driver.deactivate(ALPHA)

    assert not is_alive(bench.pid("alpha"))


# -- stopping ------------------------------------------------------------------------------


async def test_an_idle_member_gets_exactly_one_term(bench: Bench) -> None:
    # to llama-server a second one means "drop everything"
    bench.add(ALPHA, "--unload", "0.2")
    await bench.driver.activate(ALPHA)

    await bench.driver.deactivate(ALPHA)

    assert [event["count"] for event in bench.log.events("term")] == [1]
    assert bench.log.events("stopped")[0]["code"] == 0


async def test_a_busy_llama_server_leaves_at_the_second_term(bench: Bench) -> None:
    known = profile("llama-server", ProfileOverrides(stop_grace_s=0.2, kill_grace_s=10.0))
    bench.add(ALPHA, "--busy-term", known=known)
    endpoint = await bench.driver.activate(ALPHA)

    async with request_under_way(bench, endpoint, {"x_hang": True}):
        await bench.driver.deactivate(ALPHA)

    assert [event["count"] for event in bench.log.events("term")] == [1, 2]
    assert bench.log.events("stopped")[0]["code"] == 1


async def test_g3_a_member_that_ignores_term_is_killed(bench: Bench) -> None:
    known = profile("llama-server", ProfileOverrides(stop_grace_s=0.1, kill_grace_s=0.1))
    bench.add(ALPHA, "--ignore-term", "inf", known=known)
    bench.add(BETA)
    await bench.driver.activate(ALPHA)

    await bench.driver.deactivate(ALPHA)
    await bench.driver.activate(BETA)

    assert len(bench.log.events("term", "alpha")) == 2
    assert bench.log.events("stopped", "alpha") == []
    bench.assert_never_two()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
async def test_in_a_hurry_a_member_that_ignores_term_is_killed_soon(
    bench: Bench, when: str
) -> None:
    patient = profile("llama-server", ProfileOverrides(stop_grace_s=300.0, kill_grace_s=300.0))
    bench.add(ALPHA, "--ignore-term", "inf", "--grandchild", known=patient)
    await bench.driver.activate(ALPHA)
    hurry = asyncio.Event()
    if when == "before":
        hurry.set()
    closing = asyncio.get_running_loop().create_task(
        bench.driver.close(stop_members=True, hurry=hurry)
    )

    await bench.log.wait_for("term", "alpha")
    hurry.set()
    async with asyncio.timeout(20.0):
        await closing

    assert len(bench.log.events("term", "alpha")) == 1
    assert carrying(bench.state_id) == []
    lock_pool(bench.folder / "state", "gpu0").release()


async def test_in_a_hurry_commands_that_hang_are_given_up_and_the_rest_is_done(
    bench: Bench,
) -> None:
    stop = bench.folder / "stop began"
    hangs = ("sh", "-c", f"touch '{stop}'; exec sleep 1000")
    gone = ("sh", "-c", f"test ! -e '{stop}' || exec sleep 1000")
    bench.add(ALPHA, stop_command=hangs, gone_command=gone)
    bench.driver._limits = Limits(
        command_s=300.0, gone_s=300.0, hurried_grace_s=0.1, hurried_command_s=0.1
    )
    await bench.driver.activate(ALPHA)
    hurry = asyncio.Event()
    closing = asyncio.get_running_loop().create_task(
        bench.driver.close(stop_members=True, hurry=hurry)
    )

    await until(stop.exists, "the stop command runs")
    hurry.set()
    with pytest.raises(DriverUnavailable, match="goneCommand"):
        async with asyncio.timeout(20.0):
            await closing

    assert carrying(bench.state_id) == []
    lock_pool(bench.folder / "state", "gpu0").release()


@pytest.mark.parametrize("flags", [(), ("--grandchild",)], ids=["alone", "with a grandchild"])
async def test_no_process_is_signalled_twice_in_one_step(
    bench: Bench, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    # two signals at almost the same time look like one to the receiver, so count the sending
    sent: list[int] = []
    groups: list[int] = []
    table, killpg = bench.driver._table, os.killpg
    send = table.send

    def record_send(proc: Proc, number: signal.Signals) -> None:
        sent.append(proc.pid)
        send(proc, number)

    def record_group(pid: int, number: int) -> None:
        groups.append(pid)
        killpg(pid, number)

    monkeypatch.setattr(table, "send", record_send)
    monkeypatch.setattr(os, "killpg", record_group)
    bench.add(ALPHA, *flags)
    await bench.driver.activate(ALPHA)

    await bench.driver.deactivate(ALPHA)

    assert groups == [bench.pid("alpha")]
    assert sent == [event["pid"] for event in bench.log.events("grandchild")]


@pytest.mark.parametrize("flags", [(), ("--grandchild-ignores-term",)], ids=["meek", "stubborn"])
async def test_g2_a_child_that_left_session_and_group_is_stopped_too(
    bench: Bench, flags: tuple[str, ...]
) -> None:
    bench.add(ALPHA, "--grandchild", *flags)
    bench.add(BETA)
    await bench.driver.activate(ALPHA)
    grandchild = (await bench.log.wait_for("grandchild"))["pid"]
    assert os.getsid(grandchild) != os.getsid(bench.pid("alpha"))

    await bench.driver.deactivate(ALPHA)

    assert not is_alive(grandchild)
    await bench.driver.activate(BETA)
    bench.assert_never_two()


async def test_a_grandchild_of_a_crashed_member_is_taken_down(bench: Bench) -> None:
    bench.add(ALPHA, "--grandchild")
    bench.add(BETA)
    await bench.driver.activate(ALPHA)
    grandchild = (await bench.log.wait_for("grandchild"))["pid"]

    os.kill(bench.pid("alpha"), signal.SIGKILL)
    await until(lambda: bool(bench.losses), "the loss is noticed")
    assert is_alive(grandchild)
    with pytest.raises(DriverUnavailable, match="alpha is not gone"):
        await bench.driver.activate(BETA)
    await bench.driver.deactivate(ALPHA)
    await bench.driver.activate(BETA)

    assert not is_alive(grandchild)
    bench.assert_never_two()


async def test_members_take_turns_and_are_never_two(bench: Bench) -> None:
    bench.add(ALPHA, "--unload", "0.05", "--grandchild")
    bench.add(BETA, "--unload", "0.05")

    for member in [ALPHA, BETA] * 3:
        await bench.driver.activate(member)
        await bench.driver.deactivate(member)

    assert len(bench.log.events("lock_taken")) == 6
    bench.assert_never_two()


async def test_two_loads_that_wait_for_memory_together_do_not_both_start(bench: Bench) -> None:
    bench.settle = SettleGate(("sleep", "0.2"))
    bench.add(ALPHA)
    bench.add(BETA)

    loads = await asyncio.gather(
        bench.driver.activate(ALPHA), bench.driver.activate(BETA), return_exceptions=True
    )

    assert sum(isinstance(load, DriverUnavailable) for load in loads) == 1
    assert len(bench.log.events("start")) == 1


async def test_a_command_that_is_given_up_is_reaped_before_that_is_told(
    tmp_path: Path,
) -> None:
    """The loop may end right after, and nobody would wait for it then."""
    told = tmp_path / "pid"
    script = f"echo $$ > {told}.new; mv {told}.new {told}; exec sleep 1000"
    async with asyncio.TaskGroup() as group:
        command = group.create_task(
            run_command(("sh", "-c", script), env=dict(os.environ), cwd=None, timeout_s=60.0)
        )
        await until(told.exists, "it runs")
        command.cancel()

    with pytest.raises(ChildProcessError):
        os.waitpid(int(told.read_text()), os.WNOHANG)


async def test_swaps_leak_no_descriptors(bench: Bench) -> None:
    bench.add(ALPHA)

    async def swap() -> int:
        await bench.driver.activate(ALPHA)
        await bench.driver.deactivate(ALPHA)
        return len(os.listdir("/proc/self/fd"))

    await swap()
    counts = [await swap() for _ in range(4)]

    assert counts[-1] <= counts[0]


# -- losses --------------------------------------------------------------------------------


async def test_a_crash_of_the_resident_is_reported_at_once_with_its_last_words(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its end, not by the next look at the member, which is minutes away here."""
    monkeypatch.setattr(process, "LOOK_S", 600.0)
    bench.add(ALPHA, "--crash-after", "0.1", "--crash-signal", str(int(signal.SIGSEGV)))
    await bench.driver.activate(ALPHA)

    await until(lambda: bool(bench.losses), "the loss is reported")

    ((member, reason, detail),) = bench.losses
    assert (member, reason) == (ALPHA, "exited")
    assert detail.startswith("killed by SIGSEGV")
    assert "crashed: as configured" in detail
    assert await bench.driver.idle(ALPHA) is Idleness.UNREACHABLE
    assert not await bench.driver.ready(ALPHA)


async def test_a_health_path_that_lies_does_not_keep_a_member_from_being_unloaded(
    bench: Bench,
) -> None:
    known = profile("llama-server", ProfileOverrides(stop_grace_s=0.1, kill_grace_s=0.1))
    bench.add(ALPHA, "--inference-status", "500", "--ignore-term", "inf", known=known)
    endpoint = await bench.driver.activate(ALPHA)
    assert (await ask(endpoint, "/v1/chat/completions", {}))["error"]["code"] == 500
    first = bench.pid("alpha")

    await bench.driver.deactivate(ALPHA)
    await bench.driver.activate(ALPHA)

    assert not is_alive(first)
    assert bench.pid("alpha") != first


# -- wrappers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script",
    [
        "SERVER & exit 0",
        "SERVER & wait",
        "exec SERVER",
        "SERVER; sleep 1000",
        "trap '' TERM; SERVER & wait; wait",
        "setsid SERVER",
    ],
)
@pytest.mark.parametrize("victim", ["server", "nobody"])
async def test_wrappers_fool_nobody(bench: Bench, script: str, victim: str) -> None:
    known = profile("llama-server", ProfileOverrides(stop_grace_s=0.3, kill_grace_s=0.1))
    bench.add(ALPHA, command=bench.shell("alpha", script), known=known)
    bench.add(BETA)
    endpoint = await bench.driver.activate(ALPHA)
    assert await bench.driver.activate(ALPHA) == endpoint
    assert await bench.driver.observe() == {ALPHA: endpoint}

    if victim == "server":
        os.kill(bench.pid("alpha"), signal.SIGKILL)
        await until(lambda: bool(bench.losses), "the loss is noticed", within_s=15.0)
        assert await bench.driver.observe() == {}
    else:
        assert bench.losses == []
    await bench.driver.deactivate(ALPHA)
    await bench.driver.activate(BETA)

    assert not is_alive(bench.pid("alpha"))
    assert len(bench.losses) == (victim == "server")
    bench.assert_never_two()


async def test_a_server_that_dies_at_once_behind_its_wrapper_is_a_loss(bench: Bench) -> None:
    """Its wrapper is alone then, and so looks like a server."""
    bench.add(ALPHA, command=bench.shell("alpha", "SERVER; sleep 1000"))
    await bench.driver.activate(ALPHA)

    os.kill(bench.pid("alpha"), signal.SIGKILL)

    await until(lambda: bool(bench.losses), "the loss is noticed", within_s=15.0)
    assert bench.losses[0][1] == "port_closed"


async def test_a_wrapper_that_leaves_later_leaves_its_server_up(bench: Bench) -> None:
    flag = bench.folder / "leave"
    script = f"SERVER & while test ! -e {flag}; do sleep 0.05; done"
    bench.add(ALPHA, command=bench.shell("alpha", script))
    endpoint = await bench.driver.activate(ALPHA)
    life = bench.driver._lives[ALPHA]

    flag.write_text("")
    await until(lambda: life.is_detached, "the wrapper has left")

    assert await bench.driver.observe() == {ALPHA: endpoint}
    assert bench.losses == []
    os.kill(bench.pid("alpha"), signal.SIGKILL)
    await until(lambda: bool(bench.losses), "the loss is noticed", within_s=15.0)


async def test_a_killed_wrapper_is_a_loss_and_its_server_is_taken_down(bench: Bench) -> None:
    bench.add(ALPHA, command=bench.shell("alpha", "SERVER & wait"))
    await bench.driver.activate(ALPHA)
    server = bench.pid("alpha")
    wrapper = int(Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[1])

    os.kill(wrapper, signal.SIGKILL)
    await until(lambda: bool(bench.losses), "the loss is noticed", within_s=15.0)
    assert is_alive(server)
    await bench.driver.deactivate(ALPHA)

    assert not is_alive(server)


async def test_a_wrapper_that_fails_is_a_failed_load_although_its_child_lives(
    bench: Bench,
) -> None:
    bench.add(ALPHA, command=bench.shell("alpha", "SERVER & exit 3", "--never-ready"))

    failure = await failure_of(bench)
    await bench.driver.deactivate(ALPHA)

    assert failure.reason == "exited"
    assert failure.detail.startswith("exit code 3")


async def test_a_wrapper_whose_child_dies_while_loading_is_a_failed_load(bench: Bench) -> None:
    flags = ("--exit-while-loading", "0.2")
    bench.add(ALPHA, command=bench.shell("alpha", "SERVER & exit 0", *flags))

    assert (await failure_of(bench)).reason == "exited"


# -- stopCommand and goneCommand -----------------------------------------------------------


class Container:
    """A tool like docker: what it starts is nobody's child and carries nobody's environment."""

    def __init__(self, bench: Bench) -> None:
        self.pidfile = bench.folder / "container"
        server = shlex.join(bench.fake("alpha"))
        self.run = (
            "sh",
            "-c",
            f"env -u MODELPOOL_SLOT setsid {server} >/dev/null 2>&1 & echo $! > {self.pidfile}",
        )
        self.stop = ("sh", "-c", f"kill $(cat {self.pidfile})")
        alive = f"grep -qs '^State:[[:space:]]*[RSDT]' /proc/$(cat {self.pidfile})/status"
        self.gone = ("sh", "-c", f"test ! -e {self.pidfile} || ! {alive}")

    @property
    def pid(self) -> int:
        return int(self.pidfile.read_text())


async def test_a_container_is_started_and_stopped_by_its_tool(bench: Bench) -> None:
    tool = Container(bench)
    bench.add(ALPHA, command=tool.run, stop_command=tool.stop, gone_command=tool.gone)
    bench.add(BETA)
    endpoint = await bench.driver.activate(ALPHA)
    assert carrying(bench.state_id) == []
    assert await bench.driver.observe() == {ALPHA: endpoint}

    await bench.driver.deactivate(ALPHA)

    assert not is_alive(tool.pid)
    await bench.driver.activate(BETA)
    bench.assert_never_two()


async def test_a_container_that_dies_is_a_loss(bench: Bench) -> None:
    tool = Container(bench)
    bench.add(ALPHA, command=tool.run, stop_command=tool.stop, gone_command=tool.gone)
    await bench.driver.activate(ALPHA)

    os.kill(tool.pid, signal.SIGKILL)

    await until(lambda: bool(bench.losses), "the loss is noticed", within_s=15.0)
    assert bench.losses[0][1] == "port_closed"


async def test_without_the_means_to_look_members_are_looked_after_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No free file is no end of a member, and no end of watching it."""
    tool = Container(bench)
    bench.add(ALPHA, command=tool.run, stop_command=tool.stop, gone_command=tool.gone)
    endpoint = await bench.driver.activate(ALPHA)
    tries = 0

    async def refuses(host: str, port: int) -> bool:
        nonlocal tries
        tries += 1
        if tries <= 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return await probe.port_refuses(host, port)

    monkeypatch.setattr(process, "port_refuses", refuses)
    await until(lambda: tries > 2, "it is looked at again", within_s=15.0)
    assert await bench.driver.observe() == {ALPHA: endpoint}
    assert bench.losses == []

    os.kill(tool.pid, signal.SIGKILL)

    await until(lambda: bool(bench.losses), "the loss is noticed", within_s=15.0)


async def test_a_port_that_cannot_be_asked_does_not_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert await probe.port_refuses("127.0.0.1", port)

    def no_files(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socket", no_files)
    assert not await probe.port_refuses("127.0.0.1", port)


async def test_a_container_that_an_earlier_router_left_is_stopped_at_the_start(
    bench: Bench,
) -> None:
    tool = Container(bench)
    bench.add(ALPHA, command=tool.run, stop_command=tool.stop, gone_command=tool.gone)
    await bench.driver.activate(ALPHA)
    await bench.driver.close(stop_members=False)
    assert is_alive(tool.pid)

    bench.driver = bench.make_driver()
    found = await bench.driver.observe()

    assert found == {}
    assert not is_alive(tool.pid)


async def test_gone_is_what_the_gone_command_says(bench: Bench) -> None:
    flag = bench.folder / "still there"
    stop = ("sh", "-c", "echo cannot stop; exit 4")
    bench.add(ALPHA, stop_command=stop, gone_command=("test", "!", "-e", str(flag)))
    await bench.driver.activate(ALPHA)
    flag.write_text("")

    with pytest.raises(DriverUnavailable) as failure:
        await bench.driver.deactivate(ALPHA)
    flag.unlink()
    await bench.driver.deactivate(ALPHA)

    assert "goneCommand" in str(failure.value)
    assert "cannot stop" in str(failure.value)


async def test_a_stop_command_that_hangs_is_given_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.driver, "_limits", Limits(command_s=0.1))
    marker = "1000.25"
    bench.add(ALPHA, stop_command=("sh", "-c", f"sleep {marker}"))
    await bench.driver.activate(ALPHA)

    await bench.driver.deactivate(ALPHA)

    listed = await asyncio.create_subprocess_exec(
        "ps", "-A", "-o", "args=", stdout=asyncio.subprocess.PIPE
    )
    output, _ = await listed.communicate()
    assert marker not in output.decode()


# -- memory --------------------------------------------------------------------------------


def meter(bench: Bench, *, timeout_s: float = 10.0, interval_s: float = 0.02) -> SettleGate:
    """Free memory as the lock tells it: none while anybody holds it."""
    code = (
        "import fcntl, sys; f = open(sys.argv[1], 'a+')\n"
        "try: fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB); print(24000)\n"
        "except BlockingIOError: print(0)"
    )
    command = (sys.executable, "-c", code, str(bench.lock))
    return SettleGate(command, timeout_s=timeout_s, interval_s=interval_s)


async def test_memory_that_comes_back_late_is_waited_for(bench: Bench) -> None:
    bench.settle = meter(bench)
    bench.add(ALPHA, "--lock-release-after", "0.4", memory_needed_mib=8000)
    bench.add(BETA, memory_needed_mib=8000)
    await bench.driver.activate(ALPHA)
    await bench.driver.deactivate(ALPHA)

    await bench.driver.activate(BETA)

    bench.assert_never_two()
    stopped = bench.log.events("stopped", "alpha")[0]["t"]
    assert bench.log.events("start", "beta")[0]["t"] - stopped >= 0.4


async def test_without_a_need_it_is_the_memory_of_before_that_is_waited_for(bench: Bench) -> None:
    bench.settle = meter(bench)
    bench.add(ALPHA, "--lock-release-after", "0.4")
    bench.add(BETA)
    await bench.driver.activate(ALPHA)
    await bench.driver.deactivate(ALPHA)

    await bench.driver.activate(BETA)

    bench.assert_never_two()


async def test_without_the_gate_one_load_fails_and_the_pool_recovers(bench: Bench) -> None:
    bench.add(ALPHA, "--lock-release-after", "0.4")
    bench.add(BETA)
    await bench.driver.activate(ALPHA)
    await bench.driver.deactivate(ALPHA)

    failure = await failure_of(bench, BETA)

    assert failure.detail.splitlines()[0] == "exit code 3"

    async def loads() -> bool:
        with suppress(ActivationFailed):
            await bench.driver.activate(BETA)
            return True
        return False

    await until(loads, "the pool has recovered")


async def test_after_a_crash_nobody_waits_for_memory_that_is_free_already(bench: Bench) -> None:
    """The first look is enough: a second one would come after ten minutes here."""
    bench.settle = meter(bench, timeout_s=600.0, interval_s=600.0)
    bench.add(ALPHA)
    bench.add(BETA)
    await bench.driver.activate(ALPHA)
    os.kill(bench.pid("alpha"), signal.SIGKILL)
    await until(lambda: bool(bench.losses), "the loss is noticed")

    async with asyncio.timeout(20.0):
        await bench.driver.deactivate(ALPHA)
        await bench.driver.activate(BETA)

    bench.assert_never_two()


# -- routers -------------------------------------------------------------------------------


ROUTER_PROGRAM = """
import asyncio, json, sys
from pathlib import Path
from modelpool_router.drivers.process import ProcessDriver, ProcessMember
from modelpool_router.drivers.profiles import profile

async def main():
    state, pool, command, env = sys.argv[1:]
    member = ProcessMember("alpha", tuple(json.loads(command)), profile("llama-server"),
                           env=json.loads(env))
    driver = ProcessDriver(pool, {"alpha": member}, state_dir=Path(state), lost=print)
    await driver.observe()
    print("open", flush=True)
    await driver.activate("alpha")
    print("up", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def other_router(
    folder: Path, command: tuple[str, ...], *, until_line: bytes = b"up\n", pool: str = "gpu0"
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A router process with one resident, killed without mercy at the end."""
    router = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        ROUTER_PROGRAM,
        str(folder / "state"),
        pool,
        json.dumps(command),
        json.dumps(PYTHON_ENV),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **PYTHON_ENV},
    )
    assert router.stdout is not None
    while (line := await router.stdout.readline()) != until_line:
        assert line, "the router ended early"
    try:
        yield router
    finally:
        with suppress(ProcessLookupError):
            router.kill()
        await router.wait()


def orphaned(folder: Path, *flags: str) -> tuple[str, ...]:
    lock = ("--lock", str(folder / "accelerator"))
    return fake_command("alpha", *lock, *flags, log=folder / "events.jsonl")


@pytest.mark.parametrize("pool", ["gpu0", "renamed"])
@pytest.mark.parametrize(
    "flags",
    [(), ("--grandchild",), ("--ignore-term", "inf"), ("--never-ready",)],
    ids=["up", "with a grandchild", "ignores term", "loading"],
)
async def test_orphans_of_a_killed_router_are_gone_before_the_next_one_starts_anything(
    tmp_path: Path, pool: str, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = (StopStep(signal.SIGTERM, 0.3), StopStep(signal.SIGTERM, 0.1))
    monkeypatch.setattr("modelpool_router.drivers.takedown.ORPHAN_STEPS", quick)
    log = EventLog(tmp_path / "events.jsonl")
    line = b"open\n" if "--never-ready" in flags else b"up\n"
    async with other_router(tmp_path, orphaned(tmp_path, *flags), until_line=line, pool=pool):
        await log.wait_for("listening", "alpha")
    async with benched(tmp_path) as bench:
        bench.add(ALPHA)
        bench.add(BETA)
        assert is_alive(bench.pid("alpha"))
        assert carrying(bench.state_id)

        found = await bench.driver.observe()

        assert found == {}
        assert carrying(bench.state_id) == []
        await bench.driver.activate(BETA)
        bench.assert_never_two()


async def test_an_orphan_is_taken_down_by_a_load_as_well(tmp_path: Path) -> None:
    async with other_router(tmp_path, orphaned(tmp_path)):
        pass
    async with benched(tmp_path) as bench:
        bench.add(ALPHA)
        bench.add(BETA)

        with pytest.raises(DriverUnavailable, match="alpha is not gone"):
            await bench.driver.activate(BETA)
        await bench.driver.activate(ALPHA)

        bench.assert_never_two()
        assert len(bench.log.events("start", "alpha")) == 2


async def test_a_second_router_on_one_pool_is_kept_off_and_harms_nobody(tmp_path: Path) -> None:
    async with other_router(tmp_path, orphaned(tmp_path)) as first:
        with pytest.raises(StateDirUnusable, match=f"process {first.pid}"):
            Bench(tmp_path)
        bench = beside_bench(tmp_path)
        beside = bench.make_driver(pool="gpu1")
        found = await beside.observe()
        await beside.close(stop_members=True)

        assert found == {}
        assert len(carrying(f"{bench.state_id}/gpu0/alpha")) == 1
    async with benched(tmp_path) as bench:
        await bench.driver.observe()


def beside_bench(folder: Path) -> Bench:
    """A bench without a driver of its own."""
    bench = Bench.__new__(Bench)
    bench.folder, bench.members, bench.losses = folder, {}, []
    return bench


async def test_members_left_running_on_purpose_are_the_next_routers_business(
    bench: Bench,
) -> None:
    bench.add(ALPHA)
    await bench.driver.activate(ALPHA)

    await bench.driver.close(stop_members=False)
    assert is_alive(bench.pid("alpha"))
    bench.driver = bench.make_driver()
    await bench.driver.observe()

    assert not is_alive(bench.pid("alpha"))
    assert bench.losses == []


# -- log files -----------------------------------------------------------------------------


async def test_the_log_of_the_last_life_is_kept_beside_the_new_one(bench: Bench) -> None:
    bench.add(ALPHA, "--exit-at-start", "1", "--exit-message", "error: first life")
    await failure_of(bench)
    bench.add(ALPHA, "--exit-at-start", "1", "--exit-message", "error: second life")
    await failure_of(bench)

    now = bench.folder / "state" / "logs" / "gpu0.alpha.log"
    old = bench.folder / "state" / "logs" / "gpu0.alpha.log.1"

    assert "second life" in now.read_text()
    assert "first life" in old.read_text()
    assert now.stat().st_mode & 0o077 == 0


async def test_a_log_that_grows_too_large_is_cut_while_the_member_writes_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelpool_router.drivers.logfile._MOST", 64 * 1024)
    path = bench.folder / "own.log"
    talker = "(while :; do echo 0123456789012345678901234567890123456789; done) & exec SERVER"
    bench.add(ALPHA, command=bench.shell("alpha", talker), log_file=path)
    monkeypatch.setattr("modelpool_router.drivers.process.LOOK_S", 0.02)

    await bench.driver.activate(ALPHA)
    old = path.with_name("own.log.1")
    await until(lambda: old.exists() and old.stat().st_size > 0, "it was cut")
    await bench.driver.deactivate(ALPHA)

    assert old.stat().st_size <= 64 * 1024


async def test_a_log_file_that_cannot_be_opened_is_said(bench: Bench) -> None:
    (bench.folder / "file").write_text("")
    bench.add(ALPHA, log_file=bench.folder / "file" / "x.log")

    failure = await failure_of(bench)

    assert failure.reason == "log_file"
    assert "logFile" in failure.detail


# -- other loops and other systems ---------------------------------------------------------


async def a_whole_life(folder: Path, processes: Callable[[], ProcessTable] | None = None) -> None:
    """Load, crash, clean up, load again, swap, stop."""
    bench = Bench(folder)
    if processes is not None:
        await bench.driver.close(stop_members=True)
        bench.driver = bench.make_driver(processes=processes())
    bench.add(ALPHA, "--grandchild")
    bench.add(BETA)
    assert await bench.driver.observe() == {}
    await bench.driver.activate(ALPHA)
    os.kill(bench.pid("alpha"), signal.SIGKILL)
    await until(lambda: bool(bench.losses), "the loss is noticed")
    await bench.driver.deactivate(ALPHA)
    first = await bench.driver.activate(ALPHA)
    assert first.identity
    await bench.driver.deactivate(ALPHA)
    await bench.driver.activate(BETA)
    await bench.driver.close(stop_members=True)
    assert len(bench.losses) == 1
    assert not carrying(bench.state_id)
    bench.assert_never_two()


def test_the_same_under_uvloop(tmp_path: Path) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(a_whole_life(tmp_path))


async def test_the_same_without_pidfd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(pid: int, flags: int = 0) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", missing)

    await a_whole_life(tmp_path)


async def test_the_same_without_proc(tmp_path: Path) -> None:
    await a_whole_life(tmp_path, PsTable)


async def test_a_process_table_that_cannot_be_read_proves_nothing(bench: Bench) -> None:
    class Broken(PsTable):
        def find(self, *args: object) -> Any:
            raise PermissionError("no")

    bench.add(ALPHA)
    await bench.driver.activate(ALPHA)
    whole, bench.driver._table = bench.driver._table, Broken()

    with pytest.raises(DriverUnavailable, match="process table"):
        await bench.driver.deactivate(ALPHA)

    bench.driver._table = whole
    await bench.driver.deactivate(ALPHA)
