"""T67: what a test makes in a shared cluster it finds again, or leaves alone."""

from __future__ import annotations

import itertools

import pytest

from mdep_lab import role
from memcluster import MemCluster
from modelpool_kube.errors import Unanswered
from modelpool_kube.kinds import MODEL_DEPLOYMENTS, Json, uid
from owned_objects import TOKEN_LABEL, NotOurs, OwnedObjects

NS = "team-a"
BODY: Json = {"metadata": {"name": "chat"}, "spec": {"roles": [role()]}}


def owned(cluster: MemCluster) -> tuple[OwnedObjects, itertools.count[int]]:
    """Return an owner with tokens that can be foretold."""
    tokens = itertools.count(1)
    return OwnedObjects(cluster.port("test"), lambda: f"token-{next(tokens)}"), tokens


async def test_t67_a_lost_answer_is_recovered_by_name_and_token() -> None:
    cluster = MemCluster()
    port = cluster.port("test")
    mine = OwnedObjects(port, lambda: "token-1")
    port.lose(applied=True, verb="create")

    found = await mine.create(MODEL_DEPLOYMENTS, NS, BODY)

    assert found == uid(cluster.must(MODEL_DEPLOYMENTS, NS, "chat"))
    await mine.remove_all()
    assert cluster.all(MODEL_DEPLOYMENTS) == []
    assert port.requests[-1].body == {"uid": found, "version": None}


async def test_t67_what_lands_after_the_answer_was_given_up_is_found_at_the_end() -> None:
    cluster = MemCluster()
    port = cluster.port("test")
    mine = OwnedObjects(port, lambda: "token-1")
    port.delay(verb="create")
    with pytest.raises(Unanswered, match="may still come"):
        await mine.create(MODEL_DEPLOYMENTS, NS, BODY)
    port.land()

    await mine.remove_all()

    assert cluster.all(MODEL_DEPLOYMENTS) == []


@pytest.mark.parametrize("labels", [{}, {TOKEN_LABEL: "other"}])
async def test_t67_an_object_without_the_token_is_refused(labels: dict[str, str]) -> None:
    cluster = MemCluster()
    port = cluster.port("test")
    mine = OwnedObjects(port, lambda: "token-1")
    port.delay(verb="create")
    with pytest.raises(Unanswered):
        await mine.create(MODEL_DEPLOYMENTS, NS, BODY)
    foreign = {**BODY, "metadata": {"name": "chat", "labels": labels}}
    kept = uid(cluster.put(MODEL_DEPLOYMENTS, NS, foreign))

    with pytest.raises(NotOurs, match="does not carry our token"):
        await mine.remove_all()

    assert uid(cluster.must(MODEL_DEPLOYMENTS, NS, "chat")) == kept


async def test_t67_another_one_made_since_is_not_deleted_by_name() -> None:
    cluster = MemCluster()
    mine, _ = owned(cluster)
    await mine.create(MODEL_DEPLOYMENTS, NS, BODY)
    cluster.vanish(MODEL_DEPLOYMENTS, NS, "chat")
    kept = uid(cluster.put(MODEL_DEPLOYMENTS, NS, BODY))

    with pytest.raises(Exception, match="precondition"):
        await mine.remove_all()

    assert uid(cluster.must(MODEL_DEPLOYMENTS, NS, "chat")) == kept
