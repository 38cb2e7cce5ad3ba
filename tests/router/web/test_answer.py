"""The reader of upstream answers, without sockets: any split of the bytes, any fault."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from modelpool_router.core.headers import BadHead
from modelpool_router.web.answer import MAX_INTERIM_ANSWERS, AnswerReader
from rawupstream import LAST_CHUNK, chunk

steady = settings(derandomize=True, deadline=None)
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def read(parts: list[bytes], method: str = "POST") -> tuple[AnswerReader, bytes, bytes]:
    """Feed *parts*; return the reader, the body, and the body re-framed as `ClientSink` would."""
    reader = AnswerReader(method)
    body, out = b"", b""
    for part in parts:
        assert not reader.ended, "fed after its end"
        if reader.feed(part):
            body += b"".join(reader.pieces)
            out += reframed(reader)
    return reader, body, out


def read_past(parts: list[bytes]) -> tuple[AnswerReader, bytes, bytes]:
    """As `read`, but do not feed what need not be fed."""
    reader = AnswerReader("POST")
    body, out = b"", b""
    for part in parts:
        if reader.is_plain(part):
            assert not reader.ended
            _, piece, again = read([CHUNKED, part])
            body, out = body + piece, out + again
            assert again == part
        elif reader.feed(part):
            body += b"".join(reader.pieces)
            out += reframed(reader)
    return reader, body, out


def reframed(reader: AnswerReader) -> bytes:
    """Return what the last `feed` brought as `ClientSink` would write it."""
    if reader.framed is not None:
        return reader.framed
    piece = b"".join(reader.pieces)
    return (chunk(piece) if piece else b"") + (LAST_CHUNK if reader.ended else b"")


def split(raw: bytes, cuts: list[int]) -> list[bytes]:
    """Cut *raw* at the given places."""
    edges = [0, *sorted({cut % (len(raw) + 1) for cut in cuts}), len(raw)]
    return [raw[a:b] for a, b in zip(edges, edges[1:], strict=False) if a < b]


cuts = st.lists(st.integers(0, 10_000), max_size=12)
bodies = st.lists(st.binary(min_size=1, max_size=300), max_size=6)


def test_given_events_of_known_lengths_then_they_need_not_be_fed() -> None:
    event = chunk(b"data: {}\n\n")
    reader = AnswerReader("POST")
    assert not reader.is_plain(event), "no head yet"
    reader.feed(CHUNKED)
    reader.feed(event)

    assert reader.is_plain(event)
    assert reader.is_plain(event * 3)
    for odd in (event[:-1], event[1:], event + event[:5], LAST_CHUNK, event + LAST_CHUNK, b"a"):
        assert not reader.is_plain(odd)
    reader.feed(chunk(event)[:4])
    assert not reader.is_plain(event), "inside of a chunk whose content looks like one"


@steady
@given(bodies, cuts, st.sampled_from([b"", b";ext=1"]), st.sampled_from([b"", b"X-T: 1\r\n"]))
@example([b"0\r\n\r\n"], [], b"", b"")
@example([b"a\r\n\r\n"], list(range(120)), b"", b"")
@example([b"\r\n0\r\n\r\n" * 3], list(range(0, 200, 2)), b"", b"T: 1\r\n")
def test_given_a_chunked_answer_cut_anywhere_then_body_and_end_are_found(
    chunks: list[bytes], places: list[int], extension: bytes, trailer: bytes
) -> None:
    raw = b"".join(b"%x%b\r\n%b\r\n" % (len(c), extension, c) for c in chunks)
    raw = CHUNKED + raw + b"0\r\n" + trailer + b"\r\n"

    reader, body, out = read(split(raw, places))

    assert reader.ended
    assert body == b"".join(chunks)
    again, body_again, _ = read([CHUNKED + out])
    assert again.ended and body_again == body, "what goes to the client is a valid chunked body"
    assert b"X-T" not in out or not trailer
    # (twice: the second time the lengths of all chunks are known)
    for _ in range(2):
        past, body_past, out_past = read_past(split(raw, places))
        assert (past.ended, body_past, out_past) == (True, body, out)


@steady
@given(bodies, cuts, st.binary(min_size=1, max_size=30))
@example([b"x"], [], b"\r\n")
@example([b"x"], [], b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
@example([], [], LAST_CHUNK)
def test_given_bytes_after_the_end_in_the_same_read_then_the_answer_is_refused(
    chunks: list[bytes], places: list[int], extra: bytes
) -> None:
    raw = CHUNKED + b"".join(map(chunk, chunks)) + LAST_CHUNK
    parts = split(raw, places)
    parts[-1] += extra

    with pytest.raises(BadHead):
        read(parts)


@steady
@given(bodies, cuts, st.integers(1, 10_000))
def test_given_a_chunked_answer_cut_short_then_it_never_counts_as_complete(
    chunks: list[bytes], places: list[int], missing: int
) -> None:
    raw = CHUNKED + b"".join(map(chunk, chunks)) + LAST_CHUNK
    raw = raw[: max(1, len(raw) - missing)]

    reader, body, _ = read(split(raw, places))

    assert not reader.ended and not reader.feed_eof()
    assert b"".join(chunks).startswith(body)


@steady
@given(st.binary(max_size=300), cuts)
def test_given_an_answer_with_a_length_cut_anywhere_then_it_ends_at_its_length(
    content: bytes, places: list[int]
) -> None:
    raw = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content)

    reader, body, _ = read(split(raw, places))

    assert reader.ended and body == content


@steady
@given(st.binary(max_size=300), cuts)
def test_given_an_answer_without_framing_then_it_ends_with_the_connection(
    content: bytes, places: list[int]
) -> None:
    reader, body, _ = read(split(b"HTTP/1.1 200 OK\r\n\r\n" + content, places))

    assert not reader.ended and body == content
    assert reader.feed_eof() and reader.ended


@steady
@given(st.binary(max_size=400), cuts)
def test_given_noise_then_it_is_refused_or_unfinished_and_nothing_else_happens(
    noise: bytes, places: list[int]
) -> None:
    for start in (b"", b"HTTP/1.1 200 OK\r\n", CHUNKED, CHUNKED + b"5\r\n"):
        try:
            read(split(start + noise, places) or [b""])
        except (BadHead, AssertionError) as exc:
            assert isinstance(exc, BadHead) or "fed after its end" in str(exc)


@pytest.mark.parametrize(
    "body",
    [
        b"5 \r\nhello\r\n0\r\n\r\n",
        b"5\nhello\n0\n\n",
        b"5\r\nhello\n0\r\n\r\n",
        b"5\r\nhelloo\r\n0\r\n\r\n",
        b"-5\r\nhello\r\n0\r\n\r\n",
        b"+5\r\nhello\r\n0\r\n\r\n",
        b"0x5\r\nhello\r\n0\r\n\r\n",
        b"fffffffffffffffffff\r\nhello",
        b"\r\nhello\r\n0\r\n\r\n",
        b"g\r\n",
        b"0\r\nbad trailer\r\n\r\n",
    ],
)
def test_given_malformed_chunks_then_the_answer_is_refused(body: bytes) -> None:
    with pytest.raises(BadHead):
        read([CHUNKED + body])
    with pytest.raises(BadHead):
        read([CHUNKED, *(bytes([b]) for b in body)])


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * (MAX_INTERIM_ANSWERS + 1),
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nab",
        b"HTTP/1.1 204 No Content\r\n\r\nx",
        b"\r\n\r\nHTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: " + b"b" * 65536 + b"\r\n\r\n",
        b"H" * 70_000,
    ],
)
def test_given_an_odd_answer_then_it_is_refused(raw: bytes) -> None:
    with pytest.raises(BadHead):
        read([raw])


def test_given_as_many_interim_answers_as_allowed_then_the_real_one_is_found() -> None:
    raw = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * MAX_INTERIM_ANSWERS
    raw += b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

    for parts in ([raw], [bytes([b]) for b in raw]):
        reader, body, _ = read(parts)

        assert reader.head is not None and reader.head.status == 200
        assert reader.ended and body == b"ok"


@steady
@given(st.integers(0, 3), cuts)
@example(3, [100])
def test_given_interim_answers_cut_anywhere_then_the_real_one_is_found(
    count: int, places: list[int]
) -> None:
    interim = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    raw = interim * count + b"HTTP/1.1 204 No Content\r\n\r\n"

    reader, _, _ = read(split(raw, places))

    assert reader.ended and reader.head is not None and reader.head.status == 204


def test_given_head_then_the_length_is_of_no_body() -> None:
    reader, body, _ = read([b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"], method="HEAD")

    assert reader.ended and body == b""


def test_given_an_offer_to_upgrade_then_it_is_an_answer_like_any_other() -> None:
    head = CHUNKED[:-2] + b"Connection: upgrade\r\nUpgrade: h2c\r\n\r\n"

    reader, body, _ = read([head + chunk(b"a") + LAST_CHUNK])

    assert reader.ended and body == b"a"
