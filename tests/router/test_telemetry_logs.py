"""Logs: one shape for all, nothing that clients sent, and nobody waits for the reader."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import re
import select
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import structlog

from modelpool_router.core.commands import Note, NoteKind
from modelpool_router.telemetry import Logs, LogWriter, configure_logs
from modelpool_router.telemetry.logs import MAX_LINES

ROUTER = Path(__file__).parents[2] / "router"
SECRET = "sk-geheim-prompt"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Sink:
    """A log in memory; reading it closes it, so that all lines are there."""

    def __init__(self) -> None:
        self.stream = io.StringIO()
        self.logs: Logs | None = None

    def open(self, level: str = "info", fmt: str = "json") -> Logs:
        self.logs = configure_logs(level, fmt, self.stream)
        return self.logs

    def text(self) -> str:
        assert self.logs is not None
        self.logs.close()
        return self.stream.getvalue()

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text().splitlines()]


@pytest.fixture
def sink() -> Iterator[Sink]:
    root = logging.getLogger()
    level = root.level
    sink = Sink()
    yield sink
    if sink.logs is not None:
        sink.logs.close()
    root.setLevel(level)
    structlog.reset_defaults()


def log_request(logs: Logs, **changes: Any) -> None:
    fields: dict[str, Any] = {
        "request_id": "req_1",
        "pool": "gpu0",
        "member": "alpha",
        "model": "gpt-4o-mini",
        "held_ms": 1500.04,
        "outcome": "served",
        "status": 200,
        "code": "",
        "sent_bytes": 512,
        "ttfb_ms": 31.26,
        "duration_ms": 2200.0,
        "key_id": "team-a",
    }
    logs.request_line(**{**fields, **changes})


def test_given_a_finished_request_when_logged_then_it_is_one_line_of_json(sink: Sink) -> None:
    log_request(sink.open())

    [line] = sink.lines()
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "level": "info",
        "event": "request",
        "request_id": "req_1",
        "pool": "gpu0",
        "member": "alpha",
        "model": "gpt-4o-mini",
        "held_ms": 1500.0,
        "outcome": "served",
        "status": 200,
        "bytes": 512,
        "ttfb_ms": 31.3,
        "duration_ms": 2200.0,
        "key": "team-a",
    }


@pytest.mark.parametrize("name", ["a", 'say "held_ms":-1.0', "100 %d", "é%s", "\x00\n"])
@pytest.mark.parametrize("absent", ["pool", "model", "status", "key_id", "held_ms", "ttfb_ms"])
def test_given_any_names_when_logged_then_each_is_in_its_field(
    sink: Sink, name: str, absent: str
) -> None:
    fields: dict[str, Any] = dict.fromkeys(("pool", "member", "model", "key_id"), name)
    fields |= {"code": name, "status": 502, "sent_bytes": 10**12, "ttfb_ms": 0.049}

    log_request(sink.open(), **{**fields, absent: None})

    [line] = sink.lines()
    expected = {
        **dict.fromkeys(("pool", "member", "model", "key", "code"), name),
        "level": "info",
        "event": "request",
        "request_id": "req_1",
        "held_ms": 1500.0,
        "outcome": "served",
        "status": 502,
        "bytes": 10**12,
        "ttfb_ms": 0.0,
        "duration_ms": 2200.0,
    }
    del expected[{"key_id": "key"}.get(absent, absent)]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("timestamp"))
    assert line == expected


def test_given_a_client_that_left_when_logged_then_absent_fields_are_left_out(sink: Sink) -> None:
    logs = sink.open()
    log_request(
        logs, outcome="client_gone", status=None, ttfb_ms=None, model=None, key_id=None, pool=None
    )

    [line] = sink.lines()
    assert line["outcome"] == "client_gone"
    assert not {"status", "ttfb_ms", "model", "key", "pool", "code"} & set(line)


def test_given_a_request_id_with_line_breaks_when_logged_then_it_stays_one_line(
    sink: Sink,
) -> None:
    log_request(sink.open(), request_id='a"\n{"event": "forged"}\x1b[2J\udcff')

    text = sink.text()
    assert text.count("\n") == 1
    assert json.loads(text)["event"] == "request"


def test_given_level_warning_when_requests_finish_then_no_line_is_written(sink: Sink) -> None:
    logs = sink.open(level="warning")
    log_request(logs)
    structlog.get_logger().info("quiet")
    logging.getLogger("aiohttp.server").info("quiet too")
    structlog.get_logger().warning("loud")

    assert [line["event"] for line in sink.lines()] == ["loud"]


def test_given_structlog_and_logging_when_used_then_their_lines_have_one_shape(sink: Sink) -> None:
    sink.open()
    structlog.get_logger().info("pool ready", pool="gpu0")
    logging.getLogger("aiohttp.server").warning("peer %s went", "10.0.0.7", extra={"pool": "gpu0"})

    ours, theirs = sink.lines()
    assert set(ours) == {"timestamp", "level", "event", "pool"}
    assert set(theirs) == {"timestamp", "level", "event", "pool", "logger"}
    assert (theirs["level"], theirs["event"]) == ("warning", "peer 10.0.0.7 went")
    assert list(ours)[:3] == list(theirs)[:3] == ["timestamp", "level", "event"]


def _raise() -> None:
    try:
        json.loads(f"{{{SECRET}")
    except ValueError as error:
        raise RuntimeError(f"cannot read {SECRET}") from error


@pytest.mark.parametrize("fmt", ["json", "console"])
@pytest.mark.parametrize(
    "log",
    [
        lambda error: logging.getLogger("aiohttp.server").error("Error handling", exc_info=error),
        lambda error: logging.getLogger("aiohttp.client").error("Error: %r", error),
        lambda error: logging.getLogger("x").error("Error", extra={"error": error}),
        lambda error: structlog.get_logger().error("Error handling", exc_info=error),
        lambda _error: structlog.get_logger().exception("Error handling"),
        lambda error: structlog.get_logger().error("Error", error=error),
    ],
    ids=["exc_info", "argument", "extra", "structlog", "structlog-current", "structlog-field"],
)
def test_given_an_exception_that_quotes_input_when_logged_then_its_words_are_not(
    sink: Sink, log: Callable[[BaseException], None], fmt: str
) -> None:
    sink.open(fmt=fmt)
    try:
        _raise()
    except RuntimeError as error:
        log(error)

    text = sink.text()
    assert SECRET not in text
    assert "RuntimeError" in text
    assert text.count("\n") == 1


def test_given_an_exception_when_logged_then_its_kinds_and_places_are_told(sink: Sink) -> None:
    sink.open()
    try:
        _raise()
    except RuntimeError:
        logging.getLogger("x").exception("failed")

    [line] = sink.lines()
    assert line["raised"] == "RuntimeError < JSONDecodeError"
    assert [place.split(" ")[1] for place in line["where"]] == [
        "test_given_an_exception_when_logged_then_its_kinds_and_places_are_told",
        "_raise",
    ]
    assert line["where"][-1].startswith("router/test_telemetry_logs.py:")


async def test_given_a_task_that_failed_unseen_when_asyncio_tells_then_without_its_words(
    sink: Sink,
) -> None:
    sink.open()
    asyncio.get_running_loop().call_exception_handler(
        {
            "message": "Task exception was never retrieved",
            "exception": ValueError(SECRET),
            "note": SECRET,
        }
    )

    [line] = sink.lines()
    assert line["event"] == "Task exception was never retrieved"
    assert line["raised"] == "ValueError"
    assert SECRET not in json.dumps(line)


async def test_given_a_callback_that_fails_when_asyncio_tells_then_without_its_arguments(
    sink: Sink,
) -> None:
    sink.open()

    def data_received(_data: str) -> None:
        raise ValueError(SECRET)

    asyncio.get_running_loop().call_soon(data_received, SECRET)
    await asyncio.sleep(0)

    [line] = sink.lines()
    assert line["event"].startswith("Exception in callback")
    assert "data_received" in line["event"]
    assert SECRET not in json.dumps(line)


def test_given_a_terminal_when_the_format_is_auto_then_lines_are_for_people(
    sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    sink.stream = Terminal()
    log_request(sink.open(fmt="auto"))

    text = sink.text()
    assert "request" in text
    assert "member=alpha" in text
    assert "\x1b" not in text
    assert not text.startswith("{")


def test_given_a_pipe_when_the_format_is_auto_then_lines_are_json(sink: Sink) -> None:
    log_request(sink.open(fmt="auto"))

    assert [line["event"] for line in sink.lines()] == ["request"]


def test_given_a_members_output_when_shown_on_a_terminal_then_it_cannot_steer_it(
    sink: Sink,
) -> None:
    logs = sink.open(fmt="console")
    detail = "\x1b]0;owned\x07 line one\nline two"
    logs.note("gpu0", Note(NoteKind.LOAD_FAILED, {"member": "beta", "detail": detail}))

    text = sink.text()
    assert "\x1b" not in text
    assert "\x07" not in text
    assert text.count("\n") == 1
    assert "line two" in text


def test_given_a_swap_when_it_completes_then_one_line_tells_its_phases(sink: Sink) -> None:
    logs = sink.open()
    fields: dict[str, str | float | int] = {
        "source": "alpha",
        "target": "beta",
        "cause": "demand",
        "swap": 2,
        "drain_s": 1.23456,
        "unload_s": 0.5,
        "load_s": 20.0,
        "granted": 3,
    }
    logs.note("gpu0", Note(NoteKind.SWAP_COMPLETED, fields))
    logs.note("gpu0", Note(NoteKind.TURN_ENDED, {"member": "alpha", "reason": "turn"}))

    [line] = sink.lines()  # a turn's end is for debugging
    assert line.pop("timestamp")
    assert line == {
        "level": "info",
        "event": "swap_completed",
        "pool": "gpu0",
        **fields,
        "drain_s": 1.235,
    }


def test_given_a_resident_that_died_when_logged_then_its_last_words_are_not(sink: Sink) -> None:
    logs = sink.open()
    words: dict[str, str | float | int] = {
        "member": "alpha",
        "reason": "exited",
        "detail": f"prompt: {SECRET}",
    }
    logs.note("gpu0", Note(NoteKind.RESIDENT_LOST, words))
    logs.note("gpu0", Note(NoteKind.LOAD_FAILED, {**words, "failures": 1}))
    other = {**words, "detail": "cannot open model.gguf"}
    logs.note("gpu0", Note(NoteKind.LOAD_FAILED, other))

    lost, failed, other_line = sink.lines()
    assert "detail" not in lost
    assert "detail" not in failed
    assert other_line["detail"] == "cannot open model.gguf"


@pytest.mark.parametrize("kind", list(NoteKind))
def test_given_any_note_when_logged_then_its_kind_is_the_event(sink: Sink, kind: NoteKind) -> None:
    sink.open(level="debug").note("gpu0", Note(kind, {"member": "alpha"}))

    [line] = [line for line in sink.lines() if "pool" in line]
    assert line["event"] == kind.value


def test_given_a_reader_that_stops_when_lines_come_then_nobody_waits_and_drops_are_counted() -> (
    None
):
    reader, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        writer = LogWriter(stream, max_lines=100)
        put = 2000

        def put_all() -> None:
            for number in range(put):
                writer.put(f"{number:04d}" + "x" * 1020)  # a pipe takes 64 of them

        putting = threading.Thread(target=put_all, daemon=True)
        putting.start()
        putting.join(20)

        assert not putting.is_alive(), "it waits for the reader"
        dropped = writer.dropped
        assert dropped > put - 500

        received: list[bytes] = []
        reading = threading.Thread(target=lambda: received.extend(_read_all(reader)))
        reading.start()
        writer.close()
    reading.join(10)

    lines = b"".join(received).splitlines()
    numbers = [int(line[:4]) for line in lines]
    assert {len(line) for line in lines} == {1024}
    assert numbers == sorted(numbers)
    assert len(lines) + writer.dropped == put


def _read_all(fd: int) -> Iterator[bytes]:
    with os.fdopen(fd, "rb", buffering=0) as stream:
        while data := stream.read(65536):
            yield data


async def test_given_a_blocked_log_when_requests_are_logged_then_the_loop_goes_on() -> None:
    reader, writing = os.pipe()
    rescued = threading.Event()

    def read_on() -> None:
        """Let those go on that wait, so that the test fails and does not hang."""
        rescued.set()
        with suppress(OSError):
            while os.read(reader, 1 << 20):
                pass

    rescue = threading.Timer(20, read_on)
    rescue.daemon = True
    with os.fdopen(writing, "w") as stream:
        logs = configure_logs("info", "json", stream)
        try:
            structlog.get_logger().info("x" * 1_000_000)  # more than a pipe takes
            async with asyncio.timeout(10):
                while select.select([], [stream], [], 0)[1]:
                    await asyncio.sleep(0)
            rescue.start()
            for _ in range(MAX_LINES + 2000):
                log_request(logs)

            assert logs.dropped() == 2000
            assert not rescued.is_set(), "it waited for the reader"
        finally:
            rescue.cancel()
            os.close(reader)
            logs.close()
            structlog.reset_defaults()


def test_given_a_reader_that_is_gone_when_lines_come_then_they_are_dropped_quietly() -> None:
    reader, writing = os.pipe()
    os.close(reader)
    with os.fdopen(writing, "w") as stream:
        writer = LogWriter(stream)
        writer.put("lost")
        writer.close()
        writer.put("late")

    assert writer.dropped == 2


def test_given_a_pipe_that_does_not_block_when_it_is_full_then_no_byte_is_lost() -> None:
    reader, writing = os.pipe()
    os.set_blocking(writing, False)
    with os.fdopen(writing, "w") as stream:
        writer = LogWriter(stream)
        received: list[bytes] = []
        writer.put("y" * 1_000_000)
        reading = threading.Thread(target=lambda: received.extend(_read_all(reader)))
        reading.start()
        writer.close()
    reading.join(10)

    assert b"".join(received) == b"y" * 1_000_000 + b"\n"


PROGRAM = """
    import sys
    import structlog
    from modelpool_router.telemetry import configure_logs

    logs = configure_logs("info", "json", sys.stdout)
    for number in range(int(sys.argv[1])):
        structlog.get_logger().info("x" * 1000, number=number)
    print("done", file=sys.stderr)
"""


def _program(lines: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(lines)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROUTER)},
    )


def test_given_a_program_that_ends_when_lines_wait_then_they_are_written() -> None:
    with _program(2000) as program:
        out, err = program.communicate(timeout=60)

    assert (program.returncode, err) == (0, b"done\n")
    assert [json.loads(line)["number"] for line in out.splitlines()] == list(range(2000))


def test_given_a_program_whose_log_nobody_reads_when_it_ends_then_it_does_end() -> None:
    with _program(2000) as program:
        assert program.wait(timeout=60) == 0
        assert program.stderr is not None
        assert program.stderr.read() == b"done\n"
