"""When the phases of each save ended: staged, digested, stored, voted, committed.

It owns the rule what a phase is: digests and uploads begin while a trainer still writes, so a phase
is the time that it adds after the one before had ended, and all of them are the whole save. They
are kept with the attempt in the spool, so a restart of the publisher goes on with them.

Thread rule: the publisher's one thread.
"""

from __future__ import annotations

from typing import Final

import msgspec

from ckptgate.engine.membership import Membership
from ckptgate.model.states import UNDECIDED, FileState
from ckptgate.ports.clock import Clock
from ckptgate.ports.meters import COMMITTED_BYTES, PHASE_SECONDS, SAVES, Meters
from ckptgate.ports.rows import PHASES_META, SavePhases
from ckptgate.ports.spool import AttemptRow, Spool

__all__ = ["FINISHED_MAX", "PhaseClock"]

FINISHED_MAX: Final = 20
"""Saves that are decided and whose phases are kept, newest last."""
_FORGOTTEN_AT_ONCE: Final = 16


class PhaseClock:
    """Notes the phases of this node's saves."""

    def __init__(
        self, *, spool: Spool, clock: Clock, membership: Membership, meters: Meters
    ) -> None:
        self._spool = spool
        self._clock = clock
        self._membership = membership
        self._meters = meters
        self._known: dict[int, SavePhases] = {}

    def step(self, row: AttemptRow) -> None:
        """Look how far an undecided save is; a few look-ups by an index."""
        if not row.event and row.seal_index < 0:
            # Its writers may go on: no phase has ended.
            return
        known = self._phases(row)
        if known.voted_ns:
            return
        self._keep(row, self._ended(row, known))

    def committed(self, row: AttemptRow) -> None:
        """The save's COMMIT is in the log; its tree here is still what this node staged."""
        known = self._known.pop(row.id, None) or self._read(row)
        if known.committed_ns:
            return
        foreign, own = self._membership.data_prefixes(row)
        counts = self._spool.count_files(row.id, foreign=foreign, own=own).values()
        now_ns = self._clock.now_ns()
        known = msgspec.structs.replace(
            known,
            # A COMMIT by others may come before this publisher's own look.
            staged_ns=known.staged_ns or now_ns,
            digested_ns=known.digested_ns or now_ns,
            stored_ns=known.stored_ns or now_ns,
            voted_ns=known.voted_ns or now_ns,
            committed_ns=now_ns,
            files=sum(count for count, _ in counts),
            size=sum(size for _, size in counts),
        )
        self._write(row, known)
        self._forget_old()
        self._meters.add(SAVES, label="committed")
        self._meters.add(COMMITTED_BYTES, known.size)
        for phase, seconds in known.seconds(row.created_ns).items():
            self._meters.observe(PHASE_SECONDS, seconds, phase)

    def lost(self, row: AttemptRow, result: str) -> None:
        """The save ended without a COMMIT, or without this node's files."""
        self._known.pop(row.id, None)
        self._meters.add(SAVES, label=result)

    def _forget_old(self) -> None:
        """Keep those of the saves that reports list; a few more than one go at each save."""
        ids = [row.id for row in self._spool.attempts() if row.state not in UNDECIDED]
        for id_ in ids[:-FINISHED_MAX][-_FORGOTTEN_AT_ONCE:]:
            self._spool.drop_meta(PHASES_META.format(attempt=id_))

    def _ended(self, row: AttemptRow, known: SavePhases) -> SavePhases:
        """*known*, as it is now: a file that is written again begins its phase again."""
        now_ns = self._clock.now_ns()
        is_staged = all(handle.is_closed for handle in self._spool.handles_of_attempt(row.id))
        is_digested = is_staged and not self._waits(row, FileState.QUIET)
        is_stored = is_digested and not self._waits(row, FileState.DIGESTED)
        return msgspec.structs.replace(
            known,
            staged_ns=(known.staged_ns or row.event_ns or now_ns) if is_staged else 0,
            digested_ns=(known.digested_ns or now_ns) if is_digested else 0,
            stored_ns=(known.stored_ns or now_ns) if is_stored else 0,
            voted_ns=now_ns if is_stored and row.is_voted else 0,
        )

    def _waits(self, row: AttemptRow, state: FileState) -> bool:
        return bool(self._spool.waiting_files(row.id, state, after=0, limit=1))

    def _phases(self, row: AttemptRow) -> SavePhases:
        known = self._known.get(row.id)
        if known is None:
            known = self._known[row.id] = self._read(row)
        return known

    def _read(self, row: AttemptRow) -> SavePhases:
        return SavePhases.parse(self._spool.get_meta(PHASES_META.format(attempt=row.id)))

    def _keep(self, row: AttemptRow, phases: SavePhases) -> None:
        if phases != self._known.get(row.id):
            self._known[row.id] = phases
            self._write(row, phases)

    def _write(self, row: AttemptRow, phases: SavePhases) -> None:
        with self._spool.transaction():
            if self._spool.attempt(row.id) is not None:
                text = msgspec.json.encode(phases).decode()
                self._spool.set_meta(PHASES_META.format(attempt=row.id), text)
