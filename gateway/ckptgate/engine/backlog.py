"""How much waits for the store, counted without asking it: a line for people who look at a service.

Any thread; no state.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptgate.model.states import UNDECIDED, FileState
from ckptgate.ports.spool import PendingKind, Spool

__all__ = ["Backlog", "backlog"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """What is under way.

    Attributes:
        checkpoints: that are neither committed nor given up.
        files, size_bytes: of these, what the store does not have yet.
        plain: changes outside of checkpoints, and whole files.
    """

    checkpoints: int
    files: int
    size_bytes: int
    plain: int


def backlog(spool: Spool) -> Backlog:
    """What waits in this spool now."""
    rows = spool.attempts(states=UNDECIDED)
    files = size = 0
    for row in rows:
        for state, (count, length) in spool.count_files(row.id).items():
            if state is not FileState.STORED:
                files += count
                size += length
    whole = sum(row.kind is PendingKind.WHOLE and row.ino is not None for row in spool.pending())
    return Backlog(
        checkpoints=len(rows),
        files=files,
        size_bytes=size,
        plain=len(spool.plain_ops()) + whole,
    )
