"""A router as a process beside a real cluster, and a client that talks to it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cluster_kubectl import until
from harness import ROOT, Cluster


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def member(self) -> str:
        """Who answered."""
        return self.headers.get("x-modelpool-member", "")

    @property
    def code(self) -> str:
        """Code of an error of ours."""
        return str(json.loads(self.body)["error"]["code"])

    @property
    def message(self) -> str:
        """Words of an error of ours."""
        return str(json.loads(self.body)["error"]["message"])


class Front:
    """
    A router that listens somewhere.

    Args of the constructor:
        address: Host and port of the data port.
    """

    def __init__(self, address: str) -> None:
        self.address = address

    def chat(self, model: str, timeout_s: float = 90.0, **more: Any) -> Answer:
        """Ask *model* something."""
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], **more}
        return self.request("POST", "/v1/chat/completions", body, timeout_s)

    def request(self, method: str, path: str, body: Any = None, timeout_s: float = 30.0) -> Answer:
        """Send one request to the data port."""
        connection = http.client.HTTPConnection(self.address, timeout=timeout_s)
        try:
            headers = {"Content-Type": "application/json"} if body is not None else {}
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, headers)
            answer = connection.getresponse()
            pairs = {key.lower(): value for key, value in answer.getheaders()}
            return Answer(answer.status, pairs, answer.read())
        finally:
            connection.close()


class RouterProcess(Front):
    """
    `modelpool serve` on free ports of loopback.

    Args of the constructor:
        cluster: Whose kubeconfig it uses.
        folder: For its file, state and log; made if need be.
        holder: Its name as the holder of Leases, as if it were that Pod.
        config: The rest of its file.
    """

    def __init__(self, cluster: Cluster, folder: Path, holder: str, **config: Any) -> None:
        super().__init__("")
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "router.log"
        self._file = folder / "pool.yaml"
        self._cluster = cluster
        self._holder = holder
        self._settings = {
            "listen": "127.0.0.1:0",
            "admin": "127.0.0.1:0",
            "stateDir": str(folder / "state"),
            "shutdownDelay": "0s",
            "shutdownTimeout": "5s",
            "logFormat": "json",
            "kubernetes": {"kubeconfig": str(cluster.kubeconfig)},
            **config,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self.configure()

    def configure(self, **config: Any) -> None:
        """Write its file, with *config* in place of what was there; one that runs reads it."""
        self._settings |= config
        fresh = self._file.with_suffix(".new")
        fresh.write_text(json.dumps(self._settings))  # JSON is YAML
        fresh.replace(self._file)

    def start(self) -> None:
        """Start it and wait until it listens."""
        self.log.write_bytes(b"")
        environ = {**self._cluster.kubectl.environ(), "POD_NAME": self._holder}
        paths = [str(ROOT / "router"), str(ROOT / "operator")]
        with self.log.open("ab") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "modelpool_router", "serve", str(self._file)],
                stdout=sink,
                stderr=sink,
                env={**environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
        told = until(lambda: self.said("listening") or self._process_ended(), "the router listens")
        assert isinstance(told, list), self.log.read_text()
        self.address = urlsplit(told[0]["url"]).netloc
        self._admin = urlsplit(told[0]["admin"]).netloc

    def _process_ended(self) -> bool:
        assert self._process is not None
        return self._process.poll() is not None

    def said(self, event: str) -> list[Any]:
        """Return its log lines about *event*."""
        lines = [line for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in map(json.loads, lines) if line.get("event") == event]

    def send(self, number: signal.Signals) -> None:
        """Send it a signal and wait for nothing."""
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it; return its exit code."""
        if self._process is None:
            return 0
        self._process.send_signal(number)
        code = self._process.wait(timeout=30)
        self._process = None
        return code

    def pool(self) -> Any:
        """Return the state of its one pool."""
        connection = http.client.HTTPConnection(self._admin, timeout=10)
        try:
            connection.request("GET", "/api/v1/state")
            return json.loads(connection.getresponse().read())["pools"][0]
        finally:
            connection.close()
