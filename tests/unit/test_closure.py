"""Closure: each condition of a COMMIT, met and not met."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptgate.model.closure import (
    ExpectedSet,
    Missing,
    all_ranks_committed,
    closure,
    explicit_ranks,
    merge_votes,
    names_pattern,
)
from ckptgate.model.documents import EntryType, Evidence, FileEntry, Member, Vote
from ckptgate.model.entries import SealEvent

A = "alpha-00000001"
B = "beta-00000002"
WHOLE = Evidence(container="torch-zip", is_valid=True)
PLAIN = Evidence()


def digest(text: str) -> str:
    return text.encode().hex().ljust(64, "0")[:64]


def file(path: str, evidence: Evidence = WHOLE, *, size: int = 10, content: str = "") -> FileEntry:
    return FileEntry(
        path=path,
        type=EntryType.FILE,
        mode=0o644,
        mtime_ns=1,
        size=size,
        digest=digest(content or path),
        key=f"data/{path}",
        evidence=evidence,
    )


def directory(path: str, **changes: Any) -> FileEntry:
    fields: dict[str, Any] = {"path": path, "type": EntryType.DIR, "mode": 0o755, "mtime_ns": 1}
    return FileEntry(**{**fields, **changes})


def symlink(path: str, target: str) -> FileEntry:
    return FileEntry(path=path, type=EntryType.SYMLINK, mode=0o777, mtime_ns=1, target=target)


def vote(member: str, *entries: FileEntry, **changes: Any) -> Vote:
    fields: dict[str, Any] = {
        "attempt": "step-1.0",
        "member": member,
        "n": 0,
        "is_final": True,
        "entries": entries,
    }
    return Vote(**{**fields, **changes})


def member(member: str, **changes: Any) -> Member:
    fields: dict[str, Any] = {
        "attempt": "step-1.0",
        "member": member,
        "host": member.partition("-")[0],
        "joined_at": "t",
    }
    return Member(**{**fields, **changes})


def missing(
    event: SealEvent,
    votes: Iterable[Vote],
    *,
    members: Mapping[str, Member] | None = None,
    expected: ExpectedSet | None = None,
    previous: Iterable[str] | None = None,
) -> list[str]:
    """What closure misses, as texts."""
    by_member = {one.member: one for one in votes}
    registered = {name: member(name) for name in by_member} if members is None else members
    found = closure(
        event=event,
        members=registered,
        votes=by_member,
        expected=expected,
        previous_paths=None if previous is None else frozenset(previous),
    )
    return [str(one) for one in found]


def has(found: list[str], *words: str) -> bool:
    return any(all(word in text for word in words) for text in found)


EVENTS = list(SealEvent)


# (b) the newest vote of every member is final


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


# A checkpoint has a file


@pytest.mark.parametrize("event", EVENTS)
def test_a_checkpoint_without_any_file_is_refused(event: SealEvent) -> None:
    votes = [vote(A, directory("d"), symlink("s", "d"), committed_all=True)]
    assert has(missing(event, votes, previous=["s"]), "a file", A)
    assert has(missing(event, [], previous=[]), "a file", "all writers")


def test_a_0_byte_file_is_a_file() -> None:
    assert missing(SealEvent.RENAME, [vote(A, file("a", PLAIN, size=0))]) == []


# (c) the expected set, sizes, containers, holes


EXPECTED = ExpectedSet("dcp", {"__0_0.distcp": 10, "__1_0.distcp": 0}, source=".metadata")


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


# Torn closes

TORN = Evidence(is_torn=True)
TORN_WHOLE = Evidence(container="torch-zip", is_valid=True, is_torn=True)


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


# (d) every rank


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


# (e) one version of every path


def test_equal_bytes_of_two_members_merge() -> None:
    entries, problems = merge_votes(
        {A: vote(A, file("b"), file("a")), B: vote(B, file("a"), file("c"))}
    )
    assert [entry.path for entry in entries] == ["a", "b", "c"]
    assert problems == ()


def test_of_equal_bytes_the_better_evidence_counts() -> None:
    for votes in (
        {A: vote(A, file("a", TORN)), B: vote(B, file("a", WHOLE))},
        {A: vote(A, file("a", WHOLE)), B: vote(B, file("a", TORN))},
    ):
        entries, _ = merge_votes(votes)
        assert entries[0].evidence == WHOLE


def test_directories_merge_whatever_their_modes_and_times() -> None:
    votes = {A: vote(A, directory("d", mtime_ns=1)), B: vote(B, directory("d", mode=0o700))}
    entries, problems = merge_votes(votes)
    assert (len(entries), problems) == (1, ())


def paths_of(votes: Mapping[str, Vote], base: list[FileEntry]) -> dict[str, str]:
    entries, problems = merge_votes(votes, base)
    assert problems == ()
    assert merge_votes(dict(reversed(list(votes.items()))), base) == (entries, problems)
    return {entry.path: entry.digest for entry in entries}


def revised(member: str, *entries: FileEntry) -> Vote:
    return vote(member, *entries, base="step-1.0", attempt="step-1.1")


def written(path: str, content: str) -> FileEntry:
    return msgspec.structs.replace(file(path, content=content), key=f"new/{path}")


def test_in_a_revision_only_what_a_member_changed_is_its_own_say() -> None:
    """I8: each node rewrites its ranks' files of the same checkpoint."""
    base = [file("a"), file("b"), file("c"), directory("d")]
    votes = {
        A: revised(A, written("a", "1"), *base[1:]),
        B: revised(B, base[0], written("b", "2"), *base[2:], written("e", "3")),
    }
    assert paths_of(votes, base) == {
        "a": digest("1"), "b": digest("2"), "c": digest("c"), "d": "", "e": digest("3"),
    }  # fmt: skip


