"""Look-ups, and what the kernel forgets. Any thread."""

from __future__ import annotations

from collections.abc import Sequence

from ckptgate.errors import MissingError
from ckptgate.ports.spool import NodeRow
from ckptgate.vfs import names, visibility
from ckptgate.vfs.attributes import entry_of
from ckptgate.vfs.context import Context
from ckptgate.vfs.interface import Caller, Entry
from ckptgate.vfs.standins import below, node_of
from ckptgate.vfs.unused import drop_if_unused

__all__ = ["forget", "looked_up", "lookup", "remove_name"]


def lookup(ctx: Context, caller: Caller, number: int, name: str) -> Entry:
    """The answer for a name in the directory that the kernel knows by *number*.

    Raises:
        MissingError: it means nothing to this caller.
    """
    directory = ctx.spool.node(node_of(number))
    # Names outside of checkpoints mean several things.
    if directory is not None and directory.attempt is None:
        entry = ctx.steadily(lambda: _lookup(ctx, caller, number, name))
        assert entry is not None
        return entry
    return _lookup(ctx, caller, number, name)


def _lookup(ctx: Context, caller: Caller, number: int, name: str) -> Entry:
    parent_ino = node_of(number)
    parent = visibility.directory(ctx, caller, parent_ino)
    if name == ".":
        return entry_of(ctx, parent, 0.0)
    names.check_length(name)
    found = visibility.resolve(ctx, caller, parent, name)
    if found is None:
        msg = f"nothing is named {name!r} here"
        raise MissingError(msg, subject=name)
    may_keep = parent.ino == number and (parent_ino, name) not in ctx.memory.moving
    timeout = found.timeout_s if may_keep else 0.0
    return entry_of(ctx, found.node, timeout, number=below(number, parent, found.node))


def looked_up(ctx: Context, nodes: Sequence[int]) -> None:
    """The kernel knows these nodes from a listing: each counts as one look-up."""
    with ctx.lock:
        lookups = ctx.memory.lookups
        for ino in nodes:
            lookups[ino] = lookups.get(ino, 0) + 1


def forget(ctx: Context, nodes: Sequence[tuple[int, int]]) -> None:
    """The kernel dropped so many look-ups of these nodes."""
    gone: list[int] = []
    with ctx.lock:
        memory = ctx.memory
        for ino, count in nodes:
            # A predecessor of this process may have counted some of them.
            left = memory.lookups.get(ino, 0) - count
            if left > 0:
                memory.lookups[ino] = left
            else:
                memory.lookups.pop(ino, None)
                gone.append(ino)
    for ino in gone:
        drop_if_unused(ctx, ino)


def remove_name(ctx: Context, parent: NodeRow, name: str, node: NodeRow) -> None:
    """Take the name from a node, which lives on as long as it is used; inside a change."""
    ctx.spool.unlink(parent.ino, name)
    ctx.spool.update_node(node.ino, ctime_ns=ctx.clock.now_ns())
    drop_if_unused(ctx, node.ino, is_forgotten=False)
