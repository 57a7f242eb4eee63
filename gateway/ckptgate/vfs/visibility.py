"""Who sees what: the meaning of a name for a caller. The order of rules is here and only here.

In a plain directory a name means, first match wins: an undecided attempt of the caller's own
incarnation; nothing, if that incarnation deleted it; the committed checkpoint; a pending pointer or
whole file of the incarnation; the log's pointer; a plain name of this spool; an attempt that other
members of the caller's shared job began; a plain name in the store. Inside an attempt a name means
its child, for the owner of a revision that of the copy. Any thread.
"""

from __future__ import annotations

import enum
import errno

import msgspec

from ckptgate.errors import CkptError, MissingError, TransientStoreError
from ckptgate.model.layout import GATEWAY_DIR
from ckptgate.model.states import UNDECIDED, AttemptState
from ckptgate.ports.catalog import RunView
from ckptgate.ports.spool import AttemptRow, NodeKind, NodeRow, PendingRow
from ckptgate.vfs import names, plain, pointers, waits
from ckptgate.vfs.context import Context, Who
from ckptgate.vfs.interface import Caller
from ckptgate.vfs.liveness import is_hidden
from ckptgate.vfs.looking_again import replaced

__all__ = [
    "Found",
    "What",
    "committed_here",
    "committed_names",
    "copy_of",
    "directory",
    "filled",
    "inner_timeout",
    "is_deleted",
    "name_timeout",
    "own_attempt",
    "own_attempts",
    "redirect",
    "resolve",
    "revision_of",
]


class What(enum.Enum):
    """Which rule gave a name its meaning."""

    ATTEMPT = enum.auto()
    """Root of an undecided attempt of the caller."""
    COMMITTED = enum.auto()
    """Root of a committed checkpoint."""
    INNER = enum.auto()
    """A node inside an attempt or committed checkpoint."""
    PENDING = enum.auto()
    """A new value that only the caller's incarnation sees."""
    POINTER = enum.auto()
    """The log's pointer."""
    PLAIN = enum.auto()


