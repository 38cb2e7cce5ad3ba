"""``check``, ``init`` and ``config``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from modelpool_router.cli.main import app
from modelpool_router.settings import load
from modelpool_router.settings.reference import reference_text

run = CliRunner().invoke

GOOD = f"""\
stateDir: state
pools:
  - name: gpu0
    members:
      - name: a
        command: [{sys.executable}, "{{port}}"]
      - name: b
        command: [{sys.executable}, "{{port}}"]
upstreams:
  - name: u
    url: http://10.0.0.7:8080
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has a folder of its own as the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_check_of_a_good_file(here: Path) -> None:
    (here / "pool.yaml").write_text(GOOD)

    result = run(app, ["check", "pool.yaml"])

    assert result.exit_code == 0, result.output
    assert result.stdout == (
        "pool.yaml: ok - 1 pool, 2 members, 1 upstream; listens on 127.0.0.1:8080\n"
    )


def test_check_of_a_bad_file_says_everything_and_ends_with_2(here: Path) -> None:
    (here / "pool.yaml").write_text(GOOD.replace("name: b", "name: a") + "maxheld: 3\n")

    result = run(app, ["check", "pool.yaml"])

    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == (
        "error: 2 problems in the configuration:\n"
        "pool.yaml:7:9: pools[0].members[1].name: "
        "'a' is already taken by pools[0].members[0] (line 5)\n"
        "    way out: names and aliases are unique over all members and upstreams: "
        "rename or remove one\n"
        "pool.yaml:12:1: maxheld: this key is not known here\n"
        "    way out: did you mean maxHeld?\n"
    )


def test_check_looks_for_programs_unless_told_not_to(here: Path) -> None:
    (here / "pool.yaml").write_text(GOOD.replace(sys.executable, "no-such-program", 1))

    on_machine = run(app, ["check", "pool.yaml"])
    file_only = run(app, ["check", "pool.yaml", "--file-only"])

    assert on_machine.exit_code == 2
    assert (
        "pool.yaml:6:9: pools[0].members[0].command: the program 'no-such-program' is not in PATH\n"
        "    way out: install it, correct the name, or write its full path\n"
    ) in on_machine.stderr
    assert file_only.exit_code == 0


def test_check_shows_warnings_but_accepts(here: Path) -> None:
    (here / "pool.yaml").write_text(GOOD + "admin: 0.0.0.0:9090\n")

    result = run(app, ["check", "pool.yaml"], env={"MODELPOOL_MAX_HELDD": "3"})

    assert result.exit_code == 0
    assert "warning: pool.yaml:12:1: admin: 0.0.0.0:9090 can be reached" in result.stderr
    assert "MODELPOOL_MAX_HELDD: this variable sets nothing" in result.stderr


@pytest.mark.parametrize("command", ["check", "serve"])
def test_without_a_file_the_way_out_is_told(command: str) -> None:
    result = run(app, [command])

    assert result.exit_code == 2
    assert result.stderr == (
        "error: no configuration file is named, and there is no modelpool.yaml here\n"
        "    way out: name one, write one with `modelpool init`, or try `modelpool demo`\n"
    )


def test_file_of_the_usual_name_or_of_the_environment_is_taken(here: Path) -> None:
    (here / "modelpool.yaml").write_text(GOOD)
    (here / "other.yaml").write_text(GOOD)

    assert run(app, ["check"]).stdout.startswith("modelpool.yaml: ok")
    other = run(app, ["check"], env={"MODELPOOL_CONFIG": "other.yaml"})
    assert other.stdout.startswith("other.yaml: ok")


def test_serve_refuses_a_bad_file_before_anything_starts(here: Path) -> None:
    (here / "pool.yaml").write_text(GOOD.replace(sys.executable, "no-such-program"))

    result = run(
        app,
        ["serve", "pool.yaml", "--listen", "0.0.0.0:0", "--admin", "off"],
        catch_exceptions=False,
    )

    assert result.exit_code == 2
    assert "flag --listen: listen: 0.0.0.0:0 can be reached" in result.stderr
    assert not (here / "state").exists()


