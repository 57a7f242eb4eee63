"""Closing: when a file is quiet, when its close was torn, and what its close means.

Owns the rule: a file is quiet when every process that opened it for writing has closed it (FLUSH by
that process) or all its handles are released; torn if such a process died with it open. Any thread.
"""

from __future__ import annotations

import logging
import os
from functools import partial

from ckptgate.model.states import FileState
from ckptgate.ports.spool import FileRow, HandleRow, NodeRow, PendingKind
from ckptgate.vfs import events, pending, plain, revisions
from ckptgate.vfs.attributes import is_decided, local_stat
from ckptgate.vfs.context import Context, Who
from ckptgate.vfs.interface import Caller
from ckptgate.vfs.liveness import mark_torn
from ckptgate.vfs.unused import drop_if_unused

__all__ = ["flush", "quiet_file", "release"]

_log = logging.getLogger(__name__)


def flush(ctx: Context, caller: Caller, fh: int) -> bool:
    """A process closed a descriptor of this handle.

    Returns:
        Whether it could write and closed it in order: only that close promises anything.
    """
    row = _row(ctx, fh)
    if row is None or (row.is_closed and not row.pid):
        return False
    process, is_dying = ctx.identify.closer(caller.pid)
    if row.pid and process.pid and process.pid != row.pid:
        # A forked child's close says nothing of the parent's.
        return False
    is_torn = bool(caller.pid) and is_dying
    with ctx.change():
        ctx.spool.update_handle(fh, is_closed=True)
        ctx.afterwards(partial(ctx.memory.files.closed, fh))
        _closed(ctx, ctx.who_of(process), row, is_torn=is_torn)
    return not is_torn


def _row(ctx: Context, fh: int) -> HandleRow | None:
    """The handle; one that this process doesn't know may be of a predecessor."""
    handle = ctx.memory.files.get(fh)
    return ctx.spool.handle(fh) if handle is None else handle.row


def release(ctx: Context, fh: int) -> None:
    """The last descriptor is gone."""
    row = _row(ctx, fh)
    handle = ctx.memory.files.pop(fh)
    if handle is not None and handle.fd >= 0:
        os.close(handle.fd)
    if row is None:
        return
    with ctx.change():
        ctx.spool.drop_handle(fh)
        if not row.is_closed:
            # No FLUSH of its opener was seen: it died while nobody looked, or gave it away.
            is_torn = bool(row.pid) and not ctx.identify.is_alive(row.pid, row.start)
            _closed(ctx, None, row, is_torn=is_torn)
    if not ctx.memory.files.count(row.ino):
        node = ctx.spool.node(row.ino)
        drop_if_unused(ctx, row.ino)
        if node is None or node.file != row.file:
            _drop_orphan(ctx, row.file)


def _drop_orphan(ctx: Context, file: int) -> None:
    """Bytes that were replaced while a handle had them."""
    if ctx.spool.file(file) is not None and not ctx.spool.nodes_of_file(file):
        with ctx.change():
            if not ctx.spool.handles(file=file):
                ctx.spool.drop_file(file)


def _closed(ctx: Context, who: Who | None, handle: HandleRow, *, is_torn: bool) -> None:
    """The handle's opener is done with it; inside a change."""
    file = ctx.spool.file(handle.file)
    node = ctx.spool.node(handle.ino)
    if file is None or node is None or node.file != handle.file or is_decided(ctx, node):
        return
    if is_torn:
        _log.warning("torn-close ino=%d pid=%d", handle.ino, handle.pid)
        file = mark_torn(ctx, file)
    if not quiet_file(ctx, file, node, but=handle.fh):
        return
    if who is not None:
        revisions.touch(ctx, who, node)
    _after_close(ctx, who, ctx.node(node.ino), is_torn=is_torn or file.evidence.is_torn)
    ctx.wake()


def quiet_file(ctx: Context, file: FileRow, node: NodeRow, *, but: int = 0) -> bool:
    """Make the file quiet if no process has it open for writing; inside a change.

    Args:
        ctx: the vfs.
        file: the bytes.
        node: whose they are.
        but: a handle that doesn't count: it is being closed.

    Returns:
        Whether it is quiet now.
    """
    if ctx.memory.files.is_written(file.file, but=but):
        return False
    found = local_stat(ctx, file)
    if found is None:
        return True
    is_same = (file.size, file.mtime_ns) == (found.st_size, found.st_mtime_ns)
    if file.state in {FileState.DIGESTED, FileState.STORED} and is_same:
        return True
    ctx.spool.update_file(file.file, state=FileState.QUIET)
    ctx.spool.update_node(
        node.ino, size=found.st_size, mtime_ns=found.st_mtime_ns, ctime_ns=found.st_ctime_ns
    )
    return True


def _after_close(ctx: Context, who: Who | None, node: NodeRow, *, is_torn: bool) -> None:
    if node.attempt is not None:
        if not is_torn:
            events.after_close(ctx, node)
        return
    row = pending.pending_of(ctx, node.ino)
    if row is None:
        plain.queue_put(ctx, node)
        return
    parent = ctx.spool.node(row.parent)
    is_pointer = row.kind is PendingKind.POINTER and not is_torn
    if is_pointer and who is not None and parent is not None:
        pending.decide(ctx, who, parent, row, node)
