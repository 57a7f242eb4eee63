"""Copies of spool files, sharing blocks where the file system can. Local disk only; any thread."""

from __future__ import annotations

import errno
import fcntl
import os

__all__ = ["copy_file", "make_file"]

_FICLONE = 0x40049409
_PIECE_BYTES = 64 * 1024 * 1024
_READ_BYTES = 1024 * 1024
_NO_CLONE = {errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS}


def make_file(path: str) -> int:
    """Make the (empty) spool file *path*, replacing one that a crash left; returns it opened.

    It is never emptied in place: the store may have a name for those bytes.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return os.open(path, flags, 0o600)
    except FileExistsError:
        os.unlink(path)
        return os.open(path, flags, 0o600)


def copy_file(source_fd: int, target: str) -> None:
    """Make *target* a copy of what is open as *source_fd*, whose position moves.

    Raises:
        OSError: with errno; *target* may be partly written then.
    """
    target_fd = make_file(target)
    try:
        _copy(source_fd, target_fd)
    finally:
        os.close(target_fd)


def _copy(source_fd: int, target_fd: int) -> None:
    try:
        fcntl.ioctl(target_fd, _FICLONE, source_fd)
    except OSError as exc:
        if exc.errno not in _NO_CLONE:
            raise
    else:
        return
    try:
        while os.copy_file_range(source_fd, target_fd, _PIECE_BYTES):
            pass
    except OSError as exc:
        if exc.errno not in _NO_CLONE:
            raise
        _read_write(source_fd, target_fd)


def _read_write(source_fd: int, target_fd: int) -> None:
    offset = 0
    while data := os.pread(source_fd, _READ_BYTES, offset):
        view = memoryview(data)
        while view:
            written = os.pwrite(target_fd, view, offset)
            offset += written
            view = view[written:]
