"""When a spool file was last used: kept as its inode's time of last access.

The kernel's own keeping of that time is off or rare on most mounts (noatime, relatime), so it is
set here. Nothing else of the file changes but its ctime, which tells whether a digest still holds:
so only files that are decided are marked. Any thread.
"""

from __future__ import annotations

import ctypes
import logging
import os
from typing import Final

__all__ = ["set_last_use"]

_log = logging.getLogger(__name__)
_libc: Final = ctypes.CDLL(None, use_errno=True)
_UTIME_OMIT: Final = (1 << 30) - 2
_NS: Final = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_Times = _Timespec * 2


def set_last_use(fd: int, at_ns: int) -> None:
    """Set the time of last access of what is open as *fd*, and leave its mtime alone."""
    times = _Times(_Timespec(at_ns // _NS, at_ns % _NS), _Timespec(0, _UTIME_OMIT))
    if _libc.futimens(fd, ctypes.byref(times)) != 0:
        # It is only an order in which copies are given up.
        _log.warning("last-use-not-kept fd=%d error=%s", fd, os.strerror(ctypes.get_errno()))
