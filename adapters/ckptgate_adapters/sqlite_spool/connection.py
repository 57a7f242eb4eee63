"""One connection to the spool's database, shared by all threads of a process under one lock.

It owns the rules of atomicity: a transaction holds the lock and SQLite's write lock from its first
call to its end; an inner one is a savepoint, so what it did is undone by itself if an exception
leaves it; after-effects (removal of spool files) run once the outermost one is committed. Who waits
for another process's write lock holds no lock: other threads go on reading. And the rule of what
may be kept in memory (`kept`): every change of a process is in a transaction, whose commit changes
the spool's generation.

Thread rule: any thread. Not to be carried over a fork.
"""

from __future__ import annotations

import errno
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, TypeAlias, TypeVar
from urllib.parse import quote

from ckptgate.errors import CkptError, InvalidNameError, UnusableError
from ckptgate_adapters.sqlite_spool.failures import from_sqlite
from ckptgate_adapters.sqlite_spool.generation import Generation
from ckptgate_adapters.sqlite_spool.kept import KeptRows, changes_kept, is_change, put
from ckptgate_adapters.sqlite_spool.write_lock import BUSY_TIMEOUT_S, Waits, is_busy

__all__ = ["BUSY_TIMEOUT_S", "WAL_BYTES_MAX", "Database", "Values", "connect"]

Values: TypeAlias = tuple[Any, ...]
"""One row as SQLite gives it."""

WAL_BYTES_MAX: Final = 8 * 1024 * 1024
"""Size of the journal from which `make_durable` moves it into the database; kept as a reserve."""
_STATEMENTS_CACHED: Final = 512
# Far above what make_durable lets gather: a checkpoint inside of a commit makes a caller wait for
# two fsyncs, so it is only the last resort of a process that never calls make_durable.
_AUTOCHECKPOINT_PAGES: Final = 65536
_CACHE_KIB: Final = 32768
_V = TypeVar("_V")
_JOINED: Final = -1
"""Mark of an inner transaction without a savepoint."""
_PRAGMAS: Final = (
    # A commit writes whole pages: a create touches about ten, of a few rows each. (A database that
    # exists keeps its own size.)
    "PRAGMA page_size = 1024",
    "PRAGMA synchronous = NORMAL",
    f"PRAGMA wal_autocheckpoint = {_AUTOCHECKPOINT_PAGES}",
    f"PRAGMA journal_size_limit = {WAL_BYTES_MAX}",
    f"PRAGMA cache_size = -{_CACHE_KIB}",
    "PRAGMA temp_store = MEMORY",
    # Overwriting freed pages with zeroes protects nothing here and doubles the cost of a delete.
    "PRAGMA secure_delete = OFF",
    "PRAGMA trusted_schema = OFF",
)


def connect(path: str) -> sqlite3.Connection:
    """Open the existing database file *path* with this spool's settings.

    Raises:
        sqlite3.Error: it can't be opened.
    """
    connection = sqlite3.connect(
        f"file:{quote(path.encode('utf-8', 'surrogateescape'))}?mode=rw",
        uri=True,
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=_STATEMENTS_CACHED,
    )
    try:
        for pragma in _PRAGMAS:
            connection.execute(pragma)
    except sqlite3.Error:
        connection.close()
        raise
    return connection


