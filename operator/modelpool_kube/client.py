"""
The real API server, over aiohttp, with the credentials that kubernetes-asyncio finds.

kubernetes-asyncio knows kubeconfigs, exec plugins and in-cluster files. Its request path is not
used: no time limit by default, a patch content type guessed from the body, a watch that dials
again without pause, proxies taken from the environment unasked. `tests/kube/test_client_library.py`
pins each of these, so that we notice when one is mended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import aiohttp

from . import credentials
from .credentials import Credentials
from .errors import (
    Gone,
    KubeError,
    Timeout,
    Unanswered,
    Unauthorized,
    Unavailable,
    from_status,
)
from .kinds import Json, Kind
from .port import Listing, WatchEvent
from .wire import Lines, answer, event

log = logging.getLogger(__name__)

MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"

CALL_TIMEOUT_S = 10.0
"""Longest wait for the answer to one call; lists of thousands of objects fit."""
WATCH_MARGIN_S = 15.0
"""How much longer than the server's own limit a watch may be silent until it counts as dead."""
PAGE = 500
LIST_ATTEMPTS = 3
RENEWAL_PAUSE_S = 30.0
"""Least time between two attempts to find a new certificate authority."""
_WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})


class KubeClient:
    """
    The API server behind the credentials *found*; a `port.ClusterPort`.

    Made by `connect`. Must be closed.
    """

    def __init__(
        self,
        found: Credentials,
        *,
        manager: str,
        call_timeout_s: float = CALL_TIMEOUT_S,
        trust_env: bool = False,
    ) -> None:
        self._credentials = found
        self._manager = manager
        self._call_timeout_s = call_timeout_s
        self._trust_env = trust_env
        self._session: aiohttp.ClientSession | None = None
        self._reloading = asyncio.Lock()
        self._reloads = 0
        self._renewed_at: float | None = None
        self._retired: list[aiohttp.ClientSession] = []

    async def __aenter__(self) -> KubeClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        self._retire()
        while self._retired:
            await self._retired.pop().close()

    # What a ClusterPort can do

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Json:
        """Return one object."""
        return await self._call("GET", kind.path(namespace, name))

    async def list(
        self, kind: Kind, namespace: str | None, *, labels: str = "", fields: str = ""
    ) -> Listing:
        """Return all objects that match, page by page."""
        path = kind.path(namespace)
        for _ in range(LIST_ATTEMPTS):
            items: list[Json] = []
            token = ""
            while True:
                params = _selectors(labels, fields) | {"limit": str(PAGE)}
                if token:
                    params["continue"] = token
                try:
                    page = await self._call("GET", path, params=params)
                except Gone:
                    break  # the pages have outlived their version: from the start
                for item in page.get("items") or []:
                    # Inside lists the server leaves these two out.
                    items.append({"apiVersion": kind.api_version, "kind": kind.kind, **item})
                meta = page.get("metadata") or {}
                token = meta.get("continue") or ""
                if not token:
                    return Listing(tuple(items), str(meta.get("resourceVersion", "")))
        raise Unavailable("the list expired while it was read", call=f"GET {path}")

    async def watch(
        self,
        kind: Kind,
        namespace: str | None,
        *,
        since: str,
        labels: str = "",
        fields: str = "",
        timeout_s: float = 270.0,
    ) -> AsyncGenerator[WatchEvent, None]:
        """Report changes after *since* until the server ends the watch."""
        path = kind.path(namespace)
        call = f"WATCH {path}"
        params = _selectors(labels, fields) | {
            "watch": "1",
            "resourceVersion": since,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, int(timeout_s))),
        }
        # The server ends the watch; this limit is for one that cannot tell us so any more. It is
        # around our own waiting alone: what the caller does between two events is no silence.
        deadline = asyncio.get_running_loop().time() + timeout_s + WATCH_MARGIN_S
        lines = Lines(call)
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(self._call_timeout_s):
                    response = await self._open(stack, "GET", path, params)
                    if response.status != 200:
                        body = await response.read()
                        raise from_status(response.status, body, call=call, is_write=False)
                while True:
                    async with asyncio.timeout_at(deadline):
                        chunk = await response.content.readany()
                    if not chunk:
                        return
                    for line in lines.feed(chunk):
                        yield event(line, call)
        except TimeoutError:
            raise Timeout("the watch fell silent", call=call) from None
        except aiohttp.ClientSSLError as error:
            await self._renew()
            raise Unavailable(_said(error), call=call) from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(_said(error), call=call) from error

    async def create(self, kind: Kind, namespace: str | None, body: Json) -> Json:
        """Create an object."""
        return await self._call(
            "POST", kind.path(namespace), body=body, params={"fieldManager": self._manager}
        )

    async def patch_merge(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        patch: Json,
        *,
        version: str | None = None,
    ) -> Json:
        """Merge into an object."""
        return await self._patch(kind.path(namespace, name), patch, version)

    async def patch_status(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        patch: Json,
        *,
        version: str | None = None,
    ) -> Json:
        """Merge into a status."""
        return await self._patch(kind.path(namespace, name, "status"), patch, version)

    async def _patch(self, path: str, patch: Json, version: str | None) -> Json:
        if version is not None:
            patch = {**patch, "metadata": {**patch.get("metadata", {}), "resourceVersion": version}}
        return await self._call(
            "PATCH",
            path,
            body=patch,
            content_type=MERGE_PATCH,
            params={"fieldManager": self._manager},
        )

    async def patch_json(
        self, kind: Kind, namespace: str | None, name: str, operations: Sequence[Json]
    ) -> Json:
        """Apply JSON patch *operations*; a failed ``test`` is Invalid."""
        return await self._call(
            "PATCH",
            kind.path(namespace, name),
            body=[*operations],
            content_type=JSON_PATCH,
            params={"fieldManager": self._manager},
        )

    async def apply(
        self, kind: Kind, namespace: str | None, name: str, body: Json, *, force: bool = False
    ) -> Json:
        """Apply *body* on the server's side under our field manager; *force* takes fields over."""
        return await self._call(
            "PATCH",
            kind.path(namespace, name),
            body=body,
            content_type=APPLY_PATCH,
            params={"fieldManager": self._manager, "force": "true" if force else "false"},
        )

    async def delete(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        *,
        uid: str | None = None,
        version: str | None = None,
        grace_s: int | None = None,
    ) -> None:
        """Ask for an object to be deleted."""
        options: Json = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
        }
        conditions = {"uid": uid, "resourceVersion": version}
        if uid is not None or version is not None:
            options["preconditions"] = {k: v for k, v in conditions.items() if v is not None}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        await self._call("DELETE", kind.path(namespace, name), body=options)

    def now(self) -> float:
        """Return monotonic seconds."""
        return time.monotonic()

    def wall(self) -> datetime:
        """Return the aware UTC time."""
        return datetime.now(UTC)

    # Requests

    async def _call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> Json:
        call = f"{method} {path}"
        is_write = method in _WRITES
        reloads = self._reloads
        try:
            return await self._once(call, method, path, params or {}, body, content_type, is_write)
        except Unauthorized:
            # Refused before anything was done, so the same request may go out again.
            await self._reload(reloads)
        return await self._once(call, method, path, params or {}, body, content_type, is_write)

    async def _once(
        self,
        call: str,
        method: str,
        path: str,
        params: Mapping[str, str],
        body: Any,
        content_type: str,
        is_write: bool,
    ) -> Json:
        silent: type[KubeError] = Unanswered if is_write else Timeout
        broken: type[KubeError] = Unanswered if is_write else Unavailable
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        try:
            async with asyncio.timeout(self._call_timeout_s):
                async with contextlib.AsyncExitStack() as stack:
                    response = await self._open(stack, method, path, params, data, content_type)
                    raw = await response.read()
        except aiohttp.ClientSSLError as error:
            await self._renew()
            raise Unavailable(_said(error), call=call) from error
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            # No connection, so nothing was sent.
            raise Unavailable(_said(error), call=call) from error
        except TimeoutError:
            raise silent(f"no answer within {self._call_timeout_s:g} s", call=call) from None
        except (aiohttp.ClientError, OSError) as error:
            raise broken(_said(error), call=call) from error
        return answer(response, raw, call=call, is_write=is_write)

    async def _open(
        self,
        stack: contextlib.AsyncExitStack,
        method: str,
        path: str,
        params: Mapping[str, str],
        data: bytes | None = None,
        content_type: str = "application/json",
    ) -> aiohttp.ClientResponse:
        headers = {"Accept": "application/json", **await self._credentials.headers()}
        if data is not None:
            headers["Content-Type"] = content_type
        if self._session is None:
            self._session = self._make_session()
        request = self._session.request(
            method,
            self._credentials.host + path,
            params=params,
            data=data,
            headers=headers,
            # A redirect would take our credentials and our write to wherever it points.
            allow_redirects=False,
            proxy=self._credentials.proxy,
            server_hostname=self._credentials.server_name,
        )
        return await stack.enter_async_context(request)

    def _make_session(self) -> aiohttp.ClientSession:
        tls = self._credentials.tls()
        connector = aiohttp.TCPConnector(limit=0, ssl=True if tls is None else tls)
        return aiohttp.ClientSession(
            connector=connector,
            # Every call has its own limit; a watch is meant to last.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._call_timeout_s / 2),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=self._trust_env,
            headers={"User-Agent": self._manager},
        )

    async def _reload(self, seen: int) -> None:
        async with self._reloading:
            if self._reloads != seen:
                return  # somebody else did, while we waited
            log.info("credentials were not accepted, reading them again")
            await self._reload_credentials()
            self._reloads += 1

    async def _renew(self) -> None:
        """Read the files again because the server's certificate is not trusted any more."""
        now = time.monotonic()
        if self._renewed_at is not None and now - self._renewed_at < RENEWAL_PAUSE_S:
            return
        self._renewed_at = now
        await self._reload_credentials()

    async def _reload_credentials(self) -> None:
        await self._credentials.reload()
        # Certificates are bound to connections. Those of others are left to end by themselves,
        # because a write whose connection is closed counts as unanswered.
        older = [self._retired.pop() for _ in range(len(self._retired))]
        self._retire()
        for session in older:
            await session.close()

    def _retire(self) -> None:
        if self._session is not None:
            self._retired.append(self._session)
            self._session = None


def _selectors(labels: str, fields: str) -> dict[str, str]:
    params = {}
    if labels:
        params["labelSelector"] = labels
    if fields:
        params["fieldSelector"] = fields
    return params


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


async def connect(
    *,
    manager: str,
    kubeconfig: str | None = None,
    context: str | None = None,
    call_timeout_s: float = CALL_TIMEOUT_S,
    trust_env: bool = False,
) -> KubeClient:
    """
    Return a client of the cluster that *kubeconfig* names, of this Pod's, or of KUBECONFIG.

    Args:
        manager: Name of our writes in ``managedFields``.
        kubeconfig: File; None means KUBECONFIG, else inside a Pod its own account, else
            ``~/.kube/config``.
        context: Context of the kubeconfig; None means its current one.
        call_timeout_s: Longest wait for the answer to one call.
        trust_env: Whether proxies named in the environment are used.

    Raises:
        Unavailable: there are no usable credentials, or the extra is not installed.
    """
    return KubeClient(
        await credentials.find(kubeconfig, context),
        manager=manager,
        call_timeout_s=call_timeout_s,
        trust_env=trust_env,
    )
