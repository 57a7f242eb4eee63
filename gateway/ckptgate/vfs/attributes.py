"""Attributes of nodes: which number comes from a row, which from the spool file.

Owns the rule: the size of a local file that is not committed is its spool file's, as the kernel may
write to that without asking; its modification time too, unless the row was given another one since
the file was digested. Any thread.
"""

from __future__ import annotations

import os

from ckptgate.model.states import AttemptState, FileState
from ckptgate.ports.spool import AttemptRow, FileRow, LocalBytes, NodeKind, NodeRow
from ckptgate.vfs.context import Context
from ckptgate.vfs.interface import Attr, Entry
from ckptgate.vfs.unused import is_nameless

__all__ = ["attr_of", "entry_of", "entry_of_new", "is_decided", "local_stat"]

_SECTOR = 512
_COUNTED_MAX = 256
_DECIDED = frozenset({AttemptState.COMMITTED, AttemptState.REPLACED})


def is_decided(ctx: Context, node: NodeRow) -> bool:
    """Whether the node belongs to a checkpoint that was committed."""
    return node.attempt is not None and _is_decided(ctx.spool.attempt(node.attempt))


def _is_decided(row: AttemptRow | None) -> bool:
    return row is not None and row.state in _DECIDED


def local_stat(ctx: Context, file: FileRow) -> os.stat_result | None:
    """Stat of the spool file where all of the file is there."""
    if file.local is not LocalBytes.FULL:
        return None
    try:
        return os.stat(ctx.spool.data_path(file.file))
    except FileNotFoundError:
        return None


def attr_of(ctx: Context, node: NodeRow) -> Attr:
    """stat(2) of the node."""
    size, mtime, ctime = node.size, node.mtime_ns, node.ctime_ns
    row = None if node.attempt is None else ctx.spool.attempt(node.attempt)
    blocks = -(-size // _SECTOR)
    if node.kind is NodeKind.SYMLINK:
        size, blocks = len(node.target.encode()), 0
    elif node.kind is NodeKind.DIR:
        size, blocks = 4096, 8
    elif node.file is not None and not _is_decided(row):
        file = ctx.spool.file(node.file)
        found = None if file is None else local_stat(ctx, file)
        if file is not None and found is not None:
            size, blocks = found.st_size, found.st_blocks
            if not _is_as_digested(file, found):
                mtime, ctime = found.st_mtime_ns, max(ctime, found.st_ctime_ns)
    return Attr(
        ino=node.ino,
        kind=node.kind,
        mode=node.mode & 0o7777,
        nlink=_links(ctx, node, row),
        uid=node.uid,
        gid=node.gid,
        size=size,
        blocks=blocks,
        atime_ns=mtime,
        mtime_ns=mtime,
        ctime_ns=ctime,
        timeout_s=_timeout(ctx, node, row),
    )


def _timeout(ctx: Context, node: NodeRow, row: AttemptRow | None) -> float:
    """How long the kernel may keep the attributes.

    It knows a directory of a revision by several numbers, and of a change by one of them.
    """
    is_revision = row is not None and row.base is not None and not _is_decided(row)
    if is_revision and node.kind is NodeKind.DIR:
        return 0.0
    return ctx.settings.attr_timeout_s


def _is_as_digested(file: FileRow, found: os.stat_result) -> bool:
    return file.state in {FileState.DIGESTED, FileState.STORED} and (
        (file.size, file.mtime_ns) == (found.st_size, found.st_mtime_ns) or not file.mtime_ns
    )


def _links(ctx: Context, node: NodeRow, row: AttemptRow | None) -> int:
    if node.kind is NodeKind.DIR:
        is_root = row is not None and row.root == node.ino
        if not is_root and is_nameless(ctx, node.ino):
            return 0
        # 1 says "not counted" (find and others know it): counting a huge directory takes long.
        if row is not None and row.is_root_only:
            return 1
        count, directories = ctx.spool.count_children(node.ino, most=_COUNTED_MAX + 1)
        return 1 if count > _COUNTED_MAX else 2 + directories
    if ctx.spool.place(node.ino) is not None:
        return 1
    if node.attempt is not None:
        return 0
    return 1 if any(row.ino == node.ino for row in ctx.spool.pending()) else 0


def entry_of(ctx: Context, node: NodeRow, timeout_s: float, *, number: int = 0) -> Entry:
    """The answer to a look-up that found *node*; counts it as known to the kernel."""
    return _counted(ctx, attr_of(ctx, node), timeout_s, number)


def entry_of_new(ctx: Context, node: NodeRow, found: os.stat_result, timeout_s: float) -> Entry:
    """The same of a file that was just made, with the stat of its spool file."""
    attr = Attr(
        ino=node.ino,
        kind=node.kind,
        mode=node.mode,
        nlink=1,
        uid=node.uid,
        gid=node.gid,
        size=0,
        blocks=0,
        atime_ns=found.st_mtime_ns,
        mtime_ns=found.st_mtime_ns,
        ctime_ns=max(node.ctime_ns, found.st_ctime_ns),
        timeout_s=ctx.settings.attr_timeout_s,
    )
    return _counted(ctx, attr, timeout_s)


def _counted(ctx: Context, attr: Attr, timeout_s: float, number: int = 0) -> Entry:
    with ctx.lock:
        lookups = ctx.memory.lookups
        lookups[attr.ino] = lookups.get(attr.ino, 0) + 1
    return Entry(attr, timeout_s, number)
