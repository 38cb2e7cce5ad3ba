"""Builds `native/*.c` with the system's compiler; two small programs, a second each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
BUILD = HERE / ".build"


class Natives(NamedTuple):
    """The built programs."""

    upstream: Path
    load: Path


def build() -> Natives:
    """Build what is older than its source; ends the program with one line if that is impossible."""
    if not sys.platform.startswith("linux"):
        sys.exit("the benchmarks need Linux: they read CPU time and memory from /proc")
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        sys.exit("the benchmarks need a C compiler (cc)")
    BUILD.mkdir(exist_ok=True)
    return Natives(_built(compiler, "upstream"), _built(compiler, "load"))


def _built(compiler: str, name: str) -> Path:
    source, target = HERE / "native" / f"{name}.c", BUILD / name
    if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
        draft = target.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [compiler, "-O2", "-Wall", "-o", str(draft), str(source)], check=True, timeout=120
        )
        draft.rename(target)
    return target


if __name__ == "__main__":
    build()
