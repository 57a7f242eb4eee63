"""Removing names, making symlinks, attributes as a caller sees and changes them. Any thread."""

from __future__ import annotations

import errno
import os

import msgspec

from ckptgate.errors import CkptError, ExistsError, MissingError
from ckptgate.model.states import FileState
from ckptgate.ports.spool import NodeKind, NodeRow, PendingKind, PlainOpKind
from ckptgate.vfs import (
    files,
    handles,
    names,
    pending,
    plain,
    revisions,
    times,
    visibility,
    writing,
)
from ckptgate.vfs.attributes import attr_of, entry_of, is_decided, local_stat
from ckptgate.vfs.context import Context
from ckptgate.vfs.interface import Attr, Caller, Entry, SetAttr
from ckptgate.vfs.lookup import remove_name
from ckptgate.vfs.visibility import Found, What

__all__ = ["attr_for", "setattr_of", "symlink", "unlink"]


def unlink(ctx: Context, caller: Caller, parent_ino: int, name: str) -> None:
    """Remove a file or symlink."""
    parent = visibility.directory(ctx, caller, parent_ino)
    found = visibility.resolve(ctx, caller, parent, name)
    if found is None:
        msg = f"nothing is named {name!r} here"
        raise MissingError(msg, subject=name)
    if found.node.kind is NodeKind.DIR:
        msg = f"{name!r} is a directory"
        raise CkptError(msg, subject=name, errno_value=errno.EISDIR)
    if found.what is What.INNER:
        _unlink_inner(ctx, caller, parent, name)
        return
    with ctx.change():
        unlink_outer(ctx, caller, parent, name, found)
        times.names_changed(ctx, parent)


def _unlink_inner(ctx: Context, caller: Caller, parent: NodeRow, name: str) -> None:
    given = parent
    parent = revisions.writable(ctx, caller, parent)
    with ctx.change():
        # Looked for in here: the kernel keeps others out only where they come by the same way.
        child = ctx.spool.child(parent.ino, name)
        if child is None or child.kind is NodeKind.DIR:
            msg = f"no file is named {name!r} here"
            raise MissingError(msg, subject=name)
        remove_name(ctx, parent, name, child)
        times.names_changed(ctx, parent)
        revisions.touch(ctx, ctx.who(caller), parent)
    if given.ino != parent.ino:
        ctx.invalidate(given.ino, name)


def unlink_outer(ctx: Context, caller: Caller, parent: NodeRow, name: str, found: Found) -> None:
    """Remove a name outside of checkpoints; inside a change."""
    who = ctx.who(caller)
    view = pending.last_view(ctx, parent.plain_path or "")
    logged = view.pointers.get(name) if view is not None else None
    if logged is not None:
        # Others go on seeing what the log says.
        target = logged.target
        pending.put(ctx, who, parent, name, None, PendingKind.POINTER, target=target)
    elif pending.is_pointed(ctx, parent, name):
        pending.put(ctx, who, parent, name, None, PendingKind.WHOLE)
    elif found.what is What.PENDING and ctx.spool.child(parent.ino, name) is None:
        is_whole = found.pending is not None and found.pending.kind is PendingKind.WHOLE
        pending.drop_own(ctx, who, parent, name)
        if is_whole or names.is_whole(ctx, parent, name):
            # An older version may be in the store only.
            plain.queue(ctx, PlainOpKind.REMOVE, names.plain_path(parent, name))
    else:
        pending.remove_plain(ctx, who, parent, name, is_dir=False)
    ctx.invalidate(parent.ino, name)


def symlink(ctx: Context, caller: Caller, parent_ino: int, name: str, target: str) -> Entry:
    """Make a symlink; a pointer that names a checkpoint is held until that is committed."""
    directory = visibility.directory(ctx, caller, parent_ino)
    if visibility.resolve(ctx, caller, directory, name) is not None:
        msg = f"{name!r} is there already"
        raise ExistsError(msg, subject=name)
    names.check_new_name(ctx, directory, name)
    _check_target(name, target)
    parent = revisions.writable_directory(ctx, caller, directory)
    who = ctx.who(caller)
    if parent.attempt is not None:
        path = "/".join(filter(None, (names.path_in_attempt(ctx, parent.ino), name)))
        names.check_symlink(path, target)
    with ctx.change():
        node = files.new_node(ctx, caller, parent, NodeKind.SYMLINK, 0o777, target=target)
        times.names_changed(ctx, parent)
        if parent.attempt is not None:
            ctx.spool.link(parent.ino, name, node.ino)
            revisions.touch(ctx, who, parent)
            timeout = visibility.name_timeout(ctx, parent_ino, parent, name)
        else:
            timeout = place_symlink(ctx, caller, parent, name, node)
    return entry_of(ctx, ctx.node(node.ino), timeout)


def _check_target(name: str, target: str) -> None:
    try:
        size = len(target.encode("utf-8"))
    except UnicodeEncodeError as exc:
        msg = f"the target of symlink {name!r} is not UTF-8"
        raise CkptError(msg, subject=name, errno_value=errno.EILSEQ) from exc
    if not target or size >= 4096:
        value = errno.ENOENT if not target else errno.ENAMETOOLONG
        msg = f"the target of symlink {name!r} has {size} bytes"
        raise CkptError(msg, subject=name, errno_value=value)


