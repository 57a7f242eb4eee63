"""Making and removing directories: attempts, directories inside of them, plain ones.

Owns the rules of when a directory is a new attempt, and what the removal of a checkpoint's root
means: an open attempt is given up, a committed checkpoint gets a tombstone. A plain directory in
which a checkpoint ever began stays. Any thread.
"""

from __future__ import annotations

import errno
import logging

from ckptgate.errors import CkptError, ExistsError, MissingError
from ckptgate.model.documents import NameOpKind
from ckptgate.model.jobkey import JobKey
from ckptgate.model.layout import GATEWAY_DIR
from ckptgate.model.moves import Move, taken
from ckptgate.model.states import DELETED, REMOVED, UNDECIDED, AttemptState
from ckptgate.ports.spool import (
    AttemptRow,
    NameOpRow,
    NodeKind,
    NodeRow,
    PlainOpKind,
    TombstoneRow,
)
from ckptgate.vfs import (
    files,
    listing,
    names,
    pending,
    plain,
    revisions,
    stopping,
    times,
    visibility,
)
from ckptgate.vfs.attributes import entry_of
from ckptgate.vfs.context import Context, MeanwhileError, Who
from ckptgate.vfs.interface import Caller, Entry
from ckptgate.vfs.liveness import record_writer
from ckptgate.vfs.looking_again import have_asked_again
from ckptgate.vfs.lookup import remove_name
from ckptgate.vfs.standins import below, node_of
from ckptgate.vfs.visibility import Found, What

__all__ = ["abandon", "is_empty_attempt", "mkdir", "not_empty", "queue_name_op", "rmdir"]

_log = logging.getLogger(__name__)


def mkdir(ctx: Context, caller: Caller, number: int, name: str, mode: int) -> Entry:
    """Make a directory; a name that is a checkpoint's starts an attempt.

    Args:
        ctx: the vfs.
        caller: who makes it.
        number: by which the kernel knows the directory that it is made in.
        name: its name.
        mode: its permissions.

    Raises:
        ExistsError: the name means something to this caller already.
        RefusedError: EROFS, no checkpoint may be begun now.
    """
    directory = visibility.directory(ctx, caller, node_of(number))
    who = ctx.who(caller)
    found = None if name == GATEWAY_DIR else visibility.resolve(ctx, caller, directory, name)
    if found is not None:
        if found.what is What.ATTEMPT:
            _note_writer(ctx, who, found)
        raise _taken(name)
    is_attempt = names.is_checkpoint(ctx, directory, name)
    names.check_new_name(ctx, directory, name, is_attempt=is_attempt)
    if is_attempt:
        stopping.check_taking(ctx, names.plain_path(directory, name))
    parent = revisions.writable_directory(ctx, caller, directory)
    if is_attempt:
        ctx.expect(lambda: _check_no_attempt(ctx, who, parent, name))
    with ctx.change():
        node = files.new_node(ctx, caller, parent, NodeKind.DIR, mode)
        times.names_changed(ctx, parent)
        if is_attempt:
            _start_attempt(ctx, who, parent, name, node)
            return entry_of(ctx, ctx.node(node.ino), 0.0)
        if parent.attempt is None:
            path = names.plain_path(parent, name)
            ctx.spool.update_node(node.ino, plain_path=path)
            plain.queue(ctx, PlainOpKind.MKDIR, path, mode=node.mode)
        ctx.spool.link(parent.ino, name, node.ino)
        if parent.attempt is not None:
            path = names.path_in_attempt(ctx, node.ino)
            queue_name_op(ctx, parent.attempt, NameOpKind.MKDIR, path, mode=node.mode)
            revisions.touch(ctx, who, parent)
        timeout = visibility.name_timeout(ctx, number, parent, name)
        node = ctx.node(node.ino)
        return entry_of(ctx, node, timeout, number=below(number, parent, node))


def _taken(name: str) -> ExistsError:
    return ExistsError(f"{name!r} is there already", subject=name)


def _check_no_attempt(ctx: Context, who: Who, parent: NodeRow, name: str) -> None:
    """Refuse a name that got an attempt of the caller's incarnation since it was looked for."""
    if visibility.own_attempt(ctx, who, parent.ino, name) is not None:
        raise _taken(name)


