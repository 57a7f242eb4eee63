"""Asking the kernel whether anybody could still write a spool file. Any thread of any process."""

from __future__ import annotations

import fcntl
import os
import signal

__all__ = ["has_no_open_writer"]


def has_no_open_writer(path: str) -> bool:
    """Whether no descriptor or mapping anywhere could write *path* (a read lease is granted).

    False also where the file system knows no leases. The lease is given back at once.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        # The default signal of a broken lease, SIGIO, ends the process; SIGURG is ignored.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
