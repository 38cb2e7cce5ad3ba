"""ModelPools as pools of a router: what becomes of every field, and of what cannot be served."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from memcluster import MemCluster
from modelpool_kube.kinds import INFERENCE_SERVICES, MODEL_POOLS, Kind
from modelpool_kube.port import Listing
from modelpool_router.app import modelpools
from modelpool_router.app.cluster import kube_members
from modelpool_router.app.modelpools import BadModelPool, ModelPools, beside, pool_of
from modelpool_router.core.spec import MemberName
from modelpool_router.settings import PoolsFrom, from_mapping


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait as little as may be for what else is applied."""
    monkeypatch.setattr(modelpools, "SETTLE_S", 0.05)


def model_pool(name: str = "gpu0", **spec: Any) -> dict[str, Any]:
    """Return a ModelPool as the API server has it."""
    members = [
        {"deploymentRef": {"name": "small"}, "profile": "llama-server", "models": ["gpt"]},
        {"name": "big", "inferenceServiceRef": {"name": "large"}, "serviceRef": {"name": "front"}},
    ]
    return {
        "apiVersion": "modelpool.dev/v1alpha1",
        "kind": "ModelPool",
        "metadata": {"name": name, "namespace": "lab"},
        "spec": {"members": members, **spec},
    }


def test_every_rule_of_a_model_pool_is_a_rule_of_the_pool() -> None:
    pool = pool_of(
        model_pool(
            default="big",
            swapBudget="45s",
            maxTurn="7s",
            linger="1s",
            drainTimeout="30s",
            loadTimeout="4m",
            unschedulableAfter="2m",
            maxGeneration="90s",
            idleUnloadAfter="10m",
            reclaimDefaultAfter="20m",
            hungAfter="33s",
        ),
        {"large": "vllm"},
    )

    assert (pool.name, pool.default, pool.swap_budget_s, pool.max_turn_s) == ("gpu0", "big", 45, 7)
    assert (pool.linger_s, pool.drain_timeout_s, pool.load_timeout_s) == (1, 30, 240)
    assert (pool.unschedulable_after_s, pool.max_generation_s) == (120, 90)
    assert (pool.idle_unload_after_s, pool.reclaim_default_after_s, pool.hung_after_s) == (
        600,
        1200,
        33,
    )
    small, big = (kube_members(pool)[MemberName(name)] for name in ("small", "big"))
    assert (small.kind, small.namespace, small.target) == ("Deployment", "lab", "small")
    assert (big.kind, big.target, big.service) == ("InferenceService", "large", "front")
    assert (small.profile.name, big.profile.name) == ("llama-server", "vllm")
    assert small.unschedulable_after_s == 120
    assert pool.members[0].models == ("gpt",)


def test_what_is_unset_is_as_the_api_says() -> None:
    pool = pool_of(model_pool(), {})

    assert (pool.swap_budget_s, pool.max_turn_s, pool.linger_s, pool.load_timeout_s) == (
        300,
        60,
        None,
        600,
    )
    assert kube_members(pool)[MemberName("big")].profile.name == "generic"
    assert kube_members(pool)[MemberName("big")].unschedulable_after_s == 600


def test_a_model_pool_that_cannot_be_read_says_where() -> None:
    with pytest.raises(BadModelPool, match="swapBudget|swap_budget"):
        pool_of(model_pool(swapBudget="soon"), {})


def test_a_name_that_is_taken_leaves_the_later_pool_out() -> None:
    settings = from_mapping({"upstreams": [{"name": "gpt", "url": "http://10.0.0.1:80"}]})
    pool = pool_of(model_pool(), {})

    assert beside(settings, {"gpu0": pool}).pools == ()
    other = from_mapping({"upstreams": [{"name": "else", "url": "http://10.0.0.1:80"}]})
    assert beside(other, {"gpu0": pool}).pools == (pool,)


