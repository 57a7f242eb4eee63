"""Closure: votes of several members become one list of files, or a conflict that names both."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.closure_samples import (
    EVENTS,
    TORN,
    WHOLE,
    A,
    B,
    digest,
    directory,
    file,
    has,
    missing,
    revised,
    symlink,
    vote,
    written,
)

from ckptgate.model.closure import (
    merge_votes,
)
from ckptgate.model.documents import FileEntry, Vote
from ckptgate.model.entries import SealEvent


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
