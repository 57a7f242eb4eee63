"""Closing: when a file is quiet, when its close was torn, and what its close means.

Owns the rule: a file is quiet when every process that opened it for writing has closed it (FLUSH by
that process) or all its handles are released; torn if such a process died with it open. Any thread.
"""

from __future__ import annotations

import logging
import os

from ckptgate.model.states import FileState
from ckptgate.ports.spool import FileRow, HandleRow, NodeRow, PendingKind
from ckptgate.vfs import events, pending, plain, revisions
from ckptgate.vfs.attributes import is_decided, local_stat
from ckptgate.vfs.context import Context, OpenFile
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
    row = ctx.spool.handle(fh)
    if row is None or (row.is_closed and not row.pid):
        return False
    process = ctx.identify.process(caller.pid)
    if row.pid and process.pid and process.pid != row.pid:
        # A forked child's close says nothing of the parent's.
        return False
    is_torn = bool(caller.pid) and ctx.identify.is_exiting(caller.pid)
    with ctx.change():
        ctx.spool.update_handle(fh, is_closed=True)
        _closed(ctx, caller, row, is_torn=is_torn)
    return not is_torn


def release(ctx: Context, fh: int) -> None:
    """The last descriptor is gone."""
    with ctx.lock:
        handle = ctx.memory.files.pop(fh, None)
        if handle is not None:
            _uncount(ctx, handle)
    row = ctx.spool.handle(fh)
    if handle is not None and handle.fd >= 0:
        os.close(handle.fd)
    if row is not None:
        with ctx.change():
            ctx.spool.drop_handle(fh)
            if not row.is_closed:
                # No FLUSH of its opener was seen: it died while nobody looked, or gave it away.
                is_torn = bool(row.pid) and not ctx.identify.is_alive(row.pid, row.start)
                _closed(ctx, None, row, is_torn=is_torn)
    ino = row.ino if row is not None else handle.ino if handle is not None else 0
    if ino and not ctx.memory.opens.get(ino):
        node = ctx.spool.node(ino)
        drop_if_unused(ctx, ino)
        if row is not None and (node is None or node.file != row.file):
            _drop_orphan(ctx, row.file)


def _uncount(ctx: Context, handle: OpenFile) -> None:
    left = ctx.memory.opens.get(handle.ino, 0) - 1
    if left > 0:
        ctx.memory.opens[handle.ino] = left
    else:
        ctx.memory.opens.pop(handle.ino, None)


def _drop_orphan(ctx: Context, file: int) -> None:
    """Bytes that were replaced while a handle had them."""
    if ctx.spool.file(file) is not None and not ctx.spool.nodes_of_file(file):
        with ctx.change():
            if not ctx.spool.handles(file=file):
                ctx.spool.drop_file(file)


def _closed(ctx: Context, caller: Caller | None, handle: HandleRow, *, is_torn: bool) -> None:
    """The handle's opener is done with it; inside a change."""
    file = ctx.spool.file(handle.file)
    node = ctx.spool.node(handle.ino)
    if file is None or node is None or node.file != handle.file or is_decided(ctx, node):
        return
    if is_torn:
        _log.warning("torn-close ino=%d pid=%d", handle.ino, handle.pid)
        file = mark_torn(ctx, file)
    if not quiet_file(ctx, file, node):
        return
    if caller is not None:
        revisions.touch(ctx, ctx.who(caller), node)
    _after_close(ctx, caller, ctx.node(node.ino), is_torn=is_torn or file.evidence.is_torn)
    ctx.wake()


def quiet_file(ctx: Context, file: FileRow, node: NodeRow) -> bool:
    """Make the file quiet if no process has it open for writing; inside a change.

    Returns:
        Whether it is quiet now.
    """
    if any(not handle.is_closed for handle in ctx.spool.handles(file=file.file)):
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


def _after_close(ctx: Context, caller: Caller | None, node: NodeRow, *, is_torn: bool) -> None:
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
    if is_pointer and caller is not None and parent is not None:
        pending.decide(ctx, ctx.who(caller), parent, row, node)
