"""The checkpoints' bytes: linked, reflinked or copied in, fsynced, and proved by reading back.

An error of write, fsync or close is final for the temporary file that it happened to: the next try
writes a new one. An fsync is never repeated (the kernel reports an error once and then forgets the
pages). Any thread.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import stat
from collections import defaultdict
from collections.abc import Mapping
from typing import Final

import blake3

from ckptgate.errors import CkptError, IntegrityError
from ckptgate.model.ids import CHUNK_BYTES
from ckptgate.ports.store import DigestedFile, VerifyMode, check_verify_mode
from ckptgate_adapters.posix_store import syscalls
from ckptgate_adapters.posix_store.copying import copy_bytes, copy_checked
from ckptgate_adapters.posix_store.failures import translated
from ckptgate_adapters.posix_store.root import (
    StoreRoot,
    discard,
    fsync_directory,
    new_temp,
    split_key,
)

__all__ = ["POSIX_MODES", "PosixData", "read_range"]

POSIX_MODES: Final = frozenset({VerifyMode.SIZE, VerifyMode.READBACK})
"""How the bytes of a directory can be verified."""

_TRIES: Final = 3
_BUFFER_BYTES: Final = 8 * 1024 * 1024
_DIGEST_BYTES: Final = 32
_SOURCE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_LINK: Final = frozenset({
    errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS,
})  # fmt: skip
_FINAL: Final = frozenset({
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG,
})  # fmt: skip
"""Errors that another temporary file would meet too."""

_log = logging.getLogger(__name__)


class PosixData:
    """`ports.store.DataObjects` on a directory."""

    def __init__(self, root: StoreRoot) -> None:
        self._root = root

    def put(self, key: str, source: DigestedFile) -> None:
        """Store the file under *key*, durably on return."""
        parent, name = split_key(key)
        with translated(source.path, "read"):
            source_fd = _open_source(source)
        try:
            with translated(key, "store"), self._root.directory(parent, make=True) as parent_fd:
                _put(parent_fd, name, source, source_fd)
                fsync_directory(parent_fd)
        finally:
            os.close(source_fd)

    def verify(self, key: str, source: DigestedFile, mode: VerifyMode) -> None:
        """Prove that *key* holds exactly the bytes of *source*."""
        check_verify_mode(mode, POSIX_MODES, self._root.path)
        with translated(key, "verify"):
            is_same = self._root.with_file(key, lambda fd: _check_size(os.fstat(fd), key, source))
            # The very same inode: reading it twice proves nothing more.
            if mode is VerifyMode.READBACK and not is_same:
                self._read_back(key, source)

    def put_all(self, files: Mapping[str, DigestedFile], mode: VerifyMode) -> dict[str, OSError]:
        """`put` and `verify` each; one walk to a directory, and one fsync of it, for all in it."""
        check_verify_mode(mode, POSIX_MODES, self._root.path)
        failed: dict[str, OSError] = {}
        by_parent: dict[str, list[str]] = defaultdict(list)
        for key in files:
            by_parent[split_key(key)[0]].append(key)
        for parent, keys in by_parent.items():
            try:
                with translated(parent, "store"), self._root.directory(parent, make=True) as fd:
                    self._put_into(fd, {key: files[key] for key in keys}, mode, failed)
            except OSError as exc:
                failed.update((key, exc) for key in keys if key not in failed)
        return failed

    def _put_into(
        self,
        parent_fd: int,
        files: Mapping[str, DigestedFile],
        mode: VerifyMode,
        failed: dict[str, OSError],
    ) -> None:
        for key, source in files.items():
            try:
                _place(parent_fd, key, source)
            except OSError as exc:
                failed[key] = exc
        fsync_directory(parent_fd)
        for key, source in files.items():
            if key not in failed:
                try:
                    with translated(key, "verify"):
                        found = os.stat(_name(key), dir_fd=parent_fd, follow_symlinks=False)
                        is_same = _check_size(found, key, source)
                        if mode is VerifyMode.READBACK and not is_same:
                            self._read_back(key, source)
                except OSError as exc:
                    failed[key] = exc

    def read(self, key: str, offset: int, length: int) -> bytes:
        """Up to *length* bytes at *offset*."""
        with translated(key, "read"):
            return self._root.with_file(key, lambda fd: read_range(fd, offset, length))

    def read_into(self, key: str, offset: int, view: memoryview) -> int:
        """Up to as many bytes at *offset* as *view* has."""
        with translated(key, "read"):
            return self._root.with_file(key, lambda fd: _read_into(fd, offset, view))

    def local_path(self, key: str) -> str | None:
        """The path of *key* where it is on a local disk, from which it can be reflinked."""
        split_key(key)
        path = self._root.absolute(key)
        return path if not self._root.mount.is_network and os.path.isfile(path) else None

    def _read_back(self, key: str, source: DigestedFile) -> None:
        def use(fd: int) -> None:
            direct = _open_direct(fd)
            try:
                _compare(fd if direct is None else direct, key, source)
            finally:
                if direct is not None:
                    os.close(direct)

        self._root.with_file(key, use)


def read_range(fd: int, offset: int, length: int) -> bytes:
    """Up to *length* bytes at *offset*, short only at the end."""
    parts: list[bytes] = []
    while length > 0 and (part := os.pread(fd, length, offset)):
        parts.append(part)
        offset += len(part)
        length -= len(part)
    return b"".join(parts)


def _read_into(fd: int, offset: int, view: memoryview) -> int:
    done = 0
    while done < len(view) and (count := os.preadv(fd, [view[done:]], offset + done)):
        done += count
    return done


def _open_source(source: DigestedFile) -> int:
    fd = os.open(source.path, _SOURCE)
    size = os.fstat(fd).st_size
    if size != source.size:
        os.close(fd)
        msg = f"{source.path!r} has {size} bytes, it is said to have {source.size}"
        raise IntegrityError(msg, subject=source.path)
    return fd


def _name(key: str) -> str:
    return split_key(key)[1]


def _place(parent_fd: int, key: str, source: DigestedFile) -> None:
    """Store one file of several; the caller makes the directory durable."""
    with translated(source.path, "read"):
        source_fd = _open_source(source)
    try:
        with translated(key, "store"):
            if not (source.may_link and _link_new(parent_fd, _name(key), source, source_fd)):
                _put(parent_fd, _name(key), source, source_fd)
    finally:
        os.close(source_fd)


def _link_new(parent_fd: int, name: str, source: DigestedFile, source_fd: int) -> bool:
    """Link the source under a name that nothing has; whether that could be done.

    Its bytes are durable already, so only the name has to be made so.
    """
    try:
        syscalls.link(source.path, name, src_dir_fd=None, dst_dir_fd=parent_fd)
    except FileExistsError:
        return False
    except OSError as exc:
        if exc.errno in _NO_LINK:
            return False
        raise
    if not _is_inode(parent_fd, name, os.fstat(source_fd)):
        discard(name, dir_fd=parent_fd)
        msg = f"{source.path!r} was replaced while it was stored"
        raise IntegrityError(msg, subject=source.path)
    return True


def _put(parent_fd: int, name: str, source: DigestedFile, source_fd: int) -> None:
    """Try under up to three temporary names; only the first may be a link or a reflink."""
    for tries_left in reversed(range(_TRIES)):
        is_first = tries_left == _TRIES - 1
        try:
            return _put_once(parent_fd, name, source, source_fd, is_first=is_first)
        except CkptError:
            raise
        except OSError as exc:
            if not tries_left or exc.errno in _FINAL:
                raise
            _log.warning("put-starts-over name=%s errno=%s", name, exc.errno)
    raise AssertionError("unreachable")


def _put_once(
    parent_fd: int, name: str, source: DigestedFile, source_fd: int, *, is_first: bool
) -> None:
    temp = new_temp()
    try:
        if not (is_first and source.may_link and _link_source(temp, source, source_fd, parent_fd)):
            _copy_source(temp, source, source_fd, parent_fd, is_first=is_first)
        ours = os.stat(temp, dir_fd=parent_fd, follow_symlinks=False)
        try:
            syscalls.rename(temp, name, src_dir_fd=parent_fd, dst_dir_fd=parent_fd)
        except OSError:
            # The reply may be what was lost: ours is there if this inode is.
            if not _is_inode(parent_fd, name, ours):
                raise
    finally:
        # Renaming one name of an inode onto another of its names does nothing: remove it here.
        discard(temp, dir_fd=parent_fd)


def _link_source(temp: str, source: DigestedFile, source_fd: int, parent_fd: int) -> bool:
    try:
        syscalls.link(source.path, temp, src_dir_fd=None, dst_dir_fd=parent_fd)
    except OSError as exc:
        if exc.errno in _NO_LINK:
            return False
        raise
    if not _is_inode(parent_fd, temp, os.fstat(source_fd)):
        msg = f"{source.path!r} was replaced while it was stored"
        raise IntegrityError(msg, subject=source.path)
    syscalls.fsync(source_fd)
    return True


def _copy_source(
    temp: str, source: DigestedFile, source_fd: int, parent_fd: int, *, is_first: bool
) -> None:
    fd = syscalls.create_file(temp, dir_fd=parent_fd)
    try:
        if is_first:
            copy_bytes(source_fd, fd, source.size, source.path)
        else:
            copy_checked(source_fd, fd, source.size, source.digest, source.path)
        syscalls.fsync(fd)
    except BaseException:
        # A cancelled copy, too, must not keep its descriptor.
        with contextlib.suppress(OSError):
            os.close(fd)
        raise
    syscalls.close_written(fd)


def _is_inode(parent_fd: int, name: str, wanted: os.stat_result) -> bool:
    try:
        found = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino)


def _check_size(stored: os.stat_result, key: str, source: DigestedFile) -> bool:
    """Compare the sizes; returns whether key and source are one inode."""
    if not stat.S_ISREG(stored.st_mode) or stored.st_size != source.size:
        msg = f"{key!r} has {stored.st_size} bytes in the store, wanted {source.size}"
        raise IntegrityError(msg, subject=key)
    try:
        local = os.stat(source.path)
    except OSError:
        return False
    return (stored.st_dev, stored.st_ino) == (local.st_dev, local.st_ino)


def _open_direct(fd: int) -> int | None:
    """The same file with O_DIRECT, else None and its pages dropped, so that reads reach the store.

    Reading through the page cache would only compare what was written with itself.
    """
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return None


def _compare(fd: int, key: str, source: DigestedFile) -> None:
    """Read all of *fd* and compare each chunk's digest and the whole's."""
    whole = blake3.blake3()
    # An anonymous mapping is aligned to a page, as O_DIRECT wants it.
    with mmap.mmap(-1, _BUFFER_BYTES) as buffer:
        for index, start in enumerate(range(0, source.size, CHUNK_BYTES)):
            end = min(start + CHUNK_BYTES, source.size)
            found = _digest_chunk(fd, buffer, start, end, whole)
            wanted = source.chunks[index * _DIGEST_BYTES : (index + 1) * _DIGEST_BYTES]
            if found is None or (source.chunks and found != wanted):
                msg = f"chunk {index} of {key!r} (bytes {start} to {end}) differs in the store"
                raise IntegrityError(msg, subject=key)
    if whole.hexdigest() != source.digest:
        msg = f"{key!r} differs in the store: digest {whole.hexdigest()}, wanted {source.digest}"
        raise IntegrityError(msg, subject=key)


def _digest_chunk(
    fd: int, buffer: mmap.mmap, start: int, end: int, whole: blake3.blake3
) -> bytes | None:
    """The digest of one chunk, None if the file ends in it; adds its bytes to *whole*."""
    chunk = blake3.blake3()
    position = start
    while position < end:
        count = min(os.preadv(fd, [buffer], position), end - position)
        if count <= 0:
            return None
        with memoryview(buffer) as view, view[:count] as part:
            chunk.update(part)
            whole.update(part)
        position += count
    return chunk.digest()
