"""RENAME_EXCHANGE: two names swap their nodes, inside one attempt or outside of all. Any thread."""

from __future__ import annotations

import errno

from ckptgate.errors import CkptError
from ckptgate.model.jobkey import JobKey
from ckptgate.ports.spool import NodeKind, NodeRow, PlainOpKind
from ckptgate.vfs import events, names, plain, revisions, times
from ckptgate.vfs.context import Context
from ckptgate.vfs.interface import Caller
from ckptgate.vfs.visibility import Found, What

__all__ = ["exchange"]


def exchange(
    ctx: Context,
    caller: Caller,
    parent: NodeRow,
    name: str,
    found: Found,
    new_parent: NodeRow,
    new_name: str,
    target: Found,
) -> None:
    """Swap the two names.

    Raises:
        CkptError: EINVAL where that isn't one step.
    """
    if {found.what, target.what} == {What.INNER} and parent.attempt == new_parent.attempt:
        _exchange_inner(ctx, caller, (parent, name), (new_parent, new_name))
    elif {found.what, target.what} == {What.PLAIN}:
        _exchange_plain(ctx, (parent, name, found.node), (new_parent, new_name, target.node))
    else:
        raise _refused(name)


def _refused(name: str) -> CkptError:
    msg = f"{name!r} cannot be exchanged"
    return CkptError(msg, subject=name, errno_value=errno.EINVAL)


def _swap(
    ctx: Context, first: tuple[NodeRow, str, NodeRow], second: tuple[NodeRow, str, NodeRow]
) -> None:
    ctx.spool.unlink(first[0].ino, first[1])
    ctx.spool.unlink(second[0].ino, second[1])
    ctx.spool.link(first[0].ino, first[1], second[2].ino)
    ctx.spool.link(second[0].ino, second[1], first[2].ino)
    now = ctx.clock.now_ns()
    for _, _, node in (first, second):
        ctx.spool.update_node(node.ino, ctime_ns=now)
    times.names_changed(ctx, first[0], second[0])


def _exchange_inner(
    ctx: Context, caller: Caller, first: tuple[NodeRow, str], second: tuple[NodeRow, str]
) -> None:
    parents = [revisions.writable(ctx, caller, place[0]) for place in (first, second)]
    ends: list[tuple[NodeRow, str, NodeRow]] = []
    for parent, (_, name) in zip(parents, (first, second), strict=True):
        child = ctx.spool.child(parent.ino, name)
        if child is None:
            raise _refused(name)
        ends.append((parent, name, child))
    if any(end[2].kind is NodeKind.DIR for end in ends):
        row = None if parents[0].attempt is None else ctx.spool.attempt(parents[0].attempt)
        # Other members could not follow it in one step; a cycle must not arise either.
        if row is None or JobKey.parse(row.job_key).is_shared or parents[0].ino != parents[1].ino:
            raise _refused(first[1])
    old = [names.path_in_attempt(ctx, end[2].ino) for end in ends]
    for end, path in zip(ends, reversed(old), strict=True):
        if end[2].kind is NodeKind.SYMLINK:
            names.check_symlink(path, end[2].target)
        elif end[2].kind is NodeKind.DIR:
            names.check_symlinks_below(ctx, end[2], path)
    with ctx.change():
        _swap(ctx, ends[0], ends[1])
        revisions.touch(ctx, ctx.who(caller), parents[0])
        for end, path in zip(ends, old, strict=True):
            if end[2].kind is NodeKind.FILE:
                events.after_rename(ctx, end[2], path)


def _exchange_plain(
    ctx: Context, first: tuple[NodeRow, str, NodeRow], second: tuple[NodeRow, str, NodeRow]
) -> None:
    for parent, name, node in (first, second):
        is_movable = node.kind is NodeKind.SYMLINK or node.file is not None
        if not is_movable or names.is_special(ctx, parent, name):
            raise _refused(name)
    with ctx.change():
        _swap(ctx, first, second)
        for (parent, name, _), (_, _, node) in ((first, second), (second, first)):
            path = names.plain_path(parent, name)
            ctx.spool.update_node(node.ino, plain_path=path)
            if node.kind is NodeKind.SYMLINK:
                plain.queue(ctx, PlainOpKind.SYMLINK, path, to=node.target)
            else:
                plain.queue_put(ctx, ctx.node(node.ino))
