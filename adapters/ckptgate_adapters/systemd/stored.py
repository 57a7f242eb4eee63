"""Descriptors that the service manager keeps over the death of the service (`FDSTORE`).

Owns the rule that what was stored is there before this process goes on: a message of a process that
has died meanwhile is not believed. One thread.
"""

from __future__ import annotations

import os
import select
from typing import Final

from ckptgate_adapters.systemd.notify import notify

__all__ = ["barrier", "store_fd", "unstore_fd"]

_BARRIER_S: Final = 5.0


def barrier() -> bool:
    """Wait until the manager has dealt with all that it was told before; whether it has."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        try:
            is_sent = notify("BARRIER=1", fds=[writer])
        finally:
            os.close(writer)
        if not is_sent:
            return False
        # The manager closes its copy, the last one.
        poll = select.poll()
        poll.register(reader, 0)
        return bool(poll.poll(_BARRIER_S * 1000))
    finally:
        os.close(reader)


def store_fd(name: str, fd: int) -> bool:
    """Have the manager keep a copy of *fd*; one that it has already is not kept twice."""
    return notify("FDSTORE=1", f"FDNAME={name}", fds=[fd])


def unstore_fd(name: str) -> bool:
    """Have it close what it keeps under that name."""
    return notify("FDSTOREREMOVE=1", f"FDNAME={name}")
