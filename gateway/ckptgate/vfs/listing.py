"""Directory listings: one snapshot an open directory, of what its opener sees. Any thread.

Owns the rules that a listing shows exactly the names that a look-up by the same caller would find;
that a position is a number of the name itself, so that it means the same after a rewind and to a
successor of this process; and that the kernel gets only entries that are still so when it gets
them.
"""

from __future__ import annotations

import bisect
import errno
import logging
from collections.abc import Iterator
from functools import partial
from hashlib import blake2b

from ckptgate.errors import CkptError, MissingError
from ckptgate.ports.spool import NodeKind, NodeRow
from ckptgate.vfs import names, plain, pointers, visibility, waits
from ckptgate.vfs.attributes import attr_of
from ckptgate.vfs.context import Context
from ckptgate.vfs.interface import Caller, DirEntry, Entry
from ckptgate.vfs.memory import Named, OpenDir
from ckptgate.vfs.standins import node_of
from ckptgate.vfs.stored import Queue

_log = logging.getLogger(__name__)
_DIR_BIT = 1 << 62
_COUNT_BITS = 24
_COUNT_MASK = (1 << _COUNT_BITS) - 1
_FIRST = 3
"""Positions below are those of the start, `.` and `..`."""

__all__ = ["opendir", "readdir", "releasedir", "snapshot"]


def opendir(ctx: Context, caller: Caller, number: int) -> int:
    """Open the directory that the kernel knows by *number*.

    What it holds is looked at by the first `readdir`.
    """
    node = visibility.directory(ctx, caller, node_of(number))
    with ctx.lock:
        # The number tells the node, so that a successor of this process can go on with it.
        ctx.memory.dirs_count += 1
        fh = _DIR_BIT | node.ino << _COUNT_BITS | ctx.memory.dirs_count & _COUNT_MASK
        ctx.memory.dirs[fh] = OpenDir(fh=fh, ino=node.ino, is_own_way=node.ino == number)
    return fh


def releasedir(ctx: Context, fh: int) -> None:
    """Close it."""
    with ctx.lock:
        ctx.memory.dirs.pop(fh, None)


def readdir(
    ctx: Context, caller: Caller, fh: int, cookie: int, *, with_entries: bool
) -> Iterator[DirEntry]:
    """Entries after *cookie*; a seek to the start looks again."""
    opened = ctx.memory.dirs.get(fh)
    if opened is None:
        if not fh & _DIR_BIT:
            msg = f"directory handle {fh} is not known"
            raise MissingError(msg, errno_value=errno.EBADF)
        opened = OpenDir(fh=fh, ino=(fh & ~_DIR_BIT) >> _COUNT_BITS)
        with ctx.lock:
            ctx.memory.dirs[fh] = opened
    names_known = opened.names
    if names_known is None or cookie == 0:
        opened.version = ctx.spool.version()
        node = visibility.directory(ctx, caller, opened.ino)
        opened.node = node
        opened.names = names_known = _ordered(snapshot(ctx, caller, node))
    return _entries(ctx, opened, names_known, cookie, with_entries=with_entries)


def _ordered(found: dict[str, tuple[NodeRow, float]]) -> list[Named]:
    """Names by their numbers, which no two have alike."""
    listed = sorted(
        (_position(name), name, node, timeout) for name, (node, timeout) in found.items()
    )
    last = _FIRST - 1
    ordered: list[Named] = []
    for position, name, node, timeout in listed:
        last = max(position, last + 1)
        ordered.append(Named(cookie=last, name=name, node=node, timeout_s=timeout))
    return ordered


def _position(name: str) -> int:
    digest = blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 2) + _FIRST


def _entries(
    ctx: Context, opened: OpenDir, listed: list[Named], cookie: int, *, with_entries: bool
) -> Iterator[DirEntry]:
    node = opened.node
    assert node is not None
    if cookie < 1:
        yield DirEntry(".", node.ino, NodeKind.DIR, 1, None)
    if cookie < 2:
        yield DirEntry("..", _parent_of(ctx, node), NodeKind.DIR, 2, None)
    start = bisect.bisect_right(listed, cookie, key=_cookie_of)
    for index in range(start, len(listed)):
        item = listed[index]
        entry = _entry(ctx, opened, node, item) if with_entries else None
        yield DirEntry(item.name, item.node.ino, item.node.kind, item.cookie, entry)


