"""Who may change what in an attempt's tree; revisions of committed checkpoints.

Owns the rule that a committed tree never changes: the first change by an incarnation makes a
revision, a copy of the tree's rows whose files share the old bytes until they are written, and only
that incarnation sees it. Any thread; `writable` may block and is called before a change begins.
"""

from __future__ import annotations

import errno
import logging

import msgspec

from ckptgate.errors import CkptError, MissingError
from ckptgate.model.states import UNCHANGED, UNDECIDED, AttemptState
from ckptgate.ports.spool import AttemptRow, NodeKind, NodeRow
from ckptgate.vfs import visibility, waits
from ckptgate.vfs.context import Context, MeanwhileError, Who, stale
from ckptgate.vfs.interface import Caller
from ckptgate.vfs.liveness import record_writer
from ckptgate.vfs.looking_again import has_come_again, replaced
from ckptgate.vfs.unused import is_nameless

__all__ = [
    "by_descriptor",
    "drop_unchanged",
    "name_is_kept",
    "revise",
    "touch",
    "writable",
    "writable_directory",
]

_log = logging.getLogger(__name__)


def writable(ctx: Context, caller: Caller, node: NodeRow) -> NodeRow:
    """The node that this caller changes when it changes *node*: itself, or its revision's copy.

    Waits while the attempt is being decided.

    Raises:
        CkptError: ESTALE if its attempt takes no changes any more.
        BusyError: it is still being decided.
        MissingError: ENOENT, the caller's incarnation removed the checkpoint.
    """
    while (attempt := node.attempt) is not None:
        row = ctx.spool.attempt(attempt)
        if row is None:
            raise stale(f"node {node.ino}", "its attempt is gone")
        if row.state in UNDECIDED:
            if not row.is_voted:
                ctx.expect(lambda: _check_undecided(ctx, attempt))
                return node
            waits.decided(ctx, caller, row)
            continue
        if row.state in {AttemptState.ABANDONED, AttemptState.ABORTED}:
            # As in a removed directory that somebody still has open.
            msg = f"checkpoint {row.name!r} was given up: {row.reason}"
            raise MissingError(msg, subject=row.name)
        if row.state is not AttemptState.COMMITTED:
            raise _outlived(ctx, caller, node, row)
        visibility.filled(ctx, caller, row)
        who = ctx.who(caller)
        if visibility.revision_of(ctx, who, row) is None:
            # Raises ENOENT if the incarnation removed the checkpoint.
            visibility.redirect(ctx, caller, node)
            revise(ctx, who, row)
        copy = visibility.redirect(ctx, caller, node)
        if copy.ino == node.ino:
            continue
        node = copy
    return node


def _outlived(ctx: Context, caller: Caller, node: NodeRow, row: AttemptRow) -> CkptError:
    """The error for a change in a tree that is no longer what its name means.

    Where the name means something else the kernel has to look it up again; where it means nothing
    any more this is a removed directory that somebody still has open.
    """
    later = (*UNDECIDED, AttemptState.COMMITTED)
    if ctx.spool.attempts(run_ino=row.run_ino, name=row.name, states=later):
        return replaced(ctx, caller, node.ino, row.name, f"its attempt is {row.state}")
    return MissingError(f"checkpoint {row.name!r} was removed", subject=row.name)


def _check_undecided(ctx: Context, attempt: int) -> None:
    """Refuse a change whose attempt was voted since `writable` allowed it.

    The call is done once more, waits for the decision, and begins a revision.
    """
    row = ctx.spool.attempt(attempt)
    if row is None or row.is_voted or row.state not in UNDECIDED:
        name = "" if row is None else row.name
        msg = f"{name!r} is being decided or was given up"
        raise MeanwhileError(msg, subject=name)


def writable_directory(ctx: Context, caller: Caller, node: NodeRow) -> NodeRow:
    """`writable` for a directory in which a name is to be made.

    Raises:
        MissingError: ENOENT, the directory was removed: the kernel sees to that only where it was
            removed by the same way (see `standins`), on this node.
    """
    parent = writable(ctx, caller, node)
    _check_named(ctx, parent.ino)
    ctx.expect(lambda: _check_named(ctx, parent.ino))
    return parent


def _check_named(ctx: Context, ino: int) -> None:
    if is_nameless(ctx, ino):
        msg = f"directory {ino} was removed"
        raise MissingError(msg, subject=f"node {ino}")


def touch(ctx: Context, who: Who, node: NodeRow) -> None:
    """Note that the attempt of *node* (if any) was changed by this process; inside a change."""
    row = None if node.attempt is None else ctx.spool.attempt(node.attempt)
    if row is not None:
        record_writer(ctx, row, who)
        ctx.wake()


