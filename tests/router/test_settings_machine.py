"""Programs, folders, secrets and ports that are not there are found before anything starts."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from modelpool_router.settings import Problem, find_program, load, verify

TEXT = """\
stateDir: state
pools:
  - name: gpu0
    members:
      - name: a
        command: [serve, "{port}"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a program in ``bin`` (which is PATH) and one in ``work``."""
    for name in ("bin/serve", "work/run.sh"):
        path = tmp_path / name
        path.parent.mkdir()
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    (tmp_path / "plain").write_text("")
    return tmp_path


def check(folder: Path, text: str, *, ports: bool = False, **environ: str) -> list[Problem]:
    (folder / "pool.yaml").write_text(text)
    settings = load(folder / "pool.yaml")
    return verify(settings, {"PATH": str(folder / "bin"), **environ}, ports=ports)


def one(problems: list[Problem], folder: Path) -> tuple[Any, ...]:
    (problem,) = problems
    assert problem.file == str(folder / "pool.yaml")
    return problem.line, problem.column, problem.field, problem.reason, problem.way_out


def with_command(command: str) -> str:
    return TEXT.replace('[serve, "{port}"]', command)


def test_a_machine_that_has_everything(folder: Path) -> None:
    text = with_command('[./run.sh, "{port}"]') + (
        "        workingDirectory: work\n"
        "        stopCommand: [serve]\n"
        "    memorySettle: {command: [serve]}\n"
        "adminToken: {file: secret}\n"
        "keys: {env: POOL_KEYS}\n"
    )
    (folder / "secret").write_text("s\n")

    assert check(folder, text, POOL_KEYS="k") == []


def test_a_program_that_is_not_in_path(folder: Path) -> None:
    assert one(check(folder, with_command('[llama-server, "{port}"]')), folder) == (
        6,
        9,
        "pools[0].members[0].command",
        "the program 'llama-server' is not in PATH",
        "install it, correct the name, or write its full path",
    )


def test_the_path_of_the_member_counts(folder: Path) -> None:
    text = with_command('[run.sh, "{port}"]') + f"        env: {{PATH: {folder / 'work'}}}\n"

    assert check(folder, text) == []


def test_a_relative_program_counts_from_the_working_directory(folder: Path) -> None:
    text = with_command('[./run.sh, "{port}"]')

    assert one(check(folder, text), folder) == (
        6,
        9,
        "pools[0].members[0].command",
        f"{folder}/run.sh does not exist",
        "correct the path; it counts from workingDirectory",
    )
    assert check(folder, text + "        workingDirectory: work\n") == []


def test_a_program_that_may_not_be_executed(folder: Path) -> None:
    problems = check(folder, with_command('[./plain, "{port}"]'))

    assert one(problems, folder)[3:] == (
        f"{folder}/plain is not executable",
        f"chmod +x {folder}/plain",
    )


def test_a_program_that_is_a_folder(folder: Path) -> None:
    problems = check(folder, with_command('[./bin, "{port}"]'))

    assert one(problems, folder)[3:] == (
        f"{folder}/bin is a folder",
        "name the program inside it",
    )


def test_every_command_is_looked_for(folder: Path) -> None:
    text = TEXT + (
        "        stopCommand: [nope1]\n"
        "        goneCommand: [nope2]\n"
        "    memorySettle: {command: [nope3]}\n"
    )

    assert sorted((each.line, each.field) for each in check(folder, text)) == [
        (7, "pools[0].members[0].stopCommand"),
        (8, "pools[0].members[0].goneCommand"),
        (9, "pools[0].memorySettle.command"),
    ]


def test_a_working_directory_that_is_not_there(folder: Path) -> None:
    problems = check(folder, TEXT + "        workingDirectory: nowhere\n")

    assert one(problems, folder) == (
        7,
        9,
        "pools[0].members[0].workingDirectory",
        f"{folder}/nowhere does not exist",
        "create it or correct the path",
    )


@pytest.mark.parametrize(
    ("line", "field", "reason", "way_out"),
    [
        (
            "keys: {env: POOL_KEYS}",
            "keys",
            "the environment variable POOL_KEYS is not set",
            "set it where the router is started, or use {file: PATH}",
        ),
        (
            "adminToken: {file: nowhere}",
            "adminToken",
            "{folder}/nowhere: No such file or directory",
            "create the file or correct the path",
        ),
        (
            "adminToken: {file: plain}",
            "adminToken",
            "{folder}/plain is empty",
            "put the secret into it",
        ),
        (
            "upstreams: [{name: u, url: 'http://u', apiKey: {file: plain}}]",
            "upstreams[0].apiKey",
            "{folder}/plain is empty",
            "put the secret into it",
        ),
    ],
)
def test_a_secret_that_cannot_be_read(
    folder: Path, line: str, field: str, reason: str, way_out: str
) -> None:
    problems = check(folder, TEXT + line + "\n")

    assert one(problems, folder)[2:] == (field, reason.format(folder=folder), way_out)


def test_a_state_folder_that_is_a_file(folder: Path) -> None:
    problems = check(folder, TEXT.replace("stateDir: state", "stateDir: plain/state"))

    assert one(problems, folder) == (
        1,
        1,
        "stateDir",
        f"{folder}/plain is not a folder",
        "set stateDir to a folder that this user can write to",
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_state_folder_without_rights(folder: Path) -> None:
    (folder / "work").chmod(0o555)

    problems = check(folder, TEXT.replace("stateDir: state", "stateDir: work/state"))

    assert one(problems, folder)[3] == f"{folder}/work cannot be written to"


def test_a_port_in_use(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = TEXT + f"listen: 127.0.0.1:{port}\nadmin: 127.0.0.1:0\n"

        without_ports = check(folder, text)
        problems = check(folder, text, ports=True)

    assert without_ports == []
    assert one(problems, folder) == (
        7,
        1,
        "listen",
        f"port {port} is already in use on 127.0.0.1",
        "stop the program that uses it, or choose another with --listen",
    )


def test_free_ports_are_left_free(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    text = TEXT + f"listen: 127.0.0.1:{port}\nadmin: off\n"

    assert check(folder, text, ports=True) == []
    assert check(folder, text, ports=True) == []


def test_an_address_of_another_machine(folder: Path) -> None:
    text = TEXT + "listen: 192.0.2.1:8080\nallowAnonymous: true\nadmin: off\n"

    problems = check(folder, text, ports=True)

    assert one(problems, folder)[2:] == (
        "listen",
        "cannot listen on 192.0.2.1:8080: Cannot assign requested address",
        "use an address of this machine, such as 127.0.0.1",
    )


def test_programs_are_found_as_the_kernel_does(folder: Path) -> None:
    assert find_program("serve", folder, str(folder / "bin")) == folder / "bin" / "serve"
    assert find_program("bin/serve", folder, None) == folder / "bin" / "serve"
    assert find_program(str(folder / "bin" / "serve"), Path("/"), None) == folder / "bin" / "serve"
    assert find_program("run.sh", folder / "work", str(folder / "bin")) is None
