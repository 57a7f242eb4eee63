"""Rows kept in memory, so that a request that asks for one again need not ask SQLite.

Owns the rule: what is kept is what the database holds, inside of a transaction what it holds there.
`Database` empties it when another process committed, at every rollback, and after every statement
that changes one of these tables without its caller saying that it keeps the rows up to date.
Thread rule: with the connection's lock.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

from ckptgate.ports.spool import AttemptRow, FileRow, NodeRow

__all__ = ["KEPT_MAX", "Counted", "KeptRows", "changes_kept", "is_change", "put"]

KEPT_MAX: Final = 16384
"""Rows of each kind; then all of that kind are dropped, and what is still asked for comes back."""
_KEPT_TABLES: Final = frozenset({"nodes", "names", "files", "attempts"})
_TABLE: Final = re.compile(r'(?:INTO|UPDATE|FROM)\s+"?(\w+)', re.IGNORECASE)
_known: Final[dict[str, bool]] = {}

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class Counted(NamedTuple):
    """How many children a directory has: what one count of at most *most* of them came to."""

    children: int
    directories: int
    most: int


@dataclass(slots=True)
class KeptRows:
    """What is kept; None says that there is no such row.

    Attributes:
        generation: the number (see `generation`) by which it is valid; -1 for never.
        nodes: by number.
        children: (parent, name) -> node number.
        places: node number -> (parent, name).
        whole: node numbers of directories of which all children are in `children`: what isn't there
            has no row.
        counts: node number of a directory -> how many children it has.
        files: by id.
        attempts: by row id.
        found: conditions of `Attempts.attempts` -> row ids.
    """

    generation: int = -1
    nodes: dict[int, NodeRow | None] = field(default_factory=dict[int, NodeRow | None])
    children: dict[tuple[int, str], int | None] = field(
        default_factory=dict[tuple[int, str], int | None]
    )
    whole: set[int] = field(default_factory=set[int])
    places: dict[int, tuple[int, str] | None] = field(
        default_factory=dict[int, tuple[int, str] | None]
    )
    counts: dict[int, Counted] = field(default_factory=dict[int, Counted])
    files: dict[int, FileRow | None] = field(default_factory=dict[int, FileRow | None])
    attempts: dict[int, AttemptRow | None] = field(default_factory=dict[int, AttemptRow | None])

    found: dict[Hashable, tuple[int, ...]] = field(default_factory=dict[Hashable, tuple[int, ...]])

    def clear(self) -> None:
        """Keep nothing."""
        self.nodes.clear()
        self.children.clear()
        self.whole.clear()
        self.places.clear()
        self.counts.clear()
        self.files.clear()
        self.attempts.clear()
        self.found.clear()


def put(table: dict[_K, _V], key: _K, value: _V) -> None:
    """Keep one row in a table of bounded size."""
    if len(table) >= KEPT_MAX:
        table.clear()
    table[key] = value


def is_change(sql: str) -> bool:
    """Whether a statement changes anything."""
    return not sql.startswith(("SELECT", "WITH", "PRAGMA"))


def changes_kept(sql: str) -> bool:
    """Whether a change is one of a table whose rows are kept."""
    known = _known.get(sql)
    if known is None:
        found = _TABLE.search(sql)
        known = found is None or found.group(1).lower() in _KEPT_TABLES
        if len(_known) < 4096:
            _known[sql] = known
    return known
