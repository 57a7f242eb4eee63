"""What the spool takes of its disk, counted without a walk: see `ports.spool.Files.allocated`.

A directory is read again only when a name in it was made or removed, and only files that somebody
has open are looked at each time: no other file grows. What the store shares by a hard link counts
for nothing, as the spool's part of it wins nothing. Thread rule: any thread.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

__all__ = ["Usage"]

_BLOCK_BYTES: Final = 512
_FORGET_S: Final = 600.0
"""After so long all is read again: other processes change names, too."""
_TICK_NS: Final = 50_000_000
"""Two changes of a directory within a tick of the kernel's clock have one time stamp."""


@dataclass(slots=True)
class _Directory:
    stamp: tuple[int, bool] = (-1, True)
    sizes: dict[str, int] = field(default_factory=dict[str, int])
    total: int = 0


class Usage:
    """Allocated bytes of the files below some directories."""

    def __init__(self, directories: Iterable[str]) -> None:
        self._lock = threading.Lock()
        self._known = {path: _Directory() for path in directories}
        self._open: frozenset[str] = frozenset()
        self._changed: set[str] = set()
        self._forgotten_s = time.monotonic()

    def changed(self, path: str) -> None:
        """This file's names or bytes have changed without a change of its directory."""
        with self._lock:
            self._changed.add(path)

    def count(self, opened: Iterable[str], others: Iterable[str] = ()) -> int:
        """Bytes now.

        Args:
            opened: paths of files that somebody has open.
            others: files elsewhere that count, too.
        """
        now = frozenset(opened)
        with self._lock:
            if time.monotonic() - self._forgotten_s > _FORGET_S:
                self._forgotten_s = time.monotonic()
                self._known = {path: _Directory() for path in self._known}
            for path, directory in self._known.items():
                self._refresh(path, directory)
            # What was closed since may have grown before.
            for path in now | self._open | self._changed:
                self._restat(path)
            self._open = now
            self._changed.clear()
            total = sum(directory.total for directory in self._known.values())
        return total + sum(_allocated(path) for path in others)

    @staticmethod
    def _refresh(path: str, directory: _Directory) -> None:
        try:
            mtime_ns = os.stat(path).st_mtime_ns
        except FileNotFoundError:
            return
        if directory.stamp == (mtime_ns, False):
            return
        directory.stamp = (mtime_ns, time.time_ns() - mtime_ns < _TICK_NS)
        with os.scandir(path) as found:
            directory.sizes = {entry.name: _allocated(entry.path) for entry in found}
        directory.total = sum(directory.sizes.values())

    def _restat(self, path: str) -> None:
        parent, name = os.path.split(path)
        directory = self._known.get(parent)
        if directory is None or name not in directory.sizes:
            return
        size = _allocated(path)
        directory.total += size - directory.sizes[name]
        directory.sizes[name] = size


def _allocated(path: str) -> int:
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return 0
    return found.st_blocks * _BLOCK_BYTES if found.st_nlink == 1 else 0
