"""``modelpool serve`` on a configuration that cannot work: told at once, before anything starts."""

from __future__ import annotations

import socket
from pathlib import Path

from served import configuration, member, pool, serve_and_fail, write_config


def line_of(path: Path, text: str) -> int:
    """Return the number of the only line that contains *text*."""
    lines = path.read_text(encoding="utf-8").splitlines()
    (found,) = (number for number, line in enumerate(lines, 1) if text in line)
    return found


async def test_every_mistake_is_told_with_its_line_and_a_way_out(tmp_path: Path) -> None:
    twins = (member("alpha", keys={"models": ["fast"]}), member("beta", keys={"models": ["fast"]}))
    config = configuration(tmp_path, pool(*twins, default="gamma", maxTurn="25h"))
    config["shutdwonDelay"] = "1s"
    path = tmp_path / "pool.yaml"
    write_config(path, config)
    code, errors = await serve_and_fail(path)
    assert code == 2
    assert f"pool.yaml:{line_of(path, 'shutdwonDelay')}:" in errors
    assert "did you mean shutdownDelay?" in errors
    assert f"pool.yaml:{line_of(path, 'maxTurn')}:" in errors
    assert "out of range" in errors
    assert f"pool.yaml:{line_of(path, 'default')}:" in errors
    assert "'gamma'" in errors
    assert "'fast'" in errors
    assert errors.count("way out:") >= 4
    assert "Traceback" not in errors
    assert not (tmp_path / "state").exists()
    assert not (tmp_path / "members.jsonl").exists()


async def test_a_key_that_stands_twice(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    write_config(path, configuration(tmp_path, pool(member("alpha"))))
    path.write_text(path.read_text(encoding="utf-8") + "listen: 127.0.0.1:1\n", encoding="utf-8")
    code, errors = await serve_and_fail(path)
    assert code == 2
    assert "listen" in errors and "twice" in errors
    assert f":{len(path.read_text(encoding='utf-8').splitlines())}:" in errors


async def test_a_port_in_use_and_a_command_that_does_not_exist(tmp_path: Path) -> None:
    """What the machine lacks is told together, and no member was started for it."""
    lost = member("beta")
    lost["command"] = ["no-such-engine", "--port", "{port}"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        rules = {"default": "alpha"}
        config = configuration(
            tmp_path, pool(member("alpha"), lost, **rules), listen=f"127.0.0.1:{port}"
        )
        path = tmp_path / "pool.yaml"
        write_config(path, config)
        code, errors = await serve_and_fail(path)
    assert code == 2
    assert f"pool.yaml:{line_of(path, 'listen:')}:" in errors
    assert f"port {port} is already in use" in errors
    assert "pools[0].members[1].command" in errors
    assert "'no-such-engine' is not in PATH" in errors
    assert not (tmp_path / "members.jsonl").exists()
