"""Large writes to a local file.

Thread rule: any thread.
"""

from __future__ import annotations

import os
from typing import Final

__all__ = ["write_at"]

_WRITE_BYTES: Final = 1 << 20
"""ext4 takes 1 GiB in calls of 64 MiB five to ten times as long as in calls of this."""


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of *data* at *offset*; raises OSError."""
    while data:
        written = os.pwrite(fd, data[:_WRITE_BYTES], offset)
        data, offset = data[written:], offset + written
