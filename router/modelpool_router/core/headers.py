"""
Heads of the messages that cross the router: what is let through and how bodies are framed.

Pure: bytes in, bytes out. `web.upstream` finds where a head ends, `web.sink` writes it. Requests
go by an allow-list, since a member must not see what was meant for us; answers by a deny-list,
since clients may rely on whatever an engine tells them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import lru_cache
from urllib.parse import quote

import msgspec

Field = tuple[bytes, bytes]
"""One header line: name as it was spelled, value without surrounding blanks."""

MAX_HEAD_BYTES = 64 * 1024
"""Head of an upstream answer; engines send a few hundred bytes, so more is a fault or an attack."""
MAX_HEAD_FIELDS = 200
MAX_STATUS_LINE = 1024

# What a member gets to see of a client's head. Not on the list, with the reason:
# - authorization, x-api-key, cookie: secrets meant for us;
# - forwarded, x-forwarded-*, via, origin, referer: a member trusts no hop, and with an Origin it
#   would answer CORS questions that are ours;
# - content-encoding: bodies are decoded before they are sent on; expect, upgrade, te: per hop;
# - openai-organization, openai-project: accounts of another service;
# - baggage: carries whatever the application put there, across a trust boundary;
# - x-stainless-*: telemetry of SDKs, of which the patience is read by us.
# - accept-encoding stays: answers pass unchanged, so the client decodes what it asked for itself.
_ALLOWED_ONCE = frozenset(
    (
        b"content-type",
        b"user-agent",
        b"traceparent",
        b"anthropic-version",
    )
)
_ALLOWED = _ALLOWED_ONCE | frozenset(
    (
        b"accept",
        b"accept-encoding",
        b"tracestate",
        b"anthropic-beta",
        b"openai-beta",
    )
)

# What a client does not get to see of an answer: what belongs to the hop, what is ours to say,
# cookies, and what would give orders to a proxy in front of us.
_DROPPED = frozenset(
    (
        b"alt-svc",
        b"connection",
        b"content-length",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"request-id",
        b"server",
        b"set-cookie",
        b"set-cookie2",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"x-request-id",
        b"x-sendfile",
    )
)
_DROPPED_PREFIXES = (b"access-control-", b"x-accel-", b"x-modelpool-")

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
_TEXT = rb"[\t\x20-\x7e\x80-\xff]*+"
_is_token = re.compile(_TOKEN).fullmatch
_is_text = re.compile(_TEXT).fullmatch
_is_target = re.compile(rb"/[\x21\x22\x24-\x7e]*+").fullmatch
_is_digits = re.compile(rb"[0-9]{1,18}").fullmatch
_status_line = re.compile(
    rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: ([\t\x20-\x7e\x80-\xff]*+))?+"
).fullmatch
# Possessive quantifiers: one pass over the bytes, whatever they are.
_field = re.compile(rb"(" + _TOKEN + rb"):[ \t]*+(" + _TEXT + rb")").fullmatch


class ExchangeIds(msgspec.Struct, frozen=True):
    """What both sides of one exchange are told of it besides its content."""

    request_id: str
    extra_fields: tuple[Field, ...] = ()
    """Further header lines of ours for the answer (CORS)."""


class BadHead(ValueError):
    """An upstream answer whose head is malformed, too big, or says two things at once."""


class Framing(Enum):
    """How the end of a body is known."""

    NONE = "none"
    """No body, whatever the head says (HEAD, 204, 304)."""
    LENGTH = "length"
    CHUNKED = "chunked"
    UNTIL_CLOSE = "until_close"


class AnswerHead(msgspec.Struct, frozen=True):
    """Head of an upstream answer, checked."""

    status: int
    reason: bytes
    fields: Sequence[Field]
    """What a client may see, in order, duplicates included; framing and ours left out."""
    lines: bytes
    """The same as a client gets it, status line included."""
    framing: Framing
    length: int | None
    """Content-Length, if it said one (with `Framing.NONE` too: HEAD and 304)."""
    keep_alive: bool
    """Whether the upstream allows another request on this connection."""
    event_stream: bool
    encoded: bool
    """Whether the body carries a Content-Encoding, so that no text can be added to it."""


class Stencil:
    """
    A head with a hole where its Content-Length stands.

    Who speaks again on a connection mostly says the same head but for that number, which then need
    not be read again.
    """

    __slots__ = ("_after", "_after_size", "_before", "_hole", "end", "length")

    def __init__(self, before: bytes, after: bytes) -> None:
        self._before = before
        self._hole = len(before)
        self._after = after
        self._after_size = len(after)
        self.length = 0
        self.end = 0

    @classmethod
    def of(cls, raw: bytes, length: int) -> Stencil | None:
        """Return the one of a head that was found to have this Content-Length."""
        line = b"\r\ncontent-length: %d\r\n" % length
        at = raw.lower().find(line)
        if at < 0:
            return None  # written in an unusual way
        hole = at + len(b"\r\ncontent-length: ")
        return cls(raw[:hole], raw[at + len(line) - 2 :])

    def fits(self, data: bytes) -> bool:
        """Say whether *data* begins with such a head; `length` and `end` tell the rest then."""
        hole = self._hole
        stop = data.find(b"\r", hole, hole + 17)
        # (where there is none, *stop* is -1, and nothing so near the end is as long as a head)
        if not data.startswith(self._before) or not data.startswith(self._after, stop):
            return False
        digits = data[hole:stop]
        if not digits.isdigit():
            return False
        self.length = int(digits)
        self.end = stop + self._after_size
        return True


def request_head(
    method: str,
    target: str,
    *,
    authority: bytes,
    client_fields: Iterable[Field],
    request_id: str,
    body_size: int,
    credential: Field | None = None,
    plain_answer: bool = False,
) -> bytes:
    """
    Build the head of an upstream request, blank line included.

    Args:
        method: Known to be a token.
        target: Path and query, starting with a slash, already percent-encoded.
        authority: Value of Host, from `authority`.
        client_fields: The client's header lines as they came.
        body_size: Bytes that will follow; GET and HEAD without a body get no Content-Length.
        credential: One header line of ours for an upstream that wants a key.
        plain_answer: Ask for an answer without Content-Encoding, whatever the client accepts.

    Raises:
        ValueError: *method*, *target* or *credential* would break out of its line.
    """
    lines = allowed_lines(client_fields, plain_answer=plain_answer)
    if plain_answer:
        lines.append(b"Accept-Encoding: identity\r\n")
    if credential is not None:
        if not _is_token(credential[0]) or not _is_text(credential[1]):
            raise ValueError("the configured upstream credential does not fit into a header line")
        lines.append(b"%b: %b\r\n" % credential)
    size = body_size if body_size or method not in ("GET", "HEAD") else None
    line = request_line(method, target, authority)
    return b"".join((line, *lines, REQUEST_ID, header_text(request_id), head_end(size)))


def allowed_lines(client_fields: Iterable[Field], *, plain_answer: bool = False) -> list[bytes]:
    """Return the lines of a client's head that a member gets to see, ends included."""
    nominated: frozenset[bytes] = frozenset()
    kept: list[tuple[bytes, bytes]] = []
    for name, value in client_fields:
        low = name.lower()
        if low in _ALLOWED:
            short = len(value) <= _MEMO_BYTES
            line = _known_client_line(name, value) if short else _client_line(name, value)
            if line:
                kept.append((low, line))
        elif low == b"connection":
            nominated |= _tokens(value)
    seen: set[bytes] = set()
    lines: list[bytes] = []
    for low, line in kept:
        # Of what may be there once the first counts: the front read that one, and a member must
        # not read another.
        if low in nominated or (low in seen and low in _ALLOWED_ONCE):
            continue
        if plain_answer and low == b"accept-encoding":
            continue
        seen.add(low)
        lines.append(line)
    return lines


