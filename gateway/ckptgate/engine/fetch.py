"""Verified reads: the bytes of committed and imported files, chunk by chunk from the store.

It owns the rule that nothing unverified is served: a chunk counts as being here only after its
BLAKE3 was compared with the manifest's and the spool file was written to disk. A local copy that
was changed or deleted counts as not being here, and is let go: what is fetched goes into a new
file, never into one that readers have open or that the store shares.

Thread rule: any thread. Threads that want chunks of one file do the work once, one after the other.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import blake3

from ckptgate.engine.events import Events
from ckptgate.engine.manifests import DIGEST_BYTES, load_chunks, load_manifest
from ckptgate.errors import FullError, IntegrityError, MissingError
from ckptgate.model.documents import ChunkRef, digest_of
from ckptgate.model.ids import CHUNK_BYTES, chunk_count
from ckptgate.model.layout import full_key
from ckptgate.model.states import AttemptState, FileState
from ckptgate.ports.spool import AttemptRow, FileRow, LocalBytes, NodeRow, Spool
from ckptgate.ports.store import Store

__all__ = ["Fetcher", "drop_copy"]

_log = logging.getLogger(__name__)

PIECE_BYTES: Final = 4 * 1024 * 1024
"""Read at a time, so that many readers need little memory."""
LOCKS_COUNT: Final = 64
MANIFESTS_KEPT: Final = 4
_FROZEN: Final = frozenset({AttemptState.COMMITTED, AttemptState.REPLACED})


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One chunk of a file: where it lies and what it must be."""

    index: int
    offset: int
    length: int
    digest: bytes


