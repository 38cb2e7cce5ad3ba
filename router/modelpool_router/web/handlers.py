"""
The data port: path, key, body, model name, then `dispatch`. Everything cheap comes first.

One handler for every request that the front let through. It registers no demand and opens no
connection before the request was read whole and understood.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import msgspec
from aiohttp import web

from ..core import body as bodies
from ..core.body import BadBody, BodyFacts
from ..core.catalog import Catalog, Route, UnknownModel
from ..core.paths import Kind, PathRule, find_path
from ..core.spec import HoldLedger
from ..runtime.pools import Pools
from .account import Accountant, RequestRecord
from .auth import Caller, Keys
from .begun import Begun
from .dispatch import Dispatcher, DispatchFailed, Job
from .errors import ApiError, family_of, render
from .intake import Body, read_body
from .models import model_item, model_list
from .request import Request
from .surface import Surface

Readiness = Callable[[], tuple[bool, Mapping[str, str]]]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a request asks for, once its body was understood."""

    route: Route
    facts: BodyFacts
    name: str


class DataPort:
    """
    Handler of the data port.

    Attributes:
        surface: Names, limits and targets in force; replaced on reload.
    """

    def __init__(
        self,
        surface: Surface,
        *,
        pools: Pools,
        dispatcher: Dispatcher,
        keys: Keys,
        ledger: HoldLedger,
        accountant: Accountant,
        ready: Readiness,
    ) -> None:
        self.surface = surface
        self._pools = pools
        self._dispatcher = dispatcher
        self._keys = keys
        self._ledger = ledger
        self._accountant = accountant
        self._ready = ready
        self._loop = asyncio.get_running_loop()
        self._created = int(time.time())
        self.active = 0
        """Requests under way, the small answers not counted."""
        self._idle = asyncio.Event()

    @property
    def is_idle(self) -> bool:
        """True when no request is under way."""
        return self.active == 0

    async def until_idle(self) -> None:
        """Return when no request is under way."""
        while self.active:  # (the event tells of the past: nobody clears it for a new request)
            self._idle.clear()
            await self._idle.wait()

    async def __call__(self, request: Request) -> web.StreamResponse:
        """Answer one request."""
        rule = find_path(request.route_path)
        if rule is not None and request.method in rule.methods:
            if rule.kind is Kind.HEALTH:
                return self._health(request)
            if rule.kind in (Kind.MODELS, Kind.MODEL):
                return self._models(request, rule)
        record = RequestRecord(request, self._loop.time())
        return await self._accounted(request, record, self._infer(request, record, rule))

    async def go_on(
        self,
        request: Request,
        rule: PathRule,
        caller: Caller,
        route: Route,
        body: Body,
        begun: Begun,
        *,
        name: str,
        stream: bool,
    ) -> web.StreamResponse:
        """Answer a request that the short way began (`short.General`)."""
        record = RequestRecord(request, begun.arrived_at)
        record.key_id, record.model = caller.key_id, name
        job = _job(request, record, self.surface, rule, route, caller, body, name, stream=stream)
        with body:
            return await self._accounted(request, record, self._dispatcher.serve(job, begun))

    def ended(self) -> None:
        """One request less is under way."""
        self.active -= 1
        if not self.active:
            self._idle.set()

    async def _accounted(
        self,
        request: Request,
        record: RequestRecord,
        work: Coroutine[Any, Any, web.StreamResponse],
    ) -> web.StreamResponse:
        """Do the *work*, answer its errors, and account for the request exactly once."""
        self.active += 1
        try:
            return await work
        except DispatchFailed as error:
            record.failed(error)
            return self._refuse(request, error)
        except ApiError as error:
            record.refused(error)
            return self._refuse(request, error)
        except (asyncio.CancelledError, ConnectionError):
            record.outcome, record.code = "client_gone", "client_gone"
            raise
        except Exception:
            record.refused(ApiError.of("internal_error", ""))
            raise
        finally:
            self.ended()
            self._accountant.close(record)

    def _refuse(self, request: Request, error: ApiError) -> web.StreamResponse:
        return render(error, family_of(request.route_path), request.request_id)

    # ------------------------------------------------------------------ small answers

    def _health(self, request: Request) -> web.Response:
        if request.route_path == "/livez":
            return web.json_response({"status": "ok"})
        ready, checks = self._ready()
        status = {"status": "ok" if ready else "unavailable", "checks": dict(checks)}
        return web.json_response(status, status=200 if ready else 503)

    def _models(self, request: Request, rule: PathRule) -> web.StreamResponse:
        try:
            caller = self._keys.identify(request.headers)
            catalog, views = self.surface.catalog, self._pools.views()
            if rule.kind is Kind.MODELS:
                answer = model_list(views, catalog.visible(caller.allowed), created=self._created)
            else:
                name = unquote(rule.argument)
                entry = catalog.describe(name, caller.allowed)
                answer = model_item(views, entry, name, created=self._created)
        except UnknownModel as error:
            return self._refuse(request, _not_found(error))
        except ApiError as error:
            return self._refuse(request, error)
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

    # ------------------------------------------------------------------ inference

    async def _infer(
        self, request: Request, record: RequestRecord, rule: PathRule | None
    ) -> web.StreamResponse:
        surface = self.surface
        if rule is None or (rule.kind is Kind.PASSTHROUGH and not surface.passthrough):
            raise ApiError.of(
                "unknown_url",
                "Unknown URL. Models are listed at /v1/models; "
                "chat goes to POST /v1/chat/completions.",
            )
        if request.method not in rule.methods:
            allow = ", ".join(rule.methods)
            raise ApiError.of(
                "method_not_allowed", f"This URL takes {allow}.", headers={"Allow": allow}
            )
        caller = self._keys.identify(request.headers)
        record.key_id = caller.key_id
        if rule.kind is Kind.PASSTHROUGH:
            return await self._pass_through(request, record, surface, rule, caller)
        with await read_body(request, surface.intake, self._ledger) as body:
            wanted = self._understand(request, surface.catalog, rule, caller, body)
            record.model = wanted.name
            served = wanted.route.served_model
            if served is not None and wanted.facts.model is not None:
                _rename(request, body, served)
            return await self._dispatcher.serve(
                _job(
                    request,
                    record,
                    surface,
                    rule,
                    wanted.route,
                    caller,
                    body,
                    wanted.name,
                    stream=wanted.facts.stream,
                )
            )

    def _understand(
        self, request: Request, catalog: Catalog, rule: PathRule, caller: Caller, body: Body
    ) -> _Wanted:
        try:
            if _is_multipart(request):
                facts = bodies.inspect_multipart(
                    request.headers["Content-Type"],
                    body.view(),
                    model_required=rule.model_required,
                )
            else:
                # Whatever the Content-Type says or does not say: it is read as JSON.
                facts = bodies.inspect_json(body.view(), model_required=rule.model_required)
        except BadBody as error:
            raise ApiError.from_body(error) from None
        try:
            if facts.model is not None:
                return _Wanted(catalog.find(facts.model, caller.allowed), facts, facts.model)
        except UnknownModel as error:
            raise _not_found(error) from None
        route = catalog.only(caller.allowed) or self._resident_for(catalog, caller)
        if route is None:
            raise ApiError.of(
                "missing_required_parameter",
                "Several models could be meant and none is loaded; "
                "add a `model` parameter to the body.",
                "model",
            )
        return _Wanted(route, facts, route.member)

    def _resident_for(self, catalog: Catalog, caller: Caller) -> Route | None:
        """Return the one resident that the caller may use, for bodies without a model."""
        residents = {(v.name, v.resident) for v in self._pools.views() if v.resident is not None}
        routes = [
            entry.route
            for entry in catalog.visible(caller.allowed)
            if (entry.route.pool, entry.route.member) in residents
        ]
        return routes[0] if len(routes) == 1 else None

    async def _pass_through(
        self,
        request: Request,
        record: RequestRecord,
        surface: Surface,
        rule: PathRule,
        caller: Caller,
    ) -> web.StreamResponse:
        """``/upstream/{member}/{path}``: through the same gate as every other request."""
        found: tuple[Route, str, str] | None = None
        missing: UnknownModel | None = None
        argument = rule.argument + "/"
        for at in [i for i, letter in enumerate(argument) if letter == "/"]:
            name = unquote(argument[:at])
            try:
                # Names may hold slashes: the longest one that exists is meant.
                found = surface.catalog.find(name, caller.allowed), rule.argument[at:], name
            except UnknownModel as error:
                missing = missing or error
        if found is None:
            assert missing is not None
            raise _not_found(missing)
        route, path, name = found
        record.model = name
        with await read_body(request, surface.intake, self._ledger) as body:
            return await self._dispatcher.serve(
                Job(
                    request,
                    record,
                    surface,
                    route,
                    caller,
                    body,
                    path_qs=(path or "/") + request.route_query,
                    dialect="other",
                    stream=False,
                    name=name,
                )
            )


def _job(
    request: Request,
    record: RequestRecord,
    surface: Surface,
    rule: PathRule,
    route: Route,
    caller: Caller,
    body: Body,
    name: str,
    *,
    stream: bool,
) -> Job:
    """Return what is to be done for a body on the path of *rule*, whoever read it."""
    return Job(
        request,
        record,
        surface,
        route,
        caller,
        body,
        path_qs=rule.upstream,
        dialect=rule.dialect,
        stream=stream and rule.may_stream,
        name=name,
    )


def _is_multipart(request: Request) -> bool:
    return request.headers.get("Content-Type", "")[:19].lower() == "multipart/form-data"


def _rename(request: Request, body: Body, served_model: str) -> None:
    """Put the name in place that the member itself knows the model by."""
    if _is_multipart(request):
        span = bodies.multipart_model_span(request.headers["Content-Type"], body.view())
        body.replace(span, served_model.encode())
    else:
        body.replace(bodies.model_span(body.view()), bodies.encode_name(served_model))


def _not_found(error: UnknownModel) -> ApiError:
    return ApiError.of(error.code, error.message, error.param)
