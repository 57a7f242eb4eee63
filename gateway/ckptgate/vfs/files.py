"""Creating and opening files, and the handles that this makes.

Owns the rule that a node has one backing file and one mode while it is open. Any thread.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os

import msgspec

from ckptgate.errors import BusyError, CkptError, ExistsError, MissingError
from ckptgate.model.states import AttemptState, FileState
from ckptgate.ports.spool import (
    NO_FILE,
    FileRow,
    HandleRow,
    LocalBytes,
    NodeKind,
    NodeRow,
    PendingKind,
)
from ckptgate.vfs import names, pending, revisions, stored, times, visibility
from ckptgate.vfs.attributes import entry_of, entry_of_new, is_decided
from ckptgate.vfs.bytes import make_file
from ckptgate.vfs.context import Context, Who, stale
from ckptgate.vfs.following import SMALL_BYTES, follow
from ckptgate.vfs.interface import HELD, Caller, Entry, Opened
from ckptgate.vfs.late import READER_WAIT_S
from ckptgate.vfs.openfiles import OpenFile
from ckptgate.vfs.room import await_room, check_room
from ckptgate.vfs.stopping import check_taking
from ckptgate.vfs.writing import file_of, is_frozen, pending_kind, prepare_write

__all__ = ["create", "ensure", "new_node", "open_file", "read_plain", "reopen", "reopen_all"]

_log = logging.getLogger(__name__)

_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_WRITE_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK


def new_node(
    ctx: Context, caller: Caller, parent: NodeRow, kind: NodeKind, mode: int, *, target: str = ""
) -> NodeRow:
    """A new node in the tree of *parent*, without a name yet; inside a change."""
    node = _described(ctx, caller, parent, kind, mode)
    return ctx.spool.add_node(msgspec.structs.replace(node, target=target) if target else node)


def _described(
    ctx: Context,
    caller: Caller,
    parent: NodeRow,
    kind: NodeKind,
    mode: int,
    *,
    name: str = "",
    ino: int = 0,
    file: int | None = None,
) -> NodeRow:
    """What a new node is; *name*: of a file outside checkpoints."""
    now = ctx.clock.now_ns()
    is_set_gid = bool(parent.mode & 0o2000)
    if is_set_gid and kind is NodeKind.DIR:
        mode |= 0o2000
    return NodeRow(
        ino=ino,
        kind=kind,
        attempt=parent.attempt,
        mode=mode & 0o7777,
        uid=caller.uid,
        gid=parent.gid if is_set_gid else caller.gid,
        size=0,
        mtime_ns=now,
        ctime_ns=now,
        file=file,
        plain_path=names.plain_path(parent, name) if name and parent.attempt is None else None,
    )


def create(
    ctx: Context, caller: Caller, parent_ino: int, name: str, flags: int, mode: int
) -> tuple[Entry, Opened]:
    """Make and open a file; one that is there is opened, unless O_EXCL was asked."""
    directory = visibility.directory(ctx, caller, parent_ino)
    found = visibility.resolve(ctx, caller, directory, name)
    if found is not None:
        if flags & os.O_EXCL:
            msg = f"{name!r} is there already"
            raise ExistsError(msg, subject=name)
        opened = open_file(ctx, caller, found.node.ino, flags)
        return entry_of(ctx, found.node, found.timeout_s), opened
    names.check_new_name(ctx, directory, name)
    check_room(ctx)
    await_room(ctx, caller, directory.attempt)
    parent = revisions.writable_directory(ctx, caller, directory)
    is_held = bool(flags & HELD)
    kind = pending_kind(ctx, parent, name, is_held=is_held) if parent.attempt is None else None
    if kind is PendingKind.WHOLE and names.is_whole(ctx, parent, name):
        check_taking(ctx, names.plain_path(parent, name))
    who = ctx.who(caller)
    with ctx.change():
        if kind is None:
            _check_free(ctx, parent, name, flags)
        revisions.touch(ctx, who, parent)
        file = ctx.spool.next_file() if kind is None else ctx.spool.add_file().file
        ino = ctx.spool.next_node() if kind is None else 0
        node = _described(ctx, caller, parent, NodeKind.FILE, mode, name=name, ino=ino, file=file)
        fd = make_file(ctx.spool.data_path(file))
        try:
            if kind is None:
                opened = _place_visible(ctx, who, parent, name, node, fd)
            else:
                node = ctx.spool.add_node(node)
                pending.put(ctx, who, parent, name, node.ino, kind)
                opened = _add_handle(ctx, who, node, file, fd)
            times.names_changed(ctx, parent)
        except BaseException:
            os.close(fd)
            raise
    timeout = visibility.name_timeout(ctx, parent_ino, parent, name) if kind is None else 0.0
    return entry_of_new(ctx, node, os.fstat(fd), timeout), opened


def _check_free(ctx: Context, parent: NodeRow, name: str, flags: int) -> None:
    """Nobody else made the name meanwhile, whom the kernel doesn't keep out; inside a change.

    Raises:
        CkptError: EEXIST if it must be new; else ESTALE: look it up, and open what is there.
    """
    if ctx.spool.child(parent.ino, name) is None:
        return
    if flags & os.O_EXCL:
        msg = f"{name!r} is there already"
        raise ExistsError(msg, subject=name)
    raise stale(name, "was made by another process meanwhile")


def _place_visible(
    ctx: Context, who: Who, parent: NodeRow, name: str, node: NodeRow, fd: int
) -> Opened:
    """Put a new file where its name means the same for everybody, and open it; in a change."""
    assert node.file is not None
    row = _handle_row(ctx, who, node.ino, node.file)
    ctx.spool.create_file(parent.ino, name, node, row)
    opened = _keep(ctx, row, node, fd, is_complete=True, is_writer=True)
    if parent.attempt is None:
        ctx.wake()
    return opened


def open_file(ctx: Context, caller: Caller, ino: int, flags: int) -> Opened:
    """Open a file.

    Raises:
        RenewedError: ESTALE, the name has a new node now.
        CkptError: ELOOP for a symlink, EISDIR for a directory.
    """
    node = ctx.node(ino)
    if node.kind is not NodeKind.FILE:
        value = errno.EISDIR if node.kind is NodeKind.DIR else errno.ELOOP
        msg = f"node {ino} is a {node.kind}, not a file"
        raise CkptError(msg, errno_value=value)
    if flags & os.O_ACCMODE == os.O_RDONLY and not flags & os.O_TRUNC:
        return _open_to_read(ctx, node)
    is_emptied, is_held = bool(flags & os.O_TRUNC), bool(flags & HELD)
    if is_emptied and is_held and node.attempt is not None:
        msg = f"node {ino} is in a checkpoint: another file is to take its name"
        raise ExistsError(msg, subject=f"node {ino}")
    check_room(ctx)
    node = prepare_write(ctx, caller, node, is_emptied=is_emptied, is_held=is_held)
    assert node.file is not None
    fd = os.open(ctx.spool.data_path(node.file), _WRITE_FLAGS)
    try:
        with ctx.change():
            who = ctx.who(caller)
            opened = _add_handle(ctx, who, node, node.file, fd)
            revisions.touch(ctx, who, node)
    except BaseException:
        os.close(fd)
        raise
    return opened


def _open_to_read(ctx: Context, node: NodeRow) -> Opened:
    if node.file is None:
        return _add_reader(ctx, node, None, -1, is_complete=False)
    file = file_of(ctx, node)
    if _has_successor(ctx, node, file):
        msg = f"node {node.ino} was replaced when its checkpoint was committed"
        raise stale(f"node {node.ino}", msg)
    fd, is_complete = _read_descriptor(ctx, node, file)
    try:
        if is_decided(ctx, node) and not file.is_linked:
            ctx.spool.note_use(fd, ctx.clock.now_ns())
        opened = _add_reader(ctx, node, file, fd, is_complete=is_complete)
    except BaseException:
        os.close(fd)
        raise
    # Pages of a copy that was let go may be those that somebody changed.
    keep = is_decided(ctx, node) and (opened.is_complete or file.local is not LocalBytes.FULL)
    return msgspec.structs.replace(opened, keep_cache=keep)


def _has_successor(ctx: Context, node: NodeRow, file: FileRow) -> bool:
    """Whether a commit gave the name a new node: somebody may still write this one's bytes.

    The kernel may not have been told yet; after ESTALE it looks the name up again.
    """
    if node.attempt is None or file.state is not FileState.STORED or ctx.spool.place(node.ino):
        return False
    row = ctx.spool.attempt(node.attempt)
    return row is not None and row.state is AttemptState.COMMITTED


def _read_descriptor(ctx: Context, node: NodeRow, file: FileRow) -> tuple[int, bool]:
    """A descriptor for readers of the node, and whether all bytes are there.

    A node has one backing file and mode while it is open: where a writer may join, it is opened
    for writing at once.
    """
    path = ctx.spool.data_path(file.file)
    if file.local is LocalBytes.FULL and ctx.catalog.is_local(file.file):
        flags = _READ_FLAGS if is_frozen(ctx, node, file) else _WRITE_FLAGS
        # The publisher may give the copy up to make room.
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, flags), True
    return os.open(path, _READ_FLAGS | os.O_CREAT, 0o600), node.size == 0


def _add_reader(
    ctx: Context, node: NodeRow, file: FileRow | None, fd: int, *, is_complete: bool
) -> Opened:
    """Note an open handle of a reader; later, where another process is changing the spool."""
    row = _handle_row(ctx, None, node.ino, NO_FILE if file is None else file.file)

    def keep() -> Opened:
        # Given up to make room: its bytes may not be passed through beside fetched ones.
        is_there = file is None or not node.size or file_of(ctx, node).local is file.local
        return _keep(ctx, row, node, fd, is_complete=is_complete and is_there, is_writer=False)

    try:
        with ctx.spool.patience(READER_WAIT_S), ctx.change():
            ctx.spool.add_handle(row)
            return keep()
    except BusyError:
        opened = keep()
    ctx.late.put(row)
    return opened


def _add_handle(ctx: Context, writer: Who, node: NodeRow, file: int, fd: int) -> Opened:
    """Note an open handle of a writer; inside a change."""
    row = _handle_row(ctx, writer, node.ino, file)
    ctx.spool.add_handle(row)
    _note_rank(ctx, row)
    return _keep(ctx, row, node, fd, is_complete=True, is_writer=True)


def _note_rank(ctx: Context, row: HandleRow) -> None:
    """Which rank writes the file: where every rank has to, what is there tells who is missing."""
    file = ctx.spool.file(row.file)
    if row.rank < 0 or file is None or file.evidence.rank == row.rank:
        return
    evidence = msgspec.structs.replace(file.evidence, rank=row.rank)
    ctx.spool.update_file(row.file, evidence=evidence)


def _handle_row(ctx: Context, writer: Who | None, ino: int, file: int) -> HandleRow:
    # A reader's row only serves `reopen`: its process is none, and it counts as closed.
    return HandleRow(
        fh=ctx.spool.next_handle(),
        ino=ino,
        file=file,
        pid=writer.pid if writer else 0,
        start=writer.start if writer else 0,
        rank=-1 if writer is None or writer.rank is None else writer.rank,
        is_closed=writer is None,
    )


def _keep(
    ctx: Context, row: HandleRow, node: NodeRow, fd: int, *, is_complete: bool, is_writer: bool
) -> Opened:
    handle = OpenFile(
        row=row,
        fd=fd,
        is_complete=is_complete and fd >= 0,
        plain_path=node.plain_path or "",
        is_writer=is_writer,
        is_small=row.file == NO_FILE and _is_small(node),
    )
    ctx.memory.files.add(handle)
    return _opened(handle)


def _opened(handle: OpenFile) -> Opened:
    """What is said of it, also to a driver that took it over."""
    return Opened(
        fh=handle.row.fh,
        fd=handle.fd,
        is_complete=handle.is_complete,
        is_direct=handle.is_small,
    )


def _is_small(node: NodeRow) -> bool:
    """Whether a file that only the store has is read as one version of it (see `following`)."""
    return node.size < SMALL_BYTES


def reopen(ctx: Context, fh: int) -> Opened | None:
    """A descriptor for a handle that a predecessor of this process had opened; None: unknown."""
    known = ctx.memory.files.get(fh)
    if known is not None:
        return _opened(known)
    row = ctx.spool.handle(fh)
    node = None if row is None else ctx.spool.node(row.ino)
    if row is None or node is None:
        return None
    file = ctx.spool.file(row.file)
    is_writer = bool(row.pid) or not row.is_closed
    if row.file == NO_FILE:
        fd, is_complete = -1, False
    elif file is None:
        return None
    elif is_writer:
        fd, is_complete = os.open(ctx.spool.data_path(file.file), _WRITE_FLAGS), True
    else:
        fd, is_complete = _read_descriptor(ctx, node, file)
    return _keep(ctx, row, node, fd, is_complete=is_complete, is_writer=is_writer)


def reopen_all(ctx: Context) -> None:
    """Take over every handle of a predecessor: what is open, and how often, is known from then on.

    One whose bytes are gone is left out; its next request is EBADF.
    """
    for row in ctx.spool.handles():
        try:
            reopen(ctx, row.fh)
        except OSError as exc:
            _log.warning("handle-lost fh=%d ino=%d reason=%s", row.fh, row.ino, exc.strerror)


def ensure(ctx: Context, caller: Caller, fh: int, offset: int, length: int) -> None:
    """Have this range verified in the file that the handle's descriptor is of."""
    handle = ctx.memory.files.get(fh)
    if handle is None or handle.file is None or handle.fd < 0:
        return
    if not ctx.catalog.is_fetched(handle.file, offset, length):
        ctx.need_block(caller)
        ctx.catalog.fetch(handle.file, offset, length)
    ctx.catalog.read_ahead(handle.file, offset, length)
    # A spool file that was changed or deleted was replaced by a new one.
    path = ctx.spool.data_path(handle.file)
    if not os.path.samestat(os.fstat(handle.fd), os.stat(path)):
        fd = os.open(path, _READ_FLAGS)
        try:
            os.dup2(fd, handle.fd, inheritable=False)
        finally:
            os.close(fd)


