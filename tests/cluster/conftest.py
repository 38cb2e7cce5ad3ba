"""Fixtures of the cluster tier. Without `-m cluster` none of its cluster tests is collected."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import harness
from cluster_ground import Ground
from cluster_kubectl import until
from cluster_operator import Operator, Start, install
from cluster_roles import OPERATOR, router_account
from cluster_slot import Slot


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "cluster" in (config.option.markexpr or ""):
        # They judge what all the others have done.
        items.sort(key=lambda item: item.path.name == "test_roles.py")
        return
    left_out = [item for item in items if item.get_closest_marker("cluster")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[harness.Cluster]:
    """A cluster for the whole run; its folder, with all logs, is kept when a test failed."""
    folder = harness.temporary_folder()
    try:
        with harness.open_cluster(folder) as opened:
            yield opened
    except harness.NotHere as why:
        pytest.skip(str(why))
    finally:
        _keep_record(folder)
    if not request.session.testsfailed:
        shutil.rmtree(folder, ignore_errors=True)


def _keep_record(folder: Path) -> None:
    """Keep the record of who asked for what, where somebody wants to read it over several runs."""
    kept = os.environ.get("MODELPOOL_CLUSTER_AUDIT")
    written = folder / "logs" / "audit.jsonl"
    if kept and written.exists():
        Path(kept).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(written, Path(kept) / f"{folder.name}.jsonl")


@pytest.fixture(scope="session")
def is_whole_tier(request: pytest.FixtureRequest) -> bool:
    """Whether no test of the tier is left out of this run."""
    marked = {
        path
        for path in Path(__file__).parent.glob("test_*.py")
        if "pytest.mark.cluster" in path.read_text("utf-8")
    }
    there = {item.path for item in request.session.items}
    is_picked = bool(request.config.option.keyword or request.config.option.deselect)
    is_part = any("::" in each for each in request.config.args)
    return not is_picked and not is_part and marked <= there


@pytest.fixture
def own(cluster: harness.Cluster) -> harness.OwnCluster:
    """The cluster, for tests that need nodes or faults of ours."""
    if not isinstance(cluster, harness.OwnCluster):
        pytest.skip("needs test nodes: unset KUBECONFIG and build the cluster's binaries")
    return cluster


@pytest.fixture
def namespace(cluster: harness.Cluster) -> Iterator[str]:
    """A namespace of the test's own; its Pods are gone before the next test, so the GPU is free."""
    name = cluster.new_namespace()
    yield name
    # A namespace controller begins five seconds late; what holds the GPU should go now.
    kinds = "deployments,statefulsets,jobs,pods"
    cluster.kubectl("delete", kinds, "--all", "-n", name, "--wait=false")
    cluster.kubectl("delete", "namespace", name, "--wait=false")
    until(lambda: not cluster.kubectl.items("pods", "-n", name), f"no Pod is left in {name}", 90)


@pytest.fixture
def shipped(own: harness.OwnCluster) -> harness.OwnCluster:
    """A cluster with the shipped objects in it."""
    install(own.kubectl)
    return own


@pytest.fixture
def start(shipped: harness.OwnCluster, tmp_path: Path) -> Iterator[Start]:
    """Start operators; they are ended afterwards."""
    account = shipped.service_account(*OPERATOR)
    with contextlib.ExitStack() as stack:

        def started(name: str) -> Operator:
            operator = Operator(account, tmp_path / f"{name}.log", name)
            stack.callback(lambda: operator.is_running and operator.stop())
            return operator

        yield started


@pytest.fixture
def account_of_router(cluster: harness.Cluster) -> Callable[..., Path]:
    """
    Kubeconfigs of accounts with the Role that the operator would make for a router.

    Call it with a name and ModelPools: see `cluster_roles.router_account`. A router that a
    ModelRouter made has its account already: `cluster.service_account(namespace, its name)`.
    """
    return partial(router_account, cluster)


@pytest.fixture
def ground(shipped: harness.OwnCluster, namespace: str) -> Ground:
    """A namespace for pools, in a cluster with the shipped objects."""
    return Ground(shipped, namespace)


@pytest.fixture
def slot(own: harness.OwnCluster, namespace: str, tmp_path: Path) -> Iterator[Slot]:
    """A pool of two Deployments, for routers from a file; they are ended afterwards."""
    made = Slot(own, namespace, tmp_path)
    yield made
    made.end()
