"""Where a spool lies: its directories, their modes, and whether the file system will do.

Thread rule: called while a spool is opened; keeps nothing.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
from typing import Final

from ckptgate.errors import UnusableError
from ckptgate_adapters.sqlite_spool.durability import sync_directory
from ckptgate_adapters.sqlite_spool.failures import from_os
from ckptgate_adapters.sqlite_spool.files import DATA_DIR, DATA_FANOUT

__all__ = [
    "DATABASE_FILE",
    "check_local",
    "check_unused",
    "file_system_of",
    "find_database",
    "prepare",
]

DATABASE_FILE: Final = "spool.db"
_LOST_HINT: Final = "bring spool.db back, or name another directory with --spool"
_DIR_MODE: Final = 0o700
_FILE_MODE: Final = 0o600
_NETWORK: Final = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "fuse.ckptgate", "fuse.cephfs",
    "fuse.gcsfuse", "fuse.glusterfs", "fuse.juicefs", "fuse.mount-s3", "fuse.s3fs", "fuse.sshfs",
    "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "ocfs2", "orangefs", "pvfs2", "smb3",
    "smbfs", "wekafs",
})  # fmt: skip
_COPY_ON_WRITE: Final = frozenset({"bcachefs", "btrfs", "nilfs2", "zfs"})
_IN_MEMORY: Final = frozenset({"ramfs", "tmpfs"})
_MOUNTINFO: Final = "/proc/self/mountinfo"
_log = logging.getLogger(__name__)
_OCTAL: Final = re.compile(r"\\([0-7]{3})")


def file_system_of(path: str, mountinfo: str) -> tuple[str, str]:
    """(mount point, type) of the file system that *path* lies on, by the text of mountinfo.

    *path* is absolute and has no symlinks; its end may be missing.
    """
    best, kind = "", ""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        columns, kinds = left.split(" "), right.split(" ")
        if len(columns) < 5 or not kinds[0]:
            continue
        point = _OCTAL.sub(lambda found: chr(int(found[1], 8)), columns[4])
        is_below = point in {"/", path} or path.startswith(point + "/")
        # Of two mounts on one point the later one covers the other.
        if is_below and len(point) >= len(best):
            best, kind = point, kinds[0]
    return best, kind


def check_local(path: str, mountinfo: str | None = None) -> None:
    """Refuse a spool on a network file system; warn of one in memory or that copies on write.

    Raises:
        UnusableError: *path* lies on one; the message names it.
    """
    if mountinfo is None:
        try:
            with open(_MOUNTINFO, encoding="utf-8", errors="surrogateescape") as stream:
                mountinfo = stream.read()
        except FileNotFoundError:
            # Not Linux: SQLite's own test of the journal's mode has to do.
            return
    point, kind = file_system_of(os.path.realpath(path), mountinfo)
    if kind in _NETWORK:
        msg = (
            f"the spool must lie on a local disk: {path} is on {kind} (mounted on {point}), "
            "where processes cannot share a database in WAL mode"
        )
        raise UnusableError(msg, subject=path, hint="name a local directory with --spool")
    if kind in _IN_MEMORY:
        _log.warning(
            "spool-in-memory path=%r type=%s hint='what is staged is lost when the machine goes "
            "down: name a directory on a disk'",
            path,
            kind,
        )
    if kind in _COPY_ON_WRITE:
        # Each store to a mapped page needs new space there: without any it is a SIGBUS.
        _log.warning(
            "spool-copies-on-write path=%s type=%s hint='set spool_max well below its space or "
            "quota: once that is used up, the gateway stands still until some is freed'",
            path,
            kind,
        )


def prepare(path: str) -> str:
    """Make what is missing of the spool *path*: directories and an empty database file.

    Returns the path of the database file. A repeat is a success.

    Raises:
        UnusableError: it is a file, or can't be written.
        FullError: no space.
    """
    try:
        _make_directories(path)
        database = os.path.join(path, DATABASE_FILE)
        # Not opened if it is there: closing a descriptor of it would drop the locks that another
        # connection of this process has on it.
        with contextlib.suppress(FileExistsError):
            os.close(os.open(database, os.O_CREAT | os.O_EXCL | os.O_WRONLY, _FILE_MODE))
    except OSError as exc:
        raise from_os(exc, path, "make the spool") from exc
    _check_writable(path)
    _check_writable(database)
    return database


def find_database(path: str) -> str:
    """The database file of the spool *path*.

    Raises:
        UnusableError: there is no spool.
    """
    database = os.path.join(path, DATABASE_FILE)
    try:
        found = os.stat(database)
    except FileNotFoundError as exc:
        msg = f"no spool is there: {path}"
        raise UnusableError(
            msg, subject=path, hint=f"ckptgate mount --spool {path}", errno_value=errno.ENOENT
        ) from exc
    except OSError as exc:
        raise from_os(exc, path, "open the spool") from exc
    if not stat.S_ISREG(found.st_mode):
        msg = f"not the database of a spool: {database} is not a regular file"
        raise UnusableError(msg, subject=database, hint="name another directory with --spool")
    _check_writable(path)
    _check_writable(database)
    return database


def check_unused(path: str) -> None:
    """Refuse to begin a new database beside staged files: they would lose their names.

    Raises:
        UnusableError: the spool *path* holds files.
        FullError, UnusableError: it can't be read.
    """
    data = os.path.join(path, DATA_DIR)
    for i in range(DATA_FANOUT):
        try:
            found = os.listdir(f"{data}/{i:02x}")
        except OSError as exc:
            raise from_os(exc, data, "read the spool") from exc
        if found:
            msg = f"the spool's database is missing, but staged files are there: {data}"
            raise UnusableError(msg, subject=f"{data}/{i:02x}/{found[0]}", hint=_LOST_HINT)


def _make_directories(path: str) -> None:
    """Make what is missing, durably: synced once from the bottom up."""
    missing: list[str] = []
    at = path
    while not os.path.lexists(at):
        missing.append(at)
        at = os.path.dirname(at)
    data = os.path.join(path, DATA_DIR)
    changed: dict[str, None] = {}
    for directory in [*reversed(missing), data, *(f"{data}/{i:02x}" for i in range(DATA_FANOUT))]:
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, _DIR_MODE)
            changed[os.path.dirname(directory)] = None
    if not os.path.isdir(path) or not os.path.isdir(data):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    for directory in reversed(changed):
        sync_directory(directory)


def _check_writable(path: str) -> None:
    needed = os.W_OK | os.X_OK if os.path.isdir(path) else os.R_OK | os.W_OK
    if not os.access(path, needed):
        msg = f"the spool cannot be written: {path}"
        raise UnusableError(
            msg,
            subject=path,
            hint="check its owner and modes, or name another directory with --spool",
            errno_value=errno.EACCES,
        )
