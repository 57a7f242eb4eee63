"""Joining: which attempt of a checkpoint this member takes part in, and what it tells the others.

It owns the rules of joining: the attempt with the highest number is joined if it is open and of the
same shared job key, else the next one is made; a session's attempt is never shared; a member that
registered after the CLOSE says so loudly.

Thread rule: any thread of either process. What must not be done twice is arbitrated by
put-if-absent and by transactions of the spool, so no lock is held over a store call.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from ckptgate.engine.events import Events
from ckptgate.engine.hosts import known_hosts
from ckptgate.engine.incarnations import OVER, Incarnations
from ckptgate.engine.intents import Intents, parse_key
from ckptgate.engine.manifests import load_manifest
from ckptgate.engine.rolls import Rolls
from ckptgate.engine.runlog import RunLogs
from ckptgate.engine.sharedtree import SharedTree, is_foreign_key
from ckptgate.errors import ExistsError, IntegrityError, MissingError
from ckptgate.model.documents import (
    MAX_DOCUMENT_BYTES,
    Intent,
    Member,
    Mover,
    NameOp,
    NameOpKind,
    StoreFormat,
    Vote,
    decode,
    encode,
)
from ckptgate.model.layout import (
    data_key,
    format_key,
    full_key,
    member_key,
    mover_key,
    names_key,
)
from ckptgate.model.rules import AttemptPhase
from ckptgate.model.states import UNDECIDED, AttemptState
from ckptgate.ports.clock import Clock, Ids
from ckptgate.ports.spool import (
    BEGAN_META,
    AttemptRow,
    FileRow,
    NodeKind,
    NodeRow,
    Spool,
)
from ckptgate.ports.store import Store

__all__ = ["Membership"]

_log = logging.getLogger(__name__)

NOTED_KEPT: Final = 16
NOTED_AT_ONCE: Final = 128
"""Members whose counts are written in one transaction."""


class Membership:
    """This member's part in attempts. Any thread; all calls but `is_imported` may block."""

    def __init__(  # noqa: PLR0913 -- the composition root names each part
        self,
        *,
        store: Store,
        spool: Spool,
        logs: RunLogs,
        clock: Clock,
        ids: Ids,
        member: str,
        host: str,
        events: Events | None = None,
        is_alive: Callable[[int, int], bool] | None = None,
    ) -> None:
        self._store = store
        self._spool = spool
        self._logs = logs
        self._clock = clock
        self._member = member
        self._host = host
        self._incarnations = Incarnations(spool=spool, logs=logs, is_alive=is_alive)
        self._events = events if events is not None else Events(clock=clock)
        self._rolls = Rolls(store)
        self._shared = SharedTree(
            store=store, spool=spool, clock=clock, rolls=self._rolls, member=member
        )
        self._intents = Intents(
            store=store, spool=spool, logs=logs, clock=clock, ids=ids, member=member
        )
        self._formats: set[str] = set()
        self._lock = threading.Lock()
        self._noted: dict[int, dict[str, int]] = {}

    def join(self, attempt: AttemptRow) -> AttemptRow:
        """Have this member's objects for *attempt* in the store; the row as it is then.

        Writes the run's format, a FENCE for a shared job key that is new in the run, the intent and
        the member object, then reads the log. Idempotent. A member that is late by then has its row
        aborted (see `check_late`).

        Raises:
            TransientStoreError: the store did not answer; call again.
            FormatVersionError: the run was written by another format version.
            IntegrityError: a document of the run is torn or edited.
        """
        row = self._fresh(attempt.id)
        if row.is_joined or row.state not in UNDECIDED:
            return row
        self._check_format(row.run)
        key = parse_key(row.job_key)
        generation = self._incarnations.generation(row, key)
        if generation is None:
            return self._incarnations.hold_back(row)
        if not row.attempt:
            # An old incarnation that goes on writing can't seal any more: it begins nothing.
            may_begin = not self._incarnations.is_fenced_off(row.run, key, generation)
            row = self._intents.claim(row, key, generation, may_begin=may_begin)
            if not row.attempt:
                return row
        self._register(row)
        with self._spool.transaction():
            reason = self._fresh(row.id).reason
            row = self._spool.update_attempt(
                row.id,
                is_joined=True,
                generation=generation,
                reason="" if reason == OVER else reason,
            )
        self._spool.drop_meta(BEGAN_META.format(attempt=row.id))
        _log.info("joined run=%s attempt=%s generation=%d", row.run, row.attempt, generation)
        self._logs.get(row.run).refresh()
        return self.check_late(row)

    def find_open(self, run: str, run_ino: int, name: str, job_key: str) -> AttemptRow | None:
        """The open attempt at *name* of this shared job, joined; None if there is none.

        A revision that only other members know is none: a look-up finds what it revises.

        Raises:
            TransientStoreError, IntegrityError: as `join`.
        """
        key = parse_key(job_key)
        if not key.is_shared:
            return None
        self._logs.get(run).refresh()
        row = self._local(run, name, job_key) or self._renamed_by_others(run, name, job_key)
        if row is not None:
            return row
        intent = self._intents.open_intent(run, name, job_key)
        if intent is None or intent.base:
            # Of a revision whose base isn't committed any more, only what others changed is known.
            return None
        row = self._add_row(run, run_ino, name, intent)
        if row.state not in UNDECIDED:
            return None
        row = self.join(row)
        # It may have got another name since: then its first one is free for the next save.
        self.refresh_moves(row)
        row = self._fresh(row.id)
        return row if row.name == name else None

    def send_name_ops(self, attempt: AttemptRow) -> AttemptRow:
        """Tell the other members the queued directory operations, in order; the row then.

        Those of an attempt that nobody shares are only taken off the queue.

        Raises:
            TransientStoreError: some are still queued; call again.
            IntegrityError: another spool writes under this member's id.
        """
        row = self._fresh(attempt.id)
        is_shared = parse_key(row.job_key).is_shared
        if is_shared and not row.is_joined:
            return row
        for op in self._spool.name_ops(row.id):
            n = row.names_count
            if is_shared:
                document = NameOp(
                    attempt=row.attempt,
                    member=self._member,
                    n=n,
                    op=NameOpKind(op.op),
                    path=op.path,
                    to=op.to,
                    mode=op.mode,
                    after=dict(op.after),
                )
                if document.op is not NameOpKind.MKDIR:
                    mover = Mover(attempt=row.attempt, member=self._member)
                    self._create_own(mover_key(row.run, row.attempt, self._member), encode(mover))
                self._create_own(names_key(row.run, row.attempt, self._member, n), encode(document))
            with self._spool.transaction():
                self._spool.drop_name_op(op.id)
                row = self._spool.update_attempt(row.id, names_count=n + int(is_shared))
        return row

    def refresh_shared(self, attempt_id: int) -> bool:
        """Take over directories and closed, stored files of the attempt's other members.

        Returns:
            Whether anything in the spool's tree changed.

        Raises:
            TransientStoreError: the store did not answer; what was taken over stays.
            IntegrityError: a member's document is torn, edited or hostile; names its key.
        """
        row = self._spool.attempt(attempt_id)
        if row is None or not row.is_joined or row.state not in UNDECIDED:
            return False
        if not parse_key(row.job_key).is_shared:
            return False
        others = [m for m in self._rolls.member_ids(row.run, row.attempt) if m != self._member]
        is_changed = self._shared.take_names(row, others)
        votes = self.newest_votes(row.run, row.attempt, others)
        return self._shared.take_files(row, votes) or is_changed

    def refresh_moves(self, row: AttemptRow) -> bool:
        """Take over what other members renamed or removed; whether anything in the tree changed.

        What may concern this member's own files is only that: so it doesn't read each member's
        list, and the store is asked once by each member, not once for each pair of them.

        Raises:
            TransientStoreError, IntegrityError: as `refresh_shared`.
        """
        if not row.is_joined or not parse_key(row.job_key).is_shared:
            return False
        movers = [m for m in self._rolls.movers(row.run, row.attempt) if m != self._member]
        return self._shared.take_names(row, movers)

    def members(self, run: str, attempt: str) -> dict[str, Member]:
        """The attempt's registered members by id; see `Rolls.members`."""
        return self._rolls.members(run, attempt)

    def member_ids(self, run: str, attempt: str) -> list[str]:
        """Ids of the attempt's registered members; see `Rolls.member_ids`."""
        return self._rolls.member_ids(run, attempt)

    def newest_votes(
        self, run: str, attempt: str, members: Iterable[str], *, is_waiting: bool = False
    ) -> dict[str, Vote]:
        """The newest vote of each of *members* that has one; see `Rolls.newest_votes`."""
        row = self._spool.attempt_by_id(run, attempt)
        if row is None:
            return self._rolls.newest_votes(run, attempt, members, is_waiting=is_waiting)
        local = row.id

        def known(member: str) -> int:
            return self._spool.seen_count(local, member, "votes")

        votes = self._rolls.newest_votes(run, attempt, members, known, is_waiting=is_waiting)
        self._note_seen(local, votes)
        return votes

    def _note_seen(self, attempt: int, votes: Mapping[str, Vote]) -> None:
        """Remember how many votes there are, so that after a restart they aren't read anew."""
        with self._lock:
            noted = self._noted.setdefault(attempt, {})
            while len(self._noted) > NOTED_KEPT:
                self._noted.pop(next(iter(self._noted)))
        new = [(m, vote.n + 1) for m, vote in votes.items() if noted.get(m, 0) < vote.n + 1]
        for at in range(0, len(new), NOTED_AT_ONCE):
            with self._spool.transaction():
                for member, count in new[at : at + NOTED_AT_ONCE]:
                    if self._spool.seen_count(attempt, member, "votes") < count:
                        self._spool.set_seen_count(attempt, member, "votes", count)
                    noted[member] = count

    def forget(self, run: str, attempt: str) -> None:
        """The attempt is decided; see `Rolls.forget`."""
        self._rolls.forget(run, attempt)

    def is_imported(self, attempt: AttemptRow, file: FileRow) -> bool:
        """Whether another member of *attempt* staged this file: it isn't in our vote."""
        return is_foreign_key(attempt.run, attempt.attempt, self._member, file.key)

    def data_prefixes(self, attempt: AttemptRow) -> tuple[str, str]:
        """How keys of the attempt's files begin: anybody's, and this member's own."""
        parts = ((attempt.attempt, member, "") for member in ("", self._member))
        anybody, own = (full_key(attempt.run, data_key(*part)) + "/" for part in parts)
        return anybody, own

    def check_late(self, attempt: AttemptRow) -> AttemptRow:
        """Abort the row, with an event, if its attempt was committed without this member's files.

        Call it after the log was refreshed. The files stay in the spool.

        Raises:
            IntegrityError: the manifest is not what the COMMIT names.
            TransientStoreError: the store did not answer.
        """
        row = attempt
        if row.state not in UNDECIDED or not row.attempt:
            return row
        view = self._logs.get(row.run).look(lambda state: state.attempts.get(row.attempt))
        if view is None or view.state is not AttemptPhase.COMMITTED:
            return row
        if view.is_reclaimed:
            return self._take_reclaimed(row)
        if not self._has_own_files(row):
            return row
        manifest = load_manifest(self._store, row.run, row.attempt, view.manifest)
        if self._member in manifest.members:
            return row
        reason = (
            f"{self._member} registered or voted after {row.attempt} was closed: "
            "its files are not in the committed checkpoint; they stay in the spool"
        )
        self._events.record("late-member", f"{row.run}/{row.attempt}", reason)
        return self._spool.update_attempt(row.id, state=AttemptState.ABORTED, reason=reason)

    def _take_reclaimed(self, row: AttemptRow) -> AttemptRow:
        """Committed, replaced and removed from the store while this node was away.

        Whether this member's files were in it can't be told any more: they stay as evidence.
        """
        reason = f"{row.attempt} was committed by others, replaced since, and removed"
        self._events.record("late-member", f"{row.run}/{row.attempt}", reason)
        return self._spool.update_attempt(row.id, state=AttemptState.ABORTED, reason=reason)

    # Registering

    def _check_format(self, run: str) -> None:
        """Write the run's format if it has none, refuse it if it is another's."""
        if run in self._formats:
            return
        key = format_key(run)
        try:
            data = self._store.get(key, limit=MAX_DOCUMENT_BYTES)
        except MissingError:
            data = encode(StoreFormat(created_by="ckptgate"))
            try:
                self._store.create(key, data)
            except ExistsError:
                data = self._store.get(key, limit=MAX_DOCUMENT_BYTES)
        decode(data, StoreFormat, subject=key)
        self._formats.add(run)

    def _register(self, row: AttemptRow) -> None:
        document = Member(
            attempt=row.attempt,
            member=self._member,
            host=self._host,
            joined_at=self._clock.now(),
            ranks=self._spool.writer_ranks(row.id),
            world_size=row.world_size,
        )
        key = member_key(row.run, row.attempt, self._member)
        try:
            self._store.create(key, encode(document))
        except ExistsError as exc:
            # An earlier registration landed (its time differs), or another spool has our id.
            stored = decode(self._store.get(key, limit=MAX_DOCUMENT_BYTES), Member, subject=key)
            is_same = (stored.attempt, stored.member) == (row.attempt, self._member)
            # The spool may have come here from the machine that registered.
            if not is_same or stored.host not in {self._host, *known_hosts(self._spool)}:
                msg = f"{key} was written by {stored.host!r}: two spools have one member id"
                raise IntegrityError(msg, subject=key) from exc

    def _create_own(self, key: str, data: bytes) -> None:
        try:
            self._store.create(key, data)
        except ExistsError as exc:
            msg = f"{key} holds other bytes than this member wrote: two spools have one member id"
            raise IntegrityError(msg, subject=key) from exc

    # Attempts that others began

    def _local(self, run: str, name: str, job_key: str) -> AttemptRow | None:
        rows = self._spool.attempts(run=run, name=name, states=UNDECIDED)
        mine = [row for row in rows if row.job_key == job_key]
        return mine[-1] if mine else None

    def _renamed_by_others(self, run: str, name: str, job_key: str) -> AttemptRow | None:
        """An attempt that we joined under another name and that another member renamed."""
        for row in self._spool.attempts(run=run, states=UNDECIDED):
            if row.job_key == job_key and row.is_joined:
                self.refresh_moves(row)
        return self._local(run, name, job_key)

    def _add_row(self, run: str, run_ino: int, name: str, intent: Intent) -> AttemptRow:
        """The row of an attempt that another member began; the present one if there is one."""
        now = self._clock.now_ns()
        with self._spool.transaction():
            present = self._spool.attempt_by_id(run, intent.attempt)
            if present is not None:
                return present
            above = self._spool.node(run_ino)
            root = self._spool.add_node(
                NodeRow(
                    ino=0,
                    kind=NodeKind.DIR,
                    attempt=None,
                    mode=0o755 if above is None else above.mode,
                    uid=0 if above is None else above.uid,
                    gid=0 if above is None else above.gid,
                    size=0,
                    mtime_ns=now,
                    ctime_ns=now,
                )
            )
            row = self._spool.add_attempt(
                AttemptRow(
                    id=0,
                    run=run,
                    run_ino=run_ino,
                    name=name,
                    attempt=intent.attempt,
                    job_key=intent.job_key,
                    generation=intent.generation,
                    state=AttemptState.OPEN,
                    root=root.ino,
                    world_size=intent.world_size,
                    created_ns=now,
                    write_ns=now,
                )
            )
            self._spool.update_node(root.ino, attempt=row.id)
            self._spool.watch_run(run)
        return row

    # Small things

    def _fresh(self, row_id: int) -> AttemptRow:
        row = self._spool.attempt(row_id)
        if row is None:
            msg = f"attempt {row_id} is no longer in the spool"
            raise MissingError(msg, subject=str(row_id))
        return row

    def _has_own_files(self, row: AttemptRow) -> bool:
        files = self._spool.files_of_attempt(row.id)
        return any(not self.is_imported(row, file) for _, _, file in files)
