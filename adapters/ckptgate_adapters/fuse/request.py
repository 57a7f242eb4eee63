"""A request and its reply, and what the operations share.

Owns one rule: a mutation and the memory of its reply are one transaction (`mutate`).

A request belongs to one thread at a time; `Context` is shared by all.
"""

from __future__ import annotations

import errno
import logging
import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from ckptgate.vfs.interface import Caller, FileSystem, Opened
from ckptgate_adapters.fuse import wire
from ckptgate_adapters.fuse.opens import Backing
from ckptgate_adapters.fuse.session import MAX_IO_BYTES, FuseSession
from ckptgate_adapters.fuse.wire import Buffer

__all__ = [
    "EMPTY",
    "SILENT",
    "Buffer",
    "Context",
    "Handle",
    "Operation",
    "Reply",
    "Request",
    "mutate",
    "pages",
]

_log = logging.getLogger(__name__)


def pages(size: int) -> memoryview:
    """A buffer on a page boundary: the kernel copies to and from it half as fast elsewhere."""
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


@dataclass(slots=True)
class Request:
    """One request of the kernel.

    Attributes:
        opcode: what it asks.
        unique: its number, as received.
        node: node id that it is about.
        uid, gid, pid: who asks.
        body: what follows the header; of a WRITE its struct only.
        payload: bytes of a WRITE, valid until the thread reads again (see `own`).
        may_block: it is on the pool.
        began_s: when it was read, by the monotonic clock.
    """

    opcode: int
    unique: int
    node: int
    uid: int
    gid: int
    pid: int
    body: bytes
    payload: Buffer = b""
    may_block: bool = False
    began_s: float = 0.0

    @property
    def caller(self) -> Caller:
        """Who asks, as the file system wants it; made anew by each use: most bytes need none."""
        return Caller(self.uid, self.gid, self.pid, self.may_block)

    @property
    def is_resent(self) -> bool:
        """The kernel had sent it to a process that died."""
        return bool(self.unique & wire.UNIQUE_RESENT)

    def own(self) -> None:
        """Copy what lies in the reading thread's buffer."""
        if not isinstance(self.payload, bytes):
            self.payload = bytes(self.payload)


@dataclass(slots=True)
class Reply:
    """What goes back.

    Attributes:
        parts: the body.
        settle: nodes that other machines should know of before the caller goes on.
        undo: called if the kernel no longer wants the reply.
        is_silent: nothing is sent.
    """

    parts: tuple[Buffer, ...] = ()
    settle: tuple[int, ...] = ()
    undo: Callable[[], None] | None = None
    is_silent: bool = False


EMPTY: Final = Reply()
SILENT: Final = Reply(is_silent=True)


@dataclass(slots=True)
class Handle:
    """An open file as the driver needs it.

    Attributes:
        ino, fd, is_complete: as `Opened` says.
        is_reader: it is known to be open for reading only.
    """

    ino: int
    fd: int
    is_complete: bool
    is_reader: bool


@dataclass(slots=True)
class Context:
    """What operations work with. Any thread.

    Attributes:
        fs: the served file system.
        session: the kernel session.
        backing: I/O modes of open inodes.
        now_ns: wall clock, ns.
        passthrough: ask for it at INIT.
        handles: files that this process opened or took over.
        directories: handle as the kernel knows it -> handle of `fs`.
    """

    fs: FileSystem
    session: FuseSession
    backing: Backing
    now_ns: Callable[[], int]
    passthrough: bool
    handles: dict[int, Handle] = field(default_factory=dict[int, Handle])
    directories: dict[int, int] = field(default_factory=dict[int, int])
    on_init: Callable[[], None] = lambda: None
    _scratch: threading.local = field(default_factory=threading.local)

    def keep(self, ino: int, opened: Opened, *, is_reader: bool = False) -> Handle:
        """Remember an open file."""
        handle = Handle(ino, opened.fd, opened.is_complete, is_reader)
        self.handles[opened.fh] = handle
        return handle

    def handle(self, ino: int, fh: int) -> Handle:
        """An open file, taken over from a previous process if need be.

        Raises:
            OSError: EBADF, nobody knows it.
        """
        known = self.handles.get(fh)
        if known is not None:
            return known
        opened = self.fs.reopen(fh)
        if opened is None:
            msg = f"handle {fh} of node {ino} is not open"
            raise OSError(errno.EBADF, msg)
        return self.keep(ino, opened)

    def scratch(self, size: int) -> memoryview:
        """*size* bytes of a buffer of this thread, valid until the next call in it."""
        buffer: memoryview | None = getattr(self._scratch, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = pages(max(size, MAX_IO_BYTES))
            self._scratch.buffer = buffer
        return buffer[:size]


Operation: TypeAlias = Callable[[Context, Request], Reply]


def mutate(context: Context, request: Request, action: Callable[[Caller], bytes]) -> bytes:
    """Do *action* exactly once for this request, however often it is sent; returns its reply.

    The reply is kept in the action's own transaction. A request that comes again after a restart
    gets the kept reply; if none was kept, the action had not happened.
    """
    fs = context.fs
    request_id = context.session.request_id(request.unique)
    caller = Caller(request.uid, request.gid, request.pid, request.may_block, request_id)
    with fs.atomic(caller):
        if request.is_resent:
            kept = fs.replay(caller)
            if kept is not None:
                _log.info("request-replayed opcode=%d unique=%#x", request.opcode, request.unique)
                return kept
        reply = action(caller)
        fs.remember(caller, reply)
    return reply
