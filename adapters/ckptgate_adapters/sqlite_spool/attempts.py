"""Attempts, ranks, and what other members did. See `ports.spool.Attempts`. Any thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Final

from ckptgate.errors import MissingError
from ckptgate.model.states import AttemptState, advance_attempt
from ckptgate.ports.recording import KEPT_META
from ckptgate.ports.rows import PHASES_META
from ckptgate.ports.spool import (
    BEGAN_META,
    JOINING_META,
    VOTED_META,
    WRITERS_META,
    AttemptRow,
    NodeRow,
)
from ckptgate_adapters.sqlite_spool.connection import Database
from ckptgate_adapters.sqlite_spool.rows import ATTEMPTS, NODES

__all__ = ["AttemptPart"]

_DROP_BY_ATTEMPT: Final = (
    "DELETE FROM rank_commits WHERE attempt = ?",
    "DELETE FROM writer_ranks WHERE attempt = ?",
    "DELETE FROM seen WHERE attempt = ?",
    "DELETE FROM name_ops WHERE attempt = ?",
    "DELETE FROM moves WHERE attempt = ?",
)
_KEPT_BY_ATTEMPT: Final = (
    WRITERS_META,
    JOINING_META,
    BEGAN_META,
    VOTED_META,
    PHASES_META,
    *KEPT_META,
)
# By path: a directory's path is a prefix of what is in it, so parents come first.
_TREE: Final = (
    "WITH RECURSIVE walk (path, ino) AS ("  # noqa: S608 - own columns
    " SELECT m.name, m.ino FROM attempts AS a JOIN names AS m ON m.parent = a.root WHERE a.id = ?"
    " UNION ALL"
    " SELECT w.path || '/' || m.name, m.ino FROM walk AS w JOIN names AS m ON m.parent = w.ino)"
    f" SELECT w.path, {NODES.qualified('n')}"
    " FROM walk AS w JOIN nodes AS n ON n.ino = w.ino ORDER BY w.path"
)
_CONDITIONS: Final = frozenset({"run", "run_ino", "name", "state"})
"""Fields by which attempts are looked for."""


class AttemptPart:
    """Attempts, ranks, what other members did."""

    _db: Database

    def add_attempt(self, attempt: AttemptRow) -> AttemptRow:
        with self._db.joined:
            values = ATTEMPTS.values(attempt, attempt.id or None)
            id_ = self._db.insert(ATTEMPTS.insert, values, keeps=True)
            added = attempt if attempt.id else dataclasses.replace(attempt, id=id_)
            self._db.kept().found.clear()
            return self._db.keep(self._db.kept().attempts, id_, added)

    def attempt(self, id: int) -> AttemptRow | None:
        db = self._db
        with db.lock:
            attempts = db.kept().attempts
            if id in attempts:
                return attempts[id]
            row = db.one(ATTEMPTS.by_key, (id,))
            return db.keep(attempts, id, None if row is None else ATTEMPTS.build(row))

    def update_attempt(self, id: int, **changes: object) -> AttemptRow:
        """See `ports.spool.Attempts.update_attempt`.

        Raises:
            MissingError: there is no such attempt.
            RefusedError: the change of state is illegal; nothing was changed.
        """
        with self._db.joined:
            old = self.attempt(id)
            if old is None:
                raise _missing(id)
            if not changes:
                return old
            sql, values = ATTEMPTS.update(changes)
            if "state" in changes:
                advance_attempt(old.state, AttemptState(str(changes["state"])))
            row = self._db.changed(sql, (*values, id), keeps=True)
            assert row is not None
            if not _CONDITIONS.isdisjoint(changes):
                self._db.kept().found.clear()
            return self._db.keep(self._db.kept().attempts, id, ATTEMPTS.build(row))

    def drop_attempt(self, id: int) -> None:
        with self._db.transaction:
            for sql in _DROP_BY_ATTEMPT:
                self._db.run(sql, (id,))
            for key in _KEPT_BY_ATTEMPT:
                self._db.run("DELETE FROM meta WHERE key = ?", (key.format(attempt=id),))
            self._db.run(ATTEMPTS.delete, (id,))

    def attempts(
        self,
        *,
        run: str | None = None,
        run_ino: int | None = None,
        name: str | None = None,
        states: Iterable[AttemptState] | None = None,
    ) -> list[AttemptRow]:
        wanted = None if states is None else tuple(states)
        key = (run, run_ino, name, wanted)
        db = self._db
        with db.lock:
            known = db.kept().found.get(key)
            if known is not None:
                rows = map(self.attempt, known)
                return [row for row in rows if row is not None]
            found = self._find(*key)
            kept = db.kept()
            db.keep(kept.found, key, tuple(row.id for row in found))
            for row in found:
                db.keep(kept.attempts, row.id, row)
            return found

    def _find(
        self,
        run: str | None,
        run_ino: int | None,
        name: str | None,
        states: tuple[AttemptState, ...] | None,
    ) -> list[AttemptRow]:
        conditions: list[str] = []
        values: list[Any] = []
        for column, value in (("run", run), ("run_ino", run_ino), ("name", name)):
            if value is not None:
                conditions.append(f"{column} = ?")
                values.append(value)
        if states is not None:
            conditions.append(f"state IN ({', '.join('?' * len(states))})")
            values += [state.value for state in states]
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        rows = self._db.all(f"{ATTEMPTS.select}{where} ORDER BY id", values)
        return [ATTEMPTS.build(row) for row in rows]

    def attempt_by_id(self, run: str, attempt: str) -> AttemptRow | None:
        row = self._db.one(
            f"{ATTEMPTS.select} WHERE run = ? AND attempt = ? ORDER BY id DESC LIMIT 1",
            (run, attempt),
        )
        return None if row is None else ATTEMPTS.build(row)

    def newest_commit(self, run_ino: int) -> int:
        row = self._db.one(
            "SELECT MAX(seal_index) FROM attempts WHERE run_ino = ? AND state = ?",
            (run_ino, AttemptState.COMMITTED.value),
        )
        return -1 if row is None or row[0] is None else int(row[0])

    def tree(self, attempt: int) -> list[tuple[str, NodeRow]]:
        return [(row[0], NODES.build(row[1:])) for row in self._db.all(_TREE, (attempt,))]

    def add_rank_commit(self, attempt: int, rank: int) -> None:
        self._db.run("INSERT OR IGNORE INTO rank_commits VALUES (?, ?)", (attempt, rank))

    def rank_commits(self, attempt: int) -> tuple[int, ...]:
        rows = self._db.all(
            "SELECT rank FROM rank_commits WHERE attempt = ? ORDER BY rank", (attempt,)
        )
        return tuple(row[0] for row in rows)

    def add_writer_rank(self, attempt: int, rank: int) -> None:
        self._db.run("INSERT OR IGNORE INTO writer_ranks VALUES (?, ?)", (attempt, rank))

    def writer_ranks(self, attempt: int) -> tuple[int, ...]:
        rows = self._db.all(
            "SELECT rank FROM writer_ranks WHERE attempt = ? ORDER BY rank", (attempt,)
        )
        return tuple(row[0] for row in rows)

    def seen_count(self, attempt: int, member: str, what: str) -> int:
        row = self._db.one(
            "SELECT count FROM seen WHERE attempt = ? AND member = ? AND what = ?",
            (attempt, member, what),
        )
        return 0 if row is None else row[0]

    def set_seen_count(self, attempt: int, member: str, what: str, count: int) -> None:
        self._db.run(
            "INSERT OR REPLACE INTO seen VALUES (?, ?, ?, ?)", (attempt, member, what, count)
        )

    def seen_members(self, attempt: int) -> tuple[str, ...]:
        rows = self._db.all(
            "SELECT DISTINCT member FROM seen WHERE attempt = ? ORDER BY member", (attempt,)
        )
        return tuple(row[0] for row in rows)


def _missing(attempt: int) -> MissingError:
    return MissingError(f"attempt {attempt} is not in the spool", subject=str(attempt))
