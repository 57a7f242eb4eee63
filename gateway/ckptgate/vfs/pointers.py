"""Pointers as readers see them: the incarnation's pending value, else the log's.

Owns the rule that a pointer's new value gets a new node, and that a node stands for the log's value
as long as that doesn't change: a child of the run directory without a store path. Any thread.
"""

from __future__ import annotations

import os

from ckptgate.model.documents import PointerKind, PointerValue
from ckptgate.model.states import AttemptState, FileState
from ckptgate.ports.catalog import RunView
from ckptgate.ports.spool import SETTLED_META, NodeKind, NodeRow, PendingRow
from ckptgate.vfs.bytes import make_file
from ckptgate.vfs.context import Context, Who
from ckptgate.vfs.interface import Caller
from ckptgate.vfs.unused import drop_if_unused

__all__ = [
    "TEXT_BYTES_MAX",
    "caught_up",
    "logged",
    "own_pending",
    "read_text",
]

TEXT_BYTES_MAX = 4096
"""A larger text is no pointer; bytes."""


def own_pending(ctx: Context, who: Who, parent: NodeRow, name: str) -> PendingRow | None:
    """The newest pending value of that name which the caller's incarnation sees."""
    found = None
    for row in ctx.spool.pending(parent=parent.ino, name=name):
        if row.job_key == who.key:
            found = row
    return found


def read_text(ctx: Context, node: NodeRow) -> str | None:
    """The text of a small file, None if it is none."""
    if node.file is None:
        return None
    try:
        fd = os.open(ctx.spool.data_path(node.file), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        data = os.pread(fd, TEXT_BYTES_MAX, 0)
    finally:
        os.close(fd)
    if len(data) >= TEXT_BYTES_MAX or b"\0" in data:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def caught_up(
    ctx: Context, caller: Caller, parent: NodeRow, view: RunView, name: str = ""
) -> RunView:
    """The view, read again if this spool knows of decisions that it does not show yet.

    Whoever was told of a COMMIT is to find the pointers that it moved; and a pending value of
    *name* that was settled must not be followed by the value before it. So pending values are
    looked at first. With the store away the view may stay behind.
    """
    if not _is_behind(ctx, parent, view) and not _is_older(ctx, parent, name, view):
        return view
    ctx.need_block(caller)
    return ctx.catalog.view(view.run, 0.0)


def _is_behind(ctx: Context, parent: NodeRow, view: RunView) -> bool:
    return ctx.spool.newest_commit(parent.ino) >= view.length or any(
        _is_committed(ctx, view.run, attempt) for attempt in view.undecided
    )


def _is_older(ctx: Context, parent: NodeRow, name: str, view: RunView) -> bool:
    """Whether the name got a value by a decision that the view doesn't show yet."""
    settled = ctx.spool.get_meta(SETTLED_META.format(run_ino=parent.ino, name=name))
    return settled is not None and int(settled) > view.length


def _is_committed(ctx: Context, run: str, attempt: str) -> bool:
    row = ctx.spool.attempt_by_id(run, attempt)
    return row is not None and row.state is AttemptState.COMMITTED


def logged(ctx: Context, parent: NodeRow, name: str, view: RunView) -> NodeRow | None:
    """The node that stands for the log's value of that name, None if the log has none.

    It is the known one as long as the value is the same, or what was settled since the view.
    """
    value = view.pointers.get(name)
    child = ctx.spool.child(parent.ino, name)
    if _is_right(ctx, parent, name, view, child):
        return child
    if value is None and (child is None or child.plain_path is not None):
        return None
    with ctx.taking_over():
        child = ctx.spool.child(parent.ino, name)
        if _is_right(ctx, parent, name, view, child):
            return child
        if child is not None and (value is not None or child.plain_path is None):
            ctx.spool.unlink(parent.ino, name)
            drop_if_unused(ctx, child.ino, is_forgotten=False)
        if value is None:
            return None
        node = _new_node(ctx, parent, value)
        ctx.spool.link(parent.ino, name, node.ino)
    ctx.invalidate(parent.ino, name)
    return node


def _is_right(
    ctx: Context, parent: NodeRow, name: str, view: RunView, child: NodeRow | None
) -> bool:
    """Whether this child is what the log says, as far as it is known here."""
    if child is None or child.plain_path is not None:
        return False
    if _is_older(ctx, parent, name, view):
        return True
    value = view.pointers.get(name)
    if value is None:
        return False
    return child.kind is _kind(value) and child.target == value.content


def _kind(value: PointerValue) -> NodeKind:
    return NodeKind.SYMLINK if value.kind is PointerKind.SYMLINK else NodeKind.FILE


def _new_node(ctx: Context, parent: NodeRow, value: PointerValue) -> NodeRow:
    """A node for the log's value; inside a change."""
    now = ctx.clock.now_ns()
    is_link = value.kind is PointerKind.SYMLINK
    return ctx.spool.add_node(
        NodeRow(
            ino=0,
            kind=_kind(value),
            attempt=None,
            mode=0o777 if is_link else 0o644,
            uid=parent.uid,
            gid=parent.gid,
            size=len(value.content.encode()),
            mtime_ns=now,
            ctime_ns=now,
            target=value.content,
            file=None if is_link else _write(ctx, value.content),
        )
    )


def _write(ctx: Context, content: str) -> int:
    """A file with that text, which never changes."""
    file = ctx.spool.add_file(state=FileState.STORED).file
    fd = make_file(ctx.spool.data_path(file))
    try:
        os.write(fd, content.encode())
    finally:
        os.close(fd)
    return file
