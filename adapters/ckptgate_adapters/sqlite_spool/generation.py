"""A number that says whether anybody changed the database: what rows kept in memory are valid by.

Asking SQLite whether a row is still the same costs as much as reading it. So each spool has a file
of 8 bytes, mapped by every process that has it open: the number of commits, twice; it is odd while
one is under way. Whoever holds SQLite's write lock changes it, everybody reads it.

- A row that was read while the number was even and the same before and after is what the database
  holds as long as the number stays.
- A process that is killed in a commit leaves it odd: nothing is kept until the next commit, whose
  writer (it has the lock, so nobody is in a commit) makes it even again.
- After a power loss it may be anything: only processes that run compare it.

Thread rule: any thread; changes only with the write lock.
"""

from __future__ import annotations

import mmap
import os
from typing import Final

__all__ = ["GENERATION_FILE", "Generation"]

GENERATION_FILE: Final = "spool.gen"
_BYTES: Final = 8


class Generation:
    """The number of the spool in the directory *path*; raises OSError if it can't be mapped."""

    def __init__(self, path: str) -> None:
        fd = os.open(
            os.path.join(path, GENERATION_FILE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            if os.fstat(fd).st_size < _BYTES:
                # Written, not truncated to size: a store into a hole of a full disk is SIGBUS.
                os.pwrite(fd, bytes(_BYTES), 0)
            self._map = mmap.mmap(fd, _BYTES)
        finally:
            os.close(fd)
        # One aligned store of 8 bytes: nobody ever sees half of it.
        self._cell = memoryview(self._map).cast("Q")

    def value(self) -> int:
        """The number now."""
        return self._cell[0]

    def begin(self) -> None:
        """A commit begins."""
        self._cell[0] |= 1

    def end(self) -> int:
        """A commit has ended, one way or the other; returns the number from now on."""
        value = ((self._cell[0] | 1) + 1) % (1 << 64)
        self._cell[0] = value
        return value

    def close(self) -> None:
        """Unmap it; the number is 0 from then on."""
        mapped, self._cell = self._cell, memoryview(bytearray(_BYTES)).cast("Q")
        mapped.release()
        self._map.close()
