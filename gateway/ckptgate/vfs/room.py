"""Whether the spool may take new files, and how much room callers are told of.

Owns two rules. Above the spool's limit new files and opens for writing are ENOSPC; what is open
goes on, since a write that the kernel passes through asks nobody. And where a checkpoint would not
fit if it gets as large as the one before, its first file waits a while for the publisher to bring
what is staged into the store and to give local copies up; then it goes on, as that is a guess. Any
thread.
"""

from __future__ import annotations

import logging
import os
from typing import Final

from ckptgate.errors import FullError
from ckptgate.model.states import AttemptState
from ckptgate.ports.reserve import expected_bytes
from ckptgate.ports.spool import CONTACT_META, ROOM_META, Contact, SpoolRoom
from ckptgate.vfs.context import Context
from ckptgate.vfs.interface import Caller, FsStats

__all__ = ["await_room", "check_room", "stats"]

_log = logging.getLogger(__name__)

_LOOK_S: Final = 0.5
"""Between looks at what the publisher counted."""
_POLL_S: Final = 0.2
_LOW_S: Final = 1.5
_SOON_S: Final = 5.0
_ATTEMPTS_KEPT: Final = 1000


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


def await_room(ctx: Context, caller: Caller, attempt: int | None) -> None:
    """Return when what the attempt is likely to need is free, or waiting can't help any more.

    Once for each attempt; what isn't in one waits for nothing.
    """
    limit_s = ctx.settings.room_wait_s
    if attempt is None or limit_s <= 0 or attempt in ctx.memory.roomy:
        return
    row = ctx.spool.attempt(attempt)
    needed = (
        0 if row is None or row.state is not AttemptState.OPEN else expected_bytes(ctx.spool, row)
    )
    if _free(ctx) < needed:
        ctx.need_block(caller)
        _wait_for(ctx, attempt, needed, limit_s)
    with ctx.lock:
        if len(ctx.memory.roomy) > _ATTEMPTS_KEPT:
            ctx.memory.roomy.clear()
        ctx.memory.roomy.add(attempt)


def _wait_for(ctx: Context, attempt: int, needed: int, limit_s: float) -> None:
    ctx.wake()
    began_s = ctx.clock.monotonic()
    _log.warning("room-awaited attempt=%d needed=%d free=%d", attempt, needed, _free(ctx))
    while (free := _free(ctx)) < needed:
        why = _why_vain(ctx, ctx.clock.monotonic() - began_s, limit_s)
        if why:
            _log.warning("room-short needed=%d free=%d reason=%r", needed, free, why)
            return
        ctx.clock.sleep(_POLL_S)
    _log.info("room-made needed=%d free=%d", needed, free)


def _why_vain(ctx: Context, waited_s: float, limit_s: float) -> str:
    """Why waiting any longer can't help, "" if it may."""
    spool = ctx.spool
    if waited_s >= limit_s:
        return f"waited {waited_s:.0f} s"
    if Contact.parse(spool.get_meta(CONTACT_META)).away_ns:
        return "the store is away"
    if spool.attempts(states=(AttemptState.SEALED,)) or spool.plain_ops():
        # What is published can go.
        return ""
    # The publisher says within a second that there is nothing to give up; what it has just
    # published it gives up soon.
    is_low = _room(ctx).is_low
    if waited_s >= (_LOW_S if is_low else _SOON_S):
        return "nothing is on its way to the store that could go then"
    return ""


def _free(ctx: Context) -> int:
    """Bytes that can still be written."""
    found = os.statvfs(ctx.spool.path)
    free = found.f_bavail * found.f_frsize
    limit = ctx.settings.spool_max_bytes
    return min(free, max(0, limit - _room(ctx).used)) if limit else free


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
