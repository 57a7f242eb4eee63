"""Numbers of nodes, files and handles: never given twice, and free of a write each.

They are taken from the settings in blocks. What is left of a block when its process ends is never
used: there are 2^63 of them. Only a number from a block that was taken in a transaction that was
rolled back, and so belongs to nothing, may be given again by another process.
"""

from __future__ import annotations

from typing import Final

from ckptgate.errors import UnusableError
from ckptgate_adapters.sqlite_spool.connection import Database

__all__ = ["NEXT_FILE", "NEXT_HANDLE", "NEXT_NODE", "Numbers"]

NEXT_NODE: Final = "next_node"
NEXT_FILE: Final = "next_file"
NEXT_HANDLE: Final = "next_handle"
_BLOCK: Final = 1024


class Numbers:
    """One sequence; *key* is the setting with the first number that nobody took. Any thread."""

    def __init__(self, db: Database, key: str) -> None:
        self._db = db
        self._key = key
        self._next = 0
        self._end = 0
        self._floor = 0
        self._taken_in = -1
        db.on_rollback(self._forget)

    def take(self) -> int:
        """The next number."""
        with self._db.lock:
            if self._next >= self._end:
                with self._db.joined:
                    self._take_block()
            self._next += 1
            return self._next - 1

    def skip(self, number: int) -> None:
        """Never give *number*, which a caller chose, nor a smaller one."""
        with self._db.lock:
            self._db.run(
                "UPDATE meta SET value = max(CAST(value AS INTEGER), ?) WHERE key = ?",
                (number + 1, self._key),
            )
            if number >= self._next:
                self._next = self._end = 0

    def _take_block(self) -> None:
        row = self._db.changed(
            "UPDATE meta SET value = max(CAST(value AS INTEGER), ?) + ? WHERE key = ?"
            " RETURNING value",
            (self._floor, _BLOCK, self._key),
        )
        if row is None:
            msg = f"the spool has no setting {self._key!r}: {self._db.path}"
            raise UnusableError(msg, subject=self._db.path)
        self._end = int(row[0])
        self._next = self._end - _BLOCK
        self._taken_in = self._db.serial

    def _forget(self) -> None:
        """A rollback: if the block was taken in it, another process may take the same one."""
        if self._taken_in == self._db.serial:
            self._floor = max(self._floor, self._next)
            self._next = self._end = 0
