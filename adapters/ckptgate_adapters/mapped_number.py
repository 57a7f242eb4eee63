"""A number in a file that several processes have mapped: read and written without a system call.

It survives kill -9 of all of them, but no power loss. Any thread; who may write it when is for
its users to say.
"""

from __future__ import annotations

import mmap
import os
from typing import Final

__all__ = ["MappedNumber"]

_BYTES: Final = 8


class MappedNumber:
    """The number in the file *path*, 0 in a new one; raises OSError if it can't be mapped.

    Attributes:
        cell: its one element is the number; for who asks too often for a call. Another one once
            it is closed.
    """

    def __init__(self, path: str) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(fd).st_size < _BYTES:
                # Written, not truncated to size: a store into a hole of a full disk is SIGBUS.
                os.pwrite(fd, bytes(_BYTES), 0)
            self._map = mmap.mmap(fd, _BYTES)
        finally:
            os.close(fd)
        # One aligned access of 8 bytes: nobody ever sees half of a number.
        self.cell = memoryview(self._map).cast("Q")

    def get(self) -> int:
        """The number now."""
        return self.cell[0]

    def set(self, number: int) -> None:
        """Change it; unsigned, 64 bits."""
        self.cell[0] = number

    def close(self) -> None:
        """Unmap it; from then on it is 0 and nobody else sees what is set."""
        mapped, self.cell = self.cell, memoryview(bytearray(_BYTES)).cast("Q")
        mapped.release()
        self._map.close()
