"""
The admin port: metrics, state, events, and the few verbs of a person who looks after a pool.

It shows no prompts, keys or command lines. Verbs are events for a pool's scheduler, so they obey
the same rules as demand: nothing here moves a slot by itself.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec
from aiohttp import ClientConnectionResetError, web

from ..core.events import Event, LoadAsked, Paused, Resumed, UnloadAsked
from ..core.spec import MemberName, PoolName
from ..core.view import PoolView
from ..core.why import why
from ..telemetry import Event as Published
from ..telemetry import EventHub, Metrics, Subscription, SubscriptionsFull
from ..telemetry.events import KEPT_SWAPS, MAX_SUBSCRIBERS

log = logging.getLogger(__name__)

KEEPALIVE_S = 15.0
"""Pause between comments on a quiet event stream: shorter than what proxies allow."""
WRITE_S = 30.0
"""A watcher that takes no byte for so long is let go."""

_TYPES: Final = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_HEADERS: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AdminTarget(Protocol):
    """What the admin port looks at and talks to: the running router."""

    @property
    def draining(self) -> bool:
        """Whether the router goes down."""
        ...

    def views(self) -> Sequence[PoolView]:
        """Return all pools as they are now."""
        ...

    def tell(self, pool: PoolName, event: Event) -> None:
        """Hand *event* to the scheduler of *pool* and carry out what follows, now."""
        ...

    def find(self, model: str) -> tuple[PoolName, MemberName] | None:
        """Return who serves *model*, a member's name or alias; None for upstreams and others."""
        ...

    def router_state(self) -> Mapping[str, Any]:
        """Return ``held``, ``held_bytes``, ``bounds``, ``draining``: JSON values."""
        ...

    def ready(self) -> tuple[bool, Mapping[str, str]]:
        """Return whether requests should be sent here, and each check with its state."""
        ...


class _AdminError(Exception):
    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param


def build_admin(
    target: AdminTarget,
    hub: EventHub,
    metrics: Metrics,
    *,
    token: Callable[[], str | None],
    version: str,
    keepalive_s: float = KEEPALIVE_S,
) -> web.Application:
    """
    Return the application of the admin listener.

    *token* is asked at every mutating call, so that it can be replaced while we run; None or
    empty = no token is needed. Shutting the application down ends the event streams.
    """
    admin = _Admin(target, hub, metrics, token, version, keepalive_s)
    app = web.Application(middlewares=[_errors], client_max_size=64 * 1024)
    app.router.add_get("/metrics", admin.metrics)
    app.router.add_get("/livez", admin.livez)
    app.router.add_get("/readyz", admin.readyz)
    app.router.add_get("/api/v1/state", admin.state)
    app.router.add_get("/api/v1/events", admin.events, allow_head=False)
    app.router.add_get("/api/v1/swaps", admin.swaps)
    app.router.add_get("/api/v1/why", admin.why)
    for verb in ("load", "unload", "pause", "resume"):
        app.router.add_post(f"/api/v1/pools/{{pool}}/{{verb:{verb}}}", admin.act)
    app.on_shutdown.append(admin.shutdown)
    app.on_response_prepare.append(_name_no_software)
    return app