def _note_writer(ctx: Context, who: Who, found: Found) -> None:
    """Who asks for a directory that its incarnation writes is one of the writers."""
    if found.attempt is not None:
        with ctx.change():
            record_writer(ctx, found.attempt, who)


def _start_attempt(ctx: Context, who: Who, parent: NodeRow, name: str, root: NodeRow) -> None:
    for row in ctx.spool.attempts(run_ino=parent.ino, name=name, states=(AttemptState.OPEN,)):
        # Its incarnation no longer sees it (else the name were taken): its writers died.
        if row.job_key == who.key:
            abandon(ctx, row, "its writers died before it was whole")
    now = ctx.clock.now_ns()
    run = parent.plain_path or ""
    row = ctx.spool.add_attempt(
        AttemptRow(
            id=0,
            run=run,
            run_ino=parent.ino,
            name=name,
            attempt="",
            job_key=who.key,
            generation=-1,
            state=AttemptState.OPEN,
            root=root.ino,
            world_size=who.world_size,
            created_ns=now,
            write_ns=now,
        )
    )
    ctx.spool.update_node(root.ino, attempt=row.id)
    ctx.note_began(run, row.id)
    record_writer(ctx, row, who)
    ctx.spool.watch_run(run)
    ctx.wake()
    _log.info("attempt-starts run=%r name=%r job=%s", run, name, who.key)


def abandon(ctx: Context, row: AttemptRow, reason: str) -> None:
    """Give an undecided attempt up; inside a change."""
    ctx.spool.update_attempt(row.id, state=AttemptState.ABANDONED, reason=reason)
    ctx.wake()
    _log.info("attempt-abandoned run=%r name=%r reason=%s", row.run, row.name, reason)


def queue_name_op(
    ctx: Context, attempt: int, op: NameOpKind, path: str, *, to: str = "", mode: int = 0o755
) -> None:
    """Tell the attempt's other members, if there can be any; inside a change."""
    row = ctx.spool.attempt(attempt)
    if row is None or not row.job_key or not JobKey.parse(row.job_key).is_shared:
        return
    member = ctx.spool.get_meta("member") or ""
    moves = ctx.spool.moves(attempt)
    after = {other: count for other, count in taken(moves).items() if other != member}
    if op is NameOpKind.RENAME:
        n = row.names_count + len(ctx.spool.name_ops(attempt))
        ctx.spool.add_move(attempt, Move(member=member, n=n, path=path, to=to))
    ctx.spool.add_name_op(
        NameOpRow(id=0, attempt=attempt, op=str(op), path=path, to=to, mode=mode, after=after)
    )
    ctx.wake()


def not_empty(name: str) -> CkptError:
    """The error for a directory that holds something."""
    return CkptError(f"{name!r} is not empty", subject=name, errno_value=errno.ENOTEMPTY)


def is_empty_attempt(ctx: Context, row: AttemptRow) -> bool:
    """Whether the attempt's tree holds nothing."""
    return ctx.spool.count_children(row.root)[0] == 0


def rmdir(ctx: Context, caller: Caller, parent_ino: int, name: str) -> None:
    """Remove an empty directory."""
    parent = visibility.directory(ctx, caller, parent_ino)
    found = visibility.resolve(ctx, caller, parent, name)
    if found is None:
        msg = f"nothing is named {name!r} here"
        raise MissingError(msg, subject=name)
    if found.node.kind is not NodeKind.DIR:
        msg = f"{name!r} is not a directory"
        raise CkptError(msg, subject=name, errno_value=errno.ENOTDIR)
    if found.attempt is not None:
        _remove_root(ctx, caller, parent, name, found.attempt)
    elif found.what is What.INNER:
        _remove_inner(ctx, caller, parent_ino, parent, name)
    else:
        _remove_plain(ctx, caller, parent, name, found.node)