def test_init_writes_a_file_that_check_accepts(here: Path) -> None:
    program = here / "bin" / "llama-server"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)

    result = run(
        app,
        [
            *("init", "--llama-server", "bin/llama-server"),
            *("--model", "tiny-a=models/a b.gguf", "--model", "org/b=models/b.gguf"),
        ],
    )

    assert result.exit_code == 0, result.output
    assert result.stdout == (
        "wrote modelpool.yaml\nnext:\n"
        "  modelpool check modelpool.yaml\n  modelpool serve modelpool.yaml\n"
    )
    assert run(app, ["check"], env={"XDG_STATE_HOME": str(here)}).exit_code == 0
    pool = load("modelpool.yaml").pools[0]
    assert pool.default == "tiny-a"
    assert [member.name for member in pool.members] == ["tiny-a", "org/b"]
    assert pool.members[0].command == (
        *("bin/llama-server", "--model", "models/a b.gguf", "--alias", "tiny-a"),
        *("--port", "{port}"),
    )


@pytest.mark.parametrize(
    ("profile", "command"),
    [
        ("vllm", ("vllm", "serve", "m/x", "--served-model-name", "a", "--port", "{port}")),
        (
            "sglang",
            (
                *("python", "-m", "sglang.launch_server", "--model-path", "m/x"),
                *("--served-model-name", "a", "--port", "{port}"),
            ),
        ),
        ("tgi", ("text-generation-launcher", "--model-id", "m/x", "--port", "{port}")),
        ("generic", ("m/x", "--port", "{port}")),
    ],
)
def test_init_knows_the_engines(here: Path, profile: str, command: tuple[str, ...]) -> None:
    result = run(app, ["init", "--profile", profile, "--model", "a=m/x", "-o", "x.yaml"])

    assert result.exit_code == 0, result.output
    member = load("x.yaml").pools[0].members[0]
    assert (member.profile, member.command) == (profile, command)


def test_init_without_models_writes_placeholders(here: Path) -> None:
    result = run(app, ["init"])

    assert "put your own model files into it, then:" in result.stdout
    assert [member.name for member in load("modelpool.yaml").pools[0].members] == ["small", "large"]
    file = here / "modelpool.yaml"
    file.write_text(file.read_text().replace("# models:", "models:"))
    members = load(file).pools[0].members
    assert [member.models for member in members] == [("my-small",), ("my-large",)]


def test_init_never_overwrites(here: Path) -> None:
    (here / "modelpool.yaml").write_text("mine")

    result = run(app, ["init"])

    assert result.exit_code == 1
    assert result.stderr == (
        "error: modelpool.yaml exists already\n    way out: remove it, or choose another with -o\n"
    )
    assert (here / "modelpool.yaml").read_text() == "mine"


def test_init_to_stdout_writes_no_file(here: Path) -> None:
    result = run(app, ["init", "-o", "-", "--model", "a=a.gguf"])

    assert result.stdout.startswith("# Configuration of modelpool")
    assert list(here.iterdir()) == []


def test_init_in_another_folder_keeps_paths_right(here: Path) -> None:
    (here / "models").mkdir()
    (here / "models" / "a.gguf").write_text("")
    (here / "etc").mkdir()

    run(app, ["init", "-o", "etc/pool.yaml", "--model", "a=models/a.gguf"])

    command = load("etc/pool.yaml").pools[0].members[0].command
    assert command is not None
    assert command[2] == str(here / "models" / "a.gguf")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--model", "a.gguf"], "--model 'a.gguf' is not NAME=FILE"),
        (["--profile", "ollama"], "there is no profile 'ollama'"),
        (["--model", "a=x", "--model", "a=y"], "'a' is already taken by"),
        (["--pool", "a/b"], "'a/b' cannot name a pool"),
    ],
)
def test_init_with_wrong_flags(here: Path, flags: list[str], told: str) -> None:
    result = run(app, ["init", *flags])

    assert result.exit_code == 2
    assert told in result.stderr
    assert list(here.iterdir()) == []


def test_config_prints_schema_and_reference() -> None:
    assert json.loads(run(app, ["config", "schema"]).stdout)["title"] == "modelpool configuration"
    assert run(app, ["config", "reference"]).stdout == reference_text()
