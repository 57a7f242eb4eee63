"""What is under way on this node and what is committed, as one value for people and programs.

It reads the spool and what the logs' last refresh folded, and never the store: `status` answers
while the store is away. Any thread.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

import msgspec

from ckptgate.engine.events import Event, Events
from ckptgate.engine.membership import Membership
from ckptgate.engine.runlog import RunLog, RunLogs
from ckptgate.model.rules import RunState
from ckptgate.model.states import UNDECIDED, AttemptState, FileState
from ckptgate.ports.spool import (
    ROOM_META,
    WRITERS_META,
    AttemptRow,
    FileRow,
    PendingKind,
    Spool,
    SpoolRoom,
)

__all__ = [
    "AttemptStatus",
    "QueueStatus",
    "RunStatus",
    "StatusReport",
    "run_status",
    "status",
    "torn_files",
    "why_hidden",
    "writers_of",
]

EVENTS_MAX: Final = 20
FINISHED_MAX: Final = 20
"""Attempts of each run that are decided and still listed, newest last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStatus:
    """One attempt.

    Attributes:
        run, name, attempt: where and which; `attempt` is "" until joined.
        state, event, generation, job_key, format_name: as in the spool.
        is_joined, is_voted: as in the spool.
        files: state -> number of files (`open`, `quiet`, `digested`, `stored`).
        size_bytes, stored_bytes: of all files, and of those the store has.
        writers: processes that have a file open for writing.
        missing: what is owed and by whom, one line each.
        reason: why it isn't committed or never will be, or why nobody sees it.
    """

    run: str
    name: str
    attempt: str
    state: str
    event: str
    generation: int
    job_key: str
    format_name: str
    is_joined: bool
    is_voted: bool
    files: dict[str, int]
    size_bytes: int
    stored_bytes: int
    writers: tuple[int, ...]
    missing: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """One run as its log says.

    Attributes:
        run: path in the store.
        length: entries folded.
        generation: the newest.
        age_s: since the log was last read, None if never.
        last_committed: name of the newest committed checkpoint, "" for none.
        committed, undecided: how many.
        pointers: pointer -> checkpoint.
        quarantined: name -> reason.
        is_held: whether nothing is retired.
    """

    run: str
    length: int
    generation: int
    age_s: float | None
    last_committed: str
    committed: int
    undecided: int
    pointers: dict[str, str]
    quarantined: dict[str, str]
    is_held: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus:
    """What waits for the store outside of checkpoints, as numbers of items."""

    plain_ops: int
    pending_whole: int
    pending_pointers: int
    tombstones: int
    name_ops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusReport:
    """All of it."""

    attempts: tuple[AttemptStatus, ...]
    runs: tuple[RunStatus, ...]
    queue: QueueStatus
    room: SpoolRoom
    events: tuple[Event, ...]

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "attempts": [_plain(asdict(attempt)) for attempt in self.attempts],
            "runs": [_plain(asdict(run)) for run in self.runs],
            "queue": asdict(self.queue),
            "room": msgspec.to_builtins(self.room),
            "events": [
                {"at": e.at, "kind": e.kind, "subject": e.subject, "detail": e.detail}
                for e in self.events
            ],
        }


def status(
    spool: Spool,
    logs: RunLogs,
    events: Events,
    *,
    membership: Membership | None = None,
    is_alive: Callable[[int, int], bool] | None = None,
) -> StatusReport:
    """The report as of now.

    Args:
        spool: this node's.
        logs: of the runs that this process follows.
        events: incidents.
        membership: tells which files other members staged; without it they count as ours.
        is_alive: whether the process (pid, start) runs; without it, those count that have a file
            open for writing.
    """
    rows = spool.attempts()
    shown = [row for row in rows if row.state in UNDECIDED]
    finished = [row for row in rows if row.state not in UNDECIDED and row.job_key]
    listed = sorted([*finished[-FINISHED_MAX:], *shown], key=lambda row: row.id)
    # What was removed waits for nothing.
    pending = Counter(row.kind for row in spool.pending() if row.ino is not None)
    return StatusReport(
        attempts=tuple(_attempt(spool, row, membership, is_alive) for row in listed),
        runs=tuple(run_status(log) for log in sorted(logs.known(), key=lambda log: log.run)),
        queue=QueueStatus(
            plain_ops=len(spool.plain_ops()),
            pending_whole=pending[PendingKind.WHOLE],
            pending_pointers=pending[PendingKind.POINTER],
            tombstones=len(spool.tombstones()),
            name_ops=sum(len(spool.name_ops(row.id)) for row in shown),
        ),
        room=SpoolRoom.parse(spool.get_meta(ROOM_META)),
        events=tuple(events.recent(EVENTS_MAX)),
    )


