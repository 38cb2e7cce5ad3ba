"""A request target is one plain path of this host, or nothing."""

from __future__ import annotations

from urllib.parse import quote, unquote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelpool_router.core.target import Misdirected, Target, UnknownTarget, is_valid_host, resolve

FIXED = settings(max_examples=400, derandomize=True, deadline=None, database=None)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("/", Target("/", "")),
        ("/v1/models", Target("/v1/models", "")),
        ("/v1//models", Target("/v1/models", "")),
        ("/v1/models/", Target("/v1/models/", "")),
        ("/v1/models?a=//b/../c", Target("/v1/models", "?a=//b/../c")),
        ("/v1/models/Qwen%2FQwen3", Target("/v1/models/Qwen%2FQwen3", "")),
        ("/v1/models/m%C3%BCller..7b", Target("/v1/models/m%C3%BCller..7b", "")),
        ("http://a:8080/v1/models?x", Target("/v1/models", "?x")),
        ("HTTP://A:8080", Target("/", "")),
    ],
)
def test_plain_targets_are_understood(target: str, expected: Target) -> None:
    """Percent-encoding stays as sent; doubled slashes inside collapse."""
    assert resolve(target, "a:8080") == expected


@pytest.mark.parametrize(
    "target",
    [
        "",
        "*",
        "//v1/models",
        "//a/v1/models",
        "/v1/../metrics",
        "/v1/.",
        "/..",
        "/v1/%2e%2e/metrics",
        "/v1/..%2fmetrics",
        "/v1/%252e%252e%252fmetrics",
        "/v1/%25252e%25252e/metrics",
        "/v1/..%5cmetrics",
        "/v1/a\\b",
        "/v1/models%00",
        "/v1/models%0d%0aX",
        "/v1/models#a",
        "/v1/\xe9",
        "/%2525252525252525252e",
        "v1/models",
    ],
)
def test_doubtful_targets_are_unknown(target: str) -> None:
    """However often they are encoded."""
    with pytest.raises(UnknownTarget):
        resolve(target, "a")


@pytest.mark.parametrize(
    "target",
    [
        "http://169.254.169.254/v1/models",
        "http://a:81/v1/models",
        "http://user@a/v1/models",
        "https://b/",
        "ftp://a/",
        "http:///v1/models",
    ],
)
def test_foreign_authorities_are_refused(target: str) -> None:
    """We are no forward proxy, whoever asks."""
    with pytest.raises(Misdirected):
        resolve(target, "a")
    with pytest.raises(Misdirected):
        resolve(target, None)


segments = st.text("ab.%/\\25efcFEC \x00\r;?#~", max_size=12)


@FIXED
@given(segments)
def test_no_accepted_path_climbs_in_any_decoding(text: str) -> None:
    """Whatever a server behind us does to a path, it stays below where it began."""
    try:
        path = resolve("/v1/" + text, "a").path
    except (UnknownTarget, Misdirected):
        return
    for _ in range(6):
        assert ".." not in path.replace("\\", "/").split("/")
        assert "\0" not in path
        assert "\r" not in path
        path = unquote(path)


@FIXED
@given(st.text("abcXYZ0129-_.:@ü", min_size=1, max_size=20))
def test_ids_of_models_come_through(name: str) -> None:
    """A quoted model id is found again by unquoting; only bare dots are none."""
    if name in (".", ".."):
        return
    path = resolve("/v1/models/" + quote(name, safe=""), "a").path

    assert unquote(path.removeprefix("/v1/models/")) == name


@pytest.mark.parametrize(
    "host", ["a", "a:1", "A.example", "10.0.0.1:8080", "[::1]", "[::1]:8080", "model_pool", "xn--a"]
)
def test_hosts(host: str) -> None:
    """Names, addresses and container names, with a port or without."""
    assert is_valid_host(host)


@FIXED
@given(st.text("a1:.-_@/\\ []%\r\n\té?#,", max_size=12))
def test_no_host_hides_anything(host: str) -> None:
    """User-info, paths, blanks and lists are no host."""
    if is_valid_host(host):
        assert not set("@/\\ %\r\n\té?#,") & set(host)
        assert host.isascii()
        assert host
