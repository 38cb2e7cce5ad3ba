"""Every kind of bad configuration is refused with file, line, column, field, reason, way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelpool_router.settings import ConfigError, Problem, load, parse

GOOD = """\
pools:
  - name: gpu0
    members:
      - name: a
        command: [serve, "{port}"]
"""


def problems_of(text: str, **more: dict[str, str]) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        parse(text, file="pool.yaml", **more)  # type: ignore[arg-type]  # environ or overrides
    return caught.value.problems


def only_problem(text: str) -> Problem:
    problems = problems_of(text)
    assert len(problems) == 1, "\n".join(map(str, problems))
    return problems[0]


def in_pool(line: str) -> str:
    return GOOD.replace("    members:\n", f"    {line}\n    members:\n")


def in_member(line: str) -> str:
    return GOOD + f"        {line}\n"


def in_cluster(place: str, more: str = "") -> str:
    head = "pools:\n  - name: gpu0\n    members:\n      - name: a\n"
    return f"{head}        deployment: {place}\n{more}"


CASES: dict[str, tuple[str, Problem]] = {
    "unknown key at the top": (
        GOOD + "maxheld: 3\n",
        Problem(
            "pool.yaml", 6, 1, "maxheld", "this key is not known here", "did you mean maxHeld?"
        ),
    ),
    "snake case is suggested in camel case": (
        in_pool("swap_budget: 3s"),
        Problem(
            "pool.yaml",
            3,
            5,
            "pools[0].swap_budget",
            "this key is not known here",
            "did you mean swapBudget?",
        ),
    ),
    "key of another level": (
        GOOD + "swapBudget: 3s\n",
        Problem(
            "pool.yaml",
            6,
            1,
            "swapBudget",
            "this key does not belong here",
            "move it to pools[]",
        ),
    ),
    "unknown key without a likeness": (
        in_pool("memorySettle: {command: [x], colour: blue}"),
        Problem(
            "pool.yaml",
            3,
            34,
            "pools[0].memorySettle.colour",
            "this key is not known",
            "remove it; known here are command, timeout, interval",
        ),
    ),
    "duplicate key": (
        in_pool("maxTurn: 3s\n    maxTurn: 4s"),
        Problem(
            "pool.yaml",
            4,
            5,
            "pools[0].maxTurn",
            "the key stands twice, first on line 3",
            "keep one of the two",
        ),
    ),
    "duplicate key, quoted once": (
        in_pool("\"maxTurn\": 3s\n    'maxTurn': 3s"),
        Problem(
            "pool.yaml",
            4,
            5,
            "pools[0].maxTurn",
            "the key stands twice, first on line 3",
            "keep one of the two",
        ),
    ),
    "key without a value": (
        in_pool("maxTurn:"),
        Problem(
            "pool.yaml",
            3,
            5,
            "pools[0].maxTurn",
            "has no value",
            "give it one or remove the line",
        ),
    ),
    "default is no member": (
        in_pool("default: other"),
        Problem(
            "pool.yaml",
            3,
            5,
            "pools[0].default",
            "'other' is no member of this pool",
            "use one of a",
        ),
    ),
    "default is an alias": (
        in_pool("default: gpt-4o").replace("name: a", "name: a\n        models: [gpt-4o]"),
        Problem(
            "pool.yaml",
            3,
            5,
            "pools[0].default",
            "'gpt-4o' is no member of this pool",
            "did you mean a?",
        ),
    ),
    "reclaim without a default": (
        in_pool("reclaimDefaultAfter: 5m"),
        Problem(
            "pool.yaml",
            3,
            5,
            "pools[0].reclaimDefaultAfter",
            "there is no default to give way to",
            "set default to a member, or remove this",
        ),
    ),
    "two members with one name": (
        GOOD + '      - name: a\n        command: [serve, "{port}"]\n',
        Problem(
            "pool.yaml",
            6,
            9,
            "pools[0].members[1].name",
            "'a' is already taken by pools[0].members[0] (line 4)",
            "names and aliases are unique over all members and upstreams: rename or remove one",
        ),
    ),
    "an alias that is the name of an upstream": (
        in_member("models: [x, far]")
        + "upstreams:\n  - name: far\n    url: http://10.0.0.7:8080\n",
        Problem(
            "pool.yaml",
            6,
            21,
            "pools[0].members[0].models[1]",
            "'far' is already taken by upstreams[0] (line 8)",
            "names and aliases are unique over all members and upstreams: rename or remove one",
        ),
    ),
    "one alias twice in two pools": (
        in_member("models: [x]")
        + "  - name: gpu1\n    members:\n"
        + '      - name: b\n        models: [x]\n        command: [serve, "{port}"]\n',
        Problem(
            "pool.yaml",
            10,
            18,
            "pools[1].members[0].models[0]",
            "'x' is already taken by pools[0].members[0].models[0] (line 6)",
            "names and aliases are unique over all members and upstreams: rename or remove one",
        ),
    ),
    "two pools with one name": (
        GOOD
        + "  - name: GPU0\n    members:\n"
        + '      - name: b\n        command: [serve, "{port}"]\n',
        Problem(
            "pool.yaml",
            6,
            5,
            "pools[1].name",
            "'GPU0' is already the name of pools[0] (line 2)",
            "give each pool its own name",
        ),
    ),
    "a pool without members": (
        "pools:\n  - name: gpu0\n    members: []\n",
        Problem("pool.yaml", 3, 5, "pools[0].members", "is empty", "list at least one"),
    ),
    "a member without a command": (
        "pools:\n  - name: gpu0\n    members:\n      - name: a\n",
        Problem(
            "pool.yaml",
            4,
            9,
            "pools[0].members[0].command",
            "is missing",
            "add command: (list of text), or deployment: {namespace: ..., name: ...} "
            "for a member in Kubernetes",
        ),
    ),
    "a command as one string": (
        "pools:\n  - name: gpu0\n    members:\n      - name: a\n        command: serve {port}\n",
        Problem(
            "pool.yaml",
            5,
            9,
            "pools[0].members[0].command",
            "a command is a list, not one string",
            'write each argument as an item: [serve, "{port}"]',
        ),
    ),
    "an empty command": (
        "pools:\n  - name: gpu0\n    members:\n      - name: a\n        command: []\n"
        "        port: 9\n",
        Problem(
            "pool.yaml",
            5,
            9,
            "pools[0].members[0].command",
            "the command is empty",
            "name the program to start as its first item",
        ),
    ),
    "a command that does not say where it listens": (
        "pools:\n  - name: gpu0\n    members:\n      - name: a\n        command: [serve]\n",
        Problem(
            "pool.yaml",
            5,
            9,
            "pools[0].members[0].command",
            "the router cannot know where this member will listen",
            'put {port} where the command takes its port, as in [--port, "{port}"], '
            "or set port to the number it always uses",
        ),
    ),
    "a boolean as an argument": (
        GOOD.replace("serve,", "serve, true,"),
        Problem(
            "pool.yaml",
            5,
            26,
            "pools[0].members[0].command[1]",
            "true is not text",
            "put it in quotes",
        ),
    ),
    "one port in two pools": (
        in_member("port: 9000")
        + "  - name: gpu1\n    members:\n      - name: b\n        command: [serve]\n"
        + "        port: 9000\n",
        Problem(
            "pool.yaml",
            11,
            9,
            "pools[1].members[0].port",
            "port 9000 is already used by pools[0].members[0] (line 4)",
            "choose another port, or remove it and write {port} in the command",
        ),
    ),
    "the port of the router": (
        in_member("port: 8080"),
        Problem(
            "pool.yaml",
            6,
            9,
            "pools[0].members[0].port",
            "port 8080 is already used by listen",
            "choose another port, or remove it and write {port} in the command",
        ),
    ),
    "one port for both listeners": (
        "admin: 127.0.0.1:8080\n" + GOOD,
        Problem(
            "pool.yaml",
            1,
            1,
            "admin",
            "port 8080 is also that of listen",
            "choose another port for one of them",
        ),
    ),
    "a duration without a unit": (
        in_pool("swapBudget: 300"),
        Problem(
            "pool.yaml",
            3,
            5,
            "pools[0].swapBudget",
            "300 is not a duration: it has no unit",
            "write 300s if seconds are meant",
        ),
    ),
    "a duration that is none": (
        in_pool("swapBudget: 5 minutes"),
        Problem(
            "pool.yaml",
            3,
            5,
            "pools[0].swapBudget",
            "'5 minutes' is not a duration",
            "write it like 300s, 4m30s, 1h or 500ms",
        ),
    ),
    "a negative duration": (
        in_pool("linger: -5s"),
        Problem(
            "pool.yaml",
            3,
            5,
            "pools[0].linger",
            "'-5s' is not a duration",
            "write it like 300s, 4m30s, 1h or 500ms",
        ),
    ),
    "a duration out of range": (
        in_pool("linger: 1h"),
        Problem(
            "pool.yaml",
            3,
            5,
            "pools[0].linger",
            "'1h' is out of range",
            "use a duration from 0s to 10m, or auto",
        ),
    ),
    "a size that is none": (
        GOOD + "maxBodyBytes: 64 mb\n",
        Problem(
            "pool.yaml",
            6,
            1,
            "maxBodyBytes",
            "'64 mb' is not a size",
            "write it like 64MiB, 512KiB, 2GiB, or as a number of bytes",
        ),
    ),
    "a size out of range": (
        GOOD + "maxBodyBytes: 0\n",
        Problem(
            "pool.yaml",
            6,
            1,
            "maxBodyBytes",
            "0 is out of range",
            "use a size from 1 to 16GiB",
        ),
    ),
    "a number out of range": (
        in_member("parallel: 0"),
        Problem(
            "pool.yaml",
            6,
            9,
            "pools[0].members[0].parallel",
            "0 is out of range",
            "use a whole number, 1 to 100000",
        ),
    ),
    "text instead of a number": (
        GOOD + "maxHeld: many\n",
        Problem(
            "pool.yaml",
            6,
            1,
            "maxHeld",
            "'many' does not fit",
            "use whole number, 1 to 1000000",
        ),
    ),
    "a word that is not on the list": (
        in_member("profile: llamaserver"),
        Problem(
            "pool.yaml",
            6,
            9,
            "pools[0].members[0].profile",
            "'llamaserver' is not known",
            "did you mean llama-server? use llama-server, vllm, sglang, tgi or generic",
        ),
    ),
    "text instead of a list": (
        in_member("models: gpt-4o"),
        Problem(
            "pool.yaml",
            6,
            9,
            "pools[0].members[0].models",
            "'gpt-4o' is not a list",
            "put it in brackets: [gpt-4o]",
        ),
    ),
    "text instead of a mapping": (
        "pools: [gpu0]\n",
        Problem(
            "pool.yaml",
            1,
            9,
            "pools[0]",
            "'gpu0' is not a mapping",
            "write `key: value` lines, indented below it",
        ),
    ),
    "an empty name": (
        GOOD.replace("name: a", 'name: ""'),
        Problem(
            "pool.yaml",
            4,
            9,
            "pools[0].members[0].name",
            "the name is empty",
            "use 1 to 200 printable characters without spaces around them",
        ),
    ),
    "a name with a line break": (
        GOOD.replace("name: a", 'name: "a\\nb"'),
        Problem(
            "pool.yaml",
            4,
            9,
            "pools[0].members[0].name",
            "the name has unprintable characters",
            "remove them",
        ),
    ),
    "a name that is too long": (
        GOOD.replace("name: a", f"name: {'x' * 201}"),
        Problem(
            "pool.yaml",
            4,
            9,
            "pools[0].members[0].name",
            "the name has 201 characters",
            "use at most 200 characters",
        ),
    ),
    "a pool name that is no file name": (
        GOOD.replace("gpu0", "../gpu0"),
        Problem(
            "pool.yaml",
            2,
            5,
            "pools[0].name",
            "'../gpu0' cannot name a pool",
            "use 1 to 63 letters, digits, dots, dashes or underscores, "
            "with a letter or digit at both ends",
        ),
    ),
    "an address without a port": (
        GOOD + "listen: localhost\n",
        Problem(
            "pool.yaml",
            6,
            1,
            "listen",
            "'localhost' is not an address",
            "write it like 127.0.0.1:8080, [::1]:8080, or :8080 for every interface",
        ),
    ),
    "beyond loopback without keys": (
        GOOD + "listen: 0.0.0.0:8080\n",
        Problem(
            "pool.yaml",
            6,
            1,
            "listen",
            "0.0.0.0:8080 can be reached from other machines, and no keys are configured",
            "set keys: {file: PATH}, listen on 127.0.0.1, "
            "or say --allow-anonymous (allowAnonymous: true) if everybody may use it",
        ),
    ),
    "a secret in the file": (
        GOOD + "adminToken: hunter2\n",
        Problem(
            "pool.yaml",
            6,
            1,
            "adminToken",
            "a secret must not stand in the configuration",
            "put it into a file and write {file: PATH}, or into a variable and write {env: NAME}",
        ),
    ),
    "a secret in two places": (
        GOOD + "keys: {file: a, env: B}\n",
        Problem(
            "pool.yaml",
            6,
            1,
            "keys",
            "exactly one of file and env is needed",
            "write {file: PATH} or {env: NAME}",
        ),
    ),
    "an upstream that is no address": (
        GOOD + "upstreams:\n  - name: far\n    url: 10.0.0.7:8080\n",
        Problem(
            "pool.yaml",
            8,
            5,
            "upstreams[0].url",
            "'10.0.0.7:8080' is not an http or https address",
            "write it like http://10.0.0.7:8080 or https://example.org/prefix",
        ),
    ),
    "an upstream with a password": (
        GOOD + "upstreams:\n  - name: far\n    url: http://me:pw@10.0.0.7\n",
        Problem(
            "pool.yaml",
            8,
            5,
            "upstreams[0].url",
            "the address holds a user or password",
            "use apiKey: {file: PATH} instead",
        ),
    ),
    "an origin with a path": (
        GOOD + "corsOrigins: [https://chat.example.org/x]\n",
        Problem(
            "pool.yaml",
            6,
            15,
            "corsOrigins[0]",
            "'https://chat.example.org/x' is not an origin",
            'write origins like https://chat.example.org or http://localhost:3000, or "*" for all',
        ),
    ),
    "a probe path without a slash": (
        in_member("readinessPath: health"),
        Problem(
            "pool.yaml",
            6,
            9,
            "pools[0].members[0].readinessPath",
            "'health' is not the path of a probe",
            "begin it with /, as in /health",
        ),
    ),
    "a member in Kubernetes": (
        in_cluster("{namespace: lab, name: A_B}"),
        Problem(
            "pool.yaml",
            5,
            38,
            "pools[0].members[0].deployment.name",
            "'A_B' cannot name an object of Kubernetes",
            "use small letters, digits, dashes and dots, with a letter or digit at both ends",
        ),
    ),
    "a member that is run in two ways": (
        in_member("deployment: {namespace: lab, name: a}"),
        Problem(
            "pool.yaml",
            6,
            9,
            "pools[0].members[0].deployment",
            "a member is run in one way, and this one has command as well",
            "keep one of the two",
        ),
    ),
    "a key of processes on a member in Kubernetes": (
        in_cluster("{namespace: lab, name: a}", "        env: {A: b}\n"),
        Problem(
            "pool.yaml",
            6,
            9,
            "pools[0].members[0].env",
            "this is for members that the router starts itself",
            "remove it; what deployment names says how the member is run",
        ),
    ),
    "the port of a member in Kubernetes in the wrong place": (
        in_cluster("{namespace: lab, name: a}", "        port: 8000\n"),
        Problem(
            "pool.yaml",
            6,
            9,
            "pools[0].members[0].port",
            "this is for members that the router starts itself",
            "remove it; what deployment names says how the member is run, and deployment.port "
            "where it answers",
        ),
    ),
    "a pool of both kinds": (
        in_cluster(
            "{namespace: lab, name: a}",
            '      - name: b\n        command: [server, --port, "{port}"]\n',
        ),
        Problem(
            "pool.yaml",
            6,
            9,
            "pools[0].members[1]",
            "the first member of this pool is in Kubernetes, and this one is a local process",
            "give it a pool of its own: one slot is looked after in one way",
        ),
    ),
    "one object twice": (
        in_cluster(
            "{namespace: lab, name: a}",
            "      - name: b\n        deployment: {namespace: lab, name: a}\n",
        ),
        Problem(
            "pool.yaml",
            7,
            9,
            "pools[0].members[1].deployment",
            "Deployment lab/a already runs pools[0].members[0] (line 4)",
            "list each object once; further names of it go into models",
        ),
    ),
    "a pool that no Lease can be named after": (
        in_cluster("{namespace: lab, name: a}").replace("gpu0", "GPU_0"),
        Problem(
            "pool.yaml",
            2,
            5,
            "pools[0].name",
            "'GPU_0' cannot be part of the name of the Lease modelpool-<pool>",
            "use at most 53 small letters, digits and dashes",
        ),
    ),
    "a reference as a ModelPool has it": (
        "pools:\n  - name: gpu0\n    members:\n      - name: a\n"
        "        command: [server, '{port}']\n        deploymentRef: {name: a}\n",
        Problem(
            "pool.yaml",
            6,
            9,
            "pools[0].members[0].deploymentRef",
            "this key is not known here",
            "did you mean deployment?",
        ),
    ),
    "memory needed but never measured": (
        in_member("memoryNeededBytes: 8GiB"),
        Problem(
            "pool.yaml",
            6,
            9,
            "pools[0].members[0].memoryNeededBytes",
            "nothing measures the free memory",
            "add memorySettle: {command: [...]} to the pool, or remove this",
        ),
    ),
    "bodies that no queue can take": (
        GOOD + "maxHeldBytes: 1MiB\n",
        Problem(
            "pool.yaml",
            6,
            1,
            "maxHeldBytes",
            "a body of maxBodyBytes (64MiB) would never fit into maxHeldBytes (1MiB)",
            "raise maxHeldBytes or lower maxBodyBytes",
        ),
    ),
    "more holds than connections": (
        GOOD + "maxHeld: 5000\n",
        Problem(
            "pool.yaml",
            6,
            1,
            "maxHeld",
            "maxHeld (5000) is never reached with maxConnections (4096)",
            "raise maxConnections above maxHeld or lower maxHeld",
        ),
    ),
    "a load that is expected to fail": (
        in_member("expectedLoad: 20m"),
        Problem(
            "pool.yaml",
            6,
            9,
            "pools[0].members[0].expectedLoad",
            "20m is longer than the loadTimeout of the pool (10m)",
            "raise loadTimeout of the pool or lower expectedLoad",
        ),
    ),
    "a hang that nobody looks for": (
        in_pool("hungAfter: 1s\n    healthInterval: 2s"),
        Problem(
            "pool.yaml",
            3,
            5,
            "pools[0].hungAfter",
            "1s is shorter than healthInterval (2s), so that no look falls into it",
            "raise hungAfter or lower healthInterval",
        ),
    ),
    "nothing to serve": (
        "",
        Problem(
            "pool.yaml",
            None,
            None,
            "",
            "there is neither a pool nor an upstream, so there is nothing to serve",
            "add pools: [...]; `modelpool init` writes a file to begin with",
        ),
    ),
    "not a mapping": (
        "- a\n- b\n",
        Problem(
            "pool.yaml",
            1,
            1,
            "",
            "the file is not a mapping",
            "write it as lines of `key: value`",
        ),
    ),
    "broken YAML": (
        "pools: [a\nlisten: b\n",
        Problem(
            "pool.yaml",
            2,
            7,
            "",
            "expected ',' or ']', but got ':'",
            "correct the YAML here or just before",
        ),
    ),
    "a tab": (
        "pools:\n\t- name: a\n",
        Problem(
            "pool.yaml",
            2,
            1,
            "",
            "found character '\\t' that cannot start any token",
            "indent with spaces instead of tabs",
        ),
    ),
    "a second document": (
        GOOD + "---\nlisten: x\n",
        Problem(
            "pool.yaml",
            6,
            1,
            "",
            "a second document begins here",
            "keep one document in the file",
        ),
    ),
    "a tag": (
        in_pool("default: !!python/name:os.system a"),
        Problem(
            "pool.yaml",
            3,
            14,
            "pools[0].default",
            "the tag tag:yaml.org,2002:python/name:os.system is not known",
            "remove the tag",
        ),
    ),
    "a tag of a list": (
        in_member("models: !secret [b]"),
        Problem(
            "pool.yaml",
            6,
            17,
            "pools[0].members[0].models",
            "the tag !secret is not known",
            "remove the tag",
        ),
    ),
    "a list in a list": (
        in_member("models: [[a]]"),
        Problem(
            "pool.yaml",
            6,
            18,
            "pools[0].members[0].models[0]",
            "a list is not a name",
            "put the name in quotes",
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_problem_names_place_field_reason_and_way_out(name: str) -> None:
    text, expected = CASES[name]

    assert only_problem(text) == expected


def test_all_problems_are_reported_at_once_in_the_order_of_the_file() -> None:
    text = (
        "listen: 0.0.0.0:8080\n"
        "maxheld: 3\n"
        "responseTimeout: 600\n"
        + GOOD.replace("gpu0\n", "gpu0\n    default: b\n")
        + '      - name: a\n        parallel: none\n        command: [serve, "{port}"]\n'
        + "maxBodyBytes: 1GiB\n"
    )

    problems = problems_of(text)

    assert [(problem.line, problem.field) for problem in problems] == [
        (1, "listen"),
        (2, "maxheld"),
        (3, "responseTimeout"),
        (6, "pools[0].default"),
        (10, "pools[0].members[1].name"),
        (11, "pools[0].members[1].parallel"),
        (13, "maxBodyBytes"),
    ]


def test_error_text_has_a_line_for_the_editor_and_one_with_the_way_out() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(GOOD + "maxheld: 3\n", file="pool.yaml")

    assert str(caught.value) == (
        "1 problem in the configuration:\n"
        "pool.yaml:6:1: maxheld: this key is not known here\n"
        "    way out: did you mean maxHeld?"
    )


def test_keys_that_are_wrong_are_not_called_missing_as_well() -> None:
    text = GOOD + "listen: 0.0.0.0:8080\nkeys: {file: a, env: B}\n"

    assert only_problem(text).field == "keys"


def test_no_secret_is_shown() -> None:
    text = (
        GOOD + "adminToken: hunter2\nkeys: [hunter3]\nupstreams:\n  - {name: b, apiKey: hunter4}\n"
    )

    assert "hunter" not in "\n".join(map(str, problems_of(text)))


def test_an_anchor_that_contains_itself_ends_in_a_problem() -> None:
    problem = problems_of("pools: &x\n  - *x\n")[0]

    assert (problem.line, problem.reason) == (1, "an anchor contains itself")


def test_anchors_that_expand_without_end_are_stopped() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]

    reasons = {problem.reason for problem in problems_of("\n".join(lines) + "\n")}

    assert "the file has too many values" in reasons


@pytest.mark.parametrize("levels", [60, 5000])
def test_depth_without_end_is_stopped(levels: int) -> None:
    """A file that only upsets the reader must not end the task that reloads."""
    problems = problems_of("pools: " + "[" * levels + "]" * levels)

    assert "the file is nested too deeply" in {problem.reason for problem in problems}


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"

    with pytest.raises(ConfigError) as caught:
        load(path)

    assert caught.value.problems == (
        Problem(
            str(path),
            None,
            None,
            "",
            "No such file or directory",
            "give the path of a YAML file; `modelpool init` writes one",
        ),
    )


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_bytes(b"pools: []\nlisten: \xff\n")

    with pytest.raises(ConfigError) as caught:
        load(path)

    (problem,) = caught.value.problems
    assert (problem.line, problem.reason, problem.way_out) == (
        2,
        "is not UTF-8",
        "save the file as UTF-8",
    )


def test_a_model_file_given_by_mistake_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with path.open("wb") as stream:
        stream.truncate(8 * 1024 * 1024)

    with pytest.raises(ConfigError, match="is larger than 4 MiB"):
        load(path)


def test_control_characters_are_a_problem_not_a_crash() -> None:
    (problem,) = problems_of("pools: \x00\n")

    assert "special characters are not allowed" in problem.reason
