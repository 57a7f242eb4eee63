"""Renaming: of checkpoints, inside of them, of plain names, and across.

Owns which renames are one step and which are EXDEV (tools copy then): a checkpoint stays in its run
directory, directories stay in their tree. A committed checkpoint keeps its name, and so does a
revision of it: that is EPERM, as a copy under another name isn't what was asked. Any thread.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

from ckptgate.errors import BusyError, CkptError, ExistsError, MissingError
from ckptgate.model.documents import NameOpKind
from ckptgate.model.entries import SealEvent
from ckptgate.model.layout import join_key
from ckptgate.model.states import RENAMED_OVER, UNDECIDED, AttemptState, FileState
from ckptgate.ports.spool import NodeKind, NodeRow, PendingKind, PlainOpKind, PlainOpRow
from ckptgate.vfs import (
    directories,
    events,
    names,
    pending,
    plain,
    revisions,
    stored,
    times,
    visibility,
)
from ckptgate.vfs.context import Context
from ckptgate.vfs.exchange import exchange
from ckptgate.vfs.interface import Caller
from ckptgate.vfs.liveness import record_writer
from ckptgate.vfs.looking_again import have_asked_again
from ckptgate.vfs.lookup import remove_name
from ckptgate.vfs.mutate import place_symlink
from ckptgate.vfs.rename_rules import check_below, check_in_the_way, check_is, child_of, cross
from ckptgate.vfs.visibility import Found, What
from ckptgate.vfs.writing import judge_anew, judge_by_new_name, take_bytes_along

__all__ = ["EXCHANGE", "NOREPLACE", "rename"]

NOREPLACE = 1
EXCHANGE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """A rename: where from, where to, and what is at both ends."""

    parent: NodeRow
    name: str
    found: Found
    new_parent: NodeRow
    new_name: str
    target: Found | None


def rename(
    ctx: Context,
    caller: Caller,
    parent_ino: int,
    name: str,
    new_parent_ino: int,
    new_name: str,
    flags: int,
) -> None:
    """Do what renameat2(2) does, as far as one step can."""
    if flags not in {0, NOREPLACE, EXCHANGE}:
        msg = f"rename flags {flags:#x} are not supported"
        raise CkptError(msg, subject=name, errno_value=errno.EINVAL)
    parent = visibility.directory(ctx, caller, parent_ino)
    new_parent = visibility.directory(ctx, caller, new_parent_ino)
    found = visibility.resolve(ctx, caller, parent, name)
    target = visibility.resolve(ctx, caller, new_parent, new_name)
    if found is None or (flags == EXCHANGE and target is None):
        msg = f"nothing is named {(name if found is None else new_name)!r} here"
        raise MissingError(msg, subject=name)
    if target is not None and flags == NOREPLACE:
        msg = f"{new_name!r} is there already"
        raise ExistsError(msg, subject=new_name)
    is_root = found.attempt is not None
    names.check_new_name(ctx, new_parent, new_name, is_attempt=is_root)
    if target is not None and target.node.ino == found.node.ino:
        return
    if _changes_meaning(ctx, found, parent_ino, new_parent, new_name):
        for place in (parent, new_parent):
            revisions.writable(ctx, caller, place)
        have_asked_again(ctx, caller, parent_ino, name)
    move = _Move(
        parent=parent, name=name, found=found,
        new_parent=new_parent, new_name=new_name, target=target,
    )  # fmt: skip
    if flags == EXCHANGE:
        assert target is not None
        exchange(ctx, caller, parent, name, found, new_parent, new_name, target)
    elif is_root:
        _rename_root(ctx, caller, move)
    else:
        _check_kinds(ctx, move)
        _rename_node(ctx, caller, move)
    if (parent_ino, new_parent_ino) != (parent.ino, new_parent.ino):
        ctx.invalidate(parent_ino, name)
        ctx.invalidate(new_parent_ino, new_name)


def _changes_meaning(
    ctx: Context, found: Found, place: int, new_parent: NodeRow, new_name: str
) -> bool:
    """Whether what the kernel may keep becomes something that depends on who asks."""
    parent = ctx.node(place)
    if parent.attempt is not None and new_parent.attempt is not None:
        # The kernel has the committed directory there; the copies are known to one job only.
        row = ctx.spool.attempt(parent.attempt)
        return (
            row is not None
            and row.state is AttemptState.COMMITTED
            and found.node.attempt == new_parent.attempt
        )
    return found.timeout_s > 0 and names.is_special(ctx, new_parent, new_name)


def _check_kinds(ctx: Context, move: _Move) -> None:
    """The errors of rename(2) for what is in the way."""
    if move.target is None:
        return
    check_in_the_way(ctx, move.found.node, move.target.node, move.new_name)
    if move.target.attempt is not None:
        raise directories.not_empty(move.new_name)


def _rename_root(ctx: Context, caller: Caller, move: _Move) -> None:
    """A whole checkpoint gets another name in its run directory."""
    row = move.found.attempt
    assert row is not None
    if row.state not in UNDECIDED or row.base is not None:
        raise revisions.name_is_kept(row, move.new_name)
    if move.new_parent.ino != move.parent.ino:
        raise cross(move.name, "a checkpoint stays in its run directory")
    is_temporary = ctx.patterns.is_temporary(move.name)
    if not is_temporary and not ctx.patterns.is_checkpoint(move.new_name):
        raise cross(move.new_name, "is no name of a checkpoint")
    revisions.writable(ctx, caller, ctx.node(row.root))
    _check_root_target(ctx, move)
    with ctx.change():
        _clear_root_target(ctx, caller, move)
        times.names_changed(ctx, move.parent)
        ctx.spool.update_attempt(row.id, name=move.new_name)
        directories.queue_name_op(ctx, row.id, NameOpKind.ROOT_RENAME, "", to=move.new_name)
        row = record_writer(ctx, row, ctx.who(caller))
        if is_temporary and not ctx.patterns.is_temporary(move.new_name):
            events.seal(ctx, row, SealEvent.RENAME)
    ctx.invalidate(move.parent.ino, move.name)
    ctx.invalidate(move.parent.ino, move.new_name)
    ctx.wake()


def _check_root_target(ctx: Context, move: _Move) -> None:
    target = move.target
    if target is None:
        return
    if target.node.kind is not NodeKind.DIR:
        msg = f"{move.new_name!r} is not a directory"
        raise CkptError(msg, subject=move.new_name, errno_value=errno.ENOTDIR)
    if target.what is What.COMMITTED or ctx.spool.count_children(target.node.ino)[0]:
        raise directories.not_empty(move.new_name)
    if target.attempt is not None and target.attempt.state is not AttemptState.OPEN:
        raise directories.not_empty(move.new_name)


def _clear_root_target(ctx: Context, caller: Caller, move: _Move) -> None:
    target = move.target
    if target is None:
        return
    if target.attempt is not None:
        directories.abandon(ctx, target.attempt, f"{RENAMED_OVER}{move.name}")
    else:
        pending.remove_plain(ctx, ctx.who(caller), move.new_parent, move.new_name, is_dir=True)


def _rename_node(ctx: Context, caller: Caller, move: _Move) -> None:
    node = move.found.node
    is_inner = move.parent.attempt is not None
    is_new_inner = move.new_parent.attempt is not None
    if node.kind is NodeKind.DIR and move.parent.attempt != move.new_parent.attempt:
        raise cross(move.name, "a directory stays in its checkpoint, or outside")
    if node.kind is NodeKind.DIR and not is_inner:
        _rename_plain_directory(ctx, caller, move)
        return
    if is_new_inner and not is_inner:
        _check_local(move)
    parent = revisions.writable(ctx, caller, move.parent)
    new_parent = revisions.writable_directory(ctx, caller, move.new_parent)
    if is_inner:
        # A revision may just have begun: its copies are meant then.
        node = child_of(ctx, parent, move.name)
    check_below(ctx, node, new_parent)
    if is_inner and is_new_inner and move.parent.attempt == move.new_parent.attempt:
        _rename_inner(ctx, caller, parent, move.name, node, new_parent, move.new_name)
    else:
        _rename_file(ctx, caller, move, parent, node, new_parent)


def _check_local(move: _Move) -> None:
    node = move.found.node
    if node.kind is NodeKind.FILE and node.file is None:
        raise cross(move.name, "its bytes are only in the store")
    if move.found.what is What.POINTER:
        raise cross(move.name, "a pointer of the log stays where it is")


def _rename_inner(
    ctx: Context,
    caller: Caller,
    parent: NodeRow,
    name: str,
    node: NodeRow,
    new_parent: NodeRow,
    new_name: str,
) -> None:
    """Inside one attempt: a change of names, whatever is open."""
    old = names.path_in_attempt(ctx, node.ino)
    new = join_key(names.path_in_attempt(ctx, new_parent.ino), new_name)
    if node.kind is NodeKind.SYMLINK:
        names.check_symlink(new, node.target)
    elif node.kind is NodeKind.DIR:
        names.check_symlinks_below(ctx, node, new)
    with ctx.change():
        # The kernel keeps others out only where they come by the same way.
        check_is(ctx, parent, name, node)
        target = ctx.spool.child(new_parent.ino, new_name)
        if target is not None:
            check_in_the_way(ctx, node, target, new_name)
            remove_name(ctx, new_parent, new_name, target)
        ctx.spool.unlink(parent.ino, name)
        ctx.spool.link(new_parent.ino, new_name, node.ino)
        if node.kind is NodeKind.DIR and node.attempt is not None:
            directories.queue_name_op(ctx, node.attempt, NameOpKind.RENAME, old, to=new)
        ctx.spool.update_node(node.ino, ctime_ns=ctx.clock.now_ns())
        times.names_changed(ctx, parent, new_parent)
        revisions.touch(ctx, ctx.who(caller), node)
        if node.kind is NodeKind.FILE:
            judge_by_new_name(ctx, node, name, new_name)
            events.after_rename(ctx, node, old)


def _rename_file(
    ctx: Context,
    caller: Caller,
    move: _Move,
    parent: NodeRow,
    node: NodeRow,
    new_parent: NodeRow,
) -> None:
    """A file or symlink, at least one end of it outside of an attempt."""
    if move.found.what is What.POINTER:
        raise cross(move.name, "a pointer of the log stays where it is")
    with ctx.change():
        if parent.attempt is not None or new_parent.attempt is not None:
            take_bytes_along(ctx, node)
        if parent.attempt is not None:
            check_is(ctx, parent, move.name, node)
            ctx.spool.unlink(parent.ino, move.name)
            revisions.touch(ctx, ctx.who(caller), parent)
        else:
            _leave_plain(ctx, caller, move, node)
        if new_parent.attempt is not None:
            _enter_attempt(ctx, caller, move, node, new_parent)
        else:
            _enter_plain(ctx, caller, move, node, new_parent)
        times.names_changed(ctx, parent, new_parent)


def _leave_plain(ctx: Context, caller: Caller, move: _Move, node: NodeRow) -> None:
    """Take a node's plain name without letting go of the node."""
    row = move.found.pending
    if row is not None:
        ctx.spool.drop_pending(row.id)
        pending.drop_own(ctx, ctx.who(caller), move.parent, move.name)
    if ctx.spool.child(move.parent.ino, move.name) is None:
        return
    path = names.plain_path(move.parent, move.name)
    child = ctx.spool.child(move.parent.ino, move.name)
    if child is not None and child.ino == node.ino:
        ctx.spool.unlink(move.parent.ino, move.name)
    elif child is not None:
        pending.remove_plain(ctx, ctx.who(caller), move.parent, move.name, is_dir=False)
        return
    if not _is_moved_in_store(move, node):
        plain.queue(ctx, PlainOpKind.REMOVE, path)


