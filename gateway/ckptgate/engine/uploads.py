"""From digested to stored: put a file's bytes into the store and prove that they arrived.

It owns the rule when the store may share the spool's bytes: nobody has a writing handle, the mark
that they may never be written again is set first, and a read lease proves that no descriptor or
mapping that could write is left anywhere. Other bytes of a file are stored under another key: a
vote may speak of the old one, and a request that was given up may still arrive there.

Thread rule: `step` belongs to the publisher's one thread; uploads run on the pool's.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from ckptgate.engine.batches import Queue, batches
from ckptgate.engine.digest import is_unchanged
from ckptgate.engine.jobs import Backoff, Cancelled, Jobs, Outcome
from ckptgate.engine.leases import has_no_open_writer
from ckptgate.engine.node import Node
from ckptgate.errors import CkptError, FullError, IntegrityError, TransientStoreError
from ckptgate.model.layout import data_key, data_name, full_key, intent_key
from ckptgate.model.states import UNDECIDED, FileState
from ckptgate.ports.meters import OTHER, UPLOAD_ERRORS, UPLOADED_BYTES, UPLOADED_FILES
from ckptgate.ports.spool import AttemptRow, FileRow, LocalBytes
from ckptgate.ports.store import DigestedFile

__all__ = ["Uploader"]

_log = logging.getLogger(__name__)

_KEPT_AT_ONCE: Final = 32
"""Files that are recorded in one transaction: the mount's own wait behind it."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A file that is sent.

    Attributes:
        path: in the checkpoint.
        row: as it was read.
        local: its spool file.
        key: under which the store gets it.
    """

    path: str
    row: FileRow
    local: str
    key: str


class Uploader:
    """Uploads what is digested."""

    def __init__(self, node: Node) -> None:
        self._store = node.store
        self._spool = node.spool
        self._member = node.member
        self._events = node.events
        self._clock = node.clock
        self._meters = node.meters
        self._progress = node.progress
        self._settings = node.settings
        self._verify = node.settings.verify or node.store.default_verify
        self._queue = Queue(node.spool, FileState.DIGESTED)
        self._jobs: Jobs[int] = Jobs("upload", node.settings.upload_threads, node.wake)
        self._backoff: Backoff[int] = Backoff(
            node.clock, node.settings.retry_first_s, node.settings.retry_max_s
        )
        self._wrong: dict[int, int] = {}
        self._said_full: set[int] = set()

    def close(self) -> None:
        """Wait for the uploads that run."""
        self._jobs.close()

    def step(self) -> bool:
        """Start what can be started, wait a moment, and say whether anything was done."""
        for attempt in self._spool.attempts(states=UNDECIDED):
            if attempt.is_joined:
                self._start(attempt)
        did = False
        for file_id, error in self._jobs.take_done(self._settings.job_wait_s):
            did = self._finish(file_id, error) or did
        return did

    def _start(self, attempt: AttemptRow) -> None:
        due: list[tuple[str, int, int]] = []
        for path, _, file in self._queue.next(attempt.id, self._jobs.room):
            if file.local is not LocalBytes.FULL:
                continue
            if self._jobs.has(file.file) or not self._backoff.is_due(file.file):
                continue
            if self._wrong.get(file.file, 0) < self._settings.upload_tries_max:
                due.append((path, file.file, file.size))
        for batch in batches(due):
            self._jobs.submit([file for _, file in batch], partial(self._upload, attempt, batch))

    def _finish(self, file_id: int, outcome: bool | BaseException) -> bool:
        if isinstance(outcome, bool):
            self._backoff.succeeded(file_id)
            self._said_full.discard(file_id)
            return outcome
        if isinstance(outcome, Cancelled):
            return False
        if not isinstance(outcome, OSError):
            raise outcome
        self._backoff.failed(file_id)
        kind = str(outcome.kind) if isinstance(outcome, CkptError) else OTHER
        self._meters.add(UPLOAD_ERRORS, label=kind)
        _log.warning("upload-failed file=%d error=%s", file_id, outcome)
        if isinstance(outcome, FullError) and file_id not in self._said_full:
            self._said_full.add(file_id)
            self._events.record("store-full", str(file_id), str(outcome))
        elif not isinstance(outcome, (TransientStoreError, IntegrityError, FullError)):
            self._events.record("upload-failed", str(file_id), str(outcome))
        return False

    # On a thread of the pool

    def _upload(
        self, attempt: AttemptRow, batch: Sequence[tuple[str, int]]
    ) -> Mapping[int, Outcome]:
        files = [
            file for file in (self._found(attempt, *item) for item in batch) if file is not None
        ]
        linkable = self._linkable(attempt, files)
        sources = {
            file.key: DigestedFile(
                path=file.local,
                size=file.row.size,
                digest=file.row.digest,
                chunks=file.row.chunks,
                may_link=file.row.file in linkable,
            )
            for file in files
        }
        self._jobs.check_cancelled()
        began_s = self._clock.monotonic()
        errors = self._store.put_all(sources, self._verify)
        outcomes: dict[int, Outcome] = {}
        arrived: list[_Waiting] = []
        size = 0
        for file, key in zip(files, sources, strict=True):
            error = errors.get(key)
            if error is None:
                self._wrong.pop(file.row.file, None)
                arrived.append(file)
                size += file.row.size
                continue
            outcomes[file.row.file] = error
            if isinstance(error, IntegrityError):
                self._arrived_wrong(attempt, file.path, file.row.file, error)
        if arrived:
            self._meters.add(UPLOADED_FILES, len(arrived))
            self._meters.add(UPLOADED_BYTES, size)
            self._progress.stored(attempt.run, attempt.attempt, size, began_s=began_s)
        shared = {
            file.row.file
            for file in arrived
            if file.row.file in linkable and self._is_shared(file.key, file.local)
        }
        for at in range(0, len(arrived), _KEPT_AT_ONCE):
            outcomes.update(self._keep(attempt, arrived[at : at + _KEPT_AT_ONCE], shared))
        return outcomes

    def _found(self, attempt: AttemptRow, path: str, file_id: int) -> _Waiting | None:
        """The file as it is now; None if it isn't to be sent any more."""
        row = self._spool.file(file_id)
        if row is None or row.state is not FileState.DIGESTED:
            return None
        local = self._spool.data_path(file_id)
        # One that changed is found and recorded by the stager's next look.
        if not is_unchanged(row, local):
            return None
        return _Waiting(path, row, local, self._key(attempt, row))

    def _key(self, attempt: AttemptRow, row: FileRow) -> str:
        """The key of these bytes: a try that failed is replaced by the next one."""
        name = data_name(row.file, row.digest)
        return full_key(attempt.run, data_key(attempt.attempt, self._member, name))

    def _keep(
        self, attempt: AttemptRow, files: Sequence[_Waiting], shared: Container[int]
    ) -> dict[int, Outcome]:
        kept: dict[int, Outcome] = {}
        with self._spool.transaction():
            for file in files:
                row = self._spool.file(file.row.file)
                if row is None or not _is_still(row, file.row):
                    continue
                if all(n.attempt != attempt.id for n in self._spool.nodes_of_file(row.file)):
                    # Moved into another checkpoint meanwhile: it has to be stored with that.
                    continue
                self._spool.update_file(
                    row.file,
                    state=FileState.STORED,
                    key=file.key,
                    is_linked=row.file in shared,
                )
                kept[row.file] = True
        return kept

    def _arrived_wrong(
        self, attempt: AttemptRow, path: str, file_id: int, error: IntegrityError
    ) -> None:
        tries = self._wrong.get(file_id, 0) + 1
        self._wrong[file_id] = tries
        self._events.record("upload-mismatch", path, f"try {tries}: {error}")
        if tries >= self._settings.upload_tries_max:
            reason = f"{path} arrived wrong in the store {tries} times: {error}"
            with self._spool.transaction():
                now = self._spool.attempt(attempt.id)
                if now is not None and now.state in UNDECIDED:
                    self._spool.update_attempt(attempt.id, reason=reason)

    def _linkable(self, attempt: AttemptRow, files: Sequence[_Waiting]) -> set[int]:
        """Files whose bytes the store may share; they are marked first."""
        # An object of the attempt that is there for sure tells which file system the store is on.
        present = self._store.local_path(intent_key(attempt.run, attempt.attempt))
        if present is None or not files or not _on_one_device(files[0].local, present):
            return set()
        marked: list[_Waiting] = []
        for at in range(0, len(files), _KEPT_AT_ONCE):
            marked += self._mark(files[at : at + _KEPT_AT_ONCE])
        free = {file.row.file for file in marked if has_no_open_writer(file.local)}
        written = [file for file in marked if file.row.file not in free and not file.row.is_linked]
        for file in written:
            with self._spool.transaction():
                now = self._spool.file(file.row.file)
                if now is not None and now.state is FileState.DIGESTED:
                    self._spool.update_file(now.file, is_linked=False)
        return free

    def _mark(self, files: Sequence[_Waiting]) -> list[_Waiting]:
        """Mark those that nobody has open: from here on opening them for writing copies them."""
        marked: list[_Waiting] = []
        with self._spool.transaction():
            opened = {handle.file for handle in self._spool.handles()}
            for file in files:
                now = self._spool.file(file.row.file)
                if now is None or not _is_still(now, file.row) or now.file in opened:
                    continue
                self._spool.update_file(now.file, is_linked=True)
                marked.append(file)
        return marked

    def _is_shared(self, key: str, local: str) -> bool:
        """Whether the store's file is the spool's own inode (a copy or reflink is not)."""
        target = self._store.local_path(key)
        try:
            return target is not None and os.path.samefile(target, local)
        except OSError:
            # Unknown: stay with the mark, which only costs a copy at the next write.
            return True


def _is_still(now: FileRow, seen: FileRow) -> bool:
    """Whether nobody has written or stored it since it was seen."""
    return now.state is FileState.DIGESTED and now.digest == seen.digest


def _on_one_device(local: str, other: str) -> bool:
    """Whether a hard link could join the two."""
    try:
        return os.stat(local).st_dev == os.stat(other).st_dev
    except OSError:
        return False
