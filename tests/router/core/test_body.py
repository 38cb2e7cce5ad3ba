"""Bodies are read as every parser would, or refused; checked against a slow reference."""

from __future__ import annotations

import json
import math
import mmap
import tempfile
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from modelpool_router.core import jsontext
from modelpool_router.core.body import (
    BadBody,
    BodyFacts,
    encode_name,
    inspect_json,
    inspect_multipart,
    model_span,
)
from modelpool_router.core.jsontext import MAX_TOP_LEVEL_KEYS

FIXED = settings(max_examples=300, derandomize=True, deadline=None, database=None)


class Pairs(list[tuple[str, Any]]):
    """An object with all its pairs, in order."""


def reference(data: bytes) -> BodyFacts | str:
    """Decide with the standard library, slowly: facts, or code and param."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=Pairs, parse_constant=refuse)
    except (ValueError, RecursionError):
        return "invalid_json None"
    if any_odd(value):
        return "invalid_json None"
    if not isinstance(value, Pairs):
        return "invalid_type None"
    names = [name for name, _ in value]
    for at, name in enumerate(names):
        if name in names[:at]:
            return f"duplicate_key {name}"
    found = dict(value)
    model = found.get("model", "")
    if "model" in found and not isinstance(model, str):
        return "invalid_type model"
    if not model:
        return "missing_required_parameter model"
    stream = found.get("stream")
    if stream is not None and not isinstance(stream, bool):
        return "invalid_type stream"
    return BodyFacts(model=model, stream=bool(stream))


def refuse(word: str) -> Any:
    raise ValueError(word)


def any_odd(value: Any) -> bool:
    """Tell whether a string has a lone surrogate, or a number does not fit a double."""
    match value:
        case Pairs():
            return any(any_odd(name) or any_odd(each) for name, each in value)
        case list():
            return any(map(any_odd, value))
        case str():
            return any("\ud800" <= each <= "\udfff" for each in value)
        case bool():
            return False
        case float():
            return math.isinf(value)
        case int():
            return abs(value) > 1.7976931348623157e308
        case _:
            return False


def verdict(data: bytes) -> BodyFacts | str:
    try:
        return inspect_json(data)
    except BadBody as error:
        return f"{error.code} {error.param}"


texts = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["model", "stream", "a", "1e999", " 1e999 ,", '"', "\\", "[1e999]", "{", "}"]),
)
numbers = st.sampled_from(
    "0 -0 1 1.5 1e5 1E+5 1e-999 1e308 1e309 -1e309 1e0309 9e307 123456789012e299 1e+999".split()
    + ["9" * 200 + "e99", "9" * 250 + "e99", "1" * 309, "0." + "0" * 300 + "1e300", "1" * 308]
)
scalars = st.one_of(
    texts.map(json.dumps),
    texts.map(lambda each: json.dumps(each, ensure_ascii=False)),
    numbers,
    st.sampled_from(["true", "false", "null"]),
)
blanks = st.sampled_from(["", "", " ", "\n", "\t\r\n "])
KEYS = ["model", "stream", "messages", "a", "b", "mod\\u0065l", "\\u006dodel", "", "é", "\\u00e9"]
keys = st.sampled_from(KEYS).map(lambda each: f'"{each}"')


@st.composite
def objects(draw: st.DrawFn, values: st.SearchStrategy[str]) -> str:
    pairs = [
        f"{draw(blanks)}{draw(keys)}{draw(blanks)}:{draw(blanks)}{draw(values)}{draw(blanks)}"
        for _ in range(draw(st.integers(0, 5)))
    ]
    return "{" + ",".join(pairs) + "}"


values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(lambda each: "[" + ", ".join(each) + "]"), objects(inner)
    ),
    max_leaves=8,
)
documents = st.tuples(blanks, objects(values), blanks).map("".join)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A document with a few bytes changed, cut or put in."""
    data = bytearray(draw(documents).encode("utf-8", "surrogatepass"))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(data)))
        put = draw(st.sampled_from([b"", b'"', b",", b"}", b"\xff", b"\\", b"e9", b"1e999", b"\0"]))
        data[at : at + draw(st.integers(0, 2))] = put
    return bytes(data)


