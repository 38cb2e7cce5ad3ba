"""Flags win over the environment, that over the file, that over the defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelpool_router.core.spec import Bounds, MemberName, MemberSpec, PoolName, PoolSpec
from modelpool_router.drivers import profiles
from modelpool_router.settings import (
    Address,
    ConfigError,
    Member,
    Pool,
    Profile,
    SecretSource,
    Settings,
    from_mapping,
    load,
    parse,
    reload,
)
from modelpool_router.settings.units import format_duration, format_size, parse_duration

TEXT = """\
listen: 127.0.0.1:8081
maxHeld: 7
pools:
  - name: gpu-0
    swapBudget: 4m30s
    default: coder-small
    linger: 1500ms
    members:
      - name: coder-small
        models: [gpt-4o-mini]
        profile: llama-server
        command: [llama-server, --model, small.gguf, --port, "{port}"]
      - name: org/coder-large
        profile: vllm
        parallel: 2
        expectedLoad: 90s
        command: [vllm, serve, --port, "{port}", --temp, 0.10, --seed, 0x1F]
        env: {CUDA_VISIBLE_DEVICES: 0}
upstreams:
  - name: embedder
    url: http://10.0.0.7:8080/v2/
"""


def test_values_and_defaults_of_a_file() -> None:
    settings = parse(TEXT)

    assert settings.listen == Address("127.0.0.1", 8081)
    assert settings.admin == Address("127.0.0.1", 9090)
    assert settings.max_held == 7
    assert settings.max_body_bytes == 64 * 1024 * 1024
    assert settings.hold_keepalive == "none"
    assert settings.upstreams[0].url == "http://10.0.0.7:8080/v2"
    large = settings.pool("gpu-0").member("org/coder-large")
    assert large.command is not None
    assert large.command[-4:] == ("--temp", "0.10", "--seed", "0x1F")
    assert large.env == {"CUDA_VISIBLE_DEVICES": "0"}


def test_scheduler_gets_its_specs() -> None:
    settings = parse(TEXT)

    assert settings.pool_specs() == {
        PoolName("gpu-0"): PoolSpec(
            name=PoolName("gpu-0"),
            members={
                MemberName("coder-small"): MemberSpec(MemberName("coder-small"), parallel=16),
                MemberName("org/coder-large"): MemberSpec(
                    MemberName("org/coder-large"),
                    parallel=2,
                    parallel_is_fixed=True,
                    expected_load_s=90.0,
                ),
            },
            default=MemberName("coder-small"),
            swap_budget_s=270.0,
            linger_s=1.5,
        )
    }
    assert settings.bounds() == Bounds(max_held=7)


def test_every_default_of_a_pool_is_that_of_the_scheduler() -> None:
    pool = Pool(name="gpu0", members=(Member(name="a", command=("serve",), port=1),))

    assert pool.spec() == PoolSpec(
        PoolName("gpu0"),
        {MemberName("a"): MemberSpec(MemberName("a"), has_idle_probe=False)},
    )


def test_a_short_load_timeout_shortens_what_nobody_wrote() -> None:
    text = """
pools:
  - name: gpu0
    loadTimeout: 20s
    members:
      - {name: a, command: [serve, "{port}"]}
      - {name: b, command: [serve, "{port}"], expectedLoad: 5s}
