"""
Bad input gets the right answer: status, code and state of the connection, three ways each.

Alone; as the second request of a kept connection; in one-byte segments. Afterwards a good request
on a new connection succeeds, nothing is held or wanted, and no input byte and no key is in a log.

The fixture `front` decides what is under test: the parts of the front alone, and the whole router.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import pytest

from fronts import front_of
from modelpool_router.web.intake import IntakeLimits
from modelpool_router.web.server import ServerOptions
from rawclient import RawAnswer, RawClient
from served import member, pool, served
from stubfront import KEY, KEY_FILE, LIMITED_KEY, ORIGIN, Front, stub_front

CANARY = "zq9canary"
J = b'{"model":"m"}'
AUTH = f"Authorization: Bearer {KEY}\r\n".encode()
CANARY_FIELD = f"X-Canary: {CANARY}\r\n".encode()
FIELDS = AUTH + CANARY_FIELD + b"Content-Type: application/json\r\n"
P = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n" + FIELDS
GOOD_GET = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n" + AUTH + b"\r\n"
UNKEYED = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n" + CANARY_FIELD

State = Literal["close", "keep", "either"]
Way = Literal["alone", "second", "segments"]


def post(body: bytes, fields: bytes = b"") -> bytes:
    """Return a well-formed request with this body."""
    return P + fields + b"Content-Length: %d\r\n\r\n" % len(body) + body


def get(target: str, host: str = "a", fields: bytes = b"") -> bytes:
    """Return a GET with key and canary."""
    line = f"GET {target} HTTP/1.1\r\nHost: {host}\r\n".encode("latin-1")
    return line + AUTH + CANARY_FIELD + fields + b"\r\n"


def chunked(body: bytes, *, head: bytes = P, trailers: bytes = b"") -> bytes:
    """Return a request with this body in one chunk."""
    framing = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(body)
    return head + framing + body + b"\r\n0\r\n" + trailers + b"\r\n"


@dataclass(frozen=True, slots=True)
class Case:
    """One input and what must come back. Several pairs where the list allows several."""

    name: str
    raw: bytes
    answers: tuple[tuple[int, str | None, State], ...]
    param: str | None = None
    secrets: tuple[str, ...] = ()


def case(
    name: str,
    raw: bytes,
    status: int,
    code: str | None,
    state: State,
    *also: tuple[int, str | None, State],
    param: str | None = None,
    secrets: tuple[str, ...] = (),
) -> Case:
    return Case(name, raw, ((status, code, state), *also), param, secrets)


FRAMING = [
    case(
        "1-both-lengths",
        P + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        b"GET /metrics HTTP/1.1\r\nHost: s\r\n\r\n",
        *(400, "invalid_framing", "close"),
    ),
    case(
        "3-two-lengths",
        P + b"Content-Length: 13\r\nContent-Length: 14\r\n\r\n" + J + b" ",
        *(400, "invalid_framing", "close"),
    ),
    case(
        "5-signed-length", P + b"Content-Length: +13\r\n\r\n" + J, 400, "invalid_framing", "close"
    ),
    case(
        "6-length-of-63-bits",
        P + b"Content-Length: 9223372036854775807\r\n\r\n" + J,
        *(413, "request_too_large", "close"),
    ),
    case(
        "length-of-20-digits",
        P + b"Content-Length: 99999999999999999999\r\n\r\n",
        400,
        None,
        "close",
    ),
    case("length-list", P + b"Content-Length: 13, 13\r\n\r\n" + J, 400, "invalid_framing", "close"),
    case("7-bare-line-feeds", post(J).replace(b"\r\n", b"\n"), 400, "invalid_framing", "close"),
    case(
        "9-blank-before-colon",
        UNKEYED + b"Authorization : Bearer SECRET\r\nContent-Length: 13\r\n\r\n" + J,
        *(400, "invalid_framing", "close"),
        secrets=("SECRET",),
    ),
    case(
        "10-control-byte-in-value",
        UNKEYED + b"Authorization: Bearer SECRET\x01\r\nContent-Length: 13\r\n\r\n" + J,
        *(400, "invalid_framing", "close"),
        secrets=("SECRET",),
    ),
    case("nul-in-value", P + b"X-A: a\0b\r\nContent-Length: 13\r\n\r\n" + J, 400, None, "close"),
    case("folded-field", P + b"X-A: a\r\n b\r\nContent-Length: 13\r\n\r\n" + J, 400, None, "close"),
    case(
        "11-chunk-size-with-prefix",
        P + b"Transfer-Encoding: chunked\r\n\r\n0xd\r\n" + J + b"\r\n0\r\n\r\n",
        *(400, "invalid_framing", "close"),
    ),
    case(
        "chunk-without-its-end",
        P + b"Transfer-Encoding: chunked\r\n\r\nd\r\n" + J + b"0\r\n\r\n",
        *(400, "invalid_framing", "close"),
    ),
    case(
        "13-trailers",
        chunked(J, trailers=b"Content-Length: 99\r\nHost: evil\r\nAuthorization: Bearer x\r\n"),
        *(400, "invalid_framing", "close"),
        (200, None, "keep"),
    ),
    case(
        "14-chunked-in-1.0",
        chunked(J, head=P.replace(b"HTTP/1.1", b"HTTP/1.0")),
        *(400, "invalid_framing", "close"),
        (200, None, "close"),
    ),
    *(
        case(
            f"coding-{name}",
            P + b"Transfer-Encoding: " + value + b"\r\n\r\nd\r\n" + J + b"\r\n0\r\n\r\n",
            *(400, "invalid_framing", "close"),
        )
        for name, value in {
            "gzip-chunked": b"gzip, chunked",
            "chunked-twice": b"chunked, chunked",
            "two-lines": b"chunked\r\nTransfer-Encoding: chunked",
            "identity": b"identity",
            "suffix": b"chunked;a=b",
            "prefix": b"xchunked",
            "vertical-tab": b"\x0bchunked",
        }.items()
    ),
]

HEADS = [
    case(
        "15-no-host", b"GET /v1/models HTTP/1.1\r\n" + AUTH + b"\r\n", 400, "invalid_host", "close"
    ),
    case("16-host-with-blank", get("/v1/models", "a b"), 400, "invalid_host", "close"),
    *(
        case(f"host-{name}", get("/v1/models", host), 400, "invalid_host", "close")
        for name, host in {
            "user-info": "user@a",
            "path": "a/b",
            "port": "a:999999",
            "no-port": "a:",
            "empty": "",
            "open-bracket": "[::1",
            "list": "a,b",
            "percent": "a%2fb",
            "non-ascii": "\xe9",
        }.items()
    ),
    case("two-hosts", get("/v1/models", "a\r\nHost: a"), 400, "invalid_host", "close"),
    case("18-long-target", get("/v1/models?" + "a" * 65536), 414, "uri_too_long", "close"),
    case(
        "19-many-fields",
        get("/v1/models", fields=b"X-A: b\r\n" * 500),
        *(431, "request_headers_too_large", "close"),
    ),
    case(
        "long-field",
        get("/v1/models", fields=b"X-A: " + b"b" * 65536 + b"\r\n"),
        *(431, "request_headers_too_large", "close"),
    ),
    case(
        "21-connect",
        b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: 127.0.0.1:22\r\n\r\n",
        *(405, "method_not_allowed", "close"),
        (501, None, "close"),
    ),
    case(
        "trace", get("/v1/models").replace(b"GET", b"TRACE", 1), 405, "method_not_allowed", "keep"
    ),
    case(
        "options-star", get("*").replace(b"GET", b"OPTIONS", 1), 405, "method_not_allowed", "keep"
    ),
    case(
        "known-odd-method", get("/").replace(b"GET", b"PURGE", 1), 405, "method_not_allowed", "keep"
    ),
    case("unknown-method", get("/").replace(b"GET", b"FOO", 1), 501, "not_implemented", "close"),
    case("lower-case-method", get("/").replace(b"GET", b"get", 1), 501, "not_implemented", "close"),
    case("wrong-method", get("/v1/chat/completions"), 405, "method_not_allowed", "keep"),
    case(
        "version-3.7",
        get("/v1/models").replace(b"HTTP/1.1", b"HTTP/3.7"),
        *(505, "http_version_not_supported", "close"),
    ),
    case(
        "version-2.0",
        get("/v1/models").replace(b"HTTP/1.1", b"HTTP/2.0"),
        *(505, "http_version_not_supported", "close"),
    ),
    case(
        "version-0.9",
        b"GET /v1/models\r\n\r\n",
        *(505, "http_version_not_supported", "close"),
        (400, None, "close"),
    ),
    case(
        "http2-preface",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        400,
        None,
        "close",
        (505, None, "close"),
    ),
    case(
        "tls-hello",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        400,
        "invalid_framing",
        "close",
    ),
    case(
        "22-foreign-authority",
        get("http://169.254.169.254/v1/models"),
        *(421, "misdirected_request", "keep"),
    ),
    case("foreign-scheme", get("ftp://a/v1/models"), 421, "misdirected_request", "keep"),
    case(
        "25-expect-too-large",
        P + b"Expect: 100-continue\r\nContent-Length: 99999999999\r\n\r\n",
        *(413, "request_too_large", "close"),
    ),
    case(
        "unknown-expect",
        P + b"Expect: 200-ok\r\nContent-Length: 13\r\n\r\n" + J,
        *(417, "expectation_failed", "close"),
    ),
    case(
        "websocket",
        get(
            "/v1/responses",
            fields=b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
        ),
        *(426, "upgrade_required", "close"),
    ),
    *(
        case(f"26-path-{number}", get(path), 404, "unknown_url", "keep")
        for number, path in enumerate(
            [
                "/v1/%2e%2e/metrics",
                "/v1/..%2fmetrics",
                "/v1/../metrics",
                "/v1/%252e%252e/metrics",
                "/v1/.%5c..%5cmetrics",
                "//v1/models",
                "///v1/models",
                "/v1/models%00",
                "/v1/models;a=b",
                "/v1/models%2f..",
                "/metrics",
                "/",
                "/v1",
                "/V1/models",
                "/v1/models#a",
            ]
        )
    ),
]

BODIES = [
    case("30-cut-short", post(b'{"model":"m"'), 400, "invalid_json", "keep"),
    case("empty", post(b""), 400, "invalid_json", "keep"),
    case("no-length", P + b"\r\n", 400, "invalid_json", "keep"),
    case("something-behind", post(J + b"}"), 400, "invalid_json", "keep"),
    case(
        "31-model-twice",
        post(b'{"model":"allowed","model":"other"}'),
        *(400, "duplicate_key", "keep"),
        param="model",
    ),
    case(
        "31-model-twice-escaped",
        post(rb'{"model":"allowed","mod\u0065l":"other"}'),
        *(400, "duplicate_key", "keep"),
        param="model",
    ),
    case(
        "another-key-twice",
        post(b'{"a":1,"model":"m","b":{"a":1},"a":1}'),
        *(400, "duplicate_key", "keep"),
        param="a",
    ),
    case(
        "32-deep",
        post(b'{"model":"m","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        *(400, "invalid_json", "keep"),
    ),
    *(
        case(
            f"35-number-{value}",
            post(b'{"model":"m","t":[%s]}' % value.encode()),
            400,
            code,
            "keep",
        )
        for value in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "01", "+1", ".5", "0x1")
        for code in ("invalid_json",)
    ),
    *(
        case(f"text-{name}", post(body), 400, "invalid_json", "keep")
        for name, body in {
            "invalid-utf-8": b'{"model":"m","x":"\xff"}',
            "overlong": b'{"model":"m","x":"\xc0\xaf"}',
            "utf-16": '{"model":"m"}'.encode("utf-16"),
            "bom": b"\xef\xbb\xbf" + J,
            "lone-surrogate": rb'{"model":"m","x":"\ud800"}',
            "raw-surrogate": b'{"model":"m","x":"\xed\xa0\x80"}',
            "control-character": b'{"model":"m","x":"\x01"}',
            "single-quotes": b"{'model':'m'}",
            "comment": b'{"model":"m"/**/}',
        }.items()
    ),
    case("37-no-model", post(b"{}"), 400, "missing_required_parameter", "keep", param="model"),
    case("37-a-list", post(b"[]"), 400, "invalid_type", "keep"),
    case("37-number", post(b'{"model":1}'), 400, "invalid_type", "keep", param="model"),
    case(
        "37-empty", post(b'{"model":""}'), 400, "missing_required_parameter", "keep", param="model"
    ),
    case("null-model", post(b'{"model":null}'), 400, "invalid_type", "keep", param="model"),
    case(
        "37-stream-text",
        post(b'{"model":"m","stream":"yes"}'),
        *(400, "invalid_type", "keep"),
        param="stream",
    ),
    *(
        case(f"40-model-{number}", post(body), 404, "model_not_found", "keep", param="model")
        for number, body in enumerate(
            [
                rb'{"model":"http://169.254.169.254/latest\r\nX: y"}',
                rb'{"model":"../../secret"}',
                rb'{"model":"M"}',
                rb'{"model":" m"}',
                rb'{"model":"m\u0000"}',
            ]
        )
    ),
    case(
        "wrong-label",
        post(J, b"Content-Encoding: gzip\r\n"),
        *(400, "invalid_framing", "either"),
    ),
    *(
        case(
            f"coding-{value}",
            post(J, b"Content-Encoding: " + value.encode() + b"\r\n"),
            *(415, "unsupported_media_type", "either"),
        )
        for value in ("compress", "gzip, gzip", "gzip, br", "snappy")
    ),
    *(
        case(
            f"key-{name}", UNKEYED + fields + b"Content-Length: 13\r\n\r\n" + J, 401, code, "either"
        )
        for name, fields in {
            "none": b"",
            "wrong": b"Authorization: Bearer sk-wrong\r\n",
            "basic": b"Authorization: Basic c2stZ29vZC01ZjFjOg==\r\n",
            "bare": f"Authorization: {KEY}\r\n".encode(),
            "twin": f"X_Api_Key: {KEY}\r\n".encode(),
            "two": AUTH + b"x-api-key: sk-wrong\r\n",
            "surrogates": b"Authorization: Bearer \xff\xfe\r\n",
        }.items()
        for code in ("invalid_api_key",)
    ),
]

CASES = [*FRAMING, *HEADS, *BODIES]


@pytest.fixture(scope="module", autouse=True)
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """
    The whole router as a program, once for all cases: two members, keys, one allowed origin.

    At its end nothing is held, no input byte and no key is in its log, and no bad input has
    started a member.
    """
    folder = tmp_path_factory.mktemp("program")
    (folder / "keys.yaml").write_text(KEY_FILE)
    members = [
        member("m", keys={"models": ["allowed"]}),
        member("m2", keys={"models": ["other"]}),
    ]
    keys = {"keys": {"file": str(folder / "keys.yaml")}, "corsOrigins": [ORIGIN]}
    with asyncio.Runner() as runner:
        running = served(folder, pool(*members), **keys)
        router = runner.run(running.__aenter__())
        host, port = router.address
        yield Front(host, port, None)
        runner.run(running.__aexit__(None, None, None))
        # (once for the good requests, if they are among the tests that were asked for)
        assert router.starts("m") <= 1
        assert router.starts("m2") == 0
        log = router.log_path.read_text(encoding="utf-8")
        for secret in (CANARY, KEY, LIMITED_KEY, "SECRET"):
            assert secret not in log


@pytest.fixture(params=["own", "aiohttp", "program"])
async def front(request: pytest.FixtureRequest, program: Front) -> AsyncIterator[Front]:
    """What is under test: the front's parts alone, freshly started, or the whole router."""
    if request.param == "program":
        yield program
        return
    with front_of(request.param):
        async with stub_front() as (running, _, _):
            yield running


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Everything that anybody logs in this process."""
    with caplog.at_level(logging.DEBUG):
        yield caplog


@pytest.mark.parametrize("way", ["alone", "second", "segments"])
@pytest.mark.parametrize("given", CASES, ids=lambda each: each.name)
async def test_bad_input_gets_its_answer(
    given: Case, way: Way, front: Front, logged: pytest.LogCaptureFixture
) -> None:
    """Status, code and connection state are the listed ones, and nothing leaks or stays behind."""
    demands = len(front.stub.demands) if front.stub else 0
    async with RawClient(front.host, front.port) as client:
        if way == "second":
            await client.send(GOOD_GET)
            assert (await client.answer()).status == 200
        await client.send_pieces(pieces(given.raw) if way == "segments" else [given.raw])
        answer = await client.answer()
        state = expected_state(given, answer)
        check_answer(given, answer)
        await check_connection(client, answer, state)

    await check_afterwards(front, demands + (answer.status == 200))
    for secret in (CANARY, KEY, *given.secrets):
        assert secret not in logs(logged)


def pieces(raw: bytes) -> Iterable[bytes]:
    """Return *raw* in one-byte segments; of long input the first and last parts only."""
    yield from (raw[at : at + 1] for at in range(min(len(raw), 1500)))
    for at in range(1500, len(raw), 4096):
        yield raw[at : at + 4096]


def expected_state(given: Case, answer: RawAnswer) -> State:
    states = {status: state for status, _, state in given.answers}
    assert answer.status in states, answer
    return states[answer.status]


def check_answer(given: Case, answer: RawAnswer) -> None:
    assert answer.version == "HTTP/1.1"
    assert answer.header("server") is None
    assert answer.header("x-request-id")
    assert answer.header("request-id") == answer.header("x-request-id")
    if answer.status == 200:
        return
    assert answer.header("content-type") == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    code = next(code for status, code, _ in given.answers if status == answer.status)
    assert code is None or error["code"] == code
    assert error["type"] == "invalid_request_error"
    assert error["param"] == given.param
    assert answer.header("x-should-retry") == "false"
    for secret in (CANARY, KEY, *given.secrets):
        assert secret.encode() not in answer.body
    if answer.status == 405:
        assert answer.header("allow")


async def check_connection(client: RawClient, answer: RawAnswer, state: State) -> None:
    if state == "close" or answer.closing:
        assert state != "keep"
        assert answer.closing
        assert await client.ended() == b""
    else:
        await client.send(GOOD_GET)
        assert (await client.answer()).status == 200


async def check_afterwards(front: Front, demands: int) -> None:
    async with RawClient(front.host, front.port) as client:
        await client.send(post(J))
        answer = await client.answer()
        assert answer.status == 200, answer
    if front.stub is not None:
        assert front.stub.ledger.held_bytes == 0
        assert front.stub.held == 0
        assert len(front.stub.demands) == demands + 1


def logs(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(f"{record.getMessage()} {record.__dict__!r}" for record in caplog.records)


# --- cases that need more than one answer ---------------------------------------------------------


async def test_h2c_offer_is_answered_and_keeps_in_step(front: Front) -> None:
    """Row 24: HTTP/1.1, then the second answer or an announced end, never silence."""
    offer = (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        b"HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
    )
    async with RawClient(front.host, front.port) as client:
        await client.send(get("/v1/models", fields=offer) + GOOD_GET)
        first = await client.answer()

        assert first.status == 200
        if first.closing:
            assert await client.ended() == b""
        else:
            assert (await client.answer()).status == 200


async def test_forbidden_and_unknown_models_look_alike(front: Front) -> None:
    """Row 39: names that a key may not use cannot be told from names that do not exist."""
    messages = []
    async with RawClient(front.host, front.port) as client:
        for name in ("m2", "zz"):
            body = b'{"model":"%s"}' % name.encode()
            await client.send(post(body).replace(KEY.encode(), LIMITED_KEY.encode()))
            answer = await client.answer()
            assert answer.status == 404
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("model_not_found", "model")
            messages.append(answer.body.replace(name.encode() + b"`", b"NAME`"))

    assert messages[0] == messages[1]
    assert b"m, allowed" in messages[0]
    assert b"other" not in messages[0]


async def test_model_names_come_back_escaped(front: Front) -> None:
    """Row 40: control characters of a name are neither in the answer nor in a header."""
    async with RawClient(front.host, front.port) as client:
        await client.send(post(rb'{"model":"a\r\nX: y\u2028`\""}'))
        message = (await client.answer()).json()["error"]["message"]

    assert r"`a\x0d\x0aX: y\u2028\x60\x22`" in message


async def test_deep_nesting_is_refused_and_costs_nobody_the_connection(front: Front) -> None:
    """Row 32: 100,000 brackets. What they cost is counted in the tests of `core.body`."""
    body = b'{"model":"m","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    async with RawClient(front.host, front.port) as client:
        for _ in range(5):
            await client.send(post(body))
            refused = await client.answer()
            assert (refused.status, refused.json()["error"]["code"]) == (400, "invalid_json")
            assert "nested too deeply" in refused.json()["error"]["message"]
            await client.send(GOOD_GET)
            assert (await client.answer()).status == 200


async def test_messages_path_gets_the_other_shape(front: Front) -> None:
    """Anthropic clients read another envelope; status and code are the same."""
    async with RawClient(front.host, front.port) as client:
        await client.send(post(b"{}").replace(b"/v1/chat/completions", b"/v1/messages"))
        answer = await client.answer()

    assert answer.status == 400
    value = answer.json()
    assert value["type"] == "error"
    assert value["error"]["type"] == "invalid_request_error"
    assert value["error"]["code"] == "missing_required_parameter"
    assert value["request_id"] == answer.header("request-id")


async def test_expect_is_answered_when_admissible(front: Front) -> None:
    """100 comes before the body when head and key are right; 401 in its place when not."""
    head = b"Expect: 100-continue\r\nContent-Length: 13\r\n\r\n"
    async with RawClient(front.host, front.port) as client:
        await client.send(P + head)
        assert (await client.answer()).status == 100
        await client.send(J)
        assert (await client.answer()).status == 200
    async with RawClient(front.host, front.port) as client:
        await client.send(UNKEYED + head)
        answer = await client.answer()
        assert (answer.status, answer.closing) == (401, True)


async def test_good_requests_in_odd_clothes_are_served(front: Front) -> None:
    """Strictness does not refuse what is merely unusual."""
    odd = [
        get("/v1/models", "[::1]:8080"),
        get("/v1/models", "modelpool_router:8080"),
        get("http://a/v1/models"),
        get("HTTP://A/v1/models"),
        get("/v1//models"),
        get("/v1/models?x=//y/../z"),
        chunked(J),
        chunked(J).replace(b": chunked", b": Chunked"),
        P + b"transfer-encoding: chunked\r\n\r\n5\r\n" + J[:5] + b"\r\n8;x=y\r\n" + J[5:] + b"\r\n"
        b"0\r\n\r\n",
        post(J).replace(b"/v1/chat", b"/v1//chat"),
        post(J).replace(b"Content-Type: application/json\r\n", b""),
        post(J).replace(b"application/json", b"text/plain;charset=latin-1"),
        post(J, b"Content_Length: 99\r\nTransfer_Encoding: chunked\r\n"),
        post(J, b"Content-Encoding: identity\r\n"),
        post(b' {"stream" : null , "model":"m", "x": "1e999, NaN"}\n'),
        post(J).replace(b"Authorization: Bearer", b"x-api-key:"),
        post(J).replace(b"Bearer", b"bearer"),
    ]
    async with RawClient(front.host, front.port) as client:
        for raw in odd:
            await client.send(raw)
            answer = await client.answer()
            assert (answer.status, answer.closing) == (200, False), raw


# --- CORS -----------------------------------------------------------------------------------------


async def test_preflight_needs_no_key_and_echoes_what_is_asked(front: Front) -> None:
    """Browsers send it without credentials, and SDKs ask for headers of their own."""
    asked = "authorization, content-type, x-stainless-os, x-stainless-lang"
    head = (
        "OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: a\r\n"
        f"Origin: {ORIGIN}\r\nAccess-Control-Request-Method: POST\r\n"
        f"Access-Control-Request-Headers: {asked}\r\n\r\n"
    )
    async with RawClient(front.host, front.port) as client:
        await client.send(head.encode())
        answer = await client.answer()

    assert answer.status == 204
    assert answer.header("access-control-allow-origin") == ORIGIN
    assert answer.header("access-control-allow-headers") == asked
    assert "POST" in (answer.header("access-control-allow-methods") or "")


async def test_errors_carry_cors_headers_too(front: Front) -> None:
    """Without them a page sees only that fetching failed."""
    raw = b"GET /v1/models HTTP/1.1\r\nHost: a\r\nOrigin: %s\r\n\r\n" % ORIGIN.encode()
    async with RawClient(front.host, front.port) as client:
        await client.send(raw)
        answer = await client.answer()

    assert answer.status == 401
    assert answer.header("access-control-allow-origin") == ORIGIN


@pytest.mark.parametrize("origin", ["https://evil.example", ORIGIN + ".evil", "null"])
async def test_other_origins_get_no_cors_headers(front: Front, origin: str) -> None:
    """The allow-list is exact, for preflights as for requests."""
    fields = f"Origin: {origin}\r\nAccess-Control-Request-Method: POST\r\n"
    async with RawClient(front.host, front.port) as client:
        for method in ("OPTIONS", "GET"):
            raw = f"{method} /v1/models HTTP/1.1\r\nHost: a\r\n{fields}\r\n"
            await client.send(raw.encode())
            answer = await client.answer()
            assert answer.status in (401, 405)
            assert answer.header("access-control-allow-origin") is None


@pytest.fixture(params=["own", "aiohttp"])
async def impatient(request: pytest.FixtureRequest) -> AsyncIterator[Front]:
    """The same with time limits of a fraction of a second."""
    limits = IntakeLimits(idle_s=0.2, total_s=0.5)
    options = ServerOptions(silent_s=0.3, head_s=0.2, keep_alive_s=0.3, linger_s=0.3)
    with front_of(request.param):
        async with stub_front(limits=limits, options=options) as (running, _, _):
            yield running


async def test_stalled_head_is_ended(impatient: Front) -> None:
    """Row 27: half a head, then silence."""
    async with RawClient(impatient.host, impatient.port) as client:
        await client.send(P + b"X-A: ")
        answer = await client.answer()
        assert (answer.status, answer.closing) == (408, True)
        assert await client.ended() == b""


async def test_dripping_head_is_ended(impatient: Front) -> None:
    """The time of a head counts from its first byte, not from the last."""
    async with RawClient(impatient.host, impatient.port) as client:
        await client.send(P + b"X-A: ")
        reading = asyncio.get_running_loop().create_task(client.answer())
        while not reading.done():
            await client.send_pieces([b"a"])
            await asyncio.wait([reading], timeout=0.03)
        answer = await reading

    assert (answer.status, answer.closing) == (408, True)


async def test_silent_connection_is_ended(impatient: Front) -> None:
    """Nobody keeps a connection without ever saying a word."""
    async with RawClient(impatient.host, impatient.port) as client:
        assert await client.ended() == b""


async def test_idle_connection_is_ended(impatient: Front) -> None:
    """After an answer the keep-alive time counts."""
    async with RawClient(impatient.host, impatient.port) as client:
        await client.send(GOOD_GET)
        assert (await client.answer()).status == 200
        assert await client.ended() == b""


async def test_stalled_body_is_ended_without_demand(impatient: Front) -> None:
    """Row 28: half a body, then silence; nothing was wanted and nothing stays reserved."""
    async with RawClient(impatient.host, impatient.port) as client:
        await client.send(P + b"Content-Length: 13\r\n\r\n" + b'{"mo')
        answer = await client.answer()
        assert (answer.status, answer.closing) == (408, True)
        assert answer.json()["error"]["code"] == "request_timeout"
    assert impatient.stub is not None
    assert impatient.stub.demands == []
    assert impatient.stub.ledger.held_bytes == 0


async def test_dripping_body_is_ended(impatient: Front) -> None:
    """A byte now and then does not stretch the time of the whole body."""
    async with RawClient(impatient.host, impatient.port) as client:
        await client.send(P + b"Content-Length: 1000\r\n\r\n")
        reading = asyncio.get_running_loop().create_task(client.answer())
        while not reading.done():
            await client.send_pieces([b" "])
            await asyncio.wait([reading], timeout=0.05)
        answer = await reading

    assert (answer.status, answer.closing) == (408, True)