def test_in_a_revision_two_members_changes_of_one_path_are_a_conflict() -> None:
    votes = {A: revised(A, written("a", "1")), B: revised(B, written("a", "2"))}
    _, problems = merge_votes(votes, [file("a")])
    assert [problem.who for problem in problems] == [f"{A} and {B}"]


def test_what_a_member_removed_in_a_revision_is_gone_unless_another_one_wrote_it() -> None:
    base = [directory("d"), file("d/a"), file("d/b")]
    votes = {A: revised(A), B: revised(B, base[0], base[1], written("d/b", "2"))}
    assert paths_of(votes, base) == {"d": "", "d/b": digest("2")}
    votes = {A: revised(A), B: revised(B, *base)}
    assert paths_of(votes, base) == {}


def test_a_member_that_never_had_the_base_removes_nothing_of_it() -> None:
    base = [file("a"), file("b")]
    votes = {A: revised(A, *base), B: vote(B, written("c", "3"), attempt="step-1.1")}
    assert sorted(paths_of(votes, base)) == ["a", "b", "c"]


def test_a_file_that_is_written_anew_with_the_same_bytes_is_written() -> None:
    base = [file("a")]
    votes = {A: revised(A), B: revised(B, written("a", "a"))}
    entries, _ = merge_votes(votes, base)
    assert [entry.key for entry in entries] == ["new/a"]


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (file("x", content="1"), file("x", content="2")),
        (file("x"), directory("x")),
        (file("x"), symlink("x", "y")),
        (symlink("x", "y"), symlink("x", "z")),
        (file("x"), file("x/y")),
        (symlink("x", "y"), file("x/y/z")),
    ],
    ids=["bytes", "file-dir", "file-link", "targets", "below-file", "below-link"],
)
def test_two_versions_of_a_path_are_an_error_that_names_both(
    event: SealEvent, first: FileEntry, second: FileEntry
) -> None:
    votes = [vote(A, first, file("other"), committed_all=True), vote(B, second)]
    found = missing(event, votes, previous=["x", "other"])
    assert has(found, "one version of 'x'", A, B)


def test_a_member_that_names_a_path_twice_is_told_so() -> None:
    _, problems = merge_votes({A: vote(A, file("x", content="1"), file("x", content="2"))})
    assert [problem.who for problem in problems] == [f"{A} twice"]


def test_a_name_of_the_gateway_is_not_a_checkpoint_s() -> None:
    """I13."""
    found = missing(SealEvent.RENAME, [vote(A, file("a"), file(".ckptgate/manifest.json"))])
    assert has(found, ".ckptgate/manifest.json", A)


@given(st.permutations([A, B, "gamma-00000003"]))
def test_the_order_of_the_votes_does_not_matter(order: list[str]) -> None:
    content = {
        A: (file("a"), file("x", TORN)),
        B: (file("b"), file("x")),
        "gamma-00000003": (file("x"), directory("d")),
    }
    votes = {name: vote(name, *content[name]) for name in order}
    entries, problems = merge_votes(votes)
    assert (entries, problems) == merge_votes(dict(sorted(votes.items())))
    assert [entry.path for entry in entries] == ["a", "b", "d", "x"]


# (f) content of no known format


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


# Helpers


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