class Found(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a name means.

    Attributes:
        node: its node.
        what: by which rule.
        timeout_s: how long the kernel may keep the name.
        attempt: for roots: the attempt.
        pending: for pending values: the row.
    """

    node: NodeRow
    what: What
    timeout_s: float
    attempt: AttemptRow | None = None
    pending: PendingRow | None = None


def directory(ctx: Context, caller: Caller, ino: int) -> NodeRow:
    """The directory that *ino* is for this caller.

    Raises:
        CkptError: ESTALE if it is gone, ENOTDIR if it is none.
    """
    node = ctx.node(ino)
    row = None if node.attempt is None else ctx.spool.attempt(node.attempt)
    if row is not None and row.state is AttemptState.COMMITTED:
        node = redirect(ctx, caller, node)
        row = None if node.attempt is None else ctx.spool.attempt(node.attempt)
    if node.kind is not NodeKind.DIR:
        msg = f"node {ino} is not a directory"
        raise CkptError(msg, errno_value=errno.ENOTDIR)
    if row is not None:
        filled(ctx, caller, row)
    return node


def filled(ctx: Context, caller: Caller, row: AttemptRow) -> None:
    """Have the tree of a committed checkpoint here, of which only the root may be so far."""
    if row.is_root_only:
        ctx.need_block(caller)
        ctx.catalog.fill(row.id)


def revision_of(ctx: Context, who: Who, base: AttemptRow) -> AttemptRow | None:
    """The undecided revision of *base* that the caller's incarnation writes."""
    for row in reversed(ctx.spool.attempts(run_ino=base.run_ino, states=UNDECIDED)):
        if row.base == base.id and row.job_key == who.key:
            return row
    return None


def copy_of(ctx: Context, caller: Caller, node: NodeRow) -> NodeRow | None:
    """The node that stands for a committed *node* in the caller's revision, if any."""
    row = None if node.attempt is None else ctx.spool.attempt(node.attempt)
    if row is None or row.state is not AttemptState.COMMITTED:
        return None
    undecided = ctx.spool.attempts(run_ino=row.run_ino, states=UNDECIDED)
    if all(later.base != row.id for later in undecided):
        return None
    revision = revision_of(ctx, ctx.who(caller), row)
    return None if revision is None else ctx.spool.node(_clones(ctx, revision).get(node.ino, 0))


def is_deleted(ctx: Context, who: Who, row: AttemptRow) -> bool:
    """Whether the caller's incarnation removed this committed checkpoint."""
    return any(
        stone.name == row.name and stone.attempt == row.attempt and stone.job_key == who.key
        for stone in ctx.spool.tombstones(run=row.run)
    )


def redirect(ctx: Context, caller: Caller, node: NodeRow) -> NodeRow:
    """The node of the caller's revision that stands for *node*, or *node* itself.

    Raises:
        MissingError: ENOENT, the caller's incarnation removed it, or the checkpoint.
        CkptError: ESTALE, the revision has something else there: see `looking_again.replaced`.
    """
    if node.attempt is None:
        return node
    row = ctx.spool.attempt(node.attempt)
    if row is None or row.state is not AttemptState.COMMITTED:
        return node
    who = ctx.who(caller)
    revision = revision_of(ctx, who, row)
    if revision is None:
        if is_deleted(ctx, who, row):
            raise _removed(row)
        return node
    found = ctx.spool.node(_clones(ctx, revision).get(node.ino, 0))
    if found is None:
        if _is_made_again(ctx, node, revision):
            why = f"was replaced in the revision of {row.name!r}"
            raise replaced(ctx, caller, node.ino, f"node {node.ino}", why)
        # As in a removed directory that somebody still has open.
        msg = f"node {node.ino} was removed in the revision of {row.name!r}"
        raise MissingError(msg, subject=row.name)
    return found


def _removed(row: AttemptRow) -> MissingError:
    """As in a removed directory that somebody still has open."""
    return MissingError(f"checkpoint {row.name!r} was removed", subject=row.name)


def _is_made_again(ctx: Context, node: NodeRow, revision: AttemptRow) -> bool:
    """Whether the revision has something else where *node* of its base is."""
    ino = revision.root
    for part in filter(None, names.path_in_attempt(ctx, node.ino).split("/")):
        child = ctx.spool.child(ino, part)
        if child is None:
            return False
        ino = child.ino
    return True


def _clones(ctx: Context, revision: AttemptRow) -> dict[int, int]:
    """Node of the base -> its copy in the revision."""
    with ctx.lock:
        known = ctx.memory.clones.get(revision.id)
    if known is None:
        nodes = [node for _, node in ctx.spool.tree(revision.id)]
        root = ctx.spool.node(revision.root)
        if root is not None:
            nodes.append(root)
        known = {node.base: node.ino for node in nodes if node.base is not None}
        with ctx.lock:
            ctx.memory.clones[revision.id] = known
    return known


def own_attempts(ctx: Context, who: Who, run_ino: int) -> dict[str, AttemptRow]:
    """Name -> newest visible undecided attempt of the caller's incarnation."""
    found: dict[str, AttemptRow] = {}
    for row in ctx.spool.attempts(run_ino=run_ino, states=UNDECIDED):
        if row.job_key == who.key and not is_hidden(ctx, row, who):
            found[row.name] = row
    return found


def own_attempt(ctx: Context, who: Who, run_ino: int, name: str) -> AttemptRow | None:
    """The newest visible undecided attempt of the caller's incarnation at *name*."""
    for row in reversed(ctx.spool.attempts(run_ino=run_ino, name=name, states=UNDECIDED)):
        if row.job_key == who.key and not is_hidden(ctx, row, who):
            return row
    return None


def committed_here(
    ctx: Context, run_ino: int, name: str, view: RunView
) -> tuple[AttemptRow | None, str]:
    """The committed attempt at *name* if it is in the spool, and its id ("" for none).

    The publisher commits in the spool at once; *view* may be a moment older.
    """
    rows = ctx.spool.attempts(run_ino=run_ino, name=name, states=(AttemptState.COMMITTED,))
    said = view.committed.get(name, "")
    if not rows:
        return None, said
    newest = rows[-1]
    is_ahead = newest.attempt in view.undecided or newest.seal_index >= view.length
    if newest.attempt == said or is_ahead:
        return newest, newest.attempt
    return None, said


def committed_names(ctx: Context, run_ino: int, view: RunView) -> dict[str, str]:
    """Name -> attempt id of all that is committed."""
    found = dict(view.committed)
    for row in ctx.spool.attempts(run_ino=run_ino, states=(AttemptState.COMMITTED,)):
        if row.attempt in view.undecided or row.seal_index >= view.length:
            found[row.name] = row.attempt
    return found


def resolve(ctx: Context, caller: Caller, parent: NodeRow, name: str) -> Found | None:
    """What *name* means in *parent* (as `directory` gave it) for this caller; None: nothing."""
    if parent.attempt is not None:
        return _inner(ctx, caller, parent, name)
    if name == GATEWAY_DIR:
        return None
    who = ctx.who(caller)
    row = own_attempt(ctx, who, parent.ino, name)
    if row is not None:
        return Found(node=ctx.node(row.root), what=What.ATTEMPT, timeout_s=0.0, attempt=row)
    child = ctx.spool.child(parent.ino, name)
    is_plain = child is not None and child.plain_path is not None
    if child is not None and is_plain and not names.is_special(ctx, parent, name):
        pending = pointers.own_pending(ctx, who, parent, name)
        if pending is not None and pending.ino is not None:
            # A new version that is held, see `interface.HELD`.
            node = ctx.node(pending.ino)
            return Found(node=node, what=What.PENDING, timeout_s=0.0, pending=pending)
        return _plain_found(ctx, caller, parent, name, child)
    return _in_run(ctx, caller, who, parent, name)


def _inner(ctx: Context, caller: Caller, parent: NodeRow, name: str) -> Found | None:
    child = ctx.spool.child(parent.ino, name)
    if child is None and waits.refresh_shared(ctx, caller, parent):
        child = ctx.spool.child(parent.ino, name)
    if child is None:
        return None
    return Found(node=child, what=What.INNER, timeout_s=inner_timeout(ctx, parent))


def name_timeout(ctx: Context, number: int, parent: NodeRow, name: str) -> float:
    """How long the kernel may keep a name just made in *parent*, which it knows by *number*."""
    if parent.ino != number:
        return 0.0
    if parent.attempt is not None:
        return inner_timeout(ctx, parent)
    return _plain_timeout(ctx, parent, name)


def _plain_timeout(ctx: Context, parent: NodeRow, name: str) -> float:
    """How long the kernel may keep a name outside of attempts, whoever made it or asks for it."""
    return 0.0 if names.is_special(ctx, parent, name) else ctx.settings.entry_timeout_s


def inner_timeout(ctx: Context, parent: NodeRow) -> float:
    """How long the kernel may keep names in a directory of an attempt."""
    assert parent.attempt is not None
    # While somebody revises a committed checkpoint, its names depend on the caller.
    row = ctx.spool.attempt(parent.attempt)
    if row is None or (row.base is not None and row.state in UNDECIDED):
        # A revision is changed by way of the committed directories too, of which the kernel
        # doesn't know that they are the same.
        return 0.0
    if row.state is AttemptState.COMMITTED and any(
        other.base == row.id for other in ctx.spool.attempts(run_ino=row.run_ino, states=UNDECIDED)
    ):
        return 0.0
    return ctx.settings.entry_timeout_s


def _in_run(ctx: Context, caller: Caller, who: Who, parent: NodeRow, name: str) -> Found | None:
    view = ctx.view(caller, parent.plain_path or "")
    view = waits.wait_to_resume(ctx, caller, who, parent, view)
    found, is_deleted = _committed(ctx, caller, who, parent, name, view)
    if found is not None or is_deleted:
        return found
    pending = pointers.own_pending(ctx, who, parent, name)
    if pending is not None:
        if pending.ino is None:
            return None
        node = ctx.node(pending.ino)
        return Found(node=node, what=What.PENDING, timeout_s=0.0, pending=pending)
    if name in view.pointers or names.is_pointer(ctx, parent, name):
        view = pointers.caught_up(ctx, caller, parent, view, name)
    logged = pointers.logged(ctx, parent, name, view)
    if logged is not None:
        return Found(node=logged, what=What.POINTER, timeout_s=0.0)
    return _plain_or_other(ctx, caller, who, parent, name, view)


def _committed(
    ctx: Context, caller: Caller, who: Who, parent: NodeRow, name: str, view: RunView
) -> tuple[Found | None, bool]:
    """The committed checkpoint at *name*, and whether the incarnation deleted it."""
    row, attempt = committed_here(ctx, parent.ino, name, view)
    if not attempt:
        return None, False
    run = parent.plain_path or ""
    stones = [stone for stone in ctx.spool.tombstones(run=run) if stone.name == name]
    if any(stone.job_key == who.key and stone.attempt == attempt for stone in stones):
        return None, True
    if row is None:
        ctx.need_block(caller)
        row = ctx.catalog.materialise(run, parent.ino, name)
    is_disputed = bool(stones) or bool(
        ctx.spool.attempts(run_ino=parent.ino, name=name, states=UNDECIDED)
    )
    timeout = 0.0 if is_disputed else ctx.settings.entry_timeout_s
    node = ctx.node(row.root)
    return Found(node=node, what=What.COMMITTED, timeout_s=timeout, attempt=row), False


def _plain_or_other(
    ctx: Context, caller: Caller, who: Who, parent: NodeRow, name: str, view: RunView
) -> Found | None:
    child = ctx.spool.child(parent.ino, name)
    if child is not None and child.plain_path is not None:
        return _plain_found(ctx, caller, parent, name, child)
    if who.is_shared and names.is_checkpoint(ctx, parent, name):
        other = _others_attempt(ctx, caller, who, parent, name)
        if other is not None:
            return other
    if name in view.names or name in view.pointers:
        return None
    node = plain.store_child(ctx, caller, parent, name)
    return None if node is None else _plain_answer(ctx, parent, name, node)


def _others_attempt(
    ctx: Context, caller: Caller, who: Who, parent: NodeRow, name: str
) -> Found | None:
    asked = ("find-open", parent.ino, name, who.key)
    if not ctx.is_due(asked, ctx.settings.refresh_interval_s):
        return None
    ctx.need_block(caller)
    try:
        row = ctx.catalog.find_open(parent.plain_path or "", parent.ino, name, who.key)
    except TransientStoreError as exc:
        ctx.store_is_away(exc, "find-open")
        # The store may have told of it before it went away: then it is here, to be joined later.
        row = own_attempt(ctx, who, parent.ino, name)
    ctx.done_now(asked)
    if row is None or row.state not in UNDECIDED or is_hidden(ctx, row, who):
        return None
    return Found(node=ctx.node(row.root), what=What.ATTEMPT, timeout_s=0.0, attempt=row)


def _plain_found(
    ctx: Context, caller: Caller, parent: NodeRow, name: str, child: NodeRow
) -> Found | None:
    node = plain.refreshed(ctx, caller, parent, name, child)
    return None if node is None else _plain_answer(ctx, parent, name, node)


def _plain_answer(ctx: Context, parent: NodeRow, name: str, node: NodeRow) -> Found:
    return Found(node=node, what=What.PLAIN, timeout_s=_plain_timeout(ctx, parent, name))
