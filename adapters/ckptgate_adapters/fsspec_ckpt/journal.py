"""Which handles clients have, in a file of the spool: a daemon's successor goes on with them.

Owns the rule when handles are still what they were: as long as the file is the same, which its
epoch tells. Who runs the spool anew removes it. A record is written by one write(2), so a kill
leaves whole records or a torn tail that is ignored; a power loss ends all clients anyway. The last
of those that were closed are kept, too: a close that is sent again was done if it is among them.

Any thread.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

__all__ = ["JOURNAL_FILE", "Journal", "Owner", "owners_in"]

JOURNAL_FILE: Final = "clients.opens"
_HEAD: Final = struct.Struct("<16s")
_RECORD: Final = struct.Struct("<QQQ16s")
_SLACK: Final = 65536
"""So many records of handles that are gone are kept before the file is written anew."""
_NO_SESSION: Final = bytes(16)
_CLOSED: Final = (1 << 64) - 1
"""In the place of a start time: the handle was closed."""
_READER: Final = 1 << 63
"""Added to a process's number: the handle is one to read by."""
_CLOSED_KEPT: Final = 4096
"""More than can be in the midst of being asked for again."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose a handle is: its process (0 if unknown) with its start time, and its session's id."""

    pid: int
    start: int
    session: str


class Journal:
    """The handles of clients."""

    def __init__(self, spool_path: str) -> None:
        self._path = os.path.join(spool_path, JOURNAL_FILE)
        self._lock = threading.Lock()
        self._open: dict[int, Owner] = {}
        self._readers: set[int] = set()
        self._closed: dict[int, str] = {}
        self._records = 0
        data = _read(self._path)
        is_known = len(data) >= _HEAD.size
        self._epoch = data[: _HEAD.size] if is_known else secrets.token_bytes(_HEAD.size)
        if is_known:
            self._replay(data[_HEAD.size :])
        self._fd = -1
        self._write_anew()

    @property
    def epoch(self) -> str:
        """It is another one when handles of before are gone."""
        return self._epoch.hex()

    def owners(self) -> dict[int, Owner]:
        """Handle -> whose it is."""
        with self._lock:
            return dict(self._open)

    def is_writer(self, fh: int) -> bool:
        """Whether a handle that is open is one to write by."""
        with self._lock:
            return fh not in self._readers

    def add(self, fh: int, owner: Owner, *, is_writer: bool) -> None:
        """A handle was opened."""
        with self._lock:
            self._note_open(fh, owner, is_writer=is_writer)
            self._append(_open_record(fh, owner, is_writer=is_writer))

    def _note_open(self, fh: int, owner: Owner, *, is_writer: bool) -> None:
        self._closed.pop(fh, None)
        self._open[fh] = owner
        if is_writer:
            self._readers.discard(fh)
        else:
            self._readers.add(fh)

    def drop(self, fh: int, *, is_closed: bool = False) -> None:
        """A handle is gone; *is_closed*: its client closed it, and that counts."""
        with self._lock:
            owner = self._open.pop(fh, None)
            self._readers.discard(fh)
            if owner is None:
                return
            if is_closed:
                self._note_closed(fh, owner.session)
            self._append(_closed_record(fh, owner.session) if is_closed else _gone_record(fh))
            if self._records > _SLACK + 2 * len(self._open):
                self._write_anew()

    def was_closed(self, fh: int, session: str) -> bool:
        """Whether this session closed the handle, lately."""
        with self._lock:
            return self._closed.get(fh) == session

    def _note_closed(self, fh: int, session: str) -> None:
        self._closed[fh] = session
        while len(self._closed) > _CLOSED_KEPT:
            del self._closed[next(iter(self._closed))]

    def close(self) -> None:
        """Stop writing."""
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def _append(self, record: bytes) -> None:
        if self._fd >= 0:
            os.write(self._fd, record)
            self._records += 1

    def _replay(self, data: bytes) -> None:
        for fh, pid, start, session in _records(data):
            if start != _CLOSED and session != _NO_SESSION:
                self._note_open(fh, _owner_of(pid, start, session), is_writer=pid < _READER)
                continue
            self._open.pop(fh, None)
            self._readers.discard(fh)
            if start == _CLOSED:
                self._note_closed(fh, session.hex())

    def _write_anew(self) -> None:
        """Replace the file by one of what is known; the new one is appended to."""
        temporary = f"{self._path}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600)
        records = [
            _open_record(fh, owner, is_writer=fh not in self._readers)
            for fh, owner in self._open.items()
        ]
        records += [_closed_record(fh, session) for fh, session in self._closed.items()]
        os.write(fd, self._epoch + b"".join(records))
        os.replace(temporary, self._path)
        old, self._fd = self._fd, fd
        self._records = len(records)
        if old >= 0:
            with contextlib.suppress(OSError):
                os.close(old)


def owners_in(spool_path: str) -> list[Owner]:
    """Whose the handles are that are open now, one each, as another process may ask."""
    found: dict[int, Owner] = {}
    for fh, pid, start, session in _records(
        _read(os.path.join(spool_path, JOURNAL_FILE))[_HEAD.size :]
    ):
        if session == _NO_SESSION or start == _CLOSED:
            found.pop(fh, None)
        else:
            found[fh] = _owner_of(pid, start, session)
    return list(found.values())


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except FileNotFoundError:
        return b""


def _records(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """The whole ones."""
    whole = len(data) - len(data) % _RECORD.size
    yield from _RECORD.iter_unpack(data[:whole])


def _owner_of(pid: int, start: int, session: bytes) -> Owner:
    return Owner(pid & ~_READER, start, session.hex())


def _open_record(fh: int, owner: Owner, *, is_writer: bool) -> bytes:
    pid = owner.pid if is_writer else owner.pid | _READER
    return _RECORD.pack(fh, pid, owner.start, bytes.fromhex(owner.session))


def _gone_record(fh: int) -> bytes:
    return _RECORD.pack(fh, 0, 0, _NO_SESSION)


def _closed_record(fh: int, session: str) -> bytes:
    return _RECORD.pack(fh, 0, _CLOSED, bytes.fromhex(session))
