"""Recording an explicit commit in the spool: the one place, for the mount and the command line.

A rank (or somebody for all ranks) says that its part of the attempt is written. The rank is kept in
the spool, votes carry it to the other members; once the ranks of the whole job are known here, the
attempt is sealed here. Any thread of any process that has the spool open; one transaction.
"""

from __future__ import annotations

import errno
from typing import Final

from ckptgate.errors import MissingError, RefusedError, UsageError
from ckptgate.model.entries import SealEvent
from ckptgate.model.jobkey import JobKey
from ckptgate.model.states import UNDECIDED, AttemptState
from ckptgate.ports.spool import AttemptRow, Spool

__all__ = ["RANKS_MAX", "check_ranks", "record_explicit_commit"]

RANKS_MAX: Final = 1_000_000
"""No world is larger; a bigger number is a mistake of the caller."""


def record_explicit_commit(
    spool: Spool,
    attempt_id: int,
    *,
    rank: int | None,
    world_size: int | None,
    is_all: bool,
    now_ns: int,
) -> AttemptRow:
    """Record that a rank, or all ranks, committed the attempt explicitly; repeating is harmless.

    Also after the decision: what a job says of its own, committed attempt is so already.

    Args:
        spool: where the attempt is.
        attempt_id: its row.
        rank: which rank says so; None only with *is_all*.
        world_size: how many ranks there are, None where the caller doesn't know.
        is_all: the caller speaks for all ranks of the job.
        now_ns: wall-clock time, ns since the epoch.

    Returns:
        The attempt as it is now.

    Raises:
        UsageError: no rank, an impossible one, or a world size that contradicts an earlier one.
        MissingError: there is no such attempt.
        RefusedError: it is aborted, or not of a job of this node; or the commit would seal a
            checkpoint without a file, and nobody else can add one.
    """
    check_ranks(rank, world_size, is_all=is_all)
    with spool.transaction():
        row = spool.attempt(attempt_id)
        if row is None:
            msg = f"no attempt with row {attempt_id} in this spool"
            raise MissingError(msg, subject=str(attempt_id), hint="ckptgate status")
        if row.state not in UNDECIDED:
            if _came_true(row, rank, world_size):
                return row
            msg = f"attempt {row.attempt or row.name!r} is {row.state}: it can't be committed again"
            raise RefusedError(msg, subject=row.name, hint="ckptgate status")
        changes: dict[str, object] = {}
        known = row.world_size
        if world_size is not None:
            if known is not None and known != world_size:
                msg = f"world size {world_size} contradicts the known one, {known}, of {row.name!r}"
                raise UsageError(msg, subject=row.name)
            changes["world_size"] = known = world_size
        if rank is not None:
            if known is not None and rank >= known:
                msg = f"rank {rank} is not below the world size {known} of {row.name!r}"
                raise UsageError(msg, subject=row.name)
            spool.add_rank_commit(row.id, rank)
        if is_all:
            changes["committed_all"] = True
        if is_all or _is_whole_world(spool.rank_commits(row.id), known):
            _check_content(spool, row)
            changes.update(_seal(row, now_ns))
        return spool.update_attempt(row.id, **changes) if changes else row


def check_ranks(rank: int | None, world_size: int | None, *, is_all: bool) -> None:
    """Refuse ranks that can't be.

    Raises:
        UsageError: no rank where it isn't for all, or an impossible rank or world size.
    """
    if rank is None and not is_all:
        msg = "an explicit commit needs a rank, or has to be for all ranks"
        raise UsageError(msg, hint="ckptgate commit --rank R --world-size W, or --all")
    if world_size is not None and not 0 < world_size <= RANKS_MAX:
        msg = f"world size {world_size} is not between 1 and {RANKS_MAX}"
        raise UsageError(msg, subject=str(world_size))
    if rank is not None and not 0 <= rank < (world_size or RANKS_MAX):
        msg = f"rank {rank} is not between 0 and {(world_size or RANKS_MAX) - 1}"
        raise UsageError(msg, subject=str(rank))


def _came_true(row: AttemptRow, rank: int | None, world_size: int | None) -> bool:
    """Whether the attempt is what this says: committed, and a job's of this node.

    A format's event, or somebody for all ranks, may have come before a rank's own commit. What a
    rank writes after the decision is a revision, and no part of this attempt.
    """
    known = row.world_size
    is_same_world = known is None or (world_size in {None, known} and (rank or 0) < known)
    return row.state is AttemptState.COMMITTED and bool(row.job_key) and is_same_world


def _check_content(spool: Spool, row: AttemptRow) -> None:
    """Refuse to seal nothing: a file can still be added, after the seal it can't.

    Members on other nodes may have files of a shared job.
    """
    if JobKey.parse(row.job_key).is_shared or spool.files_of_attempt(row.id):
        return
    msg = f"{row.name!r} has no file: there is nothing to commit"
    hint = "write its files, then commit"
    raise RefusedError(msg, subject=row.name, hint=hint, errno_value=errno.EINVAL)


def _is_whole_world(ranks: tuple[int, ...], world_size: int | None) -> bool:
    return world_size is not None and set(ranks) >= set(range(world_size))


def _seal(row: AttemptRow, now_ns: int) -> dict[str, object]:
    """The changes that make the attempt sealed here; an event that was seen before stays."""
    changes: dict[str, object] = {"state": AttemptState.SEALED}
    if not row.event:
        changes.update(event=str(SealEvent.EXPLICIT), event_ns=now_ns)
    return changes
