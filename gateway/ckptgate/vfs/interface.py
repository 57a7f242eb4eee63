"""The file system as drivers see it: values and the `FileSystem` protocol.

Thread rule: any thread. A call whose caller has `may_block` false never touches the store and never
waits: it raises WouldBlockError instead, having changed nothing, and the driver repeats it with
`may_block` on a thread of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from ckptgate.ports.spool import NodeKind

__all__ = [
    "HELD",
    "Attr",
    "Caller",
    "ClientFileSystem",
    "DirEntry",
    "Entry",
    "FileSystem",
    "FsStats",
    "Opened",
    "SetAttr",
]

HELD: Final = 1 << 40
"""A flag of `create` and `open`: what is written is nobody's but its job's until it is closed.

Outside of checkpoints it is a whole file then, whatever its name. Inside of one a new file is its
job's anyway, and a file that is there can't be emptied so (EEXIST): the new version gets another
name, and a rename.
"""


class Caller(msgspec.Struct, frozen=True, gc=False):
    """Who asks.

    Attributes:
        uid, gid: credentials.
        pid: thread id in our pid namespace; 0 if it is in another one.
        may_block: the call may wait and touch the store.
        request: the request's id if it may be sent again after a restart, else None.
    """

    uid: int
    gid: int
    pid: int
    may_block: bool = False
    request: int | None = None


class Attr(msgspec.Struct, frozen=True, gc=False):
    """stat(2) of a node. `mode` holds permission bits only; times in ns."""

    ino: int
    kind: NodeKind
    mode: int
    nlink: int
    uid: int
    gid: int
    size: int
    blocks: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    timeout_s: float = 1.0


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A name's answer.

    Attributes:
        attr: of the node.
        timeout_s: how long the kernel may keep the name (0: ask each time).
        number: by which the kernel is to know the node; 0: `attr.ino` (see `vfs.standins`).
    """

    attr: Attr
    timeout_s: float
    number: int = 0


@dataclass(frozen=True, slots=True)
class DirEntry:
    """One name of a directory. `entry` is what a look-up of it would answer now.

    `cookie` is the position after it; positions stay valid while the directory is open.
    """

    name: str
    ino: int
    kind: NodeKind
    cookie: int
    entry: Entry | None


class Opened(msgspec.Struct, frozen=True, gc=False):
    """An open file.

    Attributes:
        fh: handle.
        fd: descriptor of the spool file (opened O_RDWR where it may be written), or -1: then every
            READ is asked of the vfs. The vfs owns it until `release`.
        is_complete: all bytes are in the spool file: the driver may let the kernel pass through, or
            read and write *fd* itself. If false, `ensure` comes before each read.
        keep_cache: pages cached at an earlier open are still right.
        is_direct: each read(2) is to be one READ, or several in order, whatever size is known: the
            vfs gives all of them the same version.
    """

    fh: int
    fd: int
    is_complete: bool
    keep_cache: bool = False
    is_direct: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAttr:
    """Changes of attributes; None leaves as is."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None


@dataclass(frozen=True, slots=True)
class FsStats:
    """statfs(2) of the spool's file system."""

    blocks: int
    blocks_free: int
    blocks_available: int
    files: int
    files_free: int
    block_size: int
    fragment_size: int


