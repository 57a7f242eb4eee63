"""Sealing and giving up: what happens to an attempt before its SEAL is in the log.

It owns the rules which event seals an attempt (a commit event seen here, an early one once the
expected set is covered, explicit commits of all ranks in the votes, quiescence of what proves
itself), and when an attempt that was never sealed is abandoned (a newer incarnation's FENCE, or no
writer and no write for long) or aborted (an early event, and what it waits for doesn't come).

Thread rule: the publisher's one thread.
"""

from __future__ import annotations

import logging
from typing import Final

import msgspec

from ckptgate.engine.judge import Judge
from ckptgate.engine.node import Node
from ckptgate.engine.pace import Pace
from ckptgate.engine.patience import Patience
from ckptgate.engine.votes import Voter, is_shared_job
from ckptgate.errors import RefusedError
from ckptgate.model.closure import all_ranks_committed
from ckptgate.model.documents import EntryType, Member, Vote
from ckptgate.model.entries import Abort, Entry, Seal, SealEvent
from ckptgate.model.rules import RunState
from ckptgate.model.states import UNDECIDED, AttemptState, FileState
from ckptgate.ports.spool import AttemptRow

__all__ = ["Sealer"]

_log = logging.getLogger(__name__)

LINES_MAX: Final = 10_000
RANKS_SHOWN: Final = 16
_COMPLETE_NAMES: Final = frozenset({SealEvent.EXPLICIT, SealEvent.RENAME})
"""Events that seal whatever the checkpoint is called; others wait for its final name."""


