"""
Errors of ours as HTTP: one table from code to status, and the shape each client family expects.

Upstream answers, errors included, never come through here. Nothing of a request is echoed but a
model name, and that one only through `core.catalog.printable`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Literal

from aiohttp import web

from ..core.body import BadBody

Family = Literal["openai", "anthropic"]

STATUS: Mapping[str, int] = {
    "invalid_json": 400,
    "duplicate_key": 400,
    "missing_required_parameter": 400,
    "invalid_type": 400,
    "invalid_framing": 400,
    "invalid_host": 400,
    "invalid_api_key": 401,
    "model_not_found": 404,
    "unknown_url": 404,
    "method_not_allowed": 405,
    "request_timeout": 408,
    "request_too_large": 413,
    "uri_too_long": 414,
    "unsupported_media_type": 415,
    "expectation_failed": 417,
    "misdirected_request": 421,
    "upgrade_required": 426,
    "rate_limit_exceeded": 429,
    "request_headers_too_large": 431,
    "internal_error": 500,
    "not_implemented": 501,
    "upstream_protocol_error": 502,
    "upstream_reset": 502,
    "swap_budget_exceeded": 503,
    "queue_full": 503,
    "member_failed": 503,
    "member_backoff": 503,
    "pool_draining": 503,
    "slot_unavailable": 503,
    "upstream_timeout": 504,
    "http_version_not_supported": 505,
}
"""Every code of ours. Codes are stable; sentences are not."""

# Trying the same request again cannot help; SDKs would otherwise retry 408, 409, 429 and >= 500.
_PERMANENT = frozenset(
    code for code, status in STATUS.items() if status < 500 and status not in (408, 429)
) | {"not_implemented", "http_version_not_supported"}

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0
"""Official SDKs ignore a longer Retry-After, the older ones from 60 s on."""


class ApiError(Exception):
    """
    A refusal of ours, ready to be answered.

    Args:
        status: HTTP status; normally `STATUS` of *code*, see `of`.
        code: one of `STATUS`.
        message: for people: who can act, and the way out. Never text of a request.
        param: the request's field at fault.
        retry_after_s: seconds to suggest, clamped to 1..60; None = no suggestion.
        retryable: False adds ``x-should-retry: false``; None = as the code implies.
        headers: more response headers (``Allow`` ...), of our making.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        retry_after_s: float | None = None,
        *,
        retryable: bool | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(code)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.retryable = code not in _PERMANENT if retryable is None else retryable
        self.headers: Mapping[str, str] = headers or {}

    @classmethod
    def of(
        cls,
        code: str,
        message: str,
        param: str | None = None,
        retry_after_s: float | None = None,
        *,
        retryable: bool | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> ApiError:
        """Return the error with the status that the table gives to *code*."""
        return cls(
            STATUS[code],
            code,
            message,
            param,
            retry_after_s,
            retryable=retryable,
            headers=headers,
        )

    @classmethod
    def from_body(cls, error: BadBody) -> ApiError:
        """Return the error that answers a body which cannot be accepted."""
        return cls.of(error.code, error.message, error.param)


def family_of(path: str) -> Family:
    """Return whose error shape the clients of *path* expect."""
    return "anthropic" if path == "/v1/messages" or path.startswith("/v1/messages/") else "openai"


def error_type(status: int, family: Family) -> str:
    """Return the ``type`` that goes with *status*."""
    if family == "anthropic":
        fallback = "invalid_request_error" if status < 500 else "api_error"
        return _ANTHROPIC_TYPES.get(status, fallback)
    if status == 429:
        return "rate_limit_error"
    if status < 500 or status in (501, 505):  # the last two are the caller's doing as well
        return "invalid_request_error"
    return "server_error"


def envelope(error: ApiError, family: Family, request_id: str) -> bytes:
    """Return the JSON body, ASCII only."""
    inner: dict[str, str | None] = {
        "message": error.message,
        "type": error_type(error.status, family),
        "param": error.param,
        "code": error.code,
    }
    if family == "openai":
        return json.dumps({"error": inner}).encode("ascii")
    return json.dumps({"type": "error", "error": inner, "request_id": request_id}).encode("ascii")


def response_headers(error: ApiError, request_id: str) -> dict[str, str]:
    """Return the headers of the answer, Content-Length and Connection left to the writer."""
    headers = dict(error.headers)
    headers["Content-Type"] = "application/json"
    headers["x-request-id"] = headers["request-id"] = request_id
    if error.retry_after_s is not None:
        wait = min(max(error.retry_after_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
        headers["Retry-After"] = str(math.ceil(wait))
        headers["retry-after-ms"] = str(round(wait * 1000))
    if not error.retryable:
        headers["x-should-retry"] = "false"
    return headers


def render(error: ApiError, family: Family, request_id: str) -> web.Response:
    """Return the answer to a request that was read as HTTP."""
    return web.Response(
        status=error.status,
        headers=response_headers(error, request_id),
        body=envelope(error, family, request_id),
    )
