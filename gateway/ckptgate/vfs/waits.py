"""Where calls wait: for other members, for a decision, for an earlier job's sealed checkpoints.

Owns the limits of all waits. Only callers that may block get here without WouldBlockError; nothing
here runs inside a change. Any thread.
"""

from __future__ import annotations

import functools
import logging
from typing import Final

from ckptgate.errors import BusyError, TransientStoreError
from ckptgate.model.jobkey import JobKey
from ckptgate.model.states import UNDECIDED, AttemptState, FileState
from ckptgate.ports.catalog import RunView
from ckptgate.ports.spool import AttemptRow, FileRow, NodeRow, PendingKind
from ckptgate.vfs.context import Context, Who, stale
from ckptgate.vfs.interface import Caller
from ckptgate.vfs.liveness import has_live_writer, is_left_whole

__all__ = ["decided", "must_settle", "refresh_shared", "settle", "wait_to_resume"]

_log = logging.getLogger(__name__)

VOTES_WAIT_S: Final = 5.0
"""After its ranks are dead, until every member has voted for what it has of an open attempt."""


def _is_shared(row: AttemptRow) -> bool:
    return _is_shared_key(row.job_key)


@functools.lru_cache(maxsize=1024)
def _is_shared_key(text: str) -> bool:
    return bool(text) and JobKey.parse(text).is_shared


def refresh_shared(ctx: Context, caller: Caller, node: NodeRow) -> bool:
    """Take over what other members did in the attempt of *node*; True if anything is new."""
    row = None if node.attempt is None else ctx.spool.attempt(node.attempt)
    if row is None or row.state not in UNDECIDED or not row.is_joined or not _is_shared(row):
        return False
    asked = ("refresh", row.id)
    if not ctx.is_due(asked, ctx.settings.refresh_interval_s):
        return False
    ctx.need_block(caller)
    try:
        return ctx.catalog.refresh_shared(row.id)
    except TransientStoreError as exc:
        ctx.store_is_away(exc, "refresh-shared")
        return False
    finally:
        ctx.done_now(asked)


def decided(ctx: Context, caller: Caller, row: AttemptRow) -> AttemptRow:
    """The attempt once it takes writes or is decided: waits while its final vote is out.

    Raises:
        BusyError: EBUSY, it is still undecided after `decision_wait_s`.
    """
    if not row.is_voted or row.state not in UNDECIDED:
        return row
    ctx.need_block(caller)
    ctx.waker.wake()
    deadline = ctx.clock.monotonic() + ctx.settings.decision_wait_s
    while ctx.clock.monotonic() < deadline:
        ctx.clock.sleep(ctx.settings.poll_interval_s)
        now = ctx.spool.attempt(row.id)
        if now is None:
            raise stale(row.name, "its attempt is gone")
        if not now.is_voted or now.state not in UNDECIDED:
            return now
    msg = (
        f"checkpoint {row.name!r} is being decided and takes no writes "
        f"(waited {ctx.settings.decision_wait_s:g} s)"
    )
    raise BusyError(msg, subject=row.name, hint="ckptgate status")


def wait_to_resume(
    ctx: Context, caller: Caller, who: Who, parent: NodeRow, view: RunView
) -> RunView:
    """At a new shared job's first look into a run, wait for sealed attempts to be decided.

    And those that a dead job left whole, which are sealed once they are stored. Where this node has
    a part only, others may have the rest: that is known once they have voted.

    Returns:
        The run as it is then.
    """
    run = parent.plain_path or ""
    if not who.is_shared or (who.key, run) in ctx.memory.resumed:
        return view
    began = ctx.clock.monotonic()
    left = _left_open(ctx, who, parent)
    if left:
        ctx.need_block(caller)
    held = _held(ctx, who, parent, left, began)
    if _is_behind(ctx, who, parent, view):
        ctx.need_block(caller)
        view = ctx.catalog.view(run, 0.0)
    waiting = list(dict.fromkeys(_foreign_undecided(ctx, who, run, view) + held))
    if waiting:
        ctx.need_block(caller)
        _log.info("resume-waits run=%r for=%s", run, ",".join(waiting))
    while waiting and ctx.clock.monotonic() < began + ctx.settings.resume_wait_s:
        ctx.waker.wake()
        ctx.clock.sleep(max(ctx.settings.poll_interval_s, ctx.settings.view_age_s))
        # First the rows, then the log: what is decided in between is found in one of them.
        held = _held(ctx, who, parent, _left_open(ctx, who, parent), began)
        view = ctx.catalog.view(run, 0.0)
        waiting = [item for item in waiting if item in view.undecided or item in held]
    if waiting:
        _log.warning("resume-goes-on-without run=%r undecided=%s", run, ",".join(waiting))
    with ctx.lock:
        ctx.memory.resumed.add((who.key, run))
    return view


