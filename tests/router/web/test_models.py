"""The model list: all names a key may use, with the status of their members."""

from __future__ import annotations

from openai.types import Model

from modelpool_router.core.catalog import Catalog, Entry, Route
from modelpool_router.core.spec import MemberName
from modelpool_router.core.view import MemberStatus
from modelpool_router.web.models import model_item, model_list
from poolviews import ALPHA, BETA, GPU0, member_view, pool_view

CATALOG = Catalog(
    [
        Entry(Route(ALPHA, GPU0), ("gpt-4o-mini", "org/small:Q4")),
        Entry(Route(BETA, GPU0)),
        Entry(Route(MemberName("embedder"), None), ("text-embedding-3-small",)),
    ]
)
VIEWS = [
    pool_view(
        member_view(ALPHA, status=MemberStatus.LOADED, in_flight=2),
        member_view(BETA, status=MemberStatus.FAILED, held=3, last_error="exited: secret path"),
    )
]


def test_given_members_aliases_and_upstreams_when_listed_then_each_name_is_an_item() -> None:
    answer = model_list(VIEWS, CATALOG.visible(), created=1_700_000_000)

    assert answer["object"] == "list"
    assert [(item["id"], item["status"]) for item in answer["data"]] == [
        ("alpha", "loaded"),
        ("gpt-4o-mini", "loaded"),
        ("org/small:Q4", "loaded"),
        ("beta", "failed"),
        ("embedder", "loaded"),
        ("text-embedding-3-small", "loaded"),
    ]
    assert answer["data"][1] == {
        "id": "gpt-4o-mini",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "modelpool",
        "status": "loaded",
        "modelpool": {
            "pool": "gpu0",
            "member": "alpha",
            "status": "loaded",
            "held": 0,
            "in_flight": 2,
        },
    }
    assert "secret" not in str(answer)


def test_given_a_key_with_a_list_when_it_lists_then_it_sees_only_its_models() -> None:
    answer = model_list(VIEWS, CATALOG.visible(frozenset({"beta"})), created=1)

    assert [item["id"] for item in answer["data"]] == ["beta"]


def test_given_a_name_with_a_slash_when_it_is_looked_up_then_its_own_item_comes() -> None:
    name = "org/small:Q4"

    item = model_item(VIEWS, CATALOG.describe(name), name, created=7)

    assert (item["id"], item["modelpool"]["member"]) == (name, "alpha")
    assert Model.model_validate(item).id == name


def test_given_an_upstream_when_listed_then_it_has_no_pool() -> None:
    item = model_item(VIEWS, CATALOG.describe("embedder"), "embedder", created=7)

    assert item["modelpool"]["pool"] is None


def test_given_a_pool_that_does_not_know_the_member_yet_when_listed_then_it_is_unloaded() -> None:
    item = model_item([], CATALOG.describe("beta"), "beta", created=7)

    assert item["status"] == "unloaded"
