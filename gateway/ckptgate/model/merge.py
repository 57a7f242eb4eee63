"""Merging the members' votes into the entries of one checkpoint.

Owns the rule what two members may say of one path: the same, or it is a conflict that names both.
In a revision each member's tree is a changed copy of the base, and only its changes are its own
say: a path that some member wrote is that member's, one that some member removed and nobody wrote
is gone, and all others stay. The result depends on the votes only, not on their order. Pure; any
thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckptgate.model.documents import EntryType, FileEntry, Vote
from ckptgate.model.ids import parents_of
from ckptgate.model.layout import GATEWAY_DIR, chunk_table_key, data_key

__all__ = ["Missing", "Voted", "foreign_bytes", "merge", "merge_votes"]


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that a checkpoint needs and does not have.

    Attributes:
        what: the thing, for people.
        who: the member, node or rank that owes it, as far as known; else "".
    """

    what: str
    who: str = ""

    def __str__(self) -> str:
        return f"{self.what} (owed by {self.who})" if self.who else self.what


@dataclass(frozen=True, slots=True)
class Voted:
    """An entry and the member whose vote it is from."""

    member: str
    entry: FileEntry


def merge_votes(
    votes: Mapping[str, Vote], base: Sequence[FileEntry] = ()
) -> tuple[tuple[FileEntry, ...], tuple[Missing, ...]]:
    """The entries of all votes, sorted by path, and what keeps them from being one checkpoint.

    Entries that say the same merge; of two that don't, the first member's is returned, with a
    `Missing` that names both members.

    Args:
        votes: member -> its newest vote.
        base: entries of the checkpoint that they are a revision of.
    """
    merged, problems = merge(votes, base)
    return tuple(voted.entry for voted in merged), problems


def merge(
    votes: Mapping[str, Vote], base: Sequence[FileEntry] = ()
) -> tuple[tuple[Voted, ...], tuple[Missing, ...]]:
    """As `merge_votes`, with the member that each entry is from."""
    before = {entry.path: entry for entry in base}
    chosen: dict[str, Voted] = {}
    kept: dict[str, Voted] = {}
    problems: list[Missing] = []
    for member in sorted(votes):
        for entry in votes[member].entries:
            new = Voted(member, entry)
            old = before.get(entry.path)
            if old is not None and _is_kept(old, entry):
                kept.setdefault(entry.path, new)
                continue
            present = chosen.get(entry.path)
            if present is None:
                chosen[entry.path] = new
            elif _says(present.entry) == _says(entry):
                chosen[entry.path] = _better(present, new)
            else:
                problems.append(_conflict(entry.path, present, new))
    _add_kept(chosen, kept, _removed(before, votes.values()))
    merged = tuple(chosen[path] for path in sorted(chosen))
    problems += _misplaced(merged, chosen)
    return merged, tuple(problems)


def foreign_bytes(
    attempt: str, entries: Iterable[FileEntry], base: Iterable[FileEntry]
) -> tuple[Missing, ...]:
    """Files whose bytes are neither the attempt's own nor those of the checkpoint that it revises.

    Others may be removed from the store, whatever is committed.
    """
    own = data_key(attempt, "", "") + "/", chunk_table_key(attempt, "") + "/"
    known = {key for entry in base for key in _keys_of(entry)}
    return tuple(
        Missing(f"bytes of its own for {entry.path!r}: they are those of {key!r}")
        for entry in entries
        for key in _keys_of(entry)
        if key not in known and not key.startswith(own)
    )


def _keys_of(entry: FileEntry) -> tuple[str, ...]:
    keys = (entry.key, "" if entry.chunks is None else entry.chunks.table)
    return tuple(key for key in keys if key)


def _is_kept(old: FileEntry, entry: FileEntry) -> bool:
    """Whether the base's bytes are still there; equal bytes that were written anew are not."""
    return old.key == entry.key and _says(old) == _says(entry)


def _removed(before: Mapping[str, FileEntry], votes: Iterable[Vote]) -> set[str]:
    """Paths of the base that are gone from the tree of a member that had them."""
    removed: set[str] = set()
    for vote in votes:
        if vote.base:
            removed.update(before.keys() - {entry.path for entry in vote.entries})
    return removed


def _add_kept(chosen: dict[str, Voted], kept: Mapping[str, Voted], removed: set[str]) -> None:
    """Add what nobody wrote or removed, and directories that something still lies in."""
    chosen.update(
        (path, voted) for path, voted in kept.items() if path not in chosen and path not in removed
    )
    for path in list(chosen):
        for parent in parents_of(path):
            if parent in kept:
                chosen.setdefault(parent, kept[parent])


def _says(entry: FileEntry) -> tuple[EntryType, int, str, str]:
    """What two members must agree on; modes and times may differ from node to node."""
    return entry.type, entry.size, entry.digest, entry.target


def _better(first: Voted, second: Voted) -> Voted:
    """The one whose evidence proves more: equal bytes that one node saw whole are whole."""
    return min(first, second, key=lambda voted: _doubt(voted.entry))


def _doubt(entry: FileEntry) -> tuple[bool, bool, bool]:
    evidence = entry.evidence
    return evidence.is_torn, evidence.has_hole, not evidence.is_valid


def _conflict(path: str, first: Voted, second: Voted) -> Missing:
    both = f"{first.member} and {second.member}"
    kinds = {first.entry.type, second.entry.type}
    how = "different bytes" if kinds == {EntryType.FILE} else "different things"
    if first.member == second.member:
        both = f"{first.member} twice"
    return Missing(f"one version of {path!r}: {how} are there", both)


def _misplaced(merged: Iterable[Voted], chosen: Mapping[str, Voted]) -> list[Missing]:
    """Paths in the gateway's own directory, or below something that is no directory."""
    found: list[Missing] = []
    for voted in merged:
        path = voted.entry.path
        if path.split("/", 1)[0] == GATEWAY_DIR:
            found.append(
                Missing(f"another place for {path!r}, a name of the gateway", voted.member)
            )
        for parent in parents_of(path):
            above = chosen.get(parent)
            if above is not None and above.entry.type is not EntryType.DIR:
                what = f"one version of {parent!r}: a {above.entry.type} and a directory are there"
                found.append(Missing(what, f"{above.member} and {voted.member}"))
    return found
