"""One attempt as this node knows it, for people and programs.

How far each rank's files are, how fast it goes, what is owed and by whom; of the spool only. Any
thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from ckptgate.engine.membership import Membership
from ckptgate.engine.progress import Progress
from ckptgate.model.states import UNDECIDED, AttemptState, FileState
from ckptgate.ports.recording import begun_by, is_left_undone
from ckptgate.ports.rows import PHASES_META, SavePhases
from ckptgate.ports.spool import WRITERS_META, AttemptRow, FileRow, Spool

__all__ = [
    "AttemptStatus",
    "MemberStatus",
    "RankStatus",
    "Reader",
    "time_text",
    "torn_files",
    "why_hidden",
    "writers_of",
]

RANKS_MAX: Final = 256
"""Ranks of one node that are listed; the attempt's own numbers have all."""
_DIGESTED: Final = frozenset({FileState.DIGESTED, FileState.STORED})


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """What one rank wrote on this node.

    Attributes:
        rank: -1 for files of which nobody knows who wrote them.
        files: how many.
        staged_bytes, digested_bytes, stored_bytes: how far they are.
        committed: it has said so itself, by an explicit commit.
        voted: this node's final vote is decided, with its files.
    """

    rank: int
    files: int
    staged_bytes: int
    digested_bytes: int
    stored_bytes: int
    committed: bool
    voted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """A node that takes part, as far as this one has looked."""

    member: str
    voted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStatus:
    """One attempt.

    Attributes:
        run, name, attempt: where and which; `attempt` is "" until joined.
        state, event, generation, job_key, format_name: as in the spool.
        is_joined, is_voted: as in the spool.
        is_hidden: nobody sees it, since a writer died with a file open: a person has to decide.
        world_size: how many ranks there are, None where unknown.
        files: state -> number of files (`open`, `quiet`, `digested`, `stored`).
        size_bytes, digested_bytes, stored_bytes: of all files, and of those that are so far.
        rate_bytes_s: how fast bytes reach the store, None while nothing is known.
        eta_s: until all that is staged now is there, None while nothing is known.
        created_at, committed_at: UTC, RFC 3339; "" for not yet, or where this node saw it not.
        phases: phase -> seconds that it added, of those that have ended, in order.
        ranks: by rank, of those whose files are on this node; none of what is decided.
        members: nodes that take part; none where this one need not look.
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
    is_hidden: bool
    world_size: int | None
    files: dict[str, int]
    size_bytes: int
    digested_bytes: int
    stored_bytes: int
    rate_bytes_s: float | None
    eta_s: float | None
    created_at: str
    committed_at: str
    phases: dict[str, float]
    ranks: tuple[RankStatus, ...]
    members: tuple[MemberStatus, ...]
    writers: tuple[int, ...]
    missing: tuple[str, ...]
    reason: str


@dataclass(slots=True, kw_only=True)
class Reader:
    """Makes `AttemptStatus` of rows; what is decided is read once.

    Attributes:
        spool: this node's.
        membership: tells which files other members staged; without it they count as ours.
        progress: how fast saves go.
        is_alive: whether the process (pid, start) runs; without it, those count that have a file
            open for writing.
    """

    spool: Spool
    membership: Membership | None = None
    progress: Progress | None = None
    is_alive: Callable[[int, int], bool] | None = None
    _decided: dict[int, tuple[AttemptRow, AttemptStatus]] = field(
        default_factory=dict[int, tuple[AttemptRow, AttemptStatus]]
    )

    def read(self, rows: list[AttemptRow]) -> tuple[AttemptStatus, ...]:
        """Of each row; what is kept of others is dropped."""
        kept = {row.id: self._decided[row.id] for row in rows if row.id in self._decided}
        self._decided = kept
        found: list[AttemptStatus] = []
        for row in rows:
            known = kept.get(row.id)
            status = known[1] if known and known[0] == row else self._one(row)
            if row.state not in UNDECIDED:
                kept[row.id] = (row, status)
            found.append(status)
        return tuple(found)

    def _one(self, row: AttemptRow) -> AttemptStatus:
        counts = self._counts(row)
        by_state = _summed(counts)
        size, stored = _bytes(by_state), _bytes(by_state, {FileState.STORED})
        phases = SavePhases.parse(self.spool.get_meta(PHASES_META.format(attempt=row.id)))
        is_under_way = row.state in UNDECIDED
        progress = self.progress if is_under_way and row.attempt else None
        rate = progress.rate(row.run, row.attempt) if progress else None
        members = progress.members(row.run, row.attempt) if progress else {}
        hidden = why_hidden(self.spool, row, self.is_alive)
        writers = {h.pid for h in self.spool.handles_of_attempt(row.id) if not h.is_closed}
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
            is_hidden=bool(hidden),
            world_size=row.world_size,
            files={str(state): by_state.get(state, (0, 0))[0] for state in FileState},
            size_bytes=size,
            digested_bytes=_bytes(by_state, _DIGESTED),
            stored_bytes=stored,
            rate_bytes_s=rate,
            eta_s=(size - stored) / rate if rate else None,
            created_at=time_text(row.created_ns),
            committed_at=time_text(phases.committed_ns),
            phases=phases.seconds(row.created_ns),
            ranks=self._ranks(row, counts) if is_under_way else (),
            members=tuple(
                MemberStatus(member=member, voted=members[member]) for member in sorted(members)
            ),
            writers=tuple(sorted(writers)),
            missing=row.missing,
            reason="; ".join(filter(None, (row.reason, hidden))),
        )

    def _counts(self, row: AttemptRow) -> dict[int, dict[FileState, tuple[int, int]]]:
        """Of this node's files, by rank and state."""
        foreign, own = "", ""
        if self.membership is not None and row.attempt:
            foreign, own = self.membership.data_prefixes(row)
        if row.state in UNDECIDED:
            return self.spool.count_ranks(row.id, foreign=foreign, own=own)
        return {-1: self.spool.count_files(row.id, foreign=foreign, own=own)}

    def _ranks(
        self, row: AttemptRow, counts: Mapping[int, Mapping[FileState, tuple[int, int]]]
    ) -> tuple[RankStatus, ...]:
        committed = set(self.spool.rank_commits(row.id))
        known = sorted({*counts, *self.spool.writer_ranks(row.id), *committed})
        return tuple(
            RankStatus(
                rank=rank,
                files=sum(count for count, _ in counts.get(rank, {}).values()),
                staged_bytes=_bytes(counts.get(rank, {})),
                digested_bytes=_bytes(counts.get(rank, {}), _DIGESTED),
                stored_bytes=_bytes(counts.get(rank, {}), {FileState.STORED}),
                committed=rank in committed or row.committed_all,
                voted=row.is_voted,
            )
            for rank in known[:RANKS_MAX]
        )


