"""
How durations, sizes, addresses and names are written in a configuration.

Durations are Go style in the subset that Kubernetes' Gateway API allows (GEP-2257), checked
before durationpy reads them: that library also takes ``-5s`` and ``1d``.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import durationpy
from pydantic import (
    BeforeValidator,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    ValidationInfo,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

DURATION_PATTERN = r"^([0-9]{1,5}(h|ms|s|m)){1,4}$"
"""One to four parts of one to five digits with h, m, s or ms (GEP-2257)."""
DURATION_FORM = "write it like 300s, 4m30s, 1h or 500ms"
SIZE_PATTERN = r"^[0-9]{1,15}(B|kB|KiB|MB|MiB|GB|GiB|TiB)?$"
SIZE_FORM = "write it like 64MiB, 512KiB, 2GiB, or as a number of bytes"
POOL_NAME_PATTERN = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"
NAME_LIMIT = 200
"""Longest model name; longer ones are no use in logs and error messages."""

_DURATION = re.compile(DURATION_PATTERN)
_SIZE = re.compile(r"^([0-9]{1,15})(B|kB|KiB|MB|MiB|GB|GiB|TiB)?$")
_OBJECT_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_POOL_NAME = re.compile(POOL_NAME_PATTERN)
_UNIT_BYTES = {
    "B": 1,
    "kB": 1000,
    "KiB": 1024,
    "MB": 1000**2,
    "MiB": 1024**2,
    "GB": 1000**3,
    "GiB": 1024**3,
    "TiB": 1024**4,
}


def refuse(reason: str, way_out: str) -> PydanticCustomError:
    """Return the exception with which a validator of ours reports a bad value."""
    # Both go in as context: a template would trip over braces in what the user wrote.
    return PydanticCustomError("refused", "{reason}", {"reason": reason, "way_out": way_out})


class Number:
    """Mixin of YAML numbers that remember how they were written (``0.10``, ``0x1F``)."""

    text: str


class WrittenInt(int, Number):
    """An integer of the file."""


class WrittenFloat(float, Number):
    """A float of the file."""


def shown(value: object) -> str:
    """Return *value* for an error message: short, and never more than the start of a long one."""
    if isinstance(value, Number):
        return value.text
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def format_duration(seconds: float) -> str:
    """Return *seconds* as it would be written in a file: ``300s``, ``10m``, ``1500ms``."""
    millis = round(seconds * 1000)
    if millis % 1000:
        return f"{millis}ms"
    whole = millis // 1000
    if whole >= 3600 and whole % 3600 == 0:
        return f"{whole // 3600}h"
    if whole >= 600 and whole % 60 == 0:
        return f"{whole // 60}m"
    if whole > 99_999:
        return f"{whole // 3600}h{whole % 3600 // 60}m{whole % 60}s"
    return f"{whole}s"


def parse_duration(value: object) -> float:
    """
    Return the seconds that *value*, a string such as ``4m30s``, stands for.

    Raises:
        PydanticCustomError: It is no duration.
    """
    if isinstance(value, str) and _DURATION.match(value):
        return float(durationpy.from_str(value).total_seconds())
    reason = f"{shown(value)} is not a duration"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _refuse_bare_number(value, reason)
    raise refuse(reason, DURATION_FORM)


def _refuse_bare_number(value: int | float, reason: str) -> float:
    number = value.text if isinstance(value, Number) else str(value)
    if number.isdigit():
        raise refuse(f"{reason}: it has no unit", f"write {number}s if seconds are meant")
    raise refuse(reason, DURATION_FORM)


def format_size(size: int) -> str:
    """Return *size* in bytes as it would be written in a file: ``64MiB``, ``1000``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = _UNIT_BYTES[unit]
        if size >= factor and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def parse_size(value: object) -> int:
    """
    Return the bytes that *value*, ``64MiB`` or a plain number, stands for.

    Raises:
        PydanticCustomError: It is no size.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return int(value)
    match = _SIZE.match(value) if isinstance(value, str) else None
    if match is None:
        raise refuse(f"{shown(value)} is not a size", SIZE_FORM)
    return int(match[1]) * _UNIT_BYTES[match[2] or "B"]


@dataclass(frozen=True, slots=True)
class Duration:
    """
    Marks a field of seconds that is written as a duration between *least* and *most*.

    *word* is a word that may stand instead of a duration and gives None: ``off``, ``auto``.
    """

    least: str
    most: str
    word: str | None = None

    def read(self, value: object) -> float | None:
        """Return the seconds of *value*, or None for *word*; refuse what is out of range."""
        if self.word is not None and (value is None or value == self.word):
            return None
        if isinstance(value, float) and not isinstance(value, Number):
            seconds = value  # a program built the settings, no file
        else:
            seconds = parse_duration(value)
        low, high = parse_duration(self.least), parse_duration(self.most)
        if not low <= seconds <= high:
            also = f", or {self.word}" if self.word else ""
            raise refuse(
                f"{shown(value)} is out of range",
                f"use a duration from {self.least} to {self.most}{also}",
            )
        return seconds

    def write(self, seconds: float | None) -> str | None:
        """Return what `read` would give *seconds* for."""
        return self.word if seconds is None else format_duration(seconds)

    @property
    def text(self) -> str:
        """Return the type for people."""
        also = f"`{self.word}` or " if self.word else ""
        return f"{also}duration, {self.least} to {self.most}"

    def __get_pydantic_core_schema__(
        self, source: type[Any], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return a schema that reads and writes durations."""
        return core_schema.no_info_plain_validator_function(
            self.read,
            serialization=core_schema.plain_serializer_function_ser_schema(
                self.write, when_used="json"
            ),
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the JSON Schema of the written form."""
        written: JsonSchemaValue = {"type": "string", "pattern": DURATION_PATTERN}
        if self.word is None:
            return written
        return {"anyOf": [{"type": "string", "const": self.word}, written]}


@dataclass(frozen=True, slots=True)
class Size:
    """Marks a field of bytes that is written as a size between *least* and *most*."""

    least: int
    most: int

    def read(self, value: object) -> int | None:
        """Return the bytes of *value*; refuse what is out of range."""
        if value is None:
            return None
        size = parse_size(value)
        if not self.least <= size <= self.most:
            raise refuse(
                f"{shown(value)} is out of range",
                f"use a size from {format_size(self.least)} to {format_size(self.most)}",
            )
        return size

    @staticmethod
    def write(size: int | None) -> str | None:
        """Return what `read` would give *size* for."""
        return None if size is None else format_size(size)

    @property
    def text(self) -> str:
        """Return the type for people."""
        return f"size, {format_size(self.least)} to {format_size(self.most)}"

    def __get_pydantic_core_schema__(
        self, source: type[Any], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return a schema that reads and writes sizes."""
        return core_schema.no_info_plain_validator_function(
            self.read,
            serialization=core_schema.plain_serializer_function_ser_schema(
                self.write, when_used="json"
            ),
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the JSON Schema of the written form."""
        return {
            "anyOf": [
                {"type": "integer", "minimum": self.least, "maximum": self.most},
                {"type": "string", "pattern": SIZE_PATTERN},
            ]
        }


class Address(NamedTuple):
    """Where to listen."""

    host: str
    """Name or IP address, without brackets; empty = every interface."""
    port: int
    """0 = any free port."""

    def __str__(self) -> str:
        """Return ``host:port``, IPv6 in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """True when only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


ADDRESS_FORM = "write it like 127.0.0.1:8080, [::1]:8080, or :8080 for every interface"


def parse_address(value: object) -> Address:
    """
    Return the address that *value*, ``host:port``, stands for.

    Raises:
        PydanticCustomError: It is none.
    """
    if isinstance(value, Address):
        return value
    match = (
        re.match(r"^(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]*)):([0-9]{1,5})$", value)
        if isinstance(value, str)
        else None
    )
    if match is None or int(match[3]) > 65535:
        raise refuse(f"{shown(value)} is not an address", ADDRESS_FORM)
    if match[1]:
        try:
            ipaddress.IPv6Address(match[1])
        except ValueError:
            raise refuse(f"{shown(value)} is not an address", ADDRESS_FORM) from None
    return Address(match[1] or match[2], int(match[3]))


def _parse_address_or_off(value: object) -> Address | None:
    return None if value is None or value == "off" else parse_address(value)


def _address_or_off_text(value: Address | None) -> str:
    return "off" if value is None else str(value)


def parse_model_name(value: object) -> str:
    """Return *value* if it may name a model; refuse empty, long and unprintable ones."""
    text = value.text if isinstance(value, Number) else value
    if not isinstance(text, str):
        raise refuse(f"{shown(value)} is not a name", "put the name in quotes")
    if not text or text != text.strip():
        raise refuse(
            "the name is empty" if not text.strip() else "the name begins or ends with a space",
            f"use 1 to {NAME_LIMIT} printable characters without spaces around them",
        )
    if len(text) > NAME_LIMIT:
        raise refuse(f"the name has {len(text)} characters", f"use at most {NAME_LIMIT} characters")
    if not text.isprintable():
        raise refuse("the name has unprintable characters", "remove them")
    return text


def parse_pool_name(value: object) -> str:
    """Return *value* if it may name a pool: it becomes part of file names and addresses."""
    text = value.text if isinstance(value, Number) else value
    if isinstance(text, str) and _POOL_NAME.match(text):
        return text
    raise refuse(
        f"{shown(value)} cannot name a pool",
        "use 1 to 63 letters, digits, dots, dashes or underscores, "
        "with a letter or digit at both ends",
    )


def parse_object_name(value: object) -> str:
    """Return *value* if an object of Kubernetes can have it as its name."""
    text = value.text if isinstance(value, Number) else value
    if isinstance(text, str) and _OBJECT_NAME.fullmatch(text) and len(text) <= 253:
        return text
    raise refuse(
        f"{shown(value)} cannot name an object of Kubernetes",
        "use small letters, digits, dashes and dots, with a letter or digit at both ends",
    )


def parse_word(value: object) -> str:
    """Return one argument of a command or one value of an environment, as it was written."""
    if isinstance(value, Number):
        return value.text
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str) and "\0" not in value:
        return value
    raise refuse(f"{shown(value)} is not text", "put it in quotes")


def _parse_path(value: object, info: ValidationInfo) -> Path | None:
    if value is None or isinstance(value, Path):
        return value
    if isinstance(value, str) and value and "\0" not in value:
        path = Path(value).expanduser()
        # Relative to the file that says so, never to where the router happens to be started.
        folder = (info.context or {}).get("folder")
        return path if folder is None else folder / path
    raise refuse(f"{shown(value)} is not a path", "write the path of a file or folder")


@dataclass(frozen=True, slots=True)
class Written:
    """Marks how a field is written: JSON Schema for editors, *text* for people."""

    schema: tuple[tuple[str, object], ...]
    text: str

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the JSON Schema of the written form."""
        return dict(self.schema)


def _string(text: str, **more: object) -> Written:
    return Written((("type", "string"), *more.items()), text)


AddressField = Annotated[
    Address,
    BeforeValidator(parse_address),
    PlainSerializer(str, when_used="json"),
    _string("host:port"),
]
AddressOrOff = Annotated[
    Address | None,
    BeforeValidator(_parse_address_or_off),
    PlainSerializer(_address_or_off_text, when_used="json"),
    _string("host:port or `off`"),
]
ModelName = Annotated[
    str,
    BeforeValidator(parse_model_name),
    _string("name", minLength=1, maxLength=NAME_LIMIT),
]
PoolNameField = Annotated[
    str, BeforeValidator(parse_pool_name), _string("name", pattern=POOL_NAME_PATTERN)
]
ObjectNameField = Annotated[str, BeforeValidator(parse_object_name), _string("name of an object")]
Word = Annotated[
    str, BeforeValidator(parse_word), Written((("type", ("string", "number")),), "text")
]
PathField = Annotated[Path, BeforeValidator(_parse_path), _string("path")]
OptionalPath = Annotated[Path | None, BeforeValidator(_parse_path), _string("path")]
