"""The short way to a router: the same router, without the rest of the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from modelpool_router.cli import starting
from modelpool_router.cli.main import app
from modelpool_router.settings import Settings

CONFIG = {
    "listen": "127.0.0.1:0",
    "admin": "off",
    "shutdownDelay": "0s",
    "pools": [
        {
            "name": "gpu0",
            "members": [{"name": "a", "command": [sys.executable, "-c", "", "{port}"]}],
        }
    ],
}


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "pool.yaml"
    path.write_text(json.dumps({**CONFIG, "stateDir": str(tmp_path / "state")}))
    return str(path)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Settings of every router that would have been started."""
    found: list[Settings] = []

    def run(settings: Settings) -> int:
        found.append(settings)
        return 7

    monkeypatch.setattr(starting, "run", run)
    monkeypatch.setattr(starting, "prepare_imports", lambda: None)
    return found


def test_flags_are_those_of_the_command() -> None:
    command = typer.main.get_command(app)
    serve = command.commands["serve"]  # type: ignore[attr-defined]  # a group
    flags = {parameter.opts[0]: parameter.is_flag for parameter in serve.params[1:]}

    assert flags == dict.fromkeys(starting.VALUES, False) | dict.fromkeys(starting.SWITCHES, True)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--listen", "127.0.0.1:1234"],
        ["--listen=127.0.0.1:1234", "--admin", "127.0.0.1:0"],
        ["--state-dir", "here/below", "--log-level", "debug", "--log-format=json"],
        ["--allow-anonymous", "--listen", "0.0.0.0:0", "--listen", "127.0.0.1:9"],
        ["--admin-token-file", "token", "--keys-file", "keys"],
    ],
)
def test_both_ways_lead_to_the_same_router(
    words: Sequence[str],
    file: str,
    started: list[Settings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys").write_text("me: sk-something-secret\n")
    (tmp_path / "token").write_text("token-something-secret\n")

    assert starting.serve_at_once(["serve", file, *words]) == 7
    assert CliRunner().invoke(app, ["serve", file, *words]).exit_code == 7

    short, whole = started
    assert short.model_dump() == whole.model_dump()
    assert short.source is not None and whole.source is not None
    given, expected = short.source.overrides, whole.source.overrides
    assert {key: str(value) for key, value in given.items()} == {
        key: str(value) for key, value in expected.items()
    }
    assert short.source.path == whole.source.path


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["check", "pool.yaml"],
        ["--version"],
        ["serve", "--help"],
        ["serve", "pool.yaml", "--nonsense"],
        ["serve", "pool.yaml", "--listen"],
        ["serve", "pool.yaml", "--listen", "--admin"],
        ["serve", "pool.yaml", "--listen="],
        ["serve", "pool.yaml", "--allow-anonymous=yes"],
        ["serve", "pool.yaml", "another.yaml"],
        ["serve", "missing.yaml"],
        ["serve", "--", "pool.yaml"],
    ],
)
def test_whatever_is_not_plain_is_left_to_the_whole_command_line(
    words: Sequence[str], file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(file).parent)

    assert starting.read_command(words, {}) is None


def test_completion_is_left_to_the_whole_command_line(file: str) -> None:
    assert starting.read_command(["serve", file], {"_MODELPOOL_COMPLETE": "x"}) is None


def test_the_file_is_found_as_always(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(file).parent)
    (Path(file).parent / starting.DEFAULT_FILE).write_text("")

    assert starting.read_command(["serve"], {}) == (Path(starting.DEFAULT_FILE), {})
    assert starting.read_command(["serve"], {starting.FILE_VARIABLE: file}) == (Path(file), {})
    assert starting.read_command(["serve"], {starting.FILE_VARIABLE: ""}) == (
        Path(starting.DEFAULT_FILE),
        {},
    )


@pytest.mark.parametrize("text", ["listen: nonsense", "pools: 1", "listen: [", "nonsense: 1"])
def test_a_file_with_an_error_is_left_to_who_explains_it(
    text: str, file: str, started: list[Settings]
) -> None:
    Path(file).write_text(text)

    assert starting.serve_at_once(["serve", file]) is None
    assert CliRunner().invoke(app, ["serve", file]).exit_code == 2
    assert not started


def test_a_warning_is_left_to_who_prints_it(
    file: str, started: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELPOOL_NONSENSE", "1")

    assert starting.serve_at_once(["serve", file]) is None
    result = CliRunner().invoke(app, ["serve", file])

    assert result.exit_code == 7 and "MODELPOOL_NONSENSE" in result.stderr
    assert len(started) == 1


def test_a_router_starts_without_what_it_never_uses(file: str, tmp_path: Path) -> None:
    with (
        (tmp_path / "imports").open("w+") as imports,
        subprocess.Popen(
            [sys.executable, "-X", "importtime", "-m", "modelpool_router", "serve", file],
            stdout=subprocess.PIPE,
            stderr=imports,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        ) as process,
    ):
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        imports.seek(0)
        imported = {line.rpartition("|")[2].strip() for line in imports}

    assert "listening" in first and process.returncode == 0
    assert "modelpool_router.app.router" in imported
    # What is hidden is listed, but its parts are not.
    loaded = {name.partition(".")[0] for name in imported if "." in name}
    assert not loaded & {"aiodns", "pycares", "rich", "typer"}
    assert "modelpool_router.cli.main" not in imported