REQUEST_ID = b"X-Request-Id: "
"""What comes behind `request_line` and `allowed_lines`; the value is to be fit for a line."""


def head_end(body_size: int | None) -> bytes:
    """Return what a request's head ends with, behind the value of `REQUEST_ID`; no size if None."""
    if body_size is None:
        return b"\r\n\r\n"
    return b"\r\nContent-Length: %d\r\n\r\n" % body_size


@lru_cache(maxsize=256)
def request_line(method: str, target: str, authority: bytes) -> bytes:
    """
    Return a request line and Host.

    Raises:
        ValueError: *method* or *target* would break out of the line.
    """
    raw_method, raw_target = method.encode("ascii"), target.encode("ascii")
    if not _is_token(raw_method) or not _is_target(raw_target):
        raise ValueError("not a request line")
    return b"%b %b HTTP/1.1\r\nHost: %b\r\n" % (raw_method, raw_target, authority)


def _client_line(name: bytes, value: bytes) -> bytes:
    """Return an allowed field as a member gets it; empty if it does not fit into a line."""
    return b"%b: %b\r\n" % (name, value) if _is_text(value) else b""


# Clients and engines say the same lines again and again. Only short ones are remembered, so that
# nobody fills the memory with long ones; what is secret is dropped before it could be.
_MEMO_BYTES = 128
_known_client_line = lru_cache(maxsize=1024)(_client_line)


