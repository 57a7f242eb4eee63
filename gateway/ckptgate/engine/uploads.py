"""From digested to stored: put a file's bytes into the store and prove that they arrived.

It owns the rule when the store may share the spool's bytes: nobody has a writing handle, the mark
that they may never be written again is set first, and a read lease proves that no descriptor or
mapping that could write is left anywhere.

Thread rule: `step` belongs to the publisher's one thread; uploads run on the pool's.
"""

from __future__ import annotations

import logging
import os
from typing import Final

from ckptgate.engine.digest import is_unchanged
from ckptgate.engine.jobs import Backoff, Cancelled, Jobs
from ckptgate.engine.leases import has_no_open_writer
from ckptgate.engine.node import Node
from ckptgate.errors import FullError, IntegrityError, TransientStoreError
from ckptgate.model.layout import data_key, full_key, intent_key
from ckptgate.model.states import AttemptState, FileState
from ckptgate.ports.spool import AttemptRow, FileRow, LocalBytes
from ckptgate.ports.store import DigestedFile

__all__ = ["Uploader"]

_log = logging.getLogger(__name__)

_UNDECIDED: Final = (AttemptState.OPEN, AttemptState.SEALED)


class Uploader:
    """Uploads what is digested."""

    def __init__(self, node: Node) -> None:
        self._store = node.store
        self._spool = node.spool
        self._member = node.member
        self._events = node.events
        self._settings = node.settings
        self._verify = node.settings.verify or node.store.default_verify
        self._jobs: Jobs[int] = Jobs("upload", node.settings.upload_threads)
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
        for attempt in self._spool.attempts(states=_UNDECIDED):
            if attempt.is_joined:
                self._start(attempt)
        did = False
        for file_id, error in self._jobs.take_done(self._settings.job_wait_s):
            did = self._finish(file_id, error) or did
        return did

    def _start(self, attempt: AttemptRow) -> None:
        digested = self._spool.files_of_attempt(attempt.id, states=(FileState.DIGESTED,))
        for path, _, file in digested:
            if self._jobs.is_full():
                return
            if file.local is not LocalBytes.FULL:
                continue
            if self._jobs.has(file.file) or not self._backoff.is_due(file.file):
                continue
            if self._wrong.get(file.file, 0) < self._settings.upload_tries_max:
                self._submit(attempt, path, file.file)

    def _submit(self, attempt: AttemptRow, path: str, file_id: int) -> None:
        self._jobs.submit(file_id, lambda: self._upload(attempt, path, file_id))

    def _finish(self, file_id: int, error: BaseException | None) -> bool:
        if error is None:
            self._backoff.succeeded(file_id)
            self._said_full.discard(file_id)
            return True
        if isinstance(error, Cancelled):
            return False
        if not isinstance(error, OSError):
            raise error
        self._backoff.failed(file_id)
        _log.warning("upload-failed file=%d error=%s", file_id, error)
        if isinstance(error, FullError) and file_id not in self._said_full:
            self._said_full.add(file_id)
            self._events.record("store-full", str(file_id), str(error))
        elif not isinstance(error, (TransientStoreError, IntegrityError, FullError)):
            self._events.record("upload-failed", str(file_id), str(error))
        return False

    def _upload(self, attempt: AttemptRow, path: str, file_id: int) -> None:
        """One file, on a thread of the pool."""
        row = self._spool.file(file_id)
        if row is None or row.state is not FileState.DIGESTED:
            return
        local = self._spool.data_path(file_id)
        if not is_unchanged(row, local):
            # Found and recorded by the stager's next pass.
            return
        key = full_key(attempt.run, data_key(attempt.attempt, self._member, file_id))
        source = DigestedFile(
            path=local,
            size=row.size,
            digest=row.digest,
            chunks=row.chunks,
            may_link=self._may_link(attempt, row, local),
        )
        self._jobs.check_cancelled()
        try:
            self._store.put(key, source)
            self._store.verify(key, source, self._verify)
        except IntegrityError as exc:
            self._arrived_wrong(attempt, path, file_id, exc)
            raise
        self._wrong.pop(file_id, None)
        self._keep(row, key, is_linked=source.may_link and self._is_shared(key, local))

    def _keep(self, seen: FileRow, key: str, *, is_linked: bool) -> None:
        with self._spool.transaction():
            row = self._spool.file(seen.file)
            if row is None or row.state is not FileState.DIGESTED or row.digest != seen.digest:
                return
            self._spool.update_file(seen.file, state=FileState.STORED, key=key, is_linked=is_linked)

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
                if now is not None and now.state in _UNDECIDED:
                    self._spool.update_attempt(attempt.id, reason=reason)

    def _may_link(self, attempt: AttemptRow, row: FileRow, local: str) -> bool:
        """Whether the store may share these bytes; marks them first where it may."""
        # An object of the attempt that is there for sure tells which file system the store is on.
        present = self._store.local_path(intent_key(attempt.run, attempt.attempt))
        if present is None or not _on_one_device(local, present):
            return False
        with self._spool.transaction():
            now = self._spool.file(row.file)
            if now is None or now.state is not FileState.DIGESTED or now.digest != row.digest:
                return False
            if self._spool.handles(file=row.file):
                return False
            self._spool.update_file(row.file, is_linked=True)
        if has_no_open_writer(local):
            return True
        with self._spool.transaction():
            now = self._spool.file(row.file)
            if now is not None and now.state is FileState.DIGESTED and not row.is_linked:
                self._spool.update_file(row.file, is_linked=False)
        return False

    def _is_shared(self, key: str, local: str) -> bool:
        """Whether the store's file is the spool's own inode (a copy or reflink is not)."""
        target = self._store.local_path(key)
        try:
            return target is not None and os.path.samefile(target, local)
        except OSError:
            # Unknown: stay with the mark, which only costs a copy at the next write.
            return True


def _on_one_device(local: str, other: str) -> bool:
    """Whether a hard link could join the two."""
    try:
        return os.stat(local).st_dev == os.stat(other).st_dev
    except OSError:
        return False