def _foreign_undecided(ctx: Context, who: Who, run: str, view: RunView) -> list[str]:
    """Sealed attempts that are not the caller's own."""
    found: list[str] = []
    for attempt in view.undecided:
        row = ctx.spool.attempt_by_id(run, attempt)
        if row is None or row.job_key != who.key:
            found.append(attempt)
    return found


def _rows_of_others(
    ctx: Context, who: Who, run: NodeRow, *states: AttemptState
) -> list[AttemptRow]:
    """What other shared jobs have here that other nodes know of."""
    return [
        row
        for row in ctx.spool.attempts(run_ino=run.ino, states=states)
        if row.attempt and row.is_joined and row.job_key != who.key and _is_shared(row)
    ]


def _is_behind(ctx: Context, who: Who, run: NodeRow, view: RunView) -> bool:
    """Whether this node's publisher knows of a seal or commit that the mount has not read.

    Each reads the log for itself: by what the mount knew a rank could miss a checkpoint that was
    decided a moment ago, while another node's finds it.
    """
    rows = _rows_of_others(ctx, who, run, AttemptState.SEALED, AttemptState.COMMITTED)
    return any(
        row.attempt not in view.undecided and view.committed.get(row.name) != row.attempt
        for row in rows
    )


def _left_open(ctx: Context, who: Who, run: NodeRow) -> list[AttemptRow]:
    """Open attempts of other jobs that are shared and get no more writes here."""
    return [
        row
        for row in _rows_of_others(ctx, who, run, AttemptState.OPEN)
        # Of a revision its base's files are there anyway.
        if (row.base is None or row.detail) and not has_live_writer(ctx, row)
    ]


def _held(ctx: Context, who: Who, run: NodeRow, left: list[AttemptRow], began: float) -> list[str]:
    """What may become a checkpoint though the log doesn't say so yet.

    Those of the open ones *left* that are whole, or may be with what other members are yet to vote;
    attempts whose commit event was seen here; files that are yet to be published.
    """
    is_early = ctx.clock.monotonic() < began + VOTES_WAIT_S
    held = [row.attempt for row in left if _may_be_whole(ctx, row, is_early=is_early)]
    sealed = _rows_of_others(ctx, who, run, AttemptState.SEALED)
    return held + [row.attempt for row in sealed] + _on_their_way(ctx, who, run)


def _on_their_way(ctx: Context, who: Who, run: NodeRow) -> list[str]:
    """Files of other jobs, complete as far as is known, that are yet to be published."""
    found: list[str] = []
    for row in ctx.spool.pending(parent=run.ino):
        if row.kind is not PendingKind.WHOLE or row.ino is None or row.job_key == who.key:
            continue
        node = ctx.spool.node(row.ino)
        file = None if node is None or node.file is None else ctx.spool.file(node.file)
        if _is_shared_key(row.job_key) and file is not None and _is_complete(file):
            found.append(row.name)
    return found


def _is_complete(file: FileRow) -> bool:
    evidence = file.evidence
    is_sound = not evidence.problem and not evidence.has_hole and not evidence.is_torn
    return file.state is not FileState.OPEN and is_sound


