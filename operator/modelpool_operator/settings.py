"""
Settings of the operator: flags, each with a variable ``MODELPOOL_OPERATOR_...`` behind it.

There are few on purpose: what is about a pool stands in the pool.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

PREFIX = "MODELPOOL_OPERATOR_"
IMAGE = "ghcr.io/modelpool/modelpool"


@dataclass(frozen=True, slots=True)
class Settings:
    """How the operator runs."""

    namespaces: tuple[str, ...]
    """Namespaces that are looked after; empty: all."""
    lease_namespace: str
    """Where the Lease of the leader is."""
    identity: str
    """Our name, the Pod's."""
    router_image: str
    """Image of routers that name none."""
    listen_host: str
    listen_port: int
    """Where health and metrics answer; port 0 chooses a free one."""
    workers: int
    """Objects of one kind that are worked on at once."""
    resync_s: float
    """How often everything is looked at again without a reason."""
    kubeconfig: str | None
    context: str | None
    log_level: str
    log_format: str


def own_image() -> str:
    """Return the image of the version that runs."""
    try:
        return f"{IMAGE}:{metadata.version('modelpool')}"
    except metadata.PackageNotFoundError:
        return f"{IMAGE}:latest"


def read(arguments: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Return the settings; exits with a message when they are wrong."""
    parser = argparse.ArgumentParser(
        prog="modelpool-operator",
        description="Keeps ModelPools, InferenceServices, ModelRouters and ModelDeployments.",
        epilog=f"Every flag has a variable: --log-level is {PREFIX}LOG_LEVEL.",
    )

    def flag(name: str, default: str, text: str, **more: object) -> None:
        variable = PREFIX + name.upper().replace("-", "_")
        value = environ.get(variable) or default
        parser.add_argument(f"--{name}", default=value, help=f"{text} [{default or '-'}]", **more)  # type: ignore[arg-type]  # passed on as it came

    flag("namespaces", "", "namespaces to look after, with commas; none: all")
    flag("lease-namespace", environ.get("POD_NAMESPACE", "default"), "where the leader's Lease is")
    flag("identity", environ.get("POD_NAME", os.uname().nodename), "name in Leases: the Pod's")
    flag("router-image", own_image(), "image of routers that name none")
    flag("listen", "0.0.0.0:8081", "where health and metrics answer")
    flag("workers", "4", "objects of one kind that are worked on at once")
    flag("resync", "600", "seconds between two looks at everything")
    flag("kubeconfig", "", "kubeconfig; none: this Pod's account, else KUBECONFIG")
    flag("context", "", "context of the kubeconfig")
    flag("log-level", "info", "least important line", choices=["debug", "info", "warning", "error"])
    flag("log-format", "json", "how log lines look", choices=["json", "console"])
    given = parser.parse_args(arguments)

    host, _, port = given.listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        parser.error(f"--listen {given.listen!r} is no address; write it like 0.0.0.0:8081")
    workers = _number(parser, "workers", given.workers, least=1)
    resync_s = _number(parser, "resync", given.resync, least=10)
    names = tuple(name for name in (n.strip() for n in given.namespaces.split(",")) if name)
    return Settings(
        namespaces=names,
        lease_namespace=given.lease_namespace,
        identity=given.identity,
        router_image=given.router_image,
        listen_host=host.strip("[]"),
        listen_port=int(port),
        workers=int(workers),
        resync_s=resync_s,
        kubeconfig=given.kubeconfig or None,
        context=given.context or None,
        log_level=given.log_level,
        log_format=given.log_format,
    )


def _number(parser: argparse.ArgumentParser, name: str, text: str, *, least: int) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value <= 1_000_000:
        parser.error(f"--{name} {text!r} is no number from {least} to 1000000")
    return value