def read_plain(ctx: Context, caller: Caller, fh: int, offset: int, length: int) -> bytes:
    """Bytes of a plain file that is only in the store."""
    handle = ctx.memory.files.get(fh)
    if handle is None:
        msg = f"handle {fh} is not known"
        raise MissingError(msg, errno_value=errno.EBADF)
    if handle.fd >= 0:
        return os.pread(handle.fd, length, offset)
    # A directory above it may have been renamed since it was opened.
    node = ctx.spool.node(handle.row.ino)
    path = (node.plain_path if node is not None else None) or handle.plain_path

    def read(offset: int, length: int) -> bytes:
        ctx.need_block(caller)
        return stored.read(ctx, path, lambda path: ctx.catalog.plain_read(path, offset, length))

    before = handle.seen
    data = follow(handle, offset, length, read)
    if handle.seen is not None and handle.seen is not before:
        _grown_to(ctx, handle.row.ino, handle.seen.end)
    return data


def _grown_to(ctx: Context, ino: int, end: int) -> None:
    """Have stat tell no less than what a descriptor reads.

    What was known of the store's file may be older than the bytes that it just gave: to `tail`, a
    size below what it has read is a truncation. Whoever asked the store before finds another row
    than it knew, and leaves it alone.
    """
    node = ctx.spool.node(ino)
    if node is None or node.file is not None or node.size >= end:
        return
    with ctx.taking_over():
        node = ctx.spool.node(ino)
        if node is not None and node.file is None and node.size < end:
            ctx.spool.update_node(ino, size=end)
