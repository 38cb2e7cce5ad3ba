"""
A small application made of the front's parts: hardened server, keys, bodies, catalogue, errors.

Stands in for the whole router where only the front is under test; nothing behind it swaps.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from fronts import is_own
from modelpool_router.core.body import BadBody, BodyFacts, inspect_json, inspect_multipart
from modelpool_router.core.catalog import Catalog, Entry, Route, UnknownModel
from modelpool_router.core.spec import Bounds, HoldLedger, MemberName, PoolName
from modelpool_router.web.auth import KeyRing, Keys
from modelpool_router.web.cors import Cors
from modelpool_router.web.errors import ApiError
from modelpool_router.web.head import unknown_url
from modelpool_router.web.intake import IntakeLimits, read_body
from modelpool_router.web.request import Request
from modelpool_router.web.server import FrontServer, ServerOptions, make_server

KEY = "sk-good-5f1c"
LIMITED_KEY = "sk-limited-77ab"
KEY_FILE = f"""
- {{name: everything, key: {KEY}}}
- {{name: limited, key: {LIMITED_KEY}, models: [m]}}
"""
ORIGIN = "https://ui.example"
POSTS = frozenset(
    {"/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/audio/transcriptions"}
)


@dataclass(frozen=True, slots=True)
class Front:
    """Where a front under test listens, and what is known of its inside."""

    host: str
    port: int
    stub: StubFront | None
    """None for a whole router."""


@dataclass(slots=True)
class StubFront:
    """State of the stub: what got as far as being wanted."""

    limits: IntakeLimits
    options: ServerOptions
    ledger: HoldLedger = field(default_factory=lambda: HoldLedger(Bounds()))
    keys: Keys = field(default_factory=lambda: Keys(KeyRing.parse(KEY_FILE)))
    demands: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    hold: asyncio.Event | None = None
    """When set, requests for a model wait here, as held requests do."""
    held: int = 0
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """A held request was cancelled."""
    catalog: Catalog = field(
        default_factory=lambda: Catalog(
            [
                Entry(Route(MemberName("m"), PoolName("gpu0")), ("allowed",)),
                Entry(Route(MemberName("m2"), PoolName("gpu0")), ("other",)),
            ]
        )
    )

    async def handle(self, request: Request) -> web.StreamResponse:
        """Do what the router's handlers do, without a pool."""
        path = request.route_path
        if path == "/v1/models" or path.startswith("/v1/models/"):
            self._only(request, "GET", "HEAD")
            caller = self.keys.identify(request.headers)
            names = [entry.route.member for entry in self.catalog.visible(caller.allowed)]
            return _json({"object": "list", "data": [{"id": name} for name in names]})
        if path not in POSTS:
            raise unknown_url()
        self._only(request, "POST")
        caller = self.keys.identify(request.headers)
        with await read_body(request, self.limits, self.ledger) as body:
            try:
                facts = self._facts(request, body.view())
            except BadBody as error:
                raise ApiError.from_body(error) from None
            assert facts.model is not None
            try:
                self.catalog.find(facts.model, caller.allowed)
            except UnknownModel as error:
                raise ApiError.of(error.code, error.message, error.param) from None
            self.demands.append(facts.model)
            sent = b"".join(body.chunks())
            self.bodies.append(sent)
            if self.hold is not None:
                await self._hold(self.hold)
            return _json({"model": facts.model, "stream": facts.stream, "size": len(sent)})

    async def _hold(self, release: asyncio.Event) -> None:
        self.held += 1
        self.arrived.set()
        try:
            await release.wait()
        except asyncio.CancelledError:
            self.left.set()
            raise
        finally:
            self.held -= 1

    @staticmethod
    def _facts(request: Request, view: object) -> BodyFacts:
        kind = request.headers.get("Content-Type", "")
        if kind.lower().startswith("multipart/form-data"):
            return inspect_multipart(kind, view)  # type: ignore[arg-type]
        return inspect_json(view)  # type: ignore[arg-type]

    @staticmethod
    def _only(request: Request, *methods: str) -> None:
        if request.method not in methods:
            raise ApiError.of(
                "method_not_allowed",
                "This URL has other methods.",
                headers={"Allow": ", ".join(methods)},
            )


@asynccontextmanager
async def stub_front(
    *, limits: IntakeLimits | None = None, options: ServerOptions | None = None
) -> AsyncIterator[tuple[Front, StubFront, FrontServer]]:
    """Run a stub on a free port of this machine."""
    stub = StubFront(limits or IntakeLimits(), options or ServerOptions())
    options = stub.options
    server = make_server(
        stub.handle,
        ServerOptions(
            silent_s=options.silent_s,
            head_s=options.head_s,
            keep_alive_s=options.keep_alive_s,
            linger_s=options.linger_s,
            max_connections=options.max_connections,
            own_front=is_own(),
            cors=options.cors if options.cors.origins else Cors(frozenset({ORIGIN})),
            on_refused=stub.refused.append,
        ),
    )
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    host, port = listener.sockets[0].getsockname()[:2]
    try:
        yield Front(host, port, stub), stub, server
    finally:
        listener.close()
        await server.shutdown(0.5)
        await listener.wait_closed()


def _json(value: object) -> web.Response:
    return web.Response(body=json.dumps(value).encode(), content_type="application/json")
