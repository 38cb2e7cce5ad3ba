"""
A stub of an API server on loopback, for what happens between a client and the wire.

Not a cluster: each test says what is answered. For behaviour see `memcluster`.
"""

from __future__ import annotations

import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from modelpool_kube.client import KubeClient

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Seen:
    """One request as it arrived."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: Any


@dataclass
class StubCredentials:
    """Credentials of a test: a token that `reload` changes."""

    host: str
    tokens: list[str] = field(default_factory=lambda: ["one"])
    server_name: str | None = None
    proxy: str | None = None
    reloads: int = 0

    async def headers(self) -> Mapping[str, str]:
        """Return the current token."""
        return {"Authorization": f"Bearer {self.tokens[0]}"}

    async def reload(self) -> None:
        """Go on to the next token."""
        self.reloads += 1
        if len(self.tokens) > 1:
            self.tokens.pop(0)

    def tls(self) -> ssl.SSLContext | None:
        """Plain http."""
        return None


@dataclass
class Stub:
    """A running stub."""

    url: str
    seen: list[Seen]
    client: KubeClient
    credentials: StubCredentials


@contextlib.asynccontextmanager
async def stub(
    handler: Handler, *, call_timeout_s: float = 5.0, trust_env: bool = False
) -> AsyncIterator[Stub]:
    """Serve *handler* for every path, and give a client of it."""
    seen: list[Seen] = []

    async def record(request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw) if raw else None
        seen.append(
            Seen(request.method, request.path, dict(request.query), dict(request.headers), body)
        )
        return await handler(request)

    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{path:.*}", record)
    async with TestServer(app) as server:
        url = str(server.make_url("/")).rstrip("/")
        credentials = StubCredentials(url)
        client = KubeClient(
            credentials, manager="tests", call_timeout_s=call_timeout_s, trust_env=trust_env
        )
        async with client:
            yield Stub(url, seen, client, credentials)


def answer(body: Any, status: int = 200, **headers: str) -> web.Response:
    """Return a JSON answer."""
    return web.json_response(body, status=status, headers=headers)


def failure(code: int, reason: str, message: str = "no", **details: str) -> web.Response:
    """Return an answer of kind Status, as the API server words refusals."""
    return answer(
        {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "code": code,
            "reason": reason,
            "message": message,
            "details": details,
        },
        code,
    )


async def cut(request: web.Request) -> web.StreamResponse:
    """Break the connection off without an answer."""
    transport = request.transport
    assert transport is not None
    transport.abort()
    return web.Response()


async def stream(request: web.Request, *lines: Any, end: bytes = b"") -> web.StreamResponse:
    """Answer a watch with *lines* and end it."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    for line in lines:
        await response.write(json.dumps(line).encode() + b"\n")
    if end:
        await response.write(end)
    await response.write_eof()
    return response
