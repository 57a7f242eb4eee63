"""The spool on SQLite: opening, creating, and all parts put together.

It owns what makes a directory a spool of one store and one member. Thread rule: as the port's; one
object serves all threads of a process, each process has its own.
"""

from __future__ import annotations

import os
import re
import secrets
import sqlite3
import time
from datetime import UTC, datetime
from typing import Final

from ckptgate.errors import UnusableError
from ckptgate.model.ids import check_member_id
from ckptgate.ports.spool import ROOT_INO, NodeKind, NodeRow, Spool
from ckptgate_adapters.sqlite_spool import schema
from ckptgate_adapters.sqlite_spool.attempts import AttemptPart
from ckptgate_adapters.sqlite_spool.connection import BUSY_TIMEOUT_S, Database, connect
from ckptgate_adapters.sqlite_spool.creating import CONNECTION_DDL
from ckptgate_adapters.sqlite_spool.durability import Durability
from ckptgate_adapters.sqlite_spool.failures import from_os, from_sqlite
from ckptgate_adapters.sqlite_spool.files import DATA_DIR, DATA_FANOUT, FilePart
from ckptgate_adapters.sqlite_spool.generation import Generation
from ckptgate_adapters.sqlite_spool.handles import HandlePart
from ckptgate_adapters.sqlite_spool.nodes import NodePart
from ckptgate_adapters.sqlite_spool.noted import NotedCloses
from ckptgate_adapters.sqlite_spool.numbers import NEXT_FILE, NEXT_HANDLE, NEXT_NODE, Numbers
from ckptgate_adapters.sqlite_spool.place import check_local, check_unused, find_database, prepare
from ckptgate_adapters.sqlite_spool.removal import Removal
from ckptgate_adapters.sqlite_spool.rows import NODES
from ckptgate_adapters.sqlite_spool.settings import SettingsPart, TransactionPart
from ckptgate_adapters.sqlite_spool.usage import Usage
from ckptgate_adapters.sqlite_spool.waiting import WaitingPart

__all__ = ["SqliteSpool", "make_member_id"]

_HOST_CHARS_MAX: Final = 60
_SQLITE_MIN: Final = (3, 37, 0)
"""STRICT tables and RETURNING."""
_RETRY_S: Final = 0.02


def make_member_id(host: str) -> str:
    """A new member id for a spool on *host*: `<host>-<8 hex>`."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", host)[:_HOST_CHARS_MAX] or "host"
    return check_member_id(f"{name}-{secrets.token_hex(4)}")


class SqliteSpool(
    TransactionPart, SettingsPart, NodePart, FilePart, AttemptPart, HandlePart, WaitingPart
):
    """A `Spool` in a directory: `spool.db` (SQLite, WAL) and `data/<xx>/<file id>`."""

    def __init__(self, path: str, database: Database) -> None:
        self._path = path
        self._data = os.path.join(path, DATA_DIR)
        self._db = database
        self._usage = Usage(f"{self._data}/{number:02x}" for number in range(DATA_FANOUT))
        self._durability = Durability(database.path)
        self._removal = Removal(self._durability.sync)
        self._node_numbers = Numbers(database, NEXT_NODE)
        self._file_numbers = Numbers(database, NEXT_FILE)
        self._handle_numbers = Numbers(database, NEXT_HANDLE)
        self._noted = NotedCloses(path)

    @classmethod
    def create_or_open(cls, path: str, *, store_url: str, host: str) -> SqliteSpool:
        """Open the spool *path* of the store *store_url*; make it if there is none.

        Args:
            path: directory; missing parents are made, with mode 0700.
            store_url: the store whose checkpoints are staged; a spool serves one for ever.
            host: this machine's name, for the member id.

        Raises:
            UnusableError: it is a file, unwritable, damaged, of another store, or not on a local
                disk.
            FormatVersionError: of another format version.
            FullError: no space.
            BusyError: its database was locked for 30 s.
        """
        path = _checked(path)
        database = prepare(path)
        return cls(path, _opened(database, store_url=store_url, host=host))

    @classmethod
    def attach(cls, path: str) -> SqliteSpool:
        """Open the existing spool *path*, as a second process does.

        Raises:
            UnusableError: there is none, or it is damaged or not on a local disk.
            FormatVersionError: of another format version.
            BusyError: its database was locked for 30 s.
        """
        path = _checked(path)
        return cls(path, _opened(find_database(path), store_url=None, host=""))

    @property
    def path(self) -> str:
        """The spool's directory, absolute."""
        return self._path

    def close(self) -> None:
        """Close this process's connections; a repeat is a success."""
        self._removal.finish()
        self._durability.close()
        self._noted.close()
        self._db.close()

    def __repr__(self) -> str:
        return f"SqliteSpool({self._path!r})"


