"""Pending values, tombstones, and the queues towards the store. See `ports.spool.Waiting`.

Thread rule: any thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ckptgate.errors import MissingError
from ckptgate.model.moves import Move
from ckptgate.ports.spool import NameOpRow, PendingRow, PlainOpRow, TombstoneRow
from ckptgate_adapters.sqlite_spool.connection import Database
from ckptgate_adapters.sqlite_spool.rows import NAME_OPS, PENDING, PLAIN_OPS, TOMBSTONES

__all__ = ["WaitingPart"]


class WaitingPart:
    """Pending values, tombstones and the queues towards the store."""

    _db: Database

    def add_pending(self, row: PendingRow) -> PendingRow:
        id_ = self._db.insert(PENDING.insert, PENDING.values(row, row.id or None))
        return dataclasses.replace(row, id=id_)

    def pending(self, *, parent: int | None = None, name: str | None = None) -> list[PendingRow]:
        conditions: list[str] = []
        values: list[Any] = []
        for column, value in (("parent", parent), ("name", name)):
            if value is not None:
                conditions.append(f"{column} = ?")
                values.append(value)
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        rows = self._db.all(f"{PENDING.select}{where} ORDER BY id", values)
        return [PENDING.build(row) for row in rows]

    def update_pending(self, id: int, **changes: object) -> None:
        """Change the named fields.

        Raises:
            MissingError: there is no such row.
        """
        if not changes:
            return
        sql, values = PENDING.update(changes)
        if self._db.changed(sql, (*values, id)) is None:
            msg = f"pending value {id} is not in the spool"
            raise MissingError(msg, subject=str(id))

    def drop_pending(self, id: int) -> None:
        self._db.run(PENDING.delete, (id,))

    def add_tombstone(self, row: TombstoneRow) -> TombstoneRow:
        id_ = self._db.insert(TOMBSTONES.insert, TOMBSTONES.values(row, row.id or None))
        return dataclasses.replace(row, id=id_)

    def tombstones(self, *, run: str | None = None) -> list[TombstoneRow]:
        if run is None:
            rows = self._db.all(f"{TOMBSTONES.select} ORDER BY id")
        else:
            rows = self._db.all(f"{TOMBSTONES.select} WHERE run = ? ORDER BY id", (run,))
        return [TOMBSTONES.build(row) for row in rows]

    def drop_tombstone(self, id: int) -> None:
        self._db.run(TOMBSTONES.delete, (id,))

    def add_name_op(self, row: NameOpRow) -> NameOpRow:
        id_ = self._db.insert(NAME_OPS.insert, NAME_OPS.values(row, row.id or None))
        return dataclasses.replace(row, id=id_)

    def name_ops(self, attempt: int) -> list[NameOpRow]:
        rows = self._db.all(f"{NAME_OPS.select} WHERE attempt = ? ORDER BY id", (attempt,))
        return [NAME_OPS.build(row) for row in rows]

    def drop_name_op(self, id: int) -> None:
        self._db.run(NAME_OPS.delete, (id,))

    def add_move(self, attempt: int, move: Move) -> None:
        self._db.run(
            'INSERT INTO moves (attempt, member, n, path, "to") VALUES (?, ?, ?, ?, ?)',
            (attempt, move.member, move.n, move.path, move.to),
        )

    def moves(self, attempt: int) -> list[Move]:
        rows = self._db.all(
            'SELECT member, n, path, "to" FROM moves WHERE attempt = ? ORDER BY id', (attempt,)
        )
        return [Move(member=member, n=n, path=path, to=to) for member, n, path, to in rows]

    def add_plain_op(self, row: PlainOpRow) -> PlainOpRow:
        id_ = self._db.insert(PLAIN_OPS.insert, PLAIN_OPS.values(row, row.id or None))
        return dataclasses.replace(row, id=id_)

    def plain_ops(self) -> Sequence[PlainOpRow]:
        return [PLAIN_OPS.build(row) for row in self._db.all(f"{PLAIN_OPS.select} ORDER BY id")]

    def drop_plain_op(self, id: int) -> None:
        self._db.run(PLAIN_OPS.delete, (id,))

    def watch_run(self, run: str) -> None:
        self._db.run("INSERT OR IGNORE INTO runs VALUES (?)", (run,))

    def watched_runs(self) -> tuple[str, ...]:
        return tuple(row[0] for row in self._db.all("SELECT run FROM runs ORDER BY run"))
