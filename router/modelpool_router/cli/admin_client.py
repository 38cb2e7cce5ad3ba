"""
Talks to the admin port of a running router. Standard library only, for a quick start.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode, urlsplit

if TYPE_CHECKING:
    import http.client

DEFAULT_ADMIN = "127.0.0.1:9090"
SILENCE_S = 45.0
"""For a stream of events: a quiet router sends a comment every 15 s."""
_ANSWER_LIMIT = 64 * 1024 * 1024


class Unreachable(Exception):
    """Nobody answers there, or not as a router does."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"no router answers on {address}: {reason}")
        self.address = address
        self.reason = reason


class Refused(Exception):
    """The router answered with an error of its own."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class AdminAddress:
    """Where the admin port is: scheme, host, port and a prefix when it is behind a proxy."""

    host: str
    port: int
    prefix: str = ""
    tls: bool = False

    def __str__(self) -> str:
        """Return the address as a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.prefix}"


def parse_admin(text: str) -> AdminAddress:
    """
    Return the address that *text* means: ``host:port``, ``:port`` or a URL.

    An address that a router listens on with every interface leads to this machine.

    Raises:
        ValueError: *text* is no address.
    """
    parts = urlsplit(text if "://" in text else f"//{text}", scheme="http")
    if parts.scheme not in ("http", "https") or parts.query or parts.fragment:
        raise ValueError("not an http address")
    port = parts.port or (443 if parts.scheme == "https" else 80 if "://" in text else 9090)
    host = parts.hostname or ""
    if host in ("", "0.0.0.0"):
        host = "127.0.0.1"
    elif host == "::":
        host = "::1"
    return AdminAddress(host, port, parts.path.rstrip("/"), parts.scheme == "https")


class AdminClient:
    """One admin port. Opens a connection per call: calls are rare and routers restart."""

    def __init__(self, address: AdminAddress, token: str | None, *, timeout_s: float = 10.0):
        self.address = address
        self._token = token
        self._timeout_s = timeout_s

    def state(self) -> dict[str, Any]:
        """Return the snapshot of all pools."""
        return self._call("GET", "/api/v1/state")

    def why(self, model: str) -> dict[str, Any]:
        """Return pool, member and the sentences that say why a request for *model* waits."""
        return self._call("GET", "/api/v1/why?" + urlencode({"model": model}))

    def act(self, pool: str, verb: str, *, member: str | None = None) -> dict[str, Any]:
        """Ask *pool* to ``load`` *member*, ``unload``, ``pause`` or ``resume``."""
        query = "" if member is None else "?" + urlencode({"member": member})
        return self._call("POST", f"/api/v1/pools/{quote(pool, safe='')}/{verb}{query}")

    def events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """
        Yield (kind, data) of what happens, beginning with a ``snapshot``, until the router ends.

        Raises:
            Unreachable: the connection broke.
        """
        import http.client

        connection, response = self._open("GET", "/api/v1/events", silence_s=SILENCE_S)
        with closing(connection):
            if response.status != 200:
                self._refuse(response.status, self._read(response))
            kind, data = "", ""
            while True:
                try:
                    line = response.readline()
                except (OSError, http.client.HTTPException) as error:
                    raise Unreachable(str(self.address), _reason(error)) from error
                if not line:
                    return
                name, _, value = line.decode("utf-8").rstrip("\r\n").partition(":")
                value = value.removeprefix(" ")
                if name == "event":
                    kind = value
                elif name == "data":
                    data += value
                elif not name and data:
                    yield kind, json.loads(data)
                    kind, data = "", ""

    def _call(self, method: str, path: str) -> dict[str, Any]:
        connection, response = self._open(method, path)
        with closing(connection):
            body = self._read(response)
        if response.status >= 300:
            self._refuse(response.status, body)
        try:
            answer = json.loads(body)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise Unreachable(str(self.address), "what answers there is no modelpool router")
        return answer

    def _open(
        self, method: str, path: str, *, silence_s: float | None = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """
        Send a request and return its answer, of which the head has come.

        Args:
            silence_s: Longest silence inside the answer; None = as before its head.
        """
        import http.client  # brings half of `email` along: not for every command

        address = self.address
        kind = http.client.HTTPSConnection if address.tls else http.client.HTTPConnection
        connection = kind(address.host, address.port, timeout=self._timeout_s)
        headers = {"Accept": "*/*", "User-Agent": "modelpool"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        try:
            connection.request(method, address.prefix + path, headers=headers)
            sock = connection.sock  # the answer may take it over
            response = connection.getresponse()
            if silence_s is not None:
                sock.settimeout(silence_s)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Unreachable(str(address), _reason(error)) from error
        return connection, response

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        import http.client

        try:
            return response.read(_ANSWER_LIMIT)
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(str(self.address), _reason(error)) from error

    def _refuse(self, status: int, body: bytes) -> None:
        try:
            error: Mapping[str, Any] = json.loads(body)["error"]
            code, message = str(error["code"]), str(error["message"])
        except (ValueError, KeyError, TypeError):
            reason = f"what answers there is no modelpool router (status {status})"
            raise Unreachable(str(self.address), reason) from None
        raise Refused(status, code, message)


def _reason(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return "the host name is not known"
    if isinstance(error, TimeoutError):
        return "it does not answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__