def _attempt(
    spool: Spool,
    row: AttemptRow,
    membership: Membership | None,
    is_alive: Callable[[int, int], bool] | None,
) -> AttemptStatus:
    foreign, own = "", ""
    if membership is not None and row.attempt:
        foreign, own = membership.data_prefixes(row)
    counts = spool.count_files(row.id, foreign=foreign, own=own)
    writers = {h.pid for h in spool.handles_of_attempt(row.id) if not h.is_closed}
    return AttemptStatus(
        run=row.run,
        name=row.name,
        attempt=row.attempt,
        state=str(row.state),
        event=row.event,
        generation=row.generation,
        job_key=row.job_key,
        format_name=row.format_name,
        is_joined=row.is_joined,
        is_voted=row.is_voted,
        files={str(state): counts.get(state, (0, 0))[0] for state in FileState},
        size_bytes=sum(size for _, size in counts.values()),
        stored_bytes=counts.get(FileState.STORED, (0, 0))[1],
        writers=tuple(sorted(writers)),
        missing=row.missing,
        reason="; ".join(filter(None, (row.reason, why_hidden(spool, row, is_alive)))),
    )


def why_hidden(spool: Spool, row: AttemptRow, is_alive: Callable[[int, int], bool] | None) -> str:
    """Why the mount shows the attempt to nobody, not even to its job; "" if it may be seen.

    As `vfs.liveness` decides: a writer died with a file open, and no other writer is left.
    """
    if row.state is not AttemptState.OPEN:
        return ""
    writing = {h.file for h in spool.handles_of_attempt(row.id) if not h.is_closed}
    writers = writers_of(spool, row)
    if writing or (is_alive is not None and any(is_alive(*writer) for writer in writers)):
        return ""
    torn = [path for path, _ in torn_files(spool, row, is_alive)]
    if not torn:
        return ""
    more = f" and of {len(torn) - 1} more" if len(torn) > 1 else ""
    what = f"the writer of {torn[0]!r}{more} died with it open"
    return f"hidden: {what}; commit it explicitly or abort it"


def writers_of(spool: Spool, row: AttemptRow) -> list[tuple[int, int]]:
    """(pid, start) of all processes that ever wrote the attempt here."""
    writers: list[list[int]] = json.loads(
        spool.get_meta(WRITERS_META.format(attempt=row.id)) or "[]"
    )
    return [(pid, start) for pid, start in writers]


def torn_files(
    spool: Spool, row: AttemptRow, is_alive: Callable[[int, int], bool] | None
) -> list[tuple[str, FileRow]]:
    """Files of this node whose writer died with them open, by path; *is_alive* as of `status`."""
    held = {
        handle.file
        for handle in spool.handles_of_attempt(row.id)
        if not handle.is_closed
        and (is_alive is None or not handle.pid or is_alive(handle.pid, handle.start))
    }
    return [
        (path, file)
        for path, _, file in spool.files_of_attempt(row.id)
        if file.evidence.is_torn or (file.state is FileState.OPEN and file.file not in held)
    ]


def run_status(log: RunLog) -> RunStatus:
    """One run as far as its log was read."""
    age_s = log.age_s()

    def read(state: RunState) -> RunStatus:
        return RunStatus(
            run=log.run,
            length=state.length,
            generation=state.generation,
            age_s=age_s,
            last_committed=next(reversed(state.current), ""),
            committed=len(state.current),
            undecided=len(state.undecided()),
            pointers={name: folded.value.target for name, folded in state.pointers.items()},
            quarantined=dict(state.quarantined),
            is_held=state.is_held,
        )

    return log.look(read)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Tuples as lists, as JSON has them."""
    return {
        key: list(value) if isinstance(value, tuple) else value  # pyright: ignore[reportUnknownArgumentType]
        for key, value in values.items()
    }
