"""What is undecided in a run on this node, and how its last decisions went; for who waits for it.

It reads the spool alone. A run is a directory that checkpoints were begun in; a directory of runs
stands for all of them. Any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptgate.engine.attempt_status import why_hidden
from ckptgate.errors import MissingError
from ckptgate.model.states import UNDECIDED, AttemptState, is_loss
from ckptgate.ports.spool import AttemptRow, PendingKind, Spool

__all__ = ["run_state"]


def run_state(
    spool: Spool, path: str, *, is_alive: Callable[[int, int], bool] | None = None
) -> dict[str, Any]:
    """As JSON values: `undecided`, a list, and `last`, the newest decided one of each run.

    Args:
        spool: this node's.
        path: of the run or of a directory above, "" for all.
        is_alive: whether the process (pid, start) runs.

    Raises:
        MissingError: no checkpoint was ever begun there on this node.
    """
    rows = [row for row in spool.attempts() if _is_in(row.run, path)]
    is_watched = any(_is_in(run, path) for run in spool.watched_runs())
    if not rows and path and not is_watched:
        msg = f"no checkpoint was begun in {path!r} on this node"
        raise MissingError(msg, subject=path, hint="ckptgate status")
    # What this node has of others' checkpoints only to read is no outcome of its own job.
    decided = {row.run: row for row in rows if _is_outcome(row) and row.job_key}
    undecided = [_told(spool, row, is_alive) for row in rows if row.state in UNDECIDED]
    return {
        "path": path,
        "undecided": [*undecided, *_whole_files(spool, path)],
        "last": [_told(spool, row, is_alive) for row in decided.values()],
    }


def _is_outcome(row: AttemptRow) -> bool:
    """Whether it tells how a save went; what the job itself took away again doesn't."""
    kept = {AttemptState.COMMITTED, AttemptState.REPLACED}
    return row.state in kept or is_loss(row.state, row.reason)


def _is_in(run: str, path: str) -> bool:
    return not path or f"{run}/".startswith(f"{path}/")


def _told(
    spool: Spool, row: AttemptRow, is_alive: Callable[[int, int], bool] | None
) -> dict[str, Any]:
    return {
        "run": row.run,
        "name": row.name,
        "state": str(row.state),
        "reason": row.reason or why_hidden(spool, row, is_alive),
        "missing": list(row.missing),
    }


def _whole_files(spool: Spool, path: str) -> list[dict[str, Any]]:
    """Checkpoints that are one file each and aren't published yet."""
    found: list[dict[str, Any]] = []
    for row in spool.pending():
        if row.kind is not PendingKind.WHOLE or row.ino is None:
            continue
        node = spool.node(row.parent)
        run = "" if node is None else node.plain_path or ""
        if _is_in(run, path):
            found.append(
                {"run": run, "name": row.name, "state": "pending", "reason": "", "missing": []}
            )
    return found