async def test_model_pools_are_followed_and_a_bad_edit_changes_nothing() -> None:
    cluster = MemCluster(clock=asyncio.get_running_loop().time)
    cluster.put(MODEL_POOLS, "lab", model_pool())
    service = {"metadata": {"name": "large"}, "spec": {"profile": "vllm"}}
    cluster.put(INFERENCE_SERVICES, "lab", service)
    changes = asyncio.Queue[int]()

    async def changed() -> None:
        changes.put_nowait(len(pools.pools))

    pools = ModelPools(cluster.port("router"), PoolsFrom(namespace="lab"), changed)
    await pools.start()
    assert kube_members(pools.pools["gpu0"])[MemberName("big")].profile.name == "vllm"

    cluster.put(MODEL_POOLS, "lab", model_pool("gpu1"))
    async with asyncio.timeout(10):
        assert await changes.get() == 2
    cluster.edit(MODEL_POOLS, "lab", "gpu0", {"spec": {"swapBudget": "soon"}})
    cluster.remove(MODEL_POOLS, "lab", "gpu1")
    async with asyncio.timeout(10):
        assert await changes.get() == 1
    assert pools.pools["gpu0"].swap_budget_s == 300

    await pools.close()


async def test_only_those_that_were_named_are_served() -> None:
    cluster = MemCluster(clock=asyncio.get_running_loop().time)
    for name in ("gpu0", "gpu1"):
        cluster.put(MODEL_POOLS, "lab", model_pool(name))

    async def changed() -> None: ...

    chosen = PoolsFrom(namespace="lab", names=("gpu1",))
    pools = ModelPools(cluster.port("router"), chosen, changed)
    await pools.start()

    assert set(pools.pools) == {"gpu1"}
    await pools.close()


async def test_others_can_be_chosen_while_they_are_followed() -> None:
    cluster = MemCluster(clock=asyncio.get_running_loop().time)
    for name in ("gpu0", "gpu1"):
        cluster.put(MODEL_POOLS, "lab", model_pool(name))
    changes = asyncio.Queue[set[str]]()

    async def changed() -> None:
        changes.put_nowait(set(pools.pools))

    chosen = PoolsFrom(namespace="lab", names=("gpu1",))
    pools = ModelPools(cluster.port("router"), chosen, changed)
    await pools.start()

    await pools.choose(PoolsFrom(namespace="lab", names=("gpu0", "gpu2")))
    assert set(pools.pools) == {"gpu0"}

    async with asyncio.timeout(10):
        cluster.put(MODEL_POOLS, "lab", model_pool("gpu2"))
        while await changes.get() != {"gpu0", "gpu2"}:
            pass
    cluster.edit(MODEL_POOLS, "lab", "gpu1", {"spec": {"swapBudget": "9s"}})
    cluster.remove(MODEL_POOLS, "lab", "gpu0")
    async with asyncio.timeout(10):
        assert await changes.get() == {"gpu2"}

    await pools.close()


