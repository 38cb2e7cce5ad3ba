"""Two Deployments that take turns through the router, from the router's own file, without a CRD."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster_kubectl import until
from cluster_objects import deployment, member_container
from cluster_router import RouterProcess
from harness import Cluster, OwnCluster

pytestmark = pytest.mark.cluster
LARGE, SMALL = "large", "small"


class Slot:
    """A pool of two Deployments, and routers in front of it."""

    def __init__(self, cluster: Cluster, namespace: str, folder: Path) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self._folder = folder
        self._routers: list[RouterProcess] = []
        for name in (SMALL, LARGE):
            body = deployment(namespace, name, member_container("--name", name))
            body["spec"]["replicas"] = 0
            body["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 5
            cluster.kubectl.create(body)

    def router(self, name: str, **rules: Any) -> RouterProcess:
        """Return a router that is not started yet."""
        members = [
            {
                "name": each,
                "profile": "llama-server",
                "deployment": {"namespace": self.namespace, "name": each},
            }
            for each in (SMALL, LARGE)
        ]
        pool = {"name": "gpu0", "linger": "0s", "swapBudget": "60s", "members": members, **rules}
        made = RouterProcess(
            self.cluster, self._folder / name, name, leaseNamespace=self.namespace, pools=[pool]
        )
        self._routers.append(made)
        return made

    def end(self) -> None:
        """Leave no router running."""
        for each in self._routers:
            with contextlib.suppress(Exception):
                each.stop(signal.SIGKILL)

    def replicas(self, name: str) -> int:
        """Return what a Deployment asks for."""
        found = self.cluster.kubectl.get("deployment", name, "-n", self.namespace)
        return int(found["spec"]["replicas"])

    def pods(self, name: str = "") -> list[str]:
        """Return the UIDs of Pods, of one member or of both."""
        only = ("-l", f"app={name}") if name else ()
        return [
            each["metadata"]["uid"]
            for each in self.cluster.kubectl.items("pods", "-n", self.namespace, *only)
        ]

    def record(self) -> Any:
        """Return the slot record."""
        lease = self.cluster.kubectl.get("lease", "modelpool-gpu0", "-n", self.namespace)
        return json.loads(lease["metadata"]["annotations"]["modelpool.dev/record"])

    @contextlib.contextmanager
    def never_two(self) -> Iterator[None]:
        """Look all the time whether Pods of both members exist."""
        over = threading.Event()
        seen: list[list[str]] = []

        def look() -> None:
            while not over.wait(0.02):
                listed = self.cluster.kubectl.items("pods", "-n", self.namespace)
                apps = sorted({each["metadata"]["labels"]["app"] for each in listed})
                if len(apps) > 1:
                    seen.append(apps)

        looking = threading.Thread(target=look)
        looking.start()
        try:
            yield
        finally:
            over.set()
            looking.join()
        assert seen == []


@pytest.fixture
def slot(own: OwnCluster, namespace: str, tmp_path: Path) -> Iterator[Slot]:
    made = Slot(own, namespace, tmp_path)
    yield made
    made.end()


def test_two_deployments_take_turns(slot: Slot) -> None:
    router = slot.router("router-1")
    router.start()

    with slot.never_two():
        for member, other in ((SMALL, LARGE), (LARGE, SMALL), (SMALL, LARGE)):
            answer = router.chat(member)
            assert (answer.status, answer.member) == (200, member), answer.body
            assert (slot.replicas(member), slot.replicas(other)) == (1, 0)
            record = slot.record()
            assert (record["owner"], record["phase"]) == (member, "resident")

    assert router.request("GET", "/readyz").status == 200
    assert router.stop() == 0
    # Its members stay as they are.
    assert (slot.replicas(SMALL), slot.replicas(LARGE)) == (1, 0)
    lease = slot.cluster.kubectl.get("lease", "modelpool-gpu0", "-n", slot.namespace)
    assert not lease["spec"].get("holderIdentity")


def test_a_router_that_was_killed_comes_back_to_its_resident(slot: Slot) -> None:
    router = slot.router("router-1")
    router.start()
    assert router.chat(SMALL).status == 200
    pods = slot.pods()
    router.stop(signal.SIGKILL)

    router.start()
    answer = router.chat(SMALL)

    assert (answer.status, answer.member) == (200, SMALL)
    assert slot.pods() == pods
    assert router.chat(LARGE).member == LARGE


def test_a_second_router_stands_by_and_takes_over(slot: Slot) -> None:
    first, second = slot.router("router-1"), slot.router("router-2")
    first.start()
    assert first.chat(SMALL).status == 200
    second.start()
    refused = until(lambda: (answer := second.chat(SMALL)).status == 503 and answer, "it stands by")
    assert refused is not False
    assert refused.code == "slot_unavailable"
    assert "router-1" in refused.message
    assert second.request("GET", "/readyz").status == 503
    pods = slot.pods()

    with slot.never_two():
        first.stop(signal.SIGKILL)
        until(lambda: second.request("GET", "/readyz").status == 200, "it takes over", 60)
        assert second.chat(SMALL).member == SMALL
        assert slot.pods() == pods
        assert second.chat(LARGE).member == LARGE


def test_an_image_that_cannot_be_pulled_is_told_in_the_clusters_words(slot: Slot) -> None:
    patch = [
        {
            "op": "replace",
            "path": "/spec/template/spec/containers/0/image",
            "value": "modelpool.test/absent",
        }
    ]
    slot.cluster.kubectl(
        "patch", "deployment", LARGE, "-n", slot.namespace, "--type=json", f"-p={json.dumps(patch)}"
    )
    router = slot.router("router-1")
    router.start()
    began = time.monotonic()

    answer = router.chat(LARGE)

    assert (answer.status, answer.code) == (503, "member_failed")
    assert "ImagePull" in answer.message
    assert time.monotonic() - began < 20
    assert router.chat(SMALL).member == SMALL


def test_while_the_api_server_is_away_the_resident_is_served(slot: Slot) -> None:
    cluster = slot.cluster
    assert isinstance(cluster, OwnCluster)
    router = slot.router("router-1")
    router.start()
    assert router.chat(SMALL).status == 200
    cluster.stop_apiserver()
    try:
        over = time.monotonic() + 40
        while time.monotonic() < over:
            assert router.chat(SMALL).status == 200
            time.sleep(0.2)
    finally:
        cluster.start_apiserver()
    back = time.monotonic()
    served: list[str] = []

    def want_large() -> None:
        while not served and time.monotonic() < back + 180:
            answer = router.chat(LARGE)
            if answer.status == 200:
                served.append(answer.member)

    wanting = threading.Thread(target=want_large)
    wanting.start()
    try:
        # What the router has to do is done at once. The controllers of the cluster take their own
        # time: their watches are dialled again with pauses of up to a minute.
        until(lambda: slot.replicas(SMALL) == 0, "the swap begins", 20)
        assert time.monotonic() - back < 15
        until(lambda: served, "the swap is done", 150)
    finally:
        wanting.join()
    assert served == [LARGE]
