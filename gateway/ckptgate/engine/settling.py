"""Pending pointers: from a job's own value to the log's.

It owns the rule that only the publisher settles a pending value, and only against a log that it has
read to its end: the mount's view is older, and a value that it shows may be one that the job had
written before. What is settled takes the pending value's node along, so that readers find it also
while their view of the log is older than that.

Thread rule: the publisher's one thread.
"""

from __future__ import annotations

import logging
from typing import Final

from ckptgate.engine.node import Node
from ckptgate.engine.runlog import RunLog
from ckptgate.engine.votes import is_shared_job, pending_value
from ckptgate.errors import RefusedError
from ckptgate.model.documents import PointerKind, PointerValue
from ckptgate.model.entries import Entry, Point
from ckptgate.model.layout import join_key
from ckptgate.model.rules import RunState
from ckptgate.model.states import UNDECIDED
from ckptgate.ports.spool import SETTLED_META, VOTED_META, NodeRow, PendingKind, PendingRow, Spool

__all__ = ["REMOVAL_KEPT_S", "Settling", "settle"]

_log = logging.getLogger(__name__)

_NEXT_SEALED: Final = "the next checkpoint of the job is sealed: its COMMIT may move the pointer"
REMOVAL_KEPT_S: Final = 60.0
"""How long a pointer that was removed stays so after the log gave it another value."""


def settle(spool: Spool, row: PendingRow, value: PointerValue, length: int) -> NodeRow | None:
    """The log says the pending value: its node is what everybody sees from now on.

    Inside a transaction.

    Args:
        spool: of the pending value.
        row: which is dropped.
        value: what its node holds.
        length: of a log that says so.

    Returns:
        The node that had the name, which lives on while it is used.
    """
    assert row.ino is not None
    spool.drop_pending(row.id)
    old = spool.child(row.parent, row.name)
    if old is not None:
        spool.unlink(row.parent, row.name)
    spool.link(row.parent, row.name, row.ino)
    shown: dict[str, object] = {"plain_path": None}
    if value.kind is PointerKind.TEXT:
        shown |= {"target": value.content, "size": len(value.content.encode())}
    spool.update_node(row.ino, **shown)
    _note(spool, row, length)
    return old


def _note(spool: Spool, row: PendingRow, length: int) -> None:
    """Who no longer finds the pending value must know so much of the log."""
    meta = SETTLED_META.format(run_ino=row.parent, name=row.name)
    spool.set_meta(meta, str(max(length, int(spool.get_meta(meta) or 0))))


