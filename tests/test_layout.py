"""The layout must not shadow the standard library's `operator`, nor grow packages by accident."""

from __future__ import annotations

import operator
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parent.parent
STDLIB = Path(sysconfig.get_paths()["stdlib"])


def test_operator_of_this_process_is_the_standard_librarys() -> None:
    assert operator.__file__ is not None

    assert STDLIB in Path(operator.__file__).parents


def test_operator_of_a_fresh_interpreter_at_the_root_is_the_standard_librarys() -> None:
    """The `pytest` command does not put the root on its path, so it alone would not notice."""
    found = subprocess.run(
        [sys.executable, "-c", "import collections, operator; print(operator.__file__)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert STDLIB in Path(found.stdout.strip()).parents


def test_folders_that_are_no_packages_have_no_init_file() -> None:
    found = [
        path.relative_to(ROOT)
        for path in (
            ROOT / "router" / "__init__.py",
            ROOT / "operator" / "__init__.py",
            *(ROOT / "tests").rglob("__init__.py"),
        )
        if path.exists()
    ]

    assert found == []


def test_pinned_versions_name_no_place_they_came_from() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()

    odd = [line for line in lines if line and not line.startswith("#") and line.count("==") != 1]

    assert odd == []
