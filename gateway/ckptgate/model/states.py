"""States of what lies in a spool, and the one function that moves between them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from ckptgate.errors import RefusedError

__all__ = [
    "ATTEMPT_TRANSITIONS",
    "CANCELLED",
    "DELETED",
    "FILE_TRANSITIONS",
    "FSYNC_FAILED",
    "POWER_LOST",
    "REMOVED",
    "RENAMED_OVER",
    "TOO_SPARSE",
    "UNCHANGED",
    "UNDECIDED",
    "WRITE_FAILED",
    "AttemptState",
    "FileState",
    "advance_attempt",
    "advance_file",
    "is_cancelled",
    "is_loss",
    "must_be_rewritten",
]

FSYNC_FAILED: Final = "fsync failed"
POWER_LOST: Final = "power was lost"
WRITE_FAILED: Final = "a write failed"
TOO_SPARSE: Final = "almost nothing was written"
"""How `Evidence.problem` begins for bytes of which nobody can say any more what they are, or that
are too many to be read in any useful time: such a file counts only once it was written again."""


def must_be_rewritten(problem: str) -> bool:
    """Whether *problem*, a file's, says that its present bytes can't be trusted."""
    return problem.startswith((FSYNC_FAILED, POWER_LOST, TOO_SPARSE, WRITE_FAILED))


REMOVED: Final = "removed"
DELETED: Final = "deleted"
UNCHANGED: Final = "nothing was changed in it"
RENAMED_OVER: Final = "replaced by the rename of "
"""Why an attempt was given up (or how that begins) where its own job wanted nothing else."""
CANCELLED: Final = "cancelled by "
"""How the reason begins where a person had it aborted; who that was follows."""


class FileState(enum.StrEnum):
    """How far a file's bytes are on their way."""

    OPEN = "open"
    """A writer has it open, or it was never closed by its writer."""
    QUIET = "quiet"
    """Its writers closed it; it may be digested."""
    DIGESTED = "digested"
    """Digest, chunk digests and evidence are known for its present bytes."""
    STORED = "stored"
    """The store has these bytes, verified there, under the file's key."""


class AttemptState(enum.StrEnum):
    """What this node knows of an attempt."""

    OPEN = "open"
    SEALED = "sealed"
    """A commit event was seen here, or a SEAL is in the log."""
    COMMITTED = "committed"
    ABORTED = "aborted"
    ABANDONED = "abandoned"
    """Never sealed, and can't be any more; kept as evidence."""
    REPLACED = "replaced"
    """Was committed; a newer revision or a RETIRE took its place."""


UNDECIDED: Final = (AttemptState.OPEN, AttemptState.SEALED)
"""What may still be committed."""

FILE_TRANSITIONS: Final[Mapping[FileState, frozenset[FileState]]] = MappingProxyType(
    {
        FileState.OPEN: frozenset({FileState.QUIET}),
        FileState.QUIET: frozenset({FileState.OPEN, FileState.DIGESTED}),
        FileState.DIGESTED: frozenset({FileState.OPEN, FileState.QUIET, FileState.STORED}),
        FileState.STORED: frozenset({FileState.OPEN, FileState.QUIET}),
    }
)

ATTEMPT_TRANSITIONS: Final[Mapping[AttemptState, frozenset[AttemptState]]] = MappingProxyType({
    AttemptState.OPEN: frozenset({
        AttemptState.SEALED, AttemptState.COMMITTED, AttemptState.ABORTED, AttemptState.ABANDONED,
    }),
    AttemptState.SEALED: frozenset({
        AttemptState.COMMITTED, AttemptState.ABORTED, AttemptState.ABANDONED,
    }),
    AttemptState.COMMITTED: frozenset({AttemptState.REPLACED}),
    AttemptState.ABORTED: frozenset(),
    AttemptState.ABANDONED: frozenset(),
    AttemptState.REPLACED: frozenset({AttemptState.COMMITTED}),
})  # fmt: skip


def advance_file(state: FileState, new: FileState) -> FileState:
    """Return *new* if a file may go there from *state* (staying is always legal).

    Raises:
        RefusedError: it may not.
    """
    if new is not state and new not in FILE_TRANSITIONS[state]:
        msg = f"a file that is {state} cannot become {new}"
        raise RefusedError(msg, subject=state)
    return new


def advance_attempt(state: AttemptState, new: AttemptState) -> AttemptState:
    """Return *new* if an attempt may go there from *state* (staying is always legal).

    Raises:
        RefusedError: it may not.
    """
    if new is not state and new not in ATTEMPT_TRANSITIONS[state]:
        msg = f"an attempt that is {state} cannot become {new}"
        raise RefusedError(msg, subject=state)
    return new


def is_loss(state: str, reason: str) -> bool:
    """Whether an attempt in *state*, for *reason*, is a save that was meant to be kept and wasn't.

    A rotation that deletes an old checkpoint file by file begins a revision of it, which ends with
    the deletion: that is no failed save.
    """
    if state not in {AttemptState.ABORTED, AttemptState.ABANDONED}:
        return False
    return reason not in {REMOVED, DELETED, UNCHANGED} and not reason.startswith(RENAMED_OVER)


def is_cancelled(reason: str) -> bool:
    """Whether an attempt that was given up for *reason* ended as a person wanted it to.

    It is no committed save, but nothing that anybody must be alarmed by.
    """
    return reason.startswith(CANCELLED)
