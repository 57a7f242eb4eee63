"""Merging the members' votes into the entries of one checkpoint.

Owns the rule what two members may say of one path: the same, or it is a conflict that names both.
The result depends on the votes only, not on their order. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckptgate.model.documents import EntryType, FileEntry, Vote
from ckptgate.model.ids import parents_of
from ckptgate.model.layout import GATEWAY_DIR

__all__ = ["Missing", "Voted", "merge", "merge_votes"]


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


def merge_votes(votes: Mapping[str, Vote]) -> tuple[tuple[FileEntry, ...], tuple[Missing, ...]]:
    """The entries of all votes, sorted by path, and what keeps them from being one checkpoint.

    Entries that say the same merge; of two that don't, the first member's is returned, with a
    `Missing` that names both members.

    Args:
        votes: member -> its newest vote.
    """
    merged, problems = merge(votes)
    return tuple(voted.entry for voted in merged), problems


def merge(votes: Mapping[str, Vote]) -> tuple[tuple[Voted, ...], tuple[Missing, ...]]:
    """As `merge_votes`, with the member that each entry is from."""
    chosen: dict[str, Voted] = {}
    problems: list[Missing] = []
    for member in sorted(votes):
        for entry in votes[member].entries:
            new = Voted(member, entry)
            present = chosen.get(entry.path)
            if present is None:
                chosen[entry.path] = new
            elif _says(present.entry) == _says(entry):
                chosen[entry.path] = _better(present, new)
            else:
                problems.append(_conflict(entry.path, present, new))
    merged = tuple(chosen[path] for path in sorted(chosen))
    problems += _misplaced(merged, chosen)
    return merged, tuple(problems)


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