class Sealer:
    """Brings attempts of this spool to their SEAL."""

    def __init__(self, node: Node, *, voter: Voter, judge: Judge) -> None:
        self._spool = node.spool
        self._logs = node.logs
        self._membership = node.membership
        self._voter = voter
        self._judge = judge
        self._member = node.member
        self._clock = node.clock
        self._events = node.events
        self._settings = node.settings
        self._patience = Patience(node.clock, node.settings.commit_deadline_s)
        self._held = Patience(node.clock, node.settings.commit_deadline_s)
        self._idle = Patience(node.clock, node.settings.abandon_after_s)
        self._pace = Pace(node.clock)
        self._turns = node.turns
        self._phases = node.phases

    def step(self, row: AttemptRow) -> bool:
        """One pass over an undecided attempt that has no SEAL in the log; True if it moved.

        Raises:
            CkptError: the store failed; the same is due at the next pass.
        """
        if self._is_fenced(row):
            return self._abandon(row, "a newer incarnation of the job began before its seal")
        if not row.event:
            row = self._find_event(row)
        if row.event and row.is_joined and self._has_final_name(row):
            return self._seal(row)
        if self._is_overdue(row):
            return self._abort(row)
        if self._is_idle(row):
            why = f"no writer, no write and no seal for {self._settings.abandon_after_s:g} s"
            return self._abandon(row, f"{why}: {row.reason}" if row.reason else why)
        return False

    def is_mine(self, row: AttemptRow) -> bool:
        """Whether it is for this member to say when an undecided attempt is whole.

        It wrote the SEAL; or it will, as it has the early event, or rank 0 has committed here.
        """
        view = self._logs.get(row.run).look(lambda state: state.attempts.get(row.attempt))
        if view is None:
            return not row.event and (bool(row.detail) or 0 in self._spool.rank_commits(row.id))
        return view.sealed_by == self._member

    def _is_fenced(self, row: AttemptRow) -> bool:
        if not is_shared_job(row.job_key):
            return False

        def judge(state: RunState) -> bool:
            own = state.generation_of(row.job_key)
            return own is not None and own < state.generation

        return self._logs.get(row.run).look(judge)

    def _has_final_name(self, row: AttemptRow) -> bool:
        is_complete = bool(row.event) and SealEvent(row.event) in _COMPLETE_NAMES
        return is_complete or not self._settings.patterns.is_temporary(row.name)

    # Events that nobody saw as a call

    def _find_event(self, row: AttemptRow) -> AttemptRow:
        event: SealEvent | None = None
        if row.is_joined and self._sees_all_ranks(row):
            event = SealEvent.EXPLICIT
        elif row.is_joined and self._pace.is_due(row.id):
            with self._pace.look(row.id):
                if row.detail:
                    is_next = self._is_covered(row) and not self._is_ahead(row)
                    event = SealEvent.FORMAT if is_next else None
                elif self._is_quiescent(row):
                    event = SealEvent.QUIESCENCE
        if event is None:
            return self._fresh(row)
        with self._spool.transaction():
            now = self._fresh(row)
            if now.event or now.state is not AttemptState.OPEN:
                return now
            _log.info("event attempt=%s event=%s", row.attempt, event)
            return self._spool.update_attempt(
                row.id,
                state=AttemptState.SEALED,
                event=str(event),
                event_ns=self._clock.now_ns(),
            )

    def _sees_all_ranks(self, row: AttemptRow) -> bool:
        """Whether the votes show that every rank committed.

        The member with rank 0 looks at every pass, the others in their turn, so that many members
        don't all read all votes.
        """
        own = self._spool.rank_commits(row.id)
        if not own or not is_shared_job(row.job_key):
            return False
        key = (row.run, row.attempt)
        self._patience.look(key, 0)
        is_first = 0 in own or self._turns.is_mine(*key, "", self._patience.seen_s(key))
        if not is_first or not self._patience.is_due(key):
            return False
        members = self._membership.members(row.run, row.attempt)
        votes = self._membership.newest_votes(row.run, row.attempt, members)
        self._patience.looked(key, len(members), None)
        return all_ranks_committed(votes)

    def _is_quiescent(self, row: AttemptRow) -> bool:
        owed = self._voter.owes(row)
        if owed or not self._is_quiet(row):
            self._show(row, [*owed, *self._uncommitted(row)])
            return False
        if is_shared_job(row.job_key) and not self._turns.is_mine(
            row.run, row.attempt, "", self._quiet_s(row) - self._settings.quiescence_s
        ):
            return False
        members, final = self._as_if_final(row)
        if not any(entry.type is EntryType.FILE for entry in final[self._member].entries):
            return False
        verdict = self._judge.assess(row.run, row.attempt, SealEvent.QUIESCENCE, members, final)
        missing = verdict.missing
        if not missing and row.base is not None and is_shared_job(row.job_key):
            # A person may change one file; a job that saves again writes all of them.
            entries = verdict.entries
            missing = self._judge.half_rewritten(row.run, row.attempt, members, final, entries)
        self._show(row, [str(item) for item in missing])
        return not missing

    def _as_if_final(self, row: AttemptRow) -> tuple[dict[str, Member], dict[str, Vote]]:
        """All members, and the votes as they would be if everybody said that this is all."""
        members = self._membership.members(row.run, row.attempt)
        votes = self._membership.newest_votes(row.run, row.attempt, members)
        votes[self._member], _ = self._voter.build(row)
        final = {
            member: msgspec.structs.replace(vote, is_final=True) for member, vote in votes.items()
        }
        return members, final

    def _is_covered(self, row: AttemptRow) -> bool:
        """Whether what an early event announced is there, of all ranks."""
        owed = self._voter.owes(row)
        if owed:
            self._show(row, owed)
            return False
        key = (row.run, row.attempt)
        self._held.look(key, row.write_ns)
        if not self._held.is_due(key):
            return False
        return self._covers(row)

    def _is_ahead(self, row: AttemptRow) -> bool:
        """Whether an older checkpoint of the job, held as well, is whole or soon will be.

        It is sealed first: the newest SEAL is what pointers follow.
        """
        older = [
            other
            for other in self._spool.attempts(run=row.run, states=UNDECIDED)
            if other.id < row.id and other.job_key == row.job_key and other.detail
        ]
        return any(
            self._is_just_waiting(other) if self._voter.owes(other) else self._covers(other)
            for other in older
            if other.is_joined and not other.event and other.seal_index < 0
        )

    def _is_just_waiting(self, row: AttemptRow) -> bool:
        """Whether all that it owes is to be digested and stored by this member."""
        files = [file for _, _, file in self._spool.files_of_attempt(row.id)]
        return all(handle.is_closed for handle in self._spool.handles_of_attempt(row.id)) and all(
            file.state is not FileState.OPEN and not file.evidence.problem for file in files
        )

    def _covers(self, row: AttemptRow) -> bool:
        key = (row.run, row.attempt)
        members, final = self._as_if_final(row)
        seen = frozenset((member, vote.n) for member, vote in final.items())
        self._held.look(key, row.write_ns)
        self._held.looked(key, len(members), (row.write_ns, seen))
        verdict = self._judge.assess(row.run, row.attempt, SealEvent.FORMAT, members, final)
        self._show(row, [str(item) for item in verdict.missing])
        # Where nobody knows how many ranks there are, only silence tells that none is to come.
        return not verdict.missing and (verdict.has_all_ranks or self._is_quiet(row))

    def _is_overdue(self, row: AttemptRow) -> bool:
        """Whether an early event waited too long for the rest."""
        key = (row.run, row.attempt)
        if not row.detail or row.event or not row.is_joined or self._voter.owes(row):
            return False
        self._held.look(key, row.write_ns)
        return self._held.stalled_s(key) >= self._settings.commit_deadline_s

    def _abort(self, row: AttemptRow) -> bool:
        limit_s = self._settings.commit_deadline_s
        reason = f"not whole {limit_s:g} s after {row.detail}, which its writer writes early"

        def decide(state: RunState) -> Entry | None:
            if row.attempt in state.attempts:
                return None
            return Abort(attempt=row.attempt, reason=reason, missing=self._fresh(row).missing)

        record = self._logs.get(row.run).append(decide)
        self._held.forget((row.run, row.attempt))
        return record is not None

    def _is_quiet(self, row: AttemptRow) -> bool:
        return (
            self._quiet_s(row) >= self._settings.quiescence_s
            and row.state is AttemptState.OPEN
            and not self._settings.patterns.is_temporary(row.name)
        )

    def _quiet_s(self, row: AttemptRow) -> float:
        return (self._clock.now_ns() - max(row.write_ns, row.created_ns)) / 1e9

    def _uncommitted(self, row: AttemptRow) -> list[str]:
        """Explicit commits that this node has not seen, once there was a first one."""
        done = self._spool.rank_commits(row.id)
        if not done or row.world_size is None:
            return []
        ranks = sorted(set(range(row.world_size)) - set(done))
        shown = ", ".join(map(str, ranks[:RANKS_SHOWN])) + (", ..." if ranks[RANKS_SHOWN:] else "")
        return [f"commits of ranks {shown} of {row.world_size} (not seen here yet)"]

    def _show(self, row: AttemptRow, lines: list[str]) -> None:
        if tuple(lines) == row.missing:
            return
        with self._spool.transaction():
            now = self._spool.attempt(row.id)
            if now is not None and now.state is AttemptState.OPEN:
                self._spool.update_attempt(row.id, missing=tuple(lines[:LINES_MAX]))

    # Into the log

    def _seal(self, row: AttemptRow) -> bool:
        is_shared = is_shared_job(row.job_key)

        def decide(state: RunState) -> Entry | None:
            own = state.generation_of(row.job_key) if is_shared else state.generation
            if row.attempt in state.attempts or own != state.generation:
                return None
            return Seal(
                attempt=row.attempt,
                name=row.name,
                generation=state.generation,
                event=SealEvent(row.event),
                detail=row.detail,
            )

        # A SEAL says that all names are there: after a power loss they still must be.
        self._spool.make_durable()
        try:
            record = self._logs.get(row.run).append(decide)
        except RefusedError as exc:
            if row.reason != str(exc):
                self._spool.update_attempt(row.id, reason=str(exc))
                self._events.record("seal-refused", row.attempt, str(exc))
            return False
        if record is not None:
            self._patience.forget((row.run, row.attempt))
            self._held.forget((row.run, row.attempt))
            self._idle.forget((row.run, str(row.id)))
            _log.info("sealed attempt=%s name=%s event=%s", row.attempt, row.name, row.event)
        return record is not None

    def _is_idle(self, row: AttemptRow) -> bool:
        key = (row.run, str(row.id))
        written_ns = max(row.write_ns, row.created_ns)
        # Not by the wall clock: while the store is away nothing can be sealed.
        self._idle.look(key, written_ns)
        self._idle.looked(key, 1, written_ns)
        if self._idle.stalled_s(key) < self._settings.abandon_after_s:
            return False
        if (row.event or row.detail) and row.is_joined and self._has_final_name(row):
            return False
        handles = self._spool.handles_of_attempt(row.id)
        return all(handle.is_closed for handle in handles)

    def _abandon(self, row: AttemptRow, reason: str) -> bool:
        with self._spool.transaction():
            now = self._fresh(row)
            if now.state not in {AttemptState.OPEN, AttemptState.SEALED} or now.seal_index >= 0:
                return False
            self._spool.update_attempt(row.id, state=AttemptState.ABANDONED, reason=reason)
        self._voter.forget(row.id)
        self._patience.forget((row.run, row.attempt))
        self._held.forget((row.run, row.attempt))
        self._idle.forget((row.run, str(row.id)))
        self._phases.lost(row, "abandoned")
        self._events.record("abandoned", f"{row.run}/{row.attempt or row.name}", reason)
        return True

    def _fresh(self, row: AttemptRow) -> AttemptRow:
        return self._spool.attempt(row.id) or row
