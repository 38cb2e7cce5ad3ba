"""
Request bodies, the same bytes on every machine.

`native/upstream.c` reads what to answer from fields of the body; they come first, since it keeps
only the beginning. Bodies with `model` last are what the openai SDK for Python sends.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

KIB = 1024
MODEL = "fake"
"""The one name that every contender knows."""

_WORDS = ("slot", "member", "token", "window", "answer", "request", "garden", "river", "of", "the")


def chat(
    size: int,
    *,
    model_last: bool = False,
    stream: bool = False,
    events: int | None = None,
    every_us: int | None = None,
) -> bytes:
    """
    Return a chat completion request of exactly *size* bytes.

    Args:
        events: How many events the answer has (streams).
        every_us: Microseconds between events, or before an answer in one piece.
    """
    knobs: dict[str, object] = {}
    if stream:
        knobs["stream"] = True
    if events is not None:
        knobs["max_tokens"] = events
    if every_us is not None:
        knobs["seed"] = every_us

    def body(filler: str) -> bytes:
        messages = [
            {"role": "system", "content": "You answer in one sentence."},
            {"role": "user", "content": filler},
        ]
        first = {} if model_last else {"model": MODEL}
        last = {"model": MODEL} if model_last else {}
        request = {**first, **knobs, "temperature": 0.2, "messages": messages, **last}
        return json.dumps(request, separators=(",", ":")).encode("ascii")

    room = size - len(body(""))
    if room < 0:
        raise ValueError(f"{size} bytes are too few for a request")
    found = body(_text(room))
    assert len(found) == size
    return found


def write(folder: Path, name: str, body: bytes) -> Path:
    """Write *body* where the load generator can read it."""
    path = folder / f"{name}.json"
    path.write_bytes(body)
    return path


def _text(size: int) -> str:
    """Return *size* characters of words, then of one long run (as images are) beyond 8 KiB."""
    chance = random.Random(7)
    words: list[str] = []
    length = 0
    while length < min(size, 8 * KIB):
        words.append(chance.choice(_WORDS))
        length += len(words[-1]) + 1
    return (" ".join(words) + "A" * max(0, size - 8 * KIB + 64))[:size].ljust(size, "A")
