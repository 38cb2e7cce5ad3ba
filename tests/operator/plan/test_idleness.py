"""Only a positive answer is idle, and never more readily than the router would say so."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool_operator.engine.probing import ask
from modelpool_operator.plan.idleness import idle_path, judge, together
from modelpool_operator.plan.model import Idle, ProbeIdle, Target
from modelpool_router.core.events import Idleness
from modelpool_router.drivers import profiles

IDLE_SLOTS = json.dumps([{"is_processing": False}, {"is_processing": False}]).encode()
BUSY_SLOTS = json.dumps([{"is_processing": False}, {"is_processing": True}]).encode()


@pytest.mark.parametrize(
    ("profile", "status", "body", "said"),
    [
        ("llama-server", 200, IDLE_SLOTS, Idle.IDLE),
        ("llama-server", 200, BUSY_SLOTS, Idle.BUSY),
        ("llama-server", 200, b'[{"state": 0}]', Idle.IDLE),
        ("llama-server", 200, b'[{"state": 1}]', Idle.BUSY),
        ("llama-server", 200, b"[]", Idle.UNREACHABLE),
        ("llama-server", 200, b"{", Idle.UNREACHABLE),
        ("llama-server", 200, b'[{"is_processing": 0}]', Idle.UNREACHABLE),
        ("llama-server", 404, b"", Idle.UNSUPPORTED),
        ("llama-server", 501, b"", Idle.UNSUPPORTED),
        ("llama-server", 503, b"", Idle.UNREACHABLE),
        ("vllm", 200, b"vllm:num_requests_running 0\n", Idle.IDLE),
        ("vllm", 200, b'vllm:num_requests_running{m="a b"} 0.0\n', Idle.IDLE),
        ("vllm", 200, b"vllm:num_requests_running 2\n", Idle.BUSY),
        (
            "vllm",
            200,
            b"vllm:num_requests_running 0\nvllm:num_requests_waiting 1\n",
            Idle.BUSY,
        ),
        ("vllm", 200, b"vllm:num_requests_waiting 0\n", Idle.UNREACHABLE),
        ("vllm", 200, b"vllm:num_requests_running NaN\n", Idle.UNREACHABLE),
        ("vllm", 500, b"vllm:num_requests_running 0\n", Idle.UNREACHABLE),
        ("tgi", 200, b"tgi_batch_current_size 0\n", Idle.IDLE),
        ("tgi", 200, b"tgi_batch_current_size 0\ntgi_queue_size 3\n", Idle.BUSY),
        ("sglang", 200, b'[{"num_reqs": 0}]', Idle.IDLE),
        ("sglang", 200, b'{"loads": [{"num_reqs": 0}, {"num_reqs": 1}]}', Idle.BUSY),
        ("sglang", 200, b'[{"num_reqs": 0}, {}]', Idle.UNREACHABLE),
        ("sglang", 200, b"[]", Idle.UNREACHABLE),
        ("generic", 200, b"", Idle.IDLE),
        ("generic", 503, b"", Idle.BUSY),
        ("generic", 404, b"", Idle.UNSUPPORTED),
        ("generic", 302, b"", Idle.UNREACHABLE),
    ],
)
def test_given_an_answer_then_it_means_what_the_engine_means(
    profile: str, status: int, body: bytes, said: Idle
) -> None:
    assert judge(profile, status, body) is said


def test_given_a_generic_engine_then_it_has_no_path_of_its_own() -> None:
    assert idle_path("generic", None) is None
    assert idle_path("generic", "/idle") == "/idle"
    assert idle_path("llama-server", None) == "/slots"


def test_given_the_profiles_of_the_router_then_the_same_paths_are_asked() -> None:
    for name in profiles.NAMES:
        assert idle_path(name, None) == profiles.profile(name).idle_path


bodies = st.one_of(
    st.binary(max_size=60),
    st.sampled_from([IDLE_SLOTS, BUSY_SLOTS]),
    st.lists(
        st.dictionaries(
            st.sampled_from(["is_processing", "state", "num_reqs", "load", "loads"]),
            st.one_of(st.booleans(), st.integers(-1, 2), st.none()),
            max_size=3,
        ),
        max_size=3,
    ).map(lambda found: json.dumps(found).encode()),
    st.lists(
        st.tuples(
            st.sampled_from(
                [
                    "vllm:num_requests_running",
                    "vllm:num_requests_waiting",
                    "tgi_batch_current_size",
                    "tgi_queue_size",
                    "sglang:num_running_reqs",
                    "# HELP",
                ]
            ),
            st.sampled_from(["0", "0.0", "1", "-1", "NaN", "+Inf", "x", ""]),
        ),
        max_size=4,
    ).map(lambda found: "\n".join(f"{k} {v}" for k, v in found).encode()),
)


@given(st.sampled_from(profiles.NAMES), st.sampled_from([200, 204, 302, 404, 500, 503]), bodies)
def test_given_any_answer_then_idle_here_is_idle_for_the_router_too(
    profile: str, status: int, body: bytes
) -> None:
    said = judge(profile, status, body)

    if said is Idle.IDLE:
        found = profiles.profile(profile).judge_idle(status, body)
        assert found.verdict is Idleness.IDLE


@pytest.mark.parametrize(
    ("said", "whole"),
    [
        ([], Idle.UNREACHABLE),
        ([Idle.IDLE], Idle.IDLE),
        ([Idle.IDLE, Idle.BUSY], Idle.BUSY),
        ([Idle.IDLE, Idle.UNREACHABLE], Idle.UNREACHABLE),
        ([Idle.IDLE, Idle.UNSUPPORTED], Idle.UNSUPPORTED),
        ([Idle.UNREACHABLE, Idle.BUSY], Idle.BUSY),
    ],
)
def test_given_several_pods_then_all_must_be_idle(said: list[Idle], whole: Idle) -> None:
    assert together(said) is whole


async def test_given_no_path_or_no_answer_then_it_is_never_idle() -> None:
    class Nobody:
        async def get(self, host: str, port: int, path: str) -> tuple[int, bytes] | None:
            return None

    target = (Target("u", "10.0.0.1", 8080),)
    assert await ask(Nobody(), ProbeIdle("a", "llama-server", "/slots", target)) is Idle.UNREACHABLE
    assert await ask(Nobody(), ProbeIdle("a", "generic", "", target)) is Idle.UNSUPPORTED
    assert await ask(Nobody(), ProbeIdle("a", "llama-server", "/slots", ())) is Idle.UNREACHABLE
