"""The commands for people, as somebody with one kubeconfig runs them in one namespace."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cluster_kubectl import Kubectl
from harness import ROOT


class Commands:
    """
    `modelpool`, run as a process.

    Args of the constructor:
        kubectl: Of the cluster.
        namespace: Where.
        kubeconfig: Whose rights they have; None means those of *kubectl*.
    """

    def __init__(self, kubectl: Kubectl, namespace: str, kubeconfig: Path | None = None) -> None:
        self._kubectl = kubectl
        self._namespace = namespace
        self._kubeconfig = kubeconfig or kubectl.kubeconfig

    def __call__(self, *words: str, code: int = 0) -> str:
        """Run one; return what it prints, after seeing that it ends with *code*."""
        paths = os.pathsep.join((str(ROOT / "router"), str(ROOT / "operator")))
        environ = {**self._kubectl.environ(), "PYTHONPATH": paths, "COLUMNS": "200"}
        place = ("-n", self._namespace, "--kubeconfig", str(self._kubeconfig))
        done = subprocess.run(
            [sys.executable, "-m", "modelpool_router", *words, *place],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=environ,
        )
        assert done.returncode == code, (words, done.stdout, done.stderr)
        return done.stdout if not code else done.stdout + done.stderr
