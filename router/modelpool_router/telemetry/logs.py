"""
Log lines: structured, free of what clients sent, and never a reason to wait.

Whoever logs hands a line over to a bounded queue; a thread writes it. When the reader of our
output stops reading, lines are dropped and counted instead of stopping the event loop.

Not in any line: prompts, bodies, header values, the text of exceptions (which likes to quote
input; type and place are kept).
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import select
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, MutableMapping
from datetime import UTC, datetime
from functools import lru_cache
from types import TracebackType
from typing import Any, Final, TextIO

import msgspec
import structlog

from ..core.commands import Note, NoteKind

MAX_LINES = 10_000
"""Lines that may wait for the writer: seconds of a busy log, a few megabytes."""
FLUSH_S = 0.25
"""Pause between two writes; joins the lines of a busy moment into one system call."""
CLOSE_S = 1.0
"""How long the end of the program waits for the last lines to be written."""
FRAMES = 8
"""Innermost places of a traceback that are worth a line."""

Fields = MutableMapping[str, Any]
Render = Callable[[Fields], str]

# What moves a cursor or colours a terminal must not come from a member's output. 0x0a included:
# one event is one line.
_CONTROL: Final = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}

_LEVEL_OF_NOTE: Final = {
    NoteKind.SWAP_STARTED: "info",
    NoteKind.SWAP_COMPLETED: "info",
    NoteKind.SWAP_DEFERRED: "warning",
    NoteKind.LOAD_FAILED: "warning",
    NoteKind.UNLOAD_RETRIED: "warning",
    NoteKind.OBSERVE_FAILED: "warning",
    NoteKind.RESIDENT_LOST: "warning",
    NoteKind.LOAD_WASTED: "info",
    NoteKind.RELEASED: "info",
    NoteKind.STATE_CHANGED: "debug",
    NoteKind.TURN_ENDED: "debug",
    NoteKind.TURN_REOPENED: "debug",
}


class LogWriter:
    """
    Bounded queue of lines and the thread that writes them to *stream*.

    `put` may be called from any thread and never blocks.
    """

    def __init__(self, stream: TextIO, *, max_lines: int = MAX_LINES) -> None:
        self._stream = stream
        self._fd = _descriptor(stream)
        self._lines: deque[Callable[[], str] | str] = deque()
        self._max_lines = max_lines
        self._wake = threading.Event()
        self._closing = False
        self._reported = 0
        self.dropped = 0
        """Lines given up so far."""
        # A daemon: a reader that never reads again must not keep the program from ending.
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def put(self, line: Callable[[], str] | str, *, soon: bool = True) -> None:
        """
        Queue a line, without its end; a callable is rendered by the writer thread.

        With *soon* false it may wait for others or `FLUSH_S`, which spares a wake-up.
        """
        # len() and append() race benignly between threads: the bound may be passed by a few.
        waiting = len(self._lines)
        if waiting >= self._max_lines or self._closing:
            self.dropped += 1
            return
        self._lines.append(line)
        if soon or waiting == self._max_lines // 2:
            self._wake.set()

    def close(self) -> None:
        """Write what waits, for `CLOSE_S` at most. Idempotent; later lines are dropped."""
        atexit.unregister(self.close)
        self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while True:
            self._wake.wait(FLUSH_S)
            closing = self._closing
            self._wake.clear()
            self._write_waiting()
            if closing:
                return

    def _write_waiting(self) -> None:
        texts: list[str] = []
        while self._lines:
            line = self._lines.popleft()
            texts.append(line if isinstance(line, str) else line())
        if not texts:
            return
        try:
            self._write("\n".join(texts) + "\n")
        except (OSError, ValueError):  # reader gone, stream closed: there is nobody to tell
            self.dropped += len(texts)

    def _write(self, text: str) -> None:
        if self._fd is None:
            self._stream.write(text)
            self._stream.flush()
            return
        # Past the stream object: its lock, held by a blocked write, would hang the exit.
        data = memoryview(text.encode("utf-8", "backslashreplace"))
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # somebody made the pipe non-blocking
                poller = select.poll()
                poller.register(self._fd, select.POLLOUT)
                poller.poll(1000)


class FinishedRequest(msgspec.Struct, gc=False):
    """One finished request as it is queued; see `Logs.request_line`. Calling it renders it."""

    at: float
    request_id: str
    pool: str | None
    member: str | None
    model: str | None
    held_ms: float | None
    outcome: str
    status: int | None
    code: str
    sent_bytes: int
    ttfb_ms: float | None
    duration_ms: float
    key_id: str | None
    render: Render

    def __call__(self) -> str:
        if self.render is _json:
            try:
                return self._as_usual() or msgspec.json.encode(self._line()).decode()
            except (TypeError, ValueError):  # lone surrogates
                pass
        return self.render(msgspec.to_builtins(self._line()))

    def _as_usual(self) -> str:
        """Return the line from a frame if nothing that differs is absent, else ''."""
        held_ms, ttfb_ms = self.held_ms, self.ttfb_ms
        if held_ms is None or ttfb_ms is None:
            return ""
        before, request_id, held, size, ttfb, duration, after = _frame(
            self.pool,
            self.member,
            self.model,
            self.outcome,
            self.status,
            self.code,
            self.key_id,
        )
        # (joined: to look for the holes in a format costs more than to fill them)
        return "".join(
            (
                before,
                _stamp(self.at),
                request_id,
                _quoted(self.request_id),
                held,
                _tenths(held_ms),
                size,
                str(self.sent_bytes),
                ttfb,
                _tenths(ttfb_ms),
                duration,
                _tenths(self.duration_ms),
                after,
            )
        )

    def _line(self) -> _RequestLine:
        return _RequestLine(
            timestamp=_stamp(self.at),
            level="info",
            event="request",
            request_id=self.request_id,
            pool=self.pool,
            member=self.member,
            model=self.model,
            held_ms=_rounded(self.held_ms),
            outcome=self.outcome,
            status=self.status,
            code=self.code or None,
            bytes=self.sent_bytes,
            ttfb_ms=_rounded(self.ttfb_ms),
            duration_ms=_rounded(self.duration_ms),
            key=self.key_id,
        )


class _RequestLine(msgspec.Struct, omit_defaults=True, gc=False):
    """The fields of a request's line, in order; those that are None are left out."""

    timestamp: str
    level: str
    event: str
    request_id: str
    pool: str | None = None
    member: str | None = None
    model: str | None = None
    held_ms: float | None = None
    outcome: str | None = None
    status: int | None = None
    code: str | None = None
    bytes: int | None = None
    ttfb_ms: float | None = None
    duration_ms: float | None = None
    key: str | None = None