def _may_be_whole(ctx: Context, row: AttemptRow, *, is_early: bool) -> bool:
    """Whether it is whole, or whether it is too early to say so."""
    if ctx.closes.has_any():
        # They are taken into the spool's rows within milliseconds.
        return is_early
    is_whole = is_left_whole(ctx, row)
    if is_whole or is_whole is None:
        return bool(is_whole)
    try:
        if not ctx.catalog.has_others(row.id):
            return False
        ctx.catalog.refresh_shared(row.id)
    except TransientStoreError as exc:
        ctx.store_is_away(exc, "resume")
        return is_early
    return is_early or bool(is_left_whole(ctx, row))


def _unsettled(ctx: Context, ino: int, *, is_close: bool) -> list[AttemptRow]:
    """Shared attempts around *ino* of which other nodes don't know everything yet."""
    node = ctx.spool.node(ino)
    if node is None:
        return []
    if node.attempt is not None:
        row = ctx.spool.attempt(node.attempt)
        rows = [] if row is None or row.state not in UNDECIDED else [row]
    else:
        rows = ctx.spool.attempts(run_ino=ino, states=UNDECIDED)
    return [
        row
        for row in rows
        if _is_shared(row)
        and (not row.is_joined or ctx.spool.name_ops(row.id))
        and (
            ctx.is_due(("settle-in-vain", row.id), ctx.settings.settle_pause_s)
            or (is_close and _is_unproved(ctx, row))
        )
    ]


def must_settle(ctx: Context, ino: int, *, is_close: bool = False) -> bool:
    """Whether `settle` would wait."""
    return bool(_unsettled(ctx, ino, is_close=is_close))


def settle(ctx: Context, caller: Caller, ino: int, *, is_close: bool = False) -> None:
    """Wait until other nodes can know of what was done, `settle_wait_s` at most.

    A close in an attempt that a rename will seal, or in a revision, waits up to `decision_wait_s`.

    Raises:
        TransientStoreError: EIO for a close, this node could not be registered in such an attempt:
            that would commit it without this node's files.
    """
    rows = _unsettled(ctx, ino, is_close=is_close)
    if not rows:
        return
    ctx.need_block(caller)
    ctx.waker.wake()
    rows = _wait_settled(ctx, ino, ctx.settings.settle_wait_s, is_close=is_close)
    if is_close and any(_is_unproved(ctx, row) for row in rows):
        longer_s = ctx.settings.decision_wait_s - ctx.settings.settle_wait_s
        rows = _wait_settled(ctx, ino, longer_s, is_close=is_close)
    for row in rows:
        # Every close would wait again while the store is away.
        _log.warning("settle-in-vain name=%r wait_s=%g", row.name, ctx.settings.settle_wait_s)
        ctx.done_now(("settle-in-vain", row.id))
    unregistered = [row.name for row in rows if is_close and _is_unproved(ctx, row)]
    if unregistered:
        msg = f"this node could not be registered in {unregistered[0]!r}: the store does not answer"
        raise TransientStoreError(msg, subject=unregistered[0], hint="ckptgate status")


def _wait_settled(ctx: Context, ino: int, limit_s: float, *, is_close: bool) -> list[AttemptRow]:
    """What is unsettled in the end."""
    deadline = ctx.clock.monotonic() + limit_s
    rows = _unsettled(ctx, ino, is_close=is_close)
    while rows and ctx.clock.monotonic() < deadline:
        ctx.clock.sleep(ctx.settings.poll_interval_s / 4)
        rows = _unsettled(ctx, ino, is_close=is_close)
    return rows


def _is_unproved(ctx: Context, row: AttemptRow) -> bool:
    """Whether the attempt could be committed without this member, which the store doesn't know yet.

    A rename seals whatever is there; and in a revision the files of its base are in the place of
    those that this member wrote, so that no expected set tells that they are missing.
    """
    return not row.is_joined and (row.base is not None or ctx.patterns.is_temporary(row.name))
