"""The newest checkpoint of a run, as an attribute of its directory.

Owns the rule what "newest" may be told: only what the log, read to its end, says is committed, and
only what the caller's own job has not deleted; no pointer's file is looked at. Any thread.
"""

from __future__ import annotations

import errno
import json

from ckptgate.errors import MissingError
from ckptgate.model.states import UNDECIDED, AttemptState
from ckptgate.ports.spool import NodeKind, NodeRow
from ckptgate.vfs import waits
from ckptgate.vfs.context import Context
from ckptgate.vfs.interface import Caller

__all__ = ["latest_text"]


def latest_text(ctx: Context, caller: Caller, node: NodeRow) -> bytes:
    """JSON: `name` of the newest committed checkpoint or null, and names of `undecided` ones.

    A new job's first question waits for what its predecessors left sealed, as its look-ups do.

    Raises:
        MissingError: ENODATA, the node is no directory in which checkpoints can be.
        TransientStoreError: the store doesn't answer: nobody knows.
    """
    if node.kind is not NodeKind.DIR or node.plain_path is None:
        msg = "this is no directory of checkpoints"
        raise MissingError(msg, errno_value=errno.ENODATA)
    run, who = node.plain_path, ctx.who(caller)
    view = ctx.view(caller, run, max_age_s=0.0)
    view = waits.wait_to_resume(ctx, caller, who, node, view)
    deleted = {
        (stone.name, stone.attempt)
        for stone in ctx.spool.tombstones(run=run)
        if stone.job_key == who.key
    }
    names = (n for n in view.newest if (n, view.committed.get(n, "")) not in deleted)
    undecided = set(view.undecided)
    for row in ctx.spool.attempts(run_ino=node.ino, states=UNDECIDED):
        # Some of its ranks are done: the others' are on their way, or will never come.
        if row.state is AttemptState.SEALED or ctx.spool.rank_commits(row.id):
            undecided.add(row.attempt or row.name)
    value = {"name": next(names, None), "undecided": sorted(undecided)}
    return json.dumps(value).encode()