@FIXED
@given(damaged())
@example(b'{"a":1,"b":2,"a":"1234567","model":"m"}')
@example(b'{"model":"m","model":"m"}')
@example(b'{"stream":true,"model":"m","\\u0073tream":true}')
@example(b'{"model":"m","a":1,"a":2')
@example(b'{"model":"m","x":" 1e999 "}')
@example(b'{"model":"m","x":[1e999]}')
@example(b'{"model":"m","x":[1,1e999,"' + b"1e100 " * 3000 + b'"]}')
@example(b'{"model":"m","x":["' + b" 1e100 " * 3000 + b'",1e308]}')
@example(b"[]")
@example(b"1e999")
@example(b"")
def test_agrees_with_a_slow_reference(data: bytes) -> None:
    """Same facts, same code, same parameter, for whole and damaged documents."""
    expected = reference(data)

    assert verdict(data) == expected
    assert verdict_of_map(data) == expected


def verdict_of_map(data: bytes) -> BodyFacts | str:
    """The same through a mapped file, as spooled bodies come."""
    if not data:
        return verdict(data)
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            try:
                return inspect_json(text)
            except BadBody as error:
                return f"{error.code} {error.param}"


@pytest.mark.parametrize("size", [256 * 1024, 512 * 1024])
@pytest.mark.parametrize(
    ("inner", "code"),
    [
        ('é"'.encode(), None),
        (b'\xc3"', "invalid_json"),
        (b'",1e999', "invalid_json"),
        (b' 1e999 ,"', None),
        (b'",1e+100', None),
        (b'",' + b"9" * 309, "invalid_json"),
        (b'",' + b"1" * 300, None),
    ],
)
def test_pieces_do_not_hide_what_lies_across_them(
    size: int, inner: bytes, code: str | None
) -> None:
    """Long bodies are looked at in pieces; a character or number may straddle two."""
    front = b'{"model":"m","x":["'
    expected = BodyFacts("m", False) if code is None else f"{code} None"
    for shift in (0, 1, 2, 3, 4, 5, 6, 7, 8, 100, 157, 199, 200, 256, 257, 300, 400):
        data = front + b"a" * (size - len(front) - shift) + inner + b"]}"

        assert verdict(data) == expected


@FIXED
@given(documents, st.text(max_size=12))
def test_only_the_model_is_replaced(document: str, served: str) -> None:
    """A rewritten body differs from the original in the value of `model` and in no other byte."""
    data = document.encode()
    if not isinstance(verdict(data), BodyFacts):
        return
    begin, end = model_span(data)

    changed = data[:begin] + encode_name(served) + data[end:]

    tail = len(data) - end
    assert changed[:begin] == data[:begin]
    assert changed[len(changed) - tail :] == data[end:]
    assert json.loads(changed)["model"] == served
    assert {**json.loads(changed), "model": 0} == {**json.loads(data), "model": 0}


def test_a_body_without_model_is_fine_where_none_is_needed() -> None:
    """Engines' own paths carry none; a wrong one is still refused."""
    assert inspect_json(b'{"prompt":"x"}', model_required=False) == BodyFacts(None, False)
    with pytest.raises(BadBody, match="string"):
        inspect_json(b'{"model":1}', model_required=False)


def test_a_flood_of_keys_is_refused_early() -> None:
    """A body of nothing but keys costs no memory; as many as any real one has are fine."""
    flood = b'{"model":"m"' + b"".join(b',"k%d":0' % n for n in range(400_000)) + b"}"
    many = b'{"model":"m"' + b"".join(b',"k%d":0' % n for n in range(MAX_TOP_LEVEL_KEYS - 1)) + b"}"
    tracemalloc.start()
    try:
        assert verdict(flood) == "invalid_json None"
        assert tracemalloc.get_traced_memory()[1] < 3_000_000
    finally:
        tracemalloc.stop()

    assert verdict(many) == BodyFacts("m", False)


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
@pytest.mark.parametrize("closed", [True, False])
def test_depth_bombs_are_refused_quickly(opening: bytes, closing: bytes, closed: bool) -> None:
    """Sixteen times the levels cost some sixteen times the processor, and not its square."""

    def cost(levels: int) -> float:
        rest = b"0" + closing * levels + b"}" if closed else b""
        data = b'{"model":"m","x":' + opening * levels + rest
        spent = []
        for _ in range(7):
            begun = time.thread_time()
            assert verdict(data) == "invalid_json None"
            spent.append(time.thread_time() - begun)
        return min(spent)

    cost(50_000)  # what is made once is made here
    assert cost(800_000) < 16 * 5 * cost(50_000)


