"""What crosses the router in heads, both ways."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from modelpool_router.core.headers import (
    MAX_HEAD_FIELDS,
    AnswerHead,
    BadHead,
    ExchangeIds,
    Field,
    Framing,
    Stencil,
    answer_head,
    authority,
    header_text,
    parse_answer_head,
    request_head,
    stream_head,
)

steady = settings(derandomize=True, deadline=None)
IDS = ExchangeIds("req-1")

# Every byte that can be in a header line as aiohttp hands it over, and those that cannot.
any_name = st.binary(min_size=1, max_size=20)
any_value = st.binary(max_size=40)
token = st.from_regex(rb"\A[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,20}\Z")
text = st.from_regex(rb"\A[\x21-\x7e\x80-\xff]([\t\x20-\x7e\x80-\xff]{0,30}[\x21-\x7e])?\Z")


def sent(client_fields: list[Field], **changes: object) -> list[bytes]:
    """Lines of a request head without its request line and end."""
    arguments: dict[str, object] = {
        "authority": b"10.0.0.1:8000",
        "client_fields": client_fields,
        "request_id": "req-1",
        "body_size": 2,
    }
    raw = request_head("POST", "/v1/x", **(arguments | changes))  # type: ignore[arg-type]
    assert raw.endswith(b"\r\n\r\n")
    return raw[:-4].split(b"\r\n")[1:]


def test_given_secrets_and_hops_when_a_request_goes_up_then_they_stay_here() -> None:
    client: list[Field] = [
        (b"Host", b"evil"),
        (b"Authorization", b"Bearer secret"),
        (b"X-API-Key", b"secret"),
        (b"Cookie", b"a=b"),
        (b"Forwarded", b"for=1"),
        (b"X-Forwarded-For", b"1.2.3.4"),
        (b"Origin", b"http://evil"),
        (b"Transfer-Encoding", b"chunked"),
        (b"Content-Length", b"99"),
        (b"Content-Encoding", b"gzip"),
        (b"Expect", b"100-continue"),
        (b"Upgrade", b"h2c"),
        (b"TE", b"trailers"),
        (b"content_type", b"text/twin"),
        (b"X-Request-Id", b"theirs"),
        (b"X-Stainless-Read-Timeout", b"600"),
        (b"OpenAI-Organization", b"org"),
        (b"Content-Type", b"application/json"),
        (b"Accept", b"text/event-stream"),
        (b"Accept-Encoding", b"gzip"),
        (b"User-Agent", b"sdk/1"),
        (b"traceparent", b"00-1-2-03"),
        (b"tracestate", b"a=1"),
        (b"anthropic-version", b"2023-06-01"),
        (b"anthropic-beta", b"x"),
        (b"OpenAI-Beta", b"y"),
    ]

    lines = sent(client)

    assert lines == [
        b"Host: 10.0.0.1:8000",
        b"Content-Type: application/json",
        b"Accept: text/event-stream",
        b"Accept-Encoding: gzip",
        b"User-Agent: sdk/1",
        b"traceparent: 00-1-2-03",
        b"tracestate: a=1",
        b"anthropic-version: 2023-06-01",
        b"anthropic-beta: x",
        b"OpenAI-Beta: y",
        b"X-Request-Id: req-1",
        b"Content-Length: 2",
    ]


def test_given_nominated_fields_when_a_request_goes_up_then_they_stay_here() -> None:
    client: list[Field] = [(b"User-Agent", b"a"), (b"Connection", b"close, User-Agent")]

    assert not [line for line in sent(client) if line.lower().startswith(b"user-agent")]


def test_given_two_content_types_when_a_request_goes_up_then_only_the_first_does() -> None:
    lines = sent([(b"Content-Type", b"a"), (b"content-type", b"b"), (b"Accept", b"1")] * 2)

    assert lines[1:4] == [b"Content-Type: a", b"Accept: 1", b"Accept: 1"]


def test_given_a_credential_and_a_held_stream_when_a_request_goes_up_then_both_show() -> None:
    lines = sent(
        [(b"Accept-Encoding", b"gzip")],
        credential=(b"Authorization", b"Bearer up"),
        plain_answer=True,
    )

    assert lines[1:3] == [b"Accept-Encoding: identity", b"Authorization: Bearer up"]


def test_given_no_body_when_a_request_goes_up_then_only_a_get_has_no_length() -> None:
    get = request_head("GET", "/", authority=b"a:1", client_fields=[], request_id="r", body_size=0)

    assert b"Content-Length" not in get
    assert b"Content-Length: 0" in sent([], body_size=0)


@pytest.mark.parametrize("target", ["", "x", "/a b", "/a\r\nX: y", "/a#b", "/\x7f", "//a\n"])
def test_given_a_target_that_breaks_its_line_when_built_then_it_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match="not a request line"):
        request_head(
            "POST", target, authority=b"a:1", client_fields=[], request_id="r", body_size=0
        )


def test_given_a_credential_that_breaks_its_line_when_built_then_it_is_refused() -> None:
    with pytest.raises(ValueError, match="credential"):
        sent([], credential=(b"Authorization", b"Bearer a\r\nX: y"))


@steady
@given(st.lists(st.tuples(any_name, any_value), max_size=6), st.text(max_size=30))
@example([(b"Accept", b"a\r\nEvil: 1")], "a\r\nEvil: 1")
@example([(b"Accept", b"a\nEvil: 1"), (b"user-agent", b"\x00")], "\u2028\x85")
def test_given_any_input_when_a_request_goes_up_then_each_line_is_one_of_ours(
    fields: list[Field], request_id: str
) -> None:
    for line in sent(fields, request_id=request_id):
        assert re.fullmatch(
            rb"(?i)(host|content-type|accept|accept-encoding|user-agent|traceparent|tracestate"
            rb"|anthropic-version|anthropic-beta|openai-beta|x-request-id|content-length)"
            rb": [\t\x20-\x7e\x80-\xff]*",
            line,
        )


@steady
@given(st.text(max_size=50))
def test_given_any_text_when_written_as_a_header_then_it_stays_in_its_line(value: str) -> None:
    assert re.fullmatch(rb"[\x20-\x7e]*", header_text(value))


def test_given_hosts_when_named_then_the_port_is_said_and_ipv6_is_bracketed() -> None:
    assert authority("127.0.0.1", 80) == b"127.0.0.1:80"
    assert authority("::1", 8000) == b"[::1]:8000"
    assert authority("bücher.example", 1) == b"xn--bcher-kva.example:1"
    with pytest.raises(ValueError):
        authority("a\r\nb", 1)


ANSWER = (
    b"HTTP/1.1 200 OK\r\n"
    b"Server: llama\r\nDate: now\r\nContent-Type: application/json\r\n"
    b"Set-Cookie: a=b\r\nX-Two: 1\r\nx-two: 2\r\nConnection: keep-alive, X-Private\r\n"
    b"Keep-Alive: timeout=5\r\nX-Private: 1\r\nAlt-Svc: h3\r\nX-Request-Id: theirs\r\n"
    b"X-Accel-Redirect: /secret\r\nAccess-Control-Allow-Origin: *\r\nX-ModelPool-Member: fake\r\n"
    b"Content-Length: 2\r\n\r\n"
)


def test_given_an_answer_when_passed_on_then_hops_and_cookies_go_and_the_rest_keeps_its_order() -> (
    None
):
    head = parse_answer_head(ANSWER, method="POST")

    raw = answer_head(
        head,
        Framing.LENGTH,
        ids=ExchangeIds("req-1", ((b"Vary", b"Origin"),)),
        member="alpha",
        held_ms=12,
        close=False,
    )

    assert raw == (
        b"HTTP/1.1 200 OK\r\n"
        b"Date: now\r\nContent-Type: application/json\r\nX-Two: 1\r\nx-two: 2\r\n"
        b"x-request-id: req-1\r\nrequest-id: req-1\r\nx-modelpool-member: alpha\r\n"
        b"x-modelpool-held-ms: 12\r\nVary: Origin\r\nContent-Length: 2\r\n\r\n"
    )
    assert head.keep_alive


def test_given_an_event_stream_when_passed_on_then_proxies_are_told_not_to_buffer() -> None:
    head = parse_answer_head(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        b"cache-control: max-age=5\r\nx-accel-buffering: yes\r\ntransfer-encoding: chunked\r\n\r\n",
        method="POST",
    )

    raw = answer_head(head, Framing.CHUNKED, ids=IDS, member="a", held_ms=None, close=True)

    assert b"max-age" not in raw and b"yes" not in raw and b"held-ms" not in raw
    assert raw.count(b"Cache-Control: no-cache\r\n") == 1
    assert raw.count(b"X-Accel-Buffering: no\r\n") == 1
    assert raw.endswith(b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n")


def test_given_a_stream_of_ours_when_begun_then_its_head_says_so() -> None:
    raw = stream_head(Framing.CHUNKED, ids=IDS, member="a", close=False)

    assert raw.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n")
    assert b"X-Accel-Buffering: no\r\n" in raw and b"held-ms" not in raw


@pytest.mark.parametrize(
    ("line", "method", "framing", "length", "keep_alive"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5", "POST", Framing.LENGTH, 5, True),
        (b"HTTP/1.1 200\r\nContent-Length: 5", "POST", Framing.LENGTH, 5, True),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 5", "POST", Framing.LENGTH, 5, False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5", "HEAD", Framing.NONE, 5, True),
        (b"HTTP/1.1 304 N\r\nContent-Length: 5", "GET", Framing.NONE, 5, True),
        (b"HTTP/1.1 204 N\r\nContent-Length: 0", "POST", Framing.NONE, None, True),
        (b"HTTP/1.1 204 N", "POST", Framing.NONE, None, True),
        (b"HTTP/1.1 100 C", "POST", Framing.NONE, None, True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked", "POST", Framing.CHUNKED, None, True),
        (b"HTTP/1.1 200 OK\r\nA: b", "POST", Framing.UNTIL_CLOSE, None, False),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nConnection: Close",
            "POST",
            Framing.LENGTH,
            1,
            False,
        ),
    ],
)
def test_given_a_head_when_read_then_its_framing_is_known(
    line: bytes, method: str, framing: Framing, length: int | None, keep_alive: bool
) -> None:
    head = parse_answer_head(line + b"\r\n\r\n", method=method)

    assert (head.framing, head.length, head.keep_alive) == (framing, length, keep_alive)


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/2.0 200 OK",
        b"HTTP/0.9 200 OK",
        b"HTTP/1.1 20 OK",
        b"HTTP/1.1 2000 OK",
        b"HTTP/1.1 999 OK",
        b"HTTP/1.1  200 OK",
        b"http/1.1 200 OK",
        b"ICY 200 OK",
        b"HTTP/1.1 200 O\x00K",
        b"HTTP/1.1 200 OK\nA: b",
        b"HTTP/1.1 200 OK\r\nA : b",
        b"HTTP/1.1 200 OK\r\n A: b",
        b"HTTP/1.1 200 OK\r\nA: b\r\n folded",
        b"HTTP/1.1 200 OK\r\n: b",
        b"HTTP/1.1 200 OK\r\nnocolon",
        b"HTTP/1.1 200 OK\r\nA: b\x00",
        b"HTTP/1.1 200 OK\r\nA: b\rC: d",
        b"HTTP/1.1 200 OK\r\nA: b\nC: d",
        b"HTTP/1.1 200 OK\r\nA\xff: b",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5, 5",
        b"HTTP/1.1 200 OK\r\nContent-Length: +5",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0x5",
        b"HTTP/1.1 200 OK\r\nContent-Length:",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked",
        b"HTTP/1.1 204 N\r\nContent-Length: 5",
        b"HTTP/1.1 204 N\r\nTransfer-Encoding: chunked",
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * MAX_HEAD_FIELDS + b"A: b",
    ],
)
def test_given_an_odd_head_when_read_then_it_is_refused_without_an_echo(raw: bytes) -> None:
    with pytest.raises(BadHead) as caught:
        parse_answer_head(raw + b"\r\n\r\n", method="POST")

    assert raw.decode("latin-1") not in str(caught.value)


@steady
@given(st.lists(st.tuples(token, text), max_size=8), st.booleans())
def test_given_any_fields_when_passed_on_then_the_kept_ones_keep_order_and_the_rest_is_ours(
    fields: list[Field], close: bool
) -> None:
    framing = {b"content-length", b"transfer-encoding", b"connection"}
    fields = [f for f in fields if f[0].lower() not in framing]
    lines = b"".join(b"%b:%b\r\n" % f for f in fields)

    head = parse_answer_head(b"HTTP/1.1 200 OK\r\n" + lines + b"\r\n", method="POST")
    raw = answer_head(head, Framing.CHUNKED, ids=IDS, member="é\r\nX: y", held_ms=0, close=close)

    dropped = {b"alt-svc", b"keep-alive", b"request-id", b"server", b"set-cookie", b"set-cookie2"}
    dropped |= {b"te", b"trailer", b"upgrade", b"x-request-id", b"x-sendfile"}
    prefixes = (b"proxy-", b"access-control-", b"x-accel-", b"x-modelpool-")
    expected = [
        b"%b: %b" % f
        for f in fields
        if f[0].lower() not in dropped and not f[0].lower().startswith(prefixes)
    ]
    got = raw[: raw.index(b"\r\n\r\n")].split(b"\r\n")[1:]
    if not head.event_stream:
        assert got[: len(expected)] == expected
    assert raw.count(b"\r\n\r\n") == 1 and b"\r\nX: y" not in raw
    ours = got[len(expected) :] if not head.event_stream else []
    assert not [line for line in ours if line.lower().startswith((b"x: y", b"content-length"))]


@steady
@given(st.binary(max_size=200))
@example(b"A:" * 60)
@example(b"A: b\r\n" * 30)
def test_given_any_bytes_when_read_as_a_head_then_it_is_a_head_or_refused(noise: bytes) -> None:
    raw = b"HTTP/1.1 200 OK\r\n" + noise + b"\r\n\r\n"
    try:
        head = parse_answer_head(raw, method="POST")
    except BadHead:
        return

    assert isinstance(head, AnswerHead)
    for name, value in head.fields:
        assert re.fullmatch(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+", name)
        assert re.fullmatch(rb"[\t\x20-\x7e\x80-\xff]*", value)


@pytest.mark.parametrize("name", [b"Content-Length", b"content-length", b"CONTENT-LENGTH"])
def test_a_stencil_fits_the_same_head_with_any_length(name: bytes) -> None:
    raw = b"HTTP/1.1 200 OK\r\nA: 17\r\n%b: %d\r\nB: c\r\n\r\n"
    stencil = Stencil.of(raw % (name, 17), 17)
    assert stencil is not None

    for length in (0, 7, 17, 170, 123_456_789_012_345):
        data = raw % (name, length) + b"the body"
        assert stencil.fits(data)
        assert (stencil.length, data[stencil.end :]) == (length, b"the body")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nA: 17\r\nContent-Length: ",
        b"HTTP/1.1 200 OK\r\nA: 17\r\nContent-Length: 5",
        b"HTTP/1.1 200 OK\r\nA: 17\r\nContent-Length: 5\r\nB: c\r\n",
        b"HTTP/1.1 200 OK\r\nA: 17\r\nContent-Length: 5\r\nB: d\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: 18\r\nContent-Length: 5\r\nB: c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: 17\r\nContent-Length: \r\nB: c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: 17\r\nContent-Length: 5 \r\nB: c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: 17\r\nContent-Length: +5\r\nB: c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: 17\r\nContent-Length: 5_0\r\nB: c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: 17\r\nContent-Length: \xb2\r\nB: c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: 17\r\nContent-Length: 5\r\nX: y\r\nB: c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: 17\r\nContent-Length: 12345678901234567\r\nB: c\r\n\r\n",
    ],
)
def test_a_stencil_fits_no_other_head(data: bytes) -> None:
    stencil = Stencil.of(b"HTTP/1.1 200 OK\r\nA: 17\r\nContent-Length: 17\r\nB: c\r\n\r\n", 17)
    assert stencil is not None

    assert not stencil.fits(data)
