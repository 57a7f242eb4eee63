"""From quiet to digested: fsync, digests, holes and containers of files that their writers closed.

It owns the rule that a file counts as digested only if nobody may write it and its fingerprint was
the same before and after, and that a file which changes later loses its digest. An fsync error is
final for the bytes: they are kept, but the file counts only once it was written again.

Thread rule: `step` belongs to the publisher's one thread; digests run on the pool's.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from posixpath import basename
from typing import Final

import msgspec

from ckptgate.engine.batches import Queue, batches
from ckptgate.engine.digest import (
    DigestOfFile,
    Fingerprint,
    SpoolView,
    digest_file,
    has_hole,
    is_unchanged,
)
from ckptgate.engine.durable import sync_files
from ckptgate.engine.fetch import drop_copy
from ckptgate.engine.jobs import Backoff, Cancelled, Jobs, Outcome
from ckptgate.engine.node import Node
from ckptgate.engine.pace import Pace
from ckptgate.errors import CkptError
from ckptgate.formats.containers import check_container
from ckptgate.model.documents import Evidence
from ckptgate.model.states import (
    FSYNC_FAILED,
    TOO_SPARSE,
    UNDECIDED,
    FileState,
    must_be_rewritten,
)
from ckptgate.ports.meters import DIGESTED_BYTES, DIGESTED_FILES
from ckptgate.ports.spool import (
    AttemptRow,
    FileRow,
    LocalBytes,
    NodeRow,
    PendingKind,
    Spool,
)

__all__ = ["Stager", "changed_files"]

_log = logging.getLogger(__name__)

_DIGESTED: Final = (FileState.DIGESTED, FileState.STORED)
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_SECTOR_BYTES: Final = 512
_HOLES_BYTES_MAX: Final = 1 << 40
_KEPT_AT_ONCE: Final = 32
"""Files whose digests are recorded in one transaction: the mount's own wait behind it."""


def changed_files(spool: Spool, attempt: AttemptRow) -> Iterator[tuple[str, FileRow]]:
    """(path, row) of digested files of the attempt whose bytes here are others by now.

    What a revision shares with the checkpoint that it revises is watched over there.
    """
    of_base: dict[int, int | None] = {}
    if attempt.base is not None:
        of_base = {node.ino: node.file for _, node in spool.tree(attempt.base)}
    for path, node, file in spool.files_of_attempt(attempt.id, states=_DIGESTED):
        if file.local is not LocalBytes.FULL or file.mtime_ns == 0:
            continue
        if node.base is not None and of_base.get(node.base, -1) == node.file:
            continue
        if not is_unchanged(file, spool.data_path(file.file)):
            yield path, file


@dataclass(frozen=True, slots=True)
class _Open:
    """A file that is being digested: its path in the checkpoint, its id, its descriptor."""

    path: str
    file: int
    fd: int


@dataclass(frozen=True, slots=True)
class _Digested:
    """What was found of a file that stayed as it was seen, and under which name."""

    file: int
    path: str
    seen: Fingerprint
    found: DigestOfFile
    evidence: Evidence


