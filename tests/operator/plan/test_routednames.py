"""Names behind one router: whose they are."""

from __future__ import annotations

from typing import Any

from modelpool_api.v1alpha1.modelpool import ModelPool
from modelpool_api.v1alpha1.modelrouter import ModelRouter
from modelpool_operator.plan.routednames import clashes

ROUTER = ModelRouter.model_validate({"spec": {"pools": [{"name": "gpu0"}, {"name": "gpu1"}]}})


def pool(name: str, **meta: Any) -> ModelPool:
    """Return a pool with the member coder."""
    members = [{"deploymentRef": {"name": "coder"}, "profile": "llama-server"}]
    found = {"metadata": {"name": name, **meta}, "spec": {"members": members}}
    return ModelPool.model_validate(found)


def test_the_later_one_of_two_pools_is_left_out() -> None:
    (told,) = clashes(ROUTER, [pool("gpu1"), pool("gpu0")])

    assert told.startswith("ModelPool gpu1 is left out")


def test_a_pool_that_is_going_has_no_names_any_more() -> None:
    """Its router serves it no longer, and gives its names to the next one."""
    going = pool("gpu0", deletionTimestamp="2026-01-01T00:00:00Z")

    assert clashes(ROUTER, [going, pool("gpu1")]) == ()
