"""
What the fake member can be told to do: one frozen value, filled from flags and environment.

Every flag has a twin in the environment: ``--first-byte-delay`` is ``MEMBER_FIRST_BYTE_DELAY``;
the flag wins. Times are seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Knobs:
    """How this fake member behaves. The defaults are a quick, well-behaved llama-server."""

    port: int = 0
    host: str = "127.0.0.1"
    name: str = "fake"
    log: str = ""
    """File that gets one JSON line per event, with monotonic times."""

    load: float = 0.0
    load_first: float = -1.0
    """Load time of the first start only (``log`` counts starts); below 0 = like the others."""
    late_port: bool = False
    models_early: bool = False
    never_ready: bool = False
    exit_at_start: int = -1
    exit_message: str = "error: cannot load model"
    exit_while_loading: float = -1.0

    crash_after: float = -1.0
    crash_code: int = 1
    crash_signal: int = 0
    crash_prompt: str = ""
    die_after_chunks: int = -1

    unload: float = 0.0
    ignore_term: float = 0.0
    busy_term: bool = False
    term_linger: float = 30.0
    grandchild: bool = False
    grandchild_ignores_term: bool = False
    lock: str = ""
    lock_release_after: float = 0.0

    parallel: int = 4
    first_byte_delay: float = 0.0
    chunks: int = 8
    gap: float = 0.0
    tokens_per_second: float = 0.0
    chunk_bytes: int = 0
    inference_status: int = 200
    close_after_answer: bool = False
    keep_sse: bool = False
    early_reply: int = 0


_HELP = {
    "port": "port to listen on",
    "host": "address to listen on",
    "name": "model name to answer with",
    "log": "append one JSON line per event (start, lock_taken, ready, term, stopped ...)",
    "load": "seconds from the open port to readiness; 503 'Loading model' on every path meanwhile",
    "load_first": "load time of the very first start, counted in --log",
    "late_port": "open the port only when loaded",
    "models_early": "answer GET /v1/models with 200 while still loading",
    "never_ready": "load for ever",
    "exit_at_start": "end at once with this exit code (0..255)",
    "exit_message": "last line on stderr before --exit-at-start or --exit-while-loading",
    "exit_while_loading": "end this many seconds into the load, with exit code --crash-code",
    "crash_after": "end this many seconds after readiness",
    "crash_code": "exit code of every crash",
    "crash_signal": "crash by sending itself this signal number instead of exiting",
    "crash_prompt": "crash when a request body contains this text",
    "die_after_chunks": "crash after this many chunks of a stream",
    "unload": "seconds from TERM to the exit",
    "ignore_term": "do not react to TERM for this long after the first one (inf = never react)",
    "busy_term": "TERM as llama-server: cuts streams and lingers while busy, a second TERM ends it",
    "term_linger": "longest linger of --busy-term",
    "grandchild": "double-fork a child into its own session that outlives the member",
    "grandchild_ignores_term": "the grandchild can only be killed",
    "lock": "take a lock on this file from start to the very end; exit code 3 when it is held",
    "lock_release_after": "a detached helper keeps the lock this long after the end",
    "parallel": "requests worked on at once; more wait",
    "first_byte_delay": "seconds before the first byte of an answer",
    "chunks": "tokens of an answer",
    "gap": "seconds between tokens",
    "tokens_per_second": "sets the gap",
    "chunk_bytes": "pad every token to this many bytes",
    "inference_status": "answer every POST with this status (health stays good)",
    "close_after_answer": "say Connection: close on every answer and close",
    "keep_sse": "keep the connection after an event stream (llama-server drops it without a word)",
    "early_reply": "answer every POST with this status before its body is read, then close",
}


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Knobs:
    """Read flags, then the environment, then defaults. Exits with code 2 on bad flags."""
    parser = argparse.ArgumentParser(
        prog="python -m modelpool_router.testing.member",
        description="A scriptable fake llama-server.",
        epilog=(
            "One request can be scripted by fields of its JSON body: x_chunks, x_gap_ms, "
            "x_delay_ms, x_chunk_bytes, x_status, x_headers, x_die_after (crash after N "
            "chunks), x_drop_after (reset the connection after N chunks), x_crash (crash now), "
            "x_hang (never answer), x_text (answer with this text). "
            "GET /debug/requests shows every request seen, GET /debug/stats the counts."
        ),
    )
    for field in fields(Knobs):
        flag = "--" + field.name.replace("_", "-")
        twin = environ.get("MEMBER_" + field.name.upper())
        default = field.default
        assert isinstance(default, str | int | float)  # every field has one
        if isinstance(default, bool):
            on = twin is not None and twin.lower() in ("1", "true", "yes", "on")
            parser.add_argument(flag, action="store_true", default=on, help=_HELP[field.name])
        else:
            kind: Callable[[str], object] = type(default)
            value = default if twin is None else kind(twin)
            parser.add_argument(flag, type=kind, default=value, help=_HELP[field.name])
    parsed = parser.parse_args(argv)
    return Knobs(**{field.name: getattr(parsed, field.name) for field in fields(Knobs)})
