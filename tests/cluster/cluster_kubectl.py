"""The real kubectl, as tests and the harness call it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

Object = dict[str, Any]
T = TypeVar("T")


class KubectlFailed(Exception):
    """kubectl ended with an error; ``stderr`` is what it said."""

    def __init__(self, argv: list[str], code: int, stderr: str) -> None:
        super().__init__(f"kubectl {' '.join(argv)}: exit code {code}: {stderr.strip()}")
        self.code = code
        self.stderr = stderr


class Kubectl:
    """kubectl with one kubeconfig."""

    def __init__(self, program: Path, kubeconfig: Path, cache: Path) -> None:
        self.program = program
        self.kubeconfig = kubeconfig
        self._cache = cache

    def __call__(self, *args: str, stdin: str | None = None, timeout_s: float = 120) -> str:
        """
        Run kubectl and return what it prints.

        Raises:
            KubectlFailed: It ended with a code other than 0.
        """
        done = subprocess.run(
            [str(self.program), *args],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=self.environ(),
        )
        if done.returncode:
            raise KubectlFailed(list(args), done.returncode, done.stderr)
        return done.stdout

    def environ(self) -> dict[str, str]:
        """The environment that kubectl (or another client of the cluster) needs."""
        proxies = ("http_proxy", "https_proxy", "all_proxy")
        kept = {key: value for key, value in os.environ.items() if key.lower() not in proxies}
        return {**kept, "KUBECONFIG": str(self.kubeconfig), "KUBECACHEDIR": str(self._cache)}

    def get(self, *args: str) -> Object:
        """``kubectl get ARGS -o json``, parsed; an empty object where it is not found."""
        try:
            found: Object = json.loads(self("get", *args, "-o", "json"))
        except KubectlFailed as failed:
            if "NotFound" in failed.stderr:
                return {}
            raise
        return found

    def items(self, *args: str) -> list[Object]:
        """The items of ``kubectl get ARGS``."""
        return list(self.get(*args).get("items") or [])

    def watch(self, *args: str) -> subprocess.Popen[str]:
        """Begin to watch what ``kubectl get ARGS`` gets. Read it with `changes`, and end it."""
        return subprocess.Popen(
            [str(self.program), "get", *args, "-w", "--output-watch-events", "-o", "json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=self.environ(),
            text=True,
        )

    def apply(self, *objects: Mapping[str, Any]) -> None:
        """Apply *objects* server-side."""
        document = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(document))

    def create(self, *objects: Mapping[str, Any]) -> None:
        """Create *objects*; an existing one is an error."""
        document = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self("create", "-f", "-", stdin=json.dumps(document))


def changes(lines: Iterable[str]) -> Iterator[tuple[str, Object]]:
    """Yield what a watch prints: ``ADDED`` and the like, and the object as it is then."""
    decoder = json.JSONDecoder()
    text = ""
    for line in lines:
        text += line
        if line.startswith((" ", "\t")):
            continue  # in the middle of an object
        while text.strip():
            try:
                event, end = decoder.raw_decode(text.lstrip())
            except json.JSONDecodeError:
                break
            text = text.lstrip()[end:]
            yield event["type"], event["object"]


def until(ask: Callable[[], T], what: str, timeout_s: float = 60) -> T:
    """
    Ask again and again until the answer is true, and return it. For worlds outside of this process.

    Raises:
        AssertionError: Not within *timeout_s*; says *what* was waited for and the last answer.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        answer = ask()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what}; the last answer: {answer!r}")
        time.sleep(0.1)
