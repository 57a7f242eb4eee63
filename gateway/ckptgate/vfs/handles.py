"""Closing: when a file is quiet, when its close was torn, and what its close means.

Owns the rule: a file is quiet when every process that opened it for writing has closed it (FLUSH by
that process) or all its handles are released; torn if such a process died with it open. Any thread.
"""

from __future__ import annotations

import logging
import os
from functools import partial

import msgspec

from ckptgate.model.states import AttemptState, FileState
from ckptgate.ports.spool import FileRow, HandleRow, LocalBytes, NodeRow, PendingKind
from ckptgate.vfs import events, pending, plain, revisions, times
from ckptgate.vfs.attributes import is_decided, local_stat
from ckptgate.vfs.closing import NotedClose
from ckptgate.vfs.context import Context
from ckptgate.vfs.interface import Caller
from ckptgate.vfs.liveness import mark_torn
from ckptgate.vfs.lookup import remove_name
from ckptgate.vfs.unused import drop_if_unused
from ckptgate.vfs.who import Who

__all__ = ["flush", "give_up", "quiet_file", "recover", "release", "take_over"]

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
    who = ctx.who_of(process)
    if not is_torn and _is_held(ctx, row):
        return False
    if row.pid and not is_torn and _is_plain_close(ctx, row):
        item = NotedClose(row=row, is_closed=True, is_released=False, who=who)
        if ctx.closes.note(item):
            ctx.memory.files.closed(fh)
            return True
    with ctx.change():
        ctx.spool.update_handle(fh, is_closed=True)
        ctx.afterwards(partial(ctx.memory.files.closed, fh))
        _closed(ctx, who, row, is_torn=is_torn)
    return not is_torn


def _is_held(ctx: Context, row: HandleRow) -> bool:
    """Whether its opener goes on with a duplicate of the descriptor, as `> FILE` does.

    That one is made and the first one closed before the first byte: so only an empty file is asked
    about. A file with content may have a duplicate too, of a mapping that is never written again.
    """
    if not row.pid:
        return False
    handle = ctx.memory.files.get(row.fh)
    try:
        if handle is None:
            is_empty = os.stat(ctx.spool.data_path(row.file)).st_size == 0
        else:
            is_empty = os.fstat(handle.fd).st_size == 0
    except OSError:
        # Its bytes or its descriptor went meanwhile: then nobody goes on with it.
        return False
    return is_empty and ctx.identify.holds(row.pid, row.ino)


def _is_plain_close(ctx: Context, row: HandleRow) -> bool:
    """Whether this close only says that the bytes of a file of an open attempt are there."""
    node = ctx.spool.node(row.ino)
    if node is None or node.attempt is None or node.file != row.file:
        return False
    attempt = ctx.spool.attempt(node.attempt)
    if attempt is None or attempt.state is not AttemptState.OPEN or attempt.is_voted:
        return False
    return not events.is_event(ctx, node)


def take_over(ctx: Context, item: NotedClose) -> None:
    """Change the spool as a noted close says; inside a change."""
    row = item.row
    if item.is_closed and item.is_released and _is_closed_at_once(ctx, item):
        return
    if item.is_closed:
        _closed(ctx, item.who, row, is_torn=False, is_plain=True)
    if item.is_released:
        ctx.spool.drop_handle(row.fh)
    elif item.is_closed:
        ctx.spool.update_handle(row.fh, is_closed=True)


def _is_closed_at_once(ctx: Context, item: NotedClose) -> bool:
    """Take over close and release of a new file that nobody else has open, as almost all are."""
    row = item.row
    file, node = ctx.spool.file(row.file), ctx.spool.node(row.ino)
    if file is None or node is None or node.file != row.file or file.state is not FileState.OPEN:
        return False
    if is_decided(ctx, node) or ctx.memory.files.is_written(file.file, but=row.fh):
        return False
    is_known = item.found is not None and file.local is LocalBytes.FULL
    found = item.found if is_known else local_stat(ctx, file)
    if found is None:
        return False
    now = msgspec.structs.replace(
        node, size=found.st_size, mtime_ns=found.st_mtime_ns, ctime_ns=found.st_ctime_ns
    )
    ctx.spool.close_file(row.fh, file, now)
    if item.who is not None:
        revisions.touch(ctx, item.who, node)
    ctx.wake()
    return True


