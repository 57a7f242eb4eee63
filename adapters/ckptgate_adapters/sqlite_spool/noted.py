"""Closes that were answered before they are in the database: slots in a file that is mapped.

A close must survive a kill -9 of the mount from the moment it is answered, but a transaction for
each costs more than all the rest of it. So the handle's number is put into a free slot first, and
leaves it once a transaction has taken the close over. Taking one over twice changes nothing: a
handle's number is never used again.

Thread rule: any thread of one process (the mount).
"""

from __future__ import annotations

import mmap
import os
import threading
from typing import Final

__all__ = ["NOTED_FILE", "SLOTS", "NotedCloses"]

NOTED_FILE: Final = "closes"
SLOTS: Final = 512
_SLOT_BYTES: Final = 8
_RELEASED: Final = 1
"""Lowest bit of a slot: the handle is gone, too."""


class NotedCloses:
    """The slots of the spool in the directory *path*; raises OSError if they can't be mapped."""

    def __init__(self, path: str) -> None:
        size = SLOTS * _SLOT_BYTES
        fd = os.open(os.path.join(path, NOTED_FILE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(fd).st_size < size:
                # Written, not truncated to size: a store into a hole of a full disk is SIGBUS.
                os.pwrite(fd, bytes(size), 0)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._slots = memoryview(self._map).cast("Q")
        self._lock = threading.Lock()
        self._of = {value >> 1: i for i, value in enumerate(self._slots) if value}
        self._free = [i for i, value in enumerate(self._slots) if not value]

    def note(self, fh: int, *, is_released: bool) -> bool:
        """Note a handle's close or release; False if there is no slot left."""
        with self._lock:
            slot = self._of.get(fh)
            if slot is None:
                if not self._free:
                    return False
                slot = self._of[fh] = self._free.pop()
            self._slots[slot] = fh << 1 | is_released
            return True

    def all(self) -> list[tuple[int, bool]]:
        """(handle, whether it was released) of all slots in use."""
        with self._lock:
            values = [self._slots[slot] for slot in self._of.values()]
        return sorted((value >> 1, bool(value & _RELEASED)) for value in values)

    def drop(self, fh: int) -> None:
        """A transaction has taken this close over."""
        with self._lock:
            slot = self._of.pop(fh, None)
            if slot is not None:
                self._slots[slot] = 0
                self._free.append(slot)

    def close(self) -> None:
        """Unmap them; nothing can be noted any more."""
        with self._lock:
            self._of.clear()
            self._free.clear()
            self._slots.release()
            self._map.close()