def _checked(path: str) -> str:
    """*path* as an absolute one, on a local disk."""
    if not path or "\0" in path:
        msg = f"not a path: {path!r}"
        raise UnusableError(msg, subject=path, hint="name a local directory with --spool")
    if sqlite3.sqlite_version_info < _SQLITE_MIN:
        msg = (
            f"SQLite {sqlite3.sqlite_version} is too old, {'.'.join(map(str, _SQLITE_MIN))} will do"
        )
        raise UnusableError(msg, subject="sqlite3", hint="use a newer Python or SQLite library")
    path = os.path.abspath(path)
    check_local(path)
    return path


def _opened(database: str, *, store_url: str | None, host: str) -> Database:
    try:
        connection = connect(database)
    except sqlite3.Error as exc:
        raise from_sqlite(exc, database) from exc
    try:
        generation = Generation(os.path.dirname(database))
    except OSError as exc:
        connection.close()
        raise from_os(exc, database, "map the spool's generation") from exc
    try:
        _use_wal(connection, database)
        meta = _meta(connection, database, store_url=store_url, host=host)
        connection.executescript(CONNECTION_DDL)
        if store_url is not None and meta["store"] != store_url:
            msg = (
                f"the spool {os.path.dirname(database)} belongs to the store {meta['store']}, "
                f"not to {store_url}"
            )
            raise UnusableError(
                msg, subject=database, hint="name another directory with --spool, or that store"
            )
    except sqlite3.Error as exc:
        connection.close()
        raise from_sqlite(exc, database) from exc
    except BaseException:
        # An interrupt, too, must not keep the connection, which locks the database.
        connection.close()
        raise
    return Database(connection, database, generation)


def _use_wal(connection: sqlite3.Connection, path: str) -> None:
    """Switch the journal's mode, which the file keeps.

    SQLite doesn't wait here by itself while another process opens the new file too.
    """
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            break
        except sqlite3.OperationalError as exc:
            is_busy = exc.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not is_busy or time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_S)
    if mode != "wal":
        msg = f"the spool's file system cannot share a database in WAL mode: {path}"
        raise UnusableError(msg, subject=path, hint="name a local directory with --spool")


def _meta(
    connection: sqlite3.Connection, path: str, *, store_url: str | None, host: str
) -> dict[str, str]:
    """The settings; a new spool gets its own first, unless no store was named."""
    if store_url is not None and schema.is_empty(connection):
        connection.execute("BEGIN IMMEDIATE")
        try:
            # Another process may have been faster.
            if schema.is_empty(connection):
                check_unused(os.path.dirname(path))
                _create(connection, store_url, host)
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
    return schema.check(connection, path)


def _create(connection: sqlite3.Connection, store_url: str, host: str) -> None:
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    schema.create(
        connection,
        {
            "format": str(schema.SPOOL_FORMAT),
            "member": make_member_id(host),
            "store": store_url,
            "host": host,
            "created_at": now,
            NEXT_NODE: str(ROOT_INO + 1),
            NEXT_FILE: "1",
            NEXT_HANDLE: "1",
        },
    )
    time_ns = time.time_ns()
    root = NodeRow(
        ino=ROOT_INO,
        kind=NodeKind.DIR,
        attempt=None,
        mode=0o755,
        uid=os.getuid(),
        gid=os.getgid(),
        size=0,
        mtime_ns=time_ns,
        ctime_ns=time_ns,
        plain_path="",
    )
    connection.execute(NODES.insert, NODES.values(root, ROOT_INO))


_: type[Spool] = SqliteSpool