@lru_cache(maxsize=256)
def _frame(
    pool: str | None,
    member: str | None,
    model: str | None,
    outcome: str,
    status: int | None,
    code: str,
    key_id: str | None,
) -> tuple[str, ...]:
    """
    Return the pieces of a line between which stands what differs between requests that are alike.

    Names can look like anything, but never like a field: their quotes are escaped.
    """
    line = _RequestLine(
        "", "info", "request", "", pool, member, model, -1.0, outcome, status, code or None,
        -1, -1.0, -1.0, key_id,
    )  # fmt: skip
    rest, pieces = msgspec.json.encode(line).decode(), []
    for field, hole in (
        ('"timestamp":"', ""),
        ('"request_id":', '""'),
        ('"held_ms":', "-1.0"),
        ('"bytes":', "-1"),
        ('"ttfb_ms":', "-1.0"),
        ('"duration_ms":', "-1.0"),
    ):
        before, _, rest = rest.partition(field + hole)
        pieces.append(before + field)
    return (*pieces, rest)


class Logs:
    """The log of one router: what `configure_logs` set up, and the lines with a fixed shape."""

    def __init__(
        self, writer: LogWriter, render: Render, level: int, handler: logging.Handler
    ) -> None:
        self._writer = writer
        self.render = render
        """How lines look."""
        self._level = level
        self._handler = handler
        self._last_words: dict[str, object] = {}
        self._log = structlog.get_logger("modelpool")

    def dropped(self) -> int:
        """Return the number of lines given up so far."""
        return self._writer.dropped

    def set_level(self, level: str) -> None:
        """Log from *level* on: ``debug`` | ``info`` | ``warning`` | ``error``."""
        self._level = logging.getLevelNamesMapping()[level.upper()]
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(self._level))
        logging.getLogger().setLevel(self._level)

    def close(self) -> None:
        """Write what waits and stop writing. Idempotent; later lines go nowhere."""
        logging.getLogger().removeHandler(self._handler)
        logging.captureWarnings(False)
        self._writer.close()

    def request_line(
        self,
        request_id: str,
        pool: str | None,
        member: str | None,
        model: str | None,
        held_ms: float | None,
        outcome: str,
        status: int | None,
        code: str,
        sent_bytes: int,
        ttfb_ms: float | None,
        duration_ms: float,
        key_id: str | None,
    ) -> None:
        """
        Log one finished request: it is queued here, the text is made by the writer.

        *model* is a configured name or None, never what a client made up. *status* is None when
        the client left before an answer. None fields are left out of the line.
        """
        self.finished(
            FinishedRequest(
                time.time(),
                request_id,
                pool,
                member,
                model,
                held_ms,
                outcome,
                status,
                code,
                sent_bytes,
                ttfb_ms,
                duration_ms,
                key_id,
                self.render,
            )
        )

    def finished(self, request: FinishedRequest) -> None:
        """Do what `request_line` does for those who made the entry themselves, with `render`."""
        if self._level <= logging.INFO:
            self._writer.put(request, soon=False)

    def note(self, pool: str, note: Note) -> None:
        """Log what a scheduler tells; a completed swap is one line with its phases."""
        fields = {
            name: round(value, 3) if isinstance(value, float) else value
            for name, value in note.fields.items()
        }
        # The last output of an engine that was serving may quote what it served; it is in the
        # member's own log file and in the events of the admin port. An early loss is told a
        # second time, as a failed load.
        if note.kind is NoteKind.RESIDENT_LOST:
            self._last_words[pool] = fields.pop("detail", "")
        elif fields.get("detail", "") == self._last_words.get(pool):
            fields.pop("detail", None)
        getattr(self._log, _LEVEL_OF_NOTE[note.kind])(str(note.kind), pool=pool, **fields)


