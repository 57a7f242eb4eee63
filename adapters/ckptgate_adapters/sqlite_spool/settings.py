"""Transactions, settings, and the replies of mutations that were done. See `ports.spool`.

Thread rule: any thread.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Final

from ckptgate_adapters.sqlite_spool.connection import WAL_BYTES_MAX, Database
from ckptgate_adapters.sqlite_spool.durability import Durability

__all__ = ["REPLIES_KEPT", "SettingsPart", "TransactionPart"]

REPLIES_KEPT: Final = 1000
"""Replies of the newest mutations are kept; the kernel never has that many requests in flight."""
_PRUNE_EVERY: Final = 256
_SIGN_BIT: Final = 1 << 63
_RESERVE_REQUEST: Final = -1


def _signed(request: int) -> int:
    """A request id as SQLite can keep it: the kernel's are unsigned 64-bit numbers."""
    return request - (1 << 64) if request & _SIGN_BIT else request


class TransactionPart:
    """Atomicity and durability."""

    _db: Database
    _durability: Durability

    def transaction(self) -> AbstractContextManager[None]:
        """See `ports.spool.Transactions.transaction`."""
        return self._db.transaction

    def patience(self, limit_s: float) -> AbstractContextManager[None]:
        """See `ports.spool.Transactions.patience`."""
        return self._db.waits.patience(limit_s)

    def version(self) -> object:
        """See `ports.spool.Transactions.version`."""
        return self._db.version()

    def make_durable(self) -> None:
        """See `ports.spool.Transactions.make_durable`.

        Raises:
            UnusableError: an fsync failed, now or ever before in this process.
        """
        self._durability.sync()

    def reserve_space(self) -> None:
        """See `ports.spool.Transactions.reserve_space`.

        A big row is written and deleted: its pages stay in the database as free ones, and the
        journal keeps its length, in which later transactions are written over and over.
        """
        self._db.run(
            "INSERT OR REPLACE INTO replies (request, made_ns, reply) VALUES (?, 0, zeroblob(?))",
            (_RESERVE_REQUEST, WAL_BYTES_MAX),
        )
        self._db.run("DELETE FROM replies WHERE request = ?", (_RESERVE_REQUEST,))
        self._durability.move_journal()


class SettingsPart:
    """Settings and replies."""

    _db: Database
    _replies_count: int = 0

    def remembered_reply(self, request: int) -> bytes | None:
        row = self._db.one("SELECT reply FROM replies WHERE request = ?", (_signed(request),))
        return None if row is None else row[0]

    def remember_reply(self, request: int, reply: bytes) -> None:
        self._db.run(
            "INSERT OR REPLACE INTO replies (request, made_ns, reply) VALUES (?, ?, ?)",
            (_signed(request), self._db.moment(), reply),
            keeps=True,
        )
        self._replies_count += 1
        if self._replies_count % _PRUNE_EVERY == 0:
            self._db.run(
                "DELETE FROM replies WHERE made_ns <= "
                "(SELECT made_ns FROM replies ORDER BY made_ns DESC LIMIT 1 OFFSET ?)",
                (REPLIES_KEPT,),
            )

    def clear_replies(self) -> None:
        self._db.run("DELETE FROM replies")

    def get_meta(self, key: str) -> str | None:
        row = self._db.one("SELECT value FROM meta WHERE key = ?", (key,))
        return None if row is None else row[0]

    def set_meta(self, key: str, value: str) -> None:
        self._db.run("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", (key, value))

    def drop_meta(self, key: str) -> None:
        self._db.run("DELETE FROM meta WHERE key = ?", (key,))
