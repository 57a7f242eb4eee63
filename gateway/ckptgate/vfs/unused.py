"""How long nodes without a name live.

Owns the rule: a replaced or removed node lives until the kernel forgot it and its last handle is
released; then its bytes go too, unless another node shares them. Any thread.
"""

from __future__ import annotations

from ckptgate.ports.spool import ROOT_INO, NodeKind, NodeRow
from ckptgate.vfs.context import Context

__all__ = ["drop_file_if_unused", "drop_if_unused", "is_nameless"]


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
        return memory.lookups.get(ino, 0) > 0 or memory.files.count(ino) > 0 or memory.is_inherited


def drop_if_unused(ctx: Context, ino: int, *, is_forgotten: bool = True) -> None:
    """Drop a node without a name that neither the kernel nor a handle refers to."""
    if ctx.memory.files.count(ino) or (not is_forgotten and _is_known(ctx, ino)):
        return
    if ctx.memory.lookups.get(ino, 0) or not is_nameless(ctx, ino):
        return
    with ctx.change():
        node = ctx.spool.node(ino)
        if node is None or not is_nameless(ctx, ino):
            return
        if node.kind is NodeKind.DIR and ctx.spool.count_children(ino)[0]:
            return
        ctx.spool.drop_node(ino)
        drop_file_if_unused(ctx, node)


def drop_file_if_unused(ctx: Context, node: NodeRow) -> None:
    """Drop the bytes that *node* had, unless another node or a handle has them; in a change."""
    if node.file is None or ctx.spool.nodes_of_file(node.file):
        return
    if ctx.memory.files.has_file(node.file):
        return
    ctx.spool.drop_file(node.file)
