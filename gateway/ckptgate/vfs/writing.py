"""Which bytes an open for writing gets.

Owns the rules: bytes that are committed, linked with the store, or shared by several nodes are
never written again, an open for writing gets a copy of them; what the store has only a copy of is
written in place while nothing was promised of it, for a mapping may still write it, too. A node
that is open never changes its bytes, the name gets a new node instead and the caller ESTALE, once.
Of several that open at the same time one makes the copy that counts; the others look again. Any
thread.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from ckptgate.errors import CkptError, FullError, MissingError
from ckptgate.formats.containers import claimed_container
from ckptgate.model.layout import data_key, full_key
from ckptgate.model.states import FileState
from ckptgate.ports.spool import FileRow, LocalBytes, NodeRow, PendingKind, PendingRow
from ckptgate.vfs import names, pending, pointers, revisions, stored, visibility
from ckptgate.vfs.attributes import is_decided
from ckptgate.vfs.bytes import copy_file, make_file
from ckptgate.vfs.context import Context, RenewedError
from ckptgate.vfs.interface import Caller
from ckptgate.vfs.stopping import check_taking
from ckptgate.vfs.unused import drop_file_if_unused, drop_if_unused

__all__ = [
    "file_of",
    "is_frozen",
    "judge_anew",
    "judge_by_new_name",
    "pending_kind",
    "prepare_write",
    "take_bytes_along",
]

_COPY_BYTES_INLINE = 1024 * 1024
"""A larger copy is made where waiting is allowed."""
_TRIES_MAX = 8
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


def file_of(ctx: Context, node: NodeRow) -> FileRow:
    """The node's bytes; ESTALE if they are gone."""
    file = None if node.file is None else ctx.spool.file(node.file)
    if file is None:
        msg = f"the bytes of node {node.ino} are gone"
        raise MissingError(msg, errno_value=errno.ESTALE)
    return file


def is_frozen(ctx: Context, node: NodeRow, file: FileRow) -> bool:
    """Whether these bytes may never be written again."""
    return (
        (file.state is FileState.STORED and not _is_unpromised(ctx, node, file))
        # A whole file that may be on its way into the store: half of a new version must not be.
        or (file.state is FileState.DIGESTED and node.attempt is None)
        or file.is_linked
        or file.local is not LocalBytes.FULL
        or is_decided(ctx, node)
        or len(ctx.spool.nodes_of_file(file.file)) > 1
    )


def _is_unpromised(ctx: Context, node: NodeRow, file: FileRow) -> bool:
    """Whether these stored bytes are this member's in a checkpoint that it may still write.

    The store keeps what it has of them: other bytes are sent under another key.
    """
    row = None if node.attempt is None else ctx.spool.attempt(node.attempt)
    if row is None or row.is_voted or not row.attempt:
        return False
    own = full_key(row.run, data_key(row.attempt, ctx.spool.get_meta("member") or "", ""))
    return file.key.startswith(f"{own}/")


def pending_kind(
    ctx: Context, parent: NodeRow, name: str, *, is_held: bool = False
) -> PendingKind | None:
    """As what a new file of that name is held, None if it is visible at once.

    *is_held*: whoever writes it asks for that.
    """
    if names.is_pointer(ctx, parent, name):
        return PendingKind.POINTER
    return PendingKind.WHOLE if is_held or names.is_whole(ctx, parent, name) else None


def take_bytes_along(ctx: Context, node: NodeRow) -> None:
    """A file is moved into or out of a checkpoint with its bytes; inside a change.

    What the store has of them belongs to the old checkpoint and goes when that goes: for the new
    place they are sent again.

    Raises:
        CkptError: EXDEV, the bytes are a committed checkpoint's (tools copy then).
    """
    file = None if node.file is None else ctx.spool.file(node.file)
    if file is None:
        return
    if file.local is not LocalBytes.FULL or len(ctx.spool.nodes_of_file(file.file)) > 1:
        msg = f"the bytes of node {node.ino} are a committed checkpoint's"
        raise CkptError(msg, subject=str(node.ino), errno_value=errno.EXDEV)
    judge_anew(ctx, file)


def judge_anew(ctx: Context, file: FileRow) -> None:
    """Have a file digested again under its new name, and sent to its new place; inside a change.

    What its container must be is said by its name.
    """
    if file.state in {FileState.DIGESTED, FileState.STORED}:
        ctx.spool.update_file(file.file, state=FileState.QUIET, key="")


