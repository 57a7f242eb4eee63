"""Renamed directories of an open checkpoint, and where a path is that was said without them.

Owns the rule how two members' name spaces agree: who names a path says which renames it has in it,
and whoever did others since follows those, in the order of its own tree. Without that an old vote,
or an old `mkdir`, would make a directory again that was renamed, and what is written there from
then on would be a second half. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckptgate.model.layout import join_key

__all__ = ["Move", "place_now", "taken", "where_now"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A directory was renamed.

    Attributes:
        member: who did it.
        n: number of that name operation of its member.
        path: the directory, as it was named in the tree that tells of it.
        to: its new path.
    """

    member: str
    n: int
    path: str
    to: str


def taken(moves: Iterable[Move]) -> dict[str, int]:
    """Member -> below which number its renames are among *moves*; `after` of what is said then."""
    counts: dict[str, int] = {}
    for move in moves:
        counts[move.member] = max(counts.get(move.member, 0), move.n + 1)
    return counts


def where_now(path: str, after: Mapping[str, int], moves: Iterable[Move], *, by: str = "") -> str:
    """Where what was at *path* is in a tree with all *moves*.

    Args:
        path: as it was said.
        after: the renames that it has in it: member -> how many of its name operations.
        moves: what was renamed in the tree, in order.
        by: who said it, if it said it in order with its own renames.
    """
    for move in moves:
        if move.member == by or move.n < after.get(move.member, 0):
            continue
        if path == move.path or path.startswith(f"{move.path}/"):
            path = move.to + path[len(move.path) :]
    return path


def place_now(path: str, after: Mapping[str, int], moves: Iterable[Move], *, by: str = "") -> str:
    """As `where_now`, of the directory that *path* is a name in."""
    above, _, name = path.rpartition("/")
    return join_key(where_now(above, after, moves, by=by), name) if above else path
