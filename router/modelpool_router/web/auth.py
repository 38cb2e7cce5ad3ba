"""
Who calls: API keys, kept and compared as SHA-256 digests.

Keys come as text (a mounted file or an environment variable) in one of two forms:

- one key a line, ``#`` begins a comment: ``sk-...`` or ``name: sk-...``;
- YAML, a list of ``name`` and either ``key`` or ``sha256`` (hex), optionally ``models`` (names
  that the key may use; absent = all).

Two entries may share a name: the old and the new key while clients move over.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from .errors import ApiError
from .request import Fields

_BEARER = re.compile(r"bearer[ \t]+(\S+)[ \t]*", re.IGNORECASE)
_HEX_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_LINE = re.compile(r"(?:([A-Za-z0-9._-]{1,64})[ \t]*:[ \t]+)?(\S+)")
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_FIELDS = frozenset({"name", "key", "sha256", "models"})


class BadKeys(ValueError):
    """The key text cannot be used. The sentence names the entry by number and quotes no key."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request comes from, as far as limits and names are concerned."""

    key_id: str | None
    """Label of the key, never the key; None when no keys are configured."""
    allowed: frozenset[str] | None
    """Names that the key may use; None = all."""


ANYBODY = Caller(key_id=None, allowed=None)


@dataclass(frozen=True, slots=True)
class _Key:
    digest: bytes
    caller: Caller


class KeyRing:
    """All keys of a router. Immutable; `Keys` swaps a whole ring."""

    __slots__ = ("_keys",)

    def __init__(self, keys: Iterable[_Key] = ()) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    @classmethod
    def parse(cls, text: str) -> KeyRing:
        """
        Read keys from *text*, in either form.

        Raises:
            BadKeys: it is no list of keys, or an entry is wrong.
        """
        lines = [line.strip() for line in text.splitlines()]
        lines = [line for line in lines if line and not line.startswith("#")]
        if not lines:
            raise BadKeys("there is no key in it")
        if any(line.startswith(("- ", "[", "{")) or line == "-" for line in lines):
            return cls(_from_yaml(text))
        return cls(_from_lines(lines))

    def find(self, presented: bytes) -> Caller | None:
        """
        Return who *presented* belongs to, None when nobody.

        Takes the same time for every wrong key, however much of it is right, and goes through all
        keys each time, so that the place of a right one does not show either.
        """
        digest = hashlib.sha256(presented).digest()
        found: Caller | None = None
        for key in self._keys:
            if hmac.compare_digest(digest, key.digest):
                found = key.caller
        return found


class Keys:
    """The ring in force, and the question that every request is asked."""

    __slots__ = ("ring",)

    def __init__(self, ring: KeyRing | None = None) -> None:
        self.ring = ring if ring is not None and len(ring) else None
        """Which keys are in force; another object after each `reload`, None = everybody may."""

    @property
    def required(self) -> bool:
        """False when everybody may call."""
        return self.ring is not None

    def reload(self, text: str | None) -> None:
        """
        Put the keys of *text* in force at once, None = no keys. On failure the old ones stay.

        Raises:
            BadKeys: nothing was changed.
        """
        self.ring = None if text is None else KeyRing.parse(text)

    def identify(self, headers: Fields) -> Caller:
        """
        Return who calls, from ``Authorization: Bearer`` or ``x-api-key``, and from nowhere else.

        Raises:
            ApiError: 401 ``invalid_api_key``: none, a wrong one, or two that differ.
        """
        if self.ring is None:
            return ANYBODY
        presented = _presented(headers)
        if len(presented) == 1:
            caller = self.ring.find(presented.pop())
            if caller is not None:
                return caller
        raise ApiError.of(
            "invalid_api_key",
            "A valid API key is required, as `Authorization: Bearer KEY` or in `x-api-key`.",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _presented(headers: Fields) -> set[bytes]:
    """Return the distinct keys that a request shows; header text may hold any bytes."""
    keys: set[bytes] = set()
    for value in headers.getall("Authorization", ()):
        bearer = _BEARER.fullmatch(value)
        # an empty key matches nobody, but still differs from one in x-api-key
        keys.add(bearer[1].encode("utf-8", "surrogateescape") if bearer else b"")
    for value in headers.getall("x-api-key", ()):
        keys.add(value.encode("utf-8", "surrogateescape"))
    return keys


def _from_lines(lines: list[str]) -> Iterable[_Key]:
    for number, line in enumerate(lines, 1):
        found = _LINE.fullmatch(line)
        if found is None:
            raise BadKeys(f"key {number}: a line must be a key, or a name, a colon and a key")
        yield _key(found[1] or f"key{number}", found[2], None)


def _from_yaml(text: str) -> Iterable[_Key]:
    try:
        entries = YAML(typ="safe", pure=True).load(text)
    except YAMLError:
        raise BadKeys("it is not valid YAML") from None
    if isinstance(entries, Mapping) and set(entries) == {"keys"}:
        entries = entries["keys"]
    if not isinstance(entries, list) or not entries:
        raise BadKeys("it must be a list of keys")
    for number, entry in enumerate(entries, 1):
        yield _from_entry(number, entry)


def _from_entry(number: int, entry: Any) -> _Key:
    if isinstance(entry, str) and entry:
        return _key(f"key{number}", entry, None)
    if not isinstance(entry, Mapping) or not set(entry) <= _FIELDS:
        raise BadKeys(f"key {number}: expected name, key or sha256, and models; nothing else")
    name, key, digest, models = (entry.get(each) for each in ("name", "key", "sha256", "models"))
    if name is None:
        name = f"key{number}"
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise BadKeys(f"key {number}: the name must be 1 to 64 letters, digits, `.`, `_`, `@`, `-`")
    if models is not None and not (
        isinstance(models, list) and all(isinstance(each, str) and each for each in models)
    ):
        raise BadKeys(f"key {number}: models must be a list of names")
    allowed = None if models is None else frozenset(models)
    if (key is None) == (digest is None):
        raise BadKeys(f"key {number}: give either key or sha256")
    if key is not None:
        if not isinstance(key, str) or not key or not key.isprintable() or " " in key:
            raise BadKeys(f"key {number}: the key must be text without blanks")
        return _key(name, key, allowed)
    if not isinstance(digest, str) or _HEX_DIGEST.fullmatch(digest) is None:
        raise BadKeys(f"key {number}: sha256 must be 64 hexadecimal digits")
    return _Key(bytes.fromhex(digest), Caller(name, allowed))


def _key(name: str, key: str, allowed: frozenset[str] | None) -> _Key:
    return _Key(hashlib.sha256(key.encode()).digest(), Caller(name, allowed))
