"""
Whether this machine has what a configuration names: programs, folders, secrets, free ports.

Done by `check` and `serve` before anything starts. It only looks; what it finds may change a
moment later, so whoever acts still meets the error, only less often.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from .model import Member, Pool, SecretSource, Settings
from .problems import Problem
from .source import Path_, Source
from .units import Address


def verify(settings: Settings, environ: Mapping[str, str], *, ports: bool = False) -> list[Problem]:
    """
    Return what this machine lacks of what *settings* name.

    Args:
        settings: As loaded.
        environ: Environment that members will inherit and secrets are read from.
        ports: Also whether the ports to listen on are free; not for a router that runs already.
    """
    source = settings.source or Source("<settings>", settings.folder)
    found = [*_state_dir(settings, source), *_cluster(settings, source)]
    for number, pool in enumerate(settings.pools):
        found += _pool(pool, ("pools", number), settings.folder, environ, source)
    for path, secret in _secrets(settings):
        found += _secret(secret, path, environ, source)
    if ports:
        found += _listeners(settings, source)
    return found


def read_secret(secret: SecretSource, environ: Mapping[str, str]) -> str:
    """
    Return the secret that *secret* points to, without white space around it.

    Raises:
        OSError, UnicodeDecodeError: The file cannot be read.
        KeyError: The environment variable is not set.
    """
    if secret.file is not None:
        return secret.file.read_text(encoding="utf-8").strip()
    assert secret.env is not None  # exactly one of the two is given
    return environ[secret.env].strip()


def find_program(program: str, folder: Path, search_path: str | None) -> Path | None:
    """
    Return the program that would be started as *program* from *folder*, or None.

    As the kernel does it: a name with a slash counts from *folder*, one without is looked up in
    *search_path* (``PATH`` of the member).
    """
    if "/" in program:
        path = folder / Path(program).expanduser()
        return path if path.is_file() and os.access(path, os.X_OK) else None
    found = shutil.which(program, path=search_path)
    return None if found is None else Path(found)


def _pool(
    pool: Pool, path: Path_, base: Path, environ: Mapping[str, str], source: Source
) -> Iterator[Problem]:
    if pool.memory_settle is not None:
        here = (*path, "memorySettle", "command")
        # It belongs to no member, so no folder is its own.
        yield from _program(pool.memory_settle.command, here, Path("/"), environ, source)
    for index, member in enumerate(pool.members):
        yield from _member(member, (*path, "members", index), base, environ, source)


def _member(
    member: Member, path: Path_, base: Path, environ: Mapping[str, str], source: Source
) -> Iterator[Problem]:
    if member.kubernetes is not None:
        return  # what runs it is on other machines
    folder = member.working_directory or base
    if not folder.is_dir():
        reason = "is not a folder" if folder.exists() else "does not exist"
        yield source.problem(
            (*path, "workingDirectory"), f"{folder} {reason}", "create it or correct the path"
        )
        return
    environ = {**environ, **member.env}
    for key, command in (
        ("command", member.command),
        ("stopCommand", member.stop_command),
        ("goneCommand", member.gone_command),
    ):
        if command is not None:
            yield from _program(command, (*path, key), folder, environ, source)


def _program(
    command: Sequence[str], path: Path_, folder: Path, environ: Mapping[str, str], source: Source
) -> Iterator[Problem]:
    program = command[0]
    if find_program(program, folder, environ.get("PATH")) is not None:
        return
    if "/" not in program:
        yield source.problem(
            path,
            f"the program {program!r} is not in PATH",
            "install it, correct the name, or write its full path",
        )
        return
    full = folder / Path(program).expanduser()
    if full.is_file():
        yield source.problem(path, f"{full} is not executable", f"chmod +x {full}")
    elif full.is_dir():
        yield source.problem(path, f"{full} is a folder", "name the program inside it")
    else:
        yield source.problem(
            path, f"{full} does not exist", "correct the path; it counts from workingDirectory"
        )


def _secrets(settings: Settings) -> Iterator[tuple[Path_, SecretSource]]:
    if settings.keys is not None:
        yield ("keys",), settings.keys
    if settings.admin_token is not None:
        yield ("adminToken",), settings.admin_token
    for number, upstream in enumerate(settings.upstreams):
        if upstream.api_key is not None:
            yield ("upstreams", number, "apiKey"), upstream.api_key


def _secret(
    secret: SecretSource, path: Path_, environ: Mapping[str, str], source: Source
) -> Iterator[Problem]:
    try:
        text = read_secret(secret, environ)
    except KeyError:
        yield source.problem(
            path,
            f"the environment variable {secret.env} is not set",
            "set it where the router is started, or use {file: PATH}",
        )
        return
    except OSError as error:
        yield source.problem(
            path, f"{secret.file}: {error.strerror}", "create the file or correct the path"
        )
        return
    except UnicodeDecodeError:
        yield source.problem(path, f"{secret.file} is not UTF-8", "save it as plain text")
        return
    if not text:
        where = secret.file or f"the environment variable {secret.env}"
        yield source.problem(path, f"{where} is empty", "put the secret into it")


def _state_dir(settings: Settings, source: Source) -> Iterator[Problem]:
    folder = settings.state_dir
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    way_out = "set stateDir to a folder that this user can write to"
    if not existing.is_dir():
        yield source.problem(("stateDir",), f"{existing} is not a folder", way_out)
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield source.problem(("stateDir",), f"{existing} cannot be written to", way_out)


def _cluster(settings: Settings, source: Source) -> Iterator[Problem]:
    """Look for what talking to an API server needs; whether one answers is not for now."""
    path: Path_ = ("poolsFrom",)
    if settings.pools_from is None:
        number = next((i for i, pool in enumerate(settings.pools) if pool.is_in_kubernetes), None)
        if number is None:
            return
        path = ("pools", number, "members")
    if importlib.util.find_spec("kubernetes_asyncio") is None:
        yield source.problem(
            path,
            "members in Kubernetes need the Kubernetes client, which is not installed",
            "pip install 'modelpool[kubernetes]'",
        )
    config = None if settings.kubernetes is None else settings.kubernetes.kubeconfig
    if config is not None and not config.is_file():
        yield source.problem(
            ("kubernetes", "kubeconfig"),
            f"{config} does not exist",
            "correct the path, or remove it to use KUBECONFIG",
        )


def _listeners(settings: Settings, source: Source) -> Iterator[Problem]:
    for key, address in (("listen", settings.listen), ("admin", settings.admin)):
        if address is None:
            continue
        error = bind_error(address)
        if error is None:
            continue
        if error.errno == errno.EADDRINUSE:
            reason = f"port {address.port} is already in use on {address.host or 'this machine'}"
            way_out = f"stop the program that uses it, or choose another with --{key}"
        elif error.errno == errno.EACCES:
            reason = f"port {address.port} needs more rights than this user has"
            way_out = "choose a port from 1024 on"
        else:
            reason = f"cannot listen on {address}: {error.strerror}"
            way_out = "use an address of this machine, such as 127.0.0.1"
        yield source.problem((key,), reason, way_out)


def bind_error(address: Address) -> OSError | None:
    """Listen on *address* for a moment, as the server will; return what prevents it."""
    try:
        infos = socket.getaddrinfo(
            address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        return error
    for family, kind, protocol, _, where in infos:
        try:
            probe = socket.socket(family, kind, protocol)
        except OSError:
            continue  # the kernel has no such family; the server skips it too
        with probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind(where)
                # Some kernels notice a second listener only here.
                probe.listen(1)
            except OSError as error:
                return error
    return None
