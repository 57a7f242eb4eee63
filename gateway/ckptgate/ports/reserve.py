"""How much room a checkpoint under way will need on the spool's disk: as the one before it took.

It owns that estimate, which is all that can be known when a save begins: a run's checkpoints are
alike. Shared by who makes room (the engine) and who lets callers wait for it (the vfs). Any thread;
no state.
"""

from __future__ import annotations

import os
from typing import Final

from ckptgate.model.layout import data_key, full_key
from ckptgate.model.states import AttemptState, FileState
from ckptgate.ports.spool import AttemptRow, Spool

__all__ = ["expected_bytes", "reserved_bytes"]

_COMMITTED: Final = (AttemptState.COMMITTED, AttemptState.REPLACED)
_BLOCK_BYTES: Final = 512


def expected_bytes(spool: Spool, row: AttemptRow) -> int:
    """What the run's previous committed checkpoint had of this node; 0 where there was none.

    Args:
        spool: this node's.
        row: the attempt that begins. For a revision, which copies nothing, that is nothing.
    """
    if row.base is not None:
        return 0
    before = spool.attempts(run=row.run, states=_COMMITTED)
    # What others wrote and this node only read has no writer here.
    own = [it for it in before if it.id < row.id and it.job_key and it.attempt]
    return _own_bytes(spool, own[-1]) if own else 0


def _own_bytes(spool: Spool, row: AttemptRow) -> int:
    member = spool.get_meta("member") or ""
    anybody, own = (
        full_key(row.run, data_key(row.attempt, name, "")) + "/" for name in ("", member)
    )
    return sum(size for _, size in spool.count_files(row.id, foreign=anybody, own=own).values())


def reserved_bytes(spool: Spool) -> int:
    """What all checkpoints that are being written here will still need."""
    total = 0
    for row in spool.attempts(states=(AttemptState.OPEN,)):
        expected = expected_bytes(spool, row)
        if expected:
            total += max(0, expected - _staged_bytes(spool, row))
    return total


def _staged_bytes(spool: Spool, row: AttemptRow) -> int:
    """What the attempt takes here already; a file that is being written as its disk says."""
    counts = spool.count_files(row.id)
    done = sum(size for state, (_, size) in counts.items() if state is not FileState.OPEN)
    for _, _, file in spool.files_of_attempt(row.id, states=(FileState.OPEN,)):
        try:
            done += os.stat(spool.data_path(file.file)).st_blocks * _BLOCK_BYTES
        except FileNotFoundError:
            continue
    return done
