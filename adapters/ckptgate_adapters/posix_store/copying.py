"""One file's bytes into another: by reflink, in the kernel, or through memory.

Holes stay holes: they take no time and no room. Any thread.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import Final

import blake3

from ckptgate.engine.durable import start_writing
from ckptgate.errors import IntegrityError
from ckptgate.vfs.bytes import data_ranges
from ckptgate_adapters.posix_store import syscalls

__all__ = ["copy_bytes", "copy_checked"]

_RANGE_BYTES: Final = 256 * 1024 * 1024
_BUFFER_BYTES: Final = 256 * 1024
"""Through memory that is used again, and stays in the CPU's cache: 4 MiB at a time, each in fresh
memory, took five times as long."""
_NO_CLONE: Final = frozenset({
    errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM,
    errno.EACCES, errno.EBADF, errno.ETXTBSY, errno.EISDIR,
})  # fmt: skip
_AHEAD_BYTES: Final = 8 * 1024 * 1024
"""The disk begins with so many while the next are copied."""


def copy_bytes(source_fd: int, fd: int, size: int, subject: str) -> None:
    """Fill the empty file *fd* with the first *size* bytes of *source_fd*.

    Raises:
        IntegrityError: the source ends before.
        OSError: reading or writing failed.
    """
    if size == 0 or _try_clone(source_fd, fd, size):
        return
    done = 0
    for start, end in data_ranges(source_fd, size):
        _copy_range(source_fd, fd, start, end, subject)
        done = end
    if done < size:
        there = os.fstat(source_fd).st_size
        if there < size:
            raise _short(subject, size, there)
        syscalls.truncate(fd, size)


def _copy_range(source_fd: int, fd: int, start: int, end: int, subject: str) -> None:
    done = _copy_in_kernel(source_fd, fd, start, end)
    if done < end:
        os.lseek(fd, done, os.SEEK_SET)
        started = done
        for part in _parts(source_fd, done, end, subject):
            syscalls.write(fd, part)
            done += len(part)
            if done - started >= _AHEAD_BYTES:
                start_writing(fd, started, done - started)
                started = done


def _parts(source_fd: int, start: int, end: int, subject: str) -> Iterator[memoryview]:
    """The bytes from *start* to *end*; each part is valid until the next one is asked for."""
    buffer = memoryview(bytearray(min(_BUFFER_BYTES, end - start)))
    while start < end:
        count = os.preadv(source_fd, [buffer[: end - start]], start)
        if count == 0:
            raise _short(subject, end, start)
        yield buffer[:count]
        start += count


def copy_checked(source_fd: int, fd: int, size: int, digest: str, subject: str) -> None:
    """As `copy_bytes`, but through memory, and only bytes that have this BLAKE3 digest.

    For a source whose own pages can't be trusted any more, because an fsync of it failed.
    """
    hasher = blake3.blake3()
    for part in _parts(source_fd, 0, size, subject):
        hasher.update(part)
        syscalls.write(fd, part)
    if hasher.hexdigest() != digest:
        msg = f"{subject!r} no longer has the bytes that were digested"
        raise IntegrityError(msg, subject=subject)


def _try_clone(source_fd: int, fd: int, size: int) -> bool:
    try:
        syscalls.clone(fd, source_fd)
    except OSError as exc:
        if exc.errno in _NO_CLONE:
            return False
        raise
    # A clone takes all of the source, which the caller has just seen to have this size.
    if os.fstat(fd).st_size != size:
        os.ftruncate(fd, 0)
        return False
    return True


def _copy_in_kernel(source_fd: int, fd: int, start: int, end: int) -> int:
    """Up to where bytes were copied before the kernel or server said that it can't."""
    done = start
    while done < end:
        try:
            count = syscalls.copy_range(source_fd, fd, min(_RANGE_BYTES, end - done), done)
        except OSError as exc:
            if exc.errno in _NO_CLONE:
                return done
            raise
        if count == 0:
            # At the source's end, or on file systems that answer 0 for "can't".
            return done
        done += count
    return done


def _short(subject: str, size: int, done: int) -> IntegrityError:
    msg = f"{subject!r} ends after {done} bytes, it is said to have {size}"
    return IntegrityError(msg, subject=subject)
