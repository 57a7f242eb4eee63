"""Where the store has what a plain path means here, while the queue is still to be worked off.

Owns the rule: what was removed, made or moved here isn't asked for under its present path before
the store has come so far. A rename is done in the store a moment before it leaves the queue, so
what it moves is looked for where it was, then where it goes: in this order it can't slip by. Any
thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ckptgate.errors import MissingError
from ckptgate.ports.spool import PlainOpKind, PlainOpRow
from ckptgate.ports.store import PlainEntry
from ckptgate.vfs.context import Context

__all__ = ["Queue", "read", "stat"]

_REMOVALS = frozenset({PlainOpKind.REMOVE, PlainOpKind.RMDIR})
_T = TypeVar("_T")


class Queue:
    """The queue as it was when this was made. A value."""

    def __init__(self, ctx: Context) -> None:
        self._rows = ctx.spool.plain_ops()
        self._removed = {row.path for row in self._rows if row.op in _REMOVALS}
        self._has_more = any(
            row.op in {PlainOpKind.RENAME, PlainOpKind.MKDIR} for row in self._rows
        )
        self._named = {path for row in self._rows for path in (row.path, row.to)}
        self._renames = [row for row in self._rows if row.op is PlainOpKind.RENAME]

    def paths(self, path: str) -> list[str]:
        """Where the store may have it, in the order in which to look; none: it has nothing."""
        if not self._has_more:
            return [] if path in self._removed else [path]
        here, moved = path, list[str]()
        for at in reversed(range(len(self._rows))):
            row = self._rows[at]
            if row.op is PlainOpKind.RENAME and _is_in(here, row.to):
                # There may still be what is removed or moved away before this rename.
                if not any(_ends(before, here) for before in self._rows[:at]):
                    moved.append(here)
                here = row.path + here[len(row.to) :]
            elif _ends(row, here):
                return []
        return [here, *reversed(moved)]

    def touches(self, path: str) -> bool:
        """Whether something in it is about this very path, or moves a directory above it."""
        return path in self._named or any(
            _is_in(path, row.to) or _is_in(path, row.path) for row in self._renames
        )

    def ends_with_put(self, path: str, ino: int) -> bool:
        """Whether the last of it that is about this path brings the present bytes of *ino* there.

        Of a file that was renamed away and back, what removes the name is behind an earlier one.
        """
        for row in reversed(self._rows):
            if row.op is PlainOpKind.PUT and (row.path, row.ino) == (path, ino):
                return True
            if row.op is PlainOpKind.RENAME or row.path == path:
                return False
        return False

    def reaches(self, path: str) -> bool:
        """Whether something in it is about this path, moves it, or is about what is below it."""
        return self.touches(path) or any(_is_in(named, path) for named in self._named)


def _is_in(path: str, directory: str) -> bool:
    return path == directory or path.startswith(f"{directory}/")


def _ends(row: PlainOpRow, path: str) -> bool:
    """Whether the store has nothing of what was there before, once this is done."""
    if row.op is PlainOpKind.REMOVE:
        return path == row.path
    moves = {PlainOpKind.RMDIR, PlainOpKind.MKDIR, PlainOpKind.RENAME}
    return row.op in moves and _is_in(path, row.path)


def stat(ctx: Context, path: str) -> PlainEntry | None:
    """What the store has of it, None for nothing. May block."""
    for other in Queue(ctx).paths(path):
        entry = ctx.catalog.plain_stat(other)
        if entry is not None:
            return entry
    return None


def read(ctx: Context, path: str, call: Callable[[str], _T]) -> _T:
    """What *call* gives for the path where the store has it. May block.

    Raises:
        MissingError: it has it nowhere.
    """
    paths = Queue(ctx).paths(path) or [path]
    for other in paths[:-1]:
        try:
            return call(other)
        except MissingError:
            continue
    return call(paths[-1])
