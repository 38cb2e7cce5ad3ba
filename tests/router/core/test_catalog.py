"""Names mean one member or nothing, and refusals list only what a key may use."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelpool_router.core.catalog import (
    Catalog,
    DuplicateName,
    Entry,
    Route,
    UnknownModel,
    printable,
)
from modelpool_router.core.spec import MemberName, PoolName

FIXED = settings(max_examples=300, derandomize=True, deadline=None, database=None)


def member(name: str, *aliases: str) -> Entry:
    return Entry(Route(MemberName(name), PoolName("gpu0")), aliases)


EMBEDDER = Entry(Route(MemberName("embedder"), None), ("text-embedding-3-small",))
CATALOG = Catalog(
    [member("Qwen/Qwen3-8B", "gpt-4o"), member("qwen/qwen3-8b"), member("a:b@c"), EMBEDDER]
)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "qwen/qwen3-8b", "a:b@c", "embedder"])
def test_names_are_matched_exactly(name: str) -> None:
    """Slashes, colons and case are part of a name."""
    assert CATALOG.find(name).member == name


def test_aliases_lead_to_their_member() -> None:
    """Whatever clients are set up with."""
    assert CATALOG.find("gpt-4o").member == "Qwen/Qwen3-8B"
    assert CATALOG.find("text-embedding-3-small").upstream
    assert not CATALOG.find("gpt-4o").upstream


@pytest.mark.parametrize("name", ["", "QWEN/QWEN3-8B", " a:b@c", "a:b@c ", "gpt", "gpt-4o\x00"])
def test_anything_else_is_unknown(name: str) -> None:
    """Never the nearest, never the resident."""
    with pytest.raises(UnknownModel, match="does not exist"):
        CATALOG.find(name)


def test_a_name_belongs_to_one() -> None:
    """Over members and upstreams, names and aliases."""
    with pytest.raises(DuplicateName) as raised:
        Catalog([member("a", "x"), Entry(Route(MemberName("b"), None), ("x",))])

    assert (raised.value.name, raised.value.first, raised.value.second) == ("x", "a", "b")
    with pytest.raises(DuplicateName):
        Catalog([member("a"), member("b", "a")])
    assert Catalog([member("a", "a")]).find("a").member == "a"


def test_a_key_opens_all_names_of_what_it_may_use() -> None:
    """The allow-list may say the member or any of its aliases."""
    for allowed in ("Qwen/Qwen3-8B", "gpt-4o"):
        for name in ("Qwen/Qwen3-8B", "gpt-4o"):
            assert CATALOG.find(name, frozenset({allowed})).member == "Qwen/Qwen3-8B"
    assert [entry.route.member for entry in CATALOG.visible(frozenset({"gpt-4o", "zz"}))] == [
        "Qwen/Qwen3-8B"
    ]
    assert CATALOG.describe("gpt-4o").names == ("Qwen/Qwen3-8B", "gpt-4o")


@FIXED
@given(
    st.dictionaries(st.sampled_from("abcdef"), st.sets(st.sampled_from("uvwxyz"), max_size=2)),
    st.sets(st.sampled_from("abcdefuvwxyz")),
    st.sampled_from("abcdefuvwxyzq"),
)
def test_forbidden_and_unknown_cannot_be_told_apart(
    members: dict[str, set[str]], allowed: set[str], asked: str
) -> None:
    """The refusal of a name is what it would be if nothing but the allowed existed."""
    taken: set[str] = set()
    entries = []
    for name, aliases in members.items():
        entries.append(member(name, *sorted(aliases - taken)))
        taken |= aliases
    key = frozenset(allowed)
    catalog = Catalog(entries)
    bare = Catalog(catalog.visible(key))

    answers = []
    for each in (catalog, bare):
        try:
            answers.append(f"to {each.find(asked, key).member}")
        except UnknownModel as error:
            answers.append(error.message)

    assert answers[0] == answers[1]


def test_the_only_route_serves_requests_without_a_name() -> None:
    """Of those that the key may use; several or none are no answer."""
    assert CATALOG.only() is None
    assert CATALOG.only(frozenset({"embedder"})) == EMBEDDER.route
    assert CATALOG.only(frozenset({"zz"})) is None
    assert Catalog([]).only() is None


def test_refusals_are_bounded() -> None:
    """Neither a long name nor a long list makes a long message."""
    catalog = Catalog([member(f"model-{n}") for n in range(500)])
    with pytest.raises(UnknownModel) as raised:
        catalog.find("z" * 10_000)

    assert len(raised.value.message) < 2500
    assert "model-99 and 400 more." in raised.value.message
    with pytest.raises(UnknownModel, match="may not use any model"):
        catalog.find("model-1", frozenset())


@FIXED
@given(st.text(max_size=300))
def test_shown_names_are_plain_text(name: str) -> None:
    """Nothing that ends a line, a header or a quotation, or turns the text around."""
    shown = printable(name)

    assert shown.isprintable()
    assert not set("`\"'") & set(shown)
    assert shown.encode("utf-8") or not name
    assert len(shown) <= 200 * 10 + 3
