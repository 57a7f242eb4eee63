"""Look-ups, and what the kernel forgets. Any thread."""

from __future__ import annotations

from collections.abc import Sequence

from ckptgate.errors import MissingError
from ckptgate.ports.spool import NodeRow
from ckptgate.vfs import names, visibility
from ckptgate.vfs.attributes import entry_of
from ckptgate.vfs.context import TAKEOVER, Context, RenewedError
from ckptgate.vfs.interface import Caller, Entry
from ckptgate.vfs.unused import drop_if_unused

__all__ = ["forget", "have_asked_again", "looked_up", "lookup", "remove_name"]

_TAKEOVER_S = 5.0
_MOVING_MAX = 1024
"""A call whose process died in between leaves its mark; bounds how many stay."""


def lookup(ctx: Context, caller: Caller, parent_ino: int, name: str) -> Entry:
    """The answer for a name.

    Raises:
        MissingError: it means nothing to this caller.
    """
    if _is_outside(ctx, parent_ino):
        entry = ctx.steadily(lambda: _lookup(ctx, caller, parent_ino, name))
        assert entry is not None
        return entry
    return _lookup(ctx, caller, parent_ino, name)


def _is_outside(ctx: Context, ino: int) -> bool:
    """Whether this is a directory outside of checkpoints: names there mean several things."""
    node = ctx.spool.node(ino)
    return node is not None and node.attempt is None


def _lookup(ctx: Context, caller: Caller, parent_ino: int, name: str) -> Entry:
    parent_node = ctx.node(parent_ino)
    parent = visibility.directory(ctx, caller, parent_ino)
    if name == ".":
        return entry_of(ctx, parent, 0.0)
    names.check_length(name)
    found = visibility.resolve(ctx, caller, parent, name)
    if found is None:
        msg = f"nothing is named {name!r} here"
        raise MissingError(msg, subject=name)
    may_keep = parent.ino == parent_node.ino and (parent_ino, name) not in ctx.memory.moving
    return entry_of(ctx, found.node, found.timeout_s if may_keep else 0.0)


def have_asked_again(ctx: Context, caller: Caller, parent_ino: int, name: str) -> None:
    """Have the kernel look a name up again, which now may not be kept, before it is changed.

    With a rename the kernel takes along how long an entry may be kept: others would find what this
    job only holds for itself under the new name until that time is over. And a directory that is
    removed is dead for everybody: that must be the revision's, not the committed one which the
    kernel may still have there.

    Raises:
        RenewedError: ESTALE, the first time: the kernel looks up and comes again.
    """
    if not ctx.is_due(TAKEOVER, _TAKEOVER_S):
        # A predecessor may have said so already; a second time would be the caller's error.
        return
    key = (parent_ino, name)
    with ctx.lock:
        pids = ctx.memory.moving.setdefault(key, set())
        if caller.pid in pids:
            pids.discard(caller.pid)
            if not pids:
                del ctx.memory.moving[key]
            return
        pids.add(caller.pid)
        if len(ctx.memory.moving) > _MOVING_MAX:
            ctx.memory.moving.popitem(last=False)
    msg = f"{name!r} is looked up once more before it is changed"
    raise RenewedError(msg, subject=name)


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