class Fetcher:
    """Has verified bytes in spool files. Any thread."""

    def __init__(self, *, store: Store, spool: Spool, events: Events) -> None:
        self._store = store
        self._spool = spool
        self._events = events
        self._locks = [threading.Lock() for _ in range(LOCKS_COUNT)]
        self._refs_lock = threading.Lock()
        self._refs: OrderedDict[tuple[str, str], dict[str, ChunkRef]] = OrderedDict()

    def is_fetched(self, file: int, offset: int, length: int) -> bool:
        """Whether `fetch` has nothing to do; never blocks on the store.

        Raises:
            MissingError: there is no such file.
        """
        row = self._file(file)
        if row.local is LocalBytes.FULL:
            return not self._was_changed(row)
        if row.size == 0 or not row.have or not os.path.exists(self._spool.data_path(file)):
            return False
        return all(row.have[index] for index in _chunk_range(row.size, offset, length))

    def is_local(self, file: int) -> bool:
        """Whether all bytes are here, as they were verified; never blocks on the store.

        A copy that was changed since is let go, so that the next fetch begins a new file.

        Raises:
            MissingError: there is no such file.
        """
        row = self._file(file)
        if row.local is not LocalBytes.FULL:
            return False
        if not self._was_changed(row):
            return True
        self._let_go(row)
        return False

    def fetch(self, file: int, offset: int, length: int) -> None:
        """Have the chunks that cover this range in the spool file, each verified before.

        Raises:
            IntegrityError: the store's bytes are not the manifest's, or are missing; an event names
                file, chunk and key.
            FullError: the spool has no space.
            TransientStoreError: the store did not answer.
            MissingError: there is no such file.
        """
        with self._locks[file % LOCKS_COUNT]:
            if self.is_fetched(file, offset, length):
                return
            row = self._reset_if_gone(self._file(file))
            if not row.key:
                msg = f"file {file} has no bytes here and none in the store"
                raise IntegrityError(msg, subject=str(file))
            row = self._with_chunks(row)
            path = self._spool.data_path(file)
            try:
                while not self._fetch_chunks(row, path, _chunk_range(row.size, offset, length)):
                    row = self._reset_if_gone(self._file(file))
            except OSError as exc:
                if isinstance(exc, IntegrityError | MissingError):
                    raise self._failed(row, exc) from exc
                if exc.errno in {errno.ENOSPC, errno.EDQUOT} and not isinstance(exc, FullError):
                    msg = f"no space in the spool for file {file}"
                    raise FullError(msg, subject=path) from exc
                raise

    def _file(self, file: int) -> FileRow:
        row = self._spool.file(file)
        if row is None:
            msg = f"file {file} is no longer in the spool"
            raise MissingError(msg, subject=str(file))
        return row

    # What is here

    def _was_changed(self, row: FileRow) -> bool:
        """Whether the spool file of stored bytes is gone, or no longer what was digested."""
        if row.state is not FileState.STORED or not row.key:
            return False  # what is still written is the truth itself
        try:
            stat = os.stat(self._spool.data_path(row.file))
        except FileNotFoundError:
            return True
        if (stat.st_size, stat.st_mtime_ns) == (row.size, row.mtime_ns):
            return False
        nodes = self._spool.nodes_of_file(row.file)
        # Publication gives the bytes it shares with the spool the time that the checkpoint has.
        is_touched = any(stat.st_mtime_ns == node.mtime_ns for node in nodes)
        if row.is_linked and stat.st_size == row.size and is_touched:
            return False
        return self._is_frozen(nodes)

    def _is_frozen(self, nodes: Iterable[NodeRow]) -> bool:
        """Whether a committed checkpoint has the file: then nobody writes it any more."""
        attempts = {node.attempt for node in nodes}
        rows = [self._spool.attempt(id_) for id_ in attempts if id_ is not None]
        return any(row is not None and row.state in _FROZEN for row in rows)

    def _reset_if_gone(self, row: FileRow) -> FileRow:
        """Forget what was here if the local copy was changed or deleted."""
        if row.local is LocalBytes.FULL:
            return self._let_go(row)
        if row.local is LocalBytes.NONE or os.path.exists(self._spool.data_path(row.file)):
            return row
        return self._let_go(row)

    def _let_go(self, seen: FileRow) -> FileRow:
        """Give up the local copy, unless somebody else just did."""
        with self._spool.transaction():
            row = self._file(seen.file)
            if row != seen:
                return row
            _log.warning("local-copy-changed file=%d key=%s", row.file, row.key)
            return drop_copy(self._spool, row)

    # Chunk digests

    def _with_chunks(self, row: FileRow) -> FileRow:
        """The row with its chunk digests, read from their table if they were not yet."""
        if len(row.chunks) == chunk_count(row.size) * DIGEST_BYTES:
            return row
        if row.size <= CHUNK_BYTES:
            return self._spool.update_file(row.file, chunks=bytes.fromhex(row.digest))
        for node in self._spool.nodes_of_file(row.file):
            attempt = self._spool.attempt(node.attempt) if node.attempt is not None else None
            if attempt is None or not attempt.manifest:
                continue
            ref = self._refs_of(attempt).get(row.key)
            if ref is not None:
                chunks = load_chunks(self._store, attempt.run, ref, row.size)
                return self._spool.update_file(row.file, chunks=chunks)
        msg = f"no manifest names the chunk digests of file {row.file} ({row.key})"
        raise IntegrityError(msg, subject=row.key)

    def _refs_of(self, attempt: AttemptRow) -> dict[str, ChunkRef]:
        """Key -> where its chunk digests are, of a committed attempt's large files."""
        wanted = (attempt.run, attempt.manifest)
        with self._refs_lock:
            known = self._refs.get(wanted)
        if known is not None:
            return known
        manifest = load_manifest(self._store, attempt.run, attempt.attempt, attempt.manifest)
        refs = {
            full_key(attempt.run, entry.key): entry.chunks
            for entry in manifest.entries
            if entry.chunks is not None
        }
        with self._refs_lock:
            self._refs[wanted] = refs
            while len(self._refs) > MANIFESTS_KEPT:
                self._refs.popitem(last=False)
        return refs

    # Bytes

    def _fetch_chunks(self, row: FileRow, path: str, wanted: range) -> bool:
        """Have these chunks in the spool file; False if the copy was given up meanwhile."""
        fd = _open_own(path, is_begun=bool(row.have))
        try:
            if os.fstat(fd).st_size != row.size:
                os.ftruncate(fd, row.size)
            if row.size == 0:
                self._finish_empty(row, fd)
            for index in wanted:
                if not (row.have and row.have[index]):
                    self._fetch_chunk(row, fd, _chunk(row, index))
                    marked = self._mark(row.file, fd, index)
                    if marked is None:
                        return False
                    row = marked
            return True
        finally:
            os.close(fd)

    def _fetch_chunk(self, row: FileRow, fd: int, chunk: _Chunk) -> None:
        """Read, write and digest one chunk; it counts only once the caller marks it."""
        hasher = blake3.blake3()
        done = 0
        while done < chunk.length:
            size = min(PIECE_BYTES, chunk.length - done)
            piece = self._store.read(row.key, chunk.offset + done, size)
            if len(piece) != size:
                msg = (
                    f"{row.key} ends at {chunk.offset + done + len(piece)} bytes, "
                    f"it must have {row.size} (chunk {chunk.index})"
                )
                raise IntegrityError(msg, subject=row.key)
            hasher.update(piece)
            _write_all(fd, piece, chunk.offset + done)
            done += size
        if hasher.digest() != chunk.digest:
            msg = (
                f"chunk {chunk.index} of {row.key} has digest {hasher.hexdigest()}, "
                f"the manifest says {chunk.digest.hex()}"
            )
            raise IntegrityError(msg, subject=row.key)
        # Before the mark, or a power loss could leave a mark without the bytes.
        os.fdatasync(fd)

    def _mark(self, file: int, fd: int, index: int) -> FileRow | None:
        """Record that the chunk is here and verified; with the last one the file is whole.

        None if the spool file is another one by now: the publisher gave it up to make room.
        """
        with self._spool.transaction():
            row = self._file(file)
            if not _is_named(fd, self._spool.data_path(file)):
                return None
            if row.local is LocalBytes.FULL:
                return row
            have = bytearray(row.have or bytes(chunk_count(row.size)))
            have[index] = 1
            if all(have):
                return self._finish(file, fd)
            return self._spool.update_file(file, local=LocalBytes.PARTIAL, have=bytes(have))

    def _finish(self, file: int, fd: int) -> FileRow:
        stat = os.fstat(fd)
        return self._spool.update_file(
            file,
            local=LocalBytes.FULL,
            have=b"",
            mtime_ns=stat.st_mtime_ns,
            ctime_ns=stat.st_ctime_ns,
        )

    def _finish_empty(self, row: FileRow, fd: int) -> None:
        if digest_of(b"") != row.digest:
            msg = f"{row.key} is said to be empty, but not by its digest {row.digest}"
            raise IntegrityError(msg, subject=row.key)
        with self._spool.transaction():
            self._finish(row.file, fd)

    def _failed(self, row: FileRow, cause: OSError) -> IntegrityError:
        """Record the incident; the error to raise."""
        place = self._place(row.file)
        msg = f"{place}: {cause}"
        self._events.record("verify-failed", place, str(cause))
        hint = "run `ckptgate verify`, then restore an older checkpoint or the store's backup"
        return IntegrityError(msg, subject=row.key, hint=hint)

    def _place(self, file: int) -> str:
        """How people name the file: run, checkpoint, path."""
        for node in self._spool.nodes_of_file(file):
            attempt = self._spool.attempt(node.attempt) if node.attempt is not None else None
            if attempt is None:
                continue
            parts: list[str] = []
            place = self._spool.place(node.ino)
            while place is not None:
                parts.insert(0, place[1])
                if place[0] == attempt.root:
                    break
                place = self._spool.place(place[0])
            return "/".join(part for part in (attempt.run, attempt.name, *parts) if part)
        return f"file {file}"