class Stager:
    """Digests what is quiet."""

    def __init__(self, node: Node) -> None:
        self._spool = node.spool
        self._clock = node.clock
        self._events = node.events
        self._meters = node.meters
        self._settings = node.settings
        self._pace = Pace(node.clock)
        self._queue = Queue(node.spool, FileState.QUIET)
        self._jobs: Jobs[int] = Jobs("digest", node.settings.digest_threads, node.wake)
        self._backoff: Backoff[int] = Backoff(
            node.clock, node.settings.retry_first_s, node.settings.retry_max_s
        )

    def close(self) -> None:
        """Stop the digests that run."""
        self._jobs.close()

    def step(self) -> bool:
        """Start what can be started, wait a moment, and say whether anything was done."""
        for batch in batches(self._ready_files()):
            ids = [file for _, file in batch]
            self._jobs.submit(ids, partial(self._digest, batch))
        did = False
        for file_id, outcome in self._jobs.take_done(self._settings.job_wait_s):
            did = self._finish(file_id, outcome) or did
        return did

    def recheck(self, attempt: AttemptRow) -> bool:
        """Take the digest from files of an undecided attempt that changed; True if any did."""
        if not self._pace.is_due(attempt.id):
            return False
        with self._pace.look(attempt.id):
            changed = list(changed_files(self._spool, attempt))
        did = False
        for path, file in changed:
            did = self._lose_digest(attempt, path, file) or did
        return did

    def _lose_digest(self, attempt: AttemptRow, path: str, file: FileRow) -> bool:
        with self._spool.transaction():
            row, now = self._spool.file(file.file), self._spool.attempt(attempt.id)
            if row is None or row != file or now is None or now.state not in UNDECIDED:
                return False
            if now.is_voted:
                # The store has what was voted for; these bytes here are something else.
                drop_copy(self._spool, row)
            else:
                self._spool.update_file(file.file, state=FileState.QUIET)
        kind = "changed-after-vote" if now.is_voted else "changed-after-digest"
        self._events.record(kind, attempt.name, f"{path} was written without an open handle")
        return True

    def _ready_files(self) -> list[tuple[str, int, int]]:
        """(path, file id, bytes) of quiet files to be digested now, as many as there is room."""
        found: list[tuple[str, int, int]] = []
        waiting = list(self._quiet_files())
        if not waiting:
            return found
        written = {handle.file for handle in self._spool.handles() if not handle.is_closed}
        for path, node, file in waiting[: self._jobs.room]:
            if not self._jobs.has(file.file) and self._is_ready(file, written):
                found.append((path, file.file, node.size))
        return found

    def _quiet_files(self) -> Iterator[tuple[str, NodeRow, FileRow]]:
        for pending in self._spool.pending():
            if pending.kind is PendingKind.WHOLE and pending.ino is not None:
                node = self._spool.node(pending.ino)
                whole = self._spool.file(node.file) if node and node.file is not None else None
                if node is not None and whole is not None and whole.state is FileState.QUIET:
                    yield pending.name, node, whole
        for attempt in self._spool.attempts(states=UNDECIDED):
            yield from self._queue.next(attempt.id, self._jobs.room)

    def _is_ready(self, file: FileRow, written: Container[int]) -> bool:
        if not self._backoff.is_due(file.file):
            return False
        if must_be_rewritten(file.evidence.problem):
            return not is_unchanged(file, self._spool.data_path(file.file))
        return file.file not in written

    def _finish(self, file_id: int, outcome: bool | BaseException) -> bool:
        if isinstance(outcome, bool):
            self._backoff.succeeded(file_id)
            return outcome
        if isinstance(outcome, Cancelled):
            return False
        if not isinstance(outcome, OSError):
            raise outcome
        self._backoff.failed(file_id)
        _log.warning("digest-failed file=%d error=%s", file_id, outcome)
        self._events.record("digest-failed", str(file_id), str(outcome))
        return False

    # On a thread of the pool

    def _digest(self, batch: Sequence[tuple[str, int]]) -> Mapping[int, Outcome]:
        outcomes: dict[int, Outcome] = {}
        opened: list[_Open] = []
        found: list[_Digested] = []
        try:
            for path, file_id in batch:
                try:
                    fd = os.open(self._spool.data_path(file_id), _READ)
                except OSError as exc:
                    outcomes[file_id] = exc
                else:
                    opened.append(_Open(path, file_id, fd))
            for file, before in self._synced(opened):
                try:
                    digested = self._digest_one(file, before)
                except OSError as exc:
                    outcomes[file.file] = exc
                else:
                    found += [] if digested is None else [digested]
        finally:
            for file in opened:
                os.close(file.fd)
        for at in range(0, len(found), _KEPT_AT_ONCE):
            outcomes.update(self._keep(found[at : at + _KEPT_AT_ONCE]))
        return outcomes

    def _digest_one(self, file: _Open, before: Fingerprint) -> _Digested | None:
        """The file's digests, None if it was written meanwhile or can't be digested."""
        holes = before.size - os.fstat(file.fd).st_blocks * _SECTOR_BYTES
        if holes > _HOLES_BYTES_MAX:
            # No framework leaves that; reading it would keep this thread for hours or for ever.
            problem = f"{TOO_SPARSE} of {before.size} bytes: holes of {holes} bytes"
            self._refuse(file, before, "too-sparse", problem)
            return None
        found = digest_file(file.fd, self._jobs.check_cancelled)
        evidence = self._judge(file.fd, file.path, before.size)
        after = Fingerprint.of(file.fd)
        if before != after or found.size != before.size:
            return None
        return _Digested(file.file, file.path, before, found, evidence)

    def _settled(self, opened: Sequence[_Open]) -> list[Fingerprint]:
        """The fingerprints, once their time stamps are old enough to tell a later write."""
        found = [Fingerprint.of(file.fd) for file in opened]
        now_ns = self._clock.now_ns()
        ages_s = [(now_ns - seen.mtime_ns) / 1e9 for seen in found]
        if any(0 <= age_s < self._settings.racy_write_s for age_s in ages_s):
            self._clock.sleep(self._settings.racy_write_s)
            found = [Fingerprint.of(file.fd) for file in opened]
        return found

    def _synced(self, opened: Sequence[_Open]) -> list[tuple[_Open, Fingerprint]]:
        """The files that are on the disk, as they were just before."""
        fingerprints = self._settled(opened)
        errors = sync_files([file.fd for file in opened])
        for file, seen in zip(opened, fingerprints, strict=True):
            if file.fd in errors:
                self._sync_failed(file, seen, errors[file.fd])
        pairs = zip(opened, fingerprints, strict=True)
        return [(file, seen) for file, seen in pairs if file.fd not in errors]

    def _sync_failed(self, file: _Open, seen: Fingerprint, error: OSError) -> None:
        # The kernel has dropped the dirty pages: asking again would succeed and prove nothing.
        problem = f"{FSYNC_FAILED}: {error.strerror or error}: the file must be written again"
        self._refuse(file, seen, "fsync-failed", problem)

    def _refuse(self, file: _Open, seen: Fingerprint, kind: str, problem: str) -> None:
        """These bytes count only once they were written again."""
        with self._spool.transaction():
            row = self._spool.file(file.file)
            if row is None or row.state is not FileState.QUIET:
                return
            self._spool.update_file(
                file.file,
                size=seen.size,
                mtime_ns=seen.mtime_ns,
                ctime_ns=seen.ctime_ns,
                evidence=msgspec.structs.replace(row.evidence, problem=problem, is_valid=False),
            )
        self._events.record(kind, file.path, problem)

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

    def _keep(self, digested: Sequence[_Digested]) -> dict[int, Outcome]:
        """Record the digests of files that are still quiet; whether each was."""
        kept: dict[int, Outcome] = {}
        size = 0
        with self._spool.transaction():
            written = {handle.file for handle in self._spool.handles() if not handle.is_closed}
            for each in digested:
                row = self._spool.file(each.file)
                is_quiet = row is not None and row.state is FileState.QUIET
                if row is None or not is_quiet or each.file in written:
                    continue
                if basename(each.path) not in self._names(each.file):
                    # Renamed meanwhile: its container is to be judged by the new name.
                    continue
                self._keep_one(row, each)
                kept[each.file] = True
                size += each.seen.size
        self._meters.add(DIGESTED_FILES, len(kept))
        self._meters.add(DIGESTED_BYTES, size)
        return kept

    def _names(self, file: int) -> set[str]:
        """All names that a file has now, pending ones too."""
        inodes = {node.ino for node in self._spool.nodes_of_file(file)}
        names = {row.name for row in self._spool.pending() if row.ino in inodes}
        places = [self._spool.place(ino) for ino in inodes]
        return names | {place[1] for place in places if place is not None}

    def _keep_one(self, row: FileRow, digested: _Digested) -> None:
        # Who wrote it, and whether it was torn, is known from its close.
        evidence = msgspec.structs.replace(
            digested.evidence, is_torn=row.evidence.is_torn, rank=row.evidence.rank
        )
        self._spool.update_file(
            digested.file,
            state=FileState.DIGESTED,
            size=digested.seen.size,
            mtime_ns=digested.seen.mtime_ns,
            ctime_ns=digested.seen.ctime_ns,
            digest=digested.found.digest,
            chunks=digested.found.chunks,
            have=b"",
            evidence=evidence,
        )
