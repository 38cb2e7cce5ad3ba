"""
Kueue for the test cluster: its API, its webhooks by address instead of by Service, its settings.

Kueue runs as a local process, so the API server must reach its webhooks by ``url``. Its certificate
is made by us and handed over where Kueue expects its own: in the Secret and in the folder that a
Pod would have mounted; it finds them good and keeps them.
"""

from __future__ import annotations

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from cluster_certs import Authority
from cluster_kubectl import Kubectl

Object = dict[str, Any]

AUTHORITY = "kueue-ca"
"""The name that Kueue's own authority must have, else Kueue makes another one."""
NAMESPACE = "kueue-system"
_SERVICE = "kueue-webhook-service"
_SECRET = "kueue-webhook-server-cert"
_CONVERTED = ("localqueues", "clusterqueues", "workloads", "cohorts", "multikueueclusters")
_OURS = ("kube-system", NAMESPACE)


def install(kubectl: Kubectl, assets: Path, authority: Authority, port: int) -> None:
    """Create Kueue's CRDs, webhooks and certificate Secret; the webhooks are at *port*."""
    kubectl("create", "namespace", NAMESPACE)
    kubectl("create", "-f", str(assets / "crds"))
    ca = base64.b64encode(authority.pair.cert.read_bytes()).decode()
    kubectl.create(*_webhooks(assets / "webhooks.yaml", ca, port), _secret(authority))
    with ThreadPoolExecutor(len(_CONVERTED)) as together:
        list(together.map(lambda plural: _convert(kubectl, plural, ca, port), _CONVERTED))
    kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")


def write_config(path: Path, certificates: Path, *, webhook: int, health: int) -> None:
    """Write Kueue's settings file: plain Pods, Pod groups and Jobs, no other kinds."""
    config = {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": NAMESPACE,
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": "127.0.0.1", "port": webhook, "certDir": str(certificates)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {
            "enable": True,
            "webhookServiceName": _SERVICE,
            "webhookSecretName": _SECRET,
        },
        "clientConnection": {"qps": 200, "burst": 400},
        "integrations": {"frameworks": ["batch/job", "pod"]},
        # The visibility server wants its certificate in a folder at the root of the file system.
        "featureGates": {"VisibilityOnDemand": False},
    }
    path.write_text(json.dumps(config, indent=1), "utf-8")


def place_certificate(authority: Authority, certificates: Path) -> None:
    """Put the webhook server's certificate where Kueue reads it."""
    pair = _pair(authority)
    certificates.mkdir(mode=0o700, parents=True, exist_ok=True)
    (certificates / "tls.crt").write_bytes(pair["tls.crt"])
    (certificates / "tls.key").write_bytes(pair["tls.key"])
    (certificates / "ca.crt").write_bytes(pair["ca.crt"])


def _pair(authority: Authority) -> dict[str, bytes]:
    pair = authority.server("kueue-webhook", dns=(f"{_SERVICE}.{NAMESPACE}.svc",))
    return {
        "ca.crt": authority.pair.cert.read_bytes(),
        "ca.key": authority.pair.key.read_bytes(),
        "tls.crt": pair.cert.read_bytes(),
        "tls.key": pair.key.read_bytes(),
    }


def _secret(authority: Authority) -> Object:
    data = {key: base64.b64encode(value).decode() for key, value in _pair(authority).items()}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": _SECRET, "namespace": NAMESPACE},
        "data": data,
    }


def _client(path: str, ca: str, port: int) -> Object:
    return {"url": f"https://127.0.0.1:{port}{path}", "caBundle": ca, "service": None}


def _webhooks(path: Path, ca: str, port: int) -> list[Object]:
    """Kueue's two webhook configurations, with the names and exceptions of its own install."""
    loaded: list[Object] = list(YAML(typ="safe", pure=True).load_all(path.read_text("utf-8")))
    for configuration in loaded:
        configuration["metadata"]["name"] = "kueue-" + configuration["metadata"]["name"]
        for webhook in configuration["webhooks"]:
            webhook["clientConfig"] = _client(webhook["clientConfig"]["service"]["path"], ca, port)
            if webhook["name"][1:] in ("pod.kb.io", "deployment.kb.io", "statefulset.kb.io"):
                not_ours = {
                    "key": "kubernetes.io/metadata.name",
                    "operator": "NotIn",
                    "values": list(_OURS),
                }
                webhook["namespaceSelector"] = {"matchExpressions": [not_ours]}
    return loaded


def _convert(kubectl: Kubectl, plural: str, ca: str, port: int) -> None:
    conversion = {
        "strategy": "Webhook",
        "webhook": {
            "clientConfig": _client("/convert", ca, port),
            "conversionReviewVersions": ["v1"],
        },
    }
    name, patch = f"{plural}.kueue.x-k8s.io", json.dumps({"spec": {"conversion": conversion}})
    kubectl("patch", "crd", name, "--type=merge", "-p", patch)
