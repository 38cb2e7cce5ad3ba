"""The command line as a whole: help, version, completion, speed, exit codes."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from modelpool_router.cli.exits import EXIT_CODES_HELP, ExitCode
from modelpool_router.cli.main import app

run = CliRunner().invoke
WIDE = {"COLUMNS": "200", "TERM": "dumb"}
COMMANDS = (
    *("serve", "demo", "check", "init", "status", "why", "load", "unload", "pause", "resume"),
    "config",
)


def test_help_lists_every_command_and_the_exit_codes() -> None:
    result = run(app, ["--help"], env=WIDE)

    assert result.exit_code == 0
    for command in COMMANDS:
        assert f"│ {command} " in result.stdout
    assert EXIT_CODES_HELP in " ".join(result.stdout.split())


@pytest.mark.parametrize("command", [*COMMANDS[:-1], "config schema", "config reference"])
def test_help_of_every_command(command: str) -> None:
    result = run(app, [*command.split(), "--help"], env=WIDE)

    assert result.exit_code == 0
    assert f"modelpool {command}" in result.stdout or command in result.stdout


@pytest.mark.parametrize(
    ("command", "default"),
    [
        ("serve", "[default: (127.0.0.1:8080)]"),
        ("serve", "[default: (~/.local/state/modelpool)]"),
        ("status", "[default: 127.0.0.1:9090]"),
        ("status", "[env var: MODELPOOL_ADMIN"),
        ("load", "[default: wait]"),
        ("init", "[default: llama-server]"),
    ],
)
def test_help_shows_defaults(command: str, default: str) -> None:
    assert default in run(app, [command, "--help"], env=WIDE).stdout


def test_version() -> None:
    result = run(app, ["--version"])

    assert result.stdout == f"modelpool {importlib.metadata.version('modelpool')}\n"


@pytest.mark.parametrize("arguments", [["status", "--nonsense"], ["nonsense"], ["why"]])
def test_wrong_usage_ends_with_2(arguments: list[str]) -> None:
    assert run(app, arguments).exit_code == ExitCode.USAGE


@pytest.mark.parametrize("arguments", [["--help"], ["status", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    # typer itself reads some flags with pydantic.
    heavy = ("aiohttp", "pydantic_settings", "ruamel", "msgspec", "structlog", "asyncio", "uvloop")
    code = (
        "import sys\n"
        "from modelpool_router.cli.main import app\n"
        "try:\n"
        f"    app({arguments!r})\n"
        "except SystemExit:\n"
        "    pass\n"
        f"print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)\n"
    )

    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )

    assert result.stderr.strip() == "[]"


def test_module_and_command_are_the_same() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "modelpool_router", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )

    assert (result.returncode, result.stdout.split()[0]) == (0, "modelpool")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "modelpool_router"],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "_MODELPOOL_COMPLETE": f"complete_{shell}",
            "COMP_WORDS": "modelpool sta",
            "COMP_CWORD": "1",
            "_TYPER_COMPLETE_ARGS": "modelpool sta",
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        },
    )

    assert "status" in result.stdout
