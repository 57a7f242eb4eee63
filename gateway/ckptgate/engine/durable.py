"""Making staged files survive a power loss, many at a time.

It owns the rule whose error is whose: a write-back error is reported for the file that it happened
to, is final for it, and is never asked for twice. For many small files one flush of the file system
takes the place of an fsync of each, which costs a flush of the disk each time; each file's own
pages are written and waited for first, which tells its errors. Any thread.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable, Sequence
from typing import Final

__all__ = ["TOGETHER_MIN", "start_writing", "sync_files"]

TOGETHER_MIN: Final = 8
"""From so many files on they are flushed together."""
_WRITE: Final = 2
_WRITE_AND_WAIT: Final = 7
"""SYNC_FILE_RANGE_WAIT_BEFORE | WRITE | WAIT_AFTER"""
_UNSUPPORTED: Final = frozenset({errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP})


def sync_files(fds: Sequence[int]) -> dict[int, OSError]:
    """Return when the open files survive a power loss; descriptor -> error of those that may not.

    An error is final: the kernel forgets which pages it could not write, so a later success would
    prove nothing.
    """
    if len(fds) < TOGETHER_MIN or not _HAS_CALLS:
        return _sync_each(fds)
    try:
        errors = _write_pages(fds)
    except NotImplementedError:
        return _sync_each(fds)
    written = [fd for fd in fds if fd not in errors]
    if not written:
        return errors
    try:
        _flush(written[-1])
        # Old kernels don't report the journal's failure there, but do here.
        os.fsync(written[-1])
    except OSError:
        # It may be another file's: each says for itself.
        errors |= _sync_each(written)
    return errors


def start_writing(fd: int, offset: int, size: int) -> None:
    """Let the disk begin with these bytes, so that an fsync finds less left to wait for.

    Promises nothing; an error of the disk is told by the fsync.
    """
    if _HAS_CALLS:
        _libc.sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(size), _WRITE)


def _sync_each(fds: Iterable[int]) -> dict[int, OSError]:
    errors: dict[int, OSError] = {}
    for fd in fds:
        try:
            os.fsync(fd)
        except OSError as exc:
            errors[fd] = exc
    return errors


def _write_pages(fds: Sequence[int]) -> dict[int, OSError]:
    """Write all pages of the files and wait for them; NotImplementedError if that can't be."""
    errors: dict[int, OSError] = {}
    for flags in (_WRITE, _WRITE_AND_WAIT):
        for fd in fds:
            try:
                _sync_range(fd, flags)
            except OSError as exc:
                if exc.errno in _UNSUPPORTED:
                    raise NotImplementedError from exc
                errors.setdefault(fd, exc)
    return errors


_libc: Final = ctypes.CDLL(None, use_errno=True)
_HAS_CALLS: Final = hasattr(_libc, "sync_file_range") and hasattr(_libc, "syncfs")


def _sync_range(fd: int, flags: int) -> None:
    _checked(_libc.sync_file_range(fd, ctypes.c_int64(0), ctypes.c_int64(0), flags))


def _flush(fd: int) -> None:
    """Flush the file system that *fd* is on."""
    _checked(_libc.syncfs(fd))


def _checked(result: int) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
