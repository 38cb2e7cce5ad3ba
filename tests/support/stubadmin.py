"""
An admin port on a real socket, scripted: it answers with views and writes down what was asked.

Views are made by the real scheduler's own dataclass, so that names cannot drift apart.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from modelpool_router.core.spec import Epoch, MemberName, PoolName
from modelpool_router.core.view import MemberStatus, MemberView, PoolView, SlotState


def member_view(name: str, **more: Any) -> MemberView:
    """Return an unloaded member; *more* replaces fields."""
    view = MemberView(
        name=MemberName(name),
        status=MemberStatus.UNLOADED,
        held=0,
        in_flight=0,
        parallel=4,
        oldest_hold_s=None,
        wanted=False,
        wait_s=None,
        load_estimate_s=20.0,
        load_measured=True,
        unload_estimate_s=1.0,
        backoff_s=None,
        failures=0,
        last_error="",
    )
    return replace(view, **more)


def pool_view(*members: MemberView, name: str = "gpu0", **more: Any) -> PoolView:
    """Return a cold pool; *more* replaces fields."""
    view = PoolView(
        name=PoolName(name),
        state=SlotState.COLD,
        epoch=Epoch(1),
        since_s=12.0,
        resident=None,
        incumbent=None,
        target=None,
        cause="",
        admission="open",
        closing_reason="",
        turn_left_s=None,
        deferred_reason="",
        deferred_retry_s=None,
        load_elapsed_s=None,
        load_expected_s=None,
        held=0,
        in_flight=0,
        oldest_lease_s=None,
        released=False,
        paused=False,
        withheld="",
        stopping=False,
        default=None,
        swap_budget_s=300.0,
        loads_total=0,
        swaps_total=0,
        obstacle=None,
        members=members,
    )
    return replace(view, **more)


def resident(name: str, **more: Any) -> PoolView:
    """Return a pool of alpha and beta whose resident is *name*."""
    members = [
        member_view(each, status=MemberStatus.LOADED if each == name else MemberStatus.UNLOADED)
        for each in ("alpha", "beta")
    ]
    return pool_view(*members, state=SlotState.RESIDENT, resident=name, **more)


def loading(name: str, elapsed_s: float, expected_s: float = 20.0) -> PoolView:
    """Return a pool of alpha and beta that loads *name*."""
    members = [
        member_view(each, status=MemberStatus.LOADING if each == name else MemberStatus.UNLOADED)
        for each in ("alpha", "beta")
    ]
    return pool_view(
        *members,
        state=SlotState.LOADING,
        target=name,
        load_elapsed_s=elapsed_s,
        load_expected_s=expected_s,
    )


def unloading(name: str, target: str | None = None) -> PoolView:
    """Return a pool of alpha and beta that unloads *name* for *target*."""
    return replace(
        resident(name),
        state=SlotState.UNLOADING,
        resident=None,
        incumbent=MemberName(name),
        target=None if target is None else MemberName(target),
    )


class _Server(ThreadingHTTPServer):
    def server_bind(self) -> None:
        """Bind without asking the name service who we are, which can take seconds."""
        TCPServer.server_bind(self)


class StubAdmin:
    """What is served and what was asked."""

    def __init__(self, token: str | None) -> None:
        self.token = token
        self.states: list[list[PoolView]] = [[pool_view(member_view("alpha"))]]
        """One is used up per look at the state; the last one stays."""
        self.events: list[tuple[str, Mapping[str, Any]]] = []
        self.silence_s = 0.0
        """How long nothing is sent between two events."""
        self.sentences = ["alpha is resident: one more is served at once"]
        self.acts: list[tuple[str, str, str | None]] = []
        """(pool, verb, member) of every call that changes something."""
        self.agents: set[str] = set()
        self.looks = 0
        self.url = ""
        self.address = ""

    def views(self) -> list[PoolView]:
        """Return the current views."""
        return self.states[0]

    def look(self) -> list[PoolView]:
        """Return the current views and go on to the next."""
        self.looks += 1
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]


@contextmanager
def stub_admin(token: str | None = None) -> Iterator[StubAdmin]:
    """Serve a `StubAdmin` on a free port of this machine."""
    stub = StubAdmin(token)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Keep the output of tests clean."""

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            stub.agents.add(self.headers.get("User-Agent", ""))
            match parts.path:
                case "/api/v1/state":
                    self._json(200, _snapshot(stub.look()))
                case "/api/v1/why":
                    self._why(parse_qs(parts.query)["model"][0])
                case "/api/v1/events":
                    self._events()
                case _:
                    self._error(404, "unknown_url", "The admin port has no such path.")

        def do_POST(self) -> None:
            if stub.token and self.headers.get("Authorization") != f"Bearer {stub.token}":
                self._error(401, "invalid_admin_token", "Send the admin token.")
                return
            parts = urlsplit(self.path)
            *_, pool, verb = parts.path.split("/")
            member = parse_qs(parts.query).get("member", [None])[0]
            views = [view for view in stub.views() if view.name == pool]
            if not views:
                self._error(404, "pool_not_found", "No such pool. There are: gpu0.")
                return
            stub.acts.append((pool, verb, member))
            self._json(202, {"pool": pool, "view": views[0]})

        def _why(self, model: str) -> None:
            for view in stub.views():
                if any(member.name == model for member in view.members):
                    told = {"model": model, "pool": view.name, "member": model, "view": view}
                    self._json(200, {**told, "sentences": stub.sentences})
                    return
            self._error(404, "model_not_found", "No member is called so. There are: alpha.")

        def _events(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            frames = [("snapshot", _snapshot(stub.views())), *stub.events]
            for number, (kind, data) in enumerate(frames):
                encoded = msgspec.json.encode(data).decode()
                frame = f": keepalive\n\nevent: {kind}\nid: {number}\ndata: {encoded}\n\n"
                self.wfile.write(frame.encode())
                threading.Event().wait(stub.silence_s)

        def _json(self, status: int, value: object) -> None:
            body = msgspec.json.encode(value)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _error(self, status: int, code: str, message: str) -> None:
            self._json(status, {"error": {"message": message, "code": code}})

    server = _Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    stub.address = f"127.0.0.1:{server.server_address[1]}"
    stub.url = f"http://{stub.address}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _snapshot(views: list[PoolView]) -> dict[str, Any]:
    held = sum(view.held for view in views)
    return {
        "version": "0.1.0",
        "uptime_s": 1.0,
        "router": {"held": held, "draining": False},
        "pools": json.loads(msgspec.json.encode(views)),
    }