@lru_cache(maxsize=256)
def authority(host: str, port: int) -> bytes:
    """Value of a Host header: IPv6 addresses in brackets, the port always said."""
    raw = host.encode("idna") if not host.isascii() else host.encode("ascii")
    if b":" in raw:
        raw = b"[%b]" % raw.partition(b"%")[0]
    if not _is_text(raw) or b" " in raw:
        raise ValueError("not a host name")
    return b"%b:%d" % (raw, port)


def parse_answer_head(raw: bytes, *, method: str) -> AnswerHead:
    """
    Read the head of an upstream answer, its blank line included.

    Strict: where a standard lets a proxy repair or refuse, this refuses.

    Raises:
        BadHead: with a sentence for people that contains nothing of the head.
    """
    lines = raw.split(b"\r\n")
    status, minor, reason = _known_status(lines[0])
    if len(lines) > MAX_HEAD_FIELDS + 3:
        raise BadHead("there are too many header lines")
    fields: list[Field] = []
    nominated: frozenset[bytes] = frozenset()
    length: int | None = None
    chunked = event_stream = encoded = False
    for line in lines[1:-2]:  # what follows the last line and the blank one is empty
        field, role, value = _known_line(line) if len(line) <= _MEMO_BYTES else _answer_line(line)
        if role == _PASSED:
            fields.append(field)
        elif role == _LENGTH:
            if length is not None or not _is_digits(value):
                raise BadHead("Content-Length is not one number")
            length = int(value)
        elif role == _TYPE:
            fields.append(field)
            event_stream = value == b"text/event-stream"
        elif role == _CODING:
            fields.append(field)
            encoded = value not in (b"", b"identity")
        elif role == _FRAMING:
            if chunked or value != b"chunked" or minor == b"0":
                raise BadHead("Transfer-Encoding is not plain chunked")
            chunked = True
        elif role == _CONNECTION:
            nominated |= _tokens(value)
    if chunked and length is not None:
        raise BadHead("it has both Content-Length and Transfer-Encoding")
    if nominated:
        fields = [field for field in fields if field[0].lower() not in nominated]
    if status < 200 or status == 204:
        if chunked or length:
            raise BadHead(f"a {status} answer announces a body")
        framing, length = Framing.NONE, None
    elif method == "HEAD" or status == 304:
        framing = Framing.NONE
    elif chunked:
        framing = Framing.CHUNKED
    elif length is not None:
        framing = Framing.LENGTH
    else:
        framing = Framing.UNTIL_CLOSE
    return AnswerHead(
        status=status,
        reason=reason,
        fields=fields,
        lines=_lines(status, reason, fields, event_stream),
        framing=framing,
        length=length,
        keep_alive=(
            minor == b"1" and b"close" not in nominated and framing is not Framing.UNTIL_CLOSE
        ),
        event_stream=event_stream,
        encoded=encoded,
    )


# What a line of an answer's head is for. Plain numbers: looked at for every line of every answer.
_PASSED, _DROPPED_LINE, _LENGTH, _FRAMING, _CONNECTION, _TYPE, _CODING = range(7)

_ROLES = {
    b"content-length": _LENGTH,
    b"transfer-encoding": _FRAMING,
    b"connection": _CONNECTION,
    b"content-type": _TYPE,
    b"content-encoding": _CODING,
}


def _answer_line(line: bytes) -> tuple[Field, int, bytes]:
    """Return a line of an answer's head, its role, and its value as far as the role needs it."""
    found = _field(line)
    if found is None:
        raise BadHead("a header line is malformed")
    name, value = field = found[1], found[2]
    low = name.lower()
    role = _ROLES.get(low, _PASSED)
    if role == _PASSED and (low in _DROPPED or low.startswith(_DROPPED_PREFIXES)):
        role = _DROPPED_LINE
    elif role == _TYPE:
        value = value[:17].lower()
    elif role == _CODING:
        value = value.lower()
    elif role == _LENGTH:
        value = value.rstrip(b" \t")
    elif role == _FRAMING:
        value = value.rstrip(b" \t").lower()
    return field, role, value


