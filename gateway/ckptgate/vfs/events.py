"""What says that a checkpoint gets no more writes, as it is seen here: commit events.

Owns the rule that the first event counts. The formats say what an event is; a rename of the whole
directory from a temporary name, and explicit commits, are events of no format. An early event, by
which one rank says that it is done, is noted only: the publisher seals once the rest is there.
Inside a change; any thread.
"""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Collection, Iterator

from ckptgate.errors import CkptError, MissingError, UsageError
from ckptgate.formats import registry
from ckptgate.formats.base import CommitEvent, FileOp
from ckptgate.model.entries import SealEvent
from ckptgate.model.saving import parse_record
from ckptgate.model.states import UNDECIDED, AttemptState
from ckptgate.ports import recording
from ckptgate.ports.explicit import check_ranks, record_explicit_commit
from ckptgate.ports.spool import AttemptRow, NodeRow
from ckptgate.vfs import names
from ckptgate.vfs.context import Context, Who
from ckptgate.vfs.liveness import record_writer

__all__ = [
    "after_close",
    "after_pointer",
    "after_rename",
    "begin",
    "commit_explicitly",
    "give_up",
    "parse_ranks",
    "record_saving",
    "seal",
    "state_text",
]

_log = logging.getLogger(__name__)


class _Paths(Collection[str]):
    """The attempt's file paths, read from the spool only when somebody looks."""

    def __init__(self, ctx: Context, attempt: int) -> None:
        self._ctx = ctx
        self._attempt = attempt
        self._paths: list[str] | None = None

    def _known(self) -> list[str]:
        if self._paths is None:
            files = self._ctx.spool.files_of_attempt(self._attempt)
            self._paths = [path for path, _, _ in files]
        return self._paths

    def __iter__(self) -> Iterator[str]:
        return iter(self._known())

    def __len__(self) -> int:
        return len(self._known())

    def __contains__(self, item: object) -> bool:
        return item in self._known()


def after_close(ctx: Context, node: NodeRow) -> None:
    """A file of an attempt was closed by its writer."""
    if ctx.spool.place(node.ino) is not None:
        _look_for_event(ctx, node, "close", names.path_in_attempt(ctx, node.ino), "")


def is_event(ctx: Context, node: NodeRow) -> bool:
    """Whether the close of this file of an open attempt would be a commit event."""
    row = None if node.attempt is None else ctx.spool.attempt(node.attempt)
    if row is None or row.event:
        return False
    path = names.path_in_attempt(ctx, node.ino)
    return registry.commit_event(_Paths(ctx, row.id), "close", path, "", row.name) is not None


def after_rename(ctx: Context, node: NodeRow, old: str) -> None:
    """A file of an attempt, formerly *old*, got its present name."""
    _look_for_event(ctx, node, "rename", names.path_in_attempt(ctx, node.ino), old)


def _look_for_event(ctx: Context, node: NodeRow, op: FileOp, path: str, old: str) -> None:
    row = None if node.attempt is None else ctx.spool.attempt(node.attempt)
    if row is None or row.event or row.state not in {AttemptState.OPEN, AttemptState.SEALED}:
        return
    found = registry.commit_event(_Paths(ctx, row.id), op, path, old, row.name)
    if found is not None:
        _note(ctx, row, found[1])


def after_pointer(ctx: Context, who: Who, run_ino: int, name: str, pointer: str) -> None:
    """A pointer was set to the checkpoint *name* by its incarnation."""
    for row in reversed(ctx.spool.attempts(run_ino=run_ino, name=name, states=UNDECIDED)):
        if row.job_key == who.key:
            found = registry.pointer_event(_Paths(ctx, row.id), pointer, name)
            if found is not None and not row.event:
                _note(ctx, row, found[1])
            return


def _note(ctx: Context, row: AttemptRow, event: CommitEvent) -> None:
    if not event.is_early:
        seal(ctx, row, SealEvent.FORMAT, event.name)
    elif row.detail != event.name:
        ctx.spool.update_attempt(row.id, detail=event.name)
        ctx.wake()
        _log.info("early-event run=%r name=%r detail=%s", row.run, row.name, event.name)


def seal(ctx: Context, row: AttemptRow, event: SealEvent, detail: str = "") -> None:
    """Note the commit event."""
    if row.event:
        return
    ctx.spool.update_attempt(
        row.id,
        state=AttemptState.SEALED,
        event=str(event),
        detail=detail,
        event_ns=ctx.clock.now_ns(),
    )
    ctx.wake()
    _log.info("commit-event run=%r name=%r event=%s detail=%s", row.run, row.name, event, detail)


