"""Closure: whether what the members voted is a whole checkpoint, and what is missing if not.

Owns the conditions of a COMMIT: the newest vote of every member is final; the expected set is
covered; every rank took part where that is known to be needed; no path has two versions; no file
has a hole, a broken container or an unproved torn close; and content that no format describes needs
an explicit commit of all ranks, or quiescence that proves itself. Pure; any thread.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from ckptgate.model.documents import EntryType, FileEntry, Member, Vote
from ckptgate.model.entries import SealEvent
from ckptgate.model.merge import Missing, Voted, merge, merge_votes

__all__ = [
    "ExpectedSet",
    "Missing",
    "absent_rank_files",
    "all_ranks_committed",
    "closure",
    "explicit_ranks",
    "is_covered",
    "is_edited",
    "known_world_size",
    "merge_votes",
    "names_pattern",
    "stale_rank_files",
]

_NUMBER: Final = re.compile(r"[0-9]+")
_RANK: Final = re.compile(r"\{rank[^}]*\}")


@dataclass(frozen=True, slots=True)
class ExpectedSet:
    """What a framework's format says that a checkpoint must hold.

    Attributes:
        format_name: of the framework's format.
        files: path -> minimal size in bytes.
        every_rank: every rank of the job writes to each checkpoint.
        world_size: how many ranks there are, as the checkpoint itself says; None where unknown.
        source: the file that says so, for messages.
        rank_files: a file that every rank writes, as a path with `{rank}` in it, once; `*/` at its
            begin stands for any directory.
        in_progress: files whose presence says that the save is still under way.
        edited: those of *files* that are also written anew alone, in a checkpoint that is whole.
        is_partial: the format speaks of these files only: others, which no format describes, may
            belong to the checkpoint too.
    """

    format_name: str
    files: Mapping[str, int]
    every_rank: bool = False
    world_size: int | None = None
    source: str = ""
    rank_files: tuple[str, ...] = ()
    in_progress: frozenset[str] = frozenset()
    edited: frozenset[str] = frozenset()
    is_partial: bool = False


def names_pattern(paths: Iterable[str]) -> frozenset[str]:
    """*paths* with every number replaced by `#`: the shape of a checkpoint, whatever its step."""
    return frozenset(_NUMBER.sub("#", path) for path in paths)


def explicit_ranks(votes: Mapping[str, Vote]) -> tuple[frozenset[int], int | None, bool]:
    """Explicit commits that the votes carry.

    Returns:
        (ranks that committed, world size or None, whether somebody committed for all ranks).
    """
    committed = frozenset(rank for vote in votes.values() for rank in vote.committed_ranks)
    committed_all = any(vote.committed_all for vote in votes.values())
    return committed, _largest(vote.world_size for vote in votes.values()), committed_all


def all_ranks_committed(votes: Mapping[str, Vote]) -> bool:
    """Whether the votes carry an explicit commit of every rank, or one for all."""
    committed, world_size, committed_all = explicit_ranks(votes)
    if committed_all:
        return True
    return world_size is not None and world_size > 0 and committed.issuperset(range(world_size))


def closure(
    *,
    event: SealEvent,
    members: Mapping[str, Member],
    votes: Mapping[str, Vote],
    expected: ExpectedSet | None,
    previous_paths: frozenset[str] | None,
    base: Sequence[FileEntry] = (),
    waiting: Mapping[str, int] = MappingProxyType({}),
) -> tuple[Missing, ...]:
    """What is missing to a whole checkpoint; empty if it is whole.

    Args:
        event: what sealed it.
        members: all that are registered, listed after the SEAL.
        votes: member -> its newest vote.
        expected: what the format says, None for content of no known format.
        previous_paths: paths of the run's previous committed checkpoint, None if there is none.
        base: entries of the checkpoint that the votes are a revision of.
        waiting: path -> rank (-1 unknown) of files that a vote which isn't final doesn't have yet,
            but will: they are not missing.
    """
    merged, conflicts = merge(votes, base)
    files = [voted for voted in merged if voted.entry.type is EntryType.FILE]
    who = _Owners(members)
    missing = [*_unfinished_votes(members, votes, who), *_untaken_renames(votes, who), *conflicts]
    if not files and not waiting:
        missing.append(Missing("a file: the checkpoint has none", who.all()))
    is_explicit = event is SealEvent.EXPLICIT and all_ranks_committed(votes)
    missing += _damaged(files, who, accept_torn=is_explicit)
    if expected is not None:
        missing += _uncovered(expected, files, who, waiting)
        missing += _absent_ranks(event, expected, members, votes, waiting)
        missing += _without_rank_files(expected, files, members, votes, waiting)
        if event is SealEvent.FORMAT and not all_ranks_committed(votes):
            world_size = known_world_size(expected, members, votes)
            missing += _not_anew(expected, files, base, who, world_size)
    if expected is not None and not expected.is_partial:
        return tuple(missing)
    if event is SealEvent.EXPLICIT:
        missing += _uncommitted(votes, who)
    elif event is SealEvent.QUIESCENCE:
        missing += _unproved(files, who)
        paths = [*(voted.entry.path for voted in merged), *waiting]
        missing += _unlike_previous(paths, previous_paths, who)
    return tuple(missing)


class _Owners:
    """Who owes something, in words: the member, its node, the rank."""

    def __init__(self, members: Mapping[str, Member]) -> None:
        self._members = members

    def member(self, member: str) -> str:
        found = self._members.get(member)
        if found is None:
            return member
        ranks = ", ".join(str(rank) for rank in found.ranks)
        return f"{member} on {found.host}" + (f", ranks {ranks}" if ranks else "")

    def file(self, voted: Voted) -> str:
        rank = voted.entry.evidence.rank
        found = self._members.get(voted.member)
        place = voted.member + (f" on {found.host}" if found else "")
        # The ranks that a member knew at its joining say nothing of who wrote this file.
        return place if rank < 0 else f"rank {rank}, {place}"

    def all(self) -> str:
        return "; ".join(self.member(member) for member in sorted(self._members)) or "all writers"


def _unfinished_votes(
    members: Collection[str], votes: Mapping[str, Vote], who: _Owners
) -> Iterator[Missing]:
    for member in sorted({*members, *votes}):
        vote = votes.get(member)
        if vote is None:
            yield Missing(f"the vote of {member}", who.member(member))
        elif not vote.is_final:
            yield Missing(f"the final vote of {member}", who.member(member))


def _untaken_renames(votes: Mapping[str, Vote], who: _Owners) -> Iterator[Missing]:
    """Final votes from before another member renamed a directory.

    What they have of it is at the old path: it would be there twice, each time in part.
    """
    # Before there is a SEAL, votes are asked about that only stand for final ones.
    sealed = {m: vote for m, vote in votes.items() if vote.is_final and vote.seal_index >= 0}
    for mover in sorted(member for member, vote in sealed.items() if member in vote.after):
        count = sealed[mover].after[mover]
        for member in sorted(sealed):
            if sealed[member].after.get(mover, 0) < count:
                what = f"a vote of {member} with the directories that {mover} renamed"
                yield Missing(what, who.member(member))


def _damaged(files: Iterable[Voted], who: _Owners, *, accept_torn: bool) -> Iterator[Missing]:
    for voted in files:
        path, evidence = voted.entry.path, voted.entry.evidence
        if evidence.has_hole:
            yield Missing(f"bytes of {path!r}: a part was never written", who.file(voted))
        if evidence.problem:
            kind = f" ({evidence.container})" if evidence.container else ""
            yield Missing(f"a valid {path!r}{kind}: {evidence.problem}", who.file(voted))
        elif evidence.is_torn and not evidence.is_valid and not accept_torn:
            yield Missing(f"the rest of {path!r}: its writer died with it open", who.file(voted))


def _uncovered(
    expected: ExpectedSet, files: Iterable[Voted], who: _Owners, waiting: Collection[str]
) -> Iterator[Missing]:
    present = {voted.entry.path: voted for voted in files}
    for path in sorted(expected.in_progress & present.keys()):
        yield Missing(f"the removal of {path!r}: it says that the save is under way", "its writer")
    by = f"a writer that is not known; {expected.source or expected.format_name} names the file"
    for path, size in sorted(expected.files.items()):
        voted = present.get(path)
        if voted is None:
            if path not in waiting:
                yield Missing(f"file {path!r}", by)
        elif voted.entry.size < size:
            what = f"the rest of {path!r}: {voted.entry.size} of at least {size} bytes"
            yield Missing(what, who.file(voted))


def _not_anew(
    expected: ExpectedSet,
    files: Iterable[Voted],
    base: Sequence[FileEntry],
    who: _Owners,
    world_size: int | None,
) -> Iterator[Missing]:
    """Files that a revision still has from its base, though the format wrote all of its set anew.

    Who wrote them may have come too late, or have begun from another base: then the base's files
    are in the place of the new ones.
    """
    before = {entry.path: entry.key for entry in base}
    counted = expected.files.keys() - stale_rank_files(expected, expected.files, world_size)
    entries = [voted.entry for voted in files if voted.entry.path in counted]
    if is_edited([e.path for e in entries if before.get(e.path) != e.key], expected):
        return
    for entry in entries:
        if before.get(entry.path) == entry.key:
            yield Missing(f"{entry.path!r} written anew, as the rest was", who.all())


def is_edited(anew: Collection[str], expected: ExpectedSet) -> bool:
    """Whether these files of an expected set, written anew in a revision, are only an edit of it.

    Else somebody saves the checkpoint again, and the rest is still to come.
    """
    return bool(anew) and expected.edited.issuperset(anew)


def _absent_ranks(
    event: SealEvent,
    expected: ExpectedSet,
    members: Mapping[str, Member],
    votes: Mapping[str, Vote],
    waiting: Mapping[str, int],
) -> Iterator[Missing]:
    """Ranks that neither wrote nor committed, where every one has to."""
    if not expected.every_rank:
        return
    committed, _, committed_all = explicit_ranks(votes)
    if committed_all:
        return
    world_size = known_world_size(expected, members, votes)
    if world_size is None:
        # An event of the format says at least that one rank is done; silence says nothing.
        if event is SealEvent.QUIESCENCE:
            yield Missing("the world size: every rank writes in this format", "the job")
        return
    wrote = {entry.evidence.rank for vote in votes.values() for entry in vote.entries}
    wrote.update(waiting.values())
    for rank in range(world_size):
        if rank not in wrote and rank not in committed:
            yield Missing(f"files of rank {rank} of {world_size}", f"rank {rank}")


def _without_rank_files(
    expected: ExpectedSet,
    files: Iterable[Voted],
    members: Mapping[str, Member],
    votes: Mapping[str, Vote],
    waiting: Collection[str],
) -> Iterator[Missing]:
    """Files that each rank writes, of those that did not; a gap shows it without a world size."""
    if not expected.rank_files or explicit_ranks(votes)[2]:
        return
    paths = {*(voted.entry.path for voted in files), *waiting}
    for rank, path in absent_rank_files(
        expected, paths, known_world_size(expected, members, votes)
    ):
        yield Missing(f"file {path!r}", f"rank {rank}")


def is_covered(expected: ExpectedSet, sizes: Mapping[str, int], world_size: int | None) -> bool:
    """Whether files of these sizes are all that is expected.

    Args:
        expected: of the format.
        sizes: path -> bytes.
        world_size: of the job, where the checkpoint itself doesn't say it.
    """
    world_size = world_size if expected.world_size is None else expected.world_size
    return (
        all(sizes.get(path, -1) >= size for path, size in expected.files.items())
        and not any(absent_rank_files(expected, sizes.keys(), world_size))
        and expected.in_progress.isdisjoint(sizes)
    )


def absent_rank_files(
    expected: ExpectedSet, paths: Collection[str], world_size: int | None
) -> Iterator[tuple[int, str]]:
    """Ranks and the files of theirs that are not among *paths*."""
    for template in expected.rank_files:
        pattern = _rank_pattern(template)
        there = {int(found[1]) for path in paths if (found := pattern.fullmatch(path))}
        count = max(there, default=-1) + 1 if world_size is None else world_size
        for rank in range(count):
            if rank not in there:
                yield rank, template.removeprefix("*/").format(rank=rank)


def stale_rank_files(
    expected: ExpectedSet, paths: Collection[str], world_size: int | None
) -> frozenset[str]:
    """Those of *paths* that a rank wrote which is no more, when there were more of them."""
    if world_size is None:
        return frozenset()
    patterns = [_rank_pattern(template) for template in expected.rank_files]
    return frozenset(
        path
        for path in paths
        for pattern in patterns
        if (found := pattern.fullmatch(path)) and int(found[1]) >= world_size
    )


def _rank_pattern(template: str) -> re.Pattern[str]:
    head, tail = (re.escape(part) for part in _RANK.split(template))
    if template.startswith("*/"):
        head = "(?:.*/)?" + head.removeprefix(re.escape("*/"))
    return re.compile(f"{head}([0-9]+){tail}")


def known_world_size(
    expected: ExpectedSet, members: Mapping[str, Member], votes: Mapping[str, Vote]
) -> int | None:
    """How many ranks there are: as the checkpoint itself says, else the job."""
    if expected.world_size is not None:
        return expected.world_size
    sizes = [vote.world_size for vote in votes.values()]
    return _largest([*sizes, *(member.world_size for member in members.values())])


def _uncommitted(votes: Mapping[str, Vote], who: _Owners) -> Iterator[Missing]:
    """Explicit commits that are still owed for content of no known format."""
    if all_ranks_committed(votes):
        return
    committed, world_size, _ = explicit_ranks(votes)
    if not world_size:
        yield Missing("a commit for all ranks: the world size is not known", who.all())
        return
    for rank in range(world_size):
        if rank not in committed:
            yield Missing(f"the commit of rank {rank} of {world_size}", f"rank {rank}")


def _unproved(files: Iterable[Voted], who: _Owners) -> Iterator[Missing]:
    """Files that do not prove themselves, where nobody said that they are whole."""
    for voted in files:
        path, evidence = voted.entry.path, voted.entry.evidence
        if evidence.is_torn and evidence.is_valid:
            what = f"a clean close of {path!r}: its writer died with it open"
            yield Missing(what, who.file(voted))
        elif not evidence.is_valid:
            what = f"a proof that {path!r} is whole: commit explicitly"
            yield Missing(what, who.file(voted))


def _unlike_previous(
    paths: Collection[str], previous: frozenset[str] | None, who: _Owners
) -> Iterator[Missing]:
    """Names by which the checkpoint differs from the run's previous one, numbers aside."""
    if previous is None:
        what = "a committed checkpoint of this run to compare the names with: commit explicitly"
        yield Missing(what, who.all())
        return
    now, before = _shape(paths), _shape(previous)
    for pattern in sorted(before):
        if now[pattern] < before[pattern]:
            count = f"{now[pattern]} of {before[pattern]}"
            what = f"names like {pattern!r}: {count} that the previous checkpoint has"
            yield Missing(what, who.all())
    for pattern in sorted(now.keys() - before.keys()):
        what = f"names of the previous checkpoint instead of {pattern!r}: commit explicitly"
        yield Missing(what, who.all())


def _shape(paths: Collection[str]) -> Counter[str]:
    """How many names there are of each pattern; directories that hold something don't count."""
    parents = {path.rpartition("/")[0] for path in paths}
    return Counter(_NUMBER.sub("#", path) for path in paths if path not in parents)


def _largest(sizes: Iterable[int | None]) -> int | None:
    return max((size for size in sizes if size is not None), default=None)