def place_symlink(ctx: Context, caller: Caller, parent: NodeRow, name: str, node: NodeRow) -> float:
    """Give a symlink its name in a plain directory; inside a change.

    Returns:
        How long the kernel may keep the name.
    """
    path = names.plain_path(parent, name)
    ctx.spool.update_node(node.ino, plain_path=path)
    if names.is_pointer(ctx, parent, name):
        checkpoint = pending.names_checkpoint(ctx, parent, node.target)
        view = pending.last_view(ctx, parent.plain_path or "")
        if checkpoint or (view is not None and name in view.pointers):
            who = ctx.who(caller)
            pending.put(ctx, who, parent, name, node.ino, PendingKind.POINTER, target=checkpoint)
            return 0.0
        if pending.names_file(ctx, parent, node.target):
            pending.put(ctx, ctx.who(caller), parent, name, node.ino, PendingKind.WHOLE)
            return 0.0
    pending.drop_own(ctx, ctx.who(caller), parent, name)
    pending.place_plain(ctx, parent, name, node)
    plain.queue(ctx, PlainOpKind.SYMLINK, path, to=node.target)
    return 0.0 if names.is_special(ctx, parent, name) else ctx.settings.entry_timeout_s


def setattr_of(ctx: Context, caller: Caller, ino: int, changes: SetAttr, fh: int | None) -> Attr:
    """Change attributes.

    Raises:
        RenewedError: ESTALE, the name has a new node now.
    """
    node = ctx.node(ino)
    if not _changes_anything(changes):
        return attr_of(ctx, node)
    is_own_handle = fh is not None and _is_writer(ctx, fh, ino)
    if changes.size is not None:
        if node.kind is not NodeKind.FILE:
            msg = f"node {ino} is not a file"
            raise CkptError(msg, errno_value=errno.EISDIR)
        node = _resize(ctx, caller, node, changes.size, fh if is_own_handle else None)
    if not _changes_row(changes):
        return attr_of(ctx, node)
    target = node if is_own_handle else revisions.writable(ctx, caller, node)
    if target.ino != node.ino and node.kind is NodeKind.FILE:
        # The revision's copy is what the name means to this caller from now on.
        ctx.invalidate(*_parent_of(ctx, node))
    with ctx.change():
        _set_times(ctx, target, changes)
        _set_row(ctx, target, changes)
        revisions.touch(ctx, ctx.who(caller), target)
    attr = attr_of(ctx, ctx.node(target.ino))
    return attr if target.ino == ino else _as(attr, ino)


def attr_for(ctx: Context, caller: Caller, node: NodeRow) -> Attr:
    """stat(2) of the node for this caller, with what its revision changed but the bytes.

    For a moment after such a change the kernel knows the name by the committed node. That one's
    size stays: others may be reading it.
    """
    attr = attr_of(ctx, node)
    copy = visibility.copy_of(ctx, caller, node) if node.kind is NodeKind.FILE else None
    if copy is None or copy.file != node.file:
        return attr
    changed = msgspec.structs.replace(attr_of(ctx, copy), size=attr.size, blocks=attr.blocks)
    return _as(changed, node.ino)


def _as(attr: Attr, ino: int) -> Attr:
    return Attr(
        ino, attr.kind, attr.mode, attr.nlink, attr.uid, attr.gid, attr.size, attr.blocks,
        attr.atime_ns, attr.mtime_ns, attr.ctime_ns, 0.0,
    )  # fmt: skip


def _parent_of(ctx: Context, node: NodeRow) -> tuple[int, str]:
    place = ctx.spool.place(node.ino)
    return (node.ino, "") if place is None else place


def _changes_anything(changes: SetAttr) -> bool:
    """Whether more than the access time is asked (that isn't kept)."""
    return changes.size is not None or _changes_row(changes)


def _changes_row(changes: SetAttr) -> bool:
    values = (changes.mode, changes.uid, changes.gid, changes.mtime_ns)
    return any(value is not None for value in values)


def _is_writer(ctx: Context, fh: int, ino: int) -> bool:
    handle = ctx.memory.files.get(fh)
    return handle is not None and handle.is_writer and handle.row.ino == ino


def _resize(ctx: Context, caller: Caller, node: NodeRow, size: int, fh: int | None) -> NodeRow:
    if size < 0:
        msg = f"size {size} is negative"
        raise CkptError(msg, errno_value=errno.EINVAL)
    handle = None if fh is None else ctx.memory.files.get(fh)
    if handle is not None:
        os.ftruncate(handle.fd, size)
        return node
    node = writing.prepare_write(ctx, caller, node, is_emptied=size == 0)
    assert node.file is not None
    os.truncate(ctx.spool.data_path(node.file), size)
    with ctx.change():
        file = ctx.spool.file(node.file)
        if file is not None:
            handles.quiet_file(ctx, file, node)
        revisions.touch(ctx, ctx.who(caller), node)
        if node.attempt is None and pending.pending_of(ctx, node.ino) is None:
            plain.queue_put(ctx, ctx.node(node.ino))
    return ctx.node(node.ino)


def _set_times(ctx: Context, node: NodeRow, changes: SetAttr) -> None:
    """Give the spool file the time too, where its own counts."""
    if changes.mtime_ns is None or node.file is None or is_decided(ctx, node):
        return
    file = ctx.spool.file(node.file)
    if file is None or file.state not in {FileState.OPEN, FileState.QUIET} or file.is_linked:
        return
    if local_stat(ctx, file) is not None:
        os.utime(ctx.spool.data_path(file.file), ns=(changes.mtime_ns, changes.mtime_ns))


def _set_row(ctx: Context, node: NodeRow, changes: SetAttr) -> None:
    values: dict[str, object] = {"ctime_ns": ctx.clock.now_ns()}
    for field in ("mode", "uid", "gid", "mtime_ns"):
        value = getattr(changes, field)
        if value is not None:
            values[field] = value & 0o7777 if field == "mode" else value
    ctx.spool.update_node(node.ino, **values)
    is_live = node.attempt is None and node.file is not None
    if is_live and pending.pending_of(ctx, node.ino) is None and changes.mode is not None:
        plain.queue_put(ctx, ctx.node(node.ino))
