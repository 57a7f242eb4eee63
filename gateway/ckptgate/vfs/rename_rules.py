"""What a rename refuses. Any thread; the checks of names hold only inside a change."""

from __future__ import annotations

import errno

from ckptgate.errors import CkptError, MissingError
from ckptgate.ports.spool import NodeKind, NodeRow
from ckptgate.vfs.context import Context
from ckptgate.vfs.directories import not_empty

__all__ = ["check_below", "check_in_the_way", "check_is", "child_of", "cross"]


def cross(name: str, why: str) -> CkptError:
    """The error where tools are to copy."""
    return CkptError(f"{name!r}: {why}", subject=name, errno_value=errno.EXDEV)


def check_in_the_way(ctx: Context, node: NodeRow, target: NodeRow, new_name: str) -> None:
    """The errors of rename(2) for *target*, which is in the way of *node*."""
    is_dir = node.kind is NodeKind.DIR
    is_target_dir = target.kind is NodeKind.DIR
    if is_dir and not is_target_dir:
        msg = f"{new_name!r} is not a directory"
        raise CkptError(msg, subject=new_name, errno_value=errno.ENOTDIR)
    if is_target_dir and not is_dir:
        msg = f"{new_name!r} is a directory"
        raise CkptError(msg, subject=new_name, errno_value=errno.EISDIR)
    if is_target_dir and ctx.spool.count_children(target.ino)[0]:
        raise not_empty(new_name)


def child_of(ctx: Context, parent: NodeRow, name: str) -> NodeRow:
    """What the name means; ENOENT if nothing."""
    child = ctx.spool.child(parent.ino, name)
    if child is None:
        msg = f"nothing is named {name!r} here"
        raise MissingError(msg, subject=name)
    return child


def check_below(ctx: Context, node: NodeRow, new_parent: NodeRow) -> None:
    """A directory can't be moved into itself."""
    if node.kind is not NodeKind.DIR:
        return
    ino = new_parent.ino
    while True:
        if ino == node.ino:
            msg = "a directory cannot be moved into itself"
            raise CkptError(msg, errno_value=errno.EINVAL)
        place = ctx.spool.place(ino)
        if place is None:
            return
        ino = place[0]


def check_is(ctx: Context, parent: NodeRow, name: str, node: NodeRow) -> None:
    """ENOENT if the name means something else than *node*."""
    if child_of(ctx, parent, name).ino != node.ino:
        msg = f"{name!r} is something else by now"
        raise MissingError(msg, subject=name)
