"""
Checks of a request's head that stand before every route, in one order; and parse failures by name.

Decides only: `server` answers. Sentences are fixed, so nothing of a request can come back in one.
"""

from __future__ import annotations

import re

from aiohttp import web
from aiohttp.http import HttpVersion10, HttpVersion11
from aiohttp.http_exceptions import BadHttpMethod, BadStatusLine, HttpProcessingError, LineTooLong

from ..core.target import Misdirected, Target, UnknownTarget, is_valid_host, resolve
from .errors import ApiError

MAX_LINE = 8190
"""Longest request target in bytes; the other limit differs so that a failure tells which it was."""
MAX_FIELD = 8192
"""Longest header line in bytes."""
MAX_FIELDS = 128

# Methods that some route may have; whether this one has it is for the handler to say.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_ALLOW = {"Allow": "GET, HEAD, POST, OPTIONS"}

_BYTES_OF_LINE = re.compile(r"\n\n +b['\"](.)", re.DOTALL)


def check(request: web.BaseRequest) -> Target:
    """
    Return where a request that was read as HTTP is aimed at.

    Raises:
        ApiError: 400, 404, 405, 417, 421, 426 or 505.
    """
    headers = request.headers
    version = request.version
    if version not in (HttpVersion10, HttpVersion11):
        raise bad_version()
    if "Transfer-Encoding" in headers and (
        version == HttpVersion10
        or "Content-Length" in headers
        or [each.lower() for each in headers.getall("Transfer-Encoding")] != ["chunked"]
    ):
        raise ApiError.of("invalid_framing", "Transfer-Encoding must be exactly `chunked`.")
    hosts = headers.getall("Host", [])
    if len(hosts) > 1 or (hosts and not is_valid_host(hosts[0])):
        raise bad_host()
    if request.method not in _METHODS:
        raise ApiError.of("method_not_allowed", "This method is not served.", headers=_ALLOW)
    if offers_upgrade(request) and "websocket" in headers.get("Upgrade", "").lower():
        raise ApiError.of(
            "upgrade_required",
            "WebSocket connections are not served; send an HTTP/1.1 request instead.",
            headers={"Upgrade": "HTTP/1.1"},
        )
    if "Expect" in headers and version == HttpVersion11:
        if [each.lower() for each in headers.getall("Expect")] != ["100-continue"]:
            raise ApiError.of("expectation_failed", "Only `Expect: 100-continue` is understood.")
    try:
        return resolve(request._message.path, hosts[0] if hosts else None)
    except Misdirected:
        raise ApiError.of(
            "misdirected_request", "This server answers only for the host it was reached by."
        ) from None
    except UnknownTarget:
        if request._message.path == "*":
            raise ApiError.of(
                "method_not_allowed", "OPTIONS needs a path.", headers=_ALLOW
            ) from None
        raise unknown_url() from None


def offers_upgrade(request: web.BaseRequest) -> bool:
    """Tell whether the parser stops behind this request because of an upgrade that it offers."""
    return bool(request._message.upgrade)


def unknown_url() -> ApiError:
    """Return the error for a path that is no route."""
    return ApiError.of("unknown_url", "There is nothing at this URL.")


def bad_version() -> ApiError:
    """Return the error for a protocol version that is not ours."""
    return ApiError.of("http_version_not_supported", "Only HTTP/1.1 and HTTP/1.0 are served.")


def bad_host() -> ApiError:
    """Return the error for a Host field that names no host."""
    return ApiError.of("invalid_host", "The Host header is missing or is not a host name.")


def too_many_fields() -> ApiError:
    """Return the error for a head that is too big."""
    return ApiError.of("request_headers_too_large", "The request headers are too many or too long.")


def parse_failure(failure: HttpProcessingError) -> ApiError:
    """
    Return the error that answers what aiohttp's parser refused.

    The parser's texts quote the input: only their fixed beginnings are looked at, and nothing of
    them goes on.
    """
    text = failure.message
    if isinstance(failure, LineTooLong):
        if failure.args[1] == MAX_LINE:
            return ApiError.of("uri_too_long", "The request target is too long.")
        return too_many_fields()
    if isinstance(failure, BadHttpMethod):
        line = _BYTES_OF_LINE.search(text)
        if line is not None and line[1].isalpha():
            return ApiError.of("not_implemented", "This method is not known.")
    elif isinstance(failure, BadStatusLine):
        if text.startswith("Bad status line:\n  Invalid HTTP version"):
            return bad_version()
    elif text.startswith("Too many headers"):
        return too_many_fields()
    elif text.startswith(("Missing 'Host'", "Duplicate 'Host'")):
        return bad_host()
    return ApiError.of("invalid_framing", "The request is not well-formed HTTP/1.1.")
