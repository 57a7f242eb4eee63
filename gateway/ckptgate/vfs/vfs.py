"""The file system that drivers call: `Vfs`. Its parts are the modules beside it.

It adds to them that every mutation is atomic, the start of a session, and the root directory.
Any thread.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from ckptgate.errors import CkptError, MissingError
from ckptgate.model.kinds import NamePatterns
from ckptgate.model.states import UNDECIDED
from ckptgate.ports.catalog import Catalog, Invalidations, Waker
from ckptgate.ports.clock import Clock
from ckptgate.ports.spool import ROOT_INO, AttemptRow, NodeKind, NodeRow, Spool
from ckptgate.vfs import (
    directories,
    events,
    files,
    handles,
    listing,
    lookup,
    mutate,
    plain,
    renames,
    revisions,
    room,
    syncing,
    triggers,
    unused,
    waits,
)
from ckptgate.vfs.context import TAKEOVER, Context
from ckptgate.vfs.identify import Identify
from ckptgate.vfs.interface import (
    Attr,
    Caller,
    DirEntry,
    Entry,
    FsStats,
    Opened,
    SetAttr,
)
from ckptgate.vfs.liveness import sweep_dead_handles
from ckptgate.vfs.releases import Releases
from ckptgate.vfs.settings import VfsSettings
from ckptgate.vfs.standins import node_of

__all__ = ["Vfs"]


class Vfs:
    """`interface.FileSystem` over a spool and a catalog."""

    def __init__(
        self,
        *,
        spool: Spool,
        catalog: Catalog,
        waker: Waker,
        clock: Clock,
        patterns: NamePatterns,
        identify: Identify,
        settings: VfsSettings | None = None,
        invalidations: Invalidations | None = None,
    ) -> None:
        self._ctx = Context(
            spool=spool,
            catalog=catalog,
            waker=waker,
            clock=clock,
            patterns=patterns,
            identify=identify,
            settings=settings or VfsSettings(),
            invalidations=invalidations,
        )
        self._releases = Releases(self._ctx)
        self._ctx.take_close_over = partial(handles.take_over, self._ctx)
        handles.recover(self._ctx)
        self._make_root()

    def _make_root(self) -> None:
        """Have a root directory, with the mode and owner of the store's once they are known."""
        spool = self._ctx.spool
        if spool.get_meta("vfs.root") is not None:
            return
        try:
            entry = self._ctx.catalog.plain_stat("")
        except CkptError:
            entry = None
        now = self._ctx.clock.now_ns()
        with spool.transaction():
            if spool.node(ROOT_INO) is None:
                spool.add_node(
                    NodeRow(
                        ino=ROOT_INO,
                        kind=NodeKind.DIR,
                        attempt=None,
                        mode=0o755,
                        uid=os.geteuid(),
                        gid=os.getegid(),
                        size=0,
                        mtime_ns=now,
                        ctime_ns=now,
                        plain_path="",
                    )
                )
            if entry is not None:
                spool.update_node(ROOT_INO, mode=entry.mode & 0o7777, uid=entry.uid, gid=entry.gid)
                spool.set_meta("vfs.root", "taken from the store")

    def start_session(self, *, is_takeover: bool) -> None:
        """Called once before the first request.

        Args:
            is_takeover: the kernel knows nodes and handles of a predecessor. Else nothing is known
                to it, and what has no name is dropped.
        """
        ctx = self._ctx
        if ctx.settings.close_delay_s:
            ctx.closes.start(ctx.apply_closes, ctx.settings.close_delay_s)
        if is_takeover:
            ctx.memory.is_inherited = True
            ctx.done_now(TAKEOVER)
            files.reopen_all(ctx)
        else:
            for row in ctx.spool.nameless_nodes():
                unused.drop_if_unused(ctx, row.ino)
        sweep_dead_handles(ctx)

    def node_replaced(self, ino: int) -> None:
        """The publisher took the name from a node: it goes once nobody uses it."""
        unused.drop_if_unused(self._ctx, ino, is_forgotten=False)

    def atomic(self, caller: Caller) -> AbstractContextManager[None]:
        """A mutation and `remember` inside are one transaction.

        It is begun by the first change, when nothing blocks any more.
        """
        del caller
        return self._ctx.atomic()

    def replay(self, caller: Caller) -> bytes | None:
        """The reply of this request if it was done already."""
        if caller.request is None:
            return None
        return self._ctx.spool.remembered_reply(caller.request)

    def remember(self, caller: Caller, reply: bytes) -> None:
        """Keep the reply for `replay`."""
        if caller.request is not None:
            with self._ctx.change():
                self._ctx.spool.remember_reply(caller.request, reply)

    def settle(self, caller: Caller, ino: int, *, is_close: bool = False) -> None:
        """Wait until other nodes can know of a mutation of this node."""
        waits.settle(self._ctx, caller, node_of(ino), is_close=is_close)

    def must_settle(self, ino: int, *, is_close: bool = False) -> bool:
        """Whether `settle` would wait."""
        return waits.must_settle(self._ctx, node_of(ino), is_close=is_close)

    def lookup(self, caller: Caller, parent: int, name: str) -> Entry:
        """What a name means to the caller."""
        return lookup.lookup(self._ctx, caller, parent, name)

    def looked_up(self, nodes: Sequence[int]) -> None:
        """Entries of these nodes went to the kernel with a listing."""
        lookup.looked_up(self._ctx, nodes)

    def forget(self, nodes: Sequence[tuple[int, int]]) -> None:
        """The kernel dropped look-ups."""
        lookup.forget(self._ctx, [(node_of(ino), count) for ino, count in nodes])

    def getattr(self, caller: Caller, ino: int, fh: int | None) -> Attr:
        """stat(2)."""
        del fh
        node = self._ctx.node(node_of(ino))
        if node.attempt is None:
            node = plain.grown(self._ctx, caller, node)
        return mutate.attr_for(self._ctx, caller, node)

    def setattr(self, caller: Caller, ino: int, changes: SetAttr, fh: int | None) -> Attr:
        """chmod, chown, truncate, utimens."""
        return self._ctx.until_steady(
            partial(mutate.setattr_of, self._ctx, caller, node_of(ino), changes, fh)
        )

    def readlink(self, caller: Caller, ino: int) -> str:
        """A symlink's target."""
        del caller
        node = self._ctx.node(ino)
        if node.kind is not NodeKind.SYMLINK:
            msg = f"node {ino} is not a symlink"
            raise CkptError(msg, errno_value=errno.EINVAL)
        return node.target

    def symlink(self, caller: Caller, parent: int, name: str, target: str) -> Entry:
        """Make a symlink."""
        return self._ctx.until_steady(
            partial(mutate.symlink, self._ctx, caller, node_of(parent), name, target)
        )

    def mkdir(self, caller: Caller, parent: int, name: str, mode: int) -> Entry:
        """Make a directory."""
        return self._ctx.until_steady(
            partial(directories.mkdir, self._ctx, caller, parent, name, mode)
        )

    def unlink(self, caller: Caller, parent: int, name: str) -> None:
        """Remove a file or symlink."""
        self._ctx.until_steady(partial(mutate.unlink, self._ctx, caller, node_of(parent), name))

    def rmdir(self, caller: Caller, parent: int, name: str) -> None:
        """Remove an empty directory."""
        self._ctx.until_steady(partial(directories.rmdir, self._ctx, caller, node_of(parent), name))

    def rename(
        self, caller: Caller, parent: int, name: str, new_parent: int, new_name: str, flags: int
    ) -> None:
        """Rename."""
        places = node_of(parent), name, node_of(new_parent), new_name
        self._ctx.until_steady(partial(renames.rename, self._ctx, caller, *places, flags))

    def create(
        self, caller: Caller, parent: int, name: str, flags: int, mode: int
    ) -> tuple[Entry, Opened]:
        """Make and open a file."""
        return self._ctx.until_steady(
            partial(files.create, self._ctx, caller, node_of(parent), name, flags, mode)
        )

    def open(self, caller: Caller, ino: int, flags: int) -> Opened:
        """Open a file."""
        return self._ctx.until_steady(partial(files.open_file, self._ctx, caller, ino, flags))

    def reopen(self, fh: int) -> Opened | None:
        """A descriptor for a handle of a predecessor of this process, None if it is unknown."""
        return files.reopen(self._ctx, fh)

    def ensure(self, caller: Caller, fh: int, offset: int, length: int) -> None:
        """Have this range verified in the spool file."""
        files.ensure(self._ctx, caller, fh, offset, length)

    def read(self, caller: Caller, fh: int, offset: int, length: int) -> bytes:
        """Bytes of a file that is only in the store."""
        return files.read_plain(self._ctx, caller, fh, offset, length)

    def flush(self, caller: Caller, fh: int) -> bool:
        """A process closed a descriptor; True: a writer, in order."""
        with self._ctx.atomic():
            return handles.flush(self._ctx, caller, fh)

    def release(self, fh: int) -> None:
        """The last descriptor is gone; nobody would hear of a failure, so it is tried again."""
        self._releases.release(fh)

    def give_up(self, fh: int, *, is_removed: bool) -> None:
        """Nobody closes this handle in order; see `interface.ClientFileSystem`."""
        ctx = self._ctx
        with ctx.atomic():
            changed = handles.give_up(ctx, fh, is_removed=is_removed)
        self._releases.release(fh)
        if changed is not None:
            with ctx.change():
                revisions.drop_unchanged(ctx, changed)

    def take_handles_over(self) -> None:
        """Go on with the handles of a predecessor of this process."""
        files.reopen_all(self._ctx)

    def finish_releases(self) -> None:
        """Try again now what could not be noted before."""
        self._releases.again()

    def fsync(self, caller: Caller, fh: int, *, data_only: bool) -> None:
        """On return the file survives a power loss, and its name too."""
        del caller
        syncing.sync(self._ctx, fh, data_only=data_only)

    def write_failed(self, caller: Caller, fh: int, number: int) -> None:
        """A write of this handle failed with the errno *number*."""
        del caller
        syncing.write_failed(self._ctx, fh, number)

    def opendir(self, caller: Caller, ino: int) -> int:
        """Open a directory."""
        return listing.opendir(self._ctx, caller, ino)

    def readdir(
        self, caller: Caller, fh: int, cookie: int, *, with_entries: bool = True
    ) -> Iterable[DirEntry]:
        """Entries after *cookie*."""
        return listing.readdir(self._ctx, caller, fh, cookie, with_entries=with_entries)

    def releasedir(self, fh: int) -> None:
        """Close a directory."""
        listing.releasedir(self._ctx, fh)

    def fsyncdir(self, caller: Caller, ino: int) -> None:
        """On return its names survive a power loss."""
        del caller, ino
        self._ctx.apply_closes()
        self._ctx.spool.make_durable()

    def statfs(self, caller: Caller) -> FsStats:
        """The spool's file system, that is where writes go, or the spool's limit in it."""
        del caller
        return room.stats(self._ctx)

    def getxattr(self, caller: Caller, ino: int, name: str) -> bytes:
        """An extended attribute."""
        return triggers.getxattr(self._ctx, caller, node_of(ino), name)

    def setxattr(self, caller: Caller, ino: int, name: str, value: bytes, flags: int) -> None:
        """Say something of a checkpoint, or keep a user's own attribute."""
        self._ctx.until_steady(
            partial(triggers.setxattr, self._ctx, caller, node_of(ino), name, value, flags)
        )

    def listxattr(self, caller: Caller, ino: int) -> Sequence[str]:
        """Names of the users' own extended attributes."""
        del caller
        return triggers.listxattr(self._ctx, node_of(ino))

    def removexattr(self, caller: Caller, ino: int, name: str) -> None:
        """Drop a user's own attribute."""
        del caller
        self._ctx.until_steady(partial(triggers.removexattr, self._ctx, node_of(ino), name))

    def commit_explicit(
        self, run: str, name: str, rank: int | None, world_size: int | None, *, is_all: bool = False
    ) -> AttemptRow:
        """Commit the newest undecided attempt of that name explicitly.

        Raises:
            MissingError: there is none in this spool.
            UsageError: impossible ranks.
            RefusedError: see `record_explicit_commit`.
        """
        rows = self._ctx.spool.attempts(run=run, name=name, states=UNDECIDED)
        if not rows:
            msg = f"no undecided attempt at {name!r} in run {run!r}"
            raise MissingError(msg, subject=name, hint="ckptgate status")
        with self._ctx.change():
            return events.commit_explicitly(self._ctx, rows[-1].id, rank, world_size, is_all=is_all)
