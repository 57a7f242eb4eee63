"""What closure makes of an expected set: ranks' files, edits, saves under way, parts."""

from __future__ import annotations

from typing import Any

import pytest

from ckptgate.model.closure import ExpectedSet, closure, is_covered, is_edited
from ckptgate.model.documents import EntryType, Evidence, FileEntry, Member, Vote
from ckptgate.model.entries import SealEvent

A = "alpha-00000001"


def entry(path: str, key: str = "") -> FileEntry:
    return FileEntry(
        path=path,
        type=EntryType.FILE,
        mode=0o644,
        mtime_ns=1,
        size=10,
        digest="0" * 64,
        key=key or f"data/{path}",
        evidence=Evidence(container="torch-zip", is_valid=True),
    )


def found(
    expected: ExpectedSet,
    *entries: FileEntry,
    event: SealEvent = SealEvent.FORMAT,
    world_size: int | None = None,
    base: tuple[FileEntry, ...] = (),
    **more: Any,
) -> list[str]:
    vote = Vote(attempt="s.0", member=A, n=0, is_final=True, entries=entries, **more)
    member = Member(attempt="s.0", member=A, host="a", joined_at="t", world_size=world_size)
    lines = closure(
        event=event,
        members={A: member},
        votes={A: vote},
        expected=expected,
        previous_paths=None,
        base=base,
    )
    return [str(line) for line in lines]


RANKED = ExpectedSet("x", {}, rank_files=("rng_{rank}.pt",))


def test_each_rank_s_file_is_owed_by_that_rank() -> None:
    lines = found(RANKED, entry("rng_0.pt"), world_size=3)
    assert lines == ["file 'rng_1.pt' (owed by rank 1)", "file 'rng_2.pt' (owed by rank 2)"]
    assert found(RANKED, entry("rng_0.pt"), entry("rng_1.pt"), world_size=2) == []


def test_a_gap_in_the_ranks_files_shows_without_a_world_size() -> None:
    assert found(RANKED, entry("rng_0.pt"), entry("rng_2.pt")) == [
        "file 'rng_1.pt' (owed by rank 1)"
    ]
    assert found(RANKED, entry("rng_0.pt"), entry("rng_1.pt")) == []


def test_files_of_more_ranks_than_there_are_are_no_matter() -> None:
    """A run that was resumed on fewer ranks saves into the same directory."""
    entries = [entry(f"rng_{rank}.pt") for rank in range(4)]
    assert found(RANKED, *entries, world_size=2) == []


def test_whoever_commits_for_all_ranks_need_not_have_their_files() -> None:
    assert found(RANKED, entry("rng_0.pt"), world_size=3, committed_all=True) == []


@pytest.mark.parametrize(
    ("template", "path", "other"),
    [
        ("t/rank_{rank:02d}.pt", "t/rank_01.pt", "t/rank_00.pt"),
        ("*/iter_7_{rank}_local.pt", "5/iter_7_1_local.pt", "iter_7_0_local.pt"),
        ("a+b.{rank}", "a+b.1", "a+b.0"),
    ],
)
def test_a_rank_s_file_is_found_by_its_template(template: str, path: str, other: str) -> None:
    expected = ExpectedSet("x", {}, rank_files=(template,))
    assert is_covered(expected, {path: 1, other: 1}, 2)
    assert not is_covered(expected, {path: 1}, 2)
    assert not is_covered(expected, {other: 1}, 2)
    assert not is_covered(expected, {other: 1, "aab_1": 1, "t/rank_01xpt": 1}, 2)


def test_what_says_that_a_save_is_under_way_has_to_go() -> None:
    expected = ExpectedSet("x", {"a": 1}, in_progress=frozenset({"busy"}))
    assert found(expected, entry("a")) == []
    (line,) = found(expected, entry("a"), entry("busy"))
    assert "the removal of 'busy'" in line
    assert not is_covered(expected, {"a": 1, "busy": 1}, None)


EDITABLE = ExpectedSet("x", {"weights": 1, "state": 1}, edited=frozenset({"state"}))
BASE = (entry("state"), entry("weights"))


def test_an_edit_of_what_is_edited_in_place_leaves_the_rest_as_it_is() -> None:
    anew = (entry("state", "data/new"), BASE[1])
    assert found(EDITABLE, *anew, base=BASE) == []


def test_a_save_that_wrote_more_than_that_has_to_write_all() -> None:
    half = (BASE[0], entry("weights", "data/new"))
    assert found(EDITABLE, *half, base=BASE) == [
        "'state' written anew, as the rest was (owed by alpha-00000001 on a)"
    ]


def test_nothing_written_anew_is_no_edit() -> None:
    assert not is_edited([], EDITABLE)
    assert is_edited(["state"], EDITABLE)
    assert not is_edited(["state", "weights"], EDITABLE)


def test_a_part_alone_proves_nothing_of_the_rest() -> None:
    """Its files are needed, and the rules for content of no format hold too."""
    part = ExpectedSet("weights", {"m-1": 1, "m-2": 1}, is_partial=True)
    quiet = found(part, entry("m-1"), entry("m-2"), event=SealEvent.QUIESCENCE)
    assert len(quiet) == 1
    assert "a committed checkpoint of this run to compare" in quiet[0]
    spoken = found(part, entry("m-1"), event=SealEvent.EXPLICIT, committed_all=True)
    assert [line.partition(" (")[0] for line in spoken] == ["file 'm-2'"]
