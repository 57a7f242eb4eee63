"""When a directory changed: making, removing and renaming names moves its times.

Owns the rule how finely: changes within one granule share a time, so that thousands of files are
not thousands of changes of their directory's row. Any thread.
"""

from __future__ import annotations

from ckptgate.ports.spool import NodeRow
from ckptgate.vfs.context import Context

__all__ = ["names_changed"]

_GRANULE_NS = 2_000_000
"""Finer than the clock tick from which local file systems take their times."""


def names_changed(ctx: Context, *directories: NodeRow) -> None:
    """Names in these directories were made or removed just now; inside a change."""
    now = ctx.clock.now_ns()
    for directory in directories:
        older = max(directory.mtime_ns, directory.ctime_ns)
        if not 0 <= now - older < _GRANULE_NS or directory.mtime_ns != directory.ctime_ns:
            ctx.spool.update_node(directory.ino, mtime_ns=now, ctime_ns=now)