def recover(ctx: Context) -> None:
    """Take over what a predecessor of this process had noted."""
    for fh, is_released in ctx.spool.noted_closes():
        row = ctx.spool.handle(fh)
        if row is not None:
            with ctx.change():
                is_closed = not row.is_closed
                take_over(ctx, NotedClose(row=row, is_closed=is_closed, is_released=is_released))
        ctx.spool.forget_close(fh)


def _row(ctx: Context, fh: int) -> HandleRow | None:
    """The handle; one that this process doesn't know may be of a predecessor."""
    handle = ctx.memory.files.get(fh)
    return ctx.spool.handle(fh) if handle is None else handle.row


def release(ctx: Context, fh: int) -> None:
    """The last descriptor is gone."""
    row = _row(ctx, fh)
    handle = ctx.memory.files.pop(fh)
    found = None
    if handle is not None and handle.fd >= 0:
        if handle.is_writer and handle.is_complete:
            found = os.fstat(handle.fd)
        os.close(handle.fd)
    if row is None or _is_release_noted(ctx, row, found):
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


def give_up(ctx: Context, fh: int, *, is_removed: bool) -> int | None:
    """Nobody closes this handle in order: see `interface.ClientFileSystem`.

    Returns:
        The attempt that lost a file by that, if any.
    """
    row = _row(ctx, fh)
    if row is None or row.is_closed:
        return None
    with ctx.change():
        ctx.spool.update_handle(fh, is_closed=True)
        ctx.afterwards(partial(ctx.memory.files.closed, fh))
        node = ctx.spool.node(row.ino)
        held = None if node is None else pending.pending_of(ctx, row.ino)
        if held is not None:
            pending.drop(ctx, held)
            ctx.invalidate(held.parent, held.name)
        elif is_removed and node is not None and not is_decided(ctx, node):
            _take_name(ctx, node)
            return node.attempt
        else:
            _closed(ctx, None, row, is_torn=True)
    return None


def _take_name(ctx: Context, node: NodeRow) -> None:
    """Have a file that was just made lose its name again; inside a change."""
    place = ctx.spool.place(node.ino)
    if place is None:
        return
    parent = ctx.node(place[0])
    remove_name(ctx, parent, place[1], node)
    times.names_changed(ctx, parent)
    ctx.invalidate(parent.ino, place[1])
    ctx.wake()


def _is_release_noted(ctx: Context, row: HandleRow, found: os.stat_result | None) -> bool:
    """Note the release of a closed handle if nothing else follows from it."""
    node = ctx.spool.node(row.ino)
    if not row.is_closed or node is None or node.file != row.file:
        return False
    if ctx.spool.place(row.ino) is None:
        return False
    return ctx.closes.note(NotedClose(row=row, is_closed=False, is_released=True, found=found))


def _drop_orphan(ctx: Context, file: int) -> None:
    """Bytes that were replaced while a handle had them."""
    if ctx.spool.file(file) is not None and not ctx.spool.nodes_of_file(file):
        with ctx.change():
            if not ctx.spool.handles(file=file):
                ctx.spool.drop_file(file)


def _closed(
    ctx: Context, who: Who | None, handle: HandleRow, *, is_torn: bool, is_plain: bool = False
) -> None:
    """The handle's opener is done with it; inside a change. *is_plain*: see `_is_plain_close`."""
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
    if is_plain:
        ctx.wake()
        return
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
    if row.kind is PendingKind.WHOLE and not is_torn:
        pending.drop_others(ctx, row)
    parent = ctx.spool.node(row.parent)
    is_pointer = row.kind is PendingKind.POINTER and not is_torn
    if is_pointer and who is not None and parent is not None:
        pending.decide(ctx, who, parent, row, node)
