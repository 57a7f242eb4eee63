"""Votes: a member's proof of its part of an attempt, derived from the spool's rows.

It owns the rule when a vote is final (DESIGN rule 3): the SEAL was seen in the log, and *then*
every file was found quiet, unchanged since its digest and verified in the store. That check and the
mark `is_voted` are one transaction; the vote's document follows from the rows, so a crash in
between only repeats it.

Thread rule: the publisher's one thread.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

import msgspec

from ckptgate.engine.manifests import DIGEST_BYTES, load_manifest
from ckptgate.engine.node import Node
from ckptgate.engine.pace import Pace
from ckptgate.engine.staging import changed_files
from ckptgate.errors import ExistsError, IntegrityError, MissingError
from ckptgate.model.documents import (
    MAX_DOCUMENT_BYTES,
    ChunkRef,
    EntryType,
    FileEntry,
    PointerKind,
    PointerValue,
    Vote,
    decode,
    digest_of,
    encode,
)
from ckptgate.model.ids import CHUNK_BYTES, chunk_count
from ckptgate.model.jobkey import JobKey
from ckptgate.model.layout import chunk_table_key, full_key, join_key, vote_key
from ckptgate.model.moves import taken
from ckptgate.model.states import UNDECIDED, FileState
from ckptgate.ports.recording import given_up, savings_of
from ckptgate.ports.spool import (
    VOTED_META,
    AttemptRow,
    FileRow,
    NodeKind,
    NodeRow,
    PendingKind,
    PendingRow,
    Spool,
)

__all__ = ["POINTER_BYTES_MAX", "Voter", "is_shared_job", "pending_value"]

_log = logging.getLogger(__name__)

POINTER_BYTES_MAX: Final = 4096
SLOTS_MAX: Final = 1000
"""Votes of ours from before a crash that may stand in the way of the next one."""
FOLLOW_S: Final = 1.0
"""From a final vote to the first look for what others renamed since."""

ASKED_MAX: Final = 16
"""Other members that one without a file asks whether they have some."""

_NOT_STORED: Final = frozenset(FileState) - {FileState.STORED}


def is_shared_job(job_key: str) -> bool:
    """Whether members on other nodes can have the same job key."""
    try:
        return JobKey.parse(job_key).is_shared
    except ValueError:
        return False


def pending_value(spool: Spool, name: str, node: NodeRow, target: str) -> PointerValue | None:
    """The pointer value that a pending node stands for; None while it can't be told."""
    if node.kind is NodeKind.SYMLINK:
        return PointerValue(
            pointer=name, kind=PointerKind.SYMLINK, target=target, content=node.target
        )
    if node.kind is not NodeKind.FILE or node.file is None:
        return None
    # Nobody begins to write it while the spool's lock is held.
    with spool.transaction():
        if any(not handle.is_closed for handle in spool.handles(file=node.file)):
            return None
        try:
            with open(spool.data_path(node.file), "rb") as stream:
                content = stream.read(POINTER_BYTES_MAX).decode("utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            _log.warning("pointer-not-readable name=%s error=%s", name, exc)
            return None
    return PointerValue(pointer=name, kind=PointerKind.TEXT, target=target, content=content)


@dataclass(slots=True)
class _Written:
    """The last vote that is known to be in the store (its number set to 0), and when."""

    vote: Vote
    at: float


class Voter:
    """Writes this member's votes."""

    def __init__(self, node: Node) -> None:
        self._store = node.store
        self._spool = node.spool
        self._membership = node.membership
        self._member = node.member
        self._clock = node.clock
        self._settings = node.settings
        self._pace = Pace(node.clock)
        self._written: dict[int, _Written] = {}
        self._looks: dict[int, tuple[float, float]] = {}
        self._base_refs: dict[str, dict[str, ChunkRef]] = {}

    def step(self, attempt: AttemptRow) -> bool:
        """Write the vote that is due, if any; True if one was written or became final.

        Raises:
            CkptError: the store failed; the same vote is due at the next pass.
        """
        if not attempt.is_joined or attempt.state not in UNDECIDED:
            return False
        did = self._decide_final(attempt) or self._follow_renames(attempt)
        row = self._spool.attempt(attempt.id)
        if row is None or not self._is_due(row):
            return did
        if not (row.is_voted or self._pace.is_due(row.id)):
            return did
        with self._pace.look(row.id):
            vote, table = self.build(row)
        last = self._last(row)
        if last is not None and _is_said(last.vote, vote):
            return did
        self._write(row, vote, table)
        return True

    def forget(self, attempt_id: int) -> None:
        """The attempt is decided."""
        self._written.pop(attempt_id, None)
        self._looks.pop(attempt_id, None)

    def owes(self, attempt: AttemptRow) -> list[str]:
        """What this member still has to do before its final vote, one line each."""
        lines = [
            f"{path}: {_why_not_stored(file)}"
            for path, _, file in self._spool.files_of_attempt(attempt.id, states=_NOT_STORED)
        ]
        handles = self._spool.handles_of_attempt(attempt.id)
        writers = sorted({handle.pid for handle in handles if not handle.is_closed})
        if writers:
            lines.append(f"open for writing by process {', '.join(map(str, writers))}")
        return lines

    def build(self, attempt: AttemptRow) -> tuple[Vote, bytes]:
        """The vote (with number 0) that the rows stand for now, and its table of chunk digests."""
        # First: what is renamed meanwhile is followed once more by who reads it, and that is there.
        after = taken(self._spool.moves(attempt.id))
        files = {path: file for path, _, file in self._spool.files_of_attempt(attempt.id)}
        tree = [(path, node, files.get(path)) for path, node in self._spool.tree(attempt.id)]
        counted = [
            item for item in tree if item[2] is None or self._is_ours_and_stored(attempt, item[2])
        ]
        table = b"".join(file.chunks for _, _, file in counted if file and _brings_chunks(file))
        table_key = chunk_table_key(attempt.attempt, digest_of(table)) if table else ""
        entries: list[FileEntry] = []
        start = 0
        for path, node, file in counted:
            ref: ChunkRef | None = None
            if file is not None and _brings_chunks(file):
                ref = ChunkRef(table=table_key, start=start)
                start += chunk_count(file.size)
            elif file is not None and file.size > CHUNK_BYTES:
                ref = self._base_chunks(attempt, file)
            entries.append(self._entry(attempt, path, node, file, ref))
        base = self._spool.attempt(attempt.base) if attempt.base is not None else None
        vote = Vote(
            attempt=attempt.attempt,
            member=self._member,
            n=0,
            is_final=attempt.is_voted,
            seal_index=attempt.seal_index,
            committed_ranks=tuple(sorted(self._spool.rank_commits(attempt.id))),
            committed_all=attempt.committed_all,
            world_size=attempt.world_size,
            base=base.attempt if base is not None else "",
            pointers=self._pointers(attempt),
            chunk_table=table_key,
            after=after,
            entries=tuple(sorted(entries, key=lambda entry: entry.path)),
            saved_by=savings_of(self._spool, attempt.id) or msgspec.UNSET,
        )
        return vote, table

    def _is_ours_and_stored(self, attempt: AttemptRow, file: FileRow) -> bool:
        """Whether the vote speaks of it: another member's file is that member's to vote for."""
        is_stored = file.state is FileState.STORED and bool(file.key)
        return is_stored and not self._membership.is_imported(attempt, file)

    def _base_chunks(self, attempt: AttemptRow, file: FileRow) -> ChunkRef:
        """Where the chunk digests of a revision's unchanged file are: in its base's table."""
        base = self._spool.attempt(attempt.base) if attempt.base is not None else None
        if base is not None and base.manifest:
            if base.manifest not in self._base_refs:
                manifest = load_manifest(self._store, base.run, base.attempt, base.manifest)
                self._base_refs.clear()
                self._base_refs[base.manifest] = {
                    full_key(base.run, entry.key): entry.chunks
                    for entry in manifest.entries
                    if entry.chunks is not None
                }
            ref = self._base_refs[base.manifest].get(file.key)
            if ref is not None:
                return ref
        msg = f"no manifest names the chunk digests of file {file.file} ({file.key})"
        raise IntegrityError(msg, subject=file.key)

    def _entry(
        self,
        attempt: AttemptRow,
        path: str,
        node: NodeRow,
        file: FileRow | None,
        chunks: ChunkRef | None,
    ) -> FileEntry:
        plain = FileEntry(
            path=path,
            type=EntryType(str(node.kind)) if node.kind is not NodeKind.FILE else EntryType.DIR,
            mode=node.mode,
            mtime_ns=node.mtime_ns,
            target=node.target if node.kind is NodeKind.SYMLINK else "",
            uid=node.uid,
            gid=node.gid,
        )
        if file is None:
            return plain
        return msgspec.structs.replace(
            plain,
            type=EntryType.FILE,
            size=file.size,
            digest=file.digest,
            key=file.key[len(join_key(attempt.run, "x")) - 1 :],
            chunks=chunks,
            evidence=file.evidence,
        )

    def _pointers(self, attempt: AttemptRow) -> tuple[PointerValue, ...]:
        values: list[PointerValue] = []
        for pending in self._pending(attempt):
            node = None if pending.ino is None else self._spool.node(pending.ino)
            value = pending_value(self._spool, pending.name, node, attempt.name) if node else None
            if value is not None:
                values.append(value)
        return tuple(sorted(values, key=lambda value: value.pointer))

    def _pending(self, attempt: AttemptRow) -> list[PendingRow]:
        """The job's pointers that are to move with this attempt."""
        return [
            row
            for row in self._spool.pending(parent=attempt.run_ino)
            if row.kind is PendingKind.POINTER
            and row.job_key == attempt.job_key
            and row.target == attempt.name
            and row.ino is not None
        ]

    def _decide_final(self, attempt: AttemptRow) -> bool:
        if attempt.is_voted or not self._may_be_final(attempt):
            return False
        # Cheap first: most looks end here. What takes long is done before the transaction.
        if not self._is_quiet(attempt) or any(changed_files(self._spool, attempt)):
            return False
        if self._is_bare(attempt):
            return False
        if self._membership.refresh_moves(attempt):
            return True
        with self._spool.transaction():
            row = self._spool.attempt(attempt.id)
            if row is None or row.state not in UNDECIDED or not self._may_be_final(row):
                return False
            # A file that was opened or added since then is open, or waits; and a descriptor that
            # leaked is no more stopped by this transaction than by the look before it.
            if not self._has_rest(row) or self._has_waiting(row):
                return False
            self._spool.update_attempt(row.id, is_voted=True)
            if pending := self._pending(row):
                newest = max(item.ino or 0 for item in pending)
                self._spool.set_meta(VOTED_META.format(attempt=row.id), str(newest))
        _log.info("vote-final attempt=%s", attempt.attempt)
        return True

    def _follow_renames(self, attempt: AttemptRow) -> bool:
        """After the final vote, take over what others renamed since; the next vote says so.

        More and more seldom, so that it costs the store little while others are waited for.
        """
        if not attempt.is_voted:
            return False
        now_s = self._clock.monotonic()
        due_s, wait_s = self._looks.setdefault(attempt.id, (now_s + FOLLOW_S, FOLLOW_S))
        if now_s < due_s:
            return False
        self._looks[attempt.id] = (now_s + 2 * wait_s, 2 * wait_s)
        return self._membership.refresh_moves(attempt)

    def _is_bare(self, row: AttemptRow) -> bool:
        """Whether there is nothing to commit: no file is left here, and nobody else voted for one.

        A final vote would only keep its job from removing it, or from writing it, until it is given
        up for that. Who has files votes first. Of many others not all are read: then it votes.
        """
        if any(self._spool.count_files(row.id).values()):
            return False
        others = set(self._membership.member_ids(row.run, row.attempt)) - {self._member}
        if len(others) > ASKED_MAX:
            return False
        votes = self._membership.newest_votes(row.run, row.attempt, sorted(others))
        return not any(
            entry.type is EntryType.FILE for vote in votes.values() for entry in vote.entries
        )

    def _may_be_final(self, row: AttemptRow) -> bool:
        # Not even when all ranks that wrote here have committed: another rank of this node may not
        # have begun yet. Only the SEAL says that nobody writes any more.
        return row.seal_index >= 0 and not given_up(self._spool, row.id)

    def _is_quiet(self, row: AttemptRow) -> bool:
        """Whether the rows say that nothing is being written or waits for the store."""
        return self._has_rest(row) and not self._spool.count_files(row.id).keys() & _NOT_STORED

    def _has_waiting(self, row: AttemptRow) -> bool:
        """Whether a file was closed and isn't stored; by an index, as others' changes wait."""
        return any(
            self._spool.waiting_files(row.id, state, after=0, limit=1)
            for state in (FileState.QUIET, FileState.DIGESTED)
        )

    def _has_rest(self, row: AttemptRow) -> bool:
        """Whether nobody has a file of it open for writing, and no name waits to be told."""
        if self._spool.name_ops(row.id):
            return False
        return all(handle.is_closed for handle in self._spool.handles_of_attempt(row.id))

    def _is_due(self, row: AttemptRow) -> bool:
        if row.is_voted:
            return True
        if not is_shared_job(row.job_key):
            return False
        last = self._last(row)
        if last is None:
            return True
        if set(last.vote.committed_ranks) != set(self._spool.rank_commits(row.id)):
            return True
        since_s = self._clock.monotonic() - last.at
        if since_s >= self._settings.vote_interval_s:
            return True
        # Nothing more is known to come: who waits for these files hears of them at once.
        return since_s >= self._settings.busy_interval_s and self._is_quiet(row)

    def _last(self, row: AttemptRow) -> _Written | None:
        """The last vote in the store; after a restart it is read back."""
        if row.id not in self._written and row.votes_count > 0:
            key = vote_key(row.run, row.attempt, self._member, row.votes_count - 1)
            try:
                vote = decode(self._store.get(key, limit=MAX_DOCUMENT_BYTES), Vote, subject=key)
            except MissingError:
                return None
            self._remember(row, vote)
        return self._written.get(row.id)

    def _remember(self, row: AttemptRow, vote: Vote) -> None:
        same = msgspec.structs.replace(vote, n=0)
        self._written[row.id] = _Written(same, self._clock.monotonic())

    def _write(self, row: AttemptRow, vote: Vote, table: bytes) -> None:
        # What the others may rely on must not be forgotten by a power loss here.
        self._spool.make_durable()
        if table:
            self._store.create(full_key(row.run, vote.chunk_table), table)
        for n in range(row.votes_count, row.votes_count + SLOTS_MAX):
            key = vote_key(row.run, row.attempt, self._member, n)
            try:
                self._store.create(key, encode(msgspec.structs.replace(vote, n=n)))
            except ExistsError:
                # Ours, from before a crash, when the rows said something else.
                continue
            with self._spool.transaction():
                if self._spool.attempt(row.id) is not None:
                    self._spool.update_attempt(row.id, votes_count=n + 1)
            self._remember(row, vote)
            _log.info("vote attempt=%s n=%d final=%s", row.attempt, n, vote.is_final)
            return
        msg = f"{SLOTS_MAX} votes of this member in {row.attempt!r} are not its own"
        raise IntegrityError(msg, subject=row.attempt, hint="is this spool used by two nodes?")


def _brings_chunks(file: FileRow) -> bool:
    """Whether it is larger than one chunk and its chunk digests are in the spool."""
    return file.size > CHUNK_BYTES and len(file.chunks) == chunk_count(file.size) * DIGEST_BYTES


def _is_said(last: Vote, vote: Vote) -> bool:
    """Whether *last* says all that *vote* does; a final vote isn't repeated for its SEAL's slot."""
    if last.is_final and vote.is_final:
        vote = msgspec.structs.replace(vote, seal_index=last.seal_index)
    return last == vote


def _why_not_stored(file: FileRow) -> str:
    if file.evidence.problem:
        return file.evidence.problem
    return {
        FileState.OPEN: "not closed by its writer",
        FileState.QUIET: "not digested yet",
        FileState.DIGESTED: "not in the store yet",
        FileState.STORED: "",
    }[file.state]
