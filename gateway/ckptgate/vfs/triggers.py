"""Extended attributes: how a checkpoint's writers speak to the gateway, and users' own.

Owns the rule that users' own (`user.*`) are kept with the node, on this machine: they are no part
of a checkpoint, and are not changed once it is decided. Those of the gateway say that a part is
begun, how it is saved, that it is committed or given up, and tell a checkpoint's state and a run's
newest checkpoint. All others are refused. Any thread.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from ckptgate.errors import CkptError
from ckptgate.model.states import AttemptState, FileState
from ckptgate.ports.spool import NodeRow
from ckptgate.vfs import events, newest, pending, revisions, visibility
from ckptgate.vfs.attributes import is_decided
from ckptgate.vfs.context import Context
from ckptgate.vfs.interface import Caller
from ckptgate.vfs.stored import Queue

__all__ = [
    "ABORT",
    "BEGIN",
    "COMMIT",
    "LATEST",
    "SAVED_BY",
    "STATE",
    "STORED",
    "getxattr",
    "listxattr",
    "removexattr",
    "setxattr",
]

BEGIN = "user.ckptgate.begin"
SAVED_BY = "user.ckptgate.saved_by"
COMMIT = "user.ckptgate.commit"
ABORT = "user.ckptgate.abort"
STATE = "user.ckptgate.state"
LATEST = "user.ckptgate.latest"
STORED = "user.ckptgate.stored"
"""Of a file: `yes` once its present bytes are in the store, verified; else `no`."""

_OWN = "user."
_GATEWAYS = "user.ckptgate."
_CREATE = 1
_REPLACE = 2
_BYTES_MAX = 64 * 1024
"""Names and values of one node."""


_SAID = frozenset({BEGIN, SAVED_BY, COMMIT, ABORT})
"""What is said of a checkpoint by setting it; none has a value to be read."""


def _refused(name: str, value: int) -> CkptError:
    return CkptError(f"extended attribute {name!r} is not kept", subject=name, errno_value=value)


def _is_users(name: str) -> bool:
    return name.startswith(_OWN) and not name.startswith(_GATEWAYS)


def getxattr(ctx: Context, caller: Caller, ino: int, name: str) -> bytes:
    """The value of an attribute."""
    if name == STATE:
        return events.state_text(ctx, ctx.node(ino))
    if name == LATEST:
        return newest.latest_text(ctx, caller, ctx.node(ino))
    if name == STORED:
        return b"yes" if _is_stored(ctx, ctx.node(ino)) else b"no"
    if _is_users(name):
        value = ctx.spool.xattrs(ctx.node(ino).ino).get(name)
        if value is not None:
            return value
        raise _refused(name, errno.ENODATA)
    # The kernel and tools ask for these often.
    if name.startswith("security.") or name in _SAID:
        raise _refused(name, errno.ENODATA)
    raise _refused(name, errno.ENOTSUP)


def _is_stored(ctx: Context, node: NodeRow) -> bool:
    """Whether the store has the file as it is, or whatever else is to be said of it there."""
    ctx.apply_closes()
    file = None if node.file is None else ctx.spool.file(node.file)
    if node.attempt is not None:
        return file is None or is_decided(ctx, node) or file.state is FileState.STORED
    if pending.pending_of(ctx, node.ino) is not None:
        return False
    return node.plain_path is None or not Queue(ctx).touches(node.plain_path)


def setxattr(
    ctx: Context, caller: Caller, ino: int, name: str, value: bytes, flags: int = 0
) -> None:
    """Say something of a checkpoint, or keep an attribute of the user's own."""
    if _is_users(name):
        _keep(ctx, ino, name, value, flags)
        return
    if name not in _SAID:
        raise _refused(name, errno.ENOTSUP)
    node = ctx.node(ino)
    if node.attempt is None:
        raise _refused(name, errno.ENOTSUP)
    if name == BEGIN:
        _begin(ctx, caller, node, value)
        return
    node = visibility.redirect(ctx, caller, node)
    assert node.attempt is not None
    if name == SAVED_BY:
        with ctx.change():
            events.record_saving(ctx, node.attempt, ctx.who(caller), value)
    elif name == ABORT:
        with ctx.change():
            events.give_up(ctx, node.attempt, value)
    else:
        rank, world_size, is_all = events.parse_ranks(name, value)
        with ctx.change():
            events.commit_explicitly(ctx, node.attempt, rank, world_size, is_all=is_all)


def _begin(ctx: Context, caller: Caller, node: NodeRow, value: bytes) -> None:
    """A rank begins its part; in a committed checkpoint that begins a revision."""
    rank, world_size, _ = events.parse_ranks(BEGIN, value)
    node = revisions.writable(ctx, caller, node)
    assert node.attempt is not None
    with ctx.change():
        events.begin(ctx, node.attempt, ctx.who(caller), rank, world_size)


def _own_node(ctx: Context, ino: int, name: str) -> NodeRow:
    """The node, if its attributes may be changed."""
    node = ctx.node(ino)
    row = None if node.attempt is None else ctx.spool.attempt(node.attempt)
    if row is not None and row.state not in {AttemptState.OPEN, AttemptState.SEALED}:
        msg = f"checkpoint {row.name!r} is {row.state}: attribute {name!r} cannot be changed"
        raise CkptError(msg, subject=name, errno_value=errno.EPERM)
    return node


def _keep(ctx: Context, ino: int, name: str, value: bytes, flags: int) -> None:
    if name == _OWN or flags & ~(_CREATE | _REPLACE):
        msg = f"attribute {name!r} with flags {flags:#x} is not possible"
        raise CkptError(msg, subject=name, errno_value=errno.EINVAL)
    node = _own_node(ctx, ino, name)
    with ctx.change():
        known = ctx.spool.xattrs(node.ino)
        if name in known and flags & _CREATE:
            msg = f"attribute {name!r} is there already"
            raise CkptError(msg, subject=name, errno_value=errno.EEXIST)
        if name not in known and flags & _REPLACE:
            raise _refused(name, errno.ENODATA)
        known[name] = value
        if sum(len(key) + len(kept) for key, kept in known.items()) > _BYTES_MAX:
            msg = f"the attributes of one file take more than {_BYTES_MAX} bytes"
            raise CkptError(msg, subject=name, errno_value=errno.ENOSPC)
        ctx.spool.set_xattr(node.ino, name, value)
        ctx.spool.update_node(node.ino, ctime_ns=ctx.clock.now_ns())


def listxattr(ctx: Context, ino: int) -> Sequence[str]:
    """The user's own; the gateway's are left out, as tools would try to copy them."""
    return tuple(ctx.spool.xattrs(ctx.node(ino).ino))


def removexattr(ctx: Context, ino: int, name: str) -> None:
    """Drop an attribute of the user's own."""
    if not _is_users(name):
        ctx.node(ino)
        raise _refused(name, errno.ENODATA)
    node = _own_node(ctx, ino, name)
    with ctx.change():
        if name not in ctx.spool.xattrs(node.ino):
            raise _refused(name, errno.ENODATA)
        ctx.spool.drop_xattr(node.ino, name)
        ctx.spool.update_node(node.ino, ctime_ns=ctx.clock.now_ns())
