"""What answers of engines mean."""

from __future__ import annotations

import json
import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelpool_router.core.events import Idleness
from modelpool_router.drivers.profiles import (
    NAMES,
    IdleReading,
    ProfileOverrides,
    Readiness,
    profile,
    samples,
)

LOADING = b'{"error":{"message":"Loading model","code":503,"type":"unavailable_error"}}'


def slots(*processing: bool) -> bytes:
    return json.dumps(
        [{"id": at, "is_processing": busy} for at, busy in enumerate(processing)]
    ).encode()


VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="a b}} c"}} {running}
vllm:num_requests_waiting{{engine="0",model_name="a b}} c"}} {waiting}
vllm:num_requests_waiting_total 99.0
"""


def vllm(running: object, waiting: object) -> bytes:
    return VLLM.format(running=running, waiting=waiting).encode()


def test_the_five_profiles() -> None:
    assert NAMES == ("llama-server", "vllm", "sglang", "tgi", "generic")
    with pytest.raises(KeyError):
        profile("ollama")


@pytest.mark.parametrize("name", NAMES)
def test_every_profile_stops_with_term_and_term_before_the_kill(name: str) -> None:
    steps = profile(name).stop

    assert [step.signal for step in steps] == [signal.SIGTERM, signal.SIGTERM]
    assert all(step.grace_s > 0 for step in steps)


def test_defaults_for_parallel() -> None:
    assert {name: profile(name).default_parallel for name in NAMES} == {
        "llama-server": 16,
        "vllm": 256,
        "sglang": 16,
        "tgi": 16,
        "generic": 16,
    }
    assert [name for name in NAMES if profile(name).reports_parallel] == ["llama-server"]


def test_overrides_replace_paths_and_graces_only() -> None:
    changed = profile(
        "generic",
        ProfileOverrides(
            readiness_path="/up", idle_path="/idle", stop_grace_s=0.0, kill_grace_s=1.5
        ),
    )

    assert (changed.readiness_path, changed.idle_path) == ("/up", "/idle")
    assert [step.grace_s for step in changed.stop] == [0.0, 1.5]
    assert profile("generic").idle_path is None
    assert profile("vllm", ProfileOverrides(stop_grace_s=1.0)).stop[1] == profile("vllm").stop[1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("status", "body", "meaning"),
    [
        (200, b'{"status":"ok"}', Readiness.READY),
        (204, b"", Readiness.READY),
        (503, LOADING, Readiness.LOADING),
        (500, b"", Readiness.LOADING),
        (502, b"<html>", Readiness.LOADING),
        (429, b"", Readiness.LOADING),
        (404, b"", Readiness.FAILED),
        (401, b"", Readiness.FAILED),
        (301, b"", Readiness.FAILED),
    ],
)
def test_readiness(name: str, status: int, body: bytes, meaning: Readiness) -> None:
    assert profile(name).judge_readiness(status, body) is meaning


@pytest.mark.parametrize(
    ("status", "body", "reading"),
    [
        (200, slots(False, False, False), IdleReading(Idleness.IDLE, 3)),
        (200, slots(False, True), IdleReading(Idleness.BUSY, 2)),
        (200, b'[{"id":0,"state":0},{"id":1,"state":1}]', IdleReading(Idleness.BUSY, 2)),
        (200, b'[{"id":0,"state":0}]', IdleReading(Idleness.IDLE, 1)),
        (200, b"[]", IdleReading(Idleness.UNREACHABLE)),
        (200, b'[{"id":0}]', IdleReading(Idleness.UNREACHABLE)),
        (200, b'[{"id":0,"is_processing":"no"}]', IdleReading(Idleness.UNREACHABLE)),
        (200, b"not json", IdleReading(Idleness.UNREACHABLE)),
        (200, b'{"slots":[]}', IdleReading(Idleness.UNREACHABLE)),
        (503, LOADING, IdleReading(Idleness.UNREACHABLE)),
        (501, b'{"error":{"message":"no slots endpoint"}}', IdleReading(Idleness.IDLE)),
        (404, b"", IdleReading(Idleness.IDLE)),
    ],
)
def test_idle_of_llama_server(status: int, body: bytes, reading: IdleReading) -> None:
    assert profile("llama-server").judge_idle(status, body) == reading


@pytest.mark.parametrize(
    ("status", "body", "verdict"),
    [
        (200, vllm("0.0", "0.0"), Idleness.IDLE),
        (200, vllm("2.0", "0.0"), Idleness.BUSY),
        (200, vllm("0.0", "1.0"), Idleness.BUSY),  # waiting in the engine is work too
        (200, vllm("0.0", "0.0") + vllm("1.0", "0.0"), Idleness.BUSY),  # any rank
        (200, vllm("0.0", "0.0 1712345678000"), Idleness.IDLE),  # with a timestamp
        (200, vllm("NaN", "0.0"), Idleness.UNREACHABLE),
        (200, b"vllm:num_requests_waiting 0\n", Idleness.UNREACHABLE),
        (200, b"", Idleness.UNREACHABLE),  # statistics turned off
        (500, vllm("0.0", "0.0"), Idleness.UNREACHABLE),
        (404, b"", Idleness.IDLE),
    ],
)
def test_idle_of_vllm(status: int, body: bytes, verdict: Idleness) -> None:
    assert profile("vllm").judge_idle(status, body) == IdleReading(verdict)


@pytest.mark.parametrize(
    ("status", "body", "verdict"),
    [
        (200, b'[{"dp_rank":0,"num_reqs":0,"num_waiting_reqs":0,"num_tokens":9}]', Idleness.IDLE),
        (200, b'[{"num_reqs":0,"num_waiting_reqs":0},{"num_reqs":1}]', Idleness.BUSY),
        (200, b'{"load":0}', Idleness.IDLE),
        (200, b'{"load":3}', Idleness.BUSY),
        (200, b'{"loads":[{"num_running_reqs":0,"num_waiting_reqs":2}]}', Idleness.BUSY),
        (200, b'sglang:num_running_reqs{x="y"} 0\nsglang:num_queue_reqs 0\n', Idleness.IDLE),
        (200, b"sglang:num_running_reqs 0\nsglang:num_queue_reqs 1\n", Idleness.BUSY),
        (200, b"[]", Idleness.UNREACHABLE),
        (200, b'"text"', Idleness.UNREACHABLE),
        (503, b"", Idleness.UNREACHABLE),
        (404, b"", Idleness.IDLE),
    ],
)
def test_idle_of_sglang(status: int, body: bytes, verdict: Idleness) -> None:
    assert profile("sglang").judge_idle(status, body) == IdleReading(verdict)


@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        (b"tgi_batch_current_size 0\ntgi_queue_size 0\n", Idleness.IDLE),
        (b"tgi_batch_current_size 3\ntgi_queue_size 0\n", Idleness.BUSY),
        (b"tgi_batch_current_size 0\ntgi_queue_size 1\n", Idleness.BUSY),
        (b"tgi_queue_size 0\n", Idleness.UNREACHABLE),
    ],
)
def test_idle_of_tgi(body: bytes, verdict: Idleness) -> None:
    assert profile("tgi").judge_idle(200, body) == IdleReading(verdict)


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        (200, Idleness.IDLE),
        (204, Idleness.IDLE),
        (409, Idleness.BUSY),
        (429, Idleness.BUSY),
        (503, Idleness.BUSY),
        (500, Idleness.BUSY),
        (404, Idleness.UNREACHABLE),  # a wrong path must not read as "idle", nor as "busy"
        (401, Idleness.UNREACHABLE),
        (302, Idleness.UNREACHABLE),
    ],
)
def test_idle_of_a_configured_path(status: int, verdict: Idleness) -> None:
    assert profile("generic").judge_idle(status, b"") == IdleReading(verdict)


def test_samples_survive_labels_with_braces_and_spaces() -> None:
    page = b'a{x="} 7 {"} 1.5\nb 2\n# c 3\nd{} \ne{x="y"} nonsense\n\nf 4 123\n'

    assert list(samples(page)) == [("a", 1.5), ("b", 2.0), ("f", 4.0)]


@settings(derandomize=True, max_examples=150, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    status=st.integers(100, 599),
    body=st.one_of(
        st.binary(max_size=200),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=4)
                | st.dictionaries(st.text(max_size=8), inner, max_size=4)
            ),
        ).map(lambda value: json.dumps(value).encode()),
    ),
)
def test_no_answer_breaks_a_judge(name: str, status: int, body: bytes) -> None:
    found = profile(name)

    assert isinstance(found.judge_readiness(status, body), Readiness)
    assert isinstance(found.judge_idle(status, body).verdict, Idleness)


def test_a_depth_bomb_is_no_answer() -> None:
    assert profile("llama-server").judge_idle(200, b"[" * 100_000).verdict is Idleness.UNREACHABLE
