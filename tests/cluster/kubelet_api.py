"""
The test kubelet's way to the API server: a kubeconfig, JSON in and out, one list+watch loop.

Plain aiohttp, nothing of the product: what is tested must not be what tests it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp

Object = dict[str, Any]

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
_CALL = aiohttp.ClientTimeout(total=10)
_WATCH_S = 240
# A watch that says nothing for longer than the server's own time limit is a dead connection.
_WATCH = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=_WATCH_S + 20)
_RETRY_S = 0.5


class ApiError(Exception):
    """The API server answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Unreachable(Exception):
    """The API server did not answer; a write may have happened."""


class Api:
    """Calls with a time limit each. Use as an async context manager."""

    def __init__(self, kubeconfig: Path) -> None:
        config = json.loads(kubeconfig.read_text("utf-8"))
        cluster = config["clusters"][0]["cluster"]
        user = config["users"][0]["user"]
        self.server: str = cluster["server"]
        self.ca = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self._tls = ssl.create_default_context(cadata=self.ca)
        with tempfile.NamedTemporaryFile("wb") as both:  # ssl reads certificates from files only
            both.write(base64.b64decode(user["client-certificate-data"]))
            both.write(base64.b64decode(user["client-key-data"]))
            both.flush()
            self._tls.load_cert_chain(both.name)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Api:
        self._session = aiohttp.ClientSession(
            self.server,
            connector=aiohttp.TCPConnector(ssl=self._tls, limit=0),
            timeout=_CALL,
            trust_env=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def call(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        *,
        content_type: str = "application/json",
        params: Mapping[str, str] | None = None,
    ) -> Object:
        """
        One request, one JSON answer.

        Raises:
            ApiError: The server said no.
            Unreachable: No answer; nobody knows whether it was carried out.
        """
        assert self._session is not None
        data = None if body is None else json.dumps(body)
        try:
            async with self._session.request(
                method, path, data=data, params=params, headers={"Content-Type": content_type}
            ) as answer:
                text = await answer.text()
        except (aiohttp.ClientError, TimeoutError) as broken:
            raise Unreachable(f"{method} {path}: {broken!r}") from broken
        if answer.status >= 400:
            raise ApiError(answer.status, _message(text))
        parsed: Object = json.loads(text)
        return parsed

    async def get(self, path: str) -> Object:
        return await self.call("GET", path)

    async def create(self, path: str, body: Object) -> Object:
        return await self.call("POST", path, body)

    async def patch(self, path: str, body: Object, content_type: str = MERGE) -> Object:
        return await self.call("PATCH", path, body, content_type=content_type)

    async def delete(self, path: str, *, uid: str, grace_s: int) -> None:
        options = {"gracePeriodSeconds": grace_s, "preconditions": {"uid": uid}}
        await self.call("DELETE", path, options)

    async def follow(
        self,
        path: str,
        params: Mapping[str, str],
        on_list: Callable[[list[Object]], None],
        on_event: Callable[[str, Object], None],
    ) -> None:
        """
        List, then watch, for ever: whatever breaks, list again after a short rest.

        A fresh list after every break is the whole recovery; no event is ever relied upon.
        """
        while True:
            try:
                listed = await self.call("GET", path, params=params)
                on_list(listed.get("items") or [])
                version = listed["metadata"]["resourceVersion"]
                async for kind, thing in self._watch(path, params, version):
                    on_event(kind, thing)
            except (ApiError, Unreachable, aiohttp.ClientError, TimeoutError, ValueError):
                pass  # listed again below; an API server that is down is a case we test
            await asyncio.sleep(_RETRY_S)

    async def _watch(
        self, path: str, params: Mapping[str, str], version: str
    ) -> AsyncIterator[tuple[str, Object]]:
        assert self._session is not None
        query = {
            **params,
            "watch": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(_WATCH_S),
        }
        async with self._session.get(path, params=query, timeout=_WATCH) as answer:
            if answer.status != 200:
                raise ApiError(answer.status, _message(await answer.text()))
            buffer = b""
            async for chunk in answer.content.iter_any():
                buffer += chunk
                *lines, buffer = buffer.split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise ApiError(event["object"].get("code", 0), str(event["object"]))
                    yield event["type"], event["object"]


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text[:300]
