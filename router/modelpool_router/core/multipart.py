"""
Reads a few short text fields of a multipart/form-data body without taking it apart.

Everything that two parsers could read differently in a field of ours is refused; files are
stepped over with one search each, whatever their size.
"""

from __future__ import annotations

import mmap
import re

from .jsontext import Text

MAX_PARTS = 256
MAX_PART_HEAD = 8 * 1024
MAX_TEXT = 1024
"""Longest value of a wanted field, in bytes."""

_BOUNDARY = re.compile(
    r"""multipart/form-data[ \t]*;.*?[ \t;]boundary=(?:"([^"\\]{1,70})"|([^\s;"]{1,70}))""",
    re.IGNORECASE,
)
_BOUNDARY_TEXT = re.compile(r"[0-9A-Za-z'()+_,./:=? -]*[0-9A-Za-z'()+_,./:=?-]")
_DISPOSITION = re.compile(
    rb"content-disposition[ \t]*:[ \t]*form-data[ \t]*((?:;.*)?)", re.IGNORECASE
)
_PARAMETER = re.compile(rb';[ \t]*([^\s=;"]+)[ \t]*=[ \t]*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))[ \t]*')


class BadMultipart(ValueError):
    """The frame is broken or ambiguous; the sentence quotes nothing of it."""


class DuplicateField(ValueError):
    """A wanted field is there twice."""

    def __init__(self, name: str) -> None:
        super().__init__("field appears twice")
        self.name = name


class NotText(ValueError):
    """A wanted field is a file, too long or not UTF-8."""

    def __init__(self, name: str) -> None:
        super().__init__("field is not short text")
        self.name = name


def text_fields(content_type: str, data: Text, *, wanted: frozenset[str]) -> dict[str, str]:
    """
    Return the values of the *wanted* fields that are present.

    Raises:
        BadMultipart: no boundary, broken frame, more than `MAX_PARTS` parts.
        DuplicateField, NotText: of a wanted field.
    """
    return {name: text for name, (text, _) in _fields(content_type, data, wanted).items()}


def field_span(content_type: str, data: Text, name: str) -> tuple[int, int]:
    """
    Return begin and end in bytes of the value of the field *name*; raises like `text_fields`.

    Raises:
        KeyError: the body has no such field.
    """
    return _fields(content_type, data, frozenset({name}))[name][1]


def _fields(
    content_type: str, data: Text, wanted: frozenset[str]
) -> dict[str, tuple[str, tuple[int, int]]]:
    body = bytes(data) if isinstance(data, memoryview) else data
    mark = b"--" + _boundary(content_type)
    fields: dict[str, tuple[str, tuple[int, int]]] = {}
    if body[: len(mark)] != mark:
        raise BadMultipart("it does not begin with its boundary")
    at = len(mark)
    for _ in range(MAX_PARTS + 1):
        after = body[at : at + 2]
        if after == b"--":
            if body[at + 2 : at + 4] not in (b"", b"\r\n") or len(body) > at + 4:
                raise BadMultipart("something follows its last boundary")
            return fields
        if after != b"\r\n":
            raise BadMultipart("a boundary is not followed by a line end")
        end = body.find(b"\r\n" + mark, at)
        if end < 0:
            raise BadMultipart("its last boundary is missing")
        head_end = body.find(b"\r\n\r\n", at, min(end, at + MAX_PART_HEAD))
        if head_end < 0:
            raise BadMultipart("a part has no head, or one that is too long")
        name, is_file = _name(bytes(body[at:head_end]))
        if name in wanted:
            if name in fields:
                raise DuplicateField(name)
            # the value ends where the line end before the next boundary begins
            begin = min(head_end + 4, end)
            fields[name] = _text(body, name, is_file, begin, end), (begin, end)
        at = end + 2 + len(mark)
    raise BadMultipart(f"it has more than {MAX_PARTS} parts")


def _boundary(content_type: str) -> bytes:
    found = _BOUNDARY.match(content_type)
    text = (found[1] or found[2]) if found else None
    if text is None or _BOUNDARY_TEXT.fullmatch(text) is None:
        raise BadMultipart("the Content-Type names no usable boundary")
    if content_type.lower().count("boundary=") != 1:
        raise BadMultipart("the Content-Type names more than one boundary")
    return text.encode("ascii")


def _name(head: bytes) -> tuple[str, bool]:
    """Return the field name of a part and whether it is a file."""
    parameters: dict[bytes, bytes] = {}
    found = 0
    for line in head.split(b"\r\n"):
        if line[:1] in (b" ", b"\t") or b"\n" in line or b"\r" in line or b"\x00" in line:
            raise BadMultipart("a part's head has a folded or broken line")
        if not line.lower().startswith(b"content-disposition"):
            continue
        found += 1
        disposition = _DISPOSITION.fullmatch(line)
        if disposition is None:
            raise BadMultipart("a part is not form-data")
        rest = disposition[1]
        at = 0
        while at < len(rest):
            parameter = _PARAMETER.match(rest, at)
            if parameter is None:
                raise BadMultipart("a part's Content-Disposition cannot be read")
            key = parameter[1].lower()
            if key in parameters:
                raise BadMultipart("a part's Content-Disposition has a parameter twice")
            parameters[key] = parameter[2] if parameter[2] is not None else parameter[3]
            at = parameter.end()
    if found != 1 or b"name" not in parameters or b"name*" in parameters:
        raise BadMultipart("a part has no single name")
    raw = parameters[b"name"]
    if b"\\" in raw or b"%" in raw:
        raise BadMultipart("a part's name is escaped")  # parsers disagree on how to undo it
    return raw.decode("utf-8", "replace"), bool({b"filename", b"filename*"} & parameters.keys())


def _text(body: bytes | mmap.mmap, name: str, is_file: bool, begin: int, end: int) -> str:
    if is_file or end - begin > MAX_TEXT:
        raise NotText(name)
    try:
        return bytes(body[begin:end] if end > begin else b"").decode("utf-8")
    except UnicodeDecodeError:
        raise NotText(name) from None