def configure_logs(level: str = "info", fmt: str = "auto", stream: TextIO | None = None) -> Logs:
    """
    Send structlog and the standard library's logging to *stream* through one writer.

    Args:
        level: ``debug`` | ``info`` | ``warning`` | ``error``.
        fmt: ``console`` for people, ``json`` for machines, ``auto`` by what *stream* is.
        stream: Where to; standard output by default.

    Replaces an earlier configuration. Whoever calls closes the result.
    """
    stream = sys.stdout if stream is None else stream
    number = logging.getLevelNamesMapping()[level.upper()]
    terminal = stream.isatty()
    if fmt == "auto":
        fmt = "console" if terminal else "json"
    render = (
        _console(colors=terminal and "NO_COLOR" not in os.environ) if fmt == "console" else _json
    )
    writer = LogWriter(stream)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            _add_timestamp,
            _place_of_exception,
            lambda _logger, _name, fields: render(fields),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *_: _Lines(writer),
        # Not cached: a test, or a second configuration, must reach loggers made earlier.
        cache_logger_on_first_use=False,
    )
    handler = _FromLogging(writer, render)
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _FromLogging)]:
        root.removeHandler(old)  # of an earlier configuration
    root.addHandler(handler)
    root.setLevel(number)
    logging.captureWarnings(True)
    return Logs(writer, render, number, handler)


class _Lines:
    """Last stop of structlog: every level goes to the writer."""

    def __init__(self, writer: LogWriter) -> None:
        self._put = writer.put

    def msg(self, line: str) -> None:
        self._put(line)

    debug = info = warning = error = critical = exception = msg


class _FromLogging(logging.Handler):
    """Records of the standard library (aiohttp, asyncio) in the shape of our own lines."""

    def __init__(self, writer: LogWriter, render: Render) -> None:
        super().__init__()
        self._writer = writer
        self.render = render

    def emit(self, record: logging.LogRecord) -> None:
        fields: Fields = {
            "timestamp": _stamp(record.created),
            "level": record.levelname.lower(),
            "event": _message(record),
            "logger": record.name,
        }
        for name, value in record.__dict__.items():
            if name not in _RECORD_FIELDS:
                fields[name] = value
        if record.exc_info and record.exc_info[1] is not None:
            fields.update(_describe(record.exc_info[1]))
        try:
            self._writer.put(self.render(fields))
        except Exception:  # noqa: BLE001 # a line that cannot be rendered costs that line only
            self._writer.dropped += 1


