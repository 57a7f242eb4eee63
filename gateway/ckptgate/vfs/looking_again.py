"""ESTALE: having the kernel look a name up again, once.

Owns the rule: the kernel repeats a call once after ESTALE, with every name on its way looked up
anew. So nobody is told ESTALE twice of the same thing: it would be the program's error, which no
local file system knows. Any thread.
"""

from __future__ import annotations

from ckptgate.errors import CkptError, MissingError
from ckptgate.vfs.context import TAKEOVER, Context, RenewedError, stale
from ckptgate.vfs.interface import Caller

__all__ = ["has_come_again", "have_asked_again", "replaced"]

_TAKEOVER_S = 5.0
_REPLACED_S = 5.0
"""A call that comes after such a time is no repetition."""
_MARKS_MAX = 1024
"""A call whose process died in between leaves its mark; bounds how many stay."""


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
        if len(ctx.memory.moving) > _MARKS_MAX:
            ctx.memory.moving.popitem(last=False)
    msg = f"{name!r} is looked up once more before it is changed"
    raise RenewedError(msg, subject=name)


def has_come_again(ctx: Context, caller: Caller, ino: int, begun: int) -> int | None:
    """Whether a caller comes to a node once more that it was told to look up again.

    It reaches the node by a descriptor then (`/proc/self/fd/N`), and no look-up leads elsewhere.

    Args:
        ctx: the vfs.
        caller: who comes.
        ino: the node.
        begun: the revision that this call began for it, 0 for none.

    Returns:
        What the first call began, 0 for nothing; None if this is the first one.
    """
    key, now = (caller.pid, ino), ctx.clock.monotonic()
    with ctx.lock:
        marks = ctx.memory.begun
        told = marks.pop(key, None)
        if told is not None and now - told[0] <= _REPLACED_S:
            return told[1]
        marks[key] = (now, begun)
        if len(marks) > _MARKS_MAX:
            marks.popitem(last=False)
    return None


def replaced(ctx: Context, caller: Caller, ino: int, subject: str, why: str) -> CkptError:
    """The error for a node whose name means another one by now.

    ESTALE where the kernel only has to look the name up again. Who comes to the same node once more
    has it open: that is a removed directory, ENOENT.
    """
    key, now = (caller.pid, ino), ctx.clock.monotonic()
    with ctx.lock:
        marks = ctx.memory.replaced
        told = marks.pop(key, None)
        if told is None or now - told > _REPLACED_S:
            marks[key] = now
            if len(marks) > _MARKS_MAX:
                marks.popitem(last=False)
            return stale(subject, why)
    return MissingError(f"{subject!r}: {why}", subject=subject)
