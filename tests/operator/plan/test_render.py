"""Patches that bring a child to what was rendered: complete, and no wider than that."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from memcluster import merged
from modelpool_kube.kinds import CONFIGMAPS, DEPLOYMENTS, MODEL_ROUTERS
from modelpool_operator.plan import render
from modelpool_operator.plan.model import Create, Owner, Patch

OWNER = Owner(MODEL_ROUTERS, "front", "lab", "uid-1")

leaves = st.one_of(st.integers(0, 3), st.text("ab", max_size=2), st.booleans())
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), inner, max_size=3),
    ),
    max_leaves=8,
)
maps = st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), trees, max_size=4)


@given(maps, maps)
def test_given_any_two_then_the_patch_makes_the_one_into_the_other(old: Any, new: Any) -> None:
    assert merged(old, render.replacing(old, new)) == new


def test_given_notes_in_a_template_then_they_stay() -> None:
    old = {"annotations": {"x": "1"}, "labels": {"l": "1"}}

    patch = render.replacing(old, {"labels": {}})

    assert merged(old, patch) == {"annotations": {"x": "1"}, "labels": {}}


@given(maps)
def test_given_the_same_content_then_the_digest_is_the_same(content: Any) -> None:
    first = render.child(CONFIGMAPS, OWNER, "router", {"data": content})
    turned = dict(reversed(list(content.items())))
    second = render.child(CONFIGMAPS, OWNER, "router", {"data": turned})

    assert first["metadata"]["annotations"] == second["metadata"]["annotations"]
    assert render.settle(CONFIGMAPS, second, first) is None


def test_given_another_content_then_one_conditional_patch_is_made() -> None:
    first = render.child(CONFIGMAPS, OWNER, "router", {"data": {"a": "1", "b": "1"}})
    first["metadata"]["resourceVersion"] = "7"
    second = render.child(CONFIGMAPS, OWNER, "router", {"data": {"a": "2"}})

    action = render.settle(CONFIGMAPS, second, first)

    assert isinstance(action, Patch)
    assert action.version == "7"
    assert action.patch["data"] == {"a": "2", "b": None}
    assert "ownerReferences" not in action.patch["metadata"]


def test_given_nothing_is_there_then_it_is_created() -> None:
    wanted = render.child(CONFIGMAPS, OWNER, "router", {"data": {}})

    assert render.settle(CONFIGMAPS, wanted, None) == Create(CONFIGMAPS, "lab", wanted)


def test_given_a_spec_then_what_was_not_rendered_is_left_alone() -> None:
    wanted = render.child(
        DEPLOYMENTS, OWNER, "router", {"spec": {"strategy": {"type": "Recreate"}}}
    )
    live = {
        "metadata": {"name": "front", "namespace": "lab", "resourceVersion": "3"},
        "spec": {
            "replicas": 1,
            "progressDeadlineSeconds": 600,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1}},
        },
    }

    patch = render.changes(wanted, live)

    assert patch["spec"] == {"strategy": {"type": "Recreate", "rollingUpdate": None}}


def test_given_an_owner_then_others_are_told_apart() -> None:
    mine = render.child(CONFIGMAPS, OWNER, "router", {"data": {}})
    other = render.child(
        CONFIGMAPS, Owner(MODEL_ROUTERS, "front", "lab", "uid-2"), "router", {"data": {}}
    )

    assert not render.is_foreign(None, OWNER)
    assert not render.is_foreign(mine, OWNER)
    assert render.is_foreign(other, OWNER)
    assert render.is_foreign({"metadata": {}}, OWNER)
