"""
Is this text JSON that every parser reads alike? One C pass, a few more over small pieces.

Here: the text as a whole: UTF-8, grammar, numbers that a double can hold, names of the top level.
What the names mean is for `body`. Nothing here builds the values: a text of 64 MiB of ``[],``
would otherwise cost gigabytes.

msgspec, asked for raw values, checks the grammar completely (lone surrogates, control characters,
``NaN``, ``01`` included) but neither the UTF-8 inside strings nor the range of numbers; both are
added below.
"""

from __future__ import annotations

import codecs
import enum
import math
import mmap
import os
import re
import threading

import msgspec

Text = bytes | memoryview | mmap.mmap
"""Contiguous bytes of one document. A mapped file must not be closed while it is inspected."""

MAX_TOP_LEVEL_KEYS = 1024
"""Real bodies have some thirty; each costs a Python call, so a flood of them is refused early."""

_COPIED = 8 * 1024 * 1024  # for the moment of the inspection
_SHORT = 16 * 1024  # so that the values of one text are few
_PIECE = 64 * 1024  # fits a second-level cache, and below what glibc maps anew each time
_SPACE = rb"[ \t\r\n]*"


class NotJson(ValueError):
    """Not JSON text in the strict sense, with a sentence that quotes nothing of it."""


class DuplicateKey(ValueError):
    """An object with the same name twice at its top level (escapes undone)."""

    def __init__(self, key: str) -> None:
        super().__init__("the same key appears twice at the top level")
        self.key = key


class NotAnObject(ValueError):
    """Valid JSON, but a list or a scalar."""


class Wanted(msgspec.Struct, frozen=True):
    """Raw values of the two top-level names that matter here; None where absent."""

    model: msgspec.Raw | None
    stream: msgspec.Raw | None