def _is_moved_in_store(move: _Move, node: NodeRow) -> bool:
    """Whether the store itself is to rename the file: its bytes are only there."""
    return (
        node.kind is NodeKind.FILE
        and node.file is None
        and move.parent.attempt is None
        and move.new_parent.attempt is None
    )


def _enter_attempt(
    ctx: Context, caller: Caller, move: _Move, node: NodeRow, new_parent: NodeRow
) -> None:
    if node.kind is NodeKind.SYMLINK:
        path = join_key(names.path_in_attempt(ctx, new_parent.ino), move.new_name)
        names.check_symlink(path, node.target)
    target = ctx.spool.child(new_parent.ino, move.new_name)
    if target is not None:
        remove_name(ctx, new_parent, move.new_name, target)
    ctx.spool.update_node(
        node.ino, attempt=new_parent.attempt, plain_path=None, ctime_ns=ctx.clock.now_ns()
    )
    ctx.spool.link(new_parent.ino, move.new_name, node.ino)
    revisions.touch(ctx, ctx.who(caller), new_parent)
    if node.kind is NodeKind.FILE:
        events.after_rename(ctx, ctx.node(node.ino), "")


def _enter_plain(
    ctx: Context, caller: Caller, move: _Move, node: NodeRow, new_parent: NodeRow
) -> None:
    """A file or symlink gets a plain name: that of a pointer, a whole file, or a live one."""
    who = ctx.who(caller)
    path = names.plain_path(new_parent, move.new_name)
    ctx.spool.update_node(
        node.ino, attempt=None, plain_path=path, base=None, ctime_ns=ctx.clock.now_ns()
    )
    node = ctx.node(node.ino)
    if node.kind is NodeKind.SYMLINK:
        place_symlink(ctx, caller, new_parent, move.new_name, node)
        return
    if _is_moved_in_store(move, node):
        _replace_plain(ctx, caller, move, node, new_parent)
        ctx.spool.add_plain_op(
            PlainOpRow(
                id=0,
                op=PlainOpKind.RENAME,
                path=names.plain_path(move.parent, move.name),
                to=path,
            )
        )
        ctx.wake()
        return
    kind = None
    if names.is_pointer(ctx, new_parent, move.new_name):
        kind = PendingKind.POINTER
    elif names.is_whole(ctx, new_parent, move.new_name):
        kind = PendingKind.WHOLE
    if kind is None:
        _replace_plain(ctx, caller, move, node, new_parent)
        plain.queue_put(ctx, node)
        return
    row = pending.put(ctx, who, new_parent, move.new_name, node.ino, kind)
    file = None if node.file is None else ctx.spool.file(node.file)
    if kind is PendingKind.WHOLE and file is not None:
        judge_anew(ctx, file)
    is_closed = file is not None and file.state is not FileState.OPEN
    if kind is PendingKind.POINTER and is_closed:
        pending.decide(ctx, who, new_parent, row, node)
    ctx.invalidate(new_parent.ino, move.new_name)


