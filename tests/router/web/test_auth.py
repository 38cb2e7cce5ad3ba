"""Keys are read from their text strictly, and found without telling how nearly one was right."""

from __future__ import annotations

import hashlib
import hmac
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy

from modelpool_router.web import auth
from modelpool_router.web.auth import ANYBODY, BadKeys, Caller, KeyRing, Keys
from modelpool_router.web.errors import ApiError

FIXED = settings(max_examples=200, derandomize=True, deadline=None, database=None)

visible = st.text(string.ascii_letters + string.digits + "-_.~+/=", min_size=1, max_size=40)
# any bytes may come in a header, and arrive as surrogates where they are no UTF-8
header_text = st.binary(max_size=60).map(lambda each: each.decode("utf-8", "surrogateescape"))


def headers(*pairs: tuple[str, str]) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(pairs))


def refused(keys: Keys, *pairs: tuple[str, str]) -> ApiError:
    with pytest.raises(ApiError) as raised:
        keys.identify(headers(*pairs))
    assert (raised.value.status, raised.value.code) == (401, "invalid_api_key")
    assert raised.value.headers["WWW-Authenticate"] == "Bearer"
    return raised.value


YAML_TEXT = f"""
# both generations of alice
- {{name: alice, key: old-key, models: [m, n]}}
- name: alice
  sha256: {hashlib.sha256(b"new-key").hexdigest()}
  models: [m]
- {{key: nameless}}
"""


def test_both_generations_of_a_key_are_valid() -> None:
    """Clients can move over one by one; digests need no clear text anywhere."""
    keys = Keys(KeyRing.parse(YAML_TEXT))

    assert keys.required
    assert keys.identify(headers(("Authorization", "Bearer old-key"))) == Caller(
        "alice", frozenset({"m", "n"})
    )
    assert keys.identify(headers(("x-api-key", "new-key"))) == Caller("alice", frozenset({"m"}))
    assert keys.identify(headers(("authorization", "bearer  nameless "))) == Caller("key3", None)


def test_one_key_a_line_is_enough() -> None:
    """A mounted secret with one key is the common case."""
    keys = Keys(KeyRing.parse("# ours\n\nsk-1\nbob: sk-2\n"))

    assert keys.identify(headers(("x-api-key", "sk-1"))) == Caller("key1", None)
    assert keys.identify(headers(("x-api-key", "sk-2"))) == Caller("bob", None)
    assert Keys(KeyRing.parse("[a, b]")).identify(headers(("x-api-key", "b"))).key_id == "key2"
    assert len(KeyRing.parse("keys:\n- a\n")) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        "two words of text\n",
        "[]",
        "- {name: a}",
        "- {key: a, sha256: " + "0" * 64 + "}",
        "- {sha256: abc}",
        "- {key: 'a b'}",
        "- {key: ''}",
        "- {key: 17}",
        "- {key: a, modles: [m]}",
        "- {key: a, models: m}",
        "- {key: a, models: [1]}",
        "- {name: 'a b', key: x}",
        "- [a]",
        "- {key: a",
        "{a: b}",
    ],
)
def test_wrong_key_texts_are_refused_and_not_quoted(text: str) -> None:
    """Never half a list of keys; and an error message is no place for a key."""
    with pytest.raises(BadKeys) as raised:
        KeyRing.parse(text)

    assert not text or text not in str(raised.value)


def test_reload_is_at_once_or_not_at_all() -> None:
    """A bad file leaves the old keys in force."""
    keys = Keys(KeyRing.parse("old\n"))

    with pytest.raises(BadKeys):
        keys.reload("- {name: x}")
    assert keys.identify(headers(("x-api-key", "old"))).key_id == "key1"

    keys.reload("new\n")
    refused(keys, ("x-api-key", "old"))
    assert keys.identify(headers(("x-api-key", "new"))).key_id == "key1"

    keys.reload(None)
    assert keys.identify(headers()) == ANYBODY


@FIXED
@given(st.lists(visible, min_size=1, max_size=5, unique=True), header_text, st.booleans())
def test_only_the_keys_themselves_are_let_in(ring: list[str], shown: str, bearer: bool) -> None:
    """Whatever bytes come in either header: a caller for a key, 401 for everything else."""
    keys = Keys(KeyRing.parse("".join(f"- {{key: '{key}'}}\n" for key in ring)))
    pair = ("Authorization", f"Bearer {shown}") if bearer else ("x-api-key", shown)

    try:
        caller = keys.identify(headers(pair))
    except ApiError as error:
        assert error.code == "invalid_api_key"
        assert shown.strip() not in ring
    else:
        assert caller.key_id == f"key{ring.index(shown.strip() if bearer else shown) + 1}"


@FIXED
@given(st.lists(visible, min_size=1, max_size=5, unique=True), st.data())
def test_every_key_is_compared_every_time(ring: list[str], data: st.DataObject) -> None:
    """No early way out: as many comparisons for a right key as for a wrong one."""
    compared: list[bytes] = []
    keys = KeyRing.parse("".join(f"- {{key: '{key}'}}\n" for key in ring))
    shown = data.draw(st.one_of(st.sampled_from(ring), visible)).encode()
    with pytest.MonkeyPatch.context() as patch:

        def counting(a: bytes, b: bytes) -> bool:
            compared.append(b)
            return hmac.compare_digest(a, b)

        patch.setattr(auth, "hmac", type("hmac", (), {"compare_digest": staticmethod(counting)}))
        keys.find(shown)

    assert len(compared) == len(ring)
    assert {len(each) for each in compared} == {32}


def test_only_two_places_are_looked_at() -> None:
    """Not Basic, not a twin with underscores, not two that differ."""
    keys = Keys(KeyRing.parse("sk-1\nsk-2\n"))

    refused(keys)
    refused(keys, ("Authorization", "sk-1"))
    refused(keys, ("Authorization", "Basic sk-1"))
    refused(keys, ("Authorization", "Bearer sk-1, Bearer sk-1"))
    refused(keys, ("x_api_key", "sk-1"))
    refused(keys, ("Cookie", "x-api-key=sk-1"))
    refused(keys, ("Authorization", "Bearer sk-1"), ("x-api-key", "sk-2"))
    refused(keys, ("Authorization", "Bearer sk-1"), ("Authorization", "Bearer sk-2"))
    both = headers(("Authorization", "Bearer sk-1"), ("x-api-key", "sk-1"))
    assert keys.identify(both).key_id == "key1"
