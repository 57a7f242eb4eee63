"""Verified reads: the bytes of committed and imported files, chunk by chunk from the store.

It owns the rule that nothing unverified is served: a chunk counts as being here only after its
BLAKE3 was compared with the manifest's. A local copy that was changed or deleted counts as not
being here, and is let go: what is fetched goes into a new file, never into one that readers have
open or that the store shares. Nobody waits for the disk: what was fetched says so (`FileRow.have`),
and isn't believed after a power loss (`powerloss`).

Thread rule: any thread. A chunk that several threads want is fetched by one of them; the others
wait, and try it themselves if that one failed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Generator, Iterable, Sequence
from typing import Final

from ckptgate.engine.chunks import Chunk, ChunkDigests, chunk_of, chunk_range
from ckptgate.engine.claims import Claims
from ckptgate.engine.disk import write_at
from ckptgate.engine.events import Events
from ckptgate.engine.ranges import Ranges
from ckptgate.engine.readahead import ReadAhead
from ckptgate.errors import FullError, IntegrityError, MissingError
from ckptgate.model.documents import digest_of
from ckptgate.model.ids import CHUNK_BYTES, chunk_count
from ckptgate.model.states import AttemptState, FileState
from ckptgate.ports.spool import FileRow, LocalBytes, NodeRow, Spool
from ckptgate.ports.store import Store

__all__ = ["Fetcher", "drop_copy"]

_log = logging.getLogger(__name__)

LOCKS_COUNT: Final = 64
CHUNKS_AT_ONCE: Final = 8
"""By one thread, before others get to fetch of the same file."""
_FROZEN: Final = frozenset({AttemptState.COMMITTED, AttemptState.REPLACED})


class _StoreFailed(Exception):  # noqa: N818 - it carries the error, which is then raised itself
    """The store's bytes are not what they must be, or are missing."""

    def __init__(self, row: FileRow, cause: OSError) -> None:
        super().__init__(str(cause))
        self.row = row
        self.cause = cause