class FileSystem(Protocol):
    """What a driver calls. Errors are OSErrors with the errno that the caller is to see.

    An open of a name that must first get a new version (a published file is truncated, a pointer is
    rewritten) raises ESTALE once: the kernel looks the name up again and finds the new node.
    """

    def atomic(self, caller: Caller) -> AbstractContextManager[None]:
        """A mutation and `remember(caller, reply)` inside are one transaction."""
        ...

    def replay(self, caller: Caller) -> bytes | None:
        """The reply of this very request if it was already done before a restart."""
        ...

    def remember(self, caller: Caller, reply: bytes) -> None:
        """Keep the reply for `replay`."""
        ...

    def settle(self, caller: Caller, ino: int, *, is_close: bool = False) -> None:
        """Wait (2 s at most) until other nodes can know of a mutation of this node.

        Called after `atomic` ended and before the reply, for create, mkdir, rename, rmdir and a
        writer's flush, with `may_block`; returns at once where there is nothing to wait for (see
        `must_settle`).

        Args:
            caller: who waits.
            ino: the node.
            is_close: close() waits for it: its success promises that other nodes know of the file.

        Raises:
            TransientStoreError: only for `is_close`, after 30 s: the promise can't be kept.
        """
        ...

    def must_settle(self, ino: int, *, is_close: bool = False) -> bool:
        """Whether `settle` would wait; cheap."""
        ...

    def lookup(self, caller: Caller, parent: int, name: str) -> Entry: ...
    def looked_up(self, nodes: Sequence[int]) -> None:
        """`readdir` entries of these nodes went to the kernel: each counts as one look-up.

        (`lookup`, `mkdir`, `symlink` and `create` count by themselves; `readdir` does not, because
        only the driver knows which of its entries were sent.)
        """
        ...

    def forget(self, nodes: Sequence[tuple[int, int]]) -> None:
        """(node, count) pairs: the kernel dropped so many look-ups."""
        ...

    def getattr(self, caller: Caller, ino: int, fh: int | None) -> Attr: ...
    def setattr(self, caller: Caller, ino: int, changes: SetAttr, fh: int | None) -> Attr: ...
    def readlink(self, caller: Caller, ino: int) -> str: ...
    def symlink(self, caller: Caller, parent: int, name: str, target: str) -> Entry: ...
    def mkdir(self, caller: Caller, parent: int, name: str, mode: int) -> Entry: ...
    def unlink(self, caller: Caller, parent: int, name: str) -> None: ...
    def rmdir(self, caller: Caller, parent: int, name: str) -> None: ...
    def rename(
        self, caller: Caller, parent: int, name: str, new_parent: int, new_name: str, flags: int
    ) -> None:
        """`flags` as of renameat2(2): NOREPLACE and EXCHANGE, the latter EINVAL where not meant."""
        ...

    def create(
        self, caller: Caller, parent: int, name: str, flags: int, mode: int
    ) -> tuple[Entry, Opened]: ...
    def open(self, caller: Caller, ino: int, flags: int) -> Opened: ...
    def reopen(self, fh: int) -> Opened | None:
        """A handle that a previous process opened: its descriptor again, under the same number.

        None if it is unknown. Asked when a request comes for a handle that this process did not
        open, and when the reply of an open is sent again.
        """
        ...

    def ensure(self, caller: Caller, fh: int, offset: int, length: int) -> None:
        """Have this range verified in the spool file; for handles that aren't complete."""
        ...

    def read(self, caller: Caller, fh: int, offset: int, length: int) -> bytes:
        """For handles whose `fd` is -1."""
        ...

    def flush(self, caller: Caller, fh: int) -> bool:
        """A process closed a descriptor of this handle; True: a writer, in order (see `settle`)."""
        ...

    def release(self, fh: int) -> None:
        """The last descriptor is gone; unknown handles are ignored (restart)."""
        ...

    def fsync(self, caller: Caller, fh: int, *, data_only: bool) -> None: ...
    def write_failed(self, caller: Caller, fh: int, number: int) -> None:
        """The driver's write to the handle's `fd` failed with the errno *number*."""
        ...

    def opendir(self, caller: Caller, ino: int) -> int: ...
    def readdir(
        self, caller: Caller, fh: int, cookie: int, *, with_entries: bool = True
    ) -> Iterable[DirEntry]:
        """Entries after *cookie* (0: from the start), `.` and `..` among them.

        They are made as they are taken, so that each `entry` is true when the reply is built.
        """
        ...

    def releasedir(self, fh: int) -> None: ...
    def fsyncdir(self, caller: Caller, ino: int) -> None: ...
    def statfs(self, caller: Caller) -> FsStats: ...
    def getxattr(self, caller: Caller, ino: int, name: str) -> bytes: ...
    def setxattr(self, caller: Caller, ino: int, name: str, value: bytes, flags: int) -> None: ...
    def listxattr(self, caller: Caller, ino: int) -> Sequence[str]: ...
    def removexattr(self, caller: Caller, ino: int, name: str) -> None: ...


class ClientFileSystem(FileSystem, Protocol):
    """What a driver needs whose callers tell of their closes themselves, instead of a kernel."""

    def give_up(self, fh: int, *, is_removed: bool) -> None:
        """Nobody will close this handle in order; it is released.

        What was written outside of checkpoints and is held until its close is dropped. A file in a
        checkpoint is torn.

        Args:
            fh: the handle; an unknown one is ignored.
            is_removed: its opener made the file and says that there is to be none: it loses its
                name, too.
        """
        ...

    def take_handles_over(self) -> None:
        """Go on with the handles of a predecessor of this process; before `start_session`."""
        ...
