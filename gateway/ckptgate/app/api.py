"""The public Python API: tell the gateway that a rank is done, and wait for the decision.

It speaks to the mount through extended attributes of the checkpoint directory, so it needs nothing
but the path: no socket, no configuration, no import of the gateway's machinery. Any thread.
"""

from __future__ import annotations

import errno
import json
import os
import time
from typing import Any

from ckptgate.errors import PendingError, RefusedError, UsageError
from ckptgate.model.jobkey import rank_from

__all__ = ["COMMIT_XATTR", "STATE_XATTR", "commit", "state", "wait"]

COMMIT_XATTR = "user.ckptgate.commit"
STATE_XATTR = "user.ckptgate.state"


def commit(
    path: str | os.PathLike[str],
    rank: int | None = None,
    world_size: int | None = None,
) -> None:
    """Say that this rank wrote all that it has to write to the checkpoint directory *path*.

    The checkpoint becomes visible once every rank said so and every byte is proved to be in the
    store; this call doesn't wait for that (see `wait`).

    Args:
        path: the checkpoint directory, on a ckptgate mount.
        rank: this process's rank; by default from the launcher's environment.
        world_size: how many ranks there are; likewise. With neither, the call commits for all: a
            program of several processes without a launcher must say which rank it is.

    Raises:
        UsageError: the path isn't a checkpoint on a ckptgate mount, or the numbers are wrong.
    """
    if rank is None and world_size is None:
        known = rank_from(os.environ)
        rank, world_size = known.rank, known.world_size
    if (rank is None) != (world_size is None):
        msg = "rank and world_size belong together"
        raise UsageError(msg, subject=os.fspath(path))
    # An ordinary file system would take the attribute and do nothing about it.
    state(path)
    value = "all" if rank is None else f"{rank}/{world_size}"
    try:
        os.setxattr(path, COMMIT_XATTR, value.encode())
    except OSError as exc:
        if exc.errno in {errno.ENOTSUP, errno.EINVAL, errno.EPERM}:
            msg = f"cannot commit {os.fspath(path)!r} as {value}: {exc.strerror}"
            hint = "name a checkpoint directory on a ckptgate mount; 0 <= rank < world_size"
            raise UsageError(msg, subject=os.fspath(path), hint=hint) from exc
        raise


def state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What is known of the checkpoint: name, attempt, state, reason, missing.

    Raises:
        UsageError: the path isn't a checkpoint on a ckptgate mount.
        FileNotFoundError: it is not there, or not visible to this process.
    """
    return _state(path, os.fspath(path))


def _state(place: str | os.PathLike[str] | int, path: str) -> dict[str, Any]:
    try:
        value = os.getxattr(place, STATE_XATTR)
    except OSError as exc:
        if exc.errno in {errno.ENOTSUP, errno.ENODATA}:
            msg = f"not a checkpoint on a ckptgate mount: {path!r}"
            hint = "is it mounted? ckptgate status lists the mounts"
            raise UsageError(msg, subject=path, hint=hint) from exc
        raise
    found: dict[str, Any] = json.loads(value)
    return found


def wait(path: str | os.PathLike[str], timeout_s: float | None = None) -> None:
    """Return when the checkpoint at *path* is committed.

    Raises:
        RefusedError: it was aborted; the message says why.
        PendingError: *timeout_s* passed.
        UsageError, FileNotFoundError: as `state`.
    """
    # The name of an aborted checkpoint is gone; the open directory still tells why.
    directory = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _wait(directory, os.fspath(path), timeout_s)
    finally:
        os.close(directory)


def _wait(directory: int, path: str, timeout_s: float | None) -> None:
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        found = _state(directory, path)
        if found["state"] in {"committed", "replaced"}:
            return
        if found["state"] in {"aborted", "abandoned"}:
            msg = f"{path} was not committed: {found['reason']}"
            raise RefusedError(msg, subject=path)
        if deadline is not None and time.monotonic() >= deadline:
            missing = "; ".join(found["missing"]) or "not decided yet"
            msg = f"{path} is not committed after {timeout_s} s: {missing}"
            raise PendingError(msg, subject=path, hint="ckptgate status")
        time.sleep(0.05)