async def _name_no_software(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers.pop("Server", None)


class _Admin:
    def __init__(
        self,
        target: AdminTarget,
        hub: EventHub,
        metrics: Metrics,
        token: Callable[[], str | None],
        version: str,
        keepalive_s: float,
    ) -> None:
        self._target = target
        self._hub = hub
        self._metrics = metrics
        self._token = token
        self._version = version
        self._keepalive_s = keepalive_s
        self._started = time.monotonic()

    async def shutdown(self, _app: web.Application) -> None:
        """End the event streams: they would keep the listener open for ever."""
        self._hub.close()

    # Looking

    async def metrics(self, request: web.Request) -> web.Response:
        body, content_type = self._metrics.render(request.headers.get("Accept", ""))
        response = web.Response(body=body, headers={**_HEADERS, "Content-Type": content_type})
        response.enable_compression()
        return response

    async def livez(self, _request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def readyz(self, _request: web.Request) -> web.Response:
        ready, checks = self._target.ready()
        obstacles = {v.name: v.obstacle for v in self._target.views() if v.obstacle is not None}
        told = {
            "status": "ok" if ready else "unavailable",
            "checks": dict(checks),
            "obstacles": obstacles,
        }
        return _json(told, status=200 if ready else 503)

    async def state(self, _request: web.Request) -> web.Response:
        return _json(self._snapshot())

    async def swaps(self, request: web.Request) -> web.Response:
        limit = request.query.get("limit", str(KEPT_SWAPS))
        if not limit.isdecimal() or len(limit) > 9:
            raise _AdminError(400, "invalid_type", "limit is a number of swaps.", "limit")
        return _json({"swaps": self._hub.swaps()[: int(limit)]})

    async def why(self, request: web.Request) -> web.Response:
        model = request.query.get("model")
        if not model:
            raise _AdminError(400, "missing_required_parameter", "Say which: ?model=NAME.", "model")
        found = self._target.find(model)
        if found is None:
            names = [member.name for view in self._target.views() for member in view.members]
            raise _AdminError(
                404,
                "model_not_found",
                f"No member is called so. There are: {', '.join(names)}.",
                "model",
            )
        pool, member = found
        view = self._view(pool)
        return _json(
            {
                "model": model,
                "pool": pool,
                "member": member,
                "sentences": why(view, member),
                "view": view,
            }
        )

    async def events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={
                **_HEADERS,
                "Content-Type": "text/event-stream; charset=utf-8",
                "X-Accel-Buffering": "no",
            }
        )
        try:
            with self._hub.subscribe(request.headers.get("Last-Event-ID")) as subscription:
                await response.prepare(request)
                # Who resumes gets what was missed first, then how things are now; a snapshot in
                # front of older events would be taken back by them.
                gap = "Last-Event-ID" in request.headers and not subscription.resumed
                for event in subscription.take():
                    await _send(response, _event_frame(event))
                await _send(response, self._snapshot_frame(gap=gap))
                while (frame := await self._next_frame(subscription)) is not None:
                    await _send(response, frame)
        except SubscriptionsFull:
            raise _AdminError(
                503, "too_many_watchers", f"{MAX_SUBSCRIBERS} streams are open already."
            ) from None
        except (ClientConnectionResetError, ConnectionResetError, TimeoutError):
            pass  # the watcher left, or takes nothing
        return response

    # Acting

    async def act(self, request: web.Request) -> web.Response:
        self._admit(request)
        view = self._view(PoolName(request.match_info["pool"]))
        if self._target.draining:
            raise _AdminError(503, "pool_draining", "The router goes down.")
        self._target.tell(view.name, self._asked(request, view))
        return _json({"pool": view.name, "view": self._view(view.name)}, status=202)

    def _asked(self, request: web.Request, view: PoolView) -> Event:
        match request.match_info["verb"]:
            case "load":
                return LoadAsked(self._member(request, view))
            case "unload":
                return UnloadAsked()
            case "pause":
                return Paused()
            case _:
                return Resumed()

    def _member(self, request: web.Request, view: PoolView) -> MemberName:
        name = request.query.get("member")
        names = ", ".join(member.name for member in view.members)
        if not name:
            raise _AdminError(
                400,
                "missing_required_parameter",
                f"Say which member: ?member=NAME. {view.name} has: {names}.",
                "member",
            )
        found = self._target.find(name)
        if found is None or found[0] != view.name:
            raise _AdminError(
                404, "member_not_found", f"{view.name} has no such member, but: {names}.", "member"
            )
        return found[1]

    def _admit(self, request: web.Request) -> None:
        """Refuse mutating calls of strangers, and of web pages that a person happens to visit."""
        token = self._token()
        if token:
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            same = hmac.compare_digest(
                given.strip().encode("utf-8", "surrogateescape"),
                token.encode("utf-8", "surrogateescape"),
            )
            if scheme.lower() != "bearer" or not same:
                raise _AdminError(
                    401,
                    "invalid_admin_token",
                    "Send the admin token: Authorization: Bearer TOKEN.",
                )
        origin = request.headers.get("Origin")
        if origin is None and request.headers.get("Sec-Fetch-Site", "none") in (
            "none",
            "same-origin",
        ):
            return  # not a page of another site
        # A page of ours: same origin, and marked by something a foreign page cannot send without
        # asking first. Where no token is set the host must be an address or localhost: a name
        # could be a stranger's that was made to point here.
        ours = origin is not None and origin.partition("://")[2] == request.host
        marked = request.content_type == "application/json" or (
            "X-Requested-With" in request.headers
        )
        if not (ours and marked and (token or _is_address(request.host))):
            raise _AdminError(
                403, "cross_site_request", "Web pages of other sites may not do this."
            )

    # Private

    def _view(self, pool: PoolName) -> PoolView:
        views = self._target.views()
        for view in views:
            if view.name == pool:
                return view
        names = ", ".join(view.name for view in views)
        raise _AdminError(404, "pool_not_found", f"No such pool. There are: {names}.", "pool")

    def _snapshot(self) -> dict[str, Any]:
        return {
            "version": self._version,
            "uptime_s": round(time.monotonic() - self._started, 3),
            "last_event_id": self._hub.last_id,
            "router": dict(self._target.router_state()),
            "pools": self._target.views(),
        }

    def _snapshot_frame(self, *, gap: bool) -> bytes:
        data = msgspec.json.encode({**self._snapshot(), "gap": gap})
        return _frame("snapshot", self._hub.last_id, data)

    async def _next_frame(self, subscription: Subscription) -> bytes | None:
        try:
            async with asyncio.timeout(self._keepalive_s):
                event = await subscription.next()
        except TimeoutError:
            return b": keepalive\n\n"
        if event is not None:
            return _event_frame(event)
        return None if subscription.closed else self._snapshot_frame(gap=True)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except _AdminError as error:
        return _error(error)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        response = _error(_AdminError(405, "method_not_allowed", f"Allowed here: {allowed}."))
        response.headers["Allow"] = allowed
        return response
    except web.HTTPNotFound:
        return _error(_AdminError(404, "unknown_url", "The admin port has no such path."))
    except web.HTTPException as error:
        return _error(_AdminError(error.status, "invalid_request", error.reason))
    except Exception:
        # Last stop of a request: aiohttp would answer in HTML.
        log.exception("admin call failed")
        return _error(_AdminError(500, "internal_error", "This is a fault of the router."))


def _error(error: _AdminError) -> web.Response:
    server = "server_error" if error.status >= 500 else "invalid_request_error"
    told = {
        "message": error.message,
        "type": _TYPES.get(error.status, server),
        "param": error.param,
        "code": error.code,
    }
    response = _json({"error": told}, status=error.status)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _json(value: object, *, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value),
        status=status,
        headers={**_HEADERS, "Content-Type": "application/json"},
    )


def _event_frame(event: Published) -> bytes:
    return _frame(event.kind, event.id, event.encoded())


def _frame(kind: str, id_: str, data: bytes) -> bytes:
    # JSON holds no raw line break, so one data line is enough.
    return b"event: %b\nid: %b\ndata: %b\n\n" % (kind.encode(), id_.encode(), data)


async def _send(response: web.StreamResponse, data: bytes) -> None:
    async with asyncio.timeout(WRITE_S):
        await response.write(data)


def _is_address(host: str) -> bool:
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
