"""Files of a mount's spool that processes have open by `ckpt://`: an unmount ends them, too.

Owns the rule: they keep a mount as those do that are open by a path. Any thread.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from ckptgate.app.registry import MountInfo
from ckptgate.errors import BusyError
from ckptgate_adapters.fsspec_ckpt.journal import owners_in

__all__ = ["refuse_open_clients"]

_SHOWN: Final = 4


def refuse_open_clients(mount: MountInfo) -> None:
    """Do nothing if no process has a file open by `ckpt://`.

    Raises:
        BusyError: one has; the message says which.
    """
    open_by = Counter(owner.pid for owner in owners_in(mount.spool))
    if not open_by:
        return
    named = [_named(pid) for pid, _ in open_by.most_common(_SHOWN)]
    if len(open_by) > _SHOWN:
        named.append(f"{len(open_by) - _SHOWN} more")
    count = open_by.total()
    files = "1 file is open" if count == 1 else f"{count} files are open"
    msg = f"{mount.mountpoint} is busy: {files} by ckpt:// in {', '.join(named)}"
    hint = "let it close them; --lazy detaches all the same"
    raise BusyError(msg, subject=mount.mountpoint, hint=hint)


def _named(pid: int) -> str:
    if not pid:
        return "a process of another container"
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as stream:
            return f"process {pid} ({stream.read().rstrip()})"
    except OSError:
        return f"process {pid}"