def _remove_root(ctx: Context, caller: Caller, parent: NodeRow, name: str, row: AttemptRow) -> None:
    if row.state in UNDECIDED:
        if row.is_voted and is_empty_attempt(ctx, row):
            # Its vote says that nothing is here: whatever others decide, this is no part of it.
            ctx.expect(lambda: _check_undecided(ctx, row))
        else:
            # Raises ESTALE if it got decided while this waited.
            revisions.writable(ctx, caller, ctx.node(row.root))
        row = ctx.spool.attempt(row.id) or row
    visibility.filled(ctx, caller, row)
    _check_empty(ctx, row)
    if row.base is not None:
        have_asked_again(ctx, caller, parent.ino, name)
    who = ctx.who(caller)
    with ctx.change():
        _check_empty(ctx, row)
        times.names_changed(ctx, parent)
        committed = row
        if row.state is not AttemptState.COMMITTED:
            base = None if row.base is None else ctx.spool.attempt(row.base)
            abandon(ctx, row, REMOVED if base is None else DELETED)
            if base is None or base.state is not AttemptState.COMMITTED:
                ctx.invalidate(parent.ino, name)
                return
            committed = base
        ctx.spool.add_tombstone(
            TombstoneRow(
                id=0,
                run=parent.plain_path or "",
                name=name,
                attempt=committed.attempt,
                job_key=who.key,
            )
        )
        ctx.spool.watch_run(parent.plain_path or "")
    ctx.invalidate(parent.ino, name)
    ctx.wake()
    _log.info("checkpoint-deleted run=%r name=%r by=%s", committed.run, name, who.key)


def _check_undecided(ctx: Context, row: AttemptRow) -> None:
    """Have the call done once more if the attempt was decided since it was looked at."""
    now = ctx.spool.attempt(row.id)
    if now is None or now.state not in UNDECIDED:
        msg = f"{row.name!r} was decided meanwhile"
        raise MeanwhileError(msg, subject=row.name)


def _check_empty(ctx: Context, row: AttemptRow) -> None:
    if not is_empty_attempt(ctx, row):
        raise not_empty(row.name)


def _remove_inner(
    ctx: Context, caller: Caller, parent_ino: int, parent: NodeRow, name: str
) -> None:
    parent = revisions.writable(ctx, caller, parent)
    _empty_child(ctx, parent, name)
    if parent.ino != parent_ino:
        have_asked_again(ctx, caller, parent_ino, name)
    with ctx.change():
        # The kernel keeps others out only where they come by the same way.
        child = _empty_child(ctx, parent, name)
        path = names.path_in_attempt(ctx, child.ino)
        assert parent.attempt is not None
        queue_name_op(ctx, parent.attempt, NameOpKind.RMDIR, path)
        remove_name(ctx, parent, name, child)
        times.names_changed(ctx, parent)
        revisions.touch(ctx, ctx.who(caller), parent)


def _empty_child(ctx: Context, parent: NodeRow, name: str) -> NodeRow:
    child = ctx.spool.child(parent.ino, name)
    if child is None or child.kind is not NodeKind.DIR:
        msg = f"no directory is named {name!r} here"
        raise MissingError(msg, subject=name)
    if ctx.spool.count_children(child.ino)[0]:
        raise not_empty(name)
    return child


def _remove_plain(ctx: Context, caller: Caller, parent: NodeRow, name: str, node: NodeRow) -> None:
    states = (AttemptState.OPEN, AttemptState.SEALED, AttemptState.COMMITTED)
    if ctx.spool.attempts(run_ino=node.ino, states=states) or listing.snapshot(ctx, caller, node):
        raise not_empty(name)
    view = ctx.view(caller, node.plain_path or "")
    if view.committed or view.undecided:
        raise not_empty(name)
    if view.length or ctx.spool.attempts(run_ino=node.ino):
        # The store's directory holds the gateway's own: it could not go there, ever.
        msg = f"{name!r} keeps what was decided about the checkpoints that were in it"
        hint = f"it is in {node.plain_path}/{GATEWAY_DIR} in the store"
        raise CkptError(msg, subject=name, hint=hint, errno_value=errno.ENOTEMPTY)
    with ctx.change():
        for child_name, _ in ctx.spool.children(node.ino):
            # Values of pointers that the caller's incarnation removed.
            ctx.spool.unlink(node.ino, child_name)
        pending.remove_plain(ctx, ctx.who(caller), parent, name, is_dir=True)
        times.names_changed(ctx, parent)
