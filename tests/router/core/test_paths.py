"""Paths of the data port: which exist, and where a stream can be meant."""

from __future__ import annotations

import pytest

from modelpool_router.core.paths import Kind, find_path


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/infill"]
)
def test_a_stream_is_meant_where_engines_stream(path: str) -> None:
    rule = find_path(path)

    assert rule is not None and rule.may_stream


@pytest.mark.parametrize(
    "path",
    ["/v1/embeddings", "/v1/rerank", "/tokenize", "/v1/messages/count_tokens", "/v1/audio/speech"],
)
def test_elsewhere_the_word_stream_opens_none(path: str) -> None:
    """A held client of these must not be given an event stream that its answer cannot go into."""
    rule = find_path(path)

    assert rule is not None and rule.kind is Kind.INFERENCE
    assert not rule.may_stream


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/audio/../models", "/v1/models/", "/v1/files"])
def test_what_is_not_listed_does_not_exist(path: str) -> None:
    assert find_path(path) is None
