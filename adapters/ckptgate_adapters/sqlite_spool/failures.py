"""The one translation of SQLite's and the system's errors into ckptgate's; any thread."""

from __future__ import annotations

import errno
import os
import sqlite3
import tempfile
from typing import Final

from ckptgate.errors import BusyError, CkptError, ExistsError, FullError, UnusableError, UsageError

__all__ = ["from_os", "from_sqlite", "holder"]

_FREE_HINT: Final = "free space, or name another directory with --spool; nothing staged was lost"
_KEEP_HINT: Final = "keep the directory as evidence, and name another one with --spool"
_TAKEN: Final = frozenset(
    {
        sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY,
        sqlite3.SQLITE_CONSTRAINT_ROWID,
        sqlite3.SQLITE_CONSTRAINT_UNIQUE,
    }
)
_PROBE_BYTES: Final = 64 << 10
"""What SQLite writes at a time is less."""
_LOCK_WORDS: Final = 8
_WRITE_LOCK: Final = 120
"""The byte of the shared index that SQLite's writers lock (WAL_WRITE_LOCK)."""
_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def from_sqlite(error: sqlite3.Error, path: str) -> CkptError:
    """What *error*, raised by the database file *path*, means to a caller.

    An I/O error on a full file system is a full disk: SQLite says so for its own writes, but not
    where it extends the shared index, nor of a quota.
    """
    # The lowest eight bits are the error's class, the rest its details.
    extended = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    match extended & 0xFF:
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            pid = holder(path)
            who = f"process {pid}" if pid else "another process"
            msg = f"the spool's database is in use by {who} for too long: {path}"
            return BusyError(msg, subject=path, hint=f"fuser -v {path}")
        case sqlite3.SQLITE_FULL:
            return _full(path)
        case sqlite3.SQLITE_IOERR if number := _lacking(path):
            return _full(path, number)
        case sqlite3.SQLITE_READONLY:
            msg = f"the spool's database cannot be written: {path} ({error})"
            return UnusableError(
                msg, subject=path, hint="chown or remount the spool", errno_value=errno.EROFS
            )
        case sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM | sqlite3.SQLITE_AUTH:
            msg = f"the spool's database cannot be opened: {path} ({error})"
            return UnusableError(
                msg,
                subject=path,
                hint="check the spool's owner and modes",
                errno_value=errno.EACCES,
            )
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            msg = f"the spool's database is damaged or no database: {path} ({error})"
            return UnusableError(msg, subject=path, hint=_KEEP_HINT)
        case sqlite3.SQLITE_CONSTRAINT if extended in _TAKEN:
            return ExistsError(f"the spool has such a row already: {error}", subject=path)
        case sqlite3.SQLITE_CONSTRAINT:
            return UsageError(f"the spool takes no such value: {error}", subject=path)
        case _:
            return UnusableError(f"the spool's database failed: {path} ({error})", subject=path)


def holder(path: str) -> int:
    """Pid of the process that has the write lock of the database *path*, 0 if that can't be told.

    To open the locked file beside SQLite would drop our own locks on it.
    """
    try:
        place = f":{os.stat(f'{path}-shm').st_ino}"
        with open("/proc/locks", encoding="ascii") as stream:
            locks = [line.split() for line in stream]
    except OSError:
        return 0
    for words in locks:
        # `1: POSIX ADVISORY WRITE PID MAJOR:MINOR:INODE START END`
        is_ours = len(words) == _LOCK_WORDS and words[5].endswith(place)
        if is_ours and words[3] == "WRITE" and int(words[6]) <= _WRITE_LOCK <= int(words[7]):
            return max(int(words[4]), 0)
    return 0


def from_os(error: OSError, path: str, doing: str) -> CkptError:
    """What the system's *error* means that came up while *doing* something with *path*."""
    if error.errno in _FULL_ERRNOS:
        return _full(path, errno.EDQUOT if error.errno == errno.EDQUOT else errno.ENOSPC)
    msg = f"cannot {doing}: {path}: {error.strerror or error}"
    return UnusableError(
        msg,
        subject=path,
        hint="check its owner and modes, or name another directory with --spool",
        errno_value=error.errno or errno.EIO,
    )


def _full(path: str, number: int = errno.ENOSPC) -> FullError:
    what = "the quota is used up" if number == errno.EDQUOT else "no space is left"
    msg = f"{what} for the spool: {path}"
    return FullError(msg, subject=path, hint=_FREE_HINT, errno_value=number)


def _lacking(path: str) -> int:
    """ENOSPC or EDQUOT if nothing can be written beside *path*, else 0."""
    try:
        if os.statvfs(os.path.dirname(path)).f_bavail == 0:
            return errno.ENOSPC
        # No call tells how much of a quota is left.
        with tempfile.TemporaryFile(dir=os.path.dirname(path)) as probe:
            os.posix_fallocate(probe.fileno(), 0, _PROBE_BYTES)
    except OSError as exc:
        return exc.errno if exc.errno in {errno.ENOSPC, errno.EDQUOT} else 0
    return 0
