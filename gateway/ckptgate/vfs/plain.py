"""Plain names: directories, live files and symlinks outside of checkpoints.

Owns the rule that a plain name is visible at once on this mount, queued for the store, and that a
name which only the store has appears here until its removal is queued. A file whose bytes the store
was given follows the store from then on: another node may have replaced them. So does a directory
in which nothing is newer here: another node may have removed it. Any thread.
"""

from __future__ import annotations

import contextlib

from ckptgate.errors import MissingError, TransientStoreError
from ckptgate.model.layout import GATEWAY_DIR
from ckptgate.ports.spool import FileRow, NodeKind, NodeRow, PlainOpKind, PlainOpRow
from ckptgate.ports.store import PlainEntry, PlainKind
from ckptgate.vfs import names, stored
from ckptgate.vfs.attributes import local_stat
from ckptgate.vfs.context import Context
from ckptgate.vfs.interface import Caller
from ckptgate.vfs.stored import Queue
from ckptgate.vfs.unused import drop_if_unused

__all__ = [
    "grown",
    "list_store",
    "queue",
    "queue_put",
    "refreshed",
    "set_paths",
    "store_child",
    "take_entry",
]

_KINDS = {
    PlainKind.FILE: NodeKind.FILE,
    PlainKind.DIR: NodeKind.DIR,
    PlainKind.SYMLINK: NodeKind.SYMLINK,
}
_REFRESH_S = 1.0


def queue(ctx: Context, op: PlainOpKind, path: str, *, to: str = "", mode: int = 0) -> None:
    """Have this done in the store; inside a change."""
    ctx.spool.add_plain_op(PlainOpRow(id=0, op=op, path=path, to=to, mode=mode))
    ctx.wake()


def queue_put(ctx: Context, node: NodeRow) -> None:
    """Have the file's content copied to the store; inside a change."""
    if node.plain_path is None or node.file is None:
        return
    queued = Queue(ctx).ends_with_put(node.plain_path, node.ino)
    if not queued:
        ctx.spool.add_plain_op(
            PlainOpRow(id=0, op=PlainOpKind.PUT, path=node.plain_path, ino=node.ino, mode=node.mode)
        )
    ctx.wake()


def store_child(ctx: Context, caller: Caller, parent: NodeRow, name: str) -> NodeRow | None:
    """The node of a plain name that only the store has; None if it has none."""
    path = names.plain_path(parent, name)
    if not names.can_be(path):
        return None
    if not Queue(ctx).paths(path):
        return None
    ctx.need_block(caller)
    entry = _stat(ctx, parent, name, path)
    if entry is None or not _can_be_shown(ctx, parent, entry):
        return None
    if not Queue(ctx).paths(path):
        # Another thread removed it meanwhile.
        return None
    node = take_entry(ctx, parent, name, entry)
    if node is not None:
        ctx.done_now(("plain", node.ino))
    return node


def _can_be_shown(ctx: Context, parent: NodeRow, entry: PlainEntry) -> bool:
    """Whether what somebody may have put into the store's directory is one of the mount's names."""
    if entry.is_managed or entry.name == GATEWAY_DIR:
        return False
    if not names.can_be(names.plain_path(parent, entry.name)) or not _is_text(entry.target):
        # One such name must not hide all others of its directory.
        return False
    # A save through a link would go wherever it leads.
    is_link = entry.kind is PlainKind.SYMLINK
    return not (is_link and names.is_checkpoint(ctx, parent, entry.name))


def _is_text(target: str) -> bool:
    try:
        target.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _stat(ctx: Context, parent: NodeRow, name: str, path: str) -> PlainEntry | None:
    try:
        return stored.stat(ctx, path)
    except MissingError:
        return None
    except TransientStoreError as exc:
        # A name of which the store can't be asked is taken for absent only where a save must go
        # on, or where a listing of the directory is known: elsewhere that could be a lie.
        known = ctx.memory.listings.get(parent.plain_path or "")
        is_absent = known is not None and name not in known
        if not is_absent and not names.is_special(ctx, parent, name):
            raise
        ctx.store_is_away(exc, f"plain-stat {path!r}")
        return None


