"""The part of a kubelet that ``kubectl logs`` reaches: container logs over HTTPS."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

from aiohttp import web


def server_tls(certificate: Path, key: Path, client_ca: Path) -> ssl.SSLContext:
    """TLS that lets only clients of the cluster's own authority in."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(client_ca))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certificate, key)
    return context


class LogServer:
    """Serves ``pods/<uid>/logs`` below *folder*; *uids* maps (namespace, name) to UID."""

    def __init__(self, folder: Path, uids: dict[tuple[str, str], str]) -> None:
        self._folder = folder
        self._uids = uids
        self._runner: web.AppRunner | None = None

    async def start(self, tls: ssl.SSLContext) -> int:
        """Listen on a free port of loopback and return it."""
        app = web.Application()
        app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        port = self._runner.addresses[0][1]
        return int(port)

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        info = request.match_info
        uid = self._uids.get((info["namespace"], info["pod"]), "")
        logs = sorted(
            (self._folder / "pods" / uid / "logs").glob(info["container"] + ".*.log"),
            key=lambda path: int(path.name.split(".")[-2]),
        )
        if request.query.get("previous") == "true":
            logs = logs[:-1]
        if not uid or not logs:
            raise web.HTTPNotFound(text="no such container, or it has not been started")
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        with logs[-1].open("rb") as file:
            tail = request.query.get("tailLines")
            if tail is not None:
                lines = file.readlines()
                await response.write(b"".join(lines[max(len(lines) - int(tail), 0) :]))
            while True:
                text = file.read(1 << 16)
                if text:
                    await response.write(text)
                elif request.query.get("follow") != "true":
                    return response
                else:
                    await asyncio.sleep(0.1)
