"""From settings to the values that drivers, front and dispatch are built of. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from ..core.catalog import Catalog, Entry, Route
from ..core.headers import Field
from ..core.spec import MemberName, PoolName
from ..drivers.base import Endpoint
from ..drivers.process import ProcessMember, SettleGate
from ..drivers.profiles import ProfileOverrides, profile
from ..settings import HoldKeepalive, Member, Pool, Settings, Upstream
from ..web.cors import Cors
from ..web.exchange import ForwardLimits
from ..web.intake import IntakeLimits
from ..web.server import ServerOptions
from ..web.surface import Keepalive, PoolTarget, Surface, UpstreamTarget

MIB = 1024 * 1024


def catalog(settings: Settings) -> Catalog:
    """Return who answers to which name."""
    entries = [
        Entry(
            Route(MemberName(member.name), PoolName(pool.name), member.served_model), member.models
        )
        for pool in settings.pools
        for member in pool.members
    ]
    entries += [Entry(Route(MemberName(u.name), None), u.models) for u in settings.upstreams]
    return Catalog(entries)


def surface(
    settings: Settings, upstream_keys: Mapping[str, str], on_spooled: Callable[[], None]
) -> Surface:
    """
    Return what the data port serves.

    Args:
        upstream_keys: Secrets by name of upstream, for those that want one.
        on_spooled: See `IntakeLimits`.
    """
    mode = settings.hold_keepalive
    keepalive = None
    if mode is not HoldKeepalive.NONE:
        keepalive = Keepalive(
            "chunk" if mode is HoldKeepalive.CHUNK else "comment",
            settings.hold_keepalive_after_s,
            settings.hold_keepalive_interval_s,
        )
    return Surface(
        catalog=catalog(settings),
        pools={
            PoolName(pool.name): PoolTarget(pool.swap_budget_s, _limits(settings, pool))
            for pool in settings.pools
        },
        upstreams={
            MemberName(upstream.name): UpstreamTarget(
                endpoint_of(upstream),
                _limits(settings, upstream),
                _credential(upstream_keys.get(upstream.name)),
            )
            for upstream in settings.upstreams
        },
        intake=IntakeLimits(
            max_body_bytes=settings.max_body_bytes,
            spool_above_bytes=settings.spool_above_bytes,
            idle_s=settings.body_stall_s,
            total_s=settings.body_timeout_s,
            # Not the system's folder for temporary files: that one may be in memory.
            spool_dir=str(settings.state_dir),
            on_spooled=on_spooled,
        ),
        keepalive=keepalive,
        passthrough=settings.passthrough,
    )


def endpoint_of(upstream: Upstream) -> Endpoint:
    """Return where an upstream answers."""
    parts = urlsplit(upstream.url)
    assert parts.hostname is not None  # the settings saw to that
    tls = parts.scheme == "https"
    return Endpoint(
        host=parts.hostname,
        port=parts.port or (443 if tls else 80),
        base_path=parts.path.rstrip("/"),
        tls=tls,
        identity=upstream.url,
    )


def server_options(settings: Settings) -> ServerOptions:
    """Return the limits of connections and heads."""
    return ServerOptions(
        silent_s=settings.silent_timeout_s,
        head_s=settings.head_timeout_s,
        keep_alive_s=settings.keep_alive_s,
        max_connections=settings.max_connections,
        cors=Cors(frozenset(settings.cors_origins)),
    )


def process_members(pool: Pool, settings: Settings) -> dict[MemberName, ProcessMember]:
    """Return how the members of *pool* are run."""
    return {MemberName(m.name): _process_member(m, settings) for m in pool.members}


def settle_gate(pool: Pool) -> SettleGate | None:
    """Return the gate between unload and load, if there is one."""
    gate = pool.memory_settle
    return None if gate is None else SettleGate(gate.command, gate.timeout_s, gate.interval_s)


def _process_member(member: Member, settings: Settings) -> ProcessMember:
    overrides = ProfileOverrides(
        readiness_path=member.readiness_path,
        idle_path=member.idle_path,
        stop_grace_s=member.stop_grace_s,
        kill_grace_s=member.kill_grace_s,
    )
    needed = member.memory_needed_bytes
    assert member.command is not None  # the settings saw to that
    return ProcessMember(
        name=MemberName(member.name),
        command=member.command,
        profile=profile(member.profile, overrides),
        port=member.port,
        env=member.env,
        working_directory=member.working_directory or settings.folder,
        stop_command=member.stop_command,
        gone_command=member.gone_command,
        memory_needed_mib=None if needed is None else needed / MIB,
        log_file=member.log_file,
    )


def _limits(settings: Settings, of: Pool | Upstream) -> ForwardLimits:
    response, read, write = of.response_timeout_s, None, None
    if isinstance(of, Pool):
        read, write = of.read_stall_s, of.write_stall_s
    return ForwardLimits(
        response_timeout_s=settings.response_timeout_s if response is None else response,
        read_stall_s=settings.read_stall_s if read is None else read,
        write_stall_s=settings.write_stall_s if write is None else write,
    )


def _credential(key: str | None) -> Field | None:
    return None if key is None else (b"Authorization", b"Bearer " + key.encode())
