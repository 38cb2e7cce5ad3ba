"""Errors of ours have one table, two shapes and honest advice on retrying."""

from __future__ import annotations

import json

import pytest

from modelpool_router.core.commands import RefusalCode
from modelpool_router.web.errors import (
    STATUS,
    ApiError,
    envelope,
    error_type,
    family_of,
    render,
    response_headers,
)


def test_the_scheduler_says_nothing_that_the_table_does_not_know() -> None:
    """Every refusal of a pool has a status."""
    assert {code.value for code in RefusalCode} <= STATUS.keys()


@pytest.mark.parametrize("code", STATUS)
def test_both_shapes_say_the_same(code: str) -> None:
    """Status, message and code agree; the shape is what each family of SDKs reads."""
    error = ApiError.of(code, 'It is "so".', "model")
    ours = json.loads(envelope(error, "openai", "req_1"))
    theirs = json.loads(envelope(error, "anthropic", "req_1"))

    assert ours["error"] == {
        "message": 'It is "so".',
        "type": error_type(error.status, "openai"),
        "param": "model",
        "code": code,
    }
    assert theirs["type"] == "error"
    assert theirs["request_id"] == "req_1"
    assert theirs["error"]["message"] == 'It is "so".'
    assert theirs["error"]["type"] == error_type(error.status, "anthropic")


@pytest.mark.parametrize(
    ("status", "openai", "anthropic"),
    [
        (400, "invalid_request_error", "invalid_request_error"),
        (401, "invalid_request_error", "authentication_error"),
        (404, "invalid_request_error", "not_found_error"),
        (413, "invalid_request_error", "request_too_large"),
        (429, "rate_limit_error", "rate_limit_error"),
        (431, "invalid_request_error", "invalid_request_error"),
        (500, "server_error", "api_error"),
        (502, "server_error", "api_error"),
        (503, "server_error", "overloaded_error"),
        (504, "server_error", "timeout_error"),
        (505, "invalid_request_error", "api_error"),
    ],
)
def test_types(status: int, openai: str, anthropic: str) -> None:
    """As the SDKs' own documentation names them."""
    assert error_type(status, "openai") == openai
    assert error_type(status, "anthropic") == anthropic


@pytest.mark.parametrize(
    ("wait_s", "seconds", "milliseconds"),
    [
        (0.0, "1", "1000"),
        (0.2, "1", "1000"),
        (1.0, "1", "1000"),
        (1.01, "2", "1010"),
        (59.5, "60", "59500"),
        (60.0, "60", "60000"),
        (3600.0, "60", "60000"),
    ],
)
def test_retry_after_is_whole_seconds_up_to_a_minute(
    wait_s: float, seconds: str, milliseconds: str
) -> None:
    """Longer ones are ignored by SDKs, shorter ones make a storm."""
    headers = response_headers(ApiError.of("queue_full", "Full.", retry_after_s=wait_s), "r")

    assert headers["Retry-After"] == seconds
    assert headers["retry-after-ms"] == milliseconds
    assert "x-should-retry" not in headers


def test_permanent_failures_say_so() -> None:
    """SDKs retry 5xx by themselves."""
    assert response_headers(ApiError.of("invalid_json", "x"), "r")["x-should-retry"] == "false"
    assert "x-should-retry" not in response_headers(ApiError.of("request_timeout", "x"), "r")
    assert "x-should-retry" not in response_headers(ApiError.of("rate_limit_exceeded", "x"), "r")
    failed = ApiError.of("member_failed", "x", retryable=False)
    assert response_headers(failed, "r")["x-should-retry"] == "false"
    assert "Retry-After" not in response_headers(failed, "r")


def test_rendered_answers_are_json_with_ids() -> None:
    """Whoever reads only headers finds the request again."""
    response = render(ApiError.of("unknown_url", "x", headers={"X-A": "b"}), "openai", "req_9")

    assert response.status == 404
    assert response.content_type == "application/json"
    assert response.headers["x-request-id"] == response.headers["request-id"] == "req_9"
    assert response.headers["X-A"] == "b"


@pytest.mark.parametrize(
    ("path", "family"),
    [
        ("/v1/messages", "anthropic"),
        ("/v1/messages/count_tokens", "anthropic"),
        ("/v1/messagesx", "openai"),
        ("/v1/chat/completions", "openai"),
        ("", "openai"),
    ],
)
def test_the_path_decides_the_shape(path: str, family: str) -> None:
    """Nothing else of a request does."""
    assert family_of(path) == family
