"""The operator as a process beside a real cluster, and the objects that are shipped with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from cluster_kubectl import Kubectl, Object
from harness import ROOT


def base() -> Iterator[Object]:
    """Yield the shipped objects, but for the Deployment: its image cannot be pulled here."""
    for folder in ("crds", "operator", "policy"):
        listed = yaml.safe_load((ROOT / "manifests" / folder / "kustomization.yaml").read_text())
        for name in listed["resources"]:
            for each in yaml.safe_load_all((ROOT / "manifests" / folder / name).read_text()):
                if each["kind"] != "Deployment":
                    yield each


def install(kubectl: Kubectl) -> None:
    """Put the shipped objects into the cluster; what is there already is brought up to date."""
    objects = list(base())
    first = [each for each in objects if each["kind"] in ("CustomResourceDefinition", "Namespace")]
    kubectl.apply(*first)
    for each in first:
        if each["kind"] == "CustomResourceDefinition":
            name = f"crd/{each['metadata']['name']}"
            kubectl("wait", "--for=condition=Established", name, "--timeout=60s")
    kubectl.apply(*[each for each in objects if each not in first])


class Operator:
    """A `modelpool-operator` process."""

    def __init__(self, kubeconfig: Path, log: Path, name: str) -> None:
        self.log = log
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    *("-m", "modelpool_operator"),
                    *("--kubeconfig", str(kubeconfig), "--identity", name),
                    *("--lease-namespace", "modelpool-system", "--listen", "127.0.0.1:0"),
                ],
                stdout=sink,
                stderr=sink,
                env={**os.environ, "PYTHONPATH": str(ROOT / "operator")},
            )

    def send(self, number: signal.Signals) -> None:
        """Send it a signal and wait for nothing."""
        self._process.send_signal(number)

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it; return its exit code."""
        self._process.send_signal(number)
        return self._process.wait(timeout=30)

    def said(self) -> list[Any]:
        """Return its log."""
        lines = self.log.read_text("utf-8").splitlines()
        return [json.loads(each) for each in lines if each.startswith("{")]


Start = Callable[[str], Operator]
"""The fixture `start`: makes an operator that runs, by its name as a holder."""