class Database:
    """Statements and transactions on one connection."""

    def __init__(self, connection: sqlite3.Connection, path: str, generation: Generation) -> None:
        self.path = path
        self._connection = connection
        self._generation = generation
        self._number = generation.number
        self._kept = KeptRows()
        self.lock: Final = threading.RLock()
        """Held for the duration of a transaction; taken briefly by each statement outside."""
        self._depth = 0
        self._is_changed = False
        self._undone: CkptError | None = None
        self._after: list[Callable[[], None]] = []
        self._marks: list[int] = []
        self._on_rollback: list[Callable[[], None]] = [self._kept.clear]
        self._moment = 0
        self.waits: Final = Waits(self.lock, path)
        # SQLite's own waiting would keep the lock.
        connection.execute("PRAGMA busy_timeout = 0")
        self.serial = 0
        """How many transactions were begun."""
        self.transaction: Final = _Transaction(self)
        """Entered for one atomic change; one object serves all threads."""
        self.joined: Final = _Joined(self)
        """The same for calls whose last statement is their only one that changes anything and may
        fail: inside of a transaction they need no savepoint."""

    def one(self, sql: str, values: Sequence[Any] = ()) -> Values | None:
        """The first row of a query."""
        assert not is_change(sql), sql
        with self.lock:
            return self._first(self._execute(sql, values))

    def all(self, sql: str, values: Sequence[Any] = ()) -> list[Values]:
        """All rows of a query."""
        assert not is_change(sql), sql
        with self.lock:
            try:
                return self._execute(sql, values).fetchall()
            except sqlite3.Error as exc:
                raise self._translated(exc) from exc

    def changed(
        self, sql: str, values: Sequence[Any] = (), *, keeps: bool = False
    ) -> Values | None:
        """Execute a change with RETURNING; its first row.

        Args:
            sql: the statement.
            values: its parameters.
            keeps: the caller brings the kept rows in line itself.
        """
        with self.lock:
            # Whoever has the lock while there is a transaction is in it.
            if self._depth:
                return self._first(self._change(sql, values, keeps=keeps))
        with self.joined:
            return self._first(self._change(sql, values, keeps=keeps))

    def run(self, sql: str, values: Sequence[Any] = (), *, keeps: bool = False) -> int:
        """Execute a change; returns how many rows it changed. *keeps*: see `changed`."""
        with self.lock:
            if self._depth:
                return self._change(sql, values, keeps=keeps).rowcount
        with self.joined:
            return self._change(sql, values, keeps=keeps).rowcount

    def insert(self, sql: str, values: Sequence[Any], *, keeps: bool = False) -> int:
        """Insert one row; returns its row id. *keeps*: see `changed`."""
        with self.joined:
            return self._change(sql, values, keeps=keeps).lastrowid or 0

    def kept(self) -> KeptRows:
        """The rows that are kept and valid; with the lock held until they were used."""
        kept = self._kept
        if not self._depth:
            value = self._number.cell[0]
            if value != kept.generation:
                kept.clear()
                kept.generation = -1 if value & 1 else value
        return kept

    def keep(self, table: dict[Any, Any], key: object, value: _V) -> _V:
        """Keep a row that was read or changed since `kept()`, with the lock held throughout."""
        if self._depth or self._number.cell[0] == self._kept.generation:
            put(table, key, value)
        return value

    def _change(self, sql: str, values: Sequence[Any], *, keeps: bool) -> sqlite3.Cursor:
        cursor = self._execute(sql, values)
        self._is_changed = True
        if not keeps and changes_kept(sql):
            self._kept.clear()
        return cursor

    def _first(self, cursor: sqlite3.Cursor) -> Values | None:
        try:
            row: Values | None = cursor.fetchone()
        except sqlite3.Error as exc:
            raise self._translated(exc) from exc
        return row

    def _execute(self, sql: str, values: Sequence[Any]) -> sqlite3.Cursor:
        # In a transaction that SQLite itself rolled back, each would be one of its own.
        if self._undone is not None:
            raise self._undone
        try:
            return self._connection.execute(sql, values)
        except sqlite3.OperationalError as exc:
            if self._depth or not is_busy(exc):
                raise self._translated(exc) from exc
        except (sqlite3.Error, UnicodeEncodeError, OverflowError) as exc:
            raise self._translated(exc) from exc
        # Reading waits for nobody's transaction: somebody recovers the database, or has all of it.
        try:
            return self.waits.execute(self._connection, sql, values)
        except sqlite3.Error as exc:
            raise self._translated(exc) from exc

    def after_commit(self, effect: Callable[[], None]) -> None:
        """Call *effect* when the present transaction is committed, without the lock.

        Must be called inside a transaction. A rollback forgets it.
        """
        self._after.append(effect)

    def on_rollback(self, effect: Callable[[], None]) -> None:
        """Call *effect* at every rollback, with the lock held: drop what was kept in memory."""
        self._on_rollback.append(effect)

    def close(self) -> None:
        """Close the connection; later calls raise UnusableError. Closing again is a success."""
        with self.lock:
            try:
                self._connection.close()
                self._kept.clear()
                self._kept.generation = -1
                self._generation.close()
            except sqlite3.Error as exc:
                raise from_sqlite(exc, self.path) from exc

    def moment(self) -> int:
        """Wall-clock time in ns, but greater than any before in this process: an order of rows."""
        with self.lock:
            self._moment = max(time.time_ns(), self._moment + 1)
            return self._moment

    def version(self) -> int:
        """Another value after any committed change."""
        return self._generation.value()

    def join(self) -> bool:
        """Join the transaction that this thread is in; False: it is in none. `_Joined` only."""
        self.lock.acquire()
        if self._depth:
            self._marks.append(_JOINED)
            return True
        self.lock.release()
        return False

    def part(self) -> bool:
        """End a `join`; False: what ends is a transaction of its own. `_Joined` only."""
        if self._marks[-1] != _JOINED:
            return False
        self._marks.pop()
        self.lock.release()
        return True

    def begin(self) -> None:
        """Take the lock and start a transaction or an inner one; `_Transaction` only."""
        self.lock.acquire()
        try:
            if self._depth == 0:
                self._begin_change()
                self.serial += 1
                self._is_changed = False
                self._revalidate()
            else:
                if self._undone is not None:
                    raise self._undone
                self._connection.execute("SAVEPOINT inner_one")
        except sqlite3.Error as exc:
            failure = self._translated(exc)
            self.lock.release()
            raise failure from exc
        except BaseException:
            # A signal's exception may come just after BEGIN.
            if self._depth == 0 and self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            self.lock.release()
            raise
        self._marks.append(len(self._after))
        self._depth += 1

    def _begin_change(self) -> None:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as exc:
            if not is_busy(exc):
                raise
            self.waits.execute(self._connection, "BEGIN IMMEDIATE")

    def end(self, *, is_failed: bool) -> None:
        """Finish what `begin` began; `_Transaction` only.

        Raises:
            CkptError: it could not be committed, and was rolled back.
        """
        effects: list[Callable[[], None]] = []
        try:
            self._depth -= 1
            mark = self._marks.pop()
            if is_failed or self._undone is not None:
                self._roll_back(mark, is_failed=is_failed)
            elif self._depth:
                self._connection.execute("RELEASE inner_one")
            else:
                self._commit()
                effects, self._after = self._after, []
        except sqlite3.Error as exc:
            raise self._translated(exc) from exc
        finally:
            self.lock.release()
        for effect in effects:
            effect()

    def _revalidate(self) -> None:
        """The write lock was taken: nobody else can change anything until it is given back."""
        value = self._generation.settled()
        if value != self._kept.generation:
            self._kept.clear()
            self._kept.generation = value

    def _commit(self) -> None:
        try:
            if self._is_changed:
                self._generation.begin()
            self._connection.execute("COMMIT")
        except sqlite3.Error as exc:
            failure = self._translated(exc)
            self._roll_back(0, is_failed=True)
            raise failure from exc
        finally:
            if self._is_changed:
                self._kept.generation = self._generation.end()

    def _roll_back(self, mark: int, *, is_failed: bool) -> None:
        """Undo the present transaction or savepoint; it was left at `_depth`."""
        del self._after[mark:]
        for effect in self._on_rollback:
            effect()
        undone = self._undone
        if self._depth == 0:
            self._undone = None
        # A full disk or an I/O error may have rolled back everything already.
        if self._connection.in_transaction:
            if self._depth:
                self._connection.execute("ROLLBACK TO inner_one")
                self._connection.execute("RELEASE inner_one")
            else:
                self._connection.execute("ROLLBACK")
        if undone is not None and not is_failed:
            # The failure was swallowed inside: its caller must not take this for a success.
            raise undone

    def _translated(self, error: Exception) -> CkptError:
        if isinstance(error, UnicodeEncodeError):
            msg = f"name is not UTF-8: {error.object!r}"
            return InvalidNameError(msg, subject=repr(error.object), errno_value=errno.EILSEQ)
        if isinstance(error, OverflowError):
            return UnusableError(f"number is too large for the spool: {error}", subject=self.path)
        if not isinstance(error, sqlite3.Error):
            msg = f"not an error of SQLite: {error!r}"
            raise TypeError(msg)
        failure = from_sqlite(error, self.path)
        try:
            is_undone = self._depth > 0 and not self._connection.in_transaction
        except sqlite3.ProgrammingError:
            is_undone = False
        if is_undone:
            self._undone = failure
        return failure


class _Transaction:
    """The context manager that `Database.transaction` is; it keeps nothing itself."""

    __slots__ = ("_database",)

    def __init__(self, database: Database) -> None:
        self._database = database

    def __enter__(self) -> None:
        self._database.begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._database.end(is_failed=kind is not None)


class _Joined(_Transaction):
    """The context manager that `Database.joined` is: inside of a transaction nearly free."""

    __slots__ = ()

    def __enter__(self) -> None:
        if not self._database.join():
            self._database.begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._database.part():
            self._database.end(is_failed=kind is not None)
