"""Extended attributes: the explicit commit and the state of a checkpoint, nothing else.

All others are refused, so that tools which copy attributes leave none behind. Any thread.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from ckptgate.errors import CkptError
from ckptgate.vfs import events, visibility
from ckptgate.vfs.context import Context
from ckptgate.vfs.interface import Caller

__all__ = ["COMMIT", "STATE", "getxattr", "listxattr", "removexattr", "setxattr"]

COMMIT = "user.ckptgate.commit"
STATE = "user.ckptgate.state"


def _refused(name: str, value: int) -> CkptError:
    return CkptError(f"extended attribute {name!r} is not kept", subject=name, errno_value=value)


def getxattr(ctx: Context, ino: int, name: str) -> bytes:
    """The value of an attribute."""
    if name == STATE:
        return events.state_text(ctx, ctx.node(ino))
    if name.startswith(("security.", COMMIT)):
        raise _refused(name, errno.ENODATA)
    raise _refused(name, errno.ENOTSUP)


def setxattr(ctx: Context, caller: Caller, ino: int, name: str, value: bytes) -> None:
    """Commit explicitly; nothing else can be set."""
    if name != COMMIT:
        raise _refused(name, errno.ENOTSUP)
    rank, world_size, is_all = events.parse_commit(value)
    node = ctx.node(ino)
    if node.attempt is None:
        raise _refused(name, errno.ENOTSUP)
    node = visibility.redirect(ctx, ctx.who(caller), node)
    assert node.attempt is not None
    with ctx.change():
        events.commit_explicitly(ctx, node.attempt, rank, world_size, is_all=is_all)


def listxattr(ctx: Context, ino: int) -> Sequence[str]:
    """None: tools would try to copy them."""
    ctx.node(ino)
    return ()


def removexattr(ctx: Context, ino: int, name: str) -> None:
    """There is nothing that could be removed."""
    ctx.node(ino)
    raise _refused(name, errno.ENODATA)