# --- multipart ------------------------------------------------------------------------------------

KIND = "multipart/form-data; boundary=xyz"


def form(*parts: bytes, end: bytes = b"--xyz--\r\n") -> bytes:
    return b"".join(b"--xyz\r\n" + part + b"\r\n" for part in parts) + end


def field(name: str, value: bytes, more: str = "") -> bytes:
    return f'Content-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value


AUDIO = field("file", b"RIFF\x00\xff--xy\r\n--xy\r\n" * 9, '; filename="a.wav"')


def test_model_of_a_form_is_read() -> None:
    """Before or behind the file, whatever the file contains."""
    expected = BodyFacts("whisper", True)

    model, stream = field("model", b"whisper"), field("stream", b"true")
    quoted = 'Multipart/Form-Data; charset=utf-8; boundary="xyz"'

    assert inspect_multipart(KIND, form(AUDIO, model, stream)) == expected
    assert inspect_multipart(KIND, form(stream, model, AUDIO)) == expected
    assert inspect_multipart(quoted, memoryview(form(model))).model == "whisper"
    assert inspect_multipart(KIND, form(AUDIO), model_required=False).model is None


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (form(AUDIO), "missing_required_parameter", "model"),
        (form(field("model", b"")), "missing_required_parameter", "model"),
        (form(field("model", b"a"), field("model", b"b")), "duplicate_key", "model"),
        (form(field("model", b"a", '; filename="m"')), "invalid_type", "model"),
        (form(field("model", b"\xff")), "invalid_type", "model"),
        (form(field("model", b"a" * 2000)), "invalid_type", "model"),
        (form(field("model", b"a"), field("stream", b"yes")), "invalid_type", "stream"),
        (form(field("model", b"a"), end=b""), "invalid_framing", None),
        (form(field("model", b"a"), end=b"--xyz--\r\nmore"), "invalid_framing", None),
        (b"preamble\r\n" + form(field("model", b"a")), "invalid_framing", None),
        (form(b"\r\nno name"), "invalid_framing", None),
        (form(field("mo\\del", b"a")), "invalid_framing", None),
        (form(field("mod%65l", b"a")), "invalid_framing", None),
        (form(field("model", b"a", '; name="x"')), "invalid_framing", None),
        (form(field("x", b"a", "; name*=utf-8''model")), "invalid_framing", None),
        (form(b"X: a\r\n " + field("model", b"a")), "invalid_framing", None),
        (form(field("x", b"a").replace(b"\r\n\r\n", b"\r\n")), "invalid_framing", None),
        (form(*[field("x", b"a")] * 300), "invalid_framing", None),
        (form(b"X: " + b"a" * 9000 + b"\r\n" + field("model", b"a")), "invalid_framing", None),
        (b"", "invalid_framing", None),
    ],
)
def test_doubtful_forms_are_refused(body: bytes, code: str, param: str | None) -> None:
    """What two parsers could read differently is no form."""
    with pytest.raises(BadBody) as raised:
        inspect_multipart(KIND, body)

    assert (raised.value.code, raised.value.param) == (code, param)


@pytest.mark.parametrize(
    "kind",
    [
        "multipart/form-data",
        "multipart/form-data; boundary=",
        'multipart/form-data; boundary="a b "',
        "multipart/form-data; boundary=xyz; boundary=abc",
        "multipart/form-data; boundary=" + "x" * 71,
        "multipart/mixed; boundary=xyz",
    ],
)
def test_forms_without_a_usable_boundary_are_refused(kind: str) -> None:
    """The boundary is the frame."""
    with pytest.raises(BadBody, match="boundar"):
        inspect_multipart(kind, form(field("model", b"a")))


