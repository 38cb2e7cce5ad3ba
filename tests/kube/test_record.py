"""The slot record: read strictly, written the same, never backwards."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool_kube.record import (
    Frozen,
    Phase,
    SlotId,
    SlotMark,
    SlotRecord,
    decode,
    encode,
    follow,
    next_epoch,
    read_mark,
)

NAMES = st.one_of(st.none(), st.text(min_size=1, max_size=20))
JSON_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
RECORDS = st.builds(
    SlotRecord,
    epoch=st.integers(0, 2**53),
    owner=NAMES,
    target=NAMES,
    phase=st.sampled_from(Phase),
    since=st.text(max_size=25),
    reason=st.text(max_size=25),
    released=st.booleans(),
    held=st.integers(0, 10_000),
    forgotten=st.lists(st.text(max_size=8), max_size=3).map(tuple),
    extra=st.dictionaries(st.text(max_size=6).map(lambda key: f"x-{key}"), JSON_VALUES, max_size=3),
)
SLOT = SlotId("lab", "modelpool-gpu0")


@given(RECORDS)
def test_a_record_reads_back_with_the_fields_of_others(record: SlotRecord) -> None:
    assert decode(encode(record)) == record


def test_no_annotation_is_no_record() -> None:
    assert decode(None) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '"x"',
        "{}",
        '{"epoch":-1}',
        '{"epoch":"1"}',
        '{"epoch":true}',
        '{"epoch":1.5}',
        '{"epoch":1,"format":2}',
        '{"epoch":1,"format":"a"}',
        '{"epoch":1,"phase":"flying"}',
        '{"epoch":1,"phase":["cold"]}',
        '{"epoch":1,"owner":5}',
        '{"epoch":1,"held":"many"}',
        '{"epoch":1,"released":1}',
        '{"epoch":1,"forgotten":[1]}',
        '{"epoch":1,"owner":"a"',
    ],
)
def test_what_cannot_be_read_freezes_the_pool_and_says_the_way_out(text: str) -> None:
    with pytest.raises(Frozen, match="remove the annotation"):
        decode(text)


@given(st.text(max_size=60) | JSON_VALUES.map(json.dumps))
def test_any_text_is_read_or_freezes(text: str) -> None:
    try:
        record = decode(text)
    except Frozen:
        return
    assert record is not None
    assert decode(encode(record)) == record


def test_epochs_never_go_down() -> None:
    before = SlotRecord(epoch=7, extra={"theirs": [1]})

    with pytest.raises(Frozen, match="epoch 6 must not be written over epoch 7"):
        follow(before, SlotRecord(epoch=6))
    assert follow(before, SlotRecord(epoch=7, owner="a")).extra == {"theirs": [1]}
    assert follow(before, SlotRecord(epoch=8)).epoch == 8
    assert follow(None, SlotRecord(epoch=1)).epoch == 1


def test_the_mark_of_a_member_names_slot_and_epoch() -> None:
    assert SLOT.value(12) == "lab/modelpool-gpu0:12"
    assert read_mark(SLOT.value(12)) == SlotMark(SLOT, 12)


@pytest.mark.parametrize(
    "text", [None, "", "lab/modelpool-gpu0", "lab/x:-1", "x:1", "a/b:1\n", "a/b:1x"]
)
def test_a_mark_that_means_nothing_is_no_mark(text: str | None) -> None:
    assert read_mark(text) is None


def test_the_next_epoch_is_above_record_and_members_of_this_slot() -> None:
    marks = [read_mark(SLOT.value(9)), None, read_mark("lab/modelpool-other:99")]

    assert next_epoch(SlotRecord(epoch=4), marks, SLOT) == 10
    assert next_epoch(SlotRecord(epoch=20), marks, SLOT) == 21
    assert next_epoch(None, [], SLOT) == 1
