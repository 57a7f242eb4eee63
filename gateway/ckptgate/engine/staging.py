"""From quiet to digested: fsync, digests, holes and containers of files that their writers closed.

It owns the rule that a file counts as digested only if nobody may write it and its fingerprint was
the same before and after, and that a file which changes later loses its digest. An fsync error is
final for the bytes: they are kept, but the file counts only once it was written again.

Thread rule: `step` belongs to the publisher's one thread; digests run on the pool's.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Final

import msgspec

from ckptgate.engine.digest import (
    DigestOfFile,
    Fingerprint,
    SpoolView,
    digest_file,
    has_hole,
    is_unchanged,
)
from ckptgate.engine.fetch import drop_copy
from ckptgate.engine.jobs import Backoff, Cancelled, Jobs
from ckptgate.engine.node import Node
from ckptgate.errors import CkptError
from ckptgate.formats.containers import check_container
from ckptgate.model.documents import Evidence
from ckptgate.model.states import AttemptState, FileState
from ckptgate.ports.spool import (
    AttemptRow,
    FileRow,
    LocalBytes,
    NodeRow,
    PendingKind,
    Spool,
)

__all__ = ["FSYNC_FAILED", "Stager", "is_base_file"]

_log = logging.getLogger(__name__)

FSYNC_FAILED: Final = "fsync failed"
"""How `Evidence.problem` begins for bytes that may not be on the disk."""

_UNDECIDED: Final = (AttemptState.OPEN, AttemptState.SEALED)


def is_base_file(spool: Spool, node: NodeRow) -> bool:
    """Whether a revision's node still shares the bytes of the checkpoint that it revises."""
    if node.base is None:
        return False
    base = spool.node(node.base)
    return base is not None and base.file == node.file