class Settling:
    """What becomes of pending pointers once their target is committed."""

    def __init__(self, node: Node) -> None:
        self._spool = node.spool
        self._events = node.events
        self._invalidations = node.invalidations
        self._clock = node.clock
        self._moved_at: dict[int, float] = {}

    def step(self, log: RunLog) -> bool:
        """Pending pointers that came true, and those to a checkpoint that is committed already.

        Returns:
            Whether anything was done.

        Raises:
            CkptError: the store failed; the same is due at the next pass.
        """
        did = False
        for pending in self._spool.pending():
            parent = self._spool.node(pending.parent)
            if pending.kind is not PendingKind.POINTER or parent is None:
                continue
            if parent.plain_path != log.run:
                continue
            if pending.ino is None:
                did = self._end_removal(log, pending) or did
            else:
                did = self._settle_pointer(log, pending) or did
        return did

    def _end_removal(self, log: RunLog, pending: PendingRow) -> bool:
        """A removed pointer comes back to its incarnation once it has long had another value.

        Not at once: who removes a pointer usually makes it again, and must not find it there.
        """
        folded = log.look(lambda state: state.pointers.get(pending.name))
        if folded is not None and folded.value.target == pending.target:
            return False
        since = self._moved_at.setdefault(pending.id, self._clock.monotonic())
        if self._clock.monotonic() - since < REMOVAL_KEPT_S:
            return False
        self._moved_at.pop(pending.id)
        self._spool.drop_pending(pending.id)
        self._invalidations.name(pending.parent, pending.name)
        return True

    def _settle_pointer(self, log: RunLog, pending: PendingRow) -> bool:
        node = self._spool.node(pending.ino) if pending.ino is not None else None
        is_committed = log.look(lambda state: pending.target in state.current)
        if node is None or not is_committed or self._is_being_saved(log.run, pending):
            return False
        value = pending_value(self._spool, pending.name, node, pending.target)
        if value is None or not self._is_still_said(pending, node):
            return False
        is_pointed = not self._is_folded(log, value)
        if is_pointed:
            after = self._moved_on_to(pending)
            if any(self._is_being_saved(log.run, row) for row in after):
                # That one's COMMIT moves it on; a decision now could be newer than its SEAL.
                return False
            if log.look(lambda state: self._is_next_sealed(state, log.run, pending)):
                return False
            is_over = log.look(lambda state: any(row.target in state.current for row in after))
            if not is_over and not self._point(log, pending, value):
                return False
        return self._drop(log, pending, value) or is_pointed

    def _drop(self, log: RunLog, pending: PendingRow, value: PointerValue) -> bool:
        """The log has spoken: readers are to look there from now on; returns whether they do.

        Unless it was written again meanwhile: then the new text comes next. Or somebody could still
        write it, as a child of its writer that kept the descriptor: then it stays the job's own.
        """
        length = log.look(lambda state: state.length)
        old = None
        with self._spool.transaction():
            if pending not in self._spool.pending(parent=pending.parent, name=pending.name):
                return False
            node = None if pending.ino is None else self._spool.node(pending.ino)
            if node is None or self._has_writer(node):
                return False
            if pending_value(self._spool, pending.name, node, pending.target) != value:
                return False
            if self._is_folded(log, value):
                old = settle(self._spool, pending, value, length)
            else:
                # Refused for its incarnation: that one sees what all others see.
                self._spool.drop_pending(pending.id)
                _note(self._spool, pending, length)
            self._forget_vote(log, pending)
        self._invalidations.name(pending.parent, pending.name)
        for ino in {pending.ino, None if old is None else old.ino}:
            # Only the mount knows when nobody reads a nameless node any more.
            if ino is not None and self._spool.place(ino) is None:
                self._invalidations.node(ino)
        return True

    def _forget_vote(self, log: RunLog, settled: PendingRow) -> None:
        """What `_came_true` asks, once no pointer waits for it; inside a transaction."""
        rest = self._spool.pending(parent=settled.parent)
        if not any(row.target == settled.target for row in rest):
            id_ = log.look(lambda state: state.current.get(settled.target, ""))
            row = self._spool.attempt_by_id(log.run, id_)
            if row is not None:
                self._spool.drop_meta(VOTED_META.format(attempt=row.id))

    def _is_still_said(self, pending: PendingRow, node: NodeRow) -> bool:
        """Whether what was just read is the pending value, and not what is being written there.

        Its target is noted when its writer closes it: until then the text may name another one.
        """
        with self._spool.transaction():
            known = self._spool.pending(parent=pending.parent, name=pending.name)
            handles = [] if node.file is None else self._spool.handles(file=node.file)
            is_open = any(handle.pid and not handle.is_closed for handle in handles)
            return pending in known and not is_open

    def _has_writer(self, node: NodeRow) -> bool:
        """Whether anybody has it open who could write it, closed by its opener or not."""
        return node.file is not None and any(
            handle.pid for handle in self._spool.handles(file=node.file)
        )

    def _is_being_saved(self, run: str, pending: PendingRow) -> bool:
        """Whether the pointer is meant for a newer attempt of that name, whose vote carries it."""
        rows = self._spool.attempts(run=run, name=pending.target, states=UNDECIDED)
        return any(row.job_key == pending.job_key for row in rows)

    def _is_next_sealed(self, state: RunState, run: str, pending: PendingRow) -> bool:
        """Whether the same job has sealed a checkpoint that isn't decided.

        Its COMMIT may move the pointer, and would not if a decision were newer than its SEAL.
        """
        rows = self._spool.attempts(run=run, states=UNDECIDED)
        own = {row.attempt for row in rows if row.job_key == pending.job_key}
        return not own.isdisjoint(state.undecided())

    def _moved_on_to(self, pending: PendingRow) -> list[PendingRow]:
        """The pointer's later values, by the same job."""
        rows = self._spool.pending(parent=pending.parent, name=pending.name)
        return [
            row
            for row in rows
            if row.id > pending.id
            and row.kind is PendingKind.POINTER
            and row.job_key == pending.job_key
            and row.ino is not None
        ]

    def _is_folded(self, log: RunLog, value: PointerValue) -> bool:
        folded = log.look(lambda state: state.pointers.get(value.pointer))
        return folded is not None and folded.value == value

    def _point(self, log: RunLog, pending: PendingRow, value: PointerValue) -> bool:
        """A pointer written after its target was committed: set it by a decision of its own."""
        is_shared = is_shared_job(pending.job_key)

        def decide(state: RunState) -> Entry | None:
            folded = state.pointers.get(value.pointer)
            if folded is not None and folded.value == value:
                return None
            if self._came_true(state, log.run, pending, value):
                return None
            own = state.generation_of(pending.job_key)
            if is_shared and own is not None and own < state.generation:
                # Of an incarnation that a newer one has replaced.
                return None
            if self._is_next_sealed(state, log.run, pending):
                raise RefusedError(_NEXT_SEALED, subject=pending.name)
            return Point(pointer=value, reason="written after its target was committed")

        try:
            log.append(decide)
        except RefusedError as exc:
            _log.info("pointer-refused name=%s reason=%s", pending.name, exc)
            return False
        if log.look(lambda state: self._came_true(state, log.run, pending, value)):
            return True
        if not self._is_folded(log, value):
            detail = f"{value.content!r} comes from an incarnation that was replaced: dropped"
            self._events.record("pointer-stale", join_key(log.run, value.pointer), detail)
        return True

    def _came_true(
        self, state: RunState, run: str, pending: PendingRow, value: PointerValue
    ) -> bool:
        """Whether a COMMIT moved the pointer so: what it became since is not to be taken back."""
        view = state.attempts[state.current[pending.target]]
        row = self._spool.attempt_by_id(run, view.attempt)
        if value not in view.pointers or row is None or row.job_key != pending.job_key:
            return False
        last = int(self._spool.get_meta(VOTED_META.format(attempt=row.id)) or 0)
        return pending.ino is not None and pending.ino <= last
