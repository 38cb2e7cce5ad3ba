"""Lets scripts of named web pages call the router (CORS); off unless origins are configured."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .request import Fields

_EXPOSED = "x-request-id, request-id, retry-after, retry-after-ms, x-modelpool-member"
_FIELD_NAMES = re.compile(
    r"[!#$%&'*+.^_`|~0-9A-Za-z-]+(?:[ \t]*,[ \t]*[!#$%&'*+.^_`|~0-9A-Za-z-]+)*"
)
_MAX_AGE_S = 600
_NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Cors:
    """Which origins may call; ``*`` stands for every one."""

    origins: frozenset[str] = frozenset()

    def allows(self, origin: str) -> bool:
        """Tell whether pages of *origin* may call."""
        return origin in self.origins or "*" in self.origins

    def headers(self, request_headers: Fields) -> Mapping[str, str]:
        """Return what every answer to this request carries, errors included."""
        if not self.origins:
            return _NOTHING
        origin = request_headers.get("Origin")
        if origin is None or not self.allows(origin) or not _is_printable(origin):
            return {"Vary": "Origin"}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": _EXPOSED,
            "Vary": "Origin",
        }

    def preflight(self, method: str, request_headers: Fields) -> Mapping[str, str] | None:
        """
        Return the headers that answer a preflight with 204, or None when this is none of ours.

        A browser sends it without credentials, so it is answered before any key is asked for.
        """
        if method != "OPTIONS" or "Access-Control-Request-Method" not in request_headers:
            return None
        answer = dict(self.headers(request_headers))
        if "Access-Control-Allow-Origin" not in answer:
            return None
        answer["Access-Control-Allow-Methods"] = "GET, POST, OPTIONS"
        # SDKs in browsers send a dozen of their own, and their set grows: allow what is asked for.
        asked = request_headers.get("Access-Control-Request-Headers", "").strip()
        if _FIELD_NAMES.fullmatch(asked):
            answer["Access-Control-Allow-Headers"] = asked
        answer["Access-Control-Max-Age"] = str(_MAX_AGE_S)
        answer["Vary"] = "Origin, Access-Control-Request-Method, Access-Control-Request-Headers"
        return answer


def _is_printable(text: str) -> bool:
    return text.isascii() and text.isprintable()