class _Seen(threading.local):
    """Names met so far by the document under inspection; `_Key` has no other way to report."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.duplicate: str | None = None
        self.flooded = False

    def restart(self) -> None:
        self.names.clear()
        self.duplicate = None
        self.flooded = False


_seen = _Seen()


class _Key(enum.Enum):
    """
    Every top-level name, as msgspec asks for it, escapes undone.

    A plain ``dict[str, Raw]`` silently keeps the last of two equal names. An enumeration's
    ``_missing_`` is called for *each* name that is no value of it, in the order of the text, so it
    can see duplicates and stop a flood before it is stored. An enumeration must have one value:
    it is a number that nobody can guess, as that very name would not be asked for.
    """

    OTHER = os.urandom(16).hex()

    # That of an enumeration is a Python function, called for every name of every body.
    __hash__ = object.__hash__

    @classmethod
    def _missing_(cls, value: object) -> _Key:
        name = str(value)
        names = _seen.names
        if name in names:
            _seen.duplicate = name
            raise ValueError
        if len(names) >= MAX_TOP_LEVEL_KEYS:
            _seen.flooded = True
            raise ValueError
        names.add(name)
        return _OURS.get(name, _OTHER)


def _nameless(name: str) -> _Key:
    """Return a key that is no value of the enumeration, so that no name leads to it directly."""
    key = object.__new__(_Key)
    key._name_ = key._value_ = name
    return key


_OTHER = _Key.OTHER
_MODEL = _nameless("model")
_STREAM = _nameless("stream")
_OURS = {"model": _MODEL, "stream": _STREAM}
_names = msgspec.json.Decoder(dict[_Key, msgspec.Raw])
_any = msgspec.json.Decoder(msgspec.Raw)
_ordered = msgspec.json.Decoder(dict[str, msgspec.Raw])
_values = msgspec.json.Decoder()
_encoder = msgspec.json.Encoder()


def top_level(text: Text) -> Wanted:
    """
    Check the whole document and return the raw values of ``model`` and ``stream``.

    Raises:
        NotJson: first in order, whatever else is wrong.
        DuplicateKey: any name twice at the top level.
        NotAnObject: valid, but no object.
    """
    if not isinstance(text, bytes) and len(text) <= _COPIED:
        text = bytes(text)  # searched much faster than what is mapped
    _check_pieces(text)
    _seen.restart()
    try:
        found = _names.decode(text)
    except RecursionError:
        raise NotJson("it is nested too deeply") from None
    except msgspec.DecodeError as error:
        duplicate, flooded = _seen.duplicate, _seen.flooded
        if not isinstance(error, msgspec.ValidationError):
            raise NotJson("it does not follow the JSON grammar") from None
        # The grammar of the rest has not been looked at yet, and comes first.
        _check_grammar(text)
        if duplicate is not None:
            raise DuplicateKey(duplicate) from None
        if flooded:
            raise NotJson("it has too many top-level keys") from None
        raise NotAnObject("the body must be a JSON object") from None
    finally:
        _seen.restart()
    return Wanted(model=found.get(_MODEL), stream=found.get(_STREAM))


def plain_object(text: bytes) -> dict[str, object] | None:
    """
    Return the decoded object if *text* is a short one that `top_level` accepts; None if in doubt.

    Decoding a short text costs less than looking at it in any other way, and msgspec then checks
    UTF-8 and the range of numbers too; all but integers of hundreds of digits.

    A text that is what its values are encoded to has each name once. Otherwise lengths tell: that
    of an object without blanks around its values is that of its names and values, and a byte or
    two for each. Any blank, any escape in a name and any second value of a name makes the text
    longer than what the dictionary accounts for; so if it is just as long, there is none. With one
    blank after each colon and comma, as many clients write it, a second value could be as long as
    the blanks; there the text must be what names and values are put together to.
    """
    size = len(text)
    if size > _SHORT or (
        text[::_STRIDE].translate(_CLASSES).find(b"00") >= 0
        and text.translate(_CLASSES).find(_SOME_DIGITS) >= 0
    ):
        return None
    try:
        values: dict[str, object] = _values.decode(text)
        if type(values) is not dict or len(values) > MAX_TOP_LEVEL_KEYS:
            return None
        if _encoder.encode(values) == text:
            return values
        raw = _ordered.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None  # the long way says what is wrong
    # {, and for each two quotes, a colon, and a comma or }
    accounted = 1 + 4 * len(raw) + len("".join(raw)) + len(b"".join(raw.values()))
    if accounted == size:
        return values
    if accounted + 2 * len(raw) - 1 != size:
        return None
    pairs = [b'"%b": %b' % (name.encode(), value) for name, value in raw.items()]
    return values if text == b"{%b}" % b", ".join(pairs) else None


def value_span(text: Text, name: str) -> tuple[int, int]:
    """
    Return where the raw value of a top-level *name* begins and ends, in bytes.

    Only for a document that passed `top_level`: without duplicates the values come in the order
    of the text, so that their lengths lead from one to the next.

    Raises:
        KeyError: there is no such name.
    """
    at = 0
    for key, raw in _ordered.decode(text).items():
        gap = _BEFORE_VALUE.match(text, at)
        assert gap is not None
        end = gap.end() + len(memoryview(raw))
        if key == name:
            return gap.end(), end
        at = end
    raise KeyError(name)


_BEFORE_VALUE = re.compile(
    _SPACE + rb"[{,]" + _SPACE + rb'"(?:[^"\\]++|\\.)*+"' + _SPACE + rb":" + _SPACE, re.DOTALL
)


def _check_grammar(text: Text) -> None:
    try:
        _any.decode(text)
    except RecursionError:
        raise NotJson("it is nested too deeply") from None
    except msgspec.DecodeError:
        raise NotJson("it does not follow the JSON grammar") from None


# --- pieces: UTF-8, and numbers -------------------------------------------------------------------

# Can a number overflow a double? Only with an exponent of three digits or more, or with two
# hundred digits. Digits and points become "0", so that three plain searches find every candidate;
# candidates are rare, and looked at closely.
_CLASSES = bytes(
    0x30 if c in b"0123456789." else 0x65 if c in b"eE" else 0x2B if c == 0x2B else 0x20
    for c in range(256)
)
_MANY_DIGITS = 200
_STRIDE = 100  # so that two neighbours of a sample are in any run of many digits
_SOME_DIGITS = b"0" * 8
_CANDIDATES = (b"0e000", b"0e+000", b"0" * _MANY_DIGITS)
_OVERLAP = 256
_NUMBER_BYTES = b"0123456789.+-eE"
_NUMBER_REACH = 320
_MAX_CLOSE_LOOKS = 2000
_LOOK_BACK = 1024
_MAX_QUOTES = 20_000
"""Each costs a step in Python; a text with more strings is searched as a whole."""


def _check_pieces(text: Text) -> None:
    _check_utf8(text)
    outside = _outside_strings(text) if isinstance(text, bytes) else None
    if _is_suspicious(text if outside is None else outside) and _overflows(text):
        raise NotJson("it contains a number out of range")


def _check_utf8(text: Text) -> None:
    if isinstance(text, bytes) and text.isascii():
        return
    size, at = len(text), 0
    while at < size:
        piece = bytes(text[at : at + _PIECE])
        if piece.isascii():
            at += len(piece)
            continue
        try:
            _, used = codecs.utf_8_decode(piece, "strict", at + len(piece) >= size)
        except UnicodeDecodeError:
            raise NotJson("it is not valid UTF-8") from None
        at += used


def _outside_strings(text: bytes) -> bytes | None:
    """
    Return what stands outside of strings, if the text is JSON; None if it is much, or many runs.

    A big text is mostly strings, and numbers are only outside. Quotes are found at memory speed.
    """
    outside = bytearray()
    at, inside = 0, False
    for _ in range(_MAX_QUOTES):
        quote = text.find(b'"', at)
        if not inside:
            outside += text[at : quote + 1] if quote >= 0 else text[at:]
            inside = True
        elif quote >= 0 and not (text[quote - 1] == 0x5C and _is_escaped(text, quote)):
            inside = False
        if quote < 0:
            return bytes(outside)
        if len(outside) > _PIECE:
            break
        at = quote + 1
    return None


def _is_escaped(text: bytes, at: int) -> bool:
    """Tell whether the quote at *at*, inside a string, is part of it."""
    run = 0
    while True:
        piece = text[max(0, at - run - _LOOK_BACK) : at - run]
        more = len(piece) - len(piece.rstrip(b"\\"))
        run += more
        if more < _LOOK_BACK:
            return run % 2 == 1


def _is_suspicious(text: Text) -> bool:
    """Tell whether there might be a number out of range."""
    size, at, looks = len(text), 0, 0
    tail = b""
    while at < size:
        piece = bytes(text[at : at + _PIECE])
        classes = (tail + piece).translate(_CLASSES)
        start = at - len(tail)
        # nearly always there is neither an exponent nor a long run of digits
        odd = classes.find(b"0e") >= 0 or classes.find(_SOME_DIGITS) >= 0
        for needle in _CANDIDATES if odd else ():
            found = classes.find(needle)
            while found >= 0:
                looks += 1
                if looks > _MAX_CLOSE_LOOKS or _may_overflow(text, start + found):
                    return True
                found = classes.find(needle, found + len(needle))
        tail = piece[-_OVERLAP:]
        at += len(piece)
    return False


def _may_overflow(text: Text, at: int) -> bool:
    """Tell whether the number-like run around *at* could be a number that overflows."""
    left = bytes(text[max(0, at - _NUMBER_REACH) : at])
    right = bytes(text[at : at + _NUMBER_REACH])
    head = left.rstrip(_NUMBER_BYTES)
    rest = right.lstrip(_NUMBER_BYTES)
    if (not head and at > _NUMBER_REACH) or not rest:
        return True  # longer than one look: decide with the whole text
    if head[-1:] not in b" \t\r\n[,:" or rest[:1] not in b" \t\r\n],}":
        return False
    return _is_infinite(left[len(head) :] + right[: len(right) - len(rest)])


def _is_infinite(number: bytes) -> bool:
    try:
        return math.isinf(float(number))
    except ValueError:
        return False


# Everything but strings is looked at; a number passes here when its shape cannot overflow.
_HARMLESS = re.compile(
    rb'(?:[^"\d]++|"(?:[^"\\]++|\\.)*+"'
    rb"|\d{1,200}(?:\.\d*+)?+(?:[eE]-\d*+|[eE]\+?0*\d{1,2})?+(?![\d.eE+-])"
    rb"|\d{1,8}(?:\.\d*+)?+[eE]\+?0*[12]\d\d(?![\d.eE+-]))*+",
    re.DOTALL,
)
_NUMBER = re.compile(rb"[\d.eE+-]+")


def _overflows(text: Text) -> bool:
    """Decide exactly, told from strings, in one C pass; odd numbers are counted and bounded."""
    at = 0
    for _ in range(_MAX_CLOSE_LOOKS):
        passed = _HARMLESS.match(text, at)
        assert passed is not None
        at = passed.end()
        if at >= len(text):
            return False
        number = _NUMBER.match(text, at)
        if number is None:
            return False  # a quote that does not close: the grammar check says so
        if _is_infinite(number[0]):
            return True
        at = number.end()
    return True
