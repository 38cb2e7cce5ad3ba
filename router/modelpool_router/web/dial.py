"""How a connection to a member or an upstream is made: addresses, time limits, what went wrong."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import ssl
from collections.abc import Callable
from functools import lru_cache

from ..drivers.base import Endpoint
from .faults import ConnectRefused


async def dial(
    endpoint: Endpoint,
    make: Callable[[], asyncio.BaseProtocol],
    *,
    within_s: float,
    tls: ssl.SSLContext | None,
) -> None:
    """
    Connect *make*'s protocol to *endpoint*, trying all addresses of its name.

    Raises:
        ConnectRefused: none answered in time.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(within_s):
            await _dial(loop, endpoint, make, within_s, tls)
    except (OSError, UnicodeError) as exc:
        raise refusal(exc) from exc


def refusal(failure: Exception) -> ConnectRefused:
    """Return what it is called that a connection was not made."""
    if isinstance(failure, ConnectRefused):
        return failure
    if isinstance(failure, TimeoutError):
        return ConnectRefused("timeout")
    if isinstance(failure, ConnectionRefusedError):
        return ConnectRefused("refused")
    if isinstance(failure, socket.gaierror | UnicodeError):
        return ConnectRefused("unresolved")
    return ConnectRefused("tls" if isinstance(failure, ssl.SSLError) else "unreachable")


def connected_here(endpoint: Endpoint) -> socket.socket | None:
    """
    Return a socket that is connected to a port of this machine; None if that has to be waited for.

    Inside of a machine both ends shake hands within the call, so an event loop need not be asked.

    Raises:
        OSError: nobody listens there.
    """
    family = _loopback_family(endpoint.host)
    if family is None or endpoint.tls:
        return None
    address = (endpoint.host, endpoint.port)
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setblocking(False)
        failure = sock.connect_ex(address)
        if failure == errno.EINPROGRESS:
            failure = sock.connect_ex(address)  # (tells what became of it)
        if not failure:
            return sock
        if failure not in (errno.EALREADY, errno.EINPROGRESS):
            raise OSError(failure, "cannot connect")
    except BaseException:
        sock.close()
        raise
    sock.close()  # its backlog is full
    return None


def attach(
    loop: asyncio.AbstractEventLoop,
    sock: socket.socket,
    make: Callable[[], asyncio.BaseProtocol],
    failed: Callable[[Exception], None],
) -> None:
    """
    Hand a connected *sock* to the protocol of *make*; *failed* is told if that cannot be done.

    Without a task, and so it cannot be cancelled, which event loops do not do cleanly here.
    """
    steps = loop.create_connection(make, sock=sock)

    def step(_: object = None) -> None:
        try:
            waits_for: asyncio.Future[None] = steps.send(None)
        except StopIteration:
            return
        except (OSError, RuntimeError, ValueError) as exc:
            sock.close()
            failed(exc)
            return
        waits_for._asyncio_future_blocking = False
        waits_for.add_done_callback(step)

    step()


async def _dial(
    loop: asyncio.AbstractEventLoop,
    endpoint: Endpoint,
    make: Callable[[], asyncio.BaseProtocol],
    within_s: float,
    tls: ssl.SSLContext | None,
) -> None:
    addresses = [endpoint.host]
    if not _is_address(endpoint.host):
        found = await loop.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    deadline = loop.time() + within_s
    for left in range(len(addresses), 0, -1):
        # An address that swallows packets gets its share of the time, not all of it.
        share = (deadline - loop.time()) / left if left > 1 else None
        try:
            async with asyncio.timeout(share):
                await loop.create_connection(
                    make,
                    addresses[-left],
                    endpoint.port,
                    ssl=tls,
                    server_hostname=endpoint.host if tls else None,
                )
                return
        except OSError:
            if left == 1:
                raise
    raise ConnectRefused("unresolved")


@lru_cache(maxsize=256)
def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_here(host: str) -> bool:
    """Say whether *host* is an address that means this machine."""
    return _loopback_family(host) is not None


@lru_cache(maxsize=256)
def _loopback_family(host: str) -> socket.AddressFamily | None:
    if not _is_address(host):
        return None
    address = ipaddress.ip_address(host)
    if not address.is_loopback:
        return None
    return socket.AF_INET if address.version == 4 else socket.AF_INET6
