"""Which incarnation of a job is the newest in a run: the FENCE of a shared job key.

It owns the rule that a gateway which was away must not fence off who goes on: for an incarnation of
which no process is left no FENCE is appended once another one has begun after it.

Thread rule: any thread of either process.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

from ckptgate.engine.runlog import RunLogs
from ckptgate.model.entries import Entry, Fence
from ckptgate.model.jobkey import JobKey
from ckptgate.model.rules import RunState
from ckptgate.model.states import UNDECIDED
from ckptgate.ports.spool import BEGAN_META, WRITERS_META, AttemptRow, Spool

__all__ = ["OVER", "Incarnations"]

OVER: Final = "its processes were gone before it could be registered, and another job has begun"
"""Why an attempt is given up whose job no other node registers either."""


class Incarnations:
    """The generations of job keys. Any thread.

    Args:
        spool: where attempts are begun.
        logs: the runs' logs.
        is_alive: whether the process with that pid and start still runs; None: nobody can tell.
    """

    def __init__(
        self, *, spool: Spool, logs: RunLogs, is_alive: Callable[[int, int], bool] | None
    ) -> None:
        self._spool = spool
        self._logs = logs
        self._is_alive = is_alive

    def generation(self, row: AttemptRow, key: JobKey) -> int | None:
        """The key's generation in the run; a shared key that is new there appends a FENCE.

        Returns:
            None where it may not: its processes are gone, and another incarnation goes on.

        Raises:
            TransientStoreError, IntegrityError: as `RunLog.append`.
        """
        log = self._logs.get(row.run)
        text = str(key)

        def fence(state: RunState) -> Entry | None:
            if state.generation_of(text) is not None:
                return None
            if self._has_successor(row, state) and self._is_over(row):
                return None
            return Fence(generation=state.generation + 1, job_key=text)

        if key.is_shared:
            log.append(fence)
            return log.look(lambda state: state.generation_of(text))
        return log.refresh().generation

    def hold_back(self, row: AttemptRow) -> AttemptRow:
        """Say in the row why `generation` gave none for it; the row as it is then.

        The job that was registered meanwhile may be the older one, of a node that was slow, and
        other nodes of this one go on: once one of them registers it, this member joins. Else the
        attempt is given up as idle, for this reason.
        """
        with self._spool.transaction():
            now = self._spool.attempt(row.id) or row
            if now.state not in UNDECIDED or now.reason == OVER:
                return now
            return self._spool.update_attempt(row.id, reason=OVER)

    def is_fenced_off(self, run: str, key: JobKey, generation: int) -> bool:
        """Whether a newer incarnation than *generation* has begun in the run."""
        newest = self._logs.get(run).look(lambda state: state.generation)
        return key.is_shared and generation < newest

    def _is_over(self, row: AttemptRow) -> bool:
        """Whether all processes that wrote the attempt are known and gone."""
        if self._is_alive is None:
            return False
        stored = self._spool.get_meta(WRITERS_META.format(attempt=row.id)) or "[]"
        writers: list[tuple[int, int]] = json.loads(stored)
        return bool(writers) and not any(self._is_alive(pid, start) for pid, start in writers)

    def _has_successor(self, row: AttemptRow, state: RunState) -> bool:
        """Whether an incarnation was registered since the attempt began, and is no older one."""
        began = self._spool.get_meta(BEGAN_META.format(attempt=row.id))
        if began is None:
            return False
        earlier = {r.job_key for r in self._spool.attempts(run=row.run) if r.id < row.id}
        return any(
            generation > int(began) and key not in earlier
            for key, generation in state.fences.items()
        )
