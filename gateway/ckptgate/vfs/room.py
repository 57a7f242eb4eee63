"""Whether the spool may take new files, and how much room callers are told of.

Owns the rule: above the spool's limit new files and opens for writing are ENOSPC; what is open goes
on, since a write that the kernel passes through asks nobody. The publisher counts and makes room
first. Any thread.
"""

from __future__ import annotations

import os

from ckptgate.errors import FullError
from ckptgate.ports.spool import ROOM_META, SpoolRoom
from ckptgate.vfs.context import Context
from ckptgate.vfs.interface import FsStats

__all__ = ["check_room", "stats"]

_LOOK_S = 0.5
"""Between looks at what the publisher counted."""


def check_room(ctx: Context) -> None:
    """Return if a file may be made or opened for writing.

    Raises:
        FullError: ENOSPC, the spool is at its limit, and nothing in it is published.
    """
    if not ctx.settings.spool_max_bytes:
        return
    if ctx.is_due("room", _LOOK_S):
        ctx.done_now("room")
        ctx.memory.is_spool_full = _room(ctx).is_full
    if ctx.memory.is_spool_full:
        msg = "the spool is at its limit (room.spool_max), and nothing in it is published"
        hint = "wait for the store, `ckptgate gc`, or a larger --spool-max"
        raise FullError(msg, subject=ctx.spool.path, hint=hint)


def stats(ctx: Context) -> FsStats:
    """statfs(2): the spool's file system, that is where writes go, or the spool's limit in it."""
    found = os.statvfs(ctx.spool.path)
    blocks, free, available = found.f_blocks, found.f_bfree, found.f_bavail
    limit = ctx.settings.spool_max_bytes // found.f_frsize
    if limit:
        left = max(0, limit - _room(ctx).used // found.f_frsize)
        blocks, free, available = min(blocks, limit), min(free, left), min(available, left)
    return FsStats(
        blocks=blocks,
        blocks_free=free,
        blocks_available=available,
        files=found.f_files,
        files_free=found.f_ffree,
        block_size=found.f_bsize,
        fragment_size=found.f_frsize,
    )


def _room(ctx: Context) -> SpoolRoom:
    return SpoolRoom.parse(ctx.spool.get_meta(ROOM_META))
