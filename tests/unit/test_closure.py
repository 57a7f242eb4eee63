"""Closure: what each member, file and rank owes a COMMIT."""

from __future__ import annotations

import pytest
from tests.unit.closure_samples import (
    EVENTS,
    EXPECTED,
    PLAIN,
    TORN,
    TORN_WHOLE,
    A,
    B,
    directory,
    file,
    has,
    member,
    missing,
    symlink,
    vote,
)

from ckptgate.model.closure import (
    ExpectedSet,
)
from ckptgate.model.documents import Evidence, FileEntry
from ckptgate.model.entries import SealEvent


def test_a_rename_of_whole_files_is_closed() -> None:
    assert missing(SealEvent.RENAME, [vote(A, file("a")), vote(B, file("b"))]) == []


@pytest.mark.parametrize("event", EVENTS)
def test_a_registered_member_without_a_vote_is_missing_by_name(event: SealEvent) -> None:
    """I1."""
    members = {A: member(A), B: member(B, ranks=(4, 5))}
    votes = [vote(A, file("a"), committed_all=True)]
    found = missing(event, votes, members=members, previous=["a"])
    assert found == [f"the vote of {B} (owed by {B} on beta, ranks 4, 5)"]


@pytest.mark.parametrize("event", EVENTS)
def test_a_vote_that_is_not_final_does_not_count(event: SealEvent) -> None:
    """I1."""
    votes = [vote(A, file("a"), committed_all=True), vote(B, is_final=False)]
    found = missing(event, votes, previous=["a"])
    assert found == [f"the final vote of {B} (owed by {B} on beta)"]


def test_a_vote_of_a_member_that_was_not_listed_must_be_final_too() -> None:
    votes = [vote(A, file("a")), vote(B, file("b"), is_final=False)]
    assert has(missing(SealEvent.RENAME, votes, members={A: member(A)}), "final vote", B)


@pytest.mark.parametrize("event", EVENTS)
def test_a_checkpoint_without_any_file_is_refused(event: SealEvent) -> None:
    votes = [vote(A, directory("d"), symlink("s", "d"), committed_all=True)]
    assert has(missing(event, votes, previous=["s"]), "a file", A)
    assert has(missing(event, [], previous=[]), "a file", "all writers")


def test_a_0_byte_file_is_a_file() -> None:
    assert missing(SealEvent.RENAME, [vote(A, file("a", PLAIN, size=0))]) == []


@pytest.mark.parametrize("event", EVENTS)
def test_a_covered_expected_set_is_closed(event: SealEvent) -> None:
    votes = [vote(A, file("__0_0.distcp"), file("extra")), vote(B, file("__1_0.distcp", size=0))]
    assert missing(event, votes, expected=EXPECTED) == []


@pytest.mark.parametrize("event", EVENTS)
def test_an_expected_file_that_nobody_voted_is_missing(event: SealEvent) -> None:
    """I1."""
    found = missing(event, [vote(A, file("__0_0.distcp"))], expected=EXPECTED)
    assert len(found) == 1
    assert has(found, "'__1_0.distcp'", ".metadata")


def test_an_expected_file_that_is_too_short_is_missing_its_rest() -> None:
    """I1."""
    votes = [vote(A, file("__0_0.distcp", size=9), file("__1_0.distcp"))]
    assert has(missing(SealEvent.FORMAT, votes, expected=EXPECTED), "9 of at least 10 bytes", A)


def test_a_directory_in_the_place_of_an_expected_file_does_not_cover_it() -> None:
    votes = [vote(A, file("__0_0.distcp"), directory("__1_0.distcp"))]
    assert has(missing(SealEvent.FORMAT, votes, expected=EXPECTED), "'__1_0.distcp'")


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("expected", [None, ExpectedSet("x", {"a": 0})], ids=["unknown", "known"])
@pytest.mark.parametrize(
    ("evidence", "words"),
    [
        (Evidence(container="npz", problem="no end"), ("valid 'a'", "npz", "no end", "rank 3")),
        (Evidence(container="npz", is_valid=True, has_hole=True), ("never written", "rank 3")),
        (Evidence(has_hole=True), ("never written", "rank 3")),
    ],
    ids=["broken", "hole-in-a-container", "hole"],
)
def test_damage_is_missing_whatever_the_event(
    event: SealEvent, expected: ExpectedSet | None, evidence: Evidence, words: tuple[str, ...]
) -> None:
    """I1."""
    evidence = Evidence(
        container=evidence.container,
        is_valid=evidence.is_valid,
        has_hole=evidence.has_hole,
        problem=evidence.problem,
        rank=3,
    )
    votes = [vote(A, file("a", evidence), committed_all=True)]
    found = missing(event, votes, expected=expected, previous=["a"])
    assert has(found, *words, A)


