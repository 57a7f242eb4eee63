"""What all requests of a client have in common: how they are done, and what an answer is.

Owns the rules that a change is done exactly once, however often it is sent, and that what the vfs
answers ESTALE is looked up again, as a kernel would do it. One thread an object.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from ckptgate.ports.catalog import Invalidations
from ckptgate.ports.spool import NodeKind
from ckptgate.vfs.interface import Attr, Caller, ClientFileSystem
from ckptgate_adapters.fsspec_ckpt import messages, wire
from ckptgate_adapters.fsspec_ckpt.journal import Journal
from ckptgate_adapters.fsspec_ckpt.messages import Told
from ckptgate_adapters.fsspec_ckpt.sessions import ClientFile, Session
from ckptgate_adapters.fsspec_ckpt.walking import Walk, walking

__all__ = ["Answer", "Answering", "facts_of"]

_T = TypeVar("_T")
_TRIES: Final = 6
_ID_MASK: Final = (1 << 63) - 1


class Answer(msgspec.Struct):
    """A packet and the descriptor that goes with it; the answer's own one is closed after that."""

    told: Told
    fd: int = -1
    is_own_fd: bool = False


def facts_of(attr: Attr) -> messages.Facts:
    """What a client is told of a node."""
    kind = {NodeKind.FILE: "file", NodeKind.DIR: "dir", NodeKind.SYMLINK: "symlink"}[attr.kind]
    return messages.Facts(
        kind, attr.ino, attr.mode, attr.uid, attr.gid, attr.nlink, attr.size, attr.mtime_ns,
        attr.ctime_ns,
    )  # fmt: skip


class Answering:
    """Of one connection: the client, and what its requests are done with."""

    def __init__(
        self,
        fs: ClientFileSystem,
        session: Session,
        journal: Journal,
        caller: Caller,
        *,
        invalidations: Invalidations | None,
        is_gone: Callable[[], bool],
    ) -> None:
        """Prepare.

        Args:
            fs: what is served.
            session: the client.
            journal: of open files.
            caller: who asks on this connection.
            invalidations: tell a kernel that has the same names.
            is_gone: whether the client has hung up.
        """
        self.fs = fs
        self.session = session
        self.journal = journal
        self.caller = caller
        self.told = invalidations
        self.is_gone = is_gone
        self.unsure = 0
        """The file that the last request opened."""

    def steadily(self, call: Callable[[Walk], _T]) -> _T:
        """What *call* gives; it walks anew where its nodes have become others."""
        for attempt in range(_TRIES):
            try:
                with walking(self.fs, self.caller) as walk:
                    return call(walk)
            except OSError as exc:
                if exc.errno != errno.ESTALE or attempt == _TRIES - 1:
                    raise
        raise AssertionError

    def once(self, request: messages.Request, id: int, call: Callable[[Caller], Told]) -> Told:
        """Do a change and keep its reply in one transaction, or give the reply that was kept."""
        caller = Caller(self.caller.uid, self.caller.gid, self.caller.pid, True, id & _ID_MASK)
        with self.fs.atomic(caller):
            if getattr(request, "is_again", False):
                kept = self.fs.replay(caller)
                if kept is not None:
                    return msgspec.msgpack.decode(kept, type=Told)
            told = call(caller)
            self.fs.remember(caller, wire.encode(told))
        return told

    def kept(self, request: messages.Open) -> Told | None:
        """The reply of a request that was done already."""
        if not request.is_again:
            return None
        caller = Caller(0, 0, 0, True, request.id & _ID_MASK)
        kept = self.fs.replay(caller)
        return None if kept is None else msgspec.msgpack.decode(kept, type=Told)

    def settle(self, *nodes: int, is_close: bool = False) -> None:
        """Wait until other nodes of the job can know of it. Only a close's promise can fail."""
        for ino in nodes:
            try:
                if self.fs.must_settle(ino, is_close=is_close):
                    self.fs.settle(self.caller, ino, is_close=is_close)
            except OSError:
                if is_close:
                    raise

    def changed(self, parent: int, *names: str) -> None:
        if self.told is not None:
            for name in names:
                self.told.name(parent, name)

    def file(self, fh: int) -> ClientFile:
        file = self.session.files.get(fh)
        if file is None:
            msg = "this file is not open any more: the daemon was started anew; open it again"
            raise OSError(errno.EBADF, msg)
        return file