def time_text(at_ns: int) -> str:
    """A time for people, UTC; "" for none."""
    if not at_ns:
        return ""
    text = datetime.fromtimestamp(at_ns / 1e9, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def _summed(
    counts: Mapping[int, Mapping[FileState, tuple[int, int]]],
) -> dict[FileState, tuple[int, int]]:
    found: dict[FileState, tuple[int, int]] = {}
    for of_rank in counts.values():
        for state, (count, size) in of_rank.items():
            before = found.get(state, (0, 0))
            found[state] = (before[0] + count, before[1] + size)
    return found


def _bytes(
    counts: Mapping[FileState, tuple[int, int]],
    states: frozenset[FileState] | set[FileState] | None = None,
) -> int:
    return sum(size for state, (_, size) in counts.items() if states is None or state in states)


def why_hidden(spool: Spool, row: AttemptRow, is_alive: Callable[[int, int], bool] | None) -> str:
    """Why the mount shows the attempt to nobody, not even to its job; "" if it may be seen.

    As `vfs.liveness` decides: a writer died with a file open, or before it committed what it had
    begun, and no other writer is left.
    """
    if row.state is not AttemptState.OPEN:
        return ""
    writing = {h.file for h in spool.handles_of_attempt(row.id) if not h.is_closed}
    writers = writers_of(spool, row)
    if writing or (is_alive is not None and any(is_alive(*writer) for writer in writers)):
        return ""
    if is_left_undone(spool, row):
        ranks = sorted(set(begun_by(spool, row.id)) - set(spool.rank_commits(row.id)))
        who = ", ".join("all" if rank < 0 else str(rank) for rank in ranks)
        return f"hidden: begun and not committed by ranks {who}, which have ended; save it again"
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