_pairs = st.lists(
    st.tuples(
        st.sampled_from(['"model"', '"stream"', '"a"', '"b"', '"\\u0061"', '"é"', '""', '"a b"']),
        st.sampled_from(
            ['"m"', "true", "null", "1", "[1, 2]", '{"model":"x"}', '"\\u0062"', "1e9"]
        ),
    ),
    max_size=5,
)


@settings(derandomize=True, deadline=None, max_examples=400)
@given(
    _pairs,
    st.sampled_from([(",", ":"), (", ", ": "), (",", " :"), (" ,", ":")]),
    st.sampled_from(["", " ", "\n"]),
)
def test_a_plain_object_is_what_the_long_way_finds(
    pairs: list[tuple[str, str]], separators: tuple[str, str], around: str
) -> None:
    comma, colon = separators
    inner = comma.join(f"{name}{colon}{value}" for name, value in pairs)
    text = f"{around}{{{inner}}}{around}".encode()

    plain = jsontext.plain_object(text)

    if plain is not None:
        found = jsontext.top_level(text)
        for name, raw in (("model", found.model), ("stream", found.stream)):
            assert (raw is not None) == (name in plain)
            assert raw is None or json.loads(bytes(raw)) == plain[name]
        names = [json.loads(name) for name, _ in pairs]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","stream":true,"messages":[]}',
        b'{"model":"\xc3\xa9"}',
        b'{"model":"m","input":[%b]}' % b",".join(b"%d" % n for n in range(100_000, 100_100)),
        b'{"model":"m","seed":18446744073709551615,"temperature":1e-7}',
        b'{"model": "m", "messages": [{"role": "user", "content": "a"}], "stream": true}',
        b'{"model": "m"}',
    ],
)
def test_an_ordinary_body_is_a_plain_object(body: bytes) -> None:
    assert jsontext.plain_object(body) == json.loads(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":10,"a":2,"b":3,"h":4,"i":5}',
        b'{"a": 1,"model":"m","a":2}',
        b'{"model":"m" ,"stream" :true }',
        b'{"mod\\u0065l": "m"}',
        b'{"m": 1, "\xc3\xa9": 2}',
    ],
)
def test_what_could_be_read_in_two_ways_is_no_plain_object(body: bytes) -> None:
    """A second value of a name may be just as long as the blanks that others write."""
    assert jsontext.plain_object(body) is None


@pytest.mark.parametrize("before", range(0, 200, 7))
@pytest.mark.parametrize("number", [b"9" * 309, b"-" + b"9" * 400, b"1e309", b"1" * 310 + b".5"])
def test_no_plain_object_has_a_number_out_of_range(before: int, number: bytes) -> None:
    """Wherever in the text it stands."""
    body = b'{"model":"m","pad":"%b","n":[%b]}' % (b"x" * before, number)

    assert jsontext.plain_object(body) is None
    with pytest.raises(BadBody, match="out of range"):
        inspect_json(body)


_tokens = st.lists(
    st.sampled_from(
        ['"', "\\", "\\\\", '\\"', "1e999", "1E+400", "9" * 210, "1.5", ",", "[", "x", " "]
    ),
    max_size=30,
)


@settings(derandomize=True, deadline=None, max_examples=400)
@given(_tokens, _tokens)
@example(["\\" * 3000, '"', "1e999"], [])
@example(["\\" * 1024], ["1e999"])
def test_numbers_are_told_from_strings_like_in_any_other_way(
    inside: list[str], outside: list[str]
) -> None:
    """A number out of range is refused where it is one, and passes inside of a string."""
    text = f'{{"model":"m","a":{json.dumps("".join(inside))},"b":["{"".join(inside)}",1]}}'
    for raw in (text, text + "".join(outside), f'["{"".join(outside)}",{"".join(inside)}]'):
        data = raw.encode()
        with tempfile.TemporaryFile() as file:
            file.write(data)
            file.flush()
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                assert decided(data) == decided(mapped), "whole bytes and a mapped file"


def decided(data: Any) -> BodyFacts | str:
    """Return what `inspect_json` finds, or the code of its refusal."""
    try:
        return inspect_json(data)
    except BadBody as error:
        return error.code