"""
    spec = parse(text).pool("gpu0").spec()

    assert [member.expected_load_s for member in spec.members.values()] == [20, 5]


@pytest.mark.parametrize(
    ("written", "looks_every_s", "hung_after_s"),
    [
        ("", 2.0, 60.0),
        ("hungAfter: 1200ms", 0.4, 1.2),
        ("hungAfter: 1h", 2.0, 3600.0),
        ("healthInterval: 90s", 90.0, 270.0),
        ("healthInterval: 50ms", 0.05, 60.0),
        ("healthInterval: 10s, hungAfter: 10s", 10.0, 10.0),
    ],
)
def test_of_two_settings_that_are_bound_the_one_that_nobody_wrote_follows(
    written: str, looks_every_s: float, hung_after_s: float
) -> None:
    members = 'members: [{name: a, command: [serve, "{port}"]}]'
    pool = parse(f"pools: [{{name: gpu0, {members}, {written}}}]\n").pool("gpu0")

    assert pool.looks_every_s == pytest.approx(looks_every_s)
    assert pool.spec().hung_after_s == hung_after_s


@pytest.mark.parametrize(
    ("profile", "idle_path", "parallel", "has_probe"),
    [
        (Profile.LLAMA_SERVER, None, 16, True),
        (Profile.VLLM, None, 256, True),
        (Profile.SGLANG, None, 16, True),
        (Profile.TGI, None, 16, True),
        (Profile.GENERIC, None, 16, False),
        (Profile.GENERIC, "/idle", 16, True),
    ],
)
def test_profile_decides_parallel_and_probe(
    profile: Profile, idle_path: str | None, parallel: int, has_probe: bool
) -> None:
    spec = Member(name="a", command=("x",), profile=profile, idle_path=idle_path).spec()

    assert (spec.parallel, spec.parallel_is_fixed, spec.has_idle_probe) == (
        parallel,
        False,
        has_probe,
    )


def test_environment_wins_over_the_file_and_flags_over_both() -> None:
    environ = {
        "MODELPOOL_LISTEN": "127.0.0.1:8082",
        "MODELPOOL_MAX_HELD": "8",
        "MODELPOOL_ADMIN": "127.0.0.1:0",
        "MODELPOOL_HOLD_KEEPALIVE": "comment",
        "MODELPOOL_PASSTHROUGH": "true",
        "MODELPOOL_CORS_ORIGINS": "https://a.example, http://localhost:3000",
        "MODELPOOL_POOLS__GPU_0__SWAP_BUDGET": "60s",
        "MODELPOOL_POOLS__GPU_0__MEMBERS__CODER_SMALL__COMMAND": "serve --x 'a b' {port}",
        "MODELPOOL_POOLS__GPU_0__MEMBERS__ORG_CODER_LARGE__COMMAND": '["serve", "{port}"]',
        "MODELPOOL_POOLS__GPU_0__MEMBERS__ORG_CODER_LARGE__ENV__HF_HOME": "/models",
        "MODELPOOL_UPSTREAMS__EMBEDDER__URL": "https://embed.example",
        "MODELPOOL_MAX_BODY_BYTES": "",
        "OTHER_LISTEN": "nonsense",
    }

    settings = parse(TEXT, environ=environ, overrides={"listen": "127.0.0.1:8083"})

    assert settings.listen.port == 8083
    assert settings.max_held == 8
    assert settings.admin == Address("127.0.0.1", 0)
    assert settings.hold_keepalive == "comment"
    assert settings.passthrough is True
    assert settings.cors_origins == ("https://a.example", "http://localhost:3000")
    assert settings.max_body_bytes == 64 * 1024 * 1024
    assert settings.upstreams[0].url == "https://embed.example"
    pool = settings.pool("gpu-0")
    assert pool.swap_budget_s == 60.0
    assert pool.member("coder-small").command == ("serve", "--x", "a b", "{port}")
    large = pool.member("org/coder-large")
    assert large.command == ("serve", "{port}")
    assert large.env == {"CUDA_VISIBLE_DEVICES": "0", "HF_HOME": "/models"}


def test_a_wrong_variable_and_a_wrong_flag_are_named_as_the_place() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(
            TEXT,
            environ={
                "MODELPOOL_POOLS__GPU_0__MAX_TURN": "1d",
                "MODELPOOL_CORS_ORIGINS": "[1",
                "MODELPOOL_POOLS__GPU_0__MEMBERS__CODER_SMALL__COMMAND": "serve 'x",
            },
            overrides={"listen": "8080"},
        )

    told = {(each.file, each.line, each.field): each.way_out for each in caught.value.problems}
    assert told == {
        ("environment variable MODELPOOL_POOLS__GPU_0__MAX_TURN", None, "pools[0].maxTurn"): (
            "write it like 300s, 4m30s, 1h or 500ms"
        ),
        ("environment variable MODELPOOL_CORS_ORIGINS", None, "corsOrigins"): (
            'write a JSON list, as in ["a", "b"]'
        ),
        (
            "environment variable MODELPOOL_POOLS__GPU_0__MEMBERS__CODER_SMALL__COMMAND",
            None,
            "pools[0].members[0].command",
        ): "close the quotes",
        ("flag --listen", None, "listen"): (
            "write it like 127.0.0.1:8080, [::1]:8080, or :8080 for every interface"
        ),
    }


@pytest.mark.parametrize(
    ("variable", "way_out"),
    [
        ("MODELPOOL_LISTENN", "did you mean MODELPOOL_LISTEN?"),
        ("MODELPOOL_POOLS__GPU_0__MAXTURN", "did you mean MODELPOOL_POOLS__GPU_0__MAX_TURN?"),
        ("MODELPOOL_POOLS__GPU_9__MAX_TURN", "the file has no item called GPU_9 in pools"),
        ("MODELPOOL_POOLS", "this can only be set in the file; its parts can be set with __"),
        ("MODELPOOL_LISTEN__PORT", "listen has no parts: remove what follows LISTEN"),
        ("MODELPOOL_POOLS__GPU_0", "name a setting"),
        ("MODELPOOL_QQQ", "remove it, or see the reference"),
        ("MODELPOOL_PORT", "remove it, or see the reference"),
    ],
)
def test_a_variable_that_sets_nothing_gets_a_warning(variable: str, way_out: str) -> None:
    source = parse(TEXT, environ={variable: "8080"}).source

    assert source is not None
    (warning,) = source.warnings
    assert (warning.file, warning.reason) == (
        f"environment variable {variable}",
        "this variable sets nothing",
    )
    assert warning.way_out == way_out


def test_variables_of_kubernetes_and_our_other_ones_get_none() -> None:
    environ = {
        "MODELPOOL_SERVICE_HOST": "10.0.0.1",
        "MODELPOOL_SERVICE_PORT": "8080",
        "MODELPOOL_SERVICE_PORT_HTTP": "8080",
        "MODELPOOL_PORT": "tcp://10.0.0.1:8080",
        "MODELPOOL_PORT_8080_TCP": "tcp://10.0.0.1:8080",
        "MODELPOOL_PORT_8080_TCP_ADDR": "10.0.0.1",
        "MODELPOOL_CONFIG": "x.yaml",
        "MODELPOOL_SLOT": "1/gpu0/a",
    }

    source = parse(TEXT, environ=environ).source

    assert source is not None
    assert source.warnings == []


def test_reading_again_takes_the_same_file_environment_and_flags(tmp_path: Path) -> None:
    file = tmp_path / "pool.yaml"
    file.write_text(TEXT)
    before = load(file, {"MODELPOOL_MAX_HELD_PER_KEY": "9"}, {"listen": "127.0.0.1:8083"})
    file.write_text(TEXT.replace("maxHeld: 7", "maxHeld: 70"))

    after = reload(before)

    assert (after.max_held, after.max_held_per_key, after.listen.port) == (70, 9, 8083)
    assert after.source is not None
    assert after.source.path == file


def test_settings_without_a_file_cannot_be_read_again() -> None:
    with pytest.raises(ConfigError, match="there is no file to read again"):
        reload(parse(TEXT))


@pytest.mark.parametrize("profile", list(Profile))
def test_profiles_are_those_of_the_drivers(profile: Profile) -> None:
    known = profiles.profile(profile.value)

    spec = Member(name="a", command=("x",), profile=profile).spec()

    assert spec.parallel == known.default_parallel
    assert spec.has_idle_probe is (known.idle_path is not None)
    assert sorted(profiles.NAMES) == sorted(Profile)


def test_secret_in_a_variable_is_only_pointed_at() -> None:
    settings = parse(
        TEXT + "keys: {file: keys.txt}\n",
        environ={"MODELPOOL_KEYS": "hunter2", "MODELPOOL_ADMIN_TOKEN": "hunter3"},
    )

    assert settings.keys == SecretSource(env="MODELPOOL_KEYS")
    assert settings.admin_token == SecretSource(env="MODELPOOL_ADMIN_TOKEN")
    assert "hunter" not in settings.model_dump_json(by_alias=True) + repr(settings)


def test_another_place_of_a_secret_replaces_that_of_the_file(tmp_path: Path) -> None:
    settings = parse(
        TEXT + "keys: {env: X}\n", environ={"MODELPOOL_KEYS__FILE": str(tmp_path / "keys")}
    )

    assert settings.keys == SecretSource(file=tmp_path / "keys")


def test_relative_paths_count_from_the_file_and_those_of_flags_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "here").mkdir()
    file = tmp_path / "etc" / "pool.yaml"
    member = '        workingDirectory: work\n        logFile: "~/x.log"\n'
    file.write_text(TEXT.replace("upstreams", f"{member}upstreams", 1) + "keys: {file: keys.txt}\n")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", "/home/me")

    settings = load(file, overrides={"stateDir": "state", "adminToken.file": "token"})

    assert settings.folder == tmp_path / "etc"
    assert settings.keys == SecretSource(file=tmp_path / "etc" / "keys.txt")
    assert settings.pools[0].members[1].working_directory == tmp_path / "etc" / "work"
    assert settings.pools[0].members[1].log_file == Path("/home/me/x.log")
    assert settings.state_dir == tmp_path / "here" / "state"
    assert settings.admin_token == SecretSource(file=tmp_path / "here" / "token")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HOME": "/home/me"}, "/home/me/.local/state/modelpool"),
        ({"HOME": "/home/me", "XDG_STATE_HOME": "/var/x"}, "/var/x/modelpool"),
        ({"HOME": "/home/me", "XDG_STATE_HOME": "x"}, "/home/me/.local/state/modelpool"),
    ],
)
def test_state_is_kept_where_the_user_keeps_state(
    environ: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    assert parse(TEXT).state_dir == Path(expected)


def test_anonymous_clients_from_outside_must_be_allowed_on_purpose() -> None:
    outside = {"listen": "0.0.0.0:8080"}

    with pytest.raises(ConfigError):
        parse(TEXT, overrides=outside)

    assert parse(TEXT, overrides={**outside, "allowAnonymous": True}).allow_anonymous
    assert parse(TEXT, environ={"MODELPOOL_KEYS": "x"}, overrides=outside).keys is not None


@pytest.mark.parametrize(
    ("text", "is_loopback"),
    [
        ("127.0.0.1:1", True),
        ("127.8.9.1:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("[::]:1", False),
        (":1", False),
        ("0.0.0.0:1", False),
        ("192.168.0.1:1", False),
        ("example.org:1", False),
    ],
)
def test_loopback(text: str, is_loopback: bool) -> None:
    address = parse(TEXT, overrides={"listen": text, "allowAnonymous": True}).listen

    assert address.is_loopback is is_loopback
    assert str(address) == text


def test_admin_port_open_to_others_without_a_token_is_a_warning() -> None:
    source = parse(TEXT, overrides={"admin": "0.0.0.0:9090"}).source
    with_token = parse(
        TEXT, environ={"MODELPOOL_ADMIN_TOKEN": "x"}, overrides={"admin": "0.0.0.0:9090"}
    ).source

    assert source is not None and with_token is not None
    assert [warning.field for warning in source.warnings] == ["admin"]
    assert with_token.warnings == []


def test_admin_port_can_be_switched_off() -> None:
    assert parse(TEXT, overrides={"admin": "off"}).admin is None


def test_members_of_one_pool_may_share_a_port() -> None:
    members = [{"name": name, "command": ["serve"], "port": 9000} for name in ("a", "b")]

    settings = from_mapping({"pools": [{"name": "gpu0", "members": members}]})

    assert [member.port for member in settings.pools[0].members] == [9000, 9000]


def test_anchors_and_merge_keys_save_writing() -> None:
    settings = parse(
        """\