_RECORD_FIELDS: Final = frozenset(
    (*logging.makeLogRecord({}).__dict__, "message", "asctime", "taskName")
)


def _message(record: logging.LogRecord) -> str:
    """
    Return the first line of a record, with exceptions among its arguments as type names.

    Further lines are where asyncio prints a task with the exception that ended it, words and all.
    """
    args: Any = record.args
    if isinstance(args, tuple):
        args = tuple(type(a).__name__ if isinstance(a, BaseException) else a for a in args)
    message = str(record.msg)
    if args:
        try:
            message %= args
        except (TypeError, ValueError, KeyError):
            pass  # the bare message is still worth a line
    message = message.partition("\n")[0]
    if record.name == "asyncio" and message.startswith(("Exception in callback", "Executing")):
        # Followed by the callback with its arguments, received bytes among them.
        message = message.partition("(")[0]
    return message


def _describe(error: BaseException) -> dict[str, Any]:
    """Return type, causes and places of an exception: all but its words."""
    kinds = [type(error).__name__]
    cause = error.__cause__ or error.__context__
    while cause is not None and len(kinds) < FRAMES:
        kinds.append(type(cause).__name__)
        cause = cause.__cause__ or cause.__context__
    return {"raised": " < ".join(kinds), "where": _places(error.__traceback__)}


def _places(tb: TracebackType | None) -> list[str]:
    frames = traceback.extract_tb(tb)[-FRAMES:]
    return [f"{_short(frame.filename)}:{frame.lineno} {frame.name}" for frame in frames]


def _short(path: str) -> str:
    return "/".join(path.split(os.sep)[-2:])


def _place_of_exception(_logger: object, _name: str, fields: Fields) -> Fields:
    told = fields.pop("exc_info", None)
    if told is True:
        told = sys.exc_info()[1]
    elif isinstance(told, tuple):
        told = told[1]
    if isinstance(told, BaseException):
        fields.update(_describe(told))
    return fields


def _add_timestamp(_logger: object, _name: str, fields: Fields) -> Fields:
    fields["timestamp"] = _stamp(time.time())
    return fields


def _stamp(at: float) -> str:
    return _millisecond(int(at * 1000))


@lru_cache(maxsize=4)  # a busy log has many lines in one
def _millisecond(number: int) -> str:
    second, thousandths = divmod(number, 1000)
    return _second(second) + _THOUSANDTHS % thousandths


@lru_cache(maxsize=4)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _quoted(text: str) -> str:
    if text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    return msgspec.json.encode(text).decode()


# (the operator takes half the time of an f-string here)
_TENTHS: Final = "%.1f"
_THOUSANDTHS: Final = ".%03dZ"


def _tenths(value: float) -> str:
    return _TENTHS % value if value else "0.0"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _json(fields: Fields) -> str:
    first = {name: fields[name] for name in ("timestamp", "level", "event") if name in fields}
    ordered = {**first, **fields}
    try:
        return msgspec.json.encode(ordered, enc_hook=_plain).decode()
    except (TypeError, ValueError):  # keys that are not text, lone surrogates
        return json.dumps({str(k): v for k, v in ordered.items()}, default=_plain)


def _plain(value: object) -> str:
    return type(value).__name__ if isinstance(value, BaseException) else str(value)


def _console(*, colors: bool) -> Render:
    renderer = structlog.dev.ConsoleRenderer(colors=colors, pad_event_to=20)

    def render(fields: Fields) -> str:
        clean = {name: _printable(value) for name, value in fields.items()}
        return renderer(None, "", clean)

    return render


def _printable(value: Any) -> Any:
    if isinstance(value, BaseException):
        return type(value).__name__
    return value.translate(_CONTROL) if isinstance(value, str) else value


def _descriptor(stream: TextIO) -> int | None:
    try:
        stream.flush()
        return stream.fileno()
    except (OSError, ValueError, AttributeError):  # a buffer in memory
        return None
