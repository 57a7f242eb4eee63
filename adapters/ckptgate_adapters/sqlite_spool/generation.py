"""A number that says whether anybody changed the database: what rows kept in memory are valid by.

Asking SQLite whether a row is still the same costs as much as reading it. So each spool has a
number that every process has mapped: the number of commits, twice; it is odd while one is under
way. Whoever holds SQLite's write lock changes it, everybody reads it.

- A row that was read while the number was even and the same before and after is what the database
  holds as long as the number stays.
- A process that is killed in a commit leaves it odd: nothing is kept until the next commit, whose
  writer (it has the lock, so nobody is in a commit) makes it even again.
- After a power loss it may be anything: only processes that run compare it.

Thread rule: any thread; changes only with the write lock.
"""

from __future__ import annotations

import os
from typing import Final

from ckptgate_adapters.mapped_number import MappedNumber

__all__ = ["GENERATION_FILE", "Generation"]

GENERATION_FILE: Final = "spool.gen"


class Generation:
    """The number of the spool in the directory *path*; raises OSError if it can't be mapped."""

    def __init__(self, path: str) -> None:
        self._number = MappedNumber(os.path.join(path, GENERATION_FILE))
        self.value: Final = self._number.get
        self.close: Final = self._number.close

    def begin(self) -> None:
        """A commit begins."""
        self._number.set(self._number.get() | 1)

    def end(self) -> int:
        """A commit has ended, one way or the other; returns the number from now on."""
        value = ((self._number.get() | 1) + 1) % (1 << 64)
        self._number.set(value)
        return value
