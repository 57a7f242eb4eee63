"""From SEAL to COMMIT or ABORT. Any member may do it, for its own attempts and for those of others.

It owns the order of DESIGN rule 4: after the SEAL the members are listed and their newest votes
read; if closure holds CLOSE is appended, members and votes are read again, all votes are merged
into the manifest, and COMMIT names its digest. What isn't whole by the deadline is aborted, and the
ABORT names what is missing and who owes it. The member that sealed it does this; the others finish
it in their turn, should that one be dead.

Thread rule: the publisher's one thread; `request_abort` any thread.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from ckptgate.engine.events import tell_torn
from ckptgate.engine.judge import Judge, Verdict
from ckptgate.engine.manifests import load_manifest
from ckptgate.engine.node import Node
from ckptgate.engine.owed import Owed
from ckptgate.engine.pace import Pace
from ckptgate.engine.patience import Patience
from ckptgate.engine.seals import Sealer
from ckptgate.engine.votes import Voter
from ckptgate.errors import IntegrityError, RefusedError
from ckptgate.formats.registry import WITHOUT_LATEST
from ckptgate.model.documents import (
    MAX_DOCUMENT_BYTES,
    Intent,
    Manifest,
    Member,
    PointerValue,
    Vote,
    decode,
    digest_of,
    encode,
)
from ckptgate.model.entries import Abort, Close, Commit, Entry, LogRecord, Seal
from ckptgate.model.layout import intent_key, log_key, manifest_key
from ckptgate.model.rules import AttemptPhase, AttemptView, RunState
from ckptgate.model.saving import SavedBy, merge_savings
from ckptgate.model.states import UNDECIDED, AttemptState, is_cancelled
from ckptgate.ports.recording import given_up
from ckptgate.ports.spool import AttemptRow

__all__ = ["OWN_WORK_FACTOR", "Decider"]

_log = logging.getLogger(__name__)

MISSING_LINES_MAX: Final = 10_000
"""Lines in an ABORT and in a row; the rest is counted."""
SEALS_KEPT: Final = 64
LATE_MAX: Final = 64
"""Members that may vote after a CLOSE for something that doesn't fit to what was closed."""
OWN_WORK_FACTOR: Final = 6
"""While only this member's own digests and uploads are missing, it waits that many deadlines."""

_OPEN_PHASES: Final = frozenset({AttemptPhase.SEALED, AttemptPhase.CLOSED})


@dataclass(frozen=True, slots=True)
class _Case:
    """An attempt with a SEAL and no decision; *row* is None where this spool has no part in it."""

    run: str
    view: AttemptView
    row: AttemptRow | None

    @property
    def key(self) -> tuple[str, str]:
        return self.run, self.view.attempt


_Read: TypeAlias = tuple[Verdict, dict[str, Vote], dict[str, Member]]