class Stager:
    """Digests what is quiet."""

    def __init__(self, node: Node) -> None:
        self._spool = node.spool
        self._clock = node.clock
        self._events = node.events
        self._settings = node.settings
        self._jobs: Jobs[int] = Jobs("digest", node.settings.digest_threads)
        self._backoff: Backoff[int] = Backoff(
            node.clock, node.settings.retry_first_s, node.settings.retry_max_s
        )

    def close(self) -> None:
        """Stop the digests that run."""
        self._jobs.close()

    def step(self) -> bool:
        """Start what can be started, wait a moment, and say whether anything was done."""
        did = False
        for path, file in self._quiet_files():
            if self._jobs.is_full():
                break
            if not self._jobs.has(file.file) and self._is_ready(file):
                self._submit(path, file.file)
        for file_id, error in self._jobs.take_done(self._settings.job_wait_s):
            did = self._finish(file_id, error) or did
        return did

    def recheck(self, attempt: AttemptRow) -> bool:
        """Take the digest from files of an undecided attempt that changed; True if any did."""
        did = False
        for path, node, file in self._spool.files_of_attempt(attempt.id):
            if file.state not in {FileState.DIGESTED, FileState.STORED}:
                continue
            if file.local is not LocalBytes.FULL or is_base_file(self._spool, node):
                continue
            if file.mtime_ns == 0 or is_unchanged(file, self._spool.data_path(file.file)):
                continue
            did = self._lose_digest(attempt, path, file) or did
        return did

    def _lose_digest(self, attempt: AttemptRow, path: str, file: FileRow) -> bool:
        with self._spool.transaction():
            row, now = self._spool.file(file.file), self._spool.attempt(attempt.id)
            if row is None or row != file or now is None or now.state not in _UNDECIDED:
                return False
            if now.is_voted:
                # The store has what was voted for; these bytes here are something else.
                drop_copy(self._spool, row)
            else:
                self._spool.update_file(file.file, state=FileState.QUIET)
        kind = "changed-after-vote" if now.is_voted else "changed-after-digest"
        self._events.record(kind, attempt.name, f"{path} was written without an open handle")
        return True

    def _quiet_files(self) -> Iterator[tuple[str, FileRow]]:
        for attempt in self._spool.attempts(states=_UNDECIDED):
            quiet = self._spool.files_of_attempt(attempt.id, states=(FileState.QUIET,))
            yield from ((path, file) for path, _, file in quiet)
        for pending in self._spool.pending():
            if pending.kind is PendingKind.WHOLE and pending.ino is not None:
                node = self._spool.node(pending.ino)
                whole = self._spool.file(node.file) if node and node.file is not None else None
                if whole is not None and whole.state is FileState.QUIET:
                    yield pending.name, whole

    def _is_ready(self, file: FileRow) -> bool:
        if not self._backoff.is_due(file.file):
            return False
        if file.evidence.problem.startswith(FSYNC_FAILED):
            return not is_unchanged(file, self._spool.data_path(file.file))
        return self._has_no_writer(file.file)

    def _has_no_writer(self, file_id: int) -> bool:
        return all(handle.is_closed for handle in self._spool.handles(file=file_id))

    def _submit(self, path: str, file_id: int) -> None:
        self._jobs.submit(file_id, lambda: self._digest(path, file_id))

    def _finish(self, file_id: int, error: BaseException | None) -> bool:
        if error is None:
            self._backoff.succeeded(file_id)
            row = self._spool.file(file_id)
            return row is not None and row.state is FileState.DIGESTED
        if isinstance(error, Cancelled):
            return False
        if not isinstance(error, OSError):
            raise error
        self._backoff.failed(file_id)
        _log.warning("digest-failed file=%d error=%s", file_id, error)
        self._events.record("digest-failed", str(file_id), str(error))
        return False

    def _digest(self, path: str, file_id: int) -> None:
        """One file, on a thread of the pool; OSError where the disk fails."""
        fd = os.open(self._spool.data_path(file_id), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            before = self._settled(fd)
            if not self._sync(fd, path, file_id, before):
                return
            found = digest_file(fd, self._jobs.check_cancelled)
            evidence = self._judge(fd, path, before.size)
            after = Fingerprint.of(fd)
        finally:
            os.close(fd)
        if before == after and found.size == before.size:
            self._keep(file_id, before, found, evidence)

    def _settled(self, fd: int) -> Fingerprint:
        """The fingerprint, once its time stamp is old enough to tell a later write from it."""
        found = Fingerprint.of(fd)
        age_s = (self._clock.now_ns() - found.mtime_ns) / 1e9
        if 0 <= age_s < self._settings.racy_write_s:
            self._clock.sleep(self._settings.racy_write_s)
            found = Fingerprint.of(fd)
        return found

    def _sync(self, fd: int, path: str, file_id: int, seen: Fingerprint) -> bool:
        try:
            os.fsync(fd)
        except OSError as exc:
            # The kernel has dropped the dirty pages: asking again would succeed and prove nothing.
            problem = f"{FSYNC_FAILED}: {exc.strerror or exc}: the file must be written again"
            with self._spool.transaction():
                row = self._spool.file(file_id)
                if row is None or row.state is not FileState.QUIET:
                    return False
                self._spool.update_file(
                    file_id,
                    size=seen.size,
                    mtime_ns=seen.mtime_ns,
                    ctime_ns=seen.ctime_ns,
                    evidence=msgspec.structs.replace(row.evidence, problem=problem, is_valid=False),
                )
            self._events.record("fsync-failed", path, problem)
            return False
        return True

    def _judge(self, fd: int, path: str, size: int) -> Evidence:
        try:
            found = check_container(path, SpoolView(fd, size))
        except CkptError as exc:
            return Evidence(is_valid=False, has_hole=has_hole(fd, size), problem=str(exc))
        return Evidence(
            container=found.kind,
            is_valid=found.is_valid,
            has_hole=has_hole(fd, size),
            problem=found.problem,
        )

    def _keep(
        self, file_id: int, seen: Fingerprint, found: DigestOfFile, evidence: Evidence
    ) -> None:
        with self._spool.transaction():
            row = self._spool.file(file_id)
            if row is None or row.state is not FileState.QUIET:
                return
            if not self._has_no_writer(file_id):
                return
            # Who wrote it, and whether it was torn, is known from its close.
            evidence = msgspec.structs.replace(
                evidence, is_torn=row.evidence.is_torn, rank=row.evidence.rank
            )
            self._spool.update_file(
                file_id,
                state=FileState.DIGESTED,
                size=seen.size,
                mtime_ns=seen.mtime_ns,
                ctime_ns=seen.ctime_ns,
                digest=found.digest,
                chunks=found.chunks,
                key="",
                evidence=evidence,
            )
