"""The peer: a pass-through file system written the way mfusepy's users write them.

`python -m bench.peer BACKING MOUNTPOINT`. Path-based, multi-threaded, with positional reads and
writes instead of the seek and lock of its loopback example, which makes it the faster.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import mfusepy

__all__ = ["PassThrough"]

_STAT = (
    "st_atime",
    "st_ctime",
    "st_gid",
    "st_mode",
    "st_mtime",
    "st_nlink",
    "st_size",
    "st_uid",
)


class PassThrough(mfusepy.Operations):  # type: ignore[misc]
    """Every call goes to the same name below another directory."""

    use_ns = True

    def __init__(self, root: str) -> None:
        self._root = root

    def _real(self, path: str) -> str:
        return self._root + path

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = os.lstat(self._real(path)) if fh is None else os.fstat(fh)
        values: dict[str, Any] = {name: getattr(found, name) for name in _STAT}
        # With `use_ns` these are nanoseconds.
        for name in ("st_atime", "st_ctime", "st_mtime"):
            values[name] = getattr(found, f"{name}_ns")
        return values

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._real(path))]

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self._real(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)

    def open(self, path: str, flags: int) -> int:
        return os.open(self._real(path), flags)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(self._real(path) if fh is None else fh, length)
        return 0

    def flush(self, path: str, fh: int) -> int:
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self._real(path))
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._real(path), mode)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._real(path))
        return 0

    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self._real(path), mode)
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        os.utime(self._real(path), ns=times or (time.time_ns(),) * 2)
        return 0


if __name__ == "__main__":
    mfusepy.FUSE(PassThrough(sys.argv[1]), sys.argv[2], foreground=True, nothreads=False)
