"""The composition root: client, watches, queues, controllers, leader election, health."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import signal
import sys
import traceback
from datetime import UTC, datetime

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from modelpool_api.names import OPERATOR_MANAGER
from modelpool_kube.client import connect
from modelpool_kube.errors import KubeError
from modelpool_kube.kinds import (
    INFERENCE_SERVICES,
    MODEL_DEPLOYMENTS,
    MODEL_POOLS,
    MODEL_ROUTERS,
    Json,
    Kind,
)
from modelpool_kube.port import ClusterPort
from modelpool_kube.workqueue import WorkQueue, work

from .engine.acting import Actor, Key
from .engine.events import EventRecorder
from .engine.leading import lead
from .engine.metrics import OperatorMetrics
from .engine.modeldeployment import ModelDeployments
from .engine.observe import Observer
from .engine.probing import Asking, HttpAsking
from .engine.reconcilers import PoolReconciler, RouterReconciler, ServiceReconciler
from .engine.sessions import SlotSessions
from .engine.watching import Watching
from .plan.model import Happened
from .plan.modeldeployment.actions import Note
from .settings import Settings

log = logging.getLogger(__name__)


class Operator:
    """Everything that acts, on one cluster."""

    def __init__(
        self,
        port: ClusterPort,
        settings: Settings,
        asking: Asking,
        metrics: OperatorMetrics,
        *,
        rng: random.Random | None = None,
    ) -> None:
        self._port = port
        self._settings = settings
        self._asking = asking
        self._metrics = metrics
        self._rng = rng or random.Random()

    async def work(self) -> None:
        """Watch and act until cancelled. Everything is made anew at each call."""
        observer = Observer(self._port)
        actor = Actor(self._port, EventRecorder(self._port, self._settings.identity))
        sessions = SlotSessions(self._port, self._settings.identity, self._asking, self._rng)
        queues: dict[Kind, WorkQueue[Key]] = {
            kind: WorkQueue(rng=self._rng)
            for kind in (MODEL_POOLS, INFERENCE_SERVICES, MODEL_ROUTERS, MODEL_DEPLOYMENTS)
        }

        async def tell(obj: Json, note: Note) -> None:
            event = Happened(note.reason, note.message, note.is_warning)
            await actor.tell(MODEL_DEPLOYMENTS, obj, event)

        pools = PoolReconciler(
            observer, actor, sessions, self._asking, again=queues[MODEL_POOLS].add
        )
        reconcilers = {
            MODEL_POOLS: pools.reconcile,
            INFERENCE_SERVICES: ServiceReconciler(observer, actor).reconcile,
            MODEL_ROUTERS: RouterReconciler(
                observer, actor, default_image=self._settings.router_image
            ).reconcile,
            MODEL_DEPLOYMENTS: ModelDeployments(self._port, tell).reconcile,
        }
        wakes = _Queues(queues)
        watching = [
            Watching(self._port, namespace, wakes, lease_seen=pools.lease_seen, rng=self._rng)
            for namespace in (self._settings.namespaces or (None,))
        ]
        try:
            async with asyncio.TaskGroup() as group:
                for each in watching:
                    for kind, reflector in each.reflectors.items():
                        group.create_task(reflector.run(), name=f"watch-{kind.plural}")
                for kind, reconcile in reconcilers.items():
                    counted = self._metrics.counted(kind, reconcile)
                    group.create_task(
                        work(queues[kind], counted, workers=self._settings.workers),
                        name=f"work-{kind.plural}",
                    )
                group.create_task(self._resync(watching), name="resync")
        finally:
            await sessions.close()

    async def _resync(self, watching: list[Watching]) -> None:
        while True:
            await asyncio.sleep(self._settings.resync_s)
            for each in watching:
                each.resync()


class _Queues:
    """Puts what is to be looked at again into its queue."""

    def __init__(self, queues: dict[Kind, WorkQueue[Key]]) -> None:
        self._queues = queues

    def wake(self, kind: Kind, key: Key) -> None:
        """Look at *key* again."""
        self._queues[kind].add(key)


async def run(settings: Settings) -> int:
    """Run the operator until TERM or INT; return the exit code."""
    configure_logs(settings)
    metrics = OperatorMetrics()
    asking = HttpAsking()
    try:
        client = await connect(
            manager=OPERATOR_MANAGER, kubeconfig=settings.kubeconfig, context=settings.context
        )
    except KubeError as error:
        log.error("cannot reach a cluster: %s", error)
        return 1
    async with client, contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(asking.close)
        runner = web.AppRunner(health(metrics), access_log=None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, settings.listen_host, settings.listen_port)
        try:
            await site.start()
        except OSError as error:
            log.error("cannot listen on %s: %s", settings.listen_port, error)
            return 1
        operator = Operator(client, settings, asking, metrics)
        stopping = asyncio.get_running_loop().create_task(
            lead(
                client,
                settings.lease_namespace,
                settings.identity,
                operator.work,
                leads=lambda answer: metrics.leads.set(1 if answer else 0),
            ),
            name="lead",
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopping.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await stopping
    return 0


def health(metrics: OperatorMetrics) -> web.Application:
    """Return what answers on the port of health and metrics."""

    async def alive(request: web.Request) -> web.Response:
        # Also true for one that waits to lead: it is ready to take over.
        return web.json_response({"status": "ok"})

    async def numbers(request: web.Request) -> web.Response:
        body = generate_latest(metrics.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.router.add_get("/livez", alive)
    app.router.add_get("/readyz", alive)
    app.router.add_get("/metrics", numbers)
    return app


def configure_logs(settings: Settings) -> None:
    """Write log lines to standard error, one JSON object each, or plain text."""
    handler = logging.StreamHandler(sys.stderr)
    if settings.log_format == "json":
        handler.setFormatter(_JsonLines())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)


class _JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of *record*."""
        line = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(line)