_known_line = lru_cache(maxsize=1024)(_answer_line)


@lru_cache(maxsize=256)
def _known_status(line: bytes) -> tuple[int, bytes, bytes]:
    """Return status, minor version and reason of a status line."""
    found = _status_line(line) if len(line) <= MAX_STATUS_LINE else None
    if found is None:
        raise BadHead("the status line is malformed")
    return int(found[2]), found[1], found[3] or b""


@lru_cache(maxsize=1024)
def _written(name: bytes, value: bytes) -> bytes:
    return b"%b: %b\r\n" % (name, value)


def _line(field: Field) -> bytes:
    name, value = field
    if len(name) + len(value) <= _MEMO_BYTES:
        return _written(name, value)
    return b"%b: %b\r\n" % field


def _lines(status: int, reason: bytes, fields: Iterable[Field], event_stream: bool) -> bytes:
    first = b"HTTP/1.1 %d %b\r\n" % (status, reason)
    if not event_stream:
        return first + b"".join(map(_line, fields))
    # nginx and others hold an event stream back unless they are told not to
    kept = [_line(field) for field in fields if field[0].lower() != b"cache-control"]
    return b"".join((first, *kept, b"Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n"))


def answer_head(
    head: AnswerHead,
    framing: Framing,
    *,
    ids: ExchangeIds,
    member: str,
    held_ms: int | None,
    close: bool,
) -> bytes:
    """
    Build the head that a client gets for *head*, blank line included.

    Args:
        framing: How the client learns the end of the body; `LENGTH` and `NONE` repeat the
            upstream's length.
        held_ms: Left out when None.
        close: Say that this answer is the last one on the connection.
    """
    request_id = header_text(ids.request_id)
    parts = [
        b"%bx-request-id: %b\r\nrequest-id: %b\r\nx-modelpool-member: %b\r\n"
        % (head.lines, request_id, request_id, header_text(member))
    ]
    if held_ms is not None:
        parts.append(b"x-modelpool-held-ms: %d\r\n" % held_ms)
    for name, value in ids.extra_fields:
        if not _is_token(name) or not _is_text(value):
            raise ValueError("not a header line")
        parts.append(b"%b: %b\r\n" % (name, value))
    if framing is Framing.CHUNKED:
        parts.append(b"Transfer-Encoding: chunked\r\n")
    elif head.length is not None:
        parts.append(b"Content-Length: %d\r\n" % head.length)
    parts.append(b"Connection: close\r\n\r\n" if close else b"\r\n")
    return b"".join(parts)


def whole_answer_frame(head: AnswerHead, *, member: bytes) -> tuple[bytes, bytes, bytes]:
    """
    Return what `answer_head` does for an answer with a length to a request that was not held.

    In three pieces, between which the request id belongs, for connections that stay.

    Args:
        member: Fit for a line, see `header_text`.
    """
    assert head.length is not None
    return (
        head.lines + b"x-request-id: ",
        b"\r\nrequest-id: ",
        b"\r\nx-modelpool-member: %b\r\nx-modelpool-held-ms: 0\r\nContent-Length: %d\r\n\r\n"
        % (member, head.length),
    )


def stream_head(framing: Framing, *, ids: ExchangeIds, member: str, close: bool) -> bytes:
    """Build the head of an event stream that the router begins itself (`holdKeepalive`)."""
    fields = ((b"Content-Type", b"text/event-stream; charset=utf-8"),)
    head = AnswerHead(
        status=200,
        reason=b"OK",
        fields=fields,
        lines=_lines(200, b"OK", fields, True),
        framing=framing,
        length=None,
        keep_alive=False,
        event_stream=True,
        encoded=False,
    )
    return answer_head(head, framing, ids=ids, member=member, held_ms=None, close=close)


@lru_cache(maxsize=1024)
def header_text(value: str) -> bytes:
    """Write *value* so that it cannot leave its header line: all but printable ASCII quoted."""
    if value.isascii() and value.isprintable() and value == value.strip():
        return value.encode("ascii")
    return quote(value, safe=" !#$&'()*+,/:;=?@[]~", errors="replace").strip().encode("ascii")


def _tokens(value: bytes) -> frozenset[bytes]:
    return frozenset(token.strip(b" \t").lower() for token in value.split(b","))
