"""
What a request is aimed at: the Host field and the request target, checked and brought to one form.

Pure text in, text out. Upstream addresses never come from here; a path is only compared with known
routes, so everything doubtful is simply unknown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

# reg-name of RFC 3986 without percent-encoding and sub-delims that no resolver knows; underscores
# are there because container networks use them. Brackets hold an IPv6 address.
_HOST = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")
_ABSOLUTE = re.compile(r"https?://([^/?#]*)([^?#]*)(\?[^#]*)?", re.IGNORECASE)
_ORIGIN = re.compile(r"(/[^?#]*)(\?[^#]*)?")
_SLASHES = re.compile(r"/{2,}")
_DOUBTFUL = re.compile(rb"(?:\A|[/\\])\.\.?(?:[/\\]|\Z)|[\x00-\x1f\x7f\\]")
_MAX_DECODINGS = 4


class Misdirected(ValueError):
    """An absolute target with another authority than the Host field: we are no forward proxy."""


class UnknownTarget(ValueError):
    """A target that can be no route of ours."""


@dataclass(frozen=True, slots=True)
class Target:
    """Path as it was sent, percent-encoding included, inner runs of slashes collapsed."""

    path: str
    query: str
    """With its question mark; empty when there is none."""


def is_valid_host(host: str) -> bool:
    """Tell whether a Host field names a host, and perhaps a port, and nothing else."""
    return _HOST.fullmatch(host) is not None


def resolve(target: str, host: str | None) -> Target:
    """
    Return the path that a request target means.

    Args:
        target: as in the request line.
        host: value of the Host field, None when HTTP/1.0 brought none.

    Raises:
        Misdirected: the target carries a foreign authority.
        UnknownTarget: leading double slash, dot segments in any encoding, control characters,
            a fragment, an asterisk, or no path at all.
    """
    if not target.isascii():
        raise UnknownTarget
    if target.startswith("/"):
        found = _ORIGIN.fullmatch(target)
        if found is None:
            raise UnknownTarget
        path, query = found[1], found[2] or ""
    else:
        found = _ABSOLUTE.fullmatch(target)
        if found is None:
            raise UnknownTarget if "://" not in target else Misdirected
        if host is None or found[1].lower() != host.lower():
            raise Misdirected
        path, query = found[2] or "/", found[3] or ""
    if path.startswith("//") or _is_doubtful(path):
        raise UnknownTarget
    return Target(path=_SLASHES.sub("/", path), query=query)


def _is_doubtful(path: str) -> bool:
    """Tell whether any number of decodings turns *path* into one that climbs or hides something."""
    decoded = path.encode("ascii")
    for _ in range(_MAX_DECODINGS):
        if _DOUBTFUL.search(decoded):
            return True
        again = unquote_to_bytes(decoded)
        if again == decoded:
            return False
        decoded = again
    return True
