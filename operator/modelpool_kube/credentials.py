"""
Who we are and where the server is, as kubernetes-asyncio finds it.

It knows kubeconfigs, exec plugins and in-cluster files. Imported late: it costs most of a second
and 70 MB, which nobody without a cluster should pay.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from .errors import Unavailable

if TYPE_CHECKING:
    from kubernetes_asyncio.client import Configuration

TOKEN_AGE_S = 60.0
"""How old a token file may be in memory; the kubelet rotates it hourly."""
TOKEN_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


class Credentials(Protocol):
    """Where the server is and what it wants to see of us."""

    host: str

    async def headers(self) -> Mapping[str, str]:
        """Return the headers that say who we are."""
        ...

    async def reload(self) -> None:
        """Read files and plugins again, because what we showed was not accepted."""
        ...

    def tls(self) -> ssl.SSLContext | None:
        """Return a fresh TLS context, made from the files as they are now."""
        ...

    server_name: str | None
    """Name to expect in the server's certificate, when it is not the host's."""
    proxy: str | None
    """Proxy that the kubeconfig names, if any."""


class _FoundCredentials:
    """Credentials as kubernetes-asyncio loads them from a kubeconfig or inside a Pod."""

    def __init__(
        self,
        configuration: Configuration,
        load: Callable[[Configuration], Awaitable[None]],
        *,
        refresh: bool,
    ) -> None:
        self._configuration = configuration
        self._load = load
        self._refresh = refresh
        self._loaded_at = time.monotonic()
        self.host = str(configuration.host).rstrip("/")
        self.server_name: str | None = configuration.tls_server_name or None
        self.proxy: str | None = configuration.proxy or None

    async def headers(self) -> Mapping[str, str]:
        """Return the Authorization header, from a token file at most a minute old."""
        if self._refresh and time.monotonic() - self._loaded_at > TOKEN_AGE_S:
            await self.reload()
        token = self._configuration.api_key.get("BearerToken")
        # Token files end with a line end now and then, which no header may.
        return {"Authorization": str(token).strip()} if token else {}

    async def reload(self) -> None:
        """Run the loader again. Raises Unavailable."""
        await self._load(self._configuration)
        self._loaded_at = time.monotonic()

    def tls(self) -> ssl.SSLContext | None:
        """Return a TLS context as the configuration wants it; None for plain http."""
        found = self._configuration
        if not self.host.startswith("https:"):
            return None
        context = ssl.create_default_context(cafile=found.ssl_ca_cert)
        if found.cert_file:
            context.load_cert_chain(found.cert_file, keyfile=found.key_file)
        if not found.verify_ssl:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        # Clusters with certificates of their own making often lack a key identifier, which
        # Python's strict mode insists on and no other client of theirs does.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return context


def _is_in_pod() -> bool:
    return TOKEN_FILE.exists() and not os.environ.get("KUBECONFIG")


async def find(kubeconfig: str | None, context: str | None) -> Credentials:
    """
    Return the credentials of *kubeconfig*, of this Pod, or of the usual files.

    Raises:
        Unavailable: there are no usable ones, or the extra is not installed.
    """
    try:
        import yaml  # comes with it
        from kubernetes_asyncio import config
        from kubernetes_asyncio.client import Configuration
    except ImportError as error:
        raise Unavailable(
            "the Kubernetes client is not installed; pip install 'modelpool[kubernetes]'"
        ) from error

    in_pod = kubeconfig is None and context is None and _is_in_pod()
    path = kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"

    where = "in this Pod" if in_pod else f"in {path}"
    broken = (config.ConfigException, OSError, ValueError, KeyError, TypeError, yaml.YAMLError)

    async def load(configuration: Configuration) -> None:
        try:
            if in_pod:
                config.load_incluster_config(configuration, try_refresh_token=False)
            else:
                await config.load_kube_config(
                    config_file=path,
                    context=context,
                    client_configuration=configuration,
                    persist_config=False,
                )
        except broken as error:
            raise Unavailable(f"no usable credentials {where}: {error}") from error

    configuration = Configuration()
    await load(configuration)
    credentials = _FoundCredentials(configuration, load, refresh=in_pod)
    try:
        credentials.tls()  # a missing or broken file is to be noticed now
    except (OSError, ValueError) as error:
        raise Unavailable(f"no usable credentials {where}: {error}") from error
    return credentials