def judge_by_new_name(ctx: Context, node: NodeRow, name: str, new_name: str) -> None:
    """Have a renamed file digested again if its new name promises another container.

    Inside a change. Bytes that a committed checkpoint has too were judged by that, and stay.
    """
    file = None if node.file is None else ctx.spool.file(node.file)
    if file is None or claimed_container(name) == claimed_container(new_name):
        return
    if file.local is LocalBytes.FULL and len(ctx.spool.nodes_of_file(file.file)) == 1:
        judge_anew(ctx, file)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a file's name is, and the pending row if it is a pending value's."""

    parent: NodeRow
    name: str
    pending: PendingRow | None


def _place_of(ctx: Context, node: NodeRow) -> _Place | None:
    place = ctx.spool.place(node.ino)
    if place is not None:
        return _Place(ctx.node(place[0]), place[1], None)
    for row in ctx.spool.pending():
        if row.ino == node.ino:
            return _Place(ctx.node(row.parent), row.name, row)
    return None


def prepare_write(
    ctx: Context, caller: Caller, node: NodeRow, *, is_emptied: bool, is_held: bool = False
) -> NodeRow:
    """The node with bytes that may be written in place, marked as being written.

    Args:
        ctx: the vfs.
        caller: who writes.
        node: what was opened.
        is_emptied: the content is truncated to nothing: it need not be copied.
        is_held: see `interface.HELD`.

    Raises:
        RenewedError: ESTALE, the name has a new node with such bytes now.
    """
    known = visibility.copy_of(ctx, caller, node)
    target = revisions.writable(ctx, caller, node)
    if target.ino != node.ino:
        begun = (target.attempt or 0) if known is None else 0
        revisions.by_descriptor(ctx, caller, node, target, begun)
        # The kernel holds the committed node: it must look up the revision's.
        raise _renewed(target)
    place = _place_of(ctx, node)
    if place is not None and _gets_pending(ctx, place, node, is_held=is_held):
        _start_pending(ctx, caller, place, node, is_emptied=is_emptied, is_held=is_held)
        raise _renewed(node)
    if node.file is not None and not is_frozen(ctx, node, file_of(ctx, node)):
        with ctx.change():
            now = ctx.node(node.ino)
            place = _place_of(ctx, now)
            if place is not None and _gets_pending(ctx, place, now, is_held=is_held):
                # The publisher has just made it what everybody sees.
                _start_pending(ctx, caller, place, now, is_emptied=is_emptied, is_held=is_held)
                raise _renewed(node)
            return _in_place(ctx, node, is_emptied=is_emptied)
    is_open = bool(ctx.memory.files.count(node.ino))
    file = _copied(ctx, caller, node, is_emptied=is_emptied)
    if is_open and place is not None:
        _replace_node(ctx, place, node, file)
        raise _renewed(node)
    with ctx.change():
        _check_first(ctx, node, place, file)
        if ctx.memory.files.count(node.ino):
            raise _too_late(ctx, node, file)
        old = node
        node = ctx.spool.update_node(node.ino, file=file, **_emptied(ctx, is_emptied=is_emptied))
        drop_file_if_unused(ctx, old)
    return node


def _check_first(ctx: Context, node: NodeRow, place: _Place | None, file: int) -> None:
    """Go on with the copy *file* only if nobody else gave the name new bytes while it was made.

    In a change.

    Raises:
        RenewedError: somebody did; the copy is gone.
    """
    now = ctx.spool.node(node.ino)
    if now is None or now.file != node.file or _place_of(ctx, now) != place:
        raise _too_late(ctx, node, file)


def _too_late(ctx: Context, node: NodeRow, file: int) -> RenewedError:
    ctx.spool.drop_file(file)
    return _renewed(node)


def _renewed(node: NodeRow) -> RenewedError:
    msg = f"node {node.ino} has a new version, look its name up again"
    return RenewedError(msg, subject=str(node.ino))


def _emptied(ctx: Context, *, is_emptied: bool) -> dict[str, object]:
    return {"size": 0, "mtime_ns": ctx.clock.now_ns()} if is_emptied else {}


def _gets_pending(ctx: Context, place: _Place, node: NodeRow, *, is_held: bool) -> bool:
    """Whether a write to this name makes a new version that is held.

    What is held already is written in place, unless the commit of its target is to publish it, or
    it is closed and its writer may give the new version up.
    """
    if node.attempt is not None:
        return False
    if place.pending is not None:
        return pending.is_awaited(ctx, place.pending) or (
            is_held and pending.is_closed_whole(ctx, place.pending)
        )
    kind = pending_kind(ctx, place.parent, place.name, is_held=is_held)
    return kind is not None or node.plain_path is None


def _start_pending(
    ctx: Context, caller: Caller, place: _Place, node: NodeRow, *, is_emptied: bool, is_held: bool
) -> None:
    kind = pending_kind(ctx, place.parent, place.name, is_held=is_held) or PendingKind.POINTER
    if kind is PendingKind.WHOLE and names.is_whole(ctx, place.parent, place.name):
        check_taking(ctx, names.plain_path(place.parent, place.name))
    who = ctx.who(caller)
    known = pointers.own_pending(ctx, who, place.parent, place.name)
    file = _copied(ctx, caller, node, is_emptied=is_emptied)
    with ctx.change():
        _check_first(ctx, node, place, file)
        if pointers.own_pending(ctx, who, place.parent, place.name) != known:
            raise _too_late(ctx, node, file)
        copy = _copy_node(ctx, node, file, names.plain_path(place.parent, place.name))
        pending.put(ctx, who, place.parent, place.name, copy.ino, kind, is_held=is_held)
    ctx.invalidate(place.parent.ino, place.name)


def _copy_node(ctx: Context, node: NodeRow, file: int, plain_path: str | None) -> NodeRow:
    now = ctx.clock.now_ns()
    copy = ctx.spool.add_node(
        NodeRow(
            ino=0,
            kind=node.kind,
            attempt=node.attempt,
            mode=node.mode,
            uid=node.uid,
            gid=node.gid,
            size=node.size,
            mtime_ns=now,
            ctime_ns=now,
            file=file,
            base=node.base,
            plain_path=plain_path,
        )
    )
    ctx.spool.copy_xattrs(node.ino, copy.ino)
    return copy


def _replace_node(ctx: Context, place: _Place, node: NodeRow, file: int) -> None:
    """Give the name a new node with these bytes; the old one lives on while it is open."""
    with ctx.change():
        _check_first(ctx, node, place, file)
        copy = _copy_node(ctx, node, file, node.plain_path)
        if place.pending is not None:
            ctx.spool.update_pending(place.pending.id, ino=copy.ino)
        else:
            ctx.spool.unlink(place.parent.ino, place.name)
            ctx.spool.link(place.parent.ino, place.name, copy.ino)
        with ctx.lock:
            ctx.memory.clones.clear()
        drop_if_unused(ctx, node.ino, is_forgotten=False)
    ctx.invalidate(place.parent.ino, place.name)


def _in_place(ctx: Context, node: NodeRow, *, is_emptied: bool) -> NodeRow:
    """Mark the bytes as being written: what was known of them is void."""
    assert node.file is not None
    with ctx.change():
        file = file_of(ctx, node)
        if is_frozen(ctx, node, file):
            # The publisher just shared these bytes with the store.
            raise _renewed(node)
        changes: dict[str, object] = {"state": FileState.OPEN, "digest": "", "chunks": b""}
        if is_emptied:
            changes["evidence"] = type(file.evidence)()
        ctx.spool.update_file(node.file, **changes)
        if is_emptied:
            os.truncate(ctx.spool.data_path(node.file), 0)
            node = ctx.spool.update_node(node.ino, size=0)
    return node


def _copied(ctx: Context, caller: Caller, node: NodeRow, *, is_emptied: bool) -> int:
    """A new file with the node's bytes (or none), state OPEN. May block."""
    if is_emptied or (node.file is None and not node.size):
        with ctx.change():
            file = ctx.spool.add_file().file
            os.close(make_file(ctx.spool.data_path(file)))
            return file
    if node.file is None:
        ctx.need_block(caller)
        file = ctx.spool.add_file().file
        stored.read(ctx, node.plain_path or "", lambda path: ctx.catalog.plain_fetch(path, file))
        return file
    source_fd = _open_whole(ctx, caller, node)
    try:
        if node.size > _COPY_BYTES_INLINE:
            ctx.need_block(caller)
        file = ctx.spool.add_file().file
        copy_file(source_fd, ctx.spool.data_path(file))
    finally:
        os.close(source_fd)
    return file


def _open_whole(ctx: Context, caller: Caller, node: NodeRow) -> int:
    """All bytes of the node, to be read; they are fetched if they have to. May block."""
    for _ in range(_TRIES_MAX):
        file = file_of(ctx, node)
        path = ctx.spool.data_path(file.file)
        if file.local is not LocalBytes.FULL or not ctx.catalog.is_local(file.file):
            ctx.need_block(caller)
            os.close(os.open(path, _READ_FLAGS | os.O_CREAT, 0o600))
            ctx.catalog.fetch(file.file, 0, node.size)
        try:
            fd = os.open(path, _READ_FLAGS)
        except FileNotFoundError:
            continue
        # The publisher may have given the copy up meanwhile, to make room.
        if file_of(ctx, node).local is LocalBytes.FULL:
            return fd
        os.close(fd)
    msg = f"the bytes of node {node.ino} were given up again and again to make room"
    raise FullError(msg, subject=str(node.ino))