class Fetcher:
    """Has verified bytes in spool files. Any thread."""

    def __init__(self, *, store: Store, spool: Spool, events: Events) -> None:
        self._spool = spool
        self._events = events
        self._ranges = Ranges(store)
        self._digests = ChunkDigests(store, spool)
        self._claims = Claims()
        self._locks = [threading.Lock() for _ in range(LOCKS_COUNT)]
        self._ahead = ReadAhead(self._fetch_ahead)

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
        return all(row.have[index] for index in chunk_range(row.size, offset, length))

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
        try:
            while not self.is_fetched(file, offset, length):
                row = self._ready(file)
                missing = _missing(row, chunk_range(row.size, offset, length))
                if missing:
                    self._fetch_once(row, missing[:CHUNKS_AT_ONCE])
                elif row.local is not LocalBytes.FULL:
                    # Nothing lies there; the file itself must.
                    self._make(row)
                    return
        except _StoreFailed as failed:
            raise self._told(failed.row, failed.cause) from failed.cause

    def read_ahead(self, file: int, offset: int, length: int) -> None:
        """Somebody reads this range: have what follows on its way where that is worth it.

        Never blocks and never fails: what can't be had is met by who reads it.
        """
        row = self._spool.file(file)
        if row is not None and row.local is not LocalBytes.FULL:
            self._ahead.note(file, row.size, offset, length)

    def _fetch_ahead(self, file: int, index: int) -> None:
        """Fetch one chunk that nobody has asked for, unless it is here or on its way.

        Raises:
            OSError: it can't be had.
        """
        if self.is_fetched(file, index * CHUNK_BYTES, 1):
            return
        try:
            self._fetch_once(self._ready(file), [index], is_waiting=False)
        except _StoreFailed as failed:
            raise failed.cause from None

    def _ready(self, file: int) -> FileRow:
        """The row of a file that can be fetched, with its chunk digests.

        Raises:
            IntegrityError: the store has no bytes of it, or its digests are damaged.
        """
        with self._locks[file % LOCKS_COUNT]:
            row = self._reset_if_gone(self._file(file))
            if not row.key:
                msg = f"file {file} has no bytes here and none in the store"
                raise IntegrityError(msg, subject=str(file))
            return self._digests.known(row)

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
            # Another thread may have fetched the last of it meanwhile.
            return self._let_go(row) if self._was_changed(row) else row
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

    # Bytes

    def _make(self, row: FileRow) -> None:
        """Have the spool file in its size; an empty one is whole then."""
        with self._opened(row) as fd:
            if row.size == 0:
                self._finish_empty(row, fd)

    @contextlib.contextmanager
    def _opened(self, row: FileRow) -> Generator[int]:
        """The spool file, to be written, in its size."""
        path = self._spool.data_path(row.file)
        try:
            with self._locks[row.file % LOCKS_COUNT]:
                fd = _open_own(path, is_begun=bool(self._file(row.file).have))
            try:
                if os.fstat(fd).st_size != row.size:
                    os.ftruncate(fd, row.size)
                yield fd
            finally:
                os.close(fd)
        except OSError as exc:
            if exc.errno in {errno.ENOSPC, errno.EDQUOT} and not isinstance(exc, FullError):
                msg = f"no space in the spool for file {row.file}"
                raise FullError(msg, subject=path) from exc
            raise

    def _fetch_once(self, row: FileRow, wanted: Sequence[int], *, is_waiting: bool = True) -> None:
        """Have some of these chunks here: those that nobody else is at, or what others fetch."""
        mine = self._claims.take(row.file, wanted)
        if not mine and is_waiting:
            self._claims.wait(row.file, wanted[0])
        left = list(mine)
        try:
            # What another thread finished before this one took it isn't written again.
            row = self._file(row.file)
            missing = _missing(row, mine)
            if missing:
                self._fetch_chunks(row, missing, left)
        finally:
            self._claims.give_back(row.file, left)

    def _fetch_chunks(self, row: FileRow, mine: Sequence[int], left: list[int]) -> None:
        """Have these chunks in the spool file; each that is gets out of *left*, for others to see.

        Where the copy is given up meanwhile it ends, and the caller begins anew.
        """
        chunks = [chunk_of(row, index) for index in mine]
        with (
            self._opened(row) as fd,
            contextlib.closing(self._read(row, fd, chunks)) as digests,
        ):
            for chunk in chunks:
                _check(row, chunk, digests)
                if self._mark(row.file, fd, chunk.index) is None:
                    return
                left.remove(chunk.index)
                self._claims.give_back(row.file, [chunk.index])

    def _read(self, row: FileRow, fd: int, chunks: Sequence[Chunk]) -> Generator[bytes]:
        """The chunks' digests in their order; all bytes are in the spool file before."""
        spans = [(chunk.offset, chunk.length) for chunk in chunks]

        def keep(offset: int, piece: memoryview) -> None:
            write_at(fd, piece, offset)

        return self._ranges.digests(row.key, spans, keep)

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
                return self._finish(file, fd, bytes(have))
            return self._spool.update_file(file, local=LocalBytes.PARTIAL, have=bytes(have))

    def _finish(self, file: int, fd: int, have: bytes) -> FileRow:
        stat = os.fstat(fd)
        return self._spool.update_file(
            file,
            local=LocalBytes.FULL,
            have=have,
            mtime_ns=stat.st_mtime_ns,
            ctime_ns=stat.st_ctime_ns,
        )

    def _finish_empty(self, row: FileRow, fd: int) -> None:
        if digest_of(b"") != row.digest:
            msg = f"{row.key} is said to be empty, but not by its digest {row.digest}"
            raise _StoreFailed(row, IntegrityError(msg, subject=row.key))
        with self._spool.transaction():
            self._finish(row.file, fd, b"")

    def _told(self, row: FileRow, cause: OSError) -> IntegrityError:
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


def _check(row: FileRow, chunk: Chunk, digests: Generator[bytes]) -> None:
    """Take one chunk's digest and compare it; it counts only once it is marked.

    Raises:
        _StoreFailed: it isn't what it must be.
    """
    try:
        found = next(digests)
        if found != chunk.digest:
            msg = (
                f"chunk {chunk.index} of {row.key} has digest {found.hex()}, "
                f"the manifest says {chunk.digest.hex()}"
            )
            raise IntegrityError(msg, subject=row.key)
    except (IntegrityError, MissingError) as exc:
        raise _StoreFailed(row, exc) from exc


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


def _missing(row: FileRow, wanted: Iterable[int]) -> list[int]:
    """Those of the chunks that aren't here."""
    if row.local is LocalBytes.FULL:
        return []
    return [index for index in wanted if not (row.have and row.have[index])]