def _cookie_of(item: Named) -> int:
    return item.cookie


def _entry(ctx: Context, opened: OpenDir, parent: NodeRow, item: Named) -> Entry | None:
    """What a look-up would answer now; None where the kernel is to ask.

    The snapshot may be older: from its entry the kernel would go on to a node whose name has gone.
    """
    if item.timeout_s <= 0 or (parent.ino, item.name) in ctx.memory.moving:
        return None
    if not opened.is_own_way or parent.ino != opened.ino:
        return None
    node, timeout = item.node, item.timeout_s
    if ctx.spool.version() != opened.version:
        child = ctx.spool.child(parent.ino, item.name)
        if child is None or child.ino != node.ino:
            return None
        node = child
        if parent.attempt is not None:
            timeout = visibility.inner_timeout(ctx, parent)
    return Entry(attr_of(ctx, node), timeout) if timeout > 0 else None


def _parent_of(ctx: Context, node: NodeRow) -> int:
    """The directory that `..` is; the mount's root is its own."""
    place = ctx.spool.place(node.ino)
    if place is not None:
        return place[0]
    row = None if node.attempt is None else ctx.spool.attempt(node.attempt)
    return row.run_ino if row is not None and row.root == node.ino else node.ino


def snapshot(ctx: Context, caller: Caller, node: NodeRow) -> dict[str, tuple[NodeRow, float]]:
    """Name -> (node, how long the kernel may keep it) of all that this caller sees."""
    if node.attempt is not None:
        waits.refresh_shared(ctx, caller, node)
        timeout = visibility.inner_timeout(ctx, node)
        return {name: (child, timeout) for name, child in ctx.spool.children(node.ino)}
    who = ctx.who(caller)
    # A name that is there all along may move: from pending values and own attempts to what
    # everybody sees. In this order each look finds it before or after that.
    held = frozenset(row.name for row in ctx.spool.pending(parent=node.ino))
    candidates: dict[str, None] = dict.fromkeys(held)
    candidates.update(dict.fromkeys(visibility.own_attempts(ctx, who, node.ino)))
    view = ctx.view(caller, node.plain_path or "")
    view = waits.wait_to_resume(ctx, caller, who, node, view)
    view = pointers.caught_up(ctx, caller, node, view)
    stored = plain.list_store(ctx, caller, node)
    # Each name goes through the one rule of what it means; here is only who may have names.
    candidates.update(dict.fromkeys(visibility.committed_names(ctx, node.ino, view)))
    candidates.update(dict.fromkeys(view.pointers))
    for name, _ in ctx.spool.children(node.ino):
        candidates[name] = None
    for entry in stored:
        if entry.name in view.names or entry.name in view.pointers or entry.name in candidates:
            continue
        child = plain.take_entry(ctx, node, entry.name, entry)
        if child is not None:
            ctx.done_now(("plain", child.ino))
            candidates[entry.name] = None
    return _meanings(ctx, caller, node, candidates, frozenset(e.name for e in stored), held)


def _meanings(
    ctx: Context,
    caller: Caller,
    node: NodeRow,
    candidates: dict[str, None],
    stored: frozenset[str],
    held: frozenset[str],
) -> dict[str, tuple[NodeRow, float]]:
    found: dict[str, tuple[NodeRow, float]] = {}
    queue = Queue(ctx)
    for name in candidates:
        child = ctx.spool.child(node.ino, name)
        is_plain = child is not None and child.plain_path is not None
        if child is not None and is_plain and name not in held and _is_simple(ctx, node, name):
            if name not in stored and not queue.touches(names.plain_path(node, name)):
                # It is newer here, or another node removed it.
                child = plain.refreshed(ctx, caller, node, name, child)
            if child is not None:
                found[name] = (child, ctx.settings.entry_timeout_s)
            continue
        try:
            meaning = ctx.steadily(partial(visibility.resolve, ctx, caller, node, name))
        except CkptError as exc:
            # One checkpoint whose manifest is damaged must not hide all others.
            if exc.errno != errno.EIO:
                raise
            _log.error("name-unreadable dir=%d name=%r error=%s", node.ino, name, exc)
            continue
        if meaning is not None:
            found[name] = (meaning.node, meaning.timeout_s)
    return found


def _is_simple(ctx: Context, node: NodeRow, name: str) -> bool:
    return not names.is_special(ctx, node, name)