async def test_one_that_is_chosen_again_and_seen_late_is_put_in_force(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(modelpools, "FIRST_LOOK_S", 0.05)
    cluster = MemCluster(clock=asyncio.get_running_loop().time)
    for name in ("gpu0", "gpu1"):
        cluster.put(MODEL_POOLS, "lab", model_pool(name))
    port = cluster.port("router")
    is_allowed = asyncio.Event()
    is_allowed.set()
    at_once = port.list

    async def listed(kind: Kind, namespace: str | None, **more: Any) -> Listing:
        await is_allowed.wait()
        return await at_once(kind, namespace, **more)

    port.list = listed  # type: ignore[method-assign]
    changes = asyncio.Queue[set[str]]()

    async def changed() -> None:
        changes.put_nowait(set(pools.pools))

    both = PoolsFrom(namespace="lab", names=("gpu0", "gpu1"))
    pools = ModelPools(port, both, changed)
    await pools.start()
    await pools.choose(PoolsFrom(namespace="lab", names=("gpu0",)))
    is_allowed.clear()
    await pools.choose(both)
    assert set(pools.pools) == {"gpu0"}

    is_allowed.set()

    async with asyncio.timeout(10):
        while await changes.get() != {"gpu0", "gpu1"}:
            pass
    await pools.close()


async def test_named_ones_are_watched_by_name_and_so_are_their_services() -> None:
    """A Role of a router names them, and the server allows no wider look."""
    cluster = MemCluster(clock=asyncio.get_running_loop().time)
    cluster.put(MODEL_POOLS, "lab", model_pool("gpu0"))
    service = {"metadata": {"name": "large"}, "spec": {"profile": "vllm"}}
    cluster.put(INFERENCE_SERVICES, "lab", service)
    port = cluster.port("router")
    asked: list[tuple[Kind, str]] = []
    wide = port.list

    async def listed(kind: Kind, namespace: str | None, **more: Any) -> Listing:
        asked.append((kind, more["fields"]))
        return await wide(kind, namespace, **more)

    port.list = listed  # type: ignore[method-assign]

    async def changed() -> None: ...

    pools = ModelPools(port, PoolsFrom(namespace="lab", names=("gpu0",)), changed)
    await pools.start()

    assert kube_members(pools.pools["gpu0"])[MemberName("big")].profile.name == "vllm"
    assert set(asked) == {
        (MODEL_POOLS, "metadata.name=gpu0"),
        (INFERENCE_SERVICES, "metadata.name=large"),
    }
    await pools.close()


async def test_what_could_not_be_put_in_force_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(modelpools, "AGAIN_S", 0.0)
    cluster = MemCluster(clock=asyncio.get_running_loop().time)
    tries = asyncio.Queue[set[str]]()
    failures = [OSError("the disk is full")]

    async def changed() -> None:
        tries.put_nowait(set(pools.pools))
        if failures:
            raise failures.pop()

    pools = ModelPools(cluster.port("router"), PoolsFrom(namespace="lab"), changed)
    await pools.start()
    cluster.put(MODEL_POOLS, "lab", model_pool())

    async with asyncio.timeout(60):
        assert await tries.get() == {"gpu0"}
        assert await tries.get() == {"gpu0"}

    await pools.close()


@pytest.mark.parametrize(
    ("before", "after"), [((), ("gpu0", "gpu1")), (("gpu0", "gpu1"), ())], ids=["named", "all"]
)
async def test_what_another_watch_has_not_seen_yet_is_not_gone(
    monkeypatch: pytest.MonkeyPatch, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    """Pools stay served, with the profiles they had, while the API server is away."""
    monkeypatch.setattr(modelpools, "FIRST_LOOK_S", 0.05)
    cluster = MemCluster(clock=asyncio.get_running_loop().time)
    service = {"metadata": {"name": "large"}, "spec": {"profile": "vllm"}}
    cluster.put(INFERENCE_SERVICES, "lab", service)
    for name in ("gpu0", "gpu1"):
        cluster.put(MODEL_POOLS, "lab", model_pool(name))
    port = cluster.port("router")
    may_list = {MODEL_POOLS: asyncio.Event(), INFERENCE_SERVICES: asyncio.Event()}
    for each in may_list.values():
        each.set()
    at_once = port.list

    async def listed(kind: Kind, namespace: str | None, **more: Any) -> Listing:
        await may_list[kind].wait()
        return await at_once(kind, namespace, **more)

    port.list = listed  # type: ignore[method-assign]

    async def changed() -> None: ...

    pools = ModelPools(port, PoolsFrom(namespace="lab", names=before), changed)
    await pools.start()
    served = dict(pools.pools)
    assert set(served) == {"gpu0", "gpu1"}

    for each in may_list.values():
        each.clear()
    await pools.choose(PoolsFrom(namespace="lab", names=after))
    assert pools.pools == served, "no pool was listed yet"
    may_list[MODEL_POOLS].set()
    async with asyncio.timeout(10):
        while pools._is_unlisted(MODEL_POOLS, served):
            await asyncio.sleep(0)
    await pools.choose(PoolsFrom(namespace="lab", names=("gpu0",)))
    assert pools.pools == {"gpu0": served["gpu0"]}, "its profiles are not known yet"

    await pools.close()
