"""Startup, readiness and liveness probes of the test kubelet: http, tcp and exec."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

Object = dict[str, Any]
Exec = Callable[[list[str], float], Awaitable[int]]

EAGER_S = 0.2
"""Period of a readiness or startup probe that has not succeeded yet, when the Pod's is longer."""


class Prober:
    """Runs probes of one container; *run_exec* executes a command in it."""

    def __init__(
        self, container: Object, host: str, session: aiohttp.ClientSession, run_exec: Exec
    ) -> None:
        self._container = container
        self._host = host
        self._session = session
        self._exec = run_exec

    async def once(self, probe: Object) -> str | None:
        """Carry out *probe* once: None when it succeeds, else the reason of the failure."""
        limit = float(probe.get("timeoutSeconds") or 1)
        try:
            async with asyncio.timeout(limit):
                if "httpGet" in probe:
                    return await self._http(probe["httpGet"])
                if "tcpSocket" in probe:
                    where = probe["tcpSocket"]
                    _, writer = await asyncio.open_connection(
                        where.get("host") or self._host, self._port(where["port"])
                    )
                    writer.close()
                    return None
                if "exec" in probe:
                    code = await self._exec(probe["exec"]["command"], limit)
                    return None if code == 0 else f"command ended with code {code}"
        except TimeoutError:
            return f"no answer within {limit:.0f} s"
        except (OSError, aiohttp.ClientError) as broken:
            return str(broken) or repr(broken)
        return f"probe of a kind that the test kubelet does not know: {sorted(probe)}"

    async def _http(self, get: Object) -> str | None:
        scheme = str(get.get("scheme") or "HTTP").lower()
        host = get.get("host") or self._host
        url = f"{scheme}://{host}:{self._port(get['port'])}{get.get('path') or '/'}"
        headers = {one["name"]: one["value"] for one in get.get("httpHeaders") or []}
        tls: ssl.SSLContext | bool = False if scheme == "https" else True
        async with self._session.get(
            url, headers=headers, allow_redirects=False, ssl=tls
        ) as answer:
            if 200 <= answer.status < 400:
                return None
            return f"HTTP probe failed with statuscode: {answer.status}"

    def _port(self, port: int | str) -> int:
        if isinstance(port, int) or port.isdecimal():
            return int(port)
        for known in self._container.get("ports") or []:
            if known.get("name") == port:
                return int(known["containerPort"])
        raise OSError(f"no port named {port}")


async def run_probe(
    prober: Prober,
    probe: Object,
    *,
    eager: bool,
    on_change: Callable[[bool, str], None],
) -> None:
    """
    Probe for ever and call *on_change* when the verdict changes, with the reason of a failure.

    An *eager* probe that has not succeeded yet runs at least every 200 ms, so that tests need not
    wait for a period of ten seconds; failures are then counted by the Pod's own period, as always.
    """
    period = float(probe.get("periodSeconds") or 10)
    failures_needed = int(probe.get("failureThreshold") or 3)
    successes_needed = int(probe.get("successThreshold") or 1)
    await asyncio.sleep(float(probe.get("initialDelaySeconds") or 0))
    verdict: bool | None = None
    loop = asyncio.get_running_loop()
    failures = successes = 0
    count_failure_at = loop.time()
    while True:
        reason = await prober.once(probe)
        if reason is None:
            successes, failures = successes + 1, 0
            if successes >= successes_needed and verdict is not True:
                verdict = True
                on_change(True, "")
        elif loop.time() >= count_failure_at:
            successes, failures = 0, failures + 1
            count_failure_at = loop.time() + period - EAGER_S / 2
            if failures >= failures_needed and verdict is not False:
                verdict = False
                on_change(False, reason)
        waits_eagerly = eager and verdict is not True
        await asyncio.sleep(min(period, EAGER_S) if waits_eagerly else period)