def parse_ranks(name: str, value: bytes) -> tuple[int | None, int | None, bool]:
    """(rank, world size, for all) of the attribute *name*.

    Raises:
        UsageError: EINVAL, it is neither `RANK/WORLD` with a rank below the world size, nor `all`.
    """
    text = value.decode("ascii", "replace").strip()
    if text == "all":
        return None, None, True
    rank, sep, world = text.partition("/")
    if sep and rank.isdecimal() and world.isdecimal() and len(text) < 20:
        return int(rank), int(world), False
    msg = f"{name} is {text[:40]!r}, not RANK/WORLD or all"
    raise UsageError(msg, hint=f"setfattr -n {name} -v 0/8 CHECKPOINT")


def begin(
    ctx: Context, attempt: int, who: Who, rank: int | None, world_size: int | None
) -> AttemptRow:
    """A rank (None: somebody for all) begins its part of the attempt; inside a change.

    Raises:
        UsageError: EINVAL, an impossible rank or world size.
        ExistsError, MissingError, RefusedError: see `recording.begin_part`.
    """
    check_ranks(rank, world_size, is_all=rank is None)
    row = recording.begin_part(ctx.spool, attempt, rank=rank, writer=(who.pid, who.start))
    row = record_writer(ctx, row, who)
    if row.world_size is None and world_size is not None:
        row = ctx.spool.update_attempt(row.id, world_size=world_size)
    _log.info("part-begun run=%r name=%r rank=%s", row.run, row.name, rank)
    return row


def record_saving(ctx: Context, attempt: int, who: Who, value: bytes) -> AttemptRow:
    """Keep how a rank saves; inside a change.

    The record says whose it is, else the caller's environment does.

    Raises:
        UsageError: EINVAL, it is no record.
        MissingError, RefusedError, BusyError, FullError: see `recording.record_saving`.
    """
    rank, record = parse_record(value, subject="user.ckptgate.saved_by")
    if rank < 0 and who.rank is not None:
        rank = who.rank
    row = recording.record_saving(ctx.spool, attempt, rank=rank, record=record)
    # A vote may be all that is still to come.
    ctx.wake()
    return record_writer(ctx, row, who)


def give_up(ctx: Context, attempt: int, value: bytes) -> AttemptRow:
    """A writer gives the attempt up, for all its members; inside a change."""
    reason = value.decode("utf-8", "backslashreplace").strip()
    row = recording.give_up(ctx.spool, attempt, reason)
    ctx.wake()
    _log.info("given-up run=%r name=%r reason=%r", row.run, row.name, reason[:200])
    return row


def commit_explicitly(
    ctx: Context, attempt: int, rank: int | None, world_size: int | None, *, is_all: bool
) -> AttemptRow:
    """A rank, or somebody for all ranks, says that its part is written."""
    try:
        row = record_explicit_commit(
            ctx.spool,
            attempt,
            rank=rank,
            world_size=world_size,
            is_all=is_all,
            now_ns=ctx.clock.now_ns(),
        )
    except CkptError as exc:
        _log.warning("explicit-commit-refused attempt=%d error=%s", attempt, exc)
        raise
    ctx.wake()
    return row


def state_text(ctx: Context, node: NodeRow) -> bytes:
    """The `user.ckptgate.state` attribute: JSON of what is known of the checkpoint.

    Raises:
        MissingError: ENODATA, the node belongs to none.
    """
    row = None if node.attempt is None else ctx.spool.attempt(node.attempt)
    if row is None:
        msg = "this belongs to no checkpoint"
        raise MissingError(msg, errno_value=errno.ENODATA)
    begun = recording.begun_by(ctx.spool, row.id)
    ended = [rank for rank, who in begun.items() if who[0] and not ctx.identify.is_alive(*who)]
    value = {
        "name": row.name,
        "attempt": row.attempt,
        "state": str(row.state),
        "event": row.event,
        "missing": list(row.missing),
        "reason": row.reason,
        "ranks_begun": sorted(begun),
        "ranks_ended": sorted(ended),
        "ranks_committed": list(ctx.spool.rank_commits(row.id)),
    }
    return json.dumps(value, sort_keys=True).encode()
