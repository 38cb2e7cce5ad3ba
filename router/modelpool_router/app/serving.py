"""What a process adds to a router: event loop, signals, reload of the file, exit code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys

import structlog

from ..drivers.base import DriverError
from ..settings import ConfigError, Settings, reload
from ..telemetry import configure_logs
from ..telemetry.logs import Logs
from ..web.auth import BadKeys
from ..web.server import ParserMissing
from . import heap
from .router import Router
from .signals import heeded

log = structlog.get_logger("modelpool.serve")

OK, FAILED = 0, 1
SETTLED_S = 1.0
"""After the start, which a collection would make longer."""
SPARE_FILES = 256
"""For members' logs and pipes, locks, the admin port and its watchers."""


def run(settings: Settings) -> int:
    """Serve until a signal says stop; return the exit code."""
    logs = configure_logs(settings.log_level, settings.log_format)
    _allow_files(settings)
    heap.keep_blocks()
    try:
        if sys.platform == "win32":
            return asyncio.run(_serve(settings, logs))
        import uvloop

        return int(uvloop.run(_serve(settings, logs)))
    finally:
        logs.close()


def _allow_files(settings: Settings) -> None:
    """
    Raise the soft limit on open files to what the configured bounds need.

    The usual 1024 is less than `maxHeld` connections, their spool files and as many connections
    to members; it only exists for programs that use select().
    """
    if sys.platform == "win32":
        return
    import resource

    needed = 2 * settings.max_connections + settings.max_held + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        except (OSError, ValueError):  # macOS refuses numbers above a kernel limit
            allowed = soft
    if allowed < needed:
        log.warning(
            "few open files allowed",
            files=allowed,
            needed=needed,
            hint="raise the hard limit (ulimit -Hn, LimitNOFILE) or lower maxConnections",
        )


async def _serve(settings: Settings, logs: Logs) -> int:
    router = Router(settings, logs)
    stop, hurry, again = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def stop_or_hurry() -> None:
        (hurry if stop.is_set() else stop).set()

    handlers = {
        signal.SIGTERM: stop_or_hurry,
        signal.SIGINT: stop_or_hurry,
        signal.SIGHUP: again.set,
    }
    with heeded(handlers):
        try:
            await router.start()
        except (OSError, DriverError, BadKeys, ParserMissing) as error:
            print(f"modelpool: cannot start: {error}", file=sys.stderr)
            return FAILED
        _say_where(router)
        loop = asyncio.get_running_loop()
        settling = loop.call_later(SETTLED_S, heap.settle)
        reloading = loop.create_task(_reload_when_asked(router, again), name="reload")
        await stop.wait()
        log.info(
            "stopping",
            accepts_for_s=router.settings.shutdown_delay_s,
            ends_answers_after_s=router.settings.shutdown_timeout_s,
            hint="a second signal hurries",
        )
        settling.cancel()
        reloading.cancel()
        await asyncio.gather(reloading, return_exceptions=True)
        try:
            await router.stop(hurry)
        except DriverError as error:
            log.error("stopped, but a member may still run", problem=str(error))
            return FAILED
        log.info("stopped")
    return OK


def _say_where(router: Router) -> None:
    listen, admin = router.addresses
    log.info(
        "listening",
        url=f"http://{listen}",
        admin="off" if admin is None else f"http://{admin}",
        pools=[pool.name for pool in router.settings.pools],
    )


async def _reload_when_asked(router: Router, asked: asyncio.Event) -> None:
    """Reload on SIGHUP and when the file has changed; a bad file changes nothing."""
    seen = await asyncio.to_thread(_stamp, router.settings)
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asked.wait(), router.settings.reload_poll_s)
        stamp = await asyncio.to_thread(_stamp, router.settings)
        if stamp == seen and not asked.is_set():
            continue
        asked.clear()
        seen = stamp
        await reload_once(router)


async def reload_once(router: Router) -> bool:
    """Read the file again and put it in force; log what came of it; return whether it is."""
    try:
        new = await asyncio.to_thread(reload, router.settings)
        changes = await router.reload(new)
    except ConfigError as error:
        for problem in error.problems:
            log.error("configuration refused, the old one stays", problem=str(problem))
        return False
    except (OSError, KeyError, UnicodeError, BadKeys, DriverError) as error:
        log.error("configuration refused, the old one stays", problem=str(error))
        return False
    except Exception:
        # A task boundary: one file that upsets us must not be the last one that is read.
        log.exception("configuration refused, the old one stays", problem="internal error")
        return False
    for problem in changes.refused:
        log.warning("needs a restart, the old value stays", problem=str(problem))
    log.info("configuration reloaded", changed=not changes.is_empty)
    return True


def _stamp(settings: Settings) -> tuple[object, ...]:
    """
    Return what tells a changed file from an unchanged one.

    Follows links: a mounted ConfigMap changes by swapping the link of its folder.
    """
    source = settings.source
    if source is None or source.path is None:
        return ()
    upstream_keys = (upstream.api_key for upstream in settings.upstreams)
    secrets = (settings.keys, settings.admin_token, *upstream_keys)
    paths = [source.path, *(secret.file for secret in secrets if secret and secret.file)]
    stamp: list[object] = []
    for path in paths:
        try:
            status = os.stat(path)
        except OSError:
            stamp.append(None)
        else:
            stamp.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(stamp)
