"""Pointers as readers see them: the incarnation's pending value, else the log's.

Owns the rule that a pointer's new value gets a new node, and that a node stands for the log's value
as long as that doesn't change: a child of the run directory without a store path. Any thread.
"""

from __future__ import annotations

import os

from ckptgate.model.documents import PointerKind, PointerValue
from ckptgate.model.states import AttemptState, FileState
from ckptgate.ports.catalog import RunView
from ckptgate.ports.spool import SETTLED_META, NodeKind, NodeRow, PendingKind, PendingRow
from ckptgate.vfs.bytes import make_file
from ckptgate.vfs.context import Context, Who
from ckptgate.vfs.interface import Caller
from ckptgate.vfs.unused import drop_if_unused

__all__ = [
    "TEXT_BYTES_MAX",
    "caught_up",
    "drop_pointer_node",
    "is_settled",
    "own_pending",
    "pointer_node",
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


def is_settled(ctx: Context, parent: NodeRow, row: PendingRow, view: RunView) -> bool:
    """Whether the log now says the pending value; then its node stands for the log's."""
    if row.kind is not PendingKind.POINTER or row.ino is None or not row.target:
        return False
    value = view.pointers.get(row.name)
    if value is None or value.target != row.target or not _says(ctx, row.ino, value):
        return False
    with ctx.taking_over():
        # Its job may have written or removed it meanwhile, the publisher may have settled it.
        if row not in ctx.spool.pending(parent=parent.ino, name=row.name):
            return False
        if not _says(ctx, row.ino, value):
            return False
        old = ctx.spool.child(parent.ino, row.name)
        if old is not None:
            ctx.spool.unlink(parent.ino, row.name)
        ctx.spool.drop_pending(row.id)
        ctx.spool.set_meta(SETTLED_META.format(run_ino=parent.ino), str(view.length))
        ctx.spool.link(parent.ino, row.name, row.ino)
        if old is not None:
            drop_if_unused(ctx, old.ino, is_forgotten=False)
        node = ctx.node(row.ino)
        ctx.spool.update_node(node.ino, plain_path=None, **_shown(node, value))
    return True


def _says(ctx: Context, ino: int, value: PointerValue) -> bool:
    """Whether the node holds that value, and nobody has it open."""
    node = ctx.spool.node(ino)
    if node is None or ctx.memory.files.count(ino):
        return False
    return _content(ctx, node) == value.content


def _content(ctx: Context, node: NodeRow) -> str | None:
    return node.target if node.kind is NodeKind.SYMLINK else read_text(ctx, node)


def _shown(node: NodeRow, value: PointerValue) -> dict[str, object]:
    """Fields of a node that stands for a log's value."""
    if node.kind is NodeKind.SYMLINK:
        return {}
    return {"target": value.content, "size": len(value.content.encode())}


def caught_up(ctx: Context, caller: Caller, parent: NodeRow, view: RunView) -> RunView:
    """The view, read again if this spool knows of decisions that it does not show yet.

    Whoever was told of a COMMIT is to find the pointers that it moved; and a pending value that was
    settled must not be followed by the value before it. So pending values are looked at first.
    """
    if not _is_behind(ctx, parent, view):
        return view
    ctx.need_block(caller)
    return ctx.catalog.view(view.run, 0.0)


def _is_behind(ctx: Context, parent: NodeRow, view: RunView) -> bool:
    settled = ctx.spool.get_meta(SETTLED_META.format(run_ino=parent.ino))
    return (
        (settled is not None and int(settled) > view.length)
        or ctx.spool.newest_commit(parent.ino) >= view.length
        or any(_is_committed(ctx, view.run, attempt) for attempt in view.undecided)
    )


def _is_committed(ctx: Context, run: str, attempt: str) -> bool:
    row = ctx.spool.attempt_by_id(run, attempt)
    return row is not None and row.state is AttemptState.COMMITTED


def pointer_node(ctx: Context, parent: NodeRow, value: PointerValue) -> NodeRow:
    """The node that stands for the log's value: the known one, or a new one if that changed."""
    is_link = value.kind is PointerKind.SYMLINK
    kind = NodeKind.SYMLINK if is_link else NodeKind.FILE
    child = ctx.spool.child(parent.ino, value.pointer)
    if _stands_for(child, kind, value.content):
        assert child is not None
        return child
    with ctx.taking_over():
        child = ctx.spool.child(parent.ino, value.pointer)
        if _stands_for(child, kind, value.content):
            assert child is not None
            return child
        if child is not None:
            ctx.spool.unlink(parent.ino, value.pointer)
            drop_if_unused(ctx, child.ino, is_forgotten=False)
        now = ctx.clock.now_ns()
        file = None if is_link else _write(ctx, value.content)
        node = ctx.spool.add_node(
            NodeRow(
                ino=0,
                kind=kind,
                attempt=None,
                mode=0o777 if is_link else 0o644,
                uid=parent.uid,
                gid=parent.gid,
                size=len(value.content.encode()),
                mtime_ns=now,
                ctime_ns=now,
                target=value.content,
                file=file,
            )
        )
        ctx.spool.link(parent.ino, value.pointer, node.ino)
    ctx.invalidate(parent.ino, value.pointer)
    return node


def _stands_for(child: NodeRow | None, kind: NodeKind, content: str) -> bool:
    return (
        child is not None
        and child.plain_path is None
        and child.kind is kind
        and child.target == content
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


def drop_pointer_node(ctx: Context, parent: NodeRow, name: str) -> None:
    """The log no longer has that pointer: its node loses the name."""
    with ctx.change():
        child = ctx.spool.child(parent.ino, name)
        if child is not None and child.plain_path is None:
            ctx.spool.unlink(parent.ino, name)
            drop_if_unused(ctx, child.ino, is_forgotten=False)
