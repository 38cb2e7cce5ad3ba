"""The tools that break things, and the one that looks; without a cluster."""

from __future__ import annotations

import asyncio
import http.server
import io
import json
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster_certs import Authority
from cluster_eye import Together
from cluster_faults import Fate, FaultyWay, Write
from cluster_kubectl import changes
from modelpool_kube.client import connect
from modelpool_kube.errors import KubeError, Unanswered
from modelpool_kube.kinds import DEPLOYMENTS


class Server(http.server.BaseHTTPRequestHandler):
    """Says yes to everything, and remembers it."""

    protocol_version = "HTTP/1.1"
    asked: list[tuple[str, str, Any]]

    def _answer(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.asked.append((self.command, self.path, json.loads(raw) if raw else None))
        answer = json.dumps({"metadata": {"name": "a"}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_PATCH = _answer

    def log_message(self, *_: object) -> None:
        """Be quiet."""


@pytest.fixture
def asked() -> list[tuple[str, str, Any]]:
    """What reached the server."""
    return []


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Keys take a while to make."""
    return Authority(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def way(
    tmp_path: Path, authority: Authority, asked: list[tuple[str, str, Any]]
) -> Iterator[FaultyWay]:
    pair = authority.server("stub")
    handler = type("Asked", (Server,), {"asked": asked})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(pair.cert, pair.key)
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        admin = authority.client("admin")
        url = f"https://127.0.0.1:{server.server_port}"
        made = FaultyWay(
            authority.kubeconfig(url, admin, tmp_path / "kubeconfig"), tmp_path / "way"
        )
        yield made
        made.close()
        server.shutdown()
        serving.join()


async def scale(way: FaultyWay, replicas: int, *, timeout_s: float = 10) -> KubeError | None:
    """Scale something through *way*; return what went wrong."""
    client = await connect(
        manager="tests", kubeconfig=str(way.kubeconfig), call_timeout_s=timeout_s
    )
    async with client:
        patch = {"spec": {"replicas": replicas}}
        try:
            await client.patch_merge(DEPLOYMENTS, "lab", "a", patch, version="7")
        except KubeError as error:
            return error
    return None


def scaled(asked: list[tuple[str, str, Any]]) -> list[int]:
    """Return the replicas that reached the server, in order."""
    return [body["spec"]["replicas"] for method, _, body in asked if method == "PATCH"]


async def test_reads_and_writes_pass_unchanged(
    way: FaultyWay, asked: list[tuple[str, str, Any]]
) -> None:
    assert await scale(way, 1) is None
    [(method, path, body)] = asked
    assert (method, path) == (
        "PATCH",
        "/apis/apps/v1/namespaces/lab/deployments/a?fieldManager=tests",
    )
    assert body == {"spec": {"replicas": 1}, "metadata": {"resourceVersion": "7"}}
    [write] = way.writes
    assert (write.kind, write.name, write.replicas, write.status) == ("deployments", "a", 1, 200)


@pytest.mark.parametrize(
    ("fate", "reached"),
    [
        (Fate.LOSE, []),
        (Fate.LOSE_ANSWER, [0]),
        (Fate.KILL_BEFORE, []),
        (Fate.KILL_AFTER, [0]),
        (Fate.CUT_AND_HOLD, []),
    ],
)
async def test_what_becomes_of_a_write(
    way: FaultyWay, asked: list[tuple[str, str, Any]], fate: Fate, reached: list[int]
) -> None:
    killed: list[int] = []
    way.kill = lambda: killed.append(len(asked))
    way.rule = lambda write: fate

    assert isinstance(await scale(way, 0), Unanswered)

    assert scaled(asked) == reached
    assert killed == ([len(reached)] if fate in (Fate.KILL_BEFORE, Fate.KILL_AFTER) else [])


async def test_what_is_held_back_lands_when_it_is_let_go(
    way: FaultyWay, asked: list[tuple[str, str, Any]]
) -> None:
    way.rule = lambda write: Fate.HOLD if write.replicas == 0 else Fate.PASS
    assert isinstance(await scale(way, 0, timeout_s=0.2), Unanswered)
    assert await scale(way, 1) is None
    assert scaled(asked) == [1]
    assert [write.status for write in way.held] == [None]

    landed = await asyncio.to_thread(way.release)

    assert [write.status for write in landed] == [200]
    assert scaled(asked) == [1, 0]
    assert way.held == []


def test_what_a_write_is() -> None:
    where = "/apis/coordination.k8s.io/v1/namespaces/lab/leases/modelpool-gpu0"
    renewal = Write("PATCH", where, {"spec": {"renewTime": "now"}, "metadata": {}})
    assert renewal.is_renewal
    text = json.dumps({"phase": "loading", "owner": None, "target": "b", "epoch": 4})
    notes = {"annotations": {"modelpool.dev/record": text}}
    record = Write("PATCH", where, {"spec": {"renewTime": "now"}, "metadata": notes})
    assert not record.is_renewal
    assert record.record["target"] == "b"
    assert str(record) == "PATCH leases modelpool-gpu0: loading None>b e4"
    status = Write("PATCH", "/apis/modelpool.dev/v1alpha1/namespaces/lab/modelpools/p/status", {})
    assert (status.kind, status.name) == ("modelpools/status", "p")
    made = Write("POST", "/api/v1/namespaces/lab/services", {"metadata": {"name": "front"}})
    assert (made.kind, made.name) == ("services", "front")
    marked = {"metadata": {"annotations": {"modelpool.dev/slot": "lab/modelpool-gpu0:4"}}}
    member = "/apis/apps/v1/namespaces/lab/deployments/a"
    assert Write("PATCH", member, marked).is_mark
    assert not Write("PATCH", member, {**marked, "spec": {"replicas": 0}}).is_mark


def pod(uid: str, member: str, phase: str = "Running", *, ended: bool = False) -> dict[str, Any]:
    """Return a Pod of *member*."""
    state: dict[str, Any] = {"terminated": {}} if ended else {"running": {}}
    return {
        "metadata": {"uid": uid, "labels": {"app": member}},
        "status": {"phase": phase, "containerStatuses": [{"state": state}]},
    }


def test_two_members_at_once_are_seen() -> None:
    eye = Together()
    eye.take("ADDED", pod("1", "a"))
    eye.take("ADDED", pod("2", "b", "Pending"))
    assert eye.overlaps == [("", "a", "b")]
    assert eye.seen == ["a", "b"]


def test_two_pods_of_one_member_are_seen() -> None:
    eye = Together()
    eye.take("ADDED", pod("1", "a"))
    eye.take("MODIFIED", pod("1", "a"))
    eye.take("ADDED", pod("2", "a"))
    assert eye.overlaps == [("", "a", "a")]


def test_what_is_not_listed_any_more_is_gone() -> None:
    eye = Together()
    eye.take("ADDED", pod("1", "a"))
    eye.begin([pod("2", "b")])
    assert eye.overlaps == []
    eye.begin([pod("2", "b"), pod("3", "a")])
    assert eye.overlaps == [("", "b", "a")]


@pytest.mark.parametrize(
    "end",
    [("DELETED", pod("1", "a")), ("MODIFIED", pod("1", "a", "Failed", ended=True))],
    ids=["gone", "failed"],
)
def test_one_after_the_other_is_as_it_shall_be(end: tuple[str, dict[str, Any]]) -> None:
    eye = Together()
    eye.take("ADDED", pod("1", "a"))
    eye.take(*end)
    eye.take("ADDED", pod("2", "b"))
    assert eye.overlaps == []


def test_a_failed_pod_whose_container_runs_is_alive() -> None:
    eye = Together()
    eye.take("MODIFIED", pod("1", "a", "Failed"))
    eye.take("ADDED", pod("2", "b"))
    assert eye.overlaps == [("", "a", "b")]


def test_other_pools_and_what_a_person_forgot_do_not_count() -> None:
    eye = Together(lambda name: name[0])
    eye.take("ADDED", pod("1", "p-a"))
    eye.take("ADDED", pod("2", "q-a"))
    eye.forgotten.add("1")
    eye.take("ADDED", pod("3", "p-b"))
    assert eye.overlaps == []


def test_a_watch_is_read_object_by_object() -> None:
    told = [{"type": kind, "object": pod("1", "a")} for kind in ("ADDED", "MODIFIED")]
    printed = "".join(json.dumps(each, indent=4) + "\n" for each in told)

    found = list(changes(io.StringIO(printed + '{\n    "type": "DEL')))

    assert found == [("ADDED", pod("1", "a")), ("MODIFIED", pod("1", "a"))]
