"""Reading by a descriptor what only the store has, while another node extends or replaces it.

Owns the rule that a small file is read as one version of it: what the first read found is kept for
those that go on from there. At its end it goes on only if the store's file still begins with it, as
a log does; of a file that was replaced the descriptor has seen the end. Any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ckptgate.errors import MissingError
from ckptgate.vfs.openfiles import OpenFile, Seen

__all__ = ["SMALL_BYTES", "follow"]

SMALL_BYTES: Final = 64 * 1024
"""Larger files are read in pieces, as over any network file system."""
_COMPARED_BYTES: Final = 4096


def follow(handle: OpenFile, offset: int, length: int, read: Callable[[int, int], bytes]) -> bytes:
    """Bytes of a file that is only in the store; fewer at its end.

    Args:
        handle: of the descriptor.
        offset: of the first byte.
        length: at most so many.
        read: reads so many bytes from an offset in the store's file; may block.
    """
    seen = handle.seen
    if not handle.is_small or (offset and seen is not None and offset < seen.offset):
        return read(offset, length)
    if not offset or seen is None:
        # Whoever starts anew may find a new version.
        seen = Seen(0, read(0, max(offset + length, SMALL_BYTES)))
    elif offset >= seen.end:
        grown = _grown(seen, offset + length, read)
        if grown is None:
            return b""
        seen = grown
    handle.seen = seen
    start = offset - seen.offset
    return seen.data[start : start + length]


def _grown(seen: Seen, end: int, read: Callable[[int, int], bytes]) -> Seen | None:
    """What follows *seen*, up to *end*; None if it isn't the same file any more."""
    tail = seen.data[-_COMPARED_BYTES:]
    offset = seen.end - len(tail)
    try:
        data = read(offset, end - offset)
    except MissingError:
        return None
    return Seen(offset, data) if data.startswith(tail) else None
