"""The start-up probe: can this directory do what a store must, and is it ours to read?

It works in a directory of its own below the root and leaves nothing behind. Any thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import threading
from typing import Final

from ckptgate.errors import (
    CkptError,
    ExistsError,
    FullError,
    MissingError,
    UnusableError,
)
from ckptgate.model.documents import StoreFormat, decode
from ckptgate.model.layout import format_key
from ckptgate_adapters.posix_store import syscalls
from ckptgate_adapters.posix_store.records import PosixRecords
from ckptgate_adapters.posix_store.root import StoreRoot, new_temp
from ckptgate_adapters.posix_store.tree import remove_tree

__all__ = ["probe"]

_ROUNDS: Final = 4


def probe(root: StoreRoot) -> None:
    """Prove that *root* can be a store.

    Raises:
        UnusableError: missing, no directory, read-only, full, or without put-if-absent.
        FormatVersionError: written by another version.
    """
    _check_directory(root.path)
    records = PosixRecords(root)
    _check_format(records)
    place = new_temp()
    try:
        _check_writing(root, place)
        _check_put_if_absent(root, place)
    finally:
        with contextlib.suppress(OSError), root.directory("") as root_fd:
            remove_tree(place, dir_fd=root_fd)


def _check_directory(path: str) -> None:
    quoted = shlex.quote(path)
    if not os.path.lexists(path):
        msg = f"the store's directory does not exist: {path!r}"
        raise UnusableError(msg, subject=path, hint=f"mkdir -p {quoted}", errno_value=errno.ENOENT)
    if not os.path.isdir(path):
        msg = f"the store's path is not a directory: {path!r}"
        raise UnusableError(msg, subject=path, hint=f"ls -ld {quoted}", errno_value=errno.ENOTDIR)


def _check_format(records: PosixRecords) -> None:
    key = format_key("")
    with contextlib.suppress(MissingError):
        decode(records.get(key), StoreFormat, subject=key)


def _check_writing(root: StoreRoot, place: str) -> None:
    quoted = shlex.quote(root.path)
    try:
        with root.directory("") as root_fd:
            syscalls.mkdir(place, dir_fd=root_fd)
    except CkptError:
        raise
    except OSError as exc:
        why, hint = {
            errno.EROFS: ("mounted read-only", f"mount -o remount,rw {quoted}"),
            errno.EACCES: ("not writable for this user", f"ls -ld {quoted}"),
            errno.EPERM: ("not writable for this user", f"ls -ld {quoted}"),
            errno.ENOSPC: ("full", f"df -h {quoted}; df -i {quoted}"),
            errno.EDQUOT: ("over its quota", f"quota -s; df -h {quoted}"),
        }.get(exc.errno or 0, (os.strerror(exc.errno or errno.EIO), f"ls -ld {quoted}"))
        msg = f"the store {root.path!r} is {why}"
        raise UnusableError(msg, subject=root.path, hint=hint, errno_value=exc.errno) from exc


def _check_put_if_absent(root: StoreRoot, place: str) -> None:
    """Create a key twice, then let two threads race for others: one may win each time."""
    path, records = root.path, PosixRecords(root)
    try:
        records.create(f"{place}/twice", b"first")
        second_won = _wins(records, f"{place}/twice", b"second")
        races = [_race(records, f"{place}/race-{number}") for number in range(_ROUNDS)]
    except FullError as exc:
        msg = f"the store {path!r} is full"
        hint = f"df -h {shlex.quote(path)}; df -i {shlex.quote(path)}"
        raise UnusableError(msg, subject=path, hint=hint, errno_value=errno.ENOSPC) from exc
    except CkptError as exc:
        msg = f"the store {path!r} has no usable link(2), so two nodes could overwrite each other"
        hint = "use a file system with hard links (ext4, xfs, NFS, Lustre)"
        raise UnusableError(msg, subject=path, hint=hint) from exc
    if second_won or any(wins != 1 for wins in races):
        msg = f"the store {path!r} lets two writers create the same name (no put-if-absent)"
        raise UnusableError(msg, subject=path, hint="use a file system with atomic hard links")


def _race(records: PosixRecords, key: str) -> int:
    """How many of two threads created *key*, each with bytes of its own."""
    start = threading.Barrier(2)
    wins: list[bool] = []

    def run(data: bytes) -> None:
        start.wait()
        with contextlib.suppress(CkptError):
            wins.append(_wins(records, key, data))

    threads = [threading.Thread(target=run, args=(data,)) for data in (b"one", b"two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(wins)


def _wins(records: PosixRecords, key: str, data: bytes) -> bool:
    try:
        records.create(key, data)
    except ExistsError:
        return False
    return True
