"""Copies of spool files, sharing blocks where the file system can, with their holes.

Local disk only; any thread.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator

__all__ = ["copy_bytes", "copy_file", "data_ranges", "make_file"]

_FICLONE = 0x40049409
_PIECE_BYTES = 64 * 1024 * 1024
_READ_BYTES = 256 * 1024
_NO_HOLES = {errno.EINVAL, errno.EOPNOTSUPP}
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
        copy_bytes(source_fd, target_fd)
    finally:
        os.close(target_fd)


def data_ranges(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, end) of what was ever written of the first *size* bytes, as far as one can tell.

    The descriptor's position moves.
    """
    end = 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
            after = os.lseek(fd, start, os.SEEK_HOLE)
        except OSError as exc:
            if exc.errno == errno.ENXIO:
                # A hole up to the end.
                return
            if exc.errno not in _NO_HOLES:
                raise
            start, after = end, size
        if start >= size:
            return
        end = min(after, size)
        yield start, end


def copy_bytes(source_fd: int, target_fd: int) -> None:
    """Make the empty file *target_fd* a copy of *source_fd*, whose position moves."""
    try:
        fcntl.ioctl(target_fd, _FICLONE, source_fd)
    except OSError as exc:
        if exc.errno not in _NO_CLONE:
            raise
    else:
        return
    size = os.fstat(source_fd).st_size
    for start, end in data_ranges(source_fd, size):
        _copy_range(source_fd, target_fd, start, end)
    if os.fstat(target_fd).st_size < size:
        os.truncate(target_fd, size)


def _copy_range(source_fd: int, target_fd: int, start: int, end: int) -> None:
    try:
        while start < end:
            piece = min(_PIECE_BYTES, end - start)
            count = os.copy_file_range(source_fd, target_fd, piece, start, start)
            if not count:
                break
            start += count
    except OSError as exc:
        if exc.errno not in _NO_CLONE:
            raise
        _read_write(source_fd, target_fd, start, end)


def _read_write(source_fd: int, target_fd: int, offset: int, end: int) -> None:
    buffer = memoryview(bytearray(min(_READ_BYTES, end - offset)))
    while count := os.preadv(source_fd, [buffer[: end - offset]], offset):
        view = buffer[:count]
        while view:
            written = os.pwrite(target_fd, view, offset)
            offset += written
            view = view[written:]
