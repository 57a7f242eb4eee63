"""Which files the kernel has open, in which I/O mode, with which backing id; survives the process.

Owns the rules of kernel passthrough: one backing id an inode, the mode fixed while the inode is
open, the id closed with the last handle. `BackingTable` is the list (with its journal), `Backing`
decides. Any thread; one lock, held for no longer than an ioctl.

A journal record is 40 bytes written by one write(2), so a kill leaves whole records or a torn tail
that is ignored. It needn't survive a power loss: neither does the kernel session.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from ckptgate.vfs.interface import Opened
from ckptgate_adapters.fuse import wire
from ckptgate_adapters.fuse.wire import OpenFlag

__all__ = ["Backing", "BackingTable", "OpenInode"]

_log = logging.getLogger(__name__)

_RECORD: Final = struct.Struct("<IiQQQQ")
_ADD: Final = 1
_DROP: Final = 2
_CLOSED: Final = 3
_COMPACT_SLACK: Final = 4096
_PASSES: Final = int(OpenFlag.PASSTHROUGH)
_PASSES_DIRECT: Final = int(OpenFlag.PASSTHROUGH | OpenFlag.DIRECT_IO)
_OFF_FOR_GOOD: Final = frozenset({
    errno.EPERM,
    errno.ELOOP,
    errno.EOPNOTSUPP,
    errno.ENOTTY,
    errno.ENOSYS,
    errno.EINVAL,
})  # fmt: skip
"""What BACKING_OPEN says when it will never work on this mount."""


@dataclass(slots=True)
class OpenInode:
    """An inode that the kernel has open.

    Attributes:
        backing_id: passthrough mode with this id; 0 is cached mode.
        file_ino: inode number of the backing file.
        handles: handle -> id of the request that opened it.
    """

    backing_id: int
    file_ino: int
    handles: dict[int, int] = field(default_factory=dict[int, int])


class BackingTable:
    """Open inodes, kept in a journal. Not thread-safe: `Backing` holds the lock.

    Attributes:
        inodes: what is open.
        unclosed: ids without a user that may still be registered (a kill came in between).
    """

    def __init__(self, path: str | None) -> None:
        """Load the journal at *path* and compact it; None keeps nothing."""
        self.inodes: dict[int, OpenInode] = {}
        self.unclosed: set[int] = set()
        self._path = path
        self._fd = -1
        self._records = 0
        if path is not None:
            self._load(path)
            self._compact()

    def _load(self, path: str) -> None:
        try:
            with open(path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            return
        whole = len(data) - len(data) % _RECORD.size
        for op, backing_id, ino, fh, request, file_ino in _RECORD.iter_unpack(data[:whole]):
            if op == _ADD:
                self._add(ino, fh, request, backing_id, file_ino)
            elif op == _DROP:
                self.unclosed.add(self._drop(ino, fh))
            elif op == _CLOSED:
                self.unclosed.discard(backing_id)
        self.unclosed.discard(0)

    def _compact(self) -> None:
        assert self._path is not None
        data = b"".join(
            _RECORD.pack(_ADD, item.backing_id, ino, fh, request, item.file_ino)
            for ino, item in self.inodes.items()
            for fh, request in item.handles.items()
        )
        temporary = f"{self._path}.tmp"
        fd = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        os.write(fd, data)
        os.replace(temporary, self._path)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd
        self._records = len(data) // _RECORD.size

    def _write(self, *record: int) -> None:
        if self._fd < 0:
            return
        try:
            if os.write(self._fd, _RECORD.pack(*record)) != _RECORD.size:
                self._give_up(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
                return
            self._records += 1
            if self._records > 4 * len(self.inodes) + _COMPACT_SLACK and not self.unclosed:
                self._compact()
        except OSError as exc:
            self._give_up(exc)

    def _give_up(self, exc: OSError) -> None:
        """Go on without a journal (the disk is full): a successor finds none and trusts nothing."""
        assert self._path is not None
        _log.warning("open-files-journal-lost path=%s reason=%s", self._path, exc.strerror)
        os.unlink(self._path)
        self.close()

    def _add(self, ino: int, fh: int, request: int, backing_id: int, file_ino: int) -> None:
        item = self.inodes.setdefault(ino, OpenInode(backing_id, file_ino))
        item.handles[fh] = request

    def _drop(self, ino: int, fh: int) -> int:
        item = self.inodes.get(ino)
        if item is None or item.handles.pop(fh, None) is None or item.handles:
            return 0
        del self.inodes[ino]
        return item.backing_id

    def add(self, ino: int, fh: int, request: int, backing_id: int, file_ino: int) -> None:
        """A handle is open; on return it is in the journal."""
        self._add(ino, fh, request, backing_id, file_ino)
        self._write(_ADD, backing_id, ino, fh, request, self.inodes[ino].file_ino)

    def drop(self, ino: int, fh: int) -> int:
        """A handle is gone; returns the backing id that has lost its last user, or 0."""
        freed = self._drop(ino, fh)
        if freed:
            self.unclosed.add(freed)
        self._write(_DROP, 0, ino, fh, 0, 0)
        return freed

    def closed(self, backing_id: int) -> None:
        """The kernel has forgotten this id."""
        self.unclosed.discard(backing_id)
        self._write(_CLOSED, backing_id, 0, 0, 0, 0)

    def forget_request(self, ino: int, request: int, *, but: int) -> None:
        """A request that is done again: the handle of its first try never reached the kernel.

        Args:
            ino: node that it opened.
            request: its id.
            but: the handle that it has now.
        """
        item = self.inodes.get(ino)
        if item is None:
            return
        for fh in [fh for fh, known in item.handles.items() if known == request and fh != but]:
            # The inode's own mode must survive: the new handle is there already.
            del item.handles[fh]
            self._write(_DROP, 0, ino, fh, 0, 0)

    def close(self) -> None:
        """Close the journal; it stays on disk."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Backing:
    """Decides for each open how the kernel does its I/O.

    Attributes:
        state: `on`, `off`, or `off: <why>`.
        is_on: new inodes may pass through.
    """

    def __init__(
        self,
        table: BackingTable,
        *,
        register: Callable[[int], int],
        unregister: Callable[[int], None],
        told: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """Start with passthrough off.

        Args:
            table: what is open.
            register: BACKING_OPEN of a descriptor, returns the id.
            unregister: BACKING_CLOSE of an id.
            told: hears whether new inodes may pass through, whenever that changes.
        """
        self._told = told
        self._turn("off", is_on=False)
        self.is_doubtful = False
        self._table = table
        self._register = register
        self._unregister = unregister
        self._lock = threading.Lock()

    def enable(self) -> None:
        """Passthrough was negotiated."""
        self._turn("on", is_on=True)

    def distrust(self) -> None:
        """The session is older than the table: no mode of any inode is known for sure.

        Files are then served by direct I/O, which the kernel allows beside cached files. An open
        of a file that was passing before is EIO until all its old descriptors are closed.
        """
        self.is_doubtful = True
        self._turn("off: files that are open from before are not known", is_on=False)
        _log.warning("passthrough-off reason=open-files-unknown")

    def _turn(self, state: str, *, is_on: bool) -> None:
        self.is_on, self.state = is_on, state
        self._told(is_on)

    def finish_closes(self) -> None:
        """Close ids that a killed process had no more time to close."""
        with self._lock:
            for backing_id in sorted(self._table.unclosed):
                self._close(backing_id)

    def attach(self, ino: int, opened: Opened, flags: int, request: int) -> tuple[int, int]:
        """The `open_flags` and backing id with which an open is answered.

        Passthrough needs a complete file. An inode that is open in one mode stays in it, because
        the kernel fails an open in the other. What cannot pass although its inode does (it is
        incomplete, or has another spool file) names the inode's id and asks for direct I/O: READ
        and WRITE then come here, and only mappings pass. O_DIRECT on a passing inode is answered
        the same way: the kernel would apply the spool file system's alignment rules to each write.

        Args:
            ino: the node.
            opened: its descriptor.
            flags: of open(2).
            request: id of the request, the same when it is sent again.
        """
        if self.is_doubtful:
            return OpenFlag.DIRECT_IO, 0
        can_pass = opened.is_complete and opened.fd >= 0
        file_ino = os.fstat(opened.fd).st_ino if can_pass else 0
        with self._lock:
            item = self._table.inodes.get(ino)
            if item is not None:
                backing_id, can_pass = item.backing_id, file_ino == item.file_ino
            else:
                backing_id = self._try_register(opened.fd) if can_pass and self.is_on else 0
            self._table.add(ino, opened.fh, request, backing_id, file_ino)
            self._table.forget_request(ino, request, but=opened.fh)
        if not backing_id and opened.is_direct:
            # Of a cached file the kernel gives no more than the size that it knows.
            return OpenFlag.DIRECT_IO, 0
        if not backing_id:
            return (OpenFlag.KEEP_CACHE if opened.keep_cache else 0), 0
        is_direct = not can_pass or flags & os.O_DIRECT
        return _PASSES_DIRECT if is_direct else _PASSES, backing_id

    def detach(self, ino: int, fh: int) -> None:
        """A handle was released."""
        with self._lock:
            freed = self._table.drop(ino, fh)
            if freed:
                self._close(freed)

    def _close(self, backing_id: int) -> None:
        """Close an id; one that can't be closed is tried again by a successor."""
        try:
            self._unregister(backing_id)
        except OSError as exc:
            # The release of a file, or the start of a successor, must not depend on it.
            _log.warning("backing-id-not-closed id=%d reason=%s", backing_id, exc.strerror)
            return
        self._table.closed(backing_id)

    def close(self) -> None:
        """Close the journal."""
        with self._lock:
            self._table.close()

    def _try_register(self, fd: int) -> int:
        try:
            return self._register(fd)
        except OSError as exc:
            name = errno.errorcode.get(exc.errno or 0, str(exc.errno))
            if exc.errno not in _OFF_FOR_GOOD:
                _log.warning("passthrough-refused reason=%s", name)
                return 0
            self._turn(f"off: {name}", is_on=False)
            hint = {
                errno.EPERM: "needs CAP_SYS_ADMIN in the initial user namespace",
                errno.ELOOP: "spool is on a stacked file system: mount with max_stack_depth 2",
            }.get(exc.errno, "needs Linux 6.9 or newer and a plain file system")
            _log.warning("passthrough-off reason=%s hint=%r", name, hint)
            return 0


def journal_path(state_path: str | None) -> str | None:
    """Where a session's open files are listed."""
    return None if state_path is None else f"{state_path}.opens"


# The record must stay small enough for one atomic write(2).
assert _RECORD.size == 40
assert wire.OPEN_OUT.size == 16
