"""From COMMIT to visible: the store's directories and pointers, and this spool's own tree.

It owns the order of publication: the committed state is adopted here, made visible in the store
under a lock that only saves work, then the derived pointers follow the folded log (read again after
each write, so that they never go back), then PUBLISHED is appended. Deletions by users become
RETIRE once the rules allow them.

Thread rule: the publisher's one thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, TypeVar

from ckptgate.engine.adopt import Unnamed, adopt, prepare, tell_unnamed
from ckptgate.engine.digest import Fingerprint
from ckptgate.engine.manifests import load_manifest
from ckptgate.engine.node import Node
from ckptgate.engine.runlog import RunLog
from ckptgate.engine.settling import Settling
from ckptgate.engine.votes import Voter
from ckptgate.errors import (
    CkptError,
    IntegrityError,
    MissingError,
    NotCopiedError,
    RefusedError,
)
from ckptgate.model.documents import (
    MAX_DOCUMENT_BYTES,
    Manifest,
    PointerKind,
    PointerValue,
    decode,
    digest_of,
)
from ckptgate.model.entries import Entry, Published, Retire
from ckptgate.model.layout import join_key, manifest_key
from ckptgate.model.rules import AttemptPhase, AttemptView, FoldedPointer, RunState
from ckptgate.model.states import UNDECIDED, AttemptState
from ckptgate.ports.spool import AttemptRow, LocalBytes, TombstoneRow
from ckptgate.ports.store import PlainKind

__all__ = ["Publication"]

_log = logging.getLogger(__name__)

POINTER_ROUNDS_MAX: Final = 8
"""How often one pass follows pointers that move under its hands."""
RETIRED_WATCHED: Final = 16
"""So many that were retired last are looked at again whenever the log has grown."""
TOMBSTONE_KEPT_S: Final = 2.0
"""How long a removed checkpoint stays hidden from its job here after the log has retired it."""


_T = TypeVar("_T")


class Publication:
    """Makes visible what is committed, in the store and here."""

    def __init__(self, node: Node, *, voter: Voter) -> None:
        self._store = node.store
        self._spool = node.spool
        self._logs = node.logs
        self._membership = node.membership
        self._voter = voter
        self._events = node.events
        self._invalidations = node.invalidations
        self._clock = node.clock
        self._turns = node.turns
        self._phases = node.phases
        self._hidden: set[tuple[str, str]] = set()
        self._committed_at: dict[tuple[str, str], float] = {}
        self._done_to: dict[str, int] = {}
        self._settling = Settling(node)
        self._retired_at: dict[int, float] = {}

    def step(self, run: str) -> bool:
        """One pass over a run whose log was refreshed; True if anything was done.

        Raises:
            CkptError: the store failed; the same is due at the next pass.
        """
        log = self._logs.get(run)
        did = self._adopt_own(log)
        if self._done_to.get(run) != log.state.length:
            length = log.state.length
            did = self._take_replaced(log) or did
            did = self._publish_all(log) or did
            did = self._unpublish_retired(log) or did
            self._set_pointers(log)
            self._done_to[run] = length
        elif log.look(_unpublished):
            # Somebody else's turn, until that one has had its time.
            did = self._publish_all(log) or did
        did = self._settling.step(log) or did
        return self._retire(log) or did

    # This spool

    def _adopt_own(self, log: RunLog) -> bool:
        rows = self._spool.attempts(run=log.run, states=UNDECIDED)
        return _each(rows, lambda row: self._adopt_row(log, row))

    def _adopt_row(self, log: RunLog, row: AttemptRow) -> bool:
        view = self._view(log, row.attempt) if row.attempt else None
        if view is None or view.state is not AttemptPhase.COMMITTED:
            return False
        if self._membership.check_late(row).state in UNDECIDED:
            self._phases.committed(row)
            self._adopt(log, row.run_ino, view)
        else:
            self._phases.lost(row, "late")
        self._invalidations.name(row.run_ino, row.name)
        self._voter.forget(row.id)
        self._membership.forget(log.run, row.attempt)
        return True

    def _take_replaced(self, log: RunLog) -> bool:
        """Names whose committed attempt is another one now, or none."""
        rows = self._spool.attempts(run=log.run, states=(AttemptState.COMMITTED,))
        return _each(rows, lambda row: self._take_replaced_row(log, row))

    def _take_replaced_row(self, log: RunLog, row: AttemptRow) -> bool:
        attempt = log.look(lambda state: state.current.get(row.name))
        if attempt == row.attempt:
            return False
        view = self._view(log, attempt) if attempt else None
        if view is not None:
            self._adopt(log, row.run_ino, view)
            return True
        self._spool.update_attempt(row.id, state=AttemptState.REPLACED)
        self._invalidations.name(row.run_ino, row.name)
        return True

    def _adopt(self, log: RunLog, run_ino: int, view: AttemptView) -> None:
        is_current = log.look(lambda state: state.current.get(view.name) == view.attempt)
        manifest = load_manifest(self._store, log.run, view.attempt, view.manifest)
        unnamed: list[Unnamed] = []
        prepared = prepare(self._spool, log.run, manifest)
        with self._spool.transaction():
            newer = self._spool.attempts(
                run=log.run, name=view.name, states=(AttemptState.COMMITTED,)
            )
            row = adopt(
                self._spool,
                log.run,
                run_ino,
                manifest,
                view.manifest,
                seal_index=view.seal_index,
                unnamed=unnamed,
                prepared=prepared,
            )
            if not is_current:
                # Committed, and replaced since: what replaced it stays what the name means.
                self._spool.update_attempt(row.id, state=AttemptState.REPLACED)
                for other in newer:
                    if other.id != row.id:
                        self._spool.update_attempt(other.id, state=AttemptState.COMMITTED)
        _log.info("adopted run=%s attempt=%s name=%s", log.run, view.attempt, view.name)
        tell_unnamed(self._invalidations, unnamed)
        self._invalidations.name(run_ino, view.name)
        for name, folded in log.look(lambda state: dict(state.pointers)).items():
            if folded.value.target == view.name:
                self._invalidations.name(run_ino, name)

    # The store

    def _view(self, log: RunLog, attempt: str) -> AttemptView | None:
        return log.look(lambda state: state.attempts.get(attempt))

    def _publish_all(self, log: RunLog) -> bool:
        def publish(attempt: str) -> bool:
            if not self._is_my_turn(log, attempt):
                return False
            with self._store.lock_run(log.run):
                log.refresh()
                if attempt not in log.look(_unpublished):
                    return False
                self._publish(log, attempt)
                return True

        return _each(log.look(_unpublished), publish)

    def _is_my_turn(self, log: RunLog, attempt: str) -> bool:
        """Who committed it publishes it; the others in their turn, should that one be dead."""
        view = self._view(log, attempt)
        now_s = self._clock.monotonic()
        since_s = self._committed_at.setdefault((log.run, attempt), now_s)
        first = view.decided_by if view is not None else ""
        return self._turns.is_mine(log.run, attempt, first, now_s - since_s)

    def _publish(self, log: RunLog, attempt: str) -> None:
        view = self._view(log, attempt)
        assert view is not None, attempt
        key = manifest_key(log.run, attempt, view.manifest)
        try:
            data = self._store.get(key, limit=MAX_DOCUMENT_BYTES)
        except MissingError as exc:
            msg = f"manifest {key} is missing, but the log says that it is committed"
            raise IntegrityError(msg, subject=key) from exc
        if digest_of(data) != view.manifest:
            msg = f"manifest {key} is not the one that its COMMIT names"
            raise IntegrityError(msg, subject=key, hint="restore it from a backup of the store")

        def is_due() -> bool:
            # Of the newest log: a slow publisher must not replace what is newer.
            log.refresh()
            return log.look(lambda state: state.current.get(view.name)) == attempt

        manifest = decode(data, Manifest, subject=key)
        try:
            self._store.publish(log.run, manifest, data, is_due=is_due)
        except NotCopiedError as exc:
            # What the COMMIT says is there and found by its manifest; trying again changes nothing.
            self._events.record("not-copied", join_key(log.run, view.name), str(exc))
        row = self._spool.attempt_by_id(log.run, attempt)
        if row is not None:
            self._take_link_times(row)
        self._set_pointers_locked(log)

        def decide(state: RunState) -> Entry | None:
            return Published(attempt=attempt) if attempt in _unpublished(state) else None

        log.append(decide)
        _log.info("published run=%s attempt=%s name=%s", log.run, attempt, view.name)

    def _take_link_times(self, row: AttemptRow) -> None:
        """Publication gave the linked bytes the checkpoint's times: they are still these bytes."""
        for _, node, file in self._spool.files_of_attempt(row.id):
            if not file.is_linked or file.local is not LocalBytes.FULL:
                continue
            try:
                seen = Fingerprint.of(self._spool.data_path(file.file))
            except FileNotFoundError:
                continue
            is_touched = seen.mtime_ns == node.mtime_ns != file.mtime_ns
            if is_touched and seen.size == file.size:
                self._spool.update_file(file.file, mtime_ns=seen.mtime_ns, ctime_ns=seen.ctime_ns)

    def _unpublish_retired(self, log: RunLog) -> bool:
        did = False
        retired = log.look(lambda state: list(state.retired.items()))
        for place, (name, attempt) in enumerate(retired):
            if (log.run, attempt) in self._hidden and place < len(retired) - RETIRED_WATCHED:
                continue
            shown = self._store.published_attempt(log.run, name)
            if shown and log.look(partial(_is_gone, name=name, attempt=shown)):
                self._store.unpublish(log.run, name, shown)
                _log.info("unpublished run=%s name=%s attempt=%s", log.run, name, shown)
                did = True
            # Who would show it again, having been slow, asks itself afterwards.
            self._hidden.add((log.run, attempt))
        return did

    def _set_pointers(self, log: RunLog) -> None:
        if not log.look(_pointers):
            return
        with self._store.lock_run(log.run):
            self._set_pointers_locked(log)

    def _set_pointers_locked(self, log: RunLog) -> None:
        """Write what differs, fold again, and correct: a pointer never stays behind the log."""
        done: dict[str, PointerValue] = {}
        for _ in range(POINTER_ROUNDS_MAX):
            wanted = {
                name: folded.value
                for name, folded in log.look(_pointers).items()
                if done.get(name) != folded.value
            }
            if not wanted:
                return
            for name, value in wanted.items():
                if self._is_target_shown(log, value):
                    self._set_pointer(log.run, value)
                done[name] = value
            log.refresh()

    def _is_target_shown(self, log: RunLog, value: PointerValue) -> bool:
        """Whether the pointer's target is visible in the store; if not, it comes first."""
        attempt = log.look(lambda state: state.current.get(value.target, ""))
        return bool(attempt) and (self._store.published_attempt(log.run, value.target) == attempt)

    def _set_pointer(self, run: str, value: PointerValue) -> None:
        if self._store.pointer_content(run, value.pointer) == value.content:
            is_link = value.kind is PointerKind.SYMLINK
            kind = self._store.plain_stat(join_key(run, value.pointer)).kind
            if kind is (PlainKind.SYMLINK if is_link else PlainKind.FILE):
                return
        self._store.set_pointer(run, value)
        _log.info("pointer run=%s name=%s target=%s", run, value.pointer, value.target)

    # What users wait for

    def _retire(self, log: RunLog) -> bool:
        return _each(self._spool.tombstones(run=log.run), lambda tomb: self._retire_one(log, tomb))

    def _retire_one(self, log: RunLog, tomb: TombstoneRow) -> bool:
        entry = Retire(name=tomb.name, attempt=tomb.attempt, reason=f"deleted by {tomb.job_key}")

        def decide(state: RunState) -> Entry | None:
            try:
                state.check(entry)
            except RefusedError:
                # Pointed at, pinned, held or the newest: the tombstone waits.
                return None
            return entry

        if log.look(decide) is not None:
            log.append(decide)
        if log.look(lambda state: state.current.get(tomb.name)) == tomb.attempt:
            return False
        now = self._clock.monotonic()
        if tomb.id not in self._retired_at:
            self._retired_at[tomb.id] = now
            self._done_to.pop(log.run, None)
            return True
        if now - self._retired_at[tomb.id] < TOMBSTONE_KEPT_S:
            # The mount's view of the log may be a little older, and would show the name again.
            return False
        del self._retired_at[tomb.id]
        self._spool.drop_tombstone(tomb.id)
        for row in self._spool.attempts(run=log.run, name=tomb.name):
            self._invalidations.name(row.run_ino, tomb.name)
        return True


def _each(items: Iterable[_T], action: Callable[[_T], bool]) -> bool:
    """Do *action* for each item; one that fails stops no other. The first failure is raised."""
    did = False
    failure: CkptError | None = None
    for item in items:
        try:
            did = action(item) or did
        except CkptError as exc:
            failure = failure or exc
    if failure is not None:
        raise failure
    return did


def _unpublished(state: RunState) -> list[str]:
    """Committed, still what its name means, and not said to be in the store; oldest first."""
    views = (state.attempts[attempt] for attempt in state.current.values())
    return [view.attempt for view in views if not view.is_published]


def _is_gone(state: RunState, *, name: str, attempt: str) -> bool:
    """Whether *name* means nothing any more, and *attempt* is what it meant once.

    That needn't be the one that was retired: a commit can be retired before anybody shows it, and
    what it replaced is then still there.
    """
    view = state.attempts.get(attempt)
    return name not in state.current and view is not None and view.name == name


def _pointers(state: RunState) -> dict[str, FoldedPointer]:
    return {
        name: folded
        for name, folded in state.pointers.items()
        if folded.value.target in state.current
    }
