"""Looking at one spool file: its fingerprint, its digests, its holes. Reads only.

It owns the rule when a digest still speaks for the bytes on disk: size, mtime and ctime are what
they were. Bytes that the store shares by a hard link change their ctime by that link, so for them
size and mtime count. Any thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import blake3

from ckptgate.model.ids import CHUNK_BYTES
from ckptgate.ports.spool import FileRow

__all__ = [
    "DigestOfFile",
    "Fingerprint",
    "SpoolView",
    "digest_file",
    "has_hole",
    "is_unchanged",
    "start_workers",
]

BLOCK_BYTES: Final = 8 * 1024 * 1024
"""Read at once; a divisor of the chunk size."""
WORKERS_NICE: Final = 5
"""Trainers and the mount's requests come first."""
_PARALLEL_BYTES: Final = 1024 * 1024
"""Below this, starting threads costs more than it gives."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What tells whether a file was written since: bytes and times in ns."""

    size: int
    mtime_ns: int
    ctime_ns: int

    @staticmethod
    def of(file: str | int) -> Fingerprint:
        """That of a path or descriptor; raises OSError."""
        found = os.stat(file)
        return Fingerprint(found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    def is_of(self, row: FileRow) -> bool:
        """Whether *row* was digested from exactly this."""
        if row.is_linked:
            return (self.size, self.mtime_ns) == (row.size, row.mtime_ns)
        return (self.size, self.mtime_ns, self.ctime_ns) == (
            row.size,
            row.mtime_ns,
            row.ctime_ns,
        )


def is_unchanged(row: FileRow, path: str) -> bool:
    """Whether the spool file at *path* is still what *row* was digested from."""
    try:
        return Fingerprint.of(path).is_of(row)
    except FileNotFoundError:
        return False


@dataclass(frozen=True, slots=True)
class SpoolView:
    """An open spool file as formats see it (`FileView`)."""

    fd: int
    size: int

    def read(self, offset: int, length: int) -> bytes:
        """Up to *length* bytes at *offset*, short only at the end."""
        parts: list[bytes] = []
        while length > 0:
            part = os.pread(self.fd, min(length, BLOCK_BYTES), offset)
            if not part:
                break
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


@dataclass(frozen=True, slots=True)
class DigestOfFile:
    """BLAKE3 of all bytes in hex, and 32 raw bytes for each chunk."""

    size: int
    digest: str
    chunks: bytes


def digest_file(fd: int, check_cancelled: Callable[[], None]) -> DigestOfFile:
    """Both digests in one pass over the file.

    Args:
        fd: open for reading.
        check_cancelled: called before each block; what it raises ends the pass.
    """
    check_cancelled()
    size = os.fstat(fd).st_size
    if size < _PARALLEL_BYTES:
        return _digest_small(fd, size)
    whole, chunk = _hasher(), _hasher()
    block = memoryview(bytearray(min(BLOCK_BYTES, size)))
    chunks: list[bytes] = []
    offset = 0
    while True:
        check_cancelled()
        count = os.preadv(fd, [block[: CHUNK_BYTES - offset % CHUNK_BYTES]], offset)
        if count == 0:
            break
        _update(whole, block[:count])
        # The first chunk's digest is that of the file so far: it isn't computed twice.
        if offset >= CHUNK_BYTES:
            _update(chunk, block[:count])
        offset += count
        if offset % CHUNK_BYTES == 0:
            chunks.append(whole.digest() if offset == CHUNK_BYTES else chunk.digest())
            chunk = _hasher()
    if offset % CHUNK_BYTES:
        chunks.append(whole.digest() if offset < CHUNK_BYTES else chunk.digest())
    return DigestOfFile(offset, whole.hexdigest(), b"".join(chunks))


def _digest_small(fd: int, size: int) -> DigestOfFile:
    """A file of less than one chunk at once; one that has grown is seen by its size."""
    data = os.pread(fd, size + 1, 0)
    digest = blake3.blake3(data)
    return DigestOfFile(len(data), digest.hexdigest(), digest.digest() if data else b"")


def start_workers() -> None:
    """Start the threads that digest large blocks, at low priority; before the first digest.

    They come from a thread of that priority and inherit it. They hold no lock, neither Python's nor
    the spool's: so nobody waits for one that waits for the CPU.
    """

    def start() -> None:
        with contextlib.suppress(OSError):
            nice = max(os.getpriority(os.PRIO_PROCESS, 0), WORKERS_NICE)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
        _update(_hasher(), memoryview(bytearray(_PARALLEL_BYTES)))

    thread = threading.Thread(target=start, name="digest-start")
    thread.start()
    thread.join()


def has_hole(fd: int, size: int) -> bool:
    """Whether part of the file's length was never written, as far as the file system tells."""
    if size == 0:
        return False
    try:
        return os.lseek(fd, 0, os.SEEK_HOLE) < size
    except OSError as exc:
        if exc.errno in {errno.EINVAL, errno.EOPNOTSUPP, errno.ENXIO}:
            return False
        raise


def _hasher() -> blake3.blake3:
    return blake3.blake3(max_threads=blake3.blake3.AUTO)


def _update(hasher: blake3.blake3, block: memoryview) -> None:
    hasher.update(block if len(block) >= _PARALLEL_BYTES else bytes(block))
