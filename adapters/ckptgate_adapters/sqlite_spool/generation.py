"""A number that says whether anybody changed the database: what rows kept in memory are valid by.

Asking SQLite whether a row is still the same costs as much as reading it. So each spool has a
number that every process has mapped: the number of commits, twice; it is odd while one is under
way. Who commits changes it, everybody reads it.

- A row that was read while the number was even and the same before and after is what the database
  holds as long as the number stays.
- A COMMIT gives SQLite's write lock back before its number can be counted, and the next writer may
  be quicker: so the file is locked from before the COMMIT until that is counted, and who finds the
  number odd waits for that. Else the slower one would count over the quicker one's commit, and take
  what it had kept before for what the database holds.
- A process that is killed in a commit leaves it odd, and no lock: nothing is kept until the next
  writer makes it even again.
- After a power loss it may be anything: only processes that run compare it.

Thread rule: any thread; changes only with the write lock.
"""

from __future__ import annotations

import fcntl
import os
from typing import Final

from ckptgate_adapters.mapped_number import MappedNumber

__all__ = ["GENERATION_FILE", "Generation"]

GENERATION_FILE: Final = "spool.gen"


class Generation:
    """The number of the spool in the directory *path*; raises OSError if it can't be mapped."""

    def __init__(self, path: str) -> None:
        file = os.path.join(path, GENERATION_FILE)
        self.number: Final = MappedNumber(file)
        self._fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        self.value: Final = self.number.get

    def begin(self) -> None:
        """A commit begins; with the write lock."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        self.number.cell[0] |= 1

    def end(self) -> int:
        """A commit has ended, one way or the other; returns the number from now on."""
        value = self._even()
        self.number.set(value)
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return value

    def settled(self) -> int:
        """The number, even, once the last commit is counted; with the write lock.

        Where that one's process died, it is counted here.
        """
        if self.number.get() & 1:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                if self.number.get() & 1:
                    self.number.set(self._even())
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        return self.number.get()

    def _even(self) -> int:
        return ((self.number.get() | 1) + 1) % (1 << 64)

    def close(self) -> None:
        """Unmap it, see `MappedNumber.close`; closing again is a success."""
        self.number.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