def revise(ctx: Context, who: Who, base: AttemptRow) -> AttemptRow:
    """Start a revision of the committed attempt *base* for the caller's incarnation.

    Another thread of it may just have done so: that one is given then.
    """
    now = ctx.clock.now_ns()
    with ctx.change():
        present = visibility.revision_of(ctx, who, base)
        if present is not None:
            return present
        root = ctx.node(base.root)
        new_root = ctx.spool.add_node(
            msgspec.structs.replace(root, ino=0, attempt=None, base=root.ino)
        )
        row = ctx.spool.add_attempt(
            AttemptRow(
                id=0,
                run=base.run,
                run_ino=base.run_ino,
                name=base.name,
                attempt="",
                job_key=who.key,
                generation=-1,
                state=AttemptState.OPEN,
                root=new_root.ino,
                base=base.id,
                world_size=who.world_size,
                created_ns=now,
                write_ns=now,
            )
        )
        ctx.spool.update_node(new_root.ino, attempt=row.id)
        clones = {root.ino: new_root.ino}
        _clone_below(ctx, root.ino, new_root.ino, row.id, clones)
        ctx.note_began(base.run, row.id)
        row = record_writer(ctx, row, who)
        ctx.spool.watch_run(base.run)
    with ctx.lock:
        ctx.memory.clones[row.id] = clones
    ctx.invalidate(base.run_ino, base.name)
    ctx.wake()
    _log.info("revision-starts run=%r name=%r base=%s", base.run, base.name, base.attempt)
    return row


def by_descriptor(ctx: Context, caller: Caller, node: NodeRow, copy: NodeRow, begun: int) -> None:
    """Refuse an open for writing of a committed file by the descriptor of another open.

    A path leads to the revision's copy once it is looked up again; a descriptor doesn't. What the
    first try began for nothing is given up.

    Raises:
        CkptError: EPERM, this is the second try.
    """
    first = has_come_again(ctx, caller, node.ino, begun)
    if first is None:
        return
    row = ctx.spool.attempt(first) if first else None
    if row is not None and row.id == copy.attempt:
        with ctx.taking_over():
            drop_unchanged(ctx, first)
    msg = f"node {node.ino} is committed: only by its path a new version of it can be opened"
    _log.warning("open-by-descriptor-refused ino=%d pid=%d", node.ino, caller.pid)
    raise CkptError(msg, subject=str(node.ino), errno_value=errno.EPERM)


def drop_unchanged(ctx: Context, attempt: int) -> None:
    """Give a revision up in which nothing was changed; inside a change."""
    row = ctx.spool.attempt(attempt)
    if row is not None and _is_as_its_base(ctx, row):
        ctx.spool.update_attempt(row.id, state=AttemptState.ABANDONED, reason=UNCHANGED)
        ctx.invalidate(row.run_ino, row.name)


def _is_as_its_base(ctx: Context, row: AttemptRow) -> bool:
    """Whether a revision has nothing but what it began with."""
    base = None if row.base is None else ctx.spool.attempt(row.base)
    if base is None or row.state is not AttemptState.OPEN or ctx.spool.handles_of_attempt(row.id):
        return False
    theirs = dict(ctx.spool.tree(base.id))
    mine = dict(ctx.spool.tree(row.id))
    return mine.keys() == theirs.keys() and all(
        msgspec.structs.replace(theirs[path], ino=node.ino, attempt=row.id, base=theirs[path].ino)
        == node
        for path, node in mine.items()
    )


def name_is_kept(row: AttemptRow, new_name: str) -> CkptError:
    """The error for a rename of a committed checkpoint, or of a revision of one.

    Two names would share one tree; and a copy, which tools make on EXDEV, isn't what was asked.
    """
    what = "is a revision of a committed checkpoint" if row.base is not None else "is committed"
    _log.warning("rename-refused run=%r name=%r to=%r reason=%r", row.run, row.name, new_name, what)
    msg = f"{row.name!r} {what} and keeps its name"
    hint = f"copy it: cp -r {row.name} {new_name}"
    return CkptError(msg, subject=row.name, hint=hint, errno_value=errno.EPERM)


def _clone_below(
    ctx: Context, source: int, target: int, attempt: int, clones: dict[int, int]
) -> None:
    for name, node in ctx.spool.children(source):
        copy = ctx.spool.add_node(
            msgspec.structs.replace(node, ino=0, attempt=attempt, base=node.ino)
        )
        ctx.spool.copy_xattrs(node.ino, copy.ino)
        clones[node.ino] = copy.ino
        ctx.spool.link(target, name, copy.ino)
        if node.kind is NodeKind.DIR:
            _clone_below(ctx, node.ino, copy.ino, attempt, clones)
