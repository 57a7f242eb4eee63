"""Incidents in their order, from where somebody left off: for who tells others of them.

It owns the rule that what is told is told at least once: the place is kept after the telling, so an
incident whose teller was killed is told again, with the same id. A reader that was never there
before begins at the end, or with the first line of a file that isn't there yet.

Thread rule: one thread of one process.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from typing import Final

import msgspec

from ckptgate.engine.events import Event
from ckptgate.model.documents import digest_of

__all__ = ["EventTail", "Told"]

_log = logging.getLogger(__name__)

_LINE_BYTES_MAX: Final = 256 * 1024
"""A longer one is no incident's; it is skipped."""
_ID_CHARS: Final = 16
_HEAD_BYTES: Final = 256
_PLACE_BYTES_MAX: Final = 4096


class _Place(msgspec.Struct, frozen=True, kw_only=True):
    """How far a file was read.

    Attributes:
        inode: which one; a number that is used again.
        head: how it begins, as far as it was read: that tells it from others with that number.
        offset: how much of it.
    """

    inode: int = 0
    head: bytes = b""
    offset: int = 0

    def is_in(self, fd: int) -> bool:
        """Whether that file is the one."""
        return (
            os.fstat(fd).st_ino == self.inode
            and os.fstat(fd).st_size >= self.offset
            and os.pread(fd, len(self.head), 0) == self.head
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """An incident that is to be told.

    Attributes:
        id: the same whenever it is read, another one for each incident.
        event: what happened.
    """

    id: str
    event: Event


class EventTail:
    """Reads on in an events file that others append to, and that is renamed away when it is long.

    Args:
        path: of the file; the one before it is `<path>.1`.
        place_path: where the place is kept.
    """

    def __init__(self, path: str, place_path: str) -> None:
        self._path = path
        self._place_path = place_path
        self._kept = self._read_place()
        self._place = self._kept
        if self._kept is None:
            self._place = self._end()
            self.keep()

    def next(self, limit: int) -> list[Told]:
        """Up to *limit* more incidents; lines that are torn or edited are left out."""
        while True:
            found, is_at_end = self._read(limit)
            if found or is_at_end:
                return found

    def keep(self) -> None:
        """All that `next` returned so far was told; raises nothing: else it is told again."""
        if self._place is None or self._place == self._kept:
            return
        temporary = f"{self._place_path}.new"
        try:
            with open(temporary, "wb") as stream:
                stream.write(msgspec.json.encode(self._place))
            os.replace(temporary, self._place_path)
        except OSError as exc:
            _log.warning("incident-place-not-kept path=%s error=%s", self._place_path, exc)
            return
        self._kept = self._place

    def _read_place(self) -> _Place | None:
        try:
            with open(self._place_path, "rb") as stream:
                return msgspec.json.decode(stream.read(_PLACE_BYTES_MAX), type=_Place)
        except (OSError, msgspec.MsgspecError):
            return None

    def _end(self) -> _Place:
        fd, _ = self._open(_Place())
        if fd < 0:
            return _Place()
        try:
            return _place_at(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    def _read(self, limit: int) -> tuple[list[Told], bool]:
        """What follows in the file of the place, and whether nothing is left anywhere."""
        place = self._place or _Place()
        fd, is_newest = self._open(place)
        if fd < 0:
            return [], True
        try:
            at = place.offset if place.is_in(fd) else 0
            data = os.pread(fd, _LINE_BYTES_MAX, at)
            found, read = _lines(data, at, limit, os.fstat(fd).st_ino)
            if not read and len(data) == _LINE_BYTES_MAX:
                read = len(data)
            self._place = _place_at(fd, at + read)
        finally:
            os.close(fd)
        if read:
            return found, False
        if not is_newest:
            # All of the old file was read, and nobody writes to it any more.
            self._place = _Place()
        return found, is_newest

    def _open(self, place: _Place) -> tuple[int, bool]:
        """The file of *place*; -1 for none. Whether it is the newest.

        If that one is gone the next one that is there, and the newest if there is no place.
        """
        older = f"{self._path}.1"
        for path in (self._path, older) if place.inode else ():
            fd = _opened(path)
            if fd >= 0 and place.is_in(fd):
                return fd, path == self._path
            if fd >= 0:
                os.close(fd)
        if place.inode and (fd := _opened(older)) >= 0:
            return fd, False
        return _opened(self._path), True


def _opened(path: str) -> int:
    """A descriptor, -1 if there is nothing to be read."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return -1


def _place_at(fd: int, offset: int) -> _Place:
    head = os.pread(fd, min(offset, _HEAD_BYTES), 0)
    return _Place(inode=os.fstat(fd).st_ino, head=head, offset=offset)


def _lines(data: bytes, at: int, limit: int, inode: int) -> tuple[list[Told], int]:
    """Up to *limit* incidents of the whole lines in *data*, and how much of it they took."""
    found: list[Told] = []
    begin = 0
    while len(found) < limit and (end := data.find(b"\n", begin)) >= 0:
        line = data[begin:end]
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            event = msgspec.json.decode(line, type=Event)
            found.append(Told(id=_id(inode, at + begin, line), event=event))
        begin = end + 1
    return found, begin


def _id(inode: int, offset: int, line: bytes) -> str:
    return digest_of(b"%d %d %s" % (inode, offset, line))[:_ID_CHARS]