pools:
  - name: gpu0
    members:
      - &base
        name: a
        profile: vllm
        command: [serve, "{port}"]
      - {<<: *base, name: b}
"""
    )

    assert [member.name for member in settings.pools[0].members] == ["a", "b"]
    assert settings.pools[0].members[1].profile == "vllm"


def test_settings_read_their_own_dump_again() -> None:
    settings = parse(TEXT)

    dump = settings.model_dump(mode="json", by_alias=True, exclude_none=True)

    again = from_mapping(dump)
    assert again.model_dump() == settings.model_dump()


def test_settings_are_frozen() -> None:
    settings = Settings()

    with pytest.raises(ValueError, match="frozen"):
        settings.max_held = 3


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0s", 0),
        ("300s", 300),
        ("4m30s", 270),
        ("1h", 3600),
        ("500ms", 0.5),
        ("1h2m3s4ms", 3723.004),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "5", "5 s", "-5s", "+5s", "1d", "1.5h", "5S", "100000s", "1h1m1s1ms1s", "s", "٣s"]
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a duration"):
        from_mapping({"responseTimeout": text, "upstreams": [{"name": "a", "url": "http://a"}]})


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (300, "300s"),
        (600, "10m"),
        (3600, "1h"),
        (90_061, "90061s"),
        (100_001, "27h46m41s"),
        (0.5, "500ms"),
        (1.5, "1500ms"),
    ],
)
def test_durations_are_written_as_they_are_read(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("64MiB", 64 * 2**20),
        ("1kB", 1000),
        ("2GiB", 2**31),
        ("10B", 10),
        ("10", 10),
        ("1GB", 10**9),
    ],
)
def test_sizes(written: str, size: int) -> None:
    tree = {"maxBodyBytes": written, "maxHeldBytes": "16GiB", "pools": []}

    settings = from_mapping({**tree, "upstreams": [{"name": "a", "url": "http://a"}]})

    assert settings.max_body_bytes == size
    assert (
        from_mapping(
            {
                **tree,
                "maxBodyBytes": format_size(size),
                "upstreams": [{"name": "a", "url": "http://a"}],
            }
        ).max_body_bytes
        == size
    )
