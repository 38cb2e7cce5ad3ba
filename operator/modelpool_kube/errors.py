"""
What can go wrong at the API server, by what the caller has to do about it.

The one distinction that must never be lost: a write that was *refused* did not happen, and a write
that was not *answered* may have happened. `Unanswered` is therefore no kind of `Unavailable`.
"""

from __future__ import annotations

import json
from typing import Any


class KubeError(Exception):
    """Base of everything that `modelpool_kube` raises for the API server."""

    def __init__(
        self,
        message: str,
        *,
        code: int = 0,
        reason: str = "",
        call: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{call}: {message}" if call else message)
        self.message = message
        self.code = code
        """HTTP status; 0 when there was no answer."""
        self.reason = reason
        """Reason word of the API server: ``NotFound``, ``Expired`` ..."""
        self.call = call
        """Verb and path."""
        self.retry_after_s = retry_after_s
        """When the server wants to be asked again, if it said so."""


class Refused(KubeError):
    """The server understood and refused; a write did not happen and will not if repeated."""


class NotFound(Refused):
    """No such object."""


class NotServed(NotFound):
    """The server does not know the kind: its CRD is not installed."""


class AlreadyExists(Refused):
    """An object of that name is there; look whose it is."""


class Conflict(Refused):
    """The object changed since it was read, or a precondition failed: read again and decide."""


class Gone(Refused):
    """The version asked for is too old: list again."""


class Forbidden(Refused):
    """A person has to change a Role."""


class Unauthorized(Refused):
    """The credentials are not accepted, not even after they were read again."""


class Invalid(Refused):
    """The object breaks a rule; the message names field, value and way out."""


class Unavailable(KubeError):
    """No usable answer and nothing was written: try again later, the world is unchanged by us."""


class Timeout(Unavailable):
    """A read was not answered in time."""


class Unanswered(KubeError):
    """A write was sent and not answered: it may have happened, now or later. Read before acting."""


def from_status(
    code: int,
    body: bytes,
    *,
    call: str,
    is_write: bool,
    retry_after_s: float | None = None,
) -> KubeError:
    """Return the error that an answer with status *code* means."""
    status = _status(body)
    reason = str(status.get("reason") or "")
    message = str(status.get("message") or "") or body[:200].decode("utf-8", "replace").strip()
    if not message:
        message = f"status {code}"

    def error(kind: type[KubeError]) -> KubeError:
        return kind(message, code=code, reason=reason, call=call, retry_after_s=retry_after_s)

    match code:
        case 404:
            details = status.get("details") or {}
            # The server names the object that it does not have, and nothing when the path is
            # not one of its own.
            return error(NotFound if details.get("name") else NotServed)
        case 409:
            return error(AlreadyExists if reason == "AlreadyExists" else Conflict)
        case 410:
            return error(Gone)
        case 401:
            return error(Unauthorized)
        case 403:
            return error(Forbidden)
        case 400 | 422:
            return error(Gone if reason in ("Expired", "Gone") else Invalid)
        case 429:
            return error(Unavailable)
        case _ if code >= 500:
            # A proxy or the server itself gave up, perhaps after it had passed the write on.
            return error(Unanswered if is_write else Unavailable)
        case _ if code < 400:
            return error(Unanswered if is_write else Unavailable)
    return error(Refused)


def _status(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) and found.get("kind") == "Status" else {}
