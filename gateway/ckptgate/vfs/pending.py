"""New values of pointers and whole files, before they are published.

Owns which text or link names a checkpoint, and what becomes of a value that doesn't. Inside a
change, except where it says otherwise. Any thread.
"""

from __future__ import annotations

import re

from ckptgate.model.states import UNDECIDED, AttemptState, FileState
from ckptgate.ports.catalog import RunView
from ckptgate.ports.spool import (
    NodeKind,
    NodeRow,
    PendingKind,
    PendingRow,
    PlainOpKind,
)
from ckptgate.vfs import events, names, plain, pointers
from ckptgate.vfs.context import Context, Who
from ckptgate.vfs.unused import drop_if_unused

__all__ = [
    "decide",
    "drop",
    "drop_others",
    "drop_own",
    "is_awaited",
    "is_closed_whole",
    "is_pointed",
    "last_view",
    "names_checkpoint",
    "names_file",
    "pending_of",
    "place_plain",
    "put",
    "remove_plain",
]

_LIVE_STATES = (AttemptState.OPEN, AttemptState.SEALED, AttemptState.COMMITTED)
_LAST_NUMBER = re.compile(r"([0-9]+)[^0-9]*\Z")


def pending_of(ctx: Context, ino: int) -> PendingRow | None:
    """The pending row whose value is this node."""
    return next((row for row in ctx.spool.pending() if row.ino == ino), None)


def put(
    ctx: Context,
    who: Who,
    parent: NodeRow,
    name: str,
    ino: int | None,
    kind: PendingKind,
    *,
    target: str = "",
    is_held: bool = False,
) -> PendingRow:
    """Make *ino* (None: nothing) what the caller's incarnation sees under that name.

    A pointer's value before that stays for the commit of its target, if that is still to come: else
    nobody would know then what the framework's pointer was. A whole file that is closed stays until
    the new version is, if that *is_held*: its writer may give it up.
    """
    for old in ctx.spool.pending(parent=parent.ino, name=name):
        is_kept = kind is PendingKind.POINTER and ino is not None and old.target != target
        is_kept = is_kept and is_awaited(ctx, old)
        is_kept = is_kept or (is_held and is_closed_whole(ctx, old))
        if old.job_key == who.key and not is_kept:
            drop(ctx, old)
    row = ctx.spool.add_pending(
        PendingRow(
            id=0,
            parent=parent.ino,
            name=name,
            ino=ino,
            kind=kind,
            job_key=who.key,
            target=target,
        )
    )
    ctx.spool.watch_run(parent.plain_path or "")
    ctx.wake()
    return row


def drop_own(ctx: Context, who: Who, parent: NodeRow, name: str) -> None:
    """Forget the incarnation's pending values of that name."""
    for row in ctx.spool.pending(parent=parent.ino, name=name):
        if row.job_key == who.key:
            drop(ctx, row)


def drop(ctx: Context, row: PendingRow) -> None:
    """Forget a pending value."""
    ctx.spool.drop_pending(row.id)
    if row.ino is not None:
        drop_if_unused(ctx, row.ino, is_forgotten=False)


def drop_others(ctx: Context, row: PendingRow, target: str = "") -> None:
    """Forget the incarnation's earlier values of that name; with *target* those that name it."""
    for other in ctx.spool.pending(parent=row.parent, name=row.name):
        is_own = other.id != row.id and other.job_key == row.job_key
        if is_own and target in {"", other.target}:
            drop(ctx, other)


def is_awaited(ctx: Context, row: PendingRow) -> bool:
    """Whether it is a pointer to a checkpoint of its job that is yet to be decided."""
    if row.kind is not PendingKind.POINTER or row.ino is None or not row.target:
        return False
    found = ctx.spool.attempts(run_ino=row.parent, name=row.target, states=UNDECIDED)
    return any(attempt.job_key == row.job_key for attempt in found)


def is_closed_whole(ctx: Context, row: PendingRow) -> bool:
    """Whether it is a whole file that nobody writes."""
    node = None if row.ino is None else ctx.spool.node(row.ino)
    file = None if node is None or node.file is None else ctx.spool.file(node.file)
    return row.kind is PendingKind.WHOLE and file is not None and file.state is not FileState.OPEN


def last_view(ctx: Context, run: str) -> RunView | None:
    """The run as it was last known, if that was ever read; doesn't block."""
    if not ctx.catalog.is_fresh(run, 3600.0):
        return None
    return ctx.catalog.view(run, 3600.0)


