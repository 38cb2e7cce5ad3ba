"""What a reload changes, and what it cannot change."""

from __future__ import annotations

from typing import Any

from modelpool_router.settings import Changes, PoolChange, compare, from_mapping, kept, moved, parse


def member(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "command": ["serve", "{port}"], **more}


def tree(*members: dict[str, Any], **top: Any) -> dict[str, Any]:
    return {"pools": [{"name": "gpu0", "members": list(members)}], **top}


NOTHING = Changes((), (), (), (), (), (), (), ())


def changes(old: dict[str, Any], new: dict[str, Any]) -> Changes:
    return compare(from_mapping(old), from_mapping(new))


def test_the_same_file_changes_nothing() -> None:
    result = changes(tree(member("a")), tree(member("a", expectedLoad="60s")))

    assert result == NOTHING
    assert result.is_empty


def test_members_that_come_go_and_change_are_told_from_those_that_stay() -> None:
    old = tree(member("stays"), member("goes"), member("changes"))
    new = tree(member("stays"), member("changes", env={"A": "1"}), member("comes"))

    result = changes(old, new)

    assert result.pools_changed == (
        PoolChange("gpu0", (), ("comes",), ("goes",), ("changes",), reordered=False),
    )
    assert not result.is_empty


def test_order_of_members_is_a_change() -> None:
    result = changes(tree(member("a"), member("b")), tree(member("b"), member("a")))

    assert result.pools_changed == (PoolChange("gpu0", (), (), (), (), reordered=True),)


def test_rules_of_a_pool() -> None:
    new = tree(member("a"))
    new["pools"][0] |= {"default": "a", "maxTurn": "1s"}

    result = changes(tree(member("a")), new)

    assert result.pools_changed == (
        PoolChange("gpu0", ("default", "max_turn_s"), (), (), (), reordered=False),
    )


def test_pools_and_upstreams() -> None:
    far, near = {"name": "far", "url": "http://far"}, {"name": "near", "url": "http://near"}
    old = tree(member("a"), upstreams=[far, near])
    new = {
        "pools": [{"name": "gpu1", "members": [member("a")]}],
        "upstreams": [near | {"models": ["n"]}, {"name": "new", "url": "http://new"}],
    }

    result = changes(old, new)

    assert (result.pools_added, result.pools_removed) == (("gpu1",), ("gpu0",))
    assert result.upstreams_added == ("new",)
    assert result.upstreams_removed == ("far",)
    assert result.upstreams_changed == ("near",)


def test_settings_that_can_change_now() -> None:
    result = changes(tree(member("a")), tree(member("a"), maxHeld=3, logLevel="debug"))

    assert result.settings == ("max_held", "log_level")
    assert result.refused == ()


def test_settings_that_need_a_restart_are_refused_with_place_and_way_out() -> None:
    text = (
        "pools:\n  - name: gpu0\n    members:\n"
        "      - {name: a, command: [serve, '{port}']}\n"
        "stateDir: /old\n"
    )

    result = compare(
        parse(text),
        parse(text.replace("/old", "/new") + "listen: 127.0.0.1:1\n", file="pool.yaml"),
    )

    assert [(p.file, p.line, p.field, p.reason, p.way_out) for p in result.refused] == [
        (
            "pool.yaml",
            6,
            "listen",
            "cannot change while the router runs: open connections belong to the old address",
            "restart the router, or put the old value back",
        ),
        (
            "pool.yaml",
            5,
            "stateDir",
            "cannot change while the router runs: locks and member logs are in the old folder",
            "restart the router, or put the old value back",
        ),
    ]
    assert result.settings == ()


def test_of_model_pools_only_their_namespace_needs_a_restart() -> None:
    lab = {"poolsFrom": {"namespace": "lab", "names": ["gpu0"]}}
    more = {"poolsFrom": {"namespace": "lab"}}
    other = {"poolsFrom": {"namespace": "other"}}

    for old, new in ((lab, more), (tree(member("a")), lab), (lab, tree(member("a")))):
        found = changes(old, new)
        assert "pools_from" in found.settings
        assert found.refused == ()
        assert kept(from_mapping(old), from_mapping(new)) == {}
    refused = changes(lab, other)
    assert [problem.field for problem in refused.refused] == ["poolsFrom"]
    assert kept(from_mapping(lab), from_mapping(other)) == {
        "pools_from": from_mapping(lab).pools_from
    }


def test_members_stay_on_their_side_of_kubernetes() -> None:
    """A pool of the same name cannot follow its members there while the router runs."""
    here = tree(member("a"))
    place = {"deployment": {"namespace": "lab", "name": "a"}}
    there = tree({"name": "a", **place}, leaseNamespace="lab")

    elsewhere = {**there, "pools": [{**there["pools"][0], "name": "gpu1"}]}

    (problem,) = moved(from_mapping(here), from_mapping(there))

    assert "the members of gpu0 cannot move" in problem.reason
    assert problem.field == "pools[0]"
    assert "another name" in problem.way_out
    assert moved(from_mapping(there), from_mapping(there)) == []
    assert moved(from_mapping(here), from_mapping(elsewhere)) == []
