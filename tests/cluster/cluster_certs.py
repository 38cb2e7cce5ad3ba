"""
Throw-away certificates of one test cluster, made with the ``openssl`` command.

One authority signs the API server's own certificate and every client (the name is the subject's
CN, the groups its O), another the webhook server of Kueue. They live in folders that nobody else
can read, are good for ten years (Kueue renews what ends within 90 days) and are thrown away with
the cluster.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

_DAYS = "3650"


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, both PEM files."""

    cert: Path
    key: Path


class Authority:
    """A certificate authority called *name*, in *folder*."""

    def __init__(self, folder: Path, name: str = "modelpool-test-cluster") -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.pair = Pair(folder / "ca.crt", folder / "ca.key")
        if not self.pair.cert.exists():
            _rsa_key(self.pair.key)
            _openssl(
                "req", "-x509", "-new", "-key", self.pair.key, "-out", self.pair.cert,
                "-days", _DAYS, "-subj", f"/CN={name}",
                # Kueue takes an authority for its own only when this is its name.
                "-addext", f"subjectAltName=DNS:{name}",
                "-addext", "basicConstraints=critical,CA:TRUE",
                "-addext", "keyUsage=critical,digitalSignature,keyCertSign,cRLSign",
            )  # fmt: skip

    def server(self, name: str, *, dns: tuple[str, ...] = ()) -> Pair:
        """A certificate for a server on loopback that is also known by the names *dns*."""
        names = ["IP:127.0.0.1", *(f"DNS:{one}" for one in ("localhost", *dns))]
        return self._sign(
            name,
            subject=f"/CN={name}",
            extensions=("extendedKeyUsage=serverAuth", "subjectAltName=" + ",".join(names)),
        )

    def client(self, name: str, groups: tuple[str, ...] = ()) -> Pair:
        """A certificate that the API server takes for the user *name* in *groups*."""
        organisations = "".join(f"/O={_escaped(group)}" for group in groups)
        return self._sign(
            "client-" + name.replace(":", "-").replace("/", "-"),
            subject=f"{organisations}/CN={_escaped(name)}",
            extensions=("extendedKeyUsage=clientAuth",),
        )

    def signing_key(self, name: str) -> Pair:
        """An RSA key pair for service account tokens; ``cert`` is the bare public key."""
        pair = Pair(self.folder / f"{name}.pub", self.folder / f"{name}.key")
        if not pair.cert.exists():
            _rsa_key(pair.key)
            _openssl("rsa", "-in", pair.key, "-pubout", "-out", pair.cert)
        return pair

    def kubeconfig(self, server: str, client: Pair, path: Path) -> Path:
        """Write a kubeconfig that carries everything inside itself, so that it can be moved."""
        user = {
            "client-certificate-data": _encoded(client.cert),
            "client-key-data": _encoded(client.key),
        }
        return self.write_kubeconfig(server, user, path)

    def write_kubeconfig(
        self, server: str, user: dict[str, str], path: Path, namespace: str = "default"
    ) -> Path:
        """Write a kubeconfig for *user* (a kubeconfig user entry: a token, or certificate data)."""
        content = kubeconfig_content(server, _encoded(self.pair.cert), user, namespace)
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)  # JSON is YAML
        return path

    def _sign(self, name: str, *, subject: str, extensions: tuple[str, ...]) -> Pair:
        pair = Pair(self.folder / f"{name}.crt", self.folder / f"{name}.key")
        if pair.cert.exists():
            return pair
        request = self.folder / f"{name}.csr"
        config = self.folder / f"{name}.ext"
        config.write_text("\n".join(extensions) + "\n", "utf-8")
        self._key(pair.key)
        _openssl("req", "-new", "-key", pair.key, "-subj", subject, "-out", request)
        _openssl(
            "x509", "-req", "-in", request, "-CA", self.pair.cert, "-CAkey", self.pair.key,
            "-CAcreateserial", "-days", _DAYS, "-extfile", config, "-out", pair.cert,
        )  # fmt: skip
        return pair

    def _key(self, path: Path) -> None:
        _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", path)
        path.chmod(0o600)


def kubeconfig_content(
    server: str, ca_base64: str, user: dict[str, str], namespace: str
) -> dict[str, object]:
    """A kubeconfig with one cluster, one user and one context."""
    cluster = {"server": server, "certificate-authority-data": ca_base64}
    context = {"cluster": "test", "user": "user", "namespace": namespace}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "user", "user": user}],
        "contexts": [{"name": "test", "context": context}],
        "current-context": "test",
    }


def _rsa_key(path: Path) -> None:
    """An RSA key in the old PEM form, the only one that Kueue reads its authority's key from."""
    _openssl("genrsa", "-out", path, "2048")
    if "BEGIN RSA" not in path.read_text("utf-8"):
        _openssl("rsa", "-traditional", "-in", path, "-out", path)
    path.chmod(0o600)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("/", "\\/")


def _encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def _openssl(*args: str | Path) -> None:
    done = subprocess.run(
        ["openssl", *map(str, args)], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        raise RuntimeError(f"openssl {args[0]} failed: {done.stderr.strip()}")