class Decider:
    """Decides what is sealed."""

    def __init__(self, node: Node, *, voter: Voter, judge: Judge, sealer: Sealer) -> None:
        self._store = node.store
        self._spool = node.spool
        self._logs = node.logs
        self._membership = node.membership
        self._voter = voter
        self._judge = judge
        self._sealer = sealer
        self._owed = Owed(node, voter=voter, judge=judge)
        self._clock = node.clock
        self._events = node.events
        self._invalidations = node.invalidations
        self._settings = node.settings
        self._patience = Patience(node.clock, node.settings.commit_deadline_s)
        self._pace = Pace(node.clock)
        self._turns = node.turns
        self._phases = node.phases
        self._progress = node.progress
        self._seals: OrderedDict[tuple[str, str], Seal] = OrderedDict()

    def step(self, row: AttemptRow) -> bool:
        """One pass over an undecided attempt of this spool; True if it moved.

        Raises:
            CkptError: the store failed; the same is due at the next pass.
        """
        if row.state not in UNDECIDED:
            return False
        view = self._view(row.run, row.attempt) if row.attempt else None
        if view is None:
            return self._sealer.step(row)
        if view.state is AttemptPhase.ABORTED:
            return self._take_abort(row, view)
        if view.state is AttemptPhase.COMMITTED:
            # Adopted by the publication's step.
            return False
        did = self._take_seal(row, view)
        fresh = self._spool.attempt(row.id)
        return self._finish(_Case(row.run, view, fresh)) or did

    def step_others(self, run: str) -> bool:
        """Finish what other members sealed in *run* and left undecided; True if any moved."""
        did = False
        log = self._logs.get(run)
        for attempt in log.look(lambda state: state.undecided()):
            row = self._spool.attempt_by_id(run, attempt)
            view = self._view(run, attempt)
            if view is None or (row is not None and row.state in UNDECIDED):
                continue
            did = self._finish(_Case(run, view, None)) or did
        return did

    def request_abort(self, attempt_id: int, reason: str) -> None:
        """Give an undecided attempt up for good; nothing happens to one that is decided.

        Raises:
            CkptError: the store failed, and it is unknown whether the ABORT is in the log.
        """
        row = self._spool.attempt(attempt_id)
        if row is None or row.state not in UNDECIDED:
            return
        if row.attempt:
            self._append_abort(row.run, row.attempt, reason, ())
            view = self._view(row.run, row.attempt)
            if view is not None and view.state is AttemptPhase.ABORTED:
                self._take_abort(row, view)
            return
        with self._spool.transaction():
            now = self._spool.attempt(row.id)
            if now is not None and now.state in UNDECIDED and not now.attempt:
                self._spool.update_attempt(row.id, state=AttemptState.ABANDONED, reason=reason)
        self._tell_lost(row, "abandoned", row.name, reason)
        self._invalidations.name(row.run_ino, row.name)

    def give_up(self, row: AttemptRow) -> bool:
        """Abort what a writer of this node gave up; True if that was so.

        Raises:
            CkptError: as `request_abort`; the same is due at the next pass.
        """
        reason = given_up(self._spool, row.id)
        if not reason or row.state not in UNDECIDED:
            return False
        self.request_abort(row.id, reason)
        return True

    # What the log already says

    def _view(self, run: str, attempt: str) -> AttemptView | None:
        return self._logs.get(run).look(lambda state: state.attempts.get(attempt))

    def _take_seal(self, row: AttemptRow, view: AttemptView) -> bool:
        with self._spool.transaction():
            now = self._spool.attempt(row.id)
            if now is None or now.state not in UNDECIDED or now.seal_index >= 0:
                return False
            self._spool.update_attempt(
                row.id,
                state=AttemptState.SEALED,
                seal_index=view.seal_index,
                generation=view.generation,
                # From here on the deadline runs.
                event_ns=self._clock.now_ns(),
            )
        return True

    def _take_abort(self, row: AttemptRow, view: AttemptView) -> bool:
        with self._spool.transaction():
            now = self._spool.attempt(row.id)
            if now is None or now.state not in UNDECIDED:
                return False
            self._spool.update_attempt(
                row.id,
                state=AttemptState.ABORTED,
                reason=view.reason,
                missing=view.missing,
                seal_index=view.seal_index,
            )
        self._voter.forget(row.id)
        self._membership.forget(row.run, row.attempt)
        self._tell_lost(row, "aborted", row.attempt, _with_missing(view))
        self._invalidations.name(row.run_ino, row.name)
        return True

    def _tell_lost(self, row: AttemptRow, kind: str, what: str, why: str) -> None:
        """Count and record an end without a COMMIT: an incident, unless a person wanted it."""
        kind = "cancelled" if is_cancelled(why) else kind
        self._phases.lost(row, kind)
        self._events.record(kind, f"{row.run}/{what}", why)

    def _seal_of(self, case: _Case) -> Seal:
        """The SEAL's entry: the folded log keeps only its slot."""
        seal = self._seals.get(case.key)
        if seal is None:
            key = log_key(case.run, case.view.seal_index)
            data = self._store.get(key, limit=MAX_DOCUMENT_BYTES)
            entry = decode(data, LogRecord, subject=key).entry
            if not isinstance(entry, Seal) or entry.attempt != case.view.attempt:
                msg = f"{key} is not the SEAL of {case.view.attempt!r} that was folded before"
                raise IntegrityError(msg, subject=key)
            self._seals[case.key] = seal = entry
            while len(self._seals) > SEALS_KEPT:
                self._seals.popitem(last=False)
        return seal

    # Towards the decision

    def _finish(self, case: _Case) -> bool:
        row = case.row
        self._patience.look(case.key, row.event_ns if row else 0)
        # Before this member's own final vote nothing can be decided, only told.
        is_telling = row is not None and not row.is_voted
        if is_telling and not self._pace.is_due(case.key):
            return False
        seen_s = self._patience.seen_s(case.key)
        with self._pace.look(case.key):
            if not self._turns.is_mine(*case.key, case.view.sealed_by, seen_s):
                self._show_missing(row, self._voter.owes(row) if row else [])
                return False
            return self._patience.is_due(case.key) and self._look(case)

    def _look(self, case: _Case) -> bool:
        """Read what there is, and decide, abort or wait."""
        if self._logs.get(case.run).look(lambda state: state.is_superseded(case.view.attempt)):
            reason = f"superseded: a newer seal of {case.view.name!r} is committed"
            self._append_abort(case.run, case.view.attempt, reason, ())
            return True
        is_closed = case.view.state is AttemptPhase.CLOSED
        verdict, votes, members = self._read_closed(case) if is_closed else self._read(case)
        progress = frozenset((member, vote.n) for member, vote in votes.items())
        final = {member for member, vote in votes.items() if vote.is_final}
        self._progress.votes(*case.key, {member: member in final for member in members})
        self._patience.looked(case.key, len(members), progress)
        if verdict.missing:
            return self._wait_or_abort(case, (verdict, votes, members))
        if case.view.state is AttemptPhase.SEALED:
            self._append_close(case)
            # Read again: a member or a vote may have come before the CLOSE.
            verdict, votes, members = self._read_closed(case)
            if verdict.missing:
                return True
        self._commit(case, verdict, votes, members)
        return True

    def _read(self, case: _Case) -> _Read:
        members = self._membership.members(*case.key)
        votes = self._membership.newest_votes(*case.key, members, is_waiting=True)
        return self._assess(case, members, votes)

    def _assess(self, case: _Case, members: dict[str, Member], votes: dict[str, Vote]) -> _Read:
        verdict = self._judge.assess(*case.key, self._seal_of(case).event, members, votes)
        return verdict, votes, members

    def _read_closed(self, case: _Case) -> _Read:
        """As `_read`, of the members whose final vote is there.

        The CLOSE says that these suffice. A member that registered too late for it and perhaps
        never votes, or votes for something that doesn't fit, must not undo a whole checkpoint: it
        finds the CLOSE in the log and is late.
        """
        found = self._membership.members(*case.key)
        votes = self._membership.newest_votes(*case.key, found)
        newest = sorted(
            (member for member, vote in votes.items() if vote.is_final),
            key=lambda member: (found[member].joined_at, member),
        )
        for kept in range(len(newest), max(0, len(newest) - LATE_MAX), -1):
            # What held at the CLOSE holds for ever: else somebody came later and contradicts it.
            members = {member: found[member] for member in newest[:kept]}
            read = self._assess(case, members, {member: votes[member] for member in members})
            if not read[0].missing:
                _log.info("closed attempt=%s late=%s", case.key[1], newest[kept:])
                return read
        return self._assess(case, found, votes)

    def _wait_or_abort(self, case: _Case, read: _Read) -> bool:
        verdict, votes, members = read
        event = self._seal_of(case).event
        lines = self._owed.lines(case.row, event, verdict, members, votes)
        self._show_missing(case.row, lines)
        if case.row is not None and self._owed.is_lost(case.row):
            self._append_abort(case.run, case.view.attempt, case.row.reason, _limited(lines))
            self._patience.forget(case.key)
            return True
        limit_s = self._settings.commit_deadline_s
        if case.row is not None and self._owed.is_own_work_left(case.row):
            limit_s *= OWN_WORK_FACTOR
        if self._patience.stalled_s(case.key) < limit_s:
            return False
        reason = f"not whole {self._settings.commit_deadline_s:g} s after its seal"
        self._append_abort(case.run, case.view.attempt, reason, _limited(lines))
        self._patience.forget(case.key)
        return True

    def _show_missing(self, row: AttemptRow | None, lines: list[str]) -> None:
        if row is None or tuple(lines) == row.missing:
            return
        with self._spool.transaction():
            now = self._spool.attempt(row.id)
            if now is not None and now.state in UNDECIDED:
                self._spool.update_attempt(row.id, missing=_limited(lines))

    def _append_close(self, case: _Case) -> None:
        attempt = case.view.attempt

        def decide(state: RunState) -> Entry | None:
            is_open = state.attempts[attempt].state is AttemptPhase.SEALED
            return Close(attempt=attempt) if is_open else None

        self._logs.get(case.run).append(decide)

    def _commit(
        self,
        case: _Case,
        verdict: Verdict,
        votes: dict[str, Vote],
        members: dict[str, Member],
    ) -> None:
        run, attempt = case.key
        manifest = self._manifest(case, verdict, votes, members)
        data = encode(manifest)
        digest = digest_of(data)
        self._store.create(manifest_key(run, attempt, digest), data)
        entry = Commit(
            attempt=attempt,
            name=case.view.name,
            manifest=digest,
            base=manifest.base,
            pointers=self._pointers(case, votes),
            implies_latest=verdict.format_name not in WITHOUT_LATEST,
        )

        def decide(state: RunState) -> Entry | None:
            if state.attempts[attempt].state not in _OPEN_PHASES:
                return None
            try:
                state.check(entry)
            except RefusedError as exc:
                # A newer seal of that name was committed meanwhile: it stays the newest. Or what it
                # revises is being removed.
                return Abort(attempt=attempt, reason=f"superseded: {exc}")
            return entry

        record = self._logs.get(run).append(decide)
        self._patience.forget(case.key)
        if record is not None:
            kind = type(record.entry).__name__.upper()
            _log.info("decided attempt=%s entry=%s index=%d", attempt, kind, record.index)
            if record.entry == entry:
                tell_torn(self._events, manifest)

    def _manifest(
        self,
        case: _Case,
        verdict: Verdict,
        votes: dict[str, Vote],
        members: dict[str, Member],
    ) -> Manifest:
        """The merged votes; the same bytes whoever makes it, and whenever."""
        run, attempt = case.key
        key = intent_key(run, attempt)
        intent = decode(self._store.get(key, limit=MAX_DOCUMENT_BYTES), Intent, subject=key)
        sizes = [vote.world_size for vote in votes.values()] + [intent.world_size]
        voted = max((size for size in sizes if size is not None), default=None)
        seal = self._seal_of(case)
        said = [saving for vote in votes.values() for saving in vote.saved_by or ()]
        saved_by = merge_savings(said) or self._saved_by_of_base(run, intent.base)
        return Manifest(
            run=run,
            name=case.view.name,
            attempt=attempt,
            base=intent.base,
            generation=case.view.generation,
            event=seal.detail or str(seal.event),
            format_name=verdict.format_name,
            created_at=intent.created_at,
            members=tuple(sorted(members)),
            world_size=voted if verdict.world_size is None else verdict.world_size,
            entries=verdict.entries,
            saved_by=msgspec.UNSET if saved_by is None else saved_by,
        )

    def _saved_by_of_base(self, run: str, base: str) -> SavedBy | None:
        """How the checkpoint was saved that a revision changed, which says nothing else of it."""
        if not base:
            return None
        view = self._view(run, base)
        if view is None or not view.manifest:
            return None
        manifest = load_manifest(self._store, run, base, view.manifest)
        return manifest.saved_by or None

    def _pointers(self, case: _Case, votes: dict[str, Vote]) -> tuple[PointerValue, ...]:
        """The pointers that the votes carry; one value for each name."""
        chosen: dict[str, PointerValue] = {}
        for member in sorted(votes):
            for value in votes[member].pointers:
                if value.target != case.view.name:
                    continue
                present = chosen.setdefault(value.pointer, value)
                if present != value:
                    detail = f"{value.pointer} has two values; {present.content!r} is taken"
                    self._events.record("pointer-conflict", case.view.attempt, detail)
        return tuple(chosen[name] for name in sorted(chosen))

    def _append_abort(self, run: str, attempt: str, reason: str, missing: tuple[str, ...]) -> None:
        def decide(state: RunState) -> Entry | None:
            view = state.attempts.get(attempt)
            if view is not None and view.state not in _OPEN_PHASES:
                return None
            return Abort(attempt=attempt, reason=reason, missing=missing)

        self._logs.get(run).append(decide)


def _limited(lines: list[str]) -> tuple[str, ...]:
    if len(lines) <= MISSING_LINES_MAX:
        return tuple(lines)
    more = f"... and {len(lines) - MISSING_LINES_MAX} more"
    return (*lines[:MISSING_LINES_MAX], more)


def _with_missing(view: AttemptView) -> str:
    shown = "; ".join(view.missing[:10])
    return f"{view.reason}: {shown}" if shown else view.reason
