"""Look-ups, and how long nodes without a name live.

Owns the rule: a replaced or removed node lives until the kernel forgot it and its last handle is
released; then its bytes go too, unless another node shares them. Any thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptgate.errors import MissingError
from ckptgate.ports.spool import ROOT_INO, NodeKind, NodeRow
from ckptgate.vfs import visibility
from ckptgate.vfs.attributes import entry_of
from ckptgate.vfs.context import Context
from ckptgate.vfs.interface import Caller, Entry

__all__ = [
    "drop_file_if_unused",
    "drop_if_unused",
    "forget",
    "is_nameless",
    "looked_up",
    "lookup",
    "remove_name",
]


def lookup(ctx: Context, caller: Caller, parent_ino: int, name: str) -> Entry:
    """The answer for a name.

    Raises:
        MissingError: it means nothing to this caller.
    """
    parent_node = ctx.node(parent_ino)
    parent = visibility.directory(ctx, caller, parent_ino)
    if name == ".":
        return entry_of(ctx, parent, 0.0)
    found = visibility.resolve(ctx, caller, parent, name)
    if found is None:
        msg = f"nothing is named {name!r} here"
        raise MissingError(msg, subject=name)
    is_redirected = parent.ino != parent_node.ino
    return entry_of(ctx, found.node, 0.0 if is_redirected else found.timeout_s)


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


def is_nameless(ctx: Context, ino: int) -> bool:
    """Whether nothing refers to the node: no name, no attempt's root, no pending value."""
    if ino == ROOT_INO or ctx.spool.place(ino) is not None:
        return False
    node = ctx.spool.node(ino)
    if node is None:
        return False
    if node.attempt is not None:
        row = ctx.spool.attempt(node.attempt)
        if row is not None and row.root == ino:
            return False
    return all(row.ino != ino for row in ctx.spool.pending())


def _is_known(ctx: Context, ino: int) -> bool:
    with ctx.lock:
        memory = ctx.memory
        return memory.lookups.get(ino, 0) > 0 or memory.opens.get(ino, 0) > 0 or memory.is_inherited


def drop_if_unused(ctx: Context, ino: int, *, is_forgotten: bool = True) -> None:
    """Drop a node without a name that neither the kernel nor a handle refers to."""
    if ctx.memory.opens.get(ino, 0) or (not is_forgotten and _is_known(ctx, ino)):
        return
    if ctx.memory.lookups.get(ino, 0) or not is_nameless(ctx, ino):
        return
    with ctx.change():
        node = ctx.spool.node(ino)
        if node is None or not is_nameless(ctx, ino):
            return
        if node.kind is NodeKind.DIR and ctx.spool.count_children(ino):
            return
        ctx.spool.drop_node(ino)
        drop_file_if_unused(ctx, node)


def drop_file_if_unused(ctx: Context, node: NodeRow) -> None:
    """Drop the bytes that *node* had, unless another node or a handle has them; in a change."""
    if node.file is None or ctx.spool.nodes_of_file(node.file):
        return
    with ctx.lock:
        if any(handle.file == node.file for handle in ctx.memory.files.values()):
            return
    ctx.spool.drop_file(node.file)


def remove_name(ctx: Context, parent: NodeRow, name: str, node: NodeRow) -> None:
    """Take the name from a node, which lives on as long as it is used; inside a change."""
    ctx.spool.unlink(parent.ino, name)
    ctx.spool.update_node(node.ino, ctime_ns=ctx.clock.now_ns())
    drop_if_unused(ctx, node.ino, is_forgotten=False)
