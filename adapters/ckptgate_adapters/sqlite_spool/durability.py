"""Surviving a power loss: fsync of the journal, and moving it into the database off the hot path.

Thread rule: any thread; one fsync runs at a time, without the connection's lock.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from typing import Final

from ckptgate.errors import CkptError
from ckptgate_adapters.sqlite_spool.connection import WAL_BYTES_MAX, connect
from ckptgate_adapters.sqlite_spool.failures import from_os

__all__ = ["Durability", "sync_directory"]

_log = logging.getLogger(__name__)


class Durability:
    """Makes committed transactions durable.

    Why an fsync of the `-wal` file is enough: a committed transaction's frames are in one of two
    places. Either still in the `-wal` file, which is synced here. Or a checkpoint moved them into
    the database: with `synchronous=NORMAL` SQLite syncs the `-wal` before it copies a frame and
    the database before it records the frames as moved, and only a journal whose frames are all
    recorded so is begun anew (its new header is synced, too). So at any moment what isn't durable
    in the database is in the present `-wal` file. That file isn't removed while a connection is
    open, and its directory entry is synced once.

    The `-wal` file is opened for each call: no lock of SQLite lies on it. (The database's and the
    `-shm` file must never be opened beside SQLite: closing them would drop its POSIX locks.)
    """

    def __init__(self, path: str) -> None:
        self._path: Final = path
        self._wal: Final = path + "-wal"
        self._lock = threading.Lock()
        self._is_entry_synced = False
        self._failure: CkptError | None = None
        self._connection: sqlite3.Connection | None = None

    def sync(self) -> None:
        """Return when everything that is committed by now survives a power loss.

        Raises:
            UnusableError: an fsync failed; for good, since the kernel then forgets which pages it
                could not write, and a later success would say nothing.
            FullError: the file system found only now that it has no space; for good, too.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            try:
                size = self._sync_files()
            except OSError as exc:
                self._failure = from_os(exc, self._wal, "fsync the spool's journal")
                raise self._failure from exc
            if size >= WAL_BYTES_MAX:
                self._checkpoint()

    def move_journal(self) -> None:
        """Move the journal into the database; the next transaction begins it anew."""
        with self._lock:
            self._checkpoint()

    def close(self) -> None:
        """Close the connection that checkpoints use."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _sync_files(self) -> int:
        """Sync the journal; returns its size in bytes."""
        try:
            fd = os.open(self._wal, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            # Everything was moved into the database by whoever closed it last.
            return 0
        try:
            os.fsync(fd)
            size = os.fstat(fd).st_size
        finally:
            os.close(fd)
        if not self._is_entry_synced:
            sync_directory(os.path.dirname(self._wal))
            self._is_entry_synced = True
        return size

    def _checkpoint(self) -> None:
        """Move what no reader needs into the database; a second connection, so nobody waits.

        Nothing depends on it: if it fails the journal only stays long.
        """
        try:
            if self._connection is None:
                self._connection = connect(self._path)
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except sqlite3.Error as exc:
            _log.warning("checkpoint-failed spool=%s error=%s", self._path, exc)


def sync_directory(path: str) -> None:
    """Make the names in the directory *path* durable; raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