def drop_copy(spool: Spool, row: FileRow) -> FileRow:
    """Let go of a file's bytes in the spool; inside a transaction.

    Only the name goes: the bytes may be the store's own, and readers may have them open.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(spool.data_path(row.file))
    return spool.update_file(row.file, local=LocalBytes.NONE, have=b"", is_linked=False)


def _open_own(path: str, *, is_begun: bool) -> int:
    """The spool file, to be written; a new one where the store has a name for these bytes too."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags, 0o600)
    if is_begun or os.fstat(fd).st_nlink <= 1:
        return fd
    os.close(fd)
    os.unlink(path)
    return os.open(path, flags | os.O_EXCL, 0o600)


def _is_named(fd: int, path: str) -> bool:
    """Whether *path* still names what is open as *fd*."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _chunk_range(size: int, offset: int, length: int) -> range:
    """Indices of the chunks that these bytes touch."""
    end = min(size, offset + length)
    return range(offset // CHUNK_BYTES, chunk_count(end)) if end > offset else range(0)


def _chunk(row: FileRow, index: int) -> _Chunk:
    offset = index * CHUNK_BYTES
    start = index * DIGEST_BYTES
    return _Chunk(
        index=index,
        offset=offset,
        length=min(CHUNK_BYTES, row.size - offset),
        digest=row.chunks[start : start + DIGEST_BYTES],
    )


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
