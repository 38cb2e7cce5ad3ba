"""
How an exchange with a member can fail, and what its client is told.

Before the first byte of an answer a failure is an exception with a ``code`` of the error table,
which `web.errors` turns into an answer. After it, only the stream itself can tell: `error_frame`
writes the frame that the client's SDK understands as a failure.
"""

from __future__ import annotations

import json
import time
from typing import Final, Literal

from ..core.commands import BreakReason

Family = Literal["openai-chat", "responses", "anthropic", "other"]
"""Whose shape of events a client expects."""


class ExchangeError(Exception):
    """
    Base: the exchange failed before any byte of an answer went to the client.

    Attributes:
        code: Word of the error table.
        status: HTTP status that goes with it. Never one that an upstream sent.
    """

    code: str = "upstream_reset"
    status: int = 502


class ConnectRefused(ExchangeError):
    """
    No connection could be made, so no byte of the request was sent: it may be held again.

    Attributes:
        reason: ``refused``, ``timeout``, ``unresolved``, ``tls`` or ``unreachable``.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"The model server could not be reached ({reason}). Try again.")
        self.reason = reason
        if reason == "timeout":
            self.code, self.status = "upstream_timeout", 504


class MemberLoading(ExchangeError):
    """The member answered that it is still loading: it may be held again."""

    code = "slot_unavailable"
    status = 503

    def __init__(self) -> None:
        super().__init__("The model is still loading. Try again.")


class UpstreamReset(ExchangeError):
    """The connection ended before a complete answer."""

    def __init__(self, message: str = "The model server ended the connection early.") -> None:
        super().__init__(f"{message} Send the request again.")


class UpstreamProtocolError(ExchangeError):
    """The answer is not HTTP/1.1 as we accept it."""

    code = "upstream_protocol_error"

    def __init__(self, what: str) -> None:
        super().__init__(
            f"The model server's answer is not valid HTTP: {what}. "
            "Look at the server; sending the request again will not help."
        )


class UpstreamTimeout(ExchangeError):
    """No answer in time, or a begun one stopped."""

    code = "upstream_timeout"
    status = 504

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(f"The model server {what} for {seconds:g} s. Try again later.")


_BREAKS: Final[dict[BreakReason, tuple[str, int, str]]] = {
    BreakReason.DRAIN_TIMEOUT: (
        "pool_draining",
        503,
        "The answer took longer than this pool's drainTimeout while others waited for the slot.",
    ),
    BreakReason.MAX_GENERATION: (
        "upstream_timeout",
        504,
        "The answer took longer than this pool's maxGeneration while others waited for the slot.",
    ),
    BreakReason.RESIDENT_HUNG: ("upstream_timeout", 504, "The model server stopped responding."),
    BreakReason.SHUTDOWN: (
        "pool_draining",
        503,
        "The router shuts down and could not wait for the end of this answer.",
    ),
}


class ExchangeBroken(ExchangeError):
    """The router ended the exchange; `reason` says why."""

    def __init__(self, reason: BreakReason) -> None:
        code, status, message = _BREAKS[reason]
        super().__init__(f"{message} Send the request again.")
        self.reason, self.code, self.status = reason, code, status


class AnswerRefused(ExchangeError):
    """
    The upstream answered something that cannot go into an event stream that is open already.

    Attributes:
        status: What the upstream said, 502 when that was a success of another kind.
        code: The upstream's own code if it gave one.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def error_frame(family: Family, *, status: int, code: str, message: str, request_id: str) -> bytes:
    """
    Write the last event of a broken stream, blank line included, without ``[DONE]``.

    Chat and others: ``data: {"error": …}``, which the openai SDK raises. Responses: a
    ``response.failed`` event. Messages: ``event: error``, which the anthropic SDK raises.
    """
    if family == "anthropic":
        kind = {503: "overloaded_error", 504: "timeout_error", 429: "rate_limit_error"}
        error = {
            "type": kind.get(status, "api_error" if status >= 500 else "invalid_request_error"),
            "message": message,
            "code": code,
            "status": status,
        }
        return _event("error", {"type": "error", "error": error, "request_id": request_id})
    if family == "responses":
        response = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "failed",
            "error": {"code": code, "message": message, "status": status},
            "incomplete_details": None,
            "output": [],
        }
        return _event(
            "response.failed",
            {"type": "response.failed", "sequence_number": 0, "response": response},
        )
    error = {
        "message": message,
        "type": "server_error" if status >= 500 else "invalid_request_error",
        "param": None,
        "code": code,
        "status": status,
    }
    return b"data: %b\n\n" % _json({"error": error})


def keepalive_frame(
    family: Family, mode: Literal["comment", "chunk"], *, request_id: str, model: str
) -> bytes:
    """
    Write one sign of life for a client that waits on an open stream.

    ``chunk`` works for chat completions alone (clients that time the gap between parsed chunks
    do not see comments); elsewhere it is the same as ``comment``.
    """
    if family == "anthropic":
        return _event("ping", {"type": "ping"})
    if mode == "chunk" and family == "openai-chat":
        chunk = {
            "id": f"chatcmpl-{request_id}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
            "choices": [{"index": 0, "delta": {}, "finish_reason": None}],
        }
        return b"data: %b\n\n" % _json(chunk)
    return b": keepalive\n\n"


def _event(name: str, data: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode("ascii"), _json(data))


def _json(data: object) -> bytes:
    # ASCII with every control character escaped: nothing in it can end the line early
    return json.dumps(data, separators=(",", ":")).encode("ascii")
