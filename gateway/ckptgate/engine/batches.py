"""Which files are next, and how they are put together: many small ones make one job.

It owns the rule that no pass looks at more files than can be handed out, and that none is
overlooked: a pass goes on where the last one ended, and begins anew at the end.

Thread rule: the publisher's one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from ckptgate.model.states import FileState
from ckptgate.ports.spool import FileRow, NodeRow, Spool

__all__ = ["BATCH_FILES", "Queue", "batches"]

BATCH_FILES: Final = 64
BATCH_BYTES: Final = 8 * 1024 * 1024
"""Files of more bytes are a job of their own, so that large ones go on side by side."""


class Queue:
    """The files of attempts that wait in one state."""

    def __init__(self, spool: Spool, state: FileState) -> None:
        self._spool = spool
        self._state = state
        self._after: dict[int, int] = {}

    def next(self, attempt: int, limit: int) -> list[tuple[str, NodeRow, FileRow]]:
        """Up to *limit* waiting files of the attempt, by file id, from where the last call ended.

        Where it ended is only a matter of speed: it is forgotten with the process.
        """
        if limit <= 0:
            return []
        after = self._after.pop(attempt, 0)
        found = self._spool.waiting_files(attempt, self._state, after=after, limit=limit)
        if len(found) == limit:
            self._after[attempt] = found[-1][2].file
        return found


def batches(files: Iterable[tuple[str, int, int]]) -> Iterator[list[tuple[str, int]]]:
    """Jobs of (path, file id), made of (path, file id, bytes) in the same order."""
    batch: list[tuple[str, int]] = []
    total = 0
    for path, file, size in files:
        if batch and (len(batch) >= BATCH_FILES or total + size > BATCH_BYTES):
            yield batch
            batch, total = [], 0
        batch.append((path, file))
        total += size
    if batch:
        yield batch