def take_entry(
    ctx: Context, parent: NodeRow, name: str, entry: PlainEntry, known: NodeRow | None = None
) -> NodeRow | None:
    """Have a node for what the store has under that name.

    Args:
        ctx: the vfs.
        parent: the directory.
        name: in it.
        entry: what the store said, which may have taken a while.
        known: what was there when it was asked. Something else is newer, and stays.
    """
    values, kind = _values(entry), _KINDS[entry.kind]
    with ctx.taking_over():
        child = ctx.spool.child(parent.ino, name)
        if child != known:
            return child
        if not Queue(ctx).paths(names.plain_path(parent, name)):
            return None
        if child is not None and child.kind is kind and child.file is None:
            if _is_as_told(child, None, entry):
                return child
            return ctx.spool.update_node(child.ino, **values)
        if child is not None:
            ctx.spool.unlink(parent.ino, name)
        node = ctx.spool.add_node(
            NodeRow(
                ino=0,
                kind=kind,
                attempt=None,
                mode=entry.mode & 0o7777,
                uid=entry.uid,
                gid=entry.gid,
                size=entry.size,
                mtime_ns=entry.mtime_ns,
                ctime_ns=entry.mtime_ns,
                target=entry.target,
                plain_path=names.plain_path(parent, name),
            )
        )
        ctx.spool.link(parent.ino, name, node.ino)
        return node


def _values(entry: PlainEntry) -> dict[str, object]:
    """What a node that only the store has is told of it."""
    return {
        "mode": entry.mode & 0o7777,
        "uid": entry.uid,
        "gid": entry.gid,
        "size": entry.size,
        "mtime_ns": entry.mtime_ns,
        "target": entry.target,
    }


def _is_as_told(node: NodeRow, file: FileRow | None, entry: PlainEntry) -> bool:
    """Whether the store has what is known here; *file*: the node's bytes, which it was given."""
    if file is not None:
        return (entry.size, entry.mtime_ns) == (file.size, file.mtime_ns)
    same_link = (PlainKind.SYMLINK, NodeKind.SYMLINK, node.target)
    if (entry.kind, node.kind, entry.target) == same_link:
        # The store's belongs to whoever put it there, and has the time of that.
        return True
    is_same_kind = node.kind is _KINDS[entry.kind] and node.file is None
    return is_same_kind and all(getattr(node, key) == it for key, it in _values(entry).items())


def refreshed(
    ctx: Context, caller: Caller, parent: NodeRow, name: str, child: NodeRow
) -> NodeRow | None:
    """A plain child as it is now: what isn't newer here is looked up in the store again."""
    if not ctx.is_due(("plain", child.ino), _REFRESH_S):
        return child
    if child.kind is NodeKind.DIR:
        return _refreshed_directory(ctx, caller, parent, name, child)
    if child.file is not None and ctx.memory.files.count(child.ino):
        return child
    file = None if child.file is None else ctx.spool.file(child.file)
    if file is not None and not _is_given(ctx, file):
        return child
    if Queue(ctx).touches(names.plain_path(parent, name)):
        return child
    ctx.need_block(caller)
    try:
        entry = ctx.catalog.plain_stat(names.plain_path(parent, name))
    except TransientStoreError as exc:
        ctx.store_is_away(exc, f"plain-stat {name!r}")
        return child
    if entry is not None and _is_as_told(child, file, entry):
        # Nothing is to be changed, so nobody who changes anything is waited for.
        ctx.done_now(("plain", child.ino))
        return ctx.spool.child(parent.ino, name)
    with ctx.taking_over():
        node = _taken_over(ctx, parent, name, child, file, entry)
    if node is not None:
        ctx.done_now(("plain", node.ino))
    return node


def _refreshed_directory(
    ctx: Context, caller: Caller, parent: NodeRow, name: str, child: NodeRow
) -> NodeRow | None:
    """The same for a directory: it goes when the store has it no longer, with all below it."""
    path = names.plain_path(parent, name)
    if _has_checkpoints(ctx, child) or Queue(ctx).touches(path):
        return child
    ctx.need_block(caller)
    try:
        entry = ctx.catalog.plain_stat(path)
    except TransientStoreError as exc:
        ctx.store_is_away(exc, f"plain-stat {name!r}")
        ctx.done_now(("plain", child.ino))
        return child
    ctx.done_now(("plain", child.ino))
    if entry is not None and entry.kind is PlainKind.DIR:
        return child
    with ctx.taking_over():
        now = ctx.spool.child(parent.ino, name)
        if now != child or Queue(ctx).reaches(path) or not _is_the_stores(ctx, child):
            return now
        _drop_tree(ctx, parent, name, child)
        if entry is None or not _can_be_shown(ctx, parent, entry):
            return None
        return take_entry(ctx, parent, name, entry)


