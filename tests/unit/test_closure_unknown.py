"""Closure of content of no known format, and how what is missing reads."""

from __future__ import annotations

import msgspec
import pytest
from tests.unit.closure_samples import (
    EXPECTED,
    PLAIN,
    TORN_WHOLE,
    A,
    B,
    directory,
    file,
    has,
    member,
    missing,
    revised,
    vote,
    written,
)

from ckptgate.model.closure import (
    ExpectedSet,
    Missing,
    all_ranks_committed,
    closure,
    explicit_ranks,
    names_pattern,
)
from ckptgate.model.documents import Evidence, Vote
from ckptgate.model.entries import SealEvent


def test_explicit_commits_of_all_ranks_close_unknown_content() -> None:
    votes = [
        vote(A, file("a", PLAIN), committed_ranks=(0,), world_size=2),
        vote(B, file("b", PLAIN), committed_ranks=(1,)),
    ]
    assert missing(SealEvent.EXPLICIT, votes) == []


def test_a_commit_for_all_closes_unknown_content() -> None:
    assert missing(SealEvent.EXPLICIT, [vote(A, file("a", PLAIN), committed_all=True)]) == []


def test_every_rank_that_did_not_commit_is_named() -> None:
    found = missing(SealEvent.EXPLICIT, [vote(A, file("a"), committed_ranks=(1,), world_size=3)])
    assert found == [
        "the commit of rank 0 of 3 (owed by rank 0)",
        "the commit of rank 2 of 3 (owed by rank 2)",
    ]


def test_a_rank_s_commit_without_a_world_size_is_not_all_ranks() -> None:
    found = missing(SealEvent.EXPLICIT, [vote(A, file("a"), committed_ranks=(0,))])
    assert has(found, "world size is not known", A)


def test_quiescence_closes_unknown_content_that_proves_itself_and_looks_like_the_last() -> None:
    votes = [vote(A, file("model-20.pt"), directory("d"), file("d/rng_0.pt"))]
    previous = ["model-10.pt", "d/rng_0.pt"]
    assert missing(SealEvent.QUIESCENCE, votes, previous=previous) == []
    assert missing(SealEvent.QUIESCENCE, votes, previous=[*previous, "d"]) == []


def test_quiescence_does_not_close_the_first_checkpoint_of_a_run() -> None:
    found = missing(SealEvent.QUIESCENCE, [vote(A, file("a"))])
    assert has(found, "a committed checkpoint of this run", A)


@pytest.mark.parametrize(
    ("evidence", "size"), [(PLAIN, 10), (PLAIN, 0), (TORN_WHOLE, 10)], ids=["plain", "0", "torn"]
)
def test_quiescence_takes_only_files_that_prove_themselves(evidence: Evidence, size: int) -> None:
    votes = [vote(A, file("a", evidence, size=size), file("b"))]
    found = missing(SealEvent.QUIESCENCE, votes, previous=["a", "b"])
    assert len(found) == 1
    assert has(found, "'a'", A)


@pytest.mark.parametrize(
    ("previous", "words"),
    [
        (["a-1.pt", "b-1.pt"], "names like 'b-#.pt': 0 of 1"),
        (["a-1.pt", "a-2.pt"], "names like 'a-#.pt': 1 of 2"),
        (["b-1.pt"], "instead of 'a-#.pt'"),
        ([], "instead of 'a-#.pt'"),
    ],
)
def test_quiescence_does_not_close_names_unlike_the_last(previous: list[str], words: str) -> None:
    found = missing(SealEvent.QUIESCENCE, [vote(A, file("a-9.pt"))], previous=previous)
    assert has(found, words)


def test_more_files_of_the_same_names_than_last_time_are_no_matter() -> None:
    votes = [vote(A, file("a-1.pt"), file("a-2.pt"))]
    assert missing(SealEvent.QUIESCENCE, votes, previous=["a-1.pt"]) == []


@pytest.mark.parametrize("event", [SealEvent.RENAME, SealEvent.FORMAT])
def test_a_trusted_event_needs_neither_proof_nor_an_earlier_checkpoint(event: SealEvent) -> None:
    assert missing(event, [vote(A, file("a", PLAIN))]) == []


def test_known_content_is_not_compared_with_the_last_checkpoint() -> None:
    votes = [vote(A, file("a", PLAIN))]
    expected = ExpectedSet("x", {"a": 1})
    assert missing(SealEvent.QUIESCENCE, votes, expected=expected, previous=["b"]) == []


def test_explicit_commits_are_gathered_from_all_votes() -> None:
    votes = {
        A: vote(A, committed_ranks=(0, 2), world_size=4),
        B: vote(B, committed_ranks=(1,)),
    }
    assert explicit_ranks(votes) == (frozenset({0, 1, 2}), 4, False)
    assert not all_ranks_committed(votes)
    votes[B] = vote(B, committed_ranks=(1, 3))
    assert all_ranks_committed(votes)
    assert explicit_ranks({}) == (frozenset(), None, False)
    assert not all_ranks_committed({})
    assert explicit_ranks({A: vote(A, committed_all=True)})[2]


def test_of_two_world_sizes_the_larger_counts() -> None:
    votes = {A: vote(A, committed_ranks=(0,), world_size=1), B: vote(B, world_size=2)}
    assert explicit_ranks(votes)[1] == 2
    assert not all_ranks_committed(votes)


def test_numbers_are_no_part_of_a_name_s_pattern() -> None:
    assert names_pattern(["s10/r1.pt", "s10/r22.pt", "x"]) == {"s#/r#.pt", "x"}
    assert names_pattern([]) == frozenset()


def test_missing_reads_as_a_sentence() -> None:
    assert str(Missing("a file", "rank 1")) == "a file (owed by rank 1)"
    assert str(Missing("a file")) == "a file"


def test_what_a_vote_will_bring_is_not_called_missing() -> None:
    """While its files wait for the store, the member's own lines say so; these would mislead."""
    mine = vote(A, is_final=False, committed_all=True)
    by_member = {A: mine}
    final = f"the final vote of {A} (owed by {A} on alpha)"
    expected = ExpectedSet("dcp", {"a": 5, "b": 5}, every_rank=True, world_size=2)
    for event, known in ((SealEvent.EXPLICIT, None), (SealEvent.FORMAT, expected)):
        found = closure(
            event=event,
            members={A: member(A)},
            votes=by_member,
            expected=known,
            previous_paths=None,
            waiting={"a": 0, "b": 1},
        )
        assert [str(one) for one in found] == [final]
    assert has(missing(SealEvent.EXPLICIT, [mine]), "a file: the checkpoint has none")


def test_a_format_that_wrote_a_revision_wrote_all_of_its_set_anew() -> None:
    """I8: the base's file is in the place of one that came late, or went into another attempt."""
    base = [file("__0_0.distcp"), file("__1_0.distcp", size=1)]
    half = revised(A, written("__0_0.distcp", "a longer text"), base[1])
    both = revised(B, base[0], written("__1_0.distcp", "2"))

    def found(event: SealEvent, *votes: Vote) -> list[str]:
        members = {one.member: member(one.member) for one in votes}
        lines = closure(
            event=event,
            members=members,
            votes={one.member: one for one in votes},
            expected=EXPECTED,
            previous_paths=None,
            base=base,
        )
        return [str(line) for line in lines]

    assert has(found(SealEvent.FORMAT, half), "'__1_0.distcp' written anew, as the rest was")
    assert found(SealEvent.FORMAT, half, both) == []
    assert found(SealEvent.QUIESCENCE, half) == []
    assert found(SealEvent.FORMAT, msgspec.structs.replace(half, committed_all=True)) == []