def test_a_problem_without_a_container_counts_too() -> None:
    """An fsync that failed says so of a file of any content."""
    (what,) = missing(SealEvent.RENAME, [vote(A, file("a", Evidence(problem="fsync failed")))])
    assert "'a'" in what
    assert "fsync failed" in what


def test_a_container_that_cannot_be_proved_is_no_damage() -> None:
    """A legacy torch file commits by its event or explicitly; only silence needs a proof."""
    legacy = file("a", Evidence(container="torch-legacy"))
    assert missing(SealEvent.RENAME, [vote(A, legacy)]) == []
    assert missing(SealEvent.QUIESCENCE, [vote(A, legacy)])


@pytest.mark.parametrize("event", [SealEvent.RENAME, SealEvent.FORMAT, SealEvent.QUIESCENCE])
def test_a_torn_file_without_a_proof_is_missing(event: SealEvent) -> None:
    found = missing(event, [vote(A, file("a", TORN), committed_all=True)], previous=["a"])
    assert has(found, "died", "'a'")


@pytest.mark.parametrize("event", [SealEvent.RENAME, SealEvent.FORMAT, SealEvent.EXPLICIT])
def test_a_torn_file_counts_where_its_container_proves_it(event: SealEvent) -> None:
    assert missing(event, [vote(A, file("a", TORN_WHOLE), committed_all=True)]) == []


def test_a_file_of_an_unknown_rank_is_owed_by_its_member_not_by_the_ranks_that_joined() -> None:
    members = {A: member(A, ranks=(2,))}
    torn = file("a", Evidence(is_torn=True))
    found = missing(SealEvent.FORMAT, [vote(A, torn)], members=members)
    assert found == [f"the rest of 'a': its writer died with it open (owed by {A} on alpha)"]


def test_a_torn_file_counts_where_all_ranks_committed_explicitly() -> None:
    one = {"committed_ranks": (0,), "world_size": 2}
    both = {"committed_ranks": (0, 1), "world_size": 2}
    expected = ExpectedSet("x", {"a": 0})
    for content in (None, expected):
        votes = [vote(A, file("a", TORN), **both)]
        assert missing(SealEvent.EXPLICIT, votes, expected=content) == []
        votes = [vote(A, file("a", TORN), **one)]
        assert has(missing(SealEvent.EXPLICIT, votes, expected=content), "died", "'a'")


def ranked(path: str, rank: int) -> FileEntry:
    return file(path, Evidence(container="torch-zip", is_valid=True, rank=rank))


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("where", ["expected", "vote", "member"])
def test_every_rank_must_have_written_where_the_format_says_so(
    event: SealEvent, where: str
) -> None:
    expected = ExpectedSet("hf", {}, every_rank=True, world_size=3 if where == "expected" else None)
    size = 3 if where == "vote" else None
    members = {A: member(A, world_size=3 if where == "member" else None)}

    def check(*entries: FileEntry) -> list[str]:
        votes = [vote(A, *entries, world_size=size)]
        return missing(event, votes, members=members, expected=expected)

    assert check(ranked("a", 0), ranked("b", 1), ranked("c", 2)) == []
    found = check(ranked("a", 0), ranked("c", 2))
    assert found == ["files of rank 1 of 3 (owed by rank 1)"]


def test_a_rank_that_committed_need_not_have_written() -> None:
    expected = ExpectedSet("hf", {}, every_rank=True, world_size=2)
    votes = [vote(A, ranked("a", 0), committed_ranks=(1,))]
    assert missing(SealEvent.EXPLICIT, votes, expected=expected) == []
    votes = [vote(A, ranked("a", 0), committed_all=True)]
    assert missing(SealEvent.EXPLICIT, votes, expected=expected) == []


def test_ranks_that_write_nothing_are_no_matter_where_the_format_does_not_say_so() -> None:
    votes = [vote(A, ranked("a", 0), world_size=8)]
    assert missing(SealEvent.FORMAT, votes, expected=ExpectedSet("x", {"a": 0})) == []


def test_the_checkpoint_s_own_world_size_goes_before_the_job_s() -> None:
    expected = ExpectedSet("x", {}, every_rank=True, world_size=1)
    votes = [vote(A, ranked("a", 0), world_size=8)]
    assert missing(SealEvent.FORMAT, votes, expected=expected) == []


def test_an_unknown_world_size_matters_only_where_nothing_but_silence_sealed_it() -> None:
    expected = ExpectedSet("hf", {"a": 0}, every_rank=True)
    votes = [vote(A, file("a"))]
    assert missing(SealEvent.FORMAT, votes, expected=expected) == []
    assert has(missing(SealEvent.QUIESCENCE, votes, expected=expected), "the world size")