def _has_checkpoints(ctx: Context, node: NodeRow) -> bool:
    """Whether a directory has attempts, committed checkpoints or pending values here."""
    return bool(ctx.spool.attempts(run_ino=node.ino) or ctx.spool.pending(parent=node.ino))


def _is_the_stores(ctx: Context, node: NodeRow) -> bool:
    """Whether nothing of a plain node, nor of what is below it, is newer here."""
    if node.plain_path is None:
        return False
    if node.kind is NodeKind.DIR:
        children = ctx.spool.children(node.ino)
        return not _has_checkpoints(ctx, node) and all(
            _is_the_stores(ctx, child) for _, child in children
        )
    if node.file is None:
        return True
    file = ctx.spool.file(node.file)
    return not ctx.memory.files.count(node.ino) and file is not None and _is_given(ctx, file)


def _drop_tree(ctx: Context, parent: NodeRow, name: str, node: NodeRow) -> None:
    """Take the names from a plain node and all below it; inside a change."""
    if node.kind is NodeKind.DIR:
        for child_name, child in ctx.spool.children(node.ino):
            _drop_tree(ctx, node, child_name, child)
    ctx.spool.unlink(parent.ino, name)
    drop_if_unused(ctx, node.ino, is_forgotten=False)


def grown(ctx: Context, caller: Caller, node: NodeRow) -> NodeRow:
    """A file that only the store has, as it is there now: somebody may follow it by descriptor."""
    is_ours = node.file is not None or node.kind is not NodeKind.FILE or node.plain_path is None
    place = None if is_ours else ctx.spool.place(node.ino)
    if place is None or not ctx.is_due(("plain", node.ino), _REFRESH_S):
        return node
    now = refreshed(ctx, caller, ctx.node(place[0]), place[1], node)
    return now if now is not None and now.ino == node.ino else node


def _taken_over(
    ctx: Context,
    parent: NodeRow,
    name: str,
    known: NodeRow,
    file: FileRow | None,
    entry: PlainEntry | None,
) -> NodeRow | None:
    """What the name is, given what the store said of it when it was *known* here; in a change."""
    child = ctx.spool.child(parent.ino, name)
    is_newer_here = (
        child != known
        or (known.file is not None and ctx.spool.file(known.file) != file)
        or Queue(ctx).touches(names.plain_path(parent, name))
    )
    if is_newer_here:
        return child
    if entry is None:
        ctx.spool.unlink(parent.ino, name)
        return None
    return take_entry(ctx, parent, name, entry, known)


def _is_given(ctx: Context, file: FileRow) -> bool:
    """Whether the store was given these bytes as they are: then another node's may replace them."""
    found = local_stat(ctx, file)
    return found is not None and (found.st_size, found.st_mtime_ns) == (file.size, file.mtime_ns)


def list_store(ctx: Context, caller: Caller, parent: NodeRow) -> list[PlainEntry]:
    """What the store has in a plain directory, without what is the gateway's own."""
    path = parent.plain_path or ""
    # What is removed in the store while it is listed may be in the list, and no longer queued.
    before = Queue(ctx)
    paths = before.paths(path)
    if not paths:
        return []
    ctx.need_block(caller)
    entries: list[PlainEntry] = []
    for other in paths:
        with contextlib.suppress(MissingError):
            entries = ctx.catalog.plain_list(other)
            break
    after = Queue(ctx)
    with ctx.lock:
        ctx.memory.listings[path] = frozenset(entry.name for entry in entries)
    return [
        entry
        for entry in entries
        if _can_be_shown(ctx, parent, entry)
        and before.paths(below := names.plain_path(parent, entry.name))
        and after.paths(below)
    ]


def set_paths(ctx: Context, node: NodeRow, path: str) -> None:
    """Give a plain node and all below it their new store paths; inside a change."""
    ctx.spool.update_node(node.ino, plain_path=path)
    if node.kind is not NodeKind.DIR:
        return
    for name, child in ctx.spool.children(node.ino):
        if child.plain_path is not None:
            set_paths(ctx, child, f"{path}/{name}")
    for row in ctx.spool.pending(parent=node.ino):
        pending = None if row.ino is None else ctx.spool.node(row.ino)
        if pending is not None and pending.plain_path is not None:
            ctx.spool.update_node(pending.ino, plain_path=f"{path}/{row.name}")
