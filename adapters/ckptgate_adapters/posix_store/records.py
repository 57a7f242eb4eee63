"""Small immutable objects: put-if-absent by link(2), read back after any doubt. Any thread."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Generator
from typing import Final

from ckptgate.errors import ExistsError, IntegrityError
from ckptgate.model.documents import MAX_DOCUMENT_BYTES
from ckptgate.model.ids import check_relative_path
from ckptgate.model.layout import GATEWAY_DIR
from ckptgate_adapters.posix_store import syscalls
from ckptgate_adapters.posix_store.failures import translate, translated
from ckptgate_adapters.posix_store.root import (
    StoreRoot,
    discard,
    fsync_directory,
    is_temp,
    new_temp,
    split_key,
    write_file,
)

__all__ = ["PosixRecords"]

_READ_BYTES: Final = 1024 * 1024


class PosixRecords:
    """`ports.store.Records` on a directory."""

    def __init__(self, root: StoreRoot) -> None:
        self._root = root

    def create(self, key: str, data: bytes) -> None:
        """Store *data* under *key* if nothing is there; equal bytes there are success."""
        parent, name = split_key(key)
        try:
            with self._root.directory(parent, make=True) as parent_fd:
                _link_in(parent_fd, name, data)
        except OSError as exc:
            self._settle(key, data, exc)

    def get(self, key: str, *, limit: int = MAX_DOCUMENT_BYTES) -> bytes:
        """The bytes under *key*, fresh."""
        with translated(key, "read"), self._absent_below_files(key):
            return self._root.with_file(key, lambda fd: _read_all(fd, key, limit))

    def children(self, prefix: str) -> list[str]:
        """Names directly below *prefix*, sorted, without those of unfinished writes."""
        if prefix:
            check_relative_path(prefix)
        with translated(prefix, "list"):
            try:
                return sorted(name for name in self._root.names(prefix) if not is_temp(name))
            except FileNotFoundError:
                return []

    @contextlib.contextmanager
    def _absent_below_files(self, key: str) -> Generator[None]:
        """Where a file has the name of what could be a run, nothing is stored for that run.

        A file or symlink in a place of our own stays an error.
        """
        try:
            yield
        except NotADirectoryError as exc:
            run, mark, _ = key.partition(f"/{GATEWAY_DIR}/")
            try:
                with self._root.directory(run if mark else ""):
                    pass
            except (NotADirectoryError, FileNotFoundError):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key) from exc
            raise

    def _settle(self, key: str, data: bytes, exc: OSError) -> None:
        """Decide by what is there now; the failed call may have landed, or an earlier one."""
        try:
            there = self._root.with_file(key, lambda fd: _read_all(fd, key, len(data)))
        except FileNotFoundError:
            raise _unknown(exc, key) from exc
        except IntegrityError:
            there = None
        except OSError as second:
            raise _unknown(second, key) from exc
        if there != data:
            msg = f"other bytes are already stored under {key!r}"
            raise ExistsError(msg, subject=key) from exc
        parent, _ = split_key(key)
        with translated(key, "make durable"), self._root.directory(parent) as parent_fd:
            fsync_directory(parent_fd)


def _link_in(parent_fd: int, name: str, data: bytes) -> None:
    temp = new_temp()
    try:
        write_file(temp, data, dir_fd=parent_fd)
        syscalls.link(temp, name, src_dir_fd=parent_fd, dst_dir_fd=parent_fd)
        fsync_directory(parent_fd)
    finally:
        discard(temp, dir_fd=parent_fd)


def _unknown(exc: OSError, key: str) -> OSError:
    """The error for a create whose key isn't there: a directory that vanished is a race."""
    if exc.errno in {errno.ENOENT, errno.EEXIST}:
        exc = OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    return translate(exc, key, "create")


def _read_all(fd: int, key: str, limit: int) -> bytes:
    parts: list[bytes] = []
    left = limit + 1
    while left > 0 and (part := os.read(fd, min(left, _READ_BYTES))):
        parts.append(part)
        left -= len(part)
    if left == 0:
        msg = f"{key!r} is larger than {limit} bytes"
        raise IntegrityError(msg, subject=key)
    return b"".join(parts)
