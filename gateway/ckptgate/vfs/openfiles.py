"""Which handles are open, by handle, node and file: known without asking the spool.

It mirrors the spool's handles, which a successor of this process takes over (`files.reopen_all`).
Any thread; its own lock.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import msgspec

from ckptgate.ports.spool import NO_FILE, HandleRow

__all__ = ["OpenFile", "OpenFiles", "Seen"]

_NONE: Final[Mapping[int, OpenFile]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Seen:
    """Bytes that a descriptor read in the store, and where they begin."""

    offset: int
    data: bytes

    @property
    def end(self) -> int:
        """Where they end."""
        return self.offset + len(self.data)


@dataclass(slots=True, kw_only=True)
class OpenFile:
    """An open handle.

    Attributes:
        row: as the spool keeps it.
        fd: of the spool file; -1 for a plain file that is only in the store.
        is_complete: all bytes were in that file when it was opened; else each range is made whole
            before it is read.
        plain_path: of the latter.
        is_writer: it was opened for writing.
        is_small: a plain file that is only in the store was small at its open; see `following`.
        seen: what was read of it last.
    """

    row: HandleRow
    fd: int
    is_complete: bool
    plain_path: str
    is_writer: bool
    is_small: bool = False
    seen: Seen | None = None

    @property
    def file(self) -> int | None:
        """Id of its bytes, None for those that are only in the store."""
        return None if self.row.file == NO_FILE else self.row.file


class OpenFiles:
    """All open handles of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handles: dict[int, OpenFile] = {}
        self._by_node: dict[int, int] = {}
        self._by_file: dict[int, dict[int, OpenFile]] = {}

    def add(self, handle: OpenFile) -> None:
        """A handle was opened, or taken over."""
        row = handle.row
        with self._lock:
            self._handles[row.fh] = handle
            self._by_node[row.ino] = self._by_node.get(row.ino, 0) + 1
            self._by_file.setdefault(row.file, {})[row.fh] = handle

    def get(self, fh: int) -> OpenFile | None:
        """The handle, None if it isn't open."""
        return self._handles.get(fh)

    def pop(self, fh: int) -> OpenFile | None:
        """The handle is gone; returns what it was."""
        with self._lock:
            handle = self._handles.pop(fh, None)
            if handle is None:
                return None
            row = handle.row
            left = self._by_node[row.ino] - 1
            if left:
                self._by_node[row.ino] = left
            else:
                del self._by_node[row.ino]
            of_file = self._by_file[row.file]
            del of_file[fh]
            if not of_file:
                del self._by_file[row.file]
            return handle

    def closed(self, fh: int) -> None:
        """Its opener closed it."""
        with self._lock:
            handle = self._handles.get(fh)
            if handle is not None:
                handle.row = msgspec.structs.replace(handle.row, is_closed=True)

    def count(self, ino: int) -> int:
        """How many handles of this node are open."""
        return self._by_node.get(ino, 0)

    def has_file(self, file: int) -> bool:
        """Whether a handle is open on these bytes."""
        return file in self._by_file

    def is_written(self, file: int, *, but: int = 0) -> bool:
        """Whether a process has these bytes open that opened them for writing.

        Args:
            file: id of the bytes.
            but: a handle that doesn't count.
        """
        with self._lock:
            for fh, item in self._by_file.get(file, _NONE).items():
                if fh != but and not item.row.is_closed:
                    return True
        return False
