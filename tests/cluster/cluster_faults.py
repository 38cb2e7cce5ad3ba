"""
Something between a program and the API server that delays, loses and stops what it writes.

`FaultyWay` is a small HTTP proxy on loopback. A program is given its kubeconfig instead of the real
one; reads and watches pass, and for every write a rule of the test says what becomes of it. What
was held back lands when the test says so, also when its sender is dead by then.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from aiohttp import web

from cluster_kubectl import until
from modelpool_api.names import RECORD_ANNOTATION, SLOT_ANNOTATION

T = TypeVar("T")
_WRITES = ("POST", "PUT", "PATCH", "DELETE")
_NOT_PASSED_ON = frozenset({"host", "connection", "transfer-encoding", "content-length"})


class Fate(Enum):
    """What becomes of one write."""

    PASS = "pass"
    KILL_BEFORE = "its sender is killed before it is sent"
    KILL_AFTER = "its sender is killed after it was applied, and never sees the answer"
    LOSE_ANSWER = "it is applied, and the connection breaks before the answer"
    LOSE = "the connection breaks, and it is never applied"
    HOLD = "nobody answers; it is applied when the test says so"
    CUT_AND_HOLD = "the connection breaks; it is applied when the test says so"


@dataclass(eq=False)
class Write:
    """One write as it came by."""

    method: str
    path: str
    body: Any
    at: float = field(default_factory=time.monotonic)
    fate: Fate = Fate.PASS
    status: int | None = None
    """What the API server answered; None while it was not asked."""

    @property
    def kind(self) -> str:
        """Plural of the kind, with ``/status`` behind it."""
        parts = self._parts
        return "/".join((parts[0], *parts[2:]))

    @property
    def name(self) -> str:
        """Name of the object."""
        parts = self._parts
        if len(parts) > 1:
            return parts[1]
        return str(((self.body or {}).get("metadata") or {}).get("name", ""))

    @property
    def _parts(self) -> list[str]:
        """Kind and name, and what is behind them."""
        parts = self.path.strip("/").split("/")
        parts = parts[2:] if parts[0] == "api" else parts[3:]
        return parts[2:] if parts[0] == "namespaces" and len(parts) > 2 else parts

    @property
    def record(self) -> Any:
        """The slot record that it writes; None when it writes none."""
        text = self._notes.get(RECORD_ANNOTATION)
        return None if text is None else json.loads(text)

    @property
    def replicas(self) -> int | None:
        """The replicas that it asks for, if it scales."""
        found = ((self.body or {}).get("spec") or {}).get("replicas")
        return found if self.method == "PATCH" and isinstance(found, int) else None

    @property
    def is_mark(self) -> bool:
        """Whether it marks a member and does not scale it."""
        return self.method == "PATCH" and SLOT_ANNOTATION in self._notes and self.replicas is None

    @property
    def is_renewal(self) -> bool:
        """Whether it says nothing but that somebody is still there."""
        spec = (self.body or {}).get("spec") or {}
        return (
            self.kind == "leases"
            and self.method == "PATCH"
            and set(spec) == {"renewTime"}
            and (RECORD_ANNOTATION not in self._notes)
        )

    @property
    def _notes(self) -> Any:
        return ((self.body or {}).get("metadata") or {}).get("annotations") or {}

    def __str__(self) -> str:
        """Say what it is in a few words."""
        what = f"{self.method} {self.kind} {self.name}"
        if self.record is not None:
            told = self.record
            return f"{what}: {told['phase']} {told['owner']}>{told['target']} e{told['epoch']}"
        if self.replicas is not None:
            return f"{what}: to {self.replicas}"
        return f"{what}: mark" if self.is_mark else what


Rule = Callable[[Write], Fate]


def passes(write: Write) -> Fate:
    """Let everything pass."""
    return Fate.PASS


class FaultyWay:
    """
    A way to the API server that a test can break.

    Args of the constructor:
        kubeconfig: Whose rights its users have: JSON, as the harness writes them.
        folder: For the kubeconfig of its users.

    Attributes:
        kubeconfig: What its users are given.
        rule: Says what becomes of a write; called in the thread of the proxy, one at a time.
        kill: Ends the sender at once; for the fates that say so.
        writes: Everything that came by, in order.
    """

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        self.rule: Rule = passes
        self.kill: Callable[[], object] = lambda: None
        self.writes: list[Write] = []
        self._held: list[tuple[Write, asyncio.Event]] = []
        content = json.loads(kubeconfig.read_text("utf-8"))
        cluster = content["clusters"][0]["cluster"]
        user = content["users"][0]["user"]
        self._server = cluster["server"]
        folder.mkdir(parents=True, exist_ok=True)
        self._tls = _tls(cluster, user, folder)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faulty way")
        self._thread.start()
        port = self._do(self._open())
        # The certificate is shown by us; a token is passed on as it comes.
        kept = {"token": user["token"]} if "token" in user else {}
        content["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{port}"}
        content["users"][0]["user"] = kept
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.touch(mode=0o600)
        self.kubeconfig.write_text(json.dumps(content), "utf-8")

    def close(self) -> None:
        """End it; what is held back is lost."""
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # For tests

    @property
    def held(self) -> list[Write]:
        """What is held back now."""
        return [write for write, _ in self._held]

    def release(self, which: Callable[[Write], bool] = lambda write: True) -> list[Write]:
        """Let what is held back land now, in the order in which it was sent; return it."""
        held = [each for each in self._held if which(each[0])]
        self._held = [each for each in self._held if each not in held]
        for write, event in held:
            self._loop.call_soon_threadsafe(event.set)
            until(partial(_is_answered, write), f"{write} is answered", 20)
        return [write for write, _ in held]

    def counted(self) -> list[Write]:
        """Writes so far that are not renewals."""
        return [write for write in self.writes if not write.is_renewal]

    # In the thread

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _open(self) -> int:
        connector = aiohttp.TCPConnector(limit=0, ssl=self._tls)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
            auto_decompress=False,
            trust_env=False,
        )
        self._runner = web.ServerRunner(
            web.Server(self._pass_on, access_log=None), shutdown_timeout=0.1
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def _close(self) -> None:
        await self._runner.cleanup()
        await self._session.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _pass_on(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        write: Write | None = None
        if request.method in _WRITES:
            write = Write(request.method, request.path, json.loads(body) if body else None)
            # A rule that looks at the others must not find this one among them.
            write.fate = self.rule(write)
            self.writes.append(write)
            if write.fate is Fate.KILL_BEFORE:
                self.kill()
            if write.fate in (Fate.KILL_BEFORE, Fate.LOSE):
                return _broken(request)
            if write.fate in (Fate.HOLD, Fate.CUT_AND_HOLD):
                let_go = asyncio.Event()
                self._held.append((write, let_go))
                if write.fate is Fate.CUT_AND_HOLD:
                    _broken(request)
                await let_go.wait()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _NOT_PASSED_ON}
        try:
            async with self._session.request(
                request.method,
                self._server + request.raw_path,
                headers=headers,
                data=body or None,
                allow_redirects=False,
            ) as answer:
                if write is not None:
                    return await self._answered(request, write, answer)
                return await _relay(request, answer)
        except (aiohttp.ClientError, OSError, RuntimeError):
            if write is not None and write.status is None:
                write.status = 0
            return _broken(request)

    async def _answered(
        self, request: web.BaseRequest, write: Write, answer: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        raw = await answer.read()
        if write.fate is Fate.KILL_AFTER:
            self.kill()
        write.status = answer.status
        if write.fate in (Fate.KILL_AFTER, Fate.LOSE_ANSWER, Fate.CUT_AND_HOLD):
            return _broken(request)
        return web.Response(body=raw, status=answer.status, headers=_kept(answer))


def _is_answered(write: Write) -> bool:
    return write.status is not None


async def _relay(request: web.BaseRequest, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    passed = web.StreamResponse(status=answer.status, headers=_kept(answer))
    await passed.prepare(request)
    async for chunk in answer.content.iter_any():
        await passed.write(chunk)
    await passed.write_eof()
    return passed


def _kept(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {k: v for k, v in answer.headers.items() if k.lower() not in _NOT_PASSED_ON}


def _broken(request: web.BaseRequest) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


def _tls(cluster: Any, user: Any, folder: Path) -> ssl.SSLContext:
    authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
    context = ssl.create_default_context(cadata=authority)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if "client-certificate-data" in user:
        pair = folder / "client.pem"
        pair.touch(mode=0o600)
        parts = [user["client-certificate-data"], user["client-key-data"]]
        pair.write_bytes(b"\n".join(base64.b64decode(each) for each in parts))
        context.load_cert_chain(pair)
    return context
