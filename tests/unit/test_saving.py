"""Records of how a checkpoint is saved: what one may be, and what several come to."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptgate.errors import IntegrityError, UsageError
from ckptgate.model.documents import Manifest, Vote, decode, encode
from ckptgate.model.entries import SealEvent
from ckptgate.model.saving import (
    DEPTH_MAX,
    RECORD_BYTES_MAX,
    SavedBy,
    SavedConflict,
    SavedValue,
    Saving,
    canonical,
    check_record,
    merge_savings,
    parse_record,
)

HOSTILE = {
    "no object": b"[1]",
    "not JSON": b'{"a":',
    "a NaN": b'{"a":NaN}',
    "an infinite number": b'{"a":1e999}',
    "a huge number": b'{"a":' + b"9" * 400 + b"}",
    "bytes": b'{"a":"\xff"}',
    "half a character": b'{"a":"\\ud800"}',
    "a rank that is true": b'{"rank":true}',
    "a rank below all": b'{"rank":-2}',
    "a rank of text": b'{"rank":"0"}',
    "too deep": b'{"a":' * (DEPTH_MAX + 1) + b"1" + b"}" * (DEPTH_MAX + 1),
    "deeper than any stack": b"[" * 30_000,
    "an empty key": b'{"":1}',
    "a long key": b'{"' + b"k" * 256 + b'":1}',
    "too large": b'{"a":"' + b"x" * RECORD_BYTES_MAX + b'"}',
    "nothing": b"",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_records_are_refused(what: str):
    """I13"""
    with pytest.raises(UsageError, match="the record of how a checkpoint is saved"):
        parse_record(HOSTILE[what])


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), 2**63, 10**400, b"x", {1}, {1: 2}, "\ud800", object()]
)
def test_what_json_cannot_hold_is_no_record(value: object):
    """The codec would write a NaN as null."""
    with pytest.raises(UsageError):
        check_record({"a": [value]})


def test_texts_and_numbers_of_other_kinds_are_recorded_as_what_they_are():
    """As torch's version, an enumeration, or a number of numpy's."""

    class Version(str):
        __slots__ = ()

    class Ratio(float):
        __slots__ = ()

    found = check_record({"v": Version("2.13"), "e": SealEvent.FORMAT, "r": Ratio(0.5), "t": (1,)})
    assert canonical(found) == b'{"e":"format","r":0.5,"t":[1],"v":"2.13"}'


def test_the_rank_says_whose_a_record_is_and_is_no_part_of_it():
    assert parse_record(b'{"step":5,"rank":3}') == (3, {"step": 5})
    assert parse_record(b'{"step":5}') == (-1, {"step": 5})


def test_fields_that_all_agree_on_are_one_record_and_others_keep_all_values():
    merged = merge_savings([
        Saving(ranks=(0,), record={"step": 5, "versions": {"torch": "2.13", "numpy": "2.0"}}),
        Saving(ranks=(1, 2), record={"versions": {"torch": "2.12"}, "layout": {"dp": 4}}),
        Saving(ranks=(3,), record={"layout": "none", "versions": {"torch": "2.13"}}),
    ])  # fmt: skip
    assert merged == SavedBy(
        record={"step": 5, "versions": {"numpy": "2.0"}},
        conflicts=(
            SavedConflict(
                field=("layout",),
                values=(
                    SavedValue(value="none", ranks=(3,)),
                    SavedValue(value={"dp": 4}, ranks=(1, 2)),
                ),
            ),
            SavedConflict(
                field=("versions", "torch"),
                values=(
                    SavedValue(value="2.12", ranks=(1, 2)),
                    SavedValue(value="2.13", ranks=(0, 3)),
                ),
            ),
        ),
    )


def test_numbers_of_other_kinds_are_other_values():
    merged = merge_savings([
        Saving(ranks=(0,), record={"a": 1}),
        Saving(ranks=(1,), record={"a": 1.0}),
        Saving(ranks=(2,), record={"a": True}),
    ])  # fmt: skip
    assert merged is not None
    assert [value.ranks for value in merged.conflicts[0].values] == [(0,), (1,), (2,)]


def test_nothing_recorded_is_nothing_merged():
    assert merge_savings([]) is None
    assert merge_savings([Saving(ranks=(0,), record={})]) is None


RECORDS: st.SearchStrategy[object] = st.recursive(
    st.sampled_from([None, True, 1, 1.0, "x", []]),
    lambda inner: st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)
OBJECTS = st.dictionaries(st.sampled_from("ab"), RECORDS, max_size=2)


def _leaves(value: object, place: tuple[str, ...] = ()) -> set[tuple[tuple[str, ...], bytes]]:
    if isinstance(value, dict) and value:
        return set().union(*(_leaves(item, (*place, key)) for key, item in value.items()))
    return {(place, canonical(value))}


@given(st.lists(OBJECTS, min_size=1, max_size=3))
def test_the_result_depends_on_no_order_and_loses_nothing(records: list[dict[str, object]]):
    savings = [Saving(ranks=(rank,), record=record) for rank, record in enumerate(records)]
    results = {
        b"null" if merged is None else encode(merged)
        for order in itertools.permutations(savings)
        for merged in [merge_savings(order)]
    }
    assert len(results) == 1
    merged = merge_savings(savings) or SavedBy()
    kept = _leaves(merged.record)
    for conflict in merged.conflicts:
        assert len(conflict.values) > 1
        for value in conflict.values:
            kept |= _leaves(value.value, conflict.field)
    for record in records:
        for place, text in _leaves(record):
            # An empty object says nothing beside one that holds something.
            assert (place, text) in kept or text == b"{}"


def vote(**more: object) -> Vote:
    return Vote(attempt="step-1.0", member="a-00000001", n=0, is_final=True, **more)  # type: ignore[arg-type]


def test_documents_without_a_record_are_as_they_were():
    """Format v1: a reader of before reads them, and one of now reads those of before."""
    assert b"saved_by" not in encode(vote())
    assert decode(encode(vote()), Vote, subject="v").saved_by is msgspec.UNSET


def test_documents_with_a_record_come_back_as_they_were():
    said = vote(saved_by=(Saving(ranks=(0, 1), record={"step": 1, "x": [1.5, None]}),))
    assert decode(encode(said), Vote, subject="v") == said
    manifest = Manifest(
        run="r", name="step-1", attempt="step-1.0", generation=1, event="explicit",
        created_at="now", members=("a-00000001",), entries=(),
        saved_by=SavedBy(record={"step": 1}),
    )  # fmt: skip
    assert decode(encode(manifest), Manifest, subject="m") == manifest


def test_a_stored_vote_with_a_hostile_record_is_refused_by_its_name():
    """I13"""
    text = encode(vote(saved_by=(Saving(ranks=(0,), record={"step": 1}),)))
    for record in (b'{"a":"' + b"x" * RECORD_BYTES_MAX + b'"}', HOSTILE["too deep"], b"[]", b"1"):
        with pytest.raises(IntegrityError, match="votes/x"):
            decode(text.replace(b'{"step":1}', record), Vote, subject="votes/x")