def _replace_plain(
    ctx: Context, caller: Caller, move: _Move, node: NodeRow, new_parent: NodeRow
) -> None:
    pending.drop_own(ctx, ctx.who(caller), new_parent, move.new_name)
    target = ctx.spool.child(new_parent.ino, move.new_name)
    if target is not None:
        remove_name(ctx, new_parent, move.new_name, target)
    ctx.spool.link(new_parent.ino, move.new_name, node.ino)


def _rename_plain_directory(ctx: Context, caller: Caller, move: _Move) -> None:
    node = move.found.node
    check_below(ctx, node, move.new_parent)
    if names.is_checkpoint(ctx, move.new_parent, move.new_name):
        raise cross(move.new_name, "a plain directory does not become a checkpoint")
    _check_no_run(ctx, caller, node)
    old = names.plain_path(move.parent, move.name)
    new = names.plain_path(move.new_parent, move.new_name)
    with ctx.change():
        if move.target is not None:
            who = ctx.who(caller)
            pending.remove_plain(ctx, who, move.new_parent, move.new_name, is_dir=True)
        ctx.spool.unlink(move.parent.ino, move.name)
        ctx.spool.link(move.new_parent.ino, move.new_name, node.ino)
        ctx.spool.update_node(node.ino, ctime_ns=ctx.clock.now_ns())
        times.names_changed(ctx, move.parent, move.new_parent)
        plain.set_paths(ctx, node, new)
        plain.queue(ctx, PlainOpKind.RENAME, old, to=new)


def _check_no_run(ctx: Context, caller: Caller, node: NodeRow) -> None:
    """A directory that holds checkpoints, or holds one that does, keeps its path."""
    path = node.plain_path or ""
    is_run = bool(ctx.spool.attempts(run_ino=node.ino))
    if not is_run:
        ctx.need_block(caller)
        entry = stored.stat(ctx, path)
        is_run = entry is not None and entry.has_runs
    if is_run:
        msg = f"{path!r} holds checkpoints: a run directory cannot be renamed"
        raise BusyError(msg, subject=path)
    for _, child in ctx.spool.children(node.ino):
        if child.kind is NodeKind.DIR and child.plain_path is not None:
            _check_no_run(ctx, caller, child)