def names_checkpoint(ctx: Context, parent: NodeRow, content: str) -> str:
    """The checkpoint beside the pointer that *content* names, "" for none."""
    text = content.strip().rstrip("/")
    text = text.removeprefix("./")
    known = _known_names(ctx, parent)
    last = text.rpartition("/")[2]
    if not text or last in {"", ".", ".."}:
        return ""
    if last in known and ("/" not in text or text.startswith("/")):
        return last
    if "/" in text:
        return ""
    if text.isdecimal():
        return _by_number(known, int(text))
    child = ctx.spool.child(parent.ino, text)
    if child is not None or names.is_whole(ctx, parent, text):
        # A file beside the checkpoints, such as the newest of a row of `.ckpt` files.
        return ""
    return text if ctx.patterns.is_checkpoint(text) else ""


def names_file(ctx: Context, parent: NodeRow, content: str) -> bool:
    """Whether a link with that content names a whole file beside it: it is published after that."""
    return "/" not in content and names.is_whole(ctx, parent, content)


def is_pointed(ctx: Context, parent: NodeRow, name: str) -> bool:
    """Whether a name that all see is a pointer to a file beside it, or a file that one points to.

    Others go on seeing it until the pointer has moved: the job removes both before that.
    """
    child = ctx.spool.child(parent.ino, name)
    if child is None or child.attempt is not None:
        return False
    if child.kind is NodeKind.SYMLINK:
        return names.is_pointer(ctx, parent, name) and names_file(ctx, parent, child.target)
    if not names.is_whole(ctx, parent, name):
        return False
    links = (ctx.spool.child(parent.ino, link) for link in ctx.patterns.pointers)
    return any(link is not None and link.target == name for link in links)


def _known_names(ctx: Context, parent: NodeRow) -> list[str]:
    """Names of checkpoints in the directory, newest last."""
    found = [row.name for row in ctx.spool.attempts(run_ino=parent.ino, states=_LIVE_STATES)]
    view = last_view(ctx, parent.plain_path or "")
    return [*(view.committed if view is not None else ()), *found]


def _by_number(known: list[str], number: int) -> str:
    """The newest checkpoint whose name ends with that number (trackers hold numbers only)."""
    for name in reversed(known):
        match = _LAST_NUMBER.search(name)
        if match and int(match[1]) == number:
            return name
    return ""


def decide(
    ctx: Context, who: Who, parent: NodeRow, row: PendingRow, node: NodeRow
) -> PendingRow | None:
    """A pointer's text is written: hold it if it names a checkpoint, else make it what it is.

    Returns:
        The pending row if it still is one.
    """
    text = pointers.read_text(ctx, node)
    target = "" if text is None else names_checkpoint(ctx, parent, text)
    drop_others(ctx, row, target)
    if target:
        ctx.spool.update_pending(row.id, target=target)
        events.after_pointer(ctx, who, parent.ino, target, row.name)
        ctx.wake()
        return next(item for item in ctx.spool.pending(parent=parent.ino) if item.id == row.id)
    if text is None and names.is_whole(ctx, parent, row.name):
        ctx.spool.drop_pending(row.id)
        return put(ctx, who, parent, row.name, node.ino, PendingKind.WHOLE)
    view = last_view(ctx, parent.plain_path or "")
    if view is not None and row.name in view.pointers:
        # Others go on seeing the log's value, this incarnation what it wrote.
        ctx.wake()
        return row
    ctx.spool.drop_pending(row.id)
    place_plain(ctx, parent, row.name, node)
    plain.queue_put(ctx, ctx.node(node.ino))
    return None


def place_plain(ctx: Context, parent: NodeRow, name: str, node: NodeRow) -> None:
    """Make *node* what everybody sees under a plain name; what was there becomes nameless."""
    old = ctx.spool.child(parent.ino, name)
    if old is not None:
        ctx.spool.unlink(parent.ino, name)
    ctx.spool.update_node(node.ino, plain_path=names.plain_path(parent, name))
    ctx.spool.link(parent.ino, name, node.ino)
    if old is not None and old.ino != node.ino:
        drop_if_unused(ctx, old.ino, is_forgotten=False)
    ctx.invalidate(parent.ino, name)


def remove_plain(ctx: Context, who: Who, parent: NodeRow, name: str, *, is_dir: bool) -> None:
    """Take a plain name away, here and in the store."""
    drop_own(ctx, who, parent, name)
    child = ctx.spool.child(parent.ino, name)
    if child is not None:
        ctx.spool.unlink(parent.ino, name)
        drop_if_unused(ctx, child.ino, is_forgotten=False)
    op = PlainOpKind.RMDIR if is_dir else PlainOpKind.REMOVE
    plain.queue(ctx, op, names.plain_path(parent, name))
